"""Verification of a backend against its fallback: which differences drop it, and which are accepted."""
from types import SimpleNamespace

import pytest
import torch

from alfx.engine.plan.backends import Backend, CachedGraph, GraphRequest, GraphTask

GRADIENT = torch.tensor([3.0, 4.0])


class Constant(GraphTask):
    """Computation of a loss and a gradient that are the same in each call."""

    tracer = SimpleNamespace(name='the update')

    def request(self, inputs, in_place):
        return GraphRequest([], None, 'key')

    def parts(self, output):
        return [('the loss', output[0]), ('the gradient of w', output[1])]

    def output(self, results, request):
        return list(results)


class Scaled(Backend):
    """Returns the gradient times ``factors[call]``, and times 1 in later calls; the loss times ``loss_factor``."""

    label = 'scaled code'

    def __init__(self, factors, loss_factor=1.0):
        super().__init__(lambda inputs: [torch.ones(()), GRADIENT], Constant(), warm_up=0)
        self.loss = torch.tensor(loss_factor)
        self.factors, self.graph = list(factors), SimpleNamespace(
            is_current=True, is_half=False, written=[], fixed=[torch.ones(1)], versions=dict)

    def _make(self, request):
        return CachedGraph(self.graph, lambda leaves: [self.loss, GRADIENT * self._next()])

    def _next(self):
        return self.factors.pop(0) if self.factors else 1.0


def calls(backend, count):
    return [float(backend(None)[1][0]) / 3.0 for _ in range(count)]


def test_a_small_difference_in_two_calls_in_a_row_is_accepted(caplog):
    backend = Scaled([1.01, 1.01])
    assert calls(backend, 5) == pytest.approx([1.01, 1.01, 1.0, 1.0, 1.0]) and backend.num_graphs
    assert not caplog.text


def test_a_small_difference_in_three_calls_in_a_row_drops_the_graph(caplog):
    backend = Scaled([1.0, 1.01, 1.01, 1.01])
    assert calls(backend, 6) == pytest.approx([1.0, 1.01, 1.01, 1.0, 1.0, 1.0])
    assert backend.has_stopped and not backend.num_graphs
    assert 'the gradient of w differs by 0.01 of its norm' in caplog.text


def test_small_differences_that_are_not_in_a_row_are_accepted():
    backend = Scaled([1.01, 1.01, 1.0, 1.01, 1.01, 1.0, 1.0, 1.01])
    calls(backend, 10)
    assert backend.num_graphs == 1


def test_a_large_difference_drops_the_graph_at_once():
    backend = Scaled([1.04])
    assert calls(backend, 1) == [1.0] and backend.has_stopped


def test_a_small_difference_of_the_loss_drops_the_graph_at_once(caplog):
    backend = Scaled([1.0], loss_factor=1.01)
    assert float(backend(None)[0]) == 1.0 and backend.has_stopped
    assert 'the loss differs by 0.01 of its norm' in caplog.text


def test_an_exact_backend_accepts_no_difference():
    backend = Scaled([1.0001])
    backend._is_exact = True
    assert calls(backend, 1) == [1.0] and backend.has_stopped
