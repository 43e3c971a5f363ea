"""Behavior cloning (Pomerleau 1988, "ALVINN", NeurIPS 1): supervised learning of recorded actions.

A policy network that outputs distributions maximizes the likelihood of the recorded actions. A network that outputs
actions, which have to be continuous and bounded, minimizes their squared error, in units of half their range. A
recurrent network is trained through each sequence, from a zero state at the first step.
"""
from collections.abc import Callable
from typing import Any

from alfx import nest
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.offline.offline_losses import StoredActions
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BasicRLInfo, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Fraction, configurable, problem_at
from alfx.networks.actor_networks import ActorNetwork
from alfx.tensor_specs import NestedTensorSpec, TensorSpec
from alfx.utils import dist_utils

BcInfo = namedtuple('BcInfo', ['actor'], default_value=())
"""``actor``: a ``LossInfo`` of ``[B]``, with :class:`BcLossInfo`."""

BcState = namedtuple('BcState', ['actor'], default_value=())
"""State of the actor network."""

BcLossInfo = namedtuple('BcLossInfo', ['actor'], default_value=())
"""``actor``: the loss ``[B]``, for summaries."""


@configurable
class BcAlgorithm(OffPolicyAlgorithm):
    """Clones recorded actions; see the module docstring for the loss.

    The actions come from ``TrainerConfig.offline_buffer_dir`` and, if the run also collects, from the rollout. Actions
    of the rollout are the policy's own unless ``overwrite_policy_output`` records those of another controller.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``, discrete or continuous, as far as the network supports them.
        reward_spec: spec of the reward, which is not used.
        actor_network_cls: called as ``(input_tensor_spec=, action_spec=)``; creates the policy network.
        actor_optimizer: optimizes the policy network.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        epsilon_greedy: in evaluation, the probability of sampling an action instead of taking the most likely one;
            ``None``: ``config.epsilon_greedy``, or 0 without a config. No effect on a network that outputs actions.
        name: name of this algorithm.

    Raises:
        ConfError: the network outputs actions, and an action is discrete.
    """

    predicts_from_observation = True

    @property
    def updates_are_traceable(self) -> bool:
        """Return whether the policy is feed-forward."""
        return not nest.flatten(self.train_state_spec)

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), actor_network_cls: Callable[..., Any] = ActorNetwork,
                 actor_optimizer: Any = None, env: Any = None, config: TrainerConfig | None = None,
                 checkpoint: str | None = None, debug_summaries: bool = False, epsilon_greedy: Fraction | None = None,
                 name: str = 'BcAlgorithm'):
        if actor_network_cls is ActorNetwork and any(spec.is_discrete for spec in nest.flatten(action_spec)):
            raise ConfError([problem_at(
                type(self).__name__, 'actor_network_cls', '= @ActorNetwork, which outputs continuous actions, but an '
                f'action of this environment is discrete: {action_spec}', 'set it to @ActorDistributionNetwork')])
        actor = actor_network_cls(input_tensor_spec=observation_spec, action_spec=action_spec)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=BcState(actor=actor.state_spec), env=env, config=config,
                         checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._actor_network = actor
        self._stored_actions = StoredActions(action_spec)
        self._gives_distributions = actor.is_distribution_output
        self._add_given_optimizers((actor_optimizer, actor))
        self.set_epsilon_greedy(epsilon_greedy)

    @property
    def supports_action_mask(self) -> bool:  # type: ignore[override]
        """Return whether the network outputs distributions, whose invalid actions can be masked."""
        return self._gives_distributions

    def check_config(self, config: TrainerConfig) -> None:
        """Reject a configuration in which the policy would clone only its own actions."""
        super().check_config(config)
        if not config.offline_datasets() and not self.overwrite_policy_output:
            raise ConfError([problem_at('TrainerConfig', 'offline_buffer_dir', f'is not set: {self._name} would only '
                                        'clone its own actions', 'name a dataset (docs/offline.md)')])

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Return the best action ``[B, ...]``, or a sampled one with probability ``epsilon_greedy``."""
        output, actor_state = self._actor_network(inputs.observation, state.actor)
        if self._gives_distributions:
            output = dist_utils.epsilon_greedy_sample(dist_utils.mask_actions(output, inputs.action_mask),
                                                      self._epsilon_greedy)
        return AlgStep(output, BcState(actor_state), ())

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Sample an action ``[B, ...]``; a network that outputs actions is used as it is."""
        action, actor_state = self._actor_network(inputs.observation, state.actor)
        if self._gives_distributions:
            action = dist_utils.sample_action_distribution(dist_utils.mask_actions(action, inputs.action_mask))
        return AlgStep(action, BcState(actor_state), BasicRLInfo(action=action))

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Compute the cloning loss ``[B]`` of the recorded action; the output is that action."""
        output, actor_state = self._actor_network(inputs.observation, state.actor)
        action = rollout_info.action
        loss = (-self._stored_actions.log_prob(output, action) if self._gives_distributions else
                self._stored_actions.squared_error(output, action))
        return AlgStep(action, BcState(actor_state), BcInfo(LossInfo(loss=loss, extra=BcLossInfo(actor=loss))))

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss ``[T, B]`` of each step."""
        return info.actor

