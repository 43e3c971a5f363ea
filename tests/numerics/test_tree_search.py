"""Tree search against searches of single trees written from the rules, and in exact models; compiled against tensors.
"""
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.single_tree_search import SingleTreeSearch, considered_visits, forward_kl, reverse_kl
from hypothesis import given, settings, strategies

from alfx.tree_search import build, rules
from alfx.tree_search.batched_search import (Prediction, SearchError, TreeSearch, exploration_policy, gumbel_choice,
                                             root_prior)
from alfx.tree_search.trees import CHILD, VALUE_SUM, VISITS, Noise, SearchSettings

UNEXPANDED = (0.5, *rules.UNEXPANDED)
FORMS = ([True] if build.load() is not None else []) + [False]
needs_compiler = pytest.mark.skipif(len(FORMS) == 1, reason='there is no C compiler here')


def follow(key, action, num_actions):
    """Return value, reward, end of the game, prior and next key of an action in the state ``key`` of a random game."""
    rng = np.random.default_rng((key, action))
    prior = rng.random(num_actions)
    prior[rng.random(num_actions) < 0.25] = 0.0
    if rng.random() > 0.05:  # some states have no action at all
        prior[rng.integers(num_actions)] += 0.3
    total = prior.sum()
    return (rng.normal(), rng.normal(), bool(rng.random() < 0.1), prior / total if total else prior,
            int(rng.integers(1 << 40)))


class RandomGame:
    """A model whose states are keys; candidates, if it has any, are the squares of 0, 1, ..."""

    def __init__(self, num_actions, named=False):
        self.num_actions, self.named = num_actions, named

    def roots(self, keys):
        return self._prediction([follow(int(key), 0, self.num_actions) for key in keys], keys)

    def __call__(self, key, action):
        if self.named:
            action = action.double().sqrt().round().long()
        rows = [follow(int(k), 1 + int(a), self.num_actions) for k, a in zip(key, action)]
        return self._prediction(rows, torch.tensor([row[-1] for row in rows]))

    def _prediction(self, rows, keys):
        value, reward, over, prior = (torch.tensor(np.array(x)) for x in list(zip(*rows))[:4])
        actions = torch.arange(self.num_actions).square().expand(len(keys), -1) if self.named else ()
        return Prediction(value, reward, over, actions, prior, keys)


def mix(seed, depth):
    """Compute splitmix64 with integers of Python."""
    mask = (1 << 64) - 1
    z = (seed + (depth + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def search_both(options, keys, num_actions, native, seed=0, named=False):
    """Return the trees of a batched search, and the roots of single searches with the same random numbers."""
    game = RandomGame(num_actions, named)
    roots = game.roots(keys)
    prior = torch.where(roots.action_probs > 0, roots.action_probs, 0.0) + 1e-3
    prior[:, 0] = 0.0  # masked
    prior = prior / prior.sum(-1, keepdim=True)
    to_play = keys % 2 if options.two_players else torch.zeros_like(keys)
    torch.manual_seed(seed)
    noise = Noise.draw(options, len(keys), num_actions)
    torch.manual_seed(seed)
    trees = TreeSearch(options, native).run(game, roots, prior, to_play)
    singles = []
    for b in range(len(keys)):
        single = SingleTreeSearch(
            options, lambda key, action: follow(key, 1 + action, num_actions),
            draw=lambda step, path, depth, b=b: mix(int(noise.seeds[step, path, b]), depth),
            ties=lambda step, path, b=b: noise.ties[step, path, b].tolist(), gumbel=noise.gumbel[b].tolist())
        single.run(float(roots.value[b]), prior[b].tolist(), int(to_play[b]), int(keys[b]))
        singles.append(single)
    return trees, singles


def assert_same_tree(trees, b, node, number=0):
    """Check that a node and its descendants have the same visits and values in both trees."""
    A = trees.num_actions
    row = trees.ints[b, number]
    assert row[VISITS] == node.visits
    assert trees.floats[b, number, VALUE_SUM] / row[VISITS] == pytest.approx(node.mean, abs=1e-12)
    children = {a: row[CHILD + a] for a in range(A) if row[CHILD + a]}
    assert children.keys() == node.children.keys()
    for a, child in children.items():
        assert row[CHILD + A + a] == node.children[a].visits
        assert_same_tree(trees, b, node.children[a], child)


def every_option():
    """Return all rules x unexpanded scores x players x paths x expansions; the other options alternate."""
    rest = itertools.cycle([{}, {'known_bounds': (-3.0, 2.5)}, {'max_depth': 3}, {'break_tie_eps': 0.01},
                            {'minus_one': True}, {'known_bounds': (-3.0, 2.5), 'max_depth': 2}, {'discount': 0.7}])
    for rule, unexpanded, two, k in itertools.product(('ucb', 'rkl', 'kl'), UNEXPANDED, (False, True), (1, 4)):
        for expand in ({}, {'expand_root': True}, {'expand_all': True}, {'expand_all': True, 'expand_root': True}):
            if k == 1 or 'expand_all' not in expand:
                yield dict(rule=rule, unexpanded_value=unexpanded, two_players=two, num_parallel=k, **expand,
                           **next(rest))
    for two, k, considered, extra in itertools.product((False, True), (1, 4), (1, 2, 3, 16), ({}, {'max_depth': 2})):
        yield dict(rule='gumbel', two_players=two, num_parallel=k, max_num_considered=considered, **extra)


@pytest.mark.parametrize('native', FORMS)
@pytest.mark.parametrize('rule', ['ucb', 'rkl', 'kl', 'gumbel'])
def test_every_option_searches_as_a_single_tree_written_from_the_rules(rule, native):
    keys = torch.arange(2) if native else torch.arange(1)
    for options in every_option():
        if options['rule'] == rule:
            settings_ = SearchSettings(num_simulations=12, **{'discount': 0.97, **options})
            trees, singles = search_both(settings_, keys, 4, native)
            for b, single in enumerate(singles):
                assert_same_tree(trees, b, single.root)
                if not settings_.known_bounds:
                    assert trees.bounds[b] == pytest.approx([min(single.seen), max(single.seen)], abs=1e-12)


@given(strategies.integers(0, 10**6), strategies.sampled_from(list(every_option())), strategies.integers(1, 6))
@settings(max_examples=60)
def test_random_games_and_options_give_the_same_search(seed, options, num_actions):
    settings_ = SearchSettings(num_simulations=16, **{'discount': 0.9, 'pb_c_init': 0.8, 'pb_c_base': 30.0, **options})
    trees, (single, ) = search_both(settings_, torch.tensor([seed]), max(num_actions, 2), FORMS[0], seed=seed)
    assert_same_tree(trees, 0, single.root)


@needs_compiler
@pytest.mark.parametrize('rule', ['ucb', 'rkl', 'kl', 'gumbel'])
def test_compiled_and_tensor_search_agree_bit_for_bit(rule):
    for options in [o for o in every_option() if o['rule'] == rule][::5]:
        settings_ = SearchSettings(num_simulations=24, **{'discount': 0.97, **options})
        first, second = (search_both(settings_, torch.arange(3), 4, native)[0] for native in (True, False))
        np.testing.assert_array_equal(first.ints, second.ints)
        np.testing.assert_array_equal(first.floats, second.floats)
        np.testing.assert_array_equal(first.bounds, second.bounds)


@pytest.mark.parametrize('rule', ['ucb', 'rkl', 'gumbel'])
def test_a_batched_search_matches_each_of_its_trees(rule, monkeypatch):
    settings_ = SearchSettings(num_simulations=20, rule=rule, discount=0.9, gumbel_scale=0.0, num_parallel=2)
    game, keys = RandomGame(3), torch.arange(5)
    search = TreeSearch(settings_, FORMS[0])

    def visits(rows, seeds):
        roots = game.roots(keys[rows])
        prior = root_prior(roots.action_probs + 1e-3, None, 1.0, 0.0)
        monkeypatch.setattr(Noise, 'draw', lambda *args: Noise.none(*args)._replace(seeds=seeds[..., rows]))
        return search.run(game, roots, prior, torch.zeros(len(rows))).root_visits

    outer = (settings_.num_steps, 2, 5) if rule == 'rkl' else (0, 2, 5)
    seeds = torch.randint(1 << 60, outer)
    together = visits(list(range(5)), seeds)
    for b in range(5):
        assert torch.equal(visits([b], seeds)[0], together[b])


def test_model_candidates_reach_it_unchanged_and_change_nothing_else():
    for options in (dict(), dict(num_parallel=4), dict(expand_all=True), dict(rule='gumbel')):
        settings_ = SearchSettings(num_simulations=12, **options)
        plain, _ = search_both(settings_, torch.arange(2), 4, FORMS[0])
        named, singles = search_both(settings_, torch.arange(2), 4, FORMS[0], named=True)
        np.testing.assert_array_equal(plain.ints, named.ints)


def test_seeds_reproduce_searches_and_trees_are_reused():
    settings_ = SearchSettings(num_simulations=16, rule='kl', num_parallel=2)
    game, keys, search = RandomGame(4), torch.arange(4), TreeSearch(settings_, FORMS[0])
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        trees = search.run(game, game.roots(keys), root_prior(game.roots(keys).action_probs + 1e-3, None, 0.3, 0.25),
                           torch.zeros(4))
        found.append(trees.root_visits.clone())
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    assert len(search._forests) == 1


@pytest.mark.parametrize('native', FORMS)
@pytest.mark.parametrize('what', ['value', 'reward', 'action_probs'])
def test_a_model_that_yields_nan_raises_with_root_and_simulation(what, native):
    game = RandomGame(3)

    def broken(key, action):
        broken.calls += 1
        output = game(key, action)._replace(game_over=())
        if broken.calls == 4:
            getattr(output, what)[2] = torch.nan
        return output

    broken.calls = 0
    roots = game.roots(torch.arange(4))
    with pytest.raises(SearchError, match='root 2 of 4, simulation 3.* is not finite. Common causes: a learning'):
        TreeSearch(SearchSettings(8), native).run(broken, roots, root_prior(roots.action_probs + 0.1, None, 1, 0),
                                                  torch.zeros(4))


@pytest.mark.parametrize('options, message', [
    (dict(num_simulations=10, num_parallel=4), 'multiple of the 4'),
    (dict(num_parallel=2, expand_all=True), 'incompatible with parallel'),
    (dict(known_bounds=(1, -1)), r'known_bounds: expected \(least, largest\)'),
    (dict(unexpanded_value='maximum'), 'unexpanded_value: expected a number or one of'),
    (dict(rule='puct'), 'rule: expected one of'),
    (dict(rule='gumbel', expand_all=True), "rule 'gumbel'"),
    (dict(max_depth=1, expand_all=True), 'max_depth: expected at least 2'),
    (dict(num_simulations=0), 'num_simulations: expected at least 1'),
    (dict(num_simulations=10**8), 'num_simulations: expected at most 10,000, found 100,000,000'),
    (dict(max_num_considered=10**8), 'max_num_considered: expected at most 10,000'),
    (dict(discount=1.5), 'discount'),
    (dict(min_max_delta=0.0), 'min_max_delta: expected a positive'),
])
def test_settings_that_make_no_sense_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        SearchSettings(**{'num_simulations': 8, **options})


# Rules ----------------------------------------------------------------------------------------------------------


def test_the_exponential_matches_the_library_within_two_ulps():
    x = -torch.rand(20000, dtype=torch.float64) * torch.tensor([1e-8, 1.0, 30.0, 690.0], dtype=torch.float64)[:, None]
    x = torch.cat((x.flatten(), torch.tensor([0.0], dtype=torch.float64)))
    assert ((rules.exp(x) - x.exp()).abs() <= 2 * 2.0**-52 * x.exp()).all()
    assert rules.exp(torch.tensor([-701.0, -1e300], dtype=torch.float64)).tolist() == [0, 0]


def test_the_random_numbers_of_a_path_match_splitmix():
    seeds, depth = torch.tensor([0, -1, 2**62, 12345]), torch.tensor([0, 1, 7, 3])
    expected = [mix(int(s) % 2**64, int(d)) for s, d in zip(seeds, depth)]
    assert rules.uniform(seeds, depth).tolist() == expected
    # The first output of splitmix64 for the seed 0 is published as 0xE220A8397B1DCDAF.
    assert expected[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


@pytest.mark.parametrize('kind, solve', [('rkl', reverse_kl), ('kl', forward_kl)])
def test_regularized_policies_satisfy_the_conditions_of_their_optimum(kind, solve):
    rng = torch.Generator().manual_seed(0)
    value = torch.rand(200, 6, generator=rng, dtype=torch.float64)
    prior = torch.rand(200, 6, generator=rng, dtype=torch.float64).softmax(-1)
    c = 10 ** (torch.rand(200, 1, generator=rng, dtype=torch.float64) * 5 - 3)
    policy = rules.reverse_kl_policy(value, prior, c)[0] if kind == 'rkl' else rules.kl_policy(value, prior, c)
    expected = torch.tensor([solve(*row) for row in zip(value.tolist(), prior.tolist(), c[:, 0].tolist())])
    assert (policy - expected).abs().max() < 1e-6
    # d/dp of E_p(v) - c KL is the same for all actions: v + c q / p, and v - c log(p / q)
    positive = policy > 1e-300
    slope = value + c * prior / policy if kind == 'rkl' else value - c * (policy / prior).log()
    spread = torch.where(positive, slope, -torch.inf).amax(-1) - torch.where(positive, slope, torch.inf).amin(-1)
    assert spread.max() < 1e-6


def test_regularized_policies_tend_to_the_best_action_and_to_the_prior():
    value = torch.tensor([[0.1, 0.9, 0.5]], dtype=torch.float64)
    prior = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64)
    for policy in (lambda c: rules.reverse_kl_policy(value, prior, torch.tensor([[c]]).double())[0],
                   lambda c: rules.kl_policy(value, prior, torch.tensor([[c]]).double())):
        assert policy(1e-9)[0].tolist() == pytest.approx([0, 1, 0], abs=1e-6)
        assert policy(1e9)[0].tolist() == pytest.approx(prior[0].tolist(), abs=1e-6)


def test_rows_of_a_policy_do_not_influence_each_other():
    value, prior = torch.rand(50, 4, dtype=torch.float64), torch.rand(50, 4, dtype=torch.float64).softmax(-1)
    c = torch.logspace(-4, 3, 50, dtype=torch.float64)[:, None]
    together, _ = rules.reverse_kl_policy(value, prior, c)
    for i in range(50):
        assert torch.equal(rules.reverse_kl_policy(value[i:i + 1], prior[i:i + 1], c[i:i + 1])[0][0], together[i])


def test_masks_renormalize_the_prior_and_noise_hits_valid_actions_only():
    prior, mask = torch.tensor([[0.7, 0.2, 0.1], [1.0, 0, 0]]), torch.tensor([[False, True, True], [False, True, True]])
    plain = root_prior(prior, mask, 0.3, 0.0)
    assert plain.tolist() == [[0, pytest.approx(2 / 3), pytest.approx(1 / 3)], [0, 0.5, 0.5]]
    noisy = root_prior(prior, mask, 0.3, 0.25)
    assert (noisy[:, 0] == 0).all() and noisy.sum(-1).tolist() == pytest.approx([1, 1])
    many = root_prior(torch.full((20000, 3), 1 / 3), None, 0.3, 1.0)
    # A Dirichlet(0.3) of three: mean 1/3, variance (1/3)(2/3)/(0.9 + 1) = 0.11696
    assert many.mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    assert many.var(0).tolist() == pytest.approx([0.11696] * 3, abs=0.005)


def test_visit_policies_follow_the_temperature():
    visits = torch.tensor([[1.0, 3.0, 0.0], [2.0, 8.0, 0.0]], dtype=torch.float64)
    policy = rules.visit_policy(visits, torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert policy[0].tolist() == pytest.approx([0.25, 0.75, 0])  # N / sum N
    assert policy[1].tolist() == pytest.approx([4 / 68, 64 / 68, 0])  # N^2 / sum N^2
    for temperature in (1e-4, 1e-30, 0.0):
        assert rules.visit_policy(visits, torch.full((2, ), temperature, dtype=torch.float64))[:, 1].tolist() == [1, 1]


@pytest.mark.parametrize('kind', ['rkl', 'kl'])
@pytest.mark.parametrize('unexpanded', UNEXPANDED)
def test_the_root_policy_after_the_search_matches_the_rules(kind, unexpanded):
    settings_ = SearchSettings(num_simulations=12, unexpanded_value=unexpanded, two_players=True, discount=0.9)
    trees, singles = search_both(settings_, torch.arange(3), 4, FORMS[0])
    policy = exploration_policy(trees, kind)
    for b, single in enumerate(singles):
        assert policy[b].tolist() == pytest.approx(single.policy(single.root, kind), abs=1e-9)


def test_a_whole_number_is_the_score_of_unexpanded_actions():
    arguments = torch.tensor([[0.4, 0.8, 0.0]]), torch.tensor([[True, True, False]]), torch.tensor([0.5])
    assert torch.equal(rules.value_scores(*arguments, 0), rules.value_scores(*arguments, 0.0))
    assert rules.value_scores(*arguments, 1)[0, 2] == 1


# Exact models ---------------------------------------------------------------------------------------------------


class RandomProcesses:
    """A batch of 100 Markov decision processes with 5 states and 3 actions, deterministic, discount 0.9.

    Rewards are in [0, 1], so that values are in [0, 10].

    Args:
        knows_values: use the optimal value of a state, otherwise the value of the uniform policy.
    """

    num = 100

    def __init__(self, knows_values):
        rng = torch.Generator().manual_seed(3)
        self.next = torch.randint(5, (self.num, 5, 3), generator=rng)
        self.reward = torch.rand(self.num, 5, 3, generator=rng, dtype=torch.float64)
        self.optimal = self.values(lambda q: q.amax(-1))
        self.value = self.optimal if knows_values else self.values(lambda q: q.mean(-1))

    def q(self, value):
        following = value.gather(1, self.next.flatten(1)).view(self.next.shape)
        return self.reward + 0.9 * following

    def values(self, reduce):
        value = torch.zeros(self.next.shape[:2], dtype=torch.float64)
        for _ in range(300):
            value = reduce(self.q(value))
        return value

    def predict(self, process, state, reward=()):
        return Prediction(self.value[process, state], reward, action_probs=torch.full((len(state), 3), 1 / 3).double(),
                          state=(process, state))

    def __call__(self, where, action):
        process, state = where
        return self.predict(process, self.next[process, state, action], self.reward[process, state, action])

    def search(self, **options):
        """Return the errors of the root values and the regret of the most visited actions."""
        process, state = torch.arange(self.num), torch.zeros(self.num, dtype=torch.int64)
        trees = TreeSearch(SearchSettings(discount=0.9, **options), FORMS[0]).run(
            self, self.predict(process, state), torch.full((self.num, 3), 1 / 3, dtype=torch.float64), state)
        best = self.q(self.optimal)[:, 0]
        chosen = best.gather(1, trees.root_visits.argmax(-1, keepdim=True))[:, 0]
        return (trees.mean_value() - self.optimal[:, 0]).abs(), best.amax(-1) - chosen


@needs_compiler
def test_with_exact_values_the_search_finds_them_and_the_best_action():
    model = RandomProcesses(knows_values=True)
    few, _ = model.search(num_simulations=100, pb_c_init=0.25)
    many, regret = model.search(num_simulations=3000, pb_c_init=0.25)
    assert many.max() <= 0.05 * 10 and many.mean() < few.mean() / 2
    assert regret.max() <= 0.02  # two processes have actions that differ by less


@needs_compiler
def test_with_random_policy_values_more_simulations_see_further():
    model = RandomProcesses(knows_values=False)
    few, few_regret = model.search(num_simulations=100)
    many, many_regret = model.search(num_simulations=3000)
    assert many.mean() < few.mean() / 3
    at_random = model.q(model.value)[:, 0].argmax(-1, keepdim=True)
    best = model.q(model.optimal)[:, 0]
    greedy_regret = best.amax(-1) - best.gather(1, at_random)[:, 0]
    assert many_regret.mean() < greedy_regret.mean() / 2


# Gumbel ---------------------------------------------------------------------------------------------------------


def bandits(num, num_actions, num_simulations, seed=0):
    """Search bandits with known values by 'gumbel'; return prior, values, choice and improved policy."""
    rng = torch.Generator().manual_seed(seed)
    q = torch.rand(num, num_actions, generator=rng, dtype=torch.float64)
    prior = (2 * torch.randn(num, num_actions, generator=rng, dtype=torch.float64)).softmax(-1)

    def model(row, action):
        zeros = torch.zeros(len(row), dtype=torch.float64)
        return Prediction(zeros, q[row, action], torch.ones(len(row), dtype=torch.bool), (), prior[row], row)

    rows = torch.arange(num)
    root = Prediction((prior * q).sum(-1), action_probs=prior, state=rows)
    torch.manual_seed(seed + 1)  # the seed itself generates the values
    trees = TreeSearch(SearchSettings(num_simulations, rule='gumbel', max_num_considered=8)).run(
        model, root, prior, torch.zeros(num))
    return prior, q, *gumbel_choice(trees)


@pytest.mark.parametrize('num_simulations', [1, 2, 4, 8, 16])
def test_gumbel_improves_the_policy_for_any_number_of_simulations(num_simulations):
    num = 10000 if FORMS[0] else 1000
    prior, q, choice, improved = bandits(num, 6, num_simulations)
    before = (prior * q).sum(-1)
    improvement = (improved * q).sum(-1) - before
    if num_simulations == 16:  # all actions are visited
        assert (improvement >= -1e-12).all()
    # The mixed value replaces the values of unvisited actions, so that improvement is nearly certain, not guaranteed.
    assert (improvement < -1e-12).double().mean() < 0.002 and improvement.mean() > 0
    gain = q.gather(1, choice[:, None])[:, 0] - before
    assert gain.mean() >= -3 * gain.std() / num**0.5
    if num_simulations > 1:
        assert gain.mean() > 3 * gain.std() / num**0.5


def test_gumbel_without_simulations_to_spare_draws_from_the_prior():
    """Choose argmax(gumbel + log prior), a sample of the prior, if the search has one simulation."""
    num = 4000
    prior = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).expand(num, -1)

    def model(row, action):
        zeros = torch.zeros(num, dtype=torch.float64)
        return Prediction(zeros, zeros, torch.ones(num, dtype=torch.bool), (), prior, row)

    trees = TreeSearch(SearchSettings(1, rule='gumbel')).run(
        model, Prediction(torch.zeros(num), state=torch.arange(num)), prior, torch.zeros(num))
    share = torch.bincount(gumbel_choice(trees)[0], minlength=3) / num
    assert share.tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


@pytest.mark.parametrize('native', FORMS)
@pytest.mark.parametrize('considered', [2, 4, 16])
def test_gumbel_searches_as_mctx_does(considered, native, monkeypatch):
    """Compare with ``expected_gumbel.npz``.

    The file contains 20 searches by ``gumbel_muzero_policy`` of mctx 0.0.71 in float64, with some invalid actions.
    """
    known = dict(np.load(Path(__file__).with_name('expected_gumbel.npz')))
    following, reward, value, logits = (torch.from_numpy(known[x]) for x in ('next', 'reward', 'value', 'logits'))

    def predict(state, reward=()):
        return Prediction(value[state], reward, action_probs=logits[state].softmax(-1), state=state)

    states, invalid = torch.from_numpy(known['roots']), torch.from_numpy(known['invalid'])
    root = predict(states)
    options = SearchSettings(int(known['num_simulations']), rule='gumbel', discount=float(known['discount']),
                             max_num_considered=considered)
    monkeypatch.setattr(Noise, 'draw',
                        lambda *args: Noise.none(*args)._replace(gumbel=torch.from_numpy(known['gumbel'])))
    trees = TreeSearch(options, native).run(lambda s, a: predict(following[s, a], reward[s, a]), root,
                                            root_prior(root.action_probs, ~invalid, 1.0, 0.0), torch.zeros(20))
    action, weights = gumbel_choice(trees)
    np.testing.assert_array_equal(trees.root_visits, known[f'visits_{considered}'])
    np.testing.assert_array_equal(action, known[f'action_{considered}'])
    np.testing.assert_allclose(weights, known[f'weights_{considered}'], atol=1e-12)
    np.testing.assert_allclose(trees.mean_value(), known[f'value_{considered}'], atol=1e-12)


def test_independent_simulations_are_batched():
    # 4 actions, 25 simulations: three rounds of all four; the first round of the better two depends on the results,
    # the next five do not; one simulation remains.
    assert rules.simulations_together((4, ), 25) == (4, 4, 4, 1, 1, 2, 2, 2, 2, 2, 1)
    assert rules.simulations_together((16, ), 8) == (8, )
    assert rules.simulations_together((1, ), 3) == rules.simulations_together((0, ), 3) == (1, 1, 1)
    assert rules.simulations_together((3, ), 12) == (2, 1, 2, 1, 1, 1, 2, 2)
    for considered in ((16, ), (2, 5), (1, 16), (3, 9, 14)):
        sizes = rules.simulations_together(considered, 50)
        assert sum(sizes) == 50 and all(size & (size - 1) == 0 for size in sizes)
        for m in considered:
            row = considered_visits(m, 50)
            for size, end in zip(sizes, itertools.accumulate(sizes)):
                level = row[end - 1]  # common to a group; every action that reached it is visited again
                assert set(row[end - size:end]) == {level}
                assert size == 1 or not level or row.count(level - 1) == row.count(level)


@pytest.mark.parametrize('native', FORMS)
def test_gumbel_batches_independent_model_calls_with_the_same_result(native):
    """Search roots with different numbers of actions: each result in the batch equals that alone."""
    game, keys, options = RandomGame(6), torch.arange(5), SearchSettings(25, rule='gumbel', max_num_considered=4)
    roots = game.roots(keys)
    prior = (roots.action_probs + 0.01) * torch.ones(5, 6).tril(1)
    prior /= prior.sum(-1, keepdim=True)
    gumbel = -torch.rand(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log().neg().log()

    def search(rows):
        sizes = []

        def counted(key, action):
            sizes.append(len(key) // len(rows))
            return game(key, action)

        part = roots._replace(**{name: getattr(roots, name)[rows] for name in ('value', 'action_probs', 'state')})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Noise, 'draw', lambda *args: Noise.none(*args)._replace(gumbel=gumbel[rows]))
            trees = TreeSearch(options, native).run(counted, part, prior[rows], torch.zeros(len(rows)))
        return sizes, trees.root_visits, trees.mean_value(), *gumbel_choice(trees)

    together = search(keys)
    assert tuple(together[0]) == rules.simulations_together((2, 3, 4), 25) and len(together[0]) < 25
    for b in range(5):
        single = search(keys[b:b + 1])
        assert tuple(single[0]) == rules.simulations_together((min(b + 2, 4), ), 25)
        for found, expected in zip(single[1:], together[1:]):
            torch.testing.assert_close(found[0], expected[b], rtol=0, atol=1e-12)
