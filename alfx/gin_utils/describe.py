"""Human-readable descriptions of the parameters of a configurable and of the bindings of a conf."""
import contextlib
import inspect
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from alfx.gin_utils.conf_error import ConfError
from . import registry, static_check
from .parsing import Conf, Reader, is_shipped, show_path
from .reference_types import resolve

SECTION = re.compile(r'^([A-Z][\w ]*):$(?=\n    )', re.MULTILINE)
"""Heading of a section of a docstring: 'Args', 'Returns', or a group of arguments with any other name."""
_ARGUMENT = re.compile(r'^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ', re.MULTILINE)


class Description(NamedTuple):
    """A configurable.

    Attributes:
        selector: complete name.
        name: last part of the complete name.
        parameters: parameters that a conf can bind, in order, by name.
        docstring: docstring of the class and its constructor, or of the function.
        meanings: by argument, its meaning, preceded by the name of the class or function that explains it, or by ''
            if that is the described one itself.
    """
    selector: str
    name: str
    parameters: dict[str, inspect.Parameter]
    docstring: str
    meanings: dict[str, tuple[str, str]]


def describe(name: str) -> Description:
    """Describe the class or function that confs call ``name``.

    Raises:
        ConfError: no imported module defines ``name``, or several do.
    """
    try:
        found = resolve(name)
    except KeyError:
        meant = [full for full in registry.registered_selectors() if full.endswith(f'.{name}')]
        raise ConfError(f"'{name}' is ambiguous", f'write one of {", ".join(sorted(meant))}') from None
    except ValueError:
        raise ConfError(f"there is no configurable '{name}'") from None
    return description_of(found, registry.step_function_of(found.selector))


def description_of(found: Any, step_function: Any = None) -> Description:
    """Describe a configurable of gin, or the step function that it stands for."""
    target: Any = step_function or found.wrapped
    return Description(found.selector, found.selector.rsplit('.', 1)[-1], _parameters(found, target),
                       _docstring(target) or 'has no docstring', _meanings(target))


def _docstring(target: Any) -> str:
    documented = [target, *([registry.construction_function(target)[1]] if inspect.isclass(target) else ())]
    return '\n\n'.join(inspect.getdoc(part) or '' for part in documented
                       if getattr(part, '__doc__', None) not in (None, '', object.__init__.__doc__))


def meanings(name: str) -> dict[str, str]:
    """Return the meaning of each argument by name, from the docstrings of a class or function, of those whose arguments
    it takes, and of bases.

    Raises:
        ConfError: no imported module defines ``name``, or several do.
    """
    return {argument: meaning for argument, (_, meaning) in describe(name).meanings.items()}


def _meanings(target: Any) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for owner in _owners(target):
        parts = SECTION.split(_docstring(owner))
        for title, body in zip(parts[1::2], parts[2::2]):
            entries = [] if title in ('Returns', 'Raises', 'Yields', 'Example', 'Examples') else _ARGUMENT.split(body)
            for names, meaning in zip(entries[1::2], entries[2::2]):
                is_inherited = meaning.strip().startswith('as in ``Algorithm``')
                for argument in () if is_inherited else names.split(', '):
                    found.setdefault(argument.lstrip('*'), ('' if owner is target else owner.__name__,
                                                            ' '.join(meaning.split())))
    return found


def _owners(target: Any) -> Iterator[Any]:
    """Yield a class or function, those whose arguments it takes, and its bases."""
    for owner in inspect.getmro(target) if inspect.isclass(target) else (target, ):
        if owner is target or owner.__module__.startswith('alfx.'):
            yield owner
            constructor = registry.construction_function(owner)[1] if inspect.isclass(owner) else owner
            if hasattr(constructor, 'arguments_of'):
                yield from _owners(constructor.arguments_of)


def _parameters(found: Any, target: Any) -> dict[str, inspect.Parameter]:
    if target is not found.wrapped:
        with contextlib.suppress(ValueError):  # written in C
            return dict(inspect.signature(target).parameters)
    return static_check.parameters_of(found)[0]


def flat_lines(conf: Conf) -> Iterator[str]:
    """Yield a loaded conf as one list of bindings, with comments that give the source and the overridden places.

    Args:
        conf: result of :func:`~alfx.gin_utils.load`; it must still be loaded.
    """
    yield from conf.imports
    written = _places(conf)
    lines = [f'{binding.text} = {binding.value!r}' for binding in conf.bindings]
    width = min(max(map(len, lines), default=0), 80)
    for line, binding in zip(lines, conf.bindings):
        own = _place(binding.file, binding.line)
        earlier = ', '.join(place for place in written.get(_key(binding.text), []) if place != own)
        yield f'{line:{width}}  # {own}' + (f', overrides {earlier}' if earlier else '')


def _key(text: str) -> tuple[str, str, str]:
    """Return scope, complete selector and argument of the left side of a statement."""
    scope, _, rest = text.rpartition('/')
    selector, _, name = rest.rpartition('.')
    return scope, resolve(selector).selector if selector else '', name


def _place(path: str, line: int) -> str:
    if not path:
        return '--conf_param'
    return f'{os.path.basename(path) if is_shipped(path) else show_path(path)}:{line}'


def _places(conf: Conf) -> dict[tuple[str, str, str], list[str]]:
    """Return the places where each argument is bound, in the order in which the bindings take effect."""
    reader = Reader()
    reader.read_file(conf.conf_file)
    for param in conf.conf_params:
        reader.read_param(param)
    places: dict[tuple[str, str, str], list[str]] = {}
    for statement in reader.statements:
        if statement.kind in ('binding', 'macro'):
            found = places.setdefault(_key(statement.text), [])
            if (place := _place(statement.file, statement.line)) not in found:
                found.append(place)
    return places
