"""Hyperparameter searches: samplers, pruners, seeds, resuming, failed trials and limits."""
import math
import os
import random
import re
import signal
import sys
import time

import pytest
import search_tools
from search_tools import BOWL, TRAINING, parameter, prepared, rows, search, trials

from alfx import gin_utils
from alfx.gin_utils import ConfError
from alfx.search import results
from alfx.search import searching as searching_module
from alfx.search.search_folder import SearchFolder
from alfx.search.searching import Searching
from alfx.search.seeds import run_seed

pytest.importorskip('optuna')
GRID = TRAINING + "Search.sampler = 'grid'\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    """Disable figures, and the pause between polls of a run."""
    monkeypatch.setattr(searching_module, '_POLL_SECONDS', 0.001)
    if 'figure' not in request.node.name:
        monkeypatch.setattr(results, 'draw', lambda *arguments: None)


def searching_of(tmp_path, text, tell=lambda line: None):
    return Searching(prepared(tmp_path, text), str(tmp_path / 'search'), tell)


# Results of searches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_twenty_trials_find_the_basin_of_the_optimum(seed, tmp_path):
    search(tmp_path, BOWL + f'Search.seed = {seed}\n')
    assert len(trials(tmp_path, BOWL + f'Search.seed = {seed}\n')) == 20
    best = max(rows(tmp_path), key=lambda row: float(row['value']))
    # the range is 5 half-widths of the bowl in x and 6 in log10(y): a basin of radius 1 is a tenth of it
    assert float(best['value']) > -1.0
    assert abs(float(best['bowl.x']) - 3) < 4 and abs(math.log10(float(best['bowl.y'])) + 3) < 1


def test_a_score_can_be_minimized(tmp_path):
    searching, _ = search(tmp_path, BOWL + "Search.direction = 'minimize'\nSearch.num_trials = 8\n")
    values = [float(row['value']) for row in rows(tmp_path)]
    assert f'best: {min(values):.6g}' in searching.summary()[0]


@pytest.mark.parametrize('sampler', ['random', 'qmc', 'tpe', 'cmaes', 'gp'])
def test_a_sampler_draws_from_the_space_and_never_twice_the_same(sampler, tmp_path):
    for package in {'qmc': ['scipy'], 'cmaes': ['cmaes'], 'gp': ['scipy']}.get(sampler, []):
        pytest.importorskip(package)
    search(tmp_path, BOWL + f"Search.sampler = '{sampler}'\nSearch.num_trials = 7\n")
    xs = [float(row['bowl.x']) for row in rows(tmp_path)]
    assert len(set(xs)) == 7 and all(-10 <= x <= 10 for x in xs)


def test_the_search_seed_determines_the_sampled_values(tmp_path):
    def xs(name, seed):
        (tmp_path / name).mkdir()
        search(tmp_path / name, BOWL + f'Search.num_trials = 8\nSearch.seed = {seed}\n')
        return [row['bowl.x'] for row in rows(tmp_path / name)]
    assert xs('a', 1) == xs('b', 1) != xs('c', 2)


def test_a_resumed_search_draws_the_same_parameters(tmp_path):
    for name, numbers in (('whole', [9]), ('halves', [4, 9])):
        (tmp_path / name).mkdir()
        for number in numbers:
            search(tmp_path / name, BOWL, [f'Search.num_trials = {number}'])
    assert [row['bowl.x'] for row in rows(tmp_path / 'whole')] == [row['bowl.x'] for row in rows(tmp_path / 'halves')]


def test_a_grid_is_exhaustive_and_in_order(tmp_path):
    text = BOWL.split('Search.space')[0] + """
Search.sampler = 'grid'
Search.space = {'bowl.x': 'integer(1, 3)', 'bowl.y': [1e-3, 1e-2], 'bowl.kind': ['round', 'flat']}
"""
    search(tmp_path, text, ['Search.num_trials = 5'])
    search(tmp_path, text, ['Search.num_trials = 12'])
    found = [(row['bowl.x'], row['bowl.y'], row['bowl.kind']) for row in rows(tmp_path)]
    assert found == [(x, y, kind) for x in '123' for y in ('0.001', '0.01') for kind in ("'round'", "'flat'")]


def test_a_grid_needs_discrete_values(tmp_path):
    with pytest.raises(ConfError, match='(?s)Search.space: bowl.x: .*give a list of values, or a step'):
        search(tmp_path, BOWL + "Search.sampler = 'grid'\n")


def test_an_empty_space_is_repeats_over_seeds(tmp_path):
    text = "import search_functions\nSearch.function = @noise\nSearch.executor = 'inline'\nSearch.num_seeds = 4\n"
    search(tmp_path, text)
    row, = rows(tmp_path)
    expected = [run_seed(0, 0, repeat) for repeat in range(4)]
    assert [int(seed) for seed in row['seeds'].split()] == expected
    assert [float(value) for value in row['values'].split()] == expected  # the values that the runs received
    assert float(row['value']) == pytest.approx(sum(expected) / 4)


def test_sampler_and_pruner_arguments_are_optunas_and_others_are_rejected(tmp_path):
    with pytest.raises(ConfError, match='Search.sampler_arguments: .*TPESampler.*n_startup'):
        search(tmp_path, BOWL + "Search.sampler_arguments = {'n_startup': 3}\n")
    with pytest.raises(ConfError, match="'seed' cannot be set here"):
        search(tmp_path, BOWL + "Search.sampler_arguments = {'seed': 3}\n")
    with pytest.raises(ConfError, match='Search.pruner_arguments: .*MedianPruner'):
        search(tmp_path, BOWL + "Search.pruner = 'median'\nSearch.pruner_arguments = {'warmup': 3}\n")


@pytest.mark.parametrize('module, message', [
    ('optuna', r"pip install 'optuna>="), ('cmaes', 'pip install cmaes'), ('ray', r"pip install 'ray>=")])
def test_a_package_that_is_missing_is_named_with_its_remedy(module, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    extra = {'cmaes': "Search.sampler = 'cmaes'\n", 'ray': "Search.executor = 'ray'\n"}.get(module, '')
    with pytest.raises(ConfError, match=f'(?si){module}.*{message}'):
        search(tmp_path, BOWL.replace("'inline'", "'process'") + extra)


# Seeds, values, failures -----------------------------------------------------------------------------------------


def test_the_runs_of_all_trials_have_different_seeds(tmp_path):
    seeds = []

    def play(run):
        seeds.append(parameter(run, 'TrainerConfig.random_seed'))
        yield 1.0
    search(tmp_path, GRID + 'Search.num_seeds = 3\nSearch.num_parallel = 4\n', play=play)
    assert sorted(seeds) == sorted(run_seed(0, trial, repeat) for trial in range(6) for repeat in range(3))
    assert len(set(seeds)) == 18


@pytest.mark.parametrize('settings, expected', [
    ("'last'", 4.0), ("'best'", 9.0), ("'mean'", 5.0), ("'mean'\nSearch.score_window = 2", 3.0),
    ("'best'\nSearch.direction = 'minimize'", 2.0)])
def test_the_score_of_a_run_follows_the_conf(settings, expected, tmp_path):
    def play(run):
        yield from (100.0 if 'last' not in settings and 'best' not in settings else 5.0, 5.0, 9.0, 5.0, 2.0, 4.0)
    search(tmp_path, TRAINING + f'Search.score = {settings}\nSearch.num_trials = 1\n', play=play)
    assert float(rows(tmp_path)[0]['value']) == expected


def test_a_failed_trial_keeps_its_log_tail_and_the_search_continues(tmp_path):
    text = BOWL.split('Search.function')[0] + """
Search.function = @picky
Search.executor = 'inline'
Search.sampler = 'grid'
Search.space = {'picky.x': 'integer(0, 5)'}
"""
    _, lines = search(tmp_path, text)
    found = [(row['state'], row['value'], row['log tail']) for row in rows(tmp_path)]
    assert found[0] == ('complete', '0.0', '') and found[2] == ('complete', '2.0', '')
    assert found[1] == ('failed', '', 'ValueError: 1 does not please')
    assert found[4] == ('failed', '', 'the value is nan')
    assert any('trial 3: failed: ValueError: 3 does not please' in line for line in lines)


def test_a_search_stops_with_the_reason_if_its_first_trials_all_fail(tmp_path):
    text = BOWL.split('Search.function')[0] + """
Search.function = @picky
Search.executor = 'inline'
Search.sampler = 'grid'
Search.space = {'picky.x': 'integer(0, 50)'}
picky.first = 40
"""
    with pytest.raises(ConfError, match='the first 3 trials have all failed, the last with: ValueError: 2 does not'):
        search(tmp_path, text)
    assert [row['state'] for row in rows(tmp_path)] == ['failed'] * 3
    assert 'no completed trial' in (tmp_path / 'search' / 'results.md').read_text()
    assert not (tmp_path / 'search' / 'best.gin').exists()


def test_a_trial_without_a_numeric_result_fails(tmp_path):
    text = "import search_functions\nSearch.function = @nothing\nSearch.executor = 'inline'\n"
    with pytest.raises(ConfError, match='must return a number, but returned None'):
        search(tmp_path, text + 'Search.give_up_after = 1\n')


def test_a_run_that_never_evaluated_or_has_no_such_column_fails(tmp_path):
    def play(run):
        if parameter(run) > 1:
            yield 1.0
        yield None
    with pytest.raises(ConfError, match='the run was never evaluated'):
        search(tmp_path, GRID + 'Search.give_up_after = 1\n', play=play)
    (tmp_path / 'b').mkdir()
    with pytest.raises(ConfError, match="has no column 'average_retrun'; did you mean 'average_return'"):
        search(tmp_path / 'b', GRID + "Search.measure = 'average_retrun'\nSearch.give_up_after = 2\n", play=play)


def test_when_one_seed_fails_the_others_of_its_trial_are_stopped(tmp_path):
    def play(run):
        if parameter(run) == 2 and run.repeat == 1:
            return 1
        for value in range(4 if parameter(run) != 2 else 1000):
            yield value
        return 0
    search(tmp_path, GRID + 'Search.num_seeds = 2\nSearch.num_parallel = 2\n', play=play)
    assert [row['state'] for row in rows(tmp_path)] == ['complete', 'failed'] + ['complete'] * 4
    assert rows(tmp_path)[1]['log tail'] == 'ValueError: played to fail'


def test_a_run_ended_by_a_signal_is_resumed_but_not_repeatedly(tmp_path):
    starts = []

    def play(run):
        starts.append(run.trial)
        yield 1.0
        return 128 + signal.SIGTERM if run.trial == 1 or starts.count(run.trial) < 3 and run.trial == 0 else 0
    search(tmp_path, GRID + 'Search.num_trials = 3\n', play=play)
    assert [row['state'] for row in rows(tmp_path)] == ['complete', 'failed', 'complete']
    assert starts == [0, 0, 0, 1, 1, 1, 1, 2]


def test_a_timed_out_run_is_stopped_and_its_last_score_counts(tmp_path):
    def play(run):
        yield 7.0
        while True:
            yield None
    search(tmp_path, GRID + 'Search.num_trials = 2\nSearch.num_parallel = 2\nSearch.run_seconds = 0.3\n', play=play)
    assert [(row['state'], row['value']) for row in rows(tmp_path)] == [('complete', '7.0')] * 2
    assert all(float(row['seconds']) >= 0.3 for row in rows(tmp_path))


def test_a_timed_out_search_stops_and_resumes_with_more_time(tmp_path):
    def play(run):
        yield 1.0
        while run.trial == 1 and not (tmp_path / 'later').exists():
            yield None
    _, lines = search(tmp_path, GRID, ['Search.total_seconds = 0.5'], play)
    assert any('the time limit of 0.5 s is reached' in line for line in lines)
    assert [row['state'] for row in rows(tmp_path)] == ['complete', 'running']
    (tmp_path / 'later').touch()
    _, lines = search(tmp_path, GRID, ['Search.total_seconds = 60'], play)
    assert '1 of 6 trials have ended, 1 were running' in lines[0]
    assert [row['state'] for row in rows(tmp_path)] == ['complete'] * 6


def test_the_time_limit_ends_a_search_in_this_process(tmp_path):
    text = BOWL + f"Search.num_trials = 1000\nbowl.gate = '{tmp_path}/gate'\nSearch.total_seconds = 0.2\n"
    (tmp_path / 'gate').touch()
    _, lines = search(tmp_path, text)
    assert any('the time limit of 0.2 s is reached' in line for line in lines)
    assert 0 < len(rows(tmp_path)) < 1000


# Pruning ---------------------------------------------------------------------------------------------------------

CLIMB = """
import search_functions
Search.function = @climb
Search.executor = 'inline'
Search.sampler = 'grid'
Search.space = {'climb.slope': [5.0, 4.0, 3.0, 6.0, 1.0, 2.0, 7.0]}
Search.pruner = 'median'
Search.pruner_arguments = {'n_startup_trials': 3, 'n_warmup_steps': 2}
"""


def test_the_median_pruner_ends_trials_below_the_median_at_their_step(tmp_path):
    search(tmp_path, CLIMB + f"climb.journal = '{tmp_path}/journal'\n")
    states = {row['climb.slope']: row['state'] for row in rows(tmp_path)}
    assert [slope for slope, state in states.items() if state == 'pruned'] == ['1.0', '2.0']
    steps = [line.split()[1] for line in (tmp_path / 'journal').read_text().splitlines() if line.startswith('1.0')]
    assert steps == ['1', '2']  # where the warm-up ends
    assert rows(tmp_path)[4]['value'] == '2.0'  # what was reported last


@pytest.mark.parametrize('pruner', ['percentile', 'successive_halving', 'hyperband'])
def test_a_pruner_ends_some_trials_and_never_the_best(pruner, tmp_path):
    text = CLIMB.split('Search.pruner')[0] + f"Search.pruner = '{pruner}'\n"
    if pruner == 'hyperband':
        text += "Search.pruner_arguments = {'max_resource': 10}\n"
    text = text.replace('[5.0, 4.0, 3.0, 6.0, 1.0, 2.0, 7.0]', str([float(20 - i) for i in range(16)]))
    search(tmp_path, text)
    states = [row['state'] for row in rows(tmp_path)]
    assert states[0] == 'complete' and 'pruned' in states


def test_a_training_run_is_pruned_while_it_runs_and_all_its_seeds_with_it(tmp_path):
    steps = []

    def play(run):
        for step in range(1, 9):
            steps.append((run.trial, run.repeat, step))
            yield step * (7.0 - parameter(run))
    text = GRID + "Search.num_seeds = 2\nSearch.num_parallel = 2\nSearch.pruner = 'median'\n"
    search(tmp_path, text + "Search.pruner_arguments = {'n_startup_trials': 2, 'n_warmup_steps': 1}\n", play=play)
    assert [row['state'] for row in rows(tmp_path)] == ['complete'] * 2 + ['pruned'] * 4
    assert max(step for trial, _, step in steps if trial == 3) <= 4


# Killed, stopped, two at once --------------------------------------------------------------------------------------


def fork_and_run(work):
    """Run a function in a forked process; return the process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def ended(pid, seconds=60.0):
    """Wait for a process, and kill it after a timeout; return its exit code."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f'it took longer than {seconds} s')


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, 'nothing happened'
        time.sleep(0.002)


def test_kills_and_resumes_neither_lose_nor_repeat_trials(tmp_path):
    text = BOWL + f"Search.num_trials = 40\nbowl.journal = '{tmp_path}/journal'\n"
    study_file, generator = tmp_path / 'search' / 'search' / 'study.log', random.Random(0)

    def size():
        return study_file.stat().st_size if study_file.exists() else 0

    def work():
        with SearchFolder(str(tmp_path / 'search')).locked():
            search(tmp_path, text)

    before, kills = [], 0
    while kills < 6:
        min_size = size() + generator.randrange(6000)
        pid = fork_and_run(work)
        wait_until(lambda min_size=min_size: size() > min_size)
        time.sleep(generator.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        kills += 1
        now = trials(tmp_path, text)
        for old, new in zip(before, now):
            assert new.number == old.number and new.params.items() >= old.params.items()
            if old.state.is_finished():
                assert new.state == old.state and new.value == old.value
        before = now
    assert 0 < sum(trial.state.is_finished() for trial in before) < 40
    search(tmp_path, text)
    after = trials(tmp_path, text)
    assert [trial.number for trial in after] == list(range(40))
    assert {trial.state.name for trial in after} == {'COMPLETE'}
    assert len({trial.params['bowl.x'] for trial in after}) == 40
    lines = (tmp_path / 'journal').read_text().splitlines()
    calls = [line.split()[1:4] for line in lines if line.startswith('end')]
    # a call that was not recorded before the kill is repeated under the same number
    assert len(calls) <= 40 + kills
    for number, trial in enumerate(after):
        expected = [repr(trial.params['bowl.x']), repr(trial.params['bowl.y']), str(run_seed(0, number, 0))]
        assert calls.count(expected) >= 1
    assert {call[2] for call in calls} == {str(run_seed(0, number, 0)) for number in range(40)}


def test_a_trial_that_has_ended_is_never_called_again(tmp_path):
    text = BOWL + f"bowl.journal = '{tmp_path}/journal'\n"
    for number in (3, 3, 5):
        search(tmp_path, text, [f'Search.num_trials = {number}'])
    assert sum(line.startswith('begin') for line in (tmp_path / 'journal').read_text().splitlines()) == 5


def test_a_written_but_unregistered_result_is_used(tmp_path):
    text = BOWL + f"bowl.journal = '{tmp_path}/journal'\n"

    class KilledError(BaseException):
        pass
    searching = searching_of(tmp_path, text)
    searching._measure.final = lambda root_dir: (_ for _ in ()).throw(KilledError)
    with pytest.raises(KilledError):
        searching.run()
    assert [trial.state.name for trial in trials(tmp_path, text)] == ['RUNNING']
    search(tmp_path, text, ['Search.num_trials = 1'])
    assert [trial.state.name for trial in trials(tmp_path, text)] == ['COMPLETE']
    assert sum(line.startswith('begin') for line in (tmp_path / 'journal').read_text().splitlines()) == 1


def test_a_study_with_a_truncated_last_line_resumes(tmp_path):
    search(tmp_path, BOWL, ['Search.num_trials = 3'])
    study_file = tmp_path / 'search' / 'search' / 'study.log'
    study_file.write_bytes(study_file.read_bytes() + b'{"op_code":4,"worker_')
    search(tmp_path, BOWL, ['Search.num_trials = 4'])
    assert [trial.state.name for trial in trials(tmp_path)] == ['COMPLETE'] * 4


def test_a_folder_with_a_running_search_is_rejected_until_the_search_ends(tmp_path):
    folder, gate = SearchFolder(str(tmp_path / 'search')), tmp_path / 'held'

    def hold():
        with folder.locked():
            gate.touch()
            time.sleep(120)
    pid = fork_and_run(hold)
    try:
        wait_until(gate.exists)
        with pytest.raises(ConfError, match=f'search is running in {tmp_path}/search: process {pid} on '):
            with folder.locked():
                pass
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)
    with folder.locked():
        pass


@pytest.mark.parametrize('change, message', [
    ("bowl.kind = 'flat'", "bowl.kind is 'flat', but the hyperparameter search in .* has not set"),
    ('Search.seed = 3', 'Search.seed is 3, but the hyperparameter search in .* has not set'),
    ("Search.sampler = 'random'", 'Search.sampler'), ('Search.num_seeds = 2', 'Search.num_seeds')])
def test_another_search_in_the_same_folder_is_rejected(change, message, tmp_path):
    search(tmp_path, BOWL, ['Search.num_trials = 2'])
    with pytest.raises(ConfError, match=message):
        search(tmp_path, BOWL, ['Search.num_trials = 3', change])


# Results ---------------------------------------------------------------------------------------------------------


def test_the_best_conf_is_complete_and_holds_the_best_values_once(tmp_path):
    text = BOWL + "bowl.x = 100.0\nbowl.kind = 'round'\n"
    search(tmp_path, text, ['Search.num_trials = 6'])
    best = max(rows(tmp_path), key=lambda row: float(row['value']))
    with gin_utils.loaded(str(tmp_path / 'search' / 'best.gin')) as conf:
        found = {binding.text.split('.', 1)[-1]: repr(binding.value) for binding in conf.bindings}
    assert found == {'bowl.kind': "'round'", 'x': best['bowl.x'], 'y': best['bowl.y']} or found == {
        'kind': "'round'", 'x': best['bowl.x'], 'y': best['bowl.y']}
    assert '100.0' not in (tmp_path / 'search' / 'best.gin').read_text()


def test_the_table_lists_complete_trials_from_the_best_down(tmp_path):
    search(tmp_path, CLIMB)
    lines = [line for line in (tmp_path / 'search' / 'results.md').read_text().splitlines() if line.startswith('| ')]
    assert lines[0].startswith('| trial | state | value | climb.slope')
    assert [line.split(' | ')[3] for line in lines[2:]] == ['7.0', '6.0', '5.0', '4.0', '3.0', '2.0', '1.0']
    assert [line.split(' | ')[1] for line in lines[2:]] == ['complete'] * 5 + ['pruned'] * 2


def test_a_figure_and_the_differences_of_trials_are_written(tmp_path):
    text = BOWL.replace('}', ", 'bowl.kind': ['round', 'flat']}")
    searching_of(tmp_path, text)._results.write()  # while no trial has a value
    assert not (tmp_path / 'search' / 'plot.png').exists()
    search(tmp_path, text, ['Search.num_trials = 3'])
    assert (tmp_path / 'search' / 'plot.png').read_bytes()[:4] == b'\x89PNG'
    lines = (tmp_path / 'search' / 'trials' / '0002' / 'params.gin').read_text().splitlines()
    assert [line.split(' = ')[0] for line in lines] == ['bowl.x', 'bowl.y', 'bowl.kind']


def test_running_trials_are_logged_when_nothing_else_is(tmp_path, monkeypatch):
    monkeypatch.setattr(searching_module, '_QUIET_SECONDS', 0.0)

    def play(run):
        yield 3.5
        yield None
    _, lines = search(tmp_path, GRID + 'Search.num_trials = 2\nSearch.num_parallel = 2\n', play=play)
    assert any(re.fullmatch(r'running: trial 0 at 3.5 \(0 s\), trial 1 at 3.5 \(0 s\)', line) for line in lines)


def test_a_run_waiting_for_resources_does_not_time_out(tmp_path, monkeypatch):
    start = search_tools.SimulatedExecutor.start

    def queued(self, run, wants_to_stop):
        execution = start(self, run, wants_to_stop)
        execution.is_queued = True
        return execution

    def play(run):
        for _ in range(200):
            yield None
        yield 1.0
    monkeypatch.setattr(search_tools.SimulatedExecutor, 'start', queued)
    search(tmp_path, GRID + 'Search.num_trials = 1\nSearch.run_seconds = 0.1\n', play=play)
    assert rows(tmp_path)[0]['state'] == 'complete'


def test_an_unused_binding_is_reported_once(tmp_path):
    def play(run):
        os.makedirs(f'{run.root_dir}/conf')
        with open(f'{run.root_dir}/conf/operative.gin', 'w') as file:
            file.write('a.b = 1\n\n# Not used so far:\n# ===\nalfx.algorithms.config.TrainerConfig.unroll_length = 1\n')
        yield 1.0
    _, lines = search(tmp_path, GRID + 'Search.num_trials = 3\n', play=play)
    assert sum('trial 0 has not used TrainerConfig.unroll_length' in line for line in lines) == 1
    assert sum('has not used' in line for line in lines) == 1
