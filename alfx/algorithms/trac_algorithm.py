"""Trust region actor-critic: an actor-critic with a bound on the change of the policy per update.

The optimizer updates the parameters first. If the policy changed too much, the step of its parameters is shrunk
(:class:`alfx.optimizers.trusted_updater.TrustedUpdater`). Trust region policy optimization (Schulman et al. 2015,
arXiv:1502.05477) instead chooses the step with second-order information. Distances are symmetric, and the distance of
categorical policies is taken between logits. Near a deterministic policy, large changes of the logits hardly change the
probabilities and therefore the KL divergence, but are hard to undo.
"""
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from alfx import context, nest, summary
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, StepType, TimeStep, namedtuple, reset_at_first
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Positive, configurable, problem_at
from alfx.optimizers.trusted_updater import TrustedUpdater
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils

TracExperience = namedtuple('TracExperience', ['observation', 'step_type', 'state', 'action_param', 'prev_action',
                                                'action_mask'],
                            default_value=())
"""Policy before an update, and the inputs to compute it again after the update, ``[T, B, ...]``.

``action_param`` is the nest of distributions before the update, ``state`` the state of ``predict_step``.
"""

TracInfo = namedtuple('TracInfo', ['action_distribution', 'observation', 'state', 'ac', 'prev_action'],
                      default_value=())
"""``ac`` is the info of the actor-critic; the other fields, for :class:`TracExperience`, are set in training."""


def policy_distance(before: Any, after: Any) -> Tensor:
    """Return the distance between two distributions of the same kind.

    For (one-hot) categorical distributions it is the squared distance of the normalized logits; for a deterministic
    policy the squared distance of the actions; otherwise ``KL(before || after) + KL(after || before)``. A common
    transformation, such as squashing, does not change the distance.

    Args:
        before: distribution of batch shape ``[B]``, or actions ``[B, ...]``.
        after: distribution or actions of the same kind.

    Returns:
        Distance ``[B]``, summed over the components of an action.

    Raises:
        NotImplementedError: ``torch`` has no KL divergence for these distributions.
    """
    if isinstance(before, Tensor):
        return (before - after).square().reshape(before.shape[0], -1).sum(-1)
    while isinstance(before, td.TransformedDistribution):
        before, after = before.base_dist, after.base_dist
    if isinstance(before, (td.Categorical, td.OneHotCategorical, dist_utils.DiagMultivariateCategorical)):
        # Components with fewer categories than others always have logits of -inf.
        change = torch.nan_to_num(before.logits - after.logits, nan=0.0)
        return change.square().reshape(change.shape[0], -1).sum(-1)
    return td.kl_divergence(before, after) + td.kl_divergence(after, before)


def _dimensions(spec: TensorSpec) -> int:
    """Return the number of summands in the distance of an action: components, or categories of all components."""
    if spec.is_discrete and isinstance(spec, BoundedTensorSpec):
        return spec.numel * dist_utils.num_categories(spec)
    return spec.numel


@configurable
class TracAlgorithm(RLAlgorithm):
    """Actor-critic wrapper that shrinks updates which change the policy too much.

    After an update the policy is evaluated again at the training observations. If its mean distance from the policy
    before the update (:func:`policy_distance`, without LAST steps) exceeds a bound, the parameters of the policy
    network are set to

        w = w_before + 0.9 * bound / distance * (w - w_before)

    until the distance is within the bound. The bound of an action is ``action_dist_clip_per_dim`` times the number of
    its components, or of the categories of all components.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        reward_spec: rank 0 or 1.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        ac_algorithm_cls: actor-critic, on-policy or off-policy; called as ``(observation_spec=, action_spec=,
            reward_spec=, config=, debug_summaries=)``. Its ``predict_step`` returns an ``action_distribution`` in the
            info. If it has an ``_actor_network`` for the whole action, only this network is shrunk, otherwise all
            parameters.
        action_dist_clip_per_dim: bound of the distance per component; smaller values change the policy more slowly.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ConfError: ``action_dist_clip_per_dim`` is not above 0, or the actor-critic acts with a smoothed actor.
        SpecError: :func:`policy_distance` does not support the distributions of the policy.
    """

    updates_are_traceable = False

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), env: Any = None, config: TrainerConfig | None = None,
                 ac_algorithm_cls: Callable[..., Any] = ActorCriticAlgorithm, action_dist_clip_per_dim: Positive = 0.01,
                 checkpoint: str | None = None, debug_summaries: bool = False, name: str = 'TracAlgorithm'):
        ac = ac_algorithm_cls(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                              config=config, debug_summaries=debug_summaries)
        if getattr(ac, '_smoothed_actor_network', None) is not None:
            raise ConfError([problem_at(type(ac).__name__, 'use_smoothed_actor', f'= True: {name} limits the change of '
                                        'the trained actor, but predictions use a copy of it', 'set it to False')])
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=ac.train_state_spec, rollout_state_spec=ac.rollout_state_spec,
                         predict_state_spec=ac.predict_state_spec, is_on_policy=ac.on_policy, env=env, config=config,
                         checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._ac_algorithm = ac
        self._action_dist_clips = nest.map_structure(lambda spec: action_dist_clip_per_dim * _dimensions(spec),
                                                     action_spec)
        self._is_recurrent = bool(nest.flatten(ac.predict_state_spec))
        self._trusted_updater: TrustedUpdater | None = None
        self._check_distance()

    @property
    def _policy_module(self) -> Any:
        """Module whose parameters are shrunk."""
        actor = getattr(self._ac_algorithm, '_actor_network', None)
        count = len(nest.flatten(getattr(actor, 'output_spec', ()), nest.is_distribution))
        # the critics of SAC choose discrete parts of an action
        return actor if count == len(nest.flatten(self._action_spec)) else self._ac_algorithm

    def _check_distance(self) -> None:
        """Reject policies without a known distance, before any environment step."""
        output_spec = getattr(self._policy_module, 'output_spec', ())
        example = nest.map_structure(lambda spec: torch.ones(1, *spec.shape, dtype=spec.dtype), output_spec)
        for dist in nest.flatten(example, nest.is_distribution):
            try:
                policy_distance(dist, dist)
            except NotImplementedError as error:
                raise SpecError(f'{self._name}: the policy is {type(dist).__name__}, and {error}; choose another '
                                'projection network in the actor network, such as NormalProjectionNetwork') from None

    # Delegation to the actor-critic ----------------------------------------------------------------------------

    def set_path(self, path: str) -> None:
        """Set the path of the actor-critic below ``path``."""
        super().set_path(path)
        self._ac_algorithm.set_path(f'{path}.ac' if path else 'ac')

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set ``on_policy`` of this algorithm and of the actor-critic."""
        super().set_on_policy(is_on_policy)
        if hasattr(self, '_ac_algorithm'):
            self._ac_algorithm.set_on_policy(is_on_policy)

    def set_reward_weights(self, reward_weights: Tensor) -> None:
        """Set the reward weights of this algorithm and of the actor-critic."""
        super().set_reward_weights(reward_weights)
        self._ac_algorithm.set_reward_weights(reward_weights)

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are not traceable, because steps that are too large are reduced."""
        return super().own_capabilities()._replace(recomputes_rollout_info=True,
                                                   trains_after_iteration=type(self).after_train_iter
                                                   is not TracAlgorithm.after_train_iter)

    @property
    def policy_algorithm(self) -> RLAlgorithm:
        """Wrapped actor-critic."""
        return self._ac_algorithm

    def convert_train_state_to_predict_state(self, state: NestedTensor) -> NestedTensor:
        """Convert the state with the actor-critic."""
        return self._ac_algorithm.convert_train_state_to_predict_state(state)

    def predict_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Run ``predict_step`` of the actor-critic."""
        return self._ac_algorithm.predict_step(time_step, state)

    def collect_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Run ``collect_step`` of the actor-critic; :meth:`train_step` adds the inputs of the distance."""
        step = self._ac_algorithm.collect_step(inputs, state)
        return step._replace(info=TracInfo(ac=step.info))

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Run ``rollout_step`` of the actor-critic; on-policy, add the inputs of the distance."""
        step = self._ac_algorithm.rollout_step(inputs, state)
        return step._replace(info=self._info(inputs, state, step) if self.on_policy else TracInfo(ac=step.info))

    def train_step(self, exp: TimeStep, state: NestedTensor, rollout_info: Any) -> AlgStep:
        """Run ``train_step`` of the actor-critic, and add the inputs of the distance."""
        step = self._ac_algorithm.train_step(exp, state, rollout_info.ac)
        return step._replace(info=self._info(exp, state, step))

    def _info(self, inputs: TimeStep, state: NestedTensor, step: AlgStep) -> Any:
        predict_state = self.convert_train_state_to_predict_state(state) if self._is_recurrent else ()
        return TracInfo(action_distribution=step.info.action_distribution, observation=inputs.observation,
                        state=predict_state, ac=step.info, prev_action=inputs.prev_action)

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Preprocess with the actor-critic and its infos."""
        root_inputs, ac_info = self._ac_algorithm.preprocess_experience(root_inputs, rollout_info.ac, batch_info)
        return root_inputs, rollout_info._replace(ac=ac_info)

    def postprocess_unroll(self, inputs: TimeStep, rollout_info: Any) -> Any:
        """Postprocess ``[T + 1, B, ...]`` with the actor-critic and its infos."""
        return rollout_info._replace(ac=self._ac_algorithm.postprocess_unroll(inputs, rollout_info.ac))

    def after_train_iter(self, root_inputs: TimeStep | None, rollout_info: Any) -> None:
        """Run ``after_train_iter`` of the actor-critic with its infos."""
        self._ac_algorithm.after_train_iter(root_inputs, None if rollout_info is None else rollout_info.ac)

    def auxiliary_reference(self, info: Any) -> NestedTensor:
        """Return the auxiliary reference of the actor-critic."""
        return self._ac_algorithm.auxiliary_reference(info.ac)

    def calc_auxiliary_loss(self, info: Any, reference: NestedTensor) -> LossInfo:
        """Return the auxiliary loss of the actor-critic, which limits the change itself, so nothing is shrunk."""
        return self._ac_algorithm.calc_auxiliary_loss(info.ac, reference)

    # The trust region ------------------------------------------------------------------------------------------

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of the actor-critic, ``[T, B]``, and store the policy parameters before the update."""
        self._trusted_updater = TrustedUpdater(p for p in self._policy_module.parameters() if p.requires_grad)
        return self._ac_algorithm.calc_loss(info.ac)

    def after_update(self, root_inputs: TimeStep, info: Any) -> None:
        """Shrink the update if it changed the policy too much, then run ``after_update`` of the actor-critic."""
        assert self._trusted_updater is not None, 'calc_loss runs before the update'
        experience = TracExperience(observation=info.observation, step_type=root_inputs.step_type, state=info.state,
                                    action_param=nest.map_structure(torch.Tensor.detach, info.action_distribution),
                                    prev_action=info.prev_action, action_mask=root_inputs.action_mask)
        # without a distribution, the update has not trained the policy
        changes, shrinks = ((), 0) if info.action_distribution == () else self._trusted_updater.adjust_step(
            lambda: self._change(experience), self._action_dist_clips)
        self._trusted_updater = None
        if context.should_record_summaries():
            for path, change in nest.flatten_with_path(changes):
                summary.scalar(f'{self._name}/unadjusted_change{"/" + path if path else ""}', change)
            summary.scalar(f'{self._name}/num_shrinks', shrinks)
        self._ac_algorithm.after_update(root_inputs, info.ac)

    def _change(self, experience: Any) -> Any:
        """Return the mean distance of the policies before and after the update, a nest like the action."""
        mask = (experience.step_type != StepType.LAST).reshape(-1).float()
        before = self._flat_leaves(experience.action_param)
        now = self._flat_leaves(self._current_policy(experience))
        over_ranks = context.mean_over_ranks
        count = over_ranks(mask.sum()).clamp(min=1e-6)
        distances = [over_ranks((policy_distance(a, b) * mask).sum()) / count for a, b in zip(before, now)]
        return nest.pack_sequence_as(self._action_spec, distances)

    @staticmethod
    def _flat_leaves(distributions: Any) -> list[Any]:
        """Flatten a nest of distributions of batch shape ``[T, B]`` to a list with batch shape ``[T * B]``."""
        return nest.flatten(nest.map_structure(lambda x: x.flatten(0, 1), distributions), nest.is_distribution)

    def _current_policy(self, experience: Any) -> Any:
        """Return the distributions ``[T, B]`` of the current policy."""
        length, batch = experience.step_type.shape
        inputs = TimeStep(step_type=experience.step_type, observation=experience.observation,
                          prev_action=experience.prev_action, action_mask=experience.action_mask)
        if not self._is_recurrent:
            flat = nest.map_structure(lambda x: x.flatten(0, 1), inputs)
            distributions = self._distribution(flat, self.get_initial_predict_state(length * batch))[0]
            return nest.map_structure(lambda x: x.unflatten(0, (length, batch)), distributions)
        initial = self.get_initial_predict_state(batch)
        state = nest.map_structure(lambda x: x[0], experience.state)
        steps = []
        for t in range(length):
            time_step = nest.map_structure(lambda x, t=t: x[t], inputs)
            distributions, state = self._distribution(time_step, reset_at_first(state, initial, time_step))
            steps.append(distributions)
        return nest.stack(steps)

    def _distribution(self, inputs: TimeStep, state: NestedTensor) -> tuple[Any, NestedTensor]:
        step = self._ac_algorithm.predict_step(inputs, state)
        return step.info.action_distribution, step.state
