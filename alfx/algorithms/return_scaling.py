"""Scaling of rewards by the statistics of the discounted return. Read next :mod:`alfx.algorithms.data_transformer`."""
import torch
from torch import Tensor

from alfx import context
from alfx.algorithms.data_transformer import DataTransformer
from alfx.algorithms.transformers.normalization import run_reward_spec
from alfx.data_structures import Experience, TimeStep
from alfx.gin_utils import Fraction, Positive, configurable
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.running_stats import AdaptiveStats


@configurable
class DiscountedReturnScaling(DataTransformer):
    """Divides rewards by the scale of the discounted return, so that one range of values suits every task.

    Each environment has a return G: 0 at the first step of an episode, and ``G = gamma G + r`` at a later step with the
    reward r for arriving there. Rewards are divided by ``max(sd(G), max|G| / max_return)``, where the standard
    deviation and the maximum are over all steps collected so far. The scaled G then stays within
    ``[-max_return, max_return]``; the discounted return from a step onwards, which critics learn, may exceed it. This
    is the reward scaling of SimbaV2 (Lee et al. 2025, arXiv:2502.15280) and FlashSAC, except that no reward of a
    finished episode enters the next one.

    Rollouts update the statistics; experience from the replay buffer is divided by the latest ones. They are part of
    the ``state_dict``. The dimensions of K rewards are scaled separately.

    Args:
        observation_spec: nest of specs of the observation.
        gamma: discount of G; usually the discount of the critics' loss.
        max_return: largest absolute value of the scaled G; ``None``: divide by the standard deviation, or by
            ``max|G|`` while the standard deviation is less than a thousandth of it.
    """

    changes_rewards = True
    update_mode = 'rollout'
    _largest: Tensor

    def __init__(self, observation_spec: NestedTensorSpec = (), gamma: Fraction = 0.99,
                 max_return: Positive | None = 5.0) -> None:
        spec = TensorSpec(run_reward_spec().shape)
        super().__init__(observation_spec, spec)
        self._gamma, self._max_return = gamma, max_return
        self._stats = AdaptiveStats(spec, 1.0)
        self.register_buffer('_largest', torch.zeros(spec.shape))

    def transform_timestep(self, timestep: TimeStep, state: NestedTensor) -> tuple[TimeStep, NestedTensor]:
        """Scale the reward ``[B]`` or ``[B, K]``; the state is G, of the same shape."""
        is_first = timestep.is_first()
        reward = timestep.reward.detach()
        returns = torch.where(is_first.view(-1, *[1] * (reward.ndim - 1)), 0.0, reward + self._gamma * state)
        if context.is_rollout():
            self._stats.update(returns[~is_first])
            largest = context.cat_over_ranks(returns.abs().amax(0, keepdim=True)).amax(0)
            torch.maximum(self._largest, largest, out=self._largest)
        return timestep._replace(reward=timestep.reward / self._scale()), returns

    def transform_experience(self, experience: Experience) -> Experience:
        """Scale the rewards ``[B, T]`` or ``[B, T, K]``."""
        time_step = experience.time_step
        return experience._replace(time_step=time_step._replace(reward=time_step.reward / self._scale()))

    def _scale(self) -> Tensor:
        deviation = self._stats.moments()[1].sqrt()
        if self._max_return is not None:
            scale = torch.maximum(deviation, self._largest / self._max_return)
        else:  # equal returns, such as the first ones of a run, have no deviation to divide by
            scale = torch.where(deviation > 1e-3 * self._largest, deviation, self._largest)
        return torch.where(scale > 0, scale, 1.0)
