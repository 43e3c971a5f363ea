"""One discrete action, for algorithms that compare the values of all actions."""
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec


class DiscreteAction:
    """Translates between an action of the environment, any ``minimum .. maximum``, and its index ``0 .. n - 1``.

    Args:
        action_spec: one scalar discrete ``BoundedTensorSpec``, possibly alone in a nest.
        owner: who needs it, for the message.

    Raises:
        ValueError: the action is another one.
    """

    def __init__(self, action_spec: NestedTensorSpec, owner: str):
        specs: list[Any] = nest.flatten(action_spec)
        if len(specs) != 1 or not isinstance(specs[0], BoundedTensorSpec) or not specs[0].is_discrete or specs[0].ndim:
            raise ValueError(f'{owner}: expected one discrete action, a scalar BoundedTensorSpec of integers, found '
                             f'{action_spec}; SacAlgorithm takes continuous and mixed actions')
        self.spec = specs[0]
        self.num_actions = int(self.spec.maximum) - int(self.spec.minimum) + 1
        self._first = int(self.spec.minimum)
        self._nest = None if isinstance(action_spec, TensorSpec) else action_spec

    def index(self, action: NestedTensor) -> Tensor:
        """int64 ``[...]`` of actions ``[...]``."""
        leaf = action if isinstance(action, Tensor) else nest.flatten(action)[0]
        return leaf.long() - self._first if self._first else leaf.long()

    def action(self, index: Tensor) -> NestedTensor:
        """The actions ``[...]``, as the spec has them, of an index ``[...]``."""
        leaf = (index + self._first if self._first else index).to(self.spec.dtype)
        return leaf if self._nest is None else nest.pack_sequence_as(self._nest, [leaf])

    def explore(self, index: Tensor, epsilon: float) -> Tensor:
        """``index`` ``[B]``, each with probability ``epsilon`` replaced by a uniformly random one."""
        if epsilon <= 0.0:
            return index
        random = torch.randint(self.num_actions, index.shape, device=index.device)
        if epsilon >= 1.0:
            return random
        return torch.where(torch.rand(index.shape, device=index.device) < epsilon, random, index)
