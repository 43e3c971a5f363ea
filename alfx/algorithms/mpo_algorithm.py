"""Maximum a posteriori policy optimization (Abdolmaleki et al. 2018, arXiv:1806.06920 and arXiv:1812.02256).

Each update evaluates actions of the target policy at the states of a minibatch, gives the better ones more weight
(E-step), and moves the policy towards these weights within bounds on its change (M-step). The formulas are in
:mod:`alfx.algorithms.mpo.mpo_loss`, the kinds of policies in :mod:`alfx.algorithms.mpo.mpo_policies`.

Differences from the papers:

- Values are learned from the expected value of the target policy at the next step (1812.02256), by default over one
  step; the first paper uses Retrace.
- The temperature is solved for exactly in each minibatch, unless it has an optimizer as in the papers.
- The multipliers of the constraints on the policy are moved by projected gradient ascent with an upper bound.
- There may be several critics; the lowest value counts.
- Target networks can be updated softly.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.base.critic_values import min_q, sequence_priority, weighted_sum
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm, Rows, Terms
from alfx.algorithms.mpo import mpo_loss
from alfx.algorithms.mpo.mpo_loss import Multiplier, Temperature
from alfx.algorithms.mpo.mpo_policies import CategoricalPolicy, GaussianPolicy
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Count, Fraction, Positive, configurable, problem_at
from alfx.networks.action_specs import check_actor
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.q_networks import QNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.target_updater import TargetUpdater
from alfx.utils.tensor_utils import tensor_prepend_zero

MpoState = namedtuple('MpoState', ['actor', 'target_actor', 'critic', 'target_critic'], default_value=())
"""States of the networks; the states of the critics follow the actions that were taken."""

MpoInfo = namedtuple('MpoInfo', [
    'reward', 'step_type', 'discount', 'action', 'observation', 'action_distribution', 'target_distribution', 'samples',
    'sample_values', 'critics', 'target_value', 'action_mask'
], default_value=())
"""Info of a step, ``[B, ...]`` each; unused fields are ``()``.

``action_distribution`` is the policy, ``target_distribution`` the target policy. ``samples`` ``[B, N, A]`` are actions
of the target policy before squashing (``()`` for a discrete action) and ``sample_values`` ``[B, N]`` their values;
``target_value`` is their mean, ``[B]`` or ``[B, K]``. ``critics`` ``[B, n]`` or ``[B, n, K]`` are the values of the
action taken. ``observation`` is set if the M-step has several iterations.
"""

MpoLossInfo = namedtuple('MpoLossInfo', ['actor', 'critic', 'eta', 'divergences', 'multipliers'], default_value=())
"""Parts of the loss ``[T, B]``; temperature, constrained changes of the policy, and their multipliers."""


@configurable
class MpoAlgorithm(BootstrappedAlgorithm, OffPolicyAlgorithm):
    """Off-policy actor-critic that moves the policy towards a reweighted target policy, within bounds on its change.

    The rollout acts with samples of the policy from the first step, also during ``initial_collect_steps``. Continuous
    actions that are not squashed are clipped to their bounds, in the rollout and in the evaluation by the critics.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of continuous specs, or one discrete spec of shape ``()``.
        reward_spec: rank 0, or, for continuous actions, rank 1 for K rewards; the critics then have K values.
        actor_network_cls: called as ``(input_tensor_spec=, action_spec=)``; creates the network of the policy, a
            diagonal normal distribution or a categorical one.
        critic_network_cls: for continuous actions; called as ``(input_tensor_spec=(observation_spec, action_spec))``,
            with K rewards also ``output_tensor_spec=``; creates one critic. ``None`` if the algorithm is not trained.
        q_network_cls: for a discrete action; called as ``(input_tensor_spec=, action_spec=)``; creates one critic.
            ``None`` if the algorithm is not trained.
        reward_weights: K weights of the values of the rewards in the policy's objective; ``None``: all are 1.
        epsilon_greedy: in evaluation, the probability of sampling an action instead of taking the most likely one;
            ``None``: ``config.epsilon_greedy``, or 0 without a config.
        calculate_priority: calculate priorities for prioritized replay: the square root of the mean critic loss of a
            sequence.
        num_critic_replicas: number n of critics; the lowest of their values is used.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        critic_loss_ctor: creates the loss of one critic, called as ``(debug_summaries=, name=)``. ``None``:
            ``OneStepTDLoss``.
        sample_action_num: continuous actions: number N of actions sampled in each state.
        dual_constraint: mean KL divergence from the target policy to the improved one, over the N actions. Larger
            values prefer better actions more strongly.
        kl_mean_constraint: continuous actions: bound on the KL divergence due to the change of the mean.
        kl_var_constraint: continuous actions: bound on the KL divergence due to the change of the covariance.
        kl_constraint: discrete actions: bound on the KL divergence from the target policy to the policy.
        alpha_mean_scale: step size of the multiplier of ``kl_mean_constraint``.
        alpha_var_scale: step size of the multiplier of ``kl_var_constraint``.
        alpha_scale: step size of the multiplier of ``kl_constraint``.
        alpha_mean_max: upper bound of the multiplier of ``kl_mean_constraint``.
        alpha_var_max: upper bound of the multiplier of ``kl_var_constraint``.
        alpha_max: upper bound of the multiplier of ``kl_constraint``.
        constrain_each_dimension: continuous actions: constrain each component separately, with its own multipliers,
            instead of the sum over components.
        out_of_bounds_constraint: continuous actions that are not squashed: staying within the bounds becomes a second
            objective with the value ``-||a - clip(a)||^2`` and this constraint instead of ``dual_constraint``; the
            policy follows the mean of the weights of both (Abdolmaleki et al. 2020, arXiv:2005.07513, uses their sum).
            ``None``: no second objective.
        mstep_iterations: updates of the policy from the same weights (with ``eta_optimizer``, those after the first use
            the temperature after its step); updates after the first ignore the importance weights of prioritized
            replay. More than 1 needs ``actor_optimizer`` and networks that are not recurrent.
        target_update_tau: coefficient of the soft (Polyak) update of the target networks, in (0, 1].
        target_update_period: training updates for each update of the target networks.
        actor_target_update_tau: coefficient of the soft update of the target policy; ``None``: ``target_update_tau``.
        actor_target_update_period: period of the target policy; ``None``: ``target_update_period``.
        train_actor_on_first_step: also train the policy at the first step of each sequence. If not, the evaluated
            actions are only those that the targets of the critics need, which halves the work for sequences of two.
        actor_optimizer: optimizes the parameters of the actor.
        critic_optimizer: optimizes the parameters of the critics.
        eta_optimizer: optimizes the logarithm of the temperature, which then follows the gradient of its dual function
            instead of being solved for.
        initial_eta: with ``eta_optimizer``, the initial temperature; ``None``: 1.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ConfError: a number is out of range, or arguments contradict each other.
        SpecError: actions, rewards or policies of a kind that is not supported.
    """

    _not_trained = ('_target_actor_network', '_target_critic_networks')

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()),
                 actor_network_cls: Callable[..., Any] = ActorDistributionNetwork,
                 critic_network_cls: Callable[..., Any] | None = CriticNetwork,
                 q_network_cls: Callable[..., Any] | None = QNetwork, reward_weights: list[float] | None = None,
                 epsilon_greedy: Fraction | None = None, calculate_priority: bool = False,
                 num_critic_replicas: Count = 1, env: Any = None, config: TrainerConfig | None = None,
                 critic_loss_ctor: Callable[..., Any] | None = None, sample_action_num: Count = 64,
                 dual_constraint: Positive = 0.1, kl_mean_constraint: Positive = 0.01,
                 kl_var_constraint: Positive = 0.0001, kl_constraint: Positive = 0.01, alpha_scale: Positive = 10.0,
                 alpha_mean_scale: Positive = 1.0, alpha_var_scale: Positive = 100.0, alpha_mean_max: Positive = 0.1,
                 alpha_var_max: Positive = 10.0, alpha_max: Positive = 1.0, constrain_each_dimension: bool = False,
                 out_of_bounds_constraint: Positive | None = None, mstep_iterations: Count = 1,
                 target_update_tau: Fraction = 0.05, target_update_period: Count = 1,
                 actor_target_update_tau: Fraction | None = None, actor_target_update_period: Count | None = None,
                 train_actor_on_first_step: bool = True, actor_optimizer: Any = None, critic_optimizer: Any = None,
                 eta_optimizer: Any = None, initial_eta: Positive | None = None, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'MpoAlgorithm'):
        if eta_optimizer is None and initial_eta is not None:
            raise ConfError([problem_at(type(self).__name__, 'initial_eta', 'is set, but the temperature is solved for '
                                        'in each minibatch and needs no initial value',
                                        'set eta_optimizer, or leave it out')])
        is_discrete = any(spec.is_discrete for spec in nest.flatten(action_spec))
        if is_discrete and reward_spec.ndim:
            raise SpecError(f'{name}: a multi-dimensional reward needs continuous actions, found {reward_spec} and '
                            f'{action_spec}')
        actor = actor_network_cls(input_tensor_spec=observation_spec, action_spec=action_spec)
        check_actor(type(self).__name__, 'actor_network_cls', actor, gives_distributions=True)
        critics = _make_critics(q_network_cls if is_discrete else critic_network_cls, is_discrete, observation_spec,
                                action_spec, reward_spec, num_critic_replicas)
        critic_state = () if critics is None else critics.state_spec
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=MpoState(actor.state_spec, actor.state_spec, critic_state, critic_state),
                         predict_state_spec=actor.state_spec, is_eval=critics is None, reward_weights=reward_weights,
                         env=env, config=config, checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._is_discrete = is_discrete
        self._is_recurrent = bool(nest.flatten(self.train_state_spec))
        self._sample_action_num = sample_action_num
        multipliers = {'': (kl_constraint, alpha_scale, alpha_max),
                       'mean': (kl_mean_constraint, alpha_mean_scale, alpha_mean_max),
                       'var': (kl_var_constraint, alpha_var_scale, alpha_var_max)}
        self._policy = self._make_policy(actor, multipliers, constrain_each_dimension, out_of_bounds_constraint)
        first_eta = None if eta_optimizer is None else 1.0 if initial_eta is None else initial_eta
        constraints = [dual_constraint] + [c for c in (out_of_bounds_constraint, ) if c is not None]
        self._temperatures = nn.ModuleList([Temperature(c, first_eta) for c in constraints])
        self._set_networks(actor, critics, (target_update_tau, target_update_period),
                           (target_update_tau if actor_target_update_tau is None else actor_target_update_tau,
                            target_update_period if actor_target_update_period is None else actor_target_update_period))
        self._add_given_optimizers((actor_optimizer, actor), (critic_optimizer, critics),
                                   (eta_optimizer, self._temperatures))
        self._check_m_step(mstep_iterations, actor_optimizer)
        self._critic_losses = nn.ModuleList([(critic_loss_ctor or OneStepTDLoss)(
            debug_summaries=debug_summaries, name=f'{name}/critic_loss_{i}') for i in range(num_critic_replicas)])
        self.set_epsilon_greedy(epsilon_greedy)
        self._calculate_priority = calculate_priority
        self._mstep_iterations = mstep_iterations
        self._actor_optimizer = actor_optimizer
        self._bootstraps_from_first_step = train_actor_on_first_step  # the actions evaluated there serve both

    # Set-up ----------------------------------------------------------------------------------------------------

    def _check_m_step(self, iterations: int, actor_optimizer: Any) -> None:
        if iterations > 1 and (actor_optimizer is None or self._is_recurrent):
            what = 'actor_optimizer is not set' if actor_optimizer is None else 'the networks are recurrent'
            raise ConfError([problem_at(type(self).__name__, 'mstep_iterations', f'= {iterations}, but {what}',
                                        'set actor_optimizer and use networks that are not recurrent, or leave it at '
                                        '1')])

    def _make_policy(self, actor: Any, multipliers: dict[str, tuple[float, float, float]],
                     constrain_each_dimension: bool, out_of_bounds_constraint: float | None) -> Any:
        """Create the policy object that matches ``actor``, with the multipliers of its constraints."""
        if self._is_discrete:
            if out_of_bounds_constraint is not None or constrain_each_dimension:
                name = 'constrain_each_dimension' if constrain_each_dimension else 'out_of_bounds_constraint'
                raise ConfError([problem_at(type(self).__name__, name, 'is for continuous actions', 'leave it out')])
            return CategoricalPolicy(self._action_spec, actor.output_spec, Multiplier(*multipliers['']), self._name)
        size = sum(spec.numel for spec in nest.flatten(self._action_spec)) if constrain_each_dimension else 1
        of_mean, of_scale = (Multiplier(*multipliers[part], size) for part in ('mean', 'var'))
        return GaussianPolicy(self._action_spec, actor.output_spec, of_mean, of_scale, self._name)

    def _set_networks(self, actor: Any, critics: Any, critic_update: tuple[float, int],
                      actor_update: tuple[float, int]) -> None:
        self._actor_network = actor
        self._critic_networks = critics
        self._target_actor_network: Any = None
        self._target_critic_networks: Any = None
        if critics is None:
            return
        self._target_actor_network = actor.copy(name='target_' + actor.name)
        self._target_critic_networks = critics.copy(name='target_' + critics.name)
        self._update_target_actor = TargetUpdater(actor, self._target_actor_network, *actor_update)
        self._update_target_critics = TargetUpdater(critics, self._target_critic_networks, *critic_update)

    @property
    def supports_action_mask(self) -> bool:  # type: ignore[override]
        """Support of action masks: only for a discrete action."""
        return self._is_discrete

    predicts_from_observation = True

    @property
    def updates_are_traceable(self) -> bool:
        """Return whether the policy is feed-forward and the M-step is a single update."""
        return not self._is_recurrent and self._mstep_iterations == 1

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """Return the state of the policy network."""
        return state.actor

    # Acting ----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the most likely action ``[B, ...]``, or with probability ``epsilon_greedy`` a sampled one."""
        distribution, state = self._actor_network(inputs.observation, state)
        distribution = dist_utils.mask_actions(distribution, inputs.action_mask)
        action = self._policy.clip(dist_utils.epsilon_greedy_sample(distribution, self._epsilon_greedy))
        return AlgStep(action, state, MpoInfo(action_distribution=distribution))

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Sample an action ``[B, ...]`` of the policy."""
        distribution, actor_state = self._actor_network(inputs.observation, state.actor)
        distribution = dist_utils.mask_actions(distribution, inputs.action_mask)
        action = self._policy.clip(dist_utils.sample_action_distribution(distribution))
        new_state = state._replace(actor=actor_state)
        if self._is_recurrent and self.need_full_rollout_state():
            self._require_critics()
            target_actor_state = self._target_actor_network(inputs.observation, state.target_actor)[1]
            critic_state, target_critic_state = (
                self._values_of(network, inputs.observation, action, network_state)[1] for network, network_state in
                ((self._critic_networks, state.critic), (self._target_critic_networks, state.target_critic)))
            new_state = MpoState(actor_state, target_actor_state, critic_state, target_critic_state)
        return AlgStep(action, new_state, MpoInfo(action=action))

    # Training --------------------------------------------------------------------------------------------------

    def _require_critics(self) -> None:
        if self._critic_networks is None:
            raise RuntimeError(f'{self._name} has no critics: it can act and be evaluated, but not trained; set '
                               'critic_network_cls (for a discrete action q_network_cls)')

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Return the distributions of policy and target policy."""
        self._require_critics()
        policy, actor_state = self._actor_network(rows.observation, state.actor)
        with torch.no_grad():
            target, target_state = self._target_actor_network(rows.observation, state.target_actor)
        policy, target = (dist_utils.mask_actions(x, rows.action_mask) for x in (policy, target))
        return (policy, target), (), state._replace(actor=actor_state, target_actor=target_state)

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Return the critics ``[N, n]`` (``[N, n, K]``) of the action taken."""
        critics, critic_state = self._values_of(self._critic_networks, rows.observation, rows.rollout_info.action,
                                                state.critic)
        return critics, state._replace(critic=critic_state)

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Evaluate actions of the target policy.

        Returns samples ``[N, S, A]`` (``()`` for a discrete action, where all values count), their values ``[N, S]``,
        and the mean value ``[N]`` (``[N, K]``) to bootstrap from.
        """
        target, networks = rows.of(policy[1]), self._target_critic_networks
        if self._is_discrete:
            values, critic_state = networks(rows.observation, state.target_critic)
            values = min_q(values, None)
            mean = (self._policy.parameters_of(target).exp() * values).sum(-1)
            return ((), values, mean), state._replace(target_critic=critic_state)
        count = self._sample_action_num
        samples = self._policy.sample(target, count)
        actions = self._policy.actions(target, samples.flatten(0, 1))
        repeated, repeated_state = nest.map_structure(lambda x: x.repeat_interleave(count, 0),
                                                      (rows.observation, state.target_critic))
        values = min_q(networks((repeated, actions), repeated_state)[0], self._reward_weights).unflatten(0, (-1, count))
        if self._is_recurrent:  # the state follows the actions taken, not the evaluated ones
            state = state._replace(target_critic=networks((rows.observation, rows.rollout_info.action),
                                                          state.target_critic)[1])
        return (samples, weighted_sum(values, self._reward_weights), values.mean(1)), state

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return the action taken, and an :class:`MpoInfo`."""
        (distribution, target_distribution), (samples, sample_values, target_value) = terms.policy, terms.target
        return rollout_info.action, MpoInfo(
            reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount, action=rollout_info.action,
            observation=inputs.observation if self._mstep_iterations > 1 else (),
            action_mask=inputs.action_mask if self._mstep_iterations > 1 else (), action_distribution=distribution,
            target_distribution=target_distribution, samples=samples, sample_values=sample_values, critics=terms.values,
            target_value=target_value)

    def _values_of(self, network: Any, observation: NestedTensor, action: NestedTensor,
                   state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the values ``[B, n]`` or ``[B, n, K]`` of actions according to ``network``, and its next state."""
        if not self._is_discrete:
            return network((observation, action), state)
        values, state = network(observation, state)
        index = self._policy.index(action).reshape(-1, 1, 1).expand(-1, values.shape[1], 1)
        return values.gather(2, index).squeeze(2), state

    # Losses ----------------------------------------------------------------------------------------------------

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of policy and critics, ``[T, B]``, and of the temperature if it has an optimizer."""
        states, mask = self._trained_states(info)
        weights, eta, dual = self._improve(states, mask)
        actor_loss, divergences = self._policy_loss(states, weights, states.action_distribution, mask)
        if actor_loss.shape != info.step_type.shape:
            actor_loss = tensor_prepend_zero(actor_loss)
        critic_loss = self._critic_loss(info)
        extra = MpoLossInfo(actor=actor_loss, critic=critic_loss)
        if context.should_record_summaries():
            extra = extra._replace(
                eta=eta, divergences=[mpo_loss.masked_mean(d.sum(-1), mask) for d in divergences],
                multipliers=[m.value.clone() for m in self._policy.multipliers])
        priority = sequence_priority(critic_loss, info.step_type) if self._calculate_priority else ()
        return LossInfo(loss=actor_loss + critic_loss, scalar_loss=dual, extra=extra, priority=priority)

    def _critic_loss(self, info: Any) -> Tensor:
        losses = [loss(info, info.critics[:, :, i], info.target_value).loss
                  for i, loss in enumerate(self._critic_losses)]
        return torch.stack(losses).sum(0) if len(losses) > 1 else losses[0]

    def _trained_states(self, info: Any) -> tuple[Any, Tensor]:
        """Return the steps at which the policy is trained, and a mask that excludes LAST steps."""
        states = MpoInfo(observation=info.observation, action_mask=info.action_mask,
                         action_distribution=info.action_distribution, target_distribution=info.target_distribution,
                         samples=info.samples, sample_values=info.sample_values)
        mask = (info.step_type != StepType.LAST).to(info.sample_values.dtype)
        if self._bootstraps_from_first_step or mask.shape[0] == 1:
            return states, mask
        return nest.map_structure(lambda x: x[1:], states), mask[1:]

    def _improve(self, states: Any, mask: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Run the E-step: return weights ``[T, B, N]`` of the actions, the temperature, and its loss or ``()``."""
        log_prior = self._policy.log_prior(self._policy.parameters_of(states.target_distribution))
        objectives = [states.sample_values]
        if len(self._temperatures) > 1:
            objectives.append(self._policy.value_within_bounds(states.samples))
        weights, etas, losses = [], [], []
        for temperature, values in zip(self._temperatures, objectives):
            eta, loss = temperature(values, mask, log_prior)
            weights.append(mpo_loss.improved_weights(values, eta, log_prior))
            etas.append(eta)
            losses.append(loss)
        dual: Any = () if losses[0] is None else torch.stack(losses).sum()
        return torch.stack(weights).mean(0) if len(weights) > 1 else weights[0], etas[0], dual

    def _policy_loss(self, states: Any, weights: Tensor, policy: Any,
                     mask: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the M-step: return the loss ``[T, B]`` of ``policy``, and its constrained changes ``[T, B, ...]``."""
        target = self._policy.parameters_of(states.target_distribution)
        online = self._policy.parameters_of(policy)
        divergences = self._policy.divergences(target, online)
        loss = self._policy.loss(weights, states.samples, target, online)
        for multiplier, divergence in zip(self._policy.multipliers, divergences):
            loss = loss + multiplier.penalty(divergence)
            multiplier.observe(divergence, mask)
        return loss, divergences

    def after_update(self, root_inputs: TimeStep, info: Any) -> None:
        """Move the multipliers, run further iterations of the M-step, and move the target networks."""
        self._move_multipliers()
        if self._mstep_iterations > 1:
            self._continue_m_step(*self._trained_states(info), info.step_type.numel())
        self._update_target_actor()
        self._update_target_critics()

    def _move_multipliers(self) -> None:
        for multiplier in self._policy.multipliers:
            multiplier.move()

    def _continue_m_step(self, states: Any, mask: Tensor, count: int) -> None:
        """Run the iterations of the M-step after the first; the loss is divided by ``count``, as in the first."""
        with torch.no_grad():
            weights, _, _ = self._improve(states, mask)
        observation, mask_of_actions = nest.map_structure(lambda x: x.detach().flatten(0, 1),
                                                          (states.observation, states.action_mask))
        for _ in range(self._mstep_iterations - 1):
            policy, _ = self._actor_network(observation)
            policy = dist_utils.mask_actions(policy, mask_of_actions)
            policy = nest.map_structure(lambda x: x.unflatten(0, mask.shape), policy)
            loss, _ = self._policy_loss(states, weights, policy, mask)
            self._actor_optimizer.zero_grad()
            ((loss * mask).sum() / count).backward()
            self.updater.average_gradients(self._actor_optimizer)
            self._actor_optimizer.step()
            self._move_multipliers()


def _make_critics(ctor: Callable[..., Any] | None, is_discrete: bool, observation_spec: NestedTensorSpec,
                  action_spec: NestedTensorSpec, reward_spec: TensorSpec, count: int) -> Any:
    """Create ``count`` critics as one network; return ``None`` without a constructor."""
    if ctor is None:
        return None
    if is_discrete:
        return ctor(input_tensor_spec=observation_spec, action_spec=action_spec).make_parallel(count)
    values = {'output_tensor_spec': TensorSpec(reward_spec.shape)} if reward_spec.ndim else {}
    return ctor(input_tensor_spec=(observation_spec, action_spec), **values).make_parallel(count)
