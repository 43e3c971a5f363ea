"""The states that soft actor-critic keeps from step to step, where networks have memory or noise is correlated.

Read next :mod:`alfx.algorithms.sac_algorithm`.
"""
from typing import Any

from alfx import nest
from alfx.algorithms.sac_actions import ActionParts, ActionType
from alfx.data_structures import namedtuple
from alfx.tensor_specs import TensorSpec

SacActionState = namedtuple('SacActionState', ['actor_network', 'critic'], default_value=())
"""State of choosing an action: of the actor, and of the Q networks if a discrete action is chosen by them."""

SacCriticState = namedtuple('SacCriticState', ['critics', 'target_critics'], default_value=())
"""State of evaluating the action taken."""

SacState = namedtuple('SacState', ['action', 'actor', 'critic', 'noise'], default_value=())
"""``action``: :class:`SacActionState`; ``actor``: state of the critics that the actor is trained with; ``critic``:
:class:`SacCriticState`; ``noise``: in the rollout only, see ``rollout_noise_correlation``."""


def state_specs(parts: ActionParts, actor: Any, critics: Any, has_noise: bool) -> dict[str, Any]:
    """The specs of the states of the three kinds of steps, as ``Algorithm`` takes them.

    Args:
        parts: kind and parts of the action.
        actor: the actor network; ``None`` without one.
        critics: the network of all critics; ``None`` without one.
        has_noise: whether the noise of one step of the rollout depends on that of the step before.
    """
    critic_spec = () if critics is None else critics.state_spec
    continuous = parts.type == ActionType.Continuous
    action = SacActionState(actor_network=() if actor is None else actor.state_spec,
                            critic=() if continuous else critic_spec)
    critic = SacCriticState(critics=() if parts.type == ActionType.Discrete else critic_spec,
                            target_critics=critic_spec)
    train = SacState(action=action, actor=critic_spec if continuous else (), critic=critic)
    noise = nest.map_structure(TensorSpec.from_spec, parts.continuous) if has_noise else ()
    return dict(train_state_spec=train, rollout_state_spec=train._replace(noise=noise),
                predict_state_spec=SacState(action=action))
