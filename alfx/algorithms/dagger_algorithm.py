"""DAgger, imitation with an expert that can be asked (Ross et al. 2011, arXiv:1011.0686).

A cloned policy comes into situations that its demonstrations do not show, because of its own mistakes. Here it is the
policy itself that acts, and the expert says at each step what it would have done; that is what is cloned, from all that
has been collected since the beginning (algorithm 3.1). The replay buffer is the aggregated data set, the samples of it
are those of :mod:`alfx.algorithms.bc_algorithm`, and the mixture of expert and policy that acts is drawn anew for each
step: ``expert_probability`` is the paper's beta.
"""
from collections.abc import Callable
from typing import Any

import torch

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.bc_algorithm import BcAlgorithm
from alfx.config import TrainerConfig
from alfx.algorithms.base.exploration_noise import choose
from alfx.data_structures import AlgStep, BasicRLInfo, TimeStep
from alfx.gin_utils import ConfError, configurable, takes_arguments_of
from alfx.gin_utils.value_checks import Fraction, problem_at
from alfx.tensor_specs import NestedTensorSpec, TensorSpec
from alfx.engine.capabilities import Capabilities
from alfx.utils.schedulers import as_scheduler


@configurable
class DaggerAlgorithm(BcAlgorithm):
    """Clones what an expert would have done where the policy has come to; see the module.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        reward_spec: of the rewards, which are not used.
        expert_cls: makes the expert, a policy without memory; called as ``(observation_spec=, action_spec=,
            reward_spec=)``. Either written by hand, such as
            :class:`~alfx.algorithms.handcrafted_algorithm.LinearFeedbackAlgorithm`, or an algorithm whose argument
            ``checkpoint`` loads what has been trained before, ``'alg._rl_algorithm@RUN/train/algorithm/ckpt-N'``; it
            sees the observation as this algorithm does.
        expert_probability: of the expert's action being taken at a step of the rollout, a number or a schedule; 1 at
            first and 0 later in the paper, 0 works as well (section 4.1 there).
        kwargs: those of :class:`~alfx.algorithms.bc_algorithm.BcAlgorithm`.

    Raises:
        ConfError: there is no expert, or it has memory.
    """

    @takes_arguments_of(BcAlgorithm, defaults={'name': 'DaggerAlgorithm'}, after={'expert_cls': 'reward_spec'})
    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, reward_spec: TensorSpec,
                 expert_cls: Callable[..., Any] | None = None,
                 expert_probability: Fraction | Callable[[], float] = 0.0, **kwargs: Any):
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec, **kwargs)
        if expert_cls is None:
            raise ConfError([problem_at(type(self).__name__, 'expert_cls', 'is not set: there is nobody to ask',
                                        'set it to an algorithm that acts, such as @expert/SacAlgorithm with a '
                                        'checkpoint')])
        self._expert = expert_cls(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec)
        if nest.flatten(self._expert.predict_state_spec):
            raise ConfError([problem_at(type(self).__name__, 'expert_cls', f'= {type(self._expert).__name__}, which '
                                        'has memory', 'choose an expert that needs the present observation alone')])
        self._expert_probability = as_scheduler(expert_probability)

    def own_capabilities(self) -> Capabilities:
        """Those of cloning."""
        return super().own_capabilities()

    def _capabilities_of_parts(self) -> dict[Algorithm, Capabilities]:
        """The expert is not trained."""
        return {part: capabilities for part, capabilities in super()._capabilities_of_parts().items()
                if part is not self._expert}

    def _trainable_attributes_to_ignore(self) -> list[str]:
        """The expert."""
        return ['_expert']

    def check_config(self, config: TrainerConfig) -> None:
        """There are always actions of somebody else."""

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """The action ``[B, ...]`` of the policy, or of the expert; ``info``: the action of the expert."""
        step = super().rollout_step(inputs, state)
        with torch.no_grad():
            expert_state = self._expert.get_initial_predict_state(inputs.step_type.shape[0])
            wanted = self._expert.predict_step(inputs, expert_state).output
        probability, taken = self._expert_probability(), step.output
        if probability > 0:
            taken = choose(probability, wanted, taken)
        return step._replace(output=taken, info=BasicRLInfo(action=wanted))
