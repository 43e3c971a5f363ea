"""Where the time of a run goes (``TrainerConfig.profiling``)."""
import contextlib
import cProfile
import pstats
from collections.abc import Iterator

_LINES = 100


@contextlib.contextmanager
def profiled(path: str | None) -> Iterator[None]:
    """Context manager that profiles its body with cProfile.

    Args:
        path: the report goes here: the functions that take most time, by their own time and with what they call. None
            for no profiling.
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
