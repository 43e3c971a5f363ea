"""Model-based reinforcement learning by planning (Chua et al. 2018, PETS, arXiv:1805.12114).

The algorithm learns a model of the dynamics from experience, and a planner searches for the best actions in this model.
The cost of a sequence of actions is the negative sum of the rewards of the steps imagined with it:

    J(a[0..H-1]) = - sum_h gamma^h alive[h] r(s[h+1], a[h])        s[h+1] ~ model(s[h], a[h])

averaged over particles. Each particle uses the same network of the ensemble at all steps (TS-infinity in the paper).
``alive`` is 1 until the imagined episode ends, and 0 afterwards. Unlike the paper, the cross-entropy method clips
normal samples to the bounds; it does not draw from a truncated normal. :class:`LatentMbrlAlgorithm` plans in the latent
space of a :class:`~alfx.algorithms.predictive_representation_learner.PredictiveRepresentationLearner`.
"""
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.dynamics_learning_algorithm import (DeterministicDynamicsAlgorithm, DynamicsLearningAlgorithm,
                                                         DynamicsState)
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.planning_algorithm import PlanAlgorithm
from alfx.algorithms.predictive_representation_learner import PredictiveRepresentationLearner
from alfx.algorithms.reward_learning_algorithm import FixedRewardFunction
from alfx.algorithms.world_models import LearnsModel, reject_observation_transformers, termination_function
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import ConfError, Count, Fraction, configurable, problem_at, takes_arguments_of
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec

MbrlState = namedtuple('MbrlState', ['dynamics', 'reward', 'planner'], default_value=())
"""State of each module."""

MbrlInfo = namedtuple('MbrlInfo', ['dynamics', 'reward', 'planner'], default_value=())
"""Info of each module."""


@configurable
class MbrlAlgorithm(LearnsModel, OffPolicyAlgorithm):
    """Model-based agent that learns a dynamics model and plans its actions with it.

    Args:
        observation_spec: spec of the observation, the input of the planner: float32 ``[D]``.
        action_spec: spec of one continuous action with finite bounds.
        reward_module: learned or given reward of an imagined step: an algorithm, or a constructor called as
            ``(feature_spec=, action_spec=, reward_spec=)``.
        planner_module_ctor: creates the planner, called as ``(feature_spec=, action_spec=, reward_spec=)``.
        feature_spec: spec of the model's input; ``None``: ``observation_spec``.
        dynamics_module_ctor: creates the model, called as ``(feature_spec=, action_spec=)``; ``None``:
            :class:`~alfx.algorithms.dynamics_learning_algorithm.DeterministicDynamicsAlgorithm`.
        reward_spec: rank 0, or rank 1 for K rewards, which are summed with ``reward_weights``.
        particles_per_replica: number of particles per network of the ensemble; more particles estimate the cost of a
            sequence better and take longer.
        epsilon_greedy: probability of a random action in evaluation; ``None``: ``config.epsilon_greedy``.
        env: batched environment; only the root algorithm has it.
        config: configuration.
        dynamics_optimizer: optimizes the parameters of the model.
        reward_optimizer: optimizes the parameters of the reward module.
        planner_optimizer: optimizes the parameters of the planner.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.
        discount: gamma of the imagined rewards.
        termination_fn: maps imagined observations ``[N, D]`` to bool ``[N]``, ``True`` where the episode ends; or the
            name of an entry of :data:`alfx.algorithms.base.known_tasks.TERMINATIONS`, such as ``'hopper'``.
        optimizer: optimizes all parameters that have no other optimizer.

    Raises:
        ConfError: an argument is out of range, or an optimizer has no parameters.
        SpecError: the planner or the model cannot work with the specs.
    """

    _declared_capabilities = {'traceable_update': True, 'trains_sequences_at_once': True}  # the modules restrict it

    _no_info = MbrlInfo()

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: BoundedTensorSpec, reward_module: Any,
                 planner_module_ctor: Callable[..., PlanAlgorithm], feature_spec: TensorSpec | None = None,
                 dynamics_module_ctor: Callable[..., DynamicsLearningAlgorithm] | None = None,
                 reward_spec: TensorSpec = TensorSpec(()), particles_per_replica: Count = 1,
                 epsilon_greedy: Fraction | None = None, env: Any = None, config: TrainerConfig | None = None,
                 dynamics_optimizer: Any = None, reward_optimizer: Any = None, planner_optimizer: Any = None,
                 checkpoint: str | None = None, debug_summaries: bool = False, name: str = 'MbrlAlgorithm',
                 discount: Fraction = 1.0, termination_fn: Callable[[Tensor], Tensor] | str = 'none',
                 optimizer: Any = None):
        owner = type(self).__name__
        feature_spec = observation_spec if feature_spec is None else feature_spec
        planner = planner_module_ctor(feature_spec=feature_spec, action_spec=action_spec, reward_spec=reward_spec)
        dynamics = self._make_dynamics(dynamics_module_ctor, feature_spec, action_spec)
        if reward_module is not None and not isinstance(reward_module, Algorithm):
            reward_module = reward_module(feature_spec=feature_spec, action_spec=action_spec, reward_spec=reward_spec)
        state_spec = MbrlState(dynamics=() if dynamics is None else dynamics.get_state_specs(),
                               reward=() if reward_module is None else reward_module.train_state_spec,
                               planner=planner.train_state_spec)
        super().__init__(observation_spec, action_spec, reward_spec=reward_spec, train_state_spec=state_spec, env=env,
                         config=config, optimizer=optimizer, checkpoint=checkpoint, debug_summaries=debug_summaries,
                         name=name)
        self._dynamics_module = dynamics
        self._reward_module: Any = reward_module
        self._planner_module = planner
        self._particles, self._discount = particles_per_replica, discount
        self._termination_fn = termination_function(owner, termination_fn)
        planner.set_action_sequence_cost_func(self._calc_cost)
        if dynamics is not None:
            self._imagine = self.recorded(self._imagined, *(x for x in (dynamics, reward_module) if x is not None))
        self.set_epsilon_greedy(epsilon_greedy)
        for argument, given, module in (('dynamics_optimizer', dynamics_optimizer, dynamics),
                                        ('reward_optimizer', reward_optimizer, reward_module),
                                        ('planner_optimizer', planner_optimizer, planner)):
            if given is not None:
                _check_trainable(owner, argument, module)
                self.add_optimizer(given, [module])

    def _make_dynamics(self, ctor: Callable[..., DynamicsLearningAlgorithm] | None, feature_spec: Any,
                       action_spec: BoundedTensorSpec) -> DynamicsLearningAlgorithm | None:
        return (ctor or DeterministicDynamicsAlgorithm)(feature_spec=feature_spec, action_spec=action_spec)

    def check_config(self, config: TrainerConfig) -> None:
        """Reject transformers of observations if the reward or the end of an episode is a given function of them."""
        super().check_config(config)
        if self._termination_fn is not None or isinstance(self._reward_module, FixedRewardFunction):
            reject_observation_transformers(config, self._name)

    def on_parts_built(self, parts: Mapping[str, Algorithm]) -> None:
        """Reject parts that change the observation, because the model learns from environment observations.

        Raises:
            ConfError: the agent has a representation learner or a goal generator.
        """
        for field, argument in (('repr', 'representation_learner_cls'), ('goal_generator', 'goal_generator')):
            if field in parts:
                raise ConfError([problem_at('Agent', argument, f'= {type(parts[field]).__name__} cannot be combined '
                                            f'with {self._name}, which plans with observations of the environment',
                                            'leave it out, or plan in a latent space (LatentMbrlAlgorithm)')])

    # Steps -----------------------------------------------------------------------------------------------------

    def _plan(self, time_step: TimeStep, state: Any, epsilon_greedy: float) -> AlgStep:
        action, planner = self._planner_module.predict_plan(time_step, state.planner, epsilon_greedy)
        if self._dynamics_module is not None:
            state = state._replace(dynamics=self._dynamics_module.update_state(time_step, state.dynamics))
            if self._reward_module.train_state_spec != ():
                state = state._replace(reward=self._reward_module.state_at(time_step.observation))
        return AlgStep(action, state._replace(planner=planner), MbrlInfo())

    def predict_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Plan; ``output`` is the action ``[B, ...]``."""
        return self._plan(time_step, state, self._epsilon_greedy)

    def rollout_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Plan; ``info`` is empty because the modules learn from the replay buffer."""
        return self._plan(time_step, state, 0.0)

    def after_update(self, root_inputs: NestedTensor, training_info: Any) -> None:
        """Call ``after_update`` of all modules."""
        for module in (self._dynamics_module, self._reward_module, self._planner_module):
            if module is not None:
                module.after_update(root_inputs, ())

    # Imagination -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _calc_cost(self, observation: NestedTensor, actions: Tensor) -> Tensor:
        """Return the cost of sequences of actions.

        Args:
            observation: ``[B, D]``.
            actions: ``[B, P, H, dim]``.

        Returns:
            Cost ``[B, P]``.
        """
        batch, population, horizon, _ = actions.shape
        actions = actions.flatten(0, 1).repeat_interleave(self._particles, 0)
        steps = actions.reshape(len(actions), horizon, *self._action_spec.shape).to(self._action_spec.dtype).unbind(1)
        seen: Any = observation
        feature = seen.repeat_interleave(population * self._particles, 0)
        state, reward_state, factor = DynamicsState(feature=feature), self._reward_module.state_at(feature), 1.0
        total: Any = 0.0
        alive: Any = None
        for action in steps:
            state, reward, reward_state = self._imagine((state, action, reward_state))
            total = total + factor * (reward if alive is None else reward * alive)
            if self._termination_fn is not None:
                ends = self._termination_fn(state.feature.flatten(0, -2)).view(state.feature.shape[:-1])
                alive = ~ends if alive is None else alive & ~ends
            factor *= self._discount
        return -self._mean(total).view(batch, population, self._particles).mean(-1)

    def _imagined(self, inputs: tuple[Any, Tensor, Any]) -> tuple[Any, Tensor, Any]:
        """Map (model state, action, reward state) to (next model state, reward, next reward state)."""
        assert self._dynamics_module is not None, 'a planner on observations has a model'
        state, action, reward_state = inputs
        state = self._dynamics_module.predict_step(TimeStep(prev_action=action), state).state
        reward, reward_state = self._reward(state.feature, action, reward_state)
        return state, reward, reward_state

    def _reward(self, feature: Tensor, action: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the reward ``[N]`` or ``[N, n]`` of arriving at features ``[N, D]`` or ``[N, n, D]``."""
        if feature.ndim == 2:
            reward, state = self._reward_module.compute_reward(feature, action, state)
            return self._weighted(reward), state
        count, replicas, _ = feature.shape
        action = action.unsqueeze(1).expand(count, replicas, *action.shape[1:]).flatten(0, 1)
        # The first imagined step starts from one observation shared by all replicas.
        state = nest.map_structure(lambda x: x.repeat_interleave(replicas, 0) if len(x) == count else x, state)
        reward, state = self._reward_module.compute_reward(feature.flatten(0, 1), action, state)
        return self._weighted(reward).view(count, replicas), state

    def _weighted(self, reward: Tensor) -> Tensor:
        """Reduce a reward ``[N]`` or ``[N, K]`` to ``[N]``."""
        if reward.ndim == 1:
            return reward
        return reward.sum(-1) if self._reward_weights is None else reward @ self._reward_weights

    def _mean(self, total: Tensor) -> Tensor:
        """Average over the elites of an ensemble: ``[N, n]`` to ``[N]``."""
        if total.ndim == 1:
            return total
        assert self._dynamics_module is not None
        elites = self._dynamics_module.elites
        return total.mean(1) if len(elites) == total.shape[1] else total[:, elites].mean(1)


def _check_trainable(owner: str, argument: str, module: Any) -> None:
    if module is None or not any(p.requires_grad for p in module.parameters()):
        raise ConfError([problem_at(owner, argument, 'has no parameters to optimize: '
                                    f'{"no such module" if module is None else type(module).__name__ + " has none"}',
                                    'leave it out')])


@configurable
class LatentMbrlAlgorithm(MbrlAlgorithm):
    """Model-based agent that plans in a latent space.

    The observation is the latent vector of a predictive representation learner, which also predicts the rewards of
    sequences of actions and therefore needs a decoder of ``'reward'``. :meth:`on_parts_built` finds this learner among
    the parts of the agent. It trains itself, so this algorithm has no loss.

    Args:
        planner_module_ctor: see :class:`MbrlAlgorithm`, also for the other arguments.
        discount: gamma of the predicted rewards.
    """

    @takes_arguments_of(MbrlAlgorithm, without=('reward_module', 'feature_spec', 'dynamics_module_ctor',
                                                'particles_per_replica', 'dynamics_optimizer', 'reward_optimizer',
                                                'checkpoint', 'termination_fn', 'optimizer'),
                        defaults={'name': 'LatentMbrlAlgorithm'}, after={'epsilon_greedy': 'name'})
    def __init__(self, **kwargs: Any):
        super().__init__(reward_module=None, **kwargs)
        self._representation: tuple[Any, ...] = ()  # a tuple, because the module belongs to the agent

    def _make_dynamics(self, ctor: Any, feature_spec: Any, action_spec: Any) -> None:
        return None

    def on_parts_built(self, parts: Mapping[str, Algorithm]) -> None:
        """Plan with the representation learner of the agent.

        Raises:
            ConfError: the agent has no such learner, or the learner cannot predict rewards from this observation.
        """
        learner = parts.get('repr')
        if not isinstance(learner, PredictiveRepresentationLearner):
            found = 'none' if learner is None else type(learner).__name__
            raise ConfError([problem_at('Agent', 'representation_learner_cls', f'must be the learner that {self._name} '
                                        f'plans with, a PredictiveRepresentationLearner; found {found}',
                                        'set Agent.representation_learner_cls = @PredictiveRepresentationLearner')])
        self.set_latent_predictive_representation_module(learner)

    def set_latent_predictive_representation_module(self, latent_predictive_representation_module: Any) -> None:
        """Set the representation learner to plan with.

        Args:
            latent_predictive_representation_module: provides ``predict_multi_step(latent [N, ...], actions [N, H, ...],
                'reward')``, which returns rewards ``[N, H + 1]``.

        Raises:
            ConfError: its predictions are not computed from this observation, or it has no decoder of rewards.
        """
        check = getattr(latent_predictive_representation_module, 'check_plannable', None)
        if check is not None:
            check(self._name)
        self._representation = latent_predictive_representation_module,

    def train_step(self, exp: TimeStep, state: Any, rollout_info: Any = None) -> AlgStep:
        """Return an empty step; this algorithm does not learn."""
        return AlgStep((), state, MbrlInfo())

    def train_sequence(self, exp: TimeStep, state: Any, rollout_info: Any = None) -> AlgStep:
        """Return an empty step; this algorithm does not learn."""
        return AlgStep((), (), MbrlInfo())

    def calc_loss(self, training_info: Any) -> LossInfo:
        """Return an empty loss."""
        return LossInfo(loss=())

    @torch.no_grad()
    def _calc_cost(self, observation: NestedTensor, actions: Tensor) -> Tensor:
        """Return the cost ``[B, P]`` of actions; ``observation`` is the latent vector, nest ``[B, ...]``."""
        if not self._representation:
            raise RuntimeError(f'{self._name}: there is no representation learner to plan with; call '
                               'set_latent_predictive_representation_module first')
        batch, population, horizon, _ = actions.shape
        latent = nest.map_structure(lambda x: x.repeat_interleave(population, 0), observation)
        actions = actions.flatten(0, 1).reshape(-1, horizon, *self._action_spec.shape).to(self._action_spec.dtype)
        rewards = self._representation[0].predict_multi_step(latent, actions, 'reward')[:, 1:]
        if rewards.ndim == 3:
            rewards = self._weighted(rewards.flatten(0, 1)).unflatten(0, rewards.shape[:2])
        discounts = self._discount**torch.arange(horizon, device=rewards.device)
        return -(rewards * discounts).sum(1).view(batch, population)
