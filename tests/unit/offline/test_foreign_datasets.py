"""Datasets of other libraries: replay buffers in checkpoints of ALF, and Minari."""
import os
import pickle
import re

import gymnasium
import numpy as np
import pytest
import torch

from alfx.offline import dataset_checks
from alfx.offline import dataset_sources
from alfx.offline.dataset_files import DatasetError
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.extras import pip_install


def alf_state(prefix='_replay_buffer.'):
    """Return two environments with room for 5 steps; 7 were written to the first, 4 to the second.

    Each step's reward, observation and previous action are its number in its environment.
    """
    first, second = [5, 6, 2, 3, 4], [0, 1, 2, 3, 9]
    number = torch.tensor([first, second], dtype=torch.float32)
    kinds = {0: 0, 1: 1, 2: 1, 3: 2, 4: 0, 5: 1, 6: 1, 9: 9}
    step_type = torch.tensor([[kinds[n] for n in row] for row in (first, second)], dtype=torch.int32)
    return {f'{prefix}{name}': x for name, x in {
        '_current_size': torch.tensor([5, 4]), '_current_pos': torch.tensor([7, 4]),
        'time_step|step_type': step_type, 'time_step|reward': number.clone(),
        'time_step|discount': (step_type != 2).float(), 'time_step|observation|arm': number.unsqueeze(-1).clone(),
        'time_step|prev_action': number.unsqueeze(-1).clone()}.items()}


@pytest.mark.parametrize('wrap', [lambda state: state, lambda state: {'alg': state, 'metrics': {}}])
def test_a_replay_buffer_of_alf_is_read_in_order_of_time(tmp_path, wrap):
    path = str(tmp_path / 'ckpt-9')
    torch.save(wrap(alf_state()), path)
    episodes = dataset_sources.read(path).episodes
    # steps 2, 3 (LAST) and 4, 5, 6 of the first environment, 0, 1, 2, 3 (LAST) of the second
    assert episodes.lengths.tolist() == [1, 2, 3]
    assert episodes.observation['arm'].ravel().tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert episodes.action[''].ravel().tolist() == [3, 5, 6, 1, 2, 3] == episodes.reward.tolist()
    assert episodes.terminated().tolist() == [True, False, True]


def test_a_replay_buffer_of_alf_without_rewards_is_rejected_by_name(tmp_path):
    state = alf_state()
    del state['_replay_buffer.time_step|reward']
    torch.save(state, str(tmp_path / 'ckpt-9'))
    with pytest.raises(DatasetError, match=r'lacks _replay_buffer.time_step\|reward'):
        dataset_sources.read(str(tmp_path / 'ckpt-9'))


class Evil:
    def __reduce__(self):
        return os.mkdir, ('executed', )


@pytest.mark.parametrize('save', [lambda path: torch.save({**alf_state(), 'evil': Evil()}, path),
                                  lambda path: path.write_bytes(pickle.dumps(Evil())),
                                  lambda path: path.write_text('text'),
                                  lambda path: torch.save({'weights': torch.zeros(3)}, path)])
def test_any_other_file_is_rejected_and_nothing_in_it_executed(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / 'file')
    with pytest.raises(DatasetError, match='use a checkpoint'):
        dataset_sources.read('file')
    assert not os.path.exists('executed')


def test_actions_are_scaled_from_environment_units_to_run_units():
    from test_dataset_checks import make
    dataset = make(action={'': np.array([[-2.0], [6.0], [2.0], [2.0], [2.0]])})._replace(
        about={'action_bounds': {'': [[-2.0], [6.0]]}})
    unit = BoundedTensorSpec((1, ), torch.float32, -1, 1)
    assert dataset_checks._in_units_of(unit, dataset).episodes.action[''].ravel().tolist() == [-1, 1, 0, 0, 0]
    own = BoundedTensorSpec((1, ), torch.float32, -2, 6)
    assert dataset_checks._in_units_of(own, dataset).episodes.action[''].ravel().tolist() == [-2, 6, 2, 2, 2]
    assert dataset_checks._in_units_of(TensorSpec((1, )), dataset).episodes.action[''][1, 0] == 6


class PartOfMinari:
    """Minari without the packages that it needs for files."""

    @staticmethod
    def load_dataset(identity):
        raise ImportError('h5py is not installed')


@pytest.mark.parametrize('module', [None, PartOfMinari])
def test_a_missing_minari_dependency_raises_with_its_extra(monkeypatch, module):
    monkeypatch.setitem(__import__('sys').modules, 'minari', module)
    with pytest.raises(DatasetError, match=f'(?s)minari:x/y-v0: .*{re.escape(pip_install("offline"))}'):
        dataset_sources.read('minari:x/y-v0')


class Unreadable:
    """Minari with a dataset whose file ends in the middle."""

    @staticmethod
    def load_dataset(identity):
        raise OSError('Unable to synchronously open file (truncated file)')


def test_a_minari_file_that_ends_in_the_middle_is_rejected(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'minari', Unreadable)
    with pytest.raises(DatasetError, match='(?s)minari:x/y-v0: cannot be read: .*truncated file.*minari download x/y'):
        dataset_sources.read('minari:x/y-v0')


ignores_warnings = pytest.mark.filterwarnings('ignore::UserWarning:minari')


@pytest.fixture
def minari_set(tmp_path, monkeypatch):
    """Write two episodes with Pendulum's spaces; the first terminates."""
    minari = pytest.importorskip('minari')
    pytest.importorskip('h5py')
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path))
    from minari.data_collector import EpisodeBuffer
    space = gymnasium.spaces.Dict({'a': gymnasium.spaces.Box(-np.inf, np.inf, (2, )),
                                   'b': gymnasium.spaces.Discrete(9)})

    def episode(count, terminates):
        ends = [False] * (count - 1) + [True]
        return EpisodeBuffer(
            observations={'a': [np.full(2, t, np.float32) for t in range(count + 1)], 'b': list(range(count + 1))},
            actions=[np.full(1, t, np.float32) for t in range(count)], rewards=[10.0 * t for t in range(count)],
            terminations=ends if terminates else [False] * count,
            truncations=[False] * count if terminates else ends)

    minari.create_dataset_from_buffers('test/two-v0', [episode(3, True), episode(2, False)], observation_space=space,
                                       action_space=gymnasium.spaces.Box(-4, 4, (1, )))
    return 'minari:test/two-v0'


@ignores_warnings
def test_a_minari_dataset_keeps_its_alignment(minari_set):
    dataset = dataset_sources.read(minari_set)
    episodes = dataset.episodes
    assert episodes.lengths.tolist() == [3, 2] and episodes.terminated().tolist() == [True, False]
    assert episodes.observation['a'][:, 0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert episodes.observation['b'].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert episodes.action[''].ravel().tolist() == [0, 1, 2, 0, 1] and episodes.reward.tolist() == [0, 10, 20, 0, 10]
    assert dataset.about['action_bounds'] == {'': [[-4.0], [4.0]]}


@ignores_warnings
def test_reference_returns_of_minari_are_used_for_scores(minari_set):
    import minari
    assert dataset_sources.reference_returns([minari_set]) is None
    minari.load_dataset('test/two-v0').storage.update_metadata({'ref_min_score': -5.0, 'ref_max_score': 20.0})
    assert dataset_sources.read(minari_set).about['reference_returns'] == [-5, 20]
    assert dataset_sources.reference_returns(['minari:missing-v0', minari_set]) == (-5, 20)


def create_minari_set(tmp_path, monkeypatch, space, num_observations=4, rewards=(1.0, 2.0, 3.0)):
    """Write one episode of three actions; return the name of the dataset and the observations by leaf."""
    minari = pytest.importorskip('minari')
    pytest.importorskip('h5py')
    from minari.data_collector import EpisodeBuffer
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path))
    samples = [space.sample() for _ in range(num_observations)]
    is_dict = isinstance(space, gymnasium.spaces.Dict)
    observations = {key: [x[key] for x in samples] for key in space.spaces} if is_dict else samples
    minari.create_dataset_from_buffers('test/one-v0', [EpisodeBuffer(
        observations=observations, actions=[0, 1, 0], rewards=list(rewards), terminations=[False, False, True],
        truncations=[False] * 3)], observation_space=space, action_space=gymnasium.spaces.Discrete(2))
    return 'minari:test/one-v0', observations


GO = BoundedTensorSpec((), torch.int64, 0, 1)


@ignores_warnings
def test_texts_of_minari_are_left_out_with_a_warning(tmp_path, monkeypatch, caplog):
    space = gymnasium.spaces.Dict({'arm': gymnasium.spaces.Box(-1, 1, (2, )), 'mission': gymnasium.spaces.Text(8)})
    name, _ = create_minari_set(tmp_path, monkeypatch, space)
    dataset = dataset_sources.read(name)
    assert list(dataset.episodes.observation) == ['arm'] and 'text parts are left out: mission' in caplog.text
    dataset_checks.fitted(dataset, {'arm': TensorSpec((2, ))}, GO, TensorSpec(()))


@ignores_warnings
def test_actions_named_like_a_text_are_kept(tmp_path, monkeypatch):
    minari = pytest.importorskip('minari')
    pytest.importorskip('h5py')
    from minari.data_collector import EpisodeBuffer
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path))
    space = gymnasium.spaces.Dict({'arm': gymnasium.spaces.Box(-1, 1, (2, )), 'move': gymnasium.spaces.Text(8)})
    action_space = gymnasium.spaces.Dict({'move': gymnasium.spaces.Discrete(2), 'grip': gymnasium.spaces.Discrete(3)})
    samples = [space.sample() for _ in range(4)]
    minari.create_dataset_from_buffers('test/two-v0', [EpisodeBuffer(
        observations={key: [x[key] for x in samples] for key in space.spaces},
        actions={'move': [0, 1, 0], 'grip': [2, 1, 0]}, rewards=[0.0] * 3, terminations=[False, False, True],
        truncations=[False] * 3)], observation_space=space, action_space=action_space)
    dataset = dataset_sources.read('minari:test/two-v0')
    assert list(dataset.episodes.observation) == ['arm'] and sorted(dataset.episodes.action) == ['grip', 'move']


@ignores_warnings
@pytest.mark.parametrize('shape', [(6, 5, 3), (4, 4, 4)])
def test_images_of_minari_are_transposed_as_the_environment_does(tmp_path, monkeypatch, shape):
    name, observations = create_minari_set(tmp_path, monkeypatch, gymnasium.spaces.Box(0, 255, shape, np.uint8))
    turned = shape[-1:] + shape[:-1]
    dataset = dataset_sources.read(name)
    found = dataset_checks.fitted(dataset, BoundedTensorSpec(turned, torch.uint8, 0, 255), GO, TensorSpec(()))
    assert np.array_equal(found.episodes.observation[''], np.stack(observations).transpose(0, 3, 1, 2))
    if turned != shape:  # with image_channel_first = False
        found = dataset_checks.fitted(dataset, BoundedTensorSpec(shape, torch.uint8, 0, 255), GO, TensorSpec(()))
        assert np.array_equal(found.episodes.observation[''], np.stack(observations))


@ignores_warnings
def test_rewards_in_columns_are_numbers_and_a_last_observation_is_needed(tmp_path, monkeypatch):
    space = gymnasium.spaces.Box(-1, 1, (2, ))
    name, _ = create_minari_set(tmp_path, monkeypatch, space, rewards=[np.array([x]) for x in (1.0, 2.0, 3.0)])
    dataset = dataset_sources.read(name)
    found = dataset_checks.fitted(dataset, TensorSpec((2, )), GO, TensorSpec(()))
    assert found.episodes.reward.tolist() == [1, 2, 3]
    assert dataset_checks.fitted(dataset, TensorSpec((2, )), GO, TensorSpec((1, ))).episodes.reward.shape == (3, 1)
    from alfx.offline import minari_sets
    with pytest.raises(DatasetError, match='expected 4 observations for 3 actions, found 3: the last one'):
        minari_sets._episode(name, 0, Short(), ())


class Short:
    observations, actions, rewards = np.zeros((3, 2)), np.zeros(3, int), [0.0] * 3
    terminations, truncations = [False, False, True], [False] * 3


class Cut(Short):
    observations, truncations = np.zeros((4, 2)), [False, True, False]


def test_an_episode_of_minari_with_a_truncation_inside_is_rejected():
    from alfx.offline import minari_sets
    with pytest.raises(DatasetError, match='episode 0: expected .* no termination or truncation before its end'):
        minari_sets._episode('x', 0, Cut(), ())


def test_actions_of_minari_may_be_bounded_in_part():
    from alfx.offline import minari_sets
    space = gymnasium.spaces.Dict({'mixed': gymnasium.spaces.Box(np.array([-1.0, -np.inf]), np.array([1.0, np.inf])),
                                   'torque': gymnasium.spaces.Box(-2, 2, (1, )), 'gear': gymnasium.spaces.Discrete(3)})
    assert minari_sets._bounds(space) == {'torque': [[-2.0], [2.0]]}


@ignores_warnings
def test_a_missing_minari_dataset_is_reported_with_the_available_ones(minari_set):
    with pytest.raises(DatasetError, match='(?s)found test/two-v0.*minari download'):
        dataset_sources.read('minari:test/none-v0')
