"""Decoder trained by its reconstruction error; a building block of algorithms such as MERLIN."""
from collections.abc import Callable
from typing import Any

from torch import Tensor

from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep, LossInfo
from alfx.gin_utils import configurable
from alfx.tensor_specs import NestedTensor, TensorSpec
from alfx.utils.losses import element_wise_squared_loss


@configurable
class DecodingAlgorithm(Algorithm):
    """Network that decodes a target from an input.

    The loss of a sample is the *sum* of the elementwise losses: with squared errors (times 0.5) it is the negative
    log-likelihood of the target under a Gaussian of unit variance around the output, up to a constant.

    Args:
        decoder: the ``Network``, or a constructor of it without arguments.
        loss: called as ``loss(decoded, target)``; returns ``[B]`` or ``[B, ...]``.
        loss_weight: factor of the loss.
        name: name of this algorithm.
    """

    def __init__(self, decoder: Any, loss: Callable[[Any, Any], Tensor] = element_wise_squared_loss,
                 loss_weight: float = 1.0, name: str = 'DecodingAlgorithm'):
        if isinstance(decoder, type) or not hasattr(decoder, 'state_spec'):
            decoder = decoder()
        super().__init__(train_state_spec=decoder.state_spec, name=name)
        self._decoder = decoder
        self._loss = loss
        self._loss_weight = loss_weight

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the decoded output."""
        return self._decoder.output_spec

    def predict_step(self, inputs: NestedTensor, state: NestedTensor = ()) -> AlgStep:
        """Decode an input.

        Args:
            inputs: nest ``[B, ...]``, without target.
            state: state of the network.
        """
        return AlgStep(*self._decoder(inputs, state))

    def rollout_step(self, inputs: tuple[NestedTensor, NestedTensor], state: NestedTensor = ()) -> AlgStep:
        """Call :meth:`train_step`."""
        return self.train_step(inputs, state)

    def train_step(self, inputs: tuple[NestedTensor, NestedTensor], state: NestedTensor = (),
                   rollout_info: NestedTensor = None) -> AlgStep:
        """Decode an input and compare the output with the target.

        Args:
            inputs: ``(input, target)``, nests ``[B, ...]``.
            state: state of the network.
            rollout_info: not used.

        Returns:
            ``output``: the decoded output; ``info``: ``LossInfo`` whose ``loss`` is ``[B]``, and ``extra`` the same
            before weighting.

        Raises:
            ValueError: output and target are tensors of different shapes, for which the loss does not return one loss
                per sample.
        """
        source, target = inputs
        decoded, state = self._decoder(source, state)
        loss = loss_of_samples(self._name, self._loss, decoded, target)
        loss = loss.sum(tuple(range(1, loss.ndim))) if loss.ndim > 1 else loss
        return AlgStep(decoded, state, LossInfo(loss=loss * self._loss_weight, extra=loss))


def loss_of_samples(owner: str, loss_fn: Callable[[Any, Any], Tensor], decoded: NestedTensor,
                    target: NestedTensor) -> Tensor:
    """Compute ``loss_fn(decoded, target)``, ``[B, ...]``.

    Args:
        owner: class named in error messages.
        loss_fn: the loss.
        decoded: nest ``[B, ...]``.
        target: nest ``[B, ...]``.

    Raises:
        ValueError: floating point tensors of different shapes (which would be broadcast), or the result has no batch
            dimension.
    """
    if isinstance(decoded, Tensor) and isinstance(target, Tensor):
        if target.is_floating_point() and decoded.shape != target.shape:
            raise ValueError(f'{owner}: expected a target with the shape of the decoder output, '
                             f'{tuple(decoded.shape)}, found {tuple(target.shape)}; change the output size of the '
                             'decoder')
        batch = len(decoded)
    else:
        batch = None
    loss = loss_fn(decoded, target)
    if not isinstance(loss, Tensor) or loss.ndim == 0 or (batch is not None and len(loss) != batch):
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f'{owner}: expected a loss of shape [B] or [B, ...] with B = {batch}, found {found}; the loss '
                         "must not be averaged over the batch: use @element_wise_squared_loss, or reduction='none'")
    return loss
