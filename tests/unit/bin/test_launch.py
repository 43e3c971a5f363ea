"""Launching ranks on this machine: waiting times and exit codes."""
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from alfx import gin_utils
from alfx.bin import launch, ranks, train
from alfx.gin_utils import ConfError
from alfx.utils import processes


def program(*lines):
    """Return the command of both ranks; the lines may use ``rank``, the number of the process."""
    return [sys.executable, '-c', '\n'.join(['import os, signal, sys, time', 'rank = int(os.environ["RANK"])', *lines])]


def test_a_stopping_rank_may_take_its_time_for_the_last_checkpoint(monkeypatch):
    monkeypatch.setattr(processes, 'LEAVE_SECONDS', 0.1)
    assert launch.launch(program('time.sleep(0 if rank else 1.5)', 'sys.exit(143)'), 2) == 143


def test_after_an_error_processes_that_do_not_exit_are_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, 'LEAVE_SECONDS', 0.1)
    code = launch.launch(program(f'open(f"{tmp_path}/{{rank}}", "w").write(str(os.getpid()))',
                                 f'while len(os.listdir("{tmp_path}")) < 2: time.sleep(0.01)',
                                 'if rank: sys.exit(2)', 'time.sleep(300)'), 2)
    assert code == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / '0').read_text()), 0)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ranks_ended_by_the_forwarded_signal_stopped_and_did_not_fail(number, tmp_path):
    def ask():
        deadline = time.monotonic() + 60
        while len(os.listdir(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    asking = threading.Thread(target=ask)
    asking.start()
    text = [f'signal.signal({int(number)}, signal.SIG_DFL)', f'open(f"{tmp_path}/{{rank}}", "w").close()',
            'time.sleep(60)']
    assert launch.launch(program(*text), 2) == 128 + number
    asking.join()


def test_a_signal_during_startup_reaches_all_ranks(monkeypatch):
    start = launch._start

    def interrupted(command, rank, count, port):
        process = start(command, rank, count, port)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(launch, '_start', interrupted)
    start_time = time.monotonic()
    assert launch.launch(program('time.sleep(60)'), 2) == 143
    assert time.monotonic() - start_time < 50


def test_the_shared_store_of_ranks_listens_on_localhost_only(tmp_path):
    code = launch.launch(program(
        'port = f":{int(os.environ[\'MASTER_PORT\']):04X}"',
        'lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]',
        'listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(port)]',
        f'open(f"{tmp_path}/{{rank}}", "w").write(" ".join(listening))'), 2)
    assert code == 0
    for rank in '01':
        address, = (tmp_path / rank).read_text().split()
        assert address.startswith('0100007F:')


@pytest.mark.parametrize('params, name', [
    (['TrainerConfig.mini_batch_size=33'], 'TrainerConfig.mini_batch_size = 33'),
    (['create_environment.num_parallel_environments=5'], 'create_environment.num_parallel_environments = 5'),
    (['n=7', 'create_environment.num_parallel_environments=%n'], 'create_environment.num_parallel_environments = 7')])
def test_indivisible_sizes_are_rejected_before_anything_starts(params, name, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(launch, 'launch', lambda command, count: started.append(count) or 0)
    monkeypatch.setattr(ranks, 'FLAGS', SimpleNamespace(root_dir=''))
    monkeypatch.delenv('ALFX_STARTED_RANKS', raising=False)
    with gin_utils.loaded('ppo_cart_pole', ['TrainerConfig.mini_batch_size=32',
                                            'create_environment.num_parallel_environments=4']):
        assert ranks.start(2, str(tmp_path)) == 0 and started == [2]
    with gin_utils.loaded('ppo_cart_pole', params), pytest.raises(ConfError, match=f'{name} cannot be divided among 2'):
        ranks.start(2, str(tmp_path))
    assert started == [2]


def test_each_of_several_processes_needs_its_own_gpu(monkeypatch):
    import torch
    chosen = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', chosen.append)
    assert ranks.device_of_rank('cpu', 1) == torch.device('cpu')
    assert ranks.device_of_rank('auto', 1) == ranks.device_of_rank('cuda', 1) == torch.device('cuda', 1)
    for name in ('auto', 'cuda'):
        with pytest.raises(ConfError, match='process 2 of this machine.* 2 GPU'):
            ranks.device_of_rank(name, 2)
    with pytest.raises(ConfError, match='needs its own GPU'):
        ranks.device_of_rank('cuda:1', 0)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '3')
    with pytest.raises(ConfError, match='2 GPU'):
        ranks.device_of_rank('cuda', 0)  # rank 0 prints the error
    assert not chosen, 'no memory of another GPU is taken'


@pytest.mark.parametrize('device', ['cpu', 'cuda:1'])
def test_a_device_that_several_gpus_would_override_is_rejected(device, monkeypatch):
    monkeypatch.setattr(ranks, 'FLAGS', train.PARSER.read(['--distributed=multi-gpu', f'--device={device}']))
    monkeypatch.delenv('RANK', raising=False)
    with pytest.raises(ConfError, match=f'multi-gpu and --device={device} contradict'):
        ranks.num_to_start()


def test_an_error_of_one_rank_is_reported_to_the_others(monkeypatch):
    from alfx.engine.remote import data_parallel
    reported = []
    joined = SimpleNamespace(rank=1, broadcast_from_rank0=lambda value: value, report=reported.append)
    monkeypatch.setenv('RANK', '1')
    monkeypatch.setattr(ranks, '_choose_device', lambda: None)
    monkeypatch.setattr(ranks, '_Output', lambda rank: SimpleNamespace(end=lambda error: None))
    monkeypatch.setattr(data_parallel, 'join', lambda device: joined)
    monkeypatch.setattr(data_parallel, 'leave', lambda: None)

    def train(conf, root_dir, rank):
        raise ConfError('the folder cannot be opened here')

    with pytest.raises(ConfError):
        ranks.train_as_rank(lambda: (None, 'run'), train)
    assert [str(error) for error in reported] == ['the folder cannot be opened here']
