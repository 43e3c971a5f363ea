"""PPO with demonstrations: pools, replayed columns, and a task that only a demonstration solves."""
from functools import partial

import pytest
import torch

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.ppod_algorithm import PpodAlgorithm
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.algorithms.trac_algorithm import TracAlgorithm
from alfx.data_structures import StepType, TimeStep
from alfx.environments import suite_exploration
from alfx.environments.utils import create_environment
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.offline import recorder
from alfx.offline import dataset_folder
from alfx.offline.pools import Demonstration, EpisodeTracker, Pools, Slots, score_of
from alfx.optimizers import Adam

F, M, L = (int(x) for x in (StepType.FIRST, StepType.MID, StepType.LAST))


def episode(score, length=4, number=0, **kwargs):
    """Return an episode whose observations are ``100 * number + t``."""
    step_type = torch.tensor([F, *[M] * (length - 2), L], dtype=torch.int32)
    reward = torch.zeros(length)
    reward[-1] = score
    time_step = TimeStep(step_type=step_type, reward=reward, discount=torch.ones(length),
                         observation=100.0 * number + torch.arange(length), prev_action=torch.zeros(length))
    return Demonstration((time_step, torch.arange(length)), score_of(time_step), **kwargs)


def pools(**kwargs):
    arguments = dict(rho=0.1, phi=0.3, alpha=10.0, capacity=5, threshold=None)
    return Pools([episode(1.0, is_given=True)], **{**arguments, **kwargs})


def test_own_episodes_join_the_rewarded_pool_or_compete_by_value():
    """Collected episodes that score as much as a demonstration are rewarded episodes; others compete by value."""
    stored = pools()
    for value in (0.3, 0.1, 0.2, 0.4, 0.5, 0.6):
        stored.add(episode(0.0, max_value=value))
    assert sorted(x.max_value for x in stored.with_value) == [0.3, 0.4, 0.5, 0.6] and len(stored.with_reward) == 1
    assert stored.rho == pytest.approx(0.1) and stored.phi == 0.3
    stored.add(episode(1.0))
    assert [x.max_value for x in stored.with_value] == [0.4, 0.5, 0.6] and len(stored.with_reward) == 2
    assert stored.phi == pytest.approx(0.3 - 0.3 / 5) and stored.rho + stored.phi == pytest.approx(0.4)
    for _ in range(10):
        stored.add(episode(2.0))
    assert len(stored.with_reward) == 5 and not stored.with_value and stored.phi == 0.0
    assert stored.with_reward[0].is_given, 'what was given is never dropped'


def test_a_threshold_can_be_specified():
    stored = pools(threshold=3.0)
    stored.add(episode(2.0))
    assert len(stored.with_value) == 1


def test_episodes_are_drawn_by_their_shares_and_the_power_of_their_value():
    stored = pools(alpha=2.0)
    assert stored.draw() is stored.with_reward[0], 'there is nothing else'
    for value in (1.0, 2.0):
        stored.add(episode(0.0, max_value=value))
    assert stored.chances().tolist() == pytest.approx([1 / 5, 4 / 5])
    torch.manual_seed(0)
    sampled = [stored.draw() for _ in range(4000)]
    shares = [sum(x is y for x in sampled) / 4000 for y in (*stored.with_reward, *stored.with_value)]
    assert shares == pytest.approx([0.25, 0.75 / 5, 0.75 * 4 / 5], abs=0.03)


def test_slots_replay_episodes_without_gaps_and_restart_at_their_end():
    stored = Pools([episode(1.0, length=3, is_given=True)], 0.1, 0.3, 10.0, 5, None)
    slots = Slots(stored, 2)
    first, action = slots.next_steps(4)
    second, _ = slots.next_steps(4)
    assert first.observation.tolist() == [[0, 1, 2, 0]] * 2 and action.tolist() == [[0, 1, 2, 0]] * 2
    assert second.observation.tolist() == [[0, 1, 2, 0]] * 2 and second.step_type[0].tolist() == [F, M, L, F]
    slots.note_values(torch.tensor([[5.0, 1.0, 2.0, 9.0], [0.0, 1.0, 2.0, 3.0]]))
    assert stored.with_reward[0].max_value == 2.0, 'of the slot that ended last; 9 belongs to the next episode'


def test_unrolls_are_cut_into_episodes():
    tracker = EpisodeTracker(1)
    kinds = torch.tensor([[M, L, F, M], [M, L, F, L]], dtype=torch.int32)
    found = []
    for row, values in zip(kinds, ([9.0, 9.0, 1.0, 2.0], [3.0, 0.0, 7.0, 6.0])):
        time_step = TimeStep(step_type=row[None], reward=torch.ones(1, 4), observation=torch.arange(4)[None])
        found.append(tracker.add((time_step, torch.zeros(1, 4)), torch.tensor([values])))
    assert found[0] == [], 'its beginning was not seen'
    assert [x.length for x in found[1]] == [4, 2]
    assert [x.score for x in found[1]] == [3.0, 1.0] and [x.max_value for x in found[1]] == [3.0, 7.0]


def test_the_pools_are_kept_in_a_checkpoint():
    stored = pools()
    for score, value in ((0.0, 0.5), (1.0, 0.2)):
        stored.add(episode(score, number=3, max_value=value))
    restored = pools()
    restored.load(stored.state())
    assert restored.phi == stored.phi and len(restored.with_reward) == 2 and len(restored.with_value) == 1
    torch.testing.assert_close(restored.with_value[0].steps, stored.with_value[0].steps)


def test_slots_continue_within_an_episode_even_if_it_was_dropped():
    stored = Pools([episode(1.0, length=3, is_given=True)], 0.1, 0.0, 10.0, 5, None)
    stored.add(episode(2.0, length=5))
    torch.manual_seed(0)
    slots = Slots(stored, 4)
    slots.next_steps(2)
    slots.note_values(torch.ones(4, 2))
    assert len({x.length for x in slots._current}) == 2, 'some replay the one, some the other'
    stored.with_reward.pop()
    restored = Pools([stored.with_reward[0]], 0.1, 0.0, 10.0, 5, None)
    restored.load(stored.state())
    gone_on = Slots(restored, 4, slots.state())
    for _ in range(3):
        torch.testing.assert_close(gone_on.next_steps(3), slots.next_steps(3))
    assert gone_on._highest == slots._highest


def test_ongoing_episodes_are_kept_and_abandoned_ones_dropped():
    def part(*kinds):
        kinds = torch.tensor([kinds], dtype=torch.int32)
        return TimeStep(step_type=kinds, reward=torch.ones(kinds.shape), observation=kinds), kinds

    tracker, restored, value = EpisodeTracker(1), EpisodeTracker(1), torch.ones(1, 2)
    tracker.add(part(F, M), 5 * value)
    restored.load(tracker.state(), nest.structure(part(F)).unflatten)
    found = restored.add(part(M, L), value)
    assert [x.length for x in found] == [4] and found[0].max_value == 5.0
    found = tracker.add(part(F, L), value)  # the environments have been restarted
    assert [x.length for x in found] == [2] and found[0].max_value == 1.0


# In an agent -------------------------------------------------------------------------------------------------------


def corridor(count):
    return create_environment(env_name='Corridor', env_load_fn=suite_exploration.load, num_parallel_environments=count,
                              nonparallel=True)


@pytest.fixture(scope='module')
def demonstration(tmp_path_factory):
    """Return an episode that goes straight to the end of the corridor."""
    env = corridor(1)
    env.reset()
    on = torch.tensor(suite_exploration.CorridorEnv().actions_on + [0])
    episodes = recorder.record(env, lambda step: on[step.observation.argmax(-1)], len(on) - 1)
    path = str(tmp_path_factory.mktemp('data') / 'corridor')
    dataset_folder.write(path, episodes, {})
    env.close()
    return path


def make_agent(demonstrations, unroll_length=32, count=8, cls=PpodAlgorithm, agent_args=None, network=None, **kwargs):
    torch.manual_seed(0)
    context.reset()
    env = corridor(count)
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=unroll_length, mini_batch_size=128,
                           mini_batch_length=1, num_updates_per_train_iter=3)
    if cls is PpodAlgorithm:
        kwargs['demonstrations'] = demonstrations
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=partial(cls, actor_network_ctor=partial(
                      ActorDistributionNetwork, fc_layer_params=(32, )), value_network_ctor=partial(
                          ValueNetwork, fc_layer_params=(32, )), loss_class=PPOLoss, **kwargs),
                  optimizer=Adam(lr=3e-3), **(agent_args or {}))
    agent.set_path('')
    agent.finalize()
    return agent


def test_replayed_columns_follow_collected_ones_with_probability_one(demonstration):
    agent = make_agent(demonstration, rho=0.1, phi=0.3)
    seen = []
    original = agent.policy.preprocess_experience

    def preprocess(inputs, info, batch_info):
        seen.append((inputs, original(inputs, info, batch_info)[1]))
        return original(inputs, info, batch_info)

    agent.policy.preprocess_experience = preprocess
    agent.train_iter()
    inputs, info = seen[0]
    assert inputs.step_type.shape == (8 + 5, 33), '8 * 0.4 / 0.6 is about 5'
    assert (info.rollout_log_prob[8:] == 0).all() and (info.rollout_log_prob[:8] < -0.1).all()
    cells = inputs.observation[8:].argmax(-1)
    assert cells[0, :25].tolist() == list(range(25)) and inputs.reward[8, 24] == 1 and inputs.discount[8, 24] == 0
    on = suite_exploration.CorridorEnv().actions_on
    assert info.action[8, :24].tolist() == on
    torch.testing.assert_close(inputs.prev_action[8, 1:25], info.action[8, :24])


def success(agent):
    """Return the probability of going straight to the end."""
    actions = torch.tensor(suite_exploration.CorridorEnv().actions_on)
    step = TimeStep(step_type=torch.ones(24, dtype=torch.int32), observation=torch.eye(25)[:24])
    distribution = agent.policy.predict_step(step, ()).info.action_distribution
    return distribution.log_prob(actions).exp().min().item()


def test_one_demonstration_teaches_a_task_beyond_exploration(demonstration):
    agent = make_agent(demonstration)
    for _ in range(60):
        agent.train_iter()
    pools = agent.policy._pools
    assert success(agent) > 0.6
    assert len(pools.with_reward) > 1 and pools.phi < 0.3, 'it has got there itself'


def test_found_episodes_are_restored_from_a_checkpoint(demonstration):
    agent = make_agent(demonstration)
    for _ in range(8):
        agent.train_iter()
    pools = agent.policy._pools
    assert pools.with_value
    restored_agent = make_agent(demonstration)
    before = agent.policy._slots.state()['position']
    restored_agent.load_state_dict(agent.state_dict())
    restored_agent._rl_algorithm.prepare(restored_agent)
    assert restored_agent._rl_algorithm._slots.state()['position'] == before
    restored_agent.train_iter()
    restored = restored_agent._rl_algorithm._pools
    assert nest.flatten(pools.with_value[0].steps)[0].shape == nest.flatten(restored.with_value[0].steps)[0].shape
    assert len(restored.with_value) >= len(pools.with_value) - 1


def test_the_best_own_episodes_become_demonstrations_of_another_run(demonstration, tmp_path):
    """Save the collected episodes with the highest returns, and add them to a run that is under way."""
    target = str(tmp_path / 'shared' / 'best')
    agent = make_agent(demonstration, target_agent_demos_dir=target, num_agent_demos_to_save=2, save_demos_every=3)
    agent.train_iter()
    for score, number in ((1.0, 1), (3.0, 2), (2.0, 3)):
        demo = agent.policy._pools.with_reward[0]
        step, action = nest.map_structure(torch.clone, demo.steps)
        step.reward[-1] = score
        step.observation[0] = number
        agent.policy._pools.add(Demonstration((step, action), score))
    other = make_agent(demonstration, supplementary_demos_dir=str(tmp_path / 'shared'))
    other.train_iter()
    agent.train_iter()
    assert not dataset_folder.is_dataset(target)
    agent.train_iter()
    episodes = dataset_folder.read(target).episodes
    assert episodes.reward[episodes.reward > 0].tolist() == [3.0, 2.0]
    assert episodes.observation[''][[0, 25], 0].tolist() == [2.0, 3.0]
    (tmp_path / 'shared' / 'damaged').mkdir()
    (tmp_path / 'shared' / 'damaged' / 'dataset.json').write_text('{')
    for _ in range(2):
        other.train_iter()
    added = [demo.score for demo in other.policy._pools.with_reward if not demo.is_given]
    assert sorted(added) == [2.0, 3.0], 'each dataset is read once'
    other_agent = make_agent(demonstration, supplementary_demos_dir=str(tmp_path / 'shared'))
    other_agent.load_state_dict(other.state_dict())
    other_agent.policy.prepare(other_agent)
    other_agent.train_iter()
    assert sorted(x.score for x in other_agent.policy._pools.with_reward if not x.is_given) == [2.0, 3.0]


def test_a_dataset_from_another_source_is_not_overwritten(demonstration):
    with pytest.raises(ConfError, match='target_agent_demos_dir.*has not written\n.*another folder'):
        make_agent(demonstration, target_agent_demos_dir=demonstration)


def test_unsupported_settings_are_rejected(demonstration):
    for kwargs, word in ((dict(demonstrations=''), 'demonstrations'), (dict(rho=0.6, phi=0.5), 'below 1'),
                         (dict(demonstrations='/nowhere'), '/nowhere')):
        with pytest.raises(ConfError, match=word):
            make_agent(**{'demonstrations': demonstration, **kwargs})
    network = partial(EncodingNetwork, fc_layer_params=(4, ))
    module = partial(RNDAlgorithm, target_net=network, predictor_net=network, keep_stacked_frames=0)
    with pytest.raises(ConfError, match='irm'):
        make_agent(demonstration, agent_args=dict(intrinsic_reward_module=module)).train_iter()


def test_another_algorithm_around_it_is_rejected(demonstration):
    def inside_trac(*args, actor_network_ctor, value_network_ctor, loss_class, **kwargs):
        ppod = partial(PpodAlgorithm, demonstrations=demonstration, actor_network_ctor=actor_network_ctor,
                       value_network_ctor=value_network_ctor, loss_class=loss_class)
        return TracAlgorithm(*args, ac_algorithm_cls=ppod, **kwargs)

    with pytest.raises(ConfError, match='are not replayed inside of another algorithm'):
        make_agent(demonstration, cls=inside_trac).train_iter()
