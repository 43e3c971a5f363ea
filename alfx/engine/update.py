"""One update: gradients from a plan, and the steps of the optimizers.

The last two hops of an iteration. Nothing here knows a particular algorithm. Read next: :mod:`alfx.engine.plan`.
"""
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from alfx import context, nest
from alfx.data_structures import BatchInfo, LossInfo, StepType
from alfx.engine.plan import Batch, Computed, Eager, Plan
from alfx.engine.planning import objective_of

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm


class NonFiniteLossError(RuntimeError):
    """A loss is NaN or infinite. It is raised before the update, so that all parameters are still good."""


def valid_masks(step_type: torch.Tensor) -> torch.Tensor:
    """float32 of the shape of ``step_type``: 0 at LAST, whose action the environment ignores, else 1."""
    return (step_type != StepType.LAST).to(torch.float32)


def apply_gradients(algorithm: 'Algorithm', loss_info: LossInfo, masks: torch.Tensor | None = None,
                    weight: float = 1.0, batch_info: BatchInfo | None = None
                    ) -> tuple[LossInfo, list[tuple[str, nn.Parameter]]]:
    """One update of all parameters that the optimizers of ``algorithm`` own, from losses that have been computed.

    Returns:
        ``loss_info`` with ``loss`` reduced to a scalar (and, where summaries are written, ``extra`` to masked
        means), and ``(name, parameter)`` of what was updated.

    Raises:
        NonFiniteLossError: names the losses that are not finite; no parameter has been changed.
    """
    if weight != 1.0:
        loss_info = loss_info._replace(**{name: getattr(loss_info, name) * weight for name in ('loss', 'scalar_loss')
                                          if isinstance(getattr(loss_info, name), torch.Tensor)})
    plan = Eager(objective_of(algorithm, lambda _: (loss_info, masks, ())))
    weights = batch_info.importance_weights if batch_info is not None else ()
    computed, params = optimize(algorithm, plan, Batch((), weights))
    return computed.loss_info, params


def optimize(algorithm: 'Algorithm', plan: Plan, batch: Batch) -> tuple[Computed, list[tuple[str, nn.Parameter]]]:
    """One update of all parameters that the optimizers of ``algorithm`` own.

    Args:
        algorithm: is trained.
        plan: computes the gradients.
        batch: what from.

    Returns:
        what the plan has computed, and ``(name, parameter)`` of what was updated

    Raises:
        NonFiniteLossError: names the losses that are not finite; no parameter has been changed.
    """
    computed, averager = plan.gradients(batch), algorithm.gradient_averager
    if not math.isfinite(computed.loss_info.loss.item()):
        if averager is not None:
            averager.report_bad_loss()
        parts = plan.explain(batch) if computed.parts is None else computed.parts
        raise NonFiniteLossError(describe_non_finite(algorithm, parts))
    optimizers, params = algorithm.what_is_updated()
    if averager is not None:
        averager.average()
    if algorithm.loss_scaler is not None:
        algorithm.loss_scaler.step(optimizers)
    else:
        for optimizer in optimizers:
            optimizer.step()
    return computed, params


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
