"""Batch of B search trees: the data of the nodes, as rows of two arrays.

Row n of tree b is ``ints[b, n]`` and ``floats[b, n]``; row 0 is the root. The visits and the value of an action (reward
+ discount * value of the child) are also stored in the row of the parent, so that choosing an action reads one row. The
latent states of the model are stored in :mod:`alfx.tree_search.batched_search`, which drives the search. Both
implementations, :mod:`alfx.tree_search.tensor_search` and ``kernel.c``, work on these arrays.
"""
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alfx.tree_search import rules

# Columns of ``ints``; from CHILD on the A children (0: none), then the visits of the A actions.
VISITS, PARENT, ACTION, TO_PLAY, OVER, DEPTH, CHILDREN, CHILD = range(8)
# Columns of ``floats``; from PRIOR on the priors of the A actions, then their values, then the logs of their priors.
# VALUE is the value predicted by the model.
VALUE_SUM, VALUE, REWARD, PRIOR = range(4)

RULES = ('ucb', 'rkl', 'kl', 'gumbel')
_MOST_SIMULATIONS = 10_000  # larger numbers take hours or all memory for one search


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the search.

    Attributes:
        num_simulations: nodes that are added to each tree, at most 10,000; the model is called once for one or several
            of them.
        discount: discount of rewards.
        rule: choice of actions during the descent: 'ucb', 'rkl' or 'kl' (sampled from a regularized policy), 'gumbel'.
        two_players: the player to move alternates; all values are from the perspective of the first player.
        pb_c_init: c_init of :func:`~alfx.tree_search.rules.exploration_factors`.
        pb_c_base: c_base of that function.
        minus_one: ``minus_one`` of that function, for the upper confidence bounds.
        unexpanded_value: see :func:`~alfx.tree_search.rules.value_scores`.
        known_bounds: smallest and largest value; ``None`` uses those seen in each tree.
        min_max_delta: minimum of the divisor in the normalization of values.
        break_tie_eps: upper limit of the random numbers added to upper confidence bounds.
        max_depth: depth at which nodes have no children.
        num_parallel: leaves that are expanded together in each tree. With 1, 'gumbel' still runs independent
            simulations together (:func:`~alfx.tree_search.rules.simulations_together`).
        expand_all: expand all actions of a leaf at once.
        expand_root: expand all actions of the root first.
        max_num_considered: number of actions of the root among which 'gumbel' chooses.
        gumbel_scale: scale of the Gumbel noise.
        value_scale: see :func:`~alfx.tree_search.rules.completed_values`.
        maxvisit_init: see :func:`~alfx.tree_search.rules.completed_values`.

    Raises:
        ValueError: an option is out of range, or incompatible with another.
    """

    num_simulations: int
    discount: float = 1.0
    rule: str = 'ucb'
    two_players: bool = False
    pb_c_init: float = 1.25
    pb_c_base: float = 19652.0
    minus_one: bool = False
    unexpanded_value: float | str = 0.5
    known_bounds: tuple[float, float] | None = None
    min_max_delta: float = 1e-30
    break_tie_eps: float = 0.0
    max_depth: int = 1000000
    num_parallel: int = 1
    expand_all: bool = False
    expand_root: bool = False
    max_num_considered: int = 16
    gumbel_scale: float = 1.0
    value_scale: float = 0.1
    maxvisit_init: float = 50.0

    def __post_init__(self) -> None:
        for name, least, most in (('num_simulations', 1, _MOST_SIMULATIONS), ('num_parallel', 1, _MOST_SIMULATIONS),
                                  ('max_num_considered', 1, _MOST_SIMULATIONS),
                                  ('max_depth', 1 + self.expand_all, sys.maxsize)):
            if not least <= getattr(self, name) <= most:
                limit = f'at least {least}' if getattr(self, name) < least else f'at most {most:,}'
                raise ValueError(f'{name}: expected {limit}, found {getattr(self, name):,}')
        for name in ('break_tie_eps', 'gumbel_scale', 'value_scale', 'maxvisit_init', 'pb_c_init'):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f'{name}: expected a number >= 0, found {getattr(self, name)}')
        for name in ('min_max_delta', 'pb_c_base'):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f'{name}: expected a positive number, found {getattr(self, name)}')
        if not 0 <= self.discount <= 1:
            raise ValueError(f'discount: expected a number in [0, 1], found {self.discount}')
        if self.rule not in RULES:
            raise ValueError(f'rule: expected one of {RULES}, found {self.rule!r}')
        if isinstance(self.unexpanded_value, str) and self.unexpanded_value not in rules.UNEXPANDED:
            raise ValueError(f'unexpanded_value: expected a number or one of {rules.UNEXPANDED}, found '
                             f'{self.unexpanded_value!r}')
        if self.known_bounds is not None and not self.known_bounds[0] < self.known_bounds[1]:
            raise ValueError(f'known_bounds: expected (least, largest), found {self.known_bounds}')
        if self.num_simulations % self.num_parallel:
            raise ValueError(f'num_simulations: expected a multiple of the {self.num_parallel} parallel simulations, '
                             f'found {self.num_simulations}')
        if self.expand_all and self.num_parallel > 1:
            raise ValueError('expanding all children of a leaf is incompatible with parallel simulations, found '
                             f'{self.num_parallel} of them')
        if self.rule == 'gumbel' and (self.expand_all or self.expand_root):
            raise ValueError("rule 'gumbel' selects the actions of the root to expand; it is incompatible with "
                             'expanding all of them')

    @property
    def num_steps(self) -> int:
        """Number of calls of the model without the root and ``expand_root``; 'gumbel' may need fewer."""
        return self.num_simulations // self.num_parallel

    @property
    def finds_independent(self) -> bool:
        """Return whether independent simulations run together."""
        return self.rule == 'gumbel' and self.num_parallel == 1

    @cached_property
    def rule_code(self) -> int:
        return RULES.index(self.rule)

    @cached_property
    def unexpanded_code(self) -> int:
        """Code of ``unexpanded_value`` in ``kernel.c``: 0 for a number, else the code of the string."""
        return 1 + rules.UNEXPANDED.index(self.unexpanded_value) if isinstance(self.unexpanded_value, str) else 0

    @cached_property
    def unexpanded_constant(self) -> float:
        return 0.0 if isinstance(self.unexpanded_value, str) else float(self.unexpanded_value)

    @cached_property
    def depth_limit(self) -> int:
        """Depth at which nodes are not expanded."""
        return min(self.max_depth - self.expand_all, self.num_simulations + 1)

    def num_nodes(self, num_actions: int) -> int:
        """Number of rows of a tree."""
        return 1 + num_actions * self.expand_root + self.num_simulations * (num_actions if self.expand_all else 1)


class Noise(NamedTuple):
    """All random numbers of one search, drawn beforehand; arrays that the rule does not need are empty.

    Attributes:
        ties: float64 ``[num_steps, num_parallel, B, A]``, for 'ucb'.
        seeds: int64 ``[num_steps, num_parallel, B]``, for 'rkl' and 'kl'.
        gumbel: float64 ``[B, A]``, for 'gumbel'.
    """

    ties: Tensor
    seeds: Tensor
    gumbel: Tensor

    @classmethod
    def none(cls, settings: SearchSettings, batch_size: int, num_actions: int) -> 'Noise':
        """Create noise of zeros."""
        outer = settings.num_steps, settings.num_parallel, batch_size
        by_rule = {'ucb': (outer, (0, *outer[1:])), 'gumbel': ((0, *outer[1:]), ) * 2}
        ties, seeds = by_rule.get(settings.rule, ((0, *outer[1:]), outer))
        return cls(torch.zeros(*ties, num_actions, dtype=torch.float64), torch.zeros(seeds, dtype=torch.int64),
                   torch.zeros(batch_size, num_actions, dtype=torch.float64))

    @classmethod
    def draw(cls, settings: SearchSettings, batch_size: int, num_actions: int) -> 'Noise':
        """Draw the random numbers from torch's CPU generator."""
        noise = cls.none(settings, batch_size, num_actions)
        if settings.rule == 'ucb' and settings.break_tie_eps:
            noise.ties.uniform_().mul_(settings.break_tie_eps)
        elif settings.rule in ('rkl', 'kl'):
            noise.seeds.random_(-2**63, None)
        elif settings.rule == 'gumbel' and settings.gumbel_scale:
            noise.gumbel.exponential_().clamp_min_(rules.TINY).log_().mul_(-settings.gumbel_scale)
        return noise


class Trees:
    """Trees of one batch of searches; the arrays are reused for every search.

    Args:
        settings: settings of the search.
        batch_size: number of trees B.
        num_actions: number of actions A.
    """

    def __init__(self, settings: SearchSettings, batch_size: int, num_actions: int):
        self.settings = settings
        self.batch_size, self.num_actions = batch_size, num_actions
        nodes, paths, depths = settings.num_nodes(num_actions), settings.num_parallel, 1
        if settings.finds_independent:  # these paths share only the root
            paths = max(rules.simulations_together((min(settings.max_num_considered, num_actions), ),
                                                   settings.num_simulations))
        elif paths > 1:
            depths = settings.depth_limit + 1
        self.num_paths = paths
        """Maximum number of leaves that are expanded together."""
        self.steps: Sequence[int] = [settings.num_parallel] * settings.num_steps
        """Number of leaves that are expanded together in each step of this search."""
        self.ints = np.zeros((batch_size, nodes, CHILD + 2 * num_actions), np.int32)
        self.floats = np.zeros((batch_size, nodes, PRIOR + 3 * num_actions))
        self._root = np.zeros(self.ints.shape[2], np.int32)
        self._root[VISITS], self._root[PARENT] = 1, -1
        self.bounds = np.zeros((batch_size, 2))
        """Smallest and largest value seen in each tree."""
        self.chosen = np.zeros((3, paths, batch_size), np.int64)
        """Result of ``select`` for each path: the node, the action, and the node again if it cannot be expanded, else
        -1."""
        self.paths = np.zeros((batch_size, paths, depths, 2), np.int64)
        """Node and action of each path of a step, at each depth where paths may meet; node -1 below its end."""
        largest = settings.num_simulations + paths + 2
        self.factors = rules.exploration_factors(largest, settings.pb_c_init, settings.pb_c_base,
                                                 settings.minus_one and settings.rule == 'ucb').numpy()
        self.considered = rules.considered_visits(min(settings.max_num_considered, num_actions),
                                                  settings.num_simulations).numpy()
        self.num_considered = np.zeros(batch_size, np.int64)
        self.ties, self.seeds, self.gumbel = (x.numpy() for x in Noise.none(settings, batch_size, num_actions))

    def plant(self, value: Tensor, prior: Tensor, to_play: Tensor, noise: Noise) -> None:
        """Reset the trees to their roots.

        Args:
            value: float64 ``[B]``, values predicted by the model.
            prior: float64 ``[B, A]``.
            to_play: int ``[B]``, 0 or 1.
            noise: random numbers of this search.
        """
        s, A, ints, floats, values = self.settings, self.num_actions, self.ints[:, 0], self.floats[:, 0], value.numpy()
        ints[:] = self._root
        ints[:, TO_PLAY] = to_play.numpy()
        floats[:] = 0.0
        floats[:, VALUE_SUM] = floats[:, VALUE] = values
        floats[:, PRIOR:PRIOR + A] = prior.numpy()
        self.bounds[:] = values[:, None] if s.known_bounds is None else s.known_bounds
        if s.rule == 'gumbel':
            floats[:, PRIOR + 2 * A:] = prior.log().numpy()
            np.minimum((prior.numpy() > 0).sum(-1), self.considered.shape[0] - 1, out=self.num_considered)
        if s.finds_independent:
            self.steps = rules.simulations_together(tuple(sorted(set(self.num_considered.tolist()))), s.num_simulations)
        for own, drawn in zip((self.ties, self.seeds, self.gumbel), noise):
            if own.size:
                own[:] = drawn.numpy()

    def choose_roots(self, places: np.ndarray) -> None:
        """Choose the roots, all of whose actions are to be expanded; ``places`` as in :meth:`place`."""
        self.chosen[0], self.chosen[2] = 0, -1
        self.place(places, 1, 1, True)

    def place(self, places: np.ndarray, count: int, first: int, all_actions: bool) -> None:
        """Write the inputs of the model for the nodes and actions in ``chosen``.

        Args:
            places: int64 ``[3, n * B]``: the rows ``node * B + b`` of the parent nodes, the actions, and the rows of
                the new nodes ``first``, ``first + 1``, ....
            count: number of chosen paths.
            first: see above.
            all_actions: predict all actions of a single node instead of the chosen action.
        """
        tree, rows = np.arange(self.batch_size), places.reshape(3, -1, self.batch_size)
        rows[0] = self.chosen[0, :count] * self.batch_size + tree
        rows[1] = np.arange(self.num_actions)[:, None] if all_actions else self.chosen[1, :count]
        rows[2] = (first + np.arange(rows.shape[1]))[:, None] * self.batch_size + tree

    # Results of a search ---------------------------------------------------------------------------------------

    def tensor_of(self, array: np.ndarray, row: int | slice, first: int, count: int = 1) -> Tensor:
        """Return columns of rows of ``ints`` or ``floats`` as float64, ``[B, ..., count]``."""
        return torch.from_numpy(array[:, row, first:first + count]).double()

    @property
    def root_visits(self) -> Tensor:
        """Visits of the actions of the roots, float64 ``[B, A]``."""
        return self.tensor_of(self.ints, 0, CHILD + self.num_actions, self.num_actions)

    def mean_value(self, node: int = 0) -> Tensor:
        """Mean of the values backed up to a node of all trees, float64 ``[B]``."""
        return torch.from_numpy(self.floats[:, node, VALUE_SUM] / self.ints[:, node, VISITS])

    def players(self, node: int = 0) -> Tensor:
        """Player to move at a node, int32 ``[B]``; always 0 in a game for one player."""
        return torch.from_numpy(self.ints[:, node, TO_PLAY] * self.settings.two_players)
