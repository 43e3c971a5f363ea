"""Child processes: start, end, and the messages about them."""
import importlib.machinery
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from multiprocessing import forkserver

import pytest
from helpers.unroll_fakes import wait_for

from alfx.gin_utils import ConfError
from alfx.utils import processes
from alfx.utils.processes import Child, LostProcessError, MessagingProcess, describe_exit, is_running


CHILD = '''
import time
from alfx.utils import processes
def work(pipe):
    time.sleep(1000)
if __name__ == '__main__':
    print(processes.Child(processes.SPAWN, work, (), 'child').pid, flush=True)
    time.sleep(1000)
'''
RANK = '''
import os, subprocess, sys, time
from alfx.engine.remote import data_parallel
if len(sys.argv) > 1:
    os.environ.update(RANK='1', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='9')  # no server there
    data_parallel.join('cpu')
print(subprocess.Popen([sys.executable, __file__, 'join'], stderr=subprocess.DEVNULL).pid, flush=True)
time.sleep(1000)
'''


@pytest.mark.parametrize('parent', [CHILD, RANK], ids=['child', 'waiting rank'])
def test_a_process_is_killed_when_its_parent_has_died(tmp_path, parent):
    (tmp_path / 'parent.py').write_text(parent)
    path = os.pathsep.join([os.getcwd(), os.environ.get('PYTHONPATH', '')])
    parent = subprocess.Popen([sys.executable, str(tmp_path / 'parent.py')], stdout=subprocess.PIPE,
                              env={**os.environ, 'PYTHONPATH': path})
    child = int(parent.stdout.readline())
    try:
        # The child imports torch, which can take long on a busy machine, before a thread of it watches its parent.
        wait_for(lambda: len(os.listdir(f'/proc/{child}/task')) > 1, seconds=600)
        time.sleep(0.5)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_for(lambda: not is_running(child))
    finally:
        for pid in (child, parent.pid):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        parent.stdout.close()
    assert not processes.is_orphan()


@pytest.mark.parametrize('code, expected', [
    (-9, 'was killed by SIGKILL (often out of memory)'), (-11, 'was killed by SIGSEGV'),
    (3, 'ended with exit code 3'), (None, 'does not respond any more'), (-40, 'was killed by signal 40')])
def test_how_a_process_ended_in_words(code, expected):
    assert describe_exit(code) == expected


def test_a_lost_process_is_reported_with_its_log_tail():
    error = LostProcessError('rank 2', 'was killed by SIGKILL', 'one\ntwo\n', 'start it again')
    assert str(error) == ('rank 2 was killed by SIGKILL\n  start it again\n  its log ends with:\n    one\n    two')
    assert str(LostProcessError('rank 2', 'is gone', ' \n')) == 'rank 2 is gone'
    kind, arguments = error.__reduce__()
    assert str(kind(*arguments)) == str(error)


def test_an_error_extended_on_its_way_keeps_its_own_text():
    error = LostProcessError('rank 2', 'is gone')
    error.args = ('rank 2\n\nWhile executing something', *error.args[1:])
    assert str(error) == 'rank 2 is gone'


def wait_for_end(pipe):
    pipe.send_bytes(b'ready')
    pipe.recv_bytes()


def ignore_sigterm(pipe):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send_bytes(b'ready')
    time.sleep(1000)


def test_processes_may_end_on_request_and_are_killed_otherwise():
    child = Child(processes.SPAWN, wait_for_end, (), 'obedient')
    assert child.pipe.recv_bytes() == b'ready'
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(child.pid, number)
    child.pipe.send_bytes(b'end')
    child.end(time.monotonic() + 60)
    assert child.ending() == 'ended with exit code 0'
    child = Child(processes.SPAWN, ignore_sigterm, (), 'stubborn')
    assert child.pipe.recv_bytes() == b'ready' and child.exitcode is None
    child.end(time.monotonic() + 0.1)
    assert 'SIGKILL' in child.ending() and not is_running(child.pid)


FORGETFUL = '''
import time
from alfx.utils import processes
def work(pipe):
    pipe.send_bytes(b'ready')
    time.sleep(1000)
if __name__ == '__main__':
    child = processes.Child(processes.SPAWN, work, (), 'child')
    child.pipe.recv_bytes()
    print(child.pid)
'''


def test_a_child_process_ends_with_a_program_that_does_not_stop_it(tmp_path):
    (tmp_path / 'parent.py').write_text(FORGETFUL)
    path = os.pathsep.join([os.getcwd(), os.environ.get('PYTHONPATH', '')])
    done = subprocess.run([sys.executable, str(tmp_path / 'parent.py')], capture_output=True, text=True, timeout=120,
                          env={**os.environ, 'PYTHONPATH': path})
    assert done.returncode == 0, done.stderr
    assert not is_running(int(done.stdout))


def send_messages(send, how):
    send('log', (30, 'about to end'))
    send('number', 3)
    if how == 'raises':
        raise ValueError('no way')
    if how == 'exits':
        sys.exit(0)
    if how == 'faults':
        import faulthandler
        faulthandler._sigsegv()
    if how == 'is killed':
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize('how, ending, log_tail', [
    ('returns', 'ended with exit code 0', 'about to end'), ('raises', 'ended with exit code 1', 'ValueError: no way'),
    ('exits', 'ended with exit code 1', 'SystemExit: 0'), ('faults', 'was killed by SIGSEGV', 'Segmentation fault'),
    ('is killed', 'was killed by SIGKILL (often out of memory)', 'about to end')])
def test_the_log_tail_is_an_error_a_fault_or_the_end_of_the_log(how, ending, log_tail, caplog):
    child = MessagingProcess(send_messages, (how, ), 'test process')
    messages = []
    wait_for(lambda: child.exitcode is not None)
    messages += child.listen()
    lost = child.lost()
    child.end(0.0)
    assert messages == [('number', 3)] and caplog.messages == ['test process: about to end']
    assert str(lost).startswith(f'the test process (pid {child.pid}) {ending}\n  its log ends with:\n')
    assert log_tail in lost.log_tail
    assert not os.path.exists(child._fault_file)


def test_the_end_of_a_file_starts_at_a_given_offset(tmp_path):
    path = tmp_path / 'log'
    assert processes.tail(str(path)) == ''
    path.write_bytes(b'before' + 9000 * b'x' + b'\xff after')
    assert processes.tail(str(path)).endswith('x\N{REPLACEMENT CHARACTER} after')
    assert len(processes.tail(str(path))) < 9000 and processes.tail(str(path), 9007) == ' after'


@pytest.mark.parametrize('program, reason', [
    ("if __name__ == '__main__':\n    pass\n", ''), ('if "__main__"==__name__: pass', ''),
    ("# if __name__ == '__main__'\nprint(1)\n", 'program.py has no line if'),
    ("try:\n    __name__ == '__main__' and main()\nfinally:\n    pass\n", ''),
    ('print(1)\n', "program.py has no line if __name__ == '__main__':"), (None, 'the program is not a file')])
def test_a_program_without_guard_is_not_run_again(tmp_path, monkeypatch, program, reason):
    main = types.ModuleType('__main__')
    if program is not None:
        main.__file__ = str(tmp_path / 'program.py')
        (tmp_path / 'program.py').write_text(program)
    monkeypatch.setitem(sys.modules, '__main__', main)
    assert reason in processes.lost_program() and bool(reason) is bool(processes.lost_program())
    main.__spec__ = importlib.machinery.ModuleSpec('own_app.__main__', None)
    assert 'not a file' in reason or 'program.py is not imported' in processes.lost_program()
    main.__spec__ = None
    if 'no line' in reason:
        with pytest.raises(ConfError, match='it would run the program again'):
            processes.MessagingProcess(print, (), 'evaluation process')


@pytest.mark.skipif(not hasattr(os, 'sched_setaffinity'), reason='affinity exists on Linux only')
def test_the_number_of_cores_follows_the_affinity_of_the_process():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert processes.num_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert processes.num_cores() == len(allowed)


@pytest.mark.processes
@pytest.mark.parametrize('method', ['fork', 'spawn', 'forkserver'])
def test_a_process_of_a_living_parent_is_no_orphan(method):
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(processes.is_orphan) is False
    forkserver._forkserver._stop()
