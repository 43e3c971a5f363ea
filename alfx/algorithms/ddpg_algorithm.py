"""Deep deterministic policy gradient (Lillicrap et al. 2015, arXiv:1509.02971).

Differs from the paper: there may be several critics, whose minimum is used (as in TD3); rewards may be vectors; the
gradient of the value with respect to the action may be clipped and actions penalized (as in Andrychowicz et al. 2017,
arXiv:1707.01495); exploration noise is in units of half the range of the actions; critics and policy take their steps
together, from the same parameters, and the policy is also trained at the last step of a sequence. Twin-delayed DDPG is
in :mod:`alfx.algorithms.td3_algorithm`; both explore with :mod:`alfx.algorithms.base.exploration_noise`.
"""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alfx import nest, norm_layers
from alfx.algorithms.base import critic_values
from alfx.algorithms.base.exploration_noise import ActionBounds, GaussianNoise, OrnsteinUhlenbeckNoise, choose
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm, Rows, Terms
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.sac.actions import ActionParts
from alfx.algorithms.sac.states import check_batches
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Count, Fraction, NonNegative, configurable, non_default, problem_at
from alfx.networks.action_specs import check_actor
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.schedulers import as_scheduler
from alfx.utils.target_updater import TargetUpdater

DdpgCriticState = namedtuple('DdpgCriticState', ['critics', 'target_actor', 'target_critics'], default_value=())
"""States of the critics for the actions taken, of the target actor, and of the target critics for its actions."""

DdpgActorState = namedtuple('DdpgActorState', ['actor', 'critics'], default_value=())
"""States of the actor, and of the critics for its actions."""

DdpgState = namedtuple('DdpgState', ['actor', 'critics', 'noise'], default_value=())
"""A ``DdpgActorState``, a ``DdpgCriticState`` and, during the rollout, the state of the exploration noise."""

DdpgCriticInfo = namedtuple('DdpgCriticInfo', ['q_values', 'target_q_values'], default_value=())
"""``q_values``: ``[B, n]`` or ``[B, n, K]``; ``target_q_values``: ``[B]`` or ``[B, K]``."""

DdpgInfo = namedtuple('DdpgInfo', ['reward', 'step_type', 'discount', 'action', 'action_distribution', 'actor_loss',
                                   'critic', 'discounted_return'], default_value=())
"""Info of the steps, ``[B, ...]`` each; fields that are not needed are ``()``.

``action`` is the action taken, ``action_distribution`` the action of the policy without noise. ``discounted_return`` is
present if the replay buffer provides it.
"""

DdpgLossInfo = namedtuple('DdpgLossInfo', ['actor', 'critic'], default_value=())
"""Parts of the loss."""


@configurable
class DdpgAlgorithm(BootstrappedAlgorithm, OffPolicyAlgorithm):
    """Deterministic policy, trained along the gradient of its critic with respect to the action.

    The rollout adds noise to actions; see ``ou_stddev`` and ``rollout_random_action``. The training state is
    ``DdpgState(actor, critics)``; the rollout state also has the state of the ``noise``.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec`` of continuous actions with finite bounds.
        reward_spec: spec of rank 0, or of rank 1 for a K-dimensional reward; the critics then have K values.
        actor_network_ctor: called as ``(input_tensor_spec=, action_spec=)``; creates the policy network.
        critic_network_ctor: called as ``(input_tensor_spec=(observation_spec, action_spec))``, for a K-dimensional
            reward also ``output_tensor_spec=``; creates one critic.
        reward_weights: K weights of the value dimensions in the policy's objective; ``None``: all 1.
        epsilon_greedy: in evaluation, the probability of adding exploration noise, as at the first step of an episode,
            to an action; ``None``: ``config.epsilon_greedy``, or 0 without a config.
        calculate_priority: compute priorities for prioritized replay: the root mean squared TD error of a sequence, or,
            with another critic loss, the square root of the mean loss.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        ou_stddev: standard deviation of the increments of the Ornstein-Uhlenbeck noise, in units of half the range of
            the action. Each environment has its own noise state, which is reset to 0 at the start of every episode.
        ou_damping: fraction of the noise that decays at each step, in [0, 1].
        critic_loss_ctor: called as ``(debug_summaries=, name=)``; creates the critic loss, which treats several critics
            as additional samples. ``None``: ``OneStepTDLoss``.
        num_critic_replicas: number n of critics; the minimum of their values is used.
        target_update_tau: interpolation factor of the soft update of the target networks, in (0, 1]. Smaller values are
            more stable but learn more slowly.
        target_update_period: number of training updates per update of the target networks.
        rollout_random_action: probability of taking a uniformly random action in the rollout, a number or a schedule.
        dqda_clipping: clip the gradient of the value with respect to each element of the action to ``[-dqda_clipping,
            dqda_clipping]``; ``None`` or 0: no clipping.
        action_l2: weight of the squared norm of the action in the loss of the policy.
        actor_optimizer: optimizes the actor.
        critic_optimizer: optimizes the critics.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.
        train_actor_on_last_step: also train the policy at the last step of each sequence, where the critics are not
            trained because there is no next step to bootstrap from.
        exploration_noise_ctor: called with ``action_spec``; creates other exploration noise, such as
            :class:`~alfx.algorithms.base.exploration_noise.GaussianNoise`. ``None``: Ornstein-Uhlenbeck noise.
        critic_batches: ``'separate'`` or ``'joint'``, see :class:`~alfx.algorithms.sac_algorithm.SacAlgorithm`.
        use_target_critics: bootstrap from target critics, see ``SacAlgorithm``.

    Raises:
        ConfError: a number is out of range, or ``exploration_noise_ctor`` is given together with ``ou_stddev`` or
            ``ou_damping``.
        SpecError: an action is discrete, or has no finite bounds.
    """

    _not_trained = ('_target_actor_network', '_target_critic_networks')
    predicts_from_observation = True

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), actor_network_ctor: Callable[..., Any] = ActorNetwork,
                 critic_network_ctor: Callable[..., Any] = CriticNetwork, reward_weights: list[float] | None = None,
                 epsilon_greedy: Fraction | None = None, calculate_priority: bool = False, env: Any = None,
                 config: TrainerConfig | None = None, ou_stddev: NonNegative = 0.2,
                 ou_damping: Fraction = 0.15, critic_loss_ctor: Callable[..., Any] | None = None,
                 num_critic_replicas: Count = 1, target_update_tau: Fraction = 0.05, target_update_period: Count = 1,
                 rollout_random_action: Fraction | Callable[[], Fraction] = 0.0,
                 dqda_clipping: NonNegative | None = None, action_l2: NonNegative = 0.0, actor_optimizer: Any = None,
                 critic_optimizer: Any = None, checkpoint: str | None = None, debug_summaries: bool = False,
                 name: str = 'DdpgAlgorithm', train_actor_on_last_step: bool = True,
                 exploration_noise_ctor: Callable[[NestedTensorSpec], Any] | None = None,
                 critic_batches: str = 'separate',
                 use_target_critics: bool = True):
        owner = type(self).__name__
        bounds = ActionBounds(action_spec, owner)
        if exploration_noise_ctor is None:
            exploration_noise_ctor = partial(OrnsteinUhlenbeckNoise, stddev=ou_stddev, damping=ou_damping)
        elif non_default(DdpgAlgorithm.__init__, locals(), 'ou_stddev', 'ou_damping'):
            raise ConfError([problem_at(owner, 'exploration_noise_ctor', 'replaces the Ornstein-Uhlenbeck noise, but '
                                        'ou_stddev or ou_damping is set too', 'remove one or the other')])
        exploration = exploration_noise_ctor(action_spec)
        actor = actor_network_ctor(input_tensor_spec=observation_spec, action_spec=action_spec)
        check_actor(type(self).__name__, 'actor_network_ctor', actor, gives_distributions=False)
        values = {'output_tensor_spec': TensorSpec(reward_spec.shape)} if reward_spec.ndim else {}
        critic = critic_network_ctor(input_tensor_spec=(observation_spec, action_spec), **values)
        critics = critic.make_parallel(num_critic_replicas)
        train_state_spec = DdpgState(actor=DdpgActorState(actor=actor.state_spec, critics=critics.state_spec),
                                     critics=DdpgCriticState(critics=critics.state_spec, target_actor=actor.state_spec,
                                                             target_critics=critics.state_spec))
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=train_state_spec,
                         rollout_state_spec=train_state_spec._replace(noise=exploration.state_spec),
                         predict_state_spec=actor.state_spec, reward_weights=reward_weights, env=env, config=config,
                         checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._actor_network = actor
        self._critic_networks = critics
        self._target_actor_network = actor.copy(name='target_' + actor.name)
        check_batches(owner, ActionParts(action_spec), critic_batches, use_target_critics, 1, train_state_spec,
                      norm_layers.has_batch_norm(critics))
        self._joins_batches = critic_batches == 'joint'
        self._target_critic_networks = critics.copy(name='target_' + critics.name) if use_target_critics else None
        pairs = [(actor, self._target_actor_network), (critics, self._target_critic_networks)]
        sources, targets = zip(*pairs if use_target_critics else pairs[:1])
        self._update_target = TargetUpdater(sources, targets, tau=target_update_tau, period=target_update_period)
        self._add_given_optimizers((actor_optimizer, actor), (critic_optimizer, critics))
        self._critic_loss = (critic_loss_ctor or OneStepTDLoss)(debug_summaries=debug_summaries,
                                                                name=f'{name}/critic_loss')
        self._set_norms(None, self)
        self._bounds = bounds
        self._exploration: Any = exploration
        self.set_epsilon_greedy(epsilon_greedy)
        self._calculate_priority = calculate_priority
        self._rollout_random_action = as_scheduler(rollout_random_action)
        self._dqda_clipping = dqda_clipping or None
        self._action_l2 = action_l2
        self._train_actor_on_last_step = train_actor_on_last_step
        self._is_recurrent = bool(nest.flatten(train_state_spec))
        self._policy = self._noisy_policy = None
        if not self._is_recurrent and all(map(is_traceable, self._acting_networks())):
            self._policy = self.recorded(self._best_action, *self._acting_networks())
            if getattr(type(exploration), 'forward', None) is GaussianNoise.forward and exploration.state_spec == ():
                self._noisy_policy = self.recorded(self._noisy_action, *self._acting_networks(), exploration)

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """Return the state of the actor."""
        return state.actor.actor

    # Acting ----------------------------------------------------------------------------------------------------

    def _acting_networks(self) -> list[Any]:
        """Return the networks that :meth:`_act` calls."""
        return [self._actor_network]

    def _act(self, observation: NestedTensor, state: NestedTensor = ()) -> tuple[NestedTensor, NestedTensor]:
        """Return the action of the policy ``[B, ...]`` and the next state of the actor."""
        return self._actor_network(observation, state)

    def _act_in_evaluation(self, observation: NestedTensor, state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        return self._act(observation, state)

    def _best_action(self, observation: NestedTensor) -> NestedTensor:
        return self._act(observation)[0]

    def _noisy_action(self, observation: NestedTensor) -> NestedTensor:
        return self._exploration.noisy(self._best_action(observation))

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the action of the policy ``[B, ...]``; with probability ``epsilon_greedy`` noise is added to it."""
        action, state = self._act_in_evaluation(inputs.observation, state)
        output = action
        if self._epsilon_greedy > 0:
            output = choose(self._epsilon_greedy, self._exploration.first_step(action), action)
        return AlgStep(output, state, DdpgInfo(action=output, action_distribution=action))

    def rollout_step(self, inputs: TimeStep, state: Any = None) -> AlgStep:
        """Return the action of the policy with exploration noise, or a random one, ``[B, ...]``."""
        state = state or self.get_initial_rollout_state(inputs.step_type.shape[0])
        probability = self._random_action_probability()
        if self._noisy_policy is not None and probability <= 0:
            self._exploration.follow_schedule()
            taken = self._noisy_policy(inputs.observation)
            return AlgStep(taken, state, DdpgInfo(action=taken))
        if self._policy is not None:
            action, actor_state = self._policy(inputs.observation), state.actor.actor
        else:
            action, actor_state = self._act(inputs.observation, state.actor.actor)
        taken, noise_state = self._exploration(action, state.noise)
        if probability > 0:
            taken = choose(probability, self._bounds.sample_like(action), taken)
        new_state = DdpgState(state.actor._replace(actor=actor_state), state.critics, noise_state)
        if self._is_recurrent and self.need_full_rollout_state():
            new_state = self._with_critic_states(new_state, inputs, action, taken)
        return AlgStep(taken, new_state, DdpgInfo(action=taken))

    def _random_action_probability(self) -> float:
        """Return the probability of a random action in this step of the rollout."""
        return self._rollout_random_action()

    def _with_critic_states(self, state: Any, inputs: TimeStep, action: NestedTensor, taken: NestedTensor) -> Any:
        """Advance the parts of ``state`` that only training needs by one step, and return the new state."""
        _, actor_critics = self._critic_networks((inputs.observation, action), state.actor.critics)
        _, critics = self._critic_networks((inputs.observation, taken), state.critics.critics)
        _, target_actor, target_critics = self._target_values(Rows((inputs, DdpgInfo(action=taken))), state.critics)
        return state._replace(actor=state.actor._replace(critics=actor_critics),
                              critics=DdpgCriticState(critics, target_actor, target_critics))

    # Training --------------------------------------------------------------------------------------------------

    def policy_loss(self, rows: Rows, policy: Any, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute the action of the policy and its loss ``[N]``, in an update that trains the policy."""
        if not self._is_actor_trained():
            return ((), ()), state
        action, loss, actor_state = self._actor_step(rows, state.actor)
        return (action, loss), state._replace(actor=actor_state)

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute the critics' values ``[N, n]`` (``[N, n, K]``) of the action taken."""
        q_values, critics = self._critic_networks((rows.observation, rows.rollout_info.action), state.critics.critics)
        return q_values, state._replace(critics=state.critics._replace(critics=critics))

    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Compute the lowest value of the target critics for the target policy's action."""
        target, target_actor, target_critics = self._target_values(rows, state.critics)
        return target, state._replace(critics=DdpgCriticState(state.critics.critics, target_actor, target_critics))

    def joint_values(self, trained: Rows, later: Rows, policy: Any) -> tuple[Tensor, Tensor]:
        """Compute the values of the action taken and those to bootstrap from by one call of each network."""
        with torch.no_grad():
            action, _ = self._next_action(later, ())
        values, bootstrapped = self._joint_critics((trained.observation, trained.rollout_info.action),
                                                   (later.observation, action))
        value = critic_values.min_q(bootstrapped, self._reward_weights)
        return values, self._regularized_target(value, action, later).detach()

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return the action of the policy and a :class:`DdpgInfo`."""
        action, actor_loss = terms.loss
        return action, DdpgInfo(reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount,
                                action=rollout_info.action, action_distribution=action, actor_loss=actor_loss,
                                critic=DdpgCriticInfo(terms.values, terms.target),
                                discounted_return=rollout_info.discounted_return)

    @torch.no_grad()
    def _target_values(self, rows: Rows, state: Any) -> tuple[Tensor, NestedTensor, NestedTensor]:
        """Compute values ``[B]`` or ``[B, K]`` to bootstrap from, and the states of target actor and target critics."""
        action, actor_state = self._next_action(rows, state.target_actor)
        critics = self._critic_networks if self._target_critic_networks is None else self._target_critic_networks
        q_values, critics_state = critics((rows.observation, action), state.target_critics)
        value = critic_values.min_q(q_values, self._reward_weights)
        return self._regularized_target(value, action, rows), actor_state, critics_state

    def _next_action(self, rows: Rows, state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        """Return the action to bootstrap from, ``[N, ...]``, and the state of the target actor."""
        with norm_layers.running_statistics():
            action, state = self._target_actor_network(rows.observation, state)
        return self._target_action(action), state

    def _target_action(self, action: NestedTensor) -> NestedTensor:
        """Return the action to bootstrap from, given the action of the target actor."""
        return action

    def _regularized_target(self, value: Tensor, action: NestedTensor, rows: Rows) -> Tensor:
        """Return the value to bootstrap from, given the value of the action returned by :meth:`_target_action`."""
        return value

    def _actor_step(self, rows: Rows, state: Any) -> tuple[NestedTensor, Tensor, Any]:
        """Compute the action of the policy ``[B, ...]``, its loss ``[B]``, and the next ``DdpgActorState``.

        The gradient of the loss with respect to the action is ``-dQ/da`` (clipped) plus the gradient of ``action_l2 *
        |a|^2``. The critics get no gradient.
        """
        action, actor_state = self._actor_network(rows.observation, state.actor)
        leaves = critic_values.leaves_of_graph(action)
        with norm_layers.running_statistics():
            value, critics_state = self._objective((rows.observation, leaves), state.critics)
        value = critic_values.weighted_sum(value, self._reward_weights)
        gradient = critic_values.action_gradient(value, leaves, self._dqda_clipping)
        loss = self._regularized_loss(critic_values.deterministic_policy_loss(gradient, action), value, action, rows)
        if self._action_l2 > 0:
            loss = loss + self._action_l2 * sum(a.square().reshape(len(a), -1).sum(1) for a in nest.flatten(action))
        return action, loss, DdpgActorState(actor_state, critic_values.detached(critics_state))

    def _regularized_loss(self, loss: Tensor, value: Tensor, action: NestedTensor, rows: Rows) -> Tensor:
        """Return the loss ``[B]`` of the policy, given the loss of maximizing ``value`` ``[B]`` of its ``action``."""
        return loss

    def _objective(self, inputs: NestedTensor, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Compute the values ``[B]`` or ``[B, K]`` that the policy maximizes, and the next state of the critics.

        ``inputs`` and ``state`` are the inputs and the state of the critics.
        """
        q_values, state = self._critic_networks(inputs, state)
        return critic_values.min_q(q_values, self._reward_weights), state

    # Losses ----------------------------------------------------------------------------------------------------

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the sum of the losses of the policy and of all critics, ``[T, B]``."""
        q_values, target = info.critic
        fields = DdpgInfo(info.reward, info.step_type, info.discount, discounted_return=info.discounted_return)
        critic_loss = critic_values.loss_of_all_critics(self._critic_loss, fields, q_values, target)
        total, actor_loss = critic_loss, info.actor_loss
        if isinstance(actor_loss, Tensor):
            if not self._train_actor_on_last_step:
                actor_loss = torch.cat([actor_loss[:-1], torch.zeros_like(actor_loss[-1:])])
            total = total + actor_loss
        priority: Any = ()
        if self._calculate_priority:
            priority = critic_values.sequence_priority(critic_loss / q_values.shape[2], info.step_type)
        return LossInfo(loss=total, priority=priority, extra=DdpgLossInfo(actor=actor_loss, critic=critic_loss))
