"""What the modules of an agent that reward it for exploring have in common.

Such a module gives a reward ``[B]`` for arriving at a step, in ``rollout_step``; its losses teach it what it has
rewarded, so that the reward fades. Here: the statistics that observations and rewards are normalized by, which are
updated in ``rollout_step`` alone, where each step is seen once; and losses that include the last steps of episodes.
Read next: :mod:`alfx.algorithms.rnd_algorithm`.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import ConfError, check_value
from alfx.gin_utils.value_checks import problem_at
from alfx.networks.network import Network, wrap_as_network
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.normalizers import AdaptiveNormalizer, ScalarAdaptiveNormalizer

IntrinsicMeasures = namedtuple('IntrinsicMeasures', ['reward', 'error'], default_value=())
"""What ``predict_step`` yields, ``[B]`` each: the reward, and the error that it is made of; NaN where there is none."""


class IntrinsicRewardAlgorithm(Algorithm):
    """Base of modules whose reward is an error, normalized.

    Args:
        observation_spec: nest of specs of what is seen; ``None``: not known.
        observation_adapt_speed: normalize observations with this speed of adaption, see
            :class:`~alfx.utils.normalizers.AdaptiveNormalizer`; ``None``: do not.
        observation_clip_value: clip normalized observations to plus and minus this; ``None``: do not.
        reward_adapt_speed: normalize rewards with this speed of adaption; ``None``: do not.
        reward_zero_mean: subtract the mean of the rewards where they are normalized.
        reward_clip_value: if positive, clip normalized rewards to plus and minus this.
        train_state_spec: the state of a step.
        optimizer: default optimizer of this module.
        name: name of this algorithm.

    Raises:
        ConfError: a number is out of range, or there is no ``observation_spec`` to normalize observations of.
    """

    def __init__(self, observation_spec: NestedTensorSpec | None, observation_adapt_speed: float | None,
                 observation_clip_value: float | None, reward_adapt_speed: float | None, reward_zero_mean: bool,
                 reward_clip_value: float = -1.0, train_state_spec: NestedTensorSpec = (), optimizer: Any = None,
                 name: str = 'IntrinsicRewardAlgorithm'):
        super().__init__(train_state_spec=train_state_spec, optimizer=optimizer, name=name)
        owner = type(self).__name__
        check_value(owner, 'observation_adapt_speed', observation_adapt_speed, float, above=0, optional=True)
        check_value(owner, 'observation_clip_value', observation_clip_value, float, above=0, optional=True)
        check_value(owner, 'reward_adapt_speed', reward_adapt_speed, float, above=0, optional=True)
        check_value(owner, 'reward_zero_mean', reward_zero_mean, bool)
        if observation_adapt_speed is not None and observation_spec is None:
            raise ConfError([problem_at(owner, 'observation_adapt_speed', f'= {observation_adapt_speed}: there is no '
                                        'observation_spec, so that observations cannot be normalized',
                                        'give observation_spec, or leave observation_adapt_speed out')])
        self._observation_normalizer = None if observation_adapt_speed is None else AdaptiveNormalizer(
            observation_spec, speed=observation_adapt_speed, name=f'{name}/observation')
        self._observation_clip_value = observation_clip_value or -1.0
        self._reward_normalizer = None if reward_adapt_speed is None else ScalarAdaptiveNormalizer(
            speed=reward_adapt_speed, zero_mean=reward_zero_mean, unit_std=True, name=f'{name}/reward')
        self._reward_clip_value = reward_clip_value

    @property
    def _yields_info(self) -> bool:
        """Whether ``rollout_step`` has to return what the loss needs: only where that is what is trained on."""
        return self.on_policy is not False

    @property
    def rewards_unrolls_at_once(self) -> bool:
        """Whether there is a :meth:`reward_unroll`."""
        return type(self).reward_unroll is not IntrinsicRewardAlgorithm.reward_unroll

    def reward_unroll(self, inputs: TimeStep) -> AlgStep:
        """What ``rollout_step`` does for a step, for all steps of an unroll at once.

        It is there for agents whose policy needs the rewards of an unroll only when all of it has been collected. The
        statistics take in the unroll as one batch, before they are used.

        Args:
            inputs: time steps ``[T + 1, B, ...]``: the last one of the unroll before, and T more.

        Returns:
            ``output``: the rewards ``[T + 1, B]``; 0 in the first row, which has been rewarded before. ``info``: nest
            ``[T + 1, B, ...]``, for ``train_step`` or ``train_sequence`` as ``rollout_info``; of the last row nothing
            is to be learned yet.
        """
        raise NotImplementedError(f'{type(self).__name__}.reward_unroll')

    def _update_statistics(self, observation: NestedTensor) -> None:
        """Take observations ``[..., *spec.shape]`` into the statistics."""
        if self._observation_normalizer is not None:
            self._observation_normalizer.update(observation)

    def _normalized(self, observation: NestedTensor) -> NestedTensor:
        """Observations ``[..., *spec.shape]``, normalized and clipped if they are to be."""
        normalizer = self._observation_normalizer
        return observation if normalizer is None else normalizer.normalize(observation, self._observation_clip_value)

    def _normalized_reward(self, error: Tensor, is_rewarded: Tensor, update: bool = False) -> Tensor:
        """The rewards for errors of any shape: 0 where ``is_rewarded``, bool of that shape, is not.

        Args:
            error: what the reward is made of.
            is_rewarded: where it is one. Nothing else enters the statistics.
            update: take them into the statistics first.
        """
        reward, normalizer = error.detach(), self._reward_normalizer
        if normalizer is not None:
            if update:
                normalizer.update(reward[is_rewarded])
            reward = normalizer.normalize(reward, self._reward_clip_value)
        return reward * is_rewarded

    def _loss_of_arriving(self, loss: Tensor, is_last: Any, extra: NestedTensor) -> LossInfo:
        """The losses of steps that were arrived at, those that end an episode included.

        The engine does not count losses at LAST, where no action is taken. What was learned about there would keep its
        reward for ever. So the mean of these losses over ``T * B`` is added as a scalar.

        Args:
            loss: ``[T, B]``.
            is_last: bool ``[T, B]``; ``()`` if the losses are those of arriving at the next step, none of which is at
                LAST.
            extra: for summaries.
        """
        if not isinstance(is_last, Tensor):
            return LossInfo(loss=loss, extra=extra)
        at_last = loss * is_last
        if self.on_policy:  # the step to bootstrap from is the first one of the next unroll
            at_last = at_last[:-1]
        return LossInfo(loss=loss, scalar_loss=at_last.mean(), extra=extra)


class BatchRewards(Algorithm):
    """An intrinsic reward module that rewards steps when they are trained on, not when they are collected."""

    def reward_batch(self, root: Any, inputs: TimeStep) -> AlgStep:
        """Reward a batch of stored steps.

        Args:
            root: the agent.
            inputs: time steps ``[B, T, ...]``, transformed.

        Returns:
            ``output``: the rewards ``[B, T]`` of arriving at them; ``info``: nest ``[B, T, ...]``, for ``train_step``
            as ``rollout_info``.
        """
        raise NotImplementedError(f'{type(self).__name__}.reward_batch')


def is_first(step_type: Tensor) -> Tensor:
    """bool, of the shape of ``step_type``."""
    return step_type == StepType.FIRST


def rows(x: Tensor) -> Tensor:
    """``[T, B, ...]`` to ``[T * B, ...]``."""
    return x.flatten(0, 1)


def next_row(x: Tensor) -> Tensor:
    """``[T, ...]`` to the same of the next step; the last one, which has none, stays."""
    return torch.cat((x[1:], x[-1:]))


def is_last(step_type: Tensor) -> Tensor:
    """bool, of the shape of ``step_type``."""
    return step_type == StepType.LAST


def all_fixed(networks: list[Any]) -> bool:
    """Whether none of ``networks`` draws numbers or keeps statistics; ``None`` among them counts for nothing."""
    return is_traceable(nn.ModuleList([network for network in networks if network is not None]))


def hidden_sizes(hidden_size: int | Sequence[int], owner: str) -> tuple[int, ...]:
    """The sizes of hidden layers, from the argument ``hidden_size`` of ``owner``: a number stands for one layer.

    Raises:
        ConfError: one of them is not a positive int.
    """
    sizes = tuple(hidden_size) if isinstance(hidden_size, Sequence) else (hidden_size, )
    for size in sizes:
        check_value(owner, 'hidden_size', size, int, minimum=1)
    return sizes


def make_network(network: Any, input_tensor_spec: NestedTensorSpec | None, where: tuple[str, str]) -> Network:
    """A network without memory, from an argument of a constructor.

    Args:
        network: a network, another module, or what constructs a network, called as ``(input_tensor_spec=)``.
        input_tensor_spec: spec of its input; ``None`` if that is not known.
        where: name of the class and of its argument, for messages.

    Raises:
        ConfError: it is none of these, or it has memory, or its input is not known.
    """
    made = network
    if not isinstance(network, Network):
        if not callable(network):
            raise ConfError([problem_at(*where, f'expected a network or its constructor, found {network!r}')])
        if input_tensor_spec is None:
            raise ConfError([problem_at(*where, 'is not a Network, and without an observation_spec it cannot be made '
                                        'one', 'give observation_spec, or a Network')])
        made = network if isinstance(network, nn.Module) else network(input_tensor_spec=input_tensor_spec)
        made = wrap_as_network(made, input_tensor_spec)
    if made.is_rnn:
        raise ConfError([problem_at(*where, f'has memory ({type(made).__name__}): its state would have to be that of '
                                    'another step', 'choose a network without memory')])
    return made


def output_tensor_spec(network: Network, where: tuple[str, str]) -> TensorSpec:
    """The spec of the output of ``network``, which is one tensor of floats.

    Raises:
        SpecError: it is another.
    """
    spec = network.output_spec
    if not isinstance(spec, TensorSpec) or not spec.is_continuous or not nest.flatten(spec):
        raise SpecError(f"{'.'.join(where)}: expected a network whose output is one tensor of floats, found {spec}")
    return spec


NetworkOrConstructor = Network | Callable[..., Any]
