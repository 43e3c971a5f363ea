"""Averaging over ranks, which are threads here; whole processes are in tests/contract/test_data_parallel.py."""
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from alfx import context
from alfx.bin.ranks import is_rank
from alfx.data_structures import TimeStep
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.engine.remote.data_parallel import GradientAverager, Ranks, average_gradients
from alfx.gin_utils import ConfError
from alfx.metrics.metrics import AverageReturnMetric, EnvironmentSteps, MetricBuffer
from alfx.norm_layers import BatchNorm
from alfx.optimizers import Adam
from alfx.tensor_specs import TensorSpec
from alfx.trainers.distributed.strategies import (
    Distributed, ParameterMismatchError, check_config, check_data, check_layers)
from alfx.utils import running_stats
from alfx.utils.processes import LostProcessError


class ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank, size, shared):
        super().__init__(rank, size, None, torch.device('cpu'))
        self.shared = shared

    def all_reduce(self, tensor):
        self.shared.values[self.rank] = tensor.clone()
        self.shared.barrier.wait(30)
        total = sum(self.shared.values[r] for r in range(self.size))
        self.shared.barrier.wait(30)
        tensor.copy_(total)


def on_ranks(work, size=2):
    """Run ``work(ranks)`` in one thread per rank; return the results or exceptions."""
    shared = SimpleNamespace(values={}, barrier=threading.Barrier(size))
    results = [None] * size
    ranks = [ThreadRanks(rank, size, shared) for rank in range(size)]

    def run(rank):
        try:
            results[rank] = work(ranks[rank])
        except (RuntimeError, ValueError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank, )) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def parameters():
    return [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(())),
            nn.Parameter(torch.zeros(3, dtype=torch.float64))]


class Work:
    """An exchange that ends after the first wait for it timed out, before it is checked again."""

    def __init__(self, failure=None):
        self.failure, self.waits = failure, 0

    def wait(self, *timeout):
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError('Operation timed out!')
        if self.failure is not None:
            raise self.failure
        return True

    def is_completed(self):
        return True


def test_an_exchange_that_ends_just_after_the_poll_has_succeeded(monkeypatch):
    ranks = ThreadRanks(0, 2, None)
    ranks._exchange(Work)
    monkeypatch.setattr('alfx.engine.remote.data_parallel.GRACE_SECONDS', 0.0)
    with pytest.raises(LostProcessError, match='no longer answers\n.*\n.*Connection closed by peer'):
        ranks._exchange(lambda: Work(RuntimeError('Connection closed by peer')))


def test_gradients_of_any_shape_and_dtype_are_averaged():
    def work(ranks):
        params = parameters()
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 10.0 * i + ranks.rank)
        GradientAverager(ranks, params).average()
        return params

    for params in on_ranks(work, 3):
        for i, p in enumerate(params):
            assert p.grad.dtype == p.dtype and torch.equal(p.grad, torch.full_like(p, 10.0 * i + 1.0))


def test_gradients_unused_on_one_rank_are_zero_and_on_all_none():
    def work(ranks):
        params = parameters()
        params[0].grad = torch.ones_like(params[0])
        if ranks.rank == 1:
            params[1].grad = torch.full_like(params[1], 4.0)
        averager = GradientAverager(ranks, params)
        averager.average()
        first = [None if p.grad is None else p.grad.clone() for p in params]
        for p in params:
            p.grad = torch.ones_like(p)
        averager.average()  # the first time has no effect any more
        return first, [p.grad for p in params]

    for first, second in on_ranks(work):
        assert torch.equal(first[0], torch.ones(2, 3)) and torch.equal(first[1], torch.full((4, ), 2.0))
        assert first[2] is None and first[3] is None
        assert all(torch.equal(grad, torch.ones_like(grad)) for grad in second)


def test_an_algorithm_without_parameters_has_nothing_to_average_or_compare():
    def work(ranks):
        GradientAverager(ranks, []).average()
        together(ranks).check_parameters(SimpleNamespace(compute_paras_statistics=dict), 2)

    assert on_ranks(work) == [None, None]


def test_clipping_by_the_global_norm_sees_the_gradient_of_the_whole_batch():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, generator=generator), torch.randn(8, generator=generator)

    def step(model, part, average=lambda: None):
        optimizer = Adam(model.parameters(), lr=0.1, gradient_clipping=1e-2, clip_by_global_norm=True)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x[part]).squeeze(-1) - y[part]).square().mean().backward()
            average()
            optimizer.step()
        return list(model.parameters())

    def model():
        layer = nn.Linear(3, 1)
        with torch.no_grad():
            layer.weight.fill_(0.5), layer.bias.fill_(0.1)
        return layer

    def work(ranks):
        own = model()
        averager = GradientAverager(ranks, list(own.parameters()))
        return step(own, slice(4 * ranks.rank, 4 * ranks.rank + 4), averager.average)

    expected_params = step(model(), slice(0, 8))
    for params in on_ranks(work):
        for p, expected in zip(params, expected_params):
            torch.testing.assert_close(p, expected, rtol=0, atol=1e-6)


def test_a_loss_that_is_not_finite_in_one_rank_stops_all_before_the_update():
    def work(ranks):
        params = parameters()
        averager = GradientAverager(ranks, params)
        if ranks.rank == 1:
            return averager.report_bad_loss()
        for p in params:
            p.grad = torch.ones_like(p)
        return averager.average()

    first, second = on_ranks(work)
    assert isinstance(first, NonFiniteLossError) and 'rank 1' in str(first) and second is None


def test_a_single_process_averages_nothing():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    average_gradients(Adam([parameter], lr=1.0))
    assert torch.equal(parameter.grad, torch.ones(2))
    x = torch.ones(3)
    assert context.mean_over_ranks(x) is x and context.cat_over_ranks(x) is x and context.num_ranks() == 1


@pytest.mark.parametrize('sizes', [(5, 3), (0, 4), (4, 4)])
def test_moments_cover_all_ranks_as_one_batch(sizes):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(n, 2, generator=generator) + 1e3 for n in sizes]
    spec = TensorSpec((2, ))
    mean, variance = running_stats.batch_moments(torch.cat(parts).double(), spec)
    for found in on_ranks(lambda ranks: running_stats._pooled_moments(parts[ranks.rank], spec, ranks)):
        torch.testing.assert_close(found[0], mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1], variance, rtol=1e-3, atol=0)


def test_moments_of_no_data_are_none():
    assert on_ranks(lambda ranks: running_stats._pooled_moments(torch.zeros(0), TensorSpec(()), ranks)) == [None, None]


def together(ranks, interval=2):
    team = Distributed.__new__(Distributed)
    team._ranks, team._config = ranks, SimpleNamespace(ddp_paras_check_interval=interval)
    return team


def test_the_check_of_parameters_names_the_parameter_and_the_ranks():
    def work(ranks):
        values = {'same': np.ones(4), 'nothing': np.full(4, np.nan), 'other': np.ones(4) + 1e-6 * (ranks.rank == 2)}
        algorithm = SimpleNamespace(compute_paras_statistics=lambda: values)
        together(ranks).check_parameters(algorithm, 3)  # not due
        return together(ranks).check_parameters(algorithm, 4)

    for error in on_ranks(work, 3):
        assert isinstance(error, ParameterMismatchError)
        assert 'parameter other differs between ranks after iteration 4' in str(error) and 'rank 2 of 3' in str(error)


def test_an_uneven_division_names_the_field_and_the_number_of_ranks():
    ranks = ThreadRanks(0, 3, None)
    assert ranks.share('TrainerConfig', 'mini_batch_size', 12) == 4
    with pytest.raises(ConfError, match=r'TrainerConfig.mini_batch_size = 10 cannot be divided among 3 processes'):
        ranks.share('TrainerConfig', 'mini_batch_size', 10)


@pytest.mark.parametrize('setting, name', [(dict(async_unroll=True), 'async_unroll'),
                                           (dict(num_ray_workers=2), 'num_ray_workers')])
def test_features_unsupported_by_several_processes_are_rejected_by_name(setting, name):
    default = dict(async_unroll=False, num_ray_workers=0, ml_type='rl', offline_buffer_dir=None)
    with pytest.raises(ConfError, match=f'TrainerConfig.{name} = .* distributed training'):
        check_config(SimpleNamespace(**default | setting))


def test_data_that_ranks_cannot_divide_is_rejected_by_algorithm_name():
    undivided, divided = SimpleNamespace(), SimpleNamespace(divides_batches=True)
    with pytest.raises(ConfError, match='algorithm_ctor = SimpleNamespace, which does not divide its batches'):
        check_data(SimpleNamespace(ml_type='sl'), undivided)
    check_data(SimpleNamespace(ml_type='sl'), divided)
    check_data(SimpleNamespace(ml_type='rl'), undivided)


def test_rows_are_divided_among_all_and_none_is_left_out():
    rows = torch.arange(7).unsqueeze(1)
    shares = [(ranks.own_rows(rows), ranks.own_rows(rows[:2])) for ranks in (ThreadRanks(r, 3, None) for r in range(3))]
    assert [len(a) for a, _ in shares] == [3, 2, 2] and [len(b) for _, b in shares] == [1, 1, 0]
    assert torch.equal(torch.cat([a for a, _ in shares]), rows) and context.own_rows(rows) is rows


@pytest.mark.parametrize('layer', [nn.BatchNorm1d(3), BatchNorm(3)], ids=['torch', 'alfx'])
def test_batch_norm_is_rejected_by_the_name_of_the_layer(layer):
    with pytest.raises(ConfError, match='found norm'):
        check_layers(nn.ModuleDict({'norm': layer}))


def test_a_process_is_a_rank_only_if_there_are_several(monkeypatch):
    for name, value in {'RANK': '0', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '9'}.items():
        monkeypatch.setenv(name, value)
    for size, expected in (('1', False), ('2', True)):
        monkeypatch.setenv('WORLD_SIZE', size)
        assert is_rank() == expected


# States joined and divided -------------------------------------------------------------------------------------------


def ring(values, size=4):
    buffer = MetricBuffer(size)
    buffer.extend(np.array(values, dtype=float))
    return buffer


def test_rings_of_values_keep_the_newest_of_each_and_divide_without_loss():
    states = [ring([1, 2, 3, 4, 5]).state_dict(), ring([10, 20]).state_dict()]
    joined = MetricBuffer(4)
    joined.take_joined(joined.join_states(states))
    assert sorted(joined.values().tolist()) == [4, 5, 10, 20]
    shares = [joined.split_state(joined.state_dict(), rank, 2) for rank in (0, 1)]
    assert [int(share['count']) for share in shares] == [2, 2]
    rejoined = joined.join_states(shares)
    assert sorted(rejoined['values'].tolist()) == [4, 5, 10, 20]


def test_counters_add_up_and_the_first_rank_gets_all():
    counter = EnvironmentSteps()
    joined = counter.join_states([{'count': torch.tensor(3)}, {'count': torch.tensor(4)}])
    assert joined == {'count': torch.tensor(7)}
    assert [int(counter.split_state(joined, r, 2)['count']) for r in (0, 1)] == [7, 0]


def test_running_episodes_are_joined_in_the_order_of_the_environments():
    example = TimeStep(step_type=torch.zeros(2, dtype=torch.int32), reward=torch.zeros(2), discount=torch.ones(2))
    metric = AverageReturnMetric(example_time_step=example)
    names = list(metric._host_state())
    states = [{name: torch.full((2, ), float(r)) for name in names} for r in range(2)]
    joined = metric.join_states(states)
    assert joined[names[0]].tolist() == [0, 0, 1, 1]
    assert metric.split_state(joined, 1, 2)[names[0]].tolist() == [1, 1]
