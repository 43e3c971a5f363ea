"""Loss of IMPALA: an actor-critic on V-trace targets (Espeholt et al. 2018, arXiv:1802.01561, section 4.2).

The recursion is :func:`alfx.utils.value_ops.vtrace`. Differences from the paper: the value error is not halved
(``td_loss_weight = 0.25`` is the paper's weight of 0.5), and losses are averaged over steps, not summed.
"""
from typing import Any

import torch

from alfx import context
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.data_structures import LossInfo, StepType
from alfx.gin_utils import ConfError, Positive, configurable, problem_at, takes_arguments_of
from alfx.summary import summary_utils
from alfx.utils import dist_utils, value_ops


@configurable
class VTraceLoss(ActorCriticLoss):
    """Policy gradient, value error and entropy bonus with off-policy correction for actions of an older policy.

    The importance ratio of an action is its current probability divided by its probability when it was taken. The ratio
    weights the correction of the value (rho), the trace from later steps (c) and the policy gradient (pg_rho), each
    clipped from above.

    Args:
        clip_rho_thres: upper bound of rho, above 0; ``None``: not clipped.
        clip_c_thres: upper bound of c, above 0 and at most ``clip_rho_thres``; ``None``: not clipped.
        clip_pg_rho_thres: upper bound of pg_rho, above 0; ``None``: not clipped.
        kwargs: arguments of :class:`~alfx.algorithms.actor_critic_loss.ActorCriticLoss`, except ``use_gae`` and
            ``use_td_lambda_return``; the default of ``td_lambda``, the lambda of the trace, is 1.

    Raises:
        ConfError: a threshold is out of range.
        ValueError: ``td_lambda`` is out of range.
    """

    @takes_arguments_of(ActorCriticLoss, without=('use_gae', 'use_td_lambda_return'),
                        defaults={'td_lambda': 1.0, 'name': 'VTraceLoss'}, after={'clip_rho_thres': 'td_lambda'})
    def __init__(self, clip_rho_thres: Positive | None = 1.0, clip_c_thres: Positive | None = 1.0,
                 clip_pg_rho_thres: Positive | None = 1.0, **kwargs: Any):
        super().__init__(use_gae=True, use_td_lambda_return=True, **kwargs)
        self._thresholds = {'rho': clip_rho_thres, 'c': clip_c_thres, 'pg_rho': clip_pg_rho_thres}
        if clip_rho_thres is not None and (clip_c_thres is None or clip_c_thres > clip_rho_thres):
            raise ConfError([problem_at('VTraceLoss', 'clip_c_thres', f'= {clip_c_thres} exceeds VTraceLoss.clip_rho_'
                                        f'thres = {clip_rho_thres}: the values may not converge',
                                        'lower it, or raise clip_rho_thres')])

    def forward(self, info: Any) -> LossInfo:  # type: ignore[override]
        """Compute the loss of each step.

        Args:
            info: ``ImpalaInfo`` of ``[T, B, ...]``. The last step is only used to bootstrap; its advantage and value
                error are 0.

        Returns:
            ``loss`` ``[T, B]``, with its terms as ``extra``.
        """
        info = info._replace(log_prob=dist_utils.compute_log_probability(info.action_distribution, info.action))
        if self._debug_summaries and context.should_record_summaries():
            self._summarize_ratios(info)
        return super().forward(info)

    def calc_returns_and_advantages(self, info: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute V-trace targets and advantages, both with the shape of ``info.value`` and without gradient.

        Args:
            info: the info of the steps, with ``log_prob`` of the current policy.
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
        """Return ``-A log pi(a)``, ``[T, B]``; the ratio is part of A."""
        return -advantages * info.log_prob

    def _summarize_ratios(self, info: Any) -> None:
        """Log the distance of the current policy from the policy that acted, over the steps that are trained on."""
        mask = info.step_type[:-1] != StepType.LAST
        ratio = self._ratio(info)[:-1]
        log_ratio = (info.rollout_log_prob - info.log_prob.detach())[:-1]
        with context.summary_scope(self._name):
            summary_utils.safe_mean_hist_summary('importance_ratio', ratio, mask)
            summary_utils.safe_mean_summary('kl_of_rollout_policy', log_ratio, mask)
            for symbol, threshold in self._thresholds.items():
                clipped = ratio if threshold is None else ratio.clamp(max=threshold)
                summary_utils.safe_mean_summary(f'{symbol}/mean', clipped, mask)
                summary_utils.safe_mean_summary(f'{symbol}/clip_fraction', (clipped < ratio).float(), mask)
