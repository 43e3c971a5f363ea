"""Functions that searches in tests maximize or minimize: exact, and quick."""
import math
import os
import time

from alfx import gin_utils


@gin_utils.configurable
def bowl(x: float = 0.0, y: float = 1e-3, kind: str = 'round', journal: str = '', gate: str = '', random_seed: int = 0):
    """Greatest, 0, where x is 3 and log10(y) is -3; `kind` 'flat' is 1 lower everywhere.

    A line is added to the file `journal` when it is called, and one when it returns; it waits for the file `gate`.
    """
    _note(journal, f'begin {x!r} {y!r} {random_seed}')
    deadline = time.monotonic() + 120
    while gate and not os.path.exists(gate) and time.monotonic() < deadline:
        time.sleep(0.02)
    value = -((x - 3) / 4)**2 - (math.log10(y) + 3)**2 - (kind == 'flat')
    _note(journal, f'end {x!r} {y!r} {random_seed}')
    return value


@gin_utils.configurable
def climb(report, slope: float = 1.0, steps: int = 10, journal: str = ''):
    """Reports `slope * step` for each step."""
    for step in range(1, steps + 1):
        _note(journal, f'{slope!r} {step}')
        report(step, slope * step)
    return slope * steps


@gin_utils.configurable
def picky(x: int = 0, first: int = 0):
    """Fails for an odd x, and for every x below `first`; is NaN for 4."""
    if x % 2 or x < first:
        raise ValueError(f'{x} does not please')
    return math.nan if x == 4 else x


@gin_utils.configurable
def noise(random_seed: int):
    """A number that depends on the seed alone."""
    return random_seed


@gin_utils.configurable
def nothing():
    """Forgets to return its value."""


def _note(journal: str, line: str) -> None:
    if journal:
        with open(journal, 'a', encoding='utf8') as file:
            file.write(f'{line} {os.getpid()}\n')
