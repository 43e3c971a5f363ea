"""Debug summaries of losses, normalizers and importance ratios."""
import collections
import math

import pytest
import torch

from alfx import context
from alfx.algorithms.actor_critic_algorithm import ActorCriticInfo
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.ppo_algorithm import PPOInfo
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.td_loss import TDLoss, TDQRLoss
from alfx.tensor_specs import TensorSpec
from alfx.utils import dist_utils, losses, normalizers, value_ops

Info = collections.namedtuple('Info', ['reward', 'step_type', 'discount'])


class Recorder:
    """Stands in for a summary writer."""

    def __init__(self):
        self.scalars, self.histograms = {}, set()

    def add_scalar(self, name, value, *args, **kwargs):
        self.scalars[name] = value

    def add_histogram(self, name, *args, **kwargs):
        self.histograms.add(name)


@pytest.fixture
def recorder():
    writer = Recorder()
    context.set_summary_writer(writer)
    with context.record_if(True):
        yield writer


def make_info(*dims):
    return Info(torch.randn(4, 3, *dims), torch.tensor([[1, 1, 2], [1, 2, 0], [1, 0, 1], [1, 1, 1]]), torch.ones(4, 3))


def test_td_losses_write_how_well_values_explain_returns(recorder):
    value = torch.randn(4, 3, 2)
    TDLoss(debug_summaries=True, name='critic')(make_info(), value[..., 0], value[..., 0])
    assert 'critic/explained_variance_of_return_by_value' in recorder.scalars
    assert {'critic/values/mean', 'critic/returns/mean', 'critic/td_error/mean'} <= set(recorder.scalars)
    TDLoss(debug_summaries=True, normalize_target=True, name='many')(make_info(2), value, value)
    assert 'many/values/1/mean' in recorder.scalars
    value = torch.tensor([1.0, 3.0]).expand(4, 3, 2)
    TDQRLoss(num_quantiles=2, debug_summaries=True, name='quantiles')(make_info(), value, value)
    assert 'quantiles/returns/mean' in recorder.scalars and recorder.scalars['quantiles/values/mean'] == 2.0


def test_steps_without_successor_are_left_out_of_the_summaries(recorder):
    info = make_info()
    value = torch.where(info.step_type == 2, torch.tensor(1e6), torch.tensor(2.0))
    TDLoss(debug_summaries=True, name='critic')(info, value, value)
    assert recorder.scalars['critic/values/mean'] == 2.0
    info, value = make_info(2), value.unsqueeze(-1) * torch.tensor([1.0, 3.0])
    TDLoss(debug_summaries=True, name='many')(info, value, value)
    assert [recorder.scalars[f'many/values/{k}/mean'] for k in range(2)] == [2.0, 6.0]


def test_normalizers_write_their_statistics(recorder):
    spec = {'a': TensorSpec((3, )), 'b': TensorSpec(())}
    normalizer = normalizers.AdaptiveNormalizer(spec, debug_summaries=True, name='observation')
    normalizer({'a': torch.ones(5, 3), 'b': torch.ones(5)})
    assert recorder.scalars['observation/mean/a/2'] == 1.0 and recorder.scalars['observation/variance/b'] == 0.0
    normalizers.ScalarEMNormalizer(debug_summaries=True, name='reward')(torch.ones(5))
    assert recorder.scalars['reward/mean'] == 1.0


def test_importance_ratios_write_the_fraction_that_is_clipped(recorder):
    new, old = (dist_utils.Categorical(probs=torch.tensor(p)) for p in ([[0.9, 0.1], [0.5, 0.5]],
                                                                        [[0.5, 0.5], [0.5, 0.5]]))
    value_ops.action_importance_ratio(new, old, torch.zeros(2, dtype=torch.int64), 'double_sided', 'ppo', 0.2, 0.0,
                                      False, True)
    assert recorder.scalars['ppo/clip_fraction'] == 0.5
    assert 'ppo/importance_ratio' in recorder.histograms


def test_ppo_logs_divergence_and_clipped_fraction_by_hand(recorder):
    """Probabilities 0.25 to 0.5 and 0.5 to 0.5: r = 2 and 1; r - 1 - log r = 1 - log 2 and 0."""
    PPOLoss(normalize_advantages=False, importance_ratio_clipping=0.2)(PPOInfo(
        step_type=torch.ones(1, 2, dtype=torch.int32), action=torch.zeros(1, 2, dtype=torch.int64),
        rollout_log_prob=torch.tensor([[0.25, 0.5]]).log(), returns=torch.zeros(1, 2), advantages=torch.ones(1, 2),
        action_distribution=dist_utils.Categorical(logits=torch.zeros(1, 2, 2)), value=torch.zeros(1, 2)))
    assert recorder.scalars['train/approx_kl'] == pytest.approx((1 - math.log(2)) / 2)
    assert recorder.scalars['train/clip_fraction'] == 0.5


def test_mean_squared_loss_logs_explained_variance(recorder):
    target = torch.randn(4, 2)
    losses.MeanSquaredLoss(name='model')(target, target)
    assert recorder.scalars['model/explained_variance'] == 1.0 and recorder.scalars['model/loss'] == 0.0
    # targets 0 and 4 (variance 4), predictions 1 and 3 (error -1 and 1, variance 1): 1 - 1 / 4
    losses.MeanSquaredLoss(name='model')(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0]]))
    assert recorder.scalars['model/explained_variance'] == 0.75


def test_actor_critic_losses_write_moments_of_their_advantages(recorder):
    """Returns 1 and 3 of episodes of one step, values 0: advantages 1 and 3, and 0 at the last step."""
    info = ActorCriticInfo(step_type=torch.tensor([[0, 0], [2, 2]]), discount=torch.zeros(2, 2),
                           reward=torch.tensor([[0.0, 0.0], [1.0, 3.0]]), value=torch.zeros(2, 2),
                           action=torch.zeros(2, 2, dtype=torch.int64),
                           action_distribution=dist_utils.Categorical(logits=torch.zeros(2, 2, 2)))
    ActorCriticLoss(debug_summaries=True, name='loss')(info)
    assert recorder.scalars['loss/advantages/mean'] == 1.0
    assert recorder.scalars['loss/advantages/std'] == pytest.approx(1.5**0.5)


def test_nothing_is_written_unless_debugging(recorder):
    normalizers.ScalarEMNormalizer(name='reward')(torch.ones(5))
    one = dist_utils.Categorical(logits=torch.zeros(2, 2))
    value_ops.action_importance_ratio(one, one, torch.zeros(2, dtype=torch.int64), 'double_sided', 'ppo', 0.2, 0.0,
                                      False, False)
    TDLoss(name='critic')(make_info(), torch.zeros(4, 3), torch.zeros(4, 3))
    assert set(recorder.scalars) == {'train/values', 'train/targets'} and not recorder.histograms


def test_nothing_is_written_unless_summaries_are_recorded(recorder):
    with context.record_if(False):
        TDLoss(debug_summaries=True)(make_info(), torch.zeros(4, 3), torch.zeros(4, 3))
        losses.MeanSquaredLoss()(torch.ones(3, 2), torch.ones(3, 2))
    assert not recorder.scalars and not recorder.histograms
