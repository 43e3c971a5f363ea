"""alfx as a library: training, a policy by itself, learning curves."""
import pathlib
import re

import gymnasium
import numpy as np
import pytest
import torch

import alfx
from alfx import gin_utils
from alfx.tensor_specs import SpecError

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
