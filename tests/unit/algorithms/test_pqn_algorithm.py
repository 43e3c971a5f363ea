"""PqnAlgorithm: targets, exploration, masks, rejected arguments, and learning of a tiny environment."""
import operator
from functools import partial

import pytest
import torch

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.encoding_algorithm import EncodingAlgorithm
from alfx.algorithms.pqn_algorithm import PqnAlgorithm, PqnInfo
from alfx.config import TrainerConfig
from alfx.data_structures import StepType, TimeStep
from alfx.environments.suite_unittest import ActionType, ValueUnittestEnv
from alfx.gin_utils import ConfError
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.q_networks import QNetwork, QRNNNetwork
from alfx.optimizers import RAdam
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

OBSERVATION = TensorSpec((3, ))
ACTION = BoundedTensorSpec((), torch.int64, 2, 4)  # three actions, 2 to 4
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
small_q = partial(QNetwork, fc_layer_params=(8, 8), use_layer_norm=True)


@pytest.fixture(autouse=True)
def fresh_context():
    context.reset()
    yield
    context.reset()


def make(seed=0, **arguments):
    torch.manual_seed(seed)
    return PqnAlgorithm(OBSERVATION, ACTION, **{'q_network_cls': small_q, **arguments})


def unroll(step_type, discount, seed=1, mask=()):
    """Return ``[B, T]`` time steps with random observations and rewards."""
    torch.manual_seed(seed)
    step_type = torch.tensor(step_type, dtype=torch.int32)
    shape = step_type.shape
    return TimeStep(step_type=step_type, reward=torch.randn(shape), discount=torch.tensor(discount),
                    observation=torch.randn(*shape, 3), prev_action=torch.full(shape, 2), action_mask=mask,
                    env_id=torch.arange(shape[0]).unsqueeze(1).expand(shape))


def targets(algorithm, inputs):
    """Act at each step of an unroll ``[B, T]``, and compute the targets."""
    state = algorithm.get_initial_rollout_state(len(inputs.step_type))
    infos = [algorithm.rollout_step(nest.map_structure(operator.itemgetter((slice(None), t)), inputs), state).info
             for t in range(inputs.step_type.shape[1])]
    return algorithm.preprocess_experience(inputs, nest.map_structure(lambda *x: torch.stack(x, 1), *infos), ())[1]


def slow_targets(inputs, best, gamma, td_lambda):
    """G[t] = r[t+1] + d[t+1] ((1 - lambda) V[t+1] + lambda G[t+1]), backwards, one environment at a time."""
    batch, length = inputs.step_type.shape
    target = best.clone()
    for b in range(batch):
        for t in reversed(range(length - 1)):
            if inputs.step_type[b, t] != LAST:
                d = gamma * inputs.discount[b, t + 1]
                target[b, t] = inputs.reward[b, t + 1] + d * ((1 - td_lambda) * best[b, t + 1]
                                                              + td_lambda * target[b, t + 1])
    return target


@pytest.mark.parametrize('td_lambda', [0.0, 0.65, 1.0])
def test_targets_match_a_loop_over_terminations_and_time_limits(td_lambda):
    inputs = unroll([[FIRST, MID, MID, LAST, FIRST, MID], [MID, LAST, FIRST, MID, MID, LAST],
                     [MID, MID, MID, MID, LAST, FIRST]],
                    [[1., 1., 1., 0., 1., 1.], [1., 1., 1., 1., 1., 0.], [1., 1., 1., 1., 1., 1.]])
    algorithm = make(gamma=0.9, td_lambda=td_lambda)
    best = algorithm.critic(inputs.observation.flatten(0, 1))[0].amax(-1).unflatten(0, (3, 6)).detach()
    info = targets(algorithm, inputs)
    torch.testing.assert_close(info.target, slow_targets(inputs, best, 0.9, td_lambda))


def test_one_step_targets_by_hand():
    # G[0] = r[1] + 0.5 * 1 * V[1], and a termination leaves only the reward: G[1] = r[2]
    inputs = unroll([[FIRST, MID, LAST]], [[1., 1., 0.]])
    algorithm = make(gamma=0.5, td_lambda=0.0)
    values = algorithm.critic(inputs.observation[0])[0].amax(-1)
    info = targets(algorithm, inputs)
    torch.testing.assert_close(info.target[0, 0], inputs.reward[0, 1] + 0.5 * values[1])
    torch.testing.assert_close(info.target[0, 1], inputs.reward[0, 2])


@pytest.mark.parametrize('size', [3, 16])
def test_targets_are_values_of_the_representation(size):
    inputs = unroll([[FIRST, MID, LAST]], [[1., 1., 0.]])
    encoder = partial(EncodingAlgorithm, encoder_cls=partial(EncodingNetwork, fc_layer_params=(size, )))
    agent = Agent(OBSERVATION, ACTION, representation_learner_cls=encoder,
                  rl_algorithm_cls=partial(PqnAlgorithm, q_network_cls=small_q, gamma=0.5, td_lambda=0.0))
    encoded = agent.representation.predict_step(inputs._replace(observation=inputs.observation[0]), ()).output
    values = agent.policy.critic(encoded)[0].amax(-1)
    found = targets(agent, inputs).rl.target
    torch.testing.assert_close(found[0, 0], inputs.reward[0, 1] + 0.5 * values[1])
    torch.testing.assert_close(found[0, 1], inputs.reward[0, 2])


def test_invalid_actions_are_neither_taken_nor_bootstrapped_from():
    algorithm = make(gamma=0.9, td_lambda=0.0, rollout_epsilon_greedy=0.5)
    inputs = unroll([[FIRST, MID]], [[1., 1.]])
    q_values = algorithm.critic(inputs.observation[0])[0]
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    mask[0, 1, q_values[1].argmax()] = False
    inputs = inputs._replace(action_mask=mask)
    info = targets(algorithm, inputs)
    torch.testing.assert_close(info.target[0, 0], inputs.reward[0, 1] + 0.9 * q_values[1][mask[0, 1]].max())
    step = TimeStep(step_type=torch.full((64, ), MID), reward=torch.zeros(64), discount=torch.ones(64),
                    observation=inputs.observation[0, 1].expand(64, 3), prev_action=torch.full((64, ), 2),
                    action_mask=mask[0, 1].expand(64, 3), env_id=torch.arange(64))
    valid_actions = {2 + i for i in mask[0, 1].nonzero().flatten().tolist()}
    assert set(algorithm.rollout_step(step, ()).output.tolist()) == valid_actions
    assert set(algorithm.predict_step(step, ()).output.tolist()) < valid_actions


@pytest.mark.parametrize('epsilon, fraction', [(0.0, 0.0), (0.3, 0.2), (1.0, 2 / 3)])
def test_epsilon_is_the_probability_of_a_uniform_action(epsilon, fraction):
    algorithm = make(rollout_epsilon_greedy=epsilon)
    step = TimeStep(step_type=torch.full((6000, ), MID), reward=torch.zeros(6000), discount=torch.ones(6000),
                    observation=torch.ones(6000, 3), prev_action=torch.full((6000, ), 2), env_id=torch.arange(6000))
    action, best = (algorithm.rollout_step(step, ()).output, algorithm.predict_step(step, ()).output)
    assert (action != best).float().mean().item() == pytest.approx(fraction, abs=0.02)


def test_the_loss_is_half_the_squared_error_of_the_action_taken():
    algorithm = make()
    inputs = unroll([[FIRST, MID]], [[1., 1.]])._replace(prev_action=())
    action, target = torch.tensor([2, 4]), torch.tensor([0.5, -1.0])
    step = TimeStep(step_type=inputs.step_type[0], observation=inputs.observation[0])
    info = algorithm.train_step(step, (), PqnInfo(action=action, target=target)).info
    q_values = algorithm.critic(step.observation)[0]
    torch.testing.assert_close(info.value, torch.stack([q_values[0, 0], q_values[1, 2]]))
    loss = algorithm.calc_loss(info)
    torch.testing.assert_close(loss.loss, (target - info.value)**2 / 2)
    torch.testing.assert_close(loss.extra.td_error, target - info.value)


@pytest.mark.parametrize('arguments, message', [
    (dict(reward_spec=TensorSpec((2, ))), 'expected a scalar reward'),
    (dict(q_network_cls=partial(QRNNNetwork, lstm_hidden_size=4)), 'expected a feed-forward network'),
    (dict(q_network_cls=partial(QNetwork, num_atoms=5)), r'expected an output of shape \(3,\) for 3 actions')])
def test_unsupported_arguments_are_rejected_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_continuous_actions_are_rejected():
    with pytest.raises(ValueError, match='expected one discrete action'):
        PqnAlgorithm(OBSERVATION, BoundedTensorSpec((2, ), minimum=-1, maximum=1))


@pytest.mark.parametrize('argument', ['whole_replay_buffer_training', 'clear_replay_buffer'])
def test_training_from_old_experience_is_rejected(argument):
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, mini_batch_length=2, **{argument: False})
    with pytest.raises(ConfError, match=f'{argument} is False'):
        make().check_config(config)


def agent_of(env, **arguments):
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=8, mini_batch_size=64, mini_batch_length=1,
                           num_updates_per_train_iter=2, whole_replay_buffer_training=True, clear_replay_buffer=True)
    agent = Agent(env.observation_spec(), env.action_spec(), env=env, config=config, optimizer=RAdam(lr=0.01),
                  rl_algorithm_cls=partial(PqnAlgorithm, q_network_cls=small_q, **arguments))
    agent.finalize()
    return agent


def test_the_value_of_certain_rewards_is_learned():
    # Both actions of an episode have reward 1: Q = 1 + 0.5 at first, then 1. The observation is noise, so the best
    # estimate is the mean, 1.25.
    env = ValueUnittestEnv(batch_size=64, episode_length=3, action_type=ActionType.Discrete)
    env.reset()
    torch.manual_seed(0)
    agent = agent_of(env, gamma=0.5, td_lambda=0.65)
    for _ in range(100):
        agent.train_iter()
    q_values = agent.policy.predict_step(env.reset(), ()).info.value
    assert q_values.mean().item() == pytest.approx(1.25, abs=0.1)
