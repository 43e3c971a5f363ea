"""Round trips from an environment through files to a replay buffer preserve every value of online data."""
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.offline_agents import file_of_alf

import alfx
from alfx import gin_utils, nest
from alfx.algorithms.data_transformer import FrameStacker
from alfx.data_structures import BasicRLInfo, Experience, StepType, add_batch_info, time_step_spec
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.offline import dataset_episodes as stored
from alfx.offline import recorder
from alfx.offline import dataset_folder
from alfx.offline import dataset_loading
from alfx.offline import dataset_sources
from alfx.offline.buffer import make_buffer
from alfx.offline.dataset_episodes import Episodes
from alfx.offline.dataset_files import DatasetError
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.checkpoint_utils import Checkpointer

sys.path.insert(0, str(Path(__file__).parents[2] / 'contract'))
from environment_kinds import KINDS

OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1, 1)


def record_online(env, num_steps):
    """Record random actions in an environment, and a list of its steps, each with the action taken there."""
    seen = []
    act = recorder.random_policy(env.action_spec(), env.batch_size)

    def watched(time_step):
        action = act(time_step)
        seen.append(nest.map_structure(torch.clone, (time_step, action)))
        return action

    recorded = recorder.record(env, watched, num_steps)
    seen.append((nest.map_structure(torch.clone, env.current_time_step()), seen[-1][1]))
    return recorded, seen


@pytest.mark.parametrize('kind', ['count', 'chain', 'nested', 'nested, actions in [-1, 1]', 'offset actions',
                                  'two rewards', 'processes', 'Pendulum', 'FrozenLake', 'unittest mixed'])
def test_recorded_and_loaded_data_equal_the_original(kind, tmp_path):
    """Compare boxes, numbers, nests, vector rewards, actions from 1, and all ends of episodes, also with processes."""
    env = KINDS[kind]()
    env.seed(0)
    env.reset()
    recorded, seen = record_online(env, 40)
    dataset_folder.write(str(tmp_path), recorded, {})
    dataset, = dataset_loading.load([str(tmp_path)], None, env.observation_spec(), env.action_spec(), env.reward_spec())
    spec = Experience(time_step_spec(env.observation_spec(), env.action_spec(), env.reward_spec()),
                      env.action_spec(), BasicRLInfo(action=env.action_spec()))
    buffer = make_buffer([dataset], spec)
    (loaded, _), count = buffer.gather_all(), 0
    for number in range(env.batch_size):
        own = nest.map_structure(lambda *x, number=number: torch.stack([y[number] for y in x]), *seen)
        size = len(own[0].step_type)
        if own[0].step_type[-1] == StepType.FIRST:  # that episode has no action yet
            size -= 1
        for t in range(size):
            online, action = nest.map_structure(lambda x, t=t: x[t], own)
            offline = nest.map_structure(lambda x: x[0, count], loaded)  # noqa: B023
            is_cut = t == size - 1
            for field in ('reward', 'discount', 'observation', 'prev_action', *(() if is_cut else ('step_type', ))):
                for x, y in zip(nest.flatten(getattr(online, field)), nest.flatten(getattr(offline.time_step, field))):
                    assert torch.equal(x, y) and x.dtype == y.dtype, (field, number, t)
            assert offline.time_step.step_type != StepType.LAST or is_cut or online.is_last()
            if not is_cut and not online.is_last():
                for loaded_action in (offline.action, offline.rollout_info.action):
                    for x, y in zip(nest.flatten(action), nest.flatten(loaded_action)):
                        assert torch.equal(x, y) and x.dtype == y.dtype, (number, t)
            count += 1
    assert count == dataset.episodes.num_steps == buffer.total_size
    env.close()


def test_sampled_actions_are_recorded_as_the_environment_executes_them():
    env = KINDS['Pendulum']()
    recorded = recorder.record(env, lambda time_step: torch.full((env.batch_size, 1), 9.0), 4)
    high = float(np.max(env.action_spec().maximum))
    assert high < 9 and np.all(recorded.action[''] == high)
    env.close()


def synthetic_episodes(number, lengths=(3, 1, 5, 2)):
    """Return episodes of random numbers; every second episode terminates.

    The reward of a transition is sum(observation) + 10 * sum(action) + 100 * sum(next observation) + 1000 * number.
    """
    random, parts = np.random.default_rng(number), []
    for k, length in enumerate(lengths):
        observation = random.standard_normal((length + 1, 3)).astype(np.float32)
        action = random.uniform(-1, 1, (length, 2)).astype(np.float32)
        reward = observation[:-1].sum(1) + 10 * action.sum(1) + 100 * observation[1:].sum(1) + 1000 * number
        discount = np.ones(length, np.float32)
        discount[-1] = k % 2
        parts.append(Episodes({'': observation}, {'': action}, reward.astype(np.float32), discount, np.array([length])))
    return stored.joined(parts)


def steps_of(episodes):
    return nest.map_structure(lambda *x: torch.cat(x), *stored.steps(episodes, 0, OBSERVATION, ACTION, TensorSpec(())))


def through_a_folder(path, episodes):
    dataset_folder.write(str(path), episodes, {})
    return str(path)


def through_a_checkpoint(path, episodes):
    time_step, action = steps_of(episodes)
    experience = Experience(time_step, action)
    buffer = ReplayBuffer(nest.map_structure(lambda x: TensorSpec(x.shape[1:], x.dtype), experience), 1, 50,
                          enable_checkpoint=True)
    buffer.add_sequence(nest.map_structure(lambda x: x.unsqueeze(1), experience))

    class Holder(torch.nn.Module):
        def get_extra_state(self):
            return {'replay_buffer': buffer.state_dict()}

        def set_extra_state(self, state):
            pass

    return Checkpointer(str(path), alg=Holder()).save(1)


def through_a_file_of_alf(path, episodes):
    return file_of_alf(path, steps_of(episodes)[0])


def through_minari(path, episodes, monkeypatch):
    minari = pytest.importorskip('minari')
    pytest.importorskip('h5py')
    gymnasium = pytest.importorskip('gymnasium')
    from minari.data_collector import EpisodeBuffer
    monkeypatch.setenv('MINARI_DATASETS_PATH', str(path))
    parts = [episodes.part(i, i + 1) for i in range(len(episodes.lengths))]
    minari.create_dataset_from_buffers('test/round-v0', [EpisodeBuffer(
        observations=list(x.observation['']), actions=list(x.action['']), rewards=x.reward.tolist(),
        terminations=(x.discount == 0).tolist(), truncations=[False] * (len(x.reward) - 1) + [bool(x.discount[-1])])
        for x in parts], observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (3, )),
        action_space=gymnasium.spaces.Box(-1, 1, (2, )))
    return 'minari:test/round-v0'


ROUTES = {'folder': through_a_folder, 'checkpoint': through_a_checkpoint, 'file of ALF': through_a_file_of_alf,
          'minari': through_minari}


def buffer_of(names, **options):
    datasets = dataset_loading.load(names, None, OBSERVATION, ACTION, TensorSpec(()))
    spec = Experience(time_step_spec(OBSERVATION, ACTION), ACTION, BasicRLInfo(action=ACTION))
    return make_buffer(datasets, spec, **options)


def test_settings_for_recent_steps_do_not_concern_datasets(tmp_path):
    (tmp_path / 'x.gin').write_text('ReplayBuffer.recent_data_ratio = 0.9\nReplayBuffer.recent_data_steps = 2')
    name = through_a_folder(tmp_path / 'set', synthetic_episodes(0, (9, 8, 7, 6)))
    with gin_utils.loaded(str(tmp_path / 'x.gin'), []):
        buffer = buffer_of([name])
    experience, _ = buffer.get_batch(64, 2)
    assert len(experience.time_step.observation[:, 0].unique(dim=0)) > 10


@pytest.mark.filterwarnings('ignore::UserWarning:minari')
@pytest.mark.parametrize('route', ROUTES)
def test_every_sampled_pair_is_a_transition(route, tmp_path, monkeypatch):
    args = (monkeypatch, ) if route == 'minari' else ()
    experience, _ = buffer_of([ROUTES[route](tmp_path / 'data', synthetic_episodes(0), *args)]).get_batch(400, 2)
    time_step = experience.time_step
    is_pair = time_step.step_type[:, 0] != StepType.LAST
    first, second = (time_step.observation[is_pair, t].sum(-1) for t in range(2))
    expected = first + 10 * experience.action[is_pair, 0].sum(-1) + 100 * second
    torch.testing.assert_close(time_step.reward[is_pair, 1], expected, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(time_step.prev_action[is_pair, 1], experience.action[is_pair, 0])
    ends = time_step.step_type[is_pair, 1] == StepType.LAST
    assert 0 < (time_step.discount[is_pair, 1] == 0).sum() < ends.sum() < is_pair.sum()
    assert (time_step.discount[is_pair, 1][~ends] == 1).all()


def test_no_sequence_crosses_from_one_dataset_into_another(tmp_path):
    names = [through_a_folder(tmp_path / str(number), synthetic_episodes(number)) for number in (0, 3, 7)]
    experience, info = buffer_of(names).get_batch(600, 3)
    time_step = experience.time_step
    assert (time_step.env_id == time_step.env_id[:, :1]).all() and time_step.env_id.unique().tolist() == [-3, -2, -1]
    is_valid = time_step.step_type != StepType.FIRST
    number = torch.tensor([0, 3, 7])[-1 - time_step.env_id]
    # without 1000 * number, a reward is a sum of the random numbers of its transition
    assert ((time_step.reward - 1000 * number).abs()[is_valid] < 900).all()


def test_looking_back_in_the_buffer_matches_online_data(tmp_path):
    """Compare frames before a step in the dataset and in a buffer to which single steps were added."""
    names = [through_a_folder(tmp_path / str(number), synthetic_episodes(number)) for number in (1, 2)]
    offline = buffer_of(names, keep_episodic_info=True)
    online = ReplayBuffer(offline.data_spec, 2, offline.max_length, keep_episodic_info=True)
    datasets = [steps_of(synthetic_episodes(number)) for number in (1, 2)]
    for t in range(offline.max_length):
        time_step, action = nest.map_structure(lambda *x, t=t: torch.stack([y[t] for y in x]), *datasets)
        online.add_batch(Experience(time_step, action, BasicRLInfo(action=action)))
    positions, found = torch.arange(offline.max_length - 1).repeat(2), []
    env_ids = torch.arange(2).repeat_interleave(offline.max_length - 1)
    for buffer in (online, offline):
        experience, info = buffer.get_sequences(env_ids, positions, 2)
        stacker = FrameStacker(OBSERVATION, stack_size=3)
        found.append(stacker.transform_experience(add_batch_info(experience, info, buffer)).time_step)
    assert found[0].observation.shape == (len(positions), 2, 9)
    for field in ('observation', 'reward', 'step_type', 'discount', 'prev_action'):
        assert torch.equal(getattr(found[0], field), getattr(found[1], field)), field


def test_a_dataset_may_be_a_file_instead_of_memory(tmp_path):
    name = through_a_folder(tmp_path / 'data', synthetic_episodes(1))
    batches = []
    for options in ({}, dict(memory_map_dir=str(tmp_path))):
        batches.append(buffer_of([name], **options).gather_all()[0])
    for x, y in zip(*map(nest.flatten, batches)):
        assert torch.equal(x, y)


def test_datasets_are_read_identically_by_every_route(tmp_path):
    read = [dataset_sources.read(ROUTES[route](tmp_path / route.replace(' ', '_'), synthetic_episodes(5))).episodes
            for route in ('folder', 'checkpoint', 'file of ALF')]
    for other in read[1:]:
        assert np.array_equal(other.observation[''], read[0].observation[''])
        assert np.array_equal(other.reward, read[0].reward) and np.array_equal(other.discount, read[0].discount)
        assert np.array_equal(other.action[''], read[0].action['']) and np.array_equal(other.lengths, read[0].lengths)


def test_a_run_with_an_empty_replay_buffer_has_no_episode(tmp_path):
    run = str(tmp_path / 'run')
    alfx.train('ppo_cart_pole', {'create_environment.num_parallel_environments': 1, 'TrainerConfig.num_iterations': 1,
                                 'TrainerConfig.num_env_steps': 0, 'TrainerConfig.unroll_length': 8,
                                 'TrainerConfig.num_updates_per_train_iter': 1, 'TrainerConfig.mini_batch_size': 8,
                                 'TrainerConfig.evaluate': False}, run)
    with pytest.raises(DatasetError, match='ckpt-1: its replay buffer contains no episode\n.*on-policy'):
        dataset_sources.read(run)
