"""All parts of torch that plans use without a guarantee of stability.

No other module of :mod:`alfx.engine` imports a private module of torch or reads a private attribute of its objects.
"""
import contextlib
import functools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary as TensorKeyDictionary  # noqa: F401

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context manager in which operations bypass autograd; as in :mod:`alfx.optimizers.autograd`."""


def has_bfloat16_instructions() -> bool:
    """Return whether the CPU computes in bfloat16; True for CPUs about which torch does not know."""
    known = getattr(torch.cpu, '_is_avx512_bf16_supported', None)
    return known is None or platform.machine() not in ('x86_64', 'AMD64') or known()


def storage_key(x: Tensor) -> int:
    """Return a number that is the same for tensors that share memory."""
    return x.untyped_storage()._cdata


def version_of(x: Tensor) -> int:
    """Return a lower bound of the number of writes to a tensor."""
    return x._version


def tensors_of(root: nn.Module) -> list[tuple[str, Any, Tensor]]:
    """Return ``(name, slot, tensor)`` of all parameters and buffers, each once; a slot is ``(dictionary, key)``."""
    found, seen = [], set()
    for prefix, module in root.named_modules():
        for tensors in (module._parameters, module._buffers):
            for key, x in tensors.items():
                if x is not None and id(x) not in seen:
                    seen.add(id(x))
                    found.append((f'{prefix}.{key}', (tensors, key), x))
    return found


@contextlib.contextmanager
def without_validation() -> Iterator[None]:
    """Construct distributions without checks of their arguments, which branch on the values of tensors."""
    validates = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)


# Graphs --------------------------------------------------------------------------------------------------------------


def remove_dead_code(graph: fx.GraphModule) -> None:
    """Remove operations whose results are not used, except for those that change a tensor or draw random numbers."""
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: (
        node.op in ('placeholder', 'output') or bool(written_by(node)) or draws_numbers(node.target)))
    graph.recompile()


def values_of_nodes(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """Compute the value of each node of a graph from ``inputs``; inputs that the graph writes to are changed."""
    trial = fx.Interpreter(graph, garbage_collect_values=False)
    with torch.no_grad():
        trial.run(*inputs)
    return trial.env


# Operations ----------------------------------------------------------------------------------------------------------


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that an operation changes in place."""
    schema: Any = getattr(node.target, '_schema', None)
    if schema is None or not schema.is_mutable:
        return []
    values: list[tuple[Any, Any]] = [*zip(schema.arguments, node.args)]
    values += [(a, node.kwargs[a.name]) for a in schema.arguments if a.name in node.kwargs]
    written = [value for argument, value in values if argument.alias_info and argument.alias_info.is_write]
    return [x for value in written for x in (value if isinstance(value, (tuple, list)) else [value])]


def shares_memory(node: fx.Node) -> bool:
    """Return whether the result of a node may share memory with its inputs: a view, an element of a list, an
    in-place operation.
    """
    schema: Any = getattr(node.target, '_schema', None)
    return schema is None or any(x.alias_info is not None for x in schema.returns)


def draws_numbers(op: Any) -> bool:
    """Return whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op, 'tags', ())


def method_in_place(op: Any) -> Callable[..., Any]:
    """Return the tensor method that takes the same arguments as an in-place operation."""
    name = op._overloadpacket.__name__
    return getattr(torch.Tensor, name, op) if name.endswith('_') and not name.startswith('_') else op


@functools.cache
def out_variant(op: Any) -> tuple[Any, list[str]]:
    """Return the overload of ``op`` that writes into given tensors, and their argument names; ``None`` if there is
    none.
    """
    expected = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op._overloadpacket.overloads():
        overload = getattr(op._overloadpacket, name)
        arguments = overload._schema.arguments
        out = [a.name for a in arguments if a.is_out]
        if out and [(a.name, str(a.type)) for a in arguments if not a.is_out] == expected:
            return overload, out
    return None, []


def has_kernel(op: Any, device: torch.device) -> bool:
    """Return whether ``op`` has its own kernel, instead of being composed of other operations.

    An out variant without a kernel computes as usual and copies the result.
    """
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


# Compiling -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def compiler_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Set options of the backend of ``torch.compile`` within a ``with`` block.

    C++ code is compiled with -O2 instead of -O3. Its loops are vectorized when it is generated, so it is as fast, and
    the large functions of an update compile in a third of the time. Compiling takes a fifth less time with strides
    that are read off linear indices, which the backend simplifies symbolically.
    """
    import sympy
    from torch._inductor import config, cpp_builder
    from torch._inductor.codegen import cpp
    from torch.utils._pytree import tree_map

    flags_of: Any = cpp_builder._get_optimization_cflags
    stride_of: Any = cpp.stride_at_vec_range

    def flags(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda flag: 'O2' if flag == 'O3' else flag, flags_of(*args, **kwargs))

    def stride(index: Any, variable: Any, *args: Any) -> Any:
        """Return the coefficient of ``variable`` in an index like ``256*d0 + d1``; else what the backend computes."""
        terms = index.as_coefficients_dict()
        is_linear = all(term.is_Symbol or term.is_Number for term in terms)
        return sympy.sympify(terms[variable]) if is_linear else stride_of(index, variable, *args)

    with (config.patch(dict(settings)), mock.patch.object(cpp_builder, '_get_optimization_cflags', flags),
          mock.patch.object(cpp, 'stride_at_vec_range', stride)):
        yield


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], inner: list[tuple[Any, Sequence[Any]]] | None = None,
                  operations_kept: Sequence[Any] = ()) -> Callable[..., Any]:
    """Compile ``graph`` into a function of tensors. The backend may compile at the first call only.

    Args:
        graph: graph of aten operations.
        inputs: examples of its inputs.
        inner: list to which the compiled code, without the code around it, and examples of its inputs are appended.
        operations_kept: operations that are not decomposed.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def compile_inner(of: Any, examples: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        bare = compile_fx_inner(of, examples, *args, **kwargs)
        if inner is not None:
            inner.append((bare, examples))
        return bare

    decompositions = {operation: how for operation, how in select_decomp_table().items()
                      if operation not in operations_kept}
    function: Any = compile_fx(graph, list(inputs), inner_compile=compile_inner, decompositions=decompositions)
    return function


def in_order_of_strides() -> Any:
    """Return the operation that copies a tensor, if necessary, so that it has given strides."""
    from torch._inductor import inductor_prims

    return inductor_prims.force_stride_order


def entry_in_c(bare: Any) -> Callable[[list[Tensor]], Sequence[Any]] | None:
    """Return the C++ function that compiled code calls, without the Python functions around it; ``None`` if not found.

    It is found in generated code, which may change at any time, so the caller has to compare its results.
    """
    try:
        wrapper = bare.current_callable
        (entry, ) = [cell.cell_contents for cell in wrapper.__closure__]
        used = wrapper.__code__.co_names
        handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
        tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
    except (AttributeError, TypeError, ValueError):
        return None
    does_more = {'extend', 'item'} & set(used)  # handles constants, or numbers among the results
    if does_more or not {handles.__name__, tensors.__name__} <= set(used) or not isinstance(entry, BuiltinFunctionType):
        return None
    return lambda inputs: tensors(entry(handles(inputs)))
