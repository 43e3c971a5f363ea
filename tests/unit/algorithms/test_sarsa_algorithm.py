"""SARSA with deterministic and stochastic policies, against slow loops, hand-computed constants and identities."""
import math
from functools import partial

import pytest
import torch
from helpers.deterministic_agents import ENVIRONMENTS, make_agent
from torch import nn

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.sarsa_algorithm import SarsaAlgorithm, SarsaInfo, SarsaState
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType, TimeStep, valid_masks
from alfx.engine.loss_reduction import reduce_loss
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.optimizers import SGD
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils

KINDS = ['deterministic', 'stochastic']
every_kind = pytest.mark.parametrize('kind', KINDS)
every_environment = pytest.mark.parametrize('environment', list(ENVIRONMENTS))
both_ways = pytest.mark.parametrize('on_policy', [False, True])
VECTOR, BOX = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1, 1)


def agent_of(kind, environment='continuous', on_policy=False, **args):
    if kind == 'stochastic':
        head = partial(NormalProjectionNetwork, state_dependent_std=True, scale_distribution=True)
        network = (partial(ActorDistributionRNNNetwork, lstm_hidden_size=(8, )) if environment == 'recurrent' else
                   ActorDistributionNetwork)
        args.setdefault('actor_network_ctor', partial(network, fc_layer_params=(16, ),
                                                      continuous_projection_net_ctor=head))
    args.setdefault('target_update_period', 1)
    return make_agent(partial(SarsaAlgorithm, on_policy=on_policy), environment, **args)


def algorithm_of(kind='deterministic', observation_spec=VECTOR, action_spec=BOX, **args):
    networks = dict(actor_network_ctor=ActorDistributionNetwork if kind == 'stochastic' else ActorNetwork,
                    critic_network_ctor=CriticNetwork)
    return SarsaAlgorithm(observation_spec, action_spec, **{**networks, **args})


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


def copied(nested):
    return nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, nested)


@every_kind
@every_environment
@both_ways
class TestContract:

    def test_training_changes_every_parameter(self, kind, environment, on_policy):
        agent, _ = agent_of(kind, environment, on_policy)
        before = parameters(agent)
        steps = [agent.train_iter() for _ in range(3)]
        assert steps == [16 if on_policy else 2 * 8 * 2] * 3
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters(agent))]
        assert all(changed), [n for (n, _), c in zip(agent.named_parameters(), changed) if not c]

    def test_same_seed_gives_the_same_parameters(self, kind, environment, on_policy):
        results = []
        for _ in range(2):
            agent, _ = agent_of(kind, environment, on_policy, seed=3)
            for _ in range(3):
                agent.train_iter()
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_steps_do_not_change_their_inputs(self, kind, environment, on_policy):
        agent, env = agent_of(kind, environment, on_policy, epsilon_greedy=0.5)
        time_step = env.current_time_step()
        for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                              (agent.predict_step, agent.get_initial_predict_state(4))):
            copies = copied((time_step, state))
            method(time_step, state)
            for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state))):
                assert torch.equal(old, new)

    def test_a_checkpoint_restores_the_next_update(self, kind, environment, on_policy):
        agent, env = agent_of(kind, environment, on_policy)
        agent.train_iter()
        saved, env_state, rollout = (copied(dict(agent.state_dict())), env.get_state(),
                                     copied(agent.learner.state_dict()))
        other, other_env = agent_of(kind, environment, on_policy, seed=9)
        other.load_state_dict(saved)
        other_env.set_state(env_state)
        other.learner.load_state_dict(rollout)
        for a in (agent, other):
            if not on_policy:
                a.replay_buffer.clear()
            torch.manual_seed(5)
            a.train_iter()
        assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(other)))

    def test_one_environment_is_enough(self, kind, environment, on_policy):
        agent, _ = agent_of(kind, environment, on_policy, batch_size=1, mini_batch_size=1)
        for _ in range(4):
            agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_actions_and_states_match_their_specs(self, kind, environment, on_policy):
        agent, env = agent_of(kind, environment, on_policy)
        for method, state, spec in (
            (agent.rollout_step, agent.get_initial_rollout_state(4), agent.rollout_state_spec),
            (agent.predict_step, agent.get_initial_predict_state(4), agent.predict_state_spec)):
            step = method(env.current_time_step(), state)
            for found, expected in ((step.output, agent.action_spec), (step.state, spec)):
                nest.assert_same_structure(expected, found)
                for s, x in zip(nest.flatten(expected), nest.flatten(found)):
                    assert (tuple(x.shape), x.dtype) == ((4, *s.shape), s.dtype)
            for s, x in zip(nest.flatten(agent.action_spec), nest.flatten(step.output)):
                assert (x.detach().numpy() >= s.minimum).all() and (x.detach().numpy() <= s.maximum).all()


# Sequences and losses ------------------------------------------------------------------------------------------------


def random_steps(algorithm, length, batch, seed=1):
    """Return random time steps ``[T, B]`` with terminations, truncations and episode starts, and rollout infos."""
    generator = torch.Generator().manual_seed(seed)

    def like(spec):
        return torch.randn(length, batch, *spec.shape, generator=generator)

    step_type = torch.randint(0, 3, (length, batch), generator=generator).to(torch.int32)
    is_terminal = (step_type == StepType.LAST) & (torch.rand(length, batch, generator=generator) < 0.5)
    time_step = TimeStep(step_type=step_type, reward=like(algorithm._reward_spec), discount=1.0 - is_terminal.float(),
                         observation=nest.map_structure(like, algorithm.observation_spec))
    action = nest.map_structure(lambda spec: torch.rand(length, batch, *spec.shape, generator=generator),
                                algorithm.action_spec)
    return time_step, SarsaInfo(action=action)


def gradients(algorithm, loss_info, step_type):
    algorithm.zero_grad()
    reduce_loss(loss_info, valid_masks(step_type)).backward()
    return {name: p.grad for name, p in algorithm.named_parameters()}


@every_kind
@pytest.mark.parametrize('environment', ['continuous', 'nested action', 'vector reward'])
@pytest.mark.parametrize('length,train_actor_on_last_step', [(2, True), (2, False), (4, True), (4, False)])
def test_train_sequence_trains_as_train_step(monkeypatch, kind, environment, length, train_actor_on_last_step):
    entropy = dict(use_entropy_reward=True) if kind == 'stochastic' else {}
    agent, _ = agent_of(kind, environment, critic_loss_cls=TDLoss, train_actor_on_last_step=train_actor_on_last_step,
                        **entropy)
    rl = agent.policy
    monkeypatch.setattr(rl, '_action_of', partial(mean_action, rl))
    time_step, info = random_steps(rl, length, 5)
    results = []
    for train_sequence in (rl.train_sequence, partial(Algorithm.train_sequence, rl)):
        loss_info = rl.calc_loss(train_sequence(time_step, rl.train_state_spec, info).info)
        results.append((loss_info.loss, gradients(rl, loss_info, time_step.step_type)))
    (loss, grads), (slow_loss, slow_grads) = results
    valid = time_step.step_type != StepType.LAST
    torch.testing.assert_close(loss[valid], slow_loss[valid])
    for name, gradient in slow_grads.items():
        assert (gradient is None) == name.startswith('_target_'), name
        if gradient is not None:
            torch.testing.assert_close(grads[name], gradient, msg=name)


def mean_action(algorithm, policy):
    """Replace ``_action_of``: return the deterministic action and its log probability."""
    if not algorithm._is_stochastic:
        return policy, ()
    action = nest.map_structure(dist_utils.get_rmode, policy, is_leaf=nest.is_distribution)
    return action, dist_utils.compute_log_probability(policy, action)


@every_kind
@pytest.mark.parametrize('environment', ['continuous', 'nested action', 'vector reward'])
def test_the_loss_matches_a_slow_loop(monkeypatch, kind, environment):
    gamma, alpha = 0.9, 0.3
    entropy = dict(use_entropy_reward=True, initial_alpha=alpha, target_entropy=-0.7) if kind == 'stochastic' else {}
    agent, _ = agent_of(kind, environment, critic_loss_cls=partial(OneStepTDLoss, gamma=gamma), dqda_clipping=0.02,
                        **entropy)
    rl = agent.policy
    for p in [*rl.target_critics.parameters(), *rl.critics.parameters()]:
        p.data.add_(0.3 * torch.randn_like(p))
    monkeypatch.setattr(rl, '_action_of', partial(mean_action, rl))
    length, batch, rewards = 4, 6, 3 if environment == 'vector reward' else 1
    time_step, info = random_steps(rl, length, batch)
    loss = rl.calc_loss(rl.train_sequence(time_step, rl.train_state_spec, info).info)
    assert (time_step.step_type[:-1] == StepType.LAST).any() and (time_step.discount[1:] == 0).any()

    def at(nested, t, b):
        return nest.map_structure(lambda x: x[t, b:b + 1], nested)

    for t in range(length):
        for b in range(batch):
            observation = at(time_step.observation, t, b)
            expected = 0.0
            if t < length - 1 and time_step.step_type[t, b] != StepType.LAST:
                later = at(time_step.observation, t + 1, b)
                next_action, log_pi = rl._action_of(rl.actor(later)[0])
                targets = rl.target_critics((later, next_action))[0][0].view(2, rewards)
                values = rl.critics((observation, at(info.action, t, b)))[0][0].view(2, rewards)
                for k in range(rewards):
                    target = min(targets[:, k])
                    if kind == 'stochastic':  # with reward weights of 1, each reward gets a third of the bonus
                        target = target - alpha * log_pi[0] / rewards
                    target = time_step.reward[t + 1, b].reshape(-1)[k] + gamma * time_step.discount[t + 1, b] * target
                    expected += sum((v - target).item()**2 for v in values[:, k]) / rewards
            torch.testing.assert_close(loss.extra.critic[t, b].item(), float(expected), atol=1e-5, rtol=1e-4)
            action, log_pi = rl._action_of(rl.actor(observation)[0])
            leaves = [a.detach().requires_grad_() for a in nest.flatten(action)]
            values = rl.critics((observation, nest.pack_sequence_as(action, leaves)))[0][0].view(2, rewards)
            objective = sum(min(values[:, k]) for k in range(rewards))
            dqda = [g.clamp(-0.02, 0.02) for g in torch.autograd.grad(objective, leaves)]
            expected = -sum((g * a).sum().item() for g, a in zip(dqda, leaves))
            if kind == 'stochastic':
                expected += alpha * log_pi.item()
                alpha_loss = math.log(alpha) * (-log_pi.item() + 0.7)
                torch.testing.assert_close(loss.extra.alpha[t, b].item(), alpha_loss, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(loss.extra.actor[t, b].item(), expected, atol=1e-5, rtol=1e-4)


def test_on_policy_training_bootstraps_from_the_next_action_taken():
    agent, _ = agent_of('deterministic', on_policy=True, ou_stddev=0.5)
    rl = agent.policy
    for p in rl.target_critics.parameters():
        p.data.add_(0.3 * torch.randn_like(p))
    experience = agent.unroll(4)
    info = experience.rollout_info.rl
    assert info.critics.shape == (5, 4, 2) and info.target_critics.shape == (5, 4)
    for t in range(5):
        pair = experience.observation[t], experience.action[t]
        torch.testing.assert_close(rl.target_critics(pair)[0].min(1).values, info.target_critics[t])
        torch.testing.assert_close(rl.critics(pair)[0], info.critics[t])


def test_a_terminated_episode_is_not_bootstrapped_and_a_truncated_one_is():
    algorithm = algorithm_of()
    for p in algorithm.target_critics.parameters():
        p.data.zero_()
    last_bias = [p for n, p in algorithm.target_critics.named_parameters() if n.endswith('bias')][-1]
    last_bias.data.fill_(10.0)  # every target value is 10
    step_type = torch.tensor([[StepType.MID] * 3 + [StepType.LAST], [StepType.LAST, StepType.LAST, StepType.MID,
                                                                     StepType.FIRST]], dtype=torch.int32)
    time_step = TimeStep(step_type=step_type, reward=torch.tensor([[0.0] * 4, [1.0] * 4]), observation=torch.zeros(
        2, 4, 3), discount=torch.tensor([[1.0] * 4, [0.0, 1.0, 1.0, 1.0]]))
    info = algorithm.train_sequence(time_step, SarsaState(), SarsaInfo(action=torch.zeros(2, 4, 2))).info
    value = info.critics[0, 0].tolist()
    # 1 at the termination; 1 + 0.99 * 10 where the episode is truncated or continues; nothing after LAST
    expected = [sum((target - v)**2 for v in value) for target in (1, 10.9, 10.9)] + [0.0]
    torch.testing.assert_close(algorithm.calc_loss(info).extra.critic, torch.tensor([expected, [0.0] * 4]))


class LinearCritic(nn.Module):
    """A critic ``Q = 3 a[0] - 0.1 a[1]`` of one replica that ignores the observation."""

    def forward(self, inputs, state=()):
        return 3 * inputs[1][:, :1] - 0.1 * inputs[1][:, 1:], state


@pytest.mark.parametrize('clipping,expected', [(0.0, [-3.0, 0.1]), (0.5, [-0.5, 0.1]), (0.05, [-0.05, 0.05])])
def test_the_gradient_of_the_value_is_clipped_elementwise(clipping, expected):
    algorithm = algorithm_of(dqda_clipping=clipping, num_critic_replicas=1)
    algorithm._critic_networks = LinearCritic()
    action = torch.rand(4, 2, requires_grad=True)
    found, = torch.autograd.grad(algorithm._actor_loss(torch.randn(4, 3), action, (), ()).sum(), action)
    torch.testing.assert_close(found, torch.tensor([expected] * 4))


def test_alpha_grows_while_the_entropy_is_below_its_target():
    algorithm = algorithm_of('stochastic', target_entropy=1.0, initial_alpha=0.5)
    assert algorithm._log_alpha.exp().item() == pytest.approx(0.5)
    info = SarsaInfo(reward=torch.zeros(2, 1), step_type=torch.ones(2, 1, dtype=torch.int32), discount=torch.ones(2, 1),
                     actor_loss=torch.zeros(2, 1), critics=torch.zeros(2, 1, 2), target_critics=torch.zeros(2, 1))
    for neg_entropy, sign in ((0.0, -1), (-2.0, 1)):  # entropies of 0 and 2
        algorithm.zero_grad()
        algorithm.calc_loss(info._replace(neg_entropy=torch.full((2, 1), neg_entropy))).loss.mean().backward()
        assert algorithm._log_alpha.grad.sign().item() == sign


def test_without_alpha_the_entropy_does_not_count():
    algorithm = algorithm_of('stochastic', initial_alpha=None)
    assert algorithm._log_alpha is None
    time_step, info = random_steps(algorithm, 2, 3)
    loss_info = algorithm.calc_loss(algorithm.train_sequence(time_step, SarsaState(), info).info)
    assert loss_info.extra.alpha == ()
    torch.testing.assert_close(loss_info.loss, loss_info.extra.actor + loss_info.extra.critic)


# Acting --------------------------------------------------------------------------------------------------------------


def test_noise_of_each_environment_restarts_in_every_episode(monkeypatch):
    agent, _ = agent_of('deterministic', ou_stddev=0.01, ou_damping=0.5, unroll_length=12)
    monkeypatch.setattr(torch, 'randn_like', torch.ones_like)
    experience = agent.unroll(12)
    action = agent.policy.actor(experience.time_step.observation.reshape(48, 1))[0].reshape(12, 4, 1)
    # x' = x / 2 + 0.01, from 0 in each episode of 5 steps
    noise = torch.tensor([0.01, 0.015, 0.0175, 0.01875, 0.019375] * 3)[:12]
    torch.testing.assert_close(experience.action - action, noise.reshape(12, 1, 1).expand(12, 4, 1))


@every_kind
def test_evaluation_is_greedy_unless_epsilon_asks_for_something_else(kind):
    outputs = {}
    for epsilon in (0.0, 0.25):
        agent, _ = agent_of(kind, batch_size=2000, epsilon_greedy=epsilon)
        with context.eval_context():
            outputs[epsilon] = agent.predict_step(agent._env.current_time_step(),
                                                  agent.get_initial_predict_state(2000)).output
    changed = (outputs[0.0] != outputs[0.25]).float().mean().item()
    assert changed == pytest.approx(0.25, abs=0.04)


@every_kind
def test_a_smoothed_actor_acts_and_moves_with_the_target_critics(kind):
    agent, env = agent_of(kind, use_smoothed_actor=True, target_update_tau=0.1, target_update_period=3, updates=1)
    rl = agent.policy
    pairs = [*zip(rl.actor.parameters(), rl._smoothed_actor_network.parameters()),
             *zip(rl.critics.parameters(), rl.target_critics.parameters())]
    before = [smoothed.clone() for _, smoothed in pairs]
    for _ in range(2):
        agent.train_iter()
    assert all(torch.equal(old, smoothed) for old, (_, smoothed) in zip(before, pairs))
    agent.train_iter()
    for old, (p, smoothed) in zip(before, pairs):
        torch.testing.assert_close(smoothed, old + 0.1 * (p - old))
    time_step = env.current_time_step()
    policy = rl._smoothed_actor_network(time_step.observation)[0]
    found = agent.predict_step(time_step, agent.get_initial_predict_state(4)).info.rl.action_distribution
    for a, b in zip(nest.flatten(found), nest.flatten(policy)):
        torch.testing.assert_close(a, b)


# Priorities, optimizers, arguments -----------------------------------------------------------------------------------


def test_priorities_are_the_root_mean_squared_td_errors():
    algorithm = algorithm_of(calculate_priority=True)
    time_step, info = random_steps(algorithm, 3, 6, seed=4)
    loss_info = algorithm.calc_loss(algorithm.train_sequence(time_step, SarsaState(), info).info)
    for b in range(6):
        errors = [t for t in range(2) if time_step.step_type[t, b] != StepType.LAST]
        mean = sum(loss_info.extra.critic[t, b].item() for t in errors) / (2 * max(len(errors), 1))
        assert loss_info.priority[b].item() == pytest.approx(mean**0.5, rel=1e-4)


def test_prioritised_replay_gets_its_priorities():
    agent, _ = agent_of('stochastic', calculate_priority=True, priority_replay=True)
    for _ in range(3):
        agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_each_part_has_its_own_optimizer():
    agent, _ = agent_of('stochastic', actor_optimizer=SGD(lr=0.0), critic_optimizer=SGD(lr=0.1),
                        alpha_optimizer=SGD(lr=0.0))
    rl = agent.policy
    actor, critics = [*parameters(rl.actor), rl._log_alpha.detach().clone()], parameters(rl.critics)
    agent.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(actor, [*rl.actor.parameters(), rl._log_alpha]))
    assert not any(torch.equal(a, b) for a, b in zip(critics, rl.critics.parameters()))


@pytest.mark.parametrize('kind, args, message', [
    ('deterministic', dict(alpha_optimizer=SGD(lr=0.1)), 'alpha_optimizer is not used: ActorNetwork outputs actions'),
    ('stochastic', dict(initial_alpha=None, alpha_optimizer=SGD(lr=0.1)), 'alpha_optimizer is not used: initial_alpha'),
    ('stochastic', dict(ou_stddev=0.1), 'ou_stddev is not used: ActorDistributionNetwork outputs distributions'),
    ('stochastic', dict(ou_damping=0.1), 'ou_damping is not used: ActorDistributionNetwork outputs distributions'),
])
def test_arguments_of_the_other_kind_of_policy_are_logged(kind, args, message, caplog):
    caplog.set_level('INFO', 'alfx')
    algorithm_of(kind, **args)
    assert [f'SarsaAlgorithm.{message}' in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize('kind,args,message', [
    ('deterministic', dict(num_critic_replicas=0), 'num_critic_replicas must be an int >= 1'),
    ('deterministic', dict(dqda_clipping=-1.0), 'dqda_clipping must be a number >= 0'),
    ('deterministic', dict(target_entropy=1.0), 'target_entropy has no effect.*outputs actions'),
    ('deterministic', dict(use_entropy_reward=True), 'use_entropy_reward has no effect.*outputs actions'),
    ('deterministic', dict(use_smoothed_actor=True, on_policy=True), 'use_smoothed_actor.*on-policy'),
    ('stochastic', dict(initial_alpha=0.0), 'initial_alpha must be a number > 0 or None'),
    ('stochastic', dict(initial_alpha=None, use_entropy_reward=True), 'initial_alpha is None'),
    ('stochastic', dict(action_spec=BoundedTensorSpec((), torch.int64, 0, 3)), 'supports only continuous actions'),
    ('stochastic', dict(critic_network_ctor=partial(CriticNetwork, output_tensor_spec=TensorSpec((5, )))),
     r'expected critics with outputs of shape \(2,\)'),
])
def test_invalid_arguments_are_rejected_by_name(kind, args, message):
    with pytest.raises((ValueError, SpecError), match=message):
        algorithm_of(kind, **args)
