"""Asynchronous actors take the same steps as local ones, lose none, and leave no process behind."""
import logging
import os
import signal
import time

import pytest
import torch
from helpers.unroll_fakes import SAMPLED, Writer, is_running, make_algorithm, run_folder, wait_for

from alfx import context, nest, summary
from alfx.algorithms.async_unroller import AsyncUnroller, UnrollJob, UnrollResult
from alfx.engine.remote.remote_unroll import ActingStatistics
from alfx.environments.utils import create_environment
from alfx.gin_utils import ConfError
from alfx.trainers.acting import unroll_sources as acting
from alfx.utils.processes import LostProcessError

pytestmark = pytest.mark.processes


@pytest.fixture
def start():
    """Start an unroller; close it after the test and check that its process has ended."""
    unrollers = []

    def start_one(config, algorithm):
        unrollers.append(AsyncUnroller(algorithm, config))
        return unrollers[-1]

    yield start_one
    for unroller in unrollers:
        process = unroller._process
        unroller.close()
        unroller.close()
        assert process is None or not is_running(process.pid)


def learner(config):
    return make_algorithm(config, create_environment(only_described=True))


def assert_same(a, b):
    assert nest.structure(a) == nest.structure(b)
    for (path, x), y in zip(nest.flatten_with_path(a), nest.flatten(b)):
        assert x.dtype == y.dtype and torch.equal(x, y), path


def test_unrolls_and_metrics_match_a_local_run_bit_for_bit(tmp_path, monkeypatch, start):
    """Compare unrolls of a recurrent algorithm with stored states, a stateful data transformer and a bootstrap step."""
    config = run_folder(tmp_path, monkeypatch, 'Steering.recurrent=True', 'Steering.counts=False',
                        'TrainerConfig.use_rollout_state=True', 'TrainerConfig.unroll_queue_size=7',
                        'TrainerConfig.data_transformer_ctor=@ObservationNormalizer',
                        "ObservationNormalizer.update_mode='rollout'", 'TrainerConfig.unroll_parameter_update_period=1')
    local = make_algorithm(config)
    expected = [local.unroll(length) for length in (5, 1, 9, 5)]  # one is longer than the queue
    algorithm = learner(config)
    algorithm.learner.collector.use_source(start(config, algorithm), 1)
    for unrolled in expected:
        assert_same(unrolled, algorithm.unroll(unrolled.time_step.step_type.shape[0] - 1))
    for a, b in zip(local.get_metrics(), algorithm.get_metrics()):
        assert_same(a.result(), b.result())


def start_unrolls(tmp_path, monkeypatch, start, *bindings):
    """Return a learner, and an unroller whose process has the learner's weights."""
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, *bindings)
    algorithm = learner(config)
    unroller = start(config, algorithm)
    unroller.update_parameter(algorithm)
    return algorithm, unroller


def test_results_of_single_steps_statistics_summaries_and_logs(tmp_path, monkeypatch, start, caplog):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'TrainerConfig.unroll_queue_size=4', 'Steering.talks=True')
    local, algorithm = make_algorithm(config), learner(config)
    unroller = start(config, algorithm)
    assert unroller.gather_unroll_results(0, 5) == []  # no weights, no steps
    unroller.request_summaries(17)
    context.update_progress('percent', 0.25)
    unroller.update_parameter(algorithm)
    writer = Writer()
    with caplog.at_level(logging.INFO), summary.push_summary_writer(writer):
        results = unroller.gather_unroll_results(6, 0)
        experience = local.unroll(6)
        assert_same(nest.stack([r.time_step for r in results]), experience.time_step)
        assert_same(nest.stack([r.policy_step.output for r in results]), experience.action)
        assert all(type(r) is UnrollResult and r.step_time >= r.env_step_time > 0 for r in results)
        assert [r.policy_step.info['percent'].tolist() for r in results] == [[0.25] * 3] * 6
        wait_for(lambda: unroller._channel.ring._filled.get_value() == 4)  # it is full: the process waits
        assert len(unroller.gather_unroll_results(0, 3)) == 3 >= len(unroller.gather_unroll_results(0, 3)) >= 1
        unroller.take_statistics(algorithm)
    assert int(algorithm.seen) >= 3 * 10
    assert all(bool(value.abs().sum() > 0) for value in algorithm._normalizer.state_dict().values())
    assert ('steering/action', 17) in writer.written
    assert any('unroll process: steering at' in record.getMessage() for record in caplog.records)
    unroller._listen()
    assert algorithm.environment.latest_final_infos()[:3] == [{'length': 6.0}] * 3  # of the first episodes, of 6 steps


def test_new_weights_reach_the_steps_which_keep_their_interval(tmp_path, monkeypatch, start):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'TrainerConfig.unroll_queue_size=2', 'Steering.counts=False',
                        'TrainerConfig.unroll_step_interval=0.03')
    algorithm = learner(config)
    unroller = start(config, algorithm)
    unroller.update_parameter(algorithm)
    unroller.gather(3)
    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter.fill_(0.0)
    unroller.update_parameter(algorithm)
    started = time.monotonic()
    actions = unroller.gather(12).experience.action[..., 0]
    assert time.monotonic() - started > 0.03 * 8  # two may have been queued, one may have been in progress
    old = int((actions != 0).any(1).sum())
    assert old <= 3 and bool((actions[old:] == 0).all())  # those in the queue, and the step in progress
    with pytest.raises(ValueError, match='another one'):
        unroller.update_parameter(learner(config))


def test_the_queue_is_bounded_and_killed_processes_are_reported(tmp_path, monkeypatch, start):
    """Bound memory by the queue; raise an error with the log tail of a killed process."""
    algorithm, unroller = start_unrolls(tmp_path, monkeypatch, start, 'TrainerConfig.unroll_queue_size=5',
                                        'Steering.talks=True')
    ring = unroller._channel.ring
    size = ring.nbytes
    unroller.gather(50)
    wait_for(lambda: ring._filled.get_value() == 5)
    time.sleep(0.5)  # simulate a slow learner
    assert ring._filled.get_value() == 5 and ring.nbytes == size < 5 * 3 * 200 + 64 * 30
    assert unroller.gather(7).env_steps.step_type.shape == (7, 3)
    pid = unroller._process.pid
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(LostProcessError, match='killed by SIGKILL') as caught:
        while True:
            unroller.gather(1)
    assert time.monotonic() - started < 30
    assert f'pid {pid}' in str(caught.value) and 'steering at' in caught.value.log_tail
    with pytest.raises(LostProcessError):
        unroller.update_parameter(algorithm)


def test_a_process_that_waits_for_its_interval_ends_in_order(tmp_path, monkeypatch, start):
    _, unroller = start_unrolls(tmp_path, monkeypatch, start, 'TrainerConfig.unroll_step_interval=600')
    unroller.gather(1)
    process, ring = unroller._process, unroller._channel.ring
    wait_for(lambda: ring._free.get_value() == ring.size - 1)  # it is about to take the next step
    time.sleep(0.5)
    unroller.close()
    assert process.exitcode == 0


def test_signals_to_all_processes_of_a_run_are_left_to_the_learner(tmp_path, monkeypatch, start):
    _, unroller = start_unrolls(tmp_path, monkeypatch, start, 'TrainerConfig.unroll_queue_size=2')
    unroller.gather(1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(unroller._process.pid, number)
    unroller.gather(20)


def test_replaced_buffers_reach_the_process_with_its_statistics(tmp_path, monkeypatch, start, caplog):
    """Send buffers that training replaces to the process, and return its statistics to the learner."""
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'TrainerConfig.unroll_queue_size=2', 'Steering.counts=False',
                        'Steering.talks=True')
    algorithm = learner(config)
    unroller = start(config, algorithm)
    algorithm.seen = torch.tensor(100)
    unroller.update_parameter(algorithm)
    with caplog.at_level(logging.INFO):
        unroller.gather(5)
        wait_for(lambda: unroller._listen() or 'unroll process: steering at 100' in caplog.messages)
    statistics = ActingStatistics(algorithm)
    algorithm.seen = torch.tensor(200)
    statistics.write({'seen': torch.tensor(7)})
    assert int(algorithm.seen) == 7


def test_an_error_of_its_environment_is_reported_with_its_traceback(tmp_path, monkeypatch, start, capfd):
    _, unroller = start_unrolls(tmp_path, monkeypatch, start, "load_drift.fault='raise'", 'load_drift.fault_at=4')
    with pytest.raises(LostProcessError, match='exit code 1') as caught:
        unroller.gather(100)
    log_tail = caught.value.log_tail
    assert 'ArithmeticError: the drift has no end' in log_tail and 'unroll_fakes.py' in log_tail
    assert 'Traceback' not in capfd.readouterr().err  # the error is reported once


def test_a_process_busy_in_its_environment_is_killed(tmp_path, monkeypatch, start):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'load_drift.seconds=60')
    monkeypatch.setattr('alfx.utils.processes.GRACE_SECONDS', 0.5)
    algorithm = learner(config)
    unroller = start(config, algorithm)
    unroller.update_parameter(algorithm)
    wait_for(lambda: unroller.gather_unroll_results(0, 1) == [] and unroller.is_ready)
    time.sleep(0.5)
    process, started = unroller._process, time.monotonic()
    unroller.close()
    assert not is_running(process.pid) and time.monotonic() - started < 20
    with pytest.raises(LostProcessError, match='closed'):
        unroller.gather(1)


def test_on_policy_algorithms_are_rejected_before_anything_starts(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, 'Steering.on_policy=True')
    algorithm = learner(config)
    with pytest.raises(ConfError, match='async_unroll = True: Steering is on-policy(.|\n)*ImpalaAlgorithm'):
        AsyncUnroller(algorithm, config)
    with pytest.raises(ConfError, match='async_unroll'):
        acting.check(algorithm, config)


def test_a_run_without_a_conf_in_its_folder_is_rejected(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED)
    os.unlink(tmp_path / 'conf' / 'config.gin')
    with pytest.raises(ConfError, match='config.gin(.|\n)*write_conf'):
        AsyncUnroller(learner(config), config)


def test_a_queue_that_does_not_fit_into_shared_memory_is_rejected(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'TrainerConfig.unroll_queue_size=100000000000')
    with pytest.raises(ConfError, match='unroll_queue_size'):
        AsyncUnroller(learner(config), config)


def test_jobs_are_plain_tuples():
    assert UnrollJob('stop') == ('stop', None, None, None)
    assert UnrollJob('update_parameter', {}, 3, {})._fields == ('type', 'step_metrics', 'global_counter', 'state_dict')
