"""TAAC: the switch, the steps, the losses, the arguments."""
import copy
from functools import partial

import pytest
import torch
from helpers.learning import trains_until

from alfx import context, gin_utils, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.taac_algorithm import Mode, TaacAlgorithm, TaacInfo, TaacLAlgorithm, TaacQAlgorithm, TaacState
from alfx.data_structures import StepType, TimeStep
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.layers import FC, Cast
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import clipped_exp

CLASSES = (TaacAlgorithm, TaacLAlgorithm, TaacQAlgorithm)
every_class = pytest.mark.parametrize('cls', CLASSES)
OBSERVATION = TensorSpec((3, ))
ACTION = BoundedTensorSpec((2, ), torch.float32, [-2.0, 0.0], [2.0, 1.0])
actor = partial(ActorDistributionNetwork, fc_layer_params=(16, ), continuous_projection_net_ctor=partial(
    NormalProjectionNetwork, scale_distribution=True, state_dependent_std=True, std_transform=clipped_exp))
critic = partial(CriticNetwork, joint_fc_layer_params=(16, ))


def make(cls=TaacAlgorithm, observation_spec=OBSERVATION, action_spec=ACTION, seed=0, **arguments):
    torch.manual_seed(seed)
    arguments = {'actor_network_cls': actor, 'critic_network_cls': critic, **arguments}
    return cls(observation_spec=observation_spec, action_spec=action_spec, **arguments)


def make_agent(cls=TaacAlgorithm, environment=PolicyUnittestEnv, batch_size=4, seed=0, length=4, reward_dim=1,
               learning_rate=1e-2, config=(), nested=False, **arguments):
    torch.manual_seed(seed)
    context.reset()
    env = environment(batch_size=batch_size, episode_length=5, action_type=ActionType.Continuous,
                      reward_dim=reward_dim, nested_observation=nested)
    env.seed(seed)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=16,
                           mini_batch_length=length, num_updates_per_train_iter=2, initial_collect_steps=8 * batch_size,
                           whole_replay_buffer_training=False, clear_replay_buffer=False, **dict(config))
    rl = partial(cls, **{'actor_network_cls': actor, 'critic_network_cls': critic, **arguments})
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=rl, optimizer=Adam(lr=learning_rate))
    agent.set_path('')
    agent.finalize()
    return agent, env


def time_step(batch=5, step_type=StepType.MID, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TimeStep(step_type=torch.full((batch, ), step_type, dtype=torch.int32), reward=torch.zeros(batch),
                    discount=torch.ones(batch), observation=torch.randn(batch, 3, generator=generator),
                    prev_action=torch.zeros(batch, 2), env_id=torch.arange(batch))


def random_state(algorithm, batch=5):
    spec = algorithm.rollout_state_spec.tau
    return TaacState(tau=2 * torch.rand(batch, *spec.shape) - 1, repeats=torch.zeros(batch, dtype=torch.int64))


def sequences(algorithm, length=4, batch=6, seed=0):
    """Return inputs and rollout infos ``[T, B, ...]``."""
    torch.manual_seed(seed)
    steps = [time_step(batch, seed=t) for t in range(length)]
    infos = [algorithm.rollout_step(step, random_state(algorithm, batch)).info for step in steps]
    return nest.map_structure(torch.Tensor.detach, (nest.stack(steps), nest.stack(infos)))


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


# The switch --------------------------------------------------------------------------------------------------------


def test_the_switch_is_a_softmax_of_the_values_over_the_temperature():
    # Q = (1, 2), alpha = 0.5: p(b=1) = e^4 / (e^2 + e^4) = 1 / (1 + e^-2) = 0.880797
    algorithm = make(initial_alpha=0.5)
    dist = algorithm._switch_distribution(torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]]))
    expected = torch.tensor([0.880797, 1 - 0.880797, 0.5])
    torch.testing.assert_close(dist.probs[:, 1], expected, atol=1e-6, rtol=0)
    q = torch.randn(20, 2)
    torch.testing.assert_close(algorithm._switch_distribution(q).probs, torch.softmax(q / 0.5, -1))


def test_the_switching_advantage_can_be_clipped():
    algorithm = make(b1_advantage_clipping=(0.0, 1.0))
    dist = algorithm._switch_distribution(torch.tensor([[5.0, 0.0], [0.0, 5.0], [0.0, 0.5]]))
    torch.testing.assert_close(dist.probs[:, 1], torch.sigmoid(torch.tensor([0.0, 1.0, 0.5])))


def test_compared_values_are_the_critic_minimum_for_both_trajectories():
    algorithm = make(TaacLAlgorithm)
    state, observation = random_state(algorithm), time_step().observation
    for mode in Mode:
        with torch.set_grad_enabled(mode is Mode.train):
            act = algorithm._predict_action(observation, state.tau, mode)
        form = algorithm._trajectory
        for i, tau in enumerate((form.extend(state.tau), form.renew(act.actor_a, state.tau))):
            torch.testing.assert_close(act.taus[i], tau)
            critics, _ = algorithm.critics((observation, tau))
            torch.testing.assert_close(act.q_values2[:, i], critics.min(1)[0])


def test_rewards_are_weighted_and_costs_use_the_highest_estimate():
    """Multi-dimensional rewards are weighted, and the highest estimate of a cost counts."""
    algorithm = make(reward_spec=TensorSpec((2, )), reward_weights=[1.0, -2.0])
    tau, observation = random_state(algorithm).tau, time_step().observation
    critics, _ = algorithm.critics((observation, tau))
    assert critics.shape == (5, 2, 2)
    expected = critics[..., 0].min(1)[0] - 2 * critics[..., 1].max(1)[0]
    torch.testing.assert_close(algorithm._value(observation, tau), expected)


# Steps -------------------------------------------------------------------------------------------------------------


@every_class
def test_actions_are_in_bounds_and_follow_the_switch(cls):
    algorithm = make(cls)
    state, step = random_state(algorithm), time_step()
    seen = set()
    for _ in range(20):
        result = algorithm.rollout_step(step, state)
        info, form = result.info, algorithm._trajectory
        assert torch.equal(info.prev_tau, state.tau)
        extended = ~info.rollout_b
        assert torch.equal(info.tau[extended], form.extend(state.tau)[extended])
        action = form.action(info.tau)
        torch.testing.assert_close(result.output, torch.stack((2 * action[:, 0], 0.5 + 0.5 * action[:, 1]), -1))
        assert (result.output >= torch.tensor([-2.0, 0.0])).all() and (result.output <= torch.tensor([2.0, 1.0])).all()
        assert torch.equal(result.state.repeats, torch.where(extended, state.repeats + 1, 0))
        seen |= set(info.rollout_b.tolist())
        state = result.state
    assert seen == {True, False}


def test_a_trajectory_is_extended_at_most_max_repeat_steps_times():
    algorithm = make(max_repeat_steps=2, b1_advantage_clipping=(-1e6, -1e6))  # which would never switch
    for method in (algorithm.rollout_step, algorithm.predict_step):
        state, repeats = random_state(algorithm), []
        for _ in range(7):
            state = method(time_step(), state).state
            repeats.append(state.repeats[0].item())
        assert repeats == [1, 2, 0, 1, 2, 0, 1]
    act = algorithm._predict_action(time_step().observation, state.tau, Mode.train)
    assert (act.b == 0).all()


def test_episodes_begin_with_random_trajectories_only_on_request():
    for randomize in (False, True):
        algorithm = make(TaacQAlgorithm, randomize_first_state_tau=randomize)
        state = algorithm.get_initial_rollout_state(200)
        first = algorithm.rollout_step(time_step(200, StepType.FIRST), state).info.prev_tau
        assert (first.abs().max() > 0) == randomize and first.abs().max() <= 1
        if randomize:
            assert first.mean().abs() < 0.1 and first.std().item() == pytest.approx(3**-0.5, abs=0.05)
        state = random_state(algorithm, 200)
        assert torch.equal(algorithm.rollout_step(time_step(200), state).info.prev_tau, state.tau)
        assert torch.equal(algorithm.predict_step(time_step(200, StepType.FIRST), state).info.prev_tau, state.tau)


def test_evaluation_takes_the_better_of_repeating_and_the_mode():
    """Evaluation takes the more valuable one of repeating and the mode, and samples with epsilon."""
    algorithm = make(TaacAlgorithm)
    step, state = time_step(), random_state(algorithm)
    first, second = (algorithm.predict_step(step, state) for _ in range(2))
    assert torch.equal(first.output, second.output)
    act = algorithm._predict_action(step.observation, state.tau, Mode.predict)
    assert torch.equal(first.info.b, act.q_values2.argmax(1))
    exploring = make(TaacAlgorithm, epsilon_greedy=1.0)
    assert not torch.equal(exploring.predict_step(step, state).output, exploring.predict_step(step, state).output)
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, epsilon_greedy=0.25)
    assert make(config=config)._epsilon_greedy == 0.25
    assert make(config=config, epsilon_greedy=0.5)._epsilon_greedy == 0.5


def test_steps_do_not_change_their_inputs():
    algorithm = make(TaacQAlgorithm, randomize_first_state_tau=True, max_repeat_steps=1)
    step, state = time_step(5, StepType.FIRST), random_state(algorithm)
    info = algorithm.rollout_step(step, state).info
    arguments = (step, state, info)
    copies = nest.map_structure(torch.clone, arguments)
    algorithm.predict_step(step, state)
    algorithm.rollout_step(step, state)
    algorithm.train_step(step, (), info)
    for old, new in zip(nest.flatten(copies), nest.flatten(arguments)):
        assert torch.equal(old, new)


@pytest.mark.parametrize('cls', [TaacLAlgorithm, TaacQAlgorithm])
def test_greedy_trajectories_do_not_depend_on_summation_order(cls):
    wide = partial(actor, fc_layer_params=(64, ))
    one, other = (make(cls, actor_network_cls=wide) for _ in range(2))
    order = torch.randperm(64)
    with torch.no_grad():
        for layer in other.actor.modules():
            if isinstance(layer, FC) and layer.output_size == 64:
                layer.weight.copy_(layer.weight[order])
                layer.bias.copy_(layer.bias[order])
            elif isinstance(layer, FC) and layer.input_size == 64:
                layer.weight.copy_(layer.weight[:, order])
    states = [random_state(one)] * 2
    seen = time_step().observation, states[0].tau
    means = [algorithm.actor(seen)[0].base_dist.base_dist.loc for algorithm in (one, other)]
    torch.testing.assert_close(*means)
    assert not torch.equal(*means)  # float32 does not add up alike
    for i in range(200):
        states = [algorithm.predict_step(time_step(seed=i), state).state
                  for algorithm, state in zip((one, other), states)]
        assert torch.equal(states[0].tau, states[1].tau)
    assert states[0].tau.dtype == torch.float32


# Losses ------------------------------------------------------------------------------------------------------------


def test_the_actor_gradient_is_that_of_sac_times_switch_probability(monkeypatch):
    # One dimension and a policy a = m + s z with parameters m, s: with frozen noise z,
    # d loss / d a = -p(b=1) dQ/da + alpha d log pi / d a; here Q and p are known and log pi has no gradient to m.
    algorithm = make(action_spec=BoundedTensorSpec((1, ), torch.float32, -1, 1), initial_alpha=0.5)
    mean = torch.full((5, 1), 0.3, requires_grad=True)
    dist = lambda: torch.distributions.Independent(torch.distributions.Normal(mean, 0.01), 1)
    monkeypatch.setitem(algorithm._modules, '_actor_network', lambda inputs: (dist(), ()))
    monkeypatch.setattr(algorithm, '_value', lambda observation, tau: -(tau[:, 0] - 1.0).square())
    prev_tau = torch.linspace(-1, 1, 5).unsqueeze(1)
    act = algorithm._predict_action(torch.zeros(5, 3), prev_tau, Mode.train)
    info, _ = algorithm._policy_losses(act)
    gradient, = torch.autograd.grad(info.actor_loss.sum(), mean)
    action = act.actor_a.detach()
    advantage = -(action[:, 0] - 1).square() + (prev_tau[:, 0] - 1).square()
    expected = -torch.sigmoid(advantage / 0.5) * -2 * (action[:, 0] - 1)
    torch.testing.assert_close(gradient[:, 0], expected)
    torch.testing.assert_close(info.adv, advantage)


def test_temperatures_grow_while_an_entropy_is_below_its_target():
    algorithm = make(target_entropy=(lambda spec: 1e3, lambda spec: -1e3))
    info, alpha_loss = algorithm._policy_losses(algorithm._predict_action(
        time_step().observation, random_state(algorithm).tau, Mode.train))
    alpha_loss.mean().backward()
    gradient = algorithm._log_alpha.grad
    assert gradient[0] < 0 < gradient[1]
    torch.testing.assert_close(gradient, torch.stack((info.beta_entropy.mean() - 1e3, info.b1_a_entropy.mean() + 1e3)))


def test_entropy_targets_are_functions_of_the_spec_of_each_decision():
    seen = []
    make(target_entropy=lambda spec: seen.append(spec) or 0.1)
    switch, action = seen
    assert switch.is_discrete and (switch.minimum, switch.maximum) == (0, 1)
    assert action.shape == (2, ) and (action.minimum == -1).all() and (action.maximum == 1).all()
    with pytest.raises(ValueError, match='target_entropy'):
        make(target_entropy=(None, None, None))


@every_class
@pytest.mark.parametrize('train_on_last', [True, False])
@pytest.mark.parametrize('reward_spec', [TensorSpec(()), TensorSpec((3, ))])
def test_training_on_a_sequence_gives_the_losses_of_its_steps(cls, train_on_last, reward_spec, monkeypatch):
    algorithm = make(cls, train_actor_on_last_step=train_on_last, reward_spec=reward_spec)
    # Without noise in action and switch both ways of calling draw the same.
    monkeypatch.setattr('alfx.utils.dist_utils.rsample_action_distribution', lambda dist: _mode(dist))
    monkeypatch.setattr('alfx.utils.dist_utils.Categorical.sample', lambda self: self.logits.argmax(-1))
    inputs, rollout_info = sequences(algorithm)
    inputs = inputs._replace(reward=torch.randn(4, 6, *reward_spec.shape))
    inputs.step_type[1, 2], inputs.step_type[2, 2] = StepType.LAST, StepType.FIRST
    at_once = algorithm.train_sequence(inputs, (), rollout_info).info
    steps = [nest.map_structure(lambda x, t=t: x[t], (inputs, (), rollout_info)) for t in range(4)]
    one_by_one = nest.stack([algorithm.train_step(*step).info for step in steps])
    results = []
    for info in (at_once, one_by_one):
        loss = algorithm.calc_loss(info)
        gradients = torch.autograd.grad(loss.loss.mean(), [p for p in algorithm.parameters() if p.requires_grad])
        results.append((loss, gradients))
    for a, b in zip(nest.flatten(results[0]), nest.flatten(results[1])):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert bool((results[0][0].extra.actor[-1] == 0).all()) != train_on_last
    assert torch.equal(at_once.b, one_by_one.b)


def _mode(dist):
    from alfx.utils import dist_utils
    return dist_utils.get_mode(dist)


def test_targets_value_the_current_policy_after_the_replayed_trajectory():
    algorithm = make()
    inputs, rollout_info = sequences(algorithm, length=2)
    torch.manual_seed(1)
    step = algorithm.train_sequence(inputs, (), rollout_info)
    action = (step.output - algorithm._middle) / algorithm._half  # which is the trajectory here
    target, _ = algorithm.target_critics((inputs.observation[1], action[1]))
    torch.testing.assert_close(step.info.critic.target_critic[1], target.min(1)[0])
    repeated = step.info.b == 0
    torch.testing.assert_close(action[repeated], rollout_info.prev_tau[repeated])


def test_any_loss_of_the_critics_can_be_chosen():
    algorithm = make(critic_loss_ctor=partial(OneStepTDLoss, gamma=0.5), num_critic_replicas=3)
    inputs, rollout_info = sequences(algorithm)
    info = algorithm.train_sequence(inputs, (), rollout_info).info
    loss = algorithm.calc_loss(info)
    expected = sum(OneStepTDLoss(gamma=0.5)(info, info.critic.critics[:, :, i], info.critic.target_critic).loss
                   for i in range(3))
    torch.testing.assert_close(loss.extra.critic, expected)
    torch.testing.assert_close(loss.loss, loss.extra.actor + loss.extra.critic + loss.extra.alpha)


def test_target_critics_move_by_tau_every_period():
    algorithm = make(target_update_tau=0.25, target_update_period=2)
    with torch.no_grad():
        for p in algorithm.critics.parameters():
            p.add_(1.0)
    distances = []
    for _ in range(4):
        algorithm.after_update((), ())
        distances.append((next(algorithm.critics.parameters())
                          - next(algorithm.target_critics.parameters())).mean().item())
    assert distances == pytest.approx([1.0, 0.75, 0.75, 0.5625])


# In an agent -------------------------------------------------------------------------------------------------------


@every_class
@pytest.mark.parametrize('reward_dim', [1, 3])
@pytest.mark.parametrize('length', [2, 5])
def test_training_changes_all_trained_parameters_and_is_repeatable(cls, reward_dim, length):
    results = []
    for _ in range(2):
        agent, _ = make_agent(cls, length=length, reward_dim=reward_dim, seed=3)
        before = parameters(agent)
        for _ in range(5):
            agent.train_iter()
        results.append(parameters(agent))
        unchanged = [name for (name, p), old in zip(agent.named_parameters(), before) if torch.equal(p, old)]
        assert not unchanged
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_each_optimizer_owns_its_part():
    optimizers = dict(actor_optimizer=Adam(lr=0.0), critic_optimizer=Adam(lr=0.0), alpha_optimizer=Adam(lr=1e-2))
    agent, _ = make_agent(**optimizers)
    before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    for _ in range(4):
        agent.train_iter()
    trained = {name for name, p in agent.named_parameters() if not torch.equal(p, before[name])}
    assert trained == {'_rl_algorithm._log_alpha'}


@every_class
def test_a_checkpoint_restores_the_next_action_and_the_next_update(cls):
    agent, env = make_agent(cls)
    copy, copy_env = make_agent(cls, seed=9)
    for _ in range(3):
        agent.train_iter()
    copy.load_state_dict(agent.state_dict())
    step, state = env.current_time_step(), agent.get_initial_predict_state(4)
    assert torch.equal(agent.predict_step(step, state).output, copy.predict_step(step, state).output)
    experience, _ = agent.replay_buffer.get_batch(8, 4)
    experience = nest.map_structure(lambda x: x.transpose(0, 1), experience)
    for each in (agent, copy):
        torch.manual_seed(0)
        info = each.learner.losses.train_info(experience)
        each.update_with_gradient(each.calc_loss(info))
        each.after_update(experience.time_step, info)
    assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(copy)))


def test_one_environment_and_a_nested_observation_are_fine():
    preprocess = dict(signal=None, noise=(Cast(), lambda x: x.float().unsqueeze(-1)))
    agent, _ = make_agent(batch_size=1, nested=True, actor_observation_processors=preprocess,
                          critic_network_cls=partial(critic, observation_input_processors=preprocess,
                                                     observation_preprocessing_combiner=NestConcat()))
    for _ in range(12):
        agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_replay_data_has_no_distribution_and_no_loss():
    agent, _ = make_agent()
    stored = agent.experience_spec.rollout_info.rl
    assert {name for name in TaacInfo._fields if nest.flatten(getattr(stored, name))} == {
        'tau', 'prev_tau', 'rollout_b', 'repeats'}


def test_it_learns_the_optimal_action_of_a_tiny_environment():
    agent, env = make_agent(batch_size=16, length=3, learning_rate=5e-3)
    evaluation_env = copy.deepcopy(env)

    def mean_return():
        step, state, total = evaluation_env.reset(), agent.get_initial_predict_state(16), torch.zeros(16)
        for _ in range(4):  # four rewards of at most 1
            result = agent.predict_step(step, state)
            step, state = evaluation_env.step(result.output), result.state
            total += step.reward
        return total.mean().item()

    # repeating or guessing blindly gets 2 at most
    assert trains_until(lambda: mean_return() > 3.2, agent.train_iter, 200)


# Arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('arguments, message', [
    (dict(num_critic_replicas=0), 'num_critic_replicas'), (dict(initial_alpha=0.0), 'initial_alpha'),
    (dict(max_repeat_steps=-1), 'max_repeat_steps'), (dict(b1_advantage_clipping=(1.0, 0.0)), 'b1_advantage_clipping'),
    (dict(actor_network_cls=ActorDistributionRNNNetwork), 'is recurrent')])
def test_arguments_out_of_range_are_rejected_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_discrete_actions_are_rejected():
    with pytest.raises(SpecError, match='TaacQAlgorithm'):
        make(TaacQAlgorithm, action_spec=BoundedTensorSpec((), torch.int64, 0, 2))


def test_a_conf_is_checked_against_the_parameters_of_the_base(tmp_path):
    for name in ('TaacAlgorithm', 'TaacLAlgorithm', 'TaacQAlgorithm'):
        conf = tmp_path / 'wrong.gin'
        conf.write_text(f'{name}.target_update_tua = 0.1\n')
        with pytest.raises(gin_utils.ConfError, match='target_update_tau'):
            gin_utils.load(str(conf))
