"""Constructors and factories that forward the arguments of another one without repeating them."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, TypeVar

from .registry import annotations_of, construction_function

_Result = TypeVar('_Result')
_Parameters = dict[str, inspect.Parameter]


def takes_arguments_of(parent: Callable, *, without: Sequence[str] = (), defaults: Optional[Mapping[str, Any]] = None,
                       after: Optional[Mapping[str, str]] = None
                       ) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Decorate an ``__init__`` or a function so that its ``**kwargs`` are the arguments of ``parent``, by name::

        @configurable
        class OacAlgorithm(SacAlgorithm):

            @takes_arguments_of(SacAlgorithm, defaults={'name': 'OacAlgorithm'}, after={'explore': 'initial_log_alpha'})
            def __init__(self, explore: bool = True, **kwargs: Any):
                super().__init__(**kwargs)

    The decorated function has one signature of all arguments, with defaults and annotations, for Python, for conf files
    and for readers. An argument of both keeps the position in the parent, and the parent's default and annotation
    unless the child specifies its own. The decorated function is called with every argument by name, so the defaults
    shown are the defaults used. A class inherits the bindings of a conf from its base classes; a function does not.

    Args:
        parent: class or function whose arguments are forwarded.
        without: arguments of ``parent`` to leave out.
        defaults: arguments of ``parent`` with another default.
        after: new argument -> the argument that it follows. By default it follows the preceding argument, and the
            arguments without a default if it has one.

    Returns:
        A decorator.

    Raises:
        TypeError: (by the decorator) a name is not an argument of ``parent``, or the function has no ``**kwargs``.
    """

    def decorate(function: Callable[..., _Result]) -> Callable[..., _Result]:
        signature = _merged(function, _parameters_of(parent), parent.__name__, without, defaults or {}, after or {})
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.arguments_of = parent  # type: ignore[attr-defined]
        function.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()
                                    if p.annotation is not p.empty}
        rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

        @functools.wraps(function)
        def with_all_arguments(*args: Any, **kwargs: Any) -> _Result:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f'{function.__qualname__}() {error}') from None
            bound.apply_defaults()
            others = {} if rest is None else bound.arguments.pop(rest)
            return function(**bound.arguments, **others)

        return with_all_arguments

    return decorate


def _parameters_of(parent: Callable) -> _Parameters:
    """Return the parameters of a function, or of the constructor of a class, with resolved annotations."""
    if inspect.isclass(parent):
        parameters = list(inspect.signature(construction_function(parent)[1]).parameters.values())[1:]
    else:
        parameters = list(inspect.signature(parent).parameters.values())
    hints = annotations_of(parent)
    return {p.name: p.replace(annotation=hints[p.name]) if p.name in hints else p for p in parameters}


def _merged(function: Callable, parents: _Parameters, parent: str, without: Sequence[str], defaults: Mapping[str, Any],
            after: Mapping[str, str]) -> inspect.Signature:
    """Return the signature of ``function`` with its ``**kwargs`` replaced by the parameters of its parent."""
    name = function.__qualname__
    signature = inspect.signature(function)
    own = dict(signature.parameters)
    if not own or own.popitem()[1].kind is not inspect.Parameter.VAR_KEYWORD or any(
            p.kind is p.VAR_POSITIONAL for p in own.values()):
        raise TypeError(f'{name}: expected **kwargs for the arguments of {parent}, and no *args')
    taken = {key: p for key, p in parents.items() if key not in without}
    for known, wanted in ((parents, without), (taken, defaults), ({**taken, **own}, after),
                          ({**taken, **own}, after.values())):
        for key in wanted:
            if key not in known:
                raise TypeError(f"{name}: '{key}' is not an argument of {parent}, or it is left out by 'without'")
    taken.update({key: taken[key].replace(default=value) for key, value in defaults.items()})
    rest = [taken.pop(key) for key, p in parents.items() if key in taken and p.kind is p.VAR_KEYWORD]
    order = [key for key in taken if key not in after]
    previous = None
    for key in [*own, *(key for key in after if key not in own)]:
        if key not in order:
            anchor = after.get(key, previous)
            order.insert(0 if anchor is None else order.index(anchor) + 1, key)
        previous = key
    merged = {**taken, **{key: _overridden(taken.get(key), p) for key, p in own.items()}}
    found = [merged[key] for key in order]
    found.sort(key=lambda p: (p.kind, p.kind is not p.KEYWORD_ONLY and p.default is not p.empty))  # required ones first
    return signature.replace(parameters=[*found, *rest])


def _overridden(parent: Optional[inspect.Parameter], own: inspect.Parameter) -> inspect.Parameter:
    """Return ``own``, completed with the default and annotation of the parent's parameter of the same name."""
    if parent is None:
        return own
    return parent.replace(default=parent.default if own.default is own.empty else own.default,
                          annotation=parent.annotation if own.annotation is own.empty else own.annotation)
