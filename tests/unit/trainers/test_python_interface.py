"""alfx as a library: training, a policy by itself, learning curves."""
import functools
import pathlib
import pickle
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
import torch

import alfx
from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.gin_utils.python_values import binding_lines
from alfx.runs.policy import Policy
from alfx.tensor_specs import BoundedTensorSpec, SpecError
from alfx.trainers.policy_trainer import RLTrainer

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
    assert gin_utils.config_str() == ''  # nothing of the conf is left behind


@pytest.fixture(scope='module')
def masked_run(tmp_path_factory):
    """A recurrent policy."""
    root_dir = str(tmp_path_factory.mktemp('python') / 'run')
    alfx.train('ppo_cart_pole_rnn', SMALL, root_dir)
    return root_dir


def test_a_policy_remembers_within_an_episode_and_forgets_with_reset(masked_run):
    policy = alfx.load(masked_run, epsilon_greedy=1.0)
    observation = np.zeros(policy.observation_spec.shape, np.float32)

    def actions():
        torch.manual_seed(0)
        return [policy.predict(observation) for _ in range(6)], [x.clone() for x in alfx.nest.flatten(policy._state)]

    first, memory = actions()
    again, changed = actions()
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


def test_an_observation_of_another_shape_is_refused(masked_run):
    policy = alfx.load(masked_run)
    with pytest.raises(SpecError, match=r'expected .*found an array of shape \(4,\)'):
        policy.predict(np.zeros(4))
    with pytest.raises(SpecError, match='structure'):
        policy.predict({'position': np.zeros(2)})


def test_a_continuous_action_is_in_bounds_and_that_of_evaluation(tmp_path):
    alfx.train('ppo_pendulum', SMALL, str(tmp_path / 'run'))
    policy = alfx.load(str(tmp_path / 'run'))
    action = policy.predict(np.array([1.0, 0.0, 0.5], np.float32))
    env = gymnasium.make('Pendulum-v1')
    assert env.action_space.contains(action.astype(np.float32)) and action.shape == (1, )
    policy.reset()
    assert np.array_equal(policy.predict(np.array([1.0, 0.0, 0.5])), action)


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


@pytest.mark.parametrize('value, text', [
    (np.float64(0.1), '0.1'), (np.float32(0.5), '0.5'), (np.int64(3), '3'), (np.bool_(True), 'True'),
    (torch.tensor(2), '2'), (np.str_('a'), "'a'"), (OwnText('b'), "'b'"), (signal.SIGINT, '2'),
    (pathlib.Path('a b'), "'a b'"), (np.array([1, 2]), '[1, 2]'), ((np.int32(1), ), '(1,)'), ((), '()'),
    ({np.int64(1): [pathlib.Path('x')]}, "{1: ['x']}"), (None, 'None'), (float('inf'), '%alfx.infinity'),
    (-np.inf, '%alfx.minus_infinity'), (torch.relu, '@torch.relu'),
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


def test_infinity_is_accepted_and_stored_in_the_run(tmp_path):
    run = tmp_path / 'run'
    alfx.train('ppo_pendulum', {**SMALL, 'ppo/Adam.gradient_clipping': np.inf, 'ActorDistributionNetwork.activation':
                                torch.tanh, 'create_environment.num_parallel_environments': np.int64(2)}, run)
    assert 'ppo/Adam.gradient_clipping = %alfx.infinity' in (run / 'conf/operative.gin').read_text()
    alfx.load(run)


@pytest.mark.parametrize('argument', [dict(checkpoint_step=2.5), dict(checkpoint_step=-1), dict(checkpoint_step=True),
                                      dict(checkpoint_step='newest'), dict(epsilon_greedy=2.0),
                                      dict(epsilon_greedy=float('nan')), dict(epsilon_greedy='0')])
def test_load_refuses_arguments_out_of_range(masked_run, argument):
    with pytest.raises(gin_utils.ConfError, match=f'alfx.load.{next(iter(argument))} must be'):
        alfx.load(masked_run, **argument)


@pytest.mark.parametrize('number', [float('nan'), float('inf')])
def test_predict_refuses_numbers_that_are_not_finite(masked_run, number):
    policy = alfx.load(masked_run)
    with pytest.raises(SpecError, match='observation: expected finite numbers'):
        policy.predict(np.array([0.0, number]))
    with pytest.raises(SpecError, match='reward: expected finite numbers'):
        policy.predict(np.zeros(2), reward=number)
    assert policy.predict(np.zeros(2)) in (0, 1)


@pytest.mark.parametrize('value', [4, -1, 1.5, 300])
def test_predict_refuses_values_that_the_space_does_not_have(value):
    policy = FourStates()
    with pytest.raises(SpecError, match=f'expected .*found {value}'):
        policy._batched(value)
    assert policy._batched(3.0).item() == 3


class FourStates(Policy):
    observation_spec = BoundedTensorSpec((), 'uint8', 0, 3)

    def __init__(self):
        pass


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


def test_a_second_thread_is_refused_while_one_trains(masked_run, tmp_path, monkeypatch):
    policy, refused = alfx.load(masked_run), []

    def call_from_another_thread(self):
        calls = (lambda: alfx.train('ppo_pendulum', SMALL, tmp_path / 'b'), lambda: alfx.load(masked_run),
                 lambda: policy.predict(np.zeros(2)))
        with ThreadPoolExecutor(1) as other:
            refused.extend(str(other.submit(call).exception()) for call in calls)
        policy.predict(np.zeros(2))  # the thread that trains may use a policy
        with pytest.raises(gin_utils.ConfError, match='from code that alfx.train runs'):
            alfx.load(masked_run)
        return original(self)

    original = RLTrainer.train
    monkeypatch.setattr(RLTrainer, 'train', call_from_another_thread)
    alfx.train('ppo_pendulum', SMALL, tmp_path / 'a')
    assert len(refused) == 3 and all('while alfx.train runs in another thread' in text for text in refused)
    assert not (tmp_path / 'b').exists()


def test_a_program_that_cannot_be_imported_evaluates_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('alfx.trainers.policy_trainer.lost_program', lambda: 'the program is not a file')
    value = alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.evaluate': True, 'TrainerConfig.num_eval_episodes': 2,
                                         'TrainerConfig.num_eval_environments': 1}, tmp_path / 'run')
    assert alfx.read_progress(tmp_path / 'run', evaluation=True)['average_return'][-1] == pytest.approx(value)
    assert 'evaluations run in this process' in capsys.readouterr().err
