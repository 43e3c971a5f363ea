"""Short trajectories of a continuous action, which a policy can follow for several steps.

A trajectory is described by one tensor ``[B, order * n]`` for an action of n components: the action itself, then, for
higher orders, its first and second derivative. All values are scaled to [-1, 1]. A derivative of 1 moves the action
across its whole range in one step, hence the factors of 2 below (Yu et al. 2021, arXiv:2104.06521, section 4 and
appendix). Used by :mod:`alfx.algorithms.taac_algorithm`.
"""
from typing import Any

import torch
from torch import Tensor

from alfx.layers import FC
from alfx.nest.utils import NestConcat
from alfx.networks.action_specs import action_range
from alfx.networks.preprocessor_networks import PreprocessorNetwork
from alfx.tensor_specs import Nested, NestedTensorSpec, SpecError, TensorSpec


def _clipped(x: Tensor) -> Tensor:
    return x.clamp(-1.0, 1.0)


class Trajectory:
    """Trajectory of order zero, which stays at its action: ``tau = (a)``."""

    order = 1

    def action(self, tau: Tensor) -> Tensor:
        """Return the action ``[B, n]`` of ``tau [B, order * n]``."""
        return tau if self.order == 1 else tau.chunk(self.order, -1)[0]

    def extend(self, tau: Tensor) -> Tensor:
        """Advance the trajectory by one step.

        Args:
            tau: ``[B, order * n]``.

        Returns:
            A tensor of the same shape.
        """
        return tau

    def renew(self, output: Tensor, tau: Tensor) -> Tensor:
        """Start a new trajectory.

        Args:
            output: ``[B, n]``, output of a policy; clipped to [-1, 1], differentiable.
            tau: ``[B, order * n]``, the current trajectory.

        Returns:
            A tensor with the shape of ``tau``.
        """
        return _clipped(output)


class LinearTrajectory(Trajectory):
    """Trajectory of constant slope: ``tau = (a, v)``, ``a <- clip(a + 2 v)``.

    Args:
        inverse_mode: the output of the policy is the new action, from which the slope is inferred; otherwise it is the
            new slope.
    """

    order = 2

    def __init__(self, inverse_mode: bool = True):
        self._inverse_mode = inverse_mode

    def extend(self, tau: Tensor) -> Tensor:
        """Advance the trajectory by one step, with the same slope."""
        a, v = tau.chunk(2, -1)
        return torch.cat((_clipped(a + 2.0 * v), v), -1)

    def renew(self, output: Tensor, tau: Tensor) -> Tensor:
        """Start a new line."""
        a, output = tau.chunk(2, -1)[0], _clipped(output)
        if self._inverse_mode:
            return torch.cat((output, 0.5 * (output - a)), -1)
        return torch.cat((_clipped(a + 2.0 * output), output), -1)


class QuadraticTrajectory(Trajectory):
    """Trajectory of constant curvature: ``tau = (a, v, u)``, ``v <- clip(v + 2 u)``, then ``a <- clip(a + 2 v)``.

    A new trajectory starts with a slope of zero.

    Args:
        inverse_mode: the output of the policy is the new action, from which slope and curvature are inferred;
            otherwise it is the new curvature.
    """

    order = 3

    def __init__(self, inverse_mode: bool = True):
        self._inverse_mode = inverse_mode

    def extend(self, tau: Tensor) -> Tensor:
        """Advance the trajectory by one step, with the same curvature."""
        a, v, u = tau.chunk(3, -1)
        v = _clipped(v + 2.0 * u)
        return torch.cat((_clipped(a + 2.0 * v), v, u), -1)

    def renew(self, output: Tensor, tau: Tensor) -> Tensor:
        """Start a new parabola."""
        a, output = tau.chunk(3, -1)[0], _clipped(output)
        if self._inverse_mode:
            v = 0.5 * (output - a)
            return torch.cat((output, v, 0.5 * v), -1)
        v = _clipped(2.0 * output)
        return torch.cat((_clipped(a + 2.0 * v), v, output), -1)


def action_scale(action_spec: Any, owner: str) -> tuple[Tensor, Tensor]:
    """Return the center and half width of the bounds of the action, both with the shape of ``action_spec``.

    Raises:
        SpecError: the action is not one continuous tensor, or has no finite range.
    """
    if not isinstance(action_spec, TensorSpec) or not action_spec.is_continuous:
        raise SpecError(f'{owner}: expected one continuous action, found {action_spec}; discrete actions and nests of '
                        'actions cannot be repeated or extended')
    middle, half = action_range(action_spec, owner, 'its trajectories are relative to the bounds')
    if not bool((half > 0).all()):
        raise SpecError(f'{owner}: expected a range for each component of the action, found {action_spec}')
    return middle, half


def trajectory_encoder(observation_spec: NestedTensorSpec, processors: Nested, tau_spec: TensorSpec) -> FC:
    """Create a linear layer from the trajectory to the size of the processed observation."""
    processed = PreprocessorNetwork(observation_spec, processors, NestConcat(), name='actor_observation_processors')
    return FC(tau_spec.numel, processed.processed_input_tensor_spec.numel)


def choose(b: Tensor, taus: tuple[Tensor, Tensor]) -> Tensor:
    """Return the second of ``taus`` where ``b`` is 1, otherwise the first: ``[N, order * n]``."""
    return torch.where(b.bool().unsqueeze(-1), taus[1], taus[0])
