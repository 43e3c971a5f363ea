"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783), synchronous.

Differs from the paper: all environments step together and one update follows each unroll (A2C). The loss is in
:mod:`alfx.algorithms.actor_critic_loss`.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from alfx import nest
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.base.overrides import is_overridden
from alfx.algorithms.on_policy_algorithm import OnPolicyAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Fraction, configurable, problem_at
from alfx.layers import Dropout
from alfx.networks.action_specs import check_actor
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.norm_layers import has_batch_norm
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils import dist_utils

ActorCriticState = namedtuple('ActorCriticState', ['actor', 'value'], default_value=())

ActorCriticInfo = namedtuple(
    'ActorCriticInfo',
    ['step_type', 'discount', 'reward', 'action', 'log_prob', 'action_distribution', 'value', 'reward_weights'],
    default_value=())
"""Info of the steps of actor-critic, ``[B, ...]`` each; fields that are not needed are ``()``."""


@configurable
class ActorCriticAlgorithm(OnPolicyAlgorithm):
    """A policy and a value function, trained together on each unroll.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        reward_spec: spec of rank 0, or of rank 1 for a K-dimensional reward; the value then has K dimensions.
        reward_weights: K weights of the reward dimensions in the policy's objective; ``None``: all 1.
        actor_network_ctor: called as ``(input_tensor_spec=, action_spec=)``; creates the policy network.
        value_network_ctor: called as ``(input_tensor_spec=, output_tensor_spec=)``; creates the value network. ``None``
            for an algorithm that is only played or evaluated.
        epsilon_greedy: in evaluation, the probability of sampling an action instead of taking the most likely one;
            ``None``: ``config.epsilon_greedy``, or 0 without a config.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        loss: computes the loss; ``None``: ``loss_class(debug_summaries=debug_summaries)``.
        loss_class: class of the default loss, see ``loss``.
        optimizer: optimizes all parameters.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.
    """

    predicts_from_observation = True

    @property
    def actor(self) -> Any:
        """Policy network."""
        return self._actor_network

    @property
    def critic(self) -> Any:
        """Value network; ``None`` in an algorithm that is only played."""
        return self._value_network

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), reward_weights: list[float] | None = None,
                 actor_network_ctor: Callable[..., Any] = ActorDistributionNetwork,
                 value_network_ctor: Callable[..., Any] | None = ValueNetwork, epsilon_greedy: Fraction | None = None,
                 env: Any = None, config: TrainerConfig | None = None, loss: Any = None,
                 loss_class: Callable[..., Any] = ActorCriticLoss, optimizer: Any = None,
                 checkpoint: str | None = None, debug_summaries: bool = False, name: str = 'ActorCriticAlgorithm'):
        actor_network = actor_network_ctor(input_tensor_spec=observation_spec, action_spec=action_spec)
        check_actor(type(self).__name__, 'actor_network_ctor', actor_network, gives_distributions=True)
        value_network, value_state_spec = None, ()
        if value_network_ctor is not None:
            value_network = _make_value_network(value_network_ctor, observation_spec, reward_spec)
            value_state_spec = value_network.state_spec
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         predict_state_spec=actor_network.state_spec,
                         train_state_spec=ActorCriticState(actor=actor_network.state_spec, value=value_state_spec),
                         is_eval=value_network is None, reward_weights=reward_weights, env=env, config=config,
                         optimizer=optimizer, checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self.set_epsilon_greedy(epsilon_greedy)
        self._actor_network = actor_network
        self._value_network = value_network
        self._loss = loss_class(debug_summaries=debug_summaries) if loss is None else loss
        self._is_stateless = not nest.flatten(self.train_state_spec)
        self._has_batch_dependence = any(
            isinstance(m, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)) for m in self.modules())
        if has_batch_norm(self) or any(isinstance(m, Dropout) for m in self.modules()) or (
                self.on_policy is False and self._has_batch_dependence):
            raise ValueError(f'{name}: BatchNorm and Dropout act differently in rollouts than in updates, so on-policy '
                             'training does not support them; use layer norm (use_fc_ln=True)')

    def check_config(self, config: TrainerConfig) -> None:
        """Reject replay for recurrent networks without stored states: the importance ratios would be wrong."""
        super().check_config(config)
        if self.on_policy is False and not self._is_stateless and not config.use_rollout_state:
            raise ConfError([problem_at('TrainerConfig', 'use_rollout_state', f'= False is not supported by '
                                        f'{type(self).__name__}: its networks are recurrent, and action probabilities '
                                        'would be computed from a zero state in training', 'set it to True')])

    supports_action_mask = True

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """Return the state of the policy network."""
        return state.actor

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the most likely action, or a sampled one with probability ``epsilon_greedy``."""
        distribution, state = self._policy(inputs, state)
        action = dist_utils.epsilon_greedy_sample(distribution, self._epsilon_greedy)
        return AlgStep(action, state, ActorCriticInfo(action_distribution=distribution))

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Sample an action ``[B, ...]`` and estimate the value ``[B]`` or ``[B, K]``."""
        distribution, actor_state = self._policy(inputs, state.actor if state else ())
        value, value_state = self._value(inputs.observation, state.value if state else ())
        if self.on_policy:
            action = dist_utils.sample_action_distribution(distribution)
            info = self._info(inputs, action, distribution, value)
        else:
            info = self._sampled_for_replay(distribution)._replace(value=value)
        return AlgStep(info.action, ActorCriticState(actor_state, value_state), info)

    def collect_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Sample an action only; :meth:`train_step` computes the rest for all steps at once."""
        distribution, _ = self._policy(inputs, ())
        action = dist_utils.sample_action_distribution(distribution)
        return AlgStep(action, self._no_state, ActorCriticInfo(action=action))

    _no_state = ActorCriticState()

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities of this algorithm without its parts.

        Infos of the rollout are recomputed if the networks have no recurrent state and no layer that mixes samples, and
        no subclass overrides the steps.
        """
        recomputes = (self._is_stateless and not self._has_batch_dependence
                      and self._has_own_steps(ActorCriticAlgorithm))
        return super().own_capabilities()._replace(recomputes_rollout_info=recomputes)

    def _has_own_steps(self, cls: type) -> bool:
        """Return whether the algorithm can be trained and inherits all methods that have to match from ``cls``."""
        if self._value_network is None or is_overridden(type(self), 'preprocess_experience'):
            return False
        return all(getattr(type(self), name) is getattr(cls, name) for name in (
            'rollout_step', 'collect_step', 'train_step', '_policy', '_value', '_info', '_train_info'))

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: Any) -> AlgStep:
        """Compute the info of ``rollout_step`` for the action taken, with the current networks."""
        distribution, actor_state = self._policy(inputs, state.actor if state else ())
        value, value_state = self._value(inputs.observation, state.value if state else ())
        info = self._train_info(inputs, rollout_info, distribution, value)
        return AlgStep(rollout_info.action, ActorCriticState(actor_state, value_state), info)

    def _policy(self, inputs: TimeStep, state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        """Return the distribution over valid actions and the next state of the policy network."""
        distribution, state = self._actor_network(inputs.observation, state=state)
        return dist_utils.mask_actions(distribution, inputs.action_mask), state

    def _value(self, observation: NestedTensor, state: NestedTensor) -> tuple[torch.Tensor, NestedTensor]:
        if self._value_network is None:
            raise RuntimeError(f'{self._name} has no value network, so it can be played and evaluated but not trained')
        return self._value_network(observation, state=state)

    def _info(self, inputs: TimeStep, action: NestedTensor, distribution: NestedTensor, value: torch.Tensor) -> Any:
        return ActorCriticInfo(step_type=inputs.step_type, discount=inputs.discount, reward=inputs.reward,
                               action=action, action_distribution=distribution, value=value,
                               reward_weights=self._batched_reward_weights(inputs))

    def _train_info(self, inputs: TimeStep, rollout_info: Any, distribution: NestedTensor, value: torch.Tensor) -> Any:
        """Return the info of :meth:`train_step`."""
        return self._info(inputs, rollout_info.action, distribution, value)

    def _completed_info(self, inputs: TimeStep, rollout_info: Any, distribution: NestedTensor,
                        value: torch.Tensor) -> Any:
        """Return ``rollout_info`` with current values of the fields that it shares with ``ActorCriticInfo``."""
        return rollout_info._replace(step_type=inputs.step_type, discount=inputs.discount, reward=inputs.reward,
                                     action_distribution=distribution, value=value,
                                     reward_weights=self._batched_reward_weights(inputs))

    @staticmethod
    def _sampled_for_replay(distribution: NestedTensor) -> Any:
        """Sample an action and return its ``ActorCriticInfo``.

        The log-probability is computed later from the action, in the same way as in updates, so that the importance
        ratio of an unchanged policy is 1. The exact log-probability, which is only known here, differs slightly where a
        squashed action is close to its bounds.
        """
        action = dist_utils.sample_action_distribution(distribution)
        return ActorCriticInfo(action=action, action_distribution=distribution)

    @staticmethod
    def _rollout_log_prob(rollout_info: Any) -> torch.Tensor:
        """Return the log-probabilities of the actions when they were taken, in the batch shape of the distributions."""
        return dist_utils.compute_log_probability(rollout_info.action_distribution, rollout_info.action)

    def _batched_reward_weights(self, inputs: TimeStep) -> NestedTensor:
        """Return the weights ``[B, K]`` of a reward vector, else ``()``."""
        return () if self._reward_weights is None else self._reward_weights.expand(inputs.reward.shape)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the loss of policy, value and entropy, ``[T, B]``."""
        return self._loss(info)


def _make_value_network(ctor: Callable[..., Any], observation_spec: NestedTensorSpec, reward_spec: TensorSpec) -> Any:
    """Create a value network with one output per reward dimension."""
    if reward_spec.ndim == 0:
        return ctor(input_tensor_spec=observation_spec)
    return ctor(input_tensor_spec=observation_spec, output_tensor_spec=TensorSpec(reward_spec.shape))
