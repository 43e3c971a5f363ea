"""The loss of IMPALA: an actor-critic on V-trace targets (Espeholt et al. 2018, arXiv:1802.01561, section 4.2).

The recursion is :func:`alfx.utils.value_ops.vtrace`. Differs from the paper in that the value error is not halved
(``td_loss_weight = 0.25`` is the paper's weight of 0.5), and that losses are averaged over steps, not summed.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfx import context
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.data_structures import LossInfo, StepType
from alfx.gin_utils import ConfError, check_value, configurable
from alfx.gin_utils.checks import problem_at
from alfx.summary import summary_utils
from alfx.utils import dist_utils, value_ops
from alfx.utils.losses import element_wise_squared_loss


@configurable
class VTraceLoss(ActorCriticLoss):
    """Policy gradient, value error and entropy bonus for actions that an older policy may have taken.

    The ratio of the probabilities of each action now and when it was taken weights the correction of the value (rho),
    what is carried back from later steps (c) and the policy gradient (pg_rho), each clipped from above.

    Args:
        gamma: discount factor, or one for each of K rewards.
        td_error_loss_fn: ``(target, value)`` to an error of the same shape.
        td_lambda: lambda of the trace, in [0, 1].
        clip_rho_thres: rho, above 0; ``None``: not clipped.
        clip_c_thres: c, above 0, at most rho; ``None``: not clipped.
        clip_pg_rho_thres: pg_rho, above 0; ``None``: not clipped.
        normalize_advantages: to zero mean and unit variance within a batch.
        advantage_clip: clip advantages to [-x, x].
        entropy_regularization: weight of the entropy; ``None``: no such term.
        td_loss_weight: weight of the value error.
        debug_summaries: write more summaries.
        name: name of this loss.

    Raises:
        ConfError: a threshold is out of range.
        ValueError: ``td_lambda`` is.
    """

    def __init__(self, gamma: float | Sequence[float] = 0.99,
                 td_error_loss_fn: Callable[..., torch.Tensor] = element_wise_squared_loss, td_lambda: float = 1.0,
                 clip_rho_thres: float | None = 1.0, clip_c_thres: float | None = 1.0,
                 clip_pg_rho_thres: float | None = 1.0, normalize_advantages: bool = False,
                 advantage_clip: float | None = None, entropy_regularization: float | None = None,
                 td_loss_weight: float = 1.0, debug_summaries: bool = False, name: str = 'VTraceLoss'):
        super().__init__(gamma=gamma, td_error_loss_fn=td_error_loss_fn, use_gae=True, td_lambda=td_lambda,
                         use_td_lambda_return=True, normalize_advantages=normalize_advantages,
                         advantage_clip=advantage_clip, entropy_regularization=entropy_regularization,
                         td_loss_weight=td_loss_weight, debug_summaries=debug_summaries, name=name)
        self._thresholds = {'rho': clip_rho_thres, 'c': clip_c_thres, 'pg_rho': clip_pg_rho_thres}
        for symbol, threshold in self._thresholds.items():
            check_value('VTraceLoss', f'clip_{symbol}_thres', threshold, float, above=0, optional=True)
        if clip_rho_thres is not None and (clip_c_thres is None or clip_c_thres > clip_rho_thres):
            raise ConfError([problem_at('VTraceLoss', 'clip_c_thres', f'= {clip_c_thres} exceeds VTraceLoss.clip_rho_'
                                        f'thres = {clip_rho_thres}: the values need not converge then',
                                        'lower it, or raise clip_rho_thres')])

    def forward(self, info: Any) -> LossInfo:  # type: ignore[override]
        """The loss of each step.

        Args:
            info: ``ImpalaInfo`` of ``[T, B, ...]``. The last step is only bootstrapped from, its own advantage and
                value error are 0.

        Returns:
            ``loss`` ``[T, B]``, and its terms as ``extra``.
        """
        info = info._replace(log_prob=dist_utils.compute_log_probability(info.action_distribution, info.action))
        if self._debug_summaries and context.should_record_summaries():
            self._summarize_ratios(info)
        return super().forward(info)

    def calc_returns_and_advantages(self, info: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """V-trace targets of the value and advantages, both of the shape of ``info.value`` and without gradient.

        Args:
            info: with ``log_prob`` of the policy as it is now, besides what the steps yield.
        """
        with torch.no_grad():
            value = info.value.detach()
            targets, advantages = value_ops.vtrace(
                info.reward, value, info.step_type, self._discount(info), self._ratio(info), self._lambda,
                self._thresholds['rho'], self._thresholds['c'], self._thresholds['pg_rho'])
            return torch.cat([targets, value[-1:]]), torch.cat([advantages, torch.zeros_like(value[-1:])])

    @staticmethod
    def _ratio(info: Any) -> torch.Tensor:
        return torch.exp(info.log_prob.detach() - info.rollout_log_prob)

    def _pg_loss(self, info: Any, advantages: torch.Tensor) -> torch.Tensor:
        """``-A log pi(a)``, ``[T, B]``; the ratio is in A."""
        return -advantages * info.log_prob

    def _summarize_ratios(self, info: Any) -> None:
        """How far the policy of now is from the one that acted; only of steps that are trained on."""
        mask = info.step_type[:-1] != StepType.LAST
        ratio = self._ratio(info)[:-1]
        behind = (info.rollout_log_prob - info.log_prob.detach())[:-1]
        with context.summary_scope(self._name):
            summary_utils.safe_mean_hist_summary('importance_ratio', ratio, mask)
            summary_utils.safe_mean_summary('kl_of_rollout_policy', behind, mask)
            for symbol, threshold in self._thresholds.items():
                clipped = ratio if threshold is None else ratio.clamp(max=threshold)
                summary_utils.safe_mean_summary(f'{symbol}/mean', clipped, mask)
                summary_utils.safe_mean_summary(f'{symbol}/clip_fraction', (clipped < ratio).float(), mask)
