"""Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347).

Each unroll is stored in the replay buffer. Its advantages are computed once, it is trained on in minibatches for
several epochs, and then dropped. The loss is in :mod:`alfx.algorithms.ppo_loss`.
"""
from typing import Any

import torch

from alfx import nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm, ActorCriticInfo
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.data_structures import AlgStep, BatchInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import configurable, takes_arguments_of
from alfx.tensor_specs import NestedTensor

PPOInfo = namedtuple('PPOInfo', [
    'step_type', 'discount', 'reward', 'action', 'rollout_log_prob', 'rollout_action_distribution', 'returns',
    'advantages', 'action_distribution', 'value', 'reward_weights', 'old_value'
], default_value=())
"""Info of ``preprocess_experience`` and ``train_step``, ``[B, ...]`` each; unused fields are ``()``."""


@configurable
class PPOAlgorithm(ActorCriticAlgorithm):
    """Proximal policy optimization.

    Needs ``TrainerConfig.whole_replay_buffer_training`` and ``clear_replay_buffer``; ``num_updates_per_train_iter`` is
    the number of epochs.

    Args:
        kwargs: arguments of :class:`~alfx.algorithms.actor_critic_algorithm.ActorCriticAlgorithm`; ``loss_class`` is
            ``PPOLoss`` by default.

    Raises:
        TypeError: the loss is not a ``PPOLoss`` or a subclass of it.
    """

    @takes_arguments_of(ActorCriticAlgorithm, defaults={'loss_class': PPOLoss})
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        if not hasattr(self._loss, 'value_clipping'):
            name = type(self).__name__
            raise TypeError(f'{name}.loss_class: expected PPOLoss or a subclass, found {type(self._loss).__name__}. '
                            f'Set {name}.loss_class = @PPOLoss')

    @property
    def on_policy(self) -> bool | None:
        """Return ``False``, because the algorithm trains from a replay buffer that holds its latest unroll."""
        return False

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities of an actor-critic; the conditions for recomputing infos refer to PPO's steps."""
        recomputes = self._is_stateless and not self._has_batch_dependence and self._has_own_steps(PPOAlgorithm)
        return super().own_capabilities()._replace(recomputes_rollout_info=recomputes)

    def collect_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Sample an action and return its distribution; :meth:`preprocess_experience` computes the rest."""
        distribution, _ = self._policy(inputs, ())
        info = self._sampled_for_replay(distribution)
        return AlgStep(info.action, self._no_state, info)

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Compute returns and advantages ``[B, T]`` (``[B, T, K]`` for K rewards) of the whole unroll."""
        self._loss.update_schedules()
        with torch.no_grad():
            value = rollout_info.value
            if not isinstance(value, torch.Tensor):
                value = self._values(root_inputs)
            info = PPOInfo(action=rollout_info.action, rollout_log_prob=self._rollout_log_prob(rollout_info),
                           rollout_action_distribution=rollout_info.action_distribution,
                           old_value=value if self._loss.value_clipping is not None else ())
            if self._stores_returns():
                time_major = ActorCriticInfo(step_type=root_inputs.step_type.transpose(0, 1),
                                             discount=root_inputs.discount.transpose(0, 1),
                                             reward=root_inputs.reward.transpose(0, 1), value=value.transpose(0, 1))
                returns, advantages = self._loss.calc_rollout_returns_and_advantages(time_major)
                info = info._replace(returns=returns.transpose(0, 1), advantages=advantages.transpose(0, 1))
            return root_inputs, info

    def _stores_returns(self) -> bool:
        return not self._loss.compute_advantages_internally

    def _values(self, root_inputs: TimeStep) -> torch.Tensor:
        """Return values of ``[B, T, ...]`` steps with one call of the network."""
        batch, length = root_inputs.step_type.shape
        observation = nest.map_structure(lambda x: x.reshape(batch * length, *x.shape[2:]), root_inputs.observation)
        value, _ = self._value(observation, ())
        return value.reshape(batch, length, *value.shape[1:])

    def _train_info(self, inputs: TimeStep, rollout_info: Any, distribution: NestedTensor, value: torch.Tensor) -> Any:
        return self._completed_info(inputs, rollout_info, distribution, value)
