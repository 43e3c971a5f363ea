"""Errors, restarts, seeds and processes of the supervised vector environments."""
import contextlib
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections import namedtuple
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from helpers.gym_environments import ChainEnv, CountEnv, DictEnv, RaisingEnv

from alfx.environments import suite_gym
from alfx.environments.environment_errors import EnvironmentLoadError, EnvironmentStepError, UnsupportedOperationError
from alfx.environments.environment_group import EnvironmentGroup
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.seeding import environment_seeds
from alfx.environments.vector_env import SerialVectorEnv
from alfx.gin_utils import ConfError
from alfx.utils import processes

BOTH = pytest.mark.parametrize('make', [SerialVectorEnv, partial(ProcessVectorEnv, envs_per_worker=2)],
                               ids=['serial', 'processes'])


def raising(where: str, after: int = 2, count: int = 3):
    """Return constructors of environments, the second of which raises an error."""
    return [partial(RaisingEnv, where, after) if i == 1 else partial(CountEnv, 3) for i in range(count)]


class SendingEnv(gymnasium.Env):
    """An environment that returns the given result at its second step."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2, ))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, sent=None):
        self._sent, self._steps = {} if sent is None else sent, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        result = {'observation': np.zeros(2, np.float32), 'reward': 0.0, 'terminated': False, 'truncated': False}
        if self._steps == 2 and not isinstance(self._sent, dict):
            return self._sent
        return *(result | (self._sent if self._steps == 2 else {})).values(), {}


class SendsSeveral(SendingEnv):
    """An environment with two rewards."""

    reward_space = gymnasium.spaces.Box(-1, 1, (2, ))

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.ones(2) if self._steps == 1 else reward, *rest


class SendsFields(SendingEnv):
    """An environment whose observation has fields, one of which is too small after a step."""

    observation_space = gymnasium.spaces.Dict(small=gymnasium.spaces.Box(-1, 1, (2, )),
                                              number=gymnasium.spaces.Discrete(3))

    def reset(self, *, seed=None, options=None):
        return {'small': np.zeros(2, np.float32), 'number': 1}, {}

    def step(self, action):
        return {'small': np.zeros(1, np.float32), 'number': 1}, 0.0, False, False, {}


class GlobalDice(gymnasium.Env):
    """An environment that observes draws from global generators: numpy, Python, torch, and numpy in the constructor."""

    observation_space = gymnasium.spaces.Box(0, 1, (4, ), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.level = np.random.rand()  # noqa: NPY002

    def reset(self, *, seed=None, options=None):
        return self.draw(), {}

    def draw(self):
        return np.array([self.level, np.random.rand(), random.random(), torch.rand(1).item()])  # noqa: NPY002

    def step(self, action):
        return self.draw(), 0.0, False, False, {}


OWN_GENERATOR, OWN_RANDOM = np.random.default_rng(), random.Random()


class OwnDice(GlobalDice):
    """An environment that draws from generators of its module, and ignores the seed of ``reset``."""

    observation_space = gymnasium.spaces.Box(0, 1, (3, ), np.float64)

    def __init__(self):
        pass

    def draw(self):
        return np.array([OWN_GENERATOR.random(), OWN_RANDOM.random(), self.np_random.random()])


dice = types.ModuleType('dice')
dice.GENERATOR = np.random.default_rng()


class ClassDice(OwnDice):
    """An environment that draws from generators of its class and of a module that it imports."""

    generator = np.random.default_rng()

    def draw(self):
        return np.array([self.generator.random(), dice.GENERATOR.random(), self.np_random.random()])


class InstanceDice(OwnDice):
    """An environment that creates generators and a space, one of the generators with a seed."""

    def __init__(self):
        self.generator, self.seeded = np.random.default_rng(), np.random.default_rng(3)
        self.space = gymnasium.spaces.Box(0, 1)

    def draw(self):
        return np.array([self.generator.random(), self.seeded.random(), self.space.sample().item()])


class SamplingItsSpace(gymnasium.Env):
    """An environment that samples its own spaces, which wrappers replace."""

    observation_space = gymnasium.spaces.Box(0, 1, (2, ), np.float32)
    action_space = gymnasium.spaces.Box(-2, 2, (1, ), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.append(self.observation_space.sample()[:1], self.action_space.sample()), {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


def steps(env, count):
    """Return the truncations of ``count`` steps."""
    return np.array([env.step(np.zeros(env.num_envs, int))[3] for _ in range(count)])


class TestErrors:

    @BOTH
    @pytest.mark.parametrize('where', ['step', 'reset'])
    def test_an_error_names_the_environment_and_carries_its_own_traceback(self, make, where):
        env = make(raising(where, after=0 if where == 'reset' else 2))
        with pytest.raises(EnvironmentStepError, match=f'boom in {where}') as caught:
            env.reset(seed=0)
            steps(env, 5)
        error = caught.value
        assert error.index == 1 and error.name == 'CountEnv' and error.during == f'{where}()'
        assert 'gym_environments.py' in error.details and f"raise RuntimeError('boom in {where}')" in error.details
        assert 'environment_group.py' not in error.details
        assert 'max_restarts' in str(error)
        env.close()

    @pytest.mark.parametrize('sent, message', [
        ({'reward': float('nan')}, 'the reward of step 2 of its episode is nan, expected a finite number'),
        ({'reward': np.float32('inf')}, 'the reward of step 2 of its episode is'),
        ({'reward': None}, 'the reward of step 2 of its episode is None, expected a number'),
        ({'reward': '1.0'}, "the reward of step 2 of its episode is '1.0', expected a number"),
        ({'reward': np.zeros(2)}, 'the reward of step 2 of its episode is array.*, expected a number'),
        ({'observation': None}, r'observation: expected a sample .*, but step\(\) returned None'),
        ({'observation': np.zeros(3)}, r'observation: expected a sample .*, but step\(\) returned shape \(3,\)'),
        ({'observation': np.zeros(1)}, r'observation: expected a sample .*, but step\(\) returned shape \(1,\)'),
        ({'observation': 0.0}, r'observation: expected a sample .*, but step\(\) returned shape \(\)'),
        ((np.zeros(2), 0.0, False, {}), 'it returned 4 values, expected 5: observation, reward, terminated, '
         'truncated, info\n.*old interface'),
        (np.zeros(5), 'it returned a ndarray, expected a tuple of 5: observation, reward, terminated, truncated'),
        (7, 'it returned a int, expected a tuple of 5'),
        ({'observation': [0.0, np.nan]}, 'observation of step 2 of its episode contains NaN'),
        ({'terminated': 'no'}, "terminated of step 2 of its episode is 'no', expected True or False"),
        ({'truncated': None}, 'truncated of step 2 of its episode is None, expected True or False'),
    ])
    def test_non_finite_values_name_the_environment_and_the_step(self, sent, message):
        env = SerialVectorEnv([SendingEnv, partial(SendingEnv, sent)])
        env.reset(seed=0)
        steps(env, 1)
        with pytest.raises(EnvironmentStepError, match=f"environment 1 of 'SendingEnv' failed in step.*{message}"):
            steps(env, 1)

    def test_a_reward_of_the_wrong_size_raises(self):
        for sent, shown in ((1.0, '1.0'), (np.zeros(3), r'array\(.*'), (None, 'None')):
            env = SerialVectorEnv([partial(SendsSeveral, {'reward': sent})])
            env.reset(seed=0)
            steps(env, 1)
            with pytest.raises(EnvironmentStepError, match=f'of step 2 of its episode is {shown}, expected 2 nu'):
                steps(env, 1)

    def test_a_field_of_another_shape_is_not_stretched_over_its_row(self):
        env = SerialVectorEnv([SendsFields])
        env.reset(seed=0)
        with pytest.raises(EnvironmentStepError, match=r'small.*: expected a sample .*, but step\(\) returned '
                           r'shape \(1,\)'):
            steps(env, 1)

    def test_numpy_flags_and_rewards_keep_their_values(self):
        env = SerialVectorEnv([partial(SendingEnv, {'reward': np.float32(2), 'terminated': np.True_, 'truncated': 0,
                                                    'observation': [0.0, np.inf]})])
        env.reset(seed=0)
        steps(env, 1)
        _, reward, terminated, truncated, _ = env.step(np.zeros(1, int))
        assert reward[0] == 2.0 and terminated[0] and not truncated[0]

    @BOTH
    def test_an_error_in_a_constructor_names_the_environment(self, make):
        with pytest.raises(EnvironmentStepError, match='boom in the constructor') as caught:
            make([CountEnv, CountEnv, partial(RaisingEnv, 'init')])
        assert caught.value.index == 2 and caught.value.during == 'its constructor'

    @BOTH
    def test_different_spaces_are_rejected(self, make):
        with pytest.raises(EnvironmentLoadError, match='environment 1 of .* has different spaces'):
            make([partial(ChainEnv, 3), partial(ChainEnv, 4)])

    def test_objects_that_are_no_gymnasium_environments_are_rejected(self):
        with pytest.raises(EnvironmentLoadError, match='returned a dict, expected a gymnasium.Env'):
            SerialVectorEnv([dict])

    def test_an_observation_of_another_shape_than_its_space_is_an_error(self):
        class Wrong(ChainEnv):

            def _observe(self):
                return np.zeros(1, np.float32)

        env = SerialVectorEnv([Wrong])
        with pytest.raises(EnvironmentStepError, match=r'reset\(\) returned shape \(1,\)') as caught:
            env.reset()
        assert str(caught.value).endswith('\n  change the space, or what the environment returns')  # no restart helps

    def test_a_process_that_is_killed_is_reported_with_how_it_ended(self):
        env = ProcessVectorEnv(raising('kill'))
        env.reset(seed=0)
        with pytest.raises(EnvironmentStepError, match=r'killed by SIGKILL \(often out of memory\)') as caught:
            steps(env, 5)
        assert caught.value.index == 1
        with pytest.raises(UnsupportedOperationError, match='have been closed'):
            env.step(np.zeros(3, int))

    def test_an_unresponsive_process_is_reported(self):
        env = ProcessVectorEnv(raising('hang'), timeout=60)
        env.reset(seed=0)
        for worker in env._workers:
            worker._timeout = 0.3
        with pytest.raises(EnvironmentStepError, match=r'did not answer step\(\) within 0\.3 s'):
            steps(env, 5)

    def test_errors_are_passed_between_processes_unchanged(self):
        error = EnvironmentStepError(3, 'Walker', 'step()', 'ValueError: x', 'traceback', 'hint')
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error) and copy.index == 3


class TestRestarts:

    @pytest.mark.parametrize('make, where', [
        (SerialVectorEnv, 'step'), (partial(ProcessVectorEnv, envs_per_worker=2), 'step'),
        (partial(ProcessVectorEnv, envs_per_worker=2), 'kill')])
    def test_an_environment_that_fails_is_truncated_and_then_reset(self, make, where):
        count = 3 if where == 'step' else 2
        env = make(raising(where, count=count), max_restarts=1)
        env.reset(seed=0)
        env.step(np.zeros(count, int))
        last_known, *_ = env.step(np.zeros(count, int))
        observation, reward, terminated, truncated, _ = env.step(np.zeros(count, int))
        np.testing.assert_array_equal(observation[1], last_known[1])
        assert reward[1] == 0 and not terminated[1] and truncated[1]
        assert env.restarts.tolist() == ([0, 1, 0] if where == 'step' else [1, 1])
        observation, reward, _, truncated, _ = env.step(np.zeros(count, int))
        assert observation[1, :3].tolist() == [1, 0, -1] and reward[1] == 0 and not truncated[1]
        with pytest.raises(EnvironmentStepError, match='boom in step' if where == 'step' else 'SIGKILL'):
            steps(env, 8)
        env.close()

    def test_resets_requested_before_a_process_is_killed_still_happen(self):
        fns = [partial(RaisingEnv, 'kill', 4, length=4), partial(CountEnv, 3)]
        env = ProcessVectorEnv(fns, envs_per_worker=2, max_restarts=1)
        env.reset(seed=0)
        steps(env, 3)
        assert steps(env, 1)[0].tolist() == [False, True]
        observation, _, _, truncated, _ = env.step(np.zeros(2, int))
        assert truncated.tolist() == [True, False] and observation[1, 1] == 0
        observation, _, _, truncated, _ = env.step(np.zeros(2, int))
        assert not truncated.any() and observation[:, 1].tolist() == [0, 1]
        env.close()

    @BOTH
    def test_an_environment_that_fails_in_reset_is_recreated_and_reset(self, make):
        env = make(raising('reset', after=1), max_restarts=2)
        env.reset(seed=0)
        truncated = steps(env, 12)
        assert env.restarts[1] >= 1 and truncated[:, 1].any()
        env.close()

    @BOTH
    def test_restarts_are_deterministic(self, make):
        sequences = []
        for _ in range(2):
            env = make(raising('step'), max_restarts=3)
            env.reset(seed=4)
            sequences.append(np.array([env.step(np.zeros(3, int))[0] for _ in range(9)]))
            env.close()
        np.testing.assert_array_equal(*sequences)

    def test_both_kinds_give_the_same_sequence_through_a_restart(self):
        sequences = []
        for make in (SerialVectorEnv, ProcessVectorEnv):
            env = make(raising('step'), max_restarts=3)
            env.reset(seed=[5, 6, 7])
            sequences.append(np.array([env.step(np.zeros(3, int))[0] for _ in range(9)]))
            env.close()
        np.testing.assert_array_equal(*sequences)


class TestSeeds:

    def test_environment_seeds_depend_on_the_index_and_not_on_the_batch(self):
        """Give environment i the same seed in any batch, and a different seed from its neighbors."""
        few, many = environment_seeds(3, 2), environment_seeds(3, 50)
        assert many[:2] == few and len(set(many)) == 50
        assert not set(many) & set(environment_seeds(4, 50))
        assert all(0 <= seed < 2**31 for seed in many)
        assert environment_seeds(None, 2) == [None, None]

    @BOTH
    def test_action_spaces_are_seeded_inside_and_outside(self, make):
        class Sampling(CountEnv):

            def step(self, action):
                return super().step(self.action_space.sample())

        samples = []
        for _ in range(2):
            env = make([Sampling] * 2)
            env.reset(seed=[1, 2])
            samples.append([env.step(np.zeros(2, int))[0][:, 2].tolist() for _ in range(8)]
                           + [env.action_space.sample().tolist() for _ in range(4)])
            env.close()
        assert samples[0] == samples[1]
        assert [row[0] for row in samples[0][:8]] != [row[1] for row in samples[0][:8]]

    @pytest.mark.processes
    def test_global_generators_differ_between_processes_and_follow_the_seed(self):
        def play(seed, count=2):
            np.random.seed(seed)  # noqa: NPY002
            env = ProcessVectorEnv([GlobalDice] * 3)
            first, _ = env.reset(seed=None if seed is None else environment_seeds(seed, 3))
            later = [env.step(np.zeros(3, int))[0] for _ in range(count)]
            state = env.get_states()
            second = env.step(np.zeros(3, int))[0]
            env.set_states(state)
            assert np.array_equal(second, env.step(np.zeros(3, int))[0])
            env.close()
            return np.stack([first, *later])

        played = play(1)
        assert len(np.unique(played[0])) == played[0].size and np.array_equal(played, play(1))
        assert not (played == play(2)).any()
        unseeded = play(None)
        assert len(np.unique(unseeded[0])) == played[0].size

    @pytest.mark.processes
    @pytest.mark.parametrize('make', [OwnDice, ClassDice])
    def test_generators_of_modules_and_classes_are_seeded(self, make):
        def play(seed):
            env = ProcessVectorEnv([make] * 3)
            first, _ = env.reset(seed=environment_seeds(seed, 3))
            second = env.step(np.zeros(3, int))[0]
            env.close()
            return np.stack([first, second])

        played = play(1)
        assert len(np.unique(played)) == played.size and np.array_equal(played, play(1))
        assert not (played == play(2)).any()

    def test_environments_that_ignore_seeds_are_reproducible(self):
        def play(make, seed):
            env = SerialVectorEnv([make] * 2)
            found = env.reset(seed=environment_seeds(seed, 2))[0]
            return np.stack([found, env.step(np.zeros((2, *env.single_action_space.shape), int))[0]])

        def sampling():
            env = gymnasium.wrappers.RescaleAction(SamplingItsSpace(), -1, 1)
            return gymnasium.wrappers.RescaleObservation(env, np.float32(-1), np.float32(1))

        for make, columns in (OwnDice, slice(2, 3)), (sampling, slice(None)), (InstanceDice, [0, 2]):
            played = play(make, 1)[..., columns]
            assert np.array_equal(played, play(make, 1)[..., columns])
            assert not (played == play(make, 2)[..., columns]).any() and not (played[:, 0] == played[:, 1]).any()

    def test_a_generator_with_a_seed_of_the_environment_keeps_it(self):
        env = SerialVectorEnv([InstanceDice] * 2)
        found = env.reset(seed=environment_seeds(1, 2))[0]
        assert (found[:, 1] == np.random.default_rng(3).random()).all()

    @BOTH
    def test_a_wrong_number_of_seeds_and_a_wrong_mask_are_rejected(self, make):
        env = make([CountEnv] * 2)
        with pytest.raises(ValueError, match='expected 2 seeds, found 3'):
            env.reset(seed=[1, 2, 3])
        with pytest.raises(ValueError, match=r"expected bool \(2,\), found int64 \(2,\)"):
            env.reset(options={'reset_mask': np.array([0, 1])})
        env.close()


class TestProcesses:

    def test_no_process_is_left_after_close(self):
        env = ProcessVectorEnv([CountEnv] * 3, envs_per_worker=2)
        pids = env.worker_pids
        assert len(pids) == 2
        env.reset()
        env.close()
        env.close()
        assert not any(_runs(pid) for pid in pids)

    @pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_environments_survive_a_signal_to_all_processes_of_a_run(self, number):
        """Ignore the signal that a scheduler sends before it ends a job, so that the run can write its checkpoint."""
        env = ProcessVectorEnv([CountEnv] * 2)
        env.reset(seed=0)
        for pid in env.worker_pids:
            os.kill(pid, number)
        steps(env, 3)
        pids = env.worker_pids
        env.close()
        assert not any(_runs(pid) for pid in pids)

    def test_no_process_is_left_after_an_error_or_when_the_object_is_dropped(self):
        env = ProcessVectorEnv(raising('step'))
        dropped = ProcessVectorEnv([CountEnv])
        pids = env.worker_pids + dropped.worker_pids
        env.reset(seed=0)
        with pytest.raises(EnvironmentStepError):
            steps(env, 5)
        del dropped
        assert not any(_runs(pid) for pid in pids)

    def test_no_process_is_left_when_a_constructor_fails_in_one_of_them(self):
        before = set(multiprocessing.active_children())
        with pytest.raises(EnvironmentStepError):
            ProcessVectorEnv([CountEnv, partial(RaisingEnv, 'init')])
        assert set(multiprocessing.active_children()) == before

    @pytest.mark.parametrize('make, message', [
        (SerialVectorEnv, r'environment 1 of .CountEnv. in step\(\) .*nonparallel'),
        (ProcessVectorEnv, r'environment 1 of .CountEnv. in step\(\) .*worker_timeout'),
        (partial(ProcessVectorEnv, envs_per_worker=2), r'one of environments 0 to 1 of .CountEnv. in step\(\) ')])
    def test_an_unresponsive_environment_is_named_and_can_be_interrupted(self, make, message, monkeypatch, caplog):
        monkeypatch.setattr(processes, 'PATIENCE_SECONDS', 0.1)
        monkeypatch.setattr(processes, 'GRACE_SECONDS', 0.1)
        env = make(raising('hang'))
        env.reset(seed=0)

        def interrupt_on_request():
            deadline = time.monotonic() + 30
            while not caplog.messages and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGALRM)

        signal.signal(signal.SIGALRM, _interrupt)
        thread = threading.Thread(target=interrupt_on_request)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            steps(env, 60)
        thread.join()
        env.close()
        assert re.match(message, caplog.messages[0]) and re.search(r'since \d\d:\d\d:\d\d, for', caplog.messages[0])

    def test_slow_environments_are_not_reported_as_hanging(self, monkeypatch, caplog):
        monkeypatch.setattr(processes, 'PATIENCE_SECONDS', 1.6)
        env = SerialVectorEnv([Slow] * 8)
        env.reset(seed=0)
        steps(env, 1)
        assert not caplog.messages

    def test_an_interrupted_step_must_be_followed_by_a_reset(self, monkeypatch):
        monkeypatch.setattr(processes, 'GRACE_SECONDS', 0.3)
        env = ProcessVectorEnv(raising('hang'))
        env.reset(seed=0)
        steps(env, 2)
        signal.signal(signal.SIGALRM, _interrupt)
        pids = env.worker_pids
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            steps(env, 1)
        assert env.get_states() is None
        with pytest.raises(RuntimeError, match='interrupted'):
            steps(env, 1)
        env.close()
        assert not any(_runs(pid) for pid in pids)

    def test_observations_that_do_not_fit_into_shared_memory_are_rejected(self, monkeypatch):
        usage = namedtuple('usage', 'total used free')
        monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage(0, 0, 8))
        with pytest.raises(ConfError, match='the exchange with 2 environments needs(.|\n)*MiB left'):
            ProcessVectorEnv([CountEnv] * 2)

    def test_environments_continue_after_an_interrupted_step_and_a_reset(self):
        env = ProcessVectorEnv([Slow] * 2)
        env.reset(seed=0)
        signal.signal(signal.SIGALRM, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            steps(env, 1)
        observation, _ = env.reset(seed=0)
        assert observation[:, 1].tolist() == [0, 0]
        env.close()

    def test_workers_end_when_the_parent_is_killed(self, repository):
        program = textwrap.dedent('''
            import os, signal
            from alfx.environments.process_vector_env import ProcessVectorEnv
            from helpers.gym_environments import CountEnv
            env = ProcessVectorEnv([CountEnv] * 2)
            os.write(1, repr(env.worker_pids).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        ''')
        out = subprocess.run([sys.executable, '-c', program], capture_output=True, cwd=repository, timeout=60,
                             env={**os.environ, 'PYTHONPATH': os.pathsep.join([repository, *sys.path])})
        pids = eval(out.stdout)
        deadline = time.monotonic() + 10
        while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(_runs(pid) for pid in pids)

    def test_methods_and_rendering_run_in_the_workers(self):
        env = ProcessVectorEnv([partial(ChainEnv, 3, render_mode='rgb_array')] * 3, envs_per_worker=2)
        env.reset(seed=0)
        assert env.render_first().shape == (1, 3, 3)
        assert len(env.render()) == 3
        assert env.call('render_mode') == ('rgb_array', ) * 3
        with pytest.raises(EnvironmentStepError, match='no_such'):
            env.call('no_such')


class Slow(CountEnv):
    """An environment whose steps take half a second."""

    def step(self, action):
        time.sleep(0.5)
        return super().step(action)


def _interrupt(*_):
    raise KeyboardInterrupt


def _runs(pid):
    """Return whether the process exists and is not a zombie, which only waits for its parent."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


class TestInfos:

    @BOTH
    def test_only_the_requested_infos_are_stored(self, make):
        env = make([CountEnv] * 2)
        assert 'step' in env.reset(seed=0)[1]
        env.info_keys = ('nothing', )
        assert 'step' not in env.step(np.zeros(2, int))[4]
        env.info_keys = ()
        assert env.step(np.zeros(2, int))[4] == {}
        env.close()


def test_environments_get_actions_of_the_kind_that_their_space_contains():
    class Picky(DictEnv):

        def step(self, action):
            assert isinstance(action, dict) and isinstance(action['force'], tuple)
            assert action['force'][0].flags.writeable
            action['force'][0][:] = 100  # its own copy
            return super().step({**action, 'force': (np.zeros(2), action['force'][1])})

    env = SerialVectorEnv([Picky] * 2)
    env.reset(seed=0)
    env.step(env.action_space.sample())


def test_a_group_without_restarts_left_reports_their_number():
    group = EnvironmentGroup([partial(RaisingEnv, 'reset', 0)], max_restarts=2)
    vector = SerialVectorEnv([CountEnv])
    with pytest.raises(EnvironmentStepError, match='it was restarted 2 times'):
        group.reset([0], [1], None, vector._buffers())


def test_the_gymnasium_api_of_vector_environments_is_kept():
    env = SerialVectorEnv([CountEnv] * 2)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    observation, info = env.reset(seed=3)
    assert env.observation_space.contains(observation.astype(np.float64)) and info['_step'].all()
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert observation.shape == (2, 4) and reward.shape == terminated.shape == truncated.shape == (2, )


class LazyEnv(CountEnv):
    """Creates an environment inside itself at its first reset."""

    inner = None

    def reset(self, *, seed=None, options=None):
        self.inner = self.inner or CountEnv(3)
        self.inner.reset()
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.inner.step(action)
        return super().step(action)


@BOTH
def test_parts_created_in_reset_are_restored_before_the_first_reset(make):
    with contextlib.closing(make([partial(LazyEnv, 9)] * 2)) as first:
        first.reset()
        first.step(np.zeros(2, int))
        states, expected = first.get_states(), first.step(np.zeros(2, int))[0]
    with contextlib.closing(make([partial(LazyEnv, 9)] * 2)) as second:
        second.set_states(states)
        np.testing.assert_array_equal(second.step(np.zeros(2, int))[0], expected)


def test_the_same_object_as_two_environments_is_rejected():
    env = CountEnv(3)
    with pytest.raises(EnvironmentLoadError, match='environment 2 .* returned the same object as the first'):
        SerialVectorEnv([lambda: env, partial(CountEnv, 3), lambda: env])


@pytest.mark.processes
def test_an_error_is_raised_where_others_reset_in_the_same_step():
    constructors = [partial(CountEnv, 2), partial(RaisingEnv, 'step', 3, 9)]
    vector_env = gymnasium.vector.AsyncVectorEnv(constructors, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
    env = suite_gym.wrap_env(vector_env)
    env.reset()
    with pytest.raises(RuntimeError, match='boom in step'):
        for _ in range(4):
            env.step(torch.zeros(2, dtype=torch.int64))
