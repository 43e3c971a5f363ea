"""Python interface of alfx for programs and notebooks: :func:`train`, :func:`load`, :func:`evaluate`, :func:`plot`, ...

Each function loads the conf that it needs and clears it before it returns. The random state of the caller is preserved.
Only one thread of a process can use it at a time, see :mod:`alfx.utils.exclusive`.
"""
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from alfx import context, gin_utils
from alfx.config import TrainerConfig
from alfx.gin_utils.python_values import binding_lines
from alfx.gin_utils.registry import program_module
from alfx.offline.dataset_sources import reference_returns
from alfx.reports import comparing, curves
from alfx.runs import building, evaluator, playing, run_files, run_lock, zoo
from alfx.runs.callbacks import Callback
from alfx.runs.evaluator import EvalResult, evaluate_supervised
from alfx.runs.policy import Policy
from alfx.trainers import conf_check, devices
from alfx.trainers.policy_trainer import RLTrainer, SLTrainer
from alfx.utils import processes, random_state
from alfx.utils.exclusive import exclusive

__all__ = ['check', 'evaluate', 'load', 'plot', 'read_progress', 'train']
_CALLBACKS = 'TrainerConfig.callbacks'


def load(run: str | os.PathLike[str], checkpoint_step: int | str = 'latest', epsilon_greedy: float | None = 0.0,
         device: str = 'cpu', batch_size: int | None = None) -> Policy:
    """Load the trained policy of a run.

    Args:
        run: run folder, or ``zoo:NAME`` for a trained agent of alfx. A conf may import modules, so load only folders
            that you trust.
        checkpoint_step: checkpoint to load: the N of ``ckpt-N``, 'latest', or 'best' (see ``KeepBestCheckpoint``).
        epsilon_greedy: probability of sampling an action instead of taking the most likely action; None for the value
            in the conf.
        device: device of the networks: 'cpu', 'cuda', 'cuda:N', or 'auto' for the first GPU if one is available.
        batch_size: number of environments whose observations ``predict`` takes at once; None for a single environment
            without batch dimension.

    Raises:
        ConfError: the run has no environment, the folder or device does not exist, an argument is out of range, or
            another thread is training.
        CheckpointError: the checkpoint does not exist or does not match the algorithm.
    """
    with _stored('alfx.load', run, checkpoint_step, epsilon_greedy, device) as run:
        gin_utils.check_value('alfx.load', 'batch_size', batch_size, int, minimum=1, optional=True)
        env, algorithm = playing.make_policy(run, batch_size or 1, epsilon_greedy=epsilon_greedy, nonparallel=True)
        with env:
            playing.load_for_play(run, algorithm, checkpoint_step)
            return Policy(env, algorithm, batch_size)


@contextlib.contextmanager
def _stored(caller: str, run: str | os.PathLike[str], checkpoint_step: int | str, epsilon_greedy: float | None,
            device: str) -> Iterator[str]:
    """Check the arguments of ``caller``, load the conf of a run, and yield the path of its folder."""
    root_dir = os.path.abspath(zoo.run_folder(os.fspath(run)))
    if not os.path.isdir(root_dir):
        raise gin_utils.ConfError(f'run folder {root_dir} does not exist', 'pass the folder of a run, or zoo:NAME')
    gin_utils.check_value(caller, 'epsilon_greedy', epsilon_greedy, float, minimum=0, maximum=1, optional=True)
    if checkpoint_step not in ('latest', run_files.BEST):
        gin_utils.check_value(caller, 'checkpoint_step', checkpoint_step, int, minimum=0)
    with (exclusive(caller), gin_utils.loaded(None, root_dir=root_dir, same_run=False, allow_unused=True),
          random_state.preserved()):
        devices.use_device(devices.find_device(device))
        yield root_dir


def evaluate(run: str | os.PathLike[str], num_episodes: int = 20, num_environments: int = 1,
             checkpoint_step: int | str = 'latest', epsilon_greedy: float | None = 0.0, random_seed: int | None = None,
             device: str = 'cpu') -> EvalResult | dict[str, float]:
    """Evaluate a run, like ``alfx evaluate``.

    Args:
        run: run folder, see :func:`load`.
        num_episodes: number of episodes, over all environments.
        num_environments: number of environments.
        checkpoint_step: checkpoint to evaluate, see :func:`load`.
        epsilon_greedy: probability of sampling an action: 0 is the mode 'greedy' of ``alfx evaluate``, 1 the mode
            'sampled'; None for the value in the conf.
        random_seed: seed of the environments and of sampled actions; None for the seed of the run.
        device: device of the networks, see :func:`load`.

    Returns:
        The result, with returns and lengths of the episodes and ``statistics()``. For a supervised run, the measures
        of its algorithm on the test data by name; the arguments about episodes and actions must be left out.

    Raises:
        ConfError: see :func:`load`.
        CheckpointError: see :func:`load`.
    """
    for name, number in (('num_episodes', num_episodes), ('num_environments', num_environments)):
        gin_utils.check_value('alfx.evaluate', name, number, int, minimum=1)
    gin_utils.check_value('alfx.evaluate', 'random_seed', random_seed, int, minimum=0, maximum=2**32 - 1, optional=True)
    with _stored('alfx.evaluate', run, checkpoint_step, epsilon_greedy, device) as root_dir:
        config = playing.run_config(root_dir, random_seed)
        if config.ml_type == 'sl':
            if (num_episodes, num_environments, epsilon_greedy) != (20, 1, 0.0):
                raise gin_utils.ConfError(f'{root_dir} contains a supervised learning run, which has no episodes',
                                          'leave out num_episodes, num_environments and epsilon_greedy')
            algorithm = building.create_algorithm(config, None, trains=False)
            playing.load_for_play(root_dir, algorithm, checkpoint_step)
            return evaluate_supervised(algorithm, config)
        env, algorithm = playing.make_policy(root_dir, num_environments, random_seed, epsilon_greedy, renders=False)
        with env:
            playing.load_for_play(root_dir, algorithm, checkpoint_step)
            result = evaluator.evaluate(env, algorithm, num_episodes)
            return result._replace(reference=reference_returns(config.offline_datasets()))


def plot(runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], y: str | Sequence[str] = 'average_return',
         x: str | None = None, group_by: str = 'conf', smoothing: int = 1, labels: Sequence[str] = (),
         output: str | os.PathLike[str] | None = None) -> Any:
    """Plot the learning curves of runs, like ``alfx plot``.

    Args:
        runs: run folders, or folders that contain them.
        y: column of ``progress.csv``, or several, each with its own panel; 'all' for all columns.
        x: column of the horizontal axis; None for 'env_steps', or 'iteration' if a run has no environment steps.
        group_by: 'conf' averages the runs of the same conf, 'none' draws each run.
        smoothing: number of points of the moving average of each curve.
        labels: labels of the curves, in the order of ``runs``; empty for the names of the confs.
        output: file to write as well: .png, .pdf or .svg.

    Returns:
        A ``matplotlib.figure.Figure``; a notebook shows it as the value of its cell.

    Raises:
        ConfError: a folder is or contains no run, no run has the columns, or an argument is out of range.
    """
    gin_utils.check_value('alfx.plot', 'group_by', group_by, str, choices=('conf', 'none'))
    gin_utils.check_value('alfx.plot', 'smoothing', smoothing, int, minimum=1)
    folders = [os.fspath(run) for run in ([runs] if isinstance(runs, (str, os.PathLike)) else runs)]
    groups = comparing.labelled_groups(folders, group_by, labels)
    x, panels = curves.read_panels(groups, x, [y] if isinstance(y, str) else y, smoothing)
    return curves.figure_of(panels, x) if output is None else curves.draw(panels, x, os.fspath(output))


def check(conf: str | os.PathLike[str], params: Mapping[str, Any] | Sequence[str] = (),
          device: str = 'cpu') -> conf_check.CheckResult:
    """Check a conf like ``alfx check``: build everything and train until the first update.

    Args:
        conf: path of a conf, or the name of a conf shipped with alfx.
        params: bindings that override the conf, see :func:`train`.
        device: device of the networks, see :func:`load`.

    Returns:
        What the conf builds, and the bindings without effect; ``print`` shows it like ``alfx check``.

    Raises:
        ConfError: the conf has errors, or another thread is training.
    """
    lines, callbacks = _lines(params)
    with (exclusive('alfx.check'), tempfile.TemporaryDirectory(prefix='alfx_check_') as root_dir,
          gin_utils.loaded(os.fspath(conf), lines, allow_unused=True) as loaded, random_state.preserved()):
        context.reset()
        devices.use_device(devices.find_device(device))
        return conf_check.unused([*conf_check.check(root_dir, loaded.conf_file, callbacks)])


def _lines(params: Mapping[str, Any] | Sequence[str]) -> tuple[list[str], Sequence[Any]]:
    """Return bindings as gin text, and the callbacks among them that are objects."""
    callbacks: Sequence[Any] = ()
    if isinstance(params, Mapping):
        given = params.get(_CALLBACKS, ())
        given = [given] if isinstance(given, Callback) else given
        if isinstance(given, (list, tuple)) and any(isinstance(callback, Callback) for callback in given):
            callbacks, params = given, {name: value for name, value in params.items() if name != _CALLBACKS}
        main = None if processes.lost_program() else program_module() or None
        params = binding_lines(_without_environments(params), main)
    lines = [params] if isinstance(params, str) else [*(params or ())]
    if wrong := [line for line in lines if not isinstance(line, str)]:
        raise gin_utils.ConfError(f'params: expected a dict, or lines of a conf, found {wrong[0]!r}',
                                  "write {'TrainerConfig.random_seed': 1} or ['TrainerConfig.random_seed = 1']")
    return lines, callbacks


def _without_environments(params: Mapping[str, Any]) -> dict[str, Any]:
    """Replace environment objects with their ids, with bindings of ``suite_gym.load`` for their arguments."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, gymnasium.Env):
            spec = value.spec
            if spec is None or spec.id not in gymnasium.registry or spec.additional_wrappers:
                raise gin_utils.ConfError(
                    f'{name} = {value!r}: a run creates several environments, and this one cannot be created from its '
                    'id alone', 'pass its class, or a function that creates and wraps it')
            registered, scope = gymnasium.spec(spec.id), name[:name.rfind('/') + 1]
            given = {key: x for key, x in spec.kwargs.items()
                     if key != 'render_mode' and registered.kwargs.get(key) != x}
            new: dict[str, Any] = {'env_args': given} if given else {}
            if spec.max_episode_steps != registered.max_episode_steps:
                new['max_episode_steps'] = spec.max_episode_steps or 0  # 0: never
            spellings = {f'{scope}{path}load.{argument}' for argument in new for path in (
                '', 'suite_gym.', 'environments.suite_gym.', 'alfx.environments.suite_gym.')}
            if twice := spellings & params.keys():
                raise gin_utils.ConfError(f'{name} = {value!r} also sets {min(twice)}', 'leave out one of the two, or '
                                          f'pass the id {spec.id!r} instead of the environment')
            found |= {f'{scope}suite_gym.load.{argument}': x for argument, x in new.items()}
            value = spec.id
        found[name] = value
    return found


def train(conf: str | os.PathLike[str], params: Mapping[str, Any] | Sequence[str] = (),
          root_dir: str | os.PathLike[str] | None = None, device: str = 'cpu') -> float | None:
    """Train the algorithm described by a conf, or resume the run in ``root_dir``.

    Args:
        conf: path of a conf, or the name of a conf shipped with alfx.
        params: bindings that override the conf: ``{'ppo/Adam.lr': 1e-4}``, or gin text ``['ppo/Adam.lr = 1e-4']``. A
            value may be a number or an array of numpy, a path, a function or class, or a reference like '@Name()'.
            ``create_environment.env_name`` may be a class or function that returns a gymnasium environment, or an
            environment of ``gymnasium.make``, which is only used for its id and arguments.
            ``TrainerConfig.callbacks`` may be a list of objects, which the conf of the run then does not contain: pass
            them again to resume it.
        root_dir: run folder; None for a new folder below ``runs``; a stopped run prints its path.
        device: device of the networks, see :func:`load`.

    Returns:
        The mean return of the last evaluation, or of the latest training episodes if the conf does not evaluate; None
        if no episode has ended.

    Raises:
        ConfError: the conf has errors, the folder contains a run of another conf, or another thread uses alfx.
        KeyboardInterrupt: the user interrupted the run; a call with its ``root_dir`` resumes it. After another
            signal to stop, such as SIGTERM, a checkpoint is written and the signal is raised again.
    """
    conf = os.fspath(conf)
    lines, callbacks = _lines(params)
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
    if trainer.stop_signal is not None:
        signal.raise_signal(trainer.stop_signal)
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
