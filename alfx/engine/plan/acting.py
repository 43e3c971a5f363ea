"""A function of networks in the fastest form there is, as updates are: for acting, which calls a policy on a few rows.

There the layers take less time than the calls of modules and distributions around them. Results are equal to the bit,
or up to rounding if the function is compiled.
"""
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.engine.plan import backends
from alfx.engine.plan.verification import Parts
from alfx.engine.plan.compile import Compiled
from alfx.engine.plan.backends import Replayed, GraphRequest, GraphTask
from alfx.engine.plan.recorder import Record, Recorder
from alfx.tensor_specs import NestedTensor


class Recorded(GraphTask):
    """Plays a function, one record for each structure and layout of its input.

    The function may do anything: if a graph would not compute the same, or cannot be traced, the function itself is
    called. Tensors that it reads may change between calls in any way. A graph is traced again when a number changes
    that an object from outside alfx keeps in Python. A function that changes such a number itself is not traced; see
    :mod:`alfx.engine.plan.python_state`.

    Args:
        function: from a nest of tensors to a nest of tensors; it may draw random numbers. If it belongs to an object it
            is a bound method or ``functools.partial`` of it, so that a copy of the object has one of its own.
        modules: hold the parameters and buffers that it reads.
        compiles: whether records on the CPU are compiled.
        what: the function is, for messages.
    """

    def __init__(self, function: Callable[[NestedTensor], NestedTensor], *modules: nn.Module, compiles: bool = False,
                 what: str = 'how to act') -> None:
        self._function, self._modules, self._compiles = function, modules, compiles
        self.recorder = Recorder(function, modules, what)
        self._result_trees: dict[Any, Any] = {}
        self.played = Replayed(function, self, backends.WARM_UP.calls)
        self.compiled = Compiled(self.played, self, backends.WARM_UP.compiled_calls) if compiles else None
        self._form = self.compiled or self.played

    def __deepcopy__(self, memo: Any) -> 'Recorded':
        return Recorded(copy.deepcopy(self._function, memo), *copy.deepcopy(self._modules, memo),
                        compiles=self._compiles, what=self.recorder.what)

    def __call__(self, inputs: NestedTensor) -> NestedTensor:
        """What the function returns for ``inputs``; where gradients are recorded, by calling it."""
        if torch.is_grad_enabled():
            return self._function(inputs)
        return self._form(inputs)

    # As the forms see it -----------------------------------------------------------------------------------------

    def request(self, asked: NestedTensor, in_place: bool) -> GraphRequest:
        """The tensors of the input; the tree of a single one is ``None``."""
        if isinstance(asked, Tensor):
            return GraphRequest([asked], None, (asked.shape, asked.stride(), asked.dtype, asked.get_device()))
        leaves, tree = nest.flatten_with_structure(asked)
        return GraphRequest(leaves, tree, (tree, *[(x.shape, x.stride(), x.dtype, x.get_device()) for x in leaves]))

    def record(self, request: GraphRequest) -> Record:
        """From tensors and the leaves of the input to those of the result."""
        def call(named: dict[str, Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
            result = self.recorder.call(named, leaves[0] if request.tree is None else request.tree.unflatten(leaves))
            self._result_trees[request.key] = None
            if isinstance(result, Tensor):
                return [result]
            results, self._result_trees[request.key] = nest.flatten_with_structure(result)
            return results

        with torch.no_grad():
            return self.recorder.record(call, request.leaves)

    def parts(self, answer: NestedTensor) -> Parts:
        """The tensors of a result."""
        return [(f'result {path}'.strip(), x) for path, x in nest.flatten_with_path(answer)]

    def answer(self, results: Sequence[Any], request: GraphRequest) -> NestedTensor:
        """The result, in tensors of its own."""
        results = [x.clone() for x in results]
        tree = self._result_trees[request.key]
        return results[0] if tree is None else tree.unflatten(results)
