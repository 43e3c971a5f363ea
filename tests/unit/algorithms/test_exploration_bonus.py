"""Exploration bonuses in agents: the state between unrolls, and invalid settings."""
from functools import partial

import pytest
import torch
from helpers import agents, sac_agents
from helpers.plans import num_graphs

from alfx import nest
from alfx.algorithms.data_transformer import DataTransformer
from alfx.algorithms.exploration.bonus import ExplorationBonus
from alfx.algorithms.exploration.factors import (Disagreement, EllipticalNovelty, EpisodicCount, Impact,
                                                 LifelongNovelty, NearestNeighbors, NoveltyGain, ParticleEntropy)
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.algorithms.intrinsic.intrinsic_reward import IntrinsicRewardAlgorithm
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.data_structures import AlgStep, LossInfo, TimeStep
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.gin_utils import ConfError
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import TensorSpec
from alfx.trainers.conf_check import memory_lines

COUNT = partial(EpisodicCount, resolution=0.5)
NETWORK = partial(EncodingNetwork, fc_layer_params=(8, ))
INVERSE = partial(ICMAlgorithm, encoding_net=NETWORK, hidden_size=8, reward_adapt_speed=None)
ERROR = partial(RNDAlgorithm, NETWORK, NETWORK, keep_stacked_frames=0, observation_adapt_speed=8.0)
BONUSES = {
    'count': partial(ExplorationBonus, factors=(COUNT, )),
    'e3b': partial(ExplorationBonus, factors=(EllipticalNovelty, ), inverse_model=INVERSE, normalization='std'),
    'noveld': partial(ExplorationBonus, factors=(NoveltyGain, COUNT), error_model=ERROR, normalization='return_std'),
    'ride': partial(ExplorationBonus, factors=(Impact, partial(COUNT, decay='inverse_sqrt')), inverse_model=INVERSE,
                    normalization='standard'),
    'ngu': partial(ExplorationBonus, factors=(NearestNeighbors, LifelongNovelty), inverse_model=INVERSE,
                   error_model=ERROR, normalization='std'),
    'disagreement': partial(ExplorationBonus, factors=(Disagreement, ), normalization='std',
                            inverse_model=partial(INVERSE, num_forward_models=3)),
    're3': partial(ExplorationBonus, factors=(partial(NearestNeighbors, kind='log', num_neighbors=2), ),
                   random_network=NETWORK, normalization='min_max')}


def make(name='count', algorithm='ppo', environment='discrete', **arguments):
    module = BONUSES[name] if isinstance(name, str) else name
    if algorithm == 'sac':
        return sac_agents.make_agent(environment, agent_args=dict(intrinsic_reward_module=module), **arguments)
    return agents.make_agent(algorithm, environment, intrinsic_reward_module=module, **arguments)


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


def collected(agent, iterations):
    """Return the time steps and the rewards of all steps of some iterations, each step once."""
    collector, steps, rewards = agent.learner.collector, [], []
    original = agent.postprocess_steps

    def spy(inputs, rollout_info, state):
        info, next_state = original(inputs, rollout_info, state)
        skipped = int(state is not None and agent.unrolls_end_with_bootstrap)
        time_step = TimeStep(step_type=inputs.step_type, observation=inputs.observation, prev_action=inputs.prev_action)
        steps.append(nest.map_structure(lambda x: x[skipped:].clone(), time_step))
        rewards.append({name: reward[skipped:].clone() for name, reward in info.rewards.items()})
        return info, next_state

    agent.postprocess_steps = spy
    for _ in range(iterations):
        agent.train_iter()
    assert collector.unroll_state is not None
    joined = nest.map_structure(lambda *x: torch.cat(x), *rewards)
    return nest.map_structure(lambda *x: torch.cat(x), *steps), joined.get('irm', joined)


class StepCounter(IntrinsicRewardAlgorithm):
    """Rewards each step with the number of steps since the run began."""

    unroll_state_spec = TensorSpec((), torch.int64)

    def __init__(self, observation_spec, action_spec):
        super().__init__(observation_spec, None, None, None, False)

    def reward_steps(self, inputs, state):
        count = state + 1 + torch.arange(len(inputs.reward)).unsqueeze(1)
        return AlgStep(count.float(), count[-1])

    def train_step(self, inputs, state, rollout_info=None):
        return AlgStep()

    def calc_loss(self, info):
        return LossInfo()


@pytest.mark.parametrize('algorithm', ['ppo', 'sac'])
def test_a_module_of_a_user_has_a_state_between_unrolls(algorithm):
    agent, _ = make(StepCounter, algorithm, 'discrete' if algorithm == 'ppo' else 'continuous')
    _, rewards = collected(agent, 3)
    assert len(rewards) > 10 and torch.equal(rewards[:, 0], torch.arange(1.0, len(rewards) + 1))


@pytest.mark.parametrize('algorithm', ['ppo', 'ppg', 'impala', 'actor-critic', 'sac'])
def test_rewards_of_a_run_are_those_of_one_long_unroll(algorithm):
    agent, _ = make('count', algorithm)
    steps, found = collected(agent, 4)
    module = agent.intrinsic_reward
    expected = module.reward_steps(steps, module.get_initial_unroll_state(4)).output
    assert torch.equal(found, expected)
    assert 0 < found.mean() < 1 and len(found) == (16 if algorithm == 'sac' else 25)


@pytest.mark.parametrize('algorithm', ['ppo', 'impala', 'actor-critic', 'sac'])
@pytest.mark.parametrize('name', BONUSES)
def test_a_run_resumes_exactly(name, algorithm):
    agent, env = make(name, algorithm)
    for _ in range(3):
        agent.train_iter()
    saved, rollout, env_state = (dict(agent.state_dict()), agent.learner.state_dict(), env.get_state())
    saved, rollout = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (saved, rollout))
    random_state = torch.get_rng_state()
    agent.train_iter()
    copy, copy_env = make(name, algorithm, seed=5)
    copy_env.set_state(env_state)
    copy.load_state_dict(saved)
    copy.learner.load_state_dict(rollout)
    if algorithm == 'sac':
        copy.replay_buffer.load_state_dict(agent.replay_buffer.state_dict())
    torch.set_rng_state(random_state)
    copy.train_iter()
    for a, b in zip(nest.flatten(agent.learner.collector.unroll_state),
                    nest.flatten(copy.learner.collector.unroll_state)):
        assert torch.equal(a, b)
    if algorithm != 'sac':
        assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(copy)))


def test_new_episodes_forget_the_old_ones():
    agent, _ = make()
    agent.train_iter()
    collector = agent.learner.collector
    assert 'unroll_state' in collector.state_dict()
    collector.start_new_episodes(collector.state_dict())
    assert collector.unroll_state is None and 'unroll_state' not in collector.state_dict()


def test_a_state_of_another_size_is_rejected():
    agent, _ = make()
    agent.train_iter()
    state = agent.learner.state_dict()
    other, _ = make(partial(ExplorationBonus, factors=(partial(COUNT, capacity=7), )))
    with pytest.raises(ValueError, match=r'expected torch.int64 \(4, 7\), found torch.int64 \(4, 1000\)'):
        other.learner.load_state_dict(state)


def test_evaluation_does_not_change_the_memory():
    agent, env = make()
    agent.train_iter()
    before = agent.learner.state_dict()['unroll_state']
    agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(4))
    assert all(a is b for a, b in zip(before, agent.learner.state_dict()['unroll_state']))


def test_rewards_do_not_read_those_of_the_task():
    agent, _ = make()
    steps, found = collected(agent, 2)
    steps = steps._replace(reward=torch.full_like(found, torch.nan))
    module = agent.intrinsic_reward
    assert torch.equal(module.reward_steps(steps, module.get_initial_unroll_state(4)).output, found)


@pytest.mark.parametrize('algorithm', ['ppo', 'impala', 'actor-critic', 'sac'])
@pytest.mark.parametrize('name', BONUSES)
def test_the_models_are_trained_and_the_random_network_is_not(name, algorithm):
    agent, _ = make(name, algorithm)
    module = agent.intrinsic_reward
    before = {key: p.detach().clone() for key, p in module.named_parameters()}
    for _ in range(3):
        agent.train_iter()
    for key, p in module.named_parameters():
        assert torch.equal(p, before[key]) == ('_random_network' in key or '_target_net' in key), key


def test_pairs_across_unrolls_train_as_those_within():
    """Use pairs of an unroll, as for ICM and RND, whose rewards are computed at once as well."""
    agent, _ = make('ngu')
    steps, _ = collected(agent, 1)
    module = agent.intrinsic_reward
    pairs = module.pairs_of_unroll(steps)
    for part, found in ((module._inverse_model, pairs.inverse_model), (module._error_model, pairs.error_model)):
        part.eval()
        for a, b in zip(nest.flatten(found), nest.flatten(part.reward_unroll(steps).info)):
            assert torch.equal(a, b)


def test_a_reward_that_is_not_finite_names_module_and_factor():
    agent, _ = make('e3b')
    with torch.no_grad():
        next(agent.intrinsic_reward._inverse_model._encoding_net.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteLossError, match='irm: EllipticalNovelty is NaN or infinite'):
        agent.train_iter()


@pytest.mark.parametrize(('arguments', 'message'), [
    (dict(algorithm='actor-critic', environment='recurrent'), 'on-policy agent needs the reward of each step'),
    (dict(config_args=dict(whole_replay_buffer_training=False, clear_replay_buffer=False, unroll_with_grad=True,
                           replay_buffer_length=100, mini_batch_length=2)), 'unroll_with_grad is set'),
    (dict(name=partial(ExplorationBonus, factors=())), 'ExplorationBonus.factors is empty'),
    (dict(name=partial(ExplorationBonus, factors=(EpisodicCount, ))), 'resolution = None, but the observation'),
    (dict(name=partial(ExplorationBonus, factors=(partial(COUNT, decay='none'), ))), 'decay'),
    (dict(name=partial(ExplorationBonus, factors=(partial(COUNT, capacity=0), ))), 'capacity'),
    (dict(name=partial(BONUSES['re3'], normalization='mean')), "normalization must be one of"),
    (dict(name=partial(BONUSES['re3'], factors=(partial(NearestNeighbors, num_neighbors=9, capacity=8), ))),
     r'num_neighbors must be an int in \[1, 8\]'),
    (dict(name=partial(BONUSES['re3'], inverse_model=INVERSE)), 'random_network is set, but the features'),
    (dict(name=partial(BONUSES['e3b'], inverse_model=None)), 'inverse_model = None, but EllipticalNovelty needs it'),
    (dict(name=partial(BONUSES['disagreement'], inverse_model=INVERSE)), 'Disagreement, which needs several forward'),
    (dict(name=partial(BONUSES['count'], inverse_model=INVERSE)), 'inverse_model is set, but no factor uses it'),
    (dict(name=partial(BONUSES['noveld'], error_model=None)), 'error_model = None, but NoveltyGain needs it'),
    (dict(name=partial(BONUSES['noveld'], error_model=INVERSE)), 'expected @RNDAlgorithm, found ICMAlgorithm'),
    (dict(name=partial(BONUSES['e3b'], inverse_model=partial(INVERSE, reward_adapt_speed=8.0))),
     'ICMAlgorithm.reward_adapt_speed normalizes a reward'),
])
def test_what_does_not_fit_is_rejected_by_name(arguments, message):
    with pytest.raises(ConfError, match=message):
        make(**arguments)


# Rewards of sampled steps ----------------------------------------------------------------------------------------

NO_STATISTICS = partial(RNDAlgorithm, NETWORK, NETWORK, keep_stacked_frames=0)
APT = partial(ExplorationBonus, factors=(partial(ParticleEntropy, num_neighbors=3), ), inverse_model=INVERSE,
              rewards='sampled')
NOVELD = partial(BONUSES['noveld'], error_model=NO_STATISTICS, normalization='none')


def stored_rewards(rewards):
    """Return an agent that has not trained yet, all steps that it has stored, and the rewards it trains on."""
    agent, _ = make(partial(NOVELD, rewards=rewards), 'sac', config_args=dict(initial_collect_steps=1000))
    for _ in range(4):
        agent.train_iter()
    experience, batch_info = agent.replay_buffer.gather_all()
    inputs, _ = agent.preprocess_experience(experience.time_step, experience.rollout_info, batch_info)
    return experience, inputs.reward


def test_sampled_rewards_are_the_collected_ones_before_training():
    (collected, expected), (sampled, found) = stored_rewards('collected'), stored_rewards('sampled')
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], rtol=1e-5, atol=1e-6)
    factor = sampled.rollout_info.rewards['irm']
    assert set(factor.unique().tolist()) == {0.0, 1.0} and factor.dtype == torch.float32
    assert not torch.equal(factor, collected.rollout_info.rewards['irm'])
    bonus_ = found - sampled.time_step.reward
    assert (bonus_[:, 1:] != 0).any()


@pytest.mark.parametrize('module', [APT, partial(BONUSES['ngu'], rewards='sampled'),
                                    partial(BONUSES['disagreement'], rewards='sampled'),
                                    partial(BONUSES['noveld'], rewards='sampled')])
@pytest.mark.parametrize('arguments', [{}, dict(mini_batch_length=3), dict(environment='continuous')])
def test_models_of_sampled_rewards_are_trained(module, arguments):
    agent, _ = make(module, 'sac', **arguments)
    before = {key: p.detach().clone() for key, p in agent.intrinsic_reward.named_parameters()}
    for _ in range(3):
        agent.train_iter()
    for key, p in agent.intrinsic_reward.named_parameters():
        assert torch.equal(p, before[key]) == ('_target_net' in key), key
    assert all(p.isfinite().all() for p in agent.parameters())


def test_a_run_with_sampled_rewards_resumes_exactly():
    BONUSES['sampled'] = APT
    try:
        test_a_run_resumes_exactly('sampled', 'sac')
    finally:
        del BONUSES['sampled']


def test_sampled_rewards_can_be_a_dimension_of_the_reward():
    agent, _ = make(APT, 'sac')
    agent_, _ = sac_agents.make_agent('discrete', agent_args=dict(
        intrinsic_reward_module=APT, intrinsic_reward_as_dimension=True, intrinsic_reward_coef=0.5))
    for either in (agent, agent_):
        either.train_iter()
    assert agent_.policy.reward_weights.tolist() == [1.0, 0.5]


def hindsight(env):
    class Relabel(DataTransformer):
        goal_fields = ('goal', )
    return Relabel(env.observation_spec(), ())


@pytest.mark.parametrize(('arguments', 'message'), [
    (dict(name=APT), 'PPOAlgorithm trains on the steps just collected'),
    (dict(name=APT, algorithm='actor-critic'), 'ActorCriticAlgorithm trains on the steps just collected'),
    (dict(name=partial(BONUSES['count'], rewards='sampled'), algorithm='sac'), 'no factor changes after'),
    (dict(name=partial(APT, rewards='collected'), algorithm='sac'), 'ParticleEntropy compares the steps of a sampled'),
    (dict(name=partial(APT, rewards='later'), algorithm='sac'), "rewards must be 'collected' or 'sampled'"),
    (dict(name=partial(APT, normalization='std'), algorithm='sac'), 'ParticleEntropy has no value for collected steps'),
    (dict(name=partial(NOVELD, rewards='sampled', normalization='min_max'), algorithm='sac'), "'min_max' depends on"),
    (dict(name=APT, algorithm='sac', mini_batch_size=3), '3 neighbors of a step do not exist in a batch of 3 steps'),
    (dict(name=APT, algorithm='sac', data_transformer=hindsight), 'relabeled in hindsight'),
    (dict(name=[APT, NO_STATISTICS], algorithm='sac'), 'a list with ExplorationBonus, which rewards stored steps'),
])
def test_sampled_rewards_that_do_not_fit_are_rejected_by_name(arguments, message):
    with pytest.raises(ConfError, match=message):
        make(**arguments)


# Mixtures --------------------------------------------------------------------------------------------------------

def named(name, **arguments):
    return partial(BONUSES[name], name=name, **arguments)


SIMPLE = partial(RNDAlgorithm, NETWORK, NETWORK, keep_stacked_frames=0)


def trained(algorithm='ppo', iterations=3, **arguments):
    agent, _ = make(algorithm=algorithm, **arguments)
    for _ in range(iterations):
        agent.train_iter()
    return agent


@pytest.mark.parametrize('algorithm', ['ppo', 'sac', 'actor-critic'])
def test_a_mixture_of_one_module_equals_the_module(algorithm):
    module, agents_ = BONUSES['ngu'], []
    for arguments in (dict(name=module), dict(name=[module])):
        agents_.append(trained(algorithm, **arguments))
    assert all(torch.equal(a, b) for a, b in zip(*(parameters(agent) for agent in agents_)))
    assert agents_[0].state_dict().keys() == agents_[1].state_dict().keys()


@pytest.mark.parametrize(('algorithm', 'modules'), [
    ('ppo', ['count', 'e3b', SIMPLE]), ('ppo', [SIMPLE, INVERSE]), ('impala', ['ngu', 'noveld']),
    ('sac', ['ride', 'count']), ('sac', [SIMPLE, INVERSE]), ('actor-critic', [SIMPLE, INVERSE]),
    ('actor-critic', ['count', SIMPLE])])
def test_rewards_of_a_mixture_are_those_of_its_modules(algorithm, modules):
    parts = [named(module) if isinstance(module, str) else module for module in modules]
    agent, _ = make(parts, algorithm, **({} if algorithm == 'sac' else dict(intrinsic_reward_coef=[1.0] * len(parts))))
    steps, found = collected(agent, 1) if nest.flatten(agent.unroll_state_spec) else (agent.train_iter(), None)
    mixture = agent.intrinsic_reward
    assert len(mixture.modules_by_name) == len(modules)
    assert list(agent.reward_coefficients()) == ['extrinsic', *mixture.modules_by_name]
    assert all(torch.isfinite(p).all() for p in agent.parameters())
    if 'count' in modules:  # the only one that does not change while it is trained
        count_module = mixture.modules_by_name['count']
        state = count_module.get_initial_unroll_state(4)
        assert torch.equal(found['count'], count_module.reward_steps(steps, state).output)


def test_coefficients_weight_the_rewards_of_a_mixture():
    agent, _ = make([named('count'), SIMPLE], intrinsic_reward_coef=[2.0, lambda: 0.5],
                    extrinsic_reward_coef=lambda: 3.0)
    reward = torch.ones(4)
    found = agent._training_reward(reward, {'count': 2 * reward, 'RNDAlgorithm': 4 * reward})
    assert torch.equal(found, 3 * reward + 2 * 2 * reward + 0.5 * 4 * reward)


def test_each_module_of_a_mixture_can_be_a_dimension_of_the_reward():
    weight = [0.5]
    agent, _ = make([named('count'), SIMPLE], intrinsic_reward_coef=[2.0, lambda: weight[0]],
                    intrinsic_reward_as_dimension=True)
    agent.train_iter()
    assert agent.policy.reward_weights.tolist() == [1.0, 2.0, 0.5]
    weight[0] = 0.25
    agent.train_iter()
    assert agent.policy.reward_weights.tolist() == [1.0, 2.0, 0.25]
    reward = torch.ones(4)
    found = agent._training_reward(reward, {'count': 2 * reward, 'RNDAlgorithm': 4 * reward})
    assert torch.equal(found, torch.tensor([[1.0, 2, 4]]).expand(4, 3))


@pytest.mark.parametrize(('arguments', 'message'), [
    (dict(name=[]), '0 intrinsic_reward_module'),
    (dict(name=[named('count'), SIMPLE], intrinsic_reward_coef=[1.0]), r'has 1 coefficient\(s\) for 2'),
    (dict(name=[BONUSES['count'], BONUSES['e3b']], intrinsic_reward_coef=[1.0, 1.0]), "two modules named 'Expl"),
])
def test_mixtures_that_do_not_fit_are_rejected(arguments, message):
    with pytest.raises(ConfError, match=message):
        make(**arguments)


def test_modules_with_and_without_memory_need_whole_unrolls():
    with pytest.raises(ConfError, match='RNDAlgorithm rewards the steps of SacAlgorithm one at a time'):
        make([named('count'), SIMPLE], 'sac')


def test_a_mixture_resumes_exactly():
    BONUSES['mixture'] = [named('count'), named('e3b'), SIMPLE]
    try:
        test_a_run_resumes_exactly('mixture', 'ppo')
    finally:
        del BONUSES['mixture']


def test_a_longer_episode_than_the_memory_is_reported_once(caplog):
    agent, _ = make(partial(ExplorationBonus, factors=(partial(COUNT, capacity=3), )))  # episodes of 5 steps
    for _ in range(3):
        agent.train_iter()
    assert caplog.text.count('an episode is longer than the 3 steps that are remembered') == 1


def test_the_bytes_of_the_state_are_announced():
    agent, _ = make('ngu')
    agent.train_iter()
    state = nest.flatten(agent.learner.collector.unroll_state)
    size = sum(x.numel() * x.element_size() for x in state)
    assert f'state between unrolls: {size:,} bytes' in '\n'.join(memory_lines(agent))


def test_an_on_policy_agent_trains_on_the_sum_of_rewards(monkeypatch):
    agent, seen = make('count', 'actor-critic', intrinsic_reward_coef=0.5, extrinsic_reward_coef=3.0)[0], []
    original = agent.policy.calc_loss
    monkeypatch.setattr(agent.policy, 'calc_loss', lambda info: seen.append(info.reward) or original(info))
    extrinsic, step = [], agent.environment.step
    monkeypatch.setattr(agent.environment, 'step', lambda action: extrinsic.append(step(action)) or extrinsic[-1])
    _, found = collected(agent, 1)
    expected = 3 * torch.stack([time_step.reward for time_step in extrinsic]) + 0.5 * found[1:]
    assert torch.equal(seen[-1][1:], expected)


def test_replayed_updates_of_an_on_policy_agent_follow_a_schedule(warm_up):
    results = []
    for updates_before in (2, 10**6):
        warm_up(updates_before)
        weight = [0.5]
        agent, _ = make('ngu', 'actor-critic', intrinsic_reward_coef=lambda weight=weight: weight[0])
        for _ in range(5):
            agent.train_iter()
            weight[0] += 0.25
        assert bool(num_graphs(agent)) == (updates_before == 2)
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))
