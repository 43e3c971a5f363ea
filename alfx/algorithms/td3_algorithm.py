"""Twin-delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477).

The algorithm is :mod:`alfx.algorithms.ddpg_algorithm` with the three changes of the paper: targets take the smaller
value of two critics (section 4.2); the policy and the target networks are updated less often than the critics (section
5.2); targets are smoothed over actions near the target policy's action (section 5.3). Noise is in units of half the
range of the actions, which is -1 to 1 in the paper. Other differences from the paper: critics and policy take their
steps together, from the same parameters, and by default the policy is also trained at the last step of a sequence
(``train_actor_on_last_step``).
"""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alfx import context
from alfx.algorithms.base.exploration_noise import GaussianNoise, ZetaRepeat, gaussian_like
from alfx.algorithms.ddpg_algorithm import DdpgAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep
from alfx.gin_utils import Count, NonNegative, configurable, takes_arguments_of
from alfx.tensor_specs import NestedTensor


@configurable
class Td3Algorithm(DdpgAlgorithm):
    """Deterministic policy with twin critics, delayed updates and smoothed targets.

    The actions of the first ``config.initial_collect_steps`` environment steps are uniformly random.

    Only every ``policy_update_period``-th update computes the loss of the policy. In the others its part of the info is
    ``()`` and its parameters get no gradient, so that no optimizer moves them.

    Args:
        exploration_noise: standard deviation of the normal noise added to the actions of the rollout, in units of half
            the range; a number or a schedule.
        num_critic_replicas: number of critics. Targets take the smallest of their values; the policy maximizes the
            first critic.
        policy_update_period: training updates for each update of the policy.
        target_noise: standard deviation of the noise on the action in the targets, in units of half the range; 0 for no
            noise.
        noise_clip: bound of that noise, in the same units.
        rollout_random_action: probability of a uniformly random action in the rollout after the first
            ``config.initial_collect_steps``, a number or a schedule.
        rollout_noise_repeat: holds the exploration noise for several steps, such as
            :class:`~alfx.algorithms.base.exploration_noise.ZetaRepeat`; ``None``: new noise at each step.
        kwargs: arguments of :class:`~alfx.algorithms.ddpg_algorithm.DdpgAlgorithm`, except ``ou_stddev``,
            ``ou_damping`` and ``exploration_noise_ctor``. The defaults are 2 for ``num_critic_replicas``, 0.005 for
            ``target_update_tau`` and 2 for ``target_update_period``.

    Raises:
        ConfError: a number is out of range.
        SpecError: an action is discrete, or has no finite bounds.
    """

    _num_random_steps: Tensor

    @takes_arguments_of(
        DdpgAlgorithm, without=('ou_stddev', 'ou_damping', 'exploration_noise_ctor'),
        defaults={'num_critic_replicas': 2, 'target_update_tau': 0.005, 'target_update_period': 2,
                  'name': 'Td3Algorithm'},
        after={'exploration_noise': 'config', 'policy_update_period': 'num_critic_replicas',
               'target_noise': 'target_update_period'})
    def __init__(self, config: TrainerConfig | None, exploration_noise: NonNegative | Callable[[], NonNegative] = 0.1,
                 policy_update_period: Count = 2, target_noise: NonNegative = 0.2, noise_clip: NonNegative = 0.5,
                 rollout_noise_repeat: ZetaRepeat | None = None, **kwargs: Any):
        noise = partial(GaussianNoise, stddev=exploration_noise, repeat=rollout_noise_repeat)
        super().__init__(config=config, exploration_noise_ctor=noise, **kwargs)
        self._set_policy_update_period(policy_update_period, num_losses=1)
        self._target_noise, self._noise_clip = target_noise, noise_clip
        # The count covers all processes.
        self._initial_collect_steps = 0 if config is None else config.initial_collect_steps * context.num_ranks()
        self._num_acting = context.num_ranks() * max(1, 0 if config is None else config.num_ray_workers)
        self.register_buffer('_num_random_steps', torch.zeros((), dtype=torch.int64))
        self._has_random_steps_left = True  # False stops reading the count from the device

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._has_random_steps_left = True

    # Acting ----------------------------------------------------------------------------------------------------

    def rollout_step(self, inputs: TimeStep, state: Any = None) -> AlgStep:
        """Return a random action at first, later the policy's action with exploration noise, ``[B, ...]``."""
        step = super().rollout_step(inputs, state)
        if self._has_random_steps_left:
            self._num_random_steps.add_(inputs.step_type.shape[0] * self._num_acting)
        return step

    def _random_action_probability(self) -> float:
        if self._has_random_steps_left:
            if int(self._num_random_steps) < self._initial_collect_steps:
                return 1.0
            self._has_random_steps_left = False
        return super()._random_action_probability()

    # Training --------------------------------------------------------------------------------------------------

    def _target_action(self, action: NestedTensor) -> NestedTensor:
        """Add noise for target policy smoothing (eq. 14)."""
        if self._target_noise == 0:
            return action
        return self._bounds.add_noise(action, gaussian_like(action, self._target_noise, self._noise_clip))

    def _objective(self, inputs: NestedTensor, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the value of the first critic (algorithm 1), without computing the others if possible."""
        q_values, state = self._critic_networks.first_of_stack(inputs, state, 1)
        return q_values[:, 0], state

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of each critic, and of the policy in updates that train it, ``[T, B]``."""
        loss_info = super().calc_loss(info)
        [actor_loss] = self._logged_policy_losses([loss_info.extra.actor], info.step_type)
        return loss_info._replace(extra=loss_info.extra._replace(actor=actor_loss))
