"""Comparisons of runs: metrics, confs, names, pairs with the same seed."""
import json
import os
import sys

import pytest
from helpers import warm_starts

from alfx.gin_utils import ConfError
from alfx.reports import collecting, comparing, curves


def write_run(folder, returns, learning_rate, seed=0):
    (folder / 'conf').mkdir(parents=True)
    (folder / 'conf' / 'config.gin').write_text(
        f'# From x.gin\nac/alfx.optimizers.Adam.lr = {learning_rate}\nalfx.a.PPOLoss.gamma = 0.9\n'
        f'alfx.algorithms.config.TrainerConfig.random_seed = {returns[-1]}\n')
    rows = [f'{i},{i * 1000},{i * 2.0},{value}' for i, value in enumerate(returns)]
    (folder / 'progress.csv').write_text('\n'.join(['iteration,env_steps,seconds,average_return', *rows]) + '\n')
    (folder / 'train').mkdir()
    (folder / 'train' / 'start.json').write_text(json.dumps({'random_seed': seed}))
    return str(folder)


def test_a_run_is_summed_up_by_its_last_and_best_return_and_its_speed(tmp_path):
    run = comparing.read_run(write_run(tmp_path / 'a', ['', 10, 30, 20], 0.1))
    assert (run['final return'], run['best return'], run['env steps']) == (20.0, 30.0, 3000)
    assert run['steps/s'] == pytest.approx(500.0)
    assert run['last evaluation'] is None


def test_a_run_without_an_ended_episode_has_no_return(tmp_path):
    run = comparing.read_run(write_run(tmp_path / 'a', [''], 0.1))
    assert run['final return'] is None and run['best return'] is None and run['steps/s'] is None


def test_only_differing_bindings_are_listed_without_the_seed(tmp_path):
    folders = [write_run(tmp_path / name, [1], rate) for name, rate in (('a', 0.1), ('b', 0.2), ('c', 0.1))]
    bindings = [comparing.read_bindings(folder) for folder in folders]
    assert comparing.differences(bindings) == [('ac/Adam.lr', ['0.1', '0.2', '0.1'])]
    assert comparing.differences(bindings[:1]) == []


def test_the_command_ranks_runs_and_skips_other_folders(tmp_path):
    worse, better = write_run(tmp_path / 'worse', [1, 5], 0.1), write_run(tmp_path / 'better', [1, 50], 0.2)
    (tmp_path / 'other').mkdir()
    done = warm_starts.run([sys.executable, '-m', 'alfx', 'compare', worse, better, str(tmp_path / 'other')],
                          capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[1].startswith(better) and lines[2].startswith(worse)
    assert any(line.split() == ['ac/Adam.lr', '0.2', '0.1'] for line in lines)
    assert lines[-1].split() == ['x:', 'lr=0.2:', '+45', '(one', 'pair)']
    assert 'other: no progress.csv' in done.stderr


def test_the_command_shows_a_folder_of_seeds_as_one_row_and_column(tmp_path):
    for name, rate, finals in (('l2', 0.1, (10, 20, 60)), ('sac', 0.2, (1, 2, 3))):
        for seed, final in enumerate(finals):
            write_run(tmp_path / name / f'seed-{seed}', [1, final], rate, seed)
    done = warm_starts.run([sys.executable, '-m', 'alfx', 'compare', 'l2', 'sac', 'l2/seed-0', 'sac/seed-0'],
                           cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    cells = [line.split('  ')[0] for line in lines[1:5]]
    assert cells == ['l2', 'l2/seed-0', 'sac', 'sac/seed-0'] and done.stderr == ''
    # fewer than four runs: the interquartile mean is the mean, and the bootstrap never leaves the range of the runs
    assert lines[1].split()[1:9] == ['3', 'seeds', '1,000', '30', '(10', 'to', '60)', '30']
    assert lines[7].split() == ['binding', 'l2', 'l2/seed-0', 'sac', 'sac/seed-0']
    assert lines[8].split() == ['ac/Adam.lr', '0.1', '0.1', '0.2', '0.2']


def test_the_command_says_whether_a_difference_is_clear(tmp_path):
    for name, rate, finals in (('a', 0.1, (10, 20, 60)), ('b', 0.2, (15, 25.5, 65)), ('c', 0.3, (5, 60, 60))):
        for seed, final in enumerate(finals):
            write_run(tmp_path / name / f'seed-{seed}', [1, final], rate, seed)
    done = warm_starts.run([sys.executable, '-m', 'alfx', 'compare', 'a', 'b', 'c'], cwd=tmp_path, capture_output=True,
                           text=True, check=True)
    clear, unclear = done.stdout.splitlines()[-2:]
    assert clear.endswith('+5.1667 (+- 0.7171, 3 pairs)')
    assert unclear.endswith(', 3 pairs): no clear difference') and ': +11.667 (' in unclear


def test_the_command_says_that_environments_differ(tmp_path):
    for name in ('CartPole-v1', 'Acrobot-v1'):
        conf = os.path.join(write_run(tmp_path / name, [1, 2], 0.1), 'conf', 'config.gin')
        with open(conf, 'a', encoding='utf8') as file:
            file.write(f"alfx.environments.utils.create_environment.env_name = '{name}'\n")
    output = warm_starts.run([sys.executable, '-m', 'alfx', 'compare', 'CartPole-v1', 'Acrobot-v1'], cwd=tmp_path,
                             capture_output=True, text=True, check=True).stdout
    assert 'the runs have different environments' in output
    same = warm_starts.run([sys.executable, '-m', 'alfx', 'compare', 'CartPole-v1', 'CartPole-v1'], cwd=tmp_path,
                           capture_output=True, text=True, check=True).stdout
    assert 'different environments' not in same


def test_runs_in_a_folder_are_grouped_by_conf(tmp_path):
    for name, rate in (('a/0', 0.1), ('a/1', 0.1), ('b/0', 0.2)):
        write_run(tmp_path / 'nested' / name, [1], rate)
    for name, rate in (('a0', 0.1), ('a1', 0.1), ('b0', 0.2), ('b1', 0.2)):
        write_run(tmp_path / 'flat' / name, [1], rate)
    folder = tmp_path / 'nested'
    assert comparing.groups_in(str(folder)) == {f'{folder}/a': [f'{folder}/a/0', f'{folder}/a/1'],
                                                f'{folder}/b/0': [f'{folder}/b/0']}
    assert [len(group) for group in comparing.groups_in(str(tmp_path / 'flat')).values()] == [2, 2]
    assert list(comparing.groups_in(str(tmp_path / 'flat'))) == [f'{tmp_path}/flat: x: lr={x}' for x in (0.1, 0.2)]
    assert comparing.groups_in(str(tmp_path / 'none')) == {}


def test_confs_are_compared_seed_by_seed(tmp_path):
    first_runs = [write_run(tmp_path / f'a{seed}', [value], 0.1, seed) for seed, value in ((1, 10), (2, 20), (3, 90))]
    second_runs = [write_run(tmp_path / f'b{seed}', [value], 0.2, seed) for seed, value in ((1, 12), (2, 26), (4, 0))]
    runs = [comparing.read_run(folder) for folder in [*first_runs, *second_runs]]
    found, = comparing.paired_differences(runs, 'final return')
    assert (found.mean, found.num_pairs) == (4.0, 2)  # 2 and 6; seeds 3 and 4 have no partner
    # Student's t for one degree of freedom at 97.5% is 12.706; standard error of 2 and 6: sqrt(8 / 2) = 2
    assert found.margin == pytest.approx(12.706 * 2, rel=1e-3)
    assert (found.baseline, found.name) == ('x: lr=0.1', 'x: lr=0.2')


def test_confs_that_differ_in_many_bindings_are_named_by_their_folders(tmp_path):
    folders = [write_run(tmp_path / name / 'seed-1', [value], 0.1, 1) for name, value in (('a', 1), ('b', 2), ('c', 5))]
    for number, folder in enumerate(folders):
        with open(os.path.join(folder, 'conf', 'config.gin'), 'a', encoding='utf8') as file:
            file.writelines(f'f.x{i} = {number}\n' for i in range(4))
    found = comparing.paired_differences([comparing.read_run(folder) for folder in folders], 'final return')
    assert [(x.baseline, x.name, x.mean) for x in found] == [(folders[0], folders[1], 1), (folders[0], folders[2], 4)]


def test_a_damaged_run_is_not_silently_left_out(tmp_path):
    folder = write_run(tmp_path / 'a', [10], 0.1)
    with open(os.path.join(folder, 'conf', 'config.gin'), 'ab') as file:
        file.write(b'\xe9\xe9')
    with pytest.raises(ConfError, match='config.gin is damaged'):
        comparing.groups_in(folder)


def test_confs_with_no_seed_in_common_are_not_compared(tmp_path):
    folders = [write_run(tmp_path / 'a', [10], 0.1, 1), write_run(tmp_path / 'b', [10], 0.2, 2)]
    assert comparing.paired_differences([comparing.read_run(folder) for folder in folders], 'final return') == []


def test_runs_are_labelled_by_conf_by_difference_or_by_folder(tmp_path):
    folders = [write_run(tmp_path / name, [1], rate) for name, rate in (('a', 0.1), ('b', 0.2), ('c', 0.2))]
    assert comparing.labels(folders[:2], ['x', 'y']) == ['x', 'y']
    assert comparing.labels(folders[:2], ['x', 'x']) == ['x: lr=0.1', 'x: lr=0.2']
    assert comparing.labels(folders[1:], ['x', 'x']) == ['x: b', 'x: c']
    assert comparing.labels(folders[:2], ['x', 'x'], most=0) == ['x: a', 'x: b']


@pytest.mark.parametrize('bindings, labels', [
    (('Adam.lr = 0.000333333333', 'Adam.lr = 1e-05'), ['x: lr=0.0003333', 'x: lr=1e-05']),
    (('a/Adam.lr = 0.1\nb/Adam.lr = 2', 'a/Adam.lr = 0.2\nb/Adam.lr = 3'),
     ['x: a/Adam.lr=0.1, b/Adam.lr=2', 'x: a/Adam.lr=0.2, b/Adam.lr=3']),
    (("f.name = 'v1.25.0'", "f.name = 'v1.26.0'"), ["x: name='v1.25.0'", "x: name='v1.26.0'"]),
    (('f.sizes = (64, 64)', 'f.sizes = (128, 0.12345678)'), ['x: sizes=(64, 64)', 'x: sizes=(128, 0.1235)']),
])
def test_labels_show_arguments_and_rounded_numbers(tmp_path, bindings, labels):
    folders = []
    for number, text in enumerate(bindings):
        folders.append(str(tmp_path / str(number)))
        (tmp_path / str(number) / 'conf').mkdir(parents=True)
        (tmp_path / str(number) / 'conf' / 'config.gin').write_text(f'{text}\n')
    assert comparing.labels(folders, ['x', 'x']) == labels


def test_runs_of_different_code_of_the_user_are_different_variants(tmp_path):
    folders = [write_run(tmp_path / name, [1], 0.1, seed) for seed, name in enumerate('abcd')]
    for folder, code in zip(folders, ('X = 1\n', '# a comment\nX  =  1\n', 'X = 2\n', 'X = 2 +\n')):
        package = tmp_path / folder / 'conf' / 'pack'
        package.mkdir()
        (package / 'own.py').write_text(code)
    groups = curves.group_runs(folders)
    assert list(groups.values()) == [folders[:2], folders[2:3], folders[3:]]
    (name, sums), = comparing.differences([comparing.read_conf(folder) for folder in folders])
    assert name == 'code of pack/own' and sums[0] == sums[1] and len(set(sums)) == 3
    assert comparing.labels(folders[1:3], ['x', 'x']) == [f'x: {name}={sums[1]}', f'x: {name}={sums[2]}']
    assert len({run.method for run in collecting.collect(folders[1:3]).runs}) == 2
    os.rename(os.path.join(folders[1], 'conf', 'pack', 'own.py'), os.path.join(folders[1], 'conf', 'task.py'))
    assert len({run.method for run in collecting.collect(folders[1:3]).runs}) == 1  # other files, of other tasks
