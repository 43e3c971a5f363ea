"""Monte-Carlo tree search with a learned or given model, as an algorithm that acts.

The search follows MuZero (Schrittwieser et al. 2020, arXiv:1911.08265) with these differences:

- All values and rewards are those of player 0; player 1 minimizes them.
- The value of an action is normalized after its reward has been added to the value of the next state.
- An action that has not been expanded has the value score 0.5 (``unexpanded_value_score``), not 0.
- The root starts with one visit, with the value of the root, so that the prior counts from the first simulation.
- States that the model predicts to be terminal are not expanded.
- The policy regularized towards the prior (Grill et al. 2020, arXiv:2007.12509) can replace the visit counts in acting,
  searching and learning; actions can be sampled (Hubert et al. 2021, arXiv:2104.06303); several leaves can be expanded
  at once; ``root_search='gumbel'`` is Gumbel MuZero (Danihelka et al. 2022).

``rollout_step`` adds noise to the prior of the root, and ``predict_step`` does not; the reanalysis of MuZero calls
``rollout_step``. :mod:`alfx.tree_search.batched_search` describes the search and lists where each formula is
implemented.
"""
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alfx import summary
from alfx.algorithms.mcts.temperatures import VisitSoftmaxTemperatureByMoves, VisitSoftmaxTemperatureByProgress
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.data_structures import AlgStep, TimeStep, namedtuple
from alfx.distributions.discrete import num_categories
from alfx.gin_utils import Count, Fraction, Positive, configurable, log_unused, non_default
from alfx.summary import summary_utils
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec
from alfx.tree_search import rules
from alfx.tree_search.batched_search import TreeSearch, exploration_policy, gumbel_choice, root_prior
from alfx.tree_search.trees import CHILD, REWARD, SearchSettings, Trees
from alfx.utils.action_samplers import ActionSampler, MultinomialSampler
from alfx.utils.discrete_action import NoValidActionError

MCTSState = namedtuple('MCTSState', ['steps', 'pred_state', 'action_sampler_state', 'next_predicted_reward'],
                       default_value=())
"""State of the search: ``steps``, int64 ``[B]``, steps of the game so far; ``pred_state``, state of the model, if it is
kept; ``action_sampler_state``; ``next_predicted_reward``, ``[B]``, predicted reward of the chosen action."""

MCTSInfo = namedtuple('MCTSInfo', ['candidate_actions', 'value', 'candidate_action_policy'], default_value=())
"""Result of a search: ``candidate_actions`` ``[B, K, ...]`` (``()``: all values of a discrete action), the ``value``
``[B]`` of the root for player 0, and the policy ``[B, K]`` to learn."""


def calculate_exploration_policy(value: Tensor, prior: Tensor, c: Tensor, tol: float = 1e-6) -> tuple[Tensor, int]:
    """Return the p that maximizes ``E_p(v) - c KL(q || p)``; see :func:`~alfx.tree_search.rules.reverse_kl_policy`.

    Args:
        value: ``[N, K]``, v.
        prior: ``[N, K]``, q; each row sums to 1.
        c: ``[N, 1]``, positive.
        tol: Newton's method stops when the sum of the policy is within this of 1; the result is then normalized.

    Returns:
        The policy ``[N, K]``, and the number of iterations.
    """
    return rules.reverse_kl_policy(value, prior, c, tol)


def calculate_kl_exploration_policy(value: Tensor, prior: Tensor, c: Tensor) -> tuple[Tensor, int]:
    """Return the policy p that maximizes ``E_p(v) - c KL(p || q)``, which is ``q exp(v / c) / Z``.

    Args:
        value: ``[N, K]``, v.
        prior: ``[N, K]``, q; each row sums to 1.
        c: ``[N, 1]``, positive.

    Returns:
        The policy ``[N, K]``, and 0.
    """
    return rules.kl_policy(value.double(), prior.double(), c.double()).to(value.dtype), 0


@configurable
class MCTSAlgorithm(OffPolicyAlgorithm):
    """Algorithm that chooses actions by tree search.

    The observation is the latent state of the model, as provided by MuZero. If it is a dictionary, the latent state is
    its field 'latent', or the whole dictionary if there is no such field. These optional fields are used:

    - 'valid_action_mask', bool ``[B, A]``: the allowed values of a single discrete action;
    - 'steps', int32 ``[B]``: steps since the game began. Without it the algorithm counts its own steps, which is wrong
      if another player makes some of the moves;
    - 'to_play', ``[B]``: the player to move, 0 or 1. Without it the players alternate: ``steps % 2``.

    This algorithm trains nothing. The model is trained by the algorithm that created it.

    Args:
        observation_spec: nest of specs of the observation, as described above.
        action_spec: bounded spec of one action.
        num_simulations: nodes that a search adds to each tree. More simulations improve the policy and take
            proportionally longer: each simulation calls the model once; with 'gumbel', independent simulations share
            a call.
        root_dirichlet_alpha: concentration of the Dirichlet noise in the prior of the root. 'gumbel' has its own noise.
        root_exploration_fraction: weight of the noise in the prior of the root, in the rollout.
        pb_c_init: c1 of the pUCT rule.
        pb_c_base: c2 of the pUCT rule.
        discount: discount factor of the rewards.
        is_two_player_game: search a zero-sum game of two players who take turns.
        visit_softmax_temperature_fn: called with the numbers of steps ``[B]``, returns temperatures t, ``[B]`` or one
            number; actions are chosen with probabilities proportional to ``visits ** (1 / t)``, or to
            ``policy ** (1 / t)`` with ``act_with_exploration_policy``; 0 chooses the most probable one. Not used with
            ``root_search='gumbel'``.
        model: an ``MCTSModel``, or an object with its methods ``initial_predict`` and ``recurrent_inference``;
            ``None``: :meth:`set_model` must be called before the first step.
        keep_model_pred_state: pass the ``pred_state`` that the model returned to ``initial_predict`` at the next step.
        predict_action_sampler: chooses the action in evaluation; not used with ``root_search='gumbel'``.
        rollout_action_sampler: chooses the action in the rollout; not used with ``root_search='gumbel'``.
        learn_policy_temperature: the policy to learn is ``policy ** (1 / learn_policy_temperature)``, normalized.
        reward_spec: spec of the reward; the model predicts one number.
        expand_all_children: expand all actions of a leaf at once. Visit counts then carry little information: act and
            learn with the exploration policy.
        expand_all_root_children: expand all actions of the root before the search; act and learn with the exploration
            policy then, too.
        known_value_bounds: smallest and largest value; ``None``: the values seen in each tree.
        value_min_max_delta: lower bound of the divisor that normalizes values.
        ucb_break_tie_eps: random numbers below this are added to upper confidence bounds.
        ucb_parent_visit_count_minus_one: count one visit fewer of the parent in the bound, so that the first action is
            chosen without the prior.
        unexpanded_value_score: value score of an action that was not expanded: a number; 'max', 'min' or 'mean' of its
            siblings; 'mean_with_parent'; or 'none': the exploration policy leaves such actions their prior
            probability, and upper confidence bounds use 'min'.
        act_with_exploration_policy: choose actions by the exploration policy, not by visits.
        search_with_exploration_policy: descend the tree by the exploration policy, not by upper confidence bounds.
        learn_with_exploration_policy: the policy to learn is the exploration policy, not the visit distribution.
        exploration_policy_type: 'rkl', regularized by ``KL(prior || policy)``, or 'kl', by ``KL(policy || prior)``.
        max_unroll_length: maximum depth of the tree; with ``expand_all_children`` one less.
        num_parallel_sims: number of leaves expanded together; must divide ``num_simulations``.
        checkpoint: as in ``Algorithm``.
        debug_summaries: log the error of the predicted reward.
        name: name of this algorithm.
        root_search: 'ucb', or 'gumbel': actions of the root are drawn without replacement and compared by sequential
            halving; the algorithm acts on and learns the policy improved by the values found.
        max_num_considered_actions: actions of the root that 'gumbel' compares.
        gumbel_scale: scale of the Gumbel noise in the rollout; evaluation has no noise.
        value_scale: weight of values against the prior with 'gumbel' (c_scale in the paper).
        maxvisit_init: constant added to the largest visit count in that weight (c_visit in the paper).

    Attributes:
        latest_trees: trees of the latest search; the next search overwrites them.

    Raises:
        ValueError: an argument is out of range, or conflicts with another.
    """

    updates_are_traceable = False

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, num_simulations: Count,
                 root_dirichlet_alpha: Positive, root_exploration_fraction: Fraction, pb_c_init: float,
                 pb_c_base: float, discount: Fraction, is_two_player_game: bool,
                 visit_softmax_temperature_fn: Callable[[Tensor], Tensor], model: Any = None,
                 keep_model_pred_state: bool = False, predict_action_sampler: ActionSampler = MultinomialSampler(),
                 rollout_action_sampler: ActionSampler = MultinomialSampler(), learn_policy_temperature: Positive = 1.0,
                 reward_spec: TensorSpec = TensorSpec(()), expand_all_children: bool = False,
                 expand_all_root_children: bool = False, known_value_bounds: tuple[float, float] | None = None,
                 value_min_max_delta: float = 1e-30, ucb_break_tie_eps: float = 0.0,
                 ucb_parent_visit_count_minus_one: bool = False,
                 unexpanded_value_score: float | Literal['max', 'min', 'mean', 'mean_with_parent', 'none'] = 0.5,
                 act_with_exploration_policy: bool = False, search_with_exploration_policy: bool = False,
                 learn_with_exploration_policy: bool = False, exploration_policy_type: Literal['rkl', 'kl'] = 'rkl',
                 max_unroll_length: int = 1000000, num_parallel_sims: Count = 1, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'MCTSAlgorithm',
                 root_search: Literal['ucb', 'gumbel'] = 'ucb', max_num_considered_actions: Count = 16,
                 gumbel_scale: float = 1.0, value_scale: float = 0.1, maxvisit_init: float = 50.0):
        if not isinstance(action_spec, BoundedTensorSpec):
            raise ValueError(f'{name}: expected a single bounded action, found {action_spec}')
        exploration = act_with_exploration_policy, search_with_exploration_policy, learn_with_exploration_policy
        if root_search == 'gumbel' and any(exploration):
            raise ValueError(f"{name}: root_search='gumbel' acts, searches and learns with its own policy; leave out "
                             'act_, search_ and learn_with_exploration_policy')
        unused = (('predict_action_sampler', 'rollout_action_sampler') if root_search == 'gumbel' else
                  ('max_num_considered_actions', 'gumbel_scale', 'value_scale', 'maxvisit_init'))
        log_unused(name, non_default(MCTSAlgorithm.__init__, locals(), *unused), f'root_search is {root_search!r}')
        try:
            settings = SearchSettings(
                num_simulations=num_simulations, discount=discount, two_players=is_two_player_game,
                rule='gumbel' if root_search == 'gumbel' else
                exploration_policy_type if search_with_exploration_policy else 'ucb',
                pb_c_init=pb_c_init, pb_c_base=pb_c_base, minus_one=ucb_parent_visit_count_minus_one,
                unexpanded_value=unexpanded_value_score, known_bounds=known_value_bounds,
                min_max_delta=value_min_max_delta, break_tie_eps=ucb_break_tie_eps, max_depth=max_unroll_length,
                num_parallel=num_parallel_sims, expand_all=expand_all_children, expand_root=expand_all_root_children,
                max_num_considered=max_num_considered_actions, gumbel_scale=gumbel_scale, value_scale=value_scale,
                maxvisit_init=maxvisit_init)
        except ValueError as error:
            raise ValueError(f'{name}: {error}') from error
        _check_mask(name, observation_spec, action_spec)
        pred_state_spec: Any = () if not keep_model_pred_state or model is None else model.pred_state_spec
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=_state_spec(pred_state_spec, rollout_action_sampler),
                         predict_state_spec=_state_spec(pred_state_spec, predict_action_sampler),
                         checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._settings = settings
        self._root_dirichlet_alpha = root_dirichlet_alpha
        self._root_exploration_fraction = root_exploration_fraction
        self._temperature_fn = visit_softmax_temperature_fn
        self._keep_model_pred_state = keep_model_pred_state
        self._samplers = nn.ModuleDict({'rollout': rollout_action_sampler, 'predict': predict_action_sampler})
        self._learn_policy_temperature = learn_policy_temperature
        self._act_with_exploration_policy = act_with_exploration_policy
        self._learn_with_exploration_policy = learn_with_exploration_policy
        self._exploration_policy_type = exploration_policy_type
        self._first_action = 0 if action_spec.is_continuous or action_spec.ndim else int(action_spec.minimum)
        self._given_model: Any
        self._search_with(model)
        self._model = model  # registered as a submodule, so that it is saved with this algorithm
        self.latest_trees: Trees | None = None

    # The model -------------------------------------------------------------------------------------------------

    def _trainable_attributes_to_ignore(self) -> list[str]:
        return ['_model']

    def set_model(self, model: Any) -> None:
        """Search with ``model``, which belongs to the caller: this algorithm neither trains nor saves it.

        Its ``pred_state`` becomes part of the state if ``keep_model_pred_state`` is set.
        """
        self._model = None
        self._search_with(model)
        if self._keep_model_pred_state:
            for attribute in ('_train_state_spec', '_rollout_state_spec', '_predict_state_spec'):
                setattr(self, attribute, getattr(self, attribute)._replace(pred_state=model.pred_state_spec))

    def _search_with(self, model: Any) -> None:
        self.__dict__['_given_model'] = model  # not setattr, which would register it as a submodule
        make_backend = self._traced if isinstance(model, nn.Module) else None
        self._rollout_search = TreeSearch(self._settings, make_backend=make_backend)
        self._predict_search = TreeSearch(replace(self._settings, gumbel_scale=0.0), make_backend=make_backend)

    def _traced(self, function: Callable[[Any], Any], memory: nn.Module) -> Callable[[Any], Any]:
        """Return ``function``, a function of the search that calls the model, replayed from a traced graph."""
        return self.recorded(function, self._given_model, memory)

    @property
    def discount(self) -> float:
        """The discount factor of rewards."""
        return self._settings.discount

    @property
    def relevant_state(self) -> str:
        """Part of the state that decides the search result; '' if the state only counts steps for the temperature."""
        if self._keep_model_pred_state:
            return 'the kept pred_state of the model'
        spec = self._observation_spec
        if self._settings.two_players and not (isinstance(spec, dict) and {'to_play', 'steps'} & set(spec)):
            return "whose turn it is, which the observation does not contain ('to_play' or 'steps')"
        return ''

    def model_value(self, inputs: TimeStep, state: Any) -> Tensor:
        """Return the values ``[B]`` that the model predicts without a search; see :meth:`predict_step`."""
        observation = inputs.observation
        return self._root(observation.get('latent', observation) if isinstance(observation, dict) else observation,
                          state).value

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Search without noise at the root, and choose with ``predict_action_sampler``."""
        return self._step(inputs, state, 'predict')

    def rollout_step(self, inputs: TimeStep, state: Any) -> AlgStep:
        """Search with noise at the root, and choose with ``rollout_action_sampler``; ``info`` is an ``MCTSInfo``."""
        return self._step(inputs, state, 'rollout')

    @torch.no_grad()
    def _step(self, inputs: TimeStep, state: Any, kind: str) -> AlgStep:
        observation = inputs.observation
        fields: Any = observation if isinstance(observation, dict) else {}
        steps = fields['steps'].long() if 'steps' in fields else state.steps
        root = self._root(fields.get('latent', observation), state)
        mask = self._mask(inputs, fields, steps)
        if mask is not None and isinstance(root.actions, Tensor):
            root = self._given_model.with_valid_actions(root, mask)
            mask = root.action_probs > 0
        fraction = self._root_exploration_fraction if kind == 'rollout' and self._settings.rule != 'gumbel' else 0.0
        prior = root_prior(root.action_probs, mask, self._root_dirichlet_alpha, fraction)
        search = self._rollout_search if kind == 'rollout' else self._predict_search
        candidates = root.actions if isinstance(root.actions, Tensor) else ()
        infer = self._infer_by_index if isinstance(candidates, tuple) else self._given_model.recurrent_inference
        trees = self.latest_trees = search.run(infer, root, prior, self._to_play(fields, steps))
        index, policy, sampler_state = self._choose(trees, steps, state.action_sampler_state, self._samplers[kind])
        index = index.to(steps.device)
        everything = torch.arange(len(index), device=index.device)
        chosen = self._named(index) if isinstance(candidates, tuple) else candidates[everything, index]
        if self._debug_summaries and kind == 'rollout':
            self._summarize_reward(inputs, state.next_predicted_reward)
        dtype = root.value.dtype
        new_state = MCTSState(steps=state.steps + 1,
                              pred_state=root.state.pred_state if self._keep_model_pred_state else (),
                              action_sampler_state=sampler_state,
                              next_predicted_reward=_rewards(trees, index.cpu()).to(steps.device, torch.float32))
        info = MCTSInfo(candidate_actions=candidates, value=trees.mean_value().to(steps.device, dtype),
                        candidate_action_policy=policy.to(steps.device, dtype))
        return AlgStep(chosen, new_state, info)

    def _root(self, latent: NestedTensor, state: Any) -> Any:
        if self._given_model is None:
            raise RuntimeError(f'{self._name}: there is no model to search with; pass model=, or call set_model first')
        if self._keep_model_pred_state:
            return self._given_model.initial_predict(latent, state.pred_state)
        return self._given_model.initial_predict(latent)

    def _infer_by_index(self, state: NestedTensor, index: Tensor) -> Any:
        """Return the model's predictions for action indices, if the model returns no candidates."""
        return self._given_model.recurrent_inference(state, self._named(index))

    def _named(self, index: Tensor) -> Tensor:
        """Convert an index ``[B]`` to the action ``[B]`` of the spec."""
        return (index + self._first_action).to(self._action_spec.dtype)

    def _choose(self, trees: Trees, steps: Tensor, sampler_state: NestedTensor, sampler: nn.Module
                ) -> tuple[Tensor, Tensor, NestedTensor]:
        """Return the index of the action ``[B]``, the policy to learn ``[B, K]``, and the next state of the sampler."""
        if self._settings.rule == 'gumbel':
            index, policy = gumbel_choice(trees)
            return index, self._tempered(policy), sampler_state
        visits = trees.root_visits
        explored = visits
        if self._act_with_exploration_policy or self._learn_with_exploration_policy:
            explored = exploration_policy(trees, self._exploration_policy_type)
        temperature = torch.as_tensor(self._temperature_fn(steps), dtype=torch.float64, device='cpu').expand(len(steps))
        if not (temperature >= 0).all():
            raise ValueError(f'{self._name}.visit_softmax_temperature_fn: expected temperatures of at least 0, found '
                             f'{temperature.tolist()}')
        acting = rules.visit_policy(explored if self._act_with_exploration_policy else visits, temperature)
        index, sampler_state = sampler(acting.to(steps.device, torch.float32), sampler_state)
        learned = explored if self._learn_with_exploration_policy else visits / visits.sum(-1, keepdim=True)
        return index, self._tempered(learned), sampler_state

    def _tempered(self, policy: Tensor) -> Tensor:
        if self._learn_policy_temperature == 1.0:
            return policy
        return rules.visit_policy(policy, policy.new_full(policy.shape[:1], self._learn_policy_temperature))

    def _to_play(self, fields: Any, steps: Tensor) -> Tensor:
        if not self._settings.two_players:
            return torch.zeros(steps.shape, dtype=torch.int64)
        if 'to_play' not in fields:
            return steps.cpu() % 2
        to_play = fields['to_play'].cpu().long()
        if bool(((to_play != 0) & (to_play != 1)).any()):
            raise ValueError(f"{self._name}: observation['to_play']: expected 0 or 1, found {to_play.tolist()}")
        return to_play

    def _mask(self, inputs: TimeStep, fields: Any, steps: Tensor) -> Tensor | None:
        """Return the mask of allowed actions; all are allowed where the episode is over and the mask allows none."""
        if 'valid_action_mask' not in fields:
            return None
        mask = fields['valid_action_mask'].bool()
        none = ~mask.any(-1)
        if not bool(none.any()):
            return mask
        # A batch of all-zero steps with equal env_ids is a probe for the structure of the output, not environment data.
        probe = len(none) > 1 and bool(none.all() & (inputs.env_id == 0).all() & inputs.is_first().all())
        wrong = none & ~inputs.is_last()
        if bool(wrong.any()) and not probe:
            row = int(wrong.int().argmax())
            raise NoValidActionError(
                f"{self._name}: observation['valid_action_mask'] allows no action in environment "
                f'{int(inputs.env_id[row])} at step {int(steps[row])}, where the episode is not over; the environment '
                'has to end the episode, or allow an action such as to pass')
        return mask | none[:, None]

    def _summarize_reward(self, inputs: TimeStep, predicted: Tensor) -> None:
        if summary.should_record_summaries():
            reward = inputs.reward if inputs.reward.ndim == 1 else inputs.reward.sum(-1)
            summary_utils.safe_mean_summary(f'{self._name}/reward_prediction_error', (reward - predicted).abs(),
                                            ~inputs.is_first())


def _rewards(trees: Trees, index: Tensor) -> Tensor:
    """Return the predicted rewards of actions ``[B]`` of the roots; 0 where they were not expanded."""
    row = torch.arange(trees.batch_size)
    child = torch.from_numpy(trees.ints)[row, 0, CHILD + index].long()
    return torch.where(child > 0, torch.from_numpy(trees.floats)[row, child, REWARD], 0.0)


def _state_spec(pred_state_spec: NestedTensorSpec, sampler: ActionSampler) -> Any:
    return MCTSState(steps=TensorSpec((), torch.int64), pred_state=pred_state_spec,
                     action_sampler_state=sampler.state_spec, next_predicted_reward=TensorSpec(()))


def _check_mask(name: str, observation_spec: Any, action_spec: BoundedTensorSpec) -> None:
    """Reject a mask that does not match the values of the action."""
    if not isinstance(observation_spec, dict) or 'valid_action_mask' not in observation_spec:
        return
    found = tuple(observation_spec['valid_action_mask'].shape)
    if action_spec.is_continuous or action_spec.ndim:
        raise ValueError(f"{name}: expected no observation['valid_action_mask'] with an action that is not a single "
                         f'discrete one, found {found} for {action_spec}; leave it out of the observation')
    if found != (num_categories(action_spec), ):
        raise ValueError(f"{name}: observation['valid_action_mask']: expected the shape ({num_categories(action_spec)},"
                         f'), one for each value of {action_spec}, found {found}')


# Settings of the papers -----------------------------------------------------------------------------------------

_CHESS_TEMPERATURE = ((29, 1.0), (10000, 0.0001))


@configurable
def create_atari_mcts(observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec) -> MCTSAlgorithm:
    """Create the search that MuZero uses for Atari games."""
    return MCTSAlgorithm(observation_spec, action_spec, num_simulations=50, root_dirichlet_alpha=0.25,
                         root_exploration_fraction=0.25, pb_c_init=1.25, pb_c_base=19652, discount=0.997,
                         is_two_player_game=False, visit_softmax_temperature_fn=VisitSoftmaxTemperatureByProgress())


@configurable
def create_control_mcts(observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, num_simulations: Count = 50,
                        debug_summaries: bool = False) -> MCTSAlgorithm:
    """Create the search that sampled MuZero uses for continuous control."""
    return MCTSAlgorithm(observation_spec, action_spec, num_simulations=num_simulations, root_dirichlet_alpha=0.3,
                         root_exploration_fraction=0.25, pb_c_init=1.25, pb_c_base=19652, discount=0.99,
                         is_two_player_game=False, visit_softmax_temperature_fn=VisitSoftmaxTemperatureByProgress(),
                         debug_summaries=debug_summaries)


@configurable
def create_board_game_mcts(observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, dirichlet_alpha: Positive,
                           pb_c_init: float = 1.25, num_simulations: Count = 800,
                           debug_summaries: bool = False) -> MCTSAlgorithm:
    """Create the search that MuZero uses for games of two players whose outcome is -1, 0 or 1.

    Args:
        observation_spec: see :class:`MCTSAlgorithm`.
        action_spec: see :class:`MCTSAlgorithm`.
        dirichlet_alpha: concentration of the noise; about 10 divided by the number of moves in a position.
        pb_c_init: c1 of the pUCT rule.
        num_simulations: see :class:`MCTSAlgorithm`.
        debug_summaries: see :class:`MCTSAlgorithm`.
    """
    return MCTSAlgorithm(observation_spec, action_spec, num_simulations=num_simulations,
                         root_dirichlet_alpha=dirichlet_alpha, root_exploration_fraction=0.25, pb_c_init=pb_c_init,
                         pb_c_base=19652, discount=1.0, is_two_player_game=True, known_value_bounds=(-1, 1),
                         visit_softmax_temperature_fn=VisitSoftmaxTemperatureByMoves(_CHESS_TEMPERATURE),
                         debug_summaries=debug_summaries)


@configurable
def create_go_mcts(observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec) -> MCTSAlgorithm:
    """Create the search that MuZero uses for Go."""
    return create_board_game_mcts(observation_spec, action_spec, dirichlet_alpha=0.03)


@configurable
def create_chess_mcts(observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec) -> MCTSAlgorithm:
    """Create the search that MuZero uses for chess."""
    return create_board_game_mcts(observation_spec, action_spec, dirichlet_alpha=0.3)


@configurable
def create_shogi_mcts(observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec) -> MCTSAlgorithm:
    """Create the search that MuZero uses for shogi."""
    return create_board_game_mcts(observation_spec, action_spec, dirichlet_alpha=0.15)
