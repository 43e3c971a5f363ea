"""What a search conf says of the search itself; see ``docs/search.md``."""
import dataclasses
from typing import Any

from alfx import gin_utils
from alfx.gin_utils import ConfError
from alfx.gin_utils.value_checks import problem_at
from alfx.gin_utils.settings import setting, wrong_values
from alfx.search import seeds

SAMPLERS = ('tpe', 'random', 'grid', 'qmc', 'cmaes', 'gp')
PRUNERS = ('none', 'median', 'percentile', 'successive_halving', 'hyperband')


@gin_utils.configurable
@dataclasses.dataclass
class Search:
    """A hyperparameter search.

    What is tried:
        space: for each binding, ``'ppo/Adam.lr'`` or the name of a macro, the values to try: a list, or a text like
            ``'uniform(0, 1)'``; see :mod:`alfx.search.space`. Empty: the conf as it is, with several seeds.
        num_trials: how many combinations, those that fail or are pruned included; None: 20, the whole grid with the
            sampler 'grid', 1 if the space is empty.
        num_seeds: runs of each trial, with different seeds; the value of a trial is the mean over them.
        seed: of the search: what is drawn and the seed of every run depend on it.

    What is compared:
        function: ``@name`` of a configurable function; a trial is one call of it, in place of training, and its value
            what the function returns. It gets ``random_seed`` and ``report``, to call with ``(step, value)`` for the
            pruner, if it has arguments of these names.
        measure: a column of the table of the run: 'average_return', 'loss', 'env_info/...', 'measure/...'.
        measured_in: the table: 'evaluation' (``eval/progress.csv``) or 'training' (``progress.csv``).
        score: of a run: the 'last' value of the measure, the 'best', or the 'mean' of the last ``score_window``.
        score_window: with the score 'mean', of how many values; None: 5.
        direction: 'maximize' or 'minimize'.

    How it is searched:
        sampler: 'tpe', 'random', 'grid', 'qmc', 'cmaes' or 'gp'.
        sampler_arguments: further arguments of optuna's sampler.
        pruner: what ends bad trials early: 'none', 'median', 'percentile', 'successive_halving' or 'hyperband'. It sees
            the score after each evaluation of the first seed.
        pruner_arguments: further arguments of optuna's pruner.

    How it is run:
        executor: 'process': each run is a process of its own; 'ray': as remote tasks on a Ray cluster; 'inline': within
            the search, one after the other, for a ``function`` that takes no time.
        num_parallel: runs at a time.
        threads_per_run: of torch; None: the cores divided among the runs.
        device: as ``--device`` of ``alfx.bin.train``.
        run_seconds: stop a run after so long; what it has reached counts.
        total_seconds: stop the search after so long; it can go on later.
        give_up_after: stop if so many trials fail before any has succeeded.
        ray_address: 'host:port' of a cluster, or 'auto' for the one that this machine belongs to; None: that of the
            environment variable RAY_ADDRESS, or else one of its own on this machine, whatever else runs there.
        cpus_per_run: what Ray reserves for each run.
        gpus_per_run: what Ray reserves for each run.

    Raises:
        ConfError: a value has the wrong type, is out of range, or conflicts with another; all mistakes are listed.
    """
    space: dict = dataclasses.field(default_factory=dict)
    num_trials: int | None = setting(None, minimum=1, maximum=seeds.MAX_TRIALS, may_change=True)
    num_seeds: int = setting(1, minimum=1, maximum=seeds.MAX_SEEDS)
    seed: int = setting(0, minimum=0, maximum=2**32 - 1)
    function: Any = None
    measure: str = 'average_return'
    measured_in: str = setting('evaluation', choices=('evaluation', 'training'))
    score: str = setting('last', choices=('last', 'best', 'mean'))
    score_window: int | None = setting(None, minimum=1)
    direction: str = setting('maximize', choices=('maximize', 'minimize'))
    sampler: str = setting('tpe', choices=SAMPLERS)
    sampler_arguments: dict = dataclasses.field(default_factory=dict)
    pruner: str = setting('none', choices=PRUNERS, may_change=True)
    pruner_arguments: dict = dataclasses.field(default_factory=dict, metadata={'may_change': True})
    executor: str = setting('process', choices=('process', 'ray', 'inline'), may_change=True)
    num_parallel: int = setting(1, minimum=1, may_change=True)
    threads_per_run: int | None = setting(None, minimum=1, may_change=True)
    device: str = setting('cpu', may_change=True)
    run_seconds: float | None = setting(None, above=0, may_change=True)
    total_seconds: float | None = setting(None, above=0, may_change=True)
    give_up_after: int = setting(3, minimum=1, may_change=True)
    ray_address: str | None = setting(None, may_change=True)
    cpus_per_run: float = setting(1, minimum=0, may_change=True)
    gpus_per_run: float = setting(0, minimum=0, may_change=True)

    def __post_init__(self) -> None:
        found = wrong_values(self, 'Search') or self._conflicts()
        if found:
            raise ConfError(found)

    def _conflicts(self) -> list[Any]:
        by_function = [(name, 'is set, but what counts is the return value of Search.function')
                       for name in ('measure', 'measured_in', 'score', 'score_window', 'device')]
        conflicts = [
            *((self.function is not None, name, message, '') for name, message in by_function),
            *((self.executor != 'ray', name, f'is set, but the executor is {self.executor!r}', "use 'ray'")
              for name in ('ray_address', 'cpus_per_run', 'gpus_per_run')),
            *((self.executor == 'inline', name, "is set, but with the executor 'inline' one call follows the other, in "
               'this process', "use 'process'") for name in ('num_parallel', 'run_seconds', 'threads_per_run')),
            (self.score != 'mean', 'score_window', f"is set, but the score is {self.score!r}", "use 'mean'"),
            (self.sampler == 'grid', 'sampler_arguments', 'is set, but a grid takes none', ''),
            (self.pruner == 'none', 'pruner_arguments', "is set, but the pruner is 'none'", ''),
            (not self.space and self.num_trials != 1, 'num_trials', f'is {self.num_trials}, but the space is empty, so '
             'that all trials would be the same', 'use num_seeds for repeats'),
            (not self.space, 'sampler', 'is set, but the space is empty', ''),
        ]
        problems = [problem_at('Search', name, message, hint) for wrong, name, message, hint in conflicts
                    if wrong and getattr(self, name) != _defaults()[name]]
        if self.executor == 'inline' and self.function is None:
            problems.append(problem_at('Search', 'executor', "is 'inline', which is for a Search.function: training "
                                       'takes a process of its own', "use 'process'"))
        return problems


def _defaults() -> dict[str, Any]:
    return {field.name: {} if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(Search)}
