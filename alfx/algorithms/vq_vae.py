"""Vector-quantized variational autoencoder: the latent consists of codes from a learned codebook.

van den Oord et al. 2017, "Neural Discrete Representation Learning" (https://arxiv.org/abs/1711.00937). Each vector that
the encoder outputs is replaced by the nearest code (eq. 1 and 2), and the decoder receives the codes. The decoder's
gradient is copied to the encoder past the replacement; the codes learn from the distance (eq. 3):

    loss = ||x - decode(z_q)||^2 + ||sg[z_e] - z_q||^2 + commitment_loss_weight * ||z_e - sg[z_q]||^2

Differences from the paper: the squares are means over the elements, not sums, so that the weight does not depend on the
sizes of observation and latent; the default weight is 1, not 0.25. As in the paper, the codes follow the gradient of
the second term (not a moving average), and the prior is uniform during training. The divergence is therefore a
constant, ``n log K`` for n codes out of K, which the loss leaves out.
"""
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alfx import context, summary
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.vae import check_decoder, check_encoder, straight_through
from alfx.data_structures import AlgStep, LossInfo, namedtuple
from alfx.gin_utils import Count, NonNegative, configurable
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, SpecError, TensorSpec

VqvaeInfo = namedtuple('VqvaeInfo', ['quantization', 'commitment', 'reconstruction', 'perplexity', 'codebook_use'],
                       default_value=())
"""``[B]`` each: the three terms of the loss, before they are weighted; for the last two fields see
:meth:`Vqvae.codebook_statistics` (``()`` in training)."""

_USAGE_DECAY = 0.999  # per observation: averages over about the last thousand observations


class Quantized(NamedTuple):
    """Result of :meth:`Vqvae.encode`.

    Attributes:
        z: codes with the gradient of the encoder's output; ``[B, ...]`` in the shape of that output.
        indices: int64 ``[B, n]``, indices of the codes.
        encoded: ``[B, n, embedding_dim]``, encoder outputs before the replacement.
        codes: ``[B, n, embedding_dim]``, codes after the replacement.
    """

    z: Tensor
    indices: Tensor
    encoded: Tensor
    codes: Tensor


def nearest_code(vectors: Tensor, codebook: Tensor) -> Tensor:
    """Return the index of the nearest code (Euclidean), the first one in a tie (van den Oord et al. 2017, eq. 1).

    Args:
        vectors: ``[..., D]``.
        codebook: ``[K, D]``.

    Returns:
        Indices, int64 ``[...]``.
    """
    with torch.no_grad():  # |v - e|^2 without |v|^2, which is the same for all codes
        return (codebook.square().sum(-1) - 2 * vectors @ codebook.t()).argmin(-1)


@configurable
class Vqvae(Algorithm):
    """Vector-quantized variational autoencoder (VQ-VAE).

    Each observation is encoded as n codes out of K. The output of the encoder determines n: it is a vector of n times
    ``embedding_dim`` elements, or an image ``(embedding_dim, ...)`` with a code for each pixel.

    Args:
        input_tensor_spec: float32 spec of the input.
        num_embeddings: K, number of codes in the codebook.
        embedding_dim: D, dimension of a code.
        encoder_ctor: called as ``encoder_ctor(input_tensor_spec)``; creates the encoder.
        decoder_ctor: called as ``decoder_ctor(latent_spec)``, with the ``output_spec`` of the encoder; creates the
            decoder. Its output has as many elements as the input and is reshaped to it.
        optimizer: optimizes encoder, decoder and codes; ``None``: the optimizer of the enclosing algorithm.
        commitment_loss_weight: weight of the third term of the loss.
        checkpoint: as in ``Algorithm``.
        debug_summaries: log the use of the codebook.
        name: name of this algorithm.

    Raises:
        ConfError: a number is out of range.
        SpecError: a network has an input or output of the wrong shape.
        ValueError: a network is recurrent.
    """

    _usage: Tensor

    def __init__(self, input_tensor_spec: TensorSpec, num_embeddings: Count, embedding_dim: Count,
                 encoder_ctor: Callable[..., Network] = EncodingNetwork,
                 decoder_ctor: Callable[..., Network] = EncodingNetwork, optimizer: Any = None,
                 commitment_loss_weight: NonNegative = 1.0, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'Vqvae'):
        owner = type(self).__name__
        super().__init__(optimizer=optimizer, checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        if not isinstance(input_tensor_spec, TensorSpec) or input_tensor_spec.is_discrete:
            raise SpecError(f'{owner}.input_tensor_spec: expected one float spec, found {input_tensor_spec}')
        self._input_shape = tuple(input_tensor_spec.shape)
        self._encoder = check_encoder(owner, 'encoder_ctor', encoder_ctor(input_tensor_spec), input_tensor_spec)
        latent = self._encoder.output_spec
        self._is_vector = isinstance(latent, TensorSpec) and latent.ndim == 1
        if not isinstance(latent, TensorSpec) or (latent.numel % embedding_dim if self._is_vector
                                                  else latent.shape[:1] != (embedding_dim, )):
            raise SpecError(f'{owner}.encoder_ctor: expected an output of n * embedding_dim = n * {embedding_dim} '
                            f'elements, or of shape ({embedding_dim}, ...), found {latent}')
        self._latent_spec = latent
        self._num_codes = latent.numel // embedding_dim
        self._decoder = check_decoder(owner, 'decoder_ctor', decoder_ctor(latent), latent, input_tensor_spec)
        # The initial range is that of van den Oord's implementation.
        self._codebook = nn.Parameter(torch.empty(num_embeddings, embedding_dim).uniform_(-1, 1) / num_embeddings)
        self._commitment_loss_weight = commitment_loss_weight
        self.register_buffer('_usage', torch.zeros(num_embeddings))

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the output, which is the output spec of the encoder."""
        return self._latent_spec

    @property
    def codebook(self) -> Tensor:
        """Codes ``[K, D]``."""
        return self._codebook

    @property
    def kld(self) -> float:
        """Divergence of the deterministic posterior from a uniform prior: ``n log K`` nats."""
        return self._num_codes * math.log(len(self._codebook))

    def codebook_statistics(self) -> tuple[Tensor, Tensor]:
        """Return statistics of the codes in recent rollouts (about the last thousand observations).

        Returns:
            Two scalars. The perplexity ``exp(-sum_k f_k log f_k)`` of the frequencies f of the codes, which is K if all
            are equal; and the share of codes with at least a tenth of the mean frequency. NaN before the first rollout.
        """
        share = self._usage / self._usage.sum()
        used = torch.where(share.isnan(), share, (share >= 0.1 / len(share)).to(share.dtype))
        return torch.special.entr(share).sum().exp(), used.mean()

    def _split(self, latent: Tensor) -> Tensor:
        """Reshape ``[B, ...]`` in the shape of the encoder's output to ``[B, n, D]``."""
        return latent.view(len(latent), self._num_codes, -1) if self._is_vector else latent.flatten(2).transpose(1, 2)

    def _join(self, vectors: Tensor) -> Tensor:
        """Invert :meth:`_split`."""
        if not self._is_vector:
            vectors = vectors.transpose(1, 2)
        return vectors.reshape(len(vectors), *self._latent_spec.shape)

    def encode(self, inputs: Tensor) -> Quantized:
        """Encode observations ``[B, ...]``."""
        encoded = self._split(self._encoder(inputs)[0])
        indices = nearest_code(encoded, self._codebook)
        codes = self._codebook[indices]
        return Quantized(self._join(straight_through(codes.detach(), encoded)), indices, encoded, codes)

    def decode(self, z: Tensor) -> Tensor:
        """Decode latents ``[B, ...]`` of ``output_spec`` to observations ``[B, ...]``."""
        return self._decoder(z)[0].view(len(z), *self._input_shape)

    def losses(self, quantized: Quantized, error: Tensor) -> LossInfo:
        """Compute the loss of observations from their codes and the error of their reconstruction.

        Args:
            quantized: result of :meth:`encode`.
            error: ``[B, ...]``, difference between observation and decoded latent.

        Returns:
            ``loss [B]``; ``extra`` is a ``VqvaeInfo``.
        """
        quantization = (quantized.encoded.detach() - quantized.codes).square().mean((1, 2))
        commitment = (quantized.encoded - quantized.codes.detach()).square().mean((1, 2))
        reconstruction = error.square().flatten(1).mean(1)
        return LossInfo(loss=reconstruction + quantization + self._commitment_loss_weight * commitment,
                        extra=VqvaeInfo(quantization, commitment, reconstruction))

    @torch.no_grad()
    def observe_usage(self, indices: Tensor) -> None:
        """Count the codes ``[B, n]`` of a rollout for :meth:`codebook_statistics`."""
        indices = context.cat_over_ranks(indices)
        count = torch.zeros_like(self._usage).index_add_(0, indices.flatten(), self._usage.new_ones(indices.numel()))
        self._usage.mul_(_USAGE_DECAY**len(indices)).add_(count)

    def predict_step(self, inputs: Tensor, state: NestedTensor = ()) -> AlgStep:
        """Reconstruct, and compute the terms of the loss; use :meth:`encode` to get the codes.

        Args:
            inputs: ``[B, ...]``.
            state: not used.

        Returns:
            ``output``: the decoded codes, ``[B, ...]`` with the shape of the inputs; ``info``: a ``VqvaeInfo`` of
            ``[B]``.
        """
        quantized = self.encode(inputs)
        decoded = self.decode(quantized.z)
        perplexity, use = (x.expand(len(inputs)) for x in self.codebook_statistics())
        info = self.losses(quantized, decoded - inputs).extra
        return AlgStep(decoded, (), info._replace(perplexity=perplexity, codebook_use=use))

    def rollout_step(self, inputs: Tensor, state: NestedTensor = ()) -> AlgStep:
        """Encode, and count the use of the codes.

        Args:
            inputs: ``[B, ...]``.
            state: not used.

        Returns:
            ``output``: the output of :meth:`train_step`; ``info``: the info of :meth:`train_step` if training is
            on-policy, otherwise ``()``.
        """
        quantized = self.encode(inputs)
        self.observe_usage(quantized.indices)
        info = self.losses(quantized, self.decode(quantized.z) - inputs) if self.on_policy else ()
        return AlgStep(quantized.z, (), info)

    def train_step(self, inputs: Tensor, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Encode, decode, and compute the loss.

        Args:
            inputs: ``[B, ...]``.
            state: not used.
            rollout_info: not used; each step is encoded again.

        Returns:
            ``output``: the codes ``[B, ...]`` of ``output_spec``, with the gradient of the encoder's output; ``info``:
            a ``LossInfo`` of ``[B]``, with a ``VqvaeInfo`` as ``extra``.
        """
        quantized = self.encode(inputs)
        return AlgStep(quantized.z, (), self.losses(quantized, self.decode(quantized.z) - inputs))

    def calc_loss(self, info: LossInfo) -> LossInfo:
        """Return the losses ``[T, B]`` of :meth:`train_step`."""
        if self._debug_summaries and context.should_record_summaries():
            perplexity, use = self.codebook_statistics()
            with summary.scope(self._name):
                summary.scalar('codebook_perplexity', perplexity)
                summary.scalar('codebook_use', use)
        return info
