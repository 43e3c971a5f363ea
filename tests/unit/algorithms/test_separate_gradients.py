"""Gradients computed in one place and applied in another."""
import pytest
import torch
from helpers.agents import make_agent

from alfx.data_structures import LossInfo
from alfx.engine.loss_reduction import NonFiniteLossError


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


def losses(agent):
    experience = agent.unroll(6)
    return agent.learner.losses.collected(experience)[:2]


def test_separate_gradient_and_update_steps_match_a_whole_update():
    one_step, two_steps, other = (make_agent('actor-critic', 'discrete')[0] for _ in range(3))
    one_step.update_with_gradient(*losses_of(one_step))
    gradients = two_steps.compute_gradients(*losses_of(two_steps))
    assert all(torch.equal(a, b) for a, b in zip(parameters(two_steps), parameters(other)))
    two_steps.apply_gradient_list(gradients)
    other.apply_gradient_list(gradients)  # another copy
    for agent in (two_steps, other):
        assert all(torch.equal(a, b) for a, b in zip(parameters(one_step), parameters(agent)))


def losses_of(agent):
    torch.manual_seed(1)
    return losses(agent)


def test_each_parameter_has_one_gradient_or_none():
    agent, _ = make_agent('actor-critic', 'discrete')
    names = [name for name, _ in agent.optimized_parameters()[1]]
    loss_info, masks = losses(agent)
    value_loss = LossInfo(loss=loss_info.extra['rl'].td_loss)
    gradients = agent.compute_gradients(value_loss, torch.ones_like(value_loss.loss))
    assert len(gradients) == len(names)
    for name, gradient in zip(names, gradients):
        assert (gradient is not None) == ('_value_network' in name), name


def test_gradients_of_other_shapes_are_rejected():
    agent, _ = make_agent('actor-critic', 'discrete')
    gradients = agent.compute_gradients(*losses(agent))
    with pytest.raises(ValueError, match='expected gradients of the shapes'):
        agent.apply_gradient_list(gradients[:-1])
    with pytest.raises(ValueError, match='expected gradients of the shapes'):
        agent.apply_gradient_list([g.unsqueeze(0) for g in gradients])


def test_a_loss_that_is_not_finite_has_no_gradients():
    agent, _ = make_agent('actor-critic', 'discrete')
    loss_info, masks = losses(agent)
    with pytest.raises(NonFiniteLossError):
        agent.compute_gradients(loss_info._replace(loss=loss_info.loss * float('nan')), masks)
