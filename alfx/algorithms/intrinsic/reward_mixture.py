"""Intrinsic reward modules of an agent: several of them, their coefficients, and when they compute rewards."""
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.containers import AlgorithmContainer
from alfx.algorithms.intrinsic.intrinsic_reward import IntrinsicRewardAlgorithm
from alfx.data_structures import AlgStep, TimeStep
from alfx.gin_utils import ConfError, problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.utils.schedulers import as_scheduler

Coefficient = float | Callable[[], float]
"""A number, or a scheduler of it."""


class RewardMixture(AlgorithmContainer):
    """Intrinsic reward modules, by their names.

    Outputs, states and infos are dicts with one entry per module.

    Args:
        modules: at least two, with different names.

    Raises:
        ConfError: two modules have the same name, or a module rewards stored steps.
    """

    _declared_capabilities = {'traceable_update': True, 'trains_sequences_at_once': True}  # the modules restrict it

    def __init__(self, modules: Sequence[Algorithm]):
        names = [module.name for module in modules]
        for name in names:
            if names.count(name) > 1:
                raise ConfError([problem_at('Agent', 'intrinsic_reward_module', f"has two modules named '{name}'",
                                            f'set {name}.name, in a scope for each of them')])
        for module in modules:
            if rewards_batches(module):
                raise ConfError([problem_at('Agent', 'intrinsic_reward_module', 'is a list with '
                                            f'{type(module).__name__}, which rewards stored steps', 'use it alone')])
        parts = dict(zip(names, modules))
        specs: dict[str, Any] = {spec: {name: getattr(part, spec) for name, part in parts.items()} for spec in (
            'train_state_spec', 'rollout_state_spec', 'predict_state_spec')}
        super().__init__(parts, **specs, name='RewardMixture')

    @property
    def modules_by_name(self) -> dict[str, Any]:
        """The modules."""
        return self._inner()

    @property
    def rewards_unrolls_at_once(self) -> bool:
        """Return whether all modules can reward a whole unroll at once."""
        return all(getattr(part, 'rewards_unrolls_at_once', False) for part in self._inner().values())

    @property
    def unroll_state_spec(self) -> NestedTensorSpec:
        """Specs of the states of the modules between unrolls."""
        return {name: part.unroll_state_spec for name, part in self._inner().items()}

    def reward_rows(self, inputs: TimeStep, state: NestedTensor | None, overlaps: bool) -> AlgStep:
        """Run ``reward_rows`` of all modules."""
        return self._each(lambda part, own: part.reward_rows(inputs, own, overlaps), state)

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Run ``rollout_step`` of all modules."""
        return self._each(lambda part, own: part.rollout_step(inputs, own), state)

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Run ``predict_step`` of all modules that have one."""
        return self._each(lambda part, own: AlgStep((), own) if type(part).predict_step is Algorithm.predict_step else
                          part.predict_step(inputs, own), state)

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: Any) -> AlgStep:
        """Run ``train_step`` of all modules."""
        return self._each(lambda part, own, info: part.train_step(inputs, own, info), state, rollout_info)

    def train_sequence(self, inputs: TimeStep, state: NestedTensor, rollout_info: Any) -> AlgStep:
        """Run ``train_sequence`` of all modules."""
        return self._each(lambda part, own, info: part.train_sequence(inputs, own, info), state, rollout_info)

    def _each(self, function: Callable[..., AlgStep], *by_name: Any) -> AlgStep:
        """Return ``function(module, ...)`` by module; ``by_name``: arguments as dicts by module, or shared by all."""
        steps = {name: function(part, *(x[name] if isinstance(x, dict) else x for x in by_name))
                 for name, part in self._inner().items()}
        return AlgStep(*({name: getattr(step, field) for name, step in steps.items()} for field in AlgStep._fields))


def modules_and_coefficients(module: Any, coefficient: Any, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Return the intrinsic reward module, and a scheduler of the coefficient of each reward by its name.

    Raises:
        ConfError: the numbers of modules and coefficients differ, or a list is empty.
    """
    if module is None:
        return None, {}
    modules = list(module) if isinstance(module, list | tuple) else [module]
    coefficients = list(coefficient) if isinstance(coefficient, list | tuple) else [coefficient] * len(modules)
    if len(modules) != len(coefficients) or not modules:
        raise ConfError([problem_at('Agent', 'intrinsic_reward_coef', f'has {len(coefficients)} coefficient(s) for '
                                    f'{len(modules)} intrinsic_reward_module(s)', 'set one for each')])
    schedulers = [as_scheduler(coefficient) for coefficient in coefficients]
    made = [module if isinstance(module, Algorithm) else module(**arguments) for module in modules]
    if len(made) == 1:
        return made[0], {'irm': schedulers[0]}
    mixture = RewardMixture(made)
    return mixture, dict(zip(mixture.modules_by_name, schedulers))


def rewards_by_name(reward: Any) -> dict[str, Tensor]:
    """Return the output of an intrinsic reward module as rewards by name, without empty ones."""
    rewards = reward if isinstance(reward, dict) else {'irm': reward}
    return {name: value for name, value in rewards.items() if isinstance(value, Tensor)}


def rewards_batches(module: Any) -> bool:
    """Return whether the module rewards stored steps when they are trained on."""
    return getattr(module, 'rewards_batches', False)


def check_modules(module: Any, rl_algorithm: Any, config: Any) -> None:
    """Run ``check_use`` of a module, or of the parts of a mixture."""
    for part in module.modules_by_name.values() if isinstance(module, RewardMixture) else [module]:
        if isinstance(part, IntrinsicRewardAlgorithm):
            part.check_use(rl_algorithm, config)


def rewards_unrolls_at_once(module: Any, rl_algorithm: Any, config: Any) -> bool:
    """Return whether the rewards of an unroll can be computed when it is complete."""
    if not getattr(module, 'rewards_unrolls_at_once', False) or config is None:
        return False
    if rl_algorithm.on_policy is not False:
        return bool(nest.flatten(module.unroll_state_spec))
    return config.trains_on_whole_unrolls or (not _without_memory(module) and not config.unroll_with_grad)


def _without_memory(module: Any) -> list[str]:
    """Return the class names of a module, or of the parts of a mixture, that have no state between unrolls."""
    parts = module.modules_by_name.values() if isinstance(module, RewardMixture) else [module]
    return [type(part).__name__ for part in parts if not nest.flatten(part.unroll_state_spec)]


def why_not_at_once(module: Any, rl_algorithm: Any, is_first_part: bool, config: Any) -> str:
    """Return why a module with a state between unrolls cannot be used."""
    if not is_first_part:
        return 'there is a representation learner or a goal generator in front of it'
    if config is None or config.unroll_with_grad:
        return 'there is no TrainerConfig, or TrainerConfig.unroll_with_grad is set'
    return f'{_without_memory(module)[0]} rewards the steps of {type(rl_algorithm).__name__} one at a time'
