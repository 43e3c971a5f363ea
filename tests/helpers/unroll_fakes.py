"""Algorithms, environments and runs for the tests of asynchronous actors.

Other processes import this module by name: :func:`run_folder` writes a conf that imports it and adds this folder to
their path.
"""
import contextlib
import logging
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

from alfx import AlgStep, BoundedTensorSpec, LossInfo, StepType, TensorSpec, TimeStep, context, gin_utils, summary
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.seeding import environment_seeds
from alfx.environments.utils import create_environment
from alfx.gin_utils import configurable
from alfx.optimizers import Adam
from alfx.runs import building
from alfx.utils import random_state
from alfx.utils.normalizers import AdaptiveNormalizer

logger = logging.getLogger('alfx.tests')
TESTS_FOLDER = str(Path(__file__).parents[1])


class DriftEnv(AlfEnvironment):
    """Environments that drift by their action and by separate noise; episodes last ``length`` steps.

    Args:
        batch_size: B.
        length: steps of an episode.
        seconds: duration of a step.
        fault: fault at step ``fault_at``: 'raise', 'kill' or ''.
        fault_at: step of the fault, counted from 1 over all episodes.
    """

    def __init__(self, batch_size, length=6, seconds=0.0, fault='', fault_at=0):
        self._batch_size, self._length, self._seconds = batch_size, length, seconds
        self._fault, self._fault_at = fault, fault_at
        self._seed(None)
        self._t, self._steps = -1, 0
        self._position = torch.zeros(batch_size, 2)

    @property
    def batch_size(self):
        return self._batch_size

    def observation_spec(self):
        return TensorSpec((2, ))

    def action_spec(self):
        return BoundedTensorSpec((1, ), torch.float32, -1, 1)

    def env_info_spec(self):
        return {'distance': TensorSpec(())}

    def _seed(self, seed):
        seeds = environment_seeds(seed, self._batch_size)
        self._generators = [torch.Generator() for _ in seeds]
        for generator, own in zip(self._generators, seeds):
            generator.seed() if own is None else generator.manual_seed(own)

    def _reset(self):
        self._t = -1
        return self._step(torch.zeros(self._batch_size, 1))

    def _step(self, action):
        self._steps += 1
        if self._fault and self._steps == self._fault_at:
            if self._fault == 'kill':
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError('the drift has no end')
        if self._seconds:
            time.sleep(self._seconds)
        self._t = (self._t + 1) % self._length
        noise = torch.stack([torch.randn(2, generator=generator) for generator in self._generators])
        first, last = self._t == 0, self._t == self._length - 1
        self._position = noise if first else self._position + action + 0.1 * noise
        step_type = StepType.FIRST if first else StepType.LAST if last else StepType.MID
        reward = torch.zeros(self._batch_size) if first else -self._position.norm(dim=1)
        self._ended = range(self._batch_size) if last else ()
        return TimeStep(torch.full((self._batch_size, ), step_type, dtype=torch.int32), reward,
                        torch.ones(self._batch_size), self._position, torch.zeros_like(action) if first else action,
                        torch.arange(self._batch_size), (), {'distance': self._position.norm(dim=1)})

    def final_infos(self):
        return {i: {'length': float(self._length)} for i in self._ended}

    def get_state(self):
        return self._t, self._position, self._current, [g.get_state() for g in self._generators]

    def set_state(self, state):
        self._t, self._position, self._current, generators = state
        for generator, own in zip(self._generators, generators):
            generator.set_state(own)


@configurable
def load_drift(environment_name, batch_size=1, length=6, seconds=0.0, fault='', fault_at=0):
    """Load the environments of a conf."""
    return DriftEnv(batch_size, length, seconds, fault, fault_at)


@configurable
class Steering(RLAlgorithm):
    """An algorithm that acts without random numbers: its steps depend only on its parameters and the environment.

    It keeps statistics while acting, has a state if it is ``recurrent``, and writes a summary at each step.

    Args:
        recurrent: whether actions depend on earlier observations.
        samples: draw actions at random around them.
        talks: log a line at each step.
        on_policy: whether it declares itself on-policy.
        counts: keep statistics. A local unroll takes the bootstrapping step twice, another process once.
    """

    def __init__(self, observation_spec, action_spec, reward_spec=TensorSpec(()), env=None, config=None,
                 debug_summaries=False, recurrent=False, samples=False, talks=False, on_policy=False,
                 counts=True):
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=TensorSpec((2, )) if recurrent else (), is_on_policy=on_policy, env=env,
                         config=config, optimizer=Adam(lr=1e-2), debug_summaries=debug_summaries, name='Steering')
        self._net = nn.Linear(2, 1)
        self._normalizer = AdaptiveNormalizer(observation_spec, auto_update=False)
        self.register_buffer('seen', torch.zeros((), dtype=torch.int64))
        self._recurrent, self._samples, self._talks, self._counts = recurrent, samples, talks, counts

    def _action(self, inputs, state):
        seen = self._normalizer.normalize(inputs.observation)
        if self._recurrent:
            state = seen = 0.5 * state + seen
        return self._net(seen).tanh(), state

    def predict_step(self, inputs, state):
        action, state = self._action(inputs, state)
        return AlgStep(action, state, ())

    def rollout_step(self, inputs, state):
        if self._counts:
            self._normalizer.update(inputs.observation)
            self.seen += inputs.step_type.shape[0]
        action, state = self._action(inputs, state)
        if self._samples:
            action = (action + 0.1 * torch.randn_like(action)).clamp(-1, 1)
        summary.scalar('steering/action', action.mean())
        if self._talks:
            logger.info('steering at %d', int(self.seen))
        return AlgStep(action, state, {'action': action, 'percent': torch.full_like(inputs.reward,
                                                                                   context.get_progress('percent'))})

    def train_step(self, inputs, state, rollout_info):
        action, state = self._action(inputs, state)
        return AlgStep(action, state, {'action': action, 'reward': inputs.reward})

    def calc_loss(self, info):
        loss = (info['action'].squeeze(-1) + 0.1 * info['reward']).square()
        return LossInfo(loss=loss, extra={'steering': loss})


CONF = '''
from helpers import unroll_fakes
TrainerConfig.algorithm_ctor = @Steering
TrainerConfig.async_unroll = True
TrainerConfig.random_seed = 3
TrainerConfig.num_iterations = 6
TrainerConfig.unroll_length = 5
TrainerConfig.num_updates_per_train_iter = 1
TrainerConfig.num_checkpoints = 1
TrainerConfig.summary_interval = 2
TrainerConfig.num_threads = 1
TrainerConfig.float32_matmul_precision = 'highest'
TrainerConfig.confirm_checkpoint_upon_crash = False
create_environment.env_load_fn = @load_drift
create_environment.num_parallel_environments = 3
create_environment.nonparallel = True
'''
SAMPLED = ('TrainerConfig.whole_replay_buffer_training=False', 'TrainerConfig.clear_replay_buffer=False',
           'TrainerConfig.mini_batch_length=2', 'TrainerConfig.mini_batch_size=4')


def run_folder(folder, monkeypatch, *params):
    """Write the conf of a run into a folder, load it, and return its configuration.

    Args:
        folder: created if it does not exist.
        monkeypatch: fixture of pytest; puts this module on the path of other processes.
        params: further bindings.
    """
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([TESTS_FOLDER, os.environ.get('PYTHONPATH', '')]))
    folder.mkdir(exist_ok=True)
    (folder / 'given.gin').write_text(CONF)
    conf = gin_utils.load(str(folder / 'given.gin'), params)
    gin_utils.write_conf(str(folder), conf)
    return TrainerConfig(root_dir=str(folder))


def make_algorithm(config, env=None):
    """Return the algorithm of a trainer that acts itself, or of one with other actors if ``env`` is a description."""
    random_state.set_random_seed(config.random_seed)
    env = env or create_environment(seed=config.random_seed)
    return building.create_algorithm(config, env, trains=True)


class Writer:
    """A summary writer that remembers names and steps."""

    def __init__(self):
        self.written = []
        self.latest_scalars = {}

    def add_scalar(self, tag, value, step, walltime=None):
        self.written.append((tag, step))


def wait_for(condition, seconds=60.0):
    """Wait until ``condition()`` holds; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited too long'
        time.sleep(0.02)


def is_running(pid):
    """Return whether a process runs; a zombie does not count."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    return False


def children_of(pid):
    """Return the running children of a process, without the helpers of ``multiprocessing``."""
    found = []
    for folder in Path('/proc').iterdir():
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (folder / 'stat').read_text().rpartition(')')[2].split()
            if int(fields[1]) == pid and fields[0] != 'Z' and b'resource_tracker' not in (
                    folder / 'cmdline').read_bytes():
                found.append(int(folder.name))
    return found
