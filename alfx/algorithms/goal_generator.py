"""Random goals for the episodes of an agent.

A goal generator is the part of an :class:`~alfx.algorithms.agent.Agent` that extends the observation to ``[observation,
goal]``; the policy acts on both. With :mod:`alfx.algorithms.diayn_algorithm` a goal is a skill (Eysenbach et al. 2018,
arXiv:1802.06070, algorithm 1, line 2: one skill is sampled per episode and kept).
"""
from typing import Any

import torch
from torch import Tensor

from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import Count, configurable
from alfx.tensor_specs import BoundedTensorSpec, NestedTensorSpec

GoalState = namedtuple('GoalState', ['goal'], default_value=())
"""Goal of the episode, ``[B, K]``; zeros before a goal is sampled."""

GoalInfo = namedtuple('GoalInfo', ['goal', 'loss'], default_value=())
"""Goal ``[B, K]`` of the step, and the loss of the generator (``()`` if it does not learn)."""


class _RandomGoalGenerator(RLAlgorithm):
    """Samples a goal at the first step of an episode and keeps it.

    A subclass defines how goals are sampled; it never samples zeros, which stand for "no goal yet".
    """

    _declared_capabilities = {'trains_sequences_at_once': True}  # goals are in rollout_info

    def __init__(self, observation_spec: NestedTensorSpec, goal_spec: BoundedTensorSpec, name: str):
        super().__init__(observation_spec=observation_spec, action_spec=goal_spec,
                         train_state_spec=GoalState(goal=goal_spec), name=name)

    def _draw(self, batch_size: int, device: torch.device) -> Tensor:
        """Sample goals ``[batch_size, K]``."""
        raise NotImplementedError(f'{type(self).__name__}._draw')

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Keep the goal; sample a goal at FIRST and where there is none yet.

        Args:
            inputs: ``[B, ...]``; only ``step_type`` is used.
            state: ``GoalState``.

        Returns:
            ``output`` is the goal ``[B, K]`` and ``()``, because generating it has no reward; ``info`` is a
            ``GoalInfo``.
        """
        has_none = inputs.is_first() | (state.goal == 0).all(-1)
        goal = torch.where(has_none.unsqueeze(-1), self._draw(len(has_none), has_none.device), state.goal)
        return AlgStep((goal, ()), GoalState(goal=goal), GoalInfo(goal=goal))

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Call :meth:`rollout_step`."""
        return self.rollout_step(inputs, state)

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Return the goal with which the experience was collected.

        Args:
            inputs: ``[B, ...]``, not used.
            state: not used: a sequence from the replay buffer may begin with zeros.
            rollout_info: ``GoalInfo`` of the rollout.

        Returns:
            The same as :meth:`rollout_step`.
        """
        goal = rollout_info.goal
        return AlgStep((goal, ()), GoalState(goal=goal), GoalInfo(goal=goal))

    def calc_loss(self, info: Any) -> LossInfo:
        """Return an empty ``LossInfo``: nothing is trained."""
        return LossInfo()


@configurable
class RandomCategoricalGoalGenerator(_RandomGoalGenerator):
    """Samples one of K goals per episode, all equally likely, as a one-hot float vector ``[K]``.

    Args:
        observation_spec: nest of specs of the observation.
        num_of_goals: K, at least 1.
        name: name of this algorithm.
        action_spec: not used; part of the interface of a goal generator.
    """

    def __init__(self, observation_spec: NestedTensorSpec, num_of_goals: Count,
                 name: str = 'RandomCategoricalGoalGenerator', action_spec: NestedTensorSpec = None):
        super().__init__(observation_spec, BoundedTensorSpec((num_of_goals, ), torch.float32, 0.0, 1.0), name)

    def _draw(self, batch_size: int, device: torch.device) -> Tensor:
        count = self.action_spec.numel
        goals = torch.zeros(batch_size, count, device=device)
        return goals.scatter_(1, torch.randint(count, (batch_size, 1), device=device), 1.0)


@configurable
class RandomContinuousGoalGenerator(_RandomGoalGenerator):
    """Samples a goal ``[K]`` per episode, uniform in ``[-1, 1]^K``.

    Args:
        observation_spec: nest of specs of the observation.
        goal_size: K, at least 1.
        name: name of this algorithm.
        action_spec: not used; part of the interface of a goal generator.
    """

    def __init__(self, observation_spec: NestedTensorSpec, goal_size: Count,
                 name: str = 'RandomContinuousGoalGenerator', action_spec: NestedTensorSpec = None):
        super().__init__(observation_spec, BoundedTensorSpec((goal_size, ), torch.float32, -1.0, 1.0), name)

    def _draw(self, batch_size: int, device: torch.device) -> Tensor:
        return torch.rand(batch_size, self.action_spec.numel, device=device) * 2.0 - 1.0
