"""Common properties of DDPG and TD3 against slow loops, hand-computed constants and identities."""
from functools import partial

import pytest
import torch
from helpers.deterministic_agents import ENVIRONMENTS, make_agent
from torch import nn

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.exploration_noise import GaussianNoise, ZetaRepeat
from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.ddpg_algorithm import DdpgAlgorithm, DdpgState
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType, TimeStep, valid_masks
from alfx.engine.loss_reduction import reduce_loss
from alfx.gin_utils import ConfError
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

ALGORITHMS = {'ddpg': DdpgAlgorithm, 'td3': partial(Td3Algorithm, policy_update_period=1)}
every_algorithm = pytest.mark.parametrize('algorithm', list(ALGORITHMS))
every_environment = pytest.mark.parametrize('environment', list(ENVIRONMENTS))


def rows_of(observation):
    return Rows((TimeStep(observation=observation), ()))


def agent_of(algorithm, environment='continuous', **args):
    return make_agent(ALGORITHMS[algorithm], environment, **args)


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


def copied(nested):
    return nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, nested)


# Common properties of algorithms -------------------------------------------------------------------------------------


@every_algorithm
@every_environment
class TestContract:

    def test_training_changes_every_parameter(self, algorithm, environment):
        agent, _ = agent_of(algorithm, environment, num_critic_replicas=2)
        before = parameters(agent)
        assert [agent.train_iter() for _ in range(3)] == [2 * 8 * 2] * 3  # two updates of 8 sequences of 2 steps
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters(agent))]
        assert all(changed), [n for (n, _), c in zip(agent.named_parameters(), changed) if not c]

    def test_same_seed_gives_the_same_parameters(self, algorithm, environment):
        results = []
        for _ in range(2):
            agent, _ = agent_of(algorithm, environment, seed=3)
            for _ in range(3):
                agent.train_iter()
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_steps_do_not_change_their_inputs(self, algorithm, environment):
        agent, env = agent_of(algorithm, environment, epsilon_greedy=0.5)
        time_step = env.current_time_step()
        for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                              (agent.predict_step, agent.get_initial_predict_state(4))):
            copies = copied((time_step, state))
            method(time_step, state)
            for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state))):
                assert torch.equal(old, new)

    def test_a_checkpoint_restores_the_next_update(self, algorithm, environment):
        agent, env = agent_of(algorithm, environment)
        agent.train_iter()
        saved, env_state, rollout = (copied(dict(agent.state_dict())), env.get_state(),
                                     copied(agent.learner.state_dict()))
        other, other_env = agent_of(algorithm, environment, seed=9)
        other.load_state_dict(saved)
        other_env.set_state(env_state)
        other.learner.load_state_dict(rollout)
        for a in (agent, other):
            a.replay_buffer.clear()
            torch.manual_seed(5)
            a.train_iter()
        assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(other)))

    def test_one_environment_is_enough(self, algorithm, environment):
        agent, _ = agent_of(algorithm, environment, batch_size=1, mini_batch_size=1)
        for _ in range(4):
            agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_actions_and_states_match_their_specs(self, algorithm, environment):
        agent, env = agent_of(algorithm, environment)
        for method, state, spec in (
            (agent.rollout_step, agent.get_initial_rollout_state(4), agent.rollout_state_spec),
            (agent.predict_step, agent.get_initial_predict_state(4), agent.predict_state_spec)):
            step = method(env.current_time_step(), state)
            for found, expected in ((step.output, agent.action_spec), (step.state, spec)):
                nest.assert_same_structure(expected, found)
                for s, x in zip(nest.flatten(expected), nest.flatten(found)):
                    assert (tuple(x.shape), x.dtype) == ((4, *s.shape), s.dtype)

    def test_the_states_of_the_rollout_can_be_trained_from(self, algorithm, environment):
        agent, _ = agent_of(algorithm, environment, use_rollout_state=True)
        agent.train_iter()
        experience, _ = agent.replay_buffer.get_batch(8, 2)
        rl_state = experience.state.rl
        assert isinstance(rl_state, DdpgState)
        parts = [rl_state.actor.actor, rl_state.actor.critics, *rl_state.critics]
        if environment == 'recurrent':
            # the first step of an episode gets zeros, the others get the state of the previous step
            is_first = experience.time_step.is_first()
            for leaf in nest.flatten(parts):
                moved = leaf.abs().sum(tuple(range(2, leaf.ndim))) > 0
                assert torch.equal(moved, ~is_first)
        else:
            assert nest.flatten(parts) == []


# Sequences and losses ------------------------------------------------------------------------------------------------


def random_steps(agent, length, batch, seed=1):
    """Return random time steps ``[T, B]`` with terminations, truncations and episode starts, and rollout infos."""
    generator = torch.Generator().manual_seed(seed)

    def like(spec):
        return torch.randn(length, batch, *spec.shape, generator=generator)

    step_type = torch.randint(0, 3, (length, batch), generator=generator).to(torch.int32)
    is_terminal = (step_type == StepType.LAST) & (torch.rand(length, batch, generator=generator) < 0.5)
    time_step = TimeStep(step_type=step_type, reward=like(agent._reward_spec), discount=1.0 - is_terminal.float(),
                         observation=nest.map_structure(like, agent.observation_spec))
    action = nest.map_structure(lambda spec: torch.rand(length, batch, *spec.shape, generator=generator),
                                agent.action_spec)
    return time_step, action


def zeros_of(spec, *outer):
    return nest.map_structure(lambda s: torch.zeros(*outer, *s.shape), spec)


def gradients(agent, loss_info, step_type):
    agent.zero_grad()
    reduce_loss(loss_info, valid_masks(step_type)).backward()
    return {name: p.grad for name, p in agent.named_parameters()}


@every_algorithm
@every_environment
@pytest.mark.parametrize('length,train_actor_on_last_step', [(2, True), (2, False), (4, True), (4, False)])
def test_train_sequence_trains_as_train_step(algorithm, environment, length, train_actor_on_last_step):
    extra = dict(target_noise=0.0) if algorithm == 'td3' else {}
    agent, _ = agent_of(algorithm, environment, num_critic_replicas=2, action_l2=0.1, critic_loss_ctor=TDLoss,
                        train_actor_on_last_step=train_actor_on_last_step, **extra)
    rl = agent.policy
    time_step, action = random_steps(rl, length, 5)
    info = rl.rollout_step(nest.map_structure(lambda x: x[0], time_step), rl.get_initial_rollout_state(5)).info
    info = info._replace(action=action)
    state = zeros_of(rl.train_state_spec, length, 5)
    results = []
    for train_sequence in (rl.train_sequence, partial(Algorithm.train_sequence, rl)):
        loss_info = rl.calc_loss(train_sequence(time_step, state, info).info)
        results.append((loss_info.loss, gradients(rl, loss_info, time_step.step_type)))
    (loss, grads), (slow_loss, slow_grads) = results
    valid = time_step.step_type != StepType.LAST
    torch.testing.assert_close(loss[valid], slow_loss[valid])
    for name, gradient in slow_grads.items():
        assert (gradient is None) == name.startswith('_target_')
        if gradient is not None:
            torch.testing.assert_close(grads[name], gradient, msg=name)


@pytest.mark.parametrize('environment', ['continuous', 'nested action', 'vector reward'])
def test_the_loss_matches_a_slow_loop(environment):
    weights = [1.0, -0.5, 2.0] if environment == 'vector reward' else None
    agent, _ = agent_of('ddpg', environment, num_critic_replicas=2, reward_weights=weights, action_l2=0.3,
                        critic_loss_ctor=partial(OneStepTDLoss, gamma=0.9))
    rl = agent.policy
    for p in [*rl.target_critics.parameters(), *rl.critics.parameters()]:
        p.data.add_(0.3 * torch.randn_like(p))
    length, batch = 4, 6
    time_step, action = random_steps(rl, length, batch)
    info = rl.rollout_step(nest.map_structure(lambda x: x[0], time_step), rl.get_initial_rollout_state(batch)).info
    loss = rl.calc_loss(rl.train_sequence(time_step, zeros_of(rl.train_state_spec), info._replace(action=action)).info)
    assert (time_step.step_type[:-1] == StepType.LAST).any() and (time_step.discount[1:] == 0).any()

    def at(nested, t, b):
        return nest.map_structure(lambda x: x[t, b:b + 1], nested)

    for t in range(length):
        for b in range(batch):
            observation = at(time_step.observation, t, b)
            expected = 0.0
            if t < length - 1 and time_step.step_type[t, b] != StepType.LAST:
                later = at(time_step.observation, t + 1, b)
                targets = rl.target_critics((later, rl._target_actor_network(later)[0]))[0][0]
                q_values = rl.critics((observation, at(action, t, b)))[0][0]
                for k in range(3 if weights else 1):
                    values = [v[k] if weights else v for v in targets]
                    worst = max(values) if weights and weights[k] < 0 else min(values)
                    reward = time_step.reward[t + 1, b]
                    target = (reward[k] if weights else reward) + 0.9 * time_step.discount[t + 1, b] * worst
                    errors = [((v[k] if weights else v) - target).item() for v in q_values]
                    expected += sum(e**2 for e in errors) / (3 if weights else 1)
            torch.testing.assert_close(loss.extra.critic[t, b].item(), float(expected), atol=1e-5, rtol=1e-4)
            policy_action = rl.actor(observation)[0]
            leaves = [a.detach().requires_grad_() for a in nest.flatten(policy_action)]
            q_values = rl.critics((observation, nest.pack_sequence_as(policy_action, leaves)))[0][0]
            if weights:
                value = sum(w * (max if w < 0 else min)(v[k] for v in q_values) for k, w in enumerate(weights))
            else:
                value = min(q_values)
            dqda = torch.autograd.grad(value, leaves)
            expected = sum((-(g * a).sum() + 0.3 * a.square().sum()).item() for g, a in zip(dqda, leaves))
            torch.testing.assert_close(loss.extra.actor[t, b].item(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loss.loss, loss.extra.critic + loss.extra.actor)


@every_algorithm
def test_the_policy_follows_the_value_gradient_and_trains_no_critic(algorithm):
    agent, _ = agent_of(algorithm, num_critic_replicas=2)
    rl = agent.policy
    observation = torch.randn(7, 1)
    _, loss, _ = rl._actor_step(rows_of(observation), rl.train_state_spec.actor)
    loss.mean().backward()
    assert all(p.grad is None for p in rl.critics.parameters())
    found = [p.grad.clone() for p in rl.actor.parameters()]
    rl.zero_grad()
    q_values = rl.critics((observation, rl.actor(observation)[0]))[0]
    value = q_values[:, 0] if algorithm == 'td3' else q_values.min(1).values
    (-value.mean()).backward()
    for gradient, p in zip(found, rl.actor.parameters()):
        torch.testing.assert_close(gradient, p.grad)


class LinearCritic(nn.Module):
    """A critic ``Q = 3 a[0] - 0.1 a[1]`` that ignores the observation."""

    def forward(self, inputs, state=()):
        action = inputs[1]
        return 3 * action[:, :1] - 0.1 * action[:, 1:], state


@pytest.mark.parametrize('clipping,expected', [(None, [-3.0, 0.1]), (0, [-3.0, 0.1]), (0.5, [-0.5, 0.1]),
                                               (0.05, [-0.05, 0.05])])
def test_the_gradient_of_the_value_is_clipped_elementwise(clipping, expected):
    spec = BoundedTensorSpec((2, ), torch.float32, -1, 1)
    algorithm = DdpgAlgorithm(TensorSpec((1, )), spec, dqda_clipping=clipping)
    algorithm._critic_networks = LinearCritic()
    action, loss, _ = algorithm._actor_step(rows_of(torch.randn(4, 1)), algorithm.train_state_spec.actor)
    found, = torch.autograd.grad(loss.sum(), action)
    torch.testing.assert_close(found, torch.tensor([expected] * 4))


def test_the_norm_of_the_action_is_penalized():
    spec = BoundedTensorSpec((2, ), torch.float32, -1, 1)
    algorithm = DdpgAlgorithm(TensorSpec((1, )), spec, action_l2=0.5)
    algorithm._critic_networks = LinearCritic()
    action, loss, _ = algorithm._actor_step(rows_of(torch.randn(4, 1)), algorithm.train_state_spec.actor)
    found, = torch.autograd.grad(loss.sum(), action)
    torch.testing.assert_close(found, torch.tensor([[-3.0, 0.1]]) + action)  # the derivative of a^2 / 2 is a


def test_a_terminated_episode_is_not_bootstrapped_and_a_truncated_one_is():
    agent, _ = agent_of('ddpg')
    rl = agent.policy
    for p in rl.target_critics.parameters():
        p.data.zero_()
    last_bias = [p for n, p in rl.target_critics.named_parameters() if n.endswith('bias')][-1]
    last_bias.data.fill_(10.0)  # every target value is 10
    step_type = torch.tensor([[StepType.MID] * 3 + [StepType.LAST], [StepType.LAST, StepType.LAST, StepType.MID,
                                                                     StepType.FIRST]], dtype=torch.int32)
    time_step = TimeStep(step_type=step_type, reward=torch.tensor([[0.0] * 4, [1.0] * 4]), observation=torch.zeros(
        2, 4, 1), discount=torch.tensor([[1.0] * 4, [0.0, 1.0, 1.0, 1.0]]))
    info = rl.rollout_step(nest.map_structure(lambda x: x[0], time_step), rl.get_initial_rollout_state(4)).info
    info = info._replace(action=torch.zeros(2, 4, 1))
    result = rl.train_sequence(time_step, zeros_of(rl.train_state_spec), info)
    value = result.info.critic.q_values[0, 0, 0].item()
    loss = rl.calc_loss(result.info).extra.critic
    # 1 at the termination; 1 + 0.99 * 10 where the episode is truncated or continues; nothing after LAST
    expected = [(1 - value)**2, (10.9 - value)**2, (10.9 - value)**2, 0.0]
    torch.testing.assert_close(loss, torch.tensor([expected, [0.0] * 4]))


# Acting --------------------------------------------------------------------------------------------------------------


def test_noise_of_each_environment_restarts_in_every_episode(monkeypatch):
    agent, _ = agent_of('ddpg', ou_stddev=0.01, ou_damping=0.5, unroll_length=12)
    monkeypatch.setattr(torch, 'randn_like', torch.ones_like)
    experience = agent.unroll(12)
    action = agent.policy.actor(experience.time_step.observation.reshape(48, 1))[0].reshape(12, 4, 1)
    # x' = x / 2 + 0.01, from 0 in each episode of 5 steps
    noise = torch.tensor([0.01, 0.015, 0.0175, 0.01875, 0.019375] * 3)[:12]
    torch.testing.assert_close(experience.action - action, noise.reshape(12, 1, 1).expand(12, 4, 1))


@every_algorithm
def test_noise_is_scaled_by_the_range_of_each_action(algorithm, monkeypatch):
    args = dict(ou_stddev=0.1) if algorithm == 'ddpg' else dict(exploration_noise=0.1)
    agent, env = agent_of(algorithm, 'nested action', **args)
    monkeypatch.setattr(torch, 'randn_like', torch.ones_like)
    time_step = env.current_time_step()
    action = agent.rollout_step(time_step, agent.get_initial_rollout_state(4)).output
    greedy = agent.predict_step(time_step, agent.get_initial_predict_state(4)).output
    torch.testing.assert_close(action['first'] - greedy['first'], torch.full((4, 2), 0.2))
    torch.testing.assert_close(action['second'] - greedy['second'], torch.full((4, 1), 0.05))


@every_algorithm
def test_random_actions_are_taken_with_their_probability(algorithm):
    no_noise = dict(ou_stddev=0.0) if algorithm == 'ddpg' else dict(exploration_noise=0.0)
    agent, _ = agent_of(algorithm, batch_size=2000, rollout_random_action=0.25, **no_noise)
    time_step = agent._env.current_time_step()
    action = agent.rollout_step(time_step, agent.get_initial_rollout_state(2000)).output
    greedy = agent.predict_step(time_step, agent.get_initial_predict_state(2000)).output
    is_random = (action != greedy).squeeze(-1)
    assert is_random.float().mean().item() == pytest.approx(0.25, abs=0.04)
    assert action[is_random].std().item() == pytest.approx(3**-0.5, abs=0.05)  # of the uniform distribution on [-1, 1]


def test_the_probability_of_random_actions_may_be_a_schedule():
    probability = [0.0]
    agent, env = agent_of('ddpg', ou_stddev=0.0, rollout_random_action=lambda: probability[0])
    time_step, state = env.current_time_step(), agent.get_initial_rollout_state(4)
    greedy = agent.predict_step(time_step, agent.get_initial_predict_state(4)).output
    assert torch.equal(agent.rollout_step(time_step, state).output, greedy)
    probability[0] = 1.0
    assert (agent.rollout_step(time_step, state).output != greedy).all()


@every_algorithm
def test_evaluation_is_greedy_unless_epsilon_asks_for_noise(algorithm):
    outputs = {}
    for epsilon in (0.0, 0.25):
        agent, _ = agent_of(algorithm, batch_size=2000, epsilon_greedy=epsilon)
        time_step = agent._env.current_time_step()
        with context.eval_context():
            step = agent.predict_step(time_step, agent.get_initial_predict_state(2000))
        outputs[epsilon] = step.output
        assert torch.equal(step.info.rl.action_distribution, agent.policy.actor(
            time_step.observation)[0])
    changed = (outputs[0.0] != outputs[0.25]).float().mean().item()
    assert changed == pytest.approx(0.25, abs=0.04)


def test_other_noise_can_be_chosen():
    agent, _ = agent_of('ddpg', exploration_noise_ctor=partial(GaussianNoise, stddev=0.0))
    assert nest.flatten(agent.rollout_state_spec) == []
    with pytest.raises(ConfError, match='ou_stddev'):
        agent_of('ddpg', exploration_noise_ctor=GaussianNoise, ou_stddev=0.3)


class Shift(GaussianNoise):
    """Noise of 0.5, for any standard deviation."""

    def forward(self, action, state):
        return action + 0.5, state


def test_the_noise_of_a_subclass_comes_from_its_forward():
    agent, env = agent_of('ddpg', exploration_noise_ctor=Shift)
    time_step = env.current_time_step()
    action = agent.rollout_step(time_step, agent.get_initial_rollout_state(4)).output
    torch.testing.assert_close(action, agent.policy.actor(time_step.observation)[0] + 0.5)


def test_held_noise_is_the_same_until_it_is_drawn_again():
    agent, env = agent_of('ddpg', batch_size=200, exploration_noise_ctor=partial(
        GaussianNoise, stddev=0.01, repeat=ZetaRepeat()))
    time_step = env.current_time_step()
    first = agent.rollout_step(time_step, agent.get_initial_rollout_state(200))
    second = agent.rollout_step(time_step, first.state)
    is_held = nest.get_field(first.state, 'rl.noise.steps_left') > 0
    assert 0 < is_held.sum() < 200
    assert torch.equal((second.output == first.output).squeeze(-1), is_held)


def test_traced_acting_adds_the_noise_of_each_step(warm_up):
    """Add the noise of each step in traced acting and consume the same random numbers."""
    warm_up(2)
    level = [0.0]
    agent, env = agent_of('ddpg', exploration_noise_ctor=partial(GaussianNoise, stddev=lambda: level[0]))
    rl, time_step, state = agent.policy, env.current_time_step(), agent.get_initial_rollout_state(env.batch_size)
    for level[0] in (0.0, 0.1, 0.3, 0.3, 0.0):
        with torch.no_grad():
            torch.manual_seed(3)
            step, noise = agent.rollout_step(time_step, state), torch.rand(())
            torch.manual_seed(3)
            action = rl.actor(time_step.observation)[0]
            noisy = rl._bounds.add_noise(action, nest.map_structure(lambda a: torch.randn_like(a) * level[0], action))
        assert all(map(torch.equal, nest.flatten(step.output), nest.flatten(noisy)))
        assert torch.equal(torch.rand(()), noise)
    assert rl._noisy_policy.replayed.num_graphs


# Targets, priorities, arguments --------------------------------------------------------------------------------------


def test_target_networks_start_as_copies_and_move_by_tau():
    agent, _ = agent_of('ddpg', target_update_tau=0.1, target_update_period=3, updates=1)
    rl = agent.policy
    pairs = [*zip(rl.actor.parameters(), rl._target_actor_network.parameters()),
             *zip(rl.critics.parameters(), rl.target_critics.parameters())]
    assert all(torch.equal(p, target) for p, target in pairs)
    before = [target.clone() for _, target in pairs]
    for _ in range(2):
        agent.train_iter()
    assert all(torch.equal(old, target) for old, (_, target) in zip(before, pairs))
    agent.train_iter()
    for old, (p, target) in zip(before, pairs):
        torch.testing.assert_close(target, old + 0.1 * (p - old))
    assert not any(target.requires_grad for _, target in pairs)


def test_without_target_critics_targets_are_values_of_the_critics():
    agent, _ = agent_of('ddpg', use_target_critics=False, num_critic_replicas=2, target_update_tau=0.1, updates=1)
    rl = agent.policy
    assert rl.target_critics is None
    time_step, action = random_steps(rl, 2, 5)
    info = rl.rollout_step(nest.map_structure(lambda x: x[0], time_step), rl.get_initial_rollout_state(5)).info
    found = rl.train_sequence(time_step, zeros_of(rl.train_state_spec), info._replace(action=action)).info.critic
    later = time_step.observation[1]
    expected = rl.critics((later, rl._target_actor_network(later)[0]))[0].min(1).values
    torch.testing.assert_close(found.target_q_values[1], expected)
    before = parameters(rl._target_actor_network)
    agent.train_iter()
    for old, p, target in zip(before, rl.actor.parameters(), rl._target_actor_network.parameters()):
        torch.testing.assert_close(target, old + 0.1 * (p - old))


@every_algorithm
def test_priorities_are_the_root_mean_squared_td_errors(algorithm):
    agent, _ = agent_of(algorithm, calculate_priority=True, num_critic_replicas=2)
    rl = agent.policy
    time_step, action = random_steps(rl, 3, 6, seed=4)
    info = rl.rollout_step(nest.map_structure(lambda x: x[0], time_step), rl.get_initial_rollout_state(6)).info
    loss_info = rl.calc_loss(rl.train_sequence(time_step, zeros_of(rl.train_state_spec), info._replace(
        action=action)).info)
    for b in range(6):
        rows = [t for t in range(2) if time_step.step_type[t, b] != StepType.LAST]
        mean = sum(loss_info.extra.critic[t, b].item() for t in rows) / (2 * max(len(rows), 1))
        assert loss_info.priority[b].item() == pytest.approx(mean**0.5, rel=1e-4)
    assert not loss_info.priority.requires_grad


@every_algorithm
def test_prioritised_replay_gets_its_priorities(algorithm):
    agent, _ = agent_of(algorithm, calculate_priority=True, priority_replay=True)
    for _ in range(3):
        agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_each_network_has_its_own_optimizer():
    from alfx.optimizers import SGD
    agent, _ = agent_of('ddpg', actor_optimizer=SGD(lr=0.0), critic_optimizer=SGD(lr=0.1))
    before = parameters(agent.policy.actor)
    critics = parameters(agent.policy.critics)
    agent.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(before, agent.policy.actor.parameters()))
    assert not any(torch.equal(a, b) for a, b in zip(critics, agent.policy.critics.parameters()))


@every_algorithm
@pytest.mark.parametrize('argument,value', [('num_critic_replicas', 0), ('rollout_random_action', 1.5),
                                            ('dqda_clipping', -1.0), ('action_l2', -0.1)])
def test_numbers_out_of_range_are_rejected_by_name(algorithm, argument, value):
    with pytest.raises(ConfError, match=f'Algorithm.{argument}'):
        agent_of(algorithm, **{argument: value})


@every_algorithm
def test_discrete_actions_are_rejected(algorithm):
    with pytest.raises(SpecError, match='continuous'):
        ALGORITHMS[algorithm](TensorSpec((2, )), BoundedTensorSpec((), torch.int64, 0, 3),
                              actor_network_ctor=ActorNetwork, critic_network_ctor=CriticNetwork)
