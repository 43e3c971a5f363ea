"""Recording of environments during a run, and its replay in new environments."""
import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from helpers.gym_environments import CountEnv

from alfx.environments import alf_wrappers
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.multitask_wrappers import BatchEnvironmentWrapper
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.state_check import Recorder, gym_environments, replay
from alfx.environments.suite_exploration import CorridorEnv
from alfx.environments.vector_env import SerialVectorEnv


class Walk(gymnasium.Env):
    """A walk with noise; an episode has 7 steps."""

    observation_space = gymnasium.spaces.Dict(x=gymnasium.spaces.Box(-100, 100, (2, ), np.float32))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.n = self.np_random.normal(size=2), 0
        return self.observe(), {}

    def observe(self):
        return {'x': self.x.astype(np.float32)}

    def step(self, action):
        self.x = self.x + action + self.np_random.normal(size=2)
        self.n += 1
        return self.observe(), float(self.x.sum()), False, self.n >= 7, {}


class ByNumber(Walk):
    """A walk whose position is in a table of the process, known by a number."""

    worlds: dict = {}

    def __init__(self):
        self.number = len(self.worlds)

    @property
    def x(self):
        return self.worlds[self.number]

    @x.setter
    def x(self, value):
        self.worlds[self.number] = value


class Level(Walk):
    """A walk whose class counts the resets."""

    resets = 0

    def reset(self, **kwargs):
        type(self).resets += 1
        return super().reset(**kwargs)

    def observe(self):
        return {'x': np.full(2, self.resets, np.float32)}


class SlowLevels(Walk):
    """A walk whose class counts the resets in a dict, on which later levels depend."""

    progress: dict = {}

    def reset(self, **kwargs):
        self.progress['episodes'] += 1
        return super().reset(**kwargs)


class Difficulty:
    """A value that several environments share."""

    def __init__(self):
        self.level = 1


class SharedObject(Walk):
    """A walk whose class has an array and an object, on which later levels depend."""

    scores = np.zeros(2)
    difficulty = Difficulty()

    def reset(self, **kwargs):
        self.scores[1] += 1
        self.difficulty.level += 1
        return super().reset(**kwargs)


class Cached(Walk):
    """A walk whose class caches images."""

    images: dict = {}

    def reset(self, **kwargs):
        self.images[len(self.images)] = np.zeros(3)
        return super().reset(**kwargs)


class Forgetful(Walk):
    """An environment that does not save its random numbers, which the next reset needs."""

    def get_state(self):
        return self.x, self.n

    def set_state(self, state):
        self.x, self.n = state

    def step(self, action):
        self.n += 1
        return self.observe(), 0.0, False, self.n >= 7, {}


class Batch(VectorEnv):
    """A natively batched counter."""

    metadata = {'autoreset_mode': AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.single_observation_space = gymnasium.spaces.Box(0, 1000, (1, ), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.n = np.zeros(num_envs)

    def reset(self, *, seed=None, options=None):
        self.n[:] = 0
        return self.n[:, None].astype(np.float32), {}

    def step(self, actions):
        self.n = np.where(self.n == 9, 0, self.n + 1)
        return self.n[:, None].astype(np.float32), self.n * actions, self.n == 9, np.zeros(self.num_envs, bool), {}


def adapter(make, count=3, vector=SerialVectorEnv, **options):
    return GymVectorEnvironment(vector([make] * count, **options), seed=3)


def recorded(env, steps=60, max_bytes=1e6, callback=lambda env, step: None):
    """Return the recorder of ``env`` after random steps."""
    recorder, generator = Recorder(env, max_bytes), torch.Generator().manual_seed(0)
    env.reset()
    for step in range(steps):
        env.step(torch.randint(2, (env.batch_size, ), generator=generator))
        callback(env, step)
    return recorder


@pytest.mark.parametrize('steps, expected', [(60, 20), (27, 4), (24, 1)])
def test_a_recording_replays_in_another_environment(steps, expected):
    recording = recorded(adapter(Walk), steps).latest()
    assert len(recording.steps) >= expected and recording.is_complete == (steps == 60)
    assert replay(adapter(Walk, count=1), recording) == ''


def test_a_cache_of_the_class_is_no_state():
    recording = recorded(adapter(Cached)).latest()
    Cached.images.clear()  # as in another process
    assert replay(adapter(Cached, count=1), recording) == ''


@pytest.mark.processes
def test_an_environment_in_a_worker_is_recorded():
    env = adapter(Walk, vector=ProcessVectorEnv, envs_per_worker=2)
    assert replay(adapter(Walk, count=1), recorded(env).latest()) == ''
    env.close()


def test_a_natively_batched_environment_is_recorded_with_all_rows():
    recording = recorded(GymVectorEnvironment(Batch(3))).latest()
    assert len(recording.steps[0][1].reward) == 3
    assert replay(GymVectorEnvironment(Batch(3)), recording) == ''


@pytest.mark.parametrize('make, message', [
    (ByNumber, 'in another process the observation differs'),
    (Level, 'with resets = 9, expected Level with resets = 1'),
    (SlowLevels, "with progress = [['episodes', 9], ['levels', [0, 1]]], expected SlowLevels with progress"),
    (SharedObject, 'with scores = [0.0, 9.0] of SharedObject with difficulty.level = 10, expected SharedObject'),
    (Forgetful, 'in another process the observation differs')])
def test_state_outside_of_the_saved_state_is_found(make, message, monkeypatch):
    monkeypatch.setattr(ByNumber, 'worlds', {})
    monkeypatch.setattr(Level, 'resets', 0)
    monkeypatch.setattr(SlowLevels, 'progress', {'episodes': 0, 'levels': {0, 1}})
    recording = recorded(adapter(make)).latest()
    ByNumber.worlds.clear()  # as in another process
    Level.resets = 0
    SlowLevels.progress['episodes'] = 0
    SharedObject.scores[1] = 0.0
    assert message in replay(adapter(make, count=1), recording)


def test_a_recorded_environment_begins_an_episode():
    recording = recorded(adapter(lambda: CountEnvOfOthers(30)), 250).latest()
    assert recording.is_complete and any(step[1].terminated[0] or step[1].truncated[0] for step in recording.steps)


class CountEnvOfOthers(CountEnv):
    """The same in a module that alfx does not know."""


def test_episodes_that_wrappers_end_are_recorded():
    def wrapped(count):
        return alf_wrappers.TimeLimit(adapter(lambda: CountEnvOfOthers(1000), count), 5)

    env, other = wrapped(2), wrapped(1)
    recorder = Recorder(gym_environments(env)[0], 1e6)
    for _ in range(60):
        env.step(torch.zeros(2, dtype=torch.int64))
    assert any(step is None for step in recorder.latest().steps)
    assert replay(gym_environments(other)[0], recorder.latest()) == ''


def test_known_and_large_states_are_not_recorded():
    recorder = recorded(adapter(lambda: CorridorEnv(5)))
    assert recorder.num_bytes > 0 and recorder.latest() is None
    env = adapter(Walk)
    recorder = recorded(env, max_bytes=100)
    assert recorder.num_bytes > 300 and recorder.latest() is None and env.recorder is None


def test_a_recording_with_a_restart_is_dropped():
    class Failing(Walk):
        calls = 0

        def step(self, action):
            type(self).calls += 1
            if type(self).calls == 25:
                raise RuntimeError
            return super().step(action)

    recorder = recorded(adapter(Failing, count=1, max_restarts=1), steps=32)
    assert recorder.latest() is None
    Failing.calls = 0


def test_a_temporary_folder_of_the_process_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr('tempfile.gettempdir', lambda: str(tmp_path))
    folders = ['same']

    class Files(Walk):
        def __init__(self):
            self.folder = str(tmp_path / folders[0] / 'file')

    recording = recorded(adapter(Files)).latest()
    assert replay(adapter(Files, count=1), recording) == ''
    folders[0] = 'new'
    assert "it refers to 'same', a file or folder of the process" in replay(adapter(Files, count=1), recording)


def test_a_file_of_an_external_program_is_found_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr('tempfile.gettempdir', lambda: '/elsewhere')
    names = itertools.count()

    class File(Walk):
        def __init__(self):
            self.path = str(tmp_path / str(next(names)))
            open(self.path, 'w').close()

        def step(self, action):
            with open(self.path, 'a') as file:
                file.write('.')
            return super().step(action)

    recording = recorded(adapter(File)).latest()
    before = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert "it refers to '" in replay(adapter(File, count=1), recording)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())][:2] == before[:2]


class Counting(Walk):
    """A walk whose class counts its episodes, with ``length`` steps each."""

    length = 7

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, self.n >= self.length, info


@pytest.mark.parametrize('length', [7, 15, 31, 63, 23, 24])
def test_some_recording_begins_in_the_middle_of_an_episode(length, monkeypatch):
    monkeypatch.setattr(Counting, 'length', length)
    env = adapter(Counting, count=1)
    recorder, ends = Recorder(env, 1e9), []
    env.reset()
    for _ in range(500):
        env.step(torch.zeros(1, dtype=torch.int64))
        if recorder._current is not None and not recorder._current.steps:
            ends.append(env.gym.envs[0].n in (0, length))
    assert len(ends) >= 4 and not all(ends)


def test_environments_of_gymnasium_are_found_inside_of_others():
    first, second = adapter(Walk, 1), adapter(Walk, 2)
    assert gym_environments(alf_wrappers.TimeLimit(first, 3)) == [first]
    assert gym_environments(BatchEnvironmentWrapper([first, second])) == [first, second]
    assert gym_environments(None) == []
