"""Contract tests of all networks, as a mixin; see test_networks.py."""
import copy
import pickle

import pytest
import torch
from torch import nn

from alfx import layers, nest
from alfx.networks.network import NaiveParallelNetwork, Network
from alfx.networks.param_networks import StackedParameters
from alfx.tensor_specs import BoundedTensorSpec, SpecError, extract_spec

STACK = 3


def random_batch(spec, *outer):
    """Return a nest of random tensors ``[*outer, ...]`` within the bounds of ``spec``."""
    return nest.map_structure(lambda s: s.sample(outer) if isinstance(s, BoundedTensorSpec) else s.randn(outer), spec)


def leaves(output):
    return nest.flatten(output)


def assert_same(left, right, **tolerance):
    nest.assert_same_structure(left, right)
    for a, b in zip(leaves(left), leaves(right)):
        torch.testing.assert_close(a, b, **tolerance)


def state_after_one_step(network, batch_size):
    """Return a state that the network reaches from zeros, so that it is not all zeros."""
    zeros = nest.map_structure(lambda s: s.zeros((batch_size, )), network.state_spec)
    return network(random_batch(network.input_tensor_spec, batch_size), zeros)[1]


def set_parameters(single, stack, i):
    """Give ``single`` the parameters of the i-th network of ``stack``."""
    with torch.no_grad():
        for own, (value, is_stacked) in zip(single.parameters(), parameters_of_one(stack, i), strict=True):
            own.copy_(value.view(STACK, *own.shape)[i] if is_stacked else value)


def one_of(stacked, i):
    return nest.map_structure(lambda x: x[:, i], stacked)


def parameters_of_one(module, i):
    """Return ``(parameter, is_stacked)`` of all parameters of the i-th network, in order."""
    if isinstance(module, (NaiveParallelNetwork, layers.NaiveParallelLayer)):
        copies = module._networks if isinstance(module, NaiveParallelNetwork) else module._layers
        return [(p, False) for p in copies[i].parameters()] if isinstance(copies[i], nn.Module) else []
    own = [(p, True) for p in module._parameters.values() if p is not None]
    return own + [pair for child in module.children() for pair in parameters_of_one(child, i)]


class NetworkContract:
    """Mixin whose subclasses define ``network()``, which creates the network."""

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
        new_parameters = dict(new.named_parameters())
        parameters = dict(network.named_parameters())
        assert {k: v.shape for k, v in new_parameters.items()} == {k: v.shape for k, v in parameters.items()}
        assert bool(parameters) == self.has_parameters
        assert not {id(p) for p in new_parameters.values()} & {id(p) for p in parameters.values()}
        weights = [name for name, p in parameters.items() if p.ndim > 1 and p.std() > 1e-6]
        assert all(not torch.equal(parameters[name], new_parameters[name]) for name in weights)
        inputs, state = random_batch(network.input_tensor_spec, 4), state_after_one_step(network, 4)
        assert_same_specs(extract_spec(new(inputs, state)[0]), extract_spec(network(inputs, state)[0]))

    def test_copying_a_singleton_returns_the_same_object(self):
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

    @pytest.mark.parametrize('device', ['meta', pytest.param('cuda', marks=pytest.mark.gpu)])
    def test_everything_moves_to_another_device_with_the_network(self, device):
        network = self.network()
        inputs, state = random_batch(network.input_tensor_spec, 4), state_after_one_step(network, 4)
        network.to(device)
        output = network(*nest.map_structure(lambda x: x.to(device), (inputs, state)))
        assert {x.device.type for x in leaves(output)} == {device}

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
    def test_a_stack_matches_its_networks_one_by_one(self, stacked_inputs):
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
                own = one_of(inputs, i) if stacked_inputs else inputs
                results.append(single(own, one_of(expected_state, i)))
            expected, expected_state = nest.stack(results, dim=1)
        assert_same(output, expected, rtol=1e-4, atol=1e-5)
        assert_same(state, expected_state, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize('stacked_inputs', [False, True])
    def test_given_parameters_match_networks_that_own_them(self, stacked_inputs):
        network = self.network().eval()
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()) or not self.has_parameters:
            with pytest.raises(ValueError, match='batch norm keeps statistics|expected a network with parameters'):
                StackedParameters(network)
            return
        stacked = StackedParameters(network, STACK).eval()
        assert not list(stacked.parameters())
        theta = stacked.initial_parameters(STACK).requires_grad_()
        inputs = random_batch(network.input_tensor_spec, *((5, STACK) if stacked_inputs else (5, )))
        states = [nest.map_structure(torch.Tensor.detach, state_after_one_step(network, 5)) for _ in range(STACK)]
        state = nest.stack(states, dim=1) if network.is_rnn else ()
        torch.manual_seed(1)
        output, new_state = stacked.apply_parameters(theta, inputs, state)
        singles = [stacked.single_network(row).eval() for row in theta.detach()]
        torch.manual_seed(1)
        expected = [single(one_of(inputs, i) if stacked_inputs else inputs, one_of(state, i))
                    for i, single in enumerate(singles)]
        assert_same((output, new_state), nest.stack(expected, dim=1), rtol=1e-4, atol=1e-5)
        values = [(x.float() * (i + 1)).nan_to_num(0, 0, 0).sum() for i, x in enumerate(leaves(output))]
        sum(v for v in values if v.requires_grad).backward()
        values = [[(x.float() * (i + 1)).nan_to_num(0, 0, 0).sum() for i, x in enumerate(leaves(own))]
                  for own, _ in expected]
        sum(v for own in values for v in own if v.requires_grad).backward()
        expected_gradient = torch.stack([torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                                                    for p in single.parameters()]) for single in singles])
        torch.testing.assert_close(theta.grad, expected_gradient, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize('stacked_inputs', [False, True])
    def test_leading_networks_of_a_stack_match_the_whole_stack(self, stacked_inputs):
        stack = self.network().make_parallel(STACK).eval()
        inputs = random_batch(stack.input_tensor_spec, *((5, STACK) if stacked_inputs else (5, )))
        state = state_after_one_step(stack, 5)
        for k in range(1, STACK + 1):
            torch.manual_seed(1)
            output, expected_state = stack(inputs, state)
            torch.manual_seed(1)
            first, new_state = stack.first_of_stack(inputs, state, k)
            assert_same(first, nest.map_structure(lambda x: x[:, :k], output), rtol=1e-4, atol=1e-5)  # noqa: B023
            assert_same(new_state, expected_state, rtol=0, atol=0)

    def test_a_stack_can_be_copied_and_knows_its_output(self):
        stack = self.network().make_parallel(STACK)
        new = stack.copy()
        inputs = random_batch(stack.input_tensor_spec, 5)
        zeros = nest.map_structure(lambda s: s.zeros((5, )), stack.state_spec)
        output, state = new(inputs, zeros)
        assert_same_specs(extract_spec(output), stack.output_spec)
        assert_same_specs(extract_spec(state), stack.state_spec)
        assert not {id(p) for p in new.parameters()} & {id(p) for p in stack.parameters()}

    def test_inputs_of_a_wrong_shape_are_rejected_by_name(self):
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

    def test_a_recurrent_network_needs_a_state(self):
        network = self.network()
        if network.is_rnn:
            with pytest.raises(SpecError, match='called without a state'):
                network(random_batch(network.input_tensor_spec, 4))


def assert_same_specs(found, expected):
    """Return whether two specs are equal except for their bounds."""
    nest.assert_same_structure(expected, found)
    for a, b in zip(leaves(found), leaves(expected)):
        assert (tuple(a.shape), a.dtype) == (tuple(b.shape), b.dtype)
