import pathlib
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture
def compare_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import compare_runs
    return compare_runs


def write_run(folder, returns, learning_rate):
    (folder / 'conf').mkdir(parents=True)
    (folder / 'conf' / 'config.gin').write_text(
        f'# From x.gin\nac/alfx.optimizers.Adam.lr = {learning_rate}\nalfx.a.PPOLoss.gamma = 0.9\n'
        f'alfx.algorithms.config.TrainerConfig.random_seed = {returns[-1]}\n')
    rows = [f'{i},{i * 1000},{i * 2.0},{value}' for i, value in enumerate(returns)]
    (folder / 'progress.csv').write_text('\n'.join(['iteration,env_steps,seconds,average_return', *rows]) + '\n')
    return folder


def test_a_run_is_summed_up_by_its_last_and_best_return_and_its_speed(compare_runs, tmp_path):
    run = compare_runs.read_run(write_run(tmp_path / 'a', ['', 10, 30, 20], 0.1))
    assert (run['final return'], run['best return'], run['env steps']) == (20.0, 30.0, 3000)
    assert run['steps/s'] == pytest.approx(500.0)
    assert run['last evaluation'] is None


def test_a_run_without_an_ended_episode_has_no_return(compare_runs, tmp_path):
    run = compare_runs.read_run(write_run(tmp_path / 'a', [''], 0.1))
    assert run['final return'] is None and run['best return'] is None and run['steps/s'] is None


def test_only_the_bindings_that_differ_are_listed_and_the_seed_is_none_of_them(compare_runs, tmp_path):
    folders = [write_run(tmp_path / name, [1], rate) for name, rate in (('a', 0.1), ('b', 0.2), ('c', 0.1))]
    bindings = [compare_runs.read_bindings(folder) for folder in folders]
    assert compare_runs.differences(bindings) == [('ac/Adam.lr', ['0.1', '0.2', '0.1'])]
    assert compare_runs.differences(bindings[:1]) == []


def test_the_command_ranks_runs_and_leaves_out_what_is_none(tmp_path):
    worse, better = write_run(tmp_path / 'worse', [1, 5], 0.1), write_run(tmp_path / 'better', [1, 50], 0.2)
    (tmp_path / 'other').mkdir()
    done = subprocess.run([sys.executable, str(TOOLS / 'compare_runs.py'), str(worse), str(better),
                           str(tmp_path / 'other')], capture_output=True, text=True, check=True,
                          env={'PYTHONPATH': str(TOOLS.parent)})
    lines = done.stdout.splitlines()
    assert lines[1].startswith(str(better)) and lines[2].startswith(str(worse))
    assert any(line.split() == ['ac/Adam.lr', '0.2', '0.1'] for line in lines)
    assert 'other: no progress.csv' in done.stderr
