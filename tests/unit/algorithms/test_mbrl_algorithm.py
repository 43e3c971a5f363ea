"""Acting by planning with a model: the cost of imagined steps, planners, and the agent around it."""
import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from helpers import offline_agents
from helpers import sac_agents

from alfx import context, nest
from alfx.algorithms.base.known_tasks import REWARDS, TERMINATIONS, pendulum_reward
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.containers import RLAlgWrapper
from alfx.algorithms.data_transformer import ObservationNormalizer, RewardScaling
from alfx.algorithms.dynamics_learning_algorithm import (DeterministicDynamicsAlgorithm, DynamicsLearningAlgorithm,
                                                         DynamicsState, StochasticDynamicsAlgorithm)
from alfx.algorithms.encoding_algorithm import EncodingAlgorithm
from alfx.algorithms.mbrl_algorithm import LatentMbrlAlgorithm, MbrlAlgorithm
from alfx.algorithms.planning_algorithm import (CEMPlanAlgorithm, ICEMPlanAlgorithm, MPPIPlanAlgorithm, PlannerState,
                                                RandomShootingAlgorithm)
from alfx.algorithms.predictive_representation_learner import PredictiveRepresentationLearner, SimpleDecoder
from alfx.algorithms.reward_learning_algorithm import FixedRewardFunction, LearnedReward, RewardEstimationAlgorithm
from alfx.data_structures import AlgStep, BatchInfo, TimeStep
from alfx.environments import suite_gym
from alfx.gin_utils import ConfError
from alfx.layers import FC
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity

OBSERVATION = TensorSpec((2, ))
ACTION = BoundedTensorSpec((1, ), minimum=-2.0, maximum=3.0)
MATRIX = torch.tensor([[1.0, 0.1], [0.0, 1.0]])
GAIN = torch.tensor([0.0, 0.1])
small = dict(population_size=16, planning_horizon=3)
PLANNERS = {'random shooting': RandomShootingAlgorithm, 'CEM': partial(CEMPlanAlgorithm, elite_size=4),
            'iCEM': partial(ICEMPlanAlgorithm, elite_size=4), 'MPPI': MPPIPlanAlgorithm}


class ExactModel(DynamicsLearningAlgorithm):
    """A cart without friction: position and velocity; member i of an ensemble adds i to the position."""

    def __init__(self, action_spec, feature_spec, num_replicas=1):
        super().__init__(DynamicsState(feature=feature_spec), action_spec, feature_spec, (4, ), num_replicas)

    def predict_step(self, time_step, state):
        feature, action = self._expanded(state.feature), self._expanded(time_step.prev_action)
        output = feature @ MATRIX.T + action * GAIN
        if self.num_replicas > 1:
            output = output + torch.stack((torch.arange(self.num_replicas), torch.zeros(self.num_replicas)), -1)
        return AlgStep(output, state._replace(feature=output), ())


def make(reward_func=lambda s, a: -(s.square().sum(-1) + 0.1 * a.square().sum(-1)), planner='CEM', num_replicas=1,
         planner_args=small, **arguments):
    return MbrlAlgorithm(OBSERVATION, ACTION, FixedRewardFunction(reward_func),
                         partial(PLANNERS[planner], **planner_args), optimizer=Adam(lr=1e-3),
                         dynamics_module_ctor=partial(ExactModel, num_replicas=num_replicas), **arguments)


class KnownModel(ExactModel):

    def train_step(self, inputs, state, rollout_info=()):
        return AlgStep((), state, ())


def test_a_known_model_has_no_loss():
    model = KnownModel(ACTION, OBSERVATION)
    step = model.train_step(first(torch.ones(3, 2)), ())
    assert model.calc_loss(step.info).loss == ()


def first(observation):
    return TimeStep(step_type=torch.zeros(len(observation), dtype=torch.int32), observation=observation)


# The cost -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('discount', [1.0, 0.5])
@pytest.mark.parametrize('particles', [1, 3])
def test_the_cost_is_the_negative_discounted_sum_of_imagined_rewards(discount, particles):
    algorithm = make(discount=discount, particles_per_replica=particles)
    observation, actions = torch.randn(2, 2), torch.randn(2, 5, 3, 1)
    cost = algorithm._calc_cost(observation, actions)
    for b in range(2):
        for p in range(5):
            state, total = observation[b], 0.0
            for h in range(3):
                state = MATRIX @ state + GAIN * actions[b, p, h]
                total += discount**h * float(-(state.square().sum() + 0.1 * actions[b, p, h].square().sum()))
            np.testing.assert_allclose(cost[b, p], -total, rtol=1e-5)


def test_each_imagined_particle_stays_with_its_member_of_the_ensemble():
    """Member i moves by i at each step: the rewards, the position, are 0, 1, 2 times (1, 2, 3) of resting carts."""
    algorithm = make(lambda s, a: s[:, 0], num_replicas=3)
    cost = algorithm._calc_cost(torch.zeros(1, 2), torch.zeros(1, 4, 3, 1))
    np.testing.assert_allclose(cost, np.full((1, 4), -(0 + 6 + 12) / 3), rtol=1e-6)


class DistanceReward(RewardEstimationAlgorithm):
    """A reward function of the distance covered in a step, along the first axis."""

    def __init__(self):
        super().__init__(train_state_spec=OBSERVATION)

    def state_at(self, observation):
        return observation

    def compute_reward(self, obs, action, state):
        return (obs - state)[:, 0], obs


@pytest.mark.parametrize('num_replicas', [1, 3])
def test_a_reward_may_depend_on_where_a_step_began(num_replicas):
    """The rewards of three steps add up to the change of position; member i of the ensemble moves by i in each."""
    algorithm = make(num_replicas=num_replicas)
    algorithm._reward_module = DistanceReward()
    cost = algorithm._calc_cost(torch.tensor([[2.0, 0.0], [5.0, 1.0]]), torch.zeros(2, 4, 3, 1))
    by_members = 0.0 if num_replicas == 1 else 3 * (0 + 1 + 2) / 3
    np.testing.assert_allclose(cost, -by_members - np.array([[0.0], [0.3]]).repeat(4, 1), rtol=1e-5, atol=1e-6)


def test_a_learned_reward_sees_both_states_of_a_transition():
    """The reward is the distance of a random step, which neither of the two observations determines."""
    torch.manual_seed(0)
    module = LearnedReward(OBSERVATION, ACTION, hidden_size=(32, ))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)

    def steps(length=3):
        observation = torch.randn(length, 64, 2)
        difference = torch.cat((torch.zeros(1, 64), (observation[1:] - observation[:-1])[..., 0]))
        return TimeStep(step_type=torch.ones(length, 64, dtype=torch.int32), observation=observation, reward=difference,
                        prev_action=torch.rand(length, 64, 1))

    for _ in range(300):
        inputs = steps()
        module.preprocess_experience(nest.map_structure(lambda x: x.transpose(0, 1), inputs), (), BatchInfo())
        loss = module.calc_loss(module.train_sequence(inputs, torch.zeros(64, 2)).info).loss
        assert loss.shape == (3, 64) and not loss[-1].any()
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    before, after = steps(2).observation
    reward, state = module.compute_reward(after, torch.rand(64, 1), module.state_at(before))
    assert (reward - (after - before)[:, 0]).abs().mean() < 0.1 and state is after
    at_once = module.train_sequence(inputs, ()).info
    for t in (1, 2):
        step = nest.map_structure(lambda x, t=t: x[t], inputs)
        torch.testing.assert_close(module.train_step(step, inputs.observation[t - 1]).info, at_once[t])
    with pytest.raises(ValueError, match=r'previous observations, of shape \[64, 2\], as state, found \(\)'):
        module.compute_reward(after, torch.rand(64, 1), ())
    with pytest.raises(ValueError, match=r'previous observations, of shape \[64, 2\], as state, found \(\)'):
        module.train_step(step)


def test_only_the_elites_of_an_ensemble_count():
    algorithm = make(lambda s, a: s[:, 0], num_replicas=3)
    model = algorithm._dynamics_module
    model._num_elites = 2
    model._holdout_error.copy_(torch.tensor([0.5, 0.1, 0.3]))  # members 1 and 2
    cost = algorithm._calc_cost(torch.zeros(1, 2), torch.zeros(1, 4, 3, 1))
    np.testing.assert_allclose(cost, np.full((1, 4), -(6 + 12) / 2), rtol=1e-6)


def test_elites_are_chosen_by_the_errors_of_all_ranks(monkeypatch):
    model = DeterministicDynamicsAlgorithm(ACTION, OBSERVATION, num_replicas=3, holdout=0.1, num_elites=1)
    monkeypatch.setattr(model, '_losses', lambda before, action, after: (
        torch.tensor([0.1, 0.2, 0.3]).expand(len(before), 3).reshape(-1), ()))
    batch = torch.zeros(4, 2), torch.zeros(4, 1), torch.zeros(4, 2)
    model._observe_holdout(*batch)
    assert model.elites.tolist() == [0]
    # another rank has 6 transitions, with errors of 0.9, 0.7 and 0.1
    others = iter((6, torch.tensor([0.9, 0.7, 0.1]) * 6))
    monkeypatch.setattr(context, 'sum_over_ranks', lambda x: x + next(others))
    model._holdout_count.zero_()
    model._observe_holdout(*batch)
    torch.testing.assert_close(model._holdout_error, torch.tensor([0.58, 0.5, 0.18]))
    assert model.elites.tolist() == [2]


def test_an_imagined_termination_stops_the_rewards_after_it():
    """A cart at 0.05 with velocity 1 is at 0.15, 0.25, 0.35; the episode ends beyond 0.2: two rewards of 1."""
    algorithm = make(lambda s, a: torch.ones(len(s)), termination_fn=lambda s: s[..., 0] > 0.2)
    cost = algorithm._calc_cost(torch.tensor([[0.05, 1.0], [-9.0, 0.0]]), torch.zeros(2, 1, 3, 1))
    np.testing.assert_allclose(cost, [[-2.0], [-3.0]])


def test_terminations_of_an_ensemble_are_functions_of_rows():
    """Member i of three moves by i: of (0, 1, 2), (0, 2, 4), (0, 3, 6) the rewards end behind 1.5."""
    algorithm = make(lambda s, a: torch.ones(len(s)), num_replicas=3, termination_fn=lambda s: s[:, 0] > 1.5)
    cost = algorithm._calc_cost(torch.zeros(1, 2), torch.zeros(1, 4, 3, 1))
    np.testing.assert_allclose(cost, np.full((1, 4), -(3 + 2 + 1) / 3), rtol=1e-6)


@pytest.mark.parametrize('planner', list(PLANNERS))
def test_with_an_exact_model_the_planner_is_nearly_optimal(planner):
    """Linear dynamics, quadratic cost: the optimal cost of H steps is that of Riccati's recursion."""
    torch.manual_seed(0)
    horizon = 8
    sizes = {'random shooting': 2000, 'CEM': 300, 'iCEM': 200, 'MPPI': 500}
    iterations = {} if planner == 'random shooting' else dict(max_iter_num=8)
    if planner in ('CEM', 'iCEM'):
        iterations.update(elite_size=20, epsilon=0.0)
    algorithm = make(planner=planner, planner_args=dict(population_size=sizes[planner], planning_horizon=horizon,
                                                        **iterations))
    start = torch.tensor([[0.5, -0.4], [-0.3, 0.2]])
    _, state = algorithm._planner_module.predict_plan(first(start), PlannerState(torch.zeros(2, horizon, 1)), 0.0)
    found = algorithm._calc_cost(start, state.prev_plan.unsqueeze(1)).squeeze(1)
    best = torch.tensor([riccati_cost(x.double().numpy(), horizon) for x in start], dtype=torch.float32)
    factor = {'random shooting': 2.0, 'MPPI': 1.6}.get(planner, 1.05)
    assert (found >= best - 1e-4).all() and (found <= factor * best).all()


def riccati_cost(start, horizon):
    """min sum_h x[h+1]' x[h+1] + 0.1 u[h]^2 by dynamic programming backwards."""
    a, b = MATRIX.double().numpy(), GAIN.double().numpy()[:, None]
    p = np.zeros((2, 2))
    for _ in range(horizon):
        q = p + np.eye(2)  # the cost of being at the next state, and from there on
        k = np.linalg.solve(0.1 * np.eye(1) + b.T @ q @ b, b.T @ q @ a)
        p = a.T @ q @ (a - b @ k)
    return start @ p @ start


# Planners -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('planner', list(PLANNERS))
def test_a_plan_starts_from_the_previous_one_or_from_the_middle(planner):
    """Plans start from the previous plan, and at the first step of an episode from the middle of the range."""
    algorithm = PLANNERS[planner](OBSERVATION, ACTION, **small)
    starts = []
    algorithm._optimizer.obtain_solution = lambda o, mean, var: (starts.append(mean), (mean, mean[:, 0, 0]))[1]
    plan = torch.tensor([[[1.0], [2.0], [3.0]], [[-1.0], [0.0], [1.0]]])
    steps = first(torch.zeros(2, 2))._replace(step_type=torch.tensor([1, 0], dtype=torch.int32))
    action, state = algorithm.predict_plan(steps, PlannerState(plan), 0.0)
    np.testing.assert_allclose(starts[0][..., 0], [[2, 3, 3], [0.5, 0.5, 0.5]])
    np.testing.assert_allclose(action, [[2.0], [0.5]])
    assert state.prev_plan is starts[0]


def test_epsilon_greedy_is_the_fraction_of_random_actions():
    algorithm = RandomShootingAlgorithm(OBSERVATION, ACTION, **small)
    algorithm._optimizer.obtain_solution = lambda o, mean, var: (mean, mean[:, 0, 0])
    torch.manual_seed(0)
    action, _ = algorithm.predict_plan(first(torch.zeros(4000, 2)), PlannerState(torch.zeros(4000, 3, 1)), 0.25)
    random = action[action != 0.5]
    np.testing.assert_allclose(len(random) / 4000, 0.25, atol=0.03)
    assert random.min() < -1.9 and random.max() > 2.9 and action.dtype == torch.float32


def test_scalar_var_is_the_initial_variance_and_bounds_may_be_narrower():
    algorithm = CEMPlanAlgorithm(OBSERVATION, ACTION, population_size=500, elite_size=500, planning_horizon=2, tau=1.0,
                                 max_iter_num=1, scalar_var=0.04, lower_bound=-1.0, upper_bound=1.0, epsilon=0.0)
    candidates = []
    algorithm.set_action_sequence_cost_func(lambda o, a: (candidates.append(a), torch.zeros(a.shape[:2]))[1])
    torch.manual_seed(0)
    algorithm.predict_plan(first(torch.zeros(3, 2)), PlannerState(torch.zeros(3, 2, 1)), 0.0)
    np.testing.assert_allclose(candidates[0].var(), 0.04, rtol=0.1)
    assert candidates[0].shape == (3, 500, 2, 1) and candidates[0].abs().max() <= 1.0


@pytest.mark.parametrize('action_spec, message', [
    (BoundedTensorSpec((), torch.int64, minimum=0, maximum=2), 'discrete actions.*tree search'),
    (TensorSpec((1, )), 'unbounded'), ([ACTION, ACTION], 'nested'),
    (BoundedTensorSpec((1, ), minimum=-np.inf, maximum=np.inf), 'unbounded.*upper_bound')])
@pytest.mark.parametrize('planner', list(PLANNERS))
def test_a_planner_rejects_actions_that_it_cannot_plan(planner, action_spec, message):
    with pytest.raises(SpecError, match=message):
        PLANNERS[planner](OBSERVATION, action_spec, **small)


@pytest.mark.parametrize('planner, arguments, message', [
    ('CEM', dict(elite_size=17), r'CEMPlanAlgorithm.elite_size .*\[1, 16\].*17'), ('CEM', dict(tau=0.0), 'tau'),
    ('CEM', dict(planning_horizon=0), 'planning_horizon'), ('MPPI', dict(temperature=0.0), 'temperature'),
    ('random shooting', dict(population_size=0), 'population_size'), ('iCEM', dict(keep_fraction=2.0), 'keep_fraction'),
    ('random shooting', dict(lower_bound=2.0, upper_bound=1.0), 'lower_bound.*above the upper bound')])
def test_arguments_of_planners_that_are_out_of_range_are_rejected(planner, arguments, message):
    with pytest.raises(ConfError, match=message):
        PLANNERS[planner](OBSERVATION, ACTION, **{**small, **arguments})


def test_a_planner_without_a_cost_raises():
    with pytest.raises(RuntimeError, match='set_action_sequence_cost_func'):
        RandomShootingAlgorithm(OBSERVATION, ACTION, **small).predict_plan(
            first(torch.zeros(1, 2)), PlannerState(torch.zeros(1, 3, 1)), 0.0)


# Rewards and terminations -------------------------------------------------------------------------------------


def test_the_pendulum_reward_matches_the_environment_in_action_units():
    env = suite_gym.load('Pendulum-v1')
    time_step = env.reset()
    for i in range(20):
        before, action = time_step.observation, torch.tensor([[np.sin(i)]], dtype=torch.float32)
        time_step = env.step(action)
        np.testing.assert_allclose(pendulum_reward(before, action), time_step.reward, rtol=1e-4)


@pytest.mark.parametrize('name, task', [('reacher', 'Reacher-v5'), ('inverted_pendulum', 'InvertedPendulum-v5'),
                                        ('pendulum', 'Pendulum-v1')])
def test_rewards_of_imagined_steps_match_gymnasium(name, task):
    gymnasium = pytest.importorskip('gymnasium')
    if task != 'Pendulum-v1':
        pytest.importorskip('mujoco')
    env = gymnasium.make(task)
    env.action_space.seed(0)
    module = FixedRewardFunction(name)
    scale = torch.as_tensor(env.action_space.high)  # actions are in [-1, 1]
    observation, _ = env.reset(seed=0)
    state = module.state_at(torch.as_tensor(observation).unsqueeze(0))
    for _ in range(100):
        action = env.action_space.sample()
        observation, reward, *_ = env.step(action)
        found, state = module.compute_reward(torch.as_tensor(observation).unsqueeze(0),
                                             (torch.as_tensor(action) / scale).unsqueeze(0), state)
        np.testing.assert_allclose(found, [reward], atol=1e-3)


@pytest.mark.parametrize('num_replicas', [1, 3])
def test_a_given_reward_may_depend_on_the_observation_before(num_replicas):
    """Member i moves by i in each of three steps, from 2: it begins them at 2, 2 + i and 2 + 2 i."""
    algorithm = make(num_replicas=num_replicas)
    algorithm._reward_module = FixedRewardFunction(lambda s, a: s[:, 0], before_step=True)
    cost = algorithm._calc_cost(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 4, 3, 1))
    np.testing.assert_allclose(cost, np.full((1, 4), -6.0 if num_replicas == 1 else -9.0), rtol=1e-6)
    with pytest.raises(ValueError, match='observation before the action as state'):
        FixedRewardFunction('pendulum').compute_reward(torch.zeros(1, 3), torch.zeros(1, 1), ())


@pytest.mark.parametrize('reward, ends, rejects', [
    (FixedRewardFunction(lambda s, a: s.sum(-1)), 'none', True), (DistanceReward(), 'hopper', True),
    (DistanceReward(), 'none', False)])
def test_given_functions_of_observations_reject_their_transformers(reward, ends, rejects):
    algorithm = MbrlAlgorithm(OBSERVATION, ACTION, reward, partial(CEMPlanAlgorithm, elite_size=4, **small),
                              optimizer=Adam(lr=1e-3), termination_fn=ends)
    config = TrainerConfig(root_dir='', mini_batch_length=2, whole_replay_buffer_training=False)
    config.data_transformer = RewardScaling(0.1, OBSERVATION)
    algorithm.check_config(config)
    config.data_transformer = ObservationNormalizer(OBSERVATION)
    with pytest.raises(ConfError, match='creates ObservationNormalizer') if rejects else contextlib.nullcontext():
        algorithm.check_config(config)


def test_a_planner_can_keep_the_cart_in_the_middle():
    observation = torch.tensor([[0.0, 0.1, 0.0, 0.0], [-0.5, 0.1, 0.0, 0.0], [0.0, 0.3, 0.0, 0.0]])
    found = REWARDS['centred_inverted_pendulum'](observation, torch.zeros(3, 1))
    np.testing.assert_allclose(found, [1.0, 0.975, 0.0], rtol=1e-6)


@pytest.mark.parametrize('name, task', [('hopper', 'Hopper-v5'), ('walker', 'Walker2d-v5'),
                                        ('inverted_pendulum', 'InvertedPendulum-v5')])
def test_known_terminations_match_gymnasium(name, task):
    gymnasium = pytest.importorskip('gymnasium')
    pytest.importorskip('mujoco')
    env = gymnasium.make(task)
    env.action_space.seed(0)
    ended = 0
    for seed in range(5):
        env.reset(seed=seed)
        terminated = False
        for _ in range(200):
            observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
            seen = torch.as_tensor(observation, dtype=torch.float64).unsqueeze(0)
            assert bool(TERMINATIONS[name](seen)) == terminated
            if terminated:
                ended += 1
                break
    assert ended == 5


def test_bad_rewards_and_terminations_are_rejected_before_training():
    with pytest.raises(ConfError, match="reward_func must be.*'pendulum'(.|\n)*did you mean 'pendulum'"):
        FixedRewardFunction('pendulom')
    with pytest.raises(ConfError, match='termination_fn'):
        make(termination_fn='hoper')
    with pytest.raises(ValueError, match=r'reward_func: expected rewards of shape \[N\] = \[32\], found shape \[1\]'):
        make(lambda s, a: torch.ones(1)).predict_step(first(torch.zeros(2, 2)), make().get_initial_predict_state(2))
    with pytest.raises(ConfError, match='planner_optimizer has no parameters'):
        make(planner_optimizer=Adam())


# In an agent --------------------------------------------------------------------------------------------------

models = {
    'deterministic': partial(DeterministicDynamicsAlgorithm, hidden_size=(16, )),
    'deterministic ensemble': partial(DeterministicDynamicsAlgorithm, hidden_size=(16, ), num_replicas=3),
    'stochastic ensemble': partial(StochasticDynamicsAlgorithm, hidden_size=(16, ), num_replicas=3, num_elites=2,
                                   holdout=0.2),
}


def make_agent(model='deterministic', agent_args=None, **arguments):
    algorithm = partial(MbrlAlgorithm, dynamics_module_ctor=models.get(model), **{**dict(
        reward_module=partial(LearnedReward, hidden_size=(16, )),
        planner_module_ctor=partial(CEMPlanAlgorithm, elite_size=4, **small)), **arguments})

    return sac_agents.make_agent('continuous', without_networks(algorithm), agent_args=agent_args)


def without_networks(algorithm):
    """Return a constructor that ignores the networks of an actor and a critic."""
    return lambda actor_network_cls, critic_network_cls, **kwargs: algorithm(**kwargs)


@pytest.mark.parametrize('model', list(models))
def test_an_agent_learns_its_model_and_its_reward(model):
    agent, _ = make_agent(model)
    before = {name: x.clone() for name, x in agent.named_parameters()}
    for _ in range(12):
        agent.train_iter()
    for name, x in agent.named_parameters():
        assert not torch.equal(before[name], x), name
    assert agent.capabilities.traceable_update and agent.capabilities.bootstraps_sequences
    if model == 'stochastic ensemble':
        assert (agent.policy._dynamics_module._holdout_error != 0).all()


def test_a_model_can_be_learned_from_a_dataset_only(tmp_path):
    algorithm = partial(MbrlAlgorithm, dynamics_module_ctor=models['stochastic ensemble'],
                        reward_module=partial(LearnedReward, hidden_size=(16, )),
                        planner_module_ctor=partial(CEMPlanAlgorithm, elite_size=4, **small))
    agent = offline_agents.make_agent(algorithm, offline_agents.record(tmp_path / 'data'))
    before = {name: x.clone() for name, x in agent.named_parameters()}
    for _ in range(6):
        agent.train_iter()
    assert all(not torch.equal(before[name], x) for name, x in agent.named_parameters())
    assert (agent.policy._dynamics_module._holdout_error != 0).all()


def test_parts_that_change_the_observation_are_rejected():
    learner = partial(EncodingAlgorithm, encoder_cls=partial(EncodingNetwork, fc_layer_params=(4, )))
    with pytest.raises(ConfError, match='representation_learner_cls = EncodingAlgorithm(.|\n)*LatentMbrlAlgorithm'):
        make_agent(agent_args=dict(representation_learner_cls=learner))


# In a latent space --------------------------------------------------------------------------------------------


def make_latent(observation_spec):
    return LatentMbrlAlgorithm(observation_spec, ACTION, partial(CEMPlanAlgorithm, elite_size=4, **small))


def latent_agent(**learner_args):
    decoder = partial(EncodingNetwork, fc_layer_params=(8, ), last_layer_size=1, last_activation=identity,
                      output_tensor_spec=TensorSpec(()))
    learner = partial(PredictiveRepresentationLearner, **{**dict(
        num_unroll_steps=2, decoder_ctor=partial(SimpleDecoder, decoder_net_ctor=decoder, target_field='reward'),
        encoding_net_ctor=partial(EncodingNetwork, fc_layer_params=(6, )),
        dynamics_net_ctor=partial(LSTMEncodingNetwork, hidden_size=(6, ))), **learner_args})
    algorithm = partial(LatentMbrlAlgorithm, planner_module_ctor=partial(CEMPlanAlgorithm, elite_size=4, **small))

    agent_args = {} if learner_args.get('absent') else dict(representation_learner_cls=learner)
    return sac_agents.make_agent('continuous', without_networks(algorithm), agent_args=agent_args)


def test_a_latent_planner_is_connected_and_maximizes_predicted_rewards():
    agent, _ = latent_agent()
    learner, algorithm = agent._representation_learner, agent.policy
    for _ in range(3):
        agent.train_iter()
    latent, actions = torch.randn(2, 6), torch.randn(2, 5, 3, 1)
    cost = algorithm._calc_cost(latent, actions)
    for b in range(2):
        for p in range(5):
            rewards = learner.predict_multi_step(latent[b:b + 1], actions[b, p:p + 1], 'reward')
            assert rewards.shape == (1, 4)
            torch.testing.assert_close(cost[b, p], -rewards[0, 1:].sum(), rtol=1e-4, atol=1e-5)
    assert not list(algorithm.parameters()), 'the representation belongs to the agent'


def test_a_latent_planner_in_a_wrapper_is_connected_as_well():
    algorithm = make_latent(OBSERVATION)
    learner = latent_agent()[0]._representation_learner
    RLAlgWrapper(OBSERVATION, ACTION, algorithm).on_parts_built({'repr': learner})
    assert algorithm._representation == (learner, )


@pytest.mark.parametrize('learner_args, message', [
    (dict(absent=True), 'found none(.|\n)*@PredictiveRepresentationLearner'),
    (dict(decoder_ctor=partial(SimpleDecoder, decoder_net_ctor=partial(EncodingNetwork, fc_layer_params=(2, )),
                               target_field='observation')), "decoder_ctor creates no decoder of 'reward'"),
    (dict(encoding_net_ctor=partial(LSTMEncodingNetwork, hidden_size=(6, ))),
     'dynamics_net_ctor.*starts with the state of the encoder'),
    (dict(postprocessor=FC(6, 3)), 'postprocessor')])
def test_a_latent_planner_rejects_unsuitable_representations(learner_args, message):
    with pytest.raises(ConfError, match=message):
        latent_agent(**learner_args)
