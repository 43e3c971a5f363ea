"""Evaluation and recording replay ``predict_step`` from a traced graph where an algorithm allows it, bit for bit."""
from functools import partial

import pytest
import torch
from helpers.plans import warnings_in

from alfx import context, gin_utils, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import AlgStep, TimeStep
from alfx.offline import recorder
from alfx.runs import building
from alfx.runs.evaluator import evaluate

FIXED = ['sac_pendulum', 'sac_cart_pole', 'td3_pendulum', 'dqn_cart_pole', 'iql_pendulum', 'bc_pendulum',
         'ppo_cart_pole', 'gail_pendulum']
OTHERS = {'memory': 'ac_t_maze_rnn', 'a repeated action': 'taac_pendulum', 'a search': 'muzero_cart_pole',
          'a plan': 'mbrl_random_pendulum', 'a measured bonus': 'ppo_icm_mountain_car'}
BATCH = 3


@pytest.fixture(autouse=True)
def replay_early(warm_up):
    warm_up(2)


def make(conf, *params):
    torch.manual_seed(0)
    context.reset()
    with gin_utils.loaded(conf, ['create_environment.nonparallel = True', *params]):
        config = TrainerConfig(root_dir='')
        env = building.create_eval_environment(config, BATCH)
        algorithm = building.create_algorithm(config, env, trains=False)
    env.seed(0)
    env.reset()
    return algorithm.eval(), env


def assert_plays(algorithm, env, count, seed=0, mask=()):
    """Check that ``fast_predict_step`` and ``predict_step`` agree for ``count`` steps and draw the same numbers."""
    state, transform_state = algorithm.get_initial_predict_state(BATCH), algorithm.get_initial_transform_state(BATCH)
    with context.eval_context(), torch.no_grad():
        for i in range(count):
            inputs, transform_state = algorithm.transform_timestep(env.current_time_step(), transform_state)
            inputs = inputs._replace(action_mask=mask)
            found = []
            for step in (algorithm.fast_predict_step, algorithm.predict_step):
                torch.manual_seed(seed + i)
                output, new_state, _ = step(inputs, state)
                assert not nest.flatten(new_state)
                found.append([*nest.flatten(output), torch.get_rng_state()])
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*found, strict=True))
            env.step(output)


def num_graphs(algorithm):
    return algorithm._traced_predict[1].replayed.num_graphs


@pytest.mark.parametrize('conf', FIXED)
def test_replayed_predictions_match_eager_ones(conf, caplog):
    """Replayed predictions equal eager ones, also after training and with another epsilon."""
    algorithm, env = make(conf)
    for epsilon in (0.0, 0.4, 1.0, 0.0):
        building.set_epsilon_greedy(algorithm, epsilon)
        assert_plays(algorithm, env, 6)
        with torch.no_grad():
            for p in algorithm.parameters():
                p.add_(0.01)
        assert_plays(algorithm, env, 3)
        assert num_graphs(algorithm) == 1
    assert not warnings_in(caplog)


def test_a_changed_epsilon_takes_effect_at_once():
    algorithm, env = make('dqn_cart_pole')
    inputs = env.current_time_step()
    with torch.no_grad():
        outputs = [algorithm.fast_predict_step(inputs, algorithm.get_initial_predict_state(BATCH)).output
                   for _ in range(20)]
        assert num_graphs(algorithm) and all(torch.equal(outputs[0], x) for x in outputs)
        building.set_epsilon_greedy(algorithm, 1.0)
        outputs = [algorithm.fast_predict_step(inputs, algorithm.get_initial_predict_state(BATCH)).output
                   for _ in range(20)]
    assert not all(torch.equal(outputs[0], x) for x in outputs)


@pytest.mark.parametrize('conf', ['dqn_cart_pole', 'ppo_cart_pole'])
def test_action_masks_are_checked_at_each_step(conf):
    algorithm, env = make(conf)
    for mask in ([True, True], [True, False], [False, True]):
        assert_plays(algorithm, env, 4, mask=torch.tensor([mask] * BATCH))
    assert num_graphs(algorithm) == 1


@pytest.mark.parametrize('conf', OTHERS.values(), ids=OTHERS)
def test_all_other_predictions_run_eagerly(conf):
    algorithm, env = make(conf)
    assert not algorithm.capabilities.traceable_prediction
    state = algorithm.get_initial_predict_state(BATCH)
    inputs, _ = algorithm.transform_timestep(env.current_time_step(), algorithm.get_initial_transform_state(BATCH))
    found = []
    for step in (algorithm.fast_predict_step, algorithm.predict_step):
        torch.manual_seed(0)
        with context.eval_context(), torch.no_grad():
            found.append(nest.flatten(nest.map_structure(torch.as_tensor, tuple(step(inputs, state)[:2]))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and algorithm._traced_predict is None


class Looking(SacAlgorithm):
    """A subclass that reads the reward but declares the capabilities of SAC."""

    own_capabilities = SacAlgorithm.own_capabilities

    def predict_step(self, inputs, state):
        step = super().predict_step(inputs, state)
        return AlgStep(step.output * (inputs.reward.unsqueeze(-1) > 0), step.state, step.info)


class Silent(SacAlgorithm):
    """A subclass that declares no capabilities."""


@pytest.mark.parametrize('cls', [Looking, Silent])
def test_a_subclass_with_an_undeclared_step_is_not_replayed(cls):
    """Run predictions of a subclass eagerly if it overrides the step or declares no traceable prediction."""
    algorithm, env = make('sac_pendulum')
    assert algorithm.capabilities.traceable_prediction
    algorithm.policy.__class__, algorithm._capabilities = cls, None
    algorithm.policy._capabilities = None
    assert not algorithm.capabilities.traceable_prediction


@pytest.mark.parametrize('conf', ['sac_pendulum', 'ppo_cart_pole'])
def test_replayed_evaluations_between_updates_match_eager_ones(conf, with_capabilities):
    def returns():
        algorithm, env = make(conf)
        found = []
        for _ in range(3):
            found.append(torch.as_tensor(evaluate(env, algorithm, BATCH).returns))
            with torch.no_grad():
                for p in algorithm.parameters():
                    p.mul_(0.9)
        return torch.cat(found), algorithm

    played, algorithm = returns()
    assert num_graphs(algorithm)
    with_capabilities(Agent, traceable_prediction=False)
    expected, algorithm = returns()
    assert algorithm._traced_predict is None and torch.equal(played, expected) and len(expected.unique()) > 3


class Interrupting:
    """A policy that is interrupted after a number of actions."""

    def __init__(self, act, calls):
        self.act, self.calls = act, calls

    def __call__(self, time_step: TimeStep):
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        return self.act(time_step)


def recorded(act=lambda act: act, num_actions=900):
    algorithm, env = make('sac_pendulum')
    building.set_epsilon_greedy(algorithm, 1.0)
    episodes = recorder.record(env, act(recorder.Policy(algorithm, BATCH)), num_actions)
    if episodes is None:
        return None
    return [episodes.observation[''], episodes.action[''], episodes.reward, episodes.discount, episodes.lengths]


def assert_same(found, expected):
    assert all((a == b).all() and a.shape == b.shape for a, b in zip(found, expected, strict=True))


def test_a_dataset_does_not_depend_on_replay_or_block_length(monkeypatch, with_capabilities):
    found = recorded()
    for block in (7, 10_000):
        monkeypatch.setattr(recorder, '_BLOCK', block)
        assert_same(recorded(), found)
    with_capabilities(Agent, traceable_prediction=False)
    assert_same(recorded(), found)


@pytest.mark.parametrize('calls', [0, 150, 201, 210, 230])
def test_an_interrupted_recording_keeps_all_finished_episodes(calls, monkeypatch):
    monkeypatch.setattr(recorder, '_BLOCK', 10)
    found = recorded(partial(Interrupting, calls=calls), 10_000)
    if calls < 201:  # an episode has 200 actions, and one at its end that is not recorded
        assert found is None
    else:
        assert_same(found, recorded(num_actions=BATCH * 200))
