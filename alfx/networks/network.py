"""Base class of networks, and conversion of modules to networks.

A network is called as ``output, state = network(inputs, state)`` with a nest of tensors ``[B, ...]`` that matches
``network.input_tensor_spec``; ``state`` matches ``network.state_spec``, which is ``()`` for a network without state. A
network can create a new network like itself (:meth:`Network.copy`) and a stack of ``n`` networks computed at once
(:meth:`Network.make_parallel`). Read next: :mod:`alfx.networks.encoding_networks`.
"""
import functools
import inspect
from collections.abc import Callable
from typing import Any

import gin
import torch
from torch import nn

from alfx import nest
from alfx.layers import FC, ParallelFC, copy_module, make_parallel_input, make_parallel_net, make_parallel_spec
from alfx.layers.activations import out_of_place
from alfx.layers.sequential import keep_shared, overrides_forward_of_a_stackable
from alfx.tensor_specs import (NestedTensor, NestedTensorSpec, SpecError, TensorSpec, check_consistent, extract_spec,
                               nearest_zeros)


class Network(nn.Module):
    """Base class of networks.

    A subclass defines ``forward(inputs, state=())``, which returns ``(output, state)`` and modifies neither argument.
    The arguments of its constructor are recorded, so :meth:`copy` works without code in the subclass.

    The first call is checked against the specs; later calls are checked only if they raise an error.

    Args:
        input_tensor_spec: nest of specs of the inputs.
        state_spec: nest of specs of the state; ``()`` for a network without state.
        name: name of the network, used in messages and summaries.
    """

    _parallelism: Any = None
    """Number of networks in a stack, else ``None``; the inputs of a stack are ``[B, ...]`` or ``[B, n, ...]``."""
    _batch_dims = 1

    def __init__(self, input_tensor_spec: NestedTensorSpec, state_spec: NestedTensorSpec = (), name: str = 'Network'):
        super().__init__()
        self._name = name
        self._input_tensor_spec = input_tensor_spec
        self._state_spec = state_spec
        self._output_spec: NestedTensorSpec = None
        self._singleton = False
        self._unchecked = True

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if '__init__' in cls.__dict__:
            cls.__init__ = _recording(cls.__init__)  # type: ignore[method-assign]
        if overrides_forward_of_a_stackable(cls):  # the stack of the base class would not call it
            cls.make_parallel = Network.make_parallel  # type: ignore[method-assign]

    def __call__(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Call :meth:`forward`.

        Raises:
            SpecError: the inputs or the state do not match their specs.
        """
        if self._unchecked and not (torch.is_autocast_enabled('cpu') or torch.is_autocast_enabled('cuda')):
            self._check_call(inputs, state)  # not in autocast, where inner networks get inputs of lower precision
            self._unchecked = False
        try:
            return super().__call__(inputs, state)
        except (RuntimeError, TypeError, IndexError, AttributeError):
            self._check_call(inputs, state)
            raise

    def _check_call(self, inputs: NestedTensor, state: NestedTensor) -> None:
        from_dim, spec = self._batch_dims, self._input_tensor_spec
        if spec is None:
            raise SpecError(f'{self._name}: it was constructed without input_tensor_spec, which works only for '
                            'input_preprocessors; pass input_tensor_spec')
        _check_tensors(inputs, f'{self._name}: input')
        n = self._parallelism
        if n is not None and nest.structure(inputs) == nest.structure(spec):
            spec = nest.map_structure(lambda s, x: make_parallel_spec(s, n) if is_stacked(x, s) else s, spec, inputs)
        _check_batch(inputs, spec, from_dim, f'{self._name}: input')
        if nest.flatten(self.state_spec) and not nest.flatten(state):
            raise SpecError(f'{self._name}: this network is recurrent and was called without a state; start with zeros '
                            'of its state_spec, then pass the state that it returned')
        if nest.flatten(state):
            _check_tensors(state, f'{self._name}: state')
            _check_batch(state, self.state_spec, 1, f'{self._name}: state')

    @property
    def name(self) -> str:
        """Name of the network."""
        return self._name

    @property
    def input_tensor_spec(self) -> NestedTensorSpec:
        """Nest of specs of the inputs."""
        return self._input_tensor_spec

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs of the state; ``()`` without state."""
        return self._state_spec

    @property
    def is_rnn(self) -> bool:
        """Return whether the network is recurrent."""
        spec = self.state_spec
        return spec != () and bool(nest.flatten(spec))

    @property
    def output_spec(self) -> NestedTensorSpec:
        """Nest of specs of the output; a distribution in it holds specs instead of its parameters.

        It is computed on first use by one call with zeros, which does not affect random generators, gradients or
        statistics.
        """
        if self._output_spec is None:
            try:
                self._output_spec = self._probe_output_spec()
            except AttributeError as error:  # a property would turn it into 'no attribute output_spec'
                raise RuntimeError(f'{self._name}: computing the spec of its output failed: {error}') from error
        return self._output_spec

    @property
    def is_distribution_output(self) -> bool:
        """Return whether the output contains distributions."""
        return any(nest.is_distribution(x) for x in nest.flatten(self.output_spec, is_leaf=nest.is_distribution))

    def _probe_output_spec(self) -> NestedTensorSpec:
        device = next((p.device for p in self.parameters()), torch.device('cpu'))
        inputs = example_batch(self._input_tensor_spec, (2, ) * self._batch_dims, device)
        state = example_batch(self.state_spec, (2, ), device)
        unchecked, training = self._unchecked, [m for m in self.modules() if m.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == 'cuda' else []):
                output, _ = self(inputs, state)
        finally:
            for module in training:
                module.training = True
            self._unchecked = unchecked
        return extract_spec(output, from_dim=self._batch_dims)

    @property
    def saved_args(self) -> dict[str, Any]:
        """Arguments that the network was constructed with, including defaults."""
        arguments = dict(self._bound_arguments().arguments)
        arguments.pop('self', None)
        for parameter in inspect.signature(type(self).__init__).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(parameter.name, {}))
        return arguments

    def _bound_arguments(self) -> inspect.BoundArguments:
        args, kwargs, _ = self.__dict__['_constructor_args']
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return bound

    def singleton(self, singleton: bool = True) -> 'Network':
        """Choose whether :meth:`copy` returns the network itself.

        Networks that are copied and input preprocessors that are stacked share the parameters of a singleton.

        Returns:
            The network itself.
        """
        self._singleton = singleton
        return self

    def copy(self, **kwargs: Any) -> 'Network':
        """Create a network with the same arguments and new initial parameters.

        Networks and modules among the arguments are copied in the same way. A singleton is returned, not copied.

        Args:
            kwargs: arguments to change.

        Raises:
            TypeError: an argument does not exist.
            ValueError: a module among the arguments has parameters but no ``reset_parameters()``.
        """
        if self._singleton:
            return self
        bound = self._bound_arguments()
        parameters = inspect.signature(type(self).__init__).parameters
        copied = keep_shared(copy_module)
        for name, value in bound.arguments.items():
            if name != 'self' and name not in kwargs:
                bound.arguments[name] = _copied_argument(value, copied)
        extra = {name: value for name, value in kwargs.items() if name not in parameters}
        bound.arguments.update((name, value) for name, value in kwargs.items() if name in parameters)
        with gin.config_scope(self.__dict__['_constructor_args'][2]):
            return type(self)(*bound.args[1:], **{**bound.kwargs, **extra})

    def make_parallel(self, n: int) -> 'Network':
        """Create a stack of ``n`` networks like this one, with separate initial parameters.

        The inputs of the stack are ``[B, ...]``, shared by all, or ``[B, n, ...]``; its outputs and states are
        ``[B, n, ...]``. Its ``input_tensor_spec`` is the spec of a single network.
        """
        return NaiveParallelNetwork(self, n)

    def first_of_stack(self, inputs: NestedTensor, state: NestedTensor, k: int) -> tuple[Any, NestedTensor]:
        """Compute the outputs of the first ``k`` networks of this stack of ``n``.

        The other networks are not computed if the stack supports that; recurrent networks and batch norm do not.

        Args:
            inputs: nest of ``[B, ...]`` or ``[B, n, ...]``.
            state: state of the whole stack, ``[B, n, ...]``.
            k: number from 1 to ``n``.

        Returns:
            The output ``[B, k, ...]``, and the next state of the whole stack.

        Raises:
            SpecError: the inputs or the state do not match their specs.
        """
        first = self._first_networks(k) if k != self._parallelism else None
        if first is None:
            output, state = self(inputs, state)
            return nest.map_structure(lambda x: x[:, :k], output), state
        if self._unchecked:
            self._check_call(inputs, state)
        try:
            return first(nest.map_structure(lambda x, spec: x[:, :k] if is_stacked(x, spec) else x, inputs,
                                            self._input_tensor_spec)), state
        except (RuntimeError, TypeError, IndexError, AttributeError):
            self._check_call(inputs, state)
            raise

    def _first_networks(self, k: int) -> Callable[[NestedTensor], Any] | None:
        """Return a function from inputs ``[B, ...]`` or ``[B, k, ...]`` to the outputs of the first ``k`` networks.

        ``None`` if they cannot be computed separately, or the stack is recurrent. The function reads the parameters
        from the layers of the stack when it is called.
        """
        return None


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``init`` to record the arguments of the outermost constructor and the gin scope of the call."""

    @functools.wraps(init)
    def recording(self: Network, *args: Any, **kwargs: Any) -> None:
        if '_constructor_args' not in self.__dict__:
            self.__dict__['_constructor_args'] = args, kwargs, gin.current_scope()
        init(self, *args, **kwargs)

    return recording


def _copied_argument(value: Any, copied: Callable[[Any], Any]) -> Any:
    if isinstance(value, nn.Module):
        return copied(value)
    if isinstance(value, (list, tuple, dict)) and any(isinstance(x, nn.Module) for x in nest.flatten(value)):
        return nest.map_structure(copied, value)
    return value


def _check_tensors(nested: NestedTensor, where: str) -> None:
    for path, leaf in nest.flatten_with_path(nested):
        if not isinstance(leaf, torch.Tensor):
            raise SpecError(f"{where}{'.' + path if path else ''}: expected a tensor, found {type(leaf).__name__}")


def _check_batch(nested: NestedTensor, spec: NestedTensorSpec, from_dim: int, where: str) -> None:
    """Check tensors ``[B, ...]`` against ``spec``."""
    check_consistent(nested, spec, from_dim, where)
    outer = {tuple(leaf.shape[:from_dim]) for leaf in nest.flatten(nested)}
    if len(outer) > 1 or any(len(shape) < from_dim for shape in outer):
        raise SpecError(f'{where}: expected {from_dim} batch dimension(s), the same for all tensors, found '
                        f'{sorted(outer)}')


def example_batch(spec: NestedTensorSpec, outer_dims: tuple[int, ...],
                  device: torch.device = torch.device('cpu')) -> NestedTensor:
    """Return a nest of tensors ``[*outer_dims, ...]`` within the bounds of ``spec``, as close to zeros as possible."""
    return nest.map_structure(lambda leaf: leaf.to(device), nearest_zeros(spec, outer_dims))


def is_stacked(inputs: NestedTensor, spec: NestedTensorSpec) -> bool:
    """Return whether ``inputs`` are ``[B, n, ...]`` instead of ``[B, ...]``, for specs of shape ``[...]``."""
    if isinstance(inputs, torch.Tensor) and isinstance(spec, TensorSpec):
        return inputs.ndim == spec.ndim + 2
    leaves, specs = nest.flatten(inputs), nest.flatten(spec)
    return bool(leaves) and bool(specs) and leaves[0].ndim == specs[0].ndim + 2


class NaiveParallelNetwork(Network):
    """Stack of ``n`` copies of a network that are called one after the other.

    Args:
        network: network to copy; the copies get separate parameters.
        n: number of copies.
        name: name of the network; ``None`` is ``'naive_parallel_'`` and the name of ``network``.
    """

    def __init__(self, network: Network, n: int, name: str | None = None):
        super().__init__(network.input_tensor_spec, make_parallel_spec(network.state_spec, n),
                         name or 'naive_parallel_' + network.name)
        self._parallelism = n
        self._networks = nn.ModuleList([network.copy() for _ in range(n)])

    @property
    def copies(self) -> list[Any]:
        """The ``n`` copies."""
        return list(self._networks)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map nests of ``[B, ...]`` or ``[B, n, ...]`` to outputs and states ``[B, n, ...]``."""
        stacked = is_stacked(inputs, self._input_tensor_spec)
        outputs, states = [], []
        for i, network in enumerate(self._networks):
            own_inputs = _select(inputs, i) if stacked else inputs
            output, new_state = network(own_inputs, _select(state, i))
            outputs.append(output)
            states.append(new_state)
        return nest.stack(outputs, dim=1), nest.stack(states, dim=1) if self.is_rnn else state


def _select(nested: NestedTensor, i: int) -> NestedTensor:
    return nest.map_structure(lambda x: x[:, i], nested)


class NetworkWrapper(Network):
    """Module or function as a network.

    Args:
        module: called with the inputs, or with the inputs and the state if there is one.
        input_tensor_spec: nest of specs of the inputs.
        state_spec: nest of specs of the state; unless it is ``()``, ``module`` must return ``(output, state)``.
        name: name of the network.
    """

    def __init__(self, module: Callable[..., Any], input_tensor_spec: NestedTensorSpec,
                 state_spec: NestedTensorSpec = (), name: str = 'NetworkWrapper'):
        super().__init__(input_tensor_spec, state_spec, name)
        self._module = out_of_place(module)
        self._has_state = bool(nest.flatten(state_spec))

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Call the module."""
        return self._module(inputs, state) if self._has_state else (self._module(inputs), state)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        if self._has_state:
            return NaiveParallelNetwork(self, n)
        return ParallelNetworkWrapper(make_parallel_net(self._module, n), self._input_tensor_spec, n,
                                      'parallel_' + self._name)


class ParallelNetworkWrapper(Network):
    """Module for ``n`` stacked inputs as a network.

    Args:
        module: called with inputs ``[B, n, ...]``.
        input_tensor_spec: nest of specs of one input.
        n: number of inputs.
        name: name of the network.
    """

    def __init__(self, module: Callable[..., Any], input_tensor_spec: NestedTensorSpec, n: int,
                 name: str = 'ParallelNetworkWrapper'):
        super().__init__(input_tensor_spec, (), name)
        self._module = module
        self._parallelism = n

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map nests of ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, ...]``."""
        if not is_stacked(inputs, self._input_tensor_spec):
            inputs = make_parallel_input(inputs, self._parallelism)
        return self._module(inputs), state


def get_input_tensor_spec(net: Any) -> NestedTensorSpec | None:
    """Return the input spec of a network, or of a layer with a known input size; ``None`` for others."""
    if isinstance(net, Network):
        return net.input_tensor_spec
    if isinstance(net, (FC, ParallelFC)):
        return TensorSpec((net.input_size, ))
    if isinstance(net, nn.Linear):
        return TensorSpec((net.in_features, ))
    return get_input_tensor_spec(net[0]) if isinstance(net, nn.Sequential) and len(net) > 0 else None


def known_input_spec(input_tensor_spec: NestedTensorSpec | None, module: Any, where: str = '') -> NestedTensorSpec:
    """Return ``input_tensor_spec``, or if it is ``None`` the input spec of ``module``.

    Raises:
        ValueError: both are unknown; the message begins with ``where``.
    """
    spec = get_input_tensor_spec(module) if input_tensor_spec is None else input_tensor_spec
    if spec is None:
        raise ValueError(f'{where}input_tensor_spec is required, because {module!r} does not define its input spec')
    return spec


def wrap_as_network(net: Any, input_tensor_spec: NestedTensorSpec | None) -> Network:
    """Return ``net`` if it is a network, otherwise wrap it in a :class:`NetworkWrapper`.

    Args:
        net: network, module or function.
        input_tensor_spec: spec of its input; ``None`` if ``net`` defines it.

    Raises:
        ValueError: the spec is not given and ``net`` does not define it.
    """
    if isinstance(net, Network):
        return net
    return NetworkWrapper(net, known_input_spec(input_tensor_spec, net))


class BatchSquashNetwork(Network):
    """Network on inputs with several batch dimensions, which are flattened to one.

    Args:
        network: network without state.
        batch_dims: number of batch dimensions of inputs and outputs.
        name: name of the network.

    Raises:
        ValueError: ``network`` is recurrent.
    """

    def __init__(self, network: Network, batch_dims: int = 2, name: str = 'BatchSquashNetwork'):
        if network.is_rnn:
            raise ValueError(f'{name}: {network.name} is recurrent, so its batch dimensions cannot be flattened')
        super().__init__(network.input_tensor_spec, (), name)
        self._network = network
        self._batch_dims = batch_dims

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map nests of ``[B1, ..., Bk, ...]`` to ``[B1, ..., Bk, ...]``."""
        outer = nest.get_nest_shape(inputs)[:self._batch_dims]
        flat = nest.map_structure(lambda x: x.reshape(outer.numel(), *x.shape[self._batch_dims:]), inputs)
        output, _ = self._network(flat)
        return nest.map_structure(lambda x: x.reshape(*outer, *x.shape[1:]), output), state
