"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347).

Each unroll goes into the replay buffer, is given advantages once, trained on for several epochs in minibatches,
and dropped. The loss is in :mod:`alfx.algorithms.ppo_loss`.
"""
from typing import Any

import torch
from torch.distributions import TransformedDistribution

from alfx import nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm, ActorCriticInfo, ActorCriticState
from alfx.algorithms.fixed_update import is_fixed
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.data_structures import AlgStep, BatchInfo, TimeStep, namedtuple
from alfx.gin_utils import configurable
from alfx.tensor_specs import NestedTensor
from alfx.utils import dist_utils

PPOInfo = namedtuple('PPOInfo', [
    'step_type', 'discount', 'reward', 'action', 'rollout_log_prob', 'rollout_action_distribution', 'returns',
    'advantages', 'action_distribution', 'value', 'reward_weights'
], default_value=())
"""What ``preprocess_experience`` and ``train_step`` yield, ``[B, ...]`` each; what is not needed is ``()``."""


@configurable
class PPOAlgorithm(ActorCriticAlgorithm):
    """Clipped surrogate objective; works with ``PPOLoss``.

    The arguments are those of :class:`alfx.algorithms.actor_critic_algorithm.ActorCriticAlgorithm`. Needs
    ``TrainerConfig.whole_replay_buffer_training`` and ``clear_replay_buffer``;
    ``num_updates_per_train_iter`` is the number of epochs.
    """

    @property
    def on_policy(self) -> bool | None:
        """False: it trains from the replay buffer of its last unroll."""
        return False

    @property
    def has_fixed_update(self) -> bool:
        """True unless the loss looks for bad numbers, or something in a network draws numbers or keeps statistics."""
        return type(self._loss) is PPOLoss and self._loss.has_fixed_operations and is_fixed(self)

    @property
    def recomputes_rollout_info(self) -> bool:
        """As for actor-critic: values, and where that is exact log-probabilities, of all steps at once."""
        return (self._is_stateless and not self._has_batch_dependence and self._value_network is not None
                and self._has_own_steps(PPOAlgorithm))

    def collect_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Sample an action and keep its distribution; :meth:`preprocess_experience` computes the rest.

        The log-probability of a squashed action is only exact where the sample before squashing is known.
        """
        distribution, _ = self._actor_network(inputs.observation)
        if self._is_squashed(distribution):
            action, log_prob = dist_utils.sample_action_distribution(distribution, return_log_prob=True)
        else:
            action, log_prob = dist_utils.sample_action_distribution(distribution), ()
        return AlgStep(action, self._no_state,
                       ActorCriticInfo(action=action, log_prob=log_prob, action_distribution=distribution))

    @staticmethod
    def _is_squashed(distribution: NestedTensor) -> bool:
        return any(isinstance(d, TransformedDistribution) for d in nest.flatten(distribution, nest.is_distribution))

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Compute returns and advantages ``[B, T]`` (``[B, T, K]`` for K rewards) of the whole unroll."""
        with torch.no_grad():
            value, log_prob = rollout_info.value, rollout_info.log_prob
            if not isinstance(value, torch.Tensor):
                value = self._values(root_inputs)
            if not isinstance(log_prob, torch.Tensor):
                log_prob = dist_utils.compute_log_probability(rollout_info.action_distribution, rollout_info.action)
            info = PPOInfo(action=rollout_info.action, rollout_log_prob=log_prob,
                           rollout_action_distribution=rollout_info.action_distribution)
            if not self._loss.compute_advantages_internally:
                time_major = ActorCriticInfo(step_type=root_inputs.step_type.transpose(0, 1),
                                             discount=root_inputs.discount.transpose(0, 1),
                                             reward=root_inputs.reward.transpose(0, 1),
                                             value=value.transpose(0, 1))
                returns, advantages = self._loss.calc_rollout_returns_and_advantages(time_major)
                info = info._replace(returns=returns.transpose(0, 1), advantages=advantages.transpose(0, 1))
            return root_inputs, info

    def _values(self, root_inputs: TimeStep) -> torch.Tensor:
        """Values of ``[B, T, ...]`` steps from one call of the network."""
        batch, length = root_inputs.step_type.shape
        observation = nest.map_structure(lambda x: x.reshape(batch * length, *x.shape[2:]),
                                         self._value_inputs(root_inputs))
        value, _ = self._value(observation, ())
        return value.reshape(batch, length, *value.shape[1:])

    def _value_inputs(self, root_inputs: TimeStep) -> NestedTensor:
        return root_inputs.observation

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: Any) -> AlgStep:
        """The policy and the value as they are now, for the action that was taken then."""
        distribution, actor_state = self._actor_network(inputs.observation, state=state.actor if state else ())
        value, value_state = self._value(inputs.observation, state.value if state else ())
        info = rollout_info._replace(step_type=inputs.step_type, discount=inputs.discount, reward=inputs.reward,
                                     action_distribution=distribution, value=value,
                                     reward_weights=self._batched_reward_weights(inputs))
        return AlgStep(rollout_info.action, ActorCriticState(actor_state, value_state), info)
