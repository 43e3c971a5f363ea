"""Returns and advantages over sequences of time steps, and importance ratios.

Time is the first dimension. ``reward[t]`` and ``discount[t]`` belong to *arriving* at step t; ``discount`` is the
discount of the environment (0 at a termination, 1 at a truncation) times gamma. A LAST step has no successor: the steps
after it belong to another episode and never affect it. Its own value may still bootstrap the step before.
"""
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import summary
from alfx.data_structures import StepType
from alfx.tensor_specs import NestedTensor
from alfx.utils import dist_utils


def _reverse_scan(coefficient: Tensor, offset: Tensor) -> Tensor:
    """Solve ``x[t] = offset[t] + coefficient[t] * x[t+1]`` with ``x[n-1] = offset[n-1]``.

    Recursive doubling: after a round of stride s, x[t] holds the terms of 2s steps. This takes log2(n) rounds of three
    operations, while the plain loop takes n rounds of two, and is differentiable.

    Args:
        coefficient: ``[n-1, ...]``, broadcasts with ``offset``.
        offset: ``[n, ...]``; overwritten unless autograd records.

    Returns:
        Solution x, ``[n, ...]``.
    """
    in_place = not (torch.is_grad_enabled() and (offset.requires_grad or coefficient.requires_grad))
    n = offset.shape[0]
    stride = 1
    while stride < n:
        carried = coefficient * offset.narrow(0, stride, n - stride)
        if in_place:
            offset.narrow(0, 0, n - stride).add_(carried)
        else:
            head, tail = offset.split((n - stride, stride))
            offset = torch.cat((head + carried, tail))
        left = n - 2 * stride
        if left > 0:
            coefficient = coefficient.narrow(0, 0, left) * coefficient.narrow(0, stride, left)
        stride *= 2
    return offset


def _check(rewards: Tensor, values: Tensor, step_types: Tensor, discounts: Tensor) -> Tensor:
    """Check the shapes; return ``discounts``, with trailing dimensions added to match ``rewards``."""
    if rewards.shape[0] < 2:
        raise ValueError(f'expected at least 2 time steps, found rewards of shape {tuple(rewards.shape)}')
    if values.shape != rewards.shape:
        raise ValueError(f'rewards and values differ in shape: {tuple(rewards.shape)} and {tuple(values.shape)}')
    if step_types.shape != rewards.shape[:2]:
        raise ValueError(f'step_types: expected shape {tuple(rewards.shape[:2])}, found {tuple(step_types.shape)}')
    if discounts.shape != rewards.shape:
        if discounts.shape != step_types.shape:
            raise ValueError(f'discounts: expected shape {tuple(rewards.shape[:2])} or {tuple(rewards.shape)}, found '
                             f'{tuple(discounts.shape)}')
        return discounts.reshape(*discounts.shape, *[1] * (rewards.dim() - 2))
    return discounts


def _has_successor(step_types: Tensor, like: Tensor) -> Tensor:
    """Return 1 for steps with a successor and 0 at LAST, without the final step, ``[T-1, B]`` or ``[T-1, B, 1]``."""
    mask = (step_types[:-1] != StepType.LAST).to(like.dtype)
    return mask if like.dim() == 2 else mask.reshape(*mask.shape, *[1] * (like.dim() - 2))


def _batch_major(function: Any, *tensors: Tensor) -> Tensor:
    return function(*(t.transpose(0, 1) for t in tensors)).transpose(0, 1)


def one_step_discounted_return(rewards: Tensor, values: Tensor, step_types: Tensor, discounts: Tensor) -> Tensor:
    """One-step returns ``R[t] = r[t+1] + d[t+1] V[t+1]``; for a LAST step ``R[t] = V[t]``.

    Args:
        rewards: ``[T, B]`` or ``[T, B, K]``.
        values: V, same shape as ``rewards``.
        step_types: ``[T, B]``.
        discounts: d, ``[T, B]`` or the shape of ``rewards``.

    Returns:
        Returns of every step except the final one, ``[T-1, B]`` (``[T-1, B, K]``).

    Raises:
        ValueError: the shapes disagree, or T < 2.
    """
    discounts = _check(rewards, values, step_types, discounts)
    current = values[:-1]
    target = torch.addcmul(rewards[1:], discounts[1:], values[1:])
    return torch.where(_has_successor(step_types, values).bool(), target, current)


def discounted_return(rewards: Tensor, values: Tensor, step_types: Tensor, discounts: Tensor,
                      time_major: bool = True) -> Tensor:
    """Return the discounted returns up to the end of the episode or of the sequence, where V bootstraps them.

    ``R[t] = r[t+1] + d[t+1] R[t+1]`` with ``R[T-1] = V[T-1]``; for a LAST step ``R[t] = V[t]``, so that a truncated
    episode is bootstrapped from its true final observation (and a terminated one is not, because its d is 0).

    Args:
        rewards: ``[T, B]`` or ``[T, B, K]``.
        values: V, same shape as ``rewards``.
        step_types: ``[T, B]``.
        discounts: d, ``[T, B]`` or the shape of ``rewards``.
        time_major: pass False if the first two dimensions of all arguments and of the result are ``[B, T]``.

    Returns:
        Returns of every step except the final one, ``[T-1, B]`` (``[T-1, B, K]``).

    Raises:
        ValueError: the shapes disagree, or T < 2.
    """
    if not time_major:
        return _batch_major(discounted_return, rewards, values, step_types, discounts)
    discounts = _check(rewards, values, step_types, discounts)
    mask = _has_successor(step_types, values)
    offset = torch.cat((torch.where(mask.bool(), rewards[1:], values[:-1]), values[-1:]))
    return _reverse_scan(mask * discounts[1:], offset)[:-1]


def generalized_advantage_estimation(rewards: Tensor, values: Tensor, step_types: Tensor, discounts: Tensor,
                                     td_lambda: float = 1.0, time_major: bool = True) -> Tensor:
    """Generalized advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    ::

        delta[t] = r[t+1] + d[t+1] V[t+1] - V[t]
        A[t]     = delta[t] + td_lambda d[t+1] A[t+1]

    A LAST step has advantage 0, and nothing flows back through it.

    Args:
        rewards: ``[T, B]`` or ``[T, B, K]``.
        values: V, same shape as ``rewards``.
        step_types: ``[T, B]``.
        discounts: d, ``[T, B]`` or the shape of ``rewards``.
        td_lambda: in [0, 1]; 0 gives the one-step error, 1 the :func:`discounted_return` minus V.
        time_major: pass False if the first two dimensions of all arguments and of the result are ``[B, T]``.

    Returns:
        Advantages of every step except the final one, ``[T-1, B]`` (``[T-1, B, K]``).

    Raises:
        ValueError: the shapes disagree, or T < 2.
    """
    if not time_major:
        return _batch_major(functools.partial(generalized_advantage_estimation, td_lambda=td_lambda), rewards, values,
                            step_types, discounts)
    discounts = _check(rewards, values, step_types, discounts)
    mask = _has_successor(step_types, values)
    discounts = discounts[1:]
    delta = torch.addcmul(rewards[1:], discounts, values[1:]).sub_(values[:-1]).mul_(mask)
    return _reverse_scan((discounts * mask)[:-1] * td_lambda, delta)


class VTrace(NamedTuple):
    """Result of :func:`vtrace`, ``[T-1, B]`` (``[T-1, B, K]``) each.

    Attributes:
        targets: regression targets of the values of every step except the final one.
        advantages: advantages of the actions, weighted by their clipped ratios.
    """

    targets: Tensor
    advantages: Tensor


def vtrace(rewards: Tensor, values: Tensor, step_types: Tensor, discounts: Tensor, ratios: Tensor,
           td_lambda: float = 1.0, clip_rho_thres: float | None = 1.0, clip_c_thres: float | None = 1.0,
           clip_pg_rho_thres: float | None = 1.0) -> VTrace:
    """V-trace targets and advantages of one policy from the steps of another (Espeholt et al. 2018, arXiv:1802.01561).

    With w the ratio of the current probability of an action to its probability when it was taken (section 4.1, eq. 1,
    remarks 1 and 2, and section 4.2)::

        delta[t] = r[t+1] + d[t+1] V[t+1] - V[t]
        v[t]     = V[t] + min(rho, w[t]) delta[t] + td_lambda min(c, w[t]) d[t+1] (v[t+1] - V[t+1])
        A[t]     = min(pg_rho, w[t]) (delta[t] + td_lambda d[t+1] (v[t+1] - V[t+1]))

    rho determines the policy whose values are learned: the current policy without clipping, and a policy closer to the
    one that acted with more clipping. c and td_lambda only affect the speed of learning. The paper gives A for
    ``td_lambda = 1``; smaller values shorten the trace in A as well, so that on-policy A equals
    :func:`generalized_advantage_estimation` and v equals A + V. A LAST step has advantage 0, and nothing flows back
    through it; the step before bootstraps from its value.

    Args:
        rewards: ``[T, B]`` or ``[T, B, K]``.
        values: current V, same shape as ``rewards``.
        step_types: ``[T, B]``.
        discounts: d, ``[T, B]`` or the shape of ``rewards``.
        ratios: w, ``[T, B]``; entries of the final step and of LAST steps are ignored.
        td_lambda: in [0, 1].
        clip_rho_thres: rho; ``None`` for no clipping.
        clip_c_thres: c, at most rho for the convergence proof of the paper; ``None`` for no clipping.
        clip_pg_rho_thres: pg_rho; ``None`` for no clipping.

    Raises:
        ValueError: the shapes disagree, or T < 2.
    """
    discounts = _check(rewards, values, step_types, discounts)[1:]
    if ratios.shape != step_types.shape:
        raise ValueError(f'ratios: expected shape {tuple(step_types.shape)}, found {tuple(ratios.shape)}')
    ratios = torch.where(step_types[:-1] != StepType.LAST, ratios[:-1], 0.0)
    if rewards.dim() > 2:
        ratios = ratios.reshape(*ratios.shape, *[1] * (rewards.dim() - 2))
    rho, c, pg_rho = (ratios if threshold is None else ratios.clamp(max=threshold)
                      for threshold in (clip_rho_thres, clip_c_thres, clip_pg_rho_thres))
    delta = torch.addcmul(rewards[1:], discounts, values[1:]) - values[:-1]
    carried = discounts * td_lambda
    corrections = _reverse_scan((carried * c)[:-1], rho * delta)
    next_corrections = torch.cat((corrections[1:], torch.zeros_like(corrections[:1])))
    return VTrace(values[:-1] + corrections, pg_rho * torch.addcmul(delta, carried, next_corrections))


def action_importance_ratio(action_distribution: Any, rollout_action_distribution: Any, action: NestedTensor,
                            clipping_mode: str, scope: str, importance_ratio_clipping: float | Tensor,
                            log_prob_clipping: float, check_numerics: bool, debug_summaries: bool,
                            rollout_log_prob: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the ratio of the current probability of ``action`` to its probability when it was taken.

    Args:
        action_distribution: nest of distributions of the current policy, batch shape ``[T, B]`` or ``[B]``.
        rollout_action_distribution: distributions of the policy that acted; ignored if ``rollout_log_prob`` is given.
        action: nest of actions.
        clipping_mode: 'double_sided' for ``[1 - eps, 1 + eps]``, 'capping' for the upper bound only.
        scope: prefix of the names of summaries.
        importance_ratio_clipping: eps; no clipping unless it is positive. A tensor (scalar) has to be positive.
        log_prob_clipping: if positive, limit of the absolute values of both log-probabilities.
        check_numerics: raise an error if the ratio is not finite.
        debug_summaries: log the ratios.
        rollout_log_prob: log-probability of ``action`` when it was taken, ``[T, B]`` or ``[B]``.

    Returns:
        ``(ratio, clipped ratio)``, of the batch shape; gradients flow to the current policy only.

    Raises:
        ValueError: ``clipping_mode`` is unknown.
        FloatingPointError: a ratio is not finite and ``check_numerics`` is set.
    """
    if clipping_mode not in ('double_sided', 'capping'):
        raise ValueError(f"clipping_mode: expected 'double_sided' or 'capping', found {clipping_mode!r}")
    if rollout_log_prob is None:
        rollout_log_prob = dist_utils.compute_log_probability(rollout_action_distribution, action)
    rollout_log_prob = rollout_log_prob.detach()
    log_prob = dist_utils.compute_log_probability(action_distribution, action)
    if log_prob_clipping > 0.0:
        log_prob = log_prob.clamp(-log_prob_clipping, log_prob_clipping)
        rollout_log_prob = rollout_log_prob.clamp(-log_prob_clipping, log_prob_clipping)
    ratio = torch.exp(log_prob - rollout_log_prob)
    if check_numerics and not bool(torch.isfinite(ratio).all()):
        raise FloatingPointError(f'{scope}: an importance ratio is not finite; log-probabilities now {log_prob}, at '
                                 f'rollout {rollout_log_prob}')
    clipped = ratio
    if isinstance(importance_ratio_clipping, Tensor) or importance_ratio_clipping > 0.0:
        low: Any = 1.0 - importance_ratio_clipping if clipping_mode == 'double_sided' else None
        high: Any = 1.0 + importance_ratio_clipping
        clipped = ratio.clamp(low, high)
    if debug_summaries and summary.should_record_summaries():
        _summarize_ratio(scope, ratio, clipped, log_prob, rollout_log_prob)
    return ratio, clipped


def _summarize_ratio(scope: str, ratio: Tensor, clipped: Tensor, log_prob: Tensor, rollout_log_prob: Tensor) -> None:
    prefix = f'{scope}/' if scope else ''
    ratio = ratio.detach()
    summary.scalar(f'{prefix}clip_fraction', (ratio != clipped.detach()).float().mean())
    summary.scalar(f'{prefix}importance_ratio_mean', ratio.mean())
    summary.histogram(f'{prefix}importance_ratio', ratio)
    summary.histogram(f'{prefix}action_log_prob', log_prob.detach())
    summary.histogram(f'{prefix}rollout_action_log_prob', rollout_log_prob)
