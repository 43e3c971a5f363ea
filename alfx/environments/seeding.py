"""Seeds: every environment of a run gets its own stream from the run's one seed."""
import numpy as np

from alfx import context

_BITS = 2**31 - 1


def environment_seeds(seed: int | None, count: int, purpose: int = 0) -> list[int | None]:
    """One seed in ``[0, 2**31)`` for each of ``count`` environments; ``None`` for each if ``seed`` is ``None``.

    Environment i gets the same seed whatever ``count`` is, and whichever process has it: they are numbered from
    ``context.first_environment()``.

    Args:
        seed: the run's seed.
        count: number of environments.
        purpose: streams for different purposes (0: training, 1: evaluation) are unrelated.
    """
    if seed is None:
        return [None] * count
    first = context.first_environment()
    return [_number(np.random.SeedSequence(seed, spawn_key=(purpose, i))) for i in range(first, first + count)]


def derived_seed(seed: int | None, *key: int) -> int | None:
    """A seed unrelated to ``seed`` that is determined by it and ``key``; ``None`` gives ``None``."""
    return None if seed is None else _number(np.random.SeedSequence(seed, spawn_key=key))


def batch_seed(seed: int | None, *key: int) -> int | None:
    """:func:`derived_seed` for random numbers that a whole batch shares: other ones in each process of a run."""
    first = context.first_environment()
    return derived_seed(seed, *key, first) if first else derived_seed(seed, *key)


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0]) & _BITS
