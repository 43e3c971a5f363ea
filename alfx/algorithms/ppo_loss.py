"""Clipped surrogate loss of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9).

``PPOAlgorithm.preprocess_experience`` computes advantages and returns. Value clipping is off by default.
"""
from collections.abc import Callable
from typing import Any

import torch

from alfx import context, summary
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import Positive, configurable, takes_arguments_of
from alfx.utils import value_ops


@configurable
class PPOLoss(ActorCriticLoss):
    """Clipped surrogate objective, value error and entropy bonus.

    Args:
        compute_advantages_internally: estimate the advantages in the loss, from the minibatch of sequences
            (``mini_batch_length > 1``), instead of from the whole buffer; saves memory.
        importance_ratio_clipping: epsilon of eq. 7, a number or a scheduler, which is read once per iteration. Smaller
            values change the policy less per unroll.
        log_prob_clipping: if > 0, clip log-probabilities to [-x, x].
        check_numerics: raise an error at the first NaN or infinite number, for debugging.
        value_clipping: clip the change of the value since the unroll to [-x, x], and use the larger of the errors of
            the clipped and the unclipped value; ``None`` for no clipping.
        kwargs: arguments of :class:`~alfx.algorithms.actor_critic_loss.ActorCriticLoss`, except ``use_gae`` and
            ``use_td_lambda_return``; the default of ``normalize_advantages`` is ``True``.
    """

    @takes_arguments_of(
        ActorCriticLoss, without=('use_gae', 'use_td_lambda_return'),
        defaults={'normalize_advantages': True, 'name': 'PPOLoss'},
        after={'compute_advantages_internally': 'normalize_advantages', 'importance_ratio_clipping': 'td_loss_weight'})
    def __init__(self, name: str, compute_advantages_internally: bool = False,
                 importance_ratio_clipping: Positive | Callable[[], Positive] = 0.2, log_prob_clipping: float = 0.0,
                 check_numerics: bool = False, value_clipping: Positive | None = None, **kwargs: Any):
        super().__init__(use_gae=True, use_td_lambda_return=True, name=name, **kwargs)
        self.value_clipping = value_clipping
        self._compute_advantages_internally = compute_advantages_internally
        self._clipping_schedule = None
        self._importance_ratio_clipping: Any
        if callable(importance_ratio_clipping):
            self._clipping_schedule = importance_ratio_clipping
            # Traced updates read it. NaN before update_schedules, so that a forgotten call is noticed.
            self.register_buffer('_importance_ratio_clipping', torch.tensor(float('nan')), False)
        else:
            self._importance_ratio_clipping = importance_ratio_clipping
        self._log_prob_clipping = log_prob_clipping
        self._check_numerics = check_numerics

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are not traceable with ``check_numerics``, which reads values."""
        return super().own_capabilities()._replace(traceable_update=not self._check_numerics)

    @property
    def compute_advantages_internally(self) -> bool:
        """Return whether the loss estimates the advantages itself."""
        return self._compute_advantages_internally

    def update_schedules(self) -> None:
        """Read the schedule of ``importance_ratio_clipping``; call it before the updates of an iteration."""
        if self._clipping_schedule:
            self._importance_ratio_clipping.fill_(self._clipping_schedule())

    def calc_rollout_returns_and_advantages(self, info: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute returns and advantages of an unroll ``[T, B, ...]``, to be passed to :meth:`forward` in its info."""
        return super().calc_returns_and_advantages(info)

    def calc_returns_and_advantages(self, info: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the precomputed values of the whole unroll, unless ``compute_advantages_internally``."""
        if self._compute_advantages_internally:
            return super().calc_returns_and_advantages(info)
        return info.returns, info.advantages

    def _mask_bootstrap_step(self, is_valid: torch.Tensor) -> torch.Tensor:
        return super()._mask_bootstrap_step(is_valid) if self._compute_advantages_internally else is_valid

    def _value_error(self, info: Any, returns: torch.Tensor) -> torch.Tensor:
        """Return ``max(error(V), error(V_old + clip(V - V_old)))``, or ``error(V)`` without clipping."""
        error = super()._value_error(info, returns)
        if self.value_clipping is None:
            return error
        near = info.old_value + (info.value - info.old_value).clamp(-self.value_clipping, self.value_clipping)
        return torch.maximum(error, self._td_error_loss_fn(returns, near))

    def _pg_loss(self, info: Any, advantages: torch.Tensor) -> torch.Tensor:
        """Return ``-min(ratio A, clip(ratio) A)``, ``[T, B]``."""
        ratio, clipped_ratio = value_ops.action_importance_ratio(
            action_distribution=info.action_distribution, rollout_action_distribution=info.rollout_action_distribution,
            action=info.action, clipping_mode='double_sided', scope=self._name,
            importance_ratio_clipping=self._importance_ratio_clipping, log_prob_clipping=self._log_prob_clipping,
            check_numerics=self._check_numerics, debug_summaries=self._debug_summaries,
            rollout_log_prob=info.rollout_log_prob)
        if context.should_record_summaries():
            _summarize_change(ratio.detach(), self._importance_ratio_clipping)
        loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
        if self._check_numerics and not torch.isfinite(loss).all():
            raise FloatingPointError(f'{self._name}: the policy loss is not finite')
        return loss


def _summarize_change(ratio: torch.Tensor, clipping: float | torch.Tensor) -> None:
    """Log how far the policy has moved from the policy that acted.

    The divergence KL(old, new) is estimated as the mean of ``r - 1 - log r``, which is never negative (Schulman 2020,
    "Approximating KL divergence").

    Args:
        ratio: ``[T, B]``, new divided by old probability of the action that was taken.
        clipping: the ratio is clipped to ``[1 - clipping, 1 + clipping]``; 0 for no clipping.
    """
    summary.scalar('train/approx_kl', (ratio - 1.0 - ratio.log()).mean())
    if clipping > 0:
        summary.scalar('train/clip_fraction', ((ratio - 1.0).abs() > clipping).float().mean())
