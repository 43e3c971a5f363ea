"""Lazy exports: packages that provide the names of their modules, ``from alfx.networks import EncodingNetwork``."""
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def from_modules(package: ModuleType, modules: Sequence[str] = ()) -> Callable[[str], Any]:
    """Create the ``__getattr__`` of a package that looks up names in its modules and imports them as needed.

    Args:
        package: package that exports the names.
        modules: modules in search order; by default all modules, in alphabetical order. Names that a module imported
            from another module are ignored.
    """
    def look_up(name: str) -> Any:
        if not name.startswith('_'):
            for module in modules or [found.name for found in pkgutil.iter_modules(package.__path__)]:
                try:
                    defined = vars(importlib.import_module(f'{package.__name__}.{module}'))
                except ImportError as error:
                    if (error.name or '').split('.')[0] == 'alfx':
                        raise
                    continue  # the module needs a package that is not installed
                if getattr(defined.get(name), '__module__', None) == f'{package.__name__}.{module}':
                    return defined[name]
        raise AttributeError(f'module {package.__name__!r} has no attribute {name!r}')
    return look_up
