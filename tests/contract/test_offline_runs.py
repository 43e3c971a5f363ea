"""Runs on datasets from end to end: record, train, resume, evaluate; and the errors in between."""
import csv
import glob
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from alfx import context, gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.transformers.normalization import episode_returns
from alfx.data_structures import Experience, TimeStep
from alfx.gin_utils import ConfError
from alfx.offline import recorder
from alfx.offline import dataset_folder
from alfx.offline import dataset_sources
from alfx.offline import dataset_spaces
from alfx.offline.dataset_episodes import Episodes, steps
from alfx.reports import curves
from alfx.runs import building
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.trainers.policy_trainer import RLTrainer
from alfx.trainers.progress_display import ProgressDisplay
from alfx.utils.checkpoint_utils import read_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / 'tools'))
import kill_runs
from helpers import offline_agents
from helpers import warm_starts

SMALL = ('TrainerConfig.num_updates_per_train_iter = 3', 'TrainerConfig.mini_batch_size = 8',
         'TrainerConfig.random_seed = 7', 'TrainerConfig.num_threads = 1',
         "TrainerConfig.float32_matmul_precision = 'highest'", 'suite_gym.load.max_episode_steps = 20')


@pytest.fixture(autouse=True)
def in_separate_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    gin_utils.clear()


def record(path, num_steps=100, seed=0):
    with gin_utils.loaded('iql_pendulum', SMALL):
        config = TrainerConfig(root_dir='')
        config.random_seed = seed
        torch.manual_seed(seed)
        env = building.create_eval_environment(config, 1)
        dataset_folder.write(path, recorder.record(env, recorder.random_policy(env.action_spec(), 1), num_steps),
                     dataset_spaces.specs_as_json(env), overwrite=True)
        env.close()


NOWHERE = "create_environment.env_name = 'offline'"


def train(conf, root_dir, *params):
    context.reset()
    small = [x for x in SMALL if NOWHERE not in params or not x.startswith('suite_gym.')]
    with gin_utils.loaded(conf, [*small, *params], root_dir) as loaded:
        gin_utils.write_conf(root_dir, loaded, ['train'])
        trainer = RLTrainer(TrainerConfig(root_dir=root_dir, conf_file=loaded.conf_file))
        trainer.train()
        return trainer


def final_state(root_dir):
    newest = max(glob.glob(os.path.join(root_dir, 'train', 'algorithm', 'ckpt-*')),
                 key=lambda path: (int(path.split('-')[-1]) if path.split('-')[-1].isdigit() else -1))
    return read_checkpoint(newest)['alg'], newest


KINDS = {'offline': (), 'pretraining': ('TrainerConfig.unroll_length = 4', 'TrainerConfig.num_iterations = 6',
                                        'TrainerConfig.rl_train_after_update_steps = 4'),
         'by priority': ('TrainerConfig.priority_replay = True', 'IqlAlgorithm.calculate_priority = True'),
         'hybrid': ('TrainerConfig.unroll_length = 4', 'TrainerConfig.num_iterations = 6')}


@pytest.mark.parametrize('kind', KINDS)
def test_a_resumed_run_matches_an_uninterrupted_one(kind):
    record('data/pendulum/replay')
    train('iql_pendulum', 'whole', *KINDS[kind], 'TrainerConfig.num_iterations = 6')
    train('iql_pendulum', 'parts', *KINDS[kind], 'TrainerConfig.num_iterations = 3')
    train('iql_pendulum', 'parts', *KINDS[kind], 'TrainerConfig.num_iterations = 6')
    (uninterrupted, path), (parts, _) = final_state('whole'), final_state('parts')
    for name, value in uninterrupted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, parts[name]), name
    assert os.path.getsize(path) < 5_000_000
    assert uninterrupted['_extra_state']['offline_data'][0][0] == 'data/pendulum/replay'


def test_resuming_rejects_other_data_but_accepts_moved_data():
    record('data/pendulum/replay')
    train('iql_pendulum', 'run', 'TrainerConfig.num_iterations = 2')
    os.rename('data/pendulum/replay', 'data/moved')
    train('iql_pendulum', 'run', 'TrainerConfig.num_iterations = 3', "TrainerConfig.offline_buffer_dir = 'data/moved'")
    record('data/pendulum/replay', seed=1)
    with pytest.raises(ConfError, match='(?s)other data than the run has been trained on.*found.*expected'):
        train('iql_pendulum', 'run', 'TrainerConfig.num_iterations = 4',
              "TrainerConfig.offline_buffer_dir = 'data/pendulum/replay'")
    with pytest.raises(ConfError, match='offline_buffer_length is 50, but the run in run has None'):
        train('iql_pendulum', 'run', 'TrainerConfig.num_iterations = 4', 'TrainerConfig.offline_buffer_length = 50',
              "TrainerConfig.offline_buffer_dir = 'data/moved'")


def test_a_policy_is_evaluated_without_its_data():
    from alfx.runs.evaluator import evaluate
    from alfx.runs.playing import load_for_play
    record('data/pendulum/expert')
    train('bc_pendulum', 'run', 'TrainerConfig.num_iterations = 2')
    os.rename('data', 'gone')
    with gin_utils.loaded(None, [], 'run', same_run=False):
        config = TrainerConfig(root_dir='run')
        config.random_seed = 0
        env = building.create_eval_environment(config, 1)
        algorithm = building.create_algorithm(config, env, trains=False)
        load_for_play('run', algorithm)
        assert len(evaluate(env, algorithm, 2).returns) == 2
        env.close()


def test_statistics_of_the_data_are_exact_and_stay_so():
    record('data/pendulum/replay')
    record('data/more', 60, seed=3)
    trainer = train('iql_pendulum', 'run', 'TrainerConfig.num_iterations = 2', 'TrainerConfig.unroll_length = 4',
                    "TrainerConfig.offline_buffer_dir = ['data/pendulum/replay', 'data/more']",
                    'TrainerConfig.data_transformer_ctor = [@RewardScaling, @ObservationNormalizer]',
                    "ObservationNormalizer.update_mode = 'offline'")
    names = ('data/pendulum/replay', 'data/more')
    data = np.concatenate([dataset_sources.read(name).episodes.observation[''] for name in names])
    transformer = trainer.algorithm.data_transformer
    stats = transformer.members()[1]._normalizer._stats_list[0]
    np.testing.assert_allclose(stats.mean.numpy(), data.mean(0, np.float64), rtol=1e-5)
    np.testing.assert_allclose(stats.variance.numpy(), data.var(0, dtype=np.float64), rtol=1e-5)


def test_offline_and_collected_rewards_are_scaled_by_dataset_returns():
    record('data/pendulum/replay', 100)
    record('data/more', 60, seed=3)
    trainer = train('iql_pendulum', 'run', 'TrainerConfig.num_iterations = 2', 'TrainerConfig.unroll_length = 4',
                    "TrainerConfig.offline_buffer_dir = ['data/pendulum/replay', 'data/more']",
                    'TrainerConfig.data_transformer_ctor = @DatasetRewardScaling',
                    'DatasetRewardScaling.return_range = 10.0')
    returns = np.concatenate([dataset_sources.read(name).episodes.returns() for name in ('data/pendulum/replay',
                                                                                         'data/more')])
    assert len(returns) == 8
    scale = 10.0 / (returns.max() - returns.min())
    for step_type in range(3):
        reward = torch.tensor([-1.0, -3.0])
        transformed, _ = trainer.algorithm.data_transformer.transform_timestep(
            TimeStep(step_type=torch.full((2, ), step_type), reward=reward), ())
        torch.testing.assert_close(transformed.reward, reward * scale)
    saved = [x for name, x in final_state('run')[0].items() if name.endswith('data_transformer._scale')]
    torch.testing.assert_close(saved, [torch.tensor(scale).float()])


def test_returns_cover_whole_episodes_across_parts():
    step_type = torch.tensor([[0, 1, 2, 0, 2, 0, 1, 1]])
    reward = torch.tensor([[9.0, 1.0, 2.0, 9.0, 4.0, 9.0, 8.0, 16.0]])
    for cuts in ([8], [2, 6], [3, 5], [1] * 8):
        parts = [Experience(TimeStep(step_type=x, reward=y)) for x, y in zip(step_type.split(cuts, 1),
                                                                            reward.split(cuts, 1))]
        assert episode_returns(parts).tolist() == [3.0, 4.0, 24.0], cuts


@pytest.mark.parametrize('conf, params', [
    ('sac_pendulum', ()),
    ('dagger_cart_pole', ('TrainerConfig.algorithm_ctor = @DaggerAlgorithm',
                          'DaggerAlgorithm.actor_optimizer = @Adam()'))], ids=['sac', 'dagger, not in an agent'])
def test_statistics_of_data_need_data(conf, params):
    with pytest.raises(ConfError, match='offline_buffer_dir is not set'):
        train(conf, 'run', *params, 'TrainerConfig.data_transformer_ctor = @ObservationNormalizer',
              "ObservationNormalizer.update_mode = 'offline'")
    with pytest.raises(ConfError, match='offline_buffer_dir is not set'):
        train(conf, 'other', *params, 'TrainerConfig.data_transformer_ctor = @DatasetRewardScaling')


@pytest.mark.parametrize('transformer, unroll_length, message', [
    ("@ObservationNormalizer\nObservationNormalizer.update_mode = 'rollout'", 0, "trains on datasets.* 'replay'"),
    ('@DiscountedReturnScaling', 0, 'only trains on datasets.* leave it out'),
    ("@ObservationNormalizer\nObservationNormalizer.update_mode = 'pretrain'", 4, "rl_train_after.* 'replay'"),
    ("@ObservationNormalizer\nObservationNormalizer.update_mode = 'rollout'", 4, None),
    ("@ObservationNormalizer\nObservationNormalizer.update_mode = 'pretrain'\n"
     'TrainerConfig.rl_train_after_update_steps = 1', 4, None)])
def test_statistics_that_would_never_be_updated_are_rejected(transformer, unroll_length, message):
    record('data/pendulum/replay')
    params = ('iql_pendulum', 'run', 'TrainerConfig.num_iterations = 2',
              f'TrainerConfig.unroll_length = {unroll_length}',
              *f'TrainerConfig.data_transformer_ctor = {transformer}'.split('\n'))
    if message is None:
        assert train(*params).algorithm.data_transformer._normalizer._stats_list[0].mean.any()
    else:
        with pytest.raises(ConfError, match=f'(?s){message}'):
            train(*params)


def test_the_replay_buffer_of_a_run_is_a_dataset():
    train('sac_pendulum', 'run', 'TrainerConfig.num_env_steps = 70', 'TrainerConfig.initial_collect_steps = 30',
          'TrainerConfig.replay_buffer_length = 50')
    _, path = final_state('run')
    state = read_checkpoint(path)['alg']['_extra_state']['replay_buffer']
    dataset = dataset_sources.read(path)
    assert dataset_sources.read('run').fingerprint == dataset.fingerprint
    episodes = dataset.episodes
    assert episodes.num_steps <= 50 and not episodes.terminated().any() and episodes.lengths.max() == 20
    with gin_utils.loaded('sac_pendulum', []):
        trainer = RLTrainer(TrainerConfig(root_dir='other'))
    buffer = trainer.algorithm.replay_buffer
    assert state['max_length'] == 50
    time_step, action = next(steps(episodes, 0, TensorSpec((3, )), BoundedTensorSpec((1, )), TensorSpec(())))
    rewards = time_step.reward[time_step.step_type != 0]
    assert len(rewards) == episodes.num_actions and (rewards < 0).all() and buffer.total_size == 0
    angles = time_step.observation[:, :2].square().sum(1)
    torch.testing.assert_close(angles, torch.ones_like(angles))


def test_a_dataset_matches_the_specs_and_dynamics_of_its_environment():
    """Recompute the rewards of Pendulum, which are a function of the previous observation and the torque."""
    record('data/pendulum/replay')
    train('iql_pendulum', 'run', 'TrainerConfig.num_iterations = 1')
    with gin_utils.loaded('iql_pendulum', SMALL):
        trainer = RLTrainer(TrainerConfig(root_dir='other'))
    experience, _ = trainer.algorithm.offline_replay_buffer.get_batch(500, 2)
    first, second = (experience.time_step.observation[:, t] for t in range(2))
    is_pair = experience.time_step.step_type[:, 0] != 2
    torque = 2 * experience.action[:, 0, 0]
    angle = torch.atan2(first[:, 1], first[:, 0])
    expected = -(angle**2 + 0.1 * first[:, 2]**2 + 0.001 * torque**2)
    torch.testing.assert_close(experience.time_step.reward[is_pair, 1], expected[is_pair], atol=1e-4, rtol=1e-4)
    assert (experience.time_step.step_type[is_pair, 1] != 0).all() and is_pair.sum() > 400
    torch.testing.assert_close(experience.time_step.prev_action[is_pair, 1], experience.action[is_pair, 0])
    assert not torch.equal(first[is_pair], second[is_pair])


def test_a_run_without_the_environment_learns_the_same_from_the_data():
    record('data/pendulum/replay')
    with_environment = train('iql_pendulum', 'there', 'TrainerConfig.num_iterations = 2')
    without = train('iql_pendulum', 'without', 'TrainerConfig.num_iterations = 2', NOWHERE)
    for x, y in zip(with_environment.algorithm.parameters(), without.algorithm.parameters()):
        assert torch.equal(x, y)
    for setting in ('unroll_length = 4', 'evaluate = True'):
        with pytest.raises(ConfError, match=f"env_name = 'offline' has no environment to act in, but .*{setting}"):
            train('iql_pendulum', 'other', NOWHERE, f'TrainerConfig.{setting}')
    with gin_utils.loaded('iql_pendulum', [NOWHERE]), pytest.raises(ConfError, match='no environment to act in'):
        building.create_eval_environment(TrainerConfig(root_dir=''), 1)


def test_dataset_specs_match_those_of_the_environment(tmp_path):
    class Environment:
        def observation_spec(self):
            return {'arm': {'joint': TensorSpec((2, ))}, 'image': BoundedTensorSpec((3, 4, 4), torch.uint8, 0, 255)}

        def action_spec(self):
            return BoundedTensorSpec((), torch.int64, 1, 4)

        def reward_spec(self):
            return TensorSpec((2, ))

    stored = json.loads(json.dumps(dataset_spaces.specs_as_json(Environment())))
    dataset_folder.write(str(tmp_path / 'a'), Episodes({'arm.joint': np.zeros((2, 2)),
                                                        'image': np.zeros((2, 3, 4, 4))}, {
        '': np.ones(1, np.int64)}, np.zeros((1, 2)), np.ones(1), np.ones(1, np.int64)), stored)
    found = dataset_spaces.RecordedEnvironment([str(tmp_path / 'a')], 3)
    for method in ('observation_spec', 'action_spec', 'reward_spec'):
        assert getattr(found, method)() == getattr(Environment(), method)()
    assert found.batch_size == 3
    dataset_folder.write(str(tmp_path / 'a'), dataset_folder.read(str(tmp_path / 'a')).episodes, {}, overwrite=True)
    with pytest.raises(ConfError, match='does not contain the specs of its environment'):
        dataset_spaces.RecordedEnvironment([str(tmp_path / 'a')], 3)


@pytest.mark.parametrize('conf, params, message', [
    ('ac_cart_pole', ['TrainerConfig.whole_replay_buffer_training = False', 'TrainerConfig.mini_batch_length = 2'],
     'trained on-policy'),
    ('iql_pendulum', ['Agent.rl_algorithm_cls = @PPOAlgorithm'], 'PPOAlgorithm is trained on-policy'),
    ('taac_pendulum', [], 'learns from more than the actions of the rollout: rl.'),
    ('sac_lunar_lander_continuous', [], 'does not fit the environment of this run'),
])
def test_algorithms_that_cannot_train_offline_raise_with_the_reason(conf, params, message):
    if conf == 'sac_lunar_lander_continuous':
        pytest.importorskip('Box2D')
    record('data/pendulum/replay')
    with pytest.raises(ConfError, match=f'(?s){message}'):
        train(conf, 'run', "TrainerConfig.offline_buffer_dir = 'data/pendulum/replay'", *params)


@pytest.mark.parametrize('conf, params', [
    ('bc_pendulum', ()), ('causal_bc_pendulum', ()), ('iql_pendulum', ()),
    ('rlpd_pendulum', ('TrainerConfig.rl_train_after_update_steps = 2', 'TrainerConfig.rl_train_every_update_steps = 2',
                       'TrainerConfig.initial_collect_steps = 8', 'TrainerConfig.unroll_length = 4',
                       'TrainerConfig.num_env_steps = 0', 'TrainerConfig.replay_buffer_length = 100'))])
def test_a_replay_buffer_of_alf_is_trained_on(conf, params):
    """Train on two files of ALF at once: by cloning, by offline learning, or mixed with collected data."""
    record('recorded')
    episodes = dataset_folder.read('recorded').episodes
    time_step, _ = next(steps(episodes, 0, TensorSpec((3, )), BoundedTensorSpec((1, )), TensorSpec(())))
    for name in ('sac_10k', 'more'):
        offline_agents.file_of_alf(name, time_step)
    trainer = train(conf, 'run', "TrainerConfig.offline_buffer_dir = ['sac_10k', 'more']",
                    'TrainerConfig.num_iterations = 6', 'TrainerConfig.offline_buffer_length = 50', *params)
    buffer = trainer.algorithm.offline_replay_buffer
    assert buffer.current_size.tolist() == [50, 50] and trainer.current_iterations() == 6
    if params:
        assert trainer.algorithm.replay_buffer.total_size == 4 * 4
    else:
        assert trainer.algorithm.get_step_metrics()[0].count == 0


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['offline', 'pretraining, then both'])
def test_kills_at_random_times_do_not_change_the_result(tmp_path, kind):
    record('data/pendulum/replay', 2000)
    conf, params = {'offline': ('iql_pendulum', ('TrainerConfig.num_iterations=20', )), 'pretraining, then both': (
        'iql_finetune_pendulum', ('TrainerConfig.num_iterations=12',
                                  'TrainerConfig.rl_train_after_update_steps=600'))}[kind]
    gin_utils.clear()
    path = os.path.abspath('data/pendulum/replay')
    outcome, = kill_runs.kill_runs(conf, tmp_path / 'runs', 3 if kind == 'offline' else 1,
                                   (f"TrainerConfig.offline_buffer_dir='{path}'", *params), 1, popen=warm_starts.Popen)
    assert not outcome.differs, kill_runs.report(conf, outcome)


@pytest.mark.processes
def test_training_on_a_dataset_and_then_by_acting_is_one_curve():
    record('data/pendulum/replay')
    train('iql_finetune_pendulum', 'run', 'TrainerConfig.num_iterations = 8', 'TrainerConfig.unroll_length = 4',
          'TrainerConfig.rl_train_after_update_steps = 12', 'TrainerConfig.num_summaries = 8',
          'TrainerConfig.evaluate = True', 'TrainerConfig.num_evals = 8', 'TrainerConfig.num_eval_episodes = 1')
    with open('run/eval/progress.csv') as file:
        steps_of = [int(row['env_steps']) for row in csv.DictReader(file)]
    assert steps_of[:4] == [0] * 4 and steps_of[4:] == sorted(set(steps_of[4:]))  # the first half runs without acting
    result = warm_starts.run([sys.executable, '-m', 'alfx.bin.plot', 'run', '--y', 'average_return,loss'],
                             capture_output=True, text=True)
    curves_shown = re.findall(r'^(\w+ in \w+): iql_finetune_pendulum: \S+ at (\d+)$', result.stdout, re.MULTILINE)
    assert curves_shown == [('average_return in evaluation', '8'), ('loss in training', '7')], result.stderr
    axis = curves.axis_of(['run'])
    assert curves.read_curve('run', axis, 'average_return', evaluation=True).x.tolist() == list(range(1, 9))
    assert curves.read_curve('run', axis, 'loss', evaluation=False).x.tolist() == list(range(8))


@pytest.mark.processes
@pytest.mark.parametrize('setting', ['async_unroll = True',
                                     pytest.param('num_ray_workers = 1', marks=pytest.mark.slow)])
def test_asynchronous_actors_work_with_an_additional_dataset(setting):
    if 'ray' in setting:
        pytest.importorskip('ray')
    record('data/pendulum/replay')
    trainer = train('iql_pendulum', 'run', f'TrainerConfig.{setting}', 'TrainerConfig.unroll_length = 4',
                    'TrainerConfig.num_iterations = 8', 'TrainerConfig.rl_train_after_update_steps = 3',
                    'TrainerConfig.replay_buffer_length = 100')
    assert trainer.current_iterations() == 8
    assert trainer.algorithm.replay_buffer.total_size >= 4 * 4
    assert all(torch.isfinite(x).all() for x in trainer.algorithm.parameters())


def test_progress_is_shown_in_updates_and_loss(monkeypatch):
    shown = []
    monkeypatch.setattr(ProgressDisplay, 'is_due', lambda self: True)
    monkeypatch.setattr(ProgressDisplay, 'show', lambda self, percent, count, values: shown.append(values))
    record('data', seed=1)
    train('iql_pendulum', 'run', "TrainerConfig.offline_buffer_dir = 'data'", 'TrainerConfig.num_iterations = 4',
          'TrainerConfig.summary_interval = 1')
    assert [list(values) for values in shown] == 5 * [['iteration', 'updates', 'loss']]  # the last one twice
    assert [values['updates'] for values in shown] == ['3', '6', '9', '12', '12'] and float(shown[-1]['loss'])
