"""Intrinsic curiosity module (Pathak et al. 2017, arXiv:1705.05363): a bonus for observations that are hard to predict.

A forward model predicts the features of an observation from the previous features and the action in between. Its error
is both the reward (eq. 6 of the paper, with eta = 1) and the loss (eq. 5):

    r[t] = L_F[t] = 1/2 |forward(phi(o[t-1]), a[t-1]) - phi(o[t])|^2

An inverse model predicts the action from both features. Its loss L_I (eq. 3) also trains the features phi, so that they
represent what the action can influence. At FIRST there is no previous step: reward and losses are 0. Differs from the
paper:

* The forward model does not train the features, which it would make predictable rather than informative; the authors'
  objective (eq. 7) permits this. The losses train different parameters, so they are added without weights: beta would
  only change two step sizes.
* Rewards are normalized, and so are observations if their spec is known.
* If training begins with stored states, the previous step's features are those of the rollout.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alfx import nest
from alfx.algorithms.intrinsic.intrinsic_reward import (IntrinsicRewardAlgorithm, NetworkOrConstructor, all_fixed,
                                                        hidden_sizes, is_first, is_last, make_network, next_row,
                                                        output_tensor_spec, rows)
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Count, Positive, configurable, problem_at
from alfx.nest.utils import NestConcat
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity

ICMState = namedtuple('ICMState', ['feature', 'has_previous'], default_value=())
"""The previous step's features ``[B, F]``, and 1 where there is a previous step: float32 ``[B]``."""

ICMInfo = namedtuple('ICMInfo', ['forward_loss', 'inverse_loss', 'exists', 'is_last'], default_value=())
"""Info of the steps, ``[B]`` each.

``exists``: there is a previous step, without which the losses are meaningless; ``is_last``: the step ends an episode,
``()`` if the losses are those of arriving at the next step.
"""

ICMPair = namedtuple('ICMPair', ['both', 'action', 'exists'], default_value=())
"""Info of ``reward_unroll``: a step and the next one.

``both``: nest ``[B, 2, ...]`` of the inputs of the encoding network for their observations, or without encoding network
their features ``[B, 2, F]``; ``action`` ``[B, A]``: the encoded action in between; ``exists``, bool ``[B]``: both steps
belong to the same episode.
"""

ICMLossInfo = namedtuple('ICMLossInfo', ['forward_loss', 'inverse_loss'], default_value=())
"""Parts of the loss, ``[T, B]`` each."""

ICMMeasures = namedtuple('ICMMeasures', ['reward', 'forward_loss', 'inverse_loss', 'accuracy'], default_value=())
"""Info of ``predict_step``, ``[B]`` each, NaN without a previous step.

``accuracy``: fraction of discrete actions that the inverse model predicts correctly; ``()`` without such actions.
"""


@configurable
class ICMAlgorithm(IntrinsicRewardAlgorithm):
    """Intrinsic reward for observations that a model does not predict.

    The state holds the previous step's features. A training sequence that does not begin with states of the rollout
    (``TrainerConfig.use_rollout_state``) therefore learns nothing from its first step.

    Args:
        action_spec: nest of specs of the action; discrete actions (of any minimum) are encoded one-hot, and the loss of
            the inverse model is their cross-entropy; for continuous actions it is the mean squared error.
        observation_spec: nest of specs of the observation, required to normalize it, to construct networks and to use
            observations as features; ``None``: observations are not normalized.
        hidden_size: sizes of the hidden layers of the default models, or the size of a single layer.
        reward_adapt_speed: normalize rewards by running statistics with this adaptation speed, see
            :class:`~alfx.utils.normalizers.AdaptiveNormalizer`; ``None``: no normalization.
        encoding_net: computes the features of an observation: a feed-forward network, or a constructor, called as
            ``(input_tensor_spec=)``. Its output is flattened. ``None``: the features are the observation itself,
            flattened and concatenated.
        forward_net: predicts features ``[B, F]`` from ``[features, encoded action]``; a network or a constructor,
            called as ``(input_tensor_spec=)``. ``None``: fully connected layers.
        inverse_net: predicts the encoded action ``[B, A]``, for discrete actions the logits, from ``[previous features,
            features]``; given like ``forward_net``.
        activation: activation of the hidden layers of the default models.
        optimizer: trains all networks of this module; ``None``: the agent's optimizer does.
        name: name of this algorithm.
        observation_adapt_speed: normalize observations by running statistics with this adaptation speed; ``None``: no
            normalization.
        observation_clip_value: clip normalized observations to plus and minus this value; ``None``: no clipping.
        reward_zero_mean: subtract the mean when rewards are normalized.
        num_forward_models: number of forward models with different initial weights, whose errors are averaged.

    Raises:
        ConfError: an argument is out of range, or ``observation_spec`` is missing although it is needed.
        SpecError: the outputs of a network have the wrong shape.
    """

    def __init__(self, action_spec: NestedTensorSpec, observation_spec: NestedTensorSpec | None = None,
                 hidden_size: Count | Sequence[Count] = 256, reward_adapt_speed: Positive | None = 8.0,
                 encoding_net: NetworkOrConstructor | None = None, forward_net: NetworkOrConstructor | None = None,
                 inverse_net: NetworkOrConstructor | None = None, activation: Callable = torch.relu_,
                 optimizer: Any = None, name: str = 'ICMAlgorithm', observation_adapt_speed: Positive | None = 8.0,
                 observation_clip_value: Positive | None = 5.0, reward_zero_mean: bool = True,
                 num_forward_models: Count = 1):
        owner = type(self).__name__
        if observation_spec is None:
            observation_adapt_speed = None
        seen_spec = observation_spec
        if observation_adapt_speed is not None:
            seen_spec = nest.map_structure(lambda spec: TensorSpec(spec.shape), observation_spec)
        encoder, feature_spec = _encoder(encoding_net, seen_spec, owner)
        super().__init__(observation_spec, observation_adapt_speed, observation_clip_value, reward_adapt_speed,
                         reward_zero_mean, train_state_spec=ICMState(feature_spec, TensorSpec(())),
                         optimizer=optimizer, name=name)
        self._action_encoder = SimpleActionEncoder(action_spec)
        action = self._action_encoder.output_spec
        sizes = hidden_sizes(hidden_size)
        self._encoding_net = encoder
        self._forward_net = _model(forward_net, [feature_spec, action], feature_spec, sizes, activation,
                                   (owner, 'forward_net'))
        if num_forward_models > 1:
            self._forward_net = self._forward_net.make_parallel(num_forward_models)
        self.num_forward_models = num_forward_models
        self._inverse_net = _model(inverse_net, [feature_spec, feature_spec], action, sizes, activation,
                                   (owner, 'inverse_net'))

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are traceable unless a layer draws random numbers or keeps statistics."""
        is_fixed_update = all_fixed([self._encoding_net, self._forward_net, self._inverse_net])
        return super().own_capabilities()._replace(traceable_update=is_fixed_update, trains_sequences_at_once=True,
                                                   needs_previous_step=True)

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Compute the reward of a step, without learning.

        Args:
            inputs: time step ``[B, ...]``.
            state: ``ICMState``.

        Returns:
            ``output``: the reward ``[B]``; ``state``: ``ICMState``; ``info``: ``ICMMeasures``.
        """
        with torch.no_grad():
            feature = self._encoded(self._prepared(inputs.observation))
            exists = _has_previous_step(inputs, state)
            action = self._action_encoder(inputs.prev_action)
            error = self._forward_loss(state.feature, action, feature)
            reward = self._normalized_reward(error, exists)
            prediction = self._inverse_net([state.feature, feature])[0]
            measures = [reward, error, self._action_encoder.prediction_loss(prediction, action)]
            accuracy = self._action_encoder.accuracy(prediction, action)
            if accuracy is not None:
                measures.append(accuracy)
            info = ICMMeasures(*(torch.where(exists, x, torch.nan) for x in measures))
        return AlgStep(reward, _state_after(feature), info)

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Compute the reward of a step and update the statistics.

        Args:
            inputs: time step ``[B, ...]``; ``prev_action`` led here.
            state: ``ICMState``.

        Returns:
            ``output``: the reward ``[B]``, 0 without a previous step; ``state``: ``ICMState``; ``info``: ``ICMInfo`` if
            training is on-policy, else ``()``.
        """
        self._update_statistics(inputs.observation)
        feature = self._encoded(self._prepared(inputs.observation))
        exists = _has_previous_step(inputs, state)
        action = self._action_encoder(inputs.prev_action)
        error = self._forward_loss(state.feature, action, feature)
        reward = self._normalized_reward(error, exists, update=True)
        info: Any = ()
        if self._yields_info:
            inverse_loss = self._inverse_loss(state.feature, feature, action)
            info = ICMInfo(error, inverse_loss, exists, is_last(inputs.step_type))
        return AlgStep(reward, _state_after(feature), info)

    def reward_unroll(self, inputs: TimeStep) -> AlgStep:
        """Compute the rewards ``[T + 1, B]`` of an unroll; ``info``: ``ICMPair`` of each step and the next one.

        The loss of arriving at a step is therefore assigned to the previous step, and no loss is missing. See the base
        class.
        """
        shape = inputs.step_type[1:].shape
        with torch.no_grad():
            self._update_statistics(nest.map_structure(lambda x: x[1:].flatten(0, 1), inputs.observation))
            seen = self._prepared(nest.map_structure(rows, inputs.observation))
            feature = self._encoded(seen)
            action = self._action_encoder(inputs.prev_action)
            exists = ~is_first(inputs.step_type[1:])
            error = self._forward_loss(feature[:-shape[1]], rows(action[1:]), feature[shape[1]:]).reshape(shape)
            reward = self._normalized_reward(error, exists, update=True)
        return AlgStep(torch.cat((torch.zeros_like(reward[:1]), reward)), (), _pairs(seen, action, exists))

    def pairs_of_unroll(self, inputs: TimeStep) -> NestedTensor:
        """Return the ``ICMPair`` of each step of an unroll and the next one; see the base class."""
        return _pairs(self._prepared(nest.map_structure(rows, inputs.observation)),
                      self._action_encoder(inputs.prev_action), ~is_first(inputs.step_type[1:]))

    def features(self, observation: NestedTensor, update: bool = True) -> Tensor:
        """Return the features ``[B, F]`` of observations ``[B, ...]``; ``update``: add them to the statistics first."""
        if update:
            self._update_statistics(observation)
        return self._encoded(self._prepared(observation))

    def disagreement(self, before: Tensor, prev_action: NestedTensor) -> Tensor:
        """Return the variance of the predictions of several forward models, averaged over the features.

        Args:
            before: features of the previous steps, ``[B, F]``.
            prev_action: actions since then, nest of ``[B, ...]``.

        Returns:
            ``[B]``; no gradient.
        """
        with torch.no_grad():
            return self._forward_net([before, self._action_encoder(prev_action)])[0].var(1, correction=0).mean(-1)

    @property
    def num_features(self) -> int:
        """F, the number of features."""
        return self.train_state_spec.feature.numel

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any = ()) -> AlgStep:
        """Compute the losses of both models.

        Args:
            inputs: time step ``[B, ...]``; ``prev_action`` led here.
            state: ``ICMState``.
            rollout_info: ``ICMPair`` of :meth:`reward_unroll`, whose losses are computed, or ``()``.

        Returns:
            ``output``: ``()``, because the reward is computed in the rollout; ``state``: ``ICMState``; ``info``:
            ``ICMInfo``.
        """
        if rollout_info:
            return AlgStep((), state, self._pair_info(rollout_info))
        feature = self._encoded(self._prepared(inputs.observation))
        info = self._info(state.feature, self._action_encoder(inputs.prev_action), feature,
                          _has_previous_step(inputs, state), is_last(inputs.step_type))
        return AlgStep((), _state_after(feature), info)

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any = ()) -> AlgStep:
        """Compute ``train_step`` of all steps of sequences at once.

        Args:
            inputs: time steps ``[T, B, ...]``.
            state: ``ICMState`` ``[T, B, ...]``, of which only the first step is used.
            rollout_info: ``ICMPair`` ``[T, B, ...]`` or ``()``.

        Returns:
            ``info``: ``ICMInfo`` ``[T, B]``.
        """
        length, batch = inputs.step_type.shape
        if rollout_info:
            info = self._pair_info(nest.map_structure(rows, rollout_info))
        else:
            flat: Any = nest.map_structure(rows, TimeStep(step_type=inputs.step_type, observation=inputs.observation,
                                                          prev_action=inputs.prev_action))
            feature = self._encoded(self._prepared(flat.observation))
            begins = nest.map_structure(lambda x: x[0], state)
            before = ICMState(torch.cat((begins.feature, feature[:-batch])),
                              torch.cat((begins.has_previous, begins.has_previous.new_ones(len(feature) - batch))))
            info = self._info(before.feature, self._action_encoder(flat.prev_action), feature,
                              _has_previous_step(flat, before), is_last(flat.step_type))
        return AlgStep((), (), nest.map_structure(lambda x: x.reshape(length, batch), info))

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the sum of the losses of both models.

        Args:
            info: ``ICMInfo`` ``[T, B]``.

        Returns:
            ``loss`` ``[T, B]``; ``scalar_loss``: the part of LAST steps; ``extra``: ``ICMLossInfo``.
        """
        parts = ICMLossInfo(info.forward_loss.detach() * info.exists, info.inverse_loss.detach() * info.exists)
        return self._loss_of_arriving((info.forward_loss + info.inverse_loss) * info.exists, info.is_last, extra=parts)

    # Models ----------------------------------------------------------------------------------------------------

    def _prepared(self, observation: NestedTensor) -> NestedTensor:
        """Return the input of the encoding network for observations ``[B, ...]``, or without it the features ``[B,
        F]``."""
        observation = self._normalized(observation)
        if self._encoding_net is not None:
            return observation
        leaves = [leaf.reshape(len(leaf), -1).float() for leaf in nest.flatten(observation)]
        return leaves[0] if len(leaves) == 1 else torch.cat(leaves, -1)

    def _encoded(self, seen: NestedTensor) -> Tensor:
        """Compute the features ``[B, F]`` from the output of :meth:`_prepared`."""
        if self._encoding_net is None:
            return seen
        feature = self._encoding_net(seen)[0]
        return feature if feature.ndim == 2 else feature.flatten(1)

    def _forward_loss(self, before: Tensor, action: Tensor, feature: Tensor) -> Tensor:
        """Compute half the squared error of the forward model, ``[B]``, without gradient to the features."""
        prediction, target = self._forward_net([before.detach(), action])[0], feature.detach()
        if self.num_forward_models > 1:  # [B, N, F]
            target = target.unsqueeze(1).expand_as(prediction)
        error = 0.5 * F.mse_loss(prediction, target, reduction='none').sum(-1)
        return error.mean(1) if self.num_forward_models > 1 else error

    def _inverse_loss(self, before: Tensor, feature: Tensor, action: Tensor) -> Tensor:
        """Compute the loss of predicting the action by the inverse model, ``[B]``."""
        return self._action_encoder.prediction_loss(self._inverse_net([before, feature])[0], action)

    def _pair_info(self, pair: Any) -> Any:
        """Compute the ``ICMInfo`` ``[B]`` of arriving at the next steps, including steps that end an episode."""
        feature = self._encoded(nest.map_structure(rows, pair.both))
        before, after = feature.reshape(len(pair.action), 2, -1).unbind(1)
        return self._info(before, pair.action, after, pair.exists)

    def _info(self, before: Tensor, action: Tensor, feature: Tensor, exists: Tensor, ends: Any = ()) -> Any:
        return ICMInfo(self._forward_loss(before, action, feature), self._inverse_loss(before, feature, action), exists,
                       is_last=ends)


def _pairs(seen: NestedTensor, action: Tensor, exists: Tensor) -> NestedTensor:
    """Return the ``ICMPair`` of each step and the next one.

    Args:
        seen: inputs of the encoding network, flattened to ``[(T + 1) * B, ...]``.
        action: encoded action that led to each step, ``[T + 1, B, A]``.
        exists: bool ``[T, B]``: the next step belongs to the same episode.
    """
    steps = nest.map_structure(lambda x: x.reshape(*action.shape[:2], *x.shape[1:]), seen)
    return ICMPair(both=nest.map_structure(lambda x: torch.stack((x, next_row(x)), 2), steps),
                   action=next_row(action), exists=torch.cat((exists, torch.zeros_like(exists[:1]))))


def _has_previous_step(inputs: TimeStep, state: Any) -> Tensor:
    """Return bool ``[B]``: ``state`` belongs to the previous step of the same episode."""
    return (state.has_previous > 0) & ~is_first(inputs.step_type)


def _state_after(feature: Tensor) -> Any:
    return ICMState(feature, feature.new_ones(len(feature)))


def _encoder(encoding_net: Any, observation_spec: NestedTensorSpec | None,
             owner: str) -> tuple[Network | None, TensorSpec]:
    """Return the network that computes features, if there is one, and their spec."""
    where = (owner, 'encoding_net')
    if encoding_net is not None:
        network = make_network(encoding_net, observation_spec, where)
        return network, TensorSpec((output_tensor_spec(network, where).numel, ))
    if observation_spec is None:
        raise ConfError([problem_at(*where, 'is None, which uses observations as features, but there is no '
                                    'observation_spec', 'set one of the two')])
    return None, TensorSpec((sum(spec.numel for spec in nest.flatten(observation_spec)), ))


def _model(network: Any, inputs: list[TensorSpec], output: TensorSpec, hidden: tuple[int, ...], activation: Callable,
           where: tuple[str, str]) -> Network:
    """Return a model that maps ``inputs`` to ``output``, ``[B, ...]`` each.

    Raises:
        SpecError: the given network has another output.
    """
    if network is None:
        return EncodingNetwork(inputs, preprocessing_combiner=NestConcat(), fc_layer_params=hidden,
                               activation=activation, last_layer_size=output.numel, last_activation=identity,
                               name=where[1])
    model = make_network(network, inputs, where)
    found = output_tensor_spec(model, where)
    if found.shape != output.shape:
        raise SpecError(f"{'.'.join(where)}: expected outputs of shape {tuple(output.shape)}, found "
                        f'{tuple(found.shape)}; for EncodingNetwork: last_layer_size = {output.numel}')
    return model
