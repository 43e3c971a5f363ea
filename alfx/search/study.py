"""Study of a hyperparameter search: an optuna study with its sampler and pruner, stored in the search folder.

Only the process that holds the lock of the search folder writes the study. Each change is on disk before it takes
effect. A trial that was running when the process was killed remains in the state 'running', and :meth:`Study.running`
returns it again.
"""
import contextlib
import itertools
import os
import types
import warnings
from collections.abc import Iterator
from typing import Any

from alfx.gin_utils import ConfError
from alfx.search import seeds
from alfx.search.search_settings import Search
from alfx.search.space import Values
from alfx.utils.extras import pip_install

_NAME = 'search'
_NUM_TRIALS = 20
_SAMPLERS = {'tpe': 'TPESampler', 'random': 'RandomSampler', 'grid': 'RandomSampler', 'qmc': 'QMCSampler',
             'cmaes': 'CmaEsSampler', 'gp': 'GPSampler'}
_PRUNERS = {'none': 'NopPruner', 'median': 'MedianPruner', 'percentile': 'PercentilePruner',
            'successive_halving': 'SuccessiveHalvingPruner', 'hyperband': 'HyperbandPruner'}
_PACKAGES = {'cmaes': ('cmaes', ), 'qmc': ('scipy', ), 'gp': ('scipy', 'torch')}


def import_optuna() -> Any:
    """Import optuna and return the module.

    Raises:
        ConfError: optuna is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfError(f'a hyperparameter search needs optuna, which cannot be imported: {error}',
                        pip_install('search')) from None
    return optuna


class Study:
    """Trials of a hyperparameter search.

    Args:
        path: file of the study; it need not exist.
        settings: settings of the hyperparameter search.
        space: values to try for each binding.

    Raises:
        ConfError: optuna or a package of the sampler is not installed, or optuna rejects an argument.
    """

    def __init__(self, path: str, settings: Search, space: dict[str, Values]):
        self._optuna = import_optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._settings, self._space = settings, space
        self._grid = list(itertools.product(*(_grid(name, values) for name, values in space.items()))) \
            if settings.sampler == 'grid' else []
        sampler, pruner = self._sampler(0), self._pruner()
        _drop_unfinished_line(path)
        storage = self._optuna.storages.JournalStorage(_backend(path))
        self._study = self._optuna.create_study(storage=storage, study_name=_NAME, load_if_exists=True,
                                                direction=settings.direction, sampler=sampler, pruner=pruner)

    @property
    def num_trials(self) -> int:
        """Total number of trials."""
        if not self._space:
            return 1
        if self._settings.sampler == 'grid':
            return min(len(self._grid), self._settings.num_trials or len(self._grid))
        return self._settings.num_trials or _NUM_TRIALS

    def trials(self) -> list[Any]:
        """Return all started trials, sorted by number, as optuna's ``FrozenTrial``."""
        return self._study.get_trials(deepcopy=False, states=self._states('RUNNING', 'COMPLETE', 'PRUNED', 'FAIL'))

    def running(self) -> list[Any]:
        """Return the running trials as optuna's ``Trial``, with all parameters sampled."""
        found = []
        for trial in self._study.get_trials(deepcopy=False, states=self._states('RUNNING')):
            self._study.sampler = self._sampler(trial.number)
            found.append(self._sample(self._optuna.trial.Trial(self._study, trial._trial_id)))
        return found

    def best(self) -> Any | None:
        """Return the best completed trial, or None if no trial is completed."""
        complete = self._study.get_trials(deepcopy=False, states=self._states('COMPLETE'))
        sign = 1 if self._settings.direction == 'maximize' else -1
        return max(complete, key=lambda trial: (sign * trial.value, -trial.number)) if complete else None

    def ask(self) -> Any:
        """Return a new trial as optuna's ``Trial``."""
        trials = self._study.get_trials(deepcopy=False)
        waiting = [trial.number for trial in trials if trial.state.name == 'WAITING']  # killed before the trial started
        number = waiting[0] if waiting else len(trials)
        if self._grid and not waiting:
            self._study.enqueue_trial(dict(zip(self._space, self._grid[number])))
        self._study.sampler = self._sampler(number)
        with _quiet():
            return self._sample(self._study.ask())

    def _sample(self, trial: Any) -> Any:
        with _quiet():
            for name, values in self._space.items():
                values.suggest(trial, name)
        return trial

    def short_texts(self, params: dict[str, Any]) -> dict[str, str]:
        """Return the parameters of a trial for display, with numbers rounded to five digits."""
        return {name: f'{params[name]:.5g}' if isinstance(params[name], float) else text
                for name, text in self.texts(params).items()}

    def texts(self, params: dict[str, Any]) -> dict[str, str]:
        """Return the parameters of a trial in the syntax of confs."""
        return {name: values.text(params[name]) for name, values in self._space.items() if name in params}

    def is_logarithmic(self, name: str) -> bool:
        """Return whether a parameter is sampled on a logarithmic scale."""
        return getattr(self._space[name], 'log', False)

    def choices(self, name: str) -> list[str]:
        """Return the values of a choice; empty for a range."""
        return getattr(self._space[name], 'texts', [])

    def report(self, trial: Any, curve: list[float]) -> bool:
        """Report the new values of a curve to the pruner, and return whether to stop the trial."""
        if self._settings.pruner == 'none':
            return False
        for step in range(self._study.get_trials(deepcopy=False)[trial.number].last_step or 0, len(curve)):
            trial.report(curve[step], step + 1)
            if trial.should_prune():
                return True
        return False

    def note(self, trial: Any, name: str, value: Any) -> None:
        """Store a value with a trial, for the tables."""
        trial.set_user_attr(name, value)

    def complete(self, trial: Any, value: float) -> None:
        """Complete a trial with its value."""
        self._tell(trial, value, 'COMPLETE')

    def prune(self, trial: Any) -> None:
        """End a trial that the pruner stopped; its value is the last reported value."""
        self._tell(trial, None, 'PRUNED')

    def fail(self, trial: Any, log_tail: str) -> None:
        """End a failed trial, which has no value."""
        self.note(trial, 'log_tail', log_tail)
        self._tell(trial, None, 'FAIL')

    def _tell(self, trial: Any, value: float | None, state: str) -> None:
        with _quiet():
            self._study.tell(trial, value, state=self._states(state)[0])

    def _states(self, *names: str) -> tuple[Any, ...]:
        return tuple(getattr(self._optuna.trial.TrialState, name) for name in names)

    def _sampler(self, number: int) -> Any:
        """Return a sampler for one trial, with its own seed, so that the samples do not depend on interruptions."""
        settings, arguments = self._settings, dict(self._settings.sampler_arguments)
        if 'seed' in arguments:
            raise ConfError("Search.sampler_arguments: 'seed' cannot be set here", 'set Search.seed instead')
        seed = seeds.sampler_seed(settings.seed, number)
        if settings.sampler == 'qmc':  # one sequence for all trials; the study stores the position
            seed = seeds.sampler_seed(settings.seed, 0)
            arguments.setdefault('scramble', True)
            arguments.setdefault('independent_sampler', self._optuna.samplers.RandomSampler(
                seed=seeds.sampler_seed(settings.seed, number)))
        if settings.sampler == 'tpe':  # parallel trials should differ
            arguments.setdefault('constant_liar', True)
            arguments.setdefault('n_startup_trials', min(10, max(5, self.num_trials // 4)))
        if settings.sampler in ('qmc', 'cmaes'):
            arguments.setdefault('warn_independent_sampling', False)
        for package in _PACKAGES.get(settings.sampler, ()):
            _require(package, f'the sampler {settings.sampler!r}')
        return self._create('samplers', _SAMPLERS[settings.sampler], 'sampler_arguments', {**arguments, 'seed': seed})

    def _pruner(self) -> Any:
        arguments = dict(self._settings.pruner_arguments)
        if self._settings.pruner == 'percentile':
            arguments.setdefault('percentile', 25.0)
        return self._create('pruners', _PRUNERS[self._settings.pruner], 'pruner_arguments', arguments)

    def _create(self, module: str, name: str, setting: str, arguments: dict[str, Any]) -> Any:
        try:
            with _quiet():
                return getattr(getattr(self._optuna, module), name)(**arguments)
        except (TypeError, ValueError) as error:
            raise ConfError(f'Search.{setting}: optuna.{module}.{name} rejects the arguments: {error}') from None


def _grid(name: str, values: Values) -> list[Any]:
    try:
        return values.grid()
    except ConfError as error:
        raise ConfError(f'Search.space: {name}: {error.problems[0].message}', error.problems[0].hint) from None


def _require(package: str, what: str) -> None:
    try:
        __import__(package)
    except ImportError as error:
        raise ConfError(f'{what} needs the package {package}, which cannot be imported: {error}',
                        f'pip install {package}') from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings of optuna about features that may change in later versions."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def _backend(path: str) -> Any:
    from optuna.storages.journal import JournalFileBackend
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # the lock of the search folder suffices, and a killed process releases it
    lock: Any = types.SimpleNamespace(acquire=lambda: True, release=lambda: None)
    return JournalFileBackend(path, lock_obj=lock)


def _drop_unfinished_line(path: str) -> None:
    """Remove an incomplete last line, which a process leaves if it is killed while writing."""
    if not os.path.isfile(path):
        return
    with open(path, 'rb+') as file:
        data = file.read()
        file.truncate(data.rfind(b'\n') + 1)
