"""Tracing of the operations of a function as a graph, while the function is called once.

torch's ``make_fx`` does this as well, but its first call imports the compiler, which takes longer than everything
else at the start of a run. Plans need little of it: shapes are constant, and only the operations on tensors matter.
"""
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from alfx.engine.plan.torch_internals import (TensorKeyDictionary, TorchDispatchMode, draws_numbers, has_kernel,
                                              written_by)

_PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_LIFT, _LIFT_COPY = torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default


def make_graph(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Return ``function(*inputs)`` as a graph of aten operations, including backward passes.

    The graph has a ``placeholder`` for each input. Tensors from elsewhere are its attributes (``get_attr``); literals
    are copied before use (``lift_fresh_copy``). ``meta['val']`` of each node is a tensor without memory that has the
    shape, strides and type of its value.

    Args:
        function: function to trace; it is called once with ``inputs``, and tensors that it writes to are changed.
        inputs: tensors.

    Raises:
        TypeError: an operation has an argument that cannot be part of a graph, such as a random generator.
        RuntimeError: the operations depend on the value of a tensor.
    """
    tracer = _Tracer()
    for index, x in enumerate(inputs):
        tracer.follow(x, tracer.graph.placeholder(f'input_{index}'))
    with tracer:
        results = function(*inputs)
    tracer.graph.output(tracer.argument(results))
    return fx.GraphModule(nn.Module() if not tracer.outer else tracer.outer, tracer.graph)


class _Tracer(TorchDispatchMode):
    """Adds each operation to a graph.

    Attributes:
        graph: the graph.
        outer: tensors that are neither inputs nor results of an operation, by their names in the graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.outer = fx.Graph(), dict[str, Tensor]()
        self._nodes: Any = TensorKeyDictionary()  # the node that computed a tensor or was the last to write to it
        self._literals = set[fx.Node]()  # nodes that depend on literals alone

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that torch would add to the method below imports the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        values = [x for value in given for x in (value if isinstance(value, (list, tuple)) else [value])]
        tensors = [x for x in values if isinstance(x, Tensor)]
        if not any(has_kernel(func, x.device) for x in tensors):  # a kernel rounds differently from its parts
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func == _LIFT:  # a copy, so that in-place operations do not change the attribute
            func = _LIFT_COPY
        known = [self._nodes.get(x) for x in tensors]
        from_literals = bool(known) and all(node is None or node in self._literals for node in known)
        if torch.Tag.data_dependent_output in func.tags:
            if from_literals:
                return func(*args, **kwargs)
            raise RuntimeError(f'{func} reads the value of a tensor, which may differ at the next call')
        node = self.graph.call_function(func, self.argument(args), self.argument(kwargs))
        if from_literals and not draws_numbers(func) and (func == _LIFT_COPY or None not in known):
            self._literals.add(node)
        elif not from_literals:
            self._literals.difference_update(written_by(node))
        result = func(*args, **kwargs)
        self.follow(result, node)
        return result

    def follow(self, value: Any, node: fx.Node) -> None:
        """Store that ``node`` computes ``value``, a tensor or a sequence of them."""
        if isinstance(value, Tensor):
            self._nodes[value] = node
            node.meta['val'] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device='meta')
        elif isinstance(value, (list, tuple)):
            for index, x in enumerate(value):
                part = self.graph.call_function(operator.getitem, (node, index))
                if node in self._literals:
                    self._literals.add(part)
                self.follow(x, part)

    def argument(self, value: Any) -> Any:
        """Return ``value`` with nodes instead of tensors."""
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.argument, value)) if type(value) in (list, tuple) else tuple(value)
        if isinstance(value, dict):
            return {name: self.argument(x) for name, x in value.items()}
        if value is None or isinstance(value, _PLAIN):
            return value
        raise TypeError(f'a {type(value).__name__} cannot be part of a graph')

    def _node_of(self, x: Tensor) -> fx.Node:
        node = self._nodes.get(x)
        if node is None:
            name = f'outer_{len(self.outer)}'
            self.outer[name] = x
            node = self.graph.get_attr(name)
            self.follow(x, node)
        return node
