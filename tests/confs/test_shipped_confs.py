"""Every shipped conf has a header comment, uses all its bindings, trains, writes a checkpoint and plays.

Models keep the size set in the conf. Runs are short: few environments, short unrolls, two updates.
"""

import glob
import os
import re
from typing import NamedTuple

import pytest

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.gin_utils import parsing
from alfx.offline import recorder
from alfx.offline import dataset_folder
from alfx.runs import building
from alfx.runs.playing import play
from alfx.trainers import conf_check
from alfx.trainers.policy_trainer import RLTrainer, SLTrainer

CONFS = sorted(os.path.basename(path) for path in glob.glob(os.path.join(parsing.CONFS, '*.gin')))
EXTRAS = {'mujoco': 'mujoco', 'box2d': 'Box2D', 'atari': 'ale_py', 'minigrid': 'minigrid',
          'minatar': 'minatar', 'robotics': 'gymnasium_robotics', 'digits': 'sklearn', 'ray': 'ray',
          'envpool': 'envpool'}
EPISODE_STEPS = 15
RECORDED_STEPS = 60  # steps of a recorded dataset, in whole episodes
ENDS_BY_ITSELF = 'board_games.load'  # a suite with short episodes, which need no limit
NEEDS_ONE_ENVIRONMENT = 'Td7Algorithm.policy_checkpoints'


def text_of(name):
    with open(os.path.join(parsing.CONFS, name), encoding='utf8') as file:
        return file.read()


def is_task(name):
    """Return whether a conf describes a run; other confs are only included."""
    return '#   task' in text_of(name)


TASKS = [name for name in CONFS if is_task(name)]
BASES = [name for name in CONFS if not is_task(name)]


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


@pytest.fixture(autouse=True)
def in_separate_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Short(NamedTuple):
    """Bindings that make a run short, limits of episodes, and prefixes of bindings that only evaluations need."""
    params: list
    episode_limit: list
    of_evaluation: tuple


def record_datasets(conf, config):
    """Record a few random episodes wherever the conf expects a dataset."""
    shown = [binding.value for binding in conf.bindings if binding.text.endswith('.demonstrations')]
    for path in {*config.offline_datasets(), *shown}:
        env = building.create_eval_environment(config, 2)
        act = recorder.random_policy(env.action_spec(), 2)
        dataset_folder.write(path, recorder.record(env, act, RECORDED_STEPS), {})
        env.close()


def shortened(name):
    """Check the configuration as shipped and return the overrides for a short run."""
    conf = gin_utils.load(name)
    config = TrainerConfig(root_dir='unused')
    record_datasets(conf, config)
    params = ['TrainerConfig.replay_buffer_length = 256', 'TrainerConfig.num_updates_per_train_iter = 1',
              'TrainerConfig.num_eval_environments = 1']
    if config.mini_batch_size is not None:
        params.append(f'TrainerConfig.mini_batch_size = {min(config.mini_batch_size, 8)}')
    bound = {binding.text: binding.value for binding in conf.bindings}
    if config.ml_type == 'rl':
        unroll_length = min(config.unroll_length, max(8, config.mini_batch_length or 1))
        params += [f'TrainerConfig.unroll_length = {unroll_length}'] if unroll_length else []
        params += [f'create_environment.num_parallel_environments = {1 if NEEDS_ONE_ENVIRONMENT in bound else 2}',
                   'create_environment.nonparallel = True']
    if any(text.startswith('ModelBasedPolicyAlgorithm.') for text in bound):
        params += ['ModelBasedPolicyAlgorithm.max_model_updates = 2', 'ModelBasedPolicyAlgorithm.num_rollouts = 8']
    if 'ParticleEntropy.num_neighbors' in bound:  # more than a small batch has
        params.append('ParticleEntropy.num_neighbors = 3')
    load_fns = [bound.get('create_environment.env_load_fn', '@suite_gym.load'),
                *filter(None, [bound.get('create_environment.eval_env_load_fn')])]
    suites = [str(load_fn).removeprefix('@') for load_fn in load_fns]
    episode_limit = [f'{suite}.max_episode_steps = {EPISODE_STEPS}' for suite in suites if suite != ENDS_BY_ITSELF]
    if any(text.startswith('EvolutionStrategyAlgorithm.') for text in bound):  # collects whole episodes of every member
        params += ['EvolutionStrategyAlgorithm.num_agents = 2', 'EvolutionStrategyAlgorithm.num_episodes = 1',
                   'EvolutionStrategyAlgorithm.num_best = None', *episode_limit]
    others = [f'{suite.split("/")[-1]}.' for suite in suites[1:] if suite.split('/')[-1] != suites[0]]
    return Short(params, episode_limit, ('evaluation/', *others))


def train(name, short, root_dir):
    """Run two parameter updates the way a user would; return the unused bindings."""
    with gin_utils.loaded(name, short.params, root_dir) as conf:
        gin_utils.write_conf(root_dir, conf, ['train', '--conf', name])
        config = TrainerConfig(root_dir=root_dir, conf_file=conf.conf_file)
        trainer = RLTrainer(config) if config.ml_type == 'rl' else SLTrainer(config)
        conf_check.shorten(config, trainer._env.batch_size if config.ml_type == 'rl' else 1)
        config.num_iterations += 1
        trainer.train()
        return [f'{binding.location}: {binding}' for binding in gin_utils.unused_bindings()
                if config.evaluate or not str(binding).startswith(short.of_evaluation)]  # for play_one_episode


def play_one_episode(short, root_dir):
    """Evaluate one episode, given only the run folder."""
    with gin_utils.loaded(None, short.episode_limit, root_dir, same_run=False):
        config = TrainerConfig(root_dir=root_dir)
        config.random_seed = 0
        env = building.create_eval_environment(config, 1)
        try:
            result = play(root_dir, env, building.create_algorithm(config, env, trains=False), num_episodes=1,
                          render=False)
        finally:
            env.close()
        assert not [binding for binding in gin_utils.unused_bindings() if str(binding).startswith(short.of_evaluation)]
        return result


@pytest.mark.parametrize('name', TASKS)
def test_a_shipped_conf_trains_saves_and_plays_using_every_binding(name, tmp_path):
    extra = re.search(r'needs the extra (\w+)', text_of(name))
    if extra:
        pytest.importorskip(EXTRAS[extra.group(1)])
    since = re.search(r'needs gymnasium ([\d.]+)', text_of(name))
    pytest.importorskip('gymnasium', minversion=since and since.group(1))
    root_dir = str(tmp_path / 'run')
    short = shortened(name)
    assert train(name, short, root_dir) == []
    assert glob.glob(os.path.join(root_dir, 'train', 'algorithm', 'ckpt-*'))
    if 'create_environment' in gin_utils.stored_info(root_dir)['operative']:
        result = play_one_episode(short, root_dir)
        assert len(result.returns) == 1 and 1 <= result.lengths[0] <= EPISODE_STEPS


@pytest.mark.parametrize('name', BASES)
def test_a_conf_to_be_included_has_no_errors(name):
    gin_utils.load(name)
    assert any(f"include '{name}'" in text_of(other) for other in CONFS), 'it is included by a task'


@pytest.mark.parametrize('name', TASKS)
def test_task_confs_are_short_and_state_paper_task_and_expected_return(name):
    head = text_of(name).split('\n\n')[0].splitlines()
    assert re.match(r'# .*\(.* (19|20)\d\d, (arXiv:\d{4}\.\d{4,5}|\S+).*\)', head[0]), 'algorithm, task and paper'
    assert re.search(r'#   task .*[\d,]+ (steps|epochs).*about .* on 2 cores', '\n'.join(head))
    assert re.search(r'#   expected +\S+', '\n'.join(head))
    statements = [line for line in text_of(name).splitlines() if line.strip() and not line.startswith('#')]
    assert len(statements) < 32, 'what tasks have in common belongs in a conf that they include'


@pytest.mark.parametrize('name', BASES)
def test_a_conf_meant_to_be_included_is_marked(name):
    head = text_of(name).split('\n\n')[0]
    assert head.startswith('# ') and 'include' in head


def test_confs_exist():
    assert len(TASKS) >= 6
