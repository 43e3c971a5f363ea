"""From the losses of steps to what is minimised, and to what is shown."""
from typing import Any

import torch

from alfx import nest
from alfx.data_structures import LossInfo
from alfx.tensor_specs import NestedTensor


def reduce_loss(loss_info: LossInfo, masks: torch.Tensor | None = None, weight: float = 1.0,
                importance_weights: torch.Tensor | tuple[()] = ()) -> torch.Tensor:
    """The scalar to minimise: the masked and weighted mean of ``loss`` over ``T * B``, plus ``scalar_loss``.

    Args:
        loss_info: ``loss`` is ``[T, B]`` or ``()``.
        masks: float32 ``[T, B]``.
        weight: factor of the whole.
        importance_weights: ``[B]`` or ``()``.

    Raises:
        ValueError: ``loss`` does not have the shape of ``masks``, or there is no loss at all.
    """
    total: Any = 0.0
    loss = loss_info.loss
    if isinstance(loss, torch.Tensor):
        if masks is not None and loss.shape != masks.shape:
            raise ValueError(f'calc_loss has to return a loss of shape [T, B] = {list(masks.shape)}, found '
                             f'{list(loss.shape)}; sum over further dimensions first')
        if masks is not None:
            loss = loss * masks
        if isinstance(importance_weights, torch.Tensor):
            loss = loss * importance_weights
        total = loss.mean()
    if isinstance(loss_info.scalar_loss, torch.Tensor):
        total = total + loss_info.scalar_loss
    if not isinstance(total, torch.Tensor):
        raise ValueError('calc_loss returned neither a loss nor a scalar_loss')
    return total if weight == 1.0 else total * weight


def masked_means(extra: NestedTensor, masks: torch.Tensor | None) -> NestedTensor:
    """Statistics of shape ``[T, B]`` averaged over the valid steps, any other over everything."""
    def mean(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        x = x.detach().float()
        if masks is None or x.shape[:2] != masks.shape:
            return x.mean()
        mask = masks.reshape(masks.shape + (1, ) * (x.ndim - 2)).expand_as(x)
        return (x * mask).sum() / mask.sum().clamp(min=1.0)

    return nest.map_structure(mean, extra)
