"""Training from the replay buffer: amounts and times of training, sequences, and summaries."""
from functools import partial

import pytest
import torch
from helpers.agents import make_agent
from torch import nn

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import FrameStacker
from alfx.engine.capabilities import Capabilities
from alfx.engine.gradient_noise import GradientNoiseScale
from alfx.engine.minibatches import check_sequences, samples_per_draw
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import ConfError
from alfx.optimizers import SGD
from alfx.tensor_specs import TensorSpec


class NoWriter:
    """A summary writer that writes nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def stacking(env):
    return FrameStacker(env.observation_spec(), stack_size=3)


def minibatch_shapes(agent, monkeypatch, **config):
    """Train for an iteration; return ``(T, B)`` of each minibatch."""
    for name, value in config.items():
        setattr(agent._config, name, value)
    shapes = []
    losses = agent.learner.losses.collected

    def record(experience):
        loss_info, masks, train_info = losses(experience)
        shapes.append(tuple(masks.shape))
        return loss_info, masks, train_info

    monkeypatch.setattr(agent.learner.losses, 'collected', record)
    agent.train_iter()
    return shapes


def test_default_sequences_have_unroll_length_and_environment_count(monkeypatch):
    agent, _ = make_agent('ppo', 'discrete', mini_batch_size=None)
    assert minibatch_shapes(agent, monkeypatch, mini_batch_length=None, num_updates_per_train_iter=1) == [(6, 4)]
    agent, _ = make_agent('ppo', 'discrete', mini_batch_size=None)
    assert minibatch_shapes(agent, monkeypatch, mini_batch_length=2, num_updates_per_train_iter=1) == [(2, 4)] * 3


def test_an_iteration_without_an_unroll_does_not_train():
    agent, _ = make_agent('ppo', 'discrete', unroll_length=0.5)
    assert [agent.train_iter() for _ in range(4)] == [0, 8, 0, 8]


def observed_through(transformer, **args):
    """Return a PPO agent whose policy sees observations transformed by ``transformer``."""
    from alfx.algorithms.agent import Agent
    agent, env = make_agent('ppo', 'discrete', **args)
    config = agent._config
    config.data_transformer = transformer(env)
    rl = partial(type(agent.policy), loss_class=type(agent.policy._loss))
    agent = Agent(config.data_transformer.transformed_observation_spec, env.action_spec(), env.reward_spec(), env=env,
                  config=config, rl_algorithm_cls=rl, optimizer=SGD(lr=0.01))
    agent.set_path('')
    agent.finalize()
    return agent


def test_frames_kept_for_stacks_are_not_trained_on_again():
    agent = observed_through(stacking, unroll_length=0.5)
    assert [agent.train_iter() for _ in range(8)] == [0, 8] * 4


def test_sampling_waits_for_a_step_whose_stack_is_complete():
    agent = observed_through(stacking, unroll_length=1)
    config = agent._config
    config.whole_replay_buffer_training, config.mini_batch_length, config.mini_batch_size = False, 2, 4
    agent.policy._loss._compute_advantages_internally = True
    assert [bool(agent.train_iter()) for _ in range(5)] == [False, False, False, True, True]


@pytest.mark.parametrize('clear', [True, False])
def test_initial_steps_are_collected_before_the_first_update(clear):
    agent, _ = make_agent('ppo', 'discrete')  # 24 steps an iteration
    agent._config.initial_collect_steps, agent._config.clear_replay_buffer = 60, clear
    assert [bool(agent.train_iter()) for _ in range(4)] == [False, False, True, True]


def test_initial_steps_beyond_the_size_of_the_buffer_are_counted_too():
    agent, _ = make_agent('ppo', 'discrete')
    agent._config.initial_collect_steps = 24 * 100
    while not agent.train_iter():
        assert int(agent.get_step_metrics()[0].result()) < 24 * 102
    assert int(agent.replay_buffer.current_pos.sum()) >= 24 * 99


def test_oldest_steps_that_fill_no_sequence_are_left_out(monkeypatch):
    agent, _ = make_agent('ppo', 'discrete')
    shapes = minibatch_shapes(agent, monkeypatch, clear_replay_buffer=False, mini_batch_length=4, mini_batch_size=99,
                              num_updates_per_train_iter=1)
    assert shapes == [(4, 4)]


def test_sequences_that_do_not_divide_the_unroll_are_rejected_early():
    agent, _ = make_agent('ppo', 'discrete')
    agent._config.mini_batch_length = 4
    with pytest.raises(ConfError, match='mini_batch_length.*= 4 does not divide TrainerConfig.unroll_length = 6'):
        check_sequences(agent._config)


@pytest.mark.parametrize('use_rollout_state', [False, True])
def test_samples_of_one_step_become_transitions_for_learners_of_pairs(use_rollout_state, caplog):
    caplog.set_level('INFO', 'alfx')
    settings = TrainerConfig(root_dir='', unroll_length=1, mini_batch_length=1, whole_replay_buffer_training=False,
                             clear_replay_buffer=False, use_rollout_state=use_rollout_state, algorithm_ctor=Agent)
    check_sequences(settings, Capabilities(needs_previous_step=use_rollout_state))
    assert settings.mini_batch_length == 1 and not caplog.records
    check_sequences(settings, Capabilities(needs_two_steps=True, bootstraps_sequences=True))
    assert settings.mini_batch_length == 2
    assert 'TrainerConfig.mini_batch_length = 1 is read as 2' in caplog.text


def test_overlapping_sequences_of_a_whole_buffer_may_have_one_step():
    settings = TrainerConfig(root_dir='', unroll_length=1, mini_batch_length=1, clear_replay_buffer=False,
                             algorithm_ctor=Agent)
    check_sequences(settings, Capabilities(needs_two_steps=True, bootstraps_sequences=True))
    assert settings.mini_batch_length == 1
    check_sequences(settings, Capabilities(needs_two_steps=True))
    assert settings.mini_batch_length == 2


@pytest.mark.parametrize('every_mini_batch', [False, True])
def test_only_updates_with_their_own_counter_write_summaries(every_mini_batch, monkeypatch):
    agent, _ = make_agent('ppo', 'discrete')
    agent._config.update_counter_every_mini_batch = every_mini_batch
    counters = []
    monkeypatch.setattr(agent, 'summarize_train', lambda *_: counters.append(context.get_global_counter()))
    context.set_summary_writer(NoWriter())
    with context.record_if(True):
        agent.train_iter()
    context.set_summary_writer(None)
    assert counters == ([1, 2, 3, 4, 5, 6] if every_mini_batch else [0])


def test_an_on_policy_iteration_counts_as_its_one_update():
    agent, _ = make_agent('actor-critic', 'discrete')
    agent._config.update_counter_every_mini_batch = True
    agent.train_iter()
    agent.train_iter()
    assert context.get_global_counter() == 2


def test_importance_weights_can_be_divided_by_the_largest(monkeypatch):
    agent, _ = make_agent('ppo', 'discrete')
    agent._config.whole_replay_buffer_training, agent._config.normalize_importance_weights_by_max = False, True
    agent._config.mini_batch_length, agent._config.priority_replay_beta = 2, 1.0
    agent.policy._loss._compute_advantages_internally = True
    buffer, weights = agent.replay_buffer, []
    get_batch, gradients = buffer.get_batch, agent.updater.plan(agent.learner.losses.collected).gradients

    def sample(batch_size, length):
        experience, info = get_batch(batch_size, length)
        return experience, info._replace(importance_weights=torch.arange(1.0, batch_size + 1))

    def record(batch):
        weights.append(batch.weights)
        return gradients(batch)

    monkeypatch.setattr(buffer, 'reader', lambda *_: None)  # which would read past get_batch
    monkeypatch.setattr(buffer, 'get_batch', sample)
    monkeypatch.setattr(agent.updater.plan(agent.learner.losses.collected), 'gradients', record)
    agent.train_iter()
    torch.testing.assert_close(weights[0], 1 / torch.arange(1.0, 9.0))


def test_the_noise_scale_of_a_gradient_worked_out_by_hand():
    # Losses w * x with x = 1 and 3 for the two samples: g_1 = 1, g_2 = 2, so |G|^2 = (2*4 - 1*1) / 1 = 7 and
    # S = (1 - 4) / (1 - 1/2) = -6.
    w = nn.Parameter(torch.ones(()))
    noise = GradientNoiseScale(ratio=0.5)
    estimate = noise((w * torch.tensor([[1.0, 3.0]])), [w])
    torch.testing.assert_close(estimate, torch.tensor(-6.0 / 7.0))
    assert w.grad is None


def test_the_noise_scale_of_many_batches_matches_their_distribution():
    # Gradients of single samples: mean 2, variance 9, hence 9 / 4.
    torch.manual_seed(0)
    w = nn.Parameter(torch.ones(()))
    noise = GradientNoiseScale(update_rate=1e-3)
    for _ in range(2000):
        estimate = noise(w * (2 + 3 * torch.randn(1, 40)), [w])
    assert float(estimate) == pytest.approx(9 / 4, rel=0.15)


def test_the_noise_scale_is_summarized_and_changes_no_update(monkeypatch):
    results = []
    for enabled in (False, True):
        agent, _ = make_agent('actor-critic', 'discrete')
        if enabled:
            agent.updater.noise_scale = GradientNoiseScale()
        infos = []
        monkeypatch.setattr(agent, 'summarize_train', lambda *args, infos=infos: infos.append(args[2]))
        context.set_summary_writer(NoWriter())
        with context.record_if(True):
            agent.train_iter()
        context.set_summary_writer(None)
        assert isinstance(infos[0].gns, torch.Tensor) == enabled
        results.append([p.detach().clone() for p in agent.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_each_minibatch_has_its_own_recent_sequences():
    """Draw the minibatches of an iteration one by one if a part of each comes from the latest sequences."""
    sizes = {}
    for ratio in (0.0, 0.25):
        buffer = ReplayBuffer(TensorSpec(()), 1, 100, recent_data_ratio=ratio)
        sizes[ratio] = samples_per_draw(buffer, 8)
    assert sizes[0.0] > 1 and sizes[0.25] == 1
