"""What an algorithm stores of its experience: the replay buffer, and the data transformer on both sides of it.

Read next: :mod:`alfx.experience_replayers.replay_buffer`.
"""
from typing import Any

import torch

from alfx import context, nest
from alfx.algorithms.base.optimized import OptimizedAlgorithm
from alfx.algorithms.config import TrainerConfig
from alfx.data_structures import Experience, TimeStep
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, extract_spec


class StoringAlgorithm(OptimizedAlgorithm):
    """An algorithm that can have a replay buffer.

    Args:
        checkpoint: see :class:`alfx.algorithms.algorithm.Algorithm`.
        optimizer: default optimizer.
        config: the ``TrainerConfig``, or ``None``.
    """

    def __init__(self, checkpoint: str | None = None, optimizer: Any = None, config: TrainerConfig | None = None):
        super().__init__(checkpoint, optimizer)
        self._config = config
        self._replay_buffer_size: tuple[int, int, bool] | None = None
        self._experience_spec: NestedTensorSpec = None

    @property
    def use_rollout_state(self) -> bool:
        """Whether training starts from the states of the rollout (True) or from zeros (False)."""
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

    def set_replay_buffer(self, num_envs: int, max_length: int, prioritized_sampling: bool = False) -> None:
        """Set the size of the replay buffer, which is built when the first experience is observed.

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
        if getattr(transformer, 'needs_episodic_info', False):
            options['keep_episodic_info'] = True
        self._replay_buffer = ReplayBuffer(
            experience_spec, num_envs, max_length, name=f'{self._name}_replay_buffer',
            num_earliest_frames_ignored=0 if transformer is None else transformer.stack_size - 1, **options)
        if self._config is not None:
            limit = self._config.replay_checkpoint_megabytes * 2**20
            self._replay_buffer.checkpoint_limit = int(limit / context.num_ranks())

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
        """Store ``T`` consecutive steps of all environments at once: ``[T, B, ...]``."""
        exp = self._prepare_for_replay(exp)
        if self._replay_buffer is None:
            self.build_replay_buffer(extract_spec(exp, from_dim=2))
        self._replay_buffer.add_sequence(exp)  # type: ignore[union-attr]

    def _prepare_for_replay(self, exp: Experience) -> Experience:
        """Drop what training does not read, cut gradients."""
        has_state = not isinstance(exp.state, tuple) or exp.state
        if has_state and not self.use_rollout_state:
            exp = exp._replace(state=())
        if self._config is not None and self._config.unroll_with_grad:
            exp = nest.map_structure(torch.Tensor.detach, exp)
        return exp
