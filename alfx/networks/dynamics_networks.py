"""Networks that predict what an action does: from a feature and an action to the change of the feature.

The prediction is a tensor, or a normal distribution with a diagonal covariance. A stack of them (``make_parallel``) is
an ensemble. Read next: :mod:`alfx.algorithms.dynamics_learning_algorithm`.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alfx.distributions.continuous import DiagMultivariateNormal
from alfx.gin_utils import configurable
from alfx.layers.weights import Activation, Initializer
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.location_scale import LocationScaleProjection
from alfx.networks.network import Network
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity


def softly_bounded(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """``x`` squashed between ``low`` and ``high``, and nearly itself where it is well inside.

    Chua et al. 2018 (arXiv:1805.12114), appendix A.1:

        y = high - softplus(high - x)
        z = low + softplus(y - low)

    Near ``high`` the second line adds ``softplus(low - high)`` at most, which is nothing for bounds that are apart.
    """
    y = high - F.softplus(high - x)
    return low + F.softplus(y - low)


@configurable
class BoundedVarianceProjectionNetwork(LocationScaleProjection):
    """A normal distribution whose log-variances lie between bounds, which are learned as well.

    Without bounds an ensemble is sure of what it has never seen, or its loss has no minimum where data has no noise.
    The bounds are pulled together by :meth:`bounds_penalty`, which is to be added to the loss.

    Args:
        input_size: number of inputs.
        action_spec: spec of what is distributed: floats of any shape.
        parallelism: make a stack of that many, each with bounds of its own.
        min_log_variance: initial lower bound of each component.
        max_log_variance: initial upper bound of each component.
        name: name of the network.

    Raises:
        SpecError: ``action_spec`` is not that of floats.
        ValueError: not ``min_log_variance < max_log_variance``.
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
        """Draw new initial weights, and put the bounds where they began."""
        super().reset_parameters()
        for bound, initial in zip((self._min_log_variance, self._max_log_variance), self._initial_bounds):
            nn.init.constant_(bound, initial)

    def bounds_penalty(self) -> Tensor:
        """The widths between the bounds, summed over components: scalar; the mean over the networks of a stack."""
        return (self._max_log_variance - self._min_log_variance).sum(-1).mean()

    def forward(self, inputs: Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """``[B, input_size]`` to a distribution with batch shape ``[B]``; of a stack ``[B, n]``."""
        loc, raw = self._projection_layer(inputs).chunk(2, dim=-1)
        scale = (0.5 * softly_bounded(raw, self._min_log_variance, self._max_log_variance)).exp()
        if self._shape is not None:
            outer = loc.shape[:-1]
            loc, scale = loc.reshape(*outer, *self._shape), scale.reshape(*outer, *self._shape)
        return DiagMultivariateNormal(loc, scale, self._action_spec.ndim), state


class _DynamicsBase(Network):
    """An encoder of the pair, followed by a head if the prediction is a distribution."""

    def _set_parts(self, encoder: Network, head: Network | None) -> None:
        self._encoder = encoder
        self._head = head

    def bounds_penalty(self) -> Tensor | None:
        """What is to be added to the loss for bounds that are learned, a scalar; ``None`` without such bounds."""
        penalty = getattr(self._head, 'bounds_penalty', None)
        return None if penalty is None else penalty()

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """A pair (feature, action) of ``[B, ...]`` to ``[B, *output_tensor_spec.shape]`` or a distribution of that."""
        encoded, _ = self._encoder(inputs)
        return (encoded if self._head is None else self._head(encoded)[0]), state


@configurable
class DynamicsNetwork(_DynamicsBase):
    """What follows from a feature and an action.

    Args:
        input_tensor_spec: the pair of the spec of the feature and that of the encoded action.
        output_tensor_spec: spec of what is predicted.
        joint_fc_layer_params: sizes of the hidden layers, which see both.
        activation: activation of the hidden layers.
        kernel_initializer: initializer of all layers but that of a distribution; ``None`` for variance scaling.
        prob: whether to predict a distribution.
        continuous_projection_net_ctor: makes the head of the distribution, called as ``(input_size=, action_spec=)``
            with ``output_tensor_spec``. :class:`~alfx.networks.projection_networks.NormalProjectionNetwork` needs
            ``squash_mean=False`` for what has no bounds; :class:`BoundedVarianceProjectionNetwork` is made for models.
        name: name of the network.

    Raises:
        SpecError: the input is no pair of specs.
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
        """See the base class."""
        return ParallelDynamicsNetwork(self, n, 'parallel_' + self._name)


class ParallelDynamicsNetwork(_DynamicsBase):
    """``n`` dynamics networks as one.

    Args:
        dynamics_network: the network to stack.
        n: number of networks, each with its own initial parameters.
        name: name of the network.
    """

    def __init__(self, dynamics_network: DynamicsNetwork, n: int, name: str = 'ParallelDynamicsNetwork'):
        super().__init__(dynamics_network.input_tensor_spec, (), name)
        self._parallelism = n
        head = dynamics_network._head
        self._set_parts(dynamics_network._encoder.make_parallel(n), None if head is None else head.make_parallel(n))

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """A pair of ``[B, ...]`` or ``[B, n, ...]`` to ``[B, n, *output_tensor_spec.shape]`` or a distribution."""
        return super().forward(inputs, state)
