"""Batched two-player games in which k stones in a row win; one environment is one game.

The rules are pure functions of boards (:class:`Rules`), numpy arrays of any number of positions, so the environment,
its opponents and a search with an exact model share them. Without an opponent the agent plays both players, and
rewards are those of player 0, who begins.
"""
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from alfx.data_structures import StepType, TimeStep
from alfx.environments.alf_environment import SpecifiedEnvironment, check_action
from alfx.environments.rendering import Window
from alfx.environments.seeding import batch_seed
from alfx.gin_utils import configurable
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.tree_search.batched_search import Prediction, TreeSearch
from alfx.tree_search.trees import SearchSettings

OUTCOMES = ('lost', 'drawn', 'won')


class Rules:
    """Rules of "k in a row" on a rectangular board.

    A position is int8 ``[rows, columns]``: 1 for a stone of player 0, -1 for a stone of player 1, 0 for an empty
    square. An action is the index of a square, row by row. With ``gravity`` it is a column, in which the stone falls
    down.

    Args:
        rows: number of rows.
        columns: number of columns.
        in_a_row: k, the number of stones in a row that wins.
        gravity: let stones fall towards row ``rows - 1``.

    Raises:
        ValueError: the board is too small for k stones in a row.
    """

    def __init__(self, rows: int = 3, columns: int = 3, in_a_row: int = 3, gravity: bool = False):
        if min(rows, columns) < 1 or not 1 <= in_a_row <= max(rows, columns):
            raise ValueError('board game: expected rows and columns >= 1 and in_a_row in 1 .. max(rows, columns), '
                             f'found {rows}, {columns} and {in_a_row}')
        self.rows, self.columns, self.in_a_row, self.gravity = rows, columns, in_a_row, gravity
        self.num_actions = columns if gravity else rows * columns
        self._lines = self._all_lines()

    def _all_lines(self) -> np.ndarray:
        """Return the squares of each line of k, ``[lines, k]``."""
        k, lines = self.in_a_row, []
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
            for row in range(self.rows):
                for column in range(self.columns):
                    last_row, last_column = row + (k - 1) * down, column + (k - 1) * right
                    if last_row < self.rows and 0 <= last_column < self.columns:
                        lines.append([(row + i * down) * self.columns + column + i * right for i in range(k)])
        return np.array(lines)

    def valid(self, board: np.ndarray) -> np.ndarray:
        """Return the mask of legal actions, bool ``[B, num_actions]``, on boards ``[B, rows, columns]``."""
        return (board[:, 0] if self.gravity else board.reshape(-1, self.rows * self.columns)) == 0

    def play(self, board: np.ndarray, action: np.ndarray, stone: np.ndarray) -> np.ndarray:
        """Return the boards after legal actions ``[B]`` with stones ``[B]`` (1 or -1)."""
        board, index = board.copy(), np.arange(len(board))
        if self.gravity:
            row = (board[index, :, action] == 0).sum(-1) - 1
            board[index, row, action] = stone
        else:
            board.reshape(-1, self.rows * self.columns)[index, action] = stone
        return board

    def winner(self, board: np.ndarray) -> np.ndarray:
        """Return 1 or -1 for the player who has k in a row, else 0; int8 ``[B]``."""
        sums = board.reshape(-1, self.rows * self.columns)[:, self._lines].sum(-1, dtype=np.int16)
        won, lost = (sums == self.in_a_row).any(-1), (sums == -self.in_a_row).any(-1)
        return won.astype(np.int8) - lost.astype(np.int8)

    def is_over(self, board: np.ndarray) -> np.ndarray:
        """Return whether a player has won or the board is full, bool ``[B]``."""
        return (self.winner(board) != 0) | ~self.valid(board).any(-1)

    def to_play(self, board: np.ndarray) -> np.ndarray:
        """Return the player to move, 0 or 1, int8 ``[B]``."""
        return ((board != 0).sum((1, 2)) % 2).astype(np.int8)


Opponent = Callable[[Rules, np.ndarray, np.random.Generator], np.ndarray]
"""Opponent: called with the rules, boards ``[B, rows, columns]`` and a generator; returns its actions ``[B]``."""


@configurable
def random_opponent(rules: Rules, board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Choose uniformly among the legal actions."""
    return (rng.random((len(board), rules.num_actions)) * rules.valid(board)).argmax(-1)


@configurable
class MinimaxOpponent:
    """Opponent that plays perfectly and chooses uniformly among the best actions; for games as small as TicTacToe."""

    def __init__(self) -> None:
        self._values: dict[bytes, int] = {}

    def __call__(self, rules: Rules, board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the actions for a batch of boards, see :data:`Opponent`."""
        best = [self.best_actions(rules, position) for position in board]
        return np.array([actions[rng.integers(len(actions))] for actions in best])

    def best_actions(self, rules: Rules, position: np.ndarray) -> list[int]:
        """Return all actions with the best outcome on a board ``[rows, columns]``."""
        values = self._values_after(rules, position)
        best = max(values.values())
        return [action for action, value in values.items() if value == best]

    def value(self, rules: Rules, position: np.ndarray) -> int:
        """Return the outcome for player 0 if both play perfectly: 1, 0 or -1."""
        key = position.tobytes()
        if key not in self._values:
            if rules.is_over(position[None])[0]:
                self._values[key] = int(rules.winner(position[None])[0])
            else:
                sign = 1 - 2 * int(rules.to_play(position[None])[0])
                self._values[key] = sign * max(self._values_after(rules, position).values())
        return self._values[key]

    def _values_after(self, rules: Rules, position: np.ndarray) -> dict[int, int]:
        """Return the value for the player to move after each legal action."""
        possible = np.flatnonzero(rules.valid(position[None])[0])
        sign = 1 - 2 * int(rules.to_play(position[None])[0])
        after = rules.play(np.repeat(position[None], len(possible), 0), possible, np.full(len(possible), sign))
        return {int(action): sign * self.value(rules, child) for action, child in zip(possible, after)}


class GameModel:
    """Exact model of the game for tree search; it knows the rules and nothing else.

    The prior is uniform over legal actions, and the value of an undecided position is 0.

    Args:
        rules: rules of the game.
    """

    def __init__(self, rules: Rules):
        self.rules = rules

    def predict(self, board: torch.Tensor, reward: Any = ()) -> Prediction:
        """Return the prediction for boards, int8 ``[N, rows, columns]``."""
        boards = board.numpy()
        valid = torch.from_numpy(self.rules.valid(boards)).double()
        return Prediction(torch.zeros(len(boards), dtype=torch.float64), reward,
                          torch.from_numpy(self.rules.is_over(boards)),
                          action_probs=valid / valid.sum(-1, keepdim=True).clamp_min(1), state=board)

    def __call__(self, board: torch.Tensor, action: torch.Tensor) -> Prediction:
        """Return the prediction after actions ``[N]``; a finished game does not change."""
        before, index = board.numpy(), action.numpy()
        possible = self.rules.valid(before)[np.arange(len(before)), index]
        after = before.copy()
        after[possible] = self.rules.play(before[possible], index[possible],
                                          1 - 2 * self.rules.to_play(before[possible]))
        return self.predict(torch.from_numpy(after), torch.from_numpy(self.rules.winner(after).astype(np.float64)))


@configurable
class SearchOpponent:
    """Opponent that runs a tree search with the rules alone and plays the most visited action.

    Args:
        num_simulations: number of simulations of each search; more give stronger play.
    """

    def __init__(self, num_simulations: int = 200):
        self._search = TreeSearch(SearchSettings(num_simulations, two_players=True, known_bounds=(-1.0, 1.0),
                                                 break_tie_eps=1e-3))

    def __call__(self, rules: Rules, board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the actions for a batch of boards, see :data:`Opponent`."""
        model = GameModel(rules)
        root = model.predict(torch.from_numpy(board))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**63)))
            trees = self._search.run(model, root, root.action_probs, torch.from_numpy(rules.to_play(board)))
        return trees.root_visits.argmax(-1).numpy()


class BoardGame(SpecifiedEnvironment):
    """``batch_size`` games that are played at the same time.

    The observation is a dictionary: 'board', float32 ``[rows, columns]`` (1: player 0, -1: player 1, 0: empty);
    'valid_action_mask', bool ``[num_actions]``; 'to_play', int8, 0 or 1; 'steps', int32, the number of moves so far.
    With ``board_only`` the observation is the board alone. At LAST all actions are masked.

    The reward is 1 if player 0 wins, -1 if player 1 wins, and 0 otherwise. A player who makes an illegal move loses
    immediately.

    With an opponent, the agent is one of the players, the environment moves for the other one, and rewards are those of
    the agent. ``env_info`` has 'lost', 'drawn' and 'won', float32: at LAST 1 for the outcome of the agent (without an
    opponent: of player 0), elsewhere 0.

    Args:
        rules: rules of the game.
        batch_size: B.
        opponent: the other player; ``None``: the agent plays both sides.
        agent_player: the agent's side, 0 or 1; ``None``: the agent changes sides from game to game, and half of the
            environments begin with each side. Only with an opponent.
        board_only: use the board as the observation.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, rules: Rules, batch_size: int = 1, opponent: Opponent | None = None,
                 agent_player: int | None = None, board_only: bool = False):
        if batch_size < 1:
            raise ValueError(f'board game: batch_size: expected at least 1, found {batch_size}')
        if agent_player not in (None, 0, 1) or (agent_player is not None and opponent is None):
            raise ValueError('board game: agent_player: expected 0, 1 or None, and only with an opponent, found '
                             f'{agent_player}')
        self.rules, self._batch_size, self._opponent = rules, batch_size, opponent
        self._agent_player, self._board_only = agent_player, board_only
        self._rng = np.random.default_rng()
        self._board = np.zeros((batch_size, rules.rows, rules.columns), np.int8)
        self._agent = np.zeros(batch_size, np.int64)
        self._ended = np.zeros(batch_size, bool)  # by request_reset
        self._window = Window('board game')
        self._begin_sides()

    def _begin_sides(self) -> None:
        if self._opponent is not None:
            alternating = np.arange(self._batch_size) % 2
            self._agent = alternating if self._agent_player is None else np.full(self._batch_size, self._agent_player)

    def observation_spec(self) -> NestedTensorSpec:
        rules = self.rules
        board = BoundedTensorSpec((rules.rows, rules.columns), torch.float32, -1, 1)
        if self._board_only:
            return board
        return {'board': board, 'valid_action_mask': TensorSpec((rules.num_actions, ), torch.bool),
                'to_play': BoundedTensorSpec((), torch.int8, 0, 1),
                'steps': BoundedTensorSpec((), torch.int32, 0, rules.rows * rules.columns)}

    def action_spec(self) -> NestedTensorSpec:
        return BoundedTensorSpec((), torch.int64, 0, self.rules.num_actions - 1)

    def env_info_spec(self) -> NestedTensorSpec:
        return {outcome: TensorSpec(()) for outcome in OUTCOMES}

    # Playing ---------------------------------------------------------------------------------------------------

    def _reset(self) -> TimeStep:
        self._begin_sides()
        self._board[:], self._ended = 0, np.zeros(self._batch_size, bool)
        self._open(np.ones(self._batch_size, bool))
        return self._time_step(np.full(self._batch_size, StepType.FIRST), np.zeros(self._batch_size),
                               np.zeros(self._batch_size, np.int64))

    def _open(self, games: np.ndarray) -> None:
        """Let the opponent make the first move of new games in which it is player 0."""
        self._move_opponent(games & (self._agent == 1))

    def _step(self, action: NestedTensor) -> TimeStep:
        action = self._checked(action)
        new = self.current_time_step().is_last().numpy() | self._ended
        self._ended = np.zeros(self._batch_size, bool)
        playing = ~new
        self._start(new)
        index = np.flatnonzero(playing)
        possible = np.zeros(self._batch_size, bool)
        possible[index] = self.rules.valid(self._board[index])[np.arange(len(index)), action[index]]
        stone = 1 - 2 * self.rules.to_play(self._board)
        reward = np.where(playing & ~possible, -stone, 0).astype(np.float32)
        self._move(playing & possible, action, stone)
        reward += np.where(playing, self.rules.winner(self._board), 0)
        over = playing & (~possible | self.rules.is_over(self._board))
        if self._opponent is not None:
            going = playing & ~over
            self._move_opponent(going)
            reward += np.where(going, self.rules.winner(self._board), 0)
            over |= going & self.rules.is_over(self._board)
            reward *= 1 - 2 * self._agent
        step_type = np.where(new, StepType.FIRST, np.where(over, StepType.LAST, StepType.MID))
        return self._time_step(step_type, reward, np.where(new, 0, action))

    def _start(self, games: np.ndarray) -> None:
        """Start new games; the agent changes sides unless its side is fixed."""
        self._board[games] = 0
        if self._opponent is not None and self._agent_player is None:
            self._agent = np.where(games, 1 - self._agent, self._agent)
        self._open(games)

    def _move(self, games: np.ndarray, action: np.ndarray, stone: np.ndarray) -> None:
        self._board[games] = self.rules.play(self._board[games], action[games], stone[games])

    def _move_opponent(self, games: np.ndarray) -> None:
        if self._opponent is None or not games.any():
            return
        boards = self._board[games]
        self._board[games] = self.rules.play(boards, self._opponent(self.rules, boards, self._rng),
                                             1 - 2 * self.rules.to_play(boards))

    def _checked(self, action: NestedTensor) -> np.ndarray:
        check_action(action, self.action_spec(), self._batch_size)
        assert isinstance(action, torch.Tensor)
        numbers = action.detach().cpu().long().numpy()
        if ((numbers < 0) | (numbers >= self.rules.num_actions)).any():
            raise SpecError(f'action: expected numbers in 0 .. {self.rules.num_actions - 1}, found {numbers.tolist()}')
        return numbers

    def _time_step(self, step_type: np.ndarray, reward: np.ndarray, prev_action: np.ndarray) -> TimeStep:
        last = step_type == StepType.LAST
        outcome = np.sign(reward)
        info = {name: torch.from_numpy((last & (outcome == i - 1)).astype(np.float32))
                for i, name in enumerate(OUTCOMES)}
        return TimeStep(torch.from_numpy(step_type.astype(np.int32)), torch.from_numpy(reward.astype(np.float32)),
                        torch.from_numpy((~last).astype(np.float32)), self._observe_at(last),
                        torch.from_numpy(prev_action.astype(np.int64)), torch.arange(self._batch_size), env_info=info)

    def _observe_at(self, last: np.ndarray) -> NestedTensor:
        observation = self.observe(self._board)
        if not self._board_only:
            observation['valid_action_mask'] &= torch.from_numpy(~last)[:, None]
        return observation

    def observe(self, board: np.ndarray) -> Any:
        """Return the observation of any number of boards ``[N, rows, columns]``."""
        stones = torch.from_numpy(board.astype(np.float32))
        if self._board_only:
            return stones
        return {'board': stones, 'valid_action_mask': torch.from_numpy(self.rules.valid(board)),
                'to_play': torch.from_numpy(self.rules.to_play(board)),
                'steps': torch.from_numpy((board != 0).sum((1, 2)).astype(np.int32))}

    # Resets, state and rendering -------------------------------------------------------------------------------

    def request_reset(self, mask: torch.Tensor) -> None:
        self._ended = self._ended | mask.numpy()

    def _seed(self, seed: int | None) -> None:
        self._rng = np.random.default_rng(batch_seed(seed, 0))

    def get_state(self) -> Any:
        return {'current': self.current_time_step(), 'board': self._board.copy(), 'agent': self._agent.copy(),
                'ended': self._ended.copy(), 'rng': self._rng.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self._current = state['current']
        self._board, self._agent, self._ended = (state[name].copy() for name in ('board', 'agent', 'ended'))
        self._rng.bit_generator.state = state['rng']

    def render(self, mode: str = 'rgb_array') -> np.ndarray | None:
        """Show game 0 in a window ('human'), or return its image."""
        if mode == 'rgb_array':
            return picture(self._board[0])
        self._window.show(picture(self._board[0]))
        return None

    def close(self) -> None:
        self._window.close()


def picture(board: np.ndarray, square: int = 32) -> np.ndarray:
    """Return an image of a board, uint8 ``[H, W, 3]``: red stones of player 0, blue stones of player 1."""
    colours = np.array([[235, 235, 225], [200, 60, 50], [50, 80, 200]], np.uint8)  # of 0, 1 and -1
    cells = colours[board.astype(np.int64)].repeat(square, 0).repeat(square, 1)
    cells[::square], cells[:, ::square] = 90, 90
    return cells


@configurable
def load(name: str = 'tic_tac_toe', batch_size: int = 1, opponent: Opponent | None = None,
         agent_player: int | None = None) -> BoardGame:
    """Create a batch of one of the games.

    Args:
        name: 'tic_tac_toe' (3 x 3, 3 in a row) or 'connect_four' (6 x 7 with gravity, 4 in a row).
        batch_size: B.
        opponent: see :class:`BoardGame`; for example ``@random_opponent`` or ``@MinimaxOpponent()``.
        agent_player: see :class:`BoardGame`.

    Raises:
        ValueError: an unknown name.
    """
    games = {'tic_tac_toe': (3, 3, 3, False), 'connect_four': (6, 7, 4, True)}
    if name not in games:
        raise ValueError(f'board_games.load: expected one of {sorted(games)}, found {name!r}')
    return BoardGame(Rules(*games[name]), batch_size, opponent, agent_player)
