"""From losses to the scalar that is minimised: masks, reduction, what is said of a loss that is not finite.

Pure functions of tensors. The update itself is in :mod:`alfx.engine.learner`.
"""
from typing import Any

import torch

from alfx import context, nest
from alfx.data_structures import LossInfo, valid_masks
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


def weighted(loss_info: LossInfo, weight: float) -> LossInfo:
    """``loss_info`` with ``loss`` and ``scalar_loss`` multiplied by a number."""
    losses = {name: getattr(loss_info, name) for name in ('loss', 'scalar_loss')}
    return loss_info if weight == 1.0 else loss_info._replace(**{
        name: x * weight for name, x in losses.items() if isinstance(x, torch.Tensor)})


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


def describe_non_finite(name: str, loss_info: LossInfo) -> str:
    """Which parts of the loss of the algorithm called ``name`` are not finite."""
    def is_bad(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not bool(torch.isfinite(value.detach().float()).all())

    named = [(path, leaf) for path, leaf in nest.flatten_with_path(loss_info.extra)]
    bad = [path or 'extra' for path, leaf in named if is_bad(leaf)]
    names = bad or [field for field in ('loss', 'scalar_loss') if is_bad(getattr(loss_info, field))] or ['loss']
    return (f"the loss of {name} is NaN or infinite at update {context.get_global_counter()}: "
            f"{', '.join(names)}; the parameters are those before this update. Common causes: too high a learning "
            'rate, no gradient clipping, rewards or observations of very large size')


def masked_loss(loss_info: LossInfo, step_type: torch.Tensor, bootstraps: bool) -> tuple[LossInfo, torch.Tensor]:
    """What counts of the losses of sequences.

    Args:
        loss_info: ``loss`` is ``[T, B]``.
        step_type: ``[T, B]``.
        bootstraps: the last step is there only to bootstrap from; it is cut off.

    Returns:
        tuple:
        - ``loss_info``, of ``[T - 1, B]`` with ``bootstraps``
        - masks of the shape of its ``loss``
    """
    if not bootstraps:
        return loss_info, valid_masks(step_type)

    def cut(x: Any) -> Any:
        return x[:-1] if isinstance(x, torch.Tensor) and x.shape[:2] == step_type.shape else x

    loss_info = loss_info._replace(loss=cut(loss_info.loss))
    if context.should_record_summaries():  # otherwise nobody looks at the extra
        loss_info = loss_info._replace(extra=nest.map_structure(cut, loss_info.extra))
    return loss_info, valid_masks(step_type[:-1])
