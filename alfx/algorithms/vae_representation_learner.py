"""Representation of observations learned by an autoencoder, as a part of an agent.

Encoder and latent are a :class:`~alfx.algorithms.vae.VariationalAutoEncoder`, a
:class:`~alfx.algorithms.vae.DiscreteVAE` or a :class:`~alfx.algorithms.vq_vae.Vqvae`. This module adds a decoder and
its likelihood. The other parts of the agent receive the latent instead of the observation. The loss is the negative
lower bound on the log-likelihood (Kingma & Welling 2014, arXiv:1312.6114, eq. 3), with the weight beta of the
divergence.
"""
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.vae import VariationalAutoEncoder, check_decoder
from alfx.algorithms.vq_vae import Vqvae
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import NonNegative, Positive, check_value, configurable
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec

VAERepresentationInfo = namedtuple(
    'VAERepresentationInfo', ['reconstruction', 'kld', 'elbo', 'beta', 'perplexity', 'codebook_use', 'vae'],
    default_value=())
"""``[B]`` each: ``reconstruction``: mean squared difference between elements of the observation and its reconstruction;
``kld``: divergence of the posterior from the prior, in nats; ``elbo``: log-likelihood of the observation minus
``kld``, in nats; ``beta``: weight of ``kld`` in the loss, ``()`` with a ``Vqvae``; ``perplexity`` and
``codebook_use``: statistics of a ``Vqvae`` in evaluation, see its ``codebook_statistics``; ``vae``: further terms of
the autoencoder in training."""


def gaussian_log_likelihood(observation: Tensor, mean: Tensor, std: float) -> Tensor:
    """Return ``log N(observation | mean, std^2)`` of all elements together: ``[B, ...]`` to ``[B]``, in nats."""
    squares = (observation - mean).square() / (2 * std**2)
    return -(squares + math.log(std) + 0.5 * math.log(2 * math.pi)).flatten(1).sum(1)


def bernoulli_log_likelihood(observation: Tensor, logits: Tensor) -> Tensor:
    """Return ``sum x log p + (1 - x) log(1 - p)`` with ``p = sigmoid(logits)``: ``[B, ...]`` to ``[B]``, in nats.

    For observations x strictly between 0 and 1 this is not a log-likelihood, but it is also largest for ``p = x``.
    """
    return -F.binary_cross_entropy_with_logits(logits, observation, reduction='none').flatten(1).sum(1)


@configurable
class VAERepresentationLearner(Algorithm):
    """Representation learner that encodes observations with an autoencoder, and outputs the latent.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: unused part of the interface of a representation learner, like the next two.
        reward_spec: not used.
        config: not used.
        vae_ctor: called as ``(input_tensor_spec=)``; creates a ``VariationalAutoEncoder`` or ``DiscreteVAE`` without a
            learned prior, or a ``Vqvae``.
        decoder_ctor: called as ``decoder_ctor(latent_spec)`` with the spec of a vector (the one-hot vectors of a
            ``DiscreteVAE`` are concatenated); creates the decoder. Its output has as many elements as the observation
            and is reshaped to it. Not with a ``Vqvae``, which has its own decoder.
        observation_field: path of the tensor to encode in a nested observation; '' for an observation that is one
            tensor.
        keep_other_fields: output the observation with the field replaced by the latent, not the latent alone.
        output: latent to output: 'z_mode', the mode of the posterior, or 'z', a sample of it.
        detach_output: stop the gradients of other parts' losses at the output, so that they do not train the encoder.
        likelihood: likelihood of the observation given the latent: 'gaussian' with the decoder's output as mean, or
            'bernoulli' with the decoder's output as logits, for observations in [0, 1].
        likelihood_std: standard deviation of the Gaussian.
        loss_weight: factor of the loss.
        optimizer: optimizes encoder and decoder; ``None``: the agent's optimizer.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ConfError: an argument is out of range, or has no effect with this autoencoder.
        LookupError: there is no such ``observation_field``.
        SpecError: the encoded field is not a float tensor, or the decoder does not match.
        ValueError: arguments contradict each other.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec = (),
                 reward_spec: TensorSpec = TensorSpec(()), config: TrainerConfig | None = None,
                 vae_ctor: Callable[..., Algorithm] | None = None, decoder_ctor: Callable[..., Any] | None = None,
                 observation_field: str = '', keep_other_fields: bool = False,
                 output: Literal['z', 'z_mode'] = 'z_mode', detach_output: bool = False,
                 likelihood: Literal['bernoulli', 'gaussian'] = 'gaussian', likelihood_std: Positive = 1.0,
                 loss_weight: NonNegative = 1.0, optimizer: Any = None, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'VAERepresentationLearner'):
        owner = type(self).__name__
        check_value(owner, 'vae_ctor', vae_ctor, callable)
        super().__init__(optimizer=optimizer, checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        spec = nest.get_field(observation_spec, observation_field)
        if not isinstance(spec, TensorSpec) or spec.is_discrete:
            raise SpecError(f'{owner}.observation_field: expected the path of one float tensor in the observation, '
                            f'found {spec} at {observation_field!r}; choose a field, or convert it (uint8 images: '
                            '@ImageScaleTransformer in TrainerConfig.data_transformer_ctor)')
        if keep_other_fields and not observation_field:
            raise ValueError(f'{owner}: keep_other_fields=True needs an observation_field')
        assert vae_ctor is not None, 'checked above'
        self._vae: Any = vae_ctor(input_tensor_spec=spec)
        self._decoder: Any = None
        self._observation_shape = tuple(spec.shape)
        self._latent_spec = TensorSpec((self._checked(owner, likelihood, output, decoder_ctor).numel, ))
        if decoder_ctor is not None:
            decoder = decoder_ctor(self._latent_spec)
            self._decoder = check_decoder(owner, 'decoder_ctor', decoder, self._latent_spec, spec)
        self._output_spec = (nest.set_field(observation_spec, observation_field, self._latent_spec)
                             if keep_other_fields else self._latent_spec)
        self._observation_field = observation_field
        self._keep_other_fields = keep_other_fields
        self._output = output
        self._detach_output = detach_output
        self._is_bernoulli = likelihood == 'bernoulli'
        self._likelihood_std = likelihood_std
        self._loss_weight = loss_weight

    def _checked(self, owner: str, likelihood: str, output: str, decoder_ctor: Any) -> TensorSpec:
        """Check that the arguments match the autoencoder, and return the spec of the latent."""
        vae = self._vae
        if isinstance(vae, Vqvae):
            if decoder_ctor is not None or likelihood != 'gaussian' or output != 'z_mode':
                raise ValueError(f'{owner}: a Vqvae has its own decoder_ctor and squared error, and outputs its codes: '
                                 'leave out decoder_ctor, likelihood and output')
        elif not isinstance(vae, VariationalAutoEncoder):
            raise ValueError(f'{owner}.vae_ctor: expected a VariationalAutoEncoder, DiscreteVAE or Vqvae, found '
                             f'{type(vae).__name__}')
        elif decoder_ctor is None:
            raise ValueError(f'{owner}: decoder_ctor is required with a {type(vae).__name__}')
        elif vae.has_learned_prior:
            raise ValueError(f'{owner}.vae_ctor: found a learned prior, whose input is not available here; leave out '
                             'the prior network')
        return vae.output_spec

    @property
    def output_spec(self) -> NestedTensorSpec:
        """Spec of the output: the latent as a vector, or the observation with the field replaced by it."""
        return self._output_spec

    @property
    def vae(self) -> Any:
        """Autoencoder that provides encoder and latent."""
        return self._vae

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set ``on_policy`` of this algorithm and of the autoencoder."""
        super().set_on_policy(is_on_policy)
        if hasattr(self, '_vae'):
            self._vae.set_on_policy(is_on_policy)

    def decode(self, z: Tensor) -> Tensor:
        """Return reconstructions ``[B, ...]``, in the shape of the observation, of latents ``[B, n]``."""
        decoded = self._decoded(z)
        return decoded.sigmoid() if self._is_bernoulli else decoded

    def _decoded(self, z: Tensor) -> Tensor:
        """Return the output of the decoder, in the shape of the observation."""
        if self._decoder is None:
            return self._vae.decode(z.view(-1, *self._vae.output_spec.shape))
        return self._decoder(z)[0].view(-1, *self._observation_shape)

    def _replaced(self, observation: NestedTensor, latent: Tensor) -> NestedTensor:
        """Return the output for an observation and a latent."""
        latent = latent.flatten(1)
        if self._detach_output:
            latent = latent.detach()
        return nest.set_field(observation, self._observation_field, latent) if self._keep_other_fields else latent

    def _learn(self, observation: NestedTensor, is_rollout: bool = False) -> tuple[NestedTensor, LossInfo]:
        """Return output and losses ``[B]``."""
        x = nest.get_field(observation, self._observation_field)
        if isinstance(self._vae, Vqvae):
            latent, loss, info = self._quantize(x, is_rollout)
        else:
            encoded = self._vae.train_step(x)
            decoded = self._decoded(encoded.output.z.flatten(1))
            log_likelihood = (bernoulli_log_likelihood(x, decoded) if self._is_bernoulli else
                              gaussian_log_likelihood(x, decoded, self._likelihood_std))
            latent, loss = getattr(encoded.output, self._output), encoded.info.loss - log_likelihood
            mean = decoded.detach().sigmoid() if self._is_bernoulli else decoded.detach()
            info = VAERepresentationInfo(
                reconstruction=(mean - x).square().flatten(1).mean(1), kld=encoded.info.kld.detach(),
                elbo=(log_likelihood - encoded.info.kld).detach(), beta=encoded.info.beta)
        return self._replaced(observation, latent), LossInfo(loss=self._loss_weight * loss, extra=info)

    def _quantize(self, x: Tensor, is_rollout: bool) -> tuple[Tensor, Tensor, Any]:
        """Return latent, loss and info of a ``Vqvae``."""
        quantized = self._vae.encode(x)
        if is_rollout:
            self._vae.observe_usage(quantized.indices)
        decoded = self._vae.decode(quantized.z)
        losses = self._vae.losses(quantized, decoded - x)
        kld = torch.full_like(losses.loss, self._vae.kld)
        elbo = gaussian_log_likelihood(x, decoded.detach(), self._likelihood_std) - kld
        return quantized.z, losses.loss, VAERepresentationInfo(
            reconstruction=losses.extra.reconstruction.detach(), kld=kld, elbo=elbo,
            vae=losses.extra._replace(reconstruction=()))

    def predict_step(self, time_step: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Encode, and compute the reconstruction error.

        Args:
            time_step: ``[B, ...]``.
            state: not used.

        Returns:
            ``output``: the nest ``[B, ...]`` of ``output_spec``; ``info``: a ``VAERepresentationInfo``.
        """
        output, losses = self._learn(time_step.observation)
        info = losses.extra._replace(vae=())
        if isinstance(self._vae, Vqvae):
            perplexity, use = (x.expand_as(info.kld) for x in self._vae.codebook_statistics())
            info = info._replace(perplexity=perplexity, codebook_use=use)
        return AlgStep(output, (), info)

    def rollout_step(self, time_step: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Encode.

        Args:
            time_step: ``[B, ...]``.
            state: not used.

        Returns:
            ``output``: the nest ``[B, ...]`` of ``output_spec``; ``info``: the info of :meth:`train_step` if training
            is on-policy, otherwise ``()``.
        """
        if self.on_policy:
            output, losses = self._learn(time_step.observation, is_rollout=True)
            return AlgStep(output, (), losses)
        encoded = self._vae.rollout_step(nest.get_field(time_step.observation, self._observation_field)).output
        latent = encoded if isinstance(self._vae, Vqvae) else getattr(encoded, self._output)
        return AlgStep(self._replaced(time_step.observation, latent))

    def train_step(self, time_step: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Encode, decode, and compute the loss.

        Args:
            time_step: ``[B, ...]``.
            state: not used.
            rollout_info: not used; each step is encoded again.

        Returns:
            ``output``: the nest ``[B, ...]`` of ``output_spec``; ``info``: a ``LossInfo`` of ``[B]``, with a
            ``VAERepresentationInfo`` as ``extra``.
        """
        output, losses = self._learn(time_step.observation)
        return AlgStep(output, (), losses)
