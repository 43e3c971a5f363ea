"""Implicit Q-learning (Kostrikov et al. 2021, arXiv:2110.06169).

With D the data, values are only evaluated at actions in the data::

    V(s)      minimizes  E_D[ |tau - 1(u < 0)| u^2 ],  u = min_i Q'_i(s, a) - V(s)        (eq. 5)
    Q_i(s, a) minimizes  E_D[ (r + gamma V(s') - Q_i(s, a))^2 ]                           (eq. 6)
    pi        maximizes  E_D[ min(exp((min_i Q'_i(s, a) - V(s)) / temperature), max) log pi(a | s) ]   (eq. 7)

Q' are the target critics. As tau approaches 1, the expectile V approaches the value of the best action in the data.
Differs from the paper: for a multi-dimensional reward V is a vector too, and the policy is weighted by the sum of the
advantages; the data may also be collected by the policy.
"""
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.base import critic_values
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm, Rows, Terms
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.offline import offline_losses
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import Count, Fraction, Positive, Range, configurable
from alfx.networks.action_specs import check_actor, refuse_discrete_actions
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils import dist_utils

IqlActionState = namedtuple('IqlActionState', ['actor_network', 'critic'], default_value=())
"""State of the actor network; ``critic`` is not used."""

IqlCriticState = namedtuple('IqlCriticState', ['critics', 'target_critics'], default_value=())
"""States of the critics and the target critics, which see the actions taken."""

IqlState = namedtuple('IqlState', ['action', 'critic', 'value'], default_value=())
"""An :class:`IqlActionState`, an :class:`IqlCriticState`, and the state of the value network."""

IqlActorInfo = namedtuple('IqlActorInfo', ['actor_loss'], default_value=())
"""``actor_loss``: ``[B]``."""

IqlCriticInfo = namedtuple('IqlCriticInfo', ['critics', 'target_value', 'value'], default_value=())
"""``critics``: ``[B, n]`` or ``[B, n, K]``; ``target_value``: the minimum over target critics, ``[B]`` or ``[B, K]``;
``value``: V, of the same shape."""

IqlInfo = namedtuple('IqlInfo', ['reward', 'step_type', 'discount', 'action', 'action_distribution', 'actor', 'critic'],
                     default_value=())
"""Info of the steps, ``[B, ...]`` each; fields that are not needed are ``()``."""

IqlLossInfo = namedtuple('IqlLossInfo', ['actor', 'critic', 'value'], default_value=())
"""Parts of the loss."""


@configurable
class IqlAlgorithm(BootstrappedAlgorithm, OffPolicyAlgorithm):
    """Implicit Q-learning; see the module docstring for the method.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of continuous actions.
        reward_spec: spec of rank 0, or of rank 1 for a K-dimensional reward; critics and V then have K values.
        actor_network_cls: called as ``(input_tensor_spec=, action_spec=)``; creates the policy network, which outputs
            distributions.
        critic_network_cls: called as ``(input_tensor_spec=(observation_spec, action_spec))``, for a K-dimensional
            reward also ``output_tensor_spec=``; creates one critic.
        v_network_cls: called as ``(input_tensor_spec=)``, for a K-dimensional reward also ``output_tensor_spec=``;
            creates V.
        reward_weights: K weights of the advantages in the policy's objective; ``None``: all 1.
        epsilon_greedy: in evaluation, the probability of sampling an action instead of taking the most likely one;
            ``None``: ``config.epsilon_greedy``, or 0 without a config.
        calculate_priority: compute priorities for prioritized replay: the root mean squared TD error of a sequence.
        num_critic_replicas: number n of critics; the minimum over target critics is used.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        critic_loss_ctor: called as ``(debug_summaries=, name=)``; creates the loss of a critic. ``None``:
            ``OneStepTDLoss``.
        target_update_tau: interpolation factor of the soft update of the target critics, in (0, 1]. Smaller values are
            more stable but learn more slowly.
        target_update_period: number of training updates per update of the target critics.
        temperature: temperature of the policy's weights, above 0; 1 / beta in the paper.
        actor_optimizer: optimizes the actor.
        critic_optimizer: optimizes the critics.
        value_optimizer: optimizes V.
        expectile: tau, in (0, 1).
        max_exp_advantage: upper bound of the weights, above 0.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ConfError: a number is out of range, an action is discrete, or the actor network does not output distributions.
    """

    predicts_from_observation = True

    _train_actor_on_last_step = False

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()),
                 actor_network_cls: Callable[..., Any] = ActorDistributionNetwork,
                 critic_network_cls: Callable[..., Any] = CriticNetwork,
                 v_network_cls: Callable[..., Any] = ValueNetwork, reward_weights: list[float] | None = None,
                 epsilon_greedy: Fraction | None = None, calculate_priority: bool = False,
                 num_critic_replicas: Count = 2, env: Any = None, config: TrainerConfig | None = None,
                 critic_loss_ctor: Callable[..., Any] | None = None, target_update_tau: Fraction = 0.05,
                 target_update_period: Count = 1, temperature: Positive = 1.0, actor_optimizer: Any = None,
                 critic_optimizer: Any = None, value_optimizer: Any = None,
                 expectile: Annotated[float, Range(above=0, maximum=1 - 1e-6)] = 0.8, max_exp_advantage: Positive = 100,
                 checkpoint: str | None = None, debug_summaries: bool = False, name: str = 'IqlAlgorithm'):
        owner = type(self).__name__
        refuse_discrete_actions(owner, action_spec, 'choose another environment or algorithm')
        actor = actor_network_cls(input_tensor_spec=observation_spec, action_spec=action_spec)
        check_actor(owner, 'actor_network_cls', actor, gives_distributions=True)
        values = {'output_tensor_spec': TensorSpec(reward_spec.shape)} if reward_spec.ndim else {}
        critics = critic_network_cls(input_tensor_spec=(observation_spec, action_spec),
                                     **values).make_parallel(num_critic_replicas)
        value = v_network_cls(input_tensor_spec=observation_spec, **values)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=IqlState(action=IqlActionState(actor_network=actor.state_spec),
                                                   critic=IqlCriticState(critics.state_spec, critics.state_spec),
                                                   value=value.state_spec),
                         predict_state_spec=IqlState(action=IqlActionState(actor_network=actor.state_spec)),
                         reward_weights=reward_weights, env=env, config=config, checkpoint=checkpoint,
                         debug_summaries=debug_summaries, name=name)
        self._actor_network = actor
        self._critic_networks = critics
        self._value_network = value
        self._set_target_critics(target_update_tau, target_update_period)
        self._add_given_optimizers((actor_optimizer, actor), (critic_optimizer, critics), (value_optimizer, value))
        self._critic_loss = (critic_loss_ctor or OneStepTDLoss)(debug_summaries=debug_summaries,
                                                                name=f'{name}/critic_loss')
        self._stored_actions = offline_losses.StoredActions(action_spec)
        self._temperature, self._expectile, self._max_weight = temperature, expectile, max_exp_advantage
        self._calculate_priority = calculate_priority
        self._is_recurrent = bool(nest.flatten(self.train_state_spec))
        self.set_epsilon_greedy(epsilon_greedy)

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """Return the state of the actor."""
        return IqlState(action=state.action)

    # Acting ----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Return the most likely action ``[B, ...]``, or a sampled one with probability ``epsilon_greedy``."""
        distribution, actor_state = self._actor_network(inputs.observation, state.action.actor_network)
        action = dist_utils.epsilon_greedy_sample(distribution, self._epsilon_greedy)
        return AlgStep(action, IqlState(action=IqlActionState(actor_state)), IqlInfo(action_distribution=distribution))

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Sample an action; if states are stored for training, also advance the states of critics and V."""
        distribution, actor_state = self._actor_network(inputs.observation, state.action.actor_network)
        action = dist_utils.sample_action_distribution(distribution)
        new_state = state._replace(action=IqlActionState(actor_state))
        if self.need_full_rollout_state():
            rows = Rows((inputs, IqlInfo(action=action)))
            _, _, new_state = self._values(rows, new_state)
            _, new_state = self.trained_values(rows, (), new_state)
        return AlgStep(action, new_state, IqlInfo(action=action))

    # Training --------------------------------------------------------------------------------------------------

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Compute the distribution of the policy."""
        distribution, actor_state = self._actor_network(rows.observation, state.action.actor_network)
        return distribution, (), state._replace(action=IqlActionState(actor_state))

    def policy_loss(self, rows: Rows, policy: Any, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute the loss of the policy ``[N]``, V, and the minimum over target critics, which determine its
        weights."""
        value, target, state = self._values(rows, state)
        advantage = critic_values.weighted_sum(target - value, self._reward_weights)
        weights = offline_losses.advantage_weights(advantage, self._temperature, self._max_weight)
        log_prob = self._stored_actions.log_prob(policy, rows.rollout_info.action)
        return (-weights * log_prob, value, target), state

    def _values(self, rows: Rows, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Compute V with gradient and the minimum over target critics without, ``[N]`` or ``[N, K]``."""
        value, value_state = self._value_network(rows.observation, state.value)
        with torch.no_grad():
            q_values, target_state = self._target_critic_networks((rows.observation, rows.rollout_info.action),
                                                                  state.critic.target_critics)
            target = critic_values.min_q(q_values, self._reward_weights)
        return value, target, state._replace(critic=state.critic._replace(target_critics=target_state),
                                             value=value_state)

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute the critics' values ``[N, n]`` (``[N, n, K]``) of the actions taken."""
        q_values, critics = self._critic_networks((rows.observation, rows.rollout_info.action), state.critic.critics)
        return q_values, state._replace(critic=state.critic._replace(critics=critics))

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Compute V to bootstrap from; for recurrent networks :meth:`policy_loss` has computed it already."""
        return ((), state) if self._is_recurrent else (self._value_network(rows.observation)[0], state)

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return the action taken and an :class:`IqlInfo`."""
        actor_loss, value, target_value = terms.loss
        if inputs.step_type.ndim == 2:  # a sequence at once: V has no gradient at its last step
            value = torch.cat((value[:-1], terms.target[-1:]))
        return rollout_info.action, IqlInfo(
            reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount, action=rollout_info.action,
            action_distribution=terms.policy, actor=IqlActorInfo(actor_loss),
            critic=IqlCriticInfo(terms.values, target_value, value))

    # Losses ----------------------------------------------------------------------------------------------------

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the sum of the losses of policy, critics and V, ``[T, B]``; 0 at the last step of a sequence."""
        critics, target_value, value = info.critic
        count = critics.shape[2]
        seen = IqlInfo(reward=info.reward, step_type=info.step_type, discount=info.discount)
        critic_loss = critic_values.loss_of_all_critics(self._critic_loss, seen, critics, value.detach())
        value_loss = offline_losses.expectile_loss(target_value - value, self._expectile)
        if value_loss.ndim == 3:
            value_loss = value_loss.mean(-1)
        actor_loss, value_loss = (torch.cat((x[:-1], torch.zeros_like(x[-1:]))) for x in (info.actor.actor_loss,
                                                                                          value_loss))
        priority = critic_values.sequence_priority(critic_loss / count, info.step_type) if (
            self._calculate_priority) else ()
        return LossInfo(loss=actor_loss + critic_loss + value_loss, priority=priority,
                        extra=IqlLossInfo(actor=actor_loss, critic=critic_loss, value=value_loss))
