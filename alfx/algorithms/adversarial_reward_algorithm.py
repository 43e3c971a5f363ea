"""Rewards from demonstrations: GAIL (Ho and Ermon 2016, arXiv:1606.03476) and AIRL (Fu et al. 2018, arXiv:1710.11248).

A discriminator D learns to tell transitions of demonstrations from those of the policy; its logit is f::

    minimise  E_demonstrations[ -log D ] + E_policy[ -log(1 - D) ],  D = sigmoid(f)

and the policy, of any algorithm that is trained from a replay buffer, is rewarded for what D takes for demonstrated.
The module is an ``Agent.intrinsic_reward_module``, with ``Agent.extrinsic_reward_coef = 0`` where there is nothing but
the demonstrations to learn from. In GAIL f is a network of s and a. In AIRL it is made so that a reward can be taken
out of it (eq. 4 there)::

    f = g(s, a) + gamma h(s') - h(s) - log pi(a | s)

with h(s') = 0 where the task ended; g and h may be looked at when the policy is gone. Rewards are those of the
discriminator as it is when a step is trained on, not as it was when the step was collected.

Rewards with one sign are a bias: where episodes can end, a policy is paid for staying alive (GAIL's reward) or for
ending (``reward_form = 'negative'``) whatever has been demonstrated (Kostrikov et al. 2019, arXiv:1809.02925, section
4.1); then neither proves anything about imitation. A warning says so.
"""
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alfx import nest
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.algorithms.intrinsic.intrinsic_reward import BatchRewards
from alfx.algorithms.offline.offline_losses import StoredActions
from alfx.algorithms.reward_learning_algorithm import RewardEstimationAlgorithm
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import ConfError, configurable, takes_arguments_of
from alfx.gin_utils.value_checks import Fraction, NonNegative, check_value, problem_at
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.offline.demonstrations import Demonstrations
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.engine.capabilities import Capabilities

logger = logging.getLogger(__name__)

Transitions = namedtuple('Transitions', ['observation', 'action', 'next_observation', 'discount', 'log_pi', 'is_valid'],
                         default_value=())
"""Steps that were taken, ``[..., *]`` each: ``is_valid`` is 0 where there is none, ``log_pi`` the log-probability of
the action by the policy as it is. What is not needed is ``()``."""

AdversarialInfo = namedtuple('AdversarialInfo', ['own', 'demonstrated'], default_value=())
"""``Transitions`` of the policy, and as many of demonstrations."""

AdversarialLossInfo = namedtuple('AdversarialLossInfo', ['loss', 'accuracy_own', 'accuracy_demonstrated', 'penalty'],
                                 default_value=())
"""For summaries: the loss of the discriminator, how often it is right about steps of either kind, and the penalty of
its gradient."""


class AdversarialRewardAlgorithm(BatchRewards, RewardEstimationAlgorithm):
    """What GAIL and AIRL have in common: demonstrations, pairs of steps, the loss of the discriminator.

    Args:
        observation_spec: nest of specs of the observation, transformed.
        action_spec: nest of specs of the action.
        demonstrations: datasets that hold them, as in ``TrainerConfig.offline_buffer_dir``.
        reward_form: what the reward is of the logit f: ``'positive'``: ``-log(1 - D)``, ``'negative'``: ``log D``,
            ``'difference'``: ``log D - log(1 - D) = f``.
        gradient_penalty: weight of ``(|df/dx| - 1)^2`` at random points x between demonstrated transitions and the
            policy's (Gulrajani et al. 2017, arXiv:1704.00028), which keeps a discriminator from being certain. Without
            effect on discrete observations, which have no points in between.
        name: name of this algorithm.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 demonstrations: str | Sequence[str] = (), reward_form: str = 'positive',
                 gradient_penalty: NonNegative = 0.0, name: str = 'AdversarialReward'):
        super().__init__(name=name)
        check_value(type(self).__name__, 'reward_form', reward_form, str, choices=sorted(_REWARDS))
        self._demonstrations = Demonstrations(demonstrations, type(self).__name__)
        self._encoder = SimpleActionEncoder(action_spec)
        self._reward_form, self._gradient_penalty = reward_form, gradient_penalty

    def own_capabilities(self) -> Capabilities:
        """Fixed unless something in a network draws numbers or keeps statistics."""
        return super().own_capabilities()._replace(traceable_update=is_traceable(self), trains_sequences_at_once=True)

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Steps are rewarded as they are read from a replay buffer.

        Raises:
            ValueError: there is none.
        """
        if is_on_policy:
            raise ValueError(f'{self._name} rewards the steps of a replay buffer: choose a policy algorithm that is '
                             'trained from one, such as PPO or SAC')
        super().set_on_policy(is_on_policy)

    def prepare(self, root: Any) -> None:
        """Read the demonstrations."""
        for dataset in self._demonstrations.load(root):
            if not dataset.episodes.discount.all() and self._reward_form != 'difference':
                logger.warning('%s: episodes of %s end before their time is up; a reward of one sign (%s.reward_form = '
                               '%r) pays for staying alive or for ending, whatever is demonstrated', self._name,
                               dataset.name, type(self).__name__, self._reward_form)

    # Discriminator ---------------------------------------------------------------------------------------------

    def _logit(self, steps: Any) -> Tensor:
        """f ``[N]`` of ``Transitions`` ``[N, ...]`` with gradient to the discriminator, their actions encoded."""
        raise NotImplementedError(f'{type(self).__name__}._logit')

    def _reward(self, logit: Tensor) -> Tensor:
        return _REWARDS[self._reward_form](logit)

    def _transitions(self, root: Any, steps: TimeStep) -> Any:
        """The ``Transitions`` ``[N, T - 1, ...]`` in sequences of ``steps`` ``[N, T, ...]``."""
        now, following = (nest.map_structure(lambda x, part=part: x[:, part], steps) for part in (
            slice(None, -1), slice(1, None)))
        action = self._encoder(nest.map_structure(lambda x: x.flatten(0, 1), following.prev_action))
        is_valid = now.step_type != StepType.LAST
        return Transitions(observation=now.observation, action=action.unflatten(0, is_valid.shape),
                           is_valid=is_valid.to(torch.float32))

    @torch.no_grad()
    def reward_batch(self, root: Any, inputs: TimeStep) -> AlgStep:
        """Rewards ``[B, T]`` of arriving at the steps of sequences ``[B, T, ...]``; 0 at the first and where an episode
        begins. ``info``: :class:`AdversarialInfo` ``[B, T, ...]`` with other demonstrations each time."""
        shape = batch, length = inputs.step_type.shape
        own = self._transitions(root, inputs)
        logit = self._logit(nest.map_structure(lambda x: x.flatten(0, 1), own)).unflatten(0, (batch, length - 1))
        reward = self._reward(logit) * own.is_valid
        own = nest.map_structure(lambda x: torch.cat((x, torch.zeros_like(x[:, :1])), 1), own)  # the last step has none
        pairs = self._demonstrations.draw(batch * length, 2).time_step
        demonstrated = nest.map_structure(lambda x: x[:, 0].unflatten(0, shape), self._transitions(root, pairs))
        return AlgStep(torch.cat((torch.zeros_like(reward[:, :1]), reward), 1), (), AdversarialInfo(own, demonstrated))

    # Training --------------------------------------------------------------------------------------------------

    def rollout_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """No reward: it is that of the discriminator at the time of training."""
        return AlgStep((), state, ())

    def train_step(self, time_step: TimeStep, state: NestedTensor = (), rollout_info: Any = None) -> AlgStep:
        """The loss of the discriminator for a transition of each kind, ``[B]``; 0 where one of the two is none.

        Args:
            time_step: not looked at.
            state: ``()``.
            rollout_info: :class:`AdversarialInfo` ``[B, ...]``.
        """
        own, demonstrated = rollout_info
        f_own, f_demonstrated = self._logit(own), self._logit(demonstrated)
        is_pair = own.is_valid * demonstrated.is_valid  # as many of each kind: else f is off by the log of their ratio
        loss = (F.softplus(f_own) + F.softplus(-f_demonstrated)) * is_pair
        right = ((f_own < 0) * is_pair, (f_demonstrated > 0) * is_pair)
        penalty: Any = ()
        if self._gradient_penalty:
            penalty = self._penalty(own, demonstrated) * is_pair
            loss = loss + self._gradient_penalty * penalty
        return AlgStep((), state, AdversarialLossInfo(loss, *(x.detach() for x in right), penalty))

    def _penalty(self, own: Any, demonstrated: Any) -> Tensor:
        """``(|df/dx| - 1)^2`` ``[B]`` at a random point between two transitions."""
        share = torch.rand_like(own.is_valid)

        def between(x: Tensor, y: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            return torch.lerp(x, y, share.reshape(-1, *[1] * (x.ndim - 1))).detach().requires_grad_()

        with torch.enable_grad():
            point = nest.map_structure(between, own, demonstrated)
            leaves = [x for x in nest.flatten((point.observation, point.action)) if x.requires_grad]
            gradients = torch.autograd.grad(self._logit(point).sum(), leaves, create_graph=True)
            norm = torch.cat([g.flatten(1) for g in gradients], 1).norm(dim=1)
        return (norm - 1.0).square()

    def calc_loss(self, info: Any) -> LossInfo:
        """The losses ``[T, B]``."""
        return LossInfo(loss=info.loss, extra=info)


_REWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    'positive': F.softplus, 'negative': lambda logit: -F.softplus(-logit), 'difference': lambda logit: logit}


@configurable
class GailAlgorithm(AdversarialRewardAlgorithm):
    """Generative adversarial imitation: rewards of a discriminator of observations and actions; see the module.

    Args:
        discriminator_network_cls: called as ``(input_tensor_spec=(observation_spec, action_spec))`` with the spec of
            encoded actions, a vector; makes f, a network without memory that gives one number.
        optimizer: owns the discriminator; ``None``: the optimizer of the agent does.
        kwargs: those of :class:`AdversarialRewardAlgorithm`.

    Raises:
        ConfError: there are no demonstrations, or a number is out of range.
    """

    @takes_arguments_of(AdversarialRewardAlgorithm, defaults={'name': 'GailAlgorithm'},
                        after={'discriminator_network_cls': 'demonstrations'})
    def __init__(self, observation_spec: NestedTensorSpec,
                 discriminator_network_cls: Callable[..., Any] = CriticNetwork,
                 optimizer: Any = None, **kwargs: Any):
        super().__init__(observation_spec=observation_spec, **kwargs)
        self._discriminator = _scalar_network(self, 'discriminator_network_cls', discriminator_network_cls, (
            observation_spec, self._encoder.output_spec))
        self._add_given_optimizers((optimizer, self._discriminator))

    own_capabilities = AdversarialRewardAlgorithm.own_capabilities

    def _logit(self, steps: Any) -> Tensor:
        return self._discriminator((steps.observation, steps.action))[0]

    def compute_reward(self, obs: NestedTensor, action: NestedTensor, state: NestedTensor) -> tuple[Tensor, Any]:
        """The reward ``[N]`` of taking ``action`` in the observation ``state``, and ``obs``, where it led."""
        steps = Transitions(observation=state, action=self._encoder(action))
        return self._reward(self._logit(steps)), obs


@configurable
class AirlAlgorithm(AdversarialRewardAlgorithm):
    """Adversarial inverse reinforcement learning: a discriminator with a reward in it; see the module.

    Args:
        reward_network_cls: makes g; called as ``(input_tensor_spec=(observation_spec, action_spec))`` with the spec of
            encoded actions, or, with ``depends_on_action = False``, as ``(input_tensor_spec=observation_spec)``.
        potential_network_cls: makes h; called as ``(input_tensor_spec=observation_spec)``.
        gamma: discount of the potential of the next observation.
        depends_on_action: whether g sees the action; where it does not, what it learns may be a reward for other
            dynamics too (section 6 of the paper).
        optimizer: owns the discriminator; ``None``: the optimizer of the agent does.
        kwargs: those of :class:`AdversarialRewardAlgorithm`; ``reward_form`` is ``'difference'`` unless given.

    Raises:
        ConfError: there are no demonstrations, a number is out of range, or the policy has memory.
    """

    @takes_arguments_of(AdversarialRewardAlgorithm, defaults={'reward_form': 'difference', 'name': 'AirlAlgorithm'},
                        after={'reward_network_cls': 'demonstrations'})
    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_network_cls: Callable[..., Any] | None = None,
                 potential_network_cls: Callable[..., Any] = ValueNetwork, gamma: Fraction = 0.99,
                 depends_on_action: bool = True, optimizer: Any = None, **kwargs: Any):
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, **kwargs)
        ctor = reward_network_cls or (CriticNetwork if depends_on_action else ValueNetwork)
        inputs = (observation_spec, self._encoder.output_spec) if depends_on_action else observation_spec
        self._reward_network = _scalar_network(self, 'reward_network_cls', ctor, inputs)
        self._potential = _scalar_network(self, 'potential_network_cls', potential_network_cls, observation_spec)
        if optimizer is not None:
            self.add_optimizer(optimizer, [self._reward_network, self._potential])
        self._stored_actions = StoredActions(action_spec)
        self._gamma, self._depends_on_action = gamma, depends_on_action

    own_capabilities = AdversarialRewardAlgorithm.own_capabilities

    def prepare(self, root: Any) -> None:
        """Read the demonstrations.

        Raises:
            ConfError: the policy has memory.
        """
        if nest.flatten(root.policy_algorithm.predict_state_spec):
            raise ConfError([problem_at('Agent', 'intrinsic_reward_module', f'= @{type(self).__name__}, which asks the '
                                        'policy for the probability of demonstrated actions, but the policy has memory',
                                        'choose networks without memory, or @GailAlgorithm')])
        super().prepare(root)

    def _transitions(self, root: Any, steps: TimeStep) -> Any:
        """With the log-probability of the actions by the policy as it is."""
        found, shape, policy = super()._transitions(root, steps), steps.step_type[:, 1:].shape, root.policy_algorithm
        seen = nest.map_structure(lambda x: x[:, :-1].flatten(0, 1), steps)
        state = policy.get_initial_predict_state(shape.numel())
        distribution = getattr(policy.predict_step(seen, state).info, 'action_distribution', ())
        if isinstance(distribution, tuple) and not distribution:
            raise ConfError([problem_at('Agent', 'intrinsic_reward_module', f'= @{type(self).__name__}, which needs '
                                        f'the distribution of actions; {type(policy).__name__} has none',
                                        'choose PPO or SAC, or @GailAlgorithm')])
        following = nest.map_structure(lambda x: x[:, 1:], steps)
        action = nest.map_structure(lambda x: x.flatten(0, 1), following.prev_action)
        log_pi = self._stored_actions.log_prob(distribution, action)
        return found._replace(next_observation=following.observation, discount=following.discount,
                              log_pi=log_pi.unflatten(0, shape))

    def _shaped_reward(self, steps: Any) -> Tensor:
        """``g(s, a) + gamma h(s') - h(s)`` ``[N]``."""
        inputs = (steps.observation, steps.action) if self._depends_on_action else steps.observation
        following = self._gamma * steps.discount * self._potential(steps.next_observation)[0]
        return self._reward_network(inputs)[0] + following - self._potential(steps.observation)[0]

    def _logit(self, steps: Any) -> Tensor:
        return self._shaped_reward(steps) - steps.log_pi

    def compute_reward(self, obs: NestedTensor, action: NestedTensor, state: NestedTensor) -> tuple[Tensor, Any]:
        """g ``[N]`` of taking ``action`` in the observation ``state``, and ``obs``, where it led."""
        inputs = (state, self._encoder(action)) if self._depends_on_action else state
        return self._reward_network(inputs)[0], obs


def _scalar_network(owner: Any, argument: str, ctor: Callable[..., Any], input_tensor_spec: NestedTensorSpec) -> Any:
    """A network without memory whose output is one number.

    Raises:
        ConfError: it is another.
    """
    network = ctor(input_tensor_spec=input_tensor_spec)
    shape = getattr(network.output_spec, 'shape', network.output_spec)
    if network.is_rnn or tuple(shape) != ():
        raise ConfError([problem_at(type(owner).__name__, argument, 'expected a network without memory that gives one '
                                    f'number, found {type(network).__name__} of {shape}', 'leave it out')])
    return network
