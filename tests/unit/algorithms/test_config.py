"""TrainerConfig: documented defaults, and invalid settings."""

import copy
import inspect

import pytest

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.gin_utils import ConfError
from alfx.trainers.policy_trainer import RLTrainer, SLTrainer


def algorithm(**kwargs):
    """Stand in for the constructor of an algorithm."""


def make(**kwargs):
    return TrainerConfig('run', algorithm_ctor=algorithm, **kwargs)


def problems_of(**kwargs):
    with pytest.raises(ConfError) as caught:
        make(**kwargs)
    return [str(problem).splitlines()[0] for problem in caught.value.problems]


DOCUMENTED = dict(
    conf_file='', ml_type='rl', data_transformer_ctor=None, random_seed=None, num_iterations=1000, num_env_steps=0,
    num_episodes=0, stop_at_return=None,
    unroll_length=8, unroll_with_grad=False, async_unroll=False, max_unroll_length=0, unroll_queue_size=200,
    unroll_step_interval=0, unroll_parameter_update_period=10, use_rollout_state=False,
    temporally_independent_train_step=None, num_checkpoints=10, confirm_checkpoint_upon_crash=True,
    no_thread_env_for_conf=False, evaluate=False, num_evals=None, eval_interval=10, epsilon_greedy=0.0,
    eval_uncertainty=False, num_eval_episodes=10, num_eval_environments=1, eval_video_steps=0, async_eval=True,
    ddp_paras_check_interval=0, num_summaries=None, summary_interval=50, summarize_first_interval=True,
    update_counter_every_mini_batch=False, summary_axis=None,
    loggers=('tensorboard', ), summaries_flush_secs=1, summary_max_queue=10, metric_min_buffer_size=10,
    debug_summaries=False, profiling=False, enable_amp=False, code_snapshots=None, summarize_grads_and_vars=False,
    summarize_gradient_noise_scale=False, summarize_action_distributions=False, summarize_output=False,
    initial_collect_steps=0, num_updates_per_train_iter=4, mini_batch_length=None, mini_batch_size=None,
    whole_replay_buffer_training=True, replay_buffer_length=1024, priority_replay=False, priority_replay_alpha=0.7,
    priority_replay_beta=0.4, priority_replay_eps=1e-6, offline_buffer_dir=None, offline_buffer_length=None,
    rl_train_after_update_steps=0, rl_train_every_update_steps=1, empty_cache=False,
    normalize_importance_weights_by_max=False, clear_replay_buffer=True, num_ray_workers=0, ray_address='',
    offline_mini_batch_size=None, offline_loss_weight=1.0,
    num_threads=None, float32_matmul_precision=None, compile=False, replay_checkpoint_megabytes=256,
    environment_checkpoint_megabytes=32, save_environment_state=True, callbacks=())


def test_every_field_has_its_documented_default():
    config = make()
    assert {name: getattr(config, name) for name in DOCUMENTED} == DOCUMENTED
    assert set(inspect.signature(TrainerConfig).parameters) == {*DOCUMENTED, 'root_dir', 'algorithm_ctor'}


def test_arguments_have_the_documented_order():
    names = list(inspect.signature(TrainerConfig).parameters)
    assert names[:5] == ['root_dir', 'conf_file', 'ml_type', 'algorithm_ctor', 'data_transformer_ctor']
    assert names[-5:-2] == ['num_threads', 'float32_matmul_precision', 'compile']


def test_the_algorithm_has_to_be_named_where_it_is_built():
    config = TrainerConfig('run', unroll_length=5)
    assert config.algorithm_ctor is None
    for build in (RLTrainer, SLTrainer):
        with pytest.raises(ConfError, match='TrainerConfig.algorithm_ctor is not set\n.*algorithm_ctor = @Agent'):
            build(config)


def test_intervals_may_be_0_where_a_number_replaces_them():
    config = TrainerConfig('run', algorithm_ctor=algorithm, summary_interval=0, num_summaries=5, eval_interval=0,
                           num_evals=3)
    assert (config.summary_interval, config.eval_interval) == (0, 0)
    with pytest.raises(ConfError, match='summary_interval must be an int >= 1, found int 0\n.*num_summaries'):
        TrainerConfig('run', algorithm_ctor=algorithm, summary_interval=0)


def test_home_is_expanded_in_the_run_folder(monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path))
    assert TrainerConfig('~/run', algorithm_ctor=algorithm).root_dir == str(tmp_path / 'run')
    assert TrainerConfig(tmp_path, algorithm_ctor=algorithm).root_dir == str(tmp_path)


@pytest.mark.parametrize('name, value, expected', [
    ('ml_type', 'rll', "must be one of ['rl', 'sl'], found str 'rll'"),
    ('num_iterations', -1, 'must be an int >= 0, found int -1'),
    ('num_iterations', 2.5, 'must be an int >= 0, found float 2.5'),
    ('num_iterations', True, 'must be an int >= 0, found True'),
    ('num_env_steps', '1000', "must be an int >= 0, found str '1000'"),
    ('unroll_length', -0.5, 'must be a number >= 0, found float -0.5'),
    ('unroll_length', float('nan'), 'must be a number >= 0, found float nan'),
    ('random_seed', -1, 'must be an int in [0, 4294967295] or None, found int -1'),
    ('summary_interval', 0, 'must be an int >= 1, found int 0'),
    ('num_summaries', 0, 'must be an int >= 1 or None, found int 0'),
    ('eval_interval', 0, 'must be an int >= 1, found int 0'),
    ('num_evals', 0, 'must be an int >= 1 or None, found int 0'),
    ('num_eval_episodes', 0, 'must be an int >= 1, found int 0'),
    ('epsilon_greedy', 1.5, 'must be a number in [0, 1], found float 1.5'),
    ('evaluate', 1, 'must be True or False, found int 1'),
    ('temporally_independent_train_step', 'no', "must be True or False or None, found str 'no'"),
    ('replay_buffer_length', 0, 'must be an int >= 1, found int 0'),
    ('mini_batch_length', 0, 'must be an int >= 1 or None, found int 0'),
    ('mini_batch_size', -2, 'must be an int >= 1 or None, found int -2'),
    ('num_updates_per_train_iter', 0, 'must be an int >= 1, found int 0'),
    ('initial_collect_steps', -1, 'must be an int >= 0, found int -1'),
    ('priority_replay_alpha', -0.1, 'must be a number or a callable >= 0, found float -0.1'),
    ('num_threads', 0, 'must be an int >= 1 or None, found int 0'),
    ('float32_matmul_precision', 'hihg', 'must be one of'),
    ('data_transformer_ctor', 3, 'must contain constructors, found int 3'),
    ('algorithm_ctor', 3, 'must be a callable, found int 3'),
])
def test_a_wrong_value_is_rejected_by_name(name, value, expected):
    kwargs = {'algorithm_ctor': algorithm, name: value}
    with pytest.raises(ConfError) as caught:
        TrainerConfig('run', **kwargs)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f'TrainerConfig.{name} {expected}')


def test_the_nearest_choice_is_suggested():
    with pytest.raises(ConfError, match="did you mean 'high'"):
        make(float32_matmul_precision='hihg')


@pytest.mark.parametrize('kwargs, first, also', [
    (dict(num_iterations=0), 'num_iterations', 'num_env_steps'),
    (dict(num_iterations=0, ml_type='sl'), 'num_iterations', 'epochs'),
    (dict(unroll_length=0), 'unroll_length', 'no environment'),
    (dict(mini_batch_length=2000), 'mini_batch_length', 'replay_buffer_length = 1024'),
    (dict(whole_replay_buffer_training=False), 'mini_batch_length', 'whole_replay_buffer_training'),
    (dict(code_snapshots=['no/such/file.py']), 'code_snapshots', 'no/such/file.py'),
    (dict(async_unroll=True, unroll_length=0), 'max_unroll_length', 'nothing would be collected'),
    (dict(async_unroll=True, max_unroll_length=5), 'max_unroll_length', 'unroll_length = 0'),
    (dict(async_unroll=True, ml_type='sl'), 'async_unroll', 'has no environments'),
    (dict(async_unroll=True, unroll_with_grad=True), 'async_unroll', 'unroll_with_grad'),
    (dict(num_ray_workers=2, async_unroll=True), 'num_ray_workers', 'only one of them'),
    (dict(num_ray_workers=2, ml_type='sl'), 'num_ray_workers', 'has no environments'),
    (dict(num_ray_workers=2, unroll_with_grad=True), 'num_ray_workers', 'unroll_with_grad'),
    (dict(num_ray_workers=2, unroll_step_interval=0.1), 'unroll_step_interval', 'async_unroll'),
    (dict(num_ray_workers=2, unroll_length=0), 'unroll_length', 'no environment would ever be stepped'),
    (dict(ray_address='auto'), 'ray_address', 'num_ray_workers'),
    (dict(max_unroll_length=5), 'max_unroll_length', 'async_unroll'),
    (dict(unroll_queue_size=10), 'unroll_queue_size', 'async_unroll'),
    (dict(unroll_step_interval=0.1), 'unroll_step_interval', 'async_unroll'),
    (dict(unroll_parameter_update_period=5), 'unroll_parameter_update_period', 'async_unroll'),
])
def test_conflicting_options_are_rejected(kwargs, first, also):
    found, = problems_of(**kwargs)
    assert found.startswith(f'TrainerConfig.{first}') and also in found


def test_conflicts_of_unavailable_options_are_reported_too():
    assert any('no effect' in p for p in problems_of(priority_replay=True))


@pytest.mark.parametrize('kwargs', [
    dict(num_iterations=0, num_env_steps=1000), dict(num_iterations=5, ml_type='sl', unroll_length=0),
    dict(unroll_length=0.25), dict(async_unroll=True, unroll_length=0, max_unroll_length=4),
    dict(num_ray_workers=2, unroll_queue_size=3, unroll_parameter_update_period=1, ray_address='local'),
    dict(async_unroll=True, unroll_queue_size=3, unroll_step_interval=0.1, unroll_parameter_update_period=1),
    dict(whole_replay_buffer_training=False, mini_batch_length=2, replay_buffer_length=2),
    dict(code_snapshots=['algorithms/config.py']), dict(random_seed=0),
    dict(epsilon_greedy=1), dict(float32_matmul_precision='medium', num_threads=2),
    dict(summaries_flush_secs=0.5), dict(data_transformer_ctor=[algorithm, algorithm]),
    dict(priority_replay=True, whole_replay_buffer_training=False, mini_batch_length=2, priority_replay_beta=1.0,
         priority_replay_alpha=algorithm, priority_replay_eps=0.1),
])
def test_sensible_options_are_accepted(kwargs):
    config = make(**kwargs)
    assert {name: getattr(config, name) for name in kwargs} == kwargs


@pytest.mark.parametrize('whole_buffer, clear', [(True, True), (True, False), (False, True), (False, False)])
def test_unrolls_are_minibatches_if_the_whole_buffer_is_used_and_cleared(whole_buffer, clear):
    """Unrolls are the minibatches if the whole buffer is used and then cleared."""
    config = make(whole_replay_buffer_training=whole_buffer, clear_replay_buffer=clear, mini_batch_length=2)
    assert config.trains_on_whole_unrolls is (whole_buffer and clear)


@pytest.mark.parametrize('kwargs', [
    dict(rl_train_after_update_steps=1), dict(rl_train_every_update_steps=2), dict(offline_buffer_length=10),
    dict(offline_mini_batch_size=8), dict(offline_loss_weight=0.5),
])
def test_dataset_options_are_rejected_without_a_dataset(kwargs):
    name = next(iter(kwargs))
    found, = problems_of(**kwargs)
    assert found.startswith(f'TrainerConfig.{name} = ') and 'without TrainerConfig.offline_buffer_dir' in found


def offline(**kwargs):
    return dict(offline_buffer_dir='somewhere', whole_replay_buffer_training=False, mini_batch_length=2, **kwargs)


@pytest.mark.parametrize('name, kwargs', [
    ('whole_replay_buffer_training', dict(offline_buffer_dir='somewhere')),
    ('use_rollout_state', offline(use_rollout_state=True)),
    ('rl_train_after_update_steps', offline(unroll_length=0, rl_train_after_update_steps=1)),
    ('offline_mini_batch_size', offline(unroll_length=0, offline_mini_batch_size=8)),
    ('initial_collect_steps', offline(unroll_length=0, initial_collect_steps=8)),
    ('num_iterations', offline(unroll_length=0, num_iterations=0)),
])
def test_options_that_conflict_with_a_dataset_are_rejected(name, kwargs):
    assert any(found.startswith(f'TrainerConfig.{name} ') for found in problems_of(**kwargs))


def test_datasets_are_named_by_one_text_or_several():
    assert make().offline_datasets() == ()
    assert make(**offline()).offline_datasets() == ('somewhere', )
    assert make(**{**offline(), 'offline_buffer_dir': ['a', 'b']}).offline_datasets() == ('a', 'b')
    assert not make(**offline(unroll_length=0)).collects and make(**offline()).collects


def test_all_errors_are_listed():
    assert [p.split(' ')[0] for p in problems_of(num_iterations=-1, epsilon_greedy=2, num_eval_episodes=0)] == [
        'TrainerConfig.num_iterations', 'TrainerConfig.epsilon_greedy', 'TrainerConfig.num_eval_episodes']


def test_a_conf_error_points_at_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'bad.gin').write_text("TrainerConfig.epsilon_greedy = 2.0\nTrainerConfig.num_iterations = 0\n")
    with gin_utils.loaded('bad.gin', ['TrainerConfig.eval_interval = 0']):
        with pytest.raises(ConfError) as caught:
            TrainerConfig('run', algorithm_ctor=algorithm)
    locations = [problem.location for problem in caught.value.problems]
    assert locations == ["override 'TrainerConfig.eval_interval = 0'", 'bad.gin:1']
    with gin_utils.loaded('bad.gin', ['TrainerConfig.epsilon_greedy = 0']):
        with pytest.raises(ConfError) as caught:
            TrainerConfig('run', algorithm_ctor=algorithm)
    assert str(caught.value).startswith('bad.gin:2: TrainerConfig.num_iterations and TrainerConfig.num_env_steps')


def test_the_data_transformer_exists_once_a_trainer_has_set_it():
    config = make(data_transformer_ctor=algorithm)
    assert config.data_transformer_ctors() == (algorithm,) and make().data_transformer_ctors() == ()
    assert make().data_transformer is None
    with pytest.raises(RuntimeError, match='set by the trainer'):
        config.data_transformer
    config.data_transformer = 'a transformer'
    assert config.data_transformer == 'a transformer'


def test_a_configuration_is_frozen_once_training_has_started(tmp_path):
    config = TrainerConfig(root_dir=str(tmp_path), algorithm_ctor=object)
    config.unroll_length = 3
    config.freeze()
    with pytest.raises(AttributeError, match='TrainerConfig.unroll_length cannot be changed to 4'):
        config.unroll_length = 4
    assert config.unroll_length == 3 and copy.deepcopy(config).unroll_length == 3
