"""An auxiliary phase stores the frames of the environment, not stacks of them."""
import gymnasium
import numpy as np
import pytest

from alfx import gin_utils
from alfx.algorithms.config import TrainerConfig
from alfx.trainers.policy_trainer import RLTrainer

SIZE = 48
CONF = """
include 'ppg_cart_pole.gin'
create_environment.env_name = 'alfx-test/Frames-v0'
create_environment.num_parallel_environments = 4
create_environment.nonparallel = True
TrainerConfig.data_transformer_ctor = (@FrameStacker, @ImageScaleTransformer)
FrameStacker.stack_size = 4
ImageScaleTransformer.min = 0.0
ppg/EncodingNetwork.conv_layer_params = ((4, 8, 8),)
TrainerConfig.unroll_length = 16
PPGAuxOptions.interval = 3
"""


class Frames(gymnasium.Env):
    """Noise."""
    observation_space = gymnasium.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._frame(), {}

    def step(self, action):
        return self._frame(), 1.0, False, bool(self.np_random.random() < 0.1), {}

    def _frame(self):
        return self.np_random.integers(0, 256, (1, SIZE, SIZE), np.uint8)


@pytest.fixture
def algorithm(tmp_path):
    gymnasium.register('alfx-test/Frames-v0', Frames)
    conf = tmp_path / 'frames.gin'
    conf.write_text(CONF)
    gin_utils.write_conf(str(tmp_path / 'run'), gin_utils.load(str(conf)))
    yield RLTrainer(TrainerConfig(root_dir=str(tmp_path / 'run'))).algorithm
    gin_utils.clear()
    gymnasium.registry.pop('alfx-test/Frames-v0')


def test_unrolls_are_kept_in_no_more_than_a_tenth_above_their_frames(algorithm):
    for _ in range(2):
        algorithm.train_iter()
    buffer = algorithm.learner.phase._stored.replay_buffer
    frames = 4 * (3 * 16 + 3) * SIZE * SIZE  # with three earlier ones for the first stack
    assert frames < buffer.num_bytes(3 * 16 + 3) < 1.1 * frames
    assert int(buffer.current_size.min()) == 2 * 16
