"""Policy checkpoints of TD7 (Fujimoto et al. 2023, arXiv:2306.02451, section 4.2 and algorithm 2).

A policy is assessed over whole episodes, during which nothing is trained. As many updates as there were steps follow.
The policy with the best *worst* return is kept for evaluation, because the worst episode reveals an unstable policy.
"""
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alfx.data_structures import StepType
from alfx.gin_utils import Count, Fraction, configurable


class _Progress(NamedTuple):
    """Numbers that change during a run, all of them stored as floats."""

    is_running: float = 0.0  # whether the episode in progress was assessed from its start
    episode_return: float = 0.0
    length: float = 0.0
    num_episodes: float = 0.0  # of the current policy, as the next two
    num_steps: float = 0.0
    least_return: float = math.inf
    best: float = -math.inf  # worst return of the policy that was kept
    is_due: float = 0.0
    is_late: float = 0.0


@configurable
class PolicyCheckpoints(nn.Module):
    """Schedule of assessments, updates and policies to keep, in one environment.

    An assessment ends after ``num_episodes`` episodes, or earlier with a return below the worst one of the policy that
    was kept.

    Args:
        num_episodes: episodes per assessment at first. More episodes select more reliable policies, but policies are
            updated less often.
        late_num_episodes: episodes per assessment from update ``late_after`` on.
        late_after: number of updates before ``late_num_episodes`` takes effect.
        late_factor: when ``late_num_episodes`` comes into effect, the worst return of the kept policy is multiplied by
            this factor, so that the return of a single lucky episode can be exceeded. A negative return is lowered by
            the same share, whereas the paper's code raises it.

    Raises:
        ConfError: a number is out of range.
    """

    _progress: Tensor

    def __init__(self, num_episodes: Count = 1, late_num_episodes: Count = 20, late_after: Count = 750000,
                 late_factor: Fraction = 0.9):
        super().__init__()
        self._num_episodes = num_episodes, late_num_episodes
        self._late_after, self._late_factor = late_after, late_factor
        self.register_buffer('_progress', torch.tensor(_Progress(), dtype=torch.float64))

    def _set(self, progress: _Progress) -> None:
        self._progress.copy_(torch.tensor(progress, dtype=torch.float64))

    def observe(self, step_type: int, reward: float) -> bool:
        """Observe one step of the environment; return whether the current policy has to be kept."""
        now, keep = _Progress(*self._progress.tolist()), False
        if step_type == StepType.FIRST:
            now = now._replace(is_running=1.0, episode_return=0.0, length=0.0)
        elif now.is_running:
            now = now._replace(episode_return=now.episode_return + reward, length=now.length + 1)
            if step_type == StepType.LAST:
                now = now._replace(is_running=0.0, num_episodes=now.num_episodes + 1,
                                   num_steps=now.num_steps + now.length,
                                   least_return=min(now.least_return, now.episode_return))
                is_worse = now.least_return < now.best
                keep = not is_worse and now.num_episodes >= self._num_episodes[int(now.is_late)]
                now = now._replace(best=now.least_return if keep else now.best,
                                   is_due=float(now.is_due or is_worse or keep))
        self._set(now)
        return keep

    def updates_due(self, num_updates: int, per_step: int) -> int:
        """Return the number of updates to make now, 0 during an assessment; a new assessment begins after them.

        Args:
            num_updates: number of updates so far.
            per_step: number of updates for each step of the environment.
        """
        now = _Progress(*self._progress.tolist())
        if not now.is_due:
            return 0
        due = int(now.num_steps) * per_step
        now = now._replace(num_episodes=0.0, num_steps=0.0, least_return=math.inf, is_due=0.0)
        if not now.is_late and num_updates + due > self._late_after:
            now = now._replace(is_late=1.0, best=now.best - (1 - self._late_factor) * abs(now.best))
        self._set(now)
        return due
