"""Final infos of episodes are measured without a line in the conf."""
import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import alfx
from alfx.engine.remote.data_parallel import Ranks
from alfx.environments.alf_wrappers import BatchEnvironmentWrapper, MultitaskWrapper, TimeLimit
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.vector_env import SerialVectorEnv
from alfx.runs.evaluator import read_results
from alfx.trainers.distributed.strategies import Distributed


class Reaching(gymnasium.Env):
    """Episode k of an environment has ``length + k`` steps; it succeeds if that is even."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4, ), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=2):
        self._length = length - 1

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self._length += 1
        self._step = 0
        return np.zeros(4, np.float32), {'distance': -1.0}

    def step(self, action):
        self._step += 1
        ended = self._step == self._length
        info = {'distance': float(self._step), 'name': 'a text', 'vector': np.ones(2), 'lost': float('nan'), 'a\nb': 1}
        if ended:
            info['is_success'] = self._length % 2 == 0
        return np.zeros(4, np.float32), 1.0, ended, False, info


gymnasium.register('Reaching-v0', Reaching)


def make(kind, lengths, **kwargs):
    constructors = [lambda length=length: Reaching(length) for length in lengths]
    vectors = {'serial': SerialVectorEnv, 'processes': ProcessVectorEnv, 'gymnasium': SyncVectorEnv}
    return GymVectorEnvironment(vectors[kind](constructors), **kwargs)


@pytest.mark.parametrize('kind', ['serial', 'processes', 'gymnasium'])
def test_final_info_numbers_are_reported_only_when_an_episode_ends(kind):
    env = make(kind, [2, 3])
    try:
        env.reset()
        action, reported = torch.zeros(2, dtype=torch.int64), []
        for _ in range(7):
            env.step(action)
            reported.append(env.final_infos())
        ends = [{}, {0: {'distance': 2.0, 'is_success': 1.0}}, {1: {'distance': 3.0, 'is_success': 0.0}}, {}, {},
                {0: {'distance': 3.0, 'is_success': 0.0}}, {}]
        assert reported == ends
        assert env.latest_final_infos() == [info for step in ends for info in step.values()]
    finally:
        env.close()


@pytest.mark.parametrize('kind', ['serial', pytest.param('processes', marks=pytest.mark.processes), 'gymnasium'])
def test_episodes_truncated_by_a_wrapper_are_reported(kind):
    with TimeLimit(make(kind, [3, 9]), 3) as env:
        env.reset()
        reported = [env.step(torch.zeros(2, dtype=torch.int64)) and env.final_infos() for _ in range(4)]
        assert reported == [{}, {}, {0: {'distance': 3.0, 'is_success': 0.0}, 1: {'distance': 3.0}}, {}]
        assert env.latest_final_infos() == list(reported[2].values())


def test_batched_environments_report_truncated_episodes():
    env = TimeLimit(BatchEnvironmentWrapper([make('serial', [9]), make('serial', [2, 9])]), 2)
    env.reset()
    reported = [env.step(torch.zeros(3, dtype=torch.int64)) and env.final_infos() for _ in range(3)]
    cut = {'distance': 2.0}
    assert reported == [{}, {0: cut, 1: {**cut, 'is_success': 1.0}, 2: cut}, {}]
    assert sorted(map(len, env.latest_final_infos())) == [1, 1, 2]


class OtherVectorEnv(SyncVectorEnv):
    """A subclass, whose environments alfx does not step itself."""

    def __init__(self, env_fns):
        super().__init__(env_fns, autoreset_mode=AutoresetMode.NEXT_STEP)


class Measuring(gymnasium.Env):
    """Episodes of one step with one info."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1, ), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, info):
        self._info = info

    def reset(self, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, self._info


@pytest.mark.parametrize('infos, expected', [
    (({'success': np.bool_(True)}, {'success': np.False_}), ({'success': 1}, {'success': 0})),
    (({'score': 0}, {'score': 0.25}), ({'score': 0}, {'score': 0.25})),
    (({'score': np.int8(1)}, {'score': 1000.5}), ({'score': 1}, {'score': 1000.5})),
    (({'score': True}, {'score': 7}), ({'score': 1}, {'score': 7})),
    (({'score': np.array(0.5)}, {'other': torch.tensor(2)}), ({'score': 0.5}, {'other': 2})),
    (({'score': 'high'}, {'score': 0.5}), ({}, {'score': 0.5})),
    (({'episode': {'r': np.float32(0.5), 'l': 3, 'text': '', 'deep': {'x': np.True_}}}, {'episode': {}}),
     ({'episode/r': 0.5, 'episode/l': 3, 'episode/deep/x': 1}, {})),
    (({0: 1.5}, {'vector': np.ones(2), 'list': [1], 'none': None}), ({}, {})),
])
@pytest.mark.parametrize('kind', [SerialVectorEnv, pytest.param(ProcessVectorEnv, marks=pytest.mark.processes)])
def test_final_infos_have_the_values_of_the_environments(kind, infos, expected):
    with GymVectorEnvironment(kind([lambda info=info: Measuring(info) for info in infos])) as env:
        env.reset()
        env.step(torch.zeros(2, dtype=torch.int64))
        assert env.final_infos() == {i: info for i, info in enumerate(expected) if info}


def test_bools_of_numpy_are_reported_by_other_vector_environments():
    with GymVectorEnvironment(OtherVectorEnv([lambda: Measuring({'success': np.True_})])) as env:
        env.reset()
        env.step(torch.zeros(1, dtype=torch.int64))
        assert env.final_infos() == {0: {'success': 1}}


def test_infos_of_a_vector_env_keep_arrays_and_objects():
    env = SerialVectorEnv([lambda: Measuring({'a': np.ones(2), 'b': [1], 'c': 2, 'd': 'x'}),
                           lambda: Measuring({'a': np.ones(3), 'b': [1, 2], 'c': 0.5})])
    env.reset()
    infos = env.step(np.zeros(2, int))[4]
    assert [len(x) for x in infos['a']] == [2, 3] and infos['b'].tolist() == [[1], [1, 2]]
    assert infos['c'].tolist() == [2.0, 0.5] and infos['d'].tolist() == ['x', None]
    assert infos['_d'].tolist() == [True, False]


def test_configured_infos_are_aggregated_as_configured_and_only_once():
    env = make('serial', [1], env_info_keys=('distance', ))
    env.reset()
    time_step = env.step(torch.zeros(1, dtype=torch.int64))
    assert time_step.env_info['distance'].tolist() == [1.0]
    assert env.final_infos() == {0: {'is_success': 0.0}}


def test_infos_of_the_latest_episodes_are_part_of_the_state():
    env, other = make('serial', [1]), make('serial', [1])
    env.reset()
    for _ in range(5):
        env.step(torch.zeros(1, dtype=torch.int64))
    assert env.latest_final_infos()
    other.set_state(env.get_state())
    assert other.latest_final_infos() == env.latest_final_infos() and other.final_infos() == {}
    state = env.get_state()
    del state['final_infos']  # of an earlier version
    other.set_state(state)
    assert other.latest_final_infos() == []


def test_batched_environments_report_which_ended_and_keep_it_in_state():
    def joined():
        return BatchEnvironmentWrapper([make('serial', [3]), make('serial', [2, 4])])

    env, other, action = joined(), joined(), torch.zeros(3, dtype=torch.int64)
    env.reset()
    reported = [env.step(action) and env.final_infos() for _ in range(4)]
    distance = {i: {'distance': i, 'is_success': float(i % 2 == 0)} for i in (2., 3., 4.)}
    assert reported == [{}, {1: distance[2.]}, {0: distance[3.]}, {2: distance[4.]}]
    assert env.latest_final_infos() == [distance[i] for i in (2., 3., 4.)]
    other.set_state(env.get_state())
    assert other.latest_final_infos() == env.latest_final_infos()


def test_only_the_active_task_reports_its_info():
    env = MultitaskWrapper([make('serial', [2]), make('serial', [3])], ['short', 'long'])
    env.reset()
    reported = [env.step({'action': torch.zeros(1, dtype=torch.int64), 'task_id': torch.ones(1, dtype=torch.int64)})
                and env.final_infos() for _ in range(6)]
    short, long = {'distance': 2.0, 'is_success': 1.0}, {'distance': 3.0, 'is_success': 0.0}
    assert reported == [{}, {0: short}, {}, {}, {}, {0: long}]
    assert env.latest_final_infos() == [short, long]


def test_rank_0_logs_the_infos_of_all_ranks():
    class Others(Ranks):
        def __init__(self, rank):
            super().__init__(rank, 2, None, torch.device('cpu'))

        def gather_objects(self, value):
            return [value, [{'is_success': 0.0}]] if self.is_first else None

    env = make('serial', [2])
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(1, dtype=torch.int64))
    team = Distributed.__new__(Distributed)
    for rank, expected in (0, [1.0, 0.0]), (1, []):
        team._ranks = Others(rank)
        infos = itertools.chain(*team.gather(env.latest_final_infos()))
        assert [info['is_success'] for info in infos] == expected


def test_a_run_logs_the_success_of_training_and_evaluation(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    alfx.train('ppo_cart_pole', {
        'create_environment.env_name': 'Reaching-v0', 'create_environment.num_parallel_environments': 2,
        'TrainerConfig.num_iterations': 4, 'TrainerConfig.num_env_steps': 0, 'TrainerConfig.unroll_length': 8,
        'TrainerConfig.mini_batch_size': 8, 'TrainerConfig.num_updates_per_train_iter': 1,
        'TrainerConfig.summary_interval': 1, 'TrainerConfig.num_summaries': None, 'TrainerConfig.evaluate': True,
        'TrainerConfig.num_evals': 1, 'TrainerConfig.num_eval_episodes': 4, 'TrainerConfig.async_eval': False,
        'TrainerConfig.random_seed': 1}, str(tmp_path / 'run'))
    rate = alfx.read_progress(str(tmp_path / 'run'))['final_info/is_success']
    assert 0 < rate[-1] < 1
    result, = read_results(str(tmp_path / 'run'))
    assert result['final_info/is_success'] == 0.5  # of episodes of 2, 3, 4 and 5 steps
    assert result['final_info/distance'] == result['average_length'] == 3.5
    for folder, value in (('train', rate[-1]), ('eval', 0.5)):
        events = EventAccumulator(str(tmp_path / 'run' / folder)).Reload()
        assert events.Scalars('Metrics/final_info/is_success')[-1].value == pytest.approx(value)


class Informing(Reaching):
    """Gives the next of some infos with each step; episodes have two steps."""

    infos = ()

    def step(self, action):
        observation, reward, *_ = super().step(action)
        return observation, reward, self._step == 2, False, dict(self.infos[self._step - 1])


def informing(*given, **args):
    kind = type('Given', (Informing, ), {'infos': given})
    return GymVectorEnvironment(SerialVectorEnv([kind, kind]), **args)


def test_none_is_no_number_of_an_info():
    env = informing({'success': None}, {'success': 1}, env_info_keys=('success', ))
    env.reset()
    steps = [env.step(torch.zeros(2, dtype=torch.int64)).env_info['success'].tolist() for _ in range(2)]
    assert steps == [[0, 0], [1, 1]]


@pytest.mark.parametrize('value', [{'inside': 1}, 'text', np.zeros(3)])
def test_a_configured_info_of_another_kind_is_named(value):
    env = informing({'success': value}, {}, env_info_keys=('success', ))
    env.reset()
    with pytest.raises(EnvironmentLoadError, match=r"env_info_keys: expected TensorSpec.* as info\['success'\], found"):
        env.step(torch.zeros(2, dtype=torch.int64))


def test_arrays_of_one_number_are_numbers_and_huge_integers_are_not():
    env = informing({}, {'a': np.array([True]), 'b': np.array([[2.5]]), 'c': 10**400, 'd': np.ones(2),
                         'e': gymnasium.spaces.Dict(), 'f': gymnasium.spaces.Box(0, 1, (1, ))})
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(2, dtype=torch.int64))
    assert env.final_infos() == {0: {'a': 1.0, 'b': 2.5}, 1: {'a': 1.0, 'b': 2.5}}
