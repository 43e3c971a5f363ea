"""What goes wrong with environments, each with the remedy in its message."""
import difflib
from collections.abc import Iterable

from alfx.tensor_specs import SpecError


class UnsupportedSpaceError(SpecError):
    """A gymnasium space that has no tensor spec; the message says where in the nest it is."""


class EnvironmentLoadError(ValueError):
    """An environment that cannot be made: an unknown name, a missing package, an argument without meaning."""


class UnsupportedOperationError(RuntimeError):
    """An operation that this kind of environment cannot do."""


class EnvironmentStepError(RuntimeError):
    """An environment raised, or the process that ran it died.

    Args:
        index: which environment of the batch; ``None``: not known.
        name: what the environment is called, usually its id.
        during: what it was doing: 'step()', 'reset()', 'its constructor'.
        reason: one line: the error it raised, or how its process ended.
        details: the traceback of the environment itself; '' if there is none.
        hint: what to do.
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
    """The ``count`` names most like ``name``, ignoring case; fewer if few are like it."""
    by_lower: dict[str, str] = {}
    for candidate in known:
        by_lower[candidate.lower()] = candidate
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.6)]
