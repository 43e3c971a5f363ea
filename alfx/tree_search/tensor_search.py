"""The two halves of a simulation as tensor operations: slow, and the reference for the compiled code.

All trees descend together, one level at a time; trees that have arrived wait. Paths of the same tree are selected one
after the other, because each path takes the earlier ones into account.
"""
import torch
from torch import Tensor

from alfx.tree_search import rules
from alfx.tree_search.trees import (ACTION, CHILD, CHILDREN, DEPTH, OVER, PARENT, PRIOR, REWARD, TO_PLAY, VALUE,
                                    VALUE_SUM, VISITS, Trees)


class TensorSearch:
    """Selection, expansion and backup in the arrays of ``trees``, as tensor operations.

    Args:
        trees: the trees.
    """

    def __init__(self, trees: Trees):
        self._trees = trees
        self._growth = _Growth(trees)

    def select(self, step: int, count: int, first: int, places: Tensor) -> None:
        """Descend from the roots to the leaves to expand, and write them to ``trees.chosen`` and ``places``.

        With 'ucb' and 'gumbel', each path of a tree assumes one more visit of the actions that the earlier paths of
        this step chose. With 'rkl' and 'kl' the paths are sampled independently.

        Args:
            step: number of the step, from 0.
            count: number of paths in this step.
            first: see :meth:`expand_backup`.
            places: see :meth:`alfx.tree_search.trees.Trees.place`.
        """
        for k in range(count):
            _Descent(self._trees, step, k, count > 1).run()
        self._trees.place(places.numpy(), count, first, self._trees.settings.expand_all)

    def expand_backup(self, outputs: Tensor, first: int) -> int:
        """Add the selected nodes to the trees, and back up their values.

        Args:
            outputs: float64 ``[rows, B, 3 + A]``, predictions of the model: value, reward, game over (0 or 1), priors.
                With 'gumbel' ``[rows, B, 3 + 2 A]``, where the logs of the priors come last. There is a row for each
                path, or with ``expand_all`` for each action.
            first: number of the first new node; row r becomes node ``first + r``.

        Returns:
            The first tree for which the model returned values that are not finite, or -1.
        """
        bad = self._not_finite(outputs)
        if bad >= 0:
            return bad
        chosen = torch.from_numpy(self._trees.chosen)
        if self._trees.settings.expand_all:
            self._growth.expand_all(chosen[:, 0], outputs, first)
        else:
            for k in range(len(outputs)):
                self._growth.expand_one(chosen[:, k], outputs[k], first + k)
        return -1

    def expand_root(self, outputs: Tensor) -> int:
        """Expand all actions of the roots as nodes 1, ..., A; see :meth:`expand_backup` with ``expand_all``."""
        bad = self._not_finite(outputs)
        if bad < 0:
            self._growth.expand_all(torch.from_numpy(self._trees.chosen[:, 0]), outputs, 1)
        return bad

    def _not_finite(self, outputs: Tensor) -> int:
        known = outputs[..., :3 + self._trees.num_actions].isfinite()
        known[..., 3:] |= outputs[..., 2:3] != 0  # the priors of terminal nodes are ignored
        bad = ~known.all(2).all(0)
        return int(bad.int().argmax()) if bool(bad.any()) else -1


class _Descent:
    """Descent of path k of all trees from the root.

    Args:
        trees: the trees.
        step: step of the search.
        k: number of the path.
        has_others: this step has several paths.
    """

    def __init__(self, trees: Trees, step: int, k: int, has_others: bool):
        self._trees, self._step, self._k = trees, step, k
        self._num_depths = trees.paths.shape[2] if has_others else 0  # at greater depth the paths of a step never meet
        self._ints, self._floats = torch.from_numpy(trees.ints), torch.from_numpy(trees.floats)
        self._paths = torch.from_numpy(trees.paths)
        self._low, high = torch.from_numpy(trees.bounds).unbind(-1)
        self._span = (high - self._low).clamp_min(trees.settings.min_max_delta)

    def run(self) -> None:
        trees, limit = self._trees, self._trees.settings.depth_limit
        at, action, revisited = torch.from_numpy(trees.chosen[:, self._k])
        at.zero_(), action.zero_(), revisited.fill_(-1)
        if self._num_depths:
            self._paths[:, self._k, :, 0] = -1
        going = torch.arange(trees.batch_size)
        depth = 0
        while True:
            ints = self._ints[going, at[going]]
            stuck = (ints[:, OVER] != 0) | (depth >= limit)
            revisited[going[stuck]] = at[going[stuck]]
            stays = stuck
            if trees.settings.expand_all:
                stays = stuck | (ints[:, CHILDREN] == 0)
            going, ints = going[~stays], ints[~stays]
            if not len(going):
                return
            choice = self._choose(going, at[going], ints, depth)
            action[going] = choice
            if depth < self._num_depths:
                self._paths[going, self._k, depth] = torch.stack((at[going], choice), -1)
            child = ints.gather(1, CHILD + choice[:, None])[:, 0].long()
            going, child = going[child > 0], child[child > 0]
            at[going] = child
            depth += 1

    def _choose(self, b: Tensor, at: Tensor, ints: Tensor, depth: int) -> Tensor:
        """Choose actions at the nodes ``at`` of the trees ``b``, whose rows are ``ints``."""
        trees, s, A = self._trees, self._trees.settings, self._trees.num_actions
        floats = self._floats[b, at]
        prior, value, log_prior = floats[:, PRIOR:].split(A, -1)
        expanded = ints[:, CHILD:CHILD + A] > 0
        visits, own_visits = self._with_earlier_paths(b, at, ints, depth)
        second = (ints[:, TO_PLAY] == 1) & s.two_players
        if s.rule == 'gumbel':
            sign = torch.where(second, -1.0, 1.0).double()
            sigma = rules.completed_values(sign[:, None] * value, expanded, prior, visits, sign * floats[:, VALUE],
                                           s.value_scale, s.maxvisit_init)
            if depth:
                return rules.gumbel_inner_scores(log_prior, sigma, prior, visits).argmax(-1)
            considered = torch.from_numpy(trees.considered)[torch.from_numpy(trees.num_considered)[b], own_visits - 1]
            return rules.gumbel_root_scores(torch.from_numpy(trees.gumbel)[b], log_prior, sigma, prior, visits,
                                            considered[:, None]).argmax(-1)
        low, span = self._low[b], self._span[b]
        own = rules.normalized(floats[:, VALUE_SUM] / ints[:, VISITS], low, span, second)
        scores = rules.normalized(value, low[:, None], span[:, None], second[:, None])
        scores = rules.value_scores(scores, expanded, own, s.unexpanded_value)
        factor = torch.from_numpy(trees.factors)[own_visits]
        if s.rule == 'ucb':
            ties = torch.from_numpy(trees.ties[self._step, self._k])[b]
            return rules.upper_confidence_bounds(scores, prior, visits, factor, ties).argmax(-1)
        policy = rules.regularized_policy(s.rule, scores, prior, expanded, own_visits, factor,
                                          s.unexpanded_value == 'none')
        return rules.sample(policy, rules.uniform(torch.from_numpy(trees.seeds[self._step, self._k])[b],
                                                  ints[:, DEPTH].long()))

    def _with_earlier_paths(self, b: Tensor, at: Tensor, ints: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Visits of the actions, float64 ``[n, A]``, and of the nodes, int64 ``[n]``, including assumed visits."""
        A = self._trees.num_actions
        visits, own = ints[:, CHILD + A:].double(), ints[:, VISITS].long()
        if self._trees.settings.rule in ('ucb', 'gumbel') and depth < self._num_depths:
            for earlier in range(self._k):
                node, action = self._paths[b, earlier, depth].unbind(-1)
                same = node == at
                visits = visits + torch.nn.functional.one_hot(action, A) * same[:, None]
                own = own + same
        return visits, own


class _Growth:
    """Addition of new nodes, and backup of their values."""

    def __init__(self, trees: Trees):
        self._trees = trees
        self._ints, self._floats = torch.from_numpy(trees.ints), torch.from_numpy(trees.floats)
        self._bounds = torch.from_numpy(trees.bounds)

    def expand_one(self, chosen: Tensor, outputs: Tensor, node: int) -> None:
        """Expand one action; ``chosen`` ``[3, B]``, ``outputs`` ``[B, 3 + A]``."""
        parent, action, revisited = chosen
        everything = torch.arange(self._trees.batch_size)
        exists = self._ints[everything, parent, CHILD + action].long()  # an earlier path of this step may have added it
        new = (revisited < 0) & (exists == 0)
        b = everything[new]
        self._add(b, parent[new], action[new], outputs[new], node)
        leaf = torch.where(revisited >= 0, revisited, torch.where(exists > 0, exists, node))
        self._back_up(everything, leaf, self._floats[everything, leaf, VALUE])

    def expand_all(self, chosen: Tensor, outputs: Tensor, first: int) -> None:
        """Expand all actions; ``chosen`` ``[3, B]``, ``outputs`` ``[A, B, 3 + A]``."""
        leaf, _, revisited = chosen
        A = self._trees.num_actions
        everything = torch.arange(self._trees.batch_size)
        b = everything[revisited < 0]
        at = leaf[b]
        prior = self._floats[b, at, PRIOR:PRIOR + A]
        for a in range(A):
            known = prior[:, a] > 0
            rows, parents = b[known], at[known]
            self._add(rows, parents, torch.full_like(rows, a), outputs[a][rows], first + a)
            node = torch.full_like(rows, first + a)
            self._observe(rows, node, self._floats[rows, node, VALUE])
        values = torch.where(prior > 0, prior * self._floats[b, at, PRIOR + A:PRIOR + 2 * A], 0.0)
        mean = rules.running_sum(values) / rules.running_sum(prior)
        value = self._floats[everything, leaf, VALUE].index_put((b, ), mean)
        self._back_up(everything, leaf, value)

    def _add(self, b: Tensor, parent: Tensor, action: Tensor, outputs: Tensor, node: int) -> None:
        """Write the rows of new nodes, with no visits."""
        s, A = self._trees.settings, self._trees.num_actions
        ints, floats = self._ints[b, parent], torch.zeros(len(b), self._floats.shape[-1], dtype=torch.float64)
        row = torch.zeros(len(b), ints.shape[1], dtype=torch.int32)
        row[:, PARENT], row[:, ACTION] = parent.int(), action.int()
        row[:, TO_PLAY] = 1 - ints[:, TO_PLAY] if s.two_players else 0
        has_action = (outputs[:, 3:3 + A] > 0).any(-1)  # a node without actions is terminal
        row[:, OVER], row[:, DEPTH] = ((outputs[:, 2] != 0) | ~has_action).int(), ints[:, DEPTH] + 1
        floats[:, VALUE], floats[:, REWARD] = outputs[:, 0], outputs[:, 1]
        floats[:, PRIOR:PRIOR + A] = outputs[:, 3:3 + A]
        if s.rule == 'gumbel':
            floats[:, PRIOR + 2 * A:] = outputs[:, 3 + A:]
        self._ints[b, node], self._floats[b, node] = row, floats
        self._ints[b, parent, CHILD + action] = node
        self._ints[b, parent, CHILDREN] += 1

    def _observe(self, b: Tensor, node: Tensor, value: Tensor) -> Tensor:
        """Count a visit that returned ``value``; returns reward + discount * ``value`` for the parent."""
        s, A = self._trees.settings, self._trees.num_actions
        self._floats[b, node, VALUE_SUM] += value
        self._ints[b, node, VISITS] += 1
        mean = self._floats[b, node, VALUE_SUM] / self._ints[b, node, VISITS]
        parent, reward = self._ints[b, node, PARENT].long(), self._floats[b, node, REWARD]
        inner = parent >= 0
        mean = torch.where(inner, reward + s.discount * mean, mean)
        b_inner, above, action = b[inner], parent[inner], self._ints[b, node, ACTION].long()[inner]
        self._floats[b_inner, above, PRIOR + A + action] = mean[inner]
        self._ints[b_inner, above, CHILD + A + action] = self._ints[b, node, VISITS][inner]
        if s.known_bounds is None:
            self._bounds[b, 0] = torch.minimum(self._bounds[b, 0], mean)
            self._bounds[b, 1] = torch.maximum(self._bounds[b, 1], mean)
        return reward + s.discount * value

    def _back_up(self, b: Tensor, node: Tensor, value: Tensor) -> None:
        while len(b):
            value = self._observe(b, node, value)
            node = self._ints[b, node, PARENT].long()
            b, node, value = b[node >= 0], node[node >= 0], value[node >= 0]
