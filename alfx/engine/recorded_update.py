"""Updates played from a record: the same operations on the same numbers, without Python and autograd in between.

An update of small networks takes most of its time for deciding what to do: calls of modules, of distributions, of the
loss, and the bookkeeping of autograd and of memory. Where the operations are the same every time, they are recorded
after some updates, laid out (:mod:`alfx.engine.program`) and played from then on, forward and backward, one after the
other. The results are equal to the bit.
"""
import logging
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from alfx import context
from alfx.data_structures import BatchInfo, Experience, LossInfo
from alfx.engine.program import Program
from alfx.engine.recording import Batch, NotRecordableError, TrainInfo, UpdateRecorder
from alfx.engine.update import NonFiniteLossError, describe_non_finite
from alfx.engine.update_summaries import UpdateSummaries
from alfx.experience_replayers.batch_reader import Slot

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm

logger = logging.getLogger(__name__)
_UPDATES_BEFORE = 50  # recording takes as long as some hundred updates: a short run is over before that pays


class Player(Protocol):
    """An update of batches of one kind.

    Attributes:
        makes_step: whether it makes the steps of the optimizers as well.
        is_current: whether the tensors of the algorithm still are where it expects them.
    """

    makes_step: bool

    @property
    def is_current(self) -> bool: ...

    def __call__(self, leaves: Sequence[Tensor], /) -> Sequence[Tensor | None]:
        """From the leaves of a batch to the loss, priorities or None, and a gradient or None for each parameter."""


class RecordedUpdate:
    """Plays the updates of an algorithm, one record for each variant of its update and each layout of a batch.

    Args:
        algorithm: trains; ``has_fixed_update``.
        compute_train_info: as for :class:`~alfx.engine.recording.UpdateRecorder`.

    Attributes:
        can_summarize: whether it may be asked to play an update that writes summaries.
        takes_batches_in_place: whether a record is for batches in one place; otherwise for all of one layout.
    """

    can_summarize = False
    takes_batches_in_place = True

    def __init__(self, algorithm: 'Algorithm', compute_train_info: TrainInfo) -> None:
        self._algorithm = algorithm
        self._compute_train_info = compute_train_info
        self._recorder: UpdateRecorder | None = None
        self._records: dict[Any, Player] = {}
        self._current: set[Hashable] = set()  # the keys of records that are sure to be so in this iteration
        self._summaries: dict[Any, UpdateSummaries | None] = {}
        self._is_recordable = True
        self._counts: dict[Any, int] = {}

    def begin_iteration(self) -> None:
        """Call this once before a number of updates: each record is looked at once more, whether it is current."""
        self._current.clear()

    def __call__(self, experience: Experience, batch_info: BatchInfo | None,
                 slot: Slot | None = None) -> LossInfo | None:
        """One update, if it is time to play it. Call :meth:`begin_iteration` once before a number of updates.

        Args:
            experience: ``[T, B, ...]``.
            batch_info: where the batch came from; its importance weights apply.
            slot: holds ``experience``; other batches follow it there.

        Returns:
            ``loss``: a scalar; ``priority``: ``[B]`` or ``()``; where summaries are written ``scalar_loss`` and the
            means of ``extra`` as well. The next update overwrites them. ``None``: no parameter has been changed, since
            it is not time yet, the loss is not finite, or the record does not have the summaries.

        Raises:
            NonFiniteLossError: the loss is not finite, in this or another one of several ranks.
        """
        if not self._is_recordable:
            return None
        if self._recorder is None:
            self._recorder = UpdateRecorder(self._algorithm, self._compute_train_info)
        batch = self._recorder.batch(experience, batch_info, self.takes_batches_in_place, slot)
        play = self._records.get(batch.key)
        if play is None or not self._is_current(batch.key, play):
            play = self._record_if_due(self._recorder, batch)
        if play is None:
            return None
        is_summarized = context.should_record_summaries()
        summaries = self._summaries.get(batch.key) if is_summarized else None
        if is_summarized and summaries is None:
            return None
        results = play(batch.leaves)
        loss, priority = results[0], results[1]
        assert loss is not None
        if not math.isfinite(loss.item()):
            self._stop_ranks(experience)
            return None
        if not play.makes_step:
            self._step(results)
        elif is_summarized:
            self._set_gradients(results)
        loss_info = LossInfo(loss=loss, priority=() if priority is None else priority)
        if summaries is None:
            return loss_info
        return summaries.complete(loss_info, results[2 + len(self._recorder.params):])

    def _is_current(self, key: Hashable, play: Player) -> bool:
        if key not in self._current and play.is_current:
            self._current.add(key)
        return key in self._current

    def _set_gradients(self, results: Sequence[Tensor | None]) -> None:
        assert self._recorder is not None
        for param, grad in zip(self._recorder.params, results[2:]):
            param.grad = grad

    def _step(self, results: Sequence[Tensor | None]) -> None:
        """Let the optimizers make a step with the gradients among the results of an update."""
        self._set_gradients(results)
        if self._algorithm.gradient_averager is not None:
            self._algorithm.gradient_averager.average()
        for optimizer in self._algorithm.what_is_updated()[0]:
            optimizer.step()

    def _stop_ranks(self, experience: Experience) -> None:
        """Stop where several ranks train; one alone goes on step by step, and stops with the name of the bad loss."""
        averager = self._algorithm.gradient_averager
        if averager is not None:
            averager.report_bad_loss()
            raise NonFiniteLossError(self._what_is_not_finite(experience))

    def _what_is_not_finite(self, experience: Experience) -> str:
        """Which part of the loss of a batch is not finite; the other ranks are not asked: they have gone on."""
        with context.alone():
            loss_info = self._algorithm.calc_loss(self._compute_train_info(self._algorithm, experience))
        return describe_non_finite(self._algorithm, loss_info)

    def _record_if_due(self, recorder: UpdateRecorder, batch: Batch) -> Player | None:
        count = self._counts[batch.key] = self._counts.get(batch.key, 0) + 1
        if count <= self._updates_before():
            return None
        try:
            play = self._records[batch.key] = self._record(recorder, batch)
        except NotRecordableError as error:
            self._tell(error)
            self._is_recordable = False
            return None
        return play

    # What a subclass may do in another way ----------------------------------------------------------------------

    def _updates_before(self) -> int:
        """How many updates of a kind are made step by step before there is a record."""
        return _UPDATES_BEFORE

    def _record(self, recorder: UpdateRecorder, batch: Batch) -> Player:
        return Program(recorder.record_gradients(batch), recorder.tensors, batch.leaves, batch.num_reused)

    def _tell(self, error: NotRecordableError) -> None:
        logger.info('%s; it is made step by step, which takes longer', str(error).partition(':')[0])
