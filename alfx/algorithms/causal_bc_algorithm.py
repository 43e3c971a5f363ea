"""Causal behavior cloning: ResiduIL (Swamy et al. 2022, "Causal Imitation Learning under Temporally Correlated Noise",
arXiv:2202.01312).

Suppose an unobserved disturbance affects two successive actions. The observation between them then depends on the
disturbance too, and plain behavior cloning learns to respond to the disturbance instead of the observation. The
previous observation does not depend on it. The policy should therefore leave residuals ``e[t] = a[t] - pi(o[t])`` that
cannot be predicted from the previous observation. It plays a game against a predictor f of the residuals (section
4.2)::

    min over pi, max over f of  E[ 2 e[t] . f(o[t-1]) - |f(o[t-1])|^2 ]

For the best f this is ``E[|E[e[t] | o[t-1]]|^2]``. Each side makes one gradient step per update. As in the paper's
experiments, the policy is kept near the actions (``bc_regulatization_weight``) and f near zero
(``f_norm_penalty_weight``). The norm of f is taken per sample, so that its weight does not depend on the minibatch
size. Actions are in units of half their range, as in :mod:`alfx.algorithms.bc_algorithm`.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.bc_algorithm import BcAlgorithm, BcState
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import ConfError, NonNegative, configurable, problem_at, takes_arguments_of
from alfx.networks.action_specs import check_actor, refuse_discrete_actions
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import NestedTensorSpec
from alfx.utils.math_ops import identity

BcInfo = namedtuple('BcInfo', ['actor', 'discriminator', 'target', 'step_type'], default_value=())
"""``actor``: action of the policy; ``discriminator``: f at this observation; ``target``: recorded action; ``[B, D]``
each, in units of half the range of the actions. ``step_type``: ``[B]``."""

BcLossInfo = namedtuple('BcLossInfo', ['actor', 'discriminator'], default_value=())
"""Parts of the loss ``[T, B]``: ``actor`` is the policy's loss."""


@configurable
class CausalBcAlgorithm(BcAlgorithm):
    """Behavior cloning of actions with temporally correlated noise; see the module docstring for the method.

    Needs pairs of steps: a ``TrainerConfig.mini_batch_length`` of 1 is treated as 2.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec`` of continuous actions.
        discriminator_network_cls: called as ``(input_tensor_spec=, last_layer_size=, last_activation=)``; creates f, a
            feed-forward network whose output has as many elements as the action.
        discriminator_optimizer: optimizes f.
        f_norm_penalty_weight: weight of the norm of f in the loss of f, at least 0.
        bc_regulatization_weight: weight of the squared residual in the loss of the policy, at least 0.
        kwargs: arguments of :class:`~alfx.algorithms.bc_algorithm.BcAlgorithm`; ``actor_network_cls`` creates a network
            that outputs actions, not distributions, so ``epsilon_greedy`` has no effect.

    Raises:
        ConfError: an action is discrete, a network is of the wrong kind, or a weight is negative.
    """

    _declared_capabilities = {'needs_two_steps': True}  # the loss is of pairs of steps

    @takes_arguments_of(
        BcAlgorithm, defaults={'name': 'CausalBcAlgorithm'},
        after={'discriminator_network_cls': 'actor_network_cls', 'discriminator_optimizer': 'actor_optimizer'})
    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 discriminator_network_cls: Callable[..., Any] = EncodingNetwork, discriminator_optimizer: Any = None,
                 f_norm_penalty_weight: NonNegative = 1e-3, bc_regulatization_weight: NonNegative = 5e-2,
                 **kwargs: Any):
        owner = type(self).__name__
        refuse_discrete_actions(owner, action_spec, 'use BcAlgorithm')
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, **kwargs)
        check_actor(owner, 'actor_network_cls', self._actor_network, gives_distributions=False)
        size = sum(spec.numel for spec in nest.flatten(action_spec))
        discriminator = discriminator_network_cls(input_tensor_spec=observation_spec, last_layer_size=size,
                                                  last_activation=identity)
        shape = getattr(discriminator.output_spec, 'shape', discriminator.output_spec)
        if discriminator.is_rnn or tuple(shape) != (size, ):
            raise ConfError([problem_at(owner, 'discriminator_network_cls', 'expected a feed-forward network with '
                                        f'output ({size},), found {type(discriminator).__name__} with output {shape}',
                                        'set it to @EncodingNetwork')])
        self._discriminator_network = discriminator
        self._add_given_optimizers((discriminator_optimizer, discriminator))
        self._f_norm_penalty_weight, self._bc_weight = f_norm_penalty_weight, bc_regulatization_weight

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Compute a :class:`BcInfo`, from which the losses of pairs of steps are computed; the output is the recorded
        action."""
        output, actor_state = self._actor_network(inputs.observation, state.actor)
        prediction, _ = self._discriminator_network(inputs.observation)
        target = self._stored_actions.flat(rollout_info.action)
        info = BcInfo(self._stored_actions.flat(output), prediction, target, inputs.step_type)
        return AlgStep(rollout_info.action, BcState(actor_state), info)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the sum of the losses of policy and f, ``[T, B]``; 0 where there is no previous step."""
        later = slice(1, None)
        actor, discriminator = residual_losses(info.target[later] - info.actor[later], info.discriminator[:-1],
                                               self._bc_weight, self._f_norm_penalty_weight)
        follows = info.step_type[later] != StepType.FIRST
        actor, discriminator = (torch.cat((torch.zeros_like(x[:1]), x * follows)) for x in (actor, discriminator))
        return LossInfo(loss=actor + discriminator, extra=BcLossInfo(actor, discriminator))


def residual_losses(residual: Tensor, prediction: Tensor, bc_weight: float, norm_weight: float
                    ) -> tuple[Tensor, Tensor]:
    """Compute the losses of the two players of the game; see the module docstring.

    Args:
        residual: e, ``[..., D]``, with gradient to the policy.
        prediction: f, ``[..., D]``, of the previous step.
        bc_weight: weight of the squared residual.
        norm_weight: weight of the norm of f.

    Returns:
        ``[...]`` each: the loss of the policy, without gradient to f, and the loss of f, without gradient to the
        policy.
    """
    actor = (2 * residual * prediction.detach()).sum(-1) + bc_weight * residual.square().sum(-1)
    gain = (2 * residual.detach() * prediction - prediction.square()).sum(-1)
    return actor, norm_weight * torch.linalg.vector_norm(prediction, dim=-1) - gain
