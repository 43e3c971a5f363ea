"""The plans of an algorithm: which objective it minimises, and whether that is fixed."""
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from alfx import gin_utils
from alfx.engine.plan import Objective, Plan, make_plan
from alfx.engine.plan.objective import Losses
from alfx.gin_utils.checks import problem_at

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm

logger = logging.getLogger(__name__)


def has_fixed_update(algorithm: 'Algorithm') -> bool:
    """Whether the very class of ``algorithm`` says that its update is the same operations every time.

    What a subclass changes nobody knows but its author: it has to define ``has_fixed_update`` again.
    """
    return 'has_fixed_update' in vars(type(algorithm)) and algorithm.has_fixed_update


def check_compilable(algorithm: 'Algorithm') -> None:
    """Refuse what cannot be compiled, before anything is trained.

    Raises:
        ConfError: the algorithm's update is not the same operations every time.
    """
    if not has_fixed_update(algorithm):
        raise gin_utils.ConfError([problem_at(
            'TrainerConfig', 'compile', f'= True is not possible with {algorithm.name}: its update is not the same '
            'operations every time', 'leave it at False')])


def plan_of(algorithm: 'Algorithm', losses: Callable[['Algorithm', Any], Any],
            is_function_of_batch: bool = True) -> Plan:
    """The plan of ``algorithm`` for an objective, made at the first call.

    Args:
        algorithm: trains.
        losses: ``losses(algorithm, experience)`` is as ``Objective.losses``.
        is_function_of_batch: otherwise the experience has gradients of its own, and nothing can be recorded.
    """
    plan = algorithm._plans.get(losses)
    if plan is None:
        plan = algorithm._plans[losses] = _make_plan(algorithm, losses, is_function_of_batch)
    return plan


def _make_plan(algorithm: 'Algorithm', losses: Callable[['Algorithm', Any], Any], is_function_of_batch: bool) -> Plan:
    config, is_fixed = algorithm._config, is_function_of_batch and has_fixed_update(algorithm)
    if is_fixed and algorithm.loss_scaler is not None:
        logger.info('updates of %s are made step by step: whether one is skipped depends on its gradients (float16)',
                    algorithm.name)
    return make_plan(objective_of(algorithm, partial(losses, algorithm)), is_fixed,
                     config is not None and config.compile)


def objective_of(algorithm: 'Algorithm', losses: Losses) -> Objective:
    """What ``algorithm`` minimises.

    Args:
        algorithm: is trained.
        losses: see :class:`~alfx.engine.plan.objective.Objective`.
    """
    scaler = algorithm.loss_scaler
    return Objective(
        module=algorithm, losses=losses, params=[p for _, p in algorithm.what_is_updated()[1]], name=algorithm.name,
        variant=partial(getattr, algorithm, 'update_variant'), scaled=None if scaler is None else scaler.scaled,
        gradient_noise=algorithm.gradient_noise_scale)
