"""The benchmark: ratios within rounds, other source trees and cores."""
import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS / 'benchmarks'))


def test_the_ratio_is_the_median_of_the_ratios_within_rounds():
    import benchmark

    # a machine that is twice as fast in the second round: ratios 2, 2 and 3
    rounds = [{'alfx': {'rate': 200.0, 'peak_mib': 10.0}, 'peer': {'rate': 100.0, 'peak_mib': 20.0}},
              {'alfx': {'rate': 400.0, 'peak_mib': 12.0}, 'peer': {'rate': 200.0, 'peak_mib': 30.0}},
              {'alfx': {'rate': 300.0, 'peak_mib': 11.0}, 'peer': {'rate': 100.0, 'peak_mib': 40.0}}]
    rows = benchmark.summarize(rounds, 'alfx')
    assert rows['peer'] == {'rate': 100.0, 'lowest': 100.0, 'highest': 200.0, 'peak_mib': 30.0, 'ratio': 2.0}
    assert rows['alfx']['rate'] == 300.0
    assert '| peer | 100 | 100 to 200 | 2.00 | 30 MiB |' in benchmark.format_table(rows, 'alfx')


def test_another_source_tree_is_compared_peer_by_peer():
    import benchmark

    rounds = [{'alfx': {'rate': 200.0, 'peak_mib': 10.0}, 'eager': {'rate': 100.0, 'peak_mib': 10.0},
               'eager before': {'rate': 80.0, 'peak_mib': 10.0}}]
    rows = benchmark.summarize(rounds, 'alfx')
    assert rows['eager']['ratio'] == 2.0 and rows['eager before']['ratio'] == 1.25  # 100 / 80
    assert '| eager before | 80 | 80 to 80 | 1.25 (eager) |' in benchmark.format_table(rows, 'alfx')


def test_another_source_tree_is_measured_in_the_same_rounds(monkeypatch, tmp_path):
    import benchmark
    import benchmark_peers

    measured = []
    monkeypatch.setattr(benchmark, 'measure', lambda peer, *_: measured.append(peer) or {'rate': 1.0, 'peak_mib': 1.0})
    monkeypatch.setattr(benchmark_peers, 'unavailable', lambda *_: '')
    benchmark.run_workload('sac_pendulum', ['alfx', 'sb3'], 2, None, 0, against=tmp_path)
    assert measured == ['alfx', 'alfx before', 'sb3', 'alfx before', 'sb3', 'alfx']


def test_the_measured_sources_are_the_named_ones(monkeypatch, tmp_path):
    import benchmark

    (tmp_path / 'alfx').mkdir()
    (tmp_path / 'alfx' / '__init__.py').write_text('')
    run = subprocess.run

    def where(command, env, **options):
        program = 'import alfx, json; print(json.dumps({"rate": alfx.__file__}))'
        return run([sys.executable, '-c', program], env=env, cwd=os.sep, **options)

    monkeypatch.setattr(subprocess, 'run', where)
    found = [benchmark.measure(peer, 'sac_pendulum', 1, 0, 0, tmp_path)['rate'] for peer in ('alfx', 'alfx before')]
    assert found == [str(folder / 'alfx' / '__init__.py') for folder in (TOOLS.parent, tmp_path)]


def test_eager_mode_replays_nothing(monkeypatch):
    from benchmark_peers import WORKLOADS, run_alfx_eager

    from alfx.engine.plan import program
    from alfx.engine.plan import backends

    monkeypatch.setattr(backends, 'WARM_UP', backends.WarmUp(0, 0, 0, 0, 0))  # put back after the test, too
    monkeypatch.setattr(program.Program, '__init__', None)
    updates, _ = run_alfx_eager(dataclasses.replace(WORKLOADS['sac_pendulum'], warm_up=120, layers=(8, )), 20, 0)
    assert updates >= 20


needs_affinity = pytest.mark.skipif(not hasattr(os, 'sched_setaffinity'), reason='Linux only')


@needs_affinity
def test_threads_that_a_measurement_starts_stay_on_its_core():
    program = '''
import os, threading, benchmark
benchmark.pin_to_cores(1)
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
thread.start(), thread.join()
assert len(found[0]) == 1 and found[0] == os.sched_getaffinity(0), found
'''
    subprocess.run([sys.executable, '-c', program], check=True, env={**os.environ,
                                                                     'PYTHONPATH': str(TOOLS / 'benchmarks')})


@needs_affinity
@pytest.mark.parametrize('number', [-1, 10_000])
def test_missing_cores_are_rejected(number):
    import benchmark

    before = os.sched_getaffinity(0)
    with pytest.raises(SystemExit, match=rf'--cores {number}: expected a number from 1 to {len(before)}'):
        benchmark.pin_to_cores(number)
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_a_benchmark_uses_one_core_by_default(monkeypatch):
    import benchmark

    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, '{"rate": 1.0}', '')

    monkeypatch.setattr(subprocess, 'run', run)
    benchmark.measure('alfx', 'ppo_cart_pole', 10, 0)
    benchmark.measure('alfx', 'ppo_cart_pole', 10, 0, cores=2)
    assert [command[command.index('--cores') + 1] for command in commands] == ['1', '2']


@pytest.mark.parametrize('workload, requested',
                         [('ppo_cart_pole', 512), ('a2c_cart_pole', 512), ('pqn_cart_pole', 2048)])
@pytest.mark.parametrize('peer', ['alfx', 'bare'])
def test_a_peer_takes_the_requested_steps(peer, workload, requested):
    from benchmark_peers import PEERS, WORKLOADS

    steps, seconds = PEERS[peer](WORKLOADS[workload], requested, 0)
    # whole iterations; alfx leaves the steps between two episodes out of its count
    assert 0.9 * requested <= steps <= 2 * requested
    assert seconds > 0


@pytest.mark.parametrize('workload', ['iql_half_cheetah', 'td3_bc_half_cheetah'])
@pytest.mark.parametrize('peer', ['alfx', 'bare'])
def test_a_peer_makes_the_requested_updates(peer, workload):
    pytest.importorskip('mujoco')
    from benchmark_peers import PEERS, WORKLOADS

    small = dataclasses.replace(WORKLOADS[workload], warm_up=0, layers=(8, ), batch_size=8)
    updates, seconds = PEERS[peer](small, 100, 0)
    assert updates == 100 and seconds > 0


def test_offline_algorithms_are_measured_on_datasets_only(monkeypatch):
    from benchmark_peers import WORKLOADS, unavailable

    monkeypatch.setenv('D3RLPY_PYTHON', 'python')
    assert unavailable('d3rlpy', WORKLOADS['sac_pendulum']) and not unavailable('d3rlpy', WORKLOADS['iql_half_cheetah'])
    assert all(unavailable(peer, WORKLOADS['iql_half_cheetah']) for peer in ('sb3', 'sbx', 'bfloat16', 'rnd'))
    monkeypatch.delenv('D3RLPY_PYTHON')
    assert 'D3RLPY_PYTHON' in unavailable('d3rlpy', WORKLOADS['iql_half_cheetah'])


@pytest.mark.parametrize('bonus', ['alfx', 'rnd', 'icm', 'noveld', 'deir'])
def test_bonus_costs_are_measured_on_iterations_of_equal_work(bonus):
    from benchmark_peers import PEERS, WORKLOADS, unavailable

    workload = WORKLOADS['ppo_cart_pole_bonus']
    assert not unavailable(bonus, workload)
    iterations, seconds = PEERS[bonus](workload, 500, 0)
    assert iterations in (2, 3)  # of 256 steps, without those between two episodes
    assert seconds > 0


def test_a_bonus_and_other_libraries_are_not_mixed():
    from benchmark_peers import WORKLOADS, unavailable

    assert all(unavailable(peer, WORKLOADS['ppo_cart_pole_bonus']) for peer in ('compiled', 'sb3', 'bare', 'sbx'))
    for workload in WORKLOADS.values():
        if workload.unit != 'iterations':
            assert unavailable('rnd', workload) and not unavailable('alfx', workload)


def test_handwritten_advantages_stop_at_the_end_of_an_episode():
    import bare_loops
    import torch

    rollout = bare_loops.Rollout(
        observation=torch.zeros(3, 1, 4), action=torch.zeros(3, 1), log_prob=torch.zeros(3, 1),
        value=torch.tensor([[1.0], [2.0], [3.0]]), reward=torch.ones(3, 1),
        discount=torch.tensor([[0.5], [0.0], [0.5]]), next_value=torch.tensor([4.0]))
    # delta = 1 + 0.5 * 2 - 1 = 1, 1 + 0 - 2 = -1, 1 + 0.5 * 4 - 3 = 0; A0 = 1 + 0.5 * 0.5 * -1
    assert bare_loops.advantages(rollout, 0.5).flatten().tolist() == [0.75, -1.0, 0.0]
