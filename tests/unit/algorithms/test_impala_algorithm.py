"""IMPALA: stored and recomputed fields, and corrections for steps of older policies."""
from functools import partial

import pytest
import torch
from helpers.agents import ALGORITHMS, ENVIRONMENTS, make_agent
from helpers.plans import num_graphs
from helpers.stale_unrolls import StaleUnrolls

from alfx import context, nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.encoding_algorithm import EncodingAlgorithm
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.algorithms.impala_algorithm import ImpalaAlgorithm
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.algorithms.trac_algorithm import TracAlgorithm
from alfx.algorithms.vtrace_loss import VTraceLoss
from alfx.data_structures import StepType, reset_at_first
from alfx.gin_utils import ConfError
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.utils import dist_utils


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


def losses_seen(agent, monkeypatch):
    """Record the infos passed to the loss and the losses it returns."""
    seen = []
    loss = agent.policy._loss
    original = type(loss).forward

    def forward(self, info):
        seen.append((info, original(self, info)))
        return seen[-1][1]

    monkeypatch.setattr(type(loss), 'forward', forward)
    return seen


def one_update(agent):
    agent._config.num_updates_per_train_iter = 1
    return agent


# Training data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('length, batch_size', [(None, None), (6, 2), (3, 8), (2, 3), (1, 4)])
def test_every_transition_is_trained_on_once(length, batch_size, monkeypatch):
    """Train once on every transition of an unroll, including the bootstrap step."""
    agent, _ = make_agent('impala', 'discrete', mini_batch_length=length, mini_batch_size=batch_size)
    seen = losses_seen(one_update(agent), monkeypatch)
    collected = []
    collect = agent.learner.collect
    monkeypatch.setattr(agent.learner, 'collect', lambda due: collected.append(collect(due)) or collected[-1])
    counted = [agent.train_iter() for _ in range(2)]
    assert counted == [24, 24]
    sequences = 4 * 6 // (length or 6)
    assert len(seen) == 2 * -(-sequences // (batch_size or 4))
    rewards = torch.cat([x.time_step.reward[1:].flatten() for x in collected])
    trained = torch.cat([info.reward[1:].flatten() for info, _ in seen])
    assert all(info.reward.shape[0] == (length or 6) + 1 for info, _ in seen)
    assert torch.equal(rewards.sort().values, trained.sort().values)


def test_the_step_after_a_sequence_is_only_bootstrapped_from(monkeypatch):
    agent, _ = make_agent('impala', 'discrete', mini_batch_length=2, mini_batch_size=None)
    agent.unroll(6)
    seen = losses_seen(one_update(agent), monkeypatch)
    reduced = []
    losses = agent.learner.losses.collected

    def record(experience):
        loss_info, masks, train_info = losses(experience)
        reduced.append((loss_info.loss, masks))
        return loss_info, masks, train_info

    monkeypatch.setattr(agent.learner.losses, 'collected', record)
    agent.train_from_replay_buffer()
    for (info, loss_info), (loss, masks) in zip(seen, reduced):
        assert torch.equal(loss, loss_info.loss[:2]) and loss.shape == (2, 4)
        assert torch.equal(masks, (info.step_type[:2] != StepType.LAST).float())
        value, discount = info.value.detach(), 0.99 * info.discount
        log_prob = info.action_distribution.log_prob(info.action).detach()
        rho = (log_prob - info.rollout_log_prob).exp().clamp(max=1)
        final = value[1] + rho[1] * (info.reward[2] + discount[2] * value[2] - value[1])
        is_last = info.step_type[1] == StepType.LAST
        torch.testing.assert_close(loss_info.extra.td_loss[1],
                                   torch.where(is_last, 0., (final - value[1])**2))


def test_a_second_epoch_recomputes_values_and_ratios(monkeypatch):
    agent, _ = make_agent('impala', 'discrete', mini_batch_size=None)
    seen = losses_seen(agent, monkeypatch)
    agent.train_iter()
    (first, _), (second, _) = seen
    torch.testing.assert_close(first.rollout_log_prob[:-1],
                               first.action_distribution.log_prob(first.action).detach()[:-1])
    now = second.action_distribution.log_prob(second.action).detach()
    assert torch.equal(second.rollout_log_prob, first.rollout_log_prob), 'as stored'
    assert (now - second.rollout_log_prob).abs().max() > 1e-4
    assert not torch.equal(first.value, second.value)


def test_it_also_samples_older_unrolls_from_the_replay_buffer(monkeypatch):
    agent, _ = make_agent('impala', 'discrete', mini_batch_length=4, mini_batch_size=8, config_args=dict(
        whole_replay_buffer_training=False, clear_replay_buffer=False, replay_buffer_length=32))
    seen = losses_seen(agent, monkeypatch)
    before = parameters(agent)
    assert [agent.train_iter() for _ in range(3)] == [2 * 3 * 8] * 3
    assert all(info.reward.shape == (4, 8) for info, _ in seen)
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters(agent)))


def test_a_buffer_that_is_not_cleared_has_overlapping_sequences_too():
    agent, _ = make_agent('impala', 'discrete', mini_batch_length=2, mini_batch_size=None,
                          config_args=dict(clear_replay_buffer=False, replay_buffer_length=32))
    # 6 steps are 5 transitions, 4 of which make two sequences; then 12 steps, 11 and 10 of them
    assert [one_update(agent).train_iter() for _ in range(2)] == [4 * 4, 10 * 4]


# Age of the policy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('environment', list(ENVIRONMENTS))
def test_the_ratio_compares_current_and_stored_probabilities(environment, monkeypatch):
    agent, _ = make_agent('impala', environment, mini_batch_size=None)
    experience = agent.unroll(6)
    stored = experience.rollout_info.rl
    acted = dist_utils.compute_log_probability(stored.action_distribution, stored.action)
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.1 * torch.randn_like(p))
    seen = losses_seen(one_update(agent), monkeypatch)
    agent.train_from_replay_buffer()
    (info, _), = seen
    torch.testing.assert_close(info.rollout_log_prob, acted)
    now = dist_utils.compute_log_probability(info.action_distribution, info.action)
    assert (now - info.rollout_log_prob).abs().max() > 1e-3
    assert info.value.requires_grad and not info.rollout_log_prob.requires_grad


def test_unrolls_of_a_policy_of_ten_iterations_ago_are_learned_from():
    learner, env = make_agent('impala', 'discrete', batch_size=16, unroll_length=10, mini_batch_size=None)
    actor, _ = make_agent('impala', 'discrete', batch_size=16, unroll_length=10, seed=1)
    source = StaleUnrolls(actor)
    learner.learner.collector.use_source(source, 10)
    assert not learner.on_policy
    for _ in range(200):
        learner.train_iter()
    assert source.num_updates == 20
    time_step, total = env.reset(), torch.zeros(16)
    with torch.no_grad(), context.eval_context():
        for _ in range(4):
            time_step = env.step(learner.predict_step(time_step, learner.get_initial_predict_state(16)).output)
            total += time_step.reward
    assert total.mean() == 4.0, 'the signal is followed at each of the four steps'


@pytest.mark.parametrize('environment', ['discrete', 'continuous', 'vector reward', 'recurrent'])
def test_on_policy_with_one_update_it_is_actor_critic_with_lambda_returns(environment, monkeypatch, with_capabilities):
    common = dict(td_lambda=0.8, td_loss_weight=0.5, entropy_regularization=0.01)
    monkeypatch.setitem(ALGORITHMS, 'impala', partial(ImpalaAlgorithm, loss_class=partial(VTraceLoss, **common)))
    monkeypatch.setitem(ALGORITHMS, 'actor-critic', partial(
        ActorCriticAlgorithm, loss_class=partial(ActorCriticLoss, use_gae=True, **common)))
    if environment == 'recurrent':  # the actor-critic takes the bootstrap step and draws a number for it
        with_capabilities(ImpalaAlgorithm, recomputes_rollout_info=False)
    results = []
    for algorithm in ('actor-critic', 'impala'):
        agent, _ = make_agent(algorithm, environment, seed=4, mini_batch_size=None, learning_rate=1e-3)
        for _ in range(3):
            one_update(agent).train_iter()
        results.append(parameters(agent))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# Recurrent networks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('length', [None, 2])
def test_a_recurrent_policy_is_recomputed_from_the_state_it_acted_from(length, monkeypatch):
    agent, env = make_agent('impala', 'recurrent', mini_batch_length=length, mini_batch_size=None)
    agent.unroll(6)  # the next unroll starts in the middle of an episode of 5 steps
    agent.replay_buffer.clear()
    start = nest.map_structure(torch.clone, agent.learner.collector.position.state)
    experience = agent.unroll(6)
    assert any(x.abs().max() > 0 for x in nest.flatten(start))
    seen = losses_seen(one_update(agent), monkeypatch)
    agent._config.mini_batch_size = 100  # all sequences in one update
    for optimizer in agent.optimizers():
        monkeypatch.setattr(optimizer, 'step', lambda: None)
    agent.train_from_replay_buffer()
    (info, _), = seen
    torch.testing.assert_close(info.action_distribution.log_prob(info.action)[:-1], info.rollout_log_prob[:-1])
    rl, state, initial = agent.policy, start.rl, agent.get_initial_train_state(4).rl
    values = []
    with torch.no_grad():
        for t in range(7):
            time_step = nest.map_structure(lambda x, t=t: x[t], experience.time_step)
            state = reset_at_first(state, initial, time_step)
            value, value_state = rl._value_network(time_step.observation, state=state.value)
            _, actor_state = rl.actor(time_step.observation, state=state.actor)
            state = state._replace(actor=actor_state, value=value_state)
            values.append(value)
    values = torch.stack(values)
    if length == 2:
        values = torch.cat([values[:3], values[2:5], values[4:]], 1)
    torch.testing.assert_close(info.value.detach(), values)


def test_a_recurrent_policy_without_rollout_states_is_rejected_by_name():
    with pytest.raises(ConfError, match='use_rollout_state = False is not supported by ImpalaAlgorithm: its '
                                        'networks are recurrent'):
        make_agent('impala', 'recurrent', use_rollout_state=False)


# Parts and settings -------------------------------------------------------------------------------------------------


ENCODER = partial(EncodingNetwork, fc_layer_params=(8, ))
PARTS = {
    'entropy target': dict(enforce_entropy_target=True),
    'rnd': dict(intrinsic_reward_module=partial(RNDAlgorithm, ENCODER, ENCODER)),
    'icm': dict(intrinsic_reward_module=partial(ICMAlgorithm, hidden_size=8)),
    'representation': dict(representation_learner_cls=partial(EncodingAlgorithm, encoder_cls=ENCODER)),
}


@pytest.mark.parametrize('name', list(PARTS))
def test_it_trains_with_the_parts_of_an_agent(name):
    agent, _ = make_agent('impala', 'discrete', mini_batch_size=None, **PARTS[name])
    assert agent.capabilities.bootstraps_sequences
    before = {n: p.clone() for n, p in agent.named_parameters()}
    for _ in range(3):
        assert agent.train_iter() == 2 * 24
    same = {n.partition('._layers')[0] for n, p in agent.named_parameters() if torch.equal(p, before[n])}
    assert same == ({'_irm._target_net'} if name == 'rnd' else set())
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_trac_can_wrap_impala():
    agent, _ = make_agent('impala', 'discrete', mini_batch_size=None,
                          rl_algorithm_cls=partial(TracAlgorithm, ac_algorithm_cls=ImpalaAlgorithm))
    assert agent.capabilities.bootstraps_sequences and not agent.on_policy
    before = parameters(agent)
    assert agent.train_iter() == 48
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters(agent)))


def test_a_loss_that_does_not_correct_for_age_is_rejected_by_name():
    env = ENVIRONMENTS['discrete'](batch_size=1)
    with pytest.raises(ValueError, match='expected a VTraceLoss, .* found ActorCriticLoss'):
        ImpalaAlgorithm(env.observation_spec(), env.action_spec(), loss_class=ActorCriticLoss)


@pytest.mark.parametrize('settings, message', [
    (dict(whole_replay_buffer_training=False, mini_batch_length=1), 'mini_batch_length = 1 is not supported by'),
    (dict(whole_replay_buffer_training=False, mini_batch_length=2, priority_replay=True),
     'priority_replay = True is not supported by'),
])
def test_settings_that_nothing_could_be_learned_with_are_rejected_by_name(settings, message):
    agent, _ = make_agent('impala', 'discrete')
    config = TrainerConfig(root_dir='', algorithm_ctor=ImpalaAlgorithm, **settings)
    with pytest.raises(ConfError, match=message):
        agent.policy.check_config(config)


@pytest.mark.parametrize('environment', ['discrete', 'recurrent', 'vector reward'])
def test_replayed_updates_match_eager_ones_bit_for_bit(environment, warm_up):
    results = []
    for played in (False, True):
        warm_up(2 if played else 10**6)
        agent, _ = make_agent('impala', environment, mini_batch_size=None)
        for _ in range(5):
            agent.train_iter()
        assert bool(num_graphs(agent)) == played
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))
