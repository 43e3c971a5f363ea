"""A number that Python code keeps is never frozen into a traced graph."""
from functools import partial

import pytest
import torch
from helpers.dqn_agents import make_agent
from torch import nn

from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.engine.plan.acting import TracedFunction
from alfx.engine.plan.python_state import Guard, PythonState
from alfx.networks.q_networks import QNetwork

SWITCH = 700


class Layer(nn.Module):
    """Doubles its input, until its number of calls or an attribute says otherwise."""

    factor = 2.0

    def __init__(self):
        super().__init__()
        self.settings = {'shift': 0.0}

    def forward(self, x):
        return x * self.factor + self.settings['shift']


class Counting(Layer):
    """Negates its input from call ``SWITCH`` on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (2.0 if self.calls < SWITCH else -1.0)


class Alternating(Layer):
    """Changes the sign of its output at every call."""

    sign = 1

    def forward(self, x):
        self.sign = -self.sign
        return x * self.sign


def results(layer, count, change=lambda layer, call: None):
    function, x, found = TracedFunction(layer, layer), torch.ones(2, 1), []
    with torch.no_grad():
        for call in range(count):
            change(layer, call)
            found.append(float(function(x)[0]))
    return found, function


@pytest.mark.parametrize('name, value', [('factor', 3.0), ('settings', {'shift': 1.0})])
def test_a_number_changed_from_outside_selects_another_graph(name, value):
    def change(layer, call):
        if call == SWITCH:
            setattr(layer, name, value)

    found, function = results(Layer(), 2 * SWITCH, change)
    assert found == [2.0] * SWITCH + [3.0] * SWITCH
    assert function.replayed.num_graphs == 1


def test_a_number_of_a_class_selects_another_graph(monkeypatch):
    def change(layer, call):
        if call == SWITCH:
            monkeypatch.setattr(Layer, 'factor', 5.0)

    found, _ = results(Layer(), SWITCH + 10, change)
    assert found == [2.0] * SWITCH + [5.0] * 10


@pytest.mark.parametrize('cls, expected', [
    (Counting, [2.0] * (SWITCH - 1) + [-1.0] * 101), (Alternating, [-1.0, 1.0] * ((SWITCH + 100) // 2))])
def test_a_layer_that_changes_its_own_number_is_called_every_time(cls, expected):
    found, function = results(cls(), SWITCH + 100)
    assert found == expected and not function.replayed.num_graphs


def test_modules_of_alfx_and_torch_keep_nothing_to_notice():
    state = PythonState(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    with state.noted() as read:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert read == [] and Guard(read).changed() is None


class SwitchingDqn(DqnAlgorithm):
    """Prefers the worst action from call ``SWITCH`` on."""

    calls = 0

    def _best_index(self, inputs):
        self.calls += 1
        return super()._best_index(inputs)


class CountingNetwork(QNetwork):
    calls = 0

    def forward(self, inputs, state=()):
        self.calls += 1
        return super().forward(inputs, state)


def test_a_subclass_of_an_algorithm_is_called_at_every_step():
    agent = make_agent(algorithm_cls=SwitchingDqn)
    algorithm = agent.policy
    algorithm.calls = 0
    for _ in range(20):
        agent.unroll(4)
    assert algorithm.calls == 80


def test_a_network_of_ones_own_is_called_at_every_step():
    rl = partial(DqnAlgorithm, q_network_cls=partial(CountingNetwork, fc_layer_params=(8, )), calculate_priority=True,
                 num_critic_replicas=1)
    agent = make_agent(rl=rl)
    for _ in range(20):
        agent.unroll(4)
    network = next(m for m in agent.modules() if isinstance(m, CountingNetwork))
    assert network.calls >= 80  # one of each step at least
