"""Summary operations.

They do nothing, at almost no cost, unless summaries are being recorded: a writer is set (``create_summary_writer``,
``set_default_writer``) and the code runs inside ``record_if(True)``. Names are prefixed by the enclosing scopes. The
default step is the step of the run (environment steps or the global counter, see ``TrainerConfig.summary_axis``). Data
is copied by the call, so it may be modified afterwards.
"""

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from alfx import context
from alfx.context import record_if, scope_name, set_global_counter, should_record_summaries
from alfx.summary.writer import DEFAULT_BUCKET_COUNT, SummaryWriter

logger = logging.getLogger(__name__)

scope = context.summary_scope
get_global_counter = context.get_global_counter
increment_global_counter = context.increment_global_counter
set_default_writer = context.set_summary_writer

__all__ = [
    'EnsureSummary', 'create_summary_writer', 'disable_summary', 'embedding', 'enable_summary',
    'enter_summary_scope', 'get_global_counter', 'histogram', 'images', 'increment_global_counter',
    'is_summary_enabled', 'push_summary_writer', 'record_if', 'reset_global_counter', 'scalar', 'scope',
    'scope_name', 'set_default_writer', 'set_global_counter', 'should_record_summaries',
    'should_summarize_output', 'text', 'video'
]

_disabled_writer = threading.local()
_warned: set[str] = set()


def scalar(name: str, data: Any, step: int | None = None, walltime: float | None = None) -> None:
    """Write a scalar (a tensor or array with one element, or a Python number).

    Raises:
        ValueError: the data has more than one element, or is not a number.
    """
    if not should_record_summaries():
        return
    if isinstance(data, (torch.Tensor, np.ndarray)):
        if data.size != 1 if isinstance(data, np.ndarray) else data.numel() != 1:
            raise ValueError(f'summary.scalar({name!r}): expected one element, found shape {tuple(data.shape)}; '
                             'reduce it first, or use summary.histogram')
    try:
        number = float(data.item() if isinstance(data, (torch.Tensor, np.ndarray)) else data)
    except (TypeError, ValueError):
        raise ValueError(f'summary.scalar({name!r}): expected a number, found {data!r}') from None
    context.get_summary_writer().add_scalar(scope_name() + name, number, _step(step), walltime)


def histogram(name: str, data: Any, step: int | None = None, bins: int | Sequence[float] | np.ndarray | None = None,
              walltime: float | None = None, max_bins: int | None = None) -> None:
    """Write a histogram of all elements; elements that are not finite are skipped with a warning.

    Args:
        name: name of the summary.
        data: tensor or array of any shape.
        step: step; ``None`` is the step of the run.
        bins: number of bins of equal width (``None`` is 30) or their edges.
        walltime: seconds since the epoch; ``None`` is now.
        max_bins: upper limit of the number of bins.
    """
    if not should_record_summaries():
        return
    data = _host(data).astype(np.float64).reshape(-1)
    finite = np.isfinite(data)
    if not finite.all():
        _warn_once(f'summary.histogram({name!r}): {np.count_nonzero(~finite)} of {data.size} elements are not finite')
        data = data[finite]
    if data.size == 0:
        return
    bins = DEFAULT_BUCKET_COUNT if bins is None else bins
    if max_bins is not None:
        bins = min(bins, max_bins) if isinstance(bins, int) else bins[:max_bins + 1]
    spacing = np.spacing(np.abs(data).max())
    if isinstance(bins, int) and np.ptp(data) < 2 * bins * spacing:  # too close together for equal bins
        bins = np.linspace(data.min() - max(0.5, spacing), data.max() + max(0.5, spacing), bins + 1)
    counts, edges = np.histogram(data, bins=bins)
    stats = (float(data.min()), float(data.max()), float(data.size), float(data.sum()), float(data @ data))
    context.get_summary_writer().add_histogram(scope_name() + name, counts, edges, stats, _step(step), walltime)


def text(name: str, data: str, step: int | None = None, walltime: float | None = None) -> None:
    """Write text (Markdown)."""
    if should_record_summaries():
        context.get_summary_writer().add_text(scope_name() + name, str(data), _step(step), walltime)


def images(name: str, data: Any, step: int | None = None, dataformat: str = 'NCHW',
           walltime: float | None = None) -> None:
    """Write images; several are tiled into a grid.

    Args:
        name: name of the summary.
        data: uint8, or floats in ``[0, 1]``, with the dimensions of ``dataformat``.
        step: step; ``None`` is the step of the run.
        dataformat: any order of ``N`` (optional), ``C`` (optional), ``H``, ``W``; 1, 3 or 4 channels.
        walltime: seconds since the epoch; ``None`` is now.

    Raises:
        ValueError: the data does not match ``dataformat``.
    """
    if not should_record_summaries():
        return
    frames = _to_frames(name, _host(data), dataformat)
    context.get_summary_writer().add_frames(scope_name() + name, _tile(frames)[None], _step(step), None, walltime)


def video(name: str, data: Any, step: int | None = None, fps: float = 4, walltime: float | None = None) -> None:
    """Write videos as an animation; several are tiled into a grid.

    Args:
        name: name of the summary.
        data: ``[N, T, C, H, W]``, uint8 or floats in ``[0, 1]``.
        step: step; ``None`` is the step of the run.
        fps: frames per second.
        walltime: seconds since the epoch; ``None`` is now.
    """
    if not should_record_summaries():
        return
    data = _host(data)
    if data.ndim != 5:
        raise ValueError(f'summary.video({name!r}): expected [N, T, C, H, W], found shape {data.shape}')
    frames = np.stack([_tile(_to_frames(name, data[:, t], 'NCHW')) for t in range(data.shape[1])])
    context.get_summary_writer().add_frames(scope_name() + name, frames, _step(step), fps, walltime)


def embedding(name: str, data: Any, step: int | None = None, class_labels: Sequence[str] | None = None,
              label_imgs: torch.Tensor | None = None) -> None:
    """Write points for TensorBoard's projector.

    Args:
        name: name of the summary.
        data: ``[N, D]``.
        step: step; ``None`` is the step of the run.
        class_labels: N labels.
        label_imgs: images ``[N, C, H, W]`` in ``[0, 1]``.
    """
    if not should_record_summaries():
        return
    labels = None if class_labels is None else [str(label) for label in class_labels]
    context.get_summary_writer().add_embedding(scope_name() + name, _host(data), labels, label_imgs, _step(step))


def reset_global_counter() -> None:
    """Set the global counter to 0."""
    context.set_global_counter(0)


def create_summary_writer(summary_dir: str, flush_secs: float = 10, max_queue: int = 10) -> SummaryWriter:
    """Create a writer of event files below ``summary_dir``; the file is created with the first summary.

    Args:
        summary_dir: folder of the event file.
        flush_secs: interval of flushes in seconds.
        max_queue: number of summaries held before the file is written to.
    """
    return SummaryWriter(summary_dir, flush_secs, max_queue)


class push_summary_writer:
    """Context manager that temporarily replaces the writer of summaries."""

    def __init__(self, writer: SummaryWriter | None):
        self._writer = writer

    def __enter__(self) -> SummaryWriter | None:
        self._before = context.get_summary_writer()
        context.set_summary_writer(self._writer)
        return self._writer

    def __exit__(self, *error: object) -> None:
        context.set_summary_writer(self._before)


def is_summary_enabled() -> bool:
    """Return whether a writer of summaries is set."""
    return context.get_summary_writer() is not None


def enable_summary(flag: bool = True) -> None:
    """Disable the writer (``flag=False``) or enable it again."""
    if not flag:
        disable_summary()
    elif getattr(_disabled_writer, 'writer', None) is not None and not is_summary_enabled():
        context.set_summary_writer(_disabled_writer.writer)
        _disabled_writer.writer = None


def disable_summary() -> None:
    """Write no summaries until ``enable_summary()``."""
    if is_summary_enabled():
        _disabled_writer.writer = context.get_summary_writer()
        context.set_summary_writer(None)


_summarize_output = threading.local()


def should_summarize_output(flag: bool | None = None) -> bool:
    """Return whether the outputs of networks are summarized, after setting this to ``flag`` if it is given.

    ``TrainerConfig.summarize_output`` sets it at the start of a run, and adds the hooks of the networks that check it.
    """
    if flag is not None:
        _summarize_output.flag = flag
    return getattr(_summarize_output, 'flag', False)


def enter_summary_scope(method: Callable) -> Callable:
    """Decorate a method to write its summaries in the scope ``self.name`` (or ``self._name``)."""

    @functools.wraps(method)
    def _in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = str(getattr(self, '_name', None) or getattr(self, 'name', type(self).__name__))
        with scope(name):
            return method(self, *args, **kwargs)

    return _in_scope


class EnsureSummary:
    """Context manager for a quantity that is computed only occasionally.

    A quantity computed once in k iterations is missing from most summaries if k and the summary interval do not match.
    Inside this context, summaries are recorded if at least one was due since the last time. Call ``tick()`` once per
    iteration.
    """

    def __init__(self) -> None:
        self._due = False
        self._record: Any = None

    def tick(self) -> None:
        """Note whether this iteration records summaries."""
        self._due = self._due or should_record_summaries()

    def __enter__(self) -> 'EnsureSummary':
        self._record = record_if(self._due or should_record_summaries())
        self._record.__enter__()
        self._due = False
        return self

    def __exit__(self, *error: Any) -> None:
        self._record.__exit__(*error)


def _step(step: int | None) -> int:
    return context.get_summary_step() if step is None else int(step)


def _host(data: Any) -> np.ndarray:
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        return (data.float() if data.dtype == torch.bfloat16 else data).numpy()
    return np.asarray(data)


def _to_frames(name: str, data: np.ndarray, dataformat: str) -> np.ndarray:
    """Convert an array of the given format to uint8 ``[N, H, W, C]``."""
    if (data.ndim != len(dataformat) or not {'H', 'W'} <= set(dataformat) <= set('NCHW')
            or len(set(dataformat)) != len(dataformat)):
        raise ValueError(f'summary {name!r}: image of shape {data.shape} does not have the format {dataformat!r}')
    missing = [d for d in 'NC' if d not in dataformat]
    data = data.reshape((1, ) * len(missing) + data.shape)
    order = ''.join(missing) + dataformat
    data = data.transpose([order.index(d) for d in 'NHWC'])
    if data.shape[-1] not in (1, 3, 4):
        raise ValueError(f'summary {name!r}: expected 1, 3 or 4 channels, found {data.shape[-1]}')
    if data.dtype == np.bool_:
        data = data.astype(np.float32)
    if np.issubdtype(data.dtype, np.floating):
        data = np.nan_to_num(data).clip(0, 1) * 255 + 0.5
    return np.ascontiguousarray(data.astype(np.uint8))


def _tile(frames: np.ndarray) -> np.ndarray:
    """Tile N frames into a nearly square grid, uint8 ``[H', W', C]``."""
    num, height, width, channels = frames.shape
    columns = int(np.ceil(np.sqrt(num)))
    rows = -(-num // columns)
    grid = np.zeros((rows * columns, height, width, channels), dtype=np.uint8)
    grid[:num] = frames
    grid = grid.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return grid.reshape(rows * height, columns * width, channels)


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
