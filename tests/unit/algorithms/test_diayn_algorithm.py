"""DIAYN as a part of agents: requirements, effects and summaries."""
from functools import partial

import pytest
import torch
from helpers.agents import make_agent
from helpers.agents_with_goals import combined_networks, make_sac_agent
from helpers.plans import num_graphs
from helpers.sac_agents import ENVIRONMENTS

from alfx import context, nest
from alfx.algorithms.diayn_algorithm import DIAYNAlgorithm, DIAYNInfo, DIAYNState
from alfx.algorithms.goal_generator import RandomCategoricalGoalGenerator, RandomContinuousGoalGenerator
from alfx.data_structures import StepType, TimeStep
from alfx.gin_utils import ConfError
from alfx.layers import Cast
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.optimizers import Adam
from alfx.runs.evaluator import evaluate
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

OBSERVATION, GOAL = TensorSpec((2, )), BoundedTensorSpec((3, ), torch.float32, 0.0, 1.0)
FIRST, MID = StepType.FIRST, StepType.MID
encoder = partial(EncodingNetwork, fc_layer_params=(8, ))
KINDS = {
    'discrete': dict(goal_generator=partial(RandomCategoricalGoalGenerator, num_of_goals=3),
                     intrinsic_reward_module=partial(DIAYNAlgorithm, 3, encoder, hidden_size=(8, ))),
    'continuous': dict(goal_generator=partial(RandomContinuousGoalGenerator, goal_size=3),
                       intrinsic_reward_module=partial(DIAYNAlgorithm, None, encoder)),
}
ALGORITHMS = ['actor-critic', 'ppo', 'sac']
every_kind = pytest.mark.parametrize('kind', list(KINDS))
every_algorithm = pytest.mark.parametrize('algorithm', ALGORITHMS)


def make(algorithm, kind='discrete', seed=0, batch_size=4, **agent_args):
    agent_args = {**KINDS[kind], 'extrinsic_reward_coef': 0.0, **agent_args}
    if algorithm == 'sac':
        return make_sac_agent(batch_size, seed, **agent_args)
    return make_agent(algorithm, 'discrete', batch_size, seed=seed, mini_batch_length=3,
                      rl_algorithm_cls=combined_networks(algorithm), **agent_args)


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


def step_of(*step_types, skill=None):
    count = len(step_types)
    return TimeStep(step_type=torch.tensor(step_types, dtype=torch.int32),
                    observation=[torch.ones(count, 2), torch.eye(3)[:count] if skill is None else skill])


@every_kind
@every_algorithm
class TestInAnAgent:

    def test_training_changes_every_parameter(self, algorithm, kind):
        agent, _ = make(algorithm, kind)
        before = parameters(agent)
        for _ in range(4):
            agent.train_iter()
        names = [name for name, _ in agent.named_parameters()]
        same = [name for name, a, b in zip(names, before, parameters(agent)) if torch.equal(a, b)]
        assert same == []

    def test_the_same_seed_gives_the_same_parameters(self, algorithm, kind):
        results = []
        for _ in range(2):
            agent, _ = make(algorithm, kind, seed=3)
            for _ in range(2):
                agent.train_iter()
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_a_checkpoint_restores_networks_and_statistics(self, algorithm, kind):
        agent, env = make(algorithm, kind)
        agent.train_iter()
        copy, _ = make(algorithm, kind, seed=9)
        copy.load_state_dict(agent.state_dict())
        steps, rewards = env.current_time_step(), []
        for other in (agent, copy):
            state = other.get_initial_rollout_state(4)
            state = state._replace(irm=state.irm._replace(has_previous=torch.ones(4),
                                                          skill=torch.eye(3)[[0, 1, 2, 0]]))
            steps = steps._replace(step_type=torch.full((4, ), MID, dtype=torch.int32))
            torch.manual_seed(0)
            info = other.rollout_step(steps, state).info
            rewards.append(info.rewards['irm'])
        assert torch.equal(*rewards) and rewards[0].abs().min() > 0

    def test_one_environment_is_enough(self, algorithm, kind):
        agent, _ = make(algorithm, kind, batch_size=1)
        for _ in range(4):
            agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())


@pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])
def test_a_recurrent_policy_trains_step_by_step_with_the_skills(algorithm):
    agent, _ = make_agent(algorithm, 'recurrent', rl_algorithm_cls=combined_networks(algorithm, recurrent=True),
                          **KINDS['discrete'])
    assert not agent.capabilities.trains_sequences_at_once
    before = parameters(agent)
    for _ in range(3):
        agent.train_iter()
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters(agent)))


@every_algorithm
def test_steps_do_not_change_their_inputs(algorithm):
    agent, env = make(algorithm)
    agent.train_iter()
    time_step = env.current_time_step()
    for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                          (agent.predict_step, agent.get_initial_predict_state(4))):
        copies = nest.map_structure(torch.clone, (time_step, state))
        method(time_step, state)
        for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state))):
            assert torch.equal(old, new)


def test_evaluation_measures_the_discriminator_and_changes_no_statistics():
    agent, _ = make('sac')
    for _ in range(4):
        agent.train_iter()
    before = {name: x.clone() for name, x in agent.state_dict().items() if isinstance(x, torch.Tensor)}
    env = ENVIRONMENTS['continuous'](batch_size=2)
    measures = evaluate(env, agent, 6).measures
    assert all(torch.equal(before[name], x) for name, x in agent.state_dict().items() if name in before)
    assert measures['irm/accuracy'].shape == (6, )
    # Four of the five steps of an episode are behind its first: a multiple of a quarter.
    assert all(round(4 * x) == pytest.approx(4 * x) for x in measures['irm/accuracy'])
    assert 'irm/information' in measures and 'irm/squared_error' not in measures


def test_first_steps_have_no_metrics():
    algorithm = DIAYNAlgorithm(3, EncodingNetwork(OBSERVATION))
    state = DIAYNState(skill=torch.eye(3), has_previous=torch.tensor([1.0, 0.0, 1.0]))
    step = algorithm.predict_step(step_of(FIRST, MID, MID), state)
    assert torch.isnan(step.info.accuracy).tolist() == [True, True, False]
    assert step.output[:2].tolist() == [0.0, 0.0] and step.output[2] != 0.0


def test_no_reward_crosses_an_episode_boundary():
    algorithm = DIAYNAlgorithm(3, EncodingNetwork(OBSERVATION))
    algorithm.set_on_policy(True)
    step = algorithm.rollout_step(step_of(FIRST, MID, MID), algorithm.get_initial_rollout_state(3))
    assert step.output.tolist() == [0.0] * 3 and step.info.loss.tolist() == [0.0] * 3
    assert algorithm.state_dict()['_reward_normalizer._stats./._count'] == 0, 'they are not in the statistics either'
    step = algorithm.rollout_step(step_of(FIRST, MID, MID), step.state)
    assert step.output[0] == 0.0 and (step.output[1:] != 0.0).all()


def test_rewards_are_for_the_previous_skill_and_not_the_next_one():
    algorithm = DIAYNAlgorithm(3, EncodingNetwork(OBSERVATION))
    algorithm.set_on_policy(True)
    state = DIAYNState(skill=torch.eye(3)[[2, 0]], has_previous=torch.ones(2))
    first, second = (algorithm.predict_step(step_of(MID, MID, skill=skill), state).info.information
                     for skill in (torch.eye(3)[[0, 1]], torch.eye(3)[[1, 2]]))
    assert torch.equal(first, second)


def test_integers_from_any_minimum_are_skills_like_one_hot_vectors():
    torch.manual_seed(0)
    spec = BoundedTensorSpec((), torch.int64, 4, 6)
    algorithm = DIAYNAlgorithm(spec, encoder, observation_spec=[OBSERVATION, spec])
    integers = algorithm.train_step(step_of(MID, MID, skill=torch.tensor([4, 6])), algorithm.get_initial_train_state(2))
    assert torch.equal(integers.state.skill, torch.eye(3)[[0, 2]])


def test_observations_are_normalized_by_rollout_statistics():
    torch.manual_seed(0)
    algorithm = DIAYNAlgorithm(3, EncodingNetwork(OBSERVATION), observation_spec=OBSERVATION)
    algorithm.set_on_policy(False)
    observation = 100.0 + 5.0 * torch.randn(4000, 2)
    steps = TimeStep(step_type=torch.full((4000, ), MID), observation=[observation, torch.eye(3)[[0] * 4000]])
    seen = []
    algorithm._encoding_net.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    state = algorithm.get_initial_rollout_state(4000)
    assert algorithm.rollout_step(steps, state).info == ()
    algorithm.train_step(steps._replace(observation=[observation + 5.0, steps.observation[1]]), state)
    assert seen[0].mean().abs() < 1e-3 and (seen[0].std() - 1).abs() < 1e-2
    assert (seen[1].mean() - 1.0).abs() < 0.05, 'training does not change the statistics'
    assert DIAYNAlgorithm(3, encoder, observation_spec=OBSERVATION,
                          normalize_observation=False)._observation_normalizer is None


def test_the_discriminator_also_learns_from_last_steps():
    agent, _ = make('sac')
    agent.unroll(12)
    experience, _ = agent.replay_buffer.get_batch(64, 2)
    experience = nest.map_structure(lambda x: x.transpose(0, 1), experience)
    is_end = experience.step_type[1] == StepType.LAST
    loss = agent.intrinsic_reward.calc_loss(agent.learner.losses.train_info(experience).irm).loss
    assert is_end.any() and (loss[0][is_end] > 0).all()
    assert (experience.step_type[0][loss[0] > 0] != StepType.LAST).all() and (loss[1] == 0).all()


@every_kind
def test_sac_updates_with_skills_are_traced_and_match_eager_ones(kind, warm_up):
    def train(recorded):
        agent, _ = make('sac', kind, optimizer=Adam(lr=1e-3))
        assert agent.capabilities.traceable_update and agent.capabilities.trains_sequences_at_once
        warm_up(1 if recorded else 10**9)
        for _ in range(4):
            agent.train_iter()
        assert bool(num_graphs(agent)) == recorded
        return parameters(agent)

    for a, b in zip(train(True), train(False)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_its_own_optimizer_owns_its_networks():
    optimizer = Adam(lr=1e-3)
    agent, _ = make('ppo', intrinsic_reward_module=partial(DIAYNAlgorithm, 3, encoder, optimizer=optimizer))
    owned = {id(p) for group in optimizer.param_groups for p in group['params']}
    assert owned == {id(p) for p in agent.intrinsic_reward.parameters()} and len(owned) == 4


def test_training_accuracy_is_logged(monkeypatch):
    algorithm = DIAYNAlgorithm(3, EncodingNetwork(OBSERVATION))
    algorithm.set_on_policy(False)
    info = DIAYNInfo(loss=torch.tensor([[0.0, 2.0], [1.0, 3.0]]), valid=torch.tensor([[0.0, 1.0], [1.0, 1.0]]),
                     accuracy=torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    assert algorithm.calc_loss(info).extra == ()
    monkeypatch.setattr(context, 'should_record_summaries', lambda: True)
    extra = algorithm.calc_loss(info).extra
    # Of the three steps that count.
    assert extra['discriminator'] == 2.0 and extra['accuracy'].item() == pytest.approx(1 / 3)


# Invalid settings ----------------------------------------------------------------------------------------------


def test_an_agent_without_goals_is_rejected_with_the_remedy():
    with pytest.raises(ValueError, match='give the agent a goal generator'):
        make_agent('actor-critic', 'discrete', intrinsic_reward_module=partial(DIAYNAlgorithm, 3, encoder))


def test_another_number_of_goals_is_rejected():
    with pytest.raises(SpecError, match=r'expected goals that fit .* floats \(4,\) \(one-hot\), found .*\(3,\)'):
        DIAYNAlgorithm(4, encoder, observation_spec=[OBSERVATION, GOAL])
    algorithm = DIAYNAlgorithm(4, EncodingNetwork(OBSERVATION))
    with pytest.raises(SpecError, match='expected skills of 4 components, as skill_spec says, found 3'):
        algorithm.train_step(step_of(MID, MID), algorithm.get_initial_train_state(2))


@pytest.mark.parametrize('arguments,error,message', [
    (dict(skill_spec=TensorSpec((2, 3))), SpecError, 'rank 1'),
    (dict(skill_spec=BoundedTensorSpec((2, ), torch.int64, 0, 3)), SpecError, 'of rank 0'),
    (dict(skill_spec=TensorSpec((), torch.int64)), SpecError, 'BoundedTensorSpec of rank 0'),
    (dict(skill_spec=None), ValueError, 'add a goal generator to the agent'),
    (dict(skill_spec=0), ConfError, 'DIAYNAlgorithm.skill_spec must be'),
    (dict(skill_spec=True), ConfError, 'DIAYNAlgorithm.skill_spec must be'),
    (dict(reward_adapt_speed=0), ConfError, 'reward_adapt_speed must be a number > 0'),
    (dict(hidden_size=0), ConfError, 'hidden_size must be an int >= 1 or a sequence, each an int >= 1, found int 0'),
    (dict(hidden_size=(8, 2.5)), ConfError, r'DIAYNAlgorithm.hidden_size must be .*, found tuple \(8, 2.5\)'),
    (dict(encoding_net=partial(LSTMEncodingNetwork, hidden_size=(4, ))), ValueError, 'feed-forward'),
    (dict(observation_spec=None), ValueError, 'set observation_spec'),
])
def test_invalid_arguments_of_the_discriminator_are_rejected(arguments, error, message):
    with pytest.raises(error, match=message):
        DIAYNAlgorithm(**{'skill_spec': 3, 'encoding_net': encoder, 'observation_spec': OBSERVATION, **arguments})


def test_a_number_as_hidden_size_is_one_layer():
    algorithms = []
    for hidden_size in (5, (5, )):
        torch.manual_seed(0)
        algorithms.append(DIAYNAlgorithm(3, encoder, observation_spec=OBSERVATION, hidden_size=hidden_size))
    one, other = (algorithm._discriminator.state_dict() for algorithm in algorithms)
    assert [tuple(x.shape) for x in one.values()] == [(5, 8), (5, ), (3, 5), (3, )]
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize('arguments, activation', [({}, torch.relu), (dict(hidden_activation=torch.tanh), torch.tanh)])
def test_hidden_layers_have_the_activation_and_the_output_has_none(arguments, activation):
    algorithm = DIAYNAlgorithm(3, encoder, observation_spec=OBSERVATION, hidden_size=(5, 4), **arguments)
    representation = torch.randn(6, 2)
    first, first_bias, second, second_bias, last, last_bias = algorithm._discriminator.parameters()
    hidden = activation(algorithm._encoding_net(representation)[0] @ first.t() + first_bias)
    expected = activation(hidden @ second.t() + second_bias) @ last.t() + last_bias
    torch.testing.assert_close(algorithm._predict(representation), expected)
    assert (expected < 0).any() and (expected.abs() > 0.01).any()


def test_sequences_of_one_step_are_rejected():
    with pytest.raises(ConfError, match='TrainerConfig.mini_batch_length = 1'):
        make_agent('ppo', 'discrete', rl_algorithm_cls=combined_networks('ppo'), **KINDS['discrete'])


@pytest.mark.parametrize('normalize', [True, False])
def test_integer_observations_are_encoded_normalized_or_as_they_are(normalize):
    spec = BoundedTensorSpec((2, ), torch.uint8, 0, 255)
    algorithm = DIAYNAlgorithm(3, partial(EncodingNetwork, input_preprocessors=Cast(), fc_layer_params=(8, )),
                               observation_spec=[spec, GOAL], normalize_observation=normalize)
    time_step = step_of(FIRST, MID)
    time_step = time_step._replace(observation=[time_step.observation[0].to(torch.uint8), time_step.observation[1]])
    state = nest.map_structure(lambda s: s.zeros((2, )), algorithm.train_state_spec)
    assert algorithm.rollout_step(time_step, state).output.shape == (2, )
