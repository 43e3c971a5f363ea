"""Pictures of tensors, shown while a policy is played.

An algorithm adds the results of these functions to the ``info`` of its ``predict_step``; ``alfx.bin.play`` shows them
next to the environment in a video. The functions return ``None`` and cost nothing unless rendering is enabled, as in
``alfx.bin.play``.

``data`` is a tensor or an array; leading dimensions of size 1 (a batch of one environment) are dropped.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, TensorSpec

_enabled = False
_Drawing = Callable[[Any, Any], None]


def enable_rendering(flag: bool = True) -> None:
    """Enable or disable the functions of this module."""
    global _enabled
    _enabled = flag


def is_rendering_enabled() -> bool:
    """Return whether the functions of this module draw pictures."""
    return _enabled


class Image:
    """A picture.

    Args:
        img: uint8 ``[H, W, 3]``, ``[H, W, 1]`` or ``[H, W]``.

    Attributes:
        data: pixels, uint8 ``[H, W, 3]``.

    Raises:
        ValueError: ``img`` has another shape or dtype.
    """

    def __init__(self, img: np.ndarray):
        if img.dtype != np.uint8 or img.ndim not in (2, 3) or (img.ndim == 3 and img.shape[-1] not in (1, 3)):
            raise ValueError(f'expected uint8 [H, W], [H, W, 1] or [H, W, 3], found {img.dtype} {list(img.shape)}')
        img = img[..., None] if img.ndim == 2 else img
        self.data = np.repeat(img, 3, axis=-1) if img.shape[-1] == 1 else img

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``(H, W, 3)``."""
        return self.data.shape

    def resize(self, height: int | None = None, width: int | None = None) -> 'Image':
        """Return the picture in another size; with one argument the aspect ratio is kept."""
        if height is None and width is None:
            return self
        from PIL import Image as PilImage
        old_height, old_width = self.data.shape[:2]
        height = height or max(1, round(old_height * width / old_width))
        width = width or max(1, round(old_width * height / old_height))
        return Image(np.asarray(PilImage.fromarray(self.data).resize((width, height), PilImage.Resampling.BILINEAR)))

    @classmethod
    def from_pyplot_fig(cls, fig: Any, dpi: int = 200) -> 'Image':
        """Create a picture of a matplotlib figure."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        fig.set_dpi(dpi)
        canvas = FigureCanvasAgg(fig)
        canvas.draw()
        return cls(np.asarray(canvas.buffer_rgba())[..., :3].copy())

    @classmethod
    def pack_image_nest(cls, imgs: Any) -> 'Image | None':
        """Combine all pictures of a nest side by side; ``None`` if there are no pictures."""
        pictures = [leaf for leaf in nest.flatten(imgs) if isinstance(leaf, Image)]
        return cls.stack_images(pictures) if pictures else None

    @classmethod
    def stack_images(cls, imgs: Sequence['Image'], horizontal: bool = True) -> 'Image':
        """Combine pictures side by side (or below each other), aligned at the top (or left)."""
        side = 0 if horizontal else 1
        size = max(img.shape[side] for img in imgs)
        padded = [np.pad(img.data, [(0, size - img.shape[d]) if d == side else (0, 0) for d in range(3)])
                  for img in imgs]
        return cls(np.concatenate(padded, axis=1 - side))


def _renders(function: Callable) -> Callable:
    """Decorate a function to return ``None`` unless rendering is enabled."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if _enabled else None

    return wrapper


@_renders
def render_heatmap(name: str, data: Any, val_label: str = '', row_ticks: Sequence | None = None,
                   col_ticks: Sequence | None = None, row_labels: Sequence[str] | None = None,
                   col_labels: Sequence[str] | None = None, cbar_kw: dict | None = None, annotate_format: str = '%.2f',
                   font_size: int = 7, img_height: int | None = None, img_width: int | None = None, dpi: int = 300,
                   figsize: tuple[float, float] = (2, 2), **kwargs: Any) -> Image:
    """Draw a matrix as a heatmap.

    Args:
        name: title.
        data: ``[R, C]``.
        val_label: label of the color bar.
        row_ticks: positions of the ticks of the rows.
        col_ticks: positions of the ticks of the columns.
        row_labels: labels of the rows.
        col_labels: labels of the columns.
        cbar_kw: arguments for ``Figure.colorbar``.
        annotate_format: format of the numbers in the cells; '' for none.
        font_size: font size of all text.
        img_height: height of the picture in pixels.
        img_width: width of the picture in pixels.
        dpi: pixels per inch.
        figsize: width and height in inches.
        **kwargs: arguments of ``Axes.imshow``.
    """
    array = _array(data, 2)

    def draw(figure: Any, axes: Any) -> None:
        shown = axes.imshow(array, **kwargs)
        figure.colorbar(shown, ax=axes, label=val_label, **(cbar_kw or {}))
        _set_ticks(axes.set_xticks, col_ticks, col_labels)
        _set_ticks(axes.set_yticks, row_ticks, row_labels)
        if annotate_format:
            for (row, column), value in np.ndenumerate(array):
                axes.text(column, row, annotate_format % value, ha='center', va='center', fontsize=font_size)

    return _draw(name, draw, font_size, img_height, img_width, dpi, figsize)


@_renders
def render_contour(name: str, data: Any, x_ticks: Any = None, y_ticks: Any = None, x_label: str | None = None,
                   y_label: str | None = None, font_size: int = 7, img_height: int | None = None,
                   img_width: int | None = None, dpi: int = 300, figsize: tuple[float, float] = (2, 2),
                   flip_y_axis: bool = True, **kwargs: Any) -> Image:
    """Draw contours of ``data [H, W]``; ``x_ticks [W]`` and ``y_ticks [H]`` are the coordinates.

    See :func:`render_heatmap` for the other arguments; ``**kwargs`` are arguments of ``Axes.contourf``.
    """
    array = _array(data, 2)
    x = np.arange(array.shape[1]) if x_ticks is None else _array(x_ticks, 1)
    y = np.arange(array.shape[0]) if y_ticks is None else _array(y_ticks, 1)

    def draw(figure: Any, axes: Any) -> None:
        figure.colorbar(axes.contourf(x, y, array, **kwargs), ax=axes)
        _set_labels(axes, x_label, y_label)
        if flip_y_axis:
            axes.invert_yaxis()

    return _draw(name, draw, font_size, img_height, img_width, dpi, figsize)


@_renders
def render_curve(name: str, data: Any, x_range: tuple[float, float] | None = None,
                 y_range: tuple[float, float] | None = None, x_label: str | None = None, y_label: str | None = None,
                 legends: Sequence[str] | None = None, legend_kwargs: dict | None = None,
                 img_height: int | None = None, img_width: int | None = None, dpi: int = 300,
                 figsize: tuple[float, float] = (2, 2), **kwargs: Any) -> Image:
    """Draw one or several curves, ``data [N]`` or ``[K, N]``, over ``x_range`` (``None`` is 0 to N - 1).

    See :func:`render_heatmap` for the other arguments; ``**kwargs`` are arguments of ``Axes.plot``.
    """
    curves = np.atleast_2d(_array(data, 1, 2))
    low, high = (0.0, curves.shape[1] - 1.0) if x_range is None else x_range
    x = np.linspace(low, high, curves.shape[1])

    def draw(figure: Any, axes: Any) -> None:
        for curve, label in zip(curves, _labels(legends, len(curves))):
            axes.plot(x, curve, label=label, **kwargs)
        _finish_axes(axes, x_label, y_label, y_range, legends, legend_kwargs)

    return _draw(name, draw, 7, img_height, img_width, dpi, figsize)


@_renders
def render_3d_curve(name: str, data: Any, x_range: tuple[float, float] | None = None,
                    y_range: tuple[float, float] | None = None, z_range: tuple[float, float] | None = None,
                    x_label: str | None = None, y_label: str | None = None, z_label: str | None = None,
                    legends: Sequence[str] | None = None, legend_kwargs: dict | None = None,
                    img_height: int | None = None, img_width: int | None = None, dpi: int = 300,
                    figsize: tuple[float, float] = (2, 2), **kwargs: Any) -> Image:
    """Draw one or several curves in space, ``data [N, 3]`` or ``[K, N, 3]``, within the ranges.

    See :func:`render_heatmap` for the other arguments; ``**kwargs`` are arguments of ``Axes3D.plot``.
    """
    array = _array(data, 2, 3)
    curves = array[None] if array.ndim == 2 else array

    def draw(figure: Any, axes: Any) -> None:
        for curve, label in zip(curves, _labels(legends, len(curves))):
            axes.plot(*curve.T, label=label, **kwargs)
        for limit, set_limit in ((x_range, axes.set_xlim), (z_range, axes.set_zlim)):
            if limit is not None:
                set_limit(*limit)
        axes.set_zlabel(z_label or '')
        _finish_axes(axes, x_label, y_label, y_range, legends, legend_kwargs)

    return _draw(name, draw, 7, img_height, img_width, dpi, figsize, projection='3d')


@_renders
def render_bar(name: str, data: Any, width: float = 0.8, y_range: tuple[float, float] | None = None,
               x_ticks: Any = None, x_label: str | None = None, y_label: str | None = None,
               legends: Sequence[str] | None = None, legend_kwargs: dict | None = None, annotate_format: str = '%.2f',
               img_height: int | None = None, img_width: int | None = None, dpi: int = 300,
               figsize: tuple[float, float] = (2, 2), **kwargs: Any) -> Image:
    """Draw bars of ``data [N]``, or K bars at each position for ``data [K, N]``; ``x_ticks [N]`` are the positions.

    See :func:`render_heatmap` for the other arguments; ``**kwargs`` are arguments of ``Axes.bar``.
    """
    groups = np.atleast_2d(_array(data, 1, 2))
    x = np.arange(groups.shape[1]) if x_ticks is None else _array(x_ticks, 1)
    one = width / len(groups)

    def draw(figure: Any, axes: Any) -> None:
        for i, (group, label) in enumerate(zip(groups, _labels(legends, len(groups)))):
            bars = axes.bar(x + (i - (len(groups) - 1) / 2) * one, group, one, label=label, **kwargs)
            if annotate_format:
                axes.bar_label(bars, fmt=annotate_format, fontsize=5)
        _finish_axes(axes, x_label, y_label, y_range, legends, legend_kwargs)

    return _draw(name, draw, 7, img_height, img_width, dpi, figsize)


@_renders
def render_text(name: str, data: str, font_size: int = 10, fig_width_per_char: float = 0.1, fig_height: float = 0.4,
                img_height: int | None = None, img_width: int | None = None, dpi: int = 200, **kwargs: Any) -> Image:
    """Draw a line of text, ``fig_width_per_char`` inches per character wide and ``fig_height`` inches high.

    ``**kwargs`` are arguments of ``Axes.text``.
    """
    text = f'{name}: {data}' if name else str(data)

    def draw(figure: Any, axes: Any) -> None:
        axes.axis('off')
        axes.text(0.5, 0.5, text, ha='center', va='center', fontsize=font_size, **kwargs)

    figsize = (max(fig_width_per_char * len(text), fig_height), fig_height)
    return _draw('', draw, font_size, img_height, img_width, dpi, figsize)


@_renders
def render_action(name: str, action: NestedTensor, action_spec: Any, **kwargs: Any) -> Any:
    """Draw each action of a nest ``[B=1, ...]`` as bars within the bounds of its spec; returns a nest of pictures.

    ``**kwargs`` are arguments of :func:`render_bar`.
    """

    def render(path: str, value: torch.Tensor, spec: TensorSpec) -> Image:
        y_range = None
        if isinstance(spec, BoundedTensorSpec):
            low, high = float(np.min(spec.minimum)), float(np.max(spec.maximum))
            y_range = (low, high) if abs(low) < 1e6 and abs(high) < 1e6 else None
        return render_bar(f'{name}/{path}' if path else name, value.reshape(-1), y_range=y_range, **kwargs)

    return nest.py_map_structure_with_path(render, action, action_spec)


@_renders
def render_action_distribution(name: str, act_dist: Any, action_spec: Any, n_samples: int = 500, n_bins: int = 20,
                               **kwargs: Any) -> Any:
    """Draw each distribution of a nest ``[B=1, ...]``; returns a nest of pictures.

    The probabilities of a categorical distribution are drawn as bars. Other distributions are drawn as histograms of
    ``n_samples`` samples in ``n_bins`` bins, with a curve for each dimension. ``**kwargs`` are arguments of
    :func:`render_bar` or :func:`render_curve`.
    """

    def render(path: str, distribution: torch.distributions.Distribution, spec: BoundedTensorSpec) -> Image:
        title = f'{name}/{path}' if path else name
        probabilities = getattr(distribution, 'probs', None)
        if isinstance(probabilities, torch.Tensor) and spec.is_discrete:
            return render_bar(title, probabilities, y_range=(0, 1), **kwargs)
        samples = distribution.sample((n_samples, )).reshape(n_samples, -1).cpu().numpy()
        low, high = samples.min(), max(samples.max(), samples.min() + 1e-6)
        counts = np.stack([np.histogram(column, n_bins, (low, high))[0] for column in samples.T])
        legends = [str(i) for i in range(len(counts))] if len(counts) > 1 else None
        return render_curve(title, counts / n_samples, (low, high), legends=legends, **kwargs)

    leaves = zip(nest.flatten_with_path(act_dist, is_leaf=nest.is_distribution), nest.flatten(action_spec))
    return nest.pack_sequence_as(action_spec, [render(path, dist, spec) for (path, dist), spec in leaves])


@_renders
def render_heatmap_fast(imgs: Any, min_value: float, max_value: float, pixel_size: int = 10,
                        bar_size: int = 20) -> Image:
    """Draw matrices ``[N, H, W]`` (or one, ``[H, W]``) in gray, side by side, without matplotlib.

    A cell is ``pixel_size`` pixels wide, ``min_value`` is black, ``max_value`` white. A bar of ``bar_size`` pixels on
    the right shows the scale.
    """
    array = _array(imgs, 2, 3)
    array = array[None] if array.ndim == 2 else array
    gray = ((array - min_value) / max(max_value - min_value, 1e-12)).clip(0, 1) * 255
    cells = [Image(np.kron(field, np.ones((pixel_size, pixel_size))).astype(np.uint8)) for field in gray]
    scale = np.linspace(255, 0, cells[0].shape[0])[:, None].repeat(bar_size, 1).astype(np.uint8)
    return Image.stack_images([*cells, Image(scale)])


def _draw(title: str, draw: _Drawing, font_size: int, height: int | None, width: int | None, dpi: int,
          figsize: tuple[float, float], **axes_options: Any) -> Image:
    """Create a figure, draw into it with ``draw(figure, axes)``, and return its picture."""
    import matplotlib
    from matplotlib.figure import Figure
    with matplotlib.rc_context({'font.size': font_size}):
        figure = Figure(figsize=figsize, dpi=dpi, layout='constrained')
        axes = figure.add_subplot(**axes_options)
        axes.set_title(title, fontsize=font_size)
        draw(figure, axes)
        return Image.from_pyplot_fig(figure, dpi).resize(height, width)


def _array(data: Any, *ndims: int) -> np.ndarray:
    """Convert to a float array with one of the given numbers of dimensions; leading dimensions of size 1 are dropped.
    """
    array = np.asarray(data.detach().cpu() if isinstance(data, torch.Tensor) else data, dtype=np.float64)
    while array.ndim > max(ndims) and array.shape[0] == 1:
        array = array[0]
    if array.ndim not in ndims:
        expected = ' or '.join(map(str, ndims))
        raise ValueError(f'expected data with {expected} dimensions (or a batch of 1), found shape {list(array.shape)}')
    return array


def _labels(legends: Sequence[str] | None, count: int) -> Sequence[str | None]:
    return [None] * count if legends is None else legends


def _set_ticks(set_ticks: Callable, ticks: Sequence | None, labels: Sequence[str] | None) -> None:
    if labels is not None:
        set_ticks(range(len(labels)) if ticks is None else ticks, labels)
    elif ticks is not None:
        set_ticks(ticks)


def _set_labels(axes: Any, x_label: str | None, y_label: str | None) -> None:
    axes.set_xlabel(x_label or '')
    axes.set_ylabel(y_label or '')


def _finish_axes(axes: Any, x_label: str | None, y_label: str | None, y_range: tuple[float, float] | None,
                 legends: Sequence[str] | None, legend_kwargs: dict | None) -> None:
    _set_labels(axes, x_label, y_label)
    if y_range is not None:
        axes.set_ylim(*y_range)
    if legends is not None:
        axes.legend(**(legend_kwargs or {}))
