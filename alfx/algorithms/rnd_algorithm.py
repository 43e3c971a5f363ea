"""Random network distillation (Burda et al. 2018, arXiv:1810.12894): a bonus for novel observations.

A target network with fixed random weights maps an observation to a vector, and a predictor network learns to predict
this vector. The prediction error is small for observations that were seen often, so it serves as the reward for
arriving at an observation (section 2.2 of the paper):

    r[t] = |predictor(o[t]) - target(o[t])|^2

In the paper's terms o[t] is the next observation, the result of the previous action. A FIRST step is not the result of
an action: its reward is 0, and it is not trained on where whole unrolls are rewarded at once. Differences from the
paper:

* Rewards are divided by the standard deviation of the rewards, not of the returns; scale them with
  ``Agent.intrinsic_reward_coef``. By default their mean is subtracted too, so that an average reward does not make it
  worthwhile to prolong or end an episode. ``reward_zero_mean = False`` follows the paper.
* Both returns have one value function, unless ``Agent.intrinsic_reward_as_dimension`` is set, and intrinsic returns
  end with the episode.
* The statistics of observations start with the first step of the run, without a random policy beforehand.
"""
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from alfx import nest
from alfx.algorithms.intrinsic.intrinsic_reward import (IntrinsicMeasures, IntrinsicRewardAlgorithm,
                                                        NetworkOrConstructor, all_fixed, is_first, is_last,
                                                        make_network, next_row, output_tensor_spec, rows)
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Positive, StepLimit, check_value, configurable, problem_at
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec, extract_spec

RNDInfo = namedtuple('RNDInfo', ['loss', 'is_last'], default_value=())
"""Info of a step, ``[B]`` each: the prediction error, and whether the step ends an episode. ``is_last`` is ``()`` if
the errors are those of arriving at the next step."""

RNDTarget = namedtuple('RNDTarget', ['observation', 'target'], default_value=())
"""Info of ``reward_unroll`` about the next step, ``[B, ...]`` each: input and target of the predictor."""


@configurable
class RNDAlgorithm(IntrinsicRewardAlgorithm):
    """Intrinsic reward module whose reward is the error in predicting a fixed random function of the observation.

    Args:
        target_net: network with random weights, which is not trained. This and the other networks are given as a
            network or its constructor, called as ``(input_tensor_spec=)``; not recurrent, with one tensor as output.
        predictor_net: network that learns to predict the output of ``target_net``.
        encoder_net: applied to the observation before both networks; not trained. ``None``: no encoder. Like
            ``target_net`` it is always in evaluation mode: batch norm does not update its statistics, and dropout is
            off.
        reward_adapt_speed: normalize rewards by running statistics of this speed, see
            :class:`~alfx.utils.normalizers.AdaptiveNormalizer`; ``None``: no normalization.
        observation_adapt_speed: normalize observations by running statistics of this speed; ``None``: no
            normalization.
        observation_spec: nest of specs of the observation; required to normalize observations and by constructors of
            networks.
        optimizer: optimizes the predictor; ``None``: the optimizer of the agent.
        clip_value: if positive, clip normalized rewards to ``[-clip_value, clip_value]``.
        keep_stacked_frames: if positive, use only this number of entries at the end of the first dimension of an
            observation, such as the last frames of a stack of images ``[C, H, W]``; 0: use the whole observation.
        name: name of this algorithm.
        action_spec: unused part of the interface of an intrinsic reward module.
        observation_clip_value: clip normalized observations to ``[-value, value]``; ``None``: no clipping.
        reward_zero_mean: subtract the mean of the rewards when they are normalized.

    Raises:
        ConfError: arguments are out of range or contradict each other.
        SpecError: the outputs of the two networks differ in shape.
    """

    _not_trained = ('_target_net', '_encoder_net')

    def __init__(self, target_net: NetworkOrConstructor, predictor_net: NetworkOrConstructor,
                 encoder_net: NetworkOrConstructor | None = None, reward_adapt_speed: Positive | None = None,
                 observation_adapt_speed: Positive | None = None, observation_spec: NestedTensorSpec | None = None,
                 optimizer: Any = None, clip_value: float = -1.0, keep_stacked_frames: StepLimit = 1,
                 name: str = 'RNDAlgorithm', action_spec: NestedTensorSpec = None,
                 observation_clip_value: Positive | None = 5.0, reward_zero_mean: bool = True):
        owner = type(self).__name__
        check_value(owner, 'clip_value', clip_value, float)
        if clip_value > 0 and reward_adapt_speed is None:
            raise ConfError([problem_at(owner, 'clip_value', f'= {clip_value} is for normalized rewards',
                                        'set reward_adapt_speed, or leave clip_value out')])
        self._frames_checked = observation_spec is not None
        seen_spec = observation_spec
        if observation_spec is not None:
            seen_spec = _last_frames_spec(observation_spec, keep_stacked_frames, owner)
        super().__init__(seen_spec, observation_adapt_speed, observation_clip_value, reward_adapt_speed,
                         reward_zero_mean, clip_value, optimizer=optimizer, name=name)
        self._keep_stacked_frames = keep_stacked_frames
        if observation_adapt_speed is not None:
            seen_spec = nest.map_structure(lambda spec: TensorSpec(spec.shape), seen_spec)
        self._encoder_net = None
        if encoder_net is not None:
            self._encoder_net = make_network(encoder_net, seen_spec, (owner, 'encoder_net'))
            seen_spec = self._encoder_net.output_spec
        self._target_net = make_network(target_net, seen_spec, (owner, 'target_net'))
        self._predictor_net = make_network(predictor_net, seen_spec, (owner, 'predictor_net'))
        target, found = (output_tensor_spec(network, (owner, argument)) for network, argument in (
            (self._target_net, 'target_net'), (self._predictor_net, 'predictor_net')))
        if target.shape != found.shape:
            raise SpecError(f'{owner}.predictor_net: expected the output shape of target_net, {tuple(target.shape)}, '
                            f'found {tuple(found.shape)}')
        self.train(self.training)

    def train(self, mode: bool = True) -> 'RNDAlgorithm':
        """Set the mode of this module, except for the random networks, which stay in evaluation mode.

        In training mode, batch norm would make the target of a row depend on the other rows.

        Args:
            mode: ``True`` for training mode.
        """
        super().train(mode)
        for network in (self._target_net, self._encoder_net):
            if network is not None:
                network.eval()
        return self

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are traceable unless a layer draws random numbers or keeps statistics."""
        networks = [self._encoder_net, self._target_net, self._predictor_net]
        return super().own_capabilities()._replace(traceable_update=all_fixed(networks))

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Compute the reward of a step without learning.

        Args:
            inputs: time step ``[B, ...]``.
            state: ``()``.

        Returns:
            ``output``: the reward ``[B]``; ``info``: ``IntrinsicMeasures``.
        """
        with torch.no_grad():
            error = self._error(*self._predicted(inputs.observation))
            is_rewarded = ~is_first(inputs.step_type)
            reward = self._normalized_reward(error, is_rewarded)
        measures = (torch.where(is_rewarded, x, torch.nan) for x in (reward, error))
        return AlgStep(reward, (), IntrinsicMeasures(*measures))

    def rollout_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Compute the reward of a step, and update the statistics.

        Args:
            inputs: time step ``[B, ...]``.
            state: ``()``.

        Returns:
            ``output``: the reward ``[B]``, 0 at FIRST; ``info``: ``RNDInfo`` if training is on-policy, else ``()``.
        """
        if not self._frames_checked:
            _last_frames_spec(extract_spec(inputs.observation), self._keep_stacked_frames, type(self).__name__)
            self._frames_checked = True
        self._update_statistics(self._last_frames(inputs.observation))
        error = self._error(*self._predicted(inputs.observation))
        reward = self._normalized_reward(error, ~is_first(inputs.step_type), update=True)
        info = RNDInfo(loss=error, is_last=is_last(inputs.step_type)) if self._yields_info else ()
        return AlgStep(reward, (), info)

    def reward_unroll(self, inputs: TimeStep) -> AlgStep:
        """Compute the rewards ``[T + 1, B]`` of an unroll; ``info`` is the ``RNDTarget`` of the next step.

        The loss of arriving at a step is thus assigned to the previous step, and no loss is missing. See the base
        class.
        """
        with torch.no_grad():
            later = nest.map_structure(lambda x: x[1:].flatten(0, 1), inputs.observation)
            self._update_statistics(self._last_frames(later))
            observation, target = self._predicted(nest.map_structure(rows, inputs.observation))
            error = self._error(observation, target).reshape(inputs.step_type.shape)
            is_rewarded = ~is_first(inputs.step_type)
            is_rewarded[0] = False
            reward = self._normalized_reward(error, is_rewarded, update=True)
        return AlgStep(reward, (), _of_next_steps(observation, target, reward.shape))

    def pairs_of_unroll(self, inputs: TimeStep) -> NestedTensor:
        """Return the ``RNDTarget`` of the next step for each step of an unroll; see the base class."""
        return _of_next_steps(*self._predicted(nest.map_structure(rows, inputs.observation)), inputs.step_type.shape)

    def novelty(self, observation: NestedTensor, update: bool = True) -> Tensor:
        """Return the norms ``[B]`` of the prediction errors of observations ``[B, ...]``; ``update``: add these to the
        statistics first."""
        if update:
            self._update_statistics(self._last_frames(observation))
        return self._error(*self._predicted(observation)).sqrt()

    def train_step(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: Any = ()) -> AlgStep:
        """Compute the prediction error to train on.

        Args:
            inputs: time step ``[B, ...]``.
            state: ``()``.
            rollout_info: ``RNDTarget`` of :meth:`reward_unroll`, or ``()``.

        Returns:
            ``output``: ``()``, because the rollout computes the reward; ``info``: ``RNDInfo``.
        """
        if rollout_info:
            return AlgStep((), (), RNDInfo(loss=self._error(*rollout_info)))
        error = self._error(*self._predicted(inputs.observation))
        return AlgStep((), (), RNDInfo(loss=error, is_last=is_last(inputs.step_type)))

    def train_sequence(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: Any = ()) -> AlgStep:
        """Run ``train_step`` on all steps ``[T, B, ...]`` of sequences at once."""
        observation, target = (nest.map_structure(rows, rollout_info) if rollout_info else
                               self._predicted(nest.map_structure(rows, inputs.observation)))
        error = self._error(observation, target).reshape(inputs.step_type.shape)
        return AlgStep((), (), RNDInfo(loss=error, is_last=() if rollout_info else is_last(inputs.step_type)))

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the squared prediction error of every step.

        Args:
            info: ``RNDInfo`` ``[T, B]``.

        Returns:
            ``loss`` ``[T, B]``; ``scalar_loss``: the part of LAST steps.
        """
        return self._loss_of_arriving(info.loss, info.is_last, extra=info.loss)

    def _last_frames(self, observation: NestedTensor) -> NestedTensor:
        """Return the used frames of observations ``[B, ...]``."""
        count = self._keep_stacked_frames
        return nest.map_structure(lambda x: x[:, -count:], observation) if count else observation

    def _predicted(self, observation: NestedTensor) -> tuple[NestedTensor, Tensor]:
        """Return input and target of the predictor for observations ``[B, ...]``."""
        with torch.no_grad():
            seen = self._normalized(self._last_frames(observation))
            if self._encoder_net is not None:
                seen = self._encoder_net(seen)[0]
            return seen, self._target_net(seen)[0]

    def _error(self, observation: NestedTensor, target: Tensor) -> Tensor:
        """Return the squared error ``[B]`` of the predictor."""
        error = F.mse_loss(self._predictor_net(observation)[0], target, reduction='none')
        return error.sum(-1) if error.ndim == 2 else error.flatten(1).sum(-1)


def _of_next_steps(observation: NestedTensor, target: Tensor, shape: torch.Size) -> NestedTensor:
    """Return the ``RNDTarget`` ``[T + 1, B, ...]`` of the next steps from flattened inputs and targets of all steps."""
    return nest.map_structure(lambda x: next_row(x.reshape(*shape, *x.shape[1:])), RNDTarget(observation, target))


def _last_frames_spec(observation_spec: NestedTensorSpec, count: int, owner: str) -> NestedTensorSpec:
    """Return the spec of the last ``count`` entries of the first dimension of each tensor.

    Raises:
        ConfError: a tensor has fewer entries, or the result would be a single number of a vector.
    """

    def last(path: str, spec: Any) -> TensorSpec:
        if not spec.ndim or spec.shape[0] < count or (spec.ndim == 1 and count == 1 < spec.shape[0]):
            raise ConfError([problem_at(owner, 'keep_stacked_frames', f'= {count} would keep the last {count} in the '
                                        f'first dimension of the observation {path}'.rstrip() +
                                        f' {tuple(spec.shape)}, which is not a stack of frames',
                                        'set it to 0 to use the whole observation')])
        shape = (count, *spec.shape[1:])
        if not isinstance(spec, BoundedTensorSpec):
            return spec.replace(shape=shape)
        low, high = (np.broadcast_to(bound, tuple(spec.shape))[-count:] for bound in (spec.minimum, spec.maximum))
        return BoundedTensorSpec(shape, spec.dtype, low, high)

    if not count:
        return observation_spec
    leaves = [last(path, spec) for path, spec in nest.flatten_with_path(observation_spec)]
    return nest.pack_sequence_as(observation_spec, leaves)
