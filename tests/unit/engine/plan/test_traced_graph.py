"""Traced graphs know the tensors that they work on."""
import re

import pytest
import torch
from torch import nn

from alfx.engine.plan.traced_graph import NotTraceableError, Tracer
from alfx.engine.plan.verification import State, difference, is_check_due


class Net(nn.Module):

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.randn(3)), nn.Parameter(torch.ones(2))
        self.register_buffer('count', torch.zeros(2))


def traced(net, function, *leaves):
    tracer = Tracer(lambda *inputs: function(net, *inputs), [net], 'a function')
    with torch.no_grad():
        return tracer.trace(lambda named, inputs: [tracer.call(named, *inputs)], leaves)


def test_a_graph_lists_tensors_read_and_written_even_through_views():
    def function(net, x):
        net.count[1:].add_(1)
        return net.weight * x

    graph = traced(Net(), function, torch.ones(3))
    assert len(graph.fixed) == 2 and [name for name, _ in graph.written] == ['read.0.count']


def test_a_graph_is_current_while_tensors_keep_their_addresses():
    net = Net()
    graph = traced(net, lambda net, x: net.weight * x + net.count.sum(), torch.ones(3))
    net.weight.data.mul_(2)
    net.unused.data = net.unused.data.clone()
    assert graph.is_current
    net.count = net.count.clone()  # another object of the same name
    assert not graph.is_current
    graph = traced(net, lambda net, x: net.weight * x, torch.ones(3))
    net.weight.data = net.weight.data.clone()
    assert not graph.is_current


def test_outside_tensors_are_inputs_and_numbers_in_code_are_not():
    outer = torch.ones(3)
    graph = traced(Net(), lambda net, x: net.weight * x * outer + outer + torch.tensor([1., 2., 3.]), torch.ones(3))
    assert len(graph.fixed) == 2 and graph.fixed[1].data_ptr() == outer.data_ptr()
    kinds = [node.op for node in graph.graph.graph.nodes]
    assert kinds[:3] == ['placeholder'] * 3 and kinds.count('get_attr') == 1


def test_a_parameter_that_is_reached_past_its_module_is_no_constant():
    net = Net()
    hidden = net.weight
    with pytest.raises(NotTraceableError, match=r'a parameter or buffer of shape \(3,\) without its module'):
        traced(net, lambda net, x: hidden * x, torch.ones(3))


def test_an_error_while_tracing_is_reported_in_one_line():
    def fail(net, x):
        raise KeyError('this\nand that')

    with pytest.raises(NotTraceableError, match="^KeyError: 'this"):
        traced(Net(), fail, torch.ones(3))


def test_module_attributes_are_restored():
    def function(net, x):
        net.calls = getattr(net, 'calls', 0) + 1
        net.known = None
        return net.weight * x

    net = Net()
    net.known = 3
    traced(net, function, torch.ones(3))
    assert net.known == 3 and not hasattr(net, 'calls')


def test_comparisons_become_rare():
    due = [count for count in range(1, 5000) if is_check_due(count)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]


def test_a_state_is_restored_with_its_random_numbers():
    x = torch.ones(3)
    state = State([x], {x.device})
    first = torch.rand(2)
    assert not state.has_same_streams(State([x], {x.device}))
    x.add_(1)
    state.restore()
    assert torch.equal(x, torch.ones(3)) and torch.equal(torch.rand(2), first)


GRADIENT = torch.tensor([3.0, 4.0])


@pytest.mark.parametrize('found, tolerance, expected', [
    (GRADIENT, 0.0, None), (GRADIENT * (1 + 1e-6), 0.0, 'differs$'), (GRADIENT * (1 + 1e-6), 1e-3, None),
    (GRADIENT * 1.01, 1e-3, 'differs by 0.01 of its norm, more than 0.001'), (None, 1e-3, 'is missing'),
    (GRADIENT.double(), 1e-3, 'torch.float64'), (GRADIENT[:1], 1e-3, r'\(1,\)'),
    (GRADIENT * float('nan'), 1e-3, 'differs by nan')])
def test_a_differing_part_is_reported_with_its_distance(found, tolerance, expected):
    reason = difference([('the loss', torch.ones(())), ('the gradient of w', GRADIENT)],
                        [('the loss', torch.ones(())), ('the gradient of w', found)], tolerance)
    if expected is None:
        assert reason is None
    else:
        assert reason.startswith('the gradient of w') and re.search(expected, reason)


def test_rounding_residue_of_a_cancelling_gradient_is_no_difference():
    parts = [('the gradient of w', GRADIENT), ('the gradient of b', torch.tensor([1e-7]))]
    assert difference(parts, [parts[0], ('', torch.tensor([-2e-7]))], 1e-3) is None
    assert difference(parts, [parts[0], ('', torch.tensor([1e-3]))], 1e-3) is not None


def test_the_same_nans_and_infinities_are_no_difference():
    x = torch.tensor([float('nan'), float('inf')])
    assert difference([('a', x)], [('a', x.clone())], 0.0) is None


def test_where_infinities_are_the_same_the_rest_is_compared():
    x = torch.tensor([-float('inf'), 1.0])
    assert difference([('a', x)], [('a', torch.tensor([-float('inf'), 1 + 1e-6]))], 1e-3) is None
    for wrong in ([-float('inf'), 1.1], [0.0, 1.0], [float('inf'), 1.0], [-float('inf'), float('inf')]):
        assert difference([('a', x)], [('a', torch.tensor(wrong))], 1e-3) is not None
