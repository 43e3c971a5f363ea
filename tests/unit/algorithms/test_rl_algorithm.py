"""The training iteration: inputs of parts that train themselves, state restored on resume, parameter ownership."""
from functools import partial

import gymnasium
import pytest
import torch
import torch.distributions as td
from helpers.agents import make_agent
from torch import nn

from alfx import nest
from alfx.algorithms.agent import AgentInfo
from alfx.algorithms.algorithm import Algorithm, Loss
from alfx.algorithms.base.ownership import assign_optimizers
from alfx.algorithms.data_transformer import ObservationNormalizer, RewardScaling
from alfx.algorithms.ppo_algorithm import PPOAlgorithm, PPOInfo
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.trac_algorithm import TracInfo
from alfx.data_structures import AlgStep, Experience, LossInfo
from alfx.engine import rollout
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.optimizers import SGD
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.checkpoint_utils import Checkpointer


class Listener(Algorithm):
    """An intrinsic reward of 0 that keeps the arguments of ``after_train_iter``; its loss pulls ``weight`` to 3."""

    def __init__(self, checkpoint=None):
        super().__init__(optimizer=SGD(lr=0.1), checkpoint=checkpoint, name='listener')
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = []

    def rollout_step(self, inputs, state):
        reward = torch.zeros(len(inputs.step_type))
        return AlgStep(reward, (), LossInfo(loss=(self.weight - 3.0).square() + reward))

    def train_step(self, inputs, state, rollout_info):
        return AlgStep(torch.zeros(len(inputs.step_type)), (), LossInfo(loss=torch.zeros(len(inputs.step_type))))

    def after_train_iter(self, root_inputs, rollout_info):
        self.calls.append((root_inputs, rollout_info))


class OnPolicyPart(Listener):
    """An algorithm that trains on each unroll, as a part of an agent that trains from a replay buffer."""

    def after_train_iter(self, root_inputs, rollout_info):
        super().after_train_iter(root_inputs, rollout_info)
        self._is_on_policy = True
        self.train_from_unroll(Experience(time_step=root_inputs), rollout_info)
        self._is_on_policy = False


def test_epsilon_greedy_comes_from_the_conf_until_it_is_set():
    agent, _ = make_agent('actor-critic', 'discrete', config_args=dict(epsilon_greedy=0.25))
    part = agent.policy
    assert part._epsilon_greedy == 0.25
    part.set_epsilon_greedy(0.5)
    assert part._epsilon_greedy == 0.5
    part.set_epsilon_greedy(None)
    assert part._epsilon_greedy == 0.25
    with pytest.raises(ConfError, match=f'{type(part).__name__}.epsilon_greedy'):
        part.set_epsilon_greedy(1.5)


def scaling(env):
    return RewardScaling(0.5, observation_spec=env.observation_spec())


@pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])
def test_parts_get_rollout_inputs_after_the_data_transformer(algorithm):
    listener = Listener()
    agent, _ = make_agent(algorithm, 'discrete', data_transformer=scaling, intrinsic_reward_module=listener)
    seen = []
    rollout_step = listener.rollout_step
    listener.rollout_step = lambda inputs, state: (seen.append(inputs.reward), rollout_step(inputs, state))[1]
    agent.train_iter()
    (inputs, info), = listener.calls
    assert torch.equal(inputs.reward, torch.stack(seen)) and set(inputs.reward.unique().tolist()) <= {-.5, 0., .5}
    assert info.loss.shape == inputs.reward.shape == (7, 4)


def test_iterations_without_an_unroll_inform_all_parts():
    listener = Listener()
    agent, _ = make_agent('ppo', 'discrete', unroll_length=0.5, intrinsic_reward_module=listener)
    agent.train_iter()
    agent.train_iter()
    assert [inputs is None for inputs, _ in listener.calls] == [True, False]


@pytest.mark.parametrize('unroll_length', [1, 6])
def test_an_on_policy_part_of_an_off_policy_agent_is_trained_on_every_step(unroll_length):
    part = OnPolicyPart()
    agent, _ = make_agent('ppo', 'discrete', unroll_length=unroll_length, intrinsic_reward_module=part)
    config = agent._config
    config.unroll_with_grad, config.whole_replay_buffer_training, config.mini_batch_length = True, False, 1
    agent.policy.preprocess_experience = lambda inputs, info, batch_info: (inputs, info)
    config.initial_collect_steps = 10**9  # only the part is trained
    agent.train_iter()
    # d/dw (w - 3)^2 = -4 at w = 1. None of the first 4 steps of an episode of 5 is masked.
    masks = (part.calls[0][0].step_type[:-1] != 2).float()
    assert part.weight.item() == pytest.approx(1 + 0.1 * 4 * float(masks.mean()))
    assert agent.replay_buffer.total_size == 4 * unroll_length  # the bootstrap step is not stored


def test_an_on_policy_iteration_without_a_step_does_not_train():
    agent, _ = make_agent('actor-critic', 'discrete', unroll_length=0.5)
    assert [agent.train_iter() for _ in range(4)] == [0, 4, 0, 4]


def test_no_environment_step_is_taken_once_num_env_steps_are_reached():
    agent, _ = make_agent('actor-critic', 'discrete')
    agent._config.num_env_steps = 40
    trained = [agent.train_iter() for _ in range(5)]
    steps = int(agent.get_step_metrics()[0].result())
    assert trained[-1] == 0 and 40 <= steps < 40 + 24


def test_resuming_does_not_update_statistics_again():
    def normalizing(env):
        return ObservationNormalizer(env.observation_spec(), update_mode='rollout')

    agent, env = make_agent('ppo', 'discrete', data_transformer=normalizing)
    agent.train_iter()
    saved = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, dict(agent.state_dict()))
    agent.learner.load_state_dict(agent.learner.state_dict())
    for name, value in agent.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, saved[name]), name


class Part(Algorithm):

    def __init__(self, module, optimizer=None, visible=False):
        super().__init__(optimizer=optimizer)
        self.module = module
        self.target = nn.Linear(1, 1)
        self.force_params_visible_to_parent = visible

    def _trainable_attributes_to_ignore(self):
        return ['target']


class Parent(Algorithm):

    def __init__(self, *parts, optimizer=None):
        super().__init__(optimizer=optimizer)
        self.parts = nn.ModuleList(parts)


def owned(optimizer):
    return {id(p) for group in optimizer.param_groups for p in group['params']}


@pytest.mark.parametrize('order', [1, -1])
def test_a_shared_module_belongs_to_the_part_with_an_optimizer(order):
    shared, own, parent = nn.Linear(2, 2), SGD(lr=0.1), SGD(lr=0.1)
    algorithm = Parent(*[Part(shared, own), Part(nn.Sequential(shared, nn.Linear(2, 1)))][::order], optimizer=parent)
    assign_optimizers(algorithm)
    assert owned(own) == {id(p) for p in shared.parameters()}
    assert len(owned(parent)) == 2 and not owned(own) & owned(parent)
    algorithm = Parent(*[Part(shared, SGD(lr=0.1)), Part(shared)][::order])
    assign_optimizers(algorithm)  # every parameter has an owner


def test_ignored_attributes_stay_hidden_even_with_forced_parameters():
    part, parent = Part(nn.Linear(2, 2), SGD(lr=0.1), visible=True), SGD(lr=0.1)
    assign_optimizers(Parent(Parent(part), optimizer=parent))
    assert owned(parent) == {id(p) for p in part.module.parameters()}


def test_a_checkpoint_argument_loads_a_part_once(tmp_path):
    def agent_with(listener, seed):
        return make_agent('actor-critic', 'discrete', seed=seed, intrinsic_reward_module=listener)[0]

    trained = agent_with(Listener(), 0)
    trained.train_iter()
    path = Checkpointer(str(tmp_path), alg=trained).save(1)
    weight = trained.intrinsic_reward.weight.item()
    agent = agent_with(Listener(checkpoint=f'alg._irm@{path}'), 1)
    assert agent.intrinsic_reward.pre_loaded and agent.intrinsic_reward.weight.item() == weight != 1.0
    other = agent_with(Listener(), 2).state_dict()
    agent.load_state_dict(other)
    assert agent.intrinsic_reward.weight.item() == weight
    agent.load_state_dict({k: v for k, v in other.items() if not k.startswith('_irm.')})  # the part may be missing
    agent.load_state_dict(other, skip_preloded=False)
    assert agent.intrinsic_reward.weight.item() == 1.0


def test_a_checkpoint_argument_that_names_no_part_is_rejected(tmp_path):
    trained, _ = make_agent('actor-critic', 'discrete', intrinsic_reward_module=Listener())
    path = Checkpointer(str(tmp_path), alg=trained).save(1)
    with pytest.raises(ConfError, match="no part 'alg._imr'"):
        make_agent('actor-critic', 'discrete', intrinsic_reward_module=Listener(checkpoint=f'alg._imr@{path}'))


def test_a_loss_without_a_loss_of_each_step_keeps_its_scalar():
    info = Loss(loss_weight=2.0).calc_loss(LossInfo(scalar_loss=torch.tensor(1.5)))
    assert info.loss == () and float(info.scalar_loss) == 3.0


@pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])
def test_everything_that_can_be_summarized_is_summarized(algorithm, monkeypatch):
    from alfx import context
    tags = set()

    class Writer:

        def __getattr__(self, kind):
            return lambda tag, *args, **kwargs: tags.add(tag)

    agent, _ = make_agent(algorithm, 'mixed')
    for name in ('summarize_grads_and_vars', 'summarize_action_distributions'):
        setattr(agent._config, name, True)
    for part in agent.modules():
        if isinstance(part, Algorithm):
            part._debug_summaries = True
    context.set_summary_writer(Writer())
    with context.record_if(True):
        agent.train_iter()
        agent.summarize_metrics()
    context.set_summary_writer(None)
    groups = {tag.split('/')[0] for tag in tags}
    assert {'loss', 'action_dist', 'summarize_grads', 'summarize_vars', 'Metrics', 'rollout_reward'} <= groups
    assert any(tag.startswith('rollout_action') for tag in tags)


@pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])
def test_the_stored_action_may_be_from_another_policy(algorithm):
    agent, env = make_agent(algorithm, 'continuous')
    agent._overwrite_policy_output = True
    step = env.step
    env.step = lambda action: step(torch.full_like(action, 0.25))
    experience = agent.unroll(6)
    assert torch.equal(experience.action[:-2], experience.time_step.prev_action[1:-1])
    assert (experience.action[:4] == 0.25).all()
    assert algorithm == 'actor-critic' or torch.equal(experience.rollout_info.rl.action[:4], experience.action[:4])


def test_a_checkpoint_path_may_contain_an_at_sign(tmp_path):
    from alfx.algorithms.algorithm import _prefix_and_path
    assert _prefix_and_path('alg._irm@/runs/me@home/ckpt-1') == ('alg._irm',
                                                                             '/runs/me@home/ckpt-1')
    file = tmp_path / 'me@home'
    file.write_text('')
    assert _prefix_and_path(str(file)) == ('', str(file))
    assert _prefix_and_path('/runs/ckpt-1') == ('', '/runs/ckpt-1')


@pytest.mark.parametrize('info', [TracInfo(ac=PPOInfo(action=1)), AgentInfo(rl=TracInfo(ac=PPOInfo(action=1)))])
def test_the_executed_action_reaches_the_innermost_rollout_info(info):
    changed = rollout._with_action(info, 2)
    assert (changed.rl if isinstance(info, AgentInfo) else changed).ac.action == 2
    assert rollout._with_action((), 2) == ()


def test_recurrent_ppo_needs_the_states_of_the_rollout():
    with pytest.raises(ConfError, match='use_rollout_state = False is not supported by PPOAlgorithm: its networks are'):
        make_agent('ppo', 'recurrent', use_rollout_state=False)


def test_batch_norm_of_torch_is_rejected_by_ppo():
    spec, action = TensorSpec((3, )), BoundedTensorSpec((2, ))
    with pytest.raises(ValueError, match='BatchNorm and Dropout act differently'):
        PPOAlgorithm(spec, action, loss_class=PPOLoss, actor_network_ctor=partial(
            ActorDistributionNetwork, fc_layer_params=(8, ), use_fc_bn=True))


def test_the_ratio_of_an_unchanged_squashed_policy_is_1():
    def policy():
        normal = dist_utils.DiagMultivariateNormal(torch.full((500, 2), 7.5), torch.ones(500, 2))
        return td.TransformedDistribution(normal, [dist_utils.StableTanh()])

    info = nest.map_structure(torch.clone, PPOAlgorithm._sampled_for_replay(policy()))  # as replay stores it
    assert torch.equal(PPOAlgorithm._rollout_log_prob(info), dist_utils.compute_log_probability(policy(), info.action))


def test_an_environment_of_gymnasium_is_rejected_with_the_conversion():
    spec, action_spec = TensorSpec((4, )), BoundedTensorSpec((), torch.int64, 0, 1)
    with gymnasium.make('CartPole-v1') as env, pytest.raises(TypeError, match=r'found TimeLimit; .*wrap_env'):
        PPOAlgorithm(spec, action_spec, env=env)
