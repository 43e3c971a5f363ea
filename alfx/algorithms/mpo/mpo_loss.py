"""Pure functions for maximum a posteriori policy optimization, and its Lagrange multipliers.

Abdolmaleki et al. 2018a (arXiv:1806.06920), "MPO" below, and 2018b (arXiv:1812.02256), "RE". ``N`` is the number of
sampled actions of a state, or of all discrete actions; ``A`` the number of components of a continuous action; ``...``
any batch of states. A policy is improved towards ``q(a|s)``, which is proportional to ``prior(a|s) exp(Q(s, a) /
eta)``. The prior is the target policy: it is ``1/N`` for each sampled action, and the probability under the target
policy for each discrete action. Read next: :mod:`alfx.algorithms.mpo_algorithm`.
"""
import math

import torch
from torch import Tensor, nn

from alfx import context

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_TINY = 1e-12
_MIN_ETA = 1e-8
_MAX_STEP = 2.0


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the states in ``mask``.

    Args:
        x: ``[...]``, or ``[..., D]`` for a vector per state.
        mask: float32 ``[...]``: 1 for states to include, else 0.

    Returns:
        Mean, 0-d or ``[D]``; 0 if no state is included. If several processes train together, each returns its part, and
        the average over processes is the mean over all states.
    """
    x, mask = x.flatten(0, mask.ndim - 1), mask.flatten()
    return torch.tensordot(mask, x, 1) / _mean_count(mask)


def _mean_count(mask: Tensor) -> Tensor:
    """Return the number of included states, 0-d, averaged over the processes that train together."""
    return context.mean_over_ranks(mask.sum()).clamp(min=_TINY)


# E-step ------------------------------------------------------------------------------------------------------------


def _log_prior(values: Tensor, log_prior: Tensor | None) -> Tensor | float:
    return -math.log(values.shape[-1]) if log_prior is None else log_prior


def improved_weights(values: Tensor, eta: Tensor | float, log_prior: Tensor | None = None) -> Tensor:
    """Return ``q(a|s)``, the weights of the actions in the improved policy (MPO eq. 7, RE section 4.1).

    Args:
        values: ``[..., N]``.
        eta: temperature, above 0; larger values stay closer to the prior.
        log_prior: ``[..., N]``, log-probabilities of the actions; ``None``: all are equal.

    Returns:
        Weights ``[..., N]``, which sum to 1.
    """
    logits = values / eta
    return torch.softmax(logits if log_prior is None else logits + log_prior, -1)


def temperature_dual(values: Tensor, eta: Tensor, epsilon: float, mask: Tensor,
                     log_prior: Tensor | None = None) -> Tensor:
    """Return ``g(eta) = eta epsilon + eta E_s[log sum_a prior(a|s) exp(Q(s, a) / eta)]`` (MPO eq. 8).

    The function is convex. At its minimum the mean KL divergence from the prior to the improved policy is ``epsilon``.

    Args:
        values: ``[..., N]``, without gradient.
        eta: 0-d, above 0.
        epsilon: bound of the divergence.
        mask: float32 ``[...]``, 1 for states to include.
        log_prior: as in :func:`improved_weights`.

    Returns:
        Value of the dual, 0-d.
    """
    log_mean = torch.logsumexp(values / eta + _log_prior(values, log_prior), -1)
    return eta * epsilon + eta * masked_mean(log_mean, mask)


@torch.no_grad()
def solve_temperature(values: Tensor, epsilon: float, mask: Tensor, log_prior: Tensor | None = None,
                      iterations: int = 5) -> Tensor:
    """Return the ``eta`` that minimizes :func:`temperature_dual`.

    The derivative of the dual is ``epsilon - KL(eta)``, with KL the mean divergence over states. KL decreases towards 0
    as eta grows, for large eta as ``Var(Q) / (2 eta^2)``. Newton's method solves ``log KL = log epsilon`` as a function
    of ``log eta``, starting from the solution of that limit. If the divergence is below ``epsilon`` for all eta (equal
    values, or a large ``epsilon``), the result is a small eta: the weights then select the best action, or equal the
    prior if all actions are equally good.

    Args:
        values: ``[..., N]``.
        epsilon: bound of the divergence, above 0.
        mask: float32 ``[...]``, 1 for states to include.
        log_prior: as in :func:`improved_weights`.
        iterations: iterations of Newton's method; the tests show the accuracy.

    Returns:
        Temperature, 0-d.
    """
    values = (values - values.amax(-1, keepdim=True)).flatten(0, -2)
    log_p = _log_prior(values, None if log_prior is None else log_prior.flatten(0, -2))
    share = mask.flatten() / _mean_count(mask)  # weight of each state in a mean
    over_ranks = context.mean_over_ranks

    def mean_and_variance(weights: Tensor) -> tuple[Tensor, Tensor]:
        weighted = weights * values
        mean = weighted.sum(-1)
        return mean, ((weighted * values).sum(-1) - mean.square()).clamp(min=0.0) @ share

    _, variance = mean_and_variance((torch.zeros_like(values) + log_p).exp())
    variance = over_ranks(variance)
    log_eta = 0.5 * torch.log(variance.clamp(min=_TINY) / (2.0 * epsilon))
    for _ in range(iterations):
        eta = log_eta.exp().clamp(min=_MIN_ETA)
        logits = values / eta + log_p
        log_normalizer = logits.logsumexp(-1)
        mean, variance = mean_and_variance((logits - log_normalizer.unsqueeze(-1)).exp())
        divergence, variance = over_ranks(torch.stack(((mean / eta - log_normalizer) @ share, variance))).unbind()
        divergence = divergence.clamp(min=_TINY)
        slope = (variance / eta.square()).clamp(min=_TINY)  # -d KL / d log eta = Var_q(Q) / eta^2
        step = torch.log(divergence / epsilon) * divergence / slope
        log_eta = log_eta + step.clamp(-_MAX_STEP, _MAX_STEP)
    return log_eta.exp().clamp(min=_MIN_ETA)


class Temperature(nn.Module):
    """Temperature ``eta`` of the E-step: the minimum of its dual function.

    Args:
        constraint: mean KL divergence from the prior to the improved policy.
        initial_eta: ``None``: the dual is solved for each minibatch. Otherwise eta is a parameter with this initial
            value, for an optimizer that descends the dual.
    """

    def __init__(self, constraint: float, initial_eta: float | None = None):
        super().__init__()
        self._constraint = constraint
        self._log_eta = None if initial_eta is None else nn.Parameter(torch.tensor(math.log(initial_eta)))

    def forward(self, values: Tensor, mask: Tensor, log_prior: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the temperature and its loss.

        Args:
            values: ``[..., N]``, without gradient.
            mask: float32 ``[...]``, 1 for states to include.
            log_prior: as in :func:`improved_weights`.

        Returns:
            eta without gradient, and the loss of the parameter (``None`` without parameter), 0-d each.
        """
        if self._log_eta is None:
            return solve_temperature(values, self._constraint, mask, log_prior), None
        eta = self._log_eta.exp().clamp(min=_MIN_ETA)
        return eta.detach(), temperature_dual(values, eta, self._constraint, mask, log_prior)


# M-step ------------------------------------------------------------------------------------------------------------


def gaussian_divergences(target_loc: Tensor, target_scale: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two parts of the change of a diagonal normal policy (RE section 4.2.1; MPO appendix D.3).

    They are the KL divergences from the target policy to the target policy with the new mean, and with the new standard
    deviation, for each component.

    Args:
        target_loc: ``[..., A]``, mean of the target policy.
        target_scale: ``[..., A]``, standard deviation of the target policy.
        loc: ``[..., A]``, mean of the policy.
        scale: ``[..., A]``, standard deviation of the policy.

    Returns:
        Mean part and covariance part, ``[..., A]`` each.
    """
    of_mean = 0.5 * ((loc - target_loc) / target_scale).square()
    ratio = target_scale / scale
    return of_mean, 0.5 * (ratio.square() - 1.0) - ratio.log()


def gaussian_policy_loss(weights: Tensor, samples: Tensor, target_loc: Tensor, target_scale: Tensor, loc: Tensor,
                         scale: Tensor) -> Tensor:
    """Return the weighted negative log-likelihood with separate mean and standard deviation (RE section 4.2.1).

    The loss is ``-sum_a q(a|s) [log N(a; loc, target_scale) + log N(a; target_loc, scale)]``. The mean thus moves
    towards good actions without reducing the standard deviation. Only two moments of the samples are needed:

        sum_a q (a - m)^2 = sum_a q (a - mean_q)^2 + (mean_q - m)^2

    Args:
        weights: q, ``[..., N]``, which sum to 1.
        samples: a, ``[..., N, A]``.
        target_loc: ``[..., A]``, mean of the target policy.
        target_scale: ``[..., A]``, standard deviation of the target policy.
        loc: ``[..., A]``, mean of the policy.
        scale: ``[..., A]``, standard deviation of the policy.

    Returns:
        Loss ``[...]``.
    """
    weights = weights.unsqueeze(-2)
    mean = (weights @ samples).squeeze(-2)
    variance = (weights @ (samples - mean.unsqueeze(-2)).square()).squeeze(-2)
    about_loc = variance + (mean - loc).square()
    about_target = variance + (mean - target_loc).square()
    with_loc = 0.5 * about_loc / target_scale.square() + target_scale.log()
    with_scale = 0.5 * about_target / scale.square() + scale.log()
    return (with_loc + with_scale + 2.0 * _HALF_LOG_2PI).sum(-1)


def categorical_divergence(target_logits: Tensor, logits: Tensor) -> Tensor:
    """Return ``KL(target || policy)`` of discrete policies (RE section 4.2).

    Args:
        target_logits: normalized log-probabilities ``[..., N]`` of the target policy.
        logits: normalized log-probabilities ``[..., N]`` of the policy.

    Returns:
        Divergence ``[..., 1]``.
    """
    return (target_logits.exp() * (target_logits - logits)).sum(-1, keepdim=True)


def categorical_policy_loss(weights: Tensor, logits: Tensor) -> Tensor:
    """Return ``-sum_a q(a|s) log policy(a|s)`` (RE eq. 5).

    Args:
        weights: q, ``[..., N]``.
        logits: normalized log-probabilities ``[..., N]`` of the policy.

    Returns:
        Loss ``[...]``.
    """
    return -(weights * logits).sum(-1)


class Multiplier(nn.Module):
    """Lagrange multiplier of a constraint ``mean divergence <= constraint``.

    It is moved by projected gradient ascent on the Lagrangian:

        alpha <- clip(alpha + scale * (divergence - constraint), 0, maximum)

    Args:
        constraint: upper bound of the mean divergence.
        scale: step size.
        maximum: upper bound of the multiplier.
        size: number of multipliers: 1 for the sum of the components of a divergence, or one for each.
    """

    value: Tensor
    _mean: Tensor

    def __init__(self, constraint: float, scale: float, maximum: float, size: int = 1):
        super().__init__()
        self._constraint, self._scale, self._maximum = constraint, scale, maximum
        self.register_buffer('value', torch.zeros(size))
        self.register_buffer('_mean', torch.zeros(size), persistent=False)  # latest observed divergence

    def _combined(self, divergence: Tensor) -> Tensor:
        """Reduce ``[..., D]`` to ``[..., size]``."""
        return divergence.sum(-1, keepdim=True) if self.value.shape[0] == 1 else divergence

    def penalty(self, divergence: Tensor) -> Tensor:
        """Return ``alpha * divergence``: ``[..., D]`` to ``[...]``."""
        return self._combined(divergence) @ self.value

    @torch.no_grad()
    def observe(self, divergence: Tensor, mask: Tensor) -> None:
        """Store the mean of ``divergence`` ``[..., D]`` over the states of ``mask`` ``[...]``."""
        self._mean.copy_(context.mean_over_ranks(masked_mean(self._combined(divergence), mask)))

    @torch.no_grad()
    def move(self) -> None:
        """Move the multiplier by the latest observed divergence."""
        self.value.add_(self._mean - self._constraint, alpha=self._scale).clamp_(0.0, self._maximum)
