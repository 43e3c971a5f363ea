"""Updates as CUDA graphs; what needs a GPU is in tests/contract/test_gpu.py."""
import logging

import pytest
from helpers.dqn_agents import make_agent, train
from helpers.plans import backends_of

from alfx.engine.plan import capture
from alfx.engine.plan.backends import CachedGraph

pytestmark = pytest.mark.compiles


def capturing(agent):
    """Wrap the compiled backend in a capturing one, as on a GPU."""
    _, compiled = backends_of(agent)
    plan = agent.updater.plan(agent.learner.losses.collected)
    plan._backend = capture.Captured(compiled, compiled.task, 1)
    return plan._backend, compiled


def test_on_the_cpu_an_update_stays_compiled(never_replayed):
    agent = make_agent(True)
    train([agent], 1)
    plan = agent.updater.plan(agent.learner.losses.collected)
    assert plan._backend is plan.compiled


@pytest.mark.parametrize('asks', [False, True])
def test_an_uncapturable_update_runs_eagerly_and_logs_the_reason(asks, never_replayed, monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError('operation not permitted when capturing\nlong text')

    monkeypatch.setattr(capture, 'CudaGraph', fail)
    agent = make_agent(True)
    train([agent], 1)
    captured, compiled = capturing(agent)
    (cached, ) = compiled._graphs.values()
    cached.graph.has_collectives = asks
    with caplog.at_level(logging.INFO, 'alfx'):
        train([agent], 3)
    assert captured.has_stopped and compiled.num_graphs == 1
    if asks:
        assert 'the update of AgentAlgorithm is not captured as a CUDA graph, because it communicates' in caplog.text
    else:
        assert ('falls back from a CUDA graph to compiled code, which is slower: it cannot be captured: operation not '
                'permitted when capturing') in caplog.text
        assert 'long text' not in caplog.text


def test_a_captured_graph_is_used_until_its_tensors_move(never_replayed, monkeypatch):
    calls = []
    monkeypatch.setattr(capture, 'CudaGraph', lambda run, graph, leaves: lambda now: calls.append(1) or run(now))
    agent = make_agent(True)
    train([agent], 1)
    captured, _ = capturing(agent)
    train([agent], 2)
    assert captured.num_graphs == 1 and len(calls) == 5 and isinstance(next(iter(captured._graphs.values())),
                                                                        CachedGraph)
    for p in agent.parameters():
        p.data = p.data.clone()
    (graph, ) = [cached.graph for cached in captured._graphs.values()]
    assert not graph.is_current
