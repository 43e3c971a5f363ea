"""Algorithms composed of others: both documented examples against hand-written classes, names, states, hooks."""
from functools import partial

import gin
import pytest
import torch
from helpers import sac_agents
from helpers.agents import ENVIRONMENTS
from torch import nn

from alfx import context, gin_utils, nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm, ActorCriticInfo
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm, Loss
from alfx.algorithms.base.ownership import assign_optimizers
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.containers import (AlgorithmContainer, EchoAlg, RLAlgWrapper, SequentialAlg, named_fields,
                                        sequential_alg)
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import AlgStep, LossInfo, namedtuple
from alfx.gin_utils import ConfError
from alfx.layers import FC
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork, ActorDistributionRNNNetwork
from alfx.networks.containers import Sequential
from alfx.networks.networks import Delay, LSTMCell
from alfx.networks.value_networks import ValueNetwork, ValueRNNNetwork
from alfx.optimizers import SGD, Adam
from alfx.runs import building
from alfx.tensor_specs import TensorSpec
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils import dist_utils

SCALAR = TensorSpec(())


def parameters(algorithm):
    return [p.detach().clone() for p in algorithm.parameters()]


# Example 1: an algorithm that predicts the future of its input ----------------------------------------------------


def make_predictor():
    torch.manual_seed(0)
    return Sequential(lambda x: x.unsqueeze(-1), FC(1, 8, torch.tanh), LSTMCell(8, 1), lambda x: x.squeeze(-1),
                      input_tensor_spec=SCALAR)


class PredictAlgorithm(Algorithm):
    """The equivalent of the first example, written by hand."""

    def __init__(self, predictor):
        super().__init__(train_state_spec=(predictor.state_spec, predictor.input_tensor_spec))
        self._predictor = predictor
        self._loss = Loss()

    def rollout_step(self, inputs, state):
        return self._step(inputs, state)

    def train_step(self, inputs, state, rollout_info):
        return self._step(inputs, state)

    def predict_step(self, inputs, state):
        return self._step(inputs, state)

    def _step(self, inputs, state):
        predictor_state, delayed = state
        predicted, predictor_state = self._predictor(inputs, predictor_state)
        error = (delayed - inputs)**2
        loss_step = self._loss.rollout_step(error)
        return AlgStep(output=predicted, state=(predictor_state, predicted), info=loss_step.info)

    def calc_loss(self, info):
        return self._loss.calc_loss(info)


def make_predicting_sequence():
    predictor = make_predictor()
    return SequentialAlg(predicted=predictor, delayed=Delay(SCALAR),
                         error=(('delayed', 'input'), lambda xy: (xy[0] - xy[1])**2), loss=Loss(), output='predicted')


@pytest.mark.parametrize('method', ['rollout_step', 'train_step', 'predict_step'])
def test_the_first_example_matches_the_handwritten_class(method):
    inputs = torch.randn(6, 3)
    results = []
    for algorithm in (make_predicting_sequence(), PredictAlgorithm(make_predictor())):
        state, outputs, infos = algorithm.get_initial_rollout_state(3), [], []
        for x in inputs:
            stored = ({'loss': ()}, ) if method == 'train_step' else ()
            step = getattr(algorithm, method)(x, state, *stored)
            state = step.state
            nest.assert_same_structure(algorithm.rollout_state_spec, state)
            outputs.append(step.output)
            infos.append(step.info)
        loss = algorithm.calc_loss(nest.stack(infos)).loss
        results.append((torch.stack(outputs), loss, *torch.autograd.grad(loss.sum(), list(algorithm.parameters()))))
    assert results[0][1].shape == (6, 3) and len(results[0]) == len(results[1]) > 4
    assert all(torch.equal(a, b) for a, b in zip(*results))


# Example 2: actor-critic ------------------------------------------------------------------------------------------

SMALL = dict(fc_layer_params=(16, ))


class ACAlgorithm(Algorithm):
    """The equivalent of the second example, written by hand."""

    def __init__(self, value_net, actor_net):
        super().__init__(train_state_spec=(value_net.state_spec, actor_net.state_spec), is_on_policy=True)
        self._value_net = value_net
        self._actor_net = actor_net
        self._loss = ActorCriticLoss()

    def rollout_step(self, inputs, state):
        value, value_state = self._value_net(inputs.observation, state[0])
        action_dist, actor_state = self._actor_net(inputs.observation, state[1])
        action = dist_utils.sample_action_distribution(action_dist)
        loss_step = self._loss.rollout_step(ActorCriticInfo(
            reward=inputs.reward, step_type=inputs.step_type, discount=inputs.discount,
            action_distribution=action_dist, action=action, value=value))
        return AlgStep(output=action, state=(value_state, actor_state), info=loss_step.info)

    def predict_step(self, inputs, state):
        return self.rollout_step(inputs, state)

    def calc_loss(self, info):
        return self._loss.calc_loss(info)


def make_networks(observation_spec, action_spec, recurrent):
    if recurrent:
        return (ValueRNNNetwork(observation_spec, lstm_hidden_size=(8, ), **SMALL),
                ActorDistributionRNNNetwork(observation_spec, action_spec, lstm_hidden_size=(8, ), **SMALL))
    return ValueNetwork(observation_spec, **SMALL), ActorDistributionNetwork(observation_spec, action_spec, **SMALL)


def by_hand(observation_spec, action_spec, recurrent=False, **_):
    return ACAlgorithm(*make_networks(observation_spec, action_spec, recurrent))


def in_a_sequence(observation_spec, action_spec, recurrent=False, **_):
    value_net, actor_net = make_networks(observation_spec, action_spec, recurrent)
    return SequentialAlg(
        is_on_policy=True, value=('input.observation', value_net), action_dist=('input.observation', actor_net),
        action=dist_utils.sample_action_distribution,
        loss=(ActorCriticInfo(reward='input.reward', step_type='input.step_type', discount='input.discount',
                              action_distribution='action_dist', action='action', value='value'), ActorCriticLoss()),
        output='action')


def make_root(algorithm, environment='discrete', seed=0, in_agent=False, **config_args):
    """Return the ``RLAlgWrapper`` of an algorithm, as the root of a run or as the policy of an agent."""
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=4)
    env.seed(seed)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=RLAlgWrapper, unroll_length=6, **config_args)
    if in_agent:
        root = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                     rl_algorithm_cls=partial(RLAlgWrapper, algorithm=algorithm), optimizer=Adam(lr=1e-2))
    else:
        root = RLAlgWrapper(env.observation_spec(), env.action_spec(), algorithm, env=env,
                            reward_spec=env.reward_spec(), config=config, optimizer=Adam(lr=1e-2))
    root.set_path('')
    root.finalize()
    return root, env


@pytest.mark.parametrize('in_agent', [False, True])
@pytest.mark.parametrize('environment', ['discrete', 'continuous', 'recurrent'])
def test_the_second_example_trains_like_the_class_written_by_hand(environment, in_agent):
    trained = []
    for algorithm in (by_hand, in_a_sequence):
        root, _ = make_root(partial(algorithm, recurrent=environment == 'recurrent'), environment, in_agent=in_agent)
        before = parameters(root)
        for _ in range(3):
            root.train_iter()
        assert not any(torch.equal(a, b) for a, b in zip(before, parameters(root)))
        trained.append(parameters(root))
    assert all(torch.equal(a, b) for a, b in zip(*trained))


def test_the_second_example_trains_like_the_actor_critic_of_this_package(with_capabilities):
    with_capabilities(ActorCriticAlgorithm, recomputes_rollout_info=False)

    def actor_critic(observation_spec, action_spec, **_):
        value_net, actor_net = make_networks(observation_spec, action_spec, False)
        return ActorCriticAlgorithm(observation_spec, action_spec, actor_network_ctor=lambda **_: actor_net,
                                    value_network_ctor=lambda **_: value_net)

    trained = []
    for algorithm in (actor_critic, in_a_sequence):
        root, _ = make_root(algorithm)
        for _ in range(3):
            root.train_iter()
        trained.append(sorted(parameters(root), key=lambda p: (p.shape, p.sum().item())))
    for a, b in zip(*trained):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('environment', ['discrete', 'recurrent'])
def test_a_checkpoint_of_a_sequence_restores_the_next_step(environment):
    algorithm = partial(in_a_sequence, recurrent=environment == 'recurrent')
    root, env = make_root(algorithm, environment)
    root.train_iter()
    copy, _ = make_root(algorithm, environment, seed=4)
    copy.load_state_dict(root.state_dict())
    time_step = env.current_time_step()
    found = []
    for other in (root, copy):
        torch.manual_seed(0)
        found.append(other.predict_step(time_step, other.get_initial_predict_state(4)))
    assert all(torch.equal(a, b) for a, b in zip(*map(nest.flatten, found)))


# Off-policy -------------------------------------------------------------------------------------------------------


def test_an_algorithm_trained_from_replay_trains_in_a_sequence_as_without(with_capabilities):
    """Train PPO as the last algorithm of a sequence; ``preprocess_experience`` computes its advantages."""
    with_capabilities(PPOAlgorithm, recomputes_rollout_info=False)

    def ppo(observation_spec, action_spec, config, **_):
        return PPOAlgorithm(observation_spec, action_spec, config=config, loss_class=PPOLoss,
                            actor_network_ctor=partial(ActorDistributionNetwork, **SMALL),
                            value_network_ctor=partial(ValueNetwork, **SMALL))

    def ppo_in_a_sequence(**specs):
        return SequentialAlg(lambda time_step: time_step, policy=ppo(**specs))

    trained = []
    for algorithm in (ppo, ppo_in_a_sequence):
        root, _ = make_root(algorithm, mini_batch_length=1, mini_batch_size=8, num_updates_per_train_iter=2)
        assert root.on_policy is False
        for _ in range(2):
            root.train_iter()
        trained.append(parameters(root))
    assert all(torch.equal(a, b) for a, b in zip(*trained))


@pytest.mark.parametrize('cls, environment', [(SacAlgorithm, 'continuous'), (SacAlgorithm, 'discrete'),
                                              (DqnAlgorithm, 'discrete')])
def test_off_policy_algorithms_train_in_a_sequence_as_without(cls, environment):
    trained = []
    for in_sequence in (False, True):
        def algorithm(observation_spec, action_spec, reward_spec, config, in_sequence=in_sequence, **_):
            torch.manual_seed(0)
            names = {SacAlgorithm: ('actor_network_cls', 'critic_network_cls', 'q_network_cls'),
                     DqnAlgorithm: ('q_network_cls', )}[cls]
            networks = sac_agents.networks(environment, sac_agents.ENVIRONMENTS[environment](batch_size=1))
            inner = cls(observation_spec, action_spec, reward_spec, config=config,
                        **{name: networks[name] for name in names})
            return SequentialAlg(inner) if in_sequence else inner

        root, _ = make_root(algorithm, environment, mini_batch_length=2, mini_batch_size=8, replay_buffer_length=100,
                            whole_replay_buffer_training=False, clear_replay_buffer=False)
        torch.manual_seed(1)
        for _ in range(3):
            root.train_iter()
        trained.append(parameters(root))
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('wrap', [lambda alg: alg, SequentialAlg, lambda alg: SequentialAlg(SequentialAlg(alg))])
def test_reward_weights_reach_the_policy_inside(wrap):
    def algorithm(observation_spec, action_spec, reward_spec, **_):
        return wrap(ActorCriticAlgorithm(observation_spec, action_spec, reward_spec, actor_network_ctor=partial(
            ActorDistributionNetwork, **SMALL), value_network_ctor=partial(ValueNetwork, **SMALL)))

    root, _ = make_root(algorithm, 'vector reward')
    root.set_reward_weights(torch.tensor([1.0, 2.0, 3.0]))
    inner = next(part for part in root.modules() if isinstance(part, ActorCriticAlgorithm))
    assert root.reward_weights.tolist() == inner.reward_weights.tolist() == [1.0, 2.0, 3.0]


def test_states_of_a_sequence_are_trained_from_as_the_rollout_stored_them():
    class Remember(Algorithm):
        """An algorithm that outputs the running sum of its inputs; training compares it with the sum in the rollout."""

        def __init__(self):
            super().__init__(train_state_spec=SCALAR, is_on_policy=False, name='remember')
            self.trained = 0

        def rollout_step(self, inputs, state):
            total = state + inputs.reward
            return AlgStep(total, total, {'total': total})

        def predict_step(self, inputs, state):
            return self.rollout_step(inputs, state)

        def train_step(self, inputs, state, rollout_info):
            self.trained += 1
            torch.testing.assert_close(state + inputs.reward, rollout_info['total'])
            return self.rollout_step(inputs, state)._replace(info=())

    remember = Remember()
    algorithm = SequentialAlg(
        total=('input', remember), previous=Delay(SCALAR),
        action=('input.observation', lambda x: torch.zeros(len(x), dtype=torch.int64)),
        value=('input.observation', FC(1, 1)), error=lambda x: x.squeeze(-1)**2, loss=Loss(), output='action')
    root, _ = make_root(algorithm, mini_batch_length=3, mini_batch_size=4, use_rollout_state=True)
    for _ in range(3):
        root.train_iter()
    assert remember.trained >= 9
    assert sorted(root.train_state_spec) == ['previous', 'total']


# Names ------------------------------------------------------------------------------------------------------------

Pair = namedtuple('Pair', ['left', 'right'], default_value=())


class Doubler(Algorithm):
    """An algorithm that doubles its input; its state counts steps; its info is the input and a loss."""

    def __init__(self, is_on_policy=None, name='doubler'):
        super().__init__(train_state_spec=SCALAR, is_on_policy=is_on_policy, name=name)
        self.calls = []

    def rollout_step(self, inputs, state):
        return AlgStep(2 * inputs, state + 1, LossInfo(loss=inputs, extra={'seen': inputs}))

    def predict_step(self, inputs, state):
        return AlgStep(20 * inputs, state + 10, LossInfo(loss=inputs))

    def train_step(self, inputs, state, rollout_info):
        return AlgStep(200 * inputs, state + 100, rollout_info)

    def preprocess_experience(self, root_inputs, rollout_info, batch_info):
        return root_inputs + 1, rollout_info._replace(loss=rollout_info.loss + root_inputs)

    def after_update(self, root_inputs, info):
        self.calls.append(('after_update', root_inputs, info))

    def after_train_iter(self, root_inputs, rollout_info):
        self.calls.append(('after_train_iter', root_inputs, rollout_info))


def test_results_states_and_infos_of_earlier_elements_are_found_by_name():
    x = torch.tensor([1.0, 3.0])
    algorithm = SequentialAlg(
        lambda inputs: inputs['a'] + 1, first=Doubler(), memory=('input.a', Delay(SCALAR)),
        nested=(Pair('info.first.extra.seen', {'state': 'state.first', 'rest': ['', 'input.a']}), lambda x: x),
        last=('state.memory.0', lambda x: x),
        output={'nested': 'nested', 'last': '', 'delayed': 'memory', 'loss': 'info.first.loss'})
    state = {'first': torch.tensor([5.0, 6.0]), 'memory': (torch.tensor([8.0, 9.0]), )}
    step = algorithm.rollout_step({'a': x}, state)
    found = nest.map_structure(torch.Tensor.tolist, step.output)
    assert found['nested'] == Pair(left=[2.0, 4.0], right={'state': [6.0, 7.0], 'rest': [[8.0, 9.0], [1.0, 3.0]]})
    assert found['last'] == [1.0, 3.0] and found['delayed'] == [8.0, 9.0] and found['loss'] == [2.0, 4.0]
    assert nest.map_structure(torch.Tensor.tolist, step.state) == {'first': [6.0, 7.0], 'memory': ([1.0, 3.0], )}
    assert list(step.info) == ['first']


def test_each_kind_of_step_calls_the_same_step_of_its_algorithms():
    algorithm = SequentialAlg(Doubler(), lambda x: x + 1)
    x, state = torch.tensor([1.0]), {'0': torch.zeros(1)}
    assert algorithm.rollout_step(x, state)[:2] == (torch.tensor([3.0]), {'0': torch.tensor([1.0])})
    assert algorithm.predict_step(x, state)[:2] == (torch.tensor([21.0]), {'0': torch.tensor([10.0])})
    stored = {'0': LossInfo(loss=torch.tensor([7.0]))}
    step = algorithm.train_step(x, state, stored)
    assert step == (torch.tensor([201.0]), {'0': torch.tensor([100.0])}, stored)
    assert algorithm.train_step_offline(x, state, stored, True).output == torch.tensor([201.0])


@pytest.mark.parametrize('elements,message', [
    (dict(a=('inputt', FC(1, 1))), "there is no earlier result 'inputt'.*did you mean 'input'"),
    (dict(a=FC(1, 1), b=('info.c', FC(1, 1))), "there is no earlier result 'c'; known results are .*'a'"),
    (dict(a=FC(1, 1), b=('info.a', FC(1, 1))), "'info.a' does not exist, because 'a' is a FC"),
    (dict(a=torch.tanh, b=('state.a', FC(1, 1))), "'state.a' does not exist, because 'a' is a builtin"),
    (dict(a=('state.b', torch.tanh), b=Delay(SCALAR)), "there is no earlier result 'b'"),
    (dict(info=FC(1, 1)), "an element cannot be named 'info'"),
    (dict(input=FC(1, 1)), "cannot be named 'input'"),
    (dict(a=3), "element 'a' is not a module, function"),
    (dict(rollout_step=FC(1, 1)), 'an attribute has this name'),
    ({}, 'expected at least one module'),
])
def test_elements_and_names_that_make_no_sense_are_rejected(elements, message):
    with pytest.raises(ValueError, match=message):
        SequentialAlg(**elements)


def test_a_path_that_a_result_does_not_have_is_named_at_the_first_step():
    algorithm = SequentialAlg(a=('input.observatoin', torch.tanh))
    with pytest.raises(LookupError, match="'input.observatoin' does not exist.*did you mean 'observation'"):
        algorithm.rollout_step({'observation': torch.zeros(2)}, ())


def test_steps_of_a_sequence_do_not_change_their_inputs():
    algorithm = SequentialAlg(torch.relu_, a=nn.ReLU(inplace=True), b=Doubler())
    x, state = torch.tensor([-1.0, 2.0]), {'b': torch.zeros(2)}
    algorithm.rollout_step(x, state)
    assert x.tolist() == [-1.0, 2.0] and state['b'].tolist() == [0.0, 0.0]


# Containers -------------------------------------------------------------------------------------------------------


class Both(AlgorithmContainer):
    """Two algorithms on the same input."""

    def __init__(self, first, second):
        super().__init__({'first': first, 'second': second}, name='both')


def test_losses_and_scalar_losses_are_added_and_extras_nested():
    container = Both(Loss(loss_weight=2.0), Loss(loss_weight=3.0, name='other'))
    info = {'first': torch.tensor([[1.0, 2.0]]), 'second': LossInfo(loss=torch.tensor([[10.0, 20.0]]),
                                                                    scalar_loss=torch.tensor(5.0), extra='x')}
    for loss in (container.calc_loss(info), container.calc_loss_offline(info)):
        assert loss.loss.tolist() == [[32.0, 64.0]] and loss.scalar_loss == 15.0
        assert set(loss.extra) == {'first', 'second'} and loss.extra['second'] == 'x'
    assert container.calc_loss({'first': (), 'second': info['first']}).loss.tolist() == [[3.0, 6.0]]


@pytest.mark.parametrize('wrapped', [False, True])
def test_hooks_reach_every_algorithm_with_its_own_info(wrapped):
    first, second = Doubler(), Doubler(name='other')
    container = Both(first, second)
    if wrapped:
        container = RLAlgWrapper(SCALAR, SCALAR, EchoAlg(container, SCALAR))
    infos = {'first': LossInfo(loss=torch.tensor(1.0)), 'second': LossInfo(loss=torch.tensor(2.0))}
    root_inputs, processed = container.preprocess_experience(torch.tensor(10.0), infos, ())
    # The second algorithm gets the inputs as the first one left them.
    assert root_inputs == 12.0 and processed['first'].loss == 11.0 and processed['second'].loss == 13.0
    assert infos['first'].loss == 1.0
    container.after_update('inputs', infos)
    container.after_train_iter('inputs', infos)
    container.after_train_iter(None, None)
    assert container.capabilities.trains_after_iteration
    for algorithm, key in ((first, 'first'), (second, 'second')):
        assert algorithm.calls == [('after_update', 'inputs', infos[key]), ('after_train_iter', 'inputs', infos[key]),
                                   ('after_train_iter', None, None)]


def test_paths_lead_to_the_infos():
    inner = SequentialAlg(Doubler(), c=Doubler())
    wrapper = RLAlgWrapper(SCALAR, SCALAR, EchoAlg(SequentialAlg(a=Loss(), b=inner), SCALAR))
    wrapper.set_path('rl')
    assert wrapper.path == 'rl' and inner.path == 'rl.b'
    assert [alg.path for alg in inner._algs.values()] == ['rl.b.0', 'rl.b.c']
    wrapper.set_path('')
    assert inner._algs['c'].path == 'b.c'


def test_all_algorithms_know_whether_training_is_on_policy():
    inner = Doubler()
    wrapper = RLAlgWrapper(SCALAR, SCALAR, SequentialAlg(a=inner, b=Loss()))
    assert wrapper.on_policy is None
    wrapper.set_on_policy(False)
    assert inner.on_policy is False
    assert SequentialAlg(a=Doubler(is_on_policy=True), b=Loss()).on_policy is True
    assert RLAlgWrapper(SCALAR, SCALAR, EchoAlg(Doubler(is_on_policy=False), SCALAR)).on_policy is False
    with pytest.raises(ValueError, match=r"\['a'\] can only be trained on-policy and \['b'\] only off-policy"):
        SequentialAlg(a=Doubler(is_on_policy=True), b=Doubler(is_on_policy=False))
    with pytest.raises(ValueError, match='doubler .* is an off-policy algorithm and cannot be trained on-policy'):
        SequentialAlg(Doubler(is_on_policy=False), is_on_policy=True)


def test_objects_that_cannot_be_in_a_container_are_rejected():
    with pytest.raises(ValueError, match="expected an algorithm as 'a', found FC"):
        AlgorithmContainer({'a': FC(1, 1)})
    with pytest.raises(ValueError, match='names are parts of paths'):
        AlgorithmContainer({'a.b': Doubler()})
    twice = Doubler()
    with pytest.raises(ValueError, match='the same algorithm appears twice'):
        SequentialAlg(a=twice, b=twice)
    with pytest.raises(ValueError, match="expected an algorithm as 'algorithm', found int"):
        RLAlgWrapper(SCALAR, SCALAR, 3)


def test_optimizers_of_the_parts_own_their_parameters():
    class Learner(Algorithm):

        def __init__(self, optimizer):
            super().__init__(optimizer=optimizer, name='learner')
            self.layer = FC(1, 1)

        def rollout_step(self, inputs, state):
            return AlgStep(inputs, (), ())

    own, rest = SGD(lr=0.1), Adam(lr=0.1)
    first, second, net = Learner(own), Learner(None), FC(1, 1)
    root = RLAlgWrapper(SCALAR, SCALAR, SequentialAlg(first, b=second, c=net), optimizer=rest)
    assign_optimizers(root)
    owned = [{id(p) for group in optimizer.param_groups for p in group['params']} for optimizer in (own, rest)]
    assert owned[0] == {id(p) for p in first.parameters()}
    assert owned[1] == {id(p) for part in (second, net) for p in part.parameters()}


# Echo -------------------------------------------------------------------------------------------------------------


def test_an_echo_returns_at_the_next_step_and_starts_at_zero():
    """Echo the running sum of the inputs; the output is its square."""
    block = SequentialAlg(total=(('input.input', 'input.echo'), lambda xs: xs[0] + xs[1]),
                          delayed=Delay(SCALAR), square=('total', torch.square), loss=Loss(),
                          output={'output': 'square', 'echo': 'total'})
    algorithm = EchoAlg(block, SCALAR)
    state = algorithm.get_initial_rollout_state(2)
    assert sorted(state) == ['alg', 'echo'] and state['echo'].tolist() == [0.0, 0.0]
    outputs, infos = [], []
    for x in ([1.0, -1.0], [2.0, 5.0], [3.0, 0.0]):
        step = algorithm.rollout_step(torch.tensor(x), state)
        state = step.state
        nest.assert_same_structure(algorithm.rollout_state_spec, state)
        outputs.append(step.output.tolist())
        infos.append(step.info)
    assert outputs == [[1.0, 1.0], [9.0, 16.0], [36.0, 16.0]]
    assert state['echo'].tolist() == [6.0, 4.0] and state['alg']['delayed'][0].tolist() == [6.0, 4.0]
    assert algorithm.calc_loss(nest.stack(infos)).loss.tolist() == outputs
    for method, stored in (('predict_step', ()), ('train_step', ({'loss': ()}, ))):
        step = getattr(algorithm, method)(torch.tensor([1.0, 1.0]), state, *stored)
        assert step.output.tolist() == [49.0, 25.0] and step.state['echo'].tolist() == [7.0, 5.0]
    assert algorithm.convert_train_state_to_predict_state(state)['echo'] is state['echo']


def test_an_algorithm_without_an_echo_in_its_output_is_named():
    with pytest.raises(ValueError, match="SequentialAlg.rollout_step has to output a dict .* found Tensor"):
        EchoAlg(SequentialAlg(lambda x: x['input']), SCALAR).rollout_step(
            torch.zeros(1), {'alg': (), 'echo': torch.zeros(1)})


def test_an_agent_trains_an_algorithm_with_an_echo():
    """Train a policy that sees its previous output."""

    def algorithm(observation_spec, action_spec, **_):
        both = TensorSpec((observation_spec.shape[0] + 2, ))
        return EchoAlg(SequentialAlg(
            seen=(('input.input.observation', 'input.echo'), NestConcat()), value=ValueNetwork(both, **SMALL),
            action_dist=('seen', ActorDistributionNetwork(both, action_spec, **SMALL)),
            action=dist_utils.sample_action_distribution, probs=('action_dist', lambda dist: dist.probs.detach()),
            loss=(ActorCriticInfo(reward='input.input.reward', step_type='input.input.step_type', action='action',
                                  discount='input.input.discount', action_distribution='action_dist', value='value'),
                  ActorCriticLoss()),
            is_on_policy=True, output={'output': 'action', 'echo': 'probs'}), TensorSpec((2, )))

    root, _ = make_root(algorithm, in_agent=True)
    before = parameters(root)
    root.train_iter()
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters(root)))
    echo = root.learner.collector.position.state.rl['echo']
    torch.testing.assert_close(echo.sum(-1), torch.ones(4))


# Conf files -------------------------------------------------------------------------------------------------------

CONF = """
TrainerConfig.algorithm_ctor = @Agent
TrainerConfig.unroll_length = 6
TrainerConfig.num_iterations = 2
TrainerConfig.evaluate = False
Agent.optimizer = @Adam()
Agent.rl_algorithm_cls = @RLAlgWrapper
RLAlgWrapper.algorithm = @sequential_alg()
sequential_alg.elements = [
    ('value', 'input.observation', @ValueNetwork()),
    ('action_dist', 'input.observation', @ActorDistributionNetwork()),
    ('action', @sample_action_distribution),
    ('loss', @named_fields(), @ActorCriticLoss()),
]
sequential_alg.output = 'action'
sequential_alg.is_on_policy = True
named_fields.record = 'alfx.algorithms.actor_critic_algorithm.ActorCriticInfo'
named_fields.reward = 'input.reward'
named_fields.step_type = 'input.step_type'
named_fields.discount = 'input.discount'
named_fields.action_distribution = 'action_dist'
named_fields.action = 'action'
named_fields.value = 'value'
ValueNetwork.input_tensor_spec = @get_observation_spec()
ValueNetwork.fc_layer_params = (16, )
ActorDistributionNetwork.input_tensor_spec = @get_observation_spec()
ActorDistributionNetwork.action_spec = @get_action_spec()
ActorDistributionNetwork.fc_layer_params = (16, )
create_environment.env_name = 'CartPole-v1'
create_environment.num_parallel_environments = 2
create_environment.nonparallel = True
"""


@pytest.fixture
def empty_gin():
    yield
    gin_utils.clear()


def test_the_second_example_is_built_trained_and_reloaded_from_a_conf(tmp_path, empty_gin):
    root_dir = str(tmp_path / 'run')
    (tmp_path / 'sequence.gin').write_text(CONF)
    with gin_utils.loaded(str(tmp_path / 'sequence.gin'), [], root_dir) as conf:
        gin_utils.write_conf(root_dir, conf, ['train'])
        RLTrainer(TrainerConfig(root_dir=root_dir, conf_file=conf.conf_file)).train()
        assert gin_utils.unused_bindings() == []
    with gin_utils.loaded(None, [], root_dir, same_run=False):
        config = TrainerConfig(root_dir=root_dir)
        env = building.create_eval_environment(config, 1)
        sequence = building.create_algorithm(config, env, trains=False)._rl_algorithm._alg
        env.close()
    assert list(sequence._steps) == ['value', 'action_dist', 'action', 'loss']


def test_a_conf_cannot_name_elements_where_their_order_would_be_lost(empty_gin):
    with pytest.raises((ConfError, ValueError), match='SequentialAlg'):
        gin.bind_parameter('SequentialAlg.value', 3)


@pytest.mark.parametrize('elements,message', [
    ([('a', 'input', 'x', FC(1, 1))], r'elements\[0\]: expected \(name, module\)'),
    ([FC(1, 1)], r'elements\[0\]: expected \(name, module\)'),
    ([('a', FC(1, 1)), ('a', FC(1, 1))], r"elements\[1\]: the name 'a' is used twice"),
])
def test_lists_that_are_no_elements_are_rejected(elements, message):
    with pytest.raises(ValueError, match=message):
        sequential_alg(elements)


def test_fields_are_named_as_in_a_named_tuple():
    record = 'alfx.algorithms.actor_critic_algorithm.ActorCriticInfo'
    assert named_fields(record, value='v', action='a') == ActorCriticInfo(value='v', action='a')
    with pytest.raises(ValueError, match=r"expected a named tuple with the fields \['valeu'\], found .*'value'"):
        named_fields(record, valeu='v')
    for missing in ('no.such.module.Class', 'alfx.data_structures.Nothing', 'Nothing'):
        with pytest.raises(ValueError, match=f"there is no class '{missing}'"):
            named_fields(missing)
