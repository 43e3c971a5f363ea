"""Base class of all algorithms: specs, steps, losses, hooks, replay buffer, optimizers and checkpoints.

An algorithm defines what is computed; the :class:`~alfx.engine.learner.Learner` decides when. The training methods
in :mod:`alfx.algorithms.training_methods` forward to the learner. Read next:
:mod:`alfx.algorithms.rl_algorithm`.
"""
import json
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from alfx import context, nest
from alfx.algorithms.algorithm_interface import AlgorithmInterface
from alfx.algorithms.base.overrides import is_overridden
from alfx.algorithms.base.ownership import algorithms_in, assign_optimizers, describe_owners, optimizers_of
from alfx.algorithms.base.traceable_layers import has_traceable_prediction, is_traceable
from alfx.algorithms.training_methods import TrainingMethods, make_learner, overridden_loops
from alfx.checkpoints.files import CheckpointError
from alfx.checkpoints.reading import extract_sub_state_dict_from_checkpoint
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, Experience, LossInfo, TimeStep, add_batch_info, clear_batch_info
from alfx.engine.batch_sources import BatchSource
from alfx.engine.capabilities import Capabilities
from alfx.engine.gradient_noise import GradientNoiseScale
from alfx.engine.learner import Learner
from alfx.engine.stored_unrolls import PhaseSettings, StoredUnrolls
from alfx.engine.updater import Updater
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import ConfError, configurable, problem_at
from alfx.gin_utils.run_folder import has_checkpoint
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, extract_spec, zeros_from_spec
from alfx.utils.renamed import adopt_former_methods, keep_former_methods

logger = logging.getLogger(__name__)
# Methods for one step, and the methods that compute the same for all steps at once.
_AT_ONCE = (('train_step', 'train_sequence'), ('train_step_offline', 'train_sequence_offline'),
            ('rollout_step', 'reward_unroll'), ('bootstrap_values', 'joint_values'), ('trained_values', 'joint_values'))


@configurable
@keep_former_methods
class Algorithm(TrainingMethods, AlgorithmInterface):
    """Base class of all algorithms.

    Args:
        train_state_spec: nest of specs of the state of ``train_step``.
        rollout_state_spec: the same for ``rollout_step``; ``None``: ``train_state_spec``.
        predict_state_spec: the same for ``predict_step``; ``None``: ``rollout_state_spec``.
        is_on_policy: see :attr:`on_policy`.
        optimizer: default optimizer, for the parameters that no other optimizer owns; see
            :mod:`alfx.algorithms.base.ownership`.
        checkpoint: ``'prefix@path'``: load the part ``prefix`` (``'alg._sub_algorithm'``; ``'alg'`` if left out)
            of the checkpoint file ``path`` into this algorithm before training, except step counts and optimizers.
        config: configuration of the run; needed by an algorithm that runs training iterations.
        debug_summaries: write more summaries.
        name: name in summaries and messages.
    """

    def __init__(self, train_state_spec: NestedTensorSpec = (), rollout_state_spec: NestedTensorSpec | None = None,
                 predict_state_spec: NestedTensorSpec | None = None, is_on_policy: bool | None = None,
                 optimizer: Any = None, checkpoint: str | None = None, config: TrainerConfig | None = None,
                 debug_summaries: bool = False, name: str = 'Algorithm'):
        super().__init__()
        self._name = name
        self._checkpoint = checkpoint
        self._config = config
        self._debug_summaries = debug_summaries
        self._train_state_spec = train_state_spec
        self._rollout_state_spec = train_state_spec if rollout_state_spec is None else rollout_state_spec
        self._predict_state_spec = self._rollout_state_spec if predict_state_spec is None else predict_state_spec
        self._is_on_policy: bool | None = None
        if is_on_policy is not None:
            self.set_on_policy(is_on_policy)
        self._path = ''
        self._pre_loaded = False
        self._device: torch.device | None = None
        self._capabilities: Capabilities | None = None
        self._updater: Updater | None = None
        self._learner: Learner | None = None
        self._replay_buffer: ReplayBuffer | None = None
        self._replay_buffer_size: tuple[int, int, bool] | None = None
        self._experience_spec: NestedTensorSpec = None
        self._default_optimizer = optimizer
        self._explicit_optimizers: list[tuple[Any, list[Any]]] = []
        self._force_params_visible_to_parent = False
        self._updated: tuple[list[Any], list[tuple[str, nn.Parameter]]] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_former_methods(cls)
        for name, at_once in _AT_ONCE:  # the method of the base class calls the step of the user
            step, sequence = ([c for c in cls.__mro__ if x in vars(c)] for x in (name, at_once))
            if sequence and (cls.__mro__.index(step[0]) < cls.__mro__.index(sequence[0])
                             and is_overridden(step[0], name)):
                setattr(cls, at_once, vars(sequence[-1])[at_once])

    # Properties ------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name in summaries and messages."""
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
            ValueError: this algorithm supports only the other value.
        """
        if self.on_policy is not None and self.on_policy != is_on_policy:
            kind = {True: 'on-policy', False: 'off-policy'}
            kind_of_this = '' if self._name == type(self).__name__ else f' ({type(self).__name__})'
            raise ValueError(f'{self._name}{kind_of_this} is an {kind[bool(self.on_policy)]} algorithm and '
                             f'cannot be trained {kind[bool(is_on_policy)]}; choose another rl_algorithm_cls or part')
        self._is_on_policy = is_on_policy

    @property
    def has_offline(self) -> bool:
        """Return whether there are stored datasets to train on."""
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
    def unroll_state_spec(self) -> NestedTensorSpec:
        """Spec of the state of each environment that is carried from one unroll to the next; ``()`` for none.

        Unlike the state of ``rollout_step`` it is updated once per unroll and never stored with the experience. The
        engine keeps it, saves it in checkpoints and drops it when new episodes are started.
        """
        return ()

    @property
    def train_info_spec(self) -> NestedTensorSpec:
        """Spec of the info of ``train_step``; known from the first training step on, ``None`` before."""
        return self.learner.losses.train_info_spec

    @property
    def processed_experience_spec(self) -> NestedTensorSpec:
        """Spec of the output of ``preprocess_experience``; known from the first training step on."""
        return None if self._config is None else self.learner.batches.processed_experience_spec

    def need_full_rollout_state(self) -> bool:
        """Return whether ``rollout_step`` has to return the complete state that ``train_step`` needs."""
        return bool(nest.flatten(self._rollout_state_spec)) and (self.use_rollout_state or bool(self.on_policy))

    @property
    def updates_are_traceable(self) -> bool:
        """Return whether an update executes the same tensor operations every time; layers are checked separately."""
        return True

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities of this algorithm without its parts; see :attr:`capabilities`.

        A class of alfx has traceable updates unless :attr:`updates_are_traceable` is False, or a layer draws random
        numbers or keeps statistics. A class outside of alfx has them only if it overrides this method, because only its
        author knows whether its updates can be traced.
        """
        own = Capabilities(
            traceable_update=self.updates_are_traceable and is_traceable(self),
            trains_sequences_at_once=not nest.flatten(self._train_state_spec),
            trains_after_iteration=type(self).after_train_iter is not Algorithm.after_train_iter,
            postprocesses_unrolls=is_overridden(type(self), 'postprocess_unroll'),
            traceable_prediction=has_traceable_prediction(self),
            has_offline_hooks=self._has_offline_hooks())
        for cls in reversed(type(self).__mro__):
            own = own._replace(**vars(cls).get('_declared_capabilities', {}))
        return own

    _declared_capabilities: Mapping[str, bool] = {}  # those of all objects of a class; read by own_capabilities

    _delegates_offline = True  # set in a class whose offline hooks only forward to other algorithms

    def _has_offline_hooks(self) -> bool:
        """Return whether an offline hook of this class does more than forward to other algorithms."""
        defined = (next(cls for cls in type(self).__mro__ if name in vars(cls)) for name in (
            'train_step_offline', 'train_sequence_offline', 'calc_loss_offline'))
        return not all('_delegates_offline' in vars(cls) for cls in defined)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of this algorithm and all its parts; determined once, by :meth:`finalize`."""
        return self._joined_capabilities() if self._capabilities is None else self._capabilities

    def _joined_capabilities(self) -> Capabilities:
        own, acting = self.own_capabilities(), self.policy_algorithm
        if not self._declares_capabilities():
            own = own._replace(traceable_update=False, traceable_prediction=False)
        if (is_overridden(type(self), 'train_sequence') and type(self).train_sequence is Algorithm.train_sequence
                and nest.flatten(self._train_state_spec)):
            own = own._replace(trains_sequences_at_once=False)
        if is_overridden(type(self), 'measures'):
            own = own._replace(traceable_prediction=False)  # evaluation reads the infos
        if (overridden_loops(self).keys() & {'update_with_gradient', 'train_from_unroll'}  # a graph would bypass them
                or type(self).transform_experience is not Algorithm.transform_experience):
            own = own._replace(traceable_update=False)
        return own.joined(list(self._capabilities_of_parts().values()), None if acting is None else acting.capabilities)

    def _determine_capabilities(self) -> None:
        self._capabilities = self._joined_capabilities()
        if not self._declares_capabilities() and self.own_capabilities().traceable_update:
            logger.info("%s does not declare that its updates can be traced, so they run eagerly, which is slower; "
                        "see 'Speed up the updates' in docs/write_an_algorithm.md", type(self).__name__)

    def _declares_capabilities(self) -> bool:
        """Return whether the class is one of alfx, or overrides :meth:`own_capabilities`."""
        return type(self).__module__.startswith('alfx.') or 'own_capabilities' in vars(type(self))

    def _capabilities_of_parts(self) -> dict['Algorithm', Capabilities]:
        """Return the capabilities of the parts of this algorithm."""
        return {part: part.capabilities for child in self.children() for part in algorithms_in(child)}

    @property
    def policy_algorithm(self) -> 'Algorithm | None':
        """The part that chooses the actions, if there is one."""
        return None

    @property
    def graph_key(self) -> Hashable:
        """Key of the traced graph of the next update, if updates of several kinds alternate.

        See ``Capabilities.traceable_update``.
        """
        return None

    def collect_step(self, inputs: NestedTensor, state: NestedTensor) -> AlgStep:
        """Run ``rollout_step``; may leave out infos that are recomputed later for many steps at once."""
        return self.rollout_step(inputs, state)

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """Return the state for ``predict_step`` that corresponds to a state of ``train_step``."""
        nest.assert_same_structure(self._train_state_spec, self._predict_state_spec)
        return state

    def get_initial_train_state(self, batch_size: int) -> NestedTensor:
        """Return zeros ``[batch_size, ...]`` of ``train_state_spec``."""
        return _zeros(self.train_state_spec, batch_size)

    def get_initial_rollout_state(self, batch_size: int) -> NestedTensor:
        """Return zeros ``[batch_size, ...]`` of ``rollout_state_spec``."""
        return _zeros(self.rollout_state_spec, batch_size)

    def get_initial_unroll_state(self, batch_size: int) -> NestedTensor:
        """Return zeros ``[batch_size, ...]`` of ``unroll_state_spec``."""
        return _zeros(self.unroll_state_spec, batch_size)

    def get_initial_predict_state(self, batch_size: int) -> NestedTensor:
        """Return zeros ``[batch_size, ...]`` of ``predict_state_spec``."""
        return _zeros(self.predict_state_spec, batch_size)

    def get_initial_transform_state(self, batch_size: int) -> NestedTensor:
        """Return zeros ``[batch_size, ...]`` of the state of the data transformer."""
        return () if self.data_transformer is None else _zeros(self.data_transformer.state_spec, batch_size)

    def forward(self, *input: Any) -> AlgStep:
        """Call ``rollout_step`` while collecting, ``predict_step`` in evaluation, and ``train_step`` otherwise."""
        if context.is_rollout():
            return self.rollout_step(*input)
        return self.predict_step(*input) if context.is_eval() else self.train_step(*input)

    # Replay ----------------------------------------------------------------------------------------------------

    @property
    def use_rollout_state(self) -> bool:
        """Return whether training starts from the states of the rollout instead of zeros."""
        return self._config is not None and self._config.use_rollout_state

    @property
    def experience_spec(self) -> NestedTensorSpec:
        """Spec of the experience in the replay buffer, or ``None`` if this algorithm has none."""
        return self._experience_spec

    @property
    def data_transformer(self) -> Any:
        """The data transformer of the run, or ``None``."""
        return None if self._config is None else self._config.data_transformer

    def transform_timestep(self, time_step: TimeStep, state: NestedTensor) -> tuple[TimeStep, NestedTensor]:
        """Apply the data transformer to a time step ``[B, ...]`` from the environment.

        Returns:
            The transformed time step and the next state of the transformer.
        """
        transformer = self.data_transformer
        return (time_step, state) if transformer is None else transformer.transform_timestep(time_step, state)

    def transform_experience(self, experience: Experience) -> Experience:
        """Apply the data transformer to experience ``[B, T, ...]`` from the replay buffer."""
        transformer = self.data_transformer
        return experience if transformer is None else transformer.transform_experience(experience)

    def transform_batch(self, experience: Experience, batch_info: BatchInfo, buffer: Any) -> Experience:
        """Move a batch ``[B, T, ...]`` from ``buffer`` to the device and apply the data transformer."""
        if self.device.type != 'cpu':
            experience = experience.to(self.device)
        return clear_batch_info(self.transform_experience(add_batch_info(experience, batch_info, buffer)))

    @property
    def unrolls_end_with_bootstrap(self) -> bool:
        """Return whether an unroll ends with a step to bootstrap from, the first step of the next unroll."""
        config = self._config
        return bool(self.on_policy) or (config is not None and (config.unroll_with_grad
                                                                or config.trains_on_whole_unrolls))

    @property
    def stored_unrolls(self) -> StoredUnrolls | None:
        """The unrolls that the auxiliary phase trains on; ``None`` without such a phase."""
        return None

    def set_replay_buffer(self, num_envs: int, max_length: int, prioritized_sampling: bool = False) -> None:
        """Set the size of the replay buffer, which is created when the first experience is observed.

        Args:
            num_envs: number of environments.
            max_length: steps kept of each environment.
            prioritized_sampling: sample by priority.
        """
        self._replay_buffer_size = (num_envs, max_length, prioritized_sampling)

    def build_replay_buffer(self, experience_spec: NestedTensorSpec) -> None:
        """Allocate the replay buffer for experience of this spec."""
        assert self._replay_buffer_size is not None, 'set_replay_buffer comes first'
        num_envs, max_length, prioritized = self._replay_buffer_size
        self._experience_spec = experience_spec
        transformer = self.data_transformer
        options: dict[str, Any] = {'prioritized_sampling': True} if prioritized else {}
        self._replay_buffer = ReplayBuffer(
            experience_spec, num_envs, max_length, name=f'{self._name}_replay_buffer',
            num_earliest_frames_ignored=0 if transformer is None else transformer.stack_size - 1, **options)
        if getattr(transformer, 'needs_episodic_info', False):  # not passed as an argument: a conf may bind it too
            self._replay_buffer.keep_episodic_info = True
        if self._config is not None:
            limit = self._config.replay_checkpoint_megabytes * 2**20
            self._replay_buffer.checkpoint_limit = int(limit / context.num_ranks())

    @property
    def offline_replay_buffer(self) -> ReplayBuffer | None:
        """The replay buffer that holds offline data, if there is any."""
        return None

    @property
    def replay_buffer(self) -> ReplayBuffer | None:
        """The replay buffer, if this algorithm has one."""
        return self._replay_buffer

    def observe_for_replay(self, exp: Experience) -> None:
        """Store one step of experience ``[B, ...]``."""
        exp = self._prepare_for_replay(exp)
        if self._replay_buffer is None:
            self.build_replay_buffer(extract_spec(exp))
        self._replay_buffer.add_batch(exp, exp.time_step.env_id)  # type: ignore[union-attr]

    def observe_sequence_for_replay(self, exp: Experience) -> None:
        """Store ``T`` consecutive steps of all environments at once: ``[T, B, ...]``.

        An :meth:`observe_for_replay` that a subclass overrides is called for each step.
        """
        if type(self).observe_for_replay is not Algorithm.observe_for_replay:
            for t in range(exp.step_type.shape[0]):
                self.observe_for_replay(nest.map_structure(lambda x: x[t], exp))  # noqa: B023 - called immediately
            return
        exp = self._prepare_for_replay(exp)
        if self._replay_buffer is None:
            self.build_replay_buffer(extract_spec(exp, from_dim=2))
        self._replay_buffer.add_sequence(exp)  # type: ignore[union-attr]

    def _prepare_for_replay(self, exp: Experience) -> Experience:
        """Drop the state if training does not read it, and detach."""
        has_state = not isinstance(exp.state, tuple) or exp.state
        if has_state and not self.use_rollout_state:
            exp = exp._replace(state=())
        if self._config is not None and self._config.unroll_with_grad:
            exp = nest.map_structure(torch.Tensor.detach, exp)
        return exp

    # Optimizers ----------------------------------------------------------------------------------------------------

    @property
    def default_optimizer(self) -> Any:
        """The default optimizer, or ``None``."""
        return self._default_optimizer

    @property
    def explicit_optimizers(self) -> list[tuple[Any, list[Any]]]:
        """``[(optimizer, modules and parameters), ...]`` given to :meth:`add_optimizer`."""
        return self._explicit_optimizers

    @property
    def force_params_visible_to_parent(self) -> bool:
        """Return whether the parent's optimizer owns the parameters even if this algorithm has optimizers."""
        return self._force_params_visible_to_parent

    @force_params_visible_to_parent.setter
    def force_params_visible_to_parent(self, flag: bool) -> None:
        self._force_params_visible_to_parent = flag

    def add_optimizer(self, optimizer: Any, modules_and_params: list[Any]) -> None:
        """Let ``optimizer`` own these modules and parameters, which are attributes of this algorithm."""
        self._explicit_optimizers.append((optimizer, list(modules_and_params)))

    def _add_given_optimizers(self, *owners: tuple[Any, Any]) -> None:
        """Call :meth:`add_optimizer` for each pair of an optimizer and a module in which neither is ``None``."""
        for optimizer, owned in owners:
            if optimizer is not None and owned is not None:
                self.add_optimizer(optimizer, [owned])

    _not_trained: tuple[str, ...] = ()  # attributes whose parameters are not trained here, such as target networks

    def _trainable_attributes_to_ignore(self) -> list[str]:
        """Return the names of attributes whose parameters are not trained here, such as target networks."""
        return list(self._not_trained)

    def optimizers(self, recurse: bool = True, include_ignored_attributes: bool = False) -> list[Any]:
        """Return the optimizers of this algorithm.

        Args:
            recurse: include the optimizers of the parts.
            include_ignored_attributes: include the optimizers of attributes that are ignored for training.
        """
        return optimizers_of(self, recurse, include_ignored_attributes)

    def get_param_name(self, param: nn.Parameter) -> str | None:
        """Return the name of a parameter of this algorithm, ``None`` for any other parameter."""
        return next((name for name, p in self.named_parameters() if p is param), None)

    def get_optimizer_info(self) -> str:
        """Return the optimizers and the names of their parameters as JSON; ``"None"`` stands for no optimizer."""
        return json.dumps(describe_owners(self), indent=2)

    def get_unoptimized_parameter_info(self) -> str:
        """Return the names of all parameters that no optimizer owns, one per line."""
        return '\n'.join(describe_owners(self)[-1]['parameters'])

    def optimized_parameters(self) -> tuple[list[Any], list[tuple[str, nn.Parameter]]]:
        """Return all optimizers, and ``(name, parameter)`` of every parameter that they own; computed once."""
        if self._updated is None:
            self._finalize_at_first_use()
            names = {id(p): name for name, p in self.named_parameters()}
            optimizers = self.optimizers()
            self._updated = optimizers, [(names.get(id(p), '?'), p) for optimizer in optimizers
                                         for group in optimizer.param_groups for p in group['params']]
        return self._updated

    def observe_for_metrics(self, time_step: TimeStep) -> None:
        """Record a time step ``[B, ...]`` in the metrics; an algorithm without metrics does nothing."""

    # Training --------------------------------------------------------------------------------------------------

    def train_sequence(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """Run ``train_step`` for all steps of sequences at once; called if the steps do not depend on each other.

        An algorithm overrides this to skip computations that no loss reads, such as the value at the last step of a
        sequence. The skipped results are zero; the loss is the same.

        Args:
            inputs: nest ``[T, B, ...]``.
            state: nest ``[T, B, ...]`` of ``train_state_spec``.
            rollout_info: nest ``[T, B, ...]``, as returned by ``preprocess_experience``.

        Returns:
            ``output`` and ``info`` ``[T, B, ...]``; there is no state.
        """
        return _at_once(self.train_step, inputs, state, rollout_info)

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Return the losses; by default ``info`` is the ``LossInfo`` itself.

        Raises:
            NotImplementedError: ``info`` is something else, and the class does not override this method.
        """
        if not isinstance(info, LossInfo):
            raise NotImplementedError(f'{type(self).__name__} has to override calc_loss, or its steps have to return '
                                      f'a LossInfo as info; found {type(info).__name__}')
        return info

    # An auxiliary phase ----------------------------------------------------------------------------------------

    @property
    def auxiliary_phase(self) -> PhaseSettings | None:
        """Settings of an additional training phase every few iterations, or ``None``.

        See :mod:`alfx.engine.auxiliary_phase`. By default it is the phase of :attr:`policy_algorithm`.
        """
        part = self.policy_algorithm
        return None if part is None else part.auxiliary_phase

    @property
    def auxiliary_optimizer(self) -> Any:
        """Optimizer of the auxiliary phase; ``None`` for the optimizers of all other updates."""
        part = self.policy_algorithm
        return None if part is None else part.auxiliary_optimizer

    def auxiliary_reference(self, info: NestedTensor) -> NestedTensor:
        """Select from infos ``[T, B, ...]`` at the start of the phase what :meth:`calc_auxiliary_loss` needs."""
        raise NotImplementedError(f'{type(self).__name__}.auxiliary_reference')

    def calc_auxiliary_loss(self, info: NestedTensor, reference: NestedTensor) -> LossInfo:
        """Compute the loss ``[T, B]`` of the auxiliary phase.

        Args:
            info: infos of ``train_step``, ``[T, B, ...]``.
            reference: result of :meth:`auxiliary_reference` for the same steps, ``[T, B, ...]``.
        """
        raise NotImplementedError(f'{type(self).__name__}.calc_auxiliary_loss')

    def train_step_offline(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor,
                           pre_train: bool = False) -> AlgStep:
        """Run ``train_step`` for experience of an offline buffer; the same unless overridden."""
        return self.train_step(inputs, state, rollout_info)

    def train_sequence_offline(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor,
                               pre_train: bool = False) -> AlgStep:
        """Run :meth:`train_sequence` for experience of an offline buffer.

        If ``train_step_offline`` is overridden, it is called for all steps of the sequences at once.
        """
        if type(self).train_step_offline is Algorithm.train_step_offline:
            return self.train_sequence(inputs, state, rollout_info)
        return _at_once(partial(self.train_step_offline, pre_train=pre_train), inputs, state, rollout_info)

    def calc_loss_offline(self, info_offline: NestedTensor, pre_train: bool = False) -> LossInfo:
        """Compute the losses of experience of an offline buffer; the same as ``calc_loss`` unless overridden."""
        return self.calc_loss(info_offline)

    def batch_sources(self, source: BatchSource) -> Sequence[BatchSource]:
        """Return the sources of minibatches, besides offline data; see :mod:`alfx.engine.batch_sources`.

        Args:
            source: ``mini_batch_size`` samples of the replay buffer.

        Returns:
            Sources to use instead. Training waits until all replay buffers among them hold enough experience.
        """
        return [source]

    def num_updates_due(self, count: int) -> int:
        """Return the number of updates in this iteration; called once per iteration that trains on sampled experience.

        Args:
            count: ``TrainerConfig.num_updates_per_train_iter``.
        """
        return count

    def prepare(self, root: 'Algorithm') -> None:
        """Prepare for training, for example by reading demonstrations; called once, before the first rollout.

        Args:
            root: the root algorithm, which has an environment.
        """

    def demonstration_batch(self, root: 'Algorithm', collected: Experience,
                            transformed: Experience) -> Experience | None:
        """Return demonstrations to train on together with whole unrolls.

        Args:
            root: the root algorithm.
            collected: the unroll ``[B, T, ...]``; its last step is the first step of the next unroll.
            transformed: the same after the data transformer.

        Returns:
            Demonstrations ``[S, T, ...]`` with the structure of ``transformed``, or ``None``.
        """
        return None

    def summarize_train(self, experience: Experience, train_info: NestedTensor, loss_info: LossInfo,
                        params: list[tuple[str, nn.Parameter]]) -> None:
        """Write summaries after an update; called only in iterations that write them.

        Args:
            experience: the minibatch ``[T, B, ...]``.
            train_info: the input of ``calc_loss``, ``[T, B, ...]``.
            loss_info: the losses.
            params: the updated parameters, with gradients.
        """
        config = self._config
        if config is not None and config.summarize_grads_and_vars:
            summary_utils.summarize_variables(params)
            summary_utils.summarize_gradients(params)
        summary_utils.summarize_loss(loss_info)

    def compute_paras_statistics(self) -> dict[str, np.ndarray]:
        """Return ``{parameter name: array of L1 norm, L2 norm, mean, standard deviation}``, to compare copies."""
        with torch.no_grad():
            return {name: torch.stack([p.norm(1), p.norm(2), p.mean(), p.std(unbiased=False)]).cpu().numpy()
                    for name, p in self.named_parameters()}

    # Set-up ----------------------------------------------------------------------------------------------------

    def on_parts_built(self, parts: 'Mapping[str, Algorithm]') -> None:
        """Receive the other parts of an agent; called once, after all of them have been created.

        Do not store a part as an attribute: it would become a submodule, and be trained and saved twice.

        Args:
            parts: all parts, by their fields in the state and the info of the agent.

        Raises:
            ConfError: a required part is missing or incompatible.
        """

    def check_config(self, config: TrainerConfig) -> None:
        """Reject a configuration that this algorithm does not support; called once for each part of the root.

        Args:
            config: configuration of the run; its ``data_transformer`` has been created.

        Raises:
            ConfError: the message says what to change.
        """

    def finalize(self) -> None:
        """Assign each parameter to an optimizer and load ``checkpoint`` arguments.

        Called once, on the root algorithm: by the trainer, or by the first update or iteration of an algorithm that is
        used without a trainer. The ``checkpoint`` arguments are ignored if the run folder has a checkpoint, because it
        replaces everything that they load.

        Raises:
            ConfError: a part does not support the configuration.
            OwnershipError: a trainable parameter has no optimizer.
        """
        config, parts = self._config, [x for x in self.modules() if isinstance(x, Algorithm)]
        if config is not None:
            for part in parts:
                part.check_config(config)
        for part in reversed(parts):  # parts before their owners
            part._determine_capabilities()
        if self.data_transformer is not None:  # checkpoints contain its statistics once
            self.add_module('_root_data_transformer', self.data_transformer)
        assign_optimizers(self)
        if config is None or not has_checkpoint(config.root_dir):
            self.preload_checkpoints()
        if config is not None and config.summarize_gradient_noise_scale:
            self.updater.noise_scale = GradientNoiseScale().to(self.device)
        if config is not None and config.enable_amp:
            self.updater.use_mixed_precision([part.updater for part in parts])

    def _finalize_at_first_use(self) -> None:
        """Call :meth:`finalize` if neither this algorithm nor one that contains it has been finalized."""
        if self._capabilities is None and (self.optimizers() or self.environment is not None):
            self.finalize()

    @property
    def environment(self) -> Any:
        """Environments to train in, if there are any."""
        return None

    @property
    def updater(self) -> Updater:
        """Updater of this algorithm, which performs its gradient steps; created on first use."""
        if self._updater is None:
            self._updater = Updater(self, self._config is not None and self._config.compile)
        return self._updater

    @property
    def learner(self) -> Learner:
        """Learner of this algorithm, which runs its training iterations; created on first use."""
        if self._learner is None:
            if self.environment is not None and self._config is not None and self.optimizers():
                self._finalize_at_first_use()
            self._learner = make_learner(self, self.updater, self._config)
        return self._learner

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        if self._device is None:
            parameter = next(self.parameters(), None)
            self._device = context.get_default_device() if parameter is None else parameter.device
        return self._device

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the module, for instance to another device, and drop everything cached for the old one."""
        self._device = None
        for cached in (self._updater, self._learner):
            if cached is not None:
                cached.invalidate_caches()
        return super()._apply(fn, recurse)

    # Checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def pre_loaded(self) -> bool:
        """Return whether the ``checkpoint`` argument has been loaded into this algorithm."""
        return self._pre_loaded

    def preload_checkpoints(self) -> None:
        """Load the checkpoints named by ``checkpoint`` arguments of this algorithm and its parts, if not done yet.

        Raises:
            ConfError: a checkpoint does not exist or cannot be used.
        """
        for part in self.modules():
            if isinstance(part, Algorithm):
                part._preload()

    def _preload(self) -> None:
        if not self._checkpoint or self._pre_loaded:
            return
        prefix, path = _prefix_and_path(self._checkpoint)
        self._load_part(self, 'checkpoint', self._checkpoint, prefix or 'alg', path)
        self._pre_loaded = True

    def _load_part(self, part: nn.Module, argument: str, value: str, prefix: str, path: str) -> None:
        """Load ``prefix`` of the checkpoint ``path`` into ``part``; ``argument`` and ``value`` are for messages."""
        try:
            state = extract_sub_state_dict_from_checkpoint(prefix, path)
        except CheckpointError as error:
            # a conf may bind the argument for any of the classes
            problems = [problem_at(cls.__name__, argument, f'= {value!r}: {error}') for cls in type(self).__mro__]
            raise ConfError([next((p for p in problems if p.location), problems[0])]) from error
        own = part.state_dict()
        for key in state.keys() & own.keys():  # step counts and optimizers are those of this run
            if key.startswith('_metrics.'):
                state[key] = own[key]
            elif key.endswith('_extra_state') and 'optimizers' in own[key]:
                state[key] = {**state[key], 'optimizers': own[key]['optimizers']}
        part.load_state_dict(state)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state besides parameters and buffers: the states of the optimizers of this algorithm."""
        extra: dict[str, Any] = {'optimizers': [o.state_dict() for o in self.optimizers(recurse=False)]}
        replay = {} if self._replay_buffer is None else self._replay_buffer.state_dict()
        if replay:
            extra['replay_buffer'] = replay
        return extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`get_extra_state`.

        Raises:
            ValueError: the number of optimizers differs.
        """
        optimizers = self.optimizers(recurse=False)
        if len(optimizers) != len(state['optimizers']):
            raise ValueError(f'{self._name} has {len(optimizers)} optimizers, the checkpoint has '
                             f"{len(state['optimizers'])}; it belongs to another configuration")
        for optimizer, saved in zip(optimizers, state['optimizers']):
            optimizer.load_state_dict(saved)
        if self._replay_buffer is not None and 'replay_buffer' in state:
            self._replay_buffer.load_state_dict(state['replay_buffer'])

    def state_dict(self, destination: Any = None, prefix: str = '', visited: Any = None,  # type: ignore[override]
                   keep_vars: bool = False) -> dict[str, Any]:
        """Return the parameters, buffers and optimizer states of this algorithm and its parts.

        Args:
            destination: dict to add to.
            prefix: prefix of the keys.
            visited: ids of modules to skip because they are stored elsewhere.
            keep_vars: do not detach the parameters.
        """
        if visited and id(self) in visited:
            return {} if destination is None else destination
        return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True,  # type: ignore[override]
                        skip_preloded: bool = True, assign: bool = False) -> Any:
        """Load the result of :meth:`state_dict`.

        Args:
            state_dict: parameters, buffers and optimizer states.
            strict: raise an error that names missing and unexpected keys.
            skip_preloded: skip the parts whose ``checkpoint`` argument has been loaded.
            assign: use the tensors themselves instead of copying their values.

        Returns:
            ``missing_keys`` and ``unexpected_keys``.
        """
        if skip_preloded:
            for prefix, module in self.named_modules(prefix=''):
                if isinstance(module, Algorithm) and module._pre_loaded:
                    prefix = f'{prefix}.' if prefix else ''
                    others = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
                    state_dict = {**others, **module.state_dict(prefix=prefix)}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _prefix_and_path(checkpoint: str) -> tuple[str, str]:
    """Split ``'prefix@path'``; a path may contain ``@``, a prefix cannot."""
    prefix, at, path = checkpoint.partition('@')
    return (prefix, path) if at and not os.path.exists(checkpoint) else ('', checkpoint)


def _at_once(train_step: Callable[..., AlgStep], *sequences: NestedTensor) -> AlgStep:
    """Run ``train_step`` for all steps of sequences ``[T, B, ...]`` as one batch; the result has no state."""
    time, batch = nest.get_nest_shape(sequences[0])[:2]
    if time == 1:
        flat = nest.map_structure(lambda x: x[0], sequences)
    else:
        flat = nest.map_structure(lambda x: x.reshape(time * batch, *x.shape[2:]), sequences)
    step = train_step(*flat)
    output, info = nest.map_structure(lambda x: x.reshape(time, batch, *x.shape[1:]), (step.output, step.info))
    return AlgStep(output, (), info)


def _zeros(spec: NestedTensorSpec, batch_size: int) -> NestedTensor:
    if not nest.flatten(spec):  # there is no state
        return spec
    device = context.get_default_device()
    return nest.map_structure(lambda zeros: zeros.to(device), zeros_from_spec(spec, batch_size))


@configurable
class Loss(Algorithm):
    """Algorithm that returns its input as its loss; subclasses customize ``calc_loss``.

    Args:
        loss_weight: factor of the loss.
        name: name of this algorithm.
    """

    def __init__(self, loss_weight: float = 1.0, name: str = 'LossAlg'):
        super().__init__(name=name)
        self._loss_weight = loss_weight

    def predict_step(self, inputs: NestedTensor, state: NestedTensor = None,
                     rollout_info: NestedTensor = None) -> AlgStep:
        """Return ``inputs`` as ``info``."""
        return AlgStep(output=(), state=(), info=inputs)

    rollout_step = train_step = predict_step

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Return the loss ``info`` ``[T, B]`` multiplied by the weight."""
        if isinstance(info, LossInfo):
            weighted = [x * self._loss_weight if isinstance(x, torch.Tensor) else x
                        for x in (info.loss, info.scalar_loss)]
            return info._replace(loss=weighted[0], scalar_loss=weighted[1])
        return LossInfo(loss=info * self._loss_weight, extra=info)


