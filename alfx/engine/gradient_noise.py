"""Gradient noise: the simple noise scale of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1).

Unlike in the paper, both gradients come from the same batch: the small batch is a part of the large one.
"""
import torch
from torch import nn


class GradientNoiseScale(nn.Module):
    """Running estimate of the noise scale ``tr(covariance of the gradient) / |gradient|^2``, in samples.

    With g_n the gradient of the mean loss of n samples, B samples in the batch and b in its part::

        |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)
        S     = (|g_b|^2 - |g_B|^2) / (1 / b - 1 / B)

    Both are averaged over the calls, then divided. A batch much smaller than the result uses every sample efficiently;
    a batch much larger hardly improves an update further.

    Args:
        ratio: b / B.
        update_rate: weight of the newest estimate in the averages.
    """

    _squared_norm: torch.Tensor
    _trace: torch.Tensor
    _calls: torch.Tensor

    def __init__(self, ratio: float = 0.1, update_rate: float = 0.01):
        super().__init__()
        self._ratio = ratio
        self._update_rate = update_rate
        for name in ('_squared_norm', '_trace', '_calls'):
            self.register_buffer(name, torch.zeros(()), persistent=False)  # only for summaries

    def forward(self, loss: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor | tuple[()]:
        """Update the estimate with one more batch and return it.

        Args:
            loss: masked loss ``[T, B]`` with its graph, which is kept. The samples are its B columns, or its T rows if
                there is only one column.
            parameters: parameters whose gradients are taken.

        Returns:
            Scalar tensor; ``()`` if the batch is a single sample.
        """
        samples = loss if loss.shape[1] > 1 else loss.transpose(0, 1)
        size = samples.shape[1]
        part = max(1, int(size * self._ratio))
        if part == size or not loss.requires_grad:
            return ()
        small, big = (self._squared_gradient(samples[:, :n].mean(), parameters) for n in (part, size))
        self._calls += 1
        rate = torch.clamp(1.0 / self._calls, min=self._update_rate)
        self._squared_norm.lerp_((size * big - part * small) / (size - part), rate)
        self._trace.lerp_((small - big) / (1 / part - 1 / size), rate)
        return self._trace / self._squared_norm

    @staticmethod
    def _squared_gradient(loss: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
        trained = [p for p in parameters if p.requires_grad]
        gradients = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        return torch.stack([g.square().sum() for g in gradients if g is not None]).sum()
