"""The reward and the loss of DIAYN against slow loops, numbers worked out by hand, and identities."""
import math

import numpy as np
import pytest
import torch
from torch import nn

from alfx.algorithms.diayn_algorithm import DIAYNAlgorithm, DIAYNInfo, DIAYNState
from alfx.data_structures import StepType, TimeStep
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

OBSERVATION = TensorSpec((2, ))
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def make(skill_spec, on_policy=True, **arguments):
    """Return a discriminator that predicts a linear function of the observation."""
    torch.manual_seed(0)
    algorithm = DIAYNAlgorithm(skill_spec, EncodingNetwork(OBSERVATION), **arguments)
    algorithm.set_on_policy(on_policy)
    return algorithm


def linear(algorithm):
    """Return weights ``[K, 2]`` and bias ``[K]`` of the discriminator."""
    weight, bias = (p.detach().double().numpy() for p in algorithm.parameters())
    return weight, bias


def sequence(skills, seed=0):
    """Time steps ``[T, 3]`` with an episode that ends at step 2, and one that begins with the sequence."""
    step_type = torch.tensor([[FIRST, MID, MID], [MID, MID, MID], [MID, MID, LAST], [MID, MID, FIRST],
                              [MID, LAST, MID]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(5, 3, 2, generator=generator)
    return TimeStep(step_type=step_type, observation=[observation, skills])


def one_hot_skills():
    return torch.eye(4)[torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 3, 0], [1, 3, 0]])]


def rollout(algorithm, steps, state):
    rewards, infos = [], []
    for t in range(len(steps.step_type)):
        step = algorithm.rollout_step(TimeStep(step_type=steps.step_type[t],
                                               observation=[x[t] for x in steps.observation]), state)
        state = step.state
        rewards.append(step.output)
        infos.append(step.info)
    return torch.stack(rewards), infos


def test_the_discrete_skill_reward_matches_a_loop_over_the_paper_formula():
    algorithm = make(4, reward_adapt_speed=3.0)
    steps, skills = sequence(one_hot_skills()), one_hot_skills()
    state = DIAYNState(skill=torch.eye(4)[[3, 3, 3]], has_previous=torch.tensor([0.0, 1.0, 0.0]))
    found, infos = rollout(algorithm, steps, state)
    weight, bias = linear(algorithm)
    mean = variance = 0.0
    variance, count = 1.0, 0
    for t in range(5):
        rewards, losses = [0.0] * 3, [0.0] * 3
        for b in range(3):
            has_previous = float(state.has_previous[b]) if t == 0 else 1.0
            previous = (state.skill[b] if t == 0 else skills[t - 1, b]).argmax()
            if has_previous and steps.step_type[t, b] != FIRST:
                logits = weight @ steps.observation[0][t, b].double().numpy() + bias
                log_q = logits[previous] - np.log(np.exp(logits).sum())
                rewards[b], losses[b] = log_q - math.log(1 / 4), -log_q
        counted = [r for r, loss in zip(rewards, losses) if loss]
        if counted:  # each batch of rewards moves mean and variance by 3 / (n + 3)
            rate = 3.0 / (count + 3.0)
            delta = np.mean(counted) - mean
            variance = (1 - rate) * (variance + rate * delta**2) + rate * np.var(counted)
            mean += rate * delta
            count += 1
        scale = math.sqrt(variance + mean**2)
        assert found[t].tolist() == pytest.approx([r / scale for r in rewards], abs=1e-5)
        assert infos[t].loss.tolist() == pytest.approx(losses, abs=1e-5)


def test_a_discriminator_of_known_odds_by_hand():
    """Logits ln 3 and 0 are probabilities 3/4 and 1/4: rewards ln(3/4) + ln 2 = 0.405465 and ln(1/2) = -0.693147."""
    algorithm = make(2)
    weight, bias = algorithm.parameters()
    with torch.no_grad():
        weight.zero_(), bias.copy_(torch.tensor([math.log(3.0), 0.0]))
    steps = TimeStep(step_type=torch.tensor([MID, MID]), observation=[torch.ones(2, 2), torch.eye(2)])
    step = algorithm.predict_step(steps, DIAYNState(skill=torch.eye(2), has_previous=torch.ones(2)))
    assert step.info.information.tolist() == pytest.approx([0.405465, -0.693147], abs=1e-6)
    assert step.info.accuracy.tolist() == [1.0, 0.0]
    # After a first batch with mean -0.143841 and second moment 0.322427 rewards are divided by 0.567827.
    step = algorithm.rollout_step(steps, DIAYNState(skill=torch.eye(2), has_previous=torch.ones(2)))
    assert step.output.tolist() == pytest.approx([0.714064, -1.220701], abs=1e-5)
    assert step.info.loss.tolist() == pytest.approx([0.287682, 1.386294], abs=1e-6)


def test_the_continuous_skill_reward_is_a_log_ratio_of_normal_densities():
    spec = BoundedTensorSpec((2, ), torch.float32, [0.0, -1.0], [2.0, 1.0])
    algorithm = make(spec)
    skill, observation = torch.tensor([[0.3, -0.7], [1.8, 0.4]]), torch.randn(2, 2)
    step = algorithm.predict_step(TimeStep(step_type=torch.tensor([MID, LAST]), observation=[observation, skill]),
                                  DIAYNState(skill=skill, has_previous=torch.ones(2)))
    weight, bias = linear(algorithm)
    for b in range(2):
        prediction = torch.as_tensor(weight @ observation[b].double().numpy() + bias).float()
        log_q = torch.distributions.Normal(prediction, 1.0).log_prob(skill[b]).sum()
        log_p = torch.distributions.Normal(torch.tensor([1.0, 0.0]), 1.0).log_prob(skill[b]).sum()
        assert step.info.information[b].item() == pytest.approx((log_q - log_p).item(), abs=1e-5)
        assert step.info.squared_error[b].item() == pytest.approx(((skill[b] - prediction)**2).mean().item(), abs=1e-5)


def test_the_reward_is_0_for_no_knowledge_and_the_entropy_for_certainty():
    """Rewards are 0 for a discriminator without knowledge and the entropy of the skills for a perfect one."""
    algorithm = make(5)
    weight, bias = algorithm.parameters()
    skill = torch.eye(5)
    state = DIAYNState(skill=skill, has_previous=torch.ones(5))
    observation = torch.tensor([[math.cos(a), math.sin(a)] for a in (0.0, 1.2, 2.4, 3.6, 4.8)])
    steps = TimeStep(step_type=torch.full((5, ), MID), observation=[observation, skill])
    with torch.no_grad():
        weight.zero_(), bias.zero_()
        assert algorithm.predict_step(steps, state).info.information.tolist() == pytest.approx([0.0] * 5, abs=1e-6)
        weight.copy_(1000.0 * observation)  # the product with its own direction is the largest
    step = algorithm.predict_step(steps, state)
    assert step.info.information.tolist() == pytest.approx([math.log(5)] * 5, abs=1e-6)
    assert step.info.accuracy.tolist() == [1.0] * 5


@pytest.mark.parametrize('on_policy,expected', [
    (True, [[2.0, 4.0], [3.0, 0.0], [0.0, 6.0], [0.0, 0.0]]),
    (False, [[3.0, 4.0], [3.0, 0.0], [0.0, 6.0], [0.0, 0.0]]),
])
def test_the_loss_of_arriving_is_counted_at_the_step_before(on_policy, expected):
    """Arriving at steps 0 to 3 costs 1, 2, 3, 0 and 0, 4, 0, 6; off-policy the cost of arriving at the first stays."""
    algorithm = make(2, on_policy=on_policy)
    loss = torch.tensor([[1.0, 0.0], [2.0, 4.0], [3.0, 0.0], [0.0, 6.0]])
    info = DIAYNInfo(loss=loss, valid=(loss > 0).float(), accuracy=torch.zeros(4, 2))
    assert algorithm.calc_loss(info).loss.tolist() == expected


def test_a_single_step_with_a_state_of_the_rollout_keeps_its_loss():
    info = DIAYNInfo(loss=torch.tensor([[1.0, 2.0]]), valid=torch.ones(1, 2), accuracy=torch.zeros(1, 2))
    assert make(2, on_policy=False).calc_loss(info).loss.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize('with_state', [True, False])
@pytest.mark.parametrize('skill_spec,skills', [(4, one_hot_skills()), (TensorSpec((4, )), torch.randn(5, 3, 4))])
def test_training_sequences_matches_training_steps(skill_spec, skills, with_state):
    algorithm = make(skill_spec, on_policy=False)
    steps = sequence(skills)
    zeros = algorithm.get_initial_train_state(3)
    first = DIAYNState(skill=torch.eye(4)[[3, 2, 1]], has_previous=torch.ones(3)) if with_state else zeros
    state, infos = first, []
    for t in range(5):
        is_first = (steps.step_type[t] == FIRST)
        state = DIAYNState(skill=torch.where(is_first.unsqueeze(-1), zeros.skill, state.skill),
                           has_previous=torch.where(is_first, zeros.has_previous, state.has_previous))
        step = algorithm.train_step(TimeStep(step_type=steps.step_type[t],
                                             observation=[x[t] for x in steps.observation]), state)
        state = step.state
        infos.append(step.info)
    stacked = DIAYNState(*(torch.stack([x, *[torch.full_like(x, 7.0)] * 4]) for x in first))
    found = algorithm.train_sequence(steps, stacked, ()).info
    for name in ('loss', 'valid', 'accuracy', 'squared_error'):
        expected = [getattr(info, name) for info in infos]
        if isinstance(expected[0], torch.Tensor):
            valid = found.valid if name in ('accuracy', 'squared_error') else 1.0
            torch.testing.assert_close(getattr(found, name) * valid, torch.stack(expected) * valid)
    assert found.loss.shape == (5, 3) and found.valid[0].tolist() == ([0.0, 1.0, 1.0] if with_state else [0.0] * 3)


def test_the_loss_gradient_is_that_of_cross_entropy():
    algorithm = make(4, on_policy=False)
    steps = sequence(one_hot_skills())
    info = algorithm.train_sequence(steps, DIAYNState(skill=torch.zeros(5, 3, 4), has_previous=torch.zeros(5, 3)), ())
    found = torch.autograd.grad(info.info.loss.sum(), list(algorithm.parameters()))
    model = nn.Linear(2, 4)
    model.load_state_dict(dict(zip(('weight', 'bias'), algorithm.parameters())))
    pairs = [(t, b) for t in range(1, 5) for b in range(3) if steps.step_type[t, b] != FIRST]
    logits = model(torch.stack([steps.observation[0][t, b] for t, b in pairs]))
    target = torch.stack([one_hot_skills()[t - 1, b].argmax() for t, b in pairs])
    nn.functional.cross_entropy(logits, target, reduction='sum').backward()
    for gradient, expected in zip(found, model.parameters()):
        torch.testing.assert_close(gradient, expected.grad)
