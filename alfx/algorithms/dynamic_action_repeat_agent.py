"""Agent that decides, with each action, for how many steps to repeat it.

After Sharma, Lakshminarayanan and Ravindran 2017, "Learning to Repeat: Fine Grained Action Repetition for Deep
Reinforcement Learning" (FiGAR), arXiv:1702.06054. Differs from the paper: the number of repetitions is part of a mixed
action (discrete and continuous) of an off-policy algorithm, SAC by default, and not of a separate policy trained
on-policy. The critics therefore estimate the value of each number of repetitions.

The inner algorithm runs on a slower clock: each of its steps leads from one decision to the next. It sees the steps in
between as one reward and one discount, and the replay buffer stores only its steps.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest, summary
from alfx.algorithms.agent_helpers import AgentHelper
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.data_transformer import HindsightExperienceTransformer
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, Experience, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Count, Fraction, configurable, problem_at
from alfx.summary import summary_utils
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec, zeros_from_spec

ActionRepeatState = namedtuple(
    'ActionRepeatState', ['rl', 'action', 'steps', 'k', 'rl_discount', 'rl_reward', 'sample_rewards', 'repr'],
    default_value=())
"""State of the parts (``rl``, ``repr``), and since the latest decision:

``action``: action being repeated; ``steps``: int64 ``[B]``, number of steps left; ``k``: int64 ``[B]``, chosen number
of repetitions minus 1; ``rl_reward`` ``[B(, K)]``: discounted sum of rewards; ``rl_discount`` ``[B]``: factor of the
next reward; ``sample_rewards`` ``[B(, K)]``: one of the rewards, sampled uniformly (only for a reward normalizer).
"""

ActionRepeatInfo = namedtuple(
    'ActionRepeatInfo', ['rl', 'repr', 'is_decision', 'k', 'reward', 'discount', 'reward_weight', 'sample_rewards'],
    default_value=())
"""Infos of the parts (``rl``, ``repr``); ``is_decision``: bool ``[B]``, this step is a step of the inner algorithm;
``k`` as in the state; reward ``[B(, K)]`` and discount ``[B]`` for arriving here from the previous decision; for a
reward normalizer ``reward_weight``, the sum of the factors of the rewards ``[B]``, and ``sample_rewards``, one of the
rewards."""


@configurable
class DynamicActionRepeatAgent(OffPolicyAlgorithm):
    """Agent that decides on an action and for how many steps, 1 to K, to repeat it.

    With k steps between two decisions the inner algorithm sees the reward ``sum_i gamma^(i-1) r[i]`` (i from 1 to k)
    and the discount ``gamma^(k-1) d[k]``, which with its own gamma gives ``gamma^k``. The end of an episode ends a
    repetition. ``TrainerConfig.initial_collect_steps`` and ``replay_buffer_length`` count decisions.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of continuous actions.
        reward_spec: spec of rank 0 or 1.
        env: batched environment.
        config: configuration; training has to sample from the replay buffer (``whole_replay_buffer_training = False``).
        K: largest number of steps for which an action is repeated.
        rl_algorithm_cls: learns the decisions; called as ``(observation_spec=, action_spec=, reward_spec=, config=,
            debug_summaries=)`` with the action spec ``(k, action_spec)``, where the integer k from 0 to K - 1 is the
            number of repetitions minus 1. Has to be off-policy.
        representation_learner_cls: maps the observation to the input of the inner algorithm, at each decision; called
            in the same way with the ``action_spec`` of the environment; has ``output_spec``. It is trained only by the
            loss of the inner algorithm.
        reward_normalizer_ctor: creates a ``RewardNormalizer`` that normalizes each of the summed rewards; its
            statistics are updated in replay, from the reward sampled in each repetition.
        gamma: discount of the rewards within a repetition; use the gamma of the inner algorithm's loss.
        optimizer: optimizes the parameters that the optimizers of the inner algorithm do not.
        debug_summaries: write more summaries.
        name: name of this agent.

    Raises:
        ConfError: an argument is out of range.
        SpecError: an action is not continuous.
        ValueError: an inner algorithm or data transformer does not support repetitions; the message gives the reason.
    """

    _declared_capabilities = {'traceable_update': True}  # the parts restrict it

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), env: Any = None, config: TrainerConfig | None = None,
                 K: Count = 5, rl_algorithm_cls: Callable[..., Any] = SacAlgorithm,
                 representation_learner_cls: Callable[..., Any] | None = None,
                 reward_normalizer_ctor: Callable[..., Any] | None = None, gamma: Fraction = 0.99,
                 optimizer: Any = None, debug_summaries: bool = False, name: str = 'DynamicActionRepeatAgent'):
        owner = type(self).__name__
        if any(spec.is_discrete for spec in nest.flatten(action_spec)):
            raise SpecError(f'{owner}: expected continuous actions, found {action_spec}')
        helper = AgentHelper(ActionRepeatState)
        common = dict(reward_spec=reward_spec, config=config, debug_summaries=debug_summaries)
        inner_spec, representation_learner = observation_spec, None
        if representation_learner_cls is not None:
            representation_learner = representation_learner_cls(observation_spec=observation_spec,
                                                                action_spec=action_spec, **common)
            inner_spec = representation_learner.output_spec
            helper.register_algorithm(representation_learner, 'repr')
        k_spec = BoundedTensorSpec((), torch.int64, 0, K - 1)
        rl = rl_algorithm_cls(observation_spec=inner_spec, action_spec=(k_spec, action_spec), **common)
        helper.register_algorithm(rl, 'rl')
        if rl.on_policy:
            raise ValueError(f'{owner}.rl_algorithm_cls: expected an off-policy algorithm, found {type(rl).__name__}')
        normalizer = None if reward_normalizer_ctor is None else reward_normalizer_ctor()
        if normalizer is not None and getattr(normalizer, 'update_mode', None) != 'replay':
            raise ConfError([problem_at(
                owner, 'reward_normalizer_ctor', 'has to create a RewardNormalizer that is updated in replay, found '
                f'{_described(normalizer)}', "set RewardNormalizer.update_mode = 'replay', the default")])
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         env=env, config=config, optimizer=optimizer, debug_summaries=debug_summaries, name=name,
                         **_state_specs(helper, action_spec, reward_spec, normalizer is not None))
        self._helper = helper
        self._representation_learner = representation_learner
        self._rl = rl
        self._reward_normalizer = normalizer
        self._K = K
        self._gamma = gamma
        self._blank_infos: dict[int, Any] = {}

    def _parts(self) -> list[Algorithm]:
        """Return the parts in the order of a step."""
        return [part for part in (self._representation_learner, self._rl) if part is not None]

    def set_path(self, path: str) -> None:
        """Set the paths of the parts below ``path``."""
        super().set_path(path)
        for part in self._parts():
            part.set_path(f'{path}.{self._helper.field(part)}' if path else self._helper.field(part))

    def finalize(self) -> None:
        """Set up the parts, check that they are compatible, then finalize as ``RLAlgorithm`` does."""
        for part in self._parts():
            part.set_on_policy(False)
        self.set_path(self.path)
        self._check_parts()
        super().finalize()

    def _check_parts(self) -> None:
        owner = type(self).__name__
        if self._config is not None and self._config.whole_replay_buffer_training:
            raise ConfError([problem_at(
                'TrainerConfig', 'whole_replay_buffer_training', f'= True is not supported by {owner}: environments '
                'take different numbers of decisions', 'set it to False and sample from the replay buffer')])
        for part in self._parts():
            if part.capabilities.trains_after_iteration or part.capabilities.postprocesses_unrolls:
                raise ValueError(f'{owner}: {type(part).__name__} trains on whole unrolls, whose steps are not '
                                 'steps of the inner algorithm; choose another algorithm')
        transformer = self.data_transformer
        modules = list(transformer.modules()) if isinstance(transformer, nn.Module) else []
        if any(isinstance(module, HindsightExperienceTransformer) for module in modules):
            raise ValueError(f'{owner} sums up rewards while acting; HindsightExperienceTransformer cannot replace '
                             'them later. Leave it out of TrainerConfig.data_transformer_ctor')
        if transformer is not None and transformer.stack_size > 1:
            raise ValueError(f'{owner} stores one step per decision, from which FrameStacker cannot restore '
                             'successive frames; stack frames in the environment, with '
                             'gymnasium.wrappers.FrameStackObservation')

    # Acting ----------------------------------------------------------------------------------------------------

    def predict_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Return the action ``[B, ...]``: a new decision after the last repetition, otherwise the previous action."""
        decides = self._decides(time_step, state)
        output, new_state, info = self._decide('predict_step', time_step, state, decides)
        return AlgStep(output, new_state, info)

    def rollout_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Return the action as :meth:`predict_step` does, and sum rewards. Infos are valid where ``is_decision``."""
        decides = self._decides(time_step, state)
        factor = torch.where(time_step.is_first(), 1.0, state.rl_discount)
        reward = state.rl_reward + _like(factor, time_step.reward) * time_step.reward
        discount = factor * time_step.discount
        inner_step = time_step._replace(reward=reward, discount=discount)
        output, new_state, info = self._decide('rollout_step', inner_step, state, decides)
        new_state = new_state._replace(
            rl_reward=torch.where(_like(decides, reward), 0.0, reward),
            rl_discount=torch.where(decides, 1.0, discount * self._gamma))
        info = info._replace(is_decision=decides, k=new_state.k, reward=reward, discount=discount)
        if self._reward_normalizer is not None:
            # index of this reward since the latest decision, from 1
            number = (state.k + 1 - state.steps).clamp(min=1)
            chosen = _like(torch.rand(number.shape, device=number.device) * number < 1.0, time_step.reward)
            sample = torch.where(chosen, time_step.reward, state.sample_rewards)
            new_state = new_state._replace(sample_rewards=sample)
            info = info._replace(sample_rewards=sample, reward_weight=_geometric_sum(self._gamma, number))
        return AlgStep(output, new_state, info)

    @staticmethod
    def _decides(time_step: TimeStep, state: Any) -> Tensor:
        """Return the mask of steps of the inner algorithm, bool ``[B]``. It includes FIRST, where the state is zero."""
        return (state.steps == 0) | time_step.is_last() | time_step.is_first()

    def _decide(self, method: str, time_step: TimeStep, state: Any, decides: Tensor) -> tuple[Any, Any, Any]:
        """Return action, next state and info; the parts take a step where ``decides``."""
        batch = decides.shape[0]
        can_skip = method == 'predict_step' or self._rollout_info_spec is not None
        if can_skip and not torch.compiler.is_compiling() and not bool(decides.any()):
            info = ActionRepeatInfo() if method == 'predict_step' else self._blank_info(batch)
            return state.action, state._replace(steps=state.steps - 1), info
        observation, repr_state, infos = time_step.observation, state.repr, {}
        if self._representation_learner is not None:
            step = getattr(self._representation_learner, method)(time_step, state.repr)
            observation, repr_state, infos['repr'] = step.output, step.state, step.info
        step = getattr(self._rl, method)(time_step._replace(observation=observation), state.rl)
        new_k, new_action = step.output

        def updated(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(_like(decides, new), new, old)

        action, k, rl_state, repr_state = nest.map_structure(
            updated, (new_action, new_k, step.state, repr_state), (state.action, state.k, state.rl, state.repr))
        new_state = state._replace(rl=rl_state, repr=repr_state, action=action, k=k,
                                   steps=torch.where(decides, new_k, state.steps - 1))
        return action, new_state, ActionRepeatInfo(rl=step.info, **infos)

    def _blank_info(self, batch: int) -> Any:
        """Return zero infos of the parts, for a step without decision."""
        if batch not in self._blank_infos:
            spec = self._rollout_info_spec
            zeros = zeros_from_spec(ActionRepeatInfo(rl=spec.rl, repr=spec.repr), batch)
            self._blank_infos[batch] = nest.map_structure(lambda x: x.to(self.device), zeros)
        return self._blank_infos[batch]

    # Replay ----------------------------------------------------------------------------------------------------

    def observe_for_replay(self, exp: Experience) -> None:
        """Store one step of the environments ``[B]`` in which it is a decision."""
        chosen = exp.rollout_info.is_decision.nonzero().squeeze(1)
        if len(chosen) == 0:
            return
        if len(chosen) < exp.step_type.shape[0]:
            exp = nest.map_structure(lambda x: x[chosen], exp)
        super().observe_for_replay(exp)

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Insert the summed rewards, normalized if enabled, and their discounts; ``[B, T, ...]``."""
        reward = rollout_info.reward
        if self._reward_normalizer is not None:
            self._reward_normalizer(rollout_info.sample_rewards)  # updates the statistics
            normalizer, clip_value = self._reward_normalizer.normalizer, self._reward_normalizer.clip_value
            # Each of the summed rewards has to be shifted by the mean, but transform() shifts the sum only once.
            shift = normalizer.transform(torch.zeros_like(reward))
            extra = _like(rollout_info.reward_weight - 1.0, reward) * shift
            reward = torch.where(_like(root_inputs.is_first(), reward), 0.0, normalizer.transform(reward) + extra)
            if clip_value > 0:
                reward = reward.clamp(-clip_value, clip_value)
        root_inputs = root_inputs._replace(reward=reward, discount=rollout_info.discount)
        for part in self._parts():
            field = self._helper.field(part)
            root_inputs, processed = part.preprocess_experience(root_inputs, getattr(rollout_info, field), batch_info)
            rollout_info = rollout_info._replace(**{field: processed})
        return root_inputs, rollout_info

    # Training --------------------------------------------------------------------------------------------------

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Compute one step ``[B, ...]`` of the inner algorithm."""
        return self._train('train_step', inputs, state, rollout_info)

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Compute ``train_sequence`` of the inner algorithm, ``[T, B, ...]``."""
        return self._train('train_sequence', inputs, state, rollout_info)._replace(state=())

    def _train(self, method: str, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        repr_state, infos = (), {}
        if self._representation_learner is not None:
            step = getattr(self._representation_learner, method)(inputs, state.repr, rollout_info.repr)
            inputs, repr_state, infos['repr'] = inputs._replace(observation=step.output), step.state, step.info
        step = getattr(self._rl, method)(inputs, state.rl, rollout_info.rl)
        return AlgStep(step.output, ActionRepeatState(rl=step.state, repr=repr_state),
                       ActionRepeatInfo(rl=step.info, **infos))

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the loss of the inner algorithm, ``[T, B]``."""
        return self._rl.calc_loss(info.rl)

    def after_update(self, root_inputs: NestedTensor, info: Any) -> None:
        """Call ``after_update`` of each part."""
        self._helper.after_update(self._parts(), root_inputs, info)

    # Summaries -------------------------------------------------------------------------------------------------

    def summarize_rollout(self, experience: Experience) -> None:  # type: ignore[override]
        """Write the summaries of ``RLAlgorithm``, and the number of repetitions."""
        super().summarize_rollout(experience)
        info = experience.rollout_info
        self._summarize_repeats('rollout_repeats', info.k[info.is_decision])

    def summarize_train(self, experience: Experience, train_info: NestedTensor, loss_info: LossInfo,
                        params: list[tuple[str, nn.Parameter]]) -> None:
        """Write the summaries of ``RLAlgorithm`` for the whole decision instead of the action."""
        super().summarize_train(experience, train_info, loss_info, params)
        self._summarize_repeats('training_repeats', experience.rollout_info.k)

    def _summarize_repeats(self, name: str, k: Tensor) -> None:
        if not context.should_record_summaries() or k.numel() == 0:
            return
        with summary.scope(self._name):
            summary_utils.add_mean_summary(f'{name}/mean', k + 1)
            if self._debug_summaries:
                summary_utils.histogram_discrete(f'{name}/value', k + 1, 1, self._K)


def _state_specs(helper: AgentHelper, action_spec: NestedTensorSpec, reward_spec: TensorSpec,
                 samples_rewards: bool) -> dict[str, NestedTensorSpec]:
    """Return the state specs of the agent, built from the state specs of its parts."""
    specs = helper.state_specs()
    acting = dict(action=nest.map_structure(TensorSpec.from_spec, action_spec), steps=TensorSpec((), torch.int64),
                  k=TensorSpec((), torch.int64))
    summing = dict(rl_discount=TensorSpec(()), rl_reward=TensorSpec.from_spec(reward_spec),
                   sample_rewards=TensorSpec.from_spec(reward_spec) if samples_rewards else ())
    return dict(specs, predict_state_spec=specs['predict_state_spec']._replace(**acting),
                rollout_state_spec=specs['rollout_state_spec']._replace(**acting, **summing))


def _described(normalizer: Any) -> str:
    mode = getattr(normalizer, 'update_mode', None)
    return type(normalizer).__name__ + ('' if mode is None else f" with update_mode = '{mode}'")


def _like(x: Tensor, other: Tensor) -> Tensor:
    """Return ``x`` with trailing dimensions of size 1 added, so that it broadcasts with ``other``."""
    return x.reshape(*x.shape, *[1] * (other.ndim - x.ndim))


def _geometric_sum(gamma: float, count: Tensor) -> Tensor:
    """Compute ``1 + gamma + ... + gamma^(count - 1)``."""
    return count.float() if gamma == 1.0 else (1.0 - gamma**count.float()) / (1.0 - gamma)
