"""Networks composed of networks, layers and functions; they combine the states of their parts."""
from collections.abc import Callable
from typing import Any

from alfx import nest
from alfx.layers import make_parallel_input, make_parallel_spec, out_of_place
from alfx.layers.sequential import branches, keep_shared, parallel_elements
from alfx.layers.steps import Results, add_child, parse_steps, register_steps
from alfx.networks.network import Network, get_input_tensor_spec, is_stacked, known_input_spec, wrap_as_network
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec


def _combined_state_spec(specs: Nested) -> NestedTensorSpec:
    """Return the nest of the state specs of the parts, or ``()`` if no part is recurrent."""
    return specs if nest.flatten(specs) else ()


class Sequential(Network):
    """Networks, layers and functions called one after the other.

    Example: ``Sequential(FC(4, 8), a=LSTMCell(8, 8), b=(('input', 'a'), NestConcat()), output=('a', 'b'))``.
    :mod:`alfx.layers.steps` explains the names of results. The state is a tuple with the state of each element, ``()``
    for elements without state.

    Args:
        modules: networks, layers, functions or ``(names, module)`` pairs.
        output: nest of names of results to return; ``''`` returns the last result.
        input_tensor_spec: spec of the input; ``None`` if the first element defines it.
        name: name of the network.
        named_modules: further elements with named results.

    Raises:
        ValueError: a name does not exist, an element is not a module, or the input spec is unknown.
    """

    def __init__(self, *modules: Any, output: Nested = '', input_tensor_spec: NestedTensorSpec | None = None,
                 name: str = 'Sequential', **named_modules: Any):
        steps = parse_steps(modules, named_modules, output, name)
        if input_tensor_spec is None and steps[0].inputs is not None:
            raise ValueError(f'{name}: input_tensor_spec is required, because the first element selects from the input')
        elements = [step.module for step in steps]
        state_spec = _combined_state_spec(tuple(x.state_spec if isinstance(x, Network) else () for x in elements))
        super().__init__(known_input_spec(input_tensor_spec, steps[0].module, f'{name}: '), state_spec, name)
        self._output = output
        self._has_state = state_spec != ()
        self._is_chain = output == '' and all(step.inputs is None for step in steps)
        self._steps = [(step, isinstance(step.module, Network)) for step in steps]
        register_steps(self, steps)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of ``[B, ...]`` to the output of the last element, or to the nest ``output`` of results."""
        if self._is_chain and not self._has_state:
            for step, is_network in self._steps:
                inputs = step.module(inputs)[0] if is_network else step.module(inputs)
            return inputs, state
        results, new_states = Results(inputs), []
        for i, (step, is_network) in enumerate(self._steps):
            selected, new_state = results.select(step.inputs), ()
            if is_network:
                value, new_state = step.module(selected, state[i] if self._has_state else ())
            else:
                value = step.module(selected)
            results.add(step.name, value)
            new_states.append(new_state)
        return results.select(self._output), tuple(new_states) if self._has_state else state

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return ParallelSequential(self, n, 'parallel_' + self._name)

    def __getitem__(self, i: int) -> Callable[..., Any]:
        """Return the module at position ``i``."""
        return self._steps[i][0].module

    def __len__(self) -> int:
        return len(self._steps)


class ParallelSequential(Sequential):
    """Stack of ``n`` chains; each element is stacked.

    Args:
        network: chain to stack.
        n: number of chains.
        name: name of the network.
    """

    def __init__(self, network: Sequential, n: int, name: str = 'ParallelSequential'):
        modules, named = parallel_elements([step for step, _ in network._steps], n)
        super().__init__(*modules, output=network._output, input_tensor_spec=network.input_tensor_spec, name=name,
                         **named)
        self._parallelism = n

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map nests of ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, ...]``."""
        if not is_stacked(inputs, self._input_tensor_spec):
            inputs = make_parallel_input(inputs, self._parallelism)
        return super().forward(inputs, state)

    def make_parallel(self, n: int) -> Network:
        """Raise ``ValueError``: a stack of networks cannot be stacked again."""
        raise ValueError(f'{self._name} is already a stack of networks')


class _Networks(Network):
    """Nest of networks; the output is the nest of outputs, the state the nest of states."""

    def __init__(self, networks: Nested, input_tensor_spec: NestedTensorSpec, name: str):
        state_spec = _combined_state_spec(nest.map_structure(lambda net: net.state_spec, networks))
        super().__init__(input_tensor_spec, state_spec, name)
        self._has_state = state_spec != ()
        self._nets = networks
        for path, net in nest.flatten_with_path(networks):
            add_child(self, path, net)

    @property
    def networks(self) -> Nested:
        """The nest of networks."""
        return self._nets

    def _run(self, inputs: list[Any], state: NestedTensor) -> tuple[Any, NestedTensor]:
        """Call each network with its input."""
        networks = self._nets
        nets = nest.flatten(networks)
        states = nest.flatten_up_to(networks, state) if self._has_state else [()] * len(nets)
        results = [net(x, s) for net, x, s in zip(nets, inputs, states)]
        output = nest.pack_sequence_as(networks, [result[0] for result in results])
        if self._has_state:
            state = nest.pack_sequence_as(networks, [result[1] for result in results])
        return output, state


class Parallel(_Networks):
    """Nest of modules, each called with its part of the input.

    The output is the nest of outputs, the state the nest of states.

    Args:
        modules: nest of networks, layers or functions.
        input_tensor_spec: nest of specs; the structure of ``modules`` must be a prefix of it. ``None`` if all modules
            define their input specs.
        name: name of the network.

    Raises:
        ValueError: ``modules`` and ``input_tensor_spec`` have different structures, or a spec is unknown.
    """

    def __init__(self, modules: Nested, input_tensor_spec: NestedTensorSpec | None = None, name: str = 'Parallel'):
        if input_tensor_spec is None:
            networks = nest.map_structure(keep_shared(lambda m: wrap_as_network(m, None)), modules)
            input_tensor_spec = nest.map_structure(get_input_tensor_spec, networks)
        else:
            wrapped: dict[tuple[int, str], Network] = {}  # one network for a module that is used twice
            networks = nest.map_structure_up_to(modules, lambda m, spec: wrapped.setdefault(
                (id(m), str(spec)), wrap_as_network(m, spec)), modules, input_tensor_spec)
        super().__init__(networks, input_tensor_spec, name)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of ``[B, ...]`` to the nest of outputs."""
        return self._run(nest.flatten_up_to(self._nets, inputs), state)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return StackedParallel(self, n, 'parallel_' + self._name)


class StackedParallel(Parallel):
    """Stack of ``n`` of each network of a :class:`Parallel`.

    Args:
        network: networks to stack.
        n: number of copies of each.
        name: name of the network.
    """

    def __init__(self, network: Parallel, n: int, name: str = 'StackedParallel'):
        nets = nest.map_structure(keep_shared(lambda net: net.make_parallel(n)), network.networks)
        super().__init__(nets, network.input_tensor_spec, name)
        self._parallelism = n


class Branch(_Networks):
    """Several networks, layers or functions called with the same input.

    The output is the nest of outputs, the state the nest of states.

    Args:
        modules: modules by position, or one nest of them.
        input_tensor_spec: nest of specs of the input; ``None`` if a module defines it.
        name: name of the network.
        named_modules: modules of a dict, by key.

    Raises:
        ValueError: modules are given both by position and by name, or not at all; or the input spec is unknown.
    """

    def __init__(self, *modules: Nested, input_tensor_spec: NestedTensorSpec | None = None, name: str = 'Branch',
                 **named_modules: Any):
        parts = nest.map_structure(out_of_place, branches(modules, named_modules, name))
        flat = nest.flatten(parts)
        known = [spec for spec in map(get_input_tensor_spec, flat) if spec is not None]
        if input_tensor_spec is None and not known:
            raise ValueError(f'{name}: input_tensor_spec is required, because no module defines its input spec')
        spec = known[0] if input_tensor_spec is None else input_tensor_spec
        super().__init__(nest.map_structure(keep_shared(lambda m: wrap_as_network(m, spec)), parts), spec, name)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of ``[B, ...]`` to the nest of outputs."""
        return self._run([inputs] * len(nest.flatten(self._nets)), state)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return StackedBranch(self, n, 'parallel_' + self._name)


class StackedBranch(Branch):
    """Stack of ``n`` of each network of a :class:`Branch`.

    Args:
        network: networks to stack.
        n: number of copies of each.
        name: name of the network.
    """

    def __init__(self, network: Branch, n: int, name: str = 'StackedBranch'):
        nets = nest.map_structure(keep_shared(lambda net: net.make_parallel(n)), network.networks)
        super().__init__(nets, input_tensor_spec=network.input_tensor_spec, name=name)
        self._parallelism = n


class Echo(Network):
    """Network that receives part of its previous output as part of its input.

    ``block`` maps a dict ``{'input': ..., 'echo': ...}`` to a dict ``{'output': ..., 'echo': ...}``. Its output 'echo'
    is the input 'echo' of the next step; the first one is zeros. The state is
    ``{'block': state of the block, 'echo': ...}``.

    Args:
        block: network or module.
        input_tensor_spec: spec of the input of ``block``, a dict with 'input' and 'echo'; ``None`` if the block defines
            it.

    Raises:
        ValueError: input or output of ``block`` is not such a dict, or the two echoes have different specs.
    """

    def __init__(self, block: Any, input_tensor_spec: NestedTensorSpec | None = None):
        net = wrap_as_network(block, input_tensor_spec)
        spec = net.input_tensor_spec
        if not isinstance(spec, dict) or set(spec) != {'input', 'echo'}:
            raise ValueError(f"Echo: the block must take a dict with 'input' and 'echo', found the input spec {spec}")
        output = net.output_spec
        if not isinstance(output, dict) or set(output) != {'output', 'echo'}:
            raise ValueError(f"Echo: the block must return a dict with 'output' and 'echo', found the output {output}")
        wanted, found = ([(s.shape, s.dtype) for s in nest.flatten(x['echo'])] for x in (spec, output))
        if nest.structure(spec['echo']) != nest.structure(output['echo']) or wanted != found:
            raise ValueError(f"Echo: the block takes the echo {spec['echo']} but returns {output['echo']}")
        super().__init__(spec['input'], {'block': net.state_spec, 'echo': spec['echo']}, 'Echo')
        self._block = net

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of ``[B, ...]`` to the 'output' of the block."""
        result, block_state = self._block({'input': inputs, 'echo': state['echo']}, state['block'])
        return result['output'], {'block': block_state, 'echo': result['echo']}

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return ParallelEcho(self, n)


class ParallelEcho(Network):
    """Stack of ``n`` networks with an echo.

    Args:
        echo: network to stack.
        n: number of networks.
    """

    def __init__(self, echo: Echo, n: int):
        block = echo._block.make_parallel(n)
        state_spec = {'block': block.state_spec, 'echo': make_parallel_spec(echo.state_spec['echo'], n)}
        super().__init__(echo.input_tensor_spec, state_spec, 'parallel_Echo')
        self._block = block
        self._parallelism = n

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map nests of ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, ...]``."""
        if not is_stacked(inputs, self._input_tensor_spec):
            inputs = make_parallel_input(inputs, self._parallelism)
        result, block_state = self._block({'input': inputs, 'echo': state['echo']}, state['block'])
        return result['output'], {'block': block_state, 'echo': result['echo']}
