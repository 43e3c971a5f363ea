"""Layers composed of layers, and stacks of ``n`` copies of a layer."""
import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from alfx import nest
from alfx.layers.activations import is_elementwise, out_of_place
from alfx.layers.steps import Results, Step, add_child, parse_steps, register_steps
from alfx.tensor_specs import BoundedTensorSpec, Nested, NestedTensor, NestedTensorSpec, TensorSpec


def reset_parameters(module: nn.Module) -> None:
    """Draw new initial values for all parameters of ``module``.

    Raises:
        ValueError: a module inside it owns parameters but has no ``reset_parameters()``; the message names it.
    """
    reset = getattr(module, 'reset_parameters', None)
    if callable(reset):
        reset()
        return
    own = list(module._parameters)
    if own:
        raise ValueError(f'cannot reset the parameters {own} of {type(module).__name__}: it has no reset_parameters()')
    _reset_children(module)


def copy_module(module: Any) -> Any:
    """Copy a module and give the copy new parameters.

    A module with a method ``copy`` (a network) copies itself; a function is returned as it is.

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
    """Map ``[B, ...]`` to ``[B, n, ...]`` by repeating the input ``n`` times (views, no copies)."""
    return nest.map_structure(lambda x: x.unsqueeze(1).expand(-1, n, *x.shape[1:]), inputs)


def make_parallel_spec(specs: NestedTensorSpec, n: int) -> NestedTensorSpec:
    """Map specs of shape ``[...]`` to specs of shape ``[n, ...]``."""

    def stacked(spec: TensorSpec) -> TensorSpec:
        if isinstance(spec, BoundedTensorSpec):
            return spec.replace(shape=(n, *spec.shape), minimum=_aligned(spec.minimum), maximum=_aligned(spec.maximum))
        return spec.replace(shape=(n, *spec.shape))

    def _aligned(bound: Any) -> Any:
        return bound if bound.ndim == 0 else bound[None]

    return nest.map_structure(stacked, specs)


def make_parallel_net(module: Callable[..., Any], n: int) -> Callable[..., Any]:
    """Create a module that maps ``[B, n, ...]`` like ``n`` separate modules of the kind of ``module``.

    A module with a method ``make_parallel`` decides how, unless its class is defined outside of alfx and only overrides
    ``forward``. An elementwise activation is its own parallel version. Anything else becomes a
    :class:`NaiveParallelLayer`.
    """
    make_parallel = getattr(module, 'make_parallel', None)
    if callable(make_parallel) and not overrides_forward_of_a_stackable(type(module)):
        return make_parallel(n)
    return module if is_elementwise(module) else NaiveParallelLayer(module, n)


def keep_shared(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``function`` with one result for each module, so that a module that is used twice stays shared."""
    results: dict[int, Any] = {}

    def call(module: Any) -> Any:
        if id(module) not in results:
            results[id(module)] = function(module)
        return results[id(module)]

    return call


def parallel_elements(steps: Sequence[Step], n: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments, by position and by name, of a chain of ``n`` of each module of ``steps``."""
    modules, named = [], {}
    stacked = keep_shared(lambda module: make_parallel_net(module, n))
    for step in steps:
        module: Any = stacked(step.module)
        element = module if step.inputs is None else (step.inputs, module)
        if step.name:
            named[step.name] = element
        else:
            modules.append(element)
    return modules, named


def overrides_forward_of_a_stackable(cls: type) -> bool:
    """Return whether ``cls``, from outside alfx, overrides ``forward`` but inherits ``make_parallel`` from alfx.

    The inherited method would create a stack that computes the ``forward`` of the base class.
    """
    names = ['make_parallel', 'forward']
    first = next((name for base in cls.__mro__ for name in names if name in vars(base)), None)
    return first == 'forward' and hasattr(cls, 'make_parallel') and not cls.__module__.startswith('alfx.')


def stacked_activation(activation: Callable[..., Any], n: int) -> Callable[..., Any]:
    """Return an activation for ``[B, n, ...]``: ``n`` copies if it has parameters or counts dimensions."""
    if isinstance(activation, nn.Module):
        dim = getattr(activation, 'dim', None)
        has_parameters = next(activation.parameters(), None) is not None
        is_separate = has_parameters or not isinstance(dim, int) or dim >= 0
    else:
        is_separate = isinstance(activation, partial) and activation.keywords.get('dim', -1) >= 0
    return NaiveParallelLayer(activation, n) if is_separate and not is_elementwise(activation) else out_of_place(
        activation)


def first_layers(stack: Callable[..., Any], k: int) -> Callable[..., Any] | None:
    """Return the first ``k`` of the ``n`` modules in a stack of :func:`make_parallel_net`, with shared parameters.

    A module with a method ``first_layers`` decides how.

    Returns:
        A callable for inputs ``[B, k, ...]`` or inputs shared by all modules; ``None`` if the first modules cannot be
        computed separately.
    """
    own = getattr(stack, 'first_layers', None)
    if callable(own):
        return own(k)
    return stack if is_elementwise(stack) else None


class NaiveParallelLayer(nn.Module):
    """Stack of ``n`` copies of a layer that are called one after the other.

    Args:
        module: a module, which is copied ``n`` times with new parameters, or a function.
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
        """Map a nest of ``[B, n, ...]`` to a nest of ``[B, n, ...]``."""
        if isinstance(inputs, torch.Tensor):
            outputs = [layer(x) for layer, x in zip(self._layers, inputs.unbind(1))]
        else:
            outputs = [layer(nest.map_structure(lambda x: x[:, i], inputs))  # noqa: B023 - called immediately
                       for i, layer in enumerate(self._layers)]
        return nest.stack(outputs, dim=1)

    def reset_parameters(self) -> None:
        """Draw new initial values for all copies."""
        _reset_children(self)


def _reset_children(module: nn.Module) -> None:
    for child in module.children():
        reset_parameters(child)


class Branch(nn.Module):
    """Several modules applied to the same input.

    Args:
        modules: modules or functions, or one nest of them.
        named_modules: modules of a dict, by key.

    Raises:
        ValueError: modules are given both by position and by name, or not at all.
    """

    def __init__(self, *modules: Nested, **named_modules: Any):
        super().__init__()
        self._nest = nest.map_structure(out_of_place, branches(modules, named_modules, 'Branch'))
        for path, module in nest.flatten_with_path(self._nest):
            if isinstance(module, nn.Module):
                add_child(self, path, module)

    def forward(self, inputs: NestedTensor) -> Nested:
        """Return the nest of the results of all modules."""
        return nest.map_structure(lambda module: module(inputs), self._nest)

    def reset_parameters(self) -> None:
        """Draw new initial values for all modules."""
        _reset_children(self)

    def make_parallel(self, n: int) -> 'Branch':
        """Create the layer for ``n`` of each module."""
        return Branch(nest.map_structure(keep_shared(lambda m: make_parallel_net(m, n)), self._nest))


def branches(modules: tuple[Any, ...], named_modules: dict[str, Any], where: str) -> Nested:
    """Return the nest of modules described by the arguments of a ``Branch``."""
    if bool(modules) == bool(named_modules):
        raise ValueError(f'{where}: expected modules either by position or by name')
    if named_modules:
        return dict(named_modules)
    return modules[0] if len(modules) == 1 else tuple(modules)


class Sequential(nn.Module):
    """Modules called one after the other; :mod:`alfx.layers.steps` explains the names of results.

    ``Sequential(FC(4, 8), a=FC(8, 8), b=(('input', 'a'), NestConcat()), output=('a', 'b'))``

    Args:
        modules: modules, functions or ``(names, module)`` pairs.
        output: nest of names of results to return; ``''`` returns the last result.
        named_modules: further elements with named results.

    Raises:
        ValueError: a name does not exist, or an element is not a module.
    """

    def __init__(self, *modules: Any, output: Nested = '', **named_modules: Any):
        super().__init__()
        self._steps = parse_steps(modules, named_modules, output, 'Sequential')
        self._output = output
        self._is_chain = output == '' and all(step.inputs is None for step in self._steps)
        register_steps(self, self._steps)

    def forward(self, inputs: Nested) -> Nested:
        """Return the result of the last module, or the nest ``output`` of results."""
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
        """Create the layer for ``n`` of each module."""
        modules, named = parallel_elements(self._steps, n)
        return Sequential(*modules, output=self._output, **named)

    def __getitem__(self, i: int) -> Callable[..., Any]:
        """Return the module at position ``i``."""
        return self._steps[i].module

    def __len__(self) -> int:
        return len(self._steps)
