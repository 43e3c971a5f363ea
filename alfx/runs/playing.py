"""Play of a trained policy in a window or to a video file."""
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from alfx.checkpoints.checkpointer import Checkpointer
from alfx.checkpoints.files import CheckpointError
from alfx.config import TrainerConfig
from alfx.data_structures import TimeStep
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.environments.rendering import fitted, frame_rate
from alfx.gin_utils import ConfError
from alfx.runs import building, run_files, zoo
from alfx.runs.evaluator import EvalResult, evaluate
from alfx.summary.render import Image, enable_rendering, is_rendering_enabled
from alfx.utils import random_state

_log = logging.getLogger(__name__)
_MAX_FAILURES = 10  # frames that may be missing at the beginning of a video
_FORMATS = ('.mp4', '.gif')


def load_for_play(root_dir: str, algorithm: Any, checkpoint_step: int | str = 'latest',
                  ignored_parameter_prefixes: Sequence[str] = ()) -> int:
    """Load a checkpoint of a run into an algorithm that does not train.

    Args:
        root_dir: run folder.
        algorithm: algorithm created from the conf of the run.
        checkpoint_step: checkpoint to load: the N of ``ckpt-N``, 'latest', or 'best' (see ``KeepBestCheckpoint``).
        ignored_parameter_prefixes: parameters ``alg.<name>`` that start with one of these prefixes are not loaded.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: the checkpoint does not exist or does not match the algorithm.
    """
    folder = run_files.checkpoint_dir(root_dir)
    if checkpoint_step == run_files.BEST:
        folder, checkpoint_step = run_files.best_checkpoint_dir(root_dir), 'latest'
        if not os.path.isdir(folder):
            raise CheckpointError(f'{root_dir} has no best checkpoint; {run_files.HOW_TO_KEEP_BEST}')
    checkpointer = Checkpointer(folder, alg=algorithm)
    omitted = [f'alg.{name}.' for name in zoo.read_card(root_dir).get('omitted', ())]
    return checkpointer.load(checkpoint_step, [*ignored_parameter_prefixes, *omitted], ignore_unexpected=True,
                             load_options={'alg': {'skip_preloded': False}})


def run_config(root_dir: str, random_seed: int | None = None) -> TrainerConfig:
    """Create the configuration of a run from the loaded conf, and seed the random number generators.

    Args:
        root_dir: run folder.
        random_seed: random seed; None for the seed of the run.
    """
    config = TrainerConfig(root_dir=root_dir)
    if random_seed is not None:
        config.random_seed = random_seed
    elif config.random_seed is None:
        config.random_seed = run_files.StartRecord(root_dir).read().get('random_seed')
    config.random_seed = random_state.set_random_seed(config.random_seed)
    return config


def make_policy(root_dir: str, num_environments: int, random_seed: int | None = None,
                epsilon_greedy: float | None = None, renders: bool | None = None,
                nonparallel: bool | None = None) -> tuple[Any, Any]:
    """Create the environments and the algorithm of a run from its loaded conf, without loading a checkpoint.

    Args:
        root_dir: run folder.
        num_environments: number of environments.
        random_seed: seed of the environments and of sampled actions; None for the seed of the run.
        epsilon_greedy: probability of sampling an action instead of taking the most likely action; None for the value
            in the conf.
        renders: whether the environments will be rendered; None: unknown.
        nonparallel: whether to create the environments in this process; None for the setting of the conf.

    Returns:
        Environments and algorithm.

    Raises:
        ConfError: the run has no environment.
    """
    config = run_config(root_dir, random_seed)
    if config.ml_type != 'rl':
        raise ConfError(f'{root_dir} contains a supervised learning run, which has no policy to play',
                        f'evaluate it: python -m alfx.bin.evaluate --root_dir {root_dir!r}')
    env = building.create_eval_environment(config, num_environments, nonparallel, renders=renders)
    algorithm = building.create_algorithm(config, env, trains=False)
    if epsilon_greedy is not None:
        building.set_epsilon_greedy(algorithm, epsilon_greedy)
    return env, algorithm


def play(root_dir: str, env: Any, algorithm: Any, checkpoint_step: int | str = 'latest', num_episodes: int = 10,
         sleep_time_per_step: float = 0.01, record_file: str | None = None, last_step_repeats: int = 0,
         append_blank_frames: int = 0, render: bool = True, ignored_parameter_prefixes: Sequence[str] = (),
         report: Callable[[str], None] | None = None, max_frames: int = 20_000) -> EvalResult:
    """Load a checkpoint and play episodes.

    Args:
        root_dir: run folder.
        env: single environment (batch size 1).
        algorithm: algorithm created from the conf of the run. Images (``summary.render.Image``) in the info of its
            ``predict_step`` are shown next to the environment in the video.
        checkpoint_step: checkpoint to load, see :func:`load_for_play`.
        num_episodes: number of episodes.
        sleep_time_per_step: seconds to wait after each step in a window.
        record_file: video file to write, ``.mp4`` or ``.gif``, instead of opening a window.
        last_step_repeats: number of times to repeat the last frame of each episode in the video.
        append_blank_frames: number of black frames after each episode in the video.
        render: whether to open a window if no video is recorded.
        ignored_parameter_prefixes: see :func:`load_for_play`.
        report: called with a line about each episode.
        max_frames: maximum number of frames of the video; a warning is logged when it is reached.

    Returns:
        The result of the evaluation.

    Raises:
        CheckpointError: the checkpoint does not exist or does not match the algorithm.
        ConfError: the format of the video is unknown.
        UnsupportedOperationError: the environment cannot be rendered.
        ValueError: the batch size of ``env`` is not 1.
    """
    if env.batch_size != 1:
        raise ValueError(f'play needs a single environment, found a batch of size {env.batch_size}')
    load_for_play(root_dir, algorithm, checkpoint_step, ignored_parameter_prefixes)
    last_frame: Any = None
    failures, fps = 0, frame_rate(env.metadata)
    with video_writer(record_file, fps, max_frames) as add_frame, _rendering(record_file is not None):

        def show(time_step: TimeStep, info: Any) -> None:
            nonlocal last_frame, failures
            if record_file is not None:
                is_last = bool(time_step.is_last()[0])
                try:
                    last_frame = beside(env.render('rgb_array'), info)
                except UnsupportedOperationError as error:
                    failures += 1
                    if last_frame is None and (is_last or failures == _MAX_FAILURES):
                        raise
                    if failures == 1:
                        _log.warning('the video repeats a frame or omits it: %s', error)
                for _ in range(1 + (last_step_repeats if is_last else 0) if last_frame is not None else 0):
                    add_frame(last_frame)
                for _ in range(append_blank_frames if is_last else 0):
                    add_frame(np.zeros_like(last_frame))
            elif render:
                env.render('human')
                time.sleep(sleep_time_per_step)

        return evaluate(env, algorithm, num_episodes, _EpisodeReporter(show, report))


class _EpisodeReporter:
    """Callback that shows each step and reports each finished episode."""

    def __init__(self, show: Callable[[TimeStep, Any], None], report: Callable[[str], None] | None):
        self._show, self._report = show, report
        self._episode, self._return, self._length = 0, 0.0, 0

    def __call__(self, time_step: TimeStep, alg_step: Any) -> None:
        self._show(time_step, alg_step.info)
        if bool(time_step.is_first()[0]):
            self._return, self._length = 0.0, 0
            return
        self._return = self._return + time_step.reward[0].double().numpy()
        self._length += 1
        if bool(time_step.is_last()[0]) and self._report is not None:
            self._episode += 1
            returned = np.asarray(self._return)
            value = f'{returned:.6g}' if returned.ndim == 0 else np.array2string(returned, precision=6)
            self._report(f'episode {self._episode}: return {value}, length {self._length}')


def beside(frame: np.ndarray, info: Any) -> np.ndarray:
    """Append the images found in ``info`` to the right of ``frame``, uint8 ``[H, W, 3]``."""
    images = Image.pack_image_nest((Image(frame), info))
    assert images is not None, 'there is at least the image of the frame'
    return images.data


@contextlib.contextmanager
def _rendering(flag: bool) -> Iterator[None]:
    before = is_rendering_enabled()
    enable_rendering(flag)
    try:
        yield
    finally:
        enable_rendering(before)


@contextlib.contextmanager
def video_writer(path: str | None, fps: float, max_frames: int = 20_000) -> Iterator[Callable[[np.ndarray], None]]:
    """Write a video; the context manager yields a function that adds a frame, uint8 ``[H, W, 3]``.

    The video has the size of its first frame: see ``rendering.fitted``.

    Args:
        path: file to write, ``.mp4`` or ``.gif``; None to write nothing.
        fps: frames per second.
        max_frames: number of frames after which the file is completed and a warning is logged.

    Raises:
        ConfError: the format is unknown.
    """
    if path is None:
        yield lambda frame: None
        return
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in _FORMATS:
        raise ConfError(f'expected the name of a video that ends with {" or ".join(_FORMATS)}, found {path!r}')
    if os.path.isdir(path):
        raise ConfError(f'{path} is a folder', 'choose another file name for the video')
    import imageio
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    options: dict[str, Any] = {'fps': fps, 'macro_block_size': 1}
    if suffix == '.gif':
        options = {'duration': 1000 / fps, 'loop': 0}
    writer, count, size = imageio.get_writer(path, **options), 0, (0, 0)

    def add(frame: np.ndarray) -> None:
        nonlocal count, size
        count += 1
        if count == 1:
            size = (frame.shape[0] + frame.shape[0] % 2, frame.shape[1] + frame.shape[1] % 2)  # formats need even sizes
        if count <= max_frames:
            writer.append_data(fitted(frame, *size))
        if count == max_frames:
            writer.close()
            _log.warning('%s ends after %d frames (--max_frames); the rest of the episodes is played without a video. '
                         'If an episode does not end, limit it with max_episode_steps, for example '
                         '--conf_param suite_gym.load.max_episode_steps=1000', path, max_frames)

    try:
        yield add
    finally:
        if count < max_frames:
            writer.close()
