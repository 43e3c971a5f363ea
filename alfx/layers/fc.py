"""Fully connected layers: single ones, and ``n`` of them as one batched product."""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from alfx.gin_utils import Count, Fraction, configurable, takes_arguments_of
from alfx.layers import weights as w
from alfx.layers.activations import is_elementwise
from alfx.layers.elementwise import Dropout
from alfx.layers.sequential import NaiveParallelLayer, stacked_activation
from alfx.utils.math_ops import identity


class _FullyConnected(nn.Module):
    """Base class of a fully connected layer and of a stack of them.

    Attributes:
        input_size: number of inputs of a layer.
        output_size: number of outputs of a layer.
    """

    weight: nn.Parameter

    def __init__(self, input_size: int, output_size: int):
        super().__init__()
        self.input_size, self.output_size = input_size, output_size

    def project_parameters(self) -> None:
        """Divide the weights of each output by their norm."""
        w.project_rows(self.weight)


@configurable(module='alfx.layers')
class FC(_FullyConnected):
    """``activation(norm(W x + b))``, or with ``norm_position = 'after'`` ``norm(activation(W x + b))``.

    Args:
        input_size: number of inputs.
        output_size: number of outputs.
        activation: applied to the result; may be an in-place function.
        use_bias: add a bias.
        use_bn: use batch norm before the activation.
        use_ln: use layer norm before the activation; not with ``use_bn``.
        bn_ctor: creates the batch norm from the number of features.
        kernel_initializer: initializes the weights in place; ``None`` uses
            :func:`~alfx.initializers.variance_scaling_init`.
        kernel_init_gain: ``gain`` of that initializer.
        bias_init_value: initial bias.
        bias_initializer: initializes the bias in place; overrides ``bias_init_value``.
        use_torch_init: initialize weights and bias like ``torch.nn.Linear`` instead.
        weight_opt_args: optimizer arguments of the weights, stored as ``weight.opt_args``.
        bias_opt_args: optimizer arguments of the bias, stored as ``bias.opt_args``.
        norm: creates another norm from the number of features, such as :class:`~alfx.norm_layers.BatchNorm`; not with
            ``use_bn`` or ``use_ln``.
        norm_position: apply ``norm`` ``'before'`` or ``'after'`` the activation.
        dropout: rate of :class:`~alfx.layers.Dropout` of ``W x + b``, before norm and activation.
        unit_weights: keep the weights of each output at norm 1: initially and after each update that trains them. The
            layer then has no bias if ``norm`` follows directly.

    Raises:
        ValueError: two arguments cannot be used together.
    """

    def __init__(self, input_size: Count, output_size: Count, activation: w.Activation = identity,
                 use_bias: bool = True, use_bn: bool = False, use_ln: bool = False,
                 bn_ctor: Callable[[int], nn.Module] = nn.BatchNorm1d, kernel_initializer: w.Initializer | None = None,
                 kernel_init_gain: float = 1.0, bias_init_value: float = 0.0,
                 bias_initializer: w.Initializer | None = None, use_torch_init: bool = False,
                 weight_opt_args: dict | None = None, bias_opt_args: dict | None = None, norm: w.Norm | None = None,
                 norm_position: w.NormPosition = 'before', dropout: Fraction = 0.0, unit_weights: bool = False):
        super().__init__(input_size, output_size)
        w.check_init_arguments('FC', use_torch_init, kernel_initializer, use_bn, use_ln, norm)
        self._config: dict[str, Any] = dict(
            activation=activation, use_bias=use_bias, use_bn=use_bn, use_ln=use_ln, bn_ctor=bn_ctor,
            kernel_initializer=kernel_initializer, kernel_init_gain=kernel_init_gain,
            bias_init_value=bias_init_value, bias_initializer=bias_initializer, use_torch_init=use_torch_init,
            weight_opt_args=weight_opt_args, bias_opt_args=bias_opt_args, norm=norm, norm_position=norm_position,
            dropout=dropout, unit_weights=unit_weights)
        self._activation = activation
        self.weight = w.parameter((output_size, input_size), weight_opt_args)
        use_bias = use_bias and not (unit_weights and norm is not None and norm_position == 'before')
        self.bias = w.parameter((output_size, ), bias_opt_args) if use_bias else None
        self.projects_parameters = unit_weights
        self._norm: Any = w.fc_norm(output_size, None, use_bn, use_ln, bn_ctor, norm)
        self._dropout = Dropout(dropout) if dropout else None
        self._has_norm = self._norm is not None
        self._normalizes_last = self._has_norm and norm_position == 'after'
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial weights."""
        c = self._config
        w.init_kernel(self.weight, c['kernel_initializer'], c['kernel_init_gain'], self._activation,
                      c['use_torch_init'])
        if self.bias is not None:
            w.init_bias(self.bias, self.weight, c['bias_initializer'], c['bias_init_value'], c['use_torch_init'])
        if self.projects_parameters:
            self.project_parameters()
        w.reset_norm(self._norm)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[B, ..., input_size]`` to ``[B, ..., output_size]``."""
        y = F.linear(inputs, self.weight, self.bias)
        if self._dropout is not None:
            y = self._dropout(y)
        if self._normalizes_last:
            return self._normalize(self._activation(y))
        if self._has_norm:
            y = self._normalize(y)
        return self._activation(y)

    def _normalize(self, y: torch.Tensor) -> torch.Tensor:
        return self._norm(y) if y.ndim == 2 or not self._config['use_bn'] else self._norm(y.flatten(0, -2)).view_as(y)

    def make_parallel(self, n: int) -> 'ParallelFC':
        """Create ``n`` layers like this one, with separate initial weights."""
        return ParallelFC(self.input_size, self.output_size, n, **self._config)

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` shows."""
        return f'{self.input_size}, {self.output_size}, bias={self.bias is not None}'


_LARGE_BATCH = 32


@configurable(module='alfx.layers')
class ParallelFC(_FullyConnected):
    """``n`` fully connected layers computed as one batched product; ``weight [n, out, in]``, ``bias [n, out]``.

    Each layer is initialized separately, so its weights have the distribution of a single :class:`FC`.

    Args:
        n: number of layers.
        kwargs: arguments of :class:`FC`.
    """

    @takes_arguments_of(FC, after={'n': 'output_size', 'bias_initializer': 'use_torch_init'})
    def __init__(self, input_size: Count, output_size: Count, n: Count, activation: w.Activation, use_bias: bool,
                 use_bn: bool, use_ln: bool, use_torch_init: bool, norm: w.Norm | None, norm_position: w.NormPosition,
                 dropout: Fraction, unit_weights: bool, **kwargs: Any):
        super().__init__(input_size, output_size)
        w.check_init_arguments('ParallelFC', use_torch_init, kwargs['kernel_initializer'], use_bn, use_ln, norm)
        self._init_kernel = (kwargs['kernel_initializer'], kwargs['kernel_init_gain'], activation, use_torch_init)
        self._init_bias = (kwargs['bias_initializer'], kwargs['bias_init_value'], use_torch_init)
        self._n = n
        # An elementwise activation is applied to the product itself, in place if it is an in-place function. Applied in
        # place to a view of the product, it would make the backward pass copy everything.
        has_norm = use_bn or use_ln or norm is not None
        normalizes_first = has_norm and norm_position == 'before'
        is_direct = is_elementwise(activation) and not normalizes_first and not dropout
        self._product_activation = activation if is_direct else identity
        self._activation = stacked_activation(activation, n) if self._product_activation is identity else identity
        self._dropout = Dropout(dropout) if dropout else None
        self._use_bn, self._has_own_norm = use_bn, norm is not None
        self._normalizes_first, self._normalizes_last = normalizes_first, has_norm and not normalizes_first
        self.weight = w.parameter((n, output_size, input_size), kwargs['weight_opt_args'])
        use_bias = use_bias and not (unit_weights and norm is not None and norm_position == 'before')
        self.bias = w.parameter((n, output_size), kwargs['bias_opt_args']) if use_bias else None
        self.projects_parameters = unit_weights
        self._norm: Any = w.fc_norm(output_size, n, use_bn, use_ln, kwargs['bn_ctor'], norm)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new initial weights."""
        for i in range(self._n):
            w.init_kernel(self.weight[i], *self._init_kernel)
            if self.bias is not None:
                w.init_bias(self.bias[i], self.weight[i], *self._init_bias)
        if self.projects_parameters:
            self.project_parameters()
        w.reset_norm(self._norm)

    def forward(self, inputs: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Map ``[B, n, input_size]``, or ``[B, input_size]`` shared by all layers, to ``[B, n, output_size]``.

        Args:
            inputs: see above.
            first: compute only the first ``first`` layers; it replaces n in all shapes. Not with batch norm or
                ``norm``.

        Raises:
            ValueError: the input has another shape.
        """
        n = self._n
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if first is not None:
            n, weight, bias = first, weight.narrow(0, 0, first), None if bias is None else bias.narrow(0, 0, first)
        if inputs.ndim != 2 and (inputs.ndim != 3 or inputs.shape[1] != n):
            raise ValueError(f'ParallelFC: expected [B, {self.input_size}] or [B, {n}, {self.input_size}], '
                             f'found {list(inputs.shape)}')
        batch_last = torch.is_grad_enabled() or inputs.shape[0] >= _LARGE_BATCH
        y = (self._batch_last_product if batch_last else self._product)(inputs, weight, bias)
        if self._dropout is not None:
            y = self._dropout(y)
        if self._normalizes_first:
            y = self._normalize(y, first)
        y = self._activation(y)
        return self._normalize(y, first) if self._normalizes_last else y

    def _normalize(self, y: torch.Tensor, first: int | None) -> torch.Tensor:
        if self._use_bn:
            return self._norm(y.reshape(-1, self._n * self.output_size)).view(y.shape)
        return self._norm(y) if self._has_own_norm else self._norm(y, first)

    def first_layers(self, k: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the first layers, see :func:`alfx.layers.sequential.first_layers`; ``None`` with batch norm or
        ``norm``.

        The statistics of batch norm are those of all layers.
        """
        is_separable = not (self._use_bn or self._has_own_norm or isinstance(self._activation, NaiveParallelLayer))
        return partial(self, first=k) if is_separable else None

    def _product(self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        activation = self._product_activation
        if inputs.ndim == 2:
            flat_bias = None if bias is None else bias.flatten()
            y = F.linear(inputs, weight.flatten(0, 1), flat_bias)
            return activation(y).view(-1, *weight.shape[:2])
        x, kernel = inputs.transpose(0, 1), weight.transpose(1, 2)
        y = torch.bmm(x, kernel) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, kernel)
        return activation(y).transpose(0, 1)

    def _batch_last_product(self, inputs: torch.Tensor, weight: torch.Tensor,
                            bias: torch.Tensor | None) -> torch.Tensor:
        """Compute :meth:`_product` with the batch as the last dimension in memory, also between consecutive layers.

        The gradient of the weights then has the layout of the weights. Otherwise autograd copies it, which at a batch
        size of 8 costs as much as everything else. Without gradients this version is faster for large batches.
        """
        if inputs.ndim == 2:
            kernel, x = weight.flatten(0, 1), inputs.t()
            y = torch.mm(kernel, x) if bias is None else torch.addmm(bias.reshape(-1, 1), kernel, x)
            return self._product_activation(y).view(*weight.shape[:2], -1).permute(2, 0, 1)
        x = inputs.permute(1, 2, 0)
        y = torch.bmm(weight, x) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, x)
        return self._product_activation(y).permute(2, 0, 1)

    def extra_repr(self) -> str:
        """Return the arguments that ``print`` shows."""
        return f'{self.input_size}, {self.output_size}, n={self._n}, bias={self.bias is not None}'
