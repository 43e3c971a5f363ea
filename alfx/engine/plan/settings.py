"""How often something is computed step by step before there is a faster form of it."""
from typing import NamedTuple


class WarmUp(NamedTuple):
    """How often each variant and layout is computed by the form below first.

    Attributes:
        updates: before an update is played. Recording takes as long as some hundred updates: a short run is over before
            that pays.
        calls: before a policy is played, for which the same holds.
        compiled_updates: before an update is compiled: who asks for it trains for long, the sooner it is there the
            better.
        compiled_calls: before a policy is compiled.
        captured_updates: before a compiled update becomes a CUDA graph.
    """

    updates: int = 50
    calls: int = 500
    compiled_updates: int = 0
    compiled_calls: int = 100
    captured_updates: int = 1


WARM_UP = WarmUp()
