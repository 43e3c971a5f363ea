"""Summaries of losses, gradients, actions, distributions and nests.

Like the operations in :mod:`alfx.summary.summary_ops`, these functions do nothing unless summaries are being recorded.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributions as td
from torch import nn

from alfx import context, nest
from alfx.data_structures import LossInfo
from alfx.gin_utils import configurable
from alfx.summary import summary_ops
from alfx.summary.summary_ops import should_record_summaries
from alfx.summary.writer import DEFAULT_BUCKET_COUNT
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, TensorSpec

_DISTRIBUTION_PARAMETERS = ('loc', 'scale', 'probs', 'concentration', 'concentration0', 'concentration1', 'low', 'high',
                            'rate', 'df')


def histogram_discrete(name: str, data: torch.Tensor, bucket_min: int, bucket_max: int,
                       step: int | None = None) -> None:
    """Write a histogram of integers with a bucket for each value.

    Args:
        name: name of the summary.
        data: tensor of any shape; values outside the range are counted in the outermost buckets.
        bucket_min: smallest value.
        bucket_max: largest value, inclusive.
        step: step; ``None`` is the step of the run.
    """
    if should_record_summaries():
        edges = np.arange(bucket_min, bucket_max + 2) - 0.5
        summary_ops.histogram(name, data.clamp(bucket_min, bucket_max), step, bins=edges)


def histogram_continuous(name: str, data: torch.Tensor, bucket_min: float | None = None,
                         bucket_max: float | None = None, bucket_count: int = DEFAULT_BUCKET_COUNT,
                         step: int | None = None) -> None:
    """Write a histogram with equal buckets.

    Args:
        name: name of the summary.
        data: tensor of any shape; values outside the range are counted in the outermost buckets.
        bucket_min: lower end; ``None`` is the minimum of the data.
        bucket_max: upper end; ``None`` is the maximum of the data.
        bucket_count: number of buckets.
        step: step; ``None`` is the step of the run.
    """
    if not should_record_summaries() or data.numel() == 0:
        return
    data = data.detach().to(torch.float64)
    finite = data[torch.isfinite(data)]
    if finite.numel() == 0:
        return
    low = float(finite.min()) if bucket_min is None else bucket_min
    high = float(finite.max()) if bucket_max is None else bucket_max
    bins = bucket_count if high <= low else np.linspace(low, high, bucket_count + 1)
    summary_ops.histogram(name, finite.clamp(low, high), step, bins=bins)


@configurable
def summarize_variables(name_and_params: Iterable[tuple[str, nn.Parameter]], with_histogram: bool = True) -> None:
    """Write the L2 norm and the histogram of each parameter.

    Args:
        name_and_params: pairs ``(name, parameter)``.
        with_histogram: write histograms as well.
    """
    if not should_record_summaries():
        return
    for name, parameter in name_and_params:
        _summarize_values(f'summarize_vars/{name}', parameter.detach(), with_histogram)


@configurable
def summarize_gradients(name_and_params: Iterable[tuple[str, nn.Parameter]], with_histogram: bool = True) -> None:
    """Write the L2 norm of the gradient of each parameter and of all parameters together, and histograms.

    Args:
        name_and_params: pairs ``(name, parameter)``; parameters without a gradient are skipped.
        with_histogram: write histograms as well.
    """
    if not should_record_summaries():
        return
    gradients = [(name, p.grad.detach()) for name, p in name_and_params if p.grad is not None]
    for name, gradient in gradients:
        _summarize_values(f'summarize_grads/{name}_gradient', gradient, with_histogram)
    if gradients:
        norms = torch.stack([torch.linalg.vector_norm(g.float()) for _, g in gradients])
        summary_ops.scalar('summarize_grads/global_grad_norm', torch.linalg.vector_norm(norms))


def summarize_gradient_norm(params: Iterable[nn.Parameter]) -> None:
    """Write the L2 norm of all gradients together as ``train/grad_norm``; call it before gradients are clipped."""
    norms = [torch.linalg.vector_norm(p.grad.detach().float()) for p in params if p.grad is not None]
    if norms:
        summary_ops.scalar('train/grad_norm', torch.linalg.vector_norm(torch.stack(norms)))


def _summarize_values(name: str, value: torch.Tensor, with_histogram: bool) -> None:
    if with_histogram:
        summary_ops.histogram(f'{name}/value', value)
    summary_ops.scalar(f'{name}/norm', torch.linalg.vector_norm(value.float()))


def add_nested_summaries(prefix: str, data: Any) -> None:
    """Write the mean of each leaf of a nest of tensors or numbers as ``<prefix>/<path>``; empty leaves are skipped."""
    if should_record_summaries():
        for path, leaf in nest.flatten_with_path(data):
            add_mean_summary(f'{prefix}/{path}' if path else prefix, leaf)


@configurable
def summarize_per_category_loss(loss_info: LossInfo, summarize_count: bool = False,
                                label_names: Sequence[str] | None = None) -> None:
    """Write the mean loss of the samples of each category.

    Args:
        loss_info: ``loss`` and the leaves of ``extra`` of shape ``[T, B]`` (or ``[B]``) are averaged for each value of
            ``batch_label``, int ``[B]`` or ``[T, B]``; other leaves are skipped.
        summarize_count: write the number of samples of each category as well.
        label_names: name of category i; ``None`` uses its number.

    Raises:
        ValueError: ``batch_label`` is not set, or ``label_names`` has no name for a label.
    """
    if not should_record_summaries():
        return
    if not isinstance(loss_info.batch_label, torch.Tensor):
        raise ValueError('summarize_per_category_loss: LossInfo.batch_label is not set')
    label = loss_info.batch_label.detach()
    leaves = nest.flatten_with_path({'loss': loss_info.loss, 'extra': loss_info.extra})
    for category in label.unique().tolist():
        if label_names is not None and not 0 <= category < len(label_names):
            raise ValueError(f'summarize_per_category_loss: label {category} has no name among {list(label_names)}')
        name = str(category) if label_names is None else label_names[category]
        is_member = label == category
        if summarize_count:
            summary_ops.scalar(f'batch_label_count/{name}', is_member.sum())
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.shape[-label.ndim:] == label.shape and leaf.ndim <= 2:
                members = leaf.detach().float()[..., is_member]
                summary_ops.scalar(f"per_category_loss/{path.removeprefix('extra.')}/{name}", members.mean())


def summarize_loss(loss_info: LossInfo) -> None:
    """Write the means of ``loss``, ``scalar_loss``, the leaves of ``extra`` and the gradient noise scale.

    The leaves of ``extra`` are written as ``loss/<path>``.
    """
    if not should_record_summaries():
        return
    for name in ('loss', 'scalar_loss', 'gns'):
        value = getattr(loss_info, name)
        if isinstance(value, torch.Tensor):
            add_mean_summary(name, value)
    add_nested_summaries('loss', loss_info.extra)


def summarize_nest(prefix: str, nested: NestedTensor) -> None:
    """Write the mean and the histogram of each leaf as ``<prefix>/<path>``."""
    if should_record_summaries():
        for path, leaf in nest.flatten_with_path(nested):
            add_mean_hist_summary(f'{prefix}/{path}' if path else prefix, leaf)


def summarize_action(actions: NestedTensor, action_specs: Any, name: str = 'action') -> None:
    """Write the histogram of each dimension of each action.

    Args:
        actions: nest of ``[..., *spec.shape]``.
        action_specs: nest of ``BoundedTensorSpec``.
        name: prefix.
    """
    if not should_record_summaries():
        return
    for (path, action), spec in zip(nest.flatten_with_path(actions), nest.flatten(action_specs)):
        base = f'{name}/{path}' if path else name
        for i, column in enumerate(action.detach().reshape(-1, max(spec.numel, 1)).unbind(-1)):
            column_name = base if spec.numel == 1 else f'{base}/{i}'
            low, high = _bounds(spec, i)
            if spec.is_discrete and np.isfinite(low):
                histogram_discrete(column_name, column, int(low), int(high))
            else:
                histogram_continuous(column_name, column, low if np.isfinite(low) else None,
                                     high if np.isfinite(high) else None)


def _bounds(spec: TensorSpec, index: int) -> tuple[float, float]:
    if not isinstance(spec, BoundedTensorSpec):
        return -np.inf, np.inf
    low, high = (float(np.broadcast_to(np.asarray(bound), spec.shape).reshape(-1)[index])
                 for bound in (spec.minimum, spec.maximum))
    return (low, high) if abs(low) < 1e30 and abs(high) < 1e30 else (-np.inf, np.inf)


def summarize_distribution(name: str, distributions: Any) -> None:
    """Write mean and histogram of the parameters of each distribution, and its entropy if available.

    Args:
        name: prefix.
        distributions: nest of distributions of ``[...]``; other leaves are skipped.
    """
    if not should_record_summaries():
        return
    for path, distribution in nest.flatten_with_path(distributions, is_leaf=nest.is_distribution):
        if not isinstance(distribution, td.Distribution):
            continue
        base = f'{name}/{path}' if path else name
        inner = _innermost(distribution)
        for parameter in _DISTRIBUTION_PARAMETERS:
            value = getattr(inner, parameter, None)
            if isinstance(value, torch.Tensor):
                add_mean_hist_summary(f'{base}/{parameter}', value)
        try:
            entropy = distribution.entropy()
        except NotImplementedError:
            continue  # a transformed distribution has no entropy in closed form
        summary_ops.scalar(f'{base}/entropy', entropy.detach().mean())


def _innermost(distribution: td.Distribution) -> td.Distribution:
    while (base := getattr(distribution, 'base_dist', None)) is not None:
        distribution = base
    return distribution


def add_mean_hist_summary(name: str, value: torch.Tensor) -> None:
    """Write the histogram ``<name>/value`` and the mean ``<name>/mean`` unless the tensor is empty."""
    if should_record_summaries() and value.numel() > 0:
        value = value.detach()
        summary_ops.histogram(f'{name}/value', value)
        add_mean_summary(f'{name}/mean', value)


def safe_mean_hist_summary(name: str, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Call ``add_mean_hist_summary`` for the elements where ``mask`` (of the leading dimensions) is true."""
    if should_record_summaries():
        add_mean_hist_summary(name, value if mask is None else value[mask.bool()])


def add_mean_summary(name: str, value: Any) -> None:
    """Write the mean of a tensor or a number unless it is empty or ``None``."""
    if not should_record_summaries() or value is None:
        return
    if not isinstance(value, torch.Tensor):
        summary_ops.scalar(name, value)
    elif value.numel() > 0:
        summary_ops.scalar(name, value.detach().to(torch.float32).mean())


def safe_mean_summary(name: str, value: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Call ``add_mean_summary`` for the elements where ``mask`` (of the leading dimensions) is true."""
    if should_record_summaries():
        add_mean_summary(name, value if mask is None else value[mask.bool()])


class record_time:
    """Context manager that writes the seconds spent in its body since the last summary.

    The times of all uses of the same object are added up until an iteration that records summaries.

    Args:
        tag: name of the scalar.
    """

    def __init__(self, tag: str):
        self._tag = tag
        self._seconds = 0.0

    def __enter__(self) -> 'record_time':
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds += time.perf_counter() - self._start
        if should_record_summaries():
            summary_ops.scalar(self._tag, self._seconds)
            self._seconds = 0.0


def summarize_tensor_gradients(name: str, tensor: NestedTensor, batch_dims: int = 1,
                               clone: bool = False) -> NestedTensor:
    """Write the norm of the gradient that reaches each tensor in the backward pass.

    Args:
        name: prefix.
        tensor: nest of tensors ``[B, ...]`` that require grad; other tensors are returned unchanged.
        batch_dims: number of leading batch dimensions; norms are computed per sample and averaged over them.
        clone: summarize only the gradient through the returned tensors, not through other uses of the inputs.

    Returns:
        The tensors to use from now on: the inputs or clones of them.
    """
    if not should_record_summaries():
        return tensor
    writer, step, scope = context.get_summary_writer(), context.get_summary_step(), context.scope_name()

    def watch(path: str, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            return x
        x = x.clone() if clone else x
        tag = f'{scope}{name}/{path}' if path else f'{scope}{name}'

        def write(gradient: torch.Tensor) -> None:
            rows = gradient.detach().float().reshape(*gradient.shape[:batch_dims], -1)
            writer.add_scalar(f'{tag}/gradient_norm', float(rows.norm(dim=-1).mean()), step)

        x.register_hook(write)
        return x

    return nest.py_map_structure_with_path(watch, tensor)


def summarize_distribution_gradient(name: str, distribution: Any, batch_dims: int = 1, clone: bool = False) -> Any:
    """Call ``summarize_tensor_gradients`` for the parameters of distributions.

    Returns:
        The distributions to use from now on, with the same parameters or clones of them.
    """
    return summarize_tensor_gradients(name, distribution, batch_dims, clone)


def by_reward(*tensors: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return ``(suffix, *tensors)`` for each reward dimension of tensors ``[T, B]`` or ``[T, B, K]``."""
    if tensors[0].ndim == 2:
        return [('', *tensors)]
    return [(f'/{k}', *(t[..., k] for t in tensors)) for k in range(tensors[0].shape[-1])]
