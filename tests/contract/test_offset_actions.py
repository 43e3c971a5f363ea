"""Actions that do not start at 0: algorithms learn from recorded ones, and "no action" is an action of the space."""
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.bc_algorithm import BcAlgorithm
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.cql_algorithm import DiscreteCqlAlgorithm
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.algorithms.predictive_representation_learner import PredictiveRepresentationLearner, SimpleDecoder
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.environments.checked_environment import CheckedEnvironment
from alfx.environments.suite_gym import wrap_env
from alfx.environments.vector_env import SerialVectorEnv
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.preprocessors import EmbeddingPreprocessor
from alfx.networks.q_networks import QNetwork
from alfx.offline import dataset_folder, recorder
from alfx.optimizers import Adam

SPACES = {'start': spaces.Discrete(3, start=2), 'negative start': spaces.Discrete(3, start=-7),
          'several': spaces.MultiDiscrete([3, 2], start=[5, -3]), 'integer box': spaces.Box(3, 6, (2, ), np.int32),
          'float box': spaces.Box(1, 2, (2, ), np.float32)}


class Offset(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (3, ), np.float32)

    def __init__(self, kind):
        self.action_space = SPACES[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action):
        self._steps += 1
        seen = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return seen, float(self.action_space.contains(action)), self._steps == 4, False, {}


def make_env(kind, **kwargs):
    env = wrap_env(SerialVectorEnv([partial(Offset, kind)] * 2), **kwargs)
    env.seed(1)
    return env


@pytest.mark.parametrize('kind', SPACES)
def test_environments_give_actions_of_the_space_before_the_first_step(kind):
    env = CheckedEnvironment(make_env(kind, normalize_action=False))
    act = recorder.random_policy(env.action_spec(), 2)
    for _ in range(8):
        env.step(act(env.current_time_step()))


Q = partial(QNetwork, fc_layer_params=(8, ))
ENCODER = partial(EncodingNetwork, fc_layer_params=(8, ))
ALGORITHMS = {'dqn': partial(DqnAlgorithm, q_network_cls=Q), 'cql': partial(DiscreteCqlAlgorithm, q_network_cls=Q),
              'sac': partial(SacAlgorithm, q_network_cls=Q),
              'bc': partial(BcAlgorithm, actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(8, )))}


def embedding_dynamics(input_tensor_spec, **kwargs):
    return LSTMEncodingNetwork(input_tensor_spec, hidden_size=(8, ), input_preprocessors=EmbeddingPreprocessor(
        input_tensor_spec, embedding_dim=4), **kwargs)


PARTS = {'none': {}, 'icm': dict(intrinsic_reward_module=partial(ICMAlgorithm, hidden_size=8, encoding_net=ENCODER)),
         'predictive': dict(representation_learner_cls=partial(
             PredictiveRepresentationLearner, num_unroll_steps=1, dynamics_net_ctor=embedding_dynamics,
             encoding_net_ctor=partial(LSTMEncodingNetwork, hidden_size=(8, )),
             decoder_ctor=partial(SimpleDecoder, target_field='reward', decoder_net_ctor=partial(
                 EncodingNetwork, last_layer_size=1, last_activation=torch.nn.Identity()))))}


@pytest.mark.parametrize('name, kind, part', [
    ('dqn', 'start', 'none'), ('dqn', 'negative start', 'predictive'), ('cql', 'start', 'none'),
    ('sac', 'negative start', 'none'), ('bc', 'start', 'icm'), ('bc', 'several', 'none'),
    ('bc', 'integer box', 'none')])
@pytest.mark.parametrize('unroll_length', [0, 4])
def test_algorithms_learn_from_recorded_actions(name, kind, part, unroll_length, tmp_path):
    torch.manual_seed(0)
    context.reset()
    env = make_env(kind)
    path = str(tmp_path / 'data')
    dataset_folder.write(path, recorder.record(env, recorder.random_policy(env.action_spec(), 2), 60), {})
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=unroll_length, mini_batch_size=8,
                           mini_batch_length=2, num_updates_per_train_iter=2, num_iterations=4,
                           whole_replay_buffer_training=False, clear_replay_buffer=False, offline_buffer_dir=path)
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=ALGORITHMS[name], optimizer=Adam(lr=1e-2), **PARTS[part])
    agent.set_path('')
    agent.finalize()
    for _ in range(3):
        agent.train_iter()
        context.increment_global_counter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())
