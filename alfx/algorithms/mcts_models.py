"""Models for tree search. They predict the result of an action and the return that follows.

A model consists of three networks (MuZero, Schrittwieser et al. 2020, arXiv:1911.08265). The representation network
maps an observation to a latent state; the dynamics network maps a latent state and an action to the next latent state;
the prediction network maps a latent state to value, reward, policy and the end of the game. :class:`MCTSModel` is the
interface for the search and for MuZero, with the losses; :class:`SimpleMCTSModel` uses fully connected networks.

Differences from the paper:

- The model also predicts the end of a game, so that the search does not expand states after it.
- Actions may be sampled from the policy (Hubert et al. 2021, arXiv:2104.06303).
- The model can predict the sum of the rewards so far instead of the reward, and the predicted latent state can be
  trained to agree with the latent state of the next observation (EfficientZero, Ye et al. 2021, arXiv:2111.00210).
"""
from collections.abc import Callable
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.nn import functional as F

from alfx import context, nest, summary
from alfx.algorithms.mcts.simple_networks import SimplePredictionNet as SimplePredictionNet
from alfx.algorithms.mcts.simple_networks import (check_actions, create_simple_dynamics_net,
                                                 create_simple_encoding_net, create_simple_prediction_net)
from alfx.data_structures import LossInfo, namedtuple
from alfx.gin_utils import ConfError, Count, NonNegative, StepLimit, configurable, log_unused, problem_at
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec
from alfx.utils import dist_utils
from alfx.utils.losses import AsymmetricSimSiamLoss, MeanSquaredLoss, ScalarPredictionLoss, SquareLoss

ModelState = namedtuple('ModelState', ['state', 'pred_state', 'step', 'prev_reward_sum'], default_value=())
"""State of a model: ``state``, the latent state ``[B, ...]``; ``pred_state``, the state of the prediction network; and,
if sums of rewards are predicted, ``step``, int64 ``[B]``, and ``prev_reward_sum``, ``[B]``, to which the next reward is
added."""

ModelOutput = namedtuple('ModelOutput', ['value', 'reward', 'game_over', 'actions', 'action_probs', 'state',
                                         'action_distribution', 'game_over_logit', 'value_pred', 'reward_pred'],
                         default_value=())
"""Predictions of a model, ``[B, ...]``; ``()`` for quantities that it does not predict.

``value``, ``reward``: ``[B]``, for player 0. ``game_over``: bool ``[B]``. ``actions``: candidates ``[B, K, ...]``;
``()``: all values of a discrete action. ``action_probs``: ``[B, K]``. ``state``: a ``ModelState``. The other fields are
the outputs of the network, from which losses are computed."""

ModelTarget = namedtuple('ModelTarget', ['is_partial_trajectory', 'beyond_episode_end', 'reward', 'action',
                                         'action_policy', 'game_over', 'value', 'observation'], default_value=())
"""Targets for the predictions at a step and the R following steps, ``[B, R + 1, ...]``.

``is_partial_trajectory``: bool ``[B]`` or ``[B, R + 1]``, the episode is not finished (a time limit, or still running).
``beyond_episode_end``: bool, the step is after the last one. ``reward``, ``value``: float, for player 0. ``action``:
candidates ``[B, R + 1, K, ...]``; ``()``: all values of a discrete action. ``action_policy``: ``[B, R + 1, K]``, all
zeros where the policy has no target. ``game_over``: bool. ``observation``: targets of the latent states."""

_ROWS = 3  # rows of latent states in the trial computation of the losses


@configurable
class MCTSModel(nn.Module):
    """Base class of the models used by the search and by MuZero.

    Args:
        num_unroll_steps: R, number of steps that a training sequence is unrolled.
        representation_net: called as ``representation_net(observation)``; returns the latent state.
        dynamics_net: called as ``dynamics_net((latent state, action))``; returns the next latent state.
        prediction_net: called as ``prediction_net(latent state, pred_state)``; its output is ``(value_pred,
            reward_pred, action_distribution, game_over_logit)``, where ``reward_pred`` and ``game_over_logit`` may be
            ``()``.
        train_reward_function: learn to predict rewards; without it they are 0.
        train_game_over_function: learn to predict the end of the game.
        train_repr_prediction: learn to predict the latent states of the observations that follow.
        train_policy: learn the policy, which the search needs.
        predict_reward_sum: ``reward_pred`` is the sum of the rewards since the start of the unroll, not the reward.
        value_loss_weight: weight of the loss of the value.
        reward_loss_weight: weight of the loss of the reward.
        policy_loss_weight: weight of the loss of the policy.
        game_over_loss_weight: weight of the loss of the end of the game.
        repr_prediction_loss_weight: weight of the loss of the latent states.
        initial_alpha: initial weight of the entropy of the policy.
        reward_loss: loss that defines how ``reward_pred`` encodes the reward.
        value_loss: loss that defines how ``value_pred`` encodes the value.
        repr_loss: called with predicted and target latent states ``[B, R + 1, ...]``; returns the loss ``[B, R + 1]``,
            or a ``LossInfo`` with it. It may have parameters.
        target_entropy: lower bound of the entropy; the weight of the entropy is adjusted to reach it. ``None``: the
            weight is constant.
        alpha_adjust_rate: change of that weight per loss, for each nat below the target.
        initial_loss_weight: weight of step 0; ``None``: ``1 / R``, the weight of each other step.
        predict_initial_reward: also predict the reward of step 0, which was received before the unroll.
        reset_reward_sum_period: restart the sum, and the state of the prediction network, after this many steps.
            0: never.
        apply_beyond_episode_end_mask: exclude steps after the end of an episode from the loss of the latent states.
        apply_partial_trajectory_mask: exclude steps after the last known step of an unfinished episode from all
            losses.
        debug_summaries: log the parts of the loss.
        name: prefix of the names of summaries.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, num_unroll_steps: Count, representation_net: Any, dynamics_net: Any, prediction_net: Any,
                 train_reward_function: bool, train_game_over_function: bool, train_repr_prediction: bool = False,
                 train_policy: bool = True, predict_reward_sum: bool = False, value_loss_weight: float = 1.0,
                 reward_loss_weight: float = 1.0, policy_loss_weight: float = 1.0, game_over_loss_weight: float = 1.0,
                 repr_prediction_loss_weight: float = 1.0, initial_alpha: NonNegative = 0.0,
                 reward_loss: ScalarPredictionLoss = SquareLoss(), value_loss: ScalarPredictionLoss = SquareLoss(),
                 repr_loss: Callable[..., Any] = MeanSquaredLoss(batch_dims=2), target_entropy: float | None = None,
                 alpha_adjust_rate: NonNegative = 0.001, initial_loss_weight: float | None = 1.0,
                 predict_initial_reward: bool = True, reset_reward_sum_period: StepLimit = 0,
                 apply_beyond_episode_end_mask: bool = False, apply_partial_trajectory_mask: bool = False,
                 debug_summaries: bool = False, name: str = 'MCTSModel'):
        super().__init__()
        self._representation_net = representation_net
        self._dynamics_net = dynamics_net
        self._prediction_net = prediction_net
        self._train_reward_function = train_reward_function
        self._train_game_over_function = train_game_over_function
        self._train_repr_prediction = train_repr_prediction
        self._train_policy = train_policy
        self._predict_reward_sum = predict_reward_sum
        self._weights = {'value': value_loss_weight, 'reward': reward_loss_weight, 'policy': policy_loss_weight,
                         'game_over': game_over_loss_weight, 'repr': repr_prediction_loss_weight}
        self._reward_loss, self._value_loss, self._repr_loss = reward_loss, value_loss, repr_loss
        self._target_entropy, self._alpha_adjust_rate = target_entropy, alpha_adjust_rate
        self._predict_initial_reward = predict_initial_reward
        self._reset_reward_sum_period = reset_reward_sum_period
        if reset_reward_sum_period and not predict_reward_sum:
            log_unused(name, ['reset_reward_sum_period'], 'predict_reward_sum is False')
        self._apply_beyond_episode_end_mask = apply_beyond_episode_end_mask
        self._apply_partial_trajectory_mask = apply_partial_trajectory_mask
        self._has_entropy_loss = initial_alpha > 0 or target_entropy is not None
        if self._has_entropy_loss and not train_policy:
            raise ValueError(f'{name}: initial_alpha and target_entropy have no effect with train_policy=False')
        self._debug_summaries = debug_summaries
        self._name = name
        per_step = 1.0 / max(num_unroll_steps, 1)
        weights = torch.full((num_unroll_steps + 1, ), per_step)
        weights[0] = per_step if initial_loss_weight is None else initial_loss_weight
        self._step_weights: Tensor
        self.register_buffer('_step_weights', weights, persistent=False)
        self._alpha: Tensor
        self.register_buffer('_alpha', torch.tensor(float(initial_alpha)))

    # Prediction ------------------------------------------------------------------------------------------------

    @property
    def repr_spec(self) -> Any:
        """Spec of the latent state, which is the observation of an algorithm that uses this model."""
        return self._representation_net.output_spec

    @property
    def pred_state_spec(self) -> NestedTensorSpec:
        """Spec of the state of the prediction network."""
        return self._prediction_net.state_spec

    @property
    def num_unroll_steps(self) -> int:
        """Number of unrolled steps R."""
        return len(self._step_weights) - 1

    @property
    def what_is_trained(self) -> dict[str, bool]:
        """Values of ``train_reward_function`` and the other ``train_`` arguments, by name."""
        return {name: getattr(self, f'_{name}') for name in ('train_reward_function', 'train_game_over_function',
                                                             'train_repr_prediction', 'train_policy')}

    @torch.no_grad()
    def check_losses(self) -> None:
        """Reject losses that do not match the output of the prediction network.

        Raises:
            ConfError: a loss does not match; the message names it.
        """
        was_training = self.training
        latent = self.repr_spec.zeros((_ROWS, ))
        value_pred, reward_pred, *_ = self.eval()._prediction_net(latent, self._zero_pred_state(latent))[0]
        self.train(was_training)
        _check_loss('value_loss', self._value_loss, value_pred)
        if self._train_reward_function:
            _check_loss('reward_loss', self._reward_loss, reward_pred)

    def initial_representation(self, observation: NestedTensor) -> Tensor:
        """Return the latent state ``[B, ...]`` of an observation, a nest of ``[B, ...]``."""
        return self._representation_net(observation)[0]

    def initial_predict(self, latent: Tensor, pred_state: NestedTensor = ()) -> Any:
        """Predict from a latent state that represents an observation.

        Args:
            latent: ``[B, ...]``.
            pred_state: ``state.pred_state`` of the output at the previous step; ``()``: zeros.

        Returns:
            A ``ModelOutput``.
        """
        if not nest.flatten(pred_state):
            pred_state = self._zero_pred_state(latent)
        output = self.prediction_model(latent, pred_state)
        if not self._predict_initial_reward and isinstance(output.reward, Tensor):
            output = output._replace(reward=torch.zeros_like(output.reward))
        if not self._predict_reward_sum:
            return output
        step = torch.zeros(len(latent), dtype=torch.int64, device=latent.device)
        return output._replace(state=output.state._replace(step=step, prev_reward_sum=output.reward))

    def recurrent_inference(self, state: Any, action: Tensor) -> Any:
        """Predict the result of an action.

        Args:
            state: a ``ModelState`` of an earlier prediction.
            action: ``[B, ...]``.

        Returns:
            A ``ModelOutput``.
        """
        latent, _ = self._dynamics_net((state.state, action))
        pred_state, before = state.pred_state, state.prev_reward_sum
        if not self._predict_reward_sum:
            return self.prediction_model(latent, pred_state)
        step = state.step + 1
        if self._reset_reward_sum_period:
            restarts = (state.step > 0) & (state.step % self._reset_reward_sum_period == 0)
            before = torch.where(restarts, 0.0, before)
            pred_state = nest.map_structure(lambda x: x * ~restarts.reshape(-1, *[1] * (x.ndim - 1)), pred_state)
        output = self.prediction_model(latent, pred_state)
        return output._replace(reward=output.reward - before,
                               state=output.state._replace(step=step, prev_reward_sum=output.reward))

    def prediction_model(self, dyn_state: Tensor, pred_state: NestedTensor) -> Any:
        """Return the outputs of the prediction network for a latent state ``[B, ...]``, as a ``ModelOutput``.

        ``reward`` is the value that ``reward_pred`` encodes: with ``predict_reward_sum`` it is the sum.
        """
        raise NotImplementedError(f'{type(self).__name__}.prediction_model')

    def with_valid_actions(self, output: Any, valid: Tensor) -> Any:
        """Return the output of :meth:`initial_predict` with valid candidates; used if the model returns candidates.

        Args:
            output: a ``ModelOutput`` with ``actions`` ``[B, K]``.
            valid: bool ``[B, A]``, marks the valid ones of all A values of the action; at least one per row.

        Returns:
            A ``ModelOutput``. If fewer than K actions are valid, the other candidates have the probability 0.
        """
        raise NotImplementedError(f'{type(self).__name__}.with_valid_actions: a model that returns candidates has to '
                                  "choose valid ones if the observation has a 'valid_action_mask'")

    def _zero_pred_state(self, latent: Tensor) -> NestedTensor:
        spec: Any = self.pred_state_spec
        if not nest.flatten(spec):
            return spec
        return nest.map_structure(lambda x: x.zeros((len(latent), )).to(latent.device), spec)

    # Losses ----------------------------------------------------------------------------------------------------

    def calc_loss(self, model_output: Any, target: Any) -> LossInfo:
        """Compute the loss of an unroll.

        Args:
            model_output: a ``ModelOutput`` of ``[B, R + 1, ...]``: the outputs of ``initial_predict`` and of each
                ``recurrent_inference``, stacked. It needs ``value_pred``, and ``reward_pred``, ``game_over_logit``,
                ``action_distribution`` and ``state.state`` for the losses that are switched on.
            target: a ``ModelTarget``; with ``train_repr_prediction`` its ``observation`` holds target latent states.

        Returns:
            ``loss`` ``[B]``: weighted sum over steps and kinds; ``extra``: its parts by name, ``[B]``, without the
            weights of the kinds.

        Raises:
            ValueError: the outputs do not have R + 1 steps.
        """
        steps = target.value.shape[1]
        if steps != len(self._step_weights):
            raise ValueError(f'{self._name}.calc_loss: expected {len(self._step_weights)} steps (num_unroll_steps + 1)'
                             f', found {steps}')
        parts = {'value': _per_step(self._value_loss, model_output.value_pred, target.value)}
        if self._train_reward_function:
            parts['reward'] = self._calc_reward_loss(model_output.reward_pred, target.reward)
        if self._train_policy:
            parts['policy'] = policy_loss(model_output.action_distribution, target.action, target.action_policy)
        if self._train_game_over_function:
            parts['game_over'] = F.binary_cross_entropy_with_logits(
                model_output.game_over_logit, target.game_over.to(model_output.game_over_logit.dtype), reduction='none')
        if self._train_repr_prediction:
            parts['repr'] = self._masked_repr_loss(model_output.state.state, target)
        counts = self._step_weights
        if self._apply_partial_trajectory_mask:
            counts = counts * self._known(target)
        parts = {name: (loss * counts).sum(1) for name, loss in parts.items()}
        loss = sum(self._weights[name] * part for name, part in parts.items())
        if self._has_entropy_loss:
            learns = target.action_policy.sum(-1) > 0
            entropy = torch.where(learns, self._policy_entropy(model_output.action_distribution), 0.0)
            loss = loss - self._alpha.clone() * (entropy * counts).sum(1)
            self._adjust_alpha(entropy.detach(), (counts > 0) & learns)
            parts['entropy'] = (entropy * counts).sum(1)
        if self._debug_summaries and summary.should_record_summaries():
            with summary.scope(self._name):
                for name, part in parts.items():
                    summary.scalar(f'loss/{name}', part.detach().mean())
                summary.scalar('alpha', self._alpha)
        return LossInfo(loss=loss, extra=parts)

    def calc_repr_prediction_loss(self, repr: Tensor, target_repr: Tensor) -> Tensor:
        """Return the loss ``[B, R + 1]`` of predicted latent states; the target comes from observations."""
        loss = self._repr_loss(repr, target_repr)
        return loss.loss if isinstance(loss, LossInfo) else loss

    def _masked_repr_loss(self, repr: Tensor, target: Any) -> Tensor:
        loss = self.calc_repr_prediction_loss(repr, target.observation)
        return loss * ~target.beyond_episode_end if self._apply_beyond_episode_end_mask else loss

    def _calc_reward_loss(self, reward_pred: Tensor, reward: Tensor) -> Tensor:
        if self._predict_reward_sum:
            reward = self.reward_sums(reward)
        loss = _per_step(self._reward_loss, reward_pred, reward)
        return loss if self._predict_initial_reward else torch.cat((torch.zeros_like(loss[:, :1]), loss[:, 1:]), 1)

    def reward_sums(self, reward: Tensor) -> Tensor:
        """Return the target sums of rewards, ``[B, R + 1]`` for rewards ``[B, R + 1]``."""
        sums, before = [], torch.zeros_like(reward[:, 0])
        for step in range(reward.shape[1]):
            total = before if step == 0 and not self._predict_initial_reward else before + reward[:, step]
            sums.append(total)
            restarts = self._reset_reward_sum_period and step and step % self._reset_reward_sum_period == 0
            before = torch.zeros_like(total) if restarts else total
        return torch.stack(sums, 1)

    @staticmethod
    def _known(target: Any) -> Tensor:
        """Return the mask of the steps that have targets, bool ``[B, R + 1]``."""
        partial_ = target.is_partial_trajectory
        return ~((partial_[:, None] if partial_.ndim == 1 else partial_) & target.beyond_episode_end)

    @staticmethod
    def _policy_entropy(distribution: td.Distribution) -> Tensor:
        """Return the entropy of the policy, ``[B, R + 1]``; its gradient is unbiased for any distribution."""
        entropy, for_gradient = dist_utils.entropy_with_fallback(distribution)
        return entropy.detach() + for_gradient - for_gradient.detach()

    @torch.no_grad()
    def _adjust_alpha(self, entropy: Tensor, counts: Tensor) -> None:
        if self._target_entropy is None or not self.training:
            return
        missing, count = (context.sum_over_ranks(x.sum().float()) for x in (
            (self._target_entropy - entropy) * counts, counts))
        missing /= count.clamp_min(1)
        self._alpha.add_(self._alpha_adjust_rate * missing).clamp_min_(0.0)


def _check_loss(argument: str, loss: ScalarPredictionLoss, prediction: Tensor) -> None:
    shape = prediction.shape[:1]
    try:
        fits = loss.calc_expectation(prediction).shape == shape and loss(prediction, prediction.new_zeros(shape)
                                                                         ).shape == shape
    except (IndexError, RuntimeError):  # the shapes do not match
        fits = False
    if not fits:
        count = prediction[0].numel()
        raise ConfError([problem_at('MCTSModel', argument, f'= {type(loss).__name__} does not match a prediction of '
                                    f'{count} number(s)', 'set SimplePredictionNet.num_quantiles to 1 for a SquareLoss '
                                    'and to more for a loss with bins or quantiles')])


def _per_step(loss: ScalarPredictionLoss, prediction: Tensor, target: Tensor) -> Tensor:
    """Return the loss ``[B, R + 1]`` of predictions ``[B, R + 1, ...]``."""
    return loss(prediction.flatten(0, 1), target.flatten()).reshape(target.shape)


def policy_loss(distribution: Any, action: Any, action_policy: Tensor) -> Tensor:
    """Return the cross entropy ``-sum_k policy[k] log p(action[k])``.

    Args:
        distribution: distribution with batch shape ``[...]``.
        action: candidates ``[..., K, ...]``; ``()``: all K values of a discrete action.
        action_policy: ``[..., K]``; actions with 0 do not contribute, even if their log probability is infinite.

    Returns:
        Cross entropy ``[...]``.
    """
    if isinstance(action, Tensor):
        outer = action_policy.ndim - 1
        log_prob = distribution.log_prob(action.movedim(outer, 0)).movedim(0, -1)
    else:
        log_prob = distribution.logits
    return -torch.where(action_policy > 0, action_policy * log_prob, 0.0).sum(-1)


@configurable
class SimpleMCTSModel(MCTSModel):
    """Model made of three networks, fully connected by default.

    Set the other arguments of :class:`MCTSModel` on that class.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: bounded spec of one action.
        num_unroll_steps: R.
        num_sampled_actions: K, number of actions that the search considers. For a scalar discrete action these are the
            K most probable ones, with normalized probabilities; for other actions they are K samples of the policy,
            each with probability ``1 / K``. ``None``: all values of a scalar discrete action.
        encoding_net_ctor: called as ``encoding_net_ctor(observation_spec)``; creates the representation network.
        dynamics_net_ctor: called as ``dynamics_net_ctor((latent spec, action_spec))``; creates the dynamics network.
        prediction_net_ctor: called as ``prediction_net_ctor(latent spec, action_spec)``; creates the prediction
            network.
        game_over_logit_thresh: a game is over if the logit is above this.
        initial_alpha: see :class:`MCTSModel`.
        target_entropy: see :class:`MCTSModel`.
        alpha_adjust_rate: see :class:`MCTSModel`.
        train_reward_function: see :class:`MCTSModel`.
        train_game_over_function: see :class:`MCTSModel`.
        train_policy: see :class:`MCTSModel`.
        train_repr_prediction: see :class:`MCTSModel`; the loss is :class:`~alfx.utils.losses.AsymmetricSimSiamLoss`.
        debug_summaries: see :class:`MCTSModel`.
        name: see :class:`MCTSModel`.

    Raises:
        SpecError: the action is not a single bounded action.
        ValueError: ``num_sampled_actions`` is required but missing, or is not smaller than the number of actions.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: BoundedTensorSpec, num_unroll_steps: Count,
                 num_sampled_actions: Count | None = None,
                 encoding_net_ctor: Callable[..., Any] = create_simple_encoding_net,
                 dynamics_net_ctor: Callable[..., Any] = create_simple_dynamics_net,
                 prediction_net_ctor: Callable[..., Any] = create_simple_prediction_net,
                 game_over_logit_thresh: float = 1.0, initial_alpha: float = 0.0, target_entropy: float | None = None,
                 alpha_adjust_rate: NonNegative = 0.001, train_reward_function: bool = True,
                 train_game_over_function: bool = True, train_policy: bool = True, train_repr_prediction: bool = False,
                 debug_summaries: bool = False, name: str = 'SimpleMCTSModel'):
        check_actions(action_spec, num_sampled_actions, name)
        encoding_net = encoding_net_ctor(observation_spec)
        repr_spec = encoding_net.output_spec
        options: dict[str, Any] = {}
        if train_repr_prediction:
            options['repr_loss'] = AsymmetricSimSiamLoss(input_size=repr_spec.numel, debug_summaries=debug_summaries)
        super().__init__(num_unroll_steps, encoding_net, dynamics_net_ctor((repr_spec, action_spec)),
                         prediction_net_ctor(repr_spec, action_spec), train_reward_function=train_reward_function,
                         train_game_over_function=train_game_over_function, train_policy=train_policy,
                         train_repr_prediction=train_repr_prediction, initial_alpha=initial_alpha,
                         target_entropy=target_entropy, alpha_adjust_rate=alpha_adjust_rate,
                         debug_summaries=debug_summaries, name=name, **options)
        self._num_sampled_actions = num_sampled_actions
        self._is_scalar = action_spec.is_discrete and not action_spec.ndim
        self._first_action = int(action_spec.minimum) if self._is_scalar else 0
        self._action_dtype = action_spec.dtype
        self._game_over_logit_thresh = game_over_logit_thresh

    def prediction_model(self, dyn_state: Tensor, pred_state: NestedTensor) -> Any:
        """Return the outputs of the prediction network as a ``ModelOutput``."""
        output, pred_state = self._prediction_net(dyn_state, pred_state)
        value_pred, reward_pred, distribution, logit = output
        actions, probs = self._candidates(distribution)
        value = self._value_loss.calc_expectation(value_pred)
        reward = torch.zeros_like(value)
        if self._train_reward_function:
            reward = self._reward_loss.calc_expectation(reward_pred)
        return ModelOutput(
            value=value, reward=reward,
            game_over=logit > self._game_over_logit_thresh if self._train_game_over_function else (), actions=actions,
            action_probs=probs, state=ModelState(state=dyn_state, pred_state=pred_state),
            action_distribution=distribution, game_over_logit=logit if self._train_game_over_function else (),
            value_pred=value_pred, reward_pred=reward_pred if self._train_reward_function else ())

    def with_valid_actions(self, output: Any, valid: Tensor) -> Any:
        """Return ``output`` with the most probable valid actions as candidates."""
        logits = output.action_distribution.logits.detach().masked_fill(~valid, -torch.inf)
        actions, probs = self._most_probable(torch.softmax(logits, -1))
        return output._replace(actions=actions, action_probs=probs)

    @torch.no_grad()
    def _candidates(self, distribution: Any) -> tuple[Any, Tensor]:
        """Return the actions that the search considers, ``[B, K, ...]`` or ``()`` for all, and priors ``[B, K]``."""
        k = self._num_sampled_actions
        if self._is_scalar:
            probs = torch.softmax(distribution.logits, -1)
            return ((), probs) if k is None else self._most_probable(probs)
        actions = distribution.sample((k, )).movedim(0, 1).contiguous()
        return actions, torch.full(actions.shape[:2], 1.0 / actions.shape[1], device=actions.device)

    def _most_probable(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K most probable of all actions ``[B, A]``, and their normalized probabilities, ``[B, K]``."""
        assert self._num_sampled_actions is not None, 'without it there are no candidates'
        best = probs.topk(self._num_sampled_actions, -1)
        return ((best.indices + self._first_action).to(self._action_dtype),
                best.values / best.values.sum(-1, keepdim=True))
