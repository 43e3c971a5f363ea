"""How the weights of an algorithm travel to the processes that act or evaluate."""
import io
from collections.abc import Container
from typing import Any

import torch

_NOT_ACTING = ('_metrics.', '_root_replay_buffer.')


def policy_tensors(algorithm: Any) -> dict[str, torch.Tensor]:
    """The tensors that decide how an algorithm acts, themselves: parameters and buffers, without metrics."""
    return {key: value for key, value in algorithm.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor) and not key.startswith(_NOT_ACTING)}


def policy_buffers(algorithm: Any) -> dict[str, tuple[torch.nn.Module, str]]:
    """Those of :func:`policy_tensors` that are no parameters: the module and the name that each is a buffer by."""
    keys = policy_tensors(algorithm)
    found = {f'{prefix}.{name}' if prefix else name: (module, name)
             for prefix, module in algorithm.named_modules() for name in module._buffers}
    return {key: found[key] for key in keys if key in found}


def look_up_buffers(tensors: dict[str, torch.Tensor], buffers: dict[str, tuple[torch.nn.Module, str]]) -> None:
    """Bring the result of :func:`policy_tensors` up to date: an algorithm may replace its buffers.

    Args:
        tensors: that result; changed.
        buffers: of :func:`policy_buffers`.
    """
    for key, (module, name) in buffers.items():
        tensor = module._buffers[name]
        assert tensor is not None, f'{key} is a tensor'
        tensors[key] = tensor


def policy_state(algorithm: Any) -> dict[str, torch.Tensor]:
    """The tensors that decide how an algorithm acts: parameters and buffers, without optimizers and metrics."""
    return {key: value.detach().cpu() for key, value in policy_tensors(algorithm).items()}


def load_policy_state(algorithm: Any, state: dict[str, torch.Tensor], keep: Container[str] = ()) -> None:
    """Copy what :func:`policy_state` returned into an algorithm.

    Args:
        algorithm: equally constructed.
        state: tensors by key.
        keep: keys of what is left as it is.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    copy_tensors(policy_tensors(algorithm), state, keep)


def copy_tensors(to: dict[str, torch.Tensor], state: dict[str, torch.Tensor], keep: Container[str] = ()) -> None:
    """:func:`load_policy_state` for those who keep the result of :func:`policy_tensors`, which takes its time."""
    own = {key: tensor for key, tensor in to.items() if key not in keep}
    for key, tensor in own.items():
        if key not in state or state[key].shape != tensor.shape:
            found = tuple(state[key].shape) if key in state else 'nothing'
            raise ValueError(f'{key}: expected a tensor of shape {tuple(tensor.shape)}, found {found}')
    if own:
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), [state[key] for key in own])


def pack(state: dict[str, torch.Tensor]) -> bytes:
    """Tensors by key as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> dict[str, torch.Tensor]:
    """The inverse of :func:`pack`; no code is unpickled."""
    return torch.load(io.BytesIO(packed), weights_only=True)
