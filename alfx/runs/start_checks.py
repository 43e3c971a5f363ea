"""Checks at the start of a run: errors for settings that make the first update fail, and warnings for large sizes."""
import copy
import importlib.util
import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch

from alfx import context, nest
from alfx.algorithms.td_loss import TDLoss
from alfx.config import TrainerConfig
from alfx.experience_replayers.packed_storage import memory_of
from alfx.gin_utils import ConfError, Problem, locations, log_unused, problem_at, static_check, supplied_arguments
from alfx.tensor_specs import NestedTensorSpec, TensorSpec
from alfx.utils.extras import pip_install
from alfx.utils.processes import num_cores

logger = logging.getLogger(__name__)
_GIBIBYTE = 2**30
_SHARE_OF_MEMORY = 0.5
_MANY_PROCESSES = 4  # per core
_NOT_OF_AN_ALGORITHM = {'lstm_hidden_size', 'last_activation'}  # parameters of recurrent networks and of encoders
_OF_REPLAY = {'mini_batch_length', 'mini_batch_size', 'num_updates_per_train_iter', 'priority_replay',
              'replay_buffer_length'}
_OTHER_LAYERS = {'encoding_network_ctor', 'joint_encoder_ctor'}  # arguments by which a conf adds layers in another way


def check_environment_is_named() -> None:
    """Check that the loaded conf names its environment, because the default task is hardly ever intended.

    Raises:
        ConfError: the conf binds neither ``create_environment.env_name`` nor ``env_load_fn``.
    """
    bound = {binding.name for binding in locations.bindings() if binding.selector.endswith('.create_environment')}
    if locations.bindings() and not bound & {'env_name', 'env_load_fn'}:
        raise ConfError('create_environment.env_name is not set', "set it to a task, for example "
                        "create_environment.env_name = 'CartPole-v1'; alfx list shows confs that do")


def check_loggers(names: Collection[str]) -> None:
    """Check that the packages of experiment trackers are installed.

    Args:
        names: ``TrainerConfig.loggers``.

    Raises:
        ConfError: a package is missing; the message says how to install it.
    """
    for name in names:
        if name in ('wandb', 'mlflow') and importlib.util.find_spec(name) is None:
            raise ConfError(f"TrainerConfig.loggers: '{name}' needs a package that is not installed", pip_install(name))


def describe_run(algorithm: Any, has_environment: bool) -> str:
    """Describe a run in one line: task, algorithm, number of parameters and device.

    Args:
        algorithm: root algorithm of the run, with its environment created.
        has_environment: whether the algorithm acts in an environment.
    """
    created = [copy.deepcopy(arguments['env_name'])  # a copy has the values of macros
               for (_, selector), arguments in supplied_arguments().items()
               if has_environment and selector.endswith('.create_environment') and 'env_name' in arguments]
    names = created[:1] if created and (isinstance(created[0], str) or callable(created[0])) else created and created[0]
    tasks = [getattr(name, '__name__', str(name)) for name in names]
    main = getattr(algorithm, 'policy', algorithm)
    count = sum(parameter.numel() for parameter in algorithm.parameters())
    return ', '.join([*tasks, type(main).__name__, f'{count:,} parameters', str(context.get_default_device())])


def log_settings_of_replay(algorithm: Any) -> None:
    """Log the replay settings of the conf that an algorithm does not use, because it trains on each unroll once."""
    name = type(getattr(algorithm, 'policy', algorithm)).__name__
    bound = {binding.name for binding in locations.bindings() if binding.selector.endswith('.TrainerConfig')}
    log_unused('TrainerConfig', sorted(bound & _OF_REPLAY), f'{name} is on-policy and trains on each unroll once')


def warn_of_linear_networks() -> None:
    """Warn about networks of an algorithm that have no layers, because their output is linear in their input.

    Networks whose layers the conf sets, even to (), are not reported. Recurrent networks are never linear.
    """
    for (scope, selector), arguments in supplied_arguments().items():
        parameters, _ = static_check.parameters_of(static_check.resolve(selector))
        sizes = {name for name in parameters if name.endswith('layer_params')}
        main = sizes & {'fc_layer_params', 'joint_fc_layer_params'}
        if not main or not any('conv' in name for name in sizes) or parameters.keys() & _NOT_OF_AN_ALGORITHM:
            continue
        bound = locations.bindings_in_effect(selector, scope.split('/') if scope else ())
        if not any(arguments.get(name, True) for name in sizes) and not bound.keys() & (sizes | _OTHER_LAYERS):
            binding = f'{selector.rsplit(".", 1)[-1]}.{min(main)}'
            logger.warning('%s is not set, so the network is linear: set %s = (256, 256), or () for a linear network',
                           binding, binding)


def check_observation(observation_spec: NestedTensorSpec) -> None:
    """Check that every observation has elements.

    Raises:
        ConfError: an observation has no elements; the message names the field.
    """
    for path, spec in nest.flatten_with_path(observation_spec) or [('', TensorSpec((0, )))]:
        if spec.numel == 0:
            raise ConfError([problem_at(
                'create_environment', 'env_name', f'has an observation{f" {path!r}" if path else ""} without elements, '
                f'of shape {tuple(spec.shape)}', 'remove it with a wrapper, or choose another environment')])


def check_learning(algorithm: Any, config: TrainerConfig, env: Any) -> None:
    """Check that an algorithm can be trained with the settings of the run.

    Args:
        algorithm: the algorithm, before ``finalize``.
        config: configuration of the run.
        env: batched environment.

    Raises:
        ConfError: settings are incompatible with the algorithm; the message names them.
    """
    if algorithm.on_policy is False:
        problems = [*_too_short_sequences(algorithm, config), *_missing_priorities(algorithm, config)]
    else:
        problems = list(_too_long_unrolls(config, env))
    if problems:
        raise ConfError(problems)


def warn_of_processes(count: int, setting: str) -> None:
    """Warn if too many processes would share the cores of this machine.

    Args:
        count: number of processes.
        setting: the setting or flag with its value, for the message.
    """
    cores = num_cores()
    if count > _MANY_PROCESSES * cores:
        logger.warning('%s: %d processes share the %d core(s) of this machine and will mostly wait for each other',
                       setting, count, cores)


def warn_of_unroll(env: Any, config: TrainerConfig) -> None:
    """Warn if the observations of one unroll need more than half of the memory of this machine.

    Args:
        env: environments of this process.
        config: configuration of the run.
    """
    length = max(1, int(config.unroll_length or config.max_unroll_length))
    specs = nest.flatten(env.observation_spec())
    num_bytes = sum(spec.numel * spec.dtype.itemsize for spec in specs) * length * env.batch_size * context.num_ranks()
    memory = memory_of(torch.device('cpu'))
    if num_bytes > _SHARE_OF_MEMORY * memory:
        logger.warning('the observations of one unroll (TrainerConfig.unroll_length = %d steps of %d environments) '
                       'need %.0f GiB, but this machine has %.0f GiB of memory', length,
                       env.batch_size * context.num_ranks(), num_bytes / _GIBIBYTE, memory / _GIBIBYTE)


def warn_of_mini_batch(num_environments: int, config: TrainerConfig) -> None:
    """Warn if a minibatch is larger than the unroll on which an algorithm trains.

    Args:
        num_environments: number of environments of the run.
        config: configuration of the run.
    """
    steps = int(config.unroll_length)
    if not (config.trains_on_whole_unrolls and config.mini_batch_size and steps):
        return
    length = config.mini_batch_length or steps
    count = num_environments * (steps // length)
    if 0 < count < config.mini_batch_size:
        logger.warning('TrainerConfig.mini_batch_size = %d, but an unroll of %d steps of %d environments has only %d '
                       'sequences of %d step(s): every update uses all of them', config.mini_batch_size, steps,
                       num_environments, count, length)


def _too_long_unrolls(config: TrainerConfig, env: Any) -> Iterator[Problem]:
    """Yield a problem if an unroll does not fit into memory. Replay buffers have their own check."""
    step = sum(spec.numel * spec.dtype.itemsize for spec in nest.flatten(env.observation_spec()))
    needed, available = int(config.unroll_length) * env.batch_size * step, memory_of(torch.device('cpu'))
    if needed > available:
        yield problem_at('TrainerConfig', 'unroll_length', f'= {config.unroll_length:g}: the observations of an unroll '
                         f'need {needed:,} bytes, but only {available:,} bytes of memory are available', 'reduce it')


def _too_short_sequences(algorithm: Any, config: TrainerConfig) -> Iterator[Problem]:
    unroll = max(int(config.unroll_length), 1) if config.whole_replay_buffer_training else 1
    length = config.mini_batch_length or unroll
    losses = [type(part).__name__ for part in algorithm.modules() if isinstance(part, TDLoss)]
    if length < 2 and losses and not algorithm.capabilities.needs_two_steps:  # else see check_sequences
        yield problem_at('TrainerConfig', 'mini_batch_length', f'= {length}: {losses[0]} learns from transitions, but '
                         'sequences of one step contain none', 'set it to 2, so that each sample is one transition')


def _missing_priorities(algorithm: Any, config: TrainerConfig) -> Iterator[Problem]:
    able = [part for part in algorithm.modules() if hasattr(part, '_calculate_priority')]
    if config.priority_replay and able and not any(part._calculate_priority for part in able):
        name = type(able[0]).__name__
        yield problem_at('TrainerConfig', 'priority_replay', f'= True, but {name} computes no priorities',
                         f'set {name}.calculate_priority = True')
