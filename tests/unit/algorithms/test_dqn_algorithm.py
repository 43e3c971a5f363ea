"""DqnAlgorithm: targets, exploration, the fast path for sequences, and common properties of algorithms."""
import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.learning import trains_until

from alfx import context, nest
from alfx.algorithms.agent import Agent, AgentInfo
from alfx.algorithms.base.q_values import least_distribution, least_values
from alfx.algorithms.categorical_td_loss import CategoricalTDLoss
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.dqn_algorithm import DqnAlgorithm, DqnInfo, DqnState
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType, TimeStep
from alfx.engine import probe
from alfx.environments.suite_unittest import PolicyUnittestEnv, RNNPolicyUnittestEnv, ValueUnittestEnv
from alfx.networks.q_networks import QNetwork, QRNNNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.schedulers import LinearScheduler

OBSERVATION = TensorSpec((3, ))
ACTION = BoundedTensorSpec((), torch.int64, 2, 6)  # five actions, 2 to 6
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
small_q = partial(QNetwork, fc_layer_params=(8, 8))
C51 = dict(num_atoms=5, v_min=-2.0, v_max=2.0)

VARIANTS = {
    'classic': dict(num_critic_replicas=1),
    'two critics': {},
    'double': dict(num_critic_replicas=1, target_net_target_action=False),
    'double with two critics': dict(target_net_target_action=False),
    'n steps': dict(critic_loss_ctor=partial(TDLoss, td_lambda=1.0), target_net_target_action=False),
    'lambda': dict(critic_loss_ctor=partial(TDLoss, td_lambda=0.7)),
    'first step': dict(critic_loss_ctor=partial(TDLoss, td_lambda=1.0), train_first_step_only=True),
    'first step, double': dict(critic_loss_ctor=partial(TDLoss, td_lambda=1.0), train_first_step_only=True,
                               target_net_target_action=False, calculate_priority=True),
    'first step, one-step target': dict(train_first_step_only=True, target_net_target_action=False),
    'dueling': dict(q_network_cls=partial(small_q, dueling=True)),
    'c51': dict(num_critic_replicas=1, **C51),
    'c51, double, two critics': dict(target_net_target_action=False, calculate_priority=True, **C51),
    'c51, n steps, first step': dict(num_critic_replicas=1, train_first_step_only=True, calculate_priority=True,
                                     critic_loss_ctor=partial(CategoricalTDLoss, td_lambda=1.0),
                                     target_net_target_action=False, **C51),
    'rewards': dict(reward_spec=TensorSpec((2, )), reward_weights=[1.0, -0.5], calculate_priority=True),
    'rewards, double': dict(reward_spec=TensorSpec((2, )), target_net_target_action=False),
}
every_variant = pytest.mark.parametrize('variant', list(VARIANTS))


@pytest.fixture(autouse=True)
def fresh_context():
    context.reset()
    yield
    context.reset()


def make(action_spec=ACTION, seed=0, **arguments):
    """Return an algorithm whose target network differs from the trained network."""
    torch.manual_seed(seed)
    arguments.setdefault('q_network_cls', small_q)
    algorithm = DqnAlgorithm(OBSERVATION, action_spec, **arguments)
    with torch.no_grad():
        for parameter in [*algorithm.critics.parameters(), *algorithm.target_critics.parameters()]:
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return algorithm


def random_batch(length=4, batch=6, rewards=(), seed=1):
    """Return ``[T, B]`` time steps with several ends of episodes, and actions."""
    torch.manual_seed(seed)
    step_type = torch.full((max(length, 3), batch), MID, dtype=torch.int32)
    step_type[1, 0], step_type[0, 1], step_type[2, 2] = LAST, LAST, LAST
    step_type = step_type[:length]
    discount = torch.ones(length, batch)
    discount[1, 0] = 0.0
    inputs = TimeStep(step_type=step_type, reward=torch.randn(length, batch, *rewards), discount=discount,
                      observation=torch.randn(length, batch, 3), prev_action=torch.zeros(length, batch),
                      env_id=torch.zeros(length, batch, dtype=torch.int64))
    return inputs, DqnInfo(action=torch.randint(2, 7, (length, batch)))


def stepwise(algorithm, inputs, rollout_info):
    """Run ``train_step`` for each step in turn."""
    infos = [algorithm.train_step(*nest.map_structure(lambda x, t=t: x[t], (inputs, DqnState(), rollout_info))).info
             for t in range(inputs.step_type.shape[0])]
    return nest.stack(infos)


# The loss ------------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize('length', [2, 4])
def test_skipping_unused_computations_keeps_the_loss(variant, length):
    algorithm = make(**VARIANTS[variant])
    inputs, rollout_info = random_batch(rewards=algorithm._reward_spec.shape)
    inputs, rollout_info = nest.map_structure(lambda x: x[:length], (inputs, rollout_info))
    results = []
    for info in (algorithm.train_sequence(inputs, DqnState(), rollout_info).info,
                 stepwise(algorithm, inputs, rollout_info)):
        algorithm.zero_grad()
        loss_info = algorithm.calc_loss(info)
        assert loss_info.loss.shape == (length, 6)
        mask = (inputs.step_type != LAST).float()
        (loss_info.loss * mask).mean().backward()
        results.append((loss_info.loss.detach() * mask, loss_info.priority,
                        [p.grad.clone() for p in algorithm.critics.parameters()]))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


def test_an_update_uses_the_smallest_possible_network_batches(monkeypatch):
    seen = []

    def forward(self, inputs, state=()):
        seen.append((self.name, inputs.shape[0], torch.is_grad_enabled()))
        return original(self, inputs, state)

    original = QNetwork.forward
    algorithm = make(num_critic_replicas=1, target_net_target_action=False)
    monkeypatch.setattr(QNetwork, 'forward', forward)
    inputs, rollout_info = random_batch(length=2)
    algorithm.train_sequence(inputs, DqnState(), rollout_info)
    assert seen == [('QNetwork', 6, True), ('QNetwork', 6, False), ('target_QNetwork', 6, False)]
    seen.clear()
    first = make(num_critic_replicas=1, train_first_step_only=True, critic_loss_ctor=partial(TDLoss, td_lambda=1.0))
    inputs, rollout_info = random_batch(length=4)
    seen.clear()
    first.train_sequence(inputs, DqnState(), rollout_info)
    assert seen == [('QNetwork', 6, True), ('target_QNetwork', 6, False)]


def q_of(network, observation):
    with torch.no_grad():
        return network(observation)[0]


def test_the_target_of_dqn_is_the_best_value_of_the_target_network():
    algorithm = make(num_critic_replicas=1)
    inputs, rollout_info = random_batch(length=2)
    info = algorithm.train_sequence(inputs, DqnState(), rollout_info).info
    expected = q_of(algorithm.target_critics, inputs.observation[1]).max(-1).values
    torch.testing.assert_close(info.target_critic[1], expected)


def test_double_dqn_evaluates_the_action_of_the_online_network():
    algorithm = make(num_critic_replicas=1, target_net_target_action=False)
    inputs, rollout_info = random_batch(length=2)
    info = algorithm.train_sequence(inputs, DqnState(), rollout_info).info
    online, target = (q_of(net, inputs.observation[1]) for net in (algorithm.critics,
                                                                   algorithm.target_critics))
    slow = torch.stack([target[b, online[b].argmax()] for b in range(6)])
    torch.testing.assert_close(info.target_critic[1], slow)
    assert (slow < target.max(-1).values - 1e-6).any()  # the test covers actions that differ from the maximum


@pytest.mark.parametrize('double', [False, True])
def test_with_two_critics_the_least_value_counts(double):
    algorithm = make(target_net_target_action=not double)
    inputs, rollout_info = random_batch(length=2)
    info = algorithm.train_sequence(inputs, DqnState(), rollout_info).info
    online, target = (q_of(net, inputs.observation[1]) for net in (algorithm.critics,
                                                                   algorithm.target_critics))
    for b in range(6):
        chooser = (online if double else target)[b].min(0).values
        action = int(chooser.argmax())
        assert info.target_critic[1, b] == min(target[b, 0, action], target[b, 1, action])


def test_the_loss_is_the_sum_over_critics_of_the_squared_one_step_error():
    algorithm = make(critic_loss_ctor=partial(OneStepTDLoss, gamma=0.9))
    inputs, rollout_info = random_batch(length=2)
    info = algorithm.train_sequence(inputs, DqnState(), rollout_info).info
    loss = algorithm.calc_loss(info).loss
    q = q_of(algorithm.critics, inputs.observation[0])
    for b in range(6):
        if inputs.step_type[0, b] == LAST:
            assert loss[0, b] == 0
            continue
        target = inputs.reward[1, b] + 0.9 * inputs.discount[1, b] * info.target_critic[1, b]
        values = q[b, :, int(rollout_info.action[0, b]) - 2]
        assert loss[0, b].item() == pytest.approx(float(((target - values)**2).sum()), rel=1e-4)
    assert not loss[1].any()


def test_rewards_of_negative_weight_count_by_their_greatest_value():
    values = torch.tensor([[[[1.0, 2.0], [5.0, 6.0]], [[3.0, 0.0], [4.0, 7.0]]]])  # [B=1, n=2, K=2, A=2]
    least = least_values(values, torch.tensor([1.0, -2.0]))
    assert least.tolist() == [[[1.0, 0.0], [5.0, 7.0]]]


def test_the_distribution_with_the_least_mean_counts():
    probs = torch.tensor([[[0.0, 1.0], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]]])
    assert least_distribution(probs, torch.tensor([0.0, 1.0])).tolist() == [[0.5, 0.5], [1.0, 0.0]]


def test_priorities_are_mean_absolute_errors_of_steps_with_a_target():
    algorithm = make(num_critic_replicas=1, calculate_priority=True)
    inputs, rollout_info = random_batch(length=4)
    info = algorithm.train_sequence(inputs, DqnState(), rollout_info).info
    priority = algorithm.calc_loss(info).priority
    q = q_of(algorithm.critics, inputs.observation.reshape(-1, 3)).reshape(4, 6, 5)
    for b in range(6):
        errors = [abs(inputs.reward[t + 1, b] + 0.99 * inputs.discount[t + 1, b] * info.target_critic[t + 1, b]
                      - q[t, b, int(rollout_info.action[t, b]) - 2]) for t in range(3)
                  if inputs.step_type[t, b] != LAST]
        assert priority[b].item() == pytest.approx(float(sum(errors) / len(errors)), rel=1e-4)
    assert not priority.requires_grad


def test_priorities_of_distributions_are_mean_losses_of_the_critics():
    algorithm = make(num_critic_replicas=2, calculate_priority=True, **C51)
    inputs, rollout_info = random_batch(length=4)
    loss_info = algorithm.calc_loss(algorithm.train_sequence(inputs, DqnState(), rollout_info).info)
    for b in range(6):
        losses = [loss_info.loss[t, b].item() for t in range(3) if inputs.step_type[t, b] != LAST]
        assert loss_info.priority[b].item() == pytest.approx(sum(losses) / len(losses) / 2, rel=1e-4)  # two critics


@pytest.mark.parametrize('rewards', [(), (3, )])
def test_priorities_are_means_over_critics_and_rewards(rewards):
    algorithm = make(num_critic_replicas=2, calculate_priority=True, reward_spec=TensorSpec(rewards))
    inputs, rollout_info = random_batch(length=2, rewards=rewards)
    info = algorithm.train_sequence(inputs, DqnState(), rollout_info).info
    found, target = algorithm.calc_loss(info).priority, info.target_critic[1].reshape(6, -1)
    reward = inputs.reward[1].reshape(6, -1)
    for b in range(6):
        errors = [abs(reward[b, k] + 0.99 * inputs.discount[1, b] * target[b, k] - q).item()
                  for values in info.critic[0, b] for k, q in enumerate(values.reshape(-1))]
        expected = 0.0 if inputs.step_type[0, b] == LAST else sum(errors) / len(errors)
        assert found[b].item() == pytest.approx(expected, rel=1e-4)


def test_the_loss_of_first_steps_is_a_mean_over_those_steps():
    # n-step target with gamma 1 of rewards 1, 2, 4: 7 + Q'(s[3]); the squared error as a mean over B, not over T * B
    algorithm = make(num_critic_replicas=1, train_first_step_only=True, calculate_priority=True,
                     critic_loss_ctor=partial(TDLoss, gamma=1.0, td_lambda=1.0))
    inputs, rollout_info = random_batch(length=4)
    ones = torch.ones_like(inputs.reward)
    inputs = inputs._replace(step_type=torch.full_like(inputs.step_type, MID), discount=ones,
                             reward=ones * torch.tensor([0.0, 1.0, 2.0, 4.0])[:, None])
    loss_info = algorithm.calc_loss(algorithm.train_sequence(inputs, DqnState(), rollout_info).info)
    target = 7 + q_of(algorithm.target_critics, inputs.observation[3]).amax(-1)
    value = q_of(algorithm.critics, inputs.observation[0]).gather(-1, rollout_info.action[0][:, None].long() - 2)[:, 0]
    torch.testing.assert_close(loss_info.loss.mean(), (target - value).square().mean())
    assert not loss_info.loss[1:].any()
    torch.testing.assert_close(loss_info.priority, (target - value).abs())


@pytest.mark.parametrize('num_atoms', [None, 5])
def test_logged_values_are_those_of_the_first_steps(num_atoms):
    loss, atoms = (TDLoss, {}) if num_atoms is None else (CategoricalTDLoss, dict(num_atoms=5, v_min=-2.0, v_max=2.0))
    algorithm = make(num_critic_replicas=1, train_first_step_only=True, critic_loss_ctor=partial(loss, td_lambda=1.0),
                     **atoms)
    inputs, rollout_info = random_batch(length=4)
    inputs = inputs._replace(step_type=torch.full_like(inputs.step_type, MID))
    logged = {}
    context.set_summary_writer(SimpleNamespace(add_scalar=lambda name, value, *_, **__: logged.update({name: value})))
    with context.record_if(True):
        algorithm.calc_loss(algorithm.train_sequence(inputs, DqnState(), rollout_info).info)
    taken = rollout_info.action[0].long() - 2
    outputs = algorithm.critics(inputs.observation[0])[0][torch.arange(len(taken)), taken]
    values = outputs if num_atoms is None else outputs.softmax(-1) @ torch.linspace(-2.0, 2.0, 5)
    assert float(logged['train/values']) == pytest.approx(values.mean().item(), rel=1e-5)


def test_without_calculate_priority_the_loss_has_none():
    algorithm = make()
    inputs, rollout_info = random_batch()
    assert algorithm.calc_loss(algorithm.train_sequence(inputs, DqnState(), rollout_info).info).priority == ()


def test_losses_are_logged_under_the_number_of_their_critic():
    assert [loss._name for loss in make()._critic_losses] == ['critic_loss1', 'critic_loss2']


# Acting --------------------------------------------------------------------------------------------------------


def step_of(batch):
    observation = torch.randn(batch, 3)
    return TimeStep(step_type=torch.full((batch, ), MID, dtype=torch.int32), reward=torch.zeros(batch),
                    discount=torch.ones(batch), observation=observation, prev_action=torch.zeros(batch),
                    env_id=torch.arange(batch))


def test_the_best_action_is_counted_from_the_start_of_the_spec():
    algorithm = make(num_critic_replicas=1)
    step = step_of(50)
    result = algorithm.predict_step(step, ())
    assert torch.equal(result.output, q_of(algorithm.critics, step.observation).argmax(-1) + 2)
    assert torch.equal(result.info.q_values, q_of(algorithm.critics, step.observation))
    assert result.output.dtype == torch.int64 and result.output.unique().numel() > 1


def test_the_best_action_of_distributions_has_the_greatest_mean():
    algorithm = make(num_critic_replicas=1, **C51)
    step = step_of(50)
    logits = q_of(algorithm.critics, step.observation)
    mean = (logits.softmax(-1) * torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])).sum(-1)
    assert torch.equal(algorithm.predict_step(step, ()).output, mean.argmax(-1) + 2)


@pytest.mark.parametrize('epsilon', [0.0, 0.3, 1.0])
def test_actions_of_the_rollout_are_random_with_probability_epsilon(epsilon):
    algorithm = make(rollout_epsilon_greedy=epsilon)
    step = step_of(20000)
    greedy = algorithm.predict_step(step, ()).output
    action = algorithm.rollout_step(step, DqnState()).output
    assert int(action.min()) >= 2 and int(action.max()) <= 6
    # a random action is optimal with probability 1/5
    assert (action != greedy).float().mean().item() == pytest.approx(epsilon * 0.8, abs=0.015)


def test_epsilon_follows_its_schedule():
    algorithm = make(rollout_epsilon_greedy=LinearScheduler('percent', [(0.0, 1.0), (0.5, 0.0)]))
    step = step_of(20000)
    greedy = algorithm.predict_step(step, ()).output
    for progress, epsilon in ((0.0, 1.0), (0.25, 0.5), (0.5, 0.0), (1.0, 0.0)):
        context.update_progress('percent', progress)
        differs = (algorithm.rollout_step(step, DqnState()).output != greedy).float().mean().item()
        assert differs == pytest.approx(epsilon * 0.8, abs=0.015)


def test_traced_acting_explores_with_the_epsilon_of_each_step(warm_up):
    """Use the epsilon of each step in traced acting and consume the same random numbers."""
    warm_up(2)
    algorithm = make(rollout_epsilon_greedy=LinearScheduler('percent', [(0.0, 0.9), (1.0, 0.1)]))
    step = step_of(50)
    actions = set()
    for i in range(8):
        context.update_progress('percent', i / 8)
        torch.manual_seed(7)
        with torch.no_grad():
            action = algorithm.rollout_step(step, DqnState()).output
        random_number = torch.rand(())
        torch.manual_seed(7)
        greedy = algorithm.predict_step(step, ()).output - 2
        assert torch.equal(action, algorithm._discrete.explore(greedy, algorithm._rollout_epsilon_greedy()) + 2)
        assert torch.equal(torch.rand(()), random_number)
        actions.add(tuple(action.tolist()))
    assert algorithm._exploring.replayed.num_graphs and len(actions) > 1


def test_traced_acting_explores_after_its_buffers_were_reset():
    algorithm = make(rollout_epsilon_greedy=0.9)
    step = step_of(1000)
    greedy = algorithm.predict_step(step, ()).output
    with probe.unchanged(algorithm):
        algorithm.rollout_step(step, DqnState())
    assert float(algorithm._epsilon) == 0
    for _ in range(2):
        differs = (algorithm.rollout_step(step, DqnState()).output != greedy).float().mean().item()
        assert differs == pytest.approx(0.9 * 0.8, abs=0.06)


def config_of(**arguments):
    defaults = dict(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=8, mini_batch_length=2,
                    num_updates_per_train_iter=2, whole_replay_buffer_training=False, clear_replay_buffer=False,
                    replay_buffer_length=64)
    return TrainerConfig(**{**defaults, **arguments})


@pytest.mark.parametrize('random_initial_collection', [True, False])
def test_initial_steps_can_be_random(random_initial_collection):
    algorithm = make(config=config_of(initial_collect_steps=100), rollout_epsilon_greedy=0.0,
                     random_initial_collection=random_initial_collection)
    step = step_of(1000)
    greedy = algorithm.predict_step(step, ()).output
    action = algorithm.rollout_step(step, DqnState()).output
    assert ((action != greedy).float().mean() > 0.5) == random_initial_collection
    context.update_progress('env_steps', 100)
    assert torch.equal(algorithm.rollout_step(step, DqnState()).output, greedy)


def test_the_random_steps_are_shared_by_all_ranks(monkeypatch):
    monkeypatch.setattr(context, 'num_ranks', lambda: 2)
    algorithm = make(config=config_of(initial_collect_steps=50), rollout_epsilon_greedy=0.0,  # a rank's share of 100
                     random_initial_collection=True)
    step = step_of(1000)
    greedy = algorithm.predict_step(step, ()).output
    context.update_progress('env_steps', 99)
    assert ((algorithm.rollout_step(step, DqnState()).output != greedy).float().mean() > 0.5)
    context.update_progress('env_steps', 100)
    assert torch.equal(algorithm.rollout_step(step, DqnState()).output, greedy)


def test_evaluation_explores_as_configured():
    algorithm = make(config=config_of(epsilon_greedy=0.5))
    step = step_of(20000)
    agreement = (algorithm.predict_step(step, ()).output == make().predict_step(step, ()).output).float().mean()
    assert agreement.item() == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize('num_critic_replicas', [1, 2])
def test_noise_is_fresh_in_the_rollout_and_off_in_evaluation(num_critic_replicas):
    algorithm = make(q_network_cls=partial(small_q, noisy=True), num_critic_replicas=num_critic_replicas,
                     rollout_epsilon_greedy=0.0)
    step = step_of(1000)
    with context.rollout_context():
        first, second = (algorithm.rollout_step(step, DqnState()).output for _ in range(2))
    assert not torch.equal(first, second)
    with context.eval_context():
        assert torch.equal(algorithm.predict_step(step, ()).output, algorithm.predict_step(step, ()).output)


def test_long_exploration_repeats_random_actions_within_an_episode():
    agent, env = make_agent('long exploration', batch_size=400, env_ctor=lambda b, n: PolicyUnittestEnv(b, 20),
                            dqn=dict(exploration_length_exponent=1.001, rollout_epsilon_greedy=1.0))
    action = agent.unroll(20).action  # runs are nearly always longer than an episode, in which all steps are random
    assert action[0].float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert (action[1:] == action[:-1]).float().mean() > 0.75  # by chance: 0.5


def test_an_action_in_a_nest_of_one_stays_in_the_nest():
    algorithm = make(action_spec={'move': ACTION})
    action = algorithm.rollout_step(step_of(4), DqnState()).output
    assert list(action) == ['move'] and action['move'].shape == (4, )
    inputs, rollout_info = random_batch()
    results = []
    for owner, action in ((algorithm, {'move': rollout_info.action}), (make(), rollout_info.action)):
        info = owner.train_sequence(inputs, DqnState(), DqnInfo(action=action)).info
        results.append(owner.calc_loss(info).loss)
    torch.testing.assert_close(*results)


# Invalid settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize('spec', [BoundedTensorSpec((2, )), BoundedTensorSpec((3, ), torch.int64, 0, 2),
                                  (ACTION, ACTION)])
def test_other_actions_than_one_discrete_one_are_rejected(spec):
    with pytest.raises(ValueError, match='one discrete action'):
        make(action_spec=spec)


@pytest.mark.parametrize('arguments, message', [
    (dict(num_critic_replicas=0), 'num_critic_replicas'),
    (dict(rollout_epsilon_greedy=1.5), 'rollout_epsilon_greedy'),
    (dict(epsilon_greedy=-0.1), 'epsilon_greedy'),
    (dict(num_atoms=51), 'v_min'),
    (dict(v_min=0.0, v_max=1.0), 'num_atoms is not; set num_atoms'),
    (dict(num_atoms=51, v_min=1.0, v_max=0.0), 'v_min < v_max'),
    (dict(num_atoms=1, v_min=0.0, v_max=1.0), 'at least 2'),
    (dict(reward_spec=TensorSpec((2, )), **C51), 'scalar reward'),
    (dict(config=config_of(mini_batch_length=1)), 'mini_batch_length'),
    (dict(target_update_tau=0.0), 'tau'),
    (dict(exploration_length_exponent=1.0), 'exploration_length_exponent'),
    (dict(q_network_cls=partial(small_q, num_atoms=7)), r'expected an output of shape \(5,\)'),
])
def test_invalid_arguments_are_rejected_by_name(arguments, message):
    with pytest.raises((ValueError, SpecError), match=message):
        make(**arguments)


@pytest.mark.parametrize('arguments, is_traceable', [
    ({}, True), (C51, True), (dict(q_network_cls=partial(small_q, noisy=True)), True),
    (dict(q_network_cls=partial(QRNNNetwork, lstm_hidden_size=4)), False),
    (dict(critic_loss_ctor=partial(TDLoss, normalize_target=True)), False)])
def test_an_update_can_be_compiled_if_it_is_the_same_every_time(arguments, is_traceable):
    assert make(**arguments).capabilities.traceable_update == is_traceable


# As a part of an agent -----------------------------------------------------------------------------------------

AGENTS = {
    'classic': dict(num_critic_replicas=1),
    'default': {},
    'rainbow': dict(num_critic_replicas=1, target_net_target_action=False, calculate_priority=True,
                    train_first_step_only=True, num_atoms=11, v_min=0.0, v_max=5.0,
                    critic_loss_ctor=partial(CategoricalTDLoss, td_lambda=1.0),
                    q_network_cls=partial(QNetwork, fc_layer_params=(16, ), dueling=True, noisy=True)),
    'recurrent': dict(q_network_cls=partial(QRNNNetwork, fc_layer_params=(16, ), lstm_hidden_size=8)),
    'recurrent, double': dict(q_network_cls=partial(QRNNNetwork, fc_layer_params=(16, ), lstm_hidden_size=8),
                              target_net_target_action=False),
    'vector reward': {},
    'long exploration': dict(exploration_length_exponent=2.0, rollout_epsilon_greedy=0.3),
}
every_agent = pytest.mark.parametrize('kind', list(AGENTS))


def make_agent(kind, batch_size=4, seed=0, env_ctor=None, learning_rate=1e-2, dqn=None, **config):
    torch.manual_seed(seed)
    context.reset()
    recurrent = kind.startswith('recurrent')
    if env_ctor is None:
        env_ctor = partial(RNNPolicyUnittestEnv, gap=2) if recurrent else PolicyUnittestEnv
        if kind == 'vector reward':
            env_ctor = partial(PolicyUnittestEnv, reward_dim=3)
    env = env_ctor(batch_size, 5)
    env.seed(seed)
    env.reset()
    length = 4 if kind == 'rainbow' else 5 if recurrent else 2
    config = config_of(**{**dict(mini_batch_length=length, use_rollout_state=recurrent,
                                 priority_replay=kind == 'rainbow'), **config})
    rl = partial(DqnAlgorithm, **{'q_network_cls': partial(QNetwork, fc_layer_params=(16, )), **AGENTS[kind],
                                  **(dqn or {})})
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  optimizer=Adam(lr=learning_rate), rl_algorithm_cls=rl)
    agent.set_path('')
    agent.finalize()
    return agent, env


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


@every_agent
def test_training_changes_the_critics_and_moves_the_targets(kind):
    agent, _ = make_agent(kind)
    before, targets = (nest.map_structure(torch.clone, list(p.detach() for p in net.parameters()))
                       for net in (agent.policy.critics,
                                   agent.policy.target_critics))
    for _ in range(8):
        agent.train_iter()
    for net, old in ((agent.policy.critics, before),
                     (agent.policy.target_critics, targets)):
        assert all(not torch.equal(a, b) for a, b in zip(old, net.parameters()))
        assert all(torch.isfinite(p).all() for p in net.parameters())


@every_agent
def test_same_seed_gives_the_same_parameters(kind):
    results = []
    for _ in range(2):
        agent, _ = make_agent(kind, seed=3)
        for _ in range(6):
            agent.train_iter()
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@every_agent
def test_steps_do_not_change_their_inputs(kind):
    agent, env = make_agent(kind)
    for _ in range(4):
        agent.train_iter()
    time_step = env.current_time_step()
    for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                          (agent.predict_step, agent.get_initial_predict_state(4))):
        copies = nest.map_structure(torch.clone, (time_step, state))
        method(time_step, state)
        for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state))):
            assert torch.equal(old, new)
    experience = agent.unroll(5)
    copies = nest.map_structure(torch.clone, experience)
    agent.policy.calc_loss(agent.learner.losses.train_info(experience).rl)
    for old, new in zip(nest.flatten(copies), nest.flatten(experience)):
        assert torch.equal(old, new)


@every_agent
def test_a_checkpoint_restores_the_next_update(kind):
    agent, env = make_agent(kind)
    for _ in range(4):
        agent.train_iter()
    saved = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, dict(agent.state_dict()))
    copy, copy_env = make_agent(kind, seed=9)
    copy.load_state_dict(saved)
    for a, b in zip(parameters(agent), parameters(copy)):
        assert torch.equal(a, b)
    experience = agent.unroll(5)
    for each in (agent, copy):
        torch.manual_seed(0)
        loss_info = each.calc_loss(each.learner.losses.train_info(experience))
        each.update_with_gradient(loss_info)
        each.after_update(experience.time_step, AgentInfo())
    for a, b in zip(parameters(agent), parameters(copy)):
        assert torch.equal(a, b)


@every_agent
def test_one_environment_is_enough(kind):
    agent, _ = make_agent(kind, batch_size=1, unroll_length=6, mini_batch_size=1)
    for _ in range(5):
        agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_the_targets_follow_by_tau_every_period():
    agent, _ = make_agent('classic', dqn=dict(target_update_tau=1.0, target_update_period=6))
    rl = agent.policy

    def equal():
        return all(torch.equal(a, b) for a, b in zip(rl.critics.parameters(),
                                                     rl.target_critics.parameters()))

    seen = []
    for _ in range(6):
        agent.train_iter()  # two updates
        seen.append(equal())
    assert seen == [False, False, True, False, False, True]


def test_a_q_optimizer_owns_the_critics_and_nothing_trains_the_targets():
    optimizer = Adam(lr=1e-3)
    agent, _ = make_agent('default', dqn=dict(q_optimizer=optimizer))
    owned = {id(p) for group in optimizer.param_groups for p in group['params']}
    assert owned == {id(p) for p in agent.policy.critics.parameters()}
    assert not any(p.requires_grad for p in agent.policy.target_critics.parameters())


def test_rollouts_store_the_states_of_both_networks_if_training_uses_them():
    agent, env = make_agent('recurrent')
    state = agent.rollout_step(env.current_time_step(), agent.get_initial_rollout_state(4)).state.rl
    for leaf in nest.flatten(state):
        assert leaf.abs().sum() > 0
    agent, env = make_agent('recurrent', use_rollout_state=False)
    state = agent.rollout_step(env.current_time_step(), agent.get_initial_rollout_state(4)).state.rl
    assert all(leaf.abs().sum() == 0 for leaf in nest.flatten(state.target_critic))


def greedy_return(agent, env, episodes=4):
    total = torch.zeros(env.batch_size)
    time_step, state = env.reset(), agent.get_initial_predict_state(env.batch_size)
    with torch.no_grad(), context.eval_context():
        for t in range(1, 5 * episodes):
            if t % 5 == 1:
                state = agent.get_initial_predict_state(env.batch_size)
            step = agent.predict_step(time_step, state)
            time_step, state = env.step(step.output), step.state
            total += time_step.reward if time_step.reward.ndim == 1 else time_step.reward[:, 0]
    return total.mean().item() / episodes


@pytest.mark.parametrize('kind, optimal', [('classic', 4.0), ('default', 4.0), ('rainbow', 4.0), ('recurrent', 2.0),
                                           ('vector reward', 4.0), ('long exploration', 4.0)])
def test_the_greedy_policy_becomes_optimal(kind, optimal):
    agent, env = make_agent(kind, batch_size=8, unroll_length=5, mini_batch_size=32, replay_buffer_length=200,
                            num_updates_per_train_iter=5)
    evaluation_env = copy.deepcopy(env)
    assert trains_until(lambda: abs(greedy_return(agent, evaluation_env) - optimal) <= 0.05 * optimal,
                        agent.train_iter, 80 if kind == 'recurrent' else 40, interval=10)


@pytest.mark.parametrize('kind', ['classic', 'rainbow'])
def test_the_value_of_certain_rewards_is_learned(kind):
    # Each of the next 4 steps has a reward of 1, and the observation does not identify the step. Over those 4 steps
    # S(k) = 1 + g + ... + g^(k-1) is 1, 1.9, 2.71 and 3.439 for g = 0.9, with mean 2.262. One-step bootstrapping has
    # another fixed point: V = 1 + 3/4 g V = 1 / (1 - 0.675) = 3.077. With three steps (rainbow) the returns are
    # 2.71 + g^3 V, 2.71, 1.9 and 1 for 4 to 1 remaining steps: V = (2.71 + 0.729 V + 2.71 + 1.9 + 1) / 4 = 2.5435.
    loss = partial(OneStepTDLoss, gamma=0.9) if kind == 'classic' else partial(CategoricalTDLoss, gamma=0.9,
                                                                               td_lambda=1.0)
    agent, env = make_agent(kind, batch_size=8, unroll_length=5, mini_batch_size=64, replay_buffer_length=200,
                            num_updates_per_train_iter=10, env_ctor=ValueUnittestEnv, priority_replay=False,
                            dqn=dict(critic_loss_ctor=loss, rollout_epsilon_greedy=0.5))
    for _ in range(60):
        agent.train_iter()
    with context.eval_context():
        values = agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(8)).info.rl.q_values
    assert values.mean().item() == pytest.approx(3.077 if kind == 'classic' else 2.5435, abs=0.25)
