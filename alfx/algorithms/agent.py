"""Root algorithm of most runs: a policy algorithm and the parts around it, chosen in a conf file.

A step runs the parts in this order: representation learner (observation to representation), goal generator (adds a
goal), intrinsic reward module, policy algorithm, entropy target, reward weights. Each part has its own field in
``AgentState`` and ``AgentInfo``.
"""
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from alfx import context, nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.agent_helpers import AgentHelper
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.overrides import is_overridden
from alfx.algorithms.composition.policy_loss_addons import PolicyLossAddOns
from alfx.algorithms.entropy_target_algorithm import EntropyTargetAlgorithm, NestedEntropyTargetAlgorithm
from alfx.algorithms.intrinsic.intrinsic_reward import BatchRewards
from alfx.algorithms.intrinsic.reward_mixture import (Coefficient, check_modules, modules_and_coefficients,
                                                      rewards_batches, rewards_by_name, rewards_unrolls_at_once,
                                                      why_not_at_once)
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, Experience, LossInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, configurable, problem_at
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.schedulers import as_scheduler

AgentState = namedtuple('AgentState', ['rl', 'irm', 'goal_generator', 'repr', 'rw'], default_value=())
"""The state of each part."""

AgentInfo = namedtuple('AgentInfo', ['rl', 'irm', 'goal_generator', 'entropy_target', 'repr', 'rw', 'rewards',
                                     'policy_loss_addons', 'training_reward'], default_value=())
"""The info of each part, and the rewards ``[B]`` by the name of the part that gives them.

``training_reward``: the reward that the policy is trained on, if it is known only when an on-policy unroll is complete.
"""


class Connection(NamedTuple):
    """Input and output of a part of an agent: nests of specs, or a description of what has no spec."""

    field: str
    part: Algorithm
    input_spec: Any
    output_spec: Any


class _Parts:
    """Parts of an agent in the order in which a step runs them."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []

    def add(self, field: str, part: Any, input_spec: Any, output: Any) -> Any:
        """Add a part, unless it is None, and return it; ``output``: a spec, or the name of its attribute."""
        if part is not None:
            output = getattr(part, output) if output in ('output_spec', 'action_spec') else output
            self.connections.append(Connection(field, part, input_spec, output))
        return part

    def helper(self, not_stepped: Algorithm | None) -> AgentHelper:
        """Return a helper for all parts."""
        helper = AgentHelper(AgentState)
        for connection in self.connections:
            helper.register_algorithm(connection.part, connection.field, connection.part is not not_stepped)
        return helper


@configurable
class Agent(RLAlgorithm):
    """A policy algorithm with the parts around it.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        reward_spec: spec of rank 0 or 1.
        env: batched environment.
        config: configuration.
        rl_algorithm_cls: learns the policy; called as ``(observation_spec=, action_spec=, reward_spec=, config=,
            debug_summaries=)``.
        reward_weight_algorithm_cls: adjusts the weights of a multi-dimensional reward; called as
            ``(reward_spec=, debug_summaries=)``.
        representation_learner_cls: turns the observation into the input of the parts after it; called like
            ``rl_algorithm_cls``; has ``output_spec``.
        representation_use_rl_state: give the representation learner the state of the policy algorithm instead of
            its own in ``rollout_step`` and ``predict_step``.
        goal_generator: outputs a goal and a reward (or ``()``); has ``action_spec``. An algorithm, or a constructor,
            called as ``(observation_spec=, action_spec=)`` with the spec of the representation. It does not
            train the representation.
        intrinsic_reward_module: outputs a reward ``[B]``. An algorithm, or a constructor, called as
            ``(observation_spec=, action_spec=)`` with the spec of its input: the representation, or
            ``[representation, goal]``. It trains neither. A list of several modules gives the sum of their rewards.
        intrinsic_reward_coef: factor of the intrinsic reward, a number or a schedule, or a list with one for each
            module.
        extrinsic_reward_coef: factor of the environment's reward, a number or a schedule.
        enforce_entropy_target: keep the entropy of the policy above a target; do not use
            ``entropy_regularization`` of the loss at the same time.
        entropy_target_cls: algorithm that enforces the entropy target, called as ``(action_spec, debug_summaries=)``;
            ``None``: ``EntropyTargetAlgorithm``, or ``NestedEntropyTargetAlgorithm`` for nested actions.
        optimizer: optimizes the parameters that the optimizers of the parts do not.
        debug_summaries: write more summaries.
        name: name of this algorithm.
        policy_loss_addons: constructors of terms that are added to the loss of the policy, see
            :mod:`alfx.algorithms.composition.policy_loss_addons`; called as ``(observation_spec=, action_spec=,
            debug_summaries=)``.
        intrinsic_reward_as_dimension: pass the intrinsic reward to the policy algorithm as an additional, last
            dimension of the reward instead of adding it to the extrinsic reward. It has a separate value, and a
            separate discount if ``gamma`` of the loss is a list. The coefficients become the reward weights. Each
            of several modules becomes one dimension. Otherwise it is added to each dimension of a vector reward,
            which multiplies its coefficient by the sum of the reward weights.

    Raises:
        ConfError: ``intrinsic_reward_as_dimension`` without an ``intrinsic_reward_module``, or with a
            ``goal_generator`` or ``reward_weight_algorithm_cls``; the numbers of modules and coefficients differ; a
            module is incompatible with the other parts.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), env: Any = None, config: TrainerConfig | None = None,
                 rl_algorithm_cls: Callable[..., Any] = ActorCriticAlgorithm,
                 reward_weight_algorithm_cls: Callable[..., Any] | None = None,
                 representation_learner_cls: Callable[..., Any] | None = None,
                 representation_use_rl_state: bool = False,
                 goal_generator: Algorithm | Callable[..., Any] | None = None,
                 intrinsic_reward_module: Algorithm | Callable[..., Any] | Sequence[Any] | None = None,
                 intrinsic_reward_coef: Coefficient | Sequence[Coefficient] = 1.0,
                 extrinsic_reward_coef: Coefficient = 1.0,
                 enforce_entropy_target: bool = False, entropy_target_cls: Callable[..., Any] | None = None,
                 optimizer: Any = None, debug_summaries: bool = False, name: str = 'AgentAlgorithm',
                 policy_loss_addons: Sequence[Callable[..., Any]] = (), intrinsic_reward_as_dimension: bool = False):
        _check_dimension(intrinsic_reward_as_dimension, intrinsic_reward_module, goal_generator=goal_generator,
                         reward_weight_algorithm_cls=reward_weight_algorithm_cls)
        common = dict(action_spec=action_spec, reward_spec=reward_spec, config=config, debug_summaries=debug_summaries)
        parts, spec = _Parts(), observation_spec
        representation_learner = parts.add('repr', _made(representation_learner_cls, observation_spec=spec, **common),
                                           spec, 'output_spec')
        if representation_learner is not None:
            spec = representation_learner.output_spec
        goals = parts.add('goal_generator', _made(goal_generator, observation_spec=spec, action_spec=action_spec),
                          spec, 'action_spec')
        if goals is not None:
            spec = [spec, goals.action_spec]
        irm, coefficients = modules_and_coefficients(intrinsic_reward_module, intrinsic_reward_coef,
                                                     observation_spec=spec, action_spec=action_spec)
        parts.add('irm', irm, spec, 'intrinsic reward')
        if intrinsic_reward_as_dimension:
            common['reward_spec'] = TensorSpec((reward_spec.numel + len(coefficients), ))
        rl_algorithm = parts.add('rl', rl_algorithm_cls(observation_spec=spec, **common), spec, action_spec)
        entropy_target = parts.add('entropy_target', _make_entropy_target(
            enforce_entropy_target, entropy_target_cls, action_spec, debug_summaries), 'action distribution', 'loss')
        addons = parts.add('policy_loss_addons', PolicyLossAddOns([
            addon(observation_spec=spec, action_spec=action_spec, debug_summaries=debug_summaries)
            for addon in policy_loss_addons]) if policy_loss_addons else None, 'action distribution', 'loss')
        reward_weight_algorithm = parts.add('rw', _made(reward_weight_algorithm_cls, reward_spec=reward_spec,
                                                        debug_summaries=debug_summaries), reward_spec, 'reward weights')
        check_modules(irm, rl_algorithm, config)
        is_first_part = representation_learner is None and goals is None
        rewards_unrolls = is_first_part and rewards_unrolls_at_once(irm, rl_algorithm, config)
        if not rewards_unrolls and irm is not None and nest.flatten(irm.unroll_state_spec):
            raise ConfError([problem_at('Agent', 'intrinsic_reward_module', f'= {type(irm).__name__}, which remembers '
                                        'the steps of an episode, but '
                                        + why_not_at_once(irm, rl_algorithm, is_first_part, config),
                                        'use a module without such a memory, such as RNDAlgorithm, or remove '
                                        'the cause')])
        if isinstance(irm, BatchRewards) and not is_first_part:
            raise ConfError([problem_at('Agent', 'intrinsic_reward_module', f'= {type(irm).__name__}, which rewards '
                                        'observations, but there is a representation learner or a goal generator in '
                                        'front of it', 'leave one of them out')])
        helper = parts.helper(not_stepped=irm if rewards_unrolls else None)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         optimizer=optimizer, is_on_policy=rl_algorithm.on_policy, env=env, config=config,
                         debug_summaries=debug_summaries, name=name, **helper.state_specs())
        self._helper = helper
        self._representation_learner = representation_learner
        self._goal_generator = goals
        self._irm = irm
        self._rl_algorithm = rl_algorithm
        self._entropy_target_algorithm = entropy_target
        self._reward_weight_algorithm = reward_weight_algorithm
        self._policy_loss_addons = addons
        self._connections = parts.connections
        self._parts_in_order = [connection.part for connection in parts.connections]
        self._in_the_loss = [part for part in self._parts_in_order if part is not reward_weight_algorithm]
        self._representation_use_rl_state = representation_use_rl_state
        self._rewards_unrolls = rewards_unrolls
        self._intrinsic_reward_coefs = coefficients
        self._extrinsic_reward_coef = as_scheduler(extrinsic_reward_coef)
        self._policy_acts_alone = False  # until it is known whether it is on-policy
        self._changes_reward = irm is not None or goals is not None or extrinsic_reward_coef != 1.0
        self._intrinsic_reward_as_dimension = intrinsic_reward_as_dimension
        self._dimension_weights: list[float] = []
        if reward_weight_algorithm is not None:
            rl_algorithm.set_reward_weights(reward_weight_algorithm.reward_weights)
        elif intrinsic_reward_as_dimension:
            self._weight_dimensions()
            self._dimension_weights = []  # set again after loading a checkpoint, which contains other weights
        known = {connection.field: connection.part for connection in parts.connections}
        for part in known.values():
            part.on_parts_built(known)

    # Parts -----------------------------------------------------------------------------------------------------

    def _parts(self) -> list[Algorithm]:
        """Return all parts in the order of a step."""
        return self._parts_in_order

    def _parts_with_loss(self) -> list[Algorithm]:
        """Return the parts whose losses are summed; reward weights are trained in ``after_train_iter``."""
        return self._in_the_loss

    def connections(self) -> list[Connection]:
        """Return the input and output of each part, in the order of a step."""
        return list(self._connections)

    def fields_with_loss(self) -> list[str]:
        """Return the fields of the parts whose losses are summed."""
        return [self._helper.field(part) for part in self._parts_with_loss()]

    def reward_coefficients(self) -> dict[str, float]:
        """Return the coefficients of the rewards that the policy is trained on, by the name of their source."""
        coefficients = {'extrinsic': self._extrinsic_reward_coef()}
        if self._goal_generator is not None:
            coefficients['goal_generator'] = 1.0
        return coefficients | {name: coefficient() for name, coefficient in self._intrinsic_reward_coefs.items()}

    def _weight_dimensions(self) -> None:
        """Set the reward weights to the coefficients, if a schedule has changed them."""
        coefficients = list(self.reward_coefficients().values())
        if coefficients != self._dimension_weights:
            self._dimension_weights = coefficients
            own, *intrinsic = coefficients
            self._rl_algorithm.set_reward_weights(torch.tensor([*[own] * self._reward_spec.numel, *intrinsic]))

    def set_path(self, path: str) -> None:
        """Set the paths of all parts below ``path``."""
        super().set_path(path)
        prefix = f'{path}.' if path else ''
        for part in self._parts():
            part.set_path(prefix + self._helper.field(part))

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set :attr:`on_policy` of all parts."""
        super().set_on_policy(is_on_policy)
        if hasattr(self, '_helper'):
            self._set_parts_on_policy(is_on_policy)

    def _set_parts_on_policy(self, is_on_policy: bool) -> None:
        self._policy_acts_alone = self._is_policy_all_of_rollout(is_on_policy)
        for part in self._parts():
            try:
                part.set_on_policy(is_on_policy)
            except ValueError as error:
                raise ValueError(f'{error} (rl_algorithm_cls is {type(self._rl_algorithm).__name__})') from error

    def finalize(self) -> None:
        """Set the paths of the parts and whether they train on-policy, then finalize as ``RLAlgorithm`` does."""
        self._set_parts_on_policy(bool(self.on_policy))
        self.set_path(self.path)
        if self._rewards_unrolls and self.on_policy and not self.capabilities.recomputes_rollout_info:
            raise ConfError([problem_at('Agent', 'intrinsic_reward_module', f'= {type(self._irm).__name__}, which '
                                        'rewards whole unrolls, but this on-policy agent needs the reward of each step '
                                        'while it acts', 'use networks that are not recurrent, or PPO')])
        super().finalize()
        if self._env is not None:
            for part in self._parts():
                part.prepare(self)

    _delegates_offline = True

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities of the agent itself; infos are recomputed if only the policy acts in the rollout."""
        is_plain = (type(self).rollout_step is Agent.rollout_step and self._steps_alone(self._rewards_unrolls)
                    and (self._rewards_unrolls or not self._changes_reward))
        trains_after = (self._reward_weight_algorithm is not None
                        or type(self).after_train_iter is not Agent.after_train_iter)
        return Capabilities(traceable_update=True, trains_sequences_at_once=True, recomputes_rollout_info=is_plain,
                            traceable_prediction=self._is_policy_all_of_prediction,
                            trains_after_iteration=trains_after,
                            postprocesses_unrolls=self._rewards_unrolls or is_overridden(type(self),
                                                                                         'postprocess_unroll'),
                            has_offline_hooks=self._has_offline_hooks())

    def _capabilities_of_parts(self) -> dict[Algorithm, Capabilities]:
        capabilities = super()._capabilities_of_parts()
        if self._rewards_unrolls and self._irm is not None and self.unrolls_end_with_bootstrap:
            # pairs of steps are made of whole unrolls
            capabilities[self._irm] = capabilities[self._irm]._replace(needs_previous_step=False)
        return capabilities

    @property
    def policy_algorithm(self) -> Algorithm:
        """The policy algorithm, see :attr:`policy`."""
        return self._rl_algorithm

    @property
    def policy(self) -> RLAlgorithm:
        """The policy algorithm."""
        return self._rl_algorithm

    @property
    def intrinsic_reward(self) -> Algorithm | None:
        """The intrinsic reward module, if there is one."""
        return self._irm

    @property
    def representation(self) -> Algorithm | None:
        """The representation learner, if there is one."""
        return self._representation_learner

    def _is_policy_all_of_rollout(self, is_on_policy: bool) -> bool:
        """Return whether collecting experience runs the policy algorithm only."""
        if is_on_policy:
            return self._parts() == [self._rl_algorithm] and not self._changes_reward
        return self._steps_alone(self._rewards_unrolls)

    @property
    def _is_policy_all_of_prediction(self) -> bool:
        """Return whether evaluation runs the policy algorithm only."""
        is_silent = self._irm is not None and type(self._irm).predict_step is Algorithm.predict_step
        return type(self).predict_step is Agent.predict_step and self._steps_alone(is_silent)

    def _steps_alone(self, irm_is_silent: bool) -> bool:
        """Return whether only the policy algorithm is active in a step; ``irm_is_silent``: the reward module is not."""
        silent = [self._rl_algorithm, self._entropy_target_algorithm, self._policy_loss_addons]
        if irm_is_silent:
            silent.append(self._irm)
        return all(part in silent for part in self._parts())

    def batch_sources(self, source: Any) -> Sequence[Any]:
        """Return the batch sources of the policy algorithm."""
        return self._rl_algorithm.batch_sources(source)

    def num_updates_due(self, count: int) -> int:
        """Return the number of updates that the policy algorithm requests."""
        return self._rl_algorithm.num_updates_due(count)

    def demonstration_batch(self, root: Any, collected: Experience, transformed: Experience) -> Experience | None:
        """Return the demonstrations of the policy algorithm."""
        return self._rl_algorithm.demonstration_batch(root, collected, transformed)

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Run one evaluation step; compute intrinsic rewards for inspection only, and entropy targets not at all."""
        new_state, info = {}, {}
        environment_step = time_step
        if self._representation_learner is not None:
            own = state.rl if self._representation_use_rl_state else state.repr
            step = self._representation_learner.predict_step(time_step, own)
            new_state['repr'], info['repr'] = self._kept_repr_state(step, state), step.info
            time_step = time_step._replace(observation=step.output)
        if self._goal_generator is not None:
            step = self._goal_generator.predict_step(time_step, state.goal_generator)
            new_state['goal_generator'], info['goal_generator'] = step.state, step.info
            time_step = time_step._replace(observation=[time_step.observation, step.output[0]])
        if self._irm is not None:
            new_state['irm'] = state.irm
            if type(self._irm).predict_step is not Algorithm.predict_step:
                step = self._irm.predict_step(time_step, state.irm)
                new_state['irm'], info['irm'] = step.state, step.info
        rl_step = self._rl_algorithm.predict_step(time_step, state.rl)
        new_state['rl'], info['rl'] = rl_step.state, rl_step.info
        if self._reward_weight_algorithm is not None:
            step = self._reward_weight_algorithm.predict_step(environment_step, state.rw)
            new_state['rw'], info['rw'] = step.state, step.info
        return AlgStep(rl_step.output, AgentState(**new_state), AgentInfo(**info))

    def rollout_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Run one step of collecting experience with all parts."""
        if self._policy_acts_alone:
            policy: Any = self._modules['_rl_algorithm']  # attribute access takes ten times as long
            output, new_state, info = policy.rollout_step(time_step, state.rl)
            return AlgStep(output, state if new_state is state.rl else AgentState(new_state), AgentInfo(info))
        return self._step('rollout_step', time_step, state, None)

    def collect_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Run ``rollout_step`` without what :meth:`train_step` recomputes; used only if infos are recomputed."""
        step = self._rl_algorithm.collect_step(time_step, state.rl)
        return AlgStep(step.output, AgentState(rl=step.state), AgentInfo(rl=step.info))

    def train_step(self, time_step: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Run one step of training on stored experience with all parts."""
        return self._step('train_step', time_step, state, rollout_info)

    def train_sequence(self, time_step: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Call ``train_sequence`` of each part, ``[T, B, ...]``."""
        return self._step('train_sequence', time_step, state, rollout_info)._replace(state=())

    def train_step_offline(self, time_step: TimeStep, state: Any, rollout_info: Any,
                           pre_train: bool = False) -> AlgStep:
        """Run ``train_step`` on experience from an offline buffer."""
        return self._step('train_step_offline', time_step, state, rollout_info, pre_train)

    def train_sequence_offline(self, time_step: TimeStep, state: Any, rollout_info: Any,
                               pre_train: bool = False) -> AlgStep:
        """Call ``train_sequence_offline`` of each part, ``[T, B, ...]``."""
        return self._step('train_sequence_offline', time_step, state, rollout_info, pre_train)._replace(state=())

    def _step(self, method: str, time_step: TimeStep, state: Any, rollout_info: Any, *more: Any) -> AlgStep:
        """Call ``method`` of each part in order; each part gets the time step as changed by the parts before it."""
        new_state: dict[str, Any] = {}
        info: dict[str, Any] = {}
        rewards: dict[str, torch.Tensor] = {}
        is_rollout, environment_step = method == 'rollout_step', time_step
        is_auxiliary = context.is_auxiliary()  # then only the policy and its inputs are needed

        def run(part: Algorithm, inputs: Any, part_state: Any) -> AlgStep:
            field = self._helper.field(part)
            stored = () if is_rollout else (getattr(rollout_info, field), *more)
            step = getattr(part, method)(inputs, part_state, *stored)
            new_state[field], info[field] = step.state, step.info
            return step

        if self._representation_learner is not None:
            use_rl_state = self._representation_use_rl_state and is_rollout
            step = run(self._representation_learner, time_step, state.rl if use_rl_state else state.repr)
            if is_rollout:
                new_state['repr'] = self._kept_repr_state(step, state)
            time_step = time_step._replace(observation=step.output)
        if self._goal_generator is not None:
            goal, goal_reward = run(self._goal_generator, _detached(time_step), state.goal_generator).output
            time_step = time_step._replace(observation=[time_step.observation, goal])
            if isinstance(goal_reward, torch.Tensor):
                rewards['goal_generator'] = goal_reward
        if self._irm is not None and is_auxiliary:
            new_state['irm'] = state.irm
        elif self._irm is not None and not (is_rollout and self._rewards_unrolls):
            rewards.update(rewards_by_name(run(self._irm, _detached(time_step), state.irm).output))
        if is_rollout and self.on_policy and self._changes_reward:
            with context.record_if(False):  # summarize_rollout writes it once for the whole unroll
                time_step = time_step._replace(reward=self._training_reward(time_step.reward, rewards))
        elif isinstance(getattr(rollout_info, 'training_reward', ()), torch.Tensor):
            time_step = time_step._replace(reward=rollout_info.training_reward)
        rl_step = run(self._rl_algorithm, time_step, state.rl)
        if is_auxiliary:
            return AlgStep(rl_step.output, AgentState(**{**new_state, 'rw': state.rw}), AgentInfo(**info))
        if self._entropy_target_algorithm is not None and (self.on_policy or not is_rollout):
            self._entropy_target_step(method, rl_step, time_step, info)
        if self._policy_loss_addons is not None and (self.on_policy or not is_rollout):
            inputs = time_step, getattr(rl_step.info, 'action_distribution', None)
            info['policy_loss_addons'] = self._policy_step(self._policy_loss_addons, method, inputs)
        if self._reward_weight_algorithm is not None:
            new_state['rw'] = state.rw
            if is_rollout:
                step = self._reward_weight_algorithm.rollout_step(environment_step, state.rw)
                new_state['rw'], info['rw'] = step.state, step.info
        return AlgStep(rl_step.output, AgentState(**new_state), AgentInfo(rewards=rewards or (), **info))

    def _kept_repr_state(self, step: AlgStep, state: Any) -> NestedTensor:
        """Return the next state of the representation learner, unchanged if it uses the state of the policy."""
        return state.repr if self._representation_use_rl_state else step.state

    def _entropy_target_step(self, method: str, rl_step: AlgStep, time_step: TimeStep, info: dict[str, Any]) -> None:
        """Add the info of the entropy target for the distribution that the policy algorithm reports."""
        assert self._entropy_target_algorithm is not None
        distribution = getattr(rl_step.info, 'action_distribution', ())
        if isinstance(distribution, tuple) and distribution == ():
            raise ValueError(f"enforce_entropy_target needs an 'action_distribution' in each {method}, which "
                             f'{type(self._rl_algorithm).__name__} does not yield (with this policy_update_period)')
        inputs = distribution, time_step.step_type
        info['entropy_target'] = self._policy_step(self._entropy_target_algorithm, method, inputs)

    def _policy_step(self, part: Any, method: str, inputs: Any) -> NestedTensor:
        """Return the info of a part whose input is the distribution of the policy."""
        if method.startswith('train_sequence'):
            return part.train_sequence(inputs, (), ()).info
        return (part.rollout_step(inputs, ()) if self.on_policy else part.train_step(inputs, (), ())).info

    def postprocess_unroll(self, inputs: TimeStep, rollout_info: Any) -> Any:
        """Postprocess an unroll ``[T + 1, B, ...]`` with the policy algorithm, and add its intrinsic rewards."""
        return self.postprocess_steps(inputs, rollout_info, ())[0]

    @property
    def unroll_state_spec(self) -> NestedTensorSpec:
        """Spec of the state of the intrinsic reward module between unrolls."""
        return self._irm.unroll_state_spec if self._irm is not None and self._rewards_unrolls else ()

    def postprocess_steps(self, inputs: TimeStep, rollout_info: Any,
                          state: NestedTensor | None) -> tuple[Any, NestedTensor]:
        """Postprocess steps ``[T, B, ...]`` with the policy algorithm, and add their intrinsic rewards; 0 for a first
        row that has been rewarded before.
        """
        rollout_info = rollout_info._replace(rl=self._rl_algorithm.postprocess_unroll(inputs, rollout_info.rl))
        if not self._rewards_unrolls:
            return rollout_info, ()
        step = self._irm.reward_rows(inputs, state, self.unrolls_end_with_bootstrap)
        rollout_info = rollout_info._replace(irm=step.info, rewards=rewards_by_name(step.output))
        if self.on_policy:
            with context.record_if(False):
                total = self._training_reward(inputs.reward, rollout_info.rewards)
            rollout_info = rollout_info._replace(training_reward=total)
        return rollout_info, step.state

    def _check_trains_offline(self) -> None:
        super()._check_trains_offline()
        if self._intrinsic_reward_as_dimension and not isinstance(self._irm, BatchRewards):
            raise ConfError([problem_at('Agent', 'intrinsic_reward_as_dimension', '= True cannot be combined with '
                                        f'TrainerConfig.offline_buffer_dir: {type(self._irm).__name__} only rewards '
                                        'collected steps, and has no reward for the steps of a dataset',
                                        'change one of the two')])

    # Rewards ---------------------------------------------------------------------------------------------------

    def _training_reward(self, reward: torch.Tensor, rewards: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the reward that the policy is trained on, as a new tensor."""
        if self._intrinsic_reward_as_dimension:
            for name, value in (('extrinsic', reward), *rewards.items()):
                summary_utils.add_mean_hist_summary(f'reward/{name}', value)
            self._weight_dimensions()
            intrinsic = torch.stack([rewards[name] for name in self._intrinsic_reward_coefs], -1)
            own = reward if reward.ndim == intrinsic.ndim else reward.unsqueeze(-1)
            return torch.cat((own, intrinsic), -1)
        coefficients = self.reward_coefficients()
        extra = [r.unsqueeze(-1) if r.ndim < reward.ndim else r for r in rewards.values()]
        return AgentHelper.accumulate_algorithm_rewards(
            [reward, *extra], [coefficients[name] for name in ('extrinsic', *rewards)],
            ['extrinsic', *rewards], 'reward', summary_utils.add_mean_hist_summary)

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Add intrinsic rewards, then call ``preprocess_experience`` of each part with the infos of that part."""
        if self._changes_reward:
            rewards = rollout_info.rewards if isinstance(rollout_info.rewards, dict) else {}
            if rewards_batches(self._irm):
                step = self._irm.reward_batch(self, root_inputs, rewards.get('irm', ()))
                rewards = {**rewards, **rewards_by_name(step.output)}
                rollout_info = rollout_info._replace(irm=step.info)
            root_inputs = root_inputs._replace(reward=self._training_reward(root_inputs.reward, rewards))
        for part in self._parts():
            field = self._helper.field(part)
            info = getattr(rollout_info, field)
            root_inputs, processed = part.preprocess_experience(root_inputs, info, batch_info)
            if processed is not info:
                rollout_info = rollout_info._replace(**{field: processed})
        return root_inputs, rollout_info

    # Losses and hooks ------------------------------------------------------------------------------------------

    def measures(self, info: Any) -> dict[str, torch.Tensor]:
        """Return the measures of the policy, and the float values in the infos of the other parts.

        ``repr/NAME``, ``goal_generator/NAME`` and ``irm/NAME`` for each float leaf ``[B]``.
        """
        parts = {field: getattr(info, field) for field in ('repr', 'goal_generator', 'irm')}
        own = {path.replace('.', '/'): leaf for path, leaf in nest.flatten_with_path(parts)
               if isinstance(leaf, torch.Tensor) and leaf.ndim == 1 and leaf.is_floating_point()}
        return {**self._rl_algorithm.measures(info.rl), **own}

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the sum of the losses of all parts, ``[T, B]``."""
        return self._helper.accumulate_loss_info(self._parts_with_loss(), info)

    def auxiliary_reference(self, info: Any) -> Any:
        """Return ``auxiliary_reference`` of the policy algorithm."""
        return self._rl_algorithm.auxiliary_reference(info.rl)

    def calc_auxiliary_loss(self, info: Any, reference: Any) -> LossInfo:
        """Return the auxiliary loss ``[T, B]`` of the policy algorithm; the other parts have none."""
        return self._rl_algorithm.calc_auxiliary_loss(info.rl, reference)

    def calc_loss_offline(self, info: Any, pre_train: bool = False) -> LossInfo:
        """Return the sum of the offline losses of all parts, ``[T, B]``."""
        return self._helper.accumulate_loss_info(self._parts_with_loss(), info, offline=True, pre_train=pre_train)

    def after_update(self, experience: TimeStep, train_info: Any) -> None:
        """Call ``after_update`` of each part."""
        self._helper.after_update(self._parts_with_loss(), experience, train_info)

    def after_train_iter(self, experience: TimeStep | None, info: Any) -> None:
        """Call ``after_train_iter`` of each part, then hand new reward weights to the policy algorithm."""
        self._helper.after_train_iter([part for part in self._parts() if part is not self._reward_weight_algorithm],
                                      experience, info)
        if self._reward_weight_algorithm is not None:
            if experience is not None and self.unrolls_end_with_bootstrap:  # each reward counts once
                experience, info = nest.map_structure(lambda x: x[:-1], (experience, info))
            self._helper.after_train_iter([self._reward_weight_algorithm], experience, info)
            self._rl_algorithm.set_reward_weights(self._reward_weight_algorithm.reward_weights)

    def summarize_rollout(self, experience: Experience) -> None:  # type: ignore[override]
        """Write the summaries of ``RLAlgorithm``, and those of the policy algorithm if it has its own."""
        super().summarize_rollout(experience)
        if self.on_policy and self._changes_reward:
            self._training_reward(experience.time_step.reward, experience.rollout_info.rewards or {})
        if type(self._rl_algorithm).summarize_rollout is not RLAlgorithm.summarize_rollout:
            self._rl_algorithm.summarize_rollout(
                experience._replace(rollout_info=self._helper.part(self._rl_algorithm, experience.rollout_info)))


def _detached(time_step: TimeStep) -> TimeStep:
    """Return ``time_step`` with a detached observation, for a part that must not train the parts before it."""
    return time_step._replace(observation=nest.map_structure(torch.Tensor.detach, time_step.observation))


def _made(part: Any, **arguments: Any) -> Any:
    """Return ``part`` if it is ``None`` or an algorithm, otherwise call it to construct one."""
    return part if part is None or isinstance(part, Algorithm) else part(**arguments)


def _check_dimension(is_asked_for: bool, module: Any, **without: Any) -> None:
    """Reject an intrinsic reward as a dimension if there is none, or if another part depends on the dimensions."""
    if not is_asked_for:
        return
    reasons = [] if module is not None else ['there is no intrinsic_reward_module']
    reasons += [f'{name} is set' for name, part in without.items() if part is not None]
    if reasons:
        raise ConfError([problem_at('Agent', 'intrinsic_reward_as_dimension', f'= True, but {reason}',
                                    'change one of the two') for reason in reasons])


def _make_entropy_target(enforce: bool, cls: Callable[..., Any] | None, action_spec: NestedTensorSpec,
                         debug_summaries: bool) -> Algorithm | None:
    """Return the entropy target algorithm, if the conf asks for one."""
    if not enforce and cls is None:
        return None
    if cls is None:
        cls = EntropyTargetAlgorithm if isinstance(action_spec, TensorSpec) else NestedEntropyTargetAlgorithm
    return cls(action_spec, debug_summaries=debug_summaries)
