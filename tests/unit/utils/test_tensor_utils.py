"""Small operations on tensors, and on tensors with their specs."""
import numpy as np
import pytest
import torch

from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils import spec_utils, tensor_utils


def test_extending_and_prepending():
    x, y = torch.ones(2, 3), torch.full((3, ), 2.0)
    assert tensor_utils.tensor_extend(x, y)[-1].tolist() == [2.0, 2.0, 2.0]
    assert tensor_utils.tensor_prepend(x, y)[0].tolist() == [2.0, 2.0, 2.0]
    assert tensor_utils.tensor_extend_zero(x).sum(1).tolist() == [3.0, 3.0, 0.0]
    assert tensor_utils.tensor_extend_zero(x, dim=1).sum(0).tolist() == [2.0, 2.0, 2.0, 0.0]
    assert tensor_utils.tensor_extend_zero(torch.ones(0, 3)).tolist() == [[0.0, 0.0, 0.0]]
    assert tensor_utils.tensor_prepend_zero(x).sum(1).tolist() == [0.0, 3.0, 3.0]
    assert tensor_utils.tensor_extend_new_dim(x, 1, 4).shape == (2, 4, 3)
    assert tensor_utils.tensor_extend_new_dim(x, -1, 4).shape == (2, 3, 4)


def test_reverse_cumulation():
    x = torch.tensor([1.0, 2.0, 3.0])
    assert tensor_utils.reverse_cumsum(x, 0).tolist() == [6.0, 5.0, 3.0]
    assert tensor_utils.reverse_cumprod(x, 0).tolist() == [6.0, 6.0, 3.0]


def test_explained_variance():
    y = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    assert tensor_utils.explained_variance(y, y).item() == 1.0
    assert tensor_utils.explained_variance(torch.full_like(y, 9.0), y).item() == 0.0
    mask = torch.tensor([[True, True], [True, False]])
    wrong_where_masked = torch.tensor([[1.0, 2.0], [3.0, -70.0]])
    assert tensor_utils.explained_variance(wrong_where_masked, y, mask).item() == 1.0
    assert tensor_utils.explained_variance(wrong_where_masked, y, dim=0).shape == (2, )
    wrong_where_masked[1, 1] = torch.nan
    assert tensor_utils.explained_variance(wrong_where_masked, y, mask).item() == 1.0
    # Errors (0, 0, 0, 1): variance 3/16; variance of y: mean 2.75, squares 39/4 - 2.75^2 = 2.1875
    one_off = y - torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert tensor_utils.explained_variance(one_off, y).item() == pytest.approx(1 - 0.1875 / 2.1875)
    assert torch.isnan(tensor_utils.explained_variance(y, torch.ones_like(y)))


def test_global_norm_and_clipping():
    tensors = [torch.tensor([3.0]), torch.tensor([[4.0], [12.0]])]
    assert tensor_utils.global_norm(tensors).item() == pytest.approx(13.0)
    clipped, norm = tensor_utils.clip_by_global_norm(tensors, 6.5)
    assert norm.item() == pytest.approx(13.0) and tensors[0].item() == 3.0
    torch.testing.assert_close(clipped, [torch.tensor([1.5]), torch.tensor([[2.0], [6.0]])])
    same, _ = tensor_utils.clip_by_global_norm(tensors, 100.0)
    torch.testing.assert_close(same, tensors)
    half, _ = tensor_utils.clip_by_global_norm(tensors, 1.0, use_norm=torch.tensor(2.0))
    assert half[0].item() == 1.5
    each = tensor_utils.clip_by_norms([torch.tensor([3.0, 4.0]), torch.tensor([0.5])], 1.0)
    torch.testing.assert_close(each, [torch.tensor([0.6, 0.8]), torch.tensor([0.5])])
    with pytest.raises(TypeError, match=r'a list of tensors, found a tensor of shape \(2,\): write \[tensor\]'):
        tensor_utils.clip_by_norms(torch.tensor([3.0, 4.0]), 1.0)
    bad, _ = tensor_utils.clip_by_global_norm([torch.tensor([torch.inf]), torch.ones(1)], 1.0)
    assert torch.isnan(bad[1])
    tensor_utils.clip_by_global_norm(tensors, 6.5, in_place=True)
    assert tensors[0].item() == 1.5
    tensor_utils.clip_by_norms(tensors, 1.0, in_place=True)
    assert tensors[0].item() == 1.0
    with pytest.raises(ValueError, match='at least one'):
        tensor_utils.global_norm([])


def test_covariance_agrees_with_numpy():
    data = torch.randn(10, 3, dtype=torch.float64)
    np.testing.assert_allclose(tensor_utils.cov(data).numpy(), np.cov(data.numpy(), rowvar=False))
    np.testing.assert_allclose(tensor_utils.cov(data.T, rowvar=True).numpy(), np.cov(data.numpy(), rowvar=False))
    assert tensor_utils.cov(torch.randn(5, 10, 3)).shape == (5, 3, 3)


def test_gradients_are_scaled_for_one_use_only():
    x = torch.ones(3, requires_grad=True)
    (tensor_utils.scale_gradient(x, 0.1).sum() + x.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((3, ), 1.1))
    y = torch.ones(3, requires_grad=True)
    tensor_utils.scale_gradient(y, 0.0, clone_input=False).sum().backward()
    torch.testing.assert_close(y.grad, torch.zeros(3))
    constant = torch.ones(2)
    assert tensor_utils.scale_gradient(constant, 0.1) is constant


def test_batch_squash_folds_and_unfolds():
    squash = tensor_utils.BatchSquash(2)
    x = torch.randn(2, 3, 4)
    flat = squash.flatten(x)
    assert flat.shape == (6, 4) and torch.equal(squash.unflatten(flat), x)
    assert tensor_utils.BatchSquash(1).unflatten(x) is x
    with pytest.raises(RuntimeError, match='before flatten'):
        tensor_utils.BatchSquash(2).unflatten(x)


def test_coordinates_are_appended_as_channels():
    image = tensor_utils.append_coordinate(torch.zeros(2, 1, 3, 5))
    assert image.shape == (2, 3, 3, 5)
    assert image[1, 1, :, 0].tolist() == [-1.0, 0.0, 1.0]
    assert image[0, 2, 0].tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    broadcast = tensor_utils.spatial_broadcast(torch.tensor([[7.0, 8.0]]), (2, 3))
    assert broadcast.shape == (1, 4, 2, 3) and (broadcast[0, 1] == 8.0).all()


def test_to_tensor_accepts_numpy_and_python_values():
    assert tensor_utils.to_tensor(1.5).dtype == torch.float32
    assert tensor_utils.to_tensor(np.zeros(2, np.int32)).dtype == torch.int32
    assert tensor_utils.to_tensor([1, 2], torch.float64).dtype == torch.float64


# Specs --------------------------------------------------------------------------------------------------------------


def test_scaling_maps_the_unit_interval_to_the_bounds():
    spec = BoundedTensorSpec((2, ), torch.float32, [0.0, -4.0], [1.0, 2.0])
    means, magnitudes = spec_utils.spec_means_and_magnitudes(spec)
    assert means.tolist() == [0.5, -1.0] and magnitudes.tolist() == [0.5, 3.0]
    unit = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.5]])
    assert spec_utils.scale_to_spec(unit, spec).tolist() == [[0.0, -4.0], [1.0, 2.0], [0.5, 0.5]]
    scalar = BoundedTensorSpec((), torch.float32, -2.0, 2.0)
    assert spec_utils.scale_to_spec(torch.tensor([1.0]), scalar).tolist() == [2.0]


def test_clipping_obeys_infinite_bounds():
    spec = BoundedTensorSpec((2, ), torch.float32, [0.0, -np.inf], [1.0, 2.0])
    assert spec_utils.clip_to_spec(torch.tensor([-5.0, -5.0]), spec).tolist() == [0.0, -5.0]
    assert spec_utils.clip_to_spec(torch.tensor([5.0, 5.0]), spec).tolist() == [1.0, 2.0]
    with pytest.raises(SpecError, match='no finite bounds'):
        spec_utils.spec_means_and_magnitudes(spec)
    with pytest.raises(SpecError, match='bounded'):
        spec_utils.clip_to_spec(torch.zeros(2), TensorSpec((2, )))


def test_comparing_nests_with_specs():
    spec = {'a': TensorSpec((2, )), 'b': BoundedTensorSpec((), torch.int64, 0, 3)}
    batch = {'a': torch.zeros(5, 2), 'b': torch.zeros(5, dtype=torch.int64)}
    assert spec_utils.consistent_with_spec(batch, spec, from_dim=1)
    assert not spec_utils.consistent_with_spec(batch, spec)
    assert not spec_utils.consistent_with_spec({'a': batch['a']}, spec, from_dim=1)
    assert not spec_utils.consistent_with_spec({**batch, 'b': torch.zeros(5)}, spec, from_dim=1)
    assert spec_utils.is_same_spec(spec, dict(spec)) and not spec_utils.is_same_spec(spec, {'a': spec['a']})
    assert not spec_utils.is_same_spec(spec, {**spec, 'b': BoundedTensorSpec((), torch.int64, 0, 4)})
    zeros = spec_utils.zeros_from_spec(spec, 3)
    assert zeros['a'].shape == (3, 2) and zeros['b'].dtype == torch.int64
