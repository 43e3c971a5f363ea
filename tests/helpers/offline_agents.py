"""Datasets recorded in tiny environments, and agents trained on them."""
import inspect
from functools import partial

import torch
from helpers import sac_agents

from alfx import nest
from alfx.algorithms.bc_algorithm import BcAlgorithm
from alfx.algorithms.iql_algorithm import IqlAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.value_networks import ValueNetwork, ValueRNNNetwork
from alfx.offline import recorder
from alfx.offline import dataset_folder


def record(path, environment='continuous', num_steps=120, seed=3):
    """Record a dataset of random actions in an environment of ``sac_agents`` and return its path."""
    torch.manual_seed(seed)
    env = sac_agents.ENVIRONMENTS[environment](batch_size=3)
    env.reset()
    episodes = recorder.record(env, recorder.random_policy(env.action_spec(), 3), num_steps)
    dataset_folder.write(str(path), episodes, {'env_name': 'test'})
    return str(path)


def file_of_alf(path, time_step):
    """Write a checkpoint in the format of ALF, with the steps ``[T]`` of one environment, and return its path.

    The ring has room for more than T steps.
    """
    count, leaves = len(time_step.step_type), {}
    for name, field in time_step._asdict().items():
        for where, x in nest.flatten_with_path(field):
            leaves['|'.join(['_replay_buffer.time_step', name, *where.split('.')]).strip('|')] = torch.cat(
                (x, torch.zeros_like(x)))[None]
    torch.save({'algorithm': {'_replay_buffer._current_size': torch.tensor([count]),
                              '_replay_buffer._current_pos': torch.tensor([count]), **leaves},
                'global_step': torch.tensor(3)}, path)
    return str(path)


def algorithm(name, environment='continuous'):
    """Return constructor and arguments of an algorithm for ``sac_agents.make_agent``."""
    recurrent = environment.startswith('recurrent')
    memory = dict(lstm_hidden_size=(8, )) if recurrent else {}
    if name == 'bc':
        network = ActorDistributionRNNNetwork if recurrent else ActorDistributionNetwork
        return partial(BcAlgorithm, actor_network_cls=partial(network, fc_layer_params=(16, ), **memory)), {}
    if name == 'iql':
        network = ValueRNNNetwork if recurrent else ValueNetwork
        return partial(IqlAlgorithm, v_network_cls=partial(network, fc_layer_params=(16, ), **memory)), {}
    return SacAlgorithm, {}


def make_agent(name, path, environment='continuous', unroll_length=0, config_args=None, agent_args=None, **kwargs):
    """Return an agent with an algorithm ('bc', 'iql', 'sac' or a constructor), a dataset, and an environment."""
    cls, extra = algorithm(name, environment) if isinstance(name, str) else (name, {})
    config_args = dict(offline_buffer_dir=path, **(config_args or {}))
    if not unroll_length:
        config_args['num_iterations'] = 10
    return _make(cls, environment, unroll_length, config_args, agent_args, **extra, **kwargs)


def _make(constructor, environment, unroll_length, config_args, agent_args, **kwargs):
    """Call ``sac_agents.make_agent`` with only the networks of the algorithm."""
    def construct(observation_spec, action_spec, **arguments):
        cls = constructor.func if isinstance(constructor, partial) else constructor
        names = inspect.signature(cls).parameters
        names = inspect.signature(SacAlgorithm).parameters if 'kwargs' in names else names
        arguments = {key: value for key, value in arguments.items() if key in names}
        if isinstance(constructor, partial):
            arguments = {key: value for key, value in arguments.items() if key not in constructor.keywords}
        return constructor(observation_spec=observation_spec, action_spec=action_spec, **arguments)

    construct.__signature__ = inspect.signature(SacAlgorithm)
    return sac_agents.make_agent(environment, construct, unroll_length=unroll_length, use_rollout_state=False,
                                 config_args=config_args, agent_args=agent_args, **kwargs)[0]


def parameters(agent):
    """Return copies of all parameters."""
    return {name: p.detach().clone() for name, p in agent.named_parameters()}


def differences(first, second):
    """Return the names of the parameters that differ between two such dicts."""
    return [name for name in first if not torch.equal(first[name], second[name])]
