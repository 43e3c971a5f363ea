"""TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860) and ReBRAC (Tarasov et al. 2023, arXiv:2305.09836).

Both keep :mod:`alfx.algorithms.td3_algorithm` near the data with penalties on the squared distance to its actions::

    policy   minimizes  -Q(s, pi(s)) / mean|Q(s, pi(s))| + actor_penalty |pi(s) - a|^2        (Fujimoto, eq. 3 and 5)
    targets  r + gamma (min_i Q'_i(s', a') - critic_penalty |a' - a_data(s')|^2)                  (ReBRAC, eq. 4)

with ``a'`` the smoothed action of the target policy and ``a_data(s')`` the next action in the data. TD3+BC uses only
the first penalty. Its alpha, a factor of the value instead of the penalty, is ``1 / (D actor_penalty)``, because its
penalty is a mean over the D elements of an action. Distances are in units of half the range of the actions, which is -1
to 1 in the papers. A LAST step has no action, hence no penalty. Set ReBRAC's other choices, such as layer normalization
in the critics, deeper networks and larger minibatches, in a conf.
"""
from typing import Any

import torch
from torch import Tensor

from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.offline.offline_losses import StoredActions
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.data_structures import StepType, valid_masks
from alfx.gin_utils import ConfError, NonNegative, configurable, problem_at, takes_arguments_of
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec


@configurable
class Td3BcAlgorithm(Td3Algorithm):
    """TD3 with penalties on the distance to the actions of the data; see the module docstring.

    Args:
        action_spec: nest of ``BoundedTensorSpec`` of continuous actions with finite bounds.
        reward_spec: rank 0, or rank 1 for K rewards without ``critic_penalty``.
        actor_penalty: weight of the squared distance in the loss of the policy, at least 0. Larger values stay closer
            to the data; 0.4 is the value of TD3+BC for an action of one element.
        critic_penalty: weight of the squared distance in the targets of the critics, at least 0; 0 is TD3+BC.
        normalize_value: divide the value in the loss of the policy by its mean magnitude over the minibatch, without
            LAST steps, so that ``actor_penalty`` does not depend on the scale of the rewards.
        kwargs: arguments of :class:`~alfx.algorithms.td3_algorithm.Td3Algorithm`.

    Raises:
        ConfError: a number is out of range, or ``critic_penalty`` is given with K rewards.
        SpecError: an action is discrete, or has no finite bounds.
    """

    @takes_arguments_of(Td3Algorithm, defaults={'name': 'Td3BcAlgorithm'}, after={'actor_penalty': 'reward_weights'})
    def __init__(self, action_spec: NestedTensorSpec, reward_spec: TensorSpec, actor_penalty: NonNegative = 0.4,
                 critic_penalty: NonNegative = 0.0, normalize_value: bool = True, **kwargs: Any):
        if critic_penalty and reward_spec.ndim:
            raise ConfError([problem_at(
                type(self).__name__, 'critic_penalty', f'= {critic_penalty} needs a reward of rank 0, but the reward '
                f'has {reward_spec.numel} dimensions', 'set it to 0')])
        super().__init__(action_spec=action_spec, reward_spec=reward_spec, **kwargs)
        self._stored_actions = StoredActions(action_spec)
        self._actor_penalty, self._critic_penalty = actor_penalty, critic_penalty
        self._normalize_value = normalize_value

    def _regularized_loss(self, loss: Tensor, value: Tensor, action: NestedTensor, rows: Rows) -> Tensor:
        if self._normalize_value:
            is_valid = valid_masks(rows.select_steps(rows.source[0].step_type))
            size = (value.detach().abs() * is_valid).sum() / is_valid.sum().clamp(min=1.0)
            loss = loss / size.clamp(min=1e-6)
        return loss + self._actor_penalty * self._stored_actions.squared_error(action, rows.rollout_info.action)

    def _regularized_target(self, value: Tensor, action: NestedTensor, rows: Rows) -> Tensor:
        if not self._critic_penalty:
            return value
        distance = self._stored_actions.squared_error(action, rows.rollout_info.action)
        return value - self._critic_penalty * torch.where(rows.inputs.step_type == StepType.LAST, 0.0, distance)
