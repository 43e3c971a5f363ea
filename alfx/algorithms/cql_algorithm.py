"""Conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779) and its calibrated form, Cal-QL (Nakamoto et al. 2023,
arXiv:2303.05479).

No experience corrects the values of actions that are not in the data, and a policy exploits those that are too high.
CQL(H) therefore adds a penalty to the loss of each critic (eq. 4)::

    penalty_weight * E_D[ log sum_a exp(Q(s, a)) - Q(s, a_data) ]

It lowers values of other actions as far as they compete with those in the data. It may lower them below the value of
any policy, which a policy that continues to learn online has to unlearn first. Cal-QL lowers no value below the return
R(s) observed in the data: it replaces ``Q(s, a)`` in the sum by ``max(Q(s, a), R(s))`` (eq. 5.1).

:class:`CqlAlgorithm` is soft actor-critic with this penalty. Its sum over actions is an integral, estimated from
uniformly random actions and actions of the policy; only the latter are calibrated. The published code also samples the
policy of the next step; this implementation follows appendix F of the paper. :class:`DiscreteCqlAlgorithm` is deep
Q-learning with the penalty.
"""
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alfx import nest, norm_layers
from alfx.algorithms.base import critic_values, q_values
from alfx.algorithms.base.exploration_noise import ActionBounds
from alfx.algorithms.bootstrapped_algorithm import Rows, Terms
from alfx.algorithms.dqn_algorithm import DqnAlgorithm, DqnInfo, DqnLossInfo
from alfx.algorithms.offline.offline_losses import log_integral_exp
from alfx.algorithms.sac.actions import Choice
from alfx.algorithms.sac.states import OF_BATCHES
from alfx.algorithms.sac_algorithm import SacAlgorithm, SacInfo, SacLossInfo
from alfx.data_structures import BatchInfo, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Count, NonNegative, configurable, problem_at, takes_arguments_of
from alfx.networks.action_specs import refuse_discrete_actions
from alfx.tensor_specs import NestedTensor, NestedTensorSpec
from alfx.utils import dist_utils
from alfx.utils.discrete_action import leaf_of_mask, mask_invalid

CqlInfo = namedtuple('CqlInfo', [*SacInfo._fields, 'penalty'], default_value=())  # type: ignore[attr-defined]
"""``SacInfo``, and the ``penalty`` ``[B]``, summed over critics."""

CqlLossInfo = namedtuple('CqlLossInfo', [*SacLossInfo._fields, 'penalty'], default_value=())  # type: ignore[attr-defined]
"""Parts of the loss; the critics' part excludes the penalty, which is multiplied by its weight."""

DiscreteCqlInfo = namedtuple('DiscreteCqlInfo', [*DqnInfo._fields, 'penalty'], default_value=())  # type: ignore[attr-defined]
"""``DqnInfo``, and the ``penalty`` ``[B]``, summed over critics."""

DiscreteCqlLossInfo = namedtuple('DiscreteCqlLossInfo', [*DqnLossInfo._fields, 'penalty'], default_value=())  # type: ignore[attr-defined]
"""Parts of the loss, as in ``CqlLossInfo``."""


def _return_in_data(rows: Rows, owner: str) -> Tensor:
    """Return the discounted returns in the data, ``[N]``.

    Raises:
        ConfError: the replay buffer does not record them.
    """
    found = rows.rollout_info.discounted_return
    if not isinstance(found, Tensor):
        raise ConfError([problem_at(owner, 'calibrated', '= True, but the replay buffer does not record returns',
                                    'set ReplayBuffer.record_episodic_return to True, and '
                                    'ReplayBuffer.gamma to the gamma of the loss')])
    return found


def _check_returns(owner: str, gamma: Tensor, step: TimeStep, batch_info: BatchInfo) -> None:
    """Check that the returns of a replay buffer match the rewards and the gamma of the loss.

    They satisfy ``R[t] = r[t+1] + gamma d[t+1] R[t+1]`` within an episode whose return is known.

    Args:
        owner: name of the algorithm's class.
        gamma: discount of the loss, 0-d or ``[K]``.
        step: time steps ``[B, T, ...]`` with the rewards of the loss.
        batch_info: their returns and replay buffer.

    Raises:
        ConfError: they do not.
    """
    now, recorded = batch_info.discounted_return, getattr(batch_info.replay_buffer, 'returns', None)
    if recorded is None:
        return
    follows, discount = ~(step.is_last()[:, :-1] | step.is_first()[:, 1:]), step.discount[:, 1:]
    if now.ndim == 3:
        follows, discount = follows.unsqueeze(-1), discount.unsqueeze(-1)
    reward, now, later = step.reward[:, 1:], now[:, :-1], now[:, 1:]
    error = (reward + gamma * discount * later - now).abs()
    wrong = follows & (now != recorded.default) & (error > 1e-4 * (reward.abs() + later.abs() + now.abs()))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise ConfError([problem_at(
            owner, 'calibrated', f'= True, but the returns that {batch_info.replay_buffer.name} records, with gamma = '
            f'{recorded.gamma}, do not match the rewards that the critics are trained on, with gamma = '
            f'{gamma.tolist()}: a return of {now[at]:.6g} is followed by a reward of {reward[at]:.6g} and a return of '
            f'{later[at]:.6g}', 'set ReplayBuffer.gamma to the gamma of the loss, and leave out transformers and '
            'modules that change rewards (RewardClipping may stay with the same ReplayBuffer.reward_clip)')])


def _with_penalty(loss_info: LossInfo, penalty: Tensor, extra_cls: Any) -> LossInfo:
    """Return ``loss_info`` with ``penalty`` ``[T, B]`` added to the loss."""
    return loss_info._replace(loss=loss_info.loss + penalty, extra=extra_cls(*loss_info.extra, penalty))


def _without_last_step(penalty: Tensor) -> Tensor:
    """Return the penalty ``[T, B]`` with 0 at the last step of a sequence, where the critics are not trained."""
    return torch.cat((penalty[:-1], torch.zeros_like(penalty[-1:])))


@configurable
class CqlAlgorithm(SacAlgorithm):
    """Soft actor-critic with conservative critics; see the module docstring for the method.

    For a multi-dimensional reward the penalty applies to the weighted sum of the values.

    Args:
        action_spec: nest of ``BoundedTensorSpec`` of continuous actions with finite bounds.
        penalty_weight: weight of the penalty, at least 0; alpha in the paper. Larger values keep the policy closer to
            the data.
        num_sampled_actions: number of actions of each kind that estimate the integral.
        calibrated: do not lower values below the returns in the data (Cal-QL). Requires a replay buffer with
            ``record_episodic_return``. Unknown returns are replaced by ``default_return``, and returns of truncated
            episodes are bootstrapped with ``return_after_truncation``. The replay buffer records returns of
            untransformed rewards: transformers must not change rewards, and ``ReplayBuffer.gamma`` must be the gamma of
            the loss. Every minibatch is checked.
        kwargs: arguments of :class:`~alfx.algorithms.sac_algorithm.SacAlgorithm`, without those for discrete actions
            and for the batches of the critics; ``use_entropy_reward`` is False unless given.

    Raises:
        ConfError: a number is out of range, or an action is discrete.
        SpecError: an action has no finite bounds.
    """

    @takes_arguments_of(SacAlgorithm, without=('q_network_cls', *OF_BATCHES),
                        defaults={'use_entropy_reward': False, 'name': 'CqlAlgorithm'},
                        after={'penalty_weight': 'critic_loss_ctor'})
    def __init__(self, action_spec: NestedTensorSpec, penalty_weight: NonNegative = 5.0,
                 num_sampled_actions: Count = 10, calibrated: bool = False, **kwargs: Any):
        owner = type(self).__name__
        refuse_discrete_actions(owner, action_spec, 'use DiscreteCqlAlgorithm')
        super().__init__(action_spec=action_spec, **kwargs)
        self._bounds = ActionBounds(action_spec, owner)
        self._log_uniform = -sum(float(np.log(np.broadcast_to(spec.maximum - spec.minimum, spec.shape)).sum())
                                 for spec in nest.flatten(action_spec))
        self._penalty_weight, self._num_samples, self._calibrated = penalty_weight, num_sampled_actions, calibrated

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Pass on the returns in the data; raise ``ConfError`` if they do not match the rewards of the loss."""
        if self._calibrated:
            _check_returns(type(self).__name__, self._critic_loss.gamma, root_inputs, batch_info)
        return super().preprocess_experience(root_inputs, rollout_info, batch_info)

    def trained_values(self, rows: Rows, details: Choice, state: Any) -> tuple[Any, Any]:
        """Compute the critics' values ``[N, n]`` of the action taken (``[N, n, K]``), and the penalty ``[N]``."""
        observation, critics_state = rows.observation, state.critic.critics
        values, state = super().trained_values(rows, details, state)
        actions, log_density = self._sampled_actions_of(rows.of(details.distribution))
        count = 2 * self._num_samples
        repeated = nest.map_structure(lambda x: _repeated(x, count), (observation, critics_state))
        with norm_layers.running_statistics():  # those of the data
            sampled, _ = self._critic_networks((repeated[0], actions), repeated[1])
        sampled, taken = (critic_values.weighted_sum(x, self._reward_weights) for x in (sampled, values))
        sampled = sampled.unflatten(0, (count, -1))
        if self._calibrated:
            least = critic_values.weighted_sum(_return_in_data(rows, type(self).__name__), self._reward_weights)
            of_policy = torch.maximum(sampled[self._num_samples:], least.unsqueeze(-1))
            sampled = torch.cat((sampled[:self._num_samples], of_policy))
        return (values, (log_integral_exp(sampled, log_density) - taken).sum(1)), state

    @torch.no_grad()
    def _sampled_actions_of(self, distribution: Any) -> tuple[NestedTensor, Tensor]:
        """Sample actions ``[2 m * N, ...]``, first uniformly random, then from the policy, and their log densities ``[2
        m, N]``."""
        repeated = nest.map_structure(lambda x: _repeated(x, self._num_samples), distribution)
        own, log_prob = dist_utils.rsample_action_distribution(repeated, return_log_prob=True)
        log_prob = log_prob.unflatten(0, (self._num_samples, -1))
        uniform = torch.full_like(log_prob, self._log_uniform)
        actions = nest.map_structure(lambda a, b: torch.cat((a, b)), self._bounds.sample_like(own), own)
        return actions, torch.cat((uniform, log_prob))

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return an action of the policy and a :class:`CqlInfo`."""
        values, penalty = terms.values
        output, info = super().train_info(inputs, rollout_info, terms._replace(values=values))
        return output, CqlInfo(*info, penalty)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the soft actor-critic loss with the penalty, ``[T, B]``."""
        penalty = self._penalty_weight * _without_last_step(info.penalty)
        return _with_penalty(super().calc_loss(info), penalty, CqlLossInfo)


@configurable
class DiscreteCqlAlgorithm(DqnAlgorithm):
    """Deep Q-learning with conservative critics; see the module docstring for the method.

    For a multi-dimensional reward the penalty applies to the weighted sum of the values, for distributions to their
    mean.

    Args:
        penalty_weight: weight of the penalty, at least 0; alpha in the paper.
        calibrated: do not lower values below the returns in the data, see :class:`CqlAlgorithm`.
        kwargs: arguments of :class:`~alfx.algorithms.dqn_algorithm.DqnAlgorithm`.

    Raises:
        ConfError: ``penalty_weight`` is negative.
        ValueError: as ``DqnAlgorithm``.
    """

    @takes_arguments_of(DqnAlgorithm, defaults={'name': 'DiscreteCqlAlgorithm'},
                        after={'penalty_weight': 'critic_loss_ctor'})
    def __init__(self, penalty_weight: NonNegative = 1.0, calibrated: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self._penalty_weight, self._calibrated = penalty_weight, calibrated

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Pass on the returns in the data; raise ``ConfError`` if they do not match the rewards of the loss."""
        if self._calibrated:
            _check_returns(type(self).__name__, self._critic_losses[0].gamma, root_inputs, batch_info)
        return super().preprocess_experience(root_inputs, rollout_info, batch_info)

    def _of_action_taken(self, outputs: Tensor, rows: Rows) -> Any:
        """Return the values to train towards targets, and the penalty ``[N]``."""
        values = outputs if self._atoms is None else q_values.expected_values(outputs, self._atoms)
        if self._reward_weights is not None:
            values = torch.einsum('k,bnka->bna', self._reward_weights, values)
        taken = q_values.of_action(values, self._discrete.index(rows.rollout_info.action), -1)
        if self._calibrated:
            least = critic_values.weighted_sum(_return_in_data(rows, type(self).__name__), self._reward_weights)
            values = torch.maximum(values, least.reshape(-1, 1, 1))
        mask = leaf_of_mask(rows.action_mask)
        if isinstance(mask, Tensor):  # invalid actions do not compete with those in the data
            values = mask_invalid(values, mask.unsqueeze(1).expand_as(values))
        return super()._of_action_taken(outputs, rows), (torch.logsumexp(values, -1) - taken).sum(1)

    def train_info(self, inputs: TimeStep, rollout_info: Any, terms: Terms) -> tuple[NestedTensor, Any]:
        """Return the action taken and a :class:`DiscreteCqlInfo`."""
        values, penalty = terms.values
        output, info = super().train_info(inputs, rollout_info, terms._replace(values=values))
        return output, DiscreteCqlInfo(*info, penalty)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the deep Q-learning loss with the penalty, ``[T, B]``."""
        penalty = self._penalty_weight * _without_last_step(info.penalty)
        if self._train_first_step_only:
            penalty = q_values.first_step_only(penalty)
        return _with_penalty(super().calc_loss(info), penalty, DiscreteCqlLossInfo)


def _repeated(x: Tensor, count: int) -> Tensor:
    """Repeat ``[N, ...]`` to ``[count * N, ...]``."""
    return x.expand(count, *x.shape).flatten(0, 1)
