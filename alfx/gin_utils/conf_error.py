"""Errors in a conf: where, what was expected, what was found, what to do.

A :class:`ConfError` holds a list of :class:`Problem`, so that one check reports all mistakes of a conf file and not
only the first. A location is the place of a binding as shown to the user: ``file.gin:31`` or ``override 'X.y=z'``.
"""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

_MOST_LINES = 10  # in a notebook


class Problem(NamedTuple):
    """One mistake in a conf.

    Attributes:
        location: ``file.gin:31``, ``override 'X.y=z'``, or '' if there is no location.
        message: what was expected and what was found.
        hint: what to do, or ''.
    """

    location: str
    message: str
    hint: str = ''

    def __str__(self) -> str:
        text = f'{self.location}: {self.message}' if self.location else self.message
        return f'{text}\n  {self.hint}' if self.hint else text


class ConfError(ValueError):
    """A conf file or the command line asks for something invalid.

    Args:
        problems: the problems found, or the message of a single problem.
        hint: what to do, if ``problems`` is a message.
        location: where the problem is, if ``problems`` is a message.
    """

    def __init__(self, problems: Union[str, Sequence[Problem]], hint: str = '', location: str = ''):
        if isinstance(problems, str):
            problems = (Problem(location, problems, hint),)
        self.problems = tuple(problems)
        super().__init__('\n'.join(str(problem) for problem in self.problems))

    def __init_subclass__(cls, **kwargs):
        # gin re-raises exceptions that leave a configurable as a subclass created on the fly, and appends
        # 'In call to configurable ...' at every level. A ConfError already states the location.
        super().__init_subclass__(**kwargs)
        cls.__str__ = ConfError.__str__

    def __str__(self) -> str:
        return '\n'.join(str(problem) for problem in self.problems)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a traceback, at most ten."""
        lines = f'ConfError: {self}'.split('\n')
        if len(lines) > _MOST_LINES:
            lines = [*lines[:_MOST_LINES - 1], f'... and {len(lines) - _MOST_LINES + 1} more lines: catch the error to '
                     'print all of it']
        return lines

    def __reduce__(self):
        return ConfError, (self.problems,)


def nearest_name(name: str, candidates: Sequence[str], cutoff: float = 0.7) -> Optional[str]:
    """Return the candidate that is most similar to ``name``, whatever the case, or ``None`` if none is similar enough.

    Args:
        name: the name that was written.
        candidates: valid names.
        cutoff: minimum similarity in [0, 1].
    """
    same_case = {candidate.lower(): candidate for candidate in reversed(candidates)}
    matches = difflib.get_close_matches(name.lower(), same_case, n=1, cutoff=cutoff)
    return same_case[matches[0]] if matches else None


def hint_nearest(name: str, candidates: Sequence[str], cutoff: float = 0.7) -> str:
    """Return ``did you mean 'x'?`` for the nearest candidate, or '' if no candidate is similar enough."""
    nearest = nearest_name(name, candidates, cutoff)
    return f"did you mean '{nearest}'?" if nearest else ''


def plain_text(error: BaseException) -> str:
    """Return the text of an error without the lines that gin appends at every level."""
    return re.sub(r'\n  (In call to configurable|No values supplied|Gin had values|Caller supplied) .*', '', str(error))
