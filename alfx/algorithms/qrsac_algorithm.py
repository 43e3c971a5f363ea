"""Soft actor-critic whose critics learn the distribution of returns by quantile regression, and TQC.

The critics are those of QR-DQN (Dabney et al. 2018, arXiv:1710.10044) with an action as input, combined with soft
actor-critic (Haarnoja et al. 2018, arXiv:1812.05905). Each critic has N quantiles of the distribution of returns, at
the fractions ``(i + 0.5) / N``. The actor maximizes the lowest mean of several critics. Targets bootstrap from the
lowest distribution, where soft actor-critic uses the lowest value.

With ``num_dropped_quantiles`` and ``policy_critics = 'mean'`` it is TQC, truncated quantile critics (Kuznetsov et al.
2020, arXiv:2005.04269): targets mix the quantiles of all critics and leave out the largest, which bounds overestimation
more finely than a minimum over critics. Read next :mod:`alfx.algorithms.categorical_sac_algorithm`.
"""
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from alfx.algorithms.base import critic_values
from alfx.algorithms.one_step_loss import OneStepTDQRLoss
from alfx.algorithms.sac.actions import TargetEntropy
from alfx.algorithms.sac.critics import critic_with_outputs, require_continuous_actions
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.gin_utils import configurable, takes_arguments_of
from alfx.tensor_specs import NestedTensorSpec


@configurable
class QrsacAlgorithm(SacAlgorithm):
    """Soft actor-critic with quantile critics, for continuous actions.

    Args:
        critic_network_cls: as in ``SacAlgorithm``; the number of outputs is set to the number of quantiles of the loss,
            unless the critic already has several outputs.
        critic_loss_ctor: creates a quantile loss, called as ``(debug_summaries=, name=)``; ``None``:
            ``OneStepTDQRLoss``. Its ``num_quantiles`` is the number of quantiles.
        min_critic_by_critic_mean: bootstrap from the quantiles of the critic with the lowest mean; otherwise from the
            lowest value of each quantile.
        num_dropped_quantiles: if given, bootstrap from the quantiles of all critics together, without the largest
            ``num_dropped_quantiles`` for each critic; larger numbers estimate lower values (TQC).
        kwargs: arguments of :class:`~alfx.algorithms.sac_algorithm.SacAlgorithm`, except ``q_network_cls``; the default
            of ``use_entropy_reward`` is ``False``.

    Raises:
        SpecError: the number of outputs of a critic is not the number of quantiles.
        ValueError: the action is not continuous, ``num_dropped_quantiles`` is not below the number of quantiles, or it
            is combined with another reduction of the critics.
    """

    @takes_arguments_of(
        SacAlgorithm, without=('q_network_cls', ), defaults={'use_entropy_reward': False, 'name': 'QrsacAlgorithm'},
        after={'min_critic_by_critic_mean': 'num_critic_replicas', 'num_dropped_quantiles': 'num_bootstrap_critics'})
    def __init__(self, action_spec: NestedTensorSpec, critic_network_cls: Callable[..., Any] | None,
                 critic_loss_ctor: Callable[..., Any] | None, debug_summaries: bool, name: str,
                 target_entropy: TargetEntropy, bootstrap_critics: Literal['min', 'mean'],
                 min_critic_by_critic_mean: bool = False, num_dropped_quantiles: int | None = None, **kwargs: Any):
        require_continuous_actions(name, action_spec)
        loss = (critic_loss_ctor or OneStepTDQRLoss)(debug_summaries=debug_summaries, name='critic_loss')
        self._num_outputs = _num_quantiles_of(loss, name)
        if critic_network_cls is not None:
            critic_network_cls = partial(critic_with_outputs, critic_network_cls, self._num_outputs)
        if num_dropped_quantiles is not None:
            _check_truncation(name, num_dropped_quantiles, self._num_outputs,
                              min_critic_by_critic_mean or bootstrap_critics == 'mean')
        elif min_critic_by_critic_mean and bootstrap_critics == 'mean':
            raise ValueError(f"{name}: remove min_critic_by_critic_mean or bootstrap_critics = 'mean'")
        self._num_dropped_quantiles = num_dropped_quantiles
        self._min_critic_by_critic_mean = min_critic_by_critic_mean
        super().__init__(
            action_spec=action_spec, critic_network_cls=critic_network_cls, q_network_cls=None,
            critic_loss_ctor=lambda **_: loss, debug_summaries=debug_summaries, name=name,
            target_entropy=target_entropy, bootstrap_critics=bootstrap_critics, **kwargs)

    def _pessimistic_value(self, critics: Tensor) -> Tensor:
        """Reduce quantiles ``[B, n, N]`` (``[B, n, K, N]``) to those to bootstrap from, ``[B, M]`` (``[B, K, M]``)."""
        if self._num_dropped_quantiles is not None:
            return truncated_quantiles(critics, self._num_dropped_quantiles, self._reward_weights)
        if self._min_critic_by_critic_mean:
            return quantiles_of_lowest_mean(critics, self._reward_weights)
        if self._reward_weights is None:
            return critic_values.min_q(critics, None)
        return critic_values.min_q(critics.transpose(-1, -2), self._reward_weights).transpose(-1, -2)

    def _actor_value(self, critics: Tensor) -> Tensor:
        """Reduce quantiles ``[B, n, N]`` (``[B, n, K, N]``) to the value ``[B]`` that the policy maximizes."""
        return super()._actor_value(critics.mean(-1))


def quantiles_of_lowest_mean(critics: Tensor, reward_weights: Tensor | None) -> Tensor:
    """Return the set of quantiles with the lowest mean, or the highest mean for a negative reward weight.

    Args:
        critics: ``[B, n, N]`` or ``[B, n, K, N]``.
        reward_weights: ``[K]`` or ``None``.

    Returns:
        Quantiles ``[B, N]`` or ``[B, K, N]``.
    """
    mean = critics.mean(-1)
    if reward_weights is not None:
        mean = mean * (1 - 2 * (reward_weights < 0).to(mean.dtype))
    index = mean.argmin(1, keepdim=True).unsqueeze(-1)
    return critics.gather(1, index.expand(*index.shape[:-1], critics.shape[-1])).squeeze(1)


def truncated_quantiles(critics: Tensor, num_dropped: int, reward_weights: Tensor | None) -> Tensor:
    """Return the quantiles of n critics together without the largest (Kuznetsov et al. 2020, arXiv:2005.04269).

    For a reward dimension with a negative weight the smallest are left out.

    Args:
        critics: ``[B, n, N]`` or ``[B, n, K, N]``.
        num_dropped: number of quantiles to leave out, for each critic.
        reward_weights: ``[K]`` or ``None``.

    Returns:
        Sorted quantiles ``[B, n (N - num_dropped)]`` or ``[B, K, n (N - num_dropped)]``.
    """
    quantiles = critics.movedim(1, -1).flatten(-2)
    kept = quantiles.shape[-1] - num_dropped * critics.shape[1]
    sign: Tensor | float = 1.0
    if reward_weights is not None:
        sign = torch.where(reward_weights < 0, -1.0, 1.0).unsqueeze(-1)
    return (quantiles * sign).sort(-1).values[..., :kept] * sign


def _check_truncation(name: str, num_dropped: int, num_quantiles: int, has_other_reduction: bool) -> None:
    if not 0 <= num_dropped < num_quantiles:
        raise ValueError(f'{name}.num_dropped_quantiles: expected a number from 0 to {num_quantiles - 1}, below the '
                         f'number of quantiles, found {num_dropped}')
    if has_other_reduction:
        raise ValueError(f'{name}.num_dropped_quantiles cannot be combined with min_critic_by_critic_mean or '
                         "bootstrap_critics = 'mean'")


def _num_quantiles_of(loss: Any, name: str) -> int:
    count = getattr(loss, 'num_quantiles', None)
    if count is None:
        raise ValueError(f'{name}.critic_loss_ctor: expected a quantile loss such as OneStepTDQRLoss, found '
                         f'{type(loss).__name__}')
    return count
