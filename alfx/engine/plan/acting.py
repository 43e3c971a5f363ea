"""Fast execution of functions of networks, such as policies, which are called on a few rows at a time.

At that size the layers take less time than the calls of modules and distributions around them. Results are
bit-identical, or equal up to rounding if the function is compiled.
"""
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.engine.plan import backends
from alfx.engine.plan.backends import GraphRequest, GraphTask, Replayed
from alfx.engine.plan.compile import Compiled
from alfx.engine.plan.traced_graph import TracedGraph, Tracer
from alfx.engine.plan.verification import Parts
from alfx.tensor_specs import NestedTensor


class TracedFunction(GraphTask):
    """Function that runs from traced graphs, one for each structure and layout of its input.

    The function may contain any code: the function itself is called where a graph cannot be traced or would give
    another result. Tensors that it reads may change between calls. If an object from outside alfx keeps a number in
    Python, the graph is traced again when that number changes. A function that changes such a number itself is never
    traced; see :mod:`alfx.engine.plan.python_state`.

    Args:
        function: from a nest of tensors to a nest of tensors; may draw random numbers. A function that belongs to an
            object has to be a bound method or a ``functools.partial`` of one, so that a copy of the object calls its
            own method.
        modules: modules that hold the parameters and buffers which the function reads.
        compiles: compile the graphs on the CPU.
        name: name of the function, for messages.

    Attributes:
        replayed: backend that replays graphs.
        compiled: backend that compiles graphs; ``None`` if nothing is compiled.
    """

    def __init__(self, function: Callable[[NestedTensor], NestedTensor], *modules: nn.Module, compiles: bool = False,
                 name: str = 'acting') -> None:
        self._function, self._modules, self._compiles = function, modules, compiles
        self.tracer = Tracer(function, modules, name)
        self._result_trees: dict[Any, Any] = {}
        self.replayed = Replayed(function, self, backends.WARM_UP.calls)
        self.compiled = Compiled(self.replayed, self, backends.WARM_UP.compiled_calls) if compiles else None
        self._backend = self.compiled or self.replayed

    def __deepcopy__(self, memo: Any) -> 'TracedFunction':
        return TracedFunction(copy.deepcopy(self._function, memo), *copy.deepcopy(self._modules, memo),
                              compiles=self._compiles, name=self.tracer.name)

    def __call__(self, inputs: NestedTensor) -> NestedTensor:
        """Return the result of the function; while gradients are enabled, by calling the function itself."""
        return self._function(inputs) if torch.is_grad_enabled() else self._backend(inputs)

    # Interface of the backends -----------------------------------------------------------------------------------

    def request(self, inputs: NestedTensor, in_place: bool) -> GraphRequest:
        """Flatten the input; a single tensor has the tree ``None``."""
        if isinstance(inputs, Tensor):
            return GraphRequest([inputs], None, (inputs.shape, inputs.stride(), inputs.dtype, inputs.get_device()))
        leaves, tree = nest.flatten_with_structure(inputs)
        return GraphRequest(leaves, tree, (tree, *[(x.shape, x.stride(), x.dtype, x.get_device()) for x in leaves]))

    def trace(self, request: GraphRequest) -> TracedGraph:
        """Trace the function from the leaves of the input to the leaves of the result."""
        def call(named: dict[str, Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
            result = self.tracer.call(named, leaves[0] if request.tree is None else request.tree.unflatten(leaves))
            self._result_trees[request.key] = None
            if isinstance(result, Tensor):
                return [result]
            results, self._result_trees[request.key] = nest.flatten_with_structure(result)
            return results

        with torch.no_grad():
            return self.tracer.trace(call, request.leaves)

    def parts(self, output: NestedTensor) -> Parts:
        """Return the tensors of a result with their paths."""
        return [(f'result {path}'.strip(), x) for path, x in nest.flatten_with_path(output)]

    def output(self, results: Sequence[Any], request: GraphRequest) -> NestedTensor:
        """Return the result as a nest of copies."""
        results = [x.clone() for x in results]
        tree = self._result_trees[request.key]
        return results[0] if tree is None else tree.unflatten(results)
