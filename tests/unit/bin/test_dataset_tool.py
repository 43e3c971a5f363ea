"""``bin.dataset`` and ``bin.record``: new datasets from existing ones, and invalid arguments."""
import glob
import json
import os
import random
import shutil
import sys
import time

import numpy as np
import pytest
from helpers import warm_starts
from helpers.flag_values import flag_values

from alfx.bin import dataset as tool
from alfx.gin_utils import ConfError
from alfx.offline import dataset_folder
from alfx.offline.dataset_episodes import Episodes


@pytest.fixture
def run(capsys):
    """Return a function that runs the tool and returns its output."""
    def call(*arguments, **flags):
        with flag_values(tool.PARSER, **flags):
            assert tool.main(['dataset', *arguments]) == 0
        return capsys.readouterr().out
    return call


def write(path, returns=(1.0, 2.0, 3.0, 4.0), columns=2, **about):
    """Write episodes of two actions each with these returns."""
    n = len(returns)
    reward = np.repeat(returns, 2) / 2
    observation = np.arange(3 * n * columns, dtype=np.float32).reshape(3 * n, columns)
    dataset_folder.write(str(path), Episodes({'': observation}, {'': np.zeros((2 * n, 1), np.float32)},
                                     reward.astype(np.float32), np.ones(2 * n, np.float32), np.full(n, 2)), about)
    return str(path)


def returns_of(path):
    return dataset_folder.read(str(path)).episodes.returns().tolist()


def test_a_dataset_is_shown_with_its_numbers(run, tmp_path):
    path = write(tmp_path / 'a', env_name='Here-v1', reference_returns=[0.0, 5.0])
    output = run('show', path)
    for part in ('4 episodes, 8 actions', 'return 2.5', 'from 1 to 4', 'length 2', 'Here-v1', 'SHA-256',
                 'normalized score 50.0', 'observation: float32 (2,), from 0 to 23'):
        assert part in output, part
    assert json.loads(run('show', path, json=True))[path]['return_mean'] == 2.5


def test_an_inconsistent_dataset_is_not_shown(run, tmp_path):
    episodes = Episodes({'': np.zeros((7, 1), np.float32), 'none': np.zeros((7, 0), np.float32)},
                        {'': np.zeros((5, 1), np.float32)}, np.ones(5, np.float32), np.ones(5, np.float32),
                        np.array([3, 2]))
    dataset_folder.write(str(tmp_path / 'right'), episodes, {})
    assert '5 actions' in run('show', str(tmp_path / 'right'))
    for lengths in ([3, 4], [5, 0]):
        dataset_folder.write(str(tmp_path / 'wrong'), episodes._replace(lengths=np.array(lengths)), {}, overwrite=True)
        with pytest.raises(ConfError, match='expected'):
            run('show', str(tmp_path / 'wrong'))


def test_the_best_episodes_are_kept(run, tmp_path):
    path = write(tmp_path / 'a', returns=(1.0, 9.0, 3.0, 8.0))
    run('filter', path, output=str(tmp_path / 'best'), top=0.5)
    assert returns_of(tmp_path / 'best') == [9.0, 8.0]
    assert dataset_folder.read(str(tmp_path / 'best')).episodes.observation[''][0].tolist() == [6.0, 7.0]
    run('filter', path, output=str(tmp_path / 'middle'), min_return=2.0, max_return=8.0)
    assert returns_of(tmp_path / 'middle') == [3.0, 8.0]
    run('filter', path, output=str(tmp_path / 'start'), num_steps=5)
    assert dataset_folder.read(str(tmp_path / 'start')).episodes.lengths.tolist() == [2, 1]


def test_datasets_are_joined_and_remember_where_they_are_from(run, tmp_path):
    first, second = write(tmp_path / 'a', returns=(1.0, )), write(tmp_path / 'b', returns=(2.0, 3.0))
    run('mix', first, second, output=str(tmp_path / 'both'), reference_returns=['0', '10'])
    found = dataset_folder.read(str(tmp_path / 'both'))
    assert found.episodes.returns().tolist() == [1.0, 2.0, 3.0]
    assert found.about['from'] == [[x, dataset_folder.read(x).fingerprint] for x in (first, second)]
    assert found.reference_returns() == (0.0, 10.0)


def test_a_mixture_has_the_metadata_that_holds_for_all_parts(run, tmp_path):
    first = write(tmp_path / 'a', env_name='Here-v0', mode='sampled', noise=0.5, num=1)
    second = write(tmp_path / 'b', env_name='Here-v1', mode='random', noise=0.5, reference_returns=[0.0, 5.0])
    run('mix', first, second, output=str(tmp_path / 'both'))
    about = dataset_folder.read(str(tmp_path / 'both')).about
    assert about['env_name'] == 'Here-v0, Here-v1' and about['reference_returns'] == [0.0, 5.0]
    assert about['noise'] == 0.5 and not about.keys() & {'mode', 'num'}


def test_given_reference_returns_are_shown(run, tmp_path):
    assert 'normalized score 25.0' in run('show', write(tmp_path / 'a'), reference_returns=['0', '10'])


def test_datasets_with_other_action_units_are_not_joined(run, tmp_path):
    own, unit = write(tmp_path / 'own'), write(tmp_path / 'unit', action_bounds={'': [[-1.0], [1.0]]})
    torques = write(tmp_path / 'torques', action_bounds={'': [[-2.0], [2.0]]})
    run('mix', own, unit, output=str(tmp_path / 'both'))
    run('mix', torques, torques, output=str(tmp_path / 'twice'))
    with pytest.raises(ConfError, match=r'torques: the range of action values is from \[-2.0\] to \[2.0\], in .*own it '
                                        'is not given'):
        run('mix', own, torques, output=str(tmp_path / 'mixed'))
    assert not (tmp_path / 'mixed').exists()
    spec = {'shape': [1], 'dtype': 'float32', 'minimum': -2.0, 'maximum': 2.0}
    recorded = write(tmp_path / 'recorded', specs={
        'observation': {'': {'shape': [2], 'dtype': 'float32'}}, 'action': {'': spec},
        'reward': {'': {'shape': [], 'dtype': 'float32'}}})
    run('mix', torques, recorded, output=str(tmp_path / 'both'), overwrite=True)
    with pytest.raises(ConfError, match=r'recorded: the range of action values is from \[-2.0\] to \[2.0\], in .*own'):
        run('mix', own, recorded, output=str(tmp_path / 'mixed'))


def test_datasets_with_floats_of_other_widths_are_joined(run, tmp_path):
    first, second = write(tmp_path / 'a'), str(tmp_path / 'b')
    episodes = dataset_folder.read(first).episodes
    dataset_folder.write(second, episodes._replace(reward=episodes.reward.astype(np.float64)), {})
    run('mix', first, second, output=str(tmp_path / 'both'))
    assert returns_of(tmp_path / 'both') == [1.0, 2.0, 3.0, 4.0] * 2


def test_contradicting_reference_returns_are_not_kept(run, tmp_path):
    first, second = (write(tmp_path / name, reference_returns=[0.0, best]) for name, best in (('a', 5.0), ('b', 7.0)))
    run('mix', first, second, output=str(tmp_path / 'both'))
    assert dataset_folder.read(str(tmp_path / 'both')).reference_returns() is None


def test_valid_and_damaged_datasets_are_distinguished(run, tmp_path):
    assert 'valid' in run('check', write(tmp_path / 'a'))
    bad = write(tmp_path / 'b', returns=(1.0, float('nan')))
    with pytest.raises(ConfError, match='reward: NaN or infinite in episode 1, step 0'):
        run('check', bad)


@pytest.mark.parametrize('arguments, flags, message', [
    ([], {}, 'expected one of show, check, mix'), (['shwo', 'a'], {}, 'expected one of'), (['show'], {}, 'no dataset'),
    (['mix', 'a'], {}, 'add --output'), (['filter', 'a', 'b'], {}, 'takes one dataset'),
    (['filter', 'a'], dict(output='c'), 'no criterion is given'),
    (['filter', 'a'], dict(output='c', min_return=99.0), 'no episode is left'),
    (['convert', 'a'], dict(output='b'), 'already'),
    (['mix', 'a', 'wide'], dict(output='c'), r'wide: observation is float \(3,\), in a it is float \(2,\)'),
    (['convert', 'a'], dict(output='c', reference_returns=['3', '1']), 'a larger return of an expert'),
    (['convert', 'a'], dict(output='c', reference_returns=['3', 'x']), 'a larger return of an expert'),
    (['convert', 'file'], dict(output='c'), 'file: .*use a checkpoint'),
    (['mix', 'a', 'b'], dict(output='c', top=0.5, given=('output', 'top')), '--top has no effect on mix.*filter'),
    (['check', 'a'], dict(output='c', given=('output', )), '--output has no effect on check.*mix, filter, convert'),
    (['check', 'a'], dict(reference_returns=['0', '1'], given=('reference_returns', )), 'has no effect on check.*show'),
])
def test_invalid_requests_raise(run, tmp_path, monkeypatch, arguments, flags, message):
    monkeypatch.chdir(tmp_path)
    write('a'), write('b'), write('wide', columns=3)
    (tmp_path / 'file').write_text('no checkpoint')
    with pytest.raises(ConfError, match=f'(?s){message}'):
        run(*arguments, **flags)


def program(*arguments, code=0):
    result = warm_starts.run([sys.executable, '-m', 'alfx.bin.record', *arguments], capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def test_random_datasets_are_recorded_and_never_overwrite_another(tmp_path):
    arguments = ('--conf', 'sac_pendulum', '--mode', 'random', '--num_steps', '400', '--num_environments', '2',
                 '--random_seed', '5', '--dataset', str(tmp_path / 'a'), '--reference_returns=-1200,-150')
    output = program(*arguments).stdout
    episodes = dataset_folder.read(str(tmp_path / 'a')).episodes
    assert episodes.lengths.tolist() == [200, 200] and '2 episodes' in output and 'normalized score' in output
    result = program(*arguments, code=2)
    assert 'a dataset exists already' in result.stderr and 'Traceback' not in result.stderr


def test_the_best_actions_of_value_based_algorithms_are_recorded(tmp_path):
    arguments = ('zoo:q_learning_frozen_lake', '--num_steps', '28', '--seed', '0', '--dataset', str(tmp_path / 'a'))
    program(*arguments)
    dataset = dataset_folder.read(str(tmp_path / 'a'))
    assert dataset.about['mode'] == 'greedy' and (dataset.episodes.returns() == 1).all()
    message = program(*arguments, '--overwrite', '--mode', 'sampled', code=2).stderr
    assert 'the algorithm has no action distribution' in message


@pytest.mark.parametrize('conf, flag, message', [
    ('ppo_cart_pole', '--noise=0.5', '--noise has no effect: the environment has no continuous actions'),
    ('sac_pendulum', '--checkpoint_step=7', '--checkpoint_step has no effect on --mode random')])
def test_options_of_the_recorder_without_effect_are_rejected(tmp_path, conf, flag, message):
    result = program('--conf', conf, '--mode', 'random', flag, '--dataset', str(tmp_path / 'a'), code=2)
    assert message in result.stderr and not (tmp_path / 'a').exists()


ARGUMENTS = ('--conf', 'sac_pendulum', '--mode', 'random', '--num_steps', '400')


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize('has_old', [True, False], ids=['overwriting', 'new'])
def test_ten_kills_of_the_recorder_leave_the_old_dataset_or_the_new_one(tmp_path, has_old):
    """Half of them at any moment, the first at its start and the last at its end; half while it writes."""
    old, new, path = (str(tmp_path / name) for name in ('old', 'new', 'data'))
    started = time.monotonic()
    for folder, seed in ((old, 1), (new, 2)):
        program(*ARGUMENTS, '--random_seed', str(seed), '--dataset', folder)
    seconds = (time.monotonic() - started) / 2
    fingerprints = {dataset_folder.read(folder).fingerprint: folder for folder in (old, new)}
    assert len(fingerprints) == 2
    chance, found = random.Random(7), []
    for kill in range(10):
        shutil.rmtree(path, ignore_errors=True)
        if has_old:
            shutil.copytree(old, path)
        before = glob.glob(f'{path}/alfx-data-*')
        process = warm_starts.Popen([sys.executable, '-m', 'alfx.bin.record', *ARGUMENTS, '--random_seed', '2',
                                     '--dataset', path, '--overwrite'], stdout=warm_starts.subprocess.PIPE,
                                    stderr=warm_starts.subprocess.STDOUT)
        with process:
            if kill == 9:
                process.communicate(timeout=120)
            elif kill % 2:
                time.sleep(0 if kill == 1 else chance.uniform(0, seconds))
            else:
                while process.poll() is None and glob.glob(f'{path}/alfx-data-*') == before:
                    time.sleep(1e-4)
                time.sleep(chance.uniform(0, 0.01))
            process.kill()
        if dataset_folder.is_dataset(path):
            found.append(fingerprints[dataset_folder.read(path).fingerprint])
        else:
            assert not has_old
            found.append(None)
    assert set(found) == {old if has_old else None, new}
    program(*ARGUMENTS, '--random_seed', '2', '--dataset', path, '--overwrite')
    assert fingerprints[dataset_folder.read(path).fingerprint] == new
    assert len([name for name in os.listdir(path) if name.startswith('alfx-data-')]) == 1


def test_a_full_disk_raises_and_leaves_nothing_behind(run, tmp_path, monkeypatch):
    path = write(tmp_path / 'a')

    def save(file, array, **kwargs):
        file.write(b'some of it')
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(np, 'save', save)
    for output in (tmp_path / 'b', tmp_path / 'a'):
        with pytest.raises(ConfError, match='(?s)cannot be written: No space left on device.*nothing has been changed'):
            run('convert', path, output=str(output), overwrite=True)
    assert os.listdir(tmp_path / 'b') == [] and returns_of(path) == [1.0, 2.0, 3.0, 4.0]
    assert len(os.listdir(path)) == 2


def test_runs_without_a_policy_cannot_be_recorded(tmp_path):
    message = program('--root_dir', str(tmp_path / 'nothing'), '--dataset', str(tmp_path / 'a'), code=2).stderr
    assert 'nothing' in message and 'Traceback' not in message and not os.path.exists(tmp_path / 'a')
    pytest.importorskip('sklearn')
    message = program('--conf', 'hypernetwork_digits', '--mode', 'random', '--dataset', str(tmp_path / 'a'),
                      code=2).stderr
    assert 'Traceback' not in message and "ml_type = 'sl'" in message and not os.path.exists(tmp_path / 'a')


def test_interrupted_recordings_keep_finished_episodes():
    """Return the finished episodes of an interrupted recording, or None without any."""
    from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
    from alfx.offline import recorder
    for after, lengths in ((12, [4, 4]), (3, None)):
        env, count = PolicyUnittestEnv(1, 5, action_type=ActionType.Continuous), 0

        def act(time_step, env=env, after=after):
            nonlocal count
            count += 1
            if count > after:
                raise KeyboardInterrupt
            return env.action_spec().sample([1])

        env.reset()
        found = recorder.record(env, act, 100)
        assert (None if found is None else found.lengths.tolist()) == lengths


MASKED = """
import alfx
import gymnasium
import numpy as np
from gymnasium import spaces
from alfx.algorithms.data_transformer import ActionMask
from alfx.gin_utils import configurable


@configurable
class ActionMaskOfMine(ActionMask):
    pass


class Masked(gymnasium.Env):
    observation_space = spaces.Dict({'seen': spaces.Box(-1, 1, (2, )), 'allowed': spaces.MultiBinary(9)})
    action_space = spaces.Discrete(9, start=4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.mask = np.zeros(9, np.int8)
        self.mask[self.np_random.integers(9)] = 1
        return {'seen': np.zeros(2, np.float32), 'allowed': self.mask}, {}

    def step(self, action):
        assert self.mask[action - 4], 'an action that is not allowed'
        return self.reset()[0], 0.0, False, False, {}


gymnasium.register('Masked-v0', Masked)
"""


@pytest.mark.processes
def test_random_recordings_take_allowed_actions_and_can_be_untrusted(tmp_path):
    (tmp_path / 'masked.py').write_text(MASKED)
    (tmp_path / 'c.gin').write_text("""
import masked
include 'ppo.gin'
create_environment.env_name = 'Masked-v0'
TrainerConfig.num_env_steps = 100
TrainerConfig.data_transformer_ctor = [@ImageScaleTransformer, @here/ActionMaskOfMine]
ImageScaleTransformer.fields = ['allowed']
here/ActionMaskOfMine.field = 'allowed'
""")
    arguments = ('--conf', str(tmp_path / 'c.gin'), '--mode', 'random', '--num_steps', '50', '--dataset',
                 str(tmp_path / 'a'))
    message = program(*arguments, '--untrusted', code=2).stderr
    assert "import of 'masked' is not allowed with --untrusted" in message and not os.path.exists(tmp_path / 'a')
    program(*arguments)
