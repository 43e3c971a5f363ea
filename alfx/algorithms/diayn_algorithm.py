"""Diversity is all you need: skills that a discriminator can distinguish (Eysenbach et al. 2018, arXiv:1802.06070).

A goal generator samples a skill z for each episode, which is part of the policy's observation. A discriminator q(z|s)
learns to predict z from the states that the policy visits, and the policy is rewarded for visiting states that reveal
its skill (eq. 3):

    r = log q(z|s) - log p(z)

The mean of r is a lower bound of the mutual information of skill and state. Differs from the paper:

* Rewards are divided by the root of their running mean square, so that neither the number of skills nor the progress of
  the discriminator changes their scale. No mean is subtracted: a shift would cancel the term ``-log p(z)``, which keeps
  rewards positive where skills are distinguishable, so that ending an episode does not pay (section 3.1).
* Skills may be vectors. q(z|s) is then a normal distribution of unit variance around a prediction, and p(z) the same
  around the middle of the range of z, so that a prediction that ignores s gets a reward of at most 0.
* Off-policy rewards are computed by the discriminator at the time of the rollout, not of the update.
"""
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.algorithms.intrinsic.intrinsic_reward import hidden_sizes, make_network
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import Count, Positive, check_value, configurable
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity
from alfx.utils.normalizers import AdaptiveNormalizer, ScalarAdaptiveNormalizer
from alfx.utils.spec_utils import spec_means_and_magnitudes

DIAYNState = namedtuple('DIAYNState', ['skill', 'has_previous'], default_value=())
"""The previous step's skill ``[B, K]``, and float32 ``[B]``: 1 if there was a previous step."""

DIAYNInfo = namedtuple('DIAYNInfo', ['loss', 'valid', 'accuracy', 'squared_error'], default_value=())
"""``[B]`` each: the loss of the discriminator, 1 where the loss is valid (else 0), and the scores of the discriminator.
Off-policy the info of ``rollout_step`` is ``()``."""

DIAYNMeasures = namedtuple('DIAYNMeasures', ['accuracy', 'squared_error', 'information'], default_value=())
"""Info of ``predict_step``, ``[B]`` each, NaN at the first step of an episode: 1 if a discrete skill was predicted
correctly (else 0), the mean squared error of a continuous skill, and ``log q(z|s) - log p(z)`` in nats."""


@configurable
class DIAYNAlgorithm(Algorithm):
    """Intrinsic reward for visiting states that reveal the skill of the policy.

    The observation is ``[representation, skill]``, as built by an ``Agent`` with a goal generator. The previous step's
    skill is predicted from the representation that it led to. The first step of an episode has neither a reward nor a
    loss.

    Args:
        skill_spec: spec of one skill: a ``BoundedTensorSpec`` of rank 0 of integers, or K for K discrete skills; a
            float spec ``(K, )`` for continuous skills, or ``None`` for the goal spec in ``observation_spec``. A
            discrete skill is observed as a one-hot float vector ``[B, K]``, or as integers ``[B]``.
        encoding_net: encodes the representation; a feed-forward network, or a constructor, called as
            ``(input_tensor_spec=)`` with the spec of the representation. It is trained by the loss of the
            discriminator.
        reward_adapt_speed: adaptation speed of the statistics that scale rewards: after T steps, about the last ``T /
            reward_adapt_speed`` steps count.
        observation_spec: spec of the representation, or ``[representation, skill]`` if it is a list of two. If given,
            representations are normalized by their mean and variance before they are encoded.
        hidden_size: sizes of hidden layers between the encoding and the prediction; a number for one layer.
        hidden_activation: activation of the hidden layers.
        name: name of this algorithm.
        action_spec: not used; part of the interface of an intrinsic reward module.
        normalize_observation: set to False to disable normalization even if ``observation_spec`` is given.
        optimizer: trains discriminator and ``encoding_net``; None to leave that to the enclosing algorithm.

    Raises:
        ConfError: a number is out of range.
        SpecError: ``skill_spec`` is not a valid spec of a skill, or does not match the goals in ``observation_spec``.
        ValueError: ``encoding_net`` is recurrent, or a required argument is missing.
    """

    _values: Tensor
    _middle: Tensor

    def __init__(self, skill_spec: TensorSpec | int | None, encoding_net: Network | Callable[..., Network],
                 reward_adapt_speed: Positive = 8.0, observation_spec: NestedTensorSpec = None,
                 hidden_size: Count | Sequence[Count] = (), hidden_activation: Callable[[Tensor], Tensor] = torch.relu_,
                 name: str = 'DIAYNAlgorithm', action_spec: NestedTensorSpec = None,
                 normalize_observation: bool = True, optimizer: Any = None):
        sizes = hidden_sizes(hidden_size)
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
        self._observation_normalizer = None
        if representation_spec is not None and normalize_observation:
            self._observation_normalizer = AdaptiveNormalizer(representation_spec, auto_update=False,
                                                              name=f'{name}/observation_normalizer')
            representation_spec = nest.map_structure(lambda spec: TensorSpec(spec.shape), representation_spec)
        self._encoding_net = make_network(encoding_net, representation_spec, ('DIAYNAlgorithm', 'encoding_net'))
        self._discriminator = EncodingNetwork(self._encoding_net.output_spec, fc_layer_params=sizes,
                                              activation=hidden_activation, last_layer_size=num_skills,
                                              last_activation=identity, name=f'{name}/discriminator')
        self._reward_normalizer = ScalarAdaptiveNormalizer(speed=reward_adapt_speed, auto_update=False, zero_mean=False,
                                                           name=f'{name}/reward_normalizer')

    # Capabilities ----------------------------------------------------------------------------------------------

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are traceable unless a layer draws random numbers or keeps statistics."""
        is_fixed_update = is_traceable(nn.ModuleList([self._encoding_net, self._discriminator]))
        return super().own_capabilities()._replace(traceable_update=is_fixed_update, trains_sequences_at_once=True,
                                                   needs_previous_step=True)

    # Steps -----------------------------------------------------------------------------------------------------

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Compute the reward for the previous step's skill.

        Args:
            inputs: time step whose observation is ``[representation, skill]``, ``[B, ...]`` each.
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
        return AlgStep(self._reward_normalizer.transform(reward), _next_state(skill), info)

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Compute :meth:`rollout_step` without updating statistics; ``info`` is a ``DIAYNMeasures``."""
        representation, skill = self._unpacked(inputs)
        valid = _valid(state.has_previous, inputs.step_type)
        prediction = self._predict(representation)
        information = self._information(prediction, state.skill)
        measures = DIAYNMeasures(information=information, **self._score(prediction, state.skill))
        nothing = valid == 0
        info = nest.map_structure(lambda x: x.masked_fill(nothing, torch.nan), measures)
        return AlgStep(self._reward_normalizer.transform(information * valid), _next_state(skill), info)

    def train_step(self, inputs: TimeStep, state: Any, rollout_info: Any = None) -> AlgStep:
        """Compute the loss of the discriminator.

        Args:
            inputs: time step whose observation is ``[representation, skill]``, ``[B, ...]`` each.
            state: ``DIAYNState``.
            rollout_info: not used.

        Returns:
            ``info`` is a ``DIAYNInfo``; there is no output, because rewards are computed in the rollout.
        """
        representation, skill = self._unpacked(inputs)
        valid = _valid(state.has_previous, inputs.step_type)
        return AlgStep((), _next_state(skill), self._info(self._predict(representation), state.skill, valid))

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any = None) -> AlgStep:
        """Compute :meth:`train_step` for ``[T, B, ...]``; only the first step of ``state`` is used."""
        representation, skill = self._unpacked(inputs)
        time, batch = skill.shape[:2]
        state = nest.map_structure(lambda first, now: torch.cat((first[:1], now[:-1])), state, _next_state(skill))
        valid = _valid(state.has_previous, inputs.step_type).flatten()
        prediction = self._predict(nest.map_structure(lambda x: x.flatten(0, 1), representation))
        info = self._info(prediction, state.skill.flatten(0, 1), valid)
        return AlgStep((), (), nest.map_structure(lambda x: x.reshape(time, batch), info))

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the loss of the discriminator.

        The loss of arriving at a step is assigned to the previous step, so that the discriminator also learns from
        LAST, where other losses are 0. Off-policy a sequence may begin with a state of the rollout; the loss of
        arriving at its first step then stays at that step. On-policy the previous unroll has already counted it.

        Args:
            info: ``DIAYNInfo`` of ``[T, B]``.

        Returns:
            ``loss`` ``[T, B]``; when summaries are recorded, ``extra`` has the mean of each score.
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

    # Terms -----------------------------------------------------------------------------------------------------

    def _unpacked(self, inputs: TimeStep) -> tuple[NestedTensor, Tensor]:
        """Return the representation, and the skill as a float tensor ``[..., K]``."""
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
        """Predict ``[B, K]`` from ``[B, ...]``: logits of discrete skills, or the continuous skill itself."""
        if self._observation_normalizer is not None:
            representation = self._observation_normalizer.transform(representation)
        return self._discriminator(self._encoding_net(representation)[0])[0]

    def _information(self, prediction: Tensor, skill: Tensor) -> Tensor:
        """Compute ``log q(z|s) - log p(z)``, ``[B]``, for predictions and skills ``[B, K]``."""
        if self._is_discrete:
            return (skill * torch.log_softmax(prediction, -1)).sum(-1) + math.log(self._num_skills)
        return 0.5 * ((skill - self._middle).square().sum(-1) - (skill - prediction).square().sum(-1))

    def _score(self, prediction: Tensor, skill: Tensor) -> dict[str, Tensor]:
        """Return the accuracy of the predicted skill or its squared error, ``[B]``."""
        prediction = prediction.detach()
        if self._is_discrete:
            return {'accuracy': (prediction.argmax(-1) == skill.argmax(-1)).float()}
        return {'squared_error': (skill - prediction).square().mean(-1)}

    def _info(self, prediction: Tensor, skill: Tensor, valid: Tensor) -> Any:
        """Compute the cross entropy of the discriminator, or its mean squared error."""
        if self._is_discrete:
            loss = -(skill * torch.log_softmax(prediction, -1)).sum(-1)
        else:
            loss = (skill - prediction).square().mean(-1)
        return DIAYNInfo(loss=loss * valid, valid=valid, **self._score(prediction, skill))


def _valid(has_previous: Tensor, step_type: Tensor) -> Tensor:
    """Return 1 where the previous step belongs to the same episode, else 0."""
    return has_previous * (step_type != StepType.FIRST)


def _next_state(skill: Tensor) -> Any:
    return DIAYNState(skill=skill, has_previous=skill.new_ones(skill.shape[:-1]))


# Specs ---------------------------------------------------------------------------------------------------------


def _split(observation_spec: NestedTensorSpec) -> tuple[NestedTensorSpec, TensorSpec | None]:
    """Return the specs of representation and goal; ``None`` for an unknown spec."""
    if type(observation_spec) is list and len(observation_spec) == 2 and isinstance(observation_spec[1], TensorSpec):
        return observation_spec[0], observation_spec[1]
    return observation_spec, None


@configurable
def create_discrete_skill_spec(num_of_skills: Count) -> BoundedTensorSpec:
    """Create the spec of ``num_of_skills`` discrete skills, int64 ``[]`` from 0."""
    return BoundedTensorSpec((), torch.int64, 0, num_of_skills - 1)


def _skill_spec(skill_spec: TensorSpec | int | None, goal_spec: TensorSpec | None, name: str) -> TensorSpec:
    """Return the spec that ``skill_spec`` stands for."""
    if isinstance(skill_spec, TensorSpec):
        return skill_spec
    if skill_spec is not None:
        check_value('DIAYNAlgorithm', 'skill_spec', skill_spec, (int, TensorSpec), minimum=1, optional=True)
        return create_discrete_skill_spec(skill_spec)
    if goal_spec is None:
        raise ValueError(f'{name}: skill_spec=None uses the goal spec, but observation_spec is not '
                         '[representation, goal]; set skill_spec, or add a goal generator to the agent')
    return goal_spec


def _size(skill_spec: TensorSpec, name: str) -> int:
    """Return the number of discrete skills, or the length of a continuous skill."""
    if skill_spec.is_discrete:
        if skill_spec.ndim or not isinstance(skill_spec, BoundedTensorSpec):
            raise SpecError(f'{name}: discrete skills need a skill_spec BoundedTensorSpec of rank 0, such as '
                            f'BoundedTensorSpec((), torch.int64, 0, 4) for 5 of them, found {skill_spec}')
        return int(skill_spec.maximum) - int(skill_spec.minimum) + 1
    if skill_spec.ndim != 1:
        raise SpecError(f'{name}: continuous skills need a skill_spec of rank 1, found {skill_spec}')
    return skill_spec.numel


def _check_goals(skill_spec: TensorSpec, num_skills: int, goal_spec: TensorSpec | None, name: str) -> None:
    """Raise ``SpecError`` if goals do not match the spec of skills."""
    if goal_spec is None:
        return
    one_hot = goal_spec.is_continuous and tuple(goal_spec.shape) == (num_skills, )
    if not (one_hot or (skill_spec.is_discrete and goal_spec == skill_spec)):
        raise SpecError(f'{name}: expected goals that fit skill_spec {skill_spec}, that is floats ({num_skills},)'
                        f'{" (one-hot)" if skill_spec.is_discrete else ""}, found {goal_spec}; give the goal generator '
                        'and the algorithm the same number of skills')


def _middle(skill_spec: TensorSpec) -> Tensor:
    """Return the middle of the range of each component of a continuous skill; 0 without bounds."""
    if isinstance(skill_spec, BoundedTensorSpec) and skill_spec.is_continuous:
        low, high = (torch.as_tensor(bound.copy()) for bound in (skill_spec.minimum, skill_spec.maximum))
        if torch.isfinite(low).all() and torch.isfinite(high).all():
            return spec_means_and_magnitudes(skill_spec)[0]
    return torch.zeros(())
