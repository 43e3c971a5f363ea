"""Random network distillation: its arguments, and as part of an agent. The maths is in tests/numerics."""
from functools import partial

import pytest
import torch
from helpers import agents
from helpers.intrinsic_reward_contract import ACTION, OBSERVATION, IntrinsicRewardContract, random_steps
from torch import nn

from alfx.algorithms.intrinsic.intrinsic_reward import make_network
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.gin_utils import ConfError
from alfx.layers import Cast, OneHot, Scale, Sequential
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity

network = partial(EncodingNetwork, fc_layer_params=(8, ), last_layer_size=4, last_activation=identity)
make_rnd = partial(RNDAlgorithm, target_net=network, predictor_net=network, keep_stacked_frames=0)
nested = dict(input_preprocessors={'signal': None, 'noise': (Sequential(Cast(), Scale(1 / 255)), OneHot(5))},
              preprocessing_combiner=NestConcat())


class TestRND(IntrinsicRewardContract):

    @staticmethod
    def make(**arguments):
        options = dict(reward_adapt_speed=8.0, observation_adapt_speed=8.0)
        if isinstance(arguments['observation_spec'], dict):
            net = partial(network, **nested)
            options.update(target_net=net, predictor_net=net, observation_adapt_speed=None)
        return make_rnd(**{**options, **arguments})


def test_only_the_predictor_is_trained():
    """Target and encoder are not trained; the optimizer owns the predictor."""
    agent, _ = agents.make_agent('ppo', 'discrete', intrinsic_reward_module=partial(
        make_rnd, encoder_net=network, optimizer=Adam(lr=1e-2, name='own')))
    module = agent.intrinsic_reward
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    agent.train_iter()
    changed = {name.split('.')[0] for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {'_predictor_net'}
    owned = {id(p) for group in module.default_optimizer.param_groups for p in group['params']}
    assert owned == {id(p) for p in module._predictor_net.parameters()}


@pytest.mark.parametrize('varying', ['target_net', 'encoder_net'])
@pytest.mark.parametrize('is_in_parent', [False, True])
def test_targets_of_a_row_do_not_depend_on_other_rows(varying, is_in_parent):
    module = make_rnd(observation_spec=OBSERVATION, **{varying: partial(network, use_fc_bn=True)})
    (nn.ModuleList([module]) if is_in_parent else module).train()
    observation = OBSERVATION.randn((6, ))
    single = module._predicted(observation[:2])
    for _ in range(3):
        among_others = module._predicted(observation)
    for few, more in zip(single, among_others):
        torch.testing.assert_close(few, more[:2])
    assert module._predictor_net.training


def test_the_error_of_repeated_observations_decays():
    torch.manual_seed(0)
    module = make_rnd(observation_spec=OBSERVATION)
    steps = random_steps(1, 16, step_type=[[1] * 16])
    optimizer = torch.optim.Adam(module._predictor_net.parameters(), lr=1e-2)
    first = module.predict_step(steps._replace(observation=steps.observation[0], step_type=steps.step_type[0])).output
    for _ in range(200):
        optimizer.zero_grad()
        module.calc_loss(module.train_sequence(steps).info).loss.mean().backward()
        optimizer.step()
    last = module.predict_step(steps._replace(observation=steps.observation[0], step_type=steps.step_type[0])).output
    assert last.mean() < 0.05 * first.mean()


def test_only_the_last_frames_of_a_stack_are_checked():
    spec = BoundedTensorSpec((4, 5, 5), torch.float32, 0, 1)
    net = partial(EncodingNetwork, conv_layer_params=((2, 3, 1), ))
    module = RNDAlgorithm(net, net, observation_spec=spec, keep_stacked_frames=2, observation_adapt_speed=8.0)
    assert tuple(module._target_net.input_tensor_spec.shape) == (2, 5, 5)
    steps = random_steps(3, observation_spec=spec, step_type=[1, 1, 1])
    other = steps._replace(observation=torch.cat((torch.zeros(3, 2, 5, 5), steps.observation[:, 2:]), 1))
    reward = module.rollout_step(steps).output
    assert (reward > 0).all()
    assert torch.equal(module.predict_step(steps).output, module.predict_step(other).output)


def test_bounds_of_a_stack_are_cut_with_it():
    low = torch.arange(3.0).numpy()
    spec = BoundedTensorSpec((3, ), torch.float32, low, low + 1)
    module = RNDAlgorithm(network, network, observation_spec=spec, keep_stacked_frames=2)
    assert module._target_net.input_tensor_spec.minimum.tolist() == [1, 2]


@pytest.mark.parametrize('spec', [OBSERVATION, TensorSpec(()), {'image': TensorSpec((4, 5, 5)), 'v': OBSERVATION}])
def test_frames_that_are_no_frames_are_rejected(spec):
    with pytest.raises(ConfError, match='keep_stacked_frames.*not a stack of frames'):
        RNDAlgorithm(network, network, observation_spec=spec)


def test_frames_are_checked_at_the_first_step_without_a_spec():
    module = RNDAlgorithm(network(TensorSpec((1, ))), network(TensorSpec((1, ))))
    with pytest.raises(ConfError, match='keep_stacked_frames'):
        module.rollout_step(random_steps(2))
    module = RNDAlgorithm(network(OBSERVATION), network(OBSERVATION), keep_stacked_frames=0)
    assert module.rollout_step(random_steps(2, step_type=[1, 1])).output.shape == (2, )


def test_more_frames_than_available_are_rejected():
    with pytest.raises(ConfError, match='keep_stacked_frames = 5'):
        RNDAlgorithm(network, network, observation_spec=TensorSpec((4, 8, 8)), keep_stacked_frames=5)


@pytest.mark.parametrize('arguments, message', [
    (dict(clip_value=2.0), 'clip_value.*normalized rewards'),
    (dict(observation_adapt_speed=8.0, observation_spec=None), 'observation_adapt_speed.*observation_spec'),
    (dict(observation_spec=None), 'target_net.*observation_spec'),
    (dict(reward_adapt_speed=0.0), 'reward_adapt_speed'),
    (dict(observation_clip_value=-1.0), 'observation_clip_value'),
    (dict(keep_stacked_frames=-1), 'keep_stacked_frames'),
    (dict(target_net=7), 'target_net.*found 7'),
    (dict(target_net=partial(LSTMEncodingNetwork, hidden_size=4)), 'target_net.*is recurrent'),
])
def test_invalid_arguments_are_rejected_by_name(arguments, message):
    with pytest.raises(ConfError, match=message):
        make_rnd(**{'observation_spec': OBSERVATION, 'action_spec': ACTION, **arguments})


def test_networks_of_different_outputs_are_rejected():
    with pytest.raises(SpecError, match=r'predictor_net.*\(4,\), found \(5,\)'):
        make_rnd(observation_spec=OBSERVATION, predictor_net=partial(network, last_layer_size=5))


def test_a_torch_module_can_be_the_network():
    assert make_network(nn.Linear(3, 2), OBSERVATION, ('RNDAlgorithm', 'target_net')).output_spec.shape == (2, )


def test_rewards_are_clipped_to_the_clip_value():
    module = make_rnd(observation_spec=OBSERVATION, reward_adapt_speed=8.0, clip_value=0.1)
    for seed in range(4):
        reward = module.rollout_step(random_steps(8, seed=seed, step_type=[1] * 8)).output
    assert reward.abs().max() == pytest.approx(0.1)
