"""Algorithms composed of algorithms, networks and functions, so that a new one takes only a few lines.

:class:`SequentialAlg` computes its elements one after the other, :class:`EchoAlg` feeds part of an output back to the
next step, :class:`RLAlgWrapper` turns any algorithm that outputs actions into the policy of an agent or a run.
:class:`AlgorithmContainer` is their base class and the base of custom containers. The elements of a sequence are
written as for networks, see :mod:`alfx.layers.steps`.
"""
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from alfx import gin_utils, nest
from alfx.algorithms.agent_helpers import AgentHelper
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.composition.container_elements import Selector, parse_elements
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import configurable
from alfx.layers.steps import add_child, register_steps
from alfx.networks.network import Network
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec, TensorSpec

_STATE_SPECS = {'predict_step': 'predict_state_spec', 'rollout_step': 'rollout_state_spec'}
"""Attribute with the state spec of a method; methods that train use ``train_state_spec``."""


class _Forwarding(Algorithm):
    """Algorithm that forwards hooks to its parts."""

    def _inner(self) -> dict[str, Algorithm]:
        """Return the inner algorithms by the path of their info within the info of this algorithm; ``''``: the same
        info."""
        raise NotImplementedError(f'{type(self).__name__}._inner')

    def set_path(self, path: str) -> None:
        """Set the paths of this algorithm and of the inner algorithms."""
        super().set_path(path)
        for name, alg in self._inner().items():
            alg.set_path('.'.join(part for part in (path, name) if part))

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set on-policy or off-policy training for this algorithm and the inner algorithms.

        Raises:
            ValueError: an inner algorithm supports only the other kind.
        """
        super().set_on_policy(is_on_policy)
        for alg in self._inner().values():
            alg.set_on_policy(is_on_policy)

    def on_parts_built(self, parts: Mapping[str, Algorithm]) -> None:
        """Forward the parts of the agent to the inner algorithms."""
        for alg in self._inner().values():
            alg.on_parts_built(parts)

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; ``after_train_iter`` only forwards unless a subclass overrides it."""
        forwarding = AlgorithmContainer.after_train_iter, _Wrapper.after_train_iter
        return super().own_capabilities()._replace(trains_after_iteration=type(self).after_train_iter not in forwarding)


class _StepsOfParts(_Forwarding):
    """Algorithm whose steps call the method of the same name of its parts."""

    _delegates_offline = True

    def predict_step(self, inputs: NestedTensor, state: Any) -> AlgStep:
        """Compute one step of evaluation with ``predict_step`` of the algorithms; nests ``[B, ...]``."""
        return self._step('predict_step', inputs, state)

    def rollout_step(self, inputs: NestedTensor, state: Any) -> AlgStep:
        """Compute one step of collecting experience with ``rollout_step`` of the algorithms; nests ``[B, ...]``."""
        return self._step('rollout_step', inputs, state)

    def train_step(self, inputs: NestedTensor, state: Any, rollout_info: Any) -> AlgStep:
        """Compute one step of training on stored experience with ``train_step`` of the algorithms; nests ``[B,
        ...]``."""
        return self._step('train_step', inputs, state, rollout_info)

    def train_step_offline(self, inputs: NestedTensor, state: Any, rollout_info: Any,
                           pre_train: bool = False) -> AlgStep:
        """Compute :meth:`train_step` with ``train_step_offline`` of the algorithms."""
        return self._step('train_step_offline', inputs, state, rollout_info, pre_train)

    def _step(self, method: str, inputs: NestedTensor, state: Any, *more: Any) -> AlgStep:
        """Compute one step by calling the method named ``method`` of the parts, with the arguments ``more``."""
        raise NotImplementedError(f'{type(self).__name__}._step')


@configurable
class AlgorithmContainer(_Forwarding):
    """Base of algorithms that contain several: calls the hooks of all of them and adds their losses.

    A subclass defines the steps. Their infos are dicts with the info of each algorithm under its name; ``()`` for an
    algorithm that has no loss.

    Args:
        algs: the algorithms by name.
        train_state_spec: nest of specs of the state of ``train_step``.
        rollout_state_spec: state spec of ``rollout_step``; ``None``: ``train_state_spec``.
        predict_state_spec: state spec of ``predict_step``; ``None``: ``rollout_state_spec``.
        is_on_policy: see ``Algorithm``; ``None``: as required by the inner algorithms, if any of them requires either.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ValueError: some algorithms can only be trained on-policy and some only off-policy, an algorithm appears twice,
            or a name is not valid as the name of a part.
    """

    _delegates_offline = True

    def __init__(self, algs: Mapping[str, Algorithm], train_state_spec: NestedTensorSpec = (),
                 rollout_state_spec: NestedTensorSpec | None = None, predict_state_spec: NestedTensorSpec | None = None,
                 is_on_policy: bool | None = None, debug_summaries: bool = False, name: str = 'AlgorithmContainer'):
        _check_algs(algs, name)
        is_on_policy = _common_on_policy(algs, name) if is_on_policy is None else is_on_policy
        super().__init__(train_state_spec=train_state_spec, rollout_state_spec=rollout_state_spec,
                         predict_state_spec=predict_state_spec, debug_summaries=debug_summaries, name=name)
        self._algs = dict(algs)
        self._helper = AgentHelper(dict)
        for key, alg in algs.items():
            self._helper.register_algorithm(alg, key)
            add_child(self, key, alg)
        if is_on_policy is not None:
            self.set_on_policy(is_on_policy)

    def _inner(self) -> dict[str, Algorithm]:
        return self._algs

    def preprocess_experience(self, root_inputs: NestedTensor, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[NestedTensor, NestedTensor]:
        """Call ``preprocess_experience`` of each algorithm in turn, with its own info; see ``Algorithm``."""
        for key, alg in self._algs.items():
            root_inputs, processed = alg.preprocess_experience(root_inputs, rollout_info[key], batch_info)
            rollout_info = {**rollout_info, key: processed}
        return root_inputs, rollout_info

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the sum of the losses of all algorithms ``[T, B]``; ``extra`` is a dict with the extra of each."""
        return self._helper.accumulate_loss_info(self._with_loss(info), _by_attribute(info))

    def calc_loss_offline(self, info_offline: Any, pre_train: bool = False) -> LossInfo:
        """Compute the sum of the offline losses of all algorithms ``[T, B]``."""
        return self._helper.accumulate_loss_info(self._with_loss(info_offline), _by_attribute(info_offline),
                                                 offline=True, pre_train=pre_train)

    def _with_loss(self, info: Any) -> list[Algorithm]:
        return [alg for key, alg in self._algs.items() if not _is_empty(info[key])]

    def after_update(self, root_inputs: NestedTensor, info: Any) -> None:
        """Call ``after_update`` of each algorithm with its own info."""
        self._helper.after_update(list(self._algs.values()), root_inputs, _by_attribute(info))

    def after_train_iter(self, root_inputs: NestedTensor | None, rollout_info: Any) -> None:
        """Call ``after_train_iter`` of each algorithm with its own info."""
        self._helper.after_train_iter(list(self._algs.values()), root_inputs, _by_attribute(rollout_info))


def _by_attribute(info: Any) -> Any:
    """Return a dict of infos as an object with attributes, as ``AgentHelper`` reads them."""
    return SimpleNamespace(**info) if isinstance(info, dict) else info


def _is_empty(info: Any) -> bool:
    return isinstance(info, tuple) and info == ()


def _check_algs(algs: Mapping[str, Algorithm], name: str) -> None:
    """Raise ``ValueError`` for parts that a container cannot have."""
    for key, alg in algs.items():
        if not isinstance(alg, Algorithm):
            raise ValueError(f"{name}: expected an algorithm as '{key}', found {type(alg).__name__}")
        if '.' in key or not key:
            raise ValueError(f"{name}: '{key}' cannot be the name of an algorithm: names are parts of paths 'a.b'")
    if len({id(alg) for alg in algs.values()}) < len(algs):
        raise ValueError(f'{name}: the same algorithm appears twice among {list(algs)}; create a second one')


def _common_on_policy(algs: Mapping[str, Algorithm], name: str) -> bool | None:
    """Return the common ``on_policy`` of the algorithms that require either; ``None`` if none does."""
    known = {key: alg.on_policy for key, alg in algs.items() if alg.on_policy is not None}
    if len(set(known.values())) > 1:
        on = [key for key, is_on_policy in known.items() if is_on_policy]
        off = [key for key, is_on_policy in known.items() if not is_on_policy]
        raise ValueError(f'{name}: {on} can only be trained on-policy and {off} only off-policy; they cannot be '
                         'trained together')
    return next(iter(known.values()), None)


# Sequences -----------------------------------------------------------------------------------------------------


@configurable(allowlist=['output', 'is_on_policy', 'name'])
class SequentialAlg(_StepsOfParts, AlgorithmContainer):
    """Algorithms, networks, modules and functions, computed in order.

    Each element takes the previous result, or, written as a pair ``(names, element)``, a nest of earlier results by
    name: ``'input'`` is the input of the sequence, ``'a'`` the result of the element ``a``, ``'info.a'`` the info of
    the algorithm ``a``, ``'state.a'`` the new state of the algorithm or network ``a``, ``''`` the previous result. A
    name may be followed by a path into the result: ``'input.observation'``. The result of an algorithm is the
    ``output`` of its step, the result of a network its output, the result of anything else its return value.

    ::

        SequentialAlg(value=('input.observation', value_net), action_dist=('input.observation', actor_net),
                      action=dist_utils.sample_action_distribution,
                      loss=(ActorCriticInfo(reward='input.reward', ..., value='value'), ActorCriticLoss()),
                      output='action', is_on_policy=True)

    State and info are dicts by the name of the element, or its position if it has none; the state is ``()`` if no
    element has one. Conf files, in which arguments have no order, use :func:`sequential_alg`.

    Args:
        modules: the first elements, which have no name.
        output: nest of names of results, which is the output; ``''``: the last result.
        is_on_policy: see ``AlgorithmContainer``.
        name: name of this algorithm.
        named_modules: the elements after them.

    Raises:
        ValueError: an element cannot be called, or a name does not exist; lists the existing names. See also
            ``AlgorithmContainer``.
    """

    def __init__(self, *modules: Any, output: Nested = '', is_on_policy: bool | None = None,
                 name: str = 'SequentialAlg', **named_modules: Any):
        steps = parse_elements(modules, named_modules, output, name)
        keyed = {step.name or str(i): step for i, step in enumerate(steps)}
        algs = {key: step.module for key, step in keyed.items() if isinstance(step.module, Algorithm)}
        specs = {method: {key: _state_spec(step.module, spec) for key, step in keyed.items()}
                 for method, spec in (('', 'train_state_spec'), *_STATE_SPECS.items())}
        specs = {method: {key: spec for key, spec in parts.items() if nest.flatten(spec)}
                 for method, parts in specs.items()}
        super().__init__(algs, train_state_spec=specs[''] or (), rollout_state_spec=specs['rollout_step'] or (),
                         predict_state_spec=specs['predict_step'] or (), is_on_policy=is_on_policy, name=name)
        self._steps = {key: (Selector(step.inputs), step.module, step.name) for key, step in keyed.items()}
        self._output = Selector(output)
        self._stateful = {method: list(parts) for method, parts in specs.items()}
        register_steps(self, steps)

    def _step(self, method: str, inputs: NestedTensor, state: Any, rollout_info: Any = None, *more: Any) -> AlgStep:
        """Compute all elements, calling the method named ``method`` of algorithms."""
        new_states: dict[str, Any] = {}
        infos: dict[str, Any] = {}
        results = {'': inputs, 'input': inputs, 'state': new_states, 'info': infos}
        stateful = self._stateful.get(method, self._stateful[''])
        for key, (select, module, name) in self._steps.items():
            selected = select(results)
            own = state[key] if key in stateful else _state_spec(module, _STATE_SPECS.get(method, 'train_state_spec'))
            if key in self._algs:
                stored = () if rollout_info is None else (rollout_info[key], *more)
                result, new_states[key], infos[key] = getattr(module, method)(selected, own, *stored)
            elif isinstance(module, Network):
                result, new_states[key] = module(selected, own)
            else:
                result = module(selected)
            results[''] = result
            if name:
                results[name] = result
        return AlgStep(self._output(results), {key: new_states[key] for key in stateful} or (), infos)

    def convert_train_state_to_predict_state(self, state: Any) -> NestedTensor:
        """Return the state for ``predict_step`` that corresponds to a state of ``train_step``."""
        converted = {}
        for key in self._stateful['predict_step']:
            part = state[key] if key in self._stateful[''] else ()
            converted[key] = self._algs[key].convert_train_state_to_predict_state(part) if key in self._algs else part
        return converted or ()


def _state_spec(module: Any, which: str) -> NestedTensorSpec:
    if isinstance(module, Algorithm):
        return getattr(module, which)
    return module.state_spec if isinstance(module, Network) else ()


@configurable
def sequential_alg(elements: Sequence[Any], output: Nested = '', is_on_policy: bool | None = None,
                   name: str = 'SequentialAlg') -> SequentialAlg:
    """Create a :class:`SequentialAlg` in a conf file, where arguments have neither positions nor an order.

    Args:
        elements: in order: ``(name, module)``, or ``(name, names, module)`` for an element that takes the results
            called ``names``.
        output: see :class:`SequentialAlg`.
        is_on_policy: see :class:`SequentialAlg`.
        name: name of the algorithm.

    Raises:
        ValueError: an element has neither form, or two have the same name; see also :class:`SequentialAlg`.
    """
    named: dict[str, Any] = {}
    for i, element in enumerate(elements):
        if not isinstance(element, (tuple, list)) or len(element) not in (2, 3) or not isinstance(element[0], str):
            raise ValueError(f'{name}: elements[{i}]: expected (name, module) or (name, names, module), found '
                             f'{element!r}')
        if element[0] in named:
            raise ValueError(f"{name}: elements[{i}]: the name '{element[0]}' is used twice")
        named[element[0]] = element[1] if len(element) == 2 else (element[1], element[2])
    return SequentialAlg(output=output, is_on_policy=is_on_policy, name=name, **named)


@configurable
def named_fields(record: str, **fields: Nested) -> Nested:
    """Create a named tuple of names of results in a conf file, as input of an element of :func:`sequential_alg`.

    Args:
        record: class of the named tuple with its module: ``'alfx.algorithms.actor_critic_algorithm.ActorCriticInfo'``.
        fields: its fields, each a nest of names.

    Raises:
        ValueError: there is no such class, or it has no such field.
    """
    module, _, cls_name = record.rpartition('.')
    if not gin_utils.may_import(module):
        gin_utils.require_trust(f'named_fields.record = {record!r}')
    try:
        cls: Any = getattr(importlib.import_module(module), cls_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"named_fields.record: there is no class '{record}': {error}") from None
    existing = getattr(cls, '_fields', None)
    if existing is None or not set(fields) <= set(existing):
        raise ValueError(f'named_fields.record: expected a named tuple with the fields {sorted(fields)}, found '
                         f"'{record}', which has {list(existing or ())}")
    return cls(**fields)


# Wrappers ------------------------------------------------------------------------------------------------------


class _Wrapper(_StepsOfParts):
    """Algorithm that wraps another algorithm, ``self._alg``, and shares its info."""

    _delegates_offline = True
    _alg: Algorithm

    def _wrap(self, alg: Algorithm) -> None:
        self._alg = alg
        if alg.on_policy is not None:
            self.set_on_policy(alg.on_policy)

    def _inner(self) -> dict[str, Algorithm]:
        return {'': self._alg}

    def _step(self, method: str, inputs: NestedTensor, state: Any, *more: Any) -> AlgStep:
        """Call the method named ``method`` of the wrapped algorithm."""
        return getattr(self._alg, method)(inputs, state, *more)

    def convert_train_state_to_predict_state(self, state: Any) -> NestedTensor:
        """Return the state for ``predict_step`` that corresponds to a state of ``train_step``."""
        return self._alg.convert_train_state_to_predict_state(state)

    def preprocess_experience(self, root_inputs: NestedTensor, rollout_info: NestedTensor,
                              batch_info: BatchInfo) -> tuple[NestedTensor, NestedTensor]:
        """Call ``preprocess_experience`` of the wrapped algorithm."""
        return self._alg.preprocess_experience(root_inputs, rollout_info, batch_info)

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Compute the loss of the wrapped algorithm, ``[T, B]``."""
        return self._alg.calc_loss(info)

    def calc_loss_offline(self, info_offline: NestedTensor, pre_train: bool = False) -> LossInfo:
        """Compute the offline loss of the wrapped algorithm, ``[T, B]``."""
        return self._alg.calc_loss_offline(info_offline, pre_train)

    def after_update(self, root_inputs: NestedTensor, info: NestedTensor) -> None:
        """Call ``after_update`` of the wrapped algorithm."""
        self._alg.after_update(root_inputs, info)

    def after_train_iter(self, root_inputs: NestedTensor | None, rollout_info: NestedTensor | None) -> None:
        """Call ``after_train_iter`` of the wrapped algorithm."""
        self._alg.after_train_iter(root_inputs, rollout_info)


@configurable
class EchoAlg(_Wrapper):
    """Wrapper that feeds part of an algorithm's output back as input of the next step.

    ``alg`` takes a dict ``{'input': ..., 'echo': ...}`` and outputs a dict ``{'output': ..., 'echo': ...}``. The input
    ``echo`` of a step is the output ``echo`` of the previous step; zeros at the first step of an episode. The state is
    ``{'alg': state of the algorithm, 'echo': ...}``, the info is the info of ``alg``.

    Args:
        alg: the algorithm.
        echo_spec: nest of specs of the echo.
        name: name of this algorithm.

    Raises:
        ValueError: ``alg`` is not an algorithm, or (at a step) its output is not such a dict.
    """

    def __init__(self, alg: Algorithm, echo_spec: NestedTensorSpec, name: str = 'EchoAlg'):
        _check_algs({'alg': alg}, name)
        super().__init__(train_state_spec={'alg': alg.train_state_spec, 'echo': echo_spec},
                         rollout_state_spec={'alg': alg.rollout_state_spec, 'echo': echo_spec},
                         predict_state_spec={'alg': alg.predict_state_spec, 'echo': echo_spec}, name=name)
        self._wrap(alg)

    def _step(self, method: str, inputs: NestedTensor, state: Any, *more: Any) -> AlgStep:
        step = getattr(self._alg, method)({'input': inputs, 'echo': state['echo']}, state['alg'], *more)
        if not isinstance(step.output, dict) or set(step.output) != {'output', 'echo'}:
            found = sorted(step.output, key=str) if isinstance(step.output, dict) else type(step.output).__name__
            raise ValueError(f"{self._name}: {self._alg.name}.{method} has to output a dict with 'output' and 'echo', "
                             f'found {found}')
        return AlgStep(step.output['output'], {'alg': step.state, 'echo': step.output['echo']}, step.info)

    def convert_train_state_to_predict_state(self, state: Any) -> NestedTensor:
        """Return the state for ``predict_step`` that corresponds to a state of ``train_step``."""
        return {'alg': self._alg.convert_train_state_to_predict_state(state['alg']), 'echo': state['echo']}


@configurable
class RLAlgWrapper(_Wrapper, RLAlgorithm):
    """Wrapper of an algorithm that maps time steps to actions, as the policy of an agent or as the root of a run.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        algorithm: the wrapped algorithm, or a constructor, called as ``(observation_spec=, action_spec=, reward_spec=,
            config=, debug_summaries=)``.
        env: batched environment, for the root algorithm.
        reward_spec: spec of rank 0 or 1.
        config: configuration, for the root algorithm.
        optimizer: optimizes the parameters that the optimizers of ``algorithm`` do not.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ValueError: ``algorithm`` is neither an algorithm nor a constructor of one.
    """

    _delegates_offline = True

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 algorithm: Algorithm | Callable[..., Algorithm], env: Any = None,
                 reward_spec: TensorSpec = TensorSpec(()), config: TrainerConfig | None = None, optimizer: Any = None,
                 debug_summaries: bool = False, name: str = 'RLAlgWrapper'):
        if not isinstance(algorithm, Algorithm) and callable(algorithm):
            algorithm = algorithm(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                                  config=config, debug_summaries=debug_summaries)
        _check_algs({'algorithm': algorithm}, name)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=algorithm.train_state_spec, rollout_state_spec=algorithm.rollout_state_spec,
                         predict_state_spec=algorithm.predict_state_spec, env=env, config=config, optimizer=optimizer,
                         debug_summaries=debug_summaries, name=name)
        self._wrap(algorithm)

    def set_reward_weights(self, reward_weights: torch.Tensor) -> None:
        """Use these weights ``[K]`` from the next step on, here and in the wrapped algorithm if it has any."""
        super().set_reward_weights(reward_weights)
        for part in self._alg.modules():
            if isinstance(part, RLAlgorithm) and part.reward_weights is not None:
                part.set_reward_weights(reward_weights)

    def own_capabilities(self) -> Capabilities:
        """Return the most general capabilities, which the wrapped algorithm restricts."""
        recomputes = type(self).rollout_step is RLAlgWrapper.rollout_step
        return super().own_capabilities()._replace(traceable_update=True, trains_sequences_at_once=True,
                                                   recomputes_rollout_info=recomputes, traceable_prediction=True)

    @property
    def policy_algorithm(self) -> Algorithm:
        """The wrapped algorithm."""
        return self._alg

    def train_sequence(self, inputs: NestedTensor, state: Any, rollout_info: Any) -> AlgStep:
        """Call ``train_sequence`` of the wrapped algorithm; nests ``[T, B, ...]``."""
        return self._alg.train_sequence(inputs, state, rollout_info)

    def batch_sources(self, source: Any) -> Sequence[Any]:
        """Return the sources that the wrapped algorithm mixes into minibatches."""
        return self._alg.batch_sources(source)

    def num_updates_due(self, count: int) -> int:
        """Return the number of updates that the wrapped algorithm requests."""
        return self._alg.num_updates_due(count)

    def auxiliary_reference(self, info: NestedTensor) -> NestedTensor:
        """Call ``auxiliary_reference`` of the wrapped algorithm."""
        return self._alg.auxiliary_reference(info)

    def calc_auxiliary_loss(self, info: NestedTensor, reference: NestedTensor) -> LossInfo:
        """Call ``calc_auxiliary_loss`` of the wrapped algorithm."""
        return self._alg.calc_auxiliary_loss(info, reference)

    def train_sequence_offline(self, inputs: NestedTensor, state: Any, rollout_info: Any,
                               pre_train: bool = False) -> AlgStep:
        """Call ``train_sequence_offline`` of the wrapped algorithm; nests ``[T, B, ...]``."""
        return self._alg.train_sequence_offline(inputs, state, rollout_info, pre_train)

    def collect_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Call ``collect_step`` of the wrapped algorithm; nests ``[B, ...]``."""
        return self._alg.collect_step(inputs, state)

    def postprocess_unroll(self, inputs: TimeStep, rollout_info: NestedTensor) -> NestedTensor:
        """Call ``postprocess_unroll`` of the wrapped algorithm, if it is an ``RLAlgorithm``; nests ``[T + 1, B,
        ...]``."""
        return self._alg.postprocess_unroll(inputs, rollout_info) if isinstance(self._alg,
                                                                                RLAlgorithm) else rollout_info
