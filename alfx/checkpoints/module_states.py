"""States of modules in checkpoints: excluded parts, replay buffers, and comparison with the modules to load."""
import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from alfx.checkpoints.files import CheckpointError

_EXTRA, _REPLAY = '_extra_state', 'replay_buffer'  # keys of the part of a state that goes into the replay file
NOT_FITTING = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError)

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


def check_plain(value: Any, path: str = '') -> None:
    """Raise a TypeError that names the first part of a state that could be saved in a checkpoint, but not loaded."""
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        for key, item in value.items():
            check_plain(key, path)
            check_plain(item, f'{path}[{key!r}]')
    elif type(value) in (list, tuple, torch.Size):  # checkpoints with subclasses, such as named tuples, cannot be read
        for number, item in enumerate(value):
            check_plain(item, f'{path}[{number}]')
    elif not isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
        raise TypeError('expected numbers, strings, tensors, None, and lists and dicts of these, found '
                        f'{type(value).__module__}.{type(value).__name__}{path and f" in the state {path}"}')


def mismatch_error(path: str, name: str, reason: object) -> CheckpointError:
    """Return the error for a part of a checkpoint that does not fit the modules to load."""
    return CheckpointError(f'{path} does not match the modules to load, part {name!r}: {reason or repr(reason)}; was '
                           'it written with another conf?')


def enable_checkpoint(module: nn.Module, flag: bool = True) -> None:
    """Include or exclude the state of ``module`` in checkpoints; by default it is included.

    An excluded module keeps its values when a checkpoint is loaded.
    """
    module._is_checkpoint_enabled = flag  # type: ignore[assignment]


def is_checkpoint_enabled(module: nn.Module) -> bool:
    """Return whether checkpoints include the state of ``module``."""
    return bool(getattr(module, '_is_checkpoint_enabled', True))


def state_of(module: Any) -> dict[str, Any]:
    state = module.state_dict()
    if isinstance(module, nn.Module):
        left_out = _left_out(module)
        state = {key: value for key, value in state.items() if not key.startswith(left_out)}
    return dict(state)


def fill_in(module: Any, state: dict[str, Any], name: str, ignored: Sequence[str], ignore_unexpected: bool) -> Any:
    """Return ``state`` with the current values of the module for entries that are kept."""
    if not isinstance(module, nn.Module):
        return state
    own = module.state_dict()
    kept_parts = _left_out(module)
    prefixes = tuple(ignored)

    def is_ignored(key: str) -> bool:
        return key.startswith(prefixes) or f'{name}.{key}'.startswith(prefixes)

    kept = {key: value for key, value in own.items() if key.startswith(kept_parts) or is_ignored(key)}
    if ignore_unexpected:
        state = {key: value for key, value in state.items() if key in own}
    return {**{key: value for key, value in state.items() if not is_ignored(key)}, **kept}


def _left_out(module: nn.Module) -> tuple[str, ...]:
    """Return the key prefixes of the parts that checkpoints exclude."""
    return tuple(f'{name}.' for name, part in module.named_modules() if name and not is_checkpoint_enabled(part))


def check_keys(path: str, name: str, module: Any, state: dict[str, Any]) -> None:
    """Raise an error that names missing and unexpected entries, before anything is loaded."""
    own = module.state_dict()
    parts = module.named_modules(prefix='.') if isinstance(module, nn.Module) else [('.', module)]
    optional = {f'{part}.{key}'.lstrip('.') for part, owner in parts for key in getattr(owner, 'optional_keys', ())}
    problems = [f'{what} {", ".join(keys)}' for what, keys in (
        ('missing:', [k for k in own if k not in state and k not in optional]),
        ('unexpected:', [k for k in state if k not in own and k not in optional]))
                if keys]
    if problems:
        raise mismatch_error(path, name, '; '.join(problems))


def has_replay_buffer(module: Any) -> bool:
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return any(getattr(part, _REPLAY, None) is not None for part in parts)


def take_replay_out(states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``{name: state_dict}`` into the states without replay buffers, and the replay buffers by name and key."""
    rest, replay = {}, {}
    for name, state in states.items():
        found = {key: value[_REPLAY] for key, value in state.items()
                 if key.split('.')[-1] == _EXTRA and isinstance(value, dict) and _REPLAY in value}
        rest[name] = {**state, **{key: {k: v for k, v in state[key].items() if k != _REPLAY} for key in found}}
        if found:
            replay[name] = found
    return rest, replay


def put_replay_in(states: dict[str, Any], replay: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`take_replay_out`."""
    return {name: {**state, **{key: {**state[key], _REPLAY: buffer}
                               for key, buffer in replay.get(name, {}).items()}} for name, state in states.items()}
