"""Weights of rewards as Lagrange multipliers: on their own, in an agent, and invalid settings."""
import math
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers import agents

from alfx import context, gin_utils
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import RewardClipping, SequentialDataTransformer, UntransformedTimeStep
from alfx.algorithms.lagrangian_reward_weight_algorithm import (LagInfo, LagrangianPredRewardWeightAlgorithm,
                                                                LagrangianRewardWeightAlgorithm)
from alfx.algorithms.return_scaling import DiscountedReturnScaling
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep
from alfx.optimizers import SGD, Adam
from alfx.runs.evaluator import evaluate
from alfx.tensor_specs import TensorSpec
from alfx.utils.averager import WindowAverager

THREE = TensorSpec((3, ))


def make(thresholds=(0.5, None, -1.0), cls=LagrangianRewardWeightAlgorithm, lr=0.1, **args):
    return cls(THREE, list(thresholds), SGD(lr=lr), **args)


def steps(rewards, step_types=None):
    """Return time steps and infos ``[T, 1, ...]``."""
    rewards = torch.tensor(rewards)[:, None]
    kinds = torch.tensor(step_types or [StepType.MID] * len(rewards), dtype=torch.int32)[:, None]
    return TimeStep(step_type=kinds, reward=rewards), LagInfo(rollout_reward=rewards)


# The weights -------------------------------------------------------------------------------------------------------

def test_the_initial_weights_are_as_given_or_sum_to_one():
    weights = [0.5, 2.0, 30.0]
    for transform in (F.softplus, torch.exp):
        plain = make(init_weights=weights, reward_weight_normalization=False, lambda_transform=transform)
        torch.testing.assert_close(plain.reward_weights, torch.tensor(weights))
    torch.testing.assert_close(make(init_weights=weights).reward_weights, torch.tensor(weights) / 32.5)
    torch.testing.assert_close(make().reward_weights, torch.full((3, ), 1 / 3))


@pytest.mark.parametrize('transform, slope', [(F.softplus, 1 - math.exp(-2)), (torch.exp, 2.0)])
def test_a_step_matches_the_formula(transform, slope):
    # lambda 2: softplus'(u) = 1 - exp(-lambda), exp'(u) = lambda; u moves by -lr * slope * (reward - threshold)
    algorithm = make(init_weights=2.0, lr=0.1, reward_weight_normalization=False, lambda_transform=transform)
    before = algorithm._untransformed_weights.detach().clone()
    algorithm.after_train_iter(*steps([[1.0, 9.0, -2.0], [0.6, 9.0, -4.0]]))  # means 0.8, 9, -3
    moved = algorithm._untransformed_weights.detach() - before
    torch.testing.assert_close(moved, torch.tensor([-0.1 * slope * 0.3, 0.1 * slope * 2.0]))
    weights = algorithm.reward_weights
    assert weights[0] < 2 and weights[1] == 2 and weights[2] > 2


def test_rewards_of_first_steps_do_not_count():
    a, b = make(), make()
    a.after_train_iter(*steps([[0.0, 0.0, 0.0], [1.0, 0.0, -3.0]], [StepType.FIRST, StepType.LAST]))
    b.after_train_iter(*steps([[1.0, 0.0, -3.0]]))
    assert torch.equal(a.reward_weights, b.reward_weights)
    before = a.reward_weights
    a.after_train_iter(*steps([[0.0, 0.0, 0.0]], [StepType.FIRST]))
    a.after_train_iter(None, None)
    assert torch.equal(a.reward_weights, before)


def test_weights_settle_where_the_rewards_meet_the_thresholds():
    """A policy whose reward 1 is -1 / weight_1 and reward 0 ten times the ratio of the first two weights."""
    algorithm = make((5.0, None, -1.0), lr=0.2, init_weights=[1.0, 2.0, 3.0], reward_weight_normalization=False)
    for _ in range(2000):
        first, second, third = algorithm.reward_weights.tolist()
        algorithm.after_train_iter(*steps([[10 * first / second, 0.0, -1 / third]]))
    torch.testing.assert_close(algorithm.reward_weights, torch.tensor([1.0, 2.0, 1.0]), atol=1e-3, rtol=0)


def test_the_largest_weight_is_respected_and_untuned_ones_keep_their_ratio():
    algorithm = make(max_weight=1.5, lr=1.0, init_weights=[1.0, 0.5, 1.0], reward_weight_normalization=False)
    for _ in range(50):
        algorithm.after_train_iter(*steps([[-9.0, 0.0, 9.0]]))
    weights = algorithm.reward_weights
    torch.testing.assert_close(weights[:2], torch.tensor([1.5, 0.5]))
    assert 0 < weights[2] < 0.1
    algorithm._normalizes = True
    torch.testing.assert_close(algorithm.reward_weights, weights / weights.sum())


def test_external_code_gets_a_copy_of_the_weights():
    algorithm = make()
    algorithm.reward_weights.zero_()
    assert float(algorithm.reward_weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize('args, message', [
    (dict(reward_spec=TensorSpec(())), 'reward_spec: expected a multi-dimensional reward, a spec of rank 1'),
    (dict(reward_thresholds=[1.0]), 'reward_thresholds: expected 3 thresholds'),
    (dict(reward_thresholds=[None] * 3), 'reward_thresholds: all are None'),
    (dict(init_weights=0.0), 'init_weights: expected a number above 0'),
    (dict(init_weights=[1.0, 2.0]), 'init_weights: expected a number above 0, or 3'),
    (dict(max_weight=0.5), r'max_weight: expected at least the largest of init_weights, 1.0, found 0.5'),
    (dict(lambda_transform=torch.relu), 'lambda_transform: expected softplus or torch.exp')])
def test_wrong_arguments_are_rejected_by_name(args, message):
    with pytest.raises(ValueError, match=message):
        LagrangianRewardWeightAlgorithm(**{'reward_spec': THREE, 'reward_thresholds': [1.0, 1.0, None],
                                           'optimizer': SGD(lr=0.1), **args})


# Rewards of the environment ----------------------------------------------------------------------------------------

def test_untransformed_rewards_count():
    time_step, _ = steps([[5.0, 0.0, 0.0]])
    transformed = UntransformedTimeStep()._transform(time_step)._replace(reward=torch.zeros(1, 1, 3))
    for inputs in (time_step, transformed):
        assert make().rollout_step(inputs).info.rollout_reward.tolist() == [[[5.0, 0.0, 0.0]]]


def config(transformers=(), **args):
    transformer = SequentialDataTransformer([partial(t) for t in transformers], THREE) if transformers else None
    return SimpleNamespace(**{'data_transformer': transformer, 'evaluate': True, 'async_eval': False, **args})


def test_transformed_rewards_without_the_environments_own_are_rejected():
    for cls in (LagrangianRewardWeightAlgorithm, LagrangianPredRewardWeightAlgorithm):
        algorithm = make(cls=cls)
        algorithm.check_config(config())
        algorithm.check_config(config([UntransformedTimeStep, RewardClipping]))
        for transformer in (RewardClipping, DiscountedReturnScaling):
            with pytest.raises(gin_utils.ConfError, match=f'changes the rewards by {transformer.__name__}'):
                algorithm.check_config(config([transformer]))


def test_learning_from_evaluations_needs_evaluations_in_this_process():
    algorithm = make(cls=LagrangianPredRewardWeightAlgorithm)
    with pytest.raises(gin_utils.ConfError, match='TrainerConfig.evaluate = False, but LagrangianPred'):
        algorithm.check_config(config(evaluate=False))
    with pytest.raises(gin_utils.ConfError, match='TrainerConfig.async_eval = True, but LagrangianPred'):
        algorithm.check_config(config(async_eval=True))


# Evaluations -------------------------------------------------------------------------------------------------------

def test_averaged_prediction_rewards_adjust_the_weights_every_iteration():
    algorithm = make(cls=LagrangianPredRewardWeightAlgorithm, reward_weight_normalization=False, init_weights=2.0,
                     pred_rewards_averager_ctor=partial(WindowAverager, window_size=10))
    assert algorithm.rollout_step(steps([[1.0, 0.0, 0.0]])[0]).info == ()
    before = algorithm.reward_weights
    algorithm.after_train_iter(None, None)  # no evaluation yet
    assert torch.equal(algorithm.reward_weights, before)
    algorithm.eval()
    with context.eval_context(), torch.no_grad():
        for reward, kind in (([7.0, 7.0, 7.0], StepType.FIRST), ([1.0, 0.0, -2.0], StepType.MID),
                             ([0.6, 0.0, -4.0], StepType.LAST)):
            inputs, _ = steps([reward], [kind])
            algorithm.predict_step(TimeStep(step_type=inputs.step_type[0], reward=inputs.reward[0]))
    torch.testing.assert_close(algorithm._averager.get(), torch.tensor([0.8, 0.0, -3.0]))
    for _ in range(2):
        previous = algorithm.reward_weights
        algorithm.after_train_iter(None, None)
        assert algorithm.reward_weights[0] < previous[0] and algorithm.reward_weights[2] > previous[2]


def test_the_default_averager_is_exponential():
    averagers = [make(cls=LagrangianPredRewardWeightAlgorithm, **args)._averager
                 for args in ({}, {'pred_rewards_averager_ctor': None})]
    for averager in averagers:
        averager.update(torch.tensor([1.0, 2.0, 3.0]))
        averager.update(torch.tensor([3.0, 2.0, 1.0]))
        torch.testing.assert_close(averager.get(), torch.full((3, ), 2.0), atol=1e-3, rtol=0)


# In an agent -------------------------------------------------------------------------------------------------------

def weighted_agent(algorithm='ppo', cls=LagrangianRewardWeightAlgorithm, evaluate=True, **args):
    weights = partial(cls, reward_thresholds=[0.9, None, 0.1], optimizer=Adam(lr=0.05))
    with mock.patch.object(agents, 'TrainerConfig', partial(TrainerConfig, evaluate=evaluate, async_eval=False)):
        return agents.make_agent(algorithm, 'vector reward', reward_weight_algorithm_cls=weights, **args)


def state_of(agent):
    return {key: value.clone() for key, value in agent.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize('algorithm', ['ppo', 'actor-critic'])
def test_the_policy_gets_the_weights_after_each_iteration(algorithm):
    agent, _ = weighted_agent(algorithm)
    part, policy = agent._reward_weight_algorithm, agent.policy
    torch.testing.assert_close(policy.reward_weights, torch.full((3, ), 1 / 3))
    for _ in range(3):
        before = policy.reward_weights.clone()
        agent.train_iter()
        assert torch.equal(policy.reward_weights, part.reward_weights)
        assert not torch.equal(policy.reward_weights, before)
    assert part.reward_weights[0] > part.reward_weights[1] > part.reward_weights[2]


def test_the_weight_optimizer_is_not_part_of_agent_updates():
    agent, _ = weighted_agent()
    part = agent._reward_weight_algorithm
    optimizers, parameters = agent.optimized_parameters()
    assert part._weight_optimizer not in optimizers
    assert all(p is not part._untransformed_weights for _, p in parameters)
    for _ in range(3):
        agent.train_iter()
    assert int(part._weight_optimizer.state_dict()['state'][0]['step']) == 3  # one an iteration
    owners = agent.get_optimizer_info()
    assert '_reward_weight_algorithm._untransformed_weights' in owners
    assert '_untransformed_weights' not in agent.get_unoptimized_parameter_info()


@pytest.mark.parametrize('cls', [LagrangianRewardWeightAlgorithm, LagrangianPredRewardWeightAlgorithm])
def test_a_checkpoint_brings_back_weights_and_optimizer(cls):
    (a, env), (b, other) = weighted_agent(cls=cls), weighted_agent(cls=cls, seed=3)
    for agent, environment in ((a, env), (b, other)):
        agent.train_iter()
        evaluate(environment, agent, 4)
        agent.train_iter()
    b.load_state_dict(a.state_dict())
    part_a, part_b = a._reward_weight_algorithm, b._reward_weight_algorithm
    assert torch.equal(part_a.reward_weights, part_b.reward_weights)
    for part in (part_a, part_b):
        part.after_train_iter(*steps([[0.3, 0.0, 0.7]]))
    assert torch.equal(part_a.reward_weights, part_b.reward_weights)


def test_thresholds_come_from_the_conf_and_not_from_the_checkpoint():
    a, b = make((0.5, None, -1.0)), make((0.25, None, -2.0))
    b.load_state_dict(a.state_dict())
    assert b._thresholds.tolist() == [0.25, -2.0]


def test_agent_evaluations_adjust_only_the_weights():
    agent, env = weighted_agent(cls=LagrangianPredRewardWeightAlgorithm)
    agent.train_iter()
    part = agent._reward_weight_algorithm
    torch.testing.assert_close(part.reward_weights, torch.full((3, ), 1 / 3))
    before = state_of(agent)
    returns = evaluate(env, agent, 8).returns  # 4 rewarded steps an episode
    changed = {key for key, value in state_of(agent).items() if not torch.equal(value, before[key])}
    assert changed and all('_reward_weight_algorithm' in key for key in changed)
    torch.testing.assert_close(part._averager.get(), torch.as_tensor(returns.mean(0) / 4).float(), atol=0.02, rtol=0)
    agent.train_iter()
    assert not torch.equal(part.reward_weights, torch.full((3, ), 1 / 3))


def test_the_same_seed_gives_the_same_weights():
    found = []
    for _ in range(2):
        agent, _ = weighted_agent(seed=5)
        for _ in range(3):
            agent.train_iter()
        found.append(agent._reward_weight_algorithm.reward_weights)
    assert torch.equal(*found)


class Curiosity(Algorithm):
    """An intrinsic reward of 100."""

    def train_step(self, inputs, state, rollout_info=None):
        return AlgStep(output=torch.full(inputs.step_type.shape, 100.0), info=LossInfo())

    rollout_step = predict_step = train_step


@pytest.mark.parametrize('algorithm', ['ppo', 'actor-critic'])
def test_each_environment_reward_counts_once_and_intrinsic_ones_do_not(algorithm, monkeypatch):
    agent, env = weighted_agent(algorithm, intrinsic_reward_module=Curiosity(name='Curiosity'))
    seen, raw = [], []
    monkeypatch.setattr(agent._reward_weight_algorithm, '_adjust', seen.append)
    step_environment = env.step

    def step(action):
        time_step = step_environment(action)
        raw.append((time_step.step_type.clone(), time_step.reward.clone()))
        return time_step

    monkeypatch.setattr(env, 'step', step)
    raw.append((env.current_time_step().step_type.clone(), env.current_time_step().reward.clone()))
    for _ in range(3):
        agent.train_iter()
    for i, mean in enumerate(seen):  # unrolls of 6 steps
        kinds, rewards = (torch.cat(x) for x in zip(*raw[6 * i:6 * i + 6]))
        torch.testing.assert_close(mean, rewards[kinds != StepType.FIRST].mean(0))
    assert len(seen) == 3


def test_an_agent_requires_evaluations_in_this_process():
    with pytest.raises(gin_utils.ConfError, match='TrainerConfig.evaluate = False, but LagrangianPred'):
        weighted_agent(cls=LagrangianPredRewardWeightAlgorithm, evaluate=False)
