"""What the loops ask of an algorithm, and what they have to know of it. Nothing here knows a particular one.

:class:`Trains` is what an update needs, :class:`Acts` what collecting experience needs besides. Read next
:mod:`alfx.engine.learner`.
"""
from typing import Any, Protocol

import torch
from torch import nn

from alfx.data_structures import AlgStep, BatchInfo, Experience, LossInfo, TimeStep
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.engine.capabilities import Capabilities


class Settings(Protocol):
    """What the loops read of a configuration; see :class:`~alfx.algorithms.config.TrainerConfig`."""

    clear_replay_buffer: bool
    compile: bool
    initial_collect_steps: int
    max_unroll_length: int
    mini_batch_length: int | None
    mini_batch_size: int | None
    normalize_importance_weights_by_max: bool
    num_env_steps: int
    num_updates_per_train_iter: int
    offline_loss_weight: Any
    offline_mini_batch_size: int | None
    priority_replay_alpha: Any
    priority_replay_beta: Any
    priority_replay_eps: float
    rl_train_after_update_steps: int
    rl_train_every_update_steps: int
    temporally_independent_train_step: bool | None
    unroll_length: float
    unroll_with_grad: bool
    update_counter_every_mini_batch: bool
    use_rollout_state: bool
    whole_replay_buffer_training: bool

    @property
    def collects(self) -> bool: ...

    @property
    def trains_on_whole_unrolls(self) -> bool: ...


class Trains(Protocol):
    """What an algorithm is trained by; see :class:`~alfx.algorithms.algorithm.Algorithm`."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def on_policy(self) -> bool | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def replay_buffer(self) -> ReplayBuffer | None: ...

    @property
    def offline_replay_buffer(self) -> ReplayBuffer | None: ...

    @property
    def data_transformer(self) -> Any: ...

    @property
    def use_rollout_state(self) -> bool: ...

    @property
    def train_state_spec(self) -> NestedTensorSpec: ...

    @property
    def environment(self) -> Any: ...

    @property
    def auxiliary_optimizer(self) -> Any: ...

    def modules(self) -> Any: ...

    def get_initial_train_state(self, batch_size: int) -> NestedTensor: ...

    def transform_experience(self, experience: Experience) -> Experience: ...

    def preprocess_experience(self, root_inputs: NestedTensor, rollout_info: NestedTensor,
                              batch_info: BatchInfo) -> tuple[NestedTensor, NestedTensor]: ...

    def train_step(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep: ...

    def train_sequence(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep: ...

    def calc_loss(self, info: NestedTensor) -> LossInfo: ...

    def auxiliary_reference(self, info: NestedTensor) -> NestedTensor: ...

    def calc_auxiliary_loss(self, info: NestedTensor, reference: NestedTensor) -> LossInfo: ...

    def train_step_offline(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor,
                           pre_train: bool = False) -> AlgStep: ...

    def train_sequence_offline(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor,
                               pre_train: bool = False) -> AlgStep: ...

    def calc_loss_offline(self, info_offline: NestedTensor, pre_train: bool = False) -> LossInfo: ...

    def batch_sources(self, share: Any) -> Any: ...

    def demonstration_batch(self, root: Any, collected: Experience, transformed: Experience) -> Experience | None: ...

    def update_with_gradient(self, loss_info: LossInfo, valid_masks: torch.Tensor | None = None, weight: float = 1.0,
                             batch_info: BatchInfo | None = None
                             ) -> tuple[LossInfo, list[tuple[str, nn.Parameter]]]: ...

    def after_update(self, root_inputs: NestedTensor, info: NestedTensor) -> None: ...

    def summarize_train(self, experience: Experience, train_info: NestedTensor, loss_info: LossInfo,
                        params: list[tuple[str, nn.Parameter]]) -> None: ...

    def optimized_parameters(self) -> tuple[list[Any], list[tuple[str, nn.Parameter]]]: ...


class Acts(Trains, Protocol):
    """What experience is collected with; see :class:`~alfx.algorithms.rl_algorithm.RLAlgorithm`."""

    @property
    def action_spec(self) -> NestedTensorSpec: ...

    @property
    def rollout_state_spec(self) -> NestedTensorSpec: ...

    @property
    def rollout_info_spec(self) -> NestedTensorSpec: ...

    @property
    def experience_spec(self) -> NestedTensorSpec: ...

    @property
    def overwrite_policy_output(self) -> bool: ...

    def get_initial_rollout_state(self, batch_size: int) -> NestedTensor: ...

    def get_initial_transform_state(self, batch_size: int) -> NestedTensor: ...

    def transform_timestep(self, time_step: TimeStep, state: NestedTensor) -> tuple[TimeStep, NestedTensor]: ...

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep: ...

    def collect_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep: ...

    def postprocess_unroll(self, inputs: TimeStep, rollout_info: NestedTensor) -> NestedTensor: ...

    def observe_sequence_for_replay(self, exp: Experience) -> None: ...

    def observe_unroll(self, env_steps: TimeStep) -> None: ...

    def get_step_metrics(self) -> list[Any]: ...

    def summarize_rollout(self, experience: Experience) -> None: ...

    def train_from_unroll(self, experience: Experience, train_info: NestedTensor) -> int: ...

    def train_from_replay_buffer(self, update_global_counter: bool = False) -> int: ...

    def after_train_iter(self, root_inputs: NestedTensor | None, rollout_info: NestedTensor | None) -> None: ...
