"""Exchange of steps and weights between the learner and an actor process on the same machine, in shared memory.

Steps go to the learner through a :class:`~alfx.engine.remote.shared_tensors.StepRing`, together with tensors that
acting changes (statistics of normalizers, counts). Weights go to the actor. Both processes hold the same object: the
learner creates it and starts the actor with it.
"""
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from alfx import context, nest
from alfx.engine import probe
from alfx.engine.contract import Acts
from alfx.engine.remote.policy_state import policy_buffers, policy_tensors
from alfx.engine.remote.shared_tensors import Published, StepRing
from alfx.engine.rollout import Steps, metric_fields
from alfx.tensor_specs import TensorSpec

_STOP, _RECORD, _RECORD_REQUESTS = 0, 1, 2  # indices of: stop, summary step, number of summary requests


class Timing(NamedTuple):
    """Durations and ages of steps; float64 ``[T]`` each.

    Attributes:
        env_step: seconds in the step of the environments.
        step: seconds of the whole step, without waiting for space in the queue.
        global_counter: the learner's counter when it published the weights that were used.
    """

    env_step: Any
    step: Any
    global_counter: Any


class UnrollChannel:
    """Shared memory for the steps, weights and statistics of one algorithm.

    Args:
        algorithm: the learner's root algorithm.
        env: environment with ``batch_size`` and ``time_step_spec``.
        queue_size: maximum number of steps that wait.
        mp_context: multiprocessing context that starts the other process.

    Raises:
        ConfError: there is too little shared memory.
    """

    def __init__(self, algorithm: Acts, env: Any, queue_size: int, mp_context: Any):
        spec = probe.steps_spec(algorithm, env.time_step_spec())
        self._with_env_steps = bool(algorithm.on_policy)
        self._with_inputs = spec.inputs is not None and not algorithm.on_policy
        record = self._record(spec, Timing(*[TensorSpec((), torch.float64)] * len(Timing._fields)))
        leaves, self._structure = nest.flatten_with_structure(record)
        paths = [path for path, _ in nest.flatten_with_path(record)]
        batch = env.batch_size
        self._leaves = [leaf if path.startswith('2.') else TensorSpec((batch, *leaf.shape), leaf.dtype)
                        for path, leaf in zip(paths, leaves)]
        self._paths = paths
        self.ring = StepRing(self._leaves, queue_size, mp_context)
        tensors, buffers = policy_tensors(algorithm), policy_buffers(algorithm)
        self._weight_keys, self._statistic_keys = list(tensors), list(buffers)
        self._progress_names = sorted(context.get_all_progresses())
        purpose = 'the exchange of weights with the unroll process'
        self._weights = Published([TensorSpec(x.shape, x.dtype) for x in tensors.values()] +
                                  [TensorSpec((1 + len(self._progress_names), ), torch.float64)], purpose, mp_context)
        self._statistics = Published([TensorSpec(tensors[key].shape, tensors[key].dtype) for key in buffers] +
                                     [TensorSpec((len(buffers), ), torch.bool)], purpose, mp_context)
        self._requests = mp_context.RawArray('q', 3)
        self._record_requests_seen = 0

    def _record(self, steps: Steps, timing: Timing) -> tuple:
        """Return the nest that goes through the ring, without duplicates."""
        return (steps.experience, (steps.env_steps if self._with_env_steps else (),
                                   steps.inputs if self._with_inputs else ()), timing)

    # Learner ---------------------------------------------------------------------------------------------------

    def get(self, out: Sequence[torch.Tensor], first: int, at_most: int, timeout: float) -> int:
        """Take steps from the ring; see :meth:`StepRing.get <alfx.engine.remote.shared_tensors.StepRing.get>`."""
        return self.ring.get(out, first, at_most, timeout)

    def steps_of(self, leaves: Sequence[torch.Tensor], keeps_inputs: bool) -> tuple[Steps, Timing]:
        """Return the steps ``[T, B, ...]`` with leaves that came through the ring.

        Args:
            leaves: ``[T, ...]``, as from ``StepRing.empty_steps``.
            keeps_inputs: whether the algorithm needs the transformed time steps.
        """
        experience, (env_steps, inputs), timing = nest.unflatten(self._structure, leaves)
        if not self._with_env_steps:
            env_steps = metric_fields(experience.time_step)
        if not keeps_inputs:
            inputs = None
        elif not self._with_inputs:
            inputs = experience.time_step
        return Steps(experience, env_steps, inputs), Timing(*timing)

    def publish_weights(self, tensors: dict[str, torch.Tensor], global_counter: int, progresses: dict[str, float],
                        check_peers: Callable[[], None]) -> None:
        """Publish new weights for the actor.

        Args:
            tensors: result of ``policy_tensors``.
            global_counter: the learner's counter.
            progresses: progress values that schedules depend on.
            check_peers: called periodically while waiting; may raise an error to end the wait.
        """
        numbers = torch.tensor([float(global_counter), *(progresses[name] for name in self._progress_names)],
                               dtype=torch.float64)

        def write(shared: list[torch.Tensor]) -> None:
            with torch.no_grad():
                torch._foreach_copy_(shared[:-1], [tensors[key] for key in self._weight_keys])
            shared[-1].copy_(numbers)

        self._weights.publish(write, check_peers)

    def take_statistics(self, write: Callable[[dict[str, torch.Tensor]], None],
                        check_peers: Callable[[], None]) -> None:
        """Call ``write(tensors)`` with the tensors that acting has changed, by key, if there are new ones."""

        def read(shared: list[torch.Tensor]) -> None:
            is_changed = shared[-1].tolist()
            write({key: shared[i] for i, key in enumerate(self._statistic_keys) if is_changed[i]})

        self._statistics.take(read, check_peers)

    def request_summaries(self, step: int) -> None:
        """Request that the actor records summaries in its next step and writes them at ``step``."""
        self._requests[_RECORD] = step
        self._requests[_RECORD_REQUESTS] += 1

    def stop(self) -> None:
        """Ask the actor process to end."""
        self._requests[_STOP] = 1

    # Actor process ---------------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Return whether the actor process has been asked to end."""
        return bool(self._requests[_STOP])

    def take_summary_request(self) -> int | None:
        """Return the step at which to write the summaries of the next environment step; ``None`` for no summaries."""
        requests = self._requests[_RECORD_REQUESTS]
        if requests == self._record_requests_seen:
            return None
        self._record_requests_seen = requests
        return self._requests[_RECORD]

    def take_weights(self, load: Callable[[dict[str, torch.Tensor], int, dict[str, float]], None],
                     check_peers: Callable[[], None]) -> bool:
        """Call ``load(tensors, global_counter, progresses)`` if there are new weights; return whether there are."""

        def read(shared: list[torch.Tensor]) -> None:
            counter, *progresses = shared[-1].tolist()
            load(dict(zip(self._weight_keys, shared)), int(counter), dict(zip(self._progress_names, progresses)))

        return self._weights.take(read, check_peers)

    def put(self, steps: Steps, timing: Timing) -> None:
        """Put one step, ``[1, B, ...]`` and ``[1]``, into the ring, which has space for it.

        Raises:
            ValueError: the step does not match the specs of the learner.
        """
        leaves = [leaf[0] for leaf in nest.flatten(self._record(steps, timing))]
        if self.ring.is_untouched:
            self._check(leaves)
        self.ring.put(leaves)

    def publish_statistics(self, changed: Collection[str], tensor: Callable[[str], torch.Tensor],
                           check_peers: Callable[[], None]) -> None:
        """Publish the tensors that acting has changed: ``tensor(key)`` for each key in ``changed``."""

        def write(shared: list[torch.Tensor]) -> None:
            for key in changed:
                index = self._statistic_keys.index(key)
                shared[index].copy_(tensor(key))
                shared[-1][index] = True

        if changed:
            with torch.no_grad():
                self._statistics.publish(write, check_peers)

    def _check(self, leaves: Sequence[torch.Tensor]) -> None:
        found = [TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
        if found != self._leaves:
            wrong = [f'{path}: expected {a}, found {b}' for path, a, b in zip(self._paths, self._leaves, found)
                     if a != b] or [f'expected {len(self._leaves)} tensors, found {len(found)}']
            raise ValueError('a step of the environment does not match its specs:\n  ' + '\n  '.join(wrong))
