"""The update of an algorithm as one compiled graph: losses, targets, gradients, clipping, the optimizer's step.

What one update computes is recorded once, operation by operation, with everything that changes between updates
(parameters, buffers, the optimizer's state, the batch, learning rates) as inputs; ``torch.compile``'s backend turns the
record into one function. Only algorithms whose update is the same operations every time take part in this: they say so
by ``Algorithm.has_fixed_update``.
"""
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alfx import context, gin_utils, nest
from alfx.data_structures import BatchInfo, Experience, LossInfo
from alfx.engine.update import NonFiniteLossError, reduce_loss, valid_masks
from alfx.gin_utils.checks import problem_at
from alfx.optimizers.functional_adam import AdamState, adam_step, check_optimizer
from alfx.tensor_specs import NestedTensor
from alfx.utils.schedulers import disallow_scheduler

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm

logger = logging.getLogger(__name__)

TrainInfo = Callable[['Algorithm', Experience], NestedTensor]


class CompiledUpdate:
    """Compiled updates of one algorithm, one for each variant of its update and each shape of a batch.

    Args:
        algorithm: trains; its optimizers are ``Adam`` or ``AdamW``.
        compute_train_info: the infos ``[T, B, ...]`` that its ``calc_loss`` gets for an experience ``[T, B, ...]``.

    Raises:
        ConfError: the algorithm or an optimizer cannot be compiled.
    """

    def __init__(self, algorithm: 'Algorithm', compute_train_info: TrainInfo) -> None:
        check_compilable(algorithm)
        self._algorithm = algorithm
        self._optimizers, named = algorithm.what_is_updated()
        self._params = [p for _, p in named]
        self._states: list[AdamState] = [AdamState(optimizer) for optimizer in self._optimizers]
        self._losses = _Losses(algorithm, compute_train_info)
        self._tensors = {name: tensor for name, tensor in (*self._losses.named_parameters(),
                                                           *self._losses.named_buffers())}
        self._names = list(self._tensors)
        ids = {id(tensor): i for i, tensor in enumerate(self._tensors.values())}
        self._trained = [ids[id(p)] for p in self._params]
        self._graphs: dict[Any, Callable[..., list[Tensor]]] = {}

    def __call__(self, experience: Experience, batch_info: BatchInfo | None) -> LossInfo:
        """One update.

        Args:
            experience: ``[T, B, ...]``.
            batch_info: where the batch came from; its importance weights apply.

        Returns:
            ``loss``: a scalar; ``priority``: ``[B]`` or ``()``.

        Raises:
            NonFiniteLossError: the loss is not finite; no parameter has been changed.
        """
        weights = batch_info.importance_weights if batch_info is not None else ()
        leaves, tree = nest.flatten_with_structure((experience, weights))
        leaves = [x.contiguous() for x in leaves]  # a graph is made for one layout in memory
        key = self._algorithm.update_variant, tree, tuple((x.shape, x.dtype) for x in leaves)
        if not all(state.is_current for state in self._states):
            self._states = [AdamState(optimizer) for optimizer in self._optimizers]
        rates = [rate for state in self._states for rate in state.learning_rates()]
        state = [x for adam in self._states for x in adam.tensors]
        inputs = [*self._tensors.values(), *state, *rates, *leaves]
        inputs = [x.detach() for x in inputs]
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._compile(inputs, len(state), len(rates), tree)
        with torch.no_grad():
            loss, *priority = graph(*inputs)
        if not torch.isfinite(loss):
            raise NonFiniteLossError(f'the loss of {self._algorithm.name} is NaN or infinite at update '
                                     f'{context.get_global_counter()}; the parameters are those before this update. '
                                     'Run with TrainerConfig.compile = False to see which part of the loss it is')
        return LossInfo(loss=loss, priority=priority[0] if priority else ())

    def _compile(self, inputs: list[Tensor], num_state: int, num_rates: int, tree: Any) -> Callable[..., list[Tensor]]:
        """Record an update on copies of ``inputs``, then compile the record."""
        from torch._inductor import config as inductor_config
        from torch._inductor.compile_fx import compile_fx
        from torch.fx.experimental.proxy_tensor import make_fx

        def update(*flat: Tensor) -> list[Tensor]:
            return self._update(list(flat), num_state, num_rates, tree)

        started = time.monotonic()
        logger.info('compiling the update of %s; this takes some seconds, once', self._algorithm.name)
        with torch.random.fork_rng(), disallow_scheduler(), context.record_if(False):
            graph = make_fx(update)(*(x.clone() for x in inputs))
        self._check_constants(graph)
        # the same random numbers as without compiling, from the generator that a checkpoint saves
        with inductor_config.patch(fallback_random=True):
            compiled: Any = compile_fx(graph, inputs)
        with torch.random.fork_rng(), torch.no_grad():
            compiled(*(x.clone() for x in inputs))  # the backend does its work at the first call
        logger.info('compiled in %.0f seconds', time.monotonic() - started)
        return compiled

    def _check_constants(self, graph: Any) -> None:
        """A parameter that the record holds as a constant would never be seen to change."""
        mine = {tensor.data_ptr() for tensor in self._tensors.values() if tensor.numel()}
        for node in graph.graph.nodes:
            if node.op == 'get_attr':
                value = getattr(graph, node.target)
                assert not (isinstance(value, Tensor) and value.numel() and value.data_ptr() in mine), (
                    f'{self._algorithm.name} reaches a parameter of shape {tuple(value.shape)} past its modules')

    def _update(self, flat: list[Tensor], num_state: int, num_rates: int, tree: Any) -> list[Tensor]:
        """What is recorded: ``flat`` are all inputs, of which parameters and states are changed in place."""
        count = len(self._names)
        tensors, state = flat[:count], flat[count:count + num_state]
        rates, leaves = flat[count + num_state:count + num_state + num_rates], flat[count + num_state + num_rates:]
        experience, weights = tree.unflatten(leaves)
        params = [tensors[i] for i in self._trained]
        with torch.enable_grad():
            tracked = [p.detach().requires_grad_() for p in params]
            named = dict(zip(self._names, tensors))
            named.update((self._names[i], p) for i, p in zip(self._trained, tracked))
            loss_info: LossInfo = torch.func.functional_call(self._losses, named, (experience, ))
            total = reduce_loss(loss_info, valid_masks(experience.time_step.step_type), 1.0, weights)
            grads = torch.autograd.grad(total, tracked, allow_unused=True)
        total = total.detach()
        is_good = torch.isfinite(total)
        for adam in self._states:
            adam_step(adam, params[:len(adam.params)], grads[:len(adam.params)], state[:len(adam.tensors)],
                      rates[:adam.num_groups], is_good)
            params, grads = params[len(adam.params):], grads[len(adam.params):]
            state, rates = state[len(adam.tensors):], rates[adam.num_groups:]
        priority = loss_info.priority
        return [total, priority.detach()] if isinstance(priority, Tensor) else [total]


def check_compilable(algorithm: 'Algorithm') -> None:
    """Refuse what cannot be compiled, before anything is trained.

    Raises:
        ConfError: the algorithm's update is not the same operations every time, or an optimizer is not Adam or AdamW.
    """
    if not algorithm.has_fixed_update:
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'compile', f'= True is not possible with {algorithm.name}: its update is not the same '
            'operations every time', 'leave it at False')])
    for optimizer in algorithm.optimizers():
        check_optimizer(optimizer)


class _Losses(nn.Module):
    """From experience to losses, as a module whose parameters can be exchanged for a call."""

    def __init__(self, algorithm: 'Algorithm', compute_train_info: TrainInfo) -> None:
        super().__init__()
        self.algorithm = algorithm
        self._compute_train_info = compute_train_info

    def forward(self, experience: Experience) -> LossInfo:
        """``[T, B, ...]`` to the losses ``[T, B]``."""
        return self.algorithm.calc_loss(self._compute_train_info(self.algorithm, experience))
