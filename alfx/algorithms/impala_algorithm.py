"""IMPALA: actor-critic that learns off-policy from steps of older policies (Espeholt et al. 2018, arXiv:1802.01561).

An unroll is stored with the distributions from which its actions were sampled, trained on as a whole with V-trace, and
dropped. Distributions and values are recomputed at every update, from the recurrent state that the rollout had at the
start of the sequence. It therefore does not matter how old the policy that acted is, or whether it acted in another
process. The loss is in :mod:`alfx.algorithms.vtrace_loss`.

Unlike the synchronous actor-critic, it trains from the replay buffer, because it needs only actions and their
probabilities from the rollout. This also supports several updates, minibatches, and samples of older unrolls (section
5.2.2 of the paper). Differs from the paper in the optimizer, which is set in the conf.
"""
from typing import Any

import torch

from alfx import nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm, ActorCriticState
from alfx.algorithms.vtrace_loss import VTraceLoss
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, configurable, problem_at, takes_arguments_of
from alfx.tensor_specs import NestedTensor

ImpalaInfo = namedtuple('ImpalaInfo', [
    'step_type', 'discount', 'reward', 'action', 'rollout_log_prob', 'log_prob', 'action_distribution', 'value',
    'reward_weights'
], default_value=())
"""Info of ``preprocess_experience`` and ``train_step``, ``[B, ...]`` each; fields that are not needed are ``()``.

``rollout_log_prob`` is the log-probability of ``action`` when it was taken; ``log_prob``, the current one, is filled in
by the loss.
"""


@configurable
class ImpalaAlgorithm(ActorCriticAlgorithm):
    """Policy and value function, trained together with V-trace.

    With ``TrainerConfig.whole_replay_buffer_training`` and ``clear_replay_buffer`` each unroll is trained on for
    ``num_updates_per_train_iter`` epochs (one in the paper), cut into sequences of ``mini_batch_length`` steps
    (``None``: all steps of the unroll), with ``mini_batch_size`` sequences per update (``None``: the number of
    environments). Otherwise sequences are sampled from the replay buffer; the last step of each is only used to
    bootstrap.

    Args:
        loss: a ``VTraceLoss``; ``None``: ``loss_class(debug_summaries=debug_summaries)``.
        kwargs: arguments of :class:`~alfx.algorithms.actor_critic_algorithm.ActorCriticAlgorithm`; ``loss_class`` is
            ``VTraceLoss`` unless given.

    Raises:
        ValueError: the loss is not a ``VTraceLoss``.
    """

    @takes_arguments_of(ActorCriticAlgorithm, defaults={'loss_class': VTraceLoss, 'name': 'ImpalaAlgorithm'})
    def __init__(self, name: str, **kwargs: Any):
        super().__init__(name=name, **kwargs)
        if not isinstance(self._loss, VTraceLoss):
            raise ValueError(f'{name}: expected a VTraceLoss, which corrects for the lag of asynchronous actors; '
                             f'found {type(self._loss).__name__}. Set {type(self).__name__}.loss_class = @VTraceLoss')
        self._value_is_stateless = not nest.flatten(self.train_state_spec.value)

    @property
    def on_policy(self) -> bool | None:
        """Return False: it trains from the replay buffer."""
        return False

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities: the last step is for bootstrapping; infos are recomputed even if recurrent."""
        return super().own_capabilities()._replace(bootstraps_sequences=True,
                                                   recomputes_rollout_info=self._has_own_steps(ImpalaAlgorithm))

    def check_config(self, config: TrainerConfig) -> None:
        """Reject configurations under which ratios or targets would be wrong.

        Raises:
            ConfError: a recurrent policy would be trained from a different state than the one it acted from, sequences
                have no step to bootstrap from, or sampling uses priorities, which the loss does not compute.
        """
        super().check_config(config)
        problems = []

        def refuse(field: str, reason: str, hint: str) -> None:
            problems.append(problem_at('TrainerConfig', field, f'= {getattr(config, field)} is not supported by '
                                       f'{self._name}: {reason}', hint))

        if not config.whole_replay_buffer_training and (config.mini_batch_length or 1) < 2:
            refuse('mini_batch_length', 'the last step of a sampled sequence is only used to bootstrap',
                   'set it to 2 or more')
        if config.priority_replay:
            refuse('priority_replay', 'its loss computes no priorities', 'set it to False')
        if problems:
            raise ConfError(problems)

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Sample an action ``[B, ...]`` and keep its distribution; of the value network only the recurrent
        state is computed."""
        distribution, actor_state = self._policy(inputs, state.actor if state else ())
        value_state = () if self._value_is_stateless else self._value(inputs.observation, state.value)[1]
        info = self._sampled_for_replay(distribution)
        return AlgStep(info.action, ActorCriticState(actor_state, value_state), info)

    def collect_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Call :meth:`rollout_step`."""
        return self.rollout_step(inputs, state)

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Compute the log-probabilities ``[B, T]`` of the actions when they were taken."""
        with torch.no_grad():
            return root_inputs, ImpalaInfo(action=rollout_info.action,
                                           rollout_log_prob=self._rollout_log_prob(rollout_info))

    def _train_info(self, inputs: TimeStep, rollout_info: Any, distribution: NestedTensor, value: torch.Tensor) -> Any:
        return self._completed_info(inputs, rollout_info, distribution, value)
