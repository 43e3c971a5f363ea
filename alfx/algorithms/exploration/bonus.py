"""Exploration bonuses with a memory of the episode, as products of factors.

    r[t] = normalize(prod_i factor_i[t]),  0 without a previous step in the episode

Each published reward is a list of factors; the confs that ship with alfx name the papers. The factors compare the
observation that a step arrives at with the earlier steps of the same episode. Their memory is carried from one unroll
to the next (``unroll_state_spec``), and the rewards of an unroll are computed at once, when it is complete. Factors
that depend on models only can be computed again whenever a step is trained on (``rewards = 'sampled'``).
"""
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.algorithms.agent_helpers import AgentHelper
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.exploration.factors import Factor, Seen
from alfx.algorithms.exploration.memory import longer_than_memory, places_of
from alfx.algorithms.exploration.normalization import RewardNormalization
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.algorithms.intrinsic.intrinsic_reward import (IntrinsicRewardAlgorithm, NetworkOrConstructor, make_network,
                                                        output_tensor_spec, rows)
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.gin_utils import ConfError, Fraction, configurable, problem_at
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec

BonusState = namedtuple('BonusState', ['length', 'factors', 'normalization'], default_value=())
"""State of each environment: steps of the episode so far, int64 ``[B]``; the states of the factors, a tuple; the state
of the normalization."""

BonusInfo = namedtuple('BonusInfo', ['inverse_model', 'error_model'], default_value=())
"""Infos of the parts that are trained."""

_BLOCK = 64
"""Maximum number of steps that are compared with each other at once."""


@configurable
class ExplorationBonus(IntrinsicRewardAlgorithm):
    """Intrinsic reward that is a product of factors, see :mod:`alfx.algorithms.exploration.factors`.

    The rewards of an unroll are computed before it is trained on or stored, so the policy algorithm must not need them
    while it acts, as a recurrent policy that trains on-policy does.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of specs of the action.
        factors: constructors of factors, called as ``(observation_spec=, num_features=)``.
        inverse_model: constructor of an ``ICMAlgorithm``, called as ``(observation_spec=, action_spec=)``. The factors
            use its features; its own reward is not used.
        random_network: instead of ``inverse_model``, network with random weights whose output is the feature; a network
            or a constructor, called as ``(input_tensor_spec=)``.
        error_model: constructor of an ``RNDAlgorithm``, called like ``inverse_model``; its prediction error is the
            novelty of factors, its own reward is not used.
        normalization: rule of :class:`~alfx.algorithms.exploration.normalization.RewardNormalization`.
        return_discount: discount of the sum of rewards with ``normalization = 'return_std'``.
        clip_value: if positive, clip normalized rewards to plus and minus this value.
        name: name of this algorithm.
        rewards: 'collected': rewards are computed once, when steps are collected. 'sampled': only the product of the
            factors of scope 'episode' is computed then; each time a step is sampled from the replay buffer, this
            product is multiplied by the other factors, computed with the current models. Rewards then follow the
            models, and each update takes longer. The statistics are still those of collected steps.

    Raises:
        ConfError: there are no factors, or they are incompatible with the models or with ``rewards``.
    """

    _declared_capabilities = {'traceable_update': True}  # the models restrict it
    _not_trained = ('_random_network', )

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec = None,
                 factors: Sequence[Callable[..., Any]] = (), inverse_model: Callable[..., Any] | None = None,
                 random_network: NetworkOrConstructor | None = None, error_model: Callable[..., Any] | None = None,
                 normalization: str = 'none', return_discount: Fraction = 0.99, clip_value: float = -1.0,
                 name: str = 'ExplorationBonus', rewards: Literal['collected', 'sampled'] = 'collected'):
        super().__init__(observation_spec, None, None, None, False, name=name)
        owner = type(self).__name__
        if not factors:
            raise ConfError([problem_at(owner, 'factors', 'is empty', 'set it to (@EpisodicCount, ), for example')])
        if inverse_model is not None and random_network is not None:
            raise ConfError([problem_at(owner, 'random_network', 'is set, but the features are those of inverse_model',
                                        'leave one of them out')])
        self._inverse_model = _made(inverse_model, 'inverse_model', ICMAlgorithm, observation_spec, action_spec)
        self._error_model = _made(error_model, 'error_model', RNDAlgorithm, observation_spec, action_spec)
        self._random_network = None
        num_features = 0 if self._inverse_model is None else self._inverse_model.num_features
        if random_network is not None:
            where = owner, 'random_network'
            self._random_network = make_network(random_network, observation_spec, where)
            num_features = output_tensor_spec(self._random_network, where).numel
        made: list[Factor] = [factor(observation_spec=observation_spec, num_features=num_features)
                              for factor in factors]
        features = 'inverse_model' if random_network is None else 'random_network'
        _check_needs(made, 'feature', features, bool(num_features))
        _check_needs(made, 'error', 'error_model', error_model is not None)
        ensemble = self._inverse_model is not None and self._inverse_model.num_forward_models > 1
        users = [type(factor).__name__ for factor in made if factor.needs_ensemble]
        if users and not ensemble:
            raise ConfError([problem_at(owner, 'factors', f'has {users[0]}, which needs several forward models',
                                        'set inverse_model = @ICMAlgorithm and ICMAlgorithm.num_forward_models = 5')])
        self.rewards_batches = rewards == 'sampled'
        _check_scopes(made, self.rewards_batches, normalization)
        self._factors = nn.ModuleList(made)
        self._normalization = RewardNormalization(normalization, return_discount, clip_value, owner)
        self._capacity = min((factor.capacity for factor in made if factor.capacity), default=None)
        self._block = min(_BLOCK, self._capacity or _BLOCK)
        self._helper, self._trained_parts = AgentHelper(BonusInfo), list[Algorithm]()
        for field, part in (('inverse_model', self._inverse_model), ('error_model', self._error_model)):
            if part is not None:
                self._helper.register_algorithm(part, field)
                self._trained_parts.append(part)

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set :attr:`on_policy`, also of the models."""
        super().set_on_policy(is_on_policy)
        for part in self._trained_parts:
            part.set_on_policy(is_on_policy)

    def check_use(self, rl_algorithm: Any, config: Any) -> None:
        """Reject ``rewards = 'sampled'`` for an algorithm without a replay buffer, for relabeled goals, and for
        batches that are too small; see the base class."""
        if not self.rewards_batches:
            return
        transformer, problem = getattr(config, 'data_transformer', None), ''
        if rl_algorithm.on_policy is not False or config is None or config.trains_on_whole_unrolls:
            problem = f'{type(rl_algorithm).__name__} trains on the steps just collected'
        elif transformer is not None and any(getattr(part, 'goal_fields', ()) for part in transformer.modules()):
            problem = 'the goals of sampled steps, which the models see, are relabeled in hindsight'
        if problem:
            raise ConfError([problem_at('ExplorationBonus', 'rewards', f"= 'sampled', but {problem}",
                                        'choose another bonus, or another policy algorithm')])
        if config.mini_batch_size:
            factors: Any = self._factors
            for factor in factors:
                factor.check_batch(config.mini_batch_size * ((config.mini_batch_length or 1) - 1))

    # Rewards ---------------------------------------------------------------------------------------------------

    @property
    def unroll_state_spec(self) -> NestedTensorSpec:
        """Spec of ``BonusState``."""
        factors: Any = self._factors
        return BonusState(TensorSpec((), torch.int64), tuple(factor.state_spec for factor in factors),
                          self._normalization.state_spec)

    def reward_steps(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Reward steps ``[T, B]`` after ``state``, a ``BonusState``; see the base class.

        With ``rewards = 'sampled'``, the output is the product of the factors of scope 'episode'.

        Raises:
            NonFiniteLossError: a factor is NaN or infinite; the message names it.
        """
        products, stored, follow = [], [], []
        leaves, structure = nest.flatten_with_structure(self._seen(inputs))
        for block in zip(*(x.split(self._block) for x in leaves)):
            step_type, observation, feature, error, action = nest.unflatten(structure, block)
            places = places_of(step_type, state.length)
            seen = Seen(observation, places, feature, error, action, self._inverse_model)
            episodic, factor_states = self._product(seen, state.factors, ('episode', ))
            others, factor_states = self._product(seen, factor_states, ('step', ))
            products.append(episodic * others)
            stored.append(episodic)
            follow.append(places.follows)
            state = BonusState(places.next_length, factor_states, state.normalization)
        reward, normalization_state = self._normalization(torch.cat(products), torch.cat(follow), state.normalization)
        if self.rewards_batches:
            reward = torch.cat(stored)
        if self._capacity is not None and longer_than_memory(state.length, self._capacity, self.path or self.name):
            self._capacity = None  # warn once
        return AlgStep(reward, state._replace(normalization=normalization_state))

    @torch.no_grad()
    def reward_batch(self, root: Any, inputs: TimeStep, stored: Any = ()) -> AlgStep:
        """Reward sampled steps ``[B, T, ...]`` with ``rewards = 'sampled'``; see ``BatchRewards``.

        The first step of each sequence, whose previous step is not known, has no reward. Steps of datasets, for which
        nothing is ``stored``, have none either.
        """
        if not isinstance(stored, Tensor):
            return AlgStep()
        steps = nest.map_structure(lambda x: x.transpose(0, 1), TimeStep(
            step_type=inputs.step_type, observation=inputs.observation, prev_action=inputs.prev_action))
        step_type, observation, feature, error, action = self._seen(steps, is_new=False)
        zeros = step_type.new_zeros(len(inputs.step_type), dtype=torch.int64)
        places = places_of(step_type, zeros)
        seen = Seen(observation, places, feature, error, action, self._inverse_model, is_new=False)
        factors: Any = self._factors
        states = [() if factor.scope == 'episode' else nest.map_structure(
            lambda spec: zeros.new_zeros(len(zeros), *spec.shape, dtype=spec.dtype), factor.state_spec)
            for factor in factors]
        others, _ = self._product(seen, states, ('step', 'batch'))
        return AlgStep(self._normalization.transform(stored.T * others, places.follows).T)

    def _product(self, seen: Seen, states: Sequence[NestedTensor], scopes: tuple[str, ...]) -> tuple[Tensor, Any]:
        """Return the product ``[T, B]`` of the factors of some scopes, and the states of all factors."""
        follows, following = seen.places.follows, []
        product = follows.float()
        for factor, state in zip(self._factors, states):
            if factor.scope in scopes:
                value, state = factor(seen, state)
                if not value[follows].isfinite().all():
                    raise NonFiniteLossError(f'{self.path or self.name}: {type(factor).__name__} is NaN or infinite')
                product = product * value
            following.append(state)
        return product.masked_fill(~follows, 0), tuple(following)

    def _seen(self, inputs: TimeStep, is_new: bool = True) -> tuple[Tensor, NestedTensor, Any, Any, NestedTensor]:
        """Return step types ``[T, B]``, observations, features, errors (``()`` for missing ones) and actions."""
        shape, flat = inputs.step_type.shape, nest.map_structure(rows, inputs.observation)
        feature: Any = ()
        error: Any = ()
        if self._inverse_model is not None:
            feature = self._inverse_model.features(flat, is_new).reshape(*shape, -1)
        elif self._random_network is not None:
            feature = self._random_network(flat)[0].reshape(*shape, -1)
        if self._error_model is not None:
            error = self._error_model.novelty(flat, is_new).reshape(shape)
        return inputs.step_type, inputs.observation, feature, error, inputs.prev_action

    # Training --------------------------------------------------------------------------------------------------

    def pairs_of_unroll(self, inputs: TimeStep) -> NestedTensor:
        """Return a ``BonusInfo`` of what the models train on; see the base class."""
        return self._of_parts(lambda part, _: part.pairs_of_unroll(inputs))

    def train_step(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: Any = ()) -> AlgStep:
        """Run ``train_step`` of the models; ``info``: ``BonusInfo`` ``[B, ...]``.

        Args:
            inputs: time step ``[B, ...]``.
            state: ``()``.
            rollout_info: ``BonusInfo`` of :meth:`pairs_of_unroll`, or ``()``.
        """
        batch = inputs.step_type.shape[0]
        return AlgStep(info=self._of_parts(lambda part, field: part.train_step(
            inputs, part.get_initial_train_state(batch), rollout_info and getattr(rollout_info, field)).info))

    def train_sequence(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: Any = ()) -> AlgStep:
        """Run ``train_sequence`` of the models; a sequence ``[T, B, ...]`` has no step before its first."""
        length, batch = inputs.step_type.shape

        def train(part: Algorithm, field: str) -> NestedTensor:
            zeros = nest.map_structure(lambda x: x.expand(length, *x.shape), part.get_initial_train_state(batch))
            return part.train_sequence(inputs, zeros, rollout_info and getattr(rollout_info, field)).info

        return AlgStep(info=self._of_parts(train))

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the sum of the losses of the models, ``[T, B]``; empty without models."""
        return self._helper.accumulate_loss_info(self._trained_parts, info)

    def _of_parts(self, function: Callable[[Any, str], NestedTensor]) -> NestedTensor:
        """Return a ``BonusInfo`` of ``function(part, field)``; ``()`` if nothing is trained."""
        if not self._trained_parts:
            return ()
        fields = [self._helper.field(part) for part in self._trained_parts]
        return BonusInfo(**{field: function(part, field) for field, part in zip(fields, self._trained_parts)})


def _made(constructor: Callable[..., Any] | None, argument: str, cls: Any, observation_spec: NestedTensorSpec,
          action_spec: NestedTensorSpec) -> Any:
    """Return a model from an argument of the constructor.

    Raises:
        ConfError: it is of another class, or normalizes its own reward, which is not used.
    """
    if constructor is None:
        return None
    part = constructor(observation_spec=observation_spec, action_spec=action_spec)
    if not isinstance(part, cls):
        raise ConfError([problem_at('ExplorationBonus', argument, f'expected @{cls.__name__}, found '
                                    f'{type(part).__name__}')])
    if part.normalizes_reward:
        raise ConfError([problem_at(cls.__name__, 'reward_adapt_speed', f'normalizes a reward that '
                                    f'ExplorationBonus.{argument} does not use', 'set it to None')])
    return part


def _check_scopes(factors: list[Factor], is_sampled: bool, normalization: str) -> None:
    """Reject factors and a normalization that are incompatible with ``rewards``."""
    users = [type(factor).__name__ for factor in factors if factor.scope == 'batch']
    if users and not is_sampled:
        raise ConfError([problem_at('ExplorationBonus', 'rewards', f"= 'collected', but {users[0]} compares the steps "
                                    'of a sampled batch', "set it to 'sampled'")])
    if users and normalization != 'none':
        raise ConfError([problem_at('ExplorationBonus', 'normalization', f'= {normalization!r}, but {users[0]} has no '
                                    'value for collected steps, which the statistics need', "set it to 'none'")])
    if is_sampled and all(factor.scope == 'episode' for factor in factors):
        raise ConfError([problem_at('ExplorationBonus', 'rewards', "= 'sampled', but no factor changes after a step is "
                                    'collected: all of them are episodic', "set it to 'collected'")])
    if is_sampled and normalization == 'min_max':
        raise ConfError([problem_at('ExplorationBonus', 'normalization', "= 'min_max' depends on the other steps of an "
                                    "unroll, but rewards = 'sampled'", "choose 'std', for example")])


def _check_needs(factors: list[Factor], need: str, argument: str, is_given: bool) -> None:
    """Reject factors without the model that they need, and a model that no factor needs."""
    users = [type(factor).__name__ for factor in factors if factor.needs == need]
    if users and not is_given:
        raise ConfError([problem_at('ExplorationBonus', argument, f'= None, but {users[0]} needs it',
                                    'include the conf of a complete bonus, such as e3b.gin')])
    if is_given and not users:
        raise ConfError([problem_at('ExplorationBonus', argument, 'is set, but no factor uses it', 'leave it out')])
