"""Training of the model that MuZero plans with, also usable as a representation for other policies.

A model (:mod:`alfx.algorithms.mcts_models`) is unrolled over the R actions that followed a stored step. Its predictions
for each of these steps are compared with targets (Schrittwieser et al. 2020, arXiv:1911.08265, appendix G): the reward,
the value, the policy found by a search, the end of the game, and the latent state of the observation. With reanalysis
(Schrittwieser et al. 2021, arXiv:2104.06294) values and policies come from a search with the latest model, not from the
search that acted.

:class:`MuzeroRepresentationImpl` is this learner; ``MuzeroAlgorithm`` searches with its model.
:class:`MuzeroRepresentationLearner` trains such a learner in an ``Agent``, from a separate replay buffer, for any other
policy.

Differences from the papers:

- Values and rewards are always those of player 0.
- An episode that is still running or was truncated by a time limit does not count as ended: the value of its last step
  replaces the unknown future. If no search stores values (``td_steps = -1``), it counts as 0.
- The return to the end of the episode sums all rewards, not only the last one.

Read next: :mod:`alfx.algorithms.muzero.model_targets`, :mod:`alfx.algorithms.muzero.reanalysis`.
"""
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alfx import context, nest, summary
from alfx.algorithms.base.ownership import assign_optimizers
from alfx.algorithms.data_transformer import DataTransformer, UntransformedTimeStep
from alfx.algorithms.mcts_models import MCTSModel
from alfx.algorithms.muzero.representation import LinearTdStepFunc, MuzeroInfo, MuzeroRepresentationImpl
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, Experience, LossInfo, TimeStep
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Count, configurable, problem_at
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec, extract_spec
from alfx.utils.saved_count import SavedCount

__all__ = ['LinearTdStepFunc', 'MuzeroInfo', 'MuzeroRepresentationImpl', 'MuzeroRepresentationLearner',
           'MuzeroRepresentationTrainingOptions']


@configurable
@dataclasses.dataclass(frozen=True)
class MuzeroRepresentationTrainingOptions:
    """Training options of a :class:`MuzeroRepresentationLearner`; most correspond to fields of ``TrainerConfig``.

    Attributes:
        interval: number of iterations between two trainings.
        mini_batch_length: T, number of steps in a training sequence.
        mini_batch_size: B, number of sequences in a minibatch.
        num_updates_per_train_iter: updates per training.
        replay_buffer_length: steps kept per environment.
        initial_collect_steps: steps of all environments together before the first update.
        priority_replay: sample by priority.
        priority_replay_alpha: exponent of the priorities.
        priority_replay_beta: exponent of the importance weights.
    """

    interval: Count = 1
    mini_batch_length: int = 1
    mini_batch_size: int = 256
    num_updates_per_train_iter: int = 10
    replay_buffer_length: int = 100000
    initial_collect_steps: int = 2000
    priority_replay: bool = True
    priority_replay_alpha: float = 1.2
    priority_replay_beta: float = 0.0


@configurable
class MuzeroRepresentationLearner(OffPolicyAlgorithm):
    """Representation learner that trains a :class:`MuzeroRepresentationImpl` for any policy algorithm of an ``Agent``.

    The policy receives the latent states. The learner stores untransformed time steps of the environment in a separate
    replay buffer, and trains after each iteration. The loss of the policy does not reach the representation. If there
    are data transformers, ``@UntransformedTimeStep`` has to be the first one.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: bounded spec of one action.
        config: configuration of the run.
        training_options: training options; ``None``: no training, for a model loaded from ``checkpoint``.
        reward_spec: rank 0 or 1.
        impl_cls: creates the learner, called as ``(observation_spec=, action_spec=, reward_spec=, config=,
            debug_summaries=)``; it needs an optimizer to be trained.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        OwnershipError: ``training_options`` is set, but the learner has no optimizer.
        ValueError: an option is out of range.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: BoundedTensorSpec, config: TrainerConfig,
                 training_options: MuzeroRepresentationTrainingOptions | None = None,
                 reward_spec: TensorSpec = TensorSpec(()),
                 impl_cls: Callable[..., MuzeroRepresentationImpl] = MuzeroRepresentationImpl,
                 debug_summaries: bool = False, name: str = 'MuZeroRepresentationLearner'):
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, train_state_spec=(),
                         reward_spec=reward_spec, config=config, debug_summaries=debug_summaries, name=name)
        self._options = training_options
        own_config = config
        if training_options is not None:
            settings = dataclasses.asdict(training_options)
            settings.pop('interval')
            own_config = dataclasses.replace(config, whole_replay_buffer_training=False, clear_replay_buffer=False,
                                             use_rollout_state=False, unroll_with_grad=False, **settings)
            own_config.data_transformer = config.data_transformer
        self._impl = impl_cls(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                              config=own_config, debug_summaries=debug_summaries)
        if training_options is not None:
            assign_optimizers(self._impl)
        self._iterations = SavedCount(self, '_num_iterations')

    # Properties and configuration ------------------------------------------------------------------------------

    @property
    def on_policy(self) -> bool | None:
        """On-policy flag of the policy that uses the representation."""
        return self._is_on_policy

    @property
    def output_spec(self) -> NestedTensorSpec:
        """Spec of the representation."""
        return self._impl.output_spec

    @property
    def model(self) -> MCTSModel:
        """Learned model."""
        return self._impl.model

    def set_reward_weights(self, reward_weights: Tensor) -> None:
        """Use the weights ``[K]`` from the next step on, also in the learner of the representation."""
        super().set_reward_weights(reward_weights)
        self._impl.set_reward_weights(reward_weights)

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities: it takes no part in updates of the policy and trains after each iteration."""
        return Capabilities(traceable_update=True, trains_sequences_at_once=True, recomputes_rollout_info=True,
                            trains_after_iteration=self._options is not None)

    def _capabilities_of_parts(self) -> dict[Any, Capabilities]:
        return {}

    def _trainable_attributes_to_ignore(self) -> list[str]:
        return ['_impl']

    def check_config(self, config: TrainerConfig) -> None:
        """Reject a run that collects nothing or does not keep the untransformed time steps.

        Raises:
            ConfError: a data transformer changes time steps, and ``@UntransformedTimeStep`` is missing; or the run
                trains on datasets only.
        """
        if self._options:
            config.require_collection(self._name)
        transformers = [] if config.data_transformer is None else list(config.data_transformer.modules())
        changes = [type(t).__name__ for t in transformers if isinstance(t, DataTransformer) and t.changes_time_steps]
        if self._options and changes and not any(isinstance(t, UntransformedTimeStep) for t in transformers):
            raise ConfError([problem_at(
                'TrainerConfig', 'data_transformer_ctor', f'changes time steps with {", ".join(changes)}, but '
                f'{self._name} stores untransformed ones', 'make @UntransformedTimeStep the first transformer of the '
                'list')])

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]``."""
        return self._impl.predict_step(time_step, state)

    def rollout_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]`` without gradient."""
        with torch.no_grad():
            return self._impl.rollout_step(time_step, state)

    def train_step(self, exp: TimeStep, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]`` without gradient."""
        return self.rollout_step(exp, state)

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Return an empty loss; the learner trains separately from the policy."""
        return LossInfo()

    def after_train_iter(self, experience: TimeStep | None, info: NestedTensor) -> None:
        """Store the unroll, and train.

        Args:
            experience: transformed time steps ``[T, B, ...]`` of the unroll; ``None`` if there was none.
            info: info of the rollout; unused.
        """
        if self._options is None:
            return
        if experience is not None:
            self._store(experience)
        if self._impl.replay_buffer is None or self._iterations.add() % self._options.interval:
            return
        ranks = context.get_ranks()
        if ranks is not None and self._impl.updater.averager is None:
            self._impl.activate_ddp(ranks.rank)
        with summary.scope(self._name):  # the losses of the policy have the same names
            self._impl.train_from_replay_buffer()

    def _store(self, time_steps: TimeStep) -> None:
        """Store time steps ``[T, B, ...]`` in their untransformed version."""
        if isinstance(time_steps.untransformed, TimeStep):
            time_steps = time_steps.untransformed
        if self.unrolls_end_with_bootstrap:  # the next unroll starts with the same step
            time_steps = nest.map_structure(lambda x: x[:-1], time_steps)
        experience = Experience(time_step=time_steps._replace(env_info=(), untransformed=()))
        if self._impl.replay_buffer is None:
            self._make_replay_buffer(experience)
        self._impl.observe_sequence_for_replay(experience)

    def _make_replay_buffer(self, experience: Experience) -> None:
        options = self._options
        assert options is not None, 'it trains'
        self._impl.set_replay_buffer(experience.time_step.step_type.shape[1], options.replay_buffer_length,
                                     options.priority_replay)
        self._impl.build_replay_buffer(extract_spec(experience, from_dim=2))
