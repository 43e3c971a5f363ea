"""DAgger, imitation of an expert that can be queried (Ross et al. 2011, arXiv:1011.0686).

A cloned policy reaches states that its demonstrations do not cover, because it makes mistakes. In DAgger the policy
itself acts, and the expert labels each step with the action that it would take. The policy clones these labels from all
data collected so far (algorithm 3.1). The replay buffer is the aggregated dataset, and samples from it are trained on
as in :mod:`alfx.algorithms.bc_algorithm`. Whether the expert or the policy acts is drawn at each step:
``expert_probability`` is beta in the paper.
"""
from collections.abc import Callable
from typing import Any

import torch

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.exploration_noise import choose
from alfx.algorithms.bc_algorithm import BcAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BasicRLInfo, TimeStep
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Fraction, configurable, problem_at, takes_arguments_of
from alfx.tensor_specs import NestedTensorSpec, TensorSpec
from alfx.utils.schedulers import as_scheduler


@configurable
class DaggerAlgorithm(BcAlgorithm):
    """Clones the actions of an expert in the states that the policy visits; see the module docstring.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        reward_spec: spec of the reward, which is not used.
        expert_cls: creates the expert, a feed-forward policy; called as ``(observation_spec=, action_spec=,
            reward_spec=)``. It is either written by hand, such as
            :class:`~alfx.algorithms.handcrafted_algorithm.LinearFeedbackAlgorithm`, or an algorithm whose argument
            ``checkpoint`` loads trained weights, ``'alg._rl_algorithm@RUN/train/algorithm/ckpt-N'``. It gets the same
            observation as this algorithm.
        expert_probability: probability of taking the expert's action at a step of the rollout, a number or a schedule.
            The paper starts with 1 and ends with 0; a constant 0 works as well (section 4.1 there).
        kwargs: arguments of :class:`~alfx.algorithms.bc_algorithm.BcAlgorithm`.

    Raises:
        ConfError: there is no expert, or it is recurrent.
    """

    _not_trained = ('_expert', )

    @takes_arguments_of(BcAlgorithm, defaults={'name': 'DaggerAlgorithm'}, after={'expert_cls': 'reward_spec'})
    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, reward_spec: TensorSpec,
                 expert_cls: Callable[..., Any] | None = None,
                 expert_probability: Fraction | Callable[[], float] = 0.0, **kwargs: Any):
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec, **kwargs)
        if expert_cls is None:
            raise ConfError([problem_at(type(self).__name__, 'expert_cls', 'is not set: DAgger needs an expert',
                                        'set it to an algorithm that acts, such as @expert/SacAlgorithm with a '
                                        'checkpoint')])
        self._expert = expert_cls(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec)
        if nest.flatten(self._expert.predict_state_spec):
            raise ConfError([problem_at(type(self).__name__, 'expert_cls', f'= {type(self._expert).__name__}, which '
                                        'is recurrent', 'choose a feed-forward expert')])
        self._expert_probability = as_scheduler(expert_probability)

    def _capabilities_of_parts(self) -> dict[Algorithm, Capabilities]:
        """Return the capabilities of the parts without the expert, which is not trained."""
        return {part: capabilities for part, capabilities in super()._capabilities_of_parts().items()
                if part is not self._expert}

    def check_config(self, config: TrainerConfig) -> None:
        """Accept any configuration: the expert always provides actions to clone."""

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Return the action ``[B, ...]`` of the policy or of the expert; ``info``: the action of the expert."""
        step = super().rollout_step(inputs, state)
        with torch.no_grad():
            expert_state = self._expert.get_initial_predict_state(inputs.step_type.shape[0])
            wanted = self._expert.predict_step(inputs, expert_state).output
        probability, taken = self._expert_probability(), step.output
        if probability > 0:
            taken = choose(probability, wanted, taken)
        return step._replace(output=taken, info=BasicRLInfo(action=wanted))
