"""Parallelized Q-network (Gallici et al. 2024, arXiv:2407.04811): Q-learning without a replay buffer or target network.

Many environments are stepped together. Each unroll is trained on in minibatches for a few epochs, towards
lambda-returns of the network that acted, and then dropped. Instead of a target network, layer norm
(``QNetwork.use_layer_norm``) keeps the values bounded; a network without it often diverges.

Differs from the paper: an episode that a time limit ends is bootstrapped from its last observation. After a
convolution, the authors' code normalizes the channels of each position (``QNetwork.use_layer_norm = 'channels'``);
``True`` normalizes channels and positions together, as CleanRL does.
"""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.dqn_algorithm import make_critics
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Fraction, configurable, problem_at
from alfx.networks.q_networks import QNetwork
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils import value_ops
from alfx.utils.discrete_action import DiscreteAction, mask_invalid
from alfx.utils.schedulers import as_scheduler

PqnInfo = namedtuple('PqnInfo', ['action', 'target', 'value'], default_value=())
"""``action``; ``target`` ``[B]``, its lambda-return; ``value`` ``[B]``, its value under the trained network.

In the rollout ``value`` is the largest value of an action, ``[B]``; in evaluation it has the values of all actions,
``[B, A]``.
"""

PqnLossInfo = namedtuple('PqnLossInfo', ['td_error'], default_value=())
"""``td_error``: target minus value, ``[T, B]``."""


@configurable
class PqnAlgorithm(OffPolicyAlgorithm):
    """Q-learning on whole unrolls of many environments, for one discrete action.

    Needs ``TrainerConfig.whole_replay_buffer_training`` and ``clear_replay_buffer``; ``num_updates_per_train_iter`` is
    the number of epochs.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: one scalar discrete ``BoundedTensorSpec``, possibly alone in a nest; any ``minimum``.
        reward_spec: spec of the reward, of rank 0.
        q_network_cls: called as ``(input_tensor_spec=, action_spec=)``; a feed-forward network.
        q_optimizer: optimizes the network; ``None``: the optimizer of the enclosing algorithm.
        gamma: discount factor.
        td_lambda: in [0, 1]; 0 gives one-step targets. Larger values learn faster from rare rewards, with more
            variance.
        rollout_epsilon_greedy: probability of a uniformly random action in the rollout, a number or a scheduler.
        epsilon_greedy: probability of a random action in evaluation; ``None``: ``config.epsilon_greedy``, or 0 without
            a config.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ValueError: the action is not a single discrete one, the reward has several dimensions, the network is
            recurrent or has another output, or a number is out of range.
    """

    predicts_from_observation = True
    supports_action_mask = True

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), q_network_cls: Callable[..., Any] = QNetwork,
                 q_optimizer: Any = None, gamma: Fraction = 0.99, td_lambda: Fraction = 0.65,
                 rollout_epsilon_greedy: Fraction | Callable[[], Fraction] = 0.1,
                 epsilon_greedy: Fraction | None = None, env: Any = None, config: TrainerConfig | None = None,
                 checkpoint: str | None = None, debug_summaries: bool = False, name: str = 'PqnAlgorithm'):
        discrete = DiscreteAction(action_spec, name)
        if reward_spec.ndim:
            raise ValueError(f'{name}: expected a scalar reward, found {reward_spec}; DqnAlgorithm supports rewards '
                             'with several dimensions')
        network = make_critics(q_network_cls, observation_spec, discrete.spec, 1, None, name)
        if nest.flatten(network.state_spec):
            raise ValueError(f'{name}.q_network_cls: expected a feed-forward network, found the recurrent '
                             f'{type(network).__name__}; DqnAlgorithm supports recurrent networks')
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=(), env=env, config=config, checkpoint=checkpoint,
                         debug_summaries=debug_summaries, name=name)
        self._q_network = network
        self._add_given_optimizers((q_optimizer, network))
        self._discrete, self._gamma, self._lambda = discrete, gamma, td_lambda
        self._rollout_epsilon_greedy = as_scheduler(rollout_epsilon_greedy)
        self.set_epsilon_greedy(epsilon_greedy)
        self._epsilon: Tensor
        self.register_buffer('_epsilon', torch.zeros(()), persistent=False)  # read by the traced graph
        self._act = self.recorded(self._exploring_action, self)

    @property
    def critic(self) -> Any:
        """Q network."""
        return self._q_network

    @property
    def exploration_rate(self) -> float:
        """Current probability of a uniformly random action in the rollout."""
        return float(self._rollout_epsilon_greedy())

    def check_config(self, config: TrainerConfig) -> None:
        """Reject a configuration that would train on experience of earlier versions of the network."""
        super().check_config(config)
        for argument in ('whole_replay_buffer_training', 'clear_replay_buffer'):
            if not getattr(config, argument):
                raise ConfError([problem_at('TrainerConfig', argument, f'is False, but {self._name} trains on each '
                                            'unroll as a whole and then drops it', 'set it to True')])

    # Acting ----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the best action, or a random one with probability ``epsilon_greedy``."""
        q_values, mask = self._q_network(inputs.observation)[0], self._discrete.mask_of(inputs)
        best = self._discrete.explore(mask_invalid(q_values, mask).argmax(-1), self._epsilon_greedy, mask)
        return AlgStep(self._discrete.action(best), state, PqnInfo(value=q_values))

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the best action, or a random one with probability ``rollout_epsilon_greedy``."""
        self._epsilon.fill_(self.exploration_rate)
        action, value = self._act((inputs.observation, self._discrete.mask_of(inputs)))
        return AlgStep(action, state, PqnInfo(action=action, value=value))

    def _exploring_action(self, observation_and_mask: tuple[NestedTensor, NestedTensor]) -> tuple[NestedTensor, Tensor]:
        observation, mask = observation_and_mask
        value, best = mask_invalid(self._q_network(observation)[0], mask).max(-1)
        return self._discrete.action(self._discrete.replace_some(best, self._epsilon, mask)), value

    # Training --------------------------------------------------------------------------------------------------

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Compute the targets ``[B, T]`` of the whole unroll with the values found while acting.

        With V[t] the largest value at step t, the lambda-return of the paper is::

            G[t] = r[t+1] + d[t+1] ((1 - td_lambda) V[t+1] + td_lambda G[t+1])

        The final step and LAST steps have ``G[t] = V[t]``, and no loss.
        """
        values = rollout_info.value
        advantage = value_ops.generalized_advantage_estimation(
            root_inputs.reward, values, root_inputs.step_type, root_inputs.discount * self._gamma, self._lambda,
            time_major=False)
        target = torch.cat([values[:, :-1] + advantage, values[:, -1:]], 1)
        return root_inputs, rollout_info._replace(target=target)

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: Any) -> AlgStep:
        """Compute the value ``[B]`` of the action taken."""
        q_values = self._q_network(inputs.observation)[0]
        value = q_values.gather(-1, self._discrete.index(rollout_info.action).unsqueeze(-1)).squeeze(-1)
        return AlgStep(rollout_info.action, state, rollout_info._replace(value=value))

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute half the squared error of the values, ``[T, B]``."""
        error = info.target - info.value
        return LossInfo(loss=0.5 * error.square(), extra=PqnLossInfo(td_error=error))
