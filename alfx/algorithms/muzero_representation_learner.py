"""Learning the model that MuZero plans with, and what else it is good for: a representation.

A model (:mod:`alfx.algorithms.mcts_models`) is unrolled over the R actions that followed a stored step, and what it
predicts of each of these steps is compared with what is known of them by now (Schrittwieser et al. 2020,
arXiv:1911.08265, appendix G): the reward, the value, the policy that a search found, whether the game was over, and the
latent state of the observation. With reanalysis (Schrittwieser et al. 2021, arXiv:2104.06294) values and policies come
from a search with the latest model, not from the one that acted.

:class:`MuzeroRepresentationImpl` is that learner; ``MuzeroAlgorithm`` searches with its model.
:class:`MuzeroRepresentationLearner` trains one in an ``Agent``, from a replay buffer of its own, for any other policy.

Differs from the papers in that

- values and rewards are always those of player 0;
- an episode that goes on or was cut off by a time limit is no end: the value of its last step stands for what follows;
- the return to the end of the episode counts all rewards, not only the last one.

Read next: :mod:`alfx.algorithms.muzero.model_targets`, :mod:`alfx.algorithms.muzero.reanalysis`.
"""
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from alfx import context, nest, summary
from alfx.algorithms.base.ownership import assign_optimizers
from alfx.config import TrainerConfig
from alfx.algorithms.data_transformer import DataTransformer, UntransformedTimeStep
from alfx.algorithms.mcts_models import MCTSModel
from alfx.algorithms.muzero.representation import LinearTdStepFunc, MuzeroInfo, MuzeroRepresentationImpl
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.data_structures import AlgStep, BatchInfo, Experience, LossInfo, TimeStep
from alfx.gin_utils import ConfError, configurable
from alfx.gin_utils.value_checks import problem_at
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec, extract_spec
from alfx.engine.capabilities import Capabilities
from alfx.utils.saved_count import SavedCount

__all__ = ['LinearTdStepFunc', 'MuzeroInfo', 'MuzeroRepresentationImpl', 'MuzeroRepresentationLearner',
           'MuzeroRepresentationTrainingOptions']


@configurable
@dataclasses.dataclass(frozen=True)
class MuzeroRepresentationTrainingOptions:
    """How a :class:`MuzeroRepresentationLearner` trains; the same as the fields of ``TrainerConfig`` of these names.

    Attributes:
        interval: train every so many iterations.
        mini_batch_length: T.
        mini_batch_size: B.
        num_updates_per_train_iter: updates each time.
        replay_buffer_length: steps kept of each environment.
        initial_collect_steps: steps of all environments together before the first update.
        priority_replay: sample by priority.
        priority_replay_alpha: exponent of the priorities.
        priority_replay_beta: exponent of the importance weights.
    """

    interval: int = 1
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
    """Trains a :class:`MuzeroRepresentationImpl` for any policy algorithm of an ``Agent``.

    What the policy sees are the latent states.

    What the environment gave is stored in a replay buffer of its own, and trained on after each iteration. The loss of
    the policy does not reach the representation. Where there are data transformers, ``@UntransformedTimeStep`` has to
    be the first one.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: bounded spec of one action.
        config: the configuration of the run.
        training_options: how to train; ``None``: not at all, for a model that its ``checkpoint`` brings.
        reward_spec: of rank 0 or 1.
        impl_cls: makes the learner, called as ``(observation_spec=, action_spec=, reward_spec=, config=,
            debug_summaries=)``; to be trained it needs an optimizer.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        OwnershipError: it is to be trained and has no optimizer.
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
            if training_options.interval < 1:
                raise ValueError(f'{name}.training_options: expected interval >= 1, found {training_options.interval}')
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

    # What it is ------------------------------------------------------------------------------------------------

    @property
    def on_policy(self) -> bool | None:
        """As the policy is trained."""
        return self._is_on_policy

    @property
    def output_spec(self) -> NestedTensorSpec:
        """Spec of the representation."""
        return self._impl.output_spec

    @property
    def model(self) -> MCTSModel:
        """The model that is learned."""
        return self._impl.model

    def own_capabilities(self) -> Capabilities:
        """It has no part in an update of the policy; afterwards it makes its own."""
        return Capabilities(traceable_update=True, trains_sequences_at_once=True, recomputes_rollout_info=True,
                      trains_after_iteration=self._options is not None)

    def _capabilities_of_parts(self) -> dict[Any, Capabilities]:
        return {}

    def _trainable_attributes_to_ignore(self) -> list[str]:
        return ['_impl']

    def check_config(self, config: TrainerConfig) -> None:
        """Refuse a run in which the steps of the environment do not get here.

        Raises:
            ConfError: a data transformer changes them, and none keeps them as they were.
        """
        transformers = [] if config.data_transformer is None else list(config.data_transformer.modules())
        changes = [type(t).__name__ for t in transformers if isinstance(t, DataTransformer) and t.changes_time_steps]
        if self._options and changes and not any(isinstance(t, UntransformedTimeStep) for t in transformers):
            raise ConfError([problem_at(
                'TrainerConfig', 'data_transformer_ctor', f'changes time steps by {", ".join(changes)}, but '
                f'{self._name} stores those of the environment', 'let @UntransformedTimeStep be the first one of the '
                'list')])

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """The representation ``[B, ...]``."""
        return self._impl.predict_step(time_step, state)

    def rollout_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """The representation ``[B, ...]``, which no gradient reaches."""
        with torch.no_grad():
            return self._impl.rollout_step(time_step, state)

    def train_step(self, exp: TimeStep, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """The representation ``[B, ...]``, which no gradient reaches."""
        return self.rollout_step(exp, state)

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: NestedTensor,
                              batch_info: BatchInfo) -> tuple[TimeStep, NestedTensor]:
        """Everything as it is: what the policy is trained on is not what the representation is."""
        return root_inputs, rollout_info

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Nothing is added to the loss of the policy."""
        return LossInfo()

    def after_update(self, root_inputs: TimeStep, info: NestedTensor) -> None:
        """Nothing: what follows an update of the model happens in :meth:`after_train_iter`."""

    def after_train_iter(self, experience: TimeStep | None, info: NestedTensor) -> None:
        """Store the unroll, and train.

        Args:
            experience: transformed time steps ``[T, B, ...]`` of the unroll; ``None`` if there was none.
            info: of the rollout; not looked at.
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
        """Keep time steps ``[T, B, ...]`` as the environment gave them."""
        if isinstance(time_steps.untransformed, TimeStep):
            time_steps = time_steps.untransformed
        if self.unrolls_end_with_bootstrap:  # that step comes again, as the first one of the next unroll
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
