"""Loss of the auxiliary phase of phasic policy gradient (Cobbe et al. 2020, arXiv:2009.04416, section 2.2)."""
from collections.abc import Callable
from typing import Any

import torch

from alfx.algorithms.algorithm import Loss
from alfx.data_structures import LossInfo, namedtuple
from alfx.gin_utils import NonNegative, configurable
from alfx.tensor_specs import NestedTensor
from alfx.utils import dist_utils
from alfx.utils.losses import element_wise_squared_loss

PPGAuxPhaseLossInfo = namedtuple('PPGAuxPhaseLossInfo', ['aux_value_loss', 'value_loss', 'policy_kl'])
"""Terms of the loss before weighting, ``[T, B]`` each."""


@configurable
class PPGAuxPhaseLoss(Loss):
    """Loss ``1/2 error(V_aux, target) + 1/2 error(V, target) + weight * KL(policy before || policy now)``.

    Args:
        td_error_loss_fn: maps ``(target, value)`` to an error of the same shape.
        policy_kl_loss_weight: weight of the KL divergence, beta_clone in the paper.
        name: name of this loss.

    Raises:
        ValueError: the weight is negative.
    """

    def __init__(self, td_error_loss_fn: Callable[..., torch.Tensor] = element_wise_squared_loss,
                 policy_kl_loss_weight: NonNegative = 1.0, name: str = 'PPGAuxPhaseLoss'):
        super().__init__(name=name)
        self._td_error_loss_fn = td_error_loss_fn
        self._policy_kl_loss_weight = policy_kl_loss_weight

    def forward(self, info: Any, policy_before: NestedTensor) -> LossInfo:  # type: ignore[override]
        """Compute the loss of each step.

        Args:
            info: ``PPGTrainInfo`` of ``[T, B, ...]``; its ``returns`` are the targets.
            policy_before: distributions of batch shape ``[T, B]``.

        Returns:
            ``loss`` ``[T, B]``, with its terms as ``extra``.
        """
        aux_value_loss, value_loss = self._half_error(info.returns, info.aux_value), self._half_error(info.returns,
                                                                                                      info.value)
        kl = dist_utils.compute_kl(policy_before, info.action_distribution)
        loss = aux_value_loss + value_loss + self._policy_kl_loss_weight * kl
        return LossInfo(loss=loss, extra=PPGAuxPhaseLossInfo(aux_value_loss, value_loss, kl))

    def _half_error(self, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return half the error ``[T, B]``, averaged over the dimensions of the reward."""
        error = 0.5 * self._td_error_loss_fn(target.detach(), value)
        return error if error.ndim == 2 else error.mean(-1)
