"""Parts of the estimator of mutual information: samplers, networks, invalid settings, checkpoints."""
import pytest
import torch

from alfx import nest
from alfx.algorithms.mi_estimator import MIEstimator, _SampleBuffer
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.averager import EMAverager, ScalarAdaptiveAverager, ScalarEMAverager, ScalarWindowAverager
from alfx.utils.dist_utils import DiagMultivariateNormal

VECTOR = TensorSpec((2, ))
NESTED = {'a': TensorSpec((2, 3)), 'b': (BoundedTensorSpec((2, ), torch.int64, -1, 1), TensorSpec(()))}
SAMPLERS = ('buffer', 'double_buffer', 'shuffle', 'shift')


def make(x_spec=VECTOR, y_spec=VECTOR, seed=0, **args):
    torch.manual_seed(seed)
    estimator = MIEstimator(x_spec, y_spec, fc_layers=(8, ), optimizer=Adam(lr=1e-2), **args)
    estimator.finalize()
    return estimator


def batch_of(spec, size):
    return nest.map_structure(
        lambda s: s.sample((size, )) if isinstance(s, BoundedTensorSpec) else s.randn((size, )), spec)


def prior_of(spec):
    return nest.map_structure(
        lambda s: DiagMultivariateNormal(torch.zeros(s.shape), torch.ones(s.shape), s.ndim), spec)


def train(estimator, steps, prior=None, seed=1):
    torch.manual_seed(seed)
    for _ in range(steps):
        step = estimator.train_step((torch.randn(6, 2), torch.randn(6, 2)), prior)
        estimator.update_with_gradient(estimator.calc_loss(step.info))
    return step


# Samples of the product of the marginals -------------------------------------------------------------------------

def rows(x, y):
    return {(int(a), int(b)) for a, b in zip(x, y)}


def test_shift_takes_the_y_of_the_sample_before():
    x, y = torch.arange(4.), torch.arange(4.) + 10
    found = make(sampler='shift')._sample(x, y, None)
    assert rows(*found) == {(0, 13), (1, 10), (2, 11), (3, 12)}


def test_shuffle_permutes_all_parts_of_y_alike():
    x, y = torch.arange(50.), {'a': torch.arange(50.), 'b': torch.arange(50.) * 2}
    found_x, found_y = make(sampler='shuffle')._sample(x, y, None)
    assert torch.equal(found_x, x) and torch.equal(found_y['b'], 2 * found_y['a'])
    assert not torch.equal(found_y['a'], x) and torch.equal(found_y['a'].sort().values, x)


def test_buffer_draws_from_earlier_batches_too():
    estimator = make(TensorSpec(()), TensorSpec(()), sampler='buffer')
    estimator._sample(torch.arange(200.), torch.arange(200.), None)
    x, y = estimator._sample(torch.arange(200.), torch.arange(200.) + 200, None)
    assert torch.equal(x, torch.arange(200.))
    assert 60 < int((y < 200).sum()) < 140 and y.max() < 400


def test_double_buffer_draws_x_and_y_independently():
    estimator = make(TensorSpec(()), TensorSpec(()), sampler='double_buffer')
    x, y = estimator._sample(torch.arange(500.), torch.arange(500.), None)
    assert int((x == y).sum()) < 8 and x.unique().numel() < 400 and y.unique().numel() < 400


def test_a_given_distribution_replaces_the_sampler():
    estimator = make(sampler='shift')
    x = torch.zeros(2000, 2)
    _, y = estimator._sample(x, x, DiagMultivariateNormal(torch.tensor([5., -5.]), torch.tensor([1., 2.])))
    torch.testing.assert_close(y.mean(0), torch.tensor([5., -5.]), atol=0.25, rtol=0)
    loc = torch.arange(2000.)[:, None].expand(2000, 2)
    _, y = estimator._sample(x, x, DiagMultivariateNormal(loc, 0.1))
    assert (y - loc).abs().max() < 1


def test_the_buffer_keeps_the_newest_samples():
    buffer = _SampleBuffer({'y': TensorSpec(())}, 5)
    for start in (0, 3, 6):
        buffer.add({'y': torch.arange(start, start + 3.)})
    assert set(buffer.sample(200)['y'].tolist()) == {4, 5, 6, 7, 8}
    buffer.add({'y': torch.arange(100., 112.)})
    assert set(buffer.sample(200)['y'].tolist()) == {107, 108, 109, 110, 111}


@pytest.mark.parametrize('sampler, expected', zip(SAMPLERS, (False, False, True, True)))
def test_gradients_reach_the_y_of_q_with_shuffle_and_shift_alone(sampler, expected):
    estimator = make(sampler=sampler)
    y = torch.randn(6, 2, requires_grad=True)
    _, sampled = estimator._sample(torch.randn(6, 2), y, None)
    assert sampled.requires_grad is expected
    estimator.train_step((torch.randn(6, 2), y)).info.loss.sum().backward()
    assert float(y.grad.abs().sum()) > 0  # through the pairs of P at least


# Inputs ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('estimator_type', ['DV', 'KLD', 'JSD', 'ML'])
@pytest.mark.parametrize('size', [1, 5])
def test_nested_and_discrete_variables_of_every_estimator(estimator_type, size):
    y_spec = {'u': TensorSpec((2, )), 'v': [TensorSpec(())]} if estimator_type == 'ML' else NESTED
    prior = prior_of(y_spec) if estimator_type == 'ML' else None
    estimator = make(NESTED, y_spec, estimator_type=estimator_type)
    x, y = batch_of(NESTED, size), batch_of(y_spec, size)
    before = nest.map_structure(torch.clone, (x, y))
    step = estimator.train_step((x, y), prior)
    estimator.update_with_gradient(estimator.calc_loss(step.info))
    assert step.output.shape == step.info.loss.shape == estimator.calc_pmi(x, y, prior).shape == (size, )
    assert all(torch.equal(a, b) for a, b in zip(nest.flatten(before), nest.flatten((x, y))))


def test_pointwise_information_distinguishes_categories():
    spec = BoundedTensorSpec((), torch.int64, 3, 5)
    torch.manual_seed(0)
    estimator = MIEstimator(spec, spec, fc_layers=16, estimator_type='KLD', optimizer=Adam(lr=1e-2))
    estimator.finalize()
    for _ in range(200):
        x = spec.sample((256, ))
        estimator.update_with_gradient(estimator.train_step((x, x)).info)
    x = torch.tensor([3, 4, 5, 3])
    pmi = estimator.calc_pmi(x, torch.tensor([3, 4, 5, 4])).tolist()
    assert pmi[:3] == pytest.approx([1.0986] * 3, abs=0.25) and pmi[3] < -2  # log 3, and log 0


def test_a_given_model_is_used():
    model = EncodingNetwork([VECTOR, VECTOR], input_preprocessors=None, fc_layer_params=(4, ), last_layer_size=1,
                            last_activation=torch.tanh, preprocessing_combiner=lambda xy: xy[0] - xy[1])
    estimator = make(model=model, estimator_type='KLD', sampler='shift')
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    torch.testing.assert_close(estimator.calc_pmi(x, y), model([x, y])[0].squeeze(1))
    wide = EncodingNetwork([VECTOR, VECTOR], fc_layer_params=(4, ), preprocessing_combiner=lambda xy: xy[0])
    with pytest.raises(ValueError, match=r'MIEstimator.model: expected an output \[B, 1\], found \[3, 4\]'):
        make(model=wide).calc_pmi(x, y)


@pytest.mark.parametrize('args, message', [
    (dict(estimator_type='MINE'), "estimator_type must be 'DV' or 'KLD' or 'JSD' or 'ML', found str 'MINE'"),
    (dict(sampler='queue'), 'sampler must be .*double_buffer'),
    (dict(buffer_size=0), 'MIEstimator.buffer_size must be an int >= 1, found int 0'),
    (dict(buffer_size=2.5), 'MIEstimator.buffer_size must be an int >= 1, found float 2.5'),
    (dict(averager=ScalarEMAverager(0.1), estimator_type='ML'), "averager is not used by the estimator 'ML'"),
    (dict(averager=EMAverager(VECTOR, 0.1)), r'averager: expected the average of a scalar.* of \(2,\)'),
    (dict(averager=EMAverager({'a': TensorSpec(())}, 0.1)), r"expected the average of a scalar.* of {'a': \(\)}"),
    (dict(averager=0.1), 'MIEstimator.averager must be a AdaptiveAverager or'),
    (dict(y_spec=BoundedTensorSpec((), torch.int64, 0, 3), estimator_type='ML'), "y: expected a continuous y"),
    (dict(x_spec={'a': TensorSpec((), torch.int64)}), r'\[x, y\] at 0.a: expected floats, or integers with bounds')])
def test_wrong_arguments_are_rejected_by_name(args, message):
    with pytest.raises((ValueError, SpecError), match=message):
        make(**args)


@pytest.mark.parametrize('kind', ['DV', 'KLD', 'JSD'])
@pytest.mark.parametrize('averager', [ScalarEMAverager, ScalarWindowAverager, ScalarAdaptiveAverager])
def test_any_averager_of_a_scalar_does(averager, kind):
    averager = averager(0.5) if averager is ScalarEMAverager else averager(3)
    estimator = make(averager=averager, estimator_type=kind)
    train(estimator, 2)
    assert averager.get() > 0 and estimator._averager is averager


def test_invalid_batches_are_rejected_by_name():
    one = torch.zeros(1, 2)
    for sampler in ('shuffle', 'shift'):
        with pytest.raises(ValueError, match=f"sampler '{sampler}' finds no other y in a batch of 1"):
            make(sampler=sampler).train_step((one, one))
    for call in ('train_step', 'calc_pmi'):
        estimator = make(estimator_type='ML')
        with pytest.raises(ValueError, match="'ML' needs the y_distribution"):
            estimator.train_step((one, one)) if call == 'train_step' else estimator.calc_pmi(one, one)


# State -------------------------------------------------------------------------------------------------------------

def same(a, b):
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) for key, value in left.items() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize('estimator_type, sampler', [('DV', 'buffer'), ('KLD', 'double_buffer'), ('JSD', 'shift'),
                                                     ('ML', 'buffer')])
def test_seeds_reproduce_parameters_and_checkpoints_the_next_step(estimator_type, sampler):
    prior = prior_of(VECTOR) if estimator_type == 'ML' else None
    args = dict(estimator_type=estimator_type, sampler=sampler, buffer_size=20)
    a, b = make(**args), make(**args)
    train(a, 5, prior)
    train(b, 5, prior)
    assert same(a, b)
    c = make(seed=7, **args)
    assert not same(a, c)
    c.load_state_dict(a.state_dict())
    steps = [train(estimator, 2, prior, seed=9) for estimator in (a, c)]
    assert torch.equal(steps[0].output, steps[1].output) and same(a, c)


def test_buffers_exist_only_where_they_are_needed():
    assert [len(list(make(sampler=s, buffer_size=3).buffers())) for s in SAMPLERS[2:]] == [3, 3]  # the averager's own
    assert not list(make(estimator_type='ML').buffers())
