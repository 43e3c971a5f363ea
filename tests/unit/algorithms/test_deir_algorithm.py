"""DEIR: rewards against a slow loop, the discriminator and its queue, and runs in tiny environments."""
from functools import partial

import pytest
import torch
from helpers import agents, sac_agents
from helpers.intrinsic_reward_contract import ACTION, random_steps, rewarded
from helpers.plans import num_graphs

from alfx import nest
from alfx.algorithms.deir_algorithm import DeirAlgorithm, DeirPair, _ObservationQueue
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.gin_utils import ConfError
from alfx.layers import Cast
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

CELLS = BoundedTensorSpec((2, ), torch.int64, 0, 2)
LENGTH, BATCH = 70, 3
NETWORK = partial(EncodingNetwork, fc_layer_params=(8, ))
DEIR = partial(DeirAlgorithm, encoding_net=NETWORK, trajectory_size=5, hidden_size=8, queue_capacity=20)


def steps(seed=0):
    """Return time steps of episodes of about 15 steps; one column begins within an episode."""
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.where(torch.rand(LENGTH, BATCH, generator=generator) < 0.07, 0, 1)
    step_type[0] = torch.tensor([0, 0, 1])
    step_type[31:33, 1] = 0
    step_type[:-1][step_type[1:] == 0] += step_type[:-1][step_type[1:] == 0]  # LAST before FIRST
    return random_steps(LENGTH, BATCH, observation_spec=CELLS, seed=seed, step_type=step_type)


def make(**arguments):
    torch.manual_seed(0)
    network = torch.nn.Sequential(Cast(), torch.nn.Linear(2, 4), torch.nn.Tanh())
    return DeirAlgorithm(CELLS, ACTION, network, **dict(
        dict(trajectory_size=5, hidden_size=8, normalization='none', queue_capacity=50), **arguments))


def expected_rewards(module, inputs, capacity=1000):
    """Return the rewards and trajectories by a loop over steps."""
    reward, trajectories = torch.zeros(LENGTH, BATCH), torch.zeros(LENGTH, BATCH, 5)
    with torch.no_grad():
        for b in range(BATCH):
            z, h, now = [], [], torch.zeros(1, 5)
            for t in range(LENGTH):
                if inputs.step_type[t, b] == 0:
                    z, h, now = [], [], torch.zeros(1, 5)
                trajectories[t, b] = now
                feature = module._encoding_net(inputs.observation[t, b:b + 1])[0]
                ratios = [((feature - other).norm()**2 / ((now - before).norm() + 1e-6)).item()
                          for other, before in zip(z[-capacity:], h[-capacity:])]
                reward[t, b] = min(ratios, default=0.0)
                z.append(feature)
                h.append(now)
                now = module._recurrent_net(feature, now)
    return reward, trajectories


@pytest.mark.parametrize('capacity', [1000, 4])
def test_rewards_match_a_loop(capacity):
    module, inputs = make(capacity=capacity), steps()
    expected, trajectories = expected_rewards(module, inputs, capacity)
    step = module.reward_steps(inputs, module.get_initial_unroll_state(BATCH))
    torch.testing.assert_close(step.output, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(step.info, trajectories)
    assert (step.output[inputs.step_type == 0] == 0).all() and (step.output > 0).float().mean() > 0.2


def test_the_reward_by_hand():
    """z = 0, 3, 1 and h = 0, h1, h2: the reward at the last step is min(1 / |h2|, 4 / |h2 - h1|)."""
    module = DeirAlgorithm(TensorSpec((1, )), ACTION, torch.nn.Identity(), trajectory_size=1, normalization='none')
    module._recurrent_net.forward = lambda z, h: h + 2.0  # h = 0, 2, 4
    inputs = random_steps(3, 1, observation_spec=TensorSpec((1, )), step_type=[[0], [1], [1]])
    inputs = inputs._replace(observation=torch.tensor([0.0, 3, 1]).reshape(3, 1, 1))
    torch.testing.assert_close(rewarded(module, inputs).flatten(), torch.tensor([0.0, 9 / 2, 1 / 4]))


def test_a_change_along_the_same_trajectory_has_a_large_positive_reward():
    """h = 0 throughout, z = 0 and 1: the reward is 1 / (0 + 1e-6)."""
    module = DeirAlgorithm(TensorSpec((1, )), ACTION, torch.nn.Identity(), trajectory_size=1, normalization='none')
    module._recurrent_net.forward = lambda z, h: h
    inputs = random_steps(2, 1, observation_spec=TensorSpec((1, )), step_type=[[0], [1]])
    inputs = inputs._replace(observation=torch.tensor([0.0, 1]).reshape(2, 1, 1))
    torch.testing.assert_close(rewarded(module, inputs).flatten(), torch.tensor([0.0, 1e6]))


@pytest.mark.parametrize('sizes', [[1] * LENGTH, [7] * 10, [31, 1, 1, 30, 6, 1]])
def test_any_cut_into_unrolls_gives_the_same_rewards(sizes):
    module, inputs = make(), steps()
    torch.testing.assert_close(rewarded(module, inputs, sizes), rewarded(module, inputs), rtol=1e-4, atol=1e-6)


def test_environments_and_episodes_do_not_affect_each_other():
    module, inputs, order = make(), steps(), [2, 0, 1]
    bonus = rewarded(module, inputs)
    permuted = rewarded(module, nest.map_structure(lambda x: x[:, order], inputs))
    torch.testing.assert_close(permuted, bonus[:, order], rtol=1e-4, atol=1e-6)
    start = int((inputs.step_type[1:, 1] == 0).nonzero()[0]) + 1
    single = rewarded(module, nest.map_structure(lambda x: x[start:, 1:2], inputs))
    torch.testing.assert_close(single[:, 0], bonus[start:, 1], rtol=1e-4, atol=1e-6)


def test_pairs_hold_the_trajectory_before_their_step_in_each_unroll():
    module, inputs = make(), steps()
    _, trajectories = expected_rewards(module, inputs)
    state, start = None, 0
    for length in (8, 20, 3):
        rows = slice(start, start + length + 1)
        part = nest.map_structure(lambda x, rows=rows: x[rows], inputs)
        step = module.reward_rows(part, state, True)
        assert (step.output[0] == 0).all()
        torch.testing.assert_close(step.info.trajectory, trajectories[rows])
        assert torch.equal(step.info.both[:, :, 0], part.observation)
        assert torch.equal(step.info.both[:-1, :, 1], part.observation[1:])
        action = torch.nn.functional.one_hot(part.prev_action[1:].long(), 3).float()
        assert torch.equal(step.info.action[:-1], action)
        begins = part.step_type[1:] == 0
        assert not step.info.exists[-1].any() and not step.info.exists[:-1][begins].any()
        assert step.info.exists.any()
        state, start = step.state, start + length


def test_the_loss_is_the_cross_entropy_of_true_and_other_observations():
    module, inputs = make(), steps()
    pairs = module.reward_rows(inputs, None, True).info
    info = module.train_sequence(inputs, (), pairs).info
    for t, b in ((0, 0), (5, 1), (30, 2)):
        pair = nest.map_structure(lambda x, t=t, b=b: x[t, b], pairs)
        z, after, other = (module._encoding_net(x.unsqueeze(0))[0] for x in (*pair.both, pair.other))
        known = torch.cat((module._recurrent_net(z, pair.trajectory.unsqueeze(0)), pair.action.unsqueeze(0)), -1)
        true, false = (torch.sigmoid(module._discriminator(torch.cat((known, x), -1))[0]).item()
                       for x in (after, other))
        expected = -0.5 * (torch.tensor(true).log() + torch.tensor(1 - false).log())
        assert info.loss[t, b].item() == pytest.approx(expected.item(), rel=1e-4)
        assert info.accuracy[t, b].item() == ((true > 0.5) + (false < 0.5)) / 2
    loss = module.calc_loss(info).loss
    assert torch.equal(loss, info.loss * pairs.exists) and (loss == 0).any() and (loss > 0).any()
    single = module.train_step(nest.map_structure(lambda x: x[3], inputs), (),
                               nest.map_structure(lambda x: x[3], pairs)).info
    torch.testing.assert_close(single.loss, info.loss[3])


def test_an_undecided_discriminator_has_loss_log_2_and_no_accuracy():
    module, inputs = make(), steps()
    pairs = module.reward_rows(inputs, None, True).info
    with torch.no_grad():
        for p in module._discriminator.parameters():
            p.zero_()
    info = module.train_sequence(inputs, (), pairs).info
    torch.testing.assert_close(info.loss, torch.full((LENGTH, BATCH), 0.6931472))
    assert not info.accuracy.any()


def test_the_discriminator_learns_what_follows_from_an_action():
    """The next observation is the action; others are drawn at random."""
    module = make(queue_capacity=100)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        action, other = (torch.randint(0, 3, (64, ), generator=generator) for _ in range(2))
        other = torch.where(other == action, (other + 1) % 3, other)
        before, after, wrong = (torch.stack((x, x), -1) for x in (torch.zeros_like(action), action, other))
        pair = DeirPair(torch.stack((before, after), 1), module._action_encoder(action), wrong, torch.zeros(64, 5),
                        torch.ones(64, dtype=torch.bool))
        info = module.train_step(None, (), pair).info
        optimizer.zero_grad()
        info.loss.mean().backward()
        optimizer.step()
    assert info.accuracy.mean() > 0.95


def test_the_queue_takes_observations_with_more_than_the_mean_reward():
    module, inputs = make(queue_capacity=1000), steps()
    reward = rewarded(module, inputs)
    mean = reward[(inputs.step_type != 0) & ~((torch.arange(LENGTH) == 0)[:, None] & (inputs.step_type == 1))].mean()
    expected = inputs.observation[reward > mean]
    assert torch.equal(module._queue._field0[:len(expected)], expected) and 5 < len(expected) < LENGTH * BATCH / 2
    assert module._queue._num_added == len(expected)


def test_an_observation_with_the_mean_reward_is_not_queued():
    module = make()
    inputs = random_steps(4, 2, observation_spec=CELLS, step_type=[[0, 0]] + [[1, 1]] * 3)
    reward = rewarded(module, inputs._replace(observation=torch.ones_like(inputs.observation)))
    assert not reward.any() and module._queue._num_added == 0


def test_the_queue_replaces_its_oldest_observations():
    queue = _ObservationQueue(TensorSpec((), torch.int64), 4)
    for numbers in ([1, 2, 3], [4, 5], [], [6, 7, 8, 9, 10, 11]):
        queue.add(torch.tensor(numbers, dtype=torch.int64))
    assert sorted(queue._field0.tolist()) == [8, 9, 10, 11]
    queue.add(torch.tensor([12]))
    assert sorted(queue._field0.tolist()) == [9, 10, 11, 12]


def test_drawn_observations_differ_from_the_given_ones_if_one_of_two_does():
    torch.manual_seed(0)
    queue = _ObservationQueue({'a': TensorSpec((2, )), 'b': TensorSpec((), torch.int64)}, 10)
    observations = {'a': torch.zeros(500, 2, 2), 'b': torch.zeros(500, 2, dtype=torch.int64)}
    assert not queue.draw(observations)[1].any()  # empty
    queue.add({'a': torch.zeros(2, 2), 'b': torch.tensor([0, 1])})
    other, exists = queue.draw(observations)
    assert torch.equal(other['b'] == 1, exists)
    assert exists.float().mean().item() == pytest.approx(3 / 4, abs=0.05)  # unless both draws are the equal one


# In agents -------------------------------------------------------------------------------------------------------

def make_agent(algorithm='ppo', environment='discrete', **arguments):
    return agents.make_agent(algorithm, environment, intrinsic_reward_module=DEIR, **arguments)


@pytest.mark.parametrize('algorithm', ['ppo', 'ppg', 'impala', 'actor-critic'])
@pytest.mark.parametrize('environment', ['discrete', 'continuous'])
def test_the_networks_are_trained(algorithm, environment):
    agent, _ = make_agent(algorithm, environment)
    before = {key: p.detach().clone() for key, p in agent.intrinsic_reward.named_parameters()}
    for _ in range(4):
        agent.train_iter()
    assert agent.intrinsic_reward._queue._num_added > 0
    for key, p in agent.intrinsic_reward.named_parameters():
        assert p.isfinite().all() and not torch.equal(p, before[key]), key


@pytest.mark.parametrize('algorithm', ['ppo', 'actor-critic'])
def test_replayed_updates_are_those_of_eager_mode(algorithm, warm_up):
    results = []
    for updates_before in (2, 10**6):
        warm_up(updates_before)
        agent, _ = make_agent(algorithm)
        for _ in range(5):
            agent.train_iter()
        assert bool(num_graphs(agent)) == (updates_before == 2)
        results.append([p.detach().clone() for p in agent.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_mixture_with_deir_trains():
    module = [DEIR, partial(ICMAlgorithm, encoding_net=NETWORK, hidden_size=8)]
    agent, _ = agents.make_agent('ppo', 'discrete', intrinsic_reward_module=module)
    agent.train_iter()
    assert list(agent.reward_coefficients()) == ['extrinsic', 'DeirAlgorithm', 'ICMAlgorithm']


@pytest.mark.parametrize('algorithm', ['ppo', 'impala'])
def test_a_run_resumes_exactly(algorithm):
    agent, env = make_agent(algorithm)
    for _ in range(3):
        agent.train_iter()
    saved, rollout, env_state = dict(agent.state_dict()), agent.learner.state_dict(), env.get_state()
    saved, rollout = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (saved, rollout))
    random_state = torch.get_rng_state()
    agent.train_iter()
    copy, copy_env = make_agent(algorithm, seed=5)
    copy_env.set_state(env_state)
    copy.load_state_dict(saved)
    copy.learner.load_state_dict(rollout)
    torch.set_rng_state(random_state)
    copy.train_iter()
    for a, b in zip(nest.flatten(agent.learner.collector.unroll_state),
                    nest.flatten(copy.learner.collector.unroll_state)):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(agent.parameters(), copy.parameters()))
    assert torch.equal(agent.intrinsic_reward._queue._field0, copy.intrinsic_reward._queue._field0)


def test_a_longer_episode_than_the_memory_is_reported_once(caplog):
    agent, _ = agents.make_agent('ppo', 'discrete', intrinsic_reward_module=partial(DEIR, capacity=3))
    for _ in range(3):
        agent.train_iter()
    assert caplog.text.count('an episode is longer than the 3 steps that are remembered') == 1


def test_a_reward_that_is_not_finite_names_the_module():
    agent, _ = make_agent()
    with torch.no_grad():
        next(agent.intrinsic_reward._encoding_net.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteLossError, match='irm: the ratio of distances is NaN or infinite'):
        agent.train_iter()


def test_algorithms_that_sample_stored_steps_are_rejected():
    with pytest.raises(ConfError, match='DeirAlgorithm, but SacAlgorithm trains on sampled steps'):
        sac_agents.make_agent('discrete', agent_args=dict(intrinsic_reward_module=DEIR))


@pytest.mark.parametrize(('arguments', 'message'), [
    (dict(normalization='mean'), 'normalization must be one of'), (dict(capacity=0), 'capacity'),
    (dict(queue_capacity=0), 'queue_capacity'), (dict(hidden_size=0), 'hidden_size'),
    (dict(trajectory_size=0), 'trajectory_size')])
def test_arguments_out_of_range_are_rejected_by_name(arguments, message):
    with pytest.raises(ConfError, match=message):
        make(**arguments)
