"""The records that cross the borders between environments, algorithms, replay and losses.

All are named tuples and immutable: ``_replace`` makes a changed copy. An absent field is ``()``. ``B`` is the
number of environments (or the minibatch size), ``T`` is time; records have shape ``[B, ...]`` for one step and
``[T, B, ...]`` for a sequence.
"""
import collections
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from alfx import nest
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec, zeros_from_spec


def namedtuple(typename: str, field_names: Sequence[str] | str, default_value: Any = None,
               default_values: Sequence[Any] = ()) -> type:
    """A named tuple class all of whose fields have defaults.

    Args:
        typename: name of the class, and of what it is assigned to in the module of the caller.
        field_names: its fields.
        default_value: default of each field.
        default_values: defaults of the last fields, overriding ``default_value``.
    """
    module = sys._getframe(1).f_globals.get('__name__', __name__)  # where it is defined, so that it can be pickled
    cls = collections.namedtuple(typename, field_names, module=module)  # type: ignore[misc]
    leading = len(cls._fields) - len(default_values)
    cls.__new__.__defaults__ = (default_value, ) * leading + tuple(default_values)
    return cls


class StepType:
    """Where a step stands in its episode; ``TimeStep.step_type`` holds these numbers as int32."""

    FIRST = 0
    MID = 1
    LAST = 2


class _Timed:
    """What ``TimeStep`` and ``Experience`` share."""

    __slots__ = ()
    step_type: torch.Tensor

    def is_first(self) -> torch.Tensor:
        """Bool tensor of the shape of ``step_type``: the first step of an episode."""
        return self.step_type == StepType.FIRST

    def is_mid(self) -> torch.Tensor:
        """Bool tensor: neither first nor last."""
        return self.step_type == StepType.MID

    def is_last(self) -> torch.Tensor:
        """Bool tensor: the last step of an episode, by termination or truncation."""
        return self.step_type == StepType.LAST

    def to(self, device: str | torch.device) -> Any:
        """The same record on ``device``."""
        return nest.map_structure(lambda x: x.to(device), self)

    def cpu(self) -> Any:
        """The same record in host memory."""
        return self.to('cpu')

    def cuda(self) -> Any:
        """The same record on the GPU."""
        return self.to('cuda')


class _TimeStepFields(NamedTuple):
    step_type: Any = ()
    reward: Any = ()
    discount: Any = ()
    observation: Any = ()
    prev_action: Any = ()
    env_id: Any = ()
    untransformed: Any = ()
    env_info: Any = ()
    action_mask: Any = ()


class TimeStep(_Timed, _TimeStepFields):
    """What an environment yields at each step.

    Fields:
        step_type: int32 ``[B]``, see :class:`StepType`.
        reward: float32 ``[B]`` or ``[B, K]``: for *arriving* at this step by ``prev_action``; 0 at FIRST.
        discount: float32 ``[B]``: 0 if arriving here terminated the episode; a truncation keeps it.
        observation: nest ``[B, ...]``. LAST carries the true final observation of its episode.
        prev_action: nest ``[B, ...]``: the action that led here; zeros at FIRST.
        env_id: int64 ``[B]``.
        untransformed: this step before any data transformer, where one keeps it.
        env_info: nest ``[B, ...]`` of further numbers from the environment.
        action_mask: bool ``[B, ..., N]``: which of the N values of a discrete action are valid at this step, or a nest
            of such masks like the action; put there by the data transformer ``ActionMask``.
    """

    __slots__ = ()


class _ExperienceFields(NamedTuple):
    time_step: Any = ()
    action: Any = ()
    rollout_info: Any = ()
    state: Any = ()
    batch_info: Any = ()
    replay_buffer: Any = ()
    rollout_info_field: Any = ()


class Experience(_Timed, _ExperienceFields):
    """A time step together with what the algorithm made of it.

    Fields:
        time_step: the :class:`TimeStep`.
        action: nest ``[B, ...]``: the action taken *at* this step.
        rollout_info: ``AlgStep.info`` of ``rollout_step``.
        state: the state given *to* ``rollout_step``.
        batch_info: :class:`BatchInfo` of a batch from the replay buffer.
        replay_buffer: the replay buffer that it came from.
        rollout_info_field: path of ``rollout_info`` in that buffer.
    """

    __slots__ = ()

    @property
    def step_type(self) -> torch.Tensor:  # type: ignore[override]
        return self.time_step.step_type

    @property
    def reward(self) -> torch.Tensor:
        return self.time_step.reward

    @property
    def discount(self) -> torch.Tensor:
        return self.time_step.discount

    @property
    def observation(self) -> NestedTensor:
        return self.time_step.observation

    @property
    def prev_action(self) -> NestedTensor:
        return self.time_step.prev_action

    @property
    def env_id(self) -> torch.Tensor:
        return self.time_step.env_id

    def get_time_step_field(self, field: str) -> Any:
        """The field of ``time_step`` at the path ``field``."""
        return nest.get_field(self.time_step, field)

    def update_time_step_field(self, field: str, new_value: Any) -> 'Experience':
        """A copy with the field of ``time_step`` at the path ``field`` replaced."""
        return self._replace(time_step=nest.set_field(self.time_step, field, new_value))


class AlgStep(NamedTuple):
    """The result of ``predict_step``, ``rollout_step`` and ``train_step``.

    Fields:
        output: nest ``[B, ...]``: an action, a representation, ...
        state: nest ``[B, ...]``: what the next step needs.
        info: nest ``[B, ...]``: what the loss needs.
    """

    output: Any = ()
    state: Any = ()
    info: Any = ()


class LossInfo(NamedTuple):
    """The result of ``calc_loss``.

    Fields:
        loss: ``[T, B]``.
        scalar_loss: a scalar added after ``loss`` has been averaged.
        extra: nest of losses and statistics for summaries.
        priority: ``[B]``: new priorities of the sampled sequences.
        gns: scalar gradient noise scale.
        batch_label: int ``[B]``: category of each sample, for per-category summaries.
    """

    loss: Any = ()
    scalar_loss: Any = ()
    extra: Any = ()
    priority: Any = ()
    gns: Any = ()
    batch_label: Any = ()


class BatchInfo(NamedTuple):
    """Where a batch from the replay buffer came from.

    Fields:
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``: of the first step of each sequence, counted from the start of the run.
        importance_weights: float32 ``[B]``.
        replay_buffer: the buffer itself.
        discounted_return: float32 ``[B, T]``.
    """

    env_ids: Any = ()
    positions: Any = ()
    importance_weights: Any = ()
    replay_buffer: Any = ()
    discounted_return: Any = ()


def make_experience(time_step: TimeStep, alg_step: AlgStep, state: NestedTensor) -> Experience:
    """The experience of taking ``alg_step.output`` at ``time_step``, with ``state`` as input state."""
    return Experience(time_step, alg_step.output, alg_step.info, state)


def add_batch_info(experience: Experience, batch_info: BatchInfo, buffer: Any = ()) -> Experience:
    """``experience`` with the fields that data transformers need to look things up in the replay buffer."""
    return experience._replace(batch_info=batch_info, replay_buffer=buffer, rollout_info_field='rollout_info')


def clear_batch_info(experience: Experience) -> Experience:
    """The inverse of :func:`add_batch_info`."""
    return experience._replace(batch_info=(), replay_buffer=(), rollout_info_field=())


def elastic_namedtuple(name: str, args: Sequence[str]) -> type:
    """A named tuple class whose fields default to ``()``; for infos of which a user adds or leaves out parts."""
    return namedtuple(name, args, default_value=())


BasicRolloutInfo = elastic_namedtuple('BasicRolloutInfo', ['rl', 'rewards', 'repr'])
BasicRLInfo = elastic_namedtuple('BasicRLInfo', ['action'])


def time_step_spec(observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                   reward_spec: TensorSpec = TensorSpec(())) -> TimeStep:
    """The spec of the time steps of an environment."""
    return TimeStep(step_type=TensorSpec((), torch.int32), reward=reward_spec,
                    discount=BoundedTensorSpec((), torch.float32, 0., 1.), observation=observation_spec,
                    prev_action=action_spec, env_id=TensorSpec((), torch.int64))


def _env_ids(env_id: Any, batch: int) -> torch.Tensor:
    return torch.arange(batch) if env_id is None else env_id


def restart(observation: NestedTensor, action_spec: NestedTensorSpec, reward_spec: TensorSpec = TensorSpec(()),
            env_id: Any = None, env_info: Any = (), batched: bool = False) -> TimeStep:
    """A FIRST time step.

    Args:
        observation: ``[B, ...]`` if ``batched``, else ``[...]``.
        action_spec: spec of ``prev_action``, which is zeros.
        reward_spec: spec of ``reward``, which is zeros.
        env_id: int64 ``[B]``; ``None``: 0 .. B-1.
        env_info: nest of further numbers.
        batched: whether there is a batch dimension.
    """
    batch = nest.get_nest_batch_size(observation) if batched else None
    outer = () if batch is None else (batch, )
    ids = env_id if env_id is not None else (torch.zeros((), dtype=torch.int64) if batch is None else torch.arange(
        batch))
    return TimeStep(step_type=torch.full(outer, StepType.FIRST, dtype=torch.int32), reward=reward_spec.zeros(outer),
                    discount=torch.ones(outer), observation=observation,
                    prev_action=zeros_from_spec(action_spec, outer), env_id=ids, env_info=env_info)


def transition(observation: NestedTensor, prev_action: NestedTensor, reward: torch.Tensor,
               reward_spec: TensorSpec = TensorSpec(()), discount: Any = 1.0, env_id: Any = None,
               env_info: Any = ()) -> TimeStep:
    """A batched MID time step; arguments as in :class:`TimeStep`, ``discount`` a number or ``[B]``."""
    return _step(StepType.MID, observation, prev_action, reward, reward_spec, discount, env_id, env_info)


def termination(observation: NestedTensor, prev_action: NestedTensor, reward: torch.Tensor,
                reward_spec: TensorSpec = TensorSpec(()), env_id: Any = None, env_info: Any = ()) -> TimeStep:
    """A batched LAST time step at which the episode terminated: its discount is 0."""
    return _step(StepType.LAST, observation, prev_action, reward, reward_spec, 0.0, env_id, env_info)


def valid_masks(step_type: torch.Tensor) -> torch.Tensor:
    """float32 of the shape of ``step_type``: 0 at LAST, whose action the environment ignores, else 1."""
    return (step_type != StepType.LAST).to(torch.float32)


def reset_at_first(state: NestedTensor, initial_state: NestedTensor, time_step: TimeStep) -> NestedTensor:
    """``state`` ``[B, ...]`` with the entries of environments at FIRST replaced by those of ``initial_state``."""
    is_first = time_step.is_first()

    def reset(now: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
        return torch.where(is_first.reshape(-1, *(1, ) * (now.ndim - 1)), initial, now)

    return nest.map_structure(reset, state, initial_state)


def _step(step_type: int, observation: NestedTensor, prev_action: NestedTensor, reward: Any, reward_spec: TensorSpec,
          discount: Any, env_id: Any, env_info: Any) -> TimeStep:
    batch = nest.get_nest_batch_size(observation)
    reward = torch.as_tensor(reward, dtype=reward_spec.dtype).expand(batch, *reward_spec.shape)
    return TimeStep(step_type=torch.full((batch, ), step_type, dtype=torch.int32), reward=reward,
                    discount=torch.as_tensor(discount, dtype=torch.float32).expand(batch), observation=observation,
                    prev_action=prev_action, env_id=_env_ids(env_id, batch), env_info=env_info)
