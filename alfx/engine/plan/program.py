"""Execution of a traced graph as a list of calls, each with its arguments and with memory for its result.

Half of the operations of an update only create views, and most others are so small that allocating and releasing memory
for the result takes longer than the computation. All of this is the same at every update, so a program does it once:
views and constants are created together with it, and results whose lifetimes do not overlap share memory. One call
per remaining operation is left. Operations that cannot write into given memory (convolutions) return new
tensors; calls that depend on these look up their arguments each time. The kernels and the layouts are those of
the traced graph, so results are bit-identical.

Read first: :mod:`alfx.engine.plan.traced_graph`, which creates the graphs.
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
    """Executes a graph on tensors that stay in place and on tensors that are copied in.

    Args:
        graph: graph of aten operations, see :mod:`alfx.engine.plan.trace`; its inputs are ``fixed``, then ``changing``.
        fixed: tensors that the graph reads, and may write to, in place.
        changing: examples of the other inputs: their shapes, strides and types never change.
        num_reused: number of leading ``changing`` inputs that are always these tensors; they are read in place.
    """

    def __init__(self, graph: fx.GraphModule, fixed: Sequence[Tensor], changing: Sequence[Tensor],
                 num_reused: int = 0) -> None:
        inputs = [*(x.detach() for x in changing[:num_reused]), *(copied(x) for x in changing[num_reused:])]
        layout = _Layout(graph, fixed, inputs)
        self._copied_inputs, self._num_reused = inputs[num_reused:], num_reused
        self._calls, self._results = layout.calls, layout.results
        self._is_dynamic = any(isinstance(x, _Dynamic) for x in layout.results)

    def __call__(self, changing: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the results of the graph, in the same tensors each time: the next call overwrites them."""
        with below_autograd():
            if len(self._copied_inputs) == 1:
                self._copied_inputs[0].copy_(changing[self._num_reused])
            elif self._copied_inputs:
                torch._foreach_copy_(self._copied_inputs, list(changing[self._num_reused:]))
            for call in self._calls:
                call()
        return _resolved(self._results) if self._is_dynamic else self._results


def copied(x: Tensor) -> Tensor:
    """Return a copy with the same strides, also of a view with gaps or with permuted dimensions."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in the result of an operation: one, or a sequence of them."""
    if isinstance(value, Tensor):
        return [value]
    return [x for x in value if isinstance(x, Tensor)] if isinstance(value, (tuple, list)) else []


class _Dynamic:
    """Result of an operation that cannot write into given memory: a new tensor at each call."""

    value: Any = None


def _call_dynamic(result: _Dynamic, op: Any, args: Any, kwargs: Any) -> None:
    result.value = op(*_resolved(args), **_resolved(kwargs))


def _resolved(values: Any) -> Any:
    """Return a nest with the current values of its dynamic results."""
    if isinstance(values, _Dynamic):
        return values.value
    if isinstance(values, dict):
        return {name: _resolved(x) for name, x in values.items()}
    return [_resolved(x) for x in values] if isinstance(values, (list, tuple)) else values


class _Layout:
    """Plans the calls of a graph and the memory of their results.

    A trial on copies of the inputs shows the shape of each result and which storage it uses: ``_trial``. Then each node
    is assigned the tensor (or tensors) that it will always be: ``_values``. Tensors that share memory in the trial
    share memory in the program. There are five kinds of values:

    - Inputs, and tensors that the graph holds itself (``get_attr``), stay where they are.
    - A view is created now, as a view of the value of its input. It costs nothing when the program runs.
    - A constant, which depends on nothing that changes, is computed now and never again.
    - Any other result gets its own memory, and a call is added that writes there. After its last reader has been
      planned, the memory is reused for results of the same size.
    - A result that torch cannot write into given memory is a new tensor at each call ('dynamic'). The call stores it in
      a :class:`_Dynamic`, and everything that depends on it is looked up at the call.

    An in-place operation returns the value of its input: later readers come after the change, as in the graph. Such a
    value is not a constant, and its memory is free only after the last reader of all tensors that share it. Uses are
    therefore counted by storage.

    Attributes:
        calls: calls to make, in this order.
        results: results of the graph.
    """

    def __init__(self, graph: fx.GraphModule, fixed: Sequence[Tensor], changing: Sequence[Tensor]) -> None:
        self.calls: list[_Call] = []
        self.results: Sequence[Tensor | None] = []
        self._nodes = list(graph.graph.nodes)
        with torch.random.fork_rng():
            self._trial = values_of_nodes(graph, [copied(x) for x in (*fixed, *changing)])
        self._find_uses()
        self._values: dict[fx.Node, Any] = dict(zip(self._nodes, (*(x.detach() for x in fixed), *changing)))
        self._constant: set[fx.Node] = set()
        self._free: dict[Any, list[Tensor]] = defaultdict(list)
        self._taken: dict[int, Tensor] = {}
        for index, node in enumerate(self._nodes):
            if node.op == 'get_attr':  # only literals are left of these, see traced_graph.py
                self._values[node] = self._trial[node]
                self._constant.add(node)
            elif node.op == 'call_function':
                self._values[node] = self._assign(node)
            elif node.op == 'output':
                self.results = self._arguments(node)[0][0]
            self._release(index, node)

    def _find_uses(self) -> None:
        """Find the last use of each storage, and the storages that are written to after they were created."""
        self._last_use: dict[int, int] = {}
        self._written: set[int] = set()
        for index, node in enumerate(self._nodes):
            for used in node.all_input_nodes:
                for x in _tensors(self._trial[used]):
                    self._last_use[storage_key(x)] = len(self._nodes) if node.op == 'output' else index
            for x in _tensors(self._trial.get(node)):
                self._last_use.setdefault(storage_key(x), index)
            for written in written_by(node):
                self._written.update(storage_key(x) for x in _tensors(self._trial[written]))

    def _arguments(self, node: fx.Node) -> tuple[Any, Any]:
        return fx.map_arg((node.args, node.kwargs), lambda used: self._values[used])

    def _assign(self, node: fx.Node) -> Any:
        """Plan one operation and return its value. The cases are in the order of the list of the class."""
        op: Any = node.target
        trial, inputs = self._trial[node], node.all_input_nodes
        args, kwargs = self._arguments(node)
        is_dynamic = any(isinstance(self._values[used], _Dynamic) for used in inputs)
        written = written_by(node)
        if written:
            # The result of x.add_(y) is x. If x is dynamic, so is the result. Operations on lists (_foreach_add_)
            # return nothing.
            if isinstance(trial, Tensor) and isinstance(self._values[written[0]], _Dynamic):
                return self._add_dynamic(method_in_place(op), args, kwargs)
            self._add(method_in_place(op), args, kwargs, is_dynamic)
            return self._values[written[0]] if isinstance(trial, Tensor) else None
        results = _tensors(trial)
        storages = {storage_key(x) for x in results}
        is_constant = all(used in self._constant for used in inputs) and not draws_numbers(op)
        if storages <= {storage_key(x) for used in inputs for x in _tensors(self._trial[used])}:  # a view
            if is_constant:
                self._constant.add(node)
            return self._add_dynamic(op, args, kwargs) if is_dynamic else op(*args, **kwargs)
        # A tensor that is written to later is not constant, even if it starts from a constant.
        if (is_constant or str(op) in _CONSTANT_FILLS) and not storages & self._written:
            self._constant.add(node)
            with torch.no_grad():  # _CONSTANT_FILLS read only the shapes of their arguments
                return op(*fx.map_arg(node.args, self._trial.__getitem__), **kwargs)
        if str(op) in _PART_OF_ZEROS and not is_dynamic and not storages & self._written:
            # Backward pass of a slice: the zeros are written once, now, and the part at each call. The memory is not
            # shared with other results, which would overwrite the zeros.
            zeros = torch.zeros_like(trial)
            part = _PART_OF_ZEROS[str(op)](zeros, *args[2:])
            self._add(torch.Tensor.copy_, (part, args[0]), {})
            return zeros
        writer = _writer(op, results, is_dynamic)
        if writer is None:
            return self._add_dynamic(op, args, kwargs)
        # The memory of inputs is released after this node, so that no result overwrites its own input.
        out = (self._take(trial) if isinstance(trial, Tensor) else
               tuple(self._take(x) if isinstance(x, Tensor) else x for x in trial))
        self._add(*writer(out, *args, **kwargs), is_dynamic)
        return out

    def _add(self, function: Callable[..., Any], args: Any, kwargs: Any, is_dynamic: bool = False) -> None:
        """Add a call; with ``is_dynamic`` some arguments are only known at the call."""
        if is_dynamic:
            self._add_dynamic(function, args, kwargs)
        else:
            self.calls.append(functools.partial(function, *args, **kwargs))

    def _add_dynamic(self, op: Any, args: Any, kwargs: Any) -> '_Dynamic':
        """Add a call that returns a new tensor each time."""
        result = _Dynamic()
        self.calls.append(functools.partial(_call_dynamic, result, op, args, kwargs))
        return result

    def _take(self, like: Tensor) -> Tensor:
        """Return memory for a result with the shape, strides and type of ``like``."""
        size = like.untyped_storage().nbytes()
        free = self._free[like.device, size]
        block = free.pop() if free else torch.empty(size, dtype=torch.uint8, device=like.device)
        self._taken[storage_key(like)] = block
        return block.view(like.dtype).as_strided(like.shape, like.stride(), like.storage_offset())

    def _release(self, index: int, node: fx.Node) -> None:
        """Release the memory of values that are not used after ``node``, the operation at ``index``."""
        if node.op != 'output':
            for used in (node, *node.all_input_nodes):
                if isinstance(self._values[used], _Dynamic) and all(user in self._values for user in used.users):
                    self.calls.append(functools.partial(setattr, self._values[used], 'value', None))
        over = [storage for storage in self._taken if self._last_use[storage] <= index]
        for storage in over:
            block = self._taken.pop(storage)
            self._free[block.device, block.numel()].append(block)


# How operations are called -------------------------------------------------------------------------------------------


def _writer(op: Any, results: list[Tensor], is_dynamic: bool) -> Callable[..., _Called] | None:
    """Return how to call ``op`` so that it writes its results into given tensors, by the fastest way available.

    Returns:
        Function from the given tensors and the arguments to the call to make; ``None`` if ``op`` would copy its
        results.
    """
    name = str(op)
    if name in _SPECIAL and not is_dynamic:
        return _SPECIAL[name]
    if name in _FUNCTIONS:
        function = _FUNCTIONS[name]
        return lambda out, *args, **kwargs: (function, args, {**kwargs, 'out': out})
    variant, names = out_variant(op)
    if variant is None or len(names) != len(results) or not has_kernel(variant, results[0].device):
        return None
    return lambda out, *args, **kwargs: (variant, args, {**kwargs, **dict(zip(names, _tensors(out)))})


def _subtracted_from(out: Tensor, x: Tensor, other: Any, alpha: Any = 1) -> _Called:
    minuend = other if isinstance(other, Tensor) else torch.tensor(other, dtype=out.dtype, device=out.device)
    return torch.sub, (minuend, x), {'alpha': alpha, 'out': out}


# Equivalent calls for operations that have no out variant with the same arguments.
_SPECIAL_NAMES: dict[str, Callable[..., _Called]] = {
    'sum': lambda out, x, dtype=None: (torch.sum, (x, tuple(range(x.ndim))), {'dtype': dtype, 'out': out}),
    'mean': lambda out, x, dtype=None: (torch.mean, (x, tuple(range(x.ndim))), {'dtype': dtype, 'out': out}),
    'clone _to_copy': lambda out, x, **_: (torch.Tensor.copy_, (out, x), {}),
    'randn randn_like': lambda out, *_, **__: (torch.Tensor.normal_, (out, ), {}),
    'rand rand_like': lambda out, *_, **__: (torch.Tensor.uniform_, (out, ), {}),
    'randint': lambda out, high, *_, **__: (torch.Tensor.random_, (out, 0, high), {})}
_SPECIAL = {f'aten.{name}.default': how for names, how in _SPECIAL_NAMES.items() for name in names.split()}
_SPECIAL |= {'aten.rsub.Scalar': _subtracted_from, 'aten.rsub.Tensor': _subtracted_from}

# Operations whose result is zero except for a part, to which the first argument is copied; and the view of that part.
_PART_OF_ZEROS: dict[str, Callable[..., Tensor]] = {
    'aten.slice_backward.default': torch.ops.aten.slice.Tensor, 'aten.select_backward.default': torch.select}

# Operations whose result does not depend on the values of the arguments.
_CONSTANT_FILLS = {f'aten.{name}.default' for name in ('new_zeros', 'new_ones', 'new_full', 'zeros_like', 'ones_like',
                                               'full_like')}

# Python functions with the same arguments as the operation, and ``out``.
_FUNCTION_NAMES = {
    'default': 'abs addcmul addmm amax amin argmax baddbmm bmm cat clamp exp gather index_select log logaddexp '
               'logical_and maximum minimum mm mv neg reciprocal rsqrt scatter_add sigmoid sign sqrt stack tanh',
    'Tensor': 'add bitwise_and clamp div eq ge gt le lerp lt mul ne sub',
    'Scalar': 'add div eq ge gt le lerp lt mul ne sub',
    'dim_IntList': 'sum', 'dim': 'max mean min', 'self': 'where', 'Tensor_Scalar': 'pow'}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f'aten.{name}.{overload}': getattr(torch, name)
    for overload, names in _FUNCTION_NAMES.items() for name in names.split()}
