"""Where the numbers of a run go besides its own tables: Weights & Biases, MLflow.

A tracker is an optional package, imported when a run that names it in ``TrainerConfig.loggers`` begins; see
:data:`TRACKERS`. It gets what ``progress.csv`` gets, and all other scalars. By default nothing leaves the run folder:
the environment variables of the packages (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``) say otherwise.
"""
import importlib.util
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from alfx import summary
from alfx.gin_utils import ConfError
from alfx.summary.writer import SilentWriter, SummaryWriter

logger = logging.getLogger(__name__)

_PROJECT = 'alfx'
_MOST_PARAMS = 100  # that MLflow takes at once
_LONGEST = 6000  # characters of a parameter that MLflow takes


class Tracker:
    """Takes the numbers of a run.

    Args:
        root_dir: the run folder; what is written by default is below ``train`` in it.
        known_as: what the tracker called this run when it was started before; None for a new one.
    """

    def __init__(self, root_dir: str, known_as: str | None):
        raise NotImplementedError(f'{type(self).__name__}.__init__')

    @property
    def run_id(self) -> str:
        """What the tracker calls this run."""
        raise NotImplementedError(f'{type(self).__name__}.run_id')

    def params(self, values: Mapping[str, str]) -> None:
        """Take the bindings of the conf."""
        raise NotImplementedError(f'{type(self).__name__}.params')

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers.

        Args:
            values: by name.
            step: environment steps; iterations, where there is no environment. It need not grow from call to call.
        """
        raise NotImplementedError(f'{type(self).__name__}.log')

    def close(self) -> None:
        """Write what has not been written yet."""


class WandbTracker(Tracker):
    """Weights & Biases; offline unless ``WANDB_MODE`` says otherwise."""

    def __init__(self, root_dir: str, known_as: str | None):
        import wandb
        folder = os.path.join(root_dir, 'train')
        os.makedirs(folder, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get('WANDB_PROJECT', _PROJECT), name=os.path.basename(os.path.abspath(root_dir)),
            id=known_as or uuid.uuid4().hex[:8], resume='allow', dir=folder,
            mode=os.environ.get('WANDB_MODE', 'offline'), settings=wandb.Settings(console='off', silent=True))
        self._run.define_metric('step')
        self._run.define_metric('*', step_metric='step')  # evaluations come later than their step

    @property
    def run_id(self) -> str:
        return str(self._run.id)

    def params(self, values: Mapping[str, str]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, 'step': step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """MLflow; in ``train/mlflow`` of the run folder unless ``MLFLOW_TRACKING_URI`` says otherwise."""

    def __init__(self, root_dir: str, known_as: str | None):
        from mlflow import entities
        from mlflow.tracking import MlflowClient
        self._entities = entities
        uri = os.environ.get('MLFLOW_TRACKING_URI')
        if uri is None:
            uri = 'file:' + os.path.abspath(os.path.join(root_dir, 'train', 'mlflow'))
            os.environ.setdefault('MLFLOW_ALLOW_FILE_STORE', 'true')  # newer releases ask before they write to files
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get('MLFLOW_EXPERIMENT_NAME', _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run_id = known_as or self._client.create_run(
            experiment_id, run_name=os.path.basename(os.path.abspath(root_dir))).info.run_id
        self._client.update_run(self._run_id, status='RUNNING')
        self._params: Mapping[str, str] = self._client.get_run(self._run_id).data.params

    @property
    def run_id(self) -> str:
        return self._run_id

    def params(self, values: Mapping[str, str]) -> None:
        # they cannot be changed any more; a run that is made longer keeps those it began with
        new = [self._entities.Param(_allowed(name), value[:_LONGEST]) for name, value in values.items()
               if _allowed(name) not in self._params]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=new[first:first + _MOST_PARAMS])

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        # in a folder there cannot be both a 'loss' and a 'loss/actor'
        self._client.log_batch(self._run_id, metrics=[
            self._entities.Metric(_allowed(name).replace('/', '.'), value, now, step)
            for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


TRACKERS: dict[str, type[Tracker]] = {'wandb': WandbTracker, 'mlflow': MlflowTracker}
_PACKAGES = {'wandb': 'wandb', 'mlflow': 'mlflow-skinny'}


def check_packages(names: Sequence[str]) -> None:
    """Refuse trackers whose packages are missing.

    Args:
        names: ``TrainerConfig.loggers``.

    Raises:
        ConfError: one is; the message says how to install it.
    """
    for name in names:
        if name in TRACKERS and importlib.util.find_spec(name) is None:
            raise ConfError(f"TrainerConfig.loggers: '{name}' needs a package that is not installed here",
                            f'pip install {_PACKAGES[name]}')


class Trackers:
    """All trackers of a run. One that fails is told once and gets nothing any more: the run goes on.

    Args:
        names: ``TrainerConfig.loggers``; 'tensorboard' is none of them.
        root_dir: the run folder.

    Raises:
        ConfError: a tracker cannot begin.
    """

    def __init__(self, names: Sequence[str], root_dir: str):
        self._trackers: dict[str, Tracker] = {}
        path = os.path.join(root_dir, 'train', 'trackers.json')
        known = _read(path)
        for name in names:
            if name in TRACKERS:
                try:
                    self._trackers[name] = TRACKERS[name](root_dir, known.get(name))
                except Exception as error:  # of a package that others wrote, before anything is lost
                    raise ConfError(f"TrainerConfig.loggers: '{name}' cannot begin: {error}") from error
        if self._trackers:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, 'w', encoding='utf8') as file:
                json.dump(known | {name: tracker.run_id for name, tracker in self._trackers.items()}, file)

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def params(self, values: Mapping[str, str]) -> None:
        """Take the bindings of the conf."""
        self._each('params', values)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers; see :meth:`Tracker.log`."""
        self._each('log', values, step)

    def close(self) -> None:
        """Write what has not been written yet."""
        self._each('close')
        self._trackers.clear()

    def _each(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - of a package that others wrote, or of a network
                logger.error('%s gets nothing any more: %s: %s', name, type(error).__name__, error)
                del self._trackers[name]


def event_writer(folder: str, config: Any) -> SummaryWriter:
    """What takes summaries: a writer of event files, if ``config.loggers`` has 'tensorboard'.

    Args:
        folder: of the event files.
        config: ``loggers``, ``summaries_flush_secs``, ``summary_max_queue``.
    """
    if 'tensorboard' not in config.loggers:
        return SilentWriter()
    return summary.create_summary_writer(folder, config.summaries_flush_secs, config.summary_max_queue)


def _read(path: str) -> dict[str, str]:
    try:
        with open(path, encoding='utf8') as file:
            found = json.load(file)
    except (FileNotFoundError, ValueError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _allowed(name: str) -> str:
    """A name with the characters that MLflow takes."""
    return re.sub(r'[^\w\-. /]', '_', name)
