"""The drawing of an agent: inputs, optimizer and replayed fields of each part."""
import torch
from helpers.agents import make_agent
from torch import nn

from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep, LossInfo
from alfx.optimizers import SGD
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.trainers.agent_drawing import agent_lines, describe, replay_lines


class Halver(Algorithm):
    """A representation learner with a parameter trained by a separate optimizer, and a fixed parameter."""

    def __init__(self, observation_spec, action_spec, reward_spec, config, debug_summaries):
        super().__init__(optimizer=SGD(lr=0.1, name='own'), name='halver')
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.output_spec = TensorSpec(observation_spec.shape)

    def rollout_step(self, inputs, state):
        return AlgStep(inputs.observation * self.weight)

    def train_step(self, inputs, state, rollout_info):
        return AlgStep(inputs.observation * self.weight, (), LossInfo(loss=self.weight.expand(len(inputs.reward))))


class Bonus(Algorithm):
    """An intrinsic reward of 0, stored for replay."""

    def __init__(self, observation_spec, action_spec):
        super().__init__(name='bonus')

    def rollout_step(self, inputs, state):
        return AlgStep(torch.zeros_like(inputs.reward))

    def train_step(self, inputs, state, rollout_info):
        return AlgStep((), (), LossInfo(loss=torch.zeros_like(inputs.reward)))


def test_the_diagram_shows_inputs_outputs_optimizers_and_storage():
    agent, _ = make_agent('ppo', 'discrete', representation_learner_cls=Halver, intrinsic_reward_module=Bonus,
                          intrinsic_reward_coef=0.25)
    owners = {id(agent._representation_learner.weight): 'own'}
    lines = '\n'.join(agent_lines(agent, owners))
    assert '├─ repr  Halver        float32 [1] in [-1, 1] ─> float32 [1]' in lines
    assert '├─ irm   Bonus         float32 [1] ─> intrinsic reward' in lines
    assert '└─ rl    PPOAlgorithm  float32 [1] ─> int64 [] in [0, 1]' in lines
    assert 'repr  1 by own, 1 not trained by gradients' in lines and 'irm   no parameters' in lines
    assert 'loss: repr + irm + rl' in lines
    assert 'reward that the policy is trained on: 1 * extrinsic + 0.25 * irm' in lines
    assert ['rollout_info.rewards', '4'] in [line.split() for line in lines.splitlines()]


def test_bytes_of_a_step_are_grouped_by_the_part_that_stores_them():
    spec = {'time_step': {'reward': TensorSpec(()), 'observation': {'a': TensorSpec((3, ), torch.uint8)}},
            'action': TensorSpec((), torch.int64)}
    assert replay_lines(spec) == ['replay buffer data, 15 bytes per environment step:',
                                  '  action                 8', '  time_step.observation  3',
                                  '  time_step.reward       4']
    assert replay_lines(None) == ['replay buffer: none, each unroll is used for training directly']


def test_nests_of_specs_are_described_in_a_line():
    goal = BoundedTensorSpec((2, ), torch.float32, 0.0, 1.0)
    assert describe([TensorSpec((3, )), {'goal': goal}]) == '[float32 [3], {goal: float32 [2] in [0, 1]}]'
    assert describe('loss') == 'loss'
