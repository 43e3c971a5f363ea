"""Trained agents that alfx ships."""
import pathlib
import sys

import numpy as np
import pytest
from helpers import warm_starts

import alfx
from alfx.gin_utils import ConfError
from alfx.runs import zoo

AGENTS = zoo.agents()
NEEDED = {'MiniGrid': 'minigrid', 'HalfCheetah': 'mujoco', 'LunarLander': 'Box2D', 'MinAtar': 'minatar'}


def require_environment(card):
    for prefix, package in NEEDED.items():
        if card['environment'].startswith(prefix):
            pytest.importorskip(package)


@pytest.mark.parametrize('name', AGENTS)
def test_an_agent_of_alfx_acts_as_its_card_states(name):
    card = AGENTS[name]
    require_environment(card)
    result = alfx.evaluate(f'zoo:{name}', num_episodes=2, epsilon_greedy=card['epsilon_greedy'], random_seed=1)
    worst, best = min(card['returns']), max(card['returns'])
    spread = max(best - worst, 0.05 * abs(best))  # processors round differently
    assert worst - spread <= np.mean(result.returns) <= best + spread


@pytest.mark.parametrize('name', AGENTS)
def test_an_agent_is_small_and_states_how_it_was_trained(name):
    card, folder = AGENTS[name], pathlib.Path(zoo.run_folder(f'zoo:{name}'))
    assert sum(file.stat().st_size for file in folder.rglob('*') if file.is_file()) <= 300 * 1024
    assert card['conf'] == name and (folder / 'conf' / f'{name}.gin').is_file()
    assert len(card['returns']) == 20 and card['steps'] > 0 and card['parameters'] > 0
    assert card['versions']['alfx'] and card['seed'] >= 0


def test_there_are_agents():
    assert len(AGENTS) >= 11


def test_an_unknown_agent_is_rejected_with_the_nearest_name():
    name = next(iter(AGENTS))
    with pytest.raises(ConfError, match=f'zoo:{name[:-1]}: alfx has no trained agent.*\n?.*did you mean .zoo:{name}'):
        alfx.load(f'zoo:{name[:-1]}')


def test_other_run_folders_are_not_agents(tmp_path):
    assert zoo.run_folder(str(tmp_path)) == str(tmp_path) and zoo.read_card(str(tmp_path)) == {}


@pytest.mark.processes
def test_programs_take_agents_as_run_folders_and_reject_to_train_them(tmp_path):
    pytest.importorskip('minigrid')
    name = 'zoo:ppo_episodic_count_minigrid_doorkey_8x8'

    def alfx_program(*arguments):
        return warm_starts.run([sys.executable, '-m', 'alfx', *arguments], capture_output=True, text=True,
                               cwd=tmp_path)

    result = alfx_program('evaluate', name, '--num_episodes', '1')
    assert result.returncode == 0 and 'return' in result.stdout
    assert 'PPOAlgorithm' in alfx_program('show', name).stdout
    for arguments in (('train', name), ('train', '--root_dir', name), ('fork', name)):
        result = alfx_program(*arguments)
        assert result.returncode == 2 and 'cannot be trained further' in result.stderr
        assert 'alfx train ppo_episodic_count_minigrid_doorkey_8x8' in result.stderr
