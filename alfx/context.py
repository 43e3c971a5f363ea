"""The only state of the process: run mode, counters, progress, summary writer, device, specs of the run, its ranks.

Everything else is an argument. A test that changes what lives here restores it with :func:`reset`.
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
    """Back to the state of a fresh process."""
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
    """The run mode."""
    return _state.exe_mode


def is_rollout() -> bool:
    """Whether steps are computed to collect experience."""
    return _state.exe_mode == 'rollout'


def is_replay() -> bool:
    """Whether steps are computed to train on stored experience."""
    return _state.exe_mode == 'replay'


def is_eval() -> bool:
    """Whether steps are computed to evaluate or play."""
    return _state.exe_mode == 'eval'


def is_pretrain() -> bool:
    """Whether steps are computed to pre-train on offline data."""
    return _state.exe_mode == 'pretrain'


def is_auxiliary() -> bool:
    """Whether steps are computed for an auxiliary phase: by the parts up to the policy, and nothing keeps statistics.
    """
    return _state.exe_mode == 'auxiliary'


def freeze_statistics() -> bool:
    """Whether what is computed now is not to be counted: statistics of what passes by are left as they are."""
    return _state.exe_mode in ('eval', 'auxiliary')


def waiting_statistics() -> dict[Any, Any] | None:
    """What statistics are to take in later, by statistics; None where they take it in at once."""
    return _state.waiting_statistics


def defer_statistics(waiting: dict[Any, Any]) -> AbstractContextManager[None]:
    """Context manager within which what statistics would take in is put into ``waiting``."""
    return _replaced('waiting_statistics', waiting)


class _replaced(AbstractContextManager[None]):
    """Context manager within which the state has another value for ``attribute``."""

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
    """How many iterations, or updates, have been done; summaries are written at it if no run says otherwise."""
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
    """Set several progresses at once."""
    own = _state.progress
    for progress_type, value in progresses.items():
        if progress_type not in own:
            _check_progress_type(progress_type)
        own[progress_type] = float(value)


def get_progress(progress_type: str) -> float:
    """How far the run has come.

    Args:
        progress_type: 'percent' (0 to 1), 'iterations', 'env_steps' or 'global_counter'.

    Raises:
        ValueError: an unknown type.
    """
    _check_progress_type(progress_type)
    return _state.progress[progress_type]


def get_all_progresses() -> dict[str, float]:
    """All progresses by type."""
    return dict(_state.progress)


def _check_progress_type(progress_type: str) -> None:
    if progress_type not in PROGRESS_TYPES:
        raise ValueError(f'unknown progress type {progress_type!r}; expected one of {PROGRESS_TYPES}')


# Device --------------------------------------------------------------------------------------------------------


def get_default_device() -> torch.device:
    """The device that networks and training data live on."""
    return _state.device


def set_default_device(device_name: str | torch.device) -> None:
    """Set the device that networks and training data live on."""
    _state.device = torch.device(device_name)


def device(device_name: str | torch.device) -> AbstractContextManager[None]:
    """Context manager for another default device."""
    return _replaced('device', torch.device(device_name))


# Float32 products of acting ------------------------------------------------------------------------------------


def get_acting_precision() -> str:
    """As for ``torch.set_float32_matmul_precision``: what policies compute with on the rows of environments."""
    return _state.acting_precision or torch.get_float32_matmul_precision()


def set_acting_precision(precision: str | None) -> None:
    """Set the precision of acting; ``None``: that of everything else."""
    _state.acting_precision = precision


class acting_precision(AbstractContextManager[None]):
    """Context manager within which float32 products have the precision of acting."""

    def __enter__(self) -> None:
        before, precision = torch.get_float32_matmul_precision(), get_acting_precision()
        self._before = None if precision == before else before
        if self._before is not None:  # setting it also touches what CUDA does
            torch.set_float32_matmul_precision(precision)

    def __exit__(self, *_: Any) -> None:
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before)


# Processes that train as one ------------------------------------------------------------------------------------


def get_ranks() -> Any:
    """The :class:`~alfx.engine.remote.data_parallel.Ranks` that this process trains with; ``None`` if it is alone."""
    return _state.ranks


def set_ranks(ranks: Any) -> None:
    """Set the processes that this one trains together with; ``None`` for none."""
    _state.ranks = ranks


def alone() -> AbstractContextManager[None]:
    """Context manager within which this process trains together with no others: what it does, they do not."""
    return training_with(None)


def training_with(ranks: Any) -> AbstractContextManager[None]:
    """Context manager within which ``ranks`` stand for the processes that this one trains together with."""
    return _replaced('ranks', ranks)


def num_ranks() -> int:
    """The number of processes that train together, 1 for this one alone."""
    return 1 if _state.ranks is None else _state.ranks.size


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` averaged over the processes that train together, without gradient; itself if there is only this one.

    It has the same shape in all of them. All have to call it equally often, in the same order.
    """
    return tensor if _state.ranks is None else _state.ranks.mean(tensor)


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum in place of the average of :func:`mean_over_ranks`."""
    return tensor if _state.ranks is None else _state.ranks.mean(tensor) * _state.ranks.size


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of ``tensor`` ``[n, ...]`` that belong to this one of the processes that train together; all for one.

    There may be one more or less than in another process, and none at all.
    """
    return tensor if _state.ranks is None else _state.ranks.own_rows(tensor)


def cat_over_ranks(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """``tensor`` of all processes that train together, one after the other along ``dim``; itself if there is only one.

    It has the same shape in all of them. All have to call it equally often, in the same order.
    """
    return tensor if _state.ranks is None else torch.cat(_state.ranks.gather(tensor).unbind(), dim)


# Summaries -----------------------------------------------------------------------------------------------------


def get_summary_writer() -> Any:
    """The writer that summaries go to, or ``None``."""
    return _state.writer


def set_summary_writer(writer: Any) -> None:
    """Set the writer that summaries go to; ``None`` for no summaries."""
    _state.writer = writer


def get_summary_step() -> int:
    """Where a summary written now is on the horizontal axis: the global counter, unless a run counts otherwise."""
    return _state.global_counter if _state.summary_step is None else int(_state.summary_step())


def summaries_at(step: Callable[[], float] | None) -> AbstractContextManager[None]:
    """Context manager within which summaries are written at ``step()``; at the global counter if that is None."""
    return _replaced('summary_step', step)


def should_record_summaries() -> bool:
    """Whether a summary written now would be recorded."""
    return _state.recording and _state.writer is not None


def record_if(condition: bool) -> AbstractContextManager[None]:
    """Context manager within which summaries are recorded if ``condition``."""
    return _replaced('recording', bool(condition))


@contextmanager
def summary_scope(name: str) -> Iterator[str]:
    """Context manager that puts ``name/`` before the names of summaries."""
    _state.scopes.append(name)
    try:
        yield scope_name()
    finally:
        _state.scopes.pop()


def scope_name() -> str:
    """The scopes in force, each followed by a slash."""
    return ''.join(f'{name}/' for name in _state.scopes)


# Environments --------------------------------------------------------------------------------------------------


def first_environment() -> int:
    """The number, among all of the run, of the first environment made in this process; others may have those before.

    It decides the random streams of environments, so that several processes together have those of one.
    """
    return _state.first_environment


def set_first_environment(number: int) -> None:
    """Set :func:`first_environment` for good, before the environments are made."""
    _state.first_environment = number


def environments_from(first: int) -> AbstractContextManager[None]:
    """Context manager within which environments that are made or seeded are numbered from ``first``."""
    return _replaced('first_environment', first)


# Specs of the run ----------------------------------------------------------------------------------------------


def set_run_specs(raw_observation_spec: NestedTensorSpec, observation_spec: NestedTensorSpec,
                  action_spec: NestedTensorSpec, reward_spec: TensorSpec) -> None:
    """Make the specs of the run's environment available to conf files."""
    _state.specs = dict(raw_observation=raw_observation_spec, observation=observation_spec, action=action_spec,
                        reward=reward_spec)


def _spec(name: str) -> NestedTensorSpec:
    if name not in _state.specs:
        raise RuntimeError(f'the {name} spec is not known before the environment has been created; refer to it only '
                           'in what is constructed by TrainerConfig.algorithm_ctor')
    return _state.specs[name]


@configurable
def get_raw_observation_spec(field: str | None = None) -> NestedTensorSpec:
    """The observation spec of the run's environment before any data transformer, or its part at ``field``."""
    return nest.get_field(_spec('raw_observation'), field)


@configurable
def get_observation_spec(field: str | None = None) -> NestedTensorSpec:
    """The observation spec of the run after the data transformers, or its part at ``field``."""
    return nest.get_field(_spec('observation'), field)


@configurable
def get_action_spec() -> NestedTensorSpec:
    """The action spec of the run's environment."""
    return _spec('action')


@configurable
def get_reward_spec() -> TensorSpec:
    """The reward spec of the run's environment."""
    return _spec('reward')
