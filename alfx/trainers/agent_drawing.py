"""Text diagram of an agent: data flow, trained parameters and content of the replay buffer."""
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from alfx import nest
from alfx.algorithms.agent import Agent
from alfx.tensor_specs import BoundedTensorSpec, NestedTensorSpec, TensorSpec


def agent_lines(agent: Agent, owners: dict[int, str]) -> list[str]:
    """Describe the parts of an agent in the order in which they are called.

    Args:
        agent: agent after ``finalize``.
        owners: name of the optimizer of each parameter, by ``id`` of the parameter.

    Returns:
        Lines of text with the input and output of each part, its parameters and their optimizers, and the size of the
        data in the replay buffer per step.
    """
    rows = [(field, type(part).__name__, describe(input_spec), describe(output_spec),
             _training(part.parameters(), owners)) for field, part, input_spec, output_spec in agent.connections()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ['data flow of a step:']
    for number, (field, name, inputs, outputs, _) in enumerate(rows):
        arm = '└─' if number == len(rows) - 1 else '├─'
        lines.append(f'  {arm} {field:{widths[0]}}  {name:{widths[1]}}  {inputs} ─> {outputs}')
    lines += ['', 'trained parameters:']
    lines += [f'  {field:{widths[0]}}  {training}' for field, _, _, _, training in rows]
    lines += [f'  loss: {" + ".join(agent.fields_with_loss())}']
    terms = ' + '.join(f'{coefficient:g} * {name}' for name, coefficient in agent.reward_coefficients().items())
    lines += ['', f'reward that the policy is trained on: {terms}', '', *replay_lines(agent.experience_spec)]
    return lines


def describe(spec: Any) -> str:
    """Describe a nest of specs in one line, such as ``[float32 [4], int64 [] in [0, 4]]``; strings are unchanged."""
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
    """Describe how many parameters each optimizer trains, and how many are not trained."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[owners.get(id(parameter), '')] += parameter.numel()
    if not counts:
        return 'no parameters'
    fixed = counts.pop('', 0)
    trained = [f'{count:,} by {name}' for name, count in counts.items()]
    return ', '.join([*trained, *([f'{fixed:,} not trained by gradients'] if fixed else [])])


def replay_lines(experience_spec: NestedTensorSpec) -> list[str]:
    """Describe the size of each part of the experience for one step of one environment.

    Args:
        experience_spec: spec of the data in the replay buffer; None if there is no replay buffer.
    """
    if experience_spec is None:
        return ['replay buffer: none, each unroll is used for training directly']
    sizes: Counter[str] = Counter()
    for path, spec in nest.flatten_with_path(experience_spec):
        sizes['.'.join(path.split('.')[:2])] += spec.numel * torch.empty((), dtype=spec.dtype).element_size()
    width = max(map(len, sizes))
    lines = [f'  {path:{width}}  {size:,}' for path, size in sizes.items()]
    return [f'replay buffer data, {sum(sizes.values()):,} bytes per environment step:', *lines]
