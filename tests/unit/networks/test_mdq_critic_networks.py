"""The two forms of the critic of multi-dimensional Q-learning, and quantized actions."""
import itertools
import math
from functools import partial

import pytest
import torch

from alfx.networks.action_quantizer import ActionQuantizer
from alfx.networks.mdq_critic_networks import MdqCriticNetwork
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

OBSERVATION = TensorSpec((3, ))
ACTION = BoundedTensorSpec((3, ), torch.float32, [-1.0, 0.0, -2.0], [1.0, 4.0, 2.0])
NESTED = {'x': BoundedTensorSpec((2, ), torch.float32, -1, 3), 'y': BoundedTensorSpec((), torch.float32, 0, 1)}
BINS = 4


def network(action_spec=ACTION, num_bins=BINS, scale=1.0, **kwargs):
    layers = dict(obs_encoding_layer_params=(6, ), pre_encoding_layer_params=(5, ), mid_encoding_layer_params=(7, ),
                  post_encoding_layer_params=(5, ), free_form_fc_layer_params=(6, ), activation=torch.tanh)
    net = MdqCriticNetwork((OBSERVATION, action_spec), partial(ActionQuantizer, action_bins=num_bins),
                           **{**layers, **kwargs})
    torch.nn.init.normal_(net._components._list[-1].weight, std=scale)  # outputs that differ
    return net


class TestActionQuantizer:

    def test_bins_are_spread_evenly_from_bound_to_bound(self):
        quantizer = ActionQuantizer(BoundedTensorSpec((1, ), torch.float32, -2, 4), action_bins=4)
        torch.testing.assert_close(quantizer.action(torch.arange(4)[:, None]), torch.tensor([[-2.0], [0], [2], [4]]))
        bins = quantizer.bins(torch.tensor([[-2.0], [-1.1], [-0.9], [4.0], [9.0]]))
        assert bins.flatten().tolist() == [0, 0, 1, 3, 3]
        torch.testing.assert_close(quantizer.position(torch.arange(4)), torch.tensor([-1, -1 / 3, 1 / 3, 1]))

    def test_bins_can_be_the_centers_of_equal_parts(self):
        quantizer = ActionQuantizer(BoundedTensorSpec((1, ), torch.float32, -2, 6), action_bins=4, rep_mode='center')
        torch.testing.assert_close(quantizer.action(torch.arange(4)[:, None]), torch.tensor([[-1.0], [1], [3], [5]]))
        assert quantizer.bins(torch.tensor([[-2.0], [-0.1], [0.1], [6.0]])).flatten().tolist() == [0, 0, 1, 3]

    @pytest.mark.parametrize('spec', [ACTION, NESTED])
    def test_bins_and_actions_are_inverse_to_each_other(self, spec):
        quantizer = ActionQuantizer(spec, action_bins=5)
        bins = torch.randint(0, 5, (20, quantizer.num_components))
        action = quantizer.action(bins)
        assert torch.equal(quantizer.bins(action), bins)
        torch.testing.assert_close(quantizer.normalized(action), quantizer.position(bins))

    def test_unquantizable_actions_are_rejected(self):
        with pytest.raises(ValueError, match='action_bins must be an int >= 2'):
            ActionQuantizer(ACTION, action_bins=1)
        with pytest.raises(ValueError, match="rep_mode must be 'boundary' or 'center'.*'middle'"):
            ActionQuantizer(ACTION, rep_mode='middle')
        with pytest.raises(SpecError, match='continuous'):
            ActionQuantizer(BoundedTensorSpec((), torch.int64, 0, 3))
        with pytest.raises(SpecError, match='expected different bounds of each component'):
            ActionQuantizer(BoundedTensorSpec((2, ), torch.float32, [0.0, -1.0], [0.0, 1.0]))
        with pytest.raises(SpecError, match='finite bounds'):
            ActionQuantizer(BoundedTensorSpec((1, ), torch.float32, -math.inf, math.inf))


def slow_terms(net, observation, bins, alpha):
    """Return ``(Q_adv, log pi)`` of one action, component by component, written from the formulas of the module."""
    encoded = net._observation_encoder(observation[None])[0][0]
    value, log_pi = 0.0, 0.0
    for d in range(len(bins)):
        before = [net.action_qt.position(torch.tensor(float(b))) if i < d else torch.tensor(0.0)
                  for i, b in enumerate(bins[:-1])]
        x = torch.cat([encoded, *(b[None] for b in before)])
        for i, layer in enumerate(net._components._list):
            own = 0 if layer.weight.shape[0] == 1 else d
            x = layer.weight[own] @ x + layer.bias[own]
            if i < len(net._components._list) - 1:
                x = torch.tanh(x)
        mean = sum(math.exp(q / alpha) for q in x.tolist()) / len(x)
        soft_value = alpha * math.log(mean)
        value += x[bins[d]].item() - (soft_value if d > 0 else 0.0)
        log_pi += (x[bins[d]].item() - soft_value) / alpha - math.log(len(x))
    return value, log_pi


@pytest.mark.parametrize('alpha', [0.2, 1.5])
def test_the_advantage_form_matches_a_slow_loop(alpha):
    net = network()
    observation, bins = torch.randn(6, 3), torch.randint(0, BINS, (6, 3))
    found = net.advantage_form(observation, net.action_qt.action(bins), alpha)
    expected = [slow_terms(net, observation[b], bins[b].tolist(), alpha)[0] for b in range(6)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_the_policy_is_the_boltzmann_distribution_of_the_advantage_form():
    alpha, net = 0.7, network()
    observation = torch.randn(3)
    every_action = list(itertools.product(range(BINS), repeat=3))
    terms = [slow_terms(net, observation, bins, alpha) for bins in every_action]
    values, log_pi = torch.tensor(terms).unbind(1)
    torch.testing.assert_close(torch.log_softmax(values / alpha, 0), log_pi, rtol=1e-4, atol=1e-4)
    count = 20000
    actions, neg_entropy = net.get_action(observation.expand(count, 3), alpha)
    index = net.action_qt.bins(actions) @ torch.tensor([BINS**2, BINS, 1])
    frequency = torch.bincount(index, minlength=BINS**3) / count
    torch.testing.assert_close(frequency, log_pi.exp(), rtol=0, atol=0.012)
    # the exact entropies of the components, given those drawn before, are on average the entropy of all
    assert neg_entropy.mean().item() == pytest.approx((log_pi.exp() * log_pi).sum().item(), abs=0.02)


def test_one_component_is_a_table_of_values():
    net = network(BoundedTensorSpec((1, ), torch.float32, -1, 1))
    observation = torch.randn(2, 3)
    encoded = net._observation_encoder(observation)[0]
    table = net._components.of_component(encoded, 0)
    for i in range(BINS):
        action = net.action_qt.action(torch.full((2, 1), i))
        for alpha in (0.1, 10.0):
            torch.testing.assert_close(net.advantage_form(observation, action, alpha), table[:, i])
    greedy, _ = net.get_action(observation, 1.0, greedy=True)
    assert torch.equal(net.action_qt.bins(greedy)[:, 0], table.argmax(1))


def test_one_component_matches_its_value_among_all_components():
    net = network()
    x = torch.randn(5, 3, net._components._list[0].input_size)
    together = net._components(x)
    for d in range(3):
        torch.testing.assert_close(net._components.of_component(x[:, d], d), together[:, d])


def test_a_component_depends_only_on_earlier_components():
    net = network()
    before = net._before
    assert before.tolist() == [[0, 0], [1, 0], [1, 1]]


def test_a_cold_policy_is_greedy_and_a_hot_one_uniform():
    net, observation = network(), torch.randn(50, 3)
    greedy, _ = net.get_action(observation, 1.0, greedy=True)
    cold, neg_entropy = net.get_action(observation, 1e-5)
    torch.testing.assert_close(cold, greedy)
    assert neg_entropy.abs().max() < 0.1
    _, neg_entropy = net.get_action(observation, 1e5)
    assert net.get_uniform_prior_logpi() == pytest.approx(-3 * math.log(BINS))
    torch.testing.assert_close(neg_entropy, torch.full((50, ), -3 * math.log(BINS)))


def test_the_free_form_sees_actions_between_their_bounds():
    net = network(NESTED, num_critic_replicas=3)
    observation = torch.randn(5, 3)
    action = {'x': torch.rand(5, 2) * 4 - 1, 'y': torch.rand(5)}
    values, _ = net((observation, action))
    assert values.shape == (5, 3)
    normalized = torch.cat([(action['x'] - 1) / 2, action['y'][:, None] * 2 - 1], 1)
    torch.testing.assert_close(values, net.free_form((observation, normalized))[0])
    sampled, _ = net.get_action(observation, 1.0)
    assert sampled['x'].shape == (5, 2) and sampled['y'].shape == (5, )


def test_both_forms_are_trained_separately():
    net, observation, action = network(), torch.randn(5, 3), torch.rand(5, 3)
    net((observation, action))[0].sum().backward()
    without = {name for name, p in net.named_parameters() if p.grad is None}
    assert without == {name for name, _ in net.named_parameters() if not name.startswith('_free_form.')}
    net.zero_grad(set_to_none=True)
    net.advantage_form(observation, action, 1.0).sum().backward()
    assert {name for name, p in net.named_parameters() if p.grad is None} == {
        name for name, _ in net.named_parameters() if name.startswith('_free_form.')}


def test_an_input_that_is_no_pair_is_rejected():
    with pytest.raises(SpecError, match='observation_spec, action_spec'):
        MdqCriticNetwork(OBSERVATION)
