"""Specs of data transformers, for :mod:`alfx.algorithms.data_transformer`."""
from torch import nn

from alfx.tensor_specs import NestedTensorSpec


class ModuleWithSpecs(nn.Module):
    """Module with the specs of its output and of its state.

    Args:
        transformed_observation_spec: nest of specs of the transformed observation; ``None``: unknown.
        state_spec: nest of specs of the state between time steps.
    """

    def __init__(self, transformed_observation_spec: NestedTensorSpec, state_spec: NestedTensorSpec = ()) -> None:
        super().__init__()
        self._transformed_observation_spec = transformed_observation_spec
        self._state_spec = state_spec

    @property
    def transformed_observation_spec(self) -> NestedTensorSpec:
        """Nest of specs of the transformed observation.

        Raises:
            ValueError: the transformer was created without an observation spec.
        """
        if self._transformed_observation_spec is None:
            raise ValueError(f'{type(self).__name__} was created without observation_spec, so that the spec of its '
                             'output is unknown; pass observation_spec')
        return self._transformed_observation_spec

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs of the state; a sequence of time steps starts with zeros."""
        return self._state_spec
