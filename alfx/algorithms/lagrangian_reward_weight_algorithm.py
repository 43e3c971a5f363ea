r"""Adaptive weights of a multi-dimensional reward, adjusted until each dimension reaches its threshold.

Some of K rewards should be at least ``threshold[k]`` per step on average. Their weights are Lagrange multipliers
``lambda[k] = transform(u[k]) > 0``, learned by gradient descent on

    sum_k  lambda[k] * (mean reward[k] - threshold[k])

in alternation with the policy, which maximizes the weighted rewards: a weight grows while its threshold is missed and
shrinks otherwise. Tessler et al. 2018, "Reward constrained policy optimization" (arXiv:1805.11074), eq. 9 to 11. The
rule is the integral control of Stooke et al. 2020, "Responsive safety in reinforcement learning by PID Lagrangian
methods" (arXiv:2007.03964); their section 4.3 normalizes the weights to sum 1, so that the scale of the policy loss
does not depend on the multipliers.

Differs from the papers: constraints apply to the average of a reward over all steps, not to the discounted return, and
``u`` is learned instead of lambda, so that a weight stays positive without clipping at 0. The weights do not depend on
the state: the constraints hold on average, not at each step. The reward of a FIRST step, 0, is not counted; the reward
of the action taken there arrives with the next step.
"""
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alfx import context, gin_utils, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.environment_rewards import environment_reward, require_environment_rewards
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, StepType, TimeStep, namedtuple
from alfx.gin_utils import Positive, configurable, problem_at, takes_arguments_of
from alfx.tensor_specs import NestedTensor, TensorSpec
from alfx.utils.averager import EMAverager

LagInfo = namedtuple('LagInfo', ['rollout_reward'], default_value=())
"""``rollout_reward``: float32 ``[B, K]``: untransformed rewards of the environment."""

_INVERSES: dict[Any, Callable[[float], float]] = {F.softplus: lambda y: y + math.log(-math.expm1(-y)),
                                                  torch.exp: math.log}


@configurable
class LagrangianRewardWeightAlgorithm(Algorithm):
    """Learns weights of reward dimensions from the rewards of the rollout; a part of an ``Agent``.

    It needs the rewards of the environment: if a data transformer changes rewards, put ``@UntransformedTimeStep``
    first.

    Args:
        reward_spec: spec of rank 1: K rewards, for which more is better.
        reward_thresholds: K lower bounds of the average reward per step. The weight of a reward with threshold ``None``
            is not adjusted.
        optimizer: learns the weights, with one step per iteration.
        init_weights: initial weights above 0, one number for all or K of them.
        max_weight: upper bound of the weights before normalization; ``None`` for no limit.
        reward_weight_normalization: divide the weights by their sum. This also changes weights that are not adjusted,
            but not their ratios.
        lambda_transform: maps the learned parameter to a weight, ``softplus`` or ``torch.exp``.
        debug_summaries: write the weights and the rewards that they are learned from.
        name: name of this algorithm.

    Raises:
        ValueError: the reward has rank 0, or an argument is out of range or its length is not K.
    """

    _declared_capabilities = {'traceable_update': True}  # it takes no part in updates
    _not_trained = ('_untransformed_weights', )  # only after_train_iter trains them

    def __init__(self, reward_spec: TensorSpec, reward_thresholds: Sequence[float | None], optimizer: Any,
                 init_weights: float | Sequence[float] = 1.0, max_weight: Positive | None = None,
                 reward_weight_normalization: bool = True, lambda_transform: Callable[[Tensor], Tensor] = F.softplus,
                 debug_summaries: bool = False, name: str = 'LagrangianRewardWeightAlgorithm'):
        super().__init__(debug_summaries=debug_summaries, name=name)
        weights = _checked_weights(name, reward_spec, reward_thresholds, init_weights, max_weight)
        if lambda_transform not in _INVERSES:
            raise ValueError(f'{name}.lambda_transform: expected softplus or torch.exp, found {lambda_transform!r}')
        inverse = _INVERSES[lambda_transform]
        adjusted = [k for k, threshold in enumerate(reward_thresholds) if threshold is not None]
        self._transform = lambda_transform
        self._largest = math.inf if max_weight is None else inverse(max_weight)
        self._normalizes = reward_weight_normalization
        # Settings, which are not part of checkpoints.
        self.register_buffer('_adjusted', torch.tensor(adjusted), persistent=False)
        self.register_buffer('_thresholds', torch.tensor([float(reward_thresholds[k] or 0) for k in adjusted]),
                             persistent=False)
        self.register_buffer('_initial_weights', torch.tensor(weights), persistent=False)
        self._untransformed_weights = nn.Parameter(torch.tensor([inverse(weights[k]) for k in adjusted]))
        self._weight_optimizer = optimizer
        optimizer.add_param_group({'params': [self._untransformed_weights]})

    _adjusted: Tensor
    _thresholds: Tensor
    _initial_weights: Tensor

    # Weights ---------------------------------------------------------------------------------------------------

    def optimizers(self, recurse: bool = True, include_ignored_attributes: bool = False) -> list[Any]:
        """Return the optimizer for checkpoints, but not for the updates of the agent."""
        return [self._weight_optimizer] if include_ignored_attributes or not recurse else []

    @property
    def reward_weights(self) -> Tensor:
        """Copy of the current weights, float32 ``[K]``."""
        weights = self._initial_weights.clone()
        weights[self._adjusted] = self._transform(self._untransformed_weights.detach())
        return weights / weights.sum() if self._normalizes else weights

    def check_config(self, config: TrainerConfig) -> None:
        """Reject a configuration that hides the rewards of the environment.

        Raises:
            ConfError: a data transformer changes rewards and none keeps the original time step.
        """
        require_environment_rewards(config, f'{type(self).__name__} compares rewards of the environment with its '
                                    'thresholds')

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor = None) -> AlgStep:
        """Return an empty step."""
        return AlgStep()

    def rollout_step(self, inputs: TimeStep, state: NestedTensor = None) -> AlgStep:
        """Return the untransformed rewards ``[B, K]`` of ``inputs`` in ``info``, a ``LagInfo``."""
        return AlgStep(info=LagInfo(rollout_reward=environment_reward(inputs)))

    def after_train_iter(self, root_inputs: TimeStep | None, rollout_info: Any) -> None:
        """Adjust the weights by the rewards of the last unroll.

        Args:
            root_inputs: ``[T, B, ...]``; ``None`` without an unroll: the weights do not change.
            rollout_info: ``LagInfo`` ``[T, B, K]``.
        """
        if root_inputs is None or rollout_info is None:
            return
        rewards = rollout_info.rollout_reward[root_inputs.step_type != StepType.FIRST]
        count = context.mean_over_ranks(rewards.new_tensor(len(rewards)))
        if count:
            self._adjust(context.mean_over_ranks(rewards.sum(0)) / count)

    def _adjust(self, mean_reward: Tensor) -> None:
        """Take one step of the optimizer for the mean reward ``[K]`` per step."""
        surplus = mean_reward[self._adjusted] - self._thresholds
        self._weight_optimizer.zero_grad()
        with torch.enable_grad():
            (self._transform(self._untransformed_weights) * surplus).sum().backward()
        self._weight_optimizer.step()
        if self._largest < math.inf:
            with torch.no_grad():
                self._untransformed_weights.clamp_(max=self._largest)
        if self._debug_summaries and context.should_record_summaries():
            with summary.scope(self._name):
                for k, (weight, reward) in enumerate(zip(self.reward_weights, mean_reward)):
                    summary.scalar(f'weight{k}', weight)
                    summary.scalar(f'reward{k}', reward)


def _checked_weights(name: str, reward_spec: TensorSpec, thresholds: Sequence[float | None],
                     init_weights: float | Sequence[float], max_weight: float | None) -> list[float]:
    """Return the initial weights, one per reward."""
    if reward_spec.ndim != 1:
        raise ValueError(f'{name}.reward_spec: expected a multi-dimensional reward, a spec of rank 1, found '
                         f'{reward_spec}; use an environment with several rewards')
    count = reward_spec.numel
    if len(thresholds) != count:
        raise ValueError(f'{name}.reward_thresholds: expected {count} thresholds, one per reward, found '
                         f'{list(thresholds)}')
    if all(threshold is None for threshold in thresholds):
        raise ValueError(f'{name}.reward_thresholds: all are None, so no weight is adjusted; for constant weights set '
                         'reward_weights of the policy algorithm')
    weights = [float(w) for w in init_weights] if isinstance(init_weights, Sequence) else [float(init_weights)] * count
    if len(weights) != count or not all(weight > 0 for weight in weights):
        raise ValueError(f'{name}.init_weights: expected a number above 0, or {count} of them, found {init_weights}')
    if max_weight is not None and max_weight < max(weights):
        raise ValueError(f'{name}.max_weight: expected at least the largest of init_weights, {max(weights)}, found '
                         f'{max_weight}')
    return weights


@configurable
class LagrangianPredRewardWeightAlgorithm(LagrangianRewardWeightAlgorithm):
    """Learns weights of reward dimensions from the rewards of evaluations, where the policy does not explore.

    Exploration makes a policy look worse than it is, so a tight constraint may be out of its reach. Evaluations are
    rare, so their rewards are averaged over many of them, and each iteration adjusts the weights by this average, from
    the first evaluation on. Needs ``TrainerConfig.evaluate``, and evaluation in the training process:
    ``TrainerConfig.async_eval = False``. After a resume the environments of the evaluation restart their random
    numbers; only the average is restored exactly.

    Args:
        pred_rewards_averager_ctor: called with ``reward_spec``; creates the averager, which is updated by each step of
            an evaluation; ``None``: an ``EMAverager`` with the update rate 1e-4.
        kwargs: arguments of :class:`LagrangianRewardWeightAlgorithm`, except ``lambda_transform``.

    Raises:
        ValueError: as in :class:`LagrangianRewardWeightAlgorithm`.
    """

    _is_evaluated: Tensor

    @takes_arguments_of(LagrangianRewardWeightAlgorithm, without=('lambda_transform', ),
                        defaults={'name': 'LagrangianPredRewardWeightAlgorithm'},
                        after={'pred_rewards_averager_ctor': 'reward_weight_normalization'})
    def __init__(self, reward_spec: TensorSpec, pred_rewards_averager_ctor: Callable[[TensorSpec], Any] | None =
                 functools.partial(EMAverager, update_rate=1e-4), **kwargs: Any):
        super().__init__(reward_spec=reward_spec, **kwargs)
        if pred_rewards_averager_ctor is None:
            pred_rewards_averager_ctor = functools.partial(EMAverager, update_rate=1e-4)
        self._averager = pred_rewards_averager_ctor(reward_spec)
        self.register_buffer('_is_evaluated', torch.zeros((), dtype=torch.bool))

    def check_config(self, config: TrainerConfig) -> None:
        """Reject a configuration without evaluation in this process.

        Raises:
            ConfError: there are no evaluations, or another process evaluates; or as in the base class.
        """
        super().check_config(config)
        if not config.evaluate:
            raise gin_utils.ConfError([problem_at(
                'TrainerConfig', 'evaluate', f'= False, but {type(self).__name__} learns from evaluations',
                'set it to True, or use @LagrangianRewardWeightAlgorithm, which learns from the rollout')])
        if config.async_eval:
            raise gin_utils.ConfError([problem_at(
                'TrainerConfig', 'async_eval', f'= True, but {type(self).__name__} learns from the rewards of '
                'evaluations, which another process does not return', 'set it to False')])

    def rollout_step(self, inputs: TimeStep, state: NestedTensor = None) -> AlgStep:
        """Return an empty step."""
        return AlgStep()

    def predict_step(self, inputs: TimeStep, state: NestedTensor = None) -> AlgStep:
        """Update the average with the untransformed rewards ``[B, K]`` of ``inputs``."""
        rewards = environment_reward(inputs)[inputs.step_type != StepType.FIRST]
        if len(rewards):
            self._averager.train()
            with context.rollout_context():  # averagers are frozen in evaluation, but this one averages evaluations
                self._averager.update(rewards)
            self._is_evaluated.fill_(True)
        return AlgStep()

    def after_train_iter(self, root_inputs: TimeStep | None, rollout_info: Any) -> None:
        """Adjust the weights by the average reward of evaluations; neither argument is used."""
        if self._is_evaluated:
            self._adjust(self._averager.get())
