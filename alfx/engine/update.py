"""From losses to a gradient update: masks, reduction, backward, clipping, optimizer step.

The last two hops of an iteration. Nothing here knows a particular algorithm.
"""
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from alfx import context, nest
from alfx.data_structures import BatchInfo, Experience, LossInfo, StepType
from alfx.tensor_specs import NestedTensor

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm


class NonFiniteLossError(RuntimeError):
    """A loss is NaN or infinite. It is raised before the update, so that all parameters are still good."""


def valid_masks(step_type: torch.Tensor) -> torch.Tensor:
    """float32 of the shape of ``step_type``: 0 at LAST, whose action the environment ignores, else 1."""
    return (step_type != StepType.LAST).to(torch.float32)


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


def apply_gradients(algorithm: 'Algorithm', loss_info: LossInfo, masks: torch.Tensor | None = None,
                    weight: float = 1.0, batch_info: BatchInfo | None = None
                    ) -> tuple[LossInfo, list[tuple[str, nn.Parameter]]]:
    """One update of all parameters that the optimizers of ``algorithm`` own.

    Returns:
        ``loss_info`` with ``loss`` reduced to a scalar (and, where summaries are written, ``extra`` to masked
        means), and ``(name, parameter)`` of what was updated.

    Raises:
        NonFiniteLossError: names the losses that are not finite; no parameter has been changed.
    """
    importance_weights = batch_info.importance_weights if batch_info is not None else ()
    total = reduce_loss(loss_info, masks, weight, importance_weights)
    averager = algorithm.gradient_averager
    if not torch.isfinite(total.detach()):
        if averager is not None:
            averager.report_bad_loss()
        raise NonFiniteLossError(describe_non_finite(algorithm, loss_info))
    optimizers, params = algorithm.what_is_updated()
    if context.should_record_summaries() and algorithm.gradient_noise_scale is not None:
        loss_info = loss_info._replace(gns=_gradient_noise(algorithm, loss_info.loss, masks, params))
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler = algorithm.loss_scaler
    if total.requires_grad:
        (total if scaler is None else scaler.scaled(total)).backward()
    if averager is not None:
        averager.average()
    if scaler is not None:
        scaler.step(optimizers)
    else:
        for optimizer in optimizers:
            optimizer.step()
    loss_info = loss_info._replace(loss=total.detach())
    if context.should_record_summaries():
        loss_info = loss_info._replace(extra=masked_means(loss_info.extra, masks))
    return loss_info, params


def _gradient_noise(algorithm: 'Algorithm', loss: Any, masks: torch.Tensor | None,
                    params: list[tuple[str, nn.Parameter]]) -> Any:
    """The noise scale of the gradient of ``loss`` ``[T, B]``, ``()`` where there is none."""
    assert algorithm.gradient_noise_scale is not None
    if not isinstance(loss, torch.Tensor) or loss.ndim != 2:
        return ()
    return algorithm.gradient_noise_scale(loss if masks is None else loss * masks, [p for _, p in params])


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


def describe_non_finite(algorithm: 'Algorithm', loss_info: LossInfo) -> str:
    """Which parts of a loss are not finite."""
    def is_bad(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not bool(torch.isfinite(value.detach().float()).all())

    named = [(path, leaf) for path, leaf in nest.flatten_with_path(loss_info.extra)]
    bad = [path or 'extra' for path, leaf in named if is_bad(leaf)]
    names = bad or [field for field in ('loss', 'scalar_loss') if is_bad(getattr(loss_info, field))] or ['loss']
    return (f"the loss of {algorithm.name} is NaN or infinite at update {context.get_global_counter()}: "
            f"{', '.join(names)}; the parameters are those before this update. Common causes: too high a learning "
            'rate, no gradient clipping, rewards or observations of very large size')


def train_from_unroll(algorithm: 'Algorithm', experience: Experience, train_info: NestedTensor) -> int:
    """On-policy training: one update from the infos of an unroll.

    Args:
        algorithm: calculates the loss and owns the optimizers.
        experience: ``[T + 1, B, ...]``; the last step is there to bootstrap from, its loss does not count.
        train_info: infos ``[T + 1, B, ...]``.

    Returns:
        ``T * B``, the number of steps trained on.
    """
    loss_info = algorithm.calc_loss(train_info)
    loss_info, masks = without_bootstrap_step(loss_info, experience.time_step.step_type)
    loss_info, params = algorithm.update_with_gradient(loss_info, masks)
    algorithm.after_update(experience.time_step, train_info)
    if context.should_record_summaries():
        algorithm.summarize_train(experience, train_info, loss_info, params)
    return masks.numel()


def counted_loss(algorithm: 'Algorithm', loss_info: LossInfo, step_type: torch.Tensor) -> tuple[LossInfo, torch.Tensor]:
    """What counts of the losses of sequences from a replay buffer.

    Args:
        algorithm: calculated the loss; may have ``bootstraps_sequences``.
        loss_info: ``loss`` is ``[T, B]``.
        step_type: ``[T, B]``.

    Returns:
        tuple:
        - ``loss_info``, without the last step where that is there only to bootstrap from
        - masks of the shape of its ``loss``
    """
    if algorithm.bootstraps_sequences:
        return without_bootstrap_step(loss_info, step_type)
    return loss_info, valid_masks(step_type)


def without_bootstrap_step(loss_info: LossInfo, step_type: torch.Tensor) -> tuple[LossInfo, torch.Tensor]:
    """Cut what is ``[T + 1, B, ...]``, as ``step_type`` is, to the ``[T, B, ...]`` that count; make masks for them."""
    def cut(x: Any) -> Any:
        return x[:-1] if isinstance(x, torch.Tensor) and x.shape[:2] == step_type.shape else x

    loss_info = loss_info._replace(loss=cut(loss_info.loss))
    if context.should_record_summaries():  # otherwise nobody looks at the extra
        loss_info = loss_info._replace(extra=nest.map_structure(cut, loss_info.extra))
    return loss_info, valid_masks(step_type[:-1])
