"""Count-based exploration: a bonus that decreases with the number of visits (Tang et al. 2017, arXiv:1611.04717).

    r[t] = beta / sqrt(n(cell(o[t])))

with n the number of visits to the cell of the observation arrived at, including the current visit (Strehl and Littman
2008, doi:10.1016/j.jcss.2007.08.009; Bellemare et al. 2016, arXiv:1606.01868). Observations are mapped to cells by
SimHash (Tang et al., algorithm 1), the signs of k random projections, or by a grid if they have few components. At
FIRST no transition has happened: the reward is 0, but the visit is counted. Differs from the paper: observations are
optionally normalized and not preprocessed otherwise; counts are stored in a table of fixed size 2^k rather than a hash
table; simultaneous visits of several environments are counted before any of them is rewarded.

It is a simple baseline for learned novelty bonuses. Counts never decay, so the bonus of a visited cell stays small for
the rest of a run, even if the policy has forgotten it.
"""
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.base.observation_grid import ObservationGrid
from alfx.algorithms.intrinsic.intrinsic_reward import IntrinsicRewardAlgorithm, is_first, rows
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Positive, Range, configurable, problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec

CountMeasures = namedtuple('CountMeasures', ['reward', 'count'], default_value=())
"""Output of ``predict_step``, float32 ``[B]`` each: the reward, NaN at FIRST; the number of visits in training."""

_MOST_BITS = 24
_LARGEST_TABLE = 2**_MOST_BITS


@configurable
class CountBonusAlgorithm(IntrinsicRewardAlgorithm):
    """Reward for observations that have rarely been visited.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: not used; part of the interface of an intrinsic reward module.
        bonus_coef: beta, the reward of the first visit.
        counting: 'simhash': observations that point in similar directions share a cell; or 'grid': the cells of an
            :class:`~alfx.algorithms.base.observation_grid.ObservationGrid`, for bounded integers and a few floating
            point numbers.
        num_bits: number of bits of a SimHash code, at most 24; more bits distinguish more observations.
        observation_adapt_speed: normalize observations for SimHash by running statistics with this adaptation speed,
            see :class:`~alfx.utils.normalizers.AdaptiveNormalizer`; codes change as long as the statistics do.
            ``None``: no normalization, for observations that vary around zero.
        grid_size: number of grid cells along each floating point number; one number, or one for each in the order of
            the nest.
        grid_bounds: grid range ``(low, high)`` of each floating point number in the order of the nest; ``None`` instead
            of a pair or of the whole argument: the bounds of the spec.
        name: name of this algorithm.

    Raises:
        ConfError: an argument is out of range, or belongs to the other kind of counting.
        ValueError: the observations do not fit a grid, or the grid is too large.
    """

    _declared_capabilities = {'traceable_update': True}  # nothing is trained

    _counts: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec = None,
                 bonus_coef: Positive = 1.0, counting: Literal['simhash', 'grid'] = 'simhash',
                 num_bits: Annotated[int, Range(1, _MOST_BITS)] | None = None,
                 observation_adapt_speed: Positive | None = None, grid_size: int | Sequence[int] | None = None,
                 grid_bounds: Sequence[tuple[float, float] | None] | None = None, name: str = 'CountBonusAlgorithm'):
        super().__init__(observation_spec, observation_adapt_speed, observation_clip_value=None,
                         reward_adapt_speed=None, reward_zero_mean=False, name=name)
        owner = type(self).__name__
        foreign = (dict(grid_size=grid_size, grid_bounds=grid_bounds) if counting == 'simhash' else
                   dict(num_bits=num_bits, observation_adapt_speed=observation_adapt_speed))
        for argument, value in foreign.items():
            if value is not None:
                raise ConfError([problem_at(owner, argument, f"= {value} has no effect with counting = '{counting}'",
                                            'remove one of the two')])
        self._cells: SimHash | ObservationGrid
        if counting == 'simhash':
            self._cells = SimHash(observation_spec, num_bits or 16, owner)
        else:
            self._cells = ObservationGrid(observation_spec, grid_size, grid_bounds, owner)
        if self._cells.num_cells > _LARGEST_TABLE:
            raise ValueError(f'{owner}: a table of {self._cells.num_cells:,} cells is too large; use a smaller '
                             "grid_size, or counting = 'simhash'")
        self._bonus_coef = bonus_coef
        self.register_buffer('_counts', torch.zeros(self._cells.num_cells, dtype=torch.int64))

    @property
    def counts(self) -> Tensor:
        """Number of visits to each cell, int64 ``[C]``."""
        return self._counts

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Return the reward ``[B]`` that a visit in training would give now; ``info``: ``CountMeasures``."""
        cells = self._cells(self._normalized(inputs.observation))
        is_rewarded = ~is_first(inputs.step_type)
        counts = self._counts[cells]
        bonus = self._bonus(counts + 1)
        info = CountMeasures(torch.where(is_rewarded, bonus, torch.nan), counts.float())
        return AlgStep(bonus * is_rewarded, (), info)

    def rollout_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Count the observations ``[B, ...]``, then reward them: ``output`` ``[B]``, 0 at FIRST."""
        self._update_statistics(inputs.observation)
        cells = self._cells(self._normalized(inputs.observation))
        return AlgStep(self._visit(cells) * ~is_first(inputs.step_type))

    def reward_unroll(self, inputs: TimeStep) -> AlgStep:
        """Compute the rewards ``[T + 1, B]`` of an unroll, counting its steps in order. See the base class."""
        self._update_statistics(nest.map_structure(lambda x: rows(x[1:]), inputs.observation))
        cells = self._cells(self._normalized(nest.map_structure(rows, inputs.observation)))
        cells = cells.reshape(inputs.step_type.shape)
        rewards = [torch.zeros(cells.shape[1], device=cells.device), *(self._visit(step) for step in cells[1:])]
        return AlgStep(torch.stack(rewards) * ~is_first(inputs.step_type))

    def train_step(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Return an empty step: nothing is trained."""
        return AlgStep()

    def train_sequence(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Return an empty step: nothing is trained."""
        return AlgStep()

    def calc_loss(self, info: Any) -> LossInfo:
        """Return an empty ``LossInfo``."""
        return LossInfo()

    def _visit(self, cells: Tensor) -> Tensor:
        """Count one visit to each of ``cells``, int64 ``[B]``; return their bonus afterwards ``[B]``."""
        if context.freeze_statistics():  # the final step of an unroll, which the next unroll counts
            return self._bonus(self._counts[cells] + 1)
        everywhere = context.cat_over_ranks(cells)  # visits of all ranks
        self._counts.index_add_(0, everywhere, torch.ones_like(everywhere))
        return self._bonus(self._counts[cells])

    def _bonus(self, counts: Tensor) -> Tensor:
        return self._bonus_coef * counts.float().rsqrt()


class SimHash(nn.Module):
    """Maps observations to codes by the signs of random projections (Charikar 2002, doi:10.1145/509907.509965).

    Two observations share a sign with probability ``1 - angle / pi``.

    Args:
        observation_spec: nest of specs; all components are concatenated to one vector.
        num_bits: number of projections, whose weights are standard normal.
        owner: class named in error messages.

    Raises:
        ConfError: the observation is a single number, which has only two directions.
    """

    projection: Tensor
    _powers: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, num_bits: int, owner: str):
        super().__init__()
        size = sum(spec.numel for spec in nest.flatten(observation_spec))
        if size < 2:
            raise ConfError([problem_at(owner, 'counting', f"= 'simhash' hashes directions, but {size} "
                                        'number(s) have at most two', "choose counting = 'grid'")])
        self._num_bits = num_bits
        self.register_buffer('projection', torch.randn(size, num_bits))
        self.register_buffer('_powers', 2**torch.arange(num_bits), persistent=False)

    @property
    def num_cells(self) -> int:
        """Number of codes."""
        return 2**self._num_bits

    def forward(self, observation: NestedTensor) -> Tensor:
        """Compute the codes, int64 ``[B]``, of observations ``[B, ...]``: bit i is set if projection i is positive."""
        leaves = [leaf.reshape(len(leaf), -1).float() for leaf in nest.flatten(observation)]
        vector = leaves[0] if len(leaves) == 1 else torch.cat(leaves, -1)
        return ((vector @ self.projection > 0) * self._powers).sum(-1)
