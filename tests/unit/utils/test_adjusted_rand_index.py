"""The adjusted Rand index: shapes, counted pixels, invalid arguments. The numbers are in the numerics tests."""
import pytest
import torch

from alfx.algorithms.monet.adjusted_rand_index import adjusted_rand_index


def test_names_and_order_of_parts_do_not_matter():
    labels = torch.tensor([[0, 0, 1, 1, 2, 2]])
    assert float(adjusted_rand_index(labels, torch.tensor([[7, 7, 0, 0, 3, 3]]))) == 1.0


def test_images_are_taken_one_by_one():
    labels = torch.randint(0, 3, (4, 5, 6))
    clusters = torch.randint(0, 4, (4, 5, 6))
    together = adjusted_rand_index(labels, clusters)
    assert together.shape == (4, ) and together.dtype == torch.float32
    apart = torch.cat([adjusted_rand_index(labels[i:i + 1], clusters[i:i + 1]) for i in range(4)])
    torch.testing.assert_close(together, apart)


def test_uncounted_pixels_have_no_influence():
    labels, clusters = torch.randint(0, 3, (2, 20)), torch.randint(0, 3, (2, 20))
    counted = torch.rand(2, 20) < 0.6
    changed = torch.where(counted, clusters, (clusters + 1) % 3)
    torch.testing.assert_close(adjusted_rand_index(labels, clusters, counted),
                               adjusted_rand_index(labels, changed, counted))
    single = adjusted_rand_index(labels[0][counted[0]][None], clusters[0][counted[0]][None])
    torch.testing.assert_close(adjusted_rand_index(labels, clusters, counted)[:1], single)


@pytest.mark.parametrize('labels, clusters, expected', [
    ([0, 0, 0], [1, 1, 1], 1.0),  # one part each
    ([0, 1, 2], [2, 1, 0], 1.0),  # one pixel per cluster
    ([0, 0, 1, 1], [0, 0, 0, 0], 0.0),  # one cluster instead of several
    ([1, 1, 1, 1], [0, 0, 1, 1], 0.0),  # several clusters instead of one
    ([3], [0], 1.0),
    ([], [], 1.0)])
def test_trivial_partitions(labels, clusters, expected):
    integers = dict(dtype=torch.int64)
    assert adjusted_rand_index(torch.tensor([labels], **integers), torch.tensor([clusters], **integers)).tolist() == \
        [expected]


def test_no_counted_pixels_are_perfect_agreement():
    labels = torch.randint(0, 3, (2, 9))
    assert adjusted_rand_index(labels, labels + 1, torch.zeros(2, 9, dtype=torch.bool)).tolist() == [1.0, 1.0]


def test_bytes_are_accepted_and_inputs_do_not_change():
    labels, clusters = torch.randint(0, 200, (2, 9)).to(torch.uint8), torch.randint(0, 3, (2, 9))
    before = labels.clone(), clusters.clone()
    adjusted_rand_index(labels, clusters, labels > 3)
    assert torch.equal(labels, before[0]) and torch.equal(clusters, before[1])


@pytest.mark.parametrize('labels, clusters, message', [
    (torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64), 'same shape'),
    (torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int64), 'labels to be integers'),
    (torch.zeros(1, 3, dtype=torch.int64), -torch.ones(1, 3, dtype=torch.int64), 'clusters to be integers')])
def test_bad_input_is_rejected(labels, clusters, message):
    with pytest.raises(ValueError, match=message):
        adjusted_rand_index(labels, clusters)
