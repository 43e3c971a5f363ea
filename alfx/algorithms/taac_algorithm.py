"""Temporally abstract actor-critic: a policy that also decides whether to repeat the previous action.

Yu, Xu and Zhang 2021, "TAAC: Temporally Abstract Actor-Critic for Continuous Control", arXiv:2104.06521. A step samples
a candidate action from an actor, then a switch b: 1 takes the candidate, 0 repeats the previous action. The variants
with trajectories of higher order (TaacL, TaacQ) extend the previous trajectory instead of repeating an action.

Differences from the paper: all actions are scaled to [-1, 1] internally, so that the previous action of an episode's
first step is the center of the range, whatever the bounds are. The actor receives a linear map of the previous
trajectory to the size of the observation. The temperatures of actor and switch are independent parameters that start
from the same value. Read next :mod:`alfx.algorithms.taac.action_curves`.
"""
import contextlib
import enum
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest, summary
from alfx.algorithms.base import critic_values
from alfx.algorithms.base.time_slices import repeated, pad_end
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm, Rows, Terms
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.sac import actions as sac_actions
from alfx.algorithms.sac import soft_losses as sac_losses
from alfx.algorithms.taac.action_curves import (LinearTrajectory, QuadraticTrajectory, Trajectory, action_scale,
                                                 choose, trajectory_encoder)
from alfx.algorithms.taac.compare_through import compare_through_return
from alfx.algorithms.taac.double_precision import LinearLayersInDouble
from alfx.algorithms.td_loss import TDLoss
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, Experience, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import ConfError, configurable, takes_arguments_of
from alfx.gin_utils.value_checks import Count, Fraction, Positive, StepLimit, problem_at
from alfx.layers import Detach
from alfx.nest.utils import NestConcat
from alfx.networks.action_specs import check_actor
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.summary import summary_utils
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.target_updater import TargetUpdater

TaacState = namedtuple('TaacState', ['tau', 'repeats'], default_value=())
"""Current trajectory ``[B, order * n]``, and the number of steps for which it has been extended, int64 ``[B]``."""

TaacCriticInfo = namedtuple('TaacCriticInfo', ['critics', 'target_critic', 'value_loss'], default_value=())
"""Values ``[B, replicas(, K)]`` of the action taken, bootstrap value ``[B(, K)]``; ``value_loss`` is unused."""

TaacActorInfo = namedtuple('TaacActorInfo', ['actor_loss', 'b1_a_entropy', 'beta_entropy', 'adv', 'value_loss'],
                           default_value=())
"""Loss of the actor, estimated entropies of actor and switch, advantage of b=1, ``[B]``; ``value_loss`` is unused."""

TaacInfo = namedtuple('TaacInfo', ['reward', 'step_type', 'tau', 'prev_tau', 'discount', 'action_distribution',
                                   'rollout_b', 'b', 'actor', 'critic', 'alpha', 'repeats'], default_value=())
"""Info of a step, ``[B, ...]``.

The rollout sets ``tau`` (chosen), ``prev_tau`` (before), ``rollout_b`` (bool, chosen) and ``repeats`` (so far).
Training adds ``b`` (int64) and ``action_distribution`` (a :class:`Distributions`) of the current policy, and the
losses.
"""

TaacLossInfo = namedtuple('TaacLossInfo', ['actor', 'critic', 'alpha'], default_value=())
"""Parts of the loss, ``[T, B]``."""

Distributions = namedtuple('Distributions', ['beta_dist', 'b1_a_dist'], default_value=())
"""Distributions of the switch, and of the candidate action (scaled to [-1, 1])."""

ActPredOutput = namedtuple('ActPredOutput', ['dists', 'b', 'actor_a', 'taus', 'q_values2'], default_value=())
"""``Distributions``, switch int64 ``[B]``, candidate action, trajectories ``(b=0, b=1)``, their values ``[B, 2]``."""


class AlgorithmMode(enum.Enum):
    """Kind of step for which an action is chosen."""

    predict = 'predict'
    rollout = 'rollout'
    train = 'train'


Mode = AlgorithmMode
_SWITCH = BoundedTensorSpec((), torch.int64, 0, 1)


@configurable
class TAACTDLoss(TDLoss):
    """Loss between values and :func:`compare_through_return`.

    Args:
        kwargs: arguments of :class:`~alfx.algorithms.td_loss.TDLoss`, except ``td_lambda`` and ``normalize_target``.
    """

    @takes_arguments_of(TDLoss, without=('td_lambda', 'normalize_target'), defaults={'name': 'TAACTDLoss'})
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)

    def compute_td_target(self, info: Any, target_value: Tensor) -> Tensor:
        """Compute the targets of all steps but the final one.

        Args:
            info: ``TaacInfo`` with ``reward`` (``[T, B]`` or ``[T, B, K]``), ``step_type``, ``discount``, ``b`` and
                ``rollout_b`` (``[T, B]``).
            target_value: values to bootstrap from, with the shape of the reward.

        Returns:
            Targets ``[T-1, B]`` (``[T-1, B, K]``); the target of a LAST step is its own value.
        """
        return compare_through_return(info.reward, target_value, info.step_type, self._discount(info),
                                      info.b.bool() | info.rollout_b.bool())


@configurable
class TaacAlgorithmBase(BootstrappedAlgorithm, OffPolicyAlgorithm):
    """Base class of TAAC: an actor, a switch computed from the critics, and the critics.

    The switch is ``p(b) ~ exp(Q(s, tau_b) / alpha)`` in closed form, where ``tau_1`` is the new trajectory and
    ``tau_0`` the extended previous one; the actor's gradient is that of SAC with ``dQ/da`` scaled by ``p(b=1)``
    (paper, section 4.2). Entropies are regularized, but not part of the return. Sequences of ``mini_batch_length``
    steps give targets over at most one step less, see :class:`TAACTDLoss`.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: bounded spec of a continuous action of any shape, n numbers in all.
        reward_spec: rank 0, or rank 1 for K rewards.
        actor_network_cls: called as ``(input_tensor_spec=(observation_spec, trajectory_spec), action_spec=,
            input_preprocessors=, preprocessing_combiner=)``; creates the actor. Its action spec is scaled to [-1, 1].
        critic_network_cls: called as ``(input_tensor_spec=(observation_spec, trajectory_spec))``, for K rewards also
            with ``output_tensor_spec=``; creates one critic.
        actor_observation_processors: preprocessors of the observation for the actor. Together with a preprocessor of
            the previous trajectory they replace the ``input_preprocessors`` of ``actor_network_cls``. The default stops
            the gradients of the actor's loss before a representation learner.
        reward_weights: K weights of the values in the objective of actor and switch; ``None``: all are 1.
        num_critic_replicas: number of critics; the lowest value is used.
        epsilon_greedy: in evaluation, the probability of sampling (action and switch separately) instead of taking the
            most likely; ``None``: ``config.epsilon_greedy``, or 0 without a config.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        target_update_tau: coefficient of the soft (Polyak) update of the target critics; smaller values are more stable
            and learn more slowly.
        target_update_period: number of updates between two updates of the target critics.
        critic_loss_ctor: called as ``(debug_summaries=, name=)``; creates the loss, which treats the critics as further
            samples; ``None``: :class:`TAACTDLoss`.
        actor_optimizer: optimizes the actor.
        critic_optimizer: optimizes the critics.
        alpha_optimizer: optimizes the two temperatures.
        initial_alpha: initial temperature of actor and switch.
        debug_summaries: write more summaries.
        randomize_first_state_tau: start episodes, in rollout and training, with a random previous trajectory instead of
            a resting one in the center.
        b1_advantage_clipping: ``(min, max)`` of the advantage ``Q(s, tau_1) - Q(s, tau_0)`` in ``p(b)``; ``None``: no
            clipping.
        max_repeat_steps: maximum number of extensions of a trajectory in rollout and evaluation, after which the switch
            is 1; ``None``: no limit.
        target_entropy: target entropy in nats, or a function that computes it from the spec of a decision (an integer
            in {0, 1}; an action in [-1, 1]); or a pair, for the switch and the actor. ``None``:
            ``calc_default_target_entropy``.
        checkpoint: as in ``Algorithm``.
        trajectory: kind of trajectories.
        train_actor_on_last_step: train actor and temperatures on all steps of a sequence; ``False``: not on the last
            one, where the critics are not trained. That saves work and follows the paper.
        name: name of this algorithm.

    Raises:
        SpecError: the action is not one continuous tensor with finite bounds.
        ConfError: an argument is out of range.
        ValueError: a network is recurrent.
    """

    _middle: Tensor
    _half: Tensor
    _target_entropy: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: BoundedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()),
                 actor_network_cls: Callable[..., Any] = ActorDistributionNetwork,
                 critic_network_cls: Callable[..., Any] = CriticNetwork,
                 actor_observation_processors: Any = Detach(), reward_weights: list[float] | None = None,
                 num_critic_replicas: Count = 2, epsilon_greedy: Fraction | None = None, env: Any = None,
                 config: TrainerConfig | None = None, target_update_tau: Fraction = 0.05,
                 target_update_period: Count = 1, critic_loss_ctor: Callable[..., Any] | None = None,
                 actor_optimizer: Any = None, critic_optimizer: Any = None, alpha_optimizer: Any = None,
                 initial_alpha: Positive = 1.0, debug_summaries: bool = False, randomize_first_state_tau: bool = False,
                 b1_advantage_clipping: tuple[float, float] | None = None, max_repeat_steps: StepLimit | None = None,
                 target_entropy: Any = None, checkpoint: str | None = None, trajectory: Trajectory | None = None,
                 train_actor_on_last_step: bool = True, name: str = 'TaacAlgorithmBase'):
        self._check_arguments(b1_advantage_clipping, target_entropy)
        trajectory = Trajectory() if trajectory is None else trajectory
        middle, half = action_scale(action_spec, type(self).__name__)
        scaled_spec = BoundedTensorSpec(action_spec.shape, action_spec.dtype, -1.0, 1.0)
        tau_spec = BoundedTensorSpec((trajectory.order * action_spec.numel, ), torch.float32, -1.0, 1.0)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=(),
                         rollout_state_spec=TaacState(tau=TensorSpec.from_spec(tau_spec),
                                                      repeats=TensorSpec((), torch.int64)),
                         reward_weights=reward_weights, env=env, config=config, checkpoint=checkpoint,
                         debug_summaries=debug_summaries, name=name)
        self.set_epsilon_greedy(epsilon_greedy)
        self._trajectory = trajectory
        self._randomize_first_state_tau = randomize_first_state_tau
        self._b1_advantage_clipping = b1_advantage_clipping
        self._max_repeat_steps = max_repeat_steps
        self._train_actor_on_last_step = train_actor_on_last_step
        self.register_buffer('_middle', middle, persistent=False)
        self.register_buffer('_half', half, persistent=False)
        self._actor_network = actor_network_cls(
            input_tensor_spec=(observation_spec, tau_spec), action_spec=scaled_spec,
            input_preprocessors=(actor_observation_processors, trajectory_encoder(
                observation_spec, actor_observation_processors, tau_spec)),
            preprocessing_combiner=NestConcat())
        check_actor(type(self).__name__, 'actor_network_cls', self._actor_network, gives_distributions=True)
        values = {'output_tensor_spec': TensorSpec(reward_spec.shape)} if reward_spec.ndim else {}
        self._critic_networks = critic_network_cls(
            input_tensor_spec=(observation_spec, tau_spec), **values).make_parallel(num_critic_replicas)
        for network in (self._actor_network, self._critic_networks):
            if network.is_rnn:
                raise ValueError(f'{type(self).__name__}: {network.name} is recurrent; expected feed-forward networks. '
                                 'Use @FrameStacker in TrainerConfig.data_transformer_ctor for partial observations')
        self._target_critic_networks = self._critic_networks.copy(name='target_critics')
        self._update_target = TargetUpdater(self._critic_networks, self._target_critic_networks,
                                            tau=target_update_tau, period=target_update_period)
        self._log_alpha = nn.Parameter(torch.full((2, ), math.log(initial_alpha)))  # of the switch, of the actor
        targets = target_entropy if isinstance(target_entropy, (tuple, list)) else (target_entropy, target_entropy)
        self.register_buffer('_target_entropy', torch.tensor([
            sac_actions.target_entropy_of(spec, target) for spec, target in zip((_SWITCH, scaled_spec), targets)]),
            persistent=False)
        self._add_given_optimizers((actor_optimizer, self._actor_network), (critic_optimizer, self._critic_networks),
                                   (alpha_optimizer, self._log_alpha))
        self._critic_loss = (critic_loss_ctor or TAACTDLoss)(debug_summaries=debug_summaries,
                                                             name=f'{name}/critic_loss')

    def _check_arguments(self, clipping: Any, target_entropy: Any) -> None:
        owner = type(self).__name__
        if clipping is not None and (len(clipping) != 2 or not clipping[0] <= clipping[1]):
            raise ConfError([problem_at(owner, 'b1_advantage_clipping', f'= {clipping} is not a pair (min, max)')])
        if isinstance(target_entropy, (tuple, list)) and len(target_entropy) != 2:
            raise ConfError([problem_at(owner, 'target_entropy', f'= {target_entropy}: expected one target or a pair')])

    # Acting ----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Return the action ``[B, ...]`` and the :class:`TaacState` of the most likely decisions."""
        act, tau, b, repeats = self._decide(inputs.observation, state.tau, state.repeats, Mode.predict)
        info = TaacInfo(action_distribution=act.dists, b=b, tau=tau, prev_tau=state.tau, repeats=repeats)
        return AlgStep(self._output(tau), TaacState(tau, repeats), info)

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Sample an action ``[B, ...]`` and its :class:`TaacState`; training uses the info."""
        prev_tau = self._first_tau(inputs.step_type, state.tau)
        _, tau, b, repeats = self._decide(inputs.observation, prev_tau, state.repeats, Mode.rollout)
        info = TaacInfo(tau=tau, prev_tau=prev_tau, rollout_b=b.bool(), repeats=repeats)
        return AlgStep(self._output(tau), TaacState(tau, repeats), info)

    def _decide(self, observation: NestedTensor, prev_tau: Tensor, repeats: Tensor,
                mode: AlgorithmMode) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Return prediction, trajectory, switch and number of repetitions, subject to ``max_repeat_steps``."""
        act = self._predict_action(observation, prev_tau, mode)
        b = act.b
        if self._max_repeat_steps is not None:
            b = torch.where(repeats >= self._max_repeat_steps, 1, b)
        return act, choose(b, act.taus), b, (repeats + 1) * (1 - b)

    def _predict_action(self, observation: NestedTensor, prev_tau: Tensor, mode: AlgorithmMode) -> Any:
        """Return an :class:`ActPredOutput` for observations and trajectories ``[N, ...]``.

        For training, the values have gradients to the candidate action.
        """
        if mode is Mode.predict:
            a_dist, actor_a = self._candidate(observation, prev_tau)
        else:
            a_dist, _ = self._actor_network((observation, prev_tau))
            sample = dist_utils.sample_action_distribution if mode is Mode.rollout else (
                dist_utils.rsample_action_distribution)
            actor_a = sample(a_dist)
        taus = (self._trajectory.extend(prev_tau),
                self._trajectory.renew(actor_a.reshape(actor_a.shape[0], -1), prev_tau))
        q_values2 = self._values_of_both(observation, taus)
        beta_dist = self._switch_distribution(q_values2.detach())
        b = (dist_utils.epsilon_greedy_sample(beta_dist, self._epsilon_greedy) if mode is Mode.predict else
             beta_dist.sample())
        return ActPredOutput(Distributions(beta_dist, a_dist), b, actor_a, taus, q_values2)

    def _candidate(self, observation: NestedTensor, prev_tau: Tensor) -> tuple[Any, Tensor]:
        """Return the distribution of the candidate action, and the most likely action ``[N, ...]``.

        A trajectory with a slope multiplies an error of the candidate by the number of steps that follow it, and a
        renewed trajectory carries the error into the next slope. A rounding error in the last bit of a float32 thus
        grows to a visible size. For these trajectories the candidate is computed in double precision, so that it does
        not depend on the order of summation.
        """
        with LinearLayersInDouble() if self._trajectory.order > 1 else contextlib.nullcontext():
            a_dist, _ = self._actor_network((observation, prev_tau))
            actor_a = dist_utils.epsilon_greedy_sample(a_dist, self._epsilon_greedy)
        return a_dist, actor_a.to(prev_tau.dtype)

    def _values_of_both(self, observation: NestedTensor, taus: tuple[Tensor, Tensor]) -> Tensor:
        """Return values ``[N, 2]`` of extending and renewing, with gradients to the renewed trajectory."""
        if not taus[1].requires_grad:
            both = nest.map_structure(lambda x: torch.cat((x, x)), observation)
            with torch.no_grad():
                return self._value(both, torch.cat(taus)).view(2, -1).t()
        with torch.no_grad():
            extended = self._value(observation, taus[0])
        return torch.stack((extended, self._value(observation, taus[1])), -1)

    def _value(self, observation: NestedTensor, tau: Tensor) -> Tensor:
        """Return the lowest value of the critics ``[N]``, weighted over rewards."""
        critics, _ = self._critic_networks((observation, tau))
        return critic_values.min_weighted_q(critics, self._reward_weights)

    def _switch_distribution(self, q_values2: Tensor) -> Any:
        """Return ``p(b) ~ exp(Q_b / alpha)`` (paper, eq. 7) from values ``[N, 2]``."""
        advantage = q_values2[:, 1] - q_values2[:, 0]
        if self._b1_advantage_clipping is not None:
            advantage = advantage.clamp(*self._b1_advantage_clipping)
        logit = advantage * torch.exp(-self._log_alpha.detach()[0])
        return dist_utils.Categorical(logits=torch.stack((torch.zeros_like(logit), logit), -1))

    def _first_tau(self, step_type: Tensor, tau: Tensor) -> Tensor:
        """Return ``tau`` ``[..., order * n]``, random at first steps with ``randomize_first_state_tau``."""
        if not self._randomize_first_state_tau:
            return tau
        return torch.where((step_type == StepType.FIRST).unsqueeze(-1), 2.0 * torch.rand_like(tau) - 1.0, tau)

    def _output(self, tau: Tensor) -> Tensor:
        """Return the action ``[B, ...]`` of ``tau``, in the bounds of the environment."""
        action = self._trajectory.action(tau).reshape(-1, *self._action_spec.shape)
        return torch.addcmul(self._middle, action, self._half)

    # Training --------------------------------------------------------------------------------------------------

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Choose an action by the current policy, and compute its value and the value of the action taken."""
        return super().train_step(inputs, state, self._with_first_tau(inputs, rollout_info))

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Run :meth:`train_step` on ``[T, B, ...]``, without computations that no loss uses."""
        if len(inputs.step_type) > 1:
            rollout_info = self._with_first_tau(inputs, rollout_info)
        return super().train_sequence(inputs, state, rollout_info)

    def _with_first_tau(self, inputs: TimeStep, rollout_info: Any) -> Any:
        return rollout_info._replace(prev_tau=self._first_tau(inputs.step_type, rollout_info.prev_tau))

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Return distributions, switch and trajectory, and the prediction that contains them."""
        act = self._predict_action(rows.observation, rows.rollout_info.prev_tau, Mode.train)
        return (act.dists, act.b, choose(act.b, act.taus).detach()), act, state

    def policy_loss(self, rows: Rows, policy: Any, details: Any, state: Any) -> tuple[Any, Any]:
        """Return a :class:`TaacActorInfo` and the loss of the temperatures ``[N]``."""
        return self._policy_losses(details), state

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Return the critics' values ``[N, n]`` (``[N, n, K]``) of the trajectory taken."""
        return self._critic_networks((rows.observation, rows.rollout_info.tau))[0], state

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Return the lowest value of the target critics ``[N(, K)]`` for the trajectory of the policy."""
        critics, _ = self._target_critic_networks((rows.observation, rows.of(policy[2])))
        return critic_values.min_q(critics, self._reward_weights), state

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return the action of the policy, and a :class:`TaacInfo`."""
        (distributions, b, tau), (actor, alpha) = terms.policy, terms.loss
        info = TaacInfo(reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount,
                        tau=rollout_info.tau, prev_tau=rollout_info.prev_tau, rollout_b=rollout_info.rollout_b,
                        repeats=rollout_info.repeats, action_distribution=distributions, b=b, actor=actor,
                        critic=TaacCriticInfo(terms.values, terms.target), alpha=alpha)
        return self._output(tau).unflatten(0, inputs.step_type.shape), info

    def _policy_losses(self, act: Any) -> tuple[Any, Tensor]:
        """Return a :class:`TaacActorInfo` and the loss of the temperatures ``[N]`` for a prediction."""
        gradient = critic_values.action_gradient(act.q_values2[:, 1], act.actor_a)
        q_values2 = act.q_values2.detach()
        log_prob = dist_utils.compute_log_probability(act.dists.b1_a_dist, act.actor_a)
        policy_loss = critic_values.deterministic_policy_loss(gradient, act.actor_a)
        loss = (act.dists.beta_dist.probs[:, 1] * policy_loss - sac_losses.entropy_bonus(self._log_alpha[1], log_prob))
        entropies = torch.stack((act.dists.beta_dist.entropy(), -log_prob.detach()), -1)
        alpha_loss = sac_losses.temperature_loss(self._log_alpha, -entropies, self._target_entropy)
        info = TaacActorInfo(actor_loss=loss, beta_entropy=entropies[:, 0], b1_a_entropy=entropies[:, 1],
                             adv=q_values2[:, 1] - q_values2[:, 0])
        return info, alpha_loss

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the sum of the losses of actor, critics and temperatures, ``[T, B]``."""
        actor_loss, alpha_loss = info.actor.actor_loss, info.alpha
        if not self._train_actor_on_last_step and len(actor_loss) > 1:
            actor_loss, alpha_loss = (pad_end(x[:-1], 1) for x in (actor_loss, alpha_loss))
        critic_loss = self._calc_critic_loss(info)
        if summary.should_record_summaries():
            self._summarize_policy(info)
        return LossInfo(loss=actor_loss + critic_loss + alpha_loss,
                        extra=TaacLossInfo(actor=actor_loss, critic=critic_loss, alpha=alpha_loss))

    def _calc_critic_loss(self, info: Any) -> Tensor:
        """Return the sum of the losses of all critics, ``[T, B]``; the loss treats critics as further samples."""
        length, batch, count = info.critic.critics.shape[:3]
        seen = TaacInfo(reward=info.reward, step_type=info.step_type, discount=info.discount, b=info.b,
                        rollout_b=info.rollout_b)
        seen, target = repeated((seen, info.critic.target_critic), count)
        loss = self._critic_loss(seen, info.critic.critics.flatten(1, 2), target).loss
        return loss.view(length, batch, count).sum(-1)

    # Summaries -------------------------------------------------------------------------------------------------

    def _summarize_policy(self, info: Any) -> None:
        mask = info.step_type != StepType.LAST
        if not self._train_actor_on_last_step and len(mask) > 1:
            mask[-1] = False
        with summary.scope(self._name):
            for i, what in enumerate(('beta', 'b1_a')):
                summary.scalar(f'alpha/{what}', self._log_alpha.detach()[i].exp())
                summary_utils.safe_mean_summary(f'entropy/{what}', getattr(info.actor, f'{what}_entropy'), mask)
            summary_utils.safe_mean_summary('train_b1', info.b.float(), mask)
            summary_utils.safe_mean_summary('adv', info.actor.adv, mask)

    def summarize_rollout(self, experience: Experience) -> None:  # type: ignore[override]
        """Log the share of renewed trajectories, and the number of steps of extensions."""
        super().summarize_rollout(experience)
        with summary.scope(self._name):
            summary_utils.add_mean_summary('rollout_b1', experience.rollout_info.rollout_b)
            if self._debug_summaries:
                summary_utils.add_mean_hist_summary('rollout_repeats', experience.rollout_info.repeats)


def _with_parameters_of_base(init: Callable[..., None]) -> Callable[..., None]:
    """Show the base class's parameters in the signature of ``init`` instead of ``**kwargs``, to check confs."""
    parameters = inspect.signature(init).parameters
    own = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    base = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(TaacAlgorithmBase.__init__).parameters.values()
            if p.name not in parameters and p.name != 'trajectory']
    init.__signature__ = inspect.Signature([*own, parameters['args'], *base])  # type: ignore[attr-defined]
    return init


@configurable
class TaacAlgorithm(TaacAlgorithmBase):
    """TAAC that repeats the previous action, or takes a new one.

    Args:
        name: name of this algorithm.
        args, kwargs: arguments of :class:`TaacAlgorithmBase`, except ``trajectory``.
    """

    @_with_parameters_of_base
    def __init__(self, name: str = 'TaacAlgorithm', *args: Any, **kwargs: Any):
        super().__init__(*args, trajectory=Trajectory(), name=name, **kwargs)  # type: ignore[misc]


@configurable
class TaacLAlgorithm(TaacAlgorithmBase):
    """TAAC that extends the previous action linearly, or starts a new line.

    Args:
        name: name of this algorithm.
        inverse_mode: the actor outputs the new action, from which the slope of the new line is inferred; ``False``: it
            outputs the slope. See :class:`~alfx.algorithms.taac.action_curves.LinearTrajectory`.
        args, kwargs: arguments of :class:`TaacAlgorithmBase`, except ``trajectory``.
    """

    _trajectory_cls: Callable[[bool], Trajectory] = LinearTrajectory

    @_with_parameters_of_base
    def __init__(self, name: str = 'TaacLAlgorithm', inverse_mode: bool = True, *args: Any, **kwargs: Any):
        trajectory = self._trajectory_cls(inverse_mode)
        super().__init__(*args, trajectory=trajectory, name=name, **kwargs)  # type: ignore[misc]


@configurable
class TaacQAlgorithm(TaacLAlgorithm):
    """TAAC that extends the previous action along a parabola, or starts a new one with a slope of zero.

    Args:
        name: name of this algorithm.
        inverse_mode: the actor outputs the new action, from which slope and curvature are inferred; ``False``: it
            outputs the curvature. See :class:`~alfx.algorithms.taac.action_curves.QuadraticTrajectory`.
        args, kwargs: arguments of :class:`TaacAlgorithmBase`, except ``trajectory``.
    """

    _trajectory_cls = QuadraticTrajectory

    @_with_parameters_of_base
    def __init__(self, name: str = 'TaacQAlgorithm', inverse_mode: bool = True, *args: Any, **kwargs: Any):
        super().__init__(name, inverse_mode, *args, **kwargs)
