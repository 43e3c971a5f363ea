"""ObservationGrid: every cell of the observation space has a unique number."""
import itertools

import numpy as np
import pytest
import torch

from alfx.algorithms.base.observation_grid import ObservationGrid
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec


def grid(spec, size=None, bounds=None):
    return ObservationGrid(spec, size, bounds, 'Owner')


def test_one_integer_is_counted_from_its_minimum():
    numbers = grid(BoundedTensorSpec((), torch.int64, 3, 7))
    assert numbers.num_cells == 5
    assert numbers(torch.tensor([3, 7, 4])).tolist() == [0, 4, 1]


def test_every_combination_of_integers_has_a_unique_number():
    spec = BoundedTensorSpec((3, ), torch.int64, [0, 2, -1], [1, 5, 1])
    numbers = grid(spec)
    assert numbers.num_cells == 2 * 4 * 3
    every = torch.tensor(list(itertools.product(range(0, 2), range(2, 6), range(-1, 2))))
    assert numbers(every).tolist() == list(range(24))


def test_nests_and_truth_values_are_numbered_too():
    spec = {'a': BoundedTensorSpec((), torch.int64, 1, 3),
            'b': (BoundedTensorSpec((2, ), torch.int8, 0, 1), TensorSpec((), torch.bool))}
    numbers = grid(spec)
    every = list(itertools.product(range(1, 4), range(2), range(2), range(2)))
    observation = {'a': torch.tensor([e[0] for e in every]),
                   'b': (torch.tensor([e[1:3] for e in every], dtype=torch.int8),
                         torch.tensor([bool(e[3]) for e in every]))}
    assert numbers.num_cells == 24 and numbers(observation).tolist() == list(range(24))


def test_ranges_are_divided_equally_and_outside_values_clamped():
    numbers = grid(BoundedTensorSpec((1, ), torch.float32, -1.0, 1.0), 4)
    values = torch.tensor([-9.0, -1.0, -0.51, -0.49, -0.01, 0.0, 0.49, 0.5, 1.0, 9.0])
    assert numbers(values.unsqueeze(-1)).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_a_grid_matches_the_slow_loop():
    spec = {'x': BoundedTensorSpec((2, ), torch.float32, [-1.0, 0.0], [1.0, 4.0]),
            'y': TensorSpec((1, )), 'z': BoundedTensorSpec((), torch.int64, 5, 6)}
    sizes, bounds = [3, 5, 4], [None, (1.0, 2.0), (-10.0, 10.0)]
    numbers = grid(spec, sizes, bounds)
    rng = np.random.default_rng(0)
    x, y, z = rng.normal(size=(200, 2)) * 2, rng.normal(size=(200, 1)) * 10, rng.integers(5, 7, size=200)
    found = numbers({'x': torch.tensor(x).float(), 'y': torch.tensor(y).float(), 'z': torch.tensor(z)})
    assert numbers.num_cells == 3 * 5 * 4 * 2
    for i in range(200):
        number = 0
        for value, (low, high), size in zip((*x[i], *y[i]), ((-1.0, 1.0), (1.0, 2.0), (-10.0, 10.0)), sizes):
            part = int(np.floor((np.float32(value) - low) / (high - low) * size))
            number = number * size + min(max(part, 0), size - 1)
        assert found[i] == number * 2 + z[i] - 5


@pytest.mark.parametrize('spec, size, bounds, message', [
    (TensorSpec((2, )), 4, None, 'no finite range'),
    ({'far': BoundedTensorSpec((1, ), torch.float32, 0.0, float('inf'))}, 4, None, 'observation far'),
    (BoundedTensorSpec((2, )), None, None, r'Owner.grid_size: the observation has 2 floating'),
    (BoundedTensorSpec((2, )), [3], None, r'grid_size.*2 of them'),
    (BoundedTensorSpec((2, )), 0, None, 'grid_size'),
    (BoundedTensorSpec((2, )), 3, [(0.0, 1.0)], 'grid_bounds: expected 2 pairs'),
    (BoundedTensorSpec((1, )), 3, [(1.0, 1.0)], 'low < high'),
    (BoundedTensorSpec((), torch.int64, 0, 3), 4, None, 'no floating point numbers'),
    (TensorSpec((), torch.int64), None, None, 'integers without bounds'),
])
def test_invalid_arguments_are_rejected_by_name(spec, size, bounds, message):
    with pytest.raises(ValueError, match=message):
        grid(spec, size, bounds)
