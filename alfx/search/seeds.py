"""The random seed of each run of a search.

A run is counted by its trial and its repeat, and the count is scrambled by a function on 32-bit numbers that can be
inverted, with the seed of the search as its key. So the seeds look unrelated, and no two runs of a search ever have the
same one.
"""
from alfx.gin_utils import ConfError

MAX_SEEDS = 1 << 10
"""The greatest number of seeds of a trial."""
MAX_TRIALS = 1 << 22
"""The greatest number of trials of a search."""
_MASK = 0xFFFFFFFF


def run_seed(search_seed: int, trial: int, repeat: int) -> int:
    """The ``TrainerConfig.random_seed`` of a run.

    Args:
        search_seed: of the search, in ``[0, 2**32)``.
        trial: number of the trial, below ``MAX_TRIALS``.
        repeat: which of the trial's seeds, below ``MAX_SEEDS``.

    Returns:
        A number in ``[0, 2**32)``; different for each ``(trial, repeat)`` of the same search. It depends on nothing
        else, so that a trial keeps its seeds when more trials or more seeds are asked for.

    Raises:
        ConfError: a number is out of its range.
    """
    for name, value, limit in (('Search.seed', search_seed, 1 << 32), ('number of the trial', trial, MAX_TRIALS),
                               ('number of the seed', repeat, MAX_SEEDS)):
        if not 0 <= value < limit:
            raise ConfError(f'{name}: expected an int in [0, {limit}), found {value}')
    return _scrambled(_scrambled(trial * MAX_SEEDS + repeat) ^ _scrambled(search_seed ^ 0x9E3779B9))


def sampler_seed(search_seed: int, trial: int) -> int:
    """The seed of what draws the parameters of a trial, in ``[0, 2**32)``.

    It is a new one for each trial, so that a search that was interrupted draws what it would have drawn otherwise, and
    never again what it has drawn before.
    """
    return _scrambled(_scrambled(trial) ^ _scrambled(search_seed ^ 0x85EBCA6B))


def _scrambled(number: int) -> int:
    """A permutation of the 32-bit numbers (the finaliser of MurmurHash3; Appleby 2011)."""
    number ^= number >> 16
    number = number * 0x85EBCA6B & _MASK
    number ^= number >> 13
    number = number * 0xC2B2AE35 & _MASK
    return number ^ number >> 16
