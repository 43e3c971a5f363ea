import json
import pathlib

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import results
    return results


def a_run(returns, seconds=60.0):
    return {'returns': returns, 'env_steps': 1000, 'seconds': seconds, 'jobs': 2, 'cores': 2, 'date': '2026-01-02',
            'versions': {'alfx': '0.1', 'torch': '2.13', 'gymnasium': None}}


def a_task(results, fingerprint='f', required=10.0):
    return results.Task('some_conf', 'some_conf', 'Some-v1', required, fingerprint)


@pytest.mark.parametrize('head,required', [
    ('#   expected  evaluation return 500\n', 500.0),
    ('#   expected  evaluation return -170 +- 30\n', -200.0),
    ('#   expected  evaluation return 2,500 +- 1,000\n', 1500.0),
    ('#   expected  evaluation return 20.7 (the paper); not run to the end on 2 cores\n', 20.7),
    ('#   nothing of the kind\n', None)])
def test_the_required_return_is_the_lower_end_of_what_the_conf_states(results, head, required):
    assert results.required_return('# A conf\n' + head + "include 'ppo.gin'\n") == required


def test_a_row_is_over_the_means_of_seeds(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    # means of the seeds 10 and 20: mean 15, and the interval is 15 +- 12.706 * 5, as t(0.975, 1) = 12.706
    store.add(a_task(results), 1, a_run([5.0, 15.0]))
    store.add(a_task(results), 0, a_run([20.0, 20.0]))
    row = results.row_of('some_conf', store.confs['some_conf'])
    assert row[:9] == ['`some_conf`', 'Some-v1', '1,000', '2', '60 s, 2 on 2 cores', '15',
                       '-48.531 to 78.531', '10', '10']
    assert row[9:] == ['reached', '2026-01-02', 'alfx 0.1, torch 2.13']


def test_a_mean_below_what_is_required_is_missed(results, tmp_path):
    store = results.Store(tmp_path / 'results.json')
    store.add(a_task(results, required=10.5), 0, a_run([10.0]))
    assert results.row_of('some_conf', store.confs['some_conf'])[9] == 'missed'


def test_what_is_stored_is_found_again_until_the_conf_changes(results, tmp_path):
    results.Store(tmp_path / 'results.json').add(a_task(results), 0, a_run([1.0]))
    store = results.Store(tmp_path / 'results.json')
    assert store.is_done(a_task(results), 0)
    assert not store.is_done(a_task(results), 1)
    assert not store.is_done(a_task(results, fingerprint='g'), 0)
    store.add(a_task(results, fingerprint='g'), 1, a_run([2.0]))
    assert list(json.loads((tmp_path / 'results.json').read_text())['some_conf']['runs']) == ['1']
    assert '| `some_conf` |' in (tmp_path / 'results.md').read_text()


def test_the_fingerprint_of_a_conf_follows_its_bindings_and_not_its_comments(results, tmp_path):
    def task(name, text):
        (tmp_path / name).write_text(text)
        return results.read_task(str(tmp_path / name))

    first = task('a.gin', "include 'ppo_cart_pole.gin'\n")
    assert task('b.gin', "# the same\ninclude 'ppo_cart_pole.gin'\n").fingerprint == first.fingerprint
    assert task('c.gin', "include 'ppo_cart_pole.gin'\nppo/Adam.lr = 1e-4\n").fingerprint != first.fingerprint
    assert (first.name, first.env_name) == ('a', 'CartPole-v1')


def test_vector_returns_count_by_their_sum(results):
    entry = {'env_name': 'Some-v1', 'required': None, 'runs': {'0': a_run([[1.0, 2.0], [3.0, 4.0]])}}
    assert results.row_of('some_conf', entry)[5] == '5'
