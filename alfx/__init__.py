"""alfx: a config-driven reinforcement-learning experiment runner for PyTorch.

From Python, :func:`train` trains from a conf, :func:`check` checks one, :func:`load` returns the trained policy of a
run, and :func:`evaluate`, :func:`plot` and :func:`read_progress` read its results (``docs/use_from_python.md``). Every
name is imported on first use, so ``import alfx`` alone is fast and does not import torch.
"""
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alfx import nest
    from alfx.data_structures import AlgStep, BatchInfo, Experience, LossInfo, StepType, TimeStep
    from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

__version__ = '0.10.0'
__all__ = [
    'AlgStep', 'BatchInfo', 'BoundedTensorSpec', 'Experience', 'LossInfo', 'StepType', 'TensorSpec', 'TimeStep',
    'check', 'evaluate', 'load', 'nest', 'plot', 'read_progress', 'train'
]
_DEFINED_IN = {
    **dict.fromkeys(('AlgStep', 'BatchInfo', 'Experience', 'LossInfo', 'StepType', 'TimeStep'), 'data_structures'),
    **dict.fromkeys(('BoundedTensorSpec', 'TensorSpec'), 'tensor_specs'),
    **dict.fromkeys(('check', 'evaluate', 'load', 'plot', 'read_progress', 'train'), 'python_interface'),
}


class _FormerModules:
    """Lets modules be imported by the names they had before; see :mod:`alfx.utils.renamed`."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module with a former name, ``None`` for any other."""
        if not fullname.startswith('alfx.'):
            return None
        return importlib.import_module('alfx.utils.renamed').find_former_module(fullname)


sys.meta_path.append(_FormerModules)


def __getattr__(name: str) -> Any:
    if name in ('nest', 'gin_utils'):
        return importlib.import_module(f'alfx.{name}')
    if name not in _DEFINED_IN:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(f'alfx.{_DEFINED_IN[name]}'), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
