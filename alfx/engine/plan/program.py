"""A record laid out once as a list of calls, each with its arguments and a place in memory for its result.

Of the operations of an update half only look at a tensor in another shape, and most of the others work on so little
that finding memory for the result and forgetting it again takes longer than the work. All of this is the same at every
update. So it is done once: views are made when the record is laid out, what is constant is computed then, and results
whose lifetimes do not overlap share memory. What is left is one call for each computation. Operations that torch cannot
let write to a given place (convolutions) make their results anew; what depends on these is looked up when it is called.
The kernels are those of the record, on tensors laid out in the same way: results are equal to the bit.

Read first :mod:`alfx.engine.plan.recorder`, which makes the graphs.
"""
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from alfx.engine.plan.torch_internals import (below_autograd, draws_numbers, has_kernel, method_in_place, out_variant,
                                              storage_key, values_of_nodes, written_by)

_Call = Callable[[], Any]
_Called = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Program:
    """Plays a graph on tensors that stay where they are and on others that are copied in.

    Args:
        graph: of aten operations, as :mod:`alfx.engine.plan.trace` writes them down; its inputs are ``fixed``, then
            ``changing``.
        fixed: tensors that the graph reads, and may write to, where they are.
        changing: examples of the other inputs: the shapes, strides and types that they always have.
        num_reused: the first so many of them always are these tensors, and are read where they are.
    """

    def __init__(self, graph: fx.GraphModule, fixed: Sequence[Tensor], changing: Sequence[Tensor],
                 num_reused: int = 0) -> None:
        inputs = [*(x.detach() for x in changing[:num_reused]), *(copied(x) for x in changing[num_reused:])]
        layout = _Layout(graph, fixed, inputs)
        self._copied_inputs, self._num_reused = inputs[num_reused:], num_reused
        self._calls, self._results = layout.calls, layout.results
        self._is_loose = any(isinstance(x, _Cell) for x in layout.results)

    def __call__(self, changing: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """What the graph returns, in the same tensors each time: the next call overwrites them."""
        with below_autograd():
            if len(self._copied_inputs) == 1:
                self._copied_inputs[0].copy_(changing[self._num_reused])
            elif self._copied_inputs:
                torch._foreach_copy_(self._copied_inputs, list(changing[self._num_reused:]))
            for call in self._calls:
                call()
        return _current(self._results) if self._is_loose else self._results


def copied(x: Tensor) -> Tensor:
    """A copy with the same strides, also of a view with gaps or with dimensions in another order."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in the result of an operation: one, or a sequence of them."""
    if isinstance(value, Tensor):
        return [value]
    return [x for x in value if isinstance(x, Tensor)] if isinstance(value, (tuple, list)) else []


class _Cell:
    """Holds the result of an operation that cannot write to a given place."""

    value: Any = None


def _call_loosely(cell: _Cell, op: Any, args: Any, kwargs: Any) -> None:
    cell.value = op(*_current(args), **_current(kwargs))


def _current(values: Any) -> Any:
    """A nest with the values of cells in their place."""
    if isinstance(values, _Cell):
        return values.value
    if isinstance(values, dict):
        return {name: _current(x) for name, x in values.items()}
    return [_current(x) for x in values] if isinstance(values, (list, tuple)) else values


class _Layout:
    """Goes through a graph and decides what is done when, and where in memory.

    A trial on copies of the inputs shows the shape of each result and whose memory it lies in: ``_seen``. Then each
    node is given its place, the tensor (or tensors) that it is from now on: ``_places``. The two are counterparts:
    whoever shares memory in the trial shares it in the program. There are five kinds of places:

    - inputs are where they are, and so is what the graph holds from outside (``get_attr``);
    - a view is made now, of the place of what it looks at. It costs nothing when the program is played;
    - a constant, which depends on nothing that changes, is computed now, and never again;
    - any other result gets memory of its own, and a call is noted that writes there. Once its last reader has been
      placed, the memory goes to later results of the same size;
    - where torch has no way to write the result of an operation to a given place, that result is a new tensor each
      time. Its place is a cell that the call fills, and all that depends on the cell is looked up when it is called
      ('loose').

    What is changed in place keeps its place: its readers come after the change, as in the graph. It may be no constant,
    and memory is free only once the last of all that share it has been read, which is why uses are counted by storage.

    Attributes:
        calls: what has to be called, in this order.
        results: what the graph returns.
    """

    def __init__(self, graph: fx.GraphModule, fixed: Sequence[Tensor], changing: Sequence[Tensor]) -> None:
        self.calls: list[_Call] = []
        self.results: Sequence[Tensor | None] = []
        self._nodes = list(graph.graph.nodes)
        with torch.random.fork_rng():
            self._seen = values_of_nodes(graph, [copied(x) for x in (*fixed, *changing)])
        self._find_uses()
        self._places: dict[fx.Node, Any] = dict(zip(self._nodes, (*(x.detach() for x in fixed), *changing)))
        self._constant: set[fx.Node] = set()
        self._free: dict[Any, list[Tensor]] = defaultdict(list)
        self._taken: dict[int, Tensor] = {}
        for index, node in enumerate(self._nodes):
            if node.op == 'get_attr':  # only numbers written in the code are left of these: see record.py
                self._places[node] = self._seen[node]
                self._constant.add(node)
            elif node.op == 'call_function':
                self._places[node] = self._place(node)
            elif node.op == 'output':
                self.results = self._arguments(node)[0][0]
            self._release(index, node)

    def _find_uses(self) -> None:
        """When each storage is last needed, and which ones something is written to after they were made."""
        self._last_use: dict[int, int] = {}
        self._written: set[int] = set()
        for index, node in enumerate(self._nodes):
            for used in node.all_input_nodes:
                for x in _tensors(self._seen[used]):
                    self._last_use[storage_key(x)] = len(self._nodes) if node.op == 'output' else index
            for x in _tensors(self._seen.get(node)):
                self._last_use.setdefault(storage_key(x), index)
            for written in written_by(node):
                self._written.update(storage_key(x) for x in _tensors(self._seen[written]))

    def _arguments(self, node: fx.Node) -> tuple[Any, Any]:
        return fx.map_arg((node.args, node.kwargs), lambda used: self._places[used])

    def _place(self, node: fx.Node) -> Any:
        """Decide about one operation; returns where its result is. The cases are in the order of the class's list."""
        op: Any = node.target
        seen, inputs = self._seen[node], node.all_input_nodes
        args, kwargs = self._arguments(node)
        is_loose = any(isinstance(self._places[used], _Cell) for used in inputs)
        written = written_by(node)
        if written:
            # The result of x.add_(y) is x itself. In a cell that is another tensor each time, so that the result needs
            # a cell of its own; nothing has to be returned by operations on lists (_foreach_add_).
            if isinstance(seen, Tensor) and isinstance(self._places[written[0]], _Cell):
                return self._anew(method_in_place(op), args, kwargs)
            self._add(method_in_place(op), args, kwargs, is_loose)
            return self._places[written[0]] if isinstance(seen, Tensor) else None
        results = _tensors(seen)
        storages = {storage_key(x) for x in results}
        is_constant = all(used in self._constant for used in inputs) and not draws_numbers(op)
        if storages <= {storage_key(x) for used in inputs for x in _tensors(self._seen[used])}:  # a view
            if is_constant:
                self._constant.add(node)
            return self._anew(op, args, kwargs) if is_loose else op(*args, **kwargs)
        # Somebody may write to it later: then its value is not the same at each call, however it began.
        if (is_constant or str(op) in _FILLED) and not storages & self._written:
            self._constant.add(node)
            with torch.no_grad():  # _FILLED look only at the shape of what they are given, which the trial has as well
                return op(*fx.map_arg(node.args, self._seen.__getitem__), **kwargs)
        if str(op) in _WITHIN_ZEROS and not is_loose and not storages & self._written:
            # The backward pass of a slice: its zeros are written once, now, and the part at each call. The memory is
            # not taken from others, who would leave something in place of the zeros.
            whole = torch.zeros_like(seen)
            part = _WITHIN_ZEROS[str(op)](whole, *args[2:])
            self._add(torch.Tensor.copy_, (part, args[0]), {})
            return whole
        writer = _writer(op, results, is_loose)
        if writer is None:
            return self._anew(op, args, kwargs)
        # Inputs still hold their memory here: it is released after this node, so that no result overwrites its own
        # input.
        out = (self._take(seen) if isinstance(seen, Tensor) else
               tuple(self._take(x) if isinstance(x, Tensor) else x for x in seen))
        self._add(*writer(out, *args, **kwargs), is_loose)
        return out

    def _add(self, function: Callable[..., Any], args: Any, kwargs: Any, is_loose: bool = False) -> None:
        """Add a call; ``is_loose``: some arguments are known only when it is made."""
        if is_loose:
            self._anew(function, args, kwargs)
        else:
            self.calls.append(functools.partial(function, *args, **kwargs))

    def _anew(self, op: Any, args: Any, kwargs: Any) -> '_Cell':
        """Add a call whose result lies elsewhere each time."""
        cell = _Cell()
        self.calls.append(functools.partial(_call_loosely, cell, op, args, kwargs))
        return cell

    def _take(self, like: Tensor) -> Tensor:
        """Memory for a result with the shape, strides and type of ``like``."""
        size = like.untyped_storage().nbytes()
        free = self._free[like.device, size]
        whole = free.pop() if free else torch.empty(size, dtype=torch.uint8, device=like.device)
        self._taken[storage_key(like)] = whole
        return whole.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def _release(self, index: int, node: fx.Node) -> None:
        """Let others use the memory of what nobody needs after ``node``, which is the operation at ``index``."""
        if node.op != 'output':
            for used in (node, *node.all_input_nodes):
                if isinstance(self._places[used], _Cell) and all(user in self._places for user in used.users):
                    self.calls.append(functools.partial(setattr, self._places[used], 'value', None))
        over = [storage for storage in self._taken if self._last_use[storage] <= index]
        for storage in over:
            whole = self._taken.pop(storage)
            self._free[whole.device, whole.numel()].append(whole)


# How operations are called -------------------------------------------------------------------------------------------


def _writer(op: Any, results: list[Tensor], is_loose: bool) -> Callable[..., _Called] | None:
    """How to call ``op`` so that it puts its results into given places, by the shortest way there is.

    Returns:
        takes the places and the arguments; returns what to call with what. ``None`` if ``op`` would copy its results.
    """
    name = str(op)
    if name in _SPECIAL and not is_loose:
        return _SPECIAL[name]
    if name in _QUICK:
        function = _QUICK[name]
        return lambda out, *args, **kwargs: (function, args, {**kwargs, 'out': out})
    variant, names = out_variant(op)
    if variant is None or len(names) != len(results) or not has_kernel(variant, results[0].device):
        return None
    return lambda out, *args, **kwargs: (variant, args, {**kwargs, **dict(zip(names, _tensors(out)))})


def _subtracted_from(out: Tensor, x: Tensor, other: Any, alpha: Any = 1) -> _Called:
    minuend = other if isinstance(other, Tensor) else torch.tensor(other, dtype=out.dtype, device=out.device)
    return torch.sub, (minuend, x), {'alpha': alpha, 'out': out}


# Operations without an out version of the same arguments: how to call something that does the same.
_SPECIAL_NAMES: dict[str, Callable[..., _Called]] = {
    'sum': lambda out, x, dtype=None: (torch.sum, (x, tuple(range(x.ndim))), {'dtype': dtype, 'out': out}),
    'mean': lambda out, x, dtype=None: (torch.mean, (x, tuple(range(x.ndim))), {'dtype': dtype, 'out': out}),
    'clone _to_copy': lambda out, x, **_: (torch.Tensor.copy_, (out, x), {}),
    'randn randn_like': lambda out, *_, **__: (torch.Tensor.normal_, (out, ), {}),
    'rand rand_like': lambda out, *_, **__: (torch.Tensor.uniform_, (out, ), {}),
    'randint': lambda out, high, *_, **__: (torch.Tensor.random_, (out, 0, high), {})}
_SPECIAL = {f'aten.{name}.default': how for names, how in _SPECIAL_NAMES.items() for name in names.split()}
_SPECIAL |= {'aten.rsub.Scalar': _subtracted_from, 'aten.rsub.Tensor': _subtracted_from}

# The result is all zeros but for a part, of which the first argument is copied; and how to get to that part.
_WITHIN_ZEROS: dict[str, Callable[..., Tensor]] = {
    'aten.slice_backward.default': torch.ops.aten.slice.Tensor, 'aten.select_backward.default': torch.select}

# The values of the result do not depend on those of the arguments.
_FILLED = {f'aten.{name}.default' for name in ('new_zeros', 'new_ones', 'new_full', 'zeros_like', 'ones_like',
                                               'full_like')}

# Python functions that take the same arguments as the operation, and ``out``.
_QUICK_NAMES = {
    'default': 'abs addcmul addmm amax amin argmax baddbmm bmm cat clamp exp gather index_select log logaddexp '
               'logical_and maximum minimum mm neg reciprocal rsqrt scatter_add sigmoid sign sqrt stack tanh',
    'Tensor': 'add bitwise_and clamp div eq ge gt le lerp lt mul ne sub',
    'Scalar': 'add div eq ge gt le lerp lt mul ne sub',
    'dim_IntList': 'sum', 'dim': 'max mean min', 'self': 'where', 'Tensor_Scalar': 'pow'}
_QUICK: dict[str, Callable[..., Any]] = {
    f'aten.{name}.{overload}': getattr(torch, name)
    for overload, names in _QUICK_NAMES.items() for name in names.split()}
