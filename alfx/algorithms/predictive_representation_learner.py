"""A representation that is learned by predicting the future from it.

An encoder makes a latent vector of the observation (and, with memory, of those before it); a dynamics network makes
the latent vectors of the next steps out of it and the actions that were taken; decoders predict from each of these what
is known of that step: the observation, the reward, or any other field of the experience. Latent models trained by what
follows a sequence of actions, without decoding intermediate steps from one another, are those of the Predictron (Silver
et al. 2017, arXiv:1612.08810), of Guo et al. 2018 (arXiv:1811.06407), who predict from the belief of a recurrent
network, and of MuZero (Schrittwieser et al. 2020, arXiv:1911.08265, appendix G).

Differs from these papers in that the decoders choose what is predicted, that predictions of all distances count the
same, and that the representation is trained by the loss of whatever uses it as well.

The targets come from the replay buffer (:mod:`alfx.algorithms.base.future_steps`), so that this can be combined with
off-policy algorithms alone. PPO is one of them: it trains from the replay buffer of its last unroll.
"""
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.config import TrainerConfig
from alfx.algorithms.decoding_algorithm import loss_of_samples
from alfx.algorithms.encoding_algorithm import EncoderAlgorithm
from alfx.algorithms.base.future_steps import FutureSteps
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, configurable
from alfx.gin_utils.value_checks import StepLimit, problem_at
from alfx.layers import FC
from alfx.networks.network import Network, example_batch
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec, extract_spec
from alfx.engine.capabilities import Capabilities
from alfx.utils.normalizers import AdaptiveNormalizer
from alfx.utils.tensor_utils import explained_variance

PredictiveRepresentationLearnerInfo = namedtuple('PredictiveRepresentationLearnerInfo', ['action', 'mask', 'target'],
                                                 default_value=())
"""What is known of the steps after each step t, up to the distance R, ``[B, T, ...]`` from the replay buffer.

``action``: nest ``[B, T, R, ...]``, the actions taken at t, ..., t + R - 1; ``()`` if R is 0.
``mask``: bool ``[B, T, R + 1]``, which of the steps t, ..., t + R are of the same episode and stored.
``target``: nest ``[B, T, R + 1, ...]``, what the decoder is to predict; with several decoders a list of such nests."""

PredictionInfo = namedtuple('PredictionInfo', ['future', 'latent', 'state'], default_value=())
"""What the loss needs: ``future``, a ``PredictiveRepresentationLearnerInfo``; ``latent``, the output of the encoder;
``state``, its state after the step, if the dynamics network begins with it."""


@configurable
class SimpleDecoder(Algorithm):
    """A network that predicts a target from a representation, with an elementwise loss.

    Args:
        input_tensor_spec: spec of the representation.
        target_field: the field of the experience that is to be predicted, such as 'reward' or 'observation'; see
            :func:`~alfx.algorithms.base.future_steps.experience_field`.
        decoder_net_ctor: called as ``(input_tensor_spec=)``; makes the ``Network`` that predicts the target. Its output
            has the shape of the target, or one more dimension of size 1. For a target of integers it may have
            whatever shape the loss is made for, such as the scores of classes.
        loss_ctor: called without arguments; makes the loss, which is called as ``loss(predicted, target)`` on
            ``[N, ...]`` each and returns ``[N]`` or ``[N, ...]``. A function of two arguments is taken for the loss
            itself.
        loss_weight: factor of the loss.
        summarize_each_dimension: with ``debug_summaries``, write those of each dimension of the target as well.
        optimizer: owns the parameters of the decoder; ``None``: the optimizer of the agent does.
        normalize_target: whether the loss is that of target and prediction normalized by running statistics of the
            target, with 1e-4 added to the variance. The prediction itself is of the target as it is.
        append_target_field_to_name: whether the name of this algorithm is ``name.target_field``.
        debug_summaries: write explained variance, predictions, targets and losses.
        name: name of this algorithm.

    Raises:
        SpecError: the network has memory, or more than one output.
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
            raise SpecError(f'{name}.decoder_net_ctor: expected a network without memory, found one with the state '
                            f'{self._decoder_net.state_spec}; what is to be remembered belongs into the encoder')
        spec = self._decoder_net.output_spec
        if not isinstance(spec, TensorSpec):
            raise SpecError(f'{name}.decoder_net_ctor: expected a network with one output, found {spec}; use a decoder '
                            'for each of them')
        self._loss = loss_ctor if _takes_arguments(loss_ctor) else loss_ctor()
        self._loss_weight = loss_weight
        self._summarize_each_dimension = summarize_each_dimension
        self._normalizer: AdaptiveNormalizer | None = None
        if normalize_target:
            self._normalizer = AdaptiveNormalizer(spec, auto_update=False, variance_epsilon=1e-4,
                                                  debug_summaries=debug_summaries, name=f'{name}.target_normalizer')

    def get_target_fields(self) -> str:
        """The field of the experience that is predicted."""
        return self._target_field

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the prediction."""
        return self._decoder_net.output_spec

    def predict_step(self, repr: Tensor, state: NestedTensor = ()) -> AlgStep:
        """The prediction ``[B, ...]`` for representations ``[B, ...]``."""
        return AlgStep(self._decoder_net(repr)[0], state)

    def train_step(self, repr: Tensor, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """The prediction ``[B, ...]``, which is also the ``info``."""
        predicted, _ = self._decoder_net(repr)
        return AlgStep(predicted, state, predicted)

    def observe_targets(self, target: Tensor) -> None:
        """Take targets ``[B, ...]`` into the statistics of ``normalize_target``; to be called once for each batch."""
        if self._normalizer is not None:
            self._normalizer.update(self._like_output(target))

    def calc_loss(self, target: Tensor, predicted: Tensor,  # type: ignore[override]
                  mask: Tensor | None = None) -> LossInfo:
        """The loss: the mean over the dimensions of the target.

        Args:
            target: ``[T, B, ...]``.
            predicted: ``[T, B, ...]``.
            mask: bool ``[T, B]``: where there is a target; the loss is 0 elsewhere. ``None``: everywhere.

        Returns:
            ``loss`` ``[T, B]``, and as ``extra`` the same before it is weighted.

        Raises:
            ValueError: the shapes of target and prediction disagree, or the loss is not one of each sample.
        """
        outer = target.shape[:2]
        predicted = predicted.flatten(0, 1)
        compared = self._like_output(target.flatten(0, 1))
        inputs = predicted, compared
        if self._normalizer is not None:
            inputs = self._normalizer.normalize(predicted), self._normalizer.normalize(compared)
        loss = loss_of_samples(self._name, self._loss, *inputs)
        if self._debug_summaries and summary.should_record_summaries():
            self._summarize(predicted, compared, loss, None if mask is None else mask.flatten())
        loss = loss.flatten(1).mean(1) if loss.ndim > 1 else loss
        loss = loss.view(outer)
        if mask is not None:
            loss = torch.where(mask, loss, 0.0)
        return LossInfo(loss=loss * self._loss_weight, extra=loss)

    def _like_output(self, target: Tensor) -> Tensor:
        """``target`` ``[B, ...]`` in the shape and type of the predictions; integers for a loss of their own as is."""
        spec = self._decoder_net.output_spec
        shape = tuple(target.shape[1:])
        if tuple(spec.shape) == (*shape, 1):
            target = target.unsqueeze(-1)
        elif tuple(spec.shape) != shape:
            if target.is_floating_point() or self._normalizer is not None:
                raise ValueError(f"{self._name}: expected the target '{self._target_field}' to have the shape "
                                 f'{tuple(spec.shape)} of what decoder_net_ctor predicts, found {shape}; change the '
                                 'size of the last layer')
            return target
        return target.to(spec.dtype)

    def _summarize(self, predicted: Tensor, target: Tensor, loss: Tensor, mask: Tensor | None) -> None:
        """Write how good predictions ``[N, ...]`` are where ``mask`` ``[N]`` is true."""
        if predicted.shape != target.shape:
            summary_utils.safe_mean_summary(f'{self._name}/loss', loss, mask)
            return
        kept = [x if mask is None else x[mask] for x in (predicted.detach(), target, loss.detach())]
        parts = {'': kept}
        if self._summarize_each_dimension:
            flat = [x.flatten(1) for x in kept if x.shape == kept[0].shape]
            parts.update((f'/{i}', [x[:, i] for x in flat]) for i in range(flat[0].shape[1]))
        with summary.scope(self._name):
            for suffix, tensors in parts.items():
                summary.scalar(f'explained_variance{suffix}', explained_variance(tensors[0], tensors[1]))
                for name, x in zip(('predict', 'target', 'loss'), tensors):
                    summary_utils.add_mean_hist_summary(name + suffix, x)


def _takes_arguments(function: Callable[..., Any]) -> bool:
    """Whether ``function`` cannot be called without arguments."""
    empty = inspect.Parameter.empty
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.default is empty and parameter.kind not in variable
               for parameter in inspect.signature(function).parameters.values())


@configurable
class PredictiveRepresentationLearner(EncoderAlgorithm):
    """Learns a representation by predicting what follows.

    With the latent vector ``z[t, 0]`` that the encoder makes at the step t, and the actions a taken from there,

        z[t, i] = dynamics(a[t + i - 1]),  i = 1 ... R, beginning with a state that is made at t
        loss[t] = sum over decoders d of 1 / (R + 1) * sum over i of mask[t, i] * loss_d(target_d[t + i], d(z[t, i]))

    where ``mask`` is 0 for steps beyond the end of the episode and beyond the newest step. Gradients of this loss and
    of the loss of whatever uses the representation reach the encoder, through time if it has memory.

    Targets are what the environment gave, before any data transformer.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of the action.
        num_unroll_steps: R, how many steps ahead to predict; 0 for only what is decoded from the step itself.
            ``dynamics_net_ctor`` is not used then.
        decoder_ctor: makes a decoder, called with the spec of the latent vector; or several of them. A decoder is an
            ``Algorithm`` without state such as :class:`SimpleDecoder`, with ``get_target_fields()``, which returns
            the nest of the fields of the experience that are the target, ``train_step(latent)``, whose ``info`` is
            what is predicted, and ``calc_loss(target, predicted, mask)`` (``[T, B, ...]``). If it has
            ``observe_targets(target)``, that is called with the targets ``[B, ...]`` of each batch.
        encoding_net_ctor: makes the encoder, called with ``observation_spec``.
        dynamics_net_ctor: makes the dynamics network, called with ``action_spec``. It has memory, and an output like
            that of the encoder. If its state is like that of the encoder, it begins with that; otherwise with a
            linear function, which is learned, of the latent vector.
        reward_spec: not used: part of the interface of a representation learner.
        config: the configuration of the run.
        postprocessor: called with the latent vector, makes the representation out of it: a function, a module or a
            ``Network``, or a class of one of them, constructed as ``(input_tensor_spec=)``; ``None``: the latent
            vector is the representation. Predictions are made from the latent vector.
        encoding_optimizer: owns the parameters of the encoder; ``None``: the optimizer of the agent does.
        dynamics_optimizer: owns those of the dynamics network.
        postprocessor_optimizer: owns those of the postprocessor.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        SpecError: the dynamics network has no memory, or its output is not like that of the encoder.
        ValueError: two decoders have the same target, or an optimizer would own nothing.
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
        """False: the targets are looked up in the replay buffer."""
        return False

    @property
    def output_spec(self) -> NestedTensorSpec:
        """Nest of specs of the representation."""
        return self._output_spec

    def own_capabilities(self) -> Capabilities:
        """True unless something in the networks draws numbers or keeps statistics."""
        return super().own_capabilities()._replace(traceable_update=is_traceable(self))

    def get_decoder(self, target_field: Any) -> Any:
        """The decoder that predicts ``target_field``, a nest of names as its ``get_target_fields()`` returns it.

        Raises:
            ValueError: there is none.
        """
        if target_field in self._target_fields:
            return self._decoders[self._target_fields.index(target_field)]
        raise ValueError(f'{self._name}: no decoder predicts {target_field!r}; there are those of '
                         f'{self._target_fields}')

    def check_plannable(self, name: str) -> None:
        """Raise unless :meth:`predict_multi_step` predicts rewards from :attr:`output_spec` alone.

        Args:
            name: of the algorithm that is to plan with it.

        Raises:
            ConfError: there is no decoder of rewards, a postprocessor hides the latent vector, or the dynamics begin
                with the state of the encoder.
        """
        owner = type(self).__name__
        if 'reward' not in self._target_fields:
            raise ConfError([problem_at(owner, 'decoder_ctor', f"makes no decoder that predicts 'reward', with which "
                                        f'{name} plans; there are those of {self._target_fields}',
                                        "add a SimpleDecoder with target_field = 'reward'")])
        if self._postprocessor is not None:
            raise ConfError([problem_at(owner, 'postprocessor', f'is set: {name} plans from the latent vector, which '
                                        'it hides', 'leave it out')])
        if self._dynamics_net is None:
            raise ConfError([problem_at(owner, 'num_unroll_steps', f'= 0: {name} plans with what is predicted of later '
                                        'steps', 'set it to 1 or more')])
        if self._initial_state is None:
            raise ConfError([problem_at(owner, 'dynamics_net_ctor', 'makes a network whose state is that of the '
                                        f'encoder, which {name} does not see',
                                        'give its memory another size, or choose an encoder without memory')])

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """The representation ``[B, ...]``; nothing is predicted."""
        latent, state = self._encoder(inputs.observation, state)
        return AlgStep(self._representation(latent), state)

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """The representation ``[B, ...]``; ``info`` is empty until :meth:`preprocess_experience`."""
        return self.predict_step(inputs, state)._replace(info=PredictiveRepresentationLearnerInfo())

    def train_step(self, root_inputs: TimeStep, state: NestedTensor, rollout_info: Any = ()) -> AlgStep:
        """The representation ``[B, ...]``; the predictions are made by :meth:`calc_loss` for all steps at once."""
        return super().train_step(root_inputs, state, rollout_info)

    def _train_step(self, encoded: NestedTensor, state: NestedTensor, rollout_info: Any) -> AlgStep:
        begins_with_state = self._dynamics_net is not None and self._initial_state is None
        info = PredictionInfo(future=rollout_info, latent=encoded, state=state if begins_with_state else ())
        return AlgStep(self._representation(encoded), state, info)

    def _representation(self, latent: NestedTensor) -> NestedTensor:
        if isinstance(self._postprocessor, Network):
            return self._postprocessor(latent)[0]
        return latent if self._postprocessor is None else self._postprocessor(latent)

    # Prediction ------------------------------------------------------------------------------------------------

    def predict_multi_step(self, init_latent: NestedTensor, actions: NestedTensor, target_field: Any = None,
                           state: NestedTensor = None) -> Any:
        """Predict what follows from sequences of actions.

        Args:
            init_latent: ``[B, ...]``: the output of the encoder at the first step.
            actions: nest ``[B, steps, ...]``, of any number of steps.
            target_field: the target of a decoder, as for :meth:`get_decoder`, or a list of them; ``None``: all.
            state: of the encoder after the first step, nest ``[B, ...]``; needed if the dynamics network begins with
                that, and not used otherwise.

        Returns:
            ``[B, steps + 1, ...]``: what is predicted for the first step and those after each action; a list of that
            for several targets.

        Raises:
            ValueError: there is no such decoder, no ``state`` where one is needed, or no dynamics network
                (``num_unroll_steps`` is 0) and ``actions`` of more than 0 steps.
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
        """The latent vectors after 0, 1, ... of the actions: nest ``[steps + 1, B, ...]``."""
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
            raise ValueError(f'{self._name}.predict_multi_step needs the state of the encoder, with which its dynamics '
                             'network begins')
        for i in range(num_steps):
            latent, state = self._dynamics_net(nest.map_structure(lambda x, i=i: x[:, i], actions), state)
            latents.append(latent)
        return nest.stack(latents)

    @staticmethod
    def _decode(decoder: Any, latents: NestedTensor) -> AlgStep:
        """What ``train_step`` of a decoder makes of latent vectors ``[R + 1, B, ...]``, in that shape."""
        outer = nest.get_nest_shape(latents)[:2]
        step = decoder.train_step(nest.map_structure(lambda x: x.flatten(0, 1), latents))
        return nest.map_structure(lambda x: x.unflatten(0, outer), AlgStep(step.output, (), step.info))

    # Training --------------------------------------------------------------------------------------------------

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Look up the actions and targets of the steps that follow each step ``[B, T]`` of a batch.

        Returns:
            ``root_inputs`` as it is, and a ``PredictiveRepresentationLearnerInfo``.

        Raises:
            LookupError: the experience has no such field as a decoder asks for.
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
        """The loss of the predictions.

        Args:
            info: ``PredictionInfo`` of ``[T, B, ...]``.

        Returns:
            ``loss`` ``[T, B]``: for each decoder the mean over the R + 1 steps, added up; ``extra``: for each decoder,
            by its name, the mean of its ``extra``.
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
    """A linear function of the latent vector, for each part of a state.

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
        """Nest ``[B, ...]`` to a nest ``[B, ...]`` of ``state_spec``."""
        inputs = torch.cat([x.flatten(1) for x in nest.flatten(latent)], -1)
        specs = nest.flatten(self._state_spec)
        return nest.pack_sequence_as(self._state_spec, [
            layer(inputs).view(-1, *spec.shape) for layer, spec in zip(self._layers, specs)])


def _specs(spec: NestedTensorSpec) -> Any:
    """What two specs have in common if the tensors of one can stand for those of the other."""
    return nest.structure(spec), [(tuple(leaf.shape), leaf.dtype) for leaf in nest.flatten(spec)]


def _check_dynamics(name: str, dynamics_net: Network, latent_spec: NestedTensorSpec) -> None:
    """Raise unless the network has memory, and an output of ``latent_spec``."""
    if not dynamics_net.is_rnn:
        raise SpecError(f'{name}.dynamics_net_ctor: expected a network with memory, such as LSTMEncodingNetwork, found '
                        f'{type(dynamics_net).__name__} without')
    if _specs(dynamics_net.output_spec) != _specs(latent_spec):
        raise SpecError(f'{name}.dynamics_net_ctor: expected an output like that of the encoder, {latent_spec}, found '
                        f'{dynamics_net.output_spec}; make their last layers of the same size')


def _as_postprocessor(postprocessor: Any, latent_spec: NestedTensorSpec) -> tuple[Any, NestedTensorSpec]:
    """The postprocessor, constructed if need be, and the spec of its output."""
    made_by = postprocessor.func if isinstance(postprocessor, functools.partial) else postprocessor
    if isinstance(made_by, type):
        postprocessor = postprocessor(input_tensor_spec=latent_spec)
    if postprocessor is None:
        return None, latent_spec
    if isinstance(postprocessor, Network):
        return postprocessor, postprocessor.output_spec
    example = example_batch(latent_spec, (2, ), context.get_default_device())
    with torch.no_grad():
        return postprocessor, extract_spec(postprocessor(example))
