"""Tests of evaluation: unbiased, without traces in training, in this process and in another one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.trainer_fakes import SmallPolicy, WalkEnv, make_config

from alfx import AlgStep, context, gin_utils
from alfx.config import TrainerConfig
from alfx.engine.remote.policy_state import load_policy_state, policy_state
from alfx.runs import building, evaluator
from alfx.runs.evaluator import SyncEvaluator, evaluate, read_results
from alfx.runs.step_measures import EpisodeMeans
from alfx.trainers.async_evaluator import Evaluator
from alfx.utils import random_state

TESTS = str(Path(__file__).parents[2])  # the folder of `helpers`, for other processes


@pytest.fixture
def algorithm(tmp_path):
    return building.create_algorithm(make_config(tmp_path), WalkEnv(), trains=False)


def test_short_episodes_are_not_favored(algorithm):
    """Episodes of 2 steps and return 0 in one environment, of 50 steps and return 50 in the other: mean 25. Taking the
    first ten that end would give a mean of 0."""
    result = evaluate(WalkEnv(2, lengths=[2, 50]), algorithm, 10)
    statistics = result.statistics()
    assert sorted(result.returns) == [0.0] * 5 + [50.0] * 5
    assert (statistics['episodes'], statistics['average_return'], statistics['average_length']) == (10, 25.0, 26.0)


@pytest.mark.parametrize('num_episodes, batch_size', [(1, 4), (3, 4), (4, 4), (10, 4), (7, 1)])
def test_exactly_the_given_number_of_episodes_is_evaluated(algorithm, num_episodes, batch_size):
    result = evaluate(WalkEnv(batch_size), algorithm, num_episodes)
    assert len(result.returns) == len(result.lengths) == num_episodes
    assert all(2 <= length < 9 for length in result.lengths)


def test_statistics_by_hand(algorithm):
    result = evaluate(WalkEnv(4, lengths=[1, 2, 3, 4]), algorithm, 4)
    # returns 0, 2, 0, 4: mean 1.5, deviation sqrt((2.25 + .25 + 2.25 + 6.25) / 3) = 1.914854; t(.975, 3) = 3.182446
    statistics = result.statistics()
    assert statistics['average_return'] == 1.5
    assert statistics['std_return'] == pytest.approx(1.914854)
    assert statistics['ci95_return'] == pytest.approx(3.182446 * 1.914854 / 2, rel=1e-4)


def test_truncated_episodes_are_distinguished_from_terminated_ones(algorithm):
    env = WalkEnv(4, lengths=[1, 2, 3, 4])
    step = env.step

    def step_cut_off(action):
        time_step = step(action)
        is_cut = time_step.is_last() & (torch.arange(4) == 2)
        return time_step._replace(discount=torch.where(is_cut, 1.0, torch.where(time_step.is_last(), 0.0, 1.0)))

    env.step = step_cut_off
    assert evaluate(env, algorithm, 4).statistics()['complete'] == 0.75


def test_an_episode_that_does_not_end_is_logged(algorithm, monkeypatch, caplog):
    monkeypatch.setattr(evaluator, '_LONG_EPISODE', 10)
    evaluate(WalkEnv(2, lengths=[8, 8]), algorithm, 4)
    assert not caplog.records
    evaluate(WalkEnv(1, lengths=[45]), algorithm, 1)
    assert [record.args[0] for record in caplog.records] == [10, 20, 40] and 'max_episode_steps' in caplog.text


def test_no_episode_is_an_error(algorithm):
    with pytest.raises(ValueError, match='at least 1'):
        evaluate(WalkEnv(), algorithm, 0)


def test_modes_generators_and_recording_are_restored(algorithm):
    frozen = algorithm._net[0].eval()
    before = random_state.capture()
    modes = []
    algorithm._net.register_forward_hook(lambda module, *_: modes.append((module.training, context.is_eval(),
                                                                          torch.is_grad_enabled())))
    with context.rollout_context():
        evaluate(WalkEnv(), algorithm, 3)
        assert context.is_rollout()
    assert set(modes) == {(False, True, False)}
    assert algorithm.training and not frozen.training
    assert torch.equal(before['torch'], torch.get_rng_state())
    assert random_state.capture()['python'] == before['python']


class Remembering(SmallPolicy):
    """An algorithm whose state counts the steps of an episode."""

    def get_initial_predict_state(self, batch_size):
        return torch.zeros(batch_size)

    def predict_step(self, inputs, state):
        self.states = getattr(self, 'states', []) + [(inputs.step_type.clone(), state.clone())]
        return AlgStep(torch.zeros(len(state), dtype=torch.int64), state + 1, ())


def test_recurrent_state_is_reset_at_the_first_step_of_each_episode(tmp_path):
    algorithm = building.create_algorithm(make_config(tmp_path, algorithm_ctor=Remembering), WalkEnv(), trains=False)
    evaluate(WalkEnv(3), algorithm, 9)
    step_types = torch.stack([s for s, _ in algorithm.states])
    states = torch.stack([s for _, s in algorithm.states])
    assert int((step_types == 0).sum()) >= 6
    assert bool((states[step_types == 0] == 0).all()) and bool((states[step_types != 0] > 0).all())


def test_results_are_written_with_the_counters_of_the_request(tmp_path, algorithm):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    evaluator = SyncEvaluator(WalkEnv(2, lengths=[3, 3]), make_config(tmp_path, num_eval_episodes=4))
    for counter in (10, 20):
        context.set_global_counter(counter)
        evaluator.eval(algorithm, {'EnvironmentSteps': counter * 100, 'Iterations': counter})
    assert len(evaluator.messages()) == 2 and evaluator.messages() == []
    evaluator.close()
    results = read_results(str(tmp_path))
    assert [(r['global_counter'], r['env_steps'], r['average_return']) for r in results] == [(10, 1000, 1.5),
                                                                                           (20, 2000, 1.5)]
    events = EventAccumulator(str(tmp_path / 'eval')).Reload()
    assert [(e.step, e.value) for e in events.Scalars('Metrics/AverageReturn')] == [(1000, 1.5), (2000, 1.5)]


def test_episodes_do_not_depend_on_earlier_evaluations(tmp_path):
    gin_utils.load('ppo_cart_pole', ['create_environment.nonparallel = True'], allow_unused=True)
    config = TrainerConfig(root_dir=str(tmp_path), random_seed=5)
    results = []
    for counters in ((10, 20), (20, )):
        env = building.create_eval_environment(config, 2)
        algorithm, log = building.create_algorithm(config, env, trains=False), evaluator.EvalLog(str(tmp_path), config)
        random_state.set_random_seed(0)
        for parameter in algorithm.parameters():
            torch.nn.init.normal_(parameter)
        for counter in counters:
            context.set_global_counter(counter)
            results.append(log.evaluate(env, algorithm, 4).returns.tolist())
        env.close()
        log.close()
    assert results[1] == results[2] != results[0]


def test_weights_travel_without_optimizers_and_metrics(tmp_path, algorithm):
    config = make_config(tmp_path)
    trained = building.create_algorithm(config, WalkEnv(), trains=True)
    load_policy_state(algorithm, policy_state(trained))
    for a, b in zip(trained.parameters(), algorithm.parameters()):
        assert torch.equal(a, b)
    state = policy_state(trained)
    state['_net.0.weight'] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match='_net.0.weight: expected a tensor of shape \\(8, 2\\), found \\(3, 3\\)'):
        load_policy_state(algorithm, state)


CONF = '''
import helpers.trainer_fakes
TrainerConfig.algorithm_ctor = @SmallPolicy
TrainerConfig.random_seed = 3
TrainerConfig.num_eval_episodes = 3
TrainerConfig.num_eval_environments = 2
create_environment.env_load_fn = @load_walk
create_environment.nonparallel = True
'''


@pytest.fixture
def conf_file(tmp_path, monkeypatch):
    """Return the path of a conf with the fake algorithm and environment, which other processes can import."""
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([TESTS, os.environ.get('PYTHONPATH', '')]))
    path = tmp_path / 'conf.gin'
    path.write_text(CONF)
    return str(path)


def test_another_process_evaluates_and_reports_and_its_death_is_noticed(tmp_path, algorithm, conf_file):
    config = make_config(tmp_path, num_eval_episodes=3, num_eval_environments=2)
    evaluator = Evaluator(config, conf_file)
    for counter in (5, 6):
        context.set_global_counter(counter)
        evaluator.eval(algorithm, {'EnvironmentSteps': 10 * counter, 'Iterations': counter})
    assert read_results(str(tmp_path)) == []  # nothing waits for the result
    messages = []
    _wait_for(lambda: messages.extend(evaluator.messages()) or len(messages) == 2)
    os.kill(evaluator._process.pid, signal.SIGKILL)
    _wait_for(lambda: messages.extend(evaluator.messages()) or any('died' in m for m in messages))
    assert any('was killed by SIGKILL' in m and 'starts a new one' in m for m in messages)
    assert sum('evaluation at' in m for m in messages) == 2
    context.set_global_counter(7)
    evaluator.eval(algorithm, {'EnvironmentSteps': 70, 'Iterations': 7})  # in a new process
    evaluator.close()
    results = read_results(str(tmp_path))
    assert [r['global_counter'] for r in results] == [5, 6, 7]
    assert all(np.isfinite(r['average_return']) and r['episodes'] == 3 for r in results)


def test_evaluations_that_a_stop_prevents_are_logged(tmp_path, algorithm, conf_file):
    evaluator = Evaluator(make_config(tmp_path, num_eval_episodes=3), conf_file)
    for counter in (5, 6):
        context.set_global_counter(counter)
        evaluator.eval(algorithm, {})
    evaluator.close(timeout=0.0)
    assert evaluator.messages() == ['not completed: evaluations at 5, 6']


def test_the_evaluation_process_reports_unused_bindings(tmp_path, algorithm, conf_file):
    with open(conf_file, 'a', encoding='utf8') as file:
        file.write('\nevaluation/SmallPolicy.debug_summaries = True\n')
    evaluator = Evaluator(make_config(tmp_path, num_eval_episodes=1), conf_file)
    assert evaluator.unused_bindings is None
    evaluator.eval(algorithm, {})
    evaluator.close()
    assert evaluator.unused_bindings == [('evaluation', 'helpers.trainer_fakes.SmallPolicy', 'debug_summaries')]


def test_an_error_in_the_other_process_keeps_its_message(tmp_path, algorithm, conf_file):
    with open(conf_file, 'a', encoding='utf8') as file:
        file.write("\nSmallPolicy.unknown = 1\n")
    evaluator = Evaluator(make_config(tmp_path), conf_file)
    evaluator.eval(algorithm, {})
    _wait_for(lambda: not evaluator._is_alive())
    messages = evaluator.messages()
    assert any('unknown' in m for m in messages) and any('died: it ended with exit code 1' in m for m in messages)
    evaluator.close()


STOPPED_EARLY = '''
import sys
import torch
from helpers.trainer_fakes import make_config
from alfx.trainers.async_evaluator import Evaluator

if __name__ == '__main__':
    evaluator = Evaluator(make_config(sys.argv[1], random_seed=1), 'no.gin')
    evaluator.eval(torch.nn.Linear(1000, 1000), {})  # more than a pipe holds, to a process that has yet to start
    evaluator.close(timeout=0.0)
'''


def test_a_run_ends_even_if_its_weights_were_never_evaluated(tmp_path):
    program = tmp_path / 'program.py'
    program.write_text(STOPPED_EARLY)
    path = os.pathsep.join([TESTS, *filter(None, sys.path)])
    done = subprocess.run([sys.executable, str(program), str(tmp_path)], env=os.environ | {'PYTHONPATH': path},
                          timeout=50, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited too long'
        time.sleep(0.05)


class SucceedingEnv(WalkEnv):
    """A :class:`WalkEnv` in which the episodes of environments of odd number succeed."""

    def _step(self, action):
        time_step = super()._step(action)
        success = time_step.is_last().float() * (time_step.env_id % 2)
        return time_step._replace(env_info={'success': success, 'pose': torch.ones(self.batch_size, 3)})


def test_numbers_of_the_environment_are_in_the_statistics_and_in_the_table(algorithm, tmp_path):
    result = evaluate(SucceedingEnv(4), algorithm, 8)
    info = result.env_info()
    assert sorted(info['success']) == [0.0] * 4 + [1.0] * 4 and info['pose'].shape == (8, 3)
    assert result.statistics()['env_info/success'] == 0.5
    assert 'env_info/pose' not in result.statistics()
    assert ', success 0.5, length' in str(result)
    evaluator = SyncEvaluator(SucceedingEnv(4), make_config(tmp_path, num_eval_episodes=4))
    evaluator.eval(algorithm, {})
    evaluator.close()
    assert read_results(str(tmp_path))[-1]['env_info/success'] == 0.5


def test_algorithm_metrics_of_a_step_are_averaged_over_each_episode(algorithm, tmp_path, monkeypatch):
    """Steps 0, 1, ... of an episode are measured as NaN, 1, 2, ...: of 3 steps and a final one the mean is 2."""
    steps = iter([float('nan'), 1.0, 2.0, 3.0] * 3)
    monkeypatch.setattr(algorithm, 'measures', lambda info: {'irm/accuracy': torch.tensor([next(steps)])})
    result = evaluate(WalkEnv(1, lengths=[3]), algorithm, 2)
    assert result.measures['irm/accuracy'].tolist() == [2.0, 2.0]
    assert result.statistics()['measure/irm/accuracy'] == 2.0 and ', irm/accuracy 2, length' in str(result)
    evaluator = SyncEvaluator(WalkEnv(1, lengths=[3]), make_config(tmp_path, num_eval_episodes=1))
    evaluator.eval(algorithm, {})
    evaluator.close()
    assert read_results(str(tmp_path))[-1]['measure/irm/accuracy'] == 2.0


def test_steps_of_episodes_that_do_not_count_are_not_measured():
    means = EpisodeMeans()
    counted, last = np.array([True, False]), np.array([False, True])
    means.observe({'a': torch.tensor([1.0, 100.0])}, counted, last)
    means.observe({'a': torch.tensor([3.0, 100.0])}, counted, ~last)
    assert means.result()['a'].tolist() == [2.0]
    assert EpisodeMeans().result() == {}
