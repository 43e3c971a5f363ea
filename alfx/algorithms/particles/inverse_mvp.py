"""Function-space gradient of a generator, which needs the inverse of its Jacobian.

A generator f maps noise z to ``x = f(z)``. If f moves along functions of the kernel k in the space of noise, the
steepest descent of ``KL(f(z) || p)`` at ``z_i`` is minus (Ratzlaff, Bai et al. 2021, "Generative particle variational
inference via estimation of functional gradients", arXiv:2103.01291)

    phi(z_i) = 1/M sum_j [k(z'_j, z_i) s(f(z'_j)) + a J(z'_j)^-T grad_{z'_j} k(z'_j, z_i)]

with J the Jacobian of f by z. A network g of K < D inputs is extended to ``f(z) = g(z_1 .. z_K) + c z``, whose
J = [G 0] + c I has an inverse for almost any ``c``. With G_1 the first K rows of G and G_2 the others, ``J^T y = v``
separates into

    y_2 = v_2 / c,     (G_1 + c I)^T y_1 = v_1 - G_2^T v_2 / c                   (the block form)

Only K equations have to be solved: directly, or by a trained network (InverseMVPAlgorithm).
"""
from typing import Any

import torch
from torch import Tensor

from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep
from alfx.gin_utils import configurable
from alfx.layers.weights import Activation
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity


_DAMPING = 1e-8


@configurable
class InverseMVPAlgorithm(Algorithm):
    """Network that maps ``(z, v)`` to ``y = J(z)^-T v``; its user trains it to minimize ``|J^T y - v|^2``.

    Args:
        input_dim: K, number of components of z that J depends on.
        output_dim: size of v and y.
        hidden_size: width of the hidden layers.
        num_hidden_layers: number of hidden layers.
        activation: activation of the hidden layers.
        optimizer: optimizes the network.
        name: name of this algorithm.
    """

    updates_are_traceable = False

    def __init__(self, input_dim: int, output_dim: int, hidden_size: int = 100, num_hidden_layers: int = 1,
                 activation: Activation = torch.relu_, optimizer: Any = None, name: str = 'InverseMVPAlgorithm'):
        super().__init__(optimizer=optimizer, name=name)
        self._input_dim, self._output_dim = input_dim, output_dim
        self._net = EncodingNetwork([TensorSpec((input_dim, )), TensorSpec((output_dim, ))],
                                    preprocessing_combiner=NestConcat(),
                                    fc_layer_params=(hidden_size, ) * num_hidden_layers, activation=activation,
                                    last_layer_size=output_dim, last_activation=identity)

    def predict_step(self, inputs: tuple[Tensor, Tensor], state: Any = None) -> AlgStep:
        """Compute inverse products.

        Args:
            inputs: ``(z, v)``: ``z [M, K]``, or longer, of which the first K components are used; ``v [M, D]``, or
                ``[M, N, D]`` for N vectors per z.
            state: not used.

        Returns:
            ``output``: y with the shape of v, and the K components of each z.
        """
        z, vec = inputs
        z = z[:, :self._input_dim]
        if vec.ndim == 3:
            repeated = z.repeat_interleave(vec.shape[1], 0)
            return AlgStep(output=(self._net([repeated, vec.flatten(0, 1)])[0].view_as(vec), z), state=(), info=())
        return AlgStep(output=(self._net([z, vec])[0], z), state=(), info=())


def jacobian(outputs: Tensor, inputs: Tensor) -> Tensor:
    """Return ``d outputs[b, d] / d inputs[b, k]``, ``[B, D, K]``; outputs may depend only on their row of inputs."""
    size = outputs.shape[1]
    chosen = torch.eye(size, dtype=outputs.dtype, device=outputs.device).unsqueeze(1).expand(size, len(outputs), size)
    return torch.autograd.grad(outputs, inputs, grad_outputs=chosen, is_grads_batched=True)[0].transpose(0, 1)


def transposed_product(outputs: Tensor, inputs: Tensor, vec: Tensor) -> Tensor:
    """Return ``G^T vec``: ``[B, K]`` for ``vec [B, D]``, with gradients by ``vec``."""
    return torch.autograd.grad(outputs, inputs, grad_outputs=vec, create_graph=True)[0]


def solve_direct(jac: Tensor, vec: Tensor, link: float | Tensor | None, block: bool) -> Tensor:
    """Return ``J^-T v``, the least-squares solution if J has no inverse.

    Args:
        jac: G, ``[M, D, K]``; K = D without ``link``.
        vec: ``[M, N, D]``.
        link: ``c``; ``None``: J is G itself.
        block: solve K equations instead of D.

    Returns:
        Solution ``[M, N, D]``.
    """
    size, inputs = jac.shape[1:]
    if link is None:
        # Damped least squares: with ReLU the Jacobian has no inverse at some points.
        a, b = jac.double(), vec.double()
        normal = a.transpose(1, 2) @ a
        scale = normal.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=1e-30)[:, None, None]
        normal = normal + _DAMPING * scale * torch.eye(inputs, dtype=a.dtype, device=a.device)
        # J^T y = v with y = J w
        solved = torch.cholesky_solve(b.transpose(1, 2), torch.linalg.cholesky(normal))
        return (a @ solved).transpose(1, 2).to(vec.dtype)
    if not block:
        full = torch.cat([jac, jac.new_zeros(len(jac), size, size - inputs)], dim=2)
        full = full + link * torch.eye(size, dtype=jac.dtype, device=jac.device)
        return solve_direct(full, vec, None, False)
    rest = vec[..., inputs:] / link
    first = solve_direct(jac[:, :inputs] + link * torch.eye(inputs, dtype=jac.dtype, device=jac.device),
                         vec[..., :inputs] - rest @ jac[:, inputs:], None, False)
    return torch.cat([first, rest], dim=-1)
