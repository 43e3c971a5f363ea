"""Video of an evaluation episode for TensorBoard."""
import logging
from typing import Any

import numpy as np

from alfx import summary
from alfx.data_structures import TimeStep
from alfx.environments.environment_errors import EnvironmentStepError
from alfx.environments.rendering import fitted, frame_rate

logger = logging.getLogger(__name__)

_LONGER_SIDE = 300  # in pixels; larger frames are downsampled


class EvalVideo:
    """Recorder of the first episode of the first environment. Call it at each step.

    If the environment cannot be rendered, a warning is logged and the video ends; the run continues.

    Args:
        env: evaluation environments.
        num_steps: maximum number of steps.
    """

    def __init__(self, env: Any, num_steps: int):
        self._env, self._num_steps = env, num_steps
        self._frames: list[np.ndarray] = []
        self._is_over = False

    def __call__(self, time_step: TimeStep, alg_step: Any) -> None:
        """Render and record the frame of ``time_step``."""
        if self._is_over:
            return
        try:
            frame = self._env.render('rgb_array')
            stride = -(-max(frame.shape[:2]) // _LONGER_SIDE)
            frame = frame[::stride, ::stride]
            self._frames.append(fitted(frame, *(self._frames or [frame])[0].shape[:2]))
        except EnvironmentStepError:
            raise
        except Exception as error:  # noqa: BLE001 (environments of any kind)
            logger.warning('TrainerConfig.eval_video_steps = %d, but no video can be recorded: %s',
                           self._num_steps, error)
            self._is_over = True
            return
        self._is_over = len(self._frames) == self._num_steps or bool(time_step.is_last()[0])

    def write(self, name: str, step: int) -> None:
        """Log the video as a summary, if frames were recorded."""
        if self._frames:
            frames = np.stack(self._frames).transpose(0, 3, 1, 2)[None]
            summary.video(name, frames, step, frame_rate(self._env.metadata))
