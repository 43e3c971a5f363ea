"""What TD3 changes in DDPG: delayed updates, smoothed targets, twin critics, random actions at first."""
import copy
from unittest import mock

import pytest
import torch
from helpers.deterministic_agents import make_agent
from helpers.plans import backends_of

from alfx import context, nest
from alfx.algorithms import td3_algorithm
from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.data_structures import StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.optimizers import SGD, Adam, AdamW
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec


def rows_of(observation):
    return Rows((TimeStep(observation=observation), ()))


def copied(module):
    return [p.detach().clone() for p in module.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


def test_policy_and_targets_are_updated_at_every_second_update_only():
    agent, _ = make_agent(Td3Algorithm, updates=1)
    rl = agent.policy
    modules = {'actor': rl.actor, 'critics': rl.critics, 'target actor': rl._target_actor_network,
               'target critics': rl.target_critics}
    for update in range(1, 7):
        before = {name: copied(module) for name, module in modules.items()}
        agent.train_iter()
        changed = {name for name, module in modules.items() if not equal(before[name], module.parameters())}
        assert changed == (set(modules) if update % 2 == 0 else {'critics'})


def test_the_periods_can_be_chosen():
    agent, _ = make_agent(Td3Algorithm, updates=1, policy_update_period=3, target_update_period=1)
    rl = agent.policy
    updates = []
    for update in range(1, 7):
        actor, target = copied(rl.actor), copied(rl.target_critics)
        agent.train_iter()
        if not equal(actor, rl.actor.parameters()):
            updates.append(update)
        assert not equal(target, rl.target_critics.parameters())
    assert updates == [3, 6]


def test_updates_in_between_neither_run_nor_count_for_the_policy():
    agent, _ = make_agent(Td3Algorithm, updates=1, actor_optimizer=Adam(lr=1e-3), critic_optimizer=Adam(lr=1e-3))
    rl = agent.policy
    calls = []
    rl.actor.register_forward_hook(lambda *_: calls.append(1))
    agent.unroll(8)
    for update in range(1, 5):
        calls.clear()
        agent.train_from_replay_buffer()
        assert len(calls) == (update % 2 == 0)
    optimizers = {id(p): o for o in agent.optimizers() for g in o.param_groups for p in g['params']}

    def steps(module):
        return {int(optimizers[id(p)].state[p]['step']) for p in module.parameters()}

    assert steps(rl.actor) == {2}
    assert steps(rl.critics) == {4}


@pytest.mark.parametrize('optimizer', [Adam, AdamW, SGD])
def test_a_single_optimizer_skips_parameters_without_gradient(optimizer):
    agent, _ = make_agent(Td3Algorithm, updates=1, optimizer=optimizer(lr=0.01))
    rl = agent.policy
    for update in range(1, 5):
        actor, critics = copied(rl.actor), copied(rl.critics)
        agent.train_iter()
        assert equal(actor, rl.actor.parameters()) == (update % 2 == 1)
        assert not equal(critics, rl.critics.parameters())


def test_the_counts_are_in_the_checkpoint():
    agent, _ = make_agent(Td3Algorithm, updates=1, initial_collect_steps=20)  # 16 steps an iteration
    for _ in range(3):
        agent.train_iter()  # the first one does not train yet
    rl = agent.policy
    assert rl.state_dict()['_num_updates'] == 2 and not rl._is_actor_trained()
    agent.train_iter()
    assert rl._is_actor_trained()
    saved = copy.deepcopy(agent.state_dict())
    other, _ = make_agent(Td3Algorithm, updates=1, initial_collect_steps=20, seed=7)
    assert not other.policy._is_actor_trained()
    assert other.policy._random_action_probability() == 1.0
    at_first = copy.deepcopy(other.state_dict())
    other.load_state_dict(saved)
    assert other.policy._is_actor_trained()
    assert other.policy._random_action_probability() == 0.0
    other.load_state_dict(at_first)
    assert other.policy._random_action_probability() == 1.0


def test_the_first_actions_are_uniformly_random():
    agent, _ = make_agent(Td3Algorithm, batch_size=4, initial_collect_steps=800, unroll_length=100,
                          exploration_noise=0.0)
    actor = agent.policy.actor

    def is_random(experience):
        greedy = actor(experience.time_step.observation.reshape(-1, 1))[0].reshape(experience.action.shape)
        return (experience.action - greedy).abs() > 1e-6

    random_phase = [agent.unroll(100) for _ in range(2)]
    assert all(is_random(e).all() for e in random_phase)
    actions = torch.cat([e.action for e in random_phase])
    assert actions.std().item() == pytest.approx(3**-0.5, abs=0.04)
    assert not is_random(agent.unroll(100)).any()


def test_each_rank_takes_all_initial_steps(monkeypatch):
    monkeypatch.setattr(context, 'num_ranks', lambda: 2)
    rl = make_agent(Td3Algorithm, batch_size=4, initial_collect_steps=80)[0].policy
    assert (rl._initial_collect_steps, rl._num_acting) == (160, 2)
    without_config = Td3Algorithm(TensorSpec((1, )), BoundedTensorSpec((1, ), torch.float32, -1, 1), config=None)
    assert without_config._random_action_probability() == 0.0


def test_ray_workers_share_the_random_steps():
    agent, _ = make_agent(Td3Algorithm, batch_size=4, initial_collect_steps=80, num_ray_workers=2)  # 8 steps at a time
    rl = agent.policy
    agent.unroll(9)
    assert rl._random_action_probability() == 1.0
    agent.unroll(1)
    assert rl._random_action_probability() == 0.0


def test_targets_are_smoothed_by_clipped_noise_within_the_bounds():
    agent, _ = make_agent(Td3Algorithm, 'nested action', target_noise=0.2, noise_clip=0.3)
    rl = agent.policy
    action = {'first': torch.ones(20000, 2), 'second': torch.full((20000, 1), 0.95)}
    smoothed = rl._target_action(action)
    noise = (smoothed['first'] - 1) / 2  # half of the range [-1, 3]
    assert noise.abs().max().item() == pytest.approx(0.3, abs=1e-6)
    # a normal distribution with deviation 0.2 clipped at 1.5 deviations has one of 0.2 * 0.8813
    assert noise.std().item() == pytest.approx(0.1763, rel=0.02)
    assert smoothed['second'].max() == 1.0 and smoothed['second'].min().item() == pytest.approx(0.8)
    assert torch.equal(action['first'], torch.ones(20000, 2))


def test_targets_take_the_smaller_value_and_the_policy_the_first_critic():
    agent, _ = make_agent(Td3Algorithm)
    rl = agent.policy
    q_values = torch.tensor([[1.0, 2.0], [4.0, 3.0]])
    rl.target_critics.forward = lambda inputs, state: (q_values, state)
    assert rl._target_values(rows_of(torch.zeros(2, 1)), rl.train_state_spec.critics)[0].tolist() == [1.0, 3.0]
    inputs = torch.randn(3, 1), torch.randn(3, 1)
    assert torch.equal(rl._objective(inputs, ())[0], rl.critics(inputs)[0][:, 0])


def test_the_loss_of_the_policy_does_not_compute_the_second_critic():
    agent, _ = make_agent(Td3Algorithm)
    rl = agent.policy
    observation = torch.randn(3, 1)
    expected = rl._actor_step(rows_of(observation), rl.train_state_spec.actor)[1]
    for p in rl.critics.parameters():
        p.data[1] = torch.nan  # 0 * nan is nan, so that its gradient would be seen too
    assert expected.isfinite().all()
    assert torch.equal(rl._actor_step(rows_of(observation), rl.train_state_spec.actor)[1], expected)


def test_the_target_matches_a_slow_loop(monkeypatch):
    agent, _ = make_agent(Td3Algorithm, target_noise=0.2, noise_clip=0.1)
    rl = agent.policy
    for p in rl.target_critics.parameters():
        p.data.add_(torch.randn_like(p))
    noise = torch.randn(5, 1)
    monkeypatch.setattr(td3_algorithm, 'gaussian_like', lambda x, stddev, clip: (noise * stddev).clamp(-clip, clip))
    observation = torch.randn(5, 1)
    found, _, _ = rl._target_values(rows_of(observation), rl.train_state_spec.critics)
    for b in range(5):
        action = rl._target_actor_network(observation[b:b + 1])[0].item()
        action = max(-1.0, min(1.0, action + max(-0.1, min(0.1, 0.2 * noise[b].item()))))
        values = rl.target_critics((observation[b:b + 1], torch.tensor([[action]])))[0][0]
        assert found[b].item() == pytest.approx(min(values.tolist()), abs=1e-5)
    assert not found.requires_grad


def test_the_policy_loss_is_logged_even_by_updates_without_one():
    agent, _ = make_agent(Td3Algorithm, updates=1)
    rl = agent.policy
    time_step = TimeStep(step_type=torch.tensor([[StepType.MID, StepType.LAST], [StepType.MID, StepType.MID]],
                                                dtype=torch.int32),
                         reward=torch.zeros(2, 2), discount=torch.ones(2, 2), observation=torch.randn(2, 2, 1))
    info = rl.rollout_step(nest.map_structure(lambda x: x[0], time_step), rl.get_initial_rollout_state(2)).info
    infos = []
    for _ in range(3):
        infos.append(rl.train_sequence(time_step, rl.train_state_spec, info._replace(action=torch.zeros(2, 2, 1))).info)
        rl.after_update(time_step, infos[-1])
    assert infos[0].actor_loss == () and infos[2].actor_loss == ()
    context.set_summary_writer(mock.MagicMock())
    with context.record_if(True):
        assert rl.calc_loss(infos[0]).extra.actor == 0  # there has been none yet
        rl.calc_loss(infos[1])
        shown = rl.calc_loss(infos[2]).extra.actor
    loss = infos[1].actor_loss.detach()
    torch.testing.assert_close(shown, (loss[0, 0] + loss[1, 0] + loss[1, 1]) / 3)


def _agent_after(iterations, seed=0):
    agent, _ = make_agent(Td3Algorithm, updates=1, seed=seed)
    for _ in range(iterations):
        agent.train_iter()
    return agent


def test_the_logged_policy_loss_is_in_the_checkpoint(tmp_path):
    agent, other = _agent_after(4), _agent_after(0, seed=7)
    losses = agent.policy._latest_policy_losses
    assert losses.any() and not other.policy._latest_policy_losses.any()
    Checkpointer(str(tmp_path), alg=agent).save(4)
    Checkpointer(str(tmp_path), alg=other).load()
    assert torch.equal(other.policy._latest_policy_losses, losses)


def test_a_checkpoint_without_the_logged_policy_loss_is_loaded(tmp_path):
    agent, other = _agent_after(4), _agent_after(0, seed=7)
    state = {key: x for key, x in agent.state_dict().items() if not key.endswith('_latest_policy_losses')}
    assert len(state) == len(agent.state_dict()) - 1
    other.load_state_dict(state)
    assert other.policy._is_actor_trained() == agent.policy._is_actor_trained()
    with mock.patch.object(agent, 'state_dict', lambda: state):
        Checkpointer(str(tmp_path), alg=agent).save(4)
    third = _agent_after(0, seed=8)
    Checkpointer(str(tmp_path), alg=third).load()
    assert not third.policy._latest_policy_losses.any()
    assert all(torch.equal(a, b) for a, b in zip(third.parameters(), agent.parameters()))


@pytest.mark.compiles
@pytest.mark.slow
def test_compiled_updates_match_eager_ones():
    agents = [make_agent(Td3Algorithm, updates=2, compile=compile)[0] for compile in (False, True)]
    assert all(agent.capabilities.traceable_update for agent in agents)
    for agent in agents:
        torch.manual_seed(1)
        for _ in range(3):
            agent.train_iter()
    played, compiled = backends_of(agents[1])
    assert compiled.num_graphs == 2 and not played.num_graphs  # with and without the policy
    for (name, a), (_, b) in zip(*(agent.named_parameters() for agent in agents)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize('argument,value', [('policy_update_period', 0), ('target_noise', -0.1), ('noise_clip', -1.0),
                                            ('exploration_noise', -0.1)])
def test_numbers_out_of_range_are_rejected_by_name(argument, value):
    with pytest.raises(ConfError, match=f'Td3Algorithm.{argument}'):
        make_agent(Td3Algorithm, **{argument: value})
