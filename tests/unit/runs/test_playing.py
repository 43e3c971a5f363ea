"""Playing a checkpoint, with text output and videos."""

import numpy as np
import pytest
import torch
from helpers.trainer_fakes import SmallPolicy, WalkEnv, WalkTrainer, make_config

from alfx import AlgStep, StepType
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.gin_utils import ConfError
from alfx.runs import building
from alfx.runs import run_files
from alfx.runs.playing import _EpisodeReporter, load_for_play, play
from alfx.summary import render
from alfx.utils.checkpoint_utils import Checkpointer, CheckpointError


class PictureEnv(WalkEnv):
    """An environment that renders an image of odd size."""

    metadata = {'render_fps': 10}

    def render(self, mode='rgb_array'):
        assert mode == 'rgb_array'
        return np.full((21, 31, 3), 100, dtype=np.uint8)


class Explaining(SmallPolicy):
    """An algorithm that adds a picture of its predictions."""

    def predict_step(self, inputs, state):
        picture = render.render_heatmap_fast(inputs.observation, -1, 1)
        return AlgStep(super().predict_step(inputs, state).output, (), {'thought': picture})


@pytest.fixture(scope='module')
def root_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')
    WalkTrainer(make_config(folder, num_iterations=3)).train()
    return str(folder)


def make(root_dir, ctor=SmallPolicy, env=None):
    return building.create_algorithm(make_config(root_dir, algorithm_ctor=ctor), env or WalkEnv(1), trains=False)


def test_episodes_are_reported_and_measured(root_dir):
    lines = []
    result = play(root_dir, WalkEnv(1, lengths=[4]), make(root_dir), num_episodes=2, render=False, report=lines.append)
    assert lines == ['episode 1: return 0, length 4', 'episode 2: return 0, length 4']
    assert result.lengths.tolist() == [4, 4]


def test_returns_are_reported_as_plain_numbers(root_dir):
    lines = []
    for reward in (torch.tensor([112.0]), torch.tensor([[0.5, 2.0]])):
        reporter = _EpisodeReporter(lambda *args: None, lines.append)
        step = WalkEnv(1, lengths=[1]).reset()
        for step_type in (StepType.FIRST, StepType.LAST):
            reporter(step._replace(reward=reward, step_type=torch.tensor([int(step_type)])), AlgStep())
    assert lines == ['episode 1: return 112, length 1', 'episode 1: return [0.5 2. ], length 1']


def test_the_given_checkpoint_is_loaded_without_a_training_environment(root_dir):
    algorithm = make(root_dir)
    before = algorithm._net[0].weight.clone()
    assert load_for_play(root_dir, algorithm, 1) == 1
    first = algorithm._net[0].weight.clone()
    assert load_for_play(root_dir, algorithm) == 3
    assert not torch.equal(before, first) and not torch.equal(first, algorithm._net[0].weight)
    with pytest.raises(CheckpointError, match='steps in that folder: 1, 2, 3'):
        load_for_play(root_dir, algorithm, 7)
    assert Checkpointer(run_files.checkpoint_dir(root_dir)).steps() == [1, 2, 3]


@pytest.mark.parametrize('name', ['play.gif', 'sub/play.mp4'])
def test_a_video_holds_every_step_and_the_frames_added_at_the_end(root_dir, tmp_path, name):
    import imageio
    path = str(tmp_path / name)
    play(root_dir, PictureEnv(1, lengths=[3]), make(root_dir, Explaining), num_episodes=2, record_file=path,
         last_step_repeats=2, append_blank_frames=1)
    frames = [np.asarray(frame) for frame in imageio.get_reader(path)]
    if name.endswith('.mp4'):
        assert len(frames) == 2 * (4 + 2 + 1)
    # 31 + 2 * 10 + 20 columns: environment, the field of two numbers, its scale; padded to even numbers
    assert frames[0].shape[:2] == (22, 72)
    assert not render.is_rendering_enabled()


class FlickeringEnv(PictureEnv):
    """An environment that renders no image at first, then growing ones."""

    calls = 0

    def render(self, mode='rgb_array'):
        self.calls += 1
        if self.calls == 1:
            raise UnsupportedOperationError('it is dark')
        return np.full((20 + self.calls, 30, 3), 100, dtype=np.uint8)


def test_missing_frames_are_left_out_and_others_fitted(root_dir, tmp_path, caplog):
    import imageio
    path = str(tmp_path / 'play.gif')
    play(root_dir, FlickeringEnv(1, lengths=[3]), make(root_dir), num_episodes=1, record_file=path)
    assert [np.asarray(frame).shape[:2] for frame in imageio.get_reader(path)] == [(22, 30)] * 3
    assert caplog.text.count('it is dark') == 1


def test_a_video_without_any_frame_is_an_error(root_dir, tmp_path):
    class Dark(PictureEnv):
        def render(self, mode='rgb_array'):
            raise UnsupportedOperationError('it is dark')

    for length in (3, 10_000):
        with pytest.raises(UnsupportedOperationError, match='it is dark'):
            play(root_dir, Dark(1, lengths=[length]), make(root_dir), record_file=str(tmp_path / 'play.gif'))


def test_a_long_video_ends_with_a_warning(root_dir, tmp_path, caplog):
    import imageio
    path = str(tmp_path / 'play.mp4')
    play(root_dir, PictureEnv(1, lengths=[9]), make(root_dir), num_episodes=1, record_file=path, max_frames=4)
    assert len([frame for frame in imageio.get_reader(path)]) == 4
    assert 'play.mp4 ends after 4 frames' in caplog.text and 'max_episode_steps' in caplog.text


def test_an_unknown_format_and_a_batch_are_rejected(root_dir):
    with pytest.raises(ConfError, match='.mp4 or .gif'):
        play(root_dir, PictureEnv(1), make(root_dir), record_file='play.avi')
    with pytest.raises(ValueError, match='a batch of size 2'):
        play(root_dir, WalkEnv(2), make(root_dir))
