"""Callbacks: order of the hooks, counts, logged scalars, stop, state in checkpoints, errors, and the shipped ones."""
import collections
import csv
import os
import shutil
import signal
import threading
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import alfx
from alfx import context, gin_utils
from alfx.algorithms.data_transformer import SimpleDataTransformer
from alfx.checkpoints import module_states
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.checkpoints.files import CheckpointError
from alfx.gin_utils import ConfError
from alfx.metrics.metrics import AverageEpisodeLengthMetric, AverageReturnMetric, EnvironmentSteps, NumberOfEpisodes
from alfx.runs import run_files
from alfx.runs.callbacks import Callback, EpisodeLog, KeepBestCheckpoint, StopWithoutImprovement, TrainingRun
from alfx.runs.evaluator import read_results
from alfx.trainers.callback_runner import CallbackError, CallbackRunner
from alfx.utils import processes

SMALL = {'create_environment.num_parallel_environments': 2, 'TrainerConfig.num_iterations': 6,
         'TrainerConfig.num_env_steps': 0, 'TrainerConfig.unroll_length': 32, 'TrainerConfig.mini_batch_size': 32,
         'TrainerConfig.num_updates_per_train_iter': 1, 'TrainerConfig.random_seed': 1, 'TrainerConfig.num_threads': 1,
         'TrainerConfig.num_summaries': None, 'TrainerConfig.summary_interval': 1, 'TrainerConfig.num_checkpoints': 3,
         'TrainerConfig.evaluate': True, 'TrainerConfig.num_evals': None, 'TrainerConfig.eval_interval': 2,
         'TrainerConfig.num_eval_episodes': 2, 'TrainerConfig.async_eval': False}


def train(root_dir, *callbacks, **params):
    params = {f'TrainerConfig.{name}': value for name, value in params.items()}
    return alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.callbacks': callbacks, **params}, root_dir)


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def repeatable(table):
    without = 'seconds', 'steps_per_second', 'best/average_return'  # evaluation environments are not in checkpoints
    return [{name: x for name, x in row.items() if name not in without} for row in table]


class Recorder(Callback):
    """Callback that records every call, logs a scalar and stores its counts."""

    def __init__(self):
        self.calls, self.lengths, self.total = [], [], 0.0

    def on_training_start(self, run):
        self.calls.append(('start', run.iteration, run.evaluation is None))

    def on_iteration_end(self, run):
        self.calls.append(('iteration', run.iteration, run.env_steps))
        run.log('mine/iteration', run.iteration)

    def on_episode_end(self, run, episode):
        self.lengths.append(episode.length)
        self.total += float(episode.episode_return)

    def on_evaluation_end(self, run):
        self.calls.append(('evaluation', run.iteration, run.evaluation['average_return']))
        run.log('mine/evaluation', run.iteration)

    def on_training_end(self, run):
        self.calls.append(('end', run.iteration, run.is_interrupted))
        run.log('mine/end', 7)
        assert isinstance(run.algorithm, torch.nn.Module) and 0 < run.seconds and run.progress == 1.0


def test_hooks_are_called_in_order_with_counts_and_results(tmp_path):
    recorder = Recorder()
    train(tmp_path, recorder)
    order = [call[:2] for call in recorder.calls]
    assert order == [('start', 0), ('iteration', 1), ('iteration', 2), ('evaluation', 2), ('iteration', 3),
                     ('iteration', 4), ('evaluation', 4), ('iteration', 5), ('iteration', 6), ('evaluation', 6),
                     ('end', 6)]
    table = rows(tmp_path / 'progress.csv')
    assert [call[2] for call in recorder.calls if call[0] == 'iteration'] == [int(row['env_steps']) for row in table]
    assert [call[2] for call in recorder.calls if call[0] == 'evaluation'] == [
        result['average_return'] for result in read_results(str(tmp_path))]
    # the steps of finished episodes, each of which has the reward 1, and at most two episodes in progress
    assert len(recorder.lengths) == int(table[-1]['episodes']) and sum(recorder.lengths) == recorder.total
    assert 0 <= int(table[-1]['env_steps']) - sum(recorder.lengths) < 2 * 500


def test_logged_scalars_are_columns_in_the_row_of_their_iteration(tmp_path):
    train(tmp_path, Recorder())
    table = rows(tmp_path / 'progress.csv')
    assert [row['mine/iteration'] for row in table] == ['1', '2', '3', '4', '5', '6']
    # an evaluation comes after the row of its iteration; the last one is added to the last row
    assert [row['mine/evaluation'] for row in table] == ['', '', '2', '', '4', '6']
    assert [row['mine/end'] for row in table] == ['', '', '', '', '', '7'] and table[-1]['average_return']
    curve = alfx.read_progress(tmp_path)['mine/iteration']
    assert curve.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_run_with_callbacks_equals_a_run_without(tmp_path):
    expected = train(tmp_path / 'a')
    assert train(tmp_path / 'b', Recorder(), KeepBestCheckpoint(), EpisodeLog()) == expected
    one, two = (repeatable(rows(tmp_path / name / 'progress.csv')) for name in 'ab')
    assert [{name: row[name] for name in one[0]} for row in two] == one


def test_a_run_without_callbacks_stores_no_callback_state(tmp_path):
    train(tmp_path, evaluate=False, num_iterations=1, num_checkpoints=1)
    state = Checkpointer(run_files.checkpoint_dir(str(tmp_path)))._read('latest')[2]['trainer']
    assert 'callbacks' not in state


class Counter(Callback):
    def __init__(self, stop_at=None):
        self.count, self.stop_at = 0, stop_at

    def on_iteration_end(self, run):
        self.count += 1
        run.log('count', self.count)
        if self.count == self.stop_at:
            run.stop('enough')

    def state_dict(self):
        return {'count': self.count, 'sizes': [torch.ones(2)]}

    def load_state_dict(self, state):
        assert torch.equal(state['sizes'][0], torch.ones(2))
        self.count = state['count']


def test_a_run_stopped_by_a_callback_does_not_continue(tmp_path, capsys):
    train(tmp_path, Counter(stop_at=3))
    assert 'Counter stops the run: enough' in capsys.readouterr().err
    assert [row['count'] for row in rows(tmp_path / 'progress.csv')] == ['1', '2', '3']
    assert [result['iteration'] for result in read_results(str(tmp_path))] == [2, 3]  # evaluated at its end
    train(tmp_path, Counter(stop_at=3))
    assert len(rows(tmp_path / 'progress.csv')) == 3 and 'remove the callback' in capsys.readouterr().err
    train(tmp_path)
    assert len(rows(tmp_path / 'progress.csv')) == 6


def test_a_resumed_run_continues_with_the_states_of_its_callbacks(tmp_path):
    def callbacks():
        return Counter(), KeepBestCheckpoint(), EpisodeLog(), Counter()

    class Copier(Callback):
        def on_iteration_end(self, run):
            if run.iteration == 5:  # a killed run has written more than its latest checkpoint, ckpt-4
                shutil.copytree(run.root_dir, tmp_path / 'killed', ignore=shutil.ignore_patterns('train.lock'))

    train(tmp_path / 'run', *callbacks(), Copier())
    train(tmp_path / 'killed', *callbacks())
    for name in ('progress.csv', 'episodes.csv'):
        one, two = (repeatable(rows(tmp_path / run / name)) for run in ('run', 'killed'))
        assert one == two and len(one) >= 6
    assert [row['iteration'] for row in rows(tmp_path / 'killed/eval/progress.csv')] == ['2', '4', '6']


class Broken(Callback):
    def __init__(self, hook):
        def fail(*args):
            raise KeyError('no such key')

        setattr(self, hook, fail)

    on_iteration_end = on_training_start = on_training_end = on_evaluation_end = on_episode_end = lambda *args: None


@pytest.mark.parametrize('hook', ['on_training_start', 'on_iteration_end', 'on_episode_end', 'on_evaluation_end',
                                  'on_training_end', 'state_dict'])
def test_an_error_in_a_hook_names_the_callback_and_the_hook(tmp_path, hook):
    with pytest.raises(CallbackError, match=f"Broken.{hook} of TrainerConfig.callbacks raised KeyError: 'no such key'"
                       r'\n  File ".*test_callbacks.py", line \d+, in fail\n    raise KeyError'):
        train(tmp_path, Counter(), Broken(hook))


@pytest.mark.parametrize('state, found', [({'a': np.float64(1)}, 'numpy.float64'), ({'a': [{1, 2}]}, 'builtins.set')])
def test_a_state_that_a_checkpoint_cannot_hold_is_rejected(tmp_path, state, found):
    class Unsaved(Callback):
        def state_dict(self):
            return state

    with pytest.raises(CallbackError, match=f'Unsaved.state_dict .*found {found}'):
        train(tmp_path, Unsaved(), num_iterations=1, evaluate=False)


def test_the_training_is_saved_although_a_state_cannot_be(tmp_path):
    class Unsaved(Callback):
        state = 1.0

        def on_iteration_end(self, run):
            self.state = object()

        def state_dict(self):
            return {'state': self.state}

    with pytest.raises(CallbackError, match='Unsaved.state_dict .*found builtins.object'):
        train(tmp_path, Unsaved(), num_iterations=2, num_checkpoints=1, evaluate=False)
    assert 'ckpt-2' in os.listdir(tmp_path / 'train/algorithm/crash')


class Misspelled(Callback):
    def on_iteraton_end(self, run):
        pass

    def on_full_moon(self):
        """A method of its own."""


@pytest.mark.parametrize('callbacks, params, message', [
    ([Counter(), 3], {}, 'contains int 3, which is not a callback'),
    ([Counter(), KeepBestCheckpoint()], {'evaluate': False}, 'KeepBestCheckpoint, whose on_evaluation_end would never'),
    ([EpisodeLog(), EpisodeLog()], {}, 'two callbacks with the file episodes.csv'),
    ([Misspelled()], {}, "Misspelled.on_iteraton_end is not a hook\n  did you mean 'on_iteration_end'"),
])
def test_callbacks_that_cannot_work_are_rejected(tmp_path, callbacks, params, message):
    with pytest.raises(ConfError, match=message):
        train(tmp_path, *callbacks, **params)


def test_a_callback_can_be_a_class_or_a_factory():
    config = SimpleNamespace(callbacks=[Counter, lambda: Counter()], root_dir='', ml_type='rl', collects=True,
                             evaluate=True)
    runner = CallbackRunner(config, SimpleNamespace(get_metrics=list), None)
    assert runner.users_of('on_iteration_end') == ['Counter', 'Counter_2']


def test_names_and_values_that_cannot_be_logged_are_rejected():
    run = TrainingRun('', None)
    with pytest.raises(ValueError, match="'env_steps' is a column that alfx writes"):
        run.log('env_steps', 1)
    with pytest.raises(ValueError, match="'loss/policy': 'train', .* are reserved for .* such as 'callback/policy'"):
        run.log('loss/policy', 1)
    with pytest.raises(ValueError, match="x: expected a number, found 'much'"):
        run.log('x', 'much')


class LogsAlways(Callback):
    """Callback that logs in every iteration and at the end, and sends a signal at an iteration."""

    def __init__(self, signal_at=0):
        self.signal_at = signal_at

    def on_iteration_end(self, run):
        run.log('mine/iteration', run.iteration)
        if run.iteration == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_training_end(self, run):
        run.log('mine/end', run.iteration)


@pytest.mark.parametrize('interval', [1, 4])
def test_the_table_of_a_finished_run_does_not_change(tmp_path, interval):
    """The same command does not train again."""
    tables = []
    for _ in range(2):
        train(tmp_path, LogsAlways(), evaluate=False, summary_interval=interval)
        tables.append(rows(tmp_path / 'progress.csv'))
    assert tables[0] == tables[1] and tables[0][-1]['mine/end'] == '6'


def test_a_signal_leaves_no_row_that_an_uninterrupted_run_does_not_have(tmp_path):
    train(tmp_path / 'a', LogsAlways(), evaluate=False, summary_interval=3)
    with processes.signal_handlers({signal.SIGTERM: lambda *_: None}):
        for signal_at in (5, 0):
            train(tmp_path / 'b', LogsAlways(signal_at), evaluate=False, summary_interval=3)
    uninterrupted, interrupted = (repeatable(rows(tmp_path / name / 'progress.csv')) for name in 'ab')
    assert [row['iteration'] for row in uninterrupted] == ['0', '3', '5'] and uninterrupted == interrupted
    assert all(row['global_counter'] == row['iteration'] for row in uninterrupted)


def test_the_first_reason_to_stop_is_the_one_reported():
    run = TrainingRun('', None)
    run.stop('enough')
    run.stop('too late')
    assert run.stop_reason == 'enough'


# The callbacks that alfx ships ------------------------------------------------------------------------------------


class FixedReturns(Callback):
    """Callback that replaces the results of evaluations by given ones, for the callbacks after it."""

    def __init__(self, *returns):
        self.returns = list(returns)

    def on_evaluation_end(self, run):
        run.evaluation = {**run.evaluation, 'average_return': self.returns.pop(0)}


def test_the_best_checkpoint_is_kept_and_loaded_by_name(tmp_path):
    parameters = {}

    class Copier(Callback):
        def on_evaluation_end(self, run):
            parameters[run.iteration] = [p.detach().clone() for p in run.algorithm.parameters()]

    train(tmp_path, FixedReturns(1.0, 9.0, 9.0), KeepBestCheckpoint(), Copier(), num_checkpoints=1)
    assert os.listdir(tmp_path / 'train/algorithm/best') == ['ckpt-4']  # the first of equal results
    assert Checkpointer(run_files.checkpoint_dir(str(tmp_path))).steps() == [6]
    best, latest = (alfx.load(tmp_path, step) for step in ('best', 'latest'))
    for policy, iteration in ((best, 4), (latest, 6)):
        assert all(torch.equal(x, y) for x, y in zip(policy._algorithm.parameters(), parameters[iteration]))
    # '' where it is unchanged: the result of iteration 4 is logged in the row of the next iteration
    assert [row['best/average_return'] for row in rows(tmp_path / 'progress.csv')] == ['', '', '1', '', '9', '']


def test_the_best_checkpoint_at_resume_is_the_one_evaluated(tmp_path):
    train(tmp_path, evaluate=False, num_iterations=4)
    train(tmp_path, FixedReturns(9.0, 1.0), KeepBestCheckpoint(), eval_interval=4, num_iterations=6)
    assert os.listdir(tmp_path / 'train/algorithm/best') == ['ckpt-4']


def test_a_callback_object_starts_afresh_in_the_next_run(tmp_path):
    stop = StopWithoutImprovement(patience=2, min_delta=1000.0)
    for seed in range(2):
        train(tmp_path / str(seed), stop, num_iterations=8)
        assert [result['iteration'] for result in read_results(str(tmp_path / str(seed)))] == [2, 4, 6]


def test_a_run_without_best_checkpoint_says_how_to_get_one(tmp_path):
    train(tmp_path, evaluate=False, num_iterations=1)
    with pytest.raises(CheckpointError, match='has no best checkpoint.*KeepBestCheckpoint'):
        alfx.load(tmp_path, 'best')


@pytest.mark.parametrize('mode, values, expected', [('max', [3, float('nan'), 2, 4, 4], [3, 4]),
                                                    ('min', [3, float('nan'), 2, 4, 2], [3, 2])])
def test_the_best_result_follows_the_mode_and_ignores_nan(mode, values, expected):
    callback, run, found = KeepBestCheckpoint(metric='x', mode=mode), TrainingRun('', None), []
    for value in values:
        run.evaluation, run.keeps_best = {'x': value}, False
        callback.on_evaluation_end(run)
        found += [value] * run.keeps_best
    assert found == expected


@pytest.mark.parametrize('changes, is_best', [({}, False), ({'metric': 'y'}, True), ({'mode': 'min'}, True)])
def test_a_resumed_run_compares_with_the_best_of_the_same_metric(changes, is_best):
    callback, run = KeepBestCheckpoint(metric='x'), TrainingRun('', None, evaluation={'x': 9.0})
    callback.on_evaluation_end(run)
    resumed = KeepBestCheckpoint(**{'metric': 'x', **changes})
    resumed.load_state_dict(callback.state_dict())
    run.evaluation, run.keeps_best = {'x': 1.0, 'y': 1.0}, False
    resumed.on_evaluation_end(run)
    assert run.keeps_best == is_best


def test_patience_starts_anew_with_another_metric():
    callback, run = StopWithoutImprovement(metric='x', patience=3), TrainingRun('', None)
    for value in (5.0, 4.0, 3.0):
        run.evaluation = {'x': value}
        callback.on_evaluation_end(run)
    same, other = (StopWithoutImprovement(metric=metric, patience=3) for metric in ('x', 'y'))
    for resumed in (same, other):
        resumed.load_state_dict(callback.state_dict())
        run.stop_reason, run.evaluation = None, {'x': 2.0, 'y': float('nan')}
        resumed.on_evaluation_end(run)
        assert (run.stop_reason is None) == (resumed is other)


def test_an_equal_infinite_result_is_no_improvement():
    callback, run = KeepBestCheckpoint(metric='x'), TrainingRun('', None, evaluation={'x': -float('inf')})
    assert [callback.improves(run) for _ in range(3)] == [True, False, False]


def test_the_best_loss_is_logged_under_a_name_that_is_not_reserved():
    run = TrainingRun('', None, evaluation={'measure/loss': 1.5})
    KeepBestCheckpoint(metric='measure/loss', mode='min').on_evaluation_end(run)
    assert run.logged == {'best_measure_loss': 1.5}


class Range(NamedTuple):
    low: float = 0.0


@pytest.mark.parametrize('value', [collections.defaultdict(int, a=1), Range(), (1, Range())])
def test_a_state_that_a_checkpoint_could_not_hold_is_rejected(value):
    with pytest.raises(TypeError, match='expected numbers, strings, tensors, None, and lists and dicts of these'):
        module_states.check_plain(value)


def test_an_unknown_metric_is_rejected_with_the_nearest_name():
    run = TrainingRun('', None, evaluation={'average_return': 1.0, 'average_length': 2.0})
    with pytest.raises(ConfError, match="no result 'average_retrun'\n  did you mean 'average_return'"):
        KeepBestCheckpoint(metric='average_retrun').on_evaluation_end(run)


@pytest.mark.parametrize('make', [lambda: KeepBestCheckpoint(mode='most'), lambda: StopWithoutImprovement(patience=0),
                                  lambda: EpisodeLog(file='progress.csv'), lambda: EpisodeLog(file='../e.csv')])
def test_wrong_settings_of_callbacks_are_rejected(make):
    with pytest.raises(ConfError, match='KeepBestCheckpoint.mode|StopWithoutImprovement.patience|EpisodeLog.file'):
        make()


def test_a_run_stops_without_improvement(tmp_path, capsys):
    train(tmp_path, FixedReturns(5.0, 5.5, 4.0, 9.0), StopWithoutImprovement(patience=2, min_delta=1.0),
          num_iterations=8)
    assert 'has not improved on 5.0 in 2 evaluations' in capsys.readouterr().err
    assert [result['iteration'] for result in read_results(str(tmp_path))] == [2, 4, 6]


def test_the_episode_log_has_a_row_for_each_episode(tmp_path):
    recorder = Recorder()
    train(tmp_path, recorder, EpisodeLog(file='games.csv'))
    table = rows(tmp_path / 'games.csv')
    assert list(table[0]) == ['episode', 'env_steps', 'return', 'length', 'seconds']
    assert [int(row['length']) for row in table] == recorder.lengths == [int(row['return']) for row in table]
    assert [int(row['episode']) for row in table] == list(range(1, len(table) + 1))


def test_callbacks_of_a_conf_are_references(tmp_path):
    path = tmp_path / 'my.gin'
    path.write_text("include 'ppo_cart_pole.gin'\n"
                    'TrainerConfig.callbacks = (@KeepBestCheckpoint(), @EpisodeLog, @StopWithoutImprovement())\n'
                    'StopWithoutImprovement.patience = 1\n')
    run = tmp_path / 'run'
    alfx.train(path, SMALL, run)
    assert 'StopWithoutImprovement.patience = 1' in (run / 'conf/operative.gin').read_text()
    assert (run / 'episodes.csv').exists() and (run / 'train/algorithm/best').is_dir()
    # settings of callbacks and the callbacks may change when the run is resumed
    alfx.train(path, {**SMALL, 'StopWithoutImprovement.patience': 3}, run)
    alfx.train(path, {**SMALL, 'TrainerConfig.callbacks': [EpisodeLog]}, run)


# Several ranks ----------------------------------------------------------------------------------------------------


class ThreadTeam:
    """Team of ranks that are threads of this process."""

    def __init__(self, rank, shared):
        self.rank, self.shared, self.writes = rank, shared, rank == 0

    def gather(self, value):
        self.shared.values[self.rank] = value
        self.shared.barrier.wait(30)
        return list(self.shared.values) if self.writes else []


def test_hooks_run_in_rank_0_with_the_counts_and_episodes_of_all_ranks():
    shared = SimpleNamespace(values=[None, None], barrier=threading.Barrier(2))
    recorders = [Recorder(), Recorder()]

    def rank(number):
        steps, episodes = EnvironmentSteps(), NumberOfEpisodes()
        example = SimpleNamespace(step_type=torch.zeros(1, dtype=torch.int32), reward=torch.zeros(1))
        metrics = [steps, episodes, AverageReturnMetric(example), AverageEpisodeLengthMetric(example)]
        algorithm = SimpleNamespace(get_metrics=lambda: metrics)
        config = SimpleNamespace(callbacks=[recorders[number]], root_dir='', ml_type='rl', collects=True, evaluate=True)
        runner = CallbackRunner(config, algorithm, ThreadTeam(number, shared))
        steps._add(10 * (number + 1))
        metrics[2].finished.append(np.float64(4 + number))
        metrics[3].finished.append(np.float64(10 + number))
        runner.end_iteration(1, 0.5, 0.1)

    threads = [threading.Thread(target=rank, args=(number, )) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert recorders[0].calls == [('iteration', 1, 30)] and recorders[0].lengths == [10, 11]
    assert recorders[0].total == 9.0 and recorders[1].calls == recorders[1].lengths == []


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


class LargestValue(SimpleDataTransformer):
    """Divides observations by the largest value seen, which is no buffer."""

    def __init__(self, observation_spec):
        super().__init__(observation_spec)
        self.largest = 1e-3

    def _transform(self, time_step):
        if context.is_rollout():
            self.largest = max(self.largest, float(time_step.observation.abs().max()))
        return time_step._replace(observation=time_step.observation / self.largest)

    def get_extra_state(self):
        return {'largest': self.largest}

    def set_extra_state(self, state):
        self.largest = state['largest']


def test_evaluations_with_state_outside_of_buffers_run_in_the_process(tmp_path, caplog):
    with caplog.at_level('INFO'):
        train(str(tmp_path), async_eval=True, data_transformer_ctor=LargestValue, num_env_steps=200)
    assert 'in the training process, because LargestValue keeps state outside of buffers' in caplog.text
    assert rows(tmp_path / 'eval' / 'progress.csv')
