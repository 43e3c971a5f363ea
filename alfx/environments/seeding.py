"""Seeds: every environment of a run gets its own stream, derived from the seed of the run."""
from typing import Any

import numpy as np

from alfx import context

_BITS = 2**31 - 1


def environment_seeds(seed: int | None, count: int) -> list[int | None]:
    """Return one seed in ``[0, 2**31)`` for each of ``count`` environments; all are ``None`` if ``seed`` is ``None``.

    The seed of environment i depends neither on ``count`` nor on the process that steps it: environments are numbered
    from ``context.first_environment()``.

    Args:
        seed: seed of the run.
        count: number of environments.
    """
    first = context.first_environment()
    return [derived_seed(seed, 0, i) for i in range(first, first + count)]


def derived_seed(seed: int | None, *key: int) -> int | None:
    """Return a seed that is determined by ``seed`` and ``key`` but unrelated to ``seed``; ``None`` for ``None``."""
    return None if seed is None else _number(np.random.SeedSequence(seed, spawn_key=key))


def batch_seed(seed: int | None, *key: int) -> int | None:
    """Return :func:`derived_seed` for random numbers shared by a whole batch; it differs between processes of a run."""
    first = context.first_environment()
    return derived_seed(seed, *key, first) if first else derived_seed(seed, *key)


def process_seed(first: int) -> int:
    """Return a seed for a process that creates the environments from number ``first`` on.

    It is determined by the state of numpy's generator in this process, which stays as it is, so that the results of a
    run do not depend on the number of its processes.
    """
    state: Any = np.random.get_state()  # noqa: NPY002 (seeded with the run)
    entropy = [*state[1][1:5].tolist(), state[2]]  # the first word is the same for all seeds
    return _number(np.random.SeedSequence(entropy, spawn_key=(context.first_environment() + first, )))


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1)[0]) & _BITS
