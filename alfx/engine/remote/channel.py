"""What travels between the learner and a process that acts on the same machine, in shared memory.

Steps go one way through a :class:`~alfx.engine.remote.shared_tensors.StepRing`, with what acting itself changes
(statistics of normalizers, counts); weights go the other way. Both sides hold the same object: the learner makes it and
starts the other process with it.
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

_STOP, _RECORD, _RECORD_ORDERS = 0, 1, 2  # what the learner's orders are


class Timing(NamedTuple):
    """How long steps took, and how old they are; float64 ``[T]`` each.

    Attributes:
        env_step: seconds for stepping the environments.
        step: seconds for all of a step, waiting for room in the queue not included.
        global_counter: the learner's counter when it handed over the weights that acted.
    """

    env_step: Any
    step: Any
    global_counter: Any


class UnrollChannel:
    """Shared memory for the steps, weights and statistics of one algorithm.

    Args:
        algorithm: the learner's root algorithm.
        env: has ``batch_size`` and ``time_step_spec``.
        queue_size: how many steps may wait.
        mp_context: the multiprocessing context that starts the other process.

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
        self._orders = mp_context.RawArray('q', 3)
        self._record_orders_seen = 0

    def _record(self, steps: Steps, timing: Timing) -> tuple:
        """What goes through the ring: nothing twice."""
        return (steps.experience, (steps.env_steps if self._with_env_steps else (),
                                   steps.inputs if self._with_inputs else ()), timing)

    # Learner ---------------------------------------------------------------------------------------------------

    def get(self, out: Sequence[torch.Tensor], first: int, at_most: int, timeout: float) -> int:
        """Take steps; see ``StepRing.get``."""
        return self.ring.get(out, first, at_most, timeout)

    def steps_of(self, leaves: Sequence[torch.Tensor], keeps_inputs: bool) -> tuple[Steps, Timing]:
        """The steps ``[T, B, ...]`` whose leaves came through the ring.

        Args:
            leaves: ``[T, ...]``, as of ``StepRing.empty_steps``.
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
                        look_around: Callable[[], None]) -> None:
        """Hand on weights.

        Args:
            tensors: as of ``policy_tensors``.
            global_counter: the learner's counter.
            progresses: what schedules depend on.
            look_around: called now and then while waiting; may raise.
        """
        numbers = torch.tensor([float(global_counter), *(progresses[name] for name in self._progress_names)],
                               dtype=torch.float64)

        def write(shared: list[torch.Tensor]) -> None:
            with torch.no_grad():
                torch._foreach_copy_(shared[:-1], [tensors[key] for key in self._weight_keys])
            shared[-1].copy_(numbers)

        self._weights.publish(write, look_around)

    def take_statistics(self, write: Callable[[dict[str, torch.Tensor]], None],
                        look_around: Callable[[], None]) -> None:
        """Call ``write(tensors)`` with what acting has changed, by key, if there is something new."""

        def read(shared: list[torch.Tensor]) -> None:
            is_changed = shared[-1].tolist()
            write({key: shared[i] for i, key in enumerate(self._statistic_keys) if is_changed[i]})

        self._statistics.take(read, look_around)

    def ask_for_summaries(self, step: int) -> None:
        """Let the next step that is taken be one that records summaries, and writes them at ``step``."""
        self._orders[_RECORD] = step
        self._orders[_RECORD_ORDERS] += 1

    def stop(self) -> None:
        """Let the other process end."""
        self._orders[_STOP] = 1

    # The process that acts -------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Whether the process shall end."""
        return bool(self._orders[_STOP])

    def take_summary_order(self) -> int | None:
        """Where to write the summaries of the next step that is taken, ``None`` for no summaries."""
        orders = self._orders[_RECORD_ORDERS]
        if orders == self._record_orders_seen:
            return None
        self._record_orders_seen = orders
        return self._orders[_RECORD]

    def take_weights(self, load: Callable[[dict[str, torch.Tensor], int, dict[str, float]], None],
                     look_around: Callable[[], None]) -> bool:
        """Call ``load(tensors, global_counter, progresses)`` if there are new weights; returns whether there are."""

        def read(shared: list[torch.Tensor]) -> None:
            counter, *progresses = shared[-1].tolist()
            load(dict(zip(self._weight_keys, shared)), int(counter), dict(zip(self._progress_names, progresses)))

        return self._weights.take(read, look_around)

    def put(self, steps: Steps, timing: Timing) -> None:
        """Put in one step, ``[1, B, ...]`` and ``[1]``, for which there is room.

        Raises:
            ValueError: it is not what the learner expects.
        """
        leaves = [leaf[0] for leaf in nest.flatten(self._record(steps, timing))]
        if self.ring.is_untouched:
            self._check(leaves)
        self.ring.put(leaves)

    def publish_statistics(self, changed: Collection[str], tensor: Callable[[str], torch.Tensor],
                           look_around: Callable[[], None]) -> None:
        """Hand on what acting has changed: ``tensor(key)`` for each of the keys ``changed``."""

        def write(shared: list[torch.Tensor]) -> None:
            for key in changed:
                index = self._statistic_keys.index(key)
                shared[index].copy_(tensor(key))
                shared[-1][index] = True

        if changed:
            with torch.no_grad():
                self._statistics.publish(write, look_around)

    def _check(self, leaves: Sequence[torch.Tensor]) -> None:
        found = [TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
        if found != self._leaves:
            wrong = [f'{path}: expected {a}, found {b}' for path, a, b in zip(self._paths, self._leaves, found)
                     if a != b] or [f'expected {len(self._leaves)} tensors, found {len(found)}']
            raise ValueError('a step is not what the trainer expects; the environment gives something else than its '
                             'specs say:\n  ' + '\n  '.join(wrong))
