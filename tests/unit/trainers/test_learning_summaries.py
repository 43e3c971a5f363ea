"""Learning metrics that are logged by default: in event files and in ``progress.csv``."""
import io
import math
import os

import numpy as np
import pytest
import torch
from PIL import Image

import alfx
from alfx import TimeStep
from alfx.algorithms.categorical_td_loss import CategoricalTDLoss
from alfx.algorithms.ppo_loss import _summarize_change
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.gin_utils import ConfError
from alfx.reports import curves
from alfx.runs import run_files
from alfx.runs.eval_video import EvalVideo
from alfx.summary import summary_utils
from alfx.trainers.run_summary import setting_of
from alfx.utils.checkpoint_utils import Checkpointer, read_checkpoint

SMALL = {'create_environment.num_parallel_environments': 2, 'TrainerConfig.num_iterations': 4,
         'TrainerConfig.num_env_steps': 0, 'TrainerConfig.unroll_length': 8, 'TrainerConfig.mini_batch_size': 8,
         'TrainerConfig.num_updates_per_train_iter': 2, 'TrainerConfig.evaluate': False,
         'TrainerConfig.num_summaries': None, 'TrainerConfig.summary_interval': 1, 'TrainerConfig.random_seed': 1}
OFF_POLICY = {**SMALL, 'TrainerConfig.initial_collect_steps': 16, 'TrainerConfig.num_iterations': 20}


@pytest.fixture
def written(monkeypatch):
    found = {}
    monkeypatch.setattr('alfx.summary.scalar', lambda name, value, **_: found.update({name: float(value)}))
    monkeypatch.setattr('alfx.summary.summary_ops.scalar', lambda name, value, **_: found.update({name: float(value)}))
    return found


def test_ppo_logs_policy_change_and_value_quality(tmp_path):
    alfx.train('ppo_cart_pole', {**SMALL, 'ppo/Adam.lr': 0.002}, str(tmp_path / 'run'))
    progress = alfx.read_progress(str(tmp_path / 'run'))
    assert (progress['train/learning_rate/Adam'] == 0.002).all()
    assert progress['train/updates'].tolist() == [4, 8, 12, 16]  # two epochs of two minibatches an iteration
    assert (progress['train/approx_kl'] >= 0).all() and (progress['train/grad_norm'] > 0).all()
    assert ((0 <= progress['train/clip_fraction']) & (progress['train/clip_fraction'] <= 1)).all()
    assert ((0 < progress['train/entropy']) & (progress['train/entropy'] <= math.log(2) + 1e-6)).all()
    assert (progress['train/explained_variance'] <= 1).all()


@pytest.mark.parametrize('categorical', [{}, {
    'DqnAlgorithm.num_atoms': 11, 'DqnAlgorithm.v_min': 0.0, 'DqnAlgorithm.v_max': 50.0,
    'DqnAlgorithm.critic_loss_ctor': CategoricalTDLoss}])
def test_value_learners_log_values_targets_exploration_and_buffer(tmp_path, categorical):
    alfx.train('dqn_cart_pole', {**OFF_POLICY, 'DqnAlgorithm.rollout_epsilon_greedy': 0.25,
                                 **categorical}, str(tmp_path / 'run'))
    progress = alfx.read_progress(str(tmp_path / 'run'))
    last = {name: values[-1] for name, values in progress.items()}
    assert last['train/exploration_rate'] == 0.25
    assert last['train/replay_buffer_size'] == last['env_steps'] or last['train/replay_buffer_size'] > 16
    assert np.isfinite([last['train/values'], last['train/targets'], last['train/grad_norm']]).all()


def test_hparams_contain_bindings_and_results_of_runs(tmp_path):
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams.backend_context import Context
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data
    for name, rate, seed in (('a', 0.002, 1), ('b', 0.002, 2), ('c', 0.004, 1)):
        alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.num_iterations': 12, 'ppo/Adam.lr': rate,
                                     'TrainerConfig.random_seed': seed}, str(tmp_path / name))
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = MultiplexerDataProvider(events, str(tmp_path))
    plugin = Context(TBContext(data_provider=provider))
    metadata = plugin.hparams_metadata(RequestContext(), '')
    found = plugin.experiment_from_metadata(RequestContext(), '', False, metadata, None)
    assert {'ppo/Adam.lr', 'create_environment.env_name'} <= {info.name for info in found.hparam_infos}
    groups = {run: parse_session_start_info_plugin_data(tags['_hparams_/session_start_info'])
              for run, tags in metadata.items()}
    assert [groups[f'{name}/train'].hparams['ppo/Adam.lr'].number_value for name in 'abc'] == [0.002, 0.002, 0.004]
    assert groups['a/train'].group_name == groups['b/train'].group_name != groups['c/train'].group_name
    for name in 'abc':
        final, = EventAccumulator(str(tmp_path / name / 'train')).Reload().Scalars('final/return')
        progress = alfx.read_progress(str(tmp_path / name))
        assert final.value == pytest.approx(progress['average_return'][-1], rel=1e-5)
        assert final.step == progress['env_steps'][-1]


@pytest.mark.parametrize('text, value', [
    ('0.001', 0.001), ('True', True), ("'CartPole-v1'", 'CartPole-v1'), ('(64, 64)', '(64, 64)'),
    ('@x' * 80, '@x' * 48 + '@...')])
def test_settings_are_numbers_bools_or_short_texts(text, value):
    assert setting_of(text) == value and type(setting_of(text)) is type(value)


def test_logging_does_not_change_training(tmp_path):
    found = []
    for interval in (1, 1000):
        root_dir = str(tmp_path / str(interval))
        alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.summary_interval': interval}, root_dir)
        checkpointer = Checkpointer(run_files.checkpoint_dir(root_dir))
        state = read_checkpoint(os.path.join(checkpointer.ckpt_dir, f'ckpt-{checkpointer.steps()[-1]}'))
        found.append({name: value for name, value in state['alg'].items() if name.endswith(('weight', 'bias'))})
    assert found[0] and all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_divergence_is_estimated_from_the_ratio_alone(written):
    _summarize_change(torch.tensor([[1.0, 2.0]]), clipping=0.2)
    # r - 1 - log r is 0 and 1 - log 2; one of two is further from 1 than 0.2
    assert written == pytest.approx({'train/approx_kl': (1 - math.log(2)) / 2, 'train/clip_fraction': 0.5})


def test_the_gradient_norm_covers_all_parameters(written):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    for parameter, gradient in zip(parameters, (3.0, 4.0)):  # the third one has none
        parameter.grad = torch.tensor([gradient])
    summary_utils.summarize_gradient_norm(parameters)
    assert written == {'train/grad_norm': 5.0}


def test_a_quantity_is_plotted_by_the_last_part_of_its_name(tmp_path):
    (tmp_path / 'progress.csv').write_text('env_steps,train/approx_kl,train/learning_rate/Adam,a/x,b/x\n1,2,3,4,5\n')
    folder = str(tmp_path)
    assert curves.read_curve(folder, 'env_steps', 'approx_kl', False).y.tolist() == [2]
    assert curves.read_curve(folder, 'env_steps', 'learning_rate', False).y.tolist() == [3]
    with pytest.raises(ConfError, match='several columns'):
        curves.read_curve(folder, 'env_steps', 'x', False)
    with pytest.raises(ConfError, match='no column'):
        curves.read_curve(folder, 'env_steps', 'approx', False)


@pytest.mark.parametrize('in_process', [True, False])
def test_evaluations_show_an_episode_if_configured(tmp_path, in_process):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    alfx.train('ppo_cart_pole', {**SMALL, 'TrainerConfig.evaluate': True, 'TrainerConfig.num_evals': 2,
                                 'TrainerConfig.num_eval_episodes': 2, 'TrainerConfig.eval_video_steps': 7,
                                 'TrainerConfig.async_eval': not in_process}, str(tmp_path / 'run'))
    shown = EventAccumulator(str(tmp_path / 'run' / 'eval')).Reload().Images('episode')
    assert len(shown) == 2
    film = Image.open(io.BytesIO(shown[0].encoded_image_string))
    assert film.format == 'GIF' and max(film.size) == 300
    durations = []
    for number in range(film.n_frames):  # equal frames are stored as one, with a longer duration
        film.seek(number)
        durations.append(film.info['duration'])
    assert sum(durations) == 7 * 1000 / 50


def test_an_environment_without_images_is_evaluated_without_a_video(caplog):
    class Dark:
        def render(self, mode):
            raise UnsupportedOperationError('it is dark')

    film = EvalVideo(Dark(), 5)
    for _ in range(3):
        film(None, None)
    film.write('episode', 0)
    assert caplog.text.count('it is dark') == 1


def test_a_video_of_frames_of_several_sizes_has_the_size_of_the_first(monkeypatch):
    class Growing:
        metadata, size = {'render_fps': None}, 9

        def render(self, mode):
            self.size += 1
            if self.size > 12:
                raise ZeroDivisionError
            return np.full((self.size, 20, 3), 7, np.uint8)

    recorded = []
    monkeypatch.setattr('alfx.summary.video', lambda name, frames, step, fps: recorded.append((frames.shape, fps)))
    film = EvalVideo(Growing(), 9)
    for _ in range(5):
        film(TimeStep(torch.ones(1, dtype=torch.int32)), None)
    film.write('episode', 0)
    assert recorded == [((1, 3, 3, 10, 20), 30.0)]
