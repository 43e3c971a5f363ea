"""Networks compute in 16 bits, everything else in full precision."""
import logging

import pytest
import torch
from helpers import agents
from helpers import sac_agents
from helpers.dqn_agents import make_agent as make_dqn_agent
from helpers.plans import num_graphs

from alfx import nest
from alfx.algorithms.config import TrainerConfig
from alfx.data_structures import LossInfo
from alfx.engine.capabilities import Capabilities
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.engine.mixed_precision import LossScaler, MixedPrecision
from alfx.engine.plan import TracedPlan, torch_internals
from alfx.engine.updater import Updater
from alfx.layers import FC
from alfx.networks.value_networks import ValueNetwork
from alfx.tensor_specs import TensorSpec

pytestmark = pytest.mark.usefixtures('bfloat16_instructions')

CPU = torch.device('cpu')
MAKERS = {'PPO': lambda: agents.make_agent('ppo', 'continuous')[0],
          'PPO, recurrent': lambda: agents.make_agent('ppo', 'recurrent')[0],
          'SAC': lambda: sac_agents.make_agent()[0],
          'DQN': lambda: make_dqn_agent(False)}


@pytest.fixture
def amp(monkeypatch):
    """Return a function that sets ``enable_amp`` of all configurations created afterwards."""
    original = TrainerConfig.__post_init__

    def switch(on):
        def changed(config):
            config.enable_amp = on
            original(config)

        monkeypatch.setattr(TrainerConfig, '__post_init__', changed)

    return switch


def watched_products(module):
    """Return a set that collects the output dtypes of the layers of ``module``."""
    found = set()
    for layer in module.modules():
        if isinstance(layer, FC) or type(layer).__name__ == 'ParallelFC':
            layer.register_forward_hook(lambda m, args, out: found.add(out.dtype))
    return found


def first_update(make, monkeypatch):
    """Run the first update; return the agent and the gradients."""
    agent = make()
    gradients = []
    for optimizer in agent.optimized_parameters()[0]:
        optimizer.register_step_pre_hook(lambda o, args, kwargs: gradients.extend(
            p.grad.detach().clone() for group in o.param_groups for p in group['params'] if p.grad is not None))
    while not gradients:
        agent.train_iter()
    return agent, gradients


@pytest.mark.parametrize('name', MAKERS)
def test_gradients_match_float32_within_bfloat16_precision(name, amp, monkeypatch):
    found = []
    for on in (False, True):
        amp(on)
        agent, gradients = first_update(MAKERS[name], monkeypatch)
        assert all(g.dtype == torch.float32 for g in gradients)
        found.append(torch.cat([g.flatten() for g in gradients]))
    exact, rounded = found
    assert exact.shape == rounded.shape and not torch.equal(exact, rounded)
    cosine = torch.cosine_similarity(exact, rounded, dim=0)
    assert cosine > 0.99, cosine


@pytest.mark.parametrize('name', MAKERS)
def test_only_networks_compute_in_16_bits_and_no_results_are_stored_so(name, amp, never_replayed):
    amp(True)
    agent = MAKERS[name]()
    types = watched_products(agent)
    assert agent.updater.precision.dtype == torch.bfloat16 and agent.updater.precision.scaler is None
    for _ in range(3):
        agent.train_iter()
    assert types == {torch.bfloat16}
    stored = [agent.rollout_info_spec, agent.train_info_spec, agent.experience_spec,
              [x for x in (*agent.parameters(), *agent.buffers())]]
    assert not any(x.dtype in (torch.bfloat16, torch.float16) for x in nest.flatten(stored))
    assert not torch.is_autocast_enabled('cpu')


@pytest.mark.parametrize('name', ['PPO', 'SAC', 'DQN'])
def test_it_learns_in_bfloat16(name, amp):
    amp(True)
    agent = MAKERS[name]()
    rewards = []
    observe = agent._metrics.observe
    agent._metrics.observe = lambda steps: (rewards.append(float(steps.reward.mean())), observe(steps))
    for _ in range(120 if name == 'PPO' else 250):
        agent.train_iter()
    early, late = sum(rewards[:2]) / 2, sum(rewards[-20:]) / 20
    assert late > early + 0.05, (early, late)


def test_replayed_updates_match_eager_ones_in_bfloat16(amp, warm_up):
    amp(True)
    results = []
    for played in (True, False):
        warm_up(2 if played else 10**6)
        agent = make_dqn_agent(False)
        torch.manual_seed(1)
        for _ in range(4):
            agent.train_iter()
        assert bool(num_graphs(agent)) == played
        results.append([p.detach().clone() for p in agent.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def network():
    return ValueNetwork(TensorSpec((3, )), fc_layer_params=(8, ))


class TestNetworks:

    def test_a_call_returns_float32_for_any_compute_dtype(self):
        net = network()
        types = watched_products(net)
        MixedPrecision(net, CPU)
        output, _ = net(torch.ones(2, 3))
        assert types == {torch.bfloat16} and output.dtype == torch.float32
        output.sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())

    def test_weights_seen_without_gradients_first_still_get_gradients(self):
        net = network()
        MixedPrecision(net, CPU)
        with torch.no_grad():
            net(torch.ones(2, 3))
        net(torch.ones(2, 3))[0].sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in net.parameters() if p.ndim == 2)

    def test_a_failing_call_leaves_the_process_unchanged(self):
        net = network()
        MixedPrecision(net, CPU)
        with pytest.raises(ValueError, match='input'):
            net(torch.ones(2, 4))
        net(torch.ones(2, 3))
        with pytest.raises(ValueError, match='input'):  # found out within
            net(torch.ones(2, 3, dtype=torch.float64))
        assert not torch.is_autocast_enabled('cpu')


class _Owner:
    """A minimal algorithm with the attributes that an update needs."""

    name = 'Owner'

    def __init__(self, scaler):
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.capabilities = Capabilities()
        self.updater = Updater(self)
        self.updater.scaler = scaler
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)

    def optimized_parameters(self):
        return [self.optimizer], [('weight', self.weight)]

    def modules(self):
        return iter(())

    def parameters(self):
        return iter([self.weight])

    def update(self, loss):
        return self.updater.apply(LossInfo(scalar_loss=loss))


class TestLossScaling:

    def test_the_step_matches_the_unscaled_loss(self):
        plain, scaled = _Owner(None), _Owner(LossScaler('cpu'))
        for owner in (plain, scaled):
            owner.update((owner.weight * torch.tensor([2.0, 3.0])).sum())
        assert scaled.updater.scaler.scale > 1
        torch.testing.assert_close(plain.weight, scaled.weight)
        torch.testing.assert_close(plain.weight.grad, scaled.weight.grad)

    def test_an_update_with_infinite_gradients_is_skipped_and_the_scale_halved(self):
        owner = _Owner(LossScaler('cpu'))
        scale = owner.updater.scaler.scale
        owner.update((owner.weight * 1e38).sum() * 1e-30)  # a finite loss, but a gradient of 1e8 times the scale is not
        before = owner.weight.detach().clone()
        owner.update(_with_gradient(owner.weight, float('inf')))
        assert torch.equal(before, owner.weight) and owner.updater.scaler.scale == scale / 2

    def test_gradients_that_stay_infinite_stop_the_run(self):
        owner = _Owner(LossScaler('cpu'))
        with pytest.raises(NonFiniteLossError, match='although the loss is finite'):
            for _ in range(100):
                owner.update(_with_gradient(owner.weight, float('inf')))
        assert torch.equal(owner.weight, torch.ones(2))

    def test_a_loss_that_is_not_finite_stops_the_run_with_its_name_at_once(self):
        owner = _Owner(LossScaler('cpu'))
        with pytest.raises(NonFiniteLossError, match='the loss of Owner is NaN or infinite'):
            owner.update(owner.weight.sum() * float('nan'))

    def test_an_update_without_any_gradient_changes_nothing(self):
        owner = _Owner(LossScaler('cpu'))
        for _ in range(2):  # before there is a scale, and after
            owner.update(torch.ones(()))
            assert torch.equal(owner.weight, torch.ones(2))
            owner.updater.scaler.scaled(torch.ones(()))

    def test_its_state_is_saved_and_ignored_for_another_precision(self):
        first, second = (MixedPrecision(network(), CPU, torch.float16) for _ in range(2))
        owner = _Owner(first.scaler)
        owner.update(_with_gradient(owner.weight, float('inf')))
        second.load_state_dict(first.state_dict())
        assert second.scaler.scale == first.scaler.scale
        second.load_state_dict({})
        bfloat16 = MixedPrecision(network(), CPU)
        bfloat16.load_state_dict(first.state_dict())
        assert bfloat16.state_dict() == {} and second.scaler.scale == first.scaler.scale

    def test_float16_updates_run_eagerly_and_this_is_logged(self, amp, monkeypatch, caplog):
        monkeypatch.setattr('alfx.engine.mixed_precision._best_dtype', lambda device: torch.float16)
        amp(True)
        agent = make_dqn_agent(False)
        with caplog.at_level(logging.INFO, 'alfx'):
            for _ in range(4):
                agent.train_iter()
        assert not isinstance(agent.updater.plan(agent.learner.losses.collected),
                              TracedPlan) and 'run in eager mode' in caplog.text
        assert agent.updater.scaler is agent.policy.updater.scaler is not None


def _with_gradient(weight, value):
    """Return a loss of 0 whose gradient is ``value``."""
    weighted = weight * 0
    weighted.register_hook(lambda grad: torch.full_like(grad, value))
    return weighted.sum()


@pytest.mark.parametrize('has_instructions', [True, False])
def test_a_cpu_without_bfloat16_instructions_computes_in_float32(has_instructions, monkeypatch, caplog):
    monkeypatch.setattr(torch_internals, 'has_bfloat16_instructions', lambda: has_instructions)
    net = ValueNetwork(TensorSpec((3, )))
    products = watched_products(net)
    with caplog.at_level(logging.INFO, 'alfx'):
        precision = MixedPrecision(net, CPU)
    net(torch.zeros(2, 3))
    assert products == {precision.dtype} == {torch.bfloat16 if has_instructions else torch.float32}
    assert ('enable_amp has no effect' in caplog.text) != has_instructions
    assert precision.scaler is None and precision.state_dict() == {}
