"""Soft actor-critic with categorical critics."""
from functools import partial

import pytest
import torch
from helpers.sac_agents import make_agent, random_steps

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.categorical_sac_algorithm import CategoricalSacAlgorithm
from alfx.algorithms.categorical_td_loss import CategoricalTDLoss
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.algorithms.sac_algorithm import SacInfo
from alfx.data_structures import StepType
from alfx.networks.critic_networks import CriticNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

ATOMS = dict(num_atoms=5, v_min=-2.0, v_max=2.0)
make_agent = partial(make_agent, algorithm_cls=CategoricalSacAlgorithm, **ATOMS)
SPECS = TensorSpec((3, )), BoundedTensorSpec((2, ), torch.float32, -1, 1)
every_environment = pytest.mark.parametrize('environment', ['continuous', 'nested action', 'nested observation',
                                                            'recurrent'])


def spread(algorithm):
    """Move the critics away from uniform distributions."""
    for p in [*algorithm.target_critics.parameters(), *algorithm.critics.parameters()]:
        p.data.add_(0.5 * torch.randn_like(p))


@every_environment
def test_training_changes_every_parameter_and_a_checkpoint_restores_it(environment):
    agent, env = make_agent(environment)
    before = [p.detach().clone() for p in agent.parameters()]
    for _ in range(3):
        agent.train_iter()
    assert not any(torch.equal(a, b) for a, b in zip(before, agent.parameters()))
    other, _ = make_agent(environment, seed=9)
    other.load_state_dict(agent.state_dict())
    state = agent.get_initial_predict_state(4)
    first, second = (a.predict_step(env.current_time_step(), state).output for a in (agent, other))
    assert all(torch.equal(a, b) for a, b in zip(nest.flatten(first), nest.flatten(second)))


def test_train_sequence_trains_as_train_step(monkeypatch):
    algorithm = make_agent()[0].policy
    spread(algorithm)
    steps, action = random_steps(algorithm, 2, 5)
    monkeypatch.setattr(torch, 'randn', lambda shape, **kwargs: torch.full(shape, 0.3))
    losses = [algorithm.calc_loss(train(steps, algorithm.get_initial_train_state(10), SacInfo(action=action)).info).loss
              for train in (algorithm.train_sequence, partial(Algorithm.train_sequence, algorithm))]
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize('joint', [False, True])
def test_the_loss_is_the_divergence_from_a_target_of_slow_loops(joint, monkeypatch):
    args = dict(critic_batches='joint') if joint else {}
    algorithm = make_agent(initial_log_alpha=-1.0, **args)[0].policy
    spread(algorithm)
    steps, action = random_steps(algorithm, 2, 8)
    monkeypatch.setattr(torch, 'randn', lambda shape, **kwargs: torch.full(shape, 0.3))
    info = algorithm.train_sequence(steps, algorithm.get_initial_train_state(16), SacInfo(action=action)).info
    loss = algorithm.calc_loss(info).extra.critic
    atoms, alpha, gamma = [-2.0, -1.0, 0.0, 1.0, 2.0], float(algorithm._log_alpha.detach().exp()), 0.99
    for b in range(8):
        expected = 0.0
        if steps.step_type[0, b] != StepType.LAST:
            later = steps.observation[1, b:b + 1]
            policy = algorithm.actor(later)[0]
            chosen = policy.rsample()
            probs = torch.softmax(algorithm.target_critics((later, chosen))[0][0], -1).double().tolist()
            means = [sum(p * z for p, z in zip(row, atoms)) for row in probs]
            lowest, target = probs[means.index(min(means))], [0.0] * 5
            for p, z in zip(lowest, atoms):
                soft = z - alpha * float(policy.log_prob(chosen).detach())
                moved = float(steps.reward[1, b]) + gamma * float(steps.discount[1, b]) * soft
                moved = min(max(moved, -2.0), 2.0)
                for i, atom in enumerate(atoms):  # the share of an atom falls to 0 at a distance of 1
                    target[i] += p * max(0.0, 1.0 - abs(moved - atom))
            assert sum(target) == pytest.approx(1.0)
            critics = algorithm.critics((steps.observation[0, b:b + 1], action[0, b:b + 1]))[0][0]
            for log_probs in torch.log_softmax(critics, -1).tolist():
                expected += sum(t * (torch.tensor(t).log().item() - q) for t, q in zip(target, log_probs) if t > 0)
        assert loss[0, b].item() == pytest.approx(expected, abs=1e-4, rel=1e-3)


def test_reductions_of_critics_are_those_of_distributions():
    probs = torch.tensor([[[0.5, 0.0, 0.0, 0.0, 0.5], [0.0, 0.5, 0.5, 0.0, 0.0]]])  # means 0 and -0.5
    logits = probs.clamp(min=1e-30).log()
    least = make_agent()[0].policy
    torch.testing.assert_close(least._bootstrap_value(logits), probs[:, 1])
    torch.testing.assert_close(least._actor_value(logits), torch.tensor([-0.5]))
    mean = make_agent(policy_critics='mean', bootstrap_critics='mean')[0].policy
    torch.testing.assert_close(mean._bootstrap_value(logits), torch.tensor([[0.25, 0.25, 0.25, 0.0, 0.25]]))
    torch.testing.assert_close(mean._actor_value(logits), torch.tensor([-0.25]))


@pytest.mark.parametrize('args, message', [
    (dict(v_min=1.0, v_max=1.0), 'v_min < v_max, found num_atoms = 5, v_min = 1.0, v_max = 1.0'),
    (dict(num_atoms=1), 'num_atoms of at least 2'),
    (dict(reward_spec=TensorSpec((2, ))), 'num_atoms requires a scalar reward'),
    (dict(action_spec=BoundedTensorSpec((), torch.int64, 0, 3)), 'supports only continuous actions')])
def test_unsupported_arguments_are_rejected_by_name(args, message):
    arguments = dict(observation_spec=SPECS[0], action_spec=SPECS[1], **ATOMS)
    with pytest.raises(ValueError, match=message):
        CategoricalSacAlgorithm(**{**arguments, **args})


def test_a_critic_with_another_number_of_outputs_is_rejected():
    with pytest.raises(SpecError, match=r'expected an output of shape \(5,\)'):
        CategoricalSacAlgorithm(*SPECS, **ATOMS,
                                critic_network_cls=partial(CriticNetwork, output_tensor_spec=TensorSpec((7, ))))
    with pytest.raises(TypeError, match='v_min'):
        CategoricalSacAlgorithm(*SPECS, **ATOMS, critic_loss_ctor=OneStepTDLoss)


@pytest.mark.slow
def test_the_mean_of_a_recurring_state_is_its_soft_value():
    # one state and reward 1 at every step with gamma 0.5: V = 1 + 0.5 (V + alpha H), for a uniform policy of entropy H
    algorithm = CategoricalSacAlgorithm(
        *SPECS, num_atoms=41, v_min=-5.0, v_max=5.0, initial_log_alpha=-1.0, target_update_tau=0.2,
        critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=(16, )),
        critic_loss_ctor=partial(CategoricalTDLoss, td_lambda=0.0, gamma=0.5))
    steps, action = random_steps(algorithm, 2, 64)
    steps = steps._replace(step_type=torch.ones_like(steps.step_type), reward=torch.ones(2, 64),
                           discount=torch.ones(2, 64), observation=torch.zeros(2, 64, 3))
    optimizer = Adam(lr=1e-2)
    optimizer.add_param_group({'params': list(algorithm.critics.parameters())})
    bonuses = []
    for _ in range(300):
        info = algorithm.train_sequence(steps, algorithm.get_initial_train_state(128), SacInfo(action=action)).info
        optimizer.zero_grad()
        algorithm.calc_loss(info).extra.critic.sum().div(64).backward()
        optimizer.step()
        algorithm.after_update(steps, info)
        bonuses.append(-float(algorithm._log_alpha.detach().exp() * info.log_pi[1].mean()))
    value = algorithm._actor_value(algorithm.critics((steps.observation[0], action[0]))[0]).mean().detach()
    bonus = sum(bonuses[-200:]) / 200
    assert float(value) == pytest.approx((1.0 + 0.5 * bonus) / 0.5, abs=0.1)
