"""What is saved when training ends with an error that nobody has foreseen."""
import os
import sys
from typing import Any

import torch

from alfx import context
from alfx.config import TrainerConfig
from alfx.trainers.progress_display import ProgressDisplay
from alfx.utils.checkpoint_utils import Checkpointer


def save_crash(error: Exception, folder: str, algorithm: Any, state: Any, config: TrainerConfig,
               display: ProgressDisplay) -> None:
    """Save the state after ``error``, which may be from the middle of something, where no run goes on from by itself.

    Nothing is saved before the first iteration, of parameters that are not finite, or if the user is asked at a
    terminal (``TrainerConfig.confirm_checkpoint_upon_crash``) and says no.

    Args:
        error: what ended the training.
        folder: the folder of the checkpoints; ``crash`` below it is written to.
        algorithm: the root algorithm.
        state: the ``RunState``.
        config: of the run.
        display: where to ask, and to tell what has been saved.
    """
    is_finite = all(bool(torch.isfinite(p).all()) for p in algorithm.parameters())
    if state.iteration == 0 or not is_finite:
        return
    if config.confirm_checkpoint_upon_crash and sys.stdin is not None and sys.stdin.isatty():
        display.message(f'{type(error).__name__}: {error}\nsave a checkpoint of the state after it? [y/N]')
        if sys.stdin.readline().strip().lower() not in ('y', 'yes'):
            return
    path = Checkpointer(os.path.join(folder, 'crash'), alg=algorithm, trainer=state).save(context.get_global_counter())
    display.message(f'the state after the crash is in {path}')
