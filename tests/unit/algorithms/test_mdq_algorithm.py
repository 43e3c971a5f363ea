"""Multi-dimensional Q-learning against slow loops, hand-computed constants and identities."""
import math
from functools import partial

import pytest
import torch

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.bootstrapped_algorithm import Terms
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.mdq_algorithm import MdqAlgorithm, MdqCriticState, MdqInfo
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType, TimeStep, valid_masks
from alfx.engine.loss_reduction import reduce_loss
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv, UnittestEnv
from alfx.networks.action_quantizer import ActionQuantizer
from alfx.networks.mdq_critic_networks import MdqCriticNetwork
from alfx.optimizers import SGD, Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils

BINS = 5
VECTOR, BOX = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, [-1.0, 0.0], [1.0, 4.0])


class NestedActionEnv(UnittestEnv):
    """An environment with two actions with different bounds; the reward is 1 where ``first`` is 1 and ``second`` 5."""

    def action_spec(self):
        return {'first': BoundedTensorSpec((2, ), torch.float32, -2, 4),
                'second': BoundedTensorSpec((), torch.float32, 0, 10)}

    def _reward(self, action, t):
        return 1 - (action['first'] - 1).abs().mean(-1) / 6 - (action['second'] - 5).abs() / 10


ENVIRONMENTS = {
    'continuous': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous),
    'nested action': partial(NestedActionEnv, episode_length=5),
    'vector reward': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous, reward_dim=3),
}
every_environment = pytest.mark.parametrize('environment', list(ENVIRONMENTS))
critic_ctor = partial(MdqCriticNetwork, action_qt=partial(ActionQuantizer, action_bins=BINS),
                      pre_encoding_layer_params=(16, ), free_form_fc_layer_params=(16, ))


def agent_of(environment='continuous', batch_size=4, seed=0, mini_batch_size=8, mini_batch_length=2, **args):
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=mini_batch_size,
                           mini_batch_length=mini_batch_length, num_updates_per_train_iter=2,
                           whole_replay_buffer_training=False, clear_replay_buffer=False, replay_buffer_length=200)
    args.setdefault('critic_network', critic_ctor)
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=partial(MdqAlgorithm, **args), optimizer=Adam(lr=1e-2))
    agent.set_path('')
    agent.finalize()
    return agent, env


def algorithm_of(**args):
    return MdqAlgorithm(VECTOR, BOX, **{'critic_network': critic_ctor, **args})


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


def copied(nested):
    return nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, nested)


@every_environment
class TestContract:

    def test_training_changes_every_parameter(self, environment):
        agent, _ = agent_of(environment)
        before = parameters(agent)
        assert [agent.train_iter() for _ in range(3)] == [2 * 8 * 2] * 3
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters(agent))]
        assert all(changed), [n for (n, _), c in zip(agent.named_parameters(), changed) if not c]

    def test_same_seed_gives_the_same_parameters(self, environment):
        results = []
        for _ in range(2):
            agent, _ = agent_of(environment, seed=3)
            for _ in range(3):
                agent.train_iter()
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_steps_do_not_change_their_inputs(self, environment):
        agent, env = agent_of(environment, epsilon_greedy=0.5)
        time_step = env.current_time_step()
        copies = copied(time_step)
        agent.rollout_step(time_step, agent.get_initial_rollout_state(4))
        agent.predict_step(time_step, agent.get_initial_predict_state(4))
        for old, new in zip(nest.flatten(copies), nest.flatten(time_step)):
            assert torch.equal(old, new)

    def test_a_checkpoint_restores_the_next_update(self, environment):
        agent, env = agent_of(environment)
        agent.train_iter()
        saved, env_state, rollout = (copied(dict(agent.state_dict())), env.get_state(),
                                     copied(agent.learner.state_dict()))
        other, other_env = agent_of(environment, seed=9)
        other.load_state_dict(saved)
        other_env.set_state(env_state)
        other.learner.load_state_dict(rollout)
        for a in (agent, other):
            a.replay_buffer.clear()
            torch.manual_seed(5)
            a.train_iter()
        assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(other)))

    def test_one_environment_is_enough(self, environment):
        agent, _ = agent_of(environment, batch_size=1, mini_batch_size=1, mini_batch_length=3)
        for _ in range(4):
            agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_actions_match_their_specs(self, environment):
        agent, env = agent_of(environment)
        for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                              (agent.predict_step, agent.get_initial_predict_state(4))):
            output = method(env.current_time_step(), state).output
            nest.assert_same_structure(agent.action_spec, output)
            for s, x in zip(nest.flatten(agent.action_spec), nest.flatten(output)):
                assert (tuple(x.shape), x.dtype) == ((4, *s.shape), s.dtype)
                assert (x.numpy() >= s.minimum).all() and (x.numpy() <= s.maximum).all()


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
    return time_step, MdqInfo(action=action)


def use_greedy_actions(algorithm, monkeypatch):
    """Make the policy take its most likely action, so that no generator has to be synchronized."""
    act = algorithm._act
    monkeypatch.setattr(algorithm, '_act', lambda observation, greedy=False: act(observation, greedy=True))


def disturb(algorithm):
    """Change parameters so that the values differ from each other and from their targets."""
    for p in [*algorithm._critic_network.parameters(), *algorithm._target_free_form.parameters()]:
        p.data.add_(0.3 * torch.randn_like(p))


@every_environment
@pytest.mark.parametrize('length', [2, 4])
def test_train_sequence_trains_as_train_step(monkeypatch, environment, length):
    agent, _ = agent_of(environment, distill_noise=0.0, critic_loss_ctor=TDLoss)
    rl = agent.policy
    disturb(rl)
    use_greedy_actions(rl, monkeypatch)
    time_step, info = random_steps(rl, length, 5)
    results = []
    for train_sequence in (rl.train_sequence, partial(Algorithm.train_sequence, rl)):
        loss_info = rl.calc_loss(train_sequence(time_step, MdqCriticState(), info).info)
        rl.zero_grad()
        reduce_loss(loss_info, valid_masks(time_step.step_type)).backward()
        results.append((loss_info.loss, {name: p.grad for name, p in rl.named_parameters()}))
    (loss, grads), (slow_loss, slow_grads) = results
    torch.testing.assert_close(loss, slow_loss)
    for name, gradient in slow_grads.items():
        assert (gradient is None) == name.startswith('_target_'), name
        if gradient is not None:
            torch.testing.assert_close(grads[name], gradient, msg=name)


@pytest.mark.parametrize('environment', ['continuous', 'nested action', 'vector reward'])
def test_the_loss_matches_a_slow_loop(monkeypatch, environment):
    gamma, alpha = 0.9, 0.3
    agent, _ = agent_of(environment, distill_noise=0.0, critic_loss_ctor=partial(OneStepTDLoss, gamma=gamma),
                        initial_log_alpha=math.log(alpha), target_entropy=1.2)
    rl = agent.policy
    disturb(rl)
    use_greedy_actions(rl, monkeypatch)
    if environment == 'vector reward':
        rl.set_reward_weights(torch.tensor([1.0, -0.5, 2.0]))
    length, batch = 4, 6
    time_step, info = random_steps(rl, length, batch)
    extra = rl.calc_loss(rl.train_sequence(time_step, MdqCriticState(), info).info).extra
    assert (time_step.step_type[:-1] == StepType.LAST).any() and (time_step.discount[1:] == 0).any()
    network, components = rl._critic_network, rl._critic_network.action_qt.num_components

    def at(nested, t, b):
        return nest.map_structure(lambda x: x[t, b:b + 1], nested)

    for t in range(length - 1):
        for b in range(batch):
            observation, stored_action = at((time_step.observation, info.action), t, b)
            expected = 0.0
            if time_step.step_type[t, b] != StepType.LAST:
                later = at(time_step.observation, t + 1, b)
                action, neg_entropy = network.get_action(later, alpha, greedy=True)
                lowest = min(rl._target_free_form((later, network.action_qt.normalized(action)))[0][0])
                divergence = neg_entropy[0] + components * math.log(BINS)
                reward = time_step.reward[t + 1, b]
                reward = reward if reward.ndim == 0 else reward[0] - 0.5 * reward[1] + 2 * reward[2]
                target = reward + gamma * time_step.discount[t + 1, b] * (lowest - alpha * divergence)
                expected = sum((v - target).item()**2 for v in network((observation, stored_action))[0][0])
            torch.testing.assert_close(extra.critic[t, b].item(), float(expected), atol=1e-5, rtol=1e-4)
            sampled, neg_entropy = network.get_action(observation, alpha, greedy=True)
            errors = [network.advantage_form(observation, a, alpha)[0] - min(network((observation, a))[0][0])
                      for a in (stored_action, sampled)]
            expected = sum(e.item()**2 for e in errors) / 2
            torch.testing.assert_close(extra.distill[t, b].item(), expected, atol=1e-5, rtol=1e-4)
            expected = math.log(alpha) * (-neg_entropy.item() - 1.2)
            torch.testing.assert_close(extra.alpha[t, b].item(), expected, atol=1e-5, rtol=1e-4)
    assert not extra.distill[-1].any() and not extra.alpha[-1].any() and not extra.critic[-1].any()


def test_a_terminated_episode_is_not_bootstrapped_and_a_truncated_one_is():
    algorithm = algorithm_of(initial_log_alpha=-20.0)  # no entropy in the value
    for p in algorithm._target_free_form.parameters():
        p.data.zero_()
    last_bias = [p for n, p in algorithm._target_free_form.named_parameters() if n.endswith('bias')][-1]
    last_bias.data.fill_(10.0)  # every target value is 10
    step_type = torch.tensor([[StepType.MID] * 3 + [StepType.LAST], [StepType.LAST, StepType.LAST, StepType.MID,
                                                                     StepType.FIRST]], dtype=torch.int32)
    time_step = TimeStep(step_type=step_type, reward=torch.tensor([[0.0] * 4, [1.0] * 4]), observation=torch.zeros(
        2, 4, 3), discount=torch.tensor([[1.0] * 4, [0.0, 1.0, 1.0, 1.0]]))
    info = algorithm.train_sequence(time_step, MdqCriticState(), MdqInfo(action=torch.zeros(2, 4, 2))).info
    value = info.critic.critic_free_form[0, 0].tolist()
    # 1 at the termination; 1 + 0.99 * 10 where the episode is truncated or continues; nothing after LAST
    expected = [sum((target - v)**2 for v in value) for target in (1, 10.9, 10.9)] + [0.0]
    torch.testing.assert_close(algorithm.calc_loss(info).extra.critic, torch.tensor([expected, [0.0] * 4]))


def test_distilling_a_fixed_critic_yields_a_policy_with_its_best_action():
    torch.manual_seed(0)
    # Q = -(a - 0.5)^2 of one action in [-1, 1], alpha = 0.05: the policy is exp(-20 (a - 0.5)^2) / Z
    algorithm = MdqAlgorithm(TensorSpec((1, )), BoundedTensorSpec((1, ), torch.float32, -1, 1),
                             partial(critic_ctor, action_qt=partial(ActionQuantizer, action_bins=9)), distill_noise=0.0)
    network, alpha = algorithm._critic_network, 0.05
    algorithm._log_alpha.data.fill_(math.log(alpha))
    network.forward = lambda inputs, state=(): (-(inputs[1] - 0.5).square().expand(-1, 2), state)
    optimizer = torch.optim.Adam(network._components.parameters(), lr=5e-3)
    for _ in range(400):
        observation = torch.randn(32, 1)
        action = network.action_qt.action(torch.randint(0, 9, (32, 1)))
        found, target = algorithm._distillation(observation, action, network.get_action(observation, alpha)[0])
        optimizer.zero_grad()
        (found - target).square().mean().backward()
        optimizer.step()
    weights = torch.exp(-20 * (torch.linspace(-1, 1, 9) - 0.5)**2)
    pi = weights / weights.sum()
    actions, neg_entropy = network.get_action(torch.zeros(20000, 1), alpha)
    frequency = torch.bincount(network.action_qt.bins(actions)[:, 0], minlength=9) / 20000
    torch.testing.assert_close(frequency, pi, rtol=0, atol=0.04)
    assert neg_entropy[0].item() == pytest.approx((pi * pi.log()).sum().item(), abs=0.05)
    assert (network.get_action(torch.randn(10, 1), alpha, greedy=True)[0] == 0.5).all()


def test_noise_moves_the_actions_of_distillation_within_their_bounds(monkeypatch):
    algorithm, seen = algorithm_of(distill_noise=0.1), []
    monkeypatch.setattr(torch, 'randn_like', torch.ones_like)
    monkeypatch.setattr(algorithm._critic_network, 'forward',
                        lambda inputs, state=(): seen.append(inputs[1]) or (torch.zeros(2, 2), state))
    algorithm._distillation(torch.zeros(1, 3), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 4.0]]))
    torch.testing.assert_close(seen[0], torch.tensor([[0.1, 1.2], [1.0, 4.0]]))  # 0.1 times half the range, clipped


def test_alpha_grows_while_the_entropy_is_below_its_target():
    algorithm = algorithm_of(target_entropy=1.0)
    for neg_entropy, sign in ((0.0, -1), (-2.0, 1)):  # entropies of 0 and 2
        algorithm.zero_grad()
        zeros = torch.zeros(2, 1)
        terms = Terms((zeros, torch.full((2, 1), neg_entropy)), (), (zeros, zeros, zeros), zeros)
        _, info = algorithm.train_info(TimeStep(), MdqInfo(), terms)
        info.alpha.alpha_loss.sum().backward()
        assert algorithm._log_alpha.grad.sign().item() == sign


def test_target_entropies():
    # h + log(5) - log(max - min) for both components, with h = -1: 2 (-1 + log 5) - log 2 - log 4
    assert algorithm_of()._target_entropy == pytest.approx(2 * (math.log(5) - 1) - math.log(8))
    assert algorithm_of(target_entropy=0.3)._target_entropy == pytest.approx(0.3)
    entropy_of_spec = dist_utils.calc_default_target_entropy
    assert algorithm_of(target_entropy=entropy_of_spec)._target_entropy == pytest.approx(entropy_of_spec(BOX))


# Acting, targets, arguments ------------------------------------------------------------------------------------------


def test_evaluation_is_greedy_unless_epsilon_asks_for_a_sample():
    outputs = {}
    for epsilon in (0.0, 0.25):
        agent, _ = agent_of(batch_size=2000, epsilon_greedy=epsilon)
        outputs[epsilon] = agent.predict_step(agent._env.current_time_step(),
                                              agent.get_initial_predict_state(2000)).output
    changed = (outputs[0.0] != outputs[0.25]).float().mean().item()
    assert changed == pytest.approx(0.25 * (BINS - 1) / BINS, abs=0.04)  # the first policy is nearly uniform


def test_only_the_free_form_has_targets_and_they_move_by_tau():
    agent, _ = agent_of(target_update_tau=0.1, target_update_period=4)
    rl = agent.policy
    pairs = [*zip(rl._critic_network.free_form.parameters(), rl._target_free_form.parameters(), strict=True)]
    before = [target.clone() for _, target in pairs]
    agent.train_iter()
    assert all(torch.equal(old, target) for old, (_, target) in zip(before, pairs))
    agent.train_iter()
    for old, (p, target) in zip(before, pairs):
        torch.testing.assert_close(target, old + 0.1 * (p - old))


def test_each_part_has_its_own_optimizer():
    agent, _ = agent_of(critic_optimizer=SGD(lr=0.1), alpha_optimizer=SGD(lr=0.0))
    rl = agent.policy
    alpha, critic = rl._log_alpha.detach().clone(), parameters(rl._critic_network)
    agent.train_iter()
    assert torch.equal(alpha, rl._log_alpha)
    assert not any(torch.equal(a, b) for a, b in zip(critic, rl._critic_network.parameters()))


def test_an_existing_network_is_used_unchanged():
    network = critic_ctor((VECTOR, BOX))
    assert algorithm_of(critic_network=network)._critic_network is network


def test_invalid_arguments_are_rejected_by_name():
    with pytest.raises(ValueError, match='distill_noise must be a number >= 0'):
        algorithm_of(distill_noise=-0.1)
    with pytest.raises(ValueError, match='critic_network: expected an MdqCriticNetwork'):
        algorithm_of(critic_network=lambda input_tensor_spec: torch.nn.Linear(2, 2))
    with pytest.raises(SpecError, match='continuous'):
        MdqAlgorithm(VECTOR, BoundedTensorSpec((), torch.int64, 0, 3), critic_ctor)
