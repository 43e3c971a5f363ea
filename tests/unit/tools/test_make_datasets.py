"""Recipes of datasets are valid, and a small one is executed."""
import json
import pathlib
import sys

import pytest
from helpers import warm_starts

from alfx import gin_utils
from alfx.offline import dataset_folder

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'
TINY = ('create_environment.num_parallel_environments = 1', 'TrainerConfig.num_env_steps = 240',
        'TrainerConfig.initial_collect_steps = 40', 'TrainerConfig.unroll_length = 10',
        'TrainerConfig.num_checkpoints = 2', 'suite_gym.load.max_episode_steps = 20')


@pytest.fixture
def make_datasets(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import make_datasets
    return make_datasets


def test_recipes_name_confs_of_one_environment_and_parameters_that_exist(make_datasets):
    for task, recipe in make_datasets.RECIPES.items():
        environments = set()
        for conf, params in ((recipe.expert, recipe.expert_params), (recipe.learner, recipe.learner_params)):
            if conf is not None:
                with gin_utils.loaded(conf, list(params)) as loaded:
                    bound = {binding.text: binding.value for binding in loaded.bindings}
                environments.add(bound['create_environment.env_name'])
        assert len(environments) == 1, task
        if recipe.learner is not None:  # its replay buffer contains all its steps, in temporal order
            assert bound['create_environment.num_parallel_environments'] == 1, task
            assert bound['TrainerConfig.replay_buffer_length'] >= bound['TrainerConfig.num_env_steps'], task
        assert recipe.num_steps > recipe.demo_steps > 0, task


def test_datasets_of_shipped_confs_can_be_created(make_datasets):
    import results
    named = {name for conf in ('bc_pendulum', 'causal_bc_pendulum', 'iql_finetune_pendulum', 'gail_pendulum',
                               'cql_cart_pole', 'ppod_corridor', 'cal_ql_mountain_car_continuous')
             for name in results.read_task(conf).datasets}
    assert len(named) == 7 and {'pendulum/replay', 'pendulum/demos', 'corridor/demos'} <= named
    for name in named:
        assert make_datasets.names_of(name) == [tuple(name.split('/'))]


@pytest.mark.parametrize('name, message', [('pendulums', 'no recipe for pendulums.*pendulum'),
                                           ('pendulum/half', 'no level half of pendulum.*random'),
                                           ('corridor/replay', 'no level replay of corridor')])
def test_datasets_without_a_recipe_are_rejected(make_datasets, name, message):
    with pytest.raises(gin_utils.ConfError, match=f'(?s){message}'):
        make_datasets.names_of(name)


def test_a_dataset_is_created_once_with_its_reference_returns(make_datasets, tmp_path, monkeypatch):
    monkeypatch.setitem(make_datasets.RECIPES, 'tiny',
                        make_datasets.Recipe('sac_pendulum', 160, 40, 'sac_pendulum', TINY))
    monkeypatch.setattr(make_datasets, 'MEDIUM', -1e9)  # the run is too short to learn
    commands, run_program = [], make_datasets.run_program

    def run(arguments, log):
        commands.append(arguments[0].removeprefix('alfx.bin.'))
        if len(commands) == 1:  # once as users run it
            return run_program(arguments, log)
        return warm_starts.run([sys.executable, '-m', *arguments], capture_output=True, text=True, check=True,
                               cwd=make_datasets.ROOT).stdout

    def evaluation(maker, run, step, further=()):
        return {'average_return': 0.0, 'normalized_score': 50.0}

    monkeypatch.setattr(make_datasets, 'run_program', run)
    monkeypatch.setattr(make_datasets.Maker, '_expert', make_datasets.Maker._learner)
    monkeypatch.setattr(make_datasets.Maker, '_evaluation', evaluation)
    make_datasets.make(['tiny/replay'], tmp_path)
    assert commands == ['train', 'record', 'dataset', 'dataset'], 'the learner, random actions, what these get, replay'
    replay = dataset_folder.read(str(tmp_path / 'tiny' / 'replay'))
    known = json.loads((tmp_path / 'tiny' / 'references.json').read_text())
    assert replay.reference_returns() == (known['random'], 0.0) and known['random'] < 0
    assert 100 <= replay.episodes.num_actions <= 140, 'half of what the learner saw: its first checkpoint is medium'
    commands.clear()
    make_datasets.make(['tiny/replay'], tmp_path)
    assert not commands


def test_the_expert_is_the_best_of_its_last_checkpoints(make_datasets, tmp_path, monkeypatch):
    monkeypatch.setitem(make_datasets.RECIPES, 'tiny', make_datasets.Recipe(
        'sac_pendulum', 160, 40, 'sac_pendulum', expert_candidates=3))
    maker, score = make_datasets.Maker('tiny', tmp_path), {10: 9.0, 20: 1.0, 30: 3.0, 40: 2.0}
    recorded = []
    monkeypatch.setattr(maker, '_random', lambda: tmp_path)
    monkeypatch.setattr(maker, '_run', lambda program, *arguments: (
        recorded.append(arguments) if program == 'record' else json.dumps({str(tmp_path): {'return_mean': -1.0}})))
    monkeypatch.setattr(maker, '_trained', lambda name, *_: tmp_path / name)
    monkeypatch.setattr(maker, '_steps', lambda run: list(score))
    monkeypatch.setattr(maker, '_evaluation', lambda run, step: {'average_return': score[int(step)]})
    maker.make('expert')
    (arguments, ) = recorded
    assert arguments[arguments.index('--checkpoint_step') + 1] == '30'
    assert arguments[-1] == '--reference_returns=-1.0,3.0'
    assert arguments[arguments.index('--root_dir') + 1] == str(tmp_path / 'learner'), 'one run is both'
