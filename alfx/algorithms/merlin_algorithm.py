"""MERLIN (Wayne et al. 2018, "Unsupervised Predictive Memory in a Goal-Directed Agent", arXiv:1803.10760).

A predictor (:class:`MemoryBasedPredictor`) compresses each observation to a latent vector with a variational
autoencoder, and writes it to an external memory. The prior of the autoencoder is predicted from all previous steps, so
the observations, not the reward, decide which information is stored. An actor (:class:`MemoryBasedActor`) reads this
memory with a separate key and chooses the action. At step t, with the previous latent, action and readout:

    h[t] = LSTM([z[t-1], a[t-1], m[t-1]], h[t-1])          prediction
    m[t] = read(memory, keys(h[t]))
    z[t] ~ q(z | prior(h[t], m[t]), encoders(o[t]))        encoded observation
    write z[t] to the memory
    g[t] = LSTM(z[t], g[t-1]),  r[t] = read(memory, key(g[t]))
    a[t] ~ pi(z[t], g[t], r[t]),  V[t] = V(z[t], g[t], r[t])

The loss is the actor-critic loss plus reconstruction errors plus ``beta * KL(q || prior)``. As in the paper, the
gradient of the policy stops at the latent and at the memory, and the gradient of the value reaches the latent of the
same step. Differences from the paper:

- The predictor receives actions directly (discrete ones one-hot); they are neither encoded nor decoded.
- The memory is not updated retroactively with later steps, so a slot holds one latent vector.
- The actor estimates the value from the inputs of the policy, but not from the policy's distribution. Rewards and the
  values of actions are not predicted.
- The networks for images use batch norm.
- Reads by the actor also count as usage of the memory, see :mod:`alfx.networks.memory`.
- Evaluation uses the mean of the latent instead of a sample.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from alfx import nest
from alfx.algorithms.actor_critic_algorithm import ActorCriticInfo
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.agent_helpers import AgentHelper
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.decoding_algorithm import DecodingAlgorithm
from alfx.algorithms.on_policy_algorithm import OnPolicyAlgorithm
from alfx.algorithms.vae import VariationalAutoEncoder
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import Count, Fraction, configurable
from alfx.layers import FC, BottleneckBlock, Conv2D, Reshape, Sequential
from alfx.nest.utils import NestConcat
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.containers import Parallel
from alfx.networks.encoding_networks import EncodingNetwork, LSTMEncodingNetwork
from alfx.networks.memory import MemoryWithUsage
from alfx.networks.network import Network
from alfx.networks.value_networks import ValueNetwork
from alfx.tensor_specs import Nested, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.math_ops import identity

MBPState = namedtuple('MBPState', ['latent_vector', 'mem_readout', 'rnn_state', 'memory'], default_value=())
"""State of the predictor: z ``[B, latent_dim]``, m ``[B, num_read_keys * latent_dim]``, LSTM state, memory state."""

MBPLossInfo = namedtuple('MBPLossInfo', ['decoder', 'vae'], default_value=())
"""``decoder``: the ``extra`` of the decoders' losses, a nest like the decoders; ``vae``: ``VAEInfo``."""

MerlinState = namedtuple('MerlinState', ['mbp_state', 'mba_state'], default_value=())
"""States of predictor and actor."""

MerlinInfo = namedtuple('MerlinInfo', ['mbp_info', 'mba_info'], default_value=())
"""Infos of predictor (``LossInfo``) and actor (``ActorCriticInfo``)."""

MerlinLossInfo = namedtuple('MerlinLossInfo', ['mba', 'mbp'], default_value=())
"""Terms of the losses of actor and predictor."""

_STRIDES = (2, 1, 2, 1, 2, 1)
_FILTERS = (64, 32, 64)


@configurable
class ResnetEncodingNetwork(Network):
    """Image encoder of MERLIN (section 2.1.1 of its supplement): six bottleneck blocks and a linear layer.

    The blocks have 64, 32 and 64 filters, a kernel size of 3 and the strides 2, 1, 2, 1, 2, 1.

    Args:
        input_tensor_spec: spec of an image, float ``(C, H, W)``.
        output_size: size of the output vector.
        output_activation: activation of the output.
        use_fc_bn: use batch norm in the last layer, before the activation.
        norm_layer: final module ``[B, output_size] -> [B, output_size]``.
        name: name of the network.

    Raises:
        SpecError: ``input_tensor_spec`` is not such an image.
    """

    def __init__(self, input_tensor_spec: TensorSpec, output_size: Count = 500,
                 output_activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh, use_fc_bn: bool = False,
                 norm_layer: nn.Module | None = None, name: str = 'ResnetEncodingNetwork'):
        super().__init__(input_tensor_spec, (), name)
        shape = _image_shape(input_tensor_spec, name)
        modules: list[nn.Module] = []
        for stride in _STRIDES:
            block = BottleneckBlock(shape[0], 3, _FILTERS, stride)
            shape = block.calc_output_shape(shape)
            modules.append(block)
        size = TensorSpec(shape).numel
        modules += [Reshape(size), FC(size, output_size, output_activation, use_bn=use_fc_bn)]
        if norm_layer is not None:
            modules.append(norm_layer)
        self._net = Sequential(*modules)

    def forward(self, observation: torch.Tensor, state: tuple = ()) -> tuple[torch.Tensor, tuple]:
        """Map ``[B, C, H, W]`` to ``[B, output_size]``."""
        return self._net(observation), state


@configurable
class ResnetDecodingNetwork(Network):
    """Image decoder of MERLIN (section 2.2.1 of its supplement): the mirror image of the encoder.

    Two linear layers with ReLU, the first one with 500 units, produce an image with an eighth of the size. Six
    transposed bottleneck blocks enlarge it, and a convolution of kernel size 1 produces the channels. The output is
    unbounded: it is compared with images of any range by the squared error, or holds the logits of a Bernoulli
    likelihood.

    Args:
        input_tensor_spec: spec of the latent vector, ``(D,)``.
        output_tensor_spec: spec of the image, ``(C, H, W)``; H and W are divisible by 8.
        name: name of the network.

    Raises:
        SpecError: the input is not a vector, or the output is not such an image.
    """

    def __init__(self, input_tensor_spec: TensorSpec, output_tensor_spec: TensorSpec = TensorSpec((3, 64, 64)),
                 name: str = 'ResnetDecodingNetwork'):
        super().__init__(input_tensor_spec, (), name)
        if not isinstance(input_tensor_spec, TensorSpec) or input_tensor_spec.ndim != 1:
            raise SpecError(f'{name}: expected the spec of a vector, found {input_tensor_spec}')
        channels, height, width = _image_shape(output_tensor_spec, name)
        if height % 8 or width % 8:
            raise SpecError(f'{name}: expected height and width divisible by 8, found {output_tensor_spec}; pad or '
                            'resize the image')
        start = (_FILTERS[-1], height // 8, width // 8)
        blocks = [BottleneckBlock(_FILTERS[-1], 3, _FILTERS, stride, transpose=True) for stride in reversed(_STRIDES)]
        self._net = Sequential(FC(input_tensor_spec.numel, 500, torch.relu_),
                               FC(500, TensorSpec(start).numel, torch.relu_), Reshape(*start), *blocks,
                               Conv2D(_FILTERS[-1], channels, 1, identity))
        self._output_spec = TensorSpec((channels, height, width))

    def forward(self, observation: torch.Tensor, state: tuple = ()) -> tuple[torch.Tensor, tuple]:
        """Map ``[B, D]`` to ``[B, C, H, W]``."""
        return self._net(observation), state


def _image_shape(spec: Any, name: str) -> tuple[int, int, int]:
    if not isinstance(spec, TensorSpec) or spec.ndim != 3 or not spec.is_continuous:
        raise SpecError(f'{name}: expected the spec of a float image (channels, height, width), found {spec}; scale '
                        'integer images with @ImageScaleTransformer in TrainerConfig.data_transformer_ctor')
    channels, height, width = spec.shape
    return channels, height, width


def _lstm(input_size: int, lstm_size: Sequence[int] | int, name: str) -> LSTMEncodingNetwork:
    """Create LSTM layers whose output concatenates the outputs of all layers."""
    sizes = (lstm_size, ) if isinstance(lstm_size, int) else tuple(lstm_size)
    return LSTMEncodingNetwork(TensorSpec((input_size, )), hidden_size=sizes,
                               lstm_output_layers=tuple(range(len(sizes))), name=name)


@configurable
class MemoryBasedPredictor(Algorithm):
    """Memory-based predictor: maps observations and actions to latent vectors, and stores them in an external memory.

    Args:
        action_spec: nest of specs of the action.
        encoders: nest of networks that are not recurrent, with the structure of the observation (or of its upper
            levels); their outputs are flattened and concatenated.
        decoders: nest of algorithms (:class:`~alfx.algorithms.decoding_algorithm.DecodingAlgorithm`) with the same
            structure. Their steps receive ``(latent vector, part of the observation)`` and return a ``LossInfo``.
        num_read_keys: number of keys with which the memory is read.
        lstm_size: sizes of the LSTM layers.
        latent_dim: size of the latent vector. Prior and posterior networks have two layers of twice this size.
        memory_size: number of slots of the memory, a :class:`~alfx.networks.memory.MemoryWithUsage`.
        loss_weight: factor of the loss.
        name: name of this algorithm.

    Raises:
        ConfError: a number is out of range.
        ValueError: an encoder is not a network, a decoder is not an algorithm, or one of them is recurrent.
    """

    updates_are_traceable = False

    def __init__(self, action_spec: NestedTensorSpec, encoders: Nested, decoders: Nested, num_read_keys: Count = 3,
                 lstm_size: Sequence[Count] | Count = (256, 256), latent_dim: Count = 200, memory_size: Count = 1350,
                 loss_weight: float = 1.0, name: str = 'mbp'):
        _check_parts(encoders, decoders, name)
        memory = MemoryWithUsage(latent_dim, memory_size, name=f'{name}_memory')
        action_encoder = SimpleActionEncoder(action_spec)
        encoder = encoders if isinstance(encoders, Network) else Parallel(encoders)
        readout_size = num_read_keys * latent_dim
        rnn = _lstm(latent_dim + action_encoder.output_spec.numel + readout_size, lstm_size, f'{name}_rnn')
        vector = TensorSpec((latent_dim, ))
        super().__init__(train_state_spec=MBPState(latent_vector=vector, mem_readout=TensorSpec((readout_size, )),
                                                   rnn_state=rnn.state_spec, memory=memory.state_spec), name=name)
        rnn_size = rnn.output_spec.numel
        hidden: dict[str, Any] = dict(fc_layer_params=(2 * latent_dim, ) * 2, activation=torch.tanh)
        prior = EncodingNetwork(TensorSpec((rnn_size + readout_size, )), last_layer_size=2 * latent_dim,
                                last_activation=identity, name=f'{name}_prior', **hidden)
        encoded = TensorSpec((sum(spec.numel for spec in nest.flatten(encoder.output_spec)), ))
        posterior = EncodingNetwork((prior.input_tensor_spec, encoded, prior.output_spec),
                                    preprocessing_combiner=NestConcat(), name=f'{name}_posterior', **hidden)
        self._vae = VariationalAutoEncoder(latent_dim, encoded, posterior, z_prior_network=prior, name=f'{name}_vae')
        self._action_encoder = action_encoder
        self._encoder = encoder
        self._rnn = rnn
        self._key_net = memory.create_keynet(rnn_size, num_read_keys)
        self._decoder_list: list[Any] = nest.flatten(decoders)
        self._decoders = nn.ModuleList(self._decoder_list)
        self._decoder_structure = nest.map_structure(lambda _: None, decoders)
        self._memory = memory
        self._loss_weight = loss_weight

    @property
    def memory(self) -> MemoryWithUsage:
        """External memory; between two steps it holds the contents after the last step."""
        return self._memory

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the latent vector."""
        return self._vae.output_spec

    def _encode(self, inputs: Any, state: Any) -> tuple[AlgStep, Any]:
        """Return the step of the autoencoder, and the state without the fields that depend on the chosen latent."""
        observation, prev_action = inputs
        self._memory.from_states(state.memory)
        expected, rnn_state = self._rnn(torch.cat(
            [state.latent_vector, self._action_encoder(prev_action), state.mem_readout], dim=-1), state.rnn_state)
        readout = self._memory.genkey_and_read(self._key_net, expected)
        encodings = [x.flatten(1) for x in nest.flatten(self._encoder(observation)[0])]
        vae_step = self._vae.train_step((torch.cat([expected, readout], dim=-1), torch.cat(encodings, dim=-1)))
        return vae_step, MBPState(mem_readout=readout, rnn_state=rnn_state)

    def _remember(self, latent: torch.Tensor, state: Any) -> Any:
        self._memory.write(latent)
        return state._replace(latent_vector=latent, memory=self._memory.states)

    def predict_step(self, inputs: Any, state: Any) -> AlgStep:
        """Encode and remember without decoding, with the mean of the latent vector instead of a sample.

        Args:
            inputs: ``(observation, prev_action)``, nests ``[B, ...]``.
            state: ``MBPState``.

        Returns:
            ``output``: latent vector ``[B, latent_dim]``; ``info`` is ``()``.
        """
        vae_step, new_state = self._encode(inputs, state)
        latent = vae_step.output.z_mode
        return AlgStep(latent, self._remember(latent, new_state), ())

    def rollout_step(self, inputs: Any, state: Any) -> AlgStep:
        """Run :meth:`train_step`."""
        return self.train_step(inputs, state)

    def train_step(self, inputs: Any, state: Any, rollout_info: NestedTensor = ()) -> AlgStep:
        """Encode an observation, write it to the memory, and decode it.

        Args:
            inputs: ``(observation, prev_action)``, nests ``[B, ...]``.
            state: ``MBPState``.
            rollout_info: not used.

        Returns:
            ``output``: a sample of the latent vector, ``[B, latent_dim]``; ``info``: ``LossInfo`` with the loss
            ``[B]`` and an ``MBPLossInfo``.
        """
        vae_step, new_state = self._encode(inputs, state)
        latent = vae_step.output.z
        new_state = self._remember(latent, new_state)
        targets = nest.flatten_up_to(self._decoder_structure, inputs[0])
        infos = [decoder.train_step((latent, target)).info for decoder, target in zip(self._decoder_list, targets)]
        loss = sum((info.loss for info in infos), start=vae_step.info.loss)
        extra = MBPLossInfo(decoder=nest.pack_sequence_as(self._decoder_structure, [i.extra for i in infos]),
                            vae=vae_step.info)
        return AlgStep(latent, new_state, LossInfo(loss=self._loss_weight * loss, extra=extra))


def _check_parts(encoders: Nested, decoders: Nested, name: str) -> None:
    for path, encoder in nest.flatten_with_path(encoders):
        where = f"{name}.encoders{'.' + path if path else ''}"
        if not isinstance(encoder, Network):
            raise ValueError(f'{where}: expected a Network, found {encoder!r}')
        if encoder.is_rnn:
            raise ValueError(f'{where}: {encoder.name} is recurrent; encoders process one observation at a time, '
                             'because the predictor provides the memory: choose a network that is not recurrent')
    for path, decoder in nest.flatten_with_path(decoders):
        where = f"{name}.decoders{'.' + path if path else ''}"
        if not isinstance(decoder, Algorithm):
            raise ValueError(f'{where}: expected an algorithm such as DecodingAlgorithm, found {decoder!r}')
        if nest.flatten(decoder.train_state_spec):
            raise ValueError(f'{where}: {decoder.name} is recurrent; each latent vector is decoded separately: choose '
                             'a decoder that is not recurrent')


@configurable
class MemoryBasedActor(OnPolicyAlgorithm):
    """Policy of MERLIN: an actor-critic that receives latent vectors and reads the memory of the predictor.

    Its gradient does not reach the contents of the memory. It reaches the latent vectors only through the value.

    Args:
        observation_spec: spec of the latent vector, ``(latent_dim,)``.
        action_spec: nest of specs of the action.
        memory: memory of the predictor, with its current contents when a step is called.
        reward_spec: rank 0, or rank 1 for K rewards; the value then has K dimensions.
        epsilon_greedy: in evaluation, the probability of sampling an action instead of taking the most likely one;
            ``None``: 0. :class:`MerlinAlgorithm` passes the value of its configuration.
        num_read_keys: number of keys with which the memory is read.
        lstm_size: sizes of the LSTM layers.
        latent_dim: size of the latent vector, and of the hidden layer of policy and value.
        loss: calculates the loss; ``None``: ``loss_class(debug_summaries=debug_summaries)``.
        loss_class: see ``loss``.
        loss_weight: factor of the loss.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        SpecError: ``observation_spec`` is not the spec of a latent vector.
    """

    updates_are_traceable = False

    def __init__(self, observation_spec: TensorSpec, action_spec: NestedTensorSpec, memory: MemoryWithUsage,
                 reward_spec: TensorSpec = TensorSpec(()), epsilon_greedy: Fraction | None = None,
                 num_read_keys: Count = 1, lstm_size: Sequence[Count] | Count = (256, 256), latent_dim: Count = 200,
                 loss: Any = None, loss_class: Callable[..., Any] = ActorCriticLoss, loss_weight: float = 1.0,
                 debug_summaries: bool = False, name: str = 'mba'):
        if not isinstance(observation_spec, TensorSpec) or tuple(observation_spec.shape) != (latent_dim, ):
            raise SpecError(f'{name}: expected the observation to be a latent vector of shape {(latent_dim, )}, found '
                            f'{observation_spec}')
        rnn = _lstm(latent_dim, lstm_size, f'{name}_rnn')
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=rnn.state_spec, debug_summaries=debug_summaries, name=name)
        rnn_size = rnn.output_spec.numel
        seen = TensorSpec((latent_dim + rnn_size + num_read_keys * memory.dim, ))
        hidden: dict[str, Any] = dict(fc_layer_params=(latent_dim, ), activation=torch.tanh)
        self._rnn = rnn
        self._memory = memory
        self._key_net = memory.create_keynet(rnn_size, num_read_keys)
        self._actor_network = ActorDistributionNetwork(seen, action_spec, name=f'{name}_actor', **hidden)
        self._value_network = ValueNetwork(seen, TensorSpec(reward_spec.shape), name=f'{name}_value', **hidden)
        self._loss = loss_class(debug_summaries=debug_summaries) if loss is None else loss
        self._loss_weight = loss_weight
        self.set_epsilon_greedy(epsilon_greedy)

    def _recall(self, latent: torch.Tensor, state: NestedTensor) -> tuple[torch.Tensor, NestedTensor]:
        """Return the output of the LSTM and the readout of the memory, concatenated, and the new state."""
        hidden, state = self._rnn(latent, state)
        contents = self._memory.states
        self._memory.from_states(contents._replace(memory=contents.memory.detach()))
        readout = self._memory.genkey_and_read(self._key_net, hidden)
        self._memory.from_states(contents._replace(usage=self._memory.usage))
        return torch.cat([hidden, readout], dim=-1), state

    def predict_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the most likely action, or with probability ``epsilon_greedy`` a sampled one.

        Args:
            time_step: ``observation`` is the latent vector ``[B, latent_dim]``.
            state: state of the LSTM.
        """
        recalled, state = self._recall(time_step.observation, state)
        distribution, _ = self._actor_network(torch.cat([time_step.observation, recalled], dim=-1))
        distribution = dist_utils.mask_actions(distribution, time_step.action_mask)
        action = dist_utils.epsilon_greedy_sample(distribution, self._epsilon_greedy)
        return AlgStep(action, state, ActorCriticInfo(action_distribution=distribution))

    def rollout_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Sample an action ``[B, ...]`` and estimate the value ``[B]`` or ``[B, K]``.

        Args:
            time_step: ``observation`` is the latent vector ``[B, latent_dim]``.
            state: state of the LSTM.
        """
        latent = time_step.observation.detach()
        recalled, state = self._recall(latent, state)
        distribution, _ = self._actor_network(torch.cat([latent, recalled], dim=-1))
        distribution = dist_utils.mask_actions(distribution, time_step.action_mask)
        value, _ = self._value_network(torch.cat([time_step.observation, recalled], dim=-1))
        action = dist_utils.sample_action_distribution(distribution)
        weights = () if self._reward_weights is None else self._reward_weights.expand(time_step.reward.shape)
        return AlgStep(action, state, ActorCriticInfo(
            step_type=time_step.step_type, discount=time_step.discount, reward=time_step.reward, action=action,
            action_distribution=distribution, value=value, reward_weights=weights))

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the loss of policy, value and entropy, ``[T, B]``."""
        info = self._loss(info)
        loss, scalar = (x * self._loss_weight if isinstance(x, torch.Tensor) else x
                        for x in (info.loss, info.scalar_loss))
        return info._replace(loss=loss, scalar_loss=scalar)


@configurable
class MerlinAlgorithm(OnPolicyAlgorithm):
    """MERLIN: a memory-based predictor and an actor that uses its memory.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        encoders: nest of networks with the structure of the observation (or of its upper levels). An entry can also be
            a constructor of a network, called as ``(input_tensor_spec=)``.
        decoders: nest of algorithms with the same structure. An entry can also be a network from the latent vector to
            the observation, which is wrapped in a ``DecodingAlgorithm``, or a constructor of a network or algorithm,
            called as ``(input_tensor_spec=, output_tensor_spec=)`` with the specs of latent vector and observation.
        reward_spec: rank 0, or rank 1 for K rewards.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        latent_dim: size of the latent vector.
        lstm_size: sizes of the LSTM layers of predictor and actor.
        memory_size: number of slots of the memory.
        rl_loss: calculates the loss of the actor; ``None``: an ``ActorCriticLoss``.
        optimizer: optimizes all parameters.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ValueError: an encoder or a decoder has a wrong type or is recurrent, or the structure differs from that of
            the observation.
    """

    updates_are_traceable = False

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec, encoders: Nested,
                 decoders: Nested, reward_spec: TensorSpec = TensorSpec(()), env: Any = None,
                 config: TrainerConfig | None = None, latent_dim: Count = 200,
                 lstm_size: Sequence[Count] | Count = (256, 256), memory_size: Count = 1350, rl_loss: Any = None,
                 optimizer: Any = None, debug_summaries: bool = False, name: str = 'Merlin'):
        vector = TensorSpec((latent_dim, ))
        mbp = MemoryBasedPredictor(
            action_spec, _build_parts(encoders, observation_spec, 'encoders', lambda x, spec: (
                x if isinstance(x, Network) else x(input_tensor_spec=spec))),
            _build_parts(decoders, observation_spec, 'decoders', lambda x, spec: _make_decoder(x, vector, spec)),
            lstm_size=lstm_size, latent_dim=latent_dim, memory_size=memory_size)
        mba = MemoryBasedActor(vector, action_spec, mbp.memory, reward_spec=reward_spec, lstm_size=lstm_size,
                               epsilon_greedy=None if config is None else config.epsilon_greedy,
                               latent_dim=latent_dim, loss=rl_loss, debug_summaries=debug_summaries)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=MerlinState(mbp.train_state_spec, mba.train_state_spec), env=env,
                         config=config, optimizer=optimizer, debug_summaries=debug_summaries, name=name)
        self._mbp = mbp
        self._mba = mba
        self._helper = AgentHelper(MerlinInfo)
        self._helper.register_algorithm(mba, 'mba_info')
        self._helper.register_algorithm(mbp, 'mbp_info')

    def set_reward_weights(self, reward_weights: torch.Tensor) -> None:
        """Set the reward weights of this algorithm and of the actor."""
        super().set_reward_weights(reward_weights)
        self._mba.set_reward_weights(reward_weights)

    supports_action_mask = True

    def predict_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Return the most likely action, or with probability ``TrainerConfig.epsilon_greedy`` a sampled one."""
        return self._step('predict_step', time_step, state)

    def rollout_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Write the observation ``[B, ...]`` to the memory, and sample an action ``[B, ...]``."""
        return self._step('rollout_step', time_step, state)

    def _step(self, method: str, time_step: TimeStep, state: Any) -> AlgStep:
        mbp_step = getattr(self._mbp, method)((time_step.observation, time_step.prev_action), state.mbp_state)
        mba_step = getattr(self._mba, method)(time_step._replace(observation=mbp_step.output), state.mba_state)
        memory = self._mbp.memory
        mbp_state = mbp_step.state._replace(memory=memory.states)  # includes the usage by the actor
        memory.release()
        return AlgStep(mba_step.output, MerlinState(mbp_state, mba_step.state),
                       MerlinInfo(mbp_step.info, mba_step.info))

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the sum of the losses of predictor and actor, ``[T, B]``."""
        loss_info = self._helper.accumulate_loss_info([self._mba, self._mbp], info)
        return loss_info._replace(extra=MerlinLossInfo(mba=loss_info.extra['mba_info'],
                                                       mbp=loss_info.extra['mbp_info']))


def _build_parts(parts: Nested, observation_spec: NestedTensorSpec, argument: str, make: Callable[..., Any]) -> Nested:
    """Return the nest of ``make(part, spec)``, with the part of the observation spec that belongs to each part."""
    try:
        specs = nest.flatten_up_to(parts, observation_spec)
    except ValueError as error:
        raise ValueError(f'MerlinAlgorithm.{argument}: expected the structure of the observation {observation_spec}: '
                         f'{error}') from None
    return nest.pack_sequence_as(parts, [make(part, spec) for part, spec in zip(nest.flatten(parts), specs)])


def _make_decoder(decoder: Any, latent_spec: TensorSpec, spec: NestedTensorSpec) -> Algorithm:
    if not isinstance(decoder, nn.Module):
        decoder = decoder(input_tensor_spec=latent_spec, output_tensor_spec=spec)
    return DecodingAlgorithm(decoder=decoder) if isinstance(decoder, Network) else decoder
