"""Target entropies of specs, worked out by hand."""
import math

import numpy as np
import pytest
import torch

from alfx.tensor_specs import BoundedTensorSpec, SpecError
from alfx.utils import dist_utils as du


def test_continuous_target_entropy_has_the_sign_and_size_of_the_default():
    # One component over [-1, 1]: log(0.1 * 2) = -1.609438; three of them three times that.
    one = BoundedTensorSpec((1, ), torch.float32, -1.0, 1.0)
    assert du.calc_default_target_entropy(one) == pytest.approx(-1.609438, abs=1e-6)
    three = BoundedTensorSpec((3, ), torch.float32, -1.0, 1.0)
    assert du.calc_default_target_entropy(three) == pytest.approx(3 * -1.609438, abs=1e-5)
    # Unequal ranges: log(0.2 * 2) + log(0.2 * 10) = -0.916291 + 0.693147
    wide = BoundedTensorSpec((2, ), torch.float32, [-1.0, -5.0], [1.0, 5.0])
    assert du.calc_default_target_entropy(wide, min_prob=0.2) == pytest.approx(-0.223144, abs=1e-5)


def test_target_entropy_of_discrete_actions_is_positive_and_attainable():
    # Two values: 0.1 * log(1 / 0.1) - 0.9 * log(0.9) = 0.230259 + 0.094824 < log 2
    two = BoundedTensorSpec((), torch.int64, 0, 1)
    assert du.calc_default_target_entropy(two) == pytest.approx(0.325083, abs=1e-6)
    # Five values: 0.1 * log(4 / 0.1) - 0.9 * log(0.9) = 0.368888 + 0.094824
    five = BoundedTensorSpec((), torch.int64, 0, 4)
    assert du.calc_default_target_entropy(five) == pytest.approx(0.463712, abs=1e-6)
    # MultiDiscrete [2, 5] with starts: their sum
    many = BoundedTensorSpec((2, ), torch.int64, [3, -1], [4, 3])
    assert du.calc_default_target_entropy(many) == pytest.approx(0.788795, abs=1e-5)
    # All probability is spread over the other values: log 4.
    assert du.calc_default_target_entropy(five, min_prob=1.0) == pytest.approx(math.log(4))
    single = BoundedTensorSpec((), torch.int64, 2, 2)
    assert du.calc_default_target_entropy(single) == 0.0
    for n in range(2, 30):
        spec = BoundedTensorSpec((), torch.int64, 0, n - 1)
        assert 0 < du.calc_default_target_entropy(spec) < math.log(n)


def test_other_entropies_of_a_spec():
    box = BoundedTensorSpec((2, ), torch.float32, -1.0, 3.0)
    four = BoundedTensorSpec((3, ), torch.int64, 0, 3)
    assert du.calc_uniform_log_prob(box) == pytest.approx(-2 * math.log(4))
    assert du.calc_uniform_log_prob(four) == pytest.approx(-3 * math.log(4))
    assert du.calc_default_max_entropy(box, 0.5) == pytest.approx(2 * 0.5 * math.log(4))
    # Three components over [-2, 2]: 3 * 0.8 * log 4
    wide = BoundedTensorSpec((3, ), torch.float32, -2.0, 2.0)
    assert du.calc_default_max_entropy(wide) == pytest.approx(3.327107, abs=1e-5)
    for width in (0.01, 0.5, 0.99, 1.0, 1.5, 20.0):  # the limit is below the entropy of the uniform density
        narrow = BoundedTensorSpec((), torch.float32, 0.0, width)
        assert du.calc_default_max_entropy(narrow) <= math.log(width) + 1e-9
    assert du.calc_default_max_entropy(four, 0.5) == pytest.approx(1.5 * math.log(4))
    # Entropy -1 for each component in bins of width 4/8: -1 - log(1/2) = -0.306853 each
    assert du.calc_default_target_entropy_quantized(box, 8) == pytest.approx(2 * -0.306853, abs=1e-5)
    # The quantized uniform density has entropy log(4) + log(8) - log(4) = log 8.
    assert du.calc_default_target_entropy_quantized(box, 8, math.log(4)) == pytest.approx(2 * math.log(8))


def test_specs_without_finite_bounds_have_no_target_entropy():
    for spec in (BoundedTensorSpec((2, ), torch.float32, -np.inf, np.inf),
                 BoundedTensorSpec((2, ), torch.float32, -3e38, 3e38),
                 BoundedTensorSpec((2, ), torch.float32, [-1.0, -np.inf], [1.0, np.inf])):
        with pytest.raises(SpecError, match='finite bounds'):
            du.calc_default_target_entropy(spec)
    with pytest.raises(ValueError, match='min_prob'):
        du.calc_default_target_entropy(BoundedTensorSpec(()), min_prob=1.5)
    box = BoundedTensorSpec((2, ), torch.float32, [-1.0, 0.0], [1.0, 0.5])
    assert du.calc_default_max_entropy(box, 1.0) == pytest.approx(math.log(2) + math.log(0.5))
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match='fraction must be in'):
            du.calc_default_max_entropy(box, fraction)
    with pytest.raises(SpecError, match='empty range'):
        du.calc_uniform_log_prob(BoundedTensorSpec((2, ), torch.float32, [-1.0, 1.0], [1.0, 1.0]))
    with pytest.raises(SpecError, match='continuous'):
        du.calc_default_target_entropy_quantized(BoundedTensorSpec((), torch.int64, 0, 3), 4)
