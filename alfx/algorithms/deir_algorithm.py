"""DEIR (Wan et al. 2023, arXiv:2304.10770): a bonus for observations that differ from all others of the episode.

Let z[t] be the feature of an observation, and h[t] the trajectory that led to it: the state of a recurrent network
after the features of the steps before t (0 at FIRST). The reward for arriving at t is

    r[t] = min_{i < t} |z[t] - z[i]|^2 / (|h[t] - h[i]| + 1e-6)

with i from the first step of the episode on. If the same trajectory leads to different observations, they differ by
chance, and the difference counts more; if distant trajectories explain the difference, it counts less.

Both networks belong to a discriminator, which learns to tell the true next observation from another observation:

    minimize  1/2 (-log D(h[t + 1], a[t], z[t + 1]) - log(1 - D(h[t + 1], a[t], z')))

z' is the feature of another observation: two are drawn from a queue of rewarding observations, and one that differs
from the true observation is used. The features therefore keep what a trajectory and an action determine. Differs from
the paper:

* The discriminator is trained on the minibatches of the policy algorithm, as often as the policy, and not in separate
  epochs. The other observation of a step is drawn once, when the step is collected.
* Gradients pass through one step of the recurrent network, which starts from the state of the rollout.
* There is no batch norm, unless ``encoding_net`` has it.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alfx import context, nest
from alfx.algorithms.exploration.memory import EpisodicMemory, longer_than_memory, places_of
from alfx.algorithms.exploration.normalization import Moments, RewardNormalization
from alfx.algorithms.intrinsic.intrinsic_reward import (IntrinsicRewardAlgorithm, NetworkOrConstructor, all_fixed,
                                                        hidden_sizes, is_first, make_network, next_row,
                                                        output_tensor_spec, rows)
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.gin_utils import ConfError, Count, Fraction, configurable, problem_at
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.math_ops import identity

DeirState = namedtuple('DeirState', ['length', 'memory', 'before', 'trajectory', 'normalization'], default_value=())
"""State of each environment between unrolls: steps of the episode so far, int64 ``[B]``; z and h of these steps, ``[B,
capacity, F + H]``; h of the latest step and of the next one, ``[B, H]``; the state of the normalization."""

DeirPair = namedtuple('DeirPair', ['both', 'action', 'other', 'trajectory', 'exists'], default_value=())
"""A step and the next one, ``[B, ...]`` each.

``both``: nest ``[B, 2, ...]`` of their observations; ``action``: the encoded action in between; ``other``: nest of
observations from the queue; ``trajectory``: h of the step; ``exists``, bool: the steps belong to the same episode, and
there is another observation.
"""

DeirInfo = namedtuple('DeirInfo', ['loss', 'accuracy', 'exists'], default_value=())
"""Info of the steps, ``[B]`` each: loss and accuracy of the discriminator, and ``DeirPair.exists``."""

DeirLossInfo = namedtuple('DeirLossInfo', ['loss', 'accuracy'], default_value=())
"""Values for summaries, ``[T, B]`` each."""

_EPSILON = 1e-6
_BLOCK = 64


@configurable
class DeirAlgorithm(IntrinsicRewardAlgorithm):
    """Intrinsic reward for observations that differ from the others of the episode, given how they were reached.

    It works with policy algorithms that train on whole unrolls, such as PPO.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of the action.
        encoding_net: computes z: a feed-forward network, or a constructor, called as ``(input_tensor_spec=)``. Its
            output is flattened.
        trajectory_size: H, size of the recurrent network.
        hidden_size: sizes of the hidden layers of the discriminator, or the size of a single layer.
        queue_capacity: number of observations in the queue, which is part of checkpoints; a longer queue remembers the
            start of the run for longer.
        capacity: number of steps of an episode that are remembered; in a longer episode the oldest steps are forgotten.
        normalization: rule of :class:`~alfx.algorithms.exploration.normalization.RewardNormalization`.
        return_discount: discount of the sum of rewards with ``normalization = 'return_std'``.
        clip_value: if positive, clip normalized rewards to plus and minus this value.
        optimizer: trains all networks of this module; ``None``: the agent's optimizer does.
        name: name of this algorithm.

    Raises:
        ConfError: an argument is invalid, or the policy algorithm samples stored steps.
        SpecError: the output of ``encoding_net`` is not one tensor of floats.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 encoding_net: NetworkOrConstructor, trajectory_size: Count = 64,
                 hidden_size: Count | Sequence[Count] = 64, queue_capacity: Count = 10000, capacity: Count = 1000,
                 normalization: str = 'standard', return_discount: Fraction = 0.99, clip_value: float = -1.0,
                 optimizer: Any = None, name: str = 'DeirAlgorithm'):
        super().__init__(observation_spec, None, None, None, False, optimizer=optimizer, name=name)
        owner = type(self).__name__
        where = owner, 'encoding_net'
        self._encoding_net = make_network(encoding_net, observation_spec, where)
        self._num_features = output_tensor_spec(self._encoding_net, where).numel
        self._action_encoder = SimpleActionEncoder(action_spec)
        self._recurrent_net = torch.nn.GRUCell(self._num_features, trajectory_size)
        size = trajectory_size + self._action_encoder.output_spec.numel + self._num_features
        self._discriminator = EncodingNetwork(TensorSpec((size, )), fc_layer_params=hidden_sizes(hidden_size),
                                              last_layer_size=1, last_activation=identity, name='discriminator')
        self._memory = EpisodicMemory(capacity, TensorSpec((self._num_features + trajectory_size, )))
        self._normalization = RewardNormalization(normalization, return_discount, clip_value, owner)
        self._moments = Moments()
        self._queue = _ObservationQueue(observation_spec, queue_capacity)
        trajectory = TensorSpec((trajectory_size, ))
        self._unroll_state_spec = DeirState(TensorSpec((), torch.int64), self._memory.state_spec, trajectory,
                                            trajectory, self._normalization.state_spec)
        self._warns = True

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are traceable unless a layer draws random numbers or keeps statistics."""
        return super().own_capabilities()._replace(traceable_update=all_fixed([self._encoding_net]),
                                                   trains_sequences_at_once=True)

    def check_use(self, rl_algorithm: Any, config: Any) -> None:
        """Reject algorithms that train on sampled steps, whose trajectories are not known; see the base class."""
        if rl_algorithm.on_policy is False and config is not None and not config.trains_on_whole_unrolls:
            raise ConfError([problem_at('Agent', 'intrinsic_reward_module', f'= {type(self).__name__}, but '
                                        f'{type(rl_algorithm).__name__} trains on sampled steps, and the module needs '
                                        'whole trajectories', 'use PPO, or another bonus such as e3b.gin')])

    # Rewards ---------------------------------------------------------------------------------------------------

    @property
    def unroll_state_spec(self) -> NestedTensorSpec:
        """Spec of ``DeirState``."""
        return self._unroll_state_spec

    @torch.no_grad()
    def reward_steps(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Reward steps ``[T, B]`` after ``state``, a ``DeirState``, and add rewarding observations to the queue.

        Returns:
            See the base class; ``info``: h of the steps, ``[T, B, H]``.

        Raises:
            NonFiniteLossError: a reward is NaN or infinite.
        """
        feature = self._features(nest.map_structure(rows, inputs.observation)).reshape(*inputs.step_type.shape, -1)
        trajectory, trajectories = state.trajectory, []
        for z, first in zip(feature, is_first(inputs.step_type)):
            trajectories.append(trajectory.masked_fill(first.unsqueeze(-1), 0))
            trajectory = self._recurrent_net(z, trajectories[-1])
        items, ratios, follows = torch.cat((feature, torch.stack(trajectories)), -1), [], []
        length, memory = state.length, state.memory
        block = min(_BLOCK, self._memory.capacity)
        for step_type, part in zip(inputs.step_type.split(block), items.split(block)):
            places = places_of(step_type, length)
            others, are_earlier = self._memory.earlier(part, memory, places)
            ratios.append(self._ratio(part, others, are_earlier))
            follows.append(places.follows)
            memory, length = self._memory.add(part, memory, places), places.next_length
        ratio, is_rewarded = torch.cat(ratios), torch.cat(follows)
        if not ratio.isfinite().all():
            raise NonFiniteLossError(f'{self.path or self.name}: the ratio of distances is NaN or infinite')
        self._moments.update(ratio[is_rewarded])
        chosen = is_rewarded & (ratio > self._moments.mean)
        chosen = context.cat_over_ranks(chosen.flatten().int()).bool()
        self._queue.add(nest.map_structure(lambda x: context.cat_over_ranks(rows(x))[chosen], inputs.observation))
        reward, normalization_state = self._normalization(ratio, is_rewarded, state.normalization)
        self._warns = self._warns and not longer_than_memory(length, self._memory.capacity, self.path or self.name)
        return AlgStep(reward, DeirState(length, memory, trajectories[-1], trajectory, normalization_state),
                       torch.stack(trajectories))

    def _ratio(self, items: Tensor, others: Tensor, are_earlier: Tensor) -> Tensor:
        """Return the rewards ``[T, B]`` of steps before normalization, 0 without an earlier step.

        Args:
            items: z and h of the steps, ``[T, B, F + H]``.
            others: z and h of the steps to compare with, ``[B, N, F + H]``.
            are_earlier: bool ``[B, T, N]``.
        """
        sizes = [self._num_features, items.shape[-1] - self._num_features]
        # double, because matrix products in float32 are too imprecise for small distances, which matter most
        of_features, of_trajectories = (torch.cdist(x, y, compute_mode='use_mm_for_euclid_dist') for x, y in zip(
            items.transpose(0, 1).double().split(sizes, -1), others.double().split(sizes, -1)))
        ratio = (of_features.square() / (of_trajectories + _EPSILON)).masked_fill(~are_earlier, torch.inf).amin(-1)
        return ratio.masked_fill(~are_earlier.any(-1), 0).T.float()

    def reward_rows(self, inputs: TimeStep, state: NestedTensor | None, overlaps: bool) -> AlgStep:
        """Reward an unroll; ``info``: ``DeirPair`` ``[T, B, ...]`` of each step and the next; see the base class."""
        if state is None:
            step = self.reward_steps(inputs, self.get_initial_unroll_state(inputs.step_type.shape[1]))
            return AlgStep(step.output, step.state, self._pairs(inputs, step.info))
        before: Any = state
        step = self.reward_steps(nest.map_structure(lambda x: x[1:], inputs), state)
        reward, trajectory = (torch.cat((first.unsqueeze(0), x)) for first, x in (
            (torch.zeros_like(step.output[0]), step.output), (before.before, step.info)))
        return AlgStep(reward, step.state, self._pairs(inputs, trajectory))

    def _pairs(self, inputs: TimeStep, trajectory: Tensor) -> NestedTensor:
        """Return the ``DeirPair`` ``[T, B, ...]`` of each step and the next one; ``trajectory``: h ``[T, B, H]``."""
        following = nest.map_structure(next_row, inputs.observation)
        other, is_other = self._queue.draw(following)
        exists = is_other & ~is_first(next_row(inputs.step_type))
        exists[-1] = False
        return DeirPair(nest.map_structure(lambda x, y: torch.stack((x, y), 2), inputs.observation, following),
                        next_row(self._action_encoder(inputs.prev_action)), other, trajectory, exists)

    # Training --------------------------------------------------------------------------------------------------

    def train_step(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: Any = ()) -> AlgStep:
        """Compute the loss of the discriminator, ``DeirInfo`` ``[B]``.

        Args:
            inputs: not used.
            state: ``()``.
            rollout_info: ``DeirPair`` of :meth:`reward_rows`.
        """
        both, action, other, trajectory, exists = rollout_info
        feature = self._features(nest.map_structure(lambda x, y: torch.cat((rows(x), y)), both, other))
        before, after = feature[:2 * len(action)].reshape(len(action), 2, -1).unbind(1)
        known = torch.cat((self._recurrent_net(before, trajectory), action), -1)
        is_true, is_false = (self._discriminator(torch.cat((known, z), -1))[0].squeeze(-1)
                             for z in (after, feature[2 * len(action):]))
        loss = 0.5 * (F.softplus(-is_true) + F.softplus(is_false))
        accuracy = 0.5 * ((is_true > 0).float() + (is_false < 0).float())
        return AlgStep(info=DeirInfo(loss, accuracy, exists))

    def train_sequence(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: Any = ()) -> AlgStep:
        """Run ``train_step`` on all steps ``[T, B, ...]`` of sequences at once."""
        info = self.train_step(inputs, (), nest.map_structure(rows, rollout_info)).info
        return AlgStep(info=nest.map_structure(lambda x: x.reshape(inputs.step_type.shape), info))

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the losses ``[T, B]`` of the discriminator; ``info``: ``DeirInfo`` ``[T, B]``."""
        loss = info.loss * info.exists
        return LossInfo(loss=loss, extra=DeirLossInfo(loss.detach(), info.accuracy * info.exists))

    def _features(self, observation: NestedTensor) -> Tensor:
        """Compute z ``[B, F]`` of observations ``[B, ...]``."""
        return self._encoding_net(observation)[0].flatten(1)


class _ObservationQueue(torch.nn.Module):
    """Queue of the latest observations that were added.

    Args:
        observation_spec: nest of their specs.
        capacity: number of observations; when it is reached, the oldest are replaced.
    """

    _num_added: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, capacity: int):
        super().__init__()
        self._capacity, self._names = capacity, []
        for i, spec in enumerate(nest.flatten(observation_spec)):
            self._names.append(f'_field{i}')
            self.register_buffer(self._names[-1], torch.zeros(capacity, *spec.shape, dtype=spec.dtype))
        self.register_buffer('_num_added', torch.zeros((), dtype=torch.int64))

    def add(self, observation: NestedTensor) -> None:
        """Add observations ``[N, ...]``."""
        leaves = nest.flatten(observation)
        number = len(leaves[0])
        kept = min(number, self._capacity)
        slot = (self._num_added + torch.arange(number - kept, number, device=leaves[0].device)) % self._capacity
        for name, x in zip(self._names, leaves):
            getattr(self, name)[slot] = x[number - kept:]
        self._num_added += number

    def draw(self, observation: NestedTensor) -> tuple[NestedTensor, Tensor]:
        """Draw two observations for each of ``observation [T, B, ...]``, and use the second if the first is equal.

        Returns:
            Nest ``[T, B, ...]``, and bool ``[T, B]``: it differs from ``observation``.
        """
        leaves, structure = nest.flatten_with_structure(observation)
        shape = leaves[0].shape[:2]
        size = self._num_added.clamp(max=self._capacity)
        index = (torch.rand(2, *shape, device=size.device) * size).long()
        drawn = [getattr(self, name)[index] for name in self._names]
        equal = torch.stack([(x == y).flatten(3).all(-1) if y.ndim > 2 else x == y
                             for x, y in zip(drawn, leaves)]).all(0)  # [2, T, B]
        chosen = [torch.where(equal[0].reshape(*shape, *[1] * (x.ndim - 3)), x[1], x[0]) for x in drawn]
        return nest.unflatten(structure, chosen), (size > 0) & ~equal.all(0)
