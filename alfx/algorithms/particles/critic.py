"""Critic of 'minmax': a network that learns the direction in which particles should move.

The critic f maximizes the progress of a step along f towards the target distribution p, with s = grad log p (Hu et al.
2018, "Stein neural sampler", arXiv:1810.03545):

    E[s(x)^T f(x) + a tr(grad f(x))] - c E|f(x)|^2

For x distributed as q the maximum is ``f = (s - a grad log q) / (2 c)``. Its slopes get steeper the narrower q is,
whereas the slopes of a network suit inputs that are about 1 apart. The network g therefore receives points with mean m
and standard deviation d as ``u = (x - m) / d``, and ``f(x) = g(u) / d``. The maximum is the same, and g is fitted to
points of variance 1. Without this, the covariance of the posterior of a regression with 50 samples is completely wrong.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep, LossInfo
from alfx.gin_utils import configurable
from alfx.layers.weights import Activation
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.networks.relu_mlp import ReluMLP
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity


_FOLLOWING = 0.1
"""Step size of the running mean and standard deviation towards those of the points of an update."""


@configurable
class CriticAlgorithm(Algorithm):
    """Network with its own optimizer that maps points to directions.

    Args:
        input_tensor_spec: spec of the input, a vector.
        output_dim: number of outputs; ``None``: the number of inputs.
        hidden_layers: sizes of the hidden layers.
        activation: activation of the hidden layers; must be ReLU with ``use_relu_mlp``.
        net: the network; ``None`` for fully connected layers.
        use_relu_mlp: use a :class:`~alfx.networks.relu_mlp.ReluMLP`, whose trace is computed exactly. For other
            networks the trace is estimated with one random vector per point (Hutchinson 1990).
        use_bn: use batch norm in the hidden layers; not with ``use_relu_mlp``.
        optimizer: optimizes the network.
        name: name of this algorithm.

    Raises:
        ValueError: ``use_relu_mlp`` with another activation or with batch norm, or ``output_dim`` is not the number of
            inputs.
    """

    updates_are_traceable = False

    _center: Tensor
    _spread: Tensor
    _has_seen_points: Tensor

    def __init__(self, input_tensor_spec: TensorSpec, output_dim: int | None = None,
                 hidden_layers: Sequence[int] = (3, 3), activation: Activation = torch.relu_,
                 net: Network | None = None, use_relu_mlp: bool = False, use_bn: bool = True, optimizer: Any = None,
                 name: str = 'CriticAlgorithm'):
        super().__init__(optimizer=optimizer, name=name)
        size = input_tensor_spec.numel if output_dim is None else output_dim
        if net is None and use_relu_mlp:
            if activation not in (torch.relu, torch.relu_) or use_bn:
                raise ValueError(f'{name}: use_relu_mlp=True needs ReLU without batch norm, found activation='
                                 f'{activation} and use_bn={use_bn}')
            net = ReluMLP(input_tensor_spec, size, hidden_layers)
        elif net is None:
            net = EncodingNetwork(input_tensor_spec, fc_layer_params=tuple(hidden_layers), activation=activation,
                                  use_fc_bn=use_bn, last_layer_size=size, last_activation=identity)
        self._net = net
        inputs = input_tensor_spec.numel
        if inputs != size:
            raise ValueError(f'{name}: a direction has as many components as a point, found output_dim = {size} and '
                             f'{inputs} inputs')
        self.register_buffer('_center', torch.zeros(inputs))
        self.register_buffer('_spread', torch.ones(inputs))
        self.register_buffer('_has_seen_points', torch.zeros((), dtype=torch.bool))

    def _follow(self, points: Tensor) -> None:
        """Update the running mean and standard deviation with ``points`` ``[B, D]``."""
        center, spread = points.mean(0), points.std(0, unbiased=False)
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))  # for example with a single point
        rate = torch.where(self._has_seen_points, _FOLLOWING, 1.0)
        self._center += rate * (center - self._center)
        self._spread += rate * (spread - self._spread)
        self._has_seen_points.fill_(True)

    def predict_step(self, inputs: Tensor, state: Any = None, requires_jac_diag: bool = False) -> AlgStep:
        """Return the direction at each point.

        Args:
            inputs: ``[B, D]``.
            state: not used.
            requires_jac_diag: also return the diagonal of the Jacobian, ``[B, D]``, as second part of the output.

        Returns:
            ``output`` ``[B, D]``.

        Raises:
            ValueError: the diagonal is required, but the network is not a ``ReluMLP``.
        """
        if not requires_jac_diag:
            return AlgStep(output=self._net(self._standardized(inputs))[0] / self._spread, state=(), info=())
        if not isinstance(self._net, ReluMLP):
            raise ValueError(f'{self._name}: only a ReluMLP provides the diagonal of the Jacobian; set '
                             'use_relu_mlp=True')
        output, diagonal = self._net.forward(self._standardized(inputs), requires_jac_diag=True)[0]
        return AlgStep(output=(output / self._spread, diagonal / self._spread.square()), state=(), info=())

    def _standardized(self, points: Tensor) -> Tensor:
        return (points - self._center) / self._spread

    def stein_loss(self, points: Tensor, score: Tensor, weight: float, l2_weight: float) -> Tensor:
        """Return the loss of the critic; see the module docstring.

        Args:
            points: ``[B, D]``.
            score: gradient of the log density at the points, ``[B, D]``.
            weight: ``a``.
            l2_weight: ``c``.

        Returns:
            Loss ``[B]``.
        """
        points = points.detach()
        if isinstance(self._net, ReluMLP):
            directions, diagonal = self.predict_step(points, requires_jac_diag=True).output
            trace = diagonal.sum(-1)
        else:
            points.requires_grad_()
            directions = self.predict_step(points).output
            probe = torch.randn_like(points)
            trace = (torch.autograd.grad((directions * probe).sum(), points, create_graph=True)[0] * probe).sum(-1)
        gain = (score.detach() * directions).sum(-1) + weight * trace
        return l2_weight * directions.square().sum(-1) - gain

    def improve(self, points: Tensor, score: Tensor, weight: float, l2_weight: float) -> Tensor:
        """Take one optimizer step, and return the loss before it, a scalar; arguments as in :meth:`stein_loss`."""
        with torch.no_grad():
            self._follow(points)
        loss_info, _ = self.update_with_gradient(LossInfo(loss=self.stein_loss(points, score, weight, l2_weight)))
        return loss_info.loss.detach()
