"""Model-based policy optimization (Janner et al. 2019, MBPO, arXiv:1906.08253) around any off-policy algorithm.

The algorithm learns a model from experience. It starts short imagined rollouts of the policy from stored observations,
and trains the policy on minibatches with a small share of real transitions; the rest is imagined:

    every ``model_period`` iterations:
        train the model on the replay buffer until the error on the holdout set stops improving
        for each of ``num_rollouts`` stored observations: imagine ``rollout_length`` steps, store them
    every iteration:
        updates from ``real_share * B`` real and ``(1 - real_share) * B`` imagined transitions

Differences from the paper: a separate network learns the reward, and the model is trained further each time instead of
from scratch. The wrapped algorithm performs the updates of the policy, from minibatches of two sources
(:meth:`~alfx.algorithms.algorithm.Algorithm.batch_sources`).
"""
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from alfx import context, nest, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.containers import RLAlgWrapper
from alfx.algorithms.model_based.imagination import TransitionStore, imagined_transitions
from alfx.algorithms.world_models import WorldModel, reject_observation_transformers
from alfx.config import TrainerConfig
from alfx.data_structures import TimeStep
from alfx.gin_utils import ConfError, Count, Fraction, Range, configurable, problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.schedulers import as_scheduler

_CHECK_PERIOD = 50  # updates of the model between two evaluations on the holdout set
_PATIENCE = 5  # evaluations in a row without improvement after which training ends
_IMPROVEMENT = 0.01  # minimum improvement, relative to the best error so far
_HOLDOUT_SAMPLE = 5000


@configurable
class ModelBasedPolicyAlgorithm(RLAlgWrapper):
    """Algorithm wrapper that trains an off-policy algorithm on real and imagined transitions (MBPO).

    Args:
        observation_spec: float32 ``[D]``.
        action_spec: nest of specs of the action.
        rl_algorithm_cls: learns the policy; off-policy and not recurrent. Called as ``(observation_spec=,
            action_spec=, reward_spec=, config=, debug_summaries=)``.
        reward_spec: rank 0 or 1.
        model_optimizer: trains the model.
        dynamics_module_ctor: creates the dynamics, see :class:`~alfx.algorithms.world_models.WorldModel`.
        reward_module: see :class:`~alfx.algorithms.world_models.WorldModel`.
        termination_fn: see :class:`~alfx.algorithms.world_models.WorldModel`.
        real_share: share of real transitions in each minibatch, in [0, 1].
        rollout_length: number of imagined steps, or a schedule of it. Longer rollouts rely more on the model.
        num_rollouts: number of start observations each time.
        num_imagined: number of imagined transitions that are kept.
        model_period: number of iterations between two trainings of the model.
        max_model_updates: maximum number of updates of the model per training.
        model_batch_size: number of transitions in each update of the model.
        env: batched environment; only the root algorithm has it.
        config: configuration; ``mini_batch_length`` is 2.
        optimizer: optimizes the parameters that the policy algorithm's optimizers do not.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ConfError: an argument is out of range, or the policy algorithm is on-policy or recurrent.
        SpecError: the observation is not a vector of floats.
    """

    _not_trained = ('_world_model', )

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 rl_algorithm_cls: Callable[..., Any], reward_spec: TensorSpec = TensorSpec(()),
                 model_optimizer: Any = None, dynamics_module_ctor: Callable[..., Any] | None = None,
                 reward_module: Any = None, termination_fn: Callable[[Tensor], Tensor] | str = 'none',
                 real_share: Fraction = 0.05,
                 rollout_length: Annotated[float, Range(minimum=1)] | Callable[[], float] = 1,
                 num_rollouts: Count = 10000, num_imagined: Count = 100000, model_period: Count = 250,
                 max_model_updates: Count = 500, model_batch_size: Count = 256, env: Any = None,
                 config: TrainerConfig | None = None, optimizer: Any = None, debug_summaries: bool = False,
                 name: str = 'ModelBasedPolicyAlgorithm'):
        owner = type(self).__name__
        rl = rl_algorithm_cls(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                              config=config, debug_summaries=debug_summaries)
        _check_policy(owner, rl)
        super().__init__(observation_spec, action_spec, rl, env=env, reward_spec=reward_spec, config=config,
                         optimizer=optimizer, debug_summaries=debug_summaries, name=name)
        if model_optimizer is None:
            raise ConfError([problem_at(owner, 'model_optimizer', 'is not set', f'set {owner}.model_optimizer = '
                                        '@model/Adam()')])
        self._world_model = WorldModel(observation_spec, action_spec, reward_spec, dynamics_module_ctor, reward_module,
                                       termination_fn, model_optimizer, f'{name}.model', owner)
        self._real_share, self._rollout_length = real_share, as_scheduler(rollout_length)
        self._num_rollouts, self._num_imagined = num_rollouts, num_imagined
        self._model_period, self._max_model_updates = model_period, max_model_updates
        self._model_batch_size = model_batch_size
        self._wait: Tensor
        self.register_buffer('_wait', torch.zeros((), dtype=torch.int64))  # iterations until the model is trained
        self._real: Any = None  # the replay buffer, set by the first call of batch_sources
        self._imagined: TransitionStore | None = None
        self._saved_imagination: dict[str, Any] = {}
        self._latest: dict[str, float] = {}  # latest values of model and imagination, logged at the next summary

    # Parts and configuration -----------------------------------------------------------------------------------

    _delegates_offline = True

    @property
    def world_model(self) -> WorldModel:
        """Model of dynamics, reward and termination."""
        return self._world_model

    def on_parts_built(self, parts: Mapping[str, Algorithm]) -> None:
        """Reject parts that use observations or rewards that the model cannot imagine.

        Raises:
            ConfError: the agent has a representation learner, a goal generator or an intrinsic reward module.
        """
        arguments = {'repr': 'representation_learner_cls', 'goal_generator': 'goal_generator',
                     'irm': 'intrinsic_reward_module'}
        for field, argument in arguments.items():
            if field in parts:
                raise ConfError([problem_at('Agent', argument, f'= {type(parts[field]).__name__} cannot be combined '
                                            f'with {self._name}, which imagines observations and rewards of the '
                                            'environment', 'leave it out')])
        super().on_parts_built(parts)

    def check_config(self, config: TrainerConfig) -> None:
        """Reject settings that do not work with imagined transitions.

        Raises:
            ConfError: the length of sequences is not 2, a data transformer changes observations, the run collects
                nothing, or there are several processes.
        """
        name = type(self).__name__
        config.require_collection(name)
        if config.mini_batch_length != 2:
            raise ConfError([problem_at('TrainerConfig', 'mini_batch_length', f'= {config.mini_batch_length}: {name} '
                                        'trains on transitions, which have 2 steps', 'set it to 2')])
        if config.whole_replay_buffer_training:
            raise ConfError([problem_at('TrainerConfig', 'whole_replay_buffer_training', f'= True: {name} samples from '
                                        'the replay buffer', 'set it to False')])
        reject_observation_transformers(config, name)
        if context.num_ranks() > 1:
            raise ConfError([problem_at(name, 'model_optimizer', 'trains a model in a single process', 'train without '
                                        'data parallelism')])

    # Imagination -----------------------------------------------------------------------------------------------

    def batch_sources(self, source: Any) -> Sequence[Any]:
        """Return the sources of real and imagined transitions; only real ones before the first imagination."""
        if self._real is not source.source:
            self._use(source.source)
        if not self._imagined:
            return [source]
        size = source.batch_size
        real = round(self._real_share * size)
        parts = (source.source, real), (self._imagined, size - real)
        return [source._replace(source=part, batch_size=count, weight=count / size) for part, count in parts if count]

    def _use(self, buffer: Any) -> None:
        """Set the replay buffer from which imagined rollouts start."""
        self._real = buffer
        spec = buffer.data_spec
        spec = spec._replace(time_step=_imaginable(spec.time_step), state=(),
                             rollout_info=_part(spec.rollout_info, self._keys()))
        self._imagined = TransitionStore(spec, self._num_imagined)
        if self._saved_imagination:
            self._imagined.load_state_dict(self._saved_imagination)
            self._saved_imagination = {}

    def _keys(self) -> list[str]:
        return self._path.split('.') if self._path else []

    def after_train_iter(self, root_inputs: TimeStep | None, rollout_info: Any) -> None:
        """Train the model and imagine, every ``model_period`` iterations."""
        self._alg.after_train_iter(root_inputs, rollout_info)
        config = self._config
        if self._real is None or config is None:
            return
        if int(self._real.current_pos.sum()) < max(config.initial_collect_steps, 2):
            return
        if int(self._wait) > 0:
            self._wait -= 1
        else:
            self._wait.fill_(self._model_period - 1)
            with context.replay_context():
                self.train_model(self._real)
            self.imagine(self._real)
        if context.should_record_summaries():
            with summary.scope(self._name):
                for name, value in self._latest.items():
                    summary.scalar(name, value)

    def train_model(self, buffer: Any) -> int:
        """Train the model on a replay buffer until the error on the holdout set stops improving.

        Returns:
            Number of updates.
        """
        best, unimproved, number, loss = math.inf, 0, 0, 0.0
        while number < self._max_model_updates and unimproved < _PATIENCE:
            experience, batch_info = buffer.get_batch(self._model_batch_size, 2, uniform=True)
            loss = self._world_model.update(experience.time_step, batch_info)
            number += 1
            if number % _CHECK_PERIOD == 0:
                experience, batch_info = buffer.get_batch(min(_HOLDOUT_SAMPLE, buffer.total_size), 2, uniform=True)
                error = self._world_model.dynamics.measure_holdout(experience.time_step, batch_info)
                if error is None:
                    continue
                is_better = not math.isfinite(best) or error < best - _IMPROVEMENT * abs(best)
                best, unimproved = (error, 0) if is_better else (best, unimproved + 1)
        self._latest.update({'model/updates': number, 'model/loss': loss})
        if math.isfinite(best):
            self._latest['model/holdout'] = best
        return number

    @torch.no_grad()
    def imagine(self, buffer: Any) -> int:
        """Roll out the policy in the model from observations of a replay buffer, and store the transitions.

        Returns:
            Number of transitions.
        """
        assert self._imagined is not None, 'batch_sources sets the replay buffer'
        experience, _ = buffer.get_batch(self._num_rollouts, 1, uniform=True)
        start = _imaginable(nest.map_structure(lambda x: x[:, 0], experience.time_step))
        state = self._alg.get_initial_rollout_state(self._num_rollouts)
        template = buffer.data_spec.rollout_info

        def policy(step: TimeStep) -> tuple[Tensor, NestedTensor]:
            chosen = self._alg.rollout_step(step, state)
            return chosen.output, _part(template, self._keys(), chosen.info)

        length = max(int(self._rollout_length()), 1)
        with context.rollout_context(), context.record_if(False):
            transitions = imagined_transitions(start, policy, self._world_model.imagine, length)
        for each in transitions:
            self._imagined.add(each)
        count = sum(len(each.time_step.step_type) for each in transitions)
        if count:
            reward = torch.cat([e.time_step.reward[:, 1] for e in transitions]).mean()
            self._latest.update({'imagined/steps': count, 'imagined/reward': float(reward)})
        return count

    # Checkpoints -----------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Return the extra state with the imagined transitions and the latest values to log."""
        state = {**super().get_extra_state(), 'latest': dict(self._latest)}
        saved = self._saved_imagination if self._imagined is None else self._imagined.state_dict()
        return {**state, 'imagined': saved} if saved else state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`get_extra_state`."""
        super().set_extra_state(state)
        self._latest = dict(state.get('latest', {}))
        self._saved_imagination = state.get('imagined', {})
        self._real = self._imagined = None


def _check_policy(owner: str, rl: Any) -> None:
    if rl.on_policy or rl.needs_own_rollouts:
        raise ConfError([problem_at(owner, 'rl_algorithm_cls', f'creates {type(rl).__name__}, an on-policy algorithm, '
                                    'which trains only on actions of its current policy',
                                    'choose an off-policy one, such as @SacAlgorithm')])
    if nest.flatten(rl.rollout_state_spec) or nest.flatten(rl.train_state_spec):
        raise ConfError([problem_at(owner, 'rl_algorithm_cls', f'creates a recurrent {type(rl).__name__}, or one with '
                                    'repeated or correlated noise, whose state is not known at the start of imagined '
                                    'transitions', 'choose other networks or independent noise')])


def _imaginable(time_step: TimeStep) -> TimeStep:
    """Return a time step, or its spec, without the fields that are not imagined."""
    return time_step._replace(env_info=(), untransformed=())


def _part(info: Any, keys: Sequence[str], value: Any = None) -> Any:
    """Return ``info`` with only the field at a path, replaced by ``value`` if it is given; other fields are ``()``."""
    if not keys:
        return info if value is None else value
    head, *rest = keys
    return type(info)(**{field: _part(getattr(info, field), rest, value) if field == head else ()
                         for field in info._fields})
