"""Reduction of losses, the gradient update, and what happens when a loss is not finite."""
from functools import partial
from unittest import mock

import pytest
import torch
from helpers import agents
from torch import nn

from alfx import context
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm, Loss
from alfx.algorithms.base.ownership import OwnershipError
from alfx.algorithms.config import TrainerConfig
from alfx.data_structures import BatchInfo, LossInfo, StepType, valid_masks
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.engine.loss_reduction import masked_loss, masked_means, reduce_loss
from alfx.environments.suite_unittest import PolicyUnittestEnv
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.optimizers import SGD, Adam
from alfx.tensor_specs import SpecError


class Linear(Algorithm):
    """One weight that is multiplied with the loss."""

    def __init__(self, name='linear', **kwargs):
        super().__init__(name=name, **kwargs)
        self.weight = nn.Parameter(torch.ones(()))

    def calc_loss(self, info):
        return LossInfo(loss=self.weight * info, extra={'weighted': self.weight * info})


def test_masked_loss_is_averaged_over_all_steps():
    # (1 + 3) / 4 steps, of which two are masked
    loss = LossInfo(loss=torch.tensor([[1., 2.], [3., 4.]]))
    masks = torch.tensor([[1., 0.], [1., 0.]])
    assert reduce_loss(loss, masks).item() == 1.0


def test_weights_multiply_importance_weights_and_scalar_losses_are_added():
    # (1 * 2 + 3 * 2 + 2 * 1 + 4 * 1) / 4 = 3.5, plus 10, times 0.5
    loss = LossInfo(loss=torch.tensor([[1., 2.], [3., 4.]]), scalar_loss=torch.tensor(10.))
    assert reduce_loss(loss, None, 0.5, torch.tensor([2., 1.])).item() == 6.75


def test_a_loss_of_the_wrong_shape_is_rejected_with_both_shapes():
    with pytest.raises(ValueError, match=r'\[T, B\] = \[2, 2\], found \[2, 2, 3\]'):
        reduce_loss(LossInfo(loss=torch.zeros(2, 2, 3)), torch.ones(2, 2))


def test_a_mean_instead_of_losses_of_steps_is_rejected_with_advice():
    with pytest.raises(ValueError, match=r'\[2, 2\], found \[\]; return one loss per step, or a scalar as scalar_loss'):
        reduce_loss(LossInfo(loss=torch.zeros(())), torch.ones(2, 2))


class ReturningTensor(ActorCriticAlgorithm):
    """An algorithm that returns its losses without a LossInfo."""

    def calc_loss(self, info):
        return super().calc_loss(info).loss


class ReturningAction(ActorCriticAlgorithm):
    """An algorithm that returns an action without an AlgStep."""

    def rollout_step(self, inputs, state):
        return super().rollout_step(inputs, state).output


class ReturningText(ActorCriticAlgorithm):
    """An algorithm with text in its info."""

    def rollout_step(self, inputs, state):
        step = super().rollout_step(inputs, state)
        return step._replace(info={'policy': step.info, 'name': 'best'})


class ReturningNumber(ActorCriticAlgorithm):
    """An algorithm whose action is a number."""

    def rollout_step(self, inputs, state):
        return super().rollout_step(inputs, state)._replace(output=1)


class Detached(ActorCriticAlgorithm):
    """An algorithm whose losses have no gradient."""

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info._replace(loss=loss_info.loss.detach())


def make(cls):
    """Return an actor-critic algorithm of a class as the root of a run."""
    env = PolicyUnittestEnv(batch_size=4, episode_length=5)
    env.reset()
    layers = dict(fc_layer_params=(8, ))
    algorithm = cls(env.observation_spec(), env.action_spec(), env.reward_spec(), loss_class=ActorCriticLoss, env=env,
                    actor_network_ctor=partial(ActorDistributionNetwork, **layers), optimizer=Adam(lr=1e-2),
                    value_network_ctor=partial(ValueNetwork, **layers),
                    config=TrainerConfig(root_dir='', algorithm_ctor=cls, unroll_length=6, mini_batch_size=8))
    algorithm.set_path('')
    algorithm.finalize()
    return algorithm


@pytest.mark.parametrize('cls, error, message', [
    (ReturningTensor, TypeError, r'ReturningTensor.calc_loss: expected a LossInfo, found a Tensor; return LossInfo'),
    (ReturningAction, SpecError, r'rollout_step: expected an AlgStep, found a Tensor; return AlgStep\(output=action'),
    (ReturningText, SpecError, r"the info of .*rollout_step at name: expected a tensor \[B, ...\], found 'best'"),
    (ReturningNumber, SpecError, r'the action of .*rollout_step: expected a tensor \[B, ...\], found 1')])
def test_results_of_another_type_are_rejected_by_name(cls, error, message):
    with pytest.raises(error, match=message):
        make(cls).train_iter()


def test_a_part_of_an_agent_that_returns_a_tensor_is_rejected_by_name(monkeypatch):
    agent, _ = agents.make_agent('ppo', 'discrete')
    monkeypatch.setattr(agent.policy, 'calc_loss', lambda info: torch.zeros(3))
    with pytest.raises(TypeError, match='PPOAlgorithm.calc_loss: expected a LossInfo, found a Tensor; return LossInfo'):
        agent.train_iter()


def test_a_loss_without_gradient_is_reported_once(caplog):
    algorithm = make(Detached)
    for _ in range(3):
        algorithm.train_iter()
    assert caplog.text.count('the loss does not depend on any trained parameter') == 1


def test_infos_of_the_rollout_that_are_trained_on_are_described(with_capabilities):
    with_capabilities(ActorCriticAlgorithm, recomputes_rollout_info=False, traceable_update=False)
    algorithm = make(ActorCriticAlgorithm)
    with mock.patch.object(algorithm.learner.losses, 'train_info', side_effect=AssertionError('not from the rollout')):
        algorithm.train_iter()
    assert algorithm.train_info_spec is not None


def test_no_loss_at_all_is_rejected():
    with pytest.raises(ValueError, match='found neither'):
        reduce_loss(LossInfo())


def test_only_the_last_step_of_an_episode_is_masked():
    step_type = torch.tensor([StepType.FIRST, StepType.MID, StepType.LAST], dtype=torch.int32)
    assert valid_masks(step_type).tolist() == [1., 1., 0.]


def test_masked_means_cover_valid_steps_of_sequences_and_all_of_others():
    masks = torch.tensor([[1., 0.], [1., 1.]])
    extra = {'steps': torch.tensor([[1., 50.], [2., 6.]]),
             'actions': torch.tensor([[[1., 3.], [50., 9.]], [[2., 4.], [5., 9.]]]),
             'all': torch.tensor([1., 2., 6.]), 'scalar': torch.tensor(7.), 'none': ()}
    found = masked_means(extra, masks)
    assert found['steps'] == 3.0 and found['actions'] == 4.0  # (1 + 2 + 6) / 3 and (1 + 3 + 2 + 4 + 5 + 9) / 6
    assert found['all'] == 3.0 and found['scalar'] == 7.0 and found['none'] == ()
    assert masked_means({'steps': extra['steps']}, None)['steps'] == 59 / 4


@pytest.mark.parametrize('recorded', [False, True])
def test_the_step_that_is_bootstrapped_from_has_no_loss(recorded):
    step_type = torch.tensor([[0, 1], [2, 1], [0, 1]], dtype=torch.int32)
    other = torch.zeros(5, 2)
    loss_info = LossInfo(loss=torch.arange(6.).view(3, 2), extra={'steps': torch.ones(3, 2), 'other': other})
    context.set_summary_writer(mock.Mock())
    with context.record_if(recorded):
        found, masks = masked_loss(loss_info, step_type, bootstraps=True)
    assert found.loss.tolist() == [[0, 1], [2, 3]] and masks.tolist() == [[1, 1], [0, 1]]
    assert found.extra['other'] is other and len(found.extra['steps']) == (2 if recorded else 3)
    found, masks = masked_loss(loss_info, step_type, bootstraps=False)
    assert found is loss_info and masks.tolist() == [[1, 1], [0, 1], [1, 1]]


def test_an_update_is_one_step_of_gradient_descent():
    alg = Linear(optimizer=SGD(lr=0.1))
    alg.finalize()
    info, params = alg.update_with_gradient(alg.calc_loss(torch.full((1, 2), 3.)))
    assert alg.weight.item() == pytest.approx(1 - 0.1 * 3)
    assert info.loss.item() == 3.0
    assert [name for name, _ in params] == ['weight']


def test_a_non_finite_loss_is_reported_and_changes_no_parameters():
    alg = Linear(optimizer=Adam(lr=0.1))
    alg.finalize()
    with pytest.raises(NonFiniteLossError, match='linear is NaN or infinite.*weighted'):
        alg.update_with_gradient(alg.calc_loss(torch.full((1, 2), float('nan'))))
    assert alg.weight.item() == 1.0


def test_batch_info_weights_the_samples():
    alg = Linear(optimizer=SGD(lr=1.))
    alg.finalize()
    alg.update_with_gradient(alg.calc_loss(torch.ones(1, 2)),
                             batch_info=BatchInfo(importance_weights=torch.tensor([0., 0.5])))
    assert alg.weight.item() == pytest.approx(1 - 0.25)


class Pair(Algorithm):
    def __init__(self, first, second, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = first, second


def test_every_parameter_has_one_owner_and_parts_keep_theirs():
    own = SGD(lr=0.5)
    pair = Pair(Linear(optimizer=own), Linear(), optimizer=SGD(lr=0.1))
    pair.finalize()
    assert [g['params'] for g in own.param_groups] == [[pair.first.weight]]
    assert [g['params'] for g in pair.default_optimizer.param_groups] == [[pair.second.weight]]
    assert pair.optimizers() == [pair.default_optimizer, own]
    assert '"first.weight"' in pair.get_optimizer_info()
    assert pair.get_unoptimized_parameter_info() == ''


def test_a_parameter_without_an_optimizer_is_named():
    pair = Pair(Linear(optimizer=SGD(lr=0.1)), Linear())
    with pytest.raises(OwnershipError, match=r"trainable parameters \['second.weight'\].*Pair.optimizer = @Adam"):
        pair.finalize()


def test_a_parameter_claimed_twice_is_named():
    class Greedy(Pair):
        pass
    pair = Greedy(Linear(optimizer=SGD(lr=0.1)), Linear(), optimizer=SGD(lr=0.1))
    pair.add_optimizer(SGD(lr=0.2), [pair.first])
    with pytest.raises(OwnershipError, match=r"\['first.weight'\] are owned by two optimizers"):
        pair.finalize()


def test_parameters_forced_visible_are_updated_by_both_optimizers():
    part = Linear(optimizer=SGD(lr=0.1))
    part.force_params_visible_to_parent = True
    pair = Pair(part, Linear(), optimizer=SGD(lr=0.2))
    pair.finalize()
    pair.update_with_gradient(LossInfo(scalar_loss=part.weight + pair.second.weight))
    assert part.weight.item() == pytest.approx(1 - 0.1 - 0.2)


def test_ignored_attributes_need_no_owner():
    class WithTarget(Pair):
        def _trainable_attributes_to_ignore(self):
            return ['second']
    WithTarget(Linear(), Linear(), optimizer=SGD(lr=0.1)).finalize()


def test_an_algorithm_hidden_in_a_plain_module_is_rejected():
    class Hider(Algorithm):
        def __init__(self):
            super().__init__(optimizer=SGD(lr=0.1))
            self.net = nn.Sequential(Linear())
    with pytest.raises(OwnershipError, match="the algorithm at 'net.0'"):
        Hider().finalize()


def test_a_checkpoint_without_an_optimizer_is_rejected():
    alg, other = Linear(optimizer=Adam(lr=0.1)), Linear()
    alg.finalize()
    with pytest.raises((ValueError, RuntimeError), match='optimizer'):
        alg.load_state_dict(other.state_dict())


def test_optimizer_state_survives_a_round_trip():
    alg, copy = Linear(optimizer=Adam(lr=0.1)), Linear(optimizer=Adam(lr=0.1))
    for a in (alg, copy):
        a.finalize()
    for _ in range(3):
        alg.update_with_gradient(alg.calc_loss(torch.ones(1, 1)))
    copy.load_state_dict(alg.state_dict())
    for a in (alg, copy):
        a.update_with_gradient(a.calc_loss(torch.full((1, 1), -2.)))
    assert torch.equal(alg.weight, copy.weight)


def test_an_algorithm_of_the_other_kind_is_rejected():
    alg = Linear(is_on_policy=True)
    with pytest.raises(ValueError, match='on-policy algorithm and cannot be trained off-policy'):
        alg.set_on_policy(False)


def test_the_loss_algorithm_passes_its_input_on_with_its_weight():
    loss = Loss(loss_weight=2.0)
    assert loss.calc_loss(loss.train_step(torch.ones(1, 2)).info).loss.tolist() == [[2., 2.]]


def test_extra_is_averaged_over_valid_steps_where_summaries_are_written():
    alg = Linear(optimizer=SGD(lr=0.))
    alg.finalize()
    context.set_summary_writer(mock.Mock())
    with context.record_if(True):
        info, _ = alg.update_with_gradient(alg.calc_loss(torch.tensor([[1., 5.]])), torch.tensor([[1., 0.]]))
    assert info.extra['weighted'].item() == 1.0


class Counting(Agent):
    """Counts the updates that pass by a method which it overrides."""

    own_capabilities = Agent.own_capabilities
    passed = 0

    def update_with_gradient(self, *args, **kwargs):
        self.passed += 1
        return super().update_with_gradient(*args, **kwargs)


@pytest.mark.parametrize('algorithm', ['ppo', 'actor-critic'])
def test_every_update_passes_by_an_overridden_method(algorithm, replayed_at_once, monkeypatch):
    monkeypatch.setattr(agents, 'Agent', Counting)
    agent, _ = agents.make_agent(algorithm, 'discrete')
    for _ in range(4):
        agent.train_iter()
    assert agent.passed == (4 if algorithm == 'actor-critic' else 24)
    assert not agent.capabilities.traceable_update


def test_the_weight_of_an_update_is_not_logged_in_its_loss():
    alg = Loss()
    weight = nn.Parameter(torch.ones(()))
    alg.weight = weight
    alg.add_optimizer(SGD(lr=1.0), [weight])
    alg.finalize()
    info, _ = alg.update_with_gradient(LossInfo(scalar_loss=2 * weight), weight=0.5)
    assert float(info.loss) == 1.0 and float(info.scalar_loss) == 2.0 and float(weight) == 0.0


def test_on_policy_algorithms_train_on_all_of_their_own_replay_buffer():
    agent, _ = agents.make_agent('actor-critic', 'discrete', mini_batch_length=2)
    experience = agent.unroll(6)
    agent.set_replay_buffer(4, 8)
    agent.observe_sequence_for_replay(experience)
    agent._config.whole_replay_buffer_training, agent._config.clear_replay_buffer = True, False
    assert agent.train_from_replay_buffer() == 2 * 4 * 6  # updates, environments, steps in whole sequences
