"""Differences between training in a single process and distributed training, as two classes with the same methods.

:class:`SingleProcess` is for a single process. :class:`Distributed` is for one of several ranks
(:mod:`alfx.engine.remote.data_parallel`): settings that count environments or samples are divided by the number of
ranks, only rank 0 writes and evaluates, and one small all-reduce per iteration makes all ranks make the same decisions.
"""
import copy
import io
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from alfx import context, gin_utils
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.config import TrainerConfig
from alfx.engine.remote import data_parallel
from alfx.environments.seeding import derived_seed
from alfx.gin_utils.value_checks import problem_at
from alfx.metrics.metric_set import MetricSet
from alfx.norm_layers import is_batch_norm
from alfx.summary.writer import SilentWriter
from alfx.trainers.distributed import joint_state
from alfx.trainers.distributed.joint_checkpoint import JointCheckpointer
from alfx.trainers.progress_display import ProgressDisplay
from alfx.trainers.run_summary import RunSummary
from alfx.trainers.signals import StopSignals
from alfx.utils import random_state
from alfx.utils.processes import is_orphan

logger = logging.getLogger(__name__)
T = TypeVar('T')
_RANK_STREAM = 6  # stream of the seeds of ranks
_SAME_REQUEST_SECONDS = 3.0


class ParameterMismatchError(RuntimeError):
    """Raised if the parameters differ between ranks."""


def make_strategy(config: TrainerConfig, ddp_rank: int) -> Any:
    """Create a :class:`Distributed` for a rank, or a :class:`SingleProcess` for ``ddp_rank`` -1.

    Raises:
        ValueError: ``ddp_rank`` is less than -1.
        RuntimeError: this process was not started as this rank.
        ConfError: the configuration does not support distributed training.
    """
    if ddp_rank < -1:
        raise ValueError(f'ddp_rank: expected the rank of this process, or -1 for a single process, found {ddp_rank}')
    return SingleProcess() if ddp_rank == -1 else Distributed(config, ddp_rank)


class SingleProcess:
    """Training in a single process."""

    writes = True

    def set_random_seed(self, seed: int | None) -> int:
        """Seed all random number generators; return the seed, which is chosen at random if it is None."""
        return random_state.set_random_seed(seed)

    def decide(self, make: Callable[[], T]) -> T:
        """Return the result of ``make()``."""
        return make()

    def start(self, algorithm: Any, random_seed: int) -> None:
        """Prepare training after the algorithm was created."""

    def checkpointer(self, folder: str, **modules: Any) -> Checkpointer:
        """Create the checkpointer."""
        return Checkpointer(folder, **modules)

    def summary(self, config: TrainerConfig, algorithm: Any, metrics: list[Any]) -> RunSummary:
        """Create the summary writer of the run."""
        return RunSummary(config, algorithm, metrics)

    def display(self, unit: str) -> ProgressDisplay:
        """Create the progress display."""
        return ProgressDisplay(unit=unit)

    def signals(self) -> Any:
        """Create the signal handler."""
        return StopSignals()

    def agree(self, iteration: int, is_time: bool) -> bool:
        """Return whether a temporary checkpoint is due, at the end of an iteration and after loading."""
        return is_time

    def check_parameters(self, algorithm: Any, iteration: int) -> None:
        """Check that all ranks have the same parameters, if the check is due."""

    def summarize_metrics(self, algorithm: Any) -> None:
        """Log the averages of the latest episodes."""
        algorithm.summarize_metrics()

    def gather(self, value: T) -> list[T]:
        """Return ``[value]``."""
        return [value]

    def evaluate(self, algorithm: Any, run: Callable[[], bool]) -> None:
        """Call ``run()``, which returns whether the evaluation was done in this process."""
        run()

    def report(self, error: BaseException | None) -> None:
        """Tell the other ranks about the error that ends training, if there is one."""

    def leave_group(self) -> None:
        """Write checkpoints without the other ranks from now on, because some are lost."""


class Distributed:
    """Distributed training, as seen by one rank.

    Args:
        config: configuration of the run; settings for all ranks are replaced by the share of one rank.
        rank: rank of this process.

    Raises:
        RuntimeError: this process was not started as this rank.
        ConfError: the configuration does not support distributed training.
    """

    def __init__(self, config: TrainerConfig, rank: int):
        self._ranks: data_parallel.Ranks = context.get_ranks() or data_parallel.join(context.get_default_device())
        if self._ranks.rank != rank:
            raise RuntimeError(f'ddp_rank: expected {self._ranks.rank}, the rank of this process, found {rank}')
        self._config = config
        self._signals = _AgreedSignals()
        self._global_metrics: list[Any] = []
        self._algorithm: Any = None
        self._checkpointer: JointCheckpointer | None = None
        for field, share in shares_of(config, self._ranks.size).items():
            setattr(config, field, share)

    @property
    def writes(self) -> bool:
        """Return whether this rank writes files."""
        return self._ranks.is_first

    def set_random_seed(self, seed: int | None) -> int:
        """Use the same seed on all ranks, so that they create the same networks."""
        return random_state.set_random_seed(self.decide(lambda: random_state.set_random_seed(seed)))

    def decide(self, make: Callable[[], T]) -> T:
        """Return the result of ``make()`` on rank 0; the other ranks do not call it."""
        return self._ranks.broadcast_from_rank0(make() if self._ranks.is_first else None)

    def start(self, algorithm: Any, random_seed: int) -> None:
        """Copy the parameters of rank 0 to ``algorithm``, and seed this rank with its own random stream.

        Raises:
            ConfError: a layer computes batch statistics, or a supervised algorithm does not divide its batches.
        """
        check_layers(algorithm)
        check_data(self._config, algorithm)
        algorithm.activate_ddp(self._ranks.rank)
        self._algorithm = algorithm
        if not self._ranks.is_first:
            random_state.set_random_seed(derived_seed(random_seed, _RANK_STREAM, self._ranks.rank))

    def checkpointer(self, folder: str, **modules: Any) -> Checkpointer:
        """Create the checkpointer of all ranks, which writes checkpoints in the format of a single process."""
        self._checkpointer = JointCheckpointer(self._ranks, folder, **modules)
        return self._checkpointer

    def summary(self, config: TrainerConfig, algorithm: Any, metrics: list[Any]) -> RunSummary:
        """Create the summary writer for the metrics over all ranks; only rank 0 writes."""
        self._global_metrics = [copy.deepcopy(metric) for metric in metrics]
        return RunSummary(config, algorithm, self._global_metrics, None if self.writes else SilentWriter())

    def display(self, unit: str) -> ProgressDisplay:
        """Create the progress display; only rank 0 shows it."""
        return ProgressDisplay(None if self.writes else io.StringIO(), unit)

    def signals(self) -> Any:
        """Return the signal handler, which reacts to signals to any rank."""
        return self._signals

    def agree(self, iteration: int, is_time: bool) -> bool:
        """Sum the counters over all ranks, and exchange the requests to stop or to write a checkpoint.

        Returns:
            Whether a temporary checkpoint is due on rank 0.

        Raises:
            LostProcessError: a rank is lost.
        """
        counters = [] if self._config.ml_type == 'sl' else self._algorithm.get_step_metrics()
        own = [iteration, self._signals.own_stop_signal(is_orphan()), self._signals.own_request(), is_time,
               *(int(metric.result()) for metric in counters)]
        gathered = self._ranks.gather(torch.tensor(own, dtype=torch.float64, device=self._ranks.device)).tolist()
        assert all(row[0] == iteration for row in gathered), f'ranks are in iterations {[row[0] for row in gathered]}'
        self._signals.agree(int(max(row[1] for row in gathered)), any(row[2] for row in gathered))
        for i, metric in enumerate(self._global_metrics[:len(counters)]):
            metric.set(sum(int(row[4 + i]) for row in gathered))
        return bool(gathered[0][3])

    def check_parameters(self, algorithm: Any, iteration: int) -> None:
        """Compare statistics of all parameters, every ``TrainerConfig.ddp_paras_check_interval`` iterations.

        Raises:
            ParameterMismatchError: parameters differ from rank 0; the message names a parameter and the ranks.
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
            f'parameter {names[first]} differs between ranks after iteration {iteration}: rank '
            f'{", ".join(map(str, different))} of {self._ranks.size} has (L1 norm, L2 norm, mean, standard deviation) '
            f'{found[different[0], first].tolist()}, rank 0 has {found[0, first].tolist()}. Parameters are '
            'changed by data of a single rank, for example by an optimizer step outside of an update or by a decision '
            'that depends on a random number')

    def summarize_metrics(self, algorithm: Any) -> None:
        """Log the averages of the latest episodes of all ranks."""
        algorithm.get_metrics()  # updates the metrics with all steps
        states = self._ranks.gather_objects(joint_state.metric_states(algorithm))
        if states is not None:
            joint_state.load_metrics(self._global_metrics, states)
            counters = () if self._config.summarizes_over_env_steps else self._global_metrics[:MetricSet.NUM_COUNTERS]
            for metric in self._global_metrics:
                metric.gen_summaries(step_metrics=counters)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0; empty on other ranks."""
        return self._ranks.gather_objects(value) or []

    def evaluate(self, algorithm: Any, run: Callable[[], bool]) -> None:
        """Evaluate on rank 0, and copy the buffers that this changes (such as reward averages) to the other ranks."""
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
        """Tell the other ranks about the error that ends training, if there is one."""
        if error is not None:
            self._ranks.report(error)

    def leave_group(self) -> None:
        """Write checkpoints without the other ranks from now on; the first surviving rank writes its own state."""
        assert self._checkpointer is not None, 'training has not started'
        self._checkpointer.leave_group({metric.name: int(metric.result())
                                     for metric in self._global_metrics[:MetricSet.NUM_COUNTERS]})


def shares_of(config: TrainerConfig, size: int) -> dict[str, int]:
    """Return the share of each of ``size`` ranks of the settings that count samples, by field.

    Raises:
        ConfError: the configuration does not support distributed training, or not with this number of ranks.
    """
    check_config(config)
    if config.ml_type == 'sl':
        return {}  # the algorithm divides the batches of its data loader
    counts = {field: getattr(config, field) for field in ('mini_batch_size', 'initial_collect_steps')}
    return {field: data_parallel.share('TrainerConfig', field, count, size) for field, count in counts.items() if count}


def check_config(config: TrainerConfig) -> None:
    """Check that a configuration supports distributed training.

    Raises:
        ConfError: a setting is incompatible; the message names it.
    """
    own_processes = 'asynchronous actors need a single training process'
    reasons = {
        'async_unroll': (config.async_unroll, own_processes),
        'num_ray_workers': (getattr(config, 'num_ray_workers', 0), own_processes),
        'offline_buffer_dir': (config.offline_buffer_dir, 'every process would get the same data'),
    }
    problems = [problem_at('TrainerConfig', name, f'= {getattr(config, name)!r} is not supported in distributed '
                           f'training: {why}', 'train in a single process, or remove the setting')
                for name, (is_set, why) in reasons.items() if is_set]
    if problems:
        raise gin_utils.ConfError(problems)


def check_data(config: TrainerConfig, algorithm: Any) -> None:
    """Check that a supervised algorithm divides its batches between the ranks.

    Raises:
        ConfError: every process would train on all data; the message names the algorithm.
    """
    if config.ml_type == 'sl' and not getattr(algorithm, 'divides_batches', False):
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'algorithm_ctor', f'= {type(algorithm).__name__}, which does not divide its batches '
            'between processes', 'train in a single process, or compute the loss on context.own_rows() of each batch '
            'and set divides_batches = True')])


def check_layers(algorithm: nn.Module) -> None:
    """Check that no layer normalizes by batch statistics, because each rank has only a part of the batch.

    Raises:
        ConfError: such layers exist; the message names them.
    """
    layers = [name for name, part in algorithm.named_modules() if is_batch_norm(part)]
    if layers:
        raise gin_utils.ConfError(f'batch norm is not supported in distributed training, because each process has only '
                                  f'a part of the batch; found {", ".join(layers[:5])}',
                                  'use layer norm, or train in a single process')


class _AgreedSignals(StopSignals):
    """Signals shared by all ranks: at the end of an iteration, a signal to one rank takes effect in all."""

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
        """Return whether a checkpoint was requested from any rank since the last call."""
        requested, self._agreed_request = self._agreed_request, False
        return requested

    def own_stop_signal(self, is_an_orphan: bool) -> int:
        """Return the stop signal to this rank, 0 for none; an orphaned process stops as after SIGTERM."""
        import signal
        own = self._stop_signal or 0
        return signal.SIGTERM if is_an_orphan and not own else own

    def own_request(self) -> bool:
        """Return whether a checkpoint was requested from this rank since the last call."""
        return super().take_checkpoint_request()

    def agree(self, stop_signal: int, is_requested: bool) -> None:
        """Set the requests shared by all ranks."""
        self._agreed_stop = self._agreed_stop or stop_signal or None
        self._agreed_request |= is_requested

    def _on_stop(self, number: int, frame: Any) -> None:
        """Handle a stop signal. Ignore repetitions within seconds: a terminal and ``torchrun`` both send interrupts."""
        if self._stop_signal is not None and time.monotonic() - self._stopped_at < _SAME_REQUEST_SECONDS:
            return
        self._stopped_at = time.monotonic()
        super()._on_stop(number, frame)
