"""Rules that normalize the rewards of exploration bonuses.

No rule suits all bonuses (Yuan et al. 2024, arXiv:2405.19548), so each bonus chooses one.
"""
import torch
from torch import Tensor, nn

from alfx import context
from alfx.gin_utils import check_value
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.running_stats import count_and_moments, joined_moments

RULES = ('none', 'std', 'standard', 'return_std', 'min_max')
_MOMENTUM = 0.9


class Moments(nn.Module):
    """Mean and variance of all numbers so far, over all ranks; 0 and 1 at first."""

    row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('row', torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))  # count, mean, variance

    def update(self, x: Tensor, momentum: float | None = None) -> None:
        """Add numbers of any shape, possibly none.

        Args:
            x: the numbers.
            momentum: keep this share of mean and variance, instead of weighting all numbers equally.
        """
        rows = context.cat_over_ranks(count_and_moments(x, TensorSpec(())).unsqueeze(0))
        batch = joined_moments(rows)
        if not batch[0]:
            return
        if momentum is not None:
            self.row.lerp_(batch, 1 - momentum)
        else:
            self.row.copy_(joined_moments(torch.stack((self.row, batch))))

    @property
    def mean(self) -> Tensor:
        """Mean, float32."""
        return self.row[1].float()

    @property
    def std(self) -> Tensor:
        """Standard deviation, float32; 1 if that is 0."""
        return torch.where(self.row[2] > 0, self.row[2], 1.0).sqrt().float()


class RewardNormalization(nn.Module):
    """Normalization of rewards, whose statistics are updated first; the result may be clipped.

    Args:
        rule: one of

            * 'none';
            * 'std': divide by the standard deviation of all rewards;
            * 'standard': subtract a moving mean and divide by a moving standard deviation, which start from 0 and 1 and
              keep 90% at each unroll;
            * 'return_std': divide by the standard deviation of the discounted sum of the rewards so far in each
              environment, across episodes (Burda et al. 2018, arXiv:1810.12894, section 2.4);
            * 'min_max': map the rewards of an unroll linearly to [0, 1], or to 0 if all are equal.
        discount: discount of the sum of 'return_std'.
        clip_value: if positive, clip the result to plus and minus this value.
        owner: class named in error messages.

    Raises:
        ConfError: an unknown rule.
    """

    def __init__(self, rule: str, discount: float, clip_value: float, owner: str):
        super().__init__()
        check_value(owner, 'normalization', rule, str, choices=RULES)
        self._rule, self._discount, self._clip_value = rule, discount, clip_value
        self._moments = Moments()
        self.state_spec: NestedTensorSpec = TensorSpec(()) if rule == 'return_std' else ()

    def forward(self, reward: Tensor, is_rewarded: Tensor, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Normalize the rewards ``[T, B]`` of new steps.

        Args:
            reward: 0 where ``is_rewarded`` is False.
            is_rewarded: bool; other steps do not enter the statistics.
            state: the discounted sums ``[B]`` with 'return_std', else ``()``.

        Returns:
            The rewards, 0 where ``is_rewarded`` is False, and the next state.
        """
        chosen, moments = reward[is_rewarded], self._moments
        if self._rule == 'std':
            moments.update(chosen)
        elif self._rule == 'standard':
            moments.update(chosen, _MOMENTUM)
        elif self._rule == 'return_std':
            sums = []
            for row in reward:
                state = self._discount * state + row
                sums.append(state)
            moments.update(torch.stack(sums))
        elif self._rule == 'min_max':
            everything = context.cat_over_ranks(torch.where(is_rewarded, reward, torch.nan))
            everything = everything[~everything.isnan()]
            if len(everything):
                low, high = everything.aminmax()
                reward = (reward - low) / torch.where(high > low, high - low, 1.0)
        return self.transform(reward, is_rewarded), state

    def transform(self, reward: Tensor, is_rewarded: Tensor) -> Tensor:
        """Normalize rewards of any shape by the current statistics; 0 where ``is_rewarded`` is False."""
        if self._rule == 'standard':
            reward = reward - self._moments.mean
        reward = reward / self._moments.std  # 1 without statistics
        if self._clip_value > 0:
            reward = reward.clamp(-self._clip_value, self._clip_value)
        return reward * is_rewarded
