"""Random number generators of the process: seed them together, save and restore their states."""
import contextlib
import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch


def set_random_seed(seed: int | None) -> int:
    """Seed the generators of Python, numpy and torch.

    Args:
        seed: in ``[0, 2**32)``; ``None`` draws a random seed.

    Returns:
        The seed.
    """
    seed = random.SystemRandom().randrange(2**31) if seed is None else int(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (libraries use the global generator)
    torch.manual_seed(seed)
    return seed


def seed_generators(seed: Any, *owners: Any, unseeded_only: bool = False) -> None:
    """Seed the generators that are variables, or of spaces that are variables, of modules, classes or objects.

    Args:
        seed: in ``[0, 2**32)``.
        owners: modules, classes or objects.
        unseeded_only: only the generators of numpy that were created without a seed.
    """
    for i, value in enumerate(value for owner in owners for value in vars(owner).values()):
        value = value.np_random if isinstance(value, gymnasium.Space) else value
        if isinstance(value, np.random.Generator):
            entropy = getattr(value.bit_generator.seed_seq, 'entropy', None)
            if not unseeded_only or isinstance(entropy, int) and entropy >= 2**64:  # of the operating system
                value.bit_generator.state = type(value.bit_generator)((seed + i) % 2**32).state
        elif isinstance(value, (random.Random, np.random.RandomState)) and not unseeded_only:
            value.seed((seed + i) % 2**32)


def capture() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch and the current GPU, if one is in use."""
    version, numbers, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    name, keys, *position = numpy_state
    state = {'python': [version, list(numbers), gauss],
             'numpy': [name, torch.from_numpy(keys.astype(np.int64)), *position], 'torch': torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state['cuda'] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore the states returned by :func:`capture`."""
    version, numbers, gauss = state['python']
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *position = state['numpy']
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))  # noqa: NPY002
    torch.set_rng_state(state['torch'])
    if 'cuda' in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'])  # may have been captured on another GPU


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Context manager that restores the states of all generators on exit."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
