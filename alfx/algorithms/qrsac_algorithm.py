"""Soft actor-critic whose critics learn the distribution of returns by quantile regression.

The critics are those of QR-DQN (Dabney et al. 2018, arXiv:1710.10044) with an action as input, in the frame of soft
actor-critic (Haarnoja et al. 2018, arXiv:1812.05905). Each critic has N quantiles, at the fractions ``(i + 0.5) / N``,
of the distribution of returns. The actor maximises the lowest of the means of several critics, and the lowest of their
distributions is bootstrapped from, as soft actor-critic does with values.
"""
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.maths import critic_maths
from alfx.algorithms.one_step_loss import OneStepTDQRLoss
from alfx.algorithms.sac.actions import ActionParts, ActionType, TargetEntropy
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.gin_utils import configurable
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.tensor_specs import NestedTensorSpec, TensorSpec


@configurable
class QrsacAlgorithm(SacAlgorithm):
    """Soft actor-critic with quantile critics, for continuous actions.

    The arguments are those of :class:`alfx.algorithms.sac_algorithm.SacAlgorithm`, except for:

    Args:
        critic_network_cls: as there; the number of outputs is made that of the quantiles of the loss, unless the
            critic has several outputs already.
        critic_loss_ctor: makes a quantile loss, called as ``(debug_summaries=, name=)``; ``None``:
            ``OneStepTDQRLoss``. Its ``num_quantiles`` is the number of quantiles.
        min_critic_by_critic_mean: bootstrap from the quantiles of the critic with the lowest mean; otherwise from the
            lowest value of each quantile.

    Raises:
        SpecError: a critic has another number of outputs.
        ValueError: the action is not continuous.
    """

    has_fixed_update = SacAlgorithm.has_fixed_update

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()),
                 actor_network_cls: Callable[..., Any] = ActorDistributionNetwork,
                 critic_network_cls: Callable[..., Any] | None = CriticNetwork,
                 reward_weights: list[float] | None = None, epsilon_greedy: float | None = None,
                 use_entropy_reward: bool = False, normalize_entropy_reward: bool = False,
                 calculate_priority: bool = False, num_critic_replicas: int = 2,
                 min_critic_by_critic_mean: bool = False, env: Any = None, config: TrainerConfig | None = None,
                 critic_loss_ctor: Callable[..., Any] | None = None, target_entropy: TargetEntropy = None,
                 prior_actor_ctor: Callable[..., Any] | None = None, target_kld_per_dim: float = 3.0,
                 initial_log_alpha: float = 0.0, max_log_alpha: float | None = None, target_update_tau: float = 0.05,
                 target_update_period: int = 1, dqda_clipping: float | None = None, actor_optimizer: Any = None,
                 critic_optimizer: Any = None, alpha_optimizer: Any = None, checkpoint: str | None = None,
                 debug_summaries: bool = False, reproduce_locomotion: bool = False, name: str = 'QrsacAlgorithm',
                 train_actor_on_last_step: bool = True, rollout_noise_correlation: float = 0.0):
        if ActionParts(action_spec).type != ActionType.Continuous:
            raise ValueError(f'{name} is for continuous actions, found {action_spec}; use SacAlgorithm')
        loss = (critic_loss_ctor or OneStepTDQRLoss)(debug_summaries=debug_summaries, name='critic_loss')
        self._num_quantiles = _num_quantiles_of(loss, name)
        if critic_network_cls is not None:
            critic_network_cls = partial(_quantile_critic, critic_network_cls, self._num_quantiles)
        self._min_critic_by_critic_mean = min_critic_by_critic_mean
        super().__init__(
            observation_spec, action_spec, reward_spec, actor_network_cls=actor_network_cls,
            critic_network_cls=critic_network_cls, q_network_cls=None, reward_weights=reward_weights,
            epsilon_greedy=epsilon_greedy, use_entropy_reward=use_entropy_reward,
            normalize_entropy_reward=normalize_entropy_reward, calculate_priority=calculate_priority,
            num_critic_replicas=num_critic_replicas, env=env, config=config, critic_loss_ctor=lambda **_: loss,
            target_entropy=target_entropy, prior_actor_ctor=prior_actor_ctor, target_kld_per_dim=target_kld_per_dim,
            initial_log_alpha=initial_log_alpha, max_log_alpha=max_log_alpha, target_update_tau=target_update_tau,
            target_update_period=target_update_period, dqda_clipping=dqda_clipping, actor_optimizer=actor_optimizer,
            critic_optimizer=critic_optimizer, alpha_optimizer=alpha_optimizer, checkpoint=checkpoint,
            debug_summaries=debug_summaries, reproduce_locomotion=reproduce_locomotion, name=name,
            train_actor_on_last_step=train_actor_on_last_step, rollout_noise_correlation=rollout_noise_correlation)

    def _pessimistic_value(self, critics: Tensor) -> Tensor:
        """Quantiles ``[B, n, N]`` (``[B, n, K, N]``) to those to bootstrap from, ``[B, N]`` (``[B, K, N]``)."""
        if self._min_critic_by_critic_mean:
            return quantiles_of_lowest_mean(critics, self._reward_weights)
        if self._reward_weights is None:
            return critic_maths.lowest_critic(critics, None)
        return critic_maths.lowest_critic(critics.transpose(-1, -2), self._reward_weights).transpose(-1, -2)

    def _actor_value(self, critics: Tensor) -> Tensor:
        """Quantiles ``[B, n, N]`` (``[B, n, K, N]``) to the ``[B]`` that the policy maximises."""
        return super()._actor_value(critics.mean(-1))


def quantiles_of_lowest_mean(critics: Tensor, reward_weights: Tensor | None) -> Tensor:
    """Of several sets of quantiles the one with the lowest mean, the highest for a negative weight.

    Args:
        critics: ``[B, n, N]`` or ``[B, n, K, N]``.
        reward_weights: ``[K]`` or ``None``.

    Returns:
        ``[B, N]`` or ``[B, K, N]``.
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
    """A critic with ``num_quantiles`` outputs for each reward."""
    critic = ctor(input_tensor_spec=input_tensor_spec)
    if critic.output_spec.ndim > 0:
        return critic
    return critic.copy(output_tensor_spec=TensorSpec((*output_tensor_spec.shape, num_quantiles)))
