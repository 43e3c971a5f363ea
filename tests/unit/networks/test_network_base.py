"""Network, its wrappers, and containers of networks."""
import gin
import pytest
import torch
from torch import nn

from alfx import layers, nest
from alfx.nest.utils import NestConcat
from alfx.networks import containers
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import (BatchSquashNetwork, NaiveParallelNetwork, Network, NetworkWrapper,
                                   get_input_tensor_spec, wrap_as_network)
from alfx.networks.networks import Delay, GRUCell, LSTMCell
from alfx.networks.preprocessors import EmbeddingPreprocessor
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.networks.value_networks import ValueNetwork, ValueRNNNetwork
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

VECTOR = TensorSpec((3, ))
BOX = BoundedTensorSpec((2, ), minimum=-1)


@pytest.mark.parametrize('make', [
    lambda layer: containers.Sequential(layer, torch.relu, layer, input_tensor_spec=VECTOR),
    lambda layer: containers.Parallel((layer, layer), (VECTOR, VECTOR)),
    lambda layer: containers.Branch(layer, layer, input_tensor_spec=VECTOR)])
def test_a_layer_that_is_used_twice_stays_shared_in_copies_and_stacks(make):
    network = make(layers.FC(3, 3))
    counts = [sum(p.numel() for p in net.parameters()) for net in (network, network.copy(), network.make_parallel(2))]
    assert counts == [12, 12, 24]


def test_a_copy_may_change_arguments():
    network = EncodingNetwork(VECTOR, fc_layer_params=(4, ), name='first')
    assert network.saved_args['fc_layer_params'] == (4, ) and network.saved_args['use_fc_bn'] is False
    other = network.copy(fc_layer_params=(6, 5), name='second')
    assert other.output_spec == TensorSpec((5, )) and other.name == 'second' and network.name == 'first'
    with pytest.raises(TypeError, match='no_such'):
        network.copy(no_such=1)


def test_a_copy_of_a_copy_has_the_changed_arguments():
    network = EncodingNetwork(VECTOR, fc_layer_params=(4, )).copy(fc_layer_params=(6, ))
    assert network.copy().output_spec == TensorSpec((6, ))


def test_arguments_collected_by_a_subclass_are_saved():

    class Actor(ActorDistributionNetwork):

        def __init__(self, spec, width=3, **kwargs):
            super().__init__(spec, BOX, fc_layer_params=(width, ), **kwargs)

    network = Actor(VECTOR, 5, activation=torch.tanh)
    assert network.saved_args == {'spec': VECTOR, 'width': 5, 'activation': torch.tanh}
    copy = network.copy(width=6, name='wide')
    assert copy._encoding_net.output_spec == TensorSpec((6, )) and copy.name == 'wide'
    assert copy.saved_args['activation'] is torch.tanh


def test_argument_networks_are_copied_unless_they_are_singletons():
    shared = EmbeddingPreprocessor(VECTOR, 4).singleton()
    own = EmbeddingPreprocessor(VECTOR, 4)
    spec = {'own': VECTOR, 'shared': VECTOR}
    network = EncodingNetwork(spec, input_preprocessors={'own': own, 'shared': shared},
                              preprocessing_combiner=NestConcat())
    for copy in (network, network.copy()):
        copied_ids = {id(p) for p in copy.parameters()}
        assert {id(p) for p in shared.parameters()} <= copied_ids
        assert not {id(p) for p in own.parameters()} & copied_ids


@pytest.mark.parametrize('make', [lambda: EmbeddingPreprocessor(VECTOR, 4),
                                  lambda: EncodingNetwork(VECTOR, fc_layer_params=(4, ))])
def test_networks_of_a_stack_share_a_singleton(make):
    shared = make().singleton()
    network = EncodingNetwork(VECTOR, input_preprocessors=shared, fc_layer_params=(3, ))
    stack = network.make_parallel(2)
    assert {id(p) for p in shared.parameters()} <= {id(p) for p in stack.parameters()}
    assert stack(torch.randn(5, *VECTOR.shape))[0].shape == (5, 2, 3)


def test_modules_among_the_arguments_are_copied_with_new_parameters():
    network = NetworkWrapper(nn.Sequential(nn.Linear(3, 4), nn.PReLU()), VECTOR)
    with pytest.raises(ValueError, match=r"\['weight'\] of PReLU|has no reset_parameters"):
        NetworkWrapper(_NoReset(), VECTOR).copy()
    copy = network.copy()
    assert not torch.equal(copy._module[0].weight, network._module[0].weight)


class _NoReset(nn.Module):

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.gain * x


def test_a_copy_has_the_bindings_and_the_scope_of_its_original():
    gin.parse_config("""
        EncodingNetwork.use_fc_ln = True
        critic/ValueNetwork.fc_layer_params = (7,)
        critic/EncodingNetwork.last_use_fc_ln = True
    """)
    with gin.config_scope('critic'):
        network = ValueNetwork(VECTOR)
    gin.parse_config("EncodingNetwork.use_fc_ln = False")
    assert network.saved_args['fc_layer_params'] == (7, )
    copy = network.copy()
    assert {k: v.shape for k, v in copy.state_dict().items()} == {k: v.shape for k, v in network.state_dict().items()}
    # The layer norm of the last layer comes from a binding in the scope.
    assert '_encoding_net._layers.1._norm.weight' in copy.state_dict()


def test_networks_are_configured_by_conf_files():
    gin.parse_config("""
        import alfx.networks.value_networks
        ActorDistributionNetwork.fc_layer_params = (8, 6)
        ActorDistributionNetwork.activation = @torch.tanh
        ActorDistributionNetwork.continuous_projection_net_ctor = @NormalProjectionNetwork
        NormalProjectionNetwork.state_dependent_std = True
        NormalProjectionNetwork.std_transform = @torch.nn.functional.elu
        ActorDistributionNetwork.kernel_initializer = @variance_scaling_init
        variance_scaling_init.gain = 0.0
        ActorDistributionNetwork.input_preprocessors = {'a': @EmbeddingPreprocessor(), 'b': None}
        ActorDistributionNetwork.preprocessing_combiner = @NestConcat()
        EmbeddingPreprocessor.input_tensor_spec = @TensorSpec()
        TensorSpec.shape = (3,)
        EmbeddingPreprocessor.embedding_dim = 5
    """, skip_unknown=('TensorSpec', ))
    gin.bind_parameter('EmbeddingPreprocessor.input_tensor_spec', VECTOR)
    network = ActorDistributionNetwork({'a': VECTOR, 'b': VECTOR}, BOX)
    assert network._encoding_net.saved_args['activation'] is torch.tanh
    assert network._encoding_net.processed_input_tensor_spec == TensorSpec((8, ))
    assert not network._encoding_net._layers[0].weight.any()
    assert isinstance(network._projection_net, NormalProjectionNetwork)
    assert network._projection_net._scale_parameter is None


def test_the_batch_must_be_the_same_for_all_inputs():
    network = EncodingNetwork({'a': VECTOR, 'b': VECTOR}, preprocessing_combiner=NestConcat())
    with pytest.raises(SpecError, match=r'1 batch dimension\(s\), the same for all tensors, found \[\(4,\), \(5,\)\]'):
        network({'a': torch.zeros(4, 3), 'b': torch.zeros(5, 3)})
    with pytest.raises(SpecError, match="input.*expected .*found"):
        EncodingNetwork(VECTOR)({'a': torch.zeros(4, 3)})
    with pytest.raises(SpecError, match=r"input\.a: expected float32 \(3,\), found float64 \(3,\)"):
        network({'a': torch.zeros(4, 3, dtype=torch.float64), 'b': torch.zeros(4, 3)})


def test_only_the_first_call_and_calls_that_fail_are_checked(monkeypatch):
    network = EncodingNetwork(VECTOR, fc_layer_params=(4, ))
    checks = []
    original = Network._check_call
    monkeypatch.setattr(Network, '_check_call', lambda self, *args: (checks.append(1), original(self, *args)))
    for _ in range(3):
        network(torch.zeros(2, 3))
    assert len(checks) == 1
    with pytest.raises(SpecError, match=r'expected float32 \(3,\), found float32 \(4,\)'):
        network(torch.zeros(2, 4))


def test_the_first_call_may_be_in_autocast():
    net = ValueRNNNetwork(TensorSpec((3, )), fc_layer_params=(5, ))
    state = nest.map_structure(lambda spec: spec.zeros((6, )), net.state_spec)
    with torch.autocast('cpu', torch.bfloat16):
        assert net(torch.randn(6, 3), state)[0].shape == (6, )


def test_a_wrong_state_is_rejected():
    network = LSTMCell(3, 4)
    with pytest.raises(SpecError, match='LSTMCell: state'):
        network(torch.zeros(2, 3), (torch.zeros(2, 4), torch.zeros(2, 5)))


def test_probing_does_not_change_batch_norm_statistics():
    inner = EncodingNetwork(VECTOR, fc_layer_params=(4, ), use_fc_bn=True)
    network = containers.Sequential(inner, layers.FC(4, 2, use_bn=True))
    assert network.output_spec == TensorSpec((2, ))
    assert all(not b.any() for name, b in network.named_buffers() if 'running_mean' in name or 'num_batches' in name)
    assert network.training and inner.training


def test_an_output_that_is_not_a_tensor_raises():
    with pytest.raises(RuntimeError, match='computing the spec of its output failed'):
        containers.Sequential(layers.FC(3, 4), lambda x: 'text').output_spec


def test_inputs_of_a_probe_are_within_their_bounds():
    spec = BoundedTensorSpec((), torch.int64, 4, 6)
    network = containers.Sequential(lambda x: x - 4, layers.OneHot(3), input_tensor_spec=spec)
    assert network.output_spec == TensorSpec((3, ))


def test_layers_know_their_input_spec_and_can_be_wrapped():
    assert get_input_tensor_spec(layers.FC(3, 4)) == VECTOR
    assert get_input_tensor_spec(nn.Sequential(nn.Linear(3, 4), nn.ReLU())) == VECTOR
    assert get_input_tensor_spec(torch.tanh) is None
    network = wrap_as_network(layers.FC(3, 4), None)
    assert isinstance(network, NetworkWrapper) and wrap_as_network(network, None) is network
    with pytest.raises(ValueError, match='input_tensor_spec is required'):
        wrap_as_network(torch.tanh, None)


def test_a_squashed_network_sees_one_batch_dimension():
    network = ActorDistributionNetwork(VECTOR, (BOX, BoundedTensorSpec((), torch.int64, 0, 1)), fc_layer_params=(4, ))
    x = torch.randn(5, 6, 3)
    squashed = BatchSquashNetwork(network)
    (normal, categorical), _ = squashed(x)
    assert normal.batch_shape == categorical.batch_shape == (5, 6)
    torch.testing.assert_close(normal.mean, network(x.flatten(0, 1))[0][0].mean.view(5, 6, 2))
    assert squashed.output_spec[0].loc.shape == (2, )
    with pytest.raises(ValueError, match='is recurrent'):
        BatchSquashNetwork(LSTMCell(3, 4))


def test_a_naive_stack_of_distributions_has_the_stack_in_its_batch():
    stack = NaiveParallelNetwork(NormalProjectionNetwork(3, BOX), 4)
    assert stack(torch.randn(5, 3))[0].batch_shape == (5, 4)
    assert stack.name == 'naive_parallel_NormalProjectionNetwork'


def test_sequential_carries_the_states_of_its_parts():
    cell = GRUCell(3, 4)
    delay = Delay(TensorSpec((4, )))
    network = containers.Sequential(cell, torch.neg, delay)
    assert nest.flatten(network.state_spec) == [TensorSpec((4, ))] * 2 and network.state_spec[1] == ()
    state = nest.map_structure(lambda s: s.zeros((2, )), network.state_spec)
    x = torch.randn(2, 3)
    first, state = network(x, state)
    second, state = network(x, state)
    h1, _ = cell(x, torch.zeros(2, 4))
    assert not first.any()
    torch.testing.assert_close(second, -h1)
    assert network[0] is cell and len(network) == 3


def test_sequential_needs_to_know_its_input():
    with pytest.raises(ValueError, match='input_tensor_spec is required, because .*tanh'):
        containers.Sequential(torch.tanh)
    with pytest.raises(ValueError, match='first element selects'):
        containers.Sequential(('input.a', layers.FC(3, 4)))
    with pytest.raises(ValueError, match="did you mean 'first'"):
        containers.Sequential(first=layers.FC(3, 4), second=('frist', torch.tanh))


def test_parallel_gives_each_part_of_the_input_to_its_own_network():
    network = containers.Parallel((layers.FC(3, 4), {'x': torch.neg}), (VECTOR, {'x': {'deep': VECTOR}['deep']}))
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    out, other = network((x, {'x': y}))[0]
    torch.testing.assert_close(out, network.networks[0](x)[0])
    torch.testing.assert_close(other['x'], -y)
    with pytest.raises(ValueError, match='input_tensor_spec is required'):
        containers.Parallel((torch.neg, ))


def test_branch_gives_all_networks_the_same_input():
    network = containers.Branch(a=layers.FC(3, 4), b=LSTMCell(3, 5))
    assert set(network.networks) == {'a', 'b'} and network.state_spec['a'] == ()
    out, state = network(torch.randn(2, 3), nest.map_structure(lambda s: s.zeros((2, )), network.state_spec))
    assert {k: v.shape for k, v in out.items()} == {'a': (2, 4), 'b': (2, 5)}
    with pytest.raises(ValueError, match='no module defines'):
        containers.Branch(torch.neg, torch.tanh)


def test_echo_feeds_part_of_the_output_back():
    spec = {'input': TensorSpec(()), 'echo': TensorSpec(())}

    def block(x):
        return {'output': x['echo'] * 10, 'echo': x['echo'] + x['input']}

    network = containers.Echo(block, spec)
    state, outputs = {'block': (), 'echo': torch.zeros(1)}, []
    for value in (1.0, 2.0, 3.0, 4.0):
        output, state = network(torch.tensor([value]), state)
        outputs.append(output.item())
    # ten times the sum of the inputs so far
    assert outputs == [0, 10, 30, 60]
    with pytest.raises(ValueError, match="must return a dict with 'output' and 'echo'"):
        containers.Echo(lambda x: x, spec)
    with pytest.raises(ValueError, match="must take a dict with 'input' and 'echo'"):
        containers.Echo(layers.FC(3, 4))
    with pytest.raises(ValueError, match='takes the echo'):
        containers.Echo(lambda x: {'output': x['input'], 'echo': x['input'].unsqueeze(1)}, spec)
