"""Deep Q-learning: DQN, double DQN and, through its options, Rainbow.

DQN: Mnih et al. 2013 (arXiv:1312.5602) and 2015 (Nature 518); double DQN: van Hasselt et al. 2016 (arXiv:1509.06461);
Rainbow: Hessel et al. 2018 (arXiv:1710.02298). Differs from the papers:

- With several critics the minimum of their values is used, for acting and in targets, as in TD3 (Fujimoto et al. 2018,
  arXiv:1802.09477); ``num_critic_replicas = 1`` is the DQN of the papers.
- Every step of a sampled sequence is trained on. With multi-step targets each step is trained towards the return up to
  the end of the sequence; ``train_first_step_only`` gives the n-step target of Rainbow, where n is
  ``mini_batch_length - 1``.
- Without ``train_first_step_only`` the loss is the mean over all T steps of a sequence although the last step has no
  loss: a factor of ``(T - 1) / T``.

Rainbow is a conf with ``target_net_target_action = False`` (double), ``QNetwork.dueling``, ``QNetwork.noisy`` with
``rollout_epsilon_greedy = 0``, ``num_atoms``, ``calculate_priority`` with ``TrainerConfig.priority_replay``, and
``train_first_step_only`` with ``TrainerConfig.mini_batch_length``. Read next:
:mod:`alfx.algorithms.categorical_td_loss`.
"""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.base import q_values
from alfx.algorithms.base.overrides import is_overridden
from alfx.algorithms.base.time_slices import steps, pad_end
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm, Rows, Terms
from alfx.algorithms.categorical_td_loss import CategoricalTDLoss, bootstrap_steps, make_atoms
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.td_loss import TDLoss
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import Count, Fraction, configurable
from alfx.networks.q_networks import QNetwork
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.discrete_action import leaf_of_mask, mask_invalid, DiscreteAction, EpsilonZGreedy
from alfx.utils.schedulers import as_scheduler

DqnState = namedtuple('DqnState', ['critic', 'target_critic', 'exploration'], default_value=())
"""States of the critics and the target critics, ``()`` if feed-forward, and of the exploration in the rollout."""

DqnInfo = namedtuple('DqnInfo', ['reward', 'step_type', 'discount', 'action', 'critic', 'target_critic', 'q_values',
                                 'discounted_return'], default_value=())
"""Info of the steps, ``[B, ...]`` each; fields that are not needed are ``()``.

``critic``: values of the action taken, ``[B, n]``, ``[B, n, K]`` for a K-dimensional reward, or log-probabilities ``[B,
n, N]`` of N atoms. ``target_critic``: the value to bootstrap from, with the same shape without n (probabilities of the
atoms). ``q_values`` ``[B, A]``, in evaluation: values by which the action was chosen. ``discounted_return`` is present
if the replay buffer provides it.
"""

DqnLossInfo = namedtuple('DqnLossInfo', ['critic'], default_value=())


@configurable
class DqnAlgorithm(BootstrappedAlgorithm, OffPolicyAlgorithm):
    """Deep Q-learning for one discrete action.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: one scalar discrete ``BoundedTensorSpec``, possibly alone in a nest; any ``minimum``.
        reward_spec: spec of rank 0, or of rank 1 for a K-dimensional reward, with separate critics for each dimension.
            Actions are compared by the sum of their values weighted by ``reward_weights``.
        q_network_cls: called as ``(input_tensor_spec=, action_spec=)``, also with ``num_atoms=`` if that is given.
        q_optimizer: optimizes the critics; ``None``: the optimizer of the enclosing algorithm.
        rollout_epsilon_greedy: probability of a uniformly random action in the rollout, a number or a scheduler.
        target_net_target_action: bootstrap from the best action of the target network (DQN) or, if False, from the best
            action of the trained network (double DQN).
        num_critic_replicas: number n of critics; the minimum of their values is used.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        critic_loss_ctor: called as ``(debug_summaries=, name=)``, also with ``v_min=`` and ``v_max=`` if ``num_atoms``
            is given; creates the loss of a critic. ``None``: ``OneStepTDLoss``, or ``CategoricalTDLoss`` for
            distributions.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.
        target_update_tau: interpolation factor of the soft update of the target critics, in (0, 1]. Smaller values are
            more stable but learn more slowly.
        target_update_period: number of training updates per update of the target critics.
        num_atoms: learn a distribution over this number of values from ``v_min`` to ``v_max`` (C51) instead of its
            mean.
        v_min: smallest return that the atoms represent.
        v_max: largest return that the atoms represent.
        calculate_priority: compute priorities for prioritized replay: the mean absolute TD error of a sequence, or the
            mean divergence of its distributions.
        train_first_step_only: train only on the first step of each sequence; the other steps are used for its target.
            The loss is the mean over the first steps.
        random_initial_collection: take random actions during ``TrainerConfig.initial_collect_steps``.
        epsilon_greedy: probability of a random action in evaluation; ``None``: ``config.epsilon_greedy``, or 0 without
            a config.
        reward_weights: K weights of the reward dimensions; ``None``: all 1.
        exploration_length_exponent: if given, random actions are repeated for a random number n of steps with ``P(n) ~
            n ** -exponent`` (Dabney et al. 2021, arXiv:2006.01782; 2 in the paper), and epsilon is the probability of
            starting such a repetition.

    Raises:
        ValueError: the action is not a single discrete one, the networks do not match it, or a number is out of range.
    """

    predicts_from_observation = True

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()), q_network_cls: Callable[..., Any] = QNetwork,
                 q_optimizer: Any = None, rollout_epsilon_greedy: Fraction | Callable[[], Fraction] = 0.1,
                 target_net_target_action: bool = True, num_critic_replicas: Count = 2, env: Any = None,
                 config: TrainerConfig | None = None, critic_loss_ctor: Callable[..., Any] | None = None,
                 checkpoint: str | None = None, debug_summaries: bool = False, name: str = 'DqnAlgorithm',
                 target_update_tau: Fraction = 0.05, target_update_period: Count = 1, num_atoms: Count | None = None,
                 v_min: float | None = None, v_max: float | None = None, calculate_priority: bool = False,
                 train_first_step_only: bool = False, random_initial_collection: bool = True,
                 epsilon_greedy: Fraction | None = None, reward_weights: list[float] | None = None,
                 exploration_length_exponent: float | None = None):
        discrete = DiscreteAction(action_spec, name)
        if config is not None and config.mini_batch_length == 1:
            raise ValueError(f'{name}: TrainerConfig.mini_batch_length is 1, but a target needs the next step; '
                             'set it to 2 for one-step targets')
        long_exploration = (None if exploration_length_exponent is None else
                            EpsilonZGreedy(discrete, exploration_length_exponent, name))
        atoms = _make_atoms(num_atoms, v_min, v_max, reward_spec, name)
        critics = make_critics(q_network_cls, observation_spec, discrete.spec, num_critic_replicas * reward_spec.numel,
                               num_atoms, name)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         predict_state_spec=critics.state_spec, reward_weights=reward_weights,
                         train_state_spec=DqnState(critics.state_spec, critics.state_spec), env=env, config=config,
                         rollout_state_spec=DqnState(critics.state_spec, critics.state_spec,
                                                     long_exploration.state_spec if long_exploration else ()),
                         checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._critic_networks = critics
        self._set_target_critics(target_update_tau, target_update_period)
        self._add_given_optimizers((q_optimizer, critics))
        self._critic_losses: Any = nn.ModuleList(_make_losses(
            critic_loss_ctor, num_critic_replicas, {} if num_atoms is None else {'v_min': v_min, 'v_max': v_max},
            debug_summaries))
        self._atoms: Tensor | None
        self.register_buffer('_atoms', atoms, persistent=False)
        self._num_replicas = num_critic_replicas
        self._single_critic = num_critic_replicas * reward_spec.numel == 1
        self._num_rewards = reward_spec.numel if reward_spec.ndim else None
        self._discrete, self._long_exploration = discrete, long_exploration
        self._rollout_epsilon_greedy = as_scheduler(rollout_epsilon_greedy)
        self.set_epsilon_greedy(epsilon_greedy)
        self._target_net_target_action = target_net_target_action
        self._calculate_priority = calculate_priority
        self._train_first_step_only = train_first_step_only
        random_steps = config.initial_collect_steps if config is not None and random_initial_collection else 0
        self._random_steps = random_steps * context.num_ranks()  # sum over ranks, as 'env_steps' is
        self._epsilon: Tensor
        self.register_buffer('_epsilon', torch.zeros(()), persistent=False)  # read by the traced graph
        self._filled_epsilon = 0.0, -1  # latest value and tensor version: loading a state writes to it too
        self._greedy = self._exploring = None
        if not self._critic_networks.is_rnn and is_traceable(self._critic_networks):
            self._greedy = self.recorded(self._best_index, self)
            if long_exploration is None:
                self._exploring = self.recorded(self._exploring_action, self)

    supports_action_mask = True

    def convert_train_state_to_predict_state(self, state: Any) -> NestedTensor:
        """Return the state of the critics."""
        return state.critic

    # Acting ----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the best action, or a random one with probability ``epsilon_greedy``."""
        q_values, state = self._q_values(inputs.observation, state)
        mask = self._discrete.mask_of(inputs)
        best = self._discrete.explore(mask_invalid(q_values, mask).argmax(-1), self._epsilon_greedy, mask)
        return AlgStep(self._discrete.action(best), state, DqnInfo(q_values=q_values))

    @property
    def exploration_rate(self) -> float:
        """Current probability of a uniformly random action in the rollout."""
        return float(self._rollout_epsilon_greedy())

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Return the best action, or a random one with probability ``rollout_epsilon_greedy``.

        If training starts from the states of the rollout, the states of the target critics are computed as well.
        """
        epsilon = self._rollout_epsilon_greedy()
        if self._random_steps and context.get_progress('env_steps') < self._random_steps:
            epsilon = 1.0
        if self._exploring is not None and 0.0 < epsilon < 1.0:
            tensor: Any = self._buffers['_epsilon']  # attribute access takes ten times as long
            if (epsilon, tensor._version) != self._filled_epsilon:
                self._filled_epsilon = epsilon, tensor.fill_(epsilon)._version
            action = self._exploring((inputs.observation, self._discrete.mask_of(inputs)))
            return AlgStep(action, state, DqnInfo(action=action))
        mask = self._discrete.mask_of(inputs)
        is_recurrent = self._greedy is None and self._critic_networks.is_rnn
        if epsilon >= 1.0 and not is_recurrent:
            greedy, new_state = inputs.step_type.new_zeros(inputs.step_type.shape, dtype=torch.int64), ()
        elif self._greedy is not None:
            greedy, new_state = self._greedy((inputs.observation, mask)), ()
        else:
            q_values, new_state = self._q_values(inputs.observation, state.critic)
            greedy = mask_invalid(q_values, mask).argmax(-1)
        target_state = state.target_critic
        if is_recurrent and self.need_full_rollout_state():
            target_state = self._target_critic_networks(inputs.observation, target_state)[1]
        exploration = state.exploration
        if self._long_exploration is None:
            index = self._discrete.explore(greedy, epsilon, mask)
        else:
            index, exploration = self._long_exploration(greedy, epsilon, exploration, mask)
        action = self._discrete.action(index)
        return AlgStep(action, DqnState(new_state, target_state, exploration), DqnInfo(action=action))

    def _best_index(self, observation_and_mask: tuple[NestedTensor, NestedTensor]) -> Tensor:
        """Return the index ``[B]`` of the best action of feed-forward critics, from observation and mask."""
        observation, mask = observation_and_mask
        return mask_invalid(self._q_values(observation, ())[0], mask).argmax(-1)

    def _exploring_action(self, inputs: tuple[NestedTensor, NestedTensor]) -> NestedTensor:
        """Return the best action ``[B]``, or a random one with probability ``_epsilon``, from observation and mask."""
        return self._discrete.action(self._discrete.replace_some(self._best_index(inputs), self._epsilon, inputs[1]))

    def _q_values(self, observation: NestedTensor, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Return the values that compare actions, ``[B, A]``, and the next state of the critics."""
        outputs, state = self._outputs(self._critic_networks, observation, state)
        return self._preference(outputs), state

    # Values ----------------------------------------------------------------------------------------------------

    def _outputs(self, networks: Any, observation: NestedTensor, state: NestedTensor) -> tuple[Tensor, NestedTensor]:
        """Compute outputs ``[B, n, A]`` of critics: ``[B, n, K, A]`` for a K-dimensional reward, ``[B, n, A, N]``
        logits of atoms."""
        outputs, state = networks(observation, state)
        if self._single_critic:
            outputs = outputs.unsqueeze(1)
        if self._num_rewards is not None:
            outputs = outputs.unflatten(1, (self._num_replicas, self._num_rewards))
        return outputs, state

    def _preference(self, outputs: Tensor) -> Tensor:
        """Return the values that compare actions, ``[B, A]``."""
        return q_values.preference(outputs, self._reward_weights, self._atoms)

    # Training --------------------------------------------------------------------------------------------------

    def policy_terms(self, rows: Rows, state: Any) -> tuple[Any, Any, Any]:
        """Compute the critics' outputs, without gradient, if they choose the action to bootstrap from (double DQN)."""
        if self._target_net_target_action:
            return (), (), state
        outputs, critic_state = self._outputs(self._critic_networks, rows.observation, state.critic)
        return outputs.detach(), outputs, state._replace(critic=critic_state)

    def trained_values(self, rows: Rows, details: Any, state: Any) -> tuple[Any, Any]:
        """Compute the values of the action taken: ``[N, n]``, ``[N, n, K]`` or log-probabilities ``[N, n, N]``."""
        if self._target_net_target_action:
            details, critic_state = self._outputs(self._critic_networks, rows.observation, state.critic)
            state = state._replace(critic=critic_state)
        return self._of_action_taken(details, rows), state

    def _of_action_taken(self, outputs: Tensor, rows: Rows) -> Any:
        """Select the values to train from the outputs ``[N, n, ...]`` of the critics, see :meth:`trained_values`."""
        index = self._discrete.index(rows.rollout_info.action)
        if self._atoms is not None:
            return torch.log_softmax(q_values.of_action(outputs, index, 2), -1)
        return q_values.of_action(outputs, index, -1)

    @torch.no_grad()
    def bootstrap_values(self, rows: Rows, policy: Any, state: Any) -> tuple[Any, Any]:
        """Compute the value to bootstrap from, ``[N]``, ``[N, K]`` or probabilities of the atoms."""
        outputs, target_state = self._outputs(self._target_critic_networks, rows.observation, state.target_critic)
        state = state._replace(target_critic=target_state)
        is_double, mask = not self._target_net_target_action, leaf_of_mask(rows.action_mask)
        if not is_double and self._atoms is None and self._reward_weights is None:
            return mask_invalid(q_values.least_values(outputs, None), mask).amax(-1), state
        action = mask_invalid(self._preference(rows.of(policy) if is_double else outputs), mask).argmax(-1)
        if self._atoms is not None:
            probs = torch.softmax(q_values.of_action(outputs, action, 2), -1)
            return q_values.least_distribution(probs, self._atoms), state
        return q_values.of_action(q_values.least_values(outputs, self._reward_weights), action, -1), state

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return the action taken and a :class:`DqnInfo`."""
        action = rollout_info.action
        return action, DqnInfo(reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount,
                               action=action, critic=terms.values, target_critic=terms.target,
                               discounted_return=rollout_info.discounted_return)

    def num_steps_with_gradient(self, length: int) -> tuple[int, int]:
        """Return the number of trained steps twice: the policy terms are outputs of the trained critics."""
        trained = 1 if self._train_first_step_only else length - 1
        return trained, trained

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any) -> AlgStep:
        """Compute :meth:`train_step` for ``[T, B, ...]``, without values that no loss reads.

        If the loss reads one target of a sequence, and that target reads one value, only that value is computed.
        """
        length, batch = inputs.step_type.shape
        reads_one_value = self._train_first_step_only and length > 2 and self._bootstraps_once
        if not reads_one_value or self._critic_networks.is_rnn:
            return super().train_sequence(inputs, state, rollout_info)
        step = bootstrap_steps(inputs.step_type)[0]
        column = torch.arange(batch, device=step.device)
        first = Rows((inputs, rollout_info), partial(steps, start=0, stop=1))
        end_of_return = Rows((inputs, rollout_info), partial(nest.map_structure, lambda x: x[step, column]))
        _, details, _ = self.policy_terms(first, state)
        values, _ = self.trained_values(first, details, state)
        with torch.no_grad():
            policy, _, _ = self.policy_terms(end_of_return, state)
        target, _ = self.bootstrap_values(end_of_return, policy, state)
        target = target.new_zeros(length, batch, *target.shape[1:]).index_put_((step, column), target)
        values = nest.map_structure(lambda x: x.expand(length, *x.shape), values)  # without a loss after the first
        output, info = self.train_info(inputs, rollout_info, Terms((), (), values, target))
        return AlgStep(output, (), info)

    @property
    def _bootstraps_once(self) -> bool:
        """Return whether the target of a step reads a single value, at the step where its return ends."""
        return all(isinstance(loss, TDLoss) and loss.td_lambda == 1.0 and not is_overridden(
            type(loss), 'compute_td_target') for loss in self._critic_losses)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the sum of the losses of all critics, ``[T, B]``, and, if enabled, the priorities ``[B]``."""
        critics = info.critic.unbind(2)
        losses = [critic_loss(info, critic, info.target_critic).loss
                  for critic, critic_loss in zip(critics, self._critic_losses)]
        loss = sum(losses[1:], start=losses[0])
        priority = self._priority(info, critics, loss) if self._calculate_priority else ()
        if self._train_first_step_only:
            loss = q_values.first_step_only(loss)
        return LossInfo(loss=loss, priority=priority, extra=DqnLossInfo(critic=loss))

    @torch.no_grad()
    def _priority(self, info: Any, critics: tuple[Tensor, ...], loss: Tensor) -> Tensor:
        """Return the mean absolute errors ``[B]`` of the critics over the steps that are trained on."""
        if self._atoms is not None:
            return q_values.mean_over_steps(loss / len(critics), info.step_type, self._train_first_step_only)
        target = self._critic_losses[0].compute_td_target(info, info.target_critic)
        error = torch.stack([target - critic[:-1] for critic in critics]).abs().mean(0)
        error = error if error.ndim == 2 else error.mean(-1)
        return q_values.mean_over_steps(pad_end(error, 1), info.step_type, self._train_first_step_only)


# Construction ------------------------------------------------------------------------------------------------------


def _make_atoms(num_atoms: int | None, v_min: float | None, v_max: float | None, reward_spec: TensorSpec,
                name: str) -> Tensor | None:
    """Return the values ``[N]`` of the atoms."""
    if num_atoms is None:
        if v_min is not None or v_max is not None:
            raise ValueError(f'{name}: v_min and v_max are set, the range of the atoms of a distribution, but '
                             'num_atoms is not; set num_atoms (51 in the paper), or remove v_min and v_max')
        return None
    return make_atoms(num_atoms, v_min, v_max, reward_spec, name, 'remove num_atoms')


def make_critics(q_network_cls: Callable[..., Any], observation_spec: NestedTensorSpec, action: BoundedTensorSpec,
                 count: int, num_atoms: int | None, name: str) -> Any:
    """Create ``count`` critics as one network, after checking the output of one critic."""
    distribution = {} if num_atoms is None else {'num_atoms': num_atoms}
    network = q_network_cls(input_tensor_spec=observation_spec, action_spec=action, **distribution)
    num_actions = int(action.maximum - action.minimum) + 1
    expected = (num_actions, ) if num_atoms is None else (num_actions, num_atoms)
    found = getattr(network.output_spec, 'shape', network.output_spec)
    if found != expected:
        raise ValueError(f'{name}.q_network_cls: expected an output of shape {expected} for {num_actions} actions, '
                         f'found {tuple(found)}')
    return network if count == 1 else network.make_parallel(count)


def _make_losses(ctor: Callable[..., Any] | None, count: int, support: dict[str, Any], debug_summaries: bool
                 ) -> list[Any]:
    """Create a loss for each critic; ``support`` is the range of the atoms, if there are any."""
    if ctor is None:
        ctor = CategoricalTDLoss if support else OneStepTDLoss
    return [ctor(debug_summaries=debug_summaries, name=f'critic_loss{i + 1}', **support) for i in range(count)]
