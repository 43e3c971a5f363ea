"""The update of an algorithm as a compiled function: losses, targets and gradients.

What one update computes is recorded (:mod:`alfx.engine.recording`) and compiled
(:mod:`alfx.engine.compiled_function`). On a GPU the function is captured as a CUDA graph
(:mod:`alfx.engine.cuda_graph`). On a CPU it makes the steps of Adam as well (:mod:`alfx.engine.compiled_step`); other
optimizers make their own.
"""
import logging
import time
from typing import TYPE_CHECKING, Any

from alfx import gin_utils
from alfx.engine.compiled_function import CompiledFunction
from alfx.engine.compiled_step import AdamStep
from alfx.engine.cuda_graph import captured
from alfx.engine.recorded_update import Player, RecordedUpdate
from alfx.engine.recording import Batch, NotRecordableError, TrainInfo, UpdateRecorder, has_fixed_update
from alfx.engine.update_summaries import can_summarize, record_summarized
from alfx.gin_utils.checks import problem_at

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm

logger = logging.getLogger(__name__)
# how summaries that look at the values of tensors fail while they are recorded
_REFUSALS = RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError


class CompiledUpdate(RecordedUpdate):
    """Compiles the update at its first batch and calls what came out from then on.

    The results differ from those of the plain update by rounding.

    Args:
        algorithm: trains.
        compute_train_info: as for :class:`~alfx.engine.recording.UpdateRecorder`.

    Raises:
        ConfError: the algorithm cannot be compiled.
    """

    takes_batches_in_place = False

    def __init__(self, algorithm: 'Algorithm', compute_train_info: TrainInfo) -> None:
        check_compilable(algorithm)
        super().__init__(algorithm, compute_train_info)
        self.can_summarize = can_summarize(algorithm)

    def _updates_before(self) -> int:
        return 0

    def _record(self, recorder: UpdateRecorder, batch: Batch) -> Player:
        started = time.monotonic()
        logger.info('compiling the update of %s; this takes some seconds, once', self._algorithm.name)
        step = AdamStep.of(self._algorithm, recorder)
        graph = self._graph(recorder, batch, step)
        compiled = CompiledFunction(graph, recorder.tensors, batch.leaves, step)
        logger.info('compiled in %.0f seconds', time.monotonic() - started)
        if compiled.asks_other_ranks:
            logger.info('the update of %s asks the other processes, so that it is no CUDA graph', self._algorithm.name)
            return compiled
        return captured(compiled, recorder.tensors, batch.leaves, self._algorithm.name)

    def _graph(self, recorder: UpdateRecorder, batch: Batch, step: AdamStep | None) -> Any:
        """What is compiled, with the summaries of the update if that is possible."""
        if self.can_summarize:
            try:
                graph, self._summaries[batch.key] = record_summarized(recorder, batch, step)
                return graph
            except _REFUSALS as error:  # what is really wrong is met again below
                logger.info('updates of %s that write summaries are made step by step: %s', self._algorithm.name,
                            str(error).partition('\n')[0])
        self._summaries[batch.key] = None
        return recorder.record_gradients(batch, step=step)

    def _tell(self, error: NotRecordableError) -> None:
        logger.warning('TrainerConfig.compile = True has no effect: %s', error)


def check_compilable(algorithm: 'Algorithm') -> None:
    """Refuse what cannot be compiled, before anything is trained.

    Raises:
        ConfError: the algorithm's update is not the same operations every time.
    """
    if not has_fixed_update(algorithm):
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'compile', f'= True is not possible with {algorithm.name}: its update is not the same '
            'operations every time', 'leave it at False')])
