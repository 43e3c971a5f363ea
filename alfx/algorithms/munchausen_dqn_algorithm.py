"""Munchausen DQN (Vieillard et al. 2020, arXiv:2007.14430): deep Q-learning with soft values, and a bonus for actions
that the policy already prefers.

The policy of the bonus and of the targets is the softmax of the values of the target network. Differs from the paper:
actions are chosen and the network is trained as in :class:`~alfx.algorithms.dqn_algorithm.DqnAlgorithm`, which also
supports n-step returns; the bonus is then added to each of the n rewards.
"""
from typing import Annotated, Any

import torch
from torch import Tensor

from alfx.algorithms.base import q_values
from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.data_structures import LossInfo
from alfx.gin_utils import Count, Fraction, Positive, Range, configurable, takes_arguments_of
from alfx.utils.discrete_action import leaf_of_mask, mask_invalid


def soft_value_and_bonus(values: Tensor, action: Tensor, temperature: float, least_bonus: float
                         ) -> tuple[Tensor, Tensor]:
    """Compute the soft value of a state and the log-probability of an action, times the temperature.

    With ``pi = softmax(values / temperature)``::

        value = sum_a pi(a) (values(a) - temperature log pi(a)) = temperature log sum_a exp(values(a) / temperature)
        bonus = max(temperature log pi(action), least_bonus)

    Args:
        values: ``[N, A]``; large negative numbers for invalid actions.
        action: int64 ``[N]``.
        temperature: positive.
        least_bonus: lower bound of the bonus, at most 0.

    Returns:
        value and bonus, ``[N]`` each
    """
    value = temperature * torch.logsumexp(values / temperature, -1)
    taken = values.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return value, (taken - value).clamp(least_bonus, 0.0)


@configurable
class MunchausenDqnAlgorithm(DqnAlgorithm):
    """Deep Q-learning towards soft values, with a bonus for actions that the policy prefers.

    Args:
        temperature: temperature of the policy, tau in the paper. Larger values keep the policy closer to random.
        bonus_weight: weight of the bonus in the reward, alpha in the paper; 0 gives soft deep Q-learning.
        least_bonus: lower bound of the bonus, at most 0.
        num_critic_replicas: number n of critics; the minimum of their values is used.
        kwargs: arguments of :class:`~alfx.algorithms.dqn_algorithm.DqnAlgorithm`, except those of distributions, of
            double Q-learning and of rewards with several dimensions.

    Raises:
        ValueError: as ``DqnAlgorithm``; the reward has several dimensions; or ``least_bonus`` is positive.
    """

    _bootstraps_from_first_step = True  # the first step has a bonus
    _bootstraps_once = False

    @takes_arguments_of(
        DqnAlgorithm, without=('target_net_target_action', 'num_atoms', 'v_min', 'v_max', 'reward_weights'),
        defaults={'name': 'MunchausenDqnAlgorithm'}, after={'temperature': 'critic_loss_ctor'})
    def __init__(self, temperature: Positive = 0.03, bonus_weight: Fraction = 0.9,
                 least_bonus: Annotated[float, Range(maximum=0)] = -1.0, num_critic_replicas: Count = 1, **kwargs: Any):
        if kwargs['reward_spec'].ndim:
            raise ValueError(f"{kwargs['name']}: expected a scalar reward, found {kwargs['reward_spec']}; DqnAlgorithm "
                             'supports rewards with several dimensions')
        super().__init__(target_net_target_action=True, num_critic_replicas=num_critic_replicas, **kwargs)
        self._temperature, self._bonus_weight, self._least_bonus = temperature, bonus_weight, least_bonus

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Compute the soft value to bootstrap from and the bonus, ``[N]`` each."""
        outputs, target_state = self._outputs(self._target_critic_networks, rows.observation, state.target_critic)
        values = mask_invalid(q_values.least_values(outputs, None), leaf_of_mask(rows.action_mask))
        index = self._discrete.index(rows.rollout_info.action)
        found = soft_value_and_bonus(values, index, self._temperature, self._least_bonus)
        return found, state._replace(target_critic=target_state)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the loss ``[T, B]`` of the values towards rewards with the bonus."""
        value, bonus = info.target_critic
        reward = torch.cat((info.reward[:1], info.reward[1:] + self._bonus_weight * bonus[:-1]))
        return super().calc_loss(info._replace(reward=reward, target_critic=value))
