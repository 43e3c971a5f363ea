"""A worker takes the steps that the run itself would take."""
import os

import pytest
import torch
from helpers.unroll_fakes import SAMPLED, make_algorithm, run_folder

from alfx import context, nest
from alfx.engine.remote.policy_state import policy_buffers, policy_state, policy_tensors, states_in_python
from alfx.engine.remote.remote_unroll import UnrollSource, check_source, worker_settings
from alfx.engine.rollout import Steps, map_steps
from alfx.trainers.acting.rollout_worker import RolloutWorker


def make_worker(config, index=0, count=1, **settings):
    conf_file = os.path.join(config.root_dir, 'conf', 'config.gin')
    return RolloutWorker(conf_file, {**worker_settings(config), **settings}, index, count)


class Here(UnrollSource):
    """A worker in this process."""

    def __init__(self, worker):
        self.worker = worker
        self.updates = 0

    def gather(self, length, at_least=None):
        return self.worker.collect(length)

    def update_parameter(self, algorithm):
        self.updates += 1
        self.worker.load(policy_state(algorithm), context.get_global_counter(), context.get_all_progresses())

    def close(self):
        self.worker.close()


def assert_same(a, b):
    assert nest.structure(a) == nest.structure(b)
    for (path, x), y in zip(nest.flatten_with_path(a), nest.flatten(b)):
        assert x.dtype == y.dtype and torch.equal(x, y), path


@pytest.mark.parametrize('params', [
    ('Steering.counts=False', ), SAMPLED, (*SAMPLED, 'Steering.samples=True'),
    (*SAMPLED, 'Steering.recurrent=True', 'TrainerConfig.use_rollout_state=True'),
    ('Steering.recurrent=True', 'Steering.counts=False', 'TrainerConfig.data_transformer_ctor=@ObservationNormalizer',
     "ObservationNormalizer.update_mode='rollout'")
], ids=['whole unrolls', 'sampled', 'random actions', 'recurrent', 'recurrent, whole unrolls, transformed'])
def test_unrolls_of_a_worker_match_the_run_bit_for_bit(tmp_path, monkeypatch, params):
    config = run_folder(tmp_path, monkeypatch, *params)
    local = make_algorithm(config)
    expected = [local.unroll(5) for _ in range(4)]
    remote = make_algorithm(config)
    remote.learner.collector.use_source(Here(make_worker(config)), 10)
    for unrolled in expected:
        assert_same(unrolled, remote.unroll(5))
    for a, b in zip(local.get_metrics(), remote.get_metrics()):
        assert_same(a.result(), b.result())


def test_several_workers_have_the_environments_of_one(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'create_environment.num_parallel_environments=4')
    one = make_worker(config, num_environments=4).collect(8)
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'create_environment.num_parallel_environments=2')
    parts = [make_worker(config, index, 2) for index in (0, 1)]
    assert [part.batch_size for part in parts] == [2, 2]
    # the same parameters act; their statistics differ, as each has seen other steps
    noise = [part.collect(1).experience.time_step for part in parts]
    assert torch.equal(torch.cat([x.observation for x in noise], 1), one.experience.time_step.observation[:1])
    assert torch.cat([x.env_id for x in noise], 1).tolist() == one.experience.time_step.env_id[:1].tolist()


def test_the_environments_of_a_worker_can_begin_at_any_number(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED)
    first = make_worker(config, num_environments=3, first_environment=6).collect(1).experience.time_step
    assert first.env_id.tolist() == [[6, 7, 8]]
    assert not torch.equal(first.observation, make_worker(config).collect(1).experience.time_step.observation)


def test_a_resumed_run_has_new_random_streams(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED, 'Steering.samples=True')
    steps = [make_worker(config, start=start).collect(2).experience for start in (0, 0, 1, 2)]
    assert_same(steps[0], steps[1])
    for other in steps[2:]:
        assert not torch.equal(steps[0].time_step.observation, other.time_step.observation)
    assert not torch.equal(steps[2].action, steps[3].action)


def test_statistics_changed_by_acting_are_reported_and_kept(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED)
    learner = make_algorithm(config)
    worker, other = make_worker(config), make_worker(config, 1, 2)
    assert worker.statistics() == {} and worker.take_statistics() == set()
    worker.load(policy_state(learner), 0, {})
    for each in (worker, other):
        each.collect(4)
    assert int(worker.statistics()['seen']) == 12
    assert worker.take_statistics() == set(worker.statistics()) and worker.take_statistics() == set()
    assert any('_normalizer' in key for key in worker.statistics())
    assert not any('_net' in key for key in worker.statistics())
    with torch.no_grad():
        learner._net.bias.fill_(0.25)
    for each in (worker, other):
        each.load(policy_state(learner), 7, {'percent': 0.5})
    assert (context.get_global_counter(), context.get_progress('percent')) == (7, 0.5)
    assert worker.algorithm._net.bias.item() == other.algorithm._net.bias.item() == 0.25
    assert (int(worker.algorithm.seen), int(other.algorithm.seen)) == (12, 0)
    assert other.statistics() == {}


def test_weights_of_another_algorithm_are_rejected_by_name(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED)
    worker, state = make_worker(config), policy_state(make_algorithm(config))
    state['_net.weight'] = torch.zeros(7)
    with pytest.raises(ValueError, match='_net.weight'):
        worker.load(state, 0, {})
    with pytest.raises(ValueError, match='worker_index'):
        make_worker(config, 2, 2)


class Counting(UnrollSource):
    """A stream whose step t has the reward t."""

    def __init__(self, example: Steps):
        self._example, self._t = example, 0
        self.available = 10**9
        self.updates = 0

    def gather(self, length, at_least=None):
        count = min(length, max(self.available, length if at_least is None else at_least))
        if not count:
            return None
        self.available -= count
        steps = map_steps(lambda x: x[:1].expand(count, *x.shape[1:]).clone(), self._example)
        reward = torch.arange(self._t, self._t + count).float()[:, None].expand(count, 3)
        self._t += count
        time_step = steps.experience.time_step._replace(reward=reward)
        return steps._replace(experience=steps.experience._replace(time_step=time_step),
                              env_steps=steps.env_steps._replace(reward=reward))

    def update_parameter(self, algorithm):
        self.updates += 1

    def close(self):
        pass


def counting(config):
    algorithm = make_algorithm(config)
    source = Counting(make_worker(config).collect(1))
    algorithm.learner.collector.use_source(source, config.unroll_parameter_update_period)
    return algorithm, source


def rewards(experience):
    return experience.time_step.reward[:, 0].int().tolist()


def test_an_unroll_starts_at_the_step_the_previous_one_bootstrapped_from(tmp_path, monkeypatch):
    algorithm, _ = counting(run_folder(tmp_path, monkeypatch))
    assert [rewards(algorithm.unroll(length)) for length in (3, 1, 2)] == [[0, 1, 2, 3], [3, 4], [4, 5, 6]]
    assert rewards_seen(algorithm) == list(range(6))


def rewards_seen(algorithm):
    """Return the rewards that the metrics have observed."""
    seen = [time_step.reward[:, 0].int().tolist() for time_step in algorithm._metrics._waiting.sequences]
    return sum(seen, [])


def test_without_bootstrapping_no_step_is_repeated(tmp_path, monkeypatch):
    algorithm, _ = counting(run_folder(tmp_path, monkeypatch, *SAMPLED))
    assert [rewards(algorithm.unroll(length)) for length in (3, 1, 2)] == [[0, 1, 2], [3], [4, 5]]


def collect_if_due(algorithm):
    """Return the experience that the next iteration of ``algorithm`` collects, or ``None``."""
    learner = algorithm.learner
    request = learner.collector.next_request(trained_before=bool(learner.num_trained))
    if request is None:
        return None
    experience = learner.collect(request)
    learner.collector.mark_collected(request)
    return experience


@pytest.mark.parametrize('sampled', [True, False])
def test_without_a_given_length_all_available_steps_are_used(tmp_path, monkeypatch, sampled):
    params = ['TrainerConfig.unroll_length=0', 'TrainerConfig.max_unroll_length=4', *(SAMPLED if sampled else ())]
    algorithm, source = counting(run_folder(tmp_path, monkeypatch, *params))
    lengths = []
    for available in (3, 0, 0, 9, 5, 1):
        source.available = available
        algorithm.learner.num_trained = 1
        experience = collect_if_due(algorithm)
        lengths.append(0 if experience is None else len(rewards(experience)) - (not sampled))
    assert lengths == ([3, 0, 0, 4, 4, 1] if sampled else [2, 0, 0, 4, 4, 1])


def test_an_iteration_without_data_to_train_or_collect_waits_for_a_step(tmp_path, monkeypatch):
    params = ['TrainerConfig.unroll_length=0', 'TrainerConfig.max_unroll_length=4', *SAMPLED]
    algorithm, source = counting(run_folder(tmp_path, monkeypatch, *params))
    source.available = 0
    assert algorithm.learner.num_trained == 0
    assert len(rewards(collect_if_due(algorithm))) == 1


def test_weights_are_handed_over_at_the_period(tmp_path, monkeypatch):
    algorithm, source = counting(run_folder(tmp_path, monkeypatch, *SAMPLED, 'TrainerConfig.unroll_length=0.5',
                                            'TrainerConfig.unroll_parameter_update_period=3'))
    updates = []
    for _ in range(7):
        collect_if_due(algorithm)
        updates.append(source.updates)
    assert updates == [1, 1, 1, 2, 2, 2, 3]


def test_a_failed_unroll_keeps_the_fraction_of_a_step_that_is_due(tmp_path, monkeypatch):
    algorithm, source = counting(run_folder(tmp_path, monkeypatch, *SAMPLED, 'TrainerConfig.unroll_length=1.5'))
    collect_if_due(algorithm)

    def fail(*_):
        raise RuntimeError('lost')

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(source, 'gather', fail)
        collect_if_due(algorithm)
    assert len(rewards(collect_if_due(algorithm))) == 2


def test_training_that_overwrites_acting_state_is_logged_once(tmp_path, monkeypatch, caplog):
    from alfx.engine.remote.remote_unroll import ActingStatistics
    algorithm = make_algorithm(run_folder(tmp_path, monkeypatch, *SAMPLED))
    statistics = ActingStatistics(algorithm)
    statistics.write({'seen': torch.tensor(5)})
    statistics.write({'seen': torch.tensor(6)})
    assert int(algorithm.seen) == 6 and not caplog.records
    for value in (7, 8):
        algorithm.seen += 1
        statistics.write({'seen': torch.tensor(value)})
    assert int(algorithm.seen) == 8
    assert [record.getMessage().split(':')[0] for record in caplog.records] == ['both acting and training change seen']


def test_replaced_buffers_of_a_worker_are_loaded(tmp_path, monkeypatch):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED)
    worker = make_worker(config, index=1, count=2)
    algorithm = worker.algorithm
    algorithm.register_buffer('_mean', torch.zeros(2))
    worker._tensors, worker._buffers = policy_tensors(algorithm), policy_buffers(algorithm)
    algorithm._mean = algorithm._mean + 1  # as a network may do while it acts
    worker.load({**policy_state(algorithm), '_mean': torch.full((2, ), 5.0)}, 0, {})
    assert algorithm._mean.tolist() == [5.0, 5.0]


class Remembering(torch.nn.Linear):
    def get_extra_state(self):
        return {'largest': 1.0}

    def set_extra_state(self, state):
        pass


def test_state_outside_of_tensors_is_named():
    assert states_in_python(torch.nn.Sequential(torch.nn.Linear(1, 1), Remembering(1, 1))) == ['Remembering']


def test_all_states_of_this_package_are_tensors(tmp_path, monkeypatch):
    assert not states_in_python(make_algorithm(run_folder(tmp_path, monkeypatch)))


def test_actors_warn_of_state_that_they_do_not_share(tmp_path, monkeypatch, caplog):
    config = run_folder(tmp_path, monkeypatch, *SAMPLED)
    algorithm = make_algorithm(config)
    algorithm.remembering = Remembering(1, 1)
    check_source(algorithm, config, 'async_unroll')
    assert 'async_unroll: Remembering keeps state outside of buffers' in caplog.text
