"""Additional terms of a policy's loss: values, gradients, and use with every policy algorithm."""
import os
from functools import partial

import gin
import pytest
import torch
import torch.distributions as td
from helpers import agents
from helpers import deterministic_agents

from alfx import context, gin_utils, nest
from alfx.algorithms import algorithm
from alfx.algorithms.composition.policy_loss_addons import (AttractionToPolicy, PolicyLossAddOn, RepulsionFromPolicy,
                                                kl_divergence)
from alfx.algorithms.ddpg_algorithm import DdpgAlgorithm
from alfx.algorithms.mpo_algorithm import MpoAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.data_structures import TimeStep
from alfx.gin_utils import ConfError, parsing
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.checkpoint_utils import Checkpointer

OBSERVATION = TensorSpec((3, ))
CONTINUOUS = BoundedTensorSpec((2, ), torch.float32, [-1, 0], [1, 4])
DISCRETE = BoundedTensorSpec((), torch.int64, 0, 2)
squashed = partial(NormalProjectionNetwork, state_dependent_std=True, scale_distribution=True)
stochastic = partial(ActorDistributionNetwork, fc_layer_params=(8, ), continuous_projection_net_ctor=squashed)
deterministic = partial(ActorNetwork, fc_layer_params=(8, ))


# Divergences ---------------------------------------------------------------------------------------------------------


def test_the_divergence_of_normal_distributions_is_the_closed_form():
    loc, other_loc = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    policy = dist_utils.DiagMultivariateNormal(loc, torch.tensor([[1.0, 2.0]]))
    other = dist_utils.DiagMultivariateNormal(other_loc, torch.tensor([[2.0, 2.0]]))
    # log(2 / 1) + (1 + 1) / (2 * 4) - 1 / 2 for the first component, 0 for the second
    torch.testing.assert_close(kl_divergence(policy, other), torch.tensor([0.6931472 + 0.25 - 0.5]))


def test_the_categorical_divergence_matches_a_slow_loop():
    p, q = torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([[0.4, 0.4, 0.2]])
    expected = sum(a * torch.log(a / b) for a, b in zip(p[0], q[0]))
    found = kl_divergence(dist_utils.Categorical(probs=p), dist_utils.Categorical(probs=q))
    torch.testing.assert_close(found, expected.reshape(1))


def test_squashing_both_policies_does_not_change_their_divergence():
    networks = [stochastic(input_tensor_spec=OBSERVATION, action_spec=CONTINUOUS) for _ in range(2)]
    policy, other = (network(torch.randn(4, 3))[0] for network in networks)
    assert isinstance(policy, td.TransformedDistribution)
    base = td.kl_divergence(dist_utils.get_base_dist(policy), dist_utils.get_base_dist(other))
    torch.testing.assert_close(kl_divergence(policy, other), base.reshape(4, -1).sum(1))


def test_a_divergence_without_closed_form_is_estimated():
    policy = td.Independent(td.Normal(torch.zeros(3, 1), 1.0), 1)
    other = td.MixtureSameFamily(td.Categorical(logits=torch.zeros(3, 2)),
                                 td.Independent(td.Normal(torch.zeros(3, 2, 1), 2.0), 1))
    # both components are the same normal distribution: log 2 + 1 / 8 - 1 / 2
    torch.testing.assert_close(kl_divergence(policy, other, 4000), torch.full((3, ), 0.3181), atol=0.03, rtol=0)


def test_deterministic_actions_are_compared_in_units_of_half_their_range():
    addon = AttractionToPolicy(OBSERVATION, CONTINUOUS, actor_network_ctor=deterministic, deterministic_stddev=0.5)
    observation = torch.randn(4, 3)
    action = addon._other_network(observation)[0] + torch.tensor([0.5, 1.0])
    # half ranges 1 and 2: 0.5 / (0.5 * 1) and 1 / (0.5 * 2) are one standard deviation each
    torch.testing.assert_close(addon.term(observation, action), torch.full((4, ), 1.0))


def test_deterministic_policies_are_compared_with_the_stochastic_mode():
    addon = AttractionToPolicy(OBSERVATION, CONTINUOUS, actor_network_ctor=stochastic)
    observation = torch.randn(4, 3)
    mode = dist_utils.get_mode(addon._other_network(observation)[0])
    torch.testing.assert_close(addon.term(observation, mode), torch.zeros(4))


def test_policies_that_cannot_be_compared_are_rejected():
    addon = AttractionToPolicy(OBSERVATION, CONTINUOUS, actor_network_ctor=deterministic)
    distribution = stochastic(input_tensor_spec=OBSERVATION, action_spec=CONTINUOUS)(torch.randn(4, 3))[0]
    with pytest.raises(ValueError, match='the other one deterministic'):
        addon.term(torch.randn(4, 3), distribution)
    with pytest.raises(ValueError, match='each of 1 actions'):
        addon.term(torch.randn(4, 3), {'a': distribution, 'b': distribution})
    with pytest.raises(ValueError, match='is recurrent'):
        AttractionToPolicy(OBSERVATION, CONTINUOUS, actor_network_ctor=ActorDistributionRNNNetwork)


def test_repulsion_is_the_opposite_of_attraction_up_to_a_bound():
    torch.manual_seed(0)
    attraction = AttractionToPolicy(OBSERVATION, CONTINUOUS, actor_network_ctor=stochastic)
    repulsion = RepulsionFromPolicy(OBSERVATION, CONTINUOUS, actor_network_ctor=stochastic, max_divergence=1.0)
    repulsion._other_network.load_state_dict(attraction._other_network.state_dict())
    network = stochastic(input_tensor_spec=OBSERVATION, action_spec=CONTINUOUS)
    observation = 5 * torch.randn(64, 3)
    distribution = network(observation)[0]
    near, far = attraction.term(observation, distribution), repulsion.term(observation, distribution)
    assert near.min() < 1 < near.max()
    torch.testing.assert_close(far, -near.clamp(max=1.0))


def test_the_other_policy_gets_no_gradient_and_is_not_trained():
    addon = AttractionToPolicy(OBSERVATION, CONTINUOUS, actor_network_ctor=stochastic)
    network = stochastic(input_tensor_spec=OBSERVATION, action_spec=CONTINUOUS)
    observation = torch.randn(4, 3)
    addon.term(observation, network(observation)[0]).sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    assert all(p.grad is None and not p.requires_grad for p in addon._other_network.parameters())


def test_the_weight_may_be_a_schedule():
    weight = [2.0]
    addon = AttractionToPolicy(OBSERVATION, CONTINUOUS, actor_network_ctor=deterministic, weight=lambda: weight[0])
    time_step = TimeStep(step_type=torch.ones(4, dtype=torch.int32), observation=torch.randn(4, 3))
    info = addon.train_step((time_step, torch.zeros(4, 2))).info
    losses = []
    for value in (2.0, 0.5):
        weight[0] = value
        losses.append(addon.calc_loss(info).loss)
    torch.testing.assert_close(losses[0], 4 * losses[1])
    torch.testing.assert_close(losses[0], 2 * info.term)


@pytest.mark.parametrize('cls,argument,value', [(AttractionToPolicy, 'weight', -1.0),
                                                (AttractionToPolicy, 'deterministic_stddev', 0.0),
                                                (RepulsionFromPolicy, 'num_samples', 0),
                                                (RepulsionFromPolicy, 'max_divergence', 0.0)])
def test_numbers_out_of_range_are_rejected_by_name(cls, argument, value):
    with pytest.raises(ConfError, match=f'{cls.__name__}.{argument}'):
        cls(OBSERVATION, CONTINUOUS, **{argument: value})


# In an agent ---------------------------------------------------------------------------------------------------------

small = partial(ActorDistributionNetwork, fc_layer_params=(16, ))
OFF_POLICY = {
    'ddpg': (DdpgAlgorithm, partial(ActorNetwork, fc_layer_params=(16, ))),
    'td3': (Td3Algorithm, partial(ActorNetwork, fc_layer_params=(16, ))),
    'sac': (SacAlgorithm, partial(small, continuous_projection_net_ctor=squashed)),
    'mpo': (MpoAlgorithm, small),
}


def distance(agent, addon):
    """Return the mean divergence of the policy of ``agent`` from the other one at observations of the environment."""
    observation = torch.tensor([[-1.0], [1.0]])
    time_step = TimeStep(step_type=torch.ones(2, dtype=torch.int32), observation=observation,
                         reward=torch.zeros(2), prev_action=torch.zeros(2, 1))
    with torch.no_grad(), context.eval_context():
        info = agent.policy.predict_step(time_step, agent.policy.get_initial_predict_state(2)).info
        return addon.divergence(observation, info.action_distribution).mean().item()


def on_policy_agent(name, addons, environment='continuous'):
    return agents.make_agent(name, environment, policy_loss_addons=addons, learning_rate=3e-3)[0]


def off_policy_agent(name, addons):
    cls, actor = OFF_POLICY[name]
    kind = 'cls' if name in ('sac', 'mpo') else 'ctor'
    return deterministic_agents.make_agent(
        cls, policy_loss_addons=addons, optimizer=Adam(lr=3e-3),
        networks=(f'actor_network_{kind}', f'critic_network_{kind}'), **{f'actor_network_{kind}': actor})[0]


def addon_for(name, cls, **args):
    network = small if name in agents.ALGORITHMS else OFF_POLICY[name][1]
    return partial(cls, actor_network_ctor=network, **args)


@pytest.mark.parametrize('name', [*agents.ALGORITHMS, *OFF_POLICY])
def test_attraction_pulls_every_kind_of_policy_and_repulsion_does_not(name):
    make = on_policy_agent if name in agents.ALGORITHMS else off_policy_agent
    distances = {}
    for cls in (AttractionToPolicy, RepulsionFromPolicy):
        agent = make(name, [addon_for(name, cls, weight=10.0)])
        addon = agent._policy_loss_addons._addons[0]
        for p in addon._other_network.parameters():
            p.add_(torch.randn_like(p))  # not as near to the middle of the actions as a new network is
        other = [p.clone() for p in addon._other_network.parameters()]
        before = distance(agent, addon)
        for _ in range(25):
            agent.train_iter()
        distances[cls] = before, distance(agent, addon)
        assert all(torch.equal(a, b) for a, b in zip(other, addon._other_network.parameters()))
    before, after = distances[AttractionToPolicy]
    assert after < 0.7 * before
    before, after = distances[RepulsionFromPolicy]
    assert after > before


def test_attraction_holds_for_discrete_and_nested_actions():
    for environment in ('discrete', 'mixed'):
        agent = on_policy_agent('ppo', [addon_for('ppo', AttractionToPolicy)], environment)
        agent.train_iter()
        info = agent.train_step(agent._env.current_time_step(), agent.get_initial_train_state(4),
                                agent.rollout_step(agent._env.current_time_step(),
                                                   agent.get_initial_rollout_state(4)).info).info
        assert info.policy_loss_addons[0].term.shape == (4, )


def test_the_losses_of_all_terms_are_added_to_the_policy_loss():
    addons = [addon_for('ddpg', AttractionToPolicy, weight=2.0), addon_for('ddpg', RepulsionFromPolicy, weight=0.5)]
    agent = off_policy_agent('ddpg', addons)
    plain = off_policy_agent('ddpg', [])
    plain.policy.load_state_dict(agent.policy.state_dict())
    agent.unroll(8)
    experience = nest.map_structure(lambda x: x.transpose(0, 1), agent.replay_buffer.get_batch(6, 2)[0])
    state = agent.train_state_spec
    info = agent.train_sequence(experience.time_step, state, experience.rollout_info).info
    loss = agent.calc_loss(info)
    rollout_info = experience.rollout_info._replace(policy_loss_addons=())
    without = plain.calc_loss(plain.train_sequence(experience.time_step, state, rollout_info).info)
    first, second = (i.term for i in info.policy_loss_addons)
    torch.testing.assert_close(loss.loss, without.loss + 2.0 * first + 0.5 * second)
    assert set(loss.extra) == {'rl', 'policy_loss_addons'}


def test_updates_that_do_not_train_the_policy_have_no_terms():
    agent = off_policy_agent('td3', [addon_for('td3', AttractionToPolicy)])
    agent.unroll(8)
    experience = nest.map_structure(lambda x: x.transpose(0, 1), agent.replay_buffer.get_batch(6, 2)[0])
    terms = []
    for _ in range(2):
        info = agent.train_sequence(experience.time_step, agent.train_state_spec, experience.rollout_info).info
        terms.append(len(info.policy_loss_addons))
        agent.calc_loss(info)
        agent.after_update(experience.time_step, info)
    assert terms == [0, 1]


def test_an_algorithm_that_does_not_report_its_policy_is_rejected():
    agent, env = deterministic_agents.make_agent(DdpgAlgorithm, policy_loss_addons=[addon_for(
        'ddpg', AttractionToPolicy)])
    with pytest.raises(ValueError, match="'action_distribution'"):
        agent._policy_loss_addons.train_step((env.current_time_step(), None))


class _Constant(PolicyLossAddOn):
    def term(self, observation, action_distribution):
        return torch.ones(action_distribution.shape[0])


def test_a_custom_term_is_a_subclass_with_one_method():
    agent = off_policy_agent('ddpg', [partial(_Constant, weight=3.0)])
    agent.unroll(8)
    experience = nest.map_structure(lambda x: x.transpose(0, 1), agent.replay_buffer.get_batch(6, 2)[0])
    info = agent.train_sequence(experience.time_step, agent.train_state_spec, experience.rollout_info).info
    assert torch.equal(agent._policy_loss_addons.calc_loss(info.policy_loss_addons).loss, torch.full((2, 6), 3.0))


# Checkpoints and confs -----------------------------------------------------------------------------------------------


def test_the_other_policy_is_loaded_and_saved_in_checkpoints(tmp_path):
    teacher = off_policy_agent('ddpg', [])
    path = Checkpointer(str(tmp_path), alg=teacher).save(7)
    addon = addon_for('ddpg', AttractionToPolicy, checkpoint_path=path)
    agent = off_policy_agent('ddpg', [addon])
    expected = list(teacher._rl_algorithm.actor.parameters())
    other = agent._policy_loss_addons._addons[0]._other_network
    assert all(torch.equal(a, b) for a, b in zip(expected, other.parameters()))
    resumed = off_policy_agent('ddpg', [addon_for('ddpg', AttractionToPolicy)])
    resumed.load_state_dict(agent.state_dict())
    other = resumed._policy_loss_addons._addons[0]._other_network
    assert all(torch.equal(a, b) for a, b in zip(expected, other.parameters()))
    with pytest.raises(ConfError, match='checkpoint_path = .*_no_such_network'):
        off_policy_agent('ddpg', [partial(addon, checkpoint_prefix='alg._no_such_network')])


def test_the_file_of_the_other_policy_is_only_read_at_the_start_of_a_run(tmp_path, monkeypatch):
    addon = addon_for('ddpg', AttractionToPolicy, checkpoint_path=str(tmp_path / 'moved'))
    with pytest.raises(ConfError, match='AttractionToPolicy.checkpoint_path = .*moved'):
        off_policy_agent('ddpg', [addon])
    monkeypatch.setattr(algorithm, 'has_checkpoint', lambda root_dir: True)
    off_policy_agent('ddpg', [addon])


CONF = """
include 'ppo_pendulum.gin'
Agent.policy_loss_addons = [@AttractionToPolicy, @far/RepulsionFromPolicy]
AttractionToPolicy.weight = @addon/LinearScheduler()
addon/LinearScheduler.progress_type = 'percent'
addon/LinearScheduler.schedule = [(0.0, 1.0), (1.0, 0.0)]
far/RepulsionFromPolicy.weight = 0.1
far/RepulsionFromPolicy.max_divergence = 2.0
"""


def test_a_conf_attaches_policy_loss_addons(tmp_path):
    conf = tmp_path / 'addons.gin'
    conf.write_text(CONF.replace("'ppo_pendulum.gin'", repr(os.path.join(parsing.CONFS, 'ppo_pendulum.gin'))))
    with gin_utils.loaded(str(conf), [], str(tmp_path)):
        addons = gin.query_parameter('Agent.policy_loss_addons')
        terms = [addon.scoped_configurable_fn(OBSERVATION, CONTINUOUS) for addon in addons]
    assert [type(t) for t in terms] == [AttractionToPolicy, RepulsionFromPolicy]
    assert (terms[0]._weight(), terms[1]._weight(), terms[1]._max_divergence) == (1.0, 0.1, 2.0)
