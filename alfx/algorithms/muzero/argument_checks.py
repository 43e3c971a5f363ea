"""Argument checks of the MuZero learner."""
from collections.abc import Callable
from typing import Any

from alfx import nest
from alfx.algorithms.data_transformer import HindsightExperienceTransformer, RewardTransformer
from alfx.algorithms.mcts_algorithm import MCTSAlgorithm
from alfx.algorithms.muzero.targets import TargetSettings
from alfx.gin_utils import ConfError, log_unused, problem_at
from alfx.tensor_specs import NestedTensorSpec, TensorSpec

_LEARNER = 'MuzeroRepresentationImpl'


def check_reanalysis(name: str, settings: TargetSettings, ctor: Callable[..., Any] | None) -> None:
    """Reject a share of reanalysis without an algorithm for it, and log settings of reanalysis without a share.

    Raises:
        ValueError: there is no algorithm; the message names the argument.
    """
    if settings.reanalyze_ratio > 0 and ctor is None:
        raise ValueError(f'{name}.reanalyze_ratio: expected 0 without reanalyze_algorithm_ctor, found '
                         f'{settings.reanalyze_ratio}; set reanalyze_algorithm_ctor = @MCTSAlgorithm')
    given = {'reanalyze_algorithm_ctor': ctor is not None, 'full_reanalyze': settings.full_reanalyze,
             'reanalyze_td_steps_func': settings.td_steps_func is not None}
    if not settings.reanalyze_ratio:
        log_unused(_LEARNER, [argument for argument in given if given[argument]], 'reanalyze_ratio is 0')


def check_model(name: str, model: Any, num_unroll_steps: int, trains: dict[str, bool]) -> None:
    """Reject a model whose settings differ from those of the learner.

    Raises:
        ConfError: a loss does not match the predictions of the model.
        ValueError: a setting differs; the message names the argument.
    """
    if model.num_unroll_steps != num_unroll_steps:
        raise ValueError(f'{name}.num_unroll_steps: expected the value of the model, {model.num_unroll_steps}, found '
                         f'{num_unroll_steps}')
    for argument, value in trains.items():
        if model.what_is_trained[argument] != value:
            raise ValueError(f'{name}.{argument}: expected the value of the model, {model.what_is_trained[argument]}, '
                             f'found {value}')
    model.check_losses()


def check_transformer(name: str, transformer: Any, is_own: bool, is_policy: bool) -> None:
    """Reject transformers whose results are not in the replay buffer, and a separate transformer without effect.

    Raises:
        ConfError: such a transformer is set; the message names it.
    """
    if is_own and is_policy:
        raise ConfError([problem_at(
            _LEARNER, 'data_transformer_ctor', 'has no effect under MuzeroAlgorithm, which acts and learns with the '
            'data transformer of the run', 'bind TrainerConfig.data_transformer_ctor instead')])
    for part in [] if transformer is None else transformer.modules():
        if isinstance(part, (RewardTransformer, HindsightExperienceTransformer)):
            raise ConfError([problem_at(
                _LEARNER if is_own else 'TrainerConfig', 'data_transformer_ctor', f'has a {type(part).__name__}, but '
                f'{name} computes values from the rewards in the replay buffer, which are those of the environment',
                'leave it out and set MuzeroAlgorithm.reward_transformer; with another policy algorithm, set '
                f'{_LEARNER}.data_transformer_ctor without it')])


def check_stored(settings: TargetSettings, trains_policy: bool, has_searched: bool, stores_states: bool,
                 algorithm: Any) -> None:
    """Reject settings that need data which is not stored.

    Args:
        settings: settings of the targets.
        trains_policy: the model learns a policy.
        has_searched: results of a search are stored with the steps.
        stores_states: states of that search are stored with the steps.
        algorithm: algorithm that reanalyzes, or ``None``.

    Raises:
        ConfError: data is missing; the message names the setting to change.
    """
    if not has_searched and settings.reanalyze_ratio < 1 and (trains_policy or settings.td_steps >= 0):
        raise ConfError([problem_at(
            _LEARNER, 'reanalyze_ratio', f'= {settings.reanalyze_ratio}, but no search runs when a step is stored: '
            'there are no values and no policies to learn from', 'set it to 1.0 and reanalyze_algorithm_ctor = '
            '@MCTSAlgorithm; or train_policy = False and td_steps = -1')])
    needed = ''
    if isinstance(algorithm, MCTSAlgorithm):
        needed = '' if stores_states else algorithm.relevant_state
    elif algorithm is not None and nest.flatten(algorithm.rollout_state_spec):
        needed = 'its own state'
    if needed:
        hint = 'choose an algorithm without a state'
        if isinstance(algorithm, MCTSAlgorithm) and has_searched:
            hint = 'set TrainerConfig.use_rollout_state = True'
        raise ConfError([problem_at(_LEARNER, 'reanalyze_algorithm_ctor', f'creates {algorithm.name}, which needs '
                                    f'{needed}, which is not stored with the steps', hint)])


def check_observations(name: str, stored: NestedTensorSpec, seen: NestedTensorSpec) -> None:
    """Reject an encoder between the replay buffer and a learner that looks up observations in the buffer.

    Raises:
        ConfError: the two specs differ.
    """
    stored, seen = (nest.map_structure(TensorSpec.from_spec, spec) for spec in (stored, seen))
    if nest.structure(stored) != nest.structure(seen) or nest.flatten(stored) != nest.flatten(seen):
        raise ConfError([problem_at(
            _LEARNER, 'model_ctor', f'creates a model of observations {seen}, but with reanalyze_ratio or '
            f'train_repr_prediction {name} needs stored observations, which are {stored}',
            'leave out the part that encodes them; the model has its own encoder')])
