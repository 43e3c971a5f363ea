"""The compiled update does what the update does."""
from functools import partial

import pytest
import torch

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.engine.compiled_update import CompiledUpdate
from alfx.engine.errors import NonFiniteLossError
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.q_networks import QNetwork
from alfx.optimizers import SGD, Adam


class _Dqn(DqnAlgorithm):
    """A DQN whose loss can be spoiled."""

    own_traits = DqnAlgorithm.own_traits

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer('factor', torch.ones(()))

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info._replace(loss=loss_info.loss * self.factor,
                                  extra=loss_info.extra._replace(critic=loss_info.extra.critic * self.factor))


class _Changing(DqnAlgorithm):
    """A subclass which does not say that its update is fixed."""


class _Peeking(DqnAlgorithm):
    """It says that its update is fixed, but the sign of a loss decides how it goes on."""

    own_traits = DqnAlgorithm.own_traits

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info if loss_info.loss.sum() > 0 else loss_info._replace(loss=2 * loss_info.loss)


def make_agent(compile, optimizer=None, algorithm_cls=DqnAlgorithm, rl=None, action_type=ActionType.Discrete,
               priority_replay=True):
    torch.manual_seed(0)
    context.reset()
    env = PolicyUnittestEnv(batch_size=4, episode_length=5, action_type=action_type)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=8, mini_batch_length=2,
                           num_updates_per_train_iter=3, whole_replay_buffer_training=False, clear_replay_buffer=False,
                           replay_buffer_length=100, priority_replay=priority_replay, compile=compile)
    rl = rl or partial(algorithm_cls, q_network_cls=partial(QNetwork, fc_layer_params=(8, )), calculate_priority=True)
    agent = Agent(env.observation_spec(), env.action_spec(), env=env, config=config, rl_algorithm_cls=rl,
                  optimizer=optimizer or Adam(lr=1e-2, gradient_clipping=0.1, clip_by_global_norm=True))
    agent.finalize()
    return agent


def train(agents, iterations, between=lambda agent: None):
    """Some iterations of each agent, with the same random numbers."""
    for agent in agents:
        torch.manual_seed(1)
        context.reset()
        for _ in range(iterations):
            agent.train_iter()
            between(agent)


def assert_same_parameters(agents, atol=1e-5, rtol=1e-4):
    for (name, a), (_, b) in zip(agents[0].named_parameters(), agents[1].named_parameters()):
        torch.testing.assert_close(a, b, atol=atol, rtol=rtol, msg=name)


def test_it_gives_the_same_parameters_as_the_plain_update_and_a_checkpoint_of_either_fits_the_other():
    plain, compiled = agents = make_agent(False), make_agent(True)
    train(agents, 3)
    assert_same_parameters(agents)
    state = compiled.state_dict()
    plain.load_state_dict(state)
    steps = [s['step'] for s in plain.optimizers()[0].state.values()]
    assert all(int(step) == 9 for step in steps)
    before = [p.detach().clone() for p in compiled.parameters()]
    other = make_agent(False)
    other.train_iter()
    compiled.load_state_dict(other.state_dict())  # makes other tensors for the optimizer's state
    compiled.train_iter()
    assert not all(torch.equal(a, b) for a, b in zip(before, compiled.parameters()))
    assert [int(s['step']) for s in compiled.optimizers()[0].state.values()] == [6] * len(steps)


def test_samples_in_several_places_are_one_record_and_give_the_parameters_of_plain_updates():
    plain, compiled = agents = [make_agent(compile, priority_replay=False) for compile in (False, True)]
    train(agents, 4)
    assert_same_parameters(agents)
    assert len(compiled._batch_reader.reader.slots) == 3 and len(plain._batch_reader.reader.slots) == 1
    assert len(compiled._fast_update._records) == 1


def test_parameters_that_have_moved_are_noticed_before_the_next_iteration():
    def move(agent):
        for p in agent.parameters():
            p.data = p.data.clone()

    agents = [make_agent(compile, priority_replay=False) for compile in (False, True)]
    train(agents, 4, move)
    assert_same_parameters(agents)


def test_a_loss_that_is_not_finite_stops_the_run_and_changes_no_parameter():
    agent = make_agent(True, algorithm_cls=_Dqn)
    agent.train_iter()
    before = [p.detach().clone() for p in agent.parameters() if p.requires_grad]
    agent._rl_algorithm.factor.fill_(float('nan'))
    with pytest.raises(NonFiniteLossError, match='critic'):
        agent.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(before, (p for p in agent.parameters() if p.requires_grad)))


def test_an_algorithm_whose_update_changes_is_refused():
    with pytest.raises(ConfError, match='not the same operations'):
        make_agent(True, algorithm_cls=_Changing)


def test_an_update_that_looks_at_values_is_made_step_by_step_with_a_warning(caplog):
    agents = [make_agent(compile, algorithm_cls=_Peeking) for compile in (False, True)]
    train(agents, 3)
    assert all(torch.equal(a, b) for a, b in zip(agents[0].parameters(), agents[1].parameters()))
    warnings = [record.getMessage() for record in caplog.records if 'TrainerConfig.compile' in record.getMessage()]
    assert len(warnings) == 1 and 'looks at the values of a tensor' in warnings[0]


def test_any_optimizer_makes_its_own_step():
    agents = [make_agent(compile, SGD(lr=0.1, momentum=0.9, gradient_clipping=0.1)) for compile in (False, True)]
    train(agents, 2)
    assert_same_parameters(agents)


def test_a_loss_with_a_gradient_inside_can_be_compiled():
    rl = partial(SacAlgorithm, actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
                 critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=(8, )), calculate_priority=True)
    agents = [make_agent(compile, rl=rl, action_type=ActionType.Continuous, optimizer=Adam(lr=1e-2))
              for compile in (False, True)]
    train(agents, 3)
    assert isinstance(agents[1]._fast_update, CompiledUpdate)
    assert_same_parameters(agents, atol=2e-5, rtol=1e-3)
