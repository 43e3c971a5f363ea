"""A subclass that overrides ``forward`` computes it in a stack of networks as well."""
import pytest
import torch

from alfx.layers import FC, make_parallel_net
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.q_networks import QNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((), torch.int64, minimum=0, maximum=2)
MADE = {
    QNetwork: lambda cls: cls(OBSERVATION, ACTION, fc_layer_params=(8, )),
    ValueNetwork: lambda cls: cls(OBSERVATION, fc_layer_params=(8, )),
    EncodingNetwork: lambda cls: cls(OBSERVATION, fc_layer_params=(8, )),
}


def plus_100(base):
    class Plus100(base):
        def forward(self, inputs, *args):
            result = super().forward(inputs, *args)
            return result + 100 if isinstance(result, torch.Tensor) else (result[0] + 100, result[1])
    return Plus100


@pytest.mark.parametrize('base', MADE)
def test_a_stack_of_networks_computes_an_overridden_forward(base):
    stack = MADE[base](plus_100(base)).make_parallel(3)
    output, _ = stack(torch.randn(5, 3))
    assert output.shape[:2] == (5, 3) and bool((output > 50).all())


def test_a_stack_of_critics_computes_an_overridden_forward():
    critic = plus_100(CriticNetwork)((OBSERVATION, TensorSpec((2, ))), joint_fc_layer_params=(8, ))
    output, _ = critic.make_parallel(2)((torch.randn(5, 3), torch.randn(5, 2)))
    assert output.shape == (5, 2) and bool((output > 50).all())


def test_a_stack_of_layers_computes_an_overridden_forward():
    output = make_parallel_net(plus_100(FC)(3, 4), 2)(torch.randn(5, 2, 3))
    assert output.shape == (5, 2, 4) and bool((output > 50).all())


@pytest.mark.parametrize('base', [QNetwork, ActorDistributionNetwork])
def test_a_subclass_that_overrides_nothing_keeps_the_fast_stack(base):
    assert type('Same', (base, ), {}).make_parallel is base.make_parallel
