"""CrossQ: soft actor-critic with batch norm, joint batches, no target critics and a delayed policy."""
from functools import partial
from unittest import mock

import pytest
import torch
from helpers.deterministic_agents import make_agent as make_deterministic_agent
from helpers.dqn_agents import assert_same_parameters, train
from helpers.plans import num_graphs, warnings_in
from helpers.sac_agents import ENVIRONMENTS, make_agent, networks, random_steps, squashed_normal

from alfx import context, norm_layers
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.base.exploration_noise import ZetaRepeat
from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.ddpg_algorithm import DdpgInfo
from alfx.algorithms.oac_algorithm import OacAlgorithm
from alfx.algorithms.qrsac_algorithm import QrsacAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm, SacInfo
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.data_structures import StepType
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.norm_layers import BatchNorm

NORMS = dict(norm=partial(BatchNorm, renorm=True, warm_up=20), norm_position='after', input_norm=BatchNorm)
ACTOR = partial(ActorDistributionNetwork, fc_layer_params=(16, ), continuous_projection_net_ctor=squashed_normal)
CRITIC = partial(CriticNetwork, joint_fc_layer_params=(16, 16))
CROSSQ = dict(actor_network_cls=partial(ACTOR, **NORMS), critic_network_cls=partial(CRITIC, **NORMS),
              critic_batches='joint', use_target_critics=False, policy_update_period=3, train_actor_on_last_step=False)


def make_algorithm(**args):
    env = ENVIRONMENTS['continuous'](batch_size=1)
    torch.manual_seed(0)
    return SacAlgorithm(env.observation_spec(), env.action_spec(), **{**CROSSQ, **args})


def batch_of(algorithm, size=16):
    steps, action = random_steps(algorithm, 2, size)
    return steps, SacInfo(action=action)


def critic_info(algorithm, steps, info):
    torch.manual_seed(1)
    return algorithm.train_sequence(steps, algorithm.get_initial_train_state(16), info).info.critic


def buffers(module):
    return [x.clone() for x in module.buffers()]


VARIANTS = {
    'crossq': {}, 'with targets': dict(use_target_critics=True), 'separate': dict(critic_batches='separate'),
    'policy at all steps': dict(train_actor_on_last_step=True), 'every update': dict(policy_update_period=1),
    'plain actor': dict(actor_network_cls=ACTOR), 'plain critics': dict(critic_network_cls=CRITIC),
    'three steps': dict(mini_batch_length=3), 'oac': dict(algorithm_cls=OacAlgorithm),
    'quantiles': dict(algorithm_cls=QrsacAlgorithm), 'random at first': dict(random_initial_actions=True)}


@pytest.mark.parametrize('variant', list(VARIANTS))
def test_replayed_updates_match_eager_ones_bit_for_bit(variant, warm_up, caplog):
    changes, agents = VARIANTS[variant], []
    for count in (1, 10**9):
        warm_up(count)
        agents.append(make_agent(**{**CROSSQ, **changes})[0])
        train(agents[-1:], 150 if variant == 'crossq' else 20)  # two updates each
    keys = 1 if changes.get('policy_update_period') == 1 else 2
    assert num_graphs(agents[0]) == keys and not num_graphs(agents[1]) and not warnings_in(caplog)
    assert_same_parameters(agents, atol=0.0, rtol=0.0)
    assert all(map(torch.equal, agents[0].buffers(), agents[1].buffers()))


@pytest.mark.compiles
def test_compiled_updates_match_eager_ones_up_to_rounding(never_replayed, caplog):
    crossq = {**CROSSQ, 'policy_update_period': 1}  # a single graph
    agents = [make_agent(**crossq, config_args=dict(compile=on))[0] for on in (False, True)]
    train(agents, 4)
    assert num_graphs(agents[1]) == 1 and not warnings_in(caplog)
    assert_same_parameters(agents, atol=1e-3, rtol=1e-3)


def test_joint_batches_differ_from_separate_ones_only_in_the_statistics():
    joint, apart = make_algorithm(), make_algorithm(critic_batches='separate')
    apart.load_state_dict(joint.state_dict())
    found = []
    for algorithm in (joint, apart):
        for make_context in (norm_layers.running_statistics, context.replay_context):
            with make_context():
                found.append(critic_info(algorithm, *batch_of(joint)))
    for of_joint, of_apart in zip(found[0], found[2]):
        torch.testing.assert_close(of_joint, of_apart)
    assert not torch.allclose(found[1].critics, found[3].critics, atol=1e-3)


@pytest.mark.parametrize('has_targets', [False, True])
def test_joint_values_equal_one_call_for_both_rows(has_targets):
    algorithm = make_algorithm(use_target_critics=has_targets)
    steps, info = batch_of(algorithm)
    steps = steps._replace(step_type=torch.ones_like(steps.step_type))
    critics = algorithm._critic_networks
    targets = critics if not has_targets else algorithm._target_critic_networks
    torch.manual_seed(1)
    with torch.no_grad(), norm_layers.running_statistics():
        rows = Rows((steps._replace(observation=steps.observation[1]), info))
        later = algorithm.policy_terms(rows, algorithm.get_initial_train_state(16))[0].action
    both = steps.observation.flatten(0, 1), torch.cat((info.action[0], later))
    expected = critics(both)[0][:16], targets(both)[0][16:].min(1).values
    found = critic_info(algorithm, steps, info)  # the first update trains no policy, and draws no other numbers
    torch.testing.assert_close(found.critics[0], expected[0])
    torch.testing.assert_close(found.target_critic[1], expected[1])
    assert not found.target_critic.requires_grad


def test_joint_batches_of_td3_differ_from_apart_ones_by_statistics_only():
    env, found = ENVIRONMENTS['continuous'](batch_size=1), []
    args = dict(actor_network_ctor=partial(ActorNetwork, fc_layer_params=(16, ), **NORMS), target_noise=0.0,
                critic_network_ctor=partial(CRITIC, **NORMS))
    joint, apart = (Td3Algorithm(env.observation_spec(), env.action_spec(), critic_batches=how, **args)
                    for how in ('joint', 'separate'))
    apart.load_state_dict(joint.state_dict())
    steps, action = random_steps(joint, 2, 16)
    for algorithm in (joint, apart):
        for make_context in (norm_layers.running_statistics, context.replay_context):
            with make_context():
                found.append(algorithm.train_sequence(steps, algorithm.train_state_spec, DdpgInfo(action=action))
                             .info.critic)
    torch.testing.assert_close(found[0], found[2])
    assert not torch.allclose(found[1].q_values, found[3].q_values, atol=1e-3)
    for algorithm, batches in ((joint, [32, 32]), (apart, [16, 16])):
        seen = []
        for critics in (algorithm.critics, algorithm.target_critics):
            critics.register_forward_hook(lambda module, args, output, seen=seen: seen.append(len(output[0])))
        algorithm.train_sequence(steps, algorithm.train_state_spec, DdpgInfo(action=action))
        assert seen == batches


def test_without_target_critics_there_are_no_parameters_of_them():
    algorithm, usual = make_algorithm(), make_algorithm(use_target_critics=True)
    assert algorithm.target_critics is None
    names = {name for name, _ in usual.named_parameters()} - {name for name, _ in algorithm.named_parameters()}
    assert names and all(name.startswith('_target_critic_networks.') for name in names)


def test_actor_and_alpha_are_trained_in_every_third_update_only():
    agent, _ = make_agent(**CROSSQ, updates=1)
    rl = agent.policy_algorithm
    for update in range(1, 7):
        before = [x.detach().clone() for x in (*rl.actor.parameters(), rl._log_alpha)]
        critics = [x.detach().clone() for x in rl.critics.parameters()]
        agent.train_iter()
        is_same = [torch.equal(a, b) for a, b in zip(before, (*rl.actor.parameters(), rl._log_alpha))]
        assert not any(is_same) if update % 3 == 0 else all(is_same)
        assert not all(map(torch.equal, critics, rl.critics.parameters()))


def test_losses_of_the_policy_are_logged_even_by_updates_without_them():
    algorithm = make_algorithm(policy_update_period=2)
    steps, info = batch_of(algorithm)
    steps = steps._replace(step_type=torch.ones_like(steps.step_type))
    infos = []
    for _ in range(3):
        infos.append(algorithm.train_sequence(steps, algorithm.get_initial_train_state(16), info).info)
        algorithm.after_update(steps, infos[-1])
    assert infos[0].alpha == () and infos[0].actor.loss == () and infos[2].alpha == ()
    assert infos[0].action_distribution == () and infos[1].action_distribution.batch_shape == (2, 16)
    context.set_summary_writer(mock.MagicMock())
    with context.record_if(True):
        assert not any(algorithm.calc_loss(infos[0]).extra.actor)  # there have been none yet
        algorithm.calc_loss(infos[1])
        shown = algorithm.calc_loss(infos[2]).extra
    trained = infos[1]
    for found, expected in ((shown.actor.actor_loss, trained.actor.loss), (shown.alpha, trained.alpha),
                            (shown.actor.neg_entropy, trained.log_pi)):
        torch.testing.assert_close(found, expected.detach().mean())


def test_a_resumed_run_trains_the_policy_at_the_same_updates():
    first = make_algorithm()
    first._updates.add(2)
    resumed = make_algorithm()
    resumed.load_state_dict(first.state_dict())
    assert resumed.graph_key and not make_algorithm().graph_key


@pytest.mark.parametrize('period', [1, 3])
def test_transitions_from_last_steps_do_not_count_in_the_statistics(period):
    algorithm = make_algorithm(policy_update_period=period)
    steps, info = batch_of(algorithm)
    steps = steps._replace(step_type=torch.where(torch.arange(16) < 4, StepType.LAST, StepType.MID).expand(2, 16))
    initial, found = buffers(algorithm), []
    for junk in (0.0, 1e4):
        for x, old in zip(algorithm.buffers(), initial):
            x.copy_(old)
        observation = steps.observation.clone()
        observation[:, :4] = junk
        with context.replay_context():
            critic = critic_info(algorithm, steps._replace(observation=observation), info)
        found.append([critic.critics[0, 4:], critic.target_critic[1, 4:], *buffers(algorithm)])
    torch.testing.assert_close(*found)


def test_acting_uses_running_statistics_and_leaves_them():
    agent, _ = make_agent(**CROSSQ)
    train([agent], 3)
    rl, before = agent.policy_algorithm, buffers(agent.policy_algorithm)
    observation = batch_of(rl, size=64)[0].observation[0]
    with context.eval_context(), torch.no_grad():
        many, single = (rl.actor(x)[0].base_dist.loc for x in (observation, observation[:1]))
    torch.testing.assert_close(many[:1], single)
    assert all(map(torch.equal, rl.buffers(), before))


@pytest.mark.parametrize('environment, args, message', [
    ('continuous', dict(critic_batches='both'), "critic_batches: expected 'separate' or 'joint', found 'both'"),
    ('discrete', dict(critic_batches='joint'), "critic_batches = 'joint' needs continuous actions, found a discrete"),
    ('mixed', dict(use_target_critics=False), 'use_target_critics = False needs continuous actions, found a mixed'),
    ('discrete', dict(policy_update_period=2), 'policy_update_period = 2 needs continuous actions'),
    ('recurrent', dict(critic_batches='joint'), "critic_batches = 'joint' is not supported with recurrent networks"),
    ('recurrent', dict(policy_update_period=2), 'policy_update_period = 2 is not supported with recurrent networks')])
def test_unsupported_arguments_are_rejected_by_name(environment, args, message):
    env = ENVIRONMENTS[environment](batch_size=1)
    with pytest.raises(ValueError, match=message):
        SacAlgorithm(env.observation_spec(), env.action_spec(), **networks(environment, env), **args)


def test_joint_batches_without_batch_norm_are_warned_about(caplog):
    make_algorithm(critic_network_cls=CRITIC)
    assert 'has no effect on the values of critics without BatchNorm' in caplog.text
    caplog.clear()
    make_algorithm()
    assert not caplog.text


def test_on_policy_training_rejects_batch_norm():
    env = ENVIRONMENTS['continuous'](batch_size=1)
    with pytest.raises(ValueError, match='on-policy training does not support them'):
        ActorCriticAlgorithm(env.observation_spec(), env.action_spec(), actor_network_ctor=partial(ACTOR, **NORMS))


@pytest.mark.parametrize('args', [{}, dict(critic_batches='joint'), dict(
    critic_batches='joint', use_target_critics=False, rollout_noise_repeat=ZetaRepeat())])
def test_td3_with_batch_norm_is_replayed_bit_for_bit(args, warm_up, caplog):
    agents = []
    networks_of_td3 = dict(actor_network_ctor=partial(ActorNetwork, fc_layer_params=(16, ), **NORMS),
                           critic_network_ctor=partial(CRITIC, **NORMS))
    for count in (1, 10**9):
        warm_up(count)
        agents.append(make_deterministic_agent(Td3Algorithm, **networks_of_td3, **args)[0])
        train(agents[-1:], 30)
    assert (agents[0].policy_algorithm.target_critics is None) == ('use_target_critics' in args)
    assert num_graphs(agents[0]) == 2 and not warnings_in(caplog)
    assert_same_parameters(agents, atol=0.0, rtol=0.0)
