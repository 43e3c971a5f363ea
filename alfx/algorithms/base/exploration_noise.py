"""Exploration of deterministic policies: action noise, and uniformly random actions.

Noise is in units of half the range of each action, so that the same number suits any bounds: 0.1 is a twentieth of the
range. Noisy actions are clipped to the bounds.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.gin_utils import Count, Fraction, NonNegative, Positive, configurable
from alfx.networks.action_specs import action_range
from alfx.networks.ou_process import OUProcess
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec, select
from alfx.utils.discrete_action import suited_algorithms
from alfx.utils.schedulers import as_scheduler


class ActionBounds(nn.Module):
    """Bounds of a nest of continuous actions.

    Args:
        action_spec: nest of ``BoundedTensorSpec`` of floats.
        name: owner of the bounds, for error messages.

    Raises:
        SpecError: an action is discrete, or a bound is missing or infinite.
    """

    def __init__(self, action_spec: NestedTensorSpec, name: str):
        super().__init__()
        self._structure = nest.structure(action_spec)
        self._single = not nest.is_nested(action_spec)
        if any(spec.is_discrete for spec in nest.flatten(action_spec)):
            raise SpecError(f'{name}: expected continuous actions, found {action_spec}; '
                            f'{suited_algorithms(action_spec)}')
        for i, spec in enumerate(nest.flatten(action_spec)):
            middle, half = action_range(spec, name, 'exploration noise is scaled to them')
            for bound, value in (('low', middle - half), ('high', middle + half), ('half', half)):
                self.register_buffer(f'_{bound}_{i}', value, persistent=False)

    def _map(self, func: Callable[..., Tensor], bounds: str, *nests: NestedTensor) -> Any:
        """Apply ``func(*tensors, *bounds)`` to each action; ``bounds`` are names such as 'low high'."""
        if self._single:
            return func(*nests, *self._of(0, bounds))
        leaves = zip(*(nest.flatten(nested) for nested in nests))
        return self._structure.unflatten([func(*tensors, *self._of(i, bounds)) for i, tensors in enumerate(leaves)])

    def _of(self, i: int, bounds: str) -> list[Tensor]:
        return [self._buffers[f'_{bound}_{i}'] for bound in bounds.split()]  # type: ignore[misc]

    def clip(self, action: NestedTensor) -> NestedTensor:
        """Clip actions ``[B, ...]`` to the bounds."""
        return self._map(torch.clamp, 'low high', action)

    def add_noise(self, action: NestedTensor, noise: NestedTensor) -> NestedTensor:
        """Add ``noise`` to ``action`` and clip the result.

        Args:
            action: nest of ``[B, ...]``.
            noise: nest of the same structure, in units of half the range.
        """
        return self._map(_noisy, 'half low high', action, noise)

    def sample_like(self, action: NestedTensor) -> NestedTensor:
        """Sample uniformly random actions of the shape of ``action`` ``[B, ...]``."""
        return self._map(lambda a, low, high: torch.rand_like(a).mul_(high - low).add_(low), 'low high', action)


def _noisy(action: Tensor, noise: Tensor, half: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.addcmul(action, noise, half).clamp(low, high)


def choose(probability: float, first: NestedTensor, second: NestedTensor) -> NestedTensor:
    """Choose, for each element of the batch, ``first`` with the given probability and ``second`` otherwise.

    Both are nests of ``[B, ...]``, whose actions are all chosen together.
    """
    leaf = nest.flatten(first)[0]
    return select(torch.rand(leaf.shape[0], device=leaf.device) < probability, first, second)


class HeldNoise(NamedTuple):
    """State of :class:`ZetaRepeat`: standard normal noise, nest of ``[B, ...]``, and the number of further steps int64
    ``[B]`` for which it is held."""

    noise: NestedTensor
    steps_left: Any


@configurable
class ZetaRepeat:
    """Exploration noise that is held for a random number n of steps, with ``P(n) ~ n ** -exponent``.

    Noise that is kept for several steps moves the state further than independent noise, while the distribution of each
    action by itself stays the same. FlashSAC explores in this way, with the defaults; Dabney et al. 2021
    (arXiv:2006.01782) do so with random discrete actions. Each environment holds its own noise, and draws a new one at
    the first step of an episode.

    Args:
        exponent: larger values give shorter repetitions.
        max_length: largest number of steps.
    """

    def __init__(self, exponent: Positive = 2.0, max_length: Count = 16):
        weights = torch.arange(1, max_length + 1, dtype=torch.float64) ** -exponent
        self._cumulative = (weights.cumsum(0) / weights.sum()).float()[:-1]

    def state_spec(self, specs: NestedTensorSpec) -> HeldNoise:
        """Return the spec of the state for actions of ``specs``; the state is zeros at the first step of an episode."""
        return HeldNoise(nest.map_structure(TensorSpec.from_spec, specs), TensorSpec((), torch.int64))

    def __call__(self, state: HeldNoise) -> tuple[NestedTensor, HeldNoise]:
        """Return standard normal noise, nest of ``[B, ...]``, and the next state."""
        left = state.steps_left
        self._cumulative = self._cumulative.to(left.device)
        lengths = 1 + torch.searchsorted(self._cumulative, torch.rand(left.shape, device=left.device))
        is_new = left <= 0
        noise = nest.map_structure(lambda x: torch.where(
            is_new.view(-1, *[1] * (x.ndim - 1)), torch.randn_like(x), x), state.noise)
        return noise, HeldNoise(noise, torch.where(is_new, lengths, left) - 1)


class ExplorationNoise(nn.Module):
    """Base class of exploration noise; called as ``action, state = noise(action, state)``.

    Args:
        action_spec: nest of ``BoundedTensorSpec`` of floats.

    Raises:
        SpecError: an action is discrete, or a bound is missing or infinite.
    """

    def __init__(self, action_spec: NestedTensorSpec):
        super().__init__()
        self._bounds = ActionBounds(action_spec, type(self).__name__)

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs of the state, which is zeros at the first step of an episode; ``()`` without state."""
        return ()

    def first_step(self, action: NestedTensor) -> NestedTensor:
        """Return noisy actions ``[B, ...]``, with the noise of the first step of an episode."""
        leaf = nest.flatten(action)[0]
        state = nest.map_structure(lambda spec: spec.zeros(leaf.shape[:1]).to(leaf.device), self.state_spec)
        return self(action, state)[0]

    def forward(self, action: NestedTensor, state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        """Add noise to actions.

        Args:
            action: nest of ``[B, ...]``.
            state: nest of ``[B, ...]`` of ``state_spec``.

        Returns:
            The noisy actions within their bounds, and the state for the next step.
        """
        raise NotImplementedError(f'{type(self).__name__}.forward')


@configurable
class OrnsteinUhlenbeckNoise(ExplorationNoise):
    """Temporally correlated noise, see :class:`~alfx.networks.ou_process.OUProcess`.

    The state is the noise itself; it is reset to zeros in each environment at the start of an episode.

    Args:
        action_spec: nest of ``BoundedTensorSpec`` of floats.
        stddev: standard deviation of the increments of the noise, in units of half the range.
        damping: fraction of the noise that decays at each step, in [0, 1].

    Raises:
        SpecError: an action is discrete, or a bound is missing or infinite.
        ValueError: a number is out of range.
    """

    def __init__(self, action_spec: NestedTensorSpec, stddev: NonNegative = 0.2, damping: Fraction = 0.15):
        super().__init__(action_spec)
        self._process = OUProcess(action_spec, damping=damping, stddev=stddev)

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs like those of the action."""
        return self._process.state_spec

    def forward(self, action: NestedTensor, state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        """Add noise to actions, see the base class."""
        noise, state = self._process(state)
        return self._bounds.add_noise(action, noise), state


@configurable
class GaussianNoise(ExplorationNoise):
    """Normally distributed noise, independent in time by default.

    Args:
        action_spec: nest of ``BoundedTensorSpec`` of floats.
        stddev: standard deviation in units of half the range, a number or a schedule.
        repeat: holds the noise for several steps; ``None``: new noise at each step.

    Raises:
        SpecError: an action is discrete, or a bound is missing or infinite.
        ValueError: ``stddev`` is negative.
    """

    def __init__(self, action_spec: NestedTensorSpec, stddev: NonNegative | Callable[[], NonNegative] = 0.1,
                 repeat: ZetaRepeat | None = None):
        super().__init__(action_spec)
        self._repeat = repeat
        self._state_spec = () if repeat is None else repeat.state_spec(action_spec)
        self._stddev = as_scheduler(stddev)
        self._is_scheduled = callable(stddev)
        self._stddev_now: Tensor
        self.register_buffer('_stddev_now', torch.tensor(0.0 if callable(stddev) else float(stddev)), persistent=False)

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs of the noise that is held; ``()`` without ``repeat``."""
        return self._state_spec

    def forward(self, action: NestedTensor, state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        """Add noise to actions, see the base class."""
        self.follow_schedule()
        if self._repeat is None:
            return self.noisy(action), state
        noise, state = self._repeat(state)
        return self._bounds.add_noise(action, nest.map_structure(lambda x: x * self._stddev_now, noise)), state

    def follow_schedule(self) -> None:
        """Update the standard deviation from its schedule, which a traced graph does not do."""
        if self._is_scheduled:
            self._stddev_now.fill_(self._stddev())

    def noisy(self, action: NestedTensor) -> NestedTensor:
        """Return noisy actions ``[B, ...]`` with the standard deviation of the last :meth:`follow_schedule`."""
        return self._bounds.add_noise(action, gaussian_like(action, self._stddev_now))


def gaussian_like(nested: NestedTensor, stddev: float | Tensor, clip: float | None = None) -> NestedTensor:
    """Sample a nest of normally distributed tensors of the shapes of ``nested``, clipped to ``[-clip, clip]``."""
    def draw(x: Tensor) -> Tensor:
        noise = torch.randn_like(x).mul_(stddev)
        return noise if clip is None else noise.clamp_(-clip, clip)

    return draw(nested) if isinstance(nested, Tensor) else nest.map_structure(draw, nested)
