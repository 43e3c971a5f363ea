"""Properties of activation functions: out-of-place counterparts and elementwise functions."""
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from alfx.utils import math_ops

_ELEMENTWISE_NAMES = (
    'relu tanh sigmoid exp log log1p abs square sqrt sin cos sign selu celu relu6 elu leaky_relu gelu silu mish '
    'softplus softsign hardtanh hardswish hardsigmoid logsigmoid tanhshrink softshrink hardshrink').split()
_ELEMENTWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Sigmoid, nn.Softshrink,
    nn.Hardshrink, nn.Identity, nn.Dropout)


def _function_tables() -> tuple[dict[Any, Any], set[Any]]:
    """Return the in-place functions with their counterparts, and all elementwise functions."""
    out_of_place_of: dict[Any, Any] = {}
    elementwise: set[Any] = set()
    for module in (torch, F, math_ops):
        for name in _ELEMENTWISE_NAMES:
            function = getattr(module, name, None)
            in_place = getattr(module, name + '_', None)
            if function is not None:
                elementwise.add(function)
            if in_place is not None:
                out_of_place_of.setdefault(in_place, function or getattr(F, name))
                elementwise.add(in_place)
    return out_of_place_of, elementwise


_OUT_OF_PLACE_OF, _ELEMENTWISE = _function_tables()


def out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the out-of-place counterpart of a known in-place activation, and any other ``function`` unchanged.

    ``torch.relu_`` gives ``torch.relu``, and ``nn.ReLU(inplace=True)`` a module with ``inplace=False``.
    """
    if isinstance(function, nn.Module):
        if getattr(function, 'inplace', False) is True:
            function = copy.copy(function)
            function.inplace = False  # type: ignore[assignment]
        return function
    if isinstance(function, partial):
        keywords = {key: value for key, value in function.keywords.items() if key != 'inplace'}
        return partial(out_of_place(function.func), *function.args, **keywords)
    try:
        return _OUT_OF_PLACE_OF.get(function, function)
    except TypeError:  # unhashable
        return function


def is_elementwise(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` is known to be an elementwise activation without parameters."""
    if isinstance(function, nn.Module):
        return type(function) in _ELEMENTWISE_MODULES
    if isinstance(function, partial):
        return is_elementwise(function.func)
    try:
        return function in _ELEMENTWISE
    except TypeError:  # unhashable
        return False
