"""What a function of networks does, recorded operation by operation as a function of everything that may change.

That is the losses and gradients of an update, or a policy. A record can be played (:mod:`alfx.engine.plan.program`) or
compiled (:mod:`alfx.engine.plan.compile`). It is right as long as the function does the same operations at each call;
nobody has to promise that: :mod:`alfx.engine.plan.backends` compares.
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


class NotRecordableError(RuntimeError):
    """Something in a function cannot be recorded, or would not be the same at the next call."""


class _Root(nn.Module):
    """The function as a module whose parameters can be exchanged for a call."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.read = nn.ModuleList(modules)
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


class Record:
    """A graph, and the tensors that it works on.

    Args:
        graph: from ``fixed`` and then the leaves that change from call to call to what the function returns.
        fixed: tensors that are read, and may be written to, where they are, as ``(name, place, tensor)``. A place is
            ``(dictionary, key)`` of a module; ``None`` for those that the function has from elsewhere.
        guard: Python numbers that it depends on.

    Attributes:
        fixed: those tensors that the graph makes use of.
        written: names and tensors that the graph writes to.
        asks_other_ranks: whether it waits for other processes in between, which no CUDA graph can.
        is_half: whether it computes in 16 bits, here and there.
    """

    def __init__(self, graph: fx.GraphModule, fixed: Sequence[tuple[str, Any, Tensor]], guard: Guard) -> None:
        self._guard = guard
        inputs = [node for node in graph.graph.nodes if node.op == 'placeholder'][:len(fixed)]
        written = _written_inputs(graph)
        self.written = [(name, x) for node, (name, _, x) in zip(inputs, fixed) if node in written and node.users]
        used = [(place, x) for node, (_, place, x) in zip(inputs, fixed) if node.users]
        self._named = [(name, place) for name, place, _ in fixed if place is not None]
        for node in inputs:
            if not node.users:
                graph.graph.erase_node(node)
        graph.recompile()
        self.graph = graph
        self.fixed = [x.detach() for _, x in used]
        self._places = [([x], 0) if place is None else place for place, x in used]
        self._addresses = [x.data_ptr() for _, x in used]
        nodes = list(graph.graph.nodes)
        self.asks_other_ranks = any('mean_over_ranks' in str(node.target) for node in nodes)
        self.is_half = any(getattr(node.meta.get('val'), 'dtype', None) in _HALF for node in nodes)

    @property
    def is_current(self) -> bool:
        """Whether all the tensors that it works on still are where they were, and no others have taken their place."""
        return ([tensors[key].data_ptr() for tensors, key in self._places] == self._addresses
                and self._guard.changed() is None)

    def versions(self) -> dict[str, Any]:
        """Of each parameter and buffer, used or not, which tensor it is and how often that has been written to."""
        found = {name: tensors[key] for name, (tensors, key) in self._named}
        return {name: (id(x), None if x is None else version_of(x)) for name, x in found.items()}


class Recorder:
    """Makes records of a function.

    Args:
        function: of nests of tensors.
        modules: hold the parameters and buffers that it reads.
        what: the function is, for messages.
    """

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module], what: str) -> None:
        self._root, self.what = _Root(function, modules), what
        bound = getattr(function, 'func', function)  # of a functools.partial
        self._python_state = PythonState(getattr(bound, '__self__', None), *modules)

    def call(self, named: dict[str, Tensor], *inputs: Any) -> Any:
        """What the function returns with tensors in the place of those with these names."""
        return torch.func.functional_call(self._root, named, inputs)

    def tensors(self) -> list[tuple[str, Any, Tensor]]:
        """``(name, place, tensor)`` of all parameters and buffers, each once; a place is ``(dictionary, key)``."""
        return tensors_of(self._root)

    def record(self, function: Callable[[dict[str, Tensor], Sequence[Tensor]], list[Any]],
               leaves: Sequence[Tensor]) -> Record:
        """Record ``function`` of the named tensors and of ``leaves``, which calls :meth:`call`.

        It is called with copies, and no attribute of a module is another one afterwards.

        Raises:
            NotRecordableError: whatever went wrong.
        """
        tensors = self.tensors()
        names = [name for name, _, _ in tensors]
        inputs = [*(x for _, _, x in tensors), *leaves]

        def flat(*flat_inputs: Tensor) -> list[Any]:
            return function(dict(zip(names, flat_inputs)), flat_inputs[len(names):])

        with disallow_scheduler(), context.record_if(False), _attributes_unchanged(self._root):
            before = self._python_state.all_attributes()
            try:
                with self._python_state.noted() as read:
                    graph = make_graph(flat, [copied(x.detach()) for x in inputs])
                remove_dead_code(graph)
            except Exception as error:  # of any kind: the same call went well when it was made with real numbers
                raise NotRecordableError(f'{type(error).__name__}: {first_line(error)}') from error
            changed = before.changed(read)
            if changed is not None:
                raise NotRecordableError(f'it sets {changed}, which a traced graph would not')
        return Record(graph, [*tensors, *((f'a tensor of shape {tuple(x.shape)} outside of all modules', None, x)
                                          for x in _as_inputs(graph, inputs, len(names)))], Guard(read))


def first_line(error: Exception) -> str:
    """What an error says, without what torch adds for who wrote the code."""
    return str(error).strip().partition('\n')[0]


@contextmanager
def _attributes_unchanged(root: nn.Module) -> Iterator[None]:
    """Context manager that gives the modules the attributes back that they had, such as counters and what they keep."""
    before = [(vars(module), dict(vars(module))) for module in root.modules()]
    try:
        yield
    finally:
        for attributes, saved in before:
            for name in [name for name in attributes if name not in saved]:
                del attributes[name]
            attributes.update(saved)


def _as_inputs(graph: fx.GraphModule, inputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """Make inputs of the tensors that a graph holds, but for numbers written in the code, and return them.

    A tensor that belongs to no module may be changed in place at any time; a graph that has it as a constant would not
    see that. It comes after the first ``count`` inputs.

    Raises:
        NotRecordableError: one of them is among ``inputs``: reached in a way that no other tensor can be put in its
            place.
    """
    mine = {storage_key(x) for x in inputs if x.numel()}
    placeholders = [node for node in graph.graph.nodes if node.op == 'placeholder']
    first_leaf = placeholders[count]
    found: dict[Any, tuple[fx.Node, Tensor]] = {}
    for node in [node for node in graph.graph.nodes if node.op == 'get_attr']:
        value = getattr(graph, node.target)
        if not isinstance(value, Tensor) or all(str(user.target) in _LITERALS for user in node.users):
            continue
        if value.numel() and storage_key(value) in mine:
            raise NotRecordableError(f'it reaches a parameter or buffer of shape {tuple(value.shape)} past its modules')
        if node.target not in found:
            with graph.graph.inserting_before(first_leaf):
                found[node.target] = graph.graph.placeholder(f'outer_{len(found)}'), value
            found[node.target][0].meta = dict(node.meta)
        node.replace_all_uses_with(found[node.target][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return [value for _, value in found.values()]


def _written_inputs(graph: fx.GraphModule) -> set[fx.Node]:
    """The inputs that a graph changes in place, directly or through views."""
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
