"""Known reward and termination functions of some tasks, for imagined steps of a model.

A conf selects them by name: ``FixedRewardFunction.reward_func = 'pendulum'``, ``MbrlAlgorithm.termination_fn =
'hopper'``. They reproduce gymnasium's environments. Rewards are computed from the observation that an action led to,
except those in :data:`REWARDS_BEFORE_THE_STEP`. Actions are in [-1, 1], as in alfx's environments
(``normalize_action``).
"""
from collections.abc import Callable

import torch
from torch import Tensor


def pendulum_reward(observation: Tensor, action: Tensor) -> Tensor:
    """Reward of Pendulum: ``-(angle^2 + 0.1 velocity^2 + 0.001 torque^2)``, from ``(cos, sin, velocity)``.

    Args:
        observation: ``[N, 3]``, in which the action is taken.
        action: ``[N, 1]``, in [-1, 1]: half of the torque.

    Returns:
        ``[N]``
    """
    cosine, sine, velocity = observation.unbind(-1)
    angle = torch.atan2(sine, cosine)
    return -(angle.square() + 0.1 * velocity.square() + 0.001 * (2 * action).square().sum(-1))


def inverted_pendulum_reward(observation: Tensor, action: Tensor) -> Tensor:
    """Reward of InvertedPendulum: 1 while the pole stands; ``[N, 4]`` to ``[N]``."""
    return (~inverted_pendulum_termination(observation)).float()


def centred_inverted_pendulum_reward(observation: Tensor, action: Tensor) -> Tensor:
    """Reward of InvertedPendulum for a planner: slightly smaller away from the middle of the rail; ``[N, 4]`` to
    ``[N]``.

    The reward of the task does not depend on the position of the cart. All plans that keep the pole upright within the
    planning horizon are then equal, and the cart drifts to the end of the rail, where the pole cannot be held, even
    with an exact model.
    """
    return inverted_pendulum_reward(observation, action) * (1 - 0.1 * observation[..., 0].square())


def reacher_reward(observation: Tensor, action: Tensor) -> Tensor:
    """Reward of Reacher: minus the distance between fingertip and target, minus the squared torques.

    Args:
        observation: ``[N, 10]``, of which the last two numbers are the vector from the target to the fingertip.
        action: ``[N, 2]``.

    Returns:
        ``[N]``
    """
    return -observation[..., -2:].norm(dim=-1) - action.square().sum(-1)


def no_termination(observation: Tensor) -> Tensor:
    """Termination of tasks that only a time limit ends: ``[N, D]`` to bool ``[N]``."""
    return torch.zeros(observation.shape[:-1], dtype=torch.bool, device=observation.device)


def hopper_termination(observation: Tensor) -> Tensor:
    """Termination of Hopper: the torso is below 0.7 or leans by 0.2 rad, or a number is out of (-100, 100); ``[N,
    11]``."""
    is_sound = observation.isfinite().all(-1) & (observation[..., 1:].abs() < 100).all(-1)
    return ~(is_sound & (observation[..., 0] > 0.7) & (observation[..., 1].abs() < 0.2))


def walker_termination(observation: Tensor) -> Tensor:
    """Termination of Walker2d: the torso height is not between 0.8 and 2, or the torso leans by 1 rad; ``[N, 17]``."""
    height, angle = observation[..., 0], observation[..., 1]
    return ~((height > 0.8) & (height < 2.0) & (angle.abs() < 1.0))


def inverted_pendulum_termination(observation: Tensor) -> Tensor:
    """Termination of InvertedPendulum: the pole leans by more than 0.2 rad; ``[N, 4]``."""
    return ~(observation.isfinite().all(-1) & (observation[..., 1].abs() <= 0.2))


REWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'pendulum': pendulum_reward,
    'inverted_pendulum': inverted_pendulum_reward,
    'centred_inverted_pendulum': centred_inverted_pendulum_reward,
    'reacher': reacher_reward,
}
"""``f(observation [N, D], action [N, A]) -> reward [N]`` by the name of the task."""

REWARDS_BEFORE_THE_STEP = (pendulum_reward, )
"""Functions whose observation is the one in which the action is taken."""

TERMINATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    'none': no_termination,
    'hopper': hopper_termination,
    'walker': walker_termination,
    'inverted_pendulum': inverted_pendulum_termination,
}
"""``f(observation [N, D]) -> terminated, bool [N]`` by the name of the task."""
