"""Search trees as text."""
from collections.abc import Callable, Iterator

from alfx.tree_search.trees import CHILD, OVER, PRIOR, REWARD, TO_PLAY, VALUE, VALUE_SUM, VISITS, Trees


def tree_as_text(trees: Trees, tree: int = 0, max_depth: int = 3, min_visits: int = 1,
                 name: Callable[[int], str] = str) -> str:
    """Format a tree with one line for each node, the most visited children first.

    Args:
        trees: trees after a search.
        tree: index of the tree.
        max_depth: maximum depth of the nodes shown; the root has depth 0.
        min_visits: nodes with fewer visits are skipped.
        name: function that returns the name of an action.

    Returns:
        Lines with the action, its visits, value (reward + discount * mean value of the child), prior, reward, and the
        model's value of the node.
    """
    ints, floats = trees.ints[tree], trees.floats[tree]
    root = floats[0, VALUE_SUM] / ints[0, VISITS]
    player = f', player {ints[0, TO_PLAY]} to move' if trees.settings.two_players else ''
    lines = [f'root: visits {ints[0, VISITS]}, value {root:.4g}, model {floats[0, VALUE]:.4g}{player}']
    lines += _lines(trees, tree, 0, max_depth, min_visits, name, '')
    return '\n'.join(lines)


def _lines(trees: Trees, tree: int, node: int, depth: int, min_visits: int, name: Callable[[int], str],
           indent: str) -> Iterator[str]:
    if depth == 0:
        return
    A, ints, floats = trees.num_actions, trees.ints[tree], trees.floats[tree]
    children = [(-int(ints[node, CHILD + A + a]), a) for a in range(A) if ints[node, CHILD + a]]
    shown = [(a, int(ints[node, CHILD + a])) for visits, a in sorted(children) if -visits >= min_visits]
    for i, (a, child) in enumerate(shown):
        last = i == len(shown) - 1
        over = ', over' if ints[child, OVER] else ''
        yield (f'{indent}{"└─" if last else "├─"} {name(a)}: visits {ints[child, VISITS]}, value '
               f'{floats[node, PRIOR + A + a]:.4g}, prior {floats[node, PRIOR + a]:.3f}, reward '
               f'{floats[child, REWARD]:.4g}, model {floats[child, VALUE]:.4g}{over}')
        yield from _lines(trees, tree, child, depth - 1, min_visits, name, indent + ('   ' if last else '│  '))
