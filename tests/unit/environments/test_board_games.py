"""Games of k in a row: rules, the environment with and without an opponent, perfect play, all lines of play."""
import pathlib

import numpy as np
import pytest
import torch

from alfx.algorithms.mcts_algorithm import MCTSAlgorithm, VisitSoftmaxTemperatureByMoves
from alfx.data_structures import StepType
from alfx.environments import board_games, suite_tic_tac_toe
from alfx.environments.board_games import BoardGame, GameModel, MinimaxOpponent, Rules, SearchOpponent, random_opponent
from alfx.tensor_specs import SpecError, check_consistent
from alfx.tree_search import build
from alfx.tree_search.batched_search import TreeSearch, gumbel_choice
from alfx.tree_search.trees import SearchSettings
from alfx.utils.action_samplers import EpsilonGreedySampler

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
RULES = Rules()


def position(text):
    """Return a position from lines of X, O and dots."""
    numbers = {'.': 0, 'X': 1, 'O': -1}
    return np.array([[numbers[stone] for stone in line] for line in text.split()], np.int8)


def play(env, *actions):
    step = env.reset()
    for action in actions:
        step = env.step(torch.tensor([action]))
    return step


@pytest.mark.parametrize('text, winner', [
    ('XXX OO. ...', 1), ('OOX .OX X.O', -1), ('X.O .O. OX.', -1), ('XOX XOO OXX', 0), ('... ... ...', 0)])
def test_the_winner_has_three_in_a_row(text, winner):
    assert RULES.winner(position(text)[None])[0] == winner
    assert RULES.is_over(position(text)[None])[0] == (winner != 0 or '.' not in text)


def test_stones_fall_down_in_connect_four():
    env = board_games.load('connect_four')
    step = play(env, 3, 3, 3)
    assert step.observation['board'][0, :, 3].tolist() == [0, 0, 0, 1, -1, 1]
    step = play(env, 0, 1, 0, 1, 0, 1, 0)  # four in a column
    assert step.is_last().all() and step.reward.tolist() == [1]
    full = play(env, 0, 0, 0, 0, 0, 0)
    assert full.observation['valid_action_mask'][0].tolist() == [False, *[True] * 6]


def test_a_game_has_first_mid_and_last_steps_and_player_0_rewards():
    env = BoardGame(RULES)
    check_consistent(env.reset(), env.time_step_spec(), 1, 'step')
    step = play(env, 0, 3, 1, 4, 2)  # X X X / O O .
    assert step.step_type.tolist() == [LAST] and step.reward.tolist() == [1] and step.discount.tolist() == [0]
    assert step.observation['board'][0].tolist() == [[1, 1, 1], [-1, -1, 0], [0, 0, 0]]
    assert not step.observation['valid_action_mask'].any() and step.observation['steps'].tolist() == [5]
    assert {name: float(x) for name, x in step.env_info.items()} == {'lost': 0, 'drawn': 0, 'won': 1}
    following = env.step(torch.tensor([7]))
    assert following.step_type.tolist() == [FIRST] and not following.observation['board'].any()
    assert following.prev_action.tolist() == [0] and following.reward.tolist() == [0]
    assert play(env, 0, 3, 1, 4, 8, 5).reward.tolist() == [-1]  # player 1 wins
    tie = play(env, 0, 1, 2, 4, 3, 5, 7, 6, 8)
    assert tie.step_type.tolist() == [LAST] and tie.reward.tolist() == [0] and float(tie.env_info['drawn']) == 1


def test_moving_to_an_occupied_square_loses():
    env = BoardGame(RULES)
    assert play(env, 4, 4).reward.tolist() == [1]  # player 1 did
    lost = play(env, 4, 0, 4)
    assert lost.reward.tolist() == [-1] and lost.is_last().all()


def test_actions_that_do_not_exist_are_rejected():
    env = BoardGame(RULES, 2)
    env.reset()
    with pytest.raises(SpecError, match=r'0 .. 8, found \[0, 9\]'):
        env.step(torch.tensor([0, 9]))
    with pytest.raises(SpecError, match='expected tensors of shapes'):
        env.step(torch.tensor([0]))


def test_an_opponent_moves_in_the_environment_and_sides_change():
    env = BoardGame(RULES, 4, random_opponent)
    env.seed(3)
    step = env.reset()
    assert step.observation['to_play'].tolist() == [0, 1, 0, 1]
    assert (step.observation['board'] != 0).sum((1, 2)).tolist() == [0, 1, 0, 1]
    agent, games = [[] for _ in range(4)], [0] * 4
    for _ in range(60):
        action = (torch.rand(4, 9) * step.observation['valid_action_mask']).argmax(-1)
        step = env.step(action)
        for b in range(4):
            if step.is_first()[b]:
                agent[b].append(int(step.observation['to_play'][b]))
                games[b] += 1
    assert all(sides[i] != sides[i + 1] for sides in agent for i in range(len(sides) - 1)) and min(games) > 3


def test_rewards_with_an_opponent_are_those_of_the_agent():
    def first_free(rules, boards, rng):
        return rules.valid(boards).argmax(-1)

    env = BoardGame(RULES, 1, first_free, agent_player=1)
    step = env.reset()  # X at 0
    for action in (4, 3):  # X at 1, then at 2: three in a row
        step = env.step(torch.tensor([action]))
    assert step.is_last().all() and step.reward.tolist() == [-1] and float(step.env_info['lost']) == 1


@pytest.mark.parametrize('opponent', [None, random_opponent])
def test_seeds_reproduce_games_and_states_resume_exactly(opponent):
    def run(env, steps):
        return [env.step(torch.arange(3) * 2 + i % 3).observation['board'] for i in range(steps)]

    env, repeated = BoardGame(RULES, 3, opponent), BoardGame(RULES, 3, opponent)
    for one in (env, repeated):
        one.seed(5)
    assert all(torch.equal(x, y) for x, y in zip(run(env, 20), run(repeated, 20)))
    state = env.get_state()
    expected = run(env, 10)
    repeated.set_state(state)
    assert all(torch.equal(x, y) for x, y in zip(run(repeated, 10), expected))


def test_some_games_can_be_restarted():
    env = BoardGame(RULES, 3)
    env.reset()
    env.step(torch.tensor([1, 2, 3]))
    env.request_reset(torch.tensor([False, True, False]))
    step = env.step(torch.tensor([2, 3, 4]))
    assert step.step_type.tolist() == [MID, FIRST, MID]
    assert (step.observation['board'] != 0).sum((1, 2)).tolist() == [2, 0, 2]


def test_the_suite_observes_only_the_board():
    env = suite_tic_tac_toe.load(batch_size=2)
    assert env.observation_spec().shape == (3, 3) and env.action_spec().maximum == 8
    step = env.step(torch.tensor([0, 0]))
    step = env.step(torch.tensor([4, 5]))
    assert step.observation[0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert env.render().shape == (96, 96, 3)
    with pytest.raises(ValueError, match='suite_tic_tac_toe.load'):
        suite_tic_tac_toe.load('chess')


def test_perfect_play_of_tic_tac_toe_is_a_draw():
    opponent = MinimaxOpponent()
    assert opponent.value(RULES, position('... ... ...')) == 0
    assert opponent.value(RULES, position('X.. ... ..O')) == 1  # a corner as the answer loses
    assert opponent.best_actions(RULES, position('X.. ... ...')) == [4]  # only the centre holds
    assert opponent.best_actions(RULES, position('XX. OO. ...')) == [2]


@pytest.mark.parametrize('arguments', [dict(rows=2, columns=2, in_a_row=3), dict(rows=0), dict(in_a_row=0)])
def test_boards_without_a_line_are_rejected(arguments):
    with pytest.raises(ValueError, match='in_a_row'):
        Rules(**arguments)


# Exact search and all lines -------------------------------------------------------------------------------------


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[3] / 'tools'))
    import board_games as tool
    return tool


@pytest.mark.parametrize('player', [0, 1])
def test_a_perfect_player_loses_no_line_and_a_careless_one_does(tool, player):
    perfect = MinimaxOpponent()
    lines = tool.all_lines(RULES, lambda boards, state: (
        np.array([perfect.best_actions(RULES, b)[0] if not RULES.is_over(b[None])[0] else 0 for b in boards]), state),
        (), player)
    assert lines.lost == 0 and lines.won > 0 and lines.drawn > 0
    careless = tool.all_lines(RULES, lambda boards, state: (RULES.valid(boards).argmax(-1), state), (), player)
    assert careless.lost > 0 and RULES.winner(careless.lost_position[None])[0] == 2 * player - 1


def test_all_lines_of_a_game_without_choice_are_counted_by_hand(tool):
    """Count lines on a 1 x 3 board, where all games are drawn and the agent takes the first free square."""
    rules = Rules(1, 3, 3)
    counts = [tool.all_lines(rules, lambda boards, state: (rules.valid(boards).argmax(-1), state), (), player)[:3]
              for player in (0, 1)]
    assert counts[0] == (0, 2, 0)  # X at 0, O at 1 or 2, X at the last square
    assert counts[1] == (0, 3, 0)  # X at 0, 1 or 2, O at the first free square, X at the last square


needs_compiler = pytest.mark.skipif(build.load() is None, reason='takes minutes with tensors')


@needs_compiler
@pytest.mark.parametrize('settings', [
    dict(), dict(rule='rkl', unexpanded_value='none'), dict(rule='gumbel', gumbel_scale=0.0), dict(num_parallel=4),
    dict(expand_all=True, rule='rkl')])
def test_a_search_with_the_rules_finds_the_best_moves(settings):
    best = {
        'XX. OO. ...': [2],         # wins at once
        'XX. O.. .O.': [2],         # player 0 wins
        'X.. OO. X..': [5],         # player 0 must prevent three in a row
        'XX. .O. ...': [2],         # player 1 must, too
        'X.. .OX O..': [2],         # player 0: stops the diagonal
        'O.X .O. X..': [8],         # player 0: stops the diagonal of player 1
        'X.. ... ...': [4],         # only the centre holds
    }
    start = torch.from_numpy(np.stack([position(text) for text in best]))
    model = GameModel(RULES)
    root = model.predict(start)
    to_play = torch.from_numpy(RULES.to_play(start.numpy()))
    torch.manual_seed(0)
    trees = TreeSearch(SearchSettings(4000, two_players=True, known_bounds=(-1, 1), **settings)).run(
        model, root, root.action_probs, to_play)
    found = gumbel_choice(trees)[0] if 'gumbel' in settings.values() else trees.root_visits.argmax(-1)
    assert {text: int(move) in moves for (text, moves), move in zip(best.items(), found)} == dict.fromkeys(best, True)


@needs_compiler
@pytest.mark.parametrize('player', [0, 1])
def test_an_opponent_that_searches_does_not_lose_at_tic_tac_toe(tool, player):
    opponent, rng = SearchOpponent(3000), np.random.default_rng(0)

    def choose(boards, state):
        return opponent(RULES, boards, rng), state

    assert tool.all_lines(RULES, choose, (), player).lost == 0


class RulesModel:
    """A model of the game for an algorithm with the observations of the environment."""

    pred_state_spec = ()

    def __init__(self):
        self.recurrent_inference = GameModel(RULES)

    def initial_predict(self, observation):
        return self.recurrent_inference.predict(observation['board'].to(torch.int8))


@needs_compiler
def test_an_algorithm_that_searches_with_the_rules_loses_no_line(tool):
    game = BoardGame(RULES)
    algorithm = MCTSAlgorithm(
        game.observation_spec(), game.action_spec(), model=RulesModel(), num_simulations=2000, discount=1.0,
        is_two_player_game=True, known_value_bounds=(-1, 1), pb_c_init=1.25, pb_c_base=19652, root_dirichlet_alpha=1.0,
        root_exploration_fraction=0.25, visit_softmax_temperature_fn=VisitSoftmaxTemperatureByMoves(),
        predict_action_sampler=EpsilonGreedySampler(0.0))
    for player in (0, 1):
        state = algorithm.get_initial_predict_state(1)
        assert tool.all_lines(RULES, tool.chooser(algorithm, game), state, player).lost == 0
