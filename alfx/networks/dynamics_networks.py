"""Dynamics networks: they predict the change of a feature from the feature and an action.

The prediction is a tensor, or a normal distribution with a diagonal covariance. A stack of them (``make_parallel``) is
an ensemble. Read next: :mod:`alfx.algorithms.dynamics_learning_algorithm`.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx.distributions.continuous import DiagMultivariateNormal
from alfx.gin_utils import configurable
from alfx.layers.weights import Activation, Initializer
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.location_scale import LocationScaleProjection
from alfx.networks.network import Network
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity, softlower, softupper


def softly_bounded(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """Squash ``x`` smoothly between ``low`` and ``high``; values well inside hardly change.

    Chua et al. 2018 (arXiv:1805.12114), appendix A.1:

        y = high - softplus(high - x)
        z = low + softplus(y - low)

    Near ``high`` the second line adds at most ``softplus(low - high)``, which is negligible for well separated bounds.
    """
    return softlower(softupper(x, high), low)


@configurable
class BoundedVarianceProjectionNetwork(LocationScaleProjection):
    """Normal distribution whose log-variances lie between learned bounds.

    Without bounds an ensemble may be overconfident far from its data, and its loss has no minimum for data without
    noise. Add :meth:`bounds_penalty` to the loss: it pulls the bounds together.

    Args:
        input_size: number of inputs.
        action_spec: spec of the distribution's values: floats of any shape.
        parallelism: create a stack of this many heads, each with separate bounds.
        min_log_variance: initial lower bound of each component.
        max_log_variance: initial upper bound of each component.
        name: name of the network.

    Raises:
        SpecError: ``action_spec`` is not a spec of floats.
        ValueError: ``min_log_variance`` is not below ``max_log_variance``.
    """

    def __init__(self, input_size: int, action_spec: TensorSpec, parallelism: int | None = None,
                 min_log_variance: float = -10.0, max_log_variance: float = 0.5,
                 name: str = 'BoundedVarianceProjectionNetwork'):
        super().__init__(input_size, action_spec, parallelism, name)
        if not min_log_variance < max_log_variance:
            raise ValueError(f'{name}: expected min_log_variance < max_log_variance, found {min_log_variance} and '
                             f'{max_log_variance}')
        self._set_layer(identity, 1.0, 0.0, True)
        shape = (action_spec.numel, ) if parallelism is None else (parallelism, action_spec.numel)
        self._initial_bounds = float(min_log_variance), float(max_log_variance)
        self._min_log_variance = nn.Parameter(torch.full(shape, self._initial_bounds[0]))
        self._max_log_variance = nn.Parameter(torch.full(shape, self._initial_bounds[1]))

    def reset_parameters(self) -> None:
        """Draw new initial weights and reset the bounds."""
        super().reset_parameters()
        for bound, initial in zip((self._min_log_variance, self._max_log_variance), self._initial_bounds):
            nn.init.constant_(bound, initial)

    def bounds_penalty(self) -> Tensor:
        """Return the distance between the bounds, summed over components and averaged over a stack of networks."""
        return (self._max_log_variance - self._min_log_variance).sum(-1).mean()

    def forward(self, inputs: Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a distribution with batch shape ``[B]``; a stack has batch shape ``[B, n]``."""
        loc, raw = self._projection_layer(inputs).chunk(2, dim=-1)
        scale = (0.5 * softly_bounded(raw, self._min_log_variance, self._max_log_variance)).exp()
        if self._shape is not None:
            outer = loc.shape[:-1]
            loc, scale = loc.reshape(*outer, *self._shape), scale.reshape(*outer, *self._shape)
        return DiagMultivariateNormal(loc, scale, self._action_spec.ndim), state


class _DynamicsBase(Network):
    """Encoder of the pair, followed by a head if the prediction is a distribution."""

    def _set_parts(self, encoder: Network, head: Network | None) -> None:
        self._encoder = encoder
        self._head = head

    def bounds_penalty(self) -> Tensor | None:
        """Return the penalty to add to the loss for learned bounds, a scalar; ``None`` without such bounds."""
        penalty = getattr(self._head, 'bounds_penalty', None)
        return None if penalty is None else penalty()

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a pair (feature, action) of ``[B, ...]`` to ``[B, *output_tensor_spec.shape]`` or its distribution."""
        encoded, _ = self._encoder(inputs)
        return (encoded if self._head is None else self._head(encoded)[0]), state


@configurable
class DynamicsNetwork(_DynamicsBase):
    """Prediction from a feature and an action.

    Args:
        input_tensor_spec: pair of the spec of the feature and the spec of the encoded action.
        output_tensor_spec: spec of the prediction.
        joint_fc_layer_params: sizes of the hidden layers, whose input is the feature and the action.
        activation: activation of the hidden layers.
        kernel_initializer: initializer of all layers except those of a distribution; ``None`` uses variance scaling.
        prob: predict a distribution.
        continuous_projection_net_ctor: creates the head of the distribution, called as ``(input_size=, action_spec=)``
            with ``output_tensor_spec``. :class:`~alfx.networks.projection_networks.NormalProjectionNetwork` needs
            ``squash_mean=False`` for unbounded predictions; :class:`BoundedVarianceProjectionNetwork` is designed for
            models.
        name: name of the network.

    Raises:
        SpecError: the input is not a pair of specs.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, output_tensor_spec: TensorSpec,
                 joint_fc_layer_params: Sequence[int] | None = None, activation: Activation = torch.relu_,
                 kernel_initializer: Initializer | None = None, prob: bool = False,
                 continuous_projection_net_ctor: Callable[..., Network] = NormalProjectionNetwork,
                 name: str = 'DynamicsNetwork'):
        if not isinstance(input_tensor_spec, (tuple, list)) or len(input_tensor_spec) != 2:
            raise SpecError(f'{name}: expected input_tensor_spec=(feature_spec, action_spec), found '
                            f'{input_tensor_spec}')
        super().__init__(input_tensor_spec, (), name)
        last: dict[str, Any] = {}
        if not prob:
            last = dict(last_layer_size=output_tensor_spec.numel, last_activation=identity,
                        output_tensor_spec=output_tensor_spec)
        encoder = EncodingNetwork(input_tensor_spec, preprocessing_combiner=NestConcat(),
                                  fc_layer_params=joint_fc_layer_params, activation=activation,
                                  kernel_initializer=kernel_initializer, name=f'{name}.encoder', **last)
        head = continuous_projection_net_ctor(input_size=encoder.output_spec.shape[0],
                                              action_spec=output_tensor_spec) if prob else None
        self._set_parts(encoder, head)

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return ParallelDynamicsNetwork(self, n, 'parallel_' + self._name)


class ParallelDynamicsNetwork(_DynamicsBase):
    """Stack of ``n`` dynamics networks: a pair of ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, ...]`` or a distribution.

    Args:
        dynamics_network: network to stack.
        n: number of networks, each with separate initial parameters.
        name: name of the network.
    """

    def __init__(self, dynamics_network: DynamicsNetwork, n: int, name: str = 'ParallelDynamicsNetwork'):
        super().__init__(dynamics_network.input_tensor_spec, (), name)
        self._parallelism = n
        head = dynamics_network._head
        self._set_parts(dynamics_network._encoder.make_parallel(n), None if head is None else head.make_parallel(n))
