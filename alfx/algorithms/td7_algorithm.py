"""TD7: TD3 with learned state-action embeddings (Fujimoto et al. 2023, arXiv:2306.02451).

Four additions to :mod:`alfx.algorithms.td3_algorithm`. With z and p the embeddings of a state and of a state-action
pair, ``f`` the fixed encoder and ``g`` the fixed target encoder::

    encoder  minimizes  mean (p(z(s), a) - z(s'))^2, without gradient of z(s')                      (eq. 1)
    critics  Q_i(s, a, z_f, p_f) -> r + gamma clip(min_i Q'_i(s', a', z_g, p_g), low, high)         (eq. 5 to 8)
    policy   maximizes  mean_i Q_i(s, pi(s, z_f), z_f, p_f)                                         (eq. 9)

Every ``target_update_period`` updates the target networks become copies of the networks, g of f, and f of the encoder;
``low`` and ``high`` become the smallest and largest target so far. The critics use the Huber loss, and sequences are
sampled in proportion to ``max(|error|, 1)^0.4`` without importance weights (LAP, Fujimoto et al. 2020,
arXiv:2007.06049), see the conf ``td7.gin``.

Differences from the paper: encoder, critics and policy take their steps together, from the same parameters, instead of
one after the other; training begins after ``initial_collect_steps``, not at the end of that episode; and policy
checkpoints (section 4.2) are optional, see :mod:`alfx.algorithms.base.policy_checkpoints`. TD3's differences apply as
well. The networks are in :mod:`alfx.networks.sale_networks`.
"""
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.base.policy_checkpoints import PolicyCheckpoints
from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.data_transformer import RewardScaling
from alfx.algorithms.ddpg_algorithm import DdpgCriticInfo
from alfx.algorithms.environment_rewards import environment_reward, require_environment_rewards
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Count, configurable, problem_at, takes_arguments_of
from alfx.networks.sale_networks import EmbeddedCritic, SaleActorNetwork, SaleCriticNetwork, SaleEncoder
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils import losses
from alfx.utils.target_updater import TargetUpdater
from alfx.utils.tensor_utils import tensor_extend_zero

Td7LossInfo = namedtuple('Td7LossInfo', ['actor', 'critic', 'encoder'], default_value=())
"""Parts of the loss."""


class _Snapshot(TargetUpdater):
    """Copy of a policy, which stays as it is when networks are reset."""

    def copy_to_targets(self, chosen: set[Tensor]) -> set[Tensor]:
        return set()


@configurable
class Td7Algorithm(Td3Algorithm):
    """TD3 whose policy and critics read embeddings of states and actions; see the module docstring.

    Args:
        observation_spec: nest of specs of the observation; vectors, or what the networks preprocess.
        action_spec: nest of ``BoundedTensorSpec`` of continuous actions with finite bounds.
        reward_spec: spec of rank 0.
        actor_network_ctor: called as ``(input_tensor_spec=(observation_spec, z_spec), action_spec=)``.
        critic_network_ctor: called as ``(input_tensor_spec=((observation_spec, action_spec), (z_spec, p_spec)))``;
            creates one critic.
        calculate_priority: compute priorities for prioritized replay: ``max(|error|, 1)``, where the error is the
            largest over the critics, averaged over a sequence. A sequence without targets has priority 0.
        critic_loss_ctor: called as ``(debug_summaries=, name=)``; creates the critic loss. ``None``: ``OneStepTDLoss``
            with the Huber loss, which ``OneStepTDLoss.td_error_loss_fn`` does not change.
        target_update_period: number of training updates between two copies of all networks. Smaller values learn faster
            but are less stable.
        encoder_ctor: called with ``observation_spec`` and ``action_spec``; creates the encoder.
        encoder_optimizer: optimizes the encoder.
        policy_checkpoints: schedule by which policies are assessed between updates and kept for evaluation. It needs
            one environment, ``unroll_length = 1`` and a rollout in this process; the returns are those of the rollout,
            with exploration noise. ``None``: train in each iteration, and evaluate the current policy.
        kwargs: arguments of :class:`~alfx.algorithms.td3_algorithm.Td3Algorithm`, except ``reward_weights``,
            ``target_update_tau``, ``critic_batches`` and ``use_target_critics``.

    Raises:
        ConfError: a number is out of range, there are several rewards, a network is recurrent, or the settings of the
            run do not suit ``policy_checkpoints``.
        SpecError: an action is discrete, or has no finite bounds.
    """

    _seen_targets: Tensor
    _target_range: Tensor

    @takes_arguments_of(
        Td3Algorithm, without=('reward_weights', 'target_update_tau', 'critic_batches', 'use_target_critics'),
        defaults={'actor_network_ctor': SaleActorNetwork, 'critic_network_ctor': SaleCriticNetwork,
                  'calculate_priority': True, 'target_update_period': 250, 'train_actor_on_last_step': False,
                  'name': 'Td7Algorithm'},
        after={'encoder_ctor': 'critic_network_ctor', 'encoder_optimizer': 'critic_optimizer',
               'policy_checkpoints': 'encoder_optimizer'})
    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, reward_spec: TensorSpec,
                 actor_network_ctor: Callable[..., Any], critic_network_ctor: Callable[..., Any],
                 critic_loss_ctor: Callable[..., Any] | None, target_update_period: Count, config: TrainerConfig | None,
                 encoder_ctor: Callable[..., Any] = SaleEncoder, encoder_optimizer: Any = None,
                 policy_checkpoints: PolicyCheckpoints | None = None, **kwargs: Any):
        owner = type(self).__name__
        if reward_spec.ndim:
            raise ConfError([problem_at(owner, 'reward_spec', f'expected a reward of rank 0, found {reward_spec.numel} '
                                        'rewards', 'use Td3Algorithm, or weigh the rewards in the environment')])
        encoder = encoder_ctor(observation_spec, action_spec)
        z_spec = encoder.embedding_spec

        def make_actor(input_tensor_spec: NestedTensorSpec, **specs: Any) -> Any:
            return actor_network_ctor(input_tensor_spec=(input_tensor_spec, z_spec), **specs)

        def make_critic(input_tensor_spec: NestedTensorSpec) -> Any:
            critic = critic_network_ctor(input_tensor_spec=(input_tensor_spec, (z_spec, z_spec)))
            return EmbeddedCritic(encoder.copy(), critic)

        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         actor_network_ctor=make_actor, critic_network_ctor=make_critic,
                         critic_loss_ctor=critic_loss_ctor or partial(
                             OneStepTDLoss, td_error_loss_fn=losses.element_wise_huber_loss),
                         target_update_tau=1.0, target_update_period=target_update_period, config=config, **kwargs)
        if nest.flatten(self.train_state_spec):
            raise ConfError([problem_at(owner, 'actor_network_ctor', 'or critic_network_ctor is recurrent',
                                        'use feed-forward networks')])
        self._encoder = encoder
        self._add_given_optimizers((encoder_optimizer, encoder))
        # fixed and fixed target encoder start as copies, as the target networks do
        self._update_fixed_encoder = TargetUpdater(encoder, self._critic_networks.encoder)
        TargetUpdater(encoder, self.target_critics.encoder)
        self._target_update_period = target_update_period
        self.register_buffer('_seen_targets', torch.tensor([torch.inf, -torch.inf]))
        self.register_buffer('_target_range', torch.zeros(2))
        self._checkpoints = policy_checkpoints
        self._kept_policy: Any = None
        if policy_checkpoints is not None:
            acting = self._acting_networks()
            self._kept_policy = nn.ModuleList(network.copy() for network in acting)
            self._keep_policy = _Snapshot(acting, list(self._kept_policy))

    def check_config(self, config: TrainerConfig) -> None:
        """Reject settings that do not allow ``policy_checkpoints``.

        Raises:
            ConfError: there would be no updates between episodes, there are several processes, or a data transformer
                other than ``RewardScaling`` changes rewards.
        """
        super().check_config(config)
        if self._checkpoints is None:
            return
        owner = type(self).__name__
        require_environment_rewards(config, f'{owner}.policy_checkpoints compares returns of the environment',
                                    allowed=(RewardScaling, ))
        wrong = {'unroll_length': config.unroll_length != 1, 'whole_replay_buffer_training':
                 config.whole_replay_buffer_training, config.async_actor_field: bool(config.async_actor_field)}
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise ConfError([problem_at(owner, 'policy_checkpoints', f'is not supported with TrainerConfig.{name} = '
                                        f'{getattr(config, name)!r}', 'remove one of them; unroll_length must be 1')])
        if context.num_ranks() > 1:
            raise ConfError([problem_at(owner, 'policy_checkpoints', 'is not supported with several processes',
                                        'remove it, or train in one process')])

    # Acting ----------------------------------------------------------------------------------------------------

    def _acting_networks(self) -> list[Any]:
        return [self._actor_network, self._critic_networks.encoder]

    def _act(self, observation: NestedTensor, state: NestedTensor = ()) -> tuple[NestedTensor, NestedTensor]:
        return self._actor_network((observation, self._critic_networks.encoder.embed_state(observation)), state)

    def _act_in_evaluation(self, observation: NestedTensor, state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        if self._kept_policy is None:
            return self._act(observation, state)
        actor, encoder = self._kept_policy
        return actor((observation, encoder.embed_state(observation)), state)

    def rollout_step(self, inputs: TimeStep, state: Any = None) -> AlgStep:
        """Return the action of the rollout ``[B, ...]``, and keep the policy if ``policy_checkpoints`` decides so."""
        step = super().rollout_step(inputs, state)
        if self._checkpoints is not None and (len(inputs.step_type) > 1 or not self._has_random_steps_left):
            self._assess(self._checkpoints, inputs)
        return step

    def _assess(self, checkpoints: PolicyCheckpoints, inputs: TimeStep) -> None:
        count = len(inputs.step_type)
        if count == 1:
            if checkpoints.observe(int(inputs.step_type), float(environment_reward(inputs))):
                self._keep_policy()
        elif (inputs.step_type != StepType.FIRST).any():  # specs are found by a call on several first steps
            raise ConfError([problem_at(type(self).__name__, 'policy_checkpoints', f'needs one environment, found '
                                        f'{count}', 'set create_environment.num_parallel_environments = 1, or remove '
                                        'it')])

    def num_updates_due(self, count: int) -> int:
        """Return ``count``, or the number of updates that ``policy_checkpoints`` asks for, 0 during an assessment."""
        if self._checkpoints is None or self._updates is None:
            return count
        return self._checkpoints.updates_due(self._updates.value, count)

    # Training --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Compute z of the fixed encoder, ``[N, ...]``, for the policy and the critics."""
        return (), self._critic_networks.encoder.embed_state(rows.observation), state

    def policy_loss(self, rows: Rows, policy: Any, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute the action of the policy and its loss ``[N]``, in an update that trains the policy."""
        return super().policy_loss(_embedded(rows, details), policy, details, state)

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute the critics' values ``[N, n]`` of the action taken, and the encoder's prediction p of the next z."""
        values, state = super().trained_values(_embedded(rows, rows.of(details)), details, state)
        prediction, _ = self._encoder((rows.observation, rows.rollout_info.action))
        return (values, prediction), state

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Compute the values ``[N]`` to bootstrap from, with the fixed target encoder, and the encoder's z."""
        z = self.target_critics.encoder.embed_state(rows.observation)
        value, state = super().bootstrap_values(_embedded(rows, z), policy, state)
        return (value, self._encoder.embed_state(rows.observation)), state

    def _regularized_target(self, value: Tensor, action: NestedTensor, rows: Rows) -> Tensor:
        """Clip the value to the range of the targets (eq. 8), which is 0 until the first copy."""
        low, high = self._target_range
        return value.clamp(low, high)

    def _objective(self, inputs: NestedTensor, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the mean of all critics."""
        q_values, state = self._critic_networks(inputs, state)
        return q_values.mean(1), state

    # Losses ----------------------------------------------------------------------------------------------------

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the sum of the losses of encoder, critics and, in updates that train it, the policy, ``[T, B]``."""
        (q_values, prediction), (value, next_z) = info.critic
        info = info._replace(critic=DdpgCriticInfo(q_values, value))
        loss_info = super().calc_loss(info)
        is_valid = info.step_type[:-1] != StepType.LAST
        target = self._critic_loss.compute_td_target(info, value)
        self._record_targets(target, is_valid)
        encoder_loss = tensor_extend_zero((prediction[:-1] - next_z[1:]).square().mean(-1) * is_valid)
        if self._calculate_priority:
            error = (q_values[:-1].detach() - target.unsqueeze(-1)).abs().amax(-1)
            loss_info = loss_info._replace(priority=lap_priority(error, is_valid))
        return loss_info._replace(loss=loss_info.loss + encoder_loss,
                                  extra=Td7LossInfo(*loss_info.extra, encoder=encoder_loss))

    def _record_targets(self, target: Tensor, is_valid: Tensor) -> None:
        """Extend the range of the targets seen to those of valid steps, ``[T - 1, B]`` each."""
        is_valid = is_valid & target.isfinite()
        low, high = self._seen_targets
        self._seen_targets.copy_(torch.stack([torch.where(is_valid, target, low).amin().minimum(low),
                                              torch.where(is_valid, target, high).amax().maximum(high)]))

    def after_update(self, root_inputs: NestedTensor, info: Any) -> None:
        """Count the update; every ``target_update_period`` updates copy the networks and the range of the targets."""
        super().after_update(root_inputs, info)  # copies the fixed encoder before it changes
        if self._updates is not None and self._updates.value % self._target_update_period == 0:
            self._update_fixed_encoder()
            seen = context.cat_over_ranks(self._seen_targets[None])
            self._target_range.copy_(torch.stack([seen[:, 0].amin(), seen[:, 1].amax()]))


def _embedded(rows: Rows, z: Tensor) -> Rows:
    """Return the same rows with pairs (observation, z) as observations."""
    rows = copy.copy(rows)
    rows.observation = rows.observation, z
    return rows


def lap_priority(error: Tensor, is_valid: Tensor) -> Tensor:
    """Return the priorities of loss-adjusted prioritized replay (Fujimoto et al. 2020, arXiv:2007.06049, section 5.1).

    ``TrainerConfig.priority_replay_alpha`` is their exponent.

    Args:
        error: absolute TD errors ``[T - 1, B]``.
        is_valid: bool ``[T - 1, B]``: whether a step has a target.

    Returns:
        ``max(mean over valid steps, 1)``, ``[B]``; 0 for a sequence without valid steps.
    """
    count = is_valid.sum(0)
    mean = (error * is_valid).sum(0) / count.clamp(min=1)
    return torch.where(count > 0, mean.clamp(min=1.0), 0.0)
