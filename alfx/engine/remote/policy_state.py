"""Transfer of the weights of an algorithm to processes that act or evaluate."""
import io
from collections.abc import Container
from typing import Any

import torch

_NOT_ACTING = ('_metrics.', '_root_replay_buffer.')


def policy_tensors(algorithm: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that determine how an algorithm acts, not copies: parameters and buffers, without metrics."""
    return {key: value for key, value in algorithm.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor) and not key.startswith(_NOT_ACTING)}


def states_in_python(algorithm: Any) -> list[str]:
    """Return the names of user-defined classes that keep state outside of tensors, which is not transferred."""
    return [type(part).__name__ for part in algorithm.modules()
            if not type(part).get_extra_state.__module__.startswith(('alfx.', 'torch.'))]


def policy_buffers(algorithm: Any) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the module and the name of each buffer among :func:`policy_tensors`."""
    keys = policy_tensors(algorithm)
    found = {f'{prefix}.{name}' if prefix else name: (module, name)
             for prefix, module in algorithm.named_modules() for name in module._buffers}
    return {key: found[key] for key in keys if key in found}


def look_up_buffers(tensors: dict[str, torch.Tensor], buffers: dict[str, tuple[torch.nn.Module, str]]) -> None:
    """Update the result of :func:`policy_tensors`, because an algorithm may replace its buffers.

    Args:
        tensors: result of :func:`policy_tensors`; changed in place.
        buffers: result of :func:`policy_buffers`.
    """
    for key, (module, name) in buffers.items():
        tensor = module._buffers[name]
        assert tensor is not None, f'{key} is not a tensor'
        tensors[key] = tensor


def policy_state(algorithm: Any) -> dict[str, torch.Tensor]:
    """Return copies on the CPU of the tensors that determine how an algorithm acts, see :func:`policy_tensors`."""
    return {key: value.detach().cpu() for key, value in policy_tensors(algorithm).items()}


def load_policy_state(algorithm: Any, state: dict[str, torch.Tensor], keep: Container[str] = ()) -> None:
    """Copy the result of :func:`policy_state` into an algorithm.

    Args:
        algorithm: algorithm of the same construction.
        state: tensors by key.
        keep: keys of tensors that are not changed.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    copy_tensors(policy_tensors(algorithm), state, keep)


def copy_tensors(to: dict[str, torch.Tensor], state: dict[str, torch.Tensor], keep: Container[str] = ()) -> None:
    """Copy ``state`` into ``to``, as :func:`load_policy_state`, for callers that keep :func:`policy_tensors`, which is
    slow.
    """
    own = {key: tensor for key, tensor in to.items() if key not in keep}
    for key, tensor in own.items():
        if key not in state or state[key].shape != tensor.shape:
            found = tuple(state[key].shape) if key in state else 'none'
            raise ValueError(f'{key}: expected a tensor of shape {tuple(tensor.shape)}, found {found}')
    if own:
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), [state[key] for key in own])


def pack(state: dict[str, torch.Tensor]) -> bytes:
    """Return tensors by key as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of :func:`pack`; no code is unpickled."""
    return torch.load(io.BytesIO(packed), weights_only=True)
