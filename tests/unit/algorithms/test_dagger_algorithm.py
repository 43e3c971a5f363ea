"""DAgger: the acting policy, the cloned actions, and learning in states that the policy reaches by mistakes."""
from functools import partial

import pytest
import torch
from helpers.offline_agents import differences, parameters
from helpers.sac_agents import ENVIRONMENTS, networks

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.dagger_algorithm import DaggerAlgorithm
from alfx.algorithms.handcrafted_algorithm import HandcraftedAlgorithm, LinearFeedbackAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import TimeStep
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.critic_networks import CriticRNNNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec


class Half(HandcraftedAlgorithm):
    """The optimal policy in ``PolicyUnittestEnv``."""

    def _policy_func(self, observation):
        return observation / 2 if self._action_spec.is_continuous else (observation[:, 0] > 0).long()


def make_agent(environment='continuous', expert=Half, updates=2, **kwargs):
    torch.manual_seed(0)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=4)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=5, mini_batch_size=16, mini_batch_length=1,
                           num_updates_per_train_iter=updates, whole_replay_buffer_training=False,
                           clear_replay_buffer=False, replay_buffer_length=200)
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  optimizer=Adam(lr=1e-2), rl_algorithm_cls=partial(
                      DaggerAlgorithm, expert_cls=expert, actor_network_cls=partial(
                          ActorDistributionNetwork, fc_layer_params=(16, )), **kwargs))
    agent.set_path('')
    agent.finalize()
    return agent


@pytest.mark.parametrize('probability', [0.0, 1.0, 0.5, lambda: 1.0])
def test_the_expert_is_cloned_for_any_acting_policy(probability):
    agent = make_agent(expert_probability=probability)
    experience = agent.unroll(10)
    label, action = experience.rollout_info.rl.action, experience.action
    torch.testing.assert_close(label, experience.time_step.observation / 2)
    by_expert = (label == action).float().mean().item()
    expected = probability() if callable(probability) else probability
    assert by_expert == pytest.approx(expected, abs=0.3 if expected == 0.5 else 0)


@pytest.mark.parametrize('environment', ['continuous', 'discrete'])
def test_the_expert_is_imitated_and_does_not_change(environment):
    agent = make_agent(environment, updates=20)
    for _ in range(10):
        agent.train_iter()
    step = TimeStep(step_type=torch.ones(2, dtype=torch.int32), observation=torch.tensor([[-1.0], [1.0]]))
    action = agent.policy.predict_step(step, agent.policy.get_initial_predict_state(2)).output
    expected = torch.tensor([[-0.5], [0.5]]) if environment == 'continuous' else torch.tensor([0, 1])
    torch.testing.assert_close(action, expected, atol=0.15, rtol=0)


def test_expert_parameters_are_not_trained_and_are_checkpointed():
    env = ENVIRONMENTS['continuous'](batch_size=1)
    agent = make_agent(expert=partial(SacAlgorithm, **networks('continuous', env)))
    before = parameters(agent)
    agent.train_iter()
    changed = differences(before, parameters(agent))
    assert changed and not any('_expert' in name for name in changed)
    assert any('_expert' in name for name in agent.state_dict())
    assert agent.capabilities.traceable_update and not agent.capabilities.bootstraps_sequences


def test_a_recurrent_expert_is_rejected():
    with pytest.raises(ConfError, match='needs an expert'):
        make_agent(expert=None)
    memory = partial(SacAlgorithm, actor_network_cls=partial(ActorDistributionRNNNetwork, fc_layer_params=(4, ),
                                                             lstm_hidden_size=(4, )),
                     critic_network_cls=partial(CriticRNNNetwork, lstm_hidden_size=(4, )))
    with pytest.raises(ConfError, match='is recurrent'):
        make_agent(expert=memory)


def test_a_linear_controller_is_linear_within_the_bounds_of_the_action():
    observation = torch.tensor([[1.0, 2.0], [-1.0, 0.0]])
    spec = TensorSpec((2, ))
    controller = LinearFeedbackAlgorithm(spec, BoundedTensorSpec((1, ), torch.float32, -2, 2), gains=(1.0, 3.0))
    assert controller._policy_func(observation).tolist() == [[2.0], [-1.0]]
    controller = LinearFeedbackAlgorithm(spec, BoundedTensorSpec((), torch.int64, 3, 4), gains=(1.0, 3.0))
    assert controller._policy_func(observation).tolist() == [4, 3]
    for action_spec, gains in ((BoundedTensorSpec((2, ), torch.float32, -2, 2), (1.0, 3.0)),
                               (BoundedTensorSpec((), torch.int64, 0, 2), (1.0, 3.0)),
                               (BoundedTensorSpec((), torch.int64, 0, 1), (1.0, ))):
        with pytest.raises(SpecError, match='LinearFeedback'):
            LinearFeedbackAlgorithm(spec, action_spec, gains=gains)
