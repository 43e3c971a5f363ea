"""No algorithm with discrete actions takes an action that the environment does not allow."""
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from alfx import context, nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.agent import Agent
from alfx.algorithms.bc_algorithm import BcAlgorithm
from alfx.algorithms.bootstrapped_algorithm import Rows
from alfx.algorithms.composition.policy_loss_addons import AttractionToPolicy
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.cql_algorithm import DiscreteCqlAlgorithm
from alfx.algorithms.data_transformer import ActionMask, FrameStacker, create_data_transformer
from alfx.algorithms.ddpg_algorithm import DdpgAlgorithm
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.encoding_algorithm import EncodingAlgorithm
from alfx.algorithms.impala_algorithm import ImpalaAlgorithm
from alfx.algorithms.mpo_algorithm import MpoAlgorithm
from alfx.algorithms.ppg_algorithm import PPGAlgorithm, PPGAuxOptions
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.q_learning_algorithm import QLearningAlgorithm, learn
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.trac_algorithm import TracAlgorithm
from alfx.data_structures import StepType, restart
from alfx.environments.suite_gym import wrap_env
from alfx.environments.vector_env import SerialVectorEnv
from alfx.gin_utils import ConfError
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.q_networks import QNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.offline import recorder
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.discrete_action import DiscreteAction, EpsilonZGreedy, LongExplorationState, random_valid

COUNT, LOWEST = 5, 3  # actions 3 .. 7


class Allowed(gymnasium.Env):
    """An environment that masks invalid actions and raises for them; no action is valid at the end of an episode."""

    kind = 'discrete'

    def __init__(self):
        one = gymnasium.spaces.Discrete(COUNT, start=LOWEST)
        self.action_space = {'discrete': one, 'several': gymnasium.spaces.MultiDiscrete([COUNT, COUNT]),
                             'mixed': gymnasium.spaces.Tuple((one, gymnasium.spaces.Box(-1, 1, (1, ))))}[self.kind]
        self._shape = (2, COUNT) if self.kind == 'several' else (COUNT, )
        self.observation_space = gymnasium.spaces.Dict({
            'seen': gymnasium.spaces.Box(-1, 1, (3, )),
            'valid_action_mask': gymnasium.spaces.MultiBinary(self._shape)})

    def _observe(self, is_over=False):
        mask = self.np_random.integers(0, 2, self._shape)
        mask[..., self.np_random.integers(COUNT)] = 1
        self.mask = mask * (not is_over)
        seen = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return {'seen': seen, 'valid_action_mask': self.mask.astype(np.int8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        action = np.asarray(action[0] if self.kind == 'mixed' else action)
        index = action if self.kind == 'several' else action - LOWEST
        allowed = self.mask[np.arange(2), index] if self.kind == 'several' else self.mask[index]
        assert np.all(allowed), f'{action} is not in {self.mask}'
        self._steps += 1
        is_over = self._steps == 7
        return self._observe(is_over), float(np.sum(index)), is_over, False, {}


class Several(Allowed):
    kind = 'several'


class Mixed(Allowed):
    kind = 'mixed'


LAYERS = dict(fc_layer_params=(8, ))
ACTOR, VALUE, Q = (partial(network, **LAYERS) for network in (ActorDistributionNetwork, ValueNetwork, QNetwork))
NETWORKS = dict(actor_network_ctor=ACTOR, value_network_ctor=VALUE)
REPLAY = dict(whole_replay_buffer_training=False, clear_replay_buffer=False, mini_batch_length=2,
              initial_collect_steps=8)
MIXED_Q = partial(QNetwork, input_preprocessors=None, preprocessing_combiner=NestConcat(), **LAYERS)
PPG = partial(PPGAlgorithm, encoding_network_ctor=partial(EncodingNetwork, **LAYERS), loss_class=partial(
    PPOLoss, entropy_regularization=0.1), aux_options=PPGAuxOptions(interval=1, mini_batch_length=1))
CASES = {  # name: environment, algorithm, settings
    'actor-critic': (Allowed, partial(ActorCriticAlgorithm, **NETWORKS), {}),
    'actor-critic, several': (Several, partial(ActorCriticAlgorithm, **NETWORKS), {}),
    'actor-critic, mixed': (Mixed, partial(ActorCriticAlgorithm, **NETWORKS), {}),
    'ppo': (Allowed, partial(PPOAlgorithm, loss_class=partial(PPOLoss, entropy_regularization=0.1), **NETWORKS), {}),
    'ppg': (Allowed, PPG, {}),
    'impala': (Allowed, partial(ImpalaAlgorithm, **NETWORKS), {'mini_batch_length': 4}),
    'trac': (Allowed, partial(TracAlgorithm, ac_algorithm_cls=partial(ActorCriticAlgorithm, **NETWORKS)), {}),
    'sac': (Allowed, partial(SacAlgorithm, q_network_cls=Q), REPLAY),
    'sac, random at first': (Allowed, partial(SacAlgorithm, q_network_cls=Q, reproduce_locomotion=True), REPLAY),
    'sac, mixed': (Mixed, partial(SacAlgorithm, actor_network_cls=ACTOR, q_network_cls=MIXED_Q), REPLAY),
    'dqn': (Allowed, partial(DqnAlgorithm, q_network_cls=Q, rollout_epsilon_greedy=0.5), REPLAY),
    'dqn, of one network': (Allowed, partial(DqnAlgorithm, q_network_cls=Q, target_net_target_action=True), REPLAY),
    'dqn, long exploration': (Allowed, partial(DqnAlgorithm, q_network_cls=Q, rollout_epsilon_greedy=0.5,
                                               exploration_length_exponent=1.5), REPLAY),
    'rainbow': (Allowed, partial(DqnAlgorithm, q_network_cls=Q, num_atoms=11, v_min=-1., v_max=1.,
                                 random_initial_collection=True), REPLAY),
    'discrete cql': (Allowed, partial(DiscreteCqlAlgorithm, q_network_cls=Q, rollout_epsilon_greedy=0.5), REPLAY),
    'mpo': (Allowed, partial(MpoAlgorithm, actor_network_cls=ACTOR, q_network_cls=Q, actor_optimizer=Adam(lr=1e-2),
                             mstep_iterations=2), REPLAY),
    'q-learning': (Allowed, partial(QLearningAlgorithm, grid_size=3), {}),
}
every_case = pytest.mark.parametrize('name', CASES)


def make_env(cls, batch_size=4):
    env = wrap_env(SerialVectorEnv([cls] * batch_size))
    env.seed(1)
    env.reset()
    return env


def make(name, transformers=(ActionMask, ), **arguments):
    cls, algorithm, settings = CASES[name]
    torch.manual_seed(0)
    context.reset()
    env = make_env(cls)
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=8, mini_batch_size=8,
                           **{'mini_batch_length': 1, 'num_updates_per_train_iter': 2, **settings})
    config.data_transformer = create_data_transformer(list(transformers), env.observation_spec())
    agent = Agent(config.data_transformer.transformed_observation_spec, env.action_spec(), env.reward_spec(), env=env,
                  config=config, rl_algorithm_cls=algorithm, optimizer=Adam(lr=1e-2), **arguments)
    agent.set_path('')
    agent.finalize()
    return agent, env


def masks(agent, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 2, COUNT) if isinstance(agent.action_spec, BoundedTensorSpec) and agent.action_spec.ndim else (
        count, COUNT)
    mask = torch.rand(shape, generator=generator) < 0.4
    return mask | torch.nn.functional.one_hot(torch.randint(COUNT, shape[:-1], generator=generator), COUNT).bool()


def random_step(agent, count=10000):
    """Return a time step with random observations and masks."""
    inputs = restart(torch.rand(count, 3) * 2 - 1, agent.action_spec)
    return inputs._replace(action_mask=masks(agent, count), step_type=torch.full((count, ), StepType.MID,
                                                                                 dtype=torch.int32))


def is_allowed(agent, action, mask):
    action = nest.flatten(action)[0].long()
    index = action if action.ndim == 2 else action - LOWEST
    return mask.gather(-1, index.unsqueeze(-1)).squeeze(-1)


@every_case
def test_training_takes_only_valid_actions_and_has_finite_losses(name):
    agent, _ = make(name)  # the environment raises for every other action
    for _ in range(8):
        agent.train_iter()
    assert agent.get_step_metrics()[0].result() == 8 * 7 * 4  # one step in eight is the first of an episode
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_attraction_to_another_policy_supports_masks():
    agent, _ = make('ppo', policy_loss_addons=[partial(AttractionToPolicy, actor_network_ctor=ACTOR)])
    for _ in range(2):
        agent.train_iter()
    assert all(torch.isfinite(p).all() for p in agent.parameters())


@every_case
def test_in_ten_thousand_states_no_invalid_action_is_taken(name):
    agent, _ = make(name)
    for _ in range(3):
        agent.train_iter()
    inputs = random_step(agent)
    count = len(inputs.step_type)
    agent.policy.set_epsilon_greedy(0.3)
    with torch.no_grad():
        with context.rollout_context():
            step = agent.rollout_step(inputs, agent.get_initial_rollout_state(count))
            assert is_allowed(agent, step.output, inputs.action_mask).all()
        with context.eval_context():
            step = agent.predict_step(inputs, agent.get_initial_predict_state(count))
            assert is_allowed(agent, step.output, inputs.action_mask).all()


def test_a_cloned_policy_takes_only_valid_actions():
    bc = BcAlgorithm(TensorSpec((3, )), BoundedTensorSpec((), torch.int64, LOWEST, LOWEST + COUNT - 1),
                     actor_network_cls=ACTOR, epsilon_greedy=0.3)
    inputs, state = random_step(bc), bc.get_initial_rollout_state(10000)
    with torch.no_grad():
        for step in (bc.rollout_step(inputs, state), bc.predict_step(inputs, state)):
            assert is_allowed(bc, step.output, inputs.action_mask).all()
    assert bc.supports_action_mask


@pytest.mark.parametrize('cls', [Allowed, Several, Mixed])
def test_recorded_random_actions_cover_all_valid_ones_and_no_other(cls):
    env = make_env(cls)
    masks = recorder.action_masks(ActionMask(env.observation_spec()), 4)
    action = recorder.record(env, recorder.random_policy(env.action_spec(), 4, masks), 300).action
    discrete = next(x for x in action.values() if x.dtype.kind == 'i')
    assert set(np.unique(discrete)) == set(range(COUNT) if cls is Several else range(LOWEST, LOWEST + COUNT))
    env.close()


def test_the_best_action_is_the_best_of_the_valid_ones():
    agent, _ = make('dqn')
    inputs = random_step(agent, 500)
    values = agent.policy._q_values(inputs.observation, ())[0].tolist()
    best = [max((v, -i) for i, v in enumerate(row) if m[i])[1] for row, m in zip(values, inputs.action_mask)]
    found = agent.predict_step(inputs, agent.get_initial_predict_state(500)).output
    assert (found - LOWEST).tolist() == [-i for i in best]


@pytest.mark.parametrize('name', ['dqn', 'dqn, of one network', 'sac', 'mpo'])
def test_a_target_does_not_depend_on_the_values_of_invalid_actions(name):
    agent, _ = make(name)
    algorithm, row = agent.policy, random_step(agent, 50)
    target_networks = algorithm.target_critics
    values = torch.rand(50, COUNT)
    results = []
    for offset in (0.0, 100.0):
        outputs = torch.where(row.action_mask, values, values + offset)

        class Network(torch.nn.Module):
            is_rnn, state_spec = False, ()

            def forward(self, observation, state=(), outputs=outputs):
                return outputs.unsqueeze(1).expand(-1, 2, -1), ()

        algorithm._target_critic_networks = Network()
        if not name.startswith('mpo'):
            algorithm._critic_networks = Network()
        rollout_info = type('Info', (), {'action': row.action_mask.long().argmax(-1) + LOWEST})()
        rows = Rows((row, rollout_info))
        policy, _, state = algorithm.policy_terms(rows, algorithm.get_initial_train_state(50))
        results.append(nest.flatten(algorithm.bootstrap_values(rows, policy, state)[0])[-1])
    algorithm._target_critic_networks = target_networks
    torch.testing.assert_close(results[0], results[1])


def test_entropies_cover_valid_actions_only():
    logits = torch.zeros(2, COUNT)
    mask = torch.tensor([[True, True, False, False, False], [True] * 5])
    masked = dist_utils.mask_actions(dist_utils.Categorical(logits=logits), mask)
    torch.testing.assert_close(masked.entropy(), torch.tensor([2.0, 5.0]).log())


def test_networks_see_the_mask_only_on_request():
    plain, env = make('ppo')
    assert plain.observation_spec == env.observation_spec()['seen']
    keeping = ActionMask(env.observation_spec(), keep=True)
    assert keeping.transformed_observation_spec == {'seen': env.observation_spec()['seen'],
                                                    'valid_action_mask': TensorSpec((COUNT, ))}
    transformed, _ = keeping.transform_timestep(env.current_time_step(), torch.zeros(4, dtype=torch.int64))
    mask = env.current_time_step().observation['valid_action_mask'].bool()
    assert torch.equal(transformed.observation['valid_action_mask'], mask.float())
    assert torch.equal(transformed.action_mask, mask)


def test_an_action_mask_passes_a_representation_unchanged():
    encoder = partial(EncodingAlgorithm, encoder_cls=partial(EncodingNetwork, **LAYERS))
    agent, _ = make('ppo', representation_learner_cls=encoder)
    for _ in range(4):
        agent.train_iter()


def test_action_masks_work_with_frame_stacks():
    agent, _ = make('dqn', transformers=(partial(FrameStacker, stack_size=2, fields=['seen']), ActionMask))
    for _ in range(6):
        agent.train_iter()
    assert agent.observation_spec.shape == (6, )


def test_a_state_without_valid_actions_raises():
    """Raise an error that names the environment and the step if a state has no valid action."""
    env = make_env(Allowed)
    transformer = ActionMask(env.observation_spec())
    time_step = env.current_time_step()
    time_step.observation['valid_action_mask'][2] = 0
    state = torch.tensor([9, 9, 9, 9])
    with pytest.raises(ValueError, match="'valid_action_mask' leaves no valid action in environment 2 at step 0 "):
        transformer.transform_timestep(time_step, state)
    middle = time_step._replace(step_type=torch.full((4, ), StepType.MID, dtype=torch.int32))
    with pytest.raises(ValueError, match='environment 2 at step 9 of its episode'):
        transformer.transform_timestep(middle, state)
    last = time_step._replace(step_type=torch.full((4, ), StepType.LAST, dtype=torch.int32))
    transformed, steps = transformer.transform_timestep(last, state)
    assert transformed.action_mask[2].all() and steps.tolist() == [10] * 4
    assert torch.equal(transformed.action_mask[0], time_step.observation['valid_action_mask'][0].bool())


def test_an_algorithm_of_continuous_actions_is_rejected():
    CASES['ddpg'] = (Allowed, partial(DdpgAlgorithm, actor_network_ctor=partial(ActorNetwork, **LAYERS),
                                      critic_network_ctor=partial(CriticNetwork, joint_fc_layer_params=(8, ))), REPLAY)
    try:
        with pytest.raises((ConfError, SpecError)):
            make('ddpg')
    finally:
        del CASES['ddpg']


def test_an_algorithm_without_mask_support_is_rejected_by_name(monkeypatch):
    monkeypatch.setattr(PPOAlgorithm, 'supports_action_mask', False)
    with pytest.raises(ConfError, match='PPOAlgorithm would take actions that are not valid'):
        make('ppo')


@pytest.mark.parametrize('field, message', [('masks', 'masks'), ('seen.x', 'seen')])
def test_an_unknown_field_is_named_with_the_available_ones(field, message):
    spec = make_env(Allowed).observation_spec()
    with pytest.raises(SpecError, match=f'(?s){message}.*valid_action_mask'):
        ActionMask(spec, field=field)


def test_a_mask_of_another_size_is_rejected():
    dist = dist_utils.Categorical(logits=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r'shape \(2, 5\); expected the shape of the logits, \(2, 3\)'):
        dist_utils.mask_actions(dist, torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match='found 1 action masks for 2 discrete actions'):
        dist_utils.mask_actions({'a': dist, 'b': dist}, torch.ones(2, 3, dtype=torch.bool))


def test_random_valid_actions_are_uniform():
    torch.manual_seed(0)
    mask = torch.tensor([[False, True, True, False, True]]).expand(30000, 5)
    shares = torch.bincount(random_valid(mask), minlength=5) / 30000
    torch.testing.assert_close(shares, torch.tensor([0, 1 / 3, 1 / 3, 0, 1 / 3]), atol=0.015, rtol=0)


def test_a_run_of_random_actions_ends_where_its_action_is_not_valid():
    action = DiscreteAction(BoundedTensorSpec((), torch.int64, 0, 2), 'test')
    explore = EpsilonZGreedy(action, 2.0, 'test')
    state = LongExplorationState(torch.tensor([5, 5]), torch.tensor([1, 1]))
    mask = torch.tensor([[True, False, True], [True, True, True]])
    new_action, state = explore(torch.tensor([0, 0]), 0.0, state, mask)
    assert new_action.tolist() == [0, 1] and state.steps_left.tolist() == [0, 4]


def test_a_table_learns_from_the_best_valid_action():
    table = torch.tensor([[0.0, 0.0], [5.0, 9.0]])
    learn(table, torch.tensor([0]), torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.9]), torch.tensor([1]), 1.0,
          torch.tensor([[True, False]]))
    assert table[0, 0].item() == pytest.approx(1 + 0.9 * 5)
