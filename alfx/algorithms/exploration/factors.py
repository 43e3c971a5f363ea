"""Factors of exploration bonuses. An :class:`~alfx.algorithms.exploration.bonus.ExplorationBonus` multiplies them.

A factor computes a number ``[T, B]`` for arriving at each step of a block. In the formulas o[t] is the observation
arrived at, phi[t] its feature and e[t] the prediction error of random network distillation, the norm and not its
square. ``N[t]`` is the number of visits to o[t] in its episode, including the current one; the first step of an episode
counts as a visit.
"""
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.algorithms.exploration.memory import EpisodicMemory, ObservationHash, Places, previous_rows
from alfx.algorithms.exploration.normalization import Moments
from alfx.algorithms.intrinsic.intrinsic_reward import rows
from alfx.gin_utils import ConfError, Count, Fraction, Positive, Range, check_value, configurable, problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec


class Seen(NamedTuple):
    """Data about a block of steps that factors read.

    Attributes:
        observation: nest ``[T, B, ...]``.
        places: places of the steps in their episodes.
        feature: ``[T, B, F]``; ``()`` unless a factor ``needs`` it.
        error: ``[T, B]``; ``()`` unless a factor ``needs`` it.
        prev_action: nest of ``[T, B, ...]``.
        inverse_model: the ``ICMAlgorithm`` of the features, if there is one.
        is_new: the steps have just been collected, and enter the statistics.
    """

    observation: NestedTensor
    places: Places
    feature: Any = ()
    error: Any = ()
    prev_action: NestedTensor = ()
    inverse_model: Any = None
    is_new: bool = True


class Factor(nn.Module):
    """Base class of factors.

    Args:
        observation_spec: nest of specs of the observation.
        num_features: F; 0 if there are no features.

    Attributes:
        needs: 'feature' or 'error', what the factor needs besides observations; '' for neither.
        state_spec: spec of the state of each environment between blocks.
        capacity: maximum number of steps in a block; ``None``: any number.
        needs_ensemble: the factor needs an ``inverse_model`` with several forward models.
        scope: 'episode': it depends on all earlier steps of the episode; 'step': only on the step, its previous step
            and the models; 'batch': it compares the steps of a sampled batch.
    """

    needs = ''
    state_spec: NestedTensorSpec = ()
    capacity: int | None = None
    needs_ensemble = False
    scope = 'episode'

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int):
        super().__init__()

    def check_batch(self, num_steps: int) -> None:
        """Reject a number of rewarded steps in a sampled batch.

        Raises:
            ConfError: a factor of scope 'batch' needs more.
        """

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the factor ``[T, B]`` and the next state ``[B, ...]``; the factor is ignored at FIRST."""
        raise NotImplementedError(f'{type(self).__name__}.forward')


@configurable
class EpisodicCount(Factor):
    """Factor that decreases with the number of visits to an observation in the episode.

    1 at the first visit and 0 afterwards (``decay = 'first'``), or ``N[t]^(-1/2)`` (``decay = 'inverse_sqrt'``).

    Args:
        observation_spec: nest of specs of the observation.
        num_features: not used.
        decay: 'first' or 'inverse_sqrt'.
        resolution: floating point numbers are rounded to multiples of it before they are compared; required if the
            observation has any.
        field: path of the part of the observation that is counted; '': all of it.
        capacity: number of steps of an episode that are remembered; in a longer episode the oldest steps are forgotten.

    Raises:
        ConfError: ``decay`` or ``resolution`` is invalid.
        LookupError: the observation has no such field.
    """

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int = 0, decay: str = 'first',
                 resolution: Positive | None = None, field: str = '', capacity: Count = 1000):
        super().__init__(observation_spec, num_features)
        owner = type(self).__name__
        check_value(owner, 'decay', decay, str, choices=('first', 'inverse_sqrt'))
        self._field, self._is_first_only = field, decay == 'first'
        self._hash = ObservationHash(nest.get_field(observation_spec, field), resolution, owner)
        self.capacity = capacity
        self._memory = EpisodicMemory(capacity, TensorSpec((), torch.int64))
        self.state_spec = self._memory.state_spec

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the factor ``[T, B]`` and the hashes of the episode ``[B, capacity]``; see the base class."""
        hashes = self._hash(nest.get_field(seen.observation, self._field))
        others, are_earlier = self._memory.earlier(hashes, state, seen.places)
        count = ((others.unsqueeze(1) == hashes.T.unsqueeze(-1)) & are_earlier).sum(-1).T
        factor = (count == 0).float() if self._is_first_only else (count + 1).float().rsqrt()
        return factor, self._memory.add(hashes, state, seen.places)


@configurable
class EllipticalNovelty(Factor):
    """Distance of a feature from the earlier ones of the episode (Henaff et al. 2022, E3B, arXiv:2210.05805).

        b[t] = phi[t]^T C[t]^(-1) phi[t],  C[t] = regularization * I + sum_{s < t} phi[s] phi[s]^T

    with s from the first step of the episode on. All steps of a block are computed at once: with P the rows of their
    features, M the inverse of C before the block and L the Cholesky factor of ``I + P M P^T``, b[t] is ``L[t, t]^2 -
    1``.

    Args:
        observation_spec: not used.
        num_features: F.
        regularization: smaller values reward new directions more.
    """

    needs = 'feature'

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int, regularization: Positive = 0.1):
        super().__init__(observation_spec, num_features)
        self._regularization = regularization
        self.state_spec = TensorSpec((num_features, num_features), torch.float64)

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return b ``[T, B]`` and the sum of ``phi phi^T`` over the episode ``[B, F, F]``; see the base class."""
        feature, segment = seen.feature.transpose(0, 1).double(), seen.places.segment.T
        identity = torch.eye(state.shape[-1], dtype=state.dtype, device=state.device)
        applied = torch.linalg.solve(self._regularization * identity + state, feature.mT)
        applied = torch.where((segment == 0).unsqueeze(1), applied, feature.mT / self._regularization)
        products = (feature @ applied) * (segment.unsqueeze(-1) == segment.unsqueeze(1))
        identity = torch.eye(len(seen.feature), dtype=state.dtype, device=state.device)
        factor = torch.linalg.cholesky_ex(products + identity).L  # NaN in features is reported by the caller
        kept = feature * (segment == segment[:, -1:]).unsqueeze(-1)
        state = kept.mT @ kept + state * (segment[:, -1] == 0).reshape(-1, 1, 1)
        return (factor.diagonal(dim1=1, dim2=2).square() - 1).T.float(), state


@configurable
class NearestNeighbors(Factor):
    """Distance of a feature from its nearest neighbors among the earlier ones of the episode.

    With d_k the distances of the nearest ones, 'kernel' is the pseudo-count of Never Give Up (Badia et al. 2020,
    arXiv:2002.06038):

        s = c + sqrt(sum_k K_k),  K_k = epsilon / (max(d_k^2 / m - 0.008, 0) + epsilon),  b = 1 / s, or 0 if s > 8

    with m the running mean of all ``d_k^2`` and ``c = 0.001``; 'log' is ``log(1 + mean_k d_k)``, as in RE3 (Seo et al.
    2021, arXiv:2102.09430), where the neighbors are from all episodes.

    Args:
        observation_spec: not used.
        num_features: F.
        kind: 'kernel' or 'log'.
        num_neighbors: number of neighbors; fewer at the start of an episode.
        epsilon: constant of the kernel; smaller values reward differences more. Not used by 'log'.
        capacity: number of steps of an episode that are remembered; in a longer episode the oldest steps are forgotten.

    Raises:
        ConfError: ``kind`` is unknown, or ``num_neighbors`` exceeds ``capacity``.
    """

    needs = 'feature'

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int, kind: Literal['kernel', 'log'] = 'kernel',
                 num_neighbors: Count = 10, epsilon: Positive = 1e-3, capacity: Count = 1000):
        super().__init__(observation_spec, num_features)
        check_value(type(self).__name__, 'num_neighbors', num_neighbors, int, minimum=1, maximum=capacity)
        self._kind, self._num_neighbors, self._epsilon, self.capacity = kind, num_neighbors, epsilon, capacity
        self._memory = EpisodicMemory(capacity, TensorSpec((num_features, )))
        self._moments = Moments()
        self.state_spec = self._memory.state_spec

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return b ``[T, B]`` and the features of the episode ``[B, capacity, F]``; see the base class."""
        feature = seen.feature.transpose(0, 1)
        others, are_earlier = self._memory.earlier(seen.feature, state, seen.places)
        feature, others = feature.double(), others.double()  # in float32 small distances would be imprecise
        product = feature @ others.mT
        square = feature.square().sum(-1, keepdim=True) + others.square().sum(-1).unsqueeze(1) - 2 * product
        square = square.clamp(min=0).float().masked_fill(~are_earlier, torch.inf)
        nearest = square.topk(min(self._num_neighbors, square.shape[-1]), largest=False, sorted=False).values
        exists = nearest.isfinite()
        if self._kind == 'log':
            distance = nearest.masked_fill(~exists, 0).sqrt().sum(-1) / exists.sum(-1).clamp(min=1)
            bonus = torch.log1p(distance)
        else:
            self._moments.update(nearest[exists])
            relative = (nearest / self._moments.mean.clamp(min=1e-12) - 0.008).clamp(min=0)
            similarity = 0.001 + (self._epsilon / (relative + self._epsilon)).sum(-1).sqrt()
            bonus = torch.where(similarity > 8, 0, 1 / similarity)
        return bonus.T, self._memory.add(seen.feature, state, seen.places)


@configurable
class ParticleEntropy(Factor):
    """Distance of a feature from its nearest neighbors in the sampled batch (Liu and Abbeel 2021, APT,
    arXiv:2103.04551, eq. 5): ``log(1 + mean_k |phi - phi_k|)``.

    The average over the batch estimates the entropy of the states in the replay buffer. The neighbors are steps that
    are rewarded; a step is not its own neighbor, but equal features of other steps are.

    Args:
        observation_spec: not used.
        num_features: F.
        num_neighbors: number of neighbors; more make the reward less noisy and less local.

    Raises:
        ConfError: a batch has too few steps; raised later, by :meth:`check_batch`.
    """

    needs, scope = 'feature', 'batch'

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int, num_neighbors: Count = 12):
        super().__init__(observation_spec, num_features)
        self._num_neighbors = num_neighbors

    def check_batch(self, num_steps: int) -> None:
        """Reject batches with fewer than ``num_neighbors + 1`` steps."""
        if num_steps <= self._num_neighbors:
            raise ConfError([problem_at(type(self).__name__, 'num_neighbors', f'= {self._num_neighbors} neighbors of a '
                                        f'step do not exist in a batch of {num_steps} steps (mini_batch_size times '
                                        'mini_batch_length - 1)', 'increase TrainerConfig.mini_batch_size')])

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the factor ``[T, B]``, and ``()``; see the base class."""
        follows = seen.places.follows
        self.check_batch(follows[1:].numel())
        feature = seen.feature[follows].double()  # in float32 the products would be imprecise for small distances
        distance = torch.cdist(feature, feature, compute_mode='use_mm_for_euclid_dist').float()
        distance.fill_diagonal_(torch.inf)
        nearest = distance.topk(min(self._num_neighbors, len(feature)), largest=False, sorted=False).values
        exists = nearest.isfinite()
        mean = nearest.masked_fill(~exists, 0).sum(-1) / exists.sum(-1).clamp(min=1)
        return torch.zeros_like(follows, dtype=mean.dtype).masked_scatter(follows, mean.log1p()), state


@configurable
class Impact(Factor):
    """Change of the feature by a step (Raileanu and Rocktäschel 2020, RIDE, arXiv:2002.12292):
    ``|phi[t] - phi[t - 1]|``.

    Args:
        observation_spec: not used.
        num_features: F.
    """

    needs, scope = 'feature', 'step'

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int):
        super().__init__(observation_spec, num_features)
        self.state_spec = TensorSpec((num_features, ))

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the change ``[T, B]`` and the latest features ``[B, F]``; see the base class."""
        return (seen.feature - previous_rows(seen.feature, state)).norm(dim=-1), seen.feature[-1]


@configurable
class Disagreement(Factor):
    """Variance of several forward models that predict the feature (Pathak et al. 2019, arXiv:1906.04161).

    With f_n the models, it is ``mean_F Var_n f_n(phi[t - 1], action)``. The models differ in their initial weights, and
    learn from the same steps.

    Args:
        observation_spec: not used.
        num_features: F.
    """

    needs, scope, needs_ensemble = 'feature', 'step', True

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int):
        super().__init__(observation_spec, num_features)
        self.state_spec = TensorSpec((num_features, ))

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the variance ``[T, B]`` and the latest features ``[B, F]``; see the base class."""
        before, action = nest.map_structure(rows, (previous_rows(seen.feature, state), seen.prev_action))
        variance = seen.inverse_model.disagreement(before, action)
        return variance.reshape(seen.feature.shape[:2]), seen.feature[-1]


@configurable
class NoveltyGain(Factor):
    """Increase of novelty by a step, ``max(e[t] - share * e[t - 1], 0)`` (Zhang et al. 2021, NovelD, preprint
    arXiv:2012.08621).

    Args:
        observation_spec: not used.
        num_features: not used.
        share: share of the previous novelty to subtract; with 1 only an increase is rewarded.
    """

    needs, scope, state_spec = 'error', 'step', TensorSpec(())

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int = 0, share: Fraction = 0.5):
        super().__init__(observation_spec, num_features)
        self._share = share

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the increase ``[T, B]`` and the latest errors ``[B]``; see the base class."""
        return (seen.error - self._share * previous_rows(seen.error, state)).clamp(min=0), seen.error[-1]


@configurable
class LifelongNovelty(Factor):
    """Modulation by novelty in the whole run (Badia et al. 2020, Never Give Up, arXiv:2002.06038).

    ``e[t]^2``, minus its running mean and divided by its running standard deviation, plus 1, clipped to
    ``[1, maximum]``.

    Args:
        observation_spec: not used.
        num_features: not used.
        maximum: maximum of the factor.
    """

    needs, scope = 'error', 'step'

    def __init__(self, observation_spec: NestedTensorSpec, num_features: int = 0,
                 maximum: Annotated[float, Range(above=1)] = 5.0):
        super().__init__(observation_spec, num_features)
        self._maximum, self._moments = maximum, Moments()

    def forward(self, seen: Seen, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the modulation ``[T, B]`` and ``()``; see the base class."""
        square = seen.error.square()
        if seen.is_new:
            self._moments.update(square[seen.places.follows])
        return (1 + (square - self._moments.mean) / self._moments.std).clamp(1, self._maximum), ()
