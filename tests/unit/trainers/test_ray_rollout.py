"""Rollout workers on Ray: the same steps as locally, correct replacement of workers, bounded memory."""
import logging
import os
import pathlib
import re
import signal
import sys
import time

import numpy as np
import pytest
import torch
from helpers import warm_starts
from helpers.unroll_fakes import SAMPLED, Writer, children_of, is_running, make_algorithm, run_folder, wait_for

from alfx import StepType, context, gin_utils, nest, summary
from alfx.algorithms.config import TrainerConfig
from alfx.gin_utils import ConfError
from alfx.runs import building
from alfx.runs.playing import play
from alfx.trainers.acting import ray_cluster
from alfx.trainers.acting import ray_rollout
from alfx.trainers.acting import unroll_sources as acting
from alfx.utils.checkpoint_utils import Checkpointer
from alfx.utils.processes import LostProcessError

pytestmark = pytest.mark.processes

pytest.importorskip('ray')
ON_RAY = ('TrainerConfig.async_unroll=False', 'Steering.counts=False')


@pytest.fixture(scope='module')
def cluster():
    """Start one cluster for all tests."""
    connection = ray_cluster.connect('tests', 'local', num_cpus=2)
    yield connection
    connection.close()


@pytest.fixture
def make(cluster, tmp_path, monkeypatch):
    """Create the learner's algorithm and a source of steps; close it and check that no worker remains."""
    sources = []

    def make_one(*params, workers=1):
        config = run_folder(tmp_path, monkeypatch, *ON_RAY, f'TrainerConfig.num_ray_workers={workers}', *params)
        algorithm = make_algorithm(config, acting.create_environment(config))
        sources.append(acting.start(algorithm, config))
        return algorithm, sources[-1]

    yield make_one
    for source in sources:
        pids = source.worker_pids
        source.close()
        source.close()
        wait_for(lambda pids=pids: not any(pid and is_running(pid) for pid in pids))


def assert_same(a, b):
    assert nest.structure(a) == nest.structure(b)
    for (path, x), y in zip(nest.flatten_with_path(a), nest.flatten(b)):
        assert x.dtype == y.dtype and torch.equal(x, y), path


def test_unrolls_and_metrics_of_one_worker_match_a_local_run(make, tmp_path, monkeypatch):
    """Compare unrolls with recurrent states, random actions, a stateful data transformer and a bootstrap step."""
    params = ('Steering.recurrent=True', 'TrainerConfig.use_rollout_state=True',
              'TrainerConfig.data_transformer_ctor=@ObservationNormalizer',
              "ObservationNormalizer.update_mode='rollout'", 'TrainerConfig.unroll_queue_size=7')
    local = make_algorithm(run_folder(tmp_path, monkeypatch, *ON_RAY, 'TrainerConfig.num_ray_workers=1', *params))
    expected = [local.unroll(length) for length in (5, 1, 9, 5)]  # one is longer than the queue
    algorithm, _ = make(*params, 'TrainerConfig.unroll_parameter_update_period=1')
    for unrolled in expected:
        assert_same(unrolled, algorithm.unroll(unrolled.time_step.step_type.shape[0] - 1))
    for a, b in zip(local.get_metrics(), algorithm.get_metrics()):
        assert_same(a.result(), b.result())


def test_two_workers_run_concurrently_and_one_is_killed(make, caplog):
    """Check seeds, weights, logs, summaries, statistics, bounds and the seam at once, since workers start slowly."""
    caplog.set_level(logging.INFO)
    algorithm, source = make(*SAMPLED, 'TrainerConfig.unroll_queue_size=8', 'Steering.talks=True',
                             'Steering.counts=True', 'create_environment.num_parallel_environments=2', workers=2)
    source.request_summaries(17)
    context.update_progress('percent', 0.25)
    source.update_parameter(algorithm)
    writer = Writer()
    with summary.push_summary_writer(writer):
        experience, env_steps, _ = source.gather(4)
    assert experience.time_step.env_id.tolist() == [[0, 1, 2, 3]] * 4
    assert experience.rollout_info['percent'].tolist() == [[0.25] * 4] * 4
    first = experience.time_step.observation[0]
    assert len({tuple(x) for x in first.tolist()}) == 4  # every environment has its own random numbers
    assert ('steering/action', 17) in writer.written
    assert any('rollout worker 1: steering at' in record.getMessage() for record in caplog.records)
    source.take_statistics(algorithm)
    assert int(algorithm.seen) >= 2 * 4
    source.gather(4)
    assert algorithm.environment.latest_final_infos()[:4] == [{'length': 6.0}] * 4  # of both workers

    with torch.no_grad():
        for parameter in algorithm.parameters():
            parameter.fill_(0.0)
    for worker in source._workers:
        source._ray.wait(list(worker.answers), num_returns=len(worker.answers), timeout=60)  # what ran ahead
    source.update_parameter(algorithm)
    actions = source.gather(24).experience.action[..., 0]
    old = (actions != 0).sum(0)
    assert bool((old <= 1 + 8).all()) and bool((old >= 1).all())  # one step is held back, the others are queued
    for b in range(4):
        assert bool((actions[int(old[b]):, b] == 0).all())

    time.sleep(0.2)  # a slow learner
    assert all(worker.ahead <= 8 + 1 for worker in source._workers)
    check_the_seam(algorithm, source, caplog)


def check_the_seam(algorithm, source, caplog):
    """Kill worker 1 and check the steps before and after, which pass through the unroll of the algorithm."""
    pids = source.worker_pids
    episodes = int(algorithm.get_step_metrics()[1].result())
    os.kill(pids[1], signal.SIGKILL)
    types, own_types, bootstrap_types = [], [], []
    while source.worker_pids[1] in (None, pids[1]) or len(types) < 40:
        experience, env_steps, _ = algorithm.learner.collector.remote.unroll(algorithm, 4, at_least=4, bootstrap=True)
        algorithm._metrics.observe(env_steps)
        assert not types or experience.time_step.step_type[0].tolist() == bootstrap_types
        # the next unroll starts with the bootstrap step
        *steps, bootstrap_types = experience.time_step.step_type.tolist()
        types += steps
        own_types += env_steps.step_type.tolist()
        assert bool((experience.time_step.discount == 1).all())
        assert len(types) < 10000
    assert source.worker_pids[0] == pids[0]
    columns, own = np.array(types).T, np.array(own_types).T
    assert (columns[:2] == own[:2]).all() and (columns[2] == columns[3]).all() and (own[2] == own[3]).all()
    seam = np.flatnonzero(columns[2] != own[2])
    assert len(seam) <= 1  # none if an episode happened to end there
    for b, column in enumerate(columns):  # an episode starts only after a LAST step
        assert ((column[:-1] == StepType.LAST)[column[1:] == StepType.FIRST]).all()
        begins = [t + 1 for t in np.flatnonzero(column[:-1] == StepType.LAST) if b < 2 or t + 1 not in seam]
        assert (column[begins] == StepType.FIRST).all()
    assert int(algorithm.get_step_metrics()[1].result()) - episodes == (own == StepType.LAST).sum()
    length = float(dict((metric.name, metric.result()) for metric in algorithm.get_metrics())['AverageEpisodeLength'])
    assert length <= 5  # six time steps; two joined episodes would be longer
    assert any(f'pid {pids[1]}' in record.getMessage() and 'a new worker replaces it' in record.getMessage()
               for record in caplog.records)


def test_an_error_of_an_environment_ends_the_run_with_its_traceback(make):
    algorithm, source = make(*SAMPLED, "load_drift.fault='raise'", 'load_drift.fault_at=9')
    source.update_parameter(algorithm)
    assert source.gather(5).env_steps.step_type.shape == (5, 3)  # the steps before it
    with pytest.raises(LostProcessError, match=r'rollout worker 0 \(pid \d+ on \S+\) raised an error') as caught:
        source.gather(10)
    assert 'ArithmeticError: the drift has no end' in caught.value.log_tail
    assert 'unroll_fakes.py' in caught.value.log_tail and '\x1b' not in str(caught.value)


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_ends_the_run(make, caplog):
    algorithm, source = make(*SAMPLED, "load_drift.fault='kill'", 'load_drift.fault_at=3')
    source.update_parameter(algorithm)
    with pytest.raises(LostProcessError, match='rollout worker 0 .* died without delivering a step') as caught:
        source.gather(10)
    assert 'worker process has died' in caught.value.log_tail
    assert len([r for r in caplog.records if 'worker replaces it' in r.getMessage()]) == ray_rollout.MAX_DEATHS - 1


# Whole runs ----------------------------------------------------------------------------------------------------

RUN_SECONDS = 150
END_SECONDS = 120  # Ray's agents check their cluster once a minute, unless they are ended before


def is_agent_of_ray(pid):
    command = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
    return command.startswith(b'ray::') and b'Agent' in command


def train(root_dir, *params):
    """Start a run in a separate cluster."""
    command = [sys.executable, '-m', 'alfx.bin.train', '--conf', f'{root_dir}/given.gin', '--root_dir',
               f'{root_dir}/run']
    for param in ('TrainerConfig.async_unroll=False', 'TrainerConfig.num_ray_workers=2',
                  "TrainerConfig.ray_address='local'", 'TrainerConfig.evaluate=True',
                  'TrainerConfig.num_eval_episodes=2', *params):
        command += ['--conf_param', param]
    with open(root_dir / 'output', 'a') as output:
        return warm_starts.Popen(command, stdout=output, stderr=output, start_new_session=True)


def descendants(pid):
    """Return all descendants of a process."""
    found, new = set(), {pid}
    while new:
        new = {child for parent in new for child in children_of(parent)} - found
        found |= new
    return found


@pytest.fixture(scope='session')
def ending_processes():
    """Collect processes that must have ended after all other tests, so that no test waits for them."""
    processes = set()
    yield processes
    wait_for(lambda: not any(map(is_running, processes)), END_SECONDS)


@pytest.mark.slow
def test_a_ray_run_replaces_workers_resumes_evaluates_and_plays(tmp_path, monkeypatch, ending_processes):
    """Replace a killed worker, end with the learner, resume, evaluate and play a run with Ray workers."""
    run_folder(tmp_path, monkeypatch)
    log, process = tmp_path / 'run' / 'train.log', None

    def log_text():
        return log.read_text() if log.is_file() else ''

    try:
        process = train(tmp_path, 'TrainerConfig.num_iterations=1000000', 'TrainerConfig.evaluate=False')
        wait_for(lambda: len(re.findall(r'rollout worker \d .* has started', log_text())) == 2, RUN_SECONDS)
        pid = int(re.search(r'rollout worker 1 \(pid (\d+)', log_text())[1])
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(re.findall('rollout worker 1 .* has started', log_text())) == 2, RUN_SECONDS)
        assert f'rollout worker 1 (pid {pid}' in log_text() and 'a new worker replaces it' in log_text()
        process.send_signal(signal.SIGUSR1)
        written = Checkpointer(tmp_path / 'run' / 'train' / 'algorithm')  # ignores a checkpoint in progress
        wait_for(written.steps, RUN_SECONDS)
        children = descendants(process.pid)
        assert len(children) >= 4  # two servers, two workers
        own = children - {pid for pid in children if is_agent_of_ray(pid)}
        assert len(own) >= 4
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(is_running, own)), 20)
        ending_processes |= children  # agents of Ray notice late
        saved = written.steps()[-1]
        process = train(tmp_path, f'TrainerConfig.num_iterations={saved + 20}')
        children = set()
        while process.poll() is None:
            children |= descendants(process.pid)
            time.sleep(0.2)
        output = (tmp_path / 'output').read_text()
        assert process.returncode == 0, output
        assert f'done: {saved + 20:,} iterations, evaluation return' in output
        wait_for(lambda: not any(map(is_running, children)), 20)
        assert 'has not been used' not in log_text()
    finally:
        if process is not None and process.poll() is None:
            process.kill()
    with gin_utils.loaded(None, [], str(tmp_path / 'run'), same_run=False):
        config = TrainerConfig(root_dir=str(tmp_path / 'run'))
        config.random_seed = 0
        env = building.create_eval_environment(config, 1)
        result = play(config.root_dir, env, building.create_algorithm(config, env, trains=False), num_episodes=1,
                      render=False)
        assert result.lengths == [5]


# Without actors ------------------------------------------------------------------------------------------------


def delivery(first, count, environments=2):
    """Return steps with numbers from ``first`` on."""
    numbers = np.arange(first, first + count)[:, None] + 100 * np.arange(environments)
    tree = {'experience': {'time_step': {'step_type': numbers, 'reward': numbers + 0.5}},
            'env_steps': {'step_type': numbers}, 'inputs': None}
    leaves, structure = nest.flatten_with_structure(tree)
    return ray_rollout.Delivery(leaves, structure, None, [], [], [])


def test_a_stream_can_be_read_in_chunks_of_another_size():
    streams = [ray_rollout._Stream(), ray_rollout._Stream()]
    for first, count in ((0, 3), (3, 4), (7, 1), (8, 3)):
        streams[0].add(delivery(first, count))
    streams[1].add(delivery(1000, 11))
    seen = []
    for count in (1, 6, 3):
        leaves = ray_rollout._concatenate([list(stream.take(count)) for stream in streams], 2)
        steps = nest.unflatten(streams[0].structure, leaves)
        assert steps['inputs'] is None and torch.equal(
            steps['experience']['time_step']['reward'], steps['env_steps']['step_type'] + 0.5)
        seen += steps['env_steps']['step_type'].tolist()
    assert seen == [[t, t + 100, 1000 + t, 1100 + t] for t in range(10)]
    assert [stream.steps for stream in streams] == [1, 1]


def test_the_newest_step_is_last_for_the_learner_but_not_for_the_metrics():
    stream = ray_rollout._Stream()
    stream.end_episode()  # no steps have arrived yet
    sent = delivery(5, 3)
    stream.add(sent)
    stream.end_episode()
    steps = nest.unflatten(stream.structure, next(stream.take(3)))
    assert steps['experience']['time_step']['step_type'].tolist() == [[5, 105], [6, 106], [StepType.LAST] * 2]
    assert steps['env_steps']['step_type'].tolist() == [[5, 105], [6, 106], [7, 107]]
    assert nest.unflatten(sent.structure, sent.leaves)['experience']['time_step']['step_type'].max() == 107


@pytest.mark.parametrize('address, message', [
    ('ray://127.0.0.1:10001', 'machine of the cluster'), ('127.0.0.1:1', 'no Ray cluster answers')])
def test_an_address_without_a_cluster_is_rejected_by_name(monkeypatch, address, message):
    import ray
    monkeypatch.setattr(ray, 'is_initialized', lambda: False)
    if '//' not in address:
        def refuse(**kwargs):
            raise ConnectionError('nobody answers')
        monkeypatch.setattr(ray, 'init', refuse)
    with pytest.raises(ConfError, match=message) as caught:
        ray_cluster.connect('this', address)
    assert address in str(caught.value)


def test_without_the_extra_the_option_is_rejected_by_its_name(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *ON_RAY, *SAMPLED, 'TrainerConfig.num_ray_workers=2')
    algorithm = make_algorithm(config, acting.create_environment(config))
    assert algorithm.environment.batch_size == 2 * 3
    monkeypatch.setitem(sys.modules, 'ray', None)
    with pytest.raises(ConfError, match=r"num_ray_workers = 2 needs Ray(.|\n)*pip install 'ray>="):
        acting.check(algorithm, config)


def test_on_policy_algorithms_are_rejected_before_anything_starts(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *ON_RAY, 'Steering.on_policy=True', 'TrainerConfig.num_ray_workers=2')
    algorithm = make_algorithm(config, acting.create_environment(config))
    for refuse in (acting.check, ray_rollout.RayRollout):
        with pytest.raises(ConfError, match='num_ray_workers = 2: Steering is on-policy(.|\n)*ImpalaAlgorithm'):
            refuse(algorithm, config)


def test_a_run_without_a_conf_in_its_folder_is_rejected(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *ON_RAY, *SAMPLED, 'TrainerConfig.num_ray_workers=1')
    os.unlink(tmp_path / 'conf' / 'config.gin')
    with pytest.raises(ConfError, match='config.gin(.|\n)*write_conf'):
        ray_rollout.RayRollout(make_algorithm(config, acting.create_environment(config)), config)
