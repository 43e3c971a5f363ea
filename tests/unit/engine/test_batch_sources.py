"""Minibatches from several sources: the schedule of sources, and the sum of losses as the objective."""
import pytest
import torch
from helpers import offline_agents
from helpers.offline_agents import differences, make_agent, parameters

from alfx import context, nest
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import BatchInfo, Experience, LossInfo, TimeStep
from alfx.engine import minibatches
from alfx.engine.batch_sources import (BatchConcatenator, SampleOrigin, BatchSource, Stage, concatenate, stage_of,
                                       weights_of)
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.utils.schedulers import LinearScheduler


@pytest.fixture(scope='module')
def dataset(tmp_path_factory):
    return offline_agents.record(tmp_path_factory.mktemp('data') / 'random')


def config(**kwargs):
    return TrainerConfig(root_dir='', algorithm_ctor=dict, offline_buffer_dir='x', whole_replay_buffer_training=False,
                         mini_batch_length=2, **kwargs)


@pytest.mark.parametrize('kwargs, expected', [
    (dict(), 'HHHHHH'), (dict(unroll_length=0), 'OOOOOO'), (dict(rl_train_after_update_steps=3), 'PPPHHH'),
    (dict(rl_train_every_update_steps=2), 'HOHOHO'),
    (dict(rl_train_after_update_steps=3, rl_train_every_update_steps=2), 'PPPOHO')])
def test_the_counter_selects_the_data_source(kwargs, expected):
    names = {'H': Stage.HYBRID, 'O': Stage.OFFLINE, 'P': Stage.PRETRAIN}
    assert [stage_of(config(**kwargs), True, c) for c in range(6)] == [names[c] for c in expected]


def test_without_a_dataset_all_data_is_collected():
    assert stage_of(config(rl_train_after_update_steps=3), False, 0) is Stage.ONLINE


def test_unshared_leaves_are_dropped_and_the_others_concatenated():
    a = Experience(TimeStep(reward=torch.zeros(2, 3), env_info={'x': torch.zeros(2, 3)}), torch.zeros(2, 3, 1),
                   {'both': torch.zeros(2, 3), 'mine': torch.zeros(2, 3)})
    b = Experience(TimeStep(reward=torch.ones(2, 1)), torch.ones(2, 1, 1), {'both': torch.ones(2, 1)})
    join = BatchConcatenator()
    for _ in range(2):
        found = join([a, b])
        assert found.time_step.reward.tolist() == [[0, 0, 0, 1]] * 2 and found.action.shape == (2, 4, 1)
        assert found.time_step.env_info == () and list(found.rollout_info) == ['both']
    assert join([a]) is a


def test_weights_make_the_mean_over_all_columns_the_sum_of_means():
    shares = BatchSource(None, 3), BatchSource(None, 1, weight=0.5)
    weights = weights_of(config(), [SampleOrigin(share, BatchInfo()) for share in shares])
    loss = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert float((loss * weights).mean()) == pytest.approx(2.0 + 0.5 * 10.0)
    assert weights_of(config(), [SampleOrigin(BatchSource(None, 3), BatchInfo())]) == ()
    mean = [SampleOrigin(BatchSource(None, n, weight=n / 4), BatchInfo()) for n in (3, 1)]
    assert weights_of(config(), mean) == ()


def test_weights_are_on_the_device_that_samples_come_to():
    with context.device('meta'):
        assert weights_of(config(), [SampleOrigin(BatchSource(None, n), BatchInfo())
                                     for n in (3, 1)]).device.type == 'meta'


def test_importance_weights_are_applied_in_addition():
    origins = [SampleOrigin(BatchSource(None, 2), BatchInfo(importance_weights=torch.tensor([4.0, 1.0]))),
               SampleOrigin(BatchSource(None, 2), BatchInfo())]
    assert weights_of(config(priority_replay_beta=0.5), origins).tolist() == [1.0, 2.0, 2.0, 2.0]


def test_losses_of_concatenated_batches_are_added():
    a = LossInfo(loss=torch.ones(2, 3), scalar_loss=torch.tensor(1.0), extra='a', priority=torch.ones(3))
    found = concatenate(a, LossInfo(loss=torch.zeros(2, 1), extra='b', priority=torch.zeros(1)))
    assert found.loss.shape == (2, 4) and float(found.scalar_loss) == 1 and found.priority.tolist() == [1, 1, 1, 0]
    with pytest.raises(ValueError, match='from both or from neither'):
        concatenate(a, LossInfo(scalar_loss=torch.tensor(0.0)))


# Iterations ----------------------------------------------------------------------------------------------------------


def iterate(agent, count):
    for _ in range(count):
        agent.train_iter()
        context.increment_global_counter()


@pytest.mark.parametrize('name', ['bc', 'iql', 'sac'])
def test_offline_training_steps_no_environment_and_allocates_no_buffer(name, dataset):
    agent = make_agent(name, dataset)
    before = parameters(agent)
    iterate(agent, 2)
    assert agent.replay_buffer is None and agent.get_step_metrics()[0].count == 0
    assert differences(before, parameters(agent))
    assert context.is_replay() is False


@pytest.mark.parametrize('phase, config_args, unroll_length', [
    ('pretraining', dict(rl_train_after_update_steps=99), 4), ('offline', {}, 0), ('hybrid', {}, 4)])
@pytest.mark.parametrize('name', ['iql', 'sac'])
def test_target_networks_move_in_every_phase(name, phase, config_args, unroll_length, dataset):
    agent = make_agent(name, dataset, unroll_length=unroll_length, config_args=config_args)
    before = parameters(agent)
    iterate(agent, 2)
    assert any('target_critic' in changed for changed in differences(before, parameters(agent)))


def test_collection_starts_at_the_counter_and_pauses_training(dataset):
    """Collect no steps before the counter is reached, and do not train during the initial collection."""
    agent = make_agent('iql', dataset, unroll_length=4, config_args=dict(rl_train_after_update_steps=2,
                                                                        initial_collect_steps=30))
    steps, trained = [], []
    for _ in range(5):
        trained.append(agent.train_iter())
        context.increment_global_counter()
        steps.append(int(agent.replay_buffer.total_size))
    assert steps == [0, 0, 16, 32, 48]
    assert [x > 0 for x in trained] == [True, True, False, True, True]
    assert trained[3] == 2 * trained[0]


@pytest.mark.parametrize('every_mini_batch, collects', [(False, [0, 0, 0, 0, 0, 0, 1, 1]),
                                                        (True, [0, 0, 1, 1, 1, 1, 1, 1])])
def test_the_schedule_counts_iterations_or_minibatches(every_mini_batch, collects, dataset):
    """Train on three minibatches per iteration, and collect no steps until the counter is 6."""
    agent = make_agent('bc', dataset, unroll_length=4, updates=3, config_args=dict(
        rl_train_after_update_steps=6, update_counter_every_mini_batch=every_mini_batch))
    found = []
    for _ in collects:
        before = agent.replay_buffer.total_size if agent.replay_buffer is not None else 0
        agent.train_iter()
        if not every_mini_batch:  # as the trainer does
            context.increment_global_counter()
        found.append(int(agent.replay_buffer.total_size > before))
    assert found == collects and context.get_global_counter() == (24 if every_mini_batch else 8)


class Hooked(SacAlgorithm):
    """An algorithm that records calls of its offline hooks, which behave as the online hooks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    own_capabilities = SacAlgorithm.own_capabilities

    def train_step(self, inputs, state, rollout_info):
        self.calls.append('train_step')
        return super().train_step(inputs, state, rollout_info)

    def train_step_offline(self, inputs, state, rollout_info, pre_train=False):
        self.calls.append(('train_step_offline', pre_train, context.is_pretrain()))
        return super().train_step(inputs, state, rollout_info)

    def calc_loss_offline(self, info, pre_train=False):
        self.calls.append(('calc_loss_offline', pre_train, context.is_pretrain()))
        return super().calc_loss(info)

    def after_update(self, root_inputs, info):
        self.calls.append('after_update')
        super().after_update(root_inputs, info)

    def after_train_iter(self, root_inputs, rollout_info):
        self.calls.append(('after_train_iter', rollout_info is not None))
        super().after_train_iter(root_inputs, rollout_info)


def test_offline_hooks_are_called_with_the_phase(dataset):
    agent = make_agent(Hooked, dataset, unroll_length=4, updates=1, config_args=dict(rl_train_after_update_steps=1,
                                                                                    rl_train_every_update_steps=2))
    rl = agent.policy
    seen = []
    for _ in range(3):
        agent.train_iter()
        context.increment_global_counter()
        seen.append(rl.calls)
        rl.calls = []
    assert agent.capabilities.has_offline_hooks
    assert seen[0] == [('train_step_offline', True, True), ('calc_loss_offline', True, True), 'after_update',
                       ('after_train_iter', False)]
    assert seen[1] == [('train_step_offline', False, False), ('calc_loss_offline', False, False), 'after_update',
                       ('after_train_iter', True)]
    assert seen[2] == ['train_step', *seen[1]]


def gradients(agent, sample, monkeypatch):
    """Return the gradients of one hybrid update from given samples, by parameter."""
    found = {}
    monkeypatch.setattr(type(agent.updater), 'optimize', lambda self, plan, batch: (
        plan.gradients(batch), found.update({n: p.grad.clone() for n, p in agent.named_parameters()
                                             if p.grad is not None}))[0])
    monkeypatch.setattr(ReplayBuffer, 'get_batch', lambda self, *args: sample[self.name])
    torch.manual_seed(5)
    agent.train_from_replay_buffer()
    return found


@pytest.mark.parametrize('name', ['iql', 'bc'])
def test_a_hybrid_update_follows_the_sum_of_both_losses(name, dataset, monkeypatch):
    agent = make_agent(name, dataset, unroll_length=4, updates=1, config_args=dict(
        offline_mini_batch_size=5, offline_loss_weight=0.5))
    agent.unroll(6)
    buffers = agent.replay_buffer, agent.offline_replay_buffer
    sample = {buffer.name: buffer.get_batch(size, 2) for buffer, size in zip(buffers, (8, 5))}
    found = gradients(agent, sample, monkeypatch)
    losses = []
    for (experience, info), weight in zip(sample.values(), (1.0, 0.5)):
        processed = nest.map_structure(lambda x: x.transpose(0, 1), agent.learner.batches.processed(experience, info))
        loss_info, masks, _ = agent.learner.losses.collected(processed)
        losses.append(weight * (loss_info.loss * masks).mean())
    names = list(found)
    parameters_by_name = dict(agent.named_parameters())
    expected = torch.autograd.grad(sum(losses), [parameters_by_name[n] for n in names])
    assert names
    for parameter, gradient in zip(names, expected):
        torch.testing.assert_close(found[parameter], gradient, atol=1e-6, rtol=1e-5)


def test_equivalent_hooks_make_the_same_update(dataset, monkeypatch):
    class HookedBc(offline_agents.BcAlgorithm):
        own_capabilities = offline_agents.BcAlgorithm.own_capabilities

        def calc_loss_offline(self, info, pre_train=False):
            return self.calc_loss(info)

    updates = []
    for base in (offline_agents.BcAlgorithm, HookedBc):
        network = offline_agents.algorithm('bc')[0].keywords
        agent = make_agent(offline_agents.partial(base, **network), dataset, unroll_length=4, updates=1)
        agent.unroll(6)
        buffers = agent.replay_buffer, agent.offline_replay_buffer
        if not updates:
            sample = {buffer.name: buffer.get_batch(8, 2) for buffer in buffers}
        updates.append((agent, gradients(agent, sample, monkeypatch)))
    assert [agent.capabilities.has_offline_hooks for agent, _ in updates] == [False, True]
    for name in updates[0][1]:
        torch.testing.assert_close(updates[0][1][name], updates[1][1][name], atol=1e-6, rtol=1e-5)


def test_the_dataset_can_be_faded_out(dataset):
    schedule = LinearScheduler('iterations', [(0, 1.0), (2, 0.0)])
    agent = make_agent('iql', dataset, unroll_length=4, updates=1, config_args=dict(offline_loss_weight=schedule))
    trained = []
    for iteration in range(4):
        context.update_progress('iterations', iteration)
        trained.append(agent.train_iter())
        context.increment_global_counter()
    assert trained == [2 * trained[2], 2 * trained[2], trained[2], trained[2]]


def test_an_algorithm_adds_its_own_batch_source(dataset, monkeypatch):
    agent = make_agent('iql', dataset, unroll_length=4, updates=1, config_args=dict(offline_loss_weight=0.0))
    asked = []

    class Source:
        def get_batch(self, batch_size, batch_length):
            asked.append((batch_size, batch_length))
            return agent.offline_replay_buffer.get_batch(batch_size, batch_length)

    monkeypatch.setattr(agent, 'batch_sources', lambda share: [share._replace(batch_size=6, weight=0.75),
                                                              BatchSource(Source(), 2, weight=0.25)])
    iterate(agent, 2)
    assert asked == [(2, 2)] * 2


def test_only_the_collected_buffer_waits_for_the_initial_steps(dataset, monkeypatch):
    agent = make_agent('iql', dataset, unroll_length=4, config_args=dict(initial_collect_steps=20))
    small = agent.offline_replay_buffer
    monkeypatch.setattr(minibatches, 'has_collected', lambda buffer, steps: not steps or buffer is not small)
    monkeypatch.setattr(agent, 'batch_sources', lambda share: [share, BatchSource(small, 2)])
    iterate(agent, 2)
    assert len(agent.learner.batches.sources(Stage.HYBRID)) == 3


def test_offline_columns_of_a_batch_come_last_like_their_weights(dataset, monkeypatch):
    agent = make_agent('iql', dataset, unroll_length=4, config_args={})
    monkeypatch.setattr(agent, 'batch_sources', lambda share: [
        BatchSource(agent.offline_replay_buffer, 2, weight=3.0, is_offline=True), share])
    iterate(agent, 2)
    assert [source.is_offline for source in agent.learner.batches.sources(Stage.HYBRID)] == [False, True, True]


# Traced updates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name, unroll_length, config_args', [
    ('bc', 0, {}), ('iql', 0, {}), ('sac', 0, {}), ('iql', 4, {}), ('sac', 4, {}),
    ('iql', 4, dict(rl_train_after_update_steps=3)), ('iql', 4, dict(rl_train_every_update_steps=3)),
    ('iql', 4, dict(priority_replay=True))])
def test_replayed_updates_match_eager_ones(name, unroll_length, config_args, dataset, warm_up):
    agents = []
    for count in (1, 10**9):
        warm_up(count)
        priorities = dict(calculate_priority=True) if config_args.get('priority_replay') else {}
        agent = make_agent(name, dataset, unroll_length=unroll_length, config_args=config_args, **priorities)
        iterate(agent, 7)
        agents.append(agent)
    records = [sum(backend.num_graphs for backend in (plan.replayed, plan.compiled) if backend is not None)
               for plan in agents[0].updater._plans.values()]
    assert sum(records) >= (2 if unroll_length and 'priority_replay' not in config_args and any(
        'rl_train' in key for key in config_args) else 1)
    assert not differences(parameters(agents[0]), parameters(agents[1]))


def test_replayed_updates_with_offline_hooks_match_eager_ones(dataset, warm_up):
    agents = []
    for count in (1, 10**9):
        warm_up(count)
        agent = make_agent(Hooked, dataset, unroll_length=4, config_args=dict(rl_train_after_update_steps=3))
        iterate(agent, 7)
        agents.append(agent)
    losses = agents[0].learner.losses
    assert set(agents[0].updater._plans) == {losses.offline, losses.hybrid}
    assert not differences(parameters(agents[0]), parameters(agents[1]))
