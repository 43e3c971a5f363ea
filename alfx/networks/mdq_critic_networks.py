"""Critics of multi-dimensional Q-learning: an unconstrained critic, and one from which actions can be sampled.

The value of a continuous action is learned in two forms. The *free form* is an ordinary critic of observation and
action. The *advantage form* discretizes each component of the action into M bins and sums one term for each component,
given the components before it (compare the sequential DQN of Metz et al. 2017, arXiv:1705.05035). With network outputs
``q_d(s, a_1 .. a_{d-1})`` ``[M]`` and the soft value of a component relative to uniformly random ones,

    v_d = alpha log( 1/M sum_m exp(q_d[m] / alpha) )
    Q_adv(s, a) = q_1[a_1] + sum_{d>1} (q_d[a_d] - v_d)
    pi(a_d | s, a_1 .. a_{d-1}) = softmax(q_d / alpha)[a_d]

so pi is exactly the Boltzmann policy ``pi(a | s) ~ exp(Q_adv(s, a) / alpha)``. Each later term is ``alpha`` times the
log-ratio of pi to the uniform distribution, which is a normalized advantage, and ``v_1`` is the soft state value.
Sampling an action costs one small network per component instead of a sum over M^D actions. Used by
:mod:`alfx.algorithms.mdq_algorithm`.
"""
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alfx import summary
from alfx.gin_utils import Count, configurable
from alfx.initializers import small_last_layer_init
from alfx.layers import Activation, Initializer, ParallelFC, out_of_place
from alfx.networks.action_quantizer import ActionQuantizer
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.summary import summary_utils
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, SpecError, TensorSpec

_last_kernel_initializer = small_last_layer_init(0.003)


class _LayersOfComponents(nn.Module):
    """Fully connected layers for D components at once: ``[N, D, in]`` to ``[N, D, out]``.

    Args:
        size: number of inputs.
        layers: size of each layer, and whether all components share its weights.
        count: number of components D.
        activation: activation of all layers except the last.
        kernel_initializer: initializer of all layers except the last.
    """

    def __init__(self, size: int, layers: Sequence[tuple[int, bool]], count: int, activation: Activation,
                 kernel_initializer: Initializer | None):
        super().__init__()
        self._activation = out_of_place(activation)
        modules = []
        for i, (width, is_shared) in enumerate(layers):
            is_last = i == len(layers) - 1
            # Activations are applied in this class, so that a single component can be computed; ReLU gain for weights.
            modules.append(ParallelFC(
                size, width, 1 if is_shared else count,
                kernel_initializer=_last_kernel_initializer if is_last else kernel_initializer,
                kernel_init_gain=1.0 if is_last else nn.init.calculate_gain('relu')))
            size = width
        self._layers = nn.ModuleList(modules)
        self._list = modules

    def _activated(self, x: Tensor, layer: ParallelFC) -> Tensor:
        return x if layer is self._list[-1] else self._activation(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._list:
            is_single = layer.weight.shape[0] == 1
            x = F.linear(x, layer.weight[0], layer.bias[0]) if is_single else layer(x)  # type: ignore[index]
            x = self._activated(x, layer)
        return x

    def of_component(self, x: Tensor, d: int) -> Tensor:
        """Map ``[N, in]`` to ``[N, out]`` with the weights of component ``d``."""
        for layer in self._list:
            i = 0 if layer.weight.shape[0] == 1 else d
            x = self._activated(F.linear(x, layer.weight[i], layer.bias[i]), layer)  # type: ignore[index]
        return x


@configurable
class MdqCriticNetwork(Network):
    """Critic of continuous actions in both forms; see the module docstring.

    A call of the network computes the free form: ``network((observation, action))`` returns
    ``[B, num_critic_replicas]``.

    Args:
        input_tensor_spec: pair ``(observation_spec, action_spec)`` of nests of specs; actions must be continuous with
            finite bounds.
        action_qt: quantizer of actions, or a constructor that is called with ``action_spec``; ``None`` uses
            :class:`~alfx.networks.action_quantizer.ActionQuantizer` as configured.
        num_critic_replicas: number of critics of the free form.
        obs_encoding_layer_params: sizes of the fully connected layers for the observation, separate for each form.
        pre_encoding_layer_params: advantage form: sizes of the first layers after the encoding of the observation and
            the previous components; each component has separate weights.
        mid_encoding_layer_params: advantage form: sizes of the layers after those; all components share them.
        post_encoding_layer_params: advantage form: sizes of the layers after those, before the M outputs; each
            component has separate weights.
        free_form_fc_layer_params: free form: sizes of the layers for the encoding of the observation and the action.
        activation: activation of all layers except the last of each form.
        kernel_initializer: initializer of all layers except the last of each form; ``None`` uses variance scaling.
        debug_summaries: log the outputs of the advantage form.
        name: name of the network.

    Raises:
        SpecError: the observation cannot be encoded, or an action is not continuous or has no bounds.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, action_qt: Any = None, num_critic_replicas: Count = 2,
                 obs_encoding_layer_params: Sequence[int] | None = None,
                 pre_encoding_layer_params: Sequence[int] | None = None,
                 mid_encoding_layer_params: Sequence[int] | None = None,
                 post_encoding_layer_params: Sequence[int] | None = None,
                 free_form_fc_layer_params: Sequence[Count] | None = None, activation: Activation = torch.relu_,
                 kernel_initializer: Initializer | None = None, debug_summaries: bool = False,
                 name: str = 'MdqCriticNetwork'):
        super().__init__(input_tensor_spec, (), name)
        if not isinstance(input_tensor_spec, (tuple, list)) or len(input_tensor_spec) != 2:
            raise SpecError(f'{name}: expected input_tensor_spec=(observation_spec, action_spec), found '
                            f'{input_tensor_spec}')
        observation_spec, action_spec = input_tensor_spec
        if not isinstance(action_qt, ActionQuantizer):
            action_qt = (action_qt or ActionQuantizer)(action_spec)
        self._action_qt: ActionQuantizer = action_qt
        self._debug_summaries = debug_summaries
        critic = CriticNetwork(
            (observation_spec, TensorSpec((action_qt.num_components, ))),
            observation_fc_layer_params=obs_encoding_layer_params, joint_fc_layer_params=free_form_fc_layer_params,
            activation=activation, kernel_initializer=kernel_initializer, name=f'{name}.free_form')
        self._free_form = critic.make_parallel(num_critic_replicas)
        self._observation_encoder = EncodingNetwork(
            observation_spec, fc_layer_params=obs_encoding_layer_params, activation=activation,
            kernel_initializer=kernel_initializer, name=f'{name}.observation')
        count = action_qt.num_components
        layers = [(width, False) for width in pre_encoding_layer_params or ()]
        layers += [(width, True) for width in mid_encoding_layer_params or ()]
        layers += [(width, False) for width in (*(post_encoding_layer_params or ()), action_qt.num_bins)]
        self._components = _LayersOfComponents(self._observation_encoder.output_spec.numel + count - 1, layers, count,
                                               activation, kernel_initializer)
        # component d depends on the components before it
        self.register_buffer('_before', torch.ones(count, count - 1).tril(-1), persistent=False)

    _before: Tensor

    @property
    def action_qt(self) -> ActionQuantizer:
        """Quantizer of actions."""
        return self._action_qt

    @property
    def free_form(self) -> Network:
        """Critics of the free form as one network: ``(observation, normalized action)`` to ``[B, n]``."""
        return self._free_form

    def get_uniform_prior_logpi(self) -> float:
        """Return the log-probability of any action if all bins are sampled with equal probability."""
        return -self._action_qt.num_components * math.log(self._action_qt.num_bins)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Map a pair of nests (observation, action) of ``[B, ...]`` to free-form values ``[B, num_critic_replicas]``.
        """
        observation, action = inputs
        return self._free_form((observation, self._action_qt.normalized(action)), state)

    def advantage_form(self, observation: NestedTensor, action: NestedTensor, alpha: Tensor | float) -> Tensor:
        """Return ``Q_adv`` ``[B]`` of actions, which are rounded to their nearest bins.

        Args:
            observation: nest of ``[B, ...]``.
            action: nest of ``[B, ...]``.
            alpha: temperature of the policy, positive.
        """
        bins = self._action_qt.bins(action)
        encoded = self._observation_encoder(observation)[0]
        count = bins.shape[1]
        before = self._action_qt.position(bins[:, :-1]).unsqueeze(1) * self._before
        q_values = self._components(torch.cat((encoded.unsqueeze(1).expand(-1, count, -1), before), -1))
        chosen = q_values.gather(2, bins.unsqueeze(2)).squeeze(2)
        if self._debug_summaries and summary.should_record_summaries():
            summary_utils.add_mean_hist_summary(f'{self._name}/q_values', q_values.detach())
        return chosen.sum(1) - _soft_value(q_values[:, 1:], alpha).sum(1)

    @torch.no_grad()
    def get_action(self, observation: NestedTensor, alpha: Tensor | float,
                   greedy: bool = False) -> tuple[NestedTensor, Tensor]:
        """Sample actions of the policy, component by component.

        Args:
            observation: nest of ``[B, ...]``.
            alpha: temperature of the policy, positive.
            greedy: take the most likely value of each component instead of sampling.

        Returns:
            A nest of actions ``[B, ...]``, and the negative entropy of the policy ``[B]``. The entropy of each
            component is exact, given the components sampled before it.
        """
        encoded = self._observation_encoder(observation)[0]
        count = self._action_qt.num_components
        bins = torch.zeros((encoded.shape[0], count), dtype=torch.int64, device=encoded.device)
        before = encoded.new_zeros((encoded.shape[0], count - 1))
        neg_entropy: Any = 0.0
        for d in range(count):
            q_values = self._components.of_component(torch.cat((encoded, before), 1), d)
            log_pi = F.log_softmax(q_values / alpha, -1)
            pi = log_pi.exp()
            bins[:, d] = log_pi.argmax(-1) if greedy else torch.multinomial(pi, 1).squeeze(1)
            if d < count - 1:
                before[:, d] = self._action_qt.position(bins[:, d])
            neg_entropy = neg_entropy + (pi * log_pi).sum(-1)
        return self._action_qt.action(bins), neg_entropy


def _soft_value(q_values: Tensor, alpha: Tensor | float) -> Tensor:
    """Soft value ``alpha log mean exp(q / alpha)``, ``[..., M]`` to ``[...]``."""
    return alpha * (torch.logsumexp(q_values / alpha, -1) - math.log(q_values.shape[-1]))
