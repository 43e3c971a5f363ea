"""Model predictive control: plan a sequence of actions with a model, execute the first action, then plan again.

A planner has no model of dynamics or rewards. The algorithm that owns the model sets the cost of action sequences
(:meth:`PlanAlgorithm.set_action_sequence_cost_func`). The search methods are in :mod:`alfx.optimizers.traj_optimizers`.
Shapes: ``B`` environments, ``P`` candidates, ``H`` actions of a plan with ``dim`` numbers each. Plans for all
environments are computed at once and independently.
Read next: :mod:`alfx.algorithms.mbrl_algorithm`.
"""
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import (ConfError, Count, Fraction, NonNegative, Positive, Range, check_value, configurable,
                            problem_at, takes_arguments_of)
from alfx.optimizers.traj_optimizers import (CEMOptimizer, CostFunction, ICEMOptimizer, MPPIOptimizer, RandomOptimizer,
                                             TrajOptimizer)
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec

PlannerState = namedtuple('PlannerState', ['prev_plan'], default_value=())
"""Plan of the previous step, ``[B, H, dim]``."""

PlannerInfo = namedtuple('PlannerInfo', ['planner'], default_value=())
"""``planner``: inputs of the loss of a planner that learns."""

_UNBOUNDED = 1e30


@configurable
class PlanAlgorithm(OffPolicyAlgorithm):
    """Base class of planners.

    Args:
        feature_spec: nest of specs of the input of the planner.
        action_spec: spec of one continuous action with finite bounds.
        reward_spec: rank 0 or 1.
        planning_horizon: ``H``, number of actions of a plan.
        upper_bound: largest value of each component of an action; ``None``: the bound of ``action_spec``.
        lower_bound: smallest value of each component of an action; ``None``: the bound of ``action_spec``.
        name: name of this algorithm.

    Raises:
        ConfError: the horizon is below 1, or a lower bound is above the upper one.
        SpecError: the action is discrete, nested or unbounded.
    """

    _declared_capabilities = {'traceable_update': True, 'trains_sequences_at_once': True}  # nothing to train

    def __init__(self, feature_spec: NestedTensorSpec, action_spec: BoundedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), planning_horizon: Count = 25,
                 upper_bound: float | None = None, lower_bound: float | None = None, name: str = 'PlanningAlgorithm'):
        owner = type(self).__name__
        _check_action(owner, action_spec)
        low = action_spec.minimum if lower_bound is None else lower_bound
        high = action_spec.maximum if upper_bound is None else upper_bound
        bounds = [np.broadcast_to(np.asarray(b, np.float32), tuple(action_spec.shape)).reshape(-1) for b in (low, high)]
        _check_bounds(owner, *bounds)
        self._plan_shape = (planning_horizon, action_spec.numel)
        super().__init__(feature_spec, action_spec, reward_spec=reward_spec, train_state_spec=PlannerState(
            prev_plan=TensorSpec(self._plan_shape)), name=name)
        self._lower_bound: Tensor
        self._upper_bound: Tensor
        self.register_buffer('_lower_bound', torch.from_numpy(bounds[0].copy()), persistent=False)
        self.register_buffer('_upper_bound', torch.from_numpy(bounds[1].copy()), persistent=False)
        self._action_sequence_cost_func: CostFunction | None = None

    def set_action_sequence_cost_func(self, action_seq_cost_func: Callable[[NestedTensor, Tensor], Tensor]) -> None:
        """Set the function to minimize: ``f(observation [B, ...], actions [B, P, H, dim]) -> cost [B, P]``."""
        self._action_sequence_cost_func = action_seq_cost_func

    def predict_plan(self, time_step: TimeStep, state: Any, epsilon_greedy: float = 0.0) -> tuple[Tensor, Any]:
        """Plan from the observation.

        Args:
            time_step: ``[B, ...]``.
            state: ``PlannerState``; ignored at the first step of an episode.
            epsilon_greedy: probability of a uniformly random action instead of the planned one.

        Returns:
            The action ``[B, ...]`` and the next state.
        """
        raise NotImplementedError(f'{type(self).__name__}.predict_plan')

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Run :meth:`predict_plan` with the ``epsilon_greedy`` of evaluation."""
        action, state = self.predict_plan(inputs, state, self._epsilon_greedy)
        return AlgStep(action, state, ())

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Run :meth:`predict_plan` without random actions."""
        action, state = self.predict_plan(inputs, state, 0.0)
        return AlgStep(action, state, ())

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any = None) -> AlgStep:
        """Return an empty step; planners do not learn unless a subclass does."""
        return AlgStep((), state, ())

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Return an empty loss."""
        return LossInfo(loss=())

    def _cost(self, observation: NestedTensor, actions: Tensor) -> Tensor:
        """Return the costs ``[B, P]``."""
        if self._action_sequence_cost_func is None:
            raise RuntimeError(f'{self._name}: there is no cost function; call set_action_sequence_cost_func first')
        return self._action_sequence_cost_func(observation, actions)

    def _explored(self, action: Tensor, epsilon_greedy: float) -> Tensor:
        """Replace some actions ``[B, dim]`` by random ones, and reshape them to the spec ``[B, ...]``."""
        if epsilon_greedy:
            is_random = torch.rand(len(action), 1, device=action.device) < epsilon_greedy
            uniform = torch.lerp(self._lower_bound, self._upper_bound, torch.rand_like(action))
            action = torch.where(is_random, uniform, action)
        return action.reshape(len(action), *self._action_spec.shape).to(self._action_spec.dtype)


def _check_action(owner: str, spec: Any) -> None:
    remedy = 'it supports one bounded continuous action'
    if not isinstance(spec, TensorSpec):
        raise SpecError(f'{owner} cannot plan nested actions, found {spec}: {remedy}; give the environment one Box as '
                        'action space')
    if not spec.is_continuous:
        raise SpecError(f'{owner} cannot plan discrete actions, found {spec}: {remedy}; use tree search '
                        '(MCTSAlgorithm) for discrete actions')
    if not isinstance(spec, BoundedTensorSpec):
        raise SpecError(f'{owner} cannot plan unbounded actions, found {spec}: {remedy}')


def _check_bounds(owner: str, low: np.ndarray, high: np.ndarray) -> None:
    if not (np.abs(low) < _UNBOUNDED).all() or not (np.abs(high) < _UNBOUNDED).all():
        raise SpecError(f'{owner} cannot plan unbounded actions, found the bounds {low} and {high}; set {owner}.'
                        'lower_bound and upper_bound, or bound the action space of the environment')
    if not (low <= high).all():
        raise ConfError([problem_at(owner, 'lower_bound', f'= {low.tolist()} is above the upper bound, '
                                    f'{high.tolist()}', 'swap them')])


class _TrajectoryPlanner(PlanAlgorithm):
    """Base class of planners with a trajectory optimizer that starts from the plan of the previous step."""

    _optimizer: TrajOptimizer
    _scalar_var: float | None = None

    def _begin(self, time_step: TimeStep, state: Any) -> tuple[Tensor, Tensor | None]:
        """Return the initial mean and variance ``[B, H, dim]``.

        The mean is the previous plan shifted by one step, with the last action repeated. At a FIRST step it is the
        center of the bounds.
        """
        plan = state.prev_plan
        moved = torch.cat((plan[:, 1:], plan[:, -1:]), 1)
        middle = 0.5 * (self._lower_bound + self._upper_bound)
        mean = torch.where(time_step.is_first().view(-1, 1, 1), middle, moved)
        return mean, None if self._scalar_var is None else torch.full_like(mean, self._scalar_var)

    @torch.no_grad()
    def predict_plan(self, time_step: TimeStep, state: Any, epsilon_greedy: float = 0.0) -> tuple[Tensor, Any]:
        """Plan with the trajectory optimizer, and return the first action and the state."""
        plan, _ = self._optimizer.obtain_solution(time_step.observation, *self._begin(time_step, state))
        return self._explored(plan[:, 0], epsilon_greedy), PlannerState(prev_plan=plan)


@configurable
class RandomShootingAlgorithm(_TrajectoryPlanner):
    """Random shooting: execute the best of random plans (Nagabandi et al. 2017, arXiv:1708.02596).

    Args:
        population_size: number of random plans.
        kwargs: arguments of :class:`PlanAlgorithm`.
    """

    _optimizer_class: type[TrajOptimizer] = RandomOptimizer
    _optimizer_arguments: dict[str, Any] = {}

    @takes_arguments_of(PlanAlgorithm, defaults={'name': 'RandomShootingAlgorithm'},
                        after={'population_size': 'action_spec'})
    def __init__(self, population_size: Count, **kwargs: Any):
        super().__init__(**kwargs)
        self._optimizer = self._optimizer_class(self._plan_shape, population_size, self._cost, self._upper_bound,
                                                self._lower_bound, **self._optimizer_arguments)


@configurable
class CEMPlanAlgorithm(RandomShootingAlgorithm):
    """Planner that uses the cross-entropy method (Chua et al. 2018, arXiv:1805.12114).

    See :class:`~alfx.optimizers.traj_optimizers.CEMOptimizer`.

    Args:
        population_size: number of plans sampled in an iteration.
        elite_size: number of best plans to which the distribution is fitted.
        max_iter_num: maximum number of iterations.
        epsilon: the iterations of an environment end when its largest variance is below this.
        tau: step size of mean and variance towards those of the elites, in (0, 1].
        scalar_var: initial variance of each component; ``None``: the square of half the range between the bounds.
        kwargs: arguments of :class:`RandomShootingAlgorithm`.

    Raises:
        ConfError: an argument is out of range, or there are more elites than plans.
    """

    _optimizer_class = CEMOptimizer

    @takes_arguments_of(RandomShootingAlgorithm, defaults={'name': 'CEMPlanAlgorithm'},
                        after={'reward_spec': 'planning_horizon'})
    def __init__(self, population_size: Count, reward_spec: TensorSpec, elite_size: int = 50, max_iter_num: Count = 5,
                 epsilon: NonNegative = 0.01, tau: Annotated[float, Range(above=0, maximum=1)] = 0.9,
                 scalar_var: Positive | None = None, **kwargs: Any):
        check_value(type(self).__name__, 'elite_size', elite_size, int, minimum=1, maximum=population_size)
        self._scalar_var = scalar_var
        self._optimizer_arguments = dict(self._optimizer_arguments, elite_size=elite_size, epsilon=epsilon, tau=tau,
                                         max_iter_num=max_iter_num)
        super().__init__(population_size=population_size, reward_spec=reward_spec, **kwargs)


@configurable
class ICEMPlanAlgorithm(CEMPlanAlgorithm):
    """Planner that uses CEM with colored noise and fewer samples (iCEM, Pinneri et al. 2020, arXiv:2008.06389).

    See :class:`~alfx.optimizers.traj_optimizers.ICEMOptimizer`.

    Args:
        noise_beta: exponent of the colored noise, whose power falls with ``1 / f^noise_beta``; 0 is white noise.
        population_decay: factor by which the population shrinks in each iteration.
        keep_fraction: fraction of the elites that are candidates again in the next iteration.
        return_mean_elites: execute the mean of the distribution instead of the best plan; steadier if many plans have
            the same cost.
        kwargs: arguments of :class:`CEMPlanAlgorithm`.
    """

    _optimizer_class = ICEMOptimizer

    @takes_arguments_of(CEMPlanAlgorithm, defaults={'name': 'ICEMPlanAlgorithm', 'elite_size': 10, 'max_iter_num': 3,
                                                    'epsilon': 0.0},
                        after={'noise_beta': 'scalar_var'})
    def __init__(self, noise_beta: NonNegative = 2.0, population_decay: Annotated[float, Range(minimum=1)] = 1.25,
                 keep_fraction: Fraction = 0.3, return_mean_elites: bool = False, **kwargs: Any):
        self._optimizer_arguments = dict(noise_beta=noise_beta, population_decay=population_decay,
                                         keep_fraction=keep_fraction, return_mean_elites=return_mean_elites)
        super().__init__(**kwargs)


@configurable
class MPPIPlanAlgorithm(RandomShootingAlgorithm):
    """Planner that uses model predictive path integral control (Williams et al. 2017, arXiv:1707.02342).

    See :class:`~alfx.optimizers.traj_optimizers.MPPIOptimizer`.

    Args:
        max_iter_num: number of iterations.
        temperature: temperature of the weights, relative to the standard deviation of the costs.
        noise_beta: exponent of the colored noise, whose power falls with ``1 / f^noise_beta``; 0 is white noise.
        scalar_var: variance of the noise; ``None``: the square of half the range between the bounds.
        kwargs: arguments of :class:`RandomShootingAlgorithm`.
    """

    _optimizer_class = MPPIOptimizer

    @takes_arguments_of(RandomShootingAlgorithm, defaults={'name': 'MPPIPlanAlgorithm'},
                        after={'max_iter_num': 'planning_horizon'})
    def __init__(self, max_iter_num: Count = 3, temperature: Positive = 0.1, noise_beta: NonNegative = 0.0,
                 scalar_var: Positive | None = None, **kwargs: Any):
        self._scalar_var = scalar_var
        self._optimizer_arguments = dict(max_iter_num=max_iter_num, temperature=temperature, noise_beta=noise_beta)
        super().__init__(**kwargs)
