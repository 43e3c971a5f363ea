"""Goals: when they are sampled, how long they stay, and that training uses the goals of the rollout."""
from functools import partial

import pytest
import torch
from helpers.agents import make_agent
from helpers.agents_with_goals import combined_networks, make_sac_agent
from helpers.plans import num_graphs

from alfx.algorithms.goal_generator import (GoalInfo, GoalState, RandomCategoricalGoalGenerator,
                                            RandomContinuousGoalGenerator)
from alfx.data_structures import LossInfo, StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

SPEC = TensorSpec((2, ))
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def steps(*step_types):
    return TimeStep(step_type=torch.tensor(step_types, dtype=torch.int32))


def rollout(generator, batches):
    """Return the goals ``[T, B, K]`` of a rollout from zeros."""
    state, goals = generator.get_initial_rollout_state(len(batches[0])), []
    for step_types in batches:
        (goal, reward), state, info = generator.rollout_step(steps(*step_types), state)
        assert reward == () and torch.equal(info.goal, goal) and torch.equal(state.goal, goal)
        goals.append(goal)
    return torch.stack(goals)


def test_a_one_hot_goal_is_sampled_at_the_first_step_of_an_episode():
    torch.manual_seed(0)
    generator = RandomCategoricalGoalGenerator(SPEC, 1000)  # so many that no two draws are the same
    goals = rollout(generator, [(FIRST, FIRST), (MID, MID), (MID, LAST), (MID, FIRST), (LAST, MID)])
    assert goals.dtype == torch.float32 and set(goals.unique().tolist()) == {0.0, 1.0}
    assert (goals.sum(-1) == 1).all()
    chosen = goals.argmax(-1)
    assert (chosen[:, 0] == chosen[0, 0]).all()
    assert (chosen[:3, 1] == chosen[0, 1]).all() and chosen[3, 1] == chosen[4, 1] != chosen[0, 1]
    assert generator.action_spec == BoundedTensorSpec((1000, ), torch.float32, 0.0, 1.0)


def test_all_goals_are_equally_likely():
    torch.manual_seed(0)
    generator = RandomCategoricalGoalGenerator(SPEC, 4)
    (goal, _), _, _ = generator.rollout_step(steps(*[FIRST] * 8000), generator.get_initial_rollout_state(8000))
    assert (goal.mean(0) - 0.25).abs().max() < 0.02  # four standard deviations


def test_an_episode_without_a_first_step_gets_a_goal():
    generator = RandomCategoricalGoalGenerator(SPEC, 3)
    assert (rollout(generator, [(MID, MID), (MID, MID)]).sum(-1) == 1).all()


def test_continuous_goals_fill_their_range():
    torch.manual_seed(0)
    generator = RandomContinuousGoalGenerator(SPEC, 3)
    goals = rollout(generator, [(FIRST, ) * 2000, (MID, ) * 2000])
    assert torch.equal(goals[0], goals[1])
    assert goals.mean().abs() < 0.03 and (goals.var() - 1 / 3).abs() < 0.02 and goals.abs().max() <= 1
    assert generator.action_spec == BoundedTensorSpec((3, ), torch.float32, -1.0, 1.0)


def test_training_takes_the_goal_of_the_rollout_and_not_the_state():
    generator = RandomCategoricalGoalGenerator(SPEC, 3)
    goal = torch.eye(3)[[0, 2]]
    step = generator.train_step(steps(FIRST, MID), generator.get_initial_train_state(2), GoalInfo(goal=goal))
    assert torch.equal(step.output[0], goal) and torch.equal(step.state.goal, goal)
    assert generator.calc_loss(step.info) == LossInfo()
    sequence = torch.eye(3)[torch.tensor([[0, 2], [1, 1]])]
    step_types = torch.tensor([[FIRST, MID], [MID, LAST]], dtype=torch.int32)
    step = generator.train_sequence(TimeStep(step_type=step_types), GoalState(goal=torch.zeros(2, 2, 3)),
                                    GoalInfo(goal=sequence))
    assert generator.capabilities.trains_sequences_at_once and torch.equal(step.output[0], sequence)


def test_steps_do_not_change_their_inputs():
    generator = RandomCategoricalGoalGenerator(SPEC, 3)
    state = GoalState(goal=torch.eye(3)[[1, 1]])
    generator.rollout_step(steps(FIRST, MID), state)
    assert torch.equal(state.goal, torch.eye(3)[[1, 1]])


@pytest.mark.parametrize('cls,argument', [(RandomCategoricalGoalGenerator, 'num_of_goals'),
                                          (RandomContinuousGoalGenerator, 'goal_size')])
def test_a_number_of_goals_below_one_is_rejected_by_name(cls, argument):
    with pytest.raises(ConfError, match=f'{cls.__name__}.{argument} must be an int >= 1, found int 0'):
        cls(SPEC, 0)


@pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])
@pytest.mark.parametrize('cls', [partial(RandomCategoricalGoalGenerator, num_of_goals=3),
                                 partial(RandomContinuousGoalGenerator, goal_size=3)])
def test_a_policy_is_trained_with_the_goals_that_it_acted_with(algorithm, cls, monkeypatch):
    agent, _ = make_agent(algorithm, 'discrete', goal_generator=cls, rl_algorithm_cls=combined_networks(algorithm))
    seen = []
    train_step = agent.policy.train_step
    monkeypatch.setattr(agent.policy, 'train_step',
                        lambda inputs, *args: seen.append(inputs.observation[1]) or train_step(inputs, *args))
    steps = []
    rollout_step = agent._goal_generator.rollout_step
    monkeypatch.setattr(agent._goal_generator, 'rollout_step',
                        lambda *args: steps.append(rollout_step(*args)) or steps[-1])
    agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())
    if algorithm == 'ppo':
        known = {tuple(goal) for step in steps for goal in step.output[0].tolist()}
        assert seen and {tuple(goal) for goals in seen for goal in goals.flatten(0, -2).tolist()} <= known


def test_sac_updates_with_goals_are_traced(replayed_at_once):
    agent, _ = make_sac_agent(goal_generator=partial(RandomCategoricalGoalGenerator, num_of_goals=3))
    assert agent.capabilities.traceable_update
    for _ in range(4):
        agent.train_iter()
    assert num_graphs(agent) and all(torch.isfinite(p).all() for p in agent.parameters())
