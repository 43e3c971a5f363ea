"""The agent that repeats actions: its clock, its rewards, its replay."""
import copy
from functools import partial

import pytest
import torch
from helpers.learning import trains_until

from alfx import context, nest
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import FrameStacker, RewardNormalizer
from alfx.algorithms.dynamic_action_repeat_agent import ActionRepeatState, DynamicActionRepeatAgent
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import AlgStep, LossInfo, StepType, TimeStep, namedtuple
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.networks.q_networks import QNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import clipped_exp

GAMMA = 0.5
ACTION = BoundedTensorSpec((1, ), torch.float32, -1, 1)
ScriptedInfo = namedtuple('ScriptedInfo', ['action', 'reward', 'discount', 'step_type', 'observation'],
                          default_value=())
sac = partial(
    SacAlgorithm,
    actor_network_cls=partial(ActorDistributionNetwork, fc_layer_params=(16, ), continuous_projection_net_ctor=partial(
        NormalProjectionNetwork, scale_distribution=True, state_dependent_std=True, std_transform=clipped_exp)),
    q_network_cls=partial(QNetwork, fc_layer_params=(16, ), preprocessing_combiner=NestConcat()),
    critic_loss_ctor=partial(OneStepTDLoss, gamma=GAMMA))


class Scripted(OffPolicyAlgorithm):
    """A policy that follows the observation ``(action, k)``, counts its steps in its state and records its inputs."""

    def __init__(self, observation_spec, action_spec, reward_spec=TensorSpec(()), config=None, debug_summaries=False):
        super().__init__(observation_spec, action_spec, train_state_spec=(), reward_spec=reward_spec,
                         rollout_state_spec=TensorSpec((), torch.int64), config=config, name='Scripted')

    def rollout_step(self, inputs, state):
        action = (inputs.observation[:, 1].long(), inputs.observation[:, :1])
        info = ScriptedInfo(action, inputs.reward, inputs.discount, inputs.step_type, inputs.observation)
        return AlgStep(action, state + 1, info)

    predict_step = rollout_step

    def train_step(self, inputs, state, rollout_info):
        return AlgStep(rollout_info.action, (), ScriptedInfo(rollout_info.action, inputs.reward, inputs.discount,
                                                             inputs.step_type, inputs.observation))

    def calc_loss(self, info):
        return LossInfo(loss=torch.zeros_like(info.discount))


def scripted(reward_dim=1, **arguments):
    reward_spec = TensorSpec(() if reward_dim == 1 else (reward_dim, ))
    agent = DynamicActionRepeatAgent(TensorSpec((2, )), ACTION, reward_spec, K=3, gamma=GAMMA,
                                     rl_algorithm_cls=Scripted, **arguments)
    agent.set_path('')
    agent.finalize()
    return agent


def step(step_type, reward, decision, discount=1.0, batch=1, reward_dim=1):
    reward = torch.full((batch, ), float(reward))
    reward = reward if reward_dim == 1 else torch.stack([reward * (i + 1) for i in range(reward_dim)], -1)
    return TimeStep(step_type=torch.full((batch, ), step_type, dtype=torch.int32), reward=reward,
                    discount=torch.full((batch, ), discount), observation=torch.tensor([decision] * batch),
                    prev_action=torch.zeros(batch, 1), env_id=torch.arange(batch))


def play(agent, steps, method='rollout_step'):
    """Return the results of ``method`` for successive steps; reset the state at FIRST steps as the engine does."""
    results, state = [], None
    for each in steps:
        batch = each.step_type.shape[0]
        initial = getattr(agent, f"get_initial_{method.removesuffix('_step')}_state")(batch)
        state = initial if state is None or each.step_type[0] == StepType.FIRST else state
        results.append(getattr(agent, method)(each, state))
        state = results[-1].state
    return results


FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
# At each step the observation requests another action for k + 1 steps: 2, then 3, then 1, then 3, cut off by LAST.
EPISODE = [step(FIRST, 0, (0.1, 1.0)), step(MID, 1, (0.2, 0.0)), step(MID, 2, (0.3, 2.0)), step(MID, 4, (0.4, 0.0)),
           step(MID, 8, (0.5, 0.0)), step(MID, 16, (0.6, 0.0)), step(MID, 32, (0.7, 2.0)),
           step(LAST, 64, (0.8, 0.0), discount=0.0), step(FIRST, 0, (0.9, 0.0))]


# The clock ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('method', ['rollout_step', 'predict_step'])
def test_actions_repeat_as_decided_unless_the_episode_ends(method):
    results = play(scripted(), EPISODE, method)
    actions = [round(result.output.item(), 3) for result in results]
    assert actions == [0.1, 0.1, 0.3, 0.3, 0.3, 0.6, 0.7, 0.8, 0.9]
    assert [result.state.rl.item() for result in results] == [1, 1, 2, 2, 2, 3, 4, 5, 1]  # steps of the inner algorithm


def test_the_inner_algorithm_sees_discounted_sums_and_discounts():
    """Pass discounted reward sums and the discount between decisions to the inner algorithm."""
    infos = [result.info for result in play(scripted(), EPISODE)]
    seen = [(i, info.rl.reward.item(), info.rl.discount.item()) for i, info in enumerate(infos) if info.is_decision]
    # gamma = 0.5. At step 2: 1 + 2 / 2 = 2 and 0.5; at 5: 4 + 8 / 2 + 16 / 4 = 12 and 0.25; at 6: 32 and 1; at 7, a
    # termination: 64 and 0
    assert seen == [(0, 0.0, 1.0), (2, 2.0, 0.5), (5, 12.0, 0.25), (6, 32.0, 1.0), (7, 64.0, 0.0), (8, 0.0, 1.0)]


def test_each_reward_dimension_is_summed_separately():
    steps = [step(FIRST, 0, (0.1, 1.0), reward_dim=2), step(MID, 1, (0.2, 0.0), reward_dim=2),
             step(MID, 2, (0.3, 2.0), reward_dim=2)]
    assert play(scripted(reward_dim=2), steps)[2].info.reward.tolist() == [[2.0, 4.0]]


def test_the_discounted_return_of_an_episode_does_not_depend_on_the_clock():
    torch.manual_seed(0)
    rewards, ks = torch.randn(30).tolist(), torch.randint(3, (31, )).tolist()
    steps = [step(FIRST, 0, (0.0, float(ks[0])))] + [step(MID, r, (0.0, float(k))) for r, k in zip(rewards, ks[1:])]
    steps[-1] = steps[-1]._replace(step_type=torch.full((1, ), LAST, dtype=torch.int32))
    infos = [result.info for result in play(scripted(), steps)]
    total, factor = 0.0, 1.0
    for info in infos[1:]:
        if info.is_decision:
            total += factor * info.reward.item()
            factor *= GAMMA * info.discount.item()
    assert total == pytest.approx(sum(GAMMA**t * r for t, r in enumerate(rewards)), abs=1e-5)


def test_environments_of_a_batch_have_separate_clocks():
    # the second environment repeats an action three times, the first never
    observation = torch.tensor([[0.1, 0.0], [0.2, 2.0]])
    later = torch.tensor([[0.3, 0.0], [0.4, 0.0]])
    steps = [step(FIRST, 0, (0., 0.), batch=2)._replace(observation=observation)]
    steps += [step(MID, 1, (0., 0.), batch=2)._replace(observation=later)] * 3
    results = play(scripted(), steps)
    assert torch.cat([r.output for r in results], -1).tolist() == torch.tensor([[0.1, 0.3, 0.3, 0.3],
                                                                              [0.2, 0.2, 0.2, 0.4]]).tolist()
    assert [r.info.is_decision.tolist() for r in results] == [[True, True], [True, False], [True, False], [True, True]]
    assert results[3].info.reward.tolist() == [1.0, 1.75]  # 1 + 1 / 2 + 1 / 4


def test_steps_do_not_change_their_inputs():
    agent = scripted(reward_normalizer_ctor=RewardNormalizer)
    state = agent.get_initial_rollout_state(1)
    for each in EPISODE:
        before = nest.map_structure(torch.clone, (each, state))
        result = agent.rollout_step(each, state)
        for old, new in zip(nest.flatten(before), nest.flatten((each, state))):
            assert torch.equal(old, new)
        state = result.state


# Normalized rewards ------------------------------------------------------------------------------------------------


def test_normalizing_the_sum_is_summing_normalized_rewards():
    agent = scripted(reward_normalizer_ctor=RewardNormalizer)
    with context.replay_context():
        agent._reward_normalizer(torch.tensor([1.0, 3.0, 5.0, 11.0]))
    infos = [result.info for result in play(agent, EPISODE)]
    mean, std = (agent._reward_normalizer.normalizer._stats_list[0].moments()[i].item() for i in (0, 1))
    expected = {2: [1, 2], 5: [4, 8, 16], 6: [32], 7: [64]}
    chosen = nest.map_structure(lambda *x: torch.stack(x, 1), *[infos[i] for i in expected])
    inputs = nest.map_structure(lambda *x: torch.stack(x, 1), *[EPISODE[i] for i in expected])
    processed, _ = agent.preprocess_experience(inputs, chosen, ())  # not from replay: statistics do not change
    for found, rewards in zip(processed.reward[0].tolist(), expected.values()):
        assert found == pytest.approx(sum(GAMMA**i * (r - mean) / std**0.5 for i, r in enumerate(rewards)), rel=1e-4)


def test_each_reward_within_a_repetition_is_sampled_equally_often():
    agent = scripted(reward_normalizer_ctor=RewardNormalizer)
    torch.manual_seed(0)
    steps = [step(FIRST, 0, (0.1, 2.0), batch=6000)]
    steps += [step(MID, r, (0.2, 2.0), batch=6000) for r in (1, 2, 3)]
    sampled = play(agent, steps)[3].info.sample_rewards
    counts = torch.bincount(sampled.long(), minlength=4) / 6000
    torch.testing.assert_close(counts, torch.tensor([0.0, 1 / 3, 1 / 3, 1 / 3]), atol=0.02, rtol=0)


# Training ----------------------------------------------------------------------------------------------------------


def make_agent(seed=0, batch_size=4, rl=sac, unroll_length=8, config=(), length=2, **arguments):
    torch.manual_seed(seed)
    context.reset()
    env = PolicyUnittestEnv(batch_size=batch_size, episode_length=6, action_type=ActionType.Continuous)
    env.seed(seed)
    env.reset()
    options = dict(unroll_length=unroll_length, mini_batch_size=16, mini_batch_length=length,
                   num_updates_per_train_iter=2, initial_collect_steps=20, whole_replay_buffer_training=False,
                   clear_replay_buffer=False)
    config = TrainerConfig(root_dir='', algorithm_ctor=DynamicActionRepeatAgent, **{**options, **dict(config)})
    agent = DynamicActionRepeatAgent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env,
                                     config=config, K=3, gamma=GAMMA, rl_algorithm_cls=rl, optimizer=Adam(lr=1e-2),
                                     **arguments)
    agent.set_path('')
    agent.finalize()
    return agent, env


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


def test_only_decisions_are_stored_and_follow_each_other():
    agent, env = make_agent(batch_size=3)
    experience = agent.unroll(40)
    chosen = experience.rollout_info.is_decision
    buffer = agent.replay_buffer
    assert buffer.total_size == int(chosen.sum()) < 120
    assert buffer.current_size.tolist() == chosen.sum(0).tolist()
    batch, _ = buffer.get_batch(50, 2)
    first, second = (nest.map_structure(lambda x, i=i: x[:, i], batch) for i in (0, 1))
    follows = ~first.time_step.is_last()
    assert (second.step_type[~follows] == FIRST).all() and (second.step_type[follows] != FIRST).all()
    repeats = torch.where(second.time_step.is_last(), 0, first.rollout_info.k)[follows]
    discount = second.rollout_info.discount[follows]
    ended = second.time_step.is_last()[follows]
    torch.testing.assert_close(discount[~ended], GAMMA**repeats[~ended].float())


def test_training_changes_all_trained_parameters_and_is_repeatable():
    results = []
    for _ in range(2):
        agent, _ = make_agent(seed=3, reward_normalizer_ctor=RewardNormalizer)
        before = parameters(agent)
        for _ in range(6):
            agent.train_iter()
        results.append(parameters(agent))
        assert not [name for (name, p), old in zip(agent.named_parameters(), before) if torch.equal(p, old)]
    assert all(torch.equal(a, b) for a, b in zip(*results))
    variance = agent._reward_normalizer.normalizer._stats_list[0].moments()[1]
    assert variance != 1.0  # it has seen rewards


def test_the_rollout_resumes_exactly_from_a_saved_state():
    agent, env = make_agent(unroll_length=5)
    for _ in range(4):
        agent.train_iter()

    def copied(nested):
        return nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, nested)

    saved = (copied(dict(agent.state_dict())), copied(agent.learner.state_dict()), torch.get_rng_state(),
             env.get_state())
    expected = agent.unroll(7)
    copy, copy_env = make_agent(seed=5, unroll_length=5)
    copy_env.set_state(saved[3])
    copy.load_state_dict(saved[0])
    copy.learner.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    found = copy.unroll(7)
    for a, b in zip(nest.flatten((expected.action, expected.rollout_info.reward, expected.rollout_info.is_decision)),
                    nest.flatten((found.action, found.rollout_info.reward, found.rollout_info.is_decision))):
        assert torch.equal(a, b)


def test_one_environment_is_enough_and_k_of_one_never_repeats():
    agent, _ = make_agent(batch_size=1)
    for _ in range(12):
        agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())
    agent = DynamicActionRepeatAgent(TensorSpec((2, )), ACTION, K=1, rl_algorithm_cls=Scripted)
    agent.set_path('')
    agent.finalize()
    steps = [each._replace(observation=each.observation * torch.tensor([1.0, 0.0])) for each in EPISODE]
    assert all(result.info.is_decision.item() for result in play(agent, steps))


def test_a_representation_sees_decisions_only():
    """Train a representation learner on decisions only, by the loss of the policy."""

    class Linear(OffPolicyAlgorithm):
        def __init__(self, observation_spec, action_spec, reward_spec=TensorSpec(()), config=None,
                     debug_summaries=False):
            super().__init__(observation_spec, action_spec, train_state_spec=(), config=config,
                             rollout_state_spec=TensorSpec((), torch.int64), name='Linear')
            self.layer = torch.nn.Linear(observation_spec.numel, 4)
            self.output_spec = TensorSpec((4, ))

        def rollout_step(self, inputs, state):
            return AlgStep(self.layer(inputs.observation), state + 1, ())

        predict_step = rollout_step

        def train_step(self, inputs, state, rollout_info):
            return AlgStep(self.layer(inputs.observation), (), ())

    agent, _ = make_agent(representation_learner_cls=Linear)
    before = parameters(agent._representation_learner)
    for _ in range(4):
        agent.train_iter()
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters(agent._representation_learner)))
    state = agent.get_initial_rollout_state(4)
    experience = agent.unroll(6)
    assert isinstance(state, ActionRepeatState) and state.repr.shape == (4, )
    assert agent.learner.collector.position.state.repr.max() <= experience.rollout_info.is_decision.sum(0).max() + 6


def test_it_learns_the_optimal_action_of_a_tiny_environment():
    agent, env = make_agent(batch_size=16, unroll_length=4, config=dict(mini_batch_size=64))
    evaluation_env = copy.deepcopy(env)

    def mean_return():
        time_step, state, total = evaluation_env.reset(), agent.get_initial_predict_state(16), torch.zeros(16)
        for _ in range(5):
            result = agent.predict_step(time_step, state)
            time_step, state = evaluation_env.step(result.output), result.state
            total += time_step.reward
        return total.mean().item()

    # the signal changes at each step: five rewards of at most 1, repeating gets 0.5
    assert trains_until(lambda: mean_return() > 4.0, agent.train_iter, 250)


# Unsupported combinations ------------------------------------------------------------------------------------------


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match='DynamicActionRepeatAgent.K'):
        DynamicActionRepeatAgent(TensorSpec((2, )), ACTION, K=0, rl_algorithm_cls=Scripted)
    with pytest.raises(SpecError, match='continuous'):
        DynamicActionRepeatAgent(TensorSpec((2, )), BoundedTensorSpec((), torch.int64, 0, 2), rl_algorithm_cls=Scripted)
    with pytest.raises(ValueError, match='sample from the replay buffer'):
        make_agent(config=dict(whole_replay_buffer_training=True))


def test_a_reward_normalizer_that_would_never_be_updated_is_rejected():
    def make(**arguments):
        return DynamicActionRepeatAgent(TensorSpec((2, )), ACTION, rl_algorithm_cls=Scripted, **arguments)

    assert make(reward_normalizer_ctor=RewardNormalizer)
    with pytest.raises(ValueError, match="RewardNormalizer with update_mode = 'rollout'"):
        make(reward_normalizer_ctor=partial(RewardNormalizer, update_mode='rollout'))
    with pytest.raises(ValueError, match='DynamicActionRepeatAgent.reward_normalizer_ctor.*found ReLU'):
        make(reward_normalizer_ctor=torch.nn.ReLU)


def test_frame_stacks_and_on_policy_algorithms_are_rejected():
    agent, env = make_agent()
    agent._config.data_transformer = FrameStacker(env.observation_spec())
    with pytest.raises(ValueError, match='FrameStacker'):
        agent._check_parts()

    class OnPolicy(Scripted):
        on_policy = True

    with pytest.raises(ValueError, match='off-policy'):
        DynamicActionRepeatAgent(TensorSpec((2, )), ACTION, rl_algorithm_cls=OnPolicy)
