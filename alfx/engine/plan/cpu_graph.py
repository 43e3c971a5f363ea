"""Preparation of traced graphs for the backend of ``torch.compile`` on a CPU.

A compiled update on a CPU spends most of its time in matrix products. The backend leaves them to a library, and the
operations around them cost a fifth of the time of small networks in the form in which they are traced: biases are
copied into the results before the products are added, and products with a single row or column in between are sums over
strides. The library is also slow for results with few rows or columns, such as the last layer of a critic. Such a
product reads a matrix once, which the loop that computes the matrix can do at the same time; this saves a tenth of an
update of SAC or TD3. Results differ by rounding.
"""
from typing import Any

import torch
from torch import fx

from alfx.engine.plan.torch_internals import in_order_of_strides, shares_memory, written_by

_aten = torch.ops.aten
_WITHOUT_BIAS: dict[Any, Any] = {_aten.addmm.default: _aten.mm.default, _aten.baddbmm.default: _aten.bmm.default}
_FEW_TERMS = 8
_FEW_VECTORS = 4
_MAX_MATRIX = 2**18  # elements; a larger matrix leaves the cache between the reads of two of its columns
PRODUCTS = (_aten.mm.default, _aten.bmm.default)

# Settings of the backend. Its pattern matcher would undo the separation of biases. Calls from C++ are cheaper. Loops
# that share fewer bytes than this threshold, such as the biases of a network that is called twice, are not fused: the
# first would wait for the inputs of the second, and its own matrices would have left the cache by then.
SETTINGS = {'pattern_matcher': False, 'cpp_wrapper': True, 'score_fusion_memory_threshold': 8192}


def prepare(graph: fx.GraphModule) -> None:
    """Change a graph of aten operations in place; each node has to know the shape of its value (``meta['val']``).

    - A product plus a bias becomes a product and an addition, which is fused with the activation after it.
    - A product whose results are sums of few terms is written as these sums, fused with the operations after it.
    - A product of a small matrix with few vectors is written as a sum for each vector, fused with the operations before
      it.
    """
    for node in list(graph.graph.nodes):
        if node.target in _WITHOUT_BIAS and len(node.args) == 3 and not node.kwargs:
            _separate_bias(graph.graph, node)
    for node in list(graph.graph.nodes):
        if node.target in PRODUCTS and 0 < _num_terms(node) <= _FEW_TERMS:
            _write_as_sum(graph.graph, node)
        elif node.target in PRODUCTS and _has_few_vectors(node):
            _write_as_reductions(graph.graph, node)
    for node in graph.graph.nodes:
        node.meta.pop('val', None)  # the backend computes it, and would mistake this one for its own
    graph.recompile()


def _separate_bias(graph: fx.Graph, node: Any) -> None:
    bias, left, right = node.args
    with graph.inserting_before(node):
        product = graph.call_function(_WITHOUT_BIAS[node.target], (left, right))
        product.meta = dict(node.meta)
        total = graph.call_function(_aten.add.Tensor, (product, bias))
    _replace(graph, node, total)


def _num_terms(product: Any) -> float:
    """Number of products that are summed for each element of the result."""
    value = product.args[0].meta.get('val')
    return float('inf') if value is None else value.shape[-1]


def _write_as_sum(graph: fx.Graph, product: Any) -> None:
    """Replace a product with a sum over columns of the left matrix times rows of the right one."""
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


def _has_few_vectors(product: Any) -> bool:
    """Return whether the result has few rows or columns and the matrix that they are computed from is small."""
    value = product.meta.get('val')
    if value is None:
        return False
    few, many = sorted(value.shape[-2:])
    return 0 < few <= _FEW_VECTORS and many * _num_terms(product) <= _MAX_MATRIX


def _write_as_reductions(graph: fx.Graph, product: Any) -> None:
    """Replace a product with one sum per column of the result, over the matrix times a vector; or one sum per row."""
    left, right = product.args
    rows, columns = product.meta['val'].shape[-2:]
    with graph.inserting_before(product):
        transposed = graph.call_function(_aten.transpose.int, (right, -2, -1))
        transposed.meta = {'val': right.meta['val'].transpose(-2, -1)}
    matrix, vectors, dim = (left, transposed, -1) if columns <= rows else (transposed, left, -2)
    if _is_computed(vectors) or _last_stride(matrix) == 1 != _last_stride(vectors):
        vectors = _contiguous(graph, product, vectors)  # computed once; the elements of a sum are adjacent in both
    sums = []
    with graph.inserting_before(product):
        for i in range(min(rows, columns)):
            vector = graph.call_function(_aten.slice.Tensor, (vectors, -2, i, i + 1))
            terms = graph.call_function(_aten.mul.Tensor, (matrix, vector))
            sums.append(graph.call_function(_aten.sum.dim_IntList, (terms, [-1])))
        total = graph.call_function(_aten.stack.default, (sums, dim))
    _replace(graph, product, total)


def _last_stride(node: Any) -> int:
    return int(node.meta['val'].stride()[-1])


def _is_computed(node: Any) -> bool:
    """Return whether a loop that reads a node may compute it again, because nothing else stores it in memory."""
    while node.op == 'call_function' and shares_memory(node) and not written_by(node):  # a view, or one of a list
        node = node.args[0]
    is_pointwise = torch.Tag.pointwise in getattr(node.target, 'tags', ())
    return node.op == 'call_function' and is_pointwise and not written_by(node)  # else in memory anyway


def _contiguous(graph: fx.Graph, product: Any, operand: Any) -> Any:
    """Add a contiguous copy of an operand."""
    value = operand.meta['val']
    strides = list(torch.empty(value.shape, device='meta').stride())
    with graph.inserting_before(product):
        copy = graph.call_function(in_order_of_strides(), (operand, strides))
    copy.meta = {'val': torch.empty(value.shape, dtype=value.dtype, device='meta')}
    return copy


def _replace(graph: fx.Graph, node: Any, new: Any) -> None:
    """Replace ``node`` with ``new``, which has the same value."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
