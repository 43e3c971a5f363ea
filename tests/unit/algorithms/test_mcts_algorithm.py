"""MCTSAlgorithm: acting, masks, players, noise only in the rollout, states, sampled actions, bad arguments."""
from functools import partial

import pytest
import torch

from alfx import context, nest
from alfx.algorithms.mcts_algorithm import (MCTSAlgorithm, MCTSInfo, MCTSState, VisitSoftmaxTemperatureByMoves,
                                            VisitSoftmaxTemperatureByProgress, calculate_exploration_policy,
                                            calculate_kl_exploration_policy, create_atari_mcts,
                                            create_board_game_mcts, create_chess_mcts, create_control_mcts,
                                            create_go_mcts, create_shogi_mcts)
from alfx.algorithms.mcts_models import MCTSModel, ModelOutput, SimpleMCTSModel, create_simple_encoding_net
from alfx.data_structures import StepType, TimeStep, restart, time_step_spec
from alfx.environments.board_games import BoardGame, Rules
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec, check_consistent, zeros_from_spec
from alfx.utils.action_samplers import CategoricalSeedSampler, EpsilonGreedySampler, MultinomialSampler
from alfx.utils.discrete_action import NoValidActionError

ACTION = BoundedTensorSpec((), torch.int64, 2, 5)
LATENT = TensorSpec((3, ))
BOX = BoundedTensorSpec((2, ), torch.float32, -1, 1)
greedy = EpsilonGreedySampler(0.0)
plain = partial(MCTSAlgorithm, num_simulations=8, root_dirichlet_alpha=0.3, root_exploration_fraction=0.25,
                pb_c_init=1.25, pb_c_base=19652, discount=0.9, is_two_player_game=False,
                visit_softmax_temperature_fn=VisitSoftmaxTemperatureByProgress())


def model_of(observation_spec=LATENT, action_spec=ACTION, **kwargs):
    torch.manual_seed(0)
    return SimpleMCTSModel(observation_spec, action_spec, num_unroll_steps=2,
                           encoding_net_ctor=partial(create_simple_encoding_net, latent_size=3), **kwargs)


class Bandit:
    """Four actions, 2 .. 5, of which ``best`` is rewarded by 1; the prior is the same for all."""

    pred_state_spec = ()

    def __init__(self, best=4):
        self.best, self.seen = best, []

    def initial_predict(self, latent):
        n = len(latent)
        return ModelOutput(value=torch.zeros(n), reward=torch.zeros(n), action_probs=torch.full((n, 4), 0.25),
                           state=latent)

    def recurrent_inference(self, state, action):
        self.seen += action.tolist()
        output = self.initial_predict(state)
        return output._replace(reward=(action == self.best).float(), game_over=torch.ones(len(state), dtype=torch.bool))


def step_of(observation, action_spec=ACTION):
    return restart(observation, action_spec, batched=True)


def act(algorithm, observation, kind='predict_step', state=None, **changes):
    n = nest.get_nest_batch_size(observation)
    state = algorithm.get_initial_rollout_state(n) if state is None else state
    return getattr(algorithm, kind)(step_of(observation)._replace(**changes), state)


def test_the_rewarded_action_is_found_and_named_as_its_spec_has_it():
    algorithm = plain(LATENT, ACTION, model=Bandit(), num_simulations=40, predict_action_sampler=greedy)
    step = act(algorithm, torch.zeros(3, 3))
    assert step.output.tolist() == [4, 4, 4] and step.output.dtype == torch.int64
    assert step.info.candidate_actions == () and step.info.candidate_action_policy.argmax(-1).tolist() == [2, 2, 2]
    assert step.info.candidate_action_policy.sum(-1).tolist() == pytest.approx([1, 1, 1])
    assert set(algorithm._given_model.seen) <= {2, 3, 4, 5}
    assert step.state.next_predicted_reward.tolist() == [1, 1, 1] and step.state.steps.tolist() == [1, 1, 1]
    assert (step.info.value > 0.5).all()


MASKED = {'latent': LATENT, 'valid_action_mask': TensorSpec((4, ), torch.bool)}


def random_masks(n):
    """Return masks ``[n, 4]``, each with at least one valid action."""
    mask = torch.rand(n, 4) < 0.4
    mask[torch.arange(n), torch.randint(4, (n, ))] = True
    return mask


@pytest.mark.parametrize('options', [
    {}, dict(root_search='gumbel'), dict(num_parallel_sims=4), dict(expand_all_children=True),
    dict(expand_all_root_children=True), dict(ucb_break_tie_eps=0.1),
    dict(act_with_exploration_policy=True, learn_with_exploration_policy=True, search_with_exploration_policy=True),
    dict(exploration_policy_type='kl', act_with_exploration_policy=True, search_with_exploration_policy=True)])
@pytest.mark.parametrize('kind', ['predict_step', 'rollout_step'])
def test_an_invalid_action_is_never_chosen_nor_learned(options, kind):
    n = 10000
    algorithm = plain(MASKED, ACTION, model=model_of(), **options)
    torch.manual_seed(1)
    mask = random_masks(n)
    step = act(algorithm, {'latent': torch.randn(n, 3), 'valid_action_mask': mask}, kind)
    assert mask[torch.arange(n), step.output - 2].all()
    assert (step.info.candidate_action_policy[~mask] == 0).all()
    torch.testing.assert_close(step.info.candidate_action_policy.sum(-1), torch.ones(n))


@pytest.mark.parametrize('options', [{}, dict(root_search='gumbel'), dict(act_with_exploration_policy=True,
                                                                         learn_with_exploration_policy=True)])
@pytest.mark.parametrize('kind', ['predict_step', 'rollout_step'])
def test_candidates_are_the_most_probable_of_the_valid_actions(options, kind):
    n = 10000
    model = model_of(num_sampled_actions=2)
    algorithm = plain(MASKED, ACTION, model=model, **options)
    torch.manual_seed(1)
    mask, latent = random_masks(n), torch.randn(n, 3)
    step = act(algorithm, {'latent': latent, 'valid_action_mask': mask}, kind)
    rows = torch.arange(n)
    assert mask[rows, step.output - 2].all()
    policy, candidates = step.info.candidate_action_policy, step.info.candidate_actions - 2
    assert (policy[~mask.gather(-1, candidates)] == 0).all()
    torch.testing.assert_close(policy.sum(-1), torch.ones(n))
    logits = model.initial_predict(latent).action_distribution.logits.masked_fill(~mask, -torch.inf)
    assert torch.equal(candidates[:, 0], logits.argmax(-1))
    assert (candidates[:, 1] == logits.argsort(-1, descending=True)[:, 1])[mask.sum(-1) > 1].all()


@pytest.mark.parametrize('mask, action, message', [
    ((3, ), ACTION, r'expected the shape \(4,\), one for each value of .*, found \(3,\)'),
    ((4, ), BOX, 'expected no .* with an action that is not a single discrete one')])
def test_a_mask_that_does_not_name_the_values_of_the_action_is_rejected(mask, action, message):
    with pytest.raises(ValueError, match=message):
        plain({**MASKED, 'valid_action_mask': TensorSpec(mask, torch.bool)}, action)


def test_a_model_with_candidates_must_know_which_are_valid():
    class Candidates(MCTSModel):
        pred_state_spec = ()

        def __init__(self):
            torch.nn.Module.__init__(self)

        def initial_predict(self, latent, pred_state=()):
            return ModelOutput(value=torch.zeros(3), reward=torch.zeros(3), actions=torch.tensor([[2, 3]] * 3),
                               action_probs=torch.full((3, 2), 0.5), state=latent)

    algorithm = plain(MASKED, ACTION, model=Candidates())
    with pytest.raises(NotImplementedError, match='Candidates.with_valid_actions: a model that returns candidates'):
        act(algorithm, {'latent': torch.ones(3, 3), 'valid_action_mask': random_masks(3)})


def test_an_all_invalid_mask_raises_except_at_ends_and_in_spec_probes():
    algorithm = plain(MASKED, ACTION, model=model_of())
    observation = {'latent': torch.ones(3, 3), 'valid_action_mask': torch.tensor([[True] * 4, [False] * 4, [True] * 4])}
    with pytest.raises(NoValidActionError, match=r'allows no action in environment 1 at step 7,.*end the episode'):
        act(algorithm, observation, state=MCTSState(torch.tensor([0, 7, 0]), (), (), torch.zeros(3)))
    act(algorithm, observation, step_type=torch.full((3, ), StepType.LAST))
    spec = time_step_spec(algorithm.observation_spec, ACTION)
    algorithm.rollout_step(zeros_from_spec(spec, 2), algorithm.get_initial_rollout_state(2))


def test_noise_is_added_in_the_rollout_only():
    algorithm = plain(LATENT, ACTION, model=model_of(), num_simulations=30, root_exploration_fraction=1.0,
                      predict_action_sampler=greedy, rollout_action_sampler=greedy)
    latent = torch.randn(20, 3)
    calm = [act(algorithm, latent).info.candidate_action_policy for _ in range(2)]
    noisy = [act(algorithm, latent, 'rollout_step').info.candidate_action_policy for _ in range(2)]
    assert torch.equal(*calm) and not torch.equal(*noisy)


def test_gumbel_noise_is_in_the_rollout_only_and_its_policy_improves():
    algorithm = plain(LATENT, ACTION, model=Bandit(5), num_simulations=4, root_search='gumbel')
    predicted = [act(algorithm, torch.zeros(50, 3)) for _ in range(2)]
    assert torch.equal(predicted[0].output, predicted[1].output)
    assert predicted[0].output.tolist() == [5] * 50  # all four are tried
    assert (predicted[0].info.candidate_action_policy[:, 3] > 0.9).all()
    few = plain(LATENT, ACTION, model=Bandit(5), num_simulations=1, root_search='gumbel')
    assert len(set(act(few, torch.zeros(50, 3), 'rollout_step').output.tolist())) == 4


@pytest.mark.parametrize('fields', ['internal', 'steps', 'to_play'])
def test_players_alternate_by_observation_or_by_counting(fields):
    """The reward belongs to player 0: player 1 avoids the action with the reward."""
    spec = {'latent': LATENT, 'steps': TensorSpec((), torch.int32), 'to_play': TensorSpec((), torch.int8)}
    observation = {'latent': torch.zeros(2, 3)}
    if fields != 'internal':
        observation[fields] = torch.tensor([0, 1])
    algorithm = plain(spec, ACTION, model=Bandit(), is_two_player_game=True, num_simulations=60,
                      predict_action_sampler=greedy)
    steps = torch.tensor([0, 1]) if fields == 'internal' else torch.zeros(2, dtype=torch.int64)
    step = act(algorithm, observation, state=MCTSState(steps, (), (), torch.zeros(2)))
    visits = step.info.candidate_action_policy
    assert int(visits[0].argmax()) == 2 and int(visits[1].argmin()) == 2


def test_to_play_is_0_or_1():
    spec = {'latent': LATENT, 'to_play': TensorSpec((), torch.int8)}
    algorithm = plain(spec, ACTION, model=Bandit(), is_two_player_game=True)
    with pytest.raises(ValueError, match=r"'to_play'\]: expected 0 or 1, found \[0, 2\]"):
        act(algorithm, {'latent': torch.zeros(2, 3), 'to_play': torch.tensor([0, 2])})


@pytest.mark.parametrize('spec, options', [
    (ACTION, {}), (ACTION, dict(num_sampled_actions=3)), (BOX, dict(num_sampled_actions=5)),
    (BoundedTensorSpec((2, ), torch.int64, 0, [2, 4]), dict(num_sampled_actions=6))])
def test_every_kind_of_action_is_searched(spec, options):
    algorithm = plain(LATENT, spec, model=model_of(action_spec=spec, **options))
    for kind in ('predict_step', 'rollout_step'):
        step = act(algorithm, torch.randn(4, 3), kind)
        check_consistent(step.output, spec, 1, 'action')
        assert isinstance(step.info, MCTSInfo)
        if options:
            candidates = step.info.candidate_actions
            assert candidates.shape == (4, options['num_sampled_actions'], *spec.shape)
            assert (candidates.reshape(4, -1, spec.numel) == step.output.reshape(4, 1, -1)).all(-1).any(-1).all()


def test_state_and_samplers_are_kept_for_each_environment():
    sampler = CategoricalSeedSampler(4)
    algorithm = plain(LATENT, ACTION, model=model_of(), rollout_action_sampler=sampler, keep_model_pred_state=True)
    step = act(algorithm, torch.randn(2, 3), 'rollout_step')
    check_consistent(step.state, algorithm.rollout_state_spec, 1, 'state')
    assert step.state.action_sampler_state.shape == (2, 4)
    predicted = algorithm.predict_step(step_of(torch.randn(2, 3)), algorithm.get_initial_predict_state(2))
    check_consistent(predicted.state, algorithm.predict_state_spec, 1, 'state')


def test_seeds_reproduce_actions_with_and_without_a_compiler(monkeypatch):
    from alfx.tree_search import build

    def run():
        algorithm = plain(LATENT, BOX, model=model_of(action_spec=BOX, num_sampled_actions=4), num_simulations=12,
                          search_with_exploration_policy=True)
        torch.manual_seed(4)
        step = act(algorithm, torch.ones(3, 3), 'rollout_step')
        return step.output, step.info.value, step.info.candidate_action_policy

    first, second = run(), run()
    monkeypatch.setattr(build, 'load', lambda: None)
    third = run()
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(first, second, third))


def test_a_model_from_outside_is_owned_by_its_caller():
    algorithm = plain(LATENT, ACTION, keep_model_pred_state=True)
    with pytest.raises(RuntimeError, match='no model to search with'):
        act(algorithm, torch.zeros(1, 3))
    algorithm.set_model(model_of())
    act(algorithm, torch.zeros(1, 3))
    assert not list(algorithm.parameters())
    owner = plain(LATENT, ACTION, model=model_of())
    assert {name.split('.')[0] for name in owner.state_dict()} == {'_model', '_extra_state'}


def test_the_policy_to_learn_follows_its_temperature():
    cold = plain(LATENT, ACTION, model=Bandit(), num_simulations=20, learn_policy_temperature=0.5)
    warm = plain(LATENT, ACTION, model=Bandit(), num_simulations=20)
    a, b = (act(x, torch.zeros(1, 3)).info.candidate_action_policy[0] for x in (cold, warm))
    assert a.tolist() == pytest.approx((b**2 / (b**2).sum()).tolist(), abs=1e-6)


class Recording(MultinomialSampler):
    """Sampler that notes the probabilities it draws from."""

    def forward(self, probs, state=()):
        self.probs = probs
        return super().forward(probs, state)


@pytest.mark.parametrize('temperature', [1.0, 0.5, 1e-4])
@pytest.mark.parametrize('kind', ['predict', 'rollout'])
@pytest.mark.parametrize('policy_type', ['rkl', 'kl'])
def test_the_exploration_policy_acts_at_its_temperature(temperature, kind, policy_type):
    """Draw from ``policy ** (1 / t)`` as from visit counts; near 0 that is the greedy action."""
    sampler = Recording()
    algorithm = plain(LATENT, ACTION, model=Bandit(), num_simulations=20, act_with_exploration_policy=True,
                      learn_with_exploration_policy=True, exploration_policy_type=policy_type,
                      visit_softmax_temperature_fn=VisitSoftmaxTemperatureByMoves([(0, 1.0), (9, temperature)]),
                      **{f'{kind}_action_sampler': sampler})
    state = algorithm.get_initial_rollout_state(50)
    step = act(algorithm, torch.zeros(50, 3), f'{kind}_step', state._replace(steps=torch.full((50, ), 4)))
    policy = step.info.candidate_action_policy.double()
    logs = policy.log() / temperature
    torch.testing.assert_close(sampler.probs.double(), (logs - logs.logsumexp(-1, keepdim=True)).exp(), rtol=1e-3,
                               atol=1e-5)
    if temperature == 1e-4:
        assert step.output.tolist() == (policy.argmax(-1) + 2).tolist()


@pytest.mark.parametrize('temperature', [0, 1e-30, 0.0001, torch.zeros(50)])
def test_a_temperature_of_0_is_greedy_and_may_be_a_number(temperature):
    algorithm = plain(LATENT, ACTION, model=Bandit(), visit_softmax_temperature_fn=lambda steps: temperature)
    step = act(algorithm, torch.zeros(50, 3), 'rollout_step')
    assert step.output.tolist() == (step.info.candidate_action_policy.argmax(-1) + 2).tolist()


@pytest.mark.parametrize('temperature', [-1.0, float('nan')])
def test_a_temperature_that_is_no_temperature_is_rejected(temperature):
    algorithm = plain(LATENT, ACTION, model=Bandit(), visit_softmax_temperature_fn=lambda steps: temperature)
    with pytest.raises(ValueError, match=r'visit_softmax_temperature_fn: .*at least 0, found \[(-1.0|nan)'):
        act(algorithm, torch.zeros(50, 3), 'rollout_step')


def test_temperatures_by_moves_and_by_progress():
    by_moves = VisitSoftmaxTemperatureByMoves([(2, 1.0), (5, 0.5), (9, 0.1)])
    assert by_moves(torch.tensor([0, 2, 3, 5, 6, 100])).tolist() == pytest.approx([1, 1, 0.5, 0.5, 0.1, 0.1])
    by_progress = VisitSoftmaxTemperatureByProgress([(0.5, 1.0), (0.75, 0.5), (1, 0.25)])
    expected = {0.0: 1.0, 0.49: 1.0, 0.5: 0.5, 0.8: 0.25, 1.0: 0.25}
    for progress, temperature in expected.items():
        context.update_progress('percent', progress)
        assert by_progress(torch.zeros(2)).tolist() == [temperature] * 2


def test_the_documented_policies():
    value, prior, c = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0]])
    policy, iterations = calculate_exploration_policy(value, prior, c)
    # p = 0.5 / (beta - u), u = 0, -1: 0.5 / b + 0.5 / (b + 1) = 1, b^2 = 1/2
    assert policy[0].tolist() == pytest.approx([0.5**0.5, 0.5 / (0.5**0.5 + 1)], abs=1e-5) and 0 < iterations < 20
    policy, iterations = calculate_kl_exploration_policy(value, prior, c)
    assert policy[0].tolist() == pytest.approx([0.7310586, 0.2689414]) and iterations == 0  # a sigmoid


@pytest.mark.parametrize('create', [create_atari_mcts, create_control_mcts, create_go_mcts, create_chess_mcts,
                                    create_shogi_mcts, partial(create_board_game_mcts, dirichlet_alpha=1.0)])
def test_the_searches_of_the_papers_can_be_configured(create):
    assert create(LATENT, ACTION).discount in (0.99, 0.997, 1.0)


@pytest.mark.parametrize('options, message', [
    (dict(num_simulations=10, num_parallel_sims=4), 'multiple of the 4 parallel'),
    (dict(expand_all_children=True, num_parallel_sims=2), 'incompatible with parallel simulations'),
    (dict(unexpanded_value_score='men'), "unexpanded_value_score must be a number or 'max' or .*, found str 'men'"),
    (dict(exploration_policy_type='rk'), "exploration_policy_type must be 'rkl' or 'kl', found str 'rk'"),
    (dict(root_search='gumble'), "root_search must be 'ucb' or 'gumbel', found str 'gumble'"),
    (dict(known_value_bounds=(1, -1)), r'expected \(least, largest\), found \(1, -1\)'),
    (dict(root_exploration_fraction=2.0), 'root_exploration_fraction must be a number in'),
    (dict(root_search='gumbel', act_with_exploration_policy=True), 'acts, searches and learns with its own policy')])
def test_meaningless_arguments_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        plain(LATENT, ACTION, **options)


@pytest.mark.parametrize('root_search, unused', [
    ('ucb', dict(max_num_considered_actions=4, gumbel_scale=0.5, value_scale=0.2, maxvisit_init=10.0)),
    ('gumbel', dict(predict_action_sampler=MultinomialSampler(), rollout_action_sampler=MultinomialSampler()))])
def test_arguments_of_the_other_search_are_logged(root_search, unused, caplog):
    caplog.set_level('INFO', 'alfx')
    plain(LATENT, ACTION, model=Bandit(), root_search=root_search)
    assert 'is not used' not in caplog.text
    plain(LATENT, ACTION, model=Bandit(), root_search=root_search, **unused)
    for argument in unused:
        assert f"{argument} is not used: root_search is '{root_search}'" in caplog.text


@pytest.mark.parametrize('make', [VisitSoftmaxTemperatureByMoves, VisitSoftmaxTemperatureByProgress])
@pytest.mark.parametrize('pairs', [[(1, 1.0), (0.5, 0.5)], [(1, 0.0)], []])
def test_temperatures_out_of_order_are_rejected(make, pairs):
    with pytest.raises(ValueError, match='temperature_pairs: expected'):
        make(pairs)


def test_a_game_is_finished_with_a_learned_model():
    env = BoardGame(Rules(), 4)
    encoder = model_of(env.observation_spec(), env.action_spec())
    spec = {'latent': encoder.repr_spec, **{k: v for k, v in env.observation_spec().items() if k != 'board'}}
    algorithm = plain(spec, env.action_spec(), model=encoder, is_two_player_game=True, known_value_bounds=(-1, 1),
                      num_parallel_sims=2)
    state, time_step = algorithm.get_initial_rollout_state(4), env.reset()
    for _ in range(30):
        latent = encoder.initial_representation(time_step.observation)
        inputs = TimeStep(*time_step)._replace(observation={**time_step.observation, 'latent': latent})
        step = algorithm.rollout_step(inputs, state)
        going = ~time_step.is_last()
        assert time_step.observation['valid_action_mask'][torch.arange(4), step.output][going].all()
        state, time_step = step.state, env.step(step.output)
