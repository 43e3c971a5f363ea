"""Progress of a run: a progress bar on a terminal or in a notebook, otherwise a line every few seconds."""
import logging
import sys
import time
from typing import Any, TextIO

console = logging.getLogger('alfx.console')  # for the log file of a run; the lines are already on the console
console.propagate = False

_BAR_SECONDS = 0.5
_LINE_SECONDS = 10.0
_FIRST_LINE_SECONDS = 2.0
_RATE_WINDOW_SECONDS = 30.0
_SAMPLES_KEPT = 512


class ProgressDisplay:
    """Display of the progress of a run.

    Args:
        stream: output stream; None for stderr, or for a notebook. A terminal and a notebook get a progress bar.
        unit: unit of the rate, ``'steps'`` or ``'iterations'``.
    """

    def __init__(self, stream: TextIO | None = None, unit: str = 'steps'):
        self._stream = sys.stderr if stream is None else stream
        self._unit = unit
        self._is_notebook = stream is None and 'ipykernel' in sys.modules
        self._is_terminal = self._is_notebook or self._stream.isatty()
        self._bar: Any = None
        self._next = time.monotonic() + (_BAR_SECONDS if self._is_terminal else _FIRST_LINE_SECONDS)
        self._samples: list[tuple[float, float, float]] = []  # time, percent, count

    def is_due(self) -> bool:
        """Return whether ``show`` should be called now. The call is cheap."""
        return time.monotonic() >= self._next

    def show(self, percent: float, count: float, values: dict[str, str]) -> None:
        """Show the progress.

        Args:
            percent: completed fraction of the run, in ``[0, 1]``.
            count: counter for the rate, such as the number of environment steps.
            values: other values to show, by name.
        """
        now = time.monotonic()
        self._next = now + (_BAR_SECONDS if self._is_terminal else _LINE_SECONDS)
        self._samples.append((now, percent, count))
        if len(self._samples) > _SAMPLES_KEPT:
            del self._samples[1:-1:2]
        then, percent_then, count_then = self._reference(now)
        elapsed = now - then
        values = dict(values)
        if elapsed > 0 and count > count_then:
            values[f'{self._unit}/s'] = f'{(count - count_then) / elapsed:,.0f}'
            if percent > percent_then:
                values['time left'] = format_seconds((1 - percent) / (percent - percent_then) * elapsed)
        if self._is_terminal:  # a narrow terminal cuts off the end
            first = ('time left', f'{self._unit}/s', 'return')
            values = {name: values[name] for name in (*(name for name in first if name in values), *values)}
        text = '  '.join(f'{name} {value}' for name, value in values.items())
        if self._is_terminal:
            self._show_bar(percent, text)
        else:
            self._write(f'{percent:6.1%}  {text}')

    def _reference(self, now: float) -> tuple[float, float, float]:
        """Return the first sample of the later half of the run, so that an evaluation hardly affects the rate."""
        window = max(_RATE_WINDOW_SECONDS, (now - self._samples[0][0]) / 2)
        return next(sample for sample in self._samples if now - sample[0] <= window)

    def message(self, text: str) -> None:
        """Print a message on a separate line and log it."""
        console.info(text)
        if self._bar is not None:
            self._bar.clear()
        self._write(text)

    def close(self) -> None:
        """Close the progress bar and leave it on the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show_bar(self, percent: float, text: str) -> None:
        if self._bar is None:
            from tqdm import auto, std
            bar, size = (auto.tqdm, '') if self._is_notebook else (std.tqdm, ':10')
            self._bar = bar(total=100, file=self._stream, dynamic_ncols=True, leave=True,
                            bar_format=f'{{percentage:3.0f}}%|{{bar{size}}}| {{desc}}')
        self._bar.n = round(100 * percent, 1)
        self._bar.set_description_str(text, refresh=True)

    def _write(self, text: str) -> None:
        self._stream.write(text + '\n')
        self._stream.flush()


def format_seconds(seconds: float) -> str:
    """Format a duration as ``1:02:03`` or ``2:03``."""
    minutes, seconds = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
