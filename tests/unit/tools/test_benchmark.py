import pathlib

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture(autouse=True)
def tools_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))


def test_the_ratio_is_the_median_of_the_ratios_within_rounds():
    import benchmark

    # a machine that is twice as fast in the second round: ratios 2, 2 and 3
    rounds = [{'alfx': {'rate': 200.0, 'peak_mib': 10.0}, 'peer': {'rate': 100.0, 'peak_mib': 20.0}},
              {'alfx': {'rate': 400.0, 'peak_mib': 12.0}, 'peer': {'rate': 200.0, 'peak_mib': 30.0}},
              {'alfx': {'rate': 300.0, 'peak_mib': 11.0}, 'peer': {'rate': 100.0, 'peak_mib': 40.0}}]
    rows = benchmark.summarise(rounds, 'alfx')
    assert rows['peer'] == {'rate': 100.0, 'lowest': 100.0, 'highest': 200.0, 'peak_mib': 30.0, 'ratio': 2.0}
    assert rows['alfx']['rate'] == 300.0
    assert '| peer | 100 | 100 to 200 | 2.00 | 30 MiB |' in benchmark.format_table(rows, 'alfx')


@pytest.mark.parametrize('workload', ['ppo_cart_pole', 'a2c_cart_pole'])
@pytest.mark.parametrize('peer', ['alfx', 'bare'])
def test_a_peer_takes_the_steps_that_it_is_asked_for(peer, workload):
    from benchmark_peers import PEERS, WORKLOADS

    steps, seconds = PEERS[peer](WORKLOADS[workload], 512, 0)
    # whole iterations; alfx leaves the steps between two episodes out of its count
    assert 480 <= steps <= 800
    assert seconds > 0


@pytest.mark.parametrize('bonus', ['alfx', 'rnd', 'icm'])
def test_what_a_bonus_costs_is_counted_in_iterations_of_the_same_work(bonus):
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


def test_the_advantages_of_the_hand_written_loop_stop_at_the_end_of_an_episode():
    import bare_loops
    import torch

    rollout = bare_loops.Rollout(
        observation=torch.zeros(3, 1, 4), action=torch.zeros(3, 1), log_prob=torch.zeros(3, 1),
        value=torch.tensor([[1.0], [2.0], [3.0]]), reward=torch.ones(3, 1),
        discount=torch.tensor([[0.5], [0.0], [0.5]]), next_value=torch.tensor([4.0]))
    # delta = 1 + 0.5 * 2 - 1 = 1, 1 + 0 - 2 = -1, 1 + 0.5 * 4 - 3 = 0; A0 = 1 + 0.5 * 0.5 * -1
    assert bare_loops.advantages(rollout, 0.5).flatten().tolist() == [0.75, -1.0, 0.0]
