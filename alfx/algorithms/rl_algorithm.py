"""Base class of algorithms that output actions; the root algorithm of every run is one."""
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, Experience, LossInfo, TimeStep, time_step_spec
from alfx.engine import probe
from alfx.engine.batches import all_stored_experience
from alfx.engine.minibatches import check_sequences
from alfx.engine.plan import TracedFunction
from alfx.engine.stored_unrolls import StoredUnrolls
from alfx.engine.updater import check_compilable
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import ConfError, Problem, check_value, configurable, log_unused, problem_at
from alfx.metrics.metric_set import MetricSet
from alfx.metrics.metrics import (AverageDiscountedReturnMetric, AverageRewardMetric, EnvironmentSteps,
                                  EpisodicStartAverageDiscountedReturnMetric, NumberOfEpisodes, episode_metrics)
from alfx.offline import dataset_loading
from alfx.offline.buffer import info_of_action, make_buffer, unknown_infos
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec, zeros_from_spec


def adjust_replay_buffer_length(config: TrainerConfig, num_earliest_frames_ignored: int = 0) -> int:
    """Return the number of steps that the replay buffer has to hold for each environment.

    Training that uses up the whole buffer each iteration needs room for exactly one unroll, plus one step to
    bootstrap from, plus the frames that precede it.

    Args:
        config: the configuration of the run.
        num_earliest_frames_ignored: steps at the start of the buffer that are only context, such as the
            earlier frames of a frame stack.
    """
    if config.trains_on_whole_unrolls:
        return math.ceil(config.unroll_length or config.max_unroll_length) + 1 + num_earliest_frames_ignored
    return config.replay_buffer_length + num_earliest_frames_ignored


@configurable
class RLAlgorithm(Algorithm):
    """Base class of algorithms that output actions.

    Args:
        observation_spec: nest of specs of the (transformed) observation.
        action_spec: nest of ``BoundedTensorSpec``.
        train_state_spec: nest of specs of the state of ``train_step``.
        reward_spec: spec of rank 0, or of rank 1 for a reward of K dimensions.
        predict_state_spec: as in ``Algorithm``.
        rollout_state_spec: as in ``Algorithm``.
        is_on_policy: as in ``Algorithm``.
        reward_weights: K weights of a multi-dimensional reward; ``None`` for ones. Not used for a scalar reward.
        env: batched environment; only the root algorithm has it.
        config: configuration; only the root algorithm needs it.
        optimizer: default optimizer.
        checkpoint: as in ``Algorithm``.
        is_eval: whether parts that only training needs, such as critics, are missing: the algorithm can act and be
            evaluated, but :meth:`check_config` rejects training.
        overwrite_policy_output: store ``prev_action`` of the next time step as the action, for an environment that
            does not execute the given action, such as one that a person controls.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        TypeError: ``env`` is not an environment of alfx.
        ValueError: the reward spec has rank 2 or more, or ``reward_weights`` have the wrong size.
    """

    needs_own_rollouts = False  # trains on its latest rollouts only, even if the replay buffer stores them

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 train_state_spec: NestedTensorSpec, reward_spec: TensorSpec = TensorSpec(()),
                 predict_state_spec: NestedTensorSpec | None = None,
                 rollout_state_spec: NestedTensorSpec | None = None, is_on_policy: bool | None = None,
                 reward_weights: list[float] | None = None, env: Any = None, config: TrainerConfig | None = None,
                 optimizer: Any = None, checkpoint: str | None = None, is_eval: bool = False,
                 overwrite_policy_output: bool = False, debug_summaries: bool = False, name: str = 'RLAlgorithm'):
        super().__init__(train_state_spec=train_state_spec, rollout_state_spec=rollout_state_spec,
                         predict_state_spec=predict_state_spec, is_on_policy=is_on_policy, optimizer=optimizer,
                         checkpoint=checkpoint, config=config, debug_summaries=debug_summaries, name=name)
        if reward_spec.ndim > 1:
            raise ValueError(f'reward_spec has to be of rank 0 or 1, found {reward_spec}')
        if not hasattr(env, 'batch_size') and env is not None:
            raise TypeError(f'env: expected an environment of alfx, found {type(env).__name__}; convert an environment '
                            'of gymnasium with alfx.environments.suite_gym.wrap_env')
        self._observation_spec = observation_spec
        self._action_spec = action_spec
        self._reward_spec = reward_spec
        self._is_eval = is_eval
        self._overwrite_policy_output = overwrite_policy_output
        self._env = env
        self._rollout_info_spec: NestedTensorSpec = None
        self._offline_replay_buffer: ReplayBuffer | None = None
        self._offline_data: list[list[Any]] = []  # name, fingerprint and number of steps of each dataset
        self._reward_weights: torch.Tensor | None
        self.register_buffer('_reward_weights', torch.ones(reward_spec.numel) if reward_spec.ndim else None)
        if reward_weights is not None and self._reward_weights is None:
            log_unused(type(self).__name__, ['reward_weights'], 'the reward is a scalar')
        elif reward_weights is not None:
            self.set_reward_weights(torch.as_tensor(reward_weights, dtype=torch.float32))
        self._stored_unrolls: StoredUnrolls | None = None
        self._metrics = MetricSet(self._make_metrics() if env is not None else [])
        self.set_epsilon_greedy(None)
        self._traced_predict: tuple[Hashable, TracedFunction] | None = None  # key and graph of predict_step

    def set_epsilon_greedy(self, epsilon_greedy: float | None) -> None:
        """Set the probability of a random action in ``predict_step``, for algorithms that support it.

        Args:
            epsilon_greedy: in [0, 1]; ``None``: ``config.epsilon_greedy``, or 0 without a config.

        Raises:
            ConfError: the value is not a probability.
        """
        if epsilon_greedy is None:
            epsilon_greedy = getattr(self._config, 'epsilon_greedy', 0.0)
        self._epsilon_greedy = check_value(type(self).__name__, 'epsilon_greedy', epsilon_greedy, float, minimum=0,
                                           maximum=1)

    def check_config(self, config: TrainerConfig) -> None:
        """Reject training without critics or a value network."""
        super().check_config(config)
        if self._is_eval:
            raise ConfError([Problem('', f'{self._name} has no critics or value network: it can act and be evaluated, '
                                     'but not trained', 'set critic_network_cls, q_network_cls or value_network_ctor')])

    def _make_metrics(self) -> list[Any]:
        """Create the metrics; the first two are the step metrics."""
        env, config = self._env, self._config
        size = max(env.batch_size * context.num_ranks(), config.metric_min_buffer_size if config is not None else 10)
        example = zeros_from_spec(env.time_step_spec(), env.batch_size)
        return [EnvironmentSteps(), NumberOfEpisodes(), *episode_metrics(example, size, (
            AverageDiscountedReturnMetric, EpisodicStartAverageDiscountedReturnMetric, AverageRewardMetric))]

    # Properties ------------------------------------------------------------------------------------------------

    @property
    def observation_spec(self) -> NestedTensorSpec:
        """Spec of the observation."""
        return self._observation_spec

    @property
    def action_spec(self) -> NestedTensorSpec:
        """Spec of the action."""
        return self._action_spec

    @property
    def environment(self) -> Any:
        """Environments to train in; only the root algorithm has them."""
        return self._env

    @property
    def rollout_info_spec(self) -> NestedTensorSpec:
        """Spec of the info of ``rollout_step``; :meth:`finalize` determines it by a call on zeros."""
        return self._rollout_info_spec

    @property
    def overwrite_policy_output(self) -> bool:
        """Return whether the action that the environment reports is stored instead of the output of the policy."""
        return self._overwrite_policy_output

    def postprocess_unroll(self, inputs: TimeStep, rollout_info: NestedTensor) -> NestedTensor:
        """Add infos that are computed from a whole unroll, before it is stored for replay.

        Args:
            inputs: transformed time steps ``[T + 1, B, ...]``.
            rollout_info: infos of ``rollout_step`` ``[T + 1, B, ...]``.

        Returns:
            The infos to store.
        """
        return rollout_info

    def postprocess_steps(self, inputs: TimeStep, rollout_info: NestedTensor,
                          state: NestedTensor | None) -> tuple[NestedTensor, NestedTensor]:
        """Do the same as :meth:`postprocess_unroll` with a state; called instead of it if there is an
        ``unroll_state_spec``.

        Args:
            inputs: transformed time steps ``[T, B, ...]``. If ``unrolls_end_with_bootstrap``, the last row is the first
                row of the next unroll as well.
            rollout_info: infos of ``rollout_step`` ``[T, B, ...]``.
            state: result of the previous call ``[B, ...]``; ``None`` if there is none, so that all rows are new.

        Returns:
            The infos to store, and the next state.
        """
        raise NotImplementedError(f'{type(self).__name__}.postprocess_steps')

    def has_multidim_reward(self) -> bool:
        """Return whether the reward has more than one dimension."""
        return self._reward_spec.numel > 1

    @property
    def reward_weights(self) -> torch.Tensor | None:
        """float32 ``[K]``: weights of a multi-dimensional reward; ``None`` for a scalar one."""
        return self._reward_weights

    def set_reward_weights(self, reward_weights: torch.Tensor) -> None:
        """Set the reward weights ``[K]``.

        Raises:
            ValueError: the reward is a scalar or has another size than the weights.
        """
        if self._reward_weights is None or reward_weights.shape != self._reward_weights.shape:
            raise ValueError(f'reward_weights of shape {list(reward_weights.shape)} do not match the reward spec '
                             f'{self._reward_spec}')
        self._reward_weights.copy_(reward_weights)

    @property
    def prediction_graph_key(self) -> Hashable:
        """Key of the traced graph of ``predict_step``; see ``Capabilities.traceable_prediction``."""
        acting: Any = self.policy_algorithm
        return self._epsilon_greedy if acting is None else acting.prediction_graph_key

    def fast_predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Run :meth:`predict_step` from a traced graph if possible, with identical output but without info."""
        if not self.capabilities.traceable_prediction:
            return self.predict_step(inputs, state)
        graph_key = self.prediction_graph_key
        if self._traced_predict is None or self._traced_predict[0] != graph_key:
            self._traced_predict = graph_key, TracedFunction(self._predict_from, self)
        return AlgStep(self._traced_predict[1]((inputs.observation, inputs.action_mask)), state, ())

    def _predict_from(self, observation_and_mask: tuple[NestedTensor, NestedTensor]) -> NestedTensor:
        inputs = TimeStep(observation=observation_and_mask[0], action_mask=observation_and_mask[1])
        return self.predict_step(inputs, self.get_initial_predict_state(1)).output  # this state has no tensors

    def measures(self, info: NestedTensor) -> dict[str, torch.Tensor]:
        """Return quantities that evaluation reports besides the return.

        Args:
            info: info of ``predict_step``.

        Returns:
            Values ``[B]`` by name, averaged over the steps of each episode; NaN is ignored.
        """
        return {}

    # Set-up ----------------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Assign optimizers, probe the specs and create the replay buffer; called once, see the base class.

        Raises:
            ConfError: an unroll cannot be cut into sequences of ``mini_batch_length``, such sequences are too short for
                a part of the algorithm, or ``TrainerConfig.compile`` is on and the update cannot be compiled.
            OwnershipError: a trainable parameter has no optimizer.
        """
        if self.on_policy is None:
            self.set_on_policy(True)
        if self._env is not None and self._config is not None and not self.on_policy:
            check_sequences(self._config, self.capabilities)
        super().finalize()
        self._check_statistics()
        self._check_unroll_states()
        self._check_action_mask()
        self._prepare_auxiliary_phase()
        if self._config is not None and self._config.compile:
            check_compilable(self, self.learner.has_traceable_updates)
        step_spec = time_step_spec(self._observation_spec, self._action_spec, self._reward_spec)
        if self._env is not None:
            step_spec = step_spec._replace(env_info=self._env.env_info_spec())
        self._rollout_info_spec = probe.rollout_info_spec(self, step_spec)
        if self._env is not None and not self.on_policy:
            assert self._config is not None, 'a root algorithm has a config'
            if self._config.collects:
                stack_size = 1 if self.data_transformer is None else self.data_transformer.stack_size
                self.set_replay_buffer(self._env.batch_size, adjust_replay_buffer_length(self._config, stack_size - 1),
                                       self._config.priority_replay)
                self.build_replay_buffer(probe.experience_spec(self, self._env.time_step_spec()))
        if self._env is not None and self.has_offline:
            self.load_offline_replay_buffer(self._env.observation_spec())

    @property
    def has_offline(self) -> bool:
        """Return whether the configuration names stored datasets to train on."""
        return self._config is not None and bool(self._config.offline_datasets())

    def _check_statistics(self) -> None:
        if self._env is None or self.data_transformer is None:
            return
        if self.data_transformer.fits_offline_data and not self.has_offline:
            raise ConfError([problem_at('TrainerConfig', 'data_transformer_ctor', "needs stored data "
                                        "(DatasetRewardScaling, or ObservationNormalizer.update_mode = 'offline'), but "
                                        'TrainerConfig.offline_buffer_dir is not set', 'name a dataset there')])
        collects = self._config is None or self._config.collects or self._config.async_unroll
        pretrains = self._config is None or self.has_offline and self._config.rl_train_after_update_steps
        missing = {'replay': self.on_policy and f'on samples of a replay buffer, but {type(self).__name__} trains '
                   'on-policy', 'rollout': not collects and 'on collected experience, but the run only trains on '
                   'datasets', 'pretrain': not pretrains and 'on datasets before experience is collected, but '
                   'TrainerConfig.offline_buffer_dir or rl_train_after_update_steps is not set'}
        for part in self.data_transformer.modules():
            if reason := missing.get(getattr(part, 'update_mode', '')):
                remedy = (f"set {type(part).__name__}.update_mode = '{'rollout' if self.on_policy else 'replay'}'"
                          if 'update_mode' in vars(part) else 'leave it out')
                raise ConfError([problem_at('TrainerConfig', 'data_transformer_ctor', f'has {type(part).__name__}, '
                                            f'which has an effect only {reason}', remedy)])

    def _check_unroll_states(self) -> None:
        algorithms = (x for x in self.modules() if isinstance(x, Algorithm))
        part = next((x for x in algorithms if nest.flatten(x.unroll_state_spec)), None)
        if part is not None and not nest.flatten(self.unroll_state_spec):
            raise ConfError([problem_at('TrainerConfig', 'algorithm_ctor', f'creates {type(self).__name__}, which does '
                                        f'not carry the state of {type(part).__name__} from one unroll to the next',
                                        'use @Agent')])

    @property
    def offline_replay_buffer(self) -> ReplayBuffer | None:
        """Replay buffer of the datasets; ``None`` without datasets or without training."""
        return self._offline_replay_buffer

    supports_action_mask = False
    """Flag: the policy takes only actions that ``TimeStep.action_mask`` allows."""

    def _check_action_mask(self) -> None:
        acting: Any = self
        while acting.policy_algorithm is not None:
            acting = acting.policy_algorithm
        if getattr(self.data_transformer, 'has_action_mask', False) and not acting.supports_action_mask:
            raise ConfError([problem_at('TrainerConfig', 'data_transformer_ctor', 'has an ActionMask, but '
                                        f'{type(acting).__name__} would take actions that are not valid',
                                        'leave it out, or choose an algorithm for discrete actions')])

    @property
    def stored_unrolls(self) -> StoredUnrolls | None:
        """The unrolls that the auxiliary phase trains on; ``None`` without such a phase."""
        return self._stored_unrolls

    def _prepare_auxiliary_phase(self) -> None:
        settings, config = self.auxiliary_phase, self._config
        if settings is None or config is None:
            return
        part: Any = self
        while part.policy_algorithm is not None:
            if type(part).calc_auxiliary_loss is Algorithm.calc_auxiliary_loss:
                raise ConfError([problem_at('TrainerConfig', 'algorithm_ctor', f'creates {type(part).__name__}, where '
                                            f'{type(part.policy_algorithm).__name__} would have no auxiliary phase',
                                            'use @Agent or the algorithm itself')])
            part = part.policy_algorithm
        length = math.ceil(config.unroll_length or config.max_unroll_length)
        context_steps = 0 if self.data_transformer is None else self.data_transformer.stack_size - 1
        limit = int(config.replay_checkpoint_megabytes * 2**20 / context.num_ranks())
        self._stored_unrolls = StoredUnrolls(settings.interval * length, context_steps, limit)

    def load_offline_replay_buffer(self, untransformed_observation_spec: NestedTensorSpec) -> None:
        """Load the datasets of ``TrainerConfig.offline_buffer_dir`` into a replay buffer, each into its own ring.

        Args:
            untransformed_observation_spec: spec of the observation before any data transformer.

        Raises:
            ConfError: the algorithm cannot be trained on recorded actions, or a dataset is missing, damaged, or does
                not fit.
        """
        config = self._config
        assert config is not None, 'there are datasets'
        self._check_trains_offline()
        specs = untransformed_observation_spec, self._action_spec, self._reward_spec
        datasets = dataset_loading.load(config.offline_datasets(), config.offline_buffer_length, *specs,
                                config.mini_batch_length or 1, '' if self._env is None else self._env.name)
        self._offline_data = [[x.name, x.fingerprint, x.episodes.num_steps] for x in datasets]
        step_spec = time_step_spec(*specs)
        spec = Experience(step_spec, step_spec.prev_action,
                          info_of_action(self._rollout_info_spec, step_spec.prev_action))
        transformer = self.data_transformer
        self._offline_replay_buffer = make_buffer(
            datasets, spec, prioritized_sampling=config.priority_replay, name=f'{self._name}_offline_replay_buffer',
            keep_episodic_info=True if getattr(transformer, 'needs_episodic_info', False) else None)
        if transformer is not None and transformer.fits_offline_data:
            transformer.fit(partial(all_stored_experience, self._offline_replay_buffer))

    def get_extra_state(self) -> dict[str, Any]:
        """Return the state of ``Algorithm``, and the names and priorities of the datasets without their contents."""
        extra = super().get_extra_state()
        if self._offline_replay_buffer is None:
            return extra
        return {**extra, 'offline_data': self._offline_data,
                'offline_priorities': self._offline_replay_buffer.priorities_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`get_extra_state`.

        Raises:
            ConfError: the algorithm has been trained on other datasets than the loaded ones.
        """
        super().set_extra_state(state)
        before = state.get('offline_data')
        if before is None or self._offline_replay_buffer is None:
            return
        if [x[1:] for x in before] != [x[1:] for x in self._offline_data]:
            found, expected = ('; '.join(f'{name}: {steps} steps, SHA-256 {digest[:16]}...'
                                         for name, digest, steps in x) for x in (self._offline_data, before))
            raise ConfError([problem_at(
                'TrainerConfig', 'offline_buffer_dir', 'or offline_buffer_length names other data than the run has '
                f'been trained on so far:\n  found     {found}\n  expected  {expected}',
                'set the current path of the old data, or start a new run')])
        self._offline_replay_buffer.load_priorities_state(state.get('offline_priorities', {}))

    def _check_trains_offline(self) -> None:
        part = next((x for x in self.modules() if getattr(x, 'needs_own_rollouts', False)), self)
        if self.on_policy or part is not self:
            raise ConfError([problem_at('TrainerConfig', 'offline_buffer_dir', f'is set, but {type(part).__name__} is '
                                        'trained on-policy, on its own rollouts', 'choose an off-policy algorithm')])
        unknown = unknown_infos(self._rollout_info_spec)
        if unknown:
            raise ConfError([problem_at(
                'TrainerConfig', 'offline_buffer_dir', f'is set, but {self._name} learns from more than the actions of '
                f'the rollout: {", ".join(unknown)}, which datasets do not contain', 'choose another algorithm')])

    def recorded(self, function: Callable[[NestedTensor], NestedTensor], *modules: nn.Module
                 ) -> Callable[[NestedTensor], NestedTensor]:
        """Return the same function, which runs from a traced or compiled graph after some calls.

        Args:
            function: a method from a nest of tensors to a nest of tensors; it may draw random numbers.
            modules: owners of the parameters and buffers that it reads.
        """
        return TracedFunction(function, *modules, compiles=self._config is not None and self._config.compile)

    # Metrics and summaries -------------------------------------------------------------------------------------

    def get_step_metrics(self) -> list[Any]:
        """Return the metrics that summaries can be plotted against: environment steps and number of episodes."""
        return self._metrics.counters

    def get_metrics(self) -> list[Any]:
        """Return all metrics; the step metrics come first."""
        return self._metrics.catch_up()

    def observe_for_metrics(self, time_step: TimeStep) -> None:
        """Update all metrics with one time step ``[B, ...]``."""
        self._metrics.observe_step(time_step)

    def observe_unroll(self, env_steps: TimeStep) -> None:
        """Update all metrics with step types, rewards, discounts and infos ``[T, B, ...]`` of the environment.

        An :meth:`observe_for_metrics` that a subclass overrides is called for each step.
        """
        if type(self).observe_for_metrics is RLAlgorithm.observe_for_metrics:
            self._metrics.observe(env_steps)
            return
        for t in range(env_steps.step_type.shape[0]):
            self.observe_for_metrics(nest.map_structure(lambda x: x[t], env_steps))  # noqa: B023 - called immediately

    def summarize_metrics(self) -> None:
        """Log the averages of the latest episodes."""
        over_env_steps = self._config is not None and self._config.summarizes_over_env_steps
        for metric in self.get_metrics():
            metric.gen_summaries(step_metrics=() if over_env_steps else self._metrics.counters)

    def summarize_rollout(self, experience: Experience,
                          custom_summary: Callable[[Experience], None] | None = None) -> None:
        """Log summaries of an unroll; called only in iterations that write summaries.

        Args:
            experience: ``[T, B, ...]``.
            custom_summary: called with ``experience`` as well.
        """
        if self._debug_summaries:
            summary_utils.summarize_action(experience.action, self._action_spec, 'rollout_action')
            summary_utils.add_mean_hist_summary('rollout_reward/extrinsic', experience.time_step.reward)
        config = self._config
        if config is not None and config.summarize_action_distributions:
            for distribution in nest.find_field(experience.rollout_info, 'action_distribution'):
                summary_utils.summarize_distribution('rollout_action_dist', distribution)
        if custom_summary is not None:
            custom_summary(experience)

    def summarize_train(self, experience: Experience, train_info: NestedTensor, loss_info: LossInfo,
                        params: list[tuple[str, nn.Parameter]]) -> None:
        """Log losses, gradients and, if the conf asks for them, actions and action distributions of the minibatch."""
        super().summarize_train(experience, train_info, loss_info, params)
        if self._debug_summaries and nest.flatten(experience.action):
            summary_utils.summarize_action(experience.action, self._action_spec, 'training_action')
        config = self._config
        if config is not None and config.summarize_action_distributions:
            for distribution in nest.find_field(train_info, 'action_distribution'):
                summary_utils.summarize_distribution('action_dist', distribution)
