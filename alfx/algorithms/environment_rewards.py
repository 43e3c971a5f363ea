"""Rewards of the environment, for algorithms that compare returns although data transformers change rewards."""
from torch import Tensor

from alfx.algorithms.data_transformer import UntransformedTimeStep
from alfx.config import TrainerConfig
from alfx.data_structures import TimeStep
from alfx.gin_utils import ConfError, problem_at


def environment_reward(time_step: TimeStep) -> Tensor:
    """Return the reward of the environment, ``[B]`` or ``[B, K]``, if ``UntransformedTimeStep`` keeps it."""
    raw = time_step.untransformed
    return raw.reward if isinstance(raw, TimeStep) else time_step.reward


def require_environment_rewards(config: TrainerConfig, reason: str, allowed: tuple[type, ...] = ()) -> None:
    """Reject data transformers that change rewards, unless the original time step is kept.

    Args:
        config: configuration of the run.
        reason: who needs these rewards and why, for the message.
        allowed: classes of transformers that may change rewards.

    Raises:
        ConfError: a data transformer changes rewards, and ``UntransformedTimeStep`` is missing.
    """
    transformers = [] if config.data_transformer is None else list(config.data_transformer.modules())
    changes = [type(t).__name__ for t in transformers
               if getattr(t, 'changes_rewards', False) and not isinstance(t, allowed)]
    if changes and not any(isinstance(t, UntransformedTimeStep) for t in transformers):
        raise ConfError([problem_at('TrainerConfig', 'data_transformer_ctor', f'changes the rewards by '
                                    f'{", ".join(changes)}, but {reason}',
                                    'put @UntransformedTimeStep first in the list')])
