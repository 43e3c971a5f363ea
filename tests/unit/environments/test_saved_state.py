"""State of an environment as bytes: contents, exceptions, the methods of the environment, and simulators."""
import _random
import importlib
import itertools
import logging
import multiprocessing
import pathlib
import socket
import sys
import tempfile
import threading
import types

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit, TransformReward
from helpers.gym_environments import ChainEnv, CountEnv

from alfx.environments import saved_state
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.suite_exploration import CorridorEnv
from alfx.environments.vector_env import SerialVectorEnv


class Plain(ChainEnv):
    """An environment with any attributes."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


class Own(ChainEnv):
    """An environment that saves its own state and has an attribute that cannot be pickled."""

    def __init__(self, count=0):
        super().__init__()
        self.count, self.lock = count, threading.Lock()

    def get_state(self):
        return {'count': self.count}

    def set_state(self, state):
        self.count = state['count']


class Restarting(gymnasium.utils.EzPickle):
    """An object that unpickling constructs again."""


class Raising:
    """An object whose pickling raises."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


def calm():
    """A law of motion."""


def storm():
    """Another one."""


def copied(env, other):
    saved_state.restore(other, saved_state.capture(env))
    return other


@pytest.mark.parametrize('name', ['clock', 'window', 'screen', 'surf', 'font', 'spec', 'metadata', 'render_mode',
                                  'isopen', 'env_fns', 'model', 'data', 'mujoco_renderer'])
def test_an_attribute_of_any_name_is_saved(name):
    assert getattr(copied(Plain(**{name: [1, 2]}), Plain(**{name: 0})), name) == [1, 2]


@pytest.mark.parametrize('value, other', [(storm, calm), (Raising, Restarting), (np.sin, np.cos)])
def test_functions_and_classes_are_saved_by_their_names(value, other):
    assert copied(Plain(law=value), Plain(law=other)).law is value


def rule(env, goal, factor=1.0, *, offset=0.0):
    """Return a function as an environment may make it in ``reset``."""
    return lambda x, scale=factor, *, add=offset: (x + len(vars(env)) if goal else -x) * scale + add


@pytest.mark.parametrize('goal', [0, 1])
def test_functions_made_in_functions_are_saved_with_the_environment(goal):
    env, other = Plain(size=1), Plain(size=1)
    env.law, other.law = rule(env, goal, 2.0, offset=0.5), rule(other, 1 - goal)
    law = copied(env, other).law
    assert law(3) == env.law(3) and law(3, 1.0, add=0.0) == env.law(3, 1.0, add=0.0)
    assert law.__closure__[0].cell_contents is other


def test_functions_that_refer_to_what_cannot_be_saved(caplog):
    caplog.set_level(logging.INFO)
    module = sys

    def draw():
        return module

    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    other = lambda: None
    for function in (draw, factorial):
        assert copied(Plain(draw=function), Plain(draw=other)).draw is other  # left alone, like modules
    lock = threading.Lock()
    assert saved_state.capture(Plain(law=lambda: lock)) is None and 'cannot be saved' in caplog.text


class Exiting:
    def __getstate__(self):
        sys.exit(3)


def test_an_attribute_that_exits_while_it_is_saved_does_not_end_the_run(caplog):
    caplog.set_level('INFO')
    assert saved_state.capture(Plain(law=Exiting())) is None and 'cannot be saved: SystemExit: 3' in caplog.text


class Panic(BaseException):
    """As the panics of Rust code in Python are."""


class Panicking:
    def __getstate__(self):
        raise Panic('a panic of Rust code')


def test_an_attribute_that_raises_as_rust_code_does_not_end_the_run(caplog):
    with caplog.at_level('INFO'):
        assert saved_state.capture(Plain(world=Panicking())) is None
    assert 'a panic of Rust code' in caplog.text


class Slots:
    __slots__ = ('number', )


def counter():
    number = 0

    def count():
        nonlocal number
        number += 1
    return count


def advance(value):
    if isinstance(value, Slots):
        value.number = 1
    elif isinstance(value, torch.Tensor):
        value += 1
    elif isinstance(value, itertools.count):
        next(value)
    else:
        value()


@pytest.mark.parametrize('make', [Slots, counter, itertools.count, lambda: torch.zeros(3)])
def test_a_value_of_a_module_that_changed_is_noticed(monkeypatch, make):
    value = make()
    monkeypatch.setattr(sys.modules[__name__], 'world', value, raising=False)
    saved = saved_state.capture(Plain())
    saved_state.restore(Plain(), saved)
    advance(value)
    with pytest.raises(ValueError, match='the saved state is of .*world'):
        saved_state.restore(Plain(), saved)


def test_modules_are_found_by_functions_of_them(monkeypatch, tmp_path):
    (tmp_path / 'counting_module.py').write_text('number = 0\ndef count():\n    global number\n    number += 1\n')
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module('counting_module')
    monkeypatch.setattr(sys.modules[__name__], 'count', module.count, raising=False)
    saved = saved_state.capture(Plain())
    module.count()
    with pytest.raises(ValueError, match='counting_module with number = 0, expected counting_module with number = 1'):
        saved_state.restore(Plain(), saved)


def test_an_attribute_that_did_not_exist_is_removed():
    assert 'later' not in vars(copied(Plain(), Plain(later=0)))


def test_windows_specs_and_modules_are_left_alone_by_their_type():
    pygame = pytest.importorskip('pygame')
    attributes = {'a': pygame.Surface((2, 2)), 'b': pygame.time.Clock(), 'c': sys, 'd': gymnasium.spec('CartPole-v1')}
    new = {key: object.__new__(object) for key in attributes}
    assert {key: vars(copied(Plain(**attributes), Plain(**new)))[key] for key in new} == new
    assert copied(Plain(a=pygame.Rect(1, 2, 3, 4)), Plain(a=None)).a == pygame.Rect(1, 2, 3, 4)


def test_environments_inside_of_an_environment_are_restored_in_place():
    env = Plain(env=TimeLimit(CountEnv(5), 3), others=[Plain(x=1), Plain(x=2)], keep=None)
    env.env.reset()
    env.env.step(0)
    other = Plain(env=TimeLimit(CountEnv(5), 3), others=[Plain(), Plain()], keep=None)
    other.keep, inner = other.env, other.env
    env.keep = env.env
    copied(env, other)
    assert other.env is inner is other.keep and inner._elapsed_steps == 1
    assert [vars(part)['x'] for part in other.others] == [1, 2]


def test_an_environment_registered_with_a_local_function_is_saved():
    spec = gymnasium.envs.registration.EnvSpec('Local-v0', entry_point=lambda: ChainEnv(), max_episode_steps=3)
    env, other = gymnasium.make(spec), gymnasium.make(spec)
    assert env.spec is not None and other.spec is not None  # wrappers have copies of it now
    env.reset(seed=0)
    env.step(0)
    other.reset(seed=1)
    copied(env, other)
    assert np.array_equal(env.step(1)[0], other.step(1)[0])


@pytest.mark.parametrize('value', [
    Raising(NotImplementedError('cannot be copied')), Raising(RuntimeError('a node')), Raising(OSError('gone')),
    [threading.Lock()], multiprocessing.Lock(), {'pipe': multiprocessing.Pipe()}, (socket.socket(), ), Restarting(),
    multiprocessing.Process(target=print), threading.Thread(), tempfile.TemporaryFile()],
    ids=lambda value: type(value).__name__)
def test_a_value_that_cannot_be_pickled_is_logged_once(value, caplog):
    env = Plain(part=[value])
    saved_state._log_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert saved_state.capture(env) is None and saved_state.capture(env) is None
    assert caplog.text.count('the state of Plain cannot be saved') == 1


def test_state_in_native_code_or_slots_is_not_saved():
    class Native(ChainEnv, _random.Random):
        pass

    class Slots(ChainEnv):
        __slots__ = ('x', )

    assert saved_state.capture(Native()) is None and saved_state.capture(Slots()) is None


def test_an_environment_can_save_its_own_state():
    env, other = TimeLimit(Own(7), 9), TimeLimit(Own(), 9)
    env.reset()
    env.step(0)
    copied(env, other)
    assert other.env.count == 7 and other._elapsed_steps == 1
    assert saved_state.capture(Plain(lock=threading.Lock())) is None


def test_other_methods_named_set_state_are_not_called():
    class Other(Plain):

        def get_state(self, index):
            raise AssertionError

        def set_state(self, position, velocity):
            raise AssertionError

    assert copied(Other(x=3), Other(x=0)).x == 3


def test_an_environment_can_declare_that_its_state_cannot_be_saved(caplog):
    class Elsewhere(ChainEnv):
        state_can_be_saved = False

    with caplog.at_level(logging.INFO):
        assert saved_state.capture(TimeLimit(Elsewhere(), 3)) is None
    assert 'Elsewhere.state_can_be_saved is False' in caplog.text


def test_environments_of_other_packages_need_a_check():
    foreign = [Plain(), TimeLimit(Plain(), 3), Own(), TransformReward(CountEnv(3), lambda reward: reward),
               Plain(part=types.SimpleNamespace())]
    for env in foreign:
        assert saved_state.needs_check({'a': [(saved_state.capture(env), 3)]})
    for env in CorridorEnv(), gymnasium.make('CartPole-v1'), gymnasium.make_vec('CartPole-v1', 2):
        assert not saved_state.needs_check([saved_state.capture(env)])


def test_paths_in_the_temporary_folder_are_found_wherever_they_are(tmp_path):
    folder = tempfile.gettempdir()
    env = Plain(a=[f'{folder}/one/x'], b={pathlib.Path(folder, 'two')})
    assert saved_state.temporary_folders(env) == {'one', 'two'}
    assert not saved_state.temporary_folders(Plain(a='/elsewhere/one', b=folder))


def test_states_of_earlier_formats_are_rejected():
    with pytest.raises(ValueError, match='another version of alfx'):
        saved_state.restore(ChainEnv(), b'x\x9c')


class NoLoad(Exception):
    """An object that can be pickled, but not unpickled."""

    def __init__(self, part, what):
        super().__init__(f'{part}: {what}')


@pytest.mark.parametrize('vector', [SerialVectorEnv, pytest.param(ProcessVectorEnv, marks=pytest.mark.processes)])
def test_a_state_that_cannot_be_unpickled_leaves_the_environments_usable(vector):
    env = vector([lambda: Plain(part=NoLoad('arm', 'stuck'))] * 2)
    env.reset(seed=0)
    states = env.get_states()
    with pytest.raises(ValueError, match='environment 0 of .*TypeError'):
        env.set_states(states)
    env.reset(seed=0)
    env.step(np.zeros(2, int))
    assert len(env.get_states(1)) == 1
    env.close()


def test_mujoco_is_restored_in_place():
    pytest.importorskip('mujoco')
    env, other = gymnasium.make('Ant-v5').unwrapped, gymnasium.make('Ant-v5').unwrapped
    env.reset(seed=0)
    for _ in range(30):
        env.step(env.action_space.sample())
    data, qpos = other.data, other.data.qpos
    copied(env, other)
    assert other.data is data and np.array_equal(qpos, env.data.qpos)
    assert other.data.ncon == env.data.ncon and np.array_equal(other.data.efc_force, env.data.efc_force)


def test_objects_that_refer_to_the_data_of_mujoco_are_restored():
    pytest.importorskip('gymnasium_robotics')
    env, other = (gymnasium.make('FrankaKitchen-v1', tasks_to_complete=['microwave']) for _ in range(2))
    env.reset(seed=0)
    other.reset(seed=1)
    env.step(env.action_space.sample())
    copied(env, other)
    assert other.unwrapped.data is other.unwrapped.robot_env.data
    robot = other.unwrapped.robot_env
    assert np.shares_memory(robot.init_qvel, robot.data.qvel)  # an attribute of the environment
    for _ in range(3):
        action = env.action_space.sample()
        assert np.array_equal(env.step(action)[0]['observation'], other.step(action)[0]['observation'])
