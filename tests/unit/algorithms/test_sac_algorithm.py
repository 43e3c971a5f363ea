"""Soft actor-critic: properties for every kind of action, effects of its arguments, and errors."""
import copy
from functools import partial

import pytest
import torch
from helpers.learning import trains_until
from helpers.sac_agents import ENVIRONMENTS, make_agent, networks, random_steps

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.exploration_noise import ZetaRepeat
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.prior_actor import SameActionPriorActor, UniformPriorActor
from alfx.algorithms.sac.actions import ActionParts, ActionType, next_noise, target_entropies
from alfx.algorithms.sac_algorithm import SacActionState, SacAlgorithm, SacCriticState, SacInfo, SacState
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import BatchInfo, StepType, valid_masks
from alfx.engine.loss_reduction import reduce_loss
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.q_networks import QNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils

every_environment = pytest.mark.parametrize('environment', list(ENVIRONMENTS))
stateless_environment = pytest.mark.parametrize('environment', [e for e in ENVIRONMENTS if 'recurrent' not in e])
BOX = BoundedTensorSpec((2, ), torch.float32, -1, 1)
CHOICE = BoundedTensorSpec((), torch.int64, 0, 2)
OBSERVATION = TensorSpec((3, ))


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


def copied(nested):
    return nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, nested)


def zeros_of(spec, *outer):
    return nest.map_structure(lambda s: torch.zeros(*outer, *s.shape), spec)


# Properties for every kind of action ---------------------------------------------------------------------------------


@every_environment
class TestContract:

    def test_training_changes_every_parameter(self, environment):
        agent, _ = make_agent(environment)
        before = parameters(agent)
        assert [agent.train_iter() for _ in range(3)] == [2 * 8 * 2] * 3  # two updates of 8 sequences of 2 steps
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters(agent))]
        assert all(changed), [n for (n, _), c in zip(agent.named_parameters(), changed) if not c]

    def test_same_seed_gives_the_same_parameters(self, environment):
        results = []
        for _ in range(2):
            agent, _ = make_agent(environment, seed=3)
            for _ in range(3):
                agent.train_iter()
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_steps_do_not_change_their_inputs(self, environment):
        agent, env = make_agent(environment, epsilon_greedy=0.5)
        time_step = env.current_time_step()
        for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                              (agent.predict_step, agent.get_initial_predict_state(4))):
            copies = copied((time_step, state))
            method(time_step, state)
            assert all(torch.equal(a, b) for a, b in zip(nest.flatten(copies), nest.flatten((time_step, state))))
        algorithm = agent.policy
        steps, action = random_steps(algorithm, 2, 3)
        rollout_info = SacInfo(action=action)
        copies = copied((steps, rollout_info))
        algorithm.calc_loss(algorithm.train_sequence(steps, zeros_of(algorithm.train_state_spec, 2, 3),
                                                     rollout_info).info).loss.mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(nest.flatten(copies), nest.flatten((steps, rollout_info))))

    def test_a_checkpoint_restores_the_next_update(self, environment):
        agent, env = make_agent(environment)
        agent.train_iter()
        saved, env_state, rollout = (copied(dict(agent.state_dict())), env.get_state(),
                                     copied(agent.learner.state_dict()))
        other, other_env = make_agent(environment, seed=9)
        other.load_state_dict(saved)
        other_env.set_state(env_state)
        other.learner.load_state_dict(rollout)
        for a in (agent, other):
            a.replay_buffer.clear()
            torch.manual_seed(5)
            a.train_iter()
        assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(other)))

    def test_one_environment_is_enough(self, environment):
        agent, _ = make_agent(environment, batch_size=1, mini_batch_size=1)
        for _ in range(4):
            agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_actions_and_states_match_their_specs(self, environment):
        agent, env = make_agent(environment)
        for method, state, spec in (
            (agent.rollout_step, agent.get_initial_rollout_state(4), agent.rollout_state_spec),
            (agent.predict_step, agent.get_initial_predict_state(4), agent.predict_state_spec)):
            step = method(env.current_time_step(), state)
            for found, expected in ((step.output, agent.action_spec), (step.state, spec)):
                nest.assert_same_structure(expected, found)
                for s, x in zip(nest.flatten(expected), nest.flatten(found)):
                    assert (tuple(x.shape), x.dtype) == ((4, *s.shape), s.dtype)

    def test_the_states_of_the_rollout_can_be_trained_from(self, environment):
        agent, _ = make_agent(environment, use_rollout_state=True)
        agent.train_iter()
        experience, _ = agent.replay_buffer.get_batch(8, 2)
        leaves = nest.flatten(experience.state.rl)
        assert bool(leaves) == environment.startswith('recurrent')
        # the first step of an episode gets zeros, the others get the state of the previous step
        is_first = experience.time_step.is_first()
        for leaf in leaves:
            assert torch.equal(leaf.abs().sum(tuple(range(2, leaf.ndim))) > 0, ~is_first)

    def test_greedy_actions_are_the_same_each_time_and_sampled_ones_are_not(self, environment):
        agent, env = make_agent(environment, batch_size=64)
        time_step, state = env.current_time_step(), agent.get_initial_predict_state(64)
        first, second = (nest.flatten(agent.predict_step(time_step, state).output) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        state = agent.get_initial_rollout_state(64)
        first, second = (nest.flatten(agent.rollout_step(time_step, state).output) for _ in range(2))
        assert not any(torch.equal(a, b) for a, b in zip(first, second))


# Sequences -----------------------------------------------------------------------------------------------------------


def gradients(algorithm, loss_info, step_type):
    algorithm.zero_grad()
    reduce_loss(loss_info, valid_masks(step_type)).backward()
    return {name: p.grad for name, p in algorithm.named_parameters()}


def without_last_policy_step(info):
    """Set the weight of the actor's last step in ``info`` to 0, as if only the other steps trained the actor."""
    weight = torch.ones_like(info.alpha)
    weight[-1] = 0.0
    actor = info.actor if isinstance(info.actor.loss, tuple) else info.actor._replace(loss=info.actor.loss * weight)
    return info._replace(actor=actor, alpha=info.alpha * weight)


@stateless_environment
@pytest.mark.parametrize('length,train_actor_on_last_step', [(2, True), (2, False), (4, True), (4, False)])
def test_train_sequence_trains_as_train_step(environment, length, train_actor_on_last_step, monkeypatch):
    agent, _ = make_agent(environment, train_actor_on_last_step=train_actor_on_last_step, critic_loss_ctor=TDLoss,
                          initial_log_alpha=-1.0)
    algorithm = agent.policy
    steps, action = random_steps(algorithm, length, 5)
    monkeypatch.setattr(torch, 'randn', lambda shape, **kwargs: torch.full(shape, 0.3))  # same noise in all rows
    results = []
    for train_sequence in (algorithm.train_sequence, partial(Algorithm.train_sequence, algorithm)):
        step = train_sequence(steps, zeros_of(algorithm.train_state_spec, length, 5), SacInfo(action=action))
        info = step.info if train_actor_on_last_step else without_last_policy_step(step.info)
        loss_info = algorithm.calc_loss(info)
        results.append((step, loss_info.loss, gradients(algorithm, loss_info, steps.step_type)))
    (fast_step, loss, grads), (step, slow_loss, slow_grads) = results
    torch.testing.assert_close(loss, slow_loss)
    for name, gradient in slow_grads.items():
        assert (gradient is None) == ('_target_' in name), name
        if gradient is not None:
            torch.testing.assert_close(grads[name], gradient, msg=name)
    torch.testing.assert_close(fast_step.info.log_pi, step.info.log_pi)
    continuous = [leaf.is_continuous for leaf in nest.flatten(algorithm.action_spec)]
    for is_continuous, a, b in zip(continuous, nest.flatten(fast_step.output), nest.flatten(step.output)):
        assert a.shape == b.shape
        if is_continuous:
            torch.testing.assert_close(a, b)
    for a, b in zip(nest.flatten(fast_step.info.action_distribution), nest.flatten(step.info.action_distribution)):
        torch.testing.assert_close(a, b)


def test_step_by_step_the_actor_is_trained_in_due_updates_only():
    agent, _ = make_agent(train_actor_on_last_step=False, policy_update_period=2)
    algorithm = agent.policy
    steps, action = random_steps(algorithm, 2, 5)
    trained = []
    for _ in range(4):
        step = Algorithm.train_sequence(algorithm, steps, zeros_of(algorithm.train_state_spec, 2, 5),
                                        SacInfo(action=action))
        loss_info = algorithm.calc_loss(step.info)
        trained.append(isinstance(step.info.actor.loss, torch.Tensor))
        actor, = torch.autograd.grad(loss_info.loss.sum(), list(algorithm._actor_network.parameters())[:1],
                                     allow_unused=True)
        assert (actor is not None) == trained[-1]
        algorithm.after_update(steps, step.info)
    assert trained in ([True, False] * 2, [False, True] * 2)


def test_the_critics_are_not_called_for_unused_values():
    agent, _ = make_agent(train_actor_on_last_step=False)
    algorithm = agent.policy
    rows = {'_actor_network': [], '_critic_networks': [], '_target_critic_networks': []}
    for name, seen in rows.items():
        getattr(algorithm, name).register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(nest.flatten(output)[0].shape[0]))
    steps, action = random_steps(algorithm, 2, 5)
    algorithm.train_sequence(steps, algorithm.get_initial_train_state(10), SacInfo(action=action))
    assert rows == {'_actor_network': [5, 5], '_critic_networks': [5, 5], '_target_critic_networks': [5]}


@pytest.mark.parametrize('environment', ['recurrent', 'recurrent, discrete'])
def test_a_recurrent_actor_trains_on_the_last_step_only_on_request(environment):
    for train_actor_on_last_step in (True, False):
        agent, _ = make_agent(environment, train_actor_on_last_step=train_actor_on_last_step,
                              initial_log_alpha=-1.0)
        algorithm = agent.policy
        steps, action = random_steps(algorithm, 3, 5)
        infos, state = [], zeros_of(algorithm.train_state_spec, 5)
        for t in range(3):
            inputs, rollout_info = nest.map_structure(lambda x, t=t: x[t], (steps, SacInfo(action=action)))
            step = algorithm.train_step(inputs, state, rollout_info)
            state = step.state
            infos.append(step.info)
        loss = algorithm.calc_loss(nest.stack(infos)).loss
        assert bool((loss[-1] != 0).any()) == train_actor_on_last_step
        assert (loss[:-1] != 0).all()


# Arguments -----------------------------------------------------------------------------------------------------------


def make(action_spec=BOX, observation_spec=OBSERVATION, **args):
    torch.manual_seed(0)
    context.reset()
    return SacAlgorithm(observation_spec, action_spec, **args)


def test_the_documented_named_tuples_have_their_fields():
    assert SacActionState._fields == ('actor_network', 'critic')
    assert SacCriticState._fields == ('critics', 'target_critics')
    assert SacState._fields[:3] == ('action', 'actor', 'critic')
    assert SacInfo._fields == ('reward', 'step_type', 'discount', 'action', 'action_distribution', 'actor', 'critic',
                               'alpha', 'log_pi', 'discounted_return')


def test_without_critics_it_can_act_but_not_train():
    algorithm = make(critic_network_cls=None)
    steps, action = random_steps(algorithm, 2, 3)
    first = nest.map_structure(lambda x: x[0], steps)
    assert algorithm.predict_step(first, algorithm.get_initial_predict_state(3)).output.shape == (3, 2)
    with pytest.raises(RuntimeError, match='critic_network_cls=None'):
        algorithm.train_step(first, algorithm.get_initial_train_state(3), SacInfo(action=action[0]))
    with pytest.raises(RuntimeError, match='critic_network_cls=None'):
        algorithm.train_sequence(steps, algorithm.get_initial_train_state(6), SacInfo(action=action))
    with pytest.raises(ConfError, match='(?s)SacAlgorithm has no critics or value network.*set critic_network_cls'):
        algorithm.check_config(TrainerConfig(root_dir='run'))


def test_a_single_critic_is_its_own_minimum():
    algorithm = make(num_critic_replicas=1)
    steps, action = random_steps(algorithm, 2, 3)
    state = algorithm.get_initial_train_state(6)
    step = algorithm.train_sequence(steps, state, SacInfo(action=action))
    observation = steps.observation.flatten(0, 1)
    found = step.info.critic
    torch.testing.assert_close(found.critics[0], algorithm.critics((steps.observation[0], action[0]))[0])
    values = algorithm.target_critics((observation, step.output.flatten(0, 1)))[0].view(2, 3)
    torch.testing.assert_close(found.target_critic[1], values[1])


def test_each_part_may_have_its_own_optimizer():
    optimizers = {name: Adam(lr=lr) for name, lr in (('actor', 1e-3), ('critic', 2e-3), ('alpha', 3e-3))}
    agent, _ = make_agent(**{f'{name}_optimizer': optimizer for name, optimizer in optimizers.items()})
    algorithm = agent.policy
    for name, owned in (('actor', algorithm.actor.parameters()),
                        ('critic', algorithm.critics.parameters()), ('alpha', [algorithm._log_alpha])):
        assert {id(p) for p in owned} == {id(p) for g in optimizers[name].param_groups for p in g['params']}
    before = parameters(agent)
    agent.train_iter()
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters(agent)))


def test_log_alpha_is_capped():
    agent, _ = make_agent(max_log_alpha=-0.5, initial_log_alpha=0.0, target_entropy=100.0)  # the loss increases alpha
    algorithm = agent.policy
    assert algorithm._log_alpha.item() == -0.5
    agent.train_iter()
    assert algorithm._log_alpha.item() == -0.5
    agent, _ = make_agent(initial_log_alpha=0.0, target_entropy=100.0)
    agent.train_iter()
    assert agent.policy._log_alpha.item() > 0.0


def test_target_critics_move_by_tau_every_period():
    agent, _ = make_agent(target_update_tau=0.25, target_update_period=2, updates=1)
    algorithm = agent.policy
    critic, target = (next(n.parameters()) for n in (algorithm.critics, algorithm.target_critics))
    assert torch.equal(critic, target)
    before = target.clone()
    agent.train_iter()
    assert torch.equal(target, before)
    agent.train_iter()
    torch.testing.assert_close(target, before + 0.25 * (critic - before))


def test_epsilon_greedy_samples_in_evaluation():
    for epsilon, config_args in ((0.25, {}), (None, {'epsilon_greedy': 0.25})):
        agent, env = make_agent(batch_size=2000, epsilon_greedy=epsilon, config_args=config_args)
        time_step, state = env.current_time_step(), agent.get_initial_predict_state(2000)
        greedy = dist_utils.get_mode(agent.policy.actor(time_step.observation)[0])
        sampled = (agent.predict_step(time_step, state).output != greedy).float().mean()
        assert sampled.item() == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize('argument', ['reproduce_locomotion', 'random_initial_actions'])
def test_a_run_can_begin_with_uniform_actions(argument):
    agent, env = make_agent('nested action', batch_size=2000, **{argument: True})
    assert make_agent('nested action')[0]._rl_algorithm._training_started.item() is False
    time_step, state = env.current_time_step(), agent.get_initial_rollout_state(2000)
    action = agent.rollout_step(time_step, state).output
    assert action['first'].std().item() == pytest.approx(4 / 12**0.5, rel=0.05)
    assert action['second'].std().item() == pytest.approx(1 / 12**0.5, rel=0.05)
    agent.train_iter()
    torch.manual_seed(0)
    action = agent.rollout_step(time_step, state).output
    torch.manual_seed(0)
    expected = dist_utils.sample_action_distribution(agent.policy.actor(time_step.observation)[0])
    assert torch.equal(action['first'], expected['first'])


def test_locomotion_trains_actor_and_critics_on_shifted_steps():
    """Train the actor on all steps but the first, and the critics on all steps but the last."""
    agent, _ = make_agent(reproduce_locomotion=True)
    algorithm = agent.policy
    steps, action = random_steps(algorithm, 3, 5)
    steps = steps._replace(step_type=torch.full((3, 5), StepType.MID, dtype=torch.int32))
    info = algorithm.train_sequence(steps, algorithm.get_initial_train_state(15), SacInfo(action=action)).info
    loss = algorithm.calc_loss(info)
    torch.testing.assert_close(loss.loss[0], loss.extra.critic[0])
    torch.testing.assert_close(loss.loss[2], info.actor.loss[2] + info.alpha[2])
    assert (loss.extra.critic[:2] > 0).all()


def test_rollout_noise_is_correlated_within_an_episode_and_reset_after():
    torch.manual_seed(0)
    noise, not_first = torch.randn(20000, 2), torch.zeros(20000, dtype=torch.bool)
    later = next_noise(noise, 0.9, not_first)
    assert torch.corrcoef(torch.stack((noise[:, 0], later[:, 0])))[0, 1].item() == pytest.approx(0.9, abs=0.01)
    assert later.std().item() == pytest.approx(1.0, abs=0.02)
    fresh = next_noise(noise, 0.9, ~not_first)
    assert torch.corrcoef(torch.stack((noise[:, 0], fresh[:, 0])))[0, 1].abs().item() < 0.03


def test_correlated_actions_have_the_distribution_of_the_policy():
    agent, env = make_agent('nested action', batch_size=4000, rollout_noise_correlation=0.95, use_rollout_state=True)
    time_step, state = env.current_time_step(), agent.get_initial_rollout_state(4000)
    first = agent.rollout_step(time_step, state)
    second = agent.rollout_step(time_step._replace(step_type=torch.ones_like(time_step.step_type)), first.state)
    distribution = agent.policy.actor(time_step.observation)[0]
    expected = dist_utils.sample_action_distribution(distribution)
    for key in ('first', 'second'):
        a, b = first.output[key], second.output[key]
        assert b.std().item() == pytest.approx(expected[key].std().item(), rel=0.05)
        assert torch.corrcoef(torch.stack((a[:, 0], b[:, 0])))[0, 1].item() > 0.9
    agent.train_iter()


def test_held_noise_repeats_actions_and_keeps_their_distribution():
    agent, env = make_agent(batch_size=4000, rollout_noise_repeat=ZetaRepeat())
    time_step, state = env.current_time_step(), agent.get_initial_rollout_state(4000)
    first = agent.rollout_step(time_step, state)
    second = agent.rollout_step(time_step, first.state)
    is_held = nest.get_field(first.state, 'rl.noise.steps_left') > 0
    assert torch.equal(second.output[is_held], first.output[is_held]) and is_held.any()
    assert not (second.output[~is_held] == first.output[~is_held]).any()
    expected = dist_utils.sample_action_distribution(agent.policy.actor(time_step.observation)[0])
    for output in (first.output, second.output):
        assert output.std().item() == pytest.approx(expected.std().item(), rel=0.05)
    agent.train_iter()


def test_summarizing_action_distributions_keeps_them():
    agent, env = make_agent('mixed', config_args=dict(summarize_action_distributions=True))
    info = agent.rollout_step(env.current_time_step(), agent.get_initial_rollout_state(4)).info.rl
    assert set(info.action_distribution) == {'discrete', 'continuous'}
    agent, env = make_agent('mixed')
    info = agent.rollout_step(env.current_time_step(), agent.get_initial_rollout_state(4)).info.rl
    assert info.action_distribution == ()


def test_discounted_returns_of_the_replay_buffer_reach_the_loss():
    seen = []

    class Recording(TDLoss):

        def forward(self, info, value, target_value):
            seen.append(info.discounted_return)
            return super().forward(info, value, target_value)

    algorithm = make(critic_loss_ctor=Recording)
    steps, action = random_steps(algorithm, 2, 3)
    returns = torch.arange(6.0).reshape(3, 2)
    batch_major = nest.map_structure(lambda x: x.transpose(0, 1), SacInfo(action=action))
    _, info = algorithm.preprocess_experience(steps, batch_major, BatchInfo(discounted_return=returns))
    info = nest.map_structure(lambda x: x.transpose(0, 1), info)
    algorithm.calc_loss(algorithm.train_sequence(steps, algorithm.get_initial_train_state(6), info).info)
    # two critics see every sample
    assert torch.equal(seen[0], torch.cat((returns.T, returns.T), 1))


# Invalid settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('action_spec,message', [
    ((CHOICE, CHOICE), 'a single discrete action'),
    (BoundedTensorSpec((2, ), torch.int64, 0, 3), r'of shape \(\)'),
    ((CHOICE, BOX, BOX), 'two: one discrete action'),
    ({'a': CHOICE, 'b': BOX, 'c': BOX}, 'two: one discrete action'),
    ((BoundedTensorSpec((2, ), torch.int64, 0, 3), BOX), r'of shape \(\)'),
])
def test_actions_of_another_kind_are_rejected(action_spec, message):
    with pytest.raises(SpecError, match=message):
        make(action_spec)


@pytest.mark.parametrize('args,message', [
    (dict(num_critic_replicas=0), 'num_critic_replicas'),
    (dict(rollout_noise_correlation=1.0), 'rollout_noise_correlation'),
    (dict(action_spec=CHOICE, rollout_noise_correlation=0.5), 'rollout_noise_correlation'),
    (dict(action_spec=CHOICE, rollout_noise_repeat=ZetaRepeat()), 'rollout_noise_repeat needs continuous'),
    (dict(rollout_noise_repeat=ZetaRepeat(), rollout_noise_correlation=0.5), 'cannot be used together'),
    (dict(action_spec=CHOICE, prior_actor_ctor=UniformPriorActor), 'prior_actor_ctor needs continuous'),
    (dict(prior_actor_ctor=UniformPriorActor, target_entropy=-1.0), 'target_kld_per_dim'),
    (dict(reproduce_locomotion=True, train_actor_on_last_step=False), 'train_actor_on_last_step'),
    (dict(action_spec=TensorSpec((2, )), random_initial_actions=True, target_entropy=-2.0), 'action with bounds'),
    (dict(target_entropy=(-1.0, -2.0)), 'mixed'),
    (dict(action_spec=CHOICE, q_network_cls=None), 'q_network_cls'),
    (dict(actor_network_cls=None), 'continuous actions needs actor_network_cls'),
    (dict(critic_network_cls=partial(CriticNetwork, output_tensor_spec=TensorSpec((5, )))), 'shape'),
    (dict(action_spec=CHOICE, q_network_cls=partial(QNetwork, num_atoms=5)), 'shape'),
])
def test_invalid_arguments_are_rejected(args, message):
    with pytest.raises(ValueError, match=message):
        make(**args)


def test_correlated_noise_needs_a_normal_policy():
    from alfx.networks.projection_networks import BetaProjectionNetwork
    with pytest.raises(ValueError, match='rollout_noise_correlation'):
        make(rollout_noise_correlation=0.5, actor_network_cls=partial(
            ActorDistributionNetwork, continuous_projection_net_ctor=BetaProjectionNetwork))


# Parts of actions and target entropies -------------------------------------------------------------------------------


@pytest.mark.parametrize('spec', [(CHOICE, {'x': BOX, 'y': BOX}), ({'x': BOX, 'y': BOX}, CHOICE), [CHOICE, BOX],
                                  {'move': BOX, 'button': CHOICE}])
def test_a_mixed_action_is_split_and_joined(spec):
    parts = ActionParts(spec)
    assert parts.type == ActionType.Mixed and parts.discrete == CHOICE
    action = nest.map_structure(lambda s: torch.zeros(2, *s.shape), spec)
    discrete, continuous = parts.split(action)
    assert discrete.shape == (2, )
    joined = parts.join(discrete, continuous)
    nest.assert_same_structure(spec, joined)
    assert all(a is b for a, b in zip(nest.flatten(action), nest.flatten(joined)))


def test_a_discrete_action_may_start_anywhere():
    spec = BoundedTensorSpec((), torch.int32, 3, 5)
    assert ActionParts(spec).index(torch.tensor([3, 5, 4])).tolist() == [0, 2, 1]


def test_target_entropies_are_summed_over_components_and_actions():
    wide = BoundedTensorSpec((3, ), torch.float32, -2, 2)
    log = torch.log
    default = [2 * log(torch.tensor(0.2)) + 3 * log(torch.tensor(0.4))]  # a tenth of the range of each component
    assert target_entropies(ActionParts({'a': BOX, 'b': wide}), None) == pytest.approx([x.item() for x in default])
    assert target_entropies(ActionParts({'a': BOX, 'b': wide}), lambda spec: -spec.numel) == [-5.0]
    assert target_entropies(ActionParts(wide), -7) == [-7.0]
    mixed = ActionParts((CHOICE, wide))
    assert target_entropies(mixed, (0.5, lambda spec: -spec.numel)) == [0.5, -3.0]
    by_default = target_entropies(mixed, None)
    # 3 values: 0.1 * log(2 / 0.1) - 0.9 * log(0.9)
    assert by_default == pytest.approx([0.3943977, 3 * -0.9162907], abs=1e-5)
    with pytest.raises(ValueError, match='discrete, continuous'):
        target_entropies(mixed, (1.0, 2.0, 3.0))


def test_a_prior_sets_the_target_by_the_number_of_dimensions():
    algorithm = make({'a': BOX, 'b': BOX}, prior_actor_ctor=SameActionPriorActor, target_kld_per_dim=0.5,
                     actor_network_cls=networks('nested action', FakeEnv())['actor_network_cls'],
                     critic_network_cls=networks('nested action', FakeEnv())['critic_network_cls'])
    assert algorithm._target_entropy.item() == -2.0


class FakeEnv:

    def observation_spec(self):
        return OBSERVATION


# Learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('environment', ['continuous', 'discrete', 'mixed', 'vector reward', 'nested action'])
def test_it_learns_a_one_step_task(environment):
    weights = [1.0, 0.0, 0.0] if environment == 'vector reward' else None
    target_entropy = {'mixed': (0.05, -2.0), 'discrete': 0.05, 'nested action': -4.0}.get(environment, -2.0)
    agent, env = make_agent(environment, batch_size=20, mini_batch_size=64, hidden=(64, 64), updates=4, unroll_length=4,
                            optimizer=Adam(lr=3e-3), initial_log_alpha=-2.0, reward_weights=weights,
                            target_update_tau=0.1, train_actor_on_last_step=False, target_entropy=target_entropy,
                            critic_loss_ctor=partial(OneStepTDLoss, gamma=0.0))
    evaluation_env = copy.deepcopy(env)

    def mean_reward():
        rewards, state = [], agent.get_initial_predict_state(20)
        with torch.no_grad():
            for _ in range(20):
                time_step = evaluation_env.step(agent.predict_step(evaluation_env.current_time_step(), state).output)
                reward = time_step.reward if time_step.reward.ndim == 1 else time_step.reward[:, 0]
                rewards.append(reward[time_step.step_type != StepType.FIRST])
        return torch.cat(rewards).mean()

    assert trains_until(lambda: mean_reward() > 0.9, agent.train_iter, 200)


def test_discrete_actions_need_neither_actor_nor_critic_class():
    agent = SacAlgorithm(TensorSpec((3, )), CHOICE, actor_network_cls=None, critic_network_cls=None)
    assert agent._actor_network is None and agent._critic_networks is not None
