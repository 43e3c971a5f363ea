"""Learning a representation by predicting what follows: losses against slow loops, networks, agents."""
from functools import partial

import pytest
import torch
from helpers.agents import make_agent
from helpers.plans import num_graphs
from test_encoding_algorithm import sac_agent
from torch import nn

from alfx import context, nest
from alfx.algorithms.predictive_representation_learner import (PredictionInfo, PredictiveRepresentationLearner,
                                                               PredictiveRepresentationLearnerInfo, SimpleDecoder)
from alfx.data_structures import StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.preprocessors import EmbeddingPreprocessor
from alfx.optimizers import SGD
from alfx.summary import summary_ops
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.losses import element_wise_squared_loss

OBSERVATION, ACTION, LATENT = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1, 1), TensorSpec((6, ))
memory = partial(LSTMEncodingNetwork, hidden_size=(6, ))
plain = partial(EncodingNetwork, fc_layer_params=(6, ), activation=torch.tanh)


def output(size):
    return partial(EncodingNetwork, last_layer_size=size, last_activation=nn.Identity())


reward_decoder = partial(SimpleDecoder, target_field='reward', decoder_net_ctor=output(1))
observation_decoder = partial(SimpleDecoder, target_field='observation', decoder_net_ctor=output(3), loss_weight=0.5,
                              loss_ctor=element_wise_squared_loss)


def learner_of(**args):
    args = {'num_unroll_steps': 2, 'decoder_ctor': reward_decoder, 'encoding_net_ctor': memory,
            'dynamics_net_ctor': memory, **args}
    return PredictiveRepresentationLearner(OBSERVATION, ACTION, **args)


def state_of(spec, *outer):
    return nest.map_structure(lambda s: torch.randn(*outer, *s.shape), spec)


def future(*outer, steps=2, targets=None):
    mask = torch.rand(*outer, steps + 1) < 0.7
    mask[..., 0] = True
    return PredictiveRepresentationLearnerInfo(
        action=torch.randn(*outer, steps, 2) if steps else (), mask=mask,
        target=torch.randn(*outer, steps + 1) if targets is None else targets)


# Losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('encoding', [memory, plain])
def test_the_loss_matches_a_slow_loop(encoding):
    torch.manual_seed(0)
    learner = learner_of(encoding_net_ctor=encoding, decoder_ctor=[reward_decoder, observation_decoder])
    target = [torch.randn(4, 2, 3), torch.randn(4, 2, 3, 3)]
    info = PredictionInfo(future=future(4, 2, targets=target), latent=torch.randn(4, 2, 6),
                          state=state_of(learner.train_state_spec, 4, 2) if encoding is memory else ())
    loss_info = learner.calc_loss(info)
    reward, observation = (learner.get_decoder(field)._decoder_net for field in ('reward', 'observation'))
    for t in range(4):
        for b in range(2):
            latent = info.latent[t, b].unsqueeze(0)
            state = nest.map_structure(lambda x, t=t, b=b: x[t, b].unsqueeze(0), info.state)
            state = state if encoding is memory else learner._initial_state(latent)
            total = torch.zeros(())
            for i in range(3):
                if i > 0:
                    latent, state = learner._dynamics_net(info.future.action[t, b, i - 1].unsqueeze(0), state)
                if info.future.mask[t, b, i]:
                    difference = (reward(latent)[0][0, 0] - target[0][t, b, i]).abs()
                    total = total + (0.5 * difference**2 if difference < 1 else difference - 0.5)
                    total = total + 0.5 * (observation(latent)[0][0] - target[1][t, b, i]).square().sum() / 3
            torch.testing.assert_close(loss_info.loss[t, b], total / 3)
    extra = loss_info.extra
    torch.testing.assert_close(extra['SimpleDecoder.reward'] + 0.5 * extra['SimpleDecoder.observation'], loss_info.loss)


def test_the_loss_of_a_decoder_worked_out_by_hand():
    """Errors 0.5 and 2 in two dimensions: smooth L1 0.125 and 1.5, mean 0.8125, times the weight 2."""
    decoder = SimpleDecoder(LATENT, 'x', output(2), loss_weight=2.0)
    target = torch.zeros(1, 2, 2)
    predicted = torch.tensor([[[0.5, -2.0], [7.0, 7.0]]])
    info = decoder.calc_loss(target, predicted, torch.tensor([[True, False]]))
    assert info.loss.tolist() == [[1.625, 0.0]] and info.extra.tolist() == [[0.8125, 0.0]]


def test_masked_steps_have_no_gradient_even_if_nan():
    decoder = SimpleDecoder(LATENT, 'x', output(1))
    predicted = torch.zeros(2, 1, 1, requires_grad=True)
    target = torch.tensor([[1.0], [torch.inf]])
    decoder.calc_loss(target, predicted, torch.tensor([[True], [False]])).loss.sum().backward()
    assert predicted.grad.flatten().tolist() == [-1.0, 0.0]


def test_gradients_reach_all_inputs_of_a_prediction():
    learner = learner_of(encoding_net_ctor=plain, postprocessor=output(4))
    step = learner.train_step(TimeStep(observation=torch.randn(5, 3)), (), future(5))
    info = nest.map_structure(lambda x: x.unsqueeze(0), step.info)
    (learner.calc_loss(info).loss.sum() + step.output.sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in learner.parameters())


def test_a_normalized_target_changes_the_loss_and_not_the_prediction():
    torch.manual_seed(0)
    decoder = SimpleDecoder(LATENT, 'x', output(1), normalize_target=True, loss_ctor=element_wise_squared_loss)
    latent, target = torch.randn(20, 6), 100 + 10 * torch.randn(20)
    before = decoder.train_step(latent).output
    decoder.observe_targets(target)
    assert torch.equal(decoder.predict_step(latent).output, before)
    info = decoder.calc_loss(target.unsqueeze(0), before.unsqueeze(0))
    variance = target.var(correction=0) + 1e-4
    torch.testing.assert_close(info.loss[0], (before[:, 0] - target).square() / variance, rtol=1e-3, atol=1e-3)
    assert any('target_normalizer' in name or '_normalizer' in name for name in decoder.state_dict())
    statistics = [x.clone() for x in decoder._normalizer.buffers()]
    decoder.calc_loss(target.unsqueeze(0), before.unsqueeze(0))
    assert all(torch.equal(a, b) for a, b in zip(statistics, decoder._normalizer.buffers()))


def test_classes_are_predicted_with_a_classification_loss():
    decoder = SimpleDecoder(LATENT, 'x', output(4), loss_ctor=partial(nn.CrossEntropyLoss, reduction='none'))
    target, scores = torch.randint(0, 4, (2, 3)), torch.randn(2, 3, 4)
    expected = -scores.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(decoder.calc_loss(target, scores).loss, expected)


@pytest.mark.parametrize('args, shape, message', [
    (dict(), (2, 3, 5), "expected the target 'x' to have the shape \\(2,\\) .* found \\(5,\\)"),
    (dict(loss_ctor=nn.MSELoss), (2, 3, 2), "expected a loss of shape .* or reduction='none'"),
])
def test_a_target_that_does_not_fit_is_rejected(args, shape, message):
    decoder = SimpleDecoder(LATENT, 'x', output(2), **args)
    with pytest.raises(ValueError, match=message):
        decoder.calc_loss(torch.zeros(shape), torch.zeros(2, 3, 2))


def test_integers_are_predicted_as_numbers():
    decoder = SimpleDecoder(LATENT, 'x', output(1), loss_ctor=nn.L1Loss)
    with pytest.raises(ValueError, match='reduction'):
        decoder.calc_loss(torch.ones(1, 2, dtype=torch.int64), torch.zeros(1, 2, 1))
    decoder = SimpleDecoder(LATENT, 'x', output(1), loss_ctor=element_wise_squared_loss)
    assert decoder.calc_loss(torch.full((1, 2), 3), torch.ones(1, 2, 1)).loss.tolist() == [[4.0, 4.0]]


def test_a_decoder_is_named_after_its_target():
    assert SimpleDecoder(LATENT, 'reward', output(1)).name == 'SimpleDecoder.reward'
    assert SimpleDecoder(LATENT, 'reward', output(1), append_target_field_to_name=False, name='r').name == 'r'


def test_decoder_summaries_skip_masked_steps(monkeypatch):
    written = {}
    monkeypatch.setattr(context, 'should_record_summaries', lambda: True)
    for module in ('summary_ops', 'summary_utils'):
        monkeypatch.setattr(f'alfx.summary.{module}.should_record_summaries', lambda: True)
    monkeypatch.setattr('alfx.summary.should_record_summaries', lambda: True)

    def record(name, value, *args, **kwargs):
        written[summary_ops.scope_name() + name] = value

    monkeypatch.setattr(summary_ops, 'scalar', record)
    monkeypatch.setattr('alfx.summary.scalar', record)
    monkeypatch.setattr(summary_ops, 'histogram', lambda *args, **kwargs: None)
    decoder = SimpleDecoder(LATENT, 'x', output(2), debug_summaries=True, summarize_each_dimension=True)
    target = torch.tensor([[[0.0, 1.0], [1.0, 3.0], [50.0, 50.0]]])
    decoder.calc_loss(target, target + 0.5, torch.tensor([[True, True, False]]))
    assert written['SimpleDecoder.x/explained_variance/0'] == written['SimpleDecoder.x/explained_variance'] == 1
    assert written['SimpleDecoder.x/predict/1/mean'] == 2.5 and written['SimpleDecoder.x/target/mean'] == 1.25
    assert written['SimpleDecoder.x/loss/0/mean'] == 0.125
    written.clear()
    scalar = partial(EncodingNetwork, last_layer_size=1, last_activation=torch.tanh, output_tensor_spec=TensorSpec(()))
    decoder = SimpleDecoder(LATENT, 'x', scalar, debug_summaries=True, summarize_each_dimension=True)
    decoder.calc_loss(target[..., 0], target[..., 0] + 0.5)
    assert 'SimpleDecoder.x/loss/mean' in written and 'SimpleDecoder.x/loss/0/mean' not in written


# Predictions -----------------------------------------------------------------------------------------------------


def test_multi_step_predictions_apply_the_dynamics_per_action():
    learner = learner_of(decoder_ctor=[reward_decoder, observation_decoder])
    latent, state, actions = torch.randn(4, 6), state_of(learner.train_state_spec, 4), torch.randn(4, 5, 2)
    reward, observation = learner.predict_multi_step(latent, actions, state=state)
    assert (reward.shape, observation.shape) == ((4, 6, 1), (4, 6, 3))
    decode = learner.get_decoder('reward')._decoder_net
    for i in range(6):
        torch.testing.assert_close(reward[:, i], decode(latent)[0])
        if i < 5:
            latent, state = learner._dynamics_net(actions[:, i], state)


def test_a_target_chosen_by_name_is_predicted_alone():
    learner = learner_of(encoding_net_ctor=plain, decoder_ctor=[reward_decoder, observation_decoder])
    latent, actions = torch.randn(4, 6), torch.randn(4, 2, 2)
    both = learner.predict_multi_step(latent, actions)
    assert torch.equal(learner.predict_multi_step(latent, actions, 'observation'), both[1])
    chosen = learner.predict_multi_step(latent, actions, ['observation', 'reward'])
    assert torch.equal(chosen[0], both[1]) and torch.equal(chosen[1], both[0])
    with pytest.raises(ValueError, match="no decoder predicts 'rewards'; the decoders predict .'reward'"):
        learner.predict_multi_step(latent, actions, 'rewards')
    single = learner_of(encoding_net_ctor=plain)
    assert single.predict_multi_step(latent, actions).shape == (4, 3, 1)
    assert single.get_decoder('reward').get_target_fields() == 'reward'


def test_without_unroll_steps_no_dynamics_network_exists():
    def refuse(action_spec):
        raise AssertionError('not to be called')

    learner = learner_of(num_unroll_steps=0, dynamics_net_ctor=refuse)
    latent = torch.randn(4, 6)
    assert learner.predict_multi_step(latent, torch.zeros(4, 0, 2)).shape == (4, 1, 1)
    with pytest.raises(ValueError, match='1 steps cannot be predicted with num_unroll_steps = 0'):
        learner.predict_multi_step(latent, torch.zeros(4, 1, 2))
    info = PredictionInfo(future=future(3, 4, steps=0), latent=torch.randn(3, 4, 6))
    assert learner.calc_loss(info).loss.shape == (3, 4)


def test_the_encoder_state_is_required_if_the_dynamics_start_from_it():
    with pytest.raises(ValueError, match='needs the state of the encoder'):
        learner_of().predict_multi_step(torch.randn(4, 6), torch.zeros(4, 1, 2))


@pytest.mark.parametrize('size, begins_with_state', [((6, ), True), ((5, 6), False)])
def test_dynamics_start_from_the_encoder_state_or_a_linear_map(
        size, begins_with_state):
    """Dynamics start from the state of the encoder or from a linear function of the latent vector."""
    learner = learner_of(dynamics_net_ctor=partial(LSTMEncodingNetwork, hidden_size=size))
    assert (learner._initial_state is None) == begins_with_state
    if not begins_with_state:
        latent = torch.randn(4, 6)
        state = learner._initial_state(latent)
        nest.assert_same_structure(learner._dynamics_net.state_spec, state)
        zero = learner._initial_state(torch.zeros(4, 6))
        double = learner._initial_state(2 * latent)
        for a, b, c in zip(*map(nest.flatten, (state, double, zero))):
            torch.testing.assert_close(2 * (a - c), b - c)


@pytest.mark.parametrize('postprocessor, shape', [
    (None, (6, )), (torch.tanh, (6, )), (nn.Linear(6, 4), (4, )), (output(4)(LATENT), (4, )), (output(4), (4, )),
    (lambda latent: {'a': latent[:, :2]}, None)])
def test_the_postprocessor_makes_the_representation(postprocessor, shape):
    learner = learner_of(encoding_net_ctor=plain, postprocessor=postprocessor)
    step = TimeStep(observation=torch.randn(5, 3))
    results = [getattr(learner, method)(step, ()).output for method in ('predict_step', 'rollout_step', 'train_step')]
    if shape is None:
        assert learner.output_spec == {'a': TensorSpec((2, ))} and results[0]['a'].shape == (5, 2)
        return
    assert learner.output_spec == TensorSpec(shape) and results[0].shape == (5, *shape)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    if postprocessor is torch.tanh:
        assert torch.equal(results[0], torch.tanh(learner._encoder(step.observation)[0]))


# Invalid settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('args, error, message', [
    (dict(dynamics_net_ctor=plain), SpecError, 'dynamics_net_ctor: expected a recurrent network'),
    (dict(dynamics_net_ctor=partial(LSTMEncodingNetwork, hidden_size=(7, ))), SpecError,
     'dynamics_net_ctor: expected the output spec of the encoder'),
    (dict(num_unroll_steps=-1), ValueError, 'num_unroll_steps must be an int >= 0, found int -1'),
    (dict(decoder_ctor=[reward_decoder, reward_decoder]), ValueError, "two decoders predict 'reward'"),
    (dict(postprocessor=torch.tanh, postprocessor_optimizer=SGD(lr=1)), ValueError, 'optimizer: there are no'),
    (dict(num_unroll_steps=0, dynamics_optimizer=SGD(lr=1)), ValueError, 'dynamics_optimizer: there are no parameters'),
    (dict(decoder_ctor=partial(SimpleDecoder, target_field='x', decoder_net_ctor=memory)), SpecError,
     'SimpleDecoder.x.decoder_net_ctor: expected a network that is not recurrent'),
])
def test_invalid_arguments_are_rejected(args, error, message):
    with pytest.raises(error, match=message):
        learner_of(**args)


def test_on_policy_training_is_rejected():
    with pytest.raises(ValueError, match='is an off-policy algorithm and cannot be trained on-policy'):
        agent_of('actor-critic')


def test_recurrent_training_on_single_steps_needs_rollout_states():
    with pytest.raises(ConfError, match='TrainerConfig.mini_batch_length = 1'):
        agent_of('ppo', mini_batch_length=1)
    agent_of('ppo', mini_batch_length=1, encoding_net_ctor=plain)
    agent_of('ppo', mini_batch_length=1, use_rollout_state=True)


def test_an_error_names_a_field_that_the_experience_does_not_have():
    agent, _ = agent_of('ppo', decoder_ctor=partial(SimpleDecoder, target_field='rewrad', decoder_net_ctor=output(1)))
    with pytest.raises(LookupError, match='rewrad'):
        agent.train_iter()


# Agents ----------------------------------------------------------------------------------------------------------

def dynamics_of(action_spec):
    """Return the dynamics network for discrete or continuous actions."""
    embedding = EmbeddingPreprocessor(action_spec, embedding_dim=3) if action_spec.is_discrete else None
    return LSTMEncodingNetwork(action_spec, hidden_size=(6, ), input_preprocessors=embedding)


def agent_of(algorithm, seed=0, mini_batch_length=2, use_rollout_state=None, batch_size=4, **args):
    """Return an agent with the learner: PPO or actor-critic for discrete actions, SAC for continuous ones."""
    args = {'num_unroll_steps': 2, 'encoding_net_ctor': memory, 'dynamics_net_ctor': dynamics_of,
            'decoder_ctor': [reward_decoder, partial(SimpleDecoder, target_field='observation',
                                                     decoder_net_ctor=output(1), normalize_target=True)], **args}
    learner = partial(PredictiveRepresentationLearner, **args)
    if algorithm != 'sac':
        return make_agent(algorithm, 'discrete', representation_learner_cls=learner, seed=seed, batch_size=batch_size,
                          mini_batch_length=mini_batch_length, use_rollout_state=use_rollout_state)
    return sac_agent(learner, seed, mini_batch_length, bool(use_rollout_state), batch_size)


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


every_agent = pytest.mark.parametrize('algorithm', ['ppo', 'sac'])


@every_agent
@pytest.mark.parametrize('encoding', [memory, plain])
def test_an_agent_trains_all_parameters_and_the_same_seed_gives_the_same(algorithm, encoding):
    results = []
    for _ in range(2):
        agent, _ = agent_of(algorithm, seed=3, encoding_net_ctor=encoding)
        before = dict(agent._representation_learner.named_parameters())
        before = {name: p.detach().clone() for name, p in before.items()}
        for _ in range(3):
            agent.train_iter()
        unchanged = [name for name, p in agent._representation_learner.named_parameters()
                     if torch.equal(before[name], p)]
        assert not unchanged
        results.append(parameters(agent))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@every_agent
def test_a_checkpoint_restores_representation_and_statistics(algorithm):
    agent, env = agent_of(algorithm)
    for _ in range(2):
        agent.train_iter()
    other, _ = agent_of(algorithm, seed=9)
    other.load_state_dict(agent.state_dict())
    time_step, state = env.current_time_step(), state_of(agent.predict_state_spec, 4)
    outputs = [a.predict_step(time_step, state).output for a in (agent, other)]
    assert torch.equal(*outputs)
    normalizers = [a._representation_learner.get_decoder('observation')._normalizer for a in (agent, other)]
    assert all(torch.equal(a, b) for a, b in zip(*(n.buffers() for n in normalizers)))
    assert not torch.equal(next(normalizers[0].buffers()), torch.zeros(1))


@every_agent
@pytest.mark.parametrize('use_rollout_state', [False, True])
def test_sequences_match_a_loop_over_steps(algorithm, use_rollout_state, monkeypatch):
    agent, _ = agent_of(algorithm, mini_batch_length=3, use_rollout_state=use_rollout_state)
    for _ in range(3):
        agent.unroll(6)
    experience, batch_info = agent.replay_buffer.get_batch(6, 4)
    root_inputs, rollout_info = agent.preprocess_experience(experience.time_step, experience.rollout_info, batch_info)
    experience = nest.map_structure(lambda x: x.transpose(0, 1), experience._replace(
        time_step=root_inputs, rollout_info=rollout_info))
    learner = agent._representation_learner
    assert agent.capabilities.trains_sequences_at_once
    losses = []
    for at_once in (True, False):
        monkeypatch.setattr(agent, '_capabilities', agent.capabilities._replace(trains_sequences_at_once=at_once))
        losses.append(learner.calc_loss(agent.learner.losses.train_info(experience).repr).loss)
    torch.testing.assert_close(*losses)


def test_preprocessing_fills_targets_actions_and_masks():
    agent, _ = agent_of('sac')
    for _ in range(3):
        agent.unroll(6)
    experience, batch_info = agent.replay_buffer.get_batch(6, 4)
    info = agent.preprocess_experience(experience.time_step, experience.rollout_info, batch_info)[1].repr
    assert isinstance(info, PredictiveRepresentationLearnerInfo)
    assert (info.action.shape, info.mask.shape) == ((6, 4, 2, 1), (6, 4, 3))
    assert [target.shape for target in info.target] == [(6, 4, 3), (6, 4, 3, 1)]
    inside = info.mask[:, :3, 1]
    assert torch.equal(info.action[:, :3, 0][inside], experience.action[:, :3][inside])
    assert torch.equal(info.target[0][:, :3, 1][inside], experience.time_step.reward[:, 1:][inside])
    assert not info.mask[:, :, 1][experience.time_step.step_type == StepType.LAST].any()


def test_steps_do_not_change_their_inputs_and_one_environment_is_enough():
    agent, env = agent_of('ppo', batch_size=1)
    for _ in range(3):
        agent.train_iter()
    learner, time_step = agent._representation_learner, env.current_time_step()
    state, info = state_of(learner.train_state_spec, 1), future(1)
    copies = nest.map_structure(torch.clone, (time_step, state, info))
    learner.predict_step(time_step, state)
    learner.rollout_step(time_step, state)
    learner.train_step(time_step, state, info)
    for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state, info))):
        assert torch.equal(old, new)


def test_evaluation_changes_no_statistics_and_reports_no_loss():
    agent, env = agent_of('sac')
    agent.train_iter()
    before = [x.clone() for x in agent._representation_learner.buffers()]
    step = agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(4))
    assert step.info.repr == () and agent.measures(step.info) == {}
    assert all(torch.equal(a, b) for a, b in zip(before, agent._representation_learner.buffers()))


def test_each_part_can_have_a_separate_optimizer():
    optimizers = {name: SGD(lr=0.1) for name in ('encoding_optimizer', 'dynamics_optimizer', 'postprocessor_optimizer')}
    decoder_optimizer = SGD(lr=0.1)
    agent, _ = agent_of('sac', encoding_net_ctor=plain, postprocessor=output(4), **optimizers,
                        decoder_ctor=partial(reward_decoder, optimizer=decoder_optimizer))
    learner = agent._representation_learner
    parts = [[learner._encoder], [learner._dynamics_net, learner._initial_state], [learner._postprocessor],
             [learner._decoders]]
    for optimizer, modules in zip([*optimizers.values(), decoder_optimizer], parts):
        owned = {id(p) for group in optimizer.param_groups for p in group['params']}
        assert owned == {id(p) for module in modules for p in module.parameters()}
    agent.train_iter()


def test_replayed_updates_match_eager_ones(warm_up):
    results = []
    for before in (1, 10**6):
        warm_up(before)
        agent, _ = agent_of('sac', num_unroll_steps=1, decoder_ctor=reward_decoder)
        for _ in range(2):
            agent.train_iter()
        assert bool(num_graphs(agent)) == (before == 1)
        results.append(parameters(agent))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
