"""Global state of the process: run mode, counters, progress, summary writer, device, specs of the run and ranks.

Everything else is passed as an argument. A test that changes this state restores it with :func:`reset`.
"""
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from alfx import nest
from alfx.gin_utils import configurable
from alfx.process_state import PROGRESS_TYPES
from alfx.process_state import state as _state
from alfx.tensor_specs import NestedTensorSpec, TensorSpec

_EXE_MODES = ('normal', 'rollout', 'replay', 'eval', 'pretrain', 'auxiliary')

def reset() -> None:
    """Restore the state of a fresh process."""
    _state.__init__()  # type: ignore[misc]


# Run mode ------------------------------------------------------------------------------------------------------


def set_exe_mode(mode: str) -> None:
    """Set the run mode.

    Raises:
        ValueError: not one of 'normal', 'rollout', 'replay', 'eval', 'pretrain', 'auxiliary'.
    """
    if mode not in _EXE_MODES:
        raise ValueError(f'unknown run mode {mode!r}; expected one of {_EXE_MODES}')
    _state.exe_mode = mode


def exe_mode_name() -> str:
    """Return the run mode."""
    return _state.exe_mode


def is_rollout() -> bool:
    """Return whether steps are computed to collect experience."""
    return _state.exe_mode == 'rollout'


def is_replay() -> bool:
    """Return whether steps are computed to train on stored experience."""
    return _state.exe_mode == 'replay'


def is_eval() -> bool:
    """Return whether steps are computed to evaluate or to play."""
    return _state.exe_mode == 'eval'


def is_pretrain() -> bool:
    """Return whether steps are computed to pre-train on offline data."""
    return _state.exe_mode == 'pretrain'


def is_auxiliary() -> bool:
    """Return whether steps are computed for an auxiliary phase.

    An auxiliary phase runs only the parts up to the policy and updates no statistics.
    """
    return _state.exe_mode == 'auxiliary'


def freeze_statistics() -> bool:
    """Return whether running statistics must not be updated by the current computation."""
    return _state.freezes_statistics or _state.exe_mode in ('eval', 'auxiliary')


def frozen_statistics() -> AbstractContextManager[None]:
    """Context manager in which :func:`freeze_statistics` is true."""
    return _replaced('freezes_statistics', True)


def waiting_statistics() -> dict[Any, Any] | None:
    """Return the inputs of deferred statistics updates, keyed by statistics; ``None`` if updates are not deferred."""
    return _state.waiting_statistics


def defer_statistics(waiting: dict[Any, Any]) -> AbstractContextManager[None]:
    """Context manager that stores the inputs of statistics updates in ``waiting`` instead of applying them."""
    return _replaced('waiting_statistics', waiting)


def is_training() -> bool:
    """Return whether losses are computed: in supervised training, or in the run modes 'replay' and 'pretrain'."""
    return _state.exe_mode in ('normal', 'replay', 'pretrain')


def normalizes_by_batch() -> bool:
    """Return whether batch norm uses the statistics of the batch, see :class:`alfx.norm_layers.BatchNorm`."""
    return is_training() and not _state.uses_running_statistics


def running_statistics() -> AbstractContextManager[None]:
    """Context manager in which :class:`alfx.norm_layers.BatchNorm` uses its running statistics, without updates."""
    return _replaced('uses_running_statistics', True)


def counted_rows() -> Any:
    """Return the ``RowWeights`` of the current batch, see :func:`alfx.norm_layers.counted`; ``None`` if all count."""
    return _state.counted_rows


def set_counted_rows(rows: Any) -> AbstractContextManager[None]:
    """Context manager that sets :func:`counted_rows`."""
    return _replaced('counted_rows', rows)


class _replaced(AbstractContextManager[None]):
    """Context manager that temporarily sets ``attribute`` of the state."""

    def __init__(self, attribute: str, value: Any) -> None:
        self._attribute, self._value = attribute, value

    def __enter__(self) -> None:
        self._before = getattr(_state, self._attribute)
        setattr(_state, self._attribute, self._value)

    def __exit__(self, *_: Any) -> None:
        setattr(_state, self._attribute, self._before)


def _mode(mode: str) -> AbstractContextManager[None]:
    return _replaced('exe_mode', mode)


def rollout_context() -> Any:
    """Context manager for the run mode 'rollout'."""
    return _mode('rollout')


def replay_context() -> Any:
    """Context manager for the run mode 'replay'."""
    return _mode('replay')


def eval_context() -> Any:
    """Context manager for the run mode 'eval'."""
    return _mode('eval')


def pretrain_context() -> Any:
    """Context manager for the run mode 'pretrain'."""
    return _mode('pretrain')


def auxiliary_context() -> Any:
    """Context manager for the run mode 'auxiliary'."""
    return _mode('auxiliary')


# Counters and progress -----------------------------------------------------------------------------------------


def get_global_counter() -> int:
    """Return the number of finished iterations, or updates. It is the default step of summaries."""
    return _state.global_counter


def set_global_counter(counter: int) -> None:
    """Set the global counter."""
    _state.global_counter = int(counter)


def increment_global_counter() -> None:
    """Add 1 to the global counter."""
    _state.global_counter += 1


def update_progress(progress_type: str, value: float) -> None:
    """Set the progress of one type, see :func:`get_progress`."""
    _check_progress_type(progress_type)
    _state.progress[progress_type] = float(value)


def update_all_progresses(progresses: dict[str, float]) -> None:
    """Set the progress of several types at once."""
    own = _state.progress
    for progress_type, value in progresses.items():
        if progress_type not in own:
            _check_progress_type(progress_type)
        own[progress_type] = float(value)


def get_progress(progress_type: str) -> float:
    """Return the progress of the run.

    Args:
        progress_type: 'percent' (0 to 1), 'iterations', 'env_steps' or 'global_counter'.

    Raises:
        ValueError: ``progress_type`` is unknown.
    """
    _check_progress_type(progress_type)
    return _state.progress[progress_type]


def get_all_progresses() -> dict[str, float]:
    """Return the progress of every type."""
    return dict(_state.progress)


def _check_progress_type(progress_type: str) -> None:
    if progress_type not in PROGRESS_TYPES:
        raise ValueError(f'unknown progress type {progress_type!r}; expected one of {PROGRESS_TYPES}')


# Device --------------------------------------------------------------------------------------------------------


def get_default_device() -> torch.device:
    """Return the device of networks and training data."""
    return _state.device


def set_default_device(device_name: str | torch.device) -> None:
    """Set the device of networks and training data."""
    _state.device = torch.device(device_name)


def device(device_name: str | torch.device) -> AbstractContextManager[None]:
    """Context manager that temporarily changes the default device."""
    return _replaced('device', torch.device(device_name))


# Precision of float32 matrix products in policies -----------------------------------------------------------------


def get_acting_precision() -> str:
    """Return the precision at which policies act, a value of ``torch.set_float32_matmul_precision``."""
    return _state.acting_precision or torch.get_float32_matmul_precision()


def set_acting_precision(precision: str | None) -> None:
    """Set the precision at which policies act; ``None`` uses the process-wide precision."""
    _state.acting_precision = precision


class acting_precision(AbstractContextManager[None]):
    """Context manager that sets the float32 matrix product precision to the one for acting."""

    def __enter__(self) -> None:
        before, precision = torch.get_float32_matmul_precision(), get_acting_precision()
        self._before = None if precision == before else before
        if self._before is not None:  # setting the precision also changes CUDA settings, so skip it if it is unchanged
            torch.set_float32_matmul_precision(precision)

    def __exit__(self, *_: Any) -> None:
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before)


# Data-parallel ranks -----------------------------------------------------------------------------------------------


def get_ranks() -> Any:
    """Return the :class:`~alfx.engine.remote.data_parallel.Ranks` of this process; ``None`` for a single process."""
    return _state.ranks


def set_ranks(ranks: Any) -> None:
    """Set the ranks that this process trains with; ``None`` for a single process."""
    _state.ranks = ranks


def alone() -> AbstractContextManager[None]:
    """Context manager within which this process uses no collectives, as if it were the only rank."""
    return training_with(None)


def training_with(ranks: Any) -> AbstractContextManager[None]:
    """Context manager that temporarily sets the ranks."""
    return _replaced('ranks', ranks)


def num_ranks() -> int:
    """Return the number of data-parallel processes, 1 for a single process."""
    return 1 if _state.ranks is None else _state.ranks.size


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` averaged over all ranks, without gradient; ``tensor`` itself in a single process.

    A collective: every rank must call it the same number of times, in the same order, with the same shape.
    """
    return tensor if _state.ranks is None else _state.ranks.mean(tensor)


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` summed over all ranks, without gradient; see :func:`mean_over_ranks`."""
    return tensor if _state.ranks is None else _state.ranks.mean(tensor) * _state.ranks.size


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``tensor`` ``[n, ...]`` that belong to this rank; all rows in a single process.

    The numbers of rows of two ranks differ by at most 1, and a rank may have no rows.
    """
    return tensor if _state.ranks is None else _state.ranks.own_rows(tensor)


def cat_over_ranks(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along ``dim``; ``tensor`` itself in a single process.

    A collective: every rank must call it the same number of times, in the same order, with the same shape.
    """
    return tensor if _state.ranks is None else torch.cat(_state.ranks.gather(tensor).unbind(), dim)


# Summaries -----------------------------------------------------------------------------------------------------


def get_summary_writer() -> Any:
    """Return the writer of summaries, or ``None``."""
    return _state.writer


def set_summary_writer(writer: Any) -> None:
    """Set the writer of summaries; ``None`` disables summaries."""
    _state.writer = writer


def get_summary_step() -> int:
    """Return the step at which a summary is written now: the global counter, unless :func:`summaries_at` is active."""
    return _state.global_counter if _state.summary_step is None else int(_state.summary_step())


def summaries_at(step: Callable[[], float] | None) -> AbstractContextManager[None]:
    """Context manager that writes summaries at step ``step()``; ``None`` selects the global counter."""
    return _replaced('summary_step', step)


def should_record_summaries() -> bool:
    """Return whether a summary written now is recorded."""
    return _state.recording and _state.writer is not None


def record_if(condition: bool) -> AbstractContextManager[None]:
    """Context manager that records summaries only if ``condition`` holds."""
    return _replaced('recording', bool(condition))


@contextmanager
def summary_scope(name: str) -> Iterator[str]:
    """Context manager that prefixes the names of summaries with ``name/``."""
    _state.scopes.append(name)
    try:
        yield scope_name()
    finally:
        _state.scopes.pop()


def scope_name() -> str:
    """Return the active scopes, each followed by a slash."""
    return ''.join(f'{name}/' for name in _state.scopes)


# Environments --------------------------------------------------------------------------------------------------


def first_environment() -> int:
    """Return the run-wide number of the first environment of this process; other processes may hold lower numbers.

    Environments derive their random streams from it, so several processes together use the same streams as one process.
    """
    return _state.first_environment


def set_first_environment(number: int) -> None:
    """Set :func:`first_environment` permanently, before the environments are created."""
    _state.first_environment = number


def environments_from(first: int) -> AbstractContextManager[None]:
    """Context manager within which new or newly seeded environments are numbered from ``first``."""
    return _replaced('first_environment', first)


# Specs of the run ----------------------------------------------------------------------------------------------


def set_run_specs(raw_observation_spec: NestedTensorSpec, observation_spec: NestedTensorSpec,
                  action_spec: NestedTensorSpec, reward_spec: TensorSpec) -> None:
    """Make the specs of the run's environment available to conf files."""
    _state.specs = dict(raw_observation=raw_observation_spec, observation=observation_spec, action=action_spec,
                        reward=reward_spec)


def _spec(name: str) -> NestedTensorSpec:
    if name not in _state.specs:
        raise RuntimeError(f'the {name} spec is unknown until the environment has been created; use it only in '
                           'objects constructed by TrainerConfig.algorithm_ctor')
    return _state.specs[name]


@configurable
def get_raw_observation_spec(field: str | None = None) -> NestedTensorSpec:
    """Return the observation spec of the environment before all data transformers, or the part of it at ``field``."""
    return nest.get_field(_spec('raw_observation'), field)


@configurable
def get_observation_spec(field: str | None = None) -> NestedTensorSpec:
    """Return the observation spec of the run after the data transformers, or the part of it at ``field``."""
    return nest.get_field(_spec('observation'), field)


@configurable
def get_action_spec() -> NestedTensorSpec:
    """Return the action spec of the run's environment."""
    return _spec('action')


@configurable
def get_reward_spec() -> TensorSpec:
    """Return the reward spec of the run's environment."""
    return _spec('reward')
