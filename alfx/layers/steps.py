"""Notation and evaluation of a chain of modules, shared by both ``Sequential`` classes.

Each element of a chain is a module (or function) that is called with the previous result, or a pair
``(names, module)`` that is called with a nest of earlier results. A name is the name of a module, ``'input'`` for the
input of the chain or ``''`` for the previous result. A path into that result may follow (``'encoder.mean'``).
"""
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from alfx import nest
from alfx.layers.activations import out_of_place
from alfx.tensor_specs import Nested


class Step(NamedTuple):
    """One element of a chain."""
    module: Callable[..., Any]
    inputs: Nested
    """Names of its inputs; ``None``: the previous result."""
    name: str
    """Name of its result, or ``''``."""


def parse_steps(modules: Sequence[Any], named_modules: Mapping[str, Any], output: Nested, where: str) -> list[Step]:
    """Check the elements of a chain and convert them to steps.

    Known in-place activations are replaced by their out-of-place counterparts, so that inputs and named results do not
    change.

    Raises:
        ValueError: there are no modules, an element cannot be called, or a name does not exist; the message starts
            with ``where``.
    """
    steps: list[Step] = []
    for key, element in [(str(i), m) for i, m in enumerate(modules)] + list(named_modules.items()):
        inputs, module = None, element
        if isinstance(element, tuple) and len(element) == 2 and callable(element[1]):
            inputs, module = element
            _check_names(inputs, [step.name for step in steps], f"{where}: element '{key}'")
        if not callable(module):
            raise ValueError(f"{where}: element '{key}' is not a module, function or (names, module) pair: {element!r}")
        if key == 'input':
            raise ValueError(f"{where}: a module cannot be named 'input', which is the name of the input")
        steps.append(Step(out_of_place(module), inputs, key if key in named_modules else ''))
    if not steps:
        raise ValueError(f'{where}: expected at least one module')
    _check_names(output, [step.name for step in steps], f'{where}: output')
    return steps


def _check_names(names: Nested, existing: Sequence[str], where: str) -> None:
    known = ['input'] + [name for name in existing if name]
    for name in nest.flatten(names):
        if not isinstance(name, str):
            raise ValueError(f'{where}: expected names of earlier results, found {name!r}')
        root = name.split('.')[0]
        if root and root not in known:
            near = difflib.get_close_matches(root, known, n=1)
            hint = f", did you mean '{near[0]}'?" if near else ''
            raise ValueError(f"{where}: there is no earlier result '{root}'; known results are {known}{hint}")


def register_steps(parent: nn.Module, steps: Sequence[Step]) -> None:
    """Register the modules of a chain as children of ``parent``, under their names or positions."""
    for i, step in enumerate(steps):
        if isinstance(step.module, nn.Module):
            add_child(parent, step.name or str(i), step.module)


def add_child(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Register ``module`` as a child of ``parent``.

    Raises:
        ValueError: the name is already an attribute of modules, such as 'forward'.
    """
    name = name.replace('.', '-')
    if hasattr(parent, name) and name not in parent._modules:
        raise ValueError(f"{type(parent).__name__}: a module cannot be named '{name}': an attribute has this name")
    parent.add_module(name, module)


class Results:
    """Results of a chain so far, by name."""

    def __init__(self, inputs: Nested):
        self._named = {'input': inputs}
        self._last = inputs

    def select(self, names: Nested) -> Nested:
        """Return the nest of results called ``names``; ``None`` means the last result."""
        if names is None or names == '':
            return self._last
        return self._get(names) if isinstance(names, str) else nest.map_structure(self._get, names)

    def _get(self, name: str) -> Nested:
        if name == '' or name.startswith('.'):
            return nest.get_field(self._last, name[1:])
        return nest.get_field(self._named, name)

    def add(self, name: str, value: Nested) -> None:
        """Add the result of the next step."""
        self._last = value
        if name:
            self._named[name] = value
