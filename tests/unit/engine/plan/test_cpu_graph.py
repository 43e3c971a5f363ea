"""Preparing a graph for the compiler does not change its results."""
from types import BuiltinFunctionType, SimpleNamespace

import pytest
import torch

from alfx.engine.plan import compile, cpu_graph
from alfx.engine.plan.torch_internals import compile_graph, compiler_settings, entry_in_c
from alfx.engine.plan.trace import make_graph

pytestmark = pytest.mark.compiles

_aten = torch.ops.aten


def _targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == 'call_function']


def _prepared(function, *inputs):
    graph = make_graph(function, inputs)
    expected = graph(*inputs)
    cpu_graph.prepare(graph)
    torch.testing.assert_close(graph(*inputs), expected)
    return graph


def test_a_bias_is_added_after_the_product():
    graph = _prepared(torch.addmm, torch.randn(6), torch.randn(5, 9), torch.randn(9, 6))
    assert _targets(graph) == [_aten.mm.default, _aten.add.Tensor]
    graph = _prepared(torch.baddbmm, torch.randn(2, 1, 6), torch.randn(2, 5, 9), torch.randn(2, 9, 6))
    assert _targets(graph) == [_aten.bmm.default, _aten.add.Tensor]


def test_a_scaled_product_is_left_unchanged():
    graph = _prepared(lambda *x: torch.addmm(*x, beta=0.5, alpha=2.0), torch.randn(3), torch.randn(4, 5),
                      torch.randn(5, 3))
    assert _targets(graph) == [_aten.addmm.default]


@pytest.mark.parametrize('left, right', [
    (torch.randn(4, 1), torch.randn(1, 3)), (torch.randn(4, 3), torch.randn(5, 3).t()),
    (torch.randn(2, 4, 8), torch.randn(2, 8, 3)), (torch.randn(2, 8, 4).transpose(1, 2), torch.randn(2, 8, 3))])
def test_a_product_with_few_terms_per_element_is_written_as_sums(left, right):
    graph = _prepared(torch.mm if left.ndim == 2 else torch.bmm, left, right)
    assert _targets(graph).count(_aten.mul.Tensor) == left.shape[-1]
    assert not {_aten.mm.default, _aten.bmm.default} & set(_targets(graph))


def test_products_of_products_are_prepared_too():
    few, many = torch.randn(8, 3), torch.randn(12, 12)
    graph = _prepared(lambda a, b, c: torch.mm(c, torch.mm(a, b)), few, torch.randn(3, 6), torch.randn(5, 8))
    assert _aten.mm.default not in _targets(graph)
    graph = _prepared(lambda a, b, c: torch.mm(c, torch.mm(a, b)), many, torch.randn(12, 6), torch.randn(4, 12))
    assert _targets(graph).count(_aten.mm.default) == 1 and _targets(graph).count(_aten.sum.dim_IntList) == 4


@pytest.mark.parametrize('left, right, is_copied', [
    (torch.randn(2, 1, 12), torch.randn(2, 7, 12).transpose(1, 2), False),
    (torch.randn(12, 2).t().unsqueeze(1), torch.randn(2, 7, 12).transpose(1, 2), True),  # two rows with gaps
    (torch.randn(12, 2).t().unsqueeze(1), torch.randn(2, 12, 7), False),  # read one by one, gaps or not
    (torch.randn(2, 1).expand(2, 12).unsqueeze(1), torch.randn(2, 12, 7), False),  # one number twelve times
    (torch.randn(7, 12), torch.randn(12, 4), True), (torch.randn(12, 7).t(), torch.randn(12, 4), False),
    (torch.randn(3, 12), torch.randn(12, 7), False), (torch.randn(1, 12), torch.randn(12, 1), False),
    (torch.randn(4, 0), torch.randn(0, 7), False)])
def test_a_product_with_few_vectors_is_written_as_a_sum_of_each(left, right, is_copied):
    graph = _prepared(torch.mm if left.ndim == 2 else torch.bmm, left, right)
    assert _targets(graph).count(_aten.sum.dim_IntList) == min(left.shape[-2], right.shape[-1])
    assert not {_aten.mm.default, _aten.bmm.default} & set(_targets(graph))
    assert ('force_stride_order' in str(_targets(graph))) == is_copied
    assert graph(left, right).is_contiguous()


def test_a_large_matrix_times_few_vectors_is_left_unchanged():
    graph = _prepared(torch.mm, torch.randn(2**10, 2**9), torch.randn(2**9, 3))
    assert _targets(graph) == [_aten.mm.default]


def test_a_product_without_columns_is_left_unchanged():
    assert _targets(_prepared(torch.mm, torch.randn(5, 0), torch.randn(0, 6))) == [_aten.mm.default]


def test_a_transposed_matrix_is_left_unchanged():
    graph = _prepared(torch.bmm, torch.randn(2, 12, 5).transpose(1, 2), torch.randn(2, 12, 7))
    assert _targets(graph) == [_aten.transpose.int, _aten.bmm.default] or _targets(graph) == [_aten.bmm.default]


def test_compiled_graphs_have_the_same_values():
    def losses(x, w1, b1, w2, b2):
        hidden = torch.baddbmm(b1, w1, x.t().expand(2, 3, 8)).relu()
        q = torch.baddbmm(b2, w2, hidden).squeeze(1).t()  # [8, 2]
        grad = torch.zeros(8, 2).scatter(1, q.argmin(1, keepdim=True), 1.0)
        outer = torch.bmm(w2.transpose(1, 2), grad.t().unsqueeze(1))
        return [q, outer * (hidden > 0), torch.bmm(grad.t().unsqueeze(1), hidden.transpose(1, 2))]

    inputs = [torch.randn(8, 3), torch.randn(2, 4, 3), torch.randn(2, 4, 1), torch.randn(2, 1, 4), torch.randn(2, 1, 1)]
    graph = make_graph(losses, inputs)
    expected = graph(*inputs)
    cpu_graph.prepare(graph)
    with compiler_settings(cpu_graph.SETTINGS):
        compiled = compile_graph(graph, inputs, operations_kept=cpu_graph.PRODUCTS)
        torch.testing.assert_close(compiled(*inputs), expected)


def _calls(function):
    return lambda inputs: function(inputs)


def _of_graph(function, *inputs):
    compiled = compile.compiled(make_graph(function, inputs), inputs)
    arguments, plain = [x.clone() for x in inputs], [x.clone() for x in inputs]
    torch.manual_seed(3)
    results = compiled(arguments)
    torch.manual_seed(3)
    expected = function(*plain)
    torch.testing.assert_close(list(results), list(expected), equal_nan=True)
    torch.testing.assert_close(arguments, plain)
    return arguments, results


def _changes_an_input(x, y):
    x.add_(1.0)
    return [torch.mm(x, y), x.sum()]


@pytest.mark.slow
@pytest.mark.parametrize('function', [
    lambda x, y: [torch.mm(x, y).relu_(), x.mean()], lambda x, y: [x + torch.rand_like(x) + y, x * 2],
    _changes_an_input, lambda x, y: [x / 0.0, (x * 0.0) / 0.0]], ids=['product', 'noise', 'in place', 'not finite'])
def test_compiled_code_called_directly_behaves_the_same(function, monkeypatch):
    found = []
    check = compile._behaves_the_same
    monkeypatch.setattr(compile, '_behaves_the_same', lambda *args: found.append(check(*args)) or found[-1])
    with torch._inductor.config.patch(fallback_random=True):
        _of_graph(function, torch.randn(16, 16), torch.randn(16, 16))
    assert found == [True]


def test_compiled_code_draws_random_numbers_in_the_order_of_the_function():
    def choose(x):
        index = torch.randint(9, (8, ))
        return [torch.where(torch.rand(8) < 0.5, index, x.argmax(-1)), index]

    _of_graph(choose, torch.randn(8, 4))


@pytest.mark.slow
def test_a_constant_that_the_compiler_turns_into_an_input_is_passed():
    numbers = list(map(float, range(16)))
    _of_graph(lambda x, y: [x + torch.tensor(numbers), y * 2], torch.randn(16, 16), torch.randn(16, 16))


@pytest.mark.slow
def test_the_called_function_is_the_one_in_c():
    with torch._inductor.config.patch(fallback_random=True):
        compiled = compile.compiled(make_graph(lambda x: [x + 1], [torch.ones(3)]), [torch.ones(3)])
    assert any(isinstance(cell.cell_contents, BuiltinFunctionType) for cell in compiled.__closure__)


@pytest.mark.parametrize('bare', [
    None, object(), SimpleNamespace(current_callable=len), SimpleNamespace(current_callable=lambda inputs: inputs),
    SimpleNamespace(current_callable=_calls(len)), SimpleNamespace(current_callable=_calls(_calls))])
def test_functions_of_another_kind_are_not_recognized(bare):
    assert entry_in_c(bare) is None


@pytest.mark.slow
def test_results_that_are_views_of_inputs_stay_views():
    arguments, results = _of_graph(lambda x, y: [x.view(4, 64), y + 1], torch.randn(16, 16), torch.randn(16, 16))
    assert results[0].untyped_storage().data_ptr() == arguments[0].untyped_storage().data_ptr()


def test_code_with_different_results_is_not_called_directly():
    x = torch.randn(3)
    for bare in (lambda inputs: [inputs[0] + 1], lambda inputs: [inputs[0]], lambda inputs: [None],
                 lambda inputs: [], lambda inputs: [(inputs[0] * 2).double()], lambda inputs: inputs[0].missing):
        assert not compile._behaves_the_same(bare, [x], [x], [x * 2])
    assert compile._behaves_the_same(lambda inputs: [inputs[0] * 2], [x], [x], [x * 2])
