"""Python interface of alfx for programs and notebooks: ``alfx.train``, ``alfx.load`` and ``alfx.read_progress``.

Each function loads the conf that it needs and clears it before it returns. The random state of the caller is preserved.
Threads of one process take turns, see :mod:`alfx.utils.exclusive`.
"""
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from alfx import context, gin_utils
from alfx.config import TrainerConfig
from alfx.trainers import devices
from alfx.runs import playing
from alfx.gin_utils.python_values import binding_lines
from alfx.utils import random_state
from alfx.utils.exclusive import exclusive
from alfx.runs import run_files
from alfx.runs.callbacks import Callback
from alfx.runs import run_lock
from alfx.runs.policy import Policy
from alfx.trainers.policy_trainer import RLTrainer, SLTrainer

__all__ = ['load', 'read_progress', 'train']
_CALLBACKS = 'TrainerConfig.callbacks'


def load(run: str | os.PathLike[str], checkpoint_step: int | str = 'latest', epsilon_greedy: float | None = 0.0,
         device: str = 'cpu') -> Policy:
    """Load the trained policy of a run.

    Args:
        run: run folder. Its conf may import modules, so load only folders that you trust.
        checkpoint_step: checkpoint to load: the N of ``ckpt-N``, 'latest', or 'best' (see ``KeepBestCheckpoint``).
        epsilon_greedy: probability of sampling an action instead of taking the most likely action; None for the value
            in the conf.
        device: device of the networks: 'cpu', 'cuda', 'cuda:N', or 'auto' for the first GPU if one is available.

    Raises:
        ConfError: the run has no environment, the folder or device does not exist, an argument is out of range, or
            another thread trains.
        CheckpointError: the checkpoint does not exist or does not match the algorithm.
    """
    run = os.path.abspath(os.path.expanduser(run))
    if not os.path.isdir(run):
        raise gin_utils.ConfError(f'run folder {run} does not exist', 'set root_dir to the folder of a run')
    gin_utils.check_value('alfx.load', 'epsilon_greedy', epsilon_greedy, float, minimum=0, maximum=1, optional=True)
    if checkpoint_step not in ('latest', run_files.BEST):
        gin_utils.check_value('alfx.load', 'checkpoint_step', checkpoint_step, int, minimum=0)
    with (exclusive('alfx.load'), gin_utils.loaded(None, root_dir=run, same_run=False, allow_unused=True),
          random_state.preserved()):
        devices.use_device(devices.find_device(device))
        env, algorithm = playing.make_policy(run, num_environments=1, epsilon_greedy=epsilon_greedy)
        try:
            playing.load_for_play(run, algorithm, checkpoint_step)
            return Policy(env, algorithm)
        finally:
            env.close()


def train(conf: str | os.PathLike[str], params: Mapping[str, Any] | Sequence[str] = (),
          root_dir: str | os.PathLike[str] | None = None, device: str = 'cpu') -> float | None:
    """Train the algorithm described by a conf, or resume the run in ``root_dir``.

    Args:
        conf: path of a conf, or the name of a conf included in alfx.
        params: bindings that override the conf: ``{'ppo/Adam.lr': 1e-4}``, or gin text ``['ppo/Adam.lr = 1e-4']``. A
            value may be a number or an array of numpy, a path, or a function or class of an importable module.
            ``TrainerConfig.callbacks`` may be a list of objects, which the conf of the run then does not contain: pass
            them again to resume it.
        root_dir: run folder; None for a new folder below ``runs``.
        device: device of the networks, see :func:`load`.

    Returns:
        The mean return of the last evaluation, or of the latest training episodes if the conf does not evaluate; None
        if no episode has ended.

    Raises:
        ConfError: the conf has errors, the folder contains a run of another conf, or another thread uses alfx.
        KeyboardInterrupt: the user interrupted the run; the same call resumes it from its checkpoint.
    """
    conf = os.fspath(conf)
    callbacks: Sequence[Any] = ()
    if isinstance(params, Mapping):
        given = params.get(_CALLBACKS, ())
        if isinstance(given, (list, tuple)) and any(isinstance(callback, Callback) for callback in given):
            callbacks, params = given, {name: value for name, value in params.items() if name != _CALLBACKS}
        params = binding_lines(params)
    lines = [params] if isinstance(params, str) else [*params]
    if root_dir is None:
        name = os.path.splitext(os.path.basename(conf))[0]
        root_dir = os.path.join('runs', f'{name}-{time.strftime("%Y%m%d-%H%M%S")}')
    root_dir = os.path.abspath(os.path.expanduser(root_dir))
    with exclusive('alfx.train'), gin_utils.loaded(conf, lines, root_dir) as loaded, random_state.preserved():
        context.reset()  # clear the state of an earlier run
        devices.use_device(devices.find_device(device))
        with run_files.created_folder(root_dir), run_lock.held(root_dir):
            config = TrainerConfig(root_dir=root_dir, conf_file=loaded.conf_file)
            config.callbacks = callbacks or config.callbacks
            trainer = RLTrainer(config) if config.ml_type == 'rl' else SLTrainer(config)
            gin_utils.write_conf(root_dir, loaded, ['alfx.train', conf, *lines])
            trainer.train()
    if trainer.stop_signal == signal.SIGINT:
        raise KeyboardInterrupt
    return trainer.average_return()


def read_progress(run: str | os.PathLike[str], evaluation: bool = False) -> dict[str, np.ndarray]:
    """Return the learning curve of a run as a dict of columns, which ``pandas.DataFrame`` accepts.

    Args:
        run: the run folder.
        evaluation: read the evaluations instead of the training.

    Returns:
        Float64 arrays ``[N]`` by name ('env_steps', 'average_return', ...); NaN where a row has no value.

    Raises:
        ConfError: the run has not logged anything yet.
    """
    run = os.path.expanduser(run)
    path = run_files.eval_table(run) if evaluation else os.path.join(run, 'progress.csv')
    if not os.path.isfile(path):
        raise gin_utils.ConfError(f'file {path} does not exist', 'evaluations need TrainerConfig.evaluate = True' if
                                  evaluation else 'it is created when the run first logs its metrics')
    rows = run_files.read_table(path)
    return {name: np.array([float(row[name] or 'nan') for row in rows]) for name in (rows[0] if rows else ())}
