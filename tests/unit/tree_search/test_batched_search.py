"""Batched searches: memory use, copies and tracing."""
import copy
import gc
import itertools
import pickle
import resource
import weakref

import pytest
import torch
from torch import nn

from alfx.engine.plan import TracedFunction
from alfx.engine.plan import backends
from alfx.tree_search.batched_search import Prediction, TreeSearch
from alfx.tree_search.trees import SearchSettings


def model(state, action):
    n = len(state)
    return Prediction(torch.zeros(n), torch.rand(n), action_probs=torch.full((n, 3), 1 / 3), state=state + 1)


def run(search, batch_size=4):
    root = model(torch.zeros(batch_size, 8), None)
    return search.run(model, root, root.action_probs.double(), torch.zeros(batch_size))


def test_ten_thousand_searches_take_no_more_memory_than_a_few():
    search = TreeSearch(SearchSettings(4))
    for _ in range(200):
        run(search)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10000):
        run(search)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= 1.02 * before


def test_only_the_latest_sizes_of_batches_are_kept():
    search = TreeSearch(SearchSettings(4))
    trees = [run(search, n) for n in (1, 2, 3, 4, 5)]
    assert len(search._forests) == 4
    assert run(search, 5) is trees[-1] and run(search, 1) is not trees[0]


def test_dropped_forests_are_freed_at_once():
    search = TreeSearch(SearchSettings(4), make_backend=lambda function, memory: TracedFunction(function, memory))
    gc.disable()
    try:
        run(search, 1)
        forest = weakref.ref(next(iter(search._forests.values())))
        for n in (2, 3, 4, 5):
            run(search, n)
        assert forest() is None
    finally:
        gc.enable()


def test_a_copy_searches_with_its_own_trees():
    search = TreeSearch(SearchSettings(4))
    trees = run(search)
    for other in (copy.deepcopy(search), pickle.loads(pickle.dumps(search))):
        assert other.settings == search.settings and run(other) is not trees


class Network(nn.Module):
    """A model with everything that a prediction may have; which actions exist, and their names, depend on the state."""

    def __init__(self, names_actions):
        super().__init__()
        self.layer = nn.Linear(9, 8 + 2 + 3)
        self.names_actions = names_actions

    def forward(self, state, action):
        latent, count = state
        output = self.layer(torch.cat((latent, action[:, None].float()), 1))
        return self.predict(output[:, :8].tanh(), count + 1, output[:, 8:])

    def predict(self, latent, count, output):
        named = count[:, None] + torch.arange(3) if self.names_actions else ()
        logits = torch.where((count[:, None] + torch.arange(3)) % 3 == 1, -torch.inf, output[:, 2:])
        return Prediction(output[:, 0], output[:, 1], output[:, 1] > 1.0, named, logits.softmax(-1), (latent, count))


GUMBEL, EXPANDED = dict(rule='gumbel', gumbel_scale=0.0), dict(expand_root=True, expand_all=True)


@pytest.mark.parametrize('options, names_actions, compiles', [
    *itertools.product((dict(rule='ucb'), GUMBEL, EXPANDED, dict(num_parallel=2)), (False, True), (False, )),
    pytest.param(GUMBEL, False, True, marks=pytest.mark.compiles),
    pytest.param(EXPANDED, True, True, marks=pytest.mark.compiles)])
def test_a_traced_search_matches_an_eager_one(monkeypatch, caplog, options, names_actions, compiles):
    monkeypatch.setattr(backends, 'WARM_UP', backends.WarmUp(calls=3, compiled_calls=3))
    torch.manual_seed(0)
    network, settings, traced = Network(names_actions), SearchSettings(8, **options), []

    def form(function, memory):
        traced.append(TracedFunction(function, network, memory, compiles=compiles))
        return traced[-1]

    plain, recorded = TreeSearch(settings), TreeSearch(settings, make_backend=form)
    with torch.no_grad():
        for _ in range(12):
            root = network.predict(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64), torch.randn(4, 5))
            trees = [search.run(network, root, root.action_probs.double(), torch.zeros(4))
                     for search in (plain, recorded)]
            torch.testing.assert_close(torch.from_numpy(trees[0].ints), torch.from_numpy(trees[1].ints), rtol=0, atol=0)
            torch.testing.assert_close(torch.from_numpy(trees[0].floats), torch.from_numpy(trees[1].floats),
                                       **(dict(rtol=1e-5, atol=1e-6) if compiles else dict(rtol=0, atol=0)))
    backend = traced[0].compiled if compiles else traced[0].replayed
    assert len(traced) == 1 and backend.num_graphs >= 1 and not backend.has_stopped, caplog.text
