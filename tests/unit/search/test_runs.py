"""Processes of trials: output, threads, signals and child processes."""
import os
import signal
import sys
import time

import pytest

from alfx.search import runs
from alfx.search.run_process import Run
from alfx.search.runs import ProcessExecution, log_tail


@pytest.mark.parametrize('text, expected', [
    ('one\ntwo\n', 'two'), ('', ''), ('a\nConfError: x.gin:3: wrong\n  did you mean y?\n\n',
                                      'ConfError: x.gin:3: wrong\n  did you mean y?'),
    ('Traceback (most recent call last):\n  File "a"\nValueError: no\n  In call to configurable \'f\' (<f>)\n',
     'ValueError: no'), (' 10%|#\r 20%|##\rtorch.OutOfMemoryError: full', 'torch.OutOfMemoryError: full')])
def test_the_log_tail_starts_at_the_last_error(text, expected):
    assert log_tail(text) == expected


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Return a function that starts a program instead of a run; kill the program after the test."""
    started = []

    def start(text, name='seed_0'):
        popen = runs.subprocess.Popen

        def replaced(command, **options):
            return popen([sys.executable, '-c', text], **options)
        monkeypatch.setattr(runs.subprocess, 'Popen', replaced)
        execution = ProcessExecution(Run(0, 0, str(tmp_path / name), 'base.gin', (), 0))
        monkeypatch.setattr(runs.subprocess, 'Popen', popen)
        started.append(execution)
        return execution
    yield start
    for execution in started:
        execution.kill()


def code_of(execution, seconds=60.0):
    deadline = time.monotonic() + seconds
    while (code := execution.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return code


def has_ended(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return ') Z ' in file.read()
    except FileNotFoundError:
        return True


def test_the_words_of_a_process_are_those_since_it_was_started(program):
    assert code_of(program('import sys; sys.exit("ValueError: first")')) == 1
    second = program('import sys; print("hello"); sys.exit(3)')
    assert code_of(second) == 3 and second.log_tail() == 'hello'
    silent = program('import sys; sys.exit(4)')
    assert code_of(silent) == 4 and silent.log_tail() == 'exited with code 4 and printed nothing'


def test_a_process_ended_by_a_signal_is_reported_with_its_name(program):
    execution = program('import os; print("at work", flush=True); os.kill(os.getpid(), 9)')
    assert code_of(execution) == -signal.SIGKILL
    assert execution.log_tail() == 'killed by SIGKILL; end of its log: at work'


@pytest.mark.parametrize('how', ['kill', 'by itself', 'stop'])
def test_child_processes_of_a_run_end_with_it(how, program, tmp_path):
    pid_file = tmp_path / 'pid'
    text = (f'import os, subprocess, time\np = subprocess.Popen(["sleep", "300"])\n'
            f'open("{pid_file}.tmp", "w").write(str(p.pid)); os.rename("{pid_file}.tmp", "{pid_file}")\n')
    execution = program(text + ('' if how == 'by itself' else 'time.sleep(300)\n'))
    deadline = time.monotonic() + 60
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if how != 'by itself':
        getattr(execution, how)()
    code_of(execution)
    pid = int(pid_file.read_text())
    while not has_ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_threads_follow_the_setting_of_the_run(program, tmp_path, monkeypatch):
    popen, seen = runs.subprocess.Popen, []
    monkeypatch.setattr(runs.subprocess, 'Popen', lambda command, env, **options: seen.append(env) or popen(
        ['true'], env=env, **options))
    ProcessExecution(Run(0, 0, str(tmp_path / 'a'), 'base.gin', (), 0, threads=3)).kill()
    assert seen[0]['OMP_NUM_THREADS'] == '3' and os.environ['OMP_NUM_THREADS'] == '1'
