"""Checks of the arguments of data transformers, for :mod:`alfx.algorithms.data_transformer`."""
from collections.abc import Sequence
from typing import Any, Optional

import torch

from alfx import nest
from alfx.tensor_specs import BoundedTensorSpec, NestedTensorSpec, SpecError


def check_fields(owner: str, observation_spec: NestedTensorSpec, fields: Optional[Sequence[str]]) -> list[str]:
    """Check and return the paths of the tensors to transform.

    Args:
        owner: name of the caller, for error messages.
        observation_spec: nest of specs.
        fields: paths such as 'camera.front'; ``None`` if the observation is one tensor.

    Returns:
        ``fields``, or ``['']`` for the observation itself.

    Raises:
        SpecError: a field does not exist, is a nest or occurs twice.
    """
    if fields is None:
        if nest.is_nested(observation_spec):
            raise SpecError(f'{owner}.fields: required, because the observation is a nest; choose from '
                            f'{_paths(observation_spec)}')
        return ['']
    if isinstance(fields, str):
        raise SpecError(f'{owner}.fields: expected a list of paths, found {fields!r}; write [{fields!r}]')
    if len(set(fields)) < len(fields):
        raise SpecError(f'{owner}.fields: expected each field once, found {list(fields)}')
    for field in fields:
        try:
            part = nest.get_field(observation_spec, nest.locate_field(observation_spec, field))
        except LookupError as error:
            raise SpecError(f'{owner}.fields: {error}') from None
        if nest.is_nested(part):
            raise SpecError(f"{owner}.fields: '{field}' is a nest; choose from "
                            f"{_paths(part, field + '.' if field else '')}")
    return list(fields)


def _paths(spec: NestedTensorSpec, prefix: str = '') -> list[str]:
    return [prefix + path for path, _ in nest.flatten_with_path(spec)]


def check_mask_field(owner: str, observation_spec: NestedTensorSpec, field: str) -> str:
    """Check and return the path of an action mask.

    Raises:
        SpecError: there is no such field in a dict, the field is a number, or it is the only field.
    """
    hint = f"found the observation {_paths(observation_spec) if nest.is_nested(observation_spec) else 'of one tensor'}"
    try:
        parent = spec = observation_spec
        for key in nest.locate_field(observation_spec, field):
            parent, spec = spec, spec[key]
    except LookupError as error:
        raise SpecError(f'{owner}.field = {field!r}: {error}; {hint}') from None
    if not isinstance(parent, dict) or any(leaf.ndim == 0 for leaf in nest.flatten(spec)):
        raise SpecError(f'{owner}.field = {field!r}: expected a mask of shape [N] in a dict of observations, {hint}')
    if len(parent) == 1:
        raise SpecError(f'{owner}.field = {field!r}: expected other fields besides the mask, {hint}')
    return field


def check_images(owner: str, observation_spec: NestedTensorSpec, fields: Optional[Sequence[str]], low: float,
                 high: float) -> tuple[dict[str, tuple[int, int]], NestedTensorSpec]:
    """Check the fields that contain images of integers; without fields, find them in a nest.

    Returns:
        The smallest and the largest value of each path, and the spec of the observation with images scaled to
        ``[low, high]``.

    Raises:
        SpecError: a field does not exist or is not an image of bounded integers, or there is none.
        ValueError: ``low`` is not less than ``high``.
    """
    if not low < high:
        raise ValueError(f'{owner}: expected min < max, found min={low}, max={high}')
    if fields is None and nest.is_nested(observation_spec):
        images = [path for path, x in nest.flatten_with_path(observation_spec)
                  if x.is_discrete and (x.ndim == 3 or x.ndim == 2 and x.dtype == torch.uint8)]
        fields = images or None
    ranges = {}
    for field in check_fields(owner, observation_spec, fields):
        spec = nest.get_field(observation_spec, field)
        least, most = _range_of_integers(spec)
        if not 0 <= most - least < 2**16:
            raise SpecError(f"{owner}: '{field or 'observation'}': expected an image of integers with bounds at most "
                            f'65,535 apart, found {spec}')
        ranges[field] = least, most
        after = (0, 1) if (least, most) == (0, 1) else (low, high)
        observation_spec = nest.set_field(observation_spec, field, BoundedTensorSpec(spec.shape, torch.float32, *after))
    return ranges, observation_spec


def _range_of_integers(spec: Any) -> tuple[int, int]:
    """Return the smallest and the largest value of a spec of integers; an empty range for floats."""
    if not spec.is_discrete:
        return 0, -1
    bounded = BoundedTensorSpec.from_spec(spec)
    return int(bounded.minimum.min()), int(bounded.maximum.max())


def check_order(transformers: Sequence[Any]) -> None:
    """Check the order of the data transformers.

    Raises:
        SpecError: a transformer that must be first is not; a transformer that reads the replay buffer comes after one
            that changes the data; a field is stacked twice; or a relabeled goal is stacked or relabeled twice.
    """
    names = [type(transformer).__name__ for transformer in transformers]
    where = f'data_transformer_ctor {names}'
    changed_by = None
    stacked: set[str] = set()
    goals: set[str] = set()
    for position, (name, transformer) in enumerate(zip(names, transformers)):
        if transformer.must_be_first and position > 0:
            raise SpecError(f'{where}: {name} has to come first, because it stores the untransformed time step')
        if transformer.needs_replay_buffer and changed_by is not None:
            raise SpecError(f'{where}: {name} has to come before {changed_by}, because it looks up steps in the '
                            'replay buffer, which are not transformed')
        twice = stacked & set(transformer.stacked_fields)
        if twice:
            raise SpecError(f'{where}: {sorted(twice)} would be stacked twice; use one {name} with a larger stack_size')
        stacked |= set(transformer.stacked_fields)
        twice = goals & set(transformer.goal_fields)
        if twice:
            raise SpecError(f'{where}: {sorted(twice)} would be relabeled twice; use one {name}')
        goals |= set(transformer.goal_fields)
        if goals & stacked:
            raise SpecError(f'{where}: {sorted(goals & stacked)} cannot be stacked, because goals are compared and '
                            'replaced in their stored form; stack other fields')
        if transformer.changes_time_steps:
            changed_by = changed_by or name
