"""What a trainer does differently where several processes train together; one for each case, with the same methods.

:class:`SingleProcess` is for one process: nothing is different. :class:`Distributed` is for one of several ranks
(:mod:`alfx.engine.remote.data_parallel`): the settings of the conf that count environments or samples are divided, rank
0 alone writes and evaluates, and all ranks take the same decisions at the same time, which one small exchange an
iteration sees to.
"""
import copy
import io
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from alfx import context, gin_utils
from alfx.config import TrainerConfig
from alfx.engine.remote import data_parallel
from alfx.environments.seeding import derived_seed
from alfx.gin_utils.value_checks import problem_at
from alfx.metrics.metric_set import MetricSet
from alfx.summary.writer import SilentWriter
from alfx.utils import random_state
from alfx.trainers.progress_display import ProgressDisplay
from alfx.trainers.run_summary import RunSummary
from alfx.trainers.signals import StopSignals
from alfx.trainers.team import joint_state
from alfx.trainers.team.joint_checkpoint import JointCheckpointer
from alfx.utils.checkpoint_utils import Checkpointer
from alfx.utils.processes import LostProcessError, is_orphan

logger = logging.getLogger(__name__)
T = TypeVar('T')
_RANK_STREAM = 6  # purpose of the seeds of ranks
_SAME_REQUEST_SECONDS = 3.0


class ParameterMismatchError(RuntimeError):
    """The ranks do not hold the same parameters any more."""


def make_team(config: TrainerConfig, ddp_rank: int) -> Any:
    """:class:`Distributed` for ``ddp_rank`` 0 and above, :class:`Alone` for -1.

    Raises:
        ValueError: another number.
        RuntimeError: this process has not been started as such a rank.
        ConfError: the configuration is not for several processes.
    """
    if ddp_rank < -1:
        raise ValueError(f'ddp_rank: expected the number of this process among those that train together, or -1 for '
                         f'one process alone, found {ddp_rank}')
    return SingleProcess() if ddp_rank == -1 else Distributed(config, ddp_rank)


class SingleProcess:
    """One process."""

    writes = True

    def set_random_seed(self, seed: int | None) -> int:
        """Seed all generators; returns the seed, which is drawn if it is None."""
        return random_state.set_random_seed(seed)

    def decide(self, make: Callable[[], T]) -> T:
        """What ``make()`` returns in rank 0."""
        return make()

    def start(self, algorithm: Any, random_seed: int) -> None:
        """The algorithm has been made."""

    def checkpointer(self, folder: str, **modules: Any) -> Checkpointer:
        """What writes and reads checkpoints."""
        return Checkpointer(folder, **modules)

    def summary(self, config: TrainerConfig, algorithm: Any, metrics: list[Any]) -> RunSummary:
        """What writes summaries."""
        return RunSummary(config, algorithm, metrics)

    def display(self, unit: str) -> ProgressDisplay:
        """What shows progress."""
        return ProgressDisplay(unit=unit)

    def signals(self) -> Any:
        """What takes signals."""
        return StopSignals()

    def agree(self, iteration: int, is_time: bool) -> bool:
        """At the end of an iteration, and after loading: whether it is time for a temporary checkpoint."""
        return is_time

    def check_parameters(self, algorithm: Any, iteration: int) -> None:
        """Look whether all ranks hold the same parameters, if that is due after ``iteration`` iterations."""

    def summarize_metrics(self, algorithm: Any) -> None:
        """Write the averages of the latest episodes."""
        algorithm.summarize_metrics()

    def final_infos(self, env: Any) -> list[dict[str, float]]:
        """The numbers in the infos that the latest episodes ended with; ``env``: of this process, or None."""
        return [] if env is None else env.latest_final_infos()

    def evaluate(self, algorithm: Any, run: Callable[[], bool]) -> None:
        """Evaluate by ``run()``, which tells whether that was done by this very process."""
        run()

    def report(self, error: BaseException | None) -> None:
        """Training ends with this error."""

    def reject_distributed_state(self) -> None:
        """From now on checkpoints are written without the help of others, some of which are gone."""


class Distributed:
    """One of several ranks.

    Args:
        config: the configuration of the run; what it says of the whole is replaced by the share of one rank.
        rank: of this process.

    Raises:
        RuntimeError: this process has not been started as that rank.
        ConfError: the configuration is not for several processes.
    """

    def __init__(self, config: TrainerConfig, rank: int):
        self._ranks: data_parallel.Ranks = context.get_ranks() or data_parallel.join(context.get_default_device())
        if self._ranks.rank != rank:
            raise RuntimeError(f'ddp_rank: expected {self._ranks.rank}, the rank of this process, found {rank}')
        self._config = config
        self._signals = _AgreedSignals()
        self._whole: list[Any] = []
        self._algorithm: Any = None
        self._checkpointer: JointCheckpointer | None = None
        for field, share in shares_of(config, self._ranks.size).items():
            setattr(config, field, share)

    @property
    def writes(self) -> bool:
        """Whether this rank writes files."""
        return self._ranks.is_first

    def set_random_seed(self, seed: int | None) -> int:
        """The same seed in all ranks, so that they make the same networks."""
        return random_state.set_random_seed(self.decide(lambda: random_state.set_random_seed(seed)))

    def decide(self, make: Callable[[], T]) -> T:
        """What ``make()`` returns in rank 0; it is not called in others."""
        return self._ranks.broadcast_from_rank0(make() if self._ranks.is_first else None)

    def start(self, algorithm: Any, random_seed: int) -> None:
        """Give ``algorithm`` the parameters of rank 0, and this rank random numbers of its own.

        Raises:
            ConfError: a layer takes statistics of its batch, or nobody divides the data of a supervised run.
        """
        check_layers(algorithm)
        check_data(self._config, algorithm)
        algorithm.activate_ddp(self._ranks.rank)
        self._algorithm = algorithm
        if not self._ranks.is_first:
            random_state.set_random_seed(derived_seed(random_seed, _RANK_STREAM, self._ranks.rank))

    def checkpointer(self, folder: str, **modules: Any) -> Checkpointer:
        """Checkpoints of all ranks together, which are those of one process."""
        self._checkpointer = JointCheckpointer(self._ranks, folder, **modules)
        return self._checkpointer

    def summary(self, config: TrainerConfig, algorithm: Any, metrics: list[Any]) -> RunSummary:
        """Summaries of the metrics of all ranks together, written by rank 0."""
        self._whole = [copy.deepcopy(metric) for metric in metrics]
        return RunSummary(config, algorithm, self._whole, None if self.writes else SilentWriter())

    def display(self, unit: str) -> ProgressDisplay:
        """Rank 0 shows progress."""
        return ProgressDisplay(None if self.writes else io.StringIO(), unit)

    def signals(self) -> Any:
        """Signals that reach any rank."""
        return self._signals

    def agree(self, iteration: int, is_time: bool) -> bool:
        """Add up the counters, and see whether any rank has been asked to stop or to write a checkpoint.

        Returns:
            Whether rank 0 finds that it is time for a temporary checkpoint.

        Raises:
            LostProcessError: a rank is gone.
        """
        counters = [] if self._config.ml_type == 'sl' else self._algorithm.get_step_metrics()
        own = [iteration, self._signals.own_stop_signal(is_orphan()), self._signals.own_request(), is_time,
               *(int(metric.result()) for metric in counters)]
        said = self._ranks.gather(torch.tensor(own, dtype=torch.float64, device=self._ranks.device)).tolist()
        assert all(row[0] == iteration for row in said), f'the ranks are in iterations {[row[0] for row in said]}'
        self._signals.agree(int(max(row[1] for row in said)), any(row[2] for row in said))
        for i, metric in enumerate(self._whole[:len(counters)]):
            metric.set(sum(int(row[4 + i]) for row in said))
        return bool(said[0][3])

    def check_parameters(self, algorithm: Any, iteration: int) -> None:
        """Compare statistics of all parameters, every ``TrainerConfig.ddp_paras_check_interval`` iterations.

        Raises:
            ParameterMismatchError: names a parameter and the ranks that differ from rank 0.
        """
        interval = self._config.ddp_paras_check_interval
        if not interval or iteration % interval:
            return
        own = algorithm.compute_paras_statistics()
        if not own:
            return
        names, values = list(own), torch.from_numpy(np.stack(list(own.values())).astype(np.float64))
        found = self._ranks.gather(values.to(self._ranks.device)).cpu().numpy()
        same = ((found == found[0]) | (np.isnan(found) & np.isnan(found[0]))).all(-1)  # [N, parameters]
        if same.all():
            return
        first = int(np.flatnonzero(~same.all(0))[0])
        different = np.flatnonzero(~same[:, first]).tolist()
        raise ParameterMismatchError(
            f'after iteration {iteration} {names[first]} is not the same in all processes: rank '
            f'{", ".join(map(str, different))} of {self._ranks.size} has (L1 norm, L2 norm, mean, standard deviation) '
            f'{found[different[0], first].tolist()}, rank 0 has {found[0, first].tolist()}. Something changes '
            'parameters by what one rank alone has seen: an optimizer that is stepped outside of an update, or a '
            'random number that decides it')

    def summarize_metrics(self, algorithm: Any) -> None:
        """Write the averages of the latest episodes of all ranks."""
        algorithm.get_metrics()  # which have seen everything then
        states = self._ranks.gather_objects(joint_state.metric_states(algorithm))
        if states is not None:
            joint_state.load_metrics(self._whole, states)
            counters = () if self._config.summarizes_over_env_steps else self._whole[:MetricSet.NUM_COUNTERS]
            for metric in self._whole:
                metric.gen_summaries(step_metrics=counters)

    def final_infos(self, env: Any) -> list[dict[str, float]]:
        """Those of the environments of all ranks, which rank 0 gets."""
        infos = self._ranks.gather_objects([] if env is None else env.latest_final_infos())
        return list(itertools.chain(*infos or ()))

    def evaluate(self, algorithm: Any, run: Callable[[], bool]) -> None:
        """Let rank 0 evaluate; what that changes, such as averages of rewards, the others get."""
        seen = None
        if self._ranks.is_first:
            with context.alone():
                seen = [x.cpu() for x in algorithm.buffers()] if run() else None
        seen = self._ranks.broadcast_from_rank0(seen)
        if seen is not None and not self._ranks.is_first:
            with torch.no_grad():
                for own, value in zip(algorithm.buffers(), seen, strict=True):
                    own.copy_(value)

    def report(self, error: BaseException | None) -> None:
        """Tell the other ranks why this one ends."""
        if error is not None:
            self._ranks.report(error)

    def reject_distributed_state(self) -> None:
        """Ranks are gone: the first one that is left writes what it has."""
        assert self._checkpointer is not None, 'training has begun'
        self._checkpointer.leave_group({metric.name: int(metric.result())
                                     for metric in self._whole[:MetricSet.NUM_COUNTERS]})


def shares_of(config: TrainerConfig, size: int) -> dict[str, int]:
    """What each of ``size`` ranks has of the settings that count samples, by field.

    Raises:
        ConfError: the configuration is not for several processes, or not for so many.
    """
    check_config(config)
    if config.ml_type == 'sl':
        return {}  # an algorithm divides the batches of its loader
    counts = {field: getattr(config, field) for field in ('mini_batch_size', 'initial_collect_steps')}
    return {field: data_parallel.share('TrainerConfig', field, count, size) for field, count in counts.items() if count}


def check_config(config: TrainerConfig) -> None:
    """Refuse what several processes cannot do together.

    Raises:
        ConfError: names the field.
    """
    own_processes = 'has processes of its own that act, and they belong to one process that trains'
    reasons = {
        'async_unroll': (config.async_unroll, own_processes),
        'num_ray_workers': (getattr(config, 'num_ray_workers', 0), own_processes),
        'offline_buffer_dir': (config.offline_buffer_dir, 'would give the same data to each of them'),
    }
    problems = [problem_at('TrainerConfig', name, f'= {getattr(config, name)!r} is not possible in several processes: '
                           f'it {why}', 'train in one process, or leave it at its default')
                for name, (is_set, why) in reasons.items() if is_set]
    if problems:
        raise gin_utils.ConfError(problems)


def check_data(config: TrainerConfig, algorithm: Any) -> None:
    """Refuse a supervised run in which every process would train on all of the data.

    Raises:
        ConfError: names the algorithm.
    """
    if config.ml_type == 'sl' and not getattr(algorithm, 'divides_batches', False):
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'algorithm_ctor', f'makes {type(algorithm).__name__}, whose data nobody divides among '
            'several processes', 'train in one process, or let it compute the loss of context.own_rows() of each batch '
            'and say so by divides_batches = True')])


def check_layers(algorithm: nn.Module) -> None:
    """Refuse layers that normalise by their own batch, of which a rank has only a share.

    Raises:
        ConfError: names them.
    """
    layers = [name for name, part in algorithm.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if layers:
        raise gin_utils.ConfError(f'batch norm is not possible in several processes, of which each sees a part of the '
                                  f'batch; found {", ".join(layers[:5])}',
                                  'normalise by layer, or train in one process')


class _AgreedSignals(StopSignals):
    """Signals as all ranks know of them: what reached one of them is so for all, from the end of the iteration on."""

    def __init__(self) -> None:
        super().__init__()
        self._agreed_stop: int | None = None
        self._agreed_request = False
        self._stopped_at = 0.0

    @property
    def stop_signal(self) -> int | None:
        """The signal that asked any rank to stop, or None."""
        return self._agreed_stop

    def take_checkpoint_request(self) -> bool:
        """Whether any rank has been asked for a checkpoint."""
        requested, self._agreed_request = self._agreed_request, False
        return requested

    def own_stop_signal(self, is_an_orphan: bool) -> int:
        """The signal that reached this rank, 0 for none; an orphan stops as if it had been terminated."""
        import signal
        own = self._stop_signal or 0
        return signal.SIGTERM if is_an_orphan and not own else own

    def own_request(self) -> bool:
        """Whether this rank has been asked for a checkpoint since the last call."""
        return super().take_checkpoint_request()

    def agree(self, stop_signal: int, is_requested: bool) -> None:
        """This is so in all ranks."""
        self._agreed_stop = self._agreed_stop or stop_signal or None
        self._agreed_request |= is_requested

    def _on_stop(self, number: int, frame: Any) -> None:
        """A terminal and ``torchrun`` both pass an interrupt on: what comes at once is the same one."""
        if self._stop_signal is not None and time.monotonic() - self._stopped_at < _SAME_REQUEST_SECONDS:
            return
        self._stopped_at = time.monotonic()
        super()._on_stop(number, frame)


__all__ = ['SingleProcess', 'LostProcessError', 'ParameterMismatchError', 'Distributed', 'make_team']
