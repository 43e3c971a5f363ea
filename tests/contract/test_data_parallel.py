"""Several ranks give the results of one process with the whole batch, and all of them end together."""
import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import warm_starts

from alfx.utils.checkpoint_utils import read_checkpoint

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / 'tests' / 'helpers' / 'rank_program.py'
TIMEOUT = 240  # seconds for each wait, because the machine may be busy
COMMON = ('create_environment.num_parallel_environments=4', 'create_environment.nonparallel=True',
          'TrainerConfig.num_env_steps=0', 'TrainerConfig.evaluate=False', 'TrainerConfig.random_seed=5',
          'TrainerConfig.ddp_paras_check_interval=1', 'TrainerConfig.float32_matmul_precision="highest"')
NUMBERS = {  # 61 updates, the last ones replayed from a traced graph, twice; 60 updates
    'sac_pendulum': ('TrainerConfig.num_iterations=70', 'TrainerConfig.initial_collect_steps=40',
                     'TrainerConfig.mini_batch_size=32', 'TrainerConfig.unroll_length=1'),
    # smooth: a ReLU at its kink is on for one order of a sum and off for another, which Adam makes a whole step of;
    # multipliers that stay small, as they add up roundings
    'mpo_pendulum': ('TrainerConfig.num_iterations=70', 'TrainerConfig.initial_collect_steps=40',
                     'TrainerConfig.mini_batch_size=32', 'TrainerConfig.unroll_length=1',
                     'CriticNetwork.activation=@torch.tanh', 'ActorDistributionNetwork.activation=@torch.tanh',
                     'TrainerConfig.random_seed=7'),
    'ppo_pendulum': ('TrainerConfig.num_iterations=6', 'TrainerConfig.mini_batch_size=32',
                     'TrainerConfig.unroll_length=40', 'TrainerConfig.num_updates_per_train_iter=2'),
    'ppg_cart_pole': ('create_environment.env_name="Pendulum-v1"', 'TrainerConfig.num_iterations=4',
                      'TrainerConfig.mini_batch_size=32', 'TrainerConfig.unroll_length=40',
                      'TrainerConfig.num_updates_per_train_iter=2', 'PPGAuxOptions.interval=2',
                      'PPGAuxOptions.mini_batch_size=32'),  # two phases of 60 updates
}
SHORT = (*COMMON, 'TrainerConfig.unroll_length=16', 'TrainerConfig.mini_batch_size=32',
         'TrainerConfig.num_updates_per_train_iter=2', 'TrainerConfig.summary_interval=1',
         'TrainerConfig.num_summaries=None', 'TrainerConfig.num_threads=1')


def environment(**more):
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', **more}


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def wait_for(processes):
    """Wait until all processes have ended successfully."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), '\n'.join(outputs)


def train_parts(folder, conf, num_ranks):
    """Return the tensors of each rank after training with the random numbers of one process."""
    out, port, processes = folder / f'out-{num_ranks}', free_port(), []
    request = json.dumps(dict(conf=conf, params=[*COMMON, *NUMBERS[conf]], root_dir=str(folder / f'run-{num_ranks}'),
                              out=str(out), halves=2))
    for rank in range(num_ranks):
        variables = {} if num_ranks == 1 else dict(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR='127.0.0.1',
                                                   MASTER_PORT=str(port))
        processes.append(warm_starts.Popen([sys.executable, str(PROGRAM), request], env=environment(**variables),
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    wait_for(processes)
    return [torch.load(f'{out}.{rank}') for rank in range(num_ranks)]


@pytest.mark.slow
@pytest.mark.parametrize('conf', NUMBERS)
def test_two_ranks_with_half_batches_match_one_process(tmp_path, conf):
    """PPO clips by the global norm and normalizes advantages, over the whole batch; see
    tests/helpers/rank_program.py for how the random numbers are kept the same."""
    single, = train_parts(tmp_path, conf, 1)
    first, second = train_parts(tmp_path, conf, 2)
    trained = [name for name in single if not name.startswith('_metrics.')]
    assert len(trained) > 10
    for name in trained:
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], single[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f'{n}: {m}')
    steps = '_metrics.0.count'
    assert single[steps] == first[steps] + second[steps] > 0


LEAVES = """
import os, sys, torch
from alfx.engine.remote import data_parallel
ranks = data_parallel.join(torch.device('cpu'))
threads = lambda: [open(f'/proc/self/task/{t}/comm').read().strip() for t in os.listdir('/proc/self/task')]
joined = threads()
ranks.mean(torch.ones(3))
assert 'torch._dynamo' not in sys.modules
import torch._dynamo  # imports what would keep the group
sys.setswitchinterval(1000)  # the threads let go of what they exchanged when this one waits for something, not before
ranks.all_reduce(torch.ones(3))
data_parallel.leave()
assert not any('gloo' in name for name in threads()) and len(threads()) <= len(joined) - 3, (joined, threads())
"""


@pytest.mark.slow
def test_a_rank_that_has_exited_has_no_communication_threads():
    """A thread that still runs while Python exits could abort the process."""
    variables, processes = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free_port())), []
    for rank in range(2):
        processes.append(warm_starts.Popen([sys.executable, '-c', LEAVES], env=environment(RANK=str(rank), **variables),
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    wait_for(processes)


# Programs -----------------------------------------------------------------------------------------------------------


def command(how, root_dir, iterations, *params):
    flags = [x for p in (*SHORT, f'TrainerConfig.num_iterations={iterations}', *params) for x in ('--conf_param', p)]
    train = ['-m', 'alfx.bin.train', '--conf', 'ppo_cart_pole', '--root_dir', str(root_dir), *flags]
    if how == 'torchrun':
        return [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', *train]
    return [sys.executable, *train, *(['--num_processes', '2'] if how == 'two' else [])]


def finish(how, root_dir, iterations, *params):
    done = warm_starts.run(command(how, root_dir, iterations, *params), env=environment(), timeout=TIMEOUT,
                          capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def ranks_below(pid):
    """Return the process ids of the ranks that a program has started."""
    found = {}
    for folder in Path('/proc').glob('[0-9]*'):
        try:
            parent = int((folder / 'stat').read_text().rpartition(')')[2].split()[1])
            settings = (folder / 'environ').read_bytes().split(b'\0')
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid:
            found.update({int(s[5:]): int(folder.name) for s in settings if s.startswith(b'RANK=')})
    return found


def is_running(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError:
        return False


def wait_until(condition, what):
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def start_endless_run(how, root_dir, *params):
    process = warm_starts.Popen(command(how, root_dir, 10**6, *params), env=environment(), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    table = Path(root_dir) / ('eval/progress.csv' if params else 'progress.csv')
    wait_until(lambda: process.poll() is not None or (table.exists() and len(table.read_text().splitlines()) > 2),
               'no summary')
    assert process.poll() is None, process.communicate()
    pids = ranks_below(process.pid)
    assert sorted(pids) == [0, 1]
    time.sleep(random.uniform(0, 0.5))
    return process, pids


def newest_checkpoint(root_dir):
    steps = [int(p.name[5:]) for p in Path(root_dir).glob('train/algorithm/ckpt-*') if p.name[5:].isdigit()]
    return read_checkpoint(str(Path(root_dir) / f'train/algorithm/ckpt-{max(steps)}'))


@pytest.mark.slow
@pytest.mark.parametrize('how, victim', [('two', 1), ('two', 0), ('torchrun', 1), ('torchrun', 0)])
def test_a_rank_checkpoints_and_stops_after_another_rank_is_killed(tmp_path, how, victim):
    callbacks = ['TrainerConfig.callbacks = (@KeepBestCheckpoint(), )', 'TrainerConfig.evaluate = True',
                 'TrainerConfig.eval_interval = 2', 'TrainerConfig.num_evals = None',
                 'TrainerConfig.num_eval_episodes = 1']
    process, pids = start_endless_run(how, tmp_path, *callbacks)
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.monotonic()
    try:
        stdout, output = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert time.monotonic() - killed < 30
    assert process.returncode == 1, output
    assert f'LostProcessError: rank {victim} (pid {pids[victim]} on' in output, output
    assert ('was killed by SIGKILL' if how == 'two' else 'most likely killed') in output, output
    wait_until(lambda: not any(map(is_running, pids.values())), f'processes are left: {pids}')
    state = newest_checkpoint(tmp_path)
    iterations = state['trainer']['iteration']
    assert iterations > 0 and all(x.isfinite().all() for x in state['alg'].values() if isinstance(x, torch.Tensor))
    with open(tmp_path / 'eval/progress.csv') as file:
        returns = [float(row['average_return']) for row in csv.DictReader(file)]
    assert state['trainer']['callbacks']['states']['KeepBestCheckpoint']['best'] in returns
    code, output = finish('one', tmp_path, iterations + 2, *callbacks)
    assert code == 0 and 'new episodes start' in output, output


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes(tmp_path):
    steps = []
    for how, iterations in (('two', 2), ('one', 4), ('two', 6), ('two', 8)):
        code, output = finish(how, tmp_path, iterations)
        assert code == 0, output
        assert ('new episodes start' in output) == (iterations in (4, 6)), output
        state = newest_checkpoint(tmp_path)
        assert state['trainer']['iteration'] == iterations
        assert len(state['alg']['_metrics.2.length']) == 4
        steps.append(int(state['alg']['_metrics.0.count']))
    assert all(later - before > 80 for before, later in zip([0, *steps], steps)), steps  # 2 * 16 * 4, less FIRST
    assert (tmp_path / 'progress.csv').read_text().count('\n') == 9
    assert not list(tmp_path.glob('train/rank-*.log'))


@pytest.mark.slow
def test_callbacks_see_the_episodes_of_all_ranks_and_stop_all_ranks(tmp_path):
    """Run callbacks in rank 0: the log has the episodes of both ranks, and both stop, also when they are resumed."""
    params = ['TrainerConfig.callbacks = (@KeepBestCheckpoint(), @EpisodeLog(), @StopWithoutImprovement())',
              'StopWithoutImprovement.patience = 1', 'StopWithoutImprovement.min_delta = 1e9',
              'TrainerConfig.evaluate = True', 'TrainerConfig.num_evals = None', 'TrainerConfig.eval_interval = 2',
              'TrainerConfig.num_eval_episodes = 1']
    for reason in ('has not improved', 'has stopped the run before'):
        code, output = finish('two', tmp_path, 20, *params)
        assert code == 0 and output.count('StopWithoutImprovement stops the run') == 1 and reason in output, output
    with open(tmp_path / 'progress.csv') as file:
        last = list(csv.DictReader(file))[-1]
    episodes = (tmp_path / 'episodes.csv').read_text().splitlines()
    assert last['iteration'] == '3' and int(last['episodes']) == len(episodes) - 1 > 0
    assert newest_checkpoint(tmp_path)['trainer']['callbacks']['stopped_by'] == 'StopWithoutImprovement'
    with open(tmp_path / 'eval/progress.csv') as file:
        best = max(csv.DictReader(file), key=lambda row: float(row['average_return']))
    assert [path.name for path in (tmp_path / 'train/algorithm/best').iterdir()] == [f"ckpt-{best['global_counter']}"]


@pytest.mark.slow
def test_ranks_checkpoint_and_stop_on_request_and_when_their_parent_dies(tmp_path):
    """Write a checkpoint and stop all ranks on request and when the program that started them is killed."""
    process, pids = start_endless_run('two', tmp_path / 'asked')
    for how in ('one', 'two'):
        code, output = finish(how, tmp_path / 'asked', 2)
        assert code == 2 and f'process {pids[0]} on' in output and output.count('ConfError') == 1, output
    os.kill(pids[1], signal.SIGTERM)  # only one of them
    out, output = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert 'to resume:' in out and newest_checkpoint(tmp_path / 'asked')['trainer']['iteration'] > 0
    process, pids = start_endless_run('two', tmp_path / 'orphans')
    process.kill()
    wait_until(lambda: not any(map(is_running, pids.values())), f'processes are left: {pids}')
    process.communicate()
    assert newest_checkpoint(tmp_path / 'orphans')['trainer']['rollout']['ranks'], 'both have written it'


@pytest.mark.slow
def test_supervised_runs_with_two_ranks_match_one_process_and_resume(tmp_path):
    """Results of a supervised run in two processes equal those of one process; the run resumes bit for bit."""
    def trained(folder, epochs, *flags):
        params = [f'TrainerConfig.{x}' for x in (f'num_iterations={epochs}', 'eval_interval=4', 'random_seed=3',
                                                 'num_threads=1', 'float32_matmul_precision="highest"')]
        done = warm_starts.run(
            [sys.executable, '-m', 'alfx.bin.train', '--conf', 'functional_parvi_regression', '--root_dir',
             str(tmp_path / folder), *(x for p in params for x in ('--conf_param', p)), *flags],
            env=environment(), timeout=TIMEOUT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        table = (tmp_path / folder / 'eval/progress.csv').read_text()
        return newest_checkpoint(tmp_path / folder)['alg']['_particles'], table

    together = '--num_processes', '2'
    single, _ = trained('one', 8)
    shared, table = trained('two', 8, *together)
    trained('part', 4, *together)
    shutil.copytree(tmp_path / 'part', tmp_path / 'other')
    resumed, resumed_table = trained('part', 8, *together)
    torch.testing.assert_close(shared, single, rtol=1e-4, atol=1e-4)
    assert torch.equal(shared, resumed) and table == resumed_table
    torch.testing.assert_close(trained('other', 8)[0], single, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_indivisible_sizes_are_rejected_by_name(tmp_path):
    for param, name in (('TrainerConfig.mini_batch_size=33', 'TrainerConfig.mini_batch_size = 33'),
                        ('create_environment.num_parallel_environments=5', 'num_parallel_environments = 5')):
        code, output = finish('two', tmp_path / name.split()[0], 2, param)
        assert code == 2 and f'{name} cannot be divided among 2 processes' in output, output
        assert output.count('ConfError') == 1
