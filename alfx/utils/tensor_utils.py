"""Small tensor operations: extension, reverse cumulation, norms, gradient scaling, folding of batch dimensions."""
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alfx import context


def tensor_extend_new_dim(x: Tensor, dim: int, n: int) -> Tensor:
    """Insert a dimension of size ``n`` at ``dim``, repeating ``x`` along it (a view)."""
    x = x.unsqueeze(dim)
    shape = list(x.shape)
    shape[dim] = n
    return x.expand(shape)


def reverse_cumsum(x: Tensor, dim: int) -> Tensor:
    """Return the cumulative sum from the end, ``y[i] = x[i] + x[i+1] + ... + x[n-1]`` along ``dim``."""
    return x.flip(dim).cumsum(dim).flip(dim)


def reverse_cumprod(x: Tensor, dim: int) -> Tensor:
    """Return the cumulative product from the end, ``y[i] = x[i] * x[i+1] * ... * x[n-1]`` along ``dim``."""
    return x.flip(dim).cumprod(dim).flip(dim)


def tensor_extend(x: Tensor, y: Tensor) -> Tensor:
    """Append ``y [...]`` to ``x [n, ...]``, giving ``[n+1, ...]``."""
    return torch.cat((x, y.unsqueeze(0)))


def tensor_extend_zero(x: Tensor, dim: int = 0) -> Tensor:
    """Append a zero slice along ``dim``."""
    return torch.cat((x, torch.zeros_like(x.narrow(dim, 0, 1) if x.shape[dim] else x.sum(dim, keepdim=True))), dim)


def tensor_prepend(x: Tensor, y: Tensor) -> Tensor:
    """Prepend ``y [...]`` to ``x [n, ...]``, giving ``[n+1, ...]``."""
    return torch.cat((y.unsqueeze(0), x))


def tensor_prepend_zero(x: Tensor) -> Tensor:
    """Prepend a zero slice to ``x [n, ...]``, giving ``[n+1, ...]``."""
    return torch.cat((x.new_zeros((1, *x.shape[1:])), x))


def explained_variance(ypred: Tensor, y: Tensor, valid_mask: Tensor | None = None, dim: int | None = None) -> Tensor:
    """Return the explained variance ``1 - Var[y - ypred] / Var[y]``: 1 is perfect, 0 no better than a constant.

    Args:
        ypred: prediction of ``y``, same shape.
        y: predicted quantity.
        valid_mask: bool, same shape; elements to count. ``None`` means all.
        dim: dimension to reduce; ``None`` means all.

    Returns:
        A scalar, or the shape without ``dim``; nan where ``y`` does not vary.
    """
    weight = torch.ones_like(y) if valid_mask is None else valid_mask.to(y.dtype)

    def variance(x: Tensor) -> Tensor:
        count = weight.sum(dim, keepdim=True).clamp_min(1.0)
        x = torch.where(weight > 0, x, 0.0)  # NaN in elements that do not count
        centered = x - (x * weight).sum(dim, keepdim=True) / count
        result = (centered.square() * weight).sum(dim, keepdim=True) / count
        return result.reshape(()) if dim is None else result.squeeze(dim)

    total = variance(y)
    return torch.where(total > 0, 1.0 - variance(y - ypred) / total, torch.nan)


def to_tensor(data: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a number, list, array or tensor to a tensor on the default device; Python floats become float32."""
    return torch.as_tensor(data, dtype=dtype, device=context.get_default_device())


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all elements of all tensors together, a scalar.

    Raises:
        ValueError: there are no tensors.
    """
    if not tensors:
        raise ValueError('global_norm needs at least one tensor')
    norms = torch._foreach_norm(list(tensors))
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def clip_by_global_norm(tensors: Sequence[Tensor], clip_norm: float, use_norm: Tensor | None = None,
                        in_place: bool = False) -> tuple[list[Tensor], Tensor]:
    """Scale all tensors by the same factor so that their :func:`global_norm` is at most ``clip_norm``.

    Args:
        tensors: tensors of any shapes.
        clip_norm: positive bound.
        use_norm: the global norm, if already computed.
        in_place: overwrite ``tensors``.

    Returns:
        ``(clipped tensors, global norm before clipping)``. A norm that is not finite makes every element nan.
    """
    norm = global_norm(tensors) if use_norm is None else torch.as_tensor(use_norm)
    scale = clip_norm / norm.clamp_min(clip_norm)
    scale = torch.where(torch.isfinite(norm), scale, math.nan)
    if in_place:
        torch._foreach_mul_(list(tensors), scale)
        return list(tensors), norm
    return list(torch._foreach_mul(list(tensors), scale)), norm


def clip_by_norms(tensors: Sequence[Tensor], clip_norm: float, in_place: bool = False) -> list[Tensor]:
    """Scale each tensor separately so that its norm is at most ``clip_norm``.

    Args:
        tensors: tensors of any shapes.
        clip_norm: positive bound.
        in_place: overwrite ``tensors``.

    Raises:
        TypeError: ``tensors`` is a single tensor.
    """
    if isinstance(tensors, Tensor):
        raise TypeError(f'clip_by_norms: expected a list of tensors, found a tensor of shape {tuple(tensors.shape)}: '
                        'write [tensor]')
    scales = [clip_norm / norm.clamp_min(clip_norm) for norm in torch._foreach_norm(list(tensors))]
    if in_place:
        torch._foreach_mul_(list(tensors), scales)
        return list(tensors)
    return list(torch._foreach_mul(list(tensors), scales))


def cov(data: Tensor, rowvar: bool = False) -> Tensor:
    """Unbiased covariance matrices.

    Args:
        data: ``[n, d]`` or a batch ``[B, n, d]``: n observations of d variables.
        rowvar: True if variables are rows: ``[d, n]`` or ``[B, d, n]``.

    Returns:
        Covariances ``[d, d]`` or ``[B, d, d]``.
    """
    rows = data if rowvar else data.transpose(-1, -2)
    centered = rows - rows.mean(-1, keepdim=True)
    return centered @ centered.transpose(-1, -2) / (rows.shape[-1] - 1)


def scale_gradient(tensor: Tensor, scale: float, clone_input: bool = True) -> Tensor:
    """Return ``tensor`` with its gradient multiplied by ``scale``.

    Args:
        tensor: a tensor.
        scale: factor.
        clone_input: return a copy, so that other uses of ``tensor`` are not affected. Otherwise the gradient of
            ``tensor`` is scaled for every use of it.
    """
    if not tensor.requires_grad:
        return tensor
    if clone_input:
        tensor = tensor.clone()
    tensor.register_hook(lambda grad: grad * scale)
    return tensor


class BatchSquash:
    """Fold the first ``batch_dims`` dimensions into one, and unfold them.

    Args:
        batch_dims: number of dimensions to fold.
    """

    def __init__(self, batch_dims: int):
        self._batch_dims = batch_dims
        self._shape: torch.Size | None = None

    def flatten(self, tensor: Tensor) -> Tensor:
        """Fold ``[B1, ..., Bn, ...]`` to ``[B1 * ... * Bn, ...]`` and store the sizes."""
        if self._batch_dims == 1:
            return tensor
        self._shape = tensor.shape[:self._batch_dims]
        return tensor.reshape(-1, *tensor.shape[self._batch_dims:])

    def unflatten(self, tensor: Tensor) -> Tensor:
        """Unfold a tensor whose first dimension has the size after the last :meth:`flatten`."""
        if self._batch_dims == 1:
            return tensor
        if self._shape is None:
            raise RuntimeError('BatchSquash.unflatten was called before flatten')
        return tensor.reshape(*self._shape, *tensor.shape[1:])


def append_coordinate(im: Tensor) -> Tensor:
    """Append two channels with the coordinates of each pixel, from -1 to 1.

    Args:
        im: ``[B, C, H, W]``.

    Returns:
        ``[B, C + 2, H, W]``; the first new channel varies along H, the second along W.
    """
    height, width = im.shape[-2:]
    y = torch.linspace(-1.0, 1.0, height, dtype=im.dtype, device=im.device).view(1, 1, -1, 1)
    x = torch.linspace(-1.0, 1.0, width, dtype=im.dtype, device=im.device).view(1, 1, 1, -1)
    shape = (im.shape[0], 1, height, width)
    return torch.cat((im, y.expand(shape), x.expand(shape)), 1)


def spatial_broadcast(z: Tensor, im_shape: Sequence[int]) -> Tensor:
    """Repeat ``z [B, D]`` at each pixel and append coordinates (Watters et al. 2019, arXiv:1901.07017).

    Args:
        z: ``[B, D]``.
        im_shape: ``(H, W)``.

    Returns:
        ``[B, D + 2, H, W]``.
    """
    height, width = im_shape
    return append_coordinate(z.reshape(*z.shape, 1, 1).expand(*z.shape, height, width))
