"""Functions that algorithms written for the Agent Learning Framework import from ``alf.utils.common``.

These are the functions with one obvious meaning in alfx. ``docs/coming_from_alf.md`` lists all names of that module
and the replacements.
"""
from typing import Any

from torch import Tensor

from alfx import nest
from alfx.context import (eval_context, exe_mode_name, get_action_spec, get_observation_spec, get_raw_observation_spec,
                          get_reward_spec, is_eval, is_pretrain, is_replay, is_rollout, pretrain_context,
                          replay_context, rollout_context, set_exe_mode)
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, select
from alfx.utils.random_state import set_random_seed
from alfx.utils.spec_utils import zeros_from_spec
from alfx.utils.target_updater import TargetUpdater

__all__ = [
    'TargetUpdater', 'as_list', 'detach', 'eval_context', 'exe_mode_name', 'expand_dims_as', 'get_action_spec',
    'get_initial_policy_state', 'get_observation_spec', 'get_raw_observation_spec', 'get_reward_spec', 'is_eval',
    'is_pretrain', 'is_replay', 'is_rollout', 'pretrain_context', 'replay_context', 'reset_state_if_necessary',
    'rollout_context', 'set_exe_mode', 'set_random_seed', 'tuplify2d'
]


def as_list(x: Any) -> list[Any]:
    """Return a list or tuple as a list, and anything else as a list of one element."""
    return list(x) if isinstance(x, (list, tuple)) else [x]


def tuplify2d(x: Any) -> tuple[Any, Any]:
    """Return ``(x, x)`` for a number, and a pair as a tuple."""
    height, width = x if isinstance(x, (list, tuple)) else (x, x)
    return height, width


def expand_dims_as(x: Tensor, y: Tensor, end: bool = True) -> Tensor:
    """Reshape ``x`` to as many dimensions as ``y`` has by adding dimensions of size 1.

    Args:
        x: tensor with at most as many dimensions as ``y``.
        y: tensor of any shape.
        end: add the dimensions after those of ``x`` instead of before them.

    Raises:
        ValueError: ``x`` has more dimensions than ``y``.
    """
    if x.ndim > y.ndim:
        raise ValueError(f'expand_dims_as: expected x with at most {y.ndim} dimensions, found shape {tuple(x.shape)}')
    added = [1] * (y.ndim - x.ndim)
    return x.reshape(*x.shape, *added) if end else x.reshape(*added, *x.shape)


def detach(nests: NestedTensor) -> NestedTensor:
    """Return a nest of the same tensors, detached from their graph."""
    return nest.map_structure(Tensor.detach, nests)


def reset_state_if_necessary(state: NestedTensor, initial_state: NestedTensor, reset_mask: Tensor) -> NestedTensor:
    """Replace the states of some environments by their initial states.

    Args:
        state: nest of ``[B, ...]``.
        initial_state: nest of the same structure and shapes.
        reset_mask: bool ``[B]``; True where the state is replaced.
    """
    return select(reset_mask, initial_state, state)


def get_initial_policy_state(batch_size: int, policy_state_spec: NestedTensorSpec) -> NestedTensor:
    """Return the state of a policy at the start of an episode: zeros ``[batch_size, ...]``."""
    return zeros_from_spec(policy_state_spec, batch_size)
