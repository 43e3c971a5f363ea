"""Every offline algorithm in an agent: with a dataset alone, and with collected experience as well."""
from functools import partial

import gin
import pytest
import torch
from helpers import offline_agents
from helpers.offline_agents import differences, make_agent, parameters
from helpers.plans import num_graphs

from alfx import context
from alfx.algorithms.awac_algorithm import AwacAlgorithm
from alfx.algorithms.causal_bc_algorithm import CausalBcAlgorithm
from alfx.algorithms.count_bonus_algorithm import CountBonusAlgorithm
from alfx.algorithms.cql_algorithm import CqlAlgorithm, DiscreteCqlAlgorithm
from alfx.algorithms.data_transformer import RewardClipping, RewardNormalizer, RewardScaling, RewardShifting
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.td3_bc_algorithm import Td3BcAlgorithm
from alfx.gin_utils import ConfError
from alfx.nest.utils import NestConcat
from alfx.networks.actor_networks import ActorNetwork, ActorRNNNetwork
from alfx.networks.critic_networks import CriticNetwork, CriticRNNNetwork
from alfx.norm_layers import BatchNorm

SMALL = dict(actor_network_ctor=partial(ActorNetwork, fc_layer_params=(16, )),
             critic_network_ctor=partial(CriticNetwork, joint_fc_layer_params=(16, )))
MEMORY = dict(actor_network_ctor=partial(ActorRNNNetwork, fc_layer_params=(16, ), lstm_hidden_size=(8, )),
              critic_network_ctor=partial(CriticRNNNetwork, joint_fc_layer_params=(16, ), lstm_hidden_size=(8, )))
NORMALIZED = partial(CriticNetwork, joint_fc_layer_params=(16, ), norm=BatchNorm)
ALGORITHMS = {
    'causal bc': (partial(CausalBcAlgorithm, actor_network_cls=partial(ActorNetwork, fc_layer_params=(16, ))),
                  'continuous'),
    'td3+bc': (partial(Td3BcAlgorithm, **SMALL), 'continuous'),
    'rebrac': (partial(Td3BcAlgorithm, critic_penalty=0.1, **SMALL), 'nested action'),
    'awac': (AwacAlgorithm, 'continuous'), 'awac, vector reward': (AwacAlgorithm, 'vector reward'),
    'cql': (partial(CqlAlgorithm, num_sampled_actions=2), 'continuous'),
    'cql, vector reward': (partial(CqlAlgorithm, num_sampled_actions=2), 'vector reward'),
    'cql, nested': (partial(CqlAlgorithm, num_sampled_actions=2), 'nested action'),
    'awac, batch norm': (partial(AwacAlgorithm, critic_network_cls=NORMALIZED), 'continuous'),
    'cql, batch norm': (partial(CqlAlgorithm, num_sampled_actions=2, critic_network_cls=NORMALIZED), 'continuous'),
    'discrete cql': (DiscreteCqlAlgorithm, 'discrete'),
    'discrete cql, vector reward': (DiscreteCqlAlgorithm, 'vector reward, discrete'),
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
def test_it_trains_on_a_dataset_with_and_without_collected_data(name, unroll_length, tmp_path):
    agent = agent_of(name, tmp_path, unroll_length=unroll_length, mini_batch_length=3)
    before = parameters(agent)
    for _ in range(3):
        agent.train_iter()
    now = parameters(agent)
    changed = differences(before, now)
    assert all(torch.isfinite(x).all() for x in now.values())
    kinds = [part for part in ('actor', 'critic', 'discriminator') if any(part in x.lower() for x in before)]
    assert kinds and all(any(part in x.lower() for x in changed) for part in kinds)


@pytest.mark.parametrize('name', ['awac, batch norm', 'cql, batch norm'])
def test_only_values_of_stored_actions_use_statistics_of_the_batch(name, tmp_path):
    agent, calls = agent_of(name, tmp_path), set()

    def record(module, inputs, output):
        calls.add((len(output), context.normalizes_by_batch(), torch.is_grad_enabled()))

    for module in agent._rl_algorithm._critic_networks.modules():
        if isinstance(module, BatchNorm):
            module.register_forward_hook(record)
    agent.train_iter()
    assert {call for call in calls if call[1]} == {(8, True, True)} < calls


@pytest.mark.parametrize('name', ['causal bc', 'rebrac', 'awac', 'cql', 'discrete cql'])
def test_its_updates_are_traced(name, tmp_path):
    agent = agent_of(name, tmp_path, updates=25)
    for _ in range(6):
        agent.train_iter()
    assert num_graphs(agent)


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize('name, config_args', [('iql', dict(rl_train_after_update_steps=3)), ('td3+bc', {}),
                                               ('cql', {})])
def test_compiled_updates_match_eager_ones_in_every_phase(name, config_args, tmp_path):
    """IQL pretrains first, and then also trains on collected experience."""
    agents, path = [], offline_agents.record(tmp_path / 'data')
    for compile in (False, True):
        kwargs = dict(config_args=dict(compile=compile, **config_args), unroll_length=4 if config_args else 0)
        agent = agent_of(name, tmp_path, path, **kwargs) if name in ALGORITHMS else make_agent(name, path, **kwargs)
        torch.manual_seed(1)
        for _ in range(6):
            agent.train_iter()
            context.increment_global_counter()
        agents.append(agent)
    assert num_graphs(agents[1])
    for (path, x), (_, y) in zip(*(agent.named_parameters() for agent in agents)):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4, msg=lambda text, path=path: f'{path}: {text}')


def test_causal_cloning_trains_on_pairs_of_steps(tmp_path):
    agent = agent_of('causal bc', tmp_path, mini_batch_length=1)
    assert agent._config.mini_batch_length == 2


def calibrated_agent(name, tmp_path, buffer_args=None, loss_args=None, **kwargs):
    ctor, environment = ALGORITHMS[name]
    path = offline_agents.record(tmp_path / 'data', environment)
    with gin.unlock_config():
        for argument, value in dict(record_episodic_return=True, **(buffer_args or {})).items():
            gin.bind_parameter(f'ReplayBuffer.{argument}', value)
    try:
        return make_agent(partial(ctor, calibrated=True, critic_loss_ctor=partial(OneStepTDLoss, **(loss_args or {}))),
                          path, environment, **kwargs)
    finally:
        gin.clear_config()


CALIBRATED = ['cql', 'cql, vector reward', 'discrete cql', 'discrete cql, vector reward']


def transformed(cls, **arguments):
    return dict(data_transformer=lambda env: cls(observation_spec=env.observation_spec(), **arguments))


@pytest.mark.parametrize('unroll_length', [0, 4], ids=['offline', 'hybrid'])
@pytest.mark.parametrize('arguments', [
    {}, dict(buffer_args=dict(gamma=0.9), loss_args=dict(gamma=0.9)),
    dict(buffer_args=dict(reward_clip=(-0.5, 0.5)), **transformed(RewardClipping, minmax=(-0.5, 0.5)))])
@pytest.mark.parametrize('name', CALIBRATED)
def test_returns_of_the_rewards_and_gamma_of_the_loss_calibrate(name, arguments, unroll_length, tmp_path):
    agent = calibrated_agent(name, tmp_path, unroll_length=unroll_length, mini_batch_length=3, **arguments)
    for _ in range(3):
        agent.train_iter()


@pytest.mark.parametrize('name, arguments', [
    *[(name, transformed(RewardScaling, scale=0.01)) for name in CALIBRATED],
    *[(name, dict(loss_args=dict(gamma=0.98))) for name in CALIBRATED],
    ('cql', dict(buffer_args=dict(gamma=0.999))), ('cql', transformed(RewardNormalizer)),
    ('discrete cql', transformed(RewardShifting, bias=-1.0)),
    ('discrete cql', transformed(RewardClipping, minmax=(-0.5, 0.5))),
    ('cql', dict(buffer_args=dict(reward_clip=(-0.5, 0.5)))),
    ('discrete cql', dict(unroll_length=4, agent_args=dict(
        intrinsic_reward_module=partial(CountBonusAlgorithm, counting='grid', grid_size=3))))])
def test_returns_of_other_rewards_or_another_gamma_are_rejected(name, arguments, tmp_path):
    agent = calibrated_agent(name, tmp_path, **arguments)
    with pytest.raises(ConfError, match=r'but the returns that(.|\n)*set ReplayBuffer.gamma to the gamma of the loss'):
        for _ in range(5):
            agent.train_iter()


def test_calibrated_values_are_bounded_by_the_dataset_returns(tmp_path):
    """All episodes of the environment terminate, so that all returns are known."""
    agent = calibrated_agent('cql', tmp_path)
    experience, info = agent.offline_replay_buffer.get_batch(16, 2)
    assert info.discounted_return.shape == (16, 2) and (info.discounted_return > -1000).any()
    before = parameters(agent)
    agent.train_iter()
    assert differences(before, parameters(agent))
