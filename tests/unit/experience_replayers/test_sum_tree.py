"""SumTree against plain sums."""
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alfx.experience_replayers import sum_tree
from alfx.experience_replayers.sum_tree import SumTree


@pytest.fixture
def small_nodes(monkeypatch):
    """Use small nodes, so that a few weights make a tree of several levels."""
    monkeypatch.setattr(sum_tree, '_FANOUT', 2)
    monkeypatch.setattr(sum_tree, '_MAX_TOP_SIZE', 3)


updates = st.lists(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([0.0, 0.25, 1.0, 3.0, 1e-12, 1e12])),
                            min_size=1, max_size=6), max_size=8)


@settings(max_examples=200)
@given(st.integers(1, 40), updates, st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=8),
       st.sampled_from([(2, 1), (2, 3), (3, 4), (16, 4096)]))
def test_any_history_of_weights_is_found_by_its_running_sums(capacity, history, fractions, sizes):
    before = sum_tree._FANOUT, sum_tree._MAX_TOP_SIZE
    sum_tree._FANOUT, sum_tree._MAX_TOP_SIZE = sizes
    try:
        tree, weights = SumTree(capacity), np.zeros(capacity)
        for update in history:
            indices = np.array([i % capacity for i, _ in update])
            tree.set(indices, np.array([w for _, w in update]))
            for i, w in update:  # the last one counts
                weights[i % capacity] = w
        assert tree.get(np.arange(capacity)).tolist() == weights.tolist()
        assert tree.total == pytest.approx(weights.sum(), rel=1e-12)
        if not weights.sum():
            with pytest.raises(ValueError, match='above 0'):
                tree.find(np.array(fractions))
            return
        found, probabilities = tree.find(np.array(fractions))
        sums = np.concatenate([[0.0], weights.cumsum()])
        slack = 1e-12 * sums[-1]
        for fraction, i, p in zip(fractions, found, probabilities):
            assert weights[i] > 0 and p == pytest.approx(weights[i] / weights.sum(), rel=1e-12)
            assert sums[i] - slack <= fraction * sums[-1] <= sums[i + 1] + slack
    finally:
        sum_tree._FANOUT, sum_tree._MAX_TOP_SIZE = before


def test_sums_do_not_drift():
    generator = np.random.default_rng(0)
    tree = SumTree(70_000)
    for _ in range(300):
        tree.set(generator.integers(0, 70_000, 256), 10.0**generator.uniform(-9, 9, 256))
    fresh = SumTree(70_000)
    fresh.set(np.arange(70_000), tree.get(np.arange(70_000)))
    for a, b in zip(tree._levels, fresh._levels):
        assert (a == b).all()
    tree.set(np.arange(70_000), 0.0)
    tree.set(np.array([123]), 1e-9)
    assert tree.total == 1e-9 and set(tree.find(np.linspace(0, 0.999, 50))[0]) == {123}


def test_weights_worked_out_by_hand(small_nodes):
    tree = SumTree(7)
    tree.set(np.arange(7), np.array([1.0, 0.0, 2.0, 1.0, 0.0, 0.0, 4.0]))
    # Running sums 1 1 3 4 4 4 8: an eighth of the total is one.
    found, probabilities = tree.find(np.array([0.0, 0.12, 0.125, 0.37, 0.375, 0.499, 0.5, 0.999]))
    assert found.tolist() == [0, 0, 2, 2, 3, 3, 6, 6]
    assert probabilities.tolist() == [0.125, 0.125, 0.25, 0.25, 0.125, 0.125, 0.5, 0.5]


def test_a_fraction_rounded_to_one_finds_the_last_weight(small_nodes):
    tree = SumTree(9)
    tree.set(np.arange(9), np.array([0.1] * 5 + [0.0] * 4))
    assert tree.find(np.array([np.nextafter(1.0, 0.0), 1.0]))[0].tolist() == [4, 4]


def test_a_pickled_tree_is_the_same_tree(small_nodes):
    tree = SumTree(9)
    tree.set(np.arange(9), np.arange(9.0))
    copy = pickle.loads(pickle.dumps(tree))
    copy.set(np.array([0]), 100.0)
    assert copy.total == 136.0 and tree.total == 36.0
    assert copy.find(np.array([0.5]))[0].tolist() == [0]
