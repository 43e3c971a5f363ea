"""A fixed linear map from coefficients to the values of a function."""
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from alfx.gin_utils import Count, Positive, configurable


@configurable(module='alfx.layers')
class FixedDecodingLayer(nn.Module):
    """Values of a function from the coefficients of its basis functions; the layer has no trainable parameters.

    At points ``x_i`` spread evenly over [-1, 1], the value is the sum over ``k`` of the coefficient ``c_k`` times one
    of the following basis functions:

    - 'poly': ``tau^k x_i^k``;
    - 'cheb': ``tau^k T_k(x_i)``, the Chebyshev polynomials of the first kind;
    - 'rbf': ``exp(-(x_i - m_k)^2 / sigma^2)``, with centers ``m_k`` spread evenly over [-1, 1];
    - 'haar': ``tau^level h_k(x_i) / sqrt(output_size)``, the Haar functions, which are orthonormal if ``tau = 1`` and
      ``output_size`` is a power of 2. The level is 0 for the constant and ``1 + j`` for functions of width
      ``2 / 2^j``. Here ``x_i`` are the midpoints of ``output_size`` equal parts of [-1, 1].

    Args:
        input_size: number of coefficients.
        output_size: number of points.
        basis_type: 'poly', 'cheb', 'rbf' or 'haar'.
        sigma: width of the radial basis functions.
        tau: factor per order; < 1 damps and > 1 amplifies functions of higher order.

    Raises:
        ValueError: ``basis_type`` is unknown, or ``sigma`` or ``tau`` is not positive.
    """

    _weight: torch.Tensor

    def __init__(self, input_size: Count, output_size: Count,
                 basis_type: Literal['poly', 'cheb', 'rbf', 'haar'] = 'rbf', sigma: Positive = 1.0,
                 tau: Positive = 0.5):
        super().__init__()
        bases = {'poly': _poly_basis, 'cheb': _chebyshev_basis, 'haar': _haar_basis}
        if basis_type == 'rbf':
            weight = _rbf_basis(input_size, output_size, sigma)
        else:
            values, order = bases[basis_type](input_size, output_size)
            weight = values * torch.tensor(float(tau), dtype=torch.float64)**order
        self.register_buffer('_weight', weight.float())

    @property
    def weight(self) -> torch.Tensor:
        """The fixed weights ``[output_size, input_size]``."""
        return self._weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map coefficients ``[B, input_size]`` to values ``[B, output_size]``."""
        return F.linear(inputs, self._weight)


def _points(count: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, count, dtype=torch.float64)


def _rbf_basis(input_size: int, output_size: int, sigma: float) -> torch.Tensor:
    distance = _points(output_size)[:, None] - _points(input_size)[None, :]
    return torch.exp(-distance.square() / sigma**2)


def _poly_basis(input_size: int, output_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.arange(input_size)
    return _points(output_size)[:, None]**order[None, :], order


def _chebyshev_basis(input_size: int, output_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.arange(input_size)
    return torch.cos(order[None, :] * torch.acos(_points(output_size))[:, None]), order


def _haar_basis(input_size: int, output_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    t = (torch.arange(output_size, dtype=torch.float64) + 0.5) / output_size
    columns, levels = [torch.ones_like(t)], [0]
    for k in range(1, input_size):
        j = k.bit_length() - 1
        phase = t * 2**j - (k - 2**j)
        up, down = (phase >= 0) & (phase < 0.5), (phase >= 0.5) & (phase < 1)
        columns.append(2**(j / 2) * (up.double() - down.double()))
        levels.append(1 + j)
    return torch.stack(columns, dim=1) / output_size**0.5, torch.tensor(levels)
