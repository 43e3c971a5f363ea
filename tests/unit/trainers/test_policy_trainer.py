"""Tests of the schedule, of resuming, and of unplanned ends of runs."""

import fcntl
import io
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap

import gin
import pytest
import torch
from helpers.trainer_fakes import SmallPolicy, SmallRegression, WalkEnv, WalkTrainer, load_walk, make_config

from alfx import LossInfo, context, gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.checkpoints import files
from alfx.engine.learner import Learner
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.engine.remote.data_parallel import Ranks
from alfx.runs import building
from alfx.runs import run_files
from alfx.runs import run_lock
from alfx.runs.evaluator import read_results
from alfx.trainers.policy_trainer import RLTrainer, SLTrainer, compute_summary_or_eval_interval
from alfx.trainers.run_state import RunState
from alfx.trainers.signals import StopSignals
from alfx.utils.checkpoint_utils import Checkpointer, CheckpointError, read_checkpoint
from alfx.utils.processes import LostProcessError


@pytest.fixture(autouse=True)
def evaluation_environments(monkeypatch):
    """Use the tiny environment for evaluation as well."""
    monkeypatch.setattr(building, 'create_eval_environment', lambda config, n, **_: WalkEnv(n))


def run(root_dir, trainer=WalkTrainer, stop_after=None, **values):
    """Train; with ``stop_after``, simulate a kill of the process after that many iterations."""
    context.reset()
    result = trainer(make_config(root_dir, **values))
    if stop_after is not None:
        advance = result._advance

        def killed_after():
            if result._state.iteration == stop_after:
                raise SystemExit
            advance()

        result._advance = killed_after
        with pytest.raises(SystemExit):
            result.train()
    else:
        result.train()
    return result


def parameters(trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.algorithm.parameters()]


def steps(root_dir) -> list[int]:
    return Checkpointer(run_files.checkpoint_dir(str(root_dir))).steps()


def table(root_dir) -> list[dict]:
    return run_files.read_table(os.path.join(root_dir, 'progress.csv'))


# The schedule --------------------------------------------------------------------------------------------------


def test_checkpoints_are_spread_over_the_run_and_one_is_at_the_end(tmp_path):
    run(tmp_path, num_checkpoints=3)
    assert steps(tmp_path) == [4, 8, 12]


def test_a_run_ends_with_num_env_steps(tmp_path):
    trainer = run(tmp_path, num_iterations=0, num_env_steps=100)
    assert 100 <= trainer.current_env_steps() < 120
    assert trainer.progress() == 1.0


def test_an_algorithm_without_replay_ends_with_whichever_limit_comes_first(tmp_path):
    assert run(tmp_path / 'a', num_iterations=5, num_env_steps=10**6).current_iterations() == 5
    assert run(tmp_path / 'b', num_iterations=10**6, num_env_steps=100).current_iterations() < 10


def test_too_few_iterations_for_the_environment_steps_are_pointed_out(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(tmp_path, num_iterations=2, num_env_steps=1000)
    assert 'the run ends early' in caplog.text


def test_summaries_are_written_at_start_at_intervals_and_at_the_end(tmp_path):
    run(tmp_path / 'a', summary_interval=4)
    assert [int(row['iteration']) for row in table(tmp_path / 'a')] == [0, 1, 2, 3, 4, 8, 11]
    run(tmp_path / 'b', summary_interval=4, summarize_first_interval=False)
    assert [int(row['iteration']) for row in table(tmp_path / 'b')] == [0, 4, 8, 11]
    run(tmp_path / 'c', num_summaries=2, summarize_first_interval=False)
    assert [int(row['iteration']) for row in table(tmp_path / 'c')] == [0, 6, 11]


def test_the_last_iteration_by_environment_steps_logs_its_losses(tmp_path):
    trainer = run(tmp_path, num_iterations=0, num_env_steps=200, summary_interval=1000, summarize_first_interval=False)
    rows = table(tmp_path)
    assert len(rows) <= 3 and rows[-1]['loss']
    assert int(rows[-1]['env_steps']) == trainer.current_env_steps() >= 200


def test_an_unforeseen_last_iteration_is_summarized_at_its_end(tmp_path):
    trainer = run(tmp_path, num_iterations=0, num_episodes=30, summary_interval=1000, summarize_first_interval=False)
    last = table(tmp_path)[-1]
    assert int(last['env_steps']) == trainer.current_env_steps() and int(last['episodes']) >= 30
    assert float(last['average_return']) > 0


def scalars(folder):
    """Return the steps of all scalars in event files, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder), size_guidance={'scalars': 0}).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()['scalars']}


def test_summaries_are_drawn_over_environment_steps(tmp_path):
    run(tmp_path, num_iterations=6, summary_interval=1, evaluate=True, eval_interval=3, num_eval_episodes=2)
    rows, found = table(tmp_path), scalars(tmp_path / 'train')
    env_steps = [int(row['env_steps']) for row in rows]
    assert env_steps == sorted(set(env_steps)) and env_steps[-1] > 10 * len(env_steps)
    for tag in ('loss', 'loss/policy', 'Metrics/EnvironmentSteps', 'throughput/environment_steps_per_second'):
        assert found[tag] == env_steps[-len(found[tag]):]  # the first iteration has no speed
    assert not any(tag.startswith('Metrics_vs_') for tag in found)
    results = read_results(str(tmp_path))
    assert scalars(tmp_path / 'eval')['Metrics/AverageReturn'] == [row['env_steps'] for row in results]
    assert [row['env_steps'] for row in results] == [env_steps[2], env_steps[5]]


def test_a_conf_gets_iterations_as_axis_and_metrics_over_each_counter(tmp_path):
    run(tmp_path, num_iterations=4, summary_interval=1, summary_axis='global_counter', evaluate=True, eval_interval=2,
        num_eval_episodes=2)
    found, env_steps = scalars(tmp_path / 'train'), [int(row['env_steps']) for row in table(tmp_path)]
    assert found['loss'] == found['Metrics/EnvironmentSteps'] == [0, 1, 2, 3]
    returns = found['Metrics_vs_EnvironmentSteps/AverageReturn']
    assert returns == env_steps[-len(returns):] and 'Metrics_vs_NumberOfEpisodes/AverageReturn' in found
    evaluated = scalars(tmp_path / 'eval')
    assert evaluated['Metrics/AverageReturn'] == [2, 4]
    assert evaluated['Metrics_vs_EnvironmentSteps/AverageReturn'] == [env_steps[1], env_steps[3]]


def test_a_resumed_run_keeps_its_axis(tmp_path):
    options = dict(num_iterations=6, summary_interval=1, evaluate=True, eval_interval=3, num_eval_episodes=2)
    run(tmp_path, stop_after=4, **options)
    first_part = scalars(tmp_path / 'train')['loss']
    both = dict(options, num_env_steps=10_000)  # in a new run, the axis would be iterations
    assert not make_config(tmp_path, **both).summarizes_over_env_steps
    run(tmp_path, **both)
    steps = [int(row['env_steps']) for row in table(tmp_path)]
    assert scalars(tmp_path / 'train')['loss'] == steps and first_part[0] == steps[0] > 0
    run_files.StartRecord(str(tmp_path / 'older')).write(summary_axis='global_counter')
    run(tmp_path / 'older', **options)
    assert scalars(tmp_path / 'older' / 'train')['loss'] == [0, 1, 2, 3, 4, 5]
    assert scalars(tmp_path / 'older' / 'eval')['Metrics/AverageReturn'] == [3, 6]


def test_the_axis_is_the_counter_if_environment_steps_show_no_progress(tmp_path):
    assert make_config(tmp_path).summarizes_over_env_steps
    for values in (dict(ml_type='sl'), dict(update_counter_every_mini_batch=True),
                   dict(num_iterations=100, num_env_steps=10), dict(offline_buffer_dir='data', mini_batch_length=2,
                                                                    whole_replay_buffer_training=False)):
        assert not make_config(tmp_path, **values).summarizes_over_env_steps
    with pytest.raises(gin_utils.ConfError, match=r"summary_axis = 'env_steps'.*no environment is stepped"):
        make_config(tmp_path, ml_type='sl', summary_axis='env_steps')


def test_the_given_number_of_evaluations_is_made(tmp_path):
    # FIRST steps do not count as environment steps, so the run has more iterations than its step count suggests
    trainer = run(tmp_path, num_iterations=0, num_env_steps=400, evaluate=True, num_evals=4, num_eval_episodes=2)
    results = [int(row['iteration']) for row in read_results(str(tmp_path))]
    assert len(results) == 4 and results[-1] == trainer.current_iterations()


def test_progress_table_holds_counters_returns_losses_and_throughput(tmp_path):
    run(tmp_path)
    row = table(tmp_path)[-1]
    assert int(row['env_steps']) > 100 and int(row['episodes']) > 10
    assert float(row['average_length']) > 0 and float(row['steps_per_second']) > 0
    assert float(row['loss']) == pytest.approx(float(row['loss/policy']), abs=1.0)


def test_schedules_see_the_progress_of_the_run(tmp_path):
    seen = []

    class Watching(WalkTrainer):
        def _train_iter(self):
            seen.append(context.get_all_progresses())
            super()._train_iter()

    run(tmp_path, Watching, num_iterations=4)
    assert [p['percent'] for p in seen] == [0, 0.25, 0.5, 0.75]
    assert [p['iterations'] for p in seen] == [0, 1, 2, 3]
    assert [p['global_counter'] for p in seen] == [0, 1, 2, 3]
    assert seen[0]['env_steps'] == 0 < seen[1]['env_steps'] < seen[2]['env_steps']


def test_interval_that_gives_a_number_of_calls(tmp_path):
    config = make_config(tmp_path, num_iterations=1000)
    assert compute_summary_or_eval_interval(config, batch_size=4, calls=100) == 10
    config = make_config(tmp_path, num_iterations=0, num_env_steps=2000, unroll_length=5)
    assert compute_summary_or_eval_interval(config, batch_size=4, calls=10) == 10  # 100 iterations of 20 steps


def test_evaluations_take_place_at_their_interval_and_at_the_end(tmp_path):
    trainer = run(tmp_path, evaluate=True, eval_interval=5, num_eval_episodes=4, num_eval_environments=2)
    results = read_results(str(tmp_path))
    assert [r['iteration'] for r in results] == [5, 10, 12]
    assert all(r['episodes'] == 4 for r in results)
    assert trainer.algorithm.seen_in_evaluation and not any(trainer.algorithm.seen_in_evaluation)
    assert trainer.algorithm.training


NAMED = 'longer', 'create_environment.eval_env_load_fn = @longer/load_walk\n'
NAMED_BY_MACRO = 'far/longer', 'create_environment.eval_env_load_fn = %fn\nfn = @far/longer/load_walk\n'


@pytest.mark.parametrize('uses', [True, False])
@pytest.mark.parametrize('scope, line', [('evaluation', ''), NAMED, NAMED_BY_MACRO])
def test_unused_evaluation_bindings_are_reported_after_the_first_one(
        tmp_path, monkeypatch, caplog, uses, scope, line):
    """Report evaluation bindings that the first evaluation did not use."""
    (tmp_path / 'walk.gin').write_text(f'{scope}/load_walk.batch_size = 2\nload_walk.environment_name = 1\n{line}')
    gin_utils.load(str(tmp_path / 'walk.gin'), allow_unused=True)

    def create(config, number, **_):
        assert 'load_walk.environment_name' in caplog.text and 'batch_size' not in caplog.text
        with gin.config_scope(scope if uses else ''):
            return load_walk()

    monkeypatch.setattr(building, 'create_eval_environment', create)
    try:
        with caplog.at_level(logging.WARNING):
            run(tmp_path / 'run', num_iterations=4, evaluate=True, eval_interval=2)
    finally:
        gin_utils.clear()
    assert caplog.text.count(f'this binding has not been used so far: {scope}/') == (0 if uses else 1)
    assert caplog.text.count('walk.gin:2') == 1


def test_evaluation_does_not_change_training(tmp_path):
    plain = run(tmp_path / 'a')
    evaluated = run(tmp_path / 'b', evaluate=True, eval_interval=1, num_eval_episodes=2)
    for a, b in zip(parameters(plain), parameters(evaluated)):
        assert torch.equal(a, b)


def test_temporary_checkpoints_are_written_and_the_latest_two_kept(tmp_path, monkeypatch):
    monkeypatch.setattr('alfx.trainers.policy_trainer._TEMPORARY_CHECKPOINT_SECONDS', 0.0)
    monkeypatch.setattr('alfx.trainers.policy_trainer._TEMPORARY_CHECKPOINT_SHARE', 1e9)
    run(tmp_path, num_checkpoints=2)
    assert steps(tmp_path) == [6, 10, 11, 12]


def test_the_event_file_has_conf_networks_code_and_times(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run(tmp_path, code_snapshots=['algorithms/algorithm.py'], summarize_grads_and_vars=True)
    events = EventAccumulator(str(tmp_path / 'train'), size_guidance={'tensors': 0}).Reload()
    tags = events.Tags()
    for name in ('config/operative', 'networks/parameters', 'code/algorithms/algorithm.py'):
        assert f'{name}/text_summary' in tags['tensors']
    for name in ('Metrics/AverageReturn', 'Metrics/AverageEpisodeLength',
                 'loss', 'loss/policy', 'time/unroll', 'time/train', 'throughput/environment_steps_per_second',
                 'summarize_grads/global_grad_norm'):
        assert name in tags['scalars']
    assert tags['histograms']


def test_profile_is_written_and_its_path_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO, 'alfx')
    run(tmp_path, profiling=True)
    assert 'the profile is in ' in caplog.text
    assert 'train_iter' in (tmp_path / 'py_train.INFO').read_text()


# Same seed, resume ---------------------------------------------------------------------------------------------


def test_seeds_determine_the_parameters(tmp_path):
    first, second, other = (parameters(run(tmp_path / str(i), random_seed=seed)) for i, seed in enumerate((3, 3, 4)))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize('killed_at', [0, 3, 6, 11])
def test_a_killed_run_resumes_to_the_same_parameters_bit_for_bit(tmp_path, killed_at):
    uninterrupted = run(tmp_path / 'whole')
    run(tmp_path / 'killed', stop_after=killed_at)
    resumed = run(tmp_path / 'killed')
    assert resumed.current_iterations() == 12
    for a, b in zip(parameters(uninterrupted), parameters(resumed)):
        assert torch.equal(a, b)
    assert uninterrupted.current_env_steps() == resumed.current_env_steps()
    untimed = [{k: v for k, v in row.items() if k not in ('seconds', 'steps_per_second')}
               for row in table(tmp_path / 'whole')]
    assert untimed == [{k: v for k, v in row.items() if k not in ('seconds', 'steps_per_second')}
                       for row in table(tmp_path / 'killed')]


def test_event_files_have_no_duplicates_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    run(tmp_path, stop_after=6, evaluate=True, eval_interval=3, num_eval_episodes=2)
    run(tmp_path, evaluate=True, eval_interval=3, num_eval_episodes=2)
    for folder, tag in (('train', 'Metrics/EnvironmentSteps'), ('eval', 'Metrics/AverageReturn')):
        paths = sorted((tmp_path / folder).glob('*tfevents*'), key=lambda x: list(map(int, re.findall(r'\d+', x.name))))
        found = [event.step for path in paths
                 for event in EventFileLoader(str(path)).Load() for value in event.summary.value if value.tag == tag]
        assert found == sorted(set(found)) and len(found) >= 4
    assert [r['iteration'] for r in read_results(str(tmp_path))] == [3, 6, 9, 12]


def test_a_randomly_drawn_seed_is_reused_when_the_run_restarts(tmp_path):
    first = run(tmp_path, random_seed=None, stop_after=2)
    second = run(tmp_path, random_seed=None)
    assert first._config.random_seed == second._config.random_seed
    assert run(tmp_path / 'other', random_seed=None)._config.random_seed != first._config.random_seed


def test_a_run_is_resumed_with_its_seed_or_without_one(tmp_path):
    run(tmp_path, random_seed=3)
    assert run(tmp_path, random_seed=None)._config.random_seed == 3
    assert run(tmp_path, random_seed=3)._config.random_seed == 3
    with pytest.raises(gin_utils.ConfError, match='random_seed is 4, but the run in .* has 3\n.*another root_dir'):
        run(tmp_path, random_seed=4)


def test_threads_and_precision_are_kept_when_the_run_is_started_again(tmp_path):
    options = dict(num_threads=None, float32_matmul_precision=None)
    run(tmp_path, stop_after=5, **options)
    run_files.StartRecord(str(tmp_path)).write(tuning=[1, 'medium'])
    before = torch.get_float32_matmul_precision()
    try:
        resumed = run(tmp_path, **options)
        assert resumed._state.tuning == (1, 'highest', None)  # the value in the checkpoint
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_finished_run_that_is_started_again_does_nothing(tmp_path):
    before = parameters(run(tmp_path))
    rows = table(tmp_path)
    restarted = run(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(restarted)))
    assert table(tmp_path) == rows and steps(tmp_path) == [4, 8, 12]


def test_a_finished_run_can_be_made_longer(tmp_path):
    uninterrupted = run(tmp_path / 'whole', num_iterations=20, num_checkpoints=1)
    run(tmp_path / 'part', num_iterations=12, num_checkpoints=1)
    longer = run(tmp_path / 'part', num_iterations=20, num_checkpoints=1)
    assert all(torch.equal(a, b) for a, b in zip(parameters(uninterrupted), parameters(longer)))


def test_environments_whose_state_cannot_be_saved_start_new_episodes(tmp_path, caplog):
    class Forgetful(WalkTrainer):
        env_options = {'saves_state': False}

    with caplog.at_level(logging.INFO):
        run(tmp_path, Forgetful, stop_after=6)
        assert 'cannot be saved' in caplog.text
        resumed = run(tmp_path, Forgetful)
    assert 'new episodes start' in caplog.text
    assert resumed.current_iterations() == 12
    assert not any(name.endswith('.env') for name in os.listdir(run_files.checkpoint_dir(str(tmp_path))))


def test_a_damaged_checkpoint_loses_only_the_steps_since_the_previous_one(tmp_path):
    uninterrupted = run(tmp_path / 'whole')
    run(tmp_path / 'killed', stop_after=10)
    path = os.path.join(run_files.checkpoint_dir(str(tmp_path / 'killed')), 'ckpt-8')
    with open(path, 'r+b') as file:
        file.truncate(1000)
    resumed = run(tmp_path / 'killed')
    assert all(torch.equal(a, b) for a, b in zip(parameters(uninterrupted), parameters(resumed)))


def test_a_checkpoint_of_another_algorithm_is_rejected(tmp_path):
    class Larger(SmallPolicy):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self._critic = torch.nn.Linear(2, 1)

    run(tmp_path, stop_after=6)
    with pytest.raises(CheckpointError, match='_critic.weight'):
        run(tmp_path, algorithm_ctor=Larger)


# Other ends ----------------------------------------------------------------------------------------------------


class NanAtSix(SmallPolicy):
    """A policy whose seventh loss is NaN."""

    count = 0

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        self.count += 1
        return loss_info._replace(loss=loss_info.loss * float('nan')) if self.count == 7 else loss_info


def test_a_nan_loss_ends_the_run_after_a_checkpoint_of_the_good_state(tmp_path):
    with pytest.raises(NonFiniteLossError, match='loss'):
        run(tmp_path, algorithm_ctor=NanAtSix)
    assert steps(tmp_path) == [4, 6]
    state = read_checkpoint(os.path.join(run_files.checkpoint_dir(str(tmp_path)), 'ckpt-6'))['alg']
    assert all(bool(torch.isfinite(v).all()) for v in state.values() if isinstance(v, torch.Tensor))
    expected = parameters(run(tmp_path / 'expected', num_iterations=6))
    assert torch.equal(state['_net.0.weight'], expected[0])


class NanParametersAtSix(NanAtSix):
    """A policy whose parameters are NaN before its loss is."""

    def after_update(self, *args):
        super().after_update(*args)
        if self.count == 6:
            next(self.parameters()).data.fill_(float('nan'))


def test_no_checkpoint_is_written_of_parameters_that_are_nan(tmp_path, capsys):
    with pytest.raises(RuntimeError, match='nan'):
        run(tmp_path, algorithm_ctor=NanParametersAtSix)
    assert steps(tmp_path) == [4] and not os.path.exists(os.path.join(run_files.checkpoint_dir(str(tmp_path)), 'crash'))
    assert 'nothing is saved, because parameters are NaN or infinite' in ''.join(capsys.readouterr())


class BreaksAtSix(SmallPolicy):
    """A policy that raises an error in its seventh iteration."""

    count = 0
    error: Exception = ZeroDivisionError('broken')

    def train_iter(self):
        self.count += 1
        if self.count == 7:
            raise self.error
        return super().train_iter()


class LosesAtSix(BreaksAtSix):
    """A policy whose seventh iteration needs a process that is lost."""

    error = LostProcessError('rank 1', 'was killed by SIGKILL')


def test_a_crash_leaves_a_checkpoint_in_a_separate_folder(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, algorithm_ctor=BreaksAtSix)
    assert steps(tmp_path) == [4]
    folder = os.path.join(run_files.checkpoint_dir(str(tmp_path)), 'crash')
    assert Checkpointer(folder).steps() == [6]


def test_a_process_that_is_lost_at_the_start_of_a_run_leaves_no_checkpoint(tmp_path, monkeypatch):
    """Write nothing before the first iteration: while a run is resumed, its state may be loaded in part."""
    def lose(*args):
        raise LostProcessError('rank 1', 'was killed by SIGKILL')

    with monkeypatch.context() as patch, pytest.raises(LostProcessError):
        patch.setattr(Learner, 'iterate', lose)
        run(tmp_path)
    assert not os.path.exists(run_files.checkpoint_dir(str(tmp_path)))
    run(tmp_path, stop_after=6)
    saved = read_checkpoint(os.path.join(run_files.checkpoint_dir(str(tmp_path)), 'ckpt-4'))
    with monkeypatch.context() as patch, pytest.raises(LostProcessError):
        patch.setattr(RunState, 'resume_rollout', lose)
        run(tmp_path)
    assert sorted(os.listdir(run_files.checkpoint_dir(str(tmp_path)))) == ['ckpt-4', 'ckpt-4.env']
    after = read_checkpoint(os.path.join(run_files.checkpoint_dir(str(tmp_path)), 'ckpt-4'))
    assert after['trainer']['saved_at'] == saved['trainer']['saved_at']
    with pytest.raises(LostProcessError):
        run(tmp_path, algorithm_ctor=LosesAtSix)  # the seventh iteration after iteration 4
    assert steps(tmp_path) == [4, 8, 10]


def test_environments_are_closed_at_every_kind_of_end_of_a_run(tmp_path):
    trainer = WalkTrainer(make_config(tmp_path, algorithm_ctor=BreaksAtSix))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trainer._env.closed
    assert context.get_summary_writer() is None


def test_a_disk_that_is_full_ends_the_run_with_a_clear_error(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(files, '_sync_folder', full)
    with pytest.raises(CheckpointError, match='cannot be written: No space left on device'):
        run(tmp_path)


def sends(*numbers):
    """Return a trainer class that sends signals to its process at the end of iteration 5."""

    class Signalled(WalkTrainer):
        def _advance(self):
            super()._advance()
            if self._state.iteration == 5:
                for number in numbers:
                    os.kill(os.getpid(), number)

    return Signalled


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_ends_the_run_with_a_resumable_checkpoint(tmp_path, number, capsys):
    before = signal.getsignal(number)
    trainer = run(tmp_path / 'stopped', sends(number))
    assert trainer.stop_signal == number and trainer.current_iterations() == 5
    shown = capsys.readouterr().err
    assert 'stopping after this iteration' in shown and 'can be resumed' in shown
    assert steps(tmp_path / 'stopped') == [4, 5]
    assert signal.getsignal(number) is before
    resumed, uninterrupted = run(tmp_path / 'stopped'), run(tmp_path / 'whole')
    assert all(torch.equal(a, b) for a, b in zip(parameters(resumed), parameters(uninterrupted)))


class LoneRank(Ranks):
    """The first of several ranks; the others have no environments."""

    def __init__(self):
        super().__init__(0, 1, None, torch.device('cpu'))

    def all_reduce(self, tensor):
        """Do nothing, since no other rank contributes."""

    def gather_objects(self, value):
        return [value]

    def broadcast_from_rank0(self, value):
        return value

    def report(self, error):
        """Do nothing, since no other rank listens."""


def test_ranks_resume_with_their_common_progress(tmp_path):
    seen = []

    class Watching(WalkTrainer):
        def __init__(self, config):
            context.set_ranks(LoneRank())
            super().__init__(config, ddp_rank=0)

        def _train_iter(self):
            seen.append(context.get_all_progresses())
            super()._train_iter()

    settings = dict(num_iterations=0, num_env_steps=200)
    run(tmp_path / 'whole', Watching, **settings)
    uninterrupted, seen = seen, []
    run(tmp_path / 'killed', Watching, stop_after=6, **settings)
    resumed = run(tmp_path / 'killed', Watching, **settings)
    repeated = seen[7:]  # including the iteration after which it was killed
    assert repeated and repeated == uninterrupted[-len(repeated):] and repeated[0]['env_steps'] > 40
    assert resumed.progress() == 1.0


def test_a_hangup_that_is_ignored_as_under_nohup_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = run(tmp_path, sends(signal.SIGHUP))
        assert trainer.stop_signal is None and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_stops_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, sends(signal.SIGINT, signal.SIGINT))
    assert steps(tmp_path) == [4]


def test_a_signal_during_output_is_logged_without_the_stream_lock(tmp_path, monkeypatch):
    class Raw(io.FileIO):
        def write(self, data):
            if not sent:
                sent.append(os.kill(os.getpid(), signal.SIGTERM))
                signals.stop_signal  # the signal is handled in a call
            return super().write(data)

    sent = []
    path, signals = tmp_path / 'stderr', StopSignals()
    stream = io.TextIOWrapper(io.BufferedWriter(Raw(path, 'w')), write_through=True)
    monkeypatch.setattr(sys, 'stderr', stream)
    with signals.handled():
        stream.write('x' * 100000)
        stream.flush()
    assert signals.stop_signal == signal.SIGTERM and 'SIGTERM: writing a checkpoint' in path.read_text()


def test_disabled_signals_are_left_to_the_program():
    signals, before = StopSignals(), signal.getsignal(signal.SIGTERM)
    signals.disable()
    with signals.handled():
        assert signal.getsignal(signal.SIGTERM) is before


def test_sigusr1_requests_a_checkpoint_and_the_run_continues(tmp_path):
    run(tmp_path, sends(signal.SIGUSR1))
    assert steps(tmp_path) == [4, 5, 8, 12]


def test_a_run_killed_by_sigkill_resumes_to_the_same_parameters(tmp_path):
    """Send SIGUSR2, which dumps the stack, then SIGKILL; resume the run and compare."""
    folder = os.path.dirname(os.path.abspath(__file__))
    code = f'''
        import sys
        sys.path[:0] = {[folder, os.path.dirname(os.path.dirname(folder))]!r}
        import signal, torch
        torch.set_num_threads(1)
        from test_policy_trainer import make_config, sends
        sends(signal.SIGUSR2, signal.SIGKILL)(make_config({str(tmp_path / 'killed')!r})).train()
    '''
    result = subprocess.run([sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert result.returncode == -signal.SIGKILL
    assert '_advance' in result.stderr
    assert steps(tmp_path / 'killed') == [4]
    resumed, uninterrupted = run(tmp_path / 'killed'), run(tmp_path / 'whole')
    assert all(torch.equal(a, b) for a, b in zip(parameters(resumed), parameters(uninterrupted)))


# Supervised ----------------------------------------------------------------------------------------------------


def supervised(root_dir, **values):
    context.reset()
    trainer = SLTrainer(TrainerConfig(**{**dict(
        root_dir=str(root_dir), ml_type='sl', algorithm_ctor=SmallRegression, random_seed=1, num_iterations=60,
        num_checkpoints=3, evaluate=True, eval_interval=20, summary_interval=10, num_threads=1,
        float32_matmul_precision='highest'), **values}))
    trainer.train()
    return trainer


def test_supervised_training_learns_evaluates_and_saves(tmp_path):
    trainer = supervised(tmp_path)
    net = trainer.algorithm._net
    assert float(net.weight.detach()) == pytest.approx(3, abs=0.3)
    assert float(net.bias.detach()) == pytest.approx(1, abs=0.3)
    assert steps(tmp_path) == [20, 40, 60]
    assert float(table(tmp_path)[-1]['scalar_loss']) < float(table(tmp_path)[0]['scalar_loss'])
    assert list((tmp_path / 'eval').glob('*tfevents*'))


def test_supervised_training_resumes_exactly(tmp_path):
    uninterrupted = supervised(tmp_path / 'whole', num_iterations=60)
    supervised(tmp_path / 'part', num_iterations=30)
    assert all(torch.equal(a, b) for a, b in zip(parameters(uninterrupted), parameters(supervised(tmp_path / 'part'))))


def test_supervised_evaluation_needs_an_algorithm_that_evaluates(tmp_path):
    class NoEvaluation(SmallRegression):
        evaluate = None

    with pytest.raises(ValueError, match='NoEvaluation has no evaluate'):
        supervised(tmp_path, algorithm_ctor=NoEvaluation)


def test_a_rank_started_by_hand_is_rejected_with_the_right_command(tmp_path, monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    with pytest.raises(RuntimeError, match='torchrun'):
        RLTrainer(make_config(tmp_path), ddp_rank=0)


def test_a_loss_info_without_extra_has_a_row_as_well(tmp_path):
    class Bare(SmallPolicy):
        def calc_loss(self, info):
            return LossInfo(loss=super().calc_loss(info).loss)

    run(tmp_path, algorithm_ctor=Bare)
    assert 'loss' in table(tmp_path)[0] and 'loss/policy' not in table(tmp_path)[0]


# Two runs in one folder -----------------------------------------------------------------------------------------


def test_a_library_trainer_locks_its_folder_while_it_trains(tmp_path):
    trainer, seen = WalkTrainer(make_config(tmp_path)), []
    train_iter = trainer._train_iter

    def check_lock():
        with open(tmp_path / 'train.lock') as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append(file.read())
        train_iter()

    trainer._train_iter = check_lock
    trainer.train()
    assert seen and all(f'process {os.getpid()} ' in text for text in seen)
    with run_lock.held(str(tmp_path)):  # alfx.bin.train holds the lock as well
        run(tmp_path, num_iterations=14)


def test_a_library_trainer_does_not_train_in_the_folder_of_another(tmp_path):
    holder = ('import sys; from alfx.runs import run_lock\n'
              "with run_lock.held(sys.argv[1]): print('held', flush=True), input()")
    with subprocess.Popen([sys.executable, '-c', holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout.readline() == 'held\n'
        with pytest.raises(gin_utils.ConfError, match=f'another process is training in .*process {process.pid} '):
            run(tmp_path)
        process.communicate('\n')
    assert not steps(tmp_path)


def test_a_longer_run_keeps_schedules_that_still_have_an_effect(tmp_path, monkeypatch):
    trainer = run(tmp_path, num_iterations=4)
    values = {0.0: {'Adam.lr': 1e-3, 'X.rate': 1.0, 'X.clip': 0.0},
              0.75: {'Adam.lr': 1e-5, 'X.rate': 0.04, 'X.clip': 0.5}}
    monkeypatch.setattr('alfx.trainers.policy_trainer.values_over_percent', values.__getitem__)
    assert trainer.last_scheduled_values() == {'X.rate': 0.04, 'X.clip': 0.5}
