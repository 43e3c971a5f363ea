"""Forms of a computation, each wrapped round the one below it: faster, able to do less, and held against it.

``Replayed(Eager)``, ``Compiled(Replayed)`` and ``Captured(Compiled)`` differ in how a record is carried out
(``_make``) and in what they leave to the form below. All have this in common:

- A record is made for each variant and layout of a request, once that has been asked for a number of times.
- At its first call, at the second, fourth, eighth, ..., and at every update that is made step by step anyway since it
  writes summaries, the form below computes as well, from the same random numbers and buffers, and the results are
  compared. So what changes between calls without a record knowing of it, such as a number kept in Python, is noticed:
  at once if it changes at each call.
- What differs, or cannot be made, is not used any more from then on, and the log says why.
"""
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx.engine.plan.verification import (Parts, State, record_collectives, replay_collectives, difference,
                                           is_check_due, no_collectives, tolerance_of)
from alfx.engine.plan.program import Program
from alfx.engine.plan.recorder import NotRecordableError, Record, Recorder, first_line

logger = logging.getLogger(__name__)

Play = Callable[[list[Tensor]], Sequence[Tensor | None]]


class WarmUp(NamedTuple):
    """How often a form leaves each variant and layout of a request to the form below before it makes a record.

    Recording takes as long as some hundred updates: a short run is over before that pays. Who asks for compiling trains
    for long: the sooner an update is compiled the better. Rare updates are those of which an iteration makes one: as
    many as take the time of a record pass before there is one.
    """

    updates: int = 50
    calls: int = 500
    compiled_updates: int = 0
    compiled_calls: int = 100
    captured_updates: int = 1
    rare_updates: int = 5000


WARM_UP = WarmUp()


class UnsupportedError(RuntimeError):
    """A record cannot be carried out in some form."""


class GraphRequest(NamedTuple):
    """What is asked for, flat.

    Attributes:
        leaves: all tensors that change from request to request.
        tree: their structure.
        key: requests with the same key are the same operations on tensors of the same layout.
        num_reused: the first so many leaves are the same tensors in each request with that key, with other values.
    """

    leaves: list[Tensor]
    tree: Any
    key: Hashable
    num_reused: int = 0


class GraphTask:
    """What is computed: an update, or a policy. The forms know no more of it than this.

    Attributes:
        recorder: of what it calls.
    """

    recorder: Recorder

    def request(self, asked: Any, in_place: bool) -> GraphRequest:
        """What is asked for, flat.

        With ``in_place`` it is taken from where it is, if others are going to be there as well; otherwise it may be
        anywhere, but without gaps between its numbers.
        """
        raise NotImplementedError

    def record(self, request: GraphRequest) -> Record:
        """What is computed, as a record from ``request.leaves`` to a list of tensors and ``None``."""
        raise NotImplementedError

    def parts(self, answer: Any) -> Parts:
        """The parts of an answer, with their names, in the order in which a record returns them."""
        raise NotImplementedError

    def answer(self, results: Sequence[Tensor | None], request: GraphRequest) -> Any:
        """The answer that a record has given, whose results the next one overwrites."""
        raise NotImplementedError

    def must_be_eager(self) -> bool:
        """Whether Python code has to see this request, as where summaries are written."""
        return False

    def is_comparable(self, answer: Any) -> bool:
        """Whether a form can be held against an answer."""
        return True


@dataclass(eq=False)
class CachedGraph:
    """A record, how to carry it out, and how often that has been done."""

    record: Record
    play: Play
    count: int = 0


class Backend:
    """Base of all forms but the first, which is a function that computes step by step.

    Args:
        below: what to fall back to and to be compared with.
        task: what is computed.
        warm_up: how often what is below computes first.
    """

    verb = ''  # for messages
    _is_exact = False  # whether results are those of the form below to the bit
    _takes_in_place = False

    def __init__(self, below: Callable[[Any], Any], task: GraphTask, warm_up: int) -> None:
        self.below, self.task, self._warm_up = below, task, warm_up
        self._kept: dict[Hashable, CachedGraph] = {}
        self._counts: dict[Hashable, int] = {}
        self.has_stopped = False

    def __call__(self, asked: Any) -> Any:
        """The answer, to the bit or up to rounding that of the form below."""
        if self.has_stopped:
            return self.below(asked)
        task = self.task
        request = task.request(asked, self._takes_in_place)
        kept = self._kept.get(request.key)
        if kept is not None and not kept.record.is_current:
            if kept.count < self._warm_up:  # its tensors move often: not worth a record each time
                self._counts[request.key] = 0
            kept = None
            del self._kept[request.key]
        if task.must_be_eager():
            return self.below(asked) if kept is None else self._compared(asked, request, kept, False)
        if kept is None:
            kept = self._make_if_due(request)
        if kept is None:
            return self.below(asked)
        kept.count += 1
        if is_check_due(kept.count):
            return self._compared(asked, request, kept, True)
        return task.answer(kept.play(request.leaves), request)

    @property
    def num_records(self) -> int:
        """How many records it has."""
        return len(self._kept)

    def _stop(self, reason: str, with_below: bool = False) -> None:
        """Leave everything to the form below from now on, or ``with_below`` to the slowest one, and say so."""
        form = self
        form.has_stopped = True
        while with_below and isinstance(form.below, Backend):
            form = form.below
            form.has_stopped = True
        self._kept.clear()
        verb = form.below.verb if isinstance(form.below, Backend) else 'computed step by step'
        logger.warning('%s is %s from now on, which takes longer than if it were %s: %s', self.task.recorder.what,
                       verb, self.verb, reason)

    def _make(self, request: GraphRequest) -> CachedGraph | None:
        """A record and how to carry it out; ``None``: not yet.

        Raises:
            NotRecordableError: there can be no record.
            UnsupportedError: it cannot be carried out in this form.
        """
        raise NotImplementedError

    def _make_if_due(self, request: GraphRequest) -> CachedGraph | None:
        count = self._counts[request.key] = self._counts.get(request.key, 0) + 1
        if count <= self._warm_up:
            return None
        kept = None
        try:
            with no_collectives(), torch.random.fork_rng():
                kept = self._make(request)
        except NotRecordableError as error:
            self._stop(f'it cannot be recorded: {error}', with_below=True)
        except UnsupportedError as error:
            self._stop(str(error))
        if kept is not None:
            self._kept[request.key] = kept
        return kept

    def _compared(self, asked: Any, request: GraphRequest, kept: CachedGraph, prefers_own: bool) -> Any:
        """The answer of the form below, or with ``prefers_own`` that of this one if they agree."""
        task, record = self.task, kept.record
        names, written = [name for name, _ in record.written], [x for _, x in record.written]
        devices = {x.device for x in (*record.fixed, *request.leaves)}
        answers: list[Tensor] = []
        before, versions = State(written, devices), record.versions()
        with record_collectives(answers):
            expected = self.below(asked)
        missed = {name for name, version in record.versions().items() if versions[name] != version} - set(names)
        after = State(written, devices)
        if not task.is_comparable(expected):
            return expected
        before.put_back()
        parts = [(name, None if x is None else x.detach().clone()) for name, x in task.parts(expected)]
        try:
            with replay_collectives(answers):
                results = kept.play(request.leaves)
        except Exception as error:  # noqa: BLE001 - whatever it is, the form below has done the work
            after.put_back()
            self._stop(f'{type(error).__name__}: {first_line(error)}')
            return expected
        own, tolerance = State(written, devices), tolerance_of(record, self._is_exact)
        if own.has_same_streams(after):
            found = [(name, x) for (name, _), x in zip(parts, results, strict=True)]
            reason = (f'{min(missed).removeprefix("read.0.")} is written to' if missed else
                      difference([*parts, *after.parts(names)], [*found, *own.parts(names)], tolerance))
        else:  # summaries have drawn some as well: nothing can be compared this time
            reason = 'it draws other random numbers' if prefers_own else None
        if reason is None and prefers_own:
            return task.answer(results, request)
        after.put_back()
        if reason is not None:
            self._stop(f'it would be another one: {reason}')
        return expected


class Replayed(Backend):
    """Plays records: the same operations on the same numbers, without Python and autograd in between.

    An update of small networks takes most of its time for deciding what to do: calls of modules, of distributions, of
    the loss, and the bookkeeping of autograd and of memory. The results are equal to the bit.
    """

    verb = 'played from a record'
    _is_exact = True
    _takes_in_place = True

    def _make(self, request: GraphRequest) -> CachedGraph:
        record = self.task.record(request)
        try:
            program = Program(record.graph, record.fixed, request.leaves, request.num_reused)
        except Exception as error:  # of any kind: an operation that is called in a way the program does not know
            raise UnsupportedError(f'it cannot be laid out: {type(error).__name__}: {first_line(error)}') from error
        return CachedGraph(record, program)
