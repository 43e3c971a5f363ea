"""An agent drawn in words: who gets what, who trains what, what enters the replay buffer."""
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from alfx import nest
from alfx.algorithms.agent import Agent
from alfx.tensor_specs import BoundedTensorSpec, NestedTensorSpec, TensorSpec


def agent_lines(agent: Agent, owners: dict[int, str]) -> list[str]:
    """The parts of an agent in the order of a step.

    Args:
        agent: after ``finalize``.
        owners: the name of the optimizer of each parameter by ``id``.

    Returns:
        Lines of text: for each part what it sees and gives, its parameters and who trains them, and the bytes a step
        that each part puts into the replay buffer.
    """
    connections = agent.connections()
    rows = [(connection.field, type(connection.part).__name__, describe(connection.sees), describe(connection.gives),
             _training(connection.part.parameters(), owners)) for connection in connections]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ['who gets what, in the order of a step:']
    for number, (field, name, sees, gives, _) in enumerate(rows):
        arm = '└─' if number == len(rows) - 1 else '├─'
        lines.append(f'  {arm} {field:{widths[0]}}  {name:{widths[1]}}  {sees} ─> {gives}')
    lines += ['', 'who trains what:']
    lines += [f'  {field:{widths[0]}}  {training}' for field, _, _, _, training in rows]
    lines += [f'  loss: {" + ".join(agent.fields_with_loss())}']
    lines += ['', *_reward_lines(agent), '', *replay_lines(agent.experience_spec)]
    return lines


def describe(spec: Any) -> str:
    """A nest of specs in a line, such as ``[float32 [4], int64 [] in [0, 4]]``; a string as it is."""
    if isinstance(spec, str):
        return spec
    if isinstance(spec, TensorSpec):
        text = f'{spec.dtype_str} {list(spec.shape)}'
        if isinstance(spec, BoundedTensorSpec) and spec.minimum.size and spec.maximum.size:
            text += f' in [{float(spec.minimum.min()):g}, {float(spec.maximum.max()):g}]'
        return text
    if isinstance(spec, dict):
        return '{' + ', '.join(f'{name}: {describe(inner)}' for name, inner in spec.items()) + '}'
    names = getattr(spec, '_fields', None)
    if names is not None:
        return '(' + ', '.join(f'{name}: {describe(getattr(spec, name))}' for name in names) + ')'
    return '[' + ', '.join(map(describe, spec)) + ']'


def _training(parameters: Iterable[torch.nn.Parameter], owners: dict[int, str]) -> str:
    """How many parameters each optimizer trains, and how many nobody does."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[owners.get(id(parameter), '')] += parameter.numel()
    if not counts:
        return 'no parameters'
    fixed = counts.pop('', 0)
    trained = [f'{count:,} by {name}' for name, count in counts.items()]
    return ', '.join([*trained, *([f'{fixed:,} not trained by gradients'] if fixed else [])])


def _reward_lines(agent: Agent) -> list[str]:
    """Which rewards make up the one that the policy is trained on."""
    terms = ' + '.join(f'{coefficient:g} * {name}' for name, coefficient in agent.reward_coefficients().items())
    return [f'reward that the policy is trained on: {terms}']


def replay_lines(experience_spec: NestedTensorSpec) -> list[str]:
    """The bytes that each part of the experience takes for one step of one environment.

    Args:
        experience_spec: what enters the replay buffer; ``None`` if there is none.
    """
    if experience_spec is None:
        return ['what enters the replay buffer: nothing, it is trained on each unroll directly']
    sizes: Counter[str] = Counter()
    for path, spec in nest.flatten_with_path(experience_spec):
        sizes['.'.join(path.split('.')[:2])] += spec.numel * torch.empty((), dtype=spec.dtype).element_size()
    width = max(map(len, sizes))
    lines = [f'  {path:{width}}  {size:,}' for path, size in sizes.items()]
    return [f'what enters the replay buffer, {sum(sizes.values()):,} bytes a step of an environment:', *lines]
