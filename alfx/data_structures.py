"""Records passed between environments, algorithms, replay buffers and losses.

All are named tuples and immutable: ``_replace`` returns a changed copy. An absent field is ``()``. ``B`` is the number
of environments or the minibatch size, ``T`` is time. Records have shape ``[B, ...]`` for one step and ``[T, B, ...]``
for a sequence.
"""
import collections
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from alfx import nest
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec, nearest_zeros, select


def namedtuple(typename: str, field_names: Sequence[str] | str, default_value: Any = None,
               default_values: Sequence[Any] = ()) -> type:
    """Create a named tuple class whose fields all have defaults.

    Args:
        typename: name of the class; must equal the name of the module variable it is assigned to.
        field_names: names of the fields.
        default_value: default of each field.
        default_values: defaults of the last fields; they override ``default_value``.
    """
    module = sys._getframe(1).f_globals.get('__name__', __name__)  # pickle looks the class up in the caller's module
    cls = collections.namedtuple(typename, field_names, module=module)  # type: ignore[misc]
    leading = len(cls._fields) - len(default_values)
    cls.__new__.__defaults__ = (default_value, ) * leading + tuple(default_values)
    return cls


class StepType:
    """Position of a step in its episode, stored in ``TimeStep.step_type`` as int32."""

    FIRST = 0
    MID = 1
    LAST = 2


class _Timed:
    """Methods shared by ``TimeStep`` and ``Experience``."""

    __slots__ = ()
    step_type: torch.Tensor

    def is_first(self) -> torch.Tensor:
        """Return a bool tensor of the shape of ``step_type``: True at the first step of an episode."""
        return self.step_type == StepType.FIRST

    def is_mid(self) -> torch.Tensor:
        """Return a bool tensor of the shape of ``step_type``: True at steps that are neither first nor last."""
        return self.step_type == StepType.MID

    def is_last(self) -> torch.Tensor:
        """Return a bool tensor of the shape of ``step_type``: True where an episode was terminated or truncated."""
        return self.step_type == StepType.LAST

    def to(self, device: str | torch.device) -> Any:
        """Return a copy of the record on ``device``."""
        return nest.map_structure(lambda x: x.to(device), self)

    def cpu(self) -> Any:
        """Return a copy of the record in host memory."""
        return self.to('cpu')

    def cuda(self) -> Any:
        """Return a copy of the record on the GPU."""
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
    """Output of an environment at one step.

    Fields:
        step_type: int32 ``[B]``, see :class:`StepType`.
        reward: float32 ``[B]`` or ``[B, K]``: reward for *arriving* at this step by ``prev_action``; 0 at FIRST.
        discount: float32 ``[B]``: 0 if arriving at this step terminated the episode; a truncation leaves it unchanged.
        observation: nest ``[B, ...]``. LAST holds the true final observation of its episode.
        prev_action: nest ``[B, ...]``: action that led to this step; at FIRST the one nearest to zeros.
        env_id: int64 ``[B]``: number of the environment.
        untransformed: this step before all data transformers, if it is kept.
        env_info: nest ``[B, ...]`` of additional numbers from the environment.
        action_mask: bool ``[B, ..., N]``: the valid values among the N values of a discrete action, or a nest of such
            masks with the structure of the action. The data transformer ``ActionMask`` sets it.
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
    """A time step with the outputs of the algorithm at that step.

    Fields:
        time_step: the :class:`TimeStep`.
        action: nest ``[B, ...]``: action taken *at* this step.
        rollout_info: ``AlgStep.info`` of ``rollout_step``.
        state: input state of ``rollout_step``.
        batch_info: :class:`BatchInfo` of a batch from the replay buffer.
        replay_buffer: the replay buffer that the batch was sampled from.
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
        """Return the field of ``time_step`` at the path ``field``."""
        return nest.get_field(self.time_step, field)

    def update_time_step_field(self, field: str, new_value: Any) -> 'Experience':
        """Return a copy with the field of ``time_step`` at the path ``field`` replaced."""
        return self._replace(time_step=nest.set_field(self.time_step, field, new_value))


class AlgStep(NamedTuple):
    """Result of ``predict_step``, ``rollout_step`` and ``train_step``.

    Fields:
        output: nest ``[B, ...]``: an action, a representation or another output.
        state: nest ``[B, ...]``: input state of the next step.
        info: nest ``[B, ...]``: inputs of the loss.
    """

    output: Any = ()
    state: Any = ()
    info: Any = ()


class LossInfo(NamedTuple):
    """Result of ``calc_loss``.

    Fields:
        loss: loss of each step, ``[T, B]``.
        scalar_loss: scalar that is added after ``loss`` has been averaged.
        extra: nest of losses and statistics to log.
        priority: ``[B]``: new priorities of the sampled sequences.
        gns: scalar gradient noise scale.
        batch_label: int ``[B]``: category of each sample, for summaries by category.
    """

    loss: Any = ()
    scalar_loss: Any = ()
    extra: Any = ()
    priority: Any = ()
    gns: Any = ()
    batch_label: Any = ()


class BatchInfo(NamedTuple):
    """Location of a batch in the replay buffer.

    Fields:
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``: position of the first step of each sequence, counted from the start of the run.
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
    """Create the experience of taking ``alg_step.output`` at ``time_step`` with the input state ``state``."""
    return Experience(time_step, alg_step.output, alg_step.info, state)


def add_batch_info(experience: Experience, batch_info: BatchInfo, buffer: Any = ()) -> Experience:
    """Add the fields that data transformers need to look up steps in the replay buffer."""
    return experience._replace(batch_info=batch_info, replay_buffer=buffer, rollout_info_field='rollout_info')


def clear_batch_info(experience: Experience) -> Experience:
    """Remove the fields added by :func:`add_batch_info`."""
    return experience._replace(batch_info=(), replay_buffer=(), rollout_info_field=())


def elastic_namedtuple(name: str, args: Sequence[str]) -> type:
    """Create a named tuple class whose fields default to ``()``, for infos with optional parts."""
    return namedtuple(name, args, default_value=())


BasicRolloutInfo = elastic_namedtuple('BasicRolloutInfo', ['rl', 'rewards', 'repr'])
BasicRLInfo = elastic_namedtuple('BasicRLInfo', ['action'])


def time_step_spec(observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                   reward_spec: TensorSpec = TensorSpec(())) -> TimeStep:
    """Return the spec of the time steps of an environment."""
    return TimeStep(step_type=TensorSpec((), torch.int32), reward=reward_spec,
                    discount=BoundedTensorSpec((), torch.float32, 0., 1.), observation=observation_spec,
                    prev_action=action_spec, env_id=TensorSpec((), torch.int64))


def restart(observation: NestedTensor, action_spec: NestedTensorSpec, reward_spec: TensorSpec = TensorSpec(()),
            env_id: Any = None, env_info: Any = (), batched: bool = False) -> TimeStep:
    """Create a FIRST time step.

    Args:
        observation: ``[B, ...]`` if ``batched``, else ``[...]``.
        action_spec: spec of ``prev_action``, which is set to :func:`~alfx.tensor_specs.nearest_zeros`.
        reward_spec: spec of ``reward``, which is set to zeros.
        env_id: int64 ``[B]``; ``None`` means 0 .. B-1.
        env_info: nest of additional numbers.
        batched: add a batch dimension.
    """
    batch = nest.get_nest_batch_size(observation) if batched else None
    outer = () if batch is None else (batch, )
    ids = env_id if env_id is not None else (torch.zeros((), dtype=torch.int64) if batch is None else torch.arange(
        batch))
    return TimeStep(step_type=torch.full(outer, StepType.FIRST, dtype=torch.int32), reward=reward_spec.zeros(outer),
                    discount=torch.ones(outer), observation=observation,
                    prev_action=nearest_zeros(action_spec, outer), env_id=ids, env_info=env_info)


def transition(observation: NestedTensor, prev_action: NestedTensor, reward: torch.Tensor,
               reward_spec: TensorSpec = TensorSpec(()), discount: Any = 1.0, env_id: Any = None,
               env_info: Any = ()) -> TimeStep:
    """Create a batched MID time step; arguments as in :class:`TimeStep`, ``discount`` is a number or ``[B]``."""
    return _step(StepType.MID, observation, prev_action, reward, reward_spec, discount, env_id, env_info)


def termination(observation: NestedTensor, prev_action: NestedTensor, reward: torch.Tensor,
                reward_spec: TensorSpec = TensorSpec(()), env_id: Any = None, env_info: Any = ()) -> TimeStep:
    """Create a batched LAST time step of a terminated episode, with discount 0."""
    return _step(StepType.LAST, observation, prev_action, reward, reward_spec, 0.0, env_id, env_info)


def require_loss_info(found: Any, algorithm: Any) -> LossInfo:
    """Return ``found``, the result of ``algorithm.calc_loss``, or raise ``TypeError`` if it is no :class:`LossInfo`."""
    if not isinstance(found, LossInfo):
        raise TypeError(f'{type(algorithm).__name__}.calc_loss: expected a LossInfo, found a {type(found).__name__}; '
                        'return LossInfo(loss=...)')
    return found


def valid_masks(step_type: torch.Tensor) -> torch.Tensor:
    """Return 0.0 where ``step_type`` is LAST, where the environment ignores the action, and 1.0 elsewhere."""
    return (step_type != StepType.LAST).to(torch.float32)


def reset_at_first(state: NestedTensor, initial_state: NestedTensor, time_step: TimeStep) -> NestedTensor:
    """Return ``state`` ``[B, ...]`` with the rows of environments at FIRST replaced by ``initial_state``."""
    return select(time_step.is_first(), initial_state, state)


def _step(step_type: int, observation: NestedTensor, prev_action: NestedTensor, reward: Any, reward_spec: TensorSpec,
          discount: Any, env_id: Any, env_info: Any) -> TimeStep:
    batch = nest.get_nest_batch_size(observation)
    reward = torch.as_tensor(reward, dtype=reward_spec.dtype).expand(batch, *reward_spec.shape)
    return TimeStep(step_type=torch.full((batch, ), step_type, dtype=torch.int32), reward=reward,
                    discount=torch.as_tensor(discount, dtype=torch.float32).expand(batch), observation=observation,
                    prev_action=prev_action, env_id=torch.arange(batch) if env_id is None else env_id,
                    env_info=env_info)
