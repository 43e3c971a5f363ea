"""Which modules do the same at every call, so that an update made of them can be recorded and compiled."""
from torch import nn

from alfx.networks.networks import NoisyFC
from alfx.utils.averager import AdaptiveAverager, EMAverager, WindowAverager
from alfx.utils.normalizers import Normalizer

_VARYING = (NoisyFC, Normalizer, AdaptiveAverager, EMAverager, WindowAverager, nn.modules.batchnorm._BatchNorm,
            nn.modules.dropout._DropoutNd)


def is_fixed(module: nn.Module) -> bool:
    """Whether no part of ``module`` draws numbers of its own or keeps statistics.

    Of modules that come neither with alfx nor with torch this is not known: it is taken for not so.
    """
    return all(type(part).__module__.split('.')[0] in ('alfx', 'torch') and not isinstance(part, _VARYING)
               for part in module.modules() if part is not module)
