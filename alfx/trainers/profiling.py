"""Profile of a run (``TrainerConfig.profiling``)."""
import contextlib
import cProfile
import logging
import pstats
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_LINES = 100


@contextlib.contextmanager
def profiled(path: str | None) -> Iterator[None]:
    """Profile the body of the context with cProfile.

    Args:
        path: file for the report, which lists the functions that take most time, by internal and by cumulative time;
            None for no profiling.
    """
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        with open(path, 'w', encoding='utf8') as file:
            statistics = pstats.Stats(profile, stream=file)
            statistics.sort_stats('tottime').print_stats(_LINES)
            statistics.sort_stats('cumulative').print_stats(_LINES)
        logger.info('the profile is in %s', path)
