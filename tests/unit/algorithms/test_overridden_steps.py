"""Steps and hooks that a subclass overrides are called, although alfx has faster ways to compute the same."""
from functools import partial

import pytest
import torch
from helpers import agents, dqn_agents, offline_agents, sac_agents
from helpers.overriding import counting

from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.containers import RLAlgWrapper
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.exploration.bonus import ExplorationBonus
from alfx.algorithms.exploration.factors import EpisodicCount
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.td_loss import TDLoss
from alfx.engine.updater import NonFiniteLossError
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.q_networks import QNetwork
from alfx.utils.schedulers import LinearScheduler


def assert_same_training(agent, reference, calls, iterations=3):
    for each in (agent, reference):
        torch.manual_seed(1)
        for _ in range(iterations):
            each.train_iter()
    assert calls
    for a, b in zip(agent.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('mixin', [False, True])
@pytest.mark.parametrize('environment', ['continuous', 'recurrent'])
def test_a_train_step_of_a_subclass_of_sac_is_called(environment, mixin):
    cls, calls = counting(SacAlgorithm, 'train_step', mixin=mixin)
    assert_same_training(*(sac_agents.make_agent(environment, each)[0] for each in (cls, SacAlgorithm)), calls)


def test_a_train_step_of_a_subclass_of_ppo_is_called(monkeypatch):
    cls, calls = counting(PPOAlgorithm, 'train_step')
    monkeypatch.setitem(agents.ALGORITHMS, 'ppo', partial(cls, **getattr(agents.ALGORITHMS['ppo'], 'keywords', {})))
    agents.make_agent('ppo', 'discrete')[0].train_iter()
    assert calls


def test_subclasses_without_a_train_step_keep_the_fast_sequence():
    cls, _ = counting(SacAlgorithm, 'rollout_step')
    assert cls.train_sequence is SacAlgorithm.train_sequence
    step, _ = counting(SacAlgorithm, 'train_step')
    sequence, _ = counting(step, 'train_sequence')
    assert step.train_sequence is Algorithm.train_sequence and sequence.train_sequence is not Algorithm.train_sequence


@pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo', 'impala'])
def test_a_rollout_step_of_a_subclass_of_agent_is_called(algorithm, monkeypatch):
    cls, calls = counting(Agent, 'rollout_step')
    reference = agents.make_agent(algorithm, 'discrete')[0]
    monkeypatch.setattr(agents, 'Agent', cls)
    agent = agents.make_agent(algorithm, 'discrete')[0]
    agent.train_iter()
    assert calls == ['rollout_step'] * len(calls) and len(calls) >= 6
    assert reference.capabilities.recomputes_rollout_info and not agent.capabilities.recomputes_rollout_info


def test_infos_of_a_wrapper_with_its_own_rollout_step_are_kept():
    policy = agents.make_agent('actor-critic', 'discrete')[0].policy
    for cls, recomputes in ((RLAlgWrapper, True), (counting(RLAlgWrapper, 'rollout_step')[0], False)):
        wrapper = cls(policy._observation_spec, policy._action_spec, policy)
        assert wrapper.capabilities.recomputes_rollout_info == recomputes


@pytest.mark.parametrize('name', ['observe_for_replay', 'observe_for_metrics'])
def test_a_hook_for_each_step_is_called(name):
    cls, calls = counting(Agent, name)
    assert_same_training(dqn_agents.make_agent(agent_cls=cls), dqn_agents.make_agent(), calls)
    assert len(calls) == 3 * 4, 'iterations and steps of an unroll'


def test_an_agent_that_transforms_experience_itself_updates_eagerly():
    cls, calls = counting(Agent, 'transform_experience')
    agent = dqn_agents.make_agent(agent_cls=type('Declaring', (cls, ), {'own_capabilities': Agent.own_capabilities}))
    assert dqn_agents.make_agent().capabilities.traceable_update and not agent.capabilities.traceable_update
    for _ in range(4):
        agent.train_iter()
    assert len(calls) >= 4


def test_a_subclass_of_icm_that_declares_traceable_updates_learns():
    class Declaring(ICMAlgorithm):
        def train_step(self, inputs, state, rollout_info=()):
            return super().train_step(inputs, state, rollout_info)

        def own_capabilities(self):
            return super().own_capabilities()._replace(traceable_update=True)

    agent = sac_agents.make_agent('continuous', mini_batch_length=3, config_args={'unroll_with_grad': True},
                                  agent_args={'intrinsic_reward_module': Declaring})[0]
    before = [p.detach().clone() for p in agent.intrinsic_reward.parameters()]
    for _ in range(3):
        agent.train_iter()
    assert not any(torch.equal(p, old) for p, old in zip(agent.intrinsic_reward.parameters(), before))


@pytest.mark.parametrize('name', ['bootstrap_values', 'trained_values'])
def test_joint_batches_are_rejected_for_separate_values(name):
    cls, _ = counting(SacAlgorithm, name)
    agent = sac_agents.make_agent('continuous', cls, critic_batches='joint')[0]
    with pytest.raises(NotImplementedError, match='Overriding.joint_values'):
        agent.train_iter()


def test_a_rollout_step_of_a_subclass_of_rnd_is_called():
    cls, calls = counting(RNDAlgorithm, 'rollout_step')

    def network(spec):
        return EncodingNetwork(spec, fc_layer_params=(4, ))

    agent = agents.make_agent('ppo', 'discrete', intrinsic_reward_module=lambda observation_spec, action_spec: cls(
        observation_spec=observation_spec, target_net=network(observation_spec),
        predictor_net=network(observation_spec)))[0]
    agent.train_iter()
    assert calls


def test_an_offline_train_step_of_a_subclass_of_agent_is_called(tmp_path, monkeypatch):
    cls, calls = counting(Agent, 'train_step_offline')
    monkeypatch.setattr(sac_agents, 'Agent', cls)
    offline_agents.make_agent('bc', offline_agents.record(str(tmp_path / 'data'))).train_iter()
    assert calls


@pytest.mark.parametrize('first_only', [False, True])
def test_a_td_loss_of_a_subclass_sees_the_values_of_all_steps(first_only):
    class AllSteps(TDLoss):
        def __init__(self, **kwargs):
            super().__init__(td_lambda=1.0, **kwargs)

        def compute_td_target(self, info, target_value):
            self.seen = target_value[1:].clone()
            return super().compute_td_target(info, target_value)

    agent = dqn_agents.make_agent(mini_batch_length=4, priority_replay=False, rl=partial(
        DqnAlgorithm, q_network_cls=partial(QNetwork, fc_layer_params=(8, )), critic_loss_ctor=AllSteps,
        num_critic_replicas=1, train_first_step_only=first_only))
    for _ in range(3):
        agent.train_iter()
    assert (agent.policy._critic_losses[0].seen != 0).all()


def test_a_schedule_of_the_clipping_that_nobody_reads_is_an_error(monkeypatch):
    class Unread(PPOLoss):
        def update_schedules(self):
            pass

    schedule = LinearScheduler('percent', [(0, 0.2), (1, 0.1)])
    monkeypatch.setitem(agents.ALGORITHMS, 'ppo', partial(PPOAlgorithm, loss_class=partial(
        Unread, importance_ratio_clipping=schedule)))
    agent = agents.make_agent('ppo', 'discrete')[0]
    with pytest.raises(NonFiniteLossError):
        agent.train_iter()


def test_an_overridden_get_batch_of_the_replay_buffer_is_called():
    buffer, calls = counting(ReplayBuffer, 'get_batch')

    class OwnBuffer(Agent):
        own_capabilities = Agent.own_capabilities

        def build_replay_buffer(self, spec):
            super().build_replay_buffer(spec)
            self._replay_buffer.__class__ = buffer

    agent = dqn_agents.make_agent(agent_cls=OwnBuffer)
    for _ in range(3):
        agent.train_iter()
    assert calls and agent.capabilities.traceable_update


@pytest.mark.parametrize('owner', ['agent', 'policy', 'policy with a reward that has a state between unrolls'])
def test_an_overridden_postprocess_unroll_is_called(owner):
    if owner != 'agent':
        cls, calls = counting(SacAlgorithm, 'postprocess_unroll')
        reward = partial(ExplorationBonus, factors=(partial(EpisodicCount, resolution=0.5), ))
        agent = sac_agents.make_agent('continuous', cls, agent_args=dict(
            intrinsic_reward_module=reward if 'reward' in owner else None))[0]
    else:
        cls, calls = counting(Agent, 'postprocess_unroll')
        agent = dqn_agents.make_agent(agent_cls=cls)
    calls.clear()
    agent.train_iter()
    assert calls == ['postprocess_unroll']


def test_preprocess_experience_of_a_subclass_of_ppo_gets_the_values(monkeypatch):
    shapes = []

    class Own(PPOAlgorithm):
        def preprocess_experience(self, root_inputs, rollout_info, batch_info):
            shapes.append((root_inputs.reward.shape, rollout_info.value.shape))
            return super().preprocess_experience(root_inputs, rollout_info, batch_info)

    monkeypatch.setitem(agents.ALGORITHMS, 'ppo', partial(Own, **getattr(agents.ALGORITHMS['ppo'], 'keywords', {})))
    agents.make_agent('ppo', 'discrete')[0].train_iter()
    assert shapes and all(reward == value for reward, value in shapes)


def test_the_choice_of_a_subclass_of_sac_is_what_the_rollout_does():
    class Zero(SacAlgorithm):
        def _choose(self, *args, **kwargs):
            choice = super()._choose(*args, **kwargs)
            return choice._replace(action=torch.zeros_like(choice.action))

    experience = sac_agents.make_agent('continuous', Zero)[0].unroll(3)
    assert (experience.action[:3] == 0).all()


@pytest.mark.parametrize('declares', [False, True])
def test_measures_of_a_subclass_are_reported(declares):
    class Measuring(SacAlgorithm):
        def measures(self, info):
            return {'three': 3 * torch.ones(1)}

    if declares:
        Measuring.own_capabilities = lambda self: super(Measuring, self).own_capabilities()._replace(
            traceable_update=True, traceable_prediction=True)
    agent = sac_agents.make_agent('continuous', Measuring)[0]
    assert not agent.capabilities.traceable_prediction
    info = agent.predict_step(agent.environment.current_time_step(), agent.get_initial_predict_state(
        agent.environment.batch_size)).info
    assert agent.measures(info) == {'three': 3}
