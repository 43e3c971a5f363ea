"""Scaling of rewards by the discounted return."""
import copy

import numpy as np
import pytest
import torch
from helpers.sac_agents import make_agent

from alfx import context
from alfx.algorithms.return_scaling import DiscountedReturnScaling
from alfx.data_structures import Experience, StepType, TimeStep
from alfx.tensor_specs import TensorSpec

GAMMA = 0.9


def random_steps(length=60, batch=8, shape=(), seed=0):
    """Return time steps ``[length, B]`` of episodes that terminate or end at a time limit."""
    generator = np.random.default_rng(seed)
    kinds = np.full((length, batch), int(StepType.MID))
    for b in range(batch):
        t = 0
        while t < length:
            end = t + int(generator.integers(2, 12))
            kinds[t, b] = StepType.FIRST
            if end < length:
                kinds[end, b] = StepType.LAST
            t = end + 1
    reward = torch.tensor(generator.normal(1.0, 2.0, (length, batch, *shape)), dtype=torch.float32)
    return TimeStep(step_type=torch.tensor(kinds, dtype=torch.int32), reward=reward, discount=torch.ones(length, batch))


def run(transformer, steps, state=None):
    state = transformer.state_spec.zeros(steps.step_type.shape[1:]) if state is None else state
    rewards, returns = [], []
    for t in range(len(steps.step_type)):
        step, state = transformer.transform_timestep(
            TimeStep(*(x[t] if isinstance(x, torch.Tensor) else x for x in steps)), state)
        rewards.append(step.reward)
        returns.append(state)
    return torch.stack(rewards), torch.stack(returns), state


@pytest.mark.parametrize('shape', [(), (3, )])
@pytest.mark.parametrize('bound', [0.5, 100.0, None])
def test_the_scale_is_that_of_a_slow_loop_over_returns(shape, bound):
    context.set_run_specs((), (), (), TensorSpec(shape))
    transformer, steps = DiscountedReturnScaling(gamma=GAMMA, max_return=bound), random_steps(shape=shape)
    with context.rollout_context():
        rewards, returns, _ = run(transformer, steps)
    seen, current = [], np.zeros((8, *shape))
    for t in range(60):
        for b in range(8):
            if steps.step_type[t, b] == StepType.FIRST:
                current[b] = 0.0
            else:
                current[b] = GAMMA * current[b] + steps.reward[t, b].double().numpy()
                seen.append(current[b].copy())
        np.testing.assert_allclose(returns[t], current, rtol=1e-5, atol=1e-5)
    largest = np.abs(seen).max(0)
    # batches of different sizes have equal weights, so the standard deviation differs by some percent
    scale = (steps.reward[-1] / rewards[-1])[0].double().numpy()
    by_bound = 0.0 if bound is None else largest / bound
    np.testing.assert_allclose(scale, np.maximum(np.std(seen, 0), by_bound), rtol=1e-5 if bound == 0.5 else 0.05)
    if bound is not None:
        assert (np.abs(seen) / scale <= bound * (1 + 1e-5)).all()


def test_replayed_rewards_are_divided_and_statistics_stay():
    transformer, steps = DiscountedReturnScaling(gamma=GAMMA), random_steps()
    with context.rollout_context():
        rewards, _, state = run(transformer, steps)
    before = copy.deepcopy(transformer.state_dict())
    with context.replay_context():
        found = transformer.transform_experience(Experience(time_step=steps)).time_step.reward
    with context.eval_context():
        run(transformer, steps._replace(reward=100.0 * steps.reward))
    assert all(torch.equal(x, before[name]) for name, x in transformer.state_dict().items())
    torch.testing.assert_close(found[-1], rewards[-1])
    torch.testing.assert_close(found / steps.reward, torch.full_like(found, found[0, 0] / steps.reward[0, 0]))


def test_a_loaded_transformer_continues_with_the_same_numbers():
    steps = random_steps()
    first, second = (TimeStep(*(x[part] if isinstance(x, torch.Tensor) else x for x in steps))
                     for part in (slice(0, 25), slice(25, 60)))
    uninterrupted, loaded = DiscountedReturnScaling(), DiscountedReturnScaling()
    with context.rollout_context():
        expected, _, _ = run(uninterrupted, steps)
        saved = DiscountedReturnScaling()
        _, _, state = run(saved, first)
        loaded.load_state_dict(saved.state_dict())
        found, _, _ = run(loaded, second, state)
    assert torch.equal(found, expected[25:])


@pytest.mark.parametrize('batch', [1, 3])
def test_equal_returns_without_a_bound_are_divided_by_their_size(batch):
    steps = TimeStep(step_type=torch.tensor([[0], [1], [1]], dtype=torch.int32).expand(3, batch),
                     reward=torch.full((3, batch), 20.0), discount=torch.ones(3, batch))
    transformer = DiscountedReturnScaling(gamma=GAMMA, max_return=None)
    with context.rollout_context():
        rewards, returns, _ = run(transformer, steps)
    torch.testing.assert_close(returns[:2, 0], torch.tensor([0.0, 20.0]))
    torch.testing.assert_close(rewards[:2], torch.tensor([[20.0], [1.0]]).expand(2, batch))  # no return yet, then 20
    torch.testing.assert_close(rewards[2, 0], torch.tensor(20.0 / 9.0))  # returns 20 and 38: a deviation of 9


def test_rewards_of_zero_stay_zero():
    transformer, steps = DiscountedReturnScaling(), random_steps()
    with context.rollout_context():
        rewards, _, _ = run(transformer, steps._replace(reward=torch.zeros_like(steps.reward)))
    assert not rewards.any()


def test_an_agent_trains_with_scaled_rewards_in_traced_updates():
    agent, _ = make_agent(data_transformer=lambda env: DiscountedReturnScaling(env.observation_spec()))
    agent.train_iter()
    assert agent.capabilities.traceable_update and any('_largest' in name for name in agent.state_dict())
