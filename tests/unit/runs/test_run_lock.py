"""No two runs train in one folder at the same time."""
import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from alfx import context, gin_utils
from alfx.gin_utils import ConfError
from alfx.runs import run_lock

HOLDER = """
import sys, time
from alfx.runs import run_lock
with run_lock.held(sys.argv[1]):
    print('held', flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the folder."""
    process = subprocess.Popen([sys.executable, '-c', HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == 'held\n'
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


class Rank:
    """One of several ranks, which receives the messages of rank 0."""

    def __init__(self, rank, messages):
        self.is_first, self._messages = rank == 0, messages

    def broadcast_from_rank0(self, message):
        if self.is_first:
            self._messages.append(message)
        return self._messages[-1]


def hold_as(monkeypatch, rank, messages, root_dir):
    monkeypatch.setattr(context, 'get_ranks', lambda: Rank(rank, messages))
    return run_lock.held(str(root_dir))


def test_the_error_names_the_process_that_holds_the_folder(holder, tmp_path):
    with pytest.raises(ConfError) as caught, run_lock.held(str(tmp_path)):
        pass
    assert f'process {holder.pid} on {socket.gethostname()}' in str(caught.value)
    assert '--root_dir' in str(caught.value)


def test_a_killed_process_releases_its_locks(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with run_lock.held(str(tmp_path)):
        assert f'process {os.getpid()} ' in (tmp_path / 'train.lock').read_text()


def test_a_forked_process_does_not_lock_the_folder(tmp_path):
    with run_lock.held(str(tmp_path)):
        child = os.fork()
        if not child:
            time.sleep(100)
            os._exit(0)
    try:
        with run_lock.held(str(tmp_path)):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_ranks_of_one_run_hold_it_together_until_the_last_one_ends(tmp_path, monkeypatch):
    (tmp_path / 'train.log').write_text('')
    messages = []
    first = hold_as(monkeypatch, 0, messages, tmp_path)
    first.__enter__()
    second = hold_as(monkeypatch, 1, messages, tmp_path)
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(ConfError), hold_as(monkeypatch, 0, messages, tmp_path):
        pass
    second.__exit__(None, None, None)
    with hold_as(monkeypatch, 0, messages, tmp_path):
        pass


def test_all_ranks_are_rejected(holder, tmp_path, monkeypatch):
    messages = []
    for rank in (0, 1):
        with pytest.raises(ConfError, match=f'process {holder.pid}'), hold_as(monkeypatch, rank, messages, tmp_path):
            pass


def test_a_file_system_without_locks_logs_a_warning(tmp_path, monkeypatch, caplog):
    def flock(file, kind):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', flock)
    with run_lock.held(str(tmp_path)), run_lock.held(str(tmp_path)):
        assert 'cannot be locked (No locks available)' in caplog.text


def test_a_folder_without_writes_stays_empty(tmp_path):
    with run_lock.held(str(tmp_path)):
        pass
    assert not os.listdir(tmp_path)


def can_be_locked(root_dir):
    with open(root_dir / 'train.lock', 'a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_folder_removed_while_locked_is_locked_again(tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    with run_lock.held(str(folder)):
        for _ in range(2):
            shutil.rmtree(folder)
            run_lock.renew(f'{folder}/')
            run_lock.renew(str(folder))
            assert not can_be_locked(folder)
    assert not list(folder.iterdir())
    (folder / 'train.lock').touch()
    assert can_be_locked(folder)
    run_lock.renew(str(folder))  # without a lock
    assert can_be_locked(folder)


def test_a_new_run_in_a_recreated_folder_keeps_it(tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    with run_lock.held(str(folder)):
        shutil.rmtree(folder)
        folder.mkdir()
        with subprocess.Popen([sys.executable, '-c', HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == 'held\n'
            with pytest.raises(ConfError, match=f'process {other.pid} on '):
                run_lock.renew(str(folder))
            other.kill()


@pytest.mark.parametrize('make', [lambda path: os.symlink('notes.txt', path), os.mkfifo, os.mkdir])
def test_only_a_file_is_used_as_the_lock(tmp_path, make):
    (tmp_path / 'notes.txt').write_text('mine')
    make(tmp_path / 'train.lock')
    with pytest.raises(ConfError, match='train.lock: expected a file, found a link, a folder or a pipe\n  remove it'):
        with run_lock.held(str(tmp_path)):
            pass
    assert (tmp_path / 'notes.txt').read_text() == 'mine'


def test_the_folder_of_another_run_is_not_locked_again(tmp_path):
    root_dir, folders = str(tmp_path / 'run'), [tmp_path / name for name in ('mine', 'other')]
    for folder in folders:
        os.mkdir(root_dir)
        with gin_utils.loaded('ppo_cart_pole', ()) as conf:
            gin_utils.write_conf(root_dir, conf, [folder.name])
        os.rename(root_dir, folder)
    shutil.copytree(tmp_path / 'other', root_dir)
    with run_lock.held(root_dir):
        run_lock.renew(root_dir)
        os.rename(root_dir, tmp_path / 'moved')
        shutil.copytree(tmp_path / 'mine', root_dir)
        with pytest.raises(run_lock.ReplacedFolderError, match='was replaced by the folder of another run'):
            run_lock.renew(root_dir)
        shutil.rmtree(root_dir)
        shutil.copytree(tmp_path / 'other', root_dir)  # this run wrote its conf last
        run_lock.renew(root_dir)
