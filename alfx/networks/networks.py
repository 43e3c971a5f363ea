"""Small networks: recurrent cells, residual connections, delays and noise; see :mod:`alfx.networks.containers`."""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from alfx import context, nest
from alfx.gin_utils import Count, Fraction, NonNegative, configurable
from alfx.layers import FC, make_parallel_spec
from alfx.layers import weights as w
from alfx.networks.network import Network, wrap_as_network
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.math_ops import identity


class LSTMCell(Network):
    """One step of a long short-term memory (LSTM); the state is ``(h, c)`` and the output ``h``.

    Args:
        input_size: number of inputs.
        hidden_size: number of outputs.
        name: name of the network.
    """

    def __init__(self, input_size: int, hidden_size: int, name: str = 'LSTMCell'):
        hidden = TensorSpec((hidden_size, ))
        super().__init__(TensorSpec((input_size, )), (hidden, hidden), name)
        self._output_spec = hidden
        self._cell = nn.LSTMCell(input_size, hidden_size)

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``[B, input_size]`` to ``[B, hidden_size]``."""
        h, c = self._cell(inputs, state)
        return h, (h, c)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return StackedLSTMCell(self._cell.input_size, self._cell.hidden_size, n, 'parallel_' + self._name)


class StackedLSTMCell(Network):
    """Stack of ``n`` LSTM cells, computed by two batched products.

    The weights have the layout of ``torch.nn.LSTMCell`` with a first dimension ``n``.

    Args:
        input_size: number of inputs.
        hidden_size: number of outputs.
        n: number of cells.
        name: name of the network.
    """

    def __init__(self, input_size: int, hidden_size: int, n: int, name: str = 'StackedLSTMCell'):
        super().__init__(TensorSpec((input_size, )), make_parallel_spec((TensorSpec((hidden_size, )), ) * 2, n), name)
        self._parallelism = n
        self._hidden_size = hidden_size
        self.weight_ih = nn.Parameter(torch.empty(n, 4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(n, 4 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(n, 4 * hidden_size))
        self.bias_hh = nn.Parameter(torch.empty(n, 4 * hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial weights from the distribution of ``torch.nn.LSTMCell``."""
        bound = self._hidden_size**-0.5
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``[B, n, input_size]`` or ``[B, input_size]`` to ``[B, n, hidden_size]``."""
        h, c = state
        if inputs.ndim == 2:
            inputs = inputs.unsqueeze(1).expand(-1, self._parallelism, -1)
        gates = torch.baddbmm((self.bias_ih + self.bias_hh).unsqueeze(1), inputs.transpose(0, 1),
                              self.weight_ih.transpose(1, 2))
        gates = torch.baddbmm(gates, h.transpose(0, 1), self.weight_hh.transpose(1, 2)).transpose(0, 1)
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


class GRUCell(Network):
    """One step of a gated recurrent unit (GRU); the state is the output.

    Args:
        input_size: number of inputs.
        hidden_size: number of outputs.
        name: name of the network.
    """

    def __init__(self, input_size: int, hidden_size: int, name: str = 'GRUCell'):
        hidden = TensorSpec((hidden_size, ))
        super().__init__(TensorSpec((input_size, )), hidden, name)
        self._output_spec = hidden
        self._cell = nn.GRUCell(input_size, hidden_size)

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``[B, input_size]`` to ``[B, hidden_size]``."""
        h = self._cell(inputs, state)
        return h, h


class Residue(Network):
    """Residual connection: ``activation(x + block(x))``.

    Args:
        block: network, layer or function whose output has the shape of its input.
        input_tensor_spec: spec of the input; ``None`` if ``block`` defines it.
        activation: applied to the sum.
        name: name of the network.

    Raises:
        ValueError: neither ``block`` nor ``input_tensor_spec`` defines the input spec.
    """

    def __init__(self, block: Any, input_tensor_spec: TensorSpec | None = None,
                 activation: w.Activation = torch.relu_, name: str = 'Residue'):
        net = wrap_as_network(block, input_tensor_spec)
        super().__init__(net.input_tensor_spec, net.state_spec, name)
        self._block = net
        self._activation = activation

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``[B, ...]`` to ``[B, ...]``."""
        y, new_state = self._block(inputs, state)
        return self._activation(inputs + y), new_state

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return StackedResidue(self, n, 'parallel_' + self._name)


class StackedResidue(Network):
    """Stack of ``n`` networks with a residual connection.

    Args:
        network: network to stack.
        n: number of networks.
        name: name of the network.
    """

    def __init__(self, network: Residue, n: int, name: str = 'StackedResidue'):
        block = network._block.make_parallel(n)
        super().__init__(network.input_tensor_spec, block.state_spec, name)
        self._parallelism = n
        self._block = block
        self._activation = network._activation

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``[B, n, ...]`` or ``[B, ...]`` to ``[B, n, ...]``."""
        y, new_state = self._block(inputs, state)
        if inputs.ndim < y.ndim:
            inputs = inputs.unsqueeze(1)
        return self._activation(inputs + y), new_state


class TemporalPool(Network):
    """Stack of the last ``stack_size`` features, each pooled over ``pooling_size`` steps.

    For inputs 1, 2, 3, 4, 5 with ``stack_size=2`` and ``pooling_size=2`` the outputs are

    - 'skip': (0, 1), (0, 1), (1, 3), (1, 3), (3, 5): the first step of each group, available immediately;
    - 'avg': (0, 0), (0, 1.5), (0, 1.5), (1.5, 3.5), (1.5, 3.5): the mean of each complete group;
    - 'max': (0, 0), (0, 2), (0, 2), (2, 4), (2, 4): the maximum of each complete group.

    Args:
        input_size: shape of the input, or its size if it is a vector.
        stack_size: number of groups in the output.
        pooling_size: number of steps per group.
        dtype: dtype of the input.
        mode: 'skip', 'avg' or 'max'.
        name: name of the network.

    Raises:
        ValueError: the mode is unknown, a size is below 1, or integers would be averaged.
    """

    def __init__(self, input_size: int | tuple[int, ...], stack_size: int, pooling_size: int = 1,
                 dtype: torch.dtype | str = torch.float32, mode: str = 'skip', name: str = 'TemporalPool'):
        if mode not in ('skip', 'avg', 'max'):
            raise ValueError(f"{name}: unknown mode {mode!r}; expected 'skip', 'avg' or 'max'")
        shape = (input_size, ) if isinstance(input_size, int) else tuple(input_size)
        spec, stack = TensorSpec(shape, dtype), TensorSpec((stack_size, *shape), dtype)
        if stack_size < 1 or pooling_size < 1 or (mode == 'avg' and spec.is_discrete):
            raise ValueError(f"{name}: expected sizes of at least 1, and with mode='avg' a floating point dtype")
        count = TensorSpec((), torch.int64)
        super().__init__(spec, (stack, count) if mode == 'skip' else (stack, count, spec), name)
        self._output_spec = stack
        self._pooling_size, self._mode = pooling_size, mode

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``[B, *shape]`` to ``[B, stack_size, *shape]``, the most recent group last."""
        stack, count = state[:2]
        position = count % self._pooling_size
        if self._mode == 'skip':
            stack = self._push(stack, inputs, position == 0)
            return stack, (stack, position + 1)
        pooled = self._pool(state[2], inputs, position)
        stack = self._push(stack, pooled, position == self._pooling_size - 1)
        return stack, (stack, position + 1, pooled)

    def _pool(self, pooled: torch.Tensor, inputs: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        position = position.view(-1, *(1, ) * (inputs.ndim - 1))
        if self._mode == 'max':
            return torch.where(position == 0, inputs, torch.maximum(pooled, inputs))
        return torch.where(position == 0, inputs, pooled + (inputs - pooled) / (position + 1))

    def _push(self, stack: torch.Tensor, newest: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pushed = torch.cat([stack[:, 1:], newest.unsqueeze(1)], dim=1)
        return torch.where(mask.view(-1, *(1, ) * (stack.ndim - 1)), pushed, stack)


class Delay(Network):
    """Delay line: the input of ``delay`` steps ago, and zeros before that.

    Args:
        input_tensor_spec: nest of specs of the input.
        delay: number of steps; 0 for no delay.
        name: name of the network.

    Raises:
        ValueError: ``delay`` is negative.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, delay: int = 1, name: str = 'Delay'):
        if delay < 0:
            raise ValueError(f'{name}: delay must be at least 0, found {delay}')
        super().__init__(input_tensor_spec, (input_tensor_spec, ) * delay, name)
        self._output_spec = input_tensor_spec

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[NestedTensor, NestedTensor]:
        """Map a nest of ``[B, ...]`` to the delayed nest."""
        return (state[0], (*state[1:], inputs)) if state else (inputs, state)


@configurable
class NoisyFC(Network):
    """Fully connected layer with factorized noise on its weights (Fortunato et al. 2018, arXiv:1706.10295, eq. 9-11).

    ``y = activation((W + S * e_o e_i^T) x + b + s * e_o)`` with ``e = f(z)``, ``f(z) = sign(z) sqrt|z|``, ``z``
    standard normal. Each sample of a batch has separate noise, which is the state of the network and is kept from step
    to step. A sample gets new noise if its state is zeros (at the start of an episode), and at any step with
    probability ``new_noise_prob``. Evaluation uses no noise.

    Args:
        input_size: number of inputs.
        output_size: number of outputs.
        std_init: initial standard deviation of the noise of a unit, sigma_0 in the paper: the entries of ``S`` and
            ``s`` are ``std_init / sqrt(input_size)``. More noise explores more and learns more slowly.
        new_noise_prob: probability of new noise for each step and sample.
        activation: applied to the result.
        use_bn: use batch norm before the activation.
        use_ln: use layer norm before the activation.
        bn_ctor: creates the batch norm from the number of features.
        kernel_initializer: initializes ``W`` in place; ``None``: uniform within ``1 / sqrt(input_size)`` (sec. 3.2).
        kernel_init_gain: factor of that bound for ``W``; not with ``kernel_initializer``.
        bias_init_value: initial ``b``; ``None``: uniform within ``1 / sqrt(input_size)``.
        bias_initializer: initializes ``b`` in place; overrides ``bias_init_value``.
        weight_opt_args: optimizer arguments of ``W`` and ``S``.
        bias_opt_args: optimizer arguments of ``b`` and ``s``.

    Raises:
        ValueError: ``new_noise_prob`` is not in [0, 1], or both norms are set.
    """

    def __init__(self, input_size: Count, output_size: Count, std_init: NonNegative = 0.5,
                 new_noise_prob: Fraction = 0.01, activation: w.Activation = identity, use_bn: bool = False,
                 use_ln: bool = False, bn_ctor: Callable[[int], nn.Module] = nn.BatchNorm1d,
                 kernel_initializer: w.Initializer | None = None, kernel_init_gain: float = 1.0,
                 bias_init_value: float | None = None, bias_initializer: w.Initializer | None = None,
                 weight_opt_args: dict | None = None, bias_opt_args: dict | None = None):
        w.check_init_arguments('NoisyFC', False, kernel_initializer, use_bn, use_ln)
        noise_spec = (TensorSpec((input_size, )), TensorSpec((output_size, )))
        super().__init__(noise_spec[0], noise_spec, 'NoisyFC')
        self._output_spec = noise_spec[1]
        self._std_init, self._new_noise_prob = std_init, new_noise_prob
        # The layer without noise; normalization and activation follow after the noise.
        bound = input_size**-0.5
        if kernel_initializer is None:
            gained = kernel_init_gain * bound
            kernel_initializer = partial(nn.init.uniform_, a=-gained, b=gained)
        if bias_initializer is None and bias_init_value is None:
            bias_initializer = partial(nn.init.uniform_, a=-bound, b=bound)
        self._fc = FC(input_size, output_size, kernel_initializer=kernel_initializer,
                      bias_init_value=bias_init_value or 0.0, bias_initializer=bias_initializer,
                      weight_opt_args=weight_opt_args, bias_opt_args=bias_opt_args)
        self._weight_std = w.parameter((output_size, input_size), weight_opt_args)
        self._bias_std = w.parameter((output_size, ), bias_opt_args)
        self._norm = w.fc_norm(output_size, None, use_bn, use_ln, bn_ctor)
        self._activation = activation
        self._reset_std()

    def _reset_std(self) -> None:
        for std in (self._weight_std, self._bias_std):
            nn.init.constant_(std, self._std_init * self.input_size**-0.5)

    @property
    def input_size(self) -> int:
        """Number of inputs."""
        return self._fc.input_size

    @property
    def output_size(self) -> int:
        """Number of outputs."""
        return self._fc.output_size

    @property
    def weight(self) -> nn.Parameter:
        """Mean weights ``W``."""
        return self._fc.weight

    @property
    def bias(self) -> nn.Parameter | None:
        """Mean bias ``b``."""
        return self._fc.bias

    def reset_parameters(self) -> None:
        """Draw new initial weights."""
        self._fc.reset_parameters()
        self._reset_std()
        w.reset_norm(self._norm)

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[torch.Tensor, NestedTensor]:
        """Map ``[B, input_size]`` to ``[B, output_size]``; the state is the noise of inputs and outputs."""
        if self._is_noisy():
            state = self._next_noise(state)
            return self._output(inputs, state), state
        return self._output(inputs), state

    def with_new_noise(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, input_size]`` to ``[B, output_size]`` with new noise for each sample, without a state."""
        if not self._is_noisy():
            return self._output(inputs)
        return self._output(inputs, nest.map_structure(
            _scaled_noise, (inputs, inputs.new_empty(len(inputs), self.output_size))))

    def _is_noisy(self) -> bool:
        return self.training and not context.is_eval()

    def _output(self, inputs: torch.Tensor, noise: NestedTensor = ()) -> torch.Tensor:
        y = self._fc(inputs)
        if noise:
            noise_in, noise_out = noise
            y = torch.addcmul(y, noise_out, F.linear(inputs * noise_in, self._weight_std, self._bias_std))
        if self._norm is not None:
            y = self._norm(y)
        return self._activation(y)

    def _next_noise(self, state: NestedTensor) -> NestedTensor:
        noise_in, noise_out = state
        renew = (torch.rand(noise_in.shape[0], 1, device=noise_in.device) < self._new_noise_prob)
        renew = renew | (noise_out == 0).all(dim=-1, keepdim=True)
        return nest.map_structure(lambda old: torch.where(renew, _scaled_noise(old), old), (noise_in, noise_out))


def _scaled_noise(like: torch.Tensor) -> torch.Tensor:
    z = torch.randn_like(like)
    return z.sign() * z.abs().sqrt()
