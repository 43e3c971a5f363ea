"""Positions and values of the R steps after a stored step, the targets of a model of the environment.

An unroll of R steps may run past the end of the episode, or past the newest step of an unfinished one. Positions past
the end are clamped to the last step, which stands for all later ones. All data is looked up in the replay buffer.
Rewards and values are those of player 0, so that signs do not change between the moves of two players.
"""
import torch
from torch import Tensor

from alfx.data_structures import BatchInfo, StepType
from alfx.tensor_specs import NestedTensor


class HeldSteps:
    """Positions of the steps t, ..., t + R after each step t of a batch ``[B, T]``, clamped to the end of the episode.

    Args:
        batch_info: origin of the batch: ``env_ids [B]``, ``positions [B]`` and ``replay_buffer``, which tracks episodes
            (``keep_episodic_info``).
        length: T.
        num_steps: R, at least 0.

    Attributes:
        buffer: replay buffer.
        num_steps: R.
        env_ids: int64 ``[B, 1, 1]``.
        positions: int64 ``[B, T, R + 1]``, positions in the replay buffer.
        beyond: bool ``[B, T, R + 1]``, the unclamped step is after the last one.
        at_end: bool ``[B, T, R + 1]``, the unclamped step is the last one or after it.
        is_terminated: bool ``[B, T]``, the episode ends with a step whose discount is 0.
    """

    def __init__(self, batch_info: BatchInfo, length: int, num_steps: int):
        buffer = batch_info.replay_buffer
        self.buffer, self.num_steps = buffer, num_steps
        env_ids = batch_info.env_ids
        start = batch_info.positions[:, None] + torch.arange(length, device=env_ids.device)
        self._start, self._end = start, start + buffer.steps_to_episode_end(start, env_ids[:, None])
        self.env_ids = env_ids[:, None, None]
        wanted = start[..., None] + torch.arange(num_steps + 1, device=env_ids.device)
        end = self._end[..., None]
        self.positions = torch.minimum(wanted, end)
        self.beyond, self.at_end = wanted > end, wanted >= end
        step_type, discount = (buffer.get_field(f'time_step.{name}', env_ids[:, None], self._end)
                               for name in ('step_type', 'discount'))
        self.is_terminated = (step_type == StepType.LAST) & (discount == 0)

    @property
    def steps_to_end(self) -> Tensor:
        """Number of steps from t to the last step, int64 ``[B, T]``."""
        return self._end - self._start

    @property
    def last(self) -> Tensor:
        """Positions of the last steps of the episodes, int64 ``[B, T, 1]``."""
        return self._end[..., None]

    def further(self, num_steps: int) -> Tensor:
        """Return clamped positions int64 ``[B, T, num_steps + 1]`` of the steps t, ..., t + num_steps."""
        wanted = self._start[..., None] + torch.arange(num_steps + 1, device=self._start.device)
        return torch.minimum(wanted, self._end[..., None])

    def field(self, field: str, positions: Tensor | None = None) -> NestedTensor:
        """Return the part of the experience at the path ``field``: nest ``[B, T, R + 1, ...]``.

        Args:
            field: path such as 'time_step.reward'.
            positions: other positions, ``[B, T, N]``.
        """
        return self.buffer.get_field(field, self.env_ids, self.positions if positions is None else positions)

    def actions(self) -> NestedTensor:
        """Return the actions taken at t, ..., t + R - 1, nest ``[B, T, R, ...]``.

        They are the ``prev_action`` of the steps after them; the last action of an episode is repeated.
        """
        after = self.further(self.num_steps)[..., 1:]
        return self.buffer.get_field('time_step.prev_action', self.env_ids, after)


def n_step_values(reward: Tensor, discount: Tensor, num_steps: Tensor, bootstrap: Tensor, max_steps: int) -> Tensor:
    r"""Return n-step bootstrapped values of R + 1 steps. With r and d of *arriving* at a step,

        value[i] = sum_{k=1..n} (prod_{j=1..k-1} d[i+j]) r[i+k] + (prod_{j=1..n} d[i+j]) bootstrap[i]

    After the last step of an episode r is 0 and d is 1. The d of a termination is 0, which cuts off later values.

    Args:
        reward: ``[B, T, R + 1 + N]``.
        discount: ``[B, T, R + 1 + N]``, environment discount times gamma.
        num_steps: n, int64 ``[B]``, from 0 to N.
        bootstrap: ``[B, T, R + 1]``, values of the steps i + n, clamped to the last step.
        max_steps: N.

    Returns:
        Values ``[B, T, R + 1]``.
    """
    count = bootstrap.shape[-1]
    value, factor = torch.zeros_like(bootstrap), torch.ones_like(bootstrap)
    for k in range(1, max_steps + 1):
        is_within = (num_steps >= k)[:, None, None]
        value = torch.where(is_within, value + factor * reward[..., k:k + count], value)
        factor = torch.where(is_within, factor * discount[..., k:k + count], factor)
    return value + factor * bootstrap


def monte_carlo_values(reward: Tensor, discount: Tensor, bootstrap: Tensor, count: int) -> Tensor:
    """Return values up to the end of the episode: ``value[i] = r[i+1] + d[i+1] value[i+1]``, ``bootstrap`` at the end.

    Args:
        reward: ``[B, T, L]``, 0 after the last step.
        discount: ``[B, T, L]``, environment discount times gamma; 1 after the last step.
        bootstrap: ``[B, T]``, value of the last step of the episode.
        count: number of values to return. The last of the L steps is the end of the episode or after it.

    Returns:
        Values ``[B, T, count]``.
    """
    values = [bootstrap]
    for i in range(reward.shape[-1] - 1, 0, -1):
        values.append(reward[..., i] + discount[..., i] * values[-1])
    return torch.stack(values[::-1][:count], -1)
