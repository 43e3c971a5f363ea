"""Base classes of intrinsic reward modules, which reward an agent for exploration.

Such a module computes a reward ``[B]`` for arriving at a step, in ``rollout_step``. Its losses train it on the steps
that it has rewarded, so that the reward decays. This module contains the statistics that normalize observations and
rewards, which are updated only in ``rollout_step``, where each step is seen once; and losses that include the last
steps of episodes. Read next: :mod:`alfx.algorithms.rnd_algorithm`.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Positive, problem_at
from alfx.networks.network import Network, wrap_as_network
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.normalizers import AdaptiveNormalizer, ScalarAdaptiveNormalizer

IntrinsicMeasures = namedtuple('IntrinsicMeasures', ['reward', 'error'], default_value=())
"""Info of ``predict_step``, ``[B]`` each: the reward, and the error that it is computed from; NaN where there is
none."""


class IntrinsicRewardAlgorithm(Algorithm):
    """Base class of modules whose reward is a normalized error.

    Args:
        observation_spec: nest of specs of the observation; ``None``: not known.
        observation_adapt_speed: normalize observations with this adaptation speed, see
            :class:`~alfx.utils.normalizers.AdaptiveNormalizer`; ``None``: no normalization.
        observation_clip_value: clip normalized observations to plus and minus this value; ``None``: no clipping.
        reward_adapt_speed: normalize rewards with this adaptation speed; ``None``: no normalization.
        reward_zero_mean: subtract the mean when rewards are normalized.
        reward_clip_value: if positive, clip normalized rewards to plus and minus this value.
        train_state_spec: spec of the state of a step.
        optimizer: default optimizer of this module.
        name: name of this algorithm.

    Raises:
        ConfError: ``observation_spec`` is missing although observations are normalized.
    """

    updates_are_traceable = False
    rewards_batches = False  # has BatchRewards.reward_batch

    def __init__(self, observation_spec: NestedTensorSpec | None, observation_adapt_speed: Positive | None,
                 observation_clip_value: Positive | None, reward_adapt_speed: Positive | None, reward_zero_mean: bool,
                 reward_clip_value: float = -1.0, train_state_spec: NestedTensorSpec = (), optimizer: Any = None,
                 name: str = 'IntrinsicRewardAlgorithm'):
        super().__init__(train_state_spec=train_state_spec, optimizer=optimizer, name=name)
        owner = type(self).__name__
        if observation_adapt_speed is not None and observation_spec is None:
            raise ConfError([problem_at(owner, 'observation_adapt_speed', f'= {observation_adapt_speed}: there is no '
                                        'observation_spec, so observations cannot be normalized',
                                        'set observation_spec, or remove observation_adapt_speed')])
        self._observation_normalizer = None if observation_adapt_speed is None else AdaptiveNormalizer(
            observation_spec, speed=observation_adapt_speed, name=f'{name}/observation')
        self._observation_clip_value = observation_clip_value or -1.0
        self._reward_normalizer = None if reward_adapt_speed is None else ScalarAdaptiveNormalizer(
            speed=reward_adapt_speed, zero_mean=reward_zero_mean, unit_std=True, name=f'{name}/reward')
        self._reward_clip_value = reward_clip_value

    @property
    def _yields_info(self) -> bool:
        """Return whether ``rollout_step`` has to return the input of the loss, which only on-policy training reads."""
        return self.on_policy is not False

    @property
    def normalizes_reward(self) -> bool:
        """Return whether rewards are normalized."""
        return self._reward_normalizer is not None

    @property
    def rewards_unrolls_at_once(self) -> bool:
        """Return whether the class implements :meth:`reward_unroll`, or :meth:`reward_steps` with a state."""
        return (type(self).reward_unroll is not IntrinsicRewardAlgorithm.reward_unroll
                or bool(nest.flatten(self.unroll_state_spec)))

    def check_use(self, rl_algorithm: Any, config: Any) -> None:
        """Reject a policy algorithm or a configuration that this module cannot be used with.

        Args:
            rl_algorithm: the policy algorithm.
            config: ``TrainerConfig`` or ``None``.

        Raises:
            ConfError: one of the two is not supported.
        """

    def reward_unroll(self, inputs: TimeStep) -> AlgStep:
        """Compute ``rollout_step`` for all steps of an unroll at once.

        It is used by agents whose policy needs the rewards of an unroll only after it has been collected. The
        statistics are updated with the whole unroll before they are used.

        Args:
            inputs: time steps ``[T + 1, B, ...]``: the last one of the previous unroll, and T more.

        Returns:
            ``output``: the rewards ``[T + 1, B]``; 0 in the first row, which has been rewarded before. ``info``: nest
            ``[T + 1, B, ...]``, the ``rollout_info`` of ``train_step`` or ``train_sequence``; the last row is not
            trained on yet.
        """
        raise NotImplementedError(f'{type(self).__name__}.reward_unroll')

    def reward_steps(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Reward consecutive steps, each passed exactly once; a state connects the calls.

        It is used instead of :meth:`reward_unroll` and ``rollout_step`` for a module with an ``unroll_state_spec``.
        Apart from statistics, the rewards do not depend on how the steps of a run are divided into calls.

        Args:
            inputs: time steps ``[T, B, ...]`` that follow those of the previous call.
            state: result of the previous call ``[B, ...]``; zeros for the first one.

        Returns:
            ``output``: the rewards ``[T, B]`` for arriving at the steps; ``state``: nest ``[B, ...]``.
        """
        raise NotImplementedError(f'{type(self).__name__}.reward_steps')

    def pairs_of_unroll(self, inputs: TimeStep) -> NestedTensor:
        """Return what ``train_step`` needs to train on arriving at the next step, for each step of an unroll.

        Args:
            inputs: time steps ``[T + 1, B, ...]``.

        Returns:
            Nest ``[T + 1, B, ...]``, the ``rollout_info`` of ``train_step``; ``()`` if nothing is trained.
        """
        return ()

    def reward_rows(self, inputs: TimeStep, state: NestedTensor | None, overlaps: bool) -> AlgStep:
        """Reward an unroll, by :meth:`reward_steps` if there is a state and by :meth:`reward_unroll` otherwise.

        Args:
            inputs: time steps ``[T, B, ...]``.
            state: result of the previous call ``[B, ...]``; ``None`` if all rows are new.
            overlaps: the last row is the first row of the next unroll as well.

        Returns:
            ``output``: the rewards ``[T, B]``, 0 in a first row that has been rewarded before; ``state``: ``[B, ...]``;
            ``info``: nest ``[T, B, ...]``, the ``rollout_info`` of ``train_step``.
        """
        if not nest.flatten(self.unroll_state_spec):
            return self.reward_unroll(inputs)
        new = inputs
        if state is None:
            state = self.get_initial_unroll_state(inputs.step_type.shape[1])
        elif overlaps:
            new = nest.map_structure(lambda x: x[1:], inputs)
        step = self.reward_steps(new, state)
        reward = step.output if new is inputs else torch.cat((torch.zeros_like(step.output[:1]), step.output))
        return AlgStep(reward, step.state, self.pairs_of_unroll(inputs) if overlaps else ())

    def _update_statistics(self, observation: NestedTensor) -> None:
        """Update the statistics with observations ``[..., *spec.shape]``."""
        if self._observation_normalizer is not None:
            self._observation_normalizer.update(observation)

    def _normalized(self, observation: NestedTensor) -> NestedTensor:
        """Return observations ``[..., *spec.shape]``, normalized and clipped if enabled."""
        normalizer = self._observation_normalizer
        return observation if normalizer is None else normalizer.transform(observation, self._observation_clip_value)

    def _normalized_reward(self, error: Tensor, is_rewarded: Tensor, update: bool = False) -> Tensor:
        """Compute the rewards for errors of any shape, 0 where ``is_rewarded`` is False.

        Args:
            error: errors from which rewards are computed.
            is_rewarded: bool, of the shape of ``error``; other steps do not enter the statistics.
            update: update the statistics first.
        """
        reward, normalizer = error.detach(), self._reward_normalizer
        if normalizer is not None:
            if update:
                normalizer.update(reward[is_rewarded])
            reward = normalizer.transform(reward, self._reward_clip_value)
        return reward * is_rewarded

    def _loss_of_arriving(self, loss: Tensor, is_last: Any, extra: NestedTensor) -> LossInfo:
        """Return the losses of arriving at steps, including steps that end an episode.

        The engine ignores losses at LAST, where no action is taken, so the reward of such steps would never decay.
        Therefore the mean of these losses over ``T * B`` is added as a scalar.

        Args:
            loss: ``[T, B]``.
            is_last: bool ``[T, B]``; ``()`` if the losses are those of arriving at the next step, none of which is at
                LAST.
            extra: for summaries.
        """
        if not isinstance(is_last, Tensor):
            return LossInfo(loss=loss, extra=extra)
        at_last = loss * is_last
        if self.on_policy:  # the bootstrap step is the first step of the next unroll
            at_last = at_last[:-1]
        return LossInfo(loss=loss, scalar_loss=at_last.mean(), extra=extra)


class BatchRewards(Algorithm):
    """Base class of intrinsic reward modules that reward steps when they are trained on, not when they are
    collected."""

    rewards_batches = True

    def reward_batch(self, root: Any, inputs: TimeStep, stored: Any = ()) -> AlgStep:
        """Reward a batch of stored steps.

        Args:
            root: the agent.
            inputs: time steps ``[B, T, ...]``, transformed.
            stored: output of the rollout for them ``[B, T]``; ``()`` if there is none.

        Returns:
            ``output``: the rewards ``[B, T]`` of arriving at them, or ``()``; ``info``: nest ``[B, T, ...]``, the
            ``rollout_info`` of ``train_step``.
        """
        raise NotImplementedError(f'{type(self).__name__}.reward_batch')


def is_first(step_type: Tensor) -> Tensor:
    """Return the mask of FIRST steps, bool, of the shape of ``step_type``."""
    return step_type == StepType.FIRST


def rows(x: Tensor) -> Tensor:
    """Flatten ``[T, B, ...]`` to ``[T * B, ...]``."""
    return x.flatten(0, 1)


def next_row(x: Tensor) -> Tensor:
    """Shift ``[T, ...]`` to the next step; the last row, which has no successor, is repeated."""
    return torch.cat((x[1:], x[-1:]))


def is_last(step_type: Tensor) -> Tensor:
    """Return the mask of LAST steps, bool, of the shape of ``step_type``."""
    return step_type == StepType.LAST


def all_fixed(networks: list[Any]) -> bool:
    """Return whether none of ``networks`` samples random numbers or keeps statistics; ``None`` entries are skipped."""
    return is_traceable(nn.ModuleList([network for network in networks if network is not None]))


def hidden_sizes(hidden_size: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of hidden layers from an argument ``hidden_size``; a number stands for one layer."""
    return tuple(hidden_size) if isinstance(hidden_size, Sequence) else (hidden_size, )


def make_network(network: Any, input_tensor_spec: NestedTensorSpec | None, where: tuple[str, str]) -> Network:
    """Return a feed-forward network from an argument of a constructor.

    Args:
        network: a network, another module, or a constructor of a network, called as ``(input_tensor_spec=)``.
        input_tensor_spec: spec of its input; ``None`` if that is not known.
        where: name of the class and of its argument, for error messages.

    Raises:
        ConfError: the argument has another type, the network is recurrent, or its input is not known.
    """
    made = network
    if not isinstance(network, Network):
        if not callable(network):
            raise ConfError([problem_at(*where, f'expected a network or its constructor, found {network!r}')])
        if input_tensor_spec is None:
            raise ConfError([problem_at(*where, 'is not a Network, and without an observation_spec it cannot be '
                                        'converted to one', 'set observation_spec, or use a Network')])
        made = network if isinstance(network, nn.Module) else network(input_tensor_spec=input_tensor_spec)
        made = wrap_as_network(made, input_tensor_spec)
    if made.is_rnn:
        raise ConfError([problem_at(*where, f'is recurrent ({type(made).__name__}), but the module keeps no recurrent '
                                    'state', 'choose a feed-forward network')])
    return made


def output_tensor_spec(network: Network, where: tuple[str, str]) -> TensorSpec:
    """Return the spec of the output of ``network``, which has to be one tensor of floats.

    Raises:
        SpecError: the output has another type.
    """
    spec = network.output_spec
    if not isinstance(spec, TensorSpec) or not spec.is_continuous or not nest.flatten(spec):
        raise SpecError(f"{'.'.join(where)}: expected a network whose output is one tensor of floats, found {spec}")
    return spec


NetworkOrConstructor = Network | Callable[..., Any]
