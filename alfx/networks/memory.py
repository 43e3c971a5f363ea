"""External memories: a matrix of slots that is written and read by content.

A memory object holds the current contents of a batch of memories and has no parameters. A recurrent algorithm passes
the contents in and out as a nest of tensors and keeps them as its state. Zeros are an empty memory, so resetting the
state to zeros clears it::

    memory.from_states(state)                    # or memory.build(batch_size) for an empty memory
    found = memory.genkey_and_read(key_net, query)
    memory.write(content)
    state = memory.states

No method changes a tensor in place, so gradients flow from a read through earlier writes, and a state that was taken
earlier does not change. :class:`MemoryWithUsage` is the memory of MERLIN (Wayne et al. 2018, arXiv:1803.10760, methods,
"Memory"). Reading by keys and strengths follows the differentiable neural computer (DNC, Graves et al. 2016,
doi:10.1038/nature20101, "Content-based addressing"). Differences:

- A write occupies one slot, the least used one (as in MERLIN); the DNC distributes it by learned gates.
- Slots that were never written are not read, while both papers read them as zeros. The result of a read does not depend
  on how much of the memory is still empty.
- Usage decays by default, so slots that were read long ago can be overwritten.
- Earlier writes are not updated retroactively.
"""
import math
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from alfx import context
from alfx.gin_utils import Count, PositiveFraction, configurable
from alfx.layers import FC
from alfx.nest import map_structure
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec, check_consistent, select


def content_weights(keys: torch.Tensor, memory: torch.Tensor, scale: float | torch.Tensor, normalize: bool = True,
                    mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weight of each slot in a read by each key (Graves et al. 2016, eq. 1).

        ``w[k, i] = softmax_i(scale[k] * similarity(key[k], memory[i]))``

    Args:
        keys: ``[B, K, dim]``.
        memory: ``[B, size, dim]``.
        scale: strength: a number, or ``[B, K]`` with one for each key.
        normalize: use cosine similarity, which is 0 for a slot of zeros; otherwise the inner product.
        mask: bool ``[B, size]``, True for slots that may be read. Without any such slot all weights are 0.

    Returns:
        Weights ``[B, K, size]``, not negative, with sum 1 over the slots.
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
    """Base of memories with ``size`` slots of ``dim`` numbers.

    Args:
        dim: numbers per slot.
        size: number of slots.
        state_spec: nest of specs of :attr:`states`; zeros are an empty memory.
        name: name of the memory, used in messages.
    """

    def __init__(self, dim: int, size: int, state_spec: NestedTensorSpec, name: str = 'Memory'):
        self.dim, self.size = dim, size
        self.state_spec = state_spec
        self.name = name
        self._states: Any = None

    @property
    def states(self) -> NestedTensor:
        """Contents of the memory, nest of ``[B, ...]``.

        Raises:
            RuntimeError: the memory holds no contents.
        """
        if self._states is None:
            raise RuntimeError(f'{self.name} holds no contents: call build(batch_size) or from_states(states) first')
        return self._states

    def build(self, batch_size: int) -> None:
        """Create a batch of empty memories on the default device."""
        device = context.get_default_device()
        self._states = map_structure(lambda spec: spec.zeros((batch_size, )).to(device), self.state_spec)

    def from_states(self, states: NestedTensor) -> None:
        """Restore contents from earlier :attr:`states`.

        Raises:
            SpecError: the states do not match :attr:`state_spec`.
        """
        check_consistent(states, self.state_spec, 1, f'{self.name}: states')
        self._states = states

    def release(self) -> None:
        """Drop the contents and the autograd graph behind them."""
        self._states = None

    def reset(self, reset_mask: torch.Tensor | None = None) -> None:
        """Empty the memories.

        Args:
            reset_mask: bool ``[B]``, True for memories to empty; ``None`` empties all.
        """
        zeros = map_structure(torch.zeros_like, self.states)
        self._states = zeros if reset_mask is None else select(reset_mask, zeros, self.states)

    def read(self, keys: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        """Read by each key.

        Args:
            keys: ``[B, dim]``, or ``[B, K, dim]`` for K keys.
            scale: strength: a number, ``[B]`` or ``[B, K]``; ``None`` uses the default of the memory.

        Returns:
            The contents found, of the shape of ``keys``.
        """
        raise NotImplementedError(f'{type(self).__name__}.read')

    def write(self, content: torch.Tensor) -> None:
        """Store ``content`` ``[B, dim]``."""
        raise NotImplementedError(f'{type(self).__name__}.write')

    def _checked_content(self, content: torch.Tensor, batch_size: int) -> torch.Tensor:
        if tuple(content.shape) != (batch_size, self.dim):
            raise SpecError(f'{self.name}.write: expected content of shape {[batch_size, self.dim]}, found '
                            f'{list(content.shape)}')
        return content

    def _checked_keys(self, keys: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Check ``[B, dim]`` or ``[B, K, dim]`` and return ``[B, K, dim]``."""
        if keys.ndim not in (2, 3) or keys.shape[0] != batch_size or keys.shape[-1] != self.dim:
            raise SpecError(f'{self.name}.read: expected keys of shape {[batch_size, self.dim]} or '
                            f'{[batch_size, "K", self.dim]}, found {list(keys.shape)}')
        return keys.unsqueeze(1) if keys.ndim == 2 else keys

    def _weights(self, keys: torch.Tensor, memory: torch.Tensor, scale: float | torch.Tensor, normalize: bool,
                 mask: torch.Tensor | None = None) -> torch.Tensor:
        """Weights ``[B, K, size]``, see :func:`content_weights`; also for one key and one strength per memory."""
        keys = self._checked_keys(keys, memory.shape[0])
        if isinstance(scale, torch.Tensor) and scale.ndim == 1:
            scale = scale.unsqueeze(1)
        return content_weights(keys, memory, scale, normalize, mask)


class UsageMemoryState(NamedTuple):
    """Contents of :class:`MemoryWithUsage`: ``memory`` ``[B, size, dim]`` and ``usage`` ``[B, size]``."""

    memory: Any = ()
    usage: Any = ()


@configurable
class MemoryWithUsage(Memory):
    """Memory that overwrites the least used slot.

    With w[k, i] the weight of slot i in the read by the k-th key (0 for an empty slot), and d the decay:

        read:   usage[i] = usage[i] + sum_k w[k, i]
        write:  i* = argmin_i usage[i]                  (an empty slot, whose usage is 0, if there is one)
                memory[i*] = content,  usage = d * usage,  usage[i*] = 1

    Args:
        dim: numbers per slot.
        size: number of slots.
        snapshot_only: write constants: no gradient flows from a read to the writer. Otherwise the contents after every
            write are kept for the backward pass.
        normalize: compare keys with slots by cosine similarity; otherwise by the inner product.
        scale: default strength of a read; ``None`` is 5 for cosine similarity, ``1 / sqrt(dim)`` otherwise.
        usage_decay: d, in (0, 1]; ``None`` is ``1 - 1 / size``, or 1 for a single slot.
        name: name of the memory.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, dim: Count, size: Count, snapshot_only: bool = False, normalize: bool = True,
                 scale: float | None = None, usage_decay: PositiveFraction | None = None,
                 name: str = 'MemoryWithUsage'):
        super().__init__(dim, size, UsageMemoryState(TensorSpec((size, dim)), TensorSpec((size, ))), name)
        if scale is None:
            scale = 5.0 if normalize else 1 / math.sqrt(dim)
        if usage_decay is None:
            usage_decay = 1 - 1 / size if size > 1 else 1.0
        self._snapshot_only = snapshot_only
        self._normalize = normalize
        self._scale = scale
        self._usage_decay = usage_decay

    @property
    def usage(self) -> torch.Tensor:
        """Usage of each slot, float32 ``[B, size]``; 0 for an empty slot."""
        return self.states.usage

    def create_keynet(self, query_dim: int, num_keys: int) -> FC:
        """Create a layer that maps queries to keys and strengths for :meth:`genkey_and_read`.

        Args:
            query_dim: numbers per query.
            num_keys: number of keys per query.
        """
        if num_keys < 1:
            raise ValueError(f'{self.name}: expected at least one key, found num_keys={num_keys}')
        return FC(query_dim, num_keys * (self.dim + 1))

    def genkey_and_read(self, keynet: Any, query: torch.Tensor, flatten_result: bool = True) -> torch.Tensor:
        """Compute keys from a query and read by them. Softplus makes the strengths positive.

        Args:
            keynet: layer created by :meth:`create_keynet`, or any function that maps the query to
                ``[B, K * (dim + 1)]``: for each key ``dim`` numbers and its strength.
            query: ``[B, query_dim]``.
            flatten_result: return ``[B, K * dim]`` instead of ``[B, K, dim]``.
        """
        keys = keynet(query).view(query.shape[0], -1, self.dim + 1)
        found = self.read(keys[..., :-1], F.softplus(keys[..., -1]))
        return found.flatten(1) if flatten_result else found

    def read(self, keys: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        """Read by each key and count it as usage; see the base class. An empty memory returns zeros.

        Raises:
            SpecError: the keys have another shape.
        """
        memory, usage = self.states
        weights = self._weights(keys, memory, self._scale if scale is None else scale, self._normalize, usage > 0)
        self._states = UsageMemoryState(memory, usage + weights.detach().sum(1))
        return torch.bmm(weights, memory).view(keys.shape)

    def write(self, content: torch.Tensor) -> None:
        """Store ``content`` ``[B, dim]`` in the least used slot.

        Raises:
            SpecError: the content has another shape.
        """
        memory, usage = self.states
        content = self._checked_content(content, memory.shape[0])
        if self._snapshot_only:
            content = content.detach()
        is_slot = F.one_hot(usage.argmin(dim=1), self.size).bool()
        self._states = UsageMemoryState(
            memory=torch.where(is_slot.unsqueeze(-1), content.unsqueeze(1), memory),
            usage=torch.where(is_slot, 1.0, torch.where(usage > 0, (usage * self._usage_decay).clamp_min(1e-30), 0.0)))


class FIFOMemoryState(NamedTuple):
    """Contents of :class:`FIFOMemory`: ``memory`` ``[B, size, dim]`` and ``count`` int64 ``[B]``."""

    memory: Any = ()
    count: Any = ()


@configurable
class FIFOMemory(Memory):
    """Memory of the latest ``size`` writes, the newest in the last slot.

    Args:
        dim: numbers per slot.
        size: number of slots.
        name: name of the memory.
    """

    def __init__(self, dim: Count, size: Count, name: str = 'FIFOMemory'):
        super().__init__(dim, size, FIFOMemoryState(TensorSpec((size, dim)), TensorSpec((), torch.int64)), name)

    @property
    def memory(self) -> torch.Tensor:
        """Slots ``[B, size, dim]`` from the oldest to the newest; empty slots come first and are zeros."""
        return self.states.memory

    @property
    def mask(self) -> torch.Tensor:
        """Mask of the slots that have been written, bool ``[B, size]``."""
        return torch.arange(self.size, device=self.memory.device) >= self.size - self.states.count.unsqueeze(1)

    def write(self, content: torch.Tensor) -> None:
        """Store ``content`` ``[B, dim]`` as the newest; a full memory drops its oldest slot.

        Raises:
            SpecError: the content has another shape.
        """
        memory, count = self.states
        content = self._checked_content(content, memory.shape[0])
        self._states = FIFOMemoryState(memory=torch.cat([memory[:, 1:], content.unsqueeze(1)], dim=1),
                                       count=(count + 1).clamp(max=self.size))

    def read(self, keys: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        """Read by scaled dot-product attention over the slots that have been written; see the base class.

        The default strength is ``1 / sqrt(dim)``. An empty memory returns zeros.

        Raises:
            SpecError: the keys have another shape.
        """
        scale = 1 / math.sqrt(self.dim) if scale is None else scale
        return torch.bmm(self._weights(keys, self.memory, scale, False, self.mask), self.memory).view(keys.shape)
