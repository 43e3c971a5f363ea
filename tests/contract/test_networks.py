"""Every network under the contract of network_contract.py."""
import pytest
import torch
from network_contract import NetworkContract, random_batch
from torch import nn

from alfx import layers
from alfx.algorithms.merlin_algorithm import ResnetDecodingNetwork, ResnetEncodingNetwork
from alfx.nest.utils import NestConcat, NestSum
from alfx.networks import containers
from alfx.networks.actor_distribution_networks import (ActorDistributionNetwork, ActorDistributionRNNNetwork,
                                                       UnitNormalActorDistributionNetwork)
from alfx.networks.actor_networks import ActorNetwork, ActorRNNNetwork
from alfx.networks.critic_networks import CriticNetwork, CriticQuantileNetwork, CriticRNNNetwork
from alfx.networks.dynamics_networks import BoundedVarianceProjectionNetwork, DynamicsNetwork
from alfx.networks.encoding_networks import (EncodingNetwork, ImageDecodingNetwork, ImageEncodingNetwork,
                                             LSTMEncodingNetwork, ParallelEncodingNetwork)
from alfx.networks.mdq_critic_networks import MdqCriticNetwork
from alfx.networks.network import NaiveParallelNetwork, NetworkWrapper
from alfx.networks.networks import Delay, GRUCell, LSTMCell, NoisyFC, Residue, TemporalPool
from alfx.networks.preprocessor_networks import PreprocessorNetwork
from alfx.networks.preprocessors import CosineEmbeddingPreprocessor, EmbeddingPreprocessor
from alfx.networks.projection_networks import (BetaProjectionNetwork, CategoricalProjectionNetwork,
                                               CauchyProjectionNetwork, MixtureProjectionNetwork,
                                               NestedProjectionNetwork, NormalProjectionNetwork,
                                               OnehotCategoricalProjectionNetwork, StableNormalProjectionNetwork,
                                               TruncatedProjectionNetwork)
from alfx.networks.q_networks import QNetwork, QRNNNetwork
from alfx.networks.value_networks import ValueNetwork, ValueRNNNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

VECTOR = TensorSpec((3, ))
IMAGE = TensorSpec((2, 9, 8))
NESTED = {'camera': IMAGE, 'state': VECTOR, 'goal': BoundedTensorSpec((), torch.int64, 2, 5)}
DISCRETE = BoundedTensorSpec((), torch.int64, 0, 3)
MULTI_DISCRETE = BoundedTensorSpec((3, ), torch.int64, [0, -1, 2], [1, 3, 2])
BOX = BoundedTensorSpec((2, ), torch.float32, [-1.0, 0.0], [1.0, 6.0])
MIXED = {'steer': BOX, 'gears': (DISCRETE, MULTI_DISCRETE)}


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

    test_a_stack_matches_its_networks_one_by_one = None
    test_given_parameters_match_networks_that_own_them = None
    test_leading_networks_of_a_stack_match_the_whole_stack = None
    test_a_stack_can_be_copied_and_knows_its_output = None

    def test_a_stack_is_not_stacked_again(self):
        with pytest.raises(ValueError, match='is already a stack of networks'):
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


class TestCriticNetwork(NetworkContract):

    def network(self):
        return CriticNetwork((VECTOR, BOX), joint_fc_layer_params=(6, 5), activation=torch.tanh)


class TestDynamicsNetwork(NetworkContract):

    def network(self):
        return DynamicsNetwork((VECTOR, BOX), TensorSpec((3, )), joint_fc_layer_params=(6, 5), activation=torch.tanh)


class TestProbabilisticDynamicsNetwork(NetworkContract):

    def network(self):
        return DynamicsNetwork((VECTOR, BOX), TensorSpec((3, )), joint_fc_layer_params=(6, ), activation=torch.tanh,
                               prob=True, continuous_projection_net_ctor=BoundedVarianceProjectionNetwork)


class TestCriticNetworkOfNestsAndSeveralQuantiles(NetworkContract):

    def network(self):
        return CriticNetwork(({'a': VECTOR, 'b': VECTOR}, (BOX, DISCRETE)), TensorSpec((2, 3)),
                             observation_input_processors={'a': layers.FC(3, 4, torch.tanh), 'b': None},
                             observation_preprocessing_combiner=NestConcat(), observation_fc_layer_params=(5, ),
                             action_input_processors=(None, EmbeddingPreprocessor(DISCRETE, 2)),
                             action_preprocessing_combiner=NestConcat(), joint_fc_layer_params=(6, ),
                             activation=torch.tanh, last_layer_activation=torch.tanh)


class TestCriticNetworkOfSums(NetworkContract):

    def network(self):
        return CriticNetwork((IMAGE, BOX), observation_conv_layer_params=((2, 3, 2), ),
                             observation_fc_layer_params=(5, ), action_fc_layer_params=(5, ),
                             observation_action_combiner=NestSum(), joint_fc_layer_params=(4, ), activation=torch.tanh,
                             use_fc_ln=True)


class TestCriticNetworkOneAfterTheOther(NetworkContract):

    def network(self):
        return CriticNetwork((VECTOR, BOX), joint_fc_layer_params=(5, ), activation=torch.tanh,
                             use_naive_parallel_network=True)


class TestCriticRNNNetwork(NetworkContract):

    def network(self):
        return CriticRNNNetwork((VECTOR, BOX), TensorSpec((2, )), observation_fc_layer_params=(4, ),
                                joint_fc_layer_params=(5, ), lstm_hidden_size=(4, 3), critic_fc_layer_params=(4, ),
                                activation=torch.tanh)


class TestCriticRNNNetworkWithoutOtherLayers(NetworkContract):

    def network(self):
        return CriticRNNNetwork((VECTOR, BOX), lstm_hidden_size=4)


class TestCriticQuantileNetwork(NetworkContract):

    def network(self):
        return CriticQuantileNetwork((VECTOR, BOX), TensorSpec((6, )), TensorSpec((2, )), tau_embedding_dim=5,
                                     obs_act_joint_fc_layer_params=(7, ), obs_act_activation=torch.tanh,
                                     tau_fc_layer_params=(4, 7), obs_act_tau_joint_fc_layer_params=(4, ))


class TestCriticQuantileNetworkWithoutOtherLayers(NetworkContract):

    def network(self):
        return CriticQuantileNetwork((VECTOR, BOX), TensorSpec((6, )), use_naive_parallel_network=True)


class TestMdqCriticNetwork(NetworkContract):

    def network(self):
        return MdqCriticNetwork((VECTOR, BOX), obs_encoding_layer_params=(5, ), pre_encoding_layer_params=(4, ),
                                mid_encoding_layer_params=(4, ), free_form_fc_layer_params=(5, ),
                                activation=torch.tanh)

    test_gradients_reach_every_parameter = None  # its two forms are trained separately


class TestQNetwork(NetworkContract):

    def network(self):
        return QNetwork(VECTOR, DISCRETE, fc_layer_params=(6, 5), activation=torch.tanh)


class TestQNetworkOfMixedActions(NetworkContract):

    def network(self):
        return QNetwork((VECTOR, BOX), DISCRETE, preprocessing_combiner=NestConcat(), fc_layer_params=(6, ),
                        activation=torch.tanh, use_naive_parallel_network=True)


class TestQNetworkDueling(NetworkContract):

    def network(self):
        return QNetwork(IMAGE, DISCRETE, conv_layer_params=((2, 3, 2), ), fc_layer_params=(6, 5),
                        activation=torch.tanh, dueling=True)


class TestQNetworkOfRainbow(NetworkContract):

    def network(self):
        return QNetwork(VECTOR, DISCRETE, fc_layer_params=(6, ), activation=torch.tanh, dueling=True, noisy=True,
                        num_atoms=5)


class TestQRNNNetwork(NetworkContract):

    def network(self):
        return QRNNNetwork(VECTOR, DISCRETE, fc_layer_params=(4, ), lstm_hidden_size=5, value_fc_layer_params=(4, ),
                           activation=torch.tanh, dueling=True, num_atoms=3)


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


class TestResnetEncodingNetwork(NetworkContract):

    def network(self):
        return ResnetEncodingNetwork(TensorSpec((2, 9, 8)), output_size=5, norm_layer=nn.LayerNorm(5))


class TestResnetDecodingNetwork(NetworkContract):

    def network(self):
        return ResnetDecodingNetwork(VECTOR, TensorSpec((2, 8, 16)))


class TestNaiveParallelNetwork(NetworkContract):

    def network(self):
        return NaiveParallelNetwork(LSTMCell(3, 4), 2)

    test_a_stack_matches_its_networks_one_by_one = None
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
