"""The base of all algorithms: state specs, optimizers, checkpointing, one gradient update.

Loops over time and minibatches are plain functions in :mod:`alfx.engine`. Read next:
:mod:`alfx.algorithms.rl_algorithm`.
"""
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import nn

from alfx import context, nest
from alfx.algorithms.base.ownership import assign_optimizers
from alfx.algorithms.base.storing import StoringAlgorithm
from alfx.algorithms.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, Experience, LossInfo, TimeStep
from alfx.engine.gradient_noise import GradientNoiseScale
from alfx.engine.mixed_precision import LossScaler, MixedPrecision
from alfx.engine.on_policy import train_from_unroll
from alfx.engine.plan import Plan
from alfx.engine.remote.data_parallel import GradientAverager
from alfx.engine.replay import train_from_replay_buffer
from alfx.engine.update import apply_gradients
from alfx.gin_utils import configurable
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, zeros_from_spec


@configurable
class Algorithm(StoringAlgorithm):
    """Base of all algorithms.

    Args:
        train_state_spec: nest of specs: the state of ``train_step``.
        rollout_state_spec: the state of ``rollout_step``; ``None``: that of ``train_step``.
        predict_state_spec: the state of ``predict_step``; ``None``: that of ``rollout_step``.
        is_on_policy: see :attr:`on_policy`.
        optimizer: default optimizer: owns what no other one does, see :mod:`alfx.algorithms.base.ownership`.
        checkpoint: ``'prefix@path'``: load the part ``prefix`` (``'alg._sub_algorithm'``; ``'alg'`` if left out)
            of the checkpoint file ``path`` into this algorithm before training.
        config: the ``TrainerConfig``; needed by an algorithm that performs a training iteration.
        debug_summaries: write more summaries.
        name: name of this algorithm in summaries.
    """

    def __init__(self, train_state_spec: NestedTensorSpec = (), rollout_state_spec: NestedTensorSpec | None = None,
                 predict_state_spec: NestedTensorSpec | None = None, is_on_policy: bool | None = None,
                 optimizer: Any = None, checkpoint: str | None = None, config: TrainerConfig | None = None,
                 debug_summaries: bool = False, name: str = 'Algorithm'):
        super().__init__(checkpoint, optimizer, config)
        self._name = name
        self._debug_summaries = debug_summaries
        self._train_state_spec = train_state_spec
        self._rollout_state_spec = train_state_spec if rollout_state_spec is None else rollout_state_spec
        self._predict_state_spec = self._rollout_state_spec if predict_state_spec is None else predict_state_spec
        self._is_on_policy: bool | None = None
        if is_on_policy is not None:
            self.set_on_policy(is_on_policy)
        self._path = ''
        self._context_steps = 0  # at the start of the replay buffer, trained on in an earlier iteration
        self._processed_experience_spec: NestedTensorSpec = None
        self._train_info_spec: NestedTensorSpec = None
        self._device: torch.device | None = None
        self._gradient_noise_scale: GradientNoiseScale | None = None
        self._plans: dict[Any, Plan] = {}  # how updates are computed, by what they are made from
        self._batch_reader: Any = None  # and what it is for
        self._mixed_precision: MixedPrecision | None = None
        self._loss_scaler: LossScaler | None = None
        self._gradient_averager: GradientAverager | None = None

    # What it is ------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of this algorithm."""
        return self._name

    @property
    def path(self) -> str:
        return self._path

    def set_path(self, path: str) -> None:
        self._path = path

    @property
    def on_policy(self) -> bool | None:
        return self._is_on_policy

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set :attr:`on_policy`.

        Raises:
            ValueError: this algorithm supports only the other way.
        """
        if self.on_policy is not None and self.on_policy != is_on_policy:
            kind = {True: 'on-policy', False: 'off-policy'}
            kind_of_this = '' if self._name == type(self).__name__ else f' ({type(self).__name__})'
            raise ValueError(f'{self._name}{kind_of_this} is an {kind[bool(self.on_policy)]} algorithm and '
                             f'cannot be trained {kind[bool(is_on_policy)]}; choose another rl_algorithm_cls or part')
        self._is_on_policy = is_on_policy

    @property
    def learns_from_stale_unrolls(self) -> bool:
        """Whether training allows for steps taken with earlier parameters; by default all off-policy training does."""
        return not self.on_policy

    @property
    def has_offline(self) -> bool:
        """Whether there is offline data to train on."""
        return False

    @property
    def train_state_spec(self) -> NestedTensorSpec:
        """Spec of the state of ``train_step``."""
        return self._train_state_spec

    @property
    def rollout_state_spec(self) -> NestedTensorSpec:
        """Spec of the state of ``rollout_step``."""
        return self._rollout_state_spec

    @property
    def predict_state_spec(self) -> NestedTensorSpec:
        """Spec of the state of ``predict_step``."""
        return self._predict_state_spec

    @property
    def train_info_spec(self) -> NestedTensorSpec:
        """Spec of the info of ``train_step``; known from the first training step on, ``None`` before."""
        return self._train_info_spec

    @property
    def processed_experience_spec(self) -> NestedTensorSpec:
        """Spec of what ``preprocess_experience`` returned; known from the first training step on."""
        return self._processed_experience_spec

    def need_full_rollout_state(self) -> bool:
        """Whether ``rollout_step`` has to return all of the state that ``train_step`` needs."""
        return bool(nest.flatten(self._rollout_state_spec)) and (self.use_rollout_state or bool(self.on_policy))

    @property
    def has_fixed_update(self) -> bool:
        """Whether an update is the same tensor operations every time, so that it can be recorded and compiled.

        That is: no number, schedule or counter kept in Python decides what ``train_step`` and ``calc_loss`` compute,
        but for what :attr:`update_variant` tells, and ``after_update`` does not look at the infos. A subclass does not
        inherit it: it has to define it again.
        """
        return False

    @property
    def update_variant(self) -> Hashable:
        """Which one of several fixed updates the next one is, where they take turns; see :attr:`has_fixed_update`."""
        return None

    @property
    def trains_sequences_at_once(self) -> bool:
        """Whether :meth:`train_sequence` does for a sequence what ``train_step`` does step by step.

        That is so without a state. An algorithm whose state is nothing but the step before may say so as well, if its
        own ``train_sequence`` looks at the step before in the sequence.
        """
        return not nest.flatten(self._train_state_spec)

    @property
    def needs_previous_step(self) -> bool:
        """Whether the loss of a step needs the step before it, so that a sequence of one step from zeros has none."""
        return False

    @property
    def bootstraps_sequences(self) -> bool:
        """Whether the last step of a training sequence is there only to bootstrap from: its loss does not count.

        If so, whole unrolls are cut into sequences of ``mini_batch_length`` steps and one more, the first one of the
        next sequence; of a sampled sequence of ``mini_batch_length`` steps all but the last are trained on.
        """
        return False

    @property
    def recomputes_rollout_info(self) -> bool:
        """Whether ``train_step`` on stored steps yields the infos that ``rollout_step`` would have yielded.

        If so, on-policy training collects with :meth:`collect_step` and without gradients, and computes the
        infos of all ``[T * B]`` steps at once: the same numbers from one large graph in place of T small ones.
        """
        return False

    def collect_step(self, inputs: NestedTensor, state: NestedTensor) -> AlgStep:
        """``rollout_step`` that may leave out of its info what is recomputed for many steps at once later."""
        return self.rollout_step(inputs, state)

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """The state for ``predict_step`` that corresponds to a state of ``train_step``."""
        nest.assert_same_structure(self._train_state_spec, self._predict_state_spec)
        return state

    def get_initial_train_state(self, batch_size: int) -> NestedTensor:
        """Zeros ``[batch_size, ...]`` of ``train_state_spec``."""
        return _zeros(self.train_state_spec, batch_size)

    def get_initial_rollout_state(self, batch_size: int) -> NestedTensor:
        """Zeros ``[batch_size, ...]`` of ``rollout_state_spec``."""
        return _zeros(self.rollout_state_spec, batch_size)

    def get_initial_predict_state(self, batch_size: int) -> NestedTensor:
        """Zeros ``[batch_size, ...]`` of ``predict_state_spec``."""
        return _zeros(self.predict_state_spec, batch_size)

    def get_initial_transform_state(self, batch_size: int) -> NestedTensor:
        """Zeros ``[batch_size, ...]`` of the state of the data transformer."""
        return () if self.data_transformer is None else _zeros(self.data_transformer.state_spec, batch_size)

    def forward(self, *input: Any) -> AlgStep:
        """Same as ``rollout_step`` while collecting, ``predict_step`` in evaluation, ``train_step`` otherwise."""
        if context.is_rollout():
            return self.rollout_step(*input)
        return self.predict_step(*input) if context.is_eval() else self.train_step(*input)

    # The update ------------------------------------------------------------------------------------------------

    def update_with_gradient(self, loss_info: LossInfo, valid_masks: torch.Tensor | None = None, weight: float = 1.0,
                             batch_info: BatchInfo | None = None) -> tuple[LossInfo, list[tuple[str, nn.Parameter]]]:
        """One gradient update.

        Args:
            loss_info: ``loss`` is ``[T, B]``.
            valid_masks: float32 ``[T, B]``: 0 for steps that are not to be trained on.
            weight: factor of the loss.
            batch_info: where the batch came from; its importance weights apply.

        Returns:
            The loss info with reduced losses, and ``(name, parameter)`` of what was updated.

        Raises:
            NonFiniteLossError: the loss is not finite; no parameter has been changed.
        """
        return apply_gradients(self, loss_info, valid_masks, weight, batch_info)

    @property
    def gradient_noise_scale(self) -> GradientNoiseScale | None:
        """Estimates the noise scale of the gradient, if ``TrainerConfig.summarize_gradient_noise_scale``."""
        return self._gradient_noise_scale

    @property
    def gradient_averager(self) -> GradientAverager | None:
        """What averages gradients over the processes that train together; ``None`` in one process alone."""
        return self._gradient_averager

    @property
    def mixed_precision(self) -> MixedPrecision | None:
        """How the networks compute in 16 bits with ``TrainerConfig.enable_amp``; the root algorithm knows."""
        return self._mixed_precision

    @property
    def loss_scaler(self) -> LossScaler | None:
        """Scales the loss of an update, where the networks compute in float16."""
        return self._loss_scaler

    def observe_for_metrics(self, time_step: TimeStep) -> None:
        """Record a time step ``[B, ...]`` in the metrics; an algorithm without metrics does nothing."""

    @property
    def trains_after_iteration(self) -> bool:
        """Whether ``after_train_iter`` does anything: only then are its arguments made."""
        return type(self).after_train_iter is not Algorithm.after_train_iter

    # Training --------------------------------------------------------------------------------------------------

    def train_sequence(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """``train_step`` for all steps of sequences at once; called where the steps do not depend on each other.

        An algorithm overrides this to leave out what no loss reads, such as the value at the last step of a
        sequence, which nothing can be bootstrapped for. What is left out is zero; the loss is the same.

        Args:
            inputs: nest ``[T, B, ...]``.
            state: nest ``[T, B, ...]`` of ``train_state_spec``.
            rollout_info: nest ``[T, B, ...]``, as ``preprocess_experience`` left it.

        Returns:
            ``output`` and ``info`` ``[T, B, ...]``; there is no state.
        """
        time, batch = nest.get_nest_shape(inputs)[:2]
        if time == 1:
            flat = nest.map_structure(lambda x: x[0], (inputs, state, rollout_info))
        else:
            flat = nest.map_structure(lambda x: x.reshape(time * batch, *x.shape[2:]), (inputs, state, rollout_info))
        step = self.train_step(*flat)
        output, info = nest.map_structure(lambda x: x.reshape(time, batch, *x.shape[1:]), (step.output, step.info))
        return AlgStep(output, (), info)

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """By default ``info`` is the ``LossInfo`` itself.

        Raises:
            NotImplementedError: it is something else, and the class does not override this.
        """
        if not isinstance(info, LossInfo):
            raise NotImplementedError(f'{type(self).__name__} has to override calc_loss, or its steps have to return '
                                      f'a LossInfo as info; found {type(info).__name__}')
        return info

    def train_step_offline(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor,
                           pre_train: bool = False) -> AlgStep:
        """``train_step`` for experience from an offline buffer; the same unless overridden."""
        return self.train_step(inputs, state, rollout_info)

    def calc_loss_offline(self, info_offline: NestedTensor, pre_train: bool = False) -> LossInfo:
        """``calc_loss`` for experience from an offline buffer; the same unless overridden."""
        return self.calc_loss(info_offline)

    def train_from_unroll(self, experience: Experience, train_info: NestedTensor) -> int:
        """Train on an unroll ``[T, B, ...]``: directly if on-policy, else through the replay buffer."""
        if self.on_policy:
            return train_from_unroll(self, experience, train_info)
        self.observe_sequence_for_replay(experience._replace(rollout_info=train_info))
        return self.train_from_replay_buffer()

    def train_from_replay_buffer(self, update_global_counter: bool = False) -> int:
        return train_from_replay_buffer(self, update_global_counter)

    def summarize_train(self, experience: Experience, train_info: NestedTensor, loss_info: LossInfo,
                        params: list[tuple[str, nn.Parameter]]) -> None:
        """Write summaries after an update; called only in iterations that write them.

        Args:
            experience: ``[T, B, ...]``: what was trained on.
            train_info: ``[T, B, ...]``: what ``calc_loss`` got.
            loss_info: the losses.
            params: the parameters updated, with gradients.
        """
        config = self._config
        if config is not None and config.summarize_grads_and_vars:
            summary_utils.summarize_variables(params)
            summary_utils.summarize_gradients(params)
        summary_utils.summarize_loss(loss_info)

    def compute_paras_statistics(self) -> dict[str, np.ndarray]:
        """``{parameter name: array of its L1 norm, L2 norm, mean, standard deviation}``, to compare copies by."""
        with torch.no_grad():
            return {name: torch.stack([p.norm(1), p.norm(2), p.mean(), p.std(unbiased=False)]).cpu().numpy()
                    for name, p in self.named_parameters()}

    def activate_ddp(self, rank: int) -> None:
        """Train together with other processes from now on; called on the root algorithm, after ``finalize``.

        Parameters and buffers get the values that they have in rank 0. The gradients of every update are averaged over
        all ranks. See :mod:`alfx.engine.remote.data_parallel`.

        Args:
            rank: the number of this process among them.

        Raises:
            RuntimeError: this process has not joined any others, or has another number.
        """
        ranks = context.get_ranks()
        if ranks is None or ranks.rank != rank:
            found = 'none' if ranks is None else f'rank {ranks.rank} of {ranks.size}'
            raise RuntimeError(f'activate_ddp({rank}): expected a process that has joined others as rank {rank} '
                               f'(alfx.engine.remote.data_parallel.join), found {found}')
        ranks.copy_from_first([*self.parameters(), *self.buffers()])
        self._gradient_averager = GradientAverager(ranks, [p for _, p in self.what_is_updated()[1]])

    # Set-up ----------------------------------------------------------------------------------------------------

    def check_config(self, config: TrainerConfig) -> None:
        """Refuse a configuration that this algorithm cannot work with; called for each part of the root, once.

        Args:
            config: of the run; its ``data_transformer`` has been made.

        Raises:
            ConfError: says what to change.
        """

    def finalize(self) -> None:
        """Decide, once, who owns each parameter; load ``checkpoint`` arguments. Called on the root algorithm.

        Raises:
            ConfError: a part cannot work with the configuration.
            OwnershipError: a trainable parameter has no optimizer.
        """
        if self._config is not None:
            for part in self.modules():
                if isinstance(part, Algorithm):
                    part.check_config(self._config)
        if self.data_transformer is not None:  # its statistics belong to the checkpoint, once
            self.add_module('_root_data_transformer', self.data_transformer)
        if self._config is not None and self._config.summarize_gradient_noise_scale:
            self._gradient_noise_scale = GradientNoiseScale().to(self.device)
        assign_optimizers(self)
        self.preload_checkpoints()
        if self._config is not None and self._config.enable_amp:
            self._enable_mixed_precision()

    def _enable_mixed_precision(self) -> None:
        self._mixed_precision = MixedPrecision(self, self.device)
        for part in self.modules():
            if isinstance(part, Algorithm):  # some make updates of their own
                part._loss_scaler = self._mixed_precision.scaler

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        if self._device is None:
            parameter = next(self.parameters(), None)
            self._device = context.get_default_device() if parameter is None else parameter.device
        return self._device

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moving the module to another device, among others: forget which one it was."""
        self._device = self._batch_reader = None
        self._plans = {}
        return super()._apply(fn, recurse)

    def get_rollout_state(self) -> dict[str, Any]:
        """Tensors besides :meth:`state_dict` that an exact resume needs: where the rollout stands."""
        return {}

    def set_rollout_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`get_rollout_state`."""


def _zeros(spec: NestedTensorSpec, batch_size: int) -> NestedTensor:
    if not nest.flatten(spec):  # there is no state
        return spec
    device = context.get_default_device()
    return nest.map_structure(lambda zeros: zeros.to(device), zeros_from_spec(spec, batch_size))


@configurable
class Loss(Algorithm):
    """An algorithm whose input is its loss; subclasses customise ``calc_loss``.

    Args:
        loss_weight: factor of the loss.
        name: name of this algorithm.
    """

    def __init__(self, loss_weight: float = 1.0, name: str = 'LossAlg'):
        super().__init__(name=name)
        self._loss_weight = loss_weight

    def _step(self, inputs: NestedTensor) -> AlgStep:
        return AlgStep(output=(), state=(), info=inputs)

    def predict_step(self, inputs: NestedTensor, state: NestedTensor = None) -> AlgStep:
        """Passes ``inputs`` on as ``info``."""
        return self._step(inputs)

    def rollout_step(self, inputs: NestedTensor, state: NestedTensor = None) -> AlgStep:
        """Passes ``inputs`` on as ``info``."""
        return self._step(inputs)

    def train_step(self, inputs: NestedTensor, state: NestedTensor = None,
                   rollout_info: NestedTensor = None) -> AlgStep:
        """Passes ``inputs`` on as ``info``."""
        return self._step(inputs)

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """``info`` ``[T, B]``, times the weight."""
        if isinstance(info, LossInfo):
            weighted = [x * self._loss_weight if isinstance(x, torch.Tensor) else x
                        for x in (info.loss, info.scalar_loss)]
            return info._replace(loss=weighted[0], scalar_loss=weighted[1])
        return LossInfo(loss=info * self._loss_weight, extra=info)


