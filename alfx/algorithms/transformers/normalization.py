"""Running statistics of data transformers, for :mod:`alfx.algorithms.data_transformer`."""
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import context, nest
from alfx.algorithms.transformers.field_checks import check_fields
from alfx.data_structures import Experience
from alfx.tensor_specs import BoundedTensorSpec, NestedTensorSpec, TensorSpec
from alfx.utils.normalizers import AdaptiveNormalizer, EMNormalizer, Normalizer, WindowNormalizer

_log = logging.getLogger(__name__)
OFFLINE = 'offline'
UPDATE_MODES = {'replay': context.is_replay, 'rollout': context.is_rollout, 'pretrain': context.is_pretrain,
                OFFLINE: lambda: False}
"""Function that returns whether the process is in this run mode, in which statistics are updated."""


def exact_moments(parts: Callable[[], Iterator[Sequence[Tensor]]], num_dims: int) -> list[tuple[Tensor, Tensor]]:
    """Return mean and variance of each leaf over all data.

    Args:
        parts: called twice; iterates over the leaves of the parts of the data, with the same structure each.
        num_dims: number of dimensions of a leaf that are averaged over.

    Returns:
        Pairs of mean and variance, float64 ``[*spec.shape]`` each.
    """
    def sums(of: Callable[[int, Tensor], Tensor]) -> list[Tensor]:
        total: list[Any] = []
        for leaves in parts():
            values = [of(i, x.to(torch.float64).flatten(0, num_dims - 1)) for i, x in enumerate(leaves)]
            found = [torch.cat([x.sum(0).flatten(), x.new_tensor([len(x)])]) for x in values]
            total = [a + b for a, b in zip(total, found)] if total else found
        return [x[:-1] / x[-1] for x in total]

    shapes = [x.shape[num_dims:] for x in next(parts())]
    means = [x.view(shape) for x, shape in zip(sums(lambda i, x: x), shapes)]
    variances = sums(lambda i, x: (x - means[i]).square())
    return [(mean, x.view(mean.shape)) for mean, x in zip(means, variances)]


def plan_normalizing(owner: str, observation_spec: NestedTensorSpec, fields: Sequence[str] | None,
                     clipping: float) -> tuple[list[int], list[TensorSpec], NestedTensorSpec]:
    """Determine fields and specs of ``ObservationNormalizer``.

    Args:
        owner: name of the caller, for messages.
        observation_spec: nest of specs.
        fields: paths in it; ``None`` for all floats.
        clipping: if above 0, the largest absolute value of a result.

    Returns:
        The positions of the fields among the leaves of the observation, the spec of the statistics of each field, and
        the spec of the normalized observation.

    Raises:
        SpecError: a field does not exist.
    """
    named = nest.flatten_with_path(observation_spec)
    if fields is None:
        chosen = [i for i, (_, spec) in enumerate(named) if spec.is_continuous]
        if len(chosen) < len(named):
            left = [path or 'the observation' for path, spec in named if spec.is_discrete]
            (_log.info if chosen else _log.warning)(
                '%s: integers are not normalized: %s; name them in %s.fields if they are quantities', owner,
                nest.listed(left), owner)
    else:
        numbers = nest.pack_sequence_as(observation_spec, range(len(named)))
        chosen = [nest.get_field(numbers, path) for path in check_fields(owner, observation_spec, fields)]
    leaves = [spec for _, spec in named]
    specs = [TensorSpec(leaves[i].shape) for i in chosen]
    for i, spec in zip(chosen, specs):
        leaves[i] = spec if clipping <= 0 else BoundedTensorSpec(spec.shape, spec.dtype, -clipping, clipping)
    return chosen, specs, nest.pack_sequence_as(observation_spec, leaves)


def make_normalizer(mode: str, specs: NestedTensorSpec, zero_mean: bool, speed: float, window_size: int,
                    update_rate: float) -> Normalizer:
    """Create the observation normalizer named by ``mode``; it updates its statistics only on request."""
    common: dict[str, Any] = dict(auto_update=False, zero_mean=zero_mean, name='observations')
    normalizers: dict[str, Callable[[], Normalizer]] = {
        'adaptive': lambda: AdaptiveNormalizer(specs, speed=speed, **common),
        'window': lambda: WindowNormalizer(specs, window_size=window_size, **common),
        'em': lambda: EMNormalizer(specs, update_rate=update_rate, **common),
    }
    return normalizers[mode]()


def run_reward_spec() -> TensorSpec:
    """Return the reward spec of the run, or of a scalar outside of a run."""
    try:
        return context.get_reward_spec()
    except RuntimeError:
        return TensorSpec(())


def make_reward_normalizer() -> Normalizer:
    """Create a normalizer for the reward spec of the run, or for scalars outside of a run."""
    return AdaptiveNormalizer(run_reward_spec(), auto_update=False, name='rewards')


def episode_returns(experiences: Iterable[Experience]) -> Tensor:
    """Return the sum of the rewards of each episode, float64 ``[E]``; multi-dimensional rewards are summed.

    Args:
        experiences: ``[1, T, ...]`` each, in order; an episode may continue in the next one. The first step is FIRST.
    """
    returns, unfinished = [], torch.zeros((), dtype=torch.float64)
    for experience in experiences:
        is_first = experience.time_step.is_first()[0]
        reward = experience.time_step.reward[0].double().reshape(len(is_first), -1).sum(1)
        number = is_first.long().cumsum(0)  # 0: the unfinished episode
        sums = torch.zeros(int(number[-1]) + 1, dtype=torch.float64, device=reward.device)
        sums.index_add_(0, number, torch.where(is_first, 0.0, reward))
        sums[0] += unfinished.to(sums.device)
        returns.append(sums[:-1])
        unfinished = sums[-1]
    return torch.cat([*returns, unfinished.unsqueeze(0)])[1:]  # drops the empty part before the first FIRST step
