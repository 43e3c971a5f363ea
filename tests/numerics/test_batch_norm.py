"""Batch norm and batch renorm, against formulas in NumPy and against separate layers."""
import numpy as np
import pytest
import torch

from alfx import context, norm_layers
from alfx.norm_layers import BatchNorm

EPS = 1e-3


def layer_with_history(size, seed=0, **args):
    """Return a layer whose parameters and running statistics differ from the initial ones."""
    torch.manual_seed(seed)
    layer = BatchNorm(size, **args)
    for x in (layer.weight.data, layer.bias.data, layer.running_mean):
        x.normal_()
    layer.running_var.uniform_(0.5, 2.0)
    return layer


def statistics(layer):
    return [x.clone() for x in layer.buffers()]


def assert_unchanged(layer, before):
    assert all(map(torch.equal, layer.buffers(), before))


def expected(layer, x, weights=None, r_max=None, d_max=5.0):
    """Return the result of a batch, computed by the formulas of the class; with ``r_max`` of batch renorm."""
    weight, bias, run_mean, run_var = (t.detach().numpy().astype(np.float64) for t in (
        layer.weight, layer.bias, layer.running_mean, layer.running_var))
    weights = np.ones(len(x)) if weights is None else weights
    share = (weights / weights.sum())[:, None]
    mean = (share * x).sum(0)
    sd = np.sqrt((share * (x - mean)**2).sum(0) + EPS)
    r, d = 1.0, 0.0
    if r_max is not None:
        run_sd = np.sqrt(run_var + EPS)
        r, d = np.clip(sd / run_sd, 1 / r_max, r_max), np.clip((mean - run_mean) / run_sd, -d_max, d_max)
    return weight * ((x - mean) / sd * r + d) + bias


@pytest.mark.parametrize('weights', [None, [1, 0, 1, 1, 1, 0, 1, 1], [2, 0, 1, 1, 3, 1, 1, 0.5]])
@pytest.mark.parametrize('renorm', [False, True])
def test_a_batch_is_normalized_as_in_numpy(renorm, weights):
    layer = layer_with_history(3, renorm=renorm, warm_up=0)
    x = torch.randn(8, 3) * torch.tensor([0.01, 1.0, 20.0]) + torch.tensor([0.0, 2.0, -90.0])
    weights = None if weights is None else np.array(weights, dtype=np.float64)
    expected_output = expected(layer, x.double().numpy(), weights, 3.0 if renorm else None)
    with norm_layers.counted(None if weights is None else torch.from_numpy(weights).float()):
        found = layer(x)
    counts = slice(None) if weights is None else weights > 0
    np.testing.assert_allclose(found.detach()[counts], expected_output[counts], rtol=1e-5, atol=1e-5)


def test_running_statistics_normalize_as_in_numpy():
    layer, x = layer_with_history(3), torch.randn(5, 3)
    expected_output = (layer.weight * (x - layer.running_mean) / (layer.running_var + EPS).sqrt() + layer.bias).detach()
    with norm_layers.running_statistics():
        torch.testing.assert_close(layer(x).detach(), expected_output)
    torch.testing.assert_close(layer.eval()(x).detach(), expected_output)


@pytest.mark.parametrize('is_weighted', [False, True])
@pytest.mark.parametrize('renorm', [False, True])
def test_gradients_equal_those_of_autograd_through_the_statistics(renorm, is_weighted):
    layer = layer_with_history(4, renorm=renorm, warm_up=0)
    x = (torch.randn(6, 4) * 2 + 1).requires_grad_()
    weights = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0, 1.0]) if is_weighted else torch.ones(6)
    direction = torch.randn(6, 4) * (weights > 0).unsqueeze(1)
    before = layer.running_mean.double(), (layer.running_var.double() + EPS).sqrt()
    with norm_layers.counted(weights if is_weighted else None):
        found = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], direction)
    slow = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    share = (weights.double() / weights.sum()).unsqueeze(1)
    mean = (share * slow[0]).sum(0)
    sd = ((share * (slow[0] - mean)**2).sum(0) + EPS).sqrt()
    r = (sd / before[1]).clamp(1 / 3, 3).detach() if renorm else 1.0
    d = ((mean - before[0]) / before[1]).clamp(-5, 5).detach() if renorm else 0.0
    y = slow[1] * ((slow[0] - mean) / sd * r + d) + slow[2]
    for a, b in zip(found, torch.autograd.grad(y, slow, direction.double())):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_rejected():
    layer, x = BatchNorm(2), torch.randn(4, 2, requires_grad=True)
    [gradient] = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        gradient.sum().backward()


def test_renorm_is_batch_norm_until_it_is_warm():
    plain, renorm = layer_with_history(3), layer_with_history(3, renorm=True, warm_up=2)
    for step in range(3):
        x = torch.randn(8, 3)
        assert torch.equal(plain(x), renorm(x)) == (step < 2)


def test_renorm_without_clipping_normalizes_by_running_statistics():
    """x = ((x - m) / sd) * (sd / sd_run) + (m - m_run) / sd_run = (x - m_run) / sd_run."""
    layer = layer_with_history(3, renorm=True, warm_up=0, r_max=1e6, d_max=1e6)
    x = torch.randn(8, 3) * 3
    with norm_layers.running_statistics():
        expected_output = layer(x)
    torch.testing.assert_close(layer(x), expected_output)


def test_running_statistics_move_by_momentum():
    layer = BatchNorm(1, momentum=0.1)
    layer(torch.tensor([[1.0], [3.0]]))  # mean 2, biased variance 1
    layer(torch.tensor([[0.0], [8.0]]))  # mean 4, biased variance 16
    assert layer.running_mean.item() == pytest.approx(0.9 * 0.2 + 0.1 * 4)
    assert layer.running_var.item() == pytest.approx(0.9 * 1.0 + 0.1 * 16)
    assert layer.num_updates == 2


@pytest.mark.parametrize('where', [context.rollout_context, context.eval_context, context.auxiliary_context,
                                   norm_layers.running_statistics, torch.no_grad])
def test_statistics_are_updated_only_in_training_with_gradient(where):
    layer = layer_with_history(3)
    before, x = statistics(layer), torch.randn(8, 3)
    with where():
        in_batch, single = layer(x)[:1], layer(x[:1]) if where is not torch.no_grad else None
    assert_unchanged(layer, before)
    assert single is None or torch.equal(in_batch, single)  # a row does not depend on the others
    layer(x)
    assert layer.num_updates == 1


@pytest.mark.parametrize('mode', [context.replay_context, context.pretrain_context])
def test_training_modes_use_the_batch(mode):
    layer = BatchNorm(2)
    with mode():
        y = layer(torch.randn(64, 2) + 5)
    assert y.mean().abs() < 1e-5 and layer.num_updates == 1


@pytest.mark.parametrize('junk', [1e8, float('nan'), float('inf')])
def test_rows_of_weight_0_change_nothing(junk):
    layer, other = layer_with_history(3), layer_with_history(3)
    x = torch.randn(6, 3)
    with_junk = torch.cat((x[:2], torch.full((2, 3), junk), x[2:])).requires_grad_()
    with norm_layers.counted(torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 1])):
        found = layer(with_junk)
    weighted = [0, 1, 4, 5, 6, 7]
    torch.testing.assert_close(found[weighted], other(x))
    torch.testing.assert_close(statistics(layer), statistics(other))
    found[weighted].square().sum().backward()
    assert bool(with_junk.grad.isfinite().all()) and not with_junk.grad[2:4].any()


def test_a_batch_without_any_counted_row_leaves_the_statistics():
    layer = layer_with_history(3)
    before = statistics(layer)[:2]
    with norm_layers.counted(torch.zeros(4)):
        assert bool(layer(torch.randn(4, 3)).isfinite().all())
    torch.testing.assert_close(statistics(layer)[:2], before)


def test_weights_of_a_small_sum_count():
    layer = BatchNorm(1, momentum=0.1)
    with norm_layers.counted(torch.tensor([0.1, 0.3])):
        layer(torch.tensor([[0.0], [8.0]]))  # mean 6, variance (36 + 3 * 4) / 4 = 12
    assert layer.running_mean.item() == pytest.approx(0.1 * 6)
    assert layer.running_var.item() == pytest.approx(0.9 * 1 + 0.1 * 12)


def test_repeated_rows_weigh_each_batch_alike():
    layer, x, weights = BatchNorm(2), torch.randn(6, 2), torch.tensor([1.0, 0.0, 1.0])
    with norm_layers.counted(weights), norm_layers.repeated_rows(2):
        found = layer(x)
    with norm_layers.counted(torch.cat((weights, weights))):
        torch.testing.assert_close(found, layer(x))


def test_a_batch_with_nan_does_not_spoil_the_statistics():
    layer = layer_with_history(2)
    before = statistics(layer)[:2]
    layer(torch.full((4, 2), float('nan')))
    assert all(map(torch.equal, statistics(layer)[:2], before))


@pytest.mark.parametrize('is_shared', [False, True])
def test_a_stack_equals_separate_layers(is_shared):
    stack, singles = BatchNorm(4, renorm=True, warm_up=1).make_parallel(3), [BatchNorm(4, renorm=True, warm_up=1)
                                                                            for _ in range(3)]
    for _ in range(3):
        x = torch.randn(8, 4) * 2 if is_shared else torch.randn(8, 3, 4).cumsum(1)
        found = stack(x)
        expected_output = torch.stack([layer(x if is_shared else x[:, i]) for i, layer in enumerate(singles)], 1)
        torch.testing.assert_close(found, expected_output)
    torch.testing.assert_close(stack.running_var.view(3, 4), torch.stack([s.running_var for s in singles]))
    stack.reset_parameters()
    assert all(map(torch.equal, stack.state_dict().values(), BatchNorm(4).make_parallel(3).state_dict().values()))


def test_errors_state_the_expected_values():
    with pytest.raises(ValueError, match='at least 2 rows'):
        BatchNorm(2)(torch.randn(1, 2))
    with norm_layers.counted(torch.ones(1)), pytest.raises(ValueError, match='at least 2 rows'):
        BatchNorm(2)(torch.randn(1, 2))
    with norm_layers.counted(torch.ones(3)), pytest.raises(ValueError, match='each of 3 weights, found 4'):
        BatchNorm(2)(torch.randn(4, 2))
    with pytest.raises(ValueError, match='BatchNorm.r_max must be a number >= 1, found float 0.5'):
        BatchNorm(2, r_max=0.5)
    BatchNorm(2, r_max=1.0)
