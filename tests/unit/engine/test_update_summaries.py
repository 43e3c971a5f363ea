"""A compiled update writes the summaries that the plain one writes."""
from functools import partial

import pytest
import torch

from alfx import context, summary
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.q_networks import QNetwork
from alfx.optimizers import Adam

SAC = partial(SacAlgorithm, actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
              critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=(8, )))
TD3 = partial(Td3Algorithm, actor_network_ctor=partial(ActorNetwork, fc_layer_params=(8, )),
              critic_network_ctor=partial(CriticNetwork, joint_fc_layer_params=(8, )))


class Writer:
    """Keeps what is written; ``float`` is called on everything, as a writer of files would."""

    def __init__(self):
        self.scalars, self.histograms = [], []

    def add_scalar(self, tag, value, step, walltime=None):
        assert type(value) is float
        self.scalars.append((step, tag, value))

    def add_histogram(self, tag, *args):
        self.histograms.append(tag)


class Dqn(DqnAlgorithm):
    """Counts its calls in Python, and writes a summary of its own."""

    own_traits = DqnAlgorithm.own_traits

    def __init__(self, *args, says='', **kwargs):
        super().__init__(*args, **kwargs)
        self.says, self.num_calls = says, 0

    def calc_loss(self, info):
        self.num_calls += 1
        loss_info = super().calc_loss(info)
        if summary.should_record_summaries():
            if self.says == 'histogram':
                summary.histogram('own', loss_info.loss)
            elif self.says == 'number':
                summary.scalar('own', self.num_calls)
            elif self.says == 'constant':
                summary.scalar('own', torch.tensor(float(self.num_calls)))
            elif self.says == 'noise':
                summary.scalar('own', (loss_info.loss * torch.randn_like(loss_info.loss)).mean())
            elif self.says == 'category':
                loss_info = loss_info._replace(batch_label=torch.zeros_like(loss_info.loss[0], dtype=torch.int64))
            elif self.says == 'text':
                loss_info = loss_info._replace(extra=dict(critic=loss_info.extra.critic, calls=self.num_calls))
            else:
                with summary.scope('mine'):
                    summary.scalar('own', loss_info.loss.max())
        return loss_info


class SpeakingAgent(Agent):
    """Looks at the infos of training in its summaries, as nobody can know."""

    own_traits = Agent.own_traits
    seen: list = []

    def summarize_train(self, experience, train_info, loss_info, params):
        self.seen.append(train_info)
        super().summarize_train(experience, train_info, loss_info, params)


def make_agent(compile, rl=None, action_type=ActionType.Continuous, agent_cls=Agent, says='', **config):
    torch.manual_seed(0)
    context.reset()
    env = PolicyUnittestEnv(batch_size=4, episode_length=5, action_type=action_type)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=agent_cls, unroll_length=4, mini_batch_size=8,
                           mini_batch_length=2, num_updates_per_train_iter=3, whole_replay_buffer_training=False,
                           clear_replay_buffer=False, replay_buffer_length=100, compile=compile,
                           summarize_grads_and_vars=True, **config)
    if rl is None:
        rl, action_type = partial(Dqn, q_network_cls=partial(QNetwork, fc_layer_params=(8, )), says=says), None
    agent = agent_cls(env.observation_spec(), env.action_spec(), env=env, config=config, rl_algorithm_cls=rl,
                      optimizer=Adam(lr=1e-2))
    agent.finalize()
    return agent


def make_dqn(compile, says='', **more):
    return make_agent(compile, None, ActionType.Discrete, says=says, **more)


def train(agent, iterations=4):
    """What training writes, in iterations of which every second one writes."""
    torch.manual_seed(1)
    context.reset()
    writer = Writer()
    context.set_summary_writer(writer)
    for i in range(iterations):
        with context.record_if(i % 2 == 1):
            agent.train_iter()
    context.set_summary_writer(None)
    return writer


def losses(writer):
    return [x for x in writer.scalars if not x[1].startswith(('time/', 'summarize'))]


@pytest.mark.parametrize('rl', [SAC, TD3, None], ids=['sac', 'td3', 'dqn'])
def test_the_summaries_of_compiled_and_plain_updates_agree(rl):
    make = partial(make_agent, rl=rl) if rl is not None else make_dqn
    plain = make(False)
    expected = train(plain)
    compiled = make(True)
    found = train(compiled)
    assert compiled._fast_update.can_summarize
    assert [x[:2] for x in sorted(losses(found))] == [x[:2] for x in sorted(losses(expected))]
    assert any(tag.startswith('loss/') for _, tag, _ in found.scalars)
    for (_, tag, a), (_, _, b) in zip(sorted(losses(found)), sorted(losses(expected))):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4), tag
    assert found.histograms == expected.histograms  # of gradients and variables


def test_updates_with_summaries_are_not_made_step_by_step():
    agent = make_dqn(True)
    writer = train(agent, 2)
    before = agent._rl_algorithm.num_calls
    own = [x for x in train(agent, 6).scalars if x[1].endswith('mine/own')]
    assert agent._rl_algorithm.num_calls == before
    assert len(own) == 3 and len({value for _, _, value in own}) == 3
    assert [x for x in writer.scalars if x[1].endswith('mine/own')]


@pytest.mark.parametrize('says', ['histogram', 'number', 'constant', 'noise', 'category', 'text'])
def test_what_a_compiled_update_cannot_say_is_said_by_one_that_is_made_step_by_step(says, caplog):
    caplog.set_level('INFO')
    expected, agent = train(make_dqn(False, says)), make_dqn(True, says)
    found = train(agent)
    assert 'that write summaries are made step by step' in caplog.text
    assert agent._rl_algorithm.num_calls > 2
    assert len(found.histograms) == len(expected.histograms)
    tags = [x[:2] for x in losses(expected)]
    assert [x[:2] for x in losses(found)] == tags and len(tags) >= 4


def test_summaries_that_look_at_the_infos_of_training_get_them():
    SpeakingAgent.seen = []
    train(make_dqn(True, agent_cls=SpeakingAgent))
    assert SpeakingAgent.seen and all(info != () for info in SpeakingAgent.seen)
    assert not make_dqn(True, summarize_action_distributions=True)._fast_update


def test_the_policy_loss_of_td3_is_shown_at_updates_that_have_none():
    agent = make_agent(False, rl=TD3)
    writer = train(agent, 6)
    shown = [(step, value) for step, tag, value in writer.scalars if tag.endswith('.actor')]
    assert len(shown) == 3 and all(value != 0 for _, value in shown)
