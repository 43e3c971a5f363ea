"""A tiny environment and tiny algorithms for the tests of the trainers."""

import numpy as np
import torch
from torch import nn

from alfx import AlgStep, BoundedTensorSpec, LossInfo, StepType, TensorSpec, TimeStep
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.on_policy_algorithm import OnPolicyAlgorithm
from alfx.environments.alf_environment import AlfEnvironment
from alfx.gin_utils import configurable
from alfx.optimizers import Adam
from alfx.trainers.policy_trainer import RLTrainer


class WalkEnv(AlfEnvironment):
    """Environments that move by the sign of the action plus noise; episodes last ``lengths[i]`` steps (None: random).

    The reward is 1 a step in environments of odd number and 0 in the others, so that the return shows the length.
    """

    def __init__(self, batch_size=4, lengths=None, seed=0, saves_state=True):
        self._batch_size, self._lengths, self._saves_state = batch_size, lengths, saves_state
        self._rng = np.random.default_rng(seed)
        self._position = np.zeros(batch_size, dtype=np.float32)
        self._left = np.zeros(batch_size, dtype=np.int64)
        self._ended = np.ones(batch_size, dtype=bool)
        self.closed = False

    @property
    def batch_size(self):
        return self._batch_size

    def observation_spec(self):
        return TensorSpec((2, ))

    def action_spec(self):
        return BoundedTensorSpec((), torch.int64, 0, 1)

    def _reset(self):
        self._ended[:] = True
        return self._step(torch.zeros(self._batch_size, dtype=torch.int64))

    def _new_lengths(self):
        return self._rng.integers(2, 9, self._batch_size) if self._lengths is None else np.array(self._lengths)

    def _step(self, action):
        first, action = self._ended.copy(), action.numpy()
        noise = self._rng.normal(size=self._batch_size).astype(np.float32)
        self._position = np.where(first, noise, self._position + 2 * action - 1 + 0.1 * noise).astype(np.float32)
        self._left = np.where(first, self._new_lengths(), self._left - 1)
        last = ~first & (self._left == 0)
        self._ended = last
        step_type = np.where(first, StepType.FIRST, np.where(last, StepType.LAST, StepType.MID))
        reward = np.where(first, 0, np.arange(self._batch_size) % 2)
        observation = np.stack([self._position, self._left], axis=1)
        tensors = [torch.as_tensor(x, dtype=torch.float32) for x in (reward, 1.0 - last, observation)]
        return TimeStep(torch.as_tensor(step_type, dtype=torch.int32), *tensors,
                        torch.as_tensor(np.where(first, 0, action)), torch.arange(self._batch_size))

    def _seed(self, seed):
        self._rng = np.random.default_rng(seed)

    def get_state(self):
        return (self._rng, self._position, self._left, self._ended, self._current) if self._saves_state else None

    def set_state(self, state):
        self._rng, self._position, self._left, self._ended, self._current = state

    def close(self):
        self.closed = True


@configurable
def load_walk(environment_name, batch_size=1):
    """Load the environments of a conf."""
    return WalkEnv(batch_size)


@configurable
class SmallPolicy(OnPolicyAlgorithm):
    """A minimal on-policy algorithm that uses all parts of training."""

    def __init__(self, observation_spec, action_spec, reward_spec=TensorSpec(()), env=None, config=None,
                 debug_summaries=False):
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=(), env=env, config=config, optimizer=Adam(lr=1e-2),
                         debug_summaries=debug_summaries, name='SmallPolicy')
        self._net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 2))
        self._epsilon_greedy = 0.0
        self.seen_in_evaluation = []

    def rollout_step(self, inputs, state):
        logits = self._net(inputs.observation)
        action = torch.multinomial(logits.detach().softmax(-1), 1).squeeze(-1)
        log_prob = logits.log_softmax(-1).gather(-1, action[:, None]).squeeze(-1)
        return AlgStep(action, (), {'log_prob': log_prob, 'reward': inputs.reward})

    def predict_step(self, inputs, state):
        self.seen_in_evaluation.append(self.training)
        torch.rand(1)  # an evaluation that draws random numbers must not disturb training
        return AlgStep(self._net(inputs.observation).argmax(-1), (), ())

    def calc_loss(self, info):
        loss = -info['log_prob'] * (info['reward'] - 0.5)
        return LossInfo(loss=loss, extra={'policy': loss})


class SmallRegression(Algorithm):
    """Linear regression with one epoch per iteration."""

    def __init__(self, config=None):
        super().__init__(config=config, optimizer=Adam(lr=1e-1), name='SmallRegression')
        self._net = nn.Linear(1, 1)

    def _error(self):
        x = torch.randn(64, 1)
        return (self._net(x) - (3 * x + 1)).square().mean()

    def train_iter(self):
        loss_info, params = self.update_with_gradient(LossInfo(scalar_loss=self._error()))
        self.summarize_train((), (), loss_info, params)
        return 64

    def evaluate(self):
        return {'error': self._error()}


class WalkTrainer(RLTrainer):
    """A trainer in ``WalkEnv``."""

    env_options: dict = {}

    def _create_environment(self):
        return WalkEnv(seed=self._config.random_seed, **self.env_options)


def make_config(root_dir, **values) -> TrainerConfig:
    """Return the configuration of a short run of ``SmallPolicy``."""
    return TrainerConfig(**{**dict(root_dir=str(root_dir), algorithm_ctor=SmallPolicy, random_seed=3, num_iterations=12,
                                   unroll_length=5, num_checkpoints=3, summary_interval=4, num_threads=1,
                                   float32_matmul_precision='highest'), **values})
