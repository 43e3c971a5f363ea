"""Evolution strategies: assignment of members to environments, updates from returns, and exact resumption of runs."""
from functools import partial

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from alfx import context, nest
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import ObservationNormalizer, RewardScaling, create_data_transformer
from alfx.algorithms.evolution import evolution
from alfx.algorithms.evolution.population import play_population
from alfx.algorithms.evolution_strategy_algorithm import EvolutionStrategyAlgorithm
from alfx.data_structures import StepType
from alfx.environments.suite_unittest import (ActionType, MixedPolicyUnittestEnv, PolicyUnittestEnv,
                                              RNNPolicyUnittestEnv)
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.optimizers import SGD

ENVIRONMENTS = {
    'discrete': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Discrete),
    'continuous': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous),
    'mixed': partial(MixedPolicyUnittestEnv, episode_length=5),
    'recurrent': partial(RNNPolicyUnittestEnv, episode_length=5, gap=2),
    'vector reward': partial(PolicyUnittestEnv, episode_length=5, reward_dim=3),
    'actions': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous),
}
NETWORKS = {'recurrent': partial(ActorDistributionRNNNetwork, fc_layer_params=(4, ), lstm_hidden_size=(4, )),
            'actions': partial(ActorNetwork, fc_layer_params=(8, ))}


def make(environment='discrete', batch_size=3, seed=0, learning_rate=0.1, config_args=None, transformer=None,
         **arguments):
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=EvolutionStrategyAlgorithm, **(config_args or {}))
    config.data_transformer = create_data_transformer(transformer, env.observation_spec())
    algorithm = EvolutionStrategyAlgorithm(
        env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
        actor_network_ctor=NETWORKS.get(environment, partial(ActorDistributionNetwork, fc_layer_params=(8, ))),
        optimizer=SGD(lr=learning_rate), **{'num_agents': 8, **arguments})
    algorithm.set_path('')
    algorithm.finalize()
    return algorithm


def mean(algorithm):
    return parameters_to_vector(algorithm._actor_network.parameters()).detach().clone()


# Episodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('batch_size', [1, 3, 5, 12, 20])
def test_each_member_finishes_its_episodes_for_any_number_of_environments(batch_size):
    algorithm = make(batch_size=batch_size)
    env, seen = algorithm.environment, []

    def act(inputs, state, policy):
        seen.append((inputs.step_type.clone(), policy.clone()))
        rewarded = (inputs.observation[:, 0] > 0).long()  # even policies take the rewarded action, odd ones never
        return torch.where(policy % 2 == 0, rewarded, 1 - rewarded), state

    played = play_population(act, algorithm, env, 4, 3, (), lambda time_step: None)
    assert played.returns.shape == (4, 3)
    assert (played.returns[0] > played.returns[1]).all()
    assert torch.equal(played.returns[::2], played.returns[:1].expand(2, 3))
    episodes = torch.zeros(4, dtype=torch.int64)
    for step_type, policy in seen:
        for number in policy[(step_type == StepType.FIRST) & (policy >= 0)]:
            episodes[number] += 1
    assert episodes.tolist() == [3] * 4


def test_a_member_keeps_its_environment_until_its_episode_has_ended():
    algorithm, seen = make(batch_size=2), []

    def act(inputs, state, policy):
        seen.append((inputs.step_type.tolist(), policy.tolist()))
        return torch.zeros(2, dtype=torch.int64), state

    play_population(act, algorithm, algorithm.environment, 3, 1, (), lambda time_step: None)
    assert [policy for _, policy in seen] == [[0, 1]] * 4 + [[2, -1]] * 5  # the LAST step belongs to the next members


@pytest.mark.parametrize('environment', ENVIRONMENTS)
def test_a_member_acts_as_a_network_with_its_parameters(environment):
    algorithm = make(environment, batch_size=4, num_agents=4)
    members = algorithm._mean() + 0.5 * torch.randn(5, len(algorithm._mean()))
    time_step = algorithm.environment.current_time_step()
    policy = torch.tensor([2, 0, -1, 2])
    state = algorithm.get_initial_rollout_state(4)
    with torch.no_grad():
        action, _ = algorithm._act(members, time_step, state, policy)
        for slot, number in enumerate(policy.tolist()):
            single = algorithm._members[0].single_network(members[number])
            algorithm._actor_network, network = single, algorithm._actor_network
            one = algorithm.predict_step(time_step, state).output
            algorithm._actor_network = network
            for a, b in zip(nest.flatten(action), nest.flatten(one)):
                torch.testing.assert_close(a[slot], b[slot])


# The update -----------------------------------------------------------------------------------------------------------


def test_the_update_is_the_formula():
    algorithm = make(fitness_shaping='raw', sigma=0.2, weight_decay=0.1, learning_rate=0.3)
    before, noise = mean(algorithm), algorithm.noise()
    experience = algorithm.unroll(1)
    returns = experience.rollout_info.returns
    algorithm.train_from_unroll(experience, None)
    expected = before.clone()
    for i in range(8):
        expected += 0.3 / (8 * 0.2) * returns[i] * noise[i]
    torch.testing.assert_close(mean(algorithm), expected - 0.3 * 0.1 * before)


def test_members_come_in_pairs_and_noise_is_new_in_each_generation():
    algorithm = make()
    first = algorithm.noise()
    assert torch.equal(first[:4], -first[4:]) and torch.equal(first, algorithm.noise())
    algorithm.train_iter()
    assert not torch.equal(first, algorithm.noise())
    unpaired = make(antithetic=False, num_agents=5)
    assert unpaired.noise().shape[0] == 5


def test_the_sigma_of_snes_is_learned_and_others_are_fixed():
    for strategy, changes in (('openai', False), ('ars', False), ('snes', True)):
        algorithm = make(strategy=strategy)
        before = algorithm.sigma().clone()
        for _ in range(3):
            algorithm.train_iter()
        assert bool((algorithm.sigma() != before).any()) == changes


@pytest.mark.parametrize('strategy, rate', [('openai', 1.0), ('ars', 0.2), ('snes', 1.0)])
def test_it_learns(strategy, rate):
    algorithm = make(strategy=strategy, learning_rate=rate, sigma=0.5, num_agents=16, batch_size=16)
    for _ in range(25):
        algorithm.train_iter()
    played = play_population(lambda inputs, state, policy: (algorithm.predict_step(inputs, state).output, state),
                             algorithm, algorithm.environment, 1, 16, (), lambda time_step: None)
    assert float(played.returns.mean()) > 3.9  # of 4


@pytest.mark.parametrize('environment', ENVIRONMENTS)
def test_every_kind_of_action_reward_and_network_trains(environment):
    algorithm = make(environment, num_episodes=2)
    before = mean(algorithm)
    assert algorithm.train_iter() == 8
    assert not torch.equal(before, mean(algorithm)) and torch.isfinite(mean(algorithm)).all()
    assert algorithm.get_metrics()[1].result() >= 16  # episodes


def test_resuming_within_a_generation_is_exact():
    def trained(resumes):
        algorithm = make(strategy='snes')
        algorithm.train_iter()
        if resumes:
            saved = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x,
                                       dict(algorithm.state_dict()))
            env_state, random_state = algorithm.environment.get_state(), torch.get_rng_state()
            algorithm = make(strategy='snes', seed=7)
            algorithm.environment.set_state(env_state)
            algorithm.load_state_dict(saved)
            torch.set_rng_state(random_state)
        for _ in range(2):
            algorithm.train_iter()
        return mean(algorithm)

    assert torch.equal(trained(False), trained(True))


class TwoRanks:
    """A stand-in for one of two ranks, given its rank and the tensors that the other rank has gathered."""

    size = 2

    def __init__(self, rank, other):
        self.rank, self._other, self.gathered = rank, other, []

    def gather(self, tensor):
        self.gathered.append(tensor.clone())
        other = self._other[len(self.gathered) - 1] if self._other else torch.zeros_like(tensor)
        return torch.stack((tensor, other) if self.rank == 0 else (other, tensor))


def test_returns_of_several_processes_belong_to_their_members():
    fitness = []
    for rank in (0, 1):
        ranks = TwoRanks(rank, fitness)
        algorithm = make(sigma=0.5)
        with context.training_with(ranks):
            returns = algorithm.unroll(1).rollout_info.returns
        fitness.append(ranks.gathered[0]) if rank == 0 else None
    assert torch.equal(returns[::2], fitness[0].flatten()) and returns.shape == (8, )
    assert torch.equal(returns[1::2], ranks.gathered[0].flatten())


def test_statistics_are_frozen_in_a_generation_and_updated_after_it():
    algorithm = make('continuous', transformer=partial(ObservationNormalizer, update_mode='rollout', speed=1.0))
    env, act, raw, seen = algorithm.environment, algorithm._act, [], []
    step = env.step
    env.step = lambda action: raw.append(env.current_time_step().observation.clone()) or step(action)
    algorithm._act = lambda members, inputs, *args: seen.append(inputs.observation) or act(members, inputs, *args)
    for generation in range(2):
        before = [torch.cat(raw)] if raw else []
        raw.clear(), seen.clear()
        algorithm.train_iter()
        if not generation:
            torch.testing.assert_close(torch.cat(seen), torch.cat(raw) / (1 + 1e-10)**0.5)
    mean, variance = before[0].mean(0), before[0].var(0, correction=0)
    torch.testing.assert_close(torch.cat(seen), (torch.cat(raw) - mean) * torch.rsqrt(variance + 1e-10))


def test_reward_transformers_are_rejected_because_they_have_no_effect():
    with pytest.raises(ConfError, match='(?s)RewardScaling.*returns of the environment'):
        make(transformer=partial(RewardScaling, scale=0.1))


@pytest.mark.parametrize('wrong, message', [
    (dict(num_agents=7), 'num_agents = 7 is odd'), (dict(num_agents=1), 'num_agents'),
    (dict(strategy='cma'), 'strategy'),
    (dict(num_best=3), "num_best has an effect only with strategy = 'ars'"), (dict(num_episodes=0), 'num_episodes'),
    (dict(strategy='ars', num_best=5), 'num_best'), (dict(strategy='ars', antithetic=False), 'antithetic'),
    (dict(strategy='snes', fitness_shaping='raw'), 'fitness_shaping'), (dict(sigma_learning_rate=0.1), 'only with'),
    (dict(weight_decay=-1.0), 'weight_decay'), (dict(sigma=0.0), 'sigma'), (dict(sigma=-1.0), 'sigma')])
def test_wrong_arguments_are_rejected_by_name(wrong, message):
    with pytest.raises(ConfError, match=message):
        make(**wrong)


def test_asynchronous_actors_are_rejected_with_a_remedy():
    with pytest.raises(ConfError, match='(?s)async_unroll.*--num_processes'):
        make(config_args=dict(async_unroll=True))


def test_shaping_by_name():
    assert set(evolution.FITNESS) == {'centered_rank', 'standardized', 'raw'}
