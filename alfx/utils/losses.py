"""Losses on predictions of scalars, elementwise and distributional.

The loss functions can be named in conf files (``TDLoss.td_error_loss_fn = @element_wise_huber_loss``, with or without
``losses.`` before it) and are passed as plain functions.
"""
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alfx import summary
from alfx.data_structures import LossInfo
from alfx.gin_utils import Count, NonNegative, configurable, register_function
from alfx.utils.math_ops import InvertibleTransform, binary_neg_entropy


@register_function
def element_wise_huber_loss(x: Tensor, y: Tensor) -> Tensor:
    """Elementwise Huber loss: ``0.5 d^2`` for ``|d| < 1``, else ``|d| - 0.5``, with ``d = x - y``."""
    return F.smooth_l1_loss(y, x, reduction='none')


@register_function
def element_wise_squared_loss(x: Tensor, y: Tensor) -> Tensor:
    """Elementwise squared error ``(x - y)^2``."""
    return F.mse_loss(y, x, reduction='none')


@register_function
def huber_function(x: Tensor, delta: float = 1.0) -> Tensor:
    """Huber function: ``0.5 x^2`` for ``|x| < delta``, else ``delta (|x| - 0.5 delta)``; elementwise.

    Args:
        x: tensor of any shape.
        delta: positive.
    """
    return F.huber_loss(x, x.new_zeros(()).expand_as(x), reduction='none', delta=delta)


def _fractions(num_quantiles: int, like: Tensor) -> Tensor:
    """Midpoints of ``num_quantiles`` equal parts of [0, 1]."""
    return (torch.arange(num_quantiles, dtype=like.dtype, device=like.device) + 0.5) / num_quantiles


@register_function
def multi_quantile_huber_loss(quantiles: Tensor, target: Tensor, delta: float = 0.1) -> Tensor:
    """Quantile Huber loss; its minimum puts ``quantiles`` at evenly spaced quantiles of the targets.

    Dabney et al. 2018 (arXiv:1710.10044), eq. 10, divided by delta so that it tends to the quantile loss as delta
    goes to 0.

    Args:
        quantiles: ``[B, N]`` estimates at the fractions ``(i + 0.5) / N``.
        target: ``[B]``, or ``[B, M]`` for M samples.
        delta: half width of the quadratic part; 0 for the plain quantile loss.

    Returns:
        Loss ``[B]``, averaged over N and M.
    """
    target = target.unsqueeze(-1) if target.dim() == 1 else target
    fraction = _fractions(quantiles.shape[-1], quantiles)
    difference = target.unsqueeze(-1) - quantiles.unsqueeze(-2)  # [B, M, N]
    weight = torch.where(difference < 0, 1.0 - fraction, fraction)
    size = huber_function(difference, delta) / delta if delta > 0 else difference.abs()
    return (weight * size).mean((-2, -1))


def quantile_regression_loss(value: Tensor, target: Tensor, fraction: Tensor,
                             loss_fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Quantile loss ``|fraction[i] - 1{target[j] < value[i]}| loss_fn(value[i] - target[j])`` for every pair.

    Args:
        value: ``[..., N]`` quantile estimates.
        target: ``[..., M]`` samples or quantiles of the target; detach it to stop its gradient.
        fraction: ``[N]`` or ``[..., N]`` in [0, 1], the fraction that each value estimates.
        loss_fn: elementwise, even function.

    Returns:
        Losses ``[..., M, N]``.
    """
    difference = value.unsqueeze(-2) - target.unsqueeze(-1)
    fraction = fraction.to(value.dtype).unsqueeze(-2)
    return torch.where(difference > 0, 1.0 - fraction, fraction) * loss_fn(difference)


@register_function
def iqn_huber_loss(value: Tensor, target: Tensor, tau_hat: Any = (), next_delta_tau: Any = (), fixed_tau: Any = (),
                   sum_over_quantiles: bool = True, loss_fn: Callable[[Tensor], Tensor] = huber_function) -> Tensor:
    """Quantile regression loss between two sets of quantiles at given fractions (implicit quantile networks).

    Dabney et al. 2018 (arXiv:1806.06923), eq. 3; with ``next_delta_tau`` the target quantiles are weighted by the
    width of their fractions (Yang et al. 2019, arXiv:1911.02140, eq. 8).

    Args:
        value: ``[..., N]`` estimates.
        target: ``[..., M]`` estimates of the target; treated as constant.
        tau_hat: ``[..., N]`` fraction that each value estimates.
        next_delta_tau: ``[..., M]`` weights of the targets, with sum 1; ``()`` means equal weights.
        fixed_tau: ``[N]`` fractions, used if ``tau_hat`` is ``()``. If both are ``()``, they are ``(i + 0.5) / N``.
        sum_over_quantiles: sum over the N values instead of averaging.
        loss_fn: elementwise function of ``value - target``.

    Returns:
        Loss ``[...]``.
    """
    if not _given(tau_hat):
        tau_hat = fixed_tau if _given(fixed_tau) else _fractions(value.shape[-1], value)
    loss = quantile_regression_loss(value, target.detach(), tau_hat, loss_fn)
    loss = (loss * next_delta_tau.unsqueeze(-1)).sum(-2) if _given(next_delta_tau) else loss.mean(-2)
    return loss.sum(-1) if sum_over_quantiles else loss.mean(-1)


def _given(value: Any) -> bool:
    return isinstance(value, Tensor)


# Predictions of a scalar --------------------------------------------------------------------------------------------


class ScalarPredictionLoss:
    """Encoding of a scalar in the outputs of a network: the loss of a prediction, and the decoded scalar."""

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        """Compute the loss ``[B]`` of ``pred [B, ...]`` for ``target [B]``."""
        raise NotImplementedError

    def calc_expectation(self, pred: Tensor) -> Tensor:
        """Decode the predicted scalar, ``[B]``."""
        raise NotImplementedError

    def initialize_bias(self, bias: Tensor) -> None:
        """Set the bias of the last layer in place so that the initial prediction is about 0."""


@configurable
class SquareLoss(ScalarPredictionLoss):
    """Squared error ``(pred - h(target))^2`` for ``pred [B]``.

    Args:
        transform: h; ``None`` is the identity.
    """

    def __init__(self, transform: InvertibleTransform | None = None):
        self._transform = transform

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        """Compute the squared error, see the base class."""
        if self._transform is not None:
            target = self._transform.transform(target)
        return element_wise_squared_loss(target, pred)

    def calc_expectation(self, pred: Tensor) -> Tensor:
        """Return ``h^-1(pred)``, see the base class."""
        return pred if self._transform is None else self._transform.inverse_transform(pred)


class _BinnedLoss(ScalarPredictionLoss):
    """Base of losses that predict a distribution over N bins at the integers ``-(N-1)//2 .. N//2`` of h(target).

    Args:
        transform: h; ``None`` is the identity.
        inverse_after_mean: compute the expectation as ``h^-1(E[bin])`` instead of ``E[h^-1(bin)]``. The target is
            spread over its two nearest bins so that this expectation equals the target.
    """

    def __init__(self, transform: InvertibleTransform | None = None, inverse_after_mean: bool = False):
        self._transform = transform
        self._inverse_after_mean = inverse_after_mean

    @staticmethod
    def _bins(n: int, like: Tensor) -> Tensor:
        return torch.arange(n, dtype=like.dtype, device=like.device) - float((n - 1) // 2)

    def _points(self, n: int, like: Tensor) -> Tensor:
        """Values of the bins in the expectation."""
        bins = self._bins(n, like)
        if self._transform is None or self._inverse_after_mean:
            return bins
        return self._transform.inverse_transform(bins)

    def _locate(self, n: int, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bin below the target and the weight of the bin above; targets out of range are clipped."""
        points = self._points(n, target)
        if self._transform is not None and self._inverse_after_mean:
            target = self._transform.transform(target)
        target = torch.minimum(torch.maximum(target, points[0]), points[-1]).contiguous()
        below = (torch.searchsorted(points, target, right=True) - 1).clamp(0, n - 2)
        low, high = points[below], points[below + 1]
        return below, (target - low) / (high - low)

    def _inverted(self, mean: Tensor) -> Tensor:
        if self._transform is not None and self._inverse_after_mean:
            return self._transform.inverse_transform(mean)
        return mean


@configurable
class DiscreteRegressionLoss(_BinnedLoss):
    """Divergence of a categorical distribution over bins from the target (MuZero, Schrittwieser et al. 2020,
    arXiv:1911.08265, appendix F).

    The loss ``KL(target || pred)`` has the gradient of the cross-entropy in the paper, and is 0 for a perfect
    prediction, so replay priorities computed from it measure the error.

    ``pred [B, N]`` are logits. See ``_BinnedLoss`` for the bins and the arguments.
    """

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        """Compute the divergence, see the base class."""
        below, weight = self._locate(pred.shape[-1], target)
        pair = torch.log_softmax(pred, -1).gather(-1, torch.stack((below, below + 1), -1))
        # Rounding may make it negative, and the default priority of MuZero is its root.
        return (binary_neg_entropy(weight) - torch.lerp(pair[..., 0], pair[..., 1], weight)).clamp_min(0)

    def calc_expectation(self, pred: Tensor) -> Tensor:
        """Compute the expectation of the distribution, see the base class."""
        return self._inverted(torch.softmax(pred, -1) @ self._points(pred.shape[-1], pred))

    def initialize_bias(self, bias: Tensor) -> None:
        """Make the probability of a bin decrease with its distance from 0 as ``exp(-|bin|)``."""
        with torch.no_grad():
            bias.copy_(-self._bins(bias.shape[0], bias).abs())


@configurable
class OrderedDiscreteRegressionLoss(_BinnedLoss):
    """Divergences of the events "the value is at least bin k" from the target, for all bins k except the first.

    The sum of the ``KL(target || pred)`` of these binary events has the gradient of the sum of their cross-entropies,
    and is 0 for a perfect prediction.

    ``pred [B, N]`` holds logits of these events; the first one is certain and its logit is ignored. The events are
    ordered, so a prediction that is off by one bin costs little. See ``_BinnedLoss`` for the arguments.
    """

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        """Compute the sum of the divergences, see the base class."""
        n = pred.shape[-1]
        below, weight = self._locate(n, target)
        index = torch.arange(1, n, device=pred.device)
        reached = (index <= below.unsqueeze(-1)).to(pred.dtype)
        reached = torch.where(index == below.unsqueeze(-1) + 1, weight.unsqueeze(-1), reached)
        cross_entropy = F.binary_cross_entropy_with_logits(pred[..., 1:], reached, reduction='none').sum(-1)
        return (cross_entropy + binary_neg_entropy(weight)).clamp_min(0)  # all other events are certain

    def calc_expectation(self, pred: Tensor) -> Tensor:
        """Compute ``E[x] = points[0] + sum_k P(x >= k) (points[k] - points[k-1])``, see the base class."""
        points = self._points(pred.shape[-1], pred)
        return self._inverted(points[0] + torch.sigmoid(pred[..., 1:]) @ points.diff())

    def initialize_bias(self, bias: Tensor) -> None:
        """Make bins above 0 unlikely and bins up to 0 likely to be reached, increasingly with the distance from 0."""
        with torch.no_grad():
            bias.copy_(0.5 - self._bins(bias.shape[0], bias))


@configurable
class QuantileRegressionLoss(ScalarPredictionLoss):
    """Quantile loss :func:`multi_quantile_huber_loss` of quantiles ``pred [B, N]`` of h(target).

    Args:
        transform: h; ``None`` is the identity.
        inverse_after_mean: compute the expectation as ``h^-1`` of the mean quantile, not as the mean of ``h^-1``.
        delta: half width of the quadratic part of the loss.
    """

    def __init__(self, transform: InvertibleTransform | None = None, inverse_after_mean: bool = False,
                 delta: float = 0.0):
        self._transform = transform
        self._inverse_after_mean = inverse_after_mean
        self._delta = delta

    def __call__(self, pred: Tensor, target: Tensor) -> Tensor:
        """Compute the quantile loss, see the base class."""
        if self._transform is not None:
            target = self._transform.transform(target)
        return multi_quantile_huber_loss(pred, target, self._delta)

    def calc_expectation(self, pred: Tensor) -> Tensor:
        """Compute the mean of the quantiles, see the base class."""
        if self._transform is None:
            return pred.mean(-1)
        if self._inverse_after_mean:
            return self._transform.inverse_transform(pred.mean(-1))
        return self._transform.inverse_transform(pred).mean(-1)


@configurable
class MeanSquaredLoss(nn.Module):
    """Half the squared distance, averaged over all dimensions except the batch dimensions.

    Args:
        batch_dims: number of leading dimensions that the loss keeps.
        debug_summaries: log the loss and the explained variance.
        name: name of this loss and prefix of its summaries.
    """

    def __init__(self, batch_dims: int = 1, debug_summaries: bool = True, name: str = 'MSELoss'):
        super().__init__()
        self._batch_dims = batch_dims
        self._debug_summaries = debug_summaries
        self._name = name

    def forward(self, pred: Tensor, target: Tensor) -> LossInfo:
        """Compute the loss of ``pred [B, ...]`` for ``target`` of the same shape.

        Returns:
            ``LossInfo`` with ``loss [B]``.

        Raises:
            ValueError: the shapes differ.
        """
        if pred.shape != target.shape:
            raise ValueError(f'{self._name}: pred and target differ in shape: {tuple(pred.shape)} and '
                             f'{tuple(target.shape)}')
        squared = 0.5 * (pred - target).square()
        loss = squared if squared.dim() == self._batch_dims else squared.flatten(self._batch_dims).mean(-1)
        if self._debug_summaries and summary.should_record_summaries():
            with summary.scope(self._name):
                summary.scalar('loss', loss.detach().mean())
                summary.scalar('explained_variance', _explained(pred.detach(), target.detach()))
        return LossInfo(loss=loss, extra=loss)


def _explained(pred: Tensor, target: Tensor) -> Tensor:
    return 1.0 - (target - pred).var(correction=0) / target.var(correction=0)


@configurable
class AsymmetricSimSiamLoss(nn.Module):
    """Negative cosine similarity ``-cosine(pred_net(proj_net(pred)), proj_net(target))``, constant in the target.

    Loss of a representation that predicts another one, without negative examples (Chen and He 2021, arXiv:2011.10566).

    Args:
        proj_net: projection of both representations, a module or network from ``[B, input_size]`` to ``[B, N]``;
            ``None`` uses two layers with batch norm.
        pred_net: prediction of one projection from the other, ``[B, N]`` to ``[B, N]``; ``None`` uses two layers, the
            first with batch norm.
        input_size: size of a flattened representation; needed without ``proj_net``.
        proj_hidden_size: size of the first layer of ``proj_net``.
        pred_hidden_size: size of the first layer of ``pred_net``.
        output_size: N.
        proj_last_use_bn: use batch norm after the last layer of ``proj_net``.
        eps: minimum of the divisor in the normalization.
        fixed_weight_norm: must be False.
        lr: learning rate of the default layers; ``None`` uses the learning rate of the optimizer.
        debug_summaries: log the loss and the standard deviation of the target projections.
        name: name of this loss and prefix of its summaries.

    Raises:
        ValueError: neither ``proj_net`` nor ``input_size`` is given, or ``fixed_weight_norm`` is set.
    """

    def __init__(self, proj_net: Any = None, pred_net: Any = None, input_size: Count | None = None,
                 proj_hidden_size: Count = 256, pred_hidden_size: Count = 128, output_size: Count = 256,
                 proj_last_use_bn: bool = False, eps: NonNegative = 1e-5, fixed_weight_norm: bool = False,
                 lr: NonNegative | None = None, debug_summaries: bool = True, name: str = 'SimSiamLoss'):
        super().__init__()
        if fixed_weight_norm:
            raise ValueError(f'{name}.fixed_weight_norm: no optimizer of alfx can fix the norms of weights; remove it')
        if proj_net is None:
            if input_size is None:
                raise ValueError(f'{name}: expected proj_net or input_size, found neither')
            last = [nn.BatchNorm1d(output_size)] if proj_last_use_bn else []
            proj_net = nn.Sequential(*_normed_layer(input_size, proj_hidden_size),
                                     nn.Linear(proj_hidden_size, output_size), *last)
            _set_learning_rate(proj_net, lr)
        if pred_net is None:
            pred_net = nn.Sequential(*_normed_layer(output_size, pred_hidden_size),
                                     nn.Linear(pred_hidden_size, output_size))
            _set_learning_rate(pred_net, lr)
        self._proj_net, self._pred_net, self._eps = proj_net, pred_net, eps
        self._debug_summaries, self._name = debug_summaries, name

    def forward(self, pred: Tensor, target: Tensor) -> LossInfo:
        """Compute the loss of ``pred [B, R, ...]`` for ``target`` of the same shape.

        Returns:
            ``LossInfo`` with ``loss [B, R]``.
        """
        outer = pred.shape[:2]
        predicted = _output_of(self._pred_net, _output_of(self._proj_net, pred.flatten(0, 1).flatten(1)))
        with torch.no_grad():
            projected = _output_of(self._proj_net, target.flatten(0, 1).flatten(1))
        loss = -F.cosine_similarity(predicted, projected, eps=self._eps).view(outer)
        if self._debug_summaries and summary.should_record_summaries():
            with summary.scope(self._name):
                summary.scalar('loss', loss.detach().mean())
                summary.scalar('target_std', projected.std(0).mean())
        return LossInfo(loss=loss, extra=loss)


def _normed_layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]


def _set_learning_rate(module: nn.Module, lr: float | None) -> None:
    if lr is not None:
        for parameter in module.parameters():
            parameter.opt_args = {'lr': lr}  # type: ignore[attr-defined]


def _output_of(module: Any, inputs: Tensor) -> Tensor:
    output = module(inputs)
    return output[0] if isinstance(output, tuple) else output
