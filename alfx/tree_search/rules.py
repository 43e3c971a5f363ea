"""Formulas of the tree search: small functions of rows of tensors.

Rows are nodes, columns are their A actions. Values are from the perspective of the player to move. Actions with prior
probability 0 do not exist (masked or illegal) and are never chosen. Papers:

- pUCT: Schrittwieser et al. 2020 (arXiv:1911.08265), appendix B, equation 2.
- Regularized policies: Grill et al. 2020 (arXiv:2007.12509).
- Gumbel: Danihelka et al. 2022 (https://openreview.net/forum?id=bERaNdoegnO), with the value of unvisited actions
  of its appendix D.

Sums run from the first action to the last (:func:`running_sum`), and the exponential is implemented here (:func:`exp`),
so that the loops of ``kernel.c`` produce identical bits.
"""
import functools
import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

MAX_NEWTON_STEPS = 64
NEWTON_TOLERANCE = 1e-12
UNEXPANDED = ('max', 'min', 'mean', 'mean_with_parent', 'none')
"""Alternatives to a number for the value score of unexpanded actions."""

EXP_LEAST = -700.0
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6  # k * LN2_HIGH is exact: it has few significant bits
EXP_COEFFICIENTS = tuple(1 / math.factorial(i) for i in range(13, -1, -1))
INVERSE_LN2 = 1 / math.log(2)
TINY = torch.finfo(torch.float64).tiny


def running_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, from the first element to the last."""
    return x.cumsum(-1)[..., -1]


def exp(x: Tensor) -> Tensor:
    """Compute exp(x) for ``x <= 0``, float64; 0 below -700, elsewhere within two units in the last place."""
    k = (x * INVERSE_LN2).round().clamp_min(-1022.0)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    p = torch.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * r + coefficient
    power_of_two = ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
    return torch.where(x < EXP_LEAST, 0.0, p * power_of_two)


def exploration_factors(num_visits: int, pb_c_init: float, pb_c_base: float, minus_one: bool) -> Tensor:
    """Exploration factor that multiplies the prior of a child, as a function of the visits N of its parent.

    ``(log((N + c_base + 1) / c_base) + c_init) * sqrt(N)``

    Args:
        num_visits: largest N.
        pb_c_init: c_init.
        pb_c_base: c_base.
        minus_one: use N - 1 instead of N.

    Returns:
        float64 ``[num_visits + 1]``, for N = 0, 1, ....
    """
    n = torch.arange(num_visits + 1, dtype=torch.float64)
    if minus_one:
        n = (n - 1).clamp_min(0)
    return (((n + pb_c_base + 1) / pb_c_base).log() + pb_c_init) * n.sqrt()


def normalized(value: Tensor, low: Tensor, span: Tensor, second_player: Tensor) -> Tensor:
    """Normalize values: ``(value - low) / span``, or 1 minus that if the second player, who minimizes, is to move.

    Args:
        value: ``[N, ...]``: reward + discount * value, for the first player.
        low: smallest such value of the tree.
        span: difference of the largest and the smallest value, not 0.
        second_player: bool, the second player is to move.
    """
    score = (value - low) / span
    return torch.where(second_player, 1.0 - score, score)


def value_scores(scores: Tensor, expanded: Tensor, parent: Tensor, unexpanded: float | str) -> Tensor:
    """Fill in the value scores of unexpanded actions.

    Args:
        scores: ``[N, A]``, normalized values; entries of unexpanded actions are ignored.
        expanded: bool ``[N, A]``.
        parent: ``[N]``, normalized value of the node itself; it is clamped to [0, 1], because the smallest and the
            largest value are those of other nodes.
        unexpanded: a number, or a function of the scores of expanded siblings: 'max', 'min', 'mean',
            'mean_with_parent' (of the siblings and the node itself) or 'none', which acts as 'min' here. Without
            expanded siblings all scores are 0.5, except for 'mean_with_parent'.

    Returns:
        Value scores ``[N, A]``.
    """
    count = expanded.sum(-1)
    total = running_sum(torch.where(expanded, scores, 0.0))
    if not isinstance(unexpanded, str):
        rest = torch.full_like(total, unexpanded)
    elif unexpanded == 'mean_with_parent':
        rest = (total + parent.clamp(0.0, 1.0)) / (count + 1)
    else:
        if unexpanded == 'mean':
            rest = total / count
        elif unexpanded == 'max':
            rest = torch.where(expanded, scores, -torch.inf).amax(-1)
        else:
            rest = torch.where(expanded, scores, torch.inf).amin(-1)
        rest = torch.where(count > 0, rest, 0.5)
    return torch.where(expanded, scores, rest[..., None])


def upper_confidence_bounds(scores: Tensor, prior: Tensor, visits: Tensor, factor: Tensor, ties: Tensor) -> Tensor:
    """Compute ``score + prior * factor / (1 + visits) + ties``; minus infinity where the prior is 0.

    Args:
        scores: ``[N, A]`` value scores.
        prior: ``[N, A]``.
        visits: ``[N, A]``, visits of the children.
        factor: ``[N]``, from :func:`exploration_factors`.
        ties: ``[N, A]``, small random numbers to break ties.
    """
    bounds = scores + prior * factor[..., None] / (1.0 + visits) + ties
    return torch.where(prior > 0, bounds, -torch.inf)


def reverse_kl_policy(value: Tensor, prior: Tensor, c: Tensor,
                      tolerance: float = NEWTON_TOLERANCE) -> tuple[Tensor, int]:
    """Policy p that maximizes ``E_p(v) - c KL(q || p)`` for values v and a prior q.

    It is ``p[i] = q[i] / (beta - u[i])`` with ``u[i] = (v[i] - max v) / c`` and the beta in (0, 1] for which the sum
    is 1. The sum is convex and decreasing in beta, so Newton's method converges monotonically from below when started
    at ``beta = max(q + u)``, where the sum is at least 1.

    Args:
        value: ``[N, A]``.
        prior: ``[N, A]``, each row sums to 1.
        c: ``[N, 1]``, positive.
        tolerance: accepted difference of the sum from 1 before the policy is normalized; the iteration also ends when
            rounding allows no further progress.

    Returns:
        Policy ``[N, A]``, and the number of steps.
    """
    exists = prior > 0
    u = (value - torch.where(exists, value, -torch.inf).amax(-1, keepdim=True)) / c
    beta = torch.where(exists, prior + u, -torch.inf).amax(-1, keepdim=True)
    for step in range(MAX_NEWTON_STEPS):  # noqa: B007 - the number of steps is returned
        part = torch.where(exists, prior / (beta - u), 0.0)
        excess = running_sum(part)[..., None] - 1.0
        slope = running_sum(torch.where(exists, part / (beta - u), 0.0))[..., None]
        following = torch.where(excess.abs() <= tolerance, beta, beta + excess / slope)
        if bool((following == beta).all()):
            break
        beta = following
    policy = torch.where(exists, prior / (beta - u), 0.0)
    return policy / running_sum(policy)[..., None], step


def kl_policy(value: Tensor, prior: Tensor, c: Tensor) -> Tensor:
    """Policy that maximizes ``E_p(v) - c KL(p || q)``: ``p[i] = q[i] exp(v[i] / c) / Z``.

    Args:
        value: ``[N, A]``, float64.
        prior: ``[N, A]``, each row sums to 1.
        c: ``[N, 1]``, positive.
    """
    exists = prior > 0
    highest = torch.where(exists, value, -torch.inf).amax(-1, keepdim=True)
    weight = torch.where(exists, prior * exp(((value - highest) / c).clamp_max(0.0)), 0.0)
    return weight / running_sum(weight)[..., None]


def regularized_policy(kind: str, scores: Tensor, prior: Tensor, expanded: Tensor, visits: Tensor, factor: Tensor,
                       keep_unexpanded: bool) -> Tensor:
    """Policy of Grill et al. at nodes, regularized towards the prior by ``c = factor / (visits + A)``.

    Args:
        kind: 'rkl' or 'kl'.
        scores: ``[N, A]`` value scores.
        prior: ``[N, A]``; A above is the number of actions with positive prior.
        expanded: bool ``[N, A]``.
        visits: ``[N]``, visits of the node.
        factor: ``[N]``, from :func:`exploration_factors`.
        keep_unexpanded: unexpanded actions keep their prior probability; the others share the rest.

    Returns:
        Probabilities ``[N, A]`` with the same sum as the prior.
    """
    c = (factor / (visits + (prior > 0).sum(-1))).clamp_min(TINY)[..., None]
    part = torch.where(expanded, prior, 0.0) if keep_unexpanded else prior
    mass = running_sum(part)[..., None]
    shares = torch.where(mass > 0, part / mass, prior)
    policy = kl_policy(scores, shares, c) if kind == 'kl' else reverse_kl_policy(scores, shares, c)[0]
    policy = torch.where(mass > 0, policy, 0.0) * mass
    return torch.where(expanded, policy, prior) if keep_unexpanded else policy


def completed_values(value: Tensor, expanded: Tensor, prior: Tensor, visits: Tensor, own_value: Tensor,
                     value_scale: float, maxvisit_init: float) -> Tensor:
    """Compute ``sigma(q)`` of Gumbel MuZero, with the mixed value for unexpanded actions.

    With the model's value v of the node, the visits n of its actions and ``Q = sum_expanded(prior q) /
    sum_expanded(prior)``, the mixed value is ``(v + sum(n) Q) / (1 + sum(n))``. The values of a node are scaled to
    [0, 1], then ``sigma(x) = (maxvisit_init + max(n)) * value_scale * x``.

    Args:
        value: ``[N, A]``: reward + discount * value.
        expanded: bool ``[N, A]``.
        prior: ``[N, A]``.
        visits: ``[N, A]``, visits of the actions.
        own_value: ``[N]``, v.
        value_scale: see above.
        maxvisit_init: see above.
    """
    prior = torch.where(expanded, prior.clamp_min(TINY), 0.0)
    mass, count = running_sum(prior), running_sum(visits)
    mean = torch.where(mass > 0, running_sum(torch.where(expanded, prior * value, 0.0)) / mass, 0.0)
    mixed = (own_value + count * mean) / (count + 1.0)
    completed = torch.where(expanded, value, mixed[..., None])
    low, high = completed.amin(-1, keepdim=True), completed.amax(-1, keepdim=True)
    scale = (maxvisit_init + visits.amax(-1, keepdim=True)) * value_scale / (high - low).clamp_min(1e-8)
    return scale * (completed - low)


def considered_visits(max_num_actions: int, num_simulations: int) -> Tensor:
    """Sequential halving: number of visits with which an action of the root is considered in each simulation.

    With m actions to consider, each phase gets the same share of the simulations: the m best actions (by the Gumbel
    scores) are visited in turn, then the better half of them, down to two.

    Returns:
        int64 ``[max_num_actions + 1, num_simulations]``: a row for each m; row 0 equals row 1.
    """
    rows = [[r.visits for r in _rounds(m, num_simulations) for _ in range(r.size)] for m in range(max_num_actions + 1)]
    return torch.tensor(rows, dtype=torch.int64).reshape(max_num_actions + 1, num_simulations)


@functools.lru_cache(256)
def simulations_together(num_considered: tuple[int, ...], num_simulations: int) -> tuple[int, ...]:
    """Numbers of simulations of sequential halving that can run together, in order.

    The result below an action of the root depends only on the number of its visits. All simulations that visit actions
    known beforehand can therefore run together with the same results as one after the other. Such simulations are a
    round that visits every action of the previous round once more, and the first round, because only noise and prior
    distinguish unvisited actions. The half that continues after a round depends on the values found in between, so
    these simulations run one after the other.

    Args:
        num_considered: numbers of actions m that the roots of the batch consider.
        num_simulations: number of simulations of each root.

    Returns:
        Powers of two, so that the model is called with few batch sizes; they sum to ``num_simulations``.
    """
    ends = {0}
    for m in num_considered:
        done = 0
        for each in _rounds(m, num_simulations):
            ends.update([done + each.size] if each.is_known else range(done + 1, done + each.size + 1))
            done += each.size
    sizes: list[int] = []
    for start, end in itertools.pairwise(sorted(ends)):
        left = end - start
        while left:
            sizes.append(1 << (left.bit_length() - 1))
            left -= sizes[-1]
    return tuple(sizes)


class _Round(NamedTuple):
    """Round of ``size`` simulations, each of which visits a different action that has ``visits`` visits."""

    visits: int
    size: int
    is_known: bool  # the values found in the round do not affect the choice of its actions


def _rounds(m: int, num_simulations: int) -> list[_Round]:
    if m <= 1:
        return [_Round(visits, 1, True) for visits in range(num_simulations)]
    phases = math.ceil(math.log2(m))
    rounds: list[_Round] = []
    left, num_considered, before = num_simulations, m, 0
    while left:
        for _ in range(max(1, num_simulations // (phases * num_considered))):
            size = min(num_considered, left)
            rounds.append(_Round(len(rounds), size, not rounds or size == before))
            left, before = left - size, num_considered
        num_considered = max(2, num_considered // 2)
    return [x for x in rounds if x.size]


def gumbel_root_scores(gumbel: Tensor, log_prior: Tensor, sigma: Tensor, prior: Tensor, visits: Tensor,
                       considered: Tensor) -> Tensor:
    """Compute ``g + log prior + sigma(q)`` of the actions of a root with ``considered`` ``[N, 1]`` visits."""
    return torch.where((prior > 0) & (visits == considered), gumbel + log_prior + sigma, -torch.inf)


def gumbel_inner_scores(log_prior: Tensor, sigma: Tensor, prior: Tensor, visits: Tensor) -> Tensor:
    """Compute ``pi[a] - n[a] / (1 + sum(n))`` with the improved policy ``pi = softmax(log prior + sigma(q))``."""
    exists = prior > 0
    logits = torch.where(exists, log_prior + sigma, -torch.inf)
    weight = torch.where(exists, exp((logits - logits.amax(-1, keepdim=True)).clamp(-2e3, 0.0)), 0.0)
    share, part = (1 / total[..., None] for total in (running_sum(weight), 1.0 + running_sum(visits)))
    return torch.where(exists, weight * share - visits * part, -torch.inf)


def uniform(seeds: Tensor, depth: Tensor) -> Tensor:
    """Numbers in [0, 1) for seeds and depths, int64 ``[N]`` each, from the generator splitmix64."""
    z = seeds + (depth + 1) * signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * signed(0x94D049BB133111EB)
    z = z ^ shifted(z, 31)
    return shifted(z, 11).to(torch.float64) * 2.0**-53


def signed(x: int) -> int:
    """Return the signed 64-bit number with the bits of an unsigned one."""
    return x - (1 << 64) if x >= 1 << 63 else x


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right logically, which torch supports only for unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(policy: Tensor, uniforms: Tensor) -> Tensor:
    """Sample an index of each row of ``policy`` ``[N, A]``, not necessarily normalized, from ``uniforms`` ``[N]``."""
    reached = policy.cumsum(-1)
    passed = (policy > 0) & (reached > (uniforms * reached[..., -1])[..., None])
    last = policy.shape[-1] - 1 - (policy > 0).flip(-1).to(torch.int8).argmax(-1)
    return torch.where(passed.any(-1), passed.to(torch.int8).argmax(-1), last)


def visit_policy(visits: Tensor, temperature: Tensor) -> Tensor:
    """Compute ``visits^(1 / temperature)``, normalized; ``visits`` ``[N, A]``, ``temperature`` ``[N]``, 0: greedy."""
    logs = visits.log() / temperature.clamp(min=1e-12)[:, None]
    return (logs - logs.amax(-1, keepdim=True)).softmax(-1)
