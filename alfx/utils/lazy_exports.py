"""Packages that hand on the names of their modules: ``from alfx.networks import EncodingNetwork``."""
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def from_modules(package: ModuleType, modules: Sequence[str] = ()) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that looks for names in its modules, which are imported one by one to do so.

    Args:
        package: whose names they become.
        modules: in which order to look; by default in all, in alphabetical order. What is in one but was defined in
            another module does not count.
    """
    def look_up(name: str) -> Any:
        if not name.startswith('_'):
            for module in modules or [found.name for found in pkgutil.iter_modules(package.__path__)]:
                try:
                    defined = vars(importlib.import_module(f'{package.__name__}.{module}'))
                except ImportError as error:
                    if (error.name or '').split('.')[0] == 'alfx':
                        raise
                    continue  # it needs something that is not installed
                if getattr(defined.get(name), '__module__', None) == f'{package.__name__}.{module}':
                    return defined[name]
        raise AttributeError(f'module {package.__name__!r} has no attribute {name!r}')
    return look_up
