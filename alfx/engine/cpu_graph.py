"""A recorded update made ready for ``torch.compile``'s backend on a CPU.

What remains of an update there once it is compiled are its matrix products. The backend leaves them to a library, and
what surrounds them as they are recorded costs a fifth of the time of small networks: biases are copied into the results
before the products are added to them, products with a single row or column in between are sums over strides. Results
differ by rounding.
"""
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_WITHOUT_BIAS: dict[Any, Any] = {_aten.addmm.default: _aten.mm.default, _aten.baddbmm.default: _aten.bmm.default}
_PRODUCTS = (_aten.mm.default, _aten.bmm.default)

# Settings of the backend. The patterns that it looks for would put the biases back. Calls from C++ are cheaper.
SETTINGS = {'pattern_matcher': False, 'cpp_wrapper': True}


def prepare(graph: fx.GraphModule) -> None:
    """Change a graph of aten operations, whose nodes know their values' shapes (``meta['val']``), in place.

    - A product plus a bias becomes a product and an addition, which is done together with the activation after it.
    - Vectors that products read with gaps in between are copied first.
    - A column times a row is a product of elements, done together with what is done with its result.
    """
    for node in list(graph.graph.nodes):
        if node.target in _WITHOUT_BIAS and len(node.args) == 3 and not node.kwargs:
            _separate_bias(graph.graph, node)
    for node in list(graph.graph.nodes):
        if node.target in _PRODUCTS:
            node.args = tuple(_without_gaps(graph.graph, node, operand) for operand in node.args)
            if _shape(node.args[0])[-1:] == (1, ):
                _replace(graph.graph, node, _aten.mul.Tensor, node.args)
    for node in graph.graph.nodes:
        node.meta.pop('val', None)  # the backend finds out by itself, and takes these for those of another run of it
    graph.recompile()


def decompositions() -> dict[Any, Any]:
    """How the backend takes operations apart: as usual, but products of matrices with a vector remain products."""
    from torch._inductor.decomposition import select_decomp_table

    return {operation: how for operation, how in select_decomp_table().items() if operation not in _PRODUCTS}


def _separate_bias(graph: fx.Graph, node: fx.Node) -> None:
    bias, left, right = node.args
    with graph.inserting_before(node):
        product = graph.call_function(_WITHOUT_BIAS[node.target], (left, right))
    product.meta = dict(node.meta)
    _replace(graph, node, _aten.add.Tensor, (product, bias))


def _without_gaps(graph: fx.Graph, product: fx.Node, operand: Any) -> Any:
    """``operand``, or a copy of it where it is a vector whose elements are not neighbours."""
    from torch._inductor import inductor_prims

    value = operand.meta.get('val')
    if value is None or 1 not in value.shape[-2:] or max(zip(value.shape[-2:], value.stride()[-2:]))[1] == 1:
        return operand
    strides = list(torch.empty(value.shape, device='meta').stride())
    with graph.inserting_before(product):
        copy = graph.call_function(inductor_prims.force_stride_order, (operand, strides))
    copy.meta = {'val': torch.empty(value.shape, dtype=value.dtype, device='meta')}
    return copy


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get('val')
    return () if value is None else tuple(value.shape)


def _replace(graph: fx.Graph, node: fx.Node, operation: Any, args: Any) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(operation, args)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
