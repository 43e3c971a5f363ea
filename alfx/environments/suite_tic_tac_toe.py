"""TicTacToe in which the agent plays both sides and observes the board alone."""
from alfx.environments.board_games import BoardGame, Rules
from alfx.gin_utils import configurable


class TicTacToeEnvironment(BoardGame):
    """TicTacToe in which the agent plays both sides.

    The observation is float32 ``[3, 3]``: 1 for player 0, who begins, -1 for player 1, 0 for an empty square. The
    reward is 1 if player 0 wins or player 1 makes an illegal move, and -1 if player 1 wins or player 0 makes an illegal
    move; see :class:`~alfx.environments.board_games.BoardGame`.

    Args:
        batch_size: B.
    """

    def __init__(self, batch_size: int):
        super().__init__(Rules(3, 3, 3), batch_size, board_only=True)

    def observation_desc(self) -> str:
        """Return a description of the observation."""
        return '1: player 0, -1: player 1, 0: empty'


@configurable
def load(name: str = '', batch_size: int = 1) -> TicTacToeEnvironment:
    """Create ``batch_size`` games; the only allowed names are ``''``, 'tic_tac_toe' and 'TicTacToe'.

    Raises:
        ValueError: another name.
    """
    if name not in ('', 'tic_tac_toe', 'TicTacToe'):
        raise ValueError(f"suite_tic_tac_toe.load: expected no name or 'tic_tac_toe', found {name!r}")
    return TicTacToeEnvironment(batch_size)
