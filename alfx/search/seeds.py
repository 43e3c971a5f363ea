"""Random seeds of the runs of a hyperparameter search.

The seed of a run is a hash of the trial and the repeat, with ``Search.seed`` as key. The hash is an invertible function
of 32-bit numbers, so the seeds look random and no two runs of a hyperparameter search have the same seed.
"""
from alfx.gin_utils import ConfError

MAX_SEEDS = 1 << 10
"""Maximum number of seeds of a trial."""
MAX_TRIALS = 1 << 22
"""Maximum number of trials of a hyperparameter search."""
_MASK = 0xFFFFFFFF


def run_seed(search_seed: int, trial: int, repeat: int) -> int:
    """Return the ``TrainerConfig.random_seed`` of a run.

    Args:
        search_seed: seed of the hyperparameter search, in ``[0, 2**32)``.
        trial: number of the trial, less than ``MAX_TRIALS``.
        repeat: index of the seed within the trial, less than ``MAX_SEEDS``.

    Returns:
        A number in ``[0, 2**32)``, different for each ``(trial, repeat)`` of a hyperparameter search. It depends on
        nothing else, so a trial keeps its seeds if the number of trials or seeds is increased.

    Raises:
        ConfError: an argument is out of range.
    """
    for name, value, limit in (('Search.seed', search_seed, 1 << 32), ('number of the trial', trial, MAX_TRIALS),
                               ('number of the seed', repeat, MAX_SEEDS)):
        if not 0 <= value < limit:
            raise ConfError(f'{name}: expected an int in [0, {limit}), found {value}')
    return _hash(_hash(trial * MAX_SEEDS + repeat) ^ _hash(search_seed ^ 0x9E3779B9))


def sampler_seed(search_seed: int, trial: int) -> int:
    """Return the seed of the sampler for the parameters of a trial, in ``[0, 2**32)``.

    Each trial has its own seed, so a resumed hyperparameter search samples the same values as an uninterrupted one,
    and never repeats earlier samples.
    """
    return _hash(_hash(trial) ^ _hash(search_seed ^ 0x85EBCA6B))


def _hash(number: int) -> int:
    """Hash of a 32-bit number, a permutation (the finalizer of MurmurHash3; Appleby 2011)."""
    number ^= number >> 16
    number = number * 0x85EBCA6B & _MASK
    number ^= number >> 13
    number = number * 0xC2B2AE35 & _MASK
    return number ^ number >> 16
