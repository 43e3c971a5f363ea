"""Computation of the gradients of an update: in eager mode, replayed from a traced graph, compiled, or a CUDA graph.

An :class:`Objective` describes an update and a :class:`Batch` is its input. A plan leaves the gradients in the ``grad``
of the parameters; optimizers step outside of plans. Each backend wraps a slower, more general one, falls back to it,
and is verified against it, so that training gives the results of eager mode.

Read :mod:`~alfx.engine.plan.eager`, then ``traced_plan`` and ``backends``. ``traced_graph`` and ``trace`` create traced
graphs; ``program``, ``compile`` (with ``cpu_graph``) and ``capture`` execute them. ``acting`` does the same for
policies.
"""
from alfx.engine.plan.acting import TracedFunction
from alfx.engine.plan.eager import Batch, Computed, Eager, Objective
from alfx.engine.plan.traced_plan import TracedPlan

__all__ = ['Batch', 'Computed', 'Eager', 'TracedPlan', 'Objective', 'TracedFunction', 'make_plan']


def make_plan(objective: Objective, is_traceable: bool, compiles: bool = False, is_rare: bool = False) -> Eager:
    """Return a plan that computes the gradients of an objective.

    Args:
        objective: loss to minimize.
        is_traceable: whether the update executes the same tensor operations every time, except for those that
            ``objective.graph_key`` selects. A wrong value is detected, though perhaps some updates later.
        compiles: compile a traceable objective; otherwise it is replayed.
        is_rare: whether there is at most one update per iteration.
    """
    if not is_traceable or objective.scaled is not None or not objective.params:
        return Eager(objective)
    return TracedPlan(objective, compiles, is_rare)
