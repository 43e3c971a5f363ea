"""The steps of SGD and RMSprop on torch's foreach kernels, with as little around them as possible.

``torch.optim`` wraps its own steps for its compiler and profiler, which costs more than the update of a small
network, and a second of imports at the first step.
"""
import types
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from alfx.optimizers.clipping import ClippingMixin, group_by_kind


class ForeachMixin(ClippingMixin):
    """A step that clips, then hands each group's parameters and gradients to :meth:`_update` in lists of one kind.

    Put it in front of the torch optimizer whose hyperparameters and state it uses.
    """

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Clip the gradients, then update every parameter that has one; see :meth:`ClippingMixin.step`."""
        loss = self._before_step(closure)
        with torch.no_grad():
            self.clip_gradients()
            for group in self.param_groups:
                params = [p for p in group['params'] if p.grad is not None]
                for alike in group_by_kind(params):
                    self._update(group, alike, [p.grad for p in alike])
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # torch leaves a step alone that says so

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update parameters of the same device and type in place."""
        raise NotImplementedError

    def _state_of(self, params: list[Tensor], name: str) -> list[Tensor]:
        """The tensors called ``name`` in the state of ``params``, zeros where there are none yet."""
        state: Any = self.state  # type: ignore[attr-defined]
        for p in params:
            if state[p].get(name) is None:
                state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [state[p][name] for p in params]

    def _decayed(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """The gradients of the loss with its L2 penalty; new tensors if there is one."""
        if group['weight_decay'] == 0:
            return grads
        return list(torch._foreach_add(grads, params, alpha=group['weight_decay']))

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Have ``hook(optimizer, args, kwargs)`` called before every step, as in torch."""
        self._enable_hooks()
        return super().register_step_pre_hook(hook)  # type: ignore[misc]

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Have ``hook(optimizer, args, kwargs)`` called after every step, as in torch."""
        self._enable_hooks()
        return super().register_step_post_hook(hook)  # type: ignore[misc]

    def _enable_hooks(self) -> None:
        """From now on, step as every optimizer of torch does: with hooks and a mark for the profiler."""
        wrapped = torch.optim.Optimizer.profile_hook_step(type(self).step)
        self.step = types.MethodType(wrapped, self)  # type: ignore[method-assign]


class ForeachSGD(ForeachMixin, torch.optim.SGD):
    """Stochastic gradient descent with momentum; use :class:`~alfx.optimizers.optimizers.SGD`.

    With velocity u: ``u = momentum * u + (1 - dampening) * g`` (``u = g`` at first), ``p -= lr * u``; Nesterov's
    variant moves by ``g + momentum * u`` (Sutskever et al. 2013).
    """

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        grads = self._decayed(group, params, grads)
        momentum = group['momentum']
        if momentum:
            fresh = [p for p in params if self.state[p].get('momentum_buffer') is None]
            velocities = self._state_of(params, 'momentum_buffer')
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, grads, alpha=1 - group['dampening'])
            if fresh:  # the first velocity is the gradient itself, undampened
                gradient_of = {id(p): g for p, g in zip(params, grads)}
                for p in fresh:
                    self.state[p]['momentum_buffer'].copy_(gradient_of[id(p)])
            grads = (list(torch._foreach_add(grads, velocities, alpha=momentum)) if group['nesterov'] else velocities)
        torch._foreach_add_(params, grads, alpha=-group['lr'])


class ForeachRMSprop(ForeachMixin, torch.optim.RMSprop):
    """RMSprop (Hinton, lecture 6 of Neural Networks for Machine Learning, 2012), centered as in Graves 2013
    (arXiv:1308.0850, eq. 38-45); use :class:`~alfx.optimizers.optimizers.RMSprop`.

    ``s = alpha * s + (1 - alpha) * g^2``, ``p -= lr * g / (sqrt(s) + eps)``.
    """

    def _count_step(self, params: list[Tensor]) -> None:
        """torch keeps a count in the state of each parameter; saved states are exchangeable with its own."""
        for p in params:
            if 'step' not in self.state[p]:
                self.state[p]['step'] = torch.zeros(())
        torch._foreach_add_([self.state[p]['step'] for p in params], 1)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        grads = self._decayed(group, params, grads)
        alpha = group['alpha']
        self._count_step(params)
        squares = self._state_of(params, 'square_avg')
        torch._foreach_mul_(squares, alpha)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - alpha)
        if group['centered']:
            means = self._state_of(params, 'grad_avg')
            torch._foreach_lerp_(means, grads, 1 - alpha)
            roots = list(torch._foreach_addcmul(squares, means, means, value=-1.0))
            torch._foreach_sqrt_(roots)
        else:
            roots = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(roots, group['eps'])
        if group['momentum']:
            velocities = self._state_of(params, 'momentum_buffer')
            torch._foreach_mul_(velocities, group['momentum'])
            torch._foreach_addcdiv_(velocities, grads, roots)
            torch._foreach_add_(params, velocities, alpha=-group['lr'])
        else:
            torch._foreach_addcdiv_(params, grads, roots, value=-group['lr'])
