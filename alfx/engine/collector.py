"""Collection of experience: from the environments of this process, or from other processes.

A :class:`Collector` owns the state between two unrolls. It never trains. Read next:
:mod:`alfx.engine.rollout`, the inner loop.
"""
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from alfx import context, nest
from alfx.config import TrainerConfig
from alfx.data_structures import Experience, StepType, TimeStep
from alfx.engine import probe
from alfx.engine.contract import Acts
from alfx.engine.remote.remote_unroll import RemoteUnroll, UnrollSource
from alfx.engine.rollout import RolloutState, Steps, postprocessed, rollout, start
from alfx.tensor_specs import NestedTensor


class UnrollRequest(NamedTuple):
    """The unroll that an iteration needs.

    Attributes:
        length: maximum number of steps.
        at_least: minimum number of steps to wait for.
        remainder: fraction of a step that remains to be collected afterwards.
    """

    length: int
    at_least: int
    remainder: float = 0.0


class Collector:
    """Collector of unrolls; also updates the metrics and stores the experience for replay.

    Args:
        algorithm: root algorithm; it has an environment.
        settings: configuration of the run.

    Attributes:
        position: current position of the rollout; ``None`` before the first step.
        remote: source of the steps of other processes; ``None`` if this process steps the environments.
        inputs: transformed time steps of the latest unroll if ``Capabilities.needs_unroll_inputs``, else ``None``.
        unroll_state: nest ``[B, ...]`` of ``unroll_state_spec`` after the latest unroll; ``None`` before the first one
            and after new episodes have been started.
    """

    def __init__(self, algorithm: Acts, settings: TrainerConfig):
        self._algorithm, self._settings = algorithm, settings
        self.position: RolloutState | None = None
        self.remote: RemoteUnroll | None = None
        self.inputs: TimeStep | None = None
        self.unroll_state: NestedTensor | None = None
        self._remainder = 0.0  # fraction of a step that a later unroll has to add
        self._has_started = False  # whether the source has been told of this iteration

    def use_source(self, source: UnrollSource, update_period: int) -> None:
        """Take the steps of other processes instead of stepping the environments.

        Args:
            source: source of the steps; the caller closes it.
            update_period: number of iterations between two transfers of the weights to ``source``; the first
                iteration always transfers them.
        """
        self.remote = RemoteUnroll(source, update_period)

    def next_request(self, trained_before: bool) -> UnrollRequest | None:
        """Return the length of the unroll of an iteration that begins now.

        Args:
            trained_before: whether the previous iteration trained on any sample.

        Returns:
            The length, or ``None`` if ``unroll_length`` skips this iteration or all environment steps are used up.
        """
        settings = self._settings
        if settings.num_env_steps and self._env_steps() >= settings.num_env_steps:
            return None
        if self.remote is not None:
            self._start_iteration(self.remote)
            if not settings.unroll_length:  # take what has arrived; wait for a step if the last iteration was idle
                return UnrollRequest(settings.max_unroll_length, 0 if trained_before else 1)
        total = self._remainder + settings.unroll_length
        length = int(total)
        if not length:
            self._remainder = total
            return None
        return UnrollRequest(length, length, total - length)

    def _start_iteration(self, remote: RemoteUnroll) -> None:
        self._has_started = True
        remote.start_iteration(self._algorithm, context.should_record_summaries(), context.get_summary_step())

    def mark_collected(self, request: UnrollRequest) -> None:
        """Record that the unroll ``request`` has been collected."""
        self._remainder = request.remainder

    def _env_steps(self) -> int:
        """Return the environment steps of all processes as of the previous iteration."""
        return (self._algorithm.get_step_metrics()[0].count if context.get_ranks() is None
                else int(context.get_progress('env_steps')))

    def collect(self, request: UnrollRequest) -> Experience | None:
        """Collect an unroll, update the metrics and store the experience for replay.

        If the algorithm is on-policy, or with ``unroll_with_grad``, or if whole unrolls are trained on, one more step
        follows that is not given to the environment; values are bootstrapped from it.

        Args:
            request: number of steps of each environment.

        Returns:
            Experience ``[T, B, ...]`` or, with that extra step, ``[T + 1, B, ...]``. On-policy it holds transformed
            time steps, otherwise those of the environment. ``None`` if other processes have no steps yet.
        """
        algorithm, bootstrap = self._algorithm, self._algorithm.unrolls_end_with_bootstrap
        if self.remote is not None:
            if not self._has_started:  # an overridden train_iter calls unroll directly
                self._start_iteration(self.remote)
            self._has_started = False
            steps = self.remote.unroll(algorithm, request.length, request.at_least, bootstrap)
        else:
            steps = self._step_environments(request.length, bootstrap)
        if steps is None:
            return None
        experience, env_steps, self.inputs = steps
        algorithm.observe_unroll(env_steps)
        if algorithm.capabilities.postprocesses_unrolls:
            assert steps.inputs is not None, 'needs_unroll_inputs is not set'
            with context.rollout_context(), torch.no_grad():
                rollout_info, self.unroll_state = postprocessed(algorithm, steps.inputs, experience.rollout_info,
                                                                self.unroll_state)
            experience = experience._replace(rollout_info=rollout_info)
        if not algorithm.on_policy:
            stores_bootstrap = self._settings.trains_on_whole_unrolls
            algorithm.observe_sequence_for_replay(experience if stores_bootstrap or not bootstrap else
                                                  nest.map_structure(lambda x: x[:-1], experience))
        if context.should_record_summaries():
            algorithm.summarize_rollout(experience)
        return experience

    def _step_environments(self, length: int, bootstrap: bool) -> Steps:
        algorithm, env = self._algorithm, self._algorithm.environment
        if env is None:
            raise ValueError(f'{algorithm.name}: collecting steps needs an environment; pass env=')
        if self.position is None:
            self.position = start(algorithm, env)
        on_policy, capabilities = bool(algorithm.on_policy), algorithm.capabilities
        with_grad = self._settings.unroll_with_grad or (on_policy and not capabilities.recomputes_rollout_info)
        with context.acting_precision():
            return rollout(algorithm, env, self.position, length, with_grad=with_grad, bootstrap=bootstrap,
                           transformed=on_policy, keep_inputs=capabilities.needs_unroll_inputs)

    # Resume ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the rollout as tensors and numbers, without the state of the environments."""
        state: dict[str, Any] = {'unroll_debt': self._remainder}
        if self.position is not None:
            now = self.position
            state['cursor'] = nest.flatten((now.time_step, now.inputs, now.state, now.transform_state))
            if self.unroll_state is not None:
                state['unroll_state'] = nest.flatten(self.unroll_state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, after the state of the environments has been restored."""
        self._remainder = state['unroll_debt']
        if 'cursor' not in state:
            return
        with probe.unchanged(self._algorithm):  # a data transformer, for instance, updates its statistics here
            like = start(self._algorithm, self._algorithm.environment)
        time_step, inputs, policy_state, transform_state = _loaded(
            (like.time_step, like.inputs, like.state, like.transform_state), state['cursor'])
        self.position = replace(like, time_step=time_step, inputs=inputs, state=policy_state,
                                transform_state=transform_state)
        zeros = self._algorithm.get_initial_unroll_state(time_step.step_type.shape[0])
        saved = state.get('unroll_state')
        self.unroll_state = None if saved is None else _loaded(zeros, saved)

    def start_new_episodes(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict` with environments whose state could not be restored.

        The newest steps in the replay buffer become the LAST steps of truncated episodes; FIRST steps are dropped,
        because no action led to them.
        """
        self._remainder, self.unroll_state = state['unroll_debt'], None
        buffer = self._algorithm.replay_buffer
        if buffer is None:
            return
        if self._settings.trains_on_whole_unrolls:
            buffer.clear()  # it contains only earlier frames for frame stacks, from the old episodes
        env_ids = (buffer.current_size > 0).nonzero().flatten()
        step_type = buffer.get_field('time_step.step_type', env_ids, buffer.current_pos[env_ids] - 1)
        buffer.drop_newest(env_ids[step_type == StepType.FIRST])
        env_ids = env_ids[step_type != StepType.FIRST]
        if env_ids.numel():
            last = torch.full((env_ids.numel(), ), StepType.LAST, dtype=torch.int32)
            buffer.set_field('time_step.step_type', env_ids, buffer.current_pos[env_ids] - 1, last)


def _loaded(like: Any, saved: list[torch.Tensor]) -> Any:
    """Return tensors of a checkpoint, which are in host memory, as a nest like ``like``.

    Raises:
        ValueError: their number, a shape or a dtype differs.
    """
    leaves = nest.flatten(like)
    for x, found in zip(leaves, saved, strict=True):
        if x.shape != found.shape or x.dtype != found.dtype:
            raise ValueError(f'rollout: expected {x.dtype} {tuple(x.shape)}, found {found.dtype} {tuple(found.shape)}')
    return nest.pack_sequence_as(like, [found.to(x.device) for x, found in zip(leaves, saved)])
