"""Optimizers: late parameters, clipping, schedules, state, errors."""
import copy
import io
import math

import gin
import pytest
import torch

from alfx import optimizers
from alfx.optimizers import SGD, Adam, AdamTF, AdamW, RAdam, RMSprop
from alfx.optimizers.clipping import clip_divisor, global_norm

ALL = [Adam, AdamW, AdamTF, SGD, RMSprop, RAdam]
SHAPES = [(3, 4), (4, ), (2, 1, 3), ()]


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def set_gradients(parameters, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = scale * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def run(optimizer, parameters, seeds):
    for seed in seeds:
        set_gradients(parameters, seed)
        optimizer.step()
    return [p.detach().clone() for p in parameters]


def assert_same(actual, expected, **kwargs):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **kwargs)


@pytest.mark.parametrize('cls', ALL)
class TestEveryOptimizer:

    def test_parameters_added_later_are_updated_as_those_given_at_once(self, cls):
        first, second = make_parameters(), make_parameters()
        at_once = cls(first, lr=0.1)
        later = cls(lr=0.1)
        assert later.param_groups == []
        later.step()
        later.zero_grad()
        later.add_param_group({'params': second})
        assert_same(run(at_once, first, range(3)), run(later, second, range(3)), rtol=0, atol=0)

    def test_groups_added_between_steps_join_with_their_own_learning_rate(self, cls):
        parameters = make_parameters()
        optimizer = cls(parameters[:2], lr=0.1)
        set_gradients(parameters, 0)
        optimizer.step()
        optimizer.add_param_group({'params': iter(parameters[2:]), 'lr': 0.0})
        before = [p.detach().clone() for p in parameters]
        set_gradients(parameters, 1)
        optimizer.step()
        assert [torch.equal(p, b) for p, b in zip(parameters, before)] == [False, False, True, True]

    def test_a_parameter_without_gradient_does_not_change(self, cls):
        parameters, others = make_parameters(), make_parameters()
        optimizer, only = cls(parameters, lr=0.1), cls(others[1:], lr=0.1)
        start = parameters[0].detach().clone()
        for seed in range(3):
            set_gradients(parameters, seed)
            set_gradients(others, seed)
            parameters[0].grad = None
            optimizer.step()
            only.step()
        assert torch.equal(parameters[0], start)
        assert_same(parameters[1:], others[1:], rtol=0, atol=0)

    def test_the_learning_rate_follows_a_schedule(self, cls):
        rate = 0.5
        parameters, constant = make_parameters(), make_parameters()
        optimizer = cls(parameters, lr=lambda: rate)
        assert optimizer.param_groups[0]['lr'] == 0.5
        rate = 0.01
        assert_same(run(optimizer, parameters, [0]), run(cls(constant, lr=0.01), constant, [0]), rtol=0, atol=0)
        assert optimizer.param_groups[0]['lr'] == 0.01

    def test_a_parameter_group_may_have_its_own_schedule(self, cls):
        optimizer = cls(lr=lambda: 0.5)
        a, b, c = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
        optimizer.add_param_group({'params': [a]})
        optimizer.add_param_group({'params': [b], 'lr': 0.1})
        optimizer.add_param_group({'params': [c], 'lr': lambda: 0.2})
        optimizer.step()
        assert [g['lr'] for g in optimizer.param_groups] == [0.5, 0.1, 0.2]

    def test_saving_without_pickle_and_loading_continues_unchanged(self, cls):
        parameters = make_parameters()
        kwargs = {} if cls in (AdamW, Adam, AdamTF, RAdam) else {'momentum': 0.9}
        optimizer = cls(parameters[:2], lr=0.1, **kwargs)
        run(optimizer, parameters, range(2))
        optimizer.add_param_group({'params': parameters[2:], 'lr': 0.3})
        run(optimizer, parameters, range(2, 4))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)

        others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        other = cls(others[:2], lr=0.7, **kwargs)
        other.add_param_group({'params': others[2:]})
        other.load_state_dict(state)
        assert_same(run(other, others, range(4, 8)), run(optimizer, parameters, range(4, 8)), rtol=0, atol=0)

    def test_a_loaded_state_is_a_copy(self, cls):
        parameters, others = make_parameters(), make_parameters()
        kwargs = {} if cls in (AdamW, Adam, AdamTF, RAdam) else {'momentum': 0.9}
        optimizer, other = cls(parameters, lr=0.1, **kwargs), cls(others, lr=0.1, **kwargs)
        run(optimizer, parameters, range(2))
        state = optimizer.state_dict()
        other.load_state_dict(state)
        before = copy.deepcopy(state['state'][0])
        run(other, others, range(3))
        for key, value in before.items():
            assert torch.equal(torch.as_tensor(state['state'][0][key]), torch.as_tensor(value)), key

    def test_a_deep_copy_keeps_clipping_schedule_and_state(self, cls):
        parameters = make_parameters()
        optimizer = cls(parameters, lr=_one_tenth, gradient_clipping=0.1, clip_by_global_norm=True, name='mine')
        run(optimizer, parameters, range(2))
        other, others = copy.deepcopy((optimizer, parameters))
        assert (other.name, other.gradient_clipping, other.clip_by_global_norm) == ('mine', 0.1, True)
        assert_same(run(other, others, range(2, 4)), run(optimizer, parameters, range(2, 4)), rtol=0, atol=0)

    def test_the_global_norm_of_all_groups_is_clipped(self, cls):
        parameters, others = make_parameters(), make_parameters()
        optimizer = cls(parameters[:2], lr=0.1, gradient_clipping=0.5, clip_by_global_norm=True)
        optimizer.add_param_group({'params': parameters[2:]})
        plain = cls(others, lr=0.1)
        set_gradients(parameters, 0)
        set_gradients(others, 0)
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in others))
        for p in others:
            p.grad.mul_(0.5 / norm)
        optimizer.step()
        plain.step()
        assert optimizer.grad_norm.item() == pytest.approx(norm)
        assert_same([p.grad for p in parameters], [p.grad for p in others])
        assert_same(parameters, others)

    def test_each_gradient_is_clipped_separately_by_default(self, cls):
        parameters = make_parameters()
        optimizer = cls(parameters, lr=0.1, gradient_clipping=0.5)
        set_gradients(parameters, 0)
        parameters[1].grad.mul_(0.01)
        small = parameters[1].grad.clone()
        optimizer.step()
        assert torch.equal(parameters[1].grad, small)
        assert [p.grad.norm().item() for p in (parameters[0], parameters[2])] == pytest.approx([0.5, 0.5])

    def test_a_gradient_within_the_bound_is_not_changed_at_all(self, cls):
        parameters, others = make_parameters(), make_parameters()
        clipped = cls(parameters, lr=0.1, gradient_clipping=1e3, clip_by_global_norm=True)
        assert_same(
            run(clipped, parameters, range(3)), run(cls(others, lr=0.1), others, range(3)), rtol=0, atol=0)

    def test_a_closure_gives_the_loss_and_the_gradients(self, cls):
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = cls([parameter], lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 3.0
        assert (parameter < 1).all()

    def test_hooks_around_a_step_are_called_once(self, cls):
        parameters, calls = make_parameters(), []
        optimizer = cls(parameters, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: calls.append('pre'))
        handle = optimizer.register_step_post_hook(lambda *_: calls.append('post'))
        run(optimizer, parameters, [0])
        handle.remove()
        run(optimizer, parameters, [1])
        assert calls == ['pre', 'post', 'pre']

    def test_zero_grad_forgets_or_fills(self, cls):
        parameters = make_parameters()
        optimizer = cls(parameters, lr=0.1)
        set_gradients(parameters, 0)
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in parameters)
        optimizer.zero_grad()
        assert all(p.grad is None for p in parameters)

    def test_wrong_arguments_are_rejected_by_name(self, cls):
        with pytest.raises(ValueError, match=rf'{cls.__name__}.lr must be a number >= 0 .*found int -1'):
            cls(lr=-1)
        with pytest.raises(ValueError, match=rf"{cls.__name__}.lr must be a number >= 0 .*found str 'fast'"):
            cls(lr='fast')
        with pytest.raises(TypeError, match=rf'{cls.__name__}.lr: .*found None'):
            cls(lr=None)
        with pytest.raises(ValueError, match='gradient_clipping must be a number > 0 or None, found int 0'):
            cls(lr=0.1, gradient_clipping=0)
        with pytest.raises(TypeError, match=r'gradient_clipping: expected a number or None, found True'):
            cls(lr=0.1, gradient_clipping=True)

    def test_optimizer_arguments_attached_to_a_parameter_are_rejected_by_name(self, cls):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.opt_args = {'fixed_norm': True}
        with pytest.raises(ValueError, match=r'weight_opt_args.*not support'):
            cls([parameter], lr=0.1)

    def test_a_parameter_has_one_group(self, cls):
        parameters = make_parameters()
        optimizer = cls(parameters, lr=0.1)
        with pytest.raises(ValueError):
            optimizer.add_param_group({'params': parameters[:1]})


def _one_tenth():
    return 0.1


def test_adam_loads_and_continues_a_state_of_torch_adam():
    parameters, others = make_parameters(), make_parameters()
    torch_adam = torch.optim.Adam(parameters, lr=0.1)
    run(torch_adam, parameters, range(3))
    adam = Adam(others, lr=0.1)
    for p, o in zip(parameters, others):
        o.data.copy_(p)
    adam.load_state_dict(torch_adam.state_dict())
    assert_same(run(adam, others, range(3, 9)), run(torch_adam, parameters, range(3, 9)))


def test_a_transposed_gradient_is_read_by_index_and_not_by_memory_order():
    straight, transposed = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    straight.grad = torch.arange(6.).reshape(3, 2).T.contiguous()
    transposed.grad = torch.arange(6.).reshape(3, 2).T
    for p in (straight, transposed):
        Adam([p], lr=0.1, eps=1.0).step()
    assert torch.equal(straight, transposed)


def test_channels_last_weights_are_updated_as_others():
    weight = torch.randn(4, 3, 2, 2)
    a = torch.nn.Parameter(weight.clone())
    b = torch.nn.Parameter(weight.clone(memory_format=torch.channels_last))
    first, second = Adam([a], lr=0.1), Adam([b], lr=0.1)
    for _ in range(3):
        a.grad = torch.randn_like(weight)
        b.grad = a.grad.clone()
        first.step()
        second.step()
    torch.testing.assert_close(a, b)


def test_parameters_of_several_types_are_clipped_together():
    parameters = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))]
    optimizer = Adam(parameters, lr=0.1, gradient_clipping=1.0, clip_by_global_norm=True)
    for p in parameters:
        p.grad = torch.full_like(p, 3.0)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(72))
    assert global_norm([p.grad.float() for p in parameters]) == pytest.approx(1.0)


def test_the_global_norm_covers_all_elements_large_or_nan():
    """Global norm of all elements, however large; NaN if one element is NaN."""
    assert global_norm([torch.tensor([3.0, 4.0]), torch.tensor(12.0)]) == 13.0
    assert global_norm([torch.full((4, ), 2.0, dtype=torch.bfloat16)], [torch.zeros(0), torch.tensor(3.0)]) == 5.0
    assert global_norm([torch.tensor(1e19)] * 4) == pytest.approx(2e19)  # squares that float32 cannot add
    assert math.isnan(global_norm([torch.tensor([math.nan, 1.0]), torch.tensor([math.inf])]))


@pytest.mark.parametrize('make', [float, torch.tensor])
def test_a_norm_within_the_bound_is_divided_by_exactly_1_and_nan_by_nan(make):
    assert [float(clip_divisor(make(norm), 0.3)) for norm in (0.0, 0.1, 0.3)] == [1.0, 1.0, 1.0]
    assert float(clip_divisor(make(0.75), 0.3)) == pytest.approx(2.5)
    assert math.isnan(clip_divisor(make(math.nan), 0.3))


@pytest.mark.parametrize('cls', ALL)
def test_global_clipping_spreads_a_nan_gradient_to_all_parameters(cls):
    parameters = make_parameters()
    set_gradients(parameters, 0)
    parameters[1].grad[0] = math.nan
    optimizer = cls(parameters, lr=0.1, gradient_clipping=1.0, clip_by_global_norm=True)
    optimizer.step()
    assert math.isnan(optimizer.grad_norm) and all(p.isnan().all() for p in parameters)


def test_adam_counts_steps_per_parameter_even_in_shared_memory():
    parameters = make_parameters()
    optimizer = Adam(parameters, lr=0.1)
    run(optimizer, parameters, range(2))
    optimizer.state[parameters[1]]['step'].share_memory_()
    run(optimizer, parameters, range(2, 5))
    parameters[0].grad = None
    optimizer.step()
    assert [optimizer.state[p]['step'].item() for p in parameters] == [5.0, 6.0, 6.0, 6.0]


@pytest.mark.parametrize('cls', [Adam, AdamW, AdamTF])
def test_without_any_gradient_adam_neither_updates_nor_counts(cls):
    parameters = make_parameters()
    optimizer = cls(parameters, lr=0.1)
    before = run(optimizer, parameters, range(2))
    optimizer.zero_grad()
    optimizer.step()
    assert_same(parameters, before, rtol=0, atol=0)
    assert [optimizer.state[p]['step'].item() for p in parameters] == [2.0] * 4


def test_adam_rejects_parameters_its_kernel_cannot_update():
    with pytest.raises(TypeError, match='floating-point'):
        Adam([torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)])
    with pytest.raises(ValueError, match='without gaps'):
        Adam([torch.nn.Parameter(torch.zeros(4, 4)[:, ::2])])
    for kwargs in ({'betas': (0.9, 1.0)}, {'eps': -1.0}, {'weight_decay': -1.0}):
        with pytest.raises(ValueError, match=f'Adam.{next(iter(kwargs))}'):
            Adam(**kwargs)


def test_adam_tf_forgets_everything_on_reset():
    parameters, others = make_parameters(), make_parameters()
    optimizer = AdamTF(parameters, lr=0.1)
    run(optimizer, parameters, range(3))
    optimizer.reset_state()
    for p, o in zip(parameters, others):
        o.data.copy_(p)
    assert_same(run(optimizer, parameters, range(2)), run(AdamTF(others, lr=0.1), others, range(2)), rtol=0, atol=0)


def test_a_conf_file_sets_arguments_within_a_scope():
    gin.parse_config("""
        ac/Adam.lr = 0.25
        ac/Adam.gradient_clipping = 2.0
        alfx.optimizers.SGD.lr = 0.5
        """)
    with gin.config_scope('ac'):
        scoped = Adam()
    assert (scoped.defaults['lr'], scoped.gradient_clipping) == (0.25, 2.0)
    assert (Adam().defaults['lr'], SGD().defaults['lr'], AdamTF().defaults['lr']) == (1e-3, 0.5, 1e-3)


def test_any_optimizer_of_torch_can_be_wrapped():
    cls = optimizers.wrap_optimizer(torch.optim.RAdam)
    parameters, others = make_parameters(), make_parameters()
    wrapped = cls(lr=0.1, gradient_clipping=1e6)
    wrapped.add_param_group({'params': parameters})
    assert (cls.__name__, wrapped.name) == ('RAdam', 'RAdam')
    assert_same(
        run(wrapped, parameters, range(8)), run(torch.optim.RAdam(others, lr=0.1), others, range(8)), rtol=0, atol=0)
    with pytest.raises(TypeError, match='already'):
        optimizers.wrap_optimizer(Adam)
    with pytest.raises(TypeError, match='subclass of torch.optim.Optimizer'):
        optimizers.wrap_optimizer(dict)
