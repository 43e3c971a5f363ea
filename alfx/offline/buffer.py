"""Datasets as rings of an ordinary replay buffer: no sequence crosses from one dataset into the next."""
from collections.abc import Sequence
from typing import Any

import gin

from alfx import nest
from alfx.data_structures import Experience
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import declare_scope
from alfx.offline import dataset_episodes as stored
from alfx.offline.dataset_files import Dataset
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec

SCOPE = 'offline'  # gin scope for bindings of ReplayBuffer that apply to this buffer alone
declare_scope(SCOPE)


def make_buffer(datasets: Sequence[Dataset], experience_spec: Experience, **options: Any) -> ReplayBuffer:
    """Create a replay buffer that stores each dataset as the steps of a separate environment, with ``env_id`` < 0.

    Args:
        datasets: datasets that fit the spec.
        experience_spec: spec of a step, with the bounds of actions, with a ``rollout_info`` of :func:`info_of_action`
            and without ``state``.
        options: further arguments of ``ReplayBuffer``; bindings in the scope ``offline/`` set the others.
    """
    spec = nest.map_structure(TensorSpec.from_spec, experience_spec)
    step_spec = spec.time_step
    with gin.config_scope(SCOPE):
        options = {'enable_checkpoint': False, 'recent_data_ratio': 0.0, 'recent_data_steps': 1, **options}
        buffer = ReplayBuffer(spec, len(datasets), max(x.episodes.num_steps for x in datasets), **options)
    for number, dataset in enumerate(datasets):
        for time_step, action in stored.steps(dataset.episodes, -1 - number, step_spec.observation,
                                              experience_spec.action, step_spec.reward):
            experience = Experience(time_step, action, info_of_action(spec.rollout_info, action))
            buffer.add_sequence(nest.map_structure(lambda x: x.unsqueeze(1), experience),
                                env_ids=[number] if len(datasets) > 1 else None)
    return buffer


def info_of_action(info: Any, action: NestedTensor) -> Any:
    """Return an info of ``rollout_step`` in which only the action is known.

    Args:
        info: an info, or its spec: a named tuple with a field ``action``, or with a field ``rl`` that has one.
        action: nest of actions, or its spec.

    Returns:
        ``info`` with ``()`` instead of everything else; ``()`` if it has no action.
    """
    fields = getattr(info, '_fields', ())
    if not {'action', 'rl'} & set(fields):
        return ()
    known = info._replace(**{field: () for field in fields if nest.flatten(getattr(info, field))})
    return known._replace(action=action) if 'action' in fields else known._replace(rl=info_of_action(info.rl, action))


_UNREAD = ('rewards', 'irm', 'entropy_target', 'policy_loss_addons', 'rw', 'action_distribution')


def unknown_infos(info_spec: NestedTensorSpec) -> list[str]:
    """Return paths of infos of ``rollout_step`` that training may read but recorded actions do not contain.

    The list is empty for algorithms that learn from actions alone. Additional rewards, and infos that are only logged,
    do not count.
    """
    def is_action(parts: list[str]) -> bool:
        return parts[0] == 'action' or (parts[0] == 'rl' and is_action(parts[1:] or ['']))

    paths = [path for path, _ in nest.flatten_with_path(info_spec)]
    return [path for path in paths if not is_action(path.split('.')) and not set(path.split('.')) & set(_UNREAD)]
