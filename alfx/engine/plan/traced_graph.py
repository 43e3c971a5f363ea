"""Traced graphs: the tensor operations of a policy, or of the losses and gradients of an update.

Everything that may change between calls is an input of the graph. A traced graph can be replayed
(:mod:`alfx.engine.plan.program`) or compiled (:mod:`alfx.engine.plan.compile`). It is correct as long as the function
performs the same operations at each call, which :mod:`alfx.engine.plan.backends` verifies.
"""
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from alfx import context
from alfx.engine.plan.program import copied
from alfx.engine.plan.python_state import Guard, PythonState
from alfx.engine.plan.torch_internals import (remove_dead_code, shares_memory, storage_key, tensors_of, version_of,
                                              written_by)
from alfx.engine.plan.trace import make_graph
from alfx.utils.schedulers import disallow_scheduler

_LITERALS = ('aten.lift_fresh_copy.default', 'aten.lift_fresh.default')
_HALF = (torch.bfloat16, torch.float16)


class NotTraceableError(RuntimeError):
    """A function cannot be traced, or would perform other operations at the next call."""


class _Root(nn.Module):
    """Function as a module whose parameters can be replaced for a call."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.read = nn.ModuleList(modules)
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


class TracedGraph:
    """Graph with the tensors that it works on.

    Args:
        graph: graph from ``fixed``, then the leaves that change between calls, to the results of the function.
        fixed: tensors that are read, and may be written to, in place, as ``(name, slot, tensor)``. A slot is
            ``(dictionary, key)`` of a module; ``None`` for a tensor that belongs to no module.
        guard: Python numbers that the graph depends on.

    Attributes:
        fixed: tensors of the argument ``fixed`` that the graph uses.
        written: names and tensors that the graph writes to.
        has_collectives: whether it communicates with other processes, which a CUDA graph cannot do.
        is_half: whether some of it is computed in 16 bits.
    """

    def __init__(self, graph: fx.GraphModule, fixed: Sequence[tuple[str, Any, Tensor]], guard: Guard) -> None:
        self._guard = guard
        inputs = [node for node in graph.graph.nodes if node.op == 'placeholder'][:len(fixed)]
        written = _written_inputs(graph)
        self.written = [(name, x) for node, (name, _, x) in zip(inputs, fixed) if node in written and node.users]
        used = [(slot, x) for node, (_, slot, x) in zip(inputs, fixed) if node.users]
        self._named = [(name, slot) for name, slot, _ in fixed if slot is not None]
        for node in inputs:
            if not node.users:
                graph.graph.erase_node(node)
        graph.recompile()
        self.graph = graph
        self.fixed = [x.detach() for _, x in used]
        self._slots = [([x], 0) if slot is None else slot for slot, x in used]
        self._addresses = [x.data_ptr() for _, x in used]
        nodes = list(graph.graph.nodes)
        self.has_collectives = any('mean_over_ranks' in str(node.target) for node in nodes)
        self.is_half = any(getattr(node.meta.get('val'), 'dtype', None) in _HALF for node in nodes)

    @property
    def is_current(self) -> bool:
        """Return whether all tensors that the graph works on are in place and not replaced, and the guard holds."""
        return ([tensors[key].data_ptr() for tensors, key in self._slots] == self._addresses
                and self._guard.changed() is None)

    def versions(self) -> dict[str, Any]:
        """Return, for each parameter and buffer, used or not, its identity and the number of writes to it."""
        found = {name: tensors[key] for name, (tensors, key) in self._named}
        return {name: (id(x), None if x is None else version_of(x)) for name, x in found.items()}


class Tracer:
    """Traces a function as graphs.

    Args:
        function: function of nests of tensors.
        modules: modules that hold the parameters and buffers which the function reads.
        name: name of the function, for messages.
    """

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module], name: str) -> None:
        self._root, self.name = _Root(function, modules), name
        bound = getattr(function, 'func', function)  # of a functools.partial
        self._python_state = PythonState(getattr(bound, '__self__', None), *modules)

    def call(self, named: dict[str, Tensor], *inputs: Any) -> Any:
        """Call the function with the given tensors, by name, instead of those of the modules."""
        return torch.func.functional_call(self._root, named, inputs)

    def tensors(self) -> list[tuple[str, Any, Tensor]]:
        """Return ``(name, slot, tensor)`` of all parameters and buffers, each once; a slot is ``(dictionary, key)``.
        """
        return tensors_of(self._root)

    def trace(self, function: Callable[[dict[str, Tensor], Sequence[Tensor]], list[Any]],
              leaves: Sequence[Tensor]) -> TracedGraph:
        """Trace ``function`` of the named tensors and of ``leaves``, which calls :meth:`call`.

        It is called with copies, and the attributes of all modules are restored afterwards.

        Raises:
            NotTraceableError: the function cannot be traced.
        """
        tensors = self.tensors()
        names = [name for name, _, _ in tensors]
        inputs = [*(x for _, _, x in tensors), *leaves]

        def flat(*flat_inputs: Tensor) -> list[Any]:
            return function(dict(zip(names, flat_inputs)), flat_inputs[len(names):])

        with disallow_scheduler(), context.record_if(False), _restored_attributes(self._root):
            before = self._python_state.all_attributes()
            try:
                with self._python_state.noted() as read:
                    graph = make_graph(flat, [copied(x.detach()) for x in inputs])
                remove_dead_code(graph)
            except Exception as error:  # of any kind: the same call succeeds in eager mode
                raise NotTraceableError(f'{type(error).__name__}: {first_line(error)}') from error
            changed = before.changed(read)
            if changed is not None:
                raise NotTraceableError(f'it sets {changed}, which a graph cannot do')
        return TracedGraph(graph, [*tensors, *((f'a tensor of shape {tuple(x.shape)} outside of all modules', None, x)
                                               for x in _as_inputs(graph, inputs, len(names)))], Guard(read))


def first_line(error: Exception) -> str:
    """Return the first line of an error message, without the details that torch adds for developers."""
    return str(error).strip().partition('\n')[0]


@contextmanager
def _restored_attributes(root: nn.Module) -> Iterator[None]:
    """Context manager that restores the attributes of the modules, such as counters and caches."""
    before = [(vars(module), dict(vars(module))) for module in root.modules()]
    try:
        yield
    finally:
        for attributes, saved in before:
            for name in [name for name in attributes if name not in saved]:
                del attributes[name]
            attributes.update(saved)


def _as_inputs(graph: fx.GraphModule, inputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """Turn the tensors that a graph holds into inputs, except for literals, and return them.

    A tensor that belongs to no module may be changed in place at any time, which a graph that holds it as a constant
    would not see. The new inputs come after the first ``count`` inputs.

    Raises:
        NotTraceableError: one of them is among ``inputs``, so that the function reaches it in a way that allows no
            replacement.
    """
    input_storages = {storage_key(x) for x in inputs if x.numel()}
    placeholders = [node for node in graph.graph.nodes if node.op == 'placeholder']
    first_leaf = placeholders[count]
    found: dict[Any, tuple[fx.Node, Tensor]] = {}
    for node in [node for node in graph.graph.nodes if node.op == 'get_attr']:
        value = getattr(graph, node.target)
        if not isinstance(value, Tensor) or all(str(user.target) in _LITERALS for user in node.users):
            continue
        if value.numel() and storage_key(value) in input_storages:
            raise NotTraceableError(f'it uses a parameter or buffer of shape {tuple(value.shape)} without its module')
        if node.target not in found:
            with graph.graph.inserting_before(first_leaf):
                found[node.target] = graph.graph.placeholder(f'outer_{len(found)}'), value
            found[node.target][0].meta = dict(node.meta)
        node.replace_all_uses_with(found[node.target][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return [value for _, value in found.values()]


def _written_inputs(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the inputs that a graph changes in place, directly or through views."""
    origins: dict[fx.Node, set[fx.Node]] = {}
    written: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == 'placeholder':
            origins[node] = {node}
        elif node.op == 'call_function' and shares_memory(node):
            origins[node] = set().union(*(origins[used] for used in node.all_input_nodes))
        else:
            origins[node] = set()
        written.update(*(origins[x] for x in written_by(node)))
    return written
