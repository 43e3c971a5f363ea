"""State of the environments in the checkpoints of a run: saved, verified in a separate process, restored.

States of environments that alfx knows are saved and restored. The state of any other environment is restored only after
:mod:`alfx.environments.state_check` has verified it. A run starts the verification in the background after its first
checkpoint. Every checkpoint contains a recording, and its state is verified again when the run resumes: state outside
of the attributes, such as the state of a simulator reached through a handle, may have changed since.
"""
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from alfx import context
from alfx.config import TrainerConfig
from alfx.engine.remote.remote_unroll import worker_settings
from alfx.environments import saved_state, state_check
from alfx.trainers.acting import worker_process
from alfx.utils import processes

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 300.0
_ANSWER = '\nalfx: the replayed state is '
_EQUAL, _STOPPED = 'equal', 'stopped'
_FOREIGN_SIGNALS = (-1, -2, -9, -15)  # the process was stopped from outside, so nothing is known


class EnvironmentState:
    """State of the training environments, as it is stored in checkpoints.

    Args:
        env: training environments; None in supervised learning.
        config: configuration of the run.
        is_stopped: returns whether a signal has stopped the run, which then does not wait for a verification.
    """

    def __init__(self, env: Any, config: TrainerConfig, is_stopped: Callable[[], bool] = lambda: False):
        self._env, self._config, self._is_stopped = env, config, is_stopped
        self._limit = config.environment_checkpoint_megabytes * 2**20
        self._has_given_up = self._is_verified = self._has_saved = False
        self._difference = ''  # found by the verification
        self._process: _Verification | None = None
        self._recorders = [state_check.Recorder(env, self._limit) for env in state_check.gym_environments(env)]
        if env is not None and not config.save_environment_state:
            self._give_up('TrainerConfig.save_environment_state is False')

    def get(self) -> bytes | None:
        """Return the state for a checkpoint; None if it cannot be saved, which is logged once.

        If the verification failed, the result contains only the reason, so that a resumed run does not verify again.
        """
        if self._env is None or self._has_given_up:
            return pickle.dumps((None, self._difference, [])) if self._difference else None
        if self._is_too_large(sum(recorder.num_bytes for recorder in self._recorders)):
            return None
        state = self._env.get_state()
        if state is None:
            self._give_up('')
            return None
        needs_check = saved_state.needs_check(state)
        recordings = [recorder.latest() for recorder in self._recorders] if needs_check else []
        try:
            saved = pickle.dumps((state, needs_check, recordings), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - pickling calls code of the environment, which may raise anything
            self._give_up(f'{type(error).__name__}: {error}')
            return None
        if self._is_too_large(len(saved)):
            return None
        self._has_saved = True
        if not needs_check:
            self.close()
        return saved

    def restore(self, saved: Any) -> bool:
        """Restore the result of :meth:`get`, after a verification if there was none; return whether that succeeded."""
        if self._env is None or saved is None or not self._config.save_environment_state:
            return False
        try:
            if not isinstance(saved, bytes):
                raise ValueError('it was saved by an earlier version of alfx')
            state, needs_check, recordings = pickle.loads(saved)
            if state is None:
                self._fail(needs_check)
                return False
            if needs_check and not any(recordings):
                raise ValueError('it was saved before it could be verified')
            if needs_check:
                verification = _Verification(self._env, self._config, recordings, niceness=0)
                self._end_verification(verification.wait(self._is_stopped))
                if not self._is_verified:
                    return False
            self._env.set_state(state)
            self._is_verified = True
            return True
        except Exception as error:  # noqa: BLE001 - unpickling calls code of the environment, which may raise anything
            logger.info('the state of the environments cannot be restored: %s', error)
            return False

    def advance(self) -> None:
        """Start or end the verification if it is time to; called after each iteration."""
        if not self._has_saved or not self._recorders or self._is_verified:
            return
        if self._process is None:
            recordings = [recorder.latest() for recorder in self._recorders]
            if any(recording is not None and recording.is_complete for recording in recordings):
                self._process = _Verification(self._env, self._config, recordings)
            return
        self._end_verification(self._process.poll())

    def finish(self) -> None:
        """Wait for the verification, so that the last checkpoint contains its result; called at the end of the run."""
        recordings = [recorder.latest() for recorder in self._recorders]
        if self._process is None and any(recordings) and not self._is_verified:
            self._process = _Verification(self._env, self._config, recordings, niceness=0)
        if self._process is not None:
            self._end_verification(self._process.wait(self._is_stopped))

    def _end_verification(self, answer: str | None) -> None:
        if answer == _EQUAL:
            self._is_verified, self._process = True, None
            logger.info('the state of the environments is verified: it can be saved and restored exactly')
        elif answer == _STOPPED:
            self._process, self._has_saved = None, False  # again after the next checkpoint, or when the run resumes
        elif answer is not None:
            self._fail(answer)

    def _fail(self, difference: str) -> None:
        self._difference = difference
        self._give_up(difference)

    def _give_up(self, reason: str) -> None:
        self._has_given_up = True
        self.close()
        logger.info('the state of this environment cannot be saved%s: a resumed run starts new episodes',
                    reason and f' ({reason})')

    def _is_too_large(self, num_bytes: int) -> bool:
        if num_bytes > self._limit:
            self._give_up(f'it takes {num_bytes / 2**20:.3g} MiB, more than '
                          f'TrainerConfig.environment_checkpoint_megabytes = {self._limit / 2**20:g}')
        return num_bytes > self._limit

    def close(self) -> None:
        """Stop recording, and end the verification if it is in progress."""
        for recorder in self._recorders:
            recorder.stop()
        self._recorders = []
        if self._process is not None:
            self._process.close()
            self._process = None


class _Verification:
    """Process that builds the environments from the conf of the run and replays recordings.

    Args:
        env: training environments.
        config: configuration of the run.
        recordings: one for each environment of gymnasium in ``env``; None where there is none.
        niceness: niceness of the process.
    """

    def __init__(self, env: Any, config: TrainerConfig, recordings: list[state_check.Recording | None],
                 niceness: int = 10):
        envs = state_check.gym_environments(env)
        is_single = len(envs) == 1 and isinstance(recordings[0] and recordings[0].states, list)
        conf_file = os.path.join(config.root_dir, 'conf', 'config.gin')
        self._problem = '' if os.path.isfile(conf_file) else 'it cannot be verified, because the run has no conf file'
        if self._problem:
            return
        self._deadline = time.monotonic() + _TIMEOUT_SECONDS
        self._output = tempfile.TemporaryFile()
        with tempfile.TemporaryFile() as file:
            pickle.dump((niceness, os.path.abspath(conf_file), worker_settings(config),
                         1 if is_single else env.batch_size), file)
            pickle.dump(recordings, file)
            file.seek(0)
            # not a fork, in which memory addresses and file descriptors would be valid, and not spawned by
            # multiprocessing, which would import the main module again; a new session gets no Ctrl-C
            path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
            self._process = subprocess.Popen([sys.executable, '-m', __name__], stdin=file, stdout=self._output,
                                             stderr=self._output, start_new_session=True,
                                             env={**os.environ, 'PYTHONPATH': path})

    def poll(self) -> str | None:
        """Return None while the process runs; then ``_EQUAL``, ``_STOPPED``, or why the state cannot be restored."""
        if self._problem:
            return self._problem
        code = self._process.poll()
        if code is None and time.monotonic() > self._deadline:
            self.close()
            return f'another process has not restored it within {_TIMEOUT_SECONDS:.0f} s'
        if code is None:
            return None
        self._output.seek(0)
        output = self._output.read().decode(errors='replace').rstrip()
        _, found, answer = output.rpartition(_ANSWER)
        if found and code == 0:
            return answer
        if code in _FOREIGN_SIGNALS:
            return _STOPPED
        last = output.rpartition('\n')[2]
        return f'a process that restored it {processes.describe_exit(code)}' + (f': {last}' if code > 0 else '')

    def wait(self, is_stopped: Callable[[], bool]) -> str:
        """Return the result of :meth:`poll` when the process has ended or ``is_stopped()``."""
        logger.info('verifying the state of the environments, which takes some seconds')
        try:
            while (answer := self.poll()) is None and not is_stopped():
                time.sleep(processes.POLL_SECONDS / 4)
            return answer or _STOPPED
        finally:
            self.close()

    def close(self) -> None:
        """Kill the process if it runs."""
        if not self._problem:
            self._process.kill()
            self._process.wait()


def _verify() -> str:
    """Replay the recordings in standard input; return the first difference, or ``_EQUAL``."""
    niceness, conf_file, settings, count = pickle.load(sys.stdin.buffer)
    os.nice(niceness)
    context.set_first_environment(settings['first_environment'])
    worker_process.prepare(settings)
    worker_process.load_config(conf_file, settings)
    from alfx.environments.utils import create_environment
    env = create_environment(num_parallel_environments=count, nonparallel=True, batch_size_per_env=None)
    recordings = pickle.load(sys.stdin.buffer)  # now that the modules of the conf are imported
    answers = [state_check.replay(gym, recording)
               for gym, recording in zip(state_check.gym_environments(env), recordings, strict=True) if recording]
    return next(filter(None, answers), _EQUAL)


if __name__ == '__main__':
    with processes.ending_with_parent():
        answer = _verify()
        sys.stderr.flush()
        sys.stdout.write(_ANSWER + answer)
        sys.stdout.flush()
        os._exit(0)  # an environment may hang or crash when it is closed
