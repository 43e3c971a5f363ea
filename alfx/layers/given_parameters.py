"""Modules whose parameters are given from outside, ``[n, D]`` for ``n`` of them at once.

Particles, what a hypernetwork generates and the members of a population are such parameters. What computes with them
are the stacks of :mod:`alfx.layers.sequential`: a stack of ``n`` modules, made once, reads views of the given tensor in
the place of parameters of its own, so gradients reach the tensor and nothing is copied beyond it. Read next:
:mod:`alfx.layers.param_layers`, and :mod:`alfx.networks.param_networks` for networks.
"""
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from alfx.layers.sequential import copy_module, make_parallel_net

_Place = tuple[nn.Module, str]
_Stack = tuple[Any, list[tuple[tuple[int, ...], list[_Place]]]]


class GivenParameters:
    """``n`` modules like a given one, computed with parameters ``theta [n, D]``.

    A row of ``theta`` holds the parameters of one module, in the order of ``module.parameters()``, each flattened.

    Args:
        module: a layer or a network; only its kind and its shapes are used, and its initial distribution.
        where: begins messages.

    Raises:
        ValueError: it has no parameters; some of them are shared; it has batch norm, whose statistics would be mixed up
            between different parameters.
    """

    def __init__(self, module: nn.Module, where: str):
        self._module, self._where = module, where
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            raise ValueError(f'{where}: batch norm keeps statistics of the parameters that it is used with, and these '
                             'change with every call; use layer norm')
        self._shapes = [tuple(p.shape) for p in module.parameters()]
        if not self._shapes:
            raise ValueError(f'{where}: expected a network with parameters, found one without')
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._stacks: dict[int, _Stack] = {}

    @property
    def module(self) -> nn.Module:
        """The module that was given."""
        return self._module

    @property
    def param_length(self) -> int:
        """``D``, the number of parameters of one module."""
        return sum(self._sizes)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters of one module."""
        return list(self._shapes)

    def check(self, theta: torch.Tensor) -> None:
        """Raise ``ValueError`` if ``theta`` is not ``[n, D]`` or ``[D]``."""
        if theta.ndim not in (1, 2) or theta.shape[-1] != self.param_length or not theta.shape[0]:
            raise ValueError(f'{self._where}: expected parameters [n, {self.param_length}] or [{self.param_length}], '
                             f'found {list(theta.shape)}')

    def stack(self, theta: torch.Tensor, training: bool = True) -> Callable[..., Any]:
        """The stack of ``n`` modules, which computes with ``theta [n, D]`` until the next call for the same ``n``.

        Args:
            theta: the parameters.
            training: the mode in which it computes.

        Raises:
            ValueError: ``theta`` is not ``[n, D]``.
        """
        if theta.ndim != 2:
            raise ValueError(f'{self._where}: expected parameters [n, {self.param_length}], found {list(theta.shape)}')
        self.check(theta)
        n = theta.shape[0]
        self.prepare(n)
        stack, slots = self._stacks[n]
        if getattr(stack, 'training', training) != training:
            stack.train(training)
        # One split: its gradient is one concatenation, where that of slices would be a tensor of zeros for each.
        for columns, (shape, places) in zip(theta.split(self._sizes, dim=1), slots):
            tensors = columns.unbind(0) if len(places) > 1 else (columns, )
            for (module, name), values in zip(places, tensors, strict=True):
                module.__dict__[name] = values.reshape(shape)
        return stack

    def prepare(self, n: int) -> None:
        """Make the stack of ``n`` modules now, and not when it is first wanted."""
        if n not in self._stacks:
            self._stacks[n] = self._make_stack(n)

    def release(self) -> None:
        """Forget the parameters that were given, and with them the graph that made them."""
        for _, slots in self._stacks.values():
            for _, places in slots:
                for module, name in places:
                    module.__dict__[name] = None

    def initial_parameters(self, n: int) -> torch.Tensor:
        """``[n, D]``: initial parameters of ``n`` new modules."""
        rows = [self.parameters_of(copy_module(self._module)) for _ in range(n)]
        if rows[0].numel() != self.param_length:
            raise self._shared_error()
        return torch.stack(rows)

    def parameters_of(self, module: nn.Module) -> torch.Tensor:
        """``[D]``: the parameters of a module like the one given."""
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    def with_parameters(self, theta: torch.Tensor) -> Any:
        """A module of its own like the one given, which has the parameters ``theta [D]``."""
        if theta.ndim != 1:
            raise ValueError(f'{self._where}: expected parameters [{self.param_length}], found {list(theta.shape)}')
        self.check(theta)
        module = copy_module(self._module)
        with torch.no_grad():
            for parameter, values in zip(module.parameters(), theta.split(self._sizes)):
                parameter.copy_(values.view_as(parameter))
        return module

    def _make_stack(self, n: int) -> _Stack:
        device = next(self._module.parameters()).device
        # Its own initial parameters are never used: drawing them must not move the generators, or a run that goes on
        # from a checkpoint, and makes its stacks anew, would draw other numbers than one that did not stop.
        with torch.random.fork_rng([device] if device.type == 'cuda' else []):
            stack: Any = make_parallel_net(self._module, n)
        slots = _slots(stack)
        places = [place for slot in slots for place in slot]
        if len(slots) != len(self._sizes) or len(set(places)) != len(places):
            raise self._shared_error()
        shapes = [tuple(getattr(*slot[0]).shape) for slot in slots]
        for module, name in places:
            del module._parameters[name]
            module.__dict__[name] = None
        return stack, list(zip(shapes, slots))

    def _shared_error(self) -> ValueError:
        return ValueError(f'{self._where}: parameters of {type(self._module).__name__} are shared between networks or '
                          'between parts of it, so that they cannot be given for each of several')


def _slots(stack: nn.Module) -> list[list[_Place]]:
    """Where a stack keeps its parameters, in the order of those of a single module.

    One place for a tensor that holds all ``n``, ``n`` places where copies are called one after the other.
    """
    copies = getattr(stack, 'copies', None)
    if copies is not None:
        each = [_places(copy) for copy in copies if isinstance(copy, nn.Module)]
        return [list(places) for places in zip(*each, strict=True)]
    own: list[list[_Place]] = [[(stack, name)] for name, p in stack._parameters.items() if p is not None]
    return own + [slot for child in stack.children() for slot in _slots(child)]


def _places(module: nn.Module) -> list[_Place]:
    return [(m, name) for m in module.modules() for name, p in m._parameters.items() if p is not None]
