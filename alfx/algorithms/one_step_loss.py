"""Temporal difference losses with one-step targets: ``r[t+1] + gamma discount[t+1] V[t+1]``."""
from collections.abc import Callable, Sequence

from torch import Tensor

from alfx.algorithms.td_loss import TDLoss, TDQRLoss
from alfx.gin_utils import configurable
from alfx.utils import losses


@configurable
class OneStepTDLoss(TDLoss):
    """:class:`~alfx.algorithms.td_loss.TDLoss` with ``td_lambda = 0``.

    Args:
        gamma: discount of future rewards; for K-dimensional rewards also a list of K of them.
        td_error_loss_fn: ``fn(target, value)``, elementwise.
        debug_summaries: whether to write summaries.
        name: name of this loss, put before those of its summaries.
    """

    def __init__(self, gamma: float | Sequence[float] = 0.99,
                 td_error_loss_fn: Callable[[Tensor, Tensor], Tensor] = losses.element_wise_squared_loss,
                 debug_summaries: bool = False, name: str = 'OneStepTDLoss'):
        super().__init__(gamma=gamma, td_error_loss_fn=td_error_loss_fn, td_lambda=0.0, normalize_target=False,
                         debug_summaries=debug_summaries, name=name)


@configurable
class OneStepTDQRLoss(TDQRLoss):
    """:class:`~alfx.algorithms.td_loss.TDQRLoss` with ``td_lambda = 0``.

    Args:
        num_quantiles: number of quantiles.
        gamma: discount of future rewards; for K-dimensional rewards also a list of K of them.
        td_error_loss_fn: ``fn(value - target)``, elementwise.
        sum_over_quantiles: whether to sum over the quantiles, or to average.
        debug_summaries: whether to write summaries.
        name: name of this loss, put before those of its summaries.
    """

    def __init__(self, num_quantiles: int = 50, gamma: float | Sequence[float] = 0.99,
                 td_error_loss_fn: Callable[[Tensor], Tensor] = losses.huber_function,
                 sum_over_quantiles: bool = False, debug_summaries: bool = False, name: str = 'OneStepTDQRLoss'):
        super().__init__(num_quantiles=num_quantiles, gamma=gamma, td_error_loss_fn=td_error_loss_fn, td_lambda=0.0,
                         sum_over_quantiles=sum_over_quantiles, debug_summaries=debug_summaries, name=name)
