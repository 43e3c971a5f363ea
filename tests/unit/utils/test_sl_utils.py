"""Losses and measures of supervised runs; their data."""
import math

import pytest
import torch

from alfx.environments.datagen import load_curve, load_digits, load_test
from alfx.gin_utils import ConfError
from alfx.utils import sl_utils
from alfx.utils.tensor_loader import TensorLoader


def test_auc_counts_pairs_and_half_of_the_ties():
    inliers, outliers = torch.randint(5, (40, )).float(), torch.randint(2, 7, (30, )).float()
    pairs = [1.0 if b > a else 0.5 if b == a else 0.0 for a in inliers.tolist() for b in outliers.tolist()]
    assert sl_utils.auc_score(inliers, outliers) == pytest.approx(sum(pairs) / len(pairs))
    assert sl_utils.auc_score(inliers, inliers) == pytest.approx(0.5)
    assert sl_utils.auc_score(torch.zeros(3), torch.ones(2)) == 1.0
    with pytest.raises(ValueError, match='found 0 inliers and 2 outliers'):
        sl_utils.auc_score(torch.zeros(0), torch.ones(2))


def test_losses_are_sums_over_the_batch_of_negative_log_likelihoods():
    outputs, targets = torch.randn(4, 3, 5), torch.tensor([0, 4, 2, 2])
    slow = torch.stack([-outputs[b].log_softmax(-1)[:, c]
                        for b, c in enumerate(targets.tolist())])
    torch.testing.assert_close(sl_utils.classification_loss(outputs, targets), slow.sum(0))
    torch.testing.assert_close(sl_utils.classification_loss(outputs, targets, torch.tensor([1, 0, 0, 1])),
                               slow[0] + slow[3])
    # (2^2 + 1^2) / 2 / 0.5^2 = 10
    loss = sl_utils.regression_loss(torch.tensor([[[2.0, 1.0]]]), torch.zeros(1, 2), noise_stddev=0.5)
    torch.testing.assert_close(loss, torch.tensor([10.0]))


def test_measures_of_classes_by_hand():
    # two networks of one sample: probabilities (0.9, 0.1) and (0.3, 0.7), mean (0.6, 0.4)
    outputs = torch.tensor([[[0.9, 0.1], [0.3, 0.7]]]).log()
    measures = sl_utils.classification_metrics(outputs, torch.tensor([1]))
    assert measures == pytest.approx({'accuracy': 0.0, 'nll': -math.log(0.4), 'brier': 2 * 0.36, 'ece': 0.6})
    scores = sl_utils.uncertainty_scores(outputs)
    mean_entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    own = [-(p * math.log(p) + (1 - p) * math.log(1 - p)) for p in (0.9, 0.3)]
    assert float(scores['entropy']) == pytest.approx(mean_entropy)
    assert float(scores['variance']) == pytest.approx(2 * 0.09)
    assert float(scores['mutual_information']) == pytest.approx(mean_entropy - sum(own) / 2, abs=1e-6)


def test_hard_votes_count_networks_and_soft_ones_probabilities():
    outputs = torch.tensor([[[0.9, 0.1], [0.4, 0.6], [0.45, 0.55]]]).log()
    assert sl_utils.classification_metrics(outputs, torch.tensor([1]), 'hard')['accuracy'] == 1.0
    assert sl_utils.classification_metrics(outputs, torch.tensor([1]), 'soft')['accuracy'] == 0.0


def test_the_calibration_error_is_the_gap_of_each_bin_of_confidence():
    # confidence 0.95 twice, one right; 0.55 once, right
    probabilities = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.45, 0.55]])
    error = sl_utils.calibration_error(probabilities, torch.tensor([0, 1, 1]), num_bins=10)
    assert error == pytest.approx((abs(1 - 1.9) + abs(1 - 0.55)) / 3)


def test_measures_of_numbers_by_hand():
    measures = sl_utils.regression_metrics(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[1.0]]), noise_stddev=1.0)
    normal = math.log(math.sqrt(2 * math.pi))
    assert measures == pytest.approx({'rmse': 1.0, 'nll': normal - math.log((1 + math.exp(-2)) / 2), 'stddev': 1.0})


def test_a_loader_shuffles_all_samples_once_per_epoch():
    inputs = torch.arange(10.0)[:, None]
    loader = TensorLoader(inputs, torch.arange(10), batch_size=4)
    assert len(loader) == 3 and len(loader.dataset) == 10 and loader.batch_size == 4
    orders = [torch.cat([targets for _, targets in loader]) for _ in range(2)]
    assert all(sorted(order.tolist()) == list(range(10)) for order in orders) and not torch.equal(*orders)
    assert [len(x) for x, _ in loader] == [4, 4, 2]
    assert all(torch.equal(x[:, 0].long(), y) for x, y in loader)
    torch.manual_seed(3)
    first = [y for _, y in loader]
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, (_, b) in zip(first, loader))
    plain = TensorLoader(inputs, torch.arange(10), 4, shuffle=False)
    assert torch.cat([y for _, y in plain]).tolist() == list(range(10))


@pytest.mark.parametrize('inputs, targets, batch_size, message', [
    (torch.zeros(3, 1), torch.zeros(2), 1, 'as many targets as inputs'),
    (torch.zeros(0, 1), torch.zeros(0), 1, 'found 0'),
    (torch.zeros(3, 1), torch.zeros(3), 0, 'at least 1')])
def test_data_that_makes_no_batches_is_rejected(inputs, targets, batch_size, message):
    with pytest.raises(ValueError, match=message):
        TensorLoader(inputs, targets, batch_size)


def test_linear_regression_data_is_linear_and_reproducible_by_seed():
    train, test = load_test(input_dim=3, output_dim=2, size=50, seed=4)
    weight = torch.linalg.lstsq(train.data.inputs, train.data.targets).solution
    torch.testing.assert_close(test.data.inputs @ weight, test.data.targets, rtol=1e-3, atol=1e-4)
    assert torch.equal(load_test(size=50, seed=4)[0].data.inputs, load_test(size=50, seed=4)[0].data.inputs)


def test_the_curve_has_a_gap():
    train, test = load_curve(size=200, noise_stddev=0.0)
    for x, y in (train.data, test.data):
        assert float(x.abs().min()) >= 0.5 and float(x.abs().max()) <= 1.0 and bool((x < 0).any() and (x > 0).any())
        torch.testing.assert_close(y, x**3)


def test_digits_are_split_and_their_labels_become_classes():
    pytest.importorskip('sklearn')
    train, test = load_digits()
    assert (len(train.dataset), len(test.dataset)) == (1437, 360) and train.dataset.shape[1:] == (1, 8, 8)
    some, _ = load_digits(label_idx=(7, 2))
    all_data = train.data
    assert torch.equal(some.data.inputs[some.data.targets == 0], all_data.inputs[all_data.targets == 7])
    assert set(some.data.targets.tolist()) == {0, 1}
    with pytest.raises(ConfError, match='distinct digits from 0 to 9'):
        load_digits(label_idx=(3, 3))
