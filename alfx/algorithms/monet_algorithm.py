"""MONet: unsupervised decomposition of images into slots, ideally one per object, each with its own latent vector.

Burgess et al. 2019, "MONet: Unsupervised Scene Decomposition and Representation" (https://arxiv.org/abs/1901.11390).
An attention network divides the pixels among K slots with masks ``m_k`` that sum to 1. A variational autoencoder,
shared by all slots, encodes the image with one mask at a time into ``z_k`` and decodes means ``mu_k`` of the pixels
and logits of the mask. With ``q(c=k) = m_k`` and ``p(c=k | z)`` the softmax of the logits, the loss is (eq. 3)::

    - sum_pixels log sum_k m_k N(x; mu_k, sigma_k)
    + beta sum_k KL(q(z_k | x, m_k) || N(0, 1)) + gamma sum_pixels KL(q(c) || p(c | z))

Differences from the paper:

- Each slot has a different standard deviation, evenly spaced between the two that the paper uses for the first slot and
  the others. This breaks the symmetry between slots from the start.
- Encoder and attention network receive masks between 0 and 1, not their logarithms, which have no lower bound.
- All slots can get their masks at once (``recurrent_attention=False``), which takes one pass of the attention network.
- The attention network downsamples with max pooling, and its first block keeps the size of the image.

:class:`MoNetAlgorithm` is the algorithm for images; :class:`MoNetRepresentationLearner` wraps it as the representation
learner of an :class:`~alfx.algorithms.agent.Agent`.
"""
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.monet.adjusted_rand_index import adjusted_rand_index
from alfx.algorithms.vae import VAEOutput, gaussian_kld
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import Count, NonNegative, Range, configurable
from alfx.layers import FC, Conv2D
from alfx.networks.encoding_networks import EncodingNetwork, SpatialBroadcastDecodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec, torch_dtype_to_str
from alfx.utils.dist_utils import DiagMultivariateNormal
from alfx.utils.math_ops import identity

MoNetInfo = namedtuple('MoNetInfo', ['kld', 'rec_loss', 'mask_rec_loss', 'full_rec', 'mask', 'z_dist'],
                       default_value=())
"""Terms of the loss ``[B]`` before their weights; the reconstruction ``[B, C, H, W]``, ``sum_k m_k mu_k``; the masks of
the attention network ``[B, n_slots, H, W]``; the posterior, over ``[n_slots, slot_size]``."""

MoNetMeasures = namedtuple('MoNetMeasures', ['adjusted_rand_index', 'reconstruction', 'kld'], default_value=())
"""Quality of the decomposition, ``[B]``: adjusted Rand index of the most probable slots and the true mask on its
foreground (``()`` without a true mask); mean squared error over pixels and channels; KL divergence in nats."""

_LEAST_SIGMA, _GREATEST_SIGMA = 0.09, 0.11


def mixture_loss(image: Tensor, log_mask: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """Return ``- sum_pixels log sum_k m_k N(x; mu_k, sigma_k)`` (eq. 1 and the first term of eq. 3).

    Args:
        image: ``[B, C, H, W]``.
        log_mask: ``[B, K, H, W]``: ``log m_k``.
        mean: ``[B, K, C, H, W]``.
        sigma: ``[K]``; the channels of a pixel are independent.

    Returns:
        Loss ``[B]``.
    """
    channels = image.shape[1]
    squares = (image.unsqueeze(1) - mean).square().sum(2)
    sigma = sigma[:, None, None]
    log_density = -0.5 * squares / sigma.square() - channels * (sigma.log() + 0.5 * math.log(2 * math.pi))
    return -torch.logsumexp(log_mask + log_density, dim=1).sum((1, 2))


def mask_loss(log_mask: Tensor, logits: Tensor) -> Tensor:
    """Return ``sum_pixels KL(q(c) || p(c | z))``, the last term of eq. 3.

    Args:
        log_mask: ``[B, K, H, W]``: ``log q(c=k)``.
        logits: ``[B, K, H, W]`` of ``p(c | z)``.

    Returns:
        Loss ``[B]``.
    """
    return (log_mask.exp() * (log_mask - F.log_softmax(logits, dim=1))).sum((1, 2, 3))


# Attention ----------------------------------------------------------------------------------------------------


class _InstanceNorm(nn.Module):
    """Instance normalization of each channel over its pixels, followed by a learned bias."""

    def __init__(self, channels: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.bias.zero_()

    def forward(self, inputs: Tensor) -> Tensor:
        return F.instance_norm(inputs, bias=self.bias)


def _block(in_channels: int, out_channels: int) -> nn.Module:
    """Create a convolution of kernel size 3 with instance normalization and ReLU."""
    return nn.Sequential(Conv2D(in_channels, out_channels, 3, identity, padding=1, use_bias=False),
                         _InstanceNorm(out_channels), nn.ReLU())


@configurable
class MoNetUNet(Network):
    """Attention network (appendix B.2): a U-Net, with convolutions to a small image and back and skip connections.

    Down: one block per entry of ``filters``; all but the first halve the image by max pooling. Middle: fully connected
    layers. Up: one block per entry of ``filters`` in reverse, which also receives the output of the downward block of
    the same size; all but the last double the image. A convolution of kernel size 1 follows. A block is a convolution
    of kernel size 3 without bias, instance normalization with a learned bias, and a ReLU.

    Args:
        input_tensor_spec: float32 ``(C, H, W)``.
        filters: numbers of filters of the downward blocks.
        nonskip_fc_layers: sizes of the fully connected layers; a further layer produces an image of the smallest size.
        output_channels: channels of the output, which has no activation.
        name: name of the network.

    Raises:
        SpecError: the input is not an image.
        ValueError: ``filters`` is empty, or the image cannot be halved that often with more than one pixel left.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, filters: Sequence[Count],
                 nonskip_fc_layers: Sequence[Count], output_channels: Count, name: str = 'MoNetUNet'):
        channels, height, width = _image_shape(input_tensor_spec, name)
        super().__init__(input_tensor_spec, (), name)
        if not filters:
            raise ValueError(f'{name}: expected at least one number in filters')
        factor = 2**(len(filters) - 1)
        smallest = (filters[-1], height // factor, width // factor)
        if height % factor or width % factor or smallest[1] * smallest[2] < 2:
            raise ValueError(f'{name}: {len(filters)} filters need height and width that are divisible by {factor} '
                             f'and leave more than one pixel, found {height} x {width}; use fewer filters, or images '
                             'of another size')
        self._down = nn.ModuleList()
        for size in filters:
            self._down.append(_block(channels, size))
            channels = size
        sizes = [math.prod(smallest), *nonskip_fc_layers, math.prod(smallest)]
        self._across = nn.Sequential(*(FC(i, o, torch.relu_) for i, o in zip(sizes, sizes[1:])))
        self._up = nn.ModuleList()
        for size in reversed(filters):
            self._up.append(_block(channels + size, size))
            channels = size
        self._last = Conv2D(channels, output_channels, 1, identity)
        self._output_spec = TensorSpec((output_channels, height, width))

    def forward(self, inputs: Tensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Map ``[B, C, H, W]`` to ``[B, output_channels, H, W]``, without activation."""
        x, skipped = inputs, []
        for i, block in enumerate(self._down):
            x = block(x)
            if i > 0:
                x = F.max_pool2d(x, 2)
            skipped.append(x)
        x = self._across(x.flatten(1)).view_as(x)
        for i, block in enumerate(self._up):
            if i > 0:
                x = F.interpolate(x, scale_factor=2.0, mode='nearest')
            x = block(torch.cat([x, skipped.pop()], dim=1))
        return self._last(x), state


def _image_shape(spec: NestedTensorSpec, where: str) -> tuple[int, int, int]:
    """Return ``(C, H, W)`` of the spec of an image."""
    if not isinstance(spec, TensorSpec):
        raise SpecError(f'{where}: expected the spec of an image, found a {type(spec).__name__}; choose the image with '
                        "MoNetRepresentationLearner.image_field")
    if spec.ndim != 3 or spec.dtype != torch.float32:
        raise SpecError(f'{where}: expected a float32 image (channels, height, width), found '
                        f'{torch_dtype_to_str(spec.dtype)} {tuple(spec.shape)}; scale uint8 images to [0, 1] with '
                        '@ImageScaleTransformer in TrainerConfig.data_transformer_ctor and '
                        'ImageScaleTransformer.min = 0.0')
    channels, height, width = spec.shape
    return channels, height, width


# The algorithm ------------------------------------------------------------------------------------------------


@configurable
class MoNetAlgorithm(Algorithm):
    """Unsupervised decomposition of images; see the module docstring for the method.

    Args:
        n_slots: number of slots K, at least 2; one is for the background.
        slot_size: size of the latent vector of a slot.
        input_tensor_spec: float32 ``(C, H, W)``: images with values in [0, 1], for which the standard deviations of the
            slots (0.09 to 0.11) are chosen.
        attention_unet_cls: creates the attention network, called as ``(input_tensor_spec=, output_channels=)``. With
            ``recurrent_attention`` it maps image and scope, the share of each pixel that no slot has taken yet,
            ``[B, C + 1, H, W]``, to logits ``[B, 2, H, W]`` of the part that this slot takes and the part that it
            leaves. Otherwise it maps the image to the logits ``[B, n_slots, H, W]`` of all masks.
        encoder_cls: creates the encoder of a slot, called as ``(input_tensor_spec=, last_layer_size=,
            last_activation=)``; maps image and mask ``[B, C + 1, H, W]`` to mean and log-variance ``[B, 2 *
            slot_size]`` of the posterior.
        decoder_cls: creates the decoder of a slot, called as ``(input_size=, output_height=, output_width=)``; maps
            ``[B, slot_size]`` to the means of the pixels and the logits of the mask ``[B, C + 1, H, W]``.
        recurrent_attention: compute the masks slot by slot; otherwise all at once.
        beta: weight of the KL divergence of the latent vectors.
        gamma: weight of the KL divergence between the masks and the decoded masks; makes masks regular and compact.
        name: name of this algorithm.

    Raises:
        SpecError: ``input_tensor_spec`` is not a float32 image, or a network has the wrong output.
        ValueError: a number is out of range.
    """

    _sigma: Tensor

    def __init__(self, n_slots: Annotated[int, Range(minimum=2)], slot_size: Count, input_tensor_spec: NestedTensorSpec,
                 attention_unet_cls: Callable[..., Network] = MoNetUNet,
                 encoder_cls: Callable[..., Network] = EncodingNetwork,
                 decoder_cls: Callable[..., Network] = SpatialBroadcastDecodingNetwork,
                 recurrent_attention: bool = True, beta: NonNegative = 0.0, gamma: NonNegative = 0.0,
                 name: str = 'MoNetAlgorithm'):
        super().__init__(name=name)
        channels, height, width = _image_shape(input_tensor_spec, name)
        with_mask = TensorSpec((channels + 1, height, width))
        self._image_spec = TensorSpec((channels, height, width))
        self._n_slots, self._slot_size = n_slots, slot_size
        self._recurrent_attention = recurrent_attention
        self._beta, self._gamma = beta, gamma
        masks = 2 if recurrent_attention else n_slots
        self._attention = attention_unet_cls(
            input_tensor_spec=with_mask if recurrent_attention else self._image_spec, output_channels=masks)
        self._encoder = encoder_cls(input_tensor_spec=with_mask, last_layer_size=2 * slot_size,
                                    last_activation=identity)
        self._decoder = decoder_cls(input_size=slot_size, output_height=height, output_width=width)
        self._check_output('attention_unet_cls', self._attention, (masks, height, width))
        self._check_output('encoder_cls', self._encoder, (2 * slot_size, ))
        self._check_output('decoder_cls', self._decoder, with_mask.shape)
        self.register_buffer('_sigma', torch.linspace(_LEAST_SIGMA, _GREATEST_SIGMA, n_slots), persistent=False)

    def _check_output(self, argument: str, network: Network, shape: Sequence[int]) -> None:
        spec = network.output_spec
        if not isinstance(spec, TensorSpec) or tuple(spec.shape) != tuple(shape):
            raise SpecError(f'{self._name}.{argument}: expected a network with an output of shape {tuple(shape)}, '
                            f'found {spec}')

    @property
    def n_slots(self) -> int:
        """Number of slots."""
        return self._n_slots

    @property
    def slot_size(self) -> int:
        """Size of the latent vector of a slot."""
        return self._slot_size

    # Parts of a step -------------------------------------------------------------------------------------------

    def _attend(self, image: Tensor) -> Tensor:
        """Return the logarithms ``[B, K, H, W]`` of the masks of images ``[B, C, H, W]``; the masks sum to 1."""
        if not self._recurrent_attention:
            return F.log_softmax(self._attention(image)[0], dim=1)
        log_scope = torch.zeros_like(image[:, :1])
        log_masks = []
        for _ in range(self._n_slots - 1):
            logits, _ = self._attention(torch.cat([image, log_scope.exp()], dim=1))
            taken, left = F.log_softmax(logits, dim=1).chunk(2, dim=1)
            log_masks.append(log_scope + taken)
            log_scope = log_scope + left
        return torch.cat([*log_masks, log_scope], dim=1)

    def _encode(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and log-variances ``[B, K, slot_size]`` of the posteriors."""
        images = image.unsqueeze(1).expand(-1, self._n_slots, *image.shape[1:])
        parameters, _ = self._encoder(torch.cat([images, mask.unsqueeze(2)], dim=2).flatten(0, 1))
        mean, log_variance = parameters.view(-1, self._n_slots, 2 * self._slot_size).chunk(2, dim=-1)
        return mean, log_variance

    def _decode(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return means ``[B, K, C, H, W]`` of the pixels and logits ``[B, K, H, W]`` of the masks."""
        decoded, _ = self._decoder(z.flatten(0, 1))
        decoded = decoded.view(*z.shape[:2], *decoded.shape[1:])
        return decoded[:, :, :-1], decoded[:, :, -1]

    def _step(self, image: Tensor, is_random: bool, with_info: bool) -> AlgStep:
        log_mask = self._attend(image)
        mask = log_mask.exp()
        mean, log_variance = self._encode(image, mask)
        std = (0.5 * log_variance).exp()
        z_dist = DiagMultivariateNormal(mean, std, reinterpreted_batch_ndims=2)
        z = z_dist.rsample() if is_random else mean
        output = VAEOutput(z=z, z_mode=mean, z_std=std)
        if not with_info:
            return AlgStep(output)
        pixels, logits = self._decode(z)
        info = MoNetInfo(kld=gaussian_kld(mean, log_variance).sum(1),
                         rec_loss=mixture_loss(image, log_mask, pixels, self._sigma),
                         mask_rec_loss=mask_loss(log_mask, logits),
                         full_rec=(mask.unsqueeze(2) * pixels).sum(1), mask=mask, z_dist=z_dist)
        return AlgStep(output, (), info)

    # Steps -----------------------------------------------------------------------------------------------------

    def train_step(self, inputs: Tensor, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Decompose images and reconstruct them.

        Args:
            inputs: images ``[B, C, H, W]``.
            state: not used.
            rollout_info: not used.

        Returns:
            ``output``: ``VAEOutput`` of ``[B, n_slots, slot_size]``, ``z`` sampled with gradient; ``info``:
            ``MoNetInfo``.
        """
        return self._step(inputs, is_random=True, with_info=True)

    def rollout_step(self, inputs: Tensor, state: NestedTensor = ()) -> AlgStep:
        """Run :meth:`train_step`; off-policy without decoding and without info."""
        return self._step(inputs, is_random=True, with_info=bool(self.on_policy))

    def predict_step(self, inputs: Tensor, state: NestedTensor = ()) -> AlgStep:
        """Run :meth:`train_step` with ``z`` the mean of the posterior."""
        return self._step(inputs, is_random=False, with_info=True)

    def calc_loss(self, info: Any) -> LossInfo:
        """Compute the loss.

        Args:
            info: ``MoNetInfo`` of ``[T, B, ...]``.

        Returns:
            ``loss [T, B]``: ``rec_loss + beta * kld + gamma * mask_rec_loss``; ``extra``: ``MoNetInfo`` of these three
            terms before their weights.
        """
        loss = info.rec_loss + self._beta * info.kld + self._gamma * info.mask_rec_loss
        return LossInfo(loss=loss, extra=MoNetInfo(info.kld, info.rec_loss, info.mask_rec_loss))


@configurable
class MoNetRepresentationLearner(Algorithm):
    """Representation learner of an agent that uses MONet; the representation is the means of the slots' posteriors.

    The loss of the policy also trains encoder and attention network, if it depends on the representation.

    Args:
        observation_spec: spec of the image, float32 ``(C, H, W)``; or a nest that contains it.
        action_spec: unused part of the interface of a representation learner.
        reward_spec: unused part of the interface of a representation learner.
        monet_cls: called as ``(input_tensor_spec=)`` to make the ``MoNetAlgorithm``.
        image_field: path of the image in a nested observation.
        mask_field: path of the true segmentation, integers ``(H, W)`` with 0 for the background, in a nested
            observation; used only by :meth:`predict_step` to evaluate the masks. The observation need not contain it.
        optimizer: optimizes its parameters; ``None``: the optimizer of the agent.
        config: unused part of the interface of a representation learner.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        SpecError: there is no image, or the segmentation does not match it.
    """

    _declared_capabilities = {'traceable_update': True}  # MoNetAlgorithm restricts it

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec = (),
                 reward_spec: TensorSpec = TensorSpec(()), monet_cls: Callable[..., MoNetAlgorithm] = MoNetAlgorithm,
                 image_field: str = 'image', mask_field: str = 'mask', optimizer: Any = None,
                 config: TrainerConfig | None = None, debug_summaries: bool = False,
                 name: str = 'MoNetRepresentationLearner'):
        super().__init__(optimizer=optimizer, config=config, debug_summaries=debug_summaries, name=name)
        fields = dict(nest.flatten_with_path(observation_spec))
        self._image_field = '' if isinstance(observation_spec, TensorSpec) else image_field
        if self._image_field not in fields:
            raise SpecError(f"{name}.image_field: there is no '{image_field}' in the observation, which has "
                            f'{sorted(fields)}')
        image_spec = fields[self._image_field]
        self._mask_field = mask_field if mask_field in fields else None
        if self._mask_field is not None:
            mask_spec = fields[self._mask_field]
            if not mask_spec.is_discrete or tuple(mask_spec.shape) != tuple(image_spec.shape[1:]):
                raise SpecError(f'{name}.mask_field: expected integers {tuple(image_spec.shape[1:])}, found '
                                f'{mask_spec}')
        self._monet = monet_cls(input_tensor_spec=image_spec)
        self._output_spec = TensorSpec((self._monet.n_slots, self._monet.slot_size))

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the representation: float32 ``(n_slots, slot_size)``."""
        return self._output_spec

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set ``on_policy`` of this algorithm and of the ``MoNetAlgorithm``."""
        super().set_on_policy(is_on_policy)
        if hasattr(self, '_monet'):
            self._monet.set_on_policy(is_on_policy)

    def _field(self, inputs: TimeStep, path: str) -> Tensor:
        return nest.get_field(inputs.observation, path)

    def rollout_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Run ``MoNetAlgorithm.rollout_step``; ``output`` is ``[B, n_slots, slot_size]``."""
        step = self._monet.rollout_step(self._field(inputs, self._image_field))
        return step._replace(output=step.output.z_mode)

    def train_step(self, inputs: TimeStep, state: NestedTensor = (), rollout_info: NestedTensor = ()) -> AlgStep:
        """Run ``MoNetAlgorithm.train_step``; ``output`` is ``[B, n_slots, slot_size]``."""
        step = self._monet.train_step(self._field(inputs, self._image_field))
        return step._replace(output=step.output.z_mode)

    def predict_step(self, inputs: TimeStep, state: NestedTensor = ()) -> AlgStep:
        """Return the representation ``[B, n_slots, slot_size]`` as output, and ``MoNetMeasures`` as info."""
        image = self._field(inputs, self._image_field)
        step = self._monet.predict_step(image)
        info = MoNetMeasures(reconstruction=(step.info.full_rec - image).square().mean((1, 2, 3)), kld=step.info.kld)
        if self._mask_field is not None:
            true_mask = self._field(inputs, self._mask_field)
            info = info._replace(
                adjusted_rand_index=adjusted_rand_index(true_mask, step.info.mask.argmax(1), true_mask > 0))
        return AlgStep(step.output.z_mode, (), info)

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of the ``MoNetAlgorithm``."""
        return self._monet.calc_loss(info)
