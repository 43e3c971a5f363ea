"""What the learner of MuZero refuses."""
from collections.abc import Callable
from typing import Any

from alfx import nest
from alfx.algorithms.data_transformer import HindsightExperienceTransformer, RewardTransformer
from alfx.algorithms.mcts_algorithm import MCTSAlgorithm
from alfx.algorithms.muzero.targets import TargetSettings
from alfx.gin_utils import ConfError
from alfx.gin_utils.value_checks import problem_at
from alfx.tensor_specs import NestedTensorSpec, TensorSpec

_LEARNER = 'MuzeroRepresentationImpl'


def check_settings(name: str, settings: TargetSettings, gradient_scale: float, batch_size: int | None) -> None:
    """Refuse numbers that are out of range.

    Raises:
        ValueError: names the argument.
    """
    s = settings
    wrong = [('num_unroll_steps', 'at least 0', s.num_unroll_steps, s.num_unroll_steps >= 0),
             ('td_steps', 'at least 1, or -1', s.td_steps, s.td_steps >= 1 or s.td_steps == -1),
             ('discount', 'a number in [0, 1]', s.discount, 0 <= s.discount <= 1),
             ('recurrent_gradient_scaling_factor', 'a number in [0, 1]', gradient_scale, 0 <= gradient_scale <= 1),
             ('reanalyze_ratio', 'a number in [0, 1]', s.reanalyze_ratio, 0 <= s.reanalyze_ratio <= 1),
             ('reanalyze_td_steps', 'at least 1', s.reanalyze_td_steps, s.reanalyze_td_steps >= 1),
             ('reanalyze_batch_size', 'at least 1', batch_size, batch_size is None or batch_size >= 1)]
    for argument, expected, found, is_right in wrong:
        if not is_right:
            raise ValueError(f'{name}.{argument}: expected {expected}, found {found}')


def check_reanalysis(name: str, settings: TargetSettings, ctor: Callable[..., Any] | None) -> None:
    """Refuse a share that nothing reanalyzes, and settings of a reanalysis that there is none of.

    Raises:
        ValueError: names the argument.
    """
    if settings.reanalyze_ratio > 0 and ctor is None:
        raise ValueError(f'{name}.reanalyze_ratio: expected 0 without reanalyze_algorithm_ctor, found '
                         f'{settings.reanalyze_ratio}; set reanalyze_algorithm_ctor = @MCTSAlgorithm')
    given = {'reanalyze_algorithm_ctor': ctor is not None, 'full_reanalyze': settings.full_reanalyze,
             'reanalyze_td_steps_func': settings.td_steps_func is not None}
    without_use = [argument for argument, is_given in given.items() if is_given and not settings.reanalyze_ratio]
    if without_use:
        raise ValueError(f'{name}.{without_use[0]}: expected it to be left out with reanalyze_ratio = 0')


def check_model(name: str, model: Any, num_unroll_steps: int, trains: dict[str, bool]) -> None:
    """Refuse a model that was made for something else than what the learner does.

    Raises:
        ConfError: a loss does not read what the model predicts.
        ValueError: names the argument.
    """
    if model.num_unroll_steps != num_unroll_steps:
        raise ValueError(f'{name}.num_unroll_steps: expected that of the model, {model.num_unroll_steps}, found '
                         f'{num_unroll_steps}')
    for argument, value in trains.items():
        if model.what_is_trained[argument] != value:
            raise ValueError(f'{name}.{argument}: expected that of the model, {model.what_is_trained[argument]}, found '
                             f'{value}')
    model.check_losses()


def check_transformer(name: str, transformer: Any, is_own: bool, is_policy: bool) -> None:
    """Refuse transformers whose work is not in the replay buffer, and one of its own where the run's is used.

    Raises:
        ConfError: names it.
    """
    if is_own and is_policy:
        raise ConfError([problem_at(
            _LEARNER, 'data_transformer_ctor', 'has no effect under MuzeroAlgorithm, which acts and learns on what the '
            'data transformer of the run makes', 'bind TrainerConfig.data_transformer_ctor in place of it')])
    for part in [] if transformer is None else transformer.modules():
        if isinstance(part, (RewardTransformer, HindsightExperienceTransformer)):
            raise ConfError([problem_at(
                _LEARNER if is_own else 'TrainerConfig', 'data_transformer_ctor', f'has a {type(part).__name__}, but '
                f'{name} computes values from the rewards in the replay buffer, which are those of the environment',
                'leave it out and set MuzeroAlgorithm.reward_transformer; under another policy algorithm, give '
                f'{_LEARNER}.data_transformer_ctor without it')])


def check_stored(settings: TargetSettings, trains_policy: bool, has_searched: bool, stores_states: bool,
                 algorithm: Any) -> None:
    """Refuse what would need something that was not stored.

    Args:
        settings: of the targets.
        trains_policy: whether the model learns a policy.
        has_searched: whether what a search found is stored with the steps.
        stores_states: whether the states of that search are.
        algorithm: what reanalyzes, or ``None``.

    Raises:
        ConfError: says what to change.
    """
    if not has_searched and settings.reanalyze_ratio < 1 and (trains_policy or settings.td_steps >= 0):
        raise ConfError([problem_at(
            _LEARNER, 'reanalyze_ratio', f'= {settings.reanalyze_ratio}, but nothing searches when a step is stored: '
            'there are no values and no policies to learn from', 'set it to 1.0 and reanalyze_algorithm_ctor = '
            '@MCTSAlgorithm; or train_policy = False and td_steps = -1')])
    needed = ''
    if isinstance(algorithm, MCTSAlgorithm):
        needed = '' if stores_states else algorithm.relevant_state
    elif algorithm is not None and nest.flatten(algorithm.rollout_state_spec):
        needed = 'its own state'
    if needed:
        hint = 'choose one without a state'
        if isinstance(algorithm, MCTSAlgorithm) and has_searched:
            hint = 'set TrainerConfig.use_rollout_state = True'
        raise ConfError([problem_at(_LEARNER, 'reanalyze_algorithm_ctor', f'makes {algorithm.name}, which has to know '
                                    f'{needed}, and that is not stored with the steps', hint)])


def check_observations(name: str, stored: NestedTensorSpec, seen: NestedTensorSpec) -> None:
    """Refuse an encoder between the replay buffer and a learner that looks up observations there.

    Raises:
        ConfError: the two specs differ.
    """
    stored, seen = (nest.map_structure(TensorSpec.from_spec, spec) for spec in (stored, seen))
    if nest.structure(stored) != nest.structure(seen) or nest.flatten(stored) != nest.flatten(seen):
        raise ConfError([problem_at(
            _LEARNER, 'model_ctor', f'makes a model of observations {seen}, but with reanalyze_ratio or '
            f'train_repr_prediction {name} has to look at stored ones, which are {stored}',
            'leave out the part that encodes them before; the model has an encoder of its own')])
