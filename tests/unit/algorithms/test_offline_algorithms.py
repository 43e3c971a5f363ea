"""Every algorithm that is made for datasets, in an agent: alone with a dataset, and with own experience besides."""
from functools import partial

import gin
from helpers import offline_agents
import pytest
import torch
from helpers.offline_agents import differences, make_agent, parameters
from helpers.plans import num_graphs

from alfx import context
from alfx.algorithms.awac_algorithm import AwacAlgorithm
from alfx.algorithms.causal_bc_algorithm import CausalBcAlgorithm
from alfx.algorithms.cql_algorithm import CqlAlgorithm, DiscreteCqlAlgorithm
from alfx.algorithms.td3_bc_algorithm import Td3BcAlgorithm
from alfx.gin_utils import ConfError
from alfx.nest.utils import NestConcat
from alfx.networks.actor_networks import ActorNetwork, ActorRNNNetwork
from alfx.networks.critic_networks import CriticNetwork, CriticRNNNetwork

SMALL = dict(actor_network_ctor=partial(ActorNetwork, fc_layer_params=(16, )),
             critic_network_ctor=partial(CriticNetwork, joint_fc_layer_params=(16, )))
MEMORY = dict(actor_network_ctor=partial(ActorRNNNetwork, fc_layer_params=(16, ), lstm_hidden_size=(8, )),
              critic_network_ctor=partial(CriticRNNNetwork, joint_fc_layer_params=(16, ), lstm_hidden_size=(8, )))
ALGORITHMS = {
    'causal bc': (partial(CausalBcAlgorithm, actor_network_cls=partial(ActorNetwork, fc_layer_params=(16, ))),
                  'continuous'),
    'td3+bc': (partial(Td3BcAlgorithm, **SMALL), 'continuous'),
    'rebrac': (partial(Td3BcAlgorithm, critic_penalty=0.1, **SMALL), 'nested action'),
    'awac': (AwacAlgorithm, 'continuous'), 'awac, several rewards': (AwacAlgorithm, 'several rewards'),
    'cql': (partial(CqlAlgorithm, num_sampled_actions=2), 'continuous'),
    'cql, several rewards': (partial(CqlAlgorithm, num_sampled_actions=2), 'several rewards'),
    'cql, nested': (partial(CqlAlgorithm, num_sampled_actions=2), 'nested action'),
    'discrete cql': (DiscreteCqlAlgorithm, 'discrete'),
    'discrete cql, several rewards': (DiscreteCqlAlgorithm, 'several rewards, discrete'),
    'td3+bc with memory': (partial(Td3BcAlgorithm, critic_penalty=0.1, **MEMORY), 'recurrent'),
    'awac with memory': (AwacAlgorithm, 'recurrent'),
    'cql with memory': (partial(CqlAlgorithm, num_sampled_actions=2), 'recurrent'),
    'discrete cql with memory': (DiscreteCqlAlgorithm, 'recurrent, discrete'),
}


def agent_of(name, tmp_path, path=None, **kwargs):
    ctor, environment = ALGORITHMS[name]
    path = path or offline_agents.record(tmp_path / 'data', environment)
    if name == 'rebrac':
        ctor = partial(ctor, critic_network_ctor=partial(CriticNetwork, joint_fc_layer_params=(16, ),
                                                         action_preprocessing_combiner=NestConcat()))
    return make_agent(ctor, path, environment, **kwargs)


@pytest.mark.parametrize('unroll_length', [0, 4], ids=['offline', 'hybrid'])
@pytest.mark.parametrize('name', ALGORITHMS)
def test_it_trains_on_a_dataset_alone_and_beside_own_experience(name, unroll_length, tmp_path):
    agent = agent_of(name, tmp_path, unroll_length=unroll_length, mini_batch_length=3)
    before = parameters(agent)
    for _ in range(3):
        agent.train_iter()
    now = parameters(agent)
    changed = differences(before, now)
    assert all(torch.isfinite(x).all() for x in now.values())
    kinds = [part for part in ('actor', 'critic', 'discriminator') if any(part in x.lower() for x in before)]
    assert kinds and all(any(part in x.lower() for x in changed) for part in kinds)


@pytest.mark.parametrize('name', ['causal bc', 'rebrac', 'awac', 'cql', 'discrete cql'])
def test_its_updates_are_recorded(name, tmp_path):
    agent = agent_of(name, tmp_path, updates=25)
    for _ in range(6):
        agent.train_iter()
    assert num_graphs(agent)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize('name, config_args', [('iql', dict(rl_train_after_update_steps=3)), ('td3+bc', {}),
                                               ('cql', {})])
def test_compiled_updates_are_the_plain_ones_in_every_phase(name, config_args, tmp_path):
    """IQL pretrains first, and then trains with own experience besides."""
    made, path = [], offline_agents.record(tmp_path / 'data')
    for compile in (False, True):
        kwargs = dict(config_args=dict(compile=compile, **config_args), unroll_length=4 if config_args else 0)
        agent = agent_of(name, tmp_path, path, **kwargs) if name in ALGORITHMS else make_agent(name, path, **kwargs)
        torch.manual_seed(1)
        for _ in range(6):
            agent.train_iter()
            context.increment_global_counter()
        made.append(agent)
    assert num_graphs(made[1])
    for (path, x), (_, y) in zip(*(agent.named_parameters() for agent in made)):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4, msg=lambda text, path=path: f'{path}: {text}')


def test_causal_cloning_needs_pairs_of_steps(tmp_path):
    with pytest.raises((ConfError, ValueError), match='mini_batch_length'):
        agent_of('causal bc', tmp_path, mini_batch_length=1)


def test_calibrated_values_are_bounded_by_the_returns_that_the_dataset_holds(tmp_path):
    """All episodes of the environment terminate, so that all returns are known."""
    path = offline_agents.record(tmp_path / 'data')
    with gin.unlock_config():
        gin.bind_parameter('ReplayBuffer.record_episodic_return', True)
    try:
        agent = make_agent(partial(CqlAlgorithm, num_sampled_actions=2, calibrated=True), path)
    finally:
        gin.clear_config()
    experience, info = agent.offline_replay_buffer.get_batch(16, 2)
    assert info.discounted_return.shape == (16, 2) and (info.discounted_return > -1000).any()
    before = parameters(agent)
    agent.train_iter()
    assert differences(before, parameters(agent))
