"""Soft actor-critic whose critics learn a categorical distribution of returns.

The critics are those of C51 (Bellemare et al. 2017, arXiv:1707.06887) with an action as input, as in XQC, SimbaV2 and
FlashSAC. The target is the distribution of ``r + gamma (Z - alpha log pi)``, projected onto the atoms, where Z is the
distribution with the lowest mean among the target critics. Returns outside of ``[v_min, v_max]`` cannot be represented:
scale the rewards with :class:`~alfx.algorithms.return_scaling.DiscountedReturnScaling`, and start with a small alpha,
because the entropy is part of these returns. Read next
:mod:`alfx.algorithms.categorical_td_loss`.
"""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alfx.algorithms.base.q_values import expected_values, least_distribution
from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.categorical_td_loss import CategoricalTDLoss, make_atoms
from alfx.algorithms.sac.critics import critic_with_outputs, require_continuous_actions
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.gin_utils import Count, configurable, takes_arguments_of
from alfx.tensor_specs import NestedTensorSpec, TensorSpec


@configurable
class CategoricalSacAlgorithm(SacAlgorithm):
    """Soft actor-critic with distributional critics, for continuous actions and a scalar reward.

    Args:
        critic_network_cls: as in ``SacAlgorithm``; the number of outputs is set to ``num_atoms``.
        critic_loss_ctor: creates the loss of the critics, called as ``(v_min=, v_max=, debug_summaries=, name=)``;
            ``None``: ``CategoricalTDLoss`` with one-step targets.
        num_atoms: number of atoms N; each critic outputs logits of their probabilities.
        v_min: smallest return that the atoms represent.
        v_max: largest return that the atoms represent.
        kwargs: arguments of :class:`~alfx.algorithms.sac_algorithm.SacAlgorithm`, except ``q_network_cls`` and
            ``reward_weights``.

    Raises:
        SpecError: the number of outputs of a critic is not ``num_atoms``.
        ValueError: the action is not continuous, there are several rewards, ``num_atoms`` is below 2, or ``v_min`` is
            not below ``v_max``.
    """

    _atoms: Tensor

    @takes_arguments_of(SacAlgorithm, without=('q_network_cls', 'reward_weights'),
                        defaults={'name': 'CategoricalSacAlgorithm'}, after={'num_atoms': 'num_critic_replicas'})
    def __init__(self, action_spec: NestedTensorSpec, reward_spec: TensorSpec,
                 critic_network_cls: Callable[..., Any] | None, critic_loss_ctor: Callable[..., Any] | None, name: str,
                 num_atoms: Count = 101, v_min: float = -5.0, v_max: float = 5.0, **kwargs: Any):
        require_continuous_actions(name, action_spec)
        atoms = make_atoms(num_atoms, v_min, v_max, reward_spec, name, 'use QrsacAlgorithm')
        if critic_network_cls is not None:
            critic_network_cls = partial(critic_with_outputs, critic_network_cls, num_atoms)
        self._num_outputs = num_atoms
        super().__init__(
            action_spec=action_spec, reward_spec=reward_spec, critic_network_cls=critic_network_cls, q_network_cls=None,
            critic_loss_ctor=partial(critic_loss_ctor or partial(CategoricalTDLoss, td_lambda=0.0), v_min=v_min,
                                     v_max=v_max), name=name, **kwargs)
        self.register_buffer('_atoms', atoms, persistent=False)

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Tensor, Any]:
        """Return log-probabilities ``[B, n, N]`` of the atoms for the action taken."""
        logits, state = super().trained_values(rows, details, state)
        return torch.log_softmax(logits, -1), state

    def joint_values(self, trained: Rows, later: Rows, policy: Any) -> tuple[Tensor, Tensor]:
        """Return log-probabilities for the action taken, and probabilities ``[B, N]`` to bootstrap from."""
        logits, probs = super().joint_values(trained, later, policy)
        return torch.log_softmax(logits, -1), probs

    def _bootstrap_value(self, critics: Tensor) -> Tensor:
        """Reduce logits ``[B, n, N]`` to probabilities ``[B, N]`` to bootstrap from."""
        return super()._bootstrap_value(torch.softmax(critics, -1))

    def _pessimistic_value(self, critics: Tensor) -> Tensor:
        """Return the probabilities with the lowest mean, ``[B, n, N]`` -> ``[B, N]``."""
        return least_distribution(critics, self._atoms)

    def _actor_value(self, critics: Tensor) -> Tensor:
        """Reduce logits ``[B, n, N]`` to the value ``[B]`` that the policy maximizes."""
        return super()._actor_value(expected_values(critics, self._atoms))
