"""Exploration bonuses with a memory of the episode, against slow loops over steps in float64."""
from functools import partial

import pytest
import torch
from helpers.intrinsic_reward_contract import ACTION, random_steps, rewarded

from alfx import context, nest
from alfx.algorithms.exploration.bonus import ExplorationBonus
from alfx.algorithms.exploration.factors import (Disagreement, EllipticalNovelty, EpisodicCount, Impact,
                                                 LifelongNovelty, NearestNeighbors, NoveltyGain, ParticleEntropy)
from alfx.algorithms.exploration.memory import EpisodicMemory, ObservationHash, places_of
from alfx.algorithms.exploration.normalization import Moments, RewardNormalization
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.gin_utils import ConfError
from alfx.layers import Cast
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils.running_stats import count_and_moments

CELLS = BoundedTensorSpec((2, ), torch.int64, 0, 1)  # of which an episode visits some several times
LENGTH, BATCH = 80, 3


def steps(observation_spec=CELLS, seed=0, length=LENGTH, batch=BATCH):
    """Return time steps of episodes of about 20 steps; some have one step, and one column begins within an episode."""
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.where(torch.rand(length, batch, generator=generator) < 0.05, 0, 1)
    step_type[0] = torch.tensor([0, 0, 1])
    step_type[31:33, 1] = 0
    step_type[-1, 0] = 0
    step_type[:-1][step_type[1:] == 0] += step_type[:-1][step_type[1:] == 0]  # LAST before FIRST
    return random_steps(length, batch, observation_spec=observation_spec, seed=seed, step_type=step_type)


def episodes(inputs):
    """Yield ``(t, b, indices of the earlier steps of the episode)`` for all steps."""
    for b in range(inputs.step_type.shape[1]):
        earlier: list[int] = []
        for t in range(len(inputs.step_type)):
            if inputs.step_type[t, b] == 0:
                earlier = []
            yield t, b, list(earlier)
            earlier.append(t)


def network(size=4):
    return torch.nn.Sequential(Cast(), torch.nn.Linear(2, size), torch.nn.Tanh())


def bonus(*factors, observation_spec=CELLS, **arguments):
    """Return a bonus with the models that its factors need."""
    torch.manual_seed(0)
    needs = {getattr(factor, 'func', factor).needs for factor in factors}
    if Disagreement in factors:
        arguments['inverse_model'] = partial(ICMAlgorithm, hidden_size=4, encoding_net=network(), num_forward_models=3,
                                             reward_adapt_speed=None, observation_adapt_speed=None)
    elif 'feature' in needs:
        arguments.setdefault('random_network', network())
    if 'error' in needs:
        arguments.setdefault('error_model', partial(RNDAlgorithm, network(), network(), keep_stacked_frames=0))
    return ExplorationBonus(observation_spec, ACTION, factors, **arguments)


def features(module, inputs):
    with torch.no_grad():
        return module._random_network(inputs.observation.flatten(0, 1))[0].reshape(LENGTH, BATCH, -1).double()


def errors(module, inputs):
    with torch.no_grad():
        return module._error_model.novelty(inputs.observation.flatten(0, 1)).reshape(LENGTH, BATCH).double()


CUTS = {'one step': [1] * LENGTH, 'sevens': [7] * 11 + [3], 'ends': [31, 1, 1, 40, 6, 1]}
BONUSES = {'episodic count': (EpisodicCount, ), 'root of count': (partial(EpisodicCount, decay='inverse_sqrt'), ),
           'forgetful count': (partial(EpisodicCount, capacity=5), ),
           'e3b': (EllipticalNovelty, ), 'noveld': (NoveltyGain, EpisodicCount),
           'ride': (Impact, partial(EpisodicCount, decay='inverse_sqrt')),
           'disagreement': (Disagreement, ),
           'neighbors': (partial(NearestNeighbors, kind='log', num_neighbors=3), ),
           'forgetful neighbors': (partial(NearestNeighbors, kind='log', num_neighbors=3, capacity=5), )}


@pytest.mark.parametrize('split', CUTS)
@pytest.mark.parametrize('name', BONUSES)
def test_any_cut_into_unrolls_gives_the_same_rewards(name, split):
    module, inputs = bonus(*BONUSES[name]), steps()
    torch.testing.assert_close(rewarded(module, inputs, CUTS[split]), rewarded(module, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', BONUSES)
def test_environments_and_episodes_do_not_affect_each_other(name):
    module, inputs = bonus(*BONUSES[name]), steps()
    expected, order = rewarded(module, inputs), [2, 0, 1]
    permuted = rewarded(module, nest.map_structure(lambda x: x[:, order], inputs))
    torch.testing.assert_close(permuted, expected[:, order], rtol=1e-5, atol=1e-6)
    start = int((inputs.step_type[1:, 1] == 0).nonzero()[0]) + 1
    single = rewarded(module, nest.map_structure(lambda x: x[start:, 1:2], inputs))
    torch.testing.assert_close(single[:, 0], expected[start:, 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', BONUSES)
def test_a_step_without_a_previous_one_has_no_reward(name):
    reward, inputs = rewarded(bonus(*BONUSES[name]), steps()), steps()
    assert (reward[inputs.step_type == 0] == 0).all() and reward[0, 2] == 0
    assert (reward[1:, 2] != 0).any()


@pytest.mark.parametrize(('decay', 'capacity'), [('first', 1000), ('inverse_sqrt', 1000), ('first', 5),
                                                 ('inverse_sqrt', 1)])
def test_episodic_counts_match_a_loop(decay, capacity):
    inputs = steps()
    found = rewarded(bonus(partial(EpisodicCount, decay=decay, capacity=capacity)), inputs)
    for t, b, earlier in episodes(inputs):
        same = [s for s in earlier[-capacity:] if torch.equal(inputs.observation[s, b], inputs.observation[t, b])]
        expected = (1.0 if not same else 0.0) if decay == 'first' else (len(same) + 1)**-0.5
        assert found[t, b].item() == pytest.approx(expected if earlier else 0.0)


def test_floating_point_numbers_are_counted_to_a_resolution():
    """0.499 and 0.501 round to the same multiple of 0.1, and 0.56 to another."""
    inputs = random_steps(4, 1, observation_spec=TensorSpec((1, )), step_type=[[0], [1], [1], [1]])
    inputs = inputs._replace(observation=torch.tensor([0.0, 0.499, 0.501, 0.56]).reshape(4, 1, 1))
    module = bonus(partial(EpisodicCount, resolution=0.1), observation_spec=TensorSpec((1, )))
    assert rewarded(module, inputs).flatten().tolist() == [0, 1, 0, 1]


def test_a_part_of_the_observation_can_be_counted():
    spec = {'position': CELLS, 'noise': TensorSpec((3, ))}
    inputs = steps(spec)
    found = rewarded(bonus(partial(EpisodicCount, field='position'), observation_spec=spec), inputs)
    expected = rewarded(bonus(EpisodicCount), inputs._replace(observation=inputs.observation['position']))
    assert torch.equal(found, expected) and 0 < found.mean() < 1


def test_hashes_count_as_exactly_as_a_dict():
    spec = BoundedTensorSpec((49, ), torch.uint8, 0, 2)
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, 3, (49, ), generator=generator, dtype=torch.uint8)
    observation = base.repeat(100_000, 1)  # which differ in few places
    rows = torch.arange(100_000)
    for _ in range(4):
        observation[rows, torch.randint(0, 49, (100_000, ), generator=generator)] = torch.randint(
            0, 3, (100_000, ), generator=generator, dtype=torch.uint8)
    hashes = ObservationHash(spec, None, 'test')(observation.unsqueeze(0))[0]
    distinct = len({row.tobytes() for row in observation.numpy()})
    assert 50_000 < distinct < 100_000 and len(hashes.unique()) == distinct


def test_a_memory_returns_the_latest_steps_of_the_episode_only():
    inputs, memory = steps(), EpisodicMemory(6, TensorSpec((), torch.int64))
    number = torch.arange(LENGTH * BATCH).reshape(LENGTH, BATCH)
    state, length, found = torch.zeros(BATCH, 6, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64), {}
    for start in range(0, LENGTH, 5):
        rows = slice(start, start + 5)
        index = places_of(inputs.step_type[rows], length)
        others, valid = memory.earlier(number[rows], state, index)
        for t in range(5):
            for b in range(BATCH):
                found[start + t, b] = others[b][valid[b, t]].sort().values.tolist()
        state, length = memory.add(number[rows], state, index), index.next_length
    for t, b, earlier in episodes(inputs):
        assert found[t, b] == [int(number[s, b]) for s in earlier[-6:]]


def test_elliptical_novelty_matches_a_loop_over_linear_systems():
    module, inputs = bonus(EllipticalNovelty), steps()
    phi, found = features(module, inputs), rewarded(module, inputs)
    for t, b, earlier in episodes(inputs):
        matrix = 0.1 * torch.eye(4, dtype=torch.float64)
        for s in earlier:
            matrix += torch.outer(phi[s, b], phi[s, b])
        expected = phi[t, b] @ torch.linalg.solve(matrix, phi[t, b]) if earlier else 0.0
        assert found[t, b].item() == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


def test_elliptical_novelty_adds_up_to_the_growth_of_the_matrix():
    """The sum of log(1 + b) over an episode is log(det C / det C before it)."""
    module = bonus(EllipticalNovelty)
    inputs = steps()._replace(step_type=torch.ones(LENGTH, BATCH, dtype=torch.int32))
    phi = features(module, inputs)[:, 0]
    matrix = 0.1 * torch.eye(4, dtype=torch.float64)
    start = matrix + torch.outer(phi[0], phi[0])
    expected = torch.logdet(matrix + phi.T @ phi) - torch.logdet(start)
    found = torch.log1p(rewarded(module, inputs)[:, 0].double()).sum()
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


def test_elliptical_novelty_of_one_hot_features_counts_visits():
    """The novelty is the inverse of the number of earlier visits, if there are any and the regularization is small."""
    cells = torch.tensor([0, 1, 0, 0, 1, 0])
    inputs = random_steps(6, 1, observation_spec=TensorSpec((2, )), step_type=[[0], [1], [1], [1], [1], [1]])
    inputs = inputs._replace(observation=torch.nn.functional.one_hot(cells, 2).float().unsqueeze(1))
    module = bonus(partial(EllipticalNovelty, regularization=1e-6), observation_spec=TensorSpec((2, )),
                   random_network=torch.nn.Identity())
    found = rewarded(module, inputs).flatten()
    torch.testing.assert_close(found[2:], torch.tensor([1, 1 / 2, 1, 1 / 3]), rtol=1e-4, atol=1e-4)
    assert found[1] > 1e5


@pytest.mark.parametrize('capacity', [1000, 4])
@pytest.mark.parametrize('num_neighbors', [1, 3])
def test_nearest_neighbors_match_a_search_of_all_pairs(num_neighbors, capacity):
    module = bonus(partial(NearestNeighbors, kind='log', num_neighbors=num_neighbors, capacity=capacity))
    inputs = steps()
    phi, found = features(module, inputs), rewarded(module, inputs)
    for t, b, earlier in episodes(inputs):
        nearest = sorted(float((phi[t, b] - phi[s, b]).norm()) for s in earlier[-capacity:])[:num_neighbors]
        expected = torch.tensor(nearest).mean().log1p().item() if nearest else 0.0
        assert found[t, b].item() == pytest.approx(expected, rel=1e-4, abs=1e-3)


def test_the_kernel_of_never_give_up_at_its_limits():
    """Distances 3, 0, 0, ..., 0 with one neighbor: m is the mean of their squares so far.

    Call 1: d^2 = 9, m = 9: K = eps / (1 - 0.008 + eps), s = 0.001 + sqrt(K).
    Call 2: d^2 = 0: K = 1, s = 1.001. With ten equal neighbors: s = 0.001 + sqrt(10); above 8 the reward is 0.
    """
    factor = NearestNeighbors(None, 1, num_neighbors=1, epsilon=1e-3)
    module = bonus(partial(NearestNeighbors, num_neighbors=1), observation_spec=TensorSpec((1, )),
                   random_network=torch.nn.Identity())

    def found(*numbers):
        inputs = random_steps(len(numbers), 1, observation_spec=TensorSpec((1, )),
                              step_type=[[0]] + [[1]] * (len(numbers) - 1))
        inputs = inputs._replace(observation=torch.tensor(numbers).reshape(-1, 1, 1))
        return rewarded(module, inputs, [1] * len(numbers)).flatten().tolist()

    assert factor.state_spec == TensorSpec((1000, 1))
    expected = 1 / (0.001 + (1e-3 / (1 - 0.008 + 1e-3))**0.5)
    assert found(0.0, 3.0, 3.0) == pytest.approx([0, expected, 1 / 1.001], rel=1e-4)
    # the mean of d^2 is now (9 + 0 + 9 + 0.01) / 4; 0.01 / 4.5 is within the cluster, below 0.008
    assert found(0.0, 3.0, 3.1)[2] == pytest.approx(1 / 1.001, rel=1e-4)
    module = bonus(partial(NearestNeighbors, num_neighbors=100), observation_spec=TensorSpec((1, )),
                   random_network=torch.nn.Identity())
    rewards = found(*[1.0] * 90)  # s = 0.001 + sqrt(n) with n earlier steps
    assert rewards[9] == pytest.approx(1 / 3.001, rel=1e-4) and rewards[63] == pytest.approx(1 / (63**0.5 + 0.001))
    assert rewards[64:] == [0] * 26


def test_novelty_is_gained_at_the_frontier_of_a_chain():
    """Errors 1, 1, 4, 4, 1 along a chain and back: gains 1 - 1/2, 4 - 1/2, 4 - 2, max(1 - 2, 0)."""
    module, inputs = bonus(NoveltyGain), random_steps(5, 1, observation_spec=CELLS, step_type=[[0], [1], [1], [1], [1]])
    module._error_model.novelty = lambda observation, update: torch.tensor([1.0, 1, 4, 4, 1])
    assert rewarded(module, inputs).flatten().tolist() == [0, 0.5, 3.5, 2, 0]


def test_gain_impact_and_counts_match_loops():
    inputs = steps()
    module = bonus(NoveltyGain, Impact, EpisodicCount)
    phi, error, found = features(module, inputs), errors(module, inputs), rewarded(module, inputs)
    for t, b, earlier in episodes(inputs):
        if not earlier:
            continue
        is_new = not any(torch.equal(inputs.observation[s, b], inputs.observation[t, b]) for s in earlier)
        gain = max(float(error[t, b] - 0.5 * error[t - 1, b]), 0.0)
        expected = gain * float((phi[t, b] - phi[t - 1, b]).norm()) * is_new
        assert found[t, b].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_disagreement_is_the_variance_of_models_and_their_loss_a_mean():
    module, inputs = bonus(Disagreement), steps()
    model, found = module._inverse_model, rewarded(module, inputs)
    phi = model.features(inputs.observation.flatten(0, 1)).detach().reshape(LENGTH, BATCH, -1)
    for t, b, earlier in episodes(inputs):
        if not earlier or t % 9:
            continue
        action = model._action_encoder(inputs.prev_action[t, b:b + 1])
        with torch.no_grad():
            predictions = model._forward_net([phi[t - 1, b:b + 1], action])[0][0]
        assert predictions.shape == (3, 4)
        mean = sum(predictions) / 3
        expected = sum((p - mean).square() for p in predictions) / 3
        assert found[t, b].item() == pytest.approx(expected.mean().item(), rel=1e-4)
        errors_ = [0.5 * (p - phi[t, b]).square().sum().item() for p in predictions]
        loss = model._forward_loss(phi[t - 1, b:b + 1], action, phi[t, b:b + 1])
        assert loss.item() == pytest.approx(sum(errors_) / 3, rel=1e-4)


def test_lifelong_novelty_modulates_by_standardized_squared_errors():
    inputs = steps()
    module = bonus(partial(LifelongNovelty, maximum=1.5))
    module._block = LENGTH
    error, found = errors(module, inputs).square(), rewarded(module, inputs)
    chosen = found > 0
    score = 1 + (error - error[chosen].mean()) / error[chosen].std(correction=0)
    torch.testing.assert_close(found[chosen], score.clamp(1, 1.5)[chosen].float(), rtol=1e-4, atol=1e-5)
    assert found.max() == 1.5 and (found[chosen] == 1).any()


# Rewards of sampled steps ----------------------------------------------------------------------------------------

SAMPLED = {'noveld': (NoveltyGain, EpisodicCount), 'ride': (partial(EpisodicCount, decay='inverse_sqrt'), Impact),
           'ngu': (partial(NearestNeighbors, kind='log'), LifelongNovelty), 'disagreement': (Disagreement, ),
           'all': (Impact, EpisodicCount, NoveltyGain)}


def frozen(monkeypatch):
    monkeypatch.setattr(Moments, 'update', lambda self, x, momentum=None: None)


def batch_rewards(module, inputs, stored):
    """Return the rewards ``[T, B]`` of ``reward_batch``."""
    inputs = nest.map_structure(lambda x: x.transpose(0, 1), inputs)
    return module.reward_batch(None, inputs, stored.T).output.T


@pytest.mark.parametrize('rule', ['none', 'std', 'standard', 'return_std'])
@pytest.mark.parametrize('name', SAMPLED)
def test_sampled_rewards_are_the_collected_ones_if_networks_are_frozen(name, rule, monkeypatch):
    frozen(monkeypatch)
    inputs, arguments = steps(), dict(normalization=rule, clip_value=3.0)
    collected = rewarded(bonus(*SAMPLED[name], **arguments), inputs)
    module = bonus(*SAMPLED[name], rewards='sampled', **arguments)
    stored = rewarded(module, inputs)
    for start in (0, 17, 40):
        rows = slice(start, start + 6)
        found = batch_rewards(module, nest.map_structure(lambda x, rows=rows: x[rows], inputs), stored[rows])
        torch.testing.assert_close(found[1:], collected[rows][1:], rtol=1e-5, atol=1e-6)
        assert (found[0] == 0).all() and (found[1:] != 0).any()


def test_sampled_rewards_follow_the_networks_and_stored_ones_do_not():
    module, inputs = bonus(NoveltyGain, EpisodicCount, rewards='sampled'), steps()
    stored = rewarded(module, inputs)
    counts = rewarded(bonus(EpisodicCount), inputs)
    assert torch.equal(stored, counts)
    before = batch_rewards(module, inputs, stored)
    with torch.no_grad():
        for p in module._error_model._predictor_net.parameters():
            p.mul_(2)
    after = batch_rewards(module, inputs, stored)
    error = errors(module, inputs)
    assert not torch.allclose(before, after)
    gain = (error[1:] - 0.5 * error[:-1]).clamp(min=0).float()
    torch.testing.assert_close(after[1:], gain * counts[1:], rtol=1e-4, atol=1e-5)


def test_rewarding_a_batch_does_not_change_the_statistics():
    module, inputs = bonus(LifelongNovelty, rewards='sampled', normalization='std',
                           error_model=partial(RNDAlgorithm, network(), network(), keep_stacked_frames=0,
                                               observation_adapt_speed=8.0)), steps()
    stored = rewarded(module, inputs)
    before, moments = [x.clone() for x in module.buffers()], module._normalization._moments.row.clone()
    batch_rewards(module, inputs, stored)
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers()))
    rewarded(module, inputs)
    assert not torch.equal(module._normalization._moments.row, moments)


@pytest.mark.parametrize('num_neighbors', [1, 12])
def test_particle_entropy_matches_a_search_of_all_pairs_of_the_batch(num_neighbors):
    module = bonus(partial(ParticleEntropy, num_neighbors=num_neighbors), rewards='sampled')
    inputs = steps()
    phi, stored = features(module, inputs), rewarded(module, inputs)
    found = batch_rewards(module, inputs, stored)
    particles = [(t, b) for t, b, earlier in episodes(inputs) if earlier]
    assert sorted(map(tuple, stored.nonzero().tolist())) == sorted(particles)
    for t, b in particles[::7]:
        nearest = sorted(float((phi[t, b] - phi[s, c]).norm()) for s, c in particles if (s, c) != (t, b))
        expected = torch.tensor(nearest[:num_neighbors]).mean().log1p().item()
        assert found[t, b].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert (found[stored == 0] == 0).all()


def test_particle_entropy_of_three_points_by_hand():
    """Arrivals at 0, 1 and 3 with one neighbor: distances 1, 1 and 2; the start of the sequences does not count."""
    inputs = random_steps(2, 3, observation_spec=TensorSpec((1, )), step_type=[[1] * 3] * 2)
    inputs = inputs._replace(observation=torch.tensor([[9.0, 9, 9], [0, 1, 3]]).unsqueeze(-1))
    module = bonus(partial(ParticleEntropy, num_neighbors=1), rewards='sampled', observation_spec=TensorSpec((1, )),
                   random_network=torch.nn.Identity())
    found = batch_rewards(module, inputs, torch.ones(2, 3))
    torch.testing.assert_close(found, torch.tensor([[0.0, 0, 0], [1, 1, 2]]).log1p())
    with pytest.raises(ConfError, match='3 neighbors of a step do not exist in a batch of 3 steps'):
        batch_rewards(bonus(partial(ParticleEntropy, num_neighbors=3), rewards='sampled',
                            observation_spec=TensorSpec((1, )), random_network=torch.nn.Identity()),
                      inputs, torch.ones(2, 3))


# Normalization ---------------------------------------------------------------------------------------------------

def stream(sizes, rule, **arguments):
    """Return rewards, normalized rewards and mask of a stream that is normalized in parts."""
    generator = torch.Generator().manual_seed(0)
    is_rewarded = torch.rand(LENGTH, BATCH, generator=generator) < 0.8
    reward = torch.rand(LENGTH, BATCH, generator=generator) * is_rewarded
    module = RewardNormalization(rule, 0.9, arguments.get('clip_value', -1.0), 'test')
    state, found = torch.zeros(BATCH) if rule == 'return_std' else (), []
    for rows, mask in zip(reward.split(sizes), is_rewarded.split(sizes)):
        value, state = module(rows, mask, state)
        found.append(value)
    return reward, torch.cat(found), is_rewarded, module._moments


@pytest.mark.parametrize('sizes', [[LENGTH], *CUTS.values()])
def test_statistics_of_rewards_are_those_of_the_whole_stream(sizes):
    reward, _, is_rewarded, moments = stream(sizes, 'std')
    chosen = reward[is_rewarded].double().numpy()
    assert moments.row.tolist() == pytest.approx([len(chosen), chosen.mean(), chosen.var()])
    reward, found, is_rewarded, moments = stream(sizes, 'return_std')
    total, sums = torch.zeros(BATCH, dtype=torch.float64), []
    for row in reward.double():
        total = 0.9 * total + row
        sums.append(total)
    sums = torch.stack(sums)
    assert moments.row.tolist() == pytest.approx(
        [sums.numel(), float(sums.mean()), float(sums.var(correction=0))], rel=1e-5)
    assert torch.equal(found[-1], reward[-1] / moments.std)


def test_each_rule_of_normalization():
    reward, found, is_rewarded, _ = stream([LENGTH], 'none')
    assert torch.equal(found, reward)
    chosen = reward[is_rewarded]
    found = stream([LENGTH], 'std')[1]
    torch.testing.assert_close(found[is_rewarded], chosen / chosen.std(correction=0))
    found = stream([LENGTH], 'min_max')[1][is_rewarded]
    torch.testing.assert_close(found, (chosen - chosen.min()) / (chosen.max() - chosen.min()))
    mean, variance = 0.1 * chosen.mean(), 0.9 + 0.1 * chosen.var(correction=0)
    found = stream([LENGTH], 'standard')[1]
    torch.testing.assert_close(found[is_rewarded], (chosen - mean) / variance.sqrt())
    assert (found[~is_rewarded] == 0).all()
    assert stream([LENGTH], 'std', clip_value=2.0)[1].max() == 2
    assert stream([LENGTH], 'standard', clip_value=0.5)[1].max() == 0.5


@pytest.mark.parametrize('rule', ['std', 'standard', 'return_std', 'min_max'])
def test_equal_rewards_or_none_are_normalized_to_finite_numbers(rule):
    module, state = RewardNormalization(rule, 0.9, -1.0, 'test'), torch.zeros(2) if rule == 'return_std' else ()
    no_rewards = torch.zeros(3, 2)
    found, state = module(no_rewards, no_rewards.bool(), state)
    assert torch.equal(found, no_rewards)
    found, _ = module(torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bool), state)
    assert found.isfinite().all() and found.abs().max() < 10


def test_observations_of_one_number_are_counted():
    """Numbers 5, 5, 6, 5 in one episode."""
    spec = BoundedTensorSpec((), torch.int64, 0, 9)
    inputs = random_steps(4, 1, observation_spec=spec, step_type=[[0], [1], [1], [1]])
    inputs = inputs._replace(observation=torch.tensor([5, 5, 6, 5]).reshape(4, 1))
    assert rewarded(bonus(EpisodicCount, observation_spec=spec), inputs).flatten().tolist() == [0, 0, 1, 0]


def test_statistics_are_those_of_all_ranks(monkeypatch):
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0, 6.0])
    row = count_and_moments(second, TensorSpec(())).unsqueeze(0)
    monkeypatch.setattr(context, 'cat_over_ranks', lambda own: torch.cat((own, row)))
    moments = Moments()
    moments.update(first)
    both = torch.cat((first, second)).double()
    assert moments.row.tolist() == pytest.approx([5, both.mean().item(), both.var(correction=0).item()])
    monkeypatch.setattr(context, 'cat_over_ranks', lambda own: torch.cat((own, 2 * own)))
    rewards, everywhere = torch.tensor([[0.0, 0.5], [1.0, 1.5]]), torch.ones(2, 2, dtype=torch.bool)
    found, _ = RewardNormalization('min_max', 0.9, -1.0, 'test')(rewards, everywhere, ())
    assert torch.equal(found, rewards / 3)


def test_the_kernel_does_not_depend_on_the_scale_of_the_features():
    numbers = torch.tensor([0.0, 3.0, 3.1, 1.0, 2.0, 0.5]).reshape(-1, 1, 1)
    inputs = random_steps(6, 1, observation_spec=TensorSpec((1, )), step_type=[[0]] + [[1]] * 5)
    found = [rewarded(bonus(NearestNeighbors, observation_spec=TensorSpec((1, )), random_network=torch.nn.Identity()),
                      inputs._replace(observation=scale * numbers)) for scale in (1.0, 1e-3)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
