"""Algorithms that keep the entropy of a policy above a target by adjusting the weight alpha of an entropy bonus.

:class:`EntropyTargetAlgorithm` raises and lowers ``log(alpha)`` by a rule in three stages;
:class:`SGDEntropyTargetAlgorithm` learns it by gradient descent as soft actor-critic does (Haarnoja et al. 2018,
arXiv:1812.05905, section 5). Both add the loss ``-alpha * entropy``.
"""
import math
from collections.abc import Callable
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from alfx import context, nest, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep, LossInfo, StepType, namedtuple
from alfx.gin_utils import Count, NonNegative, Positive, configurable, takes_arguments_of
from alfx.tensor_specs import Nested, NestedTensorSpec
from alfx.utils import dist_utils
from alfx.utils.averager import ScalarWindowAverager
from alfx.utils.schedulers import as_scheduler

EntropyTargetLossInfo = namedtuple('EntropyTargetLossInfo', ['neg_entropy'], default_value=())
"""``neg_entropy``: minus the entropy, ``[T, B]``."""

EntropyTargetInfo = namedtuple('EntropyTargetInfo', ['step_type', 'loss'], default_value=())
"""Input of the loss: ``step_type`` and a ``LossInfo`` whose ``loss`` is minus the entropy, ``[B]`` each."""

_INITIAL_STAGE, _FREE_STAGE, _ADJUST_STAGE = 0, 1, 2
_ESTIMATE_STAGE = -1  # before the initial stage: estimates max_entropy
_LOWEST_LOG_ALPHA = -100.


class _EntropyAlgorithm(Algorithm):
    """Base class with steps that compute the entropy of the policy and have no output."""

    updates_are_traceable = False

    def _entropy_step(self, distribution_and_step_type: tuple[Any, Tensor]) -> AlgStep:
        distribution, step_type = distribution_and_step_type
        entropy, entropy_for_gradient = dist_utils.entropy_with_fallback(distribution)
        loss = LossInfo(loss=-entropy_for_gradient, extra=EntropyTargetLossInfo(neg_entropy=-entropy))
        return AlgStep(info=EntropyTargetInfo(step_type=step_type, loss=loss))

    def predict_step(self, distribution_and_step_type: tuple[Any, Tensor], state: Any = None) -> AlgStep:
        """Return an empty step."""
        return AlgStep()

    def rollout_step(self, distribution_and_step_type: tuple[Any, Tensor], state: Any = None) -> AlgStep:
        """Compute the entropy if training is on-policy, otherwise return an empty step.

        Args:
            distribution_and_step_type: nest of action distributions, batch shape ``[B]``, and the step type ``[B]``.
            state: not used.

        Returns:
            ``info`` is an ``EntropyTargetInfo``.
        """
        return AlgStep() if self.on_policy is False else self._entropy_step(distribution_and_step_type)

    def train_step(self, distribution_and_step_type: tuple[Any, Tensor], state: Any = None,
                   rollout_info: Any = None) -> AlgStep:
        """Compute the entropy; see :meth:`rollout_step`."""
        return self._entropy_step(distribution_and_step_type)


def _mean_entropy(info: Any, valid_mask: Optional[Tensor] = None) -> Optional[Tensor]:
    """Compute the mean entropy over the steps at which the policy acted, on all ranks; None if there are no such steps.

    Args:
        info: ``EntropyTargetInfo`` of ``[T, B]``.
        valid_mask: ``[T, B]``; LAST steps are always left out, because no action is taken there.
    """
    mask = (info.step_type != StepType.LAST).to(torch.float32)
    if valid_mask is not None:
        mask = mask * valid_mask
    count = context.mean_over_ranks(mask.sum())
    if float(count) == 0:
        return None
    return -context.mean_over_ranks((info.loss.extra.neg_entropy.detach() * mask).sum()) / count


def _scheduled_target(action_spec: NestedTensorSpec, target_entropy: Any) -> Callable[[], float]:
    if target_entropy is None:
        target_entropy = sum(dist_utils.calc_default_target_entropy(spec) for spec in nest.flatten(action_spec))
    return as_scheduler(target_entropy)


@configurable
class EntropyTargetAlgorithm(_EntropyAlgorithm):
    """Adjusts alpha so that the entropy does not stay below ``target_entropy``.

    There are three stages, which use the mean entropy of the last ``average_window`` calls:

    1. initial: while the entropy is not below ``max_entropy``, each call lowers ``log(alpha)`` by
       ``very_slow_update_rate``. So ``initial_alpha`` may be chosen generously.
    2. free: alpha is constant until the entropy is below ``target_entropy``.
    3. adjust: with the entropy below or above the target, and decreasing or increasing,

           log(alpha) += update_rate * ((below + above / 2) * decreasing - (above + below / 2) * increasing)

       so that alpha decreases when the entropy recovers, even below the target, and does not overshoot.
       ``update_rate`` starts at ``fast_update_rate``. Each time the entropy crosses the target it is multiplied by 0.9,
       down to ``slow_update_rate``, before it is used. It is ``fast_update_rate`` again while the entropy is far below
       the target: below half of a positive target, or twice a negative one. A constant entropy counts as moving away
       from the target, so that the rule also acts on a policy that has collapsed.

    Each call applies the rule of one stage; the next stage begins with the next call.

    ``skip_free_stage=True`` with ``slow_update_rate`` and ``fast_update_rate`` both four times the learning rate of the
    temperature in soft actor-critic approximates its temperature rule.

    Args:
        action_spec: nest of ``BoundedTensorSpec``.
        initial_alpha: initial alpha.
        skip_free_stage: start with the adjust stage.
        max_entropy: threshold of the initial stage; None for ``min(0.8 * e, e / 0.8)`` with e the mean entropy of the
            first ``average_window`` calls, or ``target_entropy`` if that is larger.
        target_entropy: lower bound of the entropy, summed over the nest, a number or a schedule; None for the sum of
            ``dist_utils.calc_default_target_entropy``.
        very_slow_update_rate: update rate of the initial stage.
        slow_update_rate: smallest update rate of the adjust stage.
        fast_update_rate: largest update rate of the adjust stage.
        min_alpha: lower bound of alpha; ``exp(-100)`` if not above 0.
        average_window: number of calls over which the entropy is averaged.
        debug_summaries: write alpha, the entropy, the stage and the update rate.
        name: name of this algorithm.

    Raises:
        ValueError: ``target_entropy`` exceeds ``max_entropy``, or an argument is out of range.
    """

    _log_alpha: Tensor
    _stage: Tensor
    _update_rate: Tensor
    _max_entropy: Tensor
    _num_calls: Tensor

    def __init__(self, action_spec: NestedTensorSpec, initial_alpha: Positive = 0.1, skip_free_stage: bool = False,
                 max_entropy: Optional[float] = None, target_entropy: Union[None, float, Callable[[], float]] = None,
                 very_slow_update_rate: NonNegative = 0.001, slow_update_rate: NonNegative = 0.01,
                 fast_update_rate: NonNegative = math.log(2), min_alpha: NonNegative = 0.0001,
                 average_window: Count = 2, debug_summaries: bool = False,
                 name: str = 'EntropyTargetAlgorithm') -> None:
        super().__init__(debug_summaries=debug_summaries, name=name)
        if not slow_update_rate <= fast_update_rate:
            raise ValueError(f'{name}: expected slow_update_rate <= fast_update_rate, found {slow_update_rate} and '
                             f'{fast_update_rate}')
        self._get_target_entropy = _scheduled_target(action_spec, target_entropy)
        if max_entropy is not None and self._get_target_entropy() > max_entropy:
            raise ValueError(f'{name}: expected target_entropy <= max_entropy, found {self._get_target_entropy()} and '
                             f'{max_entropy}')
        stage = _INITIAL_STAGE if max_entropy is not None else _ESTIMATE_STAGE
        self.register_buffer('_log_alpha', torch.tensor(math.log(initial_alpha)))
        self.register_buffer('_stage', torch.tensor(_ADJUST_STAGE if skip_free_stage else stage, dtype=torch.int32))
        self.register_buffer('_update_rate', torch.tensor(float(fast_update_rate)))
        self.register_buffer('_max_entropy', torch.tensor(math.nan if max_entropy is None else float(max_entropy)))
        self.register_buffer('_num_calls', torch.zeros((), dtype=torch.int64))
        self._avg_entropy = ScalarWindowAverager(average_window)
        self._average_window = average_window
        self._very_slow_update_rate = very_slow_update_rate
        self._slow_update_rate = slow_update_rate
        self._fast_update_rate = fast_update_rate
        self._min_log_alpha = math.log(min_alpha) if min_alpha > 0 else _LOWEST_LOG_ALPHA

    def calc_loss(self, info: Any, valid_mask: Optional[Tensor] = None) -> LossInfo:
        """Adjust alpha, then weight the loss by it.

        Args:
            info: ``EntropyTargetInfo`` of ``[T, B]``.
            valid_mask: ``[T, B]``: 0 for steps whose entropy is ignored.

        Returns:
            ``loss [T, B]``: minus alpha times the entropy; ``extra``: ``EntropyTargetLossInfo``.
        """
        entropy = _mean_entropy(info, valid_mask)
        alpha = self._log_alpha.exp() if entropy is None else self.adjust_alpha(entropy)
        return info.loss._replace(loss=info.loss.loss * alpha)

    @torch.no_grad()
    def adjust_alpha(self, entropy: Tensor) -> Tensor:
        """Apply the rule of the current stage once.

        Args:
            entropy: scalar, the current entropy.

        Returns:
            scalar, the adjusted alpha.
        """
        previous = float(self._avg_entropy.get())
        average = float(self._avg_entropy.average(entropy))
        if int(self._num_calls) == 0:
            previous = average
        self._num_calls += 1
        stage = int(self._stage)
        if stage == _ESTIMATE_STAGE:
            self._estimate(average)
        elif stage == _INITIAL_STAGE:
            self._initial_step(average)
        elif stage == _FREE_STAGE:
            self._stage += average < self._get_target_entropy()
        else:
            self._adjust_step(previous, average)
        self._log_alpha.clamp_(min=self._min_log_alpha)
        alpha = self._log_alpha.exp()
        if self._debug_summaries and context.should_record_summaries():
            self._summarize(alpha, entropy, average)
        return alpha

    def _estimate(self, average: float) -> None:
        """Set ``max_entropy`` once the window is full."""
        if int(self._num_calls) >= self._average_window:
            self._max_entropy.fill_(max(min(0.8 * average, average / 0.8), self._get_target_entropy()))
            self._stage.fill_(_INITIAL_STAGE)

    def _initial_step(self, average: float) -> None:
        if average < float(self._max_entropy):
            self._stage.fill_(_FREE_STAGE)
        else:
            self._log_alpha -= self._very_slow_update_rate

    def _adjust_step(self, previous: float, average: float) -> None:
        target = self._get_target_entropy()
        below = average < target
        if average < target * (0.5 if target > 0 else 2.0):
            self._update_rate.fill_(self._fast_update_rate)
        elif (previous < target) != below:
            self._update_rate.mul_(0.9).clamp_(min=self._slow_update_rate)
        decreasing = average < previous if average != previous else below
        if decreasing:
            self._log_alpha += self._update_rate * (1.0 if below else 0.5)
        else:
            self._log_alpha -= self._update_rate * (0.5 if below else 1.0)

    def _summarize(self, alpha: Tensor, entropy: Tensor, average: float) -> None:
        with summary.scope(self._name):
            summary.scalar('alpha', alpha)
            summary.scalar('entropy', entropy)
            summary.scalar('average_entropy', average)
            summary.scalar('target_entropy', self._get_target_entropy())
            summary.scalar('stage', self._stage)
            summary.scalar('update_rate', self._update_rate)


@configurable
class NestedEntropyTargetAlgorithm(_EntropyAlgorithm):
    """Separate :class:`EntropyTargetAlgorithm` for each action of a nest, so that none of them loses its entropy.

    The distributions given to a step, and the ``EntropyTargetInfo`` of its ``info``, are nests like ``action_spec``.

    Args:
        action_spec: nest of ``BoundedTensorSpec``.
        max_entropy: a nest like ``action_spec`` of numbers and None, or one value for all.
        target_entropy: a nest like ``action_spec`` of numbers and None, or one value for all.
        debug_summaries: write alpha, the entropy, the stage and the update rate of each action.
        kwargs: arguments of each :class:`EntropyTargetAlgorithm`.

    Raises:
        ValueError: the structures differ, or an argument is out of range.
    """

    @takes_arguments_of(EntropyTargetAlgorithm)
    def __init__(self, action_spec: NestedTensorSpec, max_entropy: Nested, target_entropy: Nested,
                 debug_summaries: bool, name: str, **kwargs: Any) -> None:
        super().__init__(debug_summaries=debug_summaries, name=name)
        self._action_structure = nest.structure(action_spec)
        parts = zip(nest.flatten_with_path(action_spec), _for_each(action_spec, max_entropy),
                    _for_each(action_spec, target_entropy))
        self._algorithms = nn.ModuleList([
            EntropyTargetAlgorithm(spec, max_entropy=maximum, target_entropy=target, debug_summaries=debug_summaries,
                                   name=f'{name}/{path}' if path else name, **kwargs)
            for (path, spec), maximum, target in parts
        ])

    def members(self) -> list[Any]:
        """Return the algorithm of each action, in the order of the nest."""
        return list(self._algorithms)

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set on-policy or off-policy training for all parts."""
        super().set_on_policy(is_on_policy)
        for algorithm in getattr(self, '_algorithms', ()):
            algorithm.set_on_policy(is_on_policy)

    def _entropy_step(self, distribution_and_step_type: tuple[Any, Tensor]) -> AlgStep:
        distributions, step_type = distribution_and_step_type
        flat = nest.flatten(distributions, is_leaf=nest.is_distribution)
        if len(flat) != len(self._algorithms):
            raise ValueError(f'{self._name}: expected a nest of {len(self._algorithms)} distributions, one for each '
                             f'action, found {len(flat)}')
        infos = [algorithm._entropy_step((distribution, step_type)).info
                 for algorithm, distribution in zip(self.members(), flat)]
        return AlgStep(info=self._action_structure.unflatten(infos))

    def calc_loss(self, info: Any, valid_mask: Optional[Tensor] = None) -> LossInfo:
        """Adjust each alpha, then add the weighted losses.

        Args:
            info: nest of ``EntropyTargetInfo`` of ``[T, B]``.
            valid_mask: ``[T, B]``: 0 for steps whose entropy is ignored.

        Returns:
            ``loss [T, B]``; ``extra``: nest of ``EntropyTargetLossInfo``.
        """
        losses = [algorithm.calc_loss(part, valid_mask)
                  for algorithm, part in zip(self.members(), self._action_structure.flatten_up_to(info))]
        return LossInfo(loss=torch.stack([loss.loss for loss in losses]).sum(0),
                        extra=self._action_structure.unflatten([loss.extra for loss in losses]))


def _for_each(action_spec: NestedTensorSpec, value: Nested) -> list[Any]:
    """Return ``value`` for each spec: its leaves if it is a nest, otherwise the value itself."""
    if not nest.is_nested(value):
        return [value] * len(nest.flatten(action_spec))
    nest.assert_same_structure(action_spec, value)
    return nest.flatten(value)


@configurable
class SGDEntropyTargetAlgorithm(_EntropyAlgorithm):
    """Learns ``log(alpha)`` by gradient descent on ``log(alpha) * (entropy - target_entropy)``.

    This is the temperature loss of soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905, eq. 18) with
    ``log(alpha)`` instead of the factor alpha, which changes the size of a step but not its sign.

    Args:
        action_spec: nest of ``BoundedTensorSpec``.
        initial_alpha: initial alpha.
        target_entropy: target for the whole nest; a callable (a scheduler) is evaluated at each loss; None for the sum
            of ``dist_utils.calc_default_target_entropy``.
        window_size: number of calls over which the entropy is averaged.
        optimizer: learns ``log(alpha)``; None to leave that to the optimizer of the enclosing algorithm.
        debug_summaries: write alpha and the entropy.
        name: name of this algorithm.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, action_spec: NestedTensorSpec, initial_alpha: Positive = 0.1,
                 target_entropy: Union[Callable[[], float], float, None] = None, window_size: Count = 1,
                 optimizer: Optional[torch.optim.Optimizer] = None, debug_summaries: bool = False,
                 name: str = 'SGDEntropyTargetAlgorithm') -> None:
        super().__init__(optimizer=optimizer, debug_summaries=debug_summaries, name=name)
        self._log_alpha = nn.Parameter(torch.tensor(math.log(initial_alpha)))
        self._get_target_entropy = _scheduled_target(action_spec, target_entropy)
        self._avg_entropy = ScalarWindowAverager(window_size)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the losses of the policy and of alpha.

        Args:
            info: ``EntropyTargetInfo`` of ``[T, B]``.

        Returns:
            ``loss [T, B]``: minus alpha times the entropy, with alpha constant; ``scalar_loss``: the loss of
            ``log(alpha)``, without LAST steps; ``extra``: ``EntropyTargetLossInfo``.
        """
        alpha = self._log_alpha.detach().exp()
        loss = info.loss._replace(loss=info.loss.loss * alpha)
        entropy = _mean_entropy(info)
        if entropy is None:
            return loss
        average = self._avg_entropy.average(entropy)
        target = self._get_target_entropy()
        if self._debug_summaries and context.should_record_summaries():
            with summary.scope(self._name):
                summary.scalar('alpha', alpha)
                summary.scalar('average_entropy', average)
                summary.scalar('target_entropy', target)
        return loss._replace(scalar_loss=self._log_alpha * (average - target))
