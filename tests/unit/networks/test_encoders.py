"""Encoders, preprocessors and the networks made of them."""
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from alfx import gin_utils, layers, nest
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import (ActorDistributionNetwork, ActorDistributionNetworkBase,
                                                       ActorDistributionRNNNetwork,
                                                       UnitNormalActorDistributionNetwork)
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.encoding_networks import (EncodingNetwork, ImageDecodingNetwork, ImageEncodingNetwork,
                                             LSTMEncodingNetwork)
from alfx.networks.networks import GRUCell, LSTMCell
from alfx.networks.preprocessor_networks import PreprocessorNetwork
from alfx.networks.preprocessors import CosineEmbeddingPreprocessor, EmbeddingPreprocessor
from alfx.networks.projection_networks import CategoricalProjectionNetwork, NormalProjectionNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.norm_layers import BatchNorm
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

VECTOR = TensorSpec((3, ))
IMAGE = BoundedTensorSpec((3, 12, 10), torch.float32, -1.0, 1.0)
UINT8 = BoundedTensorSpec((3, 12, 10), torch.uint8, 0, 255)
DISCRETE = BoundedTensorSpec((), torch.int64, 0, 3)
BOX = BoundedTensorSpec((2, ), torch.float32, [-1.0, 0.0], [1.0, 6.0])


def test_the_encoder_is_its_layers_one_after_the_other():
    net = EncodingNetwork(IMAGE, conv_layer_params=((4, 3, 2, 1, 2), ), fc_layer_params=(6, ), last_layer_size=5,
                          last_activation=torch.tanh)
    conv, pool, _, fc, last = net._layers
    x = torch.randn(2, 3, 12, 10)
    h = F.max_pool2d(F.relu(F.conv2d(x, conv.weight, conv.bias, stride=2, padding=1)), 2).flatten(1)
    h = F.relu(F.linear(h, fc.weight, fc.bias))
    torch.testing.assert_close(net(x)[0], torch.tanh(F.linear(h, last.weight, last.bias)))
    # (12 + 2 - 3) // 2 + 1 = 6 -> 3; (10 + 2 - 3) // 2 + 1 = 5 -> 2
    assert fc.input_size == 4 * 3 * 2
    assert net.output_spec == TensorSpec((5, ))


def test_images_of_bytes_are_not_converted_silently():
    for ctor in (lambda: EncodingNetwork(UINT8, conv_layer_params=((4, 3, 2), )),
                 lambda: ActorDistributionNetwork(UINT8, DISCRETE, conv_layer_params=((4, 3, 2), )),
                 lambda: ValueNetwork(UINT8, fc_layer_params=(4, )),
                 lambda: EmbeddingPreprocessor(UINT8, 4, conv_layer_params=((4, 3, 2), )),
                 lambda: EncodingNetwork({'a': UINT8, 'b': UINT8}, preprocessing_combiner=NestConcat())):
        with pytest.raises(SpecError, match='uint8 .*ImageScaleTransformer'):
            ctor()


@pytest.fixture
def inputs_unprepared():
    with gin_utils.loaded('ppo_cart_pole', ['prepare_inputs.enabled = False']):
        yield


def test_a_nested_observation_needs_a_combiner_even_for_vectors(inputs_unprepared):
    for ctor in (EncodingNetwork, ValueNetwork, LSTMEncodingNetwork):
        with pytest.raises(SpecError, match=r"nest of 2: 'a': .*, 'b': .*preprocessing_combiner = @NestConcat\(\)"):
            ctor({'a': VECTOR, 'b': VECTOR})
    net = EncodingNetwork({'a': VECTOR, 'b': VECTOR}, preprocessing_combiner=NestConcat(), fc_layer_params=(4, ))
    assert net.processed_input_tensor_spec == TensorSpec((6, ))


@pytest.mark.parametrize('spec, advice, no_advice', [
    (BoundedTensorSpec((3, ), torch.int32, 0, 10000), '@ImageScaleTransformer .*= @EmbeddingPreprocessor', 'OneHot'),
    (BoundedTensorSpec((3, 8, 8), torch.int64, 0, 9), '@ImageScaleTransformer .*= @OneHot', 'Normalizer'),
    (BoundedTensorSpec((), torch.int64, 0, 99999), '@ObservationNormalizer .*= @EmbeddingPreprocessor', 'ImageScale'),
    (TensorSpec((3, ), torch.int64), '@ObservationNormalizer .*fields', 'EmbeddingPreprocessor')])
def test_the_advice_for_integers_suits_their_range(spec, advice, no_advice):
    with pytest.raises(SpecError, match=f'(?s){advice}') as error:
        EncodingNetwork(spec, fc_layer_params=(4, ))
    assert no_advice not in str(error.value)


def test_integers_are_not_encoded_as_quantities(inputs_unprepared):
    with pytest.raises(SpecError, match='int64.*EmbeddingPreprocessor'):
        EncodingNetwork(DISCRETE, fc_layer_params=(4, ))
    with pytest.raises(SpecError, match="'goal' is int64 .*EmbeddingPreprocessor"):
        EncodingNetwork({'goal': DISCRETE, 'x': VECTOR}, preprocessing_combiner=NestConcat(dim=-1))
    net = EncodingNetwork(DISCRETE, input_preprocessors=layers.OneHot(4), fc_layer_params=(5, ))
    assert net(torch.tensor([0, 3]))[0].shape == (2, 5)
    masked = NestConcat({'goal': False, 'x': True})
    assert EncodingNetwork({'goal': DISCRETE, 'x': VECTOR}, preprocessing_combiner=masked).output_spec == VECTOR
    with pytest.raises(SpecError, match='float64.*Cast'):
        EncodingNetwork(TensorSpec((3, ), torch.float64))


def test_uncombinable_inputs_are_named():
    with pytest.raises(SpecError, match="cannot combine 'camera': .*'x': .*add input_preprocessors"):
        EncodingNetwork({'camera': IMAGE, 'x': VECTOR}, preprocessing_combiner=NestConcat())


def test_contradicting_arguments_are_rejected():
    with pytest.raises(SpecError, match='conv_layer_params need images'):
        EncodingNetwork(VECTOR, conv_layer_params=((4, 3, 2), ))
    with pytest.raises(ValueError, match='must be given together'):
        EncodingNetwork(VECTOR, last_layer_size=4)
    with pytest.raises(ValueError, match='use_batch_ensemble=True is not supported'):
        EncodingNetwork(VECTOR, use_batch_ensemble=True)
    with pytest.raises(ValueError, match='ensemble_size=5 has no meaning'):
        EncodingNetwork(VECTOR, ensemble_size=5)
    with pytest.raises(ValueError, match='cannot be used together'):
        EncodingNetwork(VECTOR, input_preprocessors=torch.tanh, input_preprocessors_ctor=lambda spec: torch.tanh)
    with pytest.raises(ValueError, match='4 outputs cannot be reshaped .*should be 6'):
        EncodingNetwork(VECTOR, TensorSpec((2, 3)), fc_layer_params=(4, ))
    with pytest.raises(ValueError, match=r'an image \(3, 12, 10\) becomes empty after conv_layer_params\[1\]'):
        EncodingNetwork(IMAGE, conv_layer_params=((4, 3, 2), (4, 8, 1)))
    with pytest.raises(ValueError, match=r'conv_layer_params\[0\]: expected \(filters'):
        EncodingNetwork(IMAGE, conv_layer_params=((4, 3), ))


def test_preprocessors_follow_a_prefix_of_the_observation():
    spec = {'a': VECTOR, 'b': (VECTOR, VECTOR)}
    net = PreprocessorNetwork(spec, {'a': torch.neg, 'b': NestConcat()}, NestConcat())
    x = {'a': torch.ones(2, 3), 'b': (torch.zeros(2, 3), torch.ones(2, 3))}
    assert net(x)[0][0].tolist() == [-1] * 3 + [0] * 3 + [1] * 3
    with pytest.raises(SpecError, match='input_preprocessors: expected the structure of the input .*found'):
        PreprocessorNetwork(spec, {'a': None}, NestConcat())
    with pytest.raises(ValueError, match='cannot be recurrent'):
        PreprocessorNetwork(VECTOR, GRUCell(3, 4))
    with pytest.raises(ValueError, match='found 3'):
        PreprocessorNetwork(VECTOR, 3)


def test_preprocessors_are_made_by_a_constructor_from_the_spec():
    net = EncodingNetwork({'goal': DISCRETE, 'x': VECTOR}, preprocessing_combiner=NestConcat(),
                          input_preprocessors_ctor=lambda spec: {'goal': EmbeddingPreprocessor(spec['goal'], 2),
                                                                 'x': None})
    assert net.output_spec == TensorSpec((5, ))


def test_networks_built_from_the_same_preprocessors_do_not_share_them():
    template = EmbeddingPreprocessor(DISCRETE, 2)
    first, second = (EncodingNetwork(DISCRETE, input_preprocessors=template) for _ in range(2))
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    assert not torch.equal(next(first.parameters()), next(second.parameters()))


def test_the_last_initializer_defaults_to_that_of_the_other_layers():
    net = EncodingNetwork(VECTOR, fc_layer_params=(4, ), kernel_initializer=nn.init.ones_, last_layer_size=2,
                          last_activation=torch.tanh)
    assert all(bool((layer.weight == 1).all()) for layer in net._layers)
    net = net.copy(last_kernel_initializer=nn.init.zeros_)
    assert bool((net._layers[0].weight == 1).all()) and not net._layers[1].weight.any()


def test_same_padding_keeps_the_size_of_images():
    net = ImageEncodingNetwork(3, (12, 10), ((4, 3, 1), (5, (5, 3), 1, 7)), same_padding=True)
    assert net.output_spec == TensorSpec((5, 12, 10))
    assert net(torch.randn(2, 3, 12, 10))[0].shape == (2, 5, 12, 10)
    with pytest.raises(ValueError, match='at least one layer'):
        ImageEncodingNetwork(3, 12, ())
    with pytest.raises(ValueError, match='use_batch_ensemble=True is not supported'):
        ImageEncodingNetwork(3, 12, ((4, 3, 1), ), use_batch_ensemble=True)


@pytest.mark.parametrize('layers, size', [
    # (n - 1) * stride - 2 * ((kernel - 1) // 2) + kernel for n = 20 and 31
    (((64, 3, 1), ), (20, 31)), (((64, 3, 2), ), (39, 61)), (((64, 4, 2), ), (40, 62)), (((64, 2, 1), ), (21, 32)),
    (((64, 3, 2, 7, 1), ), (40, 62)),
    (((16, (2, 2), 1, (1, 0)), (64, 3, (1, 2), 0)), (21, 63)),
])
def test_same_padding_of_a_decoder_is_half_the_kernel(layers, size):
    net = ImageDecodingNetwork(100, layers, start_decoding_size=(20, 31), start_decoding_channels=8, same_padding=True)
    assert net.output_spec == TensorSpec((64, *size))


def test_the_decoder_ends_in_its_output_activation():
    net = ImageDecodingNetwork(4, ((8, 3, 2, 1), (3, 4, 2)), 3, 6, preprocess_fc_layer_params=(7, ),
                               output_activation=torch.sigmoid)
    image, _ = net(torch.randn(2, 4))
    # (3 - 1) * 2 - 2 + 3 = 5; (5 - 1) * 2 + 4 = 12
    assert image.shape == (2, 3, 12, 12) and bool((image > 0).all()) and bool((image < 1).all())
    with pytest.raises(ValueError, match='at least one layer'):
        ImageDecodingNetwork(4, (), 3, 6)
    with pytest.raises(ValueError, match=r'transconv_layer_params\[0\]'):
        ImageDecodingNetwork(4, ((8, 4), ), 3, 6)


def test_lstm_layers_match_torch():
    net = LSTMEncodingNetwork(VECTOR, hidden_size=(4, 5), lstm_output_layers=(0, 1))
    reference = [cell._cell for cell in net._cells]
    state = nest.map_structure(lambda s: s.zeros((2, )), net.state_spec)
    expected = [(torch.zeros(2, 4), torch.zeros(2, 4)), (torch.zeros(2, 5), torch.zeros(2, 5))]
    for _ in range(3):
        x = torch.randn(2, 3)
        output, state = net(x, state)
        expected[0] = reference[0](x, expected[0])
        expected[1] = reference[1](expected[0][0], expected[1])
    torch.testing.assert_close(output, torch.cat([expected[0][0], expected[1][0]], dim=1))
    torch.testing.assert_close(state, tuple(expected))
    with pytest.raises(ValueError, match='lstm_output_layers among them'):
        LSTMEncodingNetwork(VECTOR, hidden_size=(4, ), lstm_output_layers=1)
    with pytest.raises(ValueError, match='without last_layer_size'):
        LSTMEncodingNetwork(VECTOR, hidden_size=(4, ), last_activation=torch.tanh)


def test_stacked_lstm_cells_are_initialized_like_torch():
    cell = LSTMCell(3, 16).make_parallel(4)
    assert float(cell.weight_hh.detach().abs().max()) == pytest.approx(0.25, rel=0.02)
    before = cell.weight_hh.clone()
    cell.reset_parameters()
    assert not torch.equal(before, cell.weight_hh)


def test_inputs_shared_by_a_stack_are_encoded_once_in_a_single_product():
    net = EncodingNetwork({'a': VECTOR, 'b': VECTOR}, preprocessing_combiner=NestConcat(), fc_layer_params=(4, ))
    stack = net.make_parallel(3)
    x = {'a': torch.randn(5, 3), 'b': torch.randn(5, 3)}
    shared, _ = stack(x)
    separate, _ = stack(layers.make_parallel_input(x, 3))
    torch.testing.assert_close(shared, separate)


def test_integers_get_a_vector_for_each_value_of_each_component():
    net = EmbeddingPreprocessor(BoundedTensorSpec((2, ), torch.int64, [-1, 5], [0, 7]), 4)
    table = net._embedding.weight
    assert table.shape == (2 + 3, 4)
    x = torch.tensor([[-1, 5], [0, 7]])
    torch.testing.assert_close(net(x)[0], torch.stack([table[0] + table[2], table[1] + table[4]]))
    scalar = EmbeddingPreprocessor(BoundedTensorSpec((), torch.uint8, 3, 9), 4, last_activation=torch.relu_)
    assert scalar._embedding.weight.shape == (7, 4)
    torch.testing.assert_close(scalar(torch.tensor([9], dtype=torch.uint8))[0], scalar._embedding.weight[6:].relu())
    with pytest.raises(SpecError, match='need bounds'):
        EmbeddingPreprocessor(TensorSpec((), torch.int64), 4)
    with pytest.raises(SpecError, match='too many values'):
        EmbeddingPreprocessor(BoundedTensorSpec((), torch.int64, 0, 1 << 40), 4)
    with pytest.raises(ValueError, match='conv_layer_params need images'):
        EmbeddingPreprocessor(DISCRETE, 4, conv_layer_params=((3, 3, 1), ))
    with pytest.raises(SpecError, match='one tensor'):
        EmbeddingPreprocessor((DISCRETE, DISCRETE), 4)


def test_cosine_embedding():
    y, _ = CosineEmbeddingPreprocessor(TensorSpec((2, )), 3)(torch.tensor([[0.5, 1.0]]))
    # cos(0), cos(pi x), cos(2 pi x)
    torch.testing.assert_close(y, torch.tensor([[[1.0, 0.0, -1.0], [1.0, -1.0, 1.0]]]), atol=1e-6, rtol=0)


def test_actor_and_value_networks_start_near_zero():
    x = torch.randn(64, 3)
    value, _ = ValueNetwork(VECTOR, fc_layer_params=(32, ))(x)
    assert value.shape == (64, ) and float(value.detach().abs().max()) < 1.0
    action, _ = ActorNetwork(VECTOR, BOX, fc_layer_params=(32, ))(x)
    torch.testing.assert_close(action, torch.tensor([[0.0, 3.0]]).expand(64, 2), atol=0.3, rtol=0)


def test_actions_of_actor_networks_are_within_their_bounds():
    actor = ActorNetwork(VECTOR, {'a': BOX, 'b': BoundedTensorSpec((), minimum=2, maximum=4)}, fc_layer_params=(32, ))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(1000)
    action, _ = actor(torch.randn(100, 3))
    assert torch.equal(action['a'].amin(0), torch.tensor([-1.0, 0.0]))
    assert torch.equal(action['a'].amax(0), torch.tensor([1.0, 6.0]))
    assert float(action['b'].detach().min()) == 2 and float(action['b'].detach().max()) == 4
    identity = ActorNetwork(VECTOR, BOX, squashing_func=torch.sin_)
    assert bool((identity(torch.randn(100, 3))[0] <= BOX.maximum.max()).all())
    with pytest.raises(SpecError, match='continuous actions'):
        ActorNetwork(VECTOR, DISCRETE)
    with pytest.raises(SpecError, match='bounds'):
        ActorNetwork(VECTOR, BoundedTensorSpec((2, ), minimum=-math.inf, maximum=math.inf))


def test_the_kind_of_head_follows_the_action():
    assert isinstance(ActorDistributionNetwork(VECTOR, DISCRETE)._projection_net, CategoricalProjectionNetwork)
    assert isinstance(ActorDistributionNetwork(VECTOR, BOX)._projection_net, NormalProjectionNetwork)
    with pytest.raises(SpecError, match='discrete actions: expected a spec of integers'):
        ActorDistributionNetwork(VECTOR, BoundedTensorSpec((2, ), torch.float32, -0.5, 1.0),
                                 continuous_projection_net_ctor=CategoricalProjectionNetwork)
    network = ActorDistributionNetwork(VECTOR, BOX)
    assert network.action_spec is BOX and network.is_distribution_output and not network.is_rnn


def test_an_actor_accepts_any_encoder_with_vector_output():
    network = ActorDistributionNetworkBase(VECTOR, BOX, LSTMEncodingNetwork, CategoricalProjectionNetwork,
                                           NormalProjectionNetwork, hidden_size=(4, ))
    assert network.state_spec == ((TensorSpec((4, )), TensorSpec((4, ))), )
    with pytest.raises(SpecError, match='must be a vector'):
        ActorDistributionNetworkBase(VECTOR, BOX, EncodingNetwork, CategoricalProjectionNetwork,
                                     NormalProjectionNetwork, fc_layer_params=(4, ),
                                     output_tensor_spec=TensorSpec((2, 2)))


def test_the_recurrent_actor_remembers():
    network = ActorDistributionRNNNetwork(VECTOR, DISCRETE, lstm_hidden_size=4)
    zeros = nest.map_structure(lambda s: s.zeros((1, )), network.state_spec)
    x = torch.ones(1, 3)
    first, state = network(x, zeros)
    second, _ = network(x, state)
    assert not torch.equal(first.logits, second.logits)


def test_unit_normals_do_not_depend_on_the_observation():
    network = UnitNormalActorDistributionNetwork({'x': UINT8}, BOX)
    dist, _ = network({'x': torch.zeros(4, 3, 12, 10, dtype=torch.uint8)})
    assert dist.mean.tolist() == [[0, 0]] * 4 and dist.stddev.tolist() == [[1, 1]] * 4
    assert network.make_parallel(3)({'x': torch.zeros(4, 3, 12, 10, dtype=torch.uint8)})[0].batch_shape == (4, 3)
    with pytest.raises(SpecError, match='continuous'):
        UnitNormalActorDistributionNetwork(VECTOR, DISCRETE)


def test_values_have_the_shape_of_the_reward():
    assert ValueNetwork(VECTOR, TensorSpec((2, )))(torch.zeros(5, 3))[0].shape == (5, 2)
    assert ValueNetwork(VECTOR).make_parallel(3)(torch.zeros(5, 3))[0].shape == (5, 3)
    assert ValueNetwork(VECTOR).output_spec == TensorSpec(())


def test_norms_are_of_the_input_and_of_all_layers_but_the_last():
    network = EncodingNetwork(VECTOR, fc_layer_params=(4, 5), last_layer_size=2, last_activation=torch.tanh,
                              norm=BatchNorm, norm_position='after', input_norm=BatchNorm)
    x = torch.randn(8, 3)
    y = BatchNorm(3)(x)
    first, second, last = [m for m in network.modules() if isinstance(m, layers.FC)]
    for layer, size in ((first, 4), (second, 5)):
        y = BatchNorm(size)(torch.relu(F.linear(y, layer.weight, layer.bias)))
    torch.testing.assert_close(network(x)[0], torch.tanh(F.linear(y, last.weight, last.bias)))
    copied = network.copy()
    assert sum(isinstance(m, BatchNorm) for m in copied.modules()) == 3


def test_a_norm_of_the_input_is_rejected_with_convolutions():
    with pytest.raises(ValueError, match='input_norm normalizes vectors; remove it or conv_layer_params'):
        EncodingNetwork(IMAGE, conv_layer_params=((4, 3, 1), ), input_norm=BatchNorm)


class WeightedSum(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.normal_(self.weight)

    def forward(self, inputs):
        return inputs['a'] * self.weight[0] + inputs['b'] * self.weight[1]


def test_each_network_of_a_stack_has_and_trains_its_own_combiner():
    net = EncodingNetwork({'a': VECTOR, 'b': VECTOR}, preprocessing_combiner=WeightedSum(), fc_layer_params=(4, ))
    stack = net.make_parallel(3)
    shared = {'a': torch.randn(5, *VECTOR.shape), 'b': torch.randn(5, *VECTOR.shape)}
    output = stack(shared)[0]
    torch.testing.assert_close(output, stack({key: x.unsqueeze(1).expand(-1, 3, -1) for key, x in shared.items()})[0])
    torch.testing.assert_close(stack.first_of_stack(shared, (), 2)[0], output[:, :2])
    weights = [module.weight for module in stack.modules() if isinstance(module, WeightedSum)]
    assert len(weights) == 3 and all(x is not None for x in torch.autograd.grad(output.square().sum(), weights))
