"""Networks made of networks, layers and functions, which carry the states of their parts."""
from collections.abc import Callable
from typing import Any

from alfx import nest
from alfx.layers import make_parallel_input, make_parallel_net, make_parallel_spec
from alfx.layers.activations import out_of_place
from alfx.layers.sequential import branches
from alfx.layers.steps import Results, Step, add_child, parse_steps, register_steps
from alfx.networks.network import Network, get_input_tensor_spec, is_stacked, wrap_as_network
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec


def _state_spec_of(module: Any) -> NestedTensorSpec:
    return module.state_spec if isinstance(module, Network) else ()


def _combined_state_spec(specs: Nested) -> NestedTensorSpec:
    """The nest of the state specs of the parts, or ``()`` if no part has memory."""
    return specs if nest.flatten(specs) else ()


def _known_input_spec(input_tensor_spec: NestedTensorSpec | None, module: Any, name: str) -> NestedTensorSpec:
    spec = get_input_tensor_spec(module) if input_tensor_spec is None else input_tensor_spec
    if spec is None:
        raise ValueError(f'{name}: input_tensor_spec is needed, as {module!r} does not know the spec of its input')
    return spec


class Sequential(Network):
    """Networks, layers and functions one after the other.

    ``Sequential(FC(4, 8), a=LSTMCell(8, 8), b=(('input', 'a'), NestConcat()), output=('a', 'b'))``: see
    :mod:`alfx.layers.steps` for how results are named. The state is a tuple with the state of each element, ``()``
    for those without memory.

    Args:
        modules: networks, layers, functions or ``(names, module)`` pairs.
        output: a nest of names of results, which becomes the output; ``''`` for the last one.
        input_tensor_spec: spec of the input; ``None`` if the first element knows it.
        name: name of the network.
        named_modules: further elements, whose results get their names.

    Raises:
        ValueError: a name that does not exist, an element that is no module, or the input spec is not known.
    """

    def __init__(self, *modules: Any, output: Nested = '', input_tensor_spec: NestedTensorSpec | None = None,
                 name: str = 'Sequential', **named_modules: Any):
        steps = parse_steps(modules, named_modules, output, name)
        if input_tensor_spec is None and steps[0].inputs is not None:
            raise ValueError(f'{name}: input_tensor_spec is needed, as the first element selects from the input')
        state_spec = _combined_state_spec(tuple(_state_spec_of(step.module) for step in steps))
        super().__init__(_known_input_spec(input_tensor_spec, steps[0].module, name), state_spec, name)
        self._output = output
        self._has_state = state_spec != ()
        self._is_chain = output == '' and all(step.inputs is None for step in steps)
        self._steps = [(step, isinstance(step.module, Network)) for step in steps]
        register_steps(self, steps)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """A nest of ``[B, ...]`` to the output of the last element, or the nest ``output`` of results."""
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
        """See the base class."""
        return ParallelSequential(self, n, 'parallel_' + self._name)

    def __getitem__(self, i: int) -> Callable[..., Any]:
        """The module at position ``i``."""
        return self._steps[i][0].module

    def __len__(self) -> int:
        return len(self._steps)


def _parallel_elements(steps: list[Step], n: int) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position and by name for a chain of ``n`` of each module of ``steps``."""
    modules, named = [], {}
    for step in steps:
        module: Any = make_parallel_net(step.module, n)
        element = module if step.inputs is None else (step.inputs, module)
        if step.name:
            named[step.name] = element
        else:
            modules.append(element)
    return modules, named


class ParallelSequential(Sequential):
    """``n`` chains like a given one, each element stacked.

    Args:
        network: the chain.
        n: number of chains.
        name: name of the network.
    """

    def __init__(self, network: Sequential, n: int, name: str = 'ParallelSequential'):
        modules, named = _parallel_elements([step for step, _ in network._steps], n)
        super().__init__(*modules, output=network._output, input_tensor_spec=network.input_tensor_spec, name=name,
                         **named)
        self._parallelism = n

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Nests of ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, ...]``."""
        if not is_stacked(inputs, self._input_tensor_spec):
            inputs = make_parallel_input(inputs, self._parallelism)
        return super().forward(inputs, state)

    def make_parallel(self, n: int) -> Network:
        """Not available: raises ``ValueError``."""
        raise ValueError(f'{self._name} is a stack of networks already')


class Parallel(Network):
    """A nest of modules, each for the corresponding part of the input.

    The output is the nest of their outputs, the state that of their states.

    Args:
        modules: nest of networks, layers or functions.
        input_tensor_spec: nest of specs, of which the structure of ``modules`` is a prefix; ``None`` if all
            modules know theirs.
        name: name of the network.

    Raises:
        ValueError: ``modules`` and ``input_tensor_spec`` have different structures, or a spec is not known.
    """

    def __init__(self, modules: Nested, input_tensor_spec: NestedTensorSpec | None = None, name: str = 'Parallel'):
        if input_tensor_spec is None:
            networks = nest.map_structure(lambda m: wrap_as_network(m, None), modules)
            input_tensor_spec = nest.map_structure(get_input_tensor_spec, networks)
        else:
            networks = nest.map_structure_up_to(modules, wrap_as_network, modules, input_tensor_spec)
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

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """A nest of ``[B, ...]`` to the nest of outputs."""
        return _run_nest(self._nets, nest.flatten_up_to(self._nets, inputs), state, self._has_state)

    def make_parallel(self, n: int) -> Network:
        """See the base class."""
        return StackedParallel(self, n, 'parallel_' + self._name)


class StackedParallel(Parallel):
    """``n`` of each network of a :class:`Parallel`.

    Args:
        network: the networks to stack.
        n: number of each.
        name: name of the network.
    """

    def __init__(self, network: Parallel, n: int, name: str = 'StackedParallel'):
        nets = nest.map_structure(lambda net: net.make_parallel(n), network.networks)
        super().__init__(nets, network.input_tensor_spec, name)
        self._parallelism = n


def _run_nest(networks: Nested, inputs: list[Any], state: NestedTensor, has_state: bool) -> tuple[Any, NestedTensor]:
    """Call each network of a nest with its own input."""
    nets = nest.flatten(networks)
    states = nest.flatten_up_to(networks, state) if has_state else [()] * len(nets)
    results = [net(x, s) for net, x, s in zip(nets, inputs, states)]
    output = nest.pack_sequence_as(networks, [result[0] for result in results])
    return output, nest.pack_sequence_as(networks, [result[1] for result in results]) if has_state else state


class Branch(Network):
    """Several networks, layers or functions on the same input.

    The output is the nest of their outputs, the state that of their states.

    Args:
        modules: by position, or one nest of them.
        input_tensor_spec: nest of specs of the input; ``None`` if the first module knows it.
        name: name of the network.
        named_modules: the same for a dict.

    Raises:
        ValueError: modules by position and by name, or none; or the spec is not known.
    """

    def __init__(self, *modules: Nested, input_tensor_spec: NestedTensorSpec | None = None, name: str = 'Branch',
                 **named_modules: Any):
        parts = nest.map_structure(out_of_place, branches(modules, named_modules, name))
        flat = nest.flatten(parts)
        known = [spec for spec in map(get_input_tensor_spec, flat) if spec is not None]
        if input_tensor_spec is None and not known:
            raise ValueError(f'{name}: input_tensor_spec is needed, as no module knows the spec of its input')
        spec = known[0] if input_tensor_spec is None else input_tensor_spec
        networks = nest.map_structure(lambda m: wrap_as_network(m, spec), parts)
        state_spec = _combined_state_spec(nest.map_structure(lambda net: net.state_spec, networks))
        super().__init__(spec, state_spec, name)
        self._has_state = state_spec != ()
        self._nets = networks
        for path, net in nest.flatten_with_path(networks):
            add_child(self, path, net)

    @property
    def networks(self) -> Nested:
        """The nest of networks."""
        return self._nets

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """A nest of ``[B, ...]`` to the nest of outputs."""
        return _run_nest(self._nets, [inputs] * len(nest.flatten(self._nets)), state, self._has_state)

    def make_parallel(self, n: int) -> Network:
        """See the base class."""
        return StackedBranch(self, n, 'parallel_' + self._name)


class StackedBranch(Branch):
    """``n`` of each network of a :class:`Branch`.

    Args:
        network: the networks to stack.
        n: number of each.
        name: name of the network.
    """

    def __init__(self, network: Branch, n: int, name: str = 'StackedBranch'):
        nets = nest.map_structure(lambda net: net.make_parallel(n), network.networks)
        super().__init__(nets, input_tensor_spec=network.input_tensor_spec, name=name)
        self._parallelism = n


class Echo(Network):
    """A network which gets part of its own previous output as part of its input.

    ``block`` takes a dict ``{'input': ..., 'echo': ...}`` and returns a dict ``{'output': ..., 'echo': ...}``. Its
    'echo' becomes the 'echo' of its next input; at first it is zeros. The state is
    ``{'block': state of the block, 'echo': ...}``.

    Args:
        block: the network or module.
        input_tensor_spec: spec of the input of ``block``, a dict with 'input' and 'echo'; ``None`` if it knows it.

    Raises:
        ValueError: the input or the output of ``block`` is no such dict, or its two echos have different specs.
    """

    def __init__(self, block: Any, input_tensor_spec: NestedTensorSpec | None = None):
        net = wrap_as_network(block, input_tensor_spec)
        spec = net.input_tensor_spec
        if not isinstance(spec, dict) or set(spec) != {'input', 'echo'}:
            raise ValueError(f"Echo: the block must take a dict with 'input' and 'echo', its input spec is {spec}")
        output = net.output_spec
        if not isinstance(output, dict) or set(output) != {'output', 'echo'}:
            raise ValueError(f"Echo: the block must return a dict with 'output' and 'echo', its output is {output}")
        wanted, found = ([(s.shape, s.dtype) for s in nest.flatten(x['echo'])] for x in (spec, output))
        if nest.structure(spec['echo']) != nest.structure(output['echo']) or wanted != found:
            raise ValueError(f"Echo: the block takes the echo {spec['echo']} and returns {output['echo']}")
        super().__init__(spec['input'], {'block': net.state_spec, 'echo': spec['echo']}, 'Echo')
        self._block = net

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """A nest of ``[B, ...]`` to the 'output' of the block."""
        result, block_state = self._block({'input': inputs, 'echo': state['echo']}, state['block'])
        return result['output'], {'block': block_state, 'echo': result['echo']}

    def make_parallel(self, n: int) -> Network:
        """See the base class."""
        return ParallelEcho(self, n)


class ParallelEcho(Network):
    """``n`` networks with an echo, stacked.

    Args:
        echo: the network with an echo.
        n: number of networks.
    """

    def __init__(self, echo: Echo, n: int):
        block = echo._block.make_parallel(n)
        state_spec = {'block': block.state_spec, 'echo': make_parallel_spec(echo.state_spec['echo'], n)}
        super().__init__(echo.input_tensor_spec, state_spec, 'parallel_Echo')
        self._block = block
        self._parallelism = n

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Nests of ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, ...]``."""
        if not is_stacked(inputs, self._input_tensor_spec):
            inputs = make_parallel_input(inputs, self._parallelism)
        result, block_state = self._block({'input': inputs, 'echo': state['echo']}, state['block'])
        return result['output'], {'block': block_state, 'echo': result['echo']}
