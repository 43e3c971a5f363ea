"""An agent with all kinds of parts: the inputs of each part, and the use of its rewards and losses."""
from functools import partial

from unittest import mock

import pytest
import torch
from helpers.agents import make_agent
from torch import nn

from alfx import nest
from alfx.algorithms.agent_helpers import AgentHelper
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.entropy_target_algorithm import EntropyTargetAlgorithm, SGDEntropyTargetAlgorithm
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.data_structures import AlgStep, LossInfo, namedtuple
from alfx.gin_utils import ConfError
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.optimizers import SGD, Adam
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

both = pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])


class Doubler(Algorithm):
    """A representation learner that repeats the observation, times a weight whose loss pulls it to 3."""

    def __init__(self, observation_spec, action_spec=None, reward_spec=None, config=None, debug_summaries=False):
        super().__init__(optimizer=SGD(lr=0.01), name='doubler')
        self.weight = nn.Parameter(torch.ones(()))
        self.output_spec = TensorSpec((2 * observation_spec.shape[0], ))
        self.updates = self.iterations = 0

    def _step(self, time_step):
        output = torch.cat([time_step.observation] * 2, -1) * self.weight
        return AlgStep(output, (), LossInfo(loss=(self.weight - 3.0).square().expand(len(output))))

    def predict_step(self, inputs, state):
        return self._step(inputs)

    def rollout_step(self, inputs, state):
        return self._step(inputs)

    def train_step(self, inputs, state, rollout_info):
        return self._step(inputs)

    def after_update(self, root_inputs, info):
        self.updates += 1

    def after_train_iter(self, root_inputs, rollout_info):
        self.iterations += 1


class Bonus(Algorithm):
    """An intrinsic reward of 10 with a negligible loss."""

    def rollout_step(self, inputs, state):
        zeros = torch.zeros(len(inputs.observation))
        return AlgStep(zeros + 10.0, (), LossInfo(loss=zeros))

    def train_step(self, inputs, state, rollout_info):
        return self.rollout_step(inputs, state)


GoalState = namedtuple('GoalState', ['count'], default_value=())


class Counter(Algorithm):
    """A goal generator whose goal is the number of steps so far, with a reward of 1."""

    def __init__(self):
        super().__init__(train_state_spec=GoalState(TensorSpec(())), name='counter')
        self.action_spec = BoundedTensorSpec((1, ), torch.float32, 0., 1e6)

    def rollout_step(self, inputs, state):
        count = state.count + 1
        zeros = torch.zeros(len(count))
        return AlgStep((count.unsqueeze(-1), zeros + 1.0), GoalState(count), LossInfo(loss=zeros))

    def predict_step(self, inputs, state):
        return self.rollout_step(inputs, state)

    def train_step(self, inputs, state, rollout_info):
        return self.rollout_step(inputs, state)


@both
def test_a_representation_has_its_own_optimizer_and_feeds_the_policy(algorithm):
    agent, env = make_agent(algorithm, 'discrete', representation_learner_cls=Doubler)
    learner = agent._representation_learner
    assert agent.policy.observation_spec == TensorSpec((2, ))
    assert not agent.capabilities.recomputes_rollout_info
    for _ in range(3):
        agent.train_iter()
    assert 1.0 < learner.weight.item() < 3.0
    assert learner.iterations == 3
    assert learner.updates == (3 if algorithm == 'actor-critic' else 3 * 2 * 3)
    assert not any(p is learner.weight for g in agent.default_optimizer.param_groups for p in g['params'])
    agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(4))


@both
def test_intrinsic_rewards_reach_the_loss_but_not_the_reported_return(algorithm):
    plain, _ = make_agent(algorithm, 'discrete')
    curious, _ = make_agent(algorithm, 'discrete', intrinsic_reward_module=Bonus(), intrinsic_reward_coef=0.5,
                            extrinsic_reward_coef=2.0)
    experience = curious.unroll(6)
    reward = experience.time_step.reward.clone()
    if algorithm == 'actor-critic':
        seen = experience.rollout_info.rl.reward
    else:
        batch = curious._replay_buffer.gather_all()[0]
        processed, _ = curious.preprocess_experience(batch.time_step, batch.rollout_info, ())
        seen = processed.reward.transpose(0, 1)
    torch.testing.assert_close(seen, 2.0 * reward + 0.5 * 10.0)
    assert torch.equal(experience.time_step.reward, reward), 'the reward itself is left as it is'
    plain.unroll(6)
    assert curious.get_metrics()[2].result() <= 4.0


@both
def test_a_goal_generator_extends_the_observation_and_keeps_its_state(algorithm):
    from alfx.nest.utils import NestConcat
    from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
    from alfx.networks.value_networks import ValueNetwork
    from helpers import agents
    networks = dict(actor_network_ctor=partial(ActorDistributionNetwork, preprocessing_combiner=NestConcat()),
                    value_network_ctor=partial(ValueNetwork, preprocessing_combiner=NestConcat()))
    agent, env = make_agent(algorithm, 'discrete', goal_generator=Counter(),
                            rl_algorithm_cls=partial(agents.ALGORITHMS[algorithm], **networks))
    assert agent.policy.observation_spec == [env.observation_spec(), agent._goal_generator.action_spec]
    for _ in range(2):
        agent.train_iter()
    # an episode has 5 steps, and the state is reset at its FIRST step
    assert agent.learner.collector.position.state.goal_generator.count.max() <= 5


class Watcher(Bonus):
    """An intrinsic module that keeps its observations; its measure is the sum of the observation."""

    def __init__(self, observation_spec, action_spec):
        super().__init__(name='watcher')
        self.specs = observation_spec, action_spec
        self.seen = []

    def rollout_step(self, inputs, state):
        self.seen.append(inputs.observation)
        return super().rollout_step(inputs, state)

    def predict_step(self, inputs, state):
        return AlgStep(info={'total': inputs.observation.sum(-1), 'kind': torch.ones(2, dtype=torch.int64)})


def test_an_intrinsic_module_reads_but_does_not_train_the_representation():
    agent, env = make_agent('actor-critic', 'discrete', representation_learner_cls=Doubler,
                            intrinsic_reward_module=Watcher)
    assert agent.intrinsic_reward.specs == (TensorSpec((2, )), env.action_spec())
    agent.train_iter()
    assert agent.intrinsic_reward.seen and not any(seen.requires_grad for seen in agent.intrinsic_reward.seen)
    step = agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(4))
    measures = agent.measures(step.info)
    assert sorted(measures) == ['irm/total', 'repr/loss'] and measures['irm/total'].shape == (4, )


class Differences(Algorithm):
    """An algorithm that learns from pairs of steps: its state is the previous observation; it trains on sequences."""

    def __init__(self, observation_spec, action_spec):
        super().__init__(train_state_spec=observation_spec, name='differences')
        self.sequences = 0

    def own_capabilities(self):
        return super().own_capabilities()._replace(trains_sequences_at_once=True, needs_previous_step=True)

    def rollout_step(self, inputs, state):
        return AlgStep(inputs.observation[:, 0] - state[:, 0], inputs.observation, ())

    def train_sequence(self, inputs, state, rollout_info):
        self.sequences += 1
        observation = inputs.observation[..., 0]
        previous = torch.cat([state[:1, :, 0], observation[:-1]])
        return AlgStep((), (), LossInfo(loss=(observation - previous).abs()))


def test_a_part_that_looks_one_step_back_trains_on_whole_sequences():
    agent, _ = make_agent('ppo', 'discrete', intrinsic_reward_module=Differences, mini_batch_length=3)
    assert agent.capabilities.trains_sequences_at_once
    agent.train_iter()
    assert agent.intrinsic_reward.sequences == agent._config.num_updates_per_train_iter * 6 * 4 // (3 * 8)


def test_a_deferring_policy_gets_all_intrinsic_rewards_of_an_unroll():
    """Pass the intrinsic rewards of all steps at once if the policy waits for the end of the unroll."""
    rnd = partial(RNDAlgorithm, target_net=partial(EncodingNetwork, fc_layer_params=(4, )),
                  predictor_net=partial(EncodingNetwork, fc_layer_params=(4, )), keep_stacked_frames=0)
    agent, _ = make_agent('ppo', 'discrete', intrinsic_reward_module=rnd)
    assert agent.capabilities.postprocesses_unrolls and agent.capabilities.recomputes_rollout_info
    experience = agent.unroll(6)
    stored = agent._replay_buffer.gather_all()[0].rollout_info
    reward = stored.rewards['irm']
    assert reward.shape == (4, 7) and (reward[:, 1:] > 0).any() and not reward[:, 0].any()
    assert torch.equal(experience.rollout_info.rewards['irm'], reward.transpose(0, 1))
    agent.train_iter()
    by_step, _ = make_agent('actor-critic', 'discrete', intrinsic_reward_module=rnd)
    assert not by_step.capabilities.postprocesses_unrolls, 'on-policy training has the rewards with each step'


def test_a_part_that_looks_one_step_back_rejects_sequences_of_one_step():
    with pytest.raises(ConfError, match='TrainerConfig.mini_batch_length = 1: a part of the algorithm learns from'):
        make_agent('ppo', 'discrete', intrinsic_reward_module=Differences)
    make_agent('ppo', 'discrete', intrinsic_reward_module=Differences, use_rollout_state=True)


@both
@pytest.mark.parametrize('cls', [None, EntropyTargetAlgorithm, partial(SGDEntropyTargetAlgorithm,
                                                                       optimizer=Adam(lr=0.1))])
def test_an_entropy_target_moves_its_weight_as_the_policy_is_trained(algorithm, cls):
    agent, _ = make_agent(algorithm, 'discrete', enforce_entropy_target=True, entropy_target_cls=cls)
    part = agent._entropy_target_algorithm
    before = {name: x.clone() for name, x in part.state_dict().items() if isinstance(x, torch.Tensor)}
    for _ in range(5):
        agent.train_iter()
    after = part.state_dict()
    assert any(not torch.equal(x, after[name]) for name, x in before.items())


@both
def test_nested_actions_get_a_nested_entropy_target(algorithm):
    agent, _ = make_agent(algorithm, 'mixed', enforce_entropy_target=True)
    agent.train_iter()
    assert type(agent._entropy_target_algorithm).__name__ == 'NestedEntropyTargetAlgorithm'


@both
@pytest.mark.parametrize('parts', [{}, {'enforce_entropy_target': True}, {'extrinsic_reward_coef': 2.0}])
def test_a_step_of_the_policy_alone_matches_a_step_of_all_parts(algorithm, parts):
    agent, env = make_agent(algorithm, 'discrete', **parts)
    time_step, state = env.current_time_step(), agent.get_initial_rollout_state(env.batch_size)
    steps = []
    for step in (agent.rollout_step, partial(agent._step, 'rollout_step', rollout_info=None)):
        torch.manual_seed(0)
        steps.append(step(time_step, state))
    assert nest.structure(steps[0]) == nest.structure(steps[1])
    assert all(torch.equal(a, b) for a, b in zip(*map(nest.flatten, steps)))
    assert agent._policy_acts_alone == (not agent.on_policy or not parts)


def test_paths_lead_to_the_infos_of_the_parts():
    agent, _ = make_agent('ppo', 'discrete', intrinsic_reward_module=Bonus())
    assert agent.policy.path == 'rl' and agent.intrinsic_reward.path == 'irm'
    agent.set_path('outer')
    assert agent.policy.path == 'outer.rl'


def test_the_losses_of_the_parts_are_added_up():
    class Constant(Algorithm):
        def calc_loss(self, info):
            return LossInfo(loss=torch.full((1, 2), info), scalar_loss=torch.tensor(info), extra={'value': info})

    State = namedtuple('State', ['a', 'b'], default_value=())
    helper, first, second = AgentHelper(State), Constant(), Constant()
    helper.register_algorithm(first, 'a')
    helper.register_algorithm(second, 'b')
    info = helper.accumulate_loss_info([first, second], State(a=1.0, b=2.0))
    assert info.loss.tolist() == [[3.0, 3.0]] and info.scalar_loss.item() == 3.0
    assert info.extra == {'a': {'value': 1.0}, 'b': {'value': 2.0}}
    with pytest.raises(ValueError, match="already registered for the field 'a'"):
        helper.register_algorithm(first, 'a')


def test_rewards_are_accumulated_into_a_new_tensor():
    first, second = torch.ones(3), torch.ones(3)
    total = AgentHelper.accumulate_algorithm_rewards([first, second], [1.0, 2.0], ['a', 'b'], 'reward', print)
    assert total.tolist() == [3.0] * 3 and first.tolist() == [1.0] * 3
    with pytest.raises(ValueError, match='do not match'):
        AgentHelper.accumulate_algorithm_rewards([first], [1.0, 2.0], ['a'], 'reward', print)


@both
def test_the_rewards_of_a_summarized_iteration_are_written_once(algorithm, monkeypatch):
    from alfx import context
    from alfx.summary import summary_utils
    agent, _ = make_agent(algorithm, 'discrete', intrinsic_reward_module=Bonus(), intrinsic_reward_coef=0.5)
    written = []
    monkeypatch.setattr(summary_utils, 'add_mean_hist_summary', lambda name, value: written.append((name, value)))
    context.set_summary_writer(mock.MagicMock())
    with context.record_if(True):
        if algorithm == 'actor-critic':
            agent.unroll(6)
        else:
            agent.unroll(6)
            batch = agent._replay_buffer.gather_all()[0]
            agent.preprocess_experience(batch.time_step, batch.rollout_info, ())
    names = [name for name, _ in written if name.startswith('reward/')]
    assert names == ['reward/extrinsic', 'reward/irm', 'reward/overall']
    assert dict(written)['reward/irm'].ndim == 2, 'one summary of the whole unroll'
