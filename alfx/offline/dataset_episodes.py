"""Episodes as arrays, and their conversion to and from time steps.

An episode of T actions has T + 1 observations. The reward and the discount of arriving at an observation, and the
action that led there, belong to the step of that observation. The action taken there belongs to the same step. Only
this module shifts the two relative to each other::

    observation      o[0]   o[1]   ...  o[T-1]  o[T]
    action taken     a[0]   a[1]   ...  a[T-1]  none
    previous action  none   a[0]   ...  a[T-2]  a[T-1]
    reward           0      r[0]   ...  r[T-2]  r[T-1]
    step type        FIRST  MID    ...  MID     LAST

Where there is no action, the one within the bounds that is nearest to zeros is stored.

Arrays are numpy arrays, because they may be mapped from files. Nests are flat: a dict from the path of a leaf (``''``
for a single leaf) to its array.
"""
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from alfx import nest
from alfx.data_structures import StepType, TimeStep
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec

_ROWS_AT_ONCE = 2**16


class Episodes(NamedTuple):
    """E episodes with N actions in total, one after the other.

    Attributes:
        observation: arrays ``[N + E, ...]`` by path.
        action: arrays ``[N, ...]`` by path.
        reward: reward for arriving at the next observation, ``[N]``, or ``[N, K]`` if it is K-dimensional.
        discount: discount for arriving at the next observation, ``[N]``: 0 at a termination. An episode with another
            discount at its end was truncated, and its last value is bootstrapped.
        lengths: number of actions of each episode, at least 1, int64 ``[E]``.
    """

    observation: dict[str, np.ndarray]
    action: dict[str, np.ndarray]
    reward: np.ndarray
    discount: np.ndarray
    lengths: np.ndarray

    @property
    def num_actions(self) -> int:
        """Total number of actions, N."""
        return len(self.reward)

    @property
    def num_steps(self) -> int:
        """Total number of steps, N + E: every action, and the last observation of every episode."""
        return len(self.reward) + len(self.lengths)

    def ends(self) -> np.ndarray:
        """Return the index after the last action of each episode, int64 ``[E]``."""
        return np.cumsum(self.lengths)

    def terminated(self) -> np.ndarray:
        """Return which episodes terminated, bool ``[E]``; the others were truncated."""
        return np.asarray(self.discount)[self.ends() - 1] == 0

    def returns(self) -> np.ndarray:
        """Return the sum of the rewards of each episode, over all reward dimensions, float64 ``[E]``."""
        reward = np.asarray(self.reward, np.float64).reshape(len(self.reward), -1).sum(1)
        return np.add.reduceat(reward, self.ends() - self.lengths)

    def part(self, first: int, end: int) -> 'Episodes':
        """Return the episodes from ``first`` to ``end - 1``, as views."""
        ends = np.concatenate([[0], self.ends()])
        actions, steps = slice(ends[first], ends[end]), slice(ends[first] + first, ends[end] + end)
        return Episodes({path: x[steps] for path, x in self.observation.items()},
                        {path: x[actions] for path, x in self.action.items()}, self.reward[actions],
                        self.discount[actions], self.lengths[first:end])

    def select(self, episodes: np.ndarray) -> 'Episodes':
        """Return copies of the episodes with the numbers ``episodes``, in that order."""
        return joined([self.part(i, i + 1) for i in episodes])


def joined(parts: list[Episodes]) -> Episodes:
    """Concatenate episodes that have the same paths."""
    observations, actions, *others = zip(*parts)
    return Episodes({path: np.concatenate([x[path] for x in observations]) for path in observations[0]},
                    {path: np.concatenate([x[path] for x in actions]) for path in actions[0]},
                    *map(np.concatenate, others))


def shortened(episodes: Episodes, num_steps: int | None) -> Episodes:
    """Return at most ``num_steps`` steps from the start; an episode that does not fit is truncated.

    The discount at the cut is not changed, so the value there is bootstrapped, as after a time limit.
    """
    if num_steps is None or episodes.num_steps <= num_steps:
        return episodes
    ends = np.cumsum(episodes.lengths + 1)
    whole = int(np.searchsorted(ends, num_steps, side='right'))
    rest = num_steps - (int(ends[whole - 1]) if whole else 0) - 1  # actions of the truncated episode
    kept = episodes.part(0, whole + (rest > 0))
    if rest <= 0:
        return kept
    missing = int(kept.lengths[-1]) - rest
    lengths = np.concatenate([kept.lengths[:-1], [rest]])
    return Episodes({path: x[:len(x) - missing] for path, x in kept.observation.items()},
                    {path: x[:len(x) - missing] for path, x in kept.action.items()}, kept.reward[:-missing],
                    kept.discount[:-missing], lengths)


def steps(episodes: Episodes, env_id: int, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
          reward_spec: Any) -> Iterator[tuple[TimeStep, NestedTensor]]:
    """Yield the steps of all episodes as an environment would return them, in chunks of whole episodes.

    Args:
        episodes: episodes whose arrays fit the specs except for their dtypes.
        env_id: environment number of all steps.
        observation_spec: nest of specs.
        action_spec: nest of specs.
        reward_spec: spec of rank 0 or 1.

    Yields:
        Time steps ``[R, ...]`` without ``env_info``, and actions ``[R, ...]``; at LAST the action nearest to zeros.
    """
    ends = np.cumsum(episodes.lengths + 1)
    first = 0
    while first < len(ends):
        done = int(ends[first - 1]) if first else 0
        end = max(int(np.searchsorted(ends, done + _ROWS_AT_ONCE, side='right')), first + 1)
        yield _steps(episodes.part(first, end), env_id, observation_spec, action_spec, reward_spec)
        first = end


def _steps(part: Episodes, env_id: int, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
           reward_spec: Any) -> tuple[TimeStep, NestedTensor]:
    rows, ends = part.num_steps, np.cumsum(part.lengths + 1)
    step_type = np.full(rows, int(StepType.MID), np.int32)
    step_type[ends - 1] = int(StepType.LAST)
    step_type[ends - 1 - part.lengths] = int(StepType.FIRST)
    arrived, left = step_type != int(StepType.FIRST), step_type != int(StepType.LAST)

    def at(where: np.ndarray, values: np.ndarray, spec: Any) -> torch.Tensor:
        result = spec.nearest_zeros((rows, ))
        result.numpy()[where] = values
        return result

    def packed(spec: NestedTensorSpec, make: Any) -> NestedTensor:
        return nest.pack_sequence_as(spec, [make(path, leaf) for path, leaf in nest.flatten_with_path(spec)])

    action = packed(action_spec, lambda path, leaf: at(left, part.action[path], leaf))
    prev_action = packed(action_spec, lambda path, leaf: at(arrived, part.action[path], leaf))
    observation = packed(observation_spec, lambda path, leaf: torch.from_numpy(
        np.array(part.observation[path], leaf.dtype_str)))
    discount = np.ones(rows, np.float32)
    discount[arrived] = part.discount
    reward = at(arrived, part.reward, TensorSpec.from_spec(reward_spec))
    time_step = TimeStep(step_type=torch.from_numpy(step_type), reward=reward, discount=torch.from_numpy(discount),
                         observation=observation, prev_action=prev_action,
                         env_id=torch.full((rows, ), env_id, dtype=torch.int64))
    return time_step, action


def from_steps(time_step: TimeStep, action: NestedTensor) -> Episodes | None:
    """Return the episodes in consecutive steps of one environment; the inverse of :func:`steps`.

    An episode whose beginning is missing begins at the first available step; an unfinished episode is truncated at the
    last step. An episode of a single step has no action and is dropped.

    Args:
        time_step: ``[R, ...]``; its ``observation``, ``step_type``, ``reward`` and ``discount`` are used.
        action: nest ``[R, ...]``: the actions taken at these steps.

    Returns:
        The episodes; ``None`` if there is no action.
    """
    def flat(nested: NestedTensor) -> dict[str, np.ndarray]:
        return {path: leaf.numpy() for path, leaf in nest.flatten_with_path(nested)}

    return from_arrays(time_step.step_type.numpy(), time_step.reward.numpy(), time_step.discount.numpy(),
                       flat(time_step.observation), flat(action))


def from_arrays(step_type: np.ndarray, reward: np.ndarray, discount: np.ndarray, observation: dict[str, np.ndarray],
                action: dict[str, np.ndarray]) -> Episodes | None:
    """Return :func:`from_steps` of arrays ``[R, ...]``."""
    if not len(step_type):
        return None
    begins = (step_type == int(StepType.FIRST))
    begins[0] = True
    begins[1:] |= step_type[:-1] == int(StepType.LAST)
    number = np.cumsum(begins) - 1
    counts = np.bincount(number)
    kept = counts[number] > 1
    ends = np.roll(begins, -1)
    ends[-1] = True
    arrived, left = kept & ~begins, kept & ~ends
    if not arrived.any():
        return None

    return Episodes({path: x[kept] for path, x in observation.items()}, {path: x[left] for path, x in action.items()},
                    reward[arrived], discount[arrived], counts[counts > 1] - 1)
