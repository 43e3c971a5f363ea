"""SARSA with function approximation for continuous actions, on-policy or from a replay buffer.

Rummery and Niranjan 1994, "On-line Q-learning using connectionist systems"; Sutton and Barto 2018, section 6.4. The
critics learn the value of the policy's actions,

    Q(s[t], a[t])  ->  r[t+1] + gamma discount[t+1] Q'(s[t+1], a[t+1])

with target critics Q'. Differences from the book: actions are continuous, and the policy follows the gradient of Q with
respect to the action, either deterministic as in DDPG (Lillicrap et al. 2016, arXiv:1509.02971) or stochastic and
entropy-regularized as in SAC (Haarnoja et al. 2018, arXiv:1812.05905). The lowest of several critics is used (Fujimoto
et al. 2018, arXiv:1802.09477). On-policy, a[t+1] is the action taken. When training from a replay buffer, it is sampled
from the current policy, because the action taken belongs to an older policy.
"""
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest, summary
from alfx.algorithms.base import critic_values
from alfx.algorithms.base.exploration_noise import OrnsteinUhlenbeckNoise, choose
from alfx.algorithms.base.time_slices import pad_end
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm, Rows, Terms
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.algorithms.sac import soft_losses as sac_losses
from alfx.algorithms.sac.actions import target_entropy_of
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import Count, Fraction, NonNegative, Positive, configurable, log_unused, non_default
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.discrete_action import suited_algorithms
from alfx.utils.target_updater import TargetUpdater

SarsaState = namedtuple('SarsaState', ['prev_observation', 'prev_step_type', 'actor', 'critics', 'target_critics',
                                       'noise'], default_value=())
"""``actor``, ``critics``, ``target_critics``: states of the networks; ``noise``: state of the exploration noise, in the
rollout. ``prev_observation`` and ``prev_step_type`` are always ``()``: training sees both steps of a transition."""

SarsaInfo = namedtuple('SarsaInfo', ['reward', 'step_type', 'discount', 'action_distribution', 'actor_loss', 'critics',
                                     'target_critics', 'neg_entropy', 'action'], default_value=())
"""Info of a step, ``[B, ...]`` each; unused fields are ``()``.

``action_distribution`` is the current policy, or its action if it is deterministic; ``actor_loss`` has the gradient of
-Q (minus alpha times the entropy); ``critics`` ``[B, n]`` (``[B, n, K]``) are the values of the ``action`` taken,
``target_critics`` ``[B]`` (``[B, K]``) the value to bootstrap from; ``neg_entropy`` is the log-probability of an action
of the policy.
"""

SarsaLossInfo = namedtuple('SarsaLossInfo', ['actor', 'critic', 'alpha', 'neg_entropy'], default_value=())
"""Parts of the loss, for summaries."""


@configurable
class SarsaAlgorithm(BootstrappedAlgorithm, RLAlgorithm):
    """SARSA for continuous actions; see the module docstring for the method.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec`` of continuous actions.
        actor_network_ctor: called as ``(input_tensor_spec=, action_spec=)``; creates the network of the policy. It
            outputs actions (an ``ActorNetwork``), to which noise is added in the rollout, or distributions that can be
            reparameterized (an ``ActorDistributionNetwork``).
        critic_network_ctor: called as ``(input_tensor_spec=(observation_spec, action_spec))``, for K rewards also with
            ``output_tensor_spec``; creates one critic.
        reward_spec: rank 0, or rank 1 for K rewards; each critic then has K values.
        num_critic_replicas: number n of critics; the lowest of their values is used.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        critic_loss_cls: creates the loss of the critics, called as ``(debug_summaries=, name=)``. The losses of the n
            critics are summed.
        target_entropy: target entropy in nats, which alpha is adjusted to reach; or a function of a spec, summed over
            the nest of actions; ``None``: ``calc_default_target_entropy``.
        epsilon_greedy: in evaluation, the probability of sampling an action (for a deterministic policy, of adding the
            noise of a first step); ``None``: ``config.epsilon_greedy``, or 0 without a config.
        use_entropy_reward: train the critics on rewards that include ``alpha * entropy``.
        calculate_priority: set ``LossInfo.priority``, for prioritized replay: the root mean squared TD error.
        initial_alpha: initial weight of the entropy in the loss of the actor; ``None``: no entropy term. Ignored by a
            deterministic policy, which has no entropy.
        ou_stddev: only used for a deterministic policy: standard deviation of the increments of its Ornstein-Uhlenbeck
            noise per step of the rollout, in units of half the range of an action.
        ou_damping: only used for a deterministic policy: share of the noise that is lost at each step.
        actor_optimizer: optimizer of the actor; ``None``: the optimizer of the enclosing algorithm.
        critic_optimizer: optimizer of the critics; ``None``: the optimizer of the enclosing algorithm.
        alpha_optimizer: optimizer of log alpha; ``None``: the optimizer of the enclosing algorithm. Only with a
            stochastic policy.
        target_update_tau: coefficient of the soft (Polyak) update of the target networks, in (0, 1]; smaller values
            are more stable and learn more slowly.
        target_update_period: number of updates between two updates of the target networks.
        use_smoothed_actor: act with a copy of the actor that follows it like a target network. Not on-policy.
        dqda_clipping: clip each element of dQ/da in the loss of the actor to ``[-dqda_clipping, dqda_clipping]``; 0:
            no clipping.
        on_policy: train on each unroll once instead of from the replay buffer.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.
        train_actor_on_last_step: also train actor and alpha at the last step of each sequence from the replay buffer,
            where the critics are not trained.

    Raises:
        SpecError: an action is not continuous, or the outputs of the critics do not match the reward.
        ValueError: arguments contradict each other or are out of range.
    """

    _declared_capabilities = {'needs_two_steps': True}  # both of a transition
    _not_trained = ('_target_critic_networks', '_smoothed_actor_network')

    predicts_from_observation = True

    _target_entropy: float

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 actor_network_ctor: Callable[..., Any], critic_network_ctor: Callable[..., Any],
                 reward_spec: TensorSpec = TensorSpec(()), num_critic_replicas: Count = 2, env: Any = None,
                 config: TrainerConfig | None = None, critic_loss_cls: Callable[..., Any] = OneStepTDLoss,
                 target_entropy: float | Callable[[Any], float] | None = None, epsilon_greedy: Fraction | None = None,
                 use_entropy_reward: bool = False, calculate_priority: bool = False,
                 initial_alpha: Positive | None = 1.0, ou_stddev: NonNegative = 0.2, ou_damping: Fraction = 0.15,
                 actor_optimizer: Any = None, critic_optimizer: Any = None, alpha_optimizer: Any = None,
                 target_update_tau: Fraction = 0.05, target_update_period: Count = 10, use_smoothed_actor: bool = False,
                 dqda_clipping: NonNegative = 0.0, on_policy: bool = False, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'SarsaAlgorithm', train_actor_on_last_step: bool = True):
        _check_arguments(name, action_spec, use_smoothed_actor and on_policy)
        actor = actor_network_ctor(input_tensor_spec=observation_spec, action_spec=action_spec)
        values = {'output_tensor_spec': TensorSpec(reward_spec.shape)} if reward_spec.ndim else {}
        critics = critic_network_ctor(input_tensor_spec=(observation_spec, action_spec),
                                      **values).make_parallel(num_critic_replicas)
        _check_values(critics, num_critic_replicas, reward_spec, name)
        is_stochastic = actor.is_distribution_output
        noise = None if is_stochastic else OrnsteinUhlenbeckNoise(action_spec, stddev=ou_stddev, damping=ou_damping)
        train_state_spec = SarsaState(actor=actor.state_spec, critics=critics.state_spec,
                                      target_critics=critics.state_spec)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=train_state_spec,
                         rollout_state_spec=train_state_spec._replace(noise=() if noise is None else noise.state_spec),
                         predict_state_spec=SarsaState(actor=actor.state_spec), is_on_policy=on_policy, env=env,
                         config=config, checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._actor_network = actor
        self._critic_networks = critics
        self._target_critic_networks = critics.copy(name='target_' + critics.name)
        self._smoothed_actor_network = actor.copy(name='smoothed_' + actor.name) if use_smoothed_actor else None
        self._is_stochastic = is_stochastic
        self._noise = noise
        self._is_recurrent = bool(nest.flatten(train_state_spec))
        self.set_epsilon_greedy(epsilon_greedy)
        self._calculate_priority = calculate_priority
        self._dqda_clipping = dqda_clipping
        self._train_actor_on_last_step = train_actor_on_last_step
        self._critic_loss = critic_loss_cls(debug_summaries=debug_summaries, name='critic_loss')
        self._set_alpha(initial_alpha if is_stochastic else None, target_entropy, use_entropy_reward, alpha_optimizer)
        if is_stochastic:
            log_unused('SarsaAlgorithm', non_default(SarsaAlgorithm.__init__, locals(), 'ou_stddev', 'ou_damping'),
                       f'{actor.name} outputs distributions, which need no noise')
        smoothed = [] if self._smoothed_actor_network is None else [self._smoothed_actor_network]
        self._update_target = TargetUpdater([critics, actor][:1 + len(smoothed)],
                                            [self._target_critic_networks, *smoothed], tau=target_update_tau,
                                            period=target_update_period)
        self._add_given_optimizers((actor_optimizer, actor), (critic_optimizer, critics),
                                   (alpha_optimizer, self._log_alpha))

    def _set_alpha(self, initial_alpha: float | None, target_entropy: Any, use_entropy_reward: bool,
                   alpha_optimizer: Any) -> None:
        self._use_entropy_reward = use_entropy_reward
        self._log_alpha: nn.Parameter | None = None
        if initial_alpha is not None:
            self._log_alpha = nn.Parameter(torch.tensor(math.log(initial_alpha)))
            self._target_entropy = target_entropy_of(self._action_spec, target_entropy)
            return
        reason = ('initial_alpha is None' if self._is_stochastic else
                  f'{self._actor_network.name} outputs actions, not distributions')
        for argument, is_set in (('target_entropy', target_entropy is not None),
                                 ('use_entropy_reward', use_entropy_reward)):
            if is_set:
                raise ValueError(f'{self._name}.{argument} has no effect without an entropy: {reason}')
        log_unused('SarsaAlgorithm', [] if alpha_optimizer is None else ['alpha_optimizer'], reason)

    def convert_train_state_to_predict_state(self, state: Any) -> Any:
        """Return the state of the actor."""
        return SarsaState(actor=state.actor)

    # Acting ----------------------------------------------------------------------------------------------------

    @property
    def _acting_network(self) -> Any:
        return self._actor_network if self._smoothed_actor_network is None else self._smoothed_actor_network

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Return the action of the policy ``[B, ...]``, the mode if it is stochastic; see ``epsilon_greedy``."""
        policy, actor_state = self._acting_network(inputs.observation, state.actor)
        if self._is_stochastic:
            action = dist_utils.epsilon_greedy_sample(policy, self._epsilon_greedy)
        else:
            action = policy
            if self._epsilon_greedy > 0:
                assert self._noise is not None
                action = choose(self._epsilon_greedy, self._noise.first_step(policy), policy)
        return AlgStep(action, SarsaState(actor=actor_state), SarsaInfo(action_distribution=policy))

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Return an exploration action ``[B, ...]``; on-policy also the inputs of the loss."""
        observation = inputs.observation
        policy, actor_state = self._acting_network(observation, state.actor)
        taken, noise = self._explore(policy, state.noise)
        new_state = SarsaState(actor=actor_state, critics=state.critics, target_critics=state.target_critics,
                               noise=noise)
        if self.on_policy:
            rows, terms = Rows((inputs, SarsaInfo(action=taken))), (policy, *self._action_of(policy))
            critics, new_state = self.trained_values(rows, (), new_state)
            target, new_state = self.bootstrap_values(rows, (policy, taken), new_state)
            loss, _ = self.policy_loss(rows, terms, (), state)
            return AlgStep(taken, new_state, self.train_info(*rows.source, Terms(terms, loss, critics, target))[1])
        if self._is_recurrent and self.need_full_rollout_state():
            new_state = new_state._replace(
                critics=self._critic_networks((observation, taken), state.critics)[1],
                target_critics=self._target_critic_networks((observation, taken), state.target_critics)[1])
        return AlgStep(taken, new_state, SarsaInfo(action=taken))

    def _explore(self, policy: Any, noise_state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        """Return an action of the rollout without gradient, and the next state of the noise."""
        if self._is_stochastic:
            return dist_utils.sample_action_distribution(policy), noise_state
        assert self._noise is not None
        return self._noise(nest.map_structure(Tensor.detach, policy), noise_state)

    def _action_of(self, policy: Any) -> tuple[NestedTensor, Any]:
        """Return an action of the policy with gradient, and its log-probability ``[B]`` (``()`` if deterministic)."""
        if not self._is_stochastic:
            return policy, ()
        action = dist_utils.rsample_action_distribution(policy)
        return action, dist_utils.compute_log_probability(policy, action)

    # Training --------------------------------------------------------------------------------------------------

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Return the policy, an action of it with gradient, and its log-probability."""
        policy, actor_state = self._actor_network(rows.observation, state.actor)
        action, log_pi = self._action_of(policy)
        return (policy, action, log_pi), (), state._replace(actor=actor_state)

    def policy_loss(self, rows: Rows, policy: Any, details: Any, state: Any) -> tuple[Any, Any]:
        """Return the loss ``[N]`` of the actor."""
        _, action, log_pi = policy
        return self._actor_loss(rows.observation, action, log_pi, state.critics), state

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Return the critics' values ``[N, n]`` (``[N, n, K]``) of the action taken."""
        critics, critics_state = self._critic_networks((rows.observation, rows.rollout_info.action), state.critics)
        return critics, state._replace(critics=critics_state)

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Return the lowest value of the target critics ``[N]`` (``[N, K]``) for an action of the policy."""
        values, target_state = self._target_critic_networks((rows.observation, rows.of(policy[1])),
                                                            state.target_critics)
        return critic_values.min_q(values, self._reward_weights), state._replace(target_critics=target_state)

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return an action of the policy, and a :class:`SarsaInfo`."""
        distribution, action, log_pi = terms.policy
        return action, SarsaInfo(
            reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount, action=rollout_info.action,
            action_distribution=distribution, actor_loss=terms.loss, critics=terms.values, target_critics=terms.target,
            neg_entropy=log_pi.detach() if self._is_stochastic else ())

    def _actor_loss(self, observation: NestedTensor, action: NestedTensor, log_pi: Any, state: NestedTensor) -> Tensor:
        """Return ``alpha log_pi`` plus a loss whose gradient with respect to ``action`` is -dQ/da, ``[N]``."""
        with torch.enable_grad():
            at = nest.map_structure(lambda a: a.detach().requires_grad_(), action)
            values, _ = self._critic_networks((observation, at), state)
            value = critic_values.min_weighted_q(values, self._reward_weights)
            gradient = critic_values.action_gradient(value, at, self._dqda_clipping)
        loss = critic_values.deterministic_policy_loss(gradient, action)
        return loss if self._log_alpha is None else torch.addcmul(loss, self._log_alpha.detach().exp(), log_pi)

    # Losses ----------------------------------------------------------------------------------------------------

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of critics, actor and alpha ``[T, B]``, from infos ``[T, B, ...]``."""
        reward, policy_loss = info.reward, info.actor_loss
        alpha_loss: Any = ()
        if self._log_alpha is not None:
            alpha_loss = sac_losses.temperature_loss(self._log_alpha, info.neg_entropy, self._target_entropy)
            policy_loss = policy_loss + alpha_loss
            if self._use_entropy_reward:
                reward = sac_losses.reward_with_bonus(
                    reward, sac_losses.entropy_bonus(self._log_alpha, info.neg_entropy), info.discount,
                    self._critic_loss.gamma, self._reward_weights)
            if summary.should_record_summaries():
                summary.scalar(f'{self._name}/alpha', self._log_alpha.detach().exp())
        if not self._train_actor_on_last_step:
            policy_loss = pad_end(policy_loss[:-1], 1)
        fields = SarsaInfo(reward=reward, step_type=info.step_type, discount=info.discount)
        critic_loss = critic_values.loss_of_all_critics(self._critic_loss, fields, info.critics, info.target_critics)
        priority: Any = ()
        if self._calculate_priority:
            priority = critic_values.sequence_priority(critic_loss / info.critics.shape[2], info.step_type)
        return LossInfo(loss=critic_loss + policy_loss, priority=priority,
                        extra=SarsaLossInfo(actor=info.actor_loss, critic=critic_loss, alpha=alpha_loss,
                                            neg_entropy=info.neg_entropy))


def _check_arguments(name: str, action_spec: NestedTensorSpec, smooths_on_policy: bool) -> None:
    for path, spec in nest.flatten_with_path(action_spec):
        if not spec.is_continuous:
            raise SpecError(f"{name} supports only continuous actions, found {spec}{f' at {path!r}' if path else ''}; "
                            f'{suited_algorithms(action_spec)}')
    if smooths_on_policy:
        raise ValueError(f'{name}.use_smoothed_actor: on-policy, the trained actor has to act; set on_policy or '
                         'use_smoothed_actor to False')


def _check_values(critics: Any, count: int, reward_spec: TensorSpec, name: str) -> None:
    """Raise ``SpecError`` unless the critics have one value per reward."""
    expected = (count, *reward_spec.shape)
    if tuple(critics.output_spec.shape) != expected:
        raise SpecError(f'{name}: expected critics with outputs of shape {expected}, for rewards {reward_spec}, found '
                        f'{critics.output_spec}')
