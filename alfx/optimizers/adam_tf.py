"""Adam as in TensorFlow 1, to reproduce results obtained with it."""
from typing import Any

from torch import Tensor

from alfx import gin_utils
from alfx.optimizers.fused import FusedAdamBase
from alfx.optimizers.optimizers import Adam


@gin_utils.configurable(module='alfx.optimizers')
class AdamTF(FusedAdamBase):
    """Adam with epsilon added before the bias correction ("epsilon hat", Kingma and Ba 2015, end of section 2).

    With t the number of steps of the optimizer:

        parameter -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

    As in TensorFlow there is one t for each group: steps in which a parameter had no gradient count for its bias
    correction too.

    Args:
        kwargs: arguments of :class:`~alfx.optimizers.optimizers.Adam`; ``eps`` defaults to 1e-7.
    """

    @gin_utils.takes_arguments_of(Adam, defaults={'eps': 1e-7, 'name': 'AdamTF'})
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see :meth:`alfx.optimizers.clipping.ClippingMixin.add_param_group`."""
        super().add_param_group({'iterations': 0, **param_group})

    def reset_state(self) -> None:
        """Reset the moments and the number of steps."""
        self.state.clear()
        self._buckets = None
        for group in self.param_groups:
            group['iterations'] = 0

    def _count_steps(self, batches: list[tuple[Any, list[Tensor]]]) -> None:
        for group in {id(bucket.group): bucket.group for bucket, _ in batches}.values():
            group['iterations'] += 1
        for bucket, _ in batches:
            for step in bucket.steps if bucket.counts is None else [bucket.counts.block]:
                step.fill_(bucket.group['iterations'])

    def _eps(self, group: dict[str, Any]) -> float:
        # the kernel computes m_hat / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        return group['eps'] / (1.0 - group['betas'][1]**group['iterations'])**0.5
