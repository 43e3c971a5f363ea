"""Dataclasses of settings: what their fields allow, and which may change."""
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import pytest

from alfx.gin_utils.settings import may_change, setting, wrong_values


@dataclasses.dataclass
class Settings:
    folder: str = setting(may_change=True)
    steps: int = setting(8, minimum=1, may_change=True)
    rate: float = 0.5
    debug: bool = False
    limit: Optional[int] = setting(None, above=3)
    mode: str = setting('a', choices=('a', 'b'))
    files: Optional[Sequence[str]] = None
    schedule: Union[float, Callable] = setting(0.7, minimum=0)
    anything: Any = None
    maker: int | None = setting(None, kind=callable)
    options: dict = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize('values', [
    {}, dict(rate=1), dict(limit=4), dict(files=['a']), dict(files=('a',)), dict(mode='b'), dict(schedule=len),
    dict(anything=3), dict(maker=len)])
def test_values_matching_annotation_and_limits_are_accepted(values):
    assert wrong_values(Settings('run', **values), 'Settings') == []


@pytest.mark.parametrize('values, message', [
    (dict(folder=3), 'Settings.folder must be a string, found int 3'),
    (dict(steps=0), 'Settings.steps must be an int >= 1, found int 0'),
    (dict(steps=True), 'Settings.steps must be an int >= 1, found True'),
    (dict(rate='1'), "Settings.rate must be a number, found str '1'"),
    (dict(debug=2), 'Settings.debug must be True or False, found int 2'),
    (dict(limit=3), 'Settings.limit must be an int > 3 or None, found int 3'),
    (dict(mode='c'), "Settings.mode must be one of ['a', 'b'], found str 'c'"),
    (dict(files='a'), "Settings.files must be a list or a tuple or None, found str 'a'"),
    (dict(schedule=-1), 'Settings.schedule must be a number or a callable >= 0, found int -1'),
    (dict(maker=3), 'Settings.maker must be a callable or None, found int 3'),
    (dict(options=3), 'Settings.options must be a dict, found int 3'),
])
def test_a_value_that_does_not_fit_is_a_problem(values, message):
    problem, = wrong_values(Settings(**{'folder': 'run', **values}), 'Settings')
    assert problem.message == message


def test_fields_declare_if_they_may_change_and_other_classes_have_none():
    assert may_change(Settings) == {'folder', 'steps'}
    assert may_change(dict) == frozenset()
