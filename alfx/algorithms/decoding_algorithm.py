"""Decoding something from an input, trained by the error; a building block of algorithms such as MERLIN."""
from collections.abc import Callable
from typing import Any

from torch import Tensor

from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.data_structures import AlgStep, LossInfo
from alfx.gin_utils import configurable
from alfx.tensor_specs import NestedTensor, TensorSpec
from alfx.engine.capabilities import Capabilities
from alfx.utils.losses import element_wise_squared_loss


@configurable
class DecodingAlgorithm(Algorithm):
    """A network that decodes a target from an input.

    The loss of a sample is the *sum* of the elementwise losses: with squared errors (times 0.5) it is the negative
    log-likelihood of the target under a Gaussian of unit variance about what was decoded, up to a constant.

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
        """Spec of what is decoded."""
        return self._decoder.output_spec

    def own_capabilities(self) -> Capabilities:
        """True unless something in the network draws numbers or keeps statistics."""
        return super().own_capabilities()._replace(traceable_update=is_traceable(self))

    def predict_step(self, inputs: NestedTensor, state: NestedTensor = ()) -> AlgStep:
        """Decode.

        Args:
            inputs: nest ``[B, ...]``: what to decode from; there is no target.
            state: of the network.
        """
        return AlgStep(*self._decoder(inputs, state))

    def rollout_step(self, inputs: tuple[NestedTensor, NestedTensor], state: NestedTensor = ()) -> AlgStep:
        """See :meth:`train_step`."""
        return self.train_step(inputs, state)

    def train_step(self, inputs: tuple[NestedTensor, NestedTensor], state: NestedTensor = (),
                   rollout_info: NestedTensor = None) -> AlgStep:
        """Decode, and compare with the target.

        Args:
            inputs: ``(input, target)``, nests ``[B, ...]``.
            state: of the network.
            rollout_info: not used.

        Returns:
            ``output``: what was decoded; ``info``: ``LossInfo`` whose ``loss`` is ``[B]``, and ``extra`` the same
            before it is weighted.

        Raises:
            ValueError: what was decoded and the target are tensors of different shapes, of which the loss makes
                something that is not a loss of each sample.
        """
        what, target = inputs
        decoded, state = self._decoder(what, state)
        loss = loss_of_samples(self._name, self._loss, decoded, target)
        loss = loss.sum(tuple(range(1, loss.ndim))) if loss.ndim > 1 else loss
        return AlgStep(decoded, state, LossInfo(loss=loss * self._loss_weight, extra=loss))


def loss_of_samples(owner: str, loss_fn: Callable[[Any, Any], Tensor], decoded: NestedTensor,
                    target: NestedTensor) -> Tensor:
    """``loss_fn(decoded, target)``, ``[B, ...]``.

    Args:
        owner: who asks, for errors.
        loss_fn: the loss.
        decoded: nest ``[B, ...]``.
        target: nest ``[B, ...]``.

    Raises:
        ValueError: floating point tensors of different shapes (which would be broadcast), or the result has no batch
            dimension.
    """
    if isinstance(decoded, Tensor) and isinstance(target, Tensor):
        if target.is_floating_point() and decoded.shape != target.shape:
            raise ValueError(f'{owner}: expected a target of the shape of what is decoded, {tuple(decoded.shape)}, '
                             f'found {tuple(target.shape)}; change the size of the output of the decoder')
        batch = len(decoded)
    else:
        batch = None
    loss = loss_fn(decoded, target)
    if not isinstance(loss, Tensor) or loss.ndim == 0 or (batch is not None and len(loss) != batch):
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f'{owner}: expected a loss of shape [B] or [B, ...] with B = {batch}, found {found}; the loss '
                         "must not be averaged over the batch: take @element_wise_squared_loss, or reduction='none'")
    return loss
