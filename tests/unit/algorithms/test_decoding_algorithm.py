"""Decoding a target from an input."""
from functools import partial

import pytest
import torch
from torch import nn

from alfx import nest
from alfx.algorithms.decoding_algorithm import DecodingAlgorithm
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.optimizers import SGD
from alfx.tensor_specs import TensorSpec


def decoder(size=2, **args):
    return EncodingNetwork(TensorSpec((3, )), last_layer_size=size, last_activation=torch.tanh, **args)


def test_the_loss_of_a_sample_is_the_weighted_sum_over_the_target():
    algorithm = DecodingAlgorithm(decoder(), loss_weight=0.5)
    inputs, target = torch.randn(4, 3), torch.randn(4, 2)
    step = algorithm.train_step((inputs, target))
    for b in range(4):
        error = sum((step.output[b, i].item() - target[b, i].item())**2 for i in range(2))
        assert step.info.extra[b].item() == pytest.approx(error, rel=1e-5)
        assert step.info.loss[b].item() == pytest.approx(0.5 * error, rel=1e-5)
    assert torch.equal(algorithm.predict_step(inputs).output, step.output)
    assert algorithm.calc_loss(algorithm.rollout_step((inputs, target)).info).loss.shape == (4, )


def test_any_loss_with_a_batch_dimension_is_accepted():
    inputs, target = torch.randn(4, 3), torch.randint(0, 5, (4, ))
    algorithm = DecodingAlgorithm(decoder(5), loss=nn.CrossEntropyLoss(reduction='none'))
    step = algorithm.train_step((inputs, target))
    expected = -step.output.log_softmax(-1)[torch.arange(4), target]
    torch.testing.assert_close(step.info.loss, expected)


def test_a_loss_averaged_over_the_batch_is_rejected():
    with pytest.raises(ValueError, match='expected a loss of shape .B. or .B, .... with B = 4, found \\(\\)'):
        DecodingAlgorithm(decoder(), loss=nn.MSELoss()).train_step((torch.randn(4, 3), torch.randn(4, 2)))


def test_a_target_that_would_be_broadcast_is_rejected():
    with pytest.raises(ValueError, match='with the shape of the decoder output, \\(4, 1\\), found \\(4,\\)'):
        DecodingAlgorithm(decoder(1)).train_step((torch.randn(4, 3), torch.randn(4)))


def test_a_recurrent_decoder_passes_its_state_on():
    network = LSTMEncodingNetwork(TensorSpec((3, )), hidden_size=(2, ))
    algorithm = DecodingAlgorithm(network)
    state = nest.map_structure(lambda spec: torch.zeros(4, *spec.shape), algorithm.train_state_spec)
    inputs = torch.randn(4, 3)
    step = algorithm.train_step((inputs, torch.randn(4, 2)), state)
    output, new_state = network(inputs, state)
    assert torch.equal(step.output, output) and torch.equal(step.state[0][0], new_state[0][0])


def test_a_constructor_makes_the_decoder_and_training_reduces_the_loss():
    torch.manual_seed(0)
    algorithm = DecodingAlgorithm(partial(decoder, fc_layer_params=(8, )))
    optimizer = SGD(lr=0.05)
    optimizer.add_param_group({'params': list(algorithm.parameters())})
    inputs = torch.randn(16, 3)
    target, losses = 0.5 * inputs[:, :2].tanh(), []
    for _ in range(50):
        loss = algorithm.train_step((inputs, target)).info.loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
