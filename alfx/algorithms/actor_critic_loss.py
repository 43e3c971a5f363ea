"""Loss of advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, section 4).

``policy gradient + td_loss_weight * value error - entropy_regularization * entropy``. Each term is a function;
:meth:`ActorCriticLoss.forward` adds them.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfx import context, summary
from alfx.algorithms.algorithm import Loss
from alfx.data_structures import LossInfo, StepType, namedtuple
from alfx.gin_utils import Fraction, NonNegative, Positive, configurable
from alfx.summary.summary_utils import by_reward
from alfx.utils import dist_utils, value_ops
from alfx.utils.losses import element_wise_squared_loss
from alfx.utils.tensor_utils import explained_variance

ActorCriticLossInfo = namedtuple('ActorCriticLossInfo', ['pg_loss', 'td_loss', 'neg_entropy'], default_value=())
"""Terms of the loss before weighting, ``[T, B]`` each (``td_loss`` is ``[T, B, K]`` for a K-dimensional reward)."""

_TINY = 1e-6  # below the smallest weight of a valid step


def normalize_advantages(advantages: torch.Tensor, is_valid: torch.Tensor) -> torch.Tensor:
    """Normalize advantages ``[T, B]`` to zero mean and unit variance over the steps where ``is_valid``.

    Other steps are left out of the statistics: no decision is made at a LAST step. In distributed training the
    statistics are those of the joint batch of all processes.
    """
    over_ranks = context.mean_over_ranks
    count = over_ranks(is_valid.sum()).clamp(min=_TINY)
    mean = over_ranks((advantages * is_valid).sum()) / count
    centered = (advantages - mean) * is_valid
    return centered / (over_ranks((centered * centered).sum()) / count + 1e-16).sqrt().add(1e-8)


@configurable
class ActorCriticLoss(Loss):
    """Policy gradient, value error and entropy bonus.

    Args:
        gamma: discount factor, or one per dimension of a K-dimensional reward.
        td_error_loss_fn: maps ``(target, value)`` to an error of the same shape.
        use_gae: compute advantages by generalized advantage estimation; otherwise as the discounted return minus the
            value.
        td_lambda: lambda of generalized advantage estimation, in [0, 1].
        use_td_lambda_return: with ``use_gae``, train the value towards ``advantage + value`` rather than towards the
            discounted return.
        normalize_advantages: normalize advantages to zero mean and unit variance within a batch. For a
            multi-dimensional reward this applies to the weighted sum over dimensions, unless ``separate_rewards``.
        advantage_clip: clip advantages to [-x, x]; for a multi-dimensional reward the weighted sum, unless
            ``separate_rewards``.
        separate_rewards: normalize and clip the advantages of each reward dimension separately before weighting, so
            that only the weights decide how much a dimension counts. Otherwise larger rewards count more.
        entropy_regularization: weight of the entropy; ``None``: no entropy term.
        td_loss_weight: weight of the value error.
        debug_summaries: write more summaries.
        name: name of this loss.
    """

    _gamma: torch.Tensor

    def __init__(self, gamma: Fraction | Sequence[Fraction] = 0.99,
                 td_error_loss_fn: Callable[..., torch.Tensor] = element_wise_squared_loss, use_gae: bool = False,
                 td_lambda: Fraction = 0.95, use_td_lambda_return: bool = True, normalize_advantages: bool = False,
                 advantage_clip: Positive | None = None, entropy_regularization: NonNegative | None = None,
                 td_loss_weight: float = 1.0, debug_summaries: bool = False, name: str = 'ActorCriticLoss',
                 separate_rewards: bool = False):
        super().__init__(name=name)
        self.register_buffer('_gamma', torch.as_tensor(gamma, dtype=torch.float32), persistent=False)
        self._td_error_loss_fn = td_error_loss_fn
        self._use_gae = use_gae
        self._lambda = td_lambda
        self._use_td_lambda_return = use_td_lambda_return
        self._normalize_advantages = normalize_advantages
        self._advantage_clip = advantage_clip
        self._separate_rewards = separate_rewards
        self._entropy_regularization = entropy_regularization
        self._td_loss_weight = td_loss_weight
        self._debug_summaries = debug_summaries

    @property
    def gamma(self) -> torch.Tensor:
        """Discount factor, of rank 0 or ``[K]``."""
        return self._gamma

    @property
    def td_lambda(self) -> float:
        """Lambda of the advantage estimation."""
        return self._lambda

    def calc_loss(self, info: Any) -> LossInfo:
        """Call :meth:`forward`."""
        return self(info)

    def forward(self, info: Any) -> LossInfo:  # type: ignore[override]
        """Compute the loss of each step.

        Args:
            info: ``ActorCriticInfo`` of ``[T, B, ...]``. The last step is only used to bootstrap: its advantage and
                value error are 0.

        Returns:
            ``loss`` ``[T, B]``, and its terms as ``extra``.
        """
        returns, advantages = self.calc_returns_and_advantages(info)
        if self._debug_summaries and context.should_record_summaries():
            self._summarize(info.value, returns, advantages)
        advantages = self._processed_advantages(info, advantages)
        pg_loss = self._pg_loss(info, advantages.detach())
        td_loss = self._value_error(info, returns.detach())
        neg_entropy, neg_entropy_for_gradient = self._neg_entropy(info)
        if context.should_record_summaries():
            self._summarize_learning(info.value.detach(), returns, neg_entropy)
        loss = torch.add(pg_loss, td_loss if td_loss.ndim == 2 else td_loss.mean(dim=2), alpha=self._td_loss_weight)
        if self._entropy_regularization is not None:
            loss = torch.add(loss, neg_entropy_for_gradient, alpha=self._entropy_regularization)
        return LossInfo(loss=loss, extra=ActorCriticLossInfo(pg_loss, td_loss, neg_entropy))

    def calc_returns_and_advantages(self, info: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute value targets and advantages, both of the shape of ``info.value`` and without gradient."""
        with torch.no_grad():
            value = info.value.detach()
            steps = info.reward, value, info.step_type, self._discount(info)
            if self._use_gae:
                advantages = value_ops.generalized_advantage_estimation(*steps, self._lambda)
                returns = advantages + value[:-1] if self._use_td_lambda_return else value_ops.discounted_return(*steps)
            else:
                returns = value_ops.discounted_return(*steps)
                advantages = returns - value[:-1]
            return torch.cat([returns, value[-1:]]), torch.cat([advantages, torch.zeros_like(value[-1:])])

    def _discount(self, info: Any) -> torch.Tensor:
        """Return the environment discount times gamma, in the shape of ``info.value``."""
        if self._gamma.ndim and (info.value.ndim != 3 or info.value.shape[-1] != len(self._gamma)):
            raise ValueError(f'{self._name}: gamma is a list of {len(self._gamma)}, but the value has shape '
                             f'{tuple(info.value.shape)}; expected [T, B, {len(self._gamma)}]')
        discount = info.discount.unsqueeze(-1) if info.value.ndim == 3 else info.discount
        return (discount * self._gamma).expand_as(info.value)

    def _processed_advantages(self, info: Any, advantages: torch.Tensor) -> torch.Tensor:
        """Weight advantages over reward dimensions, normalize and clip them: ``[T, B]``."""
        if advantages.ndim == 2:
            return self._normalized_and_clipped(info, advantages)
        weights = info.reward_weights if isinstance(info.reward_weights, torch.Tensor) else torch.ones_like(advantages)
        if not self._separate_rewards:
            return self._normalized_and_clipped(info, (advantages * weights).sum(-1))
        each = torch.stack([self._normalized_and_clipped(info, a) for a in advantages.unbind(-1)], -1)
        return (each * weights).sum(-1)

    def _normalized_and_clipped(self, info: Any, advantages: torch.Tensor) -> torch.Tensor:
        if self._normalize_advantages:
            is_valid = (info.step_type != StepType.LAST).to(advantages.dtype)
            advantages = normalize_advantages(advantages, self._mask_bootstrap_step(is_valid))
        if self._advantage_clip is not None:
            advantages = advantages.clamp(-self._advantage_clip, self._advantage_clip)
        return advantages

    def _mask_bootstrap_step(self, is_valid: torch.Tensor) -> torch.Tensor:
        """Mask the last step of an unroll, which has no advantage."""
        is_valid[-1] = 0
        return is_valid

    def _pg_loss(self, info: Any, advantages: torch.Tensor) -> torch.Tensor:
        """``-A log pi(a)``, ``[T, B]``."""
        return -advantages * dist_utils.compute_log_probability(info.action_distribution, info.action)

    def _value_error(self, info: Any, returns: torch.Tensor) -> torch.Tensor:
        """Compute the value error, in the shape of ``returns``."""
        return self._td_error_loss_fn(returns, info.value)

    def _neg_entropy(self, info: Any) -> tuple[Any, Any]:
        """Return ``-H(pi)`` ``[T, B]`` and the tensor that provides its gradient; both ``()`` if neither is needed."""
        if self._entropy_regularization is None and not context.should_record_summaries():
            return (), ()
        entropy, entropy_for_gradient = dist_utils.entropy_with_fallback(info.action_distribution)
        return -entropy, -entropy_for_gradient

    def _summarize_learning(self, value: torch.Tensor, returns: torch.Tensor, neg_entropy: Any) -> None:
        """Log how well the value explains the returns, and the entropy of the policy."""
        for suffix, v, r in by_reward(value, returns):
            summary.scalar(f'train/explained_variance{suffix}', explained_variance(v, r))
        if isinstance(neg_entropy, torch.Tensor):
            summary.scalar('train/entropy', -neg_entropy.detach().mean())

    def _summarize(self, value: torch.Tensor, returns: torch.Tensor, advantages: torch.Tensor) -> None:
        with context.summary_scope(self._name):
            for suffix, v, r, a in by_reward(value.detach(), returns, advantages):
                summary.scalar(f'values{suffix}', v.mean())
                summary.scalar(f'returns{suffix}', r.mean())
                summary.scalar(f'advantages/mean{suffix}', a.mean())
                summary.scalar(f'advantages/std{suffix}', a.std(unbiased=False))
                summary.scalar(f'explained_variance_of_return_by_value{suffix}', explained_variance(v, r))
