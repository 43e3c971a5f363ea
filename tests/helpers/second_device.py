"""A simulated second device, so that code that forgets the device of a new tensor fails without a GPU.

Within :func:`second_device` the device 'meta' computes: a tensor there holds an ordinary one, on which every operation
runs. An operation on tensors of both devices fails as it would with a GPU, and so does ``numpy()``.
"""
import contextlib

import torch
from optree import tree_leaves, tree_map
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device('meta')
_aten = torch.ops.aten
# between devices by nature: copies, and indices, which may be on the CPU
_CROSSING = (_aten.copy_.default, _aten._to_copy.default, _aten._foreach_copy_.default, _aten.index.Tensor,
             _aten.index_put_.default, _aten.index_put.default, _aten.set_.source_Storage)


class SecondDeviceTensor(torch.Tensor):
    """A tensor on the second device; ``tensor`` is the tensor with its values."""

    tensor: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, tensor.size(), strides=tensor.stride(), storage_offset=tensor.storage_offset(), dtype=tensor.dtype,
            layout=tensor.layout, device=DEVICE, requires_grad=False)

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __repr__(self):
        return f'SecondDeviceTensor({self.tensor!r})'

    def tolist(self):
        return self.tensor.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert a tensor of the second device to numpy; use Tensor.cpu() first")

    __array__ = numpy

    def __deepcopy__(self, memo):
        copied = SecondDeviceTensor(self.tensor.detach().clone())
        return torch.nn.Parameter(copied, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copied

    def __reduce_ex__(self, protocol):
        return self.tensor.__reduce_ex__(protocol)  # a checkpoint is loaded on the CPU

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs):
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_device = [x for x in tensors if isinstance(x, SecondDeviceTensor)]
    on_cpu = [x for x in tensors if not isinstance(x, SecondDeviceTensor) and x.ndim]
    device = kwargs.get('device')
    if on_device and on_cpu and func not in _CROSSING:
        raise RuntimeError(f'{func}: expected all tensors to be on the same device, found some on the second device '
                           f'and {[tuple(x.shape) for x in on_cpu]} on the CPU')
    if func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default) and on_device:
        if not isinstance(args[0], SecondDeviceTensor):
            raise RuntimeError(f'{func}: the indices are on the second device, what is indexed on the CPU')
    if device is not None:
        kwargs = {**kwargs, 'device': torch.device('cpu')}
    wraps = torch.device(device).type == DEVICE.type if device is not None else bool(on_device)
    unwrapped_args, unwrapped_kwargs = tree_map(_unwrap, (args, kwargs))
    result = func(*unwrapped_args, **unwrapped_kwargs)
    if func in (_aten.copy_.default, _aten._foreach_copy_.default):
        return args[0] if func is _aten.copy_.default else None
    if not wraps:
        return result
    wrapped = tree_map(lambda x: SecondDeviceTensor(x) if isinstance(x, torch.Tensor) else x, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _unwrap(x):
    return x.tensor if isinstance(x, SecondDeviceTensor) else x


class _SecondDevice(TorchDispatchMode):
    """Mode that also intercepts functions that create tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        flat = tree_leaves((args, kwargs))
        if any(isinstance(x, SecondDeviceTensor) for x in flat) or (
                kwargs.get('device') is not None and torch.device(kwargs['device']).type == DEVICE.type):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


class _FromData(TorchFunctionMode):
    """Mode that creates tensors from data on the second device and returns their values from ``item()``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            device = kwargs.pop('device', None)
            created = func(*args, **kwargs)
            return created if device is None else created.to(device)
        if func is torch.Tensor.item and isinstance(args[0], SecondDeviceTensor):
            return args[0].tensor.item()
        return func(*args, **kwargs)


@contextlib.contextmanager
def second_device():
    """Enable the second device within the context and return it."""
    with _SecondDevice(), _FromData():
        yield DEVICE
