"""Target networks: slowly updated copies of networks for bootstrapped targets."""
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from alfx.gin_utils import Count, PositiveFraction, configurable
from alfx.optimizers.autograd import without_autograd
from alfx.utils.saved_count import SavedCount

Models = nn.Module | Tensor | Sequence[nn.Module | Tensor]


@configurable
class TargetUpdater(nn.Module):
    """Updates target models towards models in every ``period``-th call.

    An update is, for every parameter (Lillicrap et al. 2015, arXiv:1509.02971, algorithm 1):

        target = target + tau * (model - target)

    ``tau = 1`` with a large ``period`` is the copied target network of DQN (Mnih et al. 2015). Buffers (such as the
    statistics of a normalizer) are copied. Target parameters are not trained: they do not require gradients. Parameters
    that a target shares with its model, as parts of the same ``.singleton()``, are left unchanged.

    Args:
        models: a module, a parameter, or a sequence of them.
        target_models: targets with the same shapes.
        tau: coefficient of a soft (Polyak) update, in (0, 1]; smaller values make targets more stable but slower.
        period: number of calls between updates.
        init_copy: copy the models to the target models initially.
        delayed_update: update towards the models as of the previous update instead of the current ones.

    Raises:
        ValueError: ``tau`` or ``period`` is out of range, or the models do not correspond to each other.
    """

    def __init__(self, models: Models, target_models: Models, tau: PositiveFraction = 1.0, period: Count = 1,
                 init_copy: bool = True, delayed_update: bool = False):
        super().__init__()
        self._tau = tau
        self._period = period
        # in tuples, so that the models are not registered as children of this module
        self._models = tuple(_as_list(models))
        self._target_models = tuple(_as_list(target_models))
        self._check_correspondence()
        for target in self._own_parameters()[1]:
            target.requires_grad_(False)
        self._pairs: tuple[list[Tensor], ...] | None = None
        self._elsewhere: list[Tensor] = []  # tensors that are not on the CPU
        self._calls = SavedCount(self, '_num_calls')
        if init_copy:
            with torch.no_grad():
                _copy(_tensors(self._models), _tensors(self._target_models))
        trained = self._own_parameters()[0] if delayed_update else []
        self._delayed = [f'_delayed{i}' for i, _ in enumerate(trained)]
        for name, parameter in zip(self._delayed, trained):
            self.register_buffer(name, parameter.detach().clone())

    def _own_parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters of models and targets in pairs, without those that both share by ``.singleton()``."""
        pairs = zip(_parameters(self._models), _parameters(self._target_models))
        own = [(model, target) for model, target in pairs if model is not target]
        return [model for model, _ in own], [target for _, target in own]

    def _check_correspondence(self) -> None:
        shapes, target_shapes = ([(x.shape, x.dtype) for x in _tensors(models)]
                                 for models in (self._models, self._target_models))
        if shapes != target_shapes:
            raise ValueError('TargetUpdater: expected target_models with the same parameters and buffers as models, '
                             f'found {[tuple(s) for s, _ in target_shapes]} for {[tuple(s) for s, _ in shapes]}')

    def __call__(self) -> None:  # instead of forward(): most calls only count, and hooks would cost more
        """Count a call; every ``period``-th call updates the target models."""
        if self._calls.add() % self._period == 0:
            if self._pairs is None:
                self._pairs = (*self._own_parameters(), _buffers(self._models), _buffers(self._target_models))
                self._elsewhere = [x for x in chain(*self._pairs) if not x.is_cpu]
            elif self._pairs[2]:  # networks may replace their buffers
                self._pairs = (*self._pairs[:2], _buffers(self._models), _buffers(self._target_models))
            with without_autograd(self._elsewhere):  # checking all tensors would take a tenth of the update's time
                self._update(*self._pairs)

    def _update(self, models: list[Tensor], targets: list[Tensor], buffers: list[Tensor],
                target_buffers: list[Tensor]) -> None:
        if self._delayed:
            delayed = [getattr(self, name) for name in self._delayed]
            self._move(delayed, targets)
            _copy(models, delayed)
        else:
            self._move(models, targets)
        _copy(buffers, target_buffers)

    @torch.no_grad()
    def copy_to_targets(self, chosen: set[Tensor]) -> set[Tensor]:
        """Copy the parameters of the models that are in ``chosen`` and, if there are any, all buffers to the targets.

        Returns:
            The targets of these parameters.
        """
        pairs = list(zip(*self._own_parameters()))
        found = [i for i, (model, _) in enumerate(pairs) if model in chosen]
        for i in found:
            for target in pairs[i][1], *(getattr(self, name) for name in self._delayed[i:i + 1]):
                target.copy_(pairs[i][0])
        if found:
            _copy(_buffers(self._models), _buffers(self._target_models))
        return {pairs[i][1] for i in found}

    def _move(self, sources: list[Tensor], targets: list[Tensor]) -> None:
        if self._tau == 1.0:
            _copy(sources, targets)
        else:
            torch._foreach_lerp_(targets, sources, self._tau)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply ``fn``, for example to move to another device; this may replace the parameters, so drop the cache."""
        self._pairs = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._pairs = None


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)


def _as_list(models: Models) -> list[Any]:
    return [models] if isinstance(models, (nn.Module, Tensor)) else list(models)


def _parameters(models: Iterable[Any]) -> list[Tensor]:
    """Return the parameters of all models, in order."""
    return [p for model in models for p in ([model] if isinstance(model, Tensor) else model.parameters())]


def _buffers(models: Iterable[Any]) -> list[Tensor]:
    return [b for model in models if isinstance(model, nn.Module) for b in model.buffers()]


def _tensors(models: Iterable[Any]) -> list[Tensor]:
    return [*_parameters(models), *_buffers(models)]
