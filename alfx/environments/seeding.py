"""Seeds: every environment of a run gets its own stream, derived from the seed of the run."""
import numpy as np

from alfx import context

_BITS = 2**31 - 1


def environment_seeds(seed: int | None, count: int, purpose: int = 0) -> list[int | None]:
    """Return one seed in ``[0, 2**31)`` for each of ``count`` environments; all are ``None`` if ``seed`` is ``None``.

    The seed of environment i depends neither on ``count`` nor on the process that steps it: environments are numbered
    from ``context.first_environment()``.

    Args:
        seed: seed of the run.
        count: number of environments.
        purpose: number of the purpose (0: training, 1: evaluation); streams of different purposes are unrelated.
    """
    if seed is None:
        return [None] * count
    first = context.first_environment()
    return [_number(np.random.SeedSequence(seed, spawn_key=(purpose, i))) for i in range(first, first + count)]


def derived_seed(seed: int | None, *key: int) -> int | None:
    """Return a seed that is determined by ``seed`` and ``key`` but unrelated to ``seed``; ``None`` for ``None``."""
    return None if seed is None else _number(np.random.SeedSequence(seed, spawn_key=key))


def batch_seed(seed: int | None, *key: int) -> int | None:
    """Return :func:`derived_seed` for random numbers shared by a whole batch; it differs between processes of a run."""
    first = context.first_environment()
    return derived_seed(seed, *key, first) if first else derived_seed(seed, *key)


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0]) & _BITS
