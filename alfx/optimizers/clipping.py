"""Gradient clipping, learning rate schedules and parameters added later, for any torch optimizer.

:class:`ClippingMixin` is placed before a class of ``torch.optim`` among the base classes;
:mod:`alfx.optimizers.optimizers` does so for the optimizers that confs use.
"""
import copy
import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, Optional, Union

import torch
from torch import Tensor

from alfx.gin_utils.value_checks import NonNegative, Positive

LearningRate = Union[NonNegative, Callable[[], float]]
Parameters = Union[Iterable[Tensor], Iterable[dict[str, Any]]]
Number = Union[float, Tensor]  # a Python number on the CPU, where operations on scalar tensors are slow


def global_norm(*groups: list[Tensor]) -> Number:
    """Compute the Euclidean norm of all elements of all tensors.

    Args:
        groups: one or more non-empty lists of tensors of any shapes; the tensors of one list have the same device and
            type.

    Returns:
        A number if all tensors are on the CPU; otherwise a scalar on the device of the first tensor, without
        synchronization.
    """
    if all(group[0].is_cpu for group in groups):
        norms = [norm.item() for group in groups for norm in torch._foreach_norm(group)]
        return math.sqrt(sum([norm * norm for norm in norms]))
    parts = [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group))) for group in groups]
    if len(parts) == 1:
        return parts[0]
    return torch.linalg.vector_norm(torch.stack([part.to(parts[0].device, torch.float32) for part in parts]))


def group_by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return lists of tensors of the same device and type, each in the given order."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def clip_divisor(norm: Number, max_norm: float) -> Number:
    """Return the divisor that reduces ``norm`` to at most ``max_norm``: ``max(1, norm / max_norm)``.

    It is exactly 1 if the norm is within the bound. NaN stays NaN. The result is a number for a number and a tensor for
    a tensor.
    """
    if isinstance(norm, Tensor):
        return (norm / max_norm).clamp_(min=1.0)
    return 1.0 if norm <= max_norm else norm / max_norm


def _without_compiler(method: Callable) -> Callable:
    """Return ``method`` without the decorator that disables torch.compile for it.

    The first call of any such decorated method imports the compiler, which takes a second.
    """
    wrapped = getattr(method, '__wrapped__', None)
    return method if wrapped is None else functools.partial(wrapped, method.__self__)  # type: ignore[attr-defined]


class ClippingMixin:
    """Mixin that adds clipping and schedules to an optimizer of ``torch.optim``; list it first among the base classes.

    - It can be constructed without parameters; :meth:`add_param_group` adds them later.
    - The learning rate may be a schedule: a callable without arguments, evaluated before every step.
    - ``step()`` clips the gradients, then updates.
    - Copying and pickling keep the clipping and the schedule.

    Args:
        params: parameters or parameter groups; may be empty. A group may have its own ``lr`` (number or schedule).
        lr: learning rate, or a callable that returns it (such as a scheduler of :mod:`alfx.utils.schedulers`).
        gradient_clipping: maximum norm of a gradient; None for no clipping.
        clip_by_global_norm: clip the norm of all gradients of all groups together; otherwise clip the gradient of each
            parameter separately.
        name: name of this optimizer in logs and summaries.
        kwargs: arguments of the torch optimizer.

    Raises:
        ValueError: a learning rate or a clipping norm out of range.
        TypeError: an argument of the wrong type.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, params: Parameters = (), *, lr: LearningRate, gradient_clipping: Optional[Positive] = None,
                 clip_by_global_norm: bool = False, name: str = 'Optimizer', **kwargs: Any) -> None:
        if gradient_clipping is not None:
            if isinstance(gradient_clipping, bool) or not isinstance(gradient_clipping, numbers.Real):
                raise TypeError(f'{name}.gradient_clipping: expected a number or None, found {gradient_clipping!r}')
        self.name = name
        self.gradient_clipping = None if gradient_clipping is None else float(gradient_clipping)
        self.clip_by_global_norm = bool(clip_by_global_norm)
        self._schedule = lr if callable(lr) else None
        self._group_schedules: list[Optional[Callable[[], float]]] = []
        self._scheduled = False
        self._grad_norm: Optional[Number] = None
        # torch rejects an empty list of parameters, but accepts an empty group, which is removed again
        super().__init__([{'params': []}], lr=_initial_lr(lr, name), **kwargs)  # type: ignore[call-arg]
        self.param_groups.clear()
        self._group_schedules.clear()
        groups = list(params)
        if groups and not isinstance(groups[0], dict):
            groups = [{'params': groups}]
        for group in groups:
            self.add_param_group(group)  # type: ignore[arg-type]

    @property
    def grad_norm(self) -> Optional[Tensor]:
        """Global norm of the gradients before the last clipping (scalar).

        None unless ``clip_by_global_norm`` is on and there was a step. The next step may overwrite it.
        """
        return None if self._grad_norm is None else torch.as_tensor(self._grad_norm)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``torch.optim.Optimizer.add_param_group`` does.

        Args:
            param_group: 'params' and all values that differ from the defaults; 'lr' may be a schedule.

        Raises:
            ValueError: a parameter is already in another group, or has its own optimizer arguments (``opt_args``),
                which this version does not support.
        """
        lr = param_group.get('lr')
        schedule = lr if callable(lr) else self._schedule if lr is None else None
        group = {**param_group}
        if not isinstance(group['params'], Tensor):
            group['params'] = list(group['params'])
            for param in group['params']:
                _refuse_opt_args(param, self.name)
        if schedule is not None:
            group['lr'] = _initial_lr(schedule, self.name)
        _without_compiler(super().add_param_group)(group)  # type: ignore[misc]
        self._group_schedules.append(schedule)
        self._scheduled = any(s is not None for s in self._group_schedules)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters to None (``set_to_none=False`` fills them with 0)."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)  # type: ignore[misc]
            return
        for group in self.param_groups:
            for param in group['params']:
                param.grad = None

    @torch.no_grad()
    def clip_gradients(self) -> Optional[Tensor]:
        """Clip the gradients in place. ``step()`` calls this itself.

        Returns:
            The global norm before clipping (scalar) if ``clip_by_global_norm``, otherwise None.
        """
        if self.gradient_clipping is None:
            return None
        groups = group_by_kind(p.grad for g in self.param_groups for p in g['params'] if p.grad is not None)
        if not groups:
            return None
        if self.clip_by_global_norm:
            self._grad_norm = global_norm(*groups)
            divisor = clip_divisor(self._grad_norm, self.gradient_clipping)
            for grads in groups:
                if isinstance(divisor, Tensor):
                    torch._foreach_div_(grads, divisor.to(grads[0].device))
                elif divisor != 1.0:
                    torch._foreach_div_(grads, divisor)
            return self.grad_norm
        for grads in groups:
            divisors: Any = clip_divisor(torch.stack(torch._foreach_norm(grads)), self.gradient_clipping)
            torch._foreach_div_(grads, divisors.unbind())
        return None

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Clip the gradients, then update every parameter that has one.

        Args:
            closure: computes the loss and its gradients; called first.

        Returns:
            The result of ``closure``, or None.
        """
        loss = self._before_step(closure)
        self.clip_gradients()
        super().step()  # type: ignore[misc]
        return loss

    def apply_schedules(self) -> None:
        """Set the learning rates to the current values of their schedules. ``step()`` calls this itself."""
        if self._scheduled:
            for group, schedule in zip(self.param_groups, self._group_schedules):
                if schedule is not None:
                    group['lr'] = float(schedule())

    def _before_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        """Apply the schedules and call the closure."""
        self.apply_schedules()
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of the state of an optimizer with the same groups, as torch does.

        Raises:
            ValueError: the groups do not match.
        """
        _without_compiler(super().load_state_dict)(copy.deepcopy(state_dict))  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters and the groups, in the format of torch."""
        return _without_compiler(super().state_dict)()  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        torch_state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        own = ('name', 'gradient_clipping', 'clip_by_global_norm', '_schedule', '_group_schedules', '_scheduled')
        return {**torch_state, **{key: getattr(self, key) for key in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._grad_norm = None


def _initial_lr(lr: LearningRate, name: str) -> float:
    """Return the learning rate before the first step."""
    value = lr() if callable(lr) else lr
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f'{name}.lr: expected a number or a scheduler, found {value!r}')
    if not value >= 0:
        raise ValueError(f'{name}.lr: expected a number of at least 0, found {value}')
    return float(value)


def _refuse_opt_args(param: Any, name: str) -> None:
    """Raise if a layer attached optimizer arguments to its parameter."""
    opt_args = getattr(param, 'opt_args', None)
    if opt_args:
        raise ValueError(f'{name}: a parameter of shape {tuple(param.shape)} has its own optimizer arguments,'
                         f' {opt_args!r} (weight_opt_args or bias_opt_args of a layer), which this version does not'
                         ' support: remove them, or use a separate optimizer for the parameter')
