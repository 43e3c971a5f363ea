"""Computing layers in float64, so that what is rounded to float32 afterwards does not depend on who has computed it."""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class LinearLayersInDouble(TorchFunctionMode):
    """A context in which linear layers, and all that is computed of what they put out, are float64.

    In float32 the last bits of a sum depend on the order of its terms, and with it on the batch size, the machine and
    the library. Rounded from float64, a result is the same float32 in all of them, but for one in many millions.
    Parameters stay as they are; convolutions are as exact as before, as runtimes of exported policies have them in
    float32 alone.
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
