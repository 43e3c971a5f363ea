"""Rewards of imagined steps: a given function, or a network trained on rewards of the environment.

A reward belongs to arriving at an observation: ``compute_reward(obs, action, state)`` receives the action and the
resulting observation. ``state`` holds everything else that the reward depends on, such as the previous observation.
Read next: :mod:`alfx.algorithms.mbrl_algorithm`.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.known_tasks import REWARDS, REWARDS_BEFORE_THE_STEP
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import check_value, configurable
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.dynamics_networks import DynamicsNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.running_stats import AdaptiveStats


@configurable
class RewardEstimationAlgorithm(Algorithm):
    """Base class of the rewards of imagined steps.

    Args:
        name: name of this algorithm.
        train_state_spec: spec of the inputs of the reward besides the action and the resulting observation.
    """

    def __init__(self, name: str = 'RewardEstimationAlgorithm', train_state_spec: NestedTensorSpec = ()):
        super().__init__(name=name, train_state_spec=train_state_spec)

    def state_at(self, observation: NestedTensor) -> NestedTensor:
        """Return the state for :meth:`compute_reward` of actions in observations ``[N, ...]``; empty by default."""
        return ()

    def compute_reward(self, obs: NestedTensor, action: NestedTensor, state: NestedTensor) -> tuple[Tensor, Any]:
        """Compute the reward of arriving at an observation.

        Args:
            obs: nest ``[N, ...]``, the observation after the action.
            action: ``[N, ...]``.
            state: result of :meth:`state_at`, or the state that this method returned for the previous step.

        Returns:
            The reward ``[N]``, or ``[N, K]`` for K rewards, and the next state.
        """
        raise NotImplementedError(f'{type(self).__name__}.compute_reward')

    def train_step(self, time_step: TimeStep, state: NestedTensor = (), rollout_info: Any = None) -> AlgStep:
        """Return the training info of a step; empty by default."""
        return AlgStep((), state, ())

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Return the losses ``[T, B]``; ``()`` if nothing is learned."""
        return LossInfo(loss=())


@configurable
class FixedRewardFunction(RewardEstimationAlgorithm):
    """Reward module with a given reward function.

    Args:
        reward_func: maps the observation ``[N, ...]`` after the action and the action ``[N, ...]`` to the reward
            ``[N]``; or the name of an entry of :data:`alfx.algorithms.base.known_tasks.REWARDS`, such as
            ``'pendulum'``.
        name: name of this algorithm.
        before_step: call ``reward_func`` with the observation before the action instead; ``None``: only for functions
            in :data:`alfx.algorithms.base.known_tasks.REWARDS_BEFORE_THE_STEP`.

    Raises:
        ConfError: ``reward_func`` is not callable, or there is no function of this name.
    """

    def __init__(self, reward_func: Callable[..., Tensor] | str, name: str = 'FixedRewardFunction',
                 before_step: bool | None = None):
        super().__init__(name=name)
        owner = type(self).__name__
        if isinstance(reward_func, str):
            check_value(owner, 'reward_func', reward_func, str, choices=sorted(REWARDS))
            reward_func = REWARDS[reward_func]
        self._reward_func = check_value(owner, 'reward_func', reward_func, callable)
        known = any(reward_func is function for function in REWARDS_BEFORE_THE_STEP)
        self._before_step = known if before_step is None else before_step

    def state_at(self, observation: NestedTensor) -> NestedTensor:
        """Return the observation if the reward depends on it, else ``()``."""
        return observation if self._before_step else ()

    def compute_reward(self, obs: NestedTensor, action: NestedTensor, state: NestedTensor) -> tuple[Tensor, Any]:
        """Call the reward function.

        Raises:
            ValueError: the function does not return the shape ``[N]`` or ``[N, K]``, or needs the observation before
                the action and ``state`` is empty.
        """
        if self._before_step and not nest.flatten(state):
            raise ValueError(f'{self._name}: expected the observation before the action as state, found {state!r}; use '
                             'state_at')
        reward = self._reward_func(state if self._before_step else obs, action)
        count = nest.get_nest_batch_size(obs)
        if not isinstance(reward, Tensor) or reward.ndim not in (1, 2) or len(reward) != count:
            found = f'shape {list(reward.shape)}' if isinstance(reward, Tensor) else repr(reward)
            raise ValueError(f'{self._name}.reward_func: expected rewards of shape [N] = [{count}], found {found}')
        return reward, obs if self._before_step else state


@configurable
class LearnedReward(RewardEstimationAlgorithm):
    """Reward module with a network that receives the action and the normalized observations before and after it.

    The network needs both observations, because many rewards, such as the distance covered in a step, depend on their
    difference. The state is the observation before the action. The loss of a step is half the squared error of the
    normalized reward of the transition that follows it.

    Args:
        feature_spec: float32 ``[D]``, spec of the observation.
        action_spec: spec of the action; discrete actions are encoded one-hot.
        reward_spec: rank 0, or rank 1 for K rewards.
        hidden_size: sizes of the hidden layers.
        name: name of this algorithm.
    """

    def __init__(self, feature_spec: TensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), hidden_size: int | Sequence[int] = (128, 128),
                 name: str = 'LearnedReward'):
        super().__init__(name=name, train_state_spec=TensorSpec(feature_spec.shape))
        sizes = (hidden_size, ) if isinstance(hidden_size, int) else tuple(hidden_size)
        self._action_encoder = SimpleActionEncoder(action_spec)
        encoded = self._action_encoder.output_spec
        both = TensorSpec((2 * feature_spec.numel, ))
        self._network = DynamicsNetwork((both, encoded), TensorSpec(reward_spec.shape), joint_fc_layer_params=sizes,
                                        activation=F.silu)
        self._of_feature, self._of_action, self._of_reward = (
            AdaptiveStats(spec, 8.0) for spec in (feature_spec, encoded, TensorSpec(reward_spec.shape)))

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are traceable unless a layer draws random numbers or keeps statistics."""
        return super().own_capabilities()._replace(traceable_update=is_traceable(self._network),
                                                   trains_sequences_at_once=True,
                                                   needs_two_steps=True, bootstraps_sequences=True)

    def _predicted(self, before: Any, obs: Any, action: NestedTensor) -> Tensor:
        """Return the normalized reward ``[N]`` or ``[N, K]``."""
        if not isinstance(before, Tensor) or before.shape != obs.shape:
            found = list(before.shape) if isinstance(before, Tensor) else repr(before)
            raise ValueError(f'{self._name}: expected the previous observations, of shape {list(obs.shape)}, as state, '
                             f'found {found}; use state_at')
        before, obs, action = ((x - stats.mean) * torch.rsqrt(stats.variance + 1e-6) for stats, x in (
            (self._of_feature, before), (self._of_feature, obs), (self._of_action, self._action_encoder(action))))
        return self._network((torch.cat((before, obs), -1), action))[0]

    def state_at(self, observation: NestedTensor) -> NestedTensor:
        """Return the observation, which is the state."""
        return observation

    def compute_reward(self, obs: NestedTensor, action: NestedTensor, state: NestedTensor) -> tuple[Tensor, Any]:
        """Predict the reward.

        Raises:
            ValueError: ``state`` is not the previous observation, ``[N, D]``.
        """
        mean, variance = self._of_reward.moments()
        return torch.addcmul(mean, (variance + 1e-12).sqrt(), self._predicted(state, obs, action)), obs

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Update the statistics with a batch ``[B, T, ...]``."""
        if not context.is_eval():
            arrives = ~root_inputs.is_first()
            for stats, x in ((self._of_feature, root_inputs.observation), (self._of_reward, root_inputs.reward),
                             (self._of_action, self._action_encoder(root_inputs.prev_action))):
                stats.update(x[arrives])
        return root_inputs, rollout_info

    def train_step(self, time_step: TimeStep, state: NestedTensor = (), rollout_info: Any = None) -> AlgStep:
        """Return the loss of the reward of arriving at ``time_step`` ``[B, ...]`` from ``state``; 0 at FIRST."""
        mean, variance = self._of_reward.moments()
        target = (time_step.reward - mean) * torch.rsqrt(variance + 1e-12)
        loss = 0.5 * (self._predicted(state, time_step.observation, time_step.prev_action) - target).square()
        loss = loss if loss.ndim == 1 else loss.sum(-1)
        return AlgStep((), time_step.observation, torch.where(time_step.is_first(), 0.0, loss))

    def train_sequence(self, inputs: TimeStep, state: NestedTensor, rollout_info: Any = None) -> AlgStep:
        """Run :meth:`train_step` on sequences ``[T, B, ...]``; the first step has no predecessor and loss 0."""
        length, batch = inputs.step_type.shape
        if length < 2:
            return super().train_sequence(inputs, state, rollout_info)
        arrived = nest.map_structure(lambda x: x[1:].flatten(0, 1), TimeStep(
            step_type=inputs.step_type, reward=inputs.reward, observation=inputs.observation,
            prev_action=inputs.prev_action))
        loss: Any = self.train_step(arrived, inputs.observation[:-1].flatten(0, 1)).info
        return AlgStep((), (), torch.cat((loss.new_zeros(batch), loss)).view(length, batch))

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Return the losses ``[T, B]``: each step gets the loss of the transition that follows, the last one 0."""
        loss: Any = info
        loss = torch.cat((loss[1:], torch.zeros_like(loss[:1])))
        return LossInfo(loss=loss, extra={'reward': loss.detach()})
