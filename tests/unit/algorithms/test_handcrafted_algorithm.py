"""Policies written by hand."""
from functools import partial

import pytest
import torch

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.handcrafted_algorithm import (HandcraftedAlgorithm, RandomAlgorithm, SimpleCarlaAlgorithm,
                                                      WaypointAlgorithm)
from alfx.data_structures import AlgStep, LossInfo, TimeStep
from alfx.environments.suite_unittest import ActionType, MixedPolicyUnittestEnv, PolicyUnittestEnv
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

NESTED = {'gear': BoundedTensorSpec((), torch.int64, -1, 2),
          'thrust': [BoundedTensorSpec((2, ), torch.float32, [-1.0, 10.0], [1.0, 20.0])]}


def step(observation):
    return TimeStep(step_type=torch.ones(nest.get_nest_batch_size(observation), dtype=torch.int32),
                    observation=observation)


class AlwaysTwo(HandcraftedAlgorithm):
    def _policy_func(self, observation):
        return torch.full((observation.shape[0], ), 2)


class Representation(Algorithm):
    """A representation with one parameter, which learns to be 1."""

    def __init__(self, observation_spec, action_spec=None, reward_spec=None, config=None, debug_summaries=False):
        super().__init__(debug_summaries=debug_summaries, name='Representation')
        self.output_spec = observation_spec
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def rollout_step(self, inputs, state):
        return AlgStep(output=inputs.observation)

    predict_step = rollout_step

    def train_step(self, inputs, state, rollout_info=None):
        loss = (self.weight - 1)**2 + torch.zeros(inputs.step_type.shape)
        return AlgStep(output=inputs.observation, info=LossInfo(loss=loss))


def make_agent(rl_algorithm_cls, environment=PolicyUnittestEnv, **agent_args):
    torch.manual_seed(0)
    context.reset()
    env = environment(batch_size=3, episode_length=5)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=5, mini_batch_length=2,
                           num_updates_per_train_iter=2, whole_replay_buffer_training=False, clear_replay_buffer=False)
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=rl_algorithm_cls, optimizer=Adam(lr=0.1), **agent_args)
    agent.set_path('')
    agent.finalize()
    return agent


def test_random_actions_cover_the_bounds_of_each_action_of_a_nest():
    algorithm = RandomAlgorithm(TensorSpec((3, )), NESTED)
    action = algorithm.rollout_step(step(torch.zeros(4000, 3))).output
    assert action['gear'].dtype == torch.int64 and action['thrust'][0].shape == (4000, 2)
    counts = torch.bincount(action['gear'] + 1, minlength=4)
    assert len(counts) == 4 and (counts - 1000).abs().max() < 130  # five standard deviations
    low, high = action['thrust'][0].min(0).values, action['thrust'][0].max(0).values
    torch.testing.assert_close(low, torch.tensor([-1.0, 10.0]), atol=0.05, rtol=0)
    torch.testing.assert_close(high, torch.tensor([1.0, 20.0]), atol=0.05, rtol=0)
    torch.testing.assert_close(action['thrust'][0].mean(0), torch.tensor([0.0, 15.0]), atol=0.25, rtol=0)


def test_random_actions_follow_the_seed_and_are_random_in_evaluation_too():
    algorithm = RandomAlgorithm(TensorSpec(()), NESTED)
    actions = []
    for _ in range(2):
        torch.manual_seed(5)
        actions.append(algorithm.predict_step(step(torch.zeros(6))).output['thrust'][0])
    assert torch.equal(*actions) and actions[0].std() > 0
    assert algorithm.predict_step(step(torch.zeros(1))).output['gear'].shape == (1, )


@pytest.mark.parametrize('spec', [TensorSpec((2, )), BoundedTensorSpec((), torch.float32, -float('inf'), 1)])
def test_random_actions_without_bounds_are_rejected_by_name(spec):
    with pytest.raises(SpecError, match='the action at 1: expected a BoundedTensorSpec with finite bounds'):
        RandomAlgorithm(TensorSpec(()), (BoundedTensorSpec((), torch.int64, 0, 1), spec))


@pytest.mark.parametrize('environment', [
    PolicyUnittestEnv, partial(PolicyUnittestEnv, action_type=ActionType.Continuous), MixedPolicyUnittestEnv,
    partial(PolicyUnittestEnv, reward_dim=2)])
def test_an_agent_with_a_random_policy_collects_without_training(environment):
    agent = make_agent(RandomAlgorithm, environment)
    for _ in range(60):  # more updates than go before a record
        agent.train_iter()
    assert agent.replay_buffer.total_size == 60 * 3 * 4
    assert not list(agent.parameters())


def test_another_part_of_the_agent_learns_while_the_policy_is_random():
    agent = make_agent(RandomAlgorithm, representation_learner_cls=Representation)
    for _ in range(40):
        agent.train_iter()
    assert agent._representation_learner.weight.item() == pytest.approx(1, abs=0.1)


def test_a_handcrafted_policy_is_a_complete_algorithm():
    context.reset()
    env = PolicyUnittestEnv(batch_size=2, episode_length=5)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=AlwaysTwo, unroll_length=4, mini_batch_size=4)
    algorithm = AlwaysTwo(env.observation_spec(), BoundedTensorSpec((), torch.int64, 0, 2), env=env, config=config)
    algorithm.finalize()
    assert algorithm.on_policy is False
    assert algorithm.predict_step(step(torch.zeros(2, 1))).output.tolist() == [2, 2]
    with context.rollout_context():
        assert algorithm.rollout_step(step(torch.zeros(2, 1))).output.tolist() == [2, 2]
    loss = algorithm.calc_loss(algorithm.train_sequence(step(torch.zeros(2, 1)), (), ()).info)
    assert loss.loss.tolist() == [0, 0]
    env = PolicyUnittestEnv(batch_size=2, episode_length=5)
    env.reset()
    root = RandomAlgorithm(env.observation_spec(), env.action_spec(), env=env, config=config)
    root.finalize()
    assert [root.train_iter() for _ in range(2)] == [0, 0]
    assert int(root.get_step_metrics()[0].result()) > 0


def test_a_class_without_a_policy_function_names_it():
    with pytest.raises(NotImplementedError, match='HandcraftedAlgorithm._policy_func'):
        HandcraftedAlgorithm(TensorSpec(()), NESTED).predict_step(step(torch.zeros(1)))


# Carla -----------------------------------------------------------------------------------------------------------

CARLA_ACTION = BoundedTensorSpec((3, ), torch.float32, [-1, -1, 0], [1, 1, 1])
CARLA_OBSERVATION = {'goal': TensorSpec((3, )), 'speed': TensorSpec(())}


def drive(*goals, **args):
    algorithm = SimpleCarlaAlgorithm(CARLA_OBSERVATION, CARLA_ACTION, **args)
    observation = {'goal': torch.tensor(goals), 'speed': torch.zeros(len(goals))}
    return algorithm.predict_step(step(observation)).output


def test_the_vehicle_slows_down_and_stops_at_the_goal():
    # 100 m ahead; 25 m ahead: half of 50; 10 m at distance_to_decelerate 50: 0.2; 0.9 m: stands; height does not count
    action = drive([100., 0, 0], [25., 0, 0], [10., 0, 30.], [0.9, 0, 0])
    torch.testing.assert_close(action[:, 0], torch.tensor([1.0, 0.5, 0.2, 0.0]))
    assert (action[:, 1:] == 0).all()
    action = drive([10., 0, 0], [3., 0, 0], distance_to_decelerate=20.0, distance_to_stop=4.0)
    torch.testing.assert_close(action[:, 0], torch.tensor([0.5, 0.0]))


def test_the_vehicle_steers_towards_the_goal():
    action = drive([10., 10., 0], [0., 10., 0], [0., -10., 0], [-10., 1e-6, 0])
    torch.testing.assert_close(action[:, 1], torch.tensor([0.25, 0.5, -0.5, 1.0]))
    assert (action[:, 2] == 0).all()


def test_the_vehicle_arrives_in_a_simulation_of_itself():
    position, heading, goal = torch.tensor([0., 0.]), torch.tensor(2.0), torch.tensor([-40., 60.])
    algorithm = SimpleCarlaAlgorithm({'goal': TensorSpec((2, ))}, CARLA_ACTION)
    for _ in range(200):
        east, south = goal - position
        ahead, right = east * heading.cos() + south * heading.sin(), south * heading.cos() - east * heading.sin()
        speed, direction, _ = algorithm.predict_step(step({'goal': torch.stack([ahead, right])[None]})).output[0]
        heading = heading + 0.3 * torch.pi * direction
        position = position + 3.0 * speed * torch.stack([heading.cos(), heading.sin()])
    assert (goal - position).norm() < 1.0 and speed == 0


@pytest.mark.parametrize('observation, action, message', [
    (TensorSpec((3, )), CARLA_ACTION, "a dict with 'goal'"),
    ({'gnss': TensorSpec((3, ))}, CARLA_ACTION, r"found \['gnss'\]"),
    ({'goal': TensorSpec((4, ))}, CARLA_ACTION, r"observation\['goal'\]: expected floats of shape"),
    (CARLA_OBSERVATION, BoundedTensorSpec((2, ), torch.float32, -1, 1), 'the action: expected bounded floats'),
    (CARLA_OBSERVATION, BoundedTensorSpec((3, ), torch.float32, 0, 1), 'the action: expected bounds that include')])
def test_layouts_that_differ_from_carla_are_rejected_by_name(observation, action, message):
    with pytest.raises(SpecError, match=message):
        SimpleCarlaAlgorithm(observation, action)


@pytest.mark.parametrize('distances', [(1.0, 2.0), (1.0, -1.0), (0.0, 0.0)])
def test_meaningless_distances_are_rejected(distances):
    with pytest.raises(ValueError, match='distance_to_stop <= distance_to_decelerate'):
        SimpleCarlaAlgorithm(CARLA_OBSERVATION, CARLA_ACTION, distance_to_decelerate=distances[0],
                             distance_to_stop=distances[1])


def test_a_point_is_pushed_along_waypoints_and_to_a_near_goal():
    """The path is a corner: east and then north."""
    spec = {'observation': TensorSpec((4, )), 'desired_goal': TensorSpec((2, ))}
    action_spec = BoundedTensorSpec((2, ), torch.float32, -1, 1)
    algorithm = WaypointAlgorithm(spec, action_spec, waypoints=[(0, 0), (1, 0), (1, 1)], gain=0.5, damping=0.1)
    seen = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.9, 0.0, 2.0, 0.0], [1.0, 0.9, 0.0, 0.0], [1.0, 1.1, 0.0, 0.0],
                         [0.0, -9.0, 0.0, 0.0]])
    goal = torch.tensor([[1.0, 0.8], [1.0, 0.8], [1.0, 0.8], [0.0, 0.1], [0.2, 0.0]])
    # to (1, 0); to (1, 1) against the velocity; to the goal; back to (1, 0); to the goal with all force
    expected = [[0.5, 0.0], [0.05 - 0.2, 0.5], [0.0, -0.05], [0.0, -0.55], [0.1, 1.0]]
    found = algorithm.predict_step(step({'observation': seen, 'desired_goal': goal})).output
    torch.testing.assert_close(found, torch.tensor(expected))
    for wrong in ((spec['observation'], action_spec), (spec, BoundedTensorSpec((1, ), torch.float32, -1, 1)),
                  ({**spec, 'observation': TensorSpec((5, ))}, action_spec)):
        with pytest.raises(SpecError, match='WaypointAlgorithm: expected an observation with'):
            WaypointAlgorithm(*wrong)
