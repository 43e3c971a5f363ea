"""Evaluate a trained agent in a board game: against all lines of play, or against an opponent.

    python tools/board_games.py --root_dir R --exhaustive
    python tools/board_games.py --root_dir R --opponent random --games 500

A deterministic agent can be evaluated exactly. With ``--exhaustive`` the opponent tries every sequence of moves, with
the agent as first and as second player, and the won, drawn and lost lines of play are counted. This is feasible for
small games such as TicTacToe. The agent acts greedily.

The exit code is 1 if the agent lost.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from alfx import nest
from alfx.bin import flags, policy_flags
from alfx.bin.flags import FLAGS, number
from alfx.data_structures import StepType, TimeStep
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.board_games import BoardGame, MinimaxOpponent, Rules, SearchOpponent, random_opponent

Choose = Callable[[np.ndarray, Any], tuple[np.ndarray, Any]]
"""Function of boards ``[N, rows, columns]`` and a nest of states ``[N, ...]`` that returns actions ``[N]`` and the next
states."""


class Lines(NamedTuple):
    """Number of won, drawn and lost lines of play, and the final position of a lost one."""

    won: int
    drawn: int
    lost: int
    lost_position: np.ndarray | None


def all_lines(rules: Rules, choose: Choose, initial_state: Any, player: int) -> Lines:
    """Play all lines with the agent as ``player``; positions reached in several ways are evaluated once.

    Args:
        rules: rules of the game.
        choose: function that chooses the actions of the agent.
        initial_state: nest ``[1, ...]``, initial state of the agent.
        player: 0 or 1.
    """
    boards, counts = np.zeros((1, rules.rows, rules.columns), np.int8), np.ones(1, np.int64)
    state, results, lost_position = initial_state, {1: 0, 0: 0, -1: 0}, None
    turn = 0
    while len(boards):
        actions, state = choose(boards, state)
        if turn == player:
            parents = np.arange(len(boards))
        else:
            parents, actions = np.nonzero(rules.valid(boards))
        possible = rules.valid(boards)[parents, actions]
        stones = np.full(len(parents), 1 - 2 * turn)
        boards, counts = _after(rules, boards[parents], actions, stones, possible), counts[parents]
        outcome = np.where(possible, rules.winner(boards), -stones) * (1 - 2 * player)
        over = ~possible | rules.is_over(boards)
        for result in results:
            results[result] += int(counts[over & (outcome == result)].sum())
        if lost_position is None and (over & (outcome == -1)).any():
            lost_position = boards[(over & (outcome == -1)).argmax()]
        boards, counts, parents = boards[~over], counts[~over], parents[~over]
        boards, first, inverse = np.unique(boards, axis=0, return_index=True, return_inverse=True)
        counts = np.bincount(inverse.reshape(-1), counts, len(boards)).astype(np.int64)
        rows = torch.from_numpy(parents[first])
        state = nest.map_structure(lambda x, rows=rows: x[rows], state)
        turn = 1 - turn
    return Lines(results[1], results[0], results[-1], lost_position)


def _after(rules: Rules, boards: np.ndarray, actions: np.ndarray, stones: np.ndarray, possible: np.ndarray
           ) -> np.ndarray:
    after = boards.copy()
    after[possible] = rules.play(boards[possible], actions[possible], stones[possible])
    return after


def chooser(algorithm: Any, game: BoardGame) -> Choose:
    """Return a function that chooses actions with ``predict_step`` for positions observed as in the environment."""

    def choose(boards: np.ndarray, state: Any) -> tuple[np.ndarray, Any]:
        observation = game.observe(boards)
        n = len(boards)
        step_type = StepType.MID if boards.any() else StepType.FIRST
        time_step = TimeStep(torch.full((n, ), step_type, dtype=torch.int32), torch.zeros(n), torch.ones(n),
                             observation, torch.zeros(n, dtype=torch.int64), torch.arange(n))
        inputs, _ = algorithm.transform_timestep(time_step, algorithm.get_initial_transform_state(n))
        with torch.no_grad():
            step = algorithm.predict_step(inputs, state)
        return step.output.cpu().numpy(), step.state

    return choose


def _game_of(env: Any) -> BoardGame:
    while not isinstance(env, BoardGame):
        env = getattr(env, 'wrapped_env', None)
        if not isinstance(env, AlfEnvironment):
            raise SystemExit('the environment of this run is not a board game')
    return env


def _exhaustive(algorithm: Any, game: BoardGame) -> int:
    lost = 0
    for player, name in enumerate(('first', 'second')):
        lines = all_lines(game.rules, chooser(algorithm, game), algorithm.get_initial_predict_state(1), player)
        print(f'as the {name} player: {lines.won} lines won, {lines.drawn} drawn, {lines.lost} lost', flush=True)
        lost += lines.lost
    print(f'lost lines: {lost}')
    return lost


def _play_games(algorithm: Any, rules: Rules, opponent: Any, games: int) -> int:
    from alfx.runs.evaluator import evaluate
    lost = 0.0
    for player, name in enumerate(('first', 'second')):
        env = BoardGame(rules, min(games, 50), opponent, player)
        env.seed(FLAGS.random_seed)
        shares = {what: float(x.mean()) * 100 for what, x in evaluate(env, algorithm, games).env_info().items()}
        print(f"as the {name} player: {', '.join(f'{x:.1f}% {what}' for what, x in shares.items())} of {games} games",
              flush=True)
        lost += shares['lost']
    return int(lost > 0)


def main() -> int:
    """Evaluate the agent in ``--root_dir``; return 1 if it lost."""
    from alfx.runs import building
    from alfx.runs.playing import load_for_play
    policy_flags.set_up_logging()
    root_dir = flags.root_dir_from_flags()
    env, algorithm = policy_flags.policy_from_flags(root_dir, 1)
    load_for_play(root_dir, algorithm, policy_flags.checkpoint_step_from_flags())
    building.set_epsilon_greedy(algorithm, 0.0)
    algorithm.eval()
    game = _game_of(env)
    if FLAGS.exhaustive:
        return int(_exhaustive(algorithm, game) > 0)
    opponents = {'random': lambda: random_opponent, 'minimax': MinimaxOpponent,
                 'search': lambda: SearchOpponent(FLAGS.simulations)}
    return _play_games(algorithm, game.rules, opponents[FLAGS.opponent](), FLAGS.games)


if __name__ == '__main__':
    parser = flags.Parser(__file__, __doc__)
    parser.add('exhaustive', 'play all lines')
    parser.add('opponent random|minimax|search', 'without --exhaustive: the opponent', default='random')
    parser.add('games N', 'without --exhaustive: games on each side', number(int, 1), 500)
    parser.add('simulations N', "simulations per move of 'search'", number(int, 1), 200)
    policy_flags.define_policy_flags(parser)
    flags.run(main, parser)
