"""Exploration bonuses with a memory of the episode, as products of factors.

    r[t] = normalized(prod_i factor_i[t]),  0 at FIRST

Each published reward is a list of factors, see ``alfx/examples/confs``. Factors with a memory compare an observation
with the earlier ones of the same episode. This memory is carried from one unroll to the next by the engine
(``unroll_state_spec``); rewards are computed for whole unrolls at once.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alfx import nest
from alfx.algorithms.exploration.factors import Factor, Seen
from alfx.algorithms.exploration.memory import places_of
from alfx.algorithms.intrinsic.intrinsic_reward import IntrinsicRewardAlgorithm
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, configurable
from alfx.gin_utils.value_checks import problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec

BonusState = namedtuple('BonusState', ['length', 'factors'], default_value=())
"""State of each environment: steps of the episode so far, int64 ``[B]``, and a tuple of the states of the factors."""

_BLOCK = 64
"""Most steps that are compared with each other at once."""


@configurable
class ExplorationBonus(IntrinsicRewardAlgorithm):
    """Intrinsic reward that is a product of factors.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of the action.
        factors: constructors of :class:`~alfx.algorithms.exploration.factors.Factor`, called as
            ``(observation_spec=, num_features=)``.
        name: name of this algorithm.

    Raises:
        ConfError: there are no factors.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec = None,
                 factors: Sequence[Callable[..., Any]] = (), name: str = 'ExplorationBonus'):
        super().__init__(observation_spec, None, None, None, False, name=name)
        owner = type(self).__name__
        if not factors:
            raise ConfError([problem_at(owner, 'factors', 'is empty', 'set it to (@EpisodicCount, ), for example')])
        made: list[Factor] = [factor(observation_spec=observation_spec, num_features=0) for factor in factors]
        self._factors = torch.nn.ModuleList(made)
        self._block = min([_BLOCK, *(factor.capacity for factor in made if factor.capacity)])

    @property
    def rewards_unrolls_at_once(self) -> bool:
        """Return True."""
        return True

    @property
    def unroll_state_spec(self) -> NestedTensorSpec:
        """Spec of ``BonusState``."""
        return BonusState(TensorSpec((), torch.int64), tuple(factor.state_spec for factor in self._factors))

    def reward_steps(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Reward steps ``[T, B]`` after ``state``, a ``BonusState``; see the base class."""
        rewards = []
        leaves, structure = nest.flatten_with_structure((inputs.step_type, inputs.observation))
        for block in zip(*(x.split(self._block) for x in leaves)):
            step_type, observation = nest.unflatten(structure, block)
            places = places_of(step_type, state.length)
            reward, factor_states = places.follows.float(), []
            for factor, factor_state in zip(self._factors, state.factors):
                value, factor_state = factor(Seen(observation, places), factor_state)
                reward = reward * value
                factor_states.append(factor_state)
            rewards.append(reward)
            state = BonusState(places.next_length, tuple(factor_states))
        return AlgStep(torch.cat(rewards), state)

    def train_step(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Return an empty step: nothing is trained."""
        return AlgStep()

    def train_sequence(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Return an empty step: nothing is trained."""
        return AlgStep()

    def calc_loss(self, info: Any) -> LossInfo:
        """Return an empty ``LossInfo``."""
        return LossInfo()
