"""TargetUpdater."""
import pytest
import torch
from torch import nn

from alfx.utils.target_updater import TargetUpdater


def _pair():
    torch.manual_seed(0)
    return nn.Linear(3, 2), nn.Linear(3, 2)


def test_targets_start_as_copies_by_default():
    model, target = _pair()
    TargetUpdater(model, target)
    assert torch.equal(model.weight, target.weight) and model.weight is not target.weight
    model, target = _pair()
    TargetUpdater(model, target, init_copy=False)
    assert not torch.equal(model.weight, target.weight)


def test_targets_move_by_tau_of_the_way():
    model, target = nn.Linear(1, 1), nn.Linear(1, 1)
    update = TargetUpdater(model, target, tau=0.25)
    with torch.no_grad():
        target.weight.fill_(1.0)
        model.weight.fill_(5.0)
    update()
    assert target.weight.item() == 2.0  # 1 + 0.25 * (5 - 1)
    update()
    assert target.weight.item() == 2.75


def test_only_every_period_th_call_updates_and_the_count_is_checkpointed():
    model, target = _pair()
    update = TargetUpdater(model, target, period=3)
    with torch.no_grad():
        model.weight.add_(1.0)
    update(), update()
    assert not torch.equal(model.weight, target.weight)
    resumed = TargetUpdater(model, target, period=3, init_copy=False)
    resumed.load_state_dict(update.state_dict())
    resumed()
    assert torch.equal(model.weight, target.weight)


def test_a_delayed_update_follows_the_models_of_the_update_before():
    model, target = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    update = TargetUpdater(model, target, delayed_update=True)
    seen = []
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        update()
        seen.append(target.weight.item())
    assert seen[1:] == [1.0, 2.0]


def test_targets_are_not_trained_and_not_registered_twice():
    model, target = _pair()
    update = TargetUpdater(model, target)
    assert not any(p.requires_grad for p in target.parameters())
    assert not list(update.parameters())


def test_buffers_are_copied():
    model, target = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    update = TargetUpdater(model, target, tau=0.1)
    model(torch.randn(8, 2))
    update()
    assert torch.equal(model.running_mean, target.running_mean)
    assert torch.equal(model.num_batches_tracked, target.num_batches_tracked)


def test_buffers_that_a_model_replaces_are_copied():
    model, target = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    update = TargetUpdater(model, target, tau=0.1)
    for _ in range(2):
        model.running_mean = model.running_mean + 1
        update()
    assert target.running_mean.tolist() == [2, 2]


def test_parameters_and_sequences_of_models_are_accepted():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    model, target = _pair()
    TargetUpdater([a, model], [b, target])
    assert torch.equal(a, b) and torch.equal(model.bias, target.bias)


@pytest.mark.parametrize('arguments', [dict(tau=0.0), dict(tau=1.5), dict(period=0)])
def test_values_out_of_range_are_rejected(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        TargetUpdater(*_pair(), **arguments)


def test_models_that_do_not_correspond_are_rejected():
    with pytest.raises(ValueError, match='same parameters'):
        TargetUpdater(nn.Linear(3, 2), nn.Linear(2, 3))


@pytest.mark.parametrize('delayed', [False, True])
@pytest.mark.parametrize('tau', [0.5, 1.0])
def test_parts_that_target_and_model_share_are_trained_and_not_moved(tau, delayed):
    shared = nn.Linear(2, 2)
    model, target = (nn.ModuleDict({'shared': shared, 'own': nn.Linear(2, 2)}) for _ in range(2))
    update = TargetUpdater(model, target, tau=tau, delayed_update=delayed)
    assert all(p.requires_grad for p in model.parameters())
    assert [p.requires_grad for p in target['own'].parameters()] == [False, False]
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        update()
        assert (shared.weight == value).all() and not (target['own'].weight > value).any()
    assert update.copy_to_targets(set(model.parameters())) == set(target['own'].parameters())
