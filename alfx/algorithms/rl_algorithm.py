"""The root of an iteration: collect experience, then train on it.

``train_iter`` below is hop 3 of an iteration; it calls :func:`alfx.engine.unroll.unroll`, then
``train_from_unroll`` or ``train_from_replay_buffer``.
"""
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from alfx import context, nest, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.config import TrainerConfig
from alfx.data_structures import AlgStep, Experience, LossInfo, StepType, TimeStep, time_step_spec
from alfx.engine import probe
from alfx.engine.compiled_update import check_compilable
from alfx.engine.remote.unroll import RemoteUnroll, Steps, UnrollSource
from alfx.engine.replay import check_sequences, compute_train_info
from alfx.engine.unroll import Cursor, start, unroll
from alfx.engine.update_summaries import without_train_info
from alfx.gin_utils import check_value, configurable
from alfx.metrics.metric_set import MetricSet
from alfx.metrics.metrics import (AverageDiscountedReturnMetric, AverageEnvInfoMetric, AverageEpisodeLengthMetric,
                                  AverageReturnMetric, AverageRewardMetric, EnvironmentSteps,
                                  EpisodicStartAverageDiscountedReturnMetric, NumberOfEpisodes)
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec, zeros_from_spec


def adjust_replay_buffer_length(config: TrainerConfig, num_earliest_frames_ignored: int = 0) -> int:
    """The number of steps that the replay buffer has to keep of each environment.

    Training that uses up the whole buffer each iteration needs room for exactly one unroll, plus one step to
    bootstrap from, plus the frames that precede it.

    Args:
        config: the configuration of the run.
        num_earliest_frames_ignored: steps at the start of the buffer that are only there as context, such as
            the earlier frames of a frame stack.
    """
    if config.trains_on_whole_unrolls:
        return int(-(-(config.unroll_length or config.max_unroll_length) // 1)) + 1 + num_earliest_frames_ignored
    return config.replay_buffer_length + num_earliest_frames_ignored


@dataclass
class _Standing:
    """What changes in every iteration; to set an attribute of a module would take microseconds.

    Attributes:
        num_trained: samples, in the latest iteration.
        unroll_debt: the fraction of a step by which unrolls have been too short so far.
        unrolled_inputs: the transformed time steps of the latest unroll, until the iteration is over.
    """

    num_trained: int = 0
    unroll_debt: float = 0.0
    unrolled_inputs: TimeStep | None = None


@configurable
class RLAlgorithm(Algorithm):
    """Base of algorithms that output actions.

    Args:
        observation_spec: nest of specs of the (transformed) observation.
        action_spec: nest of ``BoundedTensorSpec``.
        train_state_spec: nest of specs of the state of ``train_step``.
        reward_spec: spec of rank 0, or of rank 1 for K rewards.
        predict_state_spec: as in ``Algorithm``.
        rollout_state_spec: as in ``Algorithm``.
        is_on_policy: as in ``Algorithm``.
        reward_weights: K weights of a multi-dimensional reward; ``None``: all are 1.
        env: batched environment; only the root algorithm has it.
        config: configuration; only the root algorithm needs it.
        optimizer: default optimizer.
        checkpoint: as in ``Algorithm``.
        is_eval: the algorithm is only played or evaluated, so that critics need not be built.
        overwrite_policy_output: record ``prev_action`` of the next time step as the action, for an environment
            which does not do what it is told (someone else acts).
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ValueError: the reward spec has rank 2 or more, or ``reward_weights`` do not fit it.
    """

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
        self._observation_spec = observation_spec
        self._action_spec = action_spec
        self._reward_spec = reward_spec
        self._is_eval = is_eval
        self._overwrite_policy_output = overwrite_policy_output
        self._env = env
        self._rollout_info_spec: NestedTensorSpec = None
        self._cursor: Cursor | None = None
        self._remote_unroll: RemoteUnroll | None = None
        self._standing = _Standing()
        self._collects_for_recomputation = False
        self._reward_weights: torch.Tensor | None
        self.register_buffer('_reward_weights', torch.ones(reward_spec.numel) if reward_spec.ndim else None)
        if reward_weights is not None:
            self.set_reward_weights(torch.as_tensor(reward_weights, dtype=torch.float32))
        self._metrics = MetricSet(self._make_metrics() if env is not None else [])
        self.set_epsilon_greedy(None)

    def set_epsilon_greedy(self, epsilon_greedy: float | None) -> None:
        """From now on let ``predict_step`` explore with this probability, where it can.

        Args:
            epsilon_greedy: in [0, 1]; ``None``: ``config.epsilon_greedy``, or 0 without a config.

        Raises:
            ConfError: it is no probability.
        """
        if epsilon_greedy is None:
            epsilon_greedy = getattr(self._config, 'epsilon_greedy', 0.0)
        self._epsilon_greedy = check_value(type(self).__name__, 'epsilon_greedy', epsilon_greedy, float, minimum=0,
                                           maximum=1)

    def _make_metrics(self) -> list[Any]:
        """What is measured of every episode; the first two are the step metrics."""
        env, config = self._env, self._config
        size = max(env.batch_size * context.num_ranks(), config.metric_min_buffer_size if config is not None else 10)
        example = zeros_from_spec(env.time_step_spec(), env.batch_size)
        metrics: list[Any] = [EnvironmentSteps(), NumberOfEpisodes()]
        metrics += [ctor(example_time_step=example, buffer_size=size) for ctor in (
            AverageReturnMetric, AverageEpisodeLengthMetric, AverageDiscountedReturnMetric,
            EpisodicStartAverageDiscountedReturnMetric, AverageRewardMetric)]
        if nest.flatten(example.env_info):
            metrics.append(AverageEnvInfoMetric(example_time_step=example, buffer_size=size))
        return metrics

    # What it is ------------------------------------------------------------------------------------------------

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
        """The environments that it trains in; only the root algorithm has them."""
        return self._env

    @property
    def rollout_info_spec(self) -> NestedTensorSpec:
        """Spec of the info of ``rollout_step``, from a probe at construction."""
        return self._rollout_info_spec

    @property
    def overwrite_policy_output(self) -> bool:
        """Whether the action recorded is the one that the environment reports."""
        return self._overwrite_policy_output

    @property
    def collects_for_recomputation(self) -> bool:
        """Whether experience is collected with ``collect_step``; decided once, by ``finalize``."""
        return self._collects_for_recomputation

    @property
    def _trains_on_whole_unrolls(self) -> bool:
        return self._config is not None and self._config.trains_on_whole_unrolls

    @property
    def unrolls_end_with_bootstrap(self) -> bool:
        """Whether an unroll ends with a step to bootstrap from, which is the first one of the next unroll as well."""
        with_grad = self._config is not None and self._config.unroll_with_grad
        return bool(self.on_policy) or with_grad or self._trains_on_whole_unrolls

    @property
    def completes_unrolls(self) -> bool:
        """Whether :meth:`complete_unroll` has something to add."""
        return False

    @property
    def keeps_unroll_inputs(self) -> bool:
        """Whether the transformed time steps of an unroll are needed besides its experience."""
        return self.trains_after_iteration or self.completes_unrolls

    def complete_unroll(self, inputs: TimeStep, rollout_info: NestedTensor) -> NestedTensor:
        """Add to the infos of an unroll what is made of all of its steps at once, before they are stored for replay.

        Args:
            inputs: transformed time steps ``[T + 1, B, ...]``.
            rollout_info: infos of ``rollout_step`` ``[T + 1, B, ...]``.

        Returns:
            The infos to be stored.
        """
        return rollout_info

    @property
    def acting_step(self) -> Callable[[TimeStep, NestedTensor], AlgStep]:
        """The step that experience is collected with: ``collect_step`` if the rest is recomputed, ``rollout_step``."""
        return self.collect_step if self._collects_for_recomputation else self.rollout_step

    def has_multidim_reward(self) -> bool:
        """Whether the reward has more than one dimension."""
        return self._reward_spec.numel > 1

    @property
    def reward_weights(self) -> torch.Tensor | None:
        """float32 ``[K]``: weights of a multi-dimensional reward; ``None`` for a scalar one."""
        return self._reward_weights

    def set_reward_weights(self, reward_weights: torch.Tensor) -> None:
        """Use these weights ``[K]`` from the next step on.

        Raises:
            ValueError: the reward is a scalar or of another size.
        """
        if self._reward_weights is None or reward_weights.shape != self._reward_weights.shape:
            raise ValueError(f'reward_weights of shape {list(reward_weights.shape)} do not fit the reward spec '
                             f'{self._reward_spec}')
        self._reward_weights.copy_(reward_weights)

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """One step of evaluation: ``output`` is the action ``[B, ...]``."""
        raise NotImplementedError(f'{type(self).__name__}.predict_step')

    def measures(self, info: NestedTensor) -> dict[str, torch.Tensor]:
        """What evaluation measures besides the return.

        Args:
            info: of ``predict_step``.

        Returns:
            Numbers ``[B]`` by name, averaged over the steps of each episode; NaN where there is nothing to measure.
        """
        return {}

    # Set-up ----------------------------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Assign optimizers, probe the specs, build the replay buffer. Called once, on the root algorithm.

        Raises:
            ConfError: an unroll cannot be cut into sequences of ``mini_batch_length``, such sequences are too short for
                a part of the algorithm, or ``TrainerConfig.compile`` is on and the update cannot be compiled.
            OwnershipError: a trainable parameter has no optimizer.
        """
        if self.on_policy is None:
            self.set_on_policy(True)
        if self._env is not None and not self.on_policy:
            check_sequences(self._config, self.needs_previous_step)
        super().finalize()
        if self._config is not None and self._config.compile:
            check_compilable(self)
        self._collects_for_recomputation = self.recomputes_rollout_info
        step_spec = time_step_spec(self._observation_spec, self._action_spec, self._reward_spec)
        if self._env is not None:
            step_spec = step_spec._replace(env_info=self._env.env_info_spec())
        self._rollout_info_spec = probe.rollout_info_spec(self, step_spec)
        if self._env is not None and not self.on_policy:
            assert self._config is not None, 'a root algorithm has a config'
            stack_size = 1 if self.data_transformer is None else self.data_transformer.stack_size
            self.set_replay_buffer(self._env.batch_size, adjust_replay_buffer_length(self._config, stack_size - 1),
                                   self._config.priority_replay)
            self.build_replay_buffer(probe.experience_spec(self, self._env.time_step_spec()))

    def load_offline_replay_buffer(self, untransformed_observation_spec: NestedTensorSpec) -> None:
        """Offline replay buffers are not available in this version.

        Raises:
            NotImplementedError: always; ``TrainerConfig.offline_buffer_dir`` is refused for the same reason.
        """
        raise NotImplementedError('offline replay buffers are not available in this version')

    # The iteration ---------------------------------------------------------------------------------------------

    def train_iter(self) -> int:
        """One iteration: unroll, train, ``after_train_iter``.

        Returns:
            The number of samples trained on, repeated ones counted each time.
        """
        started, standing = time.perf_counter(), self._standing
        experience = self._unroll_if_due()
        unrolled = time.perf_counter()
        root_inputs, rollout_info = standing.unrolled_inputs, None
        if not self.on_policy:
            steps = self.train_from_replay_buffer(update_global_counter=True)
            rollout_info = None if experience is None else experience.rollout_info
        elif experience is None:
            steps = 0
        else:
            if self._config is not None and self._config.update_counter_every_mini_batch:
                context.increment_global_counter()  # there is one update an iteration
            rollout_info = self._on_policy_train_info(experience)
            steps = self.train_from_unroll(experience, rollout_info)
        if self.trains_after_iteration:
            self.after_train_iter(root_inputs, rollout_info)
        standing.unrolled_inputs = None
        if context.should_record_summaries():
            summary.scalar('time/unroll', unrolled - started)
            summary.scalar('time/train', time.perf_counter() - unrolled)
        standing.num_trained = steps
        return steps

    def _on_policy_train_info(self, experience: Experience) -> NestedTensor:
        """The infos that the loss gets: as collected, or recomputed with gradients for all steps at once."""
        if not self._collects_for_recomputation:
            return experience.rollout_info
        return compute_train_info(self, experience)

    def _unroll_if_due(self) -> Experience | None:
        """The unroll of this iteration, or ``None`` if ``unroll_length`` leaves it out or the steps are used up."""
        config, standing = self._config, self._standing
        assert config is not None and self._env is not None, 'a root algorithm has a config and an environment'
        if config.num_env_steps and self._env_steps() >= config.num_env_steps:
            return None
        if self._remote_unroll is not None:
            self._remote_unroll.start_iteration(self, context.should_record_summaries(), context.get_global_counter())
            if not config.unroll_length:  # what there is; an iteration that could not train either waits for a step
                return self._unroll_up_to(config.max_unroll_length, at_least=0 if standing.num_trained else 1)
        debt = standing.unroll_debt + config.unroll_length
        length = int(debt)
        experience = self.unroll(length) if length else None
        standing.unroll_debt = debt - length
        return experience

    def _env_steps(self) -> int:
        """How many steps the environments of the run have taken; of all processes, as of the last iteration."""
        if context.get_ranks() is None:
            return self.get_step_metrics()[0].count
        return int(context.get_progress('env_steps'))

    def set_unroll_source(self, source: UnrollSource, update_period: int) -> None:
        """From now on other processes act: take their steps in place of stepping the environment.

        Args:
            source: brings them; whoever sets it closes it.
            update_period: hand it the weights every so many iterations, the first one included.
        """
        self._remote_unroll = RemoteUnroll(source, update_period)

    def unroll(self, unroll_length: int) -> Experience:
        """Collect ``unroll_length`` steps of each environment, store them for replay, update the metrics.

        On-policy, with ``unroll_with_grad``, and where each unroll is trained on as a whole and then dropped, one more
        step follows that the environment does not see; values are bootstrapped from it.

        Returns:
            Experience ``[T, B, ...]`` or, with that step, ``[T + 1, B, ...]``; on-policy with transformed time steps,
            otherwise as the environment gave them.
        """
        experience = self._unroll_up_to(unroll_length, at_least=unroll_length)
        assert experience is not None, 'so many steps have been waited for'
        return experience

    def _unroll_up_to(self, length: int, at_least: int) -> Experience | None:
        """:meth:`unroll` of ``at_least`` to ``length`` steps; ``None`` if there are none."""
        on_policy = bool(self.on_policy)
        bootstrap, stores_bootstrap = self.unrolls_end_with_bootstrap, self._trains_on_whole_unrolls
        if self._remote_unroll is not None:
            steps = self._remote_unroll.unroll(self, length, at_least, bootstrap)
        else:
            steps = self._unroll_here(length, bootstrap)
        if steps is None:
            return None
        experience, env_steps, inputs = steps
        self._standing.unrolled_inputs = inputs
        self._metrics.observe(env_steps)
        if self.completes_unrolls:
            assert inputs is not None, 'it has been kept'
            with context.rollout_context(), torch.no_grad():
                rollout_info = self.complete_unroll(inputs, experience.rollout_info)
            experience = experience._replace(rollout_info=rollout_info)
        if not on_policy:
            self.observe_sequence_for_replay(experience if stores_bootstrap or not bootstrap else
                                             nest.map_structure(lambda x: x[:-1], experience))
        if context.should_record_summaries():
            self.summarize_rollout(experience)
        return experience

    def _unroll_here(self, length: int, bootstrap: bool) -> Steps:
        """Step the environment of this process."""
        config, env = self._config, self._env
        assert config is not None, 'a root algorithm has a config'
        if self._cursor is None:
            self._cursor = start(self, env)
        on_policy = bool(self.on_policy)
        with_grad = config.unroll_with_grad or (on_policy and not self._collects_for_recomputation)
        return Steps(*unroll(self, env, self._cursor, length, with_grad=with_grad, bootstrap=bootstrap,
                             transformed=on_policy, keep_inputs=self.keeps_unroll_inputs))

    # Metrics and summaries -------------------------------------------------------------------------------------

    def get_step_metrics(self) -> list[Any]:
        """The metrics that summaries may be plotted against: environment steps, number of episodes."""
        return self._metrics.counters

    def get_metrics(self) -> list[Any]:
        """All metrics; the step metrics come first."""
        return self._metrics.catch_up()

    def observe_for_metrics(self, time_step: TimeStep) -> None:
        """Show one time step ``[B, ...]`` to all metrics."""
        self._metrics.observe_step(time_step)

    def summarize_metrics(self) -> None:
        """Write the averages of the latest episodes."""
        for metric in self.get_metrics():
            metric.gen_summaries(step_metrics=self._metrics.counters)

    def summarize_rollout(self, experience: Experience,
                          custom_summary: Callable[[Experience], None] | None = None) -> None:
        """Write summaries of an unroll; called only in iterations that write them.

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

    @without_train_info
    def summarize_train(self, experience: Experience, train_info: NestedTensor, loss_info: LossInfo,
                        params: list[tuple[str, nn.Parameter]]) -> None:
        """Write losses, gradients and, if asked, actions and action distributions of what was trained on."""
        super().summarize_train(experience, train_info, loss_info, params)
        if self._debug_summaries and nest.flatten(experience.action):
            summary_utils.summarize_action(experience.action, self._action_spec, 'training_action')
        config = self._config
        if config is not None and config.summarize_action_distributions:
            for distribution in nest.find_field(train_info, 'action_distribution'):
                summary_utils.summarize_distribution('action_dist', distribution)

    # Resume ----------------------------------------------------------------------------------------------------

    def get_rollout_state(self) -> dict[str, Any]:
        """Where the rollout stands, as tensors and numbers; the environment's own state is kept apart."""
        state: dict[str, Any] = {'unroll_debt': self._standing.unroll_debt}
        if self._cursor is not None:
            cursor = self._cursor
            state['cursor'] = nest.flatten((cursor.time_step, cursor.inputs, cursor.state, cursor.transform_state))
        if self._context_steps:
            assert self._replay_buffer is not None
            context_steps, _ = self._replay_buffer.gather_all()
            state['context'] = [x.clone() for x in nest.flatten(context_steps)]  # no views of a shared storage
        return state

    def start_new_episodes(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`get_rollout_state` with environments that could not be put back where they were.

        The newest steps in the replay buffer become the LAST ones of episodes that were cut off there.
        """
        self._standing.unroll_debt = state['unroll_debt']
        buffer = self._replay_buffer
        if buffer is None:
            return
        env_ids = (buffer.current_size > 0).nonzero().flatten()
        if env_ids.numel():
            last = torch.full((env_ids.numel(), ), StepType.LAST, dtype=torch.int32)
            buffer.set_field('time_step.step_type', env_ids, buffer.current_pos[env_ids] - 1, last)

    def set_rollout_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`get_rollout_state`; the environment has been put back where it was."""
        self._standing.unroll_debt = state['unroll_debt']
        if 'cursor' in state:
            with probe.unchanged(self):  # the statistics of a data transformer among others
                like = start(self, self._env)
            parts = (like.time_step, like.inputs, like.state, like.transform_state)
            places = [x.device for x in nest.flatten(parts)]  # a checkpoint is loaded into host memory
            time_step, inputs, own_state, transform_state = nest.pack_sequence_as(
                parts, [x.to(y) for x, y in zip(state['cursor'], places)])
            self._cursor = replace(like, time_step=time_step, inputs=inputs, state=own_state,
                                   transform_state=transform_state)
        if 'context' in state:
            assert self._replay_buffer is not None
            context_steps = [x.transpose(0, 1) for x in state['context']]
            self._context_steps = context_steps[0].shape[0]
            if not self._replay_buffer.total_size:  # the checkpoint did not hold its contents
                self._replay_buffer.add_sequence(nest.pack_sequence_as(self._experience_spec, context_steps))
