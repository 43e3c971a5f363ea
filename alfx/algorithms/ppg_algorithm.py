"""Phasic policy gradient (Cobbe et al. 2020, arXiv:2009.04416).

In the policy phase, PPO trains a policy network and a value network. Every ``interval`` iterations an auxiliary phase
follows, in which the policy network also learns to predict values, while a KL penalty keeps the policy unchanged. Its
features thus learn to distinguish good from bad states, without value errors disturbing the policy. The loss of the
auxiliary phase is in :mod:`alfx.algorithms.ppg_loss`, its schedule in :mod:`alfx.engine.auxiliary_phase`.

As in the paper, the KL penalty refers to the policy at the start of the phase, not to the policy that collected the
steps, and values are trained towards the targets of the iteration that collected them.
"""
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from alfx.algorithms.actor_critic_algorithm import ActorCriticState
from alfx.algorithms.base.ownership import parameters_of
from alfx.algorithms.ppg_loss import PPGAuxPhaseLoss
from alfx.algorithms.ppo_algorithm import PPOAlgorithm, PPOInfo
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Fraction, configurable, problem_at
from alfx.gin_utils.settings import setting, wrong_values
from alfx.networks.actor_distribution_networks import AuxiliaryValueActorNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.projection_networks import CategoricalProjectionNetwork, NormalProjectionNetwork
from alfx.networks.value_networks import ValueNetworkBase
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils import dist_utils

PPGTrainInfo = namedtuple('PPGTrainInfo', [*PPOInfo()._fields, 'aux_value'], default_value=())
"""Info of ``train_step``, ``[B, ...]`` each: the fields of PPO, and the value predicted by the policy network."""


@configurable
@dataclasses.dataclass(frozen=True)
class PPGAuxOptions:
    """Options of the auxiliary phase.

    Args:
        enabled: run the auxiliary phase; without it the algorithm is PPO.
        interval: number of iterations from one phase to the next.
        mini_batch_length: steps of a training sequence; ``None``: the length of an unroll.
        mini_batch_size: sequences in a minibatch.
        num_updates_per_train_iter: passes over all steps since the last phase.

    Raises:
        ConfError: a value has the wrong type or is out of range.
    """

    enabled: bool = True
    interval: int = setting(32, minimum=1)
    mini_batch_length: int | None = setting(None, minimum=1)
    mini_batch_size: int = setting(8, minimum=1)
    num_updates_per_train_iter: int = setting(6, minimum=1)

    def __post_init__(self) -> None:
        problems = wrong_values(self, 'PPGAuxOptions')
        if problems:
            raise ConfError(problems)


@configurable
class PPGAlgorithm(PPOAlgorithm):
    """PPO with periodic auxiliary phases.

    The requirements are the same as for :class:`~alfx.algorithms.ppo_algorithm.PPOAlgorithm`.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        reward_spec: rank 0, or rank 1 for K rewards.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        aux_options: options of the auxiliary phase.
        encoding_network_ctor: creates the policy network and the value network without their last layers; called with
            the spec of the observation, for the value also with the arguments of a last layer.
        policy_optimizer: optimizes all parameters in the policy phase.
        aux_optimizer: optimizes the networks of this algorithm in the auxiliary phase. ``None``: the optimizers of the
            policy phase are used, and also train the parts that process the observation before this algorithm.
        epsilon_greedy: in evaluation, the probability of sampling an action instead of taking the most likely one;
            ``None``: ``config.epsilon_greedy``, or 0 without a config.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.
        reward_weights: K weights of the rewards in the policy's objective; ``None``: all are 1.
        discrete_projection_net_ctor: creates the head of a discrete action.
        continuous_projection_net_ctor: creates the head of a continuous action.
        loss_class: loss of the policy phase; called with ``debug_summaries``.
        aux_loss_class: loss of the auxiliary phase; called without arguments.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), env: Any = None, config: TrainerConfig | None = None,
                 aux_options: PPGAuxOptions = PPGAuxOptions(),
                 encoding_network_ctor: Callable[..., Any] = EncodingNetwork, policy_optimizer: Any = None,
                 aux_optimizer: Any = None, epsilon_greedy: Fraction | None = None, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'PPGAlgorithm', reward_weights: list[float] | None = None,
                 discrete_projection_net_ctor: Callable[..., Any] = CategoricalProjectionNetwork,
                 continuous_projection_net_ctor: Callable[..., Any] = NormalProjectionNetwork,
                 loss_class: Callable[..., Any] = PPOLoss, aux_loss_class: Callable[..., Any] = PPGAuxPhaseLoss):
        super().__init__(
            observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
            reward_weights=reward_weights,
            actor_network_ctor=partial(
                AuxiliaryValueActorNetwork, encoding_network_ctor=encoding_network_ctor,
                discrete_projection_net_ctor=discrete_projection_net_ctor,
                continuous_projection_net_ctor=continuous_projection_net_ctor,
                value_spec=TensorSpec(reward_spec.shape)),
            value_network_ctor=partial(_make_value_network, encoding_network_ctor=encoding_network_ctor),
            epsilon_greedy=epsilon_greedy, env=env, config=config, loss_class=loss_class, optimizer=policy_optimizer,
            checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._aux_options = aux_options
        self._aux_loss = aux_loss_class()
        self._aux_optimizer = aux_optimizer
        if aux_optimizer is not None:
            aux_optimizer.add_param_group({'params': parameters_of(self)})

    def check_config(self, config: TrainerConfig) -> None:
        """Reject configurations that do not train on whole unrolls.

        Raises:
            ConfError: training would sample from a replay buffer.
        """
        super().check_config(config)
        if not config.trains_on_whole_unrolls:
            name = 'clear_replay_buffer' if config.whole_replay_buffer_training else 'whole_replay_buffer_training'
            raise ConfError([problem_at('TrainerConfig', name, f'= False cannot be combined with {self._name}, which '
                                        'trains on each unroll as a whole', 'set it to True')])

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities of PPO; the conditions for recomputing infos refer to the steps of this class."""
        recomputes = self._is_stateless and not self._has_batch_dependence and self._has_own_steps(PPGAlgorithm)
        return super().own_capabilities()._replace(recomputes_rollout_info=recomputes)

    def _stores_returns(self) -> bool:
        """Return True: the auxiliary phase needs the returns, even if the loss of PPO computes its own."""
        return True

    def optimizers(self, recurse: bool = True, include_ignored_attributes: bool = False) -> list[Any]:
        """Return the optimizers; the auxiliary one only for checkpoints, because it takes no part in other updates."""
        own = super().optimizers(recurse, include_ignored_attributes)
        is_wanted = self._aux_optimizer is not None and (include_ignored_attributes or not recurse)
        return [*own, self._aux_optimizer] if is_wanted else own

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: Any) -> AlgStep:
        """Run the training step of PPO, and predict the value with the policy network."""
        (distribution, aux_value), actor_state = self._actor_network.with_value(
            inputs.observation, state.actor if state else ())
        distribution = dist_utils.mask_actions(distribution, inputs.action_mask)
        value, value_state = self._value(inputs.observation, state.value if state else ())
        info = self._train_info(inputs, rollout_info, distribution, value)
        return AlgStep(rollout_info.action, ActorCriticState(actor_state, value_state),
                       PPGTrainInfo(*info, aux_value=aux_value))

    # The auxiliary phase ---------------------------------------------------------------------------------------

    @property
    def auxiliary_phase(self) -> PPGAuxOptions | None:
        """Options of the auxiliary phase, or ``None`` if it is disabled."""
        return self._aux_options if self._aux_options.enabled else None

    @property
    def auxiliary_optimizer(self) -> Any:
        """Optimizer of the auxiliary phase."""
        return self._aux_optimizer

    def auxiliary_reference(self, info: Any) -> NestedTensor:
        """Return the policy at the start of the phase."""
        return info.action_distribution

    def calc_auxiliary_loss(self, info: Any, reference: NestedTensor) -> LossInfo:
        """Return the errors of both values plus the weighted KL divergence of the policy, ``[T, B]``."""
        return self._aux_loss(info, reference)


def _make_value_network(input_tensor_spec: NestedTensorSpec, encoding_network_ctor: Callable[..., Any],
                        output_tensor_spec: TensorSpec = TensorSpec(())) -> nn.Module:
    return ValueNetworkBase(input_tensor_spec, output_tensor_spec, encoding_network_ctor, name='ValueNetwork')
