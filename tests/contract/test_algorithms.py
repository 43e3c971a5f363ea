"""Properties of every policy algorithm, for every kind of action."""
import pytest
import torch
from helpers.agents import ALGORITHMS, ENVIRONMENTS, make_agent

from alfx import nest
from alfx.algorithms.agent import Agent


def parameters(agent):
    return [p.detach().clone() for p in agent.parameters()]


every_case = pytest.mark.parametrize('environment', list(ENVIRONMENTS))
every_algorithm = pytest.mark.parametrize('algorithm', list(ALGORITHMS))


@every_algorithm
@every_case
class TestAlgorithm:

    def test_training_changes_every_parameter_and_counts_its_samples(self, algorithm, environment):
        agent, env = make_agent(algorithm, environment)
        before = parameters(agent)
        steps = sum(agent.train_iter() for _ in range(3))
        assert steps == 3 * 4 * 6 * (1 if algorithm == 'actor-critic' else 2)
        changed = [not torch.equal(a, b) for a, b in zip(before, parameters(agent))]
        assert all(changed), [n for (n, _), c in zip(agent.named_parameters(), changed) if not c]
        assert agent.get_step_metrics()[0].result() > 0

    def test_same_seed_gives_the_same_parameters(self, algorithm, environment):
        results = []
        for _ in range(2):
            agent, _ = make_agent(algorithm, environment, seed=3)
            for _ in range(3):
                agent.train_iter()
            results.append(parameters(agent))
        assert all(torch.equal(a, b) for a, b in zip(*results))

    def test_steps_do_not_change_their_inputs(self, algorithm, environment):
        agent, env = make_agent(algorithm, environment)
        time_step = env.current_time_step()
        for method, state in ((agent.rollout_step, agent.get_initial_rollout_state(4)),
                              (agent.predict_step, agent.get_initial_predict_state(4))):
            copies = nest.map_structure(torch.clone, (time_step, state))
            method(time_step, state)
            for old, new in zip(nest.flatten(copies), nest.flatten((time_step, state))):
                assert torch.equal(old, new)

    def test_a_checkpoint_restores_the_next_update(self, algorithm, environment):
        agent, _ = make_agent(algorithm, environment)
        agent.train_iter()
        saved = agent.state_dict()
        copy, _ = make_agent(algorithm, environment, seed=9)
        copy.load_state_dict(saved)
        for a, b in zip(parameters(agent), parameters(copy)):
            assert torch.equal(a, b)
        time_step = agent._env.current_time_step()
        state = agent.get_initial_predict_state(4)
        first, second = (a.predict_step(time_step, state).output for a in (agent, copy))
        for a, b in zip(nest.flatten(first), nest.flatten(second)):
            assert torch.equal(a, b)

    def test_one_environment_and_one_step_are_enough(self, algorithm, environment):
        length = 2 if environment == 'recurrent' else 1
        agent, _ = make_agent(algorithm, environment, batch_size=1, unroll_length=length)
        for _ in range(8):
            agent.train_iter()
        assert all(torch.isfinite(p).all() for p in agent.parameters())

    def test_actions_and_states_match_their_specs(self, algorithm, environment):
        agent, env = make_agent(algorithm, environment)
        time_step = env.current_time_step()
        for method, state, spec in (
            (agent.rollout_step, agent.get_initial_rollout_state(4), agent.rollout_state_spec),
            (agent.predict_step, agent.get_initial_predict_state(4), agent.predict_state_spec)):
            step = method(time_step, state)
            for found, expected in ((step.output, agent.action_spec), (step.state, spec)):
                nest.assert_same_structure(expected, found)
                for s, x in zip(nest.flatten(expected), nest.flatten(found)):
                    assert (tuple(x.shape), x.dtype) == ((4, *s.shape), s.dtype)

    def test_the_rollout_resumes_exactly_from_a_saved_state(self, algorithm, environment):
        agent, env = make_agent(algorithm, environment)
        agent.train_iter()
        saved, rollout, random_state, env_state = (agent.state_dict(), agent.learner.state_dict(),
                                                   torch.get_rng_state(), env.get_state())
        saved = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, dict(saved))
        rollout = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, rollout)
        agent.train_iter()
        copy, copy_env = make_agent(algorithm, environment, seed=5)
        copy_env.set_state(env_state)
        copy.load_state_dict(saved)
        copy.learner.load_state_dict(rollout)
        torch.set_rng_state(random_state)
        copy.train_iter()
        assert all(torch.equal(a, b) for a, b in zip(parameters(agent), parameters(copy)))


@every_algorithm
@pytest.mark.parametrize('environment', ['discrete', 'continuous', 'mixed', 'nested observation', 'vector reward'])
def test_infos_recomputed_at_once_train_as_infos_of_the_rollout(algorithm, environment, with_capabilities):
    def train(recompute):
        if not recompute:
            with_capabilities(Agent, recomputes_rollout_info=False)
        # With one minibatch per epoch and no shuffling, both variants draw the same random numbers.
        agent, _ = make_agent(algorithm, environment, seed=1, mini_batch_size=24)
        assert agent.capabilities.recomputes_rollout_info == recompute
        agent.train_iter()
        return parameters(agent)

    for a, b in zip(train(True), train(False)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_the_loss_of_an_episode_does_not_depend_on_the_next_one():
    agent, _ = make_agent('actor-critic', 'discrete')  # episodes of 5 steps; unrolls of 6 and a bootstrap step
    experience = agent.unroll(6)
    assert experience.time_step.is_last()[4].all()
    time_step = experience.time_step
    later = torch.zeros(7, 4, dtype=torch.bool)
    later[5:] = True
    changed = time_step._replace(reward=time_step.reward + 100. * later,
                                 observation=time_step.observation - 100. * later.unsqueeze(-1))
    losses = [agent.calc_loss(agent.learner.losses.train_info(experience._replace(time_step=ts))).loss
              for ts in (time_step, changed)]
    assert torch.equal(losses[0][:5], losses[1][:5])
    assert not torch.equal(losses[0][5], losses[1][5])


@every_algorithm
def test_the_last_transition_of_an_unroll_is_trained_on_and_bootstrapped(algorithm):
    agent, _ = make_agent(algorithm, 'discrete')
    experience = agent.unroll(6)
    assert experience.time_step.step_type.shape == (7, 4)
    second = agent.unroll(6)
    assert torch.equal(experience.time_step.observation[6], second.time_step.observation[0])


def test_a_fractional_unroll_length_has_the_right_mean():
    agent, _ = make_agent('actor-critic', 'discrete', unroll_length=1.5)
    assert [agent.train_iter() for _ in range(6)] == [4, 8, 4, 8, 4, 8]  # steps in four environments


def test_extrinsic_return_is_reported_untransformed():
    from alfx.algorithms.data_transformer import RewardScaling
    plain, _ = make_agent('ppo', 'discrete')
    scaled, _ = make_agent('ppo', 'discrete',
                           data_transformer=lambda env: RewardScaling(0.1, observation_spec=env.observation_spec()))
    for agent in (plain, scaled):
        torch.manual_seed(0)
        for _ in range(2):
            agent.unroll(6)
            agent._replay_buffer.clear()
    assert plain.get_metrics()[2].result() == scaled.get_metrics()[2].result() != 0
