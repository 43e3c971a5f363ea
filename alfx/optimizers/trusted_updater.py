"""Trust region: shrink an optimizer step that was already made."""
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from alfx import nest


class TrustedUpdater:
    """Remembers parameters, and shrinks a later step from there until the resulting change is within bounds.

    Create it before the optimizer step, and call :meth:`adjust_step` after it.

    Args:
        parameters: the parameters, with their values before the step.

    Raises:
        ValueError: no parameters.
    """

    # a shrunk step aims at this fraction of the allowed change, because the change is not linear in the step
    _SAFETY = 0.9
    _MAX_SHRINKS = 100

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        if not self._parameters:
            raise ValueError('TrustedUpdater: expected at least one parameter, found none')
        self._before = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def adjust_step(self, change_f: Callable[[], Any], max_change: Any) -> tuple[Any, int]:
        """Shrink the step until no change exceeds its bound.

        With r the smallest ``max_change / change``, as long as r < 1:

            parameter = before + 0.9 * r * (parameter - before)

        The direction of the step is kept.

        Args:
            change_f: returns the change from the remembered parameters to the current ones: a nest of non-negative
                scalars (tensors or numbers). Called without gradients.
            max_change: the bounds, above 0: a nest of the same structure, or one number for all.

        Returns:
            tuple:
            - the result of ``change_f`` for the original step
            - how many times the step was shrunk

        Raises:
            ValueError: a bound is not above 0, the structures differ, or the change remains out of bounds however small
                the step is, so the step cannot be its cause.
        """
        first = change = change_f()
        bounds = nest.flatten(max_change)
        if not all(bound > 0 for bound in bounds):
            raise ValueError(f'TrustedUpdater.adjust_step: expected bounds above 0, found {max_change}')
        if nest.is_nested(max_change):
            nest.assert_same_structure(first, max_change)
        elif nest.is_nested(first):
            bounds = bounds * len(nest.flatten(first))
        for shrinks in range(self._MAX_SHRINKS):
            ratio = self._allowed_ratio(nest.flatten(change), bounds)
            if ratio >= 1:
                return first, shrinks
            for parameter, before in zip(self._parameters, self._before):
                parameter.copy_(torch.lerp(before, parameter, self._SAFETY * ratio))
            change = change_f()
        raise ValueError(f'TrustedUpdater.adjust_step: the change is still {change} after {self._MAX_SHRINKS} '
                         f'reductions of the step, expected at most {max_change}; check that change_f depends on the '
                         'parameters only')

    @staticmethod
    def _allowed_ratio(changes: list[Any], bounds: list[Any]) -> float:
        """Return the smallest bound / change, at most 1; one half for a change that is not finite."""
        ratios = [1.0]
        for change, bound in zip(changes, bounds):
            change, bound = float(change), float(bound)
            if not change <= bound:
                ratios.append(bound / change if change < float('inf') else 0.5)
        return min(ratios)
