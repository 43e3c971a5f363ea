"""Updates of supervised runs are replayed and compiled like others, and several ranks match one process."""
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import warm_starts

from alfx.engine.plan import TracedPlan
from helpers.plans import warnings_in
from helpers.supervised_ranks import KINDS, OWN_UPDATES, make, parameters, trained

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize('kind', KINDS)
def test_a_replayed_epoch_matches_an_eager_one_bit_for_bit(kind, warm_up, caplog):
    found = []
    for count in (10**9, 1):
        warm_up(count)
        algorithm = make(kind)
        for _ in range(4):
            algorithm.train_iter()
        found.append(parameters(algorithm))
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())
    plan = algorithm.updater.plan(algorithm._batch_losses)
    assert isinstance(plan, TracedPlan) and plan.replayed.num_graphs == 2, 'whole batches and the last one'
    assert not warnings_in(caplog)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['functions'])
def test_a_compiled_epoch_matches_an_eager_one_up_to_rounding(kind, replayed_at_once, caplog):
    found = []
    for compiles in (False, True):
        algorithm = make(kind)
        algorithm.updater.compiles = compiles
        for _ in range(3):
            algorithm.train_iter()
        found.append(parameters(algorithm))
    for name, x in found[0].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-3, atol=1e-5)
    assert algorithm.updater.plan(algorithm._batch_losses).compiled.num_graphs == 2
    assert not warnings_in(caplog)


@pytest.mark.parametrize('kind', OWN_UPDATES)
def test_algorithms_with_custom_updates_train_eagerly(kind):
    algorithm = make(kind)
    assert not algorithm.capabilities.traceable_update
    before = parameters(algorithm)
    assert algorithm.train_iter() == 3
    assert any(not torch.equal(x, before[name]) for name, x in parameters(algorithm).items())


def test_another_number_of_networks_in_an_epoch_is_another_update(replayed_at_once, caplog):
    algorithm = make('hypernetwork')
    for number in (None, 3, None, 3):
        algorithm.train_iter(number)
    assert algorithm.updater.plan(algorithm._batch_losses).replayed.num_graphs == 4
    assert not warnings_in(caplog)


# Ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_with_half_batches_match_one_process(tmp_path):
    """Batches of 20 and of 7 samples. Both use the same random numbers for the trace of a critic's Jacobian."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    processes = [warm_starts.Popen(
        [sys.executable, str(ROOT / 'tests/helpers/supervised_ranks.py'),
         str(tmp_path / 'out')], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'RANK': str(rank), 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1',
             'MASTER_PORT': str(port)}) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), '\n'.join(outputs)
    first, second = (torch.load(tmp_path / f'out.{rank}') for rank in range(2))
    for kind in {**KINDS, **OWN_UPDATES}:
        single = trained(kind)
        for name, x in single.items():
            assert torch.equal(first[kind][name], second[kind][name]), (kind, name)
            torch.testing.assert_close(first[kind][name], x, rtol=1e-4, atol=1e-5,
                                       msg=lambda m, k=kind, n=name: f'{k}, {n}: {m}')
