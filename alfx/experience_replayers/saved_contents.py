"""Reading the saved contents of a replay buffer without constructing that buffer."""
import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from alfx.experience_replayers.packed_storage import PackedStorage
from alfx.tensor_specs import TensorSpec


def saved_steps(state: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Yield the steps of each environment in a state of ``ReplayBuffer.state_dict``, oldest first.

    Yields:
        For each environment with any steps, tensors ``[R, ...]`` by the path of the leaf.
    """
    paths, specs = zip(*map(_parsed, state['leaves']))
    blocks = state['blocks']
    rows, num_envs = blocks[0].shape[:2]
    if not rows:
        return
    store = PackedStorage(specs, rows, num_envs, torch.device('cpu'))
    for block, saved in zip(store.blocks, blocks):
        block.copy_(saved)
    leaves = [store.field(i).unflatten(0, (rows, num_envs)) for i in range(len(specs))]
    for env_id, (position, size) in enumerate(zip(state['current_pos'].tolist(), state['current_size'].tolist())):
        if size:
            places = torch.arange(position - size, position) % state['max_length']
            yield {path: leaf[places, env_id] for path, leaf in zip(paths, leaves)}


def _parsed(description: str) -> tuple[str, TensorSpec]:
    """Return path and spec of a description such as ``'time_step.reward: float32 ()'``."""
    path, _, rest = description.rpartition(': ')
    dtype, _, shape = rest.partition(' ')
    return path, TensorSpec(ast.literal_eval(shape), getattr(torch, dtype))
