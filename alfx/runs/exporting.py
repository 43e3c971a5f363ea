"""Export of a trained policy to a file that runs without alfx, with ``torch.export`` or as ONNX.

The file contains one step of :class:`~alfx.runs.policy.Policy`: data transformers, normalizers, the networks, and the
mapping of actions to the bounds of the environment. The recurrent state is an input and an output::

    step(is_first [1], reward [1], *observations [1, ...], *state) -> (*actions [1, ...], *state)

``is_first`` resets the policy: the input state is then ignored. The file describes its tensors (see
:class:`Signature`).
"""
import importlib.util
import inspect
import io
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import alfx
from alfx import nest
from alfx.data_structures import StepType
from alfx.engine.plan.torch_internals import without_validation
from alfx.gin_utils import ConfError, stored_files
from alfx.runs.policy import Policy
from alfx.utils.extras import pip_install

METADATA = 'alfx.json'  # name of the signature inside the file
_FORMAT = 1


class ExportError(ConfError):
    """Raised if a policy cannot be exported; the message names the policy and the reason."""


class Signature(NamedTuple):
    """Description of the tensors of an exported step, each as a dict of ``name``, ``shape`` and ``dtype``.

    Attributes:
        observations: inputs after ``is_first`` and ``reward``.
        state: inputs after the observations, and outputs after the actions; zeros can be used initially.
        actions: first outputs, within the bounds of the environment.
    """
    observations: list[dict[str, Any]]
    state: list[dict[str, Any]]
    actions: list[dict[str, Any]]

    def to_json(self, about: dict[str, Any]) -> str:
        """Return the signature as JSON, with the entries of ``about`` added."""
        return json.dumps({'format': _FORMAT, 'alfx': alfx.__version__, **about, **self._asdict()}, indent=2)


class PolicyStep(nn.Module):
    """One step of a policy as a function of tensors.

    Args:
        policy: the policy; it is not modified.
    """

    def __init__(self, policy: Policy):
        super().__init__()
        self._policy = [policy]  # in a list, so that unused parameters are not exported
        self._initial = policy.initial_state()
        self._num_observations = len(nest.flatten(policy.observation_spec))

    def example(self) -> tuple[Tensor, ...]:
        """Return example arguments of :meth:`forward`."""
        policy = self._policy[0]
        observations = [spec.zeros((1, )) for spec in nest.flatten(policy.observation_spec)]
        state = [x.clone() for x in nest.flatten(self._initial)]
        return torch.ones(1, dtype=torch.bool), policy.reward_spec.zeros((1, )), *observations, *state

    def signature(self) -> Signature:
        """Return the signature of :meth:`forward`."""
        policy = self._policy[0]
        actions = [_describe(path, x)
                   for path, x in nest.flatten_with_path(policy.in_bounds(self._initial.prev_action))]
        observations = [_describe(path, spec.zeros((1, )))
                        for path, spec in nest.flatten_with_path(policy.observation_spec)]
        return Signature(observations, [_describe(path, x) for path, x in nest.flatten_with_path(self._initial)],
                         actions)

    def forward(self, is_first: Tensor, reward: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """Compute the action and the next state, with the arguments in the module docstring."""
        policy = self._policy[0]
        observations, leaves = rest[:self._num_observations], rest[self._num_observations:]
        state = [torch.where(is_first.view(-1, *[1] * (x.ndim - 1)), start, x)
                 for start, x in zip(nest.flatten(self._initial), leaves)]
        step_type = torch.where(is_first, StepType.FIRST, StepType.MID).to(torch.int32)
        action, new_state = policy.step(step_type, reward,
                                        nest.pack_sequence_as(policy.observation_spec, list(observations)),
                                        nest.pack_sequence_as(self._initial, state))
        results = [*nest.flatten(policy.in_bounds(action)), *nest.flatten(new_state)]
        # clone, because some formats do not allow an output to be an input or to occur twice
        return tuple(x.clone() for x in results)


def _describe(name: str, tensor: Tensor) -> dict[str, Any]:
    return {'name': name, 'shape': list(tensor.shape), 'dtype': str(tensor.dtype).removeprefix('torch.')}


def export(policy: Policy, name: str) -> torch.export.ExportedProgram:
    """Export one step of a policy.

    Args:
        policy: policy that acts greedily.
        name: name of the policy for error messages.

    Raises:
        ExportError: the step cannot be traced, it draws random numbers, or its weights are not finite.
    """
    step = PolicyStep(policy)
    try:
        with torch.no_grad(), without_validation():
            program = torch.export.export(step, step.example(), strict=False)
    except Exception as error:  # torch has no common class for errors of tracing
        raise ExportError(f'the policy of {name} cannot be exported: {_reason(error)}',
                          'use it with alfx.load(run).predict') from error
    bad = policy.names_of_non_finite([*program.state_dict.values(), *program.constants.values()])
    if bad:
        raise ExportError(f'the policy of {name} cannot be exported: expected finite weights, found NaN or infinite '
                          f'ones in {", ".join(bad[:5])}', 'export an earlier checkpoint with --checkpoint_step')
    drawn = sorted({str(node.target) for node in _used_nodes(program)
                    if torch.Tag.nondeterministic_seeded in getattr(node.target, 'tags', ())})
    if drawn:
        raise ExportError(f'the policy of {name} cannot be exported: it draws random numbers even in '
                          f'greedy mode ({", ".join(drawn)})', 'use it with alfx.load(run).predict')
    return program


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if 'DataDependent' in kind or 'data-dependent' in str(error):
        return 'its control flow depends on the values of tensors, for example in a search'
    text = str(error).strip() or kind
    if '.numpy()' in text:
        return 'a part of it runs outside of torch, for example a tree search'
    return f'{kind}: {text.splitlines()[0]}'


def _used_nodes(program: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Return the nodes on which the outputs depend."""
    found: set[torch.fx.Node] = set()
    waiting = [node for node in program.graph.nodes if node.op == 'output']
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def export_to(path: str, policy: Policy, env: Any, name: str, about: dict[str, Any], num_steps: int = 10_000,
              tolerance: float = 1e-5) -> float:
    """Export a policy to a file, and verify the outputs of the file against the policy.

    Args:
        path: file to write, see :func:`save`.
        policy: policy that acts greedily.
        env: single environment for the verification.
        name: name of the policy for error messages.
        about: additional entries of the signature.
        num_steps: number of environment steps to compare.
        tolerance: largest allowed absolute difference.

    Returns:
        The largest absolute difference.

    Raises:
        ExportError: the policy cannot be exported, or the verification failed; no file is written.
        ConfError: see :func:`check_path`.
    """
    check_path(path)
    program = export(policy, name)
    with stored_files.replacing(path) as unverified:
        save(program, PolicyStep(policy).signature().to_json(about), unverified)
        difference, = greatest_differences(policy, [load(unverified)], env, num_steps)
        if not difference <= tolerance:
            raise ExportError(f'the policy of {name} is not exported: the outputs of the file differ from the policy '
                              f'by {difference:.3g}, more than {tolerance:.3g}', 'use it with alfx.load(run).predict')
    return difference


def check_path(path: str) -> None:
    """Check that a policy can be exported to a file.

    Raises:
        ConfError: the suffix is unknown, a package is missing, the path is a folder, or its folder does not exist or
            cannot be written.
    """
    suffix = os.path.splitext(path)[1]
    if suffix not in ('.pt2', '.onnx'):
        raise ConfError(f'{path}: expected a name that ends with .pt2 or .onnx')
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise ConfError(f'{path} is a folder' if os.path.isdir(path) else f'folder {folder} cannot be written',
                        'name another file')
    if not os.path.isdir(folder):
        raise ConfError(f'folder {os.path.dirname(path)} does not exist', 'create it, or name another file')
    missing = [name for name in ('onnxscript', 'onnxruntime') if importlib.util.find_spec(name) is None]
    if suffix == '.onnx' and missing:
        raise ConfError(f'{path}: ONNX export needs {" and ".join(missing)}, not installed',
                        f"{pip_install('onnx')}, or name a file that ends with .pt2")


def save(program: torch.export.ExportedProgram, signature: str, path: str) -> None:
    """Write an exported step to a file.

    Args:
        program: exported step.
        signature: signature as JSON.
        path: file to write; ``.onnx`` for ONNX, which needs the package onnxscript.
    """
    if not path.endswith('.onnx'):
        buffer = io.BytesIO()  # torch aborts the process if it cannot write to a file
        torch.export.save(program, buffer, extra_files={METADATA: signature})
        with open(path, 'wb') as file:
            file.write(buffer.getbuffer())
        return
    described = json.loads(signature)
    names = [[f'{kind}.{i}' for i in range(len(described[kind]))] for kind in ('observations', 'state', 'actions')]
    observations, state, actions = names
    logging.getLogger('torch.onnx').setLevel(logging.ERROR)  # it warns that torchvision, which is not used, is missing
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)  # torch.onnx uses functions that torch has deprecated
        onnx_program = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=['is_first', 'reward', *observations, *state],
            output_names=[*actions, *(f'next_{name}' for name in state)])
    assert onnx_program is not None
    onnx_program.model.metadata_props[METADATA] = signature
    onnx_program.save(path)


def load(path: str) -> Callable[..., Sequence[Tensor]]:
    """Load an exported step as a function with the signature of :meth:`PolicyStep.forward`."""
    if not path.endswith('.onnx'):
        make = torch.export.load(path).module
        has_guards = 'check_guards' in inspect.signature(make).parameters  # torch >= 2.9 checks shapes at each step
        return make(check_guards=False) if has_guards else make()
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # more threads would only busy-wait for a single observation
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    names = [entry.name for entry in session.get_inputs()]
    positions = _onnx_positions(session)

    def run(*arguments: Tensor) -> list[Tensor]:
        found = session.run(None, {name: arguments[positions[name]].numpy() for name in names})
        return [torch.from_numpy(np.asarray(x)) for x in found]

    return run


def _onnx_positions(session: Any) -> dict[str, int]:
    """Return the argument position of each input. Unused inputs may be missing in the file."""
    described = json.loads(session.get_modelmeta().custom_metadata_map[METADATA])
    names = ['is_first', 'reward', *(f'{kind}.{i}' for kind in ('observations', 'state')
                                     for i in range(len(described[kind])))]
    return {name: i for i, name in enumerate(names)}


def greatest_differences(policy: Policy, steps: Sequence[Callable[..., Sequence[Tensor]]], env: Any,
                         num_steps: int) -> list[float]:
    """Return the largest difference between exported steps and the policy, over all elements of actions and state.

    Each step function uses its own state; the environment takes the actions of the policy.

    Args:
        policy: the policy.
        steps: results of :func:`load`, one for each file.
        env: single environment.
        num_steps: number of environment steps to compare.

    Returns:
        The largest absolute difference for each of ``steps``.
    """
    time_step = env.reset()
    expected_state, worst = policy.initial_state(), [0.0] * len(steps)
    states = [nest.flatten(expected_state)] * len(steps)
    for _ in range(num_steps):
        while bool(time_step.is_last()):  # actions at a LAST step are ignored
            time_step = env.step(expected_state.prev_action)
        if bool(time_step.is_first()):
            expected_state = policy.initial_state()
        action, expected_state = policy.step(time_step.step_type, time_step.reward, time_step.observation,
                                             expected_state)
        expected = [*nest.flatten(policy.in_bounds(action)), *nest.flatten(expected_state)]
        given = time_step.is_first(), time_step.reward, *nest.flatten(time_step.observation)
        for i, step in enumerate(steps):
            results = list(step(*given, *states[i]))
            worst[i] = max([worst[i], *(_distance(x, y) for x, y in zip(expected, results, strict=True))])
            states[i] = results[len(expected) - len(states[i]):]
        time_step = env.step(action)
    return worst


def _distance(x: Tensor, y: Tensor) -> float:
    if x.shape != y.shape or x.dtype != y.dtype:
        return math.inf
    if torch.equal(x, y):
        return 0.0
    difference = float((x.double() - y.double()).abs().max())
    return math.inf if math.isnan(difference) else difference
