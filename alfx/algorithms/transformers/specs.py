"""The specs that every data transformer has; for :mod:`alfx.algorithms.data_transformer`."""
from torch import nn

from alfx.tensor_specs import NestedTensorSpec


class ModuleWithSpecs(nn.Module):
    """A module that knows the spec of what it yields and of the state that it keeps.

    Args:
        transformed_observation_spec: nest of specs of the transformed observation; None: not known.
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
            ValueError: the transformer was made without an observation spec.
        """
        if self._transformed_observation_spec is None:
            raise ValueError(f'{type(self).__name__} was made without observation_spec, so that the spec of what it '
                             'yields is not known; give it the spec')
        return self._transformed_observation_spec

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs of the state; zeros of it begin a sequence of time steps."""
        return self._state_spec
