"""Which modules do the same at every call, so that what is made of them can be recorded and compiled."""
from typing import Any

from torch import nn

from alfx import nest
from alfx.networks.networks import NoisyFC
from alfx.utils.averager import AdaptiveAverager, EMAverager, WindowAverager
from alfx.utils.normalizers import Normalizer

_VARYING = (NoisyFC, Normalizer, AdaptiveAverager, EMAverager, WindowAverager, nn.modules.batchnorm._BatchNorm,
            nn.modules.dropout._DropoutNd)


def is_traceable(module: nn.Module) -> bool:
    """Whether no part of ``module`` draws numbers of its own or keeps statistics.

    Of modules that come neither with alfx nor with torch this is not known: it is taken for not so.
    """
    return all(type(part).__module__.split('.')[0] in ('alfx', 'torch') and not isinstance(part, _VARYING)
               for part in module.modules() if part is not module)


def has_fixed_prediction(algorithm: Any, cls: type) -> bool:
    """Whether ``predict_step`` of ``algorithm`` is that of ``cls``, which reads observation and action mask, and it has
    no memory and no part that draws numbers of its own or keeps statistics."""
    own = type(algorithm).predict_step is cls.predict_step  # type: ignore[attr-defined]
    return own and not nest.flatten(algorithm.predict_state_spec) and is_traceable(algorithm)
