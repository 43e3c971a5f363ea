"""Multi-dimensional Q-learning: soft Q-learning of continuous actions, one component at a time, without an actor.

Soft Q-learning (Haarnoja et al. 2017, arXiv:1702.08165) needs samples of ``exp(Q(s, a) / alpha)``. This algorithm draws
them component by component from bins (Metz et al. 2017, arXiv:1705.05035). It learns two forms of the critic, see
:mod:`alfx.networks.mdq_critic_networks`. The *free form* is trained towards one-step soft values

    Q(s[t], a[t])  ->  r[t+1] + gamma discount[t+1] (min_i Q'_i(s[t+1], a') - alpha KL(pi(. | s[t+1]) || uniform))

with a' drawn from the policy and target critics Q'. The *advantage form* is trained by regression towards the lowest
free form (distillation), at the actions taken and at actions of the policy; its Boltzmann distribution is the policy.
The temperature alpha is adjusted to keep the entropy of the policy at a target, as in SAC (Haarnoja et al. 2018,
arXiv:1812.05905). The difference from soft Q-learning is the value of a state: soft Q-learning uses an
importance-weighted estimate of a log-integral; here it is the value of one action and the exact divergence of its
components. Distillation and alpha are trained at the same steps as the free form, all but the last one of a sequence.
"""
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest, summary
from alfx.algorithms.base import critic_values
from alfx.algorithms.base.exploration_noise import ActionBounds, choose, gaussian_like
from alfx.algorithms.base.time_slices import pad_end
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm, Rows, Terms
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.sac import soft_losses as sac_losses
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import Count, Fraction, NonNegative, configurable
from alfx.networks.mdq_critic_networks import MdqCriticNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.entropy_targets import calc_default_target_entropy_quantized
from alfx.utils.target_updater import TargetUpdater

MdqCriticState = namedtuple('MdqCriticState', ['critic', 'target_critic'], default_value=())
"""Training state; the networks are not recurrent, so both fields are ``()``."""

MdqCriticInfo = namedtuple('MdqCriticInfo', ['critic_free_form', 'target_critic_free_form', 'critic_adv_form',
                                             'distill_target', 'kl_wrt_prior'], default_value=())
"""``critic_free_form``: ``[B, n]`` at the action taken; ``target_critic_free_form``: ``[B]``, the lowest target critic
at an action of the policy; ``critic_adv_form`` and ``distill_target``: ``[B, 2]``, the advantage form and its target,
at the action taken and at an action of the policy; ``kl_wrt_prior``: ``[B]``, the divergence of the policy from
uniformly random bins."""

MdqAlphaInfo = namedtuple('MdqAlphaInfo', ['alpha_loss', 'neg_entropy'], default_value=())
"""Loss and negative entropy of the bins in nats, ``[B]`` each."""

MdqInfo = namedtuple('MdqInfo', ['reward', 'step_type', 'discount', 'action', 'critic', 'alpha'], default_value=())
"""Info of a step; ``action`` is the action taken. The rollout sets only ``action``."""

MdqLossInfo = namedtuple('MdqLossInfo', ['critic', 'distill', 'alpha', 'neg_entropy'], default_value=())
"""Parts of the loss, for summaries."""

TargetEntropy = float | Callable[..., float]


@configurable
class MdqAlgorithm(BootstrappedAlgorithm, OffPolicyAlgorithm):
    """Multi-dimensional Q-learning; see the module docstring for the method.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec`` of continuous actions with finite bounds.
        critic_network: network with both forms of the critic, or its constructor, called as
            ``(input_tensor_spec=(observation_spec, action_spec))``.
        reward_spec: rank 0, or rank 1 for K rewards, which are summed with their weights (all 1 unless set by
            :meth:`set_reward_weights`).
        epsilon_greedy: in evaluation, the probability of sampling the policy instead of taking the most likely action;
            ``None``: ``config.epsilon_greedy``, or 0 without a config.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        critic_loss_ctor: creates the loss of the free form, called as ``(debug_summaries=, name=)``; ``None``:
            ``OneStepTDLoss``. The losses of the n critics are summed.
        target_entropy: target of the entropy of the bins, in nats; higher values explore more. It can also be a
            function of an action spec (and of ``num_bins``, if it has that argument), summed over the nest of actions.
        initial_log_alpha: initial log alpha.
        target_update_tau: coefficient of the soft (Polyak) update of the target critics, in (0, 1]; smaller values are
            more stable and learn more slowly.
        target_update_period: number of updates between two updates of the target critics.
        distill_noise: standard deviation of the noise added to the actions used for distillation, in units of half
            their range.
        critic_optimizer: optimizer of both forms; ``None``: the optimizer of the enclosing algorithm.
        alpha_optimizer: optimizer of log alpha; ``None``: the optimizer of the enclosing algorithm.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        SpecError: an action is not continuous or has no bounds.
        ValueError: ``distill_noise`` is negative, or ``critic_network`` is not an ``MdqCriticNetwork``.
    """

    _not_trained = ('_target_free_form', )
    predicts_from_observation = True

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 critic_network: MdqCriticNetwork | Callable[..., MdqCriticNetwork],
                 reward_spec: TensorSpec = TensorSpec(()), epsilon_greedy: Fraction | None = None, env: Any = None,
                 config: TrainerConfig | None = None, critic_loss_ctor: Callable[..., Any] | None = None,
                 target_entropy: TargetEntropy = calc_default_target_entropy_quantized, initial_log_alpha: float = 0.0,
                 target_update_tau: Fraction = 0.05, target_update_period: Count = 1, distill_noise: NonNegative = 0.01,
                 critic_optimizer: Any = None, alpha_optimizer: Any = None, debug_summaries: bool = False,
                 name: str = 'MdqAlgorithm'):
        if not isinstance(critic_network, MdqCriticNetwork):
            critic_network = critic_network(input_tensor_spec=(observation_spec, action_spec))
            if not isinstance(critic_network, MdqCriticNetwork):
                raise ValueError(f'{name}.critic_network: expected an MdqCriticNetwork, found {critic_network!r}')
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=MdqCriticState(), rollout_state_spec=(), env=env, config=config,
                         debug_summaries=debug_summaries, name=name)
        self._critic_network = critic_network
        self._target_free_form = critic_network.free_form.copy(name='target_' + critic_network.free_form.name)
        self._update_target = TargetUpdater(critic_network.free_form, self._target_free_form, tau=target_update_tau,
                                            period=target_update_period)
        self._log_alpha = nn.Parameter(torch.tensor(float(initial_log_alpha)))
        self._target_entropy = _total_entropy(target_entropy, action_spec, critic_network.action_qt.num_bins)
        self._critic_loss = (critic_loss_ctor or OneStepTDLoss)(debug_summaries=debug_summaries, name='critic_loss')
        self.set_epsilon_greedy(epsilon_greedy)
        self._distill_noise = distill_noise
        self._bounds = ActionBounds(action_spec, name)
        self._add_given_optimizers((critic_optimizer, critic_network), (alpha_optimizer, self._log_alpha))

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """Return the empty state."""
        return ()

    # Acting ----------------------------------------------------------------------------------------------------

    def predict_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the most likely action ``[B, ...]``, or with probability ``epsilon_greedy`` a sample of the policy."""
        action, _ = self._act(time_step.observation, greedy=True)
        if self._epsilon_greedy > 0:
            action = choose(self._epsilon_greedy, self._act(time_step.observation)[0], action)
        return AlgStep(action, (), MdqInfo())

    def rollout_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Sample an action ``[B, ...]`` of the policy."""
        action, _ = self._act(time_step.observation)
        return AlgStep(action, (), MdqInfo(action=action))

    def _act(self, observation: NestedTensor, greedy: bool = False) -> tuple[NestedTensor, Tensor]:
        """Return actions ``[N, ...]`` and the negative entropy ``[N]`` of the policy, without gradient."""
        return self._critic_network.get_action(observation, self._log_alpha.detach().exp(), greedy)

    # Training --------------------------------------------------------------------------------------------------

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Return an action of the policy and its negative entropy, without gradient."""
        action, neg_entropy = self._act(rows.observation)
        return (action, neg_entropy), action, state

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Return the free form at the action taken, and the advantage form with its target."""
        observation, taken = rows.observation, rows.rollout_info.action
        critics, _ = self._critic_network((observation, taken))
        return (critics, *self._distillation(observation, taken, rows.of(details))), state

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Return the lowest target critic ``[N]`` at actions of the policy."""
        flat = self._critic_network.action_qt.normalized(rows.of(policy[0]))
        return self._target_free_form((rows.observation, flat))[0].amin(1), state

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return an action of the policy, and an :class:`MdqInfo` with the loss of alpha."""
        (action, neg_entropy), (critics, advantage, distill_target) = terms.policy, terms.values
        alpha_loss = sac_losses.temperature_loss(self._log_alpha, neg_entropy, self._target_entropy)
        kl_wrt_prior = neg_entropy - self._critic_network.get_uniform_prior_logpi()
        return action, MdqInfo(reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount,
                               action=rollout_info.action, alpha=MdqAlphaInfo(alpha_loss, neg_entropy),
                               critic=MdqCriticInfo(critics, terms.target, advantage, distill_target, kl_wrt_prior))

    def _distillation(self, observation: NestedTensor, taken: NestedTensor,
                      drawn: NestedTensor) -> tuple[Tensor, Tensor]:
        """Return the advantage form ``[N, 2]`` at two noisy actions, and the lowest free form without gradient."""
        observation, action = nest.map_structure(lambda a, b: torch.cat((a, b)), (observation, taken),
                                                 (observation, drawn))
        if self._distill_noise > 0:
            action = self._bounds.add_noise(action, gaussian_like(action, self._distill_noise))
        with torch.no_grad():
            target = self._critic_network((observation, action))[0].amin(1)
        advantage = self._critic_network.advantage_form(observation, action, self._log_alpha.detach().exp())
        return advantage.view(2, -1).t(), target.view(2, -1).t()

    # Losses ----------------------------------------------------------------------------------------------------

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of both forms and alpha, ``[T, B]``, from infos ``[T, B, ...]``."""
        alpha = self._log_alpha.detach().exp()
        reward = critic_values.weighted_sum(info.reward, self._reward_weights)
        target = info.critic.target_critic_free_form - alpha * info.critic.kl_wrt_prior
        fields = MdqInfo(reward=reward, step_type=info.step_type, discount=info.discount)
        critic_loss = critic_values.loss_of_all_critics(self._critic_loss, fields, info.critic.critic_free_form, target)
        distill_loss = (info.critic.critic_adv_form - info.critic.distill_target).square().mean(-1)
        distill_loss, alpha_loss = (pad_end(loss[:-1], 1) for loss in (distill_loss, info.alpha.alpha_loss))
        if summary.should_record_summaries():
            summary.scalar(f'{self._name}/alpha', alpha)
        return LossInfo(loss=critic_loss + distill_loss + alpha_loss,
                        extra=MdqLossInfo(critic_loss, distill_loss, alpha_loss, info.alpha.neg_entropy))


def _total_entropy(target_entropy: TargetEntropy, action_spec: NestedTensorSpec, num_bins: int) -> float:
    """Return the target entropy of all actions together, in nats."""
    if not callable(target_entropy):
        return float(target_entropy)
    arguments = {'num_bins': num_bins} if 'num_bins' in inspect.signature(target_entropy).parameters else {}
    return math.fsum(target_entropy(spec, **arguments) for spec in nest.flatten(action_spec))
