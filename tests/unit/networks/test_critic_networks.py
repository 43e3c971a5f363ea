"""Properties of critics; tests of every network are in tests/contract/test_networks.py."""
import math

import pytest
import torch
from torch import nn

from alfx import gin_utils, nest
from alfx.layers import FC
from alfx.nest.utils import NestConcat, NestMultiply
from alfx.networks.block_networks import LayerNorm
from alfx.networks.critic_networks import (CriticNetwork, CriticQuantileNetwork, CriticRNNNetwork,
                                           ParallelCriticNetwork)
from alfx.networks.network import NaiveParallelNetwork
from alfx.networks.preprocessors import CosineEmbeddingPreprocessor
from alfx.norm_layers import BatchNorm, RmsNorm
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

OBSERVATION = TensorSpec((3, ))
ACTION = BoundedTensorSpec((2, ), torch.float32, -1.0, 1.0)
PAIR = (OBSERVATION, ACTION)


def inputs(batch_size=4):
    return torch.randn(batch_size, 3), torch.rand(batch_size, 2) * 2 - 1


def linear(network, index):
    return [m for m in network.modules() if isinstance(m, FC)][index]


def check_first_of_stack(stack, pair, k):
    """Compare values and gradients of ``first_of_stack`` with those of the whole stack, sliced afterwards."""

    def evaluate(compute):
        leaves = [x.clone().requires_grad_() for x in pair]
        values = compute(tuple(leaves))
        weights = torch.linspace(-1, 1, values.numel(), dtype=values.dtype).view(values.shape)
        return values, *torch.autograd.grad((values * weights).sum(), [*leaves, *stack.parameters()])

    expected, actual = evaluate(lambda x: stack(x)[0][:, :k]), evaluate(lambda x: stack.first_of_stack(x, (), k)[0])
    assert stack._first_networks(k) is not None
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class TestCriticNetwork:

    def test_the_value_matches_the_layers_applied_by_hand(self):
        critic = CriticNetwork(PAIR, observation_fc_layer_params=(5, ), action_fc_layer_params=(4, ),
                               joint_fc_layer_params=(6, ))
        observation, action = inputs()
        encoded = [torch.relu(x @ linear(critic, i).weight.T + linear(critic, i).bias)
                   for i, x in enumerate((observation, action))]
        joint = torch.relu(torch.cat(encoded, -1) @ linear(critic, 2).weight.T + linear(critic, 2).bias)
        expected = (joint @ linear(critic, 3).weight.T + linear(critic, 3).bias)[:, 0]
        torch.testing.assert_close(critic((observation, action))[0], expected)

    def test_a_critic_without_hidden_layers_is_linear_in_both_inputs(self):
        critic = CriticNetwork(PAIR)
        with torch.no_grad():
            linear(critic, 0).weight.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]))
        observation, action = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[0.5, 1.0]])
        # 1 - 3 + 2 + 5
        assert critic((observation, action))[0].item() == pytest.approx(5.0)

    def test_initial_values_are_near_zero(self):
        critic = CriticNetwork(PAIR, joint_fc_layer_params=(64, 64))
        assert critic(inputs(100))[0].abs().max() < 0.1

    def test_encodings_are_combined_as_requested(self):
        critic = CriticNetwork(PAIR, observation_fc_layer_params=(4, ), action_fc_layer_params=(4, ),
                               observation_action_combiner=NestMultiply())
        observation, _ = inputs()
        with torch.no_grad():
            linear(critic, 1).weight.zero_()
        values = critic((observation, torch.ones(4, 2)))[0]
        torch.testing.assert_close(values, linear(critic, 2).bias.expand(4))

    def test_processors_can_be_constructed_from_the_specs(self):
        seen = []

        def make(spec):
            seen.append(spec)
            return FC(spec.numel, 7)

        critic = CriticNetwork(PAIR, observation_input_processors_ctor=make, action_input_processors_ctor=make)
        assert seen == [OBSERVATION, ACTION]
        assert linear(critic, 2).input_size == 14

    def test_normalization_and_activation_of_the_last_layer(self):
        critic = CriticNetwork(PAIR, TensorSpec((3, )), joint_fc_layer_params=(5, ), use_fc_ln=True,
                               last_use_fc_ln=True, last_layer_activation=torch.tanh)
        assert sum(isinstance(m, nn.LayerNorm) for m in critic.modules()) == 2
        values = critic(inputs())[0]
        assert values.abs().max() < 1
        torch.testing.assert_close(values.atanh().mean(-1), torch.zeros(4), atol=1e-4, rtol=0)
        with_batch_norm = CriticNetwork(PAIR, joint_fc_layer_params=(5, ), use_fc_bn=True, last_use_fc_bn=True)
        assert sum(isinstance(m, nn.BatchNorm1d) for m in with_batch_norm.modules()) == 2

    @pytest.mark.parametrize('shape', [(), (3, ), (3, 5)])
    @pytest.mark.parametrize('naive', [False, True])
    def test_values_have_the_shape_of_the_spec_behind_the_stack(self, shape, naive):
        critic = CriticNetwork(PAIR, TensorSpec(shape), joint_fc_layer_params=(5, ), use_naive_parallel_network=naive)
        stack = critic.make_parallel(2)
        assert isinstance(stack, NaiveParallelNetwork if naive else ParallelCriticNetwork)
        assert critic(inputs())[0].shape == (4, *shape)
        assert stack(inputs())[0].shape == (4, 2, *shape)
        assert stack.output_spec == TensorSpec((2, *shape))
        assert not stack.is_rnn and stack.state_spec == ()

    def test_a_stack_concatenates_shared_inputs_once(self, monkeypatch):
        stack = CriticNetwork(PAIR, joint_fc_layer_params=(5, )).make_parallel(3)
        stack(inputs())
        combined, original = [], torch.cat
        monkeypatch.setattr(torch, 'cat', lambda tensors, dim: combined.append(original(tensors, dim)) or combined[-1])
        stack(inputs())
        assert [x.shape for x in combined] == [(4, 5)]

    def test_a_stack_may_get_one_action_for_all_or_one_for_each(self):
        stack = CriticNetwork(PAIR, joint_fc_layer_params=(5, )).make_parallel(2)
        shared = inputs()
        own = nest.map_structure(lambda x: x.unsqueeze(1).expand(-1, 2, -1), shared)
        torch.testing.assert_close(stack(shared)[0], stack(own)[0])

    @pytest.mark.parametrize('layers', [
        dict(joint_fc_layer_params=(16, 16)),
        dict(joint_fc_layer_params=(16, ), use_fc_ln=True, last_use_fc_ln=True),
        dict(observation_fc_layer_params=(8, ), joint_fc_layer_params=(16, ), action_input_processors=torch.tanh),
        dict(observation_fc_layer_params=(8, ), action_fc_layer_params=(8, ),
             observation_action_combiner=NestMultiply()),
        {},
    ])
    @pytest.mark.parametrize('shape', [(), (2, )])
    @pytest.mark.parametrize('stacked_inputs', [False, True])
    def test_leading_replicas_have_the_values_and_gradients_of_the_stack(self, layers, shape, stacked_inputs):
        stack = CriticNetwork(PAIR, TensorSpec(shape), **layers).make_parallel(3)
        pair = inputs()
        if stacked_inputs:
            pair = nest.map_structure(lambda x: torch.stack([x, -x, x / 2], 1), pair)
        for p in stack.parameters():
            nn.init.normal_(p)
        for k in (1, 2):
            check_first_of_stack(stack, pair, k)

    def test_leading_image_replicas_have_the_values_and_gradients_of_the_stack(self):
        spec = (TensorSpec((2, 9, 9)), ACTION)
        stack = CriticNetwork(spec, observation_conv_layer_params=((4, 3, 2), (3, 2, 1, 0, 2)),
                              joint_fc_layer_params=(6, )).make_parallel(3)
        pair = torch.randn(4, 2, 9, 9), torch.rand(4, 2)
        for k in (1, 2):
            check_first_of_stack(stack, pair, k)

    def test_leading_replicas_are_computed_without_the_others(self):
        stack = CriticNetwork(PAIR, joint_fc_layer_params=(5, 5), use_fc_ln=True).make_parallel(3)
        pair = inputs()
        expected = stack(pair)[0][:, :2]
        for p in stack.parameters():
            p.data[2] = torch.nan
        first = stack.first_of_stack(pair, (), 2)[0]
        torch.testing.assert_close(first, expected)
        gradients = torch.autograd.grad(first.sum(), list(stack.parameters()))
        assert all(g[:2].isfinite().all() and not g[2].any() for g in gradients)

    def test_batch_norm_statistics_are_those_of_the_whole_stack(self):
        """Statistics are those of the whole stack even if only the first networks are evaluated."""
        stack, other = (CriticNetwork(PAIR, joint_fc_layer_params=(5, ), use_fc_bn=True).make_parallel(2)
                        for _ in range(2))
        other.load_state_dict(stack.state_dict())
        pair = inputs()
        assert torch.equal(stack.first_of_stack(pair, (), 1)[0], other(pair)[0][:, :1])
        assert all(torch.equal(a, b) for a, b in zip(stack.buffers(), other.buffers()))

    def test_inputs_for_the_first_of_a_stack_are_checked(self):
        stack = CriticNetwork(PAIR, joint_fc_layer_params=(5, )).make_parallel(2)
        for _ in range(2):
            with pytest.raises(SpecError, match='expected .* found'):
                stack.first_of_stack((torch.zeros(4, 3), torch.zeros(4, 3)), (), 1)
            stack(inputs())

    def test_replicas_begin_different_and_a_copy_of_the_stack_too(self):
        stack = CriticNetwork(PAIR, joint_fc_layer_params=(5, )).make_parallel(2)
        other, pair = stack.copy(name='target'), inputs()
        values = torch.cat([stack(pair)[0], other(pair)[0]], dim=1)
        assert all(not torch.equal(values[:, i], values[:, j]) for i in range(4) for j in range(i))
        assert other.name == 'target'
        other.load_state_dict(stack.state_dict())
        torch.testing.assert_close(stack(pair)[0], other(pair)[0])

    def test_the_action_gradient_matches_finite_differences(self):
        critic = CriticNetwork(PAIR, joint_fc_layer_params=(16, ), activation=torch.tanh)
        nn.init.normal_(linear(critic, 1).weight)
        observation, action = inputs(1)
        action.requires_grad_()
        gradient, = torch.autograd.grad(critic((observation, action))[0].sum(), action)
        for i in range(2):
            step = torch.zeros(1, 2)
            step[0, i] = 1e-2
            difference = critic((observation, action + step))[0] - critic((observation, action - step))[0]
            assert gradient[0, i].item() == pytest.approx(difference.item() / 2e-2, rel=1e-2, abs=1e-3)

    def test_unsupported_inputs_are_rejected_with_a_remedy(self):
        with pytest.raises(SpecError, match='observation_spec, action_spec'):
            CriticNetwork(OBSERVATION)
        with gin_utils.loaded('ppo_cart_pole', ['prepare_inputs.enabled = False']):
            with pytest.raises(SpecError, match='CriticNetwork.action.*set input_preprocessors'):
                CriticNetwork((OBSERVATION, BoundedTensorSpec((), torch.int64, 0, 2)))
            with pytest.raises(SpecError, match='CriticNetwork.action: expected one tensor, found a nest of 2'):
                CriticNetwork((OBSERVATION, (ACTION, ACTION)))
        with pytest.raises(ValueError, match='cannot be used together'):
            CriticNetwork(PAIR, action_input_processors=FC(2, 2), action_input_processors_ctor=lambda spec: FC(2, 2))


class TestCriticRNNNetwork:

    def test_recurrent_critics_work_and_a_stack_has_one_state_each(self):
        critic = CriticRNNNetwork(PAIR, joint_fc_layer_params=(6, ), lstm_hidden_size=(5, 4))
        assert critic.is_rnn
        assert critic.state_spec == tuple((TensorSpec((n, )), ) * 2 for n in (5, 4))
        stack = critic.make_parallel(2)
        assert stack.state_spec == tuple((TensorSpec((2, n)), ) * 2 for n in (5, 4))
        zeros = nest.map_structure(lambda spec: spec.zeros((4, )), stack.state_spec)
        pair = inputs()
        first, state = stack(pair, zeros)
        second, _ = stack(pair, state)
        assert first.shape == (4, 2) and not torch.equal(first, second)
        torch.testing.assert_close(stack(pair, zeros)[0], first)


class TestCriticQuantileNetwork:

    def network(self, **kwargs):
        return CriticQuantileNetwork(PAIR, TensorSpec((6, )), obs_act_joint_fc_layer_params=(5, ), tau_embedding_dim=4,
                                     obs_act_tau_joint_fc_layer_params=(7, ), use_fc_ln=False, **kwargs)

    def test_quantiles_match_a_loop_over_the_fractions(self):
        critic = self.network()
        (observation, action), tau = inputs(3), torch.rand(3, 6)
        quantiles, _ = critic(((observation, action), tau))
        joint_layer, tau_layer, hidden_layer, last_layer = (linear(critic, i) for i in range(4))
        for b in range(3):
            joint = torch.relu(joint_layer.weight @ torch.cat([observation[b], action[b]]) + joint_layer.bias)
            for i in range(6):
                cosines = torch.tensor([math.cos(math.pi * k * tau[b, i].item()) for k in range(4)])
                modulation = torch.sigmoid(tau_layer.weight @ cosines + tau_layer.bias)
                hidden = torch.relu(hidden_layer.weight @ (joint * modulation) + hidden_layer.bias)
                expected = last_layer.weight @ hidden + last_layer.bias
                torch.testing.assert_close(quantiles[b, i:i + 1], expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize('shape', [(), (2, )])
    def test_the_quantiles_are_the_last_dimension(self, shape):
        critic = self.network(output_tensor_spec=TensorSpec(shape))
        pair, tau = inputs(), torch.rand(4, 6)
        assert critic((pair, tau))[0].shape == (4, *shape, 6)
        assert critic.make_parallel(3)((pair, tau))[0].shape == (4, 3, *shape, 6)

    def test_a_fraction_gives_the_same_quantile_at_any_position(self):
        critic, pair, tau = self.network(), inputs(), torch.rand(4, 6)
        torch.testing.assert_close(critic((pair, tau.flip(1)))[0], critic((pair, tau))[0].flip(1))

    def test_invalid_arguments_are_rejected(self):
        with pytest.raises(ValueError, match='must end in 5, found'):
            self.network(tau_fc_layer_params=(4, ))
        with pytest.raises(SpecError, match='tau_spec of shape'):
            CriticQuantileNetwork(PAIR, TensorSpec(()))
        with pytest.raises(SpecError, match=r'must map the fractions to \(6, 4\).*found \(6, 3\)'):
            self.network(tau_input_processors=CosineEmbeddingPreprocessor(TensorSpec((6, )), 3))

    def test_own_initializers_and_embeddings_are_used(self):
        critic = self.network(last_kernel_initializer=nn.init.ones_, kernel_initializer=nn.init.zeros_,
                              tau_input_processors=CosineEmbeddingPreprocessor(TensorSpec((6, )), 4))
        assert (linear(critic, 3).weight == 1).all() and (linear(critic, 0).weight == 0).all()


def test_nested_observations_and_actions_can_be_concatenated():
    critic = CriticNetwork(({'a': OBSERVATION, 'b': OBSERVATION}, (ACTION, ACTION)), joint_fc_layer_params=(5, ),
                           observation_preprocessing_combiner=NestConcat(), action_preprocessing_combiner=NestConcat())
    assert linear(critic, 0).input_size == 10
    (a, u), (b, v) = inputs(), inputs()
    stack = critic.make_parallel(2)
    assert stack(({'a': a, 'b': b}, (u, v)))[0].shape == (4, 2)


def test_critics_of_a_stack_have_separate_batch_norm():
    arguments = dict(joint_fc_layer_params=(6, ), norm=BatchNorm, norm_position='after', input_norm=BatchNorm)
    stack, naive = (CriticNetwork(PAIR, use_naive_parallel_network=naive, **arguments).make_parallel(2)
                    for naive in (False, True))
    parameters = [torch.stack(list(x)) for x in zip(*(copy.parameters() for copy in naive.copies))]
    for stacked, separate in zip(stack.parameters(), parameters, strict=True):
        stacked.data.copy_(separate.view(stacked.shape))
    pair = inputs(8)
    torch.testing.assert_close(stack(pair), naive(pair))
    for stacked, separate in zip(stack.buffers(), zip(*(copy.buffers() for copy in naive.copies)), strict=True):
        torch.testing.assert_close(stacked, torch.cat(list(separate)) if stacked.ndim else separate[0])


@pytest.mark.parametrize('norm', [nn.LayerNorm, LayerNorm, RmsNorm, BatchNorm])
@pytest.mark.parametrize('batch', [1, 2, 4])
def test_a_stack_normalizes_shared_inputs_like_its_networks(norm, batch):
    network = CriticNetwork((TensorSpec((3, )), TensorSpec((2, ))), input_norm=norm, joint_fc_layer_params=(16, ))
    stack = network.make_parallel(2).eval()
    for parameter in stack.parameters():
        nn.init.normal_(parameter)
    inputs = torch.randn(batch, 3), torch.randn(batch, 2)
    stacked = nest.map_structure(lambda x: x.unsqueeze(1).expand(-1, 2, -1), inputs)
    torch.testing.assert_close(stack(inputs)[0], stack(stacked)[0])


@pytest.mark.parametrize('is_stacked', [(False, True), (True, False)])
def test_a_stack_shares_one_of_observation_and_action(is_stacked):
    critic = CriticNetwork((TensorSpec((3, )), TensorSpec((2, ))), joint_fc_layer_params=(8, ))
    shared = torch.randn(4, 3), torch.randn(4, 2)
    each = tuple(x.unsqueeze(1).expand(-1, 5, -1) if stacked else x for x, stacked in zip(shared, is_stacked))
    for stack in (critic.make_parallel(5), critic.make_parallel(5)):
        torch.testing.assert_close(stack(each)[0], stack(shared)[0])
        torch.testing.assert_close(stack.first_of_stack(each, (), 2)[0], stack(shared)[0][:, :2])
