"""Optimizers for confs: those of ``torch.optim`` with clipping and schedules.

Adam and AdamW are implemented here on torch's fused kernels, because for small networks the overhead of ``torch.optim``
around those kernels is several times the arithmetic. They keep the layout of its state, so a ``state_dict`` of
``torch.optim.Adam`` can be loaded.
"""
from typing import Any

import torch

from alfx import gin_utils
from alfx.gin_utils.value_checks import Fraction, NonNegative
from alfx.optimizers.clipping import ClippingMixin, Parameters
from alfx.optimizers.foreach import ForeachRAdam, ForeachRMSprop, ForeachSGD
from alfx.optimizers.fused import FusedAdamBase


@gin_utils.configurable(module='alfx.optimizers')
class Adam(FusedAdamBase):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980, algorithm 1).

    ``weight_decay`` is an L2 penalty: ``weight_decay * parameter`` is added to the gradient after clipping.

    Args:
        params: parameters or parameter groups; may be empty, see :meth:`add_param_group`.
        lr: learning rate or scheduler.
        betas: decay rates of the first and the second moment, in ``[0, 1)``; larger values average over more steps.
        eps: added to the square root of the bias-corrected second moment.
        weight_decay: weight of the L2 penalty.
        amsgrad: use the maximum of the second moment so far (Reddi et al. 2018).
        gradient_clipping: maximum norm of a gradient; None for no clipping.
        clip_by_global_norm: clip the norm of all gradients together instead of each gradient.
        name: name of this optimizer in logs and summaries.

    Raises:
        ValueError: an argument out of range.
    """

    @gin_utils.takes_arguments_of(FusedAdamBase, defaults=dict(
        params=(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, gradient_clipping=None,
        clip_by_global_norm=False, name='Adam'))
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


@gin_utils.configurable(module='alfx.optimizers')
class AdamW(FusedAdamBase):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101).

    A step first multiplies a parameter by ``1 - lr * weight_decay``.

    Args:
        kwargs: arguments of :class:`Adam`; ``weight_decay`` defaults to 1e-2.
    """

    _decoupled_weight_decay = True

    @gin_utils.takes_arguments_of(Adam, defaults={'weight_decay': 1e-2, 'name': 'AdamW'})
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


@gin_utils.configurable(module='alfx.optimizers')
class SGD(ForeachSGD):
    """Stochastic gradient descent, ``torch.optim.SGD`` with clipping and schedules.

    Args:
        momentum: decay rate of the velocity.
        dampening: a new gradient has the weight ``1 - dampening`` in the velocity.
        nesterov: use Nesterov's momentum.
        kwargs: arguments of :class:`Adam`, except ``betas``, ``eps`` and ``amsgrad``.

    Raises:
        ValueError: an argument out of range.
    """

    @gin_utils.takes_arguments_of(Adam, without=('betas', 'eps', 'amsgrad'), defaults={'name': 'SGD'},
                                  after={'momentum': 'lr', 'nesterov': 'weight_decay'})
    def __init__(self, momentum: NonNegative = 0.0, dampening: float = 0.0, nesterov: bool = False,
                 **kwargs: Any) -> None:
        super().__init__(momentum=momentum, dampening=dampening, nesterov=nesterov, **kwargs)


@gin_utils.configurable(module='alfx.optimizers')
class RMSprop(ForeachRMSprop):
    """RMSprop, ``torch.optim.RMSprop`` with clipping and schedules.

    Args:
        alpha: decay rate of the mean square.
        eps: added to the root of the mean square.
        momentum: decay rate of the velocity.
        centered: subtract the square of the mean from the mean square.
        kwargs: arguments of :class:`Adam`, except ``betas`` and ``amsgrad``; ``lr`` defaults to 1e-2.

    Raises:
        ValueError: an argument out of range.
    """

    @gin_utils.takes_arguments_of(Adam, without=('betas', 'amsgrad'), defaults={'lr': 1e-2, 'name': 'RMSprop'},
                                  after={'alpha': 'lr',
                                  'momentum': 'weight_decay'})
    def __init__(self, alpha: Fraction = 0.99, eps: NonNegative = 1e-8, momentum: NonNegative = 0.0,
                 centered: bool = False, **kwargs: Any) -> None:
        super().__init__(alpha=alpha, eps=eps, momentum=momentum, centered=centered, **kwargs)


@gin_utils.configurable(module='alfx.optimizers')
class RAdam(ForeachRAdam):
    """Rectified Adam (Liu et al. 2020, arXiv:1908.03265): no warm-up is needed, because early steps are smaller.

    Args:
        kwargs: arguments of :class:`Adam`, except ``amsgrad``.

    Raises:
        ValueError: an argument out of range.
    """

    @gin_utils.takes_arguments_of(Adam, without=('amsgrad', ), defaults={'name': 'RAdam'})
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def wrap_optimizer(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of any torch optimizer with the features of :class:`ClippingMixin`, under the same name.

    Its constructor takes ``params=()``, the arguments of ``cls`` by name (``lr`` is required), ``gradient_clipping``,
    ``clip_by_global_norm`` and ``name``.

    Raises:
        TypeError: ``cls`` is not an optimizer class, or is wrapped already.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f'wrap_optimizer: expected a subclass of torch.optim.Optimizer, found {cls!r}')
    if issubclass(cls, ClippingMixin):
        raise TypeError(f'wrap_optimizer: {cls.__name__} has clipping and schedules already')

    def __init__(self: Any, params: Parameters = (), *, name: str = cls.__name__, **kwargs: Any) -> None:
        ClippingMixin.__init__(self, params, name=name, **kwargs)

    return type(cls.__name__, (ClippingMixin, cls), {'__init__': __init__, '__doc__': cls.__doc__})
