"""Transformations of observations and rewards between the environment and the algorithm.

A transformer is applied to each time step while collecting or evaluating (``transform_timestep``), and to experience
from the replay buffer, which stores untransformed data (``transform_experience``). Frame stacks are computed from
indices at sampling, so each frame is stored once. :func:`create_data_transformer` creates the transformers listed in a
conf file; transformers that look into the replay buffer come first in the list.

``B`` is the batch size and ``T`` the length of sequences: time steps are ``[B, ...]``, experience is ``[B, T, ...]``.
"""
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, Optional, Union

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.transformers.field_checks import check_fields, check_images, check_mask_field, check_order
from alfx.algorithms.transformers.frame_stacking import plan_stacking, stack_from_replay, stack_time_step
from alfx.algorithms.transformers.hindsight import GoalRelabeler, GoalReward
from alfx.algorithms.transformers.normalization import (OFFLINE, UPDATE_MODES, episode_returns, exact_moments,
                                                     make_normalizer, make_reward_normalizer, plan_normalizing)
from alfx.algorithms.transformers.specs import ModuleWithSpecs
from alfx.data_structures import Experience, TimeStep, namedtuple
from alfx.gin_utils import ConfError, configurable, register_function, takes_arguments_of
from alfx.gin_utils.value_checks import Count, Fraction, Positive, StepLimit, log_unused, non_default, problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.discrete_action import NoValidActionError
from alfx.utils.normalizers import Normalizer
from alfx.utils.renamed import warn_renamed

_log = logging.getLogger(__name__)
FrameStackState = namedtuple('FrameStackState', ['steps', 'prev_frames'], default_value=())
"""State of :class:`FrameStacker`: ``steps`` int64 ``[B]``, number of steps seen of the episode; ``prev_frames``, a list
with the previous ``stack_size - 1`` frames of each field, oldest first, joined along ``stack_axis``."""
TransformerCtor = Callable[..., 'DataTransformer']


class DataTransformer(ModuleWithSpecs):
    """Base class of data transformers. Most can subclass :class:`SimpleDataTransformer`.

    Args:
        transformed_observation_spec: nest of specs of the transformed observation.
        state_spec: nest of specs of the state that :meth:`transform_timestep` keeps between time steps.
    """

    needs_replay_buffer = False  # reads the replay buffer: no transformer that changes time steps may come before it
    needs_episodic_info = False  # needs the episode boundaries of the replay buffer
    must_be_first = False  # no other transformer may come before this one
    changes_time_steps = True  # transformers that look into the replay buffer have to come before this one
    changes_experience = True  # returns tensors that differ from those in the replay buffer
    changes_rewards = False
    stacked_fields: Sequence[str] = ()  # paths in the observation that a FrameStacker stacks
    has_action_mask = False  # provides a mask of valid actions
    goal_fields: Sequence[str] = ()  # paths in the observation of the goals compared and relabeled in hindsight
    update_mode = ''  # run mode in which it has an effect, or updates statistics; '' for all

    @property
    def stack_size(self) -> int:
        """Number of frames in a transformed observation."""
        return 1

    @property
    def fits_offline_data(self) -> bool:
        """Return whether :meth:`fit` has an effect."""
        return False

    def fit(self, experiences: Callable[[], Iterator[Experience]]) -> None:
        """Compute statistics of all offline data once, before training starts.

        Args:
            experiences: each call returns an iterator over all offline data, ``[B, T, ...]`` at a time, transformed by
                the preceding transformers.
        """

    def transform_timestep(self, timestep: TimeStep, state: NestedTensor) -> tuple[TimeStep, NestedTensor]:
        """Transform one time step.

        Args:
            timestep: ``[B, ...]``; not modified.
            state: state returned by the previous call, or zeros.

        Returns:
            the transformed time step and the next state
        """
        raise NotImplementedError(f'{type(self).__name__}.transform_timestep')

    def transform_experience(self, experience: Experience) -> Experience:
        """Transform experience from the replay buffer.

        Args:
            experience: ``[B, T, ...]`` with ``batch_info`` and ``replay_buffer``; not modified.
        """
        raise NotImplementedError(f'{type(self).__name__}.transform_experience')


class SimpleDataTransformer(DataTransformer):
    """Base class of stateless transformers, which transform each time step independently in :meth:`_transform`."""

    def transform_timestep(self, timestep: TimeStep, state: NestedTensor) -> tuple[TimeStep, NestedTensor]:
        return self._transform(timestep), state

    def transform_experience(self, experience: Experience) -> Experience:
        return experience._replace(time_step=self._transform(experience.time_step))

    def _transform(self, time_step: TimeStep) -> TimeStep:
        """Return a transformed copy of a time step of shape ``[B, ...]`` or ``[B, T, ...]``."""
        raise NotImplementedError(f'{type(self).__name__}._transform')


@configurable
class IdentityDataTransformer(SimpleDataTransformer):
    """Leaves data unchanged.

    Args:
        observation_spec: nest of specs; only needed if ``transformed_observation_spec`` is read.
    """

    changes_time_steps = False

    def __init__(self, observation_spec: Optional[NestedTensorSpec] = None) -> None:
        super().__init__(observation_spec)
        self.changes_experience = type(self) is not IdentityDataTransformer

    def _transform(self, time_step: TimeStep) -> TimeStep:
        return time_step


@configurable
class UntransformedTimeStep(IdentityDataTransformer):
    """Keeps the original time step in its field ``untransformed``; has to be the first transformer."""

    must_be_first = True

    def _transform(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(untransformed=time_step._replace(untransformed=()))


class SequentialDataTransformer(DataTransformer):
    """Chain of transformers.

    Args:
        data_transformer_ctors: constructors; each is called with ``observation_spec=`` the spec that its predecessor
            outputs.
        observation_spec: nest of specs of the observation of the environment.

    Raises:
        ValueError: the order is wrong.
    """

    def __init__(self, data_transformer_ctors: Sequence[TransformerCtor], observation_spec: NestedTensorSpec) -> None:
        transformers = []
        for ctor in data_transformer_ctors:
            transformers.append(ctor(observation_spec=observation_spec))
            observation_spec = transformers[-1].transformed_observation_spec
        check_order(transformers)
        super().__init__(observation_spec, [transformer.state_spec for transformer in transformers])
        self._data_transformers = nn.ModuleList(transformers)
        self.has_action_mask = any(transformer.has_action_mask for transformer in transformers)
        self.needs_episodic_info = any(transformer.needs_episodic_info for transformer in transformers)

    @property
    def stack_size(self) -> int:
        """Largest stack size of the transformers."""
        return max((t.stack_size for t in self.members()), default=1)

    def members(self) -> list[DataTransformer]:
        """Return the transformers in order."""
        return list(self._data_transformers)  # type: ignore[arg-type]

    @property
    def fits_offline_data(self) -> bool:
        """Return whether any of the transformers is fitted to offline data."""
        return any(transformer.fits_offline_data for transformer in self.members())

    def fit(self, experiences: Callable[[], Iterator[Experience]]) -> None:
        def after(count: int) -> Iterator[Experience]:
            for experience in experiences():
                for transformer in self.members()[:count]:
                    experience = transformer.transform_experience(experience)
                yield experience

        for i, transformer in enumerate(self.members()):
            if transformer.fits_offline_data:
                transformer.fit(partial(after, i))

    def transform_timestep(self, timestep: TimeStep, state: NestedTensor) -> tuple[TimeStep, NestedTensor]:
        new_state = []
        for transformer, own_state in zip(self.members(), state):
            timestep, own_state = transformer.transform_timestep(timestep, own_state)
            new_state.append(own_state)
        return timestep, new_state

    def transform_experience(self, experience: Experience) -> Experience:
        for transformer in self.members():
            experience = transformer.transform_experience(experience)
        return experience


@configurable
class FrameStacker(DataTransformer):
    """Stacks each observation with the preceding ones of the same episode, oldest first.

    Before the start of an episode its first observation is repeated. If preceding steps are no longer in the replay
    buffer, the oldest available observation is repeated; ``ReplayBuffer.num_earliest_frames_ignored = stack_size -
    1`` prevents sampling of such steps.

    Args:
        observation_spec: nest of specs of the observation.
        stack_size: number of frames to stack.
        stack_axis: dimension of an observation along which frames are stacked.
        fields: paths of the parts to stack, such as 'camera.front'; None if the observation is one tensor.

    Raises:
        SpecError: a field does not exist or has no dimension ``stack_axis``.
        ValueError: ``stack_size`` is less than 1.
    """

    needs_replay_buffer = True
    changes_time_steps = False

    def __init__(self, observation_spec: NestedTensorSpec, stack_size: Count = 4, stack_axis: int = 0,
                 fields: Optional[Sequence[str]] = None) -> None:
        self.stacked_fields, self._axes, observation_spec, previous = plan_stacking(
            observation_spec, stack_size, stack_axis, fields)
        super().__init__(observation_spec, FrameStackState(steps=TensorSpec((), torch.int64), prev_frames=previous))
        self._stack_size = stack_size

    @property
    def stack_size(self) -> int:
        """Number of stacked frames."""
        return self._stack_size

    def transform_timestep(self, time_step: TimeStep, state: Any) -> tuple[TimeStep, Any]:
        observation, steps, prev_frames = stack_time_step(
            time_step, state.steps, state.prev_frames, self.stacked_fields, self._axes, self._stack_size)
        return time_step._replace(observation=observation), FrameStackState(steps, prev_frames)

    def transform_experience(self, experience: Experience) -> Experience:
        observation = stack_from_replay(experience, self.stacked_fields, self._axes, self._stack_size)
        return experience.update_time_step_field('observation', observation)


@configurable
class ImageScaleTransformer(SimpleDataTransformer):
    """Scales integer images linearly: the lower bound of the space becomes ``min``, the upper bound ``max``.

    Boolean images, and integer images with the bounds 0 and 1, become floats 0 and 1: policies learn more slowly from
    sparse planes without zeros.

    Args:
        observation_spec: nest of specs of the observation.
        min: value of the lower bound after scaling.
        max: value of the upper bound after scaling.
        fields: paths of the images; None for the observation, or for all its integer parts ``(C, H, W)``.

    Raises:
        SpecError: a field does not exist, there is no image, or one is not an integer image with bounds at most
            65,535 apart.
        ValueError: ``min`` is not less than ``max``.
    """

    def __init__(self, observation_spec: NestedTensorSpec, min: float = -1., max: float = 1.,
                 fields: Optional[Sequence[str]] = None) -> None:
        ranges, observation_spec = check_images('ImageScaleTransformer', observation_spec, fields, min, max)
        super().__init__(observation_spec)
        self._lines = []  # field, slope and intercept
        for field, (low, high) in ranges.items():
            if (low, high) == (0, 1):
                log_unused('ImageScaleTransformer', ['min', 'max'] if (min, max) != (-1.0, 1.0) else [],
                           f"'{field or 'observation'}' has the bounds 0 and 1, which become floats 0 and 1")
                self._lines.append((field, 1.0, 0.0))
                continue
            scale = (max - min) / (high - low or 1)
            self._lines.append((field, scale, min - low * scale))
            if scale > 1 and max - min > 2:
                _log.warning("ImageScaleTransformer: '%s': the bounds %d and %d of the space become %g and %g; set max "
                             'and min closer together to keep the values small', field or 'observation', low, high,
                             min, max)

    def _transform(self, time_step: TimeStep) -> TimeStep:
        observation = time_step.observation
        for field, scale, offset in self._lines:
            observation = nest.transform_nest(observation, field, partial(_scaled, scale=scale, offset=offset))
        return time_step._replace(observation=observation)


def _scaled(image: Tensor, scale: float, offset: float) -> Tensor:
    """Return an integer image as float32, scaled and shifted."""
    image = image.to(torch.float32)
    return image if (scale, offset) == (1.0, 0.0) else image.mul_(scale).add_(offset)


@configurable
class RandomShift(SimpleDataTransformer):
    """Shifts images for training by random numbers of pixels: data augmentation of DrQ (Kostrikov et al. 2021,
    arXiv:2004.13649, sec. 3.1).

    Each image of each time step is padded with copies of its border and cropped to its size at a random position; the
    channels of an image, such as stacked frames, move together. Images for acting are unchanged. Put it after a
    ``FrameStacker``.

    Args:
        observation_spec: nest of specs of the observation.
        max_shift: largest shift in pixels along each axis, smaller than the images; 4 in the paper, for images of
            84 x 84.
        fields: paths of the images ``(C, H, W)``; None if the observation is one image.

    Raises:
        SpecError: a field does not exist, is not an image, or is an image no larger than ``max_shift``.
    """

    update_mode = 'replay'

    def __init__(self, observation_spec: NestedTensorSpec, max_shift: Count = 4,
                 fields: Optional[Sequence[str]] = None) -> None:
        self._fields, self._max_shift = check_fields('RandomShift', observation_spec, fields), max_shift
        for field in self._fields:
            if (spec := nest.get_field(observation_spec, field)).ndim != 3 or min(spec.shape[1:]) <= max_shift:
                raise SpecError(f"RandomShift: '{field or 'observation'}': expected an image (C, H, W) of more than "
                                f'{max_shift} x {max_shift} pixels, found {spec}')
        super().__init__(observation_spec)

    def transform_timestep(self, timestep: TimeStep, state: NestedTensor) -> tuple[TimeStep, NestedTensor]:
        return timestep, state

    def _transform(self, time_step: TimeStep) -> TimeStep:
        observation = time_step.observation
        for field in self._fields:
            observation = nest.transform_nest(observation, field, self._shifted)
        return time_step._replace(observation=observation)

    def _shifted(self, images: Tensor) -> Tensor:
        flat = images.flatten(0, -4)
        n, most, device = len(flat), self._max_shift, flat.device
        top, left = torch.randint(2 * most + 1, (2, n), device=device)
        rows, columns = (torch.arange(-most, size + most, device=device).clamp_(0, size - 1) for size in flat.shape[2:])
        padded = flat.index_select(2, rows).index_select(3, columns)
        crops = padded.unfold(2, flat.shape[2], 1).unfold(3, flat.shape[3], 1)  # views, by their first row and column
        return crops[torch.arange(n, device=device), :, top, left].view(images.shape)


@configurable
class ActionMask(SimpleDataTransformer):
    """Uses a field of the observation as the mask of valid actions: policies and Q networks then choose among valid
    actions.

    The mask moves to the field ``action_mask`` of the time step. If only one other field remains in the nest, that
    field becomes the observation. The last step of an episode may have no valid action; all actions then count as
    valid.

    Args:
        observation_spec: nest of specs of the observation.
        field: path of the mask in the observation, ``[N]`` for one discrete action with N values, ``[..., N]`` for an
            action of shape ``[...]``, a nest of these for several actions; nonzero entries are valid.
        keep: also keep the field in the observation, as float32.

    Raises:
        SpecError: there is no such field, it is a number, or nothing else is observed.
    """

    has_action_mask = True

    def __init__(self, observation_spec: NestedTensorSpec, field: str = 'valid_action_mask',
                 keep: bool = False) -> None:
        self._field, self._keep = check_mask_field('ActionMask', observation_spec, field), keep
        seen = nest.map_structure(lambda spec: TensorSpec(spec.shape), nest.get_field(observation_spec, field))
        super().__init__(nest.set_field(observation_spec, field, seen) if keep else self._without(observation_spec),
                         TensorSpec((), torch.int64))

    def transform_timestep(self, timestep: TimeStep, state: Any) -> tuple[TimeStep, Any]:
        """Move the mask to ``action_mask``; the state counts the steps of the episode.

        Raises:
            NoValidActionError: no action is valid at a step that is not LAST; names environments and steps.
        """
        steps = torch.where(timestep.is_first(), 0, state)
        transformed = self._transform(timestep)
        nothing = ~_some_valid(transformed.action_mask, 1)
        if not torch.compiler.is_compiling() and bool(nothing.any()):
            where = [f'environment {int(e)} at step {int(s)} of its episode' for e, s in
                     zip(timestep.env_id[nothing], steps[nothing])]
            raise NoValidActionError(
                f"ActionMask: the field '{self._field}' leaves no valid action in {', '.join(where[:5])}; expected at "
                'least one at every step before the last of an episode; the environment has to end the episode, or '
                'allow an action')
        return transformed, steps + 1

    def _transform(self, time_step: TimeStep) -> TimeStep:
        observation = time_step.observation
        mask = nest.map_structure(lambda x: x != 0, nest.get_field(observation, self._field))
        if self._keep:
            observation = nest.set_field(observation, self._field, nest.map_structure(Tensor.float, mask))
        else:
            observation = self._without(observation)
        is_over = time_step.is_last() & ~_some_valid(mask, time_step.step_type.ndim)
        mask = nest.map_structure(lambda x: x | is_over.reshape(*is_over.shape, *[1] * (x.ndim - is_over.ndim)), mask)
        return time_step._replace(observation=observation, action_mask=mask)

    def _without(self, observation: Any) -> Any:
        """Return the observation without the field."""
        *keys, last = nest.locate_field(observation, self._field)
        rest = {key: value for key, value in nest.get_field(observation, tuple(keys)).items() if key != last}
        return nest.set_field(observation, tuple(keys), next(iter(rest.values())) if len(rest) == 1 else rest)


def _some_valid(masks: NestedTensor, ndim: int) -> Tensor:
    """Return whether every component of every action has a valid value; reduces all but the first ``ndim``
    dimensions."""
    each = [x.any(-1) if x.ndim == ndim + 1 else x.any(-1).flatten(ndim).all(-1) for x in nest.flatten(masks)]
    return torch.stack(each).all(0)


@configurable
class ObservationNormalizer(SimpleDataTransformer):
    """Normalizes float observations by running statistics.

    The statistics are part of the ``state_dict``. They are updated whenever observations are transformed in the run
    mode ``update_mode``, and never in evaluation. With ``update_mode = 'offline'`` they are mean and variance of all
    offline data (``TrainerConfig.offline_buffer_dir``), computed once at the start.

    Args:
        observation_spec: nest of specs of the observation.
        fields: paths of the parts to normalize, which may be integers; None for all float parts. Integers such as
            categories are then left unchanged.
        clipping: if above 0, the results are clipped to ``[-clipping, clipping]``.
        window_size: number of updates that ``WindowNormalizer`` averages over.
        update_rate: update rate of ``EMNormalizer``.
        speed: adaptation speed of ``AdaptiveNormalizer``.
        zero_mean: subtract the mean.
        update_mode: 'replay', 'rollout', 'pretrain' or 'offline'; on-policy training needs 'rollout'.
        mode: normalizer: 'adaptive', 'window' or 'em'.

    Raises:
        SpecError: a field does not exist.
        ValueError: an argument is not one of the choices.
    """

    def __init__(self, observation_spec: NestedTensorSpec, fields: Optional[Sequence[str]] = None,
                 clipping: float = 0., window_size: Count = 10000, update_rate: Fraction = 1e-4, speed: Positive = 8.0,
                 zero_mean: bool = True, update_mode: Literal['replay', 'rollout', 'pretrain', 'offline'] = 'replay',
                 mode: Literal['adaptive', 'window', 'em'] = 'adaptive') -> None:
        self._chosen, specs, observation_spec = plan_normalizing('ObservationNormalizer', observation_spec, fields,
                                                                 clipping)
        super().__init__(observation_spec)
        self.update_mode, self._is_update_mode = update_mode, UPDATE_MODES[update_mode]
        self._clipping = clipping
        self._is_fitted = update_mode == OFFLINE
        if self._is_fitted and mode != 'adaptive':
            raise ValueError(f"ObservationNormalizer.mode: must not be set with update_mode = 'offline', found "
                             f'{mode!r}')
        rates = {'adaptive': 'speed', 'window': 'window_size', 'em': 'update_rate'}
        unused = non_default(ObservationNormalizer.__init__, locals(), *(rates[x] for x in rates if x != mode))
        log_unused('ObservationNormalizer', unused, f'mode is {mode!r}')
        self._normalizer = make_normalizer(mode, specs, zero_mean, speed, window_size, update_rate)

    @property
    def fits_offline_data(self) -> bool:
        """Return whether the statistics are computed from offline data."""
        return self._is_fitted and bool(self._chosen)

    def fit(self, experiences: Callable[[], Iterator[Experience]]) -> None:
        def parts() -> Iterator[list[Tensor]]:
            for experience in experiences():
                leaves = nest.flatten(experience.observation)
                yield [leaves[i] for i in self._chosen]

        self._normalizer.set_moments(exact_moments(parts, num_dims=2))

    def _transform(self, time_step: TimeStep) -> TimeStep:
        if not self._chosen:
            return time_step
        leaves, structure = nest.flatten_with_structure(time_step.observation)
        parts = [leaves[i].to(torch.float32) for i in self._chosen]
        if self._is_update_mode():
            self._normalizer.update(parts)
        parts = self._normalizer.transform(parts, self._clipping if self._clipping > 0 else -1.0)
        for i, part in zip(self._chosen, parts):
            leaves[i] = part
        return time_step._replace(observation=nest.unflatten(structure, leaves))


class RewardTransformer(SimpleDataTransformer):
    """Base class of transformers that change only rewards; ``transformer(reward)`` transforms a reward tensor directly.

    Args:
        observation_spec: nest of specs of the observation.
    """

    changes_rewards = True

    def __init__(self, observation_spec: NestedTensorSpec = ()) -> None:
        super().__init__(observation_spec)

    def _transform(self, time_step: TimeStep) -> TimeStep:
        return time_step._replace(reward=self.forward(time_step.reward))

    def forward(self, reward: Tensor) -> Tensor:
        """Return a transformed copy of a reward of any batch shape, one- or multi-dimensional."""
        raise NotImplementedError(f'{type(self).__name__}.forward')


@configurable
class FunctionalRewardTransformer(RewardTransformer):
    """Applies a function to rewards.

    Args:
        func: maps the reward ``[B, ...]`` or ``[B, T, ...]`` to a new tensor of the same shape.
        observation_spec: nest of specs of the observation.
    """

    def __init__(self, func: Callable[[Tensor], Tensor], observation_spec: NestedTensorSpec = ()) -> None:
        super().__init__(observation_spec)
        self._func = func

    def forward(self, reward: Tensor) -> Tensor:
        return self._func(reward)


@configurable
class SqilReward(SimpleDataTransformer):
    """Replaces rewards by one constant for steps of a dataset and another constant for collected steps.

    With 1 and 0 an off-policy algorithm learns to visit the states of the dataset: soft Q imitation learning (Reddy et
    al. 2019, arXiv:1905.11108). Steps of datasets have an ``env_id`` below 0.

    Args:
        observation_spec: nest of specs of the observation.
        offline: reward for arriving at a step of a dataset.
        online: reward for arriving at a collected step.
    """

    changes_rewards = True

    def __init__(self, observation_spec: NestedTensorSpec = (), offline: float = 1.0, online: float = 0.0) -> None:
        super().__init__(observation_spec)
        self._offline, self._online = offline, online

    def _transform(self, time_step: TimeStep) -> TimeStep:
        reward, is_offline = time_step.reward, time_step.env_id < 0
        chosen = torch.where(is_offline, self._offline, self._online).to(reward.dtype)
        return time_step._replace(reward=chosen.reshape(*chosen.shape, *(1, ) * (reward.ndim - chosen.ndim))
                                  .expand_as(reward))


@configurable
class RewardBySource(SqilReward):
    """Former name of :class:`SqilReward`; works up to alfx 0.10."""

    @takes_arguments_of(SqilReward)
    def __init__(self, **kwargs: Any) -> None:
        warn_renamed('RewardBySource', 'SqilReward')
        super().__init__(**kwargs)


@configurable
class RewardClipping(RewardTransformer):
    """Clips rewards, each dimension separately.

    Args:
        observation_spec: nest of specs of the observation.
        minmax: smallest and largest reward.

    Raises:
        ValueError: the smallest exceeds the largest.
    """

    def __init__(self, observation_spec: NestedTensorSpec = (), minmax: tuple[float, float] = (-1, 1)) -> None:
        super().__init__(observation_spec)
        if len(minmax) != 2 or not minmax[0] <= minmax[1]:
            raise ValueError(f'RewardClipping.minmax: expected (smallest, largest), found {minmax}')
        self._minmax = tuple(minmax)

    def forward(self, reward: Tensor) -> Tensor:
        return reward.clamp(*self._minmax)


@configurable
class RewardScaling(RewardTransformer):
    """Multiplies rewards, all dimensions by the same factor.

    Args:
        scale: the factor.
        observation_spec: nest of specs of the observation.
    """

    def __init__(self, scale: float, observation_spec: NestedTensorSpec = ()) -> None:
        super().__init__(observation_spec)
        self._scale = scale

    def forward(self, reward: Tensor) -> Tensor:
        return reward * self._scale


@configurable
class DatasetRewardScaling(RewardTransformer):
    """Scales rewards so that the returns of the best and the worst offline episode differ by ``return_range``.

    One learning rate and one temperature then suit tasks with small and with large rewards (Kostrikov et al. 2021,
    arXiv:2110.06169, appendix B). The factor is computed once, before training starts, and is part of the
    ``state_dict``; collected data is scaled by the same factor. Reported returns are those of the environment.

    Args:
        return_range: difference of the two returns after scaling.
        observation_spec: nest of specs of the observation.
    """

    _scale: Tensor

    def __init__(self, return_range: Positive = 1000.0, observation_spec: NestedTensorSpec = ()) -> None:
        super().__init__(observation_spec)
        self._return_range = return_range
        self.register_buffer('_scale', torch.ones(()))

    @property
    def fits_offline_data(self) -> bool:
        """Return True: the factor is computed from offline data."""
        return True

    def fit(self, experiences: Callable[[], Iterator[Experience]]) -> None:
        """Compute the factor.

        Raises:
            ConfError: all episodes have the same return.
        """
        low, high = torch.aminmax(episode_returns(experiences()))
        if not low < high:
            raise ConfError([problem_at('TrainerConfig', 'data_transformer_ctor', f'= @DatasetRewardScaling, but all '
                                        f'stored episodes have the same return, {float(low):g}',
                                        'use @RewardScaling, and set RewardScaling.scale')])
        self._scale.fill_(self._return_range / float(high - low))

    def forward(self, reward: Tensor) -> Tensor:
        return reward * self._scale


@configurable
class RewardShifting(RewardTransformer):
    """Adds a constant to rewards, the same to all dimensions.

    Args:
        bias: the constant.
        observation_spec: nest of specs of the observation.
    """

    def __init__(self, bias: float, observation_spec: NestedTensorSpec = ()) -> None:
        super().__init__(observation_spec)
        self._bias = bias

    def forward(self, reward: Tensor) -> Tensor:
        return reward + self._bias


@configurable
class RewardNormalizer(RewardTransformer):
    """Normalizes rewards to zero mean and unit variance, each dimension separately.

    Subtracting the mean changes the task where actions influence the length of episodes. ``VecNormalize`` of
    Stable-Baselines3 and ``NormalizeReward`` of gymnasium divide by the standard deviation of the return instead and
    subtract nothing.
    The statistics are part of the ``state_dict``; evaluation does not update them.

    Args:
        observation_spec: nest of specs of the observation.
        normalizer: normalizer for the reward spec of the environment; None for an ``AdaptiveNormalizer``.
        update_max_calls: if above 0, stop updating the statistics after this number of batches in the run mode
            ``update_mode``.
        clip_value: if above 0, the results are clipped to ``[-clip_value, clip_value]``.
        update_mode: 'replay' or 'rollout': run mode in which the statistics are updated; on-policy training needs
            'rollout'.

    Raises:
        ValueError: ``update_mode`` is not one of the choices.
    """

    _num_updates: Tensor

    def __init__(self, observation_spec: NestedTensorSpec = (), normalizer: Optional[Normalizer] = None,
                 update_max_calls: StepLimit = 0, clip_value: float = -1.,
                 update_mode: Literal['replay', 'rollout'] = 'replay') -> None:
        super().__init__(observation_spec)
        self._normalizer = make_reward_normalizer() if normalizer is None else normalizer
        self._clip_value, self._update_max_calls = clip_value, update_max_calls
        self.update_mode, self._is_update_mode = update_mode, UPDATE_MODES[update_mode]
        self.register_buffer('_num_updates', torch.zeros((), dtype=torch.int64))

    @property
    def normalizer(self) -> Normalizer:
        """Normalizer with the running statistics."""
        return self._normalizer

    @property
    def clip_value(self) -> float:
        """Largest absolute value of a normalized reward, if above 0."""
        return self._clip_value

    def forward(self, reward: Tensor) -> Tensor:
        """Normalize ``reward``, after updating the statistics in the run mode ``update_mode``."""
        if self._is_update_mode() and not 0 < self._update_max_calls <= int(self._num_updates):
            self._normalizer.update(reward)
            self._num_updates += 1
        return self._normalizer.transform(reward, self._clip_value)


@register_function
def l2_dist_close_reward_fn(achieved_goal: Tensor, goal: Tensor, threshold: float = .05) -> Tensor:
    """Return 0 where the goal is reached, -1 elsewhere.

    Args:
        achieved_goal: ``[B, T, ...]``.
        goal: ``[B, T, ...]``.
        threshold: the goal is reached at a Euclidean distance below this.

    Returns:
        float32 ``[B, T]``.
    """
    if not achieved_goal.is_floating_point():  # integers of a small type would overflow
        achieved_goal, goal = achieved_goal.float(), goal.float()
    difference = achieved_goal - goal
    distance = difference.flatten(2).norm(dim=2) if goal.ndim > 2 else difference.abs()
    return -(distance >= threshold).to(torch.float32)


@configurable
class HindsightExperienceTransformer(DataTransformer):
    """Hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495) with the strategy 'future'.

    Part of the sampled experience gets a goal that was reached later in the same episode instead of the original goal,
    and the matching rewards. All steps of an episode within a sequence get the same goal, sampled uniformly from the
    goals reached after the first of them. The replay buffer is not modified. Transformers that change observations or
    rewards have to come after this one::

        TrainerConfig.data_transformer_ctor = [@HindsightExperienceTransformer, @ObservationNormalizer]

    Args:
        observation_spec: nest of specs of the observation.
        her_proportion: probability that an episode of a sequence gets another goal; 0.8 is four hindsight goals for
            each original goal, the best choice in the paper.
        achieved_goal_field: path in the experience of the goal achieved at a step.
        desired_goal_field: path in the experience of the desired goal.
        reward_fn: reward function of the environment: maps achieved goal and desired goal, ``[B, T, ...]`` each, to the
            reward ``[B, T]`` for arriving at a step. It is verified against every stored reward. With the default,
            ``compute_reward`` of the environment is used if it has this method.
        terminal_reward: reward of reaching the goal if that terminates an episode: a step at which the new goal is
            reached becomes LAST with discount 0, and a step at which only the original goal was reached is treated as a
            truncation. None: reaching the goal does not terminate the episode, as in the tasks of ``suite_robotics``.

    Raises:
        SpecError: the goals do not exist or have different specs.
        ValueError: ``her_proportion`` is not a probability, or, in training, ``reward_fn`` does not reproduce the
            stored rewards.
    """

    needs_replay_buffer = True
    needs_episodic_info = True
    changes_time_steps = False
    update_mode = 'replay'

    def __init__(self, observation_spec: NestedTensorSpec, her_proportion: Fraction = 0.8,
                 achieved_goal_field: str = 'time_step.observation.achieved_goal',
                 desired_goal_field: str = 'time_step.observation.desired_goal',
                 reward_fn: Callable[[Any, Any], Tensor] = l2_dist_close_reward_fn,
                 terminal_reward: Optional[float] = None) -> None:
        super().__init__(observation_spec, ())
        self._relabel = GoalRelabeler('HindsightExperienceTransformer', observation_spec, her_proportion,
                                      achieved_goal_field, desired_goal_field, reward_fn, terminal_reward)
        self.goal_fields = self._relabel.observation_fields
        self._has_default_reward = reward_fn is l2_dist_close_reward_fn

    def use_goal_reward(self, compute_reward: Optional[Callable[..., Any]]) -> None:
        """Use ``compute_reward`` of the environment, if it is given, unless another ``reward_fn`` is set."""
        if compute_reward is not None and self._has_default_reward:
            self._relabel.set_reward_fn(GoalReward(compute_reward, l2_dist_close_reward_fn))

    def transform_timestep(self, timestep: TimeStep, state: NestedTensor) -> tuple[TimeStep, NestedTensor]:
        return timestep, state

    def transform_experience(self, experience: Experience) -> Experience:
        return self._relabel(experience)


def create_data_transformer(data_transformer_ctor: Union[None, TransformerCtor, Sequence[TransformerCtor]],
                            observation_spec: NestedTensorSpec,
                            device: Union[None, str, torch.device] = None) -> DataTransformer:
    """Create the data transformer of a run.

    Args:
        data_transformer_ctor: a constructor, called with ``observation_spec=``, or a list of constructors, in the order
            in which they are applied; None or ``[]`` for no transformation.
        observation_spec: nest of specs of the observation of the environment.
        device: device of the statistics; None for the default device.

    Raises:
        SpecError: a transformer does not support the observation.
        ValueError: the order of the transformers is wrong.
    """
    ctors = [data_transformer_ctor] if callable(data_transformer_ctor) else list(data_transformer_ctor or ())
    if len(ctors) > 1:
        transformer: DataTransformer = SequentialDataTransformer(ctors, observation_spec)
    else:
        transformer = (ctors or [IdentityDataTransformer])[0](observation_spec=observation_spec)
    return transformer.to(context.get_default_device() if device is None else device)
