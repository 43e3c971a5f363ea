"""What has become of the plans of an algorithm, for tests that have to know that something was played at all."""
import logging

from alfx.engine.plan import TracedPlan


def forms(agent):
    """All forms of its updates that have been made."""
    plan = agent.updater.plan(agent.learner.losses.unroll,
                              True) if agent.on_policy else agent.updater.plan(agent.learner.losses.collected)
    return [form for form in (plan.played, plan.compiled) if form is not None] if isinstance(plan, TracedPlan) else []


def num_records(agent):
    """How many records of its updates are in use."""
    return sum(form.num_records for form in forms(agent))


def warnings_in(caplog):
    """What plans have warned of."""
    return [record.getMessage() for record in caplog.records
            if record.levelno >= logging.WARNING and record.name.startswith('alfx.engine.plan')]
