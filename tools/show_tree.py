"""Print a search tree as text.

    python tools/show_tree.py --root_dir R --steps 4 --depth 2
    python tools/show_tree.py --position 'X.. .O. ...' --simulations 200

The first command takes ``--steps`` actions with the trained agent of a run, then prints the search for the next action.
Each node shows its visits, its value (reward + discount * mean value of its children, for player 0), its prior, its
reward, and the value predicted by the model. The second command searches a TicTacToe position with the rules only.
"""
from typing import Any

import numpy as np
import torch

from alfx.algorithms.mcts_algorithm import MCTSAlgorithm
from alfx.bin import flags, policy_flags
from alfx.bin.flags import FLAGS, number
from alfx.environments.board_games import GameModel, Rules
from alfx.tree_search.batched_search import TreeSearch
from alfx.tree_search.drawing import tree_as_text
from alfx.tree_search.trees import SearchSettings, Trees


def search_position(text: str, num_simulations: int) -> Trees:
    """Search a position of TicTacToe, three lines of X, O and dots, with the rules only."""
    numbers = {'.': 0, 'X': 1, 'O': -1}
    lines = text.split()
    if [len(line) for line in lines] != [3, 3, 3] or not set(''.join(lines)) <= set(numbers):
        raise SystemExit(f"--position: expected three lines of X, O and dots such as 'X.. .O. ...', found {text!r}")
    rules = Rules()
    board = np.array([[[numbers[stone] for stone in line] for line in lines]], np.int8)
    model = GameModel(rules)
    root = model.predict(torch.from_numpy(board))
    if bool(root.game_over):
        raise SystemExit(f'--position: the game {text!r} is over')
    settings = SearchSettings(num_simulations, two_players=True, known_bounds=(-1.0, 1.0))
    return TreeSearch(settings).run(model, root, root.action_probs, torch.from_numpy(rules.to_play(board)))


def search_of_run(root_dir: str, steps: int) -> Trees:
    """Return the search of a trained agent after ``steps`` actions."""
    from alfx.runs.playing import load_for_play
    env, algorithm = policy_flags.policy_from_flags(root_dir, 1)
    load_for_play(root_dir, algorithm, policy_flags.checkpoint_step_from_flags())
    algorithm.eval()
    searches: list[Any] = [x for x in algorithm.modules() if isinstance(x, MCTSAlgorithm)]
    if not searches:
        raise SystemExit(f'the agent of {root_dir} does not use tree search')
    time_step, state = env.current_time_step(), algorithm.get_initial_predict_state(1)
    transform_state = algorithm.get_initial_transform_state(1)
    for i in range(steps + 1):
        inputs, transform_state = algorithm.transform_timestep(time_step, transform_state)
        with torch.no_grad():
            step = algorithm.predict_step(inputs, state)
        if i < steps:
            time_step, state = env.step(step.output), step.state
            if bool(time_step.is_last()):
                raise SystemExit(f'the episode was over after {i + 1} steps; choose fewer --steps')
    env.close()
    trees = searches[0].latest_trees
    assert trees is not None, 'predict_step has just searched'
    return trees


def main() -> int:
    """Print the tree."""
    if FLAGS.position:
        trees = search_position(FLAGS.position, FLAGS.simulations)
    else:
        policy_flags.set_up_logging()
        trees = search_of_run(flags.root_dir_from_flags(), FLAGS.steps)
    print(tree_as_text(trees, 0, FLAGS.depth, FLAGS.min_visits))
    return 0


if __name__ == '__main__':
    parser = flags.Parser(__file__, __doc__)
    parser.add('steps N', 'actions before the search', number(int, 0), 0)
    parser.add('depth N', 'depth of the printed nodes', number(int, 1), 2)
    parser.add('min_visits N', 'skip nodes with fewer visits', number(int, 0), 1)
    parser.add('position TEXT', 'TicTacToe position to search with the rules')
    parser.add('simulations N', 'simulations with --position', number(int, 1), 200)
    policy_flags.define_policy_flags(parser)
    flags.run(main, parser)
