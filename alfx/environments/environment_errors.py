"""Errors of environments; each message contains the remedy."""
import difflib
import re
from collections.abc import Iterable

from alfx.tensor_specs import SpecError


class UnsupportedSpaceError(SpecError):
    """A gymnasium space that has no tensor spec; the message contains its path in the nest."""


class EnvironmentLoadError(ValueError):
    """An environment that cannot be created: an unknown name, a missing package, an invalid argument."""


class UnsupportedOperationError(RuntimeError):
    """An operation that this kind of environment does not support."""


class EnvironmentStepError(RuntimeError):
    """An environment raised, or the process that ran it died.

    Args:
        index: index of the environment in the batch; ``None``: unknown.
        name: name of the environment, usually its id.
        during: the call that failed: 'step()', 'reset()', 'its constructor'.
        reason: one line: the error that was raised, or how the process ended.
        details: the traceback inside the environment; '' if there is none.
        hint: remedy.
    """

    def __init__(self, index: int | None, name: str, during: str, reason: str, details: str = '', hint: str = ''):
        which = 'an environment' if index is None else f'environment {index}'
        message = f'{which} of {name!r} failed in {during}: {reason}'
        if hint:
            message += f'\n  {hint}'
        if details:
            message += '\n  its own traceback:\n' + '\n'.join('    ' + line for line in details.rstrip().split('\n'))
        super().__init__(message)
        self.index, self.name, self.during, self.reason = index, name, during, reason
        self.details, self.hint = details, hint

    def __reduce__(self) -> tuple:
        return type(self), (self.index, self.name, self.during, self.reason, self.details, self.hint)


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return up to ``count`` names that resemble ``name``, ignoring case and the version."""
    by_stem = {_stem(candidate): candidate for candidate in known}
    return [by_stem[match] for match in difflib.get_close_matches(_stem(name), by_stem, n=count, cutoff=0.6)]


def _stem(name: str) -> str:
    return re.sub(r'-v\d+$', '', name.lower())
