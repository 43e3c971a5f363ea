"""The specs of the environment stored in a dataset, so that a policy can be trained without the environment."""
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alfx import nest
from alfx.checkpoints.module_states import NOT_FITTING
from alfx.data_structures import TimeStep
from alfx.environments.described_environment import NO_ENVIRONMENT, DescribedEnvironment
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.offline import dataset_sources
from alfx.offline.dataset_files import DatasetError
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec


def specs_as_json(env: Any) -> dict[str, Any]:
    """Return the specs of an environment as JSON, for the metadata of a dataset; ``{}`` if they are not plain dicts."""
    specs = {'observation': env.observation_spec(), 'action': env.action_spec(), 'reward': env.reward_spec()}
    if not all(_is_of_dicts(spec) for spec in specs.values()):
        return {}
    return {'specs': {field: {path: _as_json(leaf) for path, leaf in nest.flatten_with_path(spec)}
                      for field, spec in specs.items()}}


class RecordedEnvironment(DescribedEnvironment):
    """Specs of the environment of a dataset; it cannot be stepped.

    Args:
        names: names of datasets; the specs are those of the first.
        batch_size: B.

    Raises:
        DatasetError: the dataset does not exist or contains no specs.
    """

    def __init__(self, names: Sequence[str], batch_size: int):
        about = dataset_sources.read(names[0]).about
        if 'specs' not in about:
            raise DatasetError(f"{names[0]}: does not contain the specs of its environment, which create_environment."
                               f"env_name = '{NO_ENVIRONMENT}' requires",
                               'set the environment, or record the dataset with alfx.bin.record, which stores them '
                               'unless observations are tuples, or their names are empty or contain dots')
        try:
            specs = {field: _nest_of(leaves) for field, leaves in about['specs'].items()}
        except NOT_FITTING as error:
            raise DatasetError(f'{names[0]}: its specs are damaged: {error!r}', 'record the dataset again') from error
        self._batch_size, self._name, self._metadata = batch_size, about.get('env_name', NO_ENVIRONMENT), {}
        self._observation_spec, self._action_spec, self._reward_spec = (
            specs[field] for field in ('observation', 'action', 'reward'))
        self._env_info_spec, self._task_names = (), [self._name]

    def _reset(self) -> TimeStep:
        raise UnsupportedOperationError(f"there is no environment, only a dataset of {self._name}: "
                                        f"create_environment.env_name = '{NO_ENVIRONMENT}'")

    def _step(self, action: NestedTensor) -> TimeStep:
        return self._reset()


def _is_of_dicts(spec: NestedTensorSpec) -> bool:
    if isinstance(spec, dict):
        return all(isinstance(key, str) and key and '.' not in key and _is_of_dicts(x) for key, x in spec.items())
    return isinstance(spec, TensorSpec)


def _as_json(spec: TensorSpec) -> dict[str, Any]:
    found: dict[str, Any] = {'shape': list(spec.shape), 'dtype': spec.dtype_str}
    if isinstance(spec, BoundedTensorSpec):
        found |= {'minimum': np.asarray(spec.minimum).tolist(), 'maximum': np.asarray(spec.maximum).tolist()}
    return found


def _nest_of(leaves: dict[str, dict[str, Any]]) -> NestedTensorSpec:
    result: dict[str, Any] = {}
    for path, leaf in leaves.items():
        dtype = getattr(torch, leaf['dtype'])
        spec = BoundedTensorSpec(leaf['shape'], dtype, leaf['minimum'], leaf['maximum']) if 'minimum' in leaf else (
            TensorSpec(leaf['shape'], dtype))
        if not path:
            return spec
        *parents, last = path.split('.')
        level = result
        for name in parents:
            level = level.setdefault(name, {})
        level[last] = spec
    return result
