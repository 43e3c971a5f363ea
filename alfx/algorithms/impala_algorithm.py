"""IMPALA: an actor-critic that learns from steps of its own older policies (Espeholt et al. 2018, arXiv:1802.01561).

An unroll is stored with the distributions that its actions were sampled from, trained on as a whole with V-trace, and
dropped. Distributions and values are computed anew at every update, from the recurrent state at the start of the
sequence as it was while acting; so it makes no difference how old the policy that acted was, nor whether it acted in
another process. The loss is in :mod:`alfx.algorithms.vtrace_loss`.

It goes through the replay buffer, unlike the synchronous actor-critic, since nothing but the actions and their
probabilities is taken from the rollout: several updates, minibatches, and samples of older unrolls (section 5.2.2 of
the paper) then come for nothing. Differs from the paper in the optimizer, which is the conf's choice.
"""
from typing import Any

import torch

from alfx import nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm, ActorCriticState
from alfx.config import TrainerConfig
from alfx.algorithms.vtrace_loss import VTraceLoss
from alfx.data_structures import AlgStep, BatchInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, configurable, takes_arguments_of
from alfx.gin_utils.value_checks import problem_at
from alfx.tensor_specs import NestedTensor
from alfx.engine.capabilities import Capabilities

ImpalaInfo = namedtuple('ImpalaInfo', [
    'step_type', 'discount', 'reward', 'action', 'rollout_log_prob', 'log_prob', 'action_distribution', 'value',
    'reward_weights'
], default_value=())
"""What ``preprocess_experience`` and ``train_step`` yield, ``[B, ...]`` each; what is not needed is ``()``.

``rollout_log_prob`` is the log-probability of ``action`` when it was taken; ``log_prob``, that of now, is up to the
loss.
"""


@configurable
class ImpalaAlgorithm(ActorCriticAlgorithm):
    """A policy and a value function, trained together with V-trace.

    With ``TrainerConfig.whole_replay_buffer_training`` and ``clear_replay_buffer`` each unroll is trained on for
    ``num_updates_per_train_iter`` epochs (the paper: one), cut into sequences of ``mini_batch_length`` steps (``None``:
    all steps of the unroll), ``mini_batch_size`` sequences an update (``None``: as many as there are environments).
    Without them, sequences are sampled from the replay buffer; the last step of each is only bootstrapped from.

    Args:
        loss: a ``VTraceLoss``; ``None``: ``loss_class(debug_summaries=debug_summaries)``.
        kwargs: those of :class:`~alfx.algorithms.actor_critic_algorithm.ActorCriticAlgorithm`; ``loss_class`` is
            ``VTraceLoss`` unless given.

    Raises:
        ValueError: the loss is not a ``VTraceLoss``.
    """

    @takes_arguments_of(ActorCriticAlgorithm, defaults={'loss_class': VTraceLoss, 'name': 'ImpalaAlgorithm'})
    def __init__(self, name: str, **kwargs: Any):
        super().__init__(name=name, **kwargs)
        if not isinstance(self._loss, VTraceLoss):
            raise ValueError(f'{name}: the loss has to be a VTraceLoss, which corrects for the age of the policy that '
                             f'acted; found {type(self._loss).__name__}. Set {type(self).__name__}.loss_class = '
                             '@VTraceLoss')
        self._value_is_stateless = not nest.flatten(self.train_state_spec.value)

    @property
    def on_policy(self) -> bool | None:
        """False: it trains from the replay buffer."""
        return False

    def own_capabilities(self) -> Capabilities:
        """The last step of a sequence is there to bootstrap from. It recomputes, with memory too."""
        return super().own_capabilities()._replace(bootstraps_sequences=True,
                                             recomputes_rollout_info=self._has_own_steps(ImpalaAlgorithm))

    def check_config(self, config: TrainerConfig) -> None:
        """Refuse configurations under which ratios or targets would be wrong.

        Raises:
            ConfError: a recurrent policy would be trained from another state than it acted from, sequences have no step
                to bootstrap from, or sampling is by a priority that the loss does not have.
        """
        super().check_config(config)
        problems = []

        def refuse(field: str, reason: str, hint: str) -> None:
            problems.append(problem_at('TrainerConfig', field, f'= {getattr(config, field)} does not go with '
                                       f'{self._name}: {reason}', hint))

        if not self._is_stateless and not config.use_rollout_state:
            refuse('use_rollout_state', 'its networks are recurrent, and the probabilities of an action would be those '
                   'from the state while acting and from zeros', 'set it to True')
        if not config.whole_replay_buffer_training and (config.mini_batch_length or 1) < 2:
            refuse('mini_batch_length', 'the last step of a sampled sequence is only bootstrapped from',
                   'set it to 2 or more')
        if config.priority_replay:
            refuse('priority_replay', 'its loss has no priority', 'set it to False')
        if problems:
            raise ConfError(problems)

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Sample an action ``[B, ...]`` and keep its distribution; the value is of no use here, only its state."""
        distribution, actor_state = self._policy(inputs, state.actor if state else ())
        value_state = () if self._value_is_stateless else self._value(inputs.observation, state.value)[1]
        info = self._sampled_for_replay(distribution)
        return AlgStep(info.action, ActorCriticState(actor_state, value_state), info)

    def collect_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """The same as :meth:`rollout_step`."""
        return self.rollout_step(inputs, state)

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """The log-probabilities ``[B, T]`` of the actions when they were taken."""
        with torch.no_grad():
            return root_inputs, ImpalaInfo(action=rollout_info.action,
                                           rollout_log_prob=self._rollout_log_prob(rollout_info))

    def _train_info(self, inputs: TimeStep, rollout_info: Any, distribution: NestedTensor, value: torch.Tensor) -> Any:
        return self._completed_info(inputs, rollout_info, distribution, value)
