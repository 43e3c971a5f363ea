"""External memories: a matrix of slots that is written to and read by content.

A memory object holds the current contents of a batch of memories and has no parameters. Its contents are given to it
and taken from it as a nest of tensors, which is what a recurrent algorithm keeps as its state. Zeros are an empty
memory, so that a state which is reset to zeros forgets everything::

    memory.from_states(state)                    # or memory.build(batch_size), which is empty
    found = memory.genkey_and_read(key_net, query)
    memory.write(content)
    state = memory.states

No method changes a tensor in place, so that gradients flow from a read through earlier writes, and a state that was
taken stays what it was. :class:`MemoryWithUsage` is the memory of MERLIN (Wayne et al. 2018, arXiv:1803.10760, methods,
"Memory"), whose reading by keys and strengths is that of the differentiable neural computer (Graves et al. 2016,
doi:10.1038/nature20101, "Content-based addressing"). Differences:

- A write occupies one slot, the least used one (as in MERLIN); the DNC distributes it by learned gates.
- Slots that were never written are not read, where both papers read them as zeros: what is found does not depend on how
  much of the memory is still empty.
- Usage decays, unless told otherwise, so that what was read long ago can be overwritten.
- There is no retroactive update of what was written earlier.
"""
import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from alfx import context
from alfx.gin_utils import configurable
from alfx.gin_utils.value_checks import Fraction
from alfx.layers import FC
from alfx.nest import map_structure
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec, check_consistent


def content_weights(keys: torch.Tensor, memory: torch.Tensor, scale: float | torch.Tensor, normalize: bool = True,
                    mask: torch.Tensor | None = None) -> torch.Tensor:
    """How much a read by each key takes from each slot (Graves et al. 2016, eq. 1).

        ``w[k, i] = softmax_i(scale[k] * similarity(key[k], memory[i]))``

    Args:
        keys: ``[B, K, dim]``.
        memory: ``[B, size, dim]``.
        scale: the strength: a number, or ``[B, K]`` with one for each key.
        normalize: similarity is the cosine, which is 0 for a slot of zeros; otherwise the inner product.
        mask: bool ``[B, size]``: only slots where it is True are read; without one the weights are 0.

    Returns:
        ``[B, K, size]``, positive and, over the slots, of sum 1.
    """
    if normalize:
        keys, memory = F.normalize(keys, dim=-1), F.normalize(memory, dim=-1)
    similarity = torch.bmm(keys, memory.transpose(1, 2))
    similarity = similarity * (scale.unsqueeze(-1) if isinstance(scale, torch.Tensor) else scale)
    if mask is None:
        return torch.softmax(similarity, dim=-1)
    mask = mask.unsqueeze(1)
    return torch.softmax(similarity.masked_fill(~mask, torch.finfo(similarity.dtype).min), dim=-1) * mask


class Memory:
    """Base of memories: ``size`` slots of ``dim`` numbers.

    Args:
        dim: numbers in a slot.
        size: number of slots.
        state_spec: nest of specs of :attr:`states`; zeros are an empty memory.
        name: name of the memory, used in messages.

    Raises:
        ValueError: ``dim`` or ``size`` is less than 1.
    """

    def __init__(self, dim: int, size: int, state_spec: NestedTensorSpec, name: str = 'Memory'):
        if dim < 1 or size < 1:
            raise ValueError(f'{name}: expected dim and size of at least 1, found dim={dim}, size={size}')
        self._dim, self._size = dim, size
        self._state_spec = state_spec
        self._name = name
        self._states: Any = None

    @property
    def dim(self) -> int:
        """Numbers in a slot."""
        return self._dim

    @property
    def size(self) -> int:
        """Number of slots."""
        return self._size

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs of :attr:`states`."""
        return self._state_spec

    @property
    def name(self) -> str:
        """Name of the memory."""
        return self._name

    @property
    def states(self) -> NestedTensor:
        """The contents, nest of ``[B, ...]``.

        Raises:
            RuntimeError: there are none.
        """
        if self._states is None:
            raise RuntimeError(f'{self._name} holds no contents: call build(batch_size) or from_states(states) first')
        return self._states

    def build(self, batch_size: int) -> None:
        """Begin with a batch of empty memories, on the default device."""
        device = context.get_default_device()
        self._states = map_structure(lambda spec: spec.zeros((batch_size, )).to(device), self._state_spec)

    def from_states(self, states: NestedTensor) -> None:
        """Go on with contents that were once :attr:`states`.

        Raises:
            SpecError: they do not match :attr:`state_spec`.
        """
        check_consistent(states, self._state_spec, 1, f'{self._name}: states')
        self._states = states

    def release(self) -> None:
        """Hold no contents any more, nor the graph that made them."""
        self._states = None

    def reset(self, reset_mask: torch.Tensor | None = None) -> None:
        """Empty the memories.

        Args:
            reset_mask: bool ``[B]``: which ones; ``None``: all.
        """
        def emptied(x: torch.Tensor) -> torch.Tensor:
            zeros = torch.zeros_like(x)
            return zeros if reset_mask is None else torch.where(
                reset_mask.reshape(-1, *(1, ) * (x.ndim - 1)), zeros, x)

        self._states = map_structure(emptied, self.states)

    def read(self, keys: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        """What is found by each key.

        Args:
            keys: ``[B, dim]``, or ``[B, K, dim]`` for K keys.
            scale: strength: a number, ``[B]`` or ``[B, K]``; ``None``: the memory's own.

        Returns:
            of the shape of ``keys``.
        """
        raise NotImplementedError(f'{type(self).__name__}.read')

    def write(self, content: torch.Tensor) -> None:
        """Store ``content`` ``[B, dim]``."""
        raise NotImplementedError(f'{type(self).__name__}.write')

    def _checked_content(self, content: torch.Tensor, batch_size: int) -> torch.Tensor:
        if tuple(content.shape) != (batch_size, self._dim):
            raise SpecError(f'{self._name}.write: expected content of shape {[batch_size, self._dim]}, found '
                            f'{list(content.shape)}')
        return content

    def _checked_keys(self, keys: torch.Tensor, batch_size: int) -> torch.Tensor:
        """``[B, K, dim]`` of ``[B, dim]`` or ``[B, K, dim]``."""
        if keys.ndim not in (2, 3) or keys.shape[0] != batch_size or keys.shape[-1] != self._dim:
            raise SpecError(f'{self._name}.read: expected keys of shape {[batch_size, self._dim]} or '
                            f'{[batch_size, "K", self._dim]}, found {list(keys.shape)}')
        return keys.unsqueeze(1) if keys.ndim == 2 else keys

    def _weights(self, keys: torch.Tensor, memory: torch.Tensor, scale: float | torch.Tensor, normalize: bool,
                 mask: torch.Tensor | None = None) -> torch.Tensor:
        """``[B, K, size]``: see :func:`content_weights`; also takes one key and one strength for each memory."""
        keys = self._checked_keys(keys, memory.shape[0])
        if isinstance(scale, torch.Tensor) and scale.ndim == 1:
            scale = scale.unsqueeze(1)
        return content_weights(keys, memory, scale, normalize, mask)


class UsageMemoryState(NamedTuple):
    """The contents of :class:`MemoryWithUsage`: ``memory`` ``[B, size, dim]`` and ``usage`` ``[B, size]``."""

    memory: Any = ()
    usage: Any = ()


@configurable
class MemoryWithUsage(Memory):
    """A memory that overwrites what is used least.

    With w[k, i] what the read by the k-th key takes of slot i (0 of an empty one), and d the decay:

        read:   usage[i] = usage[i] + sum_k w[k, i]
        write:  i* = argmin_i usage[i]                  (an empty slot, whose usage is 0, if there is one)
                memory[i*] = content,  usage = d * usage,  usage[i*] = 1

    Args:
        dim: numbers in a slot.
        size: number of slots.
        snapshot_only: treat what is written as a constant: no gradient flows from a read to the writer. Otherwise the
            contents after every write are kept for the backward pass.
        normalize: compare keys with slots by the cosine; otherwise by the inner product.
        scale: strength of a read that is given none; ``None``: 5 for the cosine, ``1 / sqrt(dim)`` otherwise.
        usage_decay: d, in (0, 1]; ``None``: ``1 - 1 / size``, or 1 for a single slot.
        name: name of the memory.

    Raises:
        ValueError: a number out of its range.
    """

    def __init__(self, dim: int, size: int, snapshot_only: bool = False, normalize: bool = True,
                 scale: float | None = None, usage_decay: Fraction | None = None, name: str = 'MemoryWithUsage'):
        super().__init__(dim, size, UsageMemoryState(TensorSpec((size, dim)), TensorSpec((size, ))), name)
        if scale is None:
            scale = 5.0 if normalize else 1 / math.sqrt(dim)
        if usage_decay is None:
            usage_decay = 1 - 1 / size if size > 1 else 1.0
        if not 0 < usage_decay <= 1:
            raise ValueError(f'{name}: expected usage_decay in (0, 1], found {usage_decay}')
        self._snapshot_only = snapshot_only
        self._normalize = normalize
        self._scale = scale
        self._usage_decay = usage_decay

    @property
    def usage(self) -> torch.Tensor:
        """float32 ``[B, size]``: how much each slot was used; 0 for an empty one."""
        return self.states.usage

    def create_keynet(self, query_dim: int, num_keys: int) -> FC:
        """A layer that makes keys and strengths of queries, for :meth:`genkey_and_read`.

        Args:
            query_dim: numbers in a query.
            num_keys: keys made of each.
        """
        if num_keys < 1:
            raise ValueError(f'{self._name}: expected at least one key, found num_keys={num_keys}')
        return FC(query_dim, num_keys * (self._dim + 1))

    def genkey_and_read(self, keynet: Any, query: torch.Tensor, flatten_result: bool = True) -> torch.Tensor:
        """Make keys of a query, and read by them. The strengths are made positive by softplus.

        Args:
            keynet: made by :meth:`create_keynet`, or anything that computes ``[B, K * (dim + 1)]`` of the query:
                for each key its ``dim`` numbers and its strength.
            query: ``[B, query_dim]``.
            flatten_result: return ``[B, K * dim]`` in place of ``[B, K, dim]``.
        """
        keys = keynet(query).view(query.shape[0], -1, self._dim + 1)
        found = self.read(keys[..., :-1], F.softplus(keys[..., -1]))
        return found.flatten(1) if flatten_result else found

    def read(self, keys: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        """What is found by each key, and count it as usage; see the base class. An empty memory gives zeros.

        Raises:
            SpecError: keys of another shape.
        """
        memory, usage = self.states
        weights = self._weights(keys, memory, self._scale if scale is None else scale, self._normalize, usage > 0)
        self._states = UsageMemoryState(memory, usage + weights.detach().sum(1))
        return torch.bmm(weights, memory).view(keys.shape)

    def write(self, content: torch.Tensor) -> None:
        """Store ``content`` ``[B, dim]`` in the slot of the least usage.

        Raises:
            SpecError: content of another shape.
        """
        memory, usage = self.states
        content = self._checked_content(content, memory.shape[0])
        if self._snapshot_only:
            content = content.detach()
        is_slot = F.one_hot(usage.argmin(dim=1), self._size).bool()
        self._states = UsageMemoryState(
            memory=torch.where(is_slot.unsqueeze(-1), content.unsqueeze(1), memory),
            usage=torch.where(is_slot, 1.0, usage * self._usage_decay))


class FIFOMemoryState(NamedTuple):
    """The contents of :class:`FIFOMemory`: ``memory`` ``[B, size, dim]`` and ``count`` int64 ``[B]``."""

    memory: Any = ()
    count: Any = ()


@configurable
class FIFOMemory(Memory):
    """A memory of the latest ``size`` writes, the newest in the last slot.

    Args:
        dim: numbers in a slot.
        size: number of slots.
        name: name of the memory.
    """

    def __init__(self, dim: int, size: int, name: str = 'FIFOMemory'):
        super().__init__(dim, size, FIFOMemoryState(TensorSpec((size, dim)), TensorSpec((), torch.int64)), name)

    @property
    def memory(self) -> torch.Tensor:
        """``[B, size, dim]``: from the oldest to the newest; empty slots, which come first, are zeros."""
        return self.states.memory

    @property
    def mask(self) -> torch.Tensor:
        """bool ``[B, size]``: True for slots that hold something."""
        slots = torch.arange(self._size, device=self.memory.device)
        return slots >= self._size - self.states.count.unsqueeze(1)

    def write(self, content: torch.Tensor) -> None:
        """Store ``content`` ``[B, dim]`` as the newest; a full memory loses its oldest.

        Raises:
            SpecError: content of another shape.
        """
        memory, count = self.states
        content = self._checked_content(content, memory.shape[0])
        self._states = FIFOMemoryState(memory=torch.cat([memory[:, 1:], content.unsqueeze(1)], dim=1),
                                       count=(count + 1).clamp(max=self._size))

    def read(self, keys: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        """Scaled dot-product attention over the slots that hold something; see the base class.

        The memory's own strength is ``1 / sqrt(dim)``. An empty memory gives zeros.

        Raises:
            SpecError: keys of another shape.
        """
        scale = 1 / math.sqrt(self._dim) if scale is None else scale
        weights = self._weights(keys, self.memory, scale, False, self.mask)
        return torch.bmm(weights, self.memory).view(keys.shape)
