"""Networks with memory, noise and residual connections."""
import pytest
import torch
from torch.nn import functional as F

from alfx import context, layers, nest
from alfx.networks.networks import Delay, GRUCell, LSTMCell, NoisyFC, Residue, TemporalPool
from alfx.tensor_specs import TensorSpec


def run(network, inputs):
    """Return the outputs for a sequence ``[T, B, ...]``, from a state of zeros."""
    state = nest.map_structure(lambda s: s.zeros((inputs.shape[1], )), network.state_spec)
    outputs = []
    for x in inputs:
        output, state = network(x, state)
        outputs.append(output)
    return torch.stack(outputs)


def test_cells_match_torch():
    x = torch.randn(4, 2, 3)
    gru = GRUCell(3, 5)
    h = torch.zeros(2, 5)
    for step in x:
        h = gru._cell(step, h)
    torch.testing.assert_close(run(gru, x)[-1], h)
    lstm = LSTMCell(3, 5)
    h = c = torch.zeros(2, 5)
    for step in x:
        h, c = lstm._cell(step, (h, c))
    torch.testing.assert_close(run(lstm, x)[-1], h)


def test_a_residue_adds_its_input():
    block = layers.FC(3, 3)
    x = torch.randn(2, 3)
    before = x.clone()
    torch.testing.assert_close(Residue(block)(x)[0], torch.relu(x + block(x)))
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match='input_tensor_spec is required'):
        Residue(torch.tanh)


@pytest.mark.parametrize('mode, expected', [
    ('skip', [(0, 1), (0, 1), (1, 3), (1, 3), (3, 5)]),
    ('avg', [(0, 0), (0, 1.5), (0, 1.5), (1.5, 3.5), (1.5, 3.5)]),
    ('max', [(0, 0), (0, 2), (0, 2), (2, 4), (2, 4)]),
])
def test_temporal_pool_stacks_groups_of_steps(mode, expected):
    inputs = torch.arange(1.0, 6.0)[:, None]
    outputs = run(TemporalPool((), 2, 2, mode=mode), inputs)
    assert [tuple(o[0].tolist()) for o in outputs] == expected


def test_temporal_pool_of_negative_and_integer_features():
    inputs = -torch.arange(1, 5)[:, None, None].expand(4, 1, 2)
    outputs = run(TemporalPool(2, 1, 2, dtype=torch.int64, mode='max'), inputs)
    assert outputs[-1].tolist() == [[[-3, -3]]]
    with pytest.raises(ValueError, match="unknown mode 'min'"):
        TemporalPool(2, 1, mode='min')
    with pytest.raises(ValueError, match='at least 1'):
        TemporalPool(2, 0)
    with pytest.raises(ValueError, match="with mode='avg' a floating point dtype"):
        TemporalPool(2, 1, dtype=torch.int64, mode='avg')


def test_samples_of_a_batch_may_be_at_different_steps_of_their_group():
    pool = TemporalPool((), 1, 2)
    state = (torch.zeros(2, 1), torch.tensor([0, 1]))
    output, _ = pool(torch.tensor([5.0, 6.0]), state)
    assert output.tolist() == [[5], [0]]


@pytest.mark.parametrize('delay', [0, 1, 3])
def test_delay_returns_the_input_of_some_steps_ago(delay):
    outputs = run(Delay(TensorSpec(()), delay), torch.arange(1.0, 6.0)[:, None])
    assert outputs[:, 0].tolist() == ([0] * delay + [1, 2, 3, 4, 5])[:5]
    with pytest.raises(ValueError, match='at least 0'):
        Delay(TensorSpec(()), -1)


def test_noise_enters_as_factorised_noise_on_the_weights():
    layer = NoisyFC(3, 2, std_init=0.5, new_noise_prob=0.0, activation=torch.tanh, bias_init_value=0.3)
    x = torch.randn(4, 3)
    y, (noise_in, noise_out) = layer(x, (torch.zeros(4, 3), torch.zeros(4, 2)))
    for b in range(4):
        weight = layer.weight + layer._weight_std * torch.outer(noise_out[b], noise_in[b])
        bias = layer.bias + layer._bias_std * noise_out[b]
        torch.testing.assert_close(y[b], torch.tanh(F.linear(x[b], weight, bias)))
    torch.testing.assert_close(layer._weight_std, torch.full((2, 3), 0.5 / 3**0.5))
    assert (layer.input_size, layer.output_size) == (3, 2)


def test_noise_is_kept_until_the_state_is_reset_or_by_chance():
    layer = NoisyFC(3, 2, new_noise_prob=0.0)
    x = torch.randn(4, 3)
    _, noise = layer(x, (torch.zeros(4, 3), torch.zeros(4, 2)))
    _, same_noise = layer(x, noise)
    assert all(torch.equal(a, b) for a, b in zip(same_noise, noise))
    reset = tuple(torch.cat([torch.zeros_like(n[:1]), n[1:]]) for n in noise)
    _, partly = layer(x, reset)
    assert all(torch.equal(a[1:], b[1:]) and not torch.equal(a[0], b[0]) for a, b in zip(partly, noise))
    _, renewed = NoisyFC(3, 2, new_noise_prob=1.0)(x, noise)
    assert not torch.equal(renewed[1], noise[1])


def test_the_noise_is_the_signed_root_of_a_normal():
    layer = NoisyFC(1000, 2, new_noise_prob=1.0)
    _, (noise, _) = layer(torch.zeros(500, 1000), (torch.zeros(500, 1000), torch.zeros(500, 2)))
    # the square of sign(z) sqrt|z| is |z|, whose mean is sqrt(2 / pi)
    assert float(noise.square().mean()) == pytest.approx((2 / torch.pi)**0.5, rel=0.01)
    assert abs(float(noise.mean())) < 0.01


def test_evaluation_has_no_noise():
    layer = NoisyFC(3, 2)
    x, state = torch.randn(4, 3), (torch.zeros(4, 3), torch.zeros(4, 2))
    expected = F.linear(x, layer.weight, layer.bias)
    with context.eval_context():
        torch.testing.assert_close(layer(x, state)[0], expected)
    torch.testing.assert_close(layer.eval()(x, state)[0], expected)


def test_arguments_of_the_noisy_layer_are_used_or_rejected():
    layer = NoisyFC(300, 200, activation=torch.relu_, kernel_init_gain=2.0, weight_opt_args={'lr': 1.0},
                    bias_opt_args={'lr': 2.0}, use_bn=True)
    bound = 300**-0.5  # a uniform distribution within b has the standard deviation b / sqrt(3)
    assert float(layer.weight.detach().std()) == pytest.approx(2 * bound / 3**0.5, rel=0.02)
    assert 1.99 * bound < float(layer.weight.detach().abs().max()) <= 2 * bound
    assert 0.9 * bound < float(layer.bias.detach().abs().max()) <= bound
    assert not NoisyFC(2, 3, bias_init_value=0.0).bias.any()
    assert layer._weight_std.opt_args == {'lr': 1.0} and layer._bias_std.opt_args == {'lr': 2.0}
    layer._weight_std.data.zero_()
    before = layer.weight.clone()
    layer.reset_parameters()
    assert bool(layer._weight_std.all()) and not torch.equal(before, layer.weight)
    with pytest.raises(ValueError, match='new_noise_prob'):
        NoisyFC(2, 3, new_noise_prob=1.5)
    with pytest.raises(ValueError, match='use_bn=True and use_ln=True'):
        NoisyFC(2, 3, use_bn=True, use_ln=True)
