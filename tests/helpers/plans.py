"""State of the plans of an algorithm, for tests that check whether graphs were replayed."""
import logging

from alfx.engine.plan import TracedPlan


def backends_of(agent):
    """Return the backends that exist for the updates of an agent."""
    plan = agent.updater.plan(agent.learner.losses.unroll,
                              True) if agent.on_policy else agent.updater.plan(agent.learner.losses.collected)
    return [x for x in (plan.replayed, plan.compiled) if x is not None] if isinstance(plan, TracedPlan) else []


def num_graphs(agent):
    """Return the number of traced graphs of its updates that are in use."""
    return sum(backend.num_graphs for backend in backends_of(agent))


def warnings_in(caplog):
    """Return the warnings of plans."""
    return [record.getMessage() for record in caplog.records
            if record.levelno >= logging.WARNING and record.name.startswith('alfx.engine.plan')]
