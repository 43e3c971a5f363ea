"""MuZero: planning with a learned model (Schrittwieser et al. 2020, arXiv:1911.08265).

A search (:class:`~alfx.algorithms.mcts_algorithm.MCTSAlgorithm`) chooses the actions with a learned model. A learner
(:class:`~alfx.algorithms.muzero_representation_learner.MuzeroRepresentationImpl`) trains this model to predict rewards,
values and policies of the following steps. The target policies and values are in turn the results of the search.

The two modules list the differences from the paper.
"""
from collections.abc import Callable
from typing import Any

from torch import Tensor

from alfx.algorithms.mcts_algorithm import MCTSAlgorithm
from alfx.algorithms.muzero.reanalysis import half_precision, search_observation, search_observation_spec
from alfx.algorithms.muzero_representation_learner import MuzeroRepresentationImpl
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import configurable
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec


@configurable
class MuzeroAlgorithm(OffPolicyAlgorithm):
    """Agent that plans by tree search with a learned model.

    The search uses the fields 'valid_action_mask', 'steps' and 'to_play' of a dictionary observation; the model
    receives the whole observation.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: bounded spec of one action.
        discount: discount factor of the rewards.
        reward_spec: rank 0 or 1.
        representation_learner_ctor: creates the learner, called as ``(observation_spec=, action_spec=, reward_spec=,
            discount=, reward_transformer=, enable_amp=, config=, debug_summaries=, name=)``.
        mcts_algorithm_ctor: creates the search, called as ``(observation_spec=, action_spec=, discount=,
            debug_summaries=, name=)``. It is not trained.
        reward_transformer: called with rewards of any batch shape; the model learns and predicts its results.
        config: configuration of the run.
        enable_amp: on a GPU, evaluate and reanalyze in 16-bit precision; the rollout uses full precision.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: BoundedTensorSpec, discount: float,
                 reward_spec: TensorSpec = TensorSpec(()),
                 representation_learner_ctor: Callable[..., MuzeroRepresentationImpl] = MuzeroRepresentationImpl,
                 mcts_algorithm_ctor: Callable[..., MCTSAlgorithm] = MCTSAlgorithm,
                 reward_transformer: Callable[[Tensor], Tensor] | None = None, config: TrainerConfig | None = None,
                 enable_amp: bool = True, checkpoint: str | None = None, debug_summaries: bool = False,
                 name: str = 'MuZero'):
        learner = representation_learner_ctor(
            observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec, discount=discount,
            reward_transformer=reward_transformer, enable_amp=enable_amp, config=config,
            debug_summaries=debug_summaries, name=f'{name}.learner')
        search = mcts_algorithm_ctor(observation_spec=search_observation_spec(learner.model, observation_spec),
                                     action_spec=action_spec, discount=discount, debug_summaries=debug_summaries,
                                     name=f'{name}.search')
        search.set_model(learner.model)
        learner.track_search()
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=(), rollout_state_spec=search.rollout_state_spec,
                         predict_state_spec=search.predict_state_spec, config=config, checkpoint=checkpoint,
                         debug_summaries=debug_summaries, name=name)
        self._representation_learner = learner
        self._search = search
        self._reward_transformer = reward_transformer
        self._enable_amp = enable_amp

    # Parts -----------------------------------------------------------------------------------------------------

    @property
    def search(self) -> MCTSAlgorithm:
        """Search algorithm that chooses the actions."""
        return self._search

    @property
    def model(self) -> Any:
        """Learned model used by the search."""
        return self._representation_learner.model

    def set_path(self, path: str) -> None:
        """Set the path of the infos, where the learner looks up the results of the search."""
        super().set_path(path)
        self._representation_learner.set_path(path)

    def set_reward_weights(self, reward_weights: Tensor) -> None:
        """Use the weights ``[K]`` from the next step on, also in the learner."""
        super().set_reward_weights(reward_weights)
        self._representation_learner.set_reward_weights(reward_weights)

    def own_capabilities(self) -> Capabilities:
        """Return the most general capabilities, which the representation learner restricts."""
        return super().own_capabilities()._replace(traceable_update=True, trains_sequences_at_once=True)

    def _capabilities_of_parts(self) -> dict[Any, Capabilities]:
        """Return the capabilities of the learner; the search takes no part in an update."""
        return {self._representation_learner: self._representation_learner.capabilities}

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Search without noise, and choose the action."""
        with half_precision(self.device, self._enable_amp):
            return self._search.predict_step(self._search_inputs(time_step), state)

    def rollout_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Search with noise, and choose the action; ``info`` is an ``MCTSInfo``."""
        return self._search.rollout_step(self._search_inputs(time_step), state)

    def _search_inputs(self, time_step: TimeStep) -> TimeStep:
        reward = time_step.reward
        if self._reward_transformer is not None:
            reward = self._reward_transformer(reward)
        return time_step._replace(observation=search_observation(self.model, time_step.observation), reward=reward)

    def train_step(self, exp: TimeStep, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """Run the training step of the learner."""
        return self._representation_learner.train_step(exp, state, rollout_info)

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: NestedTensor,
                              batch_info: BatchInfo) -> tuple[TimeStep, NestedTensor]:
        """Add the targets of the model, computed by the learner."""
        return self._representation_learner.preprocess_experience(root_inputs, rollout_info, batch_info)

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Return the loss of the learner."""
        return self._representation_learner.calc_loss(info)

    def after_update(self, root_inputs: TimeStep, info: NestedTensor) -> None:
        """Run the ``after_update`` of the learner."""
        self._representation_learner.after_update(root_inputs, info)
