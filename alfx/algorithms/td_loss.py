"""Temporal difference losses.

Sutton and Barto 2018, chapters 6 and 12; Schulman et al. 2016 (arXiv:1506.02438). For quantiles: Dabney et al. 2018
(arXiv:1710.10044). The formulas are in :mod:`alfx.utils.value_ops` and :mod:`alfx.utils.losses`. A LAST step has no
successor; its loss is 0.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import summary
from alfx.data_structures import LossInfo, StepType
from alfx.gin_utils import Count, Fraction, configurable, takes_arguments_of
from alfx.summary import summary_utils
from alfx.tensor_specs import TensorSpec
from alfx.utils import losses, tensor_utils, value_ops
from alfx.utils.normalizers import AdaptiveNormalizer


@configurable
class TDLoss(nn.Module):
    """Loss between values and bootstrapped returns.

    With ``td_lambda = 1`` the target of a step is the return up to the end of the sequence or episode, with 0 the
    one-step return. Other values give the lambda-return, the generalized advantage estimate plus the value.

    Args:
        gamma: discount of future rewards; for K-dimensional rewards also a list of K discounts.
        td_error_loss_fn: ``fn(target, value)``, elementwise.
        td_lambda: in [0, 1]; smaller values have less variance and more bias.
        normalize_target: normalize targets and values by running statistics of the targets before they are compared.
            This changes the scale of the loss; the values themselves are not normalized. The statistics are separate
            for each reward dimension if ``gamma`` is a list, and otherwise shared.
        debug_summaries: write more summaries.
        name: name of this loss, a prefix of its summaries.

    Raises:
        ValueError: ``gamma`` or ``td_lambda`` is out of [0, 1].
    """

    _gamma: Tensor

    def __init__(self, gamma: Fraction | Sequence[Fraction] = 0.99,
                 td_error_loss_fn: Callable[..., Tensor] = losses.element_wise_squared_loss, td_lambda: Fraction = 0.95,
                 normalize_target: bool = False, debug_summaries: bool = False, name: str = 'TDLoss'):
        super().__init__()
        if not isinstance(gamma, (int, float)) and not len(gamma):
            raise ValueError(f'{name}.gamma: expected a number or a non-empty list of numbers, found {gamma}')
        self._scalar_gamma = float(gamma) if isinstance(gamma, (int, float)) else None
        self.register_buffer('_gamma', torch.tensor(gamma, dtype=torch.float32), persistent=False)
        self._td_error_loss_fn = td_error_loss_fn
        self._lambda = td_lambda
        self._debug_summaries = debug_summaries
        self._name = name
        self._target_normalizer = None
        if normalize_target:
            self._target_normalizer = AdaptiveNormalizer(TensorSpec(self._gamma.shape), auto_update=False,
                                                         debug_summaries=debug_summaries,
                                                         name=f'{name}.target_normalizer')

    @property
    def gamma(self) -> Tensor:
        """Discount: 0-d, or ``[K]`` if each of K rewards has a discount."""
        return self._gamma

    @property
    def td_lambda(self) -> float:
        """Lambda: 0 for one-step targets, 1 for the return up to the end of the sequence or episode."""
        return self._lambda

    def _discount(self, info: Any) -> Tensor:
        """Return environment discount times gamma: ``[T, B]`` or ``[T, B, K]``."""
        if self._scalar_gamma is not None:
            return info.discount * self._scalar_gamma
        if info.reward.dim() != 3 or info.reward.shape[-1] != self._gamma.shape[0]:
            raise ValueError(f'{self._name}: gamma is a list of {self._gamma.shape[0]}, but the reward has shape '
                             f'{tuple(info.reward.shape)}; expected [T, B, {self._gamma.shape[0]}]')
        return info.discount.unsqueeze(-1) * self._gamma

    def compute_td_target(self, info: Any, target_value: Tensor) -> Tensor:
        """Compute the targets of all steps but the final one.

        Args:
            info: named tuple with ``reward`` (``[T, B]`` or ``[T, B, K]``), ``step_type`` and ``discount``
                (``[T, B]``).
            target_value: values to bootstrap from, with the shape of the reward.

        Returns:
            Targets ``[T-1, B]`` (``[T-1, B, K]``); the target of a LAST step is its own value.
        """
        return self._target(info.reward, target_value, info.step_type, self._discount(info))

    def _target(self, reward: Tensor, value: Tensor, step_type: Tensor, discount: Tensor) -> Tensor:
        if self._lambda == 1.0:
            return value_ops.discounted_return(reward, value, step_type, discount)
        if self._lambda == 0.0:
            return value_ops.one_step_discounted_return(reward, value, step_type, discount)
        advantage = value_ops.generalized_advantage_estimation(reward, value, step_type, discount, self._lambda)
        return advantage + value[:-1]

    def forward(self, info: Any, value: Tensor, target_value: Tensor) -> LossInfo:
        """Compute the loss of all steps.

        Args:
            info: named tuple with ``reward`` (``[T, B]`` or ``[T, B, K]``), ``step_type`` and ``discount``
                (``[T, B]``).
            value: values to train, with the shape of the reward.
            target_value: values to bootstrap from, with the same shape; may be ``value`` (it gets no gradient).

        Returns:
            ``LossInfo`` whose ``loss`` and ``extra`` are ``[T, B]``, averaged over the reward dimensions; 0 at the
            final step and at LAST steps.
        """
        target = self.compute_td_target(info, target_value.detach())
        value = value[:-1]
        if summary.should_record_summaries():
            self._summarize(info, value, target)
        if self._target_normalizer is not None:
            self._target_normalizer.update(target[info.step_type[:-1] != StepType.LAST])
            target = self._target_normalizer.transform(target)
            value = self._target_normalizer.transform(value)
        return self._reduce(self._td_error_loss_fn(target, value), info)

    def _reduce(self, loss: Tensor, info: Any) -> LossInfo:
        """Reduce ``[T-1, B]`` or ``[T-1, B, K]`` to ``[T, B]``."""
        if loss.dim() == 3:
            loss = loss.mean(-1)
        loss = loss * (info.step_type[:-1] != StepType.LAST)
        loss = tensor_utils.tensor_extend_zero(loss)
        return LossInfo(loss=loss, extra=loss)

    def _summarize(self, info: Any, value: Tensor, target: Tensor) -> None:
        """Log values and targets ``[T-1, B]``, or ``[T-1, B, K]`` for K rewards, without LAST steps."""
        mask = info.step_type[:-1] != StepType.LAST
        for suffix, v, t in summary_utils.by_reward(value.detach(), target):
            summary_utils.safe_mean_summary(f'train/values{suffix}', v, mask)
            summary_utils.safe_mean_summary(f'train/targets{suffix}', t, mask)
            if self._debug_summaries:
                with summary.scope(self._name):
                    summary.scalar(f'explained_variance_of_return_by_value{suffix}',
                                   tensor_utils.explained_variance(v, t, mask))
                    summary_utils.safe_mean_hist_summary(f'values{suffix}', v, mask)
                    summary_utils.safe_mean_hist_summary(f'returns{suffix}', t, mask)
                    summary_utils.safe_mean_hist_summary(f'td_error{suffix}', t - v, mask)


@configurable
class TDQRLoss(TDLoss):
    """Quantile regression loss between the quantiles of a value and of its bootstrapped return.

    Dabney et al. 2018 (arXiv:1710.10044), eq. 10.

    Args:
        num_quantiles: number of quantiles N.
        td_error_loss_fn: ``fn(value - target)``, elementwise.
        td_lambda: 0 or 1; a mixture of returns has no quantiles in closed form.
        sum_over_quantiles: sum over the quantiles instead of averaging.
        kwargs: arguments of :class:`TDLoss`, except ``normalize_target``.

    Raises:
        ValueError: ``td_lambda`` is neither 0 nor 1, or ``gamma`` is out of [0, 1].
    """

    _fractions: Tensor

    @takes_arguments_of(TDLoss, without=('normalize_target', ), defaults={'name': 'TDQRLoss'},
                        after={'sum_over_quantiles': 'td_lambda'})
    def __init__(self, num_quantiles: Count = 50, td_error_loss_fn: Callable[[Tensor], Tensor] = losses.huber_function,
                 td_lambda: Fraction = 1.0, sum_over_quantiles: bool = False, *, name: str, **kwargs: Any):
        if td_lambda not in (0.0, 1.0):
            raise ValueError(f'{name}: td_lambda must be 0 or 1, found {td_lambda}')
        super().__init__(name=name, td_error_loss_fn=td_error_loss_fn, td_lambda=td_lambda, normalize_target=False,
                         **kwargs)
        self._num_quantiles = num_quantiles
        self._sum_over_quantiles = sum_over_quantiles
        fractions = (torch.arange(num_quantiles, dtype=torch.float32) + 0.5) / num_quantiles
        self.register_buffer('_fractions', fractions, persistent=False)

    @property
    def num_quantiles(self) -> int:
        """Number of quantiles N."""
        return self._num_quantiles

    def compute_td_target(self, info: Any, target_value: Tensor) -> Tensor:
        """Compute the quantiles of the targets of all steps but the final one.

        Args:
            info: named tuple with ``reward`` (``[T, B]`` or ``[T, B, K]``), ``step_type`` and ``discount``
                (``[T, B]``).
            target_value: ``[T, B, M]`` or ``[T, B, K, M]``, for any number of quantiles M.

        Returns:
            Quantiles ``[T-1, B, M]`` or ``[T-1, B, K, M]``.
        """
        if target_value.shape[:-1] != info.reward.shape:
            raise ValueError(f'{self._name}: target_value has shape {tuple(target_value.shape)}; expected the shape of '
                             f'the reward, {tuple(info.reward.shape)}, and a dimension of quantiles')
        discount = self._discount(info)
        if discount.dim() < info.reward.dim():
            discount = discount.unsqueeze(-1)
        discount = discount.unsqueeze(-1).expand_as(target_value)
        reward = info.reward.unsqueeze(-1).expand_as(target_value)
        return self._target(reward, target_value, info.step_type, discount)

    def forward(self, info: Any, value: Tensor, target_value: Tensor) -> LossInfo:
        """Compute the loss of all steps.

        Args:
            info: named tuple with ``reward`` (``[T, B]`` or ``[T, B, K]``), ``step_type`` and ``discount``
                (``[T, B]``).
            value: quantiles to train, ``[T, B, N]`` or ``[T, B, K, N]``.
            target_value: quantiles to bootstrap from, ``[T, B, M]`` or ``[T, B, K, M]``; they get no gradient.

        Returns:
            ``LossInfo`` whose ``loss`` and ``extra`` are ``[T, B]``, averaged over the reward dimensions; 0 at the
            final step and at LAST steps.
        """
        expected = (*info.reward.shape, self._num_quantiles)
        if tuple(value.shape) != expected:
            raise ValueError(f'{self._name}: value has shape {tuple(value.shape)}; expected {expected}, for '
                             f'num_quantiles={self._num_quantiles}')
        target = self.compute_td_target(info, target_value.detach())
        value = value[:-1]
        if summary.should_record_summaries():
            self._summarize(info, value.mean(-1), target.mean(-1))
        loss = losses.quantile_regression_loss(value, target, self._fractions, self._td_error_loss_fn).mean(-2)
        return self._reduce(loss.sum(-1) if self._sum_over_quantiles else loss.mean(-1), info)
