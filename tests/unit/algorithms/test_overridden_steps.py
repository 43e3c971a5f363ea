"""Steps and hooks that a subclass overrides are called, although alfx has faster ways to compute the same."""
from functools import partial

import pytest
import torch
from helpers import agents, dqn_agents, sac_agents

from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.containers import RLAlgWrapper
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm




def counting(base, *names, mixin=False):
    """Return a subclass that overrides methods, directly or in a mixin, and the list of their calls."""
    calls = []

    def override(name):
        def method(self, *args, **kwargs):
            calls.append(name)
            return getattr(super(owner, self), name)(*args, **kwargs)
        return method

    methods = {name: override(name) for name in names}
    owner = type('Overriding', (object, ) if mixin else (base, ), methods)
    return type('Combined', (owner, base), {}) if mixin else owner, calls


def assert_same_training(agent, reference, calls, iterations=3):
    for each in (agent, reference):
        torch.manual_seed(1)
        for _ in range(iterations):
            each.train_iter()
    assert calls
    for a, b in zip(agent.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('mixin', [False, True])
@pytest.mark.parametrize('environment', ['continuous', 'recurrent'])
def test_a_train_step_of_a_subclass_of_sac_is_called(environment, mixin):
    cls, calls = counting(SacAlgorithm, 'train_step', mixin=mixin)
    assert_same_training(*(sac_agents.make_agent(environment, each)[0] for each in (cls, SacAlgorithm)), calls)


def test_a_train_step_of_a_subclass_of_ppo_is_called(monkeypatch):
    cls, calls = counting(PPOAlgorithm, 'train_step')
    monkeypatch.setitem(agents.ALGORITHMS, 'ppo', partial(cls, **getattr(agents.ALGORITHMS['ppo'], 'keywords', {})))
    agents.make_agent('ppo', 'discrete')[0].train_iter()
    assert calls


def test_subclasses_without_a_train_step_keep_the_fast_sequence():
    cls, _ = counting(SacAlgorithm, 'rollout_step')
    assert cls.train_sequence is SacAlgorithm.train_sequence
    step, _ = counting(SacAlgorithm, 'train_step')
    sequence, _ = counting(step, 'train_sequence')
    assert step.train_sequence is Algorithm.train_sequence and sequence.train_sequence is not Algorithm.train_sequence


@pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo', 'impala'])
def test_a_rollout_step_of_a_subclass_of_agent_is_called(algorithm, monkeypatch):
    cls, calls = counting(Agent, 'rollout_step')
    reference = agents.make_agent(algorithm, 'discrete')[0]
    monkeypatch.setattr(agents, 'Agent', cls)
    agent = agents.make_agent(algorithm, 'discrete')[0]
    agent.train_iter()
    assert calls == ['rollout_step'] * len(calls) and len(calls) >= 6
    assert reference.capabilities.recomputes_rollout_info and not agent.capabilities.recomputes_rollout_info


def test_infos_of_a_wrapper_with_its_own_rollout_step_are_kept():
    policy = agents.make_agent('actor-critic', 'discrete')[0].policy
    for cls, recomputes in ((RLAlgWrapper, True), (counting(RLAlgWrapper, 'rollout_step')[0], False)):
        wrapper = cls(policy._observation_spec, policy._action_spec, policy)
        assert wrapper.capabilities.recomputes_rollout_info == recomputes


@pytest.mark.parametrize('name', ['observe_for_replay', 'observe_for_metrics'])
def test_a_hook_for_each_step_is_called(name):
    cls, calls = counting(Agent, name)
    assert_same_training(dqn_agents.make_agent(agent_cls=cls), dqn_agents.make_agent(), calls)
    assert len(calls) == 3 * 4, 'iterations and steps of an unroll'


def test_an_agent_that_transforms_experience_itself_updates_eagerly():
    cls, calls = counting(Agent, 'transform_experience')
    agent = dqn_agents.make_agent(agent_cls=type('Declaring', (cls, ), {'own_capabilities': Agent.own_capabilities}))
    assert dqn_agents.make_agent().capabilities.traceable_update and not agent.capabilities.traceable_update
    for _ in range(4):
        agent.train_iter()
    assert len(calls) >= 4
