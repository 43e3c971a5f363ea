"""Construction and calls of the critics of soft actor-critic for each kind of action.

``N`` is any batch, ``n`` the number of critics, ``A`` the number of values of a discrete action, ``K`` the number of
rewards (no such dimension for a scalar reward). Read next: :mod:`alfx.algorithms.sac_algorithm`.
"""
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from alfx.algorithms.sac.actions import ActionParts, ActionType
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.discrete_action import suited_algorithms


class ActionValues:
    """Caller of critics of continuous actions, or of Q networks with an output for each value of a discrete action.

    Args:
        parts: kind and parts of the action.
        num_replicas: n.
        reward_spec: spec of the reward, ``()`` or ``(K,)``.
        num_outputs: number of quantiles or atoms that a critic of continuous actions outputs for each value; ``None``:
            it outputs values.
    """

    def __init__(self, parts: ActionParts, num_replicas: int, reward_spec: TensorSpec, num_outputs: int | None = None):
        self._parts = parts
        self._num_replicas = num_replicas
        self._reward_spec = reward_spec
        self._output_shape = (*reward_spec.shape, *([] if num_outputs is None else [num_outputs]))

    def make_networks(self, ctor: Callable[..., Any], observation_spec: NestedTensorSpec) -> Any:
        """Create all critics as one network, ``[N, n, (K)]``, or Q networks, ``[N, n * K, A]``.

        Args:
            ctor: creates one network, see ``critic_network_cls`` and ``q_network_cls`` of ``SacAlgorithm``.
            observation_spec: nest of specs of the observation.

        Raises:
            SpecError: the output of the network has the wrong shape.
        """
        parts, reward_spec = self._parts, self._reward_spec
        if parts.type == ActionType.Continuous:
            output = {'output_tensor_spec': TensorSpec(reward_spec.shape)} if reward_spec.ndim else {}
            critic = ctor(input_tensor_spec=(observation_spec, parts.continuous), **output)
            return checked_output(critic, self._output_shape).make_parallel(self._num_replicas)
        inputs = observation_spec if parts.type == ActionType.Discrete else (observation_spec, parts.continuous)
        q_network = ctor(input_tensor_spec=inputs, action_spec=parts.discrete)
        count = dist_utils.num_categories(parts.discrete)
        return checked_output(q_network, (count, )).make_parallel(self._num_replicas * reward_spec.numel)

    def of_all(self, q_networks: Any, observation: NestedTensor, continuous: NestedTensor,
               state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return values ``[N, n, A, (K)]`` of all discrete actions, and the new state.

        Args:
            q_networks: n networks as one network.
            observation: nest ``[N, ...]``.
            continuous: nest ``[N, ...]`` of the continuous part of a mixed action, otherwise ``()``.
            state: state of the networks.
        """
        mixed = self._parts.type == ActionType.Mixed
        values, state = q_networks((observation, continuous) if mixed else observation, state)
        if self._reward_spec.ndim:
            values = values.unflatten(1, (self._num_replicas, -1)).transpose(2, 3)
        return values, state

    def of_action(self, networks: Any, observation: NestedTensor, action: NestedTensor,
                  state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return values ``[N, n, (K)]`` of an action, and the new state.

        Args:
            networks: n networks as one network.
            observation: nest ``[N, ...]``.
            action: nest ``[N, ...]``.
            state: state of the networks.
        """
        if self._parts.type == ActionType.Continuous:
            return networks((observation, action), state)
        discrete, continuous = self._parts.split(action)
        values, state = self.of_all(networks, observation, continuous, state)
        return self.at(values, discrete), state

    def at(self, q_values: Tensor, discrete: Tensor) -> Tensor:
        """Select values of the discrete actions ``[N]`` from ``[N, n, A, (K)]``: ``[N, n, (K)]``."""
        index = self._parts.index(discrete).reshape(-1, *[1] * (q_values.ndim - 1))
        return q_values.gather(2, index.expand(*q_values.shape[:2], 1, *q_values.shape[3:])).squeeze(2)


def critic_with_outputs(ctor: Callable[..., Any], count: int, input_tensor_spec: NestedTensorSpec,
                        output_tensor_spec: TensorSpec = TensorSpec(())) -> Any:
    """Create a critic with ``count`` outputs for each reward, unless ``ctor`` creates one with several outputs."""
    critic = ctor(input_tensor_spec=input_tensor_spec)
    if critic.output_spec.ndim > 0:
        return critic
    return critic.copy(output_tensor_spec=TensorSpec((*output_tensor_spec.shape, count)))


def require_continuous_actions(name: str, action_spec: NestedTensorSpec) -> None:
    """Reject discrete and mixed actions.

    Raises:
        ValueError: the action is not continuous.
    """
    if ActionParts(action_spec).type != ActionType.Continuous:
        raise ValueError(f'{name} supports only continuous actions, found {action_spec}; '
                         f'{suited_algorithms(action_spec)}')


def checked_output(network: Any, shape: Sequence[int]) -> Any:
    """Return ``network`` if its output is a tensor ``[N, *shape]``.

    Raises:
        SpecError: the output has another shape.
    """
    if not isinstance(network.output_spec, TensorSpec) or tuple(network.output_spec.shape) != tuple(shape):
        raise SpecError(f'{network.name}: expected an output of shape {tuple(shape)}, found {network.output_spec}')
    return network
