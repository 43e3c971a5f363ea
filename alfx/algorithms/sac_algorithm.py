"""Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905), for continuous, discrete and mixed actions.

Discrete actions need no actor: the policy is ``p(a | s) = exp(Q(s, a) / alpha) / Z``, the optimum of SAC's policy
improvement (Christodoulou 2019, arXiv:1910.07207, trains a policy network instead), and its entropy is exact. For a
mixed action one network computes ``Q(s, a_continuous, k)`` for all values k of the discrete action: an actor chooses
the continuous part, then the discrete part follows from Q. Each part has its own entropy coefficient alpha.

Differences from the paper:

* Critics, actor and alpha take their steps together, from the same parameters. One sample of an action is used in
  their losses.
* Actor and alpha are trained at every sampled step, also at the last one of a sequence (set
  ``train_actor_on_last_step=False`` to follow the paper).
* LAST steps, whose action the environment ignores, are not trained on.
* The factor in the loss of alpha is log alpha instead of alpha, as is common, so that the step does not shrink with
  alpha.

The formulas are in :mod:`alfx.algorithms.base.critic_values` and :mod:`alfx.algorithms.sac.soft_losses`. Kinds of
actions, target entropies and exploration are in :mod:`alfx.algorithms.sac.actions`, calls of the critics for each kind
of action in :mod:`alfx.algorithms.sac.critics`, states in :mod:`alfx.algorithms.sac.states`.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from alfx import nest, norm_layers, summary
from alfx.algorithms.base import critic_values
from alfx.algorithms.base.exploration_noise import ZetaRepeat
from alfx.algorithms.base.time_slices import pad_end, pad_start
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm, Rows, Terms
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.sac import actions as sac_actions
from alfx.algorithms.sac import soft_losses as sac_losses
from alfx.algorithms.sac.actions import ActionParts, ActionType, Choice, TargetEntropy
from alfx.algorithms.sac.critics import ActionValues
from alfx.algorithms.sac.states import (SacActionState, SacActorInfo, SacCriticInfo, SacCriticState, SacInfo,
                                        SacLossInfo, SacPolicy, SacState, check_arguments, check_batches,
                                        check_ensemble, check_normal_actor, initial_log_alphas, state_specs,
                                        targets_of_alpha)
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep
from alfx.gin_utils import Count, Fraction, NonNegative, Positive, Range, configurable
from alfx.networks.action_specs import action_range, check_actor
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.q_networks import QNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.averager import ScalarAdaptiveAverager
from alfx.utils.discrete_action import leaf_of_mask


@configurable
class SacAlgorithm(BootstrappedAlgorithm, OffPolicyAlgorithm):
    """Soft actor-critic; see the module docstring for the method.

    With ``prior_actor_ctor`` the entropy is replaced by the negative KL divergence to the prior: the objective is
    ``E[sum_t gamma^t (r[t] - alpha KL(pi(. | s[t]) || prior(. | s[t])))]``.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of continuous specs; or one discrete spec; or a pair ``(discrete spec, nest of continuous
            specs)``, which may also be a dict or in the other order.
        reward_spec: rank 0, or rank 1 for K rewards; each critic then has K values.
        actor_network_cls: called as ``(input_tensor_spec=, action_spec=)`` with the continuous specs; creates the
            network whose output is a nest of distributions that can be reparameterized. Discrete actions need none.
        critic_network_cls: called as ``(input_tensor_spec=(observation_spec, action_spec))``, for K rewards also with
            ``output_tensor_spec``; creates a critic of continuous actions. ``None`` if the algorithm is not trained.
        q_network_cls: called as ``(input_tensor_spec=, action_spec=)`` with the discrete spec; creates the Q network of
            discrete actions. Its input is the observation, or the pair ``(observation, continuous action)``.
        reward_weights: K weights of the rewards in the actor's objective; ``None``: all are 1.
        epsilon_greedy: in evaluation, the probability of sampling an action instead of taking the best one; ``None``:
            ``config.epsilon_greedy``, or 0 without a config.
        use_entropy_reward: train the critics on rewards that include the entropy.
        normalize_entropy_reward: subtract the running mean of the entropy reward, so that longer episodes do not get
            more reward by themselves. No effect without ``use_entropy_reward``.
        calculate_priority: set ``LossInfo.priority``, for prioritized replay.
        num_critic_replicas: number n of critics; the lowest of their values is used by default.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        critic_loss_ctor: creates the loss of the critics, called as ``(debug_summaries=, name=)``; ``None``:
            ``OneStepTDLoss``. The losses of the n critics are summed.
        target_entropy: target entropy in nats, which alpha is adjusted to reach; higher values explore more. It can be
            a function of a spec, summed over the nest of actions; ``None``: ``calc_default_target_entropy``. For a
            mixed action also a pair of these (discrete, continuous). Not with ``prior_actor_ctor``.
        prior_actor_ctor: called as ``(observation_spec, action_spec, debug_summaries=)``; creates a prior, whose
            ``train_step`` outputs a nest of distributions. For continuous actions.
        target_kld_per_dim: target KL divergence to the prior, per action dimension, which alpha is adjusted to reach.
        initial_log_alpha: initial value of log alpha.
        max_log_alpha: upper bound of log alpha.
        target_update_tau: coefficient of the soft (Polyak) update of the target critics, in (0, 1]; smaller values are
            more stable and learn more slowly.
        target_update_period: number of updates between two updates of the target critics.
        dqda_clipping: clip each element of dQ/da in the actor's loss to ``[-dqda_clipping, dqda_clipping]``; ``None``
            or 0: no clipping.
        actor_optimizer: optimizer of the actor; ``None``: the optimizer of the enclosing algorithm.
        critic_optimizer: optimizer of the critics; ``None``: the optimizer of the enclosing algorithm.
        alpha_optimizer: optimizer of log alpha; ``None``: the optimizer of the enclosing algorithm.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        reproduce_locomotion: act uniformly at random until training starts, train actor and alpha on all steps of a
            sequence but the first, and the critics on all but the last.
        name: name of this algorithm.
        train_actor_on_last_step: also train actor and alpha at the last step of each sequence, where the critics are
            not trained. Without it an update takes about a quarter less time.
        rollout_noise_correlation: c in [0, 1): correlation of the noise in the actions of successive steps of the
            rollout. The noise is a stationary Ornstein-Uhlenbeck process: each action by itself has the distribution of
            the policy, but exploration keeps a direction for about ``1 / (1 - c)`` steps (compare Eberhard et al. 2023,
            "Pink noise is all you need"). For (squashed) normal actions.
        critic_batches: ``'separate'`` calls the critics for the trained steps and the target critics for the steps that
            targets bootstrap from. ``'joint'`` calls each of them once for both, which gives both the same batch norm
            statistics (Bhatt et al. 2024, arXiv:1902.05605). This and the next two arguments need continuous actions
            and feed-forward networks.
        use_target_critics: bootstrap from target critics. Otherwise there are none, and targets come from the critics
            themselves; this needs critics with batch norm to be stable.
        policy_update_period: train actor and alpha only in every ``policy_update_period``-th update.
        policy_critics: the policy maximizes the ``'min'`` or the ``'mean'`` of the critics' values.
        bootstrap_critics: targets bootstrap from the ``'min'`` or the ``'mean'`` of the target critics' values.
        num_bootstrap_critics: number of critics that targets bootstrap from, a random subset in every update (Chen et
            al. 2021, arXiv:2101.05982, algorithm 1); ``None``: all. Smaller numbers underestimate less.
        rollout_noise_repeat: holds the noise in the actions of the rollout for several steps, such as
            :class:`~alfx.algorithms.base.exploration_noise.ZetaRepeat`, instead of ``rollout_noise_correlation``.
        random_initial_actions: act uniformly at random until the first update, that is in the first
            ``TrainerConfig.initial_collect_steps`` steps; otherwise the untrained policy acts. Needs bounded actions.

    Raises:
        SpecError: an action or a network is not supported.
        ValueError: arguments contradict each other or are out of range.
    """

    _not_trained = ('_target_critic_networks', '_prior_actor')
    predicts_from_observation = True

    _log_alpha: Any
    _target_entropy: Tensor
    _training_started: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()),
                 actor_network_cls: Callable[..., Any] | None = ActorDistributionNetwork,
                 critic_network_cls: Callable[..., Any] | None = CriticNetwork,
                 q_network_cls: Callable[..., Any] | None = QNetwork, reward_weights: list[float] | None = None,
                 epsilon_greedy: Fraction | None = None, use_entropy_reward: bool = True,
                 normalize_entropy_reward: bool = False, calculate_priority: bool = False,
                 num_critic_replicas: Count = 2, env: Any = None, config: TrainerConfig | None = None,
                 critic_loss_ctor: Callable[..., Any] | None = None,
                 target_entropy: TargetEntropy | Sequence[TargetEntropy] = None,
                 prior_actor_ctor: Callable[..., Any] | None = None, target_kld_per_dim: Positive = 3.0,
                 initial_log_alpha: float = 0.0, max_log_alpha: float | None = None, target_update_tau: Fraction = 0.05,
                 target_update_period: Count = 1, dqda_clipping: NonNegative | None = None, actor_optimizer: Any = None,
                 critic_optimizer: Any = None, alpha_optimizer: Any = None, checkpoint: str | None = None,
                 debug_summaries: bool = False, reproduce_locomotion: bool = False, name: str = 'SacAlgorithm',
                 train_actor_on_last_step: bool = True,
                 rollout_noise_correlation: Annotated[float, Range(minimum=0, below=1)] = 0.0,
                 critic_batches: str = 'separate', use_target_critics: bool = True, policy_update_period: Count = 1,
                 policy_critics: Literal['min', 'mean'] = 'min', bootstrap_critics: Literal['min', 'mean'] = 'min',
                 num_bootstrap_critics: Count | None = None, rollout_noise_repeat: ZetaRepeat | None = None,
                 random_initial_actions: bool = False):
        parts = ActionParts(action_spec)
        check_arguments(name, parts, prior_actor_ctor, target_entropy, reproduce_locomotion, train_actor_on_last_step,
                        rollout_noise_correlation, rollout_noise_repeat)
        check_ensemble(name, num_critic_replicas, num_bootstrap_critics)
        if random_initial_actions:
            for spec in nest.flatten(parts.continuous):
                action_range(spec, f'{name}.random_initial_actions', 'set it to False')
        actor = critics = None
        action_values = ActionValues(parts, num_critic_replicas, reward_spec, self._num_outputs)
        if parts.type != ActionType.Discrete:
            if actor_network_cls is None:
                raise ValueError(f'{name}: a policy over continuous actions needs actor_network_cls')
            actor = actor_network_cls(input_tensor_spec=observation_spec, action_spec=parts.continuous)
            check_actor(type(self).__name__, 'actor_network_cls', actor, gives_distributions=True)
        ctor = critic_network_cls if parts.type == ActionType.Continuous else q_network_cls
        if ctor is not None:
            critics = action_values.make_networks(ctor, observation_spec)
        elif parts.type != ActionType.Continuous:
            raise ValueError(f'{name}: a policy over discrete actions needs q_network_cls, even without training')
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         is_eval=critics is None, reward_weights=reward_weights, env=env, config=config,
                         checkpoint=checkpoint, debug_summaries=debug_summaries, name=name,
                         **state_specs(parts, actor, critics, sac_actions.noise_state_spec(
                             parts, rollout_noise_correlation, rollout_noise_repeat)))
        self._parts = parts
        self._action_values = action_values
        self._actor_network: Any = actor
        self._critic_networks: Any = critics
        self._target_critic_networks: Any = None
        self.set_epsilon_greedy(epsilon_greedy)
        self._use_entropy_reward = use_entropy_reward
        self._entropy_averager = (ScalarAdaptiveAverager(name='entropy_reward')
                                  if use_entropy_reward and normalize_entropy_reward else None)
        self._calculate_priority = calculate_priority
        self._dqda_clipping = dqda_clipping
        self._max_log_alpha = max_log_alpha
        self._reproduce_locomotion = reproduce_locomotion
        self._begins_with_random_actions = reproduce_locomotion or random_initial_actions
        self._train_actor_on_last_step = train_actor_on_last_step
        self._noise = rollout_noise_correlation, rollout_noise_repeat
        if any(self._noise):
            check_normal_actor(f"{name}.rollout_noise_{'correlation' if self._noise[0] else 'repeat'}", actor)
        self._reductions = policy_critics, bootstrap_critics
        self._num_bootstrap_critics = num_bootstrap_critics
        self._keeps_distribution = config is not None and config.summarize_action_distributions
        self._is_recurrent = bool(nest.flatten(self.train_state_spec))
        self._sampled_action = self._traced_policy()
        self.register_buffer('_training_started', torch.zeros((), dtype=torch.bool))
        self._prior_actor = None
        if prior_actor_ctor is not None:
            self._prior_actor = prior_actor_ctor(observation_spec, action_spec, debug_summaries=debug_summaries)
        self._log_alpha = (nn.Parameter(initial_log_alphas(parts, initial_log_alpha, max_log_alpha))
                           if self._has_temperature else None)
        self.register_buffer('_target_entropy', targets_of_alpha(
            parts, target_entropy, None if prior_actor_ctor is None else target_kld_per_dim), persistent=False)
        self._add_given_optimizers((actor_optimizer, actor), (critic_optimizer, critics),
                                   (alpha_optimizer, self._log_alpha))
        self._set_norms(actor, critics)
        self._update_target = None
        if critics is None:
            return
        check_batches(name, parts, critic_batches, use_target_critics, policy_update_period, self.train_state_spec,
                      norm_layers.has_batch_norm(critics))
        self._joins_batches = critic_batches == 'joint'
        if policy_update_period > 1:
            self._set_policy_update_period(policy_update_period, num_losses=3)
        if use_target_critics:
            self._set_target_critics(target_update_tau, target_update_period)
        self._critic_loss = (critic_loss_ctor or OneStepTDLoss)(debug_summaries=debug_summaries, name='critic_loss')

    _num_outputs: int | None = None  # of a critic with a distribution of values, set by a subclass
    _has_temperature = True  # False in a subclass without entropy regularization

    @property
    def supports_action_mask(self) -> bool:  # type: ignore[override]
        """Support of action masks: only if the action has a discrete part."""
        return self._parts.type != ActionType.Continuous

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """Return the state for choosing an action."""
        return SacState(action=state.action)

    # Acting ----------------------------------------------------------------------------------------------------

    def _traced_policy(self) -> Callable[[NestedTensor], NestedTensor] | None:
        """Return a traced function from observation to sampled action, or ``None`` if a rollout step does more."""
        samples = (self._parts.type == ActionType.Continuous and not nest.flatten(self.rollout_state_spec)
                   and type(self)._draw_rollout_action is SacAlgorithm._draw_rollout_action
                   and type(self)._choose is SacAlgorithm._choose)
        if not samples or self._keeps_distribution or not is_traceable(self._actor_network):
            return None
        return self.recorded(self._sampled_actions, self._actor_network)

    def _sampled_actions(self, observation: NestedTensor) -> NestedTensor:
        return dist_utils.sample_action_distribution(self._actor_network(observation)[0])

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Return the best action, or with probability ``epsilon_greedy`` a sampled one."""
        draw = partial(dist_utils.epsilon_greedy_sample, eps=self._epsilon_greedy)
        choice = self._choose(inputs.observation, state.action, draw, draw, mask=inputs.action_mask)
        return AlgStep(choice.action, SacState(action=choice.state), SacInfo(action_distribution=choice.distribution))

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Sample an action; if states are stored for training, also update the states of the critics."""
        is_random = self._begins_with_random_actions and not self._training_started
        if self._sampled_action is not None and not is_random:
            action = self._sampled_action(inputs.observation)
            return AlgStep(action, state, SacInfo(action=action))
        noise, noise_state = (), state.noise
        if any(self._noise):
            noise, noise_state = sac_actions.rollout_noise(noise_state, inputs.is_first(), *self._noise)
        draw = partial(self._draw_rollout_action, inputs, noise)
        choice = self._choose(inputs.observation, state.action, draw, mask=inputs.action_mask)
        action = choice.action
        if is_random:
            action = sac_actions.uniform_actions(self._action_spec, inputs.step_type.shape[0], self.device)
            action = self._parts.with_valid_choice(action, inputs.action_mask)
        new_state = SacState(choice.state, state.actor, state.critic, noise_state)
        if self._is_recurrent and self.need_full_rollout_state():
            new_state = self._with_critic_states(inputs.observation, action, new_state)
        distribution = choice.distribution if self._keeps_distribution else ()
        return AlgStep(action, new_state, SacInfo(action=action, action_distribution=distribution))

    def _draw_rollout_action(self, inputs: TimeStep, noise: NestedTensor, distribution: Any) -> NestedTensor:
        """Return the continuous action ``[B, ...]`` of the rollout; a subclass may explore differently."""
        return sac_actions.sample(distribution, noise)

    def _choose(self, observation: NestedTensor, state: Any, draw: Callable[[Any], NestedTensor] | None = None,
                draw_discrete: Callable[[Any], Tensor] = dist_utils.sample_action_distribution,
                mask: NestedTensor = ()) -> Choice:
        """Choose actions with the policy at N steps.

        Args:
            observation: nest ``[N, ...]``.
            state: :class:`SacActionState`.
            draw: maps the nest of distributions to the continuous action; ``None``: a sample with gradient and its
                log-probability.
            draw_discrete: maps the distribution of the discrete action to an action.
            mask: mask of valid discrete actions, see ``TimeStep.action_mask``.
        """
        distribution: Any = ()
        continuous: NestedTensor = ()
        log_prob: Any = ()
        actor_state: NestedTensor = ()
        if self._actor_network is not None:
            distribution, actor_state = self._actor_network(observation, state.actor_network)
            if draw is None:
                continuous, log_prob = dist_utils.rsample_action_distribution(distribution, return_log_prob=True)
            else:
                continuous = draw(distribution)
        if self._parts.type == ActionType.Continuous:
            return Choice(distribution, continuous, continuous, log_prob, SacActionState(actor_network=actor_state))
        at = critic_values.leaves_of_graph(continuous)
        q_values, critic_state = self._action_values.of_all(self._critic_networks, observation, at, state.critic)
        policy = dist_utils.mask_actions(self._discrete_policy(q_values.detach()), leaf_of_mask(mask))
        discrete = draw_discrete(policy)
        return Choice(self._parts.join(policy, distribution), self._parts.join(discrete, continuous), continuous,
                      log_prob, SacActionState(actor_state, critic_state), at, q_values, policy.probs)

    def _discrete_policy(self, q_values: Tensor) -> Any:
        """Return ``p(k | s) = exp(Q(s, k) / alpha) / Z`` from ``[N, n, A]`` (``[N, n, A, K]``)."""
        log_alpha = self._log_alpha.detach()
        alpha = (log_alpha[0] if log_alpha.ndim else log_alpha).exp()
        return dist_utils.categorical_from_spec(self._actor_value(q_values) / alpha, self._parts.discrete)

    def _log_pi(self, choice: Choice, rows: Rows) -> Tensor:
        """Return ``log_pi`` ``[N]`` or ``[N, 2]``, see ``SacInfo``; a prior uses the time step of ``rows``."""
        if self._parts.type == ActionType.Continuous:
            if self._prior_actor is None:
                return choice.log_prob
            prior = self._prior_actor.train_step(rows.inputs, ()).output
            return choice.log_prob - sac_losses.summed_log_prob(prior, choice.continuous)
        neg_entropy = -self._parts.split(choice.distribution)[0].entropy()
        return neg_entropy if isinstance(choice.log_prob, tuple) else torch.stack((neg_entropy, choice.log_prob), -1)

    # Values ----------------------------------------------------------------------------------------------------

    def _bootstrap_value(self, critics: Tensor) -> Tensor:
        """Reduce target critics ``[N, n, ...]``, or a random subset of them, to values to bootstrap from."""
        if self._num_bootstrap_critics is not None:
            critics = critic_values.random_critics(critics, self._num_bootstrap_critics)
        return critics.mean(1) if self._reductions[1] == 'mean' else self._pessimistic_value(critics)

    def _pessimistic_value(self, critics: Tensor) -> Tensor:
        """Reduce critics ``[N, n, ...]`` to the lowest value ``[N, ...]``."""
        return critic_values.min_q(critics, self._reward_weights)

    def _actor_value(self, critics: Tensor) -> Tensor:
        """Reduce ``[N, n]`` (or ``[N, n, A]``, both also with K) to the policy's objective ``[N]`` (``[N, A]``)."""
        if self._reductions[0] == 'mean':
            return critic_values.weighted_sum(critics.mean(1), self._reward_weights)
        return critic_values.min_weighted_q(critics, self._reward_weights)

    def _with_critic_states(self, observation: NestedTensor, action: NestedTensor, state: Any) -> Any:
        """Return ``state`` with the states of actor and critics updated by one step of the rollout."""
        critics, targets = state.critic
        if self._parts.type != ActionType.Discrete:
            _, critics = self._action_values.of_action(self._critic_networks, observation, action, critics)
        _, targets = self._action_values.of_action(self._target_critic_networks, observation, action, targets)
        # The critics receive the same action for the training of the actor and of the critics.
        actor = critics if self._parts.type == ActionType.Continuous else ()
        return state._replace(actor=actor, critic=SacCriticState(critics, targets))

    # Training --------------------------------------------------------------------------------------------------

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Return an action of the policy with its log-probability, as a :class:`SacPolicy`, and its ``Choice``."""
        if self._critic_networks is None:
            raise RuntimeError(f'{self._name} has no critics (critic_network_cls=None): it can act, but not be trained')
        choice = self._choose(rows.observation, state.action, mask=rows.action_mask)
        policy = SacPolicy(choice.distribution, choice.action, choice.probs, self._log_pi(choice, rows))
        return policy, choice, state._replace(action=choice.state)

    def policy_loss(self, rows: Rows, policy: Any, details: Choice, state: Any) -> tuple[Any, Any]:
        """Return the loss ``[N]`` of the actor, or ``()`` without an actor."""
        if not self._is_actor_trained():
            return (), state
        with norm_layers.running_statistics():
            loss, actor_state = self._actor_loss(rows.observation, details, policy.log_pi, state.actor)
        return loss, state._replace(actor=actor_state)

    def trained_values(self, rows: Rows, details: Choice, state: Any) -> tuple[Any, Any]:
        """Return the critics' values ``[N, n]`` (``[N, n, K]``) of the action taken."""
        action, critics_state = rows.rollout_info.action, state.critic.critics
        if self._parts.type == ActionType.Discrete:
            return self._action_values.at(rows.of(details.q_values), action), state
        critics, critics_state = self._action_values.of_action(self._critic_networks, rows.observation, action,
                                                               critics_state)
        return critics, state._replace(critic=state.critic._replace(critics=critics_state))

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Return the value ``[N]`` (``[N, K]``) of the policy by the target critics, exact over discrete actions."""
        continuous, probs = rows.of((self._parts.split(policy.action)[1], policy.probs))
        networks, targets = self._target_critic_networks, state.critic.target_critics
        networks = self._critic_networks if networks is None else networks
        if self._parts.type == ActionType.Continuous:
            critics, targets = networks((rows.observation, continuous), targets)
            value = self._bootstrap_value(critics)
        else:
            q_values, targets = self._action_values.of_all(networks, rows.observation, continuous, targets)
            value = critic_values.expected_value(self._bootstrap_value(q_values), probs)
        return value, state._replace(critic=state.critic._replace(target_critics=targets))

    def joint_values(self, trained: Rows, later: Rows, policy: Any) -> tuple[Tensor, Tensor]:
        """Return the critics' values of the action taken and the value of the policy, by one call of each network."""
        values, bootstrapped = self._joint_critics((trained.observation, trained.rollout_info.action),
                                                   (later.observation, later.of(policy.action)))
        return values, self._bootstrap_value(bootstrapped)

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return an action of the policy, and a :class:`SacInfo` with the loss of alpha."""
        policy, loss = terms.policy, terms.loss
        log_pi = policy.log_pi.detach()
        alpha_loss: Any = ()
        neg_entropy = log_pi.sum(-1) if self._has_temperature and self._log_alpha.ndim else log_pi
        if self._has_temperature and self._is_actor_trained():
            is_last_left_out = inputs.step_type.ndim == 2 and not self._train_actor_on_last_step
            alpha_loss = sac_losses.temperature_loss(self._log_alpha, log_pi[:-1] if is_last_left_out else log_pi,
                                                     self._target_entropy)
            alpha_loss = pad_end(alpha_loss, 1) if is_last_left_out else alpha_loss
        return policy.action, SacInfo(
            reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount, action=rollout_info.action,
            action_distribution=policy.distribution if self._is_actor_trained() else (), log_pi=log_pi,
            critic=SacCriticInfo(terms.values, terms.target),
            alpha=alpha_loss, actor=LossInfo(loss=loss, extra=SacActorInfo(loss, neg_entropy)),
            discounted_return=rollout_info.discounted_return)

    def num_steps_with_gradient(self, length: int) -> tuple[int, int]:
        """Count steps with gradient; without an actor only the trained Q values have a gradient."""
        if not self._is_actor_trained():
            return 0, length - 1
        return super().num_steps_with_gradient(length) if self._actor_network is not None else (length - 1, length - 1)

    def _actor_loss(self, observation: NestedTensor, choice: Choice, log_pi: Tensor,
                    state: NestedTensor) -> tuple[Any, NestedTensor]:
        """Return the loss ``[N]`` of the actor (``()`` without an actor), and the state of the critics."""
        if self._parts.type == ActionType.Discrete:
            return (), state
        with torch.enable_grad():
            if self._parts.type == ActionType.Continuous:
                at = critic_values.leaves_of_graph(choice.continuous)
                critics, state = self._critic_networks((observation, at), state)
                value = self._actor_value(critics)
            else:
                at, value = choice.at, (choice.probs * self._actor_value(choice.q_values)).sum(-1)
            gradient = critic_values.action_gradient(value, at, self._dqda_clipping)
        log_alpha = self._log_alpha.detach()
        if log_alpha.ndim:
            log_alpha, log_pi = log_alpha[1], log_pi[..., 1]
        loss = critic_values.deterministic_policy_loss(gradient, choice.continuous)
        return torch.addcmul(loss, log_alpha.exp(), log_pi), critic_values.detached(state) if self._is_recurrent else ()

    # Losses ----------------------------------------------------------------------------------------------------

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of critics, actor and alpha ``[T, B]``, from infos ``[T, B, ...]``."""
        critic_loss = self._calc_critic_loss(info)
        terms = [loss for loss in (info.actor.loss, info.alpha) if isinstance(loss, Tensor)]
        total = critic_loss
        if terms:
            policy_loss = sum(terms[1:], start=terms[0])
            if self._reproduce_locomotion:
                policy_loss = pad_start(policy_loss[1:], 1)
            elif not self._train_actor_on_last_step:
                policy_loss = pad_end(policy_loss[:-1], 1)
            total = total + policy_loss
        priority = critic_values.sequence_priority(critic_loss, info.step_type) if self._calculate_priority else ()
        if summary.should_record_summaries() and self._has_temperature:
            for i, alpha in enumerate(self._log_alpha.detach().exp().reshape(-1)):  # mixed action: discrete part first
                summary.scalar(f'{self._name}/alpha/{i}', alpha)
        *of_actor, alpha_loss = self._logged_policy_losses([*info.actor.extra, info.alpha], info.step_type)
        return LossInfo(loss=total, priority=priority,
                        extra=SacLossInfo(actor=SacActorInfo(*of_actor), critic=critic_loss, alpha=alpha_loss))

    def _calc_critic_loss(self, info: Any) -> Tensor:
        """Return the sum of the losses of all critics, ``[T, B]``."""
        if self._use_entropy_reward:
            info = info._replace(reward=self._soft_reward(info))
        fields = SacInfo(reward=info.reward, step_type=info.step_type, discount=info.discount,
                         discounted_return=info.discounted_return)
        return critic_values.loss_of_all_critics(self._critic_loss, fields, info.critic.critics,
                                                 info.critic.target_critic)

    @torch.no_grad()
    def _soft_reward(self, info: Any) -> Tensor:
        """Add the entropy to the reward, see :func:`alfx.algorithms.sac.soft_losses.reward_with_bonus`."""
        bonus = sac_losses.entropy_bonus(self._log_alpha, info.log_pi)
        if self._entropy_averager is not None:
            bonus = bonus - self._entropy_averager.average(bonus[1:])
        return sac_losses.reward_with_bonus(info.reward, bonus, info.discount, self._critic_loss.gamma,
                                            self._reward_weights)

    def after_update(self, root_inputs: NestedTensor, info: NestedTensor) -> None:
        """Update the target critics, and limit log alpha to ``max_log_alpha``."""
        super().after_update(root_inputs, info)
        if self._max_log_alpha is not None:
            self._log_alpha.data.clamp_(max=self._max_log_alpha)
        if self._begins_with_random_actions:
            self._training_started.fill_(True)
