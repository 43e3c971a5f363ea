"""Values of command-line flags for tests that call programs in this process."""
import contextlib
from collections.abc import Iterator
from typing import Any

from alfx.bin.flags import FLAGS, Parser


@contextlib.contextmanager
def flag_values(parser: Parser | None = None, **values: Any) -> Iterator[None]:
    """Context manager in which flags have the given values.

    Args:
        parser: command line of a program; all its other flags have their defaults. Without it, they keep their values.
        values: value by name of the flag.
    """
    before = dict(vars(FLAGS))
    if parser is not None:
        vars(FLAGS).update(vars(parser.read([])))
    vars(FLAGS).update(values)
    try:
        yield
    finally:
        vars(FLAGS).clear()
        vars(FLAGS).update(before)
