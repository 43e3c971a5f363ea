"""Plots of curves as inline SVG without scripts, fonts or external files. The colors are variables of the page."""
import html
import math
from collections.abc import Mapping

import numpy as np

from alfx.reports.collecting import Curves

_WIDTH, _HEIGHT = 640.0, 360.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 20.0, 12.0, 46.0


def draw(curves: Mapping[str, tuple[int, Curves]], x_label: str, y_label: str, title: str) -> str:
    """Return a plot of the curves of several methods.

    Args:
        curves: number of the color and curves of each method; at least one.
        x_label: label of the horizontal axis.
        y_label: label of the vertical axis.
        title: text for screen readers.

    Returns:
        An ``<svg>`` element.
    """
    shown = [curve for _, curve in curves.values()]
    xs = np.concatenate([run.x for curve in shown for run in curve.runs])
    ys = np.concatenate([part for curve in shown for part in
                         (curve.center, curve.low, curve.high, *(run.y for run in curve.runs))])
    ys = ys[np.isfinite(ys)]
    if len(ys) == 0:
        ys = np.zeros(1)
    x_ticks, y_ticks = ticks(xs.min(), xs.max()), ticks(ys.min(), ys.max())
    scale = _Scale(min(xs.min(), x_ticks[0]), max(xs.max(), x_ticks[-1]), min(ys.min(), y_ticks[0]),
                   max(ys.max(), y_ticks[-1]))
    parts = [f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{html.escape(title)}">']
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in y_ticks:
        y = scale.y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT:g} {y:.1f}H{right:g}"/><text x="{_LEFT - 6:g}" y="{y + 4:.1f}" '
                     f'text-anchor="end">{short(tick)}</text>')
    for tick in x_ticks:
        x = scale.x(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP:g}V{bottom:g}"/><text x="{x:.1f}" y="{bottom + 17:g}" '
                     f'text-anchor="middle">{short(tick)}</text>')
    for method, (number, curve) in curves.items():
        color, name = f'c{number % 8}', html.escape(method)
        parts.append(f'<g class="{color}"><title>{name}</title>')
        if np.isfinite(curve.low).all():
            around = np.concatenate([curve.x, curve.x[::-1]])
            band = scale.path(around, np.concatenate([curve.high, curve.low[::-1]]))
            parts.append(f'<path class="band" d="{band}Z"/>')
        parts += [f'<path class="run" d="{scale.path(run.x, run.y)}"/>' for run in curve.runs if len(curve.runs) > 1]
        parts.append(f'<path class="line" d="{scale.path(curve.x, curve.center)}"/>')
        if len(curve.x) == 1 and math.isfinite(curve.center[0]):
            parts.append(f'<circle cx="{scale.x(curve.x[0]):.1f}" cy="{scale.y(curve.center[0]):.1f}" r="4"/>')
        parts.append('</g>')
    parts.append(f'<text x="{(_LEFT + right) / 2:g}" y="{_HEIGHT - 8:g}" text-anchor="middle">'
                 f'{html.escape(x_label)}</text><text transform="translate(13 {(_TOP + bottom) / 2:g}) rotate(-90)" '
                 f'text-anchor="middle">{html.escape(y_label)}</text></svg>')
    return ''.join(parts)


class _Scale:
    """Mapping of values to positions in the plot."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float):
        self._x_low, self._x_scale = x_low, (_WIDTH - _LEFT - _RIGHT) / ((x_high - x_low) or 1.0)
        self._y_low, self._y_scale = y_low, (_HEIGHT - _TOP - _BOTTOM) / ((y_high - y_low) or 1.0)

    def x(self, value: float) -> float:
        return _LEFT + (value - self._x_low) * self._x_scale

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self._y_low) * self._y_scale

    def path(self, x: np.ndarray, y: np.ndarray) -> str:
        """Return line segments without the points that are not finite."""
        good = np.isfinite(x) & np.isfinite(y)
        points = [f'{self.x(a):.1f} {self.y(b):.1f}' for a, b in zip(x[good], y[good])]
        return 'M' + 'L'.join(points) if points else 'M0 0'


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about ``about`` round numbers that cover the range from ``low`` to ``high``."""
    low, high = float(low), float(high)
    if high - low < 1e-12 * max(1.0, abs(low)):
        low, high = low - 0.5 * max(1.0, abs(low)), high + 0.5 * max(1.0, abs(high))
    rough = (high - low) / about
    power = 10.0**math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """Return a number with a unit prefix: ``100k`` for 100000, ``2.5M`` for 2500000."""
    for unit, name in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(value) >= unit:
            return f'{value / unit:.4g}{name}'
    return f'{value:.4g}' if abs(value) > 1e-12 else '0'
