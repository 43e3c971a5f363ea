"""Functions of tensors traced to graphs."""
import subprocess
import sys

import pytest
import torch
from torch import nn

from alfx.engine.plan.trace import make_graph


def operations(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == 'call_function']


def _added(number, x):
    torch._foreach_add_([number], [x])
    return number


def check(function, *inputs):
    """A graph computes the same results as the function for other inputs."""
    graph = make_graph(function, [x.clone() for x in inputs])
    others = [x * 2 for x in inputs]
    for result, expected in zip(graph(*(x.clone() for x in others)), function(*others), strict=True):
        assert torch.equal(result, expected)
    return graph


def test_multi_result_operations_and_tensor_lists_are_traced():
    graph = check(lambda x: [torch.cat(x.split([1, 2])), *torch._foreach_mul([x, x + 1], 3.0), x.max(dim=0)[0]],
                  torch.randn(3, 2))
    assert operations(graph).count('aten.split_with_sizes.default') == 1


def test_in_place_changes_are_visible_afterwards_even_through_views():
    def function(x):
        view = x[1:]
        before = view + 0
        view.mul_(3).add_(x[0])
        torch._foreach_add_([x], 1)
        return [before, x, view]

    check(function, torch.randn(4))


def test_a_graph_contains_the_backward_pass():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    def gradients(x, *weights):
        weights = [w.requires_grad_() for w in weights]
        loss = torch.func.functional_call(net, dict(zip(dict(net.named_parameters()), weights)), x).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, weights)]

    check(gradients, torch.randn(5, 2), *(x.detach() for x in net.parameters()))


def test_compound_operations_are_decomposed_even_without_autograd():
    with torch.inference_mode():
        graph = check(lambda x: [torch.nn.functional.linear(x, x), x.reshape(-1)], torch.randn(2, 2))
    assert not {'aten.linear.default', 'aten.reshape.default'} & set(operations(graph))


@pytest.mark.parametrize('activation', ['silu', 'mish'])
def test_operations_with_their_own_kernel_are_not_decomposed(activation):
    """Its parts would round in another way."""
    def function(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(getattr(nn.functional, activation)(x).sum(), [x])

    graph = check(function, torch.randn(1000))
    assert f'aten.{activation}_backward.default' in operations(graph)


def test_metadata_is_known_without_computing_values():
    graph = make_graph(lambda x: [x.t().to(torch.float16)], [torch.randn(2, 3)])
    value = list(graph.graph.nodes)[-2].meta['val']
    assert value.is_meta and value.dtype == torch.float16 and value.shape == (3, 2) and value.stride() == (1, 3)


def test_a_number_in_the_code_is_copied_before_it_is_changed():
    graph = make_graph(lambda x: [torch.tensor([1.0, 2.0]).add_(x)], [torch.ones(())])
    for _ in range(2):
        assert torch.equal(graph(torch.ones(()))[0], torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize('ask', [
    lambda x: (x + 1).item(), lambda x: bool(x > 0), lambda x: torch.equal(x, x + 1),
    lambda x: torch.tensor(1.0).add_(x).item(), lambda x: _added(torch.tensor(1.0), x).item()])
def test_to_ask_for_a_value_that_may_change_is_rejected(ask):
    with pytest.raises(RuntimeError, match='may differ at the next call'):
        make_graph(lambda x: [x * ask(x)], [torch.ones(())])


def test_constant_numbers_are_not_reported_as_read():
    graph = check(lambda x: [x * (torch.tensor([2.0, 1.0]).split(1)[0] * 2).item()], torch.ones(3))
    assert torch.equal(graph(torch.ones(3))[0], torch.full((3, ), 4.0))
    with pytest.raises(RuntimeError, match='may differ at the next call'):
        make_graph(lambda x: [x * torch.rand_like(torch.tensor(1.0)).item()], [torch.ones(3)])


def test_untraceable_operations_are_rejected():
    generator = torch.Generator()
    with pytest.raises(TypeError, match='a Generator cannot be part of a graph'):
        make_graph(lambda x: [x + torch.rand(3, generator=generator)], [torch.ones(3)])


def test_the_compiler_is_not_imported():
    program = ('import sys, torch; from alfx.engine.plan.trace import make_graph; '
               'from alfx.algorithms.base.critic_values import action_gradient; '
               'graph = make_graph(lambda x: [x.exp().sum()], [torch.ones(3)]); graph(torch.ones(3)); '
               'action = torch.ones(3, requires_grad=True); action_gradient(action * 2, action); '
               'sys.exit(any(name in sys.modules for name in ("torch._dynamo", "torch._inductor", "sympy")))')
    subprocess.run([sys.executable, '-c', program], check=True)
