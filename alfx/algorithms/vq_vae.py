"""Vector-quantised variational autoencoder: a discrete latent out of a codebook that is learned.

van den Oord et al. 2017, "Neural Discrete Representation Learning" (https://arxiv.org/abs/1711.00937). Each vector that
the encoder outputs is replaced by the nearest code (eq. 1 and 2), the decoder sees the codes. Its gradient is copied to
the encoder past the replacement; the codes learn from the distance (eq. 3):

    loss = ||x - decode(z_q)||^2 + ||sg[z_e] - z_q||^2 + commitment_loss_weight * ||z_e - sg[z_q]||^2

What differs from the paper: the squares are means over the elements, not sums, so that the weight does not depend on
the sizes of observation and latent; the weight is 1 in place of 0.25 unless it is set. As in the paper the codes follow
the gradient of the second term (not a moving average), the prior is uniform while the autoencoder is learned, and so
the divergence is a constant, ``n log K`` for n codes out of K, which no loss contains.
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
from alfx.gin_utils import configurable
from alfx.gin_utils.value_checks import Count, NonNegative
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, SpecError, TensorSpec

VqvaeInfo = namedtuple('VqvaeInfo', ['quantization', 'commitment', 'reconstruction', 'perplexity', 'codebook_use'],
                       default_value=())
"""``[B]`` each: the three terms of the loss, before they are weighted; for the last two see
:meth:`Vqvae.codebook_statistics` (``()`` in training)."""

_USAGE_DECAY = 0.999  # per observation: the codes of about the last thousand count


class Quantized(NamedTuple):
    """What :meth:`Vqvae.encode` returns.

    Attributes:
        z: the codes, with the gradient of the encoder's output; ``[B, ...]`` in the shape of that output.
        indices: int64 ``[B, n]``: which codes.
        encoded: ``[B, n, embedding_dim]``: what was replaced.
        codes: ``[B, n, embedding_dim]``: what by.
    """

    z: Tensor
    indices: Tensor
    encoded: Tensor
    codes: Tensor


def nearest_code(vectors: Tensor, codebook: Tensor) -> Tensor:
    """Index of the code at the smallest Euclidean distance, the first of equal ones (van den Oord et al. 2017, eq. 1).

    Args:
        vectors: ``[..., D]``.
        codebook: ``[K, D]``.

    Returns:
        int64 ``[...]``.
    """
    with torch.no_grad():  # |v - e|^2 without |v|^2, which is the same for all codes
        return (codebook.square().sum(-1) - 2 * vectors @ codebook.t()).argmin(-1)


@configurable
class Vqvae(Algorithm):
    """A vector-quantised variational autoencoder.

    Each observation becomes n codes out of K. The output of the encoder says how many: a vector of n times
    ``embedding_dim`` elements, or an image ``(embedding_dim, ...)``, of which every place gets a code.

    Args:
        input_tensor_spec: float32 spec of what is encoded.
        num_embeddings: K, the number of codes.
        embedding_dim: D, the dimension of a code.
        encoder_ctor: called as ``encoder_ctor(input_tensor_spec)``; makes the encoder.
        decoder_ctor: called as ``decoder_ctor(latent_spec)``, with the ``output_spec`` of the encoder; makes the
            decoder, whose output has as many elements as the input; it is reshaped to it.
        optimizer: owns encoder, decoder and codes; ``None`` leaves them to the optimizer of the enclosing algorithm.
        commitment_loss_weight: weight of the third term of the loss.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write the use of the codebook.
        name: name of this algorithm.

    Raises:
        ConfError: a number is out of range.
        SpecError: a network takes or makes something of another shape.
        ValueError: a network with memory.
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
        # As wide as in van den Oord's own implementation.
        self._codebook = nn.Parameter(torch.empty(num_embeddings, embedding_dim).uniform_(-1, 1) / num_embeddings)
        self._commitment_loss_weight = commitment_loss_weight
        self.register_buffer('_usage', torch.zeros(num_embeddings))

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the output: that of the encoder."""
        return self._latent_spec

    @property
    def codebook(self) -> Tensor:
        """The codes ``[K, D]``."""
        return self._codebook

    @property
    def kld(self) -> float:
        """The divergence of the posterior, which is certain of its codes, from a uniform prior: ``n log K`` nats."""
        return self._num_codes * math.log(len(self._codebook))

    def codebook_statistics(self) -> tuple[Tensor, Tensor]:
        """How much of the codebook the rollouts used lately (about the last thousand observations).

        Returns:
            Scalars: the perplexity ``exp(-sum_k f_k log f_k)`` of the shares f of the codes, which is K if all are used
            alike; and the share of codes that are used at least a tenth as often as that. NaN before the first rollout.
        """
        share = self._usage / self._usage.sum()
        used = torch.where(share.isnan(), share, (share >= 0.1 / len(share)).to(share.dtype))
        return torch.special.entr(share).sum().exp(), used.mean()

    def _split(self, latent: Tensor) -> Tensor:
        """``[B, ...]`` in the shape of the encoder's output to ``[B, n, D]``."""
        if self._is_vector:
            return latent.view(len(latent), self._num_codes, -1)
        return latent.flatten(2).transpose(1, 2)

    def _join(self, vectors: Tensor) -> Tensor:
        """The inverse of :meth:`_split`."""
        if not self._is_vector:
            vectors = vectors.transpose(1, 2)
        return vectors.reshape(len(vectors), *self._latent_spec.shape)

    def encode(self, inputs: Tensor) -> Quantized:
        """Observations ``[B, ...]`` to codes."""
        encoded = self._split(self._encoder(inputs)[0])
        indices = nearest_code(encoded, self._codebook)
        codes = self._codebook[indices]
        return Quantized(self._join(straight_through(codes.detach(), encoded)), indices, encoded, codes)

    def decode(self, z: Tensor) -> Tensor:
        """Latents ``[B, ...]`` of ``output_spec`` to observations ``[B, ...]``."""
        return self._decoder(z)[0].view(len(z), *self._input_shape)

    def losses(self, quantized: Quantized, error: Tensor) -> LossInfo:
        """The loss of observations whose codes were decoded with this squared error.

        Args:
            quantized: of :meth:`encode`.
            error: ``[B, ...]``: difference between observation and decoded latent.

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
        """Reconstruct and measure; for the codes there is :meth:`encode`.

        Args:
            inputs: ``[B, ...]``.
            state: not used, there is none.

        Returns:
            ``output``: the decoded codes, ``[B, ...]`` as the inputs; ``info``: a ``VqvaeInfo`` of ``[B]``.
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
            state: not used, there is none.

        Returns:
            ``output`` as of :meth:`train_step`; so is ``info`` if training is on-policy, otherwise ``()``.
        """
        quantized = self.encode(inputs)
        self.observe_usage(quantized.indices)
        info = self.losses(quantized, self.decode(quantized.z) - inputs) if self.on_policy else ()
        return AlgStep(quantized.z, (), info)

    def train_step(self, inputs: Tensor, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Encode, decode, compare.

        Args:
            inputs: ``[B, ...]``.
            state: not used, there is none.
            rollout_info: not used: each step is encoded again.

        Returns:
            ``output``: the codes ``[B, ...]`` of ``output_spec``, with the gradient of what the encoder output;
            ``info``: the ``LossInfo`` of ``[B]``, with a ``VqvaeInfo``.
        """
        quantized = self.encode(inputs)
        return AlgStep(quantized.z, (), self.losses(quantized, self.decode(quantized.z) - inputs))

    def calc_loss(self, info: LossInfo) -> LossInfo:
        """The losses ``[T, B]`` of :meth:`train_step`."""
        if self._debug_summaries and context.should_record_summaries():
            perplexity, use = self.codebook_statistics()
            with summary.scope(self._name):
                summary.scalar('codebook_perplexity', perplexity)
                summary.scalar('codebook_use', use)
        return info
