"""Projection networks (heads): they map the vector of an encoder to the distribution of an action.

Each maps ``[B, input_size]`` to a distribution with batch shape ``[B]`` over actions of its spec. Stacks of heads
(``parallelism=n``, ``make_parallel(n)``) also take ``[B, n, input_size]`` and return batch shape ``[B, n]``.
"""
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributions as td
from torch import nn
from torch.nn import functional as F

from alfx import nest
from alfx.gin_utils import Count, NonNegative, Positive, configurable
from alfx.layers import FC, Activation, out_of_place
from alfx.networks.action_specs import action_range, require_categories, require_vector
from alfx.networks.location_scale import LocationScaleProjection
from alfx.networks.network import Network
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.dist_utils import DiagMultivariateNormal, StableTanh
from alfx.utils.math_ops import identity

_STABLE_TANH = StableTanh()


@configurable
class CategoricalProjectionNetwork(Network):
    """Categorical distribution of a discrete action.

    The action may start at any number, and may be a vector (MultiDiscrete, MultiBinary) whose components, each with its
    own range, are independent.

    Args:
        input_size: number of inputs.
        action_spec: bounded spec of integers, or of floats with integer bounds; such an action is one of the integers
            as a float.
        fc_ctor: creates the layer; called with the numbers of inputs and outputs and ``kernel_init_gain``.
        logits_init_output_factor: approximate standard deviation of the initial logits.
        weight_opt_args: optimizer arguments of the weights.
        bias_opt_args: optimizer arguments of the bias.
        name: name of the network.

    Raises:
        SpecError: the action has no integer bounds.
    """

    def __init__(self, input_size: Count, action_spec: BoundedTensorSpec, fc_ctor: Callable[..., nn.Module] = FC,
                 logits_init_output_factor: float = 0.1, weight_opt_args: dict | None = None,
                 bias_opt_args: dict | None = None, name: str = 'CategoricalProjectionNetwork'):
        require_categories(action_spec, name)
        super().__init__(TensorSpec((input_size, )), (), name)
        opt_args = {'weight_opt_args': weight_opt_args, 'bias_opt_args': bias_opt_args}
        fc_ctor = partial(fc_ctor, **{key: value for key, value in opt_args.items() if value is not None})
        self._set_layer(fc_ctor, logits_init_output_factor, action_spec)

    def _set_layer(self, fc_ctor: Callable[..., nn.Module], gain: float, spec: BoundedTensorSpec) -> None:
        self._stack_args = (fc_ctor, gain, spec)
        count = dist_utils.num_categories(spec)
        layer: Any = fc_ctor(self._input_tensor_spec.shape[0], spec.numel * count, kernel_init_gain=gain)
        if self._parallelism is not None:
            layer = layer.make_parallel(self._parallelism)
        self._projection_layer = layer
        self._layer_is_network = isinstance(layer, Network)
        self._state_spec = layer.state_spec if self._layer_is_network else ()
        self._logits_shape = (*spec.shape, count) if spec.ndim else None
        # Template of the distribution, to be filled with logits; components with fewer categories exclude the rest.
        template = dist_utils.categorical_from_spec(torch.zeros(*spec.shape, count), spec)
        logits, = nest.flatten(template)
        self._structure = nest.structure(template)
        excluded = logits == -torch.inf
        self.register_buffer('_excluded', excluded if bool(excluded.any()) else None, persistent=False)

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a categorical distribution, see ``dist_utils.categorical_from_spec``."""
        if self._layer_is_network:
            logits, state = self._projection_layer(inputs, state)
        else:
            logits = self._projection_layer(inputs)
        if self._logits_shape is not None:
            logits = logits.unflatten(-1, self._logits_shape)
            if self._excluded is not None:
                logits = logits.masked_fill(self._excluded, -torch.inf)
        return self._structure.unflatten((logits, )), state

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        fc_ctor, gain, spec = self._stack_args
        return ParallelCategoricalProjectionNetwork(self._input_tensor_spec.shape[0], spec, n, fc_ctor, gain,
                                                    'parallel_' + self._name)


@configurable
class ParallelCategoricalProjectionNetwork(CategoricalProjectionNetwork):
    """Stack of ``n`` :class:`CategoricalProjectionNetwork`; except for ``n`` it has the same arguments."""

    def __init__(self, input_size: Count, action_spec: BoundedTensorSpec, n: Count,
                 fc_ctor: Callable[..., nn.Module] = FC, logits_init_output_factor: float = 0.1,
                 name: str = 'ParallelCategoricalProjectionNetwork'):
        require_categories(action_spec, name)
        Network.__init__(self, TensorSpec((input_size, )), (), name)
        self._parallelism = n
        self._set_layer(fc_ctor, logits_init_output_factor, action_spec)


_SQUASH_REMEDY = 'for unbounded actions set squash_mean=False and scale_distribution=False'


@configurable
class NormalProjectionNetwork(LocationScaleProjection):
    """Normal distribution with a diagonal covariance, optionally squashed into the bounds of the action.

    Args:
        input_size: number of inputs.
        action_spec: spec of a continuous action of any shape; needs bounds for ``squash_mean`` or
            ``scale_distribution``.
        parallelism: create a stack of this many heads.
        activation: activation of the layer of means (and standard deviations).
        projection_output_init_gain: approximate standard deviation of the initial means.
        std_bias_initializer_value: initial input of ``std_transform``.
        squash_mean: map the mean into the bounds by tanh; ignored with ``scale_distribution`` or ``mean_transform``.
        mean_transform: applied to the mean instead; with ``scale_distribution`` before the squashing.
        state_dependent_std: compute the standard deviation from the input; otherwise it is a parameter.
        std_transform: makes the standard deviation positive.
        scale_distribution: squash the distribution itself into the bounds.
        dist_squashing_transform: transform to (-1, 1) that squashes the distribution.
        name: name of the network.

    Raises:
        SpecError: the action is not continuous, or lacks required bounds.
    """

    def __init__(self, input_size: Count, action_spec: TensorSpec, parallelism: Count | None = None,
                 activation: Activation = identity, projection_output_init_gain: float = 0.3,
                 std_bias_initializer_value: float = 0.0, squash_mean: bool = True,
                 mean_transform: Activation | None = None, state_dependent_std: bool = False,
                 std_transform: Activation = F.softplus, scale_distribution: bool = False,
                 dist_squashing_transform: td.Transform = _STABLE_TANH, name: str = 'NormalProjectionNetwork'):
        super().__init__(input_size, action_spec, parallelism, name)
        self._set_layer(activation, projection_output_init_gain, std_bias_initializer_value, state_dependent_std)
        self._set_range(squash_mean and mean_transform is None, scale_distribution, dist_squashing_transform,
                        _SQUASH_REMEDY)
        self._mean_transform = None if mean_transform is None else out_of_place(mean_transform)
        self._std_transform = out_of_place(std_transform)

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a distribution over actions."""
        loc, raw = self._project(inputs)
        if self._mean_transform is not None:
            loc = self._mean_transform(loc)
        dist = DiagMultivariateNormal(self._squashed_loc(loc), self._std_transform(raw), self._action_spec.ndim)
        return self._scaled(dist), state


@configurable
class StableNormalProjectionNetwork(LocationScaleProjection):
    """Normal distribution whose gradients stay bounded when its standard deviation becomes small.

    With outputs ``a`` and ``b`` of the layer, ``std = c0 + 1 / (f(b) + c1)`` and ``mean = a * std``; ``c0 = min_std``
    and ``c1 = 1 / (max_std - min_std)`` ensure ``min_std < std < max_std``.

    Args:
        input_size: number of inputs.
        action_spec: see :class:`NormalProjectionNetwork`.
        parallelism: create a stack of this many heads.
        activation: activation of the layer.
        projection_output_init_gain: approximate standard deviation of the initial ``a``.
        squash_mean: see :class:`NormalProjectionNetwork`.
        state_dependent_std: compute ``b`` from the input; otherwise it is a parameter.
        inverse_std_transform: ``f``, 'softplus' or 'exp'.
        scale_distribution: see :class:`NormalProjectionNetwork`.
        init_std: initial standard deviation.
        min_std: lower limit of the standard deviation.
        max_std: upper limit of the standard deviation; ``None`` for no limit.
        dist_squashing_transform: see :class:`NormalProjectionNetwork`.
        name: name of the network.

    Raises:
        SpecError: the action is not continuous, or lacks required bounds.
        ValueError: ``inverse_std_transform`` is unknown, or not ``min_std < init_std < max_std``.
    """

    def __init__(self, input_size: Count, action_spec: TensorSpec, parallelism: Count | None = None,
                 activation: Activation = identity, projection_output_init_gain: float = 1e-5,
                 squash_mean: bool = True, state_dependent_std: bool = False,
                 inverse_std_transform: Literal['softplus', 'exp'] = 'softplus', scale_distribution: bool = False,
                 init_std: Positive = 1.0, min_std: NonNegative = 0.0, max_std: Positive | None = None,
                 dist_squashing_transform: td.Transform = _STABLE_TANH, name: str = 'StableNormalProjectionNetwork'):
        super().__init__(input_size, action_spec, parallelism, name)
        if not 0 <= min_std < init_std < (math.inf if max_std is None else max_std):
            raise ValueError(f'{name}: expected 0 <= min_std < init_std < max_std, found {min_std}, {init_std}, '
                             f'{max_std}')
        self._min_std = min_std
        self._c1 = 0.0 if max_std is None else 1.0 / (max_std - min_std)
        self._f = F.softplus if inverse_std_transform == 'softplus' else torch.exp
        initial = 1.0 / (init_std - min_std) - self._c1
        raw = math.log(initial) if inverse_std_transform == 'exp' else initial + math.log(-math.expm1(-initial))
        self._set_layer(activation, projection_output_init_gain, raw, state_dependent_std)
        self._set_range(squash_mean, scale_distribution, dist_squashing_transform, _SQUASH_REMEDY)

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a distribution over actions."""
        a, b = self._project(inputs)
        std = self._min_std + (self._f(b) + self._c1).reciprocal()
        return self._scaled(DiagMultivariateNormal(self._squashed_loc(a * std), std, self._action_spec.ndim)), state


@configurable
class CauchyProjectionNetwork(LocationScaleProjection):
    """Independent Cauchy distributions, optionally squashed into the bounds of the action.

    Args:
        input_size: number of inputs.
        action_spec: spec of a continuous action ``(D,)``; needs bounds for ``squash_median`` or ``scale_distribution``.
        squash_median: map the median into the bounds by tanh; ignored with ``scale_distribution``.
        scale_bias_initializer_value: initial input of ``scale_transform``.
        state_dependent_scale: compute the scale from the input; otherwise it is a parameter.
        scale_transform: makes the scale positive.
        scale_distribution: squash the distribution itself into the bounds.
        dist_squashing_transform: transform to (-1, 1) that squashes the distribution.
        name: name of the network.

    Raises:
        SpecError: the action is not a continuous vector, or lacks required bounds.
    """

    def __init__(self, input_size: Count, action_spec: TensorSpec, squash_median: bool = True,
                 scale_bias_initializer_value: float = 0.0, state_dependent_scale: bool = False,
                 scale_transform: Activation = F.softplus, scale_distribution: bool = False,
                 dist_squashing_transform: td.Transform = _STABLE_TANH, name: str = 'CauchyProjectionNetwork'):
        super().__init__(input_size, action_spec, None, name)
        require_vector(action_spec, name)
        self._set_layer(identity, 0.3, scale_bias_initializer_value, state_dependent_scale)
        self._set_range(squash_median, scale_distribution, dist_squashing_transform,
                        'for unbounded actions set squash_median=False and scale_distribution=False')
        self._scale_transform = out_of_place(scale_transform)

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a distribution over actions."""
        loc, raw = self._project(inputs)
        dist = dist_utils.DiagMultivariateCauchy(self._squashed_loc(loc), self._scale_transform(raw))
        return self._scaled(dist), state


@configurable
class BetaProjectionNetwork(LocationScaleProjection):
    """Independent Beta distributions, stretched over the bounds of the action (Chou et al. 2017).

    Args:
        input_size: number of inputs.
        action_spec: bounded spec of a continuous action ``(D,)``.
        parallelism: create a stack of this many heads.
        activation: makes the concentrations positive.
        min_concentration: added to the concentrations; from 1 on the density has a single peak inside the bounds.
        projection_output_init_gain: scale of the initial dependence of the concentrations on the input.
        bias_init_value: initial bias; the default gives initial concentrations of 1, a uniform distribution.
        grad_clip: limit for the absolute gradients of the concentrations; ``None`` for no clipping.
        name: name of the network.

    Raises:
        SpecError: the action is not a bounded continuous vector.
    """

    _low: torch.Tensor
    _width: torch.Tensor

    def __init__(self, input_size: Count, action_spec: BoundedTensorSpec, parallelism: Count | None = None,
                 activation: Activation = F.softplus, min_concentration: NonNegative = 0.0,
                 projection_output_init_gain: float = 0.0, bias_init_value: float = 0.541324854612918,
                 grad_clip: Positive | None = 0.01, name: str = 'BetaProjectionNetwork'):
        super().__init__(input_size, action_spec, parallelism, name)
        require_vector(action_spec, name)
        self._set_layer(activation, projection_output_init_gain, bias_init_value, True, bias_init_value)
        middle, half = action_range(action_spec, name, 'use NormalProjectionNetwork with squash_mean=False', True)
        self.register_buffer('_low', middle - half, persistent=False)
        self.register_buffer('_width', 2 * half, persistent=False)
        self._min_concentration, self._grad_clip = min_concentration, grad_clip

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a distribution over actions."""
        concentrations = self._projection_layer(inputs)
        if self._min_concentration:
            concentrations = concentrations + self._min_concentration
        limit = self._grad_clip
        if limit is not None and concentrations.requires_grad:
            concentrations.register_hook(lambda gradient: gradient.clamp(-limit, limit))
        base = dist_utils.DiagMultivariateBeta(*concentrations.chunk(2, dim=-1))
        return dist_utils.AffineTransformedDistribution(base, self._low, self._width), state


@configurable
class TruncatedProjectionNetwork(LocationScaleProjection):
    """Distribution truncated at the bounds of the action.

    With outputs ``a`` and ``b`` of the layer, the center is the middle of the bounds plus ``loc_transform(a)`` times
    half their width. The scale is ``scale_transform(b)`` clamped to ``[min_scale, max_scale]``, in units of the action.

    Args:
        input_size: number of inputs.
        action_spec: bounded spec of a continuous action ``(D,)``.
        activation: activation of the layer.
        projection_output_init_gain: approximate standard deviation of the initial ``a``.
        scale_bias_initializer_value: initial ``b``.
        state_dependent_scale: compute ``b`` from the input; otherwise it is a parameter.
        loc_transform: see above.
        scale_transform: see above; positive.
        min_scale: lower limit of the scale; ``None`` for no limit.
        max_scale: upper limit of the scale; ``None`` for no limit.
        dist_ctor: creates the distribution; called with ``loc``, ``scale``, ``lower_bound`` and ``upper_bound``.
        name: name of the network.

    Raises:
        SpecError: the action is not a bounded continuous vector.
    """

    def __init__(self, input_size: Count, action_spec: BoundedTensorSpec, activation: Activation = identity,
                 projection_output_init_gain: float = 0.3, scale_bias_initializer_value: float = 0.0,
                 state_dependent_scale: bool = False, loc_transform: Activation = torch.tanh,
                 scale_transform: Activation = F.softplus, min_scale: Positive | None = None,
                 max_scale: Positive | None = None, dist_ctor: Callable[...,
                 td.Distribution] = dist_utils.TruncatedNormal, name: str = 'TruncatedProjectionNetwork'):
        super().__init__(input_size, action_spec, None, name)
        require_vector(action_spec, name)
        self._set_layer(activation, projection_output_init_gain, scale_bias_initializer_value, state_dependent_scale)
        self._set_range(True, False, _STABLE_TANH, 'use NormalProjectionNetwork with squash_mean=False', True)
        self._loc_transform, self._scale_transform = out_of_place(loc_transform), out_of_place(scale_transform)
        self._limits = None if min_scale is None and max_scale is None else (min_scale, max_scale)
        self._dist_ctor = dist_ctor

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a distribution over actions."""
        a, b = self._project(inputs)
        scale = self._scale_transform(b)
        if self._limits is not None:
            scale = scale.clamp(*self._limits)
        loc = torch.addcmul(self._middle, self._half, self._loc_transform(a))
        return self._dist_ctor(loc=loc, scale=scale, lower_bound=self._middle - self._half,
                               upper_bound=self._middle + self._half), state


@configurable
class OnehotCategoricalProjectionNetwork(Network):
    """One-hot actions with gradients through samples.

    Args:
        input_size: number of inputs.
        action_spec: spec of a one-hot vector: shape ``(N,)``, bounds 0 and 1. Or the spec of a category, of shape
            ``(1,)`` with N values from its lower to its upper bound; the output is one-hot then, too.
        logits_init_output_factor: approximate standard deviation of the initial logits.
        mode: gradient estimator of samples: 'plain' (none), 'st' (straight-through, the gradient of the probabilities)
            or 'st-gumbel' (the gradient of a Gumbel softmax; also called 'gumbel').
        gumbel_temperature: temperature of the Gumbel softmax.
        name: name of the network.

    Raises:
        SpecError: ``action_spec`` does not describe a one-hot vector or a category.
        ValueError: ``mode`` is unknown.
    """

    def __init__(self, input_size: Count, action_spec: BoundedTensorSpec, logits_init_output_factor: float = 0.1,
                 mode: Literal['plain', 'st', 'gumbel', 'st-gumbel'] = 'st', gumbel_temperature: Positive = 1.0,
                 name: str = 'OnehotCategoricalProjectionNetwork'):
        size = _num_one_hot(action_spec)
        if not size:
            raise SpecError(f'{name}: expected the spec of a one-hot vector, of shape (N,) with bounds 0 and 1, or of '
                            f'a category, of shape (1,) with integer bounds, found {action_spec}')
        gumbel = partial(dist_utils.OneHotCategoricalGumbelSoftmax, hard_sample=True, tau=gumbel_temperature)
        ctors: dict[str, Callable[..., td.Distribution]] = {
            'plain': partial(td.OneHotCategorical, validate_args=False),
            'st': dist_utils.OneHotCategoricalStraightThrough, 'gumbel': gumbel, 'st-gumbel': gumbel}
        super().__init__(TensorSpec((input_size, )), (), name)
        self._projection_layer = FC(input_size, size, kernel_init_gain=logits_init_output_factor)
        self._dist_ctor = ctors[mode]

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a distribution over one-hot vectors."""
        return self._dist_ctor(logits=self._projection_layer(inputs)), state


def _num_one_hot(spec: Any) -> int:
    """Return the number of categories of a one-hot vector or of a category of shape ``(1,)``; 0 for other specs."""
    if not isinstance(spec, BoundedTensorSpec) or spec.ndim != 1:
        return 0
    if spec.numel == 1:
        low, high = float(spec.minimum.min()), float(spec.maximum.max())
        return int(high - low) + 1 if abs(low) + abs(high) < 2**31 and low == int(low) and high == int(high) else 0
    return 0 if (spec.minimum != 0).any() or (spec.maximum != 1).any() else spec.numel


@configurable
class MixtureProjectionNetwork(Network):
    """Mixture of ``num_components`` distributions of the same family.

    Args:
        input_size: number of inputs.
        action_spec: spec of the action.
        num_components: number of components.
        component_ctor: creates the head of the components; called with ``input_size``, ``action_spec`` and
            ``parallelism=num_components``.
        mixture_ctor: creates the head of the mixture weights; called with ``input_size`` and the spec of an integer
            below ``num_components``.
        name: name of the network.
    """

    def __init__(self, input_size: Count, action_spec: TensorSpec, num_components: Count,
                 component_ctor: Callable[..., Network],
                 mixture_ctor: Callable[..., Network] = CategoricalProjectionNetwork, name: str = 'mix_proj_net'):
        super().__init__(TensorSpec((input_size, )), (), name)
        self.num_components = num_components
        self._components = component_ctor(input_size, action_spec, parallelism=num_components)
        self._mixture = mixture_ctor(input_size, BoundedTensorSpec((), torch.int64, 0, num_components - 1))

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a ``MixtureSameFamily``."""
        weights, _ = self._mixture(inputs)
        components, _ = self._components(inputs)
        return td.MixtureSameFamily(weights, components, validate_args=False), state


@configurable
class NestedProjectionNetwork(Network):
    """Nest of heads for a nest of actions, which may mix discrete and continuous ones.

    The output is a nest of distributions, the state a nest of the states of the heads (``()`` if none is recurrent).

    Args:
        input_size: number of inputs.
        action_spec: nest of action specs.
        discrete_projection_net_ctor: creates a head of a discrete action; called with ``input_size`` and its spec.
        continuous_projection_net_ctor: creates a head of a continuous action; called with ``input_size`` and its spec.
        name: name of the network.

    Raises:
        SpecError: a head does not fit its spec.
    """

    def __init__(self, input_size: Count, action_spec: NestedTensorSpec,
                 discrete_projection_net_ctor: Callable[..., Network] = CategoricalProjectionNetwork,
                 continuous_projection_net_ctor: Callable[..., Network] = NormalProjectionNetwork,
                 name: str = 'NestedProjectionNetwork'):
        super().__init__(TensorSpec((input_size, )), (), name)
        self._set_heads(nest.map_structure(
            lambda spec: make_projection_net(input_size, spec, discrete_projection_net_ctor,
                                             continuous_projection_net_ctor), action_spec))

    def _set_heads(self, heads: Any) -> None:
        self._heads = nn.ModuleList(nest.flatten(heads))
        self._head_list = nest.flatten(heads)
        self._structure = nest.structure(heads)
        spec = nest.map_structure(lambda head: head.state_spec, heads)
        self._has_state = bool(nest.flatten(spec))
        self._state_spec = spec if self._has_state else ()

    def forward(self, inputs: torch.Tensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map ``[B, input_size]`` to a nest of distributions."""
        if not self._has_state:
            return self._structure.unflatten([head(inputs)[0] for head in self._head_list]), state
        states = self._structure.flatten_up_to(state)
        results = [head(inputs, s) for head, s in zip(self._head_list, states)]
        return (self._structure.unflatten([result[0] for result in results]),
                self._structure.unflatten([result[1] for result in results]))

    def make_parallel(self, n: int) -> Network:
        """Create a stack of ``n`` networks like this one."""
        return StackedNestedProjectionNetwork(self, n, 'parallel_' + self._name)


class StackedNestedProjectionNetwork(NestedProjectionNetwork):
    """Stack of ``n`` nests of heads.

    Args:
        network: nest of heads to stack.
        n: number of nests.
        name: name of the network.
    """

    def __init__(self, network: NestedProjectionNetwork, n: int, name: str = 'StackedNestedProjectionNetwork'):
        Network.__init__(self, network.input_tensor_spec, (), name)
        self._parallelism = n
        self._set_heads(network._structure.unflatten([head.make_parallel(n) for head in network._head_list]))


def make_projection_net(input_size: int, action_spec: TensorSpec,
                        discrete_ctor: Callable[..., Network], continuous_ctor: Callable[..., Network]) -> Network:
    """Create the head of one action by calling ``discrete_ctor`` or ``continuous_ctor`` with its spec.

    Raises:
        SpecError: there is no constructor for the kind of action, or its head does not fit.
    """
    ctor = discrete_ctor if action_spec.is_discrete else continuous_ctor
    if ctor is None:
        kind = 'discrete' if action_spec.is_discrete else 'continuous'
        raise SpecError(f'the action {action_spec} is {kind}, but {kind}_projection_net_ctor is None')
    return ctor(input_size, action_spec)
