"""The loops of the search compiled by numba: as :mod:`alfx.tree_search.tensor_search`, bit for bit, tree by tree.

Every expression is written in the order in which the tensor form evaluates it, sums run from the first action to the
last, and nothing may be reordered or fused (numba does neither unless asked). The formulas are explained in
:mod:`alfx.tree_search.rules`; the columns of the arrays in :mod:`alfx.tree_search.trees`. The first call compiles, in
some seconds; the result is kept in numba's cache. Importing this module needs numba.
"""
import math

import numpy as np
from numba import njit

from alfx.tree_search.rules import (EXP_COEFFICIENTS, EXP_LEAST, INVERSE_LN2, LN2_HIGH, LN2_LOW, MAX_NEWTON_STEPS,
                                    NEWTON_TOLERANCE)
from alfx.tree_search.trees import (ACTION, CHILD, CHILDREN, CONSTANT, DEPTH, GUMBEL, KL, MAX, MEAN,
                                    MEAN_WITH_PARENT, NONE, OVER, PARENT, PRIOR, REWARD, TO_PLAY, UCB, VALUE,
                                    VALUE_SUM, VISITS, Trees)

_TINY = np.finfo(np.float64).tiny
_jit = njit(cache=True, nogil=True, error_model='numpy')


def select(trees: Trees, step: int) -> None:
    """See :func:`alfx.tree_search.tensor_search.select`."""
    s = trees.settings
    _select(trees.ints, trees.floats, trees.bounds, trees.chosen, trees.paths, trees.ties, trees.seeds, trees.gumbel,
            trees.considered, trees.num_considered, trees.factors, step, s.rule_code, s.unexpanded_code,
            s.unexpanded_constant, s.two_players, s.min_max_delta, s.depth_limit, s.value_scale, s.maxvisit_init,
            s.expand_all)


def expand_backup(trees: Trees, outputs: np.ndarray, first: int) -> int:
    """See :func:`alfx.tree_search.tensor_search.expand_backup`."""
    s = trees.settings
    return _expand_backup(trees.ints, trees.floats, trees.bounds, trees.chosen, outputs, first, s.discount,
                          s.two_players, s.known_bounds is not None, s.expand_all, s.rule_code == GUMBEL)


def expand_root(trees: Trees, outputs: np.ndarray) -> int:
    """See :func:`alfx.tree_search.tensor_search.expand_root`."""
    s = trees.settings
    trees.chosen[0], trees.chosen[2] = 0, -1
    return _expand_backup(trees.ints, trees.floats, trees.bounds, trees.chosen[:, :1], outputs, 1, s.discount,
                          s.two_players, s.known_bounds is not None, True, False)


@_jit
def _exp(x):
    """exp(x) for x <= 0."""
    if x < EXP_LEAST:
        return 0.0
    k = math.floor(x * INVERSE_LN2 + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = EXP_COEFFICIENTS[0]
    for i in range(1, len(EXP_COEFFICIENTS)):
        p = p * r + EXP_COEFFICIENTS[i]
    return math.ldexp(p, int(k))


@_jit
def _uniform(seed, depth):
    """A number in [0, 1) for a path and a depth: splitmix64 of the seed of the path."""
    z = np.uint64(seed) + np.uint64(depth + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@_jit
def _normalized(value, low, span, second):
    score = (value - low) / span
    return 1.0 - score if second else score


@_jit
def _value_scores(node, numbers, A, low, span, second, unexpanded, constant, scores):
    count, total, best, worst = 0, 0.0, -np.inf, np.inf
    for a in range(A):
        if node[CHILD + a] > 0:
            score = _normalized(numbers[PRIOR + A + a], low, span, second)
            scores[a] = score
            count += 1
            total += score
            best = max(best, score)
            worst = min(worst, score)
    if unexpanded == CONSTANT:
        rest = constant
    elif unexpanded == MEAN_WITH_PARENT:
        own = _normalized(numbers[VALUE_SUM] / node[VISITS], low, span, second)
        rest = (total + min(max(own, 0.0), 1.0)) / (count + 1)
    elif count == 0:
        rest = 0.5
    elif unexpanded == MAX:
        rest = best
    elif unexpanded == MEAN:
        rest = total / count
    else:
        rest = worst
    for a in range(A):
        if node[CHILD + a] == 0:
            scores[a] = rest


@_jit
def _best_upper_bound(numbers, A, visits, factor, ties, scores):
    best, choice = -np.inf, 0
    for a in range(A):
        prior = numbers[PRIOR + a]
        if prior > 0:
            score = scores[a] + prior * factor / (1.0 + visits[a]) + ties[a]
            if score > best:
                best, choice = score, a
    return choice


@_jit
def _reverse_kl(values, prior, c, A):
    """Overwrites ``values`` with the policy; an action of prior 0 has no part in it."""
    highest = -np.inf
    for a in range(A):
        if prior[a] > 0:
            highest = max(highest, values[a])
    beta = -np.inf
    for a in range(A):
        values[a] = (values[a] - highest) / c
        if prior[a] > 0:
            beta = max(beta, prior[a] + values[a])
    for _ in range(MAX_NEWTON_STEPS):
        excess, slope = 0.0, 0.0
        for a in range(A):
            if prior[a] > 0:
                part = prior[a] / (beta - values[a])
                excess += part
                slope += part / (beta - values[a])
        excess = excess - 1.0
        if abs(excess) <= NEWTON_TOLERANCE:
            break
        beta = beta + excess / slope
    total = 0.0
    for a in range(A):
        values[a] = prior[a] / (beta - values[a]) if prior[a] > 0 else 0.0
        total += values[a]
    for a in range(A):
        values[a] = values[a] / total


@_jit
def _kl(values, prior, c, A):
    """Overwrites ``values`` with the policy; an action of prior 0 has no part in it."""
    highest = -np.inf
    for a in range(A):
        if prior[a] > 0:
            highest = max(highest, values[a])
    total = 0.0
    for a in range(A):
        values[a] = prior[a] * _exp((values[a] - highest) / c) if prior[a] > 0 else 0.0
        total += values[a]
    for a in range(A):
        values[a] = values[a] / total


@_jit
def _sample_policy(node, numbers, A, factor, rule, unexpanded, seed, scores, prior):
    """An action drawn from the regularised policy."""
    count, mass = 0, 0.0
    for a in range(A):
        p = numbers[PRIOR + a]
        if p > 0:
            count += 1
        prior[a] = p if unexpanded != NONE or node[CHILD + a] > 0 else 0.0
        mass += prior[a]
    c = max(factor / (node[VISITS] + count), _TINY)
    if mass > 0:
        for a in range(A):
            prior[a] = prior[a] / mass
        if rule == KL:
            _kl(scores, prior, c, A)
        else:
            _reverse_kl(scores, prior, c, A)
    total = 0.0
    for a in range(A):
        if unexpanded != NONE or node[CHILD + a] > 0:
            scores[a] = scores[a] * mass
        else:
            scores[a] = numbers[PRIOR + a]
        total += scores[a]
    threshold = _uniform(seed, node[DEPTH]) * total
    reached, choice = 0.0, 0
    for a in range(A):
        reached += scores[a]
        if scores[a] > 0:
            choice = a
            if reached > threshold:
                break
    return choice


@_jit
def _completed_values(node, numbers, A, visits, second, value_scale, maxvisit_init, scores):
    """sigma(completed q) of Gumbel MuZero."""
    sign = -1.0 if second else 1.0
    mass, count, most = 0.0, 0.0, 0.0
    for a in range(A):
        count += visits[a]
        most = max(most, visits[a])
        if node[CHILD + a] > 0:
            mass += max(numbers[PRIOR + a], _TINY)
    mean = 0.0
    for a in range(A):
        if node[CHILD + a] > 0:
            mean += max(numbers[PRIOR + a], _TINY) * (sign * numbers[PRIOR + A + a]) / mass
    mixed = (sign * numbers[VALUE] + count * mean) / (count + 1.0)
    low, high = np.inf, -np.inf
    for a in range(A):
        scores[a] = sign * numbers[PRIOR + A + a] if node[CHILD + a] > 0 else mixed
        low = min(low, scores[a])
        high = max(high, scores[a])
    scale, span = (maxvisit_init + most) * value_scale, max(high - low, 1e-8)
    for a in range(A):
        scores[a] = scale * ((scores[a] - low) / span)


@_jit
def _gumbel_root(numbers, A, visits, considered_visits, gumbel, scores):
    best, choice = -np.inf, 0
    for a in range(A):
        if numbers[PRIOR + a] > 0 and visits[a] == considered_visits:
            score = gumbel[a] + numbers[PRIOR + 2 * A + a] + scores[a]
            if score > best:
                best, choice = score, a
    return choice


@_jit
def _gumbel_inside(numbers, A, visits, scores):
    count, highest = 0.0, -np.inf
    for a in range(A):
        count += visits[a]
        if numbers[PRIOR + a] > 0:
            scores[a] = numbers[PRIOR + 2 * A + a] + scores[a]
            highest = max(highest, scores[a])
    total = 0.0
    for a in range(A):
        if numbers[PRIOR + a] > 0:
            scores[a] = _exp(scores[a] - highest)
            total += scores[a]
    best, choice = -np.inf, 0
    for a in range(A):
        if numbers[PRIOR + a] > 0:
            score = scores[a] / total - visits[a] / (1.0 + count)
            if score > best:
                best, choice = score, a
    return choice


@_jit
def _select(ints, floats, bounds, chosen, paths, ties, seeds, gumbel, considered, num_considered, factors, step, rule,
            unexpanded, constant, two_players, delta, max_depth, value_scale, maxvisit_init, expand_all):
    K, B = chosen.shape[1], chosen.shape[2]
    A = (ints.shape[2] - CHILD) // 2
    scores, prior, visits = np.empty(A), np.empty(A), np.empty(A)
    for b in range(B):
        low = bounds[b, 0]
        span = max(bounds[b, 1] - low, delta)
        for k in range(K):
            at, choice, revisited = 0, 0, -1
            if K > 1:
                paths[b, k, :, 0] = -1
            while True:
                node, numbers = ints[b, at], floats[b, at]
                depth = node[DEPTH]
                if node[OVER] or depth >= max_depth:
                    revisited = at
                    break
                if expand_all and node[CHILDREN] == 0:
                    break
                extra = 0
                for a in range(A):
                    visits[a] = node[CHILD + A + a]
                if rule == UCB or rule == GUMBEL:
                    for other in range(k):
                        if paths[b, other, depth, 0] == at:
                            visits[paths[b, other, depth, 1]] += 1.0
                            extra += 1
                second = two_players and node[TO_PLAY] == 1
                if rule == GUMBEL:
                    _completed_values(node, numbers, A, visits, second, value_scale, maxvisit_init, scores)
                    if at == 0:
                        total = node[VISITS] - 1 + extra
                        choice = _gumbel_root(numbers, A, visits, considered[num_considered[b], total], gumbel[b],
                                              scores)
                    else:
                        choice = _gumbel_inside(numbers, A, visits, scores)
                else:
                    _value_scores(node, numbers, A, low, span, second, unexpanded, constant, scores)
                    factor = factors[node[VISITS] + extra]
                    if rule == UCB:
                        choice = _best_upper_bound(numbers, A, visits, factor, ties[step, k, b], scores)
                    else:
                        choice = _sample_policy(node, numbers, A, factor, rule, unexpanded, seeds[step, k, b], scores,
                                                prior)
                if K > 1:
                    paths[b, k, depth, 0], paths[b, k, depth, 1] = at, choice
                child = node[CHILD + choice]
                if child == 0:
                    break
                at = child
            chosen[0, k, b] = at
            chosen[1, k, b] = choice
            chosen[2, k, b] = revisited


@_jit
def _add(ints, floats, b, parent, action, output, node, two_players, gumbel):
    A = (ints.shape[2] - CHILD) // 2
    above, row, numbers = ints[b, parent], ints[b, node], floats[b, node]
    row[:] = 0
    row[PARENT], row[ACTION], row[DEPTH] = parent, action, above[DEPTH] + 1
    row[TO_PLAY] = 1 - above[TO_PLAY] if two_players else 0
    row[OVER] = 1 if output[2] != 0 else 0
    numbers[VALUE_SUM], numbers[VALUE], numbers[REWARD] = 0.0, output[0], output[1]
    for a in range(A):
        numbers[PRIOR + a] = output[3 + a]
        numbers[PRIOR + A + a] = 0.0
        numbers[PRIOR + 2 * A + a] = output[3 + A + a] if gumbel else 0.0
    above[CHILD + action] = node
    above[CHILDREN] += 1


@_jit
def _observe(ints, floats, bounds, b, at, value, discount, fixed_bounds):
    A = (ints.shape[2] - CHILD) // 2
    node, numbers = ints[b, at], floats[b, at]
    numbers[VALUE_SUM] += value
    node[VISITS] += 1
    mean = numbers[VALUE_SUM] / node[VISITS]
    parent = node[PARENT]
    if parent >= 0:
        mean = numbers[REWARD] + discount * mean
        floats[b, parent, PRIOR + A + node[ACTION]] = mean
        ints[b, parent, CHILD + A + node[ACTION]] = node[VISITS]
    if not fixed_bounds:
        bounds[b, 0] = min(bounds[b, 0], mean)
        bounds[b, 1] = max(bounds[b, 1], mean)
    return numbers[REWARD] + discount * value


@_jit
def _back_up(ints, floats, bounds, b, at, value, discount, fixed_bounds):
    while at >= 0:
        value = _observe(ints, floats, bounds, b, at, value, discount, fixed_bounds)
        at = ints[b, at, PARENT]


@_jit
def _first_not_finite(outputs, width):
    for b in range(outputs.shape[1]):
        for row in range(outputs.shape[0]):
            for i in range(width):
                if not math.isfinite(outputs[row, b, i]):
                    return b
    return -1


@_jit
def _expand_leaf(ints, floats, bounds, b, leaf, outputs, first, discount, two_players, fixed_bounds):
    """Expand all actions of a leaf; returns its value by theirs."""
    A = (ints.shape[2] - CHILD) // 2
    for a in range(A):
        if floats[b, leaf, PRIOR + a] > 0:
            _add(ints, floats, b, leaf, a, outputs[a, b], first + a, two_players, False)
            _observe(ints, floats, bounds, b, first + a, outputs[a, b, 0], discount, fixed_bounds)
    value, mass = 0.0, 0.0
    for a in range(A):
        prior = floats[b, leaf, PRIOR + a]
        mass += prior
        if prior > 0:
            value += prior * floats[b, leaf, PRIOR + A + a]
    return value / mass


@_jit
def _expand_backup(ints, floats, bounds, chosen, outputs, first, discount, two_players, fixed_bounds, expand_all,
                   gumbel):
    A = (ints.shape[2] - CHILD) // 2
    bad = _first_not_finite(outputs, 3 + A)
    if bad >= 0:
        return bad
    for b in range(chosen.shape[2]):
        for k in range(chosen.shape[1]):
            node, action, revisited = chosen[0, k, b], chosen[1, k, b], chosen[2, k, b]
            if revisited >= 0:
                value = floats[b, revisited, VALUE]
            elif expand_all:
                value = _expand_leaf(ints, floats, bounds, b, node, outputs, first, discount, two_players,
                                     fixed_bounds)
            else:
                if ints[b, node, CHILD + action] == 0:
                    _add(ints, floats, b, node, action, outputs[k, b], first + k, two_players, gumbel)
                node = np.int64(ints[b, node, CHILD + action])
                value = floats[b, node, VALUE]
            _back_up(ints, floats, bounds, b, node, value, discount, fixed_bounds)
    return -1
