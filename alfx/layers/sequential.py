"""Layers made of layers, and stacking ``n`` copies of any layer."""
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from alfx import nest
from alfx.layers.activations import is_elementwise, out_of_place
from alfx.layers.steps import Results, add_child, parse_steps, register_steps
from alfx.tensor_specs import BoundedTensorSpec, Nested, NestedTensor, NestedTensorSpec, TensorSpec


def reset_parameters(module: nn.Module) -> None:
    """Draw new initial values for all parameters of ``module``.

    Raises:
        ValueError: a module inside it owns parameters and has no ``reset_parameters()``; names it.
    """
    reset = getattr(module, 'reset_parameters', None)
    if callable(reset):
        reset()
        return
    own = list(module._parameters)
    if own:
        raise ValueError(f'cannot reset the parameters {own} of {type(module).__name__}: it has no reset_parameters()')
    for child in module.children():
        reset_parameters(child)


def copy_module(module: Any) -> Any:
    """A copy of a module with new parameters.

    What has a method ``copy`` (a network) decides itself; a function is its own copy.

    Raises:
        ValueError: see :func:`reset_parameters`.
    """
    if not isinstance(module, nn.Module):
        return module
    if callable(getattr(module, 'copy', None)):
        return module.copy()  # type: ignore[operator]
    new = copy.deepcopy(module)
    for old_parameter, new_parameter in zip(module.parameters(), new.parameters()):
        if hasattr(old_parameter, 'opt_args'):
            new_parameter.opt_args = old_parameter.opt_args  # type: ignore[attr-defined]
    reset_parameters(new)
    return new


def make_parallel_input(inputs: NestedTensor, n: int) -> NestedTensor:
    """``[B, ...]`` to ``[B, n, ...]``, the same for each of the ``n`` (views, no copies)."""
    return nest.map_structure(lambda x: x.unsqueeze(1).expand(-1, n, *x.shape[1:]), inputs)


def make_parallel_spec(specs: NestedTensorSpec, n: int) -> NestedTensorSpec:
    """Specs of shape ``[...]`` to specs of shape ``[n, ...]``."""

    def stacked(spec: TensorSpec) -> TensorSpec:
        if isinstance(spec, BoundedTensorSpec):
            return spec.replace(shape=(n, *spec.shape), minimum=_aligned(spec.minimum), maximum=_aligned(spec.maximum))
        return spec.replace(shape=(n, *spec.shape))

    def _aligned(bound: Any) -> Any:
        return bound if bound.ndim == 0 else bound[None]

    return nest.map_structure(stacked, specs)


def make_parallel_net(module: Callable[..., Any], n: int) -> Callable[..., Any]:
    """What does to ``[B, n, ...]`` what ``n`` modules like ``module``, each with its own parameters, do.

    A module with a method ``make_parallel`` decides itself; elementwise activations are their own parallel
    version; anything else becomes a :class:`NaiveParallelLayer`.
    """
    make_parallel = getattr(module, 'make_parallel', None)
    if callable(make_parallel):
        return make_parallel(n)
    return module if is_elementwise(module) else NaiveParallelLayer(module, n)


def first_layers(stack: Callable[..., Any], k: int) -> Callable[..., Any] | None:
    """The first ``k`` of the ``n`` modules that :func:`make_parallel_net` made one of, on the parameters of the stack.

    A module with a method ``first_layers`` decides itself.

    Returns:
        what does to ``[B, k, ...]``, or to what all share, what ``stack`` does; ``None`` where the first ones cannot
        be computed alone, or nobody knows how.
    """
    own = getattr(stack, 'first_layers', None)
    if callable(own):
        return own(k)
    return stack if is_elementwise(stack) else None


class NaiveParallelLayer(nn.Module):
    """``n`` copies of a layer, called one after the other.

    Args:
        module: a module, copied ``n`` times with new parameters each, or a function.
        n: number of copies.
    """

    def __init__(self, module: Callable[..., Any], n: int):
        super().__init__()
        module = out_of_place(module)
        self._layers = [copy_module(module) for _ in range(n)]
        for i, layer in enumerate(self._layers):
            if isinstance(layer, nn.Module):
                self.add_module(str(i), layer)

    @property
    def copies(self) -> list[Any]:
        """The ``n`` copies."""
        return list(self._layers)

    def forward(self, inputs: NestedTensor) -> NestedTensor:
        """A nest of ``[B, n, ...]`` to a nest of ``[B, n, ...]``."""
        if isinstance(inputs, torch.Tensor):
            outputs = [layer(x) for layer, x in zip(self._layers, inputs.unbind(1))]
        else:
            outputs = [layer(nest.map_structure(lambda x: x[:, i], inputs))  # noqa: B023 - used at once
                       for i, layer in enumerate(self._layers)]
        return nest.stack(outputs, dim=1)

    def reset_parameters(self) -> None:
        """Draw new initial values for all copies."""
        _reset_children(self)


def _reset_children(module: nn.Module) -> None:
    for child in module.children():
        reset_parameters(child)


class Branch(nn.Module):
    """Several modules on the same input.

    Args:
        modules: modules or functions, or one nest of them.
        named_modules: the same for a dict.

    Raises:
        ValueError: modules are given by position and by name, or not at all.
    """

    def __init__(self, *modules: Nested, **named_modules: Any):
        super().__init__()
        self._nest = nest.map_structure(out_of_place, branches(modules, named_modules, 'Branch'))
        for path, module in nest.flatten_with_path(self._nest):
            if isinstance(module, nn.Module):
                add_child(self, path, module)

    def forward(self, inputs: NestedTensor) -> Nested:
        """The nest of the results of all modules."""
        return nest.map_structure(lambda module: module(inputs), self._nest)

    def reset_parameters(self) -> None:
        """Draw new initial values for all modules."""
        _reset_children(self)

    def make_parallel(self, n: int) -> 'Branch':
        """The layer for ``n`` of each module."""
        return Branch(nest.map_structure(lambda m: make_parallel_net(m, n), self._nest))


def branches(modules: tuple[Any, ...], named_modules: dict[str, Any], where: str) -> Nested:
    """The nest of modules that the arguments of a ``Branch`` mean."""
    if bool(modules) == bool(named_modules):
        raise ValueError(f'{where}: expected modules either by position or by name')
    if named_modules:
        return dict(named_modules)
    return modules[0] if len(modules) == 1 else tuple(modules)


class Sequential(nn.Module):
    """Modules one after the other; see :mod:`alfx.layers.steps` for how results are named.

    ``Sequential(FC(4, 8), a=FC(8, 8), b=(('input', 'a'), NestConcat()), output=('a', 'b'))``

    Args:
        modules: modules, functions or ``(names, module)`` pairs.
        output: a nest of names of results, which becomes the result; ``''`` for the last one.
        named_modules: further elements, whose results get their names.

    Raises:
        ValueError: a name that does not exist, or an element that is no module.
    """

    def __init__(self, *modules: Any, output: Nested = '', **named_modules: Any):
        super().__init__()
        self._steps = parse_steps(modules, named_modules, output, 'Sequential')
        self._output = output
        self._is_chain = output == '' and all(step.inputs is None for step in self._steps)
        register_steps(self, self._steps)

    def forward(self, inputs: Nested) -> Nested:
        """The result of the last module, or the nest ``output`` of results."""
        if self._is_chain:
            for step in self._steps:
                inputs = step.module(inputs)
            return inputs
        results = Results(inputs)
        for step in self._steps:
            results.add(step.name, step.module(results.select(step.inputs)))
        return results.select(self._output)

    def reset_parameters(self) -> None:
        """Draw new initial values for all modules."""
        _reset_children(self)

    def make_parallel(self, n: int) -> 'Sequential':
        """The layer for ``n`` of each module."""
        modules, named = [], {}
        for step in self._steps:
            module: Any = make_parallel_net(step.module, n)
            element = module if step.inputs is None else (step.inputs, module)
            if step.name:
                named[step.name] = element
            else:
                modules.append(element)
        return Sequential(*modules, output=self._output, **named)

    def __getitem__(self, i: int) -> Callable[..., Any]:
        """The module at position ``i``."""
        return self._steps[i].module

    def __len__(self) -> int:
        return len(self._steps)
