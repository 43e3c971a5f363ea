"""Single layers with given parameters: ``[D]`` for one group, ``[n, D]`` for ``n`` groups at once.

Particles or a hypernetwork provide the parameters; :class:`~alfx.layers.given_parameters.GivenParameters` uses them.
"""
import torch
from torch import nn

from alfx.gin_utils import configurable
from alfx.layers.conv import Conv2D, Size2d
from alfx.layers.elementwise import MaxPool2D
from alfx.layers.fc import FC
from alfx.layers.given_parameters import GivenParameters
from alfx.layers.weights import Activation, Initializer


class ParamLayer(nn.Module):
    """Layer with given parameters.

    It starts with initial parameters for ``n_groups`` groups, or one. They are not ``nn.Parameter``: the provider of
    the parameters trains them.

    Args:
        layer: template of the computation.
        n_groups: number of groups; ``None`` allows any number.

    Raises:
        ValueError: the layer has no parameters.
    """

    _theta: torch.Tensor

    def __init__(self, layer: nn.Module, n_groups: int | None):
        super().__init__()
        self._given = GivenParameters(layer, type(self).__name__)
        self._n_groups = n_groups
        self._names = [name for name, _ in layer.named_parameters()]
        self.set_parameters(self._given.initial_parameters(n_groups or 1))

    @property
    def param_length(self) -> int:
        """Number of parameters of one group."""
        return self._given.param_length

    @property
    def weight_length(self) -> int:
        """Number of weights of one group, including the scale of a norm."""
        return sum(self._length(name) for name in self._names if name.endswith('weight'))

    @property
    def bias_length(self) -> int:
        """Number of biases of one group, including the shift of a norm."""
        return sum(self._length(name) for name in self._names if name.endswith('bias'))

    def _length(self, name: str) -> int:
        return torch.Size(self._given.shapes[self._names.index(name)]).numel()

    @property
    def weight(self) -> torch.Tensor:
        """Current weights ``[n, ...]``."""
        return self._values('weight')

    @property
    def bias(self) -> torch.Tensor | None:
        """Current biases ``[n, ...]``; ``None`` without bias."""
        return self._values('bias') if 'bias' in self._names else None

    def _values(self, name: str) -> torch.Tensor:
        i = self._names.index(name)
        begin = sum(torch.Size(shape).numel() for shape in self._given.shapes[:i])
        rows = self._theta if self._theta.ndim == 2 else self._theta.unsqueeze(0)
        return rows[:, begin:begin + self._length(name)].reshape(-1, *self._given.shapes[i])

    def set_parameters(self, theta: torch.Tensor, reinitialize: bool = False) -> None:
        """Compute with ``theta`` from now on.

        Args:
            theta: ``[n_groups, param_length]``, or ``[param_length]`` for one group, whose outputs then have no group
                dimension.
            reinitialize: first fill ``theta`` in place with initial values.

        Raises:
            ValueError: ``theta`` has another shape.
        """
        self._given.check(theta)
        groups = theta.shape[0] if theta.ndim == 2 else 1
        if self._n_groups not in (None, groups):
            raise ValueError(f'{type(self).__name__}: expected parameters for n_groups = {self._n_groups}, found '
                             f'{list(theta.shape)}')
        if reinitialize:
            with torch.no_grad():
                theta.copy_(self._given.initial_parameters(groups).view_as(theta))
        self.__dict__['_theta'] = theta  # not registered: the provider owns it, even if it is an nn.Parameter

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, ...]`` (shared) or ``[B, n, ...]`` to ``[B, n, ...]``; with ``theta [D]`` to ``[B, ...]``."""
        theta = self._theta
        outputs = self._given.stack(theta if theta.ndim == 2 else theta.unsqueeze(0))(inputs)
        return outputs if theta.ndim == 2 else outputs[:, 0]


@configurable(module='alfx.layers')
class ParamFC(ParamLayer):
    """Fully connected layer with given parameters.

    Args:
        input_size: number of inputs.
        output_size: number of outputs.
        activation: applied to the result.
        use_bias: add a bias.
        use_ln: use layer norm before the activation.
        n_groups: see :class:`ParamLayer`.
        kernel_initializer: initializes the weights in place; ``None`` uses variance scaling.
        kernel_init_gain: ``gain`` of variance scaling.
        bias_init_value: initial bias.
    """

    def __init__(self, input_size: int, output_size: int, activation: Activation = torch.relu_, use_bias: bool = True,
                 use_ln: bool = False, n_groups: int | None = None, kernel_initializer: Initializer | None = None,
                 kernel_init_gain: float = 1.0, bias_init_value: float = 0.0):
        super().__init__(FC(input_size, output_size, activation, use_bias, use_ln=use_ln,
                            kernel_initializer=kernel_initializer, kernel_init_gain=kernel_init_gain,
                            bias_init_value=bias_init_value), n_groups)


@configurable(module='alfx.layers')
class ParamConv2D(ParamLayer):
    """Convolution with given parameters, optionally followed by max pooling.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: height and width of the kernel, or one number for both.
        activation: applied to the result.
        strides: vertical and horizontal stride, or one number for both.
        pooling_kernel: side of the squares for max pooling; ``None`` for no pooling.
        padding: rows and columns of zeros on each side, or one number for both.
        use_bias: add a bias.
        use_ln: normalize over channels and positions before the activation.
        n_groups: see :class:`ParamLayer`.
        kernel_initializer: initializes the weights in place; ``None`` uses variance scaling.
        kernel_init_gain: ``gain`` of variance scaling.
        bias_init_value: initial bias.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: Size2d, activation: Activation = torch.relu_,
                 strides: Size2d = 1, pooling_kernel: int | None = None, padding: Size2d = 0, use_bias: bool = False,
                 use_ln: bool = False, n_groups: int | None = None, kernel_initializer: Initializer | None = None,
                 kernel_init_gain: float = 1.0, bias_init_value: float = 0.0):
        super().__init__(Conv2D(in_channels, out_channels, kernel_size, activation, strides, padding, use_bias,
                                use_ln=use_ln, kernel_initializer=kernel_initializer,
                                kernel_init_gain=kernel_init_gain, bias_init_value=bias_init_value), n_groups)
        self._pool = None if pooling_kernel is None else MaxPool2D(pooling_kernel)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, C, H, W]`` or ``[B, n, C, H, W]`` to ``[B, n, C', H', W']`` (``[B, C', H', W']`` for ``[D]``)."""
        outputs = super().forward(inputs)
        return outputs if self._pool is None else self._pool(outputs)
