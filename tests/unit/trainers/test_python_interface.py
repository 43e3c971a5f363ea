"""alfx as a library: training, loading policies, learning curves."""
import enum
import functools
import os
import pathlib
import pickle
import re
import signal
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec

import gymnasium
import numpy as np
import pytest
import torch
from helpers.gym_environments import MultiRewardEnv

import alfx
from alfx import context, gin_utils, nest, python_interface
from alfx.bin import policy_flags
from alfx.config import TrainerConfig
from alfx.gin_utils.python_values import binding_lines
from alfx.gin_utils.registry import program_module
from alfx.runs.callbacks import Callback
from alfx.runs.policy import Policy
from alfx.tensor_specs import BoundedTensorSpec, SpecError
from alfx.trainers.policy_trainer import RLTrainer
from alfx.trainers.progress_display import ProgressDisplay
from alfx.utils import processes

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'use_from_python.md'
SMALL = {'create_environment.num_parallel_environments': 2, 'TrainerConfig.num_iterations': 2,
         'TrainerConfig.num_env_steps': 0, 'TrainerConfig.unroll_length': 8, 'TrainerConfig.mini_batch_size': 8,
         'TrainerConfig.num_updates_per_train_iter': 1, 'TrainerConfig.evaluate': False,
         'TrainerConfig.random_seed': 1}


def test_the_program_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = '\n'.join(re.findall(r'```python\n(.*?)```', PAGE.read_text(), re.DOTALL))
    names: dict = {}
    exec(compile(code, PAGE.name, 'exec'), names)
    assert names['score'] > 0 and names['total'] > 0 and names['progress']['env_steps'][-1] >= 1000
    assert gin_utils.config_str() == ''  # no bindings of the conf remain


@pytest.fixture(scope='module')
def masked_run(tmp_path_factory):
    """A recurrent policy."""
    root_dir = str(tmp_path_factory.mktemp('python') / 'run')
    alfx.train('ppo_cart_pole_rnn', SMALL, root_dir)
    return root_dir


def test_a_policy_is_reset_on_its_own_device(masked_run):
    policy = alfx.load(masked_run)
    context.set_default_device('meta')  # as loading another policy on another device does
    try:
        policy.reset()
        assert {x.device.type for x in nest.flatten(policy.initial_state())} == {'cpu'}
    finally:
        context.set_default_device('cpu')


def test_a_policy_remembers_within_an_episode_and_forgets_with_reset(masked_run):
    policy = alfx.load(masked_run, epsilon_greedy=1.0)
    observation = np.zeros(policy.observation_spec.shape, np.float32)

    def actions():
        torch.manual_seed(0)
        return [policy.predict(observation) for _ in range(6)], [x.clone() for x in alfx.nest.flatten(policy._state)]

    first, memory = actions()
    repeated, changed = actions()
    assert any(not torch.equal(x, y) for x, y in zip(memory, changed))
    policy.reset()
    fresh, same = actions()
    assert fresh == first and all(torch.equal(x, y) for x, y in zip(memory, same))
    assert set(first) <= {0, 1} and all(type(action) is int for action in first)


def test_the_random_state_of_the_caller_does_not_change(masked_run):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    alfx.load(masked_run)
    assert torch.equal(torch.rand(1), expected)


def test_an_observation_of_another_shape_is_rejected(masked_run):
    policy = alfx.load(masked_run)
    with pytest.raises(SpecError, match=r'expected shape \(2,\), found \(4,\)'):
        policy.predict(np.zeros(4))
    with pytest.raises(SpecError, match='structure'):
        policy.predict({'position': np.zeros(2)})


def test_a_continuous_action_is_in_bounds_and_equals_that_of_evaluation(tmp_path):
    alfx.train('ppo_pendulum', SMALL, str(tmp_path / 'run'))
    policy = alfx.load(str(tmp_path / 'run'))
    action = policy.predict(np.array([1.0, 0.0, 0.5], np.float32))
    env = gymnasium.make('Pendulum-v1')
    assert env.action_space.contains(action.astype(np.float32)) and action.shape == (1, )
    policy.reset()
    assert np.array_equal(policy.predict(np.array([1.0, 0.0, 0.5])), action)


def test_rewards_of_a_gymnasium_vector_environment_become_float32(tmp_path, monkeypatch):
    alfx.train('ppo_pendulum', SMALL, str(tmp_path / 'run'))
    policy, rewards = alfx.load(str(tmp_path / 'run'), batch_size=2), []
    step = policy.step
    monkeypatch.setattr(policy, 'step', lambda step_type, reward, *rest: rewards.append(reward) or step(
        step_type, reward, *rest))
    policy.predict(np.zeros((2, 3)), reward=np.array([0.5, 1.0]))
    assert rewards[0].dtype == torch.float32 and rewards[0].tolist() == [0.5, 1.0]


def test_conf_errors_raise_as_in_the_programs(tmp_path):
    with pytest.raises(gin_utils.ConfError, match="did you mean 'lr'"):
        alfx.train('ppo_cart_pole', {'ppo/Adam.lrr': 0.1}, str(tmp_path / 'run'))
    with pytest.raises(gin_utils.ConfError, match='does not exist'):
        alfx.load(str(tmp_path / 'none'))
    with pytest.raises(gin_utils.ConfError, match='TrainerConfig.evaluate = True'):
        alfx.read_progress(str(tmp_path), evaluation=True)


def test_progress_has_a_number_or_nan_in_every_row(tmp_path):
    (tmp_path / 'progress.csv').write_text('env_steps,average_return\n10,\n20,3.5\n')
    progress = alfx.read_progress(str(tmp_path))
    assert progress['env_steps'].tolist() == [10, 20] and np.isnan(progress['average_return'][0])
    assert progress['average_return'][1] == 3.5


def own_activation(x):
    return torch.tanh(x)


class OwnText(str):
    pass


class Kind(str, enum.Enum):
    RELU = 'relu'


@pytest.mark.parametrize('value, text', [
    (np.float64(0.1), '0.1'), (np.float32(0.5), '0.5'), (np.longdouble(0.5), '0.5'), (np.int64(3), '3'),
    (np.bool_(True), 'True'), (torch.tensor(2), '2'), (np.str_('a'), "'a'"), (OwnText('b'), "'b'"),
    (signal.SIGINT, '2'), (Kind.RELU, "'relu'"),
    (pathlib.Path('a b'), "'a b'"), (np.array([1, 2]), '[1, 2]'), ((np.int32(1), ), '(1,)'), ((), '()'),
    ({np.int64(1): [pathlib.Path('x')]}, "{1: ['x']}"), (None, 'None'), (float('inf'), '%alfx.infinity'),
    (-np.inf, '%alfx.minus_infinity'), (torch.relu, '@torch.relu'), ('@torch.relu', '@torch.relu'),
    ('@actor/Adam()', '@actor/Adam()'), ('@Adam(lr=1e-3)', '@Adam(lr=1e-3)'), ('a@b', "'a@b'"), ('@ b', "'@ b'"),
    (torch.tensor([1, 2]), '[1, 2]'),
    (TrainerConfig, '@alfx.algorithms.config.TrainerConfig'),
    (gymnasium.wrappers.TimeLimit, '@gymnasium.wrappers.common.TimeLimit'),
])
def test_python_values_become_gin_text(value, text):
    assert binding_lines({'A.b': value})[-1] == f'A.b = {text}'


@pytest.mark.parametrize('value', [float('nan'), np.float32('nan'), object(), lambda x: x, {1, 2}, 1j,
                                   functools.partial(own_activation)])
def test_values_without_gin_text_raise_with_the_name_of_the_binding(value):
    with pytest.raises(gin_utils.ConfError, match='A.b'):
        binding_lines({'A.b': [value]})


@pytest.mark.parametrize('params', [[('TrainerConfig.random_seed', 1)], ('TrainerConfig.random_seed', 1)])
def test_parameters_that_are_no_lines_raise_with_an_example(params):
    with pytest.raises(gin_utils.ConfError, match=r"found (1|\('Trainer.*)\n  write {'TrainerConfig.random_seed': 1}"):
        alfx.check('ppo_cart_pole', params)


def test_infinity_is_accepted_and_stored_in_the_run(tmp_path):
    run = tmp_path / 'run'
    alfx.train('ppo_pendulum', {**SMALL, 'ppo/Adam.gradient_clipping': np.inf, 'ActorDistributionNetwork.activation':
                                torch.tanh, 'create_environment.num_parallel_environments': np.int64(2)}, run)
    assert 'ppo/Adam.gradient_clipping = %alfx.infinity' in (run / 'conf/operative.gin').read_text()
    alfx.load(run)


@pytest.mark.parametrize('argument', [dict(checkpoint_step=2.5), dict(checkpoint_step=-1), dict(checkpoint_step=True),
                                      dict(checkpoint_step='newest'), dict(epsilon_greedy=2.0),
                                      dict(epsilon_greedy=float('nan')), dict(epsilon_greedy='0')])
def test_load_rejects_arguments_out_of_range(masked_run, argument):
    with pytest.raises(gin_utils.ConfError, match=f'alfx.load.{next(iter(argument))} must be'):
        alfx.load(masked_run, **argument)


@pytest.mark.parametrize('number', [float('nan'), float('inf')])
def test_predict_rejects_numbers_that_are_not_finite(masked_run, number):
    policy = alfx.load(masked_run)
    with pytest.raises(SpecError, match='observation: expected finite numbers'):
        policy.predict(np.array([0.0, number]))
    with pytest.raises(SpecError, match='reward: expected finite numbers'):
        policy.predict(np.zeros(2), reward=number)
    assert policy.predict(np.zeros(2)) in (0, 1)


@pytest.mark.parametrize('value', [4, -1, 1.5, 300])
def test_predict_rejects_values_that_the_space_does_not_have(value):
    policy = FourStates()
    with pytest.raises(SpecError, match=f'expected .*found {value}'):
        policy._batched(value)
    assert policy._batched(3.0).item() == 3


class FourStates(Policy):
    observation_spec = BoundedTensorSpec((), 'uint8', 0, 3)

    def __init__(self):
        self._batch_size = None


class Images(Policy):
    observation_spec = BoundedTensorSpec((3, 2, 4), 'uint8', 0, 255)

    def __init__(self, batch_size):
        self._batch_size = batch_size


@pytest.mark.parametrize('batch', [(), (5, )])
def test_predict_takes_images_with_channels_last_or_first(batch):
    policy = Images(*(batch or (None, )))
    first = np.random.default_rng(0).integers(0, 256, (*batch, 3, 2, 4), np.uint8)
    last = np.moveaxis(first, -3, -1)
    expected = first if batch else first[None]
    assert np.array_equal(policy._batched(first), expected) and np.array_equal(policy._batched(last), expected)
    with pytest.raises(SpecError, match='expected shape .*, found '):
        policy._batched(np.moveaxis(first, -1, -2))


def test_a_pickled_policy_acts_the_same(masked_run):
    policy, observation = alfx.load(masked_run), np.ones(2, np.float32)
    policy.predict(observation)
    copy = pickle.loads(pickle.dumps(policy))
    for _ in range(3):
        copy.predict(observation), policy.predict(observation)
    assert all(torch.equal(x, y) for x, y in zip(alfx.nest.flatten(copy._state), alfx.nest.flatten(policy._state)))


def test_policies_load_in_several_threads_at_once(masked_run, tmp_path):
    alfx.train('ppo_pendulum', SMALL, tmp_path / 'run')
    runs = [masked_run, tmp_path / 'run'] * 3
    with ThreadPoolExecutor(4) as threads:
        shapes = [tuple(policy.observation_spec.shape) for policy in threads.map(alfx.load, runs)]
    assert shapes == [(2, ), (3, )] * 3


def test_a_second_thread_is_rejected_while_one_trains(masked_run, tmp_path, monkeypatch):
    policy, errors = alfx.load(masked_run), []

    def call_from_another_thread(self):
        calls = (lambda: alfx.train('ppo_pendulum', SMALL, tmp_path / 'b'), lambda: alfx.load(masked_run),
                 lambda: policy.predict(np.zeros(2)))
        with ThreadPoolExecutor(1) as other:
            errors.extend(str(other.submit(call).exception()) for call in calls)
        policy.predict(np.zeros(2))  # the thread that trains may use a policy
        with pytest.raises(gin_utils.ConfError, match='from code that alfx.train runs'):
            alfx.load(masked_run)
        return original(self)

    original = RLTrainer.train
    monkeypatch.setattr(RLTrainer, 'train', call_from_another_thread)
    alfx.train('ppo_pendulum', SMALL, tmp_path / 'a')
    assert len(errors) == 3 and all('while alfx.train runs in another thread' in text for text in errors)
    assert not (tmp_path / 'b').exists()


def test_a_signal_that_stops_training_reaches_the_program(tmp_path):
    class Stop(Callback):
        def on_iteration_end(self, run):
            signal.raise_signal(signal.SIGTERM)

    received = []
    with processes.signal_handlers({signal.SIGTERM: lambda number, frame: received.append(number)}):
        alfx.train('ppo_pendulum', {**SMALL, 'TrainerConfig.callbacks': (Stop(), )}, tmp_path)
    assert received == [signal.SIGTERM] and os.path.exists(tmp_path / 'train/algorithm/ckpt-1')


def test_a_program_that_cannot_be_imported_evaluates_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('alfx.trainers.policy_trainer.lost_program', lambda: 'the program is not a file')
    value = alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.evaluate': True, 'TrainerConfig.num_eval_episodes': 2,
                                         'TrainerConfig.num_eval_environments': 1}, tmp_path / 'run')
    assert alfx.read_progress(tmp_path / 'run', evaluation=True)['average_return'][-1] == pytest.approx(value)
    assert 'evaluations run in this process' in capsys.readouterr().err


# Evaluate, plot, check -------------------------------------------------------------------------------------------


def test_evaluate_plays_the_chosen_number_of_episodes_reproducibly(masked_run):
    result, repeated, other = (alfx.evaluate(masked_run, 3, 2, epsilon_greedy=1.0, random_seed=seed)
                               for seed in (None, 1, 2))  # the seed of the run is 1
    assert result.returns.shape == (3, ) and result.statistics()['episodes'] == 3
    assert np.array_equal(result.returns, repeated.returns) and not np.array_equal(result.returns, other.returns)
    assert str(result).startswith('return ') and gin_utils.config_str() == ''


@pytest.mark.parametrize('argument', [dict(num_episodes=0), dict(num_environments=1.5), dict(random_seed=-1),
                                      dict(checkpoint_step='newest'), dict(epsilon_greedy=2.0)])
def test_evaluate_rejects_arguments_out_of_range(masked_run, argument):
    with pytest.raises(gin_utils.ConfError, match=f'alfx.evaluate.{next(iter(argument))} must be'):
        alfx.evaluate(masked_run, **argument)


def test_plot_returns_a_figure_and_writes_a_file(tmp_path):
    for name, slope in (('a', 1), ('b', 2)):
        (tmp_path / name).mkdir()
        rows = ''.join(f'{10 * i},{slope * i},{i}\n' for i in range(4))
        (tmp_path / name / 'progress.csv').write_text(f'env_steps,average_return,loss\n{rows}')
    figure = alfx.plot([tmp_path / 'a', tmp_path / 'b'], y=['average_return', 'loss'], group_by='none',
                       labels=['one', 'two'], output=tmp_path / 'curves.svg')
    assert [axis.get_title() for axis in figure.axes] == ['average return in training', 'loss in training']
    assert {line.get_label(): line.get_ydata()[-1] for line in figure.axes[0].get_lines()} == {'one': 3, 'two': 6}
    assert (tmp_path / 'curves.svg').read_text().startswith('<?xml')
    assert len((figure := alfx.plot(tmp_path, y='all')).axes) == 2
    assert figure._repr_png_().startswith(b'\x89PNG')  # the output of a notebook
    for arguments, message in ((dict(y='reward'), 'reward'), (dict(smoothing=0), 'alfx.plot.smoothing'),
                               (dict(group_by='seed'), 'alfx.plot.group_by'), (dict(labels=['x'] * 9), 'labels: exp'),
                               (dict(output=tmp_path / 'c.xyz'), 'c.xyz: expected a file name')):
        with pytest.raises(gin_utils.ConfError, match=message):
            alfx.plot(tmp_path, **arguments)


def test_check_describes_the_conf_and_lists_bindings_without_effect():
    result = alfx.check('ppo_cart_pole', {**SMALL, 'actr/Adam.lr': 0.1})
    assert any('parameters:' in line for line in result.description)
    assert len(result.mistakes) == 1 and 'actr/Adam.lr = 0.1' in result.mistakes[0]
    assert str(result).endswith('1 unused binding') and f'unused: {result.mistakes[0]}' in str(result)
    assert alfx.check('ppo_cart_pole', SMALL).mistakes == ()
    with pytest.raises(gin_utils.ConfError, match="did you mean 'lr'"):
        alfx.check('ppo_cart_pole', {'ppo/Adam.lrr': 0.1})


# Environments, functions of the program, batches -----------------------------------------------------------------


class Corridor(gymnasium.Env):
    """Environment in which each of the steps 1 to ``length`` yields the reward 1."""

    observation_space, action_space = gymnasium.spaces.Box(0, 9, (1, ), np.float32), gymnasium.spaces.Discrete(2)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == self.length, False, {}


def make_no_environment():
    return 3


def test_an_environment_can_be_specified_by_its_class(tmp_path, capsys):
    params = {**SMALL, 'create_environment.env_name': Corridor, 'suite_gym.load.env_args': {'length': 6}}
    alfx.train('ppo_cart_pole', params, tmp_path / 'a')
    assert capsys.readouterr().err.startswith('Corridor, PPOAlgorithm')
    assert alfx.evaluate(tmp_path / 'a', 2).returns.tolist() == [6, 6]
    alfx.train('ppo_cart_pole', {**params, 'suite_gym.load.max_episode_steps': 3}, tmp_path / 'b')
    assert alfx.evaluate(tmp_path / 'b', 2).returns.tolist() == [3, 3]
    with pytest.raises(gin_utils.ConfError, match='make_no_environment: expected .*returns a int'):
        alfx.train('ppo_cart_pole', {**SMALL, 'create_environment.env_name': make_no_environment}, tmp_path / 'c')
    with pytest.raises(gin_utils.ConfError, match='native=True: only registered ids'):
        alfx.train('ppo_cart_pole', {**params, 'suite_gym.load.native': True}, tmp_path / 'c')


def test_an_environment_object_stands_for_its_id_and_arguments(tmp_path):
    env = gymnasium.make('MountainCarContinuous-v0', goal_velocity=0.01, render_mode='rgb_array')
    alfx.train('ppo_pendulum', {**SMALL, 'create_environment.env_name': env}, tmp_path / 'run')
    conf = (tmp_path / 'run/conf/operative.gin').read_text()
    assert "create_environment.env_name = 'MountainCarContinuous-v0'" in conf
    assert "load.env_args = {'goal_velocity': 0.01}" in conf
    for other in (Corridor(), gymnasium.wrappers.ClipReward(env, 0, 1)):
        with pytest.raises(gin_utils.ConfError, match='pass its class, or a function'):
            alfx.train('ppo_pendulum', {**SMALL, 'create_environment.env_name': other}, tmp_path / 'other')


@pytest.mark.parametrize('steps, bound', [(50, 50), (-1, 0), (500, None)])
def test_the_step_limit_of_an_environment_object_is_used(tmp_path, steps, bound):
    env = gymnasium.make('CartPole-v1', max_episode_steps=steps)  # registered with a limit of 500
    lines, _ = python_interface._lines({'create_environment.env_name': env})
    limit = [] if bound is None else [f'suite_gym.load.max_episode_steps = {bound}']
    assert lines == [*limit, "create_environment.env_name = 'CartPole-v1'"]


def test_arguments_of_an_environment_object_are_not_bound_twice():
    name, args, steps = 'create_environment.env_name', 'suite_gym.load.env_args', 'suite_gym.load.max_episode_steps'
    env = gymnasium.make('MountainCarContinuous-v0', goal_velocity=0.01, max_episode_steps=50)
    for binding in (args, steps, f'alfx.environments.{args}', 'load.max_episode_steps'):
        for params in ({name: env, binding: None}, {binding: None, name: env}):
            with pytest.raises(gin_utils.ConfError, match=f'also sets {binding}'):
                alfx.check('ppo_pendulum', params)
    plain = gymnasium.make('MountainCarContinuous-v0')
    assert python_interface._lines({name: plain, steps: 20})[0][-1] == f'{steps} = 20'
    lines, _ = python_interface._lines({f'evaluation/{name}': env, steps: 20})
    assert f'evaluation/{steps} = 50' in lines and f'{steps} = 20' in lines


PROGRAM = """
from alfx.gin_utils import configurable, register_function
from alfx.runs.callbacks import Callback

@configurable
class {0}Limited(Callback):
    def __init__(self, limit=1.0):
        limits.append(limit)

class Outer:
    @configurable('{0}Renamed', module='{0}_names')
    class Inner({0}Limited):
        pass

def in_function():
    @configurable
    class {0}Local(Callback):
        pass
    return {0}Local

limits = []
"""


@pytest.fixture
def program(tmp_path, monkeypatch, request):
    """A running program with a guard."""
    name = f'program_of_{request.node.name.split("_")[-1]}'
    code = PROGRAM.format(name) + "if __name__ == '__main__':\n    pass\n"
    path = tmp_path / f'{name}.py'
    path.write_text(code)
    main = types.ModuleType('__main__')
    main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, '__main__', main)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(code, path, 'exec'), vars(main))
    return types.SimpleNamespace(name=name, main=main, limited=getattr(main, f'{name}Limited'))


def test_a_registered_class_of_the_program_is_used_with_its_bindings(program, tmp_path):
    def train(callback, name, limit):
        params = {**SMALL, 'TrainerConfig.callbacks': [callback], f'{name}.limit': limit}
        alfx.train('ppo_cart_pole', params, tmp_path / str(limit))
        return sys.modules[program.name].limits, program.main.limits

    name = f'{program.name}Limited'
    assert train(program.limited, name, 2.0) == ([2], [])
    assert train(f'@{name}()', name, 3.0) == ([2, 3], [])
    assert train(program.main.Outer.Inner, f'{program.name}Renamed', 4.0) == ([2, 3, 4], [])
    assert train(f'@__main__.{name}()', f'__main__.{name}', 5.0) == ([2, 3, 4], [5])
    assert f'\n__main__.{name}.limit = 5.0' in (tmp_path / '5.0/conf/operative.gin').read_text()


def test_a_registered_class_of_a_function_is_rejected(program):
    assert binding_lines({'A.b': program.limited}, program.name)[-1] == f'A.b = @{program.name}.{program.name}Limited'
    for main in (None, program.name):
        with pytest.raises(gin_utils.ConfError, match='A.b = .*Local.*\n.*top level of a module'):
            binding_lines({'A.b': program.main.in_function()}, main)


@pytest.mark.parametrize('spec, file, module', [
    (None, 'prog.py', 'prog'), ('package.prog', 'prog.py', 'package.prog'), ('__main__', 'prog.py', 'prog'),
    ('package.__main__', '__main__.py', 'package.__main__'), ('__main__', '__main__.py', None),
    (None, 'my-prog.py', None), ('package.my-prog', 'my-prog.py', None)])
def test_the_program_is_imported_by_the_name_that_it_was_started_with(monkeypatch, tmp_path, spec, file, module):
    (tmp_path / file).write_text("if __name__ == '__main__':\n    pass\n")
    main = types.ModuleType('__main__')
    main.__file__, main.__spec__ = str(tmp_path / file), spec and ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, '__main__', main)
    assert (program_module() or None) == module


def test_functions_of_the_program_are_imported_from_its_file(monkeypatch, caplog):
    def wave(x):
        return torch.sin(x)

    wave.__module__, wave.__qualname__ = '__main__', 'wave'
    main = types.ModuleType('__main__')
    main.wave = wave
    monkeypatch.setitem(sys.modules, '__main__', main)
    assert binding_lines({'A.b': wave}, 'program') == ['import program', 'A.b = @program.wave'] and not caplog.text
    assert binding_lines({'A.b': wave}) == ['import __main__', 'A.b = @__main__.wave']
    assert 'other programs, such as alfx play, cannot load the run' in caplog.text


def test_a_batched_policy_acts_like_one_policy_for_each_row(masked_run):
    batched, singles = alfx.load(masked_run, batch_size=3), [alfx.load(masked_run) for _ in range(3)]
    observations = np.random.default_rng(0).uniform(-0.2, 0.2, (6, 3, 2))
    for step, observation in enumerate(observations):
        if step == 3:  # a new episode in the second environment
            batched.reset([False, True, False])
            singles[1].reset()
        action = batched.predict(observation, reward=np.ones(3))
        assert action.shape == (3, ) and action.dtype.kind == 'i'
        assert action.tolist() == [policy.predict(row, reward=1.0) for policy, row in zip(singles, observation)]
        for own, rows in zip(alfx.nest.flatten(batched._state), zip(*(alfx.nest.flatten(p._state) for p in singles))):
            torch.testing.assert_close(own, torch.cat(rows))
    assert 'batch_size=3' in repr(batched)
    with pytest.raises(SpecError, match='expected shape .3, 2., found .2,.; predict takes 3 observations'):
        batched.predict(observations[0, 0])
    with pytest.raises(SpecError, match=r'is_new: expected bools of shape \(3,\)'):
        batched.reset([True])


def test_a_notebook_shows_at_most_ten_lines_of_a_conf_error():
    short = gin_utils.ConfError('wrong', 'right')
    assert short._render_traceback_() == ['ConfError: wrong', '  right']
    lines = gin_utils.ConfError([gin_utils.Problem('', f'problem {i}', 'hint') for i in range(9)])._render_traceback_()
    assert len(lines) == 10 and lines[8] == 'problem 4' and lines[9].startswith('... and 9 more lines')


def test_errors_name_the_names_used_by_the_caller(tmp_path):
    with pytest.raises(gin_utils.ConfError) as caught:
        alfx.train('ppo_cart_pole', {'ppo/Adam.lrr': 1}, tmp_path / 'run')
    assert str(caught.value) == "override 'ppo/Adam.lrr = 1': Adam has no parameter 'lrr'\n  did you mean 'lr'?"
    for use in (alfx.load, policy_flags.check_run_folder):
        with pytest.raises(gin_utils.ConfError, match='none does not exist\n  (pass|name) the folder of') as caught:
            use(str(tmp_path / 'none'))
        assert 'root_dir' not in str(caught.value)


def test_progress_has_the_return_of_each_reward(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(ProgressDisplay, 'is_due', lambda self: True)
    root_dir = str(tmp_path / 'run')
    alfx.train('ppo_cart_pole', {**SMALL, 'create_environment.env_name': MultiRewardEnv,
                                 'TrainerConfig.data_transformer_ctor': [], 'TrainerConfig.summary_interval': 1},
               root_dir=root_dir)
    progress = alfx.read_progress(root_dir)
    length, sums = progress['average_length'][-1], progress['average_return/1'][-1]
    assert progress['average_return/0'][-1] == length  # a reward of 1 for each step
    assert progress['average_return'][-1] == length + sums and sums > length
    shown = capfd.readouterr().err
    assert '  return ' in shown and 'return/1' not in shown  # the sum alone
