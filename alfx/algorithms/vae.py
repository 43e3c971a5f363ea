"""Variational autoencoders: encoder, latent, and the divergence loss of the latent; the caller adds a decoder.

Kingma & Welling 2014 (arXiv:1312.6114), with the weight ``beta`` of the divergence (beta-VAE, Higgins et al. 2017,
ICLR), which is fixed or learned to keep the divergence at a target. The latent is Gaussian
(:class:`VariationalAutoEncoder`) or a vector of categorical variables (:class:`DiscreteVAE`). Categorical variables are
trained with the straight-through estimator (Bengio et al. 2013, arXiv:1308.3432) or the Gumbel-softmax estimator (Jang
et al. 2017, arXiv:1611.01144). Differences from the papers:

- The prior may be learned, as a function of a separate input (Sohn et al. 2015, NeurIPS). The encoder then receives the
  parameters of the prior (mean and log variance, or logits), and its output is added to them, as in the layers of
  Vahdat & Kautz 2020 (arXiv:2007.03898, section 3.2). An encoder output of 0 thus has no divergence.
- ``beta`` can follow a target: ``log(beta)`` descends ``log(beta) * (target - divergence)``. This is gradient ascent on
  the multiplier of the constraint that the divergence is at most the target.

Read next: :mod:`alfx.algorithms.vae_representation_learner`, which adds a decoder.
"""
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.data_structures import AlgStep, LossInfo, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Count, NonNegative, Positive, check_value, configurable, problem_at
from alfx.layers import FC, Reshape
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.math_ops import identity
from alfx.utils.schedulers import ConstantScheduler, as_scheduler

VAEInfo = namedtuple('VAEInfo', ['kld', 'z_std', 'loss', 'beta_loss', 'beta'], default_value=())
"""``kld [B]``: divergence of the posterior from the prior, in nats; ``z_std [B, ...]``: standard deviation of the
posterior; ``loss [B]``: ``beta * kld``, plus ``beta_loss`` if beta is learned; ``beta_loss [B]``: loss of
``log(beta)``, or ``()`` if it is fixed; ``beta [B]``: value of beta."""

VAEOutput = namedtuple('VAEOutput', ['z', 'z_mode', 'z_std'], default_value=())
"""``z``: a sample of the posterior; ``z_mode``: mode of the posterior; ``z_std``: standard deviation of the posterior.
``[B, z_dim]`` each, or ``[B, n, K]`` for n variables with K values."""


def gaussian_kld(mean: Tensor, log_var: Tensor, prior_mean: Tensor | float = 0.0,
                 prior_log_var: Tensor | float = 0.0) -> Tensor:
    """Return ``KL(N(mean, var) || N(prior_mean, prior_var))`` of diagonal Gaussians (Kingma & Welling 2014, app. B).

        KL = 1/2 sum_i (var_i / prior_var_i + (mean_i - prior_mean_i)^2 / prior_var_i - 1 - log(var_i / prior_var_i))

    Args:
        mean: ``[..., D]``.
        log_var: ``[..., D]``.
        prior_mean: ``[..., D]`` or a number.
        prior_log_var: ``[..., D]`` or a number.

    Returns:
        Divergence ``[...]``, in nats.
    """
    log_ratio = log_var - prior_log_var
    precision = prior_log_var.neg().exp() if isinstance(prior_log_var, Tensor) else math.exp(-prior_log_var)
    return 0.5 * (log_ratio.exp() + (mean - prior_mean).square() * precision - 1 - log_ratio).sum(-1)


def categorical_kld(logits: Tensor, prior_logits: Tensor | None = None) -> Tensor:
    """Return the divergence of vectors of categorical variables, ``sum_i sum_k q_ik log(q_ik / p_ik)``.

    Args:
        logits: ``[..., n, K]``.
        prior_logits: ``[..., n, K]``; ``None`` for a uniform prior.

    Returns:
        Divergence ``[...]``, in nats.
    """
    log_q = logits.log_softmax(-1)
    log_p = -math.log(logits.shape[-1]) if prior_logits is None else prior_logits.log_softmax(-1)
    return (log_q.exp() * (log_q - log_p)).sum((-2, -1))


def straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``surrogate`` of the same shape (Bengio et al. 2013, section 3)."""
    return value + (surrogate - surrogate.detach())  # exactly value: the added difference is exactly 0


def one_hot_of_largest(scores: Tensor) -> Tensor:
    """Return one-hot vectors ``[..., K]`` of the largest of ``scores [..., K]``, the first one in a tie."""
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)


def _flat_encoder(input_tensor_spec: NestedTensorSpec, sizes: tuple[int, ...]) -> Network:
    """Create fully connected layers on the concatenated leaves of the input."""
    flatten = nest.map_structure(lambda spec: None if spec.ndim == 1 else Reshape(spec.numel), input_tensor_spec)
    nested = not isinstance(input_tensor_spec, TensorSpec)
    return EncodingNetwork(input_tensor_spec, input_preprocessors=flatten if nested else None,
                           preprocessing_combiner=NestConcat() if nested else None, fc_layer_params=sizes,
                           name='z_encoder')


def _shapes(spec: NestedTensorSpec) -> NestedTensorSpec:
    """Return the nest of specs without bounds, for comparison."""
    return nest.map_structure(TensorSpec.from_spec, spec)


def check_encoder(owner: str, argument: str, network: Any, input_tensor_spec: NestedTensorSpec | None) -> Network:
    """Return ``network`` if it accepts inputs of this spec (``None``: any) and is not recurrent.

    Args:
        owner: name of the class, for error messages.
        argument: name of the argument that created the network, for error messages.
        network: network to check.
        input_tensor_spec: nest of specs.

    Raises:
        SpecError: the network has another input spec.
        ValueError: it is recurrent, or not a ``Network``.
    """
    if not isinstance(network, Network):
        raise ValueError(f'{owner}.{argument}: expected a Network, found {network!r}')
    if network.is_rnn:
        raise ValueError(f'{owner}.{argument}: {network.name} is recurrent, but the encoder processes single '
                         'observations; choose a network that is not recurrent')
    if input_tensor_spec is not None and _shapes(network.input_tensor_spec) != _shapes(input_tensor_spec):
        raise SpecError(f'{owner}.{argument}: expected a network with the input spec {input_tensor_spec}, found '
                        f'{network.input_tensor_spec}')
    return network


def check_decoder(owner: str, argument: str, network: Any, latent_spec: TensorSpec, observation_spec: TensorSpec
                  ) -> Network:
    """Return ``network`` if it accepts ``latent_spec`` and outputs as many elements as ``observation_spec`` has.

    Args:
        owner: name of the class, for error messages.
        argument: name of the argument that created the network, for error messages.
        network: network to check.
        latent_spec: spec of its input.
        observation_spec: spec of the decoded observation.

    Raises:
        SpecError: the network has another input spec or output size.
        ValueError: it is recurrent, or not a ``Network``.
    """
    decoded = check_encoder(owner, argument, network, latent_spec).output_spec
    if not isinstance(decoded, TensorSpec) or decoded.numel != observation_spec.numel:
        raise SpecError(f'{owner}.{argument}: expected an output of {observation_spec.numel} elements, the size of '
                        f'{observation_spec}, found {decoded}')
    return network


def _check_size(owner: str, argument: str, network: Network, size: int | None) -> int:
    """Return the size of the network's output; raise an error unless it is a vector, of ``size`` if given."""
    spec = network.output_spec
    if not isinstance(spec, TensorSpec) or spec.ndim != 1 or (size is not None and spec.numel != size):
        raise SpecError(f'{owner}.{argument}: expected an output of shape ({"n" if size is None else size},), found '
                        f'{spec}')
    return spec.numel


class _LatentEncoder(Algorithm):
    """Base class of the encoders: the prior, the weight of the divergence, and the steps.

    Args:
        encoder: maps the input, or input and prior, to features ``[B, size]``.
        prior: maps the input of the prior to its parameters; ``None``: the prior is fixed.
        beta: weight of the divergence, or its initial value if it is learned.
        target_kld: target of the divergence in nats, for which beta is learned; ``None``: beta is fixed.
        beta_optimizer: optimizes beta; ``None``: the optimizer of the enclosing algorithm.
        checkpoint: as in ``Algorithm``.
        name: name of this algorithm.
    """

    _beta: Tensor

    def __init__(self, encoder: Network, prior: Network | None, beta: float, target_kld: float | None,
                 beta_optimizer: Any, checkpoint: str | None, name: str):
        super().__init__(checkpoint=checkpoint, name=name)
        self._encoder = encoder
        self._prior = prior
        self._target_kld = target_kld
        if target_kld is None:
            if beta_optimizer is not None:
                raise ValueError(f'{type(self).__name__}: beta_optimizer has no parameters, because beta is fixed '
                                 'without a target of the divergence; set the target, or leave out beta_optimizer')
            self.register_buffer('_beta', torch.tensor(float(beta)))
        else:
            check_value(type(self).__name__, 'beta', beta, float, above=0)
            self._log_beta = nn.Parameter(torch.tensor(math.log(beta)))
            if beta_optimizer is not None:
                self.add_optimizer(beta_optimizer, [self._log_beta])

    @property
    def has_learned_prior(self) -> bool:
        """Flag: the prior is a learned function of a separate input."""
        return self._prior is not None

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of each field of the output."""
        raise NotImplementedError

    def _posterior(self, features: Tensor, prior: Tensor | None) -> tuple[Any, Tensor]:
        """Return ``VAEOutput`` and divergence ``[B]`` for features of the encoder and parameters of the prior."""
        raise NotImplementedError

    def _encode(self, inputs: NestedTensor) -> AlgStep:
        prior = None
        if self._prior is not None:
            prior_input, observation = inputs
            prior, _ = self._prior(prior_input)
            inputs = prior_input, observation, prior
        features, _ = self._encoder(inputs)
        output, kld = self._posterior(features, prior)
        beta_loss: Any = ()
        if self._target_kld is None:
            beta = self._beta
            loss = beta * kld
        else:
            beta = self._log_beta.detach().exp()
            beta_loss = self._log_beta * (self._target_kld - kld.detach())
            loss = beta * kld + beta_loss
        return AlgStep(output, (), VAEInfo(kld=kld, z_std=output.z_std, loss=loss, beta_loss=beta_loss,
                                           beta=beta.expand_as(kld)))

    def predict_step(self, inputs: NestedTensor, state: NestedTensor = ()) -> AlgStep:
        """Run :meth:`train_step`."""
        return self._encode(inputs)

    def rollout_step(self, inputs: NestedTensor, state: NestedTensor = ()) -> AlgStep:
        """Run :meth:`train_step`."""
        return self._encode(inputs)

    def train_step(self, inputs: NestedTensor, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Encode and sample.

        Args:
            inputs: nest ``[B, ...]`` to encode; with a learned prior ``(prior_input, input)``.
            state: not used.
            rollout_info: not used; each step is encoded again.

        Returns:
            ``output`` is a ``VAEOutput``, ``state`` is ``()``, ``info`` is a ``VAEInfo``. The gradient of losses that
            use ``output.z`` or ``output.z_mode`` reaches the encoder.
        """
        return self._encode(inputs)

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of the latent: ``info.loss [T, B]`` of a ``VAEInfo``."""
        return LossInfo(loss=info.loss, extra=info)


@configurable
class VariationalAutoEncoder(_LatentEncoder):
    """Encoder with a diagonal Gaussian latent; samples it and computes its divergence from the prior.

    With a decoder for ``log p(x | z)``, minimizing ``-log p(x | z) + VAEInfo.loss`` maximizes the lower bound
    ``E[log p(x | z)] - KL(q(z | x) || p(z))`` on ``log p(x)`` (Kingma & Welling 2014, eq. 3) if beta is 1.

    Args:
        z_dim: dimension of the latent.
        input_tensor_spec: nest of specs of the input; ``None``: the input spec of ``preprocess_network``.
        preprocess_network: maps the input ``[B, ...]`` to a vector; with a ``z_prior_network`` it receives
            ``(prior_input, input, output of the prior)``. A network, or a constructor called as
            ``(input_tensor_spec=)``; ``None``: fully connected layers of sizes ``(2 * z_dim, 2 * z_dim)``.
        z_prior_network: outputs the concatenated mean and log variance of the prior: ``[B, 2 * z_dim]``. ``None``: the
            prior is the standard normal distribution.
        beta: weight of the divergence, or its initial value if it is learned. Larger values compress more.
        target_kld_per_dim: target of the divergence per dimension of the latent in nats, for which beta is learned;
            ``None``: beta is fixed.
        beta_optimizer: optimizes beta; ``None``: the optimizer of the enclosing algorithm.
        checkpoint: as in ``Algorithm``.
        name: name of this algorithm.

    Raises:
        ConfError: a number is out of range.
        SpecError: a network has an input or output of the wrong shape.
        ValueError: arguments contradict each other, or a network is recurrent.
    """

    def __init__(self, z_dim: Count, input_tensor_spec: NestedTensorSpec | None = None,
                 preprocess_network: Network | Callable[..., Network] | None = None,
                 z_prior_network: Network | None = None, beta: NonNegative = 1.0,
                 target_kld_per_dim: Positive | None = None, beta_optimizer: Any = None, checkpoint: str | None = None,
                 name: str = 'VariationalAutoEncoder'):
        owner = type(self).__name__
        spec = input_tensor_spec
        if z_prior_network is not None:
            check_encoder(owner, 'z_prior_network', z_prior_network, None)
            _check_size(owner, 'z_prior_network', z_prior_network, 2 * z_dim)
            if spec is not None:
                spec = z_prior_network.input_tensor_spec, spec, z_prior_network.output_spec
        if not isinstance(preprocess_network, Network):
            if spec is None:
                raise ValueError(f'{owner}: input_tensor_spec is required unless preprocess_network is a network, '
                                 'which has an input spec')
            preprocess_network = (_flat_encoder(spec, (2 * z_dim, 2 * z_dim)) if preprocess_network is None else
                                  preprocess_network(input_tensor_spec=spec))
        encoder = check_encoder(owner, 'preprocess_network', preprocess_network, spec)
        size = _check_size(owner, 'preprocess_network', encoder, None)
        target = None if target_kld_per_dim is None else target_kld_per_dim * z_dim
        super().__init__(encoder, z_prior_network, beta, target, beta_optimizer, checkpoint, name)
        self._z_dim = z_dim
        self._mean_and_log_var = FC(size, 2 * z_dim, identity)

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of each field of the output: a vector of ``z_dim``."""
        return TensorSpec((self._z_dim, ))

    def _posterior(self, features: Tensor, prior: Tensor | None) -> tuple[Any, Tensor]:
        mean, log_var = self._mean_and_log_var(features).chunk(2, -1)
        if prior is None:
            kld = gaussian_kld(mean, log_var)
        else:
            prior_mean, prior_log_var = prior.chunk(2, -1)
            mean, log_var = mean + prior_mean, log_var + prior_log_var
            kld = gaussian_kld(mean, log_var, prior_mean, prior_log_var)
        std = (0.5 * log_var).exp()
        return VAEOutput(z=mean + std * torch.randn_like(mean), z_mode=mean, z_std=std), kld


@configurable
def categorical_spec(num_variables: Count, num_values: Count) -> BoundedTensorSpec:
    """Return the spec of a vector of categorical variables, for confs: ``DiscreteVAE.z_spec = @categorical_spec()``.

    Args:
        num_variables: number n of variables.
        num_values: number K of values of each variable, 0 to K - 1.
    """
    return BoundedTensorSpec((num_variables, ), torch.int64, 0, num_values - 1)


@configurable
class DiscreteVAE(VariationalAutoEncoder):
    """Encoder with a vector of categorical variables as latent, sampled as one-hot vectors.

    With the probabilities q of the posterior and a sample z, the output has the value z and the gradient of

    - 'st': q (straight-through, Bengio et al. 2013);
    - 'st-gumbel': ``softmax((log q + g) / temperature)``, where g is the Gumbel noise with which z was sampled as the
      largest of ``log q + g`` (Jang et al. 2017, section 2.2).

    ``z_mode`` is the most likely one-hot vector, with the gradient of q. ``z_std`` is the standard deviation of the
    elements of a one-hot vector, ``sqrt(q (1 - q))``, without gradient.

    Args:
        z_spec: int spec of shape ``(n,)`` with values from 0 to K - 1: n variables with K values, see
            :func:`categorical_spec`.
        input_tensor_spec: nest of specs of the input.
        z_network_cls: creates the encoder; called as ``(input_tensor_spec=, last_layer_size=n * K,
            last_activation=identity)``, where the input is ``(prior_input, input, output of the prior)`` with a learned
            prior.
        prior_input_tensor_spec: nest of specs of the input of the prior; required by ``prior_z_network_cls``.
        prior_z_network_cls: creates the network of the logits of the prior, ``[B, n * K]``; called as
            ``(input_tensor_spec=prior_input_tensor_spec, last_layer_size=n * K, last_activation=identity)``. ``None``:
            the prior is uniform.
        mode: 'st' or 'st-gumbel'.
        gumbel_temp_scheduler: temperature, a number or a schedule; only with ``mode='st-gumbel'``.
        beta: weight of the divergence, or its initial value if it is learned.
        target_kld_per_categorical: target of the divergence per variable in nats, for which beta is learned; ``None``:
            beta is fixed.
        beta_optimizer: optimizes beta; ``None``: the optimizer of the enclosing algorithm.
        name: name of this algorithm.

    Raises:
        ConfError: a number or ``mode`` is out of range, or ``gumbel_temp_scheduler`` is set with another mode.
        SpecError: ``z_spec`` is not such a spec, or a network has an input or output of the wrong shape.
        ValueError: arguments contradict each other, or a network is recurrent.
    """

    def __init__(self, z_spec: BoundedTensorSpec, input_tensor_spec: NestedTensorSpec | None = None,
                 z_network_cls: Callable[..., Network] = EncodingNetwork,
                 prior_input_tensor_spec: NestedTensorSpec | None = None,
                 prior_z_network_cls: Callable[..., Network] | None = None, mode: Literal['st', 'st-gumbel'] = 'st',
                 gumbel_temp_scheduler: Positive | Callable[[], Positive] = 1.0, beta: NonNegative = 1.0,
                 target_kld_per_categorical: Positive | None = None, beta_optimizer: Any = None,
                 name: str = 'DiscreteVAE'):
        owner = type(self).__name__
        if mode == 'st' and gumbel_temp_scheduler != 1.0:
            raise ConfError([problem_at(owner, 'gumbel_temp_scheduler', "has no effect with mode='st'",
                                        "choose mode='st-gumbel', or leave it out")])
        if (prior_z_network_cls is None) != (prior_input_tensor_spec is None):
            raise ValueError(f'{owner}: prior_z_network_cls and prior_input_tensor_spec must be given together')
        if input_tensor_spec is None:
            raise ValueError(f'{owner}: input_tensor_spec is required to create the encoder')
        self._set_sizes(owner, z_spec)
        size = self._num_variables * self._num_values
        options = dict(last_layer_size=size, last_activation=identity)
        prior, spec = None, input_tensor_spec
        if prior_z_network_cls is not None:
            prior = prior_z_network_cls(input_tensor_spec=prior_input_tensor_spec, **options)
            check_encoder(owner, 'prior_z_network_cls', prior, prior_input_tensor_spec)
            _check_size(owner, 'prior_z_network_cls', prior, size)
            spec = prior_input_tensor_spec, input_tensor_spec, prior.output_spec
        encoder = check_encoder(owner, 'z_network_cls', z_network_cls(input_tensor_spec=spec, **options), spec)
        _check_size(owner, 'z_network_cls', encoder, size)
        target = None if target_kld_per_categorical is None else target_kld_per_categorical * self._num_variables
        _LatentEncoder.__init__(self, encoder, prior, beta, target, beta_optimizer, None, name)
        self._temperature = as_scheduler(gumbel_temp_scheduler)
        self._uses_gumbel_gradient = mode == 'st-gumbel'

    def _set_sizes(self, owner: str, z_spec: BoundedTensorSpec) -> None:
        found = f'{owner}.z_spec: expected a bounded int spec of shape (n,) with the values 0 to K - 1, found {z_spec}'
        if not isinstance(z_spec, BoundedTensorSpec) or z_spec.ndim != 1 or not z_spec.is_discrete:
            raise SpecError(found)
        highest = set(z_spec.maximum.reshape(-1).tolist())
        if (z_spec.minimum != 0).any() or len(highest) != 1:
            raise SpecError(found)
        self._num_variables, self._num_values = z_spec.numel, int(highest.pop()) + 1

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are traceable with a constant temperature and traceable layers."""
        is_constant = isinstance(self._temperature, ConstantScheduler)
        return super().own_capabilities()._replace(traceable_update=is_constant and is_traceable(self))

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of each field of the output: n one-hot vectors ``(n, K)``."""
        return TensorSpec((self._num_variables, self._num_values))

    def _posterior(self, features: Tensor, prior: Tensor | None) -> tuple[Any, Tensor]:
        shape = -1, self._num_variables, self._num_values
        logits, prior_logits = features, None
        if prior is not None:
            logits, prior_logits = features + prior, prior.view(shape)
        logits = logits.view(shape)
        probability = logits.softmax(-1)
        scores = logits.log_softmax(-1) - torch.empty_like(logits).exponential_().log()  # with Gumbel noise
        surrogate = (scores / self._temperature()).softmax(-1) if self._uses_gumbel_gradient else probability
        output = VAEOutput(z=straight_through(one_hot_of_largest(scores.detach()), surrogate),
                           z_mode=straight_through(one_hot_of_largest(logits.detach()), probability),
                           z_std=(probability * (1 - probability)).detach().sqrt())
        return output, categorical_kld(logits, prior_logits)
