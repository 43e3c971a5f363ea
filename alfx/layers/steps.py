"""How a chain of modules is written down and run; both kinds of ``Sequential`` are made of this.

Each element of a chain is a module (or function), which takes the previous result, or a pair ``(names, module)``,
which takes a nest of earlier results. A name is that of a named module, ``'input'`` for the input of the chain or
``''`` for the previous result; it may be followed by a path into that result (``'encoder.mean'``).
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
    """Names of what it takes; ``None``: the previous result."""
    name: str
    """Name of its result; ``''`` if it has none."""


def parse_steps(modules: Sequence[Any], named_modules: Mapping[str, Any], output: Nested, where: str) -> list[Step]:
    """The steps of a chain, checked.

    Known in-place activations are replaced by their counterparts, so that no input or named result changes.

    Raises:
        ValueError: no modules, an element that cannot be called, or a name that does not exist; ``where`` is the
            name of the chain in the message.
    """
    steps: list[Step] = []
    for key, element in [(str(i), m) for i, m in enumerate(modules)] + list(named_modules.items()):
        inputs, module = None, element
        if isinstance(element, tuple) and len(element) == 2 and callable(element[1]):
            inputs, module = element
            _check_names(inputs, [step.name for step in steps], f"{where}: element '{key}'")
        if not callable(module):
            raise ValueError(f"{where}: element '{key}' is no module, function or (names, module) pair: {element!r}")
        if key == 'input':
            raise ValueError(f"{where}: no module may be called 'input', which is the name of the input")
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
            raise ValueError(f"{where}: there is no earlier result '{root}'; there are {known}{hint}")


def register_steps(parent: nn.Module, steps: Sequence[Step]) -> None:
    """Make the modules of a chain children of ``parent``, under their names or positions."""
    for i, step in enumerate(steps):
        if isinstance(step.module, nn.Module):
            add_child(parent, step.name or str(i), step.module)


def add_child(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Make ``module`` a child of ``parent``.

    Raises:
        ValueError: the name is taken by an attribute of modules, such as 'forward'.
    """
    name = name.replace('.', '-')
    if hasattr(parent, name) and name not in parent._modules:
        raise ValueError(f"{type(parent).__name__}: a module cannot be called '{name}', an attribute has this name")
    parent.add_module(name, module)


class Results:
    """The results of a chain so far, by name."""

    def __init__(self, inputs: Nested):
        self._named = {'input': inputs}
        self._last = inputs

    def select(self, names: Nested) -> Nested:
        """The nest of results called ``names``; the last one for ``None``."""
        if names is None or names == '':
            return self._last
        if isinstance(names, str):
            return self._get(names)
        return nest.map_structure(self._get, names)

    def _get(self, name: str) -> Nested:
        if name == '' or name.startswith('.'):
            return nest.get_field(self._last, name[1:])
        return nest.get_field(self._named, name)

    def add(self, name: str, value: Nested) -> None:
        """Add the result of the next step."""
        self._last = value
        if name:
            self._named[name] = value
