"""Layers that augment images ``[B, C, H, W]``."""
import torch
from torch import nn

from alfx.gin_utils import StepLimit, configurable
from alfx.layers.conv import Size2d, pair


@configurable(module='alfx.layers')
class ReplicationPad2d(nn.Module):
    """Padding that repeats the border of images.

    Args:
        padding: number of rows and columns on each side, or (left, right, top, bottom).
    """

    def __init__(self, padding: StepLimit | tuple[StepLimit, StepLimit, StepLimit, StepLimit]):
        super().__init__()
        self._padding = (padding, ) * 4 if isinstance(padding, int) else tuple(padding)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[..., H, W]`` of any dtype to ``[..., H + top + bottom, W + left + right]``."""
        left, right, top, bottom = self._padding
        if not any(self._padding):
            return inputs
        height, width = inputs.shape[-2:]
        rows = torch.arange(-top, height + bottom, device=inputs.device).clamp_(0, height - 1)
        columns = torch.arange(-left, width + right, device=inputs.device).clamp_(0, width - 1)
        return inputs[..., rows[:, None], columns]


@configurable(module='alfx.layers')
class RandomCrop(nn.Module):
    """Random crop of a fixed size, at a separately drawn position for each image.

    Args:
        size: height and width of the crop, or one number for both.
        padding: rows and columns by which the border is repeated first, as in DrQ (Yarats et al. 2021,
            arXiv:2004.13649); one number for both, (rows, columns), or (left, right, top, bottom).
    """

    def __init__(self, size: Size2d, padding: Size2d | tuple[StepLimit, StepLimit, StepLimit, StepLimit] = 0):
        super().__init__()
        self._size = pair(size)
        if isinstance(padding, int) or len(padding) == 2:
            rows, columns = pair(padding)
            padding = columns, columns, rows, rows
        self._pad = ReplicationPad2d(padding)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map ``[..., C, H, W]`` of any dtype to ``[..., C, h, w]``.

        Raises:
            ValueError: the padded image is smaller than the crop.
        """
        inputs = self._pad(inputs)
        (height, width), (h, w_) = inputs.shape[-2:], self._size
        if height < h or width < w_:
            raise ValueError(f'RandomCrop: cannot crop {self._size} from images of size {(height, width)}')
        images = inputs.reshape(-1, *inputs.shape[-3:])
        count, device = images.shape[0], images.device
        top = torch.randint(height - h + 1, (count, ), device=device)
        left = torch.randint(width - w_ + 1, (count, ), device=device)
        rows = (top[:, None] + torch.arange(h, device=device))[:, None, :, None]
        columns = (left[:, None] + torch.arange(w_, device=device))[:, None, None, :]
        image = torch.arange(count, device=device)[:, None, None, None]
        channel = torch.arange(images.shape[1], device=device)[None, :, None, None]
        return images[image, channel, rows, columns].view(*inputs.shape[:-2], h, w_)
