"""Temporally correlated noise for exploration."""
import torch
from torch import nn

from alfx import nest
from alfx.gin_utils import Fraction, NonNegative, configurable
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec


@configurable
class OUProcess(nn.Module):
    """Ornstein-Uhlenbeck process with time step 1.

    Uhlenbeck and Ornstein 1930; used for exploration by Lillicrap et al. 2016 (arXiv:1509.02971, section 3):
    ``x' = (1 - damping) x + stddev * z`` with ``z`` standard normal. It is called as
    ``noise, state = process(state)``; the noise is the new state. Starting from zeros, as at the start of an episode,
    its standard deviation grows from ``stddev`` to ``stddev / sqrt(1 - (1 - damping)^2)``.

    Args:
        state_spec: nest of specs of the noise, of floats.
        damping: fraction of the state that decays at each step, in [0, 1]; 1 makes the noise independent in time.
        stddev: standard deviation of the noise added at each step.

    Raises:
        SpecError: a spec is not of floats.
        ValueError: ``damping`` is not in [0, 1], or ``stddev`` is negative.
    """

    def __init__(self, state_spec: NestedTensorSpec, damping: Fraction = 0.15, stddev: NonNegative = 0.2):
        super().__init__()
        for path, spec in nest.flatten_with_path(state_spec):
            if not spec.is_continuous:
                raise SpecError(f"OUProcess: noise is for continuous actions, found {spec} at '{path}'")
        self._state_spec = nest.map_structure(lambda spec: TensorSpec.from_spec(spec), state_spec)
        self._damping, self._stddev = damping, stddev

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs of the noise, without bounds."""
        return self._state_spec

    def forward(self, state: NestedTensor) -> tuple[NestedTensor, NestedTensor]:
        """Return the next noise, a nest of ``[B, ...]`` like ``state``, and the state of the next step."""
        noise = nest.map_structure(self._step, state)
        return noise, noise

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x).mul_(self._stddev).add_(x, alpha=1 - self._damping)
