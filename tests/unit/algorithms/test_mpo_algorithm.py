"""MpoAlgorithm: evaluated actions, ignored steps, effects of an update, and the contract of all algorithms."""
import copy
from functools import partial

import pytest
import torch
from helpers.learning import greedy_return, trains_until

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.mpo.mpo_loss import improved_weights, solve_temperature
from alfx.algorithms.mpo_algorithm import MpoAlgorithm, MpoInfo, MpoState
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType, TimeStep
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv, RNNPolicyUnittestEnv
from alfx.gin_utils import ConfError
from alfx.layers import Reshape
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.critic_networks import CriticNetwork, CriticRNNNetwork
from alfx.networks.projection_networks import BetaProjectionNetwork, NormalProjectionNetwork
from alfx.networks.q_networks import QNetwork, QRNNNetwork
from alfx.optimizers import SGD, Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.dist_utils import TransformedDistribution

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
OBSERVATION = TensorSpec((3, ))
CONTINUOUS = BoundedTensorSpec((2, ), torch.float32, [-1., 0.], [1., 3.])
DISCRETE = BoundedTensorSpec((), torch.int64, 2, 5)  # four actions, 2 to 5
NESTED = dict(steer=BoundedTensorSpec((), torch.float32, -1., 1.),
              arm=BoundedTensorSpec((2, 2), torch.float32, -2., 2.))

plain = partial(NormalProjectionNetwork, state_dependent_std=True, squash_mean=False)
squashed = partial(NormalProjectionNetwork, state_dependent_std=True, scale_distribution=True)
small = dict(fc_layer_params=(8, ))


def actor_with(head):
    return partial(ActorDistributionNetwork, continuous_projection_net_ctor=head, **small)


def flat_critic(action_spec):
    extra_args = {}
    if not isinstance(action_spec, TensorSpec):
        extra_args = dict(action_input_processors=nest.map_structure(lambda s: Reshape((s.numel, )), action_spec),
                          action_preprocessing_combiner=NestConcat())
    return partial(CriticNetwork, joint_fc_layer_params=(8, ), **extra_args)


VARIANTS = {
    'continuous': (CONTINUOUS, dict(actor_network_cls=actor_with(plain))),
    'squashed': (CONTINUOUS, dict(actor_network_cls=actor_with(squashed), num_critic_replicas=2)),
    'nested': (NESTED, dict(actor_network_cls=actor_with(squashed))),
    'two rewards': (CONTINUOUS, dict(reward_spec=TensorSpec((2, )), reward_weights=[1.0, -0.5], num_critic_replicas=2,
                                     actor_network_cls=actor_with(plain), calculate_priority=True)),
    'lambda': (CONTINUOUS, dict(actor_network_cls=actor_with(plain), critic_loss_ctor=partial(TDLoss, td_lambda=0.7))),
    'out of bounds': (CONTINUOUS, dict(actor_network_cls=actor_with(plain), out_of_bounds_constraint=0.01,
                                       constrain_each_dimension=True)),
    'learned temperature': (CONTINUOUS, dict(actor_network_cls=actor_with(plain), eta_optimizer=True,
                                             out_of_bounds_constraint=0.01)),
    'discrete': (DISCRETE, dict(calculate_priority=True)),
    'discrete with two critics': (DISCRETE, dict(num_critic_replicas=2)),
}
every_variant = pytest.mark.parametrize('variant', list(VARIANTS))


@pytest.fixture(autouse=True)
def fresh_context():
    context.reset()
    yield
    context.reset()


def make(action_spec, seed=0, **arguments):
    """Return an algorithm whose target networks differ from the trained ones."""
    torch.manual_seed(seed)
    arguments = {'actor_network_cls': partial(ActorDistributionNetwork, **small),
                 'critic_network_cls': flat_critic(action_spec), 'q_network_cls': partial(QNetwork, **small),
                 'sample_action_num': 5, **arguments}
    if arguments.get('eta_optimizer') is True:
        arguments['eta_optimizer'] = Adam(lr=0.1)
    algorithm = MpoAlgorithm(OBSERVATION, action_spec, **arguments)
    with torch.no_grad():
        for parameter in [*algorithm.critics.parameters(), *algorithm.target_critics.parameters(),
                          *algorithm.actor.parameters()]:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        for multiplier in algorithm._policy.multipliers:
            multiplier.value.fill_(0.7)
    return algorithm


def with_fixed_noise(algorithm, monkeypatch):
    """Sample with noise that depends only on the number of the sample."""
    if algorithm._is_discrete:
        return

    def sample(distributions, count):
        loc, scale = (x.detach() for x in algorithm._policy.parameters_of(distributions))
        noise = torch.randn(count, loc.shape[-1], generator=torch.Generator().manual_seed(3))
        return loc.unsqueeze(1) + scale.unsqueeze(1) * noise

    monkeypatch.setattr(algorithm._policy, 'sample', sample)


def random_batch(action_spec, length=4, batch=6, rewards=(), seed=1):
    """Return ``[T, B]`` time steps of episodes that end at random steps, and actions."""
    torch.manual_seed(seed)
    step_type = torch.full((max(length, 3), batch), MID, dtype=torch.int32)
    step_type[1, 0], step_type[0, 1], step_type[2, 2] = LAST, LAST, LAST
    step_type = step_type[:length]
    discount = torch.ones(length, batch)
    discount[1, 0] = 0.0
    action = nest.map_structure(lambda spec: spec.sample((length, batch)), action_spec)
    inputs = TimeStep(step_type=step_type, reward=torch.randn(length, batch, *rewards), discount=discount,
                      observation=torch.randn(length, batch, 3), prev_action=action,
                      env_id=torch.zeros(length, batch, dtype=torch.int64))
    return inputs, MpoInfo(action=action)


def stepwise(algorithm, inputs, rollout_info):
    """Call ``train_step`` for one step after the other."""
    infos = [algorithm.train_step(*nest.map_structure(lambda x, t=t: x[t], (inputs, MpoState(), rollout_info))).info
             for t in range(inputs.step_type.shape[0])]
    return nest.stack(infos)


# The loss --------------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize('length', [2, 4])
@pytest.mark.parametrize('first_step', [True, False])
def test_skipping_unused_computations_keeps_the_loss(variant, length, first_step, monkeypatch):
    spec, arguments = VARIANTS[variant]
    algorithm = make(spec, train_actor_on_first_step=first_step, **arguments)
    with_fixed_noise(algorithm, monkeypatch)
    inputs, rollout_info = random_batch(spec, length, rewards=algorithm._reward_spec.shape)
    results = []
    for info in (algorithm.train_sequence(inputs, MpoState(), rollout_info).info,
                 stepwise(algorithm, inputs, rollout_info)):
        algorithm.zero_grad()
        loss_info = algorithm.calc_loss(info)
        mask = (inputs.step_type != LAST).float()
        total = (loss_info.loss * mask).mean()
        if isinstance(loss_info.scalar_loss, torch.Tensor):
            total = total + loss_info.scalar_loss
        total.backward()
        trained = [*algorithm.critics.parameters(), *algorithm.actor.parameters(),
                   *algorithm._temperatures.parameters()]
        results.append((loss_info.loss.detach() * mask, loss_info.priority, [p.grad.clone() for p in trained]))
    assert results[0][0].shape == (length, 6)
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


def test_without_training_at_the_first_step_no_action_is_evaluated_there():
    algorithm = make(CONTINUOUS, train_actor_on_first_step=False)
    inputs, rollout_info = random_batch(CONTINUOUS, length=2)
    batches = []
    network = algorithm.target_critics
    network.register_forward_hook(lambda module, args, output: batches.append(args[0][1].shape[0]))
    algorithm.critics.register_forward_hook(lambda m, args, output: batches.append(args[0][1].shape[0]))
    info = algorithm.train_sequence(inputs, MpoState(), rollout_info).info
    assert batches == [6, 6 * 5]  # one row for each transition, 5 samples for each next state
    actor_loss = algorithm.calc_loss(info).extra.actor
    assert actor_loss[0].eq(0).all() and actor_loss[1].ne(0).all()


@pytest.mark.parametrize('batch', [1, 3])
def test_the_policy_is_not_trained_at_the_first_step_of_several(batch):
    algorithm = make(DISCRETE, train_actor_on_first_step=False)
    inputs, rollout_info = nest.map_structure(lambda x: x[:, 3:3 + batch], random_batch(DISCRETE, length=3))
    info = stepwise(algorithm, inputs, rollout_info)
    actor_loss = algorithm.calc_loss(info).extra.actor
    assert actor_loss.shape == (3, batch) and actor_loss[0].eq(0).all() and actor_loss[1:].ne(0).all()


def test_logged_divergences_are_means_over_trained_states(monkeypatch):
    algorithm = make(CONTINUOUS, actor_network_cls=actor_with(plain))
    inputs, rollout_info = random_batch(CONTINUOUS)
    info = algorithm.train_sequence(inputs, MpoState(), rollout_info).info
    assert algorithm.calc_loss(info).extra.divergences == ()
    monkeypatch.setattr(context, 'should_record_summaries', lambda: True)
    extra = algorithm.calc_loss(info).extra
    policy, target, is_trained = info.action_distribution, info.target_distribution, inputs.step_type != LAST
    mean_divergence = (((policy.loc - target.loc) / target.scale)**2 / 2).sum(-1)[is_trained].mean()
    ratio = target.scale / policy.scale
    scale_divergence = ((ratio**2 - 1) / 2 - ratio.log()).expand(4, 6, 2).sum(-1)[is_trained].mean()
    torch.testing.assert_close(extra.divergences, [mean_divergence, scale_divergence])
    assert [m.tolist() for m in extra.multipliers] == [pytest.approx([0.7])] * 2


def test_the_mean_value_of_a_discrete_policy_is_exact():
    algorithm = make(DISCRETE, num_critic_replicas=2)
    inputs, rollout_info = random_batch(DISCRETE)
    info = stepwise(algorithm, inputs, rollout_info)
    for t in range(4):
        for b in range(6):
            observation = inputs.observation[t, b].unsqueeze(0)
            probabilities = algorithm._target_actor_network(observation)[0].probs[0]
            values = algorithm.target_critics(observation)[0][0].amin(0)
            expected = sum(float(probabilities[a] * values[a]) for a in range(4))
            assert float(info.target_value[t, b]) == pytest.approx(expected, abs=1e-5)
            taken_values = algorithm.critics(observation)[0][0, :, int(rollout_info.action[t, b]) - 2]
            torch.testing.assert_close(info.critics[t, b], taken_values)


def test_a_continuous_policy_is_valued_by_the_lowest_critic_per_sample():
    algorithm = make(CONTINUOUS, num_critic_replicas=2, reward_spec=TensorSpec((2, )), reward_weights=[1.0, -0.5],
                     actor_network_cls=actor_with(plain))
    inputs, rollout_info = random_batch(CONTINUOUS, rewards=(2, ))
    info = stepwise(algorithm, inputs, rollout_info)
    low, high = torch.tensor([-1., 0.]), torch.tensor([1., 3.])
    for t in range(4):
        for b in range(6):
            values = []
            for i in range(5):
                action = torch.minimum(torch.maximum(info.samples[t, b, i], low), high).unsqueeze(0)
                q = algorithm.target_critics((inputs.observation[t, b].unsqueeze(0), action))[0][0]
                # the second reward counts negatively, so that its larger estimate is the cautious one
                values.append(torch.stack([q[:, 0].min(), q[:, 1].max()]))
            values = torch.stack(values)
            torch.testing.assert_close(info.target_value[t, b], values.mean(0))
            torch.testing.assert_close(info.sample_values[t, b], values[:, 0] - 0.5 * values[:, 1])


def test_samples_of_a_squashed_policy_are_evaluated_where_they_lead():
    algorithm = make(CONTINUOUS, actor_network_cls=actor_with(squashed))
    inputs, rollout_info = random_batch(CONTINUOUS)
    seen = []
    algorithm.target_critics.register_forward_hook(lambda m, args, output: seen.append(args[0][1]))
    info = algorithm.train_sequence(inputs, MpoState(), rollout_info).info
    assert isinstance(info.target_distribution, TransformedDistribution)
    middle, half = torch.tensor([0., 1.5]), torch.tensor([1., 1.5])
    torch.testing.assert_close(seen[0].reshape(4, 6, 5, 2), middle + half * torch.tanh(info.samples))


def test_many_samples_of_the_target_policy_have_its_moments():
    algorithm = make(CONTINUOUS, sample_action_num=4000, actor_network_cls=actor_with(plain))
    inputs, rollout_info = random_batch(CONTINUOUS, length=2, batch=3)
    info = algorithm.train_sequence(inputs, MpoState(), rollout_info).info
    target = info.target_distribution
    assert not torch.allclose(target.loc, info.action_distribution.loc)
    torch.testing.assert_close(info.samples.mean(2), target.loc, atol=0.06, rtol=0)
    torch.testing.assert_close(info.samples.std(2), target.scale.expand_as(target.loc), atol=0.06, rtol=0.05)


def test_ended_episodes_do_not_affect_the_temperature():
    algorithm = make(DISCRETE)
    inputs, rollout_info = random_batch(DISCRETE)
    info = algorithm.train_sequence(inputs, MpoState(), rollout_info).info
    is_last = (inputs.step_type == LAST).unsqueeze(-1)
    corrupted = info._replace(sample_values=torch.where(is_last, 1e3 * info.sample_values, info.sample_values))
    losses = [algorithm.calc_loss(i).extra.actor for i in (info, corrupted)]
    mask = inputs.step_type != LAST
    assert torch.equal(losses[0][mask], losses[1][mask])


def test_the_discrete_loss_is_the_weighted_likelihood_plus_penalty():
    algorithm = make(DISCRETE, dual_constraint=0.05)
    inputs, rollout_info = random_batch(DISCRETE)
    info = algorithm.train_sequence(inputs, MpoState(), rollout_info).info
    log_prior = info.target_distribution.logits
    mask = (inputs.step_type != LAST).float()
    weights = improved_weights(info.sample_values, solve_temperature(info.sample_values, 0.05, mask, log_prior),
                               log_prior)
    logits = info.action_distribution.logits
    divergence = (log_prior.exp() * (log_prior - logits)).sum(-1)
    expected = -(weights * logits).sum(-1) + 0.7 * divergence  # 0.7 is the multiplier
    loss_info = algorithm.calc_loss(info)
    torch.testing.assert_close(loss_info.extra.actor, expected)
    torch.testing.assert_close(loss_info.loss, loss_info.extra.actor + loss_info.extra.critic)


def test_the_priority_is_the_root_of_the_mean_loss_of_the_transitions():
    algorithm = make(DISCRETE, calculate_priority=True)
    inputs, rollout_info = random_batch(DISCRETE)
    loss_info = algorithm.calc_loss(algorithm.train_sequence(inputs, MpoState(), rollout_info).info)
    for b in range(6):
        losses = [float(loss_info.extra.critic[t, b].detach()) for t in range(3) if inputs.step_type[t, b] != LAST]
        assert float(loss_info.priority[b]) == pytest.approx((sum(losses) / len(losses))**0.5, rel=1e-5)


def test_staying_within_the_bounds_pulls_back_a_policy_that_has_left_them(monkeypatch):
    gradients = []
    for constraint in (None, 0.5):
        algorithm = make(CONTINUOUS, actor_network_cls=actor_with(plain), out_of_bounds_constraint=constraint,
                         sample_action_num=50)
        for multiplier in algorithm._policy.multipliers:
            multiplier.value.zero_()
        with torch.no_grad():  # the mean of the second action is far above its bound of 3
            algorithm.actor._projection_net._projection_layer.bias[1] = 5.0
        algorithm._target_actor_network.load_state_dict(algorithm.actor.state_dict())
        with_fixed_noise(algorithm, monkeypatch)
        inputs, rollout_info = random_batch(CONTINUOUS)
        info = algorithm.train_sequence(inputs, MpoState(), rollout_info).info
        algorithm.calc_loss(info).extra.actor.sum().backward()
        gradients.append(float(algorithm.actor._projection_net._projection_layer.bias.grad[1]))
    assert gradients[1] - gradients[0] > 1.0  # descent lowers the mean


def test_the_value_within_bounds_is_minus_the_squared_distance_to_them():
    algorithm = make(CONTINUOUS, actor_network_cls=actor_with(plain))  # bounds [-1, 1] and [0, 3]
    samples = torch.tensor([[0.5, 2.0], [1.0, 3.0], [3.0, 2.0], [-2.0, 5.0]])
    assert algorithm._policy.value_within_bounds(samples).tolist() == [0.0, 0.0, -4.0, -5.0]


def test_the_components_of_several_actions_are_one_vector():
    spec = dict(a=BoundedTensorSpec((2, ), torch.float32, -1., 1.), b=BoundedTensorSpec((3, ), torch.float32, -1., 1.))
    algorithm = make(spec, actor_network_cls=actor_with(squashed))
    distributions = algorithm.actor(torch.randn(6, 3))[0]
    bases = [distributions[key].base_dist for key in 'ab']
    expected = torch.cat([base.loc for base in bases], 1), torch.cat([base.scale for base in bases], 1)
    assert all(map(torch.equal, algorithm._policy.parameters_of(distributions), expected))


def test_an_action_of_rank_two_is_a_vector_of_its_components():
    spec = BoundedTensorSpec((2, 3), torch.float32, -1., 1.)
    algorithm = make(spec, actor_network_cls=actor_with(squashed))
    inputs, rollout_info = random_batch(spec, length=2)
    info = algorithm.train_sequence(inputs, MpoState(), rollout_info).info
    assert info.samples.shape == (2, 6, 5, 6)
    distribution = algorithm.actor(inputs.observation[0])[0]
    loc, scale = algorithm._policy.parameters_of(distribution)
    assert torch.equal(loc, distribution.base_dist.loc.reshape(6, 6))
    assert torch.equal(scale, distribution.base_dist.scale.reshape(6, 6))
    assert algorithm.rollout_step(step_of(inputs), MpoState()).output.shape == (6, 2, 3)


# Acting ----------------------------------------------------------------------------------------------------------


def step_of(inputs, t=0):
    return nest.map_structure(lambda x: x[t], inputs)


@every_variant
def test_actions_are_within_their_bounds(variant):
    spec, arguments = VARIANTS[variant]
    algorithm = make(spec, **arguments)
    with torch.no_grad():
        for parameter in algorithm.actor.parameters():
            parameter.mul_(20)
    inputs, _ = random_batch(spec, batch=200)
    for step in (algorithm.rollout_step(step_of(inputs), MpoState()), algorithm.predict_step(step_of(inputs), ())):
        for action, leaf in zip(nest.flatten(step.output), nest.flatten(spec)):
            assert action.dtype == leaf.dtype and tuple(action.shape) == (200, *leaf.shape)
            assert (action >= torch.tensor(leaf.minimum)).all() and (action <= torch.tensor(leaf.maximum)).all()


def test_evaluation_is_greedy_and_epsilon_greedy_samples():
    inputs, _ = random_batch(DISCRETE, batch=100)
    greedy, sampling = make(DISCRETE, epsilon_greedy=0.0), make(DISCRETE, epsilon_greedy=1.0)
    step = greedy.predict_step(step_of(inputs), ())
    assert torch.equal(step.output, step.info.action_distribution.probs.argmax(-1) + 2)
    assert len(set(sampling.predict_step(step_of(inputs), ()).output.tolist())) > 1
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, epsilon_greedy=0.25)
    assert make(DISCRETE, config=config)._epsilon_greedy == 0.25


def test_without_critics_it_can_act_but_not_train():
    algorithm = MpoAlgorithm(OBSERVATION, DISCRETE, q_network_cls=None,
                             actor_network_cls=partial(ActorDistributionNetwork, **small))
    inputs, rollout_info = random_batch(DISCRETE)
    assert algorithm.predict_step(step_of(inputs), ()).output.shape == (6, )
    assert algorithm.rollout_step(step_of(inputs), MpoState()).output.shape == (6, )
    with pytest.raises(RuntimeError, match='no critics'):
        algorithm.train_sequence(inputs, MpoState(), rollout_info)
    with pytest.raises(ConfError, match='MpoAlgorithm has no critics or value network'):
        algorithm.check_config(TrainerConfig(root_dir='run'))


# Updates ---------------------------------------------------------------------------------------------------------

ENVIRONMENTS = {
    'discrete': partial(PolicyUnittestEnv, episode_length=5),
    'continuous': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous),
    'vector reward': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous, reward_dim=2),
    'recurrent': partial(RNNPolicyUnittestEnv, episode_length=5, gap=2),
    'recurrent continuous': partial(RNNPolicyUnittestEnv, episode_length=5, gap=2, action_type=ActionType.Continuous),
}


def make_agent(environment, batch_size=4, seed=0, unroll_length=6, mini_batch_size=8, use_rollout_state=True,
               updates=2, fc=(16, ), learning_rate=1e-2, **arguments):
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    recurrent = environment.startswith('recurrent')
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=unroll_length, mini_batch_length=2,
                           mini_batch_size=mini_batch_size, num_updates_per_train_iter=updates,
                           whole_replay_buffer_training=False, clear_replay_buffer=False, replay_buffer_length=64,
                           use_rollout_state=recurrent and use_rollout_state)
    rnn = dict(lstm_hidden_size=(8, ))
    head = dict(continuous_projection_net_ctor=partial(NormalProjectionNetwork, state_dependent_std=True))
    networks = dict(
        actor_network_cls=partial(ActorDistributionRNNNetwork, **rnn, **head) if recurrent else partial(
            ActorDistributionNetwork, fc_layer_params=fc, **head),
        critic_network_cls=partial(CriticRNNNetwork, **rnn) if recurrent else partial(
            CriticNetwork, joint_fc_layer_params=fc),
        q_network_cls=partial(QRNNNetwork, **rnn) if recurrent else partial(QNetwork, fc_layer_params=fc))
    rl = partial(MpoAlgorithm, **{'sample_action_num': 4, 'num_critic_replicas': 2, **networks, **arguments})
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=rl, optimizer=Adam(lr=learning_rate))
    agent.set_path('')
    agent.finalize()
    return agent, env


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


every_environment = pytest.mark.parametrize('environment', list(ENVIRONMENTS))


@every_environment
def test_training_moves_all_networks_and_the_targets(environment):
    agent, _ = make_agent(environment)
    before = parameters(agent)
    for _ in range(3):
        agent.train_iter()
    changed = [not torch.equal(a, b) for a, b in zip(before, parameters(agent))]
    assert all(changed), [n for (n, _), c in zip(agent.named_parameters(), changed) if not c]


@every_environment
def test_same_seed_gives_the_same_parameters(environment):
    results = []
    for _ in range(2):
        agent, _ = make_agent(environment, seed=3)
        for _ in range(3):
            agent.train_iter()
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@every_environment
def test_steps_do_not_change_their_inputs(environment):
    agent, env = make_agent(environment)
    time_step = env.current_time_step()
    for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                          (agent.predict_step, agent.get_initial_predict_state(4))):
        copies = nest.map_structure(torch.clone, (time_step, state))
        method(time_step, state)
        for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state))):
            assert torch.equal(old, new)


@every_environment
def test_a_checkpoint_restores_the_next_update(environment):
    agent, _ = make_agent(environment)
    agent.train_iter()
    copy, _ = make_agent(environment, seed=9)
    copy.load_state_dict(agent.state_dict())
    experience, _ = agent.replay_buffer.get_batch(8, 2)
    experience = nest.map_structure(lambda x: x.transpose(0, 1), experience)
    for one in (agent, copy):
        torch.manual_seed(4)
        info = one.learner.losses.train_info(experience)
        one.update_with_gradient(one.calc_loss(info))
        one.after_update(experience.time_step, info)
    assert all(torch.equal(a, b) for a, b in zip(agent.state_dict().values(), copy.state_dict().values())
               if isinstance(a, torch.Tensor))


@every_environment
def test_one_environment_and_sequences_of_one_are_enough(environment):
    agent, _ = make_agent(environment, batch_size=1, mini_batch_size=1)
    for _ in range(6):
        agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_updates_of_one_iteration_without_memory_are_traceable():
    assert make(DISCRETE).updates_are_traceable
    assert not make(DISCRETE, mstep_iterations=2, actor_optimizer=Adam(lr=1e-3)).updates_are_traceable
    assert not make_agent('recurrent')[0].policy.updates_are_traceable


def test_more_m_step_iterations_move_only_the_policy_and_further():
    moved = []
    for iterations in (1, 4):
        agent, _ = make_agent('continuous', updates=1, actor_optimizer=SGD(lr=1e-3), mstep_iterations=iterations,
                              target_update_period=1000, alpha_mean_scale=1e-6, alpha_var_scale=1e-6)
        rl = agent.policy
        before = [p.detach().clone() for p in rl.actor.parameters()]
        agent.train_iter()
        after = [p.detach() for p in rl.actor.parameters()]
        moved.append(sum(float((a - b).abs().sum()) for a, b in zip(before, after)))
        critics = [p.detach().clone() for p in rl.critics.parameters()]
        moved.append(critics)
    assert moved[2] == pytest.approx(4 * moved[0], rel=0.05), 'small steps along nearly the same gradient'
    assert all(torch.equal(a, b) for a, b in zip(moved[1], moved[3]))


def test_the_m_step_converges_to_the_weighted_policy():
    agent, _ = make_agent('discrete', updates=1, actor_optimizer=Adam(lr=3e-2), mstep_iterations=300, unroll_length=12,
                          mini_batch_size=32, target_update_period=1000, alpha_scale=1e-9, dual_constraint=0.3,
                          train_actor_on_first_step=False)
    rl = agent.policy
    seen = []
    with torch.no_grad():  # different values for all actions
        for network in (rl.critics, rl.target_critics):
            for p in network.parameters():
                p.add_(torch.randn_like(p))
    original = rl.after_update

    def remember(root_inputs, info):
        seen.append((root_inputs, info))
        original(root_inputs, info)

    rl.after_update = remember
    agent.train_iter()
    inputs, info = seen[0]
    states, mask = rl._trained_states(info)
    weights, _, _ = rl._improve(states, mask)
    policy = rl.actor(inputs.observation[1])[0]
    valid = mask[0].bool()  # the observations are -1 and 1, for which the same policy is right each time
    torch.testing.assert_close(policy.probs[valid], weights[0][valid], atol=0.02, rtol=0)


def test_the_multipliers_follow_the_change_of_the_policy():
    agent, _ = make_agent('continuous', kl_mean_constraint=1e-6, kl_var_constraint=1e-6, learning_rate=3e-2,
                          target_update_period=1000)
    for _ in range(5):
        agent.train_iter()
    mean_multiplier, scale_multiplier = (m.value for m in agent.policy._policy.multipliers)
    assert 0 < float(mean_multiplier) <= 0.1001 and 0 < float(scale_multiplier) <= 10.001
    agent, _ = make_agent('continuous', kl_mean_constraint=1e3, kl_var_constraint=1e3)
    for _ in range(5):
        agent.train_iter()
    assert all(float(m.value) == 0 for m in agent.policy._policy.multipliers)


def test_a_tight_constraint_keeps_the_policy_near_the_target_policy():
    divergences = []
    for tight in (False, True):
        strict = dict(alpha_mean_max=1e4, alpha_mean_scale=1e4, kl_mean_constraint=1e-5) if tight else {}
        agent, _ = make_agent('continuous', target_update_period=10000, target_update_tau=1.0, updates=40,
                              kl_var_constraint=10.0, dual_constraint=1.0, **strict)
        for _ in range(5):
            agent.train_iter()
        experience, _ = agent.replay_buffer.get_batch(64, 1)
        rl = agent.policy
        observation = experience.time_step.observation[:, 0]
        with torch.no_grad():
            policy, target = rl.actor(observation)[0], rl._target_actor_network(observation)[0]
        divergences.append(float((0.5 * ((policy.loc - target.loc) / target.scale).square()).mean()))
    assert divergences[1] < 0.1 * divergences[0]


def test_target_networks_follow_at_their_own_pace():
    agent, _ = make_agent('discrete', updates=1, target_update_tau=1.0, target_update_period=1,
                          actor_target_update_period=2)
    rl = agent.policy

    def is_copied(network, target):
        return all(torch.equal(a, b) for a, b in zip(network.parameters(), target.parameters()))

    agent.train_iter()
    assert is_copied(rl.critics, rl.target_critics)
    assert not is_copied(rl.actor, rl._target_actor_network)
    agent.train_iter()
    assert is_copied(rl.actor, rl._target_actor_network)


def test_a_temperature_with_an_optimizer_is_trained_and_saved():
    agent, _ = make_agent('discrete', eta_optimizer=Adam(lr=0.1), initial_eta=2.0)
    agent.train_iter()
    eta = agent.policy._temperatures[0]._log_eta
    assert float(eta.exp()) != pytest.approx(2.0, abs=0.05)
    assert any('_log_eta' in name for name in agent.state_dict())


# Memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('environment', ['recurrent', 'recurrent continuous'])
def test_training_uses_the_recurrent_states_of_the_rollout(environment):
    agent, env = make_agent(environment)
    rl = agent.policy
    time_step = env.current_time_step()
    state = train_state = rl.get_initial_rollout_state(4)
    for _ in range(3):
        with torch.no_grad():
            step = rl.rollout_step(time_step, state)
            train_state = rl.train_step(time_step, train_state, step.info).state
        state = step.state
        for a, b in zip(nest.flatten(state), nest.flatten(train_state)):
            torch.testing.assert_close(a, b)
        time_step = env.step(step.output)
    assert all(leaf.ne(0).any() for leaf in nest.flatten(state))


def test_only_policy_states_are_stored_if_training_starts_from_zeros():
    agent, env = make_agent('recurrent', use_rollout_state=False)
    rl = agent.policy
    with torch.no_grad():
        state = rl.rollout_step(env.current_time_step(), rl.get_initial_rollout_state(4)).state
    assert any(leaf.ne(0).any() for leaf in nest.flatten(state.actor))
    assert not any(leaf.ne(0).any() for leaf in nest.flatten((state.critic, state.target_actor)))


# Invalid settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('arguments, message', [
    (dict(dual_constraint=0.0), 'dual_constraint'),
    (dict(kl_mean_constraint=-1.0), 'kl_mean_constraint'),
    (dict(sample_action_num=0), 'sample_action_num'),
    (dict(num_critic_replicas=0), 'num_critic_replicas'),
    (dict(alpha_var_max='1'), 'alpha_var_max'),
    (dict(mstep_iterations=3), 'actor_optimizer'),
    (dict(initial_eta=1.0), 'eta_optimizer'),
])
def test_arguments_that_cannot_work_are_rejected_by_name(arguments, message):
    with pytest.raises(ConfError, match=message):
        make(CONTINUOUS, **arguments)


@pytest.mark.parametrize('arguments, message', [
    (dict(constrain_each_dimension=True), 'constrain_each_dimension'),
    (dict(out_of_bounds_constraint=0.1), 'out_of_bounds_constraint'),
])
def test_continuous_only_arguments_are_rejected_for_discrete_actions(arguments, message):
    with pytest.raises(ConfError, match=message):
        make(DISCRETE, **arguments)


def test_several_m_step_iterations_need_feedforward_networks():
    with pytest.raises(ConfError, match='recurrent'):
        make_agent('recurrent', mstep_iterations=2, actor_optimizer=Adam())


@pytest.mark.parametrize('spec', [(DISCRETE, CONTINUOUS), BoundedTensorSpec((2, ), torch.int64, 0, 3)])
def test_other_actions_are_rejected(spec):
    with pytest.raises(SpecError):
        make(spec)


def test_other_policies_are_rejected():
    with pytest.raises(SpecError, match='NormalProjectionNetwork'):
        make(CONTINUOUS, actor_network_cls=actor_with(BetaProjectionNetwork))


def test_multi_dimensional_rewards_need_continuous_actions():
    with pytest.raises(SpecError, match='continuous'):
        make(DISCRETE, reward_spec=TensorSpec((2, )))


# Learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('environment', ['discrete', 'continuous'])
def test_the_greedy_policy_of_a_tiny_environment_is_optimal(environment):
    agent, env = make_agent(environment, batch_size=16, unroll_length=4, mini_batch_size=64, updates=4,
                            train_actor_on_first_step=False, sample_action_num=16, dual_constraint=0.5,
                            target_update_tau=0.05, fc=(32, ))
    evaluation_env = copy.deepcopy(env)
    # 4 rewarded steps; a policy that ignores the signal gets half of it at most
    optimal = (0.97 if environment == 'discrete' else 0.85) * 4
    assert trains_until(lambda: greedy_return(agent, evaluation_env) >= optimal, agent.train_iter, 100, interval=20)
