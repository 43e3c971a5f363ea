"""A network as a representation learner: outputs, losses, and training on sequences."""
from functools import partial

import pytest
import torch
from helpers.agents import make_agent
from helpers.plans import num_graphs
from torch import nn

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.encoding_algorithm import EncodingAlgorithm, encode_sequence
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import LossInfo, StepType, TimeStep, restart
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.network import Network
from alfx.optimizers import SGD, Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.checkpoint_utils import Checkpointer

OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((), torch.int64, 0, 1)
encoder = partial(EncodingNetwork, fc_layer_params=(8, ))
memory = partial(LSTMEncodingNetwork, hidden_size=(6, ))


class Autoencoder(Network):
    """A code of two numbers, with its size and the error of a reconstruction as losses."""

    def __init__(self, input_tensor_spec):
        super().__init__(input_tensor_spec, name='autoencoder')
        self.encode, self.decode = nn.Linear(input_tensor_spec.numel, 2), nn.Linear(2, input_tensor_spec.numel)

    def forward(self, inputs, state=()):
        code = self.encode(inputs)
        error = (self.decode(code) - inputs).square().sum(-1)
        return {'code': code, 'more': {'double': 2 * code}, 'loss': (error, code.square().sum(-1))}, state


class TimeStepEncoder(Network):
    """A network of the observation, the reward and the previous action."""

    def __init__(self, input_tensor_spec):
        super().__init__(input_tensor_spec, name='time_step_encoder')
        self.layer = nn.Linear(input_tensor_spec.observation.numel + 1, 4)

    def forward(self, inputs, state=()):
        return self.layer(torch.cat([inputs.observation, inputs.reward.unsqueeze(-1)], -1)) + inputs.prev_action[
            ..., None], state


def time_steps(*outer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TimeStep(step_type=torch.randint(0, 3, outer, generator=generator, dtype=torch.int32),
                    reward=torch.rand(outer, generator=generator), discount=torch.ones(outer),
                    observation=torch.randn(*outer, 3, generator=generator),
                    prev_action=torch.randint(0, 2, outer, generator=generator),
                    env_id=torch.zeros(outer, dtype=torch.int64))


def sac_agent(learner, seed=0, mini_batch_length=2, use_rollout_state=False, batch_size=4):
    """Return SAC for continuous actions with the representation learner, in episodes of 5 steps, ready to train."""
    torch.manual_seed(seed)
    context.reset()
    env = PolicyUnittestEnv(batch_size, episode_length=5, action_type=ActionType.Continuous)
    env.seed(seed)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=8,
                           mini_batch_length=mini_batch_length, num_updates_per_train_iter=2,
                           whole_replay_buffer_training=False, clear_replay_buffer=False, replay_buffer_length=20,
                           use_rollout_state=use_rollout_state)
    sac = partial(SacAlgorithm, actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
                  critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=(8, )))
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  rl_algorithm_cls=sac, representation_learner_cls=learner, optimizer=Adam(lr=1e-2))
    agent.finalize()
    return agent, env


def with_losses(**args):
    args = {'output_fields': 'code', 'loss_fields': ('loss.0', 'loss.1'), **args}
    return EncodingAlgorithm(OBSERVATION, ACTION, encoder_cls=Autoencoder, **args)


def test_the_output_of_the_network_is_the_representation():
    algorithm = EncodingAlgorithm(OBSERVATION, ACTION, encoder_cls=encoder)
    step = time_steps(5)
    expected = algorithm._encoder(step.observation)[0]
    assert algorithm.output_spec == TensorSpec((8, ))
    for method in (algorithm.predict_step, algorithm.rollout_step, algorithm.train_step):
        assert torch.equal(method(step, ()).output, expected)
    assert algorithm.calc_loss(algorithm.train_step(step, (), ()).info) == LossInfo()


def test_output_fields_select_the_representation():
    assert with_losses().output_spec == TensorSpec((2, ))
    algorithm = with_losses(output_fields={'a': 'more.double', 'b': ['code']})
    assert algorithm.output_spec == {'a': TensorSpec((2, )), 'b': [TensorSpec((2, ))]}
    output = algorithm.predict_step(time_steps(4), ()).output
    assert torch.equal(output['a'], 2 * output['b'][0])


def test_losses_are_weighted_and_added_up():
    algorithm = with_losses(loss_weights=(0.5, 2.0))
    step = time_steps(4)
    error, size = algorithm._encoder(step.observation)[0]['loss']
    info = algorithm.calc_loss(algorithm.train_step(step, (), ()).info)
    torch.testing.assert_close(info.loss, 0.5 * error + 2.0 * size)
    assert torch.equal(info.extra[0], error) and torch.equal(info.extra[1], size)
    single = with_losses(loss_fields='loss.1').train_step(step, (), ()).info
    assert single.loss.shape == (4, ) and torch.equal(single.loss, single.extra)


def test_evaluation_measures_the_losses():
    step = with_losses().predict_step(time_steps(4), ())
    assert [loss.shape for loss in step.info] == [(4, ), (4, )]


def test_on_policy_losses_are_in_the_rollout_and_off_policy_stores_nothing():
    for on_policy in (True, False):
        algorithm = with_losses()
        algorithm.set_on_policy(on_policy)
        info = algorithm.rollout_step(time_steps(4), ()).info
        assert isinstance(info, LossInfo) if on_policy else info == ()


@pytest.mark.parametrize('args, error, message', [
    (dict(loss_weights=(1.0, )), ValueError, 'structure'),
    (dict(loss_fields=None, loss_weights=1.0), ValueError, 'loss_weights = 1.0 have no effect without loss_fields'),
    (dict(loss_fields='loss'), SpecError, "the loss field 'loss' of"),
    (dict(loss_fields='code'), SpecError, "the loss field 'code' of the encoder has to be one floating point number"),
    (dict(output_fields='cod'), LookupError, "did you mean 'code'"),
])
def test_invalid_arguments_are_rejected(args, error, message):
    with pytest.raises(error, match=message):
        with_losses(**args)


def test_the_whole_time_step_may_be_the_input():
    algorithm = EncodingAlgorithm(OBSERVATION, ACTION, encoder_cls=TimeStepEncoder, time_step_as_input=True)
    step = time_steps(5)
    full = step._replace(env_info={'x': torch.zeros(5)}, untransformed=step, action_mask=torch.ones(5, 3) > 0)
    assert torch.equal(algorithm.predict_step(full, ()).output, algorithm._encoder(step)[0])
    other = algorithm.predict_step(full._replace(prev_action=1 - step.prev_action), ()).output
    assert not torch.equal(other, algorithm.predict_step(full, ()).output)


@pytest.mark.parametrize('encoder_cls', [memory, encoder])
def test_sequences_match_a_loop_over_steps(encoder_cls):
    algorithm = EncodingAlgorithm(OBSERVATION, ACTION, encoder_cls=encoder_cls)
    steps = time_steps(5, 4)
    assert algorithm.capabilities.trains_sequences_at_once
    assert algorithm.capabilities.needs_previous_step == (encoder_cls is memory)
    state = nest.map_structure(lambda spec: torch.randn(5, 4, *spec.shape), algorithm.train_state_spec)
    at_once = algorithm.train_sequence(steps, state, ()).output
    one = nest.map_structure(lambda x: x[0], state)
    for t in range(5):
        begins = (steps.step_type[t] == StepType.FIRST).unsqueeze(-1)
        one = nest.map_structure(lambda x, begins=begins: torch.where(begins, 0.0, x), one)
        step = algorithm.train_step(nest.map_structure(lambda x, t=t: x[t], steps), one, ())
        one = step.state
        torch.testing.assert_close(at_once[t], step.output)


def test_gradients_of_a_sequence_do_not_cross_the_beginning_of_an_episode():
    network = memory(OBSERVATION)
    observation = torch.randn(3, 1, 3, requires_grad=True)
    step_type = torch.tensor([[StepType.MID], [StepType.LAST], [StepType.FIRST]])
    zeros = nest.map_structure(lambda spec: torch.zeros(1, *spec.shape), network.state_spec)
    outputs, _ = encode_sequence(network, observation, zeros, step_type)
    for t, reached in ((1, [True, True, False]), (2, [False, False, True])):
        gradient, = torch.autograd.grad(outputs[t].sum(), observation, retain_graph=True)
        assert (gradient != 0).flatten(1).any(1).tolist() == reached


@pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])
@pytest.mark.parametrize('encoder_cls', [encoder, memory, Autoencoder])
def test_the_encoder_uses_its_own_optimizer_or_that_of_the_agent(algorithm, encoder_cls):
    fields = dict(output_fields='code', loss_fields=('loss.0', 'loss.1')) if encoder_cls is Autoencoder else {}
    for optimizer in (None, SGD(lr=0.1)):
        learner = partial(EncodingAlgorithm, encoder_cls=encoder_cls, optimizer=optimizer, **fields)
        agent, env = make_agent(algorithm, 'discrete', representation_learner_cls=learner, mini_batch_length=2)
        before = [p.detach().clone() for p in agent.parameters()]
        for _ in range(2):
            agent.train_iter()
        assert all(not torch.equal(a, b) for a, b in zip(before, agent.parameters()))
        owned = {id(p) for group in optimizer.param_groups for p in group['params']} if optimizer else set()
        assert owned == ({id(p) for p in agent._representation_learner.parameters()} if optimizer else set())
        step = agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(4))
        assert list(agent.measures(step.info)) == (['repr/0', 'repr/1'] if fields else [])


def test_a_checkpoint_argument_restores_the_encoder(tmp_path):
    saved, other = (EncodingAlgorithm(OBSERVATION, ACTION, encoder_cls=encoder, optimizer=Adam(), checkpoint=checkpoint)
                    for checkpoint in (None, f"alg@{tmp_path / 'ckpt-1'}"))
    saved.finalize()
    Checkpointer(str(tmp_path), alg=saved).save(1)
    other.finalize()
    assert other.pre_loaded
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters()))


def test_steps_do_not_change_their_inputs_and_one_environment_is_enough():
    algorithm = EncodingAlgorithm(OBSERVATION, ACTION, encoder_cls=memory)
    step = restart(torch.randn(1, 3), ACTION, batched=True)
    state = nest.map_structure(lambda spec: torch.randn(1, *spec.shape), algorithm.train_state_spec)
    copies = nest.map_structure(torch.clone, (step, state))
    for method in (algorithm.predict_step, algorithm.rollout_step, algorithm.train_step):
        method(step, state)
    for old, new in zip(nest.flatten(copies), nest.flatten((step, state))):
        assert torch.equal(old, new)


def test_replayed_updates_match_eager_ones(warm_up):
    results = []
    for before in (1, 10**6):
        warm_up(before)
        agent, _ = sac_agent(partial(EncodingAlgorithm, encoder_cls=encoder))
        for _ in range(2):
            agent.train_iter()
        assert bool(num_graphs(agent)) == (before == 1)
        results.append(list(agent.parameters()))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
