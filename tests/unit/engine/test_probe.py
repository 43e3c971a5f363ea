"""Probes of specs leave an algorithm unchanged."""
import torch
from torch import nn

from alfx.engine.probe import unchanged


def test_buffers_are_restored_whether_changed_or_replaced():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    mean, var = module[0].running_mean, module[0].running_var
    with unchanged(module):
        mean += 1
        module[0].running_var = var + 1
    assert module[0].running_mean is mean and module[0].running_var is var
    assert torch.equal(mean, torch.zeros(2)) and torch.equal(var, torch.ones(2))
