"""Intrinsic rewards and their losses against slow loops, hand-computed constants and identities."""
import math
from collections import Counter

import pytest
import torch
from helpers.intrinsic_reward_contract import (ACTION, OBSERVATION, random_steps, reward_steps, step_of, total_loss,
                                       train_step_by_step, zero_state)
from torch import nn

from alfx import nest
from alfx.algorithms.count_bonus_algorithm import CountBonusAlgorithm
from alfx.algorithms.icm_algorithm import ICMAlgorithm, ICMState
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.data_structures import StepType
from alfx.nest.utils import NestConcat
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.math_ops import identity

MIXED_ACTION = {
    'several': BoundedTensorSpec((2, ), torch.int64, [1, -1], [2, 2]),  # 2 and 4 values
    'one': BoundedTensorSpec((), torch.int32, 3, 5),
    'force': BoundedTensorSpec((2, ), torch.float32, -1, 1),
}


def linear(weight):
    """Return a linear layer without bias."""
    layer = nn.Linear(len(weight[0]), len(weight), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
    return layer


class SlowStatistics:
    """Mean and variance of batches. Batch n, counted from 0, has the weight speed / (n + speed)."""

    def __init__(self, speed):
        self.speed, self.batches = speed, 0
        self.first, self.second = 0.0, 0.0  # moments

    def update(self, values):
        if not values:
            return
        weight = self.speed / (self.batches + self.speed)
        self.batches += 1
        self.first += weight * (sum(values) / len(values) - self.first)
        self.second += weight * (sum(v * v for v in values) / len(values) - self.second)

    def normalize(self, value, zero_mean=True):
        variance = self.second - self.first**2
        return (value - self.first * zero_mean) / math.sqrt(variance + 1e-10)


# Random network distillation ---------------------------------------------------------------------------------------


def rnd(**arguments):
    torch.manual_seed(0)
    return RNDAlgorithm(nn.Linear(3, 4), nn.Linear(3, 4), observation_spec=OBSERVATION,
                        **{'keep_stacked_frames': 0, **arguments})


def slow_error(module, observation):
    target, predictor = ({name: p.tolist() for name, p in net._module.named_parameters()}
                         for net in (module._target_net, module._predictor_net))
    error = 0.0
    for i in range(4):
        difference = predictor['bias'][i] - target['bias'][i]
        for j in range(3):
            difference += (predictor['weight'][i][j] - target['weight'][i][j]) * float(observation[j])
        error += difference**2
    return error


def test_rnd_of_linear_networks_by_hand():
    module = RNDAlgorithm(linear([[1.0, 0.0], [0.0, 2.0]]), linear([[0.0, 0.0], [1.0, 1.0]]), keep_stacked_frames=0,
                          observation_spec=TensorSpec((2, )))
    steps = random_steps(2, observation_spec=TensorSpec((2, )), step_type=[1, 2])
    steps = steps._replace(observation=torch.tensor([[3.0, 1.0], [0.0, 1.0]]))
    # (0 - 3)^2 + (4 - 2)^2 = 13 and (0 - 0)^2 + (1 - 2)^2 = 1
    assert module.rollout_step(steps).output.tolist() == [13.0, 1.0]
    assert module.train_step(steps).info.loss.tolist() == [13.0, 1.0]


def test_rnd_of_equal_networks_is_zero():
    layer = nn.Linear(3, 4)
    module = RNDAlgorithm(layer, layer, observation_spec=OBSERVATION, keep_stacked_frames=0)
    assert module.rollout_step(random_steps(5)).output.tolist() == [0] * 5


def test_rnd_is_the_squared_distance_of_the_outputs():
    module, steps = rnd(), random_steps(4, 3)
    reward = reward_steps(module, steps)
    loss = module.train_sequence(steps).info.loss.detach()
    for t in range(4):
        for b in range(3):
            expected = slow_error(module, steps.observation[t, b])
            assert float(loss[t, b]) == pytest.approx(expected, rel=1e-5)
            is_first = steps.step_type[t, b] == StepType.FIRST
            assert float(reward[t, b]) == pytest.approx(0.0 if is_first else expected, rel=1e-5)


@pytest.mark.parametrize('zero_mean', [True, False])
def test_rnd_normalizes_by_statistics_of_past_observations_and_rewards(zero_mean):
    module = rnd(reward_adapt_speed=4.0, observation_adapt_speed=2.0, reward_zero_mean=zero_mean,
                 observation_clip_value=1.5, clip_value=1.2)
    steps = random_steps(6, 3, seed=4)
    found = reward_steps(module, steps)
    seen, rewards = [SlowStatistics(2.0) for _ in range(3)], SlowStatistics(4.0)
    for t in range(6):
        for i in range(3):
            seen[i].update(steps.observation[t, :, i].tolist())
        errors = [slow_error(module, [min(max(seen[i].normalize(float(steps.observation[t, b, i])), -1.5), 1.5)
                                      for i in range(3)]) for b in range(3)]
        is_valid = [steps.step_type[t, b] != StepType.FIRST for b in range(3)]
        rewards.update([error for error, counts in zip(errors, is_valid) if counts])
        for b in range(3):
            expected = min(max(rewards.normalize(errors[b], zero_mean), -1.2), 1.2) if is_valid[b] else 0.0
            assert float(found[t, b]) == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_rnd_of_an_unroll_has_the_statistics_of_the_whole_unroll():
    module = rnd(reward_adapt_speed=4.0, observation_adapt_speed=2.0, observation_clip_value=1.5)
    steps = random_steps(6, 3, seed=4)
    step = module.reward_unroll(steps)
    seen, rewards = [SlowStatistics(2.0) for _ in range(3)], SlowStatistics(4.0)
    for i in range(3):
        seen[i].update(steps.observation[1:, :, i].flatten().tolist())
    errors = [[slow_error(module, [min(max(seen[i].normalize(float(steps.observation[t, b, i])), -1.5), 1.5)
                                   for i in range(3)]) for b in range(3)] for t in range(6)]
    is_valid = [[t > 0 and steps.step_type[t, b] != StepType.FIRST for b in range(3)] for t in range(6)]
    rewards.update([errors[t][b] for t in range(6) for b in range(3) if is_valid[t][b]])
    for t in range(6):
        for b in range(3):
            expected = rewards.normalize(errors[t][b]) if is_valid[t][b] else 0.0
            assert float(step.output[t, b]) == pytest.approx(expected, rel=1e-3, abs=1e-3)
    loss = module.train_sequence(steps, (), step.info).info.loss  # loss of arriving at the next step
    torch.testing.assert_close(loss[:-1], torch.tensor(errors)[1:], rtol=1e-4, atol=1e-5)


def test_rnd_trains_on_the_same_losses_with_immediate_or_late_rewards():
    module, steps = rnd(observation_adapt_speed=2.0), random_steps(5, 4)
    info = module.reward_unroll(steps).info
    at_once = module.calc_loss(module.train_sequence(steps, (), info).info)
    torch.testing.assert_close(at_once.loss[:-1], module.train_sequence(steps).info.loss[1:])
    torch.testing.assert_close(module.train_step(step_of(steps, 2), (), step_of(info, 2)).info.loss, at_once.loss[2])
    torch.testing.assert_close(train_step_by_step(module, steps, ()).loss, module.train_sequence(steps).info.loss)
    assert at_once.scalar_loss == ()  # no step that is arrived at is omitted


@pytest.mark.parametrize('is_on_policy', [True, False])
def test_last_steps_are_trained_on_like_any_other(is_on_policy):
    module, steps = rnd(), random_steps(5, 4)
    module.set_on_policy(is_on_policy)
    assert (steps.step_type == StepType.LAST).any()
    info = module.train_sequence(steps).info
    loss = info.loss
    if is_on_policy:  # the engine omits the bootstrap step
        counted = module.calc_loss(info)
        mask = (steps.step_type != StepType.LAST).float()
        assert float((counted.loss * mask)[:-1].mean() + counted.scalar_loss) == pytest.approx(float(loss[:-1].mean()))
    else:
        assert float(total_loss(module, info, steps)) == pytest.approx(float(loss.mean()))


def test_no_gradient_reaches_the_target_network():
    module, steps = rnd(), random_steps(5, 4)
    total_loss(module, module.train_sequence(steps).info, steps).backward()
    assert all(p.grad is None for p in module._target_net.parameters())
    assert all(p.grad is not None for p in module._predictor_net.parameters())


# Actions as vectors ------------------------------------------------------------------------------------------------


def slow_encoding(action):
    """Encode an action of ``MIXED_ACTION``, whose leaves are in the order of their names."""
    force = [float(x) for x in action['force']]
    one = [float(action['one'] == v) for v in (3, 4, 5)]
    several = [float(action['several'][0] == v) for v in (1, 2)] + [float(action['several'][1] == v)
                                                                    for v in (-1, 0, 1, 2)]
    return force + one + several


def test_discrete_actions_are_one_hot_and_continuous_ones_unchanged():
    """Encode discrete actions as one-hot vectors, counted from the minimum; keep continuous actions unchanged."""
    encoder = SimpleActionEncoder(MIXED_ACTION)
    action = random_steps(7, 2, action_spec=MIXED_ACTION).prev_action
    encoded = encoder(action)
    assert encoded.shape == (7, 2, 11) and encoder.output_spec == TensorSpec((11, ))
    for t in range(7):
        for b in range(2):
            one = nest.map_structure(lambda x, t=t, b=b: x[t, b], action)
            assert encoded[t, b].tolist() == pytest.approx(slow_encoding(one))


def test_numbers_with_equally_many_values_are_encoded_one_after_the_other():
    encoder = SimpleActionEncoder(BoundedTensorSpec((2, ), torch.int64, 0, 2))
    assert encoder(torch.tensor([[2, 0]])).tolist() == [[0, 0, 1, 1, 0, 0]]
    logits = torch.tensor([[0.0, 0.0, 0.0, 9.0, 0.0, 0.0]])
    encoded = encoder(torch.tensor([[2, 0]]))
    # log 3 for the first number; log(1 + 2 exp(-9)) for the second
    assert float(encoder.prediction_loss(logits, encoded)) == pytest.approx(
        math.log(3) + math.log(1 + 2 * math.exp(-9)), rel=1e-5)
    assert float(encoder.accuracy(torch.tensor([[0.0, 0, 1, 0, 1, 0]]), encoded)) == 0.5


def slow_prediction_loss(prediction, action):
    loss = sum((p - a)**2 for p, a in zip(prediction[:2], action[:2])) / 2
    for start, stop in ((2, 5), (5, 7), (7, 11)):
        total = sum(math.exp(x) for x in prediction[start:stop])
        loss -= sum(a * math.log(math.exp(p) / total) for p, a in zip(prediction[start:stop], action[start:stop]))
    return loss


def test_the_loss_of_a_predicted_action_is_cross_entropy_plus_mean_square():
    encoder = SimpleActionEncoder(MIXED_ACTION)
    encoded = encoder(random_steps(6, action_spec=MIXED_ACTION).prev_action)
    prediction = torch.randn(6, 11)
    found = encoder.prediction_loss(prediction, encoded)
    for b in range(6):
        expected = slow_prediction_loss(prediction[b].tolist(), encoded[b].tolist())
        assert float(found[b]) == pytest.approx(expected, rel=1e-4)


# Intrinsic curiosity -----------------------------------------------------------------------------------------------


def icm(action_spec=ACTION, encoded=True, **arguments):
    torch.manual_seed(0)
    encoder = EncodingNetwork(OBSERVATION, last_layer_size=2, last_activation=torch.tanh) if encoded else None
    options = {'hidden_size': (5, ), 'reward_adapt_speed': None, 'observation_adapt_speed': None, **arguments}
    return ICMAlgorithm(action_spec, OBSERVATION, encoding_net=encoder, **options)


def slow_layers(network, vector):
    """Evaluate fully connected layers with ReLU between them, by loops."""
    layers = [layer for layer in network._chain if hasattr(layer, 'weight')]
    for depth, layer in enumerate(layers):
        vector = [bias + sum(w * x for w, x in zip(weights, vector))
                  for bias, weights in zip(layer.bias.tolist(), layer.weight.tolist())]
        if depth < len(layers) - 1:
            vector = [max(x, 0.0) for x in vector]
    return vector


def slow_icm(module, before, action, after):
    """Compute the forward and the inverse loss of one step."""
    features = []
    for observation in (before, after):
        if module._encoding_net is None:
            features.append(observation)
        else:
            features.append([math.tanh(x) for x in slow_layers(module._encoding_net, observation)])
    predicted = slow_layers(module._forward_net, features[0] + action)
    forward_loss = sum((p - f)**2 for p, f in zip(predicted, features[1])) / 2
    logits = slow_layers(module._inverse_net, features[0] + features[1])
    return forward_loss, logits


@pytest.mark.parametrize('encoded', [True, False])
def test_icm_is_the_forward_error_and_trains_the_inverse_model(encoded):
    module, steps = icm(MIXED_ACTION, encoded), random_steps(5, 3, action_spec=MIXED_ACTION, seed=2)
    actions = module._action_encoder(steps.prev_action)
    reward = reward_steps(module, steps)
    infos = train_step_by_step(module, steps, zero_state(module, 3))
    parts = module.calc_loss(infos).extra
    for b in range(3):
        for t in range(5):
            if t == 0 or steps.step_type[t, b] == StepType.FIRST:
                assert reward[t, b] == parts.forward_loss[t, b] == parts.inverse_loss[t, b] == 0
                continue
            action = actions[t, b].tolist()
            forward_loss, prediction = slow_icm(module, steps.observation[t - 1, b].tolist(), action,
                                                steps.observation[t, b].tolist())
            assert float(reward[t, b]) == pytest.approx(forward_loss, rel=1e-4)
            assert float(parts.forward_loss[t, b]) == pytest.approx(forward_loss, rel=1e-4)
            assert float(parts.inverse_loss[t, b]) == pytest.approx(slow_prediction_loss(prediction, action), rel=1e-4)


def test_icm_of_linear_models_by_hand():
    feature = [TensorSpec((1, )), TensorSpec((1, ))]

    def model(a, b):
        net = EncodingNetwork(feature, preprocessing_combiner=NestConcat(), last_layer_size=1, last_activation=identity)
        with torch.no_grad():
            net._chain[-1].weight.copy_(torch.tensor([[a, b]]))
            net._chain[-1].bias.zero_()
        return net

    action_spec = BoundedTensorSpec((1, ), torch.float32, -1, 1)
    module = ICMAlgorithm(action_spec, TensorSpec((1, )), reward_adapt_speed=None, observation_adapt_speed=None,
                          forward_net=model(1.0, 2.0), inverse_net=model(-1.0, 1.0))
    steps = random_steps(2, 1, observation_spec=TensorSpec((1, )), action_spec=action_spec, step_type=[[0], [1]])
    steps = steps._replace(observation=torch.tensor([[[3.0]], [[4.5]]]), prev_action=torch.tensor([[[0.0]], [[0.5]]]))
    # forward: 3 + 2 * 0.5 = 4, half of (4 - 4.5)^2 is 0.125; inverse: 4.5 - 3 = 1.5, (1.5 - 0.5)^2 = 1
    assert reward_steps(module, steps).tolist() == [[0.0], [0.125]]
    info = module.train_sequence(steps, nest.map_structure(lambda x: x.expand(2, *x.shape), zero_state(module, 1))).info
    parts = module.calc_loss(info).extra
    assert parts.forward_loss.tolist() == [[0.0], [0.125]] and parts.inverse_loss.tolist() == [[0.0], [1.0]]


def test_a_perfect_forward_model_is_not_rewarded():
    module = icm(encoded=False)
    with torch.no_grad():
        for layer in module._forward_net._chain:
            layer.weight.zero_()
            layer.bias.zero_()
    steps = random_steps(4, 3)
    steps = steps._replace(observation=torch.zeros(4, 3, 3))
    assert not reward_steps(module, steps).any()


def test_only_the_inverse_model_trains_the_features():
    module, steps = icm(), random_steps(2, 4, step_type=[[0] * 4, [1] * 4])
    state = nest.map_structure(lambda x: x.expand(2, *x.shape), zero_state(module, 4))
    info = module.train_sequence(steps, state).info
    info.forward_loss[1].sum().backward(retain_graph=True)
    assert all(p.grad is None for p in module._encoding_net.parameters())
    info.inverse_loss[1].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in module._encoding_net.parameters())


@pytest.mark.parametrize('encoded', [True, False])
def test_icm_of_sequences_matches_single_steps_with_their_gradients(encoded):
    module, steps = icm(MIXED_ACTION, encoded), random_steps(6, 4, action_spec=MIXED_ACTION, seed=3)
    feature = torch.rand(4, module.train_state_spec.feature.numel)
    begins = ICMState(feature, torch.tensor([1.0, 0.0, 1.0, 0.0]))
    stored = nest.map_structure(lambda x: torch.cat((x.unsqueeze(0), torch.rand(5, *x.shape))), begins)
    results = []
    for info in (train_step_by_step(module, steps, begins), module.train_sequence(steps, stored).info):
        module.zero_grad()
        total_loss(module, info, steps).backward()
        results.append((module.calc_loss(info).loss, [p.grad.clone() for p in module.parameters()]))
    for a, b in zip(nest.flatten(results[0]), nest.flatten(results[1])):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('encoded', [True, False])
def test_rewarding_an_unroll_at_once_matches_rewarding_its_steps(encoded):
    """Compare rewards and losses of an unroll processed at once with those of its single steps."""
    module, steps = icm(MIXED_ACTION, encoded), random_steps(6, 4, action_spec=MIXED_ACTION, seed=3)
    step = module.reward_unroll(steps)
    torch.testing.assert_close(step.output, reward_steps(module, steps))
    pairs = module.calc_loss(module.train_sequence(steps, (), step.info).info)
    arriving = module.calc_loss(train_step_by_step(module, steps, zero_state(module, 4)))
    torch.testing.assert_close(pairs.loss[:-1], arriving.loss[1:])
    assert not pairs.loss[-1].any() and pairs.scalar_loss == ()
    for a, b in zip(module.train_step(step_of(steps, 2), (), step_of(step.info, 2)).info[:2], module.train_sequence(
            steps, (), step.info).info[:2]):
        torch.testing.assert_close(a, b[2])


def test_icm_normalizes_rewards_by_those_that_were_given():
    module, steps = icm(reward_adapt_speed=3.0), random_steps(6, 3, seed=5)
    found = reward_steps(module, steps)
    plain = reward_steps(icm(), steps)
    rewards = SlowStatistics(3.0)
    for t in range(6):
        is_rewarded = [t > 0 and steps.step_type[t, b] != StepType.FIRST for b in range(3)]
        rewards.update([float(plain[t, b]) for b in range(3) if is_rewarded[b]])
        for b in range(3):
            expected = rewards.normalize(float(plain[t, b])) if is_rewarded[b] else 0.0
            assert float(found[t, b]) == pytest.approx(expected, rel=2e-3, abs=2e-3)


# Count-based bonus -------------------------------------------------------------------------------------------------


def slow_cell(module, observation):
    """Compute the SimHash cell: the signs of the projections are the bits of a number."""
    projection = module._cells.projection
    cell = 0
    for i in range(projection.shape[1]):
        if sum(float(projection[j, i]) * float(observation[j]) for j in range(len(observation))) > 0:
            cell += 2**i
    return cell


def test_the_bonus_falls_with_the_square_root_of_the_number_of_visits():
    module = CountBonusAlgorithm(BoundedTensorSpec((), torch.int64, 0, 9), bonus_coef=0.5, counting='grid')
    steps = random_steps(1, step_type=[1])._replace(observation=torch.tensor([7]))
    found = [float(module.rollout_step(steps).output) for _ in range(4)]
    # 0.5 / sqrt(1, 2, 3, 4)
    assert found == pytest.approx([0.5, 0.353553, 0.288675, 0.25], rel=1e-5)
    assert module.counts[7] == 4 and module.counts.sum() == 4


@pytest.mark.parametrize('at_once', [False, True])
def test_visits_are_counted_by_the_signs_of_random_projections(at_once):
    module, steps = CountBonusAlgorithm(OBSERVATION, num_bits=4, bonus_coef=2.0), random_steps(8, 3)
    found = module.reward_unroll(steps).output if at_once else reward_steps(module, steps)
    visits = Counter()
    for t in range(8):
        cells = [slow_cell(module, steps.observation[t, b]) for b in range(3)]
        if at_once and t == 0:
            continue
        visits.update(cells)
        for b in range(3):
            is_first = steps.step_type[t, b] == StepType.FIRST
            assert float(found[t, b]) == pytest.approx(0.0 if is_first else 2.0 / math.sqrt(visits[cells[b]]))
    assert {cell: n for cell, n in enumerate(module.counts.tolist()) if n} == dict(visits)


def test_simhash_distinguishes_directions_and_not_lengths():
    module = CountBonusAlgorithm(OBSERVATION)
    observation = random_steps(20).observation
    assert torch.equal(module._cells(observation), module._cells(3.0 * observation))
    # The opposite direction has opposite signs: the two numbers sum to 2^16 - 1.
    assert (module._cells(observation) + module._cells(-observation)).tolist() == [2**16 - 1] * 20


def test_environments_arriving_in_a_cell_together_share_its_count():
    module = CountBonusAlgorithm(OBSERVATION)
    steps = random_steps(4, step_type=[1, 1, 1, 1])
    steps = steps._replace(observation=steps.observation[:1].expand(4, 3))
    assert module.rollout_step(steps).output.tolist() == [0.5] * 4  # 1 / sqrt(4)
