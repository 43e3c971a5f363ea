"""Imagined experience: short rollouts of a policy in a model, stored as transitions for training.

Read next: :mod:`alfx.algorithms.model_based_policy_algorithm`.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.data_structures import BatchInfo, Experience, StepType, TimeStep
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec

Policy = Callable[[TimeStep], tuple[Tensor, NestedTensor]]
"""Function from time steps ``[N, ...]`` to actions ``[N, ...]`` and the rollout info for training, ``[N, ...]``."""

Model = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Function from observations and actions ``[N, ...]`` to next observations, rewards, and ends of the episode (bool)."""


def imagined_transitions(start: TimeStep, policy: Policy, model: Model, num_steps: int) -> list[Experience]:
    """Roll out a policy in a model.

    Args:
        start: first time steps ``[N, ...]``; rows whose episode is over are skipped.
        policy: chooses the actions.
        model: predicts the next steps.
        num_steps: maximum number of steps per row; fewer if the episode ends.

    Returns:
        A list with the transitions ``[N', 2, ...]`` of each step: the step, and the next one.
    """
    step, transitions = nest.map_structure(lambda x: x[~start.is_last()], start), []
    for _ in range(num_steps):
        if not len(step.step_type):
            break
        action, info = policy(step)
        observation, reward, is_over = model(step.observation, action)
        following = step._replace(
            step_type=torch.where(is_over, StepType.LAST, StepType.MID).to(step.step_type.dtype),
            reward=reward.to(step.reward.dtype), discount=1.0 - is_over.to(step.discount.dtype),
            observation=observation, prev_action=action)
        now = Experience(step, action, info)
        then = Experience(following, action, nest.map_structure(torch.zeros_like, info))
        transitions.append(nest.map_structure(lambda a, b: torch.stack((a, b), 1), now, then))
        step = nest.map_structure(lambda x, continues=~is_over: x[continues], following)
    return transitions


class TransitionStore:
    """Buffer of the latest imagined transitions, sampled uniformly.

    It can replace a replay buffer as the source of minibatches: :meth:`get_batch` returns experience ``[B, 2, ...]``.
    Transitions are stored separately, so that no sample crosses the end of a rollout.

    Args:
        spec: spec of one step, an ``Experience``.
        capacity: maximum number of transitions.
    """

    def __init__(self, spec: NestedTensorSpec, capacity: int):
        pairs = nest.map_structure(lambda x: TensorSpec((2, *x.shape), x.dtype), spec)
        self._buffer = ReplayBuffer(pairs, 1, capacity, enable_checkpoint=True, name='imagined')

    def __len__(self) -> int:
        return self._buffer.total_size

    def add(self, transitions: Experience) -> None:
        """Store transitions ``[N, 2, ...]``, and overwrite the oldest ones."""
        self._buffer.add_sequence(nest.map_structure(lambda x: x.unsqueeze(1), transitions))

    def get_batch(self, batch_size: int, batch_length: int) -> tuple[Experience, BatchInfo]:
        """Sample ``batch_size`` transitions, ``[batch_size, 2, ...]``.

        Raises:
            ValueError: ``batch_length`` is not 2, or the store is empty.
        """
        if batch_length != 2:
            raise ValueError(f'imagined transitions have 2 steps: expected batch_length 2, found {batch_length}')
        pairs, info = self._buffer.get_batch(batch_size, 1)
        found: Any = nest.map_structure(lambda x: x.squeeze(1), pairs)
        return found, BatchInfo(env_ids=info.env_ids, positions=info.positions)

    def state_dict(self) -> dict[str, Any]:
        """Return the stored transitions."""
        return self._buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        self._buffer.load_state_dict(state)
