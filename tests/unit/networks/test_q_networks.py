"""Properties of Q networks; tests of every network are in tests/contract/test_networks.py."""
import pytest
import torch

from alfx import context, nest
from alfx.layers import FC
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import NaiveParallelNetwork
from alfx.networks.networks import NoisyFC
from alfx.networks.q_networks import ParallelQNetwork, QNetwork, QNetworkBase, QRNNNetwork
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

OBSERVATION = TensorSpec((3, ))
ACTION = BoundedTensorSpec((), torch.int64, 2, 5)


def layers(network, kind=FC):
    return [m for m in network.modules() if isinstance(m, kind)]


def test_each_action_has_a_value_for_any_minimum():
    network = QNetwork(OBSERVATION, ACTION, fc_layer_params=(6, ))
    assert network.num_actions == 4 and network.action_spec == ACTION and network.num_atoms is None
    assert network(torch.randn(5, 3))[0].shape == (5, 4)
    assert network.output_spec == TensorSpec((4, ))
    assert not network.is_rnn


def test_values_match_the_layers_applied_by_hand():
    network, x = QNetwork(OBSERVATION, ACTION, fc_layer_params=(6, )), torch.randn(5, 3)
    hidden, last = layers(network)
    expected = torch.relu(x @ hidden.weight.T + hidden.bias) @ last.weight.T + last.bias
    torch.testing.assert_close(network(x)[0], expected)


def test_a_dueling_network_adds_centered_advantages_to_the_value():
    network, x = QNetwork(OBSERVATION, ACTION, fc_layer_params=(6, 5), dueling=True), torch.randn(7, 3)
    shared, streams, advantage_layer, value_layer = layers(network)
    assert streams.output_size == 10
    h = torch.relu(torch.relu(x @ shared.weight.T + shared.bias) @ streams.weight.T + streams.bias)
    advantage = h[:, :5] @ advantage_layer.weight.T + advantage_layer.bias
    value = h[:, 5:] @ value_layer.weight.T + value_layer.bias
    expected = torch.stack([value[:, 0] + advantage[:, a] - sum(advantage[:, b] for b in range(4)) / 4
                            for a in range(4)], dim=1)
    q, _ = network(x)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(q.mean(dim=1), value[:, 0])  # the mean over actions is the state value


def test_a_dueling_network_without_hidden_layers_has_two_linear_layers():
    network = QNetwork(OBSERVATION, ACTION, dueling=True)
    assert [m.output_size for m in layers(network)] == [4, 1]
    assert network(torch.randn(2, 3))[0].shape == (2, 4)


@pytest.mark.parametrize('dueling', [False, True])
def test_atoms_are_logits_for_each_action(dueling):
    network = QNetwork(OBSERVATION, ACTION, fc_layer_params=(5, ), num_atoms=11, dueling=dueling)
    assert network(torch.randn(2, 3))[0].shape == (2, 4, 11)
    assert network.make_parallel(2)(torch.randn(2, 3))[0].shape == (2, 2, 4, 11)
    assert network.num_atoms == 11


def test_dueling_atoms_are_added_atom_by_atom():
    network, x = QNetwork(OBSERVATION, ACTION, num_atoms=3, dueling=True), torch.randn(7, 3)
    advantage_layer, value_layer = layers(network)
    advantage = (x @ advantage_layer.weight.T + advantage_layer.bias).view(7, 4, 3)
    value = x @ value_layer.weight.T + value_layer.bias
    logits, _ = network(x)
    for atom in range(3):
        for action in range(4):
            expected = value[:, atom] + advantage[:, action, atom] - advantage[:, :, atom].mean(dim=1)
            torch.testing.assert_close(logits[:, action, atom], expected)


class TestNoise:

    def network(self):
        return QNetwork(OBSERVATION, ACTION, fc_layer_params=(6, 5), noisy=True, dueling=True)

    def test_all_fully_connected_layers_are_noisy_and_stateless(self):
        network = self.network()
        assert [(m.input_size, m.output_size) for m in layers(network, NoisyFC)] == [(3, 6), (6, 10), (5, 4), (5, 1)]
        assert len(layers(network)) == 4  # those inside the noisy ones
        assert not network.is_rnn

    def test_each_call_and_each_sample_has_new_noise(self):
        network, x = self.network(), torch.ones(2, 3)
        first, second = network(x)[0], network(x)[0]
        assert not torch.equal(first, second)
        assert not torch.equal(first[0], first[1])

    def test_the_standard_deviation_is_that_of_factorised_noise(self):
        # One layer with weights 0 and S = s = 0.5 / sqrt(3): y = e_o * (S * sum_i e_i x_i + s), where E e^2 = E |z| =
        # sqrt(2 / pi) and E e = 0. For x = (1, 1, 1): var y = sqrt(2/pi) * S^2 * (3 sqrt(2/pi) + 1) = 0.2257
        torch.manual_seed(0)
        network = QNetwork(OBSERVATION, ACTION, noisy=True)
        with torch.no_grad():
            layers(network)[0].weight.zero_()
            layers(network)[0].bias.zero_()
        values, _ = network(torch.ones(50000, 3))
        mean_abs = (2 / torch.pi)**0.5
        expected = mean_abs * 0.25 / 3 * (3 * mean_abs + 1)
        assert expected == pytest.approx(0.2257, abs=1e-3)
        assert values.var().item() == pytest.approx(expected, rel=0.05)
        assert values.mean().item() == pytest.approx(0, abs=0.01)

    def test_noise_std_is_the_initial_noise_and_needs_noisy_layers(self):
        network = QNetwork(OBSERVATION, ACTION, fc_layer_params=(6, 5), noisy=True, noise_std=0.1)
        for layer in layers(network, NoisyFC):
            torch.testing.assert_close(layer._weight_std, torch.full_like(layer._weight_std,
                                                                          0.1 / layer.input_size**0.5))
        with pytest.raises(ValueError, match='noise_std is 0.1, but noisy is False'):
            QNetwork(OBSERVATION, ACTION, noise_std=0.1)

    def test_weights_and_biases_start_uniform_within_the_published_bound(self):
        network = QNetwork(TensorSpec((400, )), ACTION, fc_layer_params=(300, ), noisy=True)
        for layer in layers(network):
            bound = layer.weight.shape[1]**-0.5
            for values in (layer.weight.detach(), layer.bias.detach()):
                assert values.abs().max() <= bound
            assert layer.weight.detach().std().item() == pytest.approx(bound / 3**0.5, rel=0.05)

    def test_evaluation_has_no_noise(self):
        network, x = self.network(), torch.ones(2, 3)
        with context.eval_context():
            torch.testing.assert_close(network(x)[0], network(x)[0], rtol=0, atol=0)
        network.eval()
        torch.testing.assert_close(network(x)[0], network(x)[0], rtol=0, atol=0)

    def test_replicas_have_their_own_noise(self):
        stack = self.network().make_parallel(2)
        assert isinstance(stack, NaiveParallelNetwork)
        assert stack(torch.ones(2, 3))[0].shape == (2, 2, 4)


@pytest.mark.parametrize('naive', [False, True])
def test_a_stack_has_its_dimension_in_front_of_the_actions(naive):
    network = QNetwork(OBSERVATION, ACTION, fc_layer_params=(6, ), use_naive_parallel_network=naive)
    stack = network.make_parallel(3)
    assert isinstance(stack, NaiveParallelNetwork if naive else ParallelQNetwork)
    assert stack(torch.randn(5, 3))[0].shape == (5, 3, 4)
    assert stack.copy(name='target').name == 'target'


def test_a_recurrent_q_network_has_the_state_of_its_encoder():
    network = QRNNNetwork(OBSERVATION, ACTION, fc_layer_params=(6, ), lstm_hidden_size=4, value_fc_layer_params=(7, 5),
                          dueling=True)
    assert network.is_rnn and network.state_spec == ((TensorSpec((4, )), ) * 2, )
    assert [m.output_size for m in layers(network)] == [6, 7, 10, 4, 1]
    zeros = nest.map_structure(lambda spec: spec.zeros((2, )), network.state_spec)
    x = torch.randn(2, 3)
    first, state = network(x, zeros)
    assert not torch.equal(first, network(x, state)[0])


def test_any_encoder_with_vector_output_is_accepted():
    network = QNetworkBase(OBSERVATION, ACTION, EncodingNetwork, fc_layer_params=(6, ))
    assert network(torch.randn(2, 3))[0].shape == (2, 4)
    with pytest.raises(SpecError, match='must be a vector'):
        QNetworkBase(TensorSpec((2, 3)), ACTION, lambda spec: EncodingNetwork(spec, TensorSpec((3, 2))))


def test_actions_it_cannot_have_are_rejected_with_a_remedy():
    with pytest.raises(SpecError, match='QNetwork is for discrete actions.*float'):
        QNetwork(OBSERVATION, BoundedTensorSpec((2, )))
    with pytest.raises(SpecError, match=r'one discrete action of shape \(\)'):
        QNetwork(OBSERVATION, BoundedTensorSpec((2, ), torch.int64, 0, 3))
    with pytest.raises(SpecError, match='a discrete action needs bounds'):
        QNetwork(OBSERVATION, TensorSpec((), torch.int64))
    with pytest.raises(ValueError, match='num_atoms must be an int >= 2'):
        QNetwork(OBSERVATION, ACTION, num_atoms=1)
