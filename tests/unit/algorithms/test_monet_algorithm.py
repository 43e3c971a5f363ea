"""MONet on its own and as the representation learner of an agent. The losses are in the numerics tests."""
from functools import partial

import pytest
import torch
from helpers.agents import ALGORITHMS

from alfx import context, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import ImageScaleTransformer
from alfx.algorithms.handcrafted_algorithm import RandomAlgorithm
from alfx.algorithms.monet.adjusted_rand_index import adjusted_rand_index
from alfx.algorithms.monet_algorithm import (MoNetAlgorithm, MoNetInfo, MoNetMeasures, MoNetRepresentationLearner,
                                             MoNetUNet)
from alfx.algorithms.vae import VAEOutput
from alfx.environments import suite_sprites
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.encoding_networks import EncodingNetwork, SpatialBroadcastDecodingNetwork
from alfx.networks.network import NetworkWrapper
from alfx.networks.value_networks import ValueNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import SpecError, TensorSpec

NETWORKS = dict(
    attention_unet_cls=partial(MoNetUNet, filters=(3, 4), nonskip_fc_layers=(8, )),
    encoder_cls=partial(EncodingNetwork, conv_layer_params=((4, 3, 2), ), fc_layer_params=(8, )),
    decoder_cls=partial(SpatialBroadcastDecodingNetwork, conv_layer_params=((6, 1, 1), (4, 1, 1))))
make_monet = partial(MoNetAlgorithm, n_slots=3, slot_size=2, **NETWORKS)
IMAGE = TensorSpec((3, 8, 8))


def make_agent(with_mask=True, batch_size=2, mini_batch_size=4, seed=0, rl_algorithm_cls=RandomAlgorithm, **arguments):
    """Return an agent that learns to decompose images of sprites."""
    torch.manual_seed(seed)
    context.reset()
    env = suite_sprites.load('Sprites', batch_size=batch_size,
                             env_args=dict(image_size=8, with_mask=with_mask, num_steps=3))
    env.seed(seed)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=2, mini_batch_length=1,
                           mini_batch_size=mini_batch_size, num_updates_per_train_iter=2)
    config.data_transformer = ImageScaleTransformer(env.observation_spec(), min=0.0,
                                                    fields=['image'] if with_mask else None)
    learner = partial(MoNetRepresentationLearner, monet_cls=partial(make_monet, beta=0.5, gamma=0.5, **arguments))
    agent = Agent(config.data_transformer.transformed_observation_spec, env.action_spec(), env=env, config=config,
                  optimizer=Adam(lr=1e-2), rl_algorithm_cls=rl_algorithm_cls, representation_learner_cls=learner)
    agent.set_path('')
    agent.finalize()
    return agent, env


def transformed(agent, env):
    return agent.transform_timestep(env.current_time_step(), agent.get_initial_transform_state(env.batch_size))[0]


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


every_attention = pytest.mark.parametrize('recurrent', [True, False])


class TestMoNetAlgorithm:

    @every_attention
    @pytest.mark.parametrize('batch_size', [1, 5])
    def test_shapes_of_outputs_and_infos(self, recurrent, batch_size):
        algorithm = make_monet(input_tensor_spec=IMAGE, recurrent_attention=recurrent)
        output, state, info = algorithm.train_step(torch.rand(batch_size, 3, 8, 8))
        assert isinstance(output, VAEOutput) and isinstance(info, MoNetInfo) and state == ()
        assert {x.shape for x in output} == {(batch_size, 3, 2)}
        assert {x.shape for x in info[:3]} == {(batch_size, )}
        assert info.full_rec.shape == (batch_size, 3, 8, 8) and info.mask.shape == (batch_size, 3, 8, 8)
        assert info.z_dist.batch_shape == (batch_size, ) and info.z_dist.event_shape == (3, 2)

    def test_the_loss_is_the_weighted_sum_of_its_terms(self):
        algorithm = make_monet(input_tensor_spec=IMAGE, beta=0.5, gamma=0.25)
        info = MoNetInfo(*(torch.tensor([[x]]) for x in (2.0, 10.0, 8.0)))
        loss = algorithm.calc_loss(info)
        assert loss.loss.tolist() == [[13.0]]  # 10 + 0.5 * 2 + 0.25 * 8
        assert (loss.extra.kld, loss.extra.rec_loss, loss.extra.mask_rec_loss) == info[:3]

    @every_attention
    def test_gradients_reach_every_parameter(self, recurrent):
        algorithm = make_monet(input_tensor_spec=IMAGE, recurrent_attention=recurrent, beta=0.5, gamma=0.5)
        algorithm.calc_loss(algorithm.train_step(torch.rand(4, 3, 8, 8)).info).loss.mean().backward()
        missing = [name for name, p in algorithm.named_parameters() if p.grad is None or not p.grad.any()]
        assert missing == []

    def test_slot_deviations_differ_between_the_first_and_the_others(self):
        """Deviations of the slots are unequal, between those of the first and the other slots in the paper."""
        sigma = make_monet(n_slots=5, input_tensor_spec=IMAGE)._sigma
        torch.testing.assert_close(sigma, torch.tensor([0.09, 0.095, 0.1, 0.105, 0.11]))

    def test_training_samples_and_evaluation_does_not(self):
        algorithm, image = make_monet(input_tensor_spec=IMAGE), torch.rand(2, 3, 8, 8)
        first, second = (algorithm.train_step(image).output for _ in range(2))
        assert not torch.equal(first.z, second.z) and torch.equal(first.z_mode, second.z_mode)
        output = algorithm.predict_step(image).output
        assert torch.equal(output.z, output.z_mode) and torch.equal(output.z, first.z_mode)

    def test_rollout_has_infos_only_if_they_are_trained_on(self):
        algorithm, image = make_monet(input_tensor_spec=IMAGE), torch.rand(2, 3, 8, 8)
        algorithm.set_on_policy(False)
        assert nest.flatten(algorithm.rollout_step(image).info) == []
        algorithm = make_monet(input_tensor_spec=IMAGE)
        algorithm.set_on_policy(True)
        assert isinstance(algorithm.rollout_step(image).info, MoNetInfo)

    def test_slots_are_encoded_independently_of_their_order(self):
        algorithm, image = make_monet(input_tensor_spec=IMAGE), torch.rand(2, 3, 8, 8)
        mask, order = torch.rand(2, 3, 8, 8).softmax(1), torch.tensor([2, 0, 1])
        for original, permuted in zip(algorithm._encode(image, mask), algorithm._encode(image, mask[:, order])):
            torch.testing.assert_close(original[:, order], permuted)

    @pytest.mark.parametrize('arguments, message', [
        (dict(n_slots=1), 'n_slots must be an int >= 2'), (dict(slot_size=0), 'slot_size must be an int >= 1'),
        (dict(beta=-1.0), 'beta must be a number >= 0'),
        (dict(gamma=-1.0), 'gamma must be a number >= 0'),
        (dict(input_tensor_spec=TensorSpec((3, 8, 8), torch.uint8)), 'ImageScaleTransformer'),
        (dict(input_tensor_spec=TensorSpec((8, ))), 'expected a float32 image'),
        (dict(input_tensor_spec={'image': IMAGE}), 'image_field'),
        (dict(decoder_cls=partial(SpatialBroadcastDecodingNetwork, conv_layer_params=((3, 1, 1), ))),
         r'decoder_cls: expected a network with an output of shape \(4, 8, 8\)'),
        (dict(encoder_cls=lambda input_tensor_spec, **_: EncodingNetwork(input_tensor_spec)),
         r'encoder_cls: expected a network with an output of shape \(4,\)'),
        (dict(attention_unet_cls=lambda input_tensor_spec, **_: NetworkWrapper(torch.abs, input_tensor_spec)),
         r'attention_unet_cls: expected a network with an output of shape \(2, 8, 8\)')])
    def test_invalid_arguments_are_rejected_by_name(self, arguments, message):
        with pytest.raises((ValueError, SpecError), match=message):
            make_monet(**{'input_tensor_spec': IMAGE, **arguments})


class TestMoNetUNet:

    def test_output_has_the_size_of_the_image_and_is_not_activated(self):
        network = MoNetUNet(TensorSpec((2, 8, 12)), (3, 4, 5), (6, 7), 4)
        output, state = network(torch.randn(3, 2, 8, 12))
        assert output.shape == (3, 4, 8, 12) and state == ()
        assert bool((output < 0).any()) and bool((output > 0).any())

    def test_every_block_but_the_first_halves_the_image(self):
        network = MoNetUNet(TensorSpec((2, 16, 16)), (3, 4, 5), (6, ), 1)
        # 5 channels of 4 x 4 places before and behind the layer of 6
        shapes = [tuple(layer.weight.shape) for layer in network._across]
        assert shapes == [(6, 80), (80, 6)]

    def test_shortcuts_bypass_the_fully_connected_layers(self):
        network = MoNetUNet(TensorSpec((1, 8, 8)), (3, 3), (4, ), 1)
        with torch.no_grad():
            for parameter in network._across.parameters():
                parameter.zero_()
        image = torch.randn(1, 1, 8, 8, requires_grad=True)
        network(image)[0].square().sum().backward()
        assert bool(image.grad.abs().sum() > 0)

    @pytest.mark.parametrize('spec, filters, message', [
        (TensorSpec((1, 6, 8)), (2, 2, 2), 'divisible by 4'), (TensorSpec((1, 4, 4)), (2, 2, 2), 'more than one pixel'),
        (TensorSpec((1, 8, 8)), (), 'at least one'), (TensorSpec((8, )), (2, ), 'expected a float32 image')])
    def test_invalid_arguments_are_rejected(self, spec, filters, message):
        with pytest.raises((ValueError, SpecError), match=message):
            MoNetUNet(spec, filters, (4, ), 1)


class TestSpatialBroadcastDecodingNetwork:

    def test_the_canvas_compensates_for_unpadded_convolutions(self):
        network = SpatialBroadcastDecodingNetwork(3, 5, ((4, 3, 1), (4, (1, 3), 1), (2, 3, 1, 1)), output_width=7,
                                                  fc_layer_params=(6, ))
        output, _ = network(torch.randn(2, 3))
        assert output.shape == (2, 2, 5, 7) and tuple(network.output_spec.shape) == (2, 5, 7)

    def test_only_the_last_layer_has_the_output_activation(self):
        network = SpatialBroadcastDecodingNetwork(3, 4, ((4, 1, 1), (2, 1, 1)), activation=torch.tanh,
                                                  output_activation=torch.sigmoid)
        output, _ = network(100 * torch.randn(2, 3))
        assert bool((output >= 0).all()) and bool((output <= 1).all())

    @pytest.mark.parametrize('layers, message', [
        ((), 'at least one layer'), (((4, 3, 2), ), 'strides of 1'), (((4, 3), ), 'expected'),
        (((4, 1, 1, 3), ), 'larger than the image')])
    def test_invalid_arguments_are_rejected(self, layers, message):
        with pytest.raises(ValueError, match=message):
            SpatialBroadcastDecodingNetwork(3, 4, layers)


class TestAgent:

    @every_attention
    def test_training_changes_every_parameter(self, recurrent):
        agent, _ = make_agent(recurrent_attention=recurrent)
        before = parameters(agent)
        for _ in range(3):
            assert agent.train_iter() == 8
        assert all(not torch.equal(a, b) for a, b in zip(before, parameters(agent)))

    @pytest.mark.parametrize('algorithm', list(ALGORITHMS))
    def test_it_is_trained_along_with_a_policy(self, algorithm):
        actor, value = (partial(cls, fc_layer_params=(8, )) for cls in (ActorDistributionNetwork, ValueNetwork))
        policy = partial(ALGORITHMS[algorithm], actor_network_ctor=actor, value_network_ctor=value)
        agent, _ = make_agent(rl_algorithm_cls=policy)
        before = parameters(agent)
        for _ in range(3):
            agent.train_iter()
        assert all(not torch.equal(a, b) for a, b in zip(before, parameters(agent)))

    def test_same_seed_gives_the_same_parameters(self):
        results = []
        for _ in range(2):
            agent, _ = make_agent(seed=3)
            agent.train_iter()
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_steps_do_not_change_their_inputs(self):
        agent, env = make_agent()
        time_step = transformed(agent, env)
        copies = nest.map_structure(torch.clone, time_step)
        agent.rollout_step(time_step, agent.get_initial_rollout_state(2))
        agent.predict_step(time_step, agent.get_initial_predict_state(2))
        for old, new in zip(nest.flatten(copies), nest.flatten(time_step)):
            assert torch.equal(old, new)

    def test_a_checkpoint_restores_the_next_update(self):
        agent, env = make_agent()
        agent.train_iter()
        saved = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in agent.state_dict().items()}
        env_state, rollout = env.get_state(), agent.learner.state_dict()
        other, other_env = make_agent(seed=9)
        other.load_state_dict(saved)
        other_env.set_state(env_state)
        other.learner.load_state_dict(rollout)
        for a in (agent, other):
            if a.replay_buffer is not None:
                a.replay_buffer.clear()
            torch.manual_seed(5)
            a.train_iter()
        assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(other)))

    def test_one_environment_is_enough(self):
        agent, _ = make_agent(batch_size=1, mini_batch_size=1)
        agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_replayed_updates_match_eager_ones(self, with_capabilities):
        results = []
        for fixed in (True, False):
            with_capabilities(MoNetRepresentationLearner, traceable_update=fixed)
            agent, _ = make_agent()
            assert agent.capabilities.traceable_update == fixed
            for _ in range(4):
                agent.train_iter()
            results.append(parameters(agent))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    def test_its_update_is_traceable_unless_a_network_keeps_statistics(self):
        assert make_agent()[0].capabilities.traceable_update
        encoder = partial(EncodingNetwork, fc_layer_params=(8, ), use_fc_bn=True)
        assert not make_agent(encoder_cls=encoder)[0].capabilities.traceable_update

    def test_evaluation_measures_segmentation_and_reconstruction(self):
        agent, env = make_agent(batch_size=3)
        time_step = transformed(agent, env)
        info = agent.predict_step(time_step, agent.get_initial_predict_state(3)).info
        monet = agent._representation_learner._monet.predict_step(time_step.observation['image']).info
        true = time_step.observation['mask']
        assert isinstance(info.repr, MoNetMeasures)
        torch.testing.assert_close(info.repr.adjusted_rand_index,
                                   adjusted_rand_index(true, monet.mask.argmax(1), true > 0))
        error = (monet.full_rec - time_step.observation['image']).square()
        torch.testing.assert_close(info.repr.reconstruction, error.mean((1, 2, 3)))
        assert set(agent.measures(info)) == {'repr/adjusted_rand_index', 'repr/reconstruction', 'repr/kld'}

    def test_without_a_mask_the_rand_index_is_missing(self):
        agent, env = make_agent(with_mask=False)
        agent.train_iter()
        info = agent.predict_step(transformed(agent, env), agent.get_initial_predict_state(2)).info
        assert info.repr.adjusted_rand_index == ()

    def test_the_true_mask_is_not_trained_on(self):
        agent, env = make_agent()
        time_step = transformed(agent, env)
        other = time_step._replace(observation={**time_step.observation, 'mask': 1 + time_step.observation['mask']})
        infos = []
        for step in (time_step, other):
            torch.manual_seed(0)
            infos.append(agent.train_step(step, agent.get_initial_train_state(2), agent.rollout_step(
                step, agent.get_initial_rollout_state(2)).info).info)
        assert nest.flatten(infos[0]) and all(torch.equal(a, b) for a, b in zip(*map(nest.flatten, infos)))

    def test_the_representation_are_the_means_of_the_slots(self):
        agent, env = make_agent()
        learner, time_step = agent._representation_learner, transformed(agent, env)
        means = learner._monet.predict_step(time_step.observation['image']).output.z_mode
        assert tuple(learner.output_spec.shape) == (3, 2)
        for step in (learner.rollout_step(time_step), learner.train_step(time_step), learner.predict_step(time_step)):
            torch.testing.assert_close(step.output, means)

    @pytest.mark.parametrize('spec, message', [
        ({'picture': IMAGE}, "no 'image' in the observation, which has .*'picture'"),
        ({'image': IMAGE, 'mask': TensorSpec((8, 7), torch.uint8)}, 'mask_field: expected integers'),
        ({'image': IMAGE, 'mask': TensorSpec((8, 8))}, 'mask_field: expected integers')])
    def test_observations_without_the_required_fields_are_rejected(self, spec, message):
        with pytest.raises(SpecError, match=message):
            MoNetRepresentationLearner(spec, monet_cls=make_monet)
