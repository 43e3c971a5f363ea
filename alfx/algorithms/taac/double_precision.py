"""Linear layers in float64, whose float32 results do not depend on the batch size and the machine."""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class LinearLayersInDouble(TorchFunctionMode):
    """Context in which linear layers, and everything computed from their outputs, are float64.

    In float32 the last bits of a sum depend on the order of its terms, and therefore on the batch size, the machine and
    the library. A result that is computed in float64 and rounded to float32 is the same for all of them, apart from one
    result in many millions. Parameters do not change. Convolutions stay in float32, because runtimes of exported
    policies support them only in float32.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if func is F.linear or any(x.dtype == torch.float64 for x in given):
            args = [_in_double(x) for x in args]
            kwargs = {key: _in_double(x) for key, x in kwargs.items()}
        return func(*args, **kwargs)


def _in_double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
