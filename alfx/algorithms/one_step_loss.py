"""Temporal difference losses with one-step targets: ``r[t+1] + gamma discount[t+1] V[t+1]``."""
from typing import Any

from alfx.algorithms.td_loss import TDLoss, TDQRLoss
from alfx.gin_utils import configurable, takes_arguments_of


@configurable
class OneStepTDLoss(TDLoss):
    """Temporal difference loss :class:`~alfx.algorithms.td_loss.TDLoss` with ``td_lambda = 0``.

    Args:
        kwargs: arguments of :class:`~alfx.algorithms.td_loss.TDLoss`, except ``td_lambda`` and ``normalize_target``.
    """

    @takes_arguments_of(TDLoss, without=('td_lambda', 'normalize_target'), defaults={'name': 'OneStepTDLoss'})
    def __init__(self, **kwargs: Any):
        super().__init__(td_lambda=0.0, normalize_target=False, **kwargs)


@configurable
class OneStepTDQRLoss(TDQRLoss):
    """Quantile regression loss :class:`~alfx.algorithms.td_loss.TDQRLoss` with ``td_lambda = 0``.

    Args:
        kwargs: arguments of :class:`~alfx.algorithms.td_loss.TDQRLoss`, except ``td_lambda``.
    """

    @takes_arguments_of(TDQRLoss, without=('td_lambda', ), defaults={'name': 'OneStepTDQRLoss'})
    def __init__(self, **kwargs: Any):
        super().__init__(td_lambda=0.0, **kwargs)
