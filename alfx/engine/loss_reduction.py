"""Losses of a batch: masks, reduction to the scalar that is minimized, and the error for losses that are not finite.

All functions are pure functions of tensors. Gradient steps are in :mod:`alfx.engine.updater`.
"""
from typing import Any

import torch

from alfx import context, nest
from alfx.data_structures import LossInfo, valid_masks
from alfx.tensor_specs import NestedTensor


class NonFiniteLossError(RuntimeError):
    """A loss is NaN or infinite. It is raised before the update, so that all parameters are still valid."""


def reduce_loss(loss_info: LossInfo, masks: torch.Tensor | None = None, weight: float = 1.0,
                importance_weights: torch.Tensor | tuple[()] = ()) -> torch.Tensor:
    """Return the scalar to minimize: the masked and weighted mean of ``loss`` over ``T * B``, plus ``scalar_loss``.

    Args:
        loss_info: losses; ``loss`` is ``[T, B]`` or ``()``.
        masks: float32 ``[T, B]``.
        weight: factor of the result.
        importance_weights: ``[B]`` or ``()``.

    Raises:
        ValueError: ``loss`` does not have the shape of ``masks``, or there is no loss at all.
    """
    total: Any = 0.0
    loss = loss_info.loss
    if isinstance(loss, torch.Tensor):
        if masks is not None and loss.shape != masks.shape:
            raise ValueError(f'calc_loss: expected a loss of shape [T, B] = {list(masks.shape)}, found '
                             f'{list(loss.shape)}; ' + (
                                 'sum over the other dimensions first' if loss.ndim else
                                 'return one loss per step, or a scalar as scalar_loss'))
        if masks is not None:
            loss = loss * masks
        if isinstance(importance_weights, torch.Tensor):
            loss = loss * importance_weights
        total = loss.mean()
    if isinstance(loss_info.scalar_loss, torch.Tensor):
        total = total + loss_info.scalar_loss
    if not isinstance(total, torch.Tensor):
        raise ValueError('calc_loss: expected a LossInfo with loss or scalar_loss, found neither')
    return total if weight == 1.0 else total * weight


def weighted(loss_info: LossInfo, weight: float) -> LossInfo:
    """Return ``loss_info`` with ``loss`` and ``scalar_loss`` multiplied by a number."""
    losses = {name: getattr(loss_info, name) for name in ('loss', 'scalar_loss')}
    return loss_info if weight == 1.0 else loss_info._replace(**{
        name: x * weight for name, x in losses.items() if isinstance(x, torch.Tensor)})


def masked_means(extra: NestedTensor, masks: torch.Tensor | None) -> NestedTensor:
    """Average statistics of shape ``[T, B, ...]`` over the valid steps, and all others over all elements."""
    def mean(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        x = x.detach().float()
        if masks is None or x.shape[:2] != masks.shape:
            return x.mean()
        mask = masks.reshape(masks.shape + (1, ) * (x.ndim - 2)).expand_as(x)
        return (x * mask).sum() / mask.sum().clamp(min=1.0)

    return nest.map_structure(mean, extra)


def describe_non_finite(name: str, loss_info: LossInfo) -> str:
    """Return the error message that names the losses of the algorithm ``name`` which are not finite."""
    def is_bad(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not bool(torch.isfinite(value.detach().float()).all())

    named = [(path, leaf) for path, leaf in nest.flatten_with_path(loss_info.extra)]
    bad = [path or 'extra' for path, leaf in named if is_bad(leaf)]
    names = bad or [field for field in ('loss', 'scalar_loss') if is_bad(getattr(loss_info, field))] or ['loss']
    return (f"the loss of {name} is NaN or infinite at update {context.get_global_counter()}: "
            f"{', '.join(names)}; the parameters have not been changed by this update. Common causes: a learning rate "
            'that is too high, no gradient clipping, very large rewards or observations')


def masked_loss(loss_info: LossInfo, step_type: torch.Tensor, bootstraps: bool) -> tuple[LossInfo, torch.Tensor]:
    """Mask the losses of sequences, and drop the last step if it is only used to bootstrap from.

    Args:
        loss_info: losses; ``loss`` is ``[T, B]``.
        step_type: step types ``[T, B]``.
        bootstraps: drop the last step.

    Returns:
        tuple:
        - ``loss_info``, ``[T - 1, B]`` with ``bootstraps``
        - masks of the shape of ``loss``
    """
    if not bootstraps:
        return loss_info, valid_masks(step_type)

    def cut(x: Any) -> Any:
        return x[:-1] if isinstance(x, torch.Tensor) and x.shape[:2] == step_type.shape else x

    loss_info = loss_info._replace(loss=cut(loss_info.loss))
    if context.should_record_summaries():  # otherwise extra is not used
        loss_info = loss_info._replace(extra=nest.map_structure(cut, loss_info.extra))
    return loss_info, valid_masks(step_type[:-1])
