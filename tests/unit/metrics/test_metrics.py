"""Tests of the metrics against a slow loop, hand-computed constants, and each other."""

import copy

import numpy as np
import pytest
import torch
from helpers.call_counts import calls_within

from alfx import context, nest
from alfx.data_structures import TimeStep
from alfx.metrics.metrics import (AverageDiscountedReturnMetric, AverageEnvInfoMetric, AverageEpisodeLengthMetric,
                                  AverageReturnMetric, AverageRewardMetric, EnvironmentSteps,
                                  EpisodicStartAverageDiscountedReturnMetric, MetricBuffer, NumberOfEpisodes,
                                  averaged_infos, update_metrics)

FIRST, MID, LAST = 0, 1, 2
GAMMA = 0.9


def make_steps(step_type, reward, env_info=()) -> TimeStep:
    """Return a stacked time step from ``[T][B]`` lists."""
    step_type = torch.as_tensor(step_type, dtype=torch.int32)
    reward = torch.as_tensor(reward, dtype=torch.float32)
    return TimeStep(step_type=step_type, reward=reward, discount=torch.ones(step_type.shape),
                    observation=torch.zeros(*step_type.shape, 2), prev_action=torch.zeros(step_type.shape),
                    env_id=torch.arange(step_type.shape[1]).expand(step_type.shape), env_info=env_info)


def random_steps(num_steps: int, batch_size: int, end_probability: float, seed: int, reward_dims=()) -> TimeStep:
    """Random episodes; environments end on their own; the reward at FIRST must be ignored."""
    rng = np.random.default_rng(seed)
    step_type = np.zeros((num_steps, batch_size), dtype=np.int32)
    for b in range(batch_size):
        previous = LAST if b % 2 else MID
        for t in range(num_steps):
            step_type[t, b] = FIRST if previous == LAST else LAST if rng.random() < end_probability else MID
            previous = step_type[t, b]
    reward = rng.normal(size=(num_steps, batch_size, *reward_dims))
    info = {'speed': rng.normal(size=(num_steps, batch_size)), 'energy@step': rng.normal(size=(num_steps, batch_size)),
            'height@max': rng.normal(size=(num_steps, batch_size, 2)),
            'height@min': rng.integers(0, 100, size=(num_steps, batch_size))}
    return make_steps(step_type, reward, {k: torch.as_tensor(v) for k, v in info.items()})


def part(steps: TimeStep, index) -> TimeStep:
    return nest.map_structure(lambda x: x[index], steps)


def all_metrics(steps: TimeStep, buffer_size: int = 10) -> list:
    example = part(steps, 0)
    return [
        EnvironmentSteps(), NumberOfEpisodes(), AverageReturnMetric(example, buffer_size=buffer_size),
        AverageDiscountedReturnMetric(example, discount=GAMMA, buffer_size=buffer_size),
        EpisodicStartAverageDiscountedReturnMetric(example, discount=GAMMA, buffer_size=buffer_size),
        AverageRewardMetric(example, buffer_size=buffer_size),
        AverageEpisodeLengthMetric(example, buffer_size=buffer_size),
        AverageEnvInfoMetric(example, buffer_size=buffer_size)
    ]


def slow_episodes(steps: TimeStep) -> tuple[int, list[dict]]:
    """Compute the number of transitions, and the episodes in the order of their ends, step by step."""
    running = [dict(reward=[], info=[]) for _ in range(steps.step_type.shape[1])]
    count, episodes = 0, []
    for t in range(steps.step_type.shape[0]):
        for b, episode in enumerate(running):
            if steps.step_type[t, b] == FIRST:
                episode.update(reward=[], info=[])
                continue
            count += 1
            episode['reward'].append(steps.reward[t, b].double().numpy())
            episode['info'].append({k: v[t, b].double().numpy() for k, v in steps.env_info.items()})
            if steps.step_type[t, b] == LAST:
                episodes.append(summarize_episode(episode))
    return count, episodes


def summarize_episode(episode: dict) -> dict:
    rewards = episode['reward']
    returns = [sum(GAMMA**(i - t) * rewards[i] for i in range(t, len(rewards))) for t in range(len(rewards))]
    values = {key: [info[key] for info in episode['info']] for key in episode['info'][0]}
    return dict(AverageReturn=sum(rewards), AverageDiscountedReturn=sum(returns) / len(returns),
                EpisodicStartAverageDiscountedReturn=returns[0], AverageReward=sum(rewards) / len(rewards),
                AverageEpisodeLength=len(rewards),
                AverageEnvInfoMetric={'speed': sum(values['speed']), 'energy@step': np.mean(values['energy@step'], 0),
                                      'height@max': np.max(values['height@max'], 0),
                                      'height@min': np.min(values['height@min'], 0)})


@pytest.mark.parametrize('reward_dims', [(), (3, )])
@pytest.mark.parametrize('end_probability', [0.0, 0.1, 0.6])
@pytest.mark.parametrize('chunk', [1, 4, 33])
def test_metrics_agree_with_a_slow_loop_for_any_split_of_the_sequence(reward_dims, end_probability, chunk):
    steps = random_steps(33, 5, end_probability, seed=3, reward_dims=reward_dims)
    metrics = all_metrics(steps, buffer_size=7)
    for t in range(0, 33, chunk):
        update_metrics(metrics, part(steps, slice(t, t + chunk)))
    count, episodes = slow_episodes(steps)
    assert int(metrics[0].result()) == count
    assert int(metrics[1].result()) == len(episodes)
    assert bool(episodes) == (end_probability > 0)
    for metric in metrics[2:]:
        assert metric.has_result() == bool(episodes)
        if not episodes:
            continue
        expected = [nest.map_structure(np.asarray, e[metric.name]) for e in episodes[-7:]]
        for result, latest, *values in zip(nest.flatten(metric.result()), nest.flatten(metric.latest()),
                                           *map(nest.flatten, expected)):
            np.testing.assert_allclose(result.numpy(), np.mean(values, 0), rtol=2e-5, atol=1e-5)
            np.testing.assert_allclose(latest.numpy(), values[-1], rtol=2e-5, atol=1e-5)


def test_single_steps_give_the_same_as_a_sequence():
    steps = random_steps(20, 4, 0.2, seed=0)
    one_by_one, at_once = all_metrics(steps), all_metrics(steps)
    for t in range(20):
        for metric in one_by_one:
            metric(part(steps, t))
    for metric in at_once:
        metric.call_sequence(steps)
    for a, b in zip(one_by_one, at_once):
        for x, y in zip(nest.flatten(a.result()), nest.flatten(b.result())):
            torch.testing.assert_close(x, y)


def test_metrics_of_two_environments_by_hand():
    # env 0: rewards 1, 2 and it ends; then FIRST (its reward 100 is not counted) and 4.
    # env 1: FIRST, rewards 3, 5, 7 and it ends.
    steps = make_steps([[MID, FIRST], [LAST, MID], [FIRST, MID], [MID, LAST]], [[1, 50], [2, 3], [100, 5], [4, 7]])
    metrics = {m.name: m for m in all_metrics(steps)[:-1]}
    update_metrics(metrics.values(), steps)
    assert int(metrics['EnvironmentSteps'].result()) == 6
    assert int(metrics['NumberOfEpisodes'].result()) == 2
    assert float(metrics['AverageReturn'].result()) == (3 + 15) / 2
    assert float(metrics['AverageEpisodeLength'].result()) == 2.5
    assert float(metrics['AverageReward'].result()) == (1.5 + 5) / 2
    # 1 + .9*2 = 2.8 and 3 + .9*5 + .81*7 = 13.17
    assert float(metrics['EpisodicStartAverageDiscountedReturn'].result()) == pytest.approx((2.8 + 13.17) / 2)
    # (2.8 + 2) / 2 = 2.4 and (13.17 + 11.3 + 7) / 3 = 10.49
    assert float(metrics['AverageDiscountedReturn'].result()) == pytest.approx((2.4 + 10.49) / 2)


def test_a_discount_of_one_makes_the_start_return_the_return():
    steps = random_steps(40, 3, 0.2, seed=5)
    example = part(steps, 0)
    plain = AverageReturnMetric(example)
    discounted = EpisodicStartAverageDiscountedReturnMetric(example, discount=1.0)
    update_metrics([plain, discounted], steps)
    torch.testing.assert_close(plain.result(), discounted.result())


def test_state_survives_saving_in_the_middle_of_an_episode():
    steps = random_steps(40, 4, 0.2, seed=1)
    uninterrupted, first_half, second_half = (torch.nn.ModuleList(all_metrics(steps)) for _ in range(3))
    update_metrics(uninterrupted, steps)
    update_metrics(first_half, part(steps, slice(0, 17)))
    second_half.load_state_dict(copy.deepcopy(first_half.state_dict()))
    update_metrics(first_half, part(steps, slice(17, 40)))  # must not reach what was loaded
    update_metrics(second_half, part(steps, slice(17, 40)))
    for a, b in zip(uninterrupted, second_half):
        for x, y in zip(nest.flatten(a.result()), nest.flatten(b.result())):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


def test_a_saved_state_does_not_change_with_the_metric():
    steps = random_steps(10, 4, 0.2, seed=1)
    metric = EnvironmentSteps()
    saved = metric.state_dict()
    metric.call_sequence(steps)
    assert int(saved['count']) == 0


def test_a_missing_entry_in_a_saved_state_is_an_error_that_names_it():
    metrics = torch.nn.ModuleList(all_metrics(random_steps(4, 2, 0.2, seed=1)))
    state = metrics.state_dict()
    del state['2.accumulated0']
    with pytest.raises(RuntimeError, match='2.accumulated0'):
        metrics.load_state_dict(state)


def test_loading_for_other_environment_counts_keeps_and_adds_episodes():
    steps = random_steps(40, 4, 0.2, seed=1)
    many = AverageReturnMetric(part(steps, 0))
    many.call_sequence(steps)
    one = AverageReturnMetric(nest.map_structure(lambda x: x[0, :1], steps))
    one.load_state_dict(many.state_dict())
    assert torch.equal(one.result(), many.result())
    one.buffers_of_episodes[0].clear()
    one.call_sequence(make_steps([[MID], [LAST]], [[1], [2]]))
    assert float(one.result()) == 3


def test_reset_forgets_everything():
    steps = random_steps(40, 4, 0.2, seed=1)
    metrics = all_metrics(steps)
    update_metrics(metrics, steps)
    for metric in metrics:
        metric.reset()
        assert all(float(x.abs().sum()) == 0 for x in nest.flatten(metric.result()))
    update_metrics(metrics, make_steps([[MID] * 4, [LAST] * 4], [[1] * 4, [2] * 4], part(steps, slice(0, 2)).env_info))
    assert float(metrics[2].result()) == 3


def test_time_steps_are_not_changed():
    steps = random_steps(12, 3, 0.3, seed=2)
    before = copy.deepcopy(steps)
    update_metrics(all_metrics(steps), steps)
    for x, y in zip(nest.flatten(before), nest.flatten(steps)):
        assert torch.equal(x, y)


def test_buffer_is_a_ring():
    buffer = MetricBuffer(max_len=3, dtype=torch.float32)
    assert float(buffer.mean()) == 0 and float(buffer.latest()) == 0 and float(buffer.std()) == 0
    for value in (1., 2., 3., 4.):
        buffer.append(value)
    assert len(buffer) == 3
    assert (float(buffer.mean()), float(buffer.std()), float(buffer.latest())) == (3., 1., 4.)
    buffer.extend(np.arange(10.))
    assert float(buffer.mean()) == 8 and float(buffer.latest()) == 9
    buffer.clear()
    assert len(buffer) == 0


def test_env_info_fields_can_be_chosen_with_known_aggregations_only():
    steps = random_steps(30, 2, 0.3, seed=4)
    metric = AverageEnvInfoMetric(part(steps, 0), fields=['speed'])
    metric.call_sequence(steps)
    assert list(metric.result()) == ['speed']
    bad = part(steps, 0)._replace(env_info={'speed@median': torch.zeros(2)})
    with pytest.raises(ValueError, match='@median'):
        AverageEnvInfoMetric(bad)


def test_the_state_of_a_game_is_averaged_only_if_it_is_named():
    steps = random_steps(30, 2, 0.3, seed=4)
    steps = steps._replace(env_info={**steps.env_info, 'lives': torch.full((30, 2), 3.0)})
    assert 'lives' not in AverageEnvInfoMetric(part(steps, 0)).result()
    metric = AverageEnvInfoMetric(part(steps, 0), fields=['lives'])
    metric.call_sequence(steps)
    assert list(metric.result()) == ['lives']
    assert averaged_infos({'lives': 3, 'frame_number': 4, 'success': 1}) == {'success': 1} and averaged_infos(()) == ()


def test_another_batch_size_is_rejected_by_name():
    metric = AverageReturnMetric(part(random_steps(4, 2, 0.3, seed=4), 0))
    with pytest.raises(ValueError, match='AverageReturn: expected 2 environments, found 3'):
        metric(part(random_steps(4, 3, 0.3, seed=4), 0))


class RecordingWriter:
    """A writer that stores the scalars written to it."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step, walltime=None):
        self.scalars[tag] = (value, step)


def test_summaries_are_written_against_the_counter_and_the_step_metrics():
    steps = make_steps([[MID], [LAST]], [[1], [2]])
    metrics = [EnvironmentSteps(), NumberOfEpisodes(), AverageReturnMetric(part(steps, 0))]
    writer = RecordingWriter()
    try:
        context.set_summary_writer(writer)
        context.set_global_counter(7)
        with context.record_if(True):
            for metric in metrics:
                metric.gen_summaries(step_metrics=metrics[:2])
            assert 'Metrics/AverageReturn' not in writer.scalars  # no episode has ended yet
            update_metrics(metrics, steps)
            for metric in metrics:
                metric.gen_summaries(step_metrics=metrics[:2])
    finally:
        context.reset()
    assert writer.scalars['Metrics/AverageReturn'] == (3, 7)
    assert writer.scalars['Metrics_vs_EnvironmentSteps/AverageReturn'] == (3, 2)
    assert writer.scalars['Metrics_vs_NumberOfEpisodes/AverageReturn'] == (3, 1)
    assert 'Metrics_vs_EnvironmentSteps/EnvironmentSteps' not in writer.scalars


@pytest.mark.parametrize('num_steps, batch_size', [(8, 8), (32, 8), (128, 8), (32, 64)])
def test_an_unroll_costs_the_same_few_calls_however_long_and_wide_it_is(num_steps, batch_size):
    steps = random_steps(num_steps, batch_size, 0.1, seed=0)._replace(env_info=())
    metrics = all_metrics(steps)[:-1]
    update_metrics(metrics, steps)
    assert calls_within(update_metrics, metrics, steps) < 300  # about 0.08 ms on an idle core
