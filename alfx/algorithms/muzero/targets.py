"""Targets of the unrolled model: rewards, values and policies of stored steps.

Target policies and bootstrap values are the results of a search, either stored with the step or computed again
(:class:`~alfx.algorithms.muzero.reanalysis.Reanalyzer`). The formulas are in
:mod:`alfx.algorithms.muzero.model_targets`.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import context, nest
from alfx.algorithms.mcts_algorithm import MCTSInfo
from alfx.algorithms.mcts_models import ModelTarget
from alfx.algorithms.muzero.model_targets import HeldSteps, monte_carlo_values, n_step_values
from alfx.algorithms.muzero.reanalysis import Reanalyzer
from alfx.data_structures import BatchInfo


class TargetSettings(NamedTuple):
    """Settings of the targets.

    Attributes:
        num_unroll_steps: R.
        discount: gamma.
        scalar_reward: maps rewards of the environment, ``[...]`` or ``[..., K]``, to scalar rewards ``[...]``.
        predicts_reward: the model predicts rewards; otherwise the reward of the last step is its value.
        td_steps: n for values from stored search results; -1: up to the end of the episode.
        reanalyze_ratio: share of a batch that is reanalyzed.
        reanalyze_td_steps: maximum n for values from reanalysis.
        td_steps_func: computes n from the age of samples.
        full_reanalyze: also search at the steps that are bootstrapped from.
    """

    num_unroll_steps: int
    discount: float
    scalar_reward: Callable[[Tensor], Tensor]
    predicts_reward: bool
    td_steps: int
    reanalyze_ratio: float
    reanalyze_td_steps: int
    td_steps_func: Callable[..., Tensor] | None
    full_reanalyze: bool


class TargetMaker:
    """Builder of targets from the data in a replay buffer.

    Args:
        settings: settings of the targets.
        info_path: path of the ``MCTSInfo`` in the stored experience, such as 'rollout_info.rl'; ``None``: no search
            results are stored, and values are known only up to the end of the episode.
        reanalyzer: reanalyzes steps; required if ``reanalyze_ratio`` is above 0.
    """

    def __init__(self, settings: TargetSettings, info_path: str | None, reanalyzer: Reanalyzer | None):
        self._settings, self._info_path, self._reanalyzer = settings, info_path, reanalyzer

    def targets(self, batch_info: BatchInfo, length: int) -> tuple[Any, HeldSteps]:
        """Compute the targets of the steps after each step of a batch.

        Args:
            batch_info: origin of the batch ``[B, T]``.
            length: T.

        Returns:
            A ``ModelTarget`` ``[B, T, R + 1, ...]`` without observations (``is_partial_trajectory`` is ``[B, T]``), and
            the steps as :class:`~alfx.algorithms.muzero.model_targets.HeldSteps`.
        """
        s = self._settings
        steps = HeldSteps(batch_info, length, s.num_unroll_steps)
        found = self._found(steps, batch_info)
        reward = self._rewards(steps, 0)[0]
        policy: Any = found.candidate_action_policy
        if isinstance(policy, Tensor):
            # A finished game has no next action, and the action after the newest step is not known yet.
            learns = ~(steps.beyond | (steps.at_end & steps.is_terminated[..., None]))
            policy = policy * learns[..., None]
        return ModelTarget(
            is_partial_trajectory=~steps.is_terminated, beyond_episode_end=steps.beyond, reward=reward,
            action=found.candidate_actions, action_policy=policy,
            game_over=steps.at_end & steps.is_terminated[..., None], value=found.value), steps

    def _found(self, steps: HeldSteps, batch_info: BatchInfo) -> Any:
        """Return values and policies ``[B, T, R + 1, ...]``, for a share of the rows from reanalysis."""
        batch_size, length, _ = steps.positions.shape
        count = round(self._settings.reanalyze_ratio * batch_size)
        if count == batch_size:
            return self._reanalyzed(steps, batch_info)
        found = self._stored(steps)
        if not count:
            return found
        chosen = torch.randperm(batch_size)[:count].to(steps.positions.device)
        part = BatchInfo(env_ids=batch_info.env_ids[chosen], positions=batch_info.positions[chosen],
                         replay_buffer=batch_info.replay_buffer)
        reanalyzed = self._reanalyzed(HeldSteps(part, length, steps.num_steps), part)
        return nest.map_structure(lambda x, y: x.index_copy(0, chosen, y.to(x.dtype)), found, reanalyzed)

    # Rewards and values ----------------------------------------------------------------------------------------

    def _rewards(self, steps: HeldSteps, further: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rewards and discounts of the steps t, ..., t + R + ``further``, and the value of finished episodes.

        Returns:
            Rewards and discounts ``[B, T, R + 1 + further]``, and values ``[B, T]``.
        """
        s = self._settings
        positions = steps.further(steps.num_steps + further)
        reward = s.scalar_reward(steps.field('time_step.reward', positions))
        discount = steps.field('time_step.discount', positions).to(reward.dtype) * s.discount
        index = torch.arange(positions.shape[-1], device=positions.device)
        end = steps.steps_to_end[..., None]
        reward, discount = torch.where(index <= end, reward, 0.0), torch.where(index <= end, discount, 1.0)
        if s.predicts_reward:
            return reward, discount, torch.zeros_like(reward[..., 0])
        # Without predicted rewards, the last reward is the value of the end, and earlier rewards must be 0.
        is_end = (index == end) & steps.is_terminated[..., None]
        if bool((torch.where(is_end, 0.0, reward) != 0).any()):
            raise ValueError('train_reward_function = False: expected rewards only at the last step of an episode, '
                             'found earlier ones; set it to True, for the model as well')
        final = s.scalar_reward(steps.field('time_step.reward', steps.last))[..., 0]
        return torch.zeros_like(reward), torch.where(is_end, s.discount, discount), final

    def _values(self, steps: HeldSteps, num_steps: Tensor, most: int, bootstrap: Tensor) -> Tensor:
        """Return n-step values ``[B, T, R + 1]``, see :func:`~alfx.algorithms.muzero.model_targets.n_step_values`."""
        reward, discount, final = self._rewards(steps, most)
        index = torch.arange(steps.num_steps + 1, device=num_steps.device) + num_steps[:, None, None]
        is_over = (index >= steps.steps_to_end[..., None]) & steps.is_terminated[..., None]
        bootstrap = torch.where(is_over, final[..., None], bootstrap.to(reward.dtype))
        return n_step_values(reward, discount, num_steps, bootstrap, most)

    # Targets from stored search results ------------------------------------------------------------------------

    def _stored(self, steps: HeldSteps) -> Any:
        """Return an ``MCTSInfo`` ``[B, T, R + 1, ...]`` from the search results stored with the steps."""
        s = self._settings
        if self._info_path is None:
            return MCTSInfo(value=self._monte_carlo(steps))
        found = steps.field(self._info_path)
        if s.td_steps < 0:
            return found._replace(value=self._monte_carlo(steps))
        later = steps.further(steps.num_steps + s.td_steps)[..., s.td_steps:]
        bootstrap = steps.field(f'{self._info_path}.value', later)
        num_steps = torch.full_like(steps.positions[:, 0, 0], s.td_steps)
        return found._replace(value=self._values(steps, num_steps, s.td_steps, bootstrap))

    def _monte_carlo(self, steps: HeldSteps) -> Tensor:
        """Return values ``[B, T, R + 1]`` up to the end of the episode, bootstrapped if it is not terminated."""
        further = max(int(steps.steps_to_end.max()) - steps.num_steps, 0)
        reward, discount, final = self._rewards(steps, further)
        bootstrap = final
        if self._info_path is not None:
            last = steps.field(f'{self._info_path}.value', steps.last)[..., 0]
            bootstrap = torch.where(steps.is_terminated, final, last.to(reward.dtype))
        return monte_carlo_values(reward, discount, bootstrap, steps.num_steps + 1)

    # Targets from reanalysis -----------------------------------------------------------------------------------

    def _reanalyzed(self, steps: HeldSteps, batch_info: BatchInfo) -> Any:
        """Return an ``MCTSInfo`` ``[B, T, R + 1, ...]`` from reanalysis."""
        s = self._settings
        assert self._reanalyzer is not None, 'required by a reanalyze_ratio above 0'
        count, most = s.num_unroll_steps + 1, s.reanalyze_td_steps
        positions = steps.further(s.num_unroll_steps + most)
        searched = positions if s.full_reanalyze else positions[..., :count]
        found = self._look(self._reanalyzer.search, steps, searched)
        values = found.value
        if not s.full_reanalyze:
            values = torch.cat((values, self._look(self._reanalyzer.values, steps, positions[..., count:])), -1)
        num_steps = self._td_steps(batch_info)
        index = torch.arange(count, device=num_steps.device) + num_steps[:, None, None]
        bootstrap = values.gather(-1, index.expand(*values.shape[:2], count))
        found = nest.map_structure(lambda x: x[:, :, :count], found)
        return found._replace(value=self._values(steps, num_steps, most, bootstrap))

    @staticmethod
    def _look(function: Callable[..., Any], steps: HeldSteps, positions: Tensor) -> Any:
        """Call ``function`` for positions ``[B, T, N]``; return a nest ``[B, T, N, ...]``."""
        env_ids = steps.env_ids.expand_as(positions).flatten()
        found = function(steps.buffer, env_ids, positions.flatten())
        return nest.map_structure(lambda x: x.unflatten(0, positions.shape), found)

    def _td_steps(self, batch_info: BatchInfo) -> Tensor:
        """Return n of each row, int64 ``[B]``."""
        s = self._settings
        if s.td_steps_func is None:
            return torch.full_like(batch_info.positions, s.reanalyze_td_steps)
        stored = batch_info.replay_buffer.current_pos.to(batch_info.positions.device)[batch_info.env_ids]
        oldest = context.get_progress('percent')
        age = (stored - 1 - batch_info.positions) / stored.clamp_min(1) * oldest
        num_steps = s.td_steps_func(age.clamp(0.0, 1.0), s.reanalyze_td_steps, oldest).long()
        if num_steps.shape != age.shape or bool(((num_steps < 1) | (num_steps > s.reanalyze_td_steps)).any()):
            raise ValueError(f'reanalyze_td_steps_func: expected numbers from 1 to reanalyze_td_steps = '
                             f'{s.reanalyze_td_steps} with the shape {tuple(age.shape)}, found {num_steps}')
        return num_steps
