"""TracAlgorithm: the distance of policies, the bound on an update, and what every algorithm owes."""
import copy
import inspect
import math
from functools import partial

import pytest
import torch
import torch.distributions as td
from helpers import agents, sac_agents
from helpers.agents import ENVIRONMENTS, make_agent
from helpers.learning import greedy_return, trains_until

from alfx import context, nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.sarsa_algorithm import SarsaAlgorithm
from alfx.algorithms.trac_algorithm import TracAlgorithm, policy_distance
from alfx.data_structures import StepType
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork, TruncatedProjectionNetwork
from alfx.optimizers import Adam
from alfx.optimizers.trusted_updater import TrustedUpdater
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils

INNER = {
    'actor-critic': partial(ActorCriticAlgorithm, loss_class=partial(ActorCriticLoss, entropy_regularization=0.01)),
    'ppo': partial(PPOAlgorithm, loss_class=partial(PPOLoss, entropy_regularization=0.01)),
}


@pytest.fixture(autouse=True)
def fresh_context():
    context.reset()
    yield
    context.reset()


def make(monkeypatch, inner, environment, clip=0.01, **arguments):
    """Return an agent with a ``TracAlgorithm`` around the algorithm ``inner``."""

    def trac(actor_network_ctor, value_network_ctor, **kwargs):
        ac = partial(INNER[inner], actor_network_ctor=actor_network_ctor, value_network_ctor=value_network_ctor)
        return TracAlgorithm(ac_algorithm_cls=ac, action_dist_clip_per_dim=clip, **kwargs)

    monkeypatch.setitem(agents.ALGORITHMS, 'trac', trac)
    return make_agent('trac', environment, **arguments)


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


every_environment = pytest.mark.parametrize('environment', list(ENVIRONMENTS))
every_inner = pytest.mark.parametrize('inner', list(INNER))


# Distances -------------------------------------------------------------------------------------------------------


def test_the_categorical_distance_uses_normalized_logits():
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    found = policy_distance(dist_utils.Categorical(logits=a), dist_utils.Categorical(logits=b))
    for i in range(4):
        la = [float(x) - math.log(sum(math.exp(float(y)) for y in a[i])) for x in a[i]]
        lb = [float(x) - math.log(sum(math.exp(float(y)) for y in b[i])) for x in b[i]]
        assert float(found[i]) == pytest.approx(sum((x - y)**2 for x, y in zip(la, lb)), rel=1e-4)
    shifted = policy_distance(dist_utils.Categorical(logits=a), dist_utils.Categorical(logits=a + 7.0))
    torch.testing.assert_close(shifted, torch.zeros(4), atol=1e-10, rtol=0)


def test_the_distance_sees_changes_near_determinism_that_kl_misses():
    a, b = (dist_utils.Categorical(logits=torch.tensor([[0.0, x]])) for x in (-20.0, -30.0))
    assert float(td.kl_divergence(a, b) + td.kl_divergence(b, a)) < 1e-6
    assert float(policy_distance(a, b)) == pytest.approx(100.0, rel=1e-4)  # (-20 - -30)^2


def test_the_distance_of_normal_policies_is_the_symmetric_divergence():
    # N(0, 1) and N(1, 2): log 2 + (1 + 1) / 8 - 1/2 and -log 2 + (4 + 1) / 2 - 1/2, in sum 1.75
    a = dist_utils.DiagMultivariateNormal(torch.zeros(1, 1), torch.ones(1, 1))
    b = dist_utils.DiagMultivariateNormal(torch.ones(1, 1), 2 * torch.ones(1, 1))
    assert float(policy_distance(a, b)) == pytest.approx(1.75, abs=1e-5)
    assert float(policy_distance(b, a)) == pytest.approx(1.75, abs=1e-5)
    squash = [dist_utils.StableTanh()]
    squashed = (dist_utils.TransformedDistribution(d, squash) for d in (a, b))
    assert float(policy_distance(*squashed)) == pytest.approx(1.75, abs=1e-5)


def test_distances_of_components_add_up():
    a, b = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    together = policy_distance(*(dist_utils.DiagMultivariateCategorical(x, [3, 2]) for x in (a, b)))
    apart = (policy_distance(*(dist_utils.Categorical(logits=x[:, 0]) for x in (a, b)))
             + policy_distance(*(dist_utils.Categorical(logits=x[:, 1, :2]) for x in (a, b))))
    torch.testing.assert_close(together, apart)


def test_deterministic_policies_differ_by_their_action_distance():
    assert policy_distance(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])).tolist() == [5.0]


@pytest.mark.parametrize('dist', [
    dist_utils.Categorical(logits=torch.randn(3, 4)),
    dist_utils.DiagMultivariateBeta(torch.rand(3, 2) + 1, torch.ones(3, 2)),
    dist_utils.DiagMultivariateCauchy(torch.randn(3, 2), torch.ones(3, 2)),
    td.OneHotCategorical(logits=torch.randn(3, 4))], ids=lambda d: type(d).__name__)
def test_a_policy_has_no_distance_from_itself(dist):
    torch.testing.assert_close(policy_distance(dist, dist), torch.zeros(3), atol=1e-6, rtol=0)


# The bound -------------------------------------------------------------------------------------------------------


def observed_changes(agent, monkeypatch):
    """Return a list to which the distance after each shrunk update is added."""
    trac, changes = agent.policy, []
    original = trac._ac_algorithm.after_update

    def after_update(root_inputs, info):
        changes.append(current(root_inputs))
        original(root_inputs, info)

    def remember(experience):
        seen['experience'] = experience
        return change(experience)

    seen, change = {}, trac._change
    monkeypatch.setattr(trac, '_change', remember)
    monkeypatch.setattr(trac._ac_algorithm, 'after_update', after_update)

    def current(root_inputs):
        with torch.no_grad():
            return [float(x) for x in nest.flatten(change(seen['experience']))]

    return changes


@every_inner
@every_environment
def test_no_update_changes_the_policy_more_than_the_bound(inner, environment, monkeypatch):
    agent, _ = make(monkeypatch, inner, environment, clip=1e-3, learning_rate=0.1)
    changes = observed_changes(agent, monkeypatch)
    for _ in range(3):
        agent.train_iter()
    bounds = nest.flatten(agent.policy._action_dist_clips)
    assert changes and all(c <= b for change in changes for c, b in zip(change, bounds))
    assert all(c > 0 for change in changes for c in change)


def test_bounds_count_components_and_categories():
    specs = dict(move=BoundedTensorSpec((), torch.int64, 2, 6), arm=BoundedTensorSpec((2, 3), torch.float32, -1., 1.),
                 buttons=BoundedTensorSpec((2, ), torch.int64, 0, 2))
    trac = TracAlgorithm(TensorSpec((3, )), specs, action_dist_clip_per_dim=0.5)
    assert trac._action_dist_clips == dict(move=2.5, arm=3.0, buttons=3.0)


@every_inner
def test_with_a_wide_bound_it_trains_as_the_algorithm_inside(inner, monkeypatch):
    results = []
    for wrapped in (True, False):
        agent, _ = (make(monkeypatch, inner, 'continuous', clip=1e9) if wrapped else make_agent(inner, 'continuous'))
        for _ in range(3):
            agent.train_iter()
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_shrunk_update_has_the_direction_of_the_whole_one(monkeypatch):
    def one_update(clip):
        agent, _ = make(monkeypatch, 'actor-critic', 'discrete', clip=clip, learning_rate=0.05)
        before = torch.cat([p.detach().flatten() for p in agent.policy._policy_module.parameters()])
        agent.train_iter()
        after = torch.cat([p.detach().flatten() for p in agent.policy._policy_module.parameters()])
        value = [p.detach().clone() for p in agent.policy._ac_algorithm._value_network.parameters()]
        return after - before, value

    unbounded, value = one_update(1e9)
    shrunk, same_value = one_update(1e-3)
    assert float(shrunk.norm()) < 0.5 * float(unbounded.norm())
    assert float(torch.cosine_similarity(shrunk, unbounded, dim=0)) == pytest.approx(1.0, abs=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(value, same_value))  # the value network is left as it is


def test_steps_at_which_an_episode_ended_do_not_count(monkeypatch):
    agent, _ = make(monkeypatch, 'actor-critic', 'discrete')
    experience = agent.unroll(6)  # episodes of 5 steps
    trac = agent.policy
    info = agent.learner.losses.train_info(experience).rl
    assert experience.time_step.is_last().any()
    seen = []
    monkeypatch.setattr(trac, '_current_policy', lambda e: e.action_param._like(
        e.action_param._param + 100.0 * (e.step_type == StepType.LAST).unsqueeze(-1) * torch.tensor([1.0, 0.0])))
    monkeypatch.setattr(trac, '_trusted_updater', None)
    trac.calc_loss(info)
    monkeypatch.setattr(trac._trusted_updater, 'adjust_step', lambda f, bound: (seen.append(float(f())), 0))
    trac.after_update(experience.time_step, info)
    assert seen == [0.0]


# As part of a run ------------------------------------------------------------------------------------------------


@every_inner
@every_environment
def test_same_seed_gives_the_same_parameters(inner, environment, monkeypatch):
    results = []
    for _ in range(2):
        agent, _ = make(monkeypatch, inner, environment, seed=3)
        for _ in range(2):
            agent.train_iter()
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@every_inner
@every_environment
def test_steps_do_not_change_their_inputs(inner, environment, monkeypatch):
    agent, env = make(monkeypatch, inner, environment)
    time_step = env.current_time_step()
    for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                          (agent.predict_step, agent.get_initial_predict_state(4))):
        copies = nest.map_structure(torch.clone, (time_step, state))
        method(time_step, state)
        for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state))):
            assert torch.equal(old, new)


@every_inner
@every_environment
def test_the_rollout_resumes_exactly_from_a_checkpoint(inner, environment, monkeypatch):
    agent, env = make(monkeypatch, inner, environment)
    agent.train_iter()
    tensors = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x,
                                 (dict(agent.state_dict()), agent.learner.state_dict()))
    random_state, env_state = torch.get_rng_state(), env.get_state()
    agent.train_iter()
    copy, copy_env = make(monkeypatch, inner, environment, seed=5)
    copy_env.set_state(env_state)
    copy.load_state_dict(tensors[0])
    copy.learner.load_state_dict(tensors[1])
    torch.set_rng_state(random_state)
    copy.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(copy)))


@every_inner
@every_environment
def test_one_environment_and_one_step_are_enough(inner, environment, monkeypatch):
    agent, _ = make(monkeypatch, inner, environment, batch_size=1, unroll_length=2 if environment == 'recurrent' else 1)
    for _ in range(6):
        agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())


@every_inner
def test_each_parameter_has_one_owner_and_one_name(inner, monkeypatch):
    agent, _ = make(monkeypatch, inner, 'discrete')
    names = [name for name, _ in agent.named_parameters(remove_duplicate=False)]
    owned = [p for optimizer in agent.optimizers() for group in optimizer.param_groups for p in group['params']]
    assert len(names) == len({id(p) for p in agent.parameters()}) == len(owned) == len({id(p) for p in owned})
    assert agent.policy._ac_algorithm.path == 'rl.ac'


def test_training_recomputes_the_policy_with_the_rollout_states(monkeypatch):
    agent, _ = make(monkeypatch, 'actor-critic', 'recurrent')
    agent.train_iter()  # so that the next unroll begins in the middle of an episode
    experience = agent.unroll(6)
    info = experience.rollout_info.rl
    trac = agent.policy
    trac.calc_loss(info)
    changes = []
    monkeypatch.setattr(trac._trusted_updater, 'adjust_step', lambda f, bound: changes.append(f()) or (0, 0))
    trac.after_update(experience.time_step, info)
    assert float(changes[0].detach()) == pytest.approx(0.0, abs=1e-9)  # the same parameters, hence the same policy


def test_reward_weights_reach_the_algorithm_inside(monkeypatch):
    agent, _ = make(monkeypatch, 'actor-critic', 'vector reward')
    agent.policy.set_reward_weights(torch.tensor([1.0, 2.0, 3.0]))
    assert agent.policy._ac_algorithm.reward_weights.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize('environment, arguments', [('discrete', {}), ('mixed', {}), ('continuous', {}),
                                                    ('continuous', {'policy_update_period': 2})])
def test_updates_of_sac_are_shrunk(environment, arguments):
    def trac(actor_network_cls, critic_network_cls, q_network_cls, **kwargs):
        networks = {'actor_network_cls': actor_network_cls, 'critic_network_cls': critic_network_cls,
                    'q_network_cls': q_network_cls}
        return TracAlgorithm(ac_algorithm_cls=partial(SacAlgorithm, **networks, **arguments), **kwargs)

    trac.__signature__ = inspect.signature(SacAlgorithm)
    agent, env = sac_agents.make_agent(environment, trac, optimizer=Adam(lr=0.1))
    shrinks, adjust = [], TrustedUpdater.adjust_step
    with pytest.MonkeyPatch.context() as patch:
        def counted(*args):
            result = adjust(*args)
            shrinks.append(result[1])
            return result

        patch.setattr(TrustedUpdater, 'adjust_step', counted)
        for _ in range(4):
            agent.train_iter()
    assert len(shrinks) == 8 // arguments.get('policy_update_period', 1) and max(shrinks) > 0
    owner, ac = agent.policy._policy_module, agent.policy._ac_algorithm
    assert owner is (ac if environment != 'continuous' else ac._actor_network)


def test_a_smoothed_actor_is_rejected():
    with pytest.raises(ConfError, match='SarsaAlgorithm.use_smoothed_actor = True'):
        TracAlgorithm(TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1., 1.), ac_algorithm_cls=partial(
            SarsaAlgorithm, use_smoothed_actor=True, actor_network_ctor=ActorDistributionNetwork,
            critic_network_ctor=CriticNetwork))


@pytest.mark.parametrize('clip', [0.0, -1.0, 'x'])
def test_a_bound_has_to_be_above_0(clip):
    with pytest.raises(ConfError, match='action_dist_clip_per_dim'):
        TracAlgorithm(TensorSpec((3, )), BoundedTensorSpec((), torch.int64, 0, 1), action_dist_clip_per_dim=clip)


def test_a_policy_without_a_distance_is_rejected_at_construction():
    def algorithm(head):
        actor = partial(ActorDistributionNetwork, continuous_projection_net_ctor=head)
        return TracAlgorithm(TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1., 1.),
                             ac_algorithm_cls=partial(ActorCriticAlgorithm, actor_network_ctor=actor))

    algorithm(partial(NormalProjectionNetwork, scale_distribution=True))
    algorithm(TruncatedProjectionNetwork)
    with pytest.raises(SpecError, match='TruncatedCauchy'):
        algorithm(partial(TruncatedProjectionNetwork, dist_ctor=dist_utils.TruncatedCauchy))


@every_inner
@pytest.mark.parametrize('environment', ['discrete', 'continuous'])
def test_the_greedy_policy_of_a_tiny_environment_is_optimal(inner, environment, monkeypatch):
    agent, env = make(monkeypatch, inner, environment, batch_size=16, unroll_length=10, mini_batch_size=80, clip=0.05,
                      learning_rate=3e-2)
    evaluation_env = copy.deepcopy(env)
    # 4 rewarded steps; a policy that ignores the signal gets half of it at most
    optimal = (0.97 if environment == 'discrete' else 0.85) * 4
    assert trains_until(lambda: greedy_return(agent, evaluation_env) >= optimal, agent.train_iter, 80, interval=20)
