"""Intrinsic curiosity: its arguments, and as part of an agent. The maths is in tests/numerics."""
from functools import partial

import pytest
import torch
from helpers import agents
from helpers import sac_agents
from helpers.intrinsic_reward_contract import ACTION, OBSERVATION, IntrinsicRewardContract, random_steps, zero_state

from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.gin_utils import ConfError
from alfx.layers import Cast, OneHot, Scale, Sequential
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity

encoder = partial(EncodingNetwork, fc_layer_params=(8, ), last_layer_size=4, last_activation=identity)
nested = dict(input_preprocessors={'signal': None, 'noise': (Sequential(Cast(), Scale(1 / 255)), OneHot(5))},
              preprocessing_combiner=NestConcat())


def combined(size):
    return partial(EncodingNetwork, preprocessing_combiner=NestConcat(), fc_layer_params=(8, ), last_layer_size=size,
                   last_activation=identity)


class TestICMWithAnEncoder(IntrinsicRewardContract):

    @staticmethod
    def make(**arguments):
        options = dict(hidden_size=8, encoding_net=encoder)
        if isinstance(arguments['observation_spec'], dict):
            options.update(encoding_net=partial(encoder, **nested), observation_adapt_speed=None)
        return ICMAlgorithm(**{**options, **arguments})


class TestICMWithoutAnEncoder(IntrinsicRewardContract):

    @staticmethod
    def make(**arguments):
        return ICMAlgorithm(hidden_size=(8, 8), **arguments)


def test_one_step_sequences_need_the_previous_step():
    arguments = dict(mini_batch_length=1, agent_args=dict(intrinsic_reward_module=TestICMWithAnEncoder.make))
    agent, _ = sac_agents.make_agent('continuous', use_rollout_state=True, **arguments)
    assert agent.capabilities.needs_previous_step
    with pytest.raises(ConfError, match='mini_batch_length = 1.*pairs of steps'):
        sac_agents.make_agent('continuous', **arguments)


def test_its_own_optimizer_owns_all_three_networks():
    agent, _ = agents.make_agent('actor-critic', 'discrete', intrinsic_reward_module=partial(
        TestICMWithAnEncoder.make, optimizer=Adam(lr=1e-2)))
    owned = {id(p) for group in agent.intrinsic_reward.default_optimizer.param_groups for p in group['params']}
    assert owned == {id(p) for p in agent.intrinsic_reward.parameters()}


def test_models_are_accepted_as_networks_or_constructors():
    feature, action = TensorSpec((4, )), TensorSpec((3, ))
    by_instance = ICMAlgorithm(ACTION, encoding_net=encoder(OBSERVATION), forward_net=combined(4)([feature, action]),
                               inverse_net=combined(3)([feature, feature]))
    by_constructor = ICMAlgorithm(ACTION, OBSERVATION, encoding_net=encoder, forward_net=combined(4),
                                  inverse_net=combined(3))
    for module in (by_instance, by_constructor):
        step = module.rollout_step(random_steps(2, step_type=[0, 0]), zero_state(module, 2))
        assert module.rollout_step(random_steps(2, step_type=[1, 2], seed=1), step.state).output.shape == (2, )
    assert by_instance._observation_normalizer is None and by_constructor._observation_normalizer is not None


@pytest.mark.parametrize('argument', ['forward_net', 'inverse_net'])
def test_a_model_with_outputs_of_another_size_is_rejected(argument):
    with pytest.raises(SpecError, match=f'{argument}.*last_layer_size = '):
        ICMAlgorithm(ACTION, OBSERVATION, encoding_net=encoder, **{argument: combined(7)})


@pytest.mark.parametrize('arguments, message', [
    (dict(observation_spec=None), 'encoding_net.*observation_spec'),
    (dict(observation_spec=None, encoding_net=encoder), 'encoding_net.*observation_spec'),
    (dict(hidden_size=0), 'hidden_size'),
    (dict(hidden_size=(8, 'a')), 'hidden_size'),
    (dict(reward_adapt_speed=-1.0), 'reward_adapt_speed'),
    (dict(encoding_net=partial(LSTMEncodingNetwork, hidden_size=4)), 'encoding_net.*is recurrent'),
])
def test_invalid_arguments_are_rejected_by_name(arguments, message):
    with pytest.raises(ConfError, match=message):
        ICMAlgorithm(**{'action_spec': ACTION, 'observation_spec': OBSERVATION, **arguments})


def test_a_discrete_action_without_bounds_is_rejected():
    with pytest.raises(SpecError, match='needs bounds'):
        ICMAlgorithm(TensorSpec((), torch.int64), OBSERVATION)


def test_features_that_are_images_are_flattened():
    spec = TensorSpec((1, 6, 6))
    module = ICMAlgorithm(ACTION, spec, hidden_size=4, encoding_net=partial(
        EncodingNetwork, conv_layer_params=((2, 3, 1), ), output_tensor_spec=TensorSpec((2, 4, 4))))
    assert tuple(module.train_state_spec.feature.shape) == (32, )
    step = module.rollout_step(random_steps(3, observation_spec=spec, step_type=[0, 0, 0]), zero_state(module, 3))
    assert step.state.feature.shape == (3, 32)


def test_tensor_observations_are_concatenated_as_features():
    spec = {'a': BoundedTensorSpec((), torch.int64, 0, 5), 'b': TensorSpec((2, 2)), 'c': TensorSpec((3, ))}
    module = ICMAlgorithm(ACTION, spec, hidden_size=4, observation_adapt_speed=None)
    step = random_steps(2, observation_spec=spec)
    feature = module.rollout_step(step, zero_state(module, 2)).state.feature
    observation = step.observation
    expected = torch.cat((observation['a'].float().reshape(2, 1), observation['b'].reshape(2, 4), observation['c']), 1)
    assert torch.equal(feature, expected)


def test_evaluation_reports_the_accuracy_of_the_inverse_model():
    for action_spec, has_accuracy in ((ACTION, True), (BoundedTensorSpec((2, ), torch.float32, -1, 1), False)):
        module = ICMAlgorithm(action_spec, OBSERVATION, hidden_size=4)
        state = module.predict_step(random_steps(5, step_type=[0] * 5, action_spec=action_spec),
                                    zero_state(module, 5)).state
        info = module.predict_step(random_steps(5, step_type=[1] * 5, action_spec=action_spec, seed=1), state).info
        assert isinstance(info.accuracy, torch.Tensor) == has_accuracy
        if has_accuracy:
            assert set(info.accuracy.tolist()) <= {0.0, 1.0}


def test_both_models_learn_a_world_that_follows_its_actions():
    torch.manual_seed(0)
    module = ICMAlgorithm(ACTION, OBSERVATION, hidden_size=32, reward_adapt_speed=None)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)

    def world(batch):
        before = torch.randn(batch, 3, generator=generator)
        action = torch.randint(0, 3, (batch, ), generator=generator)
        after = before + torch.nn.functional.one_hot(action, 3)
        steps = random_steps(2, batch, step_type=torch.tensor([[0], [1]]).expand(2, batch))
        return steps._replace(observation=torch.stack((before, after)),
                              prev_action=torch.stack((torch.zeros_like(action), action)))

    def losses():
        steps = world(64)
        state = zero_state(module, 128)
        state = type(state)(*(x.reshape(2, 64, *x.shape[1:]) for x in state))
        return module.calc_loss(module.train_sequence(steps, state).info)

    first = losses()
    for _ in range(300):
        optimizer.zero_grad()
        losses().loss.mean().backward()
        optimizer.step()
    last = losses()
    assert last.extra.forward_loss.mean() < 0.1 * first.extra.forward_loss.mean()
    assert last.extra.inverse_loss.mean() < 0.1 * first.extra.inverse_loss.mean()
