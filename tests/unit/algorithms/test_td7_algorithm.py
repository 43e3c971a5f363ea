"""What TD7 adds to TD3: embeddings, which copies of the networks each term reads, clipped targets, LAP."""
import copy
from functools import partial
from unittest import mock

import pytest
import torch
from helpers.deterministic_agents import make_agent as make_deterministic_agent
from helpers.dqn_agents import assert_same_parameters, train
from helpers.plans import backends_of, num_graphs, warnings_in

from alfx import context, nest
from alfx.algorithms import td3_algorithm
from alfx.algorithms.ddpg_algorithm import DdpgInfo
from alfx.algorithms.td7_algorithm import Td7Algorithm, lap_priority
from alfx.data_structures import StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.networks.actor_networks import ActorRNNNetwork
from alfx.networks.sale_networks import SaleActorNetwork, SaleCriticNetwork, SaleEncoder, avg_l1_norm
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.losses import element_wise_huber_loss

SMALL = dict(actor_network_ctor=partial(SaleActorNetwork, observation_layer_size=8, fc_layer_params=(8, )),
             critic_network_ctor=partial(SaleCriticNetwork, pair_layer_size=8, joint_fc_layer_params=(8, )),
             encoder_ctor=partial(SaleEncoder, embedding_size=6, fc_layer_params=(8, )))
OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1, 3)
LAST = int(StepType.LAST)

make_agent = partial(make_deterministic_agent, Td7Algorithm, priority_replay=True, **SMALL)


def make(**arguments):
    """Return an algorithm whose copies of networks are all different, and whose targets are not clipped."""
    torch.manual_seed(0)
    rl = Td7Algorithm(OBSERVATION, ACTION, config=None, **{**SMALL, 'target_noise': 0.0, **arguments})
    with torch.no_grad():
        for parameter in rl.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        rl._target_range.copy_(torch.tensor([-100.0, 100.0]))
    rl._updates.add()  # the next update trains the policy
    return rl


def batch(length=2, size=5):
    torch.manual_seed(1)
    step_type = torch.full((length, size), int(StepType.MID), dtype=torch.int32)
    step_type[1, 0], step_type[0, 1] = LAST, LAST
    discount = torch.ones(length, size)
    discount[1, 0] = 0.0
    inputs = TimeStep(step_type, 3 * torch.randn(length, size), discount, torch.randn(length, size, 3))
    return inputs, DdpgInfo(action=1 + torch.rand(length, size, 2))


def info_of(rl, inputs, rollout_info):
    return rl.train_sequence(inputs, rl.train_state_spec, rollout_info).info


def test_the_norm_divides_by_the_mean_magnitude():
    # magnitudes 3 and 1 have the mean 2
    x = torch.tensor([[3.0, -1.0], [0.0, 0.0]])
    torch.testing.assert_close(avg_l1_norm(x), torch.tensor([[1.5, -0.5], [0.0, 0.0]]))
    torch.testing.assert_close(avg_l1_norm(1e-6 * x), torch.tensor([[1.5, -0.5], [0.0, 0.0]]))
    z = SaleEncoder(OBSERVATION, ACTION, 6, (8, )).embed_state(torch.randn(4, 3))
    torch.testing.assert_close(z.abs().mean(-1), torch.ones(4))


def linear(layer, x):
    return x @ layer.weight.T + layer.bias


def test_the_networks_are_those_of_the_paper():
    """Recompute their outputs from their weights: A(l0 s) beside z for the actor, A(l0 (s, a)) beside z and p."""
    elu, relu, cat = torch.nn.functional.elu, torch.relu, partial(torch.cat, dim=-1)
    s, a, z, p = torch.randn(4, 3), torch.randn(4, 2), torch.randn(4, 6), torch.randn(4, 6)
    encoder = SaleEncoder(OBSERVATION, ACTION, 6, (8, 7))
    first, second, last = encoder._of_state._layers
    found = encoder.embed_state(s)
    torch.testing.assert_close(found, avg_l1_norm(linear(last, elu(linear(second, elu(linear(first, s)))))))
    first, second, last = encoder._of_pair._layers
    expected = linear(last, elu(linear(second, elu(linear(first, cat((found, a)))))))
    torch.testing.assert_close(encoder((s, a))[0], expected)
    actor = SaleActorNetwork((OBSERVATION, TensorSpec((6, ))), ACTION, 9, (8, 7))
    [state_layer], [first, second] = actor._encoding_net._preprocessors[0]._layers, actor._encoding_net._layers
    x = relu(linear(second, relu(linear(first, cat((avg_l1_norm(linear(state_layer, s)), z))))))
    [last] = actor._action_layers[0]._layers
    torch.testing.assert_close(actor((s, z))[0], 1 + 2 * torch.tanh(linear(last, x)))  # bounds -1 and 3
    critic = SaleCriticNetwork(((OBSERVATION, ACTION), (TensorSpec((6, )), TensorSpec((6, )))), TensorSpec(()), 9,
                               (8, 7))
    [pair_layer], [first, second, last, _] = critic._observation_encoder._layers, critic._joint_encoder._layers
    x = elu(linear(second, elu(linear(first, cat((avg_l1_norm(linear(pair_layer, cat((s, a)))), z, p))))))
    torch.testing.assert_close(critic(((s, a), (z, p)))[0], linear(last, x)[:, 0])


def test_losses_match_a_slow_loop(monkeypatch):
    rl = make(target_noise=0.2, noise_clip=0.1)
    inputs, rollout_info = batch()
    noise = torch.randn(5, 2)
    monkeypatch.setattr(td3_algorithm, 'gaussian_like', lambda x, stddev, clip: (noise * stddev).clamp(-clip, clip))
    info = info_of(rl, inputs, rollout_info)
    extra = rl.calc_loss(info).extra
    fixed, fixed_target = rl.critics.encoder, rl.target_critics.encoder
    for b in range(5):
        s, later, a = inputs.observation[:1, b], inputs.observation[1:, b], rollout_info.action[:1, b]
        z, later_z = fixed.embed_state(s), fixed_target.embed_state(later)
        action = rl._target_actor_network((later, later_z))[0] + 2 * (0.2 * noise[b]).clamp(-0.1, 0.1)
        action = action.clamp(-1, 3)
        values = rl.target_critics.critic(((later, action), (later_z, fixed_target.embed_pair(later_z, action))))[0]
        target = inputs.reward[1, b] + 0.99 * inputs.discount[1, b] * values.min()
        critic = encoder = 0.0
        if inputs.step_type[0, b] != LAST:
            for q in rl.critics.critic(((s, a), (z, fixed.embed_pair(z, a))))[0][0]:
                error = abs(q - target).item()
                critic += 0.5 * error**2 if error < 1 else error - 0.5
            p = rl._encoder.embed_pair(rl._encoder.embed_state(s), a)
            encoder = ((p - rl._encoder.embed_state(later))**2).mean().item()
        assert extra.critic[0, b].item() == pytest.approx(critic, abs=1e-5)
        assert extra.encoder[0, b].item() == pytest.approx(encoder, abs=1e-5)
        actions = rl.actor((s, z))[0].detach().requires_grad_()
        value = rl.critics.critic(((s, actions), (z, fixed.embed_pair(z, actions))))[0].mean()
        gradient, = torch.autograd.grad(value, actions)
        assert info.actor_loss[0, b].item() == pytest.approx(-(gradient * actions).sum().item(), abs=1e-5)
    assert not extra.critic[1].any() and not extra.encoder[1].any() and not info.actor_loss[1].any()


READS = {'encoder': {'prediction', 'next z'}, 'fixed encoder': {'values', 'policy'}, 'critics': {'values', 'policy'},
         'fixed target encoder': {'target'}, 'target critics': {'target'}, 'actor': {'policy'},
         'target actor': {'target'}}


@pytest.mark.parametrize('changed', list(READS))
def test_each_term_reads_its_own_copy_of_the_networks(changed):
    rl = make()
    modules = {'encoder': rl._encoder, 'fixed encoder': rl.critics.encoder, 'critics': rl.critics.critic,
               'fixed target encoder': rl.target_critics.encoder, 'target critics': rl.target_critics.critic,
               'actor': rl.actor, 'target actor': rl._target_actor_network}

    def terms():
        info = info_of(rl, *batch())
        (values, prediction), (target, next_z) = info.critic
        return {'values': values, 'prediction': prediction, 'target': target, 'next z': next_z,
                'policy': info.action_distribution}, info.actor_loss

    before, loss_before = terms()
    with torch.no_grad():
        for parameter in modules[changed].parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    after, loss_after = terms()
    differing = {name for name in before if not torch.equal(before[name], after[name])}
    assert differing == READS[changed] - ({'policy'} if changed == 'critics' else set())
    assert torch.equal(loss_before, loss_after) == ('policy' not in READS[changed])


def test_the_encoder_learns_from_its_own_loss_only():
    rl = make()
    info = info_of(rl, *batch())
    loss = rl.calc_loss(info)
    groups = {'encoder': rl._encoder, 'critic': rl.critics.critic, 'actor': rl.actor}
    for name, term in loss.extra._asdict().items():
        for owner, module in groups.items():
            gradients = torch.autograd.grad(term.sum(), list(module.parameters()), retain_graph=True,
                                            allow_unused=True)
            assert [g is not None for g in gradients] == [owner == name] * len(gradients)
    torch.testing.assert_close(loss.loss, sum(loss.extra))
    assert not any(p.requires_grad for x in (rl.critics.encoder, rl.target_critics) for p in x.parameters())
    assert not info.critic.target_q_values[1].requires_grad


def copied(module):
    return [p.detach().clone() for p in module.parameters()]


def equal(a, b):
    return all(map(torch.equal, a, b))


def test_everything_is_copied_at_every_third_update():
    agent, _ = make_agent(updates=1, target_update_period=3)
    rl = agent.policy
    fixed, fixed_target = rl.critics.encoder, rl.target_critics.encoder
    assert equal(copied(rl._encoder), copied(fixed)) and equal(copied(fixed), copied(fixed_target))
    agent.unroll(4)
    for update in range(1, 8):
        before = [copied(x) for x in (fixed, fixed_target, rl.target_critics.critic, rl._target_actor_network)]
        agent.train_from_replay_buffer()
        now = [copied(x) for x in (fixed, fixed_target, rl.target_critics.critic, rl._target_actor_network)]
        if update % 3:
            assert all(map(equal, before, now))
        else:
            sources = copied(rl._encoder), before[0], copied(rl.critics.critic), copied(rl.actor)
            assert all(map(equal, now, sources))
            assert not equal(now[0], before[0])


def test_values_are_clipped_to_the_targets_seen_up_to_the_latest_copy():
    agent, _ = make_agent(updates=1, target_update_period=3)
    rl, targets, expected = agent.policy, [], (0.0, 0.0)  # targets are rewards until the first copy
    record = rl._record_targets
    agent.unroll(8)
    with mock.patch.object(rl, '_record_targets', lambda x, valid: (targets.extend(x[valid].tolist()),
                                                                    record(x, valid))):
        for update in range(1, 8):
            values = torch.tensor([-1e6, 1e6])
            low, high = rl._regularized_target(values, (), None).tolist()
            agent.train_from_replay_buffer()
            assert (low, high) == expected and (low < high) == (update > 3)
            if update % 3 == 0:
                expected = min(targets), max(targets)


def test_targets_of_last_steps_and_infinite_ones_do_not_count():
    rl = make()
    rl._record_targets(torch.tensor([[1.0, -50.0, 2.0, torch.inf, torch.nan]]),
                       torch.tensor([[True, False, True, True, True]]))
    assert rl._seen_targets.tolist() == [1.0, 2.0]
    rl._record_targets(torch.tensor([[9.0]]), torch.tensor([[False]]))
    assert rl._seen_targets.tolist() == [1.0, 2.0]


def test_values_are_clipped_to_the_targets_of_all_ranks(monkeypatch):
    agent, _ = make_agent(updates=1, target_update_period=3)
    rl = agent.policy
    agent.unroll(4)
    monkeypatch.setattr(context, 'cat_over_ranks', lambda own: torch.cat((own, torch.tensor([[-1e3, 0.0]]))))
    for _ in range(3):
        agent.train_from_replay_buffer()
    low, high = rl._seen_targets.tolist()
    assert rl._target_range.tolist() == [-1e3, max(high, 0.0)] and low > -1e3
    monkeypatch.setattr(context, 'cat_over_ranks', lambda own: torch.cat((own, torch.tensor([[0.0, 1e3]]))))
    for _ in range(3):
        agent.train_from_replay_buffer()
    assert rl._target_range.tolist() == [min(rl._seen_targets[0].item(), 0.0), 1e3]


def test_priorities_are_those_worked_out_by_hand():
    errors, valid = torch.tensor([[0.5, 3.0, 7.0]]), torch.tensor([[True, True, False]])
    assert lap_priority(errors, valid).tolist() == [1.0, 3.0, 0.0]
    # two steps: the mean of 4 and 2; the mean of the only valid one
    errors, valid = torch.tensor([[4.0, 5.0], [2.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    assert lap_priority(errors, valid).tolist() == [3.0, 5.0]


def test_the_priority_is_the_largest_error_of_the_critics():
    rl = make()
    inputs, rollout_info = batch()
    info = info_of(rl, inputs, rollout_info)
    (q_values, _), (target, _) = info.critic
    found = rl.calc_loss(info).priority.tolist()
    for b in range(5):
        goal = inputs.reward[1, b] + 0.99 * inputs.discount[1, b] * target[1, b]
        error = max(abs(q - goal).item() for q in q_values[0, b])
        assert found[b] == pytest.approx(0.0 if inputs.step_type[0, b] == LAST else max(error, 1.0), abs=1e-5)
    assert make(calculate_priority=False).calc_loss(info).priority == ()


def test_sampling_by_priority_is_a_loss_on_uniform_samples():
    """The expected gradient of the Huber loss is that of e^2/2 up to 1 and |e|^1.4/1.4 beyond, over a constant
    (Fujimoto et al. 2020, section 5)."""
    errors = torch.tensor([-6.0, -1.5, -0.4, 0.2, 0.9, 1.0, 4.0], requires_grad=True)
    priority = lap_priority(errors.detach().abs()[None], torch.ones(1, 7, dtype=torch.bool))**0.4
    sampled = (priority / priority.sum() * element_wise_huber_loss(errors, torch.zeros(7))).sum()
    magnitude = errors.abs()
    uniform = torch.where(magnitude <= 1, magnitude**2 / 2, magnitude**1.4 / 1.4).mean()
    constant = magnitude.detach().clamp(min=1.0).pow(0.4).mean()
    found, expected = (torch.autograd.grad(x, errors)[0] for x in (sampled, uniform / constant))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('environment', ['continuous', 'nested action'])
@pytest.mark.parametrize('arguments', [{}, dict(mini_batch_length=4), dict(train_actor_on_last_step=True)])
def test_replayed_updates_match_eager_ones_bit_for_bit(environment, arguments, warm_up, caplog):
    agents = []
    for count in (1, 10**9):
        warm_up(count)
        agents.append(make_agent(environment, target_update_period=3, **arguments)[0])
        train(agents[-1:], 8)  # two updates each
    assert agents[0].capabilities.traceable_update and agents[0].capabilities.traceable_prediction
    assert num_graphs(agents[0]) == 2 and not num_graphs(agents[1])  # with and without policy
    assert not warnings_in(caplog)
    assert_same_parameters(agents, atol=0.0, rtol=0.0)
    assert all(map(torch.equal, agents[0].buffers(), agents[1].buffers()))


@pytest.mark.compiles
@pytest.mark.slow
def test_compiled_updates_match_eager_ones():
    agents = [make_agent(compile=compile, policy_update_period=1)[0] for compile in (False, True)]  # a single graph
    train(agents, 3)
    assert backends_of(agents[1])[1].num_graphs == 1
    assert_same_parameters(agents)


def test_a_loaded_algorithm_continues_with_the_same_updates():
    first, _ = make_agent(updates=1, target_update_period=3)
    train([first], 4)
    second, _ = make_agent(updates=1, target_update_period=3, seed=5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    inputs, rollout_info = batch()
    inputs = inputs._replace(observation=inputs.observation[..., :1])
    infos = []
    for agent in (first, second):
        rl = agent.policy
        torch.manual_seed(2)
        infos.append(rl.calc_loss(info_of(rl, inputs, rollout_info._replace(action=torch.rand(2, 5, 1)))))
        for _ in range(2):
            rl.after_update(inputs, ())
    torch.testing.assert_close(*infos, atol=0, rtol=0)
    states = [{name: x for name, x in agent.policy.state_dict().items() if isinstance(x, torch.Tensor)}
              for agent in (first, second)]
    assert {'_seen_targets', '_target_range', '_num_updates'} < set(states[0])
    torch.testing.assert_close(*states, atol=0, rtol=0)


def test_the_played_policy_is_the_eager_one(warm_up):
    warm_up(1)
    agent, _ = make_agent(exploration_noise=0.0)
    rl, step = agent.policy, TimeStep(step_type=torch.ones(4, dtype=torch.int32), reward=torch.zeros(4),
                                      discount=torch.ones(4), observation=torch.randn(4, 1))
    for _ in range(3):
        with torch.no_grad():
            found = rl.rollout_step(step, rl.get_initial_rollout_state(4)).output
            expected = rl.actor((step.observation, rl.critics.encoder.embed_state(step.observation)))[0]
        torch.testing.assert_close(found, expected, atol=0, rtol=0)
        torch.testing.assert_close(rl.predict_step(step, ()).output, expected)
        agent.train_iter()


def test_separate_optimizers_own_the_three_parts():
    optimizers = {name: Adam(lr=1e-3) for name in ('actor', 'critic', 'encoder')}
    rl = make_agent(**{f'{name}_optimizer': x for name, x in optimizers.items()})[0].policy
    for name, module in {'actor': rl.actor, 'critic': rl.critics.critic, 'encoder': rl._encoder}.items():
        owned = {id(p) for g in optimizers[name].param_groups for p in g['params']}
        assert owned == {id(p) for p in module.parameters()}


@pytest.mark.parametrize('change, error, message', [
    (dict(reward_spec=TensorSpec((2, ))), ConfError, 'Td7Algorithm.reward_spec.*rank 0, found 2 rewards'),
    (dict(actor_network_ctor=lambda input_tensor_spec, action_spec: ActorRNNNetwork(
        input_tensor_spec[1], action_spec, lstm_hidden_size=4)), ConfError, 'recurrent'),
    (dict(target_update_period=0), ConfError, 'Td7Algorithm.target_update_period'),
    (dict(target_update_tau=0.5), TypeError, 'target_update_tau'),
    (dict(critic_batches='joint'), TypeError, 'critic_batches')])
def test_unsupported_arguments_are_rejected_by_name(change, error, message):
    with pytest.raises(error, match=message):
        make(**change)


def test_discrete_actions_are_rejected():
    with pytest.raises(SpecError, match='continuous|discrete'):
        Td7Algorithm(OBSERVATION, BoundedTensorSpec((), torch.int64, 0, 2), config=None, **SMALL)


@pytest.mark.parametrize('spec', [TensorSpec((3, 8, 8)), {'camera': TensorSpec((3, 8, 8)), 'joints': OBSERVATION}])
def test_images_are_rejected_with_advice(spec):
    with pytest.raises(SpecError, match='SaleEncoder: expected vectors, found an image; .*@EncodingAlgorithm'):
        Td7Algorithm(spec, ACTION, config=None, **SMALL)


def test_structures_of_observations_are_concatenated():
    spec = {'a': TensorSpec((3, )), 'b': TensorSpec((2, ))}
    rl = Td7Algorithm(spec, ACTION, config=None, **SMALL)
    observation = nest.map_structure(lambda x: torch.randn(4, *x.shape), spec)
    assert rl._best_action(observation).shape == (4, 2)


@pytest.mark.parametrize('shape', [(), (2, 2)])
def test_actions_of_any_shape_are_embedded(shape):
    rl = Td7Algorithm(OBSERVATION, BoundedTensorSpec(shape, torch.float32, -1, 1), config=None, **SMALL)
    step = TimeStep(observation=torch.randn(4, 3))
    assert rl.predict_step(step, rl.get_initial_predict_state(4)).output.shape == (4, *shape)
    encoder = SaleEncoder(OBSERVATION, BoundedTensorSpec(shape, torch.float32, -1, 1), 6, (8, ))
    assert encoder((torch.randn(4, 3), torch.randn(4, *shape)))[0].shape == (4, 6)
