"""Steps of SGD, RMSprop and RAdam on torch's foreach kernels, with minimal overhead.

``torch.optim`` wraps its own steps for its compiler and profiler, which costs more than the update of a small network,
and a second of imports at the first step.
"""
import math
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor

from alfx.optimizers.autograd import without_autograd
from alfx.optimizers.clipping import ClippingMixin, group_by_kind
from alfx.optimizers.hooks import LazyHooks


class ForeachMixin(LazyHooks, ClippingMixin):
    """Mixin whose step clips, then passes the parameters and gradients of each group by kind to :meth:`_update`.

    List it before the torch optimizer whose hyperparameters and state it uses.
    """

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Clip the gradients, then update every parameter that has one; see :meth:`ClippingMixin.step`."""
        loss = self._before_step(closure)
        with without_autograd(p for group in self.param_groups for p in group['params']):
            self.clip_gradients()
            for group in self.param_groups:
                params = [p for p in group['params'] if p.grad is not None]
                for alike in group_by_kind(params):
                    self._update(group, alike, [p.grad for p in alike])  # type: ignore[misc]
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Update parameters of the same device and type in place."""
        raise NotImplementedError

    def _state_of(self, params: list[Tensor], name: str) -> list[Tensor]:
        """Return the tensors called ``name`` in the state of ``params``; missing ones are created as zeros."""
        state: Any = self.state  # type: ignore[attr-defined]
        for p in params:
            if state[p].get(name) is None:
                state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return [state[p][name] for p in params]

    def _decayed(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Return the gradients of the loss with its L2 penalty; new tensors if there is a penalty."""
        if group['weight_decay'] == 0:
            return grads
        return list(torch._foreach_add(grads, params, alpha=group['weight_decay']))


class ForeachSGD(ForeachMixin, torch.optim.SGD):
    """Base class of :class:`~alfx.optimizers.optimizers.SGD`: stochastic gradient descent with momentum.

    With velocity u: ``u = momentum * u + (1 - dampening) * g`` (``u = g`` at the first step), ``p -= lr * u``. With
    Nesterov's momentum ``p -= lr * (g + momentum * u)`` (Sutskever et al. 2013).
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
    """Base class of :class:`~alfx.optimizers.optimizers.RMSprop`.

    RMSprop is from Hinton, lecture 6 of Neural Networks for Machine Learning, 2012; the centered variant from Graves
    2013 (arXiv:1308.0850, eq. 38-45): ``s = alpha * s + (1 - alpha) * g^2``, ``p -= lr * g / (sqrt(s) + eps)``. All
    elements of a group are updated as one vector; the tensors in the state are views of it.
    """

    # keys are the ids of parameters that are updated together; a parameter belongs to one entry only
    _flat: dict[tuple[int, ...], dict[str, Tensor]] | None = None
    _update_views: dict[tuple[int, ...], list[Tensor]]  # the parts of 'update' that belong to each parameter

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._flat = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see :meth:`ClippingMixin.add_param_group`."""
        super().add_param_group(param_group)
        self._flat = None

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        alpha = group['alpha']
        flat = self._flat_state(group, params)
        gradient = _flattened(self._decayed(group, params, grads))
        flat['step'].add_(1)
        square = flat['square_avg'].mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        if group['centered']:
            mean = flat['grad_avg'].lerp_(gradient, 1 - alpha)
            square = square.addcmul(mean, mean, value=-1.0)
        root = square.sqrt().add_(group['eps'])
        if group['momentum']:
            flat['update'].copy_(flat['momentum_buffer'].mul_(group['momentum']).addcdiv_(gradient, root))
        else:
            torch.div(gradient, root, out=flat['update'])
        torch._foreach_add_(params, self._update_views[tuple(map(id, params))], alpha=-group['lr'])

    def _flat_state(self, group: dict[str, Any], params: list[Tensor]) -> dict[str, Tensor]:
        """Return the state of ``params`` as one vector for each name; the entries of ``self.state`` are views of it."""
        if self._flat is None:
            self._flat, self._update_views = {}, {}
        key = tuple(map(id, params))
        flat = self._flat.get(key)
        if flat is None:
            self._flat = {other: entry for other, entry in self._flat.items() if not set(other) & set(key)}
            names = ['square_avg']
            names += ['grad_avg'] if group['centered'] else []
            names += ['momentum_buffer'] if group['momentum'] else []
            flat = self._flat[key] = {name: _flattened(self._state_of(params, name)) for name in names}
            for name in names:
                for p, view in zip(params, _views(flat[name], params)):
                    self.state[p][name] = view
            steps = torch.stack([torch.as_tensor(self.state[p].get('step', 0.0), dtype=torch.float32).cpu()
                                 for p in params])
            for p, step in zip(params, steps.unbind()):
                self.state[p]['step'] = step
            flat['step'], flat['update'] = steps, torch.empty_like(flat['square_avg'])
            self._update_views[key] = _views(flat['update'], params)
        return flat


class ForeachRAdam(ForeachMixin, torch.optim.RAdam):
    """Base class of :class:`~alfx.optimizers.optimizers.RAdam` (Liu et al. 2020, arXiv:1908.03265, algorithm 2).

    With moments m and v of step t as in Adam, and rho[t] the length of the average of squared gradients:

        rho[inf] = 2 / (1 - beta2) - 1,  rho[t] = rho[inf] - 2 t beta2^t / (1 - beta2^t)
        p -= lr m / (1 - beta1^t) r[t] sqrt(1 - beta2^t) / (sqrt(v) + eps)      if rho[t] > 5
        p -= lr m / (1 - beta1^t)                                               otherwise
        r[t] = sqrt((rho[t] - 4) (rho[t] - 2) rho[inf] / ((rho[inf] - 4) (rho[inf] - 2) rho[t]))
    """

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        by_step: dict[float, list[int]] = {}  # parameters that had no gradient in some steps are behind
        for i, p in enumerate(params):
            step = self.state[p].setdefault('step', torch.zeros(())).add_(1)
            by_step.setdefault(step.item(), []).append(i)
        grads = self._decayed(group, params, grads)
        for step, indices in by_step.items():
            self._update_alike(group, int(step), [params[i] for i in indices], [grads[i] for i in indices])

    def _update_alike(self, group: dict[str, Any], step: int, params: list[Tensor], grads: list[Tensor]) -> None:
        beta1, beta2 = group['betas']
        mean, square = self._state_of(params, 'exp_avg'), self._state_of(params, 'exp_avg_sq')
        torch._foreach_lerp_(mean, grads, 1 - beta1)
        torch._foreach_mul_(square, beta2)
        torch._foreach_addcmul_(square, grads, grads, value=1 - beta2)
        rate, unbias = -group['lr'] / (1 - beta1**step), 1 - beta2**step
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / unbias
        if length <= 5:
            torch._foreach_add_(params, mean, alpha=rate)
            return
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        root = torch._foreach_sqrt(square)
        torch._foreach_add_(root, group['eps'])
        torch._foreach_addcdiv_(params, mean, root, value=rate * math.sqrt(rectified * unbias))


def _flattened(tensors: list[Tensor]) -> Tensor:
    """Return a new vector of all elements."""
    return torch.cat([t.reshape(-1) for t in tensors])


def _views(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Return the parts of ``vector`` in the shapes of ``like``."""
    return [part.view(t.shape) for part, t in zip(vector.split([t.numel() for t in like]), like)]
