"""Seeds of trials and samplers."""
import numpy as np
import pytest

from alfx.gin_utils import ConfError
from alfx.search.seeds import MAX_SEEDS, MAX_TRIALS, run_seed, sampler_seed


@pytest.mark.parametrize('search_seed', [0, 1, 2**32 - 1])
def test_no_two_runs_of_a_search_share_a_seed(search_seed):
    seeds = [run_seed(search_seed, trial, repeat) for trial in range(20_000) for repeat in range(8)]
    seeds += [run_seed(search_seed, MAX_TRIALS - 1, repeat) for repeat in range(MAX_SEEDS)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0 and max(seeds) < 2**32


def test_seeds_are_scrambled_so_that_neighbors_are_unrelated():
    seeds = np.array([run_seed(0, trial, 0) for trial in range(4096)], dtype=np.uint64)
    assert abs(seeds.mean() / 2**32 - 0.5) < 0.03
    changed_bits = [int(a ^ b).bit_count() for a, b in zip(seeds, seeds[1:])]
    assert 14 < np.mean(changed_bits) < 18  # half of 32


def test_seeds_depend_on_search_trial_and_repeat_only():
    assert run_seed(7, 3, 1) == run_seed(7, 3, 1)
    assert len({run_seed(7, 3, 1), run_seed(8, 3, 1), run_seed(7, 4, 1), run_seed(7, 3, 2)}) == 4


def test_the_sampler_gets_another_seed_in_each_trial():
    seeds = [sampler_seed(0, trial) for trial in range(10_000)]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**32


@pytest.mark.parametrize('arguments', [(-1, 0, 0), (0, MAX_TRIALS, 0), (0, 0, MAX_SEEDS)])
def test_numbers_that_would_collide_are_rejected(arguments):
    with pytest.raises(ConfError, match='expected an int in'):
        run_seed(*arguments)
