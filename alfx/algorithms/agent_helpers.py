"""Helper for ``Agent``: joins the state specs, losses and hooks of its parts."""
from collections.abc import Callable
from typing import Any

import torch

from alfx import context
from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import LossInfo, require_loss_info
from alfx.tensor_specs import NestedTensor, NestedTensorSpec


class AgentHelper:
    """Parts of an agent, and for each part the field of the agent's state and info that belongs to it.

    Args:
        state_ctor: named tuple class of the agent's state, with one field per part.
    """

    def __init__(self, state_ctor: Callable[..., Any]):
        self._state_ctor = state_ctor
        self._fields: dict[Algorithm, str] = {}
        self._specs: dict[str, tuple[NestedTensorSpec, NestedTensorSpec, NestedTensorSpec]] = {}

    def register_algorithm(self, alg: Algorithm, alg_field: str, is_stepped: bool = True) -> None:
        """Register ``alg`` as the part whose state and info are in the field ``alg_field``.

        Args:
            alg: the part.
            alg_field: its field.
            is_stepped: the part runs in the steps of rollout and training; otherwise only the state of
                ``predict_step`` includes its state.

        Raises:
            ValueError: the field is taken, or ``alg`` is registered for another field.
        """
        if alg_field in self._specs:
            raise ValueError(f"an algorithm is already registered for the field '{alg_field}'")
        if alg in self._fields:
            raise ValueError(f"{alg.name} ({type(alg).__name__}) cannot be both '{self._fields[alg]}' and "
                             f"'{alg_field}': create an algorithm for each")
        self._fields[alg] = alg_field
        stepped = (alg.train_state_spec, alg.rollout_state_spec) if is_stepped else ((), ())
        self._specs[alg_field] = (stepped[0], stepped[1], alg.predict_state_spec)

    def state_specs(self) -> dict[str, NestedTensorSpec]:
        """Return ``train_state_spec``, ``rollout_state_spec`` and ``predict_state_spec`` of the whole agent."""
        names = ('train_state_spec', 'rollout_state_spec', 'predict_state_spec')
        return {name: self._state_ctor(**{field: specs[i] for field, specs in self._specs.items()
                                          if field in self._state_ctor._fields})  # type: ignore[attr-defined]
                for i, name in enumerate(names)}

    def field(self, alg: Algorithm) -> str:
        """Return the field that belongs to ``alg``."""
        return self._fields[alg]

    def part(self, alg: Algorithm, nested: NestedTensor) -> NestedTensor:
        """Return the part of the agent's info or state that belongs to ``alg``; ``()`` and ``None`` are returned
        unchanged."""
        return getattr(nested, self.field(alg)) if nested else nested

    @staticmethod
    def accumulate_algorithm_rewards(rewards: list[torch.Tensor], weights: list[float], names: list[str],
                                     summary_prefix: str,
                                     summarize_fn: Callable[[str, torch.Tensor], None]) -> torch.Tensor:
        """Return the weighted sum of ``rewards``, a new tensor.

        Args:
            rewards: tensors of equal or broadcastable shape.
            weights: one per reward.
            names: one per reward, for summaries.
            summary_prefix: prefix of the names.
            summarize_fn: called with name and reward when summaries are recorded, also for the sum.
        """
        if not len(rewards) == len(weights) == len(names):
            raise ValueError(f'{len(rewards)} rewards, {len(weights)} weights and {len(names)} names do not match')
        total = sum(weight * reward for weight, reward in zip(weights, rewards))
        assert isinstance(total, torch.Tensor), 'there is at least one reward'
        if context.should_record_summaries():
            for name, reward in zip([*names, 'overall'], [*rewards, total]):
                summarize_fn(f'{summary_prefix}/{name}', reward)
        return total

    def accumulate_loss_info(self, algorithms: list[Algorithm], train_info: NestedTensor, offline: bool = False,
                             pre_train: bool = False) -> LossInfo:
        """Compute the sum of the losses of ``algorithms``.

        Args:
            algorithms: parts that have a loss.
            train_info: the agent's info ``[T, B, ...]``.
            offline: use ``calc_loss_offline``.
            pre_train: passed to ``calc_loss_offline``.

        Returns:
            The sum; ``extra`` is a dict with one entry per part.

        Raises:
            TypeError: a part does not return a ``LossInfo``.
            ValueError: two parts set ``priority``, ``gns`` or ``batch_label``.
        """
        infos = {}
        for alg in algorithms:
            info = self.part(alg, train_info)
            found = alg.calc_loss_offline(info, pre_train) if offline else alg.calc_loss(info)
            infos[self.field(alg)] = require_loss_info(found, alg)
        if len(infos) == 1:
            field, only = next(iter(infos.items()))
            return only._replace(extra={field: only.extra})
        return LossInfo(loss=_sum(i.loss for i in infos.values()),
                        scalar_loss=_sum(i.scalar_loss for i in infos.values()),
                        extra={field: i.extra for field, i in infos.items()}, priority=_only('priority', infos),
                        gns=_only('gns', infos), batch_label=_only('batch_label', infos))

    def after_update(self, algorithms: list[Algorithm], root_inputs: NestedTensor, train_info: NestedTensor) -> None:
        """Call ``after_update`` of each part with its own info."""
        for alg in algorithms:
            alg.after_update(root_inputs, self.part(alg, train_info))

    def after_train_iter(self, algorithms: list[Algorithm], root_inputs: NestedTensor,
                         rollout_info: NestedTensor = None) -> None:
        """Call ``after_train_iter`` of each part with its own info."""
        for alg in algorithms:
            alg.after_train_iter(root_inputs, self.part(alg, rollout_info))


def _sum(losses: Any) -> Any:
    """Return the sum of the tensors among ``losses``, ``()`` if there are none."""
    tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
    return sum(tensors[1:], start=tensors[0]) if tensors else ()


def _only(field: str, infos: dict[str, LossInfo]) -> Any:
    """Return the single value of ``field`` that is set, or ``()``."""
    values = {name: x for name, info in infos.items() if isinstance(x := getattr(info, field), torch.Tensor)}
    if len(values) > 1:
        raise ValueError(f"only one part of an agent can set '{field}' of its loss; found {sorted(values)}")
    return next(iter(values.values()), ())
