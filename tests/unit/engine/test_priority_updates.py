"""Exponents, importance weights and new priorities of prioritized replay."""
from types import SimpleNamespace

import pytest
import torch

from alfx.data_structures import BatchInfo, LossInfo
from alfx.engine.priority_updates import importance_weights, update_priorities


def _config(**changes):
    settings = dict(priority_replay_alpha=0.5, priority_replay_beta=0.5, priority_replay_eps=0.01,
                    normalize_importance_weights_by_max=False)
    return SimpleNamespace(**{**settings, **changes})


class _Buffer:
    prioritized_sampling = True

    def update_priority(self, env_ids, positions, priorities):
        self.updated = env_ids, positions, priorities


def test_weights_are_the_inverse_relative_probability_to_the_power_of_beta():
    info = BatchInfo(importance_weights=torch.tensor([4.0, 1.0, 0.25]))
    weights = importance_weights(_config(), info).importance_weights
    assert weights.tolist() == [0.5, 1.0, 2.0]
    weights = importance_weights(_config(normalize_importance_weights_by_max=True), info).importance_weights
    assert weights.tolist() == [0.25, 0.5, 1.0]


def test_exponents_may_be_schedules():
    info = BatchInfo(importance_weights=torch.tensor([4.0]))
    beta = iter([0.0, 1.0])
    config = _config(priority_replay_beta=lambda: next(beta))
    assert [importance_weights(config, info).importance_weights.item() for _ in range(2)] == [1.0, 0.25]


def test_uniform_samples_have_no_weights():
    assert importance_weights(_config(), BatchInfo()).importance_weights == ()


def test_eps_is_added_before_the_power():
    buffer = _Buffer()
    info = BatchInfo(env_ids=torch.tensor([0, 1]), positions=torch.tensor([5, 6]))
    update_priorities(_config(), buffer, info, LossInfo(priority=torch.tensor([0.0, 0.24])))
    torch.testing.assert_close(buffer.updated[2], torch.tensor([0.1, 0.5]))  # sqrt(0.01), sqrt(0.25)
    assert buffer.updated[:2] == (info.env_ids, info.positions)


def test_a_loss_without_priority_is_rejected_with_the_remedy():
    with pytest.raises(ValueError, match='calculate_priority'):
        update_priorities(_config(), _Buffer(), BatchInfo(), LossInfo())


def test_uniform_sampling_updates_no_priorities():
    update_priorities(_config(), SimpleNamespace(prioritized_sampling=False), BatchInfo(), LossInfo())
