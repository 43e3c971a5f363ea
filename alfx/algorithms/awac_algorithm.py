"""Advantage-weighted actor-critic (Nair et al. 2020, arXiv:2006.09359).

The critics are those of :mod:`alfx.algorithms.sac_algorithm` without entropy. The policy clones the actions in the
data, collected or recorded, weighted by their advantage::

    pi  maximizes  E[ min(exp(A(s, a) / temperature), max) log pi(a | s) ]                                (eq. 13)
    A(s, a) = min_i Q_i(s, a) - min_i Q_i(s, a'),  a' ~ pi(. | s)

The policy therefore stays close to the data, and still keeps learning when it collects data itself. Differs from the
paper: weights are bounded, as in most implementations, and not divided by their sum over a minibatch.
"""
from typing import Any

import torch
from torch import Tensor

from alfx import norm_layers
from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.offline.offline_losses import StoredActions, advantage_weights
from alfx.algorithms.sac.actions import Choice
from alfx.algorithms.sac.states import OF_BATCHES
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.gin_utils import Positive, configurable, takes_arguments_of
from alfx.networks.action_specs import refuse_discrete_actions
from alfx.tensor_specs import NestedTensorSpec

_OF_ENTROPY = ('use_entropy_reward', 'normalize_entropy_reward', 'target_entropy', 'prior_actor_ctor',
               'target_kld_per_dim', 'initial_log_alpha', 'max_log_alpha', 'alpha_optimizer')


@configurable
class AwacAlgorithm(SacAlgorithm):
    """Advantage-weighted actor-critic; see the module docstring for the method.

    Args:
        action_spec: nest of specs of continuous actions.
        temperature: temperature of the weights, above 0; lambda in the paper. Smaller values prefer actions of high
            advantage more strongly.
        max_exp_advantage: upper bound of the weights, above 0.
        kwargs: arguments of :class:`~alfx.algorithms.sac_algorithm.SacAlgorithm`, except those about entropy, discrete
            actions, the gradient of the value and the batches of the critics. ``train_actor_on_last_step`` is False
            unless given.

    Raises:
        ConfError: a number is out of range, or an action is discrete.
    """

    _has_temperature = False

    @takes_arguments_of(
        SacAlgorithm, without=(*_OF_ENTROPY, *OF_BATCHES, 'q_network_cls', 'dqda_clipping', 'reproduce_locomotion'),
        defaults={'train_actor_on_last_step': False, 'name': 'AwacAlgorithm'},
        after={'temperature': 'critic_loss_ctor'})
    def __init__(self, action_spec: NestedTensorSpec, temperature: Positive = 1.0, max_exp_advantage: Positive = 100.0,
                 **kwargs: Any):
        refuse_discrete_actions(type(self).__name__, action_spec, 'choose another environment or algorithm')
        super().__init__(action_spec=action_spec, use_entropy_reward=False, **kwargs)
        self._stored_actions = StoredActions(action_spec)
        self._temperature, self._max_weight = temperature, max_exp_advantage

    def policy_loss(self, rows: Rows, policy: Any, details: Choice, state: Any) -> tuple[Any, Any]:
        """Compute the loss of the policy ``[N]``: minus the weighted log-probability of the action taken."""
        weights, actor_state = self._weights(rows, details, state)
        log_prob = self._stored_actions.log_prob(details.distribution, rows.rollout_info.action)
        return -weights * log_prob, state._replace(actor=actor_state)

    @torch.no_grad()
    def _weights(self, rows: Rows, details: Choice, state: Any) -> tuple[Tensor, Any]:
        """Compute the weights ``[N]``, and the state of the critics for the policy's actions."""
        with norm_layers.running_statistics():  # statistics of two batches would remove the mean of the advantages
            taken, _ = self._critic_networks((rows.observation, rows.rollout_info.action), state.critic.critics)
            own, actor_state = self._critic_networks((rows.observation, details.continuous), state.actor)
        advantage = self._actor_value(taken) - self._actor_value(own)
        return advantage_weights(advantage, self._temperature, self._max_weight), actor_state
