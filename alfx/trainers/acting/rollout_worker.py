"""Acting in another process: environments and algorithm of a run, made anew from the conf in its run folder.

Here is what every such process does, whoever starts it and however its steps travel: ``algorithms/async_unroller.py``
has one on this machine, Ray has many anywhere.
"""
import time
from typing import Any

import torch

from alfx import context
from alfx.data_structures import TimeStep
from alfx.engine.remote.policy_state import copy_tensors, policy_buffers, policy_tensors
from alfx.engine.rollout import Steps, rollout, start
from alfx.environments.alf_environment import AlfEnvironment, latest_episodes
from alfx.environments.seeding import derived_seed
from alfx.environments.utils import create_environment
from alfx.environments.wrapper_base import AlfEnvironmentBaseWrapper
from alfx.tensor_specs import NestedTensor
from alfx.runs import building
from alfx.utils import random_state
from alfx.trainers.acting.worker_process import load_config, set_arithmetic

_RESEEDING = 7919  # as where a run of one process goes on with new episodes


class RolloutWorker:
    """Acts with the weights that it is given.

    Worker w of W has the environments ``w * E`` to ``(w + 1) * E - 1``, with the random streams that these would have
    in one process, and ``TimeStep.env_id`` counted through. Worker 0 draws the actions that a run of one process would
    draw if nothing else in it drew numbers.

    Args:
        conf_file: the conf that everything is made from: one in which everything is resolved.
        settings: what the learner has decided:

            - those of ``engine.remote.unroll.worker_settings``;
            - 'start': 0 or left out for a new run; another number for every time that a run goes on, so that its random
              streams are new ones;
            - 'num_environments': E; left out: what the conf says;
            - 'first_environment': added to the number of every environment; 0 if left out.
        worker_index: w.
        num_workers: W.

    Raises:
        ConfError, EnvironmentLoadError: as in a run of one process.
    """

    def __init__(self, conf_file: str, settings: dict[str, Any], worker_index: int = 0, num_workers: int = 1):
        if not 0 <= worker_index < num_workers:
            raise ValueError(f'worker_index has to be in [0, {num_workers}), found {worker_index}')
        set_arithmetic(settings)
        config = load_config(conf_file, settings)
        seed, begin = config.random_seed, settings.get('start', 0)
        if begin and seed is not None:
            seed = (seed + _RESEEDING * begin) % 2**31
        count = settings.get('num_environments')
        if count is None and worker_index:
            count = create_environment(only_described=True).batch_size
        first = settings.get('first_environment', 0) + worker_index * (count or 0)
        with context.environments_from(first):
            options = {} if count is None else {'num_parallel_environments': count}
            self._env = _NumberedEnvironment(create_environment(seed=seed, **options), first)
        self._algorithm = building.create_algorithm(config, self._env, trains=False)
        if begin or first:
            random_state.set_random_seed(derived_seed(config.random_seed, 5, begin, first))
        self._owns_statistics = worker_index == 0
        self._statistics: set[str] = set()
        self._just_changed: set[str] = set()
        self._tensors, self._buffers = policy_tensors(self._algorithm), policy_buffers(self._algorithm)
        self._versions: dict[str, Any] = {}
        self._position: Any = None

    @property
    def batch_size(self) -> int:
        """E, the number of environments of this worker."""
        return self._env.batch_size

    @property
    def algorithm(self) -> Any:
        """The root algorithm of this process."""
        return self._algorithm

    @property
    def env_seconds(self) -> float:
        """How long the latest step of the environments took."""
        return self._env.seconds

    def collect(self, length: int) -> Steps:
        """Act for ``length`` steps.

        Returns:
            ``[length, E, ...]``, on the CPU.

        Raises:
            EnvironmentStepError: an environment raised.
        """
        algorithm = self._algorithm
        if not self._versions:
            self._remember()
        if self._position is None:
            self._position = start(algorithm, self._env)
        keep_inputs = algorithm.capabilities.needs_unroll_inputs
        steps = rollout(algorithm, self._env, self._position, length, with_grad=False, bootstrap=False,
                        transformed=bool(algorithm.on_policy), keep_inputs=keep_inputs)
        if self._owns_statistics:
            changed = self._changed()
            self._statistics |= changed
            self._just_changed |= changed
        return steps

    def load(self, state: dict[str, torch.Tensor], global_counter: int, progresses: dict[str, float]) -> None:
        """Act with these weights from the next step on; :meth:`statistics` are left as acting has made them.

        Args:
            state: as of ``policy_state``.
            global_counter: the learner's counter.
            progresses: what schedules depend on.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        context.set_global_counter(global_counter)
        context.update_all_progresses(progresses)
        copy_tensors(self._tensors, state, keep=self._statistics)
        self._remember()

    def take_statistics(self) -> set[str]:
        """The keys of those of :meth:`statistics` that have changed since the last call."""
        changed, self._just_changed = self._just_changed, set()
        return changed

    def statistics(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors that acting itself has changed, by key; worker 0 alone has any."""
        return {key: self.tensor(key).clone() for key in self._statistics}

    def tensor(self, key: str) -> torch.Tensor:
        """A buffer of the algorithm, itself."""
        module, name = self._buffers[key]
        buffer: Any = module._buffers[name]
        return buffer

    def take_final_infos(self) -> list[dict[str, float]]:
        """The numbers in the infos of the latest episodes that have ended since the last call."""
        infos = list(self._env.ended)
        self._env.ended.clear()
        return infos

    def close(self) -> None:
        """Close the environments."""
        self._env.close()

    def _changed(self) -> set[str]:
        """The keys of the buffers that have been written to since this was last asked, or weights were loaded."""
        changed = set()
        for key, (module, name) in self._buffers.items():
            version = _version(module, name)
            if version != self._versions[key]:
                if version[0] != self._versions[key][0]:
                    self._tensors[key] = self.tensor(key)  # it is another one
                self._versions[key] = version
                changed.add(key)
        return changed

    def _remember(self) -> None:
        self._versions = {key: _version(module, name) for key, (module, name) in self._buffers.items()}


def _version(module: torch.nn.Module, name: str) -> tuple[int, int]:
    """What differs after a buffer has been written to or replaced."""
    tensor: Any = module._buffers[name]
    return id(tensor), tensor._version


class _NumberedEnvironment(AlfEnvironmentBaseWrapper):
    """The environments ``first``, ``first + 1``, ... of a run; takes the time.

    Attributes:
        seconds: how long the latest step took.
        ended: final infos of the latest episodes; whoever looks at them clears them.
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
