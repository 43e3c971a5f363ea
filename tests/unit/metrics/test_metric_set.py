"""Metrics updated with several unrolls at once equal metrics updated with each unroll."""
import copy

import torch

from alfx import nest
from alfx.environments.suite_unittest import PolicyUnittestEnv
from alfx.metrics.metric_set import MetricSet
from alfx.metrics.metrics import (AverageEpisodeLengthMetric, AverageReturnMetric, EnvironmentSteps, NumberOfEpisodes,
                                  update_metrics)


def make_metrics(env):
    example = env.current_time_step()
    return [EnvironmentSteps(), NumberOfEpisodes(), AverageReturnMetric(example_time_step=example, buffer_size=50),
            AverageEpisodeLengthMetric(example_time_step=example, buffer_size=50)]


def unrolls(count, length=3):
    env = PolicyUnittestEnv(4, 5)
    env.seed(0)
    time_step = env.reset()
    torch.manual_seed(0)
    for _ in range(count):
        steps = []
        for _ in range(length):
            steps.append(time_step)
            time_step = env.step(torch.randint(2, (4, )))
        yield env, nest.stack(steps)


def test_deferred_metrics_match_immediate_ones():
    deferred = immediate = None
    for env, steps in unrolls(40):
        if deferred is None:
            deferred, immediate = MetricSet(make_metrics(env)), make_metrics(env)
        deferred.observe(steps)
        update_metrics(immediate, steps)
        assert [m.result() for m in deferred.counters] == [m.result() for m in immediate[:2]]
    assert [m.result() for m in deferred.catch_up()] == [m.result() for m in immediate]
    assert immediate[2].result() > 0 and immediate[3].result() == 4


def test_a_saved_state_has_seen_everything():
    metrics = None
    for env, steps in unrolls(3):
        metrics = metrics or MetricSet(make_metrics(env))
        metrics.observe(steps)
    saved = copy.deepcopy(metrics.state_dict())
    other = MetricSet(make_metrics(env))
    other.observe(steps)
    other.load_state_dict(saved)
    assert [m.result() for m in other.catch_up()] == [m.result() for m in metrics.catch_up()]


def test_a_single_step_counts_as_well():
    for env, steps in unrolls(1, length=5):
        metrics = MetricSet(make_metrics(env))
        for t in range(5):
            metrics.observe_step(nest.map_structure(lambda x, t=t: x[t], steps))
        assert [int(m.result()) for m in metrics.counters] == [16, 4]
        assert metrics.catch_up()[3].result() == 4
