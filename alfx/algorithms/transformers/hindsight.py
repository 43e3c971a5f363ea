"""Hindsight experience replay: replace goals of an episode by goals that were reached later.

The indices and the checks behind ``HindsightExperienceTransformer`` of :mod:`alfx.algorithms.data_transformer`
(Andrychowicz et al. 2017, arXiv:1707.01495, section 4.5, the strategy 'future').
"""
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alfx import nest
from alfx.data_structures import BatchInfo, Experience, StepType
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError

_log = logging.getLogger(__name__)
_TIME_STEP_OBSERVATION = 'time_step.observation.'
_ROUNDING = 8  # tolerance in units in the last place between a stored goal and the goal inside the environment


def check_goal_fields(owner: str, observation_spec: NestedTensorSpec, achieved_field: str, desired_field: str) -> None:
    """Raise an error unless both goals exist and match; goals outside the observation are not checked.

    Raises:
        SpecError: a field does not exist, or the two specs differ.
    """
    specs = []
    for argument, field in (('achieved_goal_field', achieved_field), ('desired_goal_field', desired_field)):
        if not field.startswith(_TIME_STEP_OBSERVATION):
            continue
        try:
            specs.append(nest.get_field(observation_spec, field.removeprefix(_TIME_STEP_OBSERVATION)))
        except LookupError as error:
            raise SpecError(f'{owner}.{argument} = {field!r}: {error}') from None
    if len(specs) == 2:
        described = [[(path, spec.dtype, tuple(spec.shape)) for path, spec in nest.flatten_with_path(goal)]
                     for goal in specs]
        if described[0] != described[1]:
            raise SpecError(f'{owner}: expected goals of the same shape and type, found {achieved_field} = {specs[0]} '
                            f'and {desired_field} = {specs[1]}')


def first_of_episode(step_type: Tensor) -> Tensor:
    """Return the index at which the episode of each step starts within its sequence.

    Args:
        step_type: ``[B, T]``.

    Returns:
        int64 ``[B, T]``, index of the first step of the sequence that is in the same episode.
    """
    time = torch.arange(step_type.shape[1], device=step_type.device)
    return torch.where(step_type == StepType.FIRST, time, 0).cummax(dim=1).values


def draw_future(first: Tensor, steps_to_end: Tensor, proportion: float) -> tuple[Tensor, Tensor]:
    """Choose the episodes of a batch that get another goal, and the step at which this goal was reached.

    All steps of an episode in a sequence share the choice. The goal is the one achieved at a later step than the first
    of them, with the same probability for each later step of the episode; a step without later steps keeps its goal.

    Args:
        first: int64 ``[B, T]``, from :func:`first_of_episode`.
        steps_to_end: int64 ``[B, T]``, number of stored steps of the episode after the step at ``first``.
        proportion: probability that an episode is chosen.

    Returns:
        tuple:
        - bool ``[B, T]``: steps that get another goal
        - int64 ``[B, T]``: number of steps from ``first`` to the step that achieved the goal, 1 to ``steps_to_end``;
          0 for steps that keep their goal
    """
    draws = torch.rand((2, *first.shape), device=first.device)
    choice, fraction = draws.gather(2, first.expand(2, -1, -1))
    chosen = (choice < proportion) & (steps_to_end > 0)
    ahead = torch.minimum((fraction * steps_to_end).long() + 1, steps_to_end)
    return chosen, torch.where(chosen, ahead, 0)


def replace_goals(chosen: Tensor, new: NestedTensor, old: NestedTensor) -> NestedTensor:
    """Return ``new`` where ``chosen`` (bool ``[B, T]``), else ``old`` (nests ``[B, T, ...]``), as new tensors."""
    return nest.map_structure(lambda n, o: torch.where(chosen.view(chosen.shape + (1, ) * (o.ndim - 2)), n, o), new,
                              old)


def ends_at(terminal_reward: float, changed: Tensor, reward: Tensor, old_reward: Tensor, step_type: Tensor,
            discount: Tensor) -> tuple[Tensor, Tensor]:
    """Return step types and discounts for new goals, if reaching the goal terminates the episode.

    A step at which the new goal is reached becomes LAST with discount 0, as in the environment. If a step was terminal
    because the old goal was reached, and the new one is not, it remains LAST with the discount of steps that are not
    terminal: as at a truncation, the next step is not known.

    Args:
        terminal_reward: reward for reaching the goal.
        changed: bool ``[B, T]``, steps with a recomputed reward.
        reward: ``[B, T]`` for the new goals.
        old_reward: ``[B, T]`` as stored.
        step_type: ``[B, T]``.
        discount: ``[B, T]``.

    Returns:
        New ``step_type`` and ``discount``.
    """
    is_mid = step_type == StepType.MID
    running = torch.where(is_mid.any(), torch.where(is_mid, discount, 0).amax(), 1.0)
    reached = changed & _close(reward, terminal_reward)
    reopened = changed & ~reached & _close(old_reward, terminal_reward) & (discount == 0)
    discount = torch.where(reached, 0.0, torch.where(reopened, running, discount))
    return torch.where(reached, StepType.LAST, step_type).to(step_type.dtype), discount


def _close(reward: Tensor, expected: Any) -> Tensor:
    """Return where ``reward`` is close to ``expected``, a tensor like it or a number; ``False`` for NaN."""
    return (reward - expected).abs() <= 1e-5 + 1e-4 * abs(expected)


class GoalReward:
    """Reward function of a goal environment: its ``compute_reward``, called with all goals of a batch if possible.

    Args:
        compute_reward: ``(achieved_goal, desired_goal, info)`` to the reward, as in gymnasium-robotics. Infos are not
            stored, so it gets ``{}``.
        otherwise: reward function to use if ``compute_reward`` fails.
    """

    __name__ = 'compute_reward of the environment'

    def __init__(self, compute_reward: Callable[..., Any], otherwise: Callable[[Any, Any], Tensor]) -> None:
        self._compute_reward = compute_reward
        self._otherwise = otherwise
        self._is_vectorized: bool | None = None
        self._has_failed = False

    def __deepcopy__(self, memo: dict) -> 'GoalReward':
        return self  # it belongs to an environment

    def __call__(self, achieved: NestedTensor, desired: NestedTensor) -> Tensor:
        """Return the rewards ``[B, T]`` of goals ``[B, T, ...]``."""
        leaf = nest.flatten(achieved)[0]
        goals = nest.map_structure(lambda x: x.flatten(0, 1).cpu().numpy(), (achieved, desired))
        if self._is_vectorized is None and not self._has_failed and leaf.shape[:2].numel() > 1:
            self._try(goals, leaf.shape[:2].numel())
        if self._has_failed:
            return self._otherwise(achieved, desired)
        rewards = np.asarray(self._compute_reward(*goals, {}) if self._is_vectorized else
                             self._one_by_one(goals, leaf.shape[:2].numel()), np.float32)
        return torch.from_numpy(rewards).to(leaf.device).reshape(*leaf.shape[:2], *rewards.shape[1:])

    def _one_by_one(self, goals: tuple, count: int) -> np.ndarray:
        return np.array([self._compute_reward(*nest.map_structure(lambda x, i=i: x[i], goals), {})
                         for i in range(count)], np.float32)

    def _try(self, goals: tuple, count: int) -> None:
        """Find out whether ``compute_reward`` works, and whether it gives the same rewards for a whole batch."""
        try:
            expected = self._one_by_one(goals, count)
        except Exception as error:  # noqa: BLE001 (code of the environment)
            _log.warning('compute_reward of the environment fails and is not used: %s: %s', type(error).__name__, error)
            self._has_failed = True
            return
        with contextlib.suppress(Exception):  # it is for one pair of goals only
            found = np.asarray(self._compute_reward(*goals, {}))
            self._is_vectorized = found.shape == expected.shape and np.allclose(found, expected, 1e-4, 1e-5)
        self._is_vectorized = bool(self._is_vectorized)


class RewardCheck:
    """Check that ``reward_fn`` reproduces the rewards of the environment for the stored goals.

    Args:
        owner: name of the caller, for error messages.
        reward_fn: ``(achieved, desired) -> [B, T]``.
        achieved_field: path of the achieved goal, for error messages.
        desired_field: path of the desired goal, for error messages.
        terminal_reward: reward for reaching a goal that terminates the episode, or ``None``.
    """

    def __init__(self, owner: str, reward_fn: Callable[[Any, Any], Tensor], achieved_field: str, desired_field: str,
                 terminal_reward: float | None) -> None:
        self._owner = owner
        self.reward_fn = reward_fn
        self._fields = (achieved_field, desired_field)
        self._terminal_reward = terminal_reward
        self._warned = self._warned_of_rest = False

    def __call__(self, time_step: Any, achieved: NestedTensor, desired: NestedTensor,
                 batch_info: BatchInfo) -> Tensor | None:
        """Check a stored batch ``[B, T, ...]``. FIRST steps have no reward, because no action led to them.

        Returns:
            The part of the stored rewards ``[B, T]`` that does not depend on the goal, such as the penalty of a
            collision, where ``compute_reward`` of the environment omits it in a few steps; ``None``: there is none.

        Raises:
            ValueError: ``reward_fn`` returns other rewards, or episodes do not end as ``terminal_reward`` specifies.
        """
        rest: Tensor | None = None
        stored, counts = time_step.reward, time_step.step_type != StepType.FIRST
        found = self.rewards(achieved, desired, stored)
        wrong = ~_close(found, stored)
        wrong &= counts if stored.ndim == 2 else counts.unsqueeze(-1)
        if bool(wrong.any()):
            wrong = wrong & ~self._explained_by_rounding(achieved, desired, stored)
            if isinstance(self.reward_fn, GoalReward) and 0 < int(wrong.sum()) <= int(counts.sum()) // 2:
                if not self._warned_of_rest:
                    self._warned_of_rest = True
                    _log.warning('%s: compute_reward does not reproduce the rewards of %d of %d steps; the difference '
                                 'is added to relabeled rewards, too', self._owner, int(wrong.sum()), wrong.numel())
                rest = torch.where(wrong, stored - found, 0)
            elif bool(wrong.any()):
                self._raise(wrong if stored.ndim == 2 else wrong.any(-1), found, achieved, desired, stored, batch_info)
        self._check_ends(time_step, counts)
        return rest

    def rewards(self, achieved: NestedTensor, desired: NestedTensor, like: Tensor) -> Tensor:
        """Return ``reward_fn(achieved, desired)``, with the shape and dtype of ``like``.

        Raises:
            ValueError: the result has another shape.
        """
        found = self.reward_fn(achieved, desired)
        if not isinstance(found, Tensor) or found.shape != like.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f'{self._owner}.reward_fn: expected a reward {tuple(like.shape)} = [B, T, ...] for goals '
                             f'[B, T, ...], found {shape}')
        return found.to(like.dtype)

    def _explained_by_rounding(self, achieved: NestedTensor, desired: NestedTensor, stored: Tensor) -> Tensor:
        """Return where goals that differ by a few units in the last place give the stored reward.

        An environment may compute with more digits than are stored, which matters next to a threshold.
        """
        explained = torch.zeros_like(stored, dtype=torch.bool)
        for direction in (1, -1):
            explained |= _close(self.rewards(nest.map_structure(
                lambda a, d, sign=direction: _nudged(a, d, sign), achieved, desired), desired, stored), stored)
        return explained

    def _raise(self, wrong: Tensor, found: Tensor, achieved: NestedTensor, desired: NestedTensor, stored: Tensor,
               batch_info: BatchInfo) -> None:
        row, step = wrong.nonzero()[0].tolist()
        env_id, position = int(batch_info.env_ids[row]), int(batch_info.positions[row]) + step
        values = [nest.map_structure(lambda x: x[row, step].tolist(), goal) for goal in (achieved, desired)]
        name = getattr(self.reward_fn, '__name__', repr(self.reward_fn))
        raise ValueError(
            f'{self._owner}.reward_fn: {name} does not reproduce the rewards of the environment: expected '
            f'{stored[row, step].tolist()}, as stored, found {found[row, step].tolist()} for '
            f'{self._fields[0]} = {values[0]} and {self._fields[1]} = {values[1]} (environment {env_id}, position '
            f'{position}; {int(wrong.sum())} of {wrong.numel()} steps of the batch differ). Set the reward function of '
            'the environment, and scale or shape rewards with transformers that come later')

    def _check_ends(self, time_step: Any, counts: Tensor) -> None:
        terminated = (time_step.discount == 0) & counts
        if self._terminal_reward is None:
            if not self._warned and time_step.reward.ndim == 2 and bool(
                    (terminated & (time_step.reward > time_step.reward.amin())).any()):
                self._warned = True
                _log.warning('%s: some episodes terminate with a reward of %g. If they terminate because the goal is '
                             'reached, set it as terminal_reward, so that relabeled goals end episodes as well',
                             self._owner, float(time_step.reward[terminated].amax()) + 0.0)  # not -0
            return
        if time_step.reward.ndim != 2:
            raise ValueError(f'{self._owner}.terminal_reward: expected None for a multi-dimensional reward, found '
                             f'{self._terminal_reward}')
        reached = _close(time_step.reward, self._terminal_reward) & counts
        if bool((reached & ~terminated).any()):
            raise ValueError(f'{self._owner}.terminal_reward = {self._terminal_reward}: expected every step with this '
                             'reward to terminate its episode, found one with the discount '
                             f'{float(time_step.discount[reached & ~terminated][0])}; leave terminal_reward out if '
                             'episodes continue after the goal is reached')


def _nudged(achieved: Tensor, desired: Tensor, direction: int) -> Tensor:
    if not achieved.is_floating_point():
        return achieved
    step = torch.finfo(achieved.dtype).eps * _ROUNDING * torch.maximum(achieved.abs(), desired.abs())
    return achieved + direction * step * (achieved - desired).sign()


class GoalRelabeler:
    """Relabels sampled experience with goals that were reached later; see ``HindsightExperienceTransformer``.

    Args:
        owner: name of the caller, for error messages.
        observation_spec: nest of specs of the observation.
        proportion: probability that an episode of a sequence gets another goal.
        achieved_field: path of the achieved goal in the experience.
        desired_field: path of the desired goal in the experience.
        reward_fn: ``(achieved, desired) -> [B, T]``.
        terminal_reward: reward for reaching a goal that terminates the episode, or ``None``.

    Raises:
        SpecError: the goals do not exist or differ from each other.
    """

    def __init__(self, owner: str, observation_spec: NestedTensorSpec, proportion: float, achieved_field: str,
                 desired_field: str, reward_fn: Callable[[Any, Any], Tensor], terminal_reward: float | None) -> None:
        check_goal_fields(owner, observation_spec, achieved_field, desired_field)
        self._owner = owner
        self._proportion = proportion
        self._achieved_field, self._desired_field = achieved_field, desired_field
        self._terminal_reward = terminal_reward
        self._check = RewardCheck(owner, reward_fn, achieved_field, desired_field, terminal_reward)

    def set_reward_fn(self, reward_fn: Callable[[Any, Any], Tensor]) -> None:
        """Use another reward function from now on."""
        self._check.reward_fn = reward_fn

    @property
    def observation_fields(self) -> list[str]:
        """Paths in the observation of the goals that are part of it."""
        return [field.removeprefix(_TIME_STEP_OBSERVATION) for field in (self._achieved_field, self._desired_field)
                if field.startswith(_TIME_STEP_OBSERVATION)]

    def __call__(self, experience: Experience) -> Experience:
        """Return the relabeled copy of a batch ``[B, T, ...]`` from the replay buffer.

        Raises:
            ValueError: ``batch_info`` or ``replay_buffer`` is missing, or ``reward_fn`` does not reproduce the stored
                rewards.
        """
        buffer, info, time_step = experience.replay_buffer, experience.batch_info, experience.time_step
        if buffer == () or info == ():
            raise ValueError(f'{self._owner} needs experience with batch_info and replay_buffer, see '
                             'data_structures.add_batch_info')
        if isinstance(info.discounted_return, Tensor):
            raise ValueError(f'{self._owner}: the stored returns of the replay buffer belong to the original goals; '
                             'leave out ReplayBuffer.record_episodic_return')
        achieved = nest.get_field(experience, self._achieved_field)
        desired = nest.get_field(experience, self._desired_field)
        rest = self._check(time_step, achieved, desired, info)
        first = first_of_episode(time_step.step_type)
        env_ids = info.env_ids.unsqueeze(1).expand_as(first)
        positions = info.positions.unsqueeze(1) + first
        chosen, ahead = draw_future(first, buffer.steps_to_episode_end(positions, env_ids), self._proportion)
        goals = buffer.get_field(self._achieved_field, env_ids, positions + ahead)
        desired = replace_goals(chosen, goals, desired)
        changed = chosen & (time_step.step_type != StepType.FIRST)
        reward = self._check.rewards(achieved, desired, time_step.reward)
        if rest is not None:
            reward = reward + rest
        reward = replace_goals(changed, reward, time_step.reward)
        if self._terminal_reward is not None:
            step_type, discount = ends_at(self._terminal_reward, changed, reward, time_step.reward,
                                          time_step.step_type, time_step.discount)
            time_step = time_step._replace(step_type=step_type, discount=discount)
        experience = experience._replace(time_step=time_step._replace(reward=reward))
        return nest.set_field(experience, self._desired_field, desired)
