"""Count-based exploration: a bonus that falls with the number of visits (Tang et al. 2017, arXiv:1611.04717).

    r[t] = beta / sqrt(n(cell(o[t])))

with n the number of visits to the cell of the observation arrived at, this one included (Strehl and Littman 2008,
doi:10.1016/j.jcss.2007.08.009; Bellemare et al. 2016, arXiv:1606.01868). An observation gets its cell by SimHash (Tang
et al., algorithm 1): the signs of k random projections, or by a grid, where it has few numbers. At FIRST nobody has
arrived anywhere: there the reward is 0, but the visit counts. What differs from the paper: an observation is not
preprocessed but for being normalized, if asked for; the codes are a table of 2^k counts, of a fixed size, rather than a
hash table; visits of several environments at the same time count before any of them is rewarded.

It is a plain baseline for what learns to tell new from old. Counts never fade, so that the bonus of what has been seen
stays small for the rest of a run, also where the policy has forgotten it.
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.intrinsic.intrinsic_reward import IntrinsicRewardAlgorithm, is_first, rows
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, check_value, configurable
from alfx.gin_utils.value_checks import Positive, problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.engine.capabilities import Capabilities
from alfx.algorithms.base.observation_grid import ObservationGrid

CountMeasures = namedtuple('CountMeasures', ['reward', 'count'], default_value=())
"""What ``predict_step`` yields, float32 ``[B]`` each: the reward, NaN at FIRST; the number of visits in training."""

_MOST_BITS = 24
_LARGEST_TABLE = 2**_MOST_BITS


@configurable
class CountBonusAlgorithm(IntrinsicRewardAlgorithm):
    """A reward for observations that have seldom been visited.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: not used; it is part of the interface of an intrinsic reward module.
        bonus_coef: beta, the reward of the first visit.
        counting: 'simhash': observations count as the same if they point in similar directions; or 'grid': if they
            are in the same cell of an :class:`~alfx.algorithms.base.observation_grid.ObservationGrid`, for integers
            with bounds and a few floating point numbers.
        num_bits: of a code of SimHash, at most 24: the more, the fewer observations are taken for the same.
        observation_adapt_speed: normalize observations for SimHash by statistics of this speed of adaption, see
            :class:`~alfx.utils.normalizers.AdaptiveNormalizer`; codes change as long as the statistics do. ``None``:
            do not, for observations that vary around zero.
        grid_size: of the grid: into how many parts the range of each floating point number is divided; one number, or
            one for each in the order of the nest.
        grid_bounds: of the grid: a pair ``(low, high)`` for each floating point number in the order of the nest;
            ``None`` in place of a pair or of the whole: the bounds of the spec.
        name: name of this algorithm.

    Raises:
        ConfError: an argument is out of range, or belongs to the other way of counting.
        ValueError: there is no grid of such observations, or it is too large.
    """

    _counts: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec = None,
                 bonus_coef: Positive = 1.0, counting: str = 'simhash', num_bits: int | None = None,
                 observation_adapt_speed: Positive | None = None, grid_size: int | Sequence[int] | None = None,
                 grid_bounds: Sequence[tuple[float, float] | None] | None = None,
                 name: str = 'CountBonusAlgorithm'):
        super().__init__(observation_spec, observation_adapt_speed, observation_clip_value=None,
                         reward_adapt_speed=None, reward_zero_mean=False, name=name)
        owner = type(self).__name__
        check_value(owner, 'counting', counting, str, choices=('simhash', 'grid'))
        check_value(owner, 'num_bits', num_bits, int, minimum=1, maximum=_MOST_BITS, optional=True)
        foreign = (dict(grid_size=grid_size, grid_bounds=grid_bounds) if counting == 'simhash' else
                   dict(num_bits=num_bits, observation_adapt_speed=observation_adapt_speed))
        for argument, value in foreign.items():
            if value is not None:
                raise ConfError([problem_at(owner, argument, f"= {value} has no meaning with counting = '{counting}'",
                                            'leave out one of the two')])
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
        """int64 ``[C]``: the number of visits to each cell."""
        return self._counts

    def own_capabilities(self) -> Capabilities:
        """True: nothing is trained."""
        return super().own_capabilities()._replace(traceable_update=True)

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """The reward that a visit in training would be given now, ``[B]``; ``info``: ``CountMeasures``."""
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
        """The rewards ``[T + 1, B]`` of an unroll, counted step by step. See the base class."""
        self._update_statistics(nest.map_structure(lambda x: rows(x[1:]), inputs.observation))
        cells = self._cells(self._normalized(nest.map_structure(rows, inputs.observation)))
        cells = cells.reshape(inputs.step_type.shape)
        rewards = [torch.zeros(cells.shape[1], device=cells.device), *(self._visit(step) for step in cells[1:])]
        return AlgStep(torch.stack(rewards) * ~is_first(inputs.step_type))

    def train_step(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Nothing: there is nothing to train."""
        return AlgStep()

    def train_sequence(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Nothing."""
        return AlgStep()

    def calc_loss(self, info: Any) -> LossInfo:
        """No loss."""
        return LossInfo()

    def _visit(self, cells: Tensor) -> Tensor:
        """Count one visit to each of ``cells``, int64 ``[B]``; their bonus afterwards ``[B]``."""
        everywhere = context.cat_over_ranks(cells)  # what all processes that train together visit
        self._counts.index_add_(0, everywhere, torch.ones_like(everywhere))
        return self._bonus(self._counts[cells])

    def _bonus(self, counts: Tensor) -> Tensor:
        return self._bonus_coef * counts.float().rsqrt()


class SimHash(nn.Module):
    """Numbers observations by the signs of random projections (Charikar 2002, doi:10.1145/509907.509965).

    Two observations share a sign with probability ``1 - angle / pi``.

    Args:
        observation_spec: nest of specs; the numbers of all of them are one vector.
        num_bits: number of projections, whose weights are standard normal.
        owner: who needs it, for messages.

    Raises:
        ConfError: the observation is a single number, of which there are but two directions.
    """

    projection: Tensor
    _powers: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, num_bits: int, owner: str):
        super().__init__()
        size = sum(spec.numel for spec in nest.flatten(observation_spec))
        if size < 2:
            raise ConfError([problem_at(owner, 'counting', f"= 'simhash' tells directions apart, of which {size} "
                                        'number(s) have too few', "choose counting = 'grid'")])
        self._num_bits = num_bits
        self.register_buffer('projection', torch.randn(size, num_bits))
        self.register_buffer('_powers', 2**torch.arange(num_bits), persistent=False)

    @property
    def num_cells(self) -> int:
        """How many codes there are."""
        return 2**self._num_bits

    def forward(self, observation: NestedTensor) -> Tensor:
        """The codes, int64 ``[B]``, of observations ``[B, ...]``: bit i is whether projection i is positive."""
        leaves = [leaf.reshape(len(leaf), -1).float() for leaf in nest.flatten(observation)]
        vector = leaves[0] if len(leaves) == 1 else torch.cat(leaves, -1)
        return ((vector @ self.projection > 0) * self._powers).sum(-1)
