"""Experiment trackers: Weights & Biases and MLflow.

A tracker needs an optional package, which is imported when a run that names it in ``TrainerConfig.loggers`` starts; see
:data:`TRACKERS`. It receives the values of ``progress.csv`` and all other scalars. By default nothing leaves the run
folder; the environment variables of the packages (``WANDB_MODE``, ``MLFLOW_TRACKING_URI``) change that.
"""
import http.client
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from alfx import summary
from alfx.gin_utils import ConfError, stored_files
from alfx.summary.writer import SilentWriter, SummaryWriter

logger = logging.getLogger(__name__)

_PROJECT = 'alfx'
_MOST_PARAMS = 100  # limit of MLflow for one call
_ANSWER_SECONDS = 5.0
_LONGEST = 6000  # limit of MLflow for the characters of a parameter


class Tracker:
    """Receiver of the values of a run.

    Args:
        root_dir: run folder; by default the files are written below ``train`` in it.
        run_id: id of this run in the tracker if the run is resumed; ``None`` for a new run.

    Attributes:
        run_id: id of this run in the tracker.
    """

    run_id: str

    def __init__(self, root_dir: str, run_id: str | None):
        raise NotImplementedError(f'{type(self).__name__}.__init__')

    def params(self, values: Mapping[str, str]) -> None:
        """Log the bindings of the conf."""
        raise NotImplementedError(f'{type(self).__name__}.params')

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values.

        Args:
            values: values by name.
            step: environment steps, or iterations if there is no environment. It need not increase between calls.
        """
        raise NotImplementedError(f'{type(self).__name__}.log')

    def close(self) -> None:
        """Write everything that is still buffered."""


class WandbTracker(Tracker):
    """Tracker for Weights & Biases; offline unless ``WANDB_MODE`` is set."""

    def __init__(self, root_dir: str, run_id: str | None):
        import wandb
        folder = os.path.join(root_dir, 'train')
        os.makedirs(folder, exist_ok=True)
        os.environ.setdefault('WANDB_INIT_TIMEOUT', '20')  # seconds
        os.environ.setdefault('WANDB_HTTP_TIMEOUT', '20')
        self._run = wandb.init(
            project=os.environ.get('WANDB_PROJECT', _PROJECT), name=os.path.basename(os.path.abspath(root_dir)),
            id=run_id or uuid.uuid4().hex[:8], resume='allow', dir=folder,
            mode=os.environ.get('WANDB_MODE', 'offline'), settings=wandb.Settings(console='off', silent=True))
        self._run.define_metric('step')
        self._run.define_metric('*', step_metric='step')  # evaluations are logged after later steps
        self.run_id = str(self._run.id)

    def params(self, values: Mapping[str, str]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, 'step': step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker(Tracker):
    """Tracker for MLflow; it writes to ``train/mlflow`` in the run folder unless ``MLFLOW_TRACKING_URI`` is set."""

    def __init__(self, root_dir: str, run_id: str | None):
        from mlflow import entities
        from mlflow.tracking import MlflowClient
        self._entities = entities
        os.environ.setdefault('MLFLOW_HTTP_REQUEST_TIMEOUT', '5')  # seconds; training waits for the server
        os.environ.setdefault('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '1')
        uri = os.environ.get('MLFLOW_TRACKING_URI')
        if uri is None:
            uri = 'file:' + os.path.abspath(os.path.join(root_dir, 'train', 'mlflow'))
            os.environ.setdefault('MLFLOW_ALLOW_FILE_STORE', 'true')  # newer releases require it for files
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get('MLFLOW_EXPERIMENT_NAME', _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.run_id = run_id or self._client.create_run(
            experiment_id, run_name=os.path.basename(os.path.abspath(root_dir))).info.run_id
        self._client.update_run(self.run_id, status='RUNNING')
        self._params: Mapping[str, str] = self._client.get_run(self.run_id).data.params

    def params(self, values: Mapping[str, str]) -> None:
        # MLflow parameters cannot be changed; a run that is extended keeps the original ones
        new = [self._entities.Param(_allowed(name), value[:_LONGEST]) for name, value in values.items()
               if _allowed(name) not in self._params]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self.run_id, params=new[first:first + _MOST_PARAMS])

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        # the file store cannot hold both a 'loss' and a 'loss/actor'
        self._client.log_batch(self.run_id, metrics=[
            self._entities.Metric(_allowed(name).replace('/', '.'), value, now, step)
            for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


TRACKERS: dict[str, type[Tracker]] = {'wandb': WandbTracker, 'mlflow': MlflowTracker}


def check_servers(names: Sequence[str]) -> None:
    """Raise an error if the server of a tracker does not answer within 5 seconds.

    Args:
        names: ``TrainerConfig.loggers``.

    Raises:
        ConfError: the message contains the address and says how to log without the server.
    """
    for name in names:
        server, remedy = _server(name)
        if server.startswith(('http://', 'https://')):
            try:
                urllib.request.urlopen(server, timeout=_ANSWER_SECONDS).close()
            except urllib.error.HTTPError:  # an answer, for example that a login is needed
                pass
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise ConfError(f"TrainerConfig.loggers: '{name}': the server {server} does not answer: {error}",
                                remedy) from error


def _server(name: str) -> tuple[str, str]:
    """Return the address of the server of a tracker, '' for none, and how to log without it."""
    if name == 'mlflow':
        return os.environ.get('MLFLOW_TRACKING_URI', ''), 'start it, or unset MLFLOW_TRACKING_URI to write files'
    is_online = name == 'wandb' and os.environ.get('WANDB_MODE', 'offline') in ('online', 'shared')
    server = os.environ.get('WANDB_BASE_URL', 'https://api.wandb.ai') if is_online else ''
    return server, 'check the connection, or unset WANDB_MODE to write files'


class Trackers:
    """All trackers of a run. A tracker that fails is logged once and then disabled; the run continues.

    Args:
        names: ``TrainerConfig.loggers``; 'tensorboard' is ignored.
        root_dir: run folder.

    Raises:
        ConfError: a tracker cannot be started.
    """

    def __init__(self, names: Sequence[str], root_dir: str):
        self._trackers: dict[str, Tracker] = {}
        path = os.path.join(root_dir, 'train', 'trackers.json')
        known = _read(path)
        for name in names:
            if name in TRACKERS:
                try:
                    self._trackers[name] = tracker = TRACKERS[name](root_dir, known.get(name))
                    if not isinstance(getattr(tracker, 'run_id', None), str):
                        raise TypeError(f'{type(tracker).__name__}.__init__ has to set run_id to a string')
                except Exception as error:  # third-party code may raise anything; nothing is lost at the start
                    raise ConfError(f"TrainerConfig.loggers: '{name}' cannot be started: {error}") from error
        if self._trackers:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, 'w', encoding='utf8') as file:
                json.dump(known | {name: tracker.run_id for name, tracker in self._trackers.items()}, file)

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def params(self, values: Mapping[str, str]) -> None:
        """Log the bindings of the conf."""
        self._each('params', values)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values; see :meth:`Tracker.log`."""
        self._each('log', values, step)

    def close(self) -> None:
        """Write everything that is still buffered."""
        self._each('close')
        self._trackers.clear()

    def _each(self, method: str, *arguments: Any) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # noqa: BLE001 - third-party code or the network may raise anything
                logger.error('%s is disabled after an error: %s: %s', name, type(error).__name__, error)
                del self._trackers[name]


def event_writer(folder: str, config: Any) -> SummaryWriter:
    """Create the writer of summaries: event files if ``config.loggers`` has 'tensorboard', else a silent writer.

    Args:
        folder: folder of the event files.
        config: object with ``loggers``, ``summaries_flush_secs`` and ``summary_max_queue``.
    """
    if 'tensorboard' not in config.loggers:
        return SilentWriter()
    return summary.create_summary_writer(folder, config.summaries_flush_secs, config.summary_max_queue)


def _read(path: str) -> dict[str, str]:
    try:
        found = stored_files.read_json(path, dict)
    except (FileNotFoundError, stored_files.FileError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _allowed(name: str) -> str:
    """Replace the characters that MLflow does not allow in a name."""
    return re.sub(r'[^\w\-. /]', '_', name)
