"""What holds for every policy algorithm, whatever the kind of its actions."""
from functools import partial

import pytest
import torch

from alfx import context, nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.environments.suite_unittest import (ActionType, MixedPolicyUnittestEnv, PolicyUnittestEnv,
                                              RNNPolicyUnittestEnv)
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.value_networks import ValueNetwork, ValueRNNNetwork
from alfx.optimizers import Adam

ENVIRONMENTS = {
    'discrete': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Discrete),
    'continuous': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous),
    'mixed': partial(MixedPolicyUnittestEnv, episode_length=5),
    'recurrent': partial(RNNPolicyUnittestEnv, episode_length=5, gap=2),
    'nested observation': partial(PolicyUnittestEnv, episode_length=5, nested_observation=True),
    'several rewards': partial(PolicyUnittestEnv, episode_length=5, reward_dim=3),
}
ALGORITHMS = {
    'actor-critic': partial(ActorCriticAlgorithm, loss_class=partial(ActorCriticLoss, entropy_regularization=0.01)),
    'ppo': partial(PPOAlgorithm, loss_class=partial(PPOLoss, entropy_regularization=0.01)),
}


def make_agent(algorithm, environment, batch_size=4, unroll_length=6, seed=0, data_transformer=None, **agent_args):
    """An agent in an environment, ready to train."""
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=batch_size)
    env.reset()
    recurrent = environment == 'recurrent'
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=unroll_length, mini_batch_size=8,
                           mini_batch_length=2 if recurrent else 1, num_updates_per_train_iter=2,
                           use_rollout_state=recurrent)
    if data_transformer is not None:
        config.data_transformer = data_transformer(env)
    encoder = dict(fc_layer_params=(16, ))
    if isinstance(env.observation_spec(), (dict, tuple, list)):
        encoder['preprocessing_combiner'] = NestConcat()
    actor, value = ((ActorDistributionRNNNetwork, ValueRNNNetwork) if recurrent else
                    (ActorDistributionNetwork, ValueNetwork))
    if recurrent:
        encoder['lstm_hidden_size'] = (8, )
    rl = partial(ALGORITHMS[algorithm], actor_network_ctor=partial(actor, **encoder),
                 value_network_ctor=partial(value, **encoder))
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=rl, optimizer=Adam(lr=1e-2), **agent_args)
    agent.set_path('')
    agent.finalize()
    return agent, env


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


every_case = pytest.mark.parametrize('environment', list(ENVIRONMENTS))
every_algorithm = pytest.mark.parametrize('algorithm', list(ALGORITHMS))


@every_algorithm
@every_case
class TestAlgorithm:

    def test_training_changes_every_parameter_and_counts_its_samples(self, algorithm, environment):
        agent, env = make_agent(algorithm, environment)
        before = parameters(agent)
        steps = sum(agent.train_iter() for _ in range(3))
        assert steps == 3 * 4 * 6 * (2 if algorithm == 'ppo' else 1)
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters(agent))]
        assert all(changed), [n for (n, _), c in zip(agent.named_parameters(), changed) if not c]
        assert agent.get_step_metrics()[0].result() > 0

    def test_same_seed_gives_the_same_parameters(self, algorithm, environment):
        results = []
        for _ in range(2):
            agent, _ = make_agent(algorithm, environment, seed=3)
            for _ in range(3):
                agent.train_iter()
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_steps_do_not_change_their_inputs(self, algorithm, environment):
        agent, env = make_agent(algorithm, environment)
        time_step = env.current_time_step()
        for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                              (agent.predict_step, agent.get_initial_predict_state(4))):
            copies = nest.map_structure(torch.clone, (time_step, state))
            method(time_step, state)
            for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state))):
                assert torch.equal(old, new)

    def test_a_checkpoint_restores_the_next_update(self, algorithm, environment):
        agent, _ = make_agent(algorithm, environment)
        agent.train_iter()
        saved = agent.state_dict()
        copy, _ = make_agent(algorithm, environment, seed=9)
        copy.load_state_dict(saved)
        for a, b in zip(parameters(agent), parameters(copy)):
            assert torch.equal(a, b)
        time_step = agent._env.current_time_step()
        state = agent.get_initial_predict_state(4)
        first, second = (a.predict_step(time_step, state).output for a in (agent, copy))
        for a, b in zip(nest.flatten(first), nest.flatten(second)):
            assert torch.equal(a, b)

    def test_one_environment_and_one_step_are_enough(self, algorithm, environment):
        length = 2 if environment == 'recurrent' else 1
        agent, _ = make_agent(algorithm, environment, batch_size=1, unroll_length=length)
        for _ in range(8):
            agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_actions_and_states_match_their_specs(self, algorithm, environment):
        agent, env = make_agent(algorithm, environment)
        time_step = env.current_time_step()
        for method, state, spec in (
            (agent.rollout_step, agent.get_initial_rollout_state(4), agent.rollout_state_spec),
            (agent.predict_step, agent.get_initial_predict_state(4), agent.predict_state_spec)):
            step = method(time_step, state)
            for found, wanted in ((step.output, agent.action_spec), (step.state, spec)):
                nest.assert_same_structure(wanted, found)
                for s, x in zip(nest.flatten(wanted), nest.flatten(found)):
                    assert (tuple(x.shape), x.dtype) == ((4, *s.shape), s.dtype)

    def test_the_rollout_goes_on_exactly_from_a_saved_state(self, algorithm, environment):
        agent, env = make_agent(algorithm, environment)
        agent.train_iter()
        saved, rollout, random_state, env_state = (agent.state_dict(), agent.get_rollout_state(),
                                                   torch.get_rng_state(), env.get_state())
        saved = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, dict(saved))
        rollout = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, rollout)
        agent.train_iter()
        copy, copy_env = make_agent(algorithm, environment, seed=5)
        copy_env.set_state(env_state)
        copy.load_state_dict(saved)
        copy.set_rollout_state(rollout)
        torch.set_rng_state(random_state)
        copy.train_iter()
        assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(copy)))


@every_algorithm
@pytest.mark.parametrize('environment', ['discrete', 'continuous', 'mixed', 'nested observation', 'several rewards'])
def test_infos_recomputed_at_once_train_as_infos_of_the_rollout(algorithm, environment, monkeypatch):
    def train(recompute):
        if not recompute:
            monkeypatch.setattr(Agent, 'recomputes_rollout_info', False)
        agent, _ = make_agent(algorithm, environment, seed=1)
        assert agent.recomputes_rollout_info == recompute
        for _ in range(3):
            agent.train_iter()
        return parameters(agent)

    for a, b in zip(train(True), train(False)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@every_algorithm
def test_the_loss_does_not_cross_an_episode_end(algorithm):
    """What follows a terminated episode has no influence on the update from it."""
    agent, _ = make_agent(algorithm, 'discrete')
    experience = agent.unroll(6)
    is_last = experience.time_step.is_last()
    assert is_last.any()


@every_algorithm
def test_the_last_transition_of_an_unroll_is_trained_on_and_bootstrapped(algorithm):
    agent, _ = make_agent(algorithm, 'discrete')
    experience = agent.unroll(6)
    assert experience.time_step.step_type.shape == (7, 4)
    again = agent.unroll(6)
    assert torch.equal(experience.time_step.observation[6], again.time_step.observation[0])


def test_a_fractional_unroll_length_has_the_right_mean():
    agent, _ = make_agent('actor-critic', 'discrete', unroll_length=1.5)
    lengths = [agent._unroll_if_due().time_step.step_type.shape[0] - 1 for _ in range(6)]
    assert lengths == [1, 2, 1, 2, 1, 2]


def test_extrinsic_return_is_reported_untransformed():
    from alfx.algorithms.data_transformer import RewardScaling
    plain, _ = make_agent('ppo', 'discrete')
    scaled, _ = make_agent('ppo', 'discrete',
                           data_transformer=lambda env: RewardScaling(0.1, observation_spec=env.observation_spec()))
    for agent in (plain, scaled):
        torch.manual_seed(0)
        for _ in range(2):
            agent.unroll(6)
            agent._replay_buffer.clear()
    assert plain.get_metrics()[2].result() == scaled.get_metrics()[2].result() != 0
