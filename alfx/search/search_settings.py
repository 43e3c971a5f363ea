"""Settings of a hyperparameter search; see ``docs/search.md``."""
import dataclasses
from typing import Any

from alfx import gin_utils
from alfx.gin_utils import ConfError, problem_at
from alfx.gin_utils.settings import setting, wrong_values
from alfx.search import seeds

SAMPLERS = ('tpe', 'random', 'grid', 'qmc', 'cmaes', 'gp')
PRUNERS = ('none', 'median', 'percentile', 'successive_halving', 'hyperband')


@gin_utils.configurable
@dataclasses.dataclass
class Search:
    """Settings of a hyperparameter search.

    Search space:
        space: values to try for each binding (``'ppo/Adam.lr'``, or the name of a macro): a list, or a string like
            ``'uniform(0, 1)'``; see :mod:`alfx.search.space`. If empty, the conf is trained unchanged with several
            seeds.
        num_trials: number of trials, including failed and pruned trials; None: 20, or the whole grid with the sampler
            'grid', or 1 if the space is empty.
        num_seeds: number of runs per trial, with different seeds; the value of a trial is the mean over its runs.
        seed: random seed of the hyperparameter search; it determines the sampled values and the seed of every run.

    Objective:
        function: ``@name`` of a configurable function. A trial calls it instead of training, and its return value is
            the value of the trial. If it has parameters ``random_seed`` and ``report``, it receives the seed and a
            function to call with ``(step, value)`` for the pruner.
        measure: column of the table of a run: 'average_return', 'loss', 'env_info/...', 'measure/...'.
        measured_in: table of a run: 'evaluation' (``eval/progress.csv``) or 'training' (``progress.csv``).
        score: score of a run: the 'last' or 'best' value of the measure, or the 'mean' of the last ``score_window``
            values.
        score_window: number of values for the score 'mean'; None: 5.
        direction: 'maximize' or 'minimize'.

    Sampler and pruner:
        sampler: 'tpe', 'random', 'grid', 'qmc', 'cmaes' or 'gp'.
        sampler_arguments: additional arguments of optuna's sampler.
        pruner: pruner that stops bad trials early: 'none', 'median', 'percentile', 'successive_halving' or 'hyperband'.
            It uses the score after each evaluation of the first seed.
        pruner_arguments: additional arguments of optuna's pruner.

    Execution:
        executor: 'process': a separate process for each run; 'ray': actors on a Ray cluster; 'inline': calls one after
            the other in the process of the hyperparameter search, for a fast ``function``.
        num_parallel: number of parallel runs.
        threads_per_run: number of torch threads per run; None: the CPU cores divided by the number of parallel runs.
        device: see ``--device`` of ``alfx.bin.train``.
        run_seconds: time limit of a run; the run is stopped and keeps the score it has reached.
        total_seconds: time limit of the hyperparameter search; it can be resumed later.
        give_up_after: stop the hyperparameter search if this many trials fail before any succeeds.
        ray_address: 'host:port' of a Ray cluster, or 'auto' for the cluster of this machine; None: the environment
            variable RAY_ADDRESS, or else a new, separate cluster on this machine.
        cpus_per_run: number of CPUs that Ray reserves for each run.
        gpus_per_run: number of GPUs that Ray reserves for each run.

    Raises:
        ConfError: a value has the wrong type, is out of range, or conflicts with another value; all errors are listed.
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
        by_function = [(name, 'is set, but the value of a trial is the return value of Search.function')
                       for name in ('measure', 'measured_in', 'score', 'score_window', 'device')]
        conflicts = [
            *((self.function is not None, name, message, '') for name, message in by_function),
            *((self.executor != 'ray', name, f'is set, but the executor is {self.executor!r}', "use 'ray'")
              for name in ('ray_address', 'cpus_per_run', 'gpus_per_run')),
            *((self.executor == 'inline', name, "is set, but the executor 'inline' runs one call at a time in this "
               'process', "use 'process'") for name in ('num_parallel', 'run_seconds', 'threads_per_run')),
            (self.score != 'mean', 'score_window', f"is set, but the score is {self.score!r}", "use 'mean'"),
            (self.sampler == 'grid', 'sampler_arguments', 'is set, but a grid has no sampler arguments', ''),
            (self.pruner == 'none', 'pruner_arguments', "is set, but the pruner is 'none'", ''),
            (not self.space and self.num_trials != 1, 'num_trials', f'is {self.num_trials}, but the space is empty, so '
             'all trials would be identical', 'use num_seeds to repeat a run'),
            (not self.space, 'sampler', 'is set, but the space is empty', ''),
        ]
        problems = [problem_at('Search', name, message, hint) for wrong, name, message, hint in conflicts
                    if wrong and getattr(self, name) != _defaults()[name]]
        if self.executor == 'inline' and self.function is None:
            problems.append(problem_at('Search', 'executor', "is 'inline', which requires a Search.function: training "
                                       'needs a separate process', "use 'process'"))
        return problems


def _defaults() -> dict[str, Any]:
    return {field.name: {} if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(Search)}
