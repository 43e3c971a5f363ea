"""What a program or notebook uses of alfx: ``alfx.train``, ``alfx.load``, ``alfx.read_progress``.

Each of them loads the conf that it needs and forgets it before it returns. Random numbers of the caller stay as they
were.
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
from alfx.utils import random_state
from alfx.runs import run_files
from alfx.runs import run_lock
from alfx.runs.policy import Policy
from alfx.trainers.policy_trainer import RLTrainer, SLTrainer

__all__ = ['load', 'read_progress', 'train']


def load(run: str, checkpoint_step: int | str = 'latest', epsilon_greedy: float | None = 0.0,
         device: str = 'cpu') -> Policy:
    """The trained policy of a run, ready to act.

    Args:
        run: the run folder. Its conf may import modules: load only what you trust.
        checkpoint_step: which checkpoint: the N of ``ckpt-N``, or 'latest'.
        epsilon_greedy: chance of sampling an action instead of taking the most likely one; None for what the conf says.
        device: where networks are: 'cpu', 'cuda', 'cuda:N', or 'auto' for the first GPU if there is one.

    Raises:
        ConfError: the folder holds no run in environments, or there is no such device.
        CheckpointError: there is no such checkpoint, or it does not fit.
    """
    run = os.path.abspath(os.path.expanduser(run))
    if not os.path.isdir(run):
        raise gin_utils.ConfError(f'there is no run folder {run}', 'give the root_dir of a run')
    devices.use_device(devices.find_device(device))
    with gin_utils.loaded(None, root_dir=run, same_run=False, allow_unused=True), random_state.preserved():
        env, algorithm = playing.make_policy(run, num_environments=1, epsilon_greedy=epsilon_greedy)
        try:
            playing.load_for_play(run, algorithm, checkpoint_step)
            return Policy(env, algorithm)
        finally:
            env.close()


def train(conf: str, params: Mapping[str, Any] | Sequence[str] = (), root_dir: str | None = None,
          device: str = 'cpu') -> float | None:
    """Train what a conf describes, or go on with the run in ``root_dir``.

    Args:
        conf: a path, or the name of a conf that comes with alfx.
        params: bindings that override the conf, ``{'ppo/Adam.lr': 1e-4}``, or as gin text, ``['ppo/Adam.lr = 1e-4']``.
        root_dir: the run folder; None for a new one below ``runs``.
        device: where networks are, as of :func:`load`.

    Returns:
        The mean return of the last evaluation, or of the latest episodes of training if the conf evaluates nothing;
        None if no episode has ended.

    Raises:
        ConfError: the conf has mistakes, or the folder holds a run of another conf.
        KeyboardInterrupt: the user interrupted the run; the same call goes on with it from its checkpoint.
    """
    lines = [f'{key} = {value!r}' for key, value in params.items()] if isinstance(params, Mapping) else list(params)
    if root_dir is None:
        name = os.path.splitext(os.path.basename(conf))[0]
        root_dir = os.path.join('runs', f'{name}-{time.strftime("%Y%m%d-%H%M%S")}')
    root_dir = os.path.abspath(os.path.expanduser(root_dir))
    context.reset()  # of a run before
    devices.use_device(devices.find_device(device))
    with gin_utils.loaded(conf, lines, root_dir) as loaded, random_state.preserved():
        with run_files.made_folder(root_dir), run_lock.held(root_dir):
            config = TrainerConfig(root_dir=root_dir, conf_file=loaded.conf_file)
            trainer = RLTrainer(config) if config.ml_type == 'rl' else SLTrainer(config)
            gin_utils.write_conf(root_dir, loaded, ['alfx.train', conf, *lines])
            trainer.train()
    if trainer.stop_signal == signal.SIGINT:
        raise KeyboardInterrupt
    return trainer.average_return()


def read_progress(run: str, evaluation: bool = False) -> dict[str, np.ndarray]:
    """The learning curve of a run: a column for each quantity, ``pandas.DataFrame`` takes it as it is.

    Args:
        run: the run folder.
        evaluation: the evaluations in place of the training.

    Returns:
        float64 ``[N]`` by name: 'env_steps', 'average_return' and so on; NaN where a row has no value.

    Raises:
        ConfError: the run has written none.
    """
    run = os.path.expanduser(run)
    path = run_files.eval_table(run) if evaluation else os.path.join(run, 'progress.csv')
    if not os.path.isfile(path):
        raise gin_utils.ConfError(f'there is no {path}', 'evaluations need TrainerConfig.evaluate = True' if evaluation
                                  else 'it is written with the first summary of a run')
    rows = run_files.read_table(path)
    return {name: np.array([float(row[name] or 'nan') for row in rows]) for name in (rows[0] if rows else ())}
