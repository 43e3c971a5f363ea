"""Operations on nests of distributions: sampling, log-probabilities, modes, entropies, conversion to parameters.

Every function takes a nest of distributions (a single distribution is a nest too), and nests of tensors with the same
structure. ``B`` stands for the batch dimensions. The distributions and transforms are defined in
:mod:`alfx.distributions.discrete`, :mod:`alfx.distributions.continuous`, :mod:`alfx.distributions.truncated`,
:mod:`alfx.distributions.transformed` and :mod:`alfx.distributions.transforms`, and can be imported from here.
:mod:`alfx.distributions.nests` registers them as nodes of a nest; :mod:`alfx.utils.entropy_targets` holds target
entropies.
"""
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from alfx import nest, tensor_specs
from alfx.distributions.continuous import (Beta, DiagMultivariateBeta, DiagMultivariateCauchy, DiagMultivariateNormal,
                                           StableCauchy)
from alfx.distributions.discrete import (Categorical, DiagMultivariateCategorical, OneHotCategoricalGumbelSoftmax,
                                         OneHotCategoricalStraightThrough, ShiftedCategorical, categorical_from_spec,
                                         num_categories)
from alfx.distributions.nests import named_children, register
from alfx.distributions.transformed import AffineTransformedDistribution, TransformedDistribution
from alfx.distributions.transforms import (AbsTransform, AffineTransform, ExpTransform, PowerTransform,
                                           SigmoidTransform, Softclip, SoftclipTF, Softlower, SoftmaxTransform,
                                           Softplus, Softsign, Softupper, StableTanh, get_invertible)
from alfx.distributions.truncated import TruncatedCauchy, TruncatedDistribution, TruncatedNormal, TruncatedT2
from alfx.gin_utils import register_function
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.utils.entropy_targets import (calc_default_max_entropy, calc_default_target_entropy,
                                        calc_default_target_entropy_quantized, calc_uniform_log_prob)

__all__ = [
    'AbsTransform', 'AffineTransform', 'AffineTransformedDistribution', 'Beta', 'Categorical',
    'DiagMultivariateBeta', 'DiagMultivariateCategorical', 'DiagMultivariateCauchy', 'DiagMultivariateNormal',
    'DistributionSpec', 'ExpTransform', 'OneHotCategoricalGumbelSoftmax', 'OneHotCategoricalStraightThrough',
    'PowerTransform', 'ShiftedCategorical', 'SigmoidTransform', 'Softclip', 'SoftclipTF', 'Softlower',
    'SoftmaxTransform', 'Softplus', 'Softsign', 'Softupper', 'StableCauchy', 'StableTanh', 'TransformedDistribution',
    'TruncatedCauchy', 'TruncatedDistribution', 'TruncatedNormal', 'TruncatedT2', 'calc_default_max_entropy',
    'calc_default_target_entropy', 'calc_default_target_entropy_quantized', 'calc_uniform_log_prob',
    'categorical_from_spec', 'compute_entropy', 'compute_log_probability', 'distributions_to_params',
    'entropy_with_fallback', 'epsilon_greedy_sample', 'estimated_entropy', 'extract_distribution_parameters',
    'extract_spec', 'get_base_dist', 'get_invertible', 'get_mode', 'get_rmode', 'num_categories',
    'params_to_distributions', 'register', 'rsample_action_distribution', 'sample_action_distribution',
    'to_distribution_param_spec',
]

NestedDistribution = Any
"""A nest whose leaves are distributions."""


# Parameters and specs ---------------------------------------------------------------------------------------------


def extract_distribution_parameters(dist: td.Distribution) -> NestedTensor:
    """Return the parameters of ``dist`` as a dict of tensors, e.g. ``{'loc': ..., 'scale': ...}``.

    Wrappers (``Independent``, transformed distributions) add no parameters; a mixture returns
    ``{'mixture': {...}, 'components': {...}}``.

    Raises:
        TypeError: the class of ``dist`` is not registered.
    """
    names, children = named_children(dist)
    if len(children) == 1 and isinstance(children[0], td.Distribution):
        return extract_distribution_parameters(children[0])
    return {name: extract_distribution_parameters(child) if isinstance(child, td.Distribution) else child
            for name, child in zip(names, children)}


def _leaves_in_order(dist: td.Distribution, params: NestedTensor) -> list[Any]:
    """Return the leaves of ``params`` in the order in which ``dist`` visits its parameters."""
    names, children = named_children(dist)
    if len(children) == 1 and isinstance(children[0], td.Distribution):
        return _leaves_in_order(children[0], params)
    if not isinstance(params, dict) or set(params) != set(names):
        found = sorted(params) if isinstance(params, dict) else type(params).__name__
        raise ValueError(f'parameters of {type(dist).__name__}: expected a dict with {sorted(names)}, found {found}')
    leaves: list[Any] = []
    for name, child in zip(names, children):
        leaves += _leaves_in_order(child, params[name]) if isinstance(child, td.Distribution) else [params[name]]
    return leaves


class DistributionSpec:
    """Specification of a distribution: a builder and the specs of its parameters.

    Args:
        builder: function that maps parameters to the distribution.
        input_params_spec: nest of specs of the parameters.
    """

    def __init__(self, builder: Callable[[NestedTensor], td.Distribution], input_params_spec: NestedTensorSpec):
        self.builder = builder
        self.input_params_spec = input_params_spec

    def build_distribution(self, input_params: NestedTensor) -> td.Distribution:
        """Build the distribution with the parameters ``input_params``.

        Raises:
            ValueError: ``input_params`` does not have the structure of ``input_params_spec``.
        """
        nest.assert_same_structure(self.input_params_spec, input_params)
        return self.builder(input_params)

    @classmethod
    def from_distribution(cls, dist: td.Distribution, from_dim: int = 0) -> 'DistributionSpec':
        """Create the spec of ``dist``, whose parameters have ``from_dim`` batch dimensions."""
        template = tensor_specs.extract_spec(dist, from_dim)
        return cls(lambda params: params_to_distributions(params, template), extract_distribution_parameters(template))


def extract_spec(nests: NestedTensor | NestedDistribution, from_dim: int = 1) -> NestedTensorSpec:
    """Return the spec of a nest of tensors and distributions: the same nest with specs instead of tensors.

    A distribution becomes the same distribution with specs as parameters. Every function that takes a nest of specs
    accepts such a spec.
    """
    return tensor_specs.extract_spec(nests, from_dim)


def distributions_to_params(nests: NestedDistribution) -> NestedTensor:
    """Replace each distribution by its :func:`extract_distribution_parameters`; tensors are unchanged."""
    return nest.map_structure(
        lambda x: extract_distribution_parameters(x) if isinstance(x, td.Distribution) else x, nests,
        is_leaf=nest.is_distribution)


def to_distribution_param_spec(nests: NestedTensorSpec) -> NestedTensorSpec:
    """Return the spec of the result of :func:`distributions_to_params`, from a spec with distributions."""
    return distributions_to_params(nests)


def params_to_distributions(nests: NestedTensor, nest_spec: NestedTensorSpec) -> NestedDistribution:
    """Undo :func:`distributions_to_params`.

    Args:
        nests: nest with a dict of parameters at each distribution of ``nest_spec``.
        nest_spec: result of :func:`extract_spec` for the distributions.

    Raises:
        ValueError: the structures differ.
    """
    templates = nest.flatten(nest_spec, nest.is_distribution)
    shallow = nest.structure(nest_spec, nest.is_distribution)
    built = [nest.pack_sequence_as(template, _leaves_in_order(template, params))
             if isinstance(template, td.Distribution) else params
             for template, params in zip(templates, shallow.flatten_up_to(nests))]
    return shallow.unflatten(built)


# Sampling, log-probability, entropy ----------------------------------------------------------------------------------


def _flatten(distributions: NestedDistribution) -> list[Any]:
    return nest.flatten(distributions, nest.is_distribution)


def _total(values: list[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])


def compute_entropy(distributions: NestedDistribution) -> Tensor:
    """Entropy in nats, summed over the nest: ``[B]``.

    Raises:
        NotImplementedError: a distribution has no entropy in closed form (a squashed normal, a mixture); see
            :func:`entropy_with_fallback`.
    """
    return _total([dist.entropy() for dist in _flatten(distributions)])


def compute_log_probability(distributions: NestedDistribution, actions: NestedTensor) -> Tensor:
    """Log-probability of ``actions``, summed over the nest: ``[B]``.

    Args:
        distributions: nest of distributions of batch shape ``[B]``.
        actions: nest of tensors of the same structure, ``[B, *event_shape]``. If a tensor is the last sample that a
            squashed distribution returned, the squashing is not inverted.

    Raises:
        ValueError: the structures differ.
    """
    if isinstance(distributions, td.Distribution):
        return distributions.log_prob(actions)
    tree = nest.structure(distributions, nest.is_distribution)
    if tree != nest.structure(actions):
        raise ValueError(f'distributions and actions differ in structure: {tree} against {nest.structure(actions)}')
    return _total([dist.log_prob(action) for dist, action in zip(_flatten(distributions), nest.flatten(actions))])


def compute_kl(before: NestedDistribution, after: NestedDistribution) -> Tensor:
    """Kullback-Leibler divergence ``KL(before || after)`` in nats, summed over the nest: ``[B]``.

    Without a closed form (mixtures, truncated Cauchy distributions) it is estimated from one sample of ``before``; the
    estimate and its gradient with respect to ``after`` are unbiased. A transformation that both share, such as
    squashing, does not change it.

    Args:
        before: nest of distributions of batch shape ``[B]``.
        after: nest of distributions of the same kinds and structure.
    """
    return _total([_kl(a, b) for a, b in zip(_flatten(before), _flatten(after))])


def _kl(before: Any, after: Any) -> Tensor:
    while isinstance(before, td.TransformedDistribution):
        before, after = before.base_dist, after.base_dist
    try:
        return td.kl_divergence(before, after)
    except NotImplementedError:
        sample = before.sample()
        return before.log_prob(sample) - after.log_prob(sample)


def mask_actions(distributions: NestedDistribution, mask: NestedTensor) -> NestedDistribution:
    """Exclude invalid actions from distributions, keeping their kinds.

    Args:
        distributions: nest of distributions of batch shape ``[B]``.
        mask: ``TimeStep.action_mask``: nest of bool ``[B, ..., N]``, one for each discrete action of the nest, in its
            order; ``()`` means that all actions are valid.

    Raises:
        ValueError: the numbers of masks and discrete actions differ, or a mask does not fit its distribution.
    """
    if isinstance(mask, tuple) and mask == ():
        return distributions
    leaves, masks = _flatten(distributions), nest.flatten(mask)
    discrete = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (Categorical, DiagMultivariateCategorical))]
    if len(discrete) != len(masks):
        raise ValueError(f'found {len(masks)} action masks for {len(discrete)} discrete actions; expected one for each')
    for i, own in zip(discrete, masks):
        leaves[i] = _masked(leaves[i], own)
    return nest.unflatten(nest.structure(distributions, nest.is_distribution), leaves)


def _masked(dist: Any, mask: Tensor) -> Any:
    logits = dist.base_dist._param if isinstance(dist, DiagMultivariateCategorical) else dist._param
    if mask.shape != logits.shape:
        raise ValueError(f'an action mask has the shape {tuple(mask.shape)}; expected the shape of the logits, '
                         f'{tuple(logits.shape)}: batch, components of the action, values of a component')
    return dist._like(logits.masked_fill(~mask, -torch.inf))


def _sample(distributions: NestedDistribution, draw: Callable[[Any], Tensor], return_log_prob: bool) -> Any:
    actions = draw(distributions) if isinstance(distributions, td.Distribution) else nest.map_structure(
        draw, distributions, is_leaf=nest.is_distribution)
    return (actions, compute_log_probability(distributions, actions)) if return_log_prob else actions


@register_function
def rsample_action_distribution(nested_distributions: NestedDistribution, return_log_prob: bool = False) -> Any:
    """Draw reparameterized samples, with gradients to the parameters.

    Args:
        nested_distributions: nest of distributions of batch shape ``[B]``.
        return_log_prob: return the log-probability too.

    Returns:
        The samples, ``[B, *event_shape]`` each; with ``return_log_prob`` a tuple of the samples and their summed
        log-probability ``[B]``, which for a squashed distribution is computed from the unsquashed sample.

    Raises:
        NotImplementedError: a distribution cannot be reparameterized.
    """
    if not return_log_prob:
        return _sample(nested_distributions, _draw_reparameterized, False)
    pairs = [_draw_with_log_prob(dist) for dist in _flatten(nested_distributions)]
    actions = nest.structure(nested_distributions, nest.is_distribution).unflatten([pair[0] for pair in pairs])
    return actions, _total([pair[1] for pair in pairs])


def _draw_with_log_prob(dist: Any) -> tuple[Tensor, Tensor]:
    if hasattr(dist, 'rsample_with_log_prob') and dist.has_rsample:
        return dist.rsample_with_log_prob()
    sample = _draw_reparameterized(dist)
    return sample, dist.log_prob(sample)


def _draw_reparameterized(dist: td.Distribution) -> Tensor:
    if not dist.has_rsample:
        raise NotImplementedError(f'{type(dist).__name__} cannot be sampled with reparameterization; use '
                                  'sample_action_distribution')
    return dist.rsample()


@register_function
def sample_action_distribution(nested_distributions: NestedDistribution, return_log_prob: bool = False) -> Any:
    """Draw samples without gradient.

    Args:
        nested_distributions: nest of distributions of batch shape ``[B]``.
        return_log_prob: return the log-probability too.

    Returns:
        The samples, ``[B, *event_shape]`` each; with ``return_log_prob`` a tuple of the samples and their summed
        log-probability ``[B]`` (with gradient), which for a squashed distribution is computed from the unsquashed
        sample.
    """
    return _sample(nested_distributions, lambda dist: dist.sample(), return_log_prob)


@register_function
def epsilon_greedy_sample(nested_distributions: NestedDistribution,
                          eps: float | Callable[[], float] = 0.1) -> NestedTensor:
    """Return the mode, or with probability ``eps`` a sample.

    The choice is independent for each element of the batch and each distribution of the nest.

    Args:
        nested_distributions: nest of distributions of batch shape ``[B]``.
        eps: probability in [0, 1] of sampling, or a scheduler of it. 0 always takes the mode, 1 always samples.

    Returns:
        Actions, nest of ``[B, *event_shape]``.
    """
    probability = eps() if callable(eps) else eps
    if probability >= 1.0:
        return sample_action_distribution(nested_distributions)

    def draw(dist: td.Distribution) -> Tensor:
        mode = get_mode(dist)
        if probability <= 0.0:
            return mode
        sample = dist.sample()
        batch_shape = dist.batch_shape
        explore = torch.rand(batch_shape, device=sample.device) < probability
        extra = sample.dim() - len(batch_shape)
        return torch.where(explore.view(*batch_shape, *[1] * extra) if extra else explore, sample, mode)

    return _sample(nested_distributions, draw, False)


def get_mode(dist: td.Distribution) -> Tensor:
    """Return the greedy action ``[B, *event_shape]``.

    It is the most probable value, with two exceptions: a transformed distribution returns the transformed mode of its
    base (for squashed normals the median), and a mixture the mode of its most probable component.

    Raises:
        NotImplementedError: the class has no known mode.
    """
    if isinstance(dist, td.TransformedDistribution):
        mode = get_mode(dist.base_dist)
        for transform in dist.transforms:
            mode = transform(mode.clone())  # not the key of a cached pair, which may lack the gradient
        return mode
    if isinstance(dist, td.MixtureSameFamily):
        return _pick_component(dist, get_mode(dist.component_distribution))
    if isinstance(dist, td.Independent) and not isinstance(dist, (DiagMultivariateCategorical, DiagMultivariateNormal)):
        return get_mode(dist.base_dist)
    if isinstance(dist, td.Bernoulli):
        return (dist.probs > 0.5).to(dist.probs.dtype)
    if isinstance(dist, (td.Normal, td.Cauchy, td.Laplace)):
        return dist.loc
    return 0.5 * (dist.low + dist.high) if isinstance(dist, td.Uniform) else dist.mode


def _pick_component(dist: td.MixtureSameFamily, values: Tensor) -> Tensor:
    """Select ``values [B, K, *event_shape]`` at the most probable of the K components."""
    index = get_mode(dist.mixture_distribution)
    event = dist.component_distribution.event_shape
    index = index.view(*index.shape, 1, *[1] * len(event)).expand(*index.shape, 1, *event)
    return values.gather(len(dist.batch_shape), index).squeeze(len(dist.batch_shape))


def get_rmode(dist: td.Distribution) -> Tensor:
    """Return the mode ``[B, *event_shape]`` with gradients to the parameters.

    Raises:
        NotImplementedError: the distribution cannot be reparameterized.
    """
    if isinstance(dist, OneHotCategoricalStraightThrough):
        return dist.rmode
    if isinstance(dist, td.OneHotCategoricalStraightThrough):
        return dist.mode + (dist.probs - dist.probs.detach())
    if not dist.has_rsample:
        raise NotImplementedError(f'the mode of {type(dist).__name__} has no gradient')
    return get_mode(dist)


def get_base_dist(dist: td.Distribution) -> td.Distribution:
    """Return the distribution inside ``Independent`` and transformations."""
    while isinstance(dist, (td.Independent, td.TransformedDistribution)):
        dist = dist.base_dist
    return dist


@register_function
def estimated_entropy(dist: td.Distribution, num_samples: int = 1,
                      check_numerics: bool = False) -> tuple[Tensor, Tensor]:
    """Estimate the entropy from samples.

    Args:
        dist: distribution of batch shape ``[B]``.
        num_samples: number of samples.
        check_numerics: raise an error if the estimate is not finite.

    Returns:
        ``(entropy, entropy_for_gradient)``, ``[B]`` each: an unbiased estimate of the entropy, and a number whose
        gradient is an unbiased estimate of the gradient of the entropy. Both are equal for a reparameterized
        distribution. Otherwise the second is ``-log_prob^2 / 2``, because ``E[grad log p] = 0`` gives
        ``grad H = -E[log p grad log p]``.

    Raises:
        FloatingPointError: the estimate is not finite and ``check_numerics`` is set.
    """
    shape = torch.Size((num_samples, ))
    sample = dist.rsample(shape) if dist.has_rsample else dist.sample(shape)
    log_prob = dist.log_prob(sample)
    entropy = -log_prob.mean(0)
    for_gradient = entropy if dist.has_rsample else -0.5 * log_prob.square().mean(0)
    if check_numerics and not bool(torch.isfinite(entropy).all()):
        raise FloatingPointError(f'the estimated entropy of {dist} is not finite: {entropy}')
    return entropy, for_gradient


def entropy_with_fallback(distributions: NestedDistribution, return_sum: bool = True) -> Any:
    """Return the entropy in closed form if available, else :func:`estimated_entropy`.

    Args:
        distributions: nest of distributions of batch shape ``[B]``.
        return_sum: sum over the nest.

    Returns:
        ``(entropy, entropy_for_gradient)``, ``[B]`` each (nests of ``[B]`` without ``return_sum``).
    """

    def compute(dist: td.Distribution) -> tuple[Tensor, Tensor]:
        if has_closed_form_entropy(dist):
            entropy = dist.entropy()
            return entropy, entropy
        return estimated_entropy(dist)

    pairs = [compute(dist) for dist in _flatten(distributions)]
    if return_sum:
        return _total([pair[0] for pair in pairs]), _total([pair[1] for pair in pairs])
    tree = nest.structure(distributions, nest.is_distribution)
    return tree.unflatten([pair[0] for pair in pairs]), tree.unflatten([pair[1] for pair in pairs])


def has_closed_form_entropy(dist: td.Distribution) -> bool:
    """Return whether ``dist.entropy()`` is implemented."""
    if isinstance(dist, AffineTransformedDistribution) or type(dist) is td.Independent:
        return has_closed_form_entropy(dist.base_dist)
    return type(dist).entropy not in _NO_ENTROPY


_NO_ENTROPY = {td.Distribution.entropy, td.TransformedDistribution.entropy, td.MixtureSameFamily.entropy}
