"""Tabular Q-learning (Watkins and Dayan 1992, doi:10.1007/BF00992698; Sutton and Barto 2018, section 6.5).

After each unroll of T steps, this update runs for each step in order, in all environments at once:

    Q(s[t], a[t]) = Q(s[t], a[t]) + lr * (r[t+1] + discount * d[t+1] * max_a Q(s[t+1], a) - Q(s[t], a[t]))

with ``d = 0`` at a termination and 1 at a truncation. With ``TrainerConfig.unroll_length = 1`` this is Q-learning as in
the book, delayed by one step if environments act in parallel. Differences: if several environments have taken the same
action in the same state at once, the table moves to the mean of the separate results; the rollout breaks ties between
the best actions at random; continuous observations are discretized into a grid.

The algorithm learns the greedy policy, but trains on the latest unroll without a replay buffer, so the engine treats it
as an on-policy algorithm. The table is a buffer without gradient or optimizer.
:mod:`alfx.algorithms.base.observation_grid` numbers the observations.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import context
from alfx.algorithms.base.observation_grid import ObservationGrid
from alfx.algorithms.on_policy_algorithm import OnPolicyAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import Fraction, NonNegative, PositiveFraction, configurable
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.discrete_action import DiscreteAction, mask_invalid
from alfx.utils.schedulers import as_scheduler

QLearningInfo = namedtuple('QLearningInfo', ['step_type', 'reward', 'discount', 'cell', 'action', 'q_values', 'mask'],
                           default_value=())
"""Info of a step, ``[B]`` each: ``cell`` is the number of the observation, ``action`` the index of the action.

``q_values`` ``[B, A]``, only in evaluation, is the row of the table; unused fields are ``()``.
"""

_LARGEST_TABLE = 10**9


@configurable
class QLearningAlgorithm(OnPolicyAlgorithm):
    """Tabular Q-learning with a table of the values of all actions in all states.

    Args:
        observation_spec: nest of specs: integers with bounds (of any shape), booleans, or floating point numbers.
        action_spec: one scalar discrete ``BoundedTensorSpec``, possibly the only leaf of a nest; any ``minimum``.
        reward_spec: rank 0, or rank 1 for K rewards, which are summed with ``reward_weights``.
        lr: learning rate in (0, 1], a number or a scheduler.
        discount: discount of future rewards, in [0, 1].
        epsilon_greedy: probability of a uniformly random action in the rollout, a number or a scheduler.
        epsilon_decay: factor in (0, 1] that multiplies ``epsilon_greedy`` after each episode of any environment.
        epsilon_min: lower bound of the decayed ``epsilon_greedy``.
        grid_size: number of intervals into which the range of each floating point number is divided; one number, or one
            for each in the order of the nest. ``None``: the observation has no floating point numbers.
        grid_bounds: a pair ``(low, high)`` for each floating point number in the order of the nest; values outside are
            clipped. ``None`` instead of a pair or of the whole list: the bounds of the spec.
        initial_value: initial value of all entries; a high value makes untried actions attractive.
        reward_weights: K weights of the rewards; ``None``: all are 1.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ValueError: a number is out of range, the table would be too large, or observations or actions cannot be
            tabulated; the message names the argument.
    """

    updates_are_traceable = False

    _q_table: Tensor
    _num_episodes: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), lr: PositiveFraction | Callable[[], NonNegative] = 0.03,
                 discount: Fraction = 0.99, epsilon_greedy: Fraction | Callable[[], Fraction] = 0.9,
                 epsilon_decay: PositiveFraction = 0.9999, epsilon_min: Fraction = 0.01,
                 grid_size: int | Sequence[int] | None = None,
                 grid_bounds: Sequence[tuple[float, float] | None] | None = None, initial_value: float = 0.0,
                 reward_weights: list[float] | None = None, env: Any = None, config: TrainerConfig | None = None,
                 checkpoint: str | None = None, debug_summaries: bool = False, name: str = 'QLearningAlgorithm'):
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=(), reward_weights=reward_weights, env=env, config=config,
                         checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._grid = ObservationGrid(observation_spec, grid_size, grid_bounds, name)
        self._discrete = DiscreteAction(action_spec, name)
        num_cells, num_actions = self._grid.num_cells, self._discrete.num_actions
        if num_cells * num_actions > _LARGEST_TABLE:
            raise ValueError(f'{name}: a table of {num_cells:,} states and {num_actions} actions is too large; use a '
                             'smaller grid_size, or DqnAlgorithm')
        self._lr = as_scheduler(lr)
        self._discount_factor = discount
        self._epsilon = as_scheduler(epsilon_greedy)
        self._epsilon_decay, self._epsilon_min = epsilon_decay, epsilon_min
        # The extra last row takes the updates of steps without a successor.
        self.register_buffer('_q_table', torch.full((num_cells + 1, num_actions), float(initial_value)))
        self.register_buffer('_num_episodes', torch.zeros((), dtype=torch.int64))

    @property
    def q_table(self) -> Tensor:
        """Value of each action in each state: float32 ``[S, A]``."""
        return self._q_table[:-1]

    def epsilon(self) -> float:
        """Return the current probability of a random action in the rollout."""
        return max(self._epsilon_min, self._epsilon() * self._epsilon_decay**int(self._num_episodes))

    @property
    def exploration_rate(self) -> float:
        """Current probability of a random action in the rollout."""
        return self.epsilon()

    supports_action_mask = True

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the first of the best actions, or with probability ``config.epsilon_greedy`` a random one."""
        q_values, mask = self._q_table[self._grid(inputs.observation)], self._discrete.mask_of(inputs)
        index = self._discrete.explore(mask_invalid(q_values, mask).argmax(-1), self._epsilon_greedy, mask)
        return AlgStep(self._discrete.action(index), (), QLearningInfo(q_values=q_values))

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return one of the best actions, or with probability :meth:`epsilon` a random one."""
        cell, mask = self._grid(inputs.observation), self._discrete.mask_of(inputs)
        index = self._discrete.explore(random_argmax(mask_invalid(self._q_table[cell], mask)), self.epsilon(), mask)
        reward = inputs.reward if self._reward_weights is None else inputs.reward @ self._reward_weights
        info = QLearningInfo(step_type=inputs.step_type, reward=reward, discount=inputs.discount, cell=cell,
                             action=index, mask=mask)
        return AlgStep(self._discrete.action(index), (), info)

    def calc_loss(self, info: Any) -> LossInfo:
        """Return half the squared errors of the current table, ``[T, B]``, for summaries, without gradient."""
        best = mask_invalid(self._q_table[info.cell], info.mask)[1:].amax(-1)
        target = info.reward[1:] + self._discount_factor * info.discount[1:] * best
        error = target - self._q_table[info.cell[:-1], info.action[:-1]]
        error = error * (info.step_type[:-1] != StepType.LAST)
        loss = 0.5 * torch.cat((error, torch.zeros_like(info.reward[:1]))).square()
        return LossInfo(loss=loss, extra=loss)

    def after_update(self, root_inputs: NestedTensor, info: Any) -> None:
        """Learn from an unroll ``[T + 1, B]``, which includes the first step of the next one.

        If several processes train together, each learns from the unrolls of all.
        """
        lr, has_successor = self._lr(), info.step_type != StepType.LAST
        discount = info.discount * self._discount_factor
        cell = torch.where(has_successor, info.cell, len(self._q_table) - 1)
        has_mask = isinstance(info.mask, Tensor)
        steps = cell, info.action, info.reward, discount, info.cell, *((info.mask.float(), ) if has_mask else ())
        cell, action, reward, discount, next_cell, *masks = (context.cat_over_ranks(x, 1) for x in steps)
        for t in range(len(cell) - 1):
            learn(self._q_table, cell[t], action[t], reward[t + 1], discount[t + 1], next_cell[t + 1], lr,
                  masks[0][t + 1] > 0 if has_mask else ())
        self._num_episodes += (cell[:-1] == len(self._q_table) - 1).sum()


# Pure functions of tensors -----------------------------------------------------------------------------------------


def random_argmax(q_values: Tensor) -> Tensor:
    """Return the index ``[B]`` of the largest of ``q_values`` ``[B, A]``, with ties broken at random."""
    return torch.where(q_values == q_values.amax(-1, keepdim=True), torch.rand_like(q_values), -1.0).argmax(-1)


def learn(table: Tensor, cell: Tensor, action: Tensor, reward: Tensor, discount: Tensor, next_cell: Tensor,
          lr: float, mask: NestedTensor = ()) -> None:
    """Run one step of Q-learning in place; repeated pairs of cell and action move to the mean of the results.

    Args:
        table: ``[S, A]``, contiguous.
        cell: int64 ``[B]``.
        action: int64 ``[B]``.
        reward: ``[B]``, for arriving at ``next_cell``.
        discount: ``[B]``, 0 where the episode terminated.
        next_cell: int64 ``[B]``.
        lr: learning rate.
        mask: bool ``[B, A]``, valid actions in ``next_cell``; ``()``: all.
    """
    target = torch.addcmul(reward, discount, mask_invalid(table[next_cell], mask).amax(-1))
    values, entry = table.view(-1), cell * table.shape[1] + action
    moved = torch.lerp(values[entry], target, lr)
    if len(entry) > 1:
        same = (entry.unsqueeze(-1) == entry).to(moved.dtype)
        moved = same @ moved / same.sum(-1)
    values[entry] = moved
