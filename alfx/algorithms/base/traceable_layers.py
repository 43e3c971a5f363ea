"""Checks of modules that compute the same operations at every call, so that they can be traced and compiled."""
from typing import Any

from torch import nn

from alfx import nest
from alfx.networks.networks import NoisyFC
from alfx.utils.averager import AdaptiveAverager, EMAverager, WindowAverager
from alfx.utils.normalizers import Normalizer

_VARYING = (NoisyFC, Normalizer, AdaptiveAverager, EMAverager, WindowAverager, nn.modules.batchnorm._BatchNorm,
            nn.modules.dropout._DropoutNd)


def is_traceable(module: nn.Module) -> bool:
    """Return whether no part of ``module`` samples random numbers or keeps statistics.

    Parts that come neither from alfx nor from torch count as not traceable.
    """
    return all(type(part).__module__.split('.')[0] in ('alfx', 'torch') and not isinstance(part, _VARYING)
               for part in module.modules() if part is not module)


def has_fixed_prediction(algorithm: Any, cls: type) -> bool:
    """Return whether ``predict_step`` of ``algorithm`` can be traced.

    It has to be the ``predict_step`` of ``cls``, which reads observation and action mask, without recurrent state and
    without parts that sample random numbers or keep statistics.
    """
    own = type(algorithm).predict_step is cls.predict_step  # type: ignore[attr-defined]
    return own and not nest.flatten(algorithm.predict_state_spec) and is_traceable(algorithm)
