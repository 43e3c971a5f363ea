"""Which modules do the same at every call, so that an update made of them can be recorded and compiled."""
from torch import nn

from alfx.networks.networks import NoisyFC
from alfx.utils.averager import AdaptiveAverager, EMAverager, WindowAverager
from alfx.utils.normalizers import Normalizer

_VARYING = (NoisyFC, Normalizer, AdaptiveAverager, EMAverager, WindowAverager, nn.modules.batchnorm._BatchNorm,
            nn.modules.dropout._DropoutNd)


def is_fixed(module: nn.Module) -> bool:
    """Whether no part of ``module`` draws numbers of its own or keeps statistics."""
    return not any(isinstance(part, _VARYING) for part in module.modules())
