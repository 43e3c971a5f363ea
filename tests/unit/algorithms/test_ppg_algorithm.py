"""Phasic policy gradient: the schedule of phases, their training data, and the parameters they do not change."""
from functools import partial

import pytest
import torch
from helpers.agents import make_agent, ppg
from helpers.plans import warnings_in

from alfx import context, nest
from alfx.algorithms.data_transformer import ObservationNormalizer
from alfx.algorithms.ppg_algorithm import PPGAuxOptions
from alfx.algorithms.ppg_loss import PPGAuxPhaseLoss
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.data_structures import StepType
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.optimizers import SGD, Adam
from alfx.utils import dist_utils


def make(environment='discrete', aux_learning_rate=None, kl_weight=1.0, interval=3, length=2, batch=4, epochs=2,
         loss_class=None, **kwargs):
    """Return an agent with auxiliary phases."""
    algorithm = partial(
        ppg, partial(ActorDistributionNetwork, fc_layer_params=(16, )), partial(ValueNetwork, fc_layer_params=(16, )),
        aux_options=PPGAuxOptions(interval=interval, mini_batch_length=length, mini_batch_size=batch,
                                  num_updates_per_train_iter=epochs),
        aux_optimizer=None if aux_learning_rate is None else SGD(lr=aux_learning_rate),
        aux_loss_class=partial(PPGAuxPhaseLoss, policy_kl_loss_weight=kl_weight))
    if loss_class is not None:
        algorithm = partial(algorithm, loss_class=loss_class)
    agent, _ = make_agent('ppg', environment, rl_algorithm_cls=algorithm, **kwargs)
    return agent


def watched(agent):
    """Return a list that collects infos and references of all further losses of auxiliary phases."""
    seen, plain = [], agent.calc_auxiliary_loss

    def calc_auxiliary_loss(info, reference):
        seen.append(nest.map_structure(torch.Tensor.detach, (info, reference)))
        return plain(info, reference)

    agent.calc_auxiliary_loss = calc_auxiliary_loss
    return seen


def test_phases_have_targets_if_the_loss_computes_its_own_advantages():
    seen = {}
    for inside in (False, True):
        agent = make(interval=2, loss_class=partial(PPOLoss, compute_advantages_internally=inside),
                     mini_batch_length=3)
        infos = watched(agent)
        for _ in range(2):
            agent.train_iter()
        seen[inside] = [info.rl.returns for info, _ in infos]
    assert len(seen[True]) == len(seen[False]) > 0
    assert all(x.abs().sum() > 0 and x.shape == y.shape for x, y in zip(seen[True], seen[False]))


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


def test_a_phase_comes_every_interval_and_covers_all_steps_since_the_last():
    agent = make(interval=3, length=2, batch=4, epochs=2)  # unrolls of 6 steps in 4 environments
    seen, counts = watched(agent), []
    for _ in range(6):
        agent.train_iter()
        counts.append(len(seen))
    assert counts == [0, 0, 18, 18, 18, 36]  # 3 * 6 * 4 / 2 sequences make 9 minibatches; 2 epochs
    assert {tuple(info.rl.value.shape) for info, _ in seen} == {(2, 4)}


def test_an_epoch_has_each_step_once_with_the_target_of_its_iteration():
    agent = make(interval=2, epochs=1)
    seen, targets = watched(agent), []
    process = agent.preprocess_experience

    def preprocess_experience(*args):
        inputs, info = process(*args)
        targets.append(info.rl.returns[:, :-1].flatten())
        return inputs, info

    agent.preprocess_experience = preprocess_experience
    for _ in range(2):
        agent.train_iter()
    found = torch.cat([info.rl.returns.flatten() for info, _ in seen])
    assert torch.equal(found.sort().values, torch.cat(targets).sort().values)


def test_the_policy_is_compared_with_the_one_before_the_phase():
    """Measure the divergence from the policy just before the phase, not from the policy of the rollout."""
    agent = make(interval=3, batch=36, epochs=1)  # one minibatch, computed before any update
    seen = watched(agent)
    for _ in range(3):
        agent.train_iter()
    (info, reference), = seen
    assert torch.equal(info.rl.action_distribution.logits, reference.logits)
    rollout = info.rl.rollout_action_distribution.logits
    assert float((rollout - reference.logits).abs().max()) > 1e-3


def test_a_phase_improves_values_and_its_weight_holds_the_policy():
    def phase(kl_weight):
        agent = make(interval=2, aux_learning_rate=0.05, kl_weight=kl_weight, batch=24, epochs=40)
        seen = watched(agent)
        for _ in range(2):
            agent.train_iter()
        kl = dist_utils.compute_kl(seen[-1][1], seen[-1][0].rl.action_distribution)
        return seen[0][0].rl, seen[-1][0].rl, float(kl.mean())

    def error(info, name):
        return float((getattr(info, name) - info.returns)[info.step_type != StepType.LAST].square().mean())

    first, last, kl = phase(kl_weight=3.0)
    for name in ('aux_value', 'value'):
        assert error(last, name) < error(first, name), name
    assert kl < 1e-4 and kl < 0.1 * phase(kl_weight=0.0)[-1]


def test_iterations_skip_the_auxiliary_value_and_phases_train_everything():
    agent = make(interval=2)
    networks = agent.policy
    head = networks.actor._value_head
    before = parameters(head)
    agent.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(head)))
    all_parameters = parameters(networks)
    agent.learner.phase._stored.num_iterations = 2
    agent.learner.phase.run_if_due()
    changed = [not torch.equal(a, b) for a, b in zip(all_parameters, parameters(networks))]
    assert all(changed)


@pytest.mark.parametrize('is_phase', [False, True])
def test_each_optimizer_makes_the_steps_of_its_own_updates_only(is_phase):
    agent = make(interval=2, aux_learning_rate=0.01)
    steps = {'policy': 0, 'auxiliary': 0}
    optimizers = {'policy': agent.default_optimizer, 'auxiliary': agent.policy.auxiliary_optimizer}
    for name, optimizer in optimizers.items():
        def step(*args, name=name, plain=optimizer.step, **kwargs):
            steps[name] += 1
            return plain(*args, **kwargs)
        optimizer.step = step
    agent.train_iter()
    if is_phase:
        agent.learner.phase._stored.num_iterations = 2
        agent.learner.phase.run_if_due()
    assert steps['policy'] == 6 and (steps['auxiliary'] == 6) == is_phase  # 24 steps by 8, or 12 sequences by 4; twice


def test_the_optimizer_of_the_phase_is_part_of_checkpoints():
    agent, copy = make(interval=1, aux_learning_rate=Adam().defaults['lr']), make(interval=1, aux_learning_rate=0.5)
    agent.train_iter()
    copy.load_state_dict(agent.state_dict())
    assert copy.policy.auxiliary_optimizer.param_groups[0]['lr'] == Adam().defaults['lr']


def test_observation_statistics_are_frozen_in_a_phase():
    agent = make(interval=2, data_transformer=lambda env: ObservationNormalizer(env.observation_spec()))
    agent.train_iter()
    statistics = [b.clone() for b in agent.data_transformer.buffers()]
    agent.learner.phase._stored.num_iterations = 2
    agent.learner.phase.run_if_due()
    assert all(torch.equal(a, b) for a, b in zip(statistics, agent.data_transformer.buffers()))


def test_resuming_in_the_middle_of_an_interval_is_exact():
    def later(resumes):
        agent = make(interval=3)
        agent.train_iter()
        if resumes:
            saved = nest.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x,
                                       (dict(agent.state_dict()), agent.learner.state_dict()))
            env_state, random_state = agent.environment.get_state(), torch.get_rng_state()
            agent = make(interval=3)
            agent.environment.set_state(env_state)
            agent.load_state_dict(saved[0])
            agent.learner.load_state_dict(saved[1])
            torch.set_rng_state(random_state)
        for _ in range(3):
            agent.train_iter()
        return parameters(agent)

    assert all(torch.equal(a, b) for a, b in zip(later(False), later(True)))


@pytest.mark.slow
def test_a_phase_is_replayed_exactly_and_compiled_up_to_rounding(warm_up, caplog):
    def after_phase(count, compiles):
        warm_up(count)
        torch.manual_seed(0)
        agent = make(interval=2, epochs=3)
        agent.train_iter()
        agent.updater.compiles = compiles  # set late: updates of the iterations already have a plan
        agent.train_iter()
        return agent

    stepwise, played, compiled = after_phase(10**9, False), after_phase(1, False), after_phase(1, True)
    assert played.learner.phase.plan.replayed.num_graphs == compiled.learner.phase.plan.compiled.num_graphs == 1
    assert all(torch.equal(a, b) for a, b in zip(parameters(stepwise), parameters(played)))
    for a, b in zip(parameters(stepwise), parameters(compiled)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert not warnings_in(caplog)


def test_without_its_phase_it_is_ppo():
    agent, _ = make_agent('ppg', 'discrete', rl_algorithm_cls=partial(
        ppg, partial(ActorDistributionNetwork, fc_layer_params=(16, )), partial(ValueNetwork, fc_layer_params=(16, )),
        loss_class=PPOLoss, aux_options=PPGAuxOptions(enabled=False)))
    plain, _ = make_agent('ppo', 'discrete')
    policy, value = plain.policy.actor, plain.policy._value_network
    own = agent.policy
    policy.load_state_dict({k: v for k, v in own.actor.state_dict().items() if '_value_head' not in k})
    value.load_state_dict(own._value_network.state_dict())
    plain.policy._loss = own._loss
    for one in (agent, plain):
        torch.manual_seed(5)
        context.reset()
        for _ in range(3):
            one.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), own.actor.parameters()))
    assert agent.learner.phase is None


def test_a_conf_that_samples_is_rejected():
    with pytest.raises(ConfError, match='clear_replay_buffer.*each unroll as a whole'):
        make(config_args={'clear_replay_buffer': False})


@pytest.mark.parametrize('wrong', [{'interval': 0}, {'mini_batch_size': 0.5}, {'mini_batch_length': 0},
                                   {'num_updates_per_train_iter': 0}, {'enabled': 'yes'}])
def test_options_out_of_range_are_rejected_by_name(wrong):
    with pytest.raises(ConfError, match=f'PPGAuxOptions.{next(iter(wrong))}'):
        PPGAuxOptions(**wrong)


def test_an_outer_algorithm_without_phases_is_rejected():
    from alfx.algorithms.rl_algorithm import RLAlgorithm

    agent = make()

    class Around(RLAlgorithm):
        @property
        def policy_algorithm(self):
            return agent.policy

    with pytest.raises(ConfError, match='PPGAlgorithm would have no auxiliary phase'):
        outer = Around(agent.observation_spec, agent.action_spec, (), is_on_policy=False, config=agent._config)
        outer._prepare_auxiliary_phase()


def test_the_defaults_match_the_paper():
    assert PPGAuxOptions() == PPGAuxOptions(enabled=True, interval=32, mini_batch_length=None, mini_batch_size=8,
                                            num_updates_per_train_iter=6)
