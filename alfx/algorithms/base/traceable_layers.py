"""Checks of modules that compute the same operations at every call, so that they can be traced and compiled."""
from typing import Any

from torch import nn

from alfx import nest
from alfx.utils.averager import AdaptiveAverager, EMAverager, WindowAverager
from alfx.utils.normalizers import Normalizer

_VARYING = (Normalizer, AdaptiveAverager, EMAverager, WindowAverager, nn.modules.batchnorm._BatchNorm,
            nn.modules.dropout._DropoutNd)


def is_traceable(module: nn.Module) -> bool:
    """Return whether no part of ``module`` keeps statistics in Python or is a dropout layer of torch.

    Layers that draw random numbers with operations on tensors, such as ``NoisyFC``, can be traced.

    Parts that come neither from alfx nor from torch count as not traceable.
    """
    return all(type(part).__module__.split('.')[0] in ('alfx', 'torch') and not isinstance(part, _VARYING)
               for part in module.modules() if part is not module)


def has_traceable_prediction(algorithm: Any) -> bool:
    """Return whether ``predict_step`` can run from a traced graph.

    This requires that the class that defines it sets ``predicts_from_observation = True`` (it reads only the
    observation and the action mask), that it is not recurrent, and that all layers are traceable.
    """
    owner = next((cls for cls in type(algorithm).__mro__ if 'predict_step' in vars(cls)), object)
    return (vars(owner).get('predicts_from_observation', False) and not nest.flatten(algorithm.predict_state_spec)
            and is_traceable(algorithm))
