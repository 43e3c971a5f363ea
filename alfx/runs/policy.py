"""Trained policy for use in other programs or on a robot: it maps observations to actions."""
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from alfx import context, nest
from alfx.data_structures import StepType, TimeStep
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, nearest_zeros
from alfx.utils.exclusive import exclusive


class PolicyState(NamedTuple):
    """State of a policy between two steps.

    Attributes:
        transform: state of the data transformer, nest ``[N, ...]``; N is 1 without a batch size.
        predict: state of the algorithm.
        prev_action: previous action; before the first action, the valid action nearest to zero.
    """
    transform: NestedTensor
    predict: NestedTensor
    prev_action: NestedTensor


class Policy:
    """Policy that selects an action for each observation and keeps its state between the steps of an episode.

    It can be pickled, for example to use it in another process.

    Args:
        env: environments with the wrappers used in training, as many as ``batch_size``; only their specs are used.
        algorithm: algorithm with its parameters loaded.
        batch_size: number of environments, N, of a policy for batches; None for a policy without batch dimension.
    """

    def __init__(self, env: AlfEnvironment, algorithm: Any, batch_size: int | None = None):
        self._batch_size = batch_size
        self._size = batch_size or 1
        self._algorithm = algorithm.eval()
        self._specs = env.observation_spec(), env.action_spec(), env.reward_spec(), env.env_info_spec()
        inner: Any = env
        while hasattr(inner, 'wrapped_env'):
            inner = inner.wrapped_env()
        is_gym = inner.action_spec() == env.action_spec() and isinstance(inner, GymVectorEnvironment)
        self._codec = inner.action_codec if is_gym else None
        self._device = context.get_default_device()
        self.reset()

    @property
    def observation_spec(self) -> NestedTensorSpec:
        """Spec of the observation for :meth:`predict`: the environment with the wrappers of the conf."""
        return self._specs[0]

    @property
    def action_spec(self) -> NestedTensorSpec:
        """Spec of the actions of the algorithm."""
        return self._specs[1]

    @property
    def reward_spec(self) -> NestedTensorSpec:
        """Spec of the rewards of the environment."""
        return self._specs[2]

    def names_of_non_finite(self, used: Iterable[Any]) -> list[str]:
        """Return the names of parameters that are NaN or infinite and of buffers that are NaN.

        Args:
            used: tensors that the policy uses; the others are ignored.
        """
        places = {x.data_ptr() for x in used if isinstance(x, torch.Tensor)}
        named = [(name, x, x.isfinite()) for name, x in self._algorithm.named_parameters() if x.is_floating_point()]
        named += [(name, x, ~x.isnan()) for name, x in self._algorithm.named_buffers() if x.is_floating_point()]
        return [name for name, x, is_good in named if x.data_ptr() in places and not is_good.all()]

    def __repr__(self) -> str:
        batch = '' if self._batch_size is None else f', batch_size={self._batch_size}'
        return (f'Policy({type(self._algorithm).__name__}, observation={self.observation_spec}, '
                f'action={self.action_spec}{batch})')

    def reset(self, is_new: Any = None) -> None:
        """Start a new episode and reset the state.

        Args:
            is_new: bool ``[N]``, the environments in which an episode starts; None for all.

        Raises:
            SpecError: ``is_new`` has another shape.
        """
        if is_new is None:
            self._state, self._is_first = self.initial_state(), torch.ones(self._size, dtype=torch.bool)
            return
        mask = torch.as_tensor(np.asarray(is_new))
        if mask.dtype != torch.bool or mask.shape != (self._size, ):
            raise SpecError(f'is_new: expected bools of shape ({self._size},), found {mask.dtype} of shape '
                            f'{tuple(mask.shape)}')
        self._state = nest.map_structure(
            lambda new, old: torch.where(mask.to(old.device).reshape(-1, *(1, ) * (old.ndim - 1)), new, old),
            self.initial_state(), self._state)
        self._is_first = self._is_first | mask

    def initial_state(self) -> PolicyState:
        """Return the state before the first step of an episode."""
        with context.device(self._device):
            return PolicyState(self._algorithm.get_initial_transform_state(self._size),
                               self._algorithm.get_initial_predict_state(self._size),
                               nearest_zeros(self.action_spec, self._size))

    def predict(self, observation: Any, reward: Any = 0.0) -> Any:
        """Return the action for the next observation of an episode.

        Args:
            observation: observation of a single environment without batch dimension: arrays in the structure of the
                gymnasium space, after the wrappers of the conf. With a batch size, arrays ``[N, ...]``. Images may be
                ``[H, W, C]`` as in the environment, or ``[C, H, W]`` as in :attr:`observation_spec`.
            reward: reward of the transition to this observation, for policies that use it; ``[N]`` with a batch size.

        Returns:
            An action for the gymnasium environment: an int, an array, or a dict or tuple of them. With a batch size,
            the action of a gymnasium vector environment: arrays ``[N, ...]``.

        Raises:
            SpecError: the structure or shape of the observation differs from :attr:`observation_spec`, or a number is
                NaN, infinite or not a value of that spec.
            ConfError: another thread of this process trains.
        """
        step_type = torch.where(self._is_first, int(StepType.FIRST), int(StepType.MID)).to(torch.int32)
        inputs = self._batched(observation)
        rewards = self.reward_spec.zeros((self._size, )).add_(_checked('reward', torch.as_tensor(reward)))
        with exclusive('Policy.predict', loads_conf=False):
            action, self._state = self.step(step_type, rewards, inputs, self._state)
        self._is_first = torch.zeros(self._size, dtype=torch.bool)
        action = action if self._codec is None else self._codec.encode(action)[0]
        return nest.map_structure(_unbatched if self._batch_size is None else np.asarray, action)

    def step(self, step_type: torch.Tensor, reward: torch.Tensor, observation: NestedTensor,
             state: PolicyState) -> tuple[NestedTensor, PolicyState]:
        """Compute one step as a pure function, with the state as argument and result.

        Args:
            step_type: int32 ``[N]``, FIRST or MID; N is 1 without a batch size.
            reward: ``[N]`` or ``[N, K]``.
            observation: nest ``[N, ...]``.
            state: state returned by the previous step, or :meth:`initial_state`.

        Returns:
            The action of the algorithm, a nest ``[N, ...]``, and the next state.
        """
        device = self._device
        time_step = TimeStep(step_type, reward, torch.ones(self._size), observation, state.prev_action,
                             torch.zeros(self._size, dtype=torch.int64), (),
                             nest.map_structure(lambda spec: spec.zeros((self._size, )), self._specs[3]))
        with torch.no_grad(), context.eval_context(), context.record_if(False), context.device(device):
            inputs, transform_state = self._algorithm.transform_timestep(
                nest.map_structure(lambda x: x.to(device), time_step), state.transform)
            step = self._algorithm.predict_step(inputs, state.predict)
        action = nest.map_structure(lambda x: x.detach().cpu(), step.output)
        return action, PolicyState(transform_state, step.state, action)

    def in_bounds(self, action: NestedTensor) -> NestedTensor:
        """Map an action of the algorithm to the bounds of the environment, as tensors ``[1, ...]``."""
        return action if self._codec is None else self._codec.in_bounds(action)

    def _batched(self, observation: Any) -> Any:
        batch = () if self._batch_size is None else (self._batch_size, )

        def convert(path: str, spec: Any, value: Any) -> torch.Tensor:
            name = f'observation[{path!r}]' if path else 'observation'
            tensor = torch.as_tensor(np.asarray(value))
            if len(spec.shape) == 3 and tensor.shape == (*batch, *np.roll(spec.shape, -1)) != (*batch, *spec.shape):
                tensor = tensor.movedim(-1, -3)
            if tensor.shape != (*batch, *spec.shape):
                what = f'{self._batch_size} observations' if batch else 'a single observation'
                raise SpecError(f'{name}: expected shape {(*batch, *spec.shape)}, found {tuple(tensor.shape)}; predict '
                                f'takes {what} (batch_size of load), after the wrappers of the conf')
            return _checked(name, tensor if batch else tensor.unsqueeze(0), spec)

        try:
            return nest.py_map_structure_with_path(convert, self.observation_spec, observation)
        except SpecError:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise SpecError(f'observation: expected the structure of {self.observation_spec}, found '
                            f'{type(observation).__name__}: {error}') from error


def _checked(name: str, tensor: torch.Tensor, spec: Any = None) -> torch.Tensor:
    """Return a tensor in the type of its spec, unless numbers would be lost or are not finite."""
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise SpecError(f'{name}: expected finite numbers, found {"NaN" if tensor.isnan().any() else "infinity"}')
    if spec is None:
        return tensor
    converted = tensor.to(spec.dtype)
    if spec.is_discrete:
        low, high = (spec.minimum, spec.maximum) if isinstance(spec, BoundedTensorSpec) else (-np.inf, np.inf)
        values = tensor.numpy()
        wrong = (values < low) | (values > high) | (converted.numpy() != values)
        if wrong.any():
            raise SpecError(f'{name}: expected {spec}, found {values[wrong].flat[0]}')
    return converted


def _unbatched(action: Any) -> Any:
    array = np.asarray(action)[0]
    return int(array) if array.ndim == 0 and np.issubdtype(array.dtype, np.integer) else np.array(array)
