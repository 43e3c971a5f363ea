"""Argument checks, states, and initial values and targets of alpha for soft actor-critic.

Read next: :mod:`alfx.algorithms.sac_algorithm`.
"""
import logging
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.sac.actions import ActionParts, ActionType, is_normal, target_entropies
from alfx.data_structures import namedtuple

logger = logging.getLogger(__name__)

# Arguments of SacAlgorithm that subclasses with other losses of the critics do not support.
OF_BATCHES = ('critic_batches', 'use_target_critics', 'policy_update_period')

SacActionState = namedtuple('SacActionState', ['actor_network', 'critic'], default_value=())
"""State for choosing an action: of the actor, and of the Q networks if they choose a discrete action."""

SacCriticState = namedtuple('SacCriticState', ['critics', 'target_critics'], default_value=())
"""State for evaluating the action taken."""

SacState = namedtuple('SacState', ['action', 'actor', 'critic', 'noise'], default_value=())
"""``action``: :class:`SacActionState`; ``actor``: state of the critics in the actor's loss; ``critic``:
:class:`SacCriticState`; ``noise``: only in the rollout, see ``rollout_noise_correlation`` and
``rollout_noise_repeat``."""


SacCriticInfo = namedtuple('SacCriticInfo', ['critics', 'target_critic'], default_value=())
"""``critics``: ``[B, n]`` values of the action taken; ``target_critic``: ``[B]`` value of the policy's action.
With K rewards ``[B, n, K]`` and ``[B, K]``."""

SacPolicy = namedtuple('SacPolicy', ['distribution', 'action', 'probs', 'log_pi'], default_value=())
"""Output of the policy at N steps: its distribution and an action ``[N, ...]``, with gradient; probabilities ``probs``
``[N, A]`` of the values of a discrete action; ``log_pi`` as in :class:`SacInfo`, with gradient."""

SacActorInfo = namedtuple('SacActorInfo', ['actor_loss', 'neg_entropy'], default_value=())
"""``actor_loss``: ``[B]``, has the gradient of -Q; ``neg_entropy``: ``[B]``, see ``SacInfo.log_pi``."""

SacInfo = namedtuple('SacInfo', ['reward', 'step_type', 'discount', 'action', 'action_distribution', 'actor', 'critic',
                                 'alpha', 'log_pi', 'discounted_return'], default_value=())
"""Info of a step, ``[B, ...]`` each; unused fields are ``()``.

``action`` is the action taken; ``action_distribution`` the current policy; ``actor`` a ``LossInfo`` with
:class:`SacActorInfo`; ``critic`` a :class:`SacCriticInfo`; ``alpha`` the loss of alpha; ``log_pi`` the log-probability
of the policy's action (minus its log-probability under the prior), or for a discrete action the negative entropy; for a
mixed action ``[B, 2]``: both."""

SacLossInfo = namedtuple('SacLossInfo', ['actor', 'critic', 'alpha'], default_value=())
"""Parts of the loss, for summaries."""


def state_specs(parts: ActionParts, actor: Any, critics: Any, noise_spec: Any) -> dict[str, Any]:
    """Return the specs of the states of the three kinds of steps, as arguments of ``Algorithm``.

    Args:
        parts: kind and parts of the action.
        actor: actor network, or ``None``.
        critics: network of all critics, or ``None``.
        noise_spec: spec of the state of noise that depends on the previous step; ``()`` without it.
    """
    critic_spec = () if critics is None else critics.state_spec
    continuous = parts.type == ActionType.Continuous
    action = SacActionState(actor_network=() if actor is None else actor.state_spec,
                            critic=() if continuous else critic_spec)
    critic = SacCriticState(critics=() if parts.type == ActionType.Discrete else critic_spec,
                            target_critics=critic_spec)
    train = SacState(action=action, actor=critic_spec if continuous else (), critic=critic)
    return dict(train_state_spec=train, rollout_state_spec=train._replace(noise=noise_spec),
                predict_state_spec=SacState(action=action))


def check_arguments(name: str, parts: ActionParts, prior_actor_ctor: Any, target_entropy: Any,
                    reproduce_locomotion: bool, train_actor_on_last_step: bool,
                    noise_correlation: float, noise_repeat: Any) -> None:
    """Reject arguments of ``SacAlgorithm`` that are out of range or contradict each other.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    for argument, is_given in (('correlation', noise_correlation), ('repeat', noise_repeat is not None)):
        if is_given and parts.type == ActionType.Discrete:
            raise ValueError(f'{name}.rollout_noise_{argument} needs continuous actions, found {parts.discrete}')
    if noise_correlation and noise_repeat is not None:
        raise ValueError(f'{name}: rollout_noise_repeat and rollout_noise_correlation cannot be used together')
    if prior_actor_ctor is not None and parts.type != ActionType.Continuous:
        raise ValueError(f'{name}.prior_actor_ctor needs continuous actions, found {parts.type.name.lower()}')
    if prior_actor_ctor is not None and target_entropy is not None:
        raise ValueError(f'{name}.target_entropy has no effect with prior_actor_ctor; set target_kld_per_dim')
    if reproduce_locomotion and not train_actor_on_last_step:
        raise ValueError(f'{name}.reproduce_locomotion trains the actor on the last step of a sequence; leave '
                         'train_actor_on_last_step at True')


def check_ensemble(name: str, num_critics: int, num_bootstrap_critics: int | None) -> None:
    """Reject a subset of critics larger than their number.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    if num_bootstrap_critics is not None and not 1 <= num_bootstrap_critics <= num_critics:
        raise ValueError(f'{name}.num_bootstrap_critics: expected a number from 1 to num_critic_replicas = '
                         f'{num_critics}, found {num_bootstrap_critics}')


def check_batches(name: str, parts: ActionParts, critic_batches: str, use_target_critics: bool,
                  policy_update_period: int, state_spec: Any, has_norm: bool) -> None:
    """Reject values of ``critic_batches``, ``use_target_critics`` and ``policy_update_period`` that have no effect.

    Args:
        state_spec: spec of the state of actor and critics.
        has_norm: a critic contains batch norm.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """
    if critic_batches not in ('separate', 'joint'):
        raise ValueError(f"{name}.critic_batches: expected 'separate' or 'joint', found {critic_batches!r}")
    given = [f'{argument} = {value!r}' for argument, value, default in (
        ('critic_batches', critic_batches, 'separate'), ('use_target_critics', use_target_critics, True),
        ('policy_update_period', policy_update_period, 1)) if value != default]
    if given and parts.type != ActionType.Continuous:
        raise ValueError(f'{name}.{given[0]} needs continuous actions, found a {parts.type.name.lower()} '
                         'action; remove it, or use a conf for such actions: dqn.gin or ppo.gin')
    if given and nest.flatten(state_spec):
        raise ValueError(f'{name}.{given[0]} is not supported with recurrent networks; use networks without memory')
    if critic_batches == 'joint' and not has_norm:
        logger.warning("%s.critic_batches = 'joint' has no effect on the values of critics without BatchNorm, see "
                       'CriticNetwork.norm', name)


def check_normal_actor(argument: str, actor: Any) -> None:
    """Reject an actor whose policy is not a nest of (squashed) diagonal normals, which ``argument`` needs.

    Raises:
        ValueError: the policy has another distribution.
    """
    if not all(is_normal(d) for d in nest.flatten(actor.output_spec, nest.is_distribution)):
        raise ValueError(f'{argument} needs an actor whose distributions are (squashed) diagonal normals, found '
                         f'{actor.output_spec}')


def initial_log_alphas(parts: ActionParts, initial_log_alpha: float, max_log_alpha: float | None) -> Tensor:
    """Return the initial log alpha, ``()``, or ``[2]`` for the discrete and continuous parts of a mixed action."""
    if max_log_alpha is not None:
        initial_log_alpha = min(initial_log_alpha, max_log_alpha)
    return torch.full((2, ) if parts.type == ActionType.Mixed else (), float(initial_log_alpha))


def targets_of_alpha(parts: ActionParts, target_entropy: Any, target_kld_per_dim: float | None) -> Tensor:
    """Return target entropies (with ``target_kld_per_dim`` negative KL targets), ``()`` or ``[2]`` like log alpha."""
    if target_kld_per_dim is not None:
        return torch.tensor(-target_kld_per_dim * sum(spec.numel for spec in nest.flatten(parts.continuous)))
    targets = torch.tensor(target_entropies(parts, target_entropy))
    return targets if parts.type == ActionType.Mixed else targets[0]
