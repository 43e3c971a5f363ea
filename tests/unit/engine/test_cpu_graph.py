"""A graph that is made ready for the compiler computes what it did."""
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from alfx.engine import cpu_graph

_aten = torch.ops.aten


def _targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == 'call_function']


def _prepared(function, *inputs):
    graph = make_fx(function)(*inputs)
    expected = graph(*inputs)
    cpu_graph.prepare(graph)
    torch.testing.assert_close(graph(*inputs), expected)
    return graph


def test_a_bias_is_added_after_the_product():
    graph = _prepared(torch.addmm, torch.randn(3), torch.randn(4, 5), torch.randn(5, 3))
    assert _targets(graph) == [_aten.mm.default, _aten.add.Tensor]
    graph = _prepared(torch.baddbmm, torch.randn(2, 1, 3), torch.randn(2, 4, 5), torch.randn(2, 5, 3))
    assert _targets(graph) == [_aten.bmm.default, _aten.add.Tensor]


def test_a_product_that_is_scaled_stays_as_it_is():
    graph = _prepared(lambda *x: torch.addmm(*x, beta=0.5, alpha=2.0), torch.randn(3), torch.randn(4, 5),
                      torch.randn(5, 3))
    assert _targets(graph) == [_aten.addmm.default]


@pytest.mark.parametrize('shapes', [((4, 1), (1, 3)), ((2, 4, 1), (2, 1, 3))])
def test_a_column_times_a_row_is_a_product_of_elements(shapes):
    graph = _prepared(torch.matmul if len(shapes[0]) == 2 else torch.bmm, *(torch.randn(shape) for shape in shapes))
    assert _aten.mul.Tensor in _targets(graph)
    assert _aten.mm.default not in _targets(graph) and _aten.bmm.default not in _targets(graph)


@pytest.mark.parametrize('operand, copied', [
    (torch.randn(6, 2).t().unsqueeze(1), True),  # two rows with gaps
    (torch.randn(2, 6).unsqueeze(1), False),
    (torch.randn(2, 1).expand(2, 6).unsqueeze(1), True),  # one number six times
    (torch.randn(2, 6, 5).transpose(1, 2), False),  # a matrix the other way round
])
def test_vectors_with_gaps_are_copied(operand, copied):
    graph = _prepared(torch.bmm, operand, torch.randn(2, 6, 7))
    assert len(_targets(graph)) == 1 + copied


def test_what_the_compiler_makes_of_it_has_the_same_values():
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def losses(x, w1, b1, w2, b2):
        hidden = torch.baddbmm(b1, w1, x.t().expand(2, 3, 8)).relu()
        q = torch.baddbmm(b2, w2, hidden).squeeze(1).t()  # [8, 2]
        grad = torch.zeros(8, 2).scatter(1, q.argmin(1, keepdim=True), 1.0)
        outer = torch.bmm(w2.transpose(1, 2), grad.t().unsqueeze(1))
        return [q, outer * (hidden > 0), torch.bmm(grad.t().unsqueeze(1), hidden.transpose(1, 2))]

    inputs = [torch.randn(8, 3), torch.randn(2, 4, 3), torch.randn(2, 4, 1), torch.randn(2, 1, 4), torch.randn(2, 1, 1)]
    graph = make_fx(losses)(*inputs)
    expected = graph(*inputs)
    cpu_graph.prepare(graph)
    with config.patch(cpu_graph.SETTINGS):
        compiled = compile_fx(graph, inputs, decompositions=cpu_graph.decompositions())
        torch.testing.assert_close(compiled(*inputs), expected)
