"""Updates as CUDA graphs; what needs a GPU is in tests/contract/test_gpu.py."""
import logging

import pytest
from helpers.dqn_agents import make_agent, train
from helpers.plans import forms

from alfx.engine.plan import capture
from alfx.engine.plan.backends import CachedGraph

pytestmark = pytest.mark.compiles


def capturing(agent):
    """Put a capturing form round the compiled one, as on a GPU."""
    _, compiled = forms(agent)
    plan = agent.updater.plan(agent.learner.losses.collected)
    plan._form = capture.Captured(compiled, compiled.task, 1)
    return plan._form, compiled


def test_on_the_cpu_an_update_stays_compiled(never_played):
    agent = make_agent(True)
    train([agent], 1)
    plan = agent.updater.plan(agent.learner.losses.collected)
    assert plan._form is plan.compiled


@pytest.mark.parametrize('asks', [False, True])
def test_an_update_that_cannot_be_captured_is_called_as_it_is_and_the_log_says_why(asks, never_played, monkeypatch,
                                                                                    caplog):
    def refuse(*args):
        raise RuntimeError('operation not permitted when capturing\nlong text')

    monkeypatch.setattr(capture, 'CudaGraph', refuse)
    agent = make_agent(True)
    train([agent], 1)
    captured, compiled = capturing(agent)
    (kept, ) = compiled._kept.values()
    kept.record.asks_other_ranks = asks
    with caplog.at_level(logging.INFO, 'alfx'):
        train([agent], 3)
    assert captured.has_stopped and compiled.num_records == 1
    if asks:
        assert 'the update of AgentAlgorithm asks the other processes, so that it is no CUDA graph' in caplog.text
    else:
        assert ('is compiled from now on, which takes longer than if it were a CUDA graph: it cannot be captured: '
                'operation not permitted when capturing') in caplog.text
        assert 'long text' not in caplog.text


def test_what_is_captured_is_used_until_its_tensors_move(never_played, monkeypatch):
    calls = []
    monkeypatch.setattr(capture, 'CudaGraph', lambda play, record, leaves: lambda now: calls.append(1) or play(now))
    agent = make_agent(True)
    train([agent], 1)
    captured, _ = capturing(agent)
    train([agent], 2)
    assert captured.num_records == 1 and len(calls) == 5 and isinstance(next(iter(captured._kept.values())),
                                                                        CachedGraph)
    for p in agent.parameters():
        p.data = p.data.clone()
    (record, ) = [kept.record for kept in captured._kept.values()]
    assert not record.is_current
