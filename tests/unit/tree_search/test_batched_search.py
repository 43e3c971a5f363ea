"""What a search keeps from one to the next."""
import copy
import pickle
import resource

import torch

from alfx.tree_search.search import Prediction, TreeSearch
from alfx.tree_search.trees import SearchSettings


def model(state, action):
    n = len(state)
    return Prediction(torch.zeros(n), torch.rand(n), action_probs=torch.full((n, 3), 1 / 3), state=state + 1)


def run(search, batch_size=4):
    root = model(torch.zeros(batch_size, 8), None)
    return search.run(model, root, root.action_probs.double(), torch.zeros(batch_size))


def test_ten_thousand_searches_take_no_more_memory_than_a_few():
    search = TreeSearch(SearchSettings(4))
    for _ in range(200):
        run(search)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10000):
        run(search)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= 1.02 * before


def test_only_the_latest_sizes_of_batches_are_kept():
    search = TreeSearch(SearchSettings(4))
    trees = [run(search, n) for n in (1, 2, 3, 4, 5)]
    assert len(search._forests) == 4
    assert run(search, 5) is trees[-1] and run(search, 1) is not trees[0]


def test_a_copy_searches_with_trees_of_its_own():
    search = TreeSearch(SearchSettings(4))
    trees = run(search)
    for other in (copy.deepcopy(search), pickle.loads(pickle.dumps(search))):
        assert other.settings == search.settings and run(other) is not trees
