"""Tests of the summaries of losses, gradients, actions, distributions and nests."""

import numpy as np
import pytest
import torch
from torch import distributions as td

import alfx.distributions.nests  # noqa: F401 (makes distributions nests)
from alfx import BoundedTensorSpec, LossInfo, TensorSpec, context
from alfx.summary import summary_utils


class RecordingWriter:
    """A writer that stores everything written to it."""

    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, step, walltime=None):
        self.scalars[tag] = value

    def add_histogram(self, tag, counts, edges, stats, step, walltime=None):
        self.histograms[tag] = (counts, edges)


@pytest.fixture
def written():
    writer = RecordingWriter()
    context.set_summary_writer(writer)
    with context.record_if(True):
        yield writer


def test_losses_are_averaged_and_named_by_their_path(written):
    extra = {'actor': torch.tensor([2., 4.]), 'n': 3, 'none': None}
    summary_utils.summarize_loss(LossInfo(loss=torch.tensor([[1., 3.]]), extra=extra))
    assert written.scalars == {'loss': 2.0, 'loss/actor': 3.0, 'loss/n': 3.0}


def test_gradients_and_variables_are_norms_and_histograms(written):
    parameter = torch.nn.Parameter(torch.tensor([3., 4.]))
    unused = torch.nn.Parameter(torch.ones(2))
    (parameter * torch.tensor([6., 8.])).sum().backward()
    named = [('w', parameter), ('unused', unused)]
    summary_utils.summarize_variables(named)
    summary_utils.summarize_gradients(named)
    assert written.scalars['summarize_vars/w/norm'] == 5
    assert written.scalars['summarize_grads/w_gradient/norm'] == 10
    assert written.scalars['summarize_grads/global_grad_norm'] == 10
    assert 'summarize_grads/unused_gradient/norm' not in written.scalars
    assert 'summarize_vars/w/value' in written.histograms


def test_discrete_histogram_has_one_bucket_a_value(written):
    summary_utils.histogram_discrete('h', torch.tensor([0, 1, 1, 2, 9]), 0, 2)
    counts, edges = written.histograms['h']
    assert list(counts) == [1, 2, 2]  # 9 counts with the last one
    assert list(edges) == [-0.5, 0.5, 1.5, 2.5]


def test_continuous_histogram_clips_into_the_range(written):
    summary_utils.histogram_continuous('h', torch.tensor([-5., 0.25, 0.75, 5.]), 0., 1., bucket_count=2)
    assert list(written.histograms['h'][0]) == [2, 2]


def test_actions_are_summarized_for_each_dimension(written):
    specs = {'d': BoundedTensorSpec((), torch.int64, 0, 2), 'c': BoundedTensorSpec((2, ), torch.float32, -1, 1)}
    actions = {'d': torch.tensor([0, 2, 2]), 'c': torch.tensor([[0., 1.], [0., 1.], [0., -1.]])}
    summary_utils.summarize_action(actions, specs)
    assert list(written.histograms['action/d'][0]) == [1, 0, 2]
    assert set(written.histograms) == {'action/d', 'action/c/0', 'action/c/1'}
    counts, edges = written.histograms['action/c/1']
    assert (counts[0], counts[-1], edges[0], edges[-1]) == (1, 2, -1, 1)


def test_actions_without_bounds_are_summarized(written):
    specs = {'c': TensorSpec((2, )), 'd': TensorSpec((), torch.int64)}
    summary_utils.summarize_action({'c': torch.tensor([[0., 4.], [1., 5.]]), 'd': torch.tensor([2, 7])}, specs)
    edges = {name: (edges[0], edges[-1]) for name, (_, edges) in written.histograms.items()}
    assert edges == {'action/c/0': (0, 1), 'action/c/1': (4, 5), 'action/d': (2, 7)}


def test_distributions_are_summarized_by_parameters_and_entropy(written):
    normal = td.Independent(td.Normal(torch.zeros(4, 2), torch.ones(4, 2)), 1)
    summary_utils.summarize_distribution('pi', {'c': normal, 'd': td.Categorical(logits=torch.zeros(4, 2))})
    assert written.scalars['pi/c/loc/mean'] == 0
    assert written.scalars['pi/c/entropy'] == pytest.approx(1 + np.log(2 * np.pi))
    assert written.scalars['pi/d/entropy'] == pytest.approx(np.log(2))
    assert written.scalars['pi/d/probs/mean'] == 0.5


def test_loss_is_averaged_for_each_category(written):
    info = LossInfo(loss=torch.tensor([[1., 2., 3.], [3., 4., 5.]]), batch_label=torch.tensor([0, 1, 0]),
                    extra={'scale': torch.tensor(1.)})
    summary_utils.summarize_per_category_loss(info, summarize_count=True, label_names=['cat', 'dog'])
    assert written.scalars == {'batch_label_count/cat': 2, 'per_category_loss/loss/cat': 3.0,
                               'batch_label_count/dog': 1, 'per_category_loss/loss/dog': 3.0}
    with pytest.raises(ValueError, match='label 1'):
        summary_utils.summarize_per_category_loss(info, label_names=['cat'])


def test_gradient_of_a_tensor_is_written_when_it_is_backpropagated(written):
    x = torch.tensor([[1., 1.], [1., 1.]], requires_grad=True)
    with context.summary_scope('alg'):
        y = summary_utils.summarize_tensor_gradients('x', {'a': x}, clone=True)['a']
    (y * torch.tensor([[3., 4.], [6., 8.]])).sum().backward()
    assert written.scalars == {'alg/x/a/gradient_norm': 7.5}  # mean of the row norms 5 and 10


def test_distribution_gradients_use_clones_of_the_parameters(written):
    loc = torch.zeros(3, requires_grad=True)
    normal = summary_utils.summarize_distribution_gradient('pi', td.Normal(loc, torch.ones(3)), clone=True)
    assert isinstance(normal, td.Normal) and normal.loc is not loc
    normal.log_prob(torch.ones(3)).sum().backward()
    assert list(written.scalars.values()) == [1.0]


def test_means_skip_masked_and_empty_entries(written):
    value, mask = torch.tensor([1., 100.]), torch.tensor([True, False])
    summary_utils.safe_mean_summary('a', value, mask)
    summary_utils.safe_mean_hist_summary('b', value, mask)
    summary_utils.safe_mean_summary('c', value, torch.tensor([False, False]))
    assert written.scalars == {'a': 1.0, 'b/mean': 1.0}


def test_times_are_added_up_until_summaries_are_written():
    writer = RecordingWriter()
    context.set_summary_writer(writer)
    timer = summary_utils.record_time('time/x')
    with timer:
        pass
    assert writer.scalars == {}
    with context.record_if(True), timer:
        pass
    assert writer.scalars['time/x'] > 0


def test_nothing_is_computed_unless_summaries_are_written():
    summary_utils.summarize_loss(None)
    summary_utils.summarize_action(None, None)
    summary_utils.add_nested_summaries('a', None)
    summary_utils.summarize_distribution('a', object())
