"""Noise that is correlated in time, to explore with."""
import torch
from torch import nn

from alfx import nest
from alfx.gin_utils import configurable
from alfx.gin_utils.value_checks import Fraction, NonNegative
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec


@configurable
class OUProcess(nn.Module):
    """An Ornstein-Uhlenbeck process in steps of 1 (Uhlenbeck and Ornstein 1930; Lillicrap et al. 2016,
    arXiv:1509.02971, section 3).

    ``x' = (1 - damping) x + stddev * z`` with ``z`` standard normal. It is called as ``noise, state =
    process(state)``; the noise is the new state. From a state of zeros, as at the begin of an episode, its standard
    deviation grows from ``stddev`` to ``stddev / sqrt(1 - (1 - damping)^2)``.

    Args:
        state_spec: nest of specs of the noise, of floats.
        damping: share of the state that is lost at each step, in [0, 1]; 1 makes the noise independent in time.
        stddev: standard deviation of what is added at each step, in units of the noise.

    Raises:
        SpecError: a spec that is not of floats.
        ValueError: ``damping`` not in [0, 1], or a negative ``stddev``.
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
        """A nest of ``[B, ...]`` to such a nest of noise, and the state for the next step."""
        noise = nest.map_structure(self._step, state)
        return noise, noise

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x).mul_(self._stddev).add_(x, alpha=1 - self._damping)
