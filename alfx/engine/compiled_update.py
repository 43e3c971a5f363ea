"""The update of an algorithm as one compiled graph: losses, targets, gradients, clipping, the optimizer's step.

What one update computes is recorded (:mod:`alfx.engine.recording`) together with the step of Adam; ``torch.compile``'s
backend turns the record into one function.
"""
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alfx import gin_utils
from alfx.data_structures import BatchInfo, Experience, LossInfo
from alfx.engine.recording import TrainInfo, UpdateRecorder, has_fixed_update
from alfx.gin_utils.checks import problem_at
from alfx.optimizers.functional_adam import AdamState, adam_step, check_optimizer

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm

logger = logging.getLogger(__name__)

_HINT = 'Run with TrainerConfig.compile = False to see which part of the loss it is'


class CompiledUpdate:
    """Compiled updates of one algorithm, one for each variant of its update and each shape of a batch.

    Args:
        algorithm: trains; its optimizers are ``Adam`` or ``AdamW``.
        compute_train_info: as for :class:`~alfx.engine.recording.UpdateRecorder`.

    Raises:
        ConfError: the algorithm or an optimizer cannot be compiled.
    """

    def __init__(self, algorithm: 'Algorithm', compute_train_info: TrainInfo) -> None:
        check_compilable(algorithm)
        self._name = algorithm.name
        self._optimizers = algorithm.what_is_updated()[0]
        self._states: list[AdamState] = [AdamState(optimizer) for optimizer in self._optimizers]
        self._recorder = UpdateRecorder(algorithm, compute_train_info)
        self._graphs: dict[Any, Callable[..., list[Tensor]]] = {}

    def __call__(self, experience: Experience, batch_info: BatchInfo | None) -> LossInfo:
        """One update.

        Args:
            experience: ``[T, B, ...]``.
            batch_info: where the batch came from; its importance weights apply.

        Returns:
            ``loss``: a scalar; ``priority``: ``[B]`` or ``()``.

        Raises:
            NonFiniteLossError: the loss is not finite; no parameter has been changed.
        """
        batch = self._recorder.batch(experience, batch_info, contiguous=True)
        if not all(state.is_current for state in self._states):
            self._states = [AdamState(optimizer) for optimizer in self._optimizers]
        rates = [rate for state in self._states for rate in state.learning_rates()]
        state = [x for adam in self._states for x in adam.tensors]
        inputs = [x.detach() for x in (*self._recorder.tensors, *state, *rates, *batch.leaves)]
        graph = self._graphs.get(batch.key)
        if graph is None:
            graph = self._graphs[batch.key] = self._compile(inputs, len(state), len(rates), batch.tree)
        with torch.no_grad():
            loss, *priority = graph(*inputs)
        self._recorder.require_finite(loss, _HINT)
        return LossInfo(loss=loss, priority=priority[0] if priority else ())

    def _compile(self, inputs: list[Tensor], num_state: int, num_rates: int, tree: Any) -> Callable[..., list[Tensor]]:
        """Record an update, then compile the record."""
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx

        def update(*flat: Tensor) -> list[Tensor]:
            return self._update(list(flat), num_state, num_rates, tree)

        started = time.monotonic()
        logger.info('compiling the update of %s; this takes some seconds, once', self._name)
        graph = self._recorder.record(update, inputs)
        # the same random numbers as without compiling, from the generator that a checkpoint saves
        with inductor_config.patch(fallback_random=True):
            compiled: Any = compile_fx(graph, inputs)
        with torch.random.fork_rng(), torch.no_grad():
            compiled(*(x.clone() for x in inputs))  # the backend does its work at the first call
        logger.info('compiled in %.0f seconds', time.monotonic() - started)
        return compiled

    def _update(self, flat: list[Tensor], num_state: int, num_rates: int, tree: Any) -> list[Tensor]:
        """What is recorded: ``flat`` are all inputs, of which parameters and states are changed in place."""
        count = len(self._recorder.tensors)
        tensors, state = flat[:count], flat[count:count + num_state]
        rates, leaves = flat[count + num_state:count + num_state + num_rates], flat[count + num_state + num_rates:]
        loss, priority, grads = self._recorder.gradients(tensors, leaves, tree)
        params = [tensors[i] for i in self._recorder.trained]
        is_good = torch.isfinite(loss)
        for adam in self._states:
            adam_step(adam, params[:len(adam.params)], grads[:len(adam.params)], state[:len(adam.tensors)],
                      rates[:adam.num_groups], is_good)
            params, grads = params[len(adam.params):], grads[len(adam.params):]
            state, rates = state[len(adam.tensors):], rates[adam.num_groups:]
        return [loss, priority] if isinstance(priority, Tensor) else [loss]


def check_compilable(algorithm: 'Algorithm') -> None:
    """Refuse what cannot be compiled, before anything is trained.

    Raises:
        ConfError: the algorithm's update is not the same operations every time, or an optimizer is not Adam or AdamW.
    """
    if not has_fixed_update(algorithm):
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'compile', f'= True is not possible with {algorithm.name}: its update is not the same '
            'operations every time', 'leave it at False')])
    for optimizer in algorithm.optimizers():
        check_optimizer(optimizer)
