"""The error that a wrong conf raises: where, what was expected, what was found, what to do.

A :class:`ConfError` carries a list of :class:`Problem`, so that one run of the checks reports every
mistake of a conf file and not only the first. What is called a location here is the place of a
binding as a person would point at it: ``file.gin:31`` or ``--conf_param 'X.y=z'``.
"""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple, Optional, Union

__all__ = ['Problem', 'ConfError', 'nearest_name', 'hint_nearest', 'plain_text']


class Problem(NamedTuple):
    """One mistake in a conf.

    Attributes:
        location: ``file.gin:31``, ``--conf_param 'X.y=z'``, or '' when it has no place of its own.
        message: what was expected and what was found.
        hint: what to do about it, or ''.
    """

    location: str
    message: str
    hint: str = ''

    def __str__(self) -> str:
        text = f'{self.location}: {self.message}' if self.location else self.message
        return f'{text}\n  {self.hint}' if self.hint else text


class ConfError(ValueError):
    """What the user asked for in a conf file or on the command line cannot be done.

    Args:
        problems: the problems found, or the text of a single one.
        hint: what to do, when ``problems`` is a text.
        location: where it is, when ``problems`` is a text.
    """

    def __init__(self, problems: Union[str, Sequence[Problem]], hint: str = '', location: str = ''):
        if isinstance(problems, str):
            problems = (Problem(location, problems, hint),)
        self.problems = tuple(problems)
        super().__init__('\n'.join(str(problem) for problem in self.problems))

    def __init_subclass__(cls, **kwargs):
        # gin re-raises what escapes a configurable as a subclass made on the fly, whose text has
        # 'In call to configurable ...' appended for every level. A ConfError already says where.
        super().__init_subclass__(**kwargs)
        cls.__str__ = ConfError.__str__

    def __str__(self) -> str:
        return '\n'.join(str(problem) for problem in self.problems)

    def __reduce__(self):
        return ConfError, (self.problems,)


def nearest_name(name: str, candidates: Sequence[str], cutoff: float = 0.7) -> Optional[str]:
    """The candidate that ``name`` most likely was meant to be, or None if none is near.

    Args:
        name: what was written.
        candidates: what it may have been meant to be.
        cutoff: similarity in [0, 1] that the candidate has to have.
    """
    candidates = list(dict.fromkeys(candidates))
    same_but_case = [c for c in candidates if c.lower() == name.lower()]
    matches = same_but_case or difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def hint_nearest(name: str, candidates: Sequence[str], cutoff: float = 0.7) -> str:
    """``did you mean 'x'?`` for the nearest candidate, or '' if none is near."""
    nearest = nearest_name(name, candidates, cutoff)
    return f"did you mean '{nearest}'?" if nearest else ''


def plain_text(error: BaseException) -> str:
    """The text of an error without the 'In call to configurable ...' that gin appends for every level."""
    return re.sub(r"\n  In call to configurable '[^\n]*", '', str(error))
