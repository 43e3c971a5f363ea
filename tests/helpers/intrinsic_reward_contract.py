"""Contract tests of all intrinsic reward modules, as a mixin, and time steps to try them on."""
import pytest
import torch
from helpers import agents
from helpers import sac_agents
from helpers.plans import num_graphs

from alfx import nest
from alfx.data_structures import StepType, TimeStep, valid_masks
from alfx.engine.loss_reduction import reduce_loss
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

OBSERVATION = TensorSpec((3, ))
ACTION = BoundedTensorSpec((), torch.int64, 0, 2)


def like(spec, outer, generator):
    """Return random numbers ``[*outer, *spec.shape]`` within the bounds of a spec."""
    if spec.is_discrete:
        low, high = (torch.as_tensor(bound.copy()) for bound in (spec.minimum, spec.maximum))
        uniform = torch.rand(*outer, *spec.shape, generator=generator)
        return (low + (uniform * (high - low + 1)).floor()).to(spec.dtype)
    return torch.randn(*outer, *spec.shape, generator=generator)


def random_steps(*outer, observation_spec=OBSERVATION, action_spec=ACTION, seed=0, step_type=None):
    """Return time steps ``[*outer, ...]`` with random episode boundaries, or with the given ``step_type``."""
    generator = torch.Generator().manual_seed(seed)
    if step_type is None:
        step_type = torch.randint(0, 3, outer, generator=generator)
    return TimeStep(step_type=torch.as_tensor(step_type).to(torch.int32), reward=torch.zeros(outer),
                    discount=torch.ones(outer),
                    observation=nest.map_structure(lambda spec: like(spec, outer, generator), observation_spec),
                    prev_action=nest.map_structure(lambda spec: like(spec, outer, generator), action_spec))


def step_of(sequence, t):
    return nest.map_structure(lambda x: x[t], sequence)


def zero_state(module, batch):
    return module.get_initial_rollout_state(batch)


def reward_steps(module, sequence, state=None):
    """Call ``rollout_step`` for each step of ``[T, B, ...]`` and return the rewards ``[T, B]``."""
    state = zero_state(module, sequence.step_type.shape[1]) if state is None else state
    rewards = []
    for t in range(len(sequence.step_type)):
        step = module.rollout_step(step_of(sequence, t), state)
        state = step.state
        rewards.append(step.output)
    return torch.stack(rewards)


def train_step_by_step(module, sequence, state):
    """Call ``train_step`` for each step and return the infos ``[T, B]``."""
    infos = []
    for t in range(len(sequence.step_type)):
        step = module.train_step(step_of(sequence, t), state, ())
        state = step.state
        infos.append(step.info)
    return nest.stack(infos)


def total_loss(module, info, sequence):
    """Return the minimized loss, summed as in the engine."""
    return reduce_loss(module.calc_loss(info), valid_masks(sequence.step_type))


def buffers(module):
    return {name: x.clone() for name, x in module.named_buffers()}


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


class IntrinsicRewardContract:
    """Mixin for the tests of a module, which define ``make(**arguments)``: a module for vectors of three numbers."""

    @staticmethod
    def make(**arguments):
        raise NotImplementedError

    def module(self, **arguments):
        torch.manual_seed(0)
        return self.make(observation_spec=OBSERVATION, action_spec=ACTION, **arguments)

    def test_the_first_step_of_an_episode_has_no_reward(self):
        module = self.module()
        first, second = random_steps(4, step_type=[0, 0, 1, 2]), random_steps(4, step_type=[1, 0, 2, 0], seed=1)
        step = module.rollout_step(first, zero_state(module, 4))
        assert step.output[:2].tolist() == [0, 0]
        reward = module.rollout_step(second, step.state).output
        assert reward[1] == reward[3] == 0 and reward[0] != 0 and reward[2] != 0

    def test_rewards_have_no_gradient(self):
        module = self.module()
        assert not reward_steps(module, random_steps(3, 4)).requires_grad

    def test_evaluation_changes_no_statistics(self):
        module = self.module()
        reward_steps(module, random_steps(5, 4))
        before = buffers(module)
        step = module.predict_step(random_steps(4, seed=7), module.get_initial_predict_state(4))
        assert step.output.shape == (4, )
        assert all(torch.equal(x, before[name]) for name, x in module.named_buffers())

    def test_training_changes_no_statistics(self):
        module = self.module()
        reward_steps(module, random_steps(5, 4))
        before = buffers(module)
        sequence = random_steps(3, 4, seed=7)
        train_step_by_step(module, sequence, zero_state(module, 4))
        module.train_sequence(sequence, nest.map_structure(lambda x: x.expand(3, *x.shape), zero_state(module, 4)), ())
        assert all(torch.equal(x, before[name]) for name, x in module.named_buffers())

    def test_evaluation_metrics_have_one_number_per_environment(self):
        """Evaluation metrics have one number per environment, and none at first steps."""
        module = self.module()
        state = module.get_initial_predict_state(4)
        state = module.predict_step(random_steps(4, step_type=[1] * 4), state).state
        info = module.predict_step(random_steps(4, step_type=[0, 1, 1, 2]), state).info
        leaves = nest.flatten(info)
        assert leaves and all(x.shape == (4, ) and x.dtype == torch.float32 for x in leaves)
        assert torch.isnan(info.reward).tolist() == [True, False, False, False]

    def test_steps_do_not_change_their_inputs(self):
        module = self.module()
        step, sequence = random_steps(4), random_steps(5, 4)
        state = zero_state(module, 4)
        copies = nest.map_structure(torch.clone, (step, sequence, state))
        module.rollout_step(step, state)
        module.predict_step(step, state)
        module.train_step(step, state, ())
        module.reward_unroll(sequence)
        for old, new in zip(nest.flatten(copies), nest.flatten((step, sequence, state))):
            assert torch.equal(old, new)

    def test_an_unroll_is_rewarded_except_at_first_steps(self):
        """Intrinsic rewards exist for all steps of an unroll except its first step and the first steps of episodes."""
        module = self.module()
        sequence = random_steps(6, 4, seed=3)
        reward = module.reward_unroll(sequence).output
        assert reward.shape == (6, 4) and reward[0].tolist() == [0] * 4
        rewarded = sequence.step_type[1:] != StepType.FIRST
        assert torch.equal(reward[1:] != 0, rewarded)

    def test_a_checkpoint_restores_the_next_reward(self):
        module = self.module()
        reward_steps(module, random_steps(5, 4))
        torch.manual_seed(9)
        other = self.make(observation_spec=OBSERVATION, action_spec=ACTION)
        other.load_state_dict(module.state_dict())
        sequence = random_steps(3, 4, seed=5)
        assert torch.equal(reward_steps(module, sequence), reward_steps(other, sequence))

    def test_an_instance_can_replace_a_constructor(self):
        agent, env = agents.make_agent('actor-critic', 'discrete')
        module = self.make(observation_spec=env.observation_spec(), action_spec=env.action_spec())
        agent, _ = agents.make_agent('actor-critic', 'discrete', intrinsic_reward_module=module)
        agent.train_iter()
        assert agent.intrinsic_reward is module

    @pytest.mark.parametrize('environment', ['discrete', 'continuous', 'mixed', 'nested observation'])
    @pytest.mark.parametrize('algorithm', ['actor-critic', 'ppo'])
    def test_it_trains_with_on_policy_algorithms_the_same_for_the_same_seed(self, algorithm, environment):
        results = []
        for _ in range(2):
            agent, _ = agents.make_agent(algorithm, environment, mini_batch_length=2, mini_batch_size=4,
                                         intrinsic_reward_module=self.constructor(environment))
            before = parameters(agent)
            for _ in range(3):
                agent.train_iter()
            results.append(parameters(agent))
            fixed = {id(p) for name in agent.intrinsic_reward._trainable_attributes_to_ignore()
                     for p in (getattr(agent.intrinsic_reward, name) or torch.nn.Module()).parameters()}
            for (name, p), old, new in zip(agent.named_parameters(), before, parameters(agent)):
                assert torch.equal(old, new) == (id(p) in fixed), name
                assert torch.isfinite(new).all()
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def constructor(self, environment):
        """Return ``make``, or a constructor of a module for the observations of this environment."""
        return self.make

    @pytest.mark.parametrize('environment', ['continuous', 'discrete', 'mixed'])
    def test_it_trains_with_sac_and_its_rewards_enter_the_replay_buffer(self, environment):
        agent, _ = sac_agents.make_agent(environment, agent_args=dict(intrinsic_reward_module=self.make))
        for _ in range(3):
            agent.train_iter()
        experience, _ = agent.replay_buffer.gather_all()
        reward = experience.rollout_info.rewards['irm']
        is_first = experience.time_step.step_type == StepType.FIRST
        assert (reward[is_first] == 0).all() and (reward[~is_first] != 0).any()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_one_environment_and_sequences_of_two_are_enough(self):
        agent, _ = agents.make_agent('actor-critic', 'discrete', batch_size=1, unroll_length=2,
                                     intrinsic_reward_module=self.make)
        for _ in range(4):
            agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_replayed_updates_match_eager_ones(self, warm_up):
        results = []
        for updates_before in (2, 10**6):
            warm_up(updates_before)
            agent, _ = sac_agents.make_agent('continuous', agent_args=dict(intrinsic_reward_module=self.make))
            assert agent.capabilities.traceable_update
            for _ in range(4):
                agent.train_iter()
            assert bool(num_graphs(agent)) == (updates_before == 2)
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_an_agent_trains_on_sequences_as_it_would_step_by_step(self):
        agent, _ = sac_agents.make_agent('continuous', mini_batch_length=3, use_rollout_state=True,
                                         agent_args=dict(intrinsic_reward_module=self.make))
        agent.train_iter()
        batch, _ = agent.replay_buffer.get_batch(6, 3)
        experience = nest.map_structure(lambda x: x.transpose(0, 1), batch)
        at_once = agent.learner.losses.train_info(experience).irm
        agent._config.temporally_independent_train_step = False
        one_by_one = agent.learner.losses.train_info(experience).irm
        for a, b in zip(nest.flatten(at_once), nest.flatten(one_by_one)):
            torch.testing.assert_close(a, b)


def rewarded(module, inputs, sizes=None):
    """Return the rewards of steps that are passed in parts of these sizes."""
    state, rewards = module.get_initial_unroll_state(inputs.step_type.shape[1]), []
    for part in zip(*(x.split(sizes or [len(x)]) for x in nest.flatten(inputs))):
        step = module.reward_steps(nest.pack_sequence_as(inputs, part), state)
        state = step.state
        rewards.append(step.output)
    return torch.cat(rewards)
