"""Categorical distributional reinforcement learning, C51: learns the distribution of returns.

Bellemare et al. 2017 (arXiv:1707.06887). A value is a probability for each of N atoms, evenly spaced from ``v_min`` to
``v_max``. Its target is the distribution of ``R + G Z`` projected onto the atoms, where R is the sum of rewards up to
the bootstrap step, G the product of the discounts and Z the return from there. The paper uses one-step targets;
multi-step targets are as in Rainbow (Hessel et al. 2018, arXiv:1710.02298) and stop at the end of an episode. The loss
is the Kullback-Leibler divergence. It has the gradient of the paper's cross entropy and is 0 for a perfect prediction;
Rainbow uses it as the priority of a sample.
"""
from typing import Any

import torch
from torch import Tensor

from alfx import summary
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import LossInfo, StepType
from alfx.gin_utils import Fraction, configurable
from alfx.tensor_specs import TensorSpec
from alfx.utils import losses, value_ops


def project_distribution(probs: Tensor, reward: Tensor, discount: Tensor, v_min: float, v_max: float) -> Tensor:
    """Project the distribution of ``reward + discount Z`` onto the atoms of Z.

    Bellemare et al. 2017 (arXiv:1707.06887), eq. 7 and algorithm 1: probability between two atoms is split between them
    by linear interpolation; probability outside the range goes to the nearest atom.

    Args:
        probs: ``[..., N]``: probabilities of Z for N atoms evenly spaced from ``v_min`` to ``v_max``, N at least 2.
        reward: ``[...]``.
        discount: ``[...]``.
        v_min: the first atom.
        v_max: the last atom.

    Returns:
        ``[..., N]``, with the same sum as ``probs``.
    """
    num_atoms = probs.shape[-1]
    atoms = torch.linspace(v_min, v_max, num_atoms, dtype=probs.dtype, device=probs.device)
    moved = torch.addcmul(reward.unsqueeze(-1), discount.unsqueeze(-1), atoms).clamp_(v_min, v_max)
    position = (moved - v_min) * ((num_atoms - 1) / (v_max - v_min))
    below = position.floor().clamp_(0, num_atoms - 2)
    above_share = (position - below).clamp_(0.0, 1.0)
    index, to_above = below.long(), probs * above_share
    return torch.zeros_like(probs).scatter_add_(-1, index, probs - to_above).scatter_add_(-1, index + 1, to_above)


def bootstrap_steps(step_type: Tensor) -> Tensor:
    """Return, for each step but the final one, the step from which its n-step return is bootstrapped.

    This is the first later step that is LAST, otherwise the final step.

    Args:
        step_type: ``[T, B]``, T at least 2.

    Returns:
        int64 ``[T-1, B]``, in ``1 .. T-1``. The entry of a LAST step, which has no return, is meaningless.
    """
    length = step_type.shape[0]
    steps = torch.arange(length, device=step_type.device).unsqueeze(-1)
    stops = torch.where((step_type == StepType.LAST) | (steps == length - 1), steps, length - 1)
    return stops[1:].flip(0).cummin(0).values.flip(0)


def make_atoms(num_atoms: int, v_min: float | None, v_max: float | None, reward_spec: TensorSpec, name: str,
               remedy: str) -> Tensor:
    """Return the values ``[num_atoms]`` of the atoms of a distribution.

    Args:
        num_atoms: number of atoms.
        v_min: value of the first atom.
        v_max: value of the last atom.
        reward_spec: spec of the reward.
        name: name of the algorithm, for messages.
        remedy: advice for rewards with several dimensions.

    Raises:
        ValueError: ``num_atoms`` is below 2, ``v_min`` is not below ``v_max``, or there are several rewards.
    """
    if num_atoms < 2 or v_min is None or v_max is None or not v_min < v_max:
        raise ValueError(f'{name}: a distribution needs num_atoms of at least 2 and v_min < v_max, found num_atoms = '
                         f'{num_atoms}, v_min = {v_min}, v_max = {v_max}')
    if reward_spec.ndim:
        raise ValueError(f'{name}: num_atoms requires a scalar reward, found {reward_spec}; {remedy}')
    return torch.linspace(v_min, v_max, num_atoms)


@configurable
class CategoricalTDLoss(TDLoss):
    """Divergence between predicted distributions and the distributions of bootstrapped returns.

    Args:
        gamma: discount of future rewards.
        td_lambda: 0 for one-step targets, 1 for the return up to the end of the sequence or episode.
        v_min: the first atom.
        v_max: the last atom.
        debug_summaries: write summaries.
        name: name of this loss and prefix of its summaries.

    Raises:
        ValueError: ``td_lambda`` is neither 0 nor 1, ``v_min`` is not below ``v_max``, or ``gamma`` is out of [0, 1].
    """

    def __init__(self, gamma: Fraction = 0.99, td_lambda: Fraction = 1.0, v_min: float = -10.0, v_max: float = 10.0,
                 debug_summaries: bool = False, name: str = 'CategoricalTDLoss'):
        if td_lambda not in (0.0, 1.0):
            raise ValueError(f'{name}: td_lambda must be 0 or 1, found {td_lambda}')
        if not v_min < v_max:
            raise ValueError(f'{name}: v_min must be below v_max, found {v_min} and {v_max}')
        super().__init__(gamma=gamma, td_error_loss_fn=losses.element_wise_squared_loss, td_lambda=td_lambda,
                         debug_summaries=debug_summaries, name=name)
        self._v_min, self._v_max = v_min, v_max

    def compute_td_target(self, info: Any, target_value: Tensor) -> Tensor:
        """Compute the target distributions of all steps but the final one.

        Args:
            info: named tuple with ``reward``, ``step_type`` and ``discount``, ``[T, B]`` each.
            target_value: probabilities ``[T, B, N]`` to bootstrap from.

        Returns:
            ``[T-1, B, N]``; the entry of a LAST step, which has no target, is meaningless.

        Raises:
            ValueError: the shapes disagree, or T < 2.
        """
        reward, step_type = info.reward, info.step_type
        if reward.shape != target_value.shape[:-1] or reward.shape[0] < 2:
            raise ValueError(f'{self._name}: expected rewards [T, B], T >= 2, and probabilities [T, B, N] of N atoms '
                             f'(num_atoms), found {tuple(reward.shape)} and {tuple(target_value.shape)}')
        discount = self._discount(info)
        if self._lambda == 0.0 or reward.shape[0] == 2:
            return project_distribution(target_value[1:], reward[1:], discount[1:], self._v_min, self._v_max)
        zeros = torch.zeros_like(reward)
        rewards = value_ops.discounted_return(reward, zeros, step_type, discount)
        factor = value_ops.discounted_return(zeros, torch.ones_like(reward), step_type, discount)
        bootstrapped = target_value.take_along_dim(bootstrap_steps(step_type).unsqueeze(-1), 0)
        return project_distribution(bootstrapped, rewards, factor, self._v_min, self._v_max)

    def forward(self, info: Any, value: Tensor, target_value: Tensor) -> LossInfo:
        """Compute the loss of all steps.

        Args:
            info: named tuple with ``reward``, ``step_type`` and ``discount``, ``[T, B]`` each.
            value: log-probabilities ``[T, B, N]`` to train.
            target_value: probabilities ``[T, B, N]`` to bootstrap from; no gradient goes through them.

        Returns:
            ``LossInfo`` whose ``loss`` and ``extra`` are ``[T, B]``; 0 at the final step and at LAST steps.
        """
        target = self.compute_td_target(info, target_value.detach())
        value = value[:-1]
        if summary.should_record_summaries():
            atoms = torch.linspace(self._v_min, self._v_max, value.shape[-1], device=value.device)
            self._summarize(info, value.detach().exp() @ atoms, target @ atoms)
        return self._reduce((torch.xlogy(target, target) - target * value).sum(-1), info)
