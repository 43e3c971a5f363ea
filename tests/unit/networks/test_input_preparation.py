"""Default input preparation of encoders: one-hot categories, convolved images, concatenated nests."""
import gymnasium
import pytest
import torch

from alfx import gin_utils, nest
from alfx.layers import FC, Cast, Conv2D
from alfx.nest.utils import NestConcat, NestSum
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.input_preparation import prepare_inputs
from alfx.networks.network import example_batch
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

CATEGORY = BoundedTensorSpec((), torch.int64, 2, 5)
VECTOR = TensorSpec((3, ))


@pytest.fixture(autouse=True)
def no_conf():
    yield
    gin_utils.clear()


def test_an_integer_with_bounds_becomes_a_one_hot_vector():
    net = EncodingNetwork(CATEGORY)
    assert net(torch.tensor([2, 5]))[0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert net.prepared == 'an integer from 2 to 5 as one-hot'


def test_components_with_different_bounds_are_concatenated():
    spec = BoundedTensorSpec((2, ), torch.int64, [0, 10], [1, 12])
    # two components of at most three values each
    assert EncodingNetwork(spec)(torch.tensor([[1, 12]]))[0].tolist() == [[0, 1, 0, 0, 0, 1]]


def test_the_vectors_of_a_nest_are_concatenated_in_the_order_of_the_nest():
    spec = {'b': VECTOR, 'a': CATEGORY, 'c': TensorSpec(())}
    inputs = {'b': torch.tensor([[7., 8., 9.]]), 'a': torch.tensor([3]), 'c': torch.tensor([5.])}
    net = EncodingNetwork(spec)
    expected = {'a': [0, 1, 0, 0], 'b': [7, 8, 9], 'c': [5]}
    order = [path for path, _ in nest.flatten_with_path(spec)]
    assert net(inputs)[0].tolist() == [sum((expected[path] for path in order), [])]
    assert 'concatenated' in net.prepared


def test_matrices_of_a_nest_are_flattened():
    spec = {'a': TensorSpec((2, 3)), 'b': BoundedTensorSpec((3, ), torch.int64, 0, 1)}
    inputs = {'a': torch.arange(6.).reshape(1, 2, 3), 'b': torch.tensor([[0, 1, 0]])}
    assert EncodingNetwork(spec)(inputs)[0].tolist() == [[0, 1, 2, 3, 4, 5, 1, 0, 0, 1, 1, 0]]


@pytest.mark.parametrize('spec', [CATEGORY, {'a': CATEGORY, 'b': VECTOR}, [VECTOR, VECTOR],
                                  {'image': TensorSpec((2, 5, 5)), 'b': VECTOR}])
def test_a_stack_of_encoders_prepares_shared_and_separate_inputs_alike(spec):
    net = EncodingNetwork(spec, fc_layer_params=(4, ))
    stack = net.make_parallel(3)
    inputs = example_batch(spec, (2, ))
    separate = nest.map_structure(lambda x: torch.stack([x] * 3, 1), inputs)
    assert torch.allclose(stack(inputs)[0], stack(separate)[0]) and stack.prepared == net.prepared != ''


def test_recurrent_and_critic_networks_prepare_their_inputs_too():
    assert LSTMEncodingNetwork(CATEGORY, hidden_size=(5, )).output_spec.shape == (5, )
    critic = CriticNetwork(({'a': CATEGORY, 'b': VECTOR}, BoundedTensorSpec((), torch.int64, 0, 1)),
                           joint_fc_layer_params=(4, ))
    values, _ = critic(example_batch(critic.input_tensor_spec, (2, )))
    assert values.shape == (2, )


def test_combiners_and_preprocessors_of_the_conf_take_precedence():
    """A combiner from the conf is kept; preprocessors from the conf leave all inputs unchanged."""
    combiner = NestConcat()
    assert prepare_inputs([VECTOR, CATEGORY], combiner).combiner is combiner
    assert prepare_inputs([VECTOR, VECTOR], NestSum()).description == ''
    assert EncodingNetwork(CATEGORY, input_preprocessors=torch.nn.Sequential(Cast(), torch.nn.Unflatten(0, (-1, 1)))
                           ).output_spec.shape == (1, )


@pytest.mark.parametrize('size, filters, features', [
    (8, [16, 32], 32 * 4 * 4), (19, [16, 32], 32 * 10 * 10), (20, [16, 32], 32 * 5 * 5), (35, [16, 32], 32 * 9 * 9),
    (36, [32, 64, 64], 64)])
def test_images_of_a_nest_pass_through_convolutions(size, filters, features):
    net = EncodingNetwork({'image': TensorSpec((3, size, size)), 'b': VECTOR}, fc_layer_params=(7, ))
    assert net.processed_input_tensor_spec.shape == (256 + 3, ) and net.output_spec.shape == (7, )
    assert [m.weight.shape[0] for m in net.modules() if isinstance(m, Conv2D)] == filters
    assert [m.weight.shape[1] for m in net.modules() if isinstance(m, FC)] == [features, 256 + 3]
    assert f"'image': image [3, {size}, {size}] through convolutions" in net.prepared


def test_the_convolutions_of_the_conf_are_those_of_each_image():
    spec = {'a': TensorSpec((3, 8, 8)), 'b': TensorSpec((1, 6, 6)), 'c': CATEGORY}
    net = EncodingNetwork(spec, conv_layer_params=((5, 3, 1), ))
    assert sorted(tuple(m.weight.shape[:2]) for m in net.modules() if isinstance(m, Conv2D)) == [(5, 1), (5, 3)]
    with gin_utils.loaded('ppo_cart_pole', ['prepare_inputs.image_features = 9']):
        assert EncodingNetwork(spec).output_spec.shape == (9 + 9 + 4, )


def test_the_arguments_of_the_network_hold_for_the_convolutions_of_images():
    spec = {'a': TensorSpec((1, 6, 6)), 'b': VECTOR}
    net = EncodingNetwork(spec, conv_layer_params=((2, 3, 1), ), activation=torch.tanh, use_conv_ln=True,
                          kernel_initializer=torch.nn.init.ones_)
    conv, = (m for m in net.modules() if isinstance(m, Conv2D))
    assert (conv.weight == 1).all() and len([m for m in net.modules() if isinstance(m, torch.nn.GroupNorm)]) == 1
    outputs, _ = net({'a': torch.rand(3, 1, 6, 6) - 0.5, 'b': torch.zeros(3, 3)})
    assert outputs.min() < 0  # tanh, not relu


def test_each_part_of_a_nest_with_images_reaches_the_output():
    spec = {'image': TensorSpec((1, 6, 6)), 'b': VECTOR}
    net = EncodingNetwork(spec)
    inputs = nest.map_structure(lambda x: torch.rand(4, *x.shape, requires_grad=True), spec)
    net(inputs)[0].square().sum().backward()
    assert all(x.grad.flatten(1).abs().sum(1).gt(0).all() for x in inputs.values())


def test_images_of_integers_in_a_nest_need_a_transformer():
    with pytest.raises(SpecError, match='@ImageScaleTransformer'):
        EncodingNetwork({'image': BoundedTensorSpec((3, 8, 8), torch.uint8, 0, 255), 'b': VECTOR})


def test_one_hot_vectors_are_offered_for_numbers_from_0_only():
    for low, offered in (0, True), (-8, False):
        with pytest.raises(SpecError) as caught:
            EncodingNetwork(BoundedTensorSpec((3, 8, 8), torch.int64, low, 8))
        assert ('@OneHot()' in str(caught.value)) == offered


@pytest.mark.parametrize('spec', [
    {'grid': TensorSpec((2, 8, 8, 8)), 'b': VECTOR}, TensorSpec((), torch.int64),
    BoundedTensorSpec((), torch.int64, 0, 5000), BoundedTensorSpec((3, 8, 8), torch.uint8, 0, 255)])
def test_grids_and_large_or_unbounded_integers_are_left_to_the_conf(spec):
    with pytest.raises(SpecError):
        EncodingNetwork(spec)


def test_a_line_of_the_conf_turns_it_off():
    gin_utils.load('ppo_cart_pole', ['prepare_inputs.enabled = False'])
    with pytest.raises(SpecError, match='@EmbeddingPreprocessor'):
        EncodingNetwork(CATEGORY)
    with pytest.raises(SpecError, match='preprocessing_combiner'):
        EncodingNetwork([VECTOR, VECTOR])


@pytest.mark.parametrize('space', [
    gymnasium.spaces.Discrete(7, start=3), gymnasium.spaces.MultiBinary(4), gymnasium.spaces.MultiDiscrete([2, 5]),
    gymnasium.spaces.Dict({'x': gymnasium.spaces.Box(-1, 1, (2, )), 'kind': gymnasium.spaces.Discrete(3)})])
def test_spaces_of_gymnasium_need_no_line_in_the_conf(space):
    from alfx.environments.spaces import ObservationCodec
    codec = ObservationCodec(space)
    net = EncodingNetwork(codec.spec, fc_layer_params=(2, ))
    sample = nest.map_structure(lambda spec: spec.zeros((2, )), codec.spec)
    assert net(sample)[0].shape == (2, 2) and net.prepared


@pytest.mark.parametrize('arguments, found', [
    ({}, "found a nest of 2: 'ram'.*'vec'.*preprocessing_combiner = @NestConcat"),
    (dict(preprocessing_combiner=NestConcat()), "'ram' is uint8"),
    (dict(preprocessing_combiner=NestConcat(), input_preprocessors=Cast()), 'input_preprocessors: '),
])
def test_integers_beside_floats_are_named_with_a_remedy_that_works(arguments, found):
    specs = {'ram': BoundedTensorSpec((16, ), torch.uint8, 0, 255), 'vec': TensorSpec((3, ))}
    with pytest.raises(SpecError, match=f'{found}.*a dict with the same names: @Cast.*None for other'):
        EncodingNetwork(specs, fc_layer_params=(8, ), **arguments)
    network = EncodingNetwork(specs, fc_layer_params=(8, ), preprocessing_combiner=NestConcat(),
                              input_preprocessors={'ram': Cast(), 'vec': None})
    assert network({'ram': torch.ones(2, 16, dtype=torch.uint8), 'vec': torch.ones(2, 3)})[0].shape == (2, 8)
