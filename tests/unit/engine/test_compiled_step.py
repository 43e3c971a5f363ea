"""Adam's step within a compiled update does what the optimizer does by itself."""
import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from alfx import context, summary
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.engine.compiled_step import AdamStep
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.networks.q_networks import QNetwork
from alfx.optimizers import SGD, Adam, AdamTF, AdamW


class _NoWriter:
    """Writes nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


class _Algorithm:
    """What a step asks an algorithm for."""

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        self.gradient_averager = self.gradient_noise_scale = None
        self._config = SimpleNamespace(summarize_grads_and_vars=True)

    def what_is_updated(self):
        return self.optimizers, []


class _Recorder:
    """What a step asks a recorder for; a buffer lies between its parameters."""

    def __init__(self, params):
        self.params = params
        self.tensors = [params[0], torch.zeros(3), *params[1:]]
        self.trained = [0, *range(2, len(params) + 1)]


def _params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5, ), (2, 2, 3), ())]


def _grads(seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    return [None if i in without else torch.randn(p.shape, generator=generator) for i, p in enumerate(_params())]


def _played(step, recorder, loss, grads):
    """Make a step as a recorded function makes it: on tensors given to a graph."""
    present = [g for g in grads if g is not None]
    state = step.tensors()
    count = len(recorder.tensors)

    def function(*flat):
        left = list(flat[count + len(state) + 1:])
        mine = [None if g is None else left.pop(0) for g in grads]
        return list(step.record(flat[:count], flat[count:count + len(state)], flat[count + len(state)], mine))

    with torch.no_grad():
        inputs = [*(x.detach() for x in recorder.tensors), *state, loss, *present]
        graph = make_fx(function)(*(x.clone() for x in inputs))
        assert step.prepare() is state
        return graph(*inputs)


def _make(optimizer_cls, split, **kwargs):
    """Parameters and their optimizers: one, or two with two groups in the first."""
    params = _params()
    if not split:
        return params, [optimizer_cls(params, **kwargs)]
    return params, [optimizer_cls([{'params': params[:1]}, {'params': params[1:2], 'lr': 0.5}], **kwargs),
                    optimizer_cls(params[2:], **kwargs)]


@pytest.mark.parametrize('split', [False, True])
@pytest.mark.parametrize('make', [
    partial(Adam, lr=0.1), partial(Adam, lr=0.1, betas=(0.0, 0.9), eps=1e-3, weight_decay=0.1),
    partial(AdamW, lr=0.1, weight_decay=0.2), partial(AdamW, lr=0.1, weight_decay=0.0),
    partial(Adam, lr=0.1, gradient_clipping=0.5, clip_by_global_norm=True),
    partial(Adam, lr=0.1, weight_decay=0.1, gradient_clipping=100.0, clip_by_global_norm=True)])
def test_steps_are_those_of_the_optimizer(make, split):
    params, optimizers = _make(make, split)
    expected, own = _make(make, split)
    recorder = _Recorder(params)
    step = AdamStep.of(_Algorithm(*optimizers), recorder)
    for i in range(6):
        without = {2: (1, ), 3: (0, 3)}.get(i, ())  # a parameter may be left out at times
        grads = _grads(i, without)
        for p, grad in zip(expected, grads):
            p.grad = None if grad is None else grad.clone()
        for optimizer in own:
            optimizer.step()
        clipped = _played(step, recorder, torch.zeros(()), grads)
        for mine, other, grad in zip(params, expected, clipped):
            torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)
            assert (grad is None) == (other.grad is None)
            if grad is not None:
                torch.testing.assert_close(grad, other.grad, atol=1e-6, rtol=1e-5)
    for optimizer, other in zip(optimizers, own):
        assert str(optimizer.state_dict()['param_groups']) == str(other.state_dict()['param_groups'])
        torch.testing.assert_close(optimizer.state_dict()['state'], other.state_dict()['state'], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(optimizer.grad_norm, other.grad_norm)


def test_an_optimizer_without_any_gradient_keeps_its_norm():
    params, optimizers = _make(partial(Adam, lr=0.1, gradient_clipping=0.5, clip_by_global_norm=True), True)
    recorder = _Recorder(params)
    steps = [AdamStep.of(_Algorithm(*optimizers), recorder) for _ in range(2)]
    _played(steps[0], recorder, torch.zeros(()), _grads(0, without=(0, 1)))
    assert optimizers[0].grad_norm is None and optimizers[1].grad_norm > 0
    _played(steps[1], recorder, torch.zeros(()), _grads(1))
    norm = optimizers[0].grad_norm.clone()
    _played(steps[0], recorder, torch.zeros(()), _grads(2, without=(0, 1)))
    assert norm > 0 and optimizers[0].grad_norm == norm


def test_gradients_that_no_summary_shows_are_not_returned():
    params, optimizers = _make(partial(Adam, lr=0.1), False)
    algorithm = _Algorithm(*optimizers)
    algorithm._config.summarize_grads_and_vars = False
    before = [p.detach().clone() for p in params]
    recorder = _Recorder(params)
    assert _played(AdamStep.of(algorithm, recorder), recorder, torch.zeros(()), _grads(0)) == [None] * len(params)
    assert not any(torch.equal(a, b) for a, b in zip(before, params))


@pytest.mark.parametrize('loss', [float('nan'), float('inf'), -float('inf')])
def test_nothing_changes_where_the_loss_is_not_finite(loss):
    params, optimizers = _make(partial(Adam, lr=0.1, gradient_clipping=0.5, clip_by_global_norm=True), False)
    recorder = _Recorder(params)
    step = AdamStep.of(_Algorithm(*optimizers), recorder)
    _played(step, recorder, torch.zeros(()), _grads(0))
    before = [p.clone() for p in params], optimizers[0].state_dict()
    before[1]['state'] = {i: {k: x.clone() for k, x in s.items()} for i, s in before[1]['state'].items()}
    _played(step, recorder, torch.tensor(loss), [g * float('nan') for g in _grads(1)])
    torch.testing.assert_close(params, before[0], rtol=0, atol=0)
    torch.testing.assert_close(optimizers[0].state_dict()['state'], before[1]['state'], rtol=0, atol=0)


def test_a_schedule_is_asked_before_each_step_and_a_loaded_state_is_gone_on_with():
    asked = []
    params = _params()
    optimizer = Adam(params, lr=lambda: asked.append(1) or 0.1 * len(asked))
    other_params = _params()
    other = Adam(other_params, lr=0.1)
    recorder = _Recorder(params)
    step = AdamStep.of(_Algorithm(optimizer), recorder)
    seen, before = [], len(asked)
    for i in range(3):
        for p, grad in zip(other_params, _grads(i)):
            p.grad = grad
        _played(step, recorder, torch.zeros(()), _grads(i))
        seen.append(optimizer.param_groups[0]['lr'])
        assert len(asked) == before + i + 1 and seen[-1] == 0.1 * len(asked)
        other.param_groups[0]['lr'] = seen[-1]
        other.step()
    torch.testing.assert_close(params, other_params, atol=1e-6, rtol=1e-5)
    optimizer.load_state_dict(other.state_dict())  # other tensors
    assert step.is_current
    _played(step, recorder, torch.zeros(()), _grads(7))
    assert all(int(s['step']) == 4 for s in optimizer.state.values())


@pytest.mark.parametrize('optimizer', [
    lambda p: SGD(p, lr=0.1), lambda p: AdamTF(p, lr=0.1), lambda p: Adam(p, lr=0.1, amsgrad=True),
    lambda p: Adam(p, lr=0.1, gradient_clipping=1.0), lambda p: Adam(p[:-1], lr=0.1),
    lambda p: Adam([*p, nn.Parameter(torch.ones(2))], lr=0.1)],
    ids=['SGD', 'AdamTF', 'amsgrad', 'clips each', 'not all', 'more'])
def test_what_it_cannot_do_the_optimizer_does(optimizer):
    params = _params()
    assert AdamStep.of(_Algorithm(optimizer(params)), _Recorder(params)) is None


def test_steps_are_left_to_optimizers_whose_gradients_are_needed_or_double():
    params = _params()
    algorithm = _Algorithm(Adam(params, lr=0.1))
    assert AdamStep.of(algorithm, _Recorder(params)) is not None
    algorithm.gradient_averager = object()
    assert AdamStep.of(algorithm, _Recorder(params)) is None
    double = [nn.Parameter(p.detach().double()) for p in params]
    assert AdamStep.of(_Algorithm(Adam(double, lr=0.1)), _Recorder(double)) is None


@pytest.mark.parametrize('change', ['hook', 'betas', 'eps', 'weight_decay', 'amsgrad', 'averager'])
def test_a_record_is_not_current_once_the_step_would_be_another(change):
    params = _params()
    algorithm = _Algorithm(Adam(params, lr=0.1))
    step = AdamStep.of(algorithm, _Recorder(params))
    group = algorithm.optimizers[0].param_groups[0]
    assert step.is_current
    group['lr'] = 0.7
    assert step.is_current
    if change == 'hook':
        algorithm.optimizers[0].register_step_pre_hook(lambda *_: None)
    elif change == 'averager':
        algorithm.gradient_averager = object()
    else:
        group[change] = {'betas': (0.5, 0.5), 'eps': 1.0, 'weight_decay': 1.0, 'amsgrad': True}[change]
    assert not step.is_current


def _agent(**config):
    torch.manual_seed(0)
    context.reset()
    env = PolicyUnittestEnv(batch_size=4, episode_length=5, action_type=ActionType.Discrete)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=8, mini_batch_length=2,
                           num_updates_per_train_iter=3, whole_replay_buffer_training=False, clear_replay_buffer=False,
                           replay_buffer_length=100, compile=True, **config)
    rl = partial(DqnAlgorithm, q_network_cls=partial(QNetwork, fc_layer_params=(8, )))
    agent = Agent(env.observation_spec(), env.action_spec(), env=env, config=config, rl_algorithm_cls=rl,
                  optimizer=Adam(lr=1e-2, gradient_clipping=0.1, clip_by_global_norm=True))
    agent.finalize()
    return agent


def test_hooks_are_called_also_once_steps_were_compiled():
    agent = _agent()
    agent.train_iter()
    (optimizer, ) = agent.optimizers()
    assert optimizer.grad_norm > 0 and not any(p.grad is not None for p in agent.parameters())
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    agent.train_iter()
    assert len(called) == 3 and {int(s['step']) for s in optimizer.state.values()} == {6}


def test_summaries_show_the_gradients_that_the_optimizer_was_given(monkeypatch):
    shown = []
    monkeypatch.setattr('alfx.summary.summary_utils.summarize_gradients',
                        lambda params: shown.append([p.grad.clone() for _, p in params]))
    agent = _agent(summarize_grads_and_vars=True)
    with summary.push_summary_writer(_NoWriter()), context.record_if(True):
        agent.train_iter()
    norm = torch.cat([x.flatten() for x in shown[-1]]).norm()
    assert shown and 0 < norm <= 0.1 * (1 + 1e-5)  # clipped


def test_a_compiled_record_can_be_copied_and_the_copy_is_not_current():
    agent = _agent()
    agent.train_iter()
    (record, ) = agent._fast_update._records.values()
    assert record.makes_step and record.is_current and not copy.deepcopy(record).is_current


def test_moments_of_another_shape_are_refused():
    params, (optimizer, ) = _make(partial(Adam, lr=0.1), False)
    recorder = _Recorder(params)
    step = AdamStep.of(_Algorithm(optimizer), recorder)
    _played(step, recorder, torch.zeros(()), _grads(0))
    state = optimizer.state_dict()
    state['state'][1]['exp_avg'] = torch.zeros(1)
    optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=r'expected a moment \(5,\) .* found \(1,\)'):
        step.prepare()


@pytest.mark.parametrize('name', ['_before_step', 'clip_gradients', 'buckets', 'step'])
def test_a_subclass_that_does_something_else_steps_by_itself(name):
    params = _params()
    method = getattr(Adam, name)
    other = type('Other', (Adam, ), {name: lambda self, *args: method(self, *args)})
    assert AdamStep.of(_Algorithm(other(params, lr=0.1)), _Recorder(params)) is None
