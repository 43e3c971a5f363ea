"""Description of what a conf builds: specs, parameters with their optimizers, and memory of the replay buffer.

``alfx check`` prints the lines of :func:`check`; the other functions create the sections.
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from alfx import gin_utils, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.data_transformer import IdentityDataTransformer, SequentialDataTransformer
from alfx.config import TrainerConfig
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import NestedTensorSpec, TensorSpec
from alfx.trainers.acting import unroll_sources as acting
from alfx.trainers.agent_drawing import agent_lines, describe


class CheckResult(NamedTuple):
    """Result of the check of a conf.

    Attributes:
        description: lines about specs, parameters and memory.
        mistakes: bindings of the conf or of ``params`` that had no effect, with file, line and what to do.
        notes: bindings of included confs that had no effect; they may be meant for other confs.
        warnings: included confs that had no effect at all.
    """
    description: tuple[str, ...]
    mistakes: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the text that ``alfx check`` prints."""
        count = f'{len(self.mistakes)} unused binding' + ('s' if len(self.mistakes) > 1 else '')
        end = ('all bindings are used' if not self.mistakes + self.notes else
               count if self.mistakes else 'all bindings of this conf are used')
        return '\n'.join([*self.description, *(f'unused: {text}' for text in self.mistakes),
                          *(f'note: unused so far: {text}' for text in self.notes),
                          *(f'warning: {text}' for text in self.warnings), end])


def unused(description: Sequence[str] = ()) -> CheckResult:
    """Return the bindings of the loaded conf that :func:`check` did not use.

    Args:
        description: lines to include in the result.
    """
    found = gin_utils.unused_bindings()
    mistakes = gin_utils.mistakes_of_unused(found)
    wrong = [binding for binding, _ in mistakes]
    return CheckResult(tuple(description),
                       tuple(f'{binding.location}: {binding}\n  {hint}' for binding, hint in mistakes),
                       tuple(f'{binding.location}: {binding}' for binding in found if binding not in wrong),
                       tuple(gin_utils.confs_without_effect(found)))


def check(root_dir: str, conf_file: str = '', callbacks: Sequence[Any] = ()) -> Iterator[str]:
    """Build the algorithm of the loaded conf and train until the first parameter update.

    Args:
        root_dir: empty folder for the files of the run.
        conf_file: path of the conf, for ``TrainerConfig.conf_file``.
        callbacks: callbacks of the run instead of those of the conf.

    Yields:
        Lines of text.

    Raises:
        ConfError: the conf has errors.
    """
    from alfx.trainers.policy_trainer import RLTrainer, SLTrainer
    config = TrainerConfig(root_dir=root_dir, conf_file=conf_file)
    config.callbacks = callbacks or config.callbacks
    as_given = copy.copy(config)
    acting.act_here(config)
    is_rl = config.ml_type == 'rl'
    trainer = RLTrainer(config) if is_rl else SLTrainer(config)
    algorithm = trainer.algorithm
    acting.check(algorithm, as_given)
    trainer.leave_signals()
    trainer._environment_state.close()  # nothing is resumed, so that no saved state has to be verified
    shorten(config, trainer._env.batch_size if is_rl else 1)
    if is_rl:
        yield from spec_lines(trainer._env, algorithm)
        yield transformer_line(algorithm.data_transformer)
        yield ''
    if isinstance(algorithm, Agent):
        yield from agent_lines(algorithm, _owner_names(algorithm))
        yield ''
    if prepared := preparation_lines(algorithm):
        yield from (*prepared, '')
    yield from parameter_lines(algorithm)
    yield ''
    yield from memory_lines(algorithm)
    yield ''
    started = time.perf_counter()
    trainer.train()
    unit = 'epoch' if not is_rl else 'iteration' if config.num_iterations == 1 else 'iterations'
    yield f'{config.num_iterations} {unit} in {time.perf_counter() - started:.1f} seconds'
    if algorithm.train_info_spec is not None:
        yield from nested_spec_lines('train info', algorithm.train_info_spec)
    else:
        yield 'note: no update was made, so the losses were not checked'


_UNROLLED, _UPDATES = 10, 2  # an agent that repeats its actions stores fewer decisions than steps


def shorten(config: TrainerConfig, batch_size: int) -> None:
    """Shorten a run so that it ends after the first parameter update.

    Args:
        config: configuration of a trainer that has not started.
        batch_size: number of environments.
    """
    config.num_env_steps = config.num_episodes = 0
    config.num_iterations = 1
    steps = (config.mini_batch_length or 1) + 1  # per environment, enough to sample a sequence
    if config.ml_type == 'rl' and config.initial_collect_steps:
        config.initial_collect_steps = min(config.initial_collect_steps, steps * batch_size)
        if not config.whole_replay_buffer_training:  # an unroll may be much longer than what is sampled from it
            config.unroll_length = min(config.unroll_length, _UNROLLED * steps)
            config.num_updates_per_train_iter = min(config.num_updates_per_train_iter, _UPDATES)
    if config.ml_type == 'rl' and (config.initial_collect_steps or 0 < config.unroll_length < steps):
        config.num_iterations = math.ceil(steps / config.unroll_length) + 1
    config.num_checkpoints = min(config.num_checkpoints, 1)
    config.async_eval = False
    config.num_eval_episodes = config.num_eval_environments


def spec_lines(env: Any, algorithm: Any) -> list[str]:
    """Describe the specs of the data passed between environment, algorithm and loss, without ``[T, B]``.

    Args:
        env: batched environment.
        algorithm: root algorithm.
    """
    parts = [
        ('observation of the environment', env.observation_spec()),
        ('observation of the algorithm', algorithm.observation_spec),
        ('action', env.action_spec()),
        ('reward', env.reward_spec()),
        ('environment info', env.env_info_spec()),
        ('rollout state', algorithm.rollout_state_spec),
        ('rollout info', algorithm.rollout_info_spec),
        ('stored in the replay buffer', algorithm.experience_spec),
    ]
    lines = [f'environments: {env.batch_size}']
    for title, spec in parts:
        if spec is not None:
            lines += nested_spec_lines(title, spec)
    return lines


def transformer_line(transformer: Any) -> str:
    """Name the data transformers in the order in which they are applied."""
    members = transformer.members() if isinstance(transformer, SequentialDataTransformer) else [transformer]
    names = [type(member).__name__ for member in members
             if member is not None and not isinstance(member, IdentityDataTransformer)]
    return f'data transformers: {", ".join(names) or "none"}'


def nested_spec_lines(title: str, spec: NestedTensorSpec) -> list[str]:
    """Describe each leaf in a line with its path, dtype, shape and bounds."""
    leaves = nest.flatten_with_path(spec)
    if not leaves:
        return [f'{title}: none']
    if len(leaves) == 1 and not leaves[0][0]:
        return [f'{title}: {_describe_spec(leaves[0][1])}']
    return [f'{title}:', *(f'  {path}: {_describe_spec(leaf)}' for path, leaf in leaves)]


def parameter_lines(algorithm: nn.Module) -> list[str]:
    """Describe the tree of modules with parameter counts, and the optimizer of each parameter."""
    owners = _owner_names(algorithm)
    parameters = list(algorithm.parameters())
    total = sum(p.numel() for p in parameters)
    header = f'parameters: {total:,}, of which {sum(p.numel() for p in parameters if id(p) in owners):,} are trained'
    return [header, *_module_lines('', algorithm, owners, 0, set())]


def preparation_lines(algorithm: nn.Module) -> list[str]:
    """Describe the automatic preprocessing of network inputs; empty if there is none."""
    done = {f'  {module.name}: {module.prepared}': None for module in algorithm.modules()
            if isinstance(module, EncodingNetwork) and module.prepared}
    header = 'automatic preprocessing of network inputs (prepare_inputs.enabled = False disables it):'
    return [header, *done] if done else []


def memory_lines(algorithm: Any) -> list[str]:
    """Describe the memory of the replay buffers when they are full, and of the state between unrolls."""
    lines = []
    for path, module in algorithm.named_modules():
        buffer = module.replay_buffer if isinstance(module, Algorithm) else None
        if buffer is not None:
            size = replay_bytes(buffer.data_spec, buffer.num_environments, buffer.max_length)
            where = path or type(module).__name__
            lines.append(f'replay buffer of {where}: {size:,} bytes ({size / 2**20:.1f} MiB): {buffer.max_length:,} '
                         f'steps of {buffer.num_environments} environments')
    lines = lines or ['replay buffer: none']
    env, spec = algorithm.environment, algorithm.unroll_state_spec
    if env is not None and nest.flatten(spec):
        size = replay_bytes(spec, env.batch_size, 1)
        lines.append(f'state between unrolls: {size:,} bytes ({size / 2**20:.1f} MiB) of {env.batch_size} environments')
    return lines


def replay_bytes(data_spec: NestedTensorSpec, num_environments: int, max_length: int) -> int:
    """Return the size of ``max_length`` steps of ``num_environments`` environments in bytes."""
    step = sum(spec.numel * spec.dtype.itemsize for spec in nest.flatten(data_spec))
    return step * num_environments * max_length


def _describe_spec(spec: Any) -> str:
    return describe(spec) if isinstance(spec, TensorSpec) else repr(spec)


def _owner_names(algorithm: Any) -> dict[int, str]:
    """Return the name of the optimizer of each parameter id, with a number if several have the same name."""
    optimizers = algorithm.optimizers(include_ignored_attributes=True)
    names = [getattr(optimizer, 'name', type(optimizer).__name__) for optimizer in optimizers]
    owners: dict[int, str] = {}
    for i, (optimizer, name) in enumerate(zip(optimizers, names)):
        label = f'{name} ({names[:i].count(name) + 1})' if names.count(name) > 1 else name
        owners.update((id(p), label) for group in optimizer.param_groups for p in group['params'])
    return owners


def _module_lines(name: str, module: nn.Module, owners: dict[int, str], depth: int, seen: set[int]) -> Iterator[str]:
    if id(module) in seen:
        yield f'{"  " * depth}{name}: shown above'
        return
    seen.add(id(module))
    count = sum(p.numel() for p in module.parameters())
    if count == 0 and depth > 0:
        return
    title = f'{name}: {type(module).__name__}' if name else type(module).__name__
    yield f'{"  " * depth}{title}, {count:,} parameters'
    for parameter_name, parameter in module.named_parameters(recurse=False):
        owner = owners.get(id(parameter), 'no optimizer')
        yield f'{"  " * (depth + 1)}{parameter_name} {list(parameter.shape)} <- {owner}'
    for child_name, child in module.named_children():
        yield from _module_lines(child_name, child, owners, depth + 1, seen)
