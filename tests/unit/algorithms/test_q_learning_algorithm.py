"""QLearningAlgorithm against a slow loop, a hand-computed constant and the solution of a small problem."""
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.q_learning_algorithm import QLearningAlgorithm, random_argmax, learn
from alfx.data_structures import StepType
from alfx.environments.suite_gym import load, wrap_env
from alfx.environments.suite_unittest import PolicyUnittestEnv
from alfx.environments.vector_env import SerialVectorEnv
from alfx.runs import building
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.schedulers import LinearScheduler

STATE = BoundedTensorSpec((), torch.int64, 0, 4)
ACTION = BoundedTensorSpec((), torch.int64, 1, 2)


@pytest.fixture(autouse=True)
def fresh_context():
    context.reset()
    yield
    context.reset()


class Corridor(gymnasium.Env):
    """A corridor of states 10 .. 14, from left to right, with actions 5 (left) and 6 (right).

    Each step costs 1. State 14 gives 10 and ends the episode; after ``limit`` steps the episode is truncated.
    """

    observation_space = gymnasium.spaces.Discrete(5, start=10)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def __init__(self, limit=20):
        self._limit = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._state, self._steps = 10, 0
        return self._state, {}

    def step(self, action):
        assert action in (5, 6)
        self._state = min(max(self._state + (1 if action == 6 else -1), 10), 14)
        self._steps += 1
        done = self._state == 14
        return self._state, 10.0 if done else -1.0, done, self._steps >= self._limit and not done, {}


def make_env(batch_size=3, **arguments):
    env = wrap_env(SerialVectorEnv([partial(Corridor, **arguments)] * batch_size))
    env.seed(0)
    env.reset()
    return env


def make_agent(env, seed=0, unroll_length=5, under_agent=True, **arguments):
    torch.manual_seed(seed)
    context.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=unroll_length)
    ctor = partial(QLearningAlgorithm, **arguments)
    specs = (env.observation_spec(), env.action_spec(), env.reward_spec())
    agent = (Agent(*specs, env=env, config=config, rl_algorithm_cls=ctor) if under_agent else
             ctor(*specs, env=env, config=config))
    agent.set_path('')
    agent.finalize()
    return agent, agent.policy if under_agent else agent


# Learning ------------------------------------------------------------------------------------------------------


def test_a_step_of_learning_worked_out_by_hand():
    # Q(1, 0) = 2, the best of state 2 is 5: 2 + 0.1 * (1 + 0.9 * 5 - 2) = 2.35; with a termination 2 + 0.1 * (1 - 2).
    for discount, expected in ((0.9, 2.35), (0.0, 1.9)):
        table = torch.tensor([[0.0, 0.0], [2.0, 1.0], [5.0, 3.0]])
        learn(table, torch.tensor([1]), torch.tensor([0]), torch.tensor([1.0]), torch.tensor([discount]),
              torch.tensor([2]), 0.1)
        assert table[1, 0].item() == pytest.approx(expected)
        assert table.flatten()[[0, 1, 3, 4, 5]].tolist() == [0.0, 0.0, 1.0, 5.0, 3.0]


def test_environments_in_the_same_state_move_the_table_to_the_mean():
    # From 0 with lr 0.5, the targets 4 and 8 give 2 and 4, with mean 3; the third step has another table entry.
    table = torch.zeros(2, 2)
    learn(table, torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0]), torch.tensor([4.0, 8.0, 2.0]), torch.zeros(3),
          torch.tensor([1, 1, 1]), 0.5)
    assert table.tolist() == [[0.0, 3.0], [1.0, 0.0]]


def slow_q_learning(experience, cells, table, lr, discount):
    """Apply Q(s, a) += lr * (target - Q(s, a)) to one step after the other of a single environment."""
    steps = experience.time_step
    for t in range(len(cells) - 1):
        if steps.step_type[t] == StepType.LAST:
            continue
        future = 0.0 if steps.discount[t + 1] == 0 else discount * max(table[cells[t + 1]])
        a = int(experience.action[t]) - 5
        table[cells[t]][a] += lr * (float(steps.reward[t + 1]) + future - table[cells[t]][a])


@pytest.mark.parametrize('unroll_length', [1, 5])
@pytest.mark.parametrize('under_agent', [True, False])
def test_the_table_matches_a_slow_loop(unroll_length, under_agent, monkeypatch):
    agent, rl = make_agent(make_env(1, limit=7), unroll_length=unroll_length, under_agent=under_agent, lr=0.3,
                           discount=0.9, epsilon_greedy=1.0, epsilon_min=1.0)
    table = np.zeros((5, 2))
    seen, collect = [], agent.learner.collect
    monkeypatch.setattr(agent.learner, 'collect', lambda due: seen.append(collect(due)) or seen[-1])
    for _ in range(200 // unroll_length):
        agent.train_iter()
        experience = nest.map_structure(lambda x: x[:, 0], seen[-1]._replace(rollout_info=(), state=()))
        slow_q_learning(experience, (experience.time_step.observation - 10).tolist(), table, 0.3, 0.9)
    types = torch.cat([e.time_step.step_type[:-1, 0] for e in seen])
    ends = torch.cat([e.time_step.discount[:-1, 0] for e in seen])[types == StepType.LAST]
    assert (ends == 0).any() and (ends == 1).any()  # terminations and truncations were seen
    np.testing.assert_allclose(rl.q_table.numpy(), table, atol=1e-4)
    assert int(rl._num_episodes) == len(ends)


def test_the_optimal_values_of_a_corridor_are_learned():
    # State 13 is one step before the end: 10. Each further step costs 1: 10 g - 1 with g = 0.9 is 8, then 6.2 and 4.58.
    agent, rl = make_agent(make_env(4), lr=0.5, discount=0.9, epsilon_greedy=0.5, epsilon_min=0.2)
    for _ in range(300):
        agent.train_iter()
    assert rl.q_table[:4, 1].tolist() == pytest.approx([4.58, 6.2, 8.0, 10.0], abs=1e-3)
    assert rl.q_table[1:4, 0].tolist() == pytest.approx([4.58 * 0.9 - 1, 6.2 * 0.9 - 1, 8.0 * 0.9 - 1], abs=0.05)
    state = torch.arange(10, 14)
    env_step = agent._env.current_time_step()
    step = agent.predict_step(env_step._replace(observation=state, step_type=env_step.step_type[:1].repeat(4)),
                              agent.get_initial_predict_state(4))
    assert step.output.tolist() == [6, 6, 6, 6]
    torch.testing.assert_close(step.info.rl.q_values, rl.q_table[:4])


def test_time_limits_do_not_lower_the_values():
    # The goal is never reached and each step costs 1: truncations bootstrap, so the value is -1 / (1 - 0.5) = -2.
    class Endless(Corridor):
        def step(self, action):
            self._steps += 1
            return 10, -1.0, False, self._steps >= 3, {}

    env = wrap_env(SerialVectorEnv([Endless] * 2))
    env.seed(0)
    env.reset()
    agent, rl = make_agent(env, lr=0.5, discount=0.5)
    for _ in range(100):
        agent.train_iter()
    assert rl.q_table[0].tolist() == pytest.approx([-2.0, -2.0], abs=1e-3)


def test_reward_dimensions_are_weighted():
    env = PolicyUnittestEnv(4, 5, reward_dim=3)
    env.reset()
    agent, rl = make_agent(env, grid_size=2, discount=0.0, lr=0.5, reward_weights=[1.0, 0.0, 2.0], epsilon_min=0.5)
    for _ in range(60):
        agent.train_iter()
    # the action to the right has the reward (1, 2, 3), whose weighted sum is 1 + 2 * 3 = 7
    torch.testing.assert_close(rl.q_table, torch.tensor([[7.0, 0.0], [0.0, 7.0]]), atol=1e-3, rtol=0)


@pytest.mark.parametrize('name, cells, arguments', [
    ('Blackjack-v1', 32 * 11 * 2, {}), ('MountainCar-v0', 20 * 20, dict(grid_size=20)),
    ('CartPole-v1', 2 * 3 * 4 * 5, dict(grid_size=(2, 3, 4, 5), grid_bounds=[(-2, 2), (-3, 3), (-.2, .2), (-3, 3)]))])
def test_tuples_of_integers_and_boxes_have_tables(name, cells, arguments):
    env = load(name, batch_size=3)
    env.seed(0)
    env.reset()
    agent, rl = make_agent(env, unroll_length=50, **arguments)
    assert rl.q_table.shape[0] == cells
    for _ in range(3):
        agent.train_iter()
    assert rl.q_table.any() and torch.isfinite(rl.q_table).all()


# Acting --------------------------------------------------------------------------------------------------------


def test_among_equally_good_actions_one_is_drawn_at_random():
    torch.manual_seed(0)
    counts = torch.bincount(random_argmax(torch.tensor([[1.0, 2.0, 2.0, -5.0]]).expand(4000, 4)), minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0] and abs(int(counts[1]) - 2000) < 150


def test_evaluation_acts_randomly_with_probability_epsilon():
    agent, rl = make_agent(make_env(4))
    time_step = agent._env.current_time_step()
    inputs = nest.map_structure(lambda x: x[:1].repeat(1000, *[1] * (x.ndim - 1)), time_step)
    for epsilon, share in ((0.0, 0.0), (0.5, 0.25), (1.0, 0.5)):  # half of the random actions are optimal
        building.set_epsilon_greedy(agent, epsilon)
        actions = agent.predict_step(inputs, agent.get_initial_predict_state(1000)).output
        assert (actions != actions.min()).float().mean().item() == pytest.approx(share, abs=0.06)


def test_epsilon_falls_with_every_episode_down_to_its_minimum():
    agent, rl = make_agent(make_env(2, limit=3), unroll_length=4, epsilon_greedy=0.8, epsilon_decay=0.5,
                           epsilon_min=0.05)
    assert rl.epsilon() == 0.8
    for _ in range(2):  # episodes of 4 time steps in both environments
        agent.train_iter()
    assert int(rl._num_episodes) == 4
    assert rl.epsilon() == 0.8 * 0.5**4
    agent.train_iter()
    assert rl.epsilon() == 0.05


def test_epsilon_and_learning_rate_follow_schedules():
    schedule = LinearScheduler('percent', [(0.0, 1.0), (1.0, 0.0)])
    agent, rl = make_agent(make_env(1), epsilon_greedy=schedule, lr=schedule, epsilon_decay=1.0, epsilon_min=0.0)
    context.update_progress('percent', 0.25)
    assert rl.epsilon() == 0.75
    context.update_progress('percent', 1.0)
    agent.train_iter()
    assert not rl.q_table.any()  # a learning rate of 0 learns nothing


def test_a_high_initial_value_encourages_exploration():
    agent, rl = make_agent(make_env(1), unroll_length=40, lr=1.0, initial_value=100.0, epsilon_greedy=0.0,
                           epsilon_min=0.0)
    agent.train_iter()
    assert (rl.q_table[:4] != 100.0).all()


# Common properties of algorithms -------------------------------------------------------------------------------


def test_same_seed_gives_the_same_table():
    tables = []
    for _ in range(2):
        agent, rl = make_agent(make_env(), seed=3)
        for _ in range(10):
            agent.train_iter()
        tables.append(rl.q_table.clone())
    assert tables[0].any() and torch.equal(*tables)


def test_a_checkpoint_restores_the_table_and_the_exploration():
    agent, rl = make_agent(make_env(limit=6), epsilon_decay=0.9)
    for _ in range(10):
        agent.train_iter()
    copy, copy_rl = make_agent(make_env(), seed=9, epsilon_decay=0.9)
    copy.load_state_dict(agent.state_dict())
    assert rl.q_table.any() and torch.equal(rl.q_table, copy_rl.q_table)
    assert copy_rl.epsilon() == rl.epsilon() < 0.9


def test_steps_do_not_change_their_inputs_nor_the_table():
    agent, rl = make_agent(make_env())
    agent.train_iter()
    time_step, table = agent._env.current_time_step(), rl.q_table.clone()
    for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(3)),
                          (agent.predict_step, agent.get_initial_predict_state(3))):
        copies = nest.map_structure(torch.clone, time_step)
        method(time_step, state)
        for old, new in zip(nest.flatten(copies), nest.flatten(time_step)):
            assert torch.equal(old, new)
    assert torch.equal(table, rl.q_table)


@pytest.mark.parametrize('arguments, message', [
    (dict(lr=0.0), 'lr'), (dict(lr=1.5), 'lr'), (dict(discount=-0.1), 'discount'),
    (dict(epsilon_greedy=2.0), 'epsilon_greedy'), (dict(epsilon_decay=0.0), 'epsilon_decay'),
    (dict(epsilon_min=-1.0), 'epsilon_min'), (dict(grid_size=3), 'grid_size'),
    (dict(action_spec=BoundedTensorSpec((2, ))), 'one discrete action'),
    (dict(observation_spec=BoundedTensorSpec((9, )), grid_size=20), 'too large'),
    (dict(observation_spec=TensorSpec((9, )), grid_size=2), 'no finite range'),
])
def test_invalid_arguments_are_rejected_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        QLearningAlgorithm(**{'observation_spec': STATE, 'action_spec': ACTION, **arguments})
