"""Fork of a run: a new run that starts from a checkpoint of another run with some bindings changed.

Both runs share their history and random numbers up to the fork, so differences afterwards are due to the changed
bindings and not to chance.
"""
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from alfx import gin_utils
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.checkpoints.reading import read_checkpoint
from alfx.gin_utils import stored_files
from alfx.runs import run_files

_RECORD = 'branch.json'


def branch(run: str, step: int | str, params: Sequence[str], root_dir: str, trusted: bool = True) -> int:
    """Create the run folder of a fork. It is built under a temporary name, so it is created completely or not at all.

    Args:
        run: run folder of the original run.
        step: the N of its ``ckpt-N``, 'latest', or 'best' (see :class:`alfx.runs.callbacks.KeepBestCheckpoint`).
        params: bindings to change, as for ``--conf_param``.
        root_dir: run folder of the fork.
        trusted: whether the conf may import modules.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged.
        ConfError: the checkpoint does not exist, a binding is wrong, ``root_dir`` exists and is not empty, or it cannot
            be written.
        OSError: the disk is full.
    """
    checkpoints = run_files.best_checkpoint_dir(run) if step == run_files.BEST else run_files.checkpoint_dir(run)
    steps = Checkpointer(checkpoints).steps()
    step = steps[-1] if isinstance(step, str) and steps else step
    if step == run_files.BEST:
        raise gin_utils.ConfError(f'{run} has no best checkpoint', run_files.HOW_TO_KEEP_BEST)
    if step not in steps:
        raise gin_utils.ConfError(f'{run} has no checkpoint {step}',
                                  'available: ' + (', '.join(map(str, steps)) or 'none'))
    if os.path.exists(root_dir) and (not os.path.isdir(root_dir) or os.listdir(root_dir)):
        raise gin_utils.ConfError(f'{root_dir} already exists', 'choose another folder for the fork')
    read_checkpoint(os.path.join(checkpoints, f'ckpt-{step}'))
    with gin_utils.loaded(None, params, run, same_run=False, trusted=trusted) as conf:
        parent, name = os.path.split(os.path.abspath(root_dir))
        try:
            os.makedirs(parent, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f'.{name[:100]}.', dir=parent) as aside:
                folder = os.path.join(aside, 'fork')
                gin_utils.copy_conf(run, folder, conf)
                _copy_results(run, checkpoints, step, params, folder)
                os.rename(folder, root_dir)
        except OSError as error:
            run_files.explain_folder_error(root_dir, error)
            raise
    return int(step)


def _copy_results(run: str, checkpoints: str, step: int | str, params: Sequence[str], root_dir: str) -> None:
    """Copy a checkpoint and everything that was logged, and record the origin of the fork."""
    target = run_files.checkpoint_dir(root_dir)
    os.makedirs(target)
    for path in glob.glob(os.path.join(glob.escape(checkpoints), f'ckpt-{step}*')):
        if os.path.basename(path).partition('.')[0] == f'ckpt-{step}' and os.path.isfile(path):
            shutil.copy2(path, target)
    for name in (*glob.glob('*.csv', root_dir=run), os.path.join('train', 'start.json'),
                 os.path.join('eval', 'progress.csv')):
        _copy(run, root_dir, name)
    for folder in ('train', 'eval'):  # later entries are removed when the fork starts
        for path in glob.glob(os.path.join(glob.escape(os.path.join(run, folder)), '*.tfevents.*')):
            _copy(run, root_dir, os.path.join(folder, os.path.basename(path)))
    with open(os.path.join(run_files.train_dir(root_dir), _RECORD), 'w', encoding='utf8') as file:
        json.dump({'run': os.path.abspath(run), 'step': step, 'set': list(params)}, file, indent=2)


def _copy(run: str, root_dir: str, name: str) -> None:
    if os.path.isfile(os.path.join(run, name)):
        os.makedirs(os.path.dirname(os.path.join(root_dir, name)), exist_ok=True)
        shutil.copy2(os.path.join(run, name), os.path.join(root_dir, name))


def branched_at(root_dir: str) -> int | None:
    """Return the step of the checkpoint from which a run was forked, or None if it is not a fork."""
    path = os.path.join(run_files.train_dir(root_dir), _RECORD)
    if not os.path.lexists(path):
        return None
    return stored_files.read_json(path, {'step': range(2**62)}, 'restore the file from a copy, or fork the run again')[
        'step']


def has_own_checkpoint(root_dir: str) -> bool:
    """Return whether a run has another checkpoint than the one from which it was forked."""
    return bool({*Checkpointer(run_files.checkpoint_dir(root_dir)).steps()} - {branched_at(root_dir)})


class OptimizerSettings:
    """Optimizer settings of the conf, such as learning rates, which loading a checkpoint would overwrite.

    Args:
        algorithm: algorithm created from the conf, before a checkpoint is loaded.
    """

    def __init__(self, algorithm: Any):
        self._algorithm = algorithm
        not_settings = ('params', 'iterations')  # AdamTF counts the steps of a group
        self._settings = [{key: value for key, value in group.items() if key not in not_settings}
                          for group in self._groups()]

    def restore(self) -> None:
        """Restore the settings of the conf after a checkpoint was loaded."""
        for group, settings in zip(self._groups(), self._settings):
            group.update(settings)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._algorithm.optimizers(include_ignored_attributes=True):
            yield from optimizer.param_groups
