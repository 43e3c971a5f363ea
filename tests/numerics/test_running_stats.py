"""Averagers and normalizers against explicit weighted sums; evaluation does not change their state."""
import copy
import pickle

import numpy as np
import pytest
import torch

from alfx import context
from alfx.engine import probe
from alfx.tensor_specs import TensorSpec
from alfx.utils import averager, normalizers, running_stats

VECTOR = TensorSpec((2, ))
NESTED = {'values': TensorSpec(()), 'deep': (TensorSpec((3, )), TensorSpec((2, 2)))}


def weights_of(kind, n):
    """Return the weight of each of n batches."""
    if kind == 'window':  # the last 3
        weights = [float(i >= n - 3) for i in range(n)]
    elif kind == 'em':
        weights = [0.8**(n - 1 - i) for i in range(n)]
    else:  # adaptive with speed 4: batch i enters with weight 4 / (i + 4) and is then scaled down
        weights = []
        for i in range(n):
            rate = 4 / (i + 4)
            weights = [w * (1 - rate) for w in weights] + [rate]
    return np.array(weights) / np.sum(weights)


def make_normalizer(kind, spec=VECTOR, **kwargs):
    if kind == 'window':
        return normalizers.WindowNormalizer(spec, window_size=3, **kwargs)
    if kind == 'em':
        return normalizers.EMNormalizer(spec, update_rate=0.2, **kwargs)
    return normalizers.AdaptiveNormalizer(spec, speed=4.0, **kwargs)


def make_averager(kind, spec=VECTOR):
    if kind == 'window':
        return averager.WindowAverager(spec, window_size=3)
    if kind == 'em':
        return averager.EMAverager(spec, update_rate=0.2)
    return averager.AdaptiveAverager(spec, speed=4.0)


KINDS = ['window', 'em', 'adaptive']


@pytest.mark.parametrize('kind', KINDS)
def test_averages_are_the_weighted_sums_of_batch_means(kind):
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=(4, 5, 2)) for _ in range(7)]
    average = make_averager(kind)
    for batch in batches:
        average.update(torch.tensor(batch))
    expected = weights_of(kind, 7) @ np.stack([b.mean((0, 1)) for b in batches])
    np.testing.assert_allclose(average.get().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('updates', [1, 2, 7])
@pytest.mark.parametrize('batch_size', [6, 600])
def test_normalizing_uses_the_weighted_mean_and_variance(kind, updates, batch_size):
    rng = np.random.default_rng(1)
    batches = [rng.normal(loc=3, scale=2, size=(batch_size, 2)) for _ in range(updates)]
    normalizer = make_normalizer(kind, auto_update=False)
    for batch in batches:
        normalizer.update(torch.tensor(batch))
    weights = weights_of(kind, updates)
    mean = weights @ np.stack([b.mean(0) for b in batches])
    second = weights @ np.stack([(b**2).mean(0) for b in batches])
    x = torch.randn(5, 2)
    expected = (x.numpy() - mean) / np.sqrt(second - mean**2)
    np.testing.assert_allclose(normalizer.normalize(x).numpy(), expected, atol=1e-4)
    no_mean = copy.deepcopy(normalizer)
    no_mean._zero_mean = False
    np.testing.assert_allclose(no_mean.normalize(x).numpy(), x.numpy() / np.sqrt(second), atol=1e-4)
    no_mean._unit_std = True
    np.testing.assert_allclose(no_mean.normalize(x).numpy(), x.numpy() / np.sqrt(second - mean**2), atol=1e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_the_variance_is_precise_despite_a_large_mean(kind):
    # In float32, E[x^2] - E[x]^2 at a mean of 10000 and a deviation of 1 is noise of magnitude 8.
    torch.manual_seed(0)
    normalizer = make_normalizer(kind, TensorSpec(()), auto_update=True)
    for _ in range(20):
        normalizer(torch.randn(4000) + 10_000)
    out = normalizer.transform(torch.randn(4000) + 10_000)
    assert out.std().item() == pytest.approx(1.0, abs=0.05)
    assert out.mean().item() == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize('name', ['normalize', '__call__'])
@pytest.mark.parametrize('kind', KINDS)
def test_normalizing_can_update_the_statistics(kind, name):
    torch.manual_seed(0)
    updates, keeps = make_normalizer(kind), make_normalizer(kind, auto_update=False)
    for _ in range(40):
        batch = torch.randn(256, 2) * 10 + 50
        found, unchanged = getattr(updates, name)(batch), getattr(keeps, name)(batch)
    assert found.mean().abs() < 0.3 and abs(found.std() - 1) < 0.2
    assert torch.equal(unchanged, batch) and torch.equal(updates.transform(batch), found)


@pytest.mark.parametrize('kind', KINDS)
def test_nothing_is_updated_in_evaluation(kind):
    normalizer, average = make_normalizer(kind), make_averager(kind)
    x = torch.randn(8, 2)
    normalizer(x)
    average.update(x)
    states = copy.deepcopy(normalizer.state_dict()), copy.deepcopy(average.state_dict())

    def feed():
        normalizer(x + 100)
        normalizer.normalize(x + 100)
        normalizer.update(x + 100)
        average.average(x + 100)
        for module, state in zip((normalizer, average), states):
            for name, value in module.state_dict().items():
                assert torch.equal(value, state[name])

    with context.eval_context():
        feed()
    normalizer.eval()
    average.eval()
    feed()
    normalizer.train()
    normalizer(x + 100)
    assert any(not torch.equal(v, states[0][k]) for k, v in normalizer.state_dict().items())


@pytest.mark.parametrize('kind', KINDS)
def test_statistics_are_checkpointed_and_continue_identically(kind):
    first = make_normalizer(kind, NESTED)
    def batch():
        return {'values': torch.randn(6), 'deep': (torch.randn(6, 3), torch.randn(6, 2, 2))}
    for _ in range(5):
        first(batch())
    second = make_normalizer(kind, NESTED)
    second.load_state_dict(first.state_dict())
    for twin in (second, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        next_batch = batch()
        expected = copy.deepcopy(first)(next_batch)
        found = twin(next_batch)
        assert torch.equal(found['values'], expected['values'])
        assert torch.equal(found['deep'][1], expected['deep'][1])


def test_before_any_update_normalizing_changes_nothing():
    x = torch.randn(3, 2)
    for kind in KINDS:
        torch.testing.assert_close(make_normalizer(kind, auto_update=False).normalize(x), x)


@pytest.mark.parametrize('shape', [(2, ), (7, 2), (3, 7, 2)])
def test_any_number_of_leading_dimensions_is_one_batch(shape):
    x = torch.randn(shape)
    for kind in KINDS:
        average = make_averager(kind)
        torch.testing.assert_close(average.average(x), x.reshape(-1, 2).mean(0))
        assert make_normalizer(kind)(x).shape == x.shape
    average = make_averager('em')
    average.update(torch.ones(4, 2))
    average.update(torch.ones(0, 2))
    torch.testing.assert_close(average.get(), torch.ones(2))


def test_values_are_clipped_and_integers_become_floats():
    normalizer = normalizers.ScalarAdaptiveNormalizer()
    x = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 0, 100])
    out = normalizer(x, clip_value=1.5)
    assert out.dtype == torch.float32 and out.max().item() == 1.5
    assert normalizer(x.double()).dtype == torch.float64
    normalizer = normalizers.ScalarEMNormalizer(update_rate=1.0)
    x = torch.tensor([-1.0, 1.0])
    for clip_value, expected in ((0.5, 0.5), (0.0, 1.0), (-0.5, 1.0)):
        torch.testing.assert_close(normalizer(x, clip_value=clip_value), expected * x)


def test_normalizing_passes_gradients_and_keeps_its_input():
    x = torch.randn(5, 2, requires_grad=True)
    before = x.detach().clone()
    make_normalizer('em')(x).sum().backward()
    assert x.grad is not None and torch.equal(x.detach(), before)
    assert not make_averager('em').average(x).requires_grad


def test_a_returned_average_does_not_change_later():
    average = averager.ScalarEMAverager(0.5)
    first = average.average(torch.tensor([1.0]))
    average.update(torch.tensor([3.0]))
    assert first.item() == 1.0
    # Weights 0.25 and 0.5 over 0.75: (1 * 0.25 + 3 * 0.5) / 0.75 = 2.3333
    assert average.get().item() == pytest.approx(2.33333, abs=1e-5)


def test_scalar_forms_and_a_scheduled_rate():
    window = averager.ScalarWindowAverager(2)
    for value in (1.0, 5.0, 7.0):
        window.update(torch.tensor(value))
    assert window.get().item() == 6.0
    adaptive = averager.ScalarAdaptiveAverager(speed=1)
    for value in (1.0, 2.0, 6.0):
        adaptive.update(torch.tensor(value))
    assert adaptive.get().item() == pytest.approx(3.0)  # speed 1 is the plain mean
    assert normalizers.ScalarWindowNormalizer(window_size=2)(torch.randn(4)).shape == (4, )
    scheduled = normalizers.ScalarEMNormalizer(update_rate=lambda: 1.0)
    scheduled(torch.zeros(4))
    out = scheduled(torch.tensor([4.0, 6.0]))
    torch.testing.assert_close(out, torch.tensor([-1.0, 1.0]))
    frozen = averager.ScalarEMAverager(lambda: 0.0)
    assert frozen.average(torch.tensor(5.0)).item() == 0.0


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError):
        make_normalizer('em', NESTED)({'values': torch.randn(3)})
    with pytest.raises(ValueError, match='speed'):
        averager.ScalarAdaptiveAverager(speed=0)
    with pytest.raises(ValueError, match='window_size'):
        averager.ScalarWindowAverager(0)
    with pytest.raises(NotImplementedError, match='AdaptiveNormalizer'):
        normalizers.Normalizer(VECTOR)


def test_a_window_of_one_is_the_latest_batch():
    window = averager.ScalarWindowAverager(1)
    assert [window.average(torch.tensor(x)).item() for x in (1.0, 5.0, 7.0)] == [1.0, 5.0, 7.0]


@pytest.mark.parametrize('outer', [(), (4, ), (2, 3)])
def test_outer_dimensions_are_averaged_and_those_of_the_spec_kept(outer):
    x = torch.arange(float(torch.Size((*outer, 2, 3)).numel())).view(*outer, 2, 3)
    torch.testing.assert_close(averager.average_outer_dims(x, TensorSpec((2, 3))), x.reshape(-1, 2, 3).mean(0))


@pytest.mark.parametrize('kind', ['em', 'adaptive'])
def test_a_reverted_step_is_not_counted(kind):
    """Undo the changes of a probe to statistics: the first batch after the probe has all the weight."""
    stats = {'em': normalizers.EMNormalizer, 'adaptive': normalizers.AdaptiveNormalizer}[kind](VECTOR)
    with probe.unchanged(stats):
        stats.update(torch.full((4, 2), 100.0))
    stats.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    expected = torch.tensor([2.0, 3.0])
    torch.testing.assert_close(stats.transform(expected), torch.zeros(2))


# Deferred updates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('most_kept', [0, 50, 10**6])
@pytest.mark.parametrize('kind', KINDS)
def test_deferred_batches_are_merged_into_one_at_the_end(kind, most_kept, monkeypatch):
    monkeypatch.setattr(running_stats, '_MOST_KEPT', most_kept)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(size, 2, generator=generator) * size + 100 for size in (5, 40, 1, 7)]
    waits, at_once = make_normalizer(kind), make_normalizer(kind)
    for normalizer in (waits, at_once):
        normalizer.update(torch.randn(3, 2, generator=torch.Generator().manual_seed(1)))
    before = waits.transform(batches[0])
    with running_stats.updated_at_the_end():
        for batch in batches:
            waits.update(batch)
        assert torch.equal(waits.transform(batches[0]), before)
    at_once.update(torch.cat(batches))
    for found, expected in zip(waits.state_dict().values(), at_once.state_dict().values()):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_deferred_statistics_are_dropped_if_the_steps_were_invalid():
    normalizer = make_normalizer('adaptive')
    with pytest.raises(RuntimeError, match='no step'), running_stats.updated_at_the_end():
        normalizer.update(torch.ones(3, 2))
        raise RuntimeError('no step')
    assert torch.equal(normalizer.transform(torch.ones(1, 2)), torch.ones(1, 2) / (1 + 1e-10)**0.5)
    normalizer.update(torch.ones(3, 2))
    assert float(normalizer.transform(torch.ones(1, 2)).abs().max()) == 0


class _OtherRank:
    """A stand-in for a second process that contributes the given rows."""

    def __init__(self, *rows):
        self.rows = list(rows)

    def gather(self, row):
        return torch.stack((row, self.rows.pop(0)))


def test_deferred_statistics_of_all_processes_are_one_batch():
    """Count deferred statistics of several processes as one batch, however many rows each has."""
    own, other = [torch.randn(3, 2), torch.randn(4, 2)], torch.randn(9, 2) + 5
    joined, normalizer = make_normalizer('adaptive'), make_normalizer('adaptive')
    row = torch.cat((torch.tensor([9.0]), other.mean(0), other.var(0, correction=0))).double()
    with context.training_with(_OtherRank(row)), running_stats.updated_at_the_end():
        for batch in own:
            normalizer.update(batch)
    joined.update(torch.cat((*own, other)))
    torch.testing.assert_close(normalizer.transform(other), joined.transform(other))
