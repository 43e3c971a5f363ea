"""Policy checkpoints of TD7: against a loop in the form of the paper's algorithm, and in a run."""
import copy
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.deterministic_agents import make_agent as make_deterministic_agent

from alfx import context
from alfx.algorithms.base.policy_checkpoints import PolicyCheckpoints
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import (RewardNormalizer, RewardScaling, SequentialDataTransformer,
                                              UntransformedTimeStep)
from alfx.algorithms.return_scaling import DiscountedReturnScaling
from alfx.algorithms.td7_algorithm import Td7Algorithm
from alfx.data_structures import StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.networks.sale_networks import SaleActorNetwork, SaleCriticNetwork, SaleEncoder
from alfx.tensor_specs import TensorSpec
from alfx.trainers.reset_networks import ResetNetworks

make_agent = partial(
    make_deterministic_agent, Td7Algorithm, batch_size=1, unroll_length=1, updates=1,
    actor_network_ctor=partial(SaleActorNetwork, observation_layer_size=8, fc_layer_params=(8, )),
    critic_network_ctor=partial(SaleCriticNetwork, pair_layer_size=8, joint_fc_layer_params=(8, )),
    encoder_ctor=partial(SaleEncoder, embedding_size=6, fc_layer_params=(8, )))


def play(checkpoints, rewards):
    """Observe an episode; return whether the policy is saved."""
    checkpoints.observe(int(StepType.FIRST), 99.0)  # the reward of a first step belongs to no episode
    is_updated = [checkpoints.observe(int(StepType.MID), r) for r in rewards[:-1]]
    assert not any(is_updated) and not checkpoints.updates_due(0, 1)
    return checkpoints.observe(int(StepType.LAST), rewards[-1])


def test_the_schedule_worked_out_by_hand():
    checkpoints = PolicyCheckpoints(num_episodes=2, late_num_episodes=3, late_after=11, late_factor=0.5)
    assert not play(checkpoints, [1.0, 1.0]) and checkpoints.updates_due(0, 1) == 0
    assert play(checkpoints, [4.0, 4.0, 0.0])  # worst of 2 and 8: kept with 2
    assert checkpoints.updates_due(0, 2) == 10 and checkpoints.updates_due(10, 2) == 0  # 5 steps
    assert not play(checkpoints, [1.0])  # below 2: not kept, and trained without a second episode
    assert checkpoints.updates_due(10, 2) == 2  # update 12 comes after 11: from now on 3 episodes exceed 2 * 0.5
    for total in (1.5, 1.0):
        assert not play(checkpoints, [total]) and checkpoints.updates_due(12, 2) == 0
    assert play(checkpoints, [3.0])  # 1.0 is not below 1.0
    assert checkpoints.updates_due(12, 2) == 6


def test_a_negative_return_to_exceed_is_lowered_as_well():
    checkpoints = PolicyCheckpoints(num_episodes=1, late_num_episodes=1, late_after=1, late_factor=0.75)
    assert play(checkpoints, [-200.0]) and checkpoints.updates_due(0, 2) == 2  # from now on -250 is good enough
    assert not play(checkpoints, [-251.0]) and checkpoints.updates_due(2, 2) == 2
    assert play(checkpoints, [-250.0])


def slow_loop(episodes, num_episodes):
    """Return the number of updates after each episode, and whether its policy was kept."""
    best, found, num_steps, worst = -float('inf'), [], 0, []
    for rewards in episodes:
        worst.append(sum(rewards))
        num_steps += len(rewards)
        if min(worst) < best:
            found.append((num_steps, False))
        elif len(worst) == num_episodes:
            best = min(worst)
            found.append((num_steps, True))
        else:
            found.append((0, False))
        if found[-1][0]:
            num_steps, worst = 0, []
    return found


@pytest.mark.parametrize('num_episodes', [1, 3])
def test_the_schedule_matches_a_slow_loop_also_when_resumed(num_episodes):
    random.seed(0)
    episodes = [[float(random.randint(0, 9)) for _ in range(random.randint(1, 5))] for _ in range(60)]
    checkpoints, found = PolicyCheckpoints(num_episodes), []
    for rewards in episodes:
        is_saved = play(checkpoints, rewards)
        found.append((checkpoints.updates_due(0, 1), is_saved))
        state = copy.deepcopy(checkpoints.state_dict())
        checkpoints = PolicyCheckpoints(num_episodes)
        checkpoints.load_state_dict(state)
    assert found == slow_loop(episodes, num_episodes)
    assert len({is_saved for _, is_saved in found}) == 2


def test_an_episode_that_began_before_the_assessment_does_not_count():
    checkpoints = PolicyCheckpoints()
    assert not checkpoints.observe(int(StepType.MID), 5.0) and not checkpoints.observe(int(StepType.LAST), 5.0)
    assert checkpoints.updates_due(0, 1) == 0


def test_a_run_trains_only_after_episodes_and_evaluates_the_saved_policy():
    agent, _ = make_agent(policy_checkpoints=PolicyCheckpoints(num_episodes=2, late_num_episodes=2))
    rl, updates, saved = agent.policy, [], []

    def outputs():
        observation = torch.linspace(-1, 1, 5)[:, None]
        with torch.no_grad():
            return [act(observation, ())[0] for act in (rl._act, rl._act_in_evaluation)]

    observe = rl._checkpoints.observe

    def observe_and_record(*step):
        is_saved = observe(*step)
        if is_saved:
            saved.append(outputs()[0])
        return is_saved

    rl._checkpoints.observe = observe_and_record
    assert torch.equal(*outputs())
    for _ in range(60):
        before = rl._updates.value
        agent.train_iter()
        updates.append(rl._updates.value - before)
    assert set(updates) == {0, 4, 8}  # an episode has four steps after its first one
    assert len(saved) > 1 and sum(updates) == 4 * (60 // 5)
    assert torch.equal(outputs()[1], saved[-1]) and not torch.equal(*outputs())


def test_without_checkpoints_every_iteration_trains_the_evaluated_policy():
    agent, _ = make_agent()
    for _ in range(12):
        agent.train_iter()
    rl = agent.policy
    assert rl._updates.value == 11  # the first iteration has no transition yet
    observation = torch.randn(3, 1)
    assert torch.equal(rl._act(observation)[0], rl._act_in_evaluation(observation, ())[0])


def test_random_steps_are_not_assessed():
    agent, _ = make_agent(policy_checkpoints=PolicyCheckpoints(), initial_collect_steps=9)
    rl, first = agent.policy, None
    for step in range(30):
        agent.train_iter()
        if rl._updates.value:
            first = first or step
    assert rl._updates.value and first >= 12  # episodes end at steps 5, 11, 17; the second began in the random phase


def test_resetting_the_networks_does_not_change_the_saved_policy():
    agent, _ = make_agent(policy_checkpoints=PolicyCheckpoints())
    rl, reset = agent.policy, ResetNetworks(at_env_steps=(1, ))
    with torch.no_grad():
        for p in rl._kept_policy.parameters():
            p.add_(1.0)
    before = copy.deepcopy(rl.state_dict())
    run = SimpleNamespace(algorithm=agent, iteration=0, env_steps=0)
    reset.on_training_start(run)
    run.env_steps = 1
    reset.on_iteration_end(run)
    changed = {name.split('.')[0] for name, x in rl.state_dict().items()
               if torch.is_tensor(x) and not torch.equal(x, before[name])}
    assert {'_actor_network', '_target_actor_network', '_critic_networks'} <= changed and '_kept_policy' not in changed


@pytest.mark.parametrize('change, message', [
    (dict(unroll_length=2), 'policy_checkpoints.*TrainerConfig.unroll_length = 2'),
    (dict(num_ray_workers=2), 'policy_checkpoints.*TrainerConfig.num_ray_workers = 2')])
def test_settings_that_do_not_suit_are_rejected_by_name(change, message):
    with pytest.raises(ConfError, match=message):
        make_agent(policy_checkpoints=PolicyCheckpoints(), **change)


def test_policies_are_compared_by_rewards_of_the_environment():
    agent, _ = make_agent(policy_checkpoints=PolicyCheckpoints())
    policy, rewards = agent.policy, []
    checkpoints = SimpleNamespace(observe=lambda step_type, reward: rewards.append(reward))
    time_step = TimeStep(step_type=torch.tensor([1]), reward=torch.tensor([7.0]))
    policy._assess(checkpoints, time_step)
    policy._assess(checkpoints, time_step._replace(reward=torch.tensor([0.1]), untransformed=time_step))
    assert rewards == [7.0, 7.0]


@pytest.mark.parametrize('transformers, changed', [
    ([RewardNormalizer], 'RewardNormalizer'), ([RewardScaling, DiscountedReturnScaling], 'DiscountedReturnScaling'),
    ([RewardScaling], None), ([UntransformedTimeStep, RewardNormalizer], None)])
def test_rewards_of_a_changing_scale_are_rejected(transformers, changed):
    spec = TensorSpec((3, ))
    context.set_run_specs(spec, spec, (), TensorSpec(()))
    transformer = SequentialDataTransformer([partial(t, scale=0.1) if t is RewardScaling else t for t in transformers],
                                            spec)
    config = TrainerConfig(root_dir='', algorithm_ctor=Td7Algorithm, unroll_length=1, mini_batch_length=2,
                           whole_replay_buffer_training=False)
    config.data_transformer = transformer
    for checkpoints in (None, PolicyCheckpoints()):
        policy = make_agent(policy_checkpoints=checkpoints)[0].policy
        if checkpoints is None or changed is None:
            policy.check_config(config)
        else:
            with pytest.raises(ConfError, match=f'changes the rewards by {changed}, but Td7Algorithm.policy'):
                policy.check_config(config)


@pytest.mark.parametrize('random_steps', [0, 1000])
def test_several_environments_are_rejected_at_once(random_steps):
    agent, _ = make_agent(policy_checkpoints=PolicyCheckpoints(), batch_size=2, initial_collect_steps=random_steps)
    with pytest.raises(ConfError, match='policy_checkpoints needs one environment, found 2'):
        for _ in range(2):
            agent.train_iter()


def test_two_processes_are_rejected_by_name(monkeypatch):
    agent, _ = make_agent(policy_checkpoints=PolicyCheckpoints())
    monkeypatch.setattr(context, 'num_ranks', lambda: 2)
    with pytest.raises(ConfError, match='policy_checkpoints is not supported with several processes'):
        agent.policy.check_config(agent._config)


@pytest.mark.parametrize('argument', ['num_episodes', 'late_num_episodes', 'late_after'])
def test_numbers_out_of_range_are_rejected_by_name(argument):
    with pytest.raises(ConfError, match=f'PolicyCheckpoints.{argument}'):
        PolicyCheckpoints(**{argument: 0})
