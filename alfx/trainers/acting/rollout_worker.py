"""Asynchronous actor: environments and algorithm of a run, created again from the conf in its run folder.

``algorithms/async_unroller.py`` uses one such actor on this machine; ``ray_worker.py`` uses many on any machine.
"""
import time
from typing import Any

import torch

from alfx import context
from alfx.data_structures import TimeStep
from alfx.engine.remote.policy_state import copy_tensors, look_up_buffers, policy_buffers, policy_tensors
from alfx.engine.rollout import Steps, rollout, start
from alfx.environments import rendering
from alfx.environments.alf_environment import AlfEnvironment, latest_episodes
from alfx.environments.seeding import derived_seed
from alfx.environments.utils import create_environment
from alfx.environments.wrapper_base import AlfEnvironmentBaseWrapper
from alfx.runs import building
from alfx.tensor_specs import NestedTensor
from alfx.trainers.acting.worker_process import load_config, set_arithmetic
from alfx.utils import random_state

_RESEEDING = 7919  # same as for new episodes of a resumed run with a single process


class RolloutWorker:
    """Actor that collects steps with given weights.

    Worker w of W has the environments ``w * E`` to ``(w + 1) * E - 1`` of the run, with the same random streams as in a
    single process and with global values of ``TimeStep.env_id``. Worker 0 samples the same actions as a run with a
    single process in which nothing else draws random numbers.

    Args:
        conf_file: resolved conf of the run.
        settings: settings of the learner:

            - the settings of :func:`~alfx.engine.remote.remote_unroll.worker_settings`;
            - 'start': 0 or missing for a new run; a different number each time the run is resumed, so that its random
              streams differ;
            - 'num_environments': E; if missing, the value in the conf;
            - 'first_environment': offset of the environment numbers; 0 if missing.
        worker_index: w.
        num_workers: W.

    Attributes:
        algorithm: root algorithm of this process.

    Raises:
        ConfError, EnvironmentLoadError: the same as in a run with a single process.
    """

    def __init__(self, conf_file: str, settings: dict[str, Any], worker_index: int = 0, num_workers: int = 1):
        if not 0 <= worker_index < num_workers:
            raise ValueError(f'worker_index must be in [0, {num_workers}), found {worker_index}')
        set_arithmetic(settings)
        config = load_config(conf_file, settings)
        seed, begin = config.random_seed, settings.get('start', 0)
        if begin and seed is not None:
            seed = (seed + _RESEEDING * begin) % 2**31
        count = settings.get('num_environments')
        if count is None and worker_index:
            count = create_environment(only_described=True).batch_size
        first = settings.get('first_environment', 0) + worker_index * (count or 0)
        with context.environments_from(first), rendering.wanted(False):
            options = {} if count is None else {'num_parallel_environments': count}
            self._env = _NumberedEnvironment(create_environment(seed=seed, **options), first)
        self.algorithm = building.create_algorithm(config, self._env, trains=False)
        if begin or first:
            random_state.set_random_seed(derived_seed(config.random_seed, 5, begin, first))
        self._owns_statistics = worker_index == 0
        self._statistics: set[str] = set()
        self._just_changed: set[str] = set()
        self._tensors, self._buffers = policy_tensors(self.algorithm), policy_buffers(self.algorithm)
        self._versions: dict[str, Any] = {}
        self._rollout_state: Any = None

    @property
    def batch_size(self) -> int:
        """Number E of environments of this worker."""
        return self._env.batch_size

    @property
    def env_seconds(self) -> float:
        """Duration of the latest step of the environments in seconds."""
        return self._env.seconds

    def collect(self, length: int) -> Steps:
        """Act for ``length`` steps.

        Returns:
            Steps ``[length, E, ...]`` on the CPU.

        Raises:
            EnvironmentStepError: an environment raised an error.
        """
        algorithm = self.algorithm
        if not self._versions:
            self._remember()
        if self._rollout_state is None:
            self._rollout_state = start(algorithm, self._env)
        keep_inputs = algorithm.capabilities.needs_unroll_inputs
        steps = rollout(algorithm, self._env, self._rollout_state, length, with_grad=False, bootstrap=False,
                        transformed=bool(algorithm.on_policy), keep_inputs=keep_inputs)
        if self._owns_statistics:
            changed = self._changed()
            self._statistics |= changed
            self._just_changed |= changed
        return steps

    def load(self, state: dict[str, torch.Tensor], global_counter: int, progresses: dict[str, float]) -> None:
        """Load weights for the next steps. Tensors in :meth:`statistics`, which acting itself changes, are kept.

        Args:
            state: weights, see ``policy_state``.
            global_counter: counter of the learner.
            progresses: training progress, which schedules depend on.

        Raises:
            ValueError: a tensor is missing or has a different shape.
        """
        context.set_global_counter(global_counter)
        context.update_all_progresses(progresses)
        look_up_buffers(self._tensors, self._buffers)
        copy_tensors(self._tensors, state, keep=self._statistics)
        self._remember()

    def take_statistics(self) -> set[str]:
        """Return the keys of the :meth:`statistics` that have changed since the last call."""
        changed, self._just_changed = self._just_changed, set()
        return changed

    def statistics(self) -> dict[str, torch.Tensor]:
        """Return copies of the tensors that acting has changed, by key; empty for workers other than 0."""
        return {key: self.tensor(key).clone() for key in self._statistics}

    def tensor(self, key: str) -> torch.Tensor:
        """Return a buffer of the algorithm, not a copy."""
        module, name = self._buffers[key]
        buffer: Any = module._buffers[name]
        return buffer

    def take_final_infos(self) -> list[dict[str, float]]:
        """Return the numbers in the final infos of the latest episodes that have ended since the last call."""
        infos = list(self._env.ended)
        self._env.ended.clear()
        return infos

    def close(self) -> None:
        """Close the environments."""
        self._env.close()

    def _changed(self) -> set[str]:
        """Return the keys of the buffers changed since the last call or since weights were loaded."""
        changed = set()
        for key, (module, name) in self._buffers.items():
            version = _version(module, name)
            if version != self._versions[key]:
                if version[0] != self._versions[key][0]:
                    self._tensors[key] = self.tensor(key)  # the buffer was replaced
                self._versions[key] = version
                changed.add(key)
        return changed

    def _remember(self) -> None:
        self._versions = {key: _version(module, name) for key, (module, name) in self._buffers.items()}


def _version(module: torch.nn.Module, name: str) -> tuple[int, int]:
    """Return a value that changes if a buffer is modified in place or replaced."""
    tensor: Any = module._buffers[name]
    return id(tensor), tensor._version


class _NumberedEnvironment(AlfEnvironmentBaseWrapper):
    """Wrapper for the environments ``first``, ``first + 1``, ... of a run that measures the time of a step.

    Attributes:
        seconds: duration of the latest step.
        ended: final infos of the latest episodes; the reader clears them.
    """

    def __init__(self, env: AlfEnvironment, first: int):
        super().__init__(env)
        self._first = first
        self.seconds = 0.0
        self.ended = latest_episodes(env.batch_size)

    def _outer(self, time_step: TimeStep, action: NestedTensor | None) -> TimeStep:
        return time_step._replace(env_id=time_step.env_id + self._first) if self._first else time_step

    def _step(self, action: NestedTensor) -> TimeStep:
        started = time.perf_counter()
        time_step = super()._step(action)
        self.seconds = time.perf_counter() - started
        self.ended.extend(self.final_infos().values())
        return time_step
