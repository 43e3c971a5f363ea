"""Traced functions give bit-identical results; compiled functions, results that are equal up to rounding."""
import copy
import functools

import pytest
import torch
from helpers.plans import warnings_in
from torch import nn

from alfx import context
from alfx.engine.plan import TracedFunction, compile
from alfx.engine.plan.backends import Replayed
from alfx.utils.schedulers import LinearScheduler


@pytest.fixture(autouse=True)
def trace_early(warm_up):
    warm_up(2)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def calls(function, count, inputs=None):
    results = []
    with torch.no_grad():
        for i in range(count):
            torch.manual_seed(i)
            results.append(function({'x': torch.randn(1, 3)} if inputs is None else inputs))
    return results


def test_replay_matches_the_function_even_after_parameter_changes(net):
    def act(inputs):
        mean = net(inputs['x'])
        return mean + torch.randn_like(mean), [mean.argmax(-1)]

    recorded = TracedFunction(act, net)
    for _ in range(3):
        for (a, [b]), (c, [d]) in zip(calls(act, 5), calls(recorded, 5)):
            assert torch.equal(a, c) and torch.equal(b, d) and b.dtype == d.dtype
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1)
        assert recorded.replayed._graphs
    net[0].weight.data = net[0].weight.data.neg()  # lies elsewhere
    assert all(torch.equal(a[0], b[0]) for a, b in zip(calls(act, 3), calls(recorded, 3)))


def test_results_are_kept_by_the_next_call(net):
    recorded = TracedFunction(lambda inputs: net(inputs['x']), net)
    results = calls(recorded, 6)
    assert all(torch.equal(a, b) for a, b in zip(results, calls(recorded, 6)))
    assert len({x.data_ptr() for x in results}) == 6


def test_with_gradients_it_is_the_function_itself(net):
    recorded = TracedFunction(lambda x: net(x), net)
    calls(recorded, 4, torch.ones(1, 3))
    assert recorded.replayed._graphs
    assert recorded(torch.ones(1, 3)).requires_grad


def test_each_batch_size_has_a_graph(net):
    recorded = TracedFunction(lambda x: net(x), net)
    for size in (1, 4, 1):
        with torch.no_grad():
            assert torch.equal(calls(recorded, 4, torch.ones(size, 3))[-1], net(torch.ones(size, 3)))
    assert len(recorded.replayed._graphs) == 2


def test_each_layout_and_type_has_a_graph():
    recorded = TracedFunction(lambda x: 2 * x)
    x = torch.arange(6.)
    for inputs in (x.reshape(2, 3), x.reshape(3, 2).T, x.reshape(2, 3).long()):
        result = calls(recorded, 4, inputs)[-1]
        assert torch.equal(result, 2 * inputs) and result.dtype == inputs.dtype
    assert len(recorded.replayed._graphs) == 3


def test_a_function_that_branches_on_values_runs_eagerly(net, caplog):
    def act(x):
        return net(x) if x.sum() > 0 else -net(x)

    recorded = TracedFunction(act, net)
    for sign in (1, -1, 1, -1, 1):
        with torch.no_grad():
            assert torch.equal(recorded(sign * torch.ones(1, 3)), act(sign * torch.ones(1, 3)))
    assert not recorded.replayed.num_graphs
    (message, ) = warnings_in(caplog)
    assert message.startswith('acting falls back from a replayed graph to eager mode')
    assert 'it cannot be traced' in message


class Policy(nn.Module):
    """A policy that reads a number besides its parameters."""

    def __init__(self, read):
        super().__init__()
        self.layer, self.read, self.number = nn.Linear(3, 2), read, 1.0
        self.own, self.others = torch.ones(()), [torch.ones(())]
        self.schedule = LinearScheduler('iterations', [(0, 1.0), (100, 3.0)])

    def act(self, x):
        return self.layer(x) * self.read(self)


@pytest.mark.parametrize('compiles', [False, True])
@pytest.mark.parametrize('read', ['number', 'schedule()', 'others[-1]', 'own'])
def test_state_read_outside_of_modules_is_never_frozen(read, compiles, caplog):
    policy = Policy(lambda self: eval(f'self.{read}'))
    recorded = TracedFunction(policy.act, policy, compiles=compiles)
    with torch.no_grad():
        for i in range(12):
            policy.number = 1.0 + 0.1 * i
            policy.own.fill_(policy.number)
            policy.others.append(policy.own.clone())
            context.update_progress('iterations', i)
            x = torch.randn(2, 3)
            torch.testing.assert_close(recorded(x), policy.act(x))
    messages = warnings_in(caplog)
    if read in ('own', 'number', 'others[-1]'):  # read in place, or a new graph for each value
        assert not messages
    else:
        assert not recorded.replayed.num_graphs and messages


def test_a_late_change_of_a_number_is_detected_at_once(caplog):
    policy = Policy(lambda self: self.number)
    recorded = TracedFunction(policy.act, policy)
    calls(recorded, 20, torch.ones(1, 3))
    policy.number = 2.0
    for found in calls(recorded, 40, torch.ones(1, 3)):
        assert torch.equal(found, policy.act(torch.ones(1, 3)))
    assert not warnings_in(caplog)


class Counting(nn.Module):
    """A module that counts its calls, in the instance or the class, and behaves differently after many of them."""

    in_class = 0

    def __init__(self, counts_in_class):
        super().__init__()
        self.layer, self.in_self, self.counts_in_class = nn.Linear(3, 2), 0, counts_in_class

    def act(self, x):
        if self.counts_in_class:
            Counting.in_class += 1
        else:
            self.in_self += 1
        return -self.layer(x) if Counting.in_class + self.in_self > 20 else self.layer(x)


@pytest.mark.parametrize('is_partial', [False, True])
@pytest.mark.parametrize('name', ['in_class', 'in_self'])
def test_a_function_that_counts_its_calls_runs_every_time(name, is_partial, caplog, monkeypatch):
    monkeypatch.setattr(Counting, 'in_class', 0)
    policy = Counting(name == 'in_class')
    recorded = TracedFunction(functools.partial(policy.act) if is_partial else policy.act, policy.layer)
    found = calls(recorded, 40, torch.ones(1, 3))
    assert torch.equal(found[-1], -found[0]) and not recorded.replayed.num_graphs
    (message, ) = warnings_in(caplog)
    assert f'it sets Counting.{name}, which a graph cannot do' in message


def test_a_wrong_graph_is_never_used(net, monkeypatch, caplog):
    make = Replayed._make

    def corrupted(*args):
        cached = make(*args)
        run, cached.run = cached.run, lambda leaves: [x * 1.0001 for x in run(leaves)]
        return cached

    monkeypatch.setattr(Replayed, '_make', corrupted)
    recorded = TracedFunction(lambda x: {'action': net(x)}, net)
    for result in calls(recorded, 6, torch.ones(1, 3)):
        assert torch.equal(result['action'], net(torch.ones(1, 3)))
    assert 'result action' in caplog.text and not recorded.replayed.num_graphs


def test_a_copied_object_has_its_own_traced_function():
    policy = Policy(lambda self: 1.0)
    policy.recorded = TracedFunction(policy.act, policy)
    copied = copy.deepcopy(policy)
    with torch.no_grad():
        copied.layer.weight.mul_(2)
        for _ in range(5):
            x = torch.randn(1, 3)
            assert torch.equal(policy.recorded(x), policy.act(x)) and torch.equal(copied.recorded(x), copied.act(x))
    assert copied.recorded.replayed.num_graphs


@pytest.mark.slow
def test_compiled_replay_matches_up_to_rounding_with_the_same_seeds(net, caplog):
    def act(inputs):
        mean = net(inputs['x'])
        return mean + torch.randn_like(mean), [mean.argmax(-1), torch.rand(1) < 0.5]

    recorded = TracedFunction(act, net, nn.Linear(2, 2), compiles=True)  # with unused parameters
    for _ in range(2):
        for (a, [b, c]), (d, [e, f]) in zip(calls(act, 12), calls(recorded, 12)):
            torch.testing.assert_close(a, d)
            assert torch.equal(b, e) and torch.equal(c, f)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1)
    (cached, ) = recorded.compiled._graphs.values()
    assert len(cached.graph.fixed) == 4
    net[0].weight.data = net[0].weight.data.neg()  # lies elsewhere
    assert not cached.graph.is_current
    for a, b in zip(calls(act, 3), calls(recorded, 3)):
        torch.testing.assert_close(a[0], b[0])
    assert next(iter(recorded.compiled._graphs.values())) is not cached and not warnings_in(caplog)


@pytest.mark.slow
def test_compiled_functions_return_memory_that_is_not_overwritten(net):
    scale = nn.Parameter(torch.ones(2))
    owner = nn.ParameterList([scale])
    recorded = TracedFunction(lambda x: (net(x), owner[0].expand(len(x), 2)), net, owner, compiles=True)
    results = calls(recorded, 5, torch.ones(1, 3))[2:]  # from the graph
    with torch.no_grad():
        scale.add_(1.0)
    assert all(torch.equal(s, torch.ones(1, 2)) for _, s in results)
    assert torch.equal(calls(recorded, 1, torch.ones(1, 3))[0][1], torch.full((1, 2), 2.0))
    assert len({values.data_ptr() for values, _ in results}) == 3


def test_if_the_compiler_fails_the_graph_is_replayed(net, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError('no compiler')

    monkeypatch.setattr(compile, 'compiled', fail)
    recorded = TracedFunction(lambda x: net(x), net, compiles=True)
    assert torch.equal(calls(recorded, 8, torch.ones(1, 3))[-1], net(torch.ones(1, 3)))
    assert recorded.replayed.num_graphs == 1 and 'no compiler' in caplog.text


@pytest.mark.slow
def test_compiled_results_in_the_same_memory_are_copied(net):
    def act(x):
        value = net(x)
        return value, value.view(-1)

    recorded = TracedFunction(act, net, compiles=True)
    value, flat = calls(recorded, 4, torch.ones(1, 3))[-1]
    value.add_(1)
    torch.testing.assert_close(flat, net(torch.ones(1, 3)).view(-1))
