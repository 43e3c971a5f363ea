"""Soft actor-critic whose critics learn the distribution of returns by quantile regression.

The critics are those of QR-DQN (Dabney et al. 2018, arXiv:1710.10044) with an action as input, combined with soft
actor-critic (Haarnoja et al. 2018, arXiv:1812.05905). Each critic has N quantiles of the distribution of returns, at
the fractions ``(i + 0.5) / N``. The actor maximizes the lowest mean of several critics. Targets bootstrap from the
lowest distribution, where soft actor-critic uses the lowest value.
"""
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from alfx.algorithms.base import critic_values
from alfx.algorithms.one_step_loss import OneStepTDQRLoss
from alfx.algorithms.sac.actions import ActionParts, ActionType, TargetEntropy
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.gin_utils import configurable, takes_arguments_of
from alfx.tensor_specs import NestedTensorSpec, TensorSpec
from alfx.utils.discrete_action import suited_algorithms


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
        kwargs: arguments of :class:`~alfx.algorithms.sac_algorithm.SacAlgorithm`, except ``q_network_cls``; the default
            of ``use_entropy_reward`` is ``False``.

    Raises:
        SpecError: the number of outputs of a critic is not the number of quantiles.
        ValueError: the action is not continuous.
    """

    @takes_arguments_of(
        SacAlgorithm, without=('q_network_cls', ), defaults={'use_entropy_reward': False, 'name': 'QrsacAlgorithm'},
        after={'min_critic_by_critic_mean': 'num_critic_replicas'})
    def __init__(self, action_spec: NestedTensorSpec, critic_network_cls: Callable[..., Any] | None,
                 critic_loss_ctor: Callable[..., Any] | None, debug_summaries: bool, name: str,
                 target_entropy: TargetEntropy, min_critic_by_critic_mean: bool = False, **kwargs: Any):
        if ActionParts(action_spec).type != ActionType.Continuous:
            raise ValueError(f'{name} supports only continuous actions, found {action_spec}; '
                             f'{suited_algorithms(action_spec)}')
        loss = (critic_loss_ctor or OneStepTDQRLoss)(debug_summaries=debug_summaries, name='critic_loss')
        self._num_quantiles = _num_quantiles_of(loss, name)
        if critic_network_cls is not None:
            critic_network_cls = partial(_quantile_critic, critic_network_cls, self._num_quantiles)
        self._min_critic_by_critic_mean = min_critic_by_critic_mean
        super().__init__(
            action_spec=action_spec, critic_network_cls=critic_network_cls, q_network_cls=None,
            critic_loss_ctor=lambda **_: loss, debug_summaries=debug_summaries, name=name,
            target_entropy=target_entropy, **kwargs)

    def _pessimistic_value(self, critics: Tensor) -> Tensor:
        """Reduce quantiles ``[B, n, N]`` (``[B, n, K, N]``) to those to bootstrap from, ``[B, N]`` (``[B, K, N]``)."""
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


def _num_quantiles_of(loss: Any, name: str) -> int:
    count = getattr(loss, 'num_quantiles', None)
    if count is None:
        raise ValueError(f'{name}.critic_loss_ctor: expected a quantile loss such as OneStepTDQRLoss, found '
                         f'{type(loss).__name__}')
    return count


def _quantile_critic(ctor: Callable[..., Any], num_quantiles: int, input_tensor_spec: NestedTensorSpec,
                     output_tensor_spec: TensorSpec = TensorSpec(())) -> Any:
    """Create a critic with ``num_quantiles`` outputs for each reward."""
    critic = ctor(input_tensor_spec=input_tensor_spec)
    if critic.output_spec.ndim > 0:
        return critic
    return critic.copy(output_tensor_spec=TensorSpec((*output_tensor_spec.shape, num_quantiles)))
