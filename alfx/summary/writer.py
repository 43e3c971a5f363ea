"""Writer of event files that works in a background thread.

The caller only copies the numbers into a queue. A background thread periodically encodes, compresses and writes the
queue; it also imports tensorboard, so neither ``import alfx`` nor an iteration waits for it. The thread is not woken by
each summary, because a thread switch of the interpreter takes longer than everything else.
"""

import collections
import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_COUNT = 30
_MAX_VALUES = 500


class SummaryWriter:
    """Writer of summaries to one event file in a folder.

    The event file is created with the first summary. An error of the background thread (a full disk, a
    missing permission) does not stop the run: it is logged once and further summaries are dropped.

    Attributes:
        latest_scalars: the last value of each scalar; the reader may clear it.
        walltime: time stamp of summaries in seconds since the epoch; ``None`` is the time of writing.

    Args:
        log_dir: folder of the event file.
        flush_secs: interval in which the queue is written, in seconds (at least 0.1).
        max_queue: number of events that tensorboard's writer holds before it writes.
    """

    def __init__(self, log_dir: str, flush_secs: float = 10, max_queue: int = 10):
        self.log_dir = str(log_dir)
        self.latest_scalars: dict[str, float] = {}
        self.walltime: float | None = None
        self._flush_secs = max(flush_secs, 0.1)
        self._max_queue = max_queue
        self._waiting: collections.deque = collections.deque()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._embedding_writer: Any = None
        self._closed = False

    def add_scalar(self, tag: str, value: float, step: int, walltime: float | None = None) -> None:
        """Write a scalar."""
        self.latest_scalars[tag] = value
        self._put(_encode_scalar, tag, value, step, walltime)

    def add_histogram(self, tag: str, counts: np.ndarray, edges: np.ndarray, stats: tuple[float, ...], step: int,
                      walltime: float | None = None) -> None:
        """Write a histogram.

        Args:
            tag: name of the summary.
            counts: ``[n]``.
            edges: ``[n + 1]``.
            stats: minimum, maximum, count, sum and sum of squares of the data.
            step: step of the summary.
            walltime: seconds since the epoch; ``None`` is now.
        """
        self._put(_encode_histogram, tag, (counts, edges, stats), step, walltime)

    def add_text(self, tag: str, value: str, step: int, walltime: float | None = None) -> None:
        """Write text, rendered as Markdown by TensorBoard."""
        self._put(_encode_text, tag, value, step, walltime)

    def add_frames(self, tag: str, frames: np.ndarray, step: int, fps: float | None = None,
                   walltime: float | None = None) -> None:
        """Write an image or an animation.

        Args:
            tag: name of the summary.
            frames: uint8 ``[N, H, W, C]``; one frame, or with ``fps`` an animation.
            step: step of the summary.
            fps: frames per second; ``None`` for a still image.
            walltime: seconds since the epoch; ``None`` is now.
        """
        self._put(_encode_frames, tag, (frames, fps), step, walltime)

    def add_hparams(self, values: Mapping[str, bool | float | str]) -> None:
        """Write the settings of the run, which TensorBoard shows under HPARAMS.

        Args:
            values: settings by name. Runs with equal settings form one group there.
        """
        self._put(_encode_hparams, '', dict(values), 0, None)

    def add_embedding(self, tag: str, data: np.ndarray, labels: list[str] | None, images: Any, step: int) -> None:
        """Write points for TensorBoard's projector; this imports torch's writer and runs in the calling thread."""
        if self._embedding_writer is None:
            from torch.utils.tensorboard import SummaryWriter as TorchSummaryWriter
            self._embedding_writer = TorchSummaryWriter(self.log_dir)
        self._embedding_writer.add_embedding(data, metadata=labels, label_img=images, global_step=step, tag=tag)

    def flush(self, timeout: float = 30.0) -> None:
        """Wait until everything written so far is on disk, at most ``timeout`` seconds."""
        if self._thread is not None and self._thread.is_alive():
            written = threading.Event()
            self._waiting.append(written)
            self._wake.set()
            written.wait(timeout)

    def close(self) -> None:
        """Flush and close; later summaries are dropped."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join(timeout=30.0)
        if self._embedding_writer is not None:
            self._embedding_writer.close()

    def _put(self, encode: Callable, tag: str, data: Any, step: int, walltime: float | None) -> None:
        if self._closed:
            return
        self._waiting.append((encode, tag, data, int(step), walltime or self.walltime or time.time()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name='summary-writer', daemon=True)
            self._thread.start()

    def _write_all(self) -> None:
        """Body of the thread."""
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
            writer = EventFileWriter(self.log_dir, self._max_queue, self._flush_secs)
            while not self._closed:
                self._wake.wait(self._flush_secs)
                self._wake.clear()
                self._write_waiting(writer)
            self._write_waiting(writer)
            writer.close()
        except (OSError, ValueError, ImportError) as error:
            logger.error('summaries cannot be written to %s and are dropped from now on: %s', self.log_dir, error)
            self._closed = True
            self._release()

    def _write_waiting(self, writer: Any) -> None:
        """Write the queue, then release the threads that wait in :meth:`flush`."""
        waited_for: list[threading.Event] = []
        if self._waiting:
            os.makedirs(self.log_dir, exist_ok=True)  # the folder may have been removed
        try:
            for event in self._take_events(waited_for):
                writer.add_event(event)
            writer.flush()
        finally:
            for written in waited_for:
                written.set()

    def _take_events(self, waited_for: list[threading.Event]) -> Iterator[Any]:
        """Yield the queue as events; consecutive values of the same step share an event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        event: Any = None
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, threading.Event):
                waited_for.append(item)
                continue
            encode, tag, data, step, walltime = item
            value = encode(tag, data)
            if event is not None and step == event.step and len(event.summary.value) < _MAX_VALUES:
                event.summary.value.append(value)
                continue
            if event is not None:
                yield event
            event = Event(wall_time=walltime, step=step, summary=Summary(value=[value]))
        if event is not None:
            yield event

    def _release(self) -> None:
        """Drop the queue and release the threads that wait in :meth:`flush`."""
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, threading.Event):
                item.set()


class SilentWriter(SummaryWriter):
    """Writer that discards all summaries, so that all ranks execute the same code."""

    def __init__(self) -> None:
        super().__init__('')

    def _put(self, *args: Any) -> None:
        """Discard the summary."""

    def add_embedding(self, *args: Any, **kwargs: Any) -> None:
        """Discard the summary."""


def _encode_scalar(tag: str, value: float) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    return Summary.Value(tag=tag, simple_value=value)


def _encode_histogram(tag: str, data: tuple) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
    counts, edges, (minimum, maximum, num, total, sum_squares) = data
    # The proto has the upper limit of each bucket; an empty first bucket marks the lower limit of the second.
    proto = HistogramProto(min=minimum, max=maximum, num=num, sum=total, sum_squares=sum_squares,
                           bucket_limit=edges.tolist(), bucket=[0.0, *counts.tolist()])
    return Summary.Value(tag=tag, histo=proto)


def _encode_text(tag: str, value: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name='text'))
    tensor = TensorProto(dtype='DT_STRING', string_val=[value.encode('utf-8')],
                         tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]))
    return Summary.Value(tag=f'{tag}/text_summary', metadata=metadata, tensor=tensor)


def _encode_hparams(tag: str, data: dict[str, Any]) -> Any:
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    return hparams_pb(data).value[0]


def _encode_frames(tag: str, data: tuple) -> Any:
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary
    frames, fps = data
    height, width, channels = frames.shape[1:]
    pictures = [Image.fromarray(f[..., 0] if channels == 1 else f) for f in frames]
    buffer = io.BytesIO()
    if fps is None:
        pictures[0].save(buffer, format='PNG')
    else:
        pictures[0].save(buffer, format='GIF', save_all=True, append_images=pictures[1:], loop=0,
                         duration=max(int(round(1000 / fps)), 20))
    image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=buffer.getvalue())
    return Summary.Value(tag=tag, image=image)
