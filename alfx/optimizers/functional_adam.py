"""Adam on tensors that are handed in, from operations that can be recorded and compiled.

The state is that of the optimizer itself, which may go on from it.
"""
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import gin_utils
from alfx.gin_utils.checks import problem_at
from alfx.optimizers.clipping import clip_divisor
from alfx.optimizers.fused import FusedAdamBase
from alfx.optimizers.optimizers import Adam, AdamW


class _Bucket(NamedTuple):
    """The parameters of one group, of one device and type, and where their state is."""

    group: int
    params: list[int]
    blocks: list[int]
    exp_avgs: list[int]
    exp_avg_sqs: list[int]
    max_exp_avg_sqs: list[int]


class AdamState:
    """The parameters and the state of an optimizer, in a fixed order.

    Attributes:
        optimizer: whose state it is.
        params: its parameters, in the order of its groups.
        tensors: counts of steps and moments.
        buckets: which of them belong together.
    """

    def __init__(self, optimizer: FusedAdamBase) -> None:
        self.optimizer = optimizer
        self.params: list[Tensor] = [p for group in optimizer.param_groups for p in group['params']]
        self.tensors: list[Tensor] = []
        self.buckets: list[_Bucket] = []
        self._rates = [torch.zeros(()) for _ in optimizer.param_groups]
        index = {id(p): i for i, p in enumerate(self.params)}
        group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group['params']}
        self._source = optimizer.buckets()
        for bucket in self._source:
            assert bucket.step_block is not None
            self.buckets.append(_Bucket(group_of[id(bucket.params[0])], [index[id(p)] for p in bucket.params],
                                        self._keep([bucket.step_block]), self._keep(bucket.exp_avgs),
                                        self._keep(bucket.exp_avg_sqs), self._keep(bucket.max_exp_avg_sqs)))

    def _keep(self, tensors: Sequence[Tensor]) -> list[int]:
        first = len(self.tensors)
        self.tensors.extend(tensors)
        return list(range(first, len(self.tensors)))

    @property
    def is_current(self) -> bool:
        """Whether the optimizer still keeps its state in these tensors; loading a checkpoint makes others."""
        return self.optimizer.buckets() is self._source

    @property
    def num_groups(self) -> int:
        """How many learning rates there are."""
        return len(self._rates)

    def learning_rates(self) -> list[Tensor]:
        """The learning rates of the groups now, one scalar each, always the same tensors."""
        self.optimizer.ask_schedules()
        for rate, group in zip(self._rates, self.optimizer.param_groups):
            rate.fill_(group['lr'])
        return self._rates


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer whose step is not that of :func:`adam_step`.

    Raises:
        ConfError: it is not Adam or AdamW.
    """
    if type(optimizer) not in (Adam, AdamW):
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'compile', f'= True needs Adam or AdamW, found {type(optimizer).__name__}',
            'use one of these, or leave it at False')])


def adam_step(adam: AdamState, params: Sequence[Tensor], grads: Sequence[Tensor | None], state: Sequence[Tensor],
              learning_rates: Sequence[Tensor], is_good: Tensor) -> None:
    """Change ``params`` and ``state`` in place as one step of Adam does (see ``Adam`` and ``AdamW``).

    Args:
        adam: what belongs to what.
        params: like ``adam.params``.
        grads: a gradient or None for each.
        state: like ``adam.tensors``.
        learning_rates: a scalar for each group.
        is_good: bool scalar; where it is false nothing is changed.
    """
    grads = _clipped(adam.optimizer, grads)
    for bucket in adam.buckets:
        group = adam.optimizer.param_groups[bucket.group]
        beta1, beta2 = group['betas']
        has_grad = torch.tensor([grads[i] is not None for i in bucket.params], device=params[bucket.params[0]].device)
        block = state[bucket.blocks[0]]
        block.add_(is_good.logical_and(has_grad).to(block.dtype))
        correction1, root_correction2 = 1 - beta1**block, (1 - beta2**block).sqrt()
        sizes = learning_rates[bucket.group] / correction1
        for k, i in enumerate(bucket.params):
            param, grad = params[i], grads[i]
            if grad is None:
                continue
            if group['weight_decay'] and not adam.optimizer.decouples_weight_decay:
                grad = grad + group['weight_decay'] * param
            average, square = state[bucket.exp_avgs[k]], state[bucket.exp_avg_sqs[k]]
            new_average = average + (1 - beta1) * (grad - average)
            new_square = beta2 * square + (1 - beta2) * grad * grad
            largest = new_square
            if group['amsgrad']:
                largest = torch.maximum(state[bucket.max_exp_avg_sqs[k]], new_square)
                state[bucket.max_exp_avg_sqs[k]].copy_(torch.where(is_good, largest,
                                                                   state[bucket.max_exp_avg_sqs[k]]))
            kept = param
            if group['weight_decay'] and adam.optimizer.decouples_weight_decay:
                kept = param * (1 - learning_rates[bucket.group] * group['weight_decay'])
            new_param = kept - sizes[k] * new_average / (largest.sqrt() / root_correction2[k] + group['eps'])
            param.copy_(torch.where(is_good, new_param, param))
            average.copy_(torch.where(is_good, new_average, average))
            square.copy_(torch.where(is_good, new_square, square))


def _clipped(optimizer: FusedAdamBase, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients as the optimizer clips them."""
    largest = optimizer.gradient_clipping
    if largest is None:
        return list(grads)
    norms = [None if grad is None else torch.linalg.vector_norm(grad) for grad in grads]
    if not optimizer.clip_by_global_norm:
        return [None if grad is None or norm is None else grad / clip_divisor(norm, largest)
                for grad, norm in zip(grads, norms)]
    total = torch.linalg.vector_norm(torch.stack([norm for norm in norms if norm is not None]))
    divisor = clip_divisor(total, largest)
    return [None if grad is None else grad / divisor for grad in grads]
