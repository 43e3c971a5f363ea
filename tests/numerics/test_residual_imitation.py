"""Causal behavior cloning against slow loops, and in a linear system with a known solution."""
from functools import partial

import pytest
import torch

from alfx import nest
from alfx.algorithms.bc_algorithm import BcAlgorithm
from alfx.algorithms.causal_bc_algorithm import BcInfo, CausalBcAlgorithm, residual_losses
from alfx.data_structures import BasicRLInfo, StepType, TimeStep, valid_masks
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, (-1, 0), (3, 1))
F, M, L = (int(x) for x in (StepType.FIRST, StepType.MID, StepType.LAST))


def causal_bc(observation_spec=OBSERVATION, action_spec=ACTION, hidden=(8, ), **kwargs):
    torch.manual_seed(0)
    return CausalBcAlgorithm(observation_spec, action_spec, actor_network_cls=partial(
        ActorNetwork, fc_layer_params=hidden), **{'discriminator_network_cls': partial(
            EncodingNetwork, fc_layer_params=hidden), **kwargs})


def losses(algorithm, inputs, action):
    length, batch = inputs.step_type.shape
    state = algorithm.get_initial_train_state(length * batch)
    return algorithm.calc_loss(algorithm.train_sequence(inputs, state, BasicRLInfo(action=action)).info)


def test_the_losses_match_the_game_in_units_of_half_the_range():
    algorithm = causal_bc(f_norm_penalty_weight=0.3, bc_regulatization_weight=0.2)
    kinds = torch.tensor([[F, M], [M, L], [M, F], [L, M]], dtype=torch.int32)
    observation, action = torch.randn(4, 2, 3), torch.rand(4, 2, 2)
    found = losses(algorithm, TimeStep(step_type=kinds, observation=observation), action)
    half = torch.tensor([2.0, 0.5])
    for t in range(4):
        for b in range(2):
            actor = discriminator = 0.0
            if t > 0 and kinds[t, b] != F:
                e = (action[t, b] - algorithm._actor_network(observation[t, b][None])[0][0]) / half
                f = algorithm._discriminator_network(observation[t - 1, b][None])[0][0]
                actor = (2 * (e @ f) + 0.2 * (e @ e)).item()
                discriminator = (-(2 * (e @ f) - f @ f) + 0.3 * (f @ f).sqrt()).item()
            assert found.extra.actor[t, b].item() == pytest.approx(actor, abs=1e-5)
            assert found.extra.discriminator[t, b].item() == pytest.approx(discriminator, abs=1e-5)
    torch.testing.assert_close(found.loss, found.extra.actor + found.extra.discriminator)


def test_no_action_at_the_end_of_an_episode_is_learned_from():
    """Change the stored action of a LAST step, which is no action: the gradient of the masked loss stays the same."""
    kinds = torch.tensor([[M, M], [L, M]], dtype=torch.int32)
    inputs = TimeStep(step_type=kinds, observation=torch.randn(2, 2, 3))
    gradients = []
    for at_last in (0.0, 0.9):
        algorithm, action = causal_bc(), torch.full((2, 2, 2), 0.25)
        action[1, 0] = at_last
        loss = losses(algorithm, inputs, action).loss * valid_masks(kinds)
        gradients.append(torch.autograd.grad(loss.sum(), list(algorithm.parameters())))
    for first, second in zip(*gradients):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        assert first.abs().sum() > 0


def test_each_side_of_the_game_is_trained_by_its_own_loss_alone():
    residual, prediction = (torch.randn(5, 2, requires_grad=True) for _ in range(2))
    actor, discriminator = residual_losses(residual, prediction, 0.1, 0.1)
    assert torch.autograd.grad(actor.sum(), prediction, allow_unused=True, retain_graph=True) == (None, )
    assert torch.autograd.grad(discriminator.sum(), residual, allow_unused=True, retain_graph=True) == (None, )
    # the best f is the residual itself, if all of it can be known: 2 e - 2 f = 0
    _, best = residual_losses(residual, residual.detach().requires_grad_(), 0.0, 0.0)
    torch.testing.assert_close(best, -residual.square().sum(-1))


def test_the_norm_of_a_zero_prediction_has_a_gradient():
    prediction = torch.zeros(3, 2, requires_grad=True)
    residual_losses(torch.zeros(3, 2), prediction, 0.0, 1.0)[1].sum().backward()
    assert torch.isfinite(prediction.grad).all()


def test_training_steps_match_training_sequences():
    algorithm = causal_bc()
    kinds = torch.tensor([[F, M], [M, L], [M, F]], dtype=torch.int32)
    inputs, action = TimeStep(step_type=kinds, observation=torch.randn(3, 2, 3)), torch.rand(3, 2, 2)
    infos = [algorithm.train_step(nest.map_structure(lambda x, t=t: x[t], inputs), algorithm.get_initial_train_state(2),
                                  BasicRLInfo(action=action[t])).info for t in range(3)]
    torch.testing.assert_close(algorithm.calc_loss(nest.stack(infos)).loss, losses(algorithm, inputs, action).loss)


def confounded_steps(count, gain=-0.5, spread=0.1):
    """Return steps of a confounded expert.

    The expert acts by a[t] = gain s[t] + u[t] + u[t-1] in s[t+1] = 0.5 s[t] + a[t], so that s[t] depends on u[t-1].
    """
    generator = torch.Generator().manual_seed(3)
    noise = spread * torch.randn(30, count, 1, generator=generator)
    state, states, actions = torch.zeros(count, 1), [], []
    for t in range(1, 30):
        action = gain * state + noise[t] + noise[t - 1]
        states.append(state)
        actions.append(action)
        state = 0.5 * state + action
    return torch.stack(states[-2:]), torch.stack(actions[-2:])


def least_squares(state, action):
    return float((state * action).sum() / (state * state).sum())


def test_in_a_linear_system_its_bias_is_a_tenth_of_least_squares():
    gain, spec = -0.5, TensorSpec((1, ))
    states, actions = confounded_steps(20000)
    bias = least_squares(states[1], actions[1]) - gain
    instrument = float((states[0] * actions[1]).sum() / (states[0] * states[1]).sum())
    assert abs(bias) > 0.2 and abs(instrument - gain) < 0.1 * abs(bias), 'the task is what it is meant to be'
    algorithm = causal_bc(spec, BoundedTensorSpec((1, ), torch.float32, -1, 1), (), bc_regulatization_weight=1e-3,
                          f_norm_penalty_weight=0.0)
    linear = partial(torch.nn.Linear, 1, 1, bias=False)
    algorithm._actor_network, algorithm._discriminator_network = Plain(linear()), Plain(linear())
    optimizer = torch.optim.SGD(algorithm.parameters(), lr=1.0)
    inputs = TimeStep(step_type=torch.full(states.shape[:2], M, dtype=torch.int32), observation=states)
    for _ in range(2000):
        optimizer.zero_grad()
        losses(algorithm, inputs, actions)[0][1].mean().backward()
        optimizer.step()
    assert algorithm._actor_network.layer.weight.item() == pytest.approx(gain, abs=0.1 * abs(bias))


class Plain(torch.nn.Module):
    """A layer with the call signature of a network."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, observation, state=()):
        return self.layer(observation), state


def test_unsupported_settings_are_rejected():
    for kwargs, word in ((dict(action_spec=BoundedTensorSpec((), torch.int64, 0, 3)), 'BcAlgorithm'),
                         (dict(discriminator_network_cls=partial(LSTMEncodingNetwork, hidden_size=4)), 'feed-forward'),
                         (dict(bc_regulatization_weight=-1.0), 'bc_regulatization_weight')):
        with pytest.raises(ConfError, match=word):
            causal_bc(**kwargs)
    with pytest.raises(ConfError, match='ActorNetwork'):
        CausalBcAlgorithm(OBSERVATION, ACTION, actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=()))
    assert causal_bc().own_capabilities().needs_two_steps and issubclass(CausalBcAlgorithm, BcAlgorithm)
    assert BcInfo._fields[:3] == ('actor', 'discriminator', 'target')
