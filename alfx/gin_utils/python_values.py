"""Values of a Python program as gin text, so that a program can set what a conf file can."""
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import gin
import numpy as np

from alfx.gin_utils.conf_error import ConfError
from . import registry

_log = logging.getLogger(__name__)

_HINT = 'pass a number, a string, None, a function or class that a conf can name, or lists, tuples and dicts of these'
gin.constant('alfx.infinity', float('inf'))
gin.constant('alfx.minus_infinity', float('-inf'))


class _Modules(dict[str, None]):
    """Modules to import, and the module of the running program; see :func:`binding_lines`."""

    def __init__(self, main: str | None):
        super().__init__()
        self.main = main


def binding_lines(params: Mapping[str, Any], main_module: str | None = None) -> list[str]:
    """Return bindings as gin text, preceded by the imports of the modules whose functions and classes they name.

    Args:
        params: ``{'scope/Name.argument': value}``. Numbers, arrays and tensors of numpy and torch become Python numbers
            and lists, paths become strings, functions and classes become references, as do strings like '@Name',
            '@Name()' and '@Name(argument=1)'.
        main_module: module as which another process can import the running program; None if it cannot. Functions of
            the program then belong to ``__main__``, and only this program can load the run.

    Raises:
        ConfError: a value cannot be written in a conf; the message names the binding.
    """
    modules = _Modules(main_module)
    bindings = [f'{key} = {_text(key, value, modules)}' for key, value in params.items()]
    return [*(f'import {module}' for module in modules), *bindings]


def _text(key: str, value: Any, modules: '_Modules') -> str:
    """Return one value as gin text, and add the module that has to be imported for it to ``modules``."""
    if getattr(value, 'ndim', 0) and hasattr(value, 'tolist'):
        value = value.tolist()  # an array or tensor
    elif not isinstance(value, (int, float, str)) and hasattr(value, 'item') and getattr(value, 'ndim', 1) == 0:
        value = float(value) if isinstance(value, np.floating) else value.item()  # a number of numpy or torch
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    kind: Any
    if isinstance(value, str) and re.fullmatch(r'@[\w./]+(\(.*\))?', value):
        return value  # a reference
    for kind in (bool, int, float, str, bytes):
        if isinstance(value, kind):
            value = str.__str__(value) if isinstance(value, str) else value  # of a member of an enumeration
            return _number(key, float(value)) if kind is float else repr(kind(value))
    if value is None:
        return 'None'
    if isinstance(value, Mapping):
        return '{' + ', '.join(f'{_text(key, k, modules)}: {_text(key, v, modules)}' for k, v in value.items()) + '}'
    if isinstance(value, (list, tuple)):
        items = ', '.join(_text(key, item, modules) for item in value)
        return f'[{items}]' if isinstance(value, list) else f'({items},)' if len(value) == 1 else f'({items})'
    if inspect.isclass(value) or inspect.isroutine(value):
        return f'@{_selector(key, value, modules)}'
    raise ConfError(f'{key} = {value!r}: a conf cannot contain an object of type {type(value).__name__}', _HINT)


def _number(key: str, value: float) -> str:
    if value != value:
        raise ConfError(f'{key} = nan: not a number', 'pass a number')
    return repr(value) if abs(value) != float('inf') else f'%alfx.{"minus_" if value < 0 else ""}infinity'


def _selector(key: str, value: Any, modules: '_Modules') -> str:
    """Return the name by which a conf refers to a function or class."""
    selector = next(_registered_names(value), '')
    module, name = getattr(value, '__module__', None) or '', getattr(value, '__qualname__', '')
    if not selector and getattr(sys.modules.get(module), name, None) is value:
        selector = f'{module}.{name}'
    if not selector or '<locals>' in name:
        raise ConfError(f'{key} = {value!r}: a conf cannot name it, because another process that evaluates or resumes '
                        'the run cannot import it', 'define it at the top level of a module')
    if module == '__main__':
        module = modules.main or module
        selector = selector.replace('__main__', module, 1)  # may be registered under another name
        if modules.main is None:
            _log.warning('%s = %r belongs to this program: other programs, such as alfx play, cannot load the run; '
                         'define it in a module of its own', key, value)
    if module.partition('.')[0] not in ('alfx', 'torch', 'builtins'):
        modules[module] = None
    return selector


def _registered_names(value: Any) -> Iterator[str]:
    entry = gin.config._INVERSE_REGISTRY.get(value)
    if entry is not None:
        yield entry.selector
    yield from (name for name in registry.registered_selectors() if registry.step_function_of(name) is value)
