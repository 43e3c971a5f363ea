"""Models of the environment: they predict the next observation, the reward and the end of the episode.

:class:`LearnsModel` is the base class of algorithms that learn a model from experience; :class:`WorldModel` is a model
with separate updates. Read next: :mod:`alfx.algorithms.mbrl_algorithm`, which plans with a model, and
:mod:`alfx.algorithms.model_based_policy_algorithm`, which trains a policy on imagined transitions.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.known_tasks import TERMINATIONS, no_termination
from alfx.algorithms.data_transformer import IdentityDataTransformer, RewardTransformer, SequentialDataTransformer
from alfx.algorithms.dynamics_learning_algorithm import (DynamicsLearningAlgorithm, DynamicsState,
                                                         StochasticDynamicsAlgorithm)
from alfx.algorithms.reward_learning_algorithm import LearnedReward
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep, namedtuple
from alfx.engine.loss_reduction import masked_loss
from alfx.gin_utils import ConfError, problem_at
from alfx.gin_utils.value_checks import check_value
from alfx.tensor_specs import NestedTensorSpec, TensorSpec

ModelState = namedtuple('ModelState', ['dynamics', 'reward'], default_value=())
"""State of each module."""

ModelInfo = namedtuple('ModelInfo', ['dynamics', 'reward'], default_value=())
"""Info of each module."""


def termination_function(owner: str, termination_fn: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function of the argument ``termination_fn`` of ``owner``, or ``None`` if an episode never ends.

    Raises:
        ConfError: the argument is not callable, or there is no function of this name.
    """
    if isinstance(termination_fn, str):
        check_value(owner, 'termination_fn', termination_fn, str, choices=sorted(TERMINATIONS))
        termination_fn = TERMINATIONS[termination_fn]
    check_value(owner, 'termination_fn', termination_fn, callable)
    return None if termination_fn is no_termination else termination_fn


def reject_observation_transformers(config: TrainerConfig, name: str) -> None:
    """Raise ``ConfError`` if a data transformer changes observations."""
    allowed = IdentityDataTransformer, RewardTransformer, SequentialDataTransformer
    members = [] if config.data_transformer is None else config.data_transformer.modules()
    wrong = [type(m).__name__ for m in members if hasattr(m, 'transform_timestep') and not isinstance(m, allowed)]
    if wrong:
        raise ConfError([problem_at('TrainerConfig', 'data_transformer_ctor', f'creates {", ".join(wrong)}: {name} '
                                    'imagines untransformed observations of the environment',
                                    'transform observations in the environment, with a wrapper')])


class LearnsModel(Algorithm):
    """Base class that trains dynamics and rewards; state and info have the fields ``dynamics`` and ``reward``."""

    _dynamics_module: DynamicsLearningAlgorithm | None
    _reward_module: Any
    _no_info: Any = ModelInfo()

    def _learners(self) -> list[tuple[str, Any]]:
        """Return pairs of field and module, without missing modules."""
        modules = ('dynamics', self._dynamics_module), ('reward', self._reward_module)
        return [(field, module) for field, module in modules if module is not None]

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Run ``preprocess_experience`` of the modules."""
        rollout_info = rollout_info or self._no_info  # a dataset has no rollout info
        for field, module in self._learners():
            root_inputs, info = module.preprocess_experience(root_inputs, getattr(rollout_info, field), batch_info)
            rollout_info = rollout_info._replace(**{field: info})
        return root_inputs, rollout_info

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any = ()) -> AlgStep:
        """Run ``train_step`` of the modules."""
        return self._train('train_step', inputs, state, rollout_info or self._no_info)

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any = ()) -> AlgStep:
        """Run ``train_sequence`` of the modules on ``[T, B, ...]``."""
        return self._train('train_sequence', inputs, state, rollout_info or self._no_info)._replace(state=())

    def _train(self, method: str, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        info = self._no_info
        for field, module in self._learners():
            step = getattr(module, method)(inputs, getattr(state, field), getattr(rollout_info, field))
            state, info = state._replace(**{field: step.state}), info._replace(**{field: step.info})
        return AlgStep((), state, info)

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the sum of the losses of the modules, ``[T, B]``; a step has the loss of the next transition."""
        infos = {field: module.calc_loss(getattr(info, field)) for field, module in self._learners()}
        losses = [part.loss for part in infos.values() if isinstance(part.loss, Tensor)]
        scalars = [part.scalar_loss for part in infos.values() if isinstance(part.scalar_loss, Tensor)]
        return LossInfo(loss=sum(losses[1:], losses[0]) if losses else (),
                        scalar_loss=sum(scalars[1:], scalars[0]) if scalars else (),
                        extra={field: part.extra for field, part in infos.items()})


class WorldModel(LearnsModel):
    """Model of the environment with separate updates.

    Args:
        observation_spec: float32 ``[D]``.
        action_spec: spec of the action.
        reward_spec: rank 0 or 1.
        dynamics_module_ctor: creates the dynamics, called as ``(feature_spec=, action_spec=)``; ``None``:
            :class:`~alfx.algorithms.dynamics_learning_algorithm.StochasticDynamicsAlgorithm`.
        reward_module: an algorithm, or a constructor called as ``(feature_spec=, action_spec=, reward_spec=)``;
            ``None``: :class:`~alfx.algorithms.reward_learning_algorithm.LearnedReward`.
        termination_fn: maps observations ``[N, D]`` to bool ``[N]``, ``True`` where the episode ends; or the name of an
            entry of :data:`alfx.algorithms.base.known_tasks.TERMINATIONS`.
        optimizer: optimizes all parameters.
        name: name of this algorithm.
        owner: name of the class with these arguments, for error messages.
    """

    _declared_capabilities = {'traceable_update': True, 'trains_sequences_at_once': True}  # the modules restrict it

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, reward_spec: TensorSpec,
                 dynamics_module_ctor: Callable[..., DynamicsLearningAlgorithm] | None, reward_module: Any,
                 termination_fn: Callable[[Tensor], Tensor] | str, optimizer: Any, name: str = 'WorldModel',
                 owner: str = 'WorldModel'):
        specs: dict[str, Any] = dict(feature_spec=observation_spec, action_spec=action_spec)
        dynamics = (dynamics_module_ctor or StochasticDynamicsAlgorithm)(**specs)
        reward_module = LearnedReward if reward_module is None else reward_module
        if not isinstance(reward_module, Algorithm):
            reward_module = reward_module(reward_spec=reward_spec, **specs)
        super().__init__(train_state_spec=ModelState(dynamics.get_state_specs(), reward_module.train_state_spec),
                         optimizer=optimizer, name=name)
        self._dynamics_module = dynamics
        self._reward_module = reward_module
        self._termination_fn = termination_function(owner, termination_fn)
        optimizer.add_param_group({'params': [p for p in self.parameters() if p.requires_grad]})

    @property
    def dynamics(self) -> DynamicsLearningAlgorithm:
        """Dynamics module."""
        assert self._dynamics_module is not None
        return self._dynamics_module

    def update(self, time_step: TimeStep, batch_info: BatchInfo) -> float:
        """Update once from sequences ``[B, T, ...]`` of a replay buffer, and return the loss.

        Weights undo prioritized sampling, because the priorities are those of the policy.
        """
        time_step, info = self.preprocess_experience(time_step, ModelInfo(), batch_info)
        inputs, info = nest.map_structure(lambda x: x.transpose(0, 1), (time_step, info))
        loss_info = self.calc_loss(self.train_sequence(inputs, ModelState(), info).info)
        relative = batch_info.importance_weights
        weights = BatchInfo(importance_weights=1 / relative if isinstance(relative, Tensor) else ())
        loss_info, masks = masked_loss(loss_info, inputs.step_type, self.capabilities.bootstraps_sequences)
        loss_info, _ = self.update_with_gradient(loss_info, masks, batch_info=weights)
        return float(loss_info.loss)

    @torch.no_grad()
    def imagine(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Predict the next step of each row, with an elite of the dynamics that is chosen at random.

        Rows are distributed over the elites in equal numbers and random order, so that each network computes only about
        as many rows as are assigned to it.

        Args:
            observation: ``[N, D]``.
            action: ``[N, ...]``.

        Returns:
            The next observation ``[N, D]``, the reward ``[N]`` or ``[N, K]``, and the end of the episode, bool ``[N]``.
        """
        model = self.dynamics
        if model.num_replicas == 1:
            following = model.predict_step(TimeStep(prev_action=action), DynamicsState(feature=observation)).output
        else:
            following = self._imagined_by_elites(observation, action)
        reward, _ = self._reward_module.compute_reward(following, action, self._reward_module.state_at(observation))
        ends = self._termination_fn
        is_over = torch.zeros(len(reward), dtype=torch.bool, device=reward.device) if ends is None else ends(following)
        return following, reward, is_over

    def _imagined_by_elites(self, observation: Tensor, action: Tensor) -> Tensor:
        elites = self.dynamics.elites
        count, size = len(observation), -(-len(observation) // len(elites))
        order = torch.randperm(count, device=observation.device)
        dealt = torch.cat((order, order[:1].expand(size * len(elites) - count))).view(size, len(elites))
        rows = order[:1].expand(size).unsqueeze(1).repeat(1, self.dynamics.num_replicas)
        rows[:, elites] = dealt  # [size, n]: the row that each network computes
        step = self.dynamics.predict_step(TimeStep(prev_action=nest.map_structure(lambda x: x[rows], action)),
                                          DynamicsState(feature=observation[rows]))
        following = torch.empty_like(observation)
        following[order] = step.output[:, elites].flatten(0, 1)[:count]
        return following
