"""Elementary functions."""
import functools
import math

import gin
import pytest
import torch

from alfx.gin_utils import configurable
from alfx.utils import dist_utils, losses, math_ops


@configurable(module='tests.math_ops')
class Holder:
    """Keeps a function that a conf gives it."""

    def __init__(self, function=None):
        self.function = function


def test_step_functions_are_passed_plain_from_a_conf():
    gin.parse_config("""
        Holder.function = @clipped_exp
        clipped_exp.clip_value_max = 0.0
        losses/Holder.function = @losses.element_wise_huber_loss
        short/Holder.function = @element_wise_squared_loss
        softsign/Holder.function = @alfx.math.softsign
        torch/Holder.function = @softsign
    """)
    function = Holder().function
    assert isinstance(function, functools.partial) and function.func is math_ops.clipped_exp
    assert function(torch.tensor(5.0)).item() == 1.0
    with gin.config_scope('losses'):
        assert Holder().function is losses.element_wise_huber_loss
    with gin.config_scope('short'):
        assert Holder().function is losses.element_wise_squared_loss
    with gin.config_scope('softsign'):
        assert Holder().function is math_ops.softsign
    with gin.config_scope('torch'):
        assert Holder().function is torch.nn.functional.softsign


def test_a_conf_can_name_distributions_and_transforms():
    gin.parse_config("""
        Holder.function = @dist_utils.TruncatedCauchy
        beta/Holder.function = @Beta
        Beta.eps = 0.25
        squash/Holder.function = @dist_utils.Softclip()
        Softclip.low = -2.0
        Softclip.high = 3.0
    """)
    assert Holder().function is dist_utils.TruncatedCauchy
    with gin.config_scope('beta'):
        one = torch.full((100, ), 0.1)
        assert Holder().function(one, one).sample().min().item() == 0.25
    with gin.config_scope('squash'):
        transform = Holder().function
    assert transform(torch.tensor(100.0)).item() == 3.0


def test_clipped_exp_is_flat_outside_its_range():
    x = torch.tensor([-100.0, 0.0, 1.0, 5.0], requires_grad=True)
    y = math_ops.clipped_exp(x)
    torch.testing.assert_close(y, torch.tensor([math.exp(-20), 1.0, math.e, math.exp(2)]))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 1.0, math.e, 0.0]))


def test_soft_bounds_stay_inside_and_tend_to_the_hard_ones():
    x = torch.linspace(-10, 10, 201)
    assert (math_ops.softlower(x, -1.0) >= -1).all() and (math_ops.softupper(x, 2.0) <= 2).all()
    for softclip in (math_ops.softclip, math_ops.softclip_tf):
        y = softclip(x, -1.0, 2.0, 0.5)
        assert (y >= -1 - 1e-6).all() and (y <= 2 + 1e-6).all() and (y.diff() >= 0).all()
        torch.testing.assert_close(softclip(x, -1.0, 2.0, 1e-3), x.clamp(-1, 2), atol=2e-3, rtol=0)
        far = softclip(torch.tensor([-100.0, 100.0]), -1.0, 2.0)
        torch.testing.assert_close(far, torch.tensor([-1.0, 2.0]))
    # softplus(0) = log 2
    assert math_ops.softlower(torch.tensor(1.0), 1.0).item() == pytest.approx(1.693147)


def test_softsign_and_its_gradient_match_torch():
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.softsign(x)
    (slope, ) = torch.autograd.grad(expected.sum(), x)
    for function in (math_ops.softsign, lambda x: math_ops.softsign_(x * 1.0)):
        y = function(x)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], slope)


def test_swish_and_square():
    assert math_ops.swish(torch.tensor(1.0)).item() == pytest.approx(0.731059, abs=1e-6)
    assert math_ops.square(torch.tensor(-3.0)).item() == 9.0
    x = object()
    assert math_ops.identity(x) is x


def test_reductions_over_several_tensors():
    a, b, c = torch.tensor([1.0, 5.0]), torch.tensor([2.0, -1.0]), torch.tensor([0.0, 3.0])
    assert math_ops.max_n([a, b, c]).tolist() == [2.0, 5.0]
    assert math_ops.min_n([a, b, c]).tolist() == [0.0, -1.0]
    assert math_ops.add_n([a, b, c]).tolist() == [3.0, 7.0]
    assert math_ops.mul_n([a, b, c]).tolist() == [0.0, -15.0]
    assert a.tolist() == [1.0, 5.0]


def test_empty_is_nothing_to_add():
    x = torch.ones(2)
    assert math_ops.add_ignore_empty(x, ()) is x and math_ops.add_ignore_empty(None, x) is x
    assert math_ops.add_ignore_empty(x, x).tolist() == [2.0, 2.0]
    assert math_ops.add_ignore_empty((), ()) == () and math_ops.add_ignore_empty((1, ), (2, )) == (1, 2)


def test_weighted_means():
    x, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    assert math_ops.weighted_reduce_mean(x, weight).item() == 2.5  # (1 + 9) / 4
    assert math_ops.weighted_reduce_mean(x, weight, dim=0).tolist() == [2.5, 0.0]
    x[0, 1] = torch.nan  # its weight is 0
    assert math_ops.weighted_reduce_mean(x, weight).item() == 2.5


def test_sums_over_the_trailing_dimensions():
    x = torch.arange(24.0).view(2, 3, 4)
    assert math_ops.sum_to_leftmost(x, 1).tolist() == [66.0, 210.0]
    assert math_ops.sum_to_leftmost(x, 3) is x


def test_argmin_takes_the_first_of_equals():
    assert math_ops.argmin(torch.tensor([[2.0, 1.0, 1.0], [0.0, 0.0, 0.0]])).tolist() == [1, 0]


def test_shuffle_keeps_rows_together():
    x, y = math_ops.shuffle((torch.arange(50), torch.arange(50) * 10))
    assert torch.equal(x * 10, y) and not torch.equal(x, torch.arange(50)) and torch.equal(x.sort()[0],
                                                                                         torch.arange(50))


def test_normalize_min_max_covers_the_unit_interval():
    assert math_ops.normalize_min_max(torch.tensor([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert math_ops.normalize_min_max(torch.tensor([2.0, 2.5, 2.25])).tolist() == [0.0, 1.0, 0.5]
    assert math_ops.normalize_min_max(torch.full((3, ), 7.0)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize('shape', [(3, ), (3, 1), (1, 3)])
def test_normalize_min_max_normalizes_each_sample_separately(shape):
    x = torch.tensor([[0.0, 1.0, 2.0], [0.0, 10.0, 20.0], [5.0, 5.0, 5.0]])
    expected = torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.5, 1.0], [0.0, 0.0, 0.0]])
    assert torch.equal(math_ops.normalize_min_max(x.view(3, *shape)), expected.view(3, *shape))


def test_binary_negative_entropy_is_zero_at_certainty():
    p = torch.tensor([0.0, 0.5, 1.0])
    torch.testing.assert_close(math_ops.binary_neg_entropy(p), torch.tensor([0.0, -math.log(2), 0.0]))


@pytest.mark.parametrize('transform', [math_ops.SqrtLinearTransform(), math_ops.Sqrt1pTransform(),
                                       math_ops.Log1pTransform()], ids=lambda t: type(t).__name__)
def test_scalar_transforms_are_odd_and_invert_in_single_precision(transform):
    x = torch.tensor([0.0, 1e-4, 0.3, 1.0, 50.0, 1e4])
    y = transform.transform(x)
    torch.testing.assert_close(transform.transform(-x), -y)
    torch.testing.assert_close(transform.inverse_transform(y), x, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(transform.inverse_transform(-y), -x, rtol=1e-4, atol=1e-6)


def test_scalar_transforms_worked_out_by_hand():
    three = torch.tensor(3.0)
    assert math_ops.SqrtLinearTransform(eps=0.01).transform(three).item() == pytest.approx(1.03)  # 2 - 1 + 0.03
    assert math_ops.Sqrt1pTransform().transform(three).item() == pytest.approx(1.0)
    for alpha in (2, 0.5):
        assert math_ops.Log1pTransform(alpha=alpha).transform(three).item() == pytest.approx(alpha * math.log(4))
    with pytest.raises(ValueError, match='eps'):
        math_ops.SqrtLinearTransform(eps=0)
    with pytest.raises(ValueError, match='alpha'):
        math_ops.Log1pTransform(alpha=-1)
