"""Base of the heads for continuous actions; read next: :mod:`alfx.networks.projection_networks`."""
from functools import partial
from typing import Any

import torch
import torch.distributions as td
from torch import nn

from alfx.layers import FC, Activation
from alfx.networks.action_specs import action_range, require_continuous
from alfx.networks.network import Network
from alfx.tensor_specs import TensorSpec
from alfx.utils import dist_utils
from alfx.utils.dist_utils import TransformedDistribution


class LocationScaleProjection(Network):
    """Base of heads that output a location and a raw scale for each component of a continuous action.

    One layer outputs both, unless the scale does not depend on the input; then the scale is a parameter.
    """

    _middle: torch.Tensor
    _half: torch.Tensor

    def __init__(self, input_size: int, action_spec: TensorSpec, parallelism: int | None, name: str):
        require_continuous(action_spec, name)
        super().__init__(TensorSpec((input_size, )), (), name)
        self._parallelism = parallelism
        self._action_spec = action_spec
        self._shape = None if action_spec.ndim == 1 else tuple(action_spec.shape)
        self._scale_parameter: nn.Parameter | None = None

    def _set_layer(self, activation: Activation, gain: float, scale_bias: float, state_dependent: bool,
                   loc_bias: float = 0.0) -> None:
        size, stack = self._action_spec.numel, self._parallelism
        self._scale_bias = scale_bias
        layer: Any = FC(self._input_tensor_spec.shape[0], 2 * size if state_dependent else size, activation,
                        kernel_init_gain=gain, bias_initializer=partial(_fill_parts, size, loc_bias, scale_bias))
        self._projection_layer = layer if stack is None else layer.make_parallel(stack)
        if not state_dependent:
            shape = (size, ) if stack is None else (stack, size)
            self._scale_parameter = nn.Parameter(torch.full(shape, float(scale_bias)))

    def reset_parameters(self) -> None:
        """Draw new initial weights."""
        self._projection_layer.reset_parameters()
        if self._scale_parameter is not None:
            nn.init.constant_(self._scale_parameter, self._scale_bias)

    def _set_range(self, squash_loc: bool, scale_distribution: bool, squashing: td.Transform, remedy: str,
                   bounded: bool = False) -> None:
        """Set up the mapping of the location, or of the distribution, into the bounds of the action."""
        self._squash_loc = squash_loc and not scale_distribution
        self._scale_distribution = scale_distribution
        self._squashing = squashing
        self._transforms: list[Any] | None = None
        if squash_loc or scale_distribution:
            middle, half = action_range(self._action_spec, self._name, remedy, scale_distribution or bounded)
            self._is_unit_range = bool((middle == 0).all() and (half == 1).all())
            self.register_buffer('_middle', middle, persistent=False)
            self.register_buffer('_half', half, persistent=False)

    def _project(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return locations and raw scales, each ``[B, (n,) *action_shape]``."""
        y = self._projection_layer(inputs)
        loc, scale = y.chunk(2, dim=-1) if self._scale_parameter is None else (y, self._scale_parameter)
        if self._shape is not None:
            loc, scale = _shaped(loc, self._shape), _shaped(scale, self._shape)
        return loc, scale

    def _squashed_loc(self, loc: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self._middle, self._half, torch.tanh(loc)) if self._squash_loc else loc

    def _scaled(self, dist: td.Distribution) -> td.Distribution:
        """Squash the distribution into the bounds of the action if ``scale_distribution`` is set."""
        if not self._scale_distribution:
            return dist
        transforms = self._transforms
        # The bounds move to another device with the network.
        if transforms is None or (len(transforms) == 2 and transforms[1].loc is not self._middle):
            transforms = self._transforms = [self._squashing]
            if not self._is_unit_range:
                transforms.append(dist_utils.AffineTransform(self._middle, self._half))
        return TransformedDistribution(dist, transforms)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        arguments = self.saved_args
        if 'parallelism' not in arguments:
            return super().make_parallel(n)
        if arguments['parallelism'] is not None:
            raise ValueError(f'{self._name} is already a stack of networks')
        return type(self)(**{**arguments, 'parallelism': n, 'name': 'parallel_' + self._name})


def _shaped(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return x.unflatten(-1, shape) if shape else x.squeeze(-1)


def _fill_parts(size: int, first: float, second: float, bias: torch.Tensor) -> None:
    bias[:size].fill_(first)
    bias[size:].fill_(second)
