"""A recorded function gives what the function gives, to the bit."""
import pytest
import torch
from torch import nn

from alfx.engine import recorded_function
from alfx.engine.recorded_function import RecordedFunction


@pytest.fixture(autouse=True)
def record_soon(monkeypatch):
    monkeypatch.setattr(recorded_function, '_CALLS_BEFORE', 2)


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
