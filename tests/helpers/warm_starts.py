"""Programs in separate processes that need not import torch and alfx first.

The imports take longer than most tests of a program. So one process, started at the first use, imports torch, other
libraries and every module of alfx that a conf may refer to, and forks for each program. The program has its own memory,
process id, session, environment, signals and exit code, and can be killed like any other. That `python -m ...` finds
the program is tested by the tests of the programs themselves.
"""
import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading

LIBRARIES = ('torch', 'torch.utils.data', 'numpy', 'gymnasium', 'gin', 'tqdm',
             'tensorboard.summary.writer.event_file_writer')


class Popen:
    """The part of `subprocess.Popen` that the tests of programs need, for commands of this Python.

    Output to a pipe is kept in a file until :meth:`communicate`, so that no process waits for its reader.
    """

    def __init__(self, args, stdout=None, stderr=None, env=None, cwd=None, start_new_session=False, text=False):
        assert args[0] == sys.executable
        self.args, self.returncode, self._text = args, None, text
        self._kept = [tempfile.TemporaryFile() if where == subprocess.PIPE else None for where in (stdout, stderr)]
        out = self._kept[0] or stdout or 1
        err = self._kept[1] or (out if stderr == subprocess.STDOUT else stderr or 2)
        self._report, write_end = os.pipe()
        request = dict(args=list(map(str, args[1:])), env=dict(os.environ if env is None else env),
                       cwd=str(cwd or os.getcwd()), start_new_session=start_new_session)
        _forker().ask(request, [*(x if isinstance(x, int) else x.fileno() for x in (out, err)), write_end])
        os.close(write_end)
        self.pid = self._read_number()
        self.poll()

    def _read_number(self):
        """Wait for the next reported number and return it."""
        text = b''
        while not text.endswith(b'\n'):
            part = os.read(self._report, 1)
            assert part, f'the process that watches over {self.args} is gone'
            text += part
        return int(text)

    def poll(self):
        if self.returncode is None and select.select([self._report], [], [], 0)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._read_number())
            os.close(self._report)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None and not select.select([self._report], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.poll()

    def communicate(self, timeout=None):
        self.wait(timeout)
        found = []
        for file in self._kept:
            if file is not None:
                file.seek(0)
                file = io.TextIOWrapper(file) if self._text else file
            found.append(None if file is None else file.read())
        return tuple(found)

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()


def run(args, capture_output=False, timeout=None, check=False, **kwargs):
    """Run a command as `subprocess.run` does."""
    if capture_output:
        kwargs |= dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = Popen(args, **kwargs)
    try:
        out, err = process.communicate(timeout)
    except BaseException:
        process.kill()
        raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Forker:
    """The process that has imported the libraries and forks; it ends with this process."""

    def __init__(self):
        self._socket, child_socket = socket.socketpair()
        settings = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
        subprocess.run([sys.executable, __file__, str(child_socket.fileno())], env=settings,
                       pass_fds=[child_socket.fileno()],
                       stdin=subprocess.DEVNULL, check=True)
        child_socket.close()

    def ask(self, request, files):
        """Start a program with its output in the first two files, and its id and exit status in the third."""
        text = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(text).to_bytes(4, 'big')], files)
        self._socket.sendall(text)


_forkers = {}


def _forker():
    if os.getpid() not in _forkers:  # a forked process must not use the forker of its parent
        _forkers[os.getpid()] = _Forker()
    return _forkers[os.getpid()]


# What happens in the process that forks ------------------------------------------------------------------------------


def serve(channel):
    """Fork for each request. Return the request in the process that runs it, and ``None`` after the last one."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt from a terminal is for the programs
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        length, files, _, _ = socket.recv_fds(channel, 4, 3)
        if not length:
            return None
        request, size = b'', int.from_bytes(length, 'big')
        while len(request) < size:
            request += channel.recv(size - len(request))
        if not os.fork():
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            report = files[2]
            pid = os.fork()
            if not pid:
                signal.signal(signal.SIGINT, interrupt)
                return json.loads(request), files
            os.close(files[0])
            os.close(files[1])
            _, status = os.waitpid(pid, 0)
            os.write(report, f'{status}\n'.encode())
            os._exit(0)
        for file in files:
            os.close(file)


def become(request, files, search_path):
    """Run a program as a new Python process would."""
    out, err, report = files
    if request['start_new_session']:
        os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(request['cwd'])
    os.environ.clear()
    os.environ.update(request['env'])
    os.write(report, f'{os.getpid()}\n'.encode())
    for file in files:
        os.close(file)
    for library in (random, sys.modules['numpy'].random):
        library.seed()
    sys.modules['torch'].seed()
    sys.modules['alfx.utils.processes']._STARTED_BY = os.getppid()  # determined when it is imported
    kind, *rest = request['args']
    python_path = os.environ.get('PYTHONPATH', '')
    first = os.path.dirname(os.path.abspath(kind)) if kind not in ('-m', '-c') else os.getcwd() if kind == '-m' else ''
    sys.path[:] = [first, *(python_path.split(os.pathsep) if python_path else []), *search_path]
    if kind == '-m':
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
    elif kind == '-c':
        sys.argv[:] = ['-c', *rest[1:]]
        exec(compile(rest[0], '<string>', 'exec'), sys.modules['__main__'].__dict__)
    else:
        sys.argv[:] = request['args']
        runpy.run_path(kind, run_name='__main__')


def main():
    if os.fork():
        os._exit(0)  # tests check for remaining children
    channel = socket.socket(fileno=int(sys.argv[1]))
    search_path = sys.path[1:]
    sys.path[:] = search_path
    for name in LIBRARIES:
        importlib.import_module(name)
    from alfx.gin_utils.conf_loading import import_configurables
    import_configurables()
    gc.freeze()  # existing objects are not collected, so their pages are not copied
    found = serve(channel)
    if found is not None:
        exit_code = 0
        try:
            become(*found, search_path)
        except SystemExit as error:
            if not isinstance(error.code, int | None):
                raise  # Python prints the message
            exit_code = error.code or 0
        leave(exit_code)


def leave(exit_code):
    """End the program without freeing each object of the imported modules, whose pages would have to be copied."""
    threading._shutdown()  # waits for other threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == '__main__':
    main()
