"""The elements of a ``SequentialAlg``: as :mod:`alfx.layers.steps`, with algorithms, their states and infos.

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
"""What has an info, and what has a state."""


def parse_elements(modules: Sequence[Any], named_modules: Mapping[str, Any], output: Nested, where: str) -> list[Step]:
    """The steps of a sequence, checked.

    Args:
        modules: elements without a name.
        named_modules: elements by name.
        output: nest of names of results.
        where: the name of the sequence in messages.

    Raises:
        ValueError: no elements, an element that cannot be called, or a name that does not exist.
    """
    for key in _WITH:
        if key in named_modules:
            raise ValueError(f"{where}: no element may be called '{key}', which is the name of all {key}s")
    elements = [_as_pair(element) for element in (*modules, *named_modules.values())]
    plain = [(_outputs_of(names), module) if names is not None else module for names, module in elements]
    plain_named = dict(zip(named_modules, plain[len(modules):]))
    steps = parse_steps(plain[:len(modules)], plain_named, _outputs_of(output), where)
    kinds = {step.name: step.module for step in steps if step.name}
    for names in (*(names for names, _ in elements), output):
        _check_kinds(names, kinds, where)
    return [step._replace(inputs=names) for step, (names, _) in zip(steps, elements)]


class Selector:
    """A nest of results by their names, which are taken apart once and not at each step.

    Args:
        names: nest of names; ``None``: the result before.
    """

    def __init__(self, names: Nested):
        self._structure = nest.structure('' if names is None else names)
        self._names = ['' if name is None else name for name in nest.flatten('' if names is None else names)]
        self._paths = [name.split('.') for name in self._names]

    def __call__(self, results: Mapping[str, Any]) -> Nested:
        """Select from ``results`` by name, of which ``''`` is the latest.

        Raises:
            LookupError: a result has no such field; the message names the nearest one.
        """
        found = []
        for name, path in zip(self._names, self._paths):
            value: Any = results
            for key in path:
                if isinstance(value, dict) and key in value:
                    value = value[key]
                elif key in getattr(value, '_fields', ()):
                    value = getattr(value, key)
                else:  # by position, or an error that says what there is
                    value = nest.get_field({path[0]: results[path[0]]}, name)
                    break
            found.append(value)
        return self._structure.unflatten(found)


def _as_pair(element: Any) -> tuple[Nested, Any]:
    """``(names, module)``; the names are ``None`` where none are given."""
    if isinstance(element, tuple) and len(element) == 2 and callable(element[1]):
        return element
    return None, element


def _outputs_of(names: Nested) -> Nested:
    """The names of the results of those elements whose states or infos are meant, and all others as they are."""

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
            raise ValueError(f"{where}: '{name}' does not exist, as '{key}' is a {type(module).__name__}; there are "
                             'infos of algorithms, and states of algorithms and networks')
