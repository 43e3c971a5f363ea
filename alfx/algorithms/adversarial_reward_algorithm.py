"""Rewards from demonstrations: GAIL (Ho and Ermon 2016, arXiv:1606.03476) and AIRL (Fu et al. 2018, arXiv:1710.11248).

A discriminator D learns to distinguish transitions of demonstrations from transitions of the policy; its logit is f::

    minimize  E_demonstrations[ -log D ] + E_policy[ -log(1 - D) ],  D = sigmoid(f)

The policy is rewarded for transitions that D mistakes for demonstrations. Any algorithm that trains from a replay
buffer can learn it. Use the module as ``Agent.intrinsic_reward_module``, with ``Agent.extrinsic_reward_coef = 0`` to
learn from demonstrations alone. In GAIL f is a network of s and a. In AIRL f contains a reward that can be extracted
(eq. 4 of its paper)::

    f = g(s, a) + gamma h(s') - h(s) - log pi(a | s)

with h(s') = 0 where the task ended; g and h remain meaningful without the policy. Rewards are computed when a step is
trained on, by the current discriminator, not when the step is collected.

Rewards that never change sign are biased: where episodes can end early, the policy is rewarded for staying alive
(GAIL's reward) or for ending the episode (``reward_form = 'negative'``), regardless of the demonstrations (Kostrikov et
al. 2019, arXiv:1809.02925, section 4.1). A good return then does not prove imitation. A warning is logged in this case.
"""
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alfx import nest
from alfx.algorithms.intrinsic.intrinsic_reward import BatchRewards
from alfx.algorithms.offline.offline_losses import StoredActions
from alfx.algorithms.reward_learning_algorithm import RewardEstimationAlgorithm
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Fraction, NonNegative, check_value, configurable, problem_at, takes_arguments_of
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.offline.demonstrations import Demonstrations
from alfx.tensor_specs import NestedTensor, NestedTensorSpec

logger = logging.getLogger(__name__)

Transitions = namedtuple('Transitions', ['observation', 'action', 'next_observation', 'discount', 'log_pi', 'is_valid'],
                         default_value=())
"""Transitions, ``[..., *]`` each: ``is_valid`` is 0 for padding and across episodes, ``log_pi`` is the log-probability
of the action under the current policy. Fields that are not needed are ``()``."""

AdversarialInfo = namedtuple('AdversarialInfo', ['own', 'demonstrated'], default_value=())
"""``Transitions`` of the policy, and as many of demonstrations."""

AdversarialLossInfo = namedtuple('AdversarialLossInfo', ['loss', 'accuracy_own', 'accuracy_demonstrated', 'penalty'],
                                 default_value=())
"""Values for summaries: the loss of the discriminator, its accuracy on steps of each kind, and its gradient
penalty."""


class AdversarialRewardAlgorithm(BatchRewards, RewardEstimationAlgorithm):
    """Base class of GAIL and AIRL: reads demonstrations, pairs steps with them and computes the loss of the
    discriminator.

    Args:
        observation_spec: nest of specs of the observation, transformed.
        action_spec: nest of specs of the action.
        demonstrations: datasets with demonstrations, as in ``TrainerConfig.offline_buffer_dir``.
        reward_form: reward as a function of the logit f: ``'positive'``: ``-log(1 - D)``, ``'negative'``: ``log D``,
            ``'difference'``: ``log D - log(1 - D) = f``.
        gradient_penalty: weight of ``(|df/dx| - 1)^2`` at random points x between demonstrated transitions and the
            policy's (Gulrajani et al. 2017, arXiv:1704.00028). Larger values keep the discriminator from becoming
            certain. No effect on discrete observations, which cannot be interpolated.
        name: name of this algorithm.
    """

    _declared_capabilities = {'trains_sequences_at_once': True}  # for the discriminator

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 demonstrations: str | Sequence[str] = (), reward_form: str = 'positive',
                 gradient_penalty: NonNegative = 0.0, name: str = 'AdversarialReward'):
        super().__init__(name=name)
        check_value(type(self).__name__, 'reward_form', reward_form, str, choices=sorted(_REWARDS))
        self._demonstrations = Demonstrations(demonstrations, type(self).__name__)
        self._encoder = SimpleActionEncoder(action_spec)
        self._reward_form, self._gradient_penalty = reward_form, gradient_penalty

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Reject on-policy training: steps are rewarded as they are read from a replay buffer.

        Raises:
            ValueError: ``is_on_policy`` is set.
        """
        if is_on_policy:
            raise ValueError(f'{self._name} rewards steps of a replay buffer: choose a policy algorithm that trains '
                             'from one, such as PPO or SAC')
        super().set_on_policy(is_on_policy)

    def prepare(self, root: Any) -> None:
        """Read the demonstrations."""
        for dataset in self._demonstrations.load(root):
            if not dataset.episodes.discount.all() and self._reward_form != 'difference':
                logger.warning('%s: episodes of %s terminate before the time limit; a reward that never '
                               'changes sign (%s.reward_form = %r) favors staying alive or terminating, regardless of '
                               'the demonstrations', self._name,
                               dataset.name, type(self).__name__, self._reward_form)

    # Discriminator ---------------------------------------------------------------------------------------------

    def _logit(self, steps: Any) -> Tensor:
        """Compute f ``[N]``, with gradient to D, of ``Transitions`` ``[N, ...]`` with encoded actions."""
        raise NotImplementedError(f'{type(self).__name__}._logit')

    def _reward(self, logit: Tensor) -> Tensor:
        return _REWARDS[self._reward_form](logit)

    def _transitions(self, root: Any, steps: TimeStep) -> Any:
        """Return the ``Transitions`` ``[N, T - 1, ...]`` within sequences ``steps`` ``[N, T, ...]``."""
        now, following = (nest.map_structure(lambda x, part=part: x[:, part], steps) for part in (
            slice(None, -1), slice(1, None)))
        action = self._encoder(nest.map_structure(lambda x: x.flatten(0, 1), following.prev_action))
        is_valid = now.step_type != StepType.LAST
        return Transitions(observation=now.observation, action=action.unflatten(0, is_valid.shape),
                           is_valid=is_valid.to(torch.float32))

    @torch.no_grad()
    def reward_batch(self, root: Any, inputs: TimeStep, stored: Any = ()) -> AlgStep:
        """Compute the rewards ``[B, T]`` for arriving at the steps of sequences ``[B, T, ...]``.

        The reward is 0 at the first step of a sequence and where an episode begins. ``info`` is
        :class:`AdversarialInfo` ``[B, T, ...]``, with newly drawn demonstrations at each call.
        """
        shape = batch, length = inputs.step_type.shape
        own = self._transitions(root, inputs)
        logit = self._logit(nest.map_structure(lambda x: x.flatten(0, 1), own)).unflatten(0, (batch, length - 1))
        reward = self._reward(logit) * own.is_valid
        # no transition starts at the last step
        own = nest.map_structure(lambda x: torch.cat((x, torch.zeros_like(x[:, :1])), 1), own)
        pairs = self._demonstrations.draw(batch * length, 2).time_step
        demonstrated = nest.map_structure(lambda x: x[:, 0].unflatten(0, shape), self._transitions(root, pairs))
        return AlgStep(torch.cat((torch.zeros_like(reward[:, :1]), reward), 1), (), AdversarialInfo(own, demonstrated))

    # Training --------------------------------------------------------------------------------------------------

    def rollout_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Return no reward: the discriminator computes rewards at training time."""
        return AlgStep((), state, ())

    def train_step(self, time_step: TimeStep, state: NestedTensor = (), rollout_info: Any = None) -> AlgStep:
        """Compute the discriminator loss ``[B]`` for a transition of each kind; 0 where one of the two is invalid.

        Args:
            time_step: not used.
            state: ``()``.
            rollout_info: :class:`AdversarialInfo` ``[B, ...]``.
        """
        own, demonstrated = rollout_info
        f_own, f_demonstrated = self._logit(own), self._logit(demonstrated)
        # equal numbers of both kinds: otherwise f is off by the log of their ratio
        is_pair = own.is_valid * demonstrated.is_valid
        loss = (F.softplus(f_own) + F.softplus(-f_demonstrated)) * is_pair
        right = ((f_own < 0) * is_pair, (f_demonstrated > 0) * is_pair)
        penalty: Any = ()
        if self._gradient_penalty:
            penalty = self._penalty(own, demonstrated) * is_pair
            loss = loss + self._gradient_penalty * penalty
        return AlgStep((), state, AdversarialLossInfo(loss, *(x.detach() for x in right), penalty))

    def _penalty(self, own: Any, demonstrated: Any) -> Tensor:
        """Compute ``(|df/dx| - 1)^2`` ``[B]`` at a random point between two transitions."""
        share = torch.rand_like(own.is_valid)

        def between(x: Tensor, y: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            return torch.lerp(x, y, share.reshape(-1, *[1] * (x.ndim - 1))).detach().requires_grad_()

        with torch.enable_grad():
            point = nest.map_structure(between, own, demonstrated)
            leaves = [x for x in nest.flatten((point.observation, point.action)) if x.requires_grad]
            gradients = torch.autograd.grad(self._logit(point).sum(), leaves, create_graph=True, materialize_grads=True)
            norm = torch.cat([g.flatten(1) for g in gradients], 1).norm(dim=1)
        return (norm - 1.0).square()

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the losses ``[T, B]``."""
        return LossInfo(loss=info.loss, extra=info)


_REWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    'positive': F.softplus, 'negative': lambda logit: -F.softplus(-logit), 'difference': lambda logit: logit}


@configurable
class GailAlgorithm(AdversarialRewardAlgorithm):
    """Generative adversarial imitation learning (GAIL): a discriminator of observations and actions.

    Args:
        discriminator_network_cls: called as ``(input_tensor_spec=(observation_spec, action_spec))`` with the spec of
            encoded actions, a vector; creates f, a feed-forward network with a scalar output.
        optimizer: optimizes the discriminator; ``None``: the optimizer of the agent.
        kwargs: arguments of :class:`AdversarialRewardAlgorithm`.

    Raises:
        ConfError: there are no demonstrations, or a number is out of range.
    """

    @takes_arguments_of(AdversarialRewardAlgorithm, defaults={'name': 'GailAlgorithm'},
                        after={'discriminator_network_cls': 'demonstrations'})
    def __init__(self, observation_spec: NestedTensorSpec,
                 discriminator_network_cls: Callable[..., Any] = CriticNetwork, optimizer: Any = None, **kwargs: Any):
        super().__init__(observation_spec=observation_spec, **kwargs)
        self._discriminator = _scalar_network(self, 'discriminator_network_cls', discriminator_network_cls, (
            observation_spec, self._encoder.output_spec))
        self._add_given_optimizers((optimizer, self._discriminator))

    def _logit(self, steps: Any) -> Tensor:
        return self._discriminator((steps.observation, steps.action))[0]

    def compute_reward(self, obs: NestedTensor, action: NestedTensor, state: NestedTensor) -> tuple[Tensor, Any]:
        """Return the reward ``[N]`` of ``action`` at the observation ``state``, and the observation ``obs`` after
        it."""
        return self._reward(self._logit(Transitions(observation=state, action=self._encoder(action)))), obs


@configurable
class AirlAlgorithm(AdversarialRewardAlgorithm):
    """Adversarial inverse reinforcement learning (AIRL): a discriminator that contains a reward function.

    Args:
        reward_network_cls: creates g; called as ``(input_tensor_spec=(observation_spec, action_spec))`` with the spec
            of encoded actions, or, with ``depends_on_action = False``, as ``(input_tensor_spec=observation_spec)``.
        potential_network_cls: creates h; called as ``(input_tensor_spec=observation_spec)``.
        gamma: discount of the potential of the next observation.
        depends_on_action: pass the action to g. A reward that does not depend on the action may transfer to other
            dynamics (section 6 of the paper).
        optimizer: optimizes the discriminator; ``None``: the optimizer of the agent.
        kwargs: arguments of :class:`AdversarialRewardAlgorithm`; ``reward_form`` is ``'difference'`` unless given.

    Raises:
        ConfError: there are no demonstrations, a number is out of range, or the policy is recurrent.
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

    def prepare(self, root: Any) -> None:
        """Read the demonstrations.

        Raises:
            ConfError: the policy is recurrent.
        """
        if nest.flatten(root.policy_algorithm.predict_state_spec):
            raise ConfError([problem_at('Agent', 'intrinsic_reward_module', f'= @{type(self).__name__}, which needs '
                                        "the policy's probability of demonstrated actions, but the policy is recurrent",
                                        'choose feed-forward networks, or @GailAlgorithm')])
        super().prepare(root)

    def _transitions(self, root: Any, steps: TimeStep) -> Any:
        """Return the transitions with the log-probability of their actions under the current policy."""
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
        """Compute ``g(s, a) + gamma h(s') - h(s)`` ``[N]``."""
        inputs = (steps.observation, steps.action) if self._depends_on_action else steps.observation
        following = self._gamma * steps.discount * self._potential(steps.next_observation)[0]
        return self._reward_network(inputs)[0] + following - self._potential(steps.observation)[0]

    def _logit(self, steps: Any) -> Tensor:
        return self._shaped_reward(steps) - steps.log_pi

    def compute_reward(self, obs: NestedTensor, action: NestedTensor, state: NestedTensor) -> tuple[Tensor, Any]:
        """Return g ``[N]`` of ``action`` at the observation ``state``, and the observation ``obs`` after it."""
        inputs = (state, self._encoder(action)) if self._depends_on_action else state
        return self._reward_network(inputs)[0], obs


def _scalar_network(owner: Any, argument: str, ctor: Callable[..., Any], input_tensor_spec: NestedTensorSpec) -> Any:
    """Create a feed-forward network with a scalar output.

    Raises:
        ConfError: the network is recurrent or its output is not scalar.
    """
    network = ctor(input_tensor_spec=input_tensor_spec)
    shape = getattr(network.output_spec, 'shape', network.output_spec)
    if network.is_rnn or tuple(shape) != ():
        raise ConfError([problem_at(type(owner).__name__, argument, 'expected a feed-forward network with a scalar '
                                    f'output, found {type(network).__name__} with output {shape}', 'leave it out')])
    return network
