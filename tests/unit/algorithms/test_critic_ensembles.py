"""DroQ, REDQ, TQC: soft actor-critic with dropout, and reductions of ensembles of critics."""
from functools import partial

import pytest
import torch
from helpers.dqn_agents import assert_same_parameters, train
from helpers.plans import num_graphs, warnings_in
from helpers.sac_agents import ENVIRONMENTS, make_agent, networks, random_steps, squashed_normal

from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.base import critic_values
from alfx.algorithms.categorical_sac_algorithm import CategoricalSacAlgorithm
from alfx.algorithms.qrsac_algorithm import QrsacAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm, SacInfo
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork

DROQ = dict(critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=(16, 16), use_fc_ln=True, dropout=0.1),
            policy_critics='mean', policy_update_period=2, train_actor_on_last_step=False)
REDQ = dict(num_critic_replicas=4, num_bootstrap_critics=2, policy_critics='mean', policy_update_period=2)
TQC = dict(algorithm_cls=QrsacAlgorithm, num_critic_replicas=3, num_dropped_quantiles=2, policy_critics='mean')
ATOMS = dict(algorithm_cls=CategoricalSacAlgorithm, num_atoms=21)
VARIANTS = {
    'droq': DROQ, 'redq': REDQ, 'mean': dict(bootstrap_critics='mean'),
    'joint': {**DROQ, 'critic_batches': 'joint'}, 'quantiles': {**REDQ, 'algorithm_cls': QrsacAlgorithm},
    'tqc': TQC, 'tqc of a subset': dict(TQC, num_bootstrap_critics=2), 'atoms': ATOMS,
    'joint atoms': dict(ATOMS, critic_batches='joint', policy_update_period=2),
    'discrete': dict(REDQ, policy_update_period=1, environment='discrete'),
    'dropout of the actor': dict(actor_network_cls=partial(
        ActorDistributionNetwork, fc_layer_params=(16, ), continuous_projection_net_ctor=squashed_normal, dropout=0.1))}


@pytest.mark.parametrize('variant', list(VARIANTS))
def test_replayed_updates_match_eager_ones_bit_for_bit(variant, warm_up, caplog):
    agents = []
    for count in (1, 10**9):
        warm_up(count)
        agents.append(make_agent(**VARIANTS[variant])[0])
        train(agents[-1:], 100 if variant == 'droq' else 20)  # two updates each
    assert num_graphs(agents[0]) and not num_graphs(agents[1]) and not warnings_in(caplog)
    assert_same_parameters(agents, atol=0.0, rtol=0.0)


@pytest.mark.compiles
@pytest.mark.parametrize('variant', ['droq', 'tqc of a subset'])
def test_compiled_updates_match_eager_ones_up_to_rounding(variant, never_replayed, caplog):
    changes = {**VARIANTS[variant], 'policy_update_period': 1}  # a single graph
    agents = [make_agent(**changes, config_args=dict(compile=on))[0] for on in (False, True)]
    train(agents, 4)
    assert num_graphs(agents[1]) and not warnings_in(caplog)
    assert_same_parameters(agents, atol=1e-5, rtol=1e-3)


def test_a_subset_of_critics_is_uniform_and_the_same_for_the_batch():
    critics = torch.arange(4.0).expand(3, 4).unsqueeze(-1)
    count = torch.zeros(4, 4)
    for _ in range(1200):
        chosen = critic_values.random_critics(critics, 2)
        assert chosen.shape == (3, 2, 1) and (chosen == chosen[:1]).all()
        first, second = chosen[0, :, 0].long().tolist()
        count[first, second] += 1
    assert not count.diagonal().any()
    pairs = count[~torch.eye(4, dtype=torch.bool)]
    assert ((pairs - 100.0).square() / 100.0).sum() < 31.3  # chi-square with 11 degrees of freedom: 99.9%


def make_algorithm(environment='continuous', **args):
    env = ENVIRONMENTS[environment](batch_size=1)
    torch.manual_seed(0)
    return SacAlgorithm(env.observation_spec(), env.action_spec(), env.reward_spec(),
                        **{**networks(environment, env), **args})


def test_means_and_minima_of_critics():
    critics = torch.tensor([[1.0, 2.0, 6.0]])
    mean = make_algorithm(policy_critics='mean', bootstrap_critics='mean', num_critic_replicas=3)
    least = make_algorithm(num_critic_replicas=3)
    assert mean._actor_value(critics).tolist() == mean._bootstrap_value(critics).tolist() == [3.0]
    assert least._actor_value(critics).tolist() == least._bootstrap_value(critics).tolist() == [1.0]
    weighted = make_algorithm('vector reward', policy_critics='mean', reward_weights=[1.0, 2.0, -1.0])
    rewards = torch.tensor([[[1.0, 2.0, 6.0], [3.0, 4.0, 0.0]]])
    assert weighted._actor_value(rewards).tolist() == [2.0 + 2.0 * 3.0 - 3.0]


def test_all_critics_as_a_subset_give_the_minimum_over_all():
    critics = torch.randn(8, 5)
    algorithm = make_algorithm(num_critic_replicas=5, num_bootstrap_critics=5)
    torch.testing.assert_close(algorithm._bootstrap_value(critics), critics.min(1).values)
    some = make_algorithm(num_critic_replicas=5, num_bootstrap_critics=1)
    chosen = some._bootstrap_value(critics)
    assert any(torch.equal(chosen, critics[:, i]) for i in range(5))


def test_targets_use_dropout_too():
    algorithm = make_algorithm(**DROQ)
    steps, action = random_steps(algorithm, 2, 16)
    targets = []
    for _ in range(2):
        info = algorithm.train_sequence(steps, algorithm.get_initial_train_state(16), SacInfo(action=action)).info
        targets.append(info.critic.target_critic[1])
    assert not torch.allclose(*targets)


@pytest.mark.parametrize('args, message', [
    (dict(num_bootstrap_critics=3), 'num_bootstrap_critics: expected a number from 1 to num_critic_replicas = 2'),
    (dict(policy_critics='max'), "policy_critics must be 'min' or 'mean', found str 'max'"),
    (dict(bootstrap_critics='least'), "bootstrap_critics must be 'min' or 'mean', found str 'least'")])
def test_invalid_reductions_of_critics_are_rejected_by_name(args, message):
    with pytest.raises(ValueError, match=message):
        make_algorithm(**args)


def test_on_policy_training_rejects_dropout():
    env = ENVIRONMENTS['continuous'](batch_size=1)
    with pytest.raises(ValueError, match='Dropout act differently in rollouts'):
        ActorCriticAlgorithm(env.observation_spec(), env.action_spec(), actor_network_ctor=partial(
            ActorDistributionNetwork, fc_layer_params=(8, ), dropout=0.1))
