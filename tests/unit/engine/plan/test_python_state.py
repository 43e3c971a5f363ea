"""A number that Python code keeps is never frozen into a traced graph."""
from functools import partial

import pytest
import torch
from helpers import agents, deterministic_agents, offline_agents, sac_agents
from helpers.dqn_agents import make_agent
from helpers.plans import num_graphs
from torch import nn

from alfx import context
from alfx.algorithms.awac_algorithm import AwacAlgorithm
from alfx.algorithms.causal_bc_algorithm import CausalBcAlgorithm
from alfx.algorithms.cql_algorithm import CqlAlgorithm, DiscreteCqlAlgorithm
from alfx.algorithms.data_transformer import RewardScaling
from alfx.algorithms.ddpg_algorithm import DdpgAlgorithm
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.oac_algorithm import OacAlgorithm
from alfx.algorithms.qrsac_algorithm import QrsacAlgorithm
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.algorithms.td3_bc_algorithm import Td3BcAlgorithm
from alfx.engine.plan.acting import TracedFunction
from alfx.engine.plan.python_state import Guard, PythonState
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
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
def test_a_layer_that_changes_its_own_attribute_is_called_every_time(cls, expected):
    found, function = results(cls(), SWITCH + 100)
    assert found == expected and not function.replayed.num_graphs


def test_modules_of_alfx_and_torch_have_no_python_state():
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


def test_a_subclass_without_a_declaration_runs_eagerly():
    agent = make_agent(algorithm_cls=SwitchingDqn)
    algorithm = agent.policy
    algorithm.calls = 0
    for _ in range(20):
        agent.unroll(4)
    assert algorithm.calls == 80


def test_user_defined_networks_run_at_every_step():
    rl = partial(DqnAlgorithm, q_network_cls=partial(CountingNetwork, fc_layer_params=(8, )), calculate_priority=True,
                 num_critic_replicas=1)
    agent = make_agent(rl=rl)
    for _ in range(20):
        agent.unroll(4)
    network = next(m for m in agent.modules() if isinstance(m, CountingNetwork))
    assert network.calls >= 80  # one of each step at least


# In every algorithm ------------------------------------------------------------------------------------------------


def offline(name, environment='continuous', **arguments):
    """Return a function from a folder to an agent with a dataset; ``name`` is a name of ``make_agent`` or a class."""
    constructor = partial(name, **arguments) if isinstance(name, type) else name
    return lambda folder: offline_agents.make_agent(constructor, offline_agents.record(folder / 'data', environment),
                                                    environment)


DETERMINISTIC = dict(actor_network_ctor=partial(ActorNetwork, fc_layer_params=(8, )),
                     critic_network_ctor=partial(CriticNetwork, joint_fc_layer_params=(8, )))
AGENTS = {
    'sac': lambda _: sac_agents.make_agent('continuous')[0],
    'sac, discrete': lambda _: sac_agents.make_agent('discrete')[0],
    'dqn': lambda _: make_agent(), 'ddpg': lambda _: deterministic_agents.make_agent(DdpgAlgorithm)[0],
    'td3': lambda _: deterministic_agents.make_agent(Td3Algorithm)[0],
    'qrsac': lambda _: sac_agents.make_agent('continuous', QrsacAlgorithm)[0],
    'oac': lambda _: sac_agents.make_agent('continuous', OacAlgorithm)[0],
    'ppo': lambda _: agents.make_agent('ppo', 'discrete')[0],
    'actor-critic': lambda _: agents.make_agent('actor-critic', 'continuous')[0],
    'impala': lambda _: agents.make_agent('impala', 'discrete')[0],
    'ppg': lambda _: agents.make_agent('ppg', 'discrete')[0],
    'iql': offline('iql'), 'bc': offline('bc'), 'cql': offline(CqlAlgorithm, num_sampled_actions=2),
    'discrete cql': offline(DiscreteCqlAlgorithm, 'discrete'), 'awac': offline(AwacAlgorithm),
    'td3+bc': offline(Td3BcAlgorithm, **DETERMINISTIC),
    'causal bc': offline(CausalBcAlgorithm, actor_network_cls=DETERMINISTIC['actor_network_ctor']),
}


def network_of(algorithm):
    """Return a network that the loss reads."""
    for name in ('actor', 'critics', '_actor_network', '_network'):
        if getattr(algorithm, name, None) is not None:
            return getattr(algorithm, name)
    raise AssertionError(f'{type(algorithm).__name__} has no network')


def watch(owner, hook):
    """Let ``hook`` of an object read a number that it keeps.

    Returns:
        A list of the number and whether gradients are enabled, for each time that the hook runs in Python.
    """
    runs, cls = [], type(owner)

    def watched(self, *args, **kwargs):
        runs.append((self.number, torch.is_grad_enabled()))
        return getattr(super(type(self), self), hook)(*args, **kwargs)

    owner.__class__ = type(f'Users{cls.__name__}', (cls, ), {'__module__': 'users', 'number': 0, hook: watched})
    return runs


@pytest.mark.parametrize('part', ['algorithm', 'network'])
@pytest.mark.parametrize('name', AGENTS)
def test_a_changed_number_of_any_algorithm_reaches_its_updates(name, part, tmp_path, warm_up):
    warm_up(2)
    agent = AGENTS[name](tmp_path)
    owner = agent.policy if part == 'algorithm' else network_of(agent.policy)
    runs = watch(owner, 'calc_loss' if part == 'algorithm' else 'with_value' if name == 'ppg' else 'forward')
    for _ in range(6):
        agent.train_iter()
    assert num_graphs(agent)
    runs.clear()
    agent.train_iter()
    assert not [number for number, has_gradient in runs if has_gradient], 'graphs are in use'
    owner.number = 1
    agent.train_iter()
    assert {number for number, has_gradient in runs if has_gradient} == {1}


def test_a_changed_number_of_a_transformer_reaches_updates(warm_up):
    warm_up(2)
    agent, _ = sac_agents.make_agent(
        data_transformer=lambda env: RewardScaling(0.1, observation_spec=env.observation_spec()))
    runs = watch(agent.data_transformer, 'transform_experience')
    for _ in range(6):
        agent.train_iter()
    assert num_graphs(agent)
    runs.clear()
    agent.data_transformer.number = 1
    agent.train_iter()
    assert {number for number, _ in runs} == {1}


@pytest.mark.parametrize('name', AGENTS)
def test_a_changed_number_of_any_network_reaches_its_policy(name, tmp_path, warm_up):
    warm_up(2)
    agent = AGENTS[name](tmp_path)
    network = network_of(agent.policy)
    runs = watch(network, 'forward')
    inputs = agent._env.current_time_step()

    def act(count):
        with context.eval_context(), torch.no_grad():
            for _ in range(count):
                agent.fast_predict_step(inputs, agent.get_initial_predict_state(4))
        with context.rollout_context(), torch.no_grad():
            for _ in range(count):
                agent.rollout_step(inputs, agent.get_initial_rollout_state(4))

    act(40)
    runs.clear()
    network.number = 1
    act(1)
    assert {number for number, _ in runs} == {1}
