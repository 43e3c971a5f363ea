"""Common faults of composed agents: state without a step, parts seen twice, gradients into other parts."""
import copy
from functools import partial

import pytest
import torch
from helpers import agents
from helpers.agents import make_agent
from torch import nn

from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep, LossInfo
from alfx.layers import FC
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.optimizers import SGD
from alfx.runs.evaluator import evaluate
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec


class Remembers(Algorithm):
    """An intrinsic reward for distance from the previous observation, which evaluation does not use."""

    def __init__(self, observation_spec, action_spec):
        super().__init__(train_state_spec=observation_spec, name='remembers')

    def rollout_step(self, inputs, state):
        return AlgStep((inputs.observation - state).norm(dim=-1), inputs.observation, ())

    def train_step(self, inputs, state, rollout_info):
        return AlgStep((), inputs.observation, ())

    def calc_loss(self, info):
        return LossInfo()


@pytest.mark.parametrize('environment', ['discrete', 'recurrent'])
def test_evaluation_skips_stateful_parts_without_an_evaluation_step(environment):
    agent, env = make_agent('ppo', environment, intrinsic_reward_module=Remembers)
    agent.train_iter()
    assert len(evaluate(env, agent, 4).returns) == 4


class Representation(Algorithm):
    """A representation learner without a loss: the observation times a weight."""

    def __init__(self, observation_spec, action_spec=None, reward_spec=None, config=None, debug_summaries=False):
        super().__init__(name='representation')
        self.weight = nn.Parameter(torch.ones(()))
        self.output_spec = observation_spec

    def rollout_step(self, inputs, state):
        return AlgStep(inputs.observation * self.weight, (), ())

    def predict_step(self, inputs, state):
        return self.rollout_step(inputs, state)

    def train_step(self, inputs, state, rollout_info):
        return self.rollout_step(inputs, state)

    def calc_loss(self, info):
        return LossInfo()


class Teacher(Algorithm):
    """A goal generator with a loss, whose goal is a linear function of the observation."""

    def __init__(self, observation_spec, action_spec):
        super().__init__(name='teacher')
        self.layer = FC(observation_spec.shape[0], 1)
        self.action_spec = BoundedTensorSpec((1, ), torch.float32, -1e6, 1e6)

    def rollout_step(self, inputs, state):
        goal = self.layer(inputs.observation)
        return AlgStep((goal.detach(), ()), (), LossInfo(loss=(goal.squeeze(-1) - 7.0).square()))

    def predict_step(self, inputs, state):
        return self.rollout_step(inputs, state)

    def train_step(self, inputs, state, rollout_info):
        return self.rollout_step(inputs, state)


class Follower(Algorithm):
    """An intrinsic module that learns from the goal."""

    def __init__(self, observation_spec, action_spec):
        super().__init__(name='follower')
        self.seen = []

    def rollout_step(self, inputs, state):
        self.seen += [x.requires_grad for x in inputs.observation]
        return AlgStep(torch.zeros(len(inputs.reward)), (), ())

    def train_step(self, inputs, state, rollout_info):
        return self.rollout_step(inputs, state)

    def calc_loss(self, info):
        return LossInfo()


def with_goals(algorithm, **agent_args):
    networks = dict(actor_network_ctor=partial(ActorDistributionNetwork, preprocessing_combiner=NestConcat()),
                    value_network_ctor=partial(ValueNetwork, preprocessing_combiner=NestConcat()))
    return make_agent(algorithm, 'discrete', rl_algorithm_cls=partial(agents.ALGORITHMS[algorithm], **networks),
                      **agent_args)


def test_a_goal_generator_does_not_train_the_representation():
    agent, env = with_goals('actor-critic', representation_learner_cls=Representation, goal_generator=Teacher)
    step = agent.rollout_step(env.current_time_step(), agent.get_initial_rollout_state(4))
    weight, layer = torch.autograd.grad(
        step.info.goal_generator.loss.sum(),
        [agent._representation_learner.weight, agent._goal_generator.layer.weight], allow_unused=True)
    assert weight is None and layer is not None


class Leaking(Teacher):
    """A goal generator that does not detach its goal."""

    def rollout_step(self, inputs, state):
        goal = self.layer(inputs.observation)
        return AlgStep((goal, ()), (), LossInfo(loss=goal.squeeze(-1).square()))


def test_an_intrinsic_module_does_not_train_the_goal_generator():
    agent, _ = with_goals('actor-critic', goal_generator=Leaking, intrinsic_reward_module=Follower)
    agent.train_iter()
    assert agent.intrinsic_reward.seen and not any(agent.intrinsic_reward.seen)


def test_using_one_algorithm_twice_is_rejected():
    both = Teacher(TensorSpec((1, )), None)
    with pytest.raises(ValueError, match="teacher.*'goal_generator'.*'irm'"):
        with_goals('actor-critic', goal_generator=both, intrinsic_reward_module=both)


def test_a_copied_agent_acts_and_learns_independently():
    agent, env = make_agent('ppo', 'discrete', intrinsic_reward_module=Remembers,
                            representation_learner_cls=Representation)
    twin = copy.deepcopy(agent)
    for part in twin._parts():
        assert twin._helper.field(part) in ('rl', 'irm', 'repr')
    twin.train_iter()
    assert not torch.equal(next(twin._rl_algorithm.parameters()), next(agent.policy.parameters()))


class Weights(Algorithm):
    """Reward weights that record their inputs and count steps in their state."""

    def __init__(self, reward_spec, debug_summaries=False):
        super().__init__(train_state_spec=TensorSpec(()), name='weights')
        self.reward_weights = torch.ones(reward_spec.shape)
        self.seen = []

    def rollout_step(self, inputs, state):
        self.seen.append(inputs.observation.shape)
        return AlgStep((), state + 1, ())

    predict_step = rollout_step

    def after_train_iter(self, root_inputs, rollout_info):
        pass


class Halved(Representation):
    """A representation of the first number of the observation only, repeated twice."""

    def __init__(self, observation_spec, **kwargs):
        super().__init__(observation_spec, **kwargs)
        self.output_spec = TensorSpec((3, ))

    def rollout_step(self, inputs, state):
        return AlgStep(inputs.observation[:, :1].expand(-1, 3) * self.weight, (), ())


def test_reward_weights_see_the_environment_time_step_in_evaluation():
    agent, env = make_agent('ppo', 'vector reward', reward_weight_algorithm_cls=Weights,
                            representation_learner_cls=Halved)
    agent.rollout_step(env.current_time_step(), agent.get_initial_rollout_state(4))
    step = agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(4))
    assert agent._reward_weight_algorithm.seen[-1] == agent._reward_weight_algorithm.seen[-2]
    assert torch.equal(step.state.rw, torch.ones(4))
    agent.train_iter()
    # six steps, the last of which is the first of an episode
    assert agent.learner.collector.position.state.rw.tolist() == [1.0] * 4


def test_a_shared_network_is_trained_by_the_optimizer_that_owns_it():
    shared = FC(1, 4)

    class Shares(Algorithm):
        def __init__(self, observation_spec, action_spec=None, reward_spec=None, config=None, debug_summaries=False,
                     optimizer=None):
            super().__init__(optimizer=optimizer, name='shares')
            self.layer, self.output_spec = shared, TensorSpec((4, ))

        def rollout_step(self, inputs, state):
            output = self.layer(inputs.observation)
            return AlgStep(output, (), LossInfo(loss=output.square().sum(-1)))

        def predict_step(self, inputs, state):
            return self.rollout_step(inputs, state)

        def train_step(self, inputs, state, rollout_info):
            return self.rollout_step(inputs, state)

    class Second(Shares):
        def rollout_step(self, inputs, state):
            return super().rollout_step(inputs, state)._replace(output=torch.zeros(len(inputs.reward)))

    class Irm(Second):
        def __init__(self, observation_spec, action_spec):
            super().__init__(observation_spec, optimizer=SGD(lr=0.1))

        def rollout_step(self, inputs, state):
            output = self.layer(inputs.observation[..., :1])
            return AlgStep(torch.zeros(len(inputs.reward)), (), LossInfo(loss=output.square().sum(-1)))

    agent, _ = make_agent('actor-critic', 'discrete', representation_learner_cls=Shares, intrinsic_reward_module=Irm)
    owners = [optimizer for optimizer in agent.optimizers() for group in optimizer.param_groups
              for p in group['params'] if p is shared.weight]
    assert owners == [agent.intrinsic_reward.default_optimizer]
    agent.train_iter()
    names = [name for name in agent.state_dict() if name.endswith('layer._linear.weight') or 'layer' in name]
    assert any(name.startswith('_irm') for name in names) and any(name.startswith('_repr') for name in names)
    state = agent.state_dict()
    agent.load_state_dict(state)
    assert agent.intrinsic_reward.layer is shared and agent._representation_learner.layer is shared


def test_errors_about_on_policy_training_name_the_part_that_needs_it():
    class OffPolicyOnly(Representation):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.set_on_policy(False)

    with pytest.raises(ValueError, match='representation.*on-policy.*ActorCriticAlgorithm'):
        make_agent('actor-critic', 'discrete', representation_learner_cls=OffPolicyOnly)
