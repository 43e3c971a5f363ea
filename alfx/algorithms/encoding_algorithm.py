"""Representation computed by a network from the observation.

The network is trained through the users of its output and, if it computes losses itself (as an autoencoder does), by
these losses. :class:`~alfx.algorithms.predictive_representation_learner.PredictiveRepresentationLearner` trains it by
predicting the future.
"""
from collections.abc import Callable
from typing import Any

from torch import Tensor

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, time_step_spec
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import configurable
from alfx.nest.utils import get_nested_field
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec, SpecError, TensorSpec


def encode_sequence(network: Any, inputs: NestedTensor, state: NestedTensor,
                    step_type: Tensor) -> tuple[NestedTensor, NestedTensor]:
    """Call a recurrent network on sequences, resetting its state at the start of each episode.

    Args:
        network: a ``Network``.
        inputs: nest ``[T, B, ...]``.
        state: nest ``[B, ...]`` of ``network.state_spec``, the state before the first step.
        step_type: ``[T, B]``; at FIRST the state is set to zeros.

    Returns:
        The outputs and the states after each step: nests ``[T, B, ...]``.
    """
    is_first = step_type == StepType.FIRST
    outputs, states = [], []
    for t in range(step_type.shape[0]):
        state = nest.map_structure(lambda x, t=t: x.masked_fill(is_first[t].view(-1, *(1, ) * (x.ndim - 1)), 0), state)
        output, state = network(nest.map_structure(lambda x, t=t: x[t], inputs), state)
        outputs.append(output)
        states.append(state)
    return nest.stack(outputs), nest.stack(states)


class EncoderAlgorithm(Algorithm):
    """Base of representation learners whose state is the state of one network, called on :meth:`_encoder_inputs`.

    A subclass sets ``_output_spec``, and defines :meth:`_encoder_inputs` and :meth:`_train_step`, which computes the
    training step from the output.

    Args:
        encoder: the network.
        kwargs: arguments of ``Algorithm``.
    """

    _output_spec: NestedTensorSpec

    def __init__(self, encoder: Any, **kwargs: Any):
        super().__init__(train_state_spec=encoder.state_spec, **kwargs)
        self._encoder = encoder

    @property
    def output_spec(self) -> NestedTensorSpec:
        """Nest of specs of the representation."""
        return self._output_spec

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities: sequences are trained on at once; a recurrent network is called once per step.

        Updates are traceable unless a layer draws random numbers or keeps statistics. A recurrent network needs the
        previous step, because a single step after a zero state trains no recurrence.
        """
        return super().own_capabilities()._replace(traceable_update=is_traceable(self), trains_sequences_at_once=True,
                                                   needs_previous_step=self._encoder.is_rnn)

    def train_sequence(self, inputs: TimeStep, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """Compute ``train_step`` for sequences: a recurrent network is called once per step, everything else once in
        total.

        Args:
            inputs: ``[T, B, ...]``.
            state: nest ``[T, B, ...]``, of which only the first step is used.
            rollout_info: nest ``[T, B, ...]``.
        """
        independent = self._config is not None and self._config.temporally_independent_train_step
        if not self._encoder.is_rnn or independent:
            return super().train_sequence(inputs, state, rollout_info)
        encoded, states = encode_sequence(self._encoder, self._encoder_inputs(inputs),
                                          nest.map_structure(lambda x: x[0], state), inputs.step_type)
        time, batch = inputs.step_type.shape
        encoded, states, rollout_info = nest.map_structure(lambda x: x.flatten(0, 1), (encoded, states, rollout_info))
        step = self._train_step(encoded, states, rollout_info)
        output, info = nest.map_structure(lambda x: x.unflatten(0, (time, batch)), (step.output, step.info))
        return AlgStep(output, (), info)

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: NestedTensor = ()) -> AlgStep:
        """Compute one step of training; ``output`` is the representation ``[B, ...]``."""
        encoded, state = self._encoder(self._encoder_inputs(inputs), state)
        return self._train_step(encoded, state, rollout_info)

    def _encoder_inputs(self, time_step: TimeStep) -> NestedTensor:
        """Return the network input for a time step ``[B, ...]`` or ``[T, B, ...]``."""
        return time_step.observation

    def _train_step(self, encoded: NestedTensor, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """Compute the training step from the output ``[B, ...]`` of the network and its state after it."""
        raise NotImplementedError(f'{type(self).__name__}._train_step')


@configurable
class EncodingAlgorithm(EncoderAlgorithm):
    """Network whose output is the representation; parts of the output may be losses.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of the action; only used with ``time_step_as_input``.
        reward_spec: spec of rank 0 or 1; only used with ``time_step_as_input``.
        encoder_cls: creates the ``Network``; called with the spec of its input.
        time_step_as_input: pass the whole ``TimeStep`` (without ``env_info``, ``untransformed`` and ``action_mask``) to
            the network instead of the observation.
        output_fields: path of the representation in the output of the network, or a nest of paths; ``None``: the whole
            output.
        loss_fields: path of the losses in the output of the network, or a nest of paths; each loss is one number per
            sample. ``None``: no losses.
        loss_weights: a number for each of ``loss_fields``, in the same structure; ``None``: all 1.
        optimizer: optimizes the network; ``None``: the optimizer of the agent.
        config: the configuration of the run.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        LookupError: the output of the network has no such field.
        SpecError: a loss is not one number per sample.
        ValueError: ``loss_weights`` do not match ``loss_fields``.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), encoder_cls: Callable[..., Any] = EncodingNetwork,
                 time_step_as_input: bool = False, output_fields: Nested = None, loss_fields: Nested = None,
                 loss_weights: Nested = None, optimizer: Any = None, config: TrainerConfig | None = None,
                 checkpoint: str | None = None, debug_summaries: bool = False, name: str = 'EncodingAlgorithm'):
        input_spec = observation_spec
        if time_step_as_input:
            input_spec = time_step_spec(observation_spec, action_spec, reward_spec)
        encoder = encoder_cls(input_spec)
        super().__init__(encoder, optimizer=optimizer, config=config, checkpoint=checkpoint,
                         debug_summaries=debug_summaries, name=name)
        self._time_step_as_input = time_step_as_input
        self._output_fields = output_fields
        self._loss_fields = loss_fields
        self._loss_weights = _checked_weights(name, encoder.output_spec, loss_fields, loss_weights)
        self._output_spec = self._output(encoder.output_spec)

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]``; ``info`` is the nest of losses ``[B]``, if there are any."""
        encoded, state = self._encoder(self._encoder_inputs(inputs), state)
        return AlgStep(self._output(encoded), state, self._losses(encoded))

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]``; ``info`` is the ``LossInfo`` if training is on-policy, otherwise
        ``()``."""
        encoded, state = self._encoder(self._encoder_inputs(inputs), state)
        return AlgStep(self._output(encoded), state, () if self.on_policy is False else self._loss_info(encoded))

    def _train_step(self, encoded: NestedTensor, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        return AlgStep(self._output(encoded), state, self._loss_info(encoded))

    def _encoder_inputs(self, time_step: TimeStep) -> NestedTensor:
        if not self._time_step_as_input:
            return time_step.observation
        return time_step._replace(env_info=(), untransformed=(), action_mask=())

    def _output(self, encoded: Nested) -> Nested:
        return encoded if self._output_fields is None else get_nested_field(encoded, self._output_fields)

    def _losses(self, encoded: NestedTensor) -> NestedTensor:
        return () if self._loss_fields is None else get_nested_field(encoded, self._loss_fields)

    def _loss_info(self, encoded: NestedTensor) -> LossInfo:
        """Compute the weighted sum of the losses ``[B]``, with the individual losses as ``extra``."""
        losses = self._losses(encoded)
        leaves = nest.flatten(losses)
        if not leaves:
            return LossInfo()
        weighted = [loss * weight for loss, weight in zip(leaves, self._loss_weights)]
        return LossInfo(loss=sum(weighted[1:], start=weighted[0]), extra=losses)


def _checked_weights(name: str, output_spec: NestedTensorSpec, loss_fields: Nested,
                     loss_weights: Nested) -> list[float]:
    """Return a weight for each loss."""
    if loss_fields is None:
        if loss_weights is not None:
            raise ValueError(f'{name}: loss_weights = {loss_weights} have no effect without loss_fields')
        return []
    for field in nest.flatten(loss_fields):
        spec = nest.get_field(output_spec, field)
        if not isinstance(spec, TensorSpec) or spec.ndim or not spec.dtype.is_floating_point:
            raise SpecError(f"{name}: the loss field '{field}' of the encoder has to be one floating point number per "
                            f'sample, found {spec}')
    if loss_weights is None:
        return [1.0] * len(nest.flatten(loss_fields))
    nest.assert_same_structure(loss_fields, loss_weights)
    return [float(weight) for weight in nest.flatten(loss_weights)]
