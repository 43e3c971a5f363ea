"""Temperatures of the visit counts from which a tree search samples its actions."""
import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from alfx import context
from alfx.gin_utils import configurable


@configurable
class VisitSoftmaxTemperatureByMoves:
    """Temperature of the visit counts as a function of the moves made in the game.

    Args:
        move_temperature_pairs: ``(moves, temperature)``: this temperature while the number of moves, which starts from
            0, is not above ``moves``. The last temperature is also used afterwards.

    Raises:
        ValueError: the moves do not increase, or a temperature is not positive.
    """

    def __init__(self, move_temperature_pairs: Sequence[tuple[float, float]] = ((29, 1.0), (10000, 0.0001))):
        limits, temperatures = _check_pairs('VisitSoftmaxTemperatureByMoves.move_temperature_pairs',
                                            move_temperature_pairs)
        self._limits = torch.tensor(limits[:-1])
        self._temperatures = torch.tensor(temperatures)

    def __call__(self, steps: Tensor) -> Tensor:
        """Return temperatures float32 ``[B]`` for numbers of moves ``[B]``."""
        return self._temperatures.to(steps.device)[torch.bucketize(steps, self._limits.to(steps.device))]


@configurable
class VisitSoftmaxTemperatureByProgress:
    """Temperature of the visit counts as a function of the training progress.

    Args:
        progress_temperature_pairs: ``(progress, temperature)``: this temperature while the progress, from 0 to 1, is
            below ``progress``. The last temperature is also used afterwards.

    Raises:
        ValueError: the progress values do not increase, or a temperature is not positive.
    """

    def __init__(self, progress_temperature_pairs: Sequence[tuple[float, float]] = ((0.5, 1.0), (0.75, 0.5),
                                                                                    (1, 0.25))):
        self._limits, self._temperatures = _check_pairs(
            'VisitSoftmaxTemperatureByProgress.progress_temperature_pairs', progress_temperature_pairs)

    def __call__(self, steps: Tensor) -> Tensor:
        """Return temperatures float32 ``[B]`` for numbers of moves ``[B]``, all equal."""
        index = bisect.bisect_right(self._limits[:-1], context.get_progress('percent'))
        return torch.full(steps.shape, self._temperatures[index], device=steps.device)


def _check_pairs(name: str, pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    limits, temperatures = [float(x) for x, _ in pairs], [float(t) for _, t in pairs]
    if not pairs or any(a >= b for a, b in zip(limits, limits[1:])):
        raise ValueError(f'{name}: expected pairs in ascending order, found {list(pairs)}')
    if min(temperatures) <= 0:
        raise ValueError(f'{name}: expected positive temperatures, found {temperatures}; a small one such as 0.0001 '
                         'chooses the most visited action')
    return limits, temperatures
