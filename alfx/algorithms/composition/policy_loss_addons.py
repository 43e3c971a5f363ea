"""Additional terms of a policy loss for any algorithm: attraction to and repulsion from other policies.

A term is ``weight * D(policy || other)`` with the Kullback-Leibler divergence D and another, fixed policy. It keeps a
policy near a previously trained one (as in Schmitt et al. 2018, arXiv:1803.03835, "kickstarting") or drives it away
from one (as in Hong et al. 2018, arXiv:1802.04564, diversity-driven exploration). Terms are attached by
``Agent.policy_loss_addons`` and use the ``action_distribution`` that the policy algorithm reports in training; for a
deterministic policy this is its action.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor, nn

from alfx import context, nest, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple, valid_masks
from alfx.gin_utils import Count, Positive, check_value, configurable, takes_arguments_of
from alfx.networks.action_specs import action_range
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.utils import dist_utils
from alfx.utils.schedulers import as_scheduler

PolicyLossAddOnInfo = namedtuple('PolicyLossAddOnInfo', ['step_type', 'term'], default_value=())
"""``step_type`` and the unweighted loss ``term``, ``[B]`` each."""


class PolicyLossAddOn(Algorithm):
    """Base class of additional terms; a subclass defines :meth:`term`.

    Args:
        observation_spec: nest of specs of the observation, as the policy algorithm sees it.
        action_spec: nest of ``BoundedTensorSpec``.
        weight: factor of the term, a number or a schedule.
        debug_summaries: write the weight and the mean of the term.
        name: name of this term in summaries.

    Raises:
        ConfError: ``weight`` is negative.
    """

    updates_are_traceable = False

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 weight: float | Callable[[], float] = 1.0, debug_summaries: bool = False,
                 name: str = 'PolicyLossAddOn'):
        check_value(type(self).__name__, 'weight', weight, (float, callable), minimum=0)
        super().__init__(debug_summaries=debug_summaries, name=name)
        self._weight = as_scheduler(weight)

    def term(self, observation: NestedTensor, action_distribution: NestedTensor) -> Tensor:
        """Compute the loss ``[B]`` to add, before weighting.

        Args:
            observation: nest of ``[B, ...]``.
            action_distribution: nest of distributions of batch shape ``[B]``, or of the actions ``[B, ...]`` of a
                deterministic policy, with gradient to the policy.
        """
        raise NotImplementedError(f'{type(self).__name__}.term')

    def train_step(self, inputs: tuple[TimeStep, Any], state: Any = (), rollout_info: Any = ()) -> AlgStep:
        """Compute a ``PolicyLossAddOnInfo`` as ``info``, for ``inputs = (time_step, action_distribution)``."""
        time_step, distribution = inputs
        return AlgStep(info=PolicyLossAddOnInfo(time_step.step_type, self.term(time_step.observation, distribution)))

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the weighted term, ``[T, B]``."""
        weight = self._weight()
        if self._debug_summaries and context.should_record_summaries():
            masks = valid_masks(info.step_type)
            with summary.scope(self._name):
                summary.scalar('weight', weight)
                summary.scalar('term', (info.term.detach() * masks).sum() / masks.sum().clamp(min=1))
        return LossInfo(loss=weight * info.term, extra=info.term.detach())


class DivergenceFromPolicy(PolicyLossAddOn):
    """Base class of attraction and repulsion: divergence from another, fixed policy.

    Args:
        observation_spec: nest of specs of the observation, as the policy algorithm sees it.
        action_spec: nest of ``BoundedTensorSpec``.
        actor_network_ctor: called as ``(input_tensor_spec=, action_spec=)``; creates the network of the other policy,
            which outputs distributions or deterministic actions.
        checkpoint_path: checkpoint file from which the other policy is loaded; ``None``: it keeps its initial
            parameters. It is loaded at the start of the run; the checkpoints of the run contain it as well.
        checkpoint_prefix: path of the network in that checkpoint.
        weight: factor of the term, a number or a schedule.
        deterministic_stddev: a deterministic action is treated as a normal distribution with this standard deviation,
            in units of half the range of the action.
        num_samples: number of samples that estimate a divergence without closed form.
        debug_summaries: write the weight and the mean of the term.
        name: name of this term in summaries.

    Raises:
        ConfError: a number is out of range; at the start of the run, also if the checkpoint cannot be read or has no
            such part.
        ValueError: the other policy is recurrent.
    """

    _not_trained = ('_other_network', )

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 actor_network_ctor: Callable[..., Any] = ActorDistributionNetwork,
                 checkpoint_path: str | None = None, checkpoint_prefix: str = 'alg._rl_algorithm._actor_network',
                 weight: float | Callable[[], float] = 1.0, deterministic_stddev: Positive = 1.0,
                 num_samples: Count = 1, debug_summaries: bool = False, name: str = 'DivergenceFromPolicy'):
        owner = type(self).__name__
        super().__init__(observation_spec, action_spec, weight, debug_summaries, name)
        network = actor_network_ctor(input_tensor_spec=observation_spec, action_spec=action_spec)
        if nest.flatten(network.state_spec):
            raise ValueError(f'{owner}: the other policy, {network.name}, is recurrent; choose an '
                             'actor_network_ctor of a feed-forward network')
        self._source = None if checkpoint_path is None else (checkpoint_path, checkpoint_prefix, checkpoint_path)
        self._other_network = network.requires_grad_(False)
        # standard deviation of each element of a continuous action
        self._scales = [deterministic_stddev * action_range(spec, owner, 'distances are in units of half the range')[1]
                        if spec.is_continuous else None for spec in nest.flatten(action_spec)]
        self._num_samples = num_samples

    def _preload(self) -> None:
        if self._source is not None:
            self._load_part(self._other_network, 'checkpoint_path', *self._source)
        super()._preload()

    def divergence(self, observation: NestedTensor, action_distribution: NestedTensor) -> Tensor:
        """Compute ``D(policy || other)``, ``[B]``, summed over the actions of a nest.

        Raises:
            ValueError: the policies have different kinds of actions.
        """
        with torch.no_grad():
            other, _ = self._other_network(observation)
        policies, others = (nest.flatten(policy, nest.is_distribution) for policy in (action_distribution, other))
        if len(policies) != len(others) or len(policies) != len(self._scales):
            raise ValueError(f'{self._name}: expected a distribution for each of {len(self._scales)} actions, found '
                             f'{len(policies)} for the policy and {len(others)} for the other policy')
        terms = [self._of_action(*each) for each in zip(policies, others, self._scales)]
        return sum(terms[1:], start=terms[0])

    def _of_action(self, policy: Any, other: Any, scale: Tensor | None) -> Tensor:
        if isinstance(policy, td.Distribution):
            if not isinstance(other, td.Distribution):
                raise ValueError(f'{self._name}: the policy is stochastic, the other one deterministic; choose an '
                                 'actor_network_ctor that outputs distributions, such as ActorDistributionNetwork')
            return kl_divergence(policy, other, self._num_samples)
        if scale is None:
            raise ValueError(f'{self._name}: the distance of deterministic actions requires continuous actions')
        target = dist_utils.get_mode(other) if isinstance(other, td.Distribution) else other
        difference = (policy - target) / scale.to(policy.device)
        return 0.5 * difference.square().reshape(difference.shape[0], -1).sum(-1)


def kl_divergence(policy: td.Distribution, other: td.Distribution, num_samples: int = 1) -> Tensor:
    """Compute ``KL(policy || other)`` in closed form, or estimate it from samples of ``policy``.

    A shared transformation of both distributions does not change their divergence.

    Args:
        policy: batch shape ``[B]`` or ``[B, ...]``.
        other: the same.
        num_samples: number of samples of an estimate.

    Returns:
        ``[B]``, summed over further batch dimensions.

    Raises:
        NotImplementedError: there is no closed form, and ``policy`` cannot be sampled with reparameterization.
    """
    try:
        divergence = td.kl_divergence(policy, other)
    except NotImplementedError:
        if not policy.has_rsample:
            raise NotImplementedError(
                f'the divergence of {type(policy).__name__} from {type(other).__name__} has no closed form, and '
                f'{type(policy).__name__} cannot be sampled with reparameterization') from None
        draws = [policy.rsample() for _ in range(num_samples)]
        divergence = torch.stack([policy.log_prob(x) - other.log_prob(x) for x in draws]).mean(0)
    return divergence.reshape(divergence.shape[0], -1).sum(-1)


@configurable
class AttractionToPolicy(DivergenceFromPolicy):
    """Adds ``weight * D(policy || other)`` to the loss, which keeps the policy near another one.

    The arguments are those of :class:`DivergenceFromPolicy`.
    """

    def term(self, observation: NestedTensor, action_distribution: NestedTensor) -> Tensor:
        """Compute the divergence ``[B]``."""
        return self.divergence(observation, action_distribution)


@configurable
class RepulsionFromPolicy(DivergenceFromPolicy):
    """Adds ``-weight * min(D(policy || other), max_divergence)`` to the loss, which drives the policy away from another
    one.

    Args:
        max_divergence: divergence above which the term has no gradient; ``None``: no limit.
        kwargs: arguments of :class:`DivergenceFromPolicy`.

    Raises:
        ConfError: a number is out of range.
    """

    @takes_arguments_of(DivergenceFromPolicy, defaults={'name': 'RepulsionFromPolicy'},
                        after={'max_divergence': 'name'})
    def __init__(self, max_divergence: Positive | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self._max_divergence = max_divergence

    def term(self, observation: NestedTensor, action_distribution: NestedTensor) -> Tensor:
        """Compute minus the divergence ``[B]``."""
        divergence = self.divergence(observation, action_distribution)
        return -divergence if self._max_divergence is None else -divergence.clamp(max=self._max_divergence)


class PolicyLossAddOns(Algorithm):
    """Part of an agent that combines several terms. Its info is a tuple and its ``extra`` a dict, in their order.

    Args:
        addons: the terms.
        name: name of this algorithm.
    """

    updates_are_traceable = False

    def __init__(self, addons: Sequence[PolicyLossAddOn], name: str = 'PolicyLossAddOns'):
        super().__init__(name=name)
        self._addons = nn.ModuleList(addons)
        self._addons_in_order = list(addons)

    def rollout_step(self, inputs: tuple[TimeStep, Any], state: Any = ()) -> AlgStep:
        """Call :meth:`train_step`; used if training is on-policy."""
        return self.train_step(inputs)

    def train_step(self, inputs: tuple[TimeStep, Any], state: Any = (), rollout_info: Any = ()) -> AlgStep:
        """Compute the infos of all terms.

        Args:
            inputs: the time step and the ``action_distribution`` that the policy algorithm reports, ``()`` in an update
                that does not train the policy.
            state: not used.
            rollout_info: not used.

        Returns:
            ``info`` is a tuple of a ``PolicyLossAddOnInfo`` for each term, empty without a distribution.

        Raises:
            ValueError: the policy algorithm does not report its distribution.
        """
        distribution = inputs[1]
        if distribution is None:
            raise ValueError(f"{self._name}: policy_loss_addons require a policy algorithm whose info has an "
                             "'action_distribution'; remove them, or choose another rl_algorithm_cls")
        if isinstance(distribution, tuple) and distribution == ():
            return AlgStep()
        return AlgStep(info=tuple(addon.train_step(inputs).info for addon in self._addons_in_order))

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the sum of the weighted terms ``[T, B]``, with the unweighted terms in ``extra``."""
        if not info:
            return LossInfo()
        losses = [addon.calc_loss(i) for addon, i in zip(self._addons_in_order, info)]
        extra = {f'{i}_{addon.name}': loss.extra for i, (addon, loss) in enumerate(zip(self._addons_in_order, losses))}
        return LossInfo(loss=sum(loss.loss for loss in losses), extra=extra)
