"""Representation learned by predicting future steps.

An encoder maps the observation to a latent vector (a recurrent encoder also uses earlier observations). A dynamics
network computes the latent vectors of the next steps from it and the actions taken. Decoders predict fields of each of
these steps from the latent vectors: the observation, the reward, or any other field of the experience. Other latent
models that are trained on the results of action sequences, without decoding intermediate steps from one another, are
the Predictron (Silver et al. 2017, arXiv:1612.08810), Guo et al. 2018 (arXiv:1811.06407), who predict from the belief
of a recurrent network, and MuZero (Schrittwieser et al. 2020, arXiv:1911.08265, appendix G).

Differences from these papers: the decoders define the targets, predictions of all distances have the same weight, and
the loss of the algorithm that uses the representation also trains it.

The targets come from the replay buffer (:mod:`alfx.algorithms.base.future_steps`), so that only off-policy algorithms
can use this learner. PPO is one of them: it trains from a replay buffer that holds its latest unroll.
"""
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.future_steps import FutureSteps
from alfx.algorithms.decoding_algorithm import loss_of_samples
from alfx.algorithms.encoding_algorithm import EncoderAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, StepLimit, configurable, problem_at
from alfx.layers import FC
from alfx.networks.network import Network, example_batch
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec, extract_spec
from alfx.utils.normalizers import AdaptiveNormalizer
from alfx.utils.tensor_utils import explained_variance

PredictiveRepresentationLearnerInfo = namedtuple('PredictiveRepresentationLearnerInfo', ['action', 'mask', 'target'],
                                                 default_value=())
"""Actions, mask and targets of the steps after each step t, up to the distance R, ``[B, T, ...]``, from the buffer.

``action``: nest ``[B, T, R, ...]``, the actions taken at t, ..., t + R - 1; ``()`` if R is 0.
``mask``: bool ``[B, T, R + 1]``, marks those of the steps t, ..., t + R that are stored and in the same episode.
``target``: nest ``[B, T, R + 1, ...]``, the target of the decoder; with several decoders a list of such nests."""

PredictionInfo = namedtuple('PredictionInfo', ['future', 'latent', 'state'], default_value=())
"""Inputs of the loss: ``future``, a ``PredictiveRepresentationLearnerInfo``; ``latent``, the output of the encoder;
``state``, the state of the encoder after the step, if it is the initial state of the dynamics network."""


@configurable
class SimpleDecoder(Algorithm):
    """Decoder that predicts a target from a representation, with an elementwise loss.

    Args:
        input_tensor_spec: spec of the representation.
        target_field: field of the experience to predict, such as 'reward' or 'observation'; see
            :func:`~alfx.algorithms.base.future_steps.experience_field`.
        decoder_net_ctor: called as ``(input_tensor_spec=)``; creates the ``Network`` that predicts the target. Its
            output has the shape of the target, or one more dimension of size 1. For an integer target it may have any
            shape that the loss supports, such as the logits of classes.
        loss_ctor: called without arguments; creates the loss, which is called as ``loss(predicted, target)`` on
            ``[N, ...]`` each and returns ``[N]`` or ``[N, ...]``. A function of two arguments is used as the loss
            itself.
        loss_weight: factor of the loss.
        summarize_each_dimension: with ``debug_summaries``, also log each dimension of the target.
        optimizer: optimizes the parameters of the decoder; ``None``: the optimizer of the agent.
        normalize_target: compute the loss of target and prediction normalized by running statistics of the target, with
            1e-4 added to the variance. The prediction itself is not normalized.
        append_target_field_to_name: set the name of this algorithm to ``name.target_field``.
        debug_summaries: log explained variance, predictions, targets and losses.
        name: name of this algorithm.

    Raises:
        SpecError: the network is recurrent, or has more than one output.
    """

    def __init__(self, input_tensor_spec: TensorSpec, target_field: str, decoder_net_ctor: Callable[..., Any],
                 loss_ctor: Callable[..., Any] = functools.partial(nn.SmoothL1Loss, reduction='none'),
                 loss_weight: float = 1.0, summarize_each_dimension: bool = False, optimizer: Any = None,
                 normalize_target: bool = False, append_target_field_to_name: bool = True,
                 debug_summaries: bool = False, name: str = 'SimpleDecoder'):
        if append_target_field_to_name:
            name = f'{name}.{target_field}'
        super().__init__(optimizer=optimizer, debug_summaries=debug_summaries, name=name)
        self._target_field = target_field
        self._decoder_net = decoder_net_ctor(input_tensor_spec=input_tensor_spec)
        if self._decoder_net.is_rnn:
            raise SpecError(f'{name}.decoder_net_ctor: expected a network that is not recurrent, found one with the '
                            f'state {self._decoder_net.state_spec}; use a recurrent encoder instead')
        spec = self._decoder_net.output_spec
        if not isinstance(spec, TensorSpec):
            raise SpecError(f'{name}.decoder_net_ctor: expected a network with one output, found {spec}; use one '
                            'decoder per output')
        self._loss = loss_ctor if _takes_arguments(loss_ctor) else loss_ctor()
        self._loss_weight = loss_weight
        self._summarize_each_dimension = summarize_each_dimension
        self._normalizer: AdaptiveNormalizer | None = None
        if normalize_target:
            self._normalizer = AdaptiveNormalizer(spec, auto_update=False, variance_epsilon=1e-4,
                                                  debug_summaries=debug_summaries, name=f'{name}.target_normalizer')

    def get_target_fields(self) -> str:
        """Return the field of the experience that is predicted."""
        return self._target_field

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the prediction."""
        return self._decoder_net.output_spec

    def predict_step(self, repr: Tensor, state: NestedTensor = ()) -> AlgStep:
        """Return the prediction ``[B, ...]`` for representations ``[B, ...]``."""
        return AlgStep(self._decoder_net(repr)[0], state)

    def train_step(self, repr: Tensor, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Return the prediction ``[B, ...]``, also as ``info``."""
        predicted, _ = self._decoder_net(repr)
        return AlgStep(predicted, state, predicted)

    def observe_targets(self, target: Tensor) -> None:
        """Update the statistics of ``normalize_target`` with targets ``[B, ...]``; call once for each batch."""
        if self._normalizer is not None:
            self._normalizer.update(self._like_output(target))

    def calc_loss(self, target: Tensor, predicted: Tensor,  # type: ignore[override]
                  mask: Tensor | None = None) -> LossInfo:
        """Compute the loss: the mean over the dimensions of the target.

        Args:
            target: ``[T, B, ...]``.
            predicted: ``[T, B, ...]``.
            mask: bool ``[T, B]``, marks the steps that have a target; the loss is 0 elsewhere. ``None``: all steps.

        Returns:
            ``loss`` ``[T, B]``, and the same without ``loss_weight`` as ``extra``.

        Raises:
            ValueError: the shapes of target and prediction disagree, or the loss is not computed for each sample.
        """
        outer = target.shape[:2]
        predicted = predicted.flatten(0, 1)
        compared = self._like_output(target.flatten(0, 1))
        inputs = predicted, compared
        if self._normalizer is not None:
            inputs = self._normalizer.transform(predicted), self._normalizer.transform(compared)
        loss = loss_of_samples(self._name, self._loss, *inputs)
        if self._debug_summaries and summary.should_record_summaries():
            self._summarize(predicted, compared, loss, None if mask is None else mask.flatten())
        loss = loss.flatten(1).mean(1) if loss.ndim > 1 else loss
        loss = loss.view(outer)
        if mask is not None:
            loss = torch.where(mask, loss, 0.0)
        return LossInfo(loss=loss * self._loss_weight, extra=loss)

    def _like_output(self, target: Tensor) -> Tensor:
        """Return ``target`` ``[B, ...]`` in the shape and dtype of the predictions; integers may stay unchanged."""
        spec = self._decoder_net.output_spec
        shape = tuple(target.shape[1:])
        if tuple(spec.shape) == (*shape, 1):
            target = target.unsqueeze(-1)
        elif tuple(spec.shape) != shape:
            if target.is_floating_point() or self._normalizer is not None:
                raise ValueError(f"{self._name}: expected the target '{self._target_field}' to have the shape "
                                 f'{tuple(spec.shape)} of the predictions of decoder_net_ctor, found {shape}; change '
                                 'the size of the last layer')
            return target
        return target.to(spec.dtype)

    def _summarize(self, predicted: Tensor, target: Tensor, loss: Tensor, mask: Tensor | None) -> None:
        """Log the quality of predictions ``[N, ...]`` where ``mask`` ``[N]`` is true."""
        if predicted.shape != target.shape:
            summary_utils.safe_mean_summary(f'{self._name}/loss', loss, mask)
            return
        kept = [x if mask is None else x[mask] for x in (predicted.detach(), target, loss.detach())]
        parts = {'': kept}
        if self._summarize_each_dimension and predicted.ndim > 1:
            flat = [x.flatten(1) for x in kept if x.shape == kept[0].shape]
            parts.update((f'/{i}', [x[:, i] for x in flat]) for i in range(flat[0].shape[1]))
        with summary.scope(self._name):
            for suffix, tensors in parts.items():
                summary.scalar(f'explained_variance{suffix}', explained_variance(tensors[0], tensors[1]))
                for name, x in zip(('predict', 'target', 'loss'), tensors):
                    summary_utils.add_mean_hist_summary(name + suffix, x)


def _takes_arguments(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` has required arguments."""
    empty = inspect.Parameter.empty
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.default is empty and parameter.kind not in variable
               for parameter in inspect.signature(function).parameters.values())


@configurable
class PredictiveRepresentationLearner(EncoderAlgorithm):
    """Representation learner that predicts future steps.

    With the latent vector ``z[t, 0]`` that the encoder returns at the step t, and the following actions a,

        z[t, i] = dynamics(a[t + i - 1]),  i = 1 ... R, with an initial state computed at t
        loss[t] = sum over decoders d of 1 / (R + 1) * sum over i of mask[t, i] * loss_d(target_d[t + i], d(z[t, i]))

    where ``mask`` is 0 for steps after the end of the episode and after the newest step. Gradients of this loss, and of
    the loss of the algorithm that uses the representation, reach the encoder, through time if it is recurrent.

    Targets are values of the environment, before any data transformer.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of the action.
        num_unroll_steps: R, number of predicted steps; 0: decode only the step itself, without ``dynamics_net_ctor``.
        decoder_ctor: creates a decoder, called with the spec of the latent vector; or a list of constructors. A decoder
            is an ``Algorithm`` without state such as :class:`SimpleDecoder`, with ``get_target_fields()``, which
            returns the nest of target fields of the experience, ``train_step(latent)``, whose ``info`` is the
            prediction, and ``calc_loss(target, predicted, mask)`` (``[T, B, ...]``). If it has
            ``observe_targets(target)``, this is called with the targets ``[B, ...]`` of each batch.
        encoding_net_ctor: creates the encoder, called with ``observation_spec``.
        dynamics_net_ctor: creates the dynamics network, called with ``action_spec``. It is recurrent, and its output
            has the spec of the encoder's output. If its state has the spec of the encoder's state, it starts with the
            encoder's state; otherwise its initial state is a learned linear function of the latent vector.
        reward_spec: unused part of the interface of a representation learner.
        config: configuration of the run.
        postprocessor: maps the latent vector to the representation: a function, a module or a ``Network``, or a class
            of one of them, constructed as ``(input_tensor_spec=)``; ``None``: the latent vector is the representation.
            Predictions use the latent vector.
        encoding_optimizer: optimizes the parameters of the encoder; ``None``: the optimizer of the agent.
        dynamics_optimizer: optimizes the parameters of the dynamics network; ``None``: the optimizer of the agent.
        postprocessor_optimizer: optimizes the parameters of the postprocessor; ``None``: the optimizer of the agent.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        SpecError: the dynamics network is not recurrent, or its output does not match the encoder's output.
        ValueError: two decoders have the same target, or an optimizer has no parameters.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, num_unroll_steps: StepLimit,
                 decoder_ctor: Callable[..., Any] | Sequence[Callable[..., Any]],
                 encoding_net_ctor: Callable[..., Any], dynamics_net_ctor: Callable[..., Any],
                 reward_spec: TensorSpec = TensorSpec(()), config: TrainerConfig | None = None,
                 postprocessor: Callable[..., Any] | None = None, encoding_optimizer: Any = None,
                 dynamics_optimizer: Any = None, postprocessor_optimizer: Any = None, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'PredictiveRepresentationLearner'):
        encoding_net = encoding_net_ctor(observation_spec)
        super().__init__(encoding_net, config=config, checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        latent_spec = encoding_net.output_spec
        ctors: Any = decoder_ctor if isinstance(decoder_ctor, (list, tuple)) else [decoder_ctor]
        decoders = [ctor(latent_spec) for ctor in ctors]
        self._decoders: Any = nn.ModuleList(decoders)
        self._target_fields = [decoder.get_target_fields() for decoder in decoders]
        for i, fields in enumerate(self._target_fields):
            if fields in self._target_fields[:i]:
                raise ValueError(f'{name}.decoder_ctor: two decoders predict {fields!r}; leave out one of them')
        self._num_unroll_steps = num_unroll_steps
        self._dynamics_net: Any = None
        self._initial_state: Any = None
        if num_unroll_steps:
            self._dynamics_net = dynamics_net_ctor(action_spec)
            _check_dynamics(name, self._dynamics_net, latent_spec)
            if _specs(self._dynamics_net.state_spec) != _specs(encoding_net.state_spec):
                self._initial_state = _InitialState(latent_spec, self._dynamics_net.state_spec)
        self._postprocessor, self._output_spec = _as_postprocessor(postprocessor, latent_spec)
        owned = {'encoding_optimizer': (encoding_optimizer, [encoding_net]),
                 'dynamics_optimizer': (dynamics_optimizer, [self._dynamics_net, self._initial_state]),
                 'postprocessor_optimizer': (postprocessor_optimizer, [self._postprocessor])}
        for argument, (optimizer, parts) in owned.items():
            if optimizer is not None:
                self._add_optimizer_of(argument, optimizer, parts)

    def _add_optimizer_of(self, argument: str, optimizer: Any, parts: list[Any]) -> None:
        modules = [part for part in parts if isinstance(part, nn.Module) and any(True for _ in part.parameters())]
        if not modules:
            raise ValueError(f'{self._name}.{argument}: there are no parameters for it; leave it out')
        self.add_optimizer(optimizer, modules)

    @property
    def on_policy(self) -> bool | None:
        """Return ``False``, because the targets are looked up in the replay buffer."""
        return False

    def get_decoder(self, target_field: Any) -> Any:
        """Return the decoder that predicts ``target_field``, a nest of names as in its ``get_target_fields()``.

        Raises:
            ValueError: there is no such decoder.
        """
        if target_field in self._target_fields:
            return self._decoders[self._target_fields.index(target_field)]
        raise ValueError(f'{self._name}: no decoder predicts {target_field!r}; the decoders predict '
                         f'{self._target_fields}')

    def check_plannable(self, name: str) -> None:
        """Raise an error unless :meth:`predict_multi_step` predicts rewards from :attr:`output_spec` alone.

        Args:
            name: name of the algorithm that plans with this learner.

        Raises:
            ConfError: there is no decoder of rewards, a postprocessor hides the latent vector, or the dynamics start
                with the state of the encoder.
        """
        owner = type(self).__name__
        if 'reward' not in self._target_fields:
            raise ConfError([problem_at(owner, 'decoder_ctor', f"creates no decoder of 'reward', with which {name} "
                                        f'plans; the decoders predict {self._target_fields}',
                                        "add a SimpleDecoder with target_field = 'reward'")])
        if self._postprocessor is not None:
            raise ConfError([problem_at(owner, 'postprocessor', f'is set: {name} plans from the latent vector, which '
                                        'it hides', 'leave it out')])
        if self._dynamics_net is None:
            raise ConfError([problem_at(owner, 'num_unroll_steps', f'= 0: {name} plans with predictions of later '
                                        'steps', 'set it to 1 or more')])
        if self._initial_state is None:
            raise ConfError([problem_at(owner, 'dynamics_net_ctor', 'creates a network that starts with the state of '
                                        f'the encoder, which {name} does not receive',
                                        'give its state another size, or choose an encoder that is not recurrent')])

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]`` without predictions."""
        latent, state = self._encoder(inputs.observation, state)
        return AlgStep(self._representation(latent), state)

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]``; ``info`` is empty until :meth:`preprocess_experience`."""
        return self.predict_step(inputs, state)._replace(info=PredictiveRepresentationLearnerInfo())

    def train_step(self, root_inputs: TimeStep, state: NestedTensor, rollout_info: Any = ()) -> AlgStep:
        """Return the representation ``[B, ...]``; :meth:`calc_loss` computes the predictions of all steps at once."""
        return super().train_step(root_inputs, state, rollout_info)

    def _train_step(self, encoded: NestedTensor, state: NestedTensor, rollout_info: Any) -> AlgStep:
        starts_with_state = self._dynamics_net is not None and self._initial_state is None
        info = PredictionInfo(future=rollout_info, latent=encoded, state=state if starts_with_state else ())
        return AlgStep(self._representation(encoded), state, info)

    def _representation(self, latent: NestedTensor) -> NestedTensor:
        if isinstance(self._postprocessor, Network):
            return self._postprocessor(latent)[0]
        return latent if self._postprocessor is None else self._postprocessor(latent)

    # Prediction ------------------------------------------------------------------------------------------------

    def predict_multi_step(self, init_latent: NestedTensor, actions: NestedTensor, target_field: Any = None,
                           state: NestedTensor = None) -> Any:
        """Predict the results of sequences of actions.

        Args:
            init_latent: ``[B, ...]``, the output of the encoder at the first step.
            actions: nest ``[B, steps, ...]``, with any number of steps.
            target_field: the target of a decoder, as for :meth:`get_decoder`, or a list of them; ``None``: all.
            state: state of the encoder after the first step, nest ``[B, ...]``; required if it is the initial state of
                the dynamics network, and otherwise ignored.

        Returns:
            Predictions ``[B, steps + 1, ...]`` for the first step and the steps after each action; a list for several
            targets.

        Raises:
            ValueError: there is no such decoder, ``state`` is required but missing, or there is no dynamics network
                (``num_unroll_steps`` is 0) and ``actions`` has more than 0 steps.
        """
        if target_field is None:
            decoders, single = list(self._decoders), len(self._decoders) == 1
        else:
            single = not isinstance(target_field, list)
            decoders = [self.get_decoder(field) for field in ([target_field] if single else target_field)]
        latents = self._latents(init_latent, actions, state)
        predictions = []
        for decoder in decoders:
            predicted = self._decode(decoder, latents).output
            predictions.append(nest.map_structure(lambda x: x.transpose(0, 1), predicted))
        return predictions[0] if single else predictions

    def _latents(self, latent: NestedTensor, actions: NestedTensor, state: NestedTensor) -> NestedTensor:
        """Return the latent vectors after 0, 1, ... of the actions: nest ``[steps + 1, B, ...]``."""
        latents = [latent]
        leaves = nest.flatten(actions)
        num_steps = leaves[0].shape[1] if leaves else 0
        if not num_steps:
            return nest.stack(latents)
        if self._dynamics_net is None:
            raise ValueError(f'{self._name}: {num_steps} steps cannot be predicted with num_unroll_steps = 0; set it '
                             'to 1 or more')
        if self._initial_state is not None:
            state = self._initial_state(latent)
        elif state is None or not nest.flatten(state):
            raise ValueError(f'{self._name}.predict_multi_step needs the state of the encoder, the initial state of '
                             'its dynamics network')
        for i in range(num_steps):
            latent, state = self._dynamics_net(nest.map_structure(lambda x, i=i: x[:, i], actions), state)
            latents.append(latent)
        return nest.stack(latents)

    @staticmethod
    def _decode(decoder: Any, latents: NestedTensor) -> AlgStep:
        """Run ``train_step`` of a decoder on latent vectors ``[R + 1, B, ...]``, and restore the outer shape."""
        outer = nest.get_nest_shape(latents)[:2]
        step = decoder.train_step(nest.map_structure(lambda x: x.flatten(0, 1), latents))
        return nest.map_structure(lambda x: x.unflatten(0, outer), AlgStep(step.output, (), step.info))

    # Training --------------------------------------------------------------------------------------------------

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Look up the actions and targets of the steps after each step ``[B, T]`` of a batch.

        Returns:
            ``root_inputs`` unchanged, and a ``PredictiveRepresentationLearnerInfo``.

        Raises:
            LookupError: the experience does not have a field that a decoder predicts.
        """
        steps = FutureSteps(batch_info, root_inputs.step_type.shape[1], self._num_unroll_steps)
        targets = [nest.map_structure(steps.field, fields) for fields in self._target_fields]
        for decoder, target in zip(self._decoders, targets):
            if hasattr(decoder, 'observe_targets'):
                decoder.observe_targets(nest.map_structure(lambda x: x[:, :, 0].flatten(0, 1), target))
        action: NestedTensor = ()
        if self._num_unroll_steps:
            action = nest.map_structure(lambda x: x[:, :, 1:], steps.field('prev_action'))
        return root_inputs, PredictiveRepresentationLearnerInfo(
            action=action, mask=steps.mask(), target=targets[0] if len(targets) == 1 else targets)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the loss of the predictions.

        Args:
            info: ``PredictionInfo`` of ``[T, B, ...]``.

        Returns:
            ``loss`` ``[T, B]``: sum over decoders of the mean over the R + 1 steps; ``extra``: mean of the ``extra`` of
            each decoder, by name.
        """
        time_and_batch = info.future.mask.shape[:2]
        flat = nest.map_structure(lambda x: x.flatten(0, 1), info)
        latents = self._latents(flat.latent, flat.future.action, flat.state)
        mask = flat.future.mask.transpose(0, 1)
        targets = flat.future.target if len(self._decoders) > 1 else [flat.future.target]
        total: Any = 0.0
        extra = {}
        for decoder, target in zip(self._decoders, targets):
            predicted = self._decode(decoder, latents).info
            target = nest.map_structure(lambda x: x.transpose(0, 1), target)
            loss_info = decoder.calc_loss(target, predicted, mask)
            total = total + loss_info.loss.mean(0)
            extra[decoder.name] = nest.map_structure(
                lambda x: x.mean(0).view(time_and_batch) if x.shape == mask.shape else x, loss_info.extra)
        return LossInfo(loss=total.view(time_and_batch), extra=extra)


class _InitialState(nn.Module):
    """Linear function of the latent vector for each part of a state.

    Args:
        latent_spec: nest of specs of the latent vector.
        state_spec: nest of specs of the state.
    """

    def __init__(self, latent_spec: NestedTensorSpec, state_spec: NestedTensorSpec):
        super().__init__()
        size = sum(spec.numel for spec in nest.flatten(latent_spec))
        self._state_spec = state_spec
        self._layers = nn.ModuleList([FC(size, spec.numel) for spec in nest.flatten(state_spec)])

    def forward(self, latent: NestedTensor) -> NestedTensor:
        """Map a nest ``[B, ...]`` to a nest ``[B, ...]`` of ``state_spec``."""
        inputs = torch.cat([x.flatten(1) for x in nest.flatten(latent)], -1)
        specs = nest.flatten(self._state_spec)
        return nest.pack_sequence_as(self._state_spec, [
            layer(inputs).view(-1, *spec.shape) for layer, spec in zip(self._layers, specs)])


def _specs(spec: NestedTensorSpec) -> Any:
    """Return structure, shapes and dtypes of a spec; specs with equal ones have interchangeable tensors."""
    return nest.structure(spec), [(tuple(leaf.shape), leaf.dtype) for leaf in nest.flatten(spec)]


def _check_dynamics(name: str, dynamics_net: Network, latent_spec: NestedTensorSpec) -> None:
    """Raise an error unless the network is recurrent and has an output of ``latent_spec``."""
    if not dynamics_net.is_rnn:
        raise SpecError(f'{name}.dynamics_net_ctor: expected a recurrent network, such as LSTMEncodingNetwork, found '
                        f'{type(dynamics_net).__name__}')
    if _specs(dynamics_net.output_spec) != _specs(latent_spec):
        raise SpecError(f'{name}.dynamics_net_ctor: expected the output spec of the encoder, {latent_spec}, found '
                        f'{dynamics_net.output_spec}; give their last layers the same size')


def _as_postprocessor(postprocessor: Any, latent_spec: NestedTensorSpec) -> tuple[Any, NestedTensorSpec]:
    """Return the postprocessor, constructed if necessary, and the spec of its output."""
    factory = postprocessor.func if isinstance(postprocessor, functools.partial) else postprocessor
    if isinstance(factory, type):
        postprocessor = postprocessor(input_tensor_spec=latent_spec)
    if postprocessor is None:
        return None, latent_spec
    if isinstance(postprocessor, Network):
        return postprocessor, postprocessor.output_spec
    example = example_batch(latent_spec, (2, ), context.get_default_device())
    with torch.no_grad():
        return postprocessor, extract_spec(postprocessor(example))
