"""Elements of a ``SequentialAlg``: as in :mod:`alfx.layers.steps`, with algorithms, their states and infos.

Names of results may be ``'info.NAME'`` for the info of the algorithm ``NAME`` and ``'state.NAME'`` for the new state of
an algorithm or network, each followed by a path into it.
"""
from collections.abc import Mapping, Sequence
from typing import Any

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.layers.steps import Step, parse_steps
from alfx.networks.network import Network
from alfx.tensor_specs import Nested

_WITH: dict[str, Any] = {'info': Algorithm, 'state': (Algorithm, Network)}
"""Types of elements that have an info or a state."""


def parse_elements(modules: Sequence[Any], named_modules: Mapping[str, Any], output: Nested, where: str) -> list[Step]:
    """Return the steps of a sequence, after checking them.

    Args:
        modules: elements without a name.
        named_modules: elements by name.
        output: nest of names of results.
        where: name of the sequence in error messages.

    Raises:
        ValueError: there are no elements, an element cannot be called, or a name does not exist.
    """
    for key in _WITH:
        if key in named_modules:
            raise ValueError(f"{where}: an element cannot be named '{key}', which refers to the {key}s of elements")
    elements = [_as_pair(element) for element in (*modules, *named_modules.values())]
    plain = [(_outputs_of(names), module) if names is not None else module for names, module in elements]
    plain_named = dict(zip(named_modules, plain[len(modules):]))
    steps = parse_steps(plain[:len(modules)], plain_named, _outputs_of(output), where)
    kinds = {step.name: step.module for step in steps if step.name}
    for names in (*(names for names, _ in elements), output):
        _check_kinds(names, kinds, where)
    return [step._replace(inputs=names) for step, (names, _) in zip(steps, elements)]


class Selector:
    """Selects a nest of results by name; the names are parsed once, not at each step.

    Args:
        names: nest of names; ``None``: the previous result.
    """

    def __init__(self, names: Nested):
        self._structure = nest.structure('' if names is None else names)
        self._names = ['' if name is None else name for name in nest.flatten('' if names is None else names)]
        self._paths = [name.split('.') for name in self._names]

    def __call__(self, results: Mapping[str, Any]) -> Nested:
        """Select from ``results`` by name; ``''`` is the latest result.

        Raises:
            LookupError: a result has no such field; the message names the most similar one.
        """
        found = []
        for name, path in zip(self._names, self._paths):
            value: Any = results
            for key in path:
                if isinstance(value, dict) and key in value:
                    value = value[key]
                elif key in getattr(value, '_fields', ()):
                    value = getattr(value, key)
                else:  # an index, or an error that lists the existing fields
                    value = nest.get_field({path[0]: results[path[0]]}, name)
                    break
            found.append(value)
        return self._structure.unflatten(found)


def _as_pair(element: Any) -> tuple[Nested, Any]:
    """Return ``(names, module)``; the names are ``None`` if not given."""
    return element if isinstance(element, tuple) and len(element) == 2 and callable(element[1]) else (None, element)


def _outputs_of(names: Nested) -> Nested:
    """Replace names of states and infos by the names of their elements; keep other names."""

    def output_of(name: Any) -> Any:
        if not isinstance(name, str):
            return name
        kind, _, rest = name.partition('.')
        return (rest or 'input') if kind in _WITH else name

    return nest.map_structure(output_of, names)


def _check_kinds(names: Nested, modules: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` for a state or an info that the element does not have."""
    for name in nest.flatten(names):
        kind, _, rest = name.partition('.') if isinstance(name, str) else ('', '', '')
        key = rest.split('.')[0]
        module = modules.get(key)
        if kind in _WITH and module is not None and not isinstance(module, _WITH[kind]):
            raise ValueError(f"{where}: '{name}' does not exist, because '{key}' is a {type(module).__name__}; "
                             'only algorithms have infos, and only algorithms and networks have states')
