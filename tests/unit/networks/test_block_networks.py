"""Residual blocks of encoders, and layers whose parameters keep a norm."""
from functools import partial

import pytest
import torch
from helpers.dqn_agents import assert_same_parameters, train
from helpers.plans import num_graphs, warnings_in
from helpers.sac_agents import make_agent, squashed_normal
from torch.nn import functional as F

from alfx import context
from alfx.algorithms.categorical_sac_algorithm import CategoricalSacAlgorithm
from alfx.layers import FC
from alfx.networks.actor_distribution_networks import ActorDistributionNetworkBase
from alfx.networks.block_networks import BlockEncodingNetwork, HyperScale
from alfx.networks.critic_networks import CriticNetwork
from alfx.norm_layers import BatchNorm, RmsNorm
from alfx.optimizers import Adam
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import squashed_exp

SPEC = TensorSpec((3, ))
KINDS = ['simba', 'bro', 'hyper', 'flash']


def l2(x):
    return x / x.norm(dim=-1, keepdim=True)


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def by_hand(kind, p, x):
    """Compute an encoder of one block from its parameters; norms have scale 1 and shift 0."""
    if kind == 'simba':
        x = F.linear(x, p[0], p[1])
        hidden = F.linear(norm(x), p[4], p[5]).relu()
        return norm(x + F.linear(hidden, p[6], p[7]))
    if kind == 'bro':
        x = norm(F.linear(x, p[0], p[1])).relu()
        hidden = norm(F.linear(x, p[4], p[5])).relu()
        return x + norm(F.linear(hidden, p[8], p[9]))
    if kind == 'hyper':
        h = 4
        x = l2(torch.cat((x, torch.full((len(x), 1), 3.0)), 1))
        x = l2((2 / h)**0.5 * F.linear(x, p[0]))
        hidden = (0.5 * (2 / h)**0.5 * F.linear(x, p[2])).relu() + 1e-8
        x = l2(x + 0.5 * (l2(F.linear(hidden, p[4])) - x))
        return F.linear(x, p[6])
    scale = 1.001**-0.5  # batch norm with running mean 0 and variance 1
    x = F.linear(x * scale, p[2])
    hidden = (F.linear(x, p[3]) * scale).relu()
    x = x + (F.linear(hidden, p[6]) * scale).relu()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize('kind', KINDS)
def test_an_encoder_computes_the_formulas_of_its_block(kind):
    network = BlockEncodingNetwork(SPEC, block=kind, hidden_size=4, num_blocks=1)
    x = torch.randn(6, 3)
    with context.eval_context():
        torch.testing.assert_close(network(x)[0], by_hand(kind, list(network.parameters()), x))


@pytest.mark.parametrize('kind', KINDS)
def test_a_stack_equals_its_encoders_for_shared_and_separate_inputs(kind):
    args = dict(block=kind, hidden_size=4, num_blocks=2, last_layer_size=6, output_tensor_spec=TensorSpec((2, 3)))
    single = BlockEncodingNetwork(SPEC, **args)
    stack = single.make_parallel(2)
    assert not torch.equal(*list(stack.parameters())[-2].detach().view(2, -1))
    for x in (torch.randn(5, 3), torch.randn(5, 2, 3)):
        with context.eval_context():
            found = stack(x)[0]
            assert found.shape == (5, 2, 2, 3)
            for i in range(2):
                for one, several in zip(single.parameters(), stack.parameters()):
                    one.data = several.data.view(2, *one.shape)[i].clone()
                torch.testing.assert_close(found[:, i], single(x if x.ndim == 2 else x[:, i])[0])


def test_trained_factors_and_their_parameters_start_as_in_simba_v2():
    """Multiples of a vector that l2 follows are invisible in the output, but not in the steps of the optimizer."""
    network = BlockEncodingNetwork(SPEC, block='hyper', hidden_size=8, num_blocks=2)
    # c = sqrt(2 / 8) = 0.5; in a block c / sqrt(4), and the rate 1 / (2 + 1) with a parameter of 1 / sqrt(8)
    block = [(32, 0.25, 0.25), (8, 1 / 3, 8**-0.5)]
    expected = [(8, 0.5, 0.5), *block, *block, (8, 1.0, 1.0)]
    scales = [m for m in network.modules() if isinstance(m, HyperScale)]
    for scale, (size, factor, parameter) in zip(scales, expected, strict=True):
        torch.testing.assert_close(scale(torch.ones(2, size)), torch.full((2, size), factor))
        torch.testing.assert_close(scale.weight.detach(), torch.full((size, ), parameter))
        scale.weight.data.mul_(3.0)
        torch.testing.assert_close(scale(torch.ones(size)), torch.full((size, ), 3 * factor))
        scale.reset_parameters()
        torch.testing.assert_close(scale.weight.detach(), torch.full((size, ), parameter))


def rows_have_norm_one(module):
    layers = [m for m in module.modules() if hasattr(m, 'weight') and getattr(m, 'projects_parameters', False)]
    for layer in layers:
        if isinstance(layer, BatchNorm):
            squares = (layer.weight.square() + layer.bias.square()).view(-1, layer._size).sum(-1)
            torch.testing.assert_close(squares, torch.full_like(squares, layer._size))
        elif isinstance(layer, RmsNorm):
            squares = layer.weight.square().sum(-1)
            torch.testing.assert_close(squares, torch.full_like(squares, layer._size))
        else:
            norms = layer.weight.norm(dim=-1)
            torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-6, rtol=0)
    return len(layers)


def networks(kind):
    actor = partial(ActorDistributionNetworkBase, continuous_projection_net_ctor=squashed_normal,
                    encoding_network_ctor=partial(BlockEncodingNetwork, block=kind, hidden_size=8))
    critic = partial(CriticNetwork, joint_encoder_ctor=partial(BlockEncodingNetwork, block=kind, hidden_size=8))
    return dict(actor_network_cls=actor, critic_network_cls=critic, algorithm_cls=CategoricalSacAlgorithm, num_atoms=11)


FLASH = dict(networks('flash'), critic_batches='joint', policy_update_period=2, train_actor_on_last_step=False)
VARIANTS = {'simba': networks('simba'), 'bro': networks('bro'), 'hyper': networks('hyper'), 'flash': FLASH}


@pytest.mark.parametrize('variant', KINDS)
def test_replayed_updates_match_eager_ones_and_rows_keep_norm_one(variant, warm_up, caplog):
    agents = []
    for count in (1, 10**9):
        warm_up(count)
        agents.append(make_agent(**VARIANTS[variant], optimizer=Adam(lr=1e-2, gradient_clipping=1.0))[0])
        train(agents[-1:], 15)  # two updates each
    assert num_graphs(agents[0]) and not num_graphs(agents[1]) and not warnings_in(caplog)
    assert_same_parameters(agents, atol=0.0, rtol=0.0)
    projected = {'simba': 0, 'bro': 0, 'hyper': 9, 'flash': 15}[variant]
    assert rows_have_norm_one(torch.nn.ModuleList([agents[0].policy.actor, agents[0].policy.critics])) == projected


@pytest.mark.compiles
def test_compiled_updates_match_eager_ones_up_to_rounding(never_replayed, caplog):
    flash = {**FLASH, 'policy_update_period': 1}  # a single graph
    agents = [make_agent(**flash, config_args=dict(compile=on))[0] for on in (False, True)]
    train(agents, 4)
    assert num_graphs(agents[1]) and not warnings_in(caplog)
    assert_same_parameters(agents, atol=1e-4, rtol=1e-3)


def test_a_layer_without_gradient_keeps_its_bits():
    agent, _ = make_agent(**FLASH, updates=1)
    actor = agent.policy.actor
    for update in range(1, 5):
        before = [p.detach().clone() for p in actor.parameters()]
        agent.train_iter()
        is_same = [torch.equal(a, b) for a, b in zip(before, actor.parameters())]
        assert all(is_same) == bool(update % 2)


@pytest.mark.parametrize('n', [None, 2])
def test_unit_weights_are_projected_at_the_start_and_on_request(n):
    layer = FC(3, 4, unit_weights=True, kernel_initializer=torch.nn.init.ones_)
    layer = layer if n is None else layer.make_parallel(n)
    torch.testing.assert_close(layer.weight, torch.full_like(layer.weight, 3**-0.5))
    layer.weight.data.mul_(5.0)
    layer.bias.data.fill_(7.0)
    layer.project_parameters()
    torch.testing.assert_close(layer.weight, torch.full_like(layer.weight, 3**-0.5))
    assert (layer.bias == 7.0).all()


def test_unit_weights_have_no_bias_before_a_norm():
    assert FC(3, 4, unit_weights=True, norm=BatchNorm).bias is None
    assert FC(3, 4, unit_weights=True, norm=BatchNorm).make_parallel(2).bias is None
    assert FC(3, 4, unit_weights=True, norm=BatchNorm, norm_position='after').bias is not None
    assert FC(3, 4, norm=BatchNorm).bias is not None


def test_scale_and_shift_of_a_norm_are_projected_together():
    layer = BatchNorm(2, unit=True, n=2)
    layer.weight.data = torch.tensor([3.0, 0.0, 1.0, 1.0])
    layer.bias.data = torch.tensor([0.0, 4.0, 1.0, 1.0])
    layer.project_parameters()
    torch.testing.assert_close(layer.weight, 2**0.5 * torch.tensor([0.6, 0.0, 0.5, 0.5]))
    torch.testing.assert_close(layer.bias, 2**0.5 * torch.tensor([0.0, 0.8, 0.5, 0.5]))


def test_invalid_arguments_are_rejected_by_name():
    with pytest.raises(ValueError, match="block must be 'simba' or .*, found str 'resnet'"):
        BlockEncodingNetwork(SPEC, block='resnet')
    with pytest.raises(ValueError, match='128 outputs cannot be reshaped'):
        BlockEncodingNetwork(SPEC, TensorSpec((5, )))
    for args in (dict(joint_fc_layer_params=(8, )), dict(norm=BatchNorm), dict(input_norm=BatchNorm),
                 dict(dropout=0.1)):
        with pytest.raises(ValueError, match='joint_encoder_ctor creates all joint layers'):
            CriticNetwork((SPEC, SPEC), joint_encoder_ctor=BlockEncodingNetwork, **args)


def test_squashed_exp_stays_between_its_bounds():
    value = torch.tensor([-100.0, 0.0, 100.0])
    torch.testing.assert_close(squashed_exp(value, -2.0, 1.0).log(), torch.tensor([-2.0, -0.5, 1.0]))
