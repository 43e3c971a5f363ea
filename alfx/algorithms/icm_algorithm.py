"""Intrinsic curiosity module (Pathak et al. 2017, arXiv:1705.05363): a bonus for what was not foreseen.

A forward model predicts the features of an observation from those of the one before and the action in between. Its
error is the reward (eq. 6 of the paper, with eta = 1), and its loss (eq. 5):

    r[t] = L_F[t] = 1/2 |forward(phi(o[t-1]), a[t-1]) - phi(o[t])|^2

An inverse model predicts the action from both features; its loss L_I (eq. 3) also trains the features phi, so that
they hold what the action has to do with. At FIRST there is no step before: reward and losses are 0. What differs:

* The forward model does not train the features, which it would make easy to predict, rather than informative; the
  authors' objective (eq. 7) allows for it. The losses train different parameters, so that their sum is taken as it
  is: the weight beta would do nothing but change two step sizes.
* Rewards are normalized, and so are observations if their spec is known.
* Where training begins with stored states, the features of the step before are those of the rollout.
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
from alfx.gin_utils import ConfError, configurable
from alfx.gin_utils.value_checks import Count, Positive, problem_at
from alfx.nest.utils import NestConcat
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.engine.capabilities import Capabilities
from alfx.utils.math_ops import identity

ICMState = namedtuple('ICMState', ['feature', 'has_previous'], default_value=())
"""The features of the step before ``[B, F]``, and 1 where there is such a step: float32 ``[B]``."""

ICMInfo = namedtuple('ICMInfo', ['forward_loss', 'inverse_loss', 'exists', 'is_last'], default_value=())
"""What the steps yield, ``[B]`` each.

``exists``: whether there is a step before, without which the losses mean nothing; ``is_last``: whether the step ends an
episode, ``()`` where the losses are those of arriving at the next step.
"""

ICMPair = namedtuple('ICMPair', ['both', 'action', 'exists'], default_value=())
"""What ``reward_unroll`` yields: a step and the one after it.

``both``: nest ``[B, 2, ...]`` of what the encoding network sees of their observations, or without one their features
``[B, 2, F]``; ``action`` ``[B, A]``: the encoded action in between; ``exists``, bool ``[B]``: whether they are of the
same episode.
"""

ICMLossInfo = namedtuple('ICMLossInfo', ['forward_loss', 'inverse_loss'], default_value=())
"""The parts of the loss, ``[T, B]`` each."""

ICMMeasures = namedtuple('ICMMeasures', ['reward', 'forward_loss', 'inverse_loss', 'accuracy'], default_value=())
"""What ``predict_step`` yields, ``[B]`` each, NaN without a step before.

``accuracy``: the share of discrete actions that the inverse model is right about; ``()`` without such actions.
"""


@configurable
class ICMAlgorithm(IntrinsicRewardAlgorithm):
    """A reward for observations that a model did not foresee.

    The state is that of the step before. So a training sequence that does not begin with states of the rollout
    (``TrainerConfig.use_rollout_state``) learns nothing from its first step.

    Args:
        action_spec: nest of specs of the action; discrete ones (of any minimum) are encoded one-hot, and the loss of
            the inverse model is their cross-entropy; for continuous ones it is the mean squared error.
        observation_spec: nest of specs of the observation, for normalizing it, for constructors of networks and for
            observations that are their own features; ``None``: observations are not normalized.
        hidden_size: sizes of the hidden layers of the models that are not given, or of the only one.
        reward_adapt_speed: normalize rewards by statistics of this speed of adaption, see
            :class:`~alfx.utils.normalizers.AdaptiveNormalizer`; ``None``: do not.
        encoding_net: makes the features of an observation: a network without memory, or what constructs one, called as
            ``(input_tensor_spec=)``. Its output is flattened. ``None``: the features are the observation itself,
            flattened and concatenated.
        forward_net: predicts features ``[B, F]`` from ``[features, encoded action]``; a network or what constructs one,
            called as ``(input_tensor_spec=)``. ``None``: fully connected layers.
        inverse_net: predicts the encoded action ``[B, A]``, of discrete actions the logits, from ``[features of the
            step before, features]``; as ``forward_net``.
        activation: of the hidden layers of the models that are not given.
        optimizer: trains all of these; ``None``: the optimizer of the agent does.
        name: name of this algorithm.
        observation_adapt_speed: normalize observations by statistics of this speed of adaption; ``None``: do not.
        observation_clip_value: clip normalized observations to plus and minus this; ``None``: do not.
        reward_zero_mean: subtract the mean of the rewards where they are normalized.

    Raises:
        ConfError: an argument is out of range, or ``observation_spec`` is missing where it is needed.
        SpecError: a network has outputs of another shape.
    """

    def __init__(self, action_spec: NestedTensorSpec, observation_spec: NestedTensorSpec | None = None,
                 hidden_size: Count | Sequence[Count] = 256, reward_adapt_speed: Positive | None = 8.0,
                 encoding_net: NetworkOrConstructor | None = None, forward_net: NetworkOrConstructor | None = None,
                 inverse_net: NetworkOrConstructor | None = None, activation: Callable = torch.relu_,
                 optimizer: Any = None, name: str = 'ICMAlgorithm', observation_adapt_speed: Positive | None = 8.0,
                 observation_clip_value: Positive | None = 5.0, reward_zero_mean: bool = True):
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
        sizes = hidden_sizes(hidden_size, owner)
        self._encoding_net = encoder
        self._forward_net = _model(forward_net, [feature_spec, action], feature_spec, sizes, activation,
                                   (owner, 'forward_net'))
        self._inverse_net = _model(inverse_net, [feature_spec, feature_spec], action, sizes, activation,
                                   (owner, 'inverse_net'))

    def own_capabilities(self) -> Capabilities:
        """True unless something in a network draws numbers or keeps statistics."""
        is_fixed_update = all_fixed([self._encoding_net, self._forward_net, self._inverse_net])
        return super().own_capabilities()._replace(traceable_update=is_fixed_update, trains_sequences_at_once=True,
                                             needs_previous_step=True)

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """The reward of a step, without learning anything.

        Args:
            inputs: time step ``[B, ...]``.
            state: ``ICMState``.

        Returns:
            ``output``: the reward ``[B]``; ``state``: ``ICMState``; ``info``: ``ICMMeasures``.
        """
        with torch.no_grad():
            feature = self._encoded(self._prepared(inputs.observation))
            exists = _has_step_before(inputs, state)
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
        """The reward of a step, which the statistics take in.

        Args:
            inputs: time step ``[B, ...]``; ``prev_action`` led here.
            state: ``ICMState``.

        Returns:
            ``output``: the reward ``[B]``, 0 without a step before; ``state``: ``ICMState``; ``info``: ``ICMInfo`` if
            training is on-policy, else ``()``.
        """
        self._update_statistics(inputs.observation)
        feature = self._encoded(self._prepared(inputs.observation))
        exists = _has_step_before(inputs, state)
        action = self._action_encoder(inputs.prev_action)
        error = self._forward_loss(state.feature, action, feature)
        reward = self._normalized_reward(error, exists, update=True)
        info: Any = ()
        if self._yields_info:
            inverse_loss = self._inverse_loss(state.feature, feature, action)
            info = ICMInfo(error, inverse_loss, exists, is_last(inputs.step_type))
        return AlgStep(reward, _state_after(feature), info)

    def reward_unroll(self, inputs: TimeStep) -> AlgStep:
        """The rewards ``[T + 1, B]`` of an unroll; ``info``: ``ICMPair`` of each step and the next one.

        So the loss of arriving at a step is that of the step before it, and none is missing. See the base class.
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
        steps = nest.map_structure(lambda x: x.reshape(len(action), shape[1], *x.shape[1:]), seen)
        info = ICMPair(both=nest.map_structure(lambda x: torch.stack((x, next_row(x)), 2), steps),
                       action=next_row(action), exists=torch.cat((exists, torch.zeros_like(exists[:1]))))
        return AlgStep(torch.cat((torch.zeros_like(reward[:1]), reward)), (), info)

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any = ()) -> AlgStep:
        """The losses of both models.

        Args:
            inputs: time step ``[B, ...]``; ``prev_action`` led here.
            state: ``ICMState``.
            rollout_info: ``ICMPair`` of :meth:`reward_unroll`, which the losses are then those of, or ``()``.

        Returns:
            ``output``: ``()``, as the reward is that of the rollout; ``state``: ``ICMState``; ``info``: ``ICMInfo``.
        """
        if rollout_info:
            return AlgStep((), state, self._pair_info(rollout_info))
        feature = self._encoded(self._prepared(inputs.observation))
        info = self._info(state.feature, self._action_encoder(inputs.prev_action), feature,
                          _has_step_before(inputs, state), is_last(inputs.step_type))
        return AlgStep((), _state_after(feature), info)

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any = ()) -> AlgStep:
        """``train_step`` of all steps of sequences at once.

        Args:
            inputs: time steps ``[T, B, ...]``.
            state: ``ICMState`` ``[T, B, ...]``, of which the first step is looked at.
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
                              _has_step_before(flat, before), is_last(flat.step_type))
        return AlgStep((), (), nest.map_structure(lambda x: x.reshape(length, batch), info))

    def calc_loss(self, info: Any) -> LossInfo:
        """The sum of the losses of both models.

        Args:
            info: ``ICMInfo`` ``[T, B]``.

        Returns:
            ``loss`` ``[T, B]``; ``scalar_loss``: the part of LAST steps; ``extra``: ``ICMLossInfo``.
        """
        parts = ICMLossInfo(info.forward_loss.detach() * info.exists, info.inverse_loss.detach() * info.exists)
        return self._loss_of_arriving((info.forward_loss + info.inverse_loss) * info.exists, info.is_last, extra=parts)

    # Models ----------------------------------------------------------------------------------------------------

    def _prepared(self, observation: NestedTensor) -> NestedTensor:
        """What the encoding network sees of observations ``[B, ...]``, or the features ``[B, F]`` if there is none."""
        observation = self._normalized(observation)
        if self._encoding_net is not None:
            return observation
        leaves = [leaf.reshape(len(leaf), -1).float() for leaf in nest.flatten(observation)]
        return leaves[0] if len(leaves) == 1 else torch.cat(leaves, -1)

    def _encoded(self, seen: NestedTensor) -> Tensor:
        """The features ``[B, F]`` of what :meth:`_prepared` returns."""
        if self._encoding_net is None:
            return seen
        feature = self._encoding_net(seen)[0]
        return feature if feature.ndim == 2 else feature.flatten(1)

    def _forward_loss(self, before: Tensor, action: Tensor, feature: Tensor) -> Tensor:
        """``[B]``: half the squared error of the forward model, which does not train the features."""
        prediction = self._forward_net([before.detach(), action])[0]
        return 0.5 * F.mse_loss(prediction, feature.detach(), reduction='none').sum(-1)

    def _inverse_loss(self, before: Tensor, feature: Tensor, action: Tensor) -> Tensor:
        """``[B]``: how badly the inverse model tells the action."""
        return self._action_encoder.prediction_loss(self._inverse_net([before, feature])[0], action)

    def _pair_info(self, pair: Any) -> Any:
        """``ICMInfo`` ``[B]`` of the steps after those that it belongs to: no step that ends an episode is left out."""
        feature = self._encoded(nest.map_structure(rows, pair.both))
        before, after = feature.reshape(len(pair.action), 2, -1).unbind(1)
        return self._info(before, pair.action, after, pair.exists)

    def _info(self, before: Tensor, action: Tensor, feature: Tensor, exists: Tensor, ends: Any = ()) -> Any:
        return ICMInfo(self._forward_loss(before, action, feature), self._inverse_loss(before, feature, action), exists,
                       is_last=ends)


def _has_step_before(inputs: TimeStep, state: Any) -> Tensor:
    """bool ``[B]``: whether ``state`` is that of the step before in the same episode."""
    return (state.has_previous > 0) & ~is_first(inputs.step_type)


def _state_after(feature: Tensor) -> Any:
    return ICMState(feature, feature.new_ones(len(feature)))


def _encoder(encoding_net: Any, observation_spec: NestedTensorSpec | None,
             owner: str) -> tuple[Network | None, TensorSpec]:
    """The network that makes features, if there is one, and their spec."""
    where = (owner, 'encoding_net')
    if encoding_net is not None:
        network = make_network(encoding_net, observation_spec, where)
        return network, TensorSpec((output_tensor_spec(network, where).numel, ))
    if observation_spec is None:
        raise ConfError([problem_at(*where, 'is None, so that the observation is its own features, but there is no '
                                    'observation_spec', 'give one of the two')])
    return None, TensorSpec((sum(spec.numel for spec in nest.flatten(observation_spec)), ))


def _model(network: Any, inputs: list[TensorSpec], output: TensorSpec, hidden: tuple[int, ...], activation: Callable,
           where: tuple[str, str]) -> Network:
    """A model ``[B, ...]`` of ``inputs`` to ``output``.

    Raises:
        SpecError: a network that is given has another output.
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
