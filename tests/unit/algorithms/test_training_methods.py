"""Overridden training methods are called once per iteration, in the documented order."""
from functools import partial

import pytest
import torch
from helpers import agents
from helpers.overriding import counting
from helpers.sac_agents import networks

from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm, Loss
from alfx.algorithms.base.ownership import OwnershipError
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import ObservationNormalizer
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.training_methods import CustomLearner
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.data_structures import LossInfo
from alfx.engine.learner import Learner
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.networks import ActorDistributionNetwork, ValueNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec


def agent_of(cls, algorithm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agents, 'Agent', cls)
        return agents.make_agent(algorithm, 'discrete')[0]


@pytest.mark.parametrize('algorithm, names, expected', [
    ('ppo', ['train_iter'], ['train_iter']),
    ('ppo', ['unroll', 'train_from_replay_buffer'], ['unroll', 'train_from_replay_buffer']),
    ('actor-critic', ['unroll', 'train_from_unroll', 'update_with_gradient'],
     ['unroll', 'train_from_unroll', 'update_with_gradient']),
])
def test_overridden_methods_run_once_and_change_nothing(algorithm, names, expected):
    cls, calls = counting(Agent, *names)
    both = agent_of(cls, algorithm), agent_of(Agent, algorithm)
    assert isinstance(both[0].learner, CustomLearner) and type(both[1].learner) is Learner
    for agent in both:
        torch.manual_seed(1)
        agent.learner.run_iteration()
    assert calls == expected
    for a, b in zip(both[0].parameters(), both[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('algorithm', sorted(agents.ALGORITHMS))
def test_train_iter_is_an_iteration_of_the_learner(algorithm):
    first_agent, second_agent = agent_of(Agent, algorithm), agent_of(Agent, algorithm)
    torch.manual_seed(1)
    first = first_agent.train_iter()
    torch.manual_seed(1)
    assert second_agent.learner.run_iteration() == first > 0
    assert all(torch.equal(a, b) for a, b in zip(first_agent.parameters(), second_agent.parameters(), strict=True))


def policy_in(env, config, **arguments):
    return ActorCriticAlgorithm(env.observation_spec(), env.action_spec(), env=env, config=config,
                                actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
                                value_network_ctor=partial(ValueNetwork, fc_layer_params=(8, )), **arguments)


def ppo_in(env, config):
    return PPOAlgorithm(env.observation_spec(), env.action_spec(), env=env, config=config,
                        actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
                        value_network_ctor=partial(ValueNetwork, fc_layer_params=(8, )))


def sac_in(env, config):
    options = networks('continuous', env)
    options.pop('q_network_cls')
    optimizers = {f'{part}_optimizer': Adam(lr=1e-2) for part in ('actor', 'critic', 'alpha')}
    return SacAlgorithm(env.observation_spec(), env.action_spec(), env=env, config=config, **optimizers, **options)


SAMPLES = dict(unroll_length=2, mini_batch_length=2, mini_batch_size=8, initial_collect_steps=8,
               whole_replay_buffer_training=False, clear_replay_buffer=False)


@pytest.mark.parametrize('make, action_type, settings', [
    (partial(policy_in, optimizer=Adam(lr=1e-2)), ActionType.Discrete, dict(unroll_length=6)),
    (sac_in, ActionType.Continuous, SAMPLES),
], ids=['on-policy', 'off-policy'])
@pytest.mark.parametrize('finalizes', [False, True])
def test_an_algorithm_constructed_in_python_learns_immediately(make, action_type, settings, finalizes):
    """Train all parameters by ``train_iter`` alone, as with a call of ``finalize`` before it."""
    env = PolicyUnittestEnv(4, 6, action_type=action_type)
    algorithm = make(env, TrainerConfig(root_dir='', algorithm_ctor=Agent, **settings))
    if finalizes:
        algorithm.finalize()
    before = [p.detach().clone() for p in algorithm.parameters()]
    assert sum(algorithm.train_iter() for _ in range(4)) > 0
    assert not any(torch.equal(a, b) for a, b in zip(before, algorithm.parameters(), strict=True))


@pytest.mark.parametrize('make, action_type, settings', [
    (policy_in, ActionType.Discrete, dict(unroll_length=6)),
    (ppo_in, ActionType.Discrete, dict(unroll_length=6, mini_batch_size=8)),
])
def test_a_first_iteration_without_an_optimizer_names_the_parameters(make, action_type, settings):
    env = PolicyUnittestEnv(4, 6, action_type=action_type)
    algorithm = make(env, TrainerConfig(root_dir='', algorithm_ctor=Agent, **settings))
    with pytest.raises(OwnershipError, match='trainable parameters .*optimizer = @Adam'):
        algorithm.train_iter()


@pytest.mark.parametrize('with_grad', [False, True])
def test_a_loop_over_unroll_and_train_from_unroll_learns_the_same(with_grad):
    algorithms = []
    for _ in range(2):
        torch.manual_seed(0)
        config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=6, unroll_with_grad=with_grad)
        env = PolicyUnittestEnv(4, 6)
        env.seed(0)
        algorithms.append(policy_in(env, config, optimizer=Adam(lr=1e-2)))
    torch.manual_seed(1)
    for _ in range(2):
        experience = algorithms[0].unroll(6)
        algorithms[0].train_from_unroll(experience, experience.rollout_info)
    torch.manual_seed(1)
    for _ in range(2):
        algorithms[1].train_iter()
    for a, b in zip(*(algorithm.parameters() for algorithm in algorithms), strict=True):
        torch.testing.assert_close(a, b)


class Point(Algorithm):
    """Learns that ``x`` is 1, also in a part."""

    def __init__(self, optimizer=None, part=None):
        super().__init__(optimizer=optimizer)
        self.x, self.part = torch.nn.Parameter(torch.zeros(())), part

    def train(self):
        points = [self.x] if self.part is None else [self.x, self.part.x]
        self.update_with_gradient(LossInfo(loss=sum((x - 1).square() for x in points).expand(1, 1)))
        return min(x.item() for x in points)


def test_a_part_that_was_trained_alone_before_is_trained_with_its_owner():
    part = Point(Adam(lr=0.1))
    before = part.train()
    owner = Point(Adam(lr=0.1), part)
    assert 0.05 < before and 0.05 < owner.train() and part.x > before + 0.05
    with pytest.raises(OwnershipError, match="trainable parameters .'x'."):
        Point(part=Point(Adam(lr=0.1))).train()
    part.train()
    with pytest.raises(OwnershipError, match="trainable parameters .'x'."):
        Point(part=part).train()


def test_a_class_instead_of_an_optimizer_is_an_error():
    with pytest.raises(OwnershipError, match=r'expected an optimizer, found the class Adam; create one: Adam\(\)'):
        Point(Adam).train()


def test_an_optimizer_may_have_parameters_already():
    point, other = Point(part=Point()), Point()
    optimizers = Adam([point.part.x], lr=0.1), Adam([*other.parameters()], lr=0.1)
    point.add_optimizer(optimizers[0], [point.part])
    point.add_optimizer(optimizers[1], [point.x])
    assert point.train() > 0.05 and other.x == 0


def test_a_first_update_without_a_trainer_assigns_the_optimizers():
    point = Point(Adam(lr=0.1))
    _, updated = point.update_with_gradient(LossInfo(loss=(point.x - 1).square().expand(1, 1)))
    assert [name for name, _ in updated] == ['x'] and point.x > 0.05
    parent = Point(Adam(lr=0.1), Point())
    parent.finalize()
    assert parent.part.update_with_gradient(LossInfo(loss=parent.part.x.expand(1, 1)))[1] == []


def test_a_learner_needs_a_configuration():
    with pytest.raises(ValueError, match='needs a TrainerConfig'):
        Loss().train_iter()


def test_collecting_steps_needs_an_environment():
    spec = TensorSpec((3, ))
    algorithm = ActorCriticAlgorithm(spec, BoundedTensorSpec((2, )), env=None, optimizer=Adam(lr=0.1),
                                     config=TrainerConfig(root_dir='', unroll_length=2))
    with pytest.raises(ValueError, match='ActorCriticAlgorithm: collecting steps needs an environment; pass env='):
        algorithm.train_iter()


def test_a_root_algorithm_with_a_normalizer_is_traced_like_an_agent():
    env = PolicyUnittestEnv(4, 6, action_type=ActionType.Continuous)
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, **SAMPLES)
    config.data_transformer = ObservationNormalizer(env.observation_spec())
    algorithm = sac_in(env, config)
    algorithm.finalize()
    assert algorithm.capabilities.traceable_update and '_root_data_transformer' in dict(algorithm.named_children())


def test_a_checkpoint_argument_leaves_step_counts_and_optimizers(tmp_path):
    def make(lr, **arguments):
        torch.manual_seed(0)
        env = PolicyUnittestEnv(batch_size=4, episode_length=5, action_type=ActionType.Discrete)
        env.reset()
        config = TrainerConfig(root_dir='', algorithm_ctor=PPOAlgorithm, unroll_length=5, mini_batch_size=4)
        algorithm = PPOAlgorithm(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                                 actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(4, )),
                                 value_network_ctor=partial(ValueNetwork, fc_layer_params=(4, )),
                                 optimizer=Adam(lr=lr), **arguments)
        algorithm.set_path('')
        algorithm.finalize()
        return algorithm

    teacher = make(0.25)
    teacher.train_iter()
    Checkpointer(str(tmp_path), alg=teacher).save(1)
    student = make(0.5, checkpoint=f'alg@{tmp_path}/ckpt-1')
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), student.parameters()))
    counts = [[metric.result() for metric in x.get_step_metrics()] for x in (student, teacher)]
    assert counts[0] == [0, 0] != counts[1]
    optimizer, = student.optimizers()
    assert optimizer.param_groups[0]['lr'] == 0.5 and not optimizer.state
