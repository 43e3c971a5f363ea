"""Policies that are written by hand instead of learned.

A subclass of :class:`HandcraftedAlgorithm` implements ``_policy_func``, which maps an observation to an action. Such a
policy collects experience and is evaluated and played like any other, but is not trained. It serves as a baseline, and
as the policy of an agent in which another part learns, such as a representation of images. These policies do not come
from papers. :class:`RandomAlgorithm` (uniformly random actions), :class:`LinearFeedbackAlgorithm` and
:class:`WaypointAlgorithm` have no counterpart in ALF.
"""
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep
from alfx.gin_utils import configurable, takes_arguments_of
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.spec_utils import clip_to_spec


@configurable
class HandcraftedAlgorithm(OffPolicyAlgorithm):
    """Base class of handwritten policies; a subclass implements ``_policy_func``.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        reward_spec: of rank 0, or of rank 1 for a K-dimensional reward.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        debug_summaries: write more summaries.
        name: name of this algorithm.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), env: Any = None, config: TrainerConfig | None = None,
                 debug_summaries: bool = False, name: str = 'Handcrafted'):
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, train_state_spec=(),
                         reward_spec=reward_spec, env=env, config=config, debug_summaries=debug_summaries, name=name)

    def _policy_func(self, observation: NestedTensor) -> NestedTensor:
        """Compute the action for an observation.

        Args:
            observation: nest ``[B, ...]``.

        Returns:
            The action, nest ``[B, ...]`` of ``action_spec``.
        """
        raise NotImplementedError(f'{type(self).__name__}._policy_func')

    def predict_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Return the action ``[B, ...]`` for ``inputs.observation``."""
        return AlgStep(output=self._policy_func(inputs.observation))

    def rollout_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Return the action ``[B, ...]`` for ``inputs.observation``, without info for training."""
        return AlgStep(output=self._policy_func(inputs.observation))

    def train_step(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Return no action and zero losses: ``info`` is a ``LossInfo`` of zeros ``[B]``."""
        return AlgStep(info=LossInfo(loss=torch.zeros(inputs.step_type.shape, device=inputs.step_type.device)))

    def train_sequence(self, inputs: TimeStep, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """Compute ``train_step`` of all steps: ``info`` is a ``LossInfo`` of zeros ``[T, B]``."""
        return self.train_step(inputs)

    def train_from_replay_buffer(self, update_global_counter: bool = False) -> int:
        """Return 0: nothing is trained."""
        return 0


@configurable
class RandomAlgorithm(HandcraftedAlgorithm):
    """Uniformly random actions, in the rollout and in evaluation.

    Args:
        action_spec: nest of ``BoundedTensorSpec``, discrete or continuous with finite bounds.
        kwargs: arguments of :class:`HandcraftedAlgorithm`.

    Raises:
        SpecError: an action has no finite bounds.
    """

    @takes_arguments_of(HandcraftedAlgorithm, defaults={'name': 'RandomAlgorithm'})
    def __init__(self, action_spec: NestedTensorSpec, name: str, **kwargs: Any):
        for path, spec in nest.flatten_with_path(action_spec):
            if not (isinstance(spec, BoundedTensorSpec) and np.isfinite(spec.minimum).all()
                    and np.isfinite(spec.maximum).all()):
                raise SpecError(f"{name}: the action{f' at {path}' if path else ''}: expected a BoundedTensorSpec with "
                                f'finite bounds to sample from uniformly, found {spec}; bound the action space, '
                                'for example with a wrapper that rescales actions')
        super().__init__(action_spec=action_spec, name=name, **kwargs)

    def _policy_func(self, observation: NestedTensor) -> NestedTensor:
        """Sample uniformly between the bounds of each action, for integers including both; ``[B, ...]``."""
        batch, device = nest.get_nest_batch_size(observation), nest.extract_any_leaf_from_nest(observation).device
        return nest.map_structure(lambda spec: spec.sample((batch, )).to(device), self._action_spec)


@configurable
class SimpleCarlaAlgorithm(HandcraftedAlgorithm):
    """Drives straight towards a goal, slows down near it, and stops there.

    It knows neither roads nor obstacles. Requirements on the environment of the Carla simulator:

    - The observation is a dict with ``'goal'``, float ``[B, 2]`` or ``[B, 3]``: position of the goal relative to the
      vehicle, in meters ahead and to the right (and above, which is ignored). Other entries are ignored.
    - The action is float ``[B, 3]``, the input of a speed controller of the vehicle: the speed as a fraction of the
      speed limit; the direction relative to the heading, from -1 (turn around to the left) through 0 (straight on) to 1
      (turn around to the right); reverse gear, from 0 (no) to 1. Its bounds have to include [0, 1], [-1, 1] and 0.

    The speed is 1 at distances of at least ``distance_to_decelerate``, proportional to the distance below it, and 0 at
    distances of at most ``distance_to_stop``.

    Args:
        action_spec: a ``BoundedTensorSpec`` of shape ``(3,)``.
        distance_to_decelerate: distance to the goal in meters below which the vehicle slows down.
        distance_to_stop: distance to the goal in meters at which the vehicle stops.
        kwargs: arguments of :class:`HandcraftedAlgorithm`.

    Raises:
        SpecError: observation or action are not as described.
        ValueError: not ``0 <= distance_to_stop <= distance_to_decelerate``, or ``distance_to_decelerate`` is 0.
    """

    @takes_arguments_of(HandcraftedAlgorithm, defaults={'name': 'SimpleCarlaAlgorithm'},
                        after={'distance_to_decelerate': 'reward_spec'})
    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, name: str,
                 distance_to_decelerate: float = 50.0, distance_to_stop: float = 1.0, **kwargs: Any):
        _check_carla_specs(name, observation_spec, action_spec)
        if not 0 <= distance_to_stop <= distance_to_decelerate or not distance_to_decelerate > 0:
            raise ValueError(f'{name}: expected 0 <= distance_to_stop <= distance_to_decelerate in meters, the latter '
                             f'above 0, found {distance_to_stop} and {distance_to_decelerate}')
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, name=name, **kwargs)
        self._distance_to_decelerate = distance_to_decelerate
        self._distance_to_stop = distance_to_stop

    def _policy_func(self, observation: NestedTensor) -> Tensor:
        """Compute speed, direction and reverse ``[B, 3]`` for the goal in ``observation``."""
        ahead, right = observation['goal'][:, :2].unbind(-1)
        distance = torch.hypot(ahead, right)
        speed = (distance / self._distance_to_decelerate).clamp(max=1.0)
        speed = torch.where(distance > self._distance_to_stop, speed, torch.zeros_like(speed))
        direction = torch.atan2(right, ahead) / math.pi
        return torch.stack([speed, direction, torch.zeros_like(speed)], -1).to(self._action_spec.dtype)


@configurable
class LinearFeedbackAlgorithm(HandcraftedAlgorithm):
    """Linear controller: ``u = sum_i gains[i] * o[i]``.

    A continuous action of one element is u, clipped to its bounds; of two discrete actions the second is taken if u is
    positive. It balances a pole: ``gains = (0.1, 0.3, 1.0, 0.4)`` reaches a return of 500 in CartPole.

    Args:
        observation_spec: float spec ``[D]``.
        action_spec: continuous of one element, or discrete with two values.
        gains: D numbers.
        kwargs: arguments of :class:`HandcraftedAlgorithm`.

    Raises:
        SpecError: observation or action are not as described.
    """

    @takes_arguments_of(HandcraftedAlgorithm, defaults={'name': 'LinearFeedbackAlgorithm'},
                        after={'gains': 'reward_spec'})
    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, name: str,
                 gains: Sequence[float] = (), **kwargs: Any):
        shape = getattr(observation_spec, 'shape', None)
        if shape is None or tuple(shape) != (len(gains), ):
            raise SpecError(f'{name}: expected an observation with {len(gains)} elements, one for each of gains, '
                            f'found {observation_spec}')
        if not isinstance(action_spec, BoundedTensorSpec) or action_spec.numel != 1 or (
                action_spec.is_discrete and int(action_spec.maximum.max() - action_spec.minimum.min()) != 1):
            raise SpecError(f'{name}: expected a continuous action of one element, or two discrete ones, found '
                            f'{action_spec}')
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, name=name, **kwargs)
        self._gains: Tensor
        self.register_buffer('_gains', torch.tensor(gains, dtype=torch.float32), persistent=False)

    def _policy_func(self, observation: NestedTensor) -> Tensor:
        spec = self._action_spec
        action = (observation @ self._gains).reshape(-1, *spec.shape)
        low, high = float(spec.minimum.min()), float(spec.maximum.max())
        if spec.is_discrete:
            return torch.where(action > 0, int(high), int(low)).to(spec.dtype)
        return action.clamp(low, high)


def _check_carla_specs(name: str, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec) -> None:
    if not isinstance(observation_spec, dict) or 'goal' not in observation_spec:
        found = sorted(observation_spec) if isinstance(observation_spec, dict) else observation_spec
        raise SpecError(f"{name}: expected an observation that is a dict with 'goal', the position of the goal as seen "
                        f'from the vehicle in meters, found {found}')
    goal = observation_spec['goal']
    if not isinstance(goal, TensorSpec) or tuple(goal.shape) not in ((2, ), (3, )) or goal.is_discrete:
        raise SpecError(f"{name}: observation['goal']: expected floats of shape (2,) or (3,), meters ahead, to the "
                        f'right and above, found {goal}')
    wanted = 'speed in [0, 1], direction in [-1, 1], reverse in [0, 1]'
    if not isinstance(action_spec, BoundedTensorSpec) or tuple(action_spec.shape) != (3, ) or action_spec.is_discrete:
        raise SpecError(f'{name}: the action: expected bounded floats of shape (3,), {wanted}, found {action_spec}')
    if not ((action_spec.minimum <= (0, -1, 0)).all() and (action_spec.maximum >= (1, 1, 0)).all()):
        raise SpecError(f'{name}: the action: expected bounds that include {wanted}, found {action_spec}')


@configurable
class WaypointAlgorithm(HandcraftedAlgorithm):
    """Pushes a point to a goal along a known path, as in the mazes of gymnasium-robotics.

    The observation is a dict with ``'observation'``, float ``[B, 4]``: position and velocity in the plane, and
    ``'desired_goal'``, float ``[B, 2]``. The action ``[B, 2]`` is the force ``gain * (target - position) - damping *
    velocity``, clipped to its bounds. The target is the goal if the goal and the position have the same nearest
    waypoint; otherwise it is the next waypoint on the way to the goal.

    Args:
        observation_spec: spec as described above.
        action_spec: a ``BoundedTensorSpec`` of shape ``(2,)``.
        waypoints: points ``(x, y)`` in order along the path, connected by straight lines.
        gain: force per distance.
        damping: force per velocity, in the opposite direction.
        kwargs: arguments of :class:`HandcraftedAlgorithm`.

    Raises:
        SpecError: observation or action are not as described.
    """

    @takes_arguments_of(HandcraftedAlgorithm, defaults={'name': 'WaypointAlgorithm'},
                        after={'waypoints': 'reward_spec', 'gain': 'waypoints', 'damping': 'gain'})
    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, name: str,
                 waypoints: Sequence[Sequence[float]] = ((0.0, 0.0), ), gain: float = 10.0, damping: float = 1.0,
                 **kwargs: Any):
        fields = observation_spec if isinstance(observation_spec, dict) else {}
        shapes = [getattr(fields.get(key), 'shape', None) for key in ('observation', 'desired_goal')]
        if shapes != [(4, ), (2, )] or not isinstance(action_spec, BoundedTensorSpec) or action_spec.shape != (2, ):
            raise SpecError(f"{name}: expected an observation with 'observation' of shape (4,) and 'desired_goal' of "
                            f'shape (2,), and an action of shape (2,), found {observation_spec} and {action_spec}')
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, name=name, **kwargs)
        self._waypoints: Tensor
        self.register_buffer('_waypoints', torch.tensor(waypoints, dtype=torch.float32), persistent=False)
        self._gain, self._damping = gain, damping

    def _policy_func(self, observation: NestedTensor) -> Tensor:
        position, velocity = observation['observation'].chunk(2, -1)
        goal = observation['desired_goal']
        here, there = ((x.unsqueeze(-2) - self._waypoints).norm(dim=-1).argmin(-1) for x in (position, goal))
        on_the_way = self._waypoints[here + torch.sign(there - here)]
        target = torch.where((here == there).unsqueeze(-1), goal, on_the_way)
        return clip_to_spec(self._gain * (target - position) - self._damping * velocity, self._action_spec)
