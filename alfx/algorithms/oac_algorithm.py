"""Optimistic actor-critic (Ciosek et al. 2019, arXiv:1910.12807): soft actor-critic that explores by an upper bound.

In the rollout the mean of the policy is shifted, before squashing, in the direction in which an upper confidence bound
of Q grows fastest, as far as a bound on the KL divergence between the two policies allows. Training is the same as in
soft actor-critic. One difference from the paper: the standard deviation of Q is computed over any number of critics;
for two critics it is half of their difference, as in the paper.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.base import critic_values
from alfx.algorithms.sac.actions import ActionParts, ActionType
from alfx.algorithms.sac.states import check_normal_actor
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import TimeStep
from alfx.gin_utils import NonNegative, configurable, takes_arguments_of
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.utils import dist_utils

_ROUNDING = 4 * torch.finfo(torch.float32).eps  # rounding error of a critic, relative to its value


@configurable
class OacAlgorithm(SacAlgorithm):
    """Soft actor-critic with optimistic exploration.

    Args:
        explore: shift the mean of the policy in the rollout. Needs continuous actions, a policy that is a (squashed)
            diagonal normal, and critics that are not recurrent. ``False`` is plain ``SacAlgorithm``.
        explore_delta: bound on the KL divergence between the exploration policy and the trained policy. Larger values
            explore further.
        beta_ub: number of standard deviations of Q between its mean and its upper bound.
        kwargs: arguments of :class:`~alfx.algorithms.sac_algorithm.SacAlgorithm`, except
            ``normalize_entropy_reward``, ``reproduce_locomotion``, ``rollout_noise_correlation`` and
            ``rollout_noise_repeat``.

    Raises:
        ValueError: ``explore`` is set with an unsupported action, policy or critic, or an argument is out of range.
    """

    @takes_arguments_of(
        SacAlgorithm, without=('normalize_entropy_reward', 'reproduce_locomotion', 'rollout_noise_correlation',
                               'rollout_noise_repeat'),
        defaults={'name': 'OacAlgorithm'}, after={'explore': 'initial_log_alpha'})
    def __init__(self, action_spec: NestedTensorSpec, name: str, explore: bool = True, explore_delta: NonNegative = 6.8,
                 beta_ub: float = 4.6, **kwargs: Any):
        if explore and ActionParts(action_spec).type != ActionType.Continuous:
            raise ValueError(f'{name}.explore needs continuous actions, found {action_spec}; set explore=False')
        super().__init__(action_spec=action_spec, name=name, **kwargs)
        if explore:
            check_normal_actor(f'{name}.explore', self._actor_network)
            if self._critic_networks is not None and self._critic_networks.is_rnn:
                raise ValueError(f'{name}.explore: recurrent critics are not supported; set explore=False')
        self._explore = explore and self._critic_networks is not None
        self._explore_delta = explore_delta
        self._beta_ub = beta_ub

    def _draw_rollout_action(self, inputs: TimeStep, noise: NestedTensor, distribution: Any) -> NestedTensor:
        """Return the action ``[B, ...]`` of the exploration policy."""
        if self._explore:
            distribution = self._exploring(inputs.observation, distribution)
        return super()._draw_rollout_action(inputs, noise, distribution)

    def _exploring(self, observation: NestedTensor, distribution: Any) -> Any:
        """Return the nest of distributions ``[B]`` with shifted means."""
        policies = nest.flatten(distribution, nest.is_distribution)
        normals: list[Any] = [dist_utils.get_base_dist(policy) for policy in policies]
        with torch.enable_grad():
            means = [normal.loc.detach().requires_grad_() for normal in normals]
            action = nest.structure(distribution, nest.is_distribution).unflatten(
                [policy.forward(mean) if isinstance(policy, dist_utils.TransformedDistribution) else mean
                 for policy, mean in zip(policies, means)])
            critics, _ = self._critic_networks((observation, action))
            bound = upper_bound(critic_values.weighted_sum(critics, self._reward_weights), self._beta_ub)
            gradients = critic_values.action_gradient(bound, means)
        shifts = exploration_shift(gradients, [normal.scale.detach() for normal in normals], self._explore_delta,
                                   _ROUNDING * critics.detach().abs().amax(tuple(range(1, critics.ndim))))
        shifted = [_with_mean(policy, mean.detach() + shift) for policy, mean, shift in zip(policies, means, shifts)]
        return nest.structure(distribution, nest.is_distribution).unflatten(shifted)


def upper_bound(critics: Tensor, beta: float) -> Tensor:
    """Return ``mean + beta * standard deviation`` over n critics (section 4.1 of the paper): ``[B, n]`` to ``[B]``."""
    return critics.mean(1) + beta * (critics.var(1, unbiased=False) + 1e-12).sqrt()


def exploration_shift(gradients: Sequence[Tensor], scales: Sequence[Tensor], delta: float,
                      resolution: Tensor | float = 0.0) -> list[Tensor]:
    """Return the shift of a diagonal normal's mean that most increases a linear function within a bound on the KL.

    With the gradient g at the mean and the covariance S (Ciosek et al. 2019, proposition 1, eq. 7):

        shift = sqrt(2 delta) S g / sqrt(g' S g)

    Args:
        gradients: g, one tensor ``[B, ...]`` for each part of the action.
        scales: standard deviations, one tensor ``[B, ...]`` for each part; S is the diagonal matrix of their squares.
        delta: bound on the KL divergence of the whole action.
        resolution: ``[B]``: rounding error of the function; its square is added to g' S g. If the change of the
            function over one standard deviation, sqrt(g' S g), is smaller than its rounding error, the direction of
            its gradient is unreliable, and the shift must not go all the way to the bound.

    Returns:
        One tensor ``[B, ...]`` for each part; 0 where g is 0.
    """
    steps = [g * scale.square() for g, scale in zip(gradients, scales)]
    squares = [(g * step).reshape(len(g), -1).sum(1) for g, step in zip(gradients, steps)]
    norm = (torch.stack(squares).sum(0) + resolution**2).clamp(min=1e-20).sqrt()
    factor = (2.0 * delta)**0.5 / norm
    return [step * factor.reshape(-1, *[1] * (step.ndim - 1)) for step in steps]


def _with_mean(policy: Any, mean: Tensor) -> Any:
    """Return a (transformed) diagonal normal with the mean of the normal replaced."""
    if isinstance(policy, dist_utils.TransformedDistribution):
        return dist_utils.TransformedDistribution(_with_mean(policy.base_dist, mean), policy.transforms)
    return dist_utils.DiagMultivariateNormal(mean, policy.scale, policy.reinterpreted_batch_ndims)
