"""How an update is computed: step by step, played from a record, compiled, or as a CUDA graph.

An update is described by an :class:`Objective` and made from a :class:`Batch`. A plan leaves the gradients in the
parameters; the steps of optimizers are always outside. Each form wraps a slower one, does less, falls back to it, and
is held against it: training with a faster one gives the numbers of the slowest.

Read :mod:`~alfx.engine.plan.eager`, then ``update`` and ``forms``; ``record`` makes records, ``program`` plays them,
``compile`` (with ``cpu_graph``) and ``capture`` are the other ways to carry them out; ``acting`` does the same for
policies.
"""
from alfx.engine.plan.acting import Recorded
from alfx.engine.plan.eager import Batch, Computed, Eager, Objective
from alfx.engine.plan.traced_plan import TracedPlan

__all__ = ['Batch', 'Computed', 'Eager', 'TracedPlan', 'Objective', 'Recorded', 'make_plan']


def make_plan(objective: Objective, is_traceable: bool, compiles: bool = False, is_rare: bool = False) -> Eager:
    """How to compute the gradients of an objective.

    Args:
        objective: what to compute.
        is_traceable: whether it is the same tensor operations every time, but for ``objective.variant``. A violation
            is noticed, though perhaps some updates later.
        compiles: whether a fixed objective is compiled; otherwise it is played.
        is_rare: whether there is only one update an iteration.
    """
    if not is_traceable or objective.scaled is not None or not objective.params:
        return Eager(objective)
    return TracedPlan(objective, compiles, is_rare)
