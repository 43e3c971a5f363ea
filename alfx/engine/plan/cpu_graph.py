"""A recorded update, or policy, made ready for ``torch.compile``'s backend on a CPU.

What remains of an update there once it is compiled are its matrix products. The backend leaves them to a library, and
what surrounds them as they are recorded costs a fifth of the time of small networks: biases are copied into the results
before the products are added to them, and products with a single row or column in between are sums over strides.
Results differ by rounding.
"""
from typing import Any

import torch
from torch import fx

from alfx.engine.plan.torch_internals import in_order_of_strides, shares_memory, written_by

_aten = torch.ops.aten
_WITHOUT_BIAS: dict[Any, Any] = {_aten.addmm.default: _aten.mm.default, _aten.baddbmm.default: _aten.bmm.default}
_FEW_TERMS = 8
PRODUCTS = (_aten.mm.default, _aten.bmm.default)

# Settings of the backend. The patterns that it looks for would put the biases back. Calls from C++ are cheaper. Loops
# that share less than these bytes, as two calls of a network share its biases, are not joined: the first would wait
# for what the second reads, and find its own matrices no longer in the cache.
SETTINGS = {'pattern_matcher': False, 'cpp_wrapper': True, 'score_fusion_memory_threshold': 8192}


def prepare(graph: fx.GraphModule) -> None:
    """Change a graph of aten operations, whose nodes know their values' shapes (``meta['val']``), in place.

    - A product plus a bias becomes a product and an addition, which is done together with the activation after it.
    - A product whose results are sums of few terms is written as these sums, done together with what follows.
    """
    for node in list(graph.graph.nodes):
        if node.target in _WITHOUT_BIAS and len(node.args) == 3 and not node.kwargs:
            _separate_bias(graph.graph, node)
    for node in list(graph.graph.nodes):
        if node.target in PRODUCTS and 0 < _num_terms(node) <= _FEW_TERMS:
            _write_as_sum(graph.graph, node)
    for node in graph.graph.nodes:
        node.meta.pop('val', None)  # the backend finds out by itself, and takes these for those of another run of it
    graph.recompile()


def _separate_bias(graph: fx.Graph, node: Any) -> None:
    bias, left, right = node.args
    with graph.inserting_before(node):
        product = graph.call_function(_WITHOUT_BIAS[node.target], (left, right))
        product.meta = dict(node.meta)
        total = graph.call_function(_aten.add.Tensor, (product, bias))
    _replace(graph, node, total)


def _num_terms(product: Any) -> float:
    """How many products of elements an element of the result is the sum of."""
    value = product.args[0].meta.get('val')
    return float('inf') if value is None else value.shape[-1]


def _write_as_sum(graph: fx.Graph, product: Any) -> None:
    """Columns of the left matrix times rows of the right one."""
    left, right = product.args
    if 'val' in right.meta and (right.meta['val'].stride()[-1] != 1 or _is_computed(right)):
        right = _contiguous(graph, product, right)
    if _is_computed(left):
        left = _contiguous(graph, product, left)
    total: Any = None
    with graph.inserting_before(product):
        for i in range(int(_num_terms(product))):
            column = graph.call_function(_aten.slice.Tensor, (left, -1, i, i + 1))
            row = graph.call_function(_aten.slice.Tensor, (right, -2, i, i + 1))
            term = graph.call_function(_aten.mul.Tensor, (column, row))
            total = term if total is None else graph.call_function(_aten.add.Tensor, (total, term))
    _replace(graph, product, total)


def _is_computed(node: Any) -> bool:
    """Whether a loop that reads a node may compute it again: it does not lie in memory for some other reason."""
    while node.op == 'call_function' and shares_memory(node) and not written_by(node):  # a view, or a part
        node = node.args[0]
    is_pointwise = torch.Tag.pointwise in getattr(node.target, 'tags', ())
    return node.op == 'call_function' and is_pointwise and not written_by(node)  # what is written lies in memory anyway


def _contiguous(graph: fx.Graph, product: Any, operand: Any) -> Any:
    """A copy of an operand whose elements are neighbours."""
    value = operand.meta['val']
    strides = list(torch.empty(value.shape, device='meta').stride())
    with graph.inserting_before(product):
        copy = graph.call_function(in_order_of_strides(), (operand, strides))
    copy.meta = {'val': torch.empty(value.shape, dtype=value.dtype, device='meta')}
    return copy


def _replace(graph: fx.Graph, node: Any, new: Any) -> None:
    """Put ``new``, which has the same value, in the place of ``node``."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
