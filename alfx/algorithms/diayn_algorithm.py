"""Diversity is all you need: skills that a discriminator can tell apart (Eysenbach et al. 2018, arXiv:1802.06070).

A skill z is drawn for each episode by a goal generator and is part of what the policy sees. A discriminator q(z|s)
learns to tell z from the states that the policy visits, and the policy is rewarded for being told apart (eq. 3):

    r = log q(z|s) - log p(z)

The mean of r is a lower bound of the mutual information of skill and state. Differs from the paper in that

* rewards are divided by the root of their running mean square, so that neither the number of skills nor the progress of
  the discriminator changes their scale. Nothing is subtracted: a shift would undo the term ``-log p(z)``, which keeps
  rewards positive where skills are told apart, so that ending an episode does not pay (section 3.1);
* skills may be vectors: q(z|s) is then a normal distribution of unit variance around a prediction, and p(z) the same
  around the middle of the range of z, so that the reward of a prediction that does not look at s is 0 at best;
* off-policy, a reward is that of the discriminator at the time of the rollout, not of the update.
"""
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.algorithms.intrinsic.intrinsic_reward import hidden_sizes
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.gin_utils import check_value, configurable
from alfx.gin_utils.value_checks import Count, Positive
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.engine.capabilities import Capabilities
from alfx.utils.math_ops import identity
from alfx.utils.normalizers import AdaptiveNormalizer, ScalarAdaptiveNormalizer
from alfx.utils.spec_utils import spec_means_and_magnitudes

DIAYNState = namedtuple('DIAYNState', ['skill', 'has_previous'], default_value=())
"""The skill ``[B, K]`` of the step before; float32 ``[B]``: 1 if there was one."""

DIAYNInfo = namedtuple('DIAYNInfo', ['loss', 'valid', 'accuracy', 'squared_error'], default_value=())
"""``[B]`` each: the loss of the discriminator, 1 where there is one (else 0), and what it got right; off-policy, the
info of ``rollout_step`` is ``()``."""

DIAYNMeasures = namedtuple('DIAYNMeasures', ['accuracy', 'squared_error', 'information'], default_value=())
"""What ``predict_step`` reports, ``[B]`` each, NaN at the first step of an episode: whether a discrete skill was told
right, the mean squared error of a continuous one, and ``log q(z|s) - log p(z)`` in nats."""


@configurable
class DIAYNAlgorithm(Algorithm):
    """Rewards the policy for visiting states from which its skill can be told.

    The observation is ``[representation, skill]``, as an ``Agent`` with a goal generator makes it. The skill of the
    step before is told from the representation that it led to; at the first step of an episode there is neither a
    reward nor a loss.

    Args:
        skill_spec: of one skill: a ``BoundedTensorSpec`` of rank 0 of integers, or K for K discrete skills; a float
            spec ``(K, )`` for continuous ones, or ``None`` for that of the goals in ``observation_spec``. A discrete
            skill is observed as a one-hot float vector ``[B, K]``, or as integers ``[B]``.
        encoding_net: encodes the representation; a network without memory, or a constructor, called as
            ``(input_tensor_spec=)`` with the spec of the representation. The discriminator's loss trains it.
        reward_adapt_speed: of the statistics that rewards are scaled by: of T steps about the last
            ``T / reward_adapt_speed`` count.
        observation_spec: of the representation, or ``[representation, skill]``, which a list of two is taken for. If
            given, representations are normalized by their mean and variance before they are encoded.
        hidden_size: sizes of hidden layers between the encoding and the prediction; a number for one layer.
        hidden_activation: their activation.
        name: name of this algorithm.
        action_spec: not used: part of the interface of an intrinsic reward module.
        normalize_observation: False: do not normalize, although ``observation_spec`` is given.
        optimizer: trains discriminator and ``encoding_net``; None to leave that to the enclosing algorithm.

    Raises:
        ConfError: a number is out of range.
        SpecError: ``skill_spec`` cannot be that of a skill, or does not fit the goals in ``observation_spec``.
        ValueError: ``encoding_net`` has memory, or what it needs is not given.
    """

    _values: Tensor
    _middle: Tensor

    def __init__(self, skill_spec: TensorSpec | int | None, encoding_net: Network | Callable[..., Network],
                 reward_adapt_speed: Positive = 8.0, observation_spec: NestedTensorSpec = None,
                 hidden_size: Count | Sequence[Count] = (), hidden_activation: Callable[[Tensor], Tensor] = torch.relu_,
                 name: str = 'DIAYNAlgorithm', action_spec: NestedTensorSpec = None,
                 normalize_observation: bool = True, optimizer: Any = None):
        sizes = hidden_sizes(hidden_size, 'DIAYNAlgorithm')
        representation_spec, goal_spec = _split(observation_spec)
        skill_spec = _skill_spec(skill_spec, goal_spec, name)
        num_skills = _size(skill_spec, name)
        _check_goals(skill_spec, num_skills, goal_spec, name)
        super().__init__(train_state_spec=DIAYNState(skill=TensorSpec((num_skills, )), has_previous=TensorSpec(())),
                         optimizer=optimizer, name=name)
        self._is_discrete = skill_spec.is_discrete
        self._num_skills = num_skills
        first = int(skill_spec.minimum) if isinstance(skill_spec, BoundedTensorSpec) and self._is_discrete else 0
        self.register_buffer('_values', torch.arange(first, first + num_skills), persistent=False)
        self.register_buffer('_middle', _middle(skill_spec), persistent=False)
        self._encoding_net = _made_network(encoding_net, representation_spec, name)
        self._discriminator = EncodingNetwork(self._encoding_net.output_spec, fc_layer_params=sizes,
                                              activation=hidden_activation, last_layer_size=num_skills,
                                              last_activation=identity, name=f'{name}/discriminator')
        self._reward_normalizer = ScalarAdaptiveNormalizer(speed=reward_adapt_speed, auto_update=False, zero_mean=False,
                                                           name=f'{name}/reward_normalizer')
        self._observation_normalizer = None
        if representation_spec is not None and normalize_observation:
            self._observation_normalizer = AdaptiveNormalizer(representation_spec, auto_update=False,
                                                              name=f'{name}/observation_normalizer')

    # What it is ------------------------------------------------------------------------------------------------

    def own_capabilities(self) -> Capabilities:
        """True, unless something in a network draws numbers or keeps statistics; the normalizers are only read."""
        is_fixed_update = is_traceable(nn.ModuleList([self._encoding_net, self._discriminator]))
        return super().own_capabilities()._replace(traceable_update=is_fixed_update, trains_sequences_at_once=True,
                                             needs_previous_step=True)

    # Steps -----------------------------------------------------------------------------------------------------

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """The reward for the skill of the step before.

        Args:
            inputs: its observation is ``[representation, skill]``, ``[B, ...]`` each.
            state: ``DIAYNState``.

        Returns:
            ``output`` is the reward ``[B]``, ``info`` a ``DIAYNInfo`` on-policy and ``()`` off-policy.
        """
        representation, skill = self._unpacked(inputs)
        if self._observation_normalizer is not None:
            self._observation_normalizer.update(representation)
        valid = _valid(state.has_previous, inputs.step_type)
        prediction = self._predict(representation)
        reward = self._information(prediction.detach(), state.skill) * valid
        self._reward_normalizer.update(reward[valid > 0])
        info = self._info(prediction, state.skill, valid) if self.on_policy else ()
        return AlgStep(self._reward_normalizer.normalize(reward), _next_state(skill), info)

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """As :meth:`rollout_step`, with statistics as they are; ``info`` is a ``DIAYNMeasures``."""
        representation, skill = self._unpacked(inputs)
        valid = _valid(state.has_previous, inputs.step_type)
        prediction = self._predict(representation)
        information = self._information(prediction, state.skill)
        measures = DIAYNMeasures(information=information, **self._score(prediction, state.skill))
        nothing = valid == 0
        info = nest.map_structure(lambda x: x.masked_fill(nothing, torch.nan), measures)
        return AlgStep(self._reward_normalizer.normalize(information * valid), _next_state(skill), info)

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any = None) -> AlgStep:
        """The loss of the discriminator.

        Args:
            inputs: its observation is ``[representation, skill]``, ``[B, ...]`` each.
            state: ``DIAYNState``.
            rollout_info: not looked at.

        Returns:
            ``info`` is a ``DIAYNInfo``; there is no output, as rewards are given in the rollout.
        """
        representation, skill = self._unpacked(inputs)
        valid = _valid(state.has_previous, inputs.step_type)
        info = self._info(self._predict(representation), state.skill, valid)
        return AlgStep((), _next_state(skill), info)

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any = None) -> AlgStep:
        """:meth:`train_step` for ``[T, B, ...]``; of ``state`` only that of the first step is looked at."""
        representation, skill = self._unpacked(inputs)
        time, batch = skill.shape[:2]
        state = nest.map_structure(lambda first, now: torch.cat((first[:1], now[:-1])), state, _next_state(skill))
        valid = _valid(state.has_previous, inputs.step_type).flatten()
        prediction = self._predict(nest.map_structure(lambda x: x.flatten(0, 1), representation))
        info = self._info(prediction, state.skill.flatten(0, 1), valid)
        return AlgStep((), (), nest.map_structure(lambda x: x.reshape(time, batch), info))

    def calc_loss(self, info: Any) -> LossInfo:
        """The loss of the discriminator.

        The loss of arriving at a step is counted at the step before: at LAST, which others have no loss of their own
        at, the discriminator learns as well. Off-policy, where a sequence may begin with a state of the rollout, that
        of arriving at its first step stays there; on-policy the unroll before has counted it.

        Args:
            info: ``DIAYNInfo`` of ``[T, B]``.

        Returns:
            ``loss`` ``[T, B]``; where summaries are written, ``extra`` has the mean of each score.
        """
        arriving = info.loss[1:]
        stays = torch.zeros_like(info.loss[:1]) if self.on_policy else info.loss[:1]
        if len(arriving):
            first = stays + arriving[:1]
            loss = torch.cat((first, arriving[1:], torch.zeros_like(stays)))
        else:
            loss = stays
        if not context.should_record_summaries():
            return LossInfo(loss=loss)
        count = info.valid.sum().clamp(min=1.0)
        extra = nest.map_structure(lambda x: (x * info.valid).sum() / count,
                                   {'discriminator': info.loss, 'accuracy': info.accuracy,
                                    'squared_error': info.squared_error})
        return LossInfo(loss=loss, extra=extra)

    # Maths -----------------------------------------------------------------------------------------------------

    def _unpacked(self, inputs: TimeStep) -> tuple[NestedTensor, Tensor]:
        """The representation, and the skill as a float tensor ``[..., K]``."""
        observation = inputs.observation
        if not isinstance(observation, (list, tuple)) or len(observation) != 2:
            raise ValueError(f'{self._name}: expected the observation [representation, skill], found '
                             f'{type(observation).__name__}; give the agent a goal generator (e.g. '
                             'Agent.goal_generator=@RandomCategoricalGoalGenerator)')
        representation, skill = observation
        if self._is_discrete and not skill.is_floating_point():
            skill = (skill.unsqueeze(-1) == self._values).float()
        if skill.shape[-1] != self._num_skills:
            raise SpecError(f'{self._name}: expected skills of {self._num_skills} components, as skill_spec says, '
                            f'found {skill.shape[-1]}; give the goal generator the same number')
        return representation, skill

    def _predict(self, representation: NestedTensor) -> Tensor:
        """What the discriminator makes of ``[B, ...]``: ``[B, K]`` logits of discrete skills, or the skill itself."""
        if self._observation_normalizer is not None:
            representation = self._observation_normalizer.normalize(representation)
        return self._discriminator(self._encoding_net(representation)[0])[0]

    def _information(self, prediction: Tensor, skill: Tensor) -> Tensor:
        """``log q(z|s) - log p(z)``, ``[B]``, for predictions and skills ``[B, K]``."""
        if self._is_discrete:
            return (skill * torch.log_softmax(prediction, -1)).sum(-1) + math.log(self._num_skills)
        return 0.5 * ((skill - self._middle).square().sum(-1) - (skill - prediction).square().sum(-1))

    def _score(self, prediction: Tensor, skill: Tensor) -> dict[str, Tensor]:
        """Whether the skill was told right, or how far off it was, ``[B]``."""
        prediction = prediction.detach()
        if self._is_discrete:
            return {'accuracy': (prediction.argmax(-1) == skill.argmax(-1)).float()}
        return {'squared_error': (skill - prediction).square().mean(-1)}

    def _info(self, prediction: Tensor, skill: Tensor, valid: Tensor) -> Any:
        """The cross entropy of the discriminator, or its mean square error."""
        if self._is_discrete:
            loss = -(skill * torch.log_softmax(prediction, -1)).sum(-1)
        else:
            loss = (skill - prediction).square().mean(-1)
        return DIAYNInfo(loss=loss * valid, valid=valid, **self._score(prediction, skill))


def _valid(has_previous: Tensor, step_type: Tensor) -> Tensor:
    """1 where the step before belongs to the same episode, else 0."""
    return has_previous * (step_type != StepType.FIRST)


def _next_state(skill: Tensor) -> Any:
    return DIAYNState(skill=skill, has_previous=skill.new_ones(skill.shape[:-1]))


# Specs ---------------------------------------------------------------------------------------------------------


def _split(observation_spec: NestedTensorSpec) -> tuple[NestedTensorSpec, TensorSpec | None]:
    """The specs of representation and goal; ``None`` for what is not known."""
    if type(observation_spec) is list and len(observation_spec) == 2 and isinstance(observation_spec[1], TensorSpec):
        return observation_spec[0], observation_spec[1]
    return observation_spec, None


@configurable
def create_discrete_skill_spec(num_of_skills: Count) -> BoundedTensorSpec:
    """The spec of ``num_of_skills`` discrete skills, int64 ``[]`` from 0."""
    return BoundedTensorSpec((), torch.int64, 0, num_of_skills - 1)


def _skill_spec(skill_spec: TensorSpec | int | None, goal_spec: TensorSpec | None, name: str) -> TensorSpec:
    """The spec that ``skill_spec`` stands for."""
    if isinstance(skill_spec, TensorSpec):
        return skill_spec
    if skill_spec is not None:
        check_value('DIAYNAlgorithm', 'skill_spec', skill_spec, (int, TensorSpec), minimum=1, optional=True)
        return create_discrete_skill_spec(skill_spec)
    if goal_spec is None:
        raise ValueError(f'{name}: skill_spec=None takes the spec of the goals, and observation_spec is not '
                         '[representation, goal]; give a skill_spec, or the agent a goal generator')
    return goal_spec


def _size(skill_spec: TensorSpec, name: str) -> int:
    """The number of discrete skills, or the length of a continuous one."""
    if skill_spec.is_discrete:
        if skill_spec.ndim or not isinstance(skill_spec, BoundedTensorSpec):
            raise SpecError(f'{name}: discrete skills need a skill_spec BoundedTensorSpec of rank 0, such as '
                            f'BoundedTensorSpec((), torch.int64, 0, 4) for 5 of them, found {skill_spec}')
        return int(skill_spec.maximum) - int(skill_spec.minimum) + 1
    if skill_spec.ndim != 1:
        raise SpecError(f'{name}: continuous skills need a skill_spec of rank 1, found {skill_spec}')
    return skill_spec.numel


def _check_goals(skill_spec: TensorSpec, num_skills: int, goal_spec: TensorSpec | None, name: str) -> None:
    """Raise ``SpecError`` if goals are no such skills."""
    if goal_spec is None:
        return
    one_hot = goal_spec.is_continuous and tuple(goal_spec.shape) == (num_skills, )
    if not (one_hot or (skill_spec.is_discrete and goal_spec == skill_spec)):
        raise SpecError(f'{name}: expected goals that fit skill_spec {skill_spec}, that is floats ({num_skills},)'
                        f'{" (one-hot)" if skill_spec.is_discrete else ""}, found {goal_spec}; give the goal generator '
                        'and the algorithm the same number of skills')


def _middle(skill_spec: TensorSpec) -> Tensor:
    """The middle of the range of each component of a continuous skill; 0 where it has no bounds."""
    if isinstance(skill_spec, BoundedTensorSpec) and skill_spec.is_continuous:
        low, high = (torch.as_tensor(bound.copy()) for bound in (skill_spec.minimum, skill_spec.maximum))
        if torch.isfinite(low).all() and torch.isfinite(high).all():
            return spec_means_and_magnitudes(skill_spec)[0]
    return torch.zeros(())


def _made_network(encoding_net: Network | Callable[..., Network], representation_spec: NestedTensorSpec,
                  name: str) -> Network:
    """The encoding network itself, or the one that its constructor makes."""
    if not isinstance(encoding_net, Network):
        if representation_spec is None:
            raise ValueError(f'{name}: a constructor as encoding_net needs observation_spec, the spec of its input')
        encoding_net = encoding_net(input_tensor_spec=representation_spec)
    if encoding_net.is_rnn:
        raise ValueError(f'{name}: expected an encoding_net without memory, found {encoding_net.name}, whose state is '
                         f'{encoding_net.state_spec}')
    return encoding_net
