"""The tool that records results: bars, rows, pages and figures."""
import dataclasses
import json
import pathlib

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import results
    return results


def a_run(returns, seconds=60.0):
    return {'returns': returns, 'env_steps': 1000, 'seconds': seconds, 'jobs': 2, 'cores': 2, 'date': '2026-01-02',
            'versions': {'alfx': '0.1', 'torch': '2.13', 'gymnasium': None}}


def a_task(results, fingerprint='f', required=10.0, measure='return', at_most=False):
    return results.Task('some_conf', 'some_conf', 'Some-v1', (results.Bar(measure, required, at_most), ), fingerprint)


def only_row(results, store):
    row, = results.rows_of('some_conf', store.confs['some_conf'])
    return row


@pytest.mark.parametrize('head,measure,required', [
    ('#   expected  evaluation return 500\n', 'return', 500.0),
    ('#   expected  evaluation return -170 +- 30\n', 'return', -200.0),
    ('#   expected  evaluation return 2,500 +- 1,000\n', 'return', 1500.0),
    ('#   expected  evaluation return 20.7 (the paper); not run to the end on 2 cores\n', 'return', 20.7),
    ('#   expected  success 0.97 +- 0.02\n', 'success', 0.95),
    ('#   expected  arm.distance@min 0.125 (metres)\n', 'arm.distance@min', 0.125),
    ('#   expected  the success of 0.5 of all\n', 'return', None),
    ('#   nothing of the kind\n', 'return', None)])
def test_the_requirement_is_the_lower_end_of_the_stated_range(results, head, measure, required):
    found, = results.stated_results('# A conf\n' + head + "include 'ppo.gin'\n")
    assert found.measure == measure and not found.at_most
    assert found.required == (None if required is None else pytest.approx(required))


@pytest.mark.parametrize('text, required', [('at most 0.012', 0.012), ('at most -1,000 (a cost)', -1000.0),
                                            ('at most 0.01 +- 0.002', 0.012)])
def test_where_less_is_better_the_upper_end_is_required(results, text, required):
    found, = results.stated_results(f'# A conf\n#   expected  repr/reconstruction {text}\n')
    assert (found.measure, found.at_most) == ('repr/reconstruction', True)
    assert found.required == pytest.approx(required)


def test_a_mean_above_the_required_maximum_fails(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    task = a_task(results, required=1.5, at_most=True)
    store.add(task, 0, a_run([1.0]))
    assert only_row(results, store)[8:11] == ['1', 'at most 1.5', 'reached']
    store.add(task, 1, a_run([3.0]))
    assert only_row(results, store)[6] == '2' and only_row(results, store)[8:11] == ['3', 'at most 1.5', 'missed']


def test_a_conf_that_states_several_results_has_several_rows(results, tmp_path):
    head = '#   expected  repr/elbo 8 +- 1.5: nats\n#   expected  repr/reconstruction at most 0.012\n'
    bars = results.stated_results(head)
    assert bars == (results.Bar('repr/elbo', 6.5), results.Bar('repr/reconstruction', 0.012, True))
    store = results.Store(tmp_path / 'results.json')
    store.add(results.Task('some_conf', 'some_conf', 'Some-v1', bars, 'f'), 0,
              {**a_run([0.0]), 'env_info': {'repr/elbo': [7.0], 'repr/reconstruction': [0.02]}})
    rows = results.rows_of('some_conf', results.Store(tmp_path / 'results.json').confs['some_conf'])
    assert [[row[5], row[6], *row[9:11]] for row in rows] == [
        ['repr/elbo', '7', '6.5', 'reached'], ['repr/reconstruction', '0.02', 'at most 0.012', 'missed']]


def test_a_changed_header_comment_is_adopted_without_new_runs(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    store.add(a_task(results, required=10.0), 0, a_run([9.0]))
    store.restate(a_task(results, fingerprint='another', required=8.0))
    assert only_row(results, store)[9:11] == ['10', 'missed']
    store.restate(a_task(results, required=8.0))
    assert only_row(results, results.Store(tmp_path / 'results.json'))[9:11] == ['8', 'reached']


def test_results_with_a_single_requirement_can_still_be_read(results):
    entry = {'env_name': 'Some-v1', 'required': 0.5, 'measure': 'success',
             'runs': {'0': {**a_run([1.0]), 'env_info': {'success': [0.75]}}}}
    row, = results.rows_of('some_conf', entry)
    assert (row[5], row[6], row[9], row[10]) == ('success', '0.75', '0.5', 'reached')


def test_a_row_is_over_the_means_of_seeds(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    # means of the seeds 10 and 20: mean 15, and the interval is 15 +- 12.706 * 5, as t(0.975, 1) = 12.706
    store.add(a_task(results), 1, a_run([5.0, 15.0]))
    store.add(a_task(results), 0, a_run([20.0, 20.0]))
    row = only_row(results, store)
    assert row[:10] == ['`some_conf`', 'Some-v1', '1,000', '2', '60 s, 2 on 2 cores', 'return', '15',
                        '-48.531 to 78.531', '10', '10']
    assert row[10:] == ['reached', '2026-01-02', 'alfx 0.1, torch 2.13', '']


def test_a_row_has_the_updates_per_second_of_the_median_run(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    store.add(a_task(results), 0, a_run([10.0]))  # an old run without a number of updates
    for seed, updates in enumerate([600, 6000, 60_000], start=1):
        store.add(a_task(results), seed, {**a_run([10.0]), 'updates': updates})
    assert only_row(results, store)[-1] == '100'
    results.write_table(store.confs, tmp_path / 'results.md')
    page = (tmp_path / 'results' / 'other.md').read_text()
    assert '| wall time | updates/s | date |' in page and '| 60 s, 2 on 2 cores | 100 | 2026-01-02 |' in page


def test_a_mean_below_the_requirement_fails(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    store.add(a_task(results, required=10.5), 0, a_run([10.0]))
    assert only_row(results, store)[10] == 'missed'


def test_results_stored_concurrently_by_another_process_are_kept(results, tmp_path):
    stores = [results.Store(tmp_path / 'results.json') for _ in range(2)]
    for seed, store in enumerate(stores):
        store.add(a_task(results), seed, {**a_run([1.0]), 'curve': [[1, 2.0]]})
    both = results.Store(tmp_path / 'results.json')
    assert list(both.confs['some_conf']['runs']) == list(both.curves['some_conf']['runs']) == ['0', '1']


def test_stored_results_are_reused_until_the_conf_changes(results, tmp_path):
    results.Store(tmp_path / 'results.json').add(a_task(results), 0, a_run([1.0]))
    store = results.Store(tmp_path / 'results.json')
    assert store.is_done(a_task(results), 0)
    assert not store.is_done(a_task(results), 1)
    assert not store.is_done(a_task(results, fingerprint='g'), 0)
    store.add(a_task(results, fingerprint='g'), 1, a_run([2.0]))
    assert list(json.loads((tmp_path / 'results.json').read_text())['some_conf']['runs']) == ['1']
    assert '| `some_conf` |' in (tmp_path / 'results' / 'other.md').read_text()


def test_the_conf_fingerprint_depends_on_bindings_and_not_on_comments(results, tmp_path):
    def task(name, text):
        (tmp_path / name).write_text(text)
        return results.read_task(str(tmp_path / name))

    first = task('a.gin', "include 'ppo_cart_pole.gin'\n")
    assert task('b.gin', "# the same\ninclude 'ppo_cart_pole.gin'\n").fingerprint == first.fingerprint
    assert task('c.gin', "include 'ppo_cart_pole.gin'\nppo/Adam.lr = 1e-4\n").fingerprint != first.fingerprint
    assert (first.name, first.env_name) == ('a', 'CartPole-v1')


def test_vector_returns_count_by_their_sum(results):
    entry = {'env_name': 'Some-v1', 'required': None, 'runs': {'0': a_run([[1.0, 2.0], [3.0, 4.0]])}}
    assert results.rows_of('some_conf', entry)[0][6] == '5'


def test_a_conf_may_state_an_environment_metric_instead_of_the_return(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    task = a_task(results, required=0.9, measure='success')
    store.add(a_task(results), 0, a_run([-10.0]))
    assert not store.is_done(task, 0), 'the run has no success rate'
    store.add(task, 1, {**a_run([-2.0, -4.0]), 'env_info': {'success': [1.0, 0.0]}})
    store.add(task, 2, {**a_run([-2.0, -4.0]), 'env_info': {'success': [1.0, 1.0]}})
    assert store.is_done(task, 1) and list(store.confs['some_conf']['runs']) == ['1', '2']
    row = only_row(results, store)
    assert (row[5], row[6], row[8], row[9], row[10]) == ('success', '0.75', '0.5', '0.9', 'missed')
    assert '| success | 0.75 |' in (tmp_path / 'results' / 'other.md').read_text()


def test_an_unknown_environment_metric_raises_with_the_known_ones(results, tmp_path, monkeypatch):
    evaluation = {'epsilon_greedy=0': {'returns': [1.0], 'env_info': {'distance': [0.5]}, 'measures': {}}}

    def run(arguments, log, threads):
        folder = tmp_path / 'some_conf-f' / 'seed-0' / 'conf'
        folder.mkdir(parents=True, exist_ok=True)
        (folder / 'versions.json').write_text('{}')
        (folder.parent / 'progress.csv').write_text('env_steps,seconds\n10,1.5\n')
        return json.dumps(evaluation)

    monkeypatch.setattr(results, '_run', run)
    task = a_task(results, required=0.9, measure='success')
    with pytest.raises(RuntimeError, match=r"some_conf states 'success', but evaluation gives \['distance'\]"):
        results.train_and_evaluate(task, 0, tmp_path, 1, 1)
    evaluation['epsilon_greedy=0']['env_info']['success'] = [1.0]
    assert results.train_and_evaluate(task, 0, tmp_path, 1, 1)['env_info']['success'] == [1.0]
    del evaluation['epsilon_greedy=0']['env_info']['success']
    evaluation['epsilon_greedy=0']['measures']['success'] = [0.5]
    assert results.train_and_evaluate(task, 0, tmp_path, 1, 1)['env_info']['success'] == [0.5]


def test_a_conf_is_evaluated_with_its_epsilon_which_the_table_shows(results, tmp_path, monkeypatch):
    command = []

    def run(arguments, log, threads):
        command.extend(arguments)
        folder = tmp_path / 'some_conf-f' / 'seed-0' / 'conf'
        folder.mkdir(parents=True, exist_ok=True)
        (folder / 'versions.json').write_text('{}')
        (folder.parent / 'progress.csv').write_text('env_steps,seconds\n10,1.5\n')
        return json.dumps({'epsilon_greedy=0.1': {'returns': [1.0], 'env_info': {}, 'measures': {}}})

    monkeypatch.setattr(results, '_run', run)
    task = dataclasses.replace(a_task(results), epsilon_greedy=0.1)
    stored = results.train_and_evaluate(task, 0, tmp_path, 1, 1)
    assert command[command.index('--epsilon_greedy') + 1] == '0.1' and 'TrainerConfig.compile=True' not in command
    row, = results.rows_of('some_conf', {'env_name': 'Task', 'bars': [{}], 'runs': {'0': stored}})
    assert row[5] == 'return, epsilon 0.1' and row[4].endswith(' cores')
    stored = results.train_and_evaluate(task, 0, tmp_path, 1, 1, compile=True)
    row, = results.rows_of('some_conf', {'env_name': 'Task', 'bars': [{}], 'runs': {'0': stored}})
    assert row[4].endswith(' cores, compiled') and 'TrainerConfig.compile=True' in command and '--device' not in command
    monkeypatch.setattr(results.torch.cuda, 'get_device_name', lambda device: f'GPU {device}')
    stored = results.train_and_evaluate(task, 0, tmp_path, 1, 1, device='cuda:1')
    row, = results.rows_of('some_conf', {'env_name': 'Task', 'bars': [{}], 'runs': {'0': stored}})
    assert row[4].endswith(' cores and a GPU (GPU cuda:1)') and command[command.index('--device') + 1] == 'cuda:1'
    assert results.read_task('ppo_rnd_minigrid_doorkey_8x8').epsilon_greedy == 0.1
    assert results.read_task('ppo_cart_pole').epsilon_greedy == 0


def test_offline_runs_are_measured_in_updates_and_may_state_a_score(results, tmp_path, monkeypatch):
    """Length of a purely offline run is its number of updates; its conf may state a score."""
    def run(arguments, log, threads):
        folder = tmp_path / 'some_conf-f' / 'seed-0' / 'conf'
        folder.mkdir(parents=True, exist_ok=True)
        (folder / 'versions.json').write_text('{}')
        (folder.parent / 'progress.csv').write_text('iteration,env_steps,seconds,train/updates\n199,0,1.5,20000\n')
        return json.dumps({'epsilon_greedy=0': {'returns': [-200.0], 'env_info': {}, 'measures': {},
                                                'normalized_score': 90.0}})

    monkeypatch.setattr(results, '_run', run)
    task = dataclasses.replace(a_task(results, required=85.0, measure='normalized_score'),
                               datasets=('pendulum/replay', ), updates_per_iteration=100)
    stored = results.train_and_evaluate(task, 0, tmp_path, 1, 1)
    assert stored['env_steps'] == stored['updates'] == 20000
    assert results.mean_over_episodes(stored, 'normalized_score') == 90.0
    iql = results.read_task('iql_finetune_pendulum')
    assert (iql.datasets, iql.updates_per_iteration) == (('pendulum/replay', ), 100)


def test_a_new_result_draws_only_the_figures_of_its_conf_and_task(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    other = dataclasses.replace(a_task(results), name='other_conf', env_name='Other-v1')
    for task in (a_task(results), other):
        store.add(task, 0, {**a_run([1.0]), 'curve': [[1, 2.0], [2, 3.0]]})
    figures = [tmp_path / 'images' / name for name in ('curves/some_conf.svg', 'results/Some-v1.svg',
                                                       'curves/other_conf.svg', 'results/Other-v1.svg')]
    for picture in figures:
        picture.unlink()
    store.add(other, 1, {**a_run([1.0]), 'curve': [[1, 2.0], [2, 3.0]]})
    assert [picture.exists() for picture in figures] == [False, False, True, True]
    assert (tmp_path / 'results' / 'other.md').read_text().count('](../images/results/') == 2
    store.write()
    assert all(picture.exists() for picture in figures)


def test_games_of_minatar_are_named_with_their_suite(results):
    pytest.importorskip('minatar')
    assert results.read_task('pqn_minatar_breakout').env_name == 'MinAtar breakout'


def test_a_suite_has_a_row_for_each_algorithm_and_a_column_for_each_task(results):
    from suites import Suite, suite_table
    runs = {str(seed): a_run([value]) for seed, value in enumerate([1.0, 2.0, 30.0, 4.0])}
    stored = {'dqn_one': {'env_name': 'One-v1', 'runs': runs},
              'ppo_two': {'env_name': 'Two-v1', 'runs': {'0': {**a_run([15_414.2]), 'env_steps': 1_000_250}}},
              'ppo_three': {'env_name': 'Three-v1', 'runs': runs}}
    suite = Suite('Some', {'one': 'One-v1', 'two': 'Two-v1', 'four': 'Four-v1'}, 'A note.')
    lines = suite_table(suite, stored, lambda run: results.mean_over_episodes(run, 'return')).splitlines()
    assert lines[:5] == ['## Some: all algorithms', '', 'A note.', '', '| algorithm | One | Two |']
    assert lines[6].startswith('| `dqn` | 3 [1') and lines[6].endswith('<br>4 x 1k |  |')  # IQM: the mean of 2 and 4
    assert lines[7:] == ['| `ppo` |  | 15,414<br>1 x 1M |']
    assert suite_table(Suite('None', {'none': 'None-v1'}), stored, len) == ''


def test_each_family_of_tasks_has_a_page_that_the_overview_links(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    for name, env_name in (('a', 'InvertedPendulum-v5'), ('b', 'Pendulum-v1'), ('c', 'PongNoFrameskip-v4'),
                           ('d', 'MinAtar breakout'), ('e', 'Corridor'), ('f', '@load_digits')):
        store.add(dataclasses.replace(a_task(results), name=name, env_name=env_name), 0, a_run([1.0]))
    tasks = {page.name: [line[3:] for line in page.read_text().splitlines() if line.startswith('## ')]
             for page in (tmp_path / 'results').iterdir()}
    assert tasks == {'mujoco.md': ['InvertedPendulum-v5'], 'classic_control.md': ['Pendulum-v1'],
                     'images.md': ['MinAtar breakout', 'PongNoFrameskip-v4'], 'exploration.md': ['Corridor'],
                     'other.md': ['load_digits']}
    overview = (tmp_path / 'results.md').read_text()
    assert all(f'](results/{name})' in overview for name in tasks)


def test_results_of_a_conf_that_has_changed_since_are_marked(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    current = results.read_task('ppo_cart_pole')
    store.add(dataclasses.replace(current, bars=(results.Bar(required=1.0), )), 0, a_run([500.0]))
    changed = dataclasses.replace(results.read_task('ppo_pendulum'), fingerprint='old', bars=(results.Bar(), ))
    store.add(changed, 0, a_run([-200.0]))
    store.add(a_task(results), 0, a_run([10.0]))  # there is no such conf any more
    store.mark_outdated()
    rows = {name: results.rows_of(name, store.confs[name])[0] for name in store.confs}
    assert rows['ppo_cart_pole'][9:11] == ['500', 'reached'] and rows['some_conf'][10] == 'reached'
    assert rows['ppo_pendulum'][10] == 'older conf'


def test_results_that_another_process_adds_meanwhile_are_kept(results, tmp_path):
    first, second = (results.Store(tmp_path / 'results.json') for _ in range(2))
    second.add(a_task(results), 0, a_run([10.0]))
    first.update()
    assert 'some_conf' in results.Store(tmp_path / 'results.json').confs


def test_an_unexpected_error_does_not_end_the_other_runs(results, tmp_path, monkeypatch, capsys):
    def run(task, seed, *args):
        if not seed:
            raise IndexError('an empty table')
        return a_run([10.0])

    monkeypatch.setattr(results, 'train_and_evaluate', run)
    store = results.Store(tmp_path / 'results.json')
    assert results.run_all([a_task(results)], 2, store, tmp_path, 1, 1) == 1
    assert list(store.confs['some_conf']['runs']) == ['1']
    assert 'some_conf seed 0 failed: IndexError' in capsys.readouterr().out
