"""State of the environments in checkpoints: saving, verification in another process, and restoring."""
import importlib
import logging
import pickle
import re
import signal
import sys
import textwrap
import time

import gymnasium
import numpy as np
import pytest
import torch
from helpers.gym_environments import CountEnv
from helpers.trainer_fakes import WalkEnv, make_config

from alfx.environments import suite_gym
from alfx.environments.gym_vector_environment import GymVectorEnvironment
from alfx.environments.vector_env import SerialVectorEnv
from alfx.trainers import environment_state
from alfx.trainers.environment_state import EnvironmentState

MODULE = '''
    import ctypes
    import time

    import gymnasium
    from helpers.gym_environments import CountEnv

    class Sound(CountEnv):
        clock = 0

        def __init__(self):
            super().__init__(5)

        def step(self, action):
            self.clock += 1
            return super().step(action)

    class Native(Sound):
        """Its world is known by its address."""

        def __init__(self):
            super().__init__()
            self.world = ctypes.addressof(worlds.setdefault(len(worlds), ctypes.c_double(0)))

        def step(self, action):
            ctypes.c_double.from_address(self.world).value += 1
            return super().step(action)

    worlds = {}

    class Silent(Sound):
        """It ends the process without an error."""

        def set_state(self, state):
            import os
            os._exit(0)

        def get_state(self):
            return 0

    for name in 'Sound', 'Native', 'Silent':
        gymnasium.register(f'{name}State-v0', globals()[name])
'''
CONF = '''
    import my_states
    create_environment.env_name = '{name}State-v0'
    create_environment.num_parallel_environments = 3
    TrainerConfig.algorithm_ctor = @SmallPolicy
'''


class Foreign(CountEnv):
    """An environment that alfx does not know."""

    def __init__(self, **attributes):
        super().__init__(5)
        vars(self).update(attributes)


def foreign(**attributes):
    return GymVectorEnvironment(SerialVectorEnv([lambda: Foreign(**attributes)] * 3), seed=0)


def step(env, count):
    for _ in range(count):
        env.step(torch.zeros(env.batch_size, dtype=torch.int64))


def saved_after(env, config, steps=60):
    """Return the state of a run after some steps, and its saved state."""
    state = EnvironmentState(env, config)
    step(env, steps)
    return state, state.get()


def test_known_environments_are_saved_and_restored_without_verification(tmp_path, caplog):
    for make in lambda: suite_gym.load('CartPole-v1', batch_size=2), WalkEnv:
        env, other, config = make(), make(), make_config(tmp_path)
        state, saved = saved_after(env, config)
        state.finish()
        assert EnvironmentState(other, config).restore(saved)
        step(env, 1)
        step(other, 1)
        assert torch.equal(env.current_time_step().observation, other.current_time_step().observation)
    assert 'verif' not in caplog.text


def test_the_state_can_be_turned_off(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        config = make_config(tmp_path, save_environment_state=False)
        assert saved_after(WalkEnv(), config)[1] is None
        _, saved = saved_after(WalkEnv(), make_config(tmp_path))
        assert not EnvironmentState(WalkEnv(), config).restore(saved)
    assert 'save_environment_state is False): a resumed run starts new episodes' in caplog.text


@pytest.mark.parametrize('env, size', [(lambda: foreign(part=np.random.default_rng(0).bytes(2**20)), r'3\S* MiB'),
                                       (WalkEnv, r'0\.00\d+ MiB')])
def test_a_large_state_is_not_saved_and_this_is_logged_once(tmp_path, caplog, env, size):
    with caplog.at_level(logging.INFO):
        state, saved = saved_after(env(), make_config(tmp_path, environment_checkpoint_megabytes=0.0001))
        assert saved is None and state.get() is None
    expected = f'it takes {size}, more than.*environment_checkpoint_megabytes = 0.0001'
    assert len([record for record in caplog.records if 'new episodes' in record.message]) == 1
    assert re.search(expected, caplog.text)


@pytest.mark.parametrize('error', [NotImplementedError('a world'), RuntimeError('a node')])
def test_a_state_that_cannot_be_pickled_stops_nothing(tmp_path, caplog, error):
    class Part:
        def __reduce__(self):
            raise error

    with caplog.at_level(logging.INFO):
        assert saved_after(foreign(part=Part()), make_config(tmp_path))[1] is None
    assert 'cannot be saved: a resumed run starts new episodes' in caplog.text


def test_states_without_evidence_are_not_restored(tmp_path, caplog):
    config = make_config(tmp_path)
    _, early = saved_after(foreign(), config, steps=3)
    state, saved = saved_after(foreign(), config)
    assert state._recorders and early and saved
    with caplog.at_level(logging.INFO):
        for wrong in early, saved, {'format': 1}, b'damaged', pickle.dumps((b'', False, [])):
            assert not EnvironmentState(foreign(), config).restore(wrong)
    for reason in ('before it could be verified', 'the run has no conf file', 'an earlier version of alfx'):
        assert reason in caplog.text


class TestVerification:
    """Each test starts another process."""

    pytestmark = pytest.mark.processes

    @pytest.fixture
    def make_state(self, tmp_path, monkeypatch):
        (tmp_path / 'my_states.py').write_text(textwrap.dedent(MODULE))
        (tmp_path / 'conf').mkdir()
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.import_module('my_states')
        yield lambda name: self._make(tmp_path, name)
        for name in 'Sound', 'Native', 'Silent':
            gymnasium.registry.pop(f'{name}State-v0')
        del sys.modules['my_states']

    def _make(self, folder, name):
        text = CONF.format(name=name).replace('import my_states', 'import my_states\nimport helpers.trainer_fakes')
        (folder / 'conf' / 'config.gin').write_text('\n'.join(line.strip() for line in text.splitlines()))
        env = suite_gym.load(f'{name}State-v0', batch_size=3)
        env.seed(0)
        return env, make_config(folder)

    def test_a_verified_state_is_verified_again_when_the_run_resumes(self, make_state, caplog):
        env, config = make_state('Sound')
        state, saved = saved_after(env, config)
        with caplog.at_level(logging.INFO):
            state.advance()
            assert state._process is not None  # in the background, while the run continues
            step(env, 3)
            state.finish()
            state.finish()  # does not verify again
        assert caplog.text.count('the state of the environments is verified') == 1 and env.recorder is not None
        step(env, 1)
        other = make_state('Sound')[0]
        resumed = EnvironmentState(other, config)
        with caplog.at_level(logging.INFO):
            assert resumed.restore(state.get()) and resumed._recorders
        assert caplog.text.count('the state of the environments is verified') == 2
        assert other.gym.call('clock') == env.gym.call('clock')
        assert other.gym.envs[0].unwrapped.clock > 40

    def test_an_unverified_state_is_verified_when_the_run_resumes(self, make_state):
        env, config = make_state('Sound')
        _, saved = saved_after(env, config)
        other, _ = make_state('Sound')
        resumed = EnvironmentState(other, config)
        assert resumed.restore(saved) and resumed._recorders

    @pytest.mark.parametrize('name, reason', [('Native', 'was killed by SIGSEGV'),
                                              ('Silent', 'ended with exit code 0')])
    def test_a_crash_means_new_episodes_and_is_remembered(self, make_state, caplog, name, reason):
        env, config = make_state(name)
        state, _ = saved_after(env, config)
        with caplog.at_level(logging.INFO):
            state.finish()
            saved = state.get()
            resumed = EnvironmentState(make_state(name)[0], config)
            assert not resumed.restore(saved) and resumed.get() == saved
        assert caplog.text.count(reason) == 2 and caplog.text.count('a resumed run starts new episodes') == 2

    def test_a_hanging_process_is_stopped(self, make_state, caplog, monkeypatch):
        monkeypatch.setattr(environment_state, '_TIMEOUT_SECONDS', 0.0)
        env, config = make_state('Sound')
        state, _ = saved_after(env, config)
        with caplog.at_level(logging.INFO):
            state.finish()
        assert 'another process has not restored it within 0 s' in caplog.text

    def test_a_stopped_run_does_not_wait_for_the_verification(self, make_state):
        env, config = make_state('Sound')
        state, _ = saved_after(env, config)
        state._is_stopped = lambda: True
        state.finish()
        assert not state._is_verified and pickle.loads(state.get())[1]

    def test_a_verification_stopped_from_outside_has_no_result(self, make_state):
        env, config = make_state('Sound')
        state, _ = saved_after(env, config)
        state.advance()
        state._process._process.send_signal(signal.SIGTERM)
        while state._process is not None:
            state.advance()
            time.sleep(0.01)
        assert not state._has_given_up and pickle.loads(state.get())[1]
        state.close()
