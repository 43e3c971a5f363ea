"""A recorded function gives what the function gives, to the bit; compiled, up to rounding."""
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from alfx.engine import recorded_function
from alfx.engine.compiled_function import CompiledFunction
from alfx.engine.program import Program
from alfx.engine.recorded_function import RecordedFunction


@pytest.fixture(autouse=True)
def record_soon(monkeypatch):
    monkeypatch.setattr(recorded_function, '_CALLS_BEFORE', 2)
    monkeypatch.setattr(recorded_function, '_CALLS_BEFORE_COMPILING', 2)


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


def test_it_gives_what_the_function_gives_also_after_the_parameters_have_changed(net):
    def act(inputs):
        mean = net(inputs['x'])
        return mean + torch.randn_like(mean), [mean.argmax(-1)]

    recorded = RecordedFunction(act, net)
    for _ in range(3):
        for (a, [b]), (c, [d]) in zip(calls(act, 5), calls(recorded, 5)):
            assert torch.equal(a, c) and torch.equal(b, d) and b.dtype == d.dtype
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1)
        assert recorded._records
    net[0].weight.data = net[0].weight.data.neg()  # lies elsewhere
    assert all(torch.equal(a[0], b[0]) for a, b in zip(calls(act, 3), calls(recorded, 3)))


def test_results_are_kept_by_the_next_call(net):
    recorded = RecordedFunction(lambda inputs: net(inputs['x']), net)
    results = calls(recorded, 6)
    assert all(torch.equal(a, b) for a, b in zip(results, calls(recorded, 6)))
    assert len({x.data_ptr() for x in results}) == 6


def test_with_gradients_it_is_the_function_itself(net):
    recorded = RecordedFunction(lambda x: net(x), net)
    calls(recorded, 4, torch.ones(1, 3))
    assert recorded._records
    assert recorded(torch.ones(1, 3)).requires_grad


def test_each_batch_size_has_a_record(net):
    recorded = RecordedFunction(lambda x: net(x), net)
    for size in (1, 4, 1):
        with torch.no_grad():
            assert torch.equal(calls(recorded, 4, torch.ones(size, 3))[-1], net(torch.ones(size, 3)))
    assert len(recorded._records) == 2


def test_each_layout_and_type_has_a_record():
    recorded = RecordedFunction(lambda x: 2 * x)
    x = torch.arange(6.)
    for inputs in (x.reshape(2, 3), x.reshape(3, 2).T, x.reshape(2, 3).long()):
        result = calls(recorded, 4, inputs)[-1]
        assert torch.equal(result, 2 * inputs) and result.dtype == inputs.dtype
    assert len(recorded._records) == 3


def test_a_function_that_looks_at_values_is_called_as_it_is(net, caplog):
    def act(x):
        return net(x) if x.sum() > 0 else -net(x)

    recorded = RecordedFunction(act, net)
    with caplog.at_level('INFO'):
        for sign in (1, -1, 1, -1, 1):
            with torch.no_grad():
                assert torch.equal(recorded(sign * torch.ones(1, 3)), act(sign * torch.ones(1, 3)))
    assert not recorded._records
    assert len([r for r in caplog.records if 'looks at the values' in r.getMessage()]) == 1


COMPILES = SimpleNamespace(compile=True)


@pytest.mark.slow
def test_compiled_it_gives_the_same_up_to_rounding_with_the_same_random_numbers(net):
    def act(inputs):
        mean = net(inputs['x'])
        return mean + torch.randn_like(mean), [mean.argmax(-1), torch.rand(1) < 0.5]

    recorded = RecordedFunction(act, net, nn.Linear(2, 2), config=COMPILES)  # whose parameters nobody reads
    for _ in range(2):
        for (a, [b, c]), (d, [e, f]) in zip(calls(act, 6), calls(recorded, 6)):
            torch.testing.assert_close(a, d)
            assert torch.equal(b, e) and torch.equal(c, f)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1)
    (record, ) = recorded._records.values()
    assert isinstance(record.play, CompiledFunction) and not record.copies_results
    assert len(record.play._fixed) == 4
    net[0].weight.data = net[0].weight.data.neg()  # lies elsewhere
    assert not record.play.is_current
    for a, b in zip(calls(act, 3), calls(recorded, 3)):
        torch.testing.assert_close(a[0], b[0])
    assert next(iter(recorded._records.values())) is not record


@pytest.mark.slow
def test_compiled_it_returns_no_memory_that_somebody_else_writes_to(net):
    scale = nn.Parameter(torch.ones(2))
    owner = nn.ParameterList([scale])
    recorded = RecordedFunction(lambda x: (net(x), owner[0].expand(len(x), 2)), net, owner, config=COMPILES)
    results = calls(recorded, 5, torch.ones(1, 3))[2:]  # from the record
    with torch.no_grad():
        scale.add_(1.0)
    assert all(torch.equal(s, torch.ones(1, 2)) for _, s in results)
    assert torch.equal(calls(recorded, 1, torch.ones(1, 3))[0][1], torch.full((1, 2), 2.0))
    assert len({values.data_ptr() for values, _ in results}) == 3


def test_where_the_compiler_fails_the_record_is_played(net, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError('no compiler')

    monkeypatch.setattr(recorded_function, 'CompiledFunction', fail)
    monkeypatch.setattr(recorded_function, '_CALLS_BEFORE', 10**9)  # which is for what is not compiled
    recorded = RecordedFunction(lambda x: net(x), net, config=COMPILES)
    assert torch.equal(calls(recorded, 4, torch.ones(1, 3))[-1], net(torch.ones(1, 3)))
    assert isinstance(next(iter(recorded._records.values())).play, Program) and 'no compiler' in caplog.text


@pytest.mark.slow
def test_compiled_results_in_the_same_memory_are_copied(net):
    def act(x):
        value = net(x)
        return value, value.view(-1)

    recorded = RecordedFunction(act, net, config=COMPILES)
    value, flat = calls(recorded, 4, torch.ones(1, 3))[-1]
    value.add_(1)
    torch.testing.assert_close(flat, net(torch.ones(1, 3)).view(-1))


def test_where_nothing_is_compiled_the_record_is_played(net):
    recorded = RecordedFunction(lambda x: net(x), net, config=SimpleNamespace(compile=False))
    calls(recorded, 4, torch.ones(1, 3))
    assert isinstance(next(iter(recorded._records.values())).play, Program)
