"""Forms of a computation, each wrapped round the one below it: faster, able to do less, and held against it.

``Played(Eager)``, ``Compiled(Played)`` and ``Captured(Compiled)`` differ in how a record is carried out (``_make``) and
in what they leave to the form below. All have this in common:

- A record is made for each variant and layout of a request, once that has been asked for a number of times.
- At its first call, at the second, fourth, eighth, ..., and at every update that is made step by step anyway since it
  writes summaries, the form below computes as well, from the same random numbers and buffers, and the results are
  compared. So what changes between calls without a record knowing of it, such as a number kept in Python, is noticed:
  at once if it changes at each call.
- What differs, or cannot be made, is not used any more from then on, and the log says why.
"""
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from alfx.engine.plan.compare import Parts, State, difference, is_check_due, tolerance_of
from alfx.engine.plan.exchanges import Answers, nobody_asked
from alfx.engine.plan.program import Program
from alfx.engine.plan.record import NotRecordableError, Record, Recorder, first_line
from alfx.engine.plan.torch_internals import version_of

logger = logging.getLogger(__name__)

Play = Callable[[list[Tensor]], Sequence[Tensor | None]]


class UnsupportedError(RuntimeError):
    """A record cannot be carried out in some form."""


class Request(NamedTuple):
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


class Task(Protocol):
    """What is computed: an update, or a policy. The forms know no more of it than this.

    Attributes:
        recorder: of what it calls.
    """

    recorder: Recorder

    def request(self, asked: Any, in_place: bool) -> Request:
        """What is asked for, flat.

        With ``in_place`` it is taken from where it is, if others are going to be there as well; otherwise it may be
        anywhere, but without gaps between its numbers.
        """

    def record(self, request: Request) -> Record:
        """What is computed, as a record from ``request.leaves`` to a list of tensors and ``None``."""

    def must_be_eager(self) -> bool:
        """Whether Python code has to see this request, as where summaries are written."""

    def parts(self, answer: Any) -> Parts:
        """The parts of an answer, with their names, in the order in which a record returns them."""

    def answer(self, results: Sequence[Tensor | None], request: Request, keeps: bool) -> Any:
        """The answer that a record has given; ``keeps``: the next one does not overwrite it."""

    def is_comparable(self, answer: Any) -> bool:
        """Whether a form can be held against an answer."""


class Form(Protocol):
    """Computes what is asked for.

    Attributes:
        verb: how, for messages.
    """

    verb: str

    def __call__(self, asked: Any) -> Any: ...


class Kept:
    """A record, how to carry it out, and how often that has been done."""

    def __init__(self, record: Record, play: Play, keeps_results: bool = False) -> None:
        self.record, self.play, self.keeps_results, self.count = record, play, keeps_results, 0


class Faster:
    """Base of all forms but the first.

    Args:
        below: what to fall back to and to be compared with.
        task: what is computed.
        warm_up: how often the form below computes first.
    """

    verb = ''
    _is_exact = False  # whether results are those of the form below to the bit
    _takes_in_place = False

    def __init__(self, below: Form, task: Task, warm_up: Callable[[], int]) -> None:
        self.below, self.task, self._warm_up = below, task, warm_up
        self._kept: dict[Hashable, Kept] = {}
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
            if kept.count < self._warm_up():  # its tensors move often: not worth a record each time
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
        return task.answer(kept.play(request.leaves), request, kept.keeps_results)

    @property
    def num_records(self) -> int:
        """How many records it has."""
        return len(self._kept)

    def stop(self, reason: str) -> None:
        """Leave everything to the form below from now on, and say so."""
        self.has_stopped = True
        self._kept.clear()
        self._warn(self.verb, reason)

    def _warn(self, verb: str, reason: str) -> None:
        logger.warning('%s is %s from now on, which takes longer than if it were %s: %s', self.task.recorder.what,
                       self.below.verb, verb, reason)

    def kept(self, key: Hashable) -> Kept | None:
        """What it carries out for requests with a key, if anything."""
        return self._kept.get(key)

    # What the forms differ in ------------------------------------------------------------------------------------

    def _make(self, request: Request) -> Kept | None:
        """A record and how to carry it out; ``None``: not yet.

        Raises:
            NotRecordableError: there can be no record.
            UnsupportedError: it cannot be carried out in this form.
        """
        raise NotImplementedError

    # -------------------------------------------------------------------------------------------------------------

    def _make_if_due(self, request: Request) -> Kept | None:
        count = self._counts[request.key] = self._counts.get(request.key, 0) + 1
        if count <= self._warm_up():
            return None
        try:
            with nobody_asked(), torch.random.fork_rng():
                kept = self._make(request)
        except NotRecordableError as error:
            self._stop_all(f'it cannot be recorded: {error}')
            return None
        except UnsupportedError as error:
            self.stop(str(error))
            return None
        if kept is not None:
            self._kept[request.key] = kept
        return kept

    def _stop_all(self, reason: str) -> None:
        """Stop this form and all that need a record, with one message."""
        form: Faster = self
        form.has_stopped = True
        while isinstance(form.below, Faster):
            form = form.below
            form.has_stopped = True
        form._warn(self.verb, reason)

    def _compared(self, asked: Any, request: Request, kept: Kept, prefers_own: bool) -> Any:
        """The answer of the form below, or with ``prefers_own`` that of this one if they agree."""
        task, record = self.task, kept.record
        written = [x for _, x in record.written]
        devices = {x.device for x in (*record.fixed, *request.leaves)}
        answers = Answers()
        before, versions = State(written, devices), self._versions()
        with answers.kept():
            expected = self.below(asked)
        changed = [name for name, version in self._versions().items() if versions.get(name) != version]
        after = State(written, devices)
        if not task.is_comparable(expected):
            return expected
        before.put_back()
        names = [name for name, _ in record.written]
        parts = [(name, None if x is None else x.detach().clone()) for name, x in task.parts(expected)]
        try:
            with answers.given_again():
                results = kept.play(request.leaves)
        except Exception as error:  # noqa: BLE001 - whatever it is, the form below has done the work
            after.put_back()
            self.stop(f'{type(error).__name__}: {first_line(error)}')
            return expected
        own = State(written, devices)
        reason = self._difference(parts, results, record, changed)
        if own.has_same_streams(after):
            reason = reason or difference(after.parts(names), own.parts(names), tolerance_of(record, self._is_exact))
        elif prefers_own:
            reason = 'it draws other random numbers'
        else:
            reason = None  # summaries have drawn some as well: nothing can be compared this time
        if reason is None and prefers_own:
            return task.answer(results, request, kept.keeps_results)
        after.put_back()
        if reason is not None:
            self.stop(f'it would be another one: {reason}')
        return expected

    def _difference(self, parts: Parts, results: Sequence[Tensor | None], record: Record,
                    changed: Sequence[str]) -> str | None:
        missed = set(changed) - {name for name, _ in record.written}
        if missed:
            return f'{_short(min(missed))} is written to'
        found = [(name, x) for (name, _), x in zip(parts, results, strict=True)]
        return difference(parts, found, tolerance_of(record, self._is_exact))

    def _versions(self) -> dict[str, Any]:
        """Of each tensor, which one it is and how often it has been written to."""
        return {name: (id(x), version_of(x)) for name, _, x in self.task.recorder.tensors()}


class Played(Faster):
    """Plays records: the same operations on the same numbers, without Python and autograd in between.

    An update of small networks takes most of its time for deciding what to do: calls of modules, of distributions, of
    the loss, and the bookkeeping of autograd and of memory. The results are equal to the bit.
    """

    verb = 'played from a record'
    _is_exact = True
    _takes_in_place = True

    def _make(self, request: Request) -> Kept:
        record = self.task.record(request)
        try:
            program = Program(record.graph, record.fixed, request.leaves, request.num_reused)
        except Exception as error:  # of any kind: an operation that is called in a way the program does not know
            raise UnsupportedError(f'it cannot be laid out: {type(error).__name__}: {first_line(error)}') from error
        return Kept(record, program)


def _short(name: str) -> str:
    return name.removeprefix('read.0.')
