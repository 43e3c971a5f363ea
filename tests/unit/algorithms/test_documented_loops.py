"""Training methods that a class overrides are called at their place in an iteration, once each."""
import pytest
import torch
from helpers import agents

from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Loss
from alfx.algorithms.documented_loops import CustomLearner
from alfx.engine.learner import Learner


def agent_of(cls, algorithm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agents, 'Agent', cls)
        return agents.make_agent(algorithm, 'discrete')[0]


def recording(*names):
    """An agent class that overrides training methods, notes each call, and calls the inherited method."""
    calls = []

    def override(name):
        def method(self, *args, **kwargs):
            calls.append(name)
            return getattr(super(cls, self), name)(*args, **kwargs)
        return method

    cls = type('Overriding', (Agent, ), {name: override(name) for name in names})
    return cls, calls


@pytest.mark.parametrize('algorithm, names, expected', [
    ('ppo', ['train_iter'], ['train_iter']),
    ('ppo', ['unroll', 'train_from_replay_buffer'], ['unroll', 'train_from_replay_buffer']),
    ('actor-critic', ['unroll', 'train_from_unroll', 'update_with_gradient'],
     ['unroll', 'train_from_unroll', 'update_with_gradient']),
])
def test_overridden_methods_run_once_and_change_nothing(algorithm, names, expected):
    cls, calls = recording(*names)
    both = agent_of(cls, algorithm), agent_of(Agent, algorithm)
    assert isinstance(both[0].learner, CustomLearner) and type(both[1].learner) is Learner
    for agent in both:
        torch.manual_seed(1)
        agent.learner.run_iteration()
    assert calls == expected
    for a, b in zip(both[0].parameters(), both[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('algorithm', sorted(agents.ALGORITHMS))
def test_train_iter_is_an_iteration_of_the_learner(algorithm):
    first_agent, second_agent = agent_of(Agent, algorithm), agent_of(Agent, algorithm)
    torch.manual_seed(1)
    first = first_agent.train_iter()
    torch.manual_seed(1)
    assert second_agent.learner.run_iteration() == first > 0
    assert all(torch.equal(a, b) for a, b in zip(first_agent.parameters(), second_agent.parameters(), strict=True))


def test_a_learner_needs_a_configuration():
    with pytest.raises(ValueError, match='needs a TrainerConfig'):
        Loss().train_iter()
