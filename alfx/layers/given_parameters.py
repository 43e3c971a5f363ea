"""Modules that compute with parameters given from outside, ``[n, D]`` for ``n`` modules at once.

Particles, the outputs of a hypernetwork and the members of a population are such parameters. The stacks of
:mod:`alfx.layers.sequential` compute with them: a stack of ``n`` modules is created once and reads views of the given
tensor instead of parameters, so gradients reach the tensor and nothing else is copied. Read next:
:mod:`alfx.layers.param_layers`, and :mod:`alfx.networks.param_networks` for networks.
"""
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from alfx.layers.sequential import copy_module, make_parallel_net
from alfx.norm_layers import is_batch_norm

_Attribute = tuple[nn.Module, str]
_Stack = tuple[Any, list[tuple[tuple[int, ...], list[_Attribute]]]]


class GivenParameters:
    """Stack of ``n`` modules that computes with the parameters ``theta [n, D]``.

    A row of ``theta`` holds the flattened parameters of one module, in the order of ``module.parameters()``.

    Args:
        module: template, a layer or a network; its structure and the distribution of its initial values are used.
        where: prefix of error messages.

    Raises:
        ValueError: the module has no parameters, shares parameters, or has batch norm, whose statistics would mix
            different parameters.
    """

    def __init__(self, module: nn.Module, where: str):
        self.module, self._where = module, where
        if any(is_batch_norm(m) for m in module.modules()):
            raise ValueError(f'{where}: batch norm keeps statistics for one set of parameters, but the parameters '
                             'change with every call; use layer norm')
        self._shapes = [tuple(p.shape) for p in module.parameters()]
        if not self._shapes:
            raise ValueError(f'{where}: expected a network with parameters, found one without')
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._stacks: dict[int, _Stack] = {}

    @property
    def param_length(self) -> int:
        """Number of parameters of one module, ``D``."""
        return sum(self._sizes)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters of one module."""
        return list(self._shapes)

    def check(self, theta: torch.Tensor) -> None:
        """Raise ``ValueError`` if ``theta`` is not ``[n, D]`` or ``[D]``."""
        if theta.ndim not in (1, 2) or theta.shape[-1] != self.param_length or not theta.shape[0]:
            raise ValueError(f'{self._where}: expected parameters [n, {self.param_length}] or [{self.param_length}], '
                             f'found {list(theta.shape)}')

    def stack(self, theta: torch.Tensor, training: bool = True) -> Callable[..., Any]:
        """Return the stack of ``n`` modules, bound to ``theta [n, D]`` until the next call with the same ``n``.

        Args:
            theta: parameters.
            training: training mode of the stack.

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
        # A single split: its gradient is one concatenation, while slices would create a tensor of zeros each.
        for columns, (shape, attributes) in zip(theta.split(self._sizes, dim=1), slots):
            tensors = columns.unbind(0) if len(attributes) > 1 else (columns, )
            for (module, name), values in zip(attributes, tensors, strict=True):
                module.__dict__[name] = values.reshape(shape)
        return stack

    def prepare(self, n: int) -> None:
        """Create the stack of ``n`` modules now instead of on first use."""
        if n not in self._stacks:
            self._stacks[n] = self._make_stack(n)

    def release(self) -> None:
        """Drop the given parameters and the autograd graph behind them."""
        for _, slots in self._stacks.values():
            for _, attributes in slots:
                for module, name in attributes:
                    module.__dict__[name] = None

    def initial_parameters(self, n: int) -> torch.Tensor:
        """Return initial parameters ``[n, D]`` of ``n`` new modules."""
        rows = [self.parameters_of(copy_module(self.module)) for _ in range(n)]
        if rows[0].numel() != self.param_length:
            raise self._shared_error()
        return torch.stack(rows)

    def parameters_of(self, module: nn.Module) -> torch.Tensor:
        """Return the parameters ``[D]`` of a module like the template."""
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    def with_parameters(self, theta: torch.Tensor) -> Any:
        """Create a separate module like the template with the parameters ``theta [D]``."""
        if theta.ndim != 1:
            raise ValueError(f'{self._where}: expected parameters [{self.param_length}], found {list(theta.shape)}')
        self.check(theta)
        module = copy_module(self.module)
        with torch.no_grad():
            for parameter, values in zip(module.parameters(), theta.split(self._sizes)):
                parameter.copy_(values.view_as(parameter))
        return module

    def _make_stack(self, n: int) -> _Stack:
        device = next(self.module.parameters()).device
        # The initial parameters of the stack are never used. Drawing them must not advance the random generators: a
        # resumed run creates its stacks again and would otherwise draw other numbers than an uninterrupted run.
        with torch.random.fork_rng([device] if device.type == 'cuda' else []):
            stack: Any = make_parallel_net(self.module, n)
        slots = _slots(stack)
        attributes = [attribute for slot in slots for attribute in slot]
        if len(slots) != len(self._sizes) or len(set(attributes)) != len(attributes):
            raise self._shared_error()
        shapes = [tuple(getattr(*slot[0]).shape) for slot in slots]
        for module, name in attributes:
            del module._parameters[name]
            module.__dict__[name] = None
        return stack, list(zip(shapes, slots))

    def _shared_error(self) -> ValueError:
        return ValueError(f'{self._where}: {type(self.module).__name__} shares parameters between networks or '
                          'between its parts, so separate values cannot be given for each of several modules')


def _slots(stack: nn.Module) -> list[list[_Attribute]]:
    """Return the attributes in which a stack stores its parameters, in the order of the parameters of a single module.

    A tensor that holds all ``n`` is one attribute; copies that are called one after the other are ``n`` attributes.
    """
    copies = getattr(stack, 'copies', None)
    if copies is not None:
        each = [_attributes(copy) for copy in copies if isinstance(copy, nn.Module)]
        return [list(attributes) for attributes in zip(*each, strict=True)]
    own: list[list[_Attribute]] = [[(stack, name)] for name, p in stack._parameters.items() if p is not None]
    return own + [slot for child in stack.children() for slot in _slots(child)]


def _attributes(module: nn.Module) -> list[_Attribute]:
    return [(m, name) for m in module.modules() for name, p in m._parameters.items() if p is not None]
