"""The step shared by Adam, AdamW and AdamTF, on torch's fused kernels with minimal overhead."""
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Optional

import torch
from torch import Tensor

from alfx.gin_utils.value_checks import NonNegative, Positive, Range
from alfx.optimizers.autograd import without_autograd
from alfx.optimizers.clipping import ClippingMixin, LearningRate, Parameters, clip_divisor, global_norm, group_by_kind
from alfx.optimizers.hooks import LazyHooks

Decay = Annotated[float, Range(0, below=1)]


class _StepCounts:
    """Numbers of steps of the parameters of a bucket, in one block of memory.

    Attributes:
        block: the numbers, ``[number of parameters]``.
        tensors: the same numbers, a scalar tensor for each parameter.
    """

    def __init__(self, steps: list[Tensor]) -> None:
        self.block = torch.stack(steps)
        self.tensors = list(self.block.unbind())
        self._address: Optional[int] = None

    def add_one(self) -> None:
        """Add a step to all parameters."""
        if not self.block.is_cpu:
            self.block.add_(1)
            return
        numbers = self.numbers()
        for i, number in enumerate(numbers):  # faster than the dispatch of torch's addition
            numbers[i] = number + 1

    def numbers(self) -> memoryview:
        """Return a view of the numbers on the CPU."""
        if self.block.data_ptr() != self._address:  # new, or moved to shared memory
            self._address = self.block.data_ptr()
            array: Any = self.block.numpy()
            self._numbers = memoryview(array)
        return self._numbers


class _Bucket(NamedTuple):
    """Parameters of one group that one kernel call updates, and their state, in the same order."""
    group: dict[str, Any]
    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    is_contiguous: bool  # all parameters are contiguous
    counts: Optional[_StepCounts]  # the block of ``steps``; None for a part of the parameters

    def with_gradients(self) -> tuple['_Bucket', list[Tensor]]:
        """Return the parameters that have a gradient, and the gradients, each in the memory layout of its parameter.

        The kernels read memory in order and would silently misread a transposed gradient.
        """
        grads: list[Any] = [p.grad for p in self.params]
        if self.is_contiguous:
            for grad in grads:
                if grad is None or not grad.is_contiguous():
                    break
            else:
                return self, grads
        return self._with_some_of(grads)

    def _with_some_of(self, grads: list[Optional[Tensor]]) -> tuple['_Bucket', list[Tensor]]:
        indices, present = [], []
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            param = self.params[i]
            if not _same_layout(param, grad):
                param.grad = grad = torch.empty_like(param).copy_(grad)
            indices.append(i)
            present.append(grad)
        if len(indices) in (0, len(grads)):
            return self, present
        params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps = (
            [items[i] for i in indices] if items else [] for items in self[1:6])
        return _Bucket(self.group, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, self.is_contiguous,
                       None), present


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether the elements of two tensors of the same shape are in the same order in memory."""
    return all(m == n for size, m, n in zip(a.shape, a.stride(), b.stride()) if size != 1) or a.numel() == 0


class _AdamDefaults(torch.optim.Optimizer):
    """Optimizer base class that defines the hyperparameters of a group."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
                 amsgrad: bool) -> None:
        # with 'fused', load_state_dict of torch keeps the step counts on the device of the parameters
        super().__init__(
            params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=True))


class FusedAdamBase(LazyHooks, ClippingMixin, _AdamDefaults):
    """Base class of :class:`~alfx.optimizers.optimizers.Adam` and its variants, on torch's fused kernels.

    The state of a parameter is that of ``torch.optim.Adam``: 'step', 'exp_avg', 'exp_avg_sq' and with ``amsgrad``
    'max_exp_avg_sq'.
    """

    _decoupled_weight_decay = False

    def __init__(self, params: Parameters, lr: LearningRate, betas: tuple[Decay, Decay], eps: NonNegative,
                 weight_decay: NonNegative, amsgrad: bool, gradient_clipping: Optional[Positive],
                 clip_by_global_norm: bool, name: str) -> None:
        self._buckets: Optional[list[_Bucket]] = None
        super().__init__(params, lr=lr, gradient_clipping=gradient_clipping, clip_by_global_norm=clip_by_global_norm,
                         name=name, betas=tuple(betas), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see :meth:`ClippingMixin.add_param_group`.

        Raises:
            TypeError: a parameter is not of a floating-point type.
            ValueError: a parameter has gaps or overlaps in memory; see also the base class.
        """
        super().add_param_group(param_group)
        self._buckets = None
        for param in self.param_groups[-1]['params']:
            if not param.is_floating_point():
                raise TypeError(f'{self.name}: expected floating-point parameters, found {param.dtype}'
                                f' {tuple(param.shape)}')
            if not _same_layout(param, torch.empty_like(param)):
                raise ValueError(f'{self.name}: expected parameters without gaps in memory, found shape'
                                 f' {tuple(param.shape)} with strides {param.stride()}; create the parameter from'
                                 ' tensor.contiguous()')

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buckets = None

    def buckets(self) -> list[_Bucket]:
        """Return the parameters with their state; missing state is created."""
        if self._buckets is None:
            with torch.no_grad():
                self._buckets = self._make_buckets()
        return self._buckets

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Clip the gradients, then update every parameter that has one; see :meth:`ClippingMixin.step`."""
        loss = self._before_step(closure)
        buckets = self.buckets()
        with without_autograd(bucket.params[0] for bucket in buckets):
            batches = [(bucket, grads) for bucket, grads in map(_Bucket.with_gradients, buckets) if grads]
            if batches:
                divisor = self._clip(batches)
                self._count_steps(batches)
                for bucket, grads in batches:
                    self._update(bucket, grads, divisor)
        return loss

    def _clip(self, batches: list[tuple[_Bucket, list[Tensor]]]) -> Optional[Tensor]:
        """Clip the gradients; return the divisor for a global clipping, which the kernel applies, or None."""
        if self.gradient_clipping is None:
            return None
        if not self.clip_by_global_norm:
            self.clip_gradients()
            return None
        self._grad_norm = global_norm(*(grads for _, grads in batches))
        divisor = clip_divisor(self._grad_norm, self.gradient_clipping)
        if isinstance(divisor, Tensor):
            return divisor.float()
        return None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32)

    def _update(self, bucket: _Bucket, grads: list[Tensor], divisor: Optional[Tensor]) -> None:
        """Call the kernel once. It divides the gradients by ``divisor`` in place."""
        group = bucket.group
        beta1, beta2 = group['betas']
        if divisor is not None and divisor.device != grads[0].device:
            divisor = divisor.to(grads[0].device)
        kernel = torch._fused_adamw_ if self._decoupled_weight_decay else torch._fused_adam_
        kernel(bucket.params, grads, bucket.exp_avgs, bucket.exp_avg_sqs, bucket.max_exp_avg_sqs, bucket.steps,
               lr=group['lr'], beta1=beta1, beta2=beta2, weight_decay=group['weight_decay'], eps=self._eps(group),
               amsgrad=group['amsgrad'], maximize=False, grad_scale=divisor)

    def _count_steps(self, batches: list[tuple[_Bucket, list[Tensor]]]) -> None:
        """Add 1 to the number of steps of each parameter."""
        for bucket, _ in batches:
            if bucket.counts is not None:
                bucket.counts.add_one()
            else:
                torch._foreach_add_(bucket.steps, 1.0)

    def _eps(self, group: dict[str, Any]) -> float:
        """Return the number that is added to the root of the bias-corrected second moment."""
        return group['eps']

    def _make_buckets(self) -> list[_Bucket]:
        """Sort the parameters of each group by device and type, and create missing state."""
        return [self._make_bucket(group, params) for group in self.param_groups
                for params in group_by_kind(group['params'])]

    def _make_bucket(self, group: dict[str, Any], params: list[Tensor]) -> _Bucket:
        moments = ['exp_avg', 'exp_avg_sq'] + (['max_exp_avg_sq'] if group['amsgrad'] else [])
        states = [self.state[p] for p in params]
        for param, state in zip(params, states):
            for key in moments:
                if key not in state:
                    state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        steps = [torch.as_tensor(s.get('step', 0.), dtype=torch.float32, device=params[0].device) for s in states]
        counts = _StepCounts(steps)
        for state, step in zip(states, counts.tensors):
            state['step'] = step
        max_exp_avg_sqs = [s['max_exp_avg_sq'] for s in states] if group['amsgrad'] else []
        return _Bucket(group, params, [s['exp_avg'] for s in states], [s['exp_avg_sq'] for s in states],
                       max_exp_avg_sqs, counts.tensors, all(p.is_contiguous() for p in params), counts)
