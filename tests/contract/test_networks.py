"""What holds for every network, whatever it computes."""
import copy
import pickle

import pytest
import torch
from torch import nn

from alfx import layers, nest
from alfx.nest.utils import NestConcat, NestSum
from alfx.networks import containers
from alfx.networks.actor_distribution_networks import (ActorDistributionNetwork, ActorDistributionRNNNetwork,
                                                       UnitNormalActorDistributionNetwork)
from alfx.networks.actor_networks import ActorNetwork, ActorRNNNetwork
from alfx.networks.encoding_networks import (EncodingNetwork, ImageDecodingNetwork, ImageEncodingNetwork,
                                             LSTMEncodingNetwork, ParallelEncodingNetwork)
from alfx.networks.network import NaiveParallelNetwork, Network, NetworkWrapper
from alfx.networks.networks import Delay, GRUCell, LSTMCell, NoisyFC, Residue, TemporalPool
from alfx.networks.preprocessor_networks import PreprocessorNetwork
from alfx.networks.preprocessors import CosineEmbeddingPreprocessor, EmbeddingPreprocessor
from alfx.networks.projection_networks import (BetaProjectionNetwork, CategoricalProjectionNetwork,
                                               CauchyProjectionNetwork, MixtureProjectionNetwork,
                                               NestedProjectionNetwork, NormalProjectionNetwork,
                                               OnehotCategoricalProjectionNetwork, StableNormalProjectionNetwork,
                                               TruncatedProjectionNetwork)
from alfx.networks.value_networks import ValueNetwork, ValueRNNNetwork
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec, extract_spec

VECTOR = TensorSpec((3, ))
IMAGE = TensorSpec((2, 9, 8))
NESTED = {'camera': IMAGE, 'state': VECTOR, 'goal': BoundedTensorSpec((), torch.int64, 2, 5)}
DISCRETE = BoundedTensorSpec((), torch.int64, 0, 3)
MULTI_DISCRETE = BoundedTensorSpec((3, ), torch.int64, [0, -1, 2], [1, 3, 2])
BOX = BoundedTensorSpec((2, ), torch.float32, [-1.0, 0.0], [1.0, 6.0])
MIXED = {'steer': BOX, 'gears': (DISCRETE, MULTI_DISCRETE)}
STACK = 3


def random_batch(spec, *outer):
    """A nest of random tensors ``[*outer, ...]`` within the bounds of ``spec``."""
    return nest.map_structure(lambda s: s.sample(outer) if isinstance(s, BoundedTensorSpec) else s.randn(outer), spec)


def leaves(output):
    return nest.flatten(output)


def assert_same(left, right, **tolerance):
    nest.assert_same_structure(left, right)
    for a, b in zip(leaves(left), leaves(right)):
        torch.testing.assert_close(a, b, **tolerance)


def state_after_one_step(network, batch_size):
    """A state that the network reaches from zeros, so that it is not all zeros."""
    zeros = nest.map_structure(lambda s: s.zeros((batch_size, )), network.state_spec)
    return network(random_batch(network.input_tensor_spec, batch_size), zeros)[1]


def set_parameters(single, stack, i):
    """Give ``single`` the parameters of the i-th network of ``stack``."""
    with torch.no_grad():
        for own, (value, is_stacked) in zip(single.parameters(), parameters_of_one(stack, i), strict=True):
            own.copy_(value.view(STACK, *own.shape)[i] if is_stacked else value)


def parameters_of_one(module, i):
    """``(parameter, whether it is stacked)`` of what belongs to the i-th network, in order."""
    if isinstance(module, (NaiveParallelNetwork, layers.NaiveParallelLayer)):
        copies = module._networks if isinstance(module, NaiveParallelNetwork) else module._layers
        return [(p, False) for p in copies[i].parameters()] if isinstance(copies[i], nn.Module) else []
    own = [(p, True) for p in module._parameters.values() if p is not None]
    return own + [pair for child in module.children() for pair in parameters_of_one(child, i)]


class NetworkContract:
    """Mix in and define ``network()``, which makes the network from scratch."""

    has_parameters = True

    def network(self) -> Network:
        raise NotImplementedError

    @pytest.mark.parametrize('batch_size', [1, 5])
    def test_outputs_match_the_output_spec(self, batch_size):
        network = self.network().eval()
        output, _ = network(random_batch(network.input_tensor_spec, batch_size),
                            state_after_one_step(network, batch_size))
        nest.assert_same_structure(network.output_spec, output)
        for spec, leaf in zip(leaves(network.output_spec), leaves(output)):
            assert leaf.shape == (batch_size, *spec.shape) and leaf.dtype == spec.dtype
        assert network.is_distribution_output == any(
            nest.is_distribution(x) for x in nest.flatten(output, is_leaf=nest.is_distribution))

    def test_states_match_the_state_spec(self):
        network = self.network()
        state = state_after_one_step(network, 4)
        assert network.is_rnn == bool(leaves(network.state_spec))
        assert_same_specs(extract_spec(state), network.state_spec)
        _, state = network(random_batch(network.input_tensor_spec, 4), state)
        assert_same_specs(extract_spec(state), network.state_spec)

    def test_inputs_and_state_are_not_changed(self):
        network = self.network()
        inputs, state = random_batch(network.input_tensor_spec, 4), state_after_one_step(network, 4)
        before = copy.deepcopy((inputs, nest.map_structure(torch.Tensor.detach, state)))
        network(inputs, state)
        assert_same((inputs, state), before, rtol=0, atol=0)

    def test_a_copy_has_its_own_new_parameters(self):
        network = self.network()
        new = network.copy()
        assert type(new) is type(network)
        theirs = dict(new.named_parameters())
        ours = dict(network.named_parameters())
        assert {k: v.shape for k, v in theirs.items()} == {k: v.shape for k, v in ours.items()}
        assert bool(ours) == self.has_parameters
        assert not {id(p) for p in theirs.values()} & {id(p) for p in ours.values()}
        weights = [name for name, p in ours.items() if p.ndim > 1 and p.std() > 1e-6]
        assert all(not torch.equal(ours[name], theirs[name]) for name in weights)
        inputs, state = random_batch(network.input_tensor_spec, 4), state_after_one_step(network, 4)
        assert_same_specs(extract_spec(new(inputs, state)[0]), extract_spec(network(inputs, state)[0]))

    def test_a_singleton_is_its_own_copy(self):
        network = self.network()
        assert network.singleton() is network and network.copy() is network
        network.singleton(False)
        assert network.copy() is not network

    def test_gradients_reach_every_parameter(self):
        network = self.network()
        output, state = network(random_batch(network.input_tensor_spec, 6), state_after_one_step(network, 6))
        values = [x for x in leaves((output, state)) if x.requires_grad]
        if not self.has_parameters:
            return
        sum((x * torch.randn_like(x)).nan_to_num(0, 0, 0).sum() for x in values).backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None and bool(parameter.grad.any()), name
            assert bool(torch.isfinite(parameter.grad).all()), name

    def test_the_same_seed_gives_the_same_parameters(self):
        torch.manual_seed(3)
        first = self.network().state_dict()
        torch.manual_seed(3)
        assert_same(dict(self.network().state_dict()), dict(first), rtol=0, atol=0)

    def test_reloading_a_checkpoint_gives_the_same_output(self):
        network, other = self.network(), self.network()
        inputs, state = random_batch(network.input_tensor_spec, 4), state_after_one_step(network, 4)
        other.load_state_dict(network.state_dict())
        network.eval(), other.eval()
        assert_same(network(inputs, state), other(inputs, state), rtol=0, atol=0)

    def test_a_deep_copy_and_a_pickled_one_give_the_same_output(self):
        network = self.network().eval()
        inputs, state = random_batch(network.input_tensor_spec, 4), state_after_one_step(network, 4)
        expected = network(inputs, state)
        assert_same(copy.deepcopy(network)(inputs, state), expected, rtol=0, atol=0)
        assert_same(pickle.loads(pickle.dumps(network))(inputs, state), expected, rtol=0, atol=0)

    def test_finding_the_output_spec_changes_nothing(self):
        network = self.network()
        network._output_spec = None
        before = copy.deepcopy(network.state_dict())
        modes = [m.training for m in network.modules()]
        generator = torch.get_rng_state()
        assert network.output_spec is not None
        assert torch.equal(torch.get_rng_state(), generator)
        assert [m.training for m in network.modules()] == modes
        assert_same(dict(network.state_dict()), dict(before), rtol=0, atol=0)
        assert all(p.grad is None for p in network.parameters())

    @pytest.mark.parametrize('stacked_inputs', [False, True])
    def test_a_stack_computes_what_its_networks_compute_one_by_one(self, stacked_inputs):
        network = self.network()
        stack = network.make_parallel(STACK)
        inputs = random_batch(network.input_tensor_spec, *((5, STACK) if stacked_inputs else (5, )))
        zeros = nest.map_structure(lambda s: s.zeros((5, )), stack.state_spec)
        torch.manual_seed(1)
        expected_state = state = zeros
        for _ in range(2):
            output, state = stack(inputs, state)
        singles = [network.copy() for _ in range(STACK)]
        for i, single in enumerate(singles):
            set_parameters(single, stack, i)
        torch.manual_seed(1)
        for _ in range(2):
            results = []
            for i, single in enumerate(singles):
                own = nest.map_structure(lambda x: x[:, i], inputs) if stacked_inputs else inputs
                results.append(single(own, nest.map_structure(lambda x: x[:, i], expected_state)))
            expected, expected_state = nest.stack(results, dim=1)
        assert_same(output, expected, rtol=1e-4, atol=1e-5)
        assert_same(state, expected_state, rtol=1e-4, atol=1e-5)

    def test_a_stack_can_be_copied_and_knows_its_output(self):
        stack = self.network().make_parallel(STACK)
        new = stack.copy()
        inputs = random_batch(stack.input_tensor_spec, 5)
        zeros = nest.map_structure(lambda s: s.zeros((5, )), stack.state_spec)
        output, state = new(inputs, zeros)
        assert_same_specs(extract_spec(output), stack.output_spec)
        assert_same_specs(extract_spec(state), stack.state_spec)
        assert not {id(p) for p in new.parameters()} & {id(p) for p in stack.parameters()}

    def test_inputs_of_a_wrong_shape_are_refused_by_name(self):
        network = self.network()
        wrong = nest.map_structure(lambda s: torch.zeros((4, *s.shape, 2), dtype=s.dtype), network.input_tensor_spec)
        state = nest.map_structure(lambda s: s.zeros((4, )), network.state_spec)
        with pytest.raises(SpecError, match='expected .* found'):
            network(wrong, state)
        with pytest.raises(SpecError, match='expected a tensor, found'):
            network(nest.map_structure(lambda s: None, network.input_tensor_spec), state)

    def test_a_later_call_that_fails_is_explained(self):
        network = self.network()
        inputs, state = random_batch(network.input_tensor_spec, 4), state_after_one_step(network, 4)
        network(inputs, state)
        network.forward = lambda inputs, state=(): torch.zeros(2) @ torch.zeros(3)
        with pytest.raises(RuntimeError, match='inconsistent tensor size'):
            network(inputs, state)
        with pytest.raises(SpecError, match='input'):
            network((inputs, inputs, inputs), state)

    def test_a_network_with_memory_needs_a_state(self):
        network = self.network()
        if network.is_rnn:
            with pytest.raises(SpecError, match='called without a state'):
                network(random_batch(network.input_tensor_spec, 4))


def assert_same_specs(found, expected):
    """Equal but for the bounds."""
    nest.assert_same_structure(expected, found)
    for a, b in zip(leaves(found), leaves(expected)):
        assert (tuple(a.shape), a.dtype) == (tuple(b.shape), b.dtype)


class TestEncodingNetworkOfVectors(NetworkContract):

    def network(self):
        return EncodingNetwork(VECTOR, fc_layer_params=(8, 7), activation=torch.tanh)


class TestEncodingNetworkWithoutLayers(NetworkContract):
    has_parameters = False

    def network(self):
        return EncodingNetwork(TensorSpec((2, 3)))


class TestEncodingNetworkOfScalars(NetworkContract):

    def network(self):
        return EncodingNetwork(TensorSpec(()), fc_layer_params=(4, ))


class TestEncodingNetworkOfMatrices(NetworkContract):

    def network(self):
        return EncodingNetwork(TensorSpec((2, 3)), TensorSpec((2, 2)), fc_layer_params=(4, ), last_layer_size=4,
                               last_activation=torch.tanh, use_fc_ln=True)


class TestEncodingNetworkWithInPlaceActivation(NetworkContract):

    def network(self):
        return EncodingNetwork(VECTOR, fc_layer_params=(64, ), activation=torch.relu_)


class TestEncodingNetworkWithBatchNorm(NetworkContract):

    def network(self):
        return EncodingNetwork(VECTOR, fc_layer_params=(8, ), activation=torch.tanh, use_fc_bn=True,
                               last_layer_size=4, last_activation=torch.tanh, last_use_fc_ln=True)

    @pytest.mark.parametrize('batch_size', [5])
    def test_outputs_match_the_output_spec(self, batch_size):
        super().test_outputs_match_the_output_spec(batch_size)

    def test_gradients_reach_every_parameter(self):
        # The bias in front of a batch norm cancels out.
        network = self.network()
        network(random_batch(VECTOR, 6))[0].square().sum().backward()
        assert all(p.grad is not None for p in network.parameters())


class TestEncodingNetworkOfImages(NetworkContract):

    def network(self):
        return EncodingNetwork(IMAGE, conv_layer_params=((3, 3, 1), (4, (3, 2), 2, (1, 0), 2)), fc_layer_params=(5, ),
                               activation=torch.tanh)


class TestEncodingNetworkOfNests(NetworkContract):

    def network(self):
        preprocessors = {'camera': EncodingNetwork(IMAGE, conv_layer_params=((2, 3, 2), ), fc_layer_params=(6, )),
                         'state': None, 'goal': EmbeddingPreprocessor(NESTED['goal'], 4)}
        return EncodingNetwork(NESTED, input_preprocessors=preprocessors, preprocessing_combiner=NestConcat(),
                               fc_layer_params=(5, ), activation=torch.tanh)


class TestEncodingNetworkWithCombinerOnly(NetworkContract):

    def network(self):
        return EncodingNetwork((VECTOR, VECTOR), preprocessing_combiner=NestSum(activation=torch.tanh_),
                               fc_layer_params=(5, ))


class TestParallelEncodingNetworkIsANetwork(NetworkContract):

    def network(self):
        return ParallelEncodingNetwork(VECTOR, 2, fc_layer_params=(5, ), activation=torch.tanh)

    test_a_stack_computes_what_its_networks_compute_one_by_one = None
    test_a_stack_can_be_copied_and_knows_its_output = None

    def test_a_stack_is_not_stacked_again(self):
        with pytest.raises(ValueError, match='is a stack of networks already'):
            self.network().make_parallel(2)


class TestPreprocessorNetwork(NetworkContract):
    has_parameters = False

    def network(self):
        return PreprocessorNetwork((VECTOR, VECTOR), (None, torch.tanh_), NestConcat())


class TestImageEncodingNetwork(NetworkContract):

    def network(self):
        return ImageEncodingNetwork(2, (9, 8), ((3, 3, 2), ), same_padding=True, activation=torch.tanh,
                                    flatten_output=True)


class TestImageDecodingNetwork(NetworkContract):

    def network(self):
        return ImageDecodingNetwork(4, ((3, 3, 2), (2, 4, 2)), (3, 2), 2, same_padding=True, activation=torch.tanh,
                                    preprocess_fc_layer_params=(5, ))


class TestLSTMEncodingNetwork(NetworkContract):

    def network(self):
        return LSTMEncodingNetwork(VECTOR, pre_fc_layer_params=(4, ), hidden_size=(5, 6), lstm_output_layers=(0, -1),
                                   post_fc_layer_params=(3, ), activation=torch.tanh)


class TestLSTMEncodingNetworkWithoutOtherLayers(NetworkContract):

    def network(self):
        return LSTMEncodingNetwork(VECTOR, hidden_size=5)


class TestEmbeddingPreprocessorOfIntegers(NetworkContract):

    def network(self):
        return EmbeddingPreprocessor(BoundedTensorSpec((2, ), torch.int64, [3, -1], [3, 0]), 4,
                                     last_activation=torch.tanh)

    def test_gradients_reach_every_parameter(self):
        network = self.network()
        network(torch.tensor([[3, 0], [3, -1]]))[0].sum().backward()
        assert all(bool(p.grad.any()) for p in network.parameters())


class TestEmbeddingPreprocessorWithLayers(NetworkContract):

    def network(self):
        return EmbeddingPreprocessor(DISCRETE, 4, fc_layer_params=(5, ), activation=torch.tanh)


class TestEmbeddingPreprocessorOfImages(NetworkContract):

    def network(self):
        return EmbeddingPreprocessor(IMAGE, 4, conv_layer_params=((2, 3, 2), ), activation=torch.tanh)


class TestCosineEmbeddingPreprocessor(NetworkContract):
    has_parameters = False

    def network(self):
        return CosineEmbeddingPreprocessor(VECTOR, 5)


class TestCategoricalProjectionNetwork(NetworkContract):

    def network(self):
        return CategoricalProjectionNetwork(4, DISCRETE)


class TestCategoricalProjectionNetworkOfVectors(NetworkContract):

    def network(self):
        return CategoricalProjectionNetwork(4, MULTI_DISCRETE)


class TestCategoricalProjectionNetworkWithNoise(NetworkContract):

    def network(self):
        return CategoricalProjectionNetwork(4, DISCRETE, fc_ctor=NoisyFC)


class TestNormalProjectionNetwork(NetworkContract):

    def network(self):
        return NormalProjectionNetwork(4, BOX)


class TestNormalProjectionNetworkOfMatrices(NetworkContract):

    def network(self):
        return NormalProjectionNetwork(4, BoundedTensorSpec((2, 2), torch.float32, -1, 2), state_dependent_std=True,
                                       scale_distribution=True, std_transform=torch.exp_)


class TestStableNormalProjectionNetwork(NetworkContract):

    def network(self):
        return StableNormalProjectionNetwork(4, BOX, state_dependent_std=True, min_std=0.1, max_std=2.0)


class TestCauchyProjectionNetwork(NetworkContract):

    def network(self):
        return CauchyProjectionNetwork(4, BOX)


class TestBetaProjectionNetwork(NetworkContract):

    def network(self):
        return BetaProjectionNetwork(4, BOX, projection_output_init_gain=0.1)


class TestTruncatedProjectionNetwork(NetworkContract):

    def network(self):
        return TruncatedProjectionNetwork(4, BOX, min_scale=0.1)


class TestOnehotCategoricalProjectionNetwork(NetworkContract):

    def network(self):
        return OnehotCategoricalProjectionNetwork(4, BoundedTensorSpec((5, )), mode='gumbel')


class TestMixtureProjectionNetwork(NetworkContract):

    def network(self):
        return MixtureProjectionNetwork(4, BOX, 2, NormalProjectionNetwork)


class TestNestedProjectionNetwork(NetworkContract):

    def network(self):
        return NestedProjectionNetwork(4, MIXED)


class TestActorDistributionNetwork(NetworkContract):

    def network(self):
        return ActorDistributionNetwork(VECTOR, DISCRETE, fc_layer_params=(8, 8), activation=torch.tanh)


class TestActorDistributionNetworkOfMixedActions(NetworkContract):

    def network(self):
        return ActorDistributionNetwork(VECTOR, MIXED, fc_layer_params=(8, ), activation=torch.tanh)


class TestActorDistributionNetworkWithNoise(NetworkContract):

    def network(self):
        return ActorDistributionNetwork(VECTOR, DISCRETE, fc_layer_params=(8, ), activation=torch.tanh,
                                        discrete_projection_net_ctor=noisy_head)


def noisy_head(input_size, action_spec):
    return CategoricalProjectionNetwork(input_size, action_spec, fc_ctor=NoisyFC)


class TestActorDistributionRNNNetwork(NetworkContract):

    def network(self):
        return ActorDistributionRNNNetwork(VECTOR, MIXED, fc_layer_params=(4, ), lstm_hidden_size=5,
                                           actor_fc_layer_params=(4, ), activation=torch.tanh)


class TestUnitNormalActorDistributionNetwork(NetworkContract):
    has_parameters = False

    def network(self):
        return UnitNormalActorDistributionNetwork(NESTED, (BOX, BoundedTensorSpec(())))


class TestActorNetwork(NetworkContract):

    def network(self):
        return ActorNetwork(VECTOR, (BOX, BoundedTensorSpec((2, 2))), fc_layer_params=(5, ), activation=torch.tanh)


class TestActorRNNNetwork(NetworkContract):

    def network(self):
        return ActorRNNNetwork(VECTOR, BOX, fc_layer_params=(5, ), lstm_hidden_size=4, activation=torch.tanh)


class TestValueNetwork(NetworkContract):

    def network(self):
        return ValueNetwork(VECTOR, fc_layer_params=(5, ), activation=torch.tanh)


class TestValueNetworkOfSeveralRewards(NetworkContract):

    def network(self):
        return ValueNetwork(IMAGE, TensorSpec((3, )), conv_layer_params=((2, 3, 2), ), activation=torch.tanh)


class TestValueRNNNetwork(NetworkContract):

    def network(self):
        return ValueRNNNetwork(VECTOR, lstm_hidden_size=(4, 3), value_fc_layer_params=(5, ), activation=torch.tanh)


class TestSequential(NetworkContract):

    def network(self):
        return containers.Sequential(torch.tanh_, layers.FC(3, 4), a=LSTMCell(4, 5), b=(('input', 'a'), NestConcat()),
                                     c=layers.FC(8, 2), output={'c': 'c', 'a': 'a'}, input_tensor_spec=VECTOR)


class TestSequentialChain(NetworkContract):

    def network(self):
        return containers.Sequential(layers.FC(3, 4, torch.relu_), EncodingNetwork(TensorSpec((4, ))), torch.tanh)


class TestParallel(NetworkContract):

    def network(self):
        return containers.Parallel({'a': LSTMCell(3, 4), 'b': layers.FC(2, 2)})


class TestBranch(NetworkContract):

    def network(self):
        return containers.Branch(layers.FC(3, 4), (GRUCell(3, 2), torch.tanh_))


class TestEcho(NetworkContract):

    def network(self):
        spec = {'input': TensorSpec((2, )), 'echo': TensorSpec((3, ))}
        return containers.Echo(containers.Sequential(
            NestConcat(), layers.FC(5, 6, torch.tanh), layers.Branch(output=layers.FC(6, 2), echo=layers.FC(6, 3)),
            input_tensor_spec=spec))


class TestLSTMCell(NetworkContract):

    def network(self):
        return LSTMCell(3, 4)


class TestGRUCell(NetworkContract):

    def network(self):
        return GRUCell(3, 4)


class TestResidue(NetworkContract):

    def network(self):
        return Residue(GRUCell(4, 4))


class TestTemporalPool(NetworkContract):
    has_parameters = False

    def network(self):
        return TemporalPool(3, 2, 2, mode='avg')


class TestDelay(NetworkContract):
    has_parameters = False

    def network(self):
        return Delay({'a': VECTOR, 'b': TensorSpec(())}, delay=2)


class TestNoisyFC(NetworkContract):

    def network(self):
        return NoisyFC(3, 4, new_noise_prob=0.5, activation=torch.relu_, use_ln=True)


class TestNaiveParallelNetwork(NetworkContract):

    def network(self):
        return NaiveParallelNetwork(LSTMCell(3, 4), 2)

    test_a_stack_computes_what_its_networks_compute_one_by_one = None
    test_a_stack_can_be_copied_and_knows_its_output = None


class TestNetworkWrapper(NetworkContract):

    def network(self):
        return NetworkWrapper(nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True)), VECTOR)


class TestNetworkWrapperOfAFunction(NetworkContract):
    has_parameters = False

    def network(self):
        return NetworkWrapper(torch.relu_, VECTOR)


class TestNetworkWrapperWithState(NetworkContract):

    def network(self):
        return NetworkWrapper(_Accumulator(), VECTOR, state_spec=VECTOR)


class _Accumulator(nn.Module):

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, inputs, state):
        state = self.fc(inputs) + state
        return state.tanh(), state
