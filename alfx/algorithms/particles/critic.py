"""The critic of 'minmax': a network that learns the direction in which particles should move.

Among all functions f it maximises what a step along f gains on the way to the target distribution p, with s = grad log
p (Hu et al. 2018, "Stein neural sampler", arXiv:1810.03545):

    E[s(x)^T f(x) + a tr(grad f(x))] - c E|f(x)|^2

whose maximum, for x distributed as q, is ``f = (s - a grad log q) / (2 c)``. This has slopes as steep as q is narrow,
while a network has such as its inputs are about 1 apart. So the network g sees points with mean m and standard
deviation d as ``u = (x - m) / d``, and ``f(x) = g(u) / d``: the maximum is the same, and that of g is one for points of
variance 1. Without this the posterior of a regression with 50 samples is missed by its whole covariance.
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
"""How far the mean and the standard deviation move at an update towards those of its points."""


@configurable
class CriticAlgorithm(Algorithm):
    """A network with an optimizer of its own, from points to directions.

    Args:
        input_tensor_spec: spec of the input, a vector.
        output_dim: number of outputs; ``None``: as many as inputs.
        hidden_layers: sizes of the hidden layers.
        activation: activation of the hidden layers; that of ``use_relu_mlp`` is ReLU.
        net: the network; ``None`` for fully connected layers.
        use_relu_mlp: use a :class:`~alfx.networks.relu_mlp.ReluMLP`, whose trace is computed exactly. Of another
            network it is estimated with one random vector for each point (Hutchinson 1990).
        use_bn: whether hidden layers use batch norm; not with ``use_relu_mlp``.
        optimizer: trains the network.
        name: name of this algorithm.

    Raises:
        ValueError: ``use_relu_mlp`` with another activation or with batch norm, or an ``output_dim`` that is not the
            number of inputs.
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
                raise ValueError(f'{name}: use_relu_mlp=True is for ReLU without batch norm, found activation='
                                 f'{activation} and use_bn={use_bn}')
            net = ReluMLP(input_tensor_spec, size, hidden_layers)
        elif net is None:
            net = EncodingNetwork(input_tensor_spec, fc_layer_params=tuple(hidden_layers), activation=activation,
                                  use_fc_bn=use_bn, last_layer_size=size, last_activation=identity)
        self._net = net
        inputs = input_tensor_spec.numel
        if inputs != size:
            raise ValueError(f'{name}: a direction has as many components as a point, found output_dim = {size} of '
                             f'{inputs} inputs')
        self.register_buffer('_center', torch.zeros(inputs))
        self.register_buffer('_spread', torch.ones(inputs))
        self.register_buffer('_has_seen_points', torch.zeros((), dtype=torch.bool))

    def _follow(self, points: Tensor) -> None:
        """Let the mean and the standard deviation of the points follow ``points`` ``[B, D]``, which move."""
        center, spread = points.mean(0), points.std(0, unbiased=False)
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))  # as of a single point
        rate = torch.where(self._has_seen_points, _FOLLOWING, 1.0)
        self._center += rate * (center - self._center)
        self._spread += rate * (spread - self._spread)
        self._has_seen_points.fill_(True)

    def predict_step(self, inputs: Tensor, state: Any = None, requires_jac_diag: bool = False) -> AlgStep:
        """The direction at each point.

        Args:
            inputs: ``[B, D]``.
            state: not used.
            requires_jac_diag: the output is then a pair with the diagonal of the Jacobian, ``[B, D]``.

        Returns:
            ``output`` ``[B, D]``.

        Raises:
            ValueError: the diagonal is required of another network than a ``ReluMLP``.
        """
        if not requires_jac_diag:
            return AlgStep(output=self._net(self._standardized(inputs))[0] / self._spread, state=(), info=())
        if not isinstance(self._net, ReluMLP):
            raise ValueError(f'{self._name}: the diagonal of the Jacobian is known of a ReluMLP alone; set '
                             'use_relu_mlp=True')
        output, diagonal = self._net.forward(self._standardized(inputs), requires_jac_diag=True)[0]
        return AlgStep(output=(output / self._spread, diagonal / self._spread.square()), state=(), info=())

    def _standardized(self, points: Tensor) -> Tensor:
        return (points - self._center) / self._spread

    def stein_loss(self, points: Tensor, score: Tensor, weight: float, l2_weight: float) -> Tensor:
        """What to minimise; see the module.

        Args:
            points: ``[B, D]``.
            score: gradient of the log density there, ``[B, D]``.
            weight: ``a``.
            l2_weight: ``c``.

        Returns:
            ``[B]``.
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
        """One step of its optimizer; returns the loss before it, a scalar. See :meth:`stein_loss` for the arguments."""
        with torch.no_grad():
            self._follow(points)
        loss_info, _ = self.update_with_gradient(LossInfo(loss=self.stein_loss(points, score, weight, l2_weight)))
        return loss_info.loss.detach()
