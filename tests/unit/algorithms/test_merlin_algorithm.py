"""MERLIN: predictor, actor, both together, and its networks for images."""
import copy
from functools import partial

import pytest
import torch
from torch import nn

from alfx import context, nest
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.decoding_algorithm import DecodingAlgorithm
from alfx.algorithms.merlin_algorithm import (MBPLossInfo, MemoryBasedActor, MemoryBasedPredictor, MerlinAlgorithm,
                                              MerlinLossInfo, ResnetDecodingNetwork, ResnetEncodingNetwork)
from alfx.data_structures import LossInfo, TimeStep
from alfx.environments import suite_memory
from alfx.environments.suite_unittest import ActionType, MixedPolicyUnittestEnv, PolicyUnittestEnv
from alfx.gin_utils import ConfError
from alfx.layers import Sequential
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.memory import MemoryWithUsage
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec, zeros_from_spec
from alfx.utils.math_ops import identity

VECTOR, OTHER, ACTION = TensorSpec((5, )), TensorSpec((2, 3)), BoundedTensorSpec((), torch.int64, 0, 2)
encoder = partial(EncodingNetwork, fc_layer_params=(6, ), activation=torch.tanh)


SIZES = dict(latent_dim=4, lstm_size=(6, 5), memory_size=3)


def decoder(input_tensor_spec, output_tensor_spec):
    return EncodingNetwork(input_tensor_spec, output_tensor_spec, last_layer_size=output_tensor_spec.numel,
                           last_activation=identity)


ENVIRONMENTS = {
    'discrete': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Discrete),
    'continuous': partial(PolicyUnittestEnv, episode_length=5, action_type=ActionType.Continuous),
    'mixed': partial(MixedPolicyUnittestEnv, episode_length=5),
    'vector reward': partial(PolicyUnittestEnv, episode_length=5, reward_dim=3),
    'memory': partial(suite_memory.load, 'TMaze', env_args={'length': 3}),
}


def make_agent(environment='memory', batch_size=3, seed=0, unroll_length=7, root=Agent, config_args=None, **args):
    torch.manual_seed(seed)
    context.reset()
    env = ENVIRONMENTS[environment](batch_size=batch_size)
    env.seed(seed)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=unroll_length, **(config_args or {}))
    merlin = partial(MerlinAlgorithm, **{**dict(encoders=encoder, decoders=decoder, **SIZES), **args})
    root = partial(Agent, rl_algorithm_cls=merlin) if root is Agent else merlin
    agent = root(env.observation_spec(), env.action_spec(), reward_spec=env.reward_spec(), env=env, config=config,
                 optimizer=Adam(lr=1e-2))
    agent.set_path('')
    agent.finalize()
    return agent, env


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


@pytest.mark.parametrize('environment', list(ENVIRONMENTS))
@pytest.mark.parametrize('root', [Agent, MerlinAlgorithm])
def test_training_changes_every_parameter_and_is_repeated_by_the_same_seed(environment, root):
    results = []
    for _ in range(2):
        agent, _ = make_agent(environment, root=root)
        assert agent.get_unoptimized_parameter_info() == ''
        before = parameters(agent)
        for _ in range(3):
            agent.train_iter()
        assert not any(torch.equal(a, b) for a, b in zip(before, parameters(agent)))
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert all(bool(torch.isfinite(p).all()) for p in results[0])


def random_state(spec, batch):
    return nest.map_structure(lambda s: torch.rand(batch, *s.shape), spec)


@pytest.mark.parametrize('batch_size', [1, 4])
def test_a_checkpoint_restores_the_next_step_and_inputs_are_not_changed(batch_size):
    agent, env = make_agent(batch_size=batch_size)
    agent.train_iter()
    other, _ = make_agent(batch_size=batch_size, seed=9)
    other.load_state_dict(agent.state_dict())
    state = random_state(agent.rollout_state_spec, batch_size)
    step = env.current_time_step()
    before = copy.deepcopy((step, state))
    results = []
    for a in (agent, other):
        torch.manual_seed(0)
        result = a.rollout_step(step, state)
        predicted = a.predict_step(step, state)
        assert nest.structure(predicted.state) == nest.structure(a.predict_state_spec)
        results.append(nest.flatten((result, predicted)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert all(torch.equal(a, b) for a, b in zip(*map(nest.flatten, (before, (step, state)))))


def test_evaluation_is_deterministic_and_changes_nothing():
    agent, env = make_agent(batch_size=4)
    before = parameters(agent)
    state = random_state(agent.predict_state_spec, 4)
    first, second = (agent.predict_step(env.current_time_step(), state) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(*map(nest.flatten, (first, second))))
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(agent)))


def test_epsilon_greedy_evaluation_samples_some_actions():
    agent, env = make_agent(batch_size=200, config_args={'epsilon_greedy': 1.0})
    actions = agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(200)).output
    assert len(actions.unique()) == 3


def test_an_episode_starts_with_empty_memory_and_fills_the_state():
    agent, env = make_agent(batch_size=2, unroll_length=4)
    agent._config.use_rollout_state = True  # otherwise the experience has no states
    experience = agent.unroll(4)
    usage = experience.state.rl.mbp_state.memory.usage
    first = experience.time_step.is_first()
    assert first[0].all() and (usage[0] == 0).all()
    assert ((usage[1:] > 0).sum(-1) == torch.arange(1, 5).clamp(max=3)[:, None]).all()
    latents = experience.state.rl.mbp_state
    assert (latents.memory.memory[1][:, 0] == latents.latent_vector[1]).all()
    assert agent.policy._mbp.memory._states is None, 'no step leaves its graph behind'


def test_slots_read_by_the_actor_count_as_used():
    agent, env = make_agent(batch_size=2)
    merlin = agent.policy
    state = merlin.get_initial_rollout_state(2)
    step = env.current_time_step()
    usage = merlin._mbp.train_step((step.observation, step.prev_action), state.mbp_state).state.memory.usage
    together = merlin.rollout_step(step, state).state.mbp_state.memory.usage
    torch.testing.assert_close(together[:, 0], usage[:, 0] + 1)  # of the only slot, one key more


def test_the_value_trains_the_latent_and_the_policy_trains_no_predictor():
    agent, env = make_agent(batch_size=2)
    merlin = agent.policy
    step = env.current_time_step()
    state = random_state(merlin.train_state_spec, 2)
    reached = {}
    for what in ('policy', 'value'):
        info = merlin.rollout_step(step, state).info.mba_info
        merlin.zero_grad(set_to_none=True)
        (info.action_distribution.logits[:, 0] if what == 'policy' else info.value).sum().backward()
        reached[what] = {name for name, p in merlin.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert all(name.startswith('_mba') for name in reached['policy'])
    assert '_mba._key_net.weight' in reached['policy'] & reached['value']
    assert any(name.startswith('_mbp._encoder') for name in reached['value'])
    assert not any(name.startswith('_mbp._decoders') for name in reached['value'])


def test_gradients_flow_within_an_unroll_but_not_into_the_next():
    agent, _ = make_agent(batch_size=2, unroll_length=3)
    experience = agent.unroll(3)
    loss = experience.rollout_info.rl.mbp_info.extra.vae.kld
    merlin = agent.policy

    def reaches(t):
        grads = torch.autograd.grad(loss[t].sum(), list(merlin._mbp._key_net.parameters()), retain_graph=True,
                                    allow_unused=True)
        return any(g is not None and bool(g.any()) for g in grads)

    # the memory is empty at step 0; a key matters as soon as there are two slots to choose from
    assert not reaches(0) and reaches(2)
    assert all(not x.requires_grad for x in nest.flatten(agent.learner.collector.position.state))


def test_the_loss_is_the_sum_of_the_parts_with_their_weights():
    agent, env = make_agent('vector reward', batch_size=2)
    merlin = agent.policy
    info = agent.unroll(4).rollout_info.rl
    assert nest.get_nest_shape(info.mbp_info.loss)[:2] == (5, 2)
    loss_info = merlin.calc_loss(info)
    assert isinstance(loss_info.extra, MerlinLossInfo) and isinstance(loss_info.extra.mbp, MBPLossInfo)
    terms = info.mbp_info.extra
    torch.testing.assert_close(info.mbp_info.loss, terms.vae.loss + sum(nest.flatten(terms.decoder)))
    actor_loss = ActorCriticLoss()(info.mba_info).loss
    torch.testing.assert_close(loss_info.loss, info.mbp_info.loss + actor_loss)
    merlin._mba._loss_weight = 0.5
    torch.testing.assert_close(merlin.calc_loss(info).loss, info.mbp_info.loss + actor_loss / 2)


def test_reward_weights_reach_the_actor():
    agent, _ = make_agent('vector reward', batch_size=2)
    agent.policy.set_reward_weights(torch.tensor([1.0, 2.0, 3.0]))
    info = agent.unroll(2).rollout_info.rl.mba_info
    assert info.reward_weights[0, 0].tolist() == [1, 2, 3] and info.value.shape == (3, 2, 3)


def test_a_given_loss_of_the_actor_can_have_a_scalar_part():

    class Constant(ActorCriticLoss):

        def forward(self, info):
            return LossInfo(loss=torch.ones_like(info.reward), scalar_loss=info.value.sum() * 0 + 2.0, extra=())

    agent, _ = make_agent(rl_loss=Constant())
    info = agent.unroll(2).rollout_info.rl
    loss_info = agent.calc_loss(agent.unroll(2).rollout_info)
    assert loss_info.scalar_loss.item() == 2.0
    torch.testing.assert_close(agent.policy.calc_loss(info).loss, info.mbp_info.loss + 1)


def nested_predictor(**args):
    encoders = {'camera': encoder(OTHER), 'state': encoder(VECTOR)}
    decoders = {name: DecodingAlgorithm(decoder(TensorSpec((4, )), spec), loss_weight=weight)
                for name, spec, weight in (('camera', OTHER, 1.0), ('state', VECTOR, 3.0))}
    return MemoryBasedPredictor(ACTION, encoders, decoders, **{**SIZES, **args})


def test_nested_observations_have_an_encoder_and_a_decoder_each():
    torch.manual_seed(0)
    predictor = nested_predictor(num_read_keys=2, loss_weight=2.0)
    observation = {'camera': torch.randn(3, 2, 3), 'state': torch.randn(3, 5)}
    state = zeros_from_spec(predictor.train_state_spec, 3)
    step = predictor.train_step((observation, torch.zeros(3, dtype=torch.int64)), state)
    assert step.output.shape == (3, 4) and step.state.mem_readout.shape == (3, 8)
    terms = step.info.extra
    assert set(terms.decoder) == {'camera', 'state'}
    torch.testing.assert_close(step.info.loss,
                               2 * (terms.vae.loss + terms.decoder['camera'] + 3 * terms.decoder['state']))
    assert predictor.predict_step((observation, torch.zeros(3, dtype=torch.int64)), state).info == ()
    step.info.loss.sum().backward()
    without = [name for name, p in predictor.named_parameters() if p.grad is None]
    assert all('key_net' in name for name in without), 'an empty memory is read by no key'


def test_networks_and_constructors_are_accepted_as_coders():
    spec = {'camera': OTHER, 'state': VECTOR}
    merlin = MerlinAlgorithm(spec, ACTION, encoders={'camera': encoder, 'state': encoder(VECTOR)},
                             decoders={'camera': decoder(TensorSpec((4, )), OTHER), 'state': decoder}, **SIZES)
    assert all(isinstance(d, DecodingAlgorithm) for d in merlin._mbp._decoders)
    step = TimeStep(observation=zeros_from_spec(spec, 2), prev_action=torch.zeros(2, dtype=torch.int64),
                    step_type=torch.zeros(2, dtype=torch.int32), reward=torch.zeros(2), discount=torch.ones(2))
    assert merlin.rollout_step(step, merlin.get_initial_rollout_state(2)).output.shape == (2, )


@pytest.mark.parametrize('args, message', [
    (dict(encoders={'a': encoder}), 'MerlinAlgorithm.encoders: expected the structure'),
    (dict(decoders=[decoder]), 'MerlinAlgorithm.decoders: expected the structure'),
    (dict(encoders=lambda input_tensor_spec: nn.Linear(5, 2)), 'mbp.encoders: expected a Network'),
    (dict(encoders=partial(LSTMEncodingNetwork, hidden_size=3)), 'mbp.encoders: .*is recurrent'),
    (dict(decoders=lambda input_tensor_spec, output_tensor_spec: nn.Linear(5, 2)), 'mbp.decoders: expected an algori'),
    (dict(decoders=lambda input_tensor_spec, output_tensor_spec: LSTMEncodingNetwork(
        input_tensor_spec, output_tensor_spec, last_layer_size=5, last_activation=identity)),
     'mbp.decoders: .*is recurrent'),
])
def test_invalid_encoders_and_decoders_are_rejected_by_name(args, message):
    with pytest.raises(ValueError, match=message):
        MerlinAlgorithm(VECTOR, ACTION, **{**dict(encoders=encoder, decoders=decoder), **SIZES, **args})


def test_numbers_and_specs_that_do_not_fit_are_rejected():
    for name in ('latent_dim', 'memory_size', 'num_read_keys'):
        with pytest.raises(ConfError, match=name):
            nested_predictor(**{name: 0})
    memory = MemoryWithUsage(4, 3)
    with pytest.raises(SpecError, match='latent vector of shape'):
        MemoryBasedActor(VECTOR, ACTION, memory, latent_dim=4)
    with pytest.raises(ConfError, match='epsilon_greedy'):
        MemoryBasedActor(TensorSpec((4, )), ACTION, memory, latent_dim=4, epsilon_greedy=2.0)
    with pytest.raises(ValueError, match='on-policy'):
        MerlinAlgorithm(VECTOR, ACTION, encoder, decoder, **SIZES).set_on_policy(False)


def test_the_actor_reads_with_several_keys_and_one_lstm_layer():
    memory = MemoryWithUsage(4, 3)
    actor = MemoryBasedActor(TensorSpec((4, )), ACTION, memory, num_read_keys=3, lstm_size=7, latent_dim=4,
                             loss_class=partial(ActorCriticLoss, gamma=0.5))
    assert float(actor._loss.gamma) == 0.5
    memory.build(2)
    memory.write(torch.randn(2, 4))
    step = TimeStep(observation=torch.randn(2, 4), reward=torch.zeros(2))
    assert actor.rollout_step(step, actor.get_initial_rollout_state(2)).info.value.shape == (2, )
    torch.testing.assert_close(memory.usage[:, 0], torch.tensor([4.0, 4.0]))


def test_the_image_encoder_has_three_halvings():
    spec = TensorSpec((3, 20, 17))
    network = ResnetEncodingNetwork(spec, output_size=7, use_fc_bn=True, norm_layer=nn.LayerNorm(7))
    assert network.output_spec == TensorSpec((7, ))
    output, _ = network(torch.rand(4, 3, 20, 17))
    torch.testing.assert_close(output.mean(1), torch.zeros(4), atol=1e-4, rtol=0)
    blocks = [m for m in network.modules() if type(m).__name__ == 'BottleneckBlock']
    assert len(blocks) == 6 and network.copy() is not network
    sizes = [m.weight.shape[1] for m in network.modules() if type(m).__name__ == 'FC']
    assert sizes == [64 * 3 * 3]
    plain = ResnetEncodingNetwork(spec)
    assert plain.output_spec == TensorSpec((500, )) and plain(torch.rand(2, 3, 20, 17))[0].abs().max() <= 1


@pytest.mark.parametrize('shape', [(3, 64, 64), (1, 8, 16)])
def test_the_image_decoder_returns_images_of_the_requested_shape(shape):
    network = ResnetDecodingNetwork(TensorSpec((10, )), TensorSpec(shape))
    output, _ = network(torch.randn(2, 10))
    assert output.shape == (2, *shape) and network.output_spec == TensorSpec(shape)
    output.square().mean().backward()
    assert all(p.grad is not None for p in network.parameters())


def test_images_can_be_remembered():
    image = TensorSpec((3, 16, 16))
    merlin = MerlinAlgorithm(image, ACTION, ResnetEncodingNetwork, ResnetDecodingNetwork, **SIZES)
    step = TimeStep(observation=torch.rand(2, 3, 16, 16), prev_action=torch.zeros(2, dtype=torch.int64),
                    step_type=torch.zeros(2, dtype=torch.int32), reward=torch.zeros(2), discount=torch.ones(2))
    info = merlin.rollout_step(step, merlin.get_initial_rollout_state(2)).info
    assert info.mbp_info.loss.shape == (2, )


def test_inputs_that_are_no_images_are_rejected():
    with pytest.raises(SpecError, match='ImageScaleTransformer'):
        ResnetEncodingNetwork(TensorSpec((3, 8, 8), torch.uint8))
    with pytest.raises(SpecError, match='float image'):
        ResnetEncodingNetwork(VECTOR)
    with pytest.raises(SpecError, match='divisible by 8'):
        ResnetDecodingNetwork(VECTOR, TensorSpec((3, 12, 16)))
    with pytest.raises(SpecError, match='spec of a vector'):
        ResnetDecodingNetwork(image := TensorSpec((3, 8, 8)), image)


def test_batch_norm_of_images_is_trained_in_rollouts_and_not_in_evaluation():
    network = ResnetEncodingNetwork(TensorSpec((3, 16, 16)), output_size=4)
    wrapped = Sequential(network._net)
    statistics = copy.deepcopy(dict(wrapped.named_buffers()))
    network.eval()
    network(torch.rand(2, 3, 16, 16))
    assert all(torch.equal(statistics[k], v) for k, v in wrapped.named_buffers())
    network.train()
    network(torch.rand(2, 3, 16, 16))
    assert any(not torch.equal(statistics[k], v) for k, v in wrapped.named_buffers())
