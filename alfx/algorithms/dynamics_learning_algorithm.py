"""Dynamics models: predict the change of a feature, by one network or an ensemble.

Chua et al. 2018 (PETS, arXiv:1805.12114): an ensemble of networks with bounded log-variances, each trained on a
separate bootstrap sample, sees normalized inputs and predicts the normalized change:

    y[t] = (s[t] - s[t-1] - m_y) / d_y            x[t] = ((s[t-1], a[t-1]) - m_x) / d_x
    deterministic  L[t] = 1/2 mean_d (f(x[t]) - y[t])^2
    stochastic     L[t] = -log N(y[t]; mu(x[t]), sigma(x[t])^2)

The loss of arriving at a step is assigned to the previous step, where the action was taken. Arriving at LAST is
therefore learned, and transitions across the boundary between two episodes are not. Differs from the paper:

* A bootstrap sample needs no storage, see :mod:`alfx.algorithms.model_based.bootstrap`.
* Means and deviations are computed from the training batches, where recent batches count more.
* The likelihood has its factor 1/2 and is summed over the dimensions; the authors' code omits the factor and averages.
* The members with the smallest error on held-out data are the elites (Janner et al. 2019, arXiv:1906.08253).

Read next: :mod:`alfx.algorithms.mbrl_algorithm`.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.algorithms.model_based.bootstrap import transition_weights
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep, namedtuple
from alfx.distributions.continuous import DiagMultivariateNormal
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import ConfError, Count, Range, check_value, configurable, problem_at, takes_arguments_of
from alfx.networks.action_encoder import SimpleActionEncoder
from alfx.networks.dynamics_networks import BoundedVarianceProjectionNetwork, DynamicsNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensorSpec, SpecError, TensorSpec
from alfx.utils.running_stats import AdaptiveStats

DynamicsState = namedtuple('DynamicsState', ['feature', 'network'], default_value=())
"""The previous step's feature, ``[B, ...]`` or ``[B, n, ...]``, and the network state, which is ``()``."""

DynamicsInfo = namedtuple('DynamicsInfo', ['loss', 'dist', 'weight'], default_value=())
"""Info of the steps.

``loss``: ``LossInfo`` of arriving at a step, ``[B]``; ``dist``: the distribution of the change, ``[B, ...]`` or ``[B,
n, ...]``; ``weight``: added by :meth:`DynamicsLearningAlgorithm.preprocess_experience`, ``[B, T, n]``: how often each
member counts the loss of arriving at a step.
"""

_SPEED = 8.0
_HOLDOUT_RATE = 0.01
_PENALTY = 0.01


class _Scaling(nn.Module):
    """Means and deviations that normalize features, actions and changes."""

    def __init__(self, feature_spec: TensorSpec, action_spec: TensorSpec):
        super().__init__()
        self._feature = AdaptiveStats(feature_spec, _SPEED)
        self._action = AdaptiveStats(action_spec, _SPEED)
        self._change = AdaptiveStats(feature_spec, _SPEED)

    def observe(self, feature: Tensor, action: Tensor, change: Tensor) -> None:
        """Update the statistics with transitions ``[N, ...]``."""
        for stats, x in ((self._feature, feature), (self._action, action), (self._change, change)):
            stats.update(x)

    def inputs(self, feature: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalized features and actions."""
        return _normalized(self._feature, feature, 1e-6), _normalized(self._action, action, 1e-6)

    def target(self, change: Tensor) -> Tensor:
        """Return the normalized change."""
        return _normalized(self._change, change, 1e-12)

    def moments_of_change(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the change."""
        mean, variance = self._change.moments()
        return mean, (variance + 1e-12).sqrt()


def _normalized(stats: AdaptiveStats, x: Tensor, epsilon: float) -> Tensor:
    mean, variance = stats.moments()
    return (x - mean) * torch.rsqrt(variance + epsilon)


@configurable
class DynamicsLearningAlgorithm(Algorithm):
    """Base class of dynamics models; see :class:`DeterministicDynamicsAlgorithm` and
    :class:`StochasticDynamicsAlgorithm`.

    Args:
        train_state_spec: ``DynamicsState``.
        action_spec: spec of the action; discrete actions are encoded one-hot.
        feature_spec: float32 ``[D]``.
        hidden_size: sizes of the hidden layers of the default network.
        num_replicas: number n of networks.
        dynamics_network: predicts the change of the feature from (feature, encoded action); ``None``: a
            :class:`~alfx.networks.dynamics_networks.DynamicsNetwork`.
        checkpoint: as in ``Algorithm``.
        name: name of this algorithm.
        normalize: normalize the inputs and the predicted change.
        bootstrap: train each of several networks on a separate bootstrap sample.
        holdout: fraction of transitions that are held out from training, at most 0.9; their error selects the elites.
        num_elites: number of networks with the smallest held-out error in :attr:`elites`; ``None``: all.

    Raises:
        ConfError: an argument is out of range, or there are elites without a holdout.
        SpecError: the feature is not a vector of floats, or the network is recurrent.
    """

    def __init__(self, train_state_spec: NestedTensorSpec, action_spec: NestedTensorSpec, feature_spec: TensorSpec,
                 hidden_size: Count | Sequence[Count] = 256, num_replicas: Count = 1,
                 dynamics_network: Network | None = None, checkpoint: str | None = None,
                 name: str = 'DynamicsLearningAlgorithm', normalize: bool = True, bootstrap: bool = True,
                 holdout: Annotated[float, Range(0, 0.9)] = 0.0, num_elites: Count | None = None):
        super().__init__(train_state_spec=train_state_spec, checkpoint=checkpoint, name=name)
        owner = type(self).__name__
        _check_feature(owner, feature_spec)
        self._num_replicas, self._holdout = num_replicas, holdout
        check_value(owner, 'num_elites', num_elites, int, minimum=1, maximum=num_replicas, optional=True)
        if num_elites is not None and num_elites < num_replicas and not holdout:
            raise ConfError([problem_at(owner, 'num_elites', f'= {num_elites} of {num_replicas}: elites are '
                                        'selected by held-out transitions, but holdout is 0', 'set holdout = 0.1')])
        self._num_elites = num_replicas if num_elites is None else num_elites
        self._bootstrap = bootstrap and num_replicas > 1
        self._action_encoder = SimpleActionEncoder(action_spec)
        if dynamics_network is None:
            sizes = tuple(hidden_size) if isinstance(hidden_size, Sequence) else (hidden_size, )
            dynamics_network = self._default_network((feature_spec, self._action_encoder.output_spec), feature_spec,
                                                     sizes)
        if dynamics_network.is_rnn:
            raise SpecError(f'{owner}.dynamics_network: expected a feed-forward network, found '
                            f'{type(dynamics_network).__name__}')
        self._network: Any = dynamics_network if num_replicas == 1 else dynamics_network.make_parallel(num_replicas)
        self._scaling = _Scaling(feature_spec, self._action_encoder.output_spec) if normalize else None
        self._holdout_error: Tensor
        self._holdout_count: Tensor
        self.register_buffer('_holdout_error', torch.zeros(num_replicas))
        self.register_buffer('_holdout_count', torch.zeros(()))

    def _default_network(self, input_spec: NestedTensorSpec, output_spec: TensorSpec, sizes: Sequence[int]) -> Network:
        return DynamicsNetwork(input_spec, output_spec, joint_fc_layer_params=sizes, activation=F.silu)

    @property
    def num_replicas(self) -> int:
        """Number n of networks."""
        return self._num_replicas

    @property
    def elites(self) -> Tensor:
        """Indices of the networks with the smallest held-out error, int64 ``[num_elites]``, best first."""
        return self._holdout_error.argsort(stable=True)[:self._num_elites]

    def get_state_specs(self) -> Any:
        """Return the spec of ``DynamicsState``."""
        return self._train_state_spec

    def update_state(self, time_step: TimeStep, state: Any) -> Any:
        """Return the state with the feature of the current observation ``[B, D]``, from which to predict."""
        return state._replace(feature=time_step.observation)

    # Statistics and held-out data -----------------------------------------------------------------------------

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Update the statistics with a batch ``[B, T, ...]``; assign its transitions to members and held-out data."""
        feature, action = root_inputs.observation, self._action_encoder(root_inputs.prev_action)
        follows = ~root_inputs.is_first()[:, 1:]
        before, after, action = feature[:, :-1][follows], feature[:, 1:][follows], action[:, 1:][follows]
        if self._scaling is not None and not context.is_eval():
            self._scaling.observe(before, action, after - before)
        if not self._bootstrap and not self._holdout:
            return root_inputs, rollout_info
        weight, is_held_out = self._places(root_inputs, batch_info)
        if self._holdout and not context.is_eval():
            chosen = is_held_out[:, 1:][follows]
            self._observe_holdout(before[chosen], action[chosen], after[chosen])
        return root_inputs, (rollout_info or DynamicsInfo())._replace(weight=weight)

    @torch.no_grad()
    def _observe_holdout(self, before: Tensor, action: Tensor, after: Tensor) -> None:
        """Update the average errors with held-out transitions ``[N, ...]``."""
        count = context.sum_over_ranks(self._holdout_error.new_tensor(len(before)))
        if not count:
            return
        errors = self._losses(before, action, after)[0].reshape(len(before), len(self._holdout_error))
        error = context.sum_over_ranks(errors.sum(0)) / count
        self._holdout_count += 1
        self._holdout_error.lerp_(error, (1 / self._holdout_count).clamp(min=_HOLDOUT_RATE))

    @torch.no_grad()
    def measure_holdout(self, time_step: TimeStep, batch_info: BatchInfo) -> float | None:
        """Compute the held-out error from scratch instead of averaging it over batches.

        Args:
            time_step: sequences ``[B, T, ...]`` of a replay buffer; only their held-out transitions count.
            batch_info: their positions in the replay buffer.

        Returns:
            the mean error of the elites; ``None`` if no transition is held out.
        """
        _, is_held_out = self._places(time_step, batch_info)
        chosen = is_held_out[:, 1:] & ~time_step.is_first()[:, 1:]
        if not bool(chosen.any()):
            return None
        feature, action = time_step.observation, self._action_encoder(time_step.prev_action)
        error = self._losses(feature[:, :-1][chosen], action[:, 1:][chosen], feature[:, 1:][chosen])[0]
        self._holdout_error.copy_(error.reshape(len(error), -1).mean(0))
        return float(self._holdout_error[self.elites].mean())

    def _places(self, time_step: TimeStep, batch_info: BatchInfo) -> tuple[Tensor, Tensor]:
        """Call :func:`transition_weights` for arriving at the steps of sequences ``[B, T, ...]``."""
        device = time_step.step_type.device
        positions = batch_info.positions.to(device).unsqueeze(1) + torch.arange(time_step.step_type.shape[1],
                                                                               device=device)
        env_ids = batch_info.env_ids.to(device).unsqueeze(1).expand_as(positions)
        return transition_weights(env_ids, positions, self._num_replicas, self._bootstrap, self._holdout)

    # Training --------------------------------------------------------------------------------------------------

    def _losses(self, before: Tensor, action: Tensor, after: Tensor) -> tuple[Tensor, Any]:
        """Compute the loss of each network, ``[N]`` or ``[N, n]``, of transitions ``[N, (n,) ...]``, and the
        distribution."""
        raise NotImplementedError(f'{type(self).__name__}._losses')

    def _predicted(self, feature: Tensor, action: Tensor) -> Any:
        """Predict the normalized change: ``[N, (n,) D]``, or a distribution of it."""
        scaling = self._scaling
        return self._network((feature, action) if scaling is None else scaling.inputs(feature, action))[0]

    def _target(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the target of the prediction, the normalized change."""
        change = after - before
        change = change if self._scaling is None else self._scaling.target(change)
        return change.unsqueeze(1) if self._num_replicas > 1 and change.ndim == 2 else change

    def _expanded(self, x: Tensor, ndim: int = 2) -> Tensor:
        """Expand ``[B, ...]`` of ``ndim`` dimensions to ``[B, n, ...]`` for several networks; return other tensors
        unchanged."""
        if self._num_replicas == 1 or x.ndim != ndim:
            return x
        return x.unsqueeze(1).expand(len(x), self._num_replicas, *x.shape[1:])

    def _arrival(self, before: Tensor, time_step: TimeStep, rollout_info: Any) -> AlgStep:
        """Compute ``train_step`` of rows ``[N, ...]``."""
        loss, dist = self._losses(*map(self._expanded, (
            before, self._action_encoder(time_step.prev_action), time_step.observation)))
        weight = getattr(rollout_info, 'weight', ())
        if self._num_replicas > 1:
            loss = (loss * weight if isinstance(weight, Tensor) else loss).mean(-1)
        elif isinstance(weight, Tensor):
            loss = loss * weight.squeeze(-1)
        loss = torch.where(time_step.is_first(), 0.0, loss)
        info = DynamicsInfo(loss=LossInfo(loss=loss, extra={'dynamics': loss.detach()}), dist=dist)
        return AlgStep((), DynamicsState(feature=time_step.observation), info)

    def train_sequence(self, inputs: TimeStep, state: Any, rollout_info: Any = ()) -> AlgStep:
        """Compute ``train_step`` for sequences ``[T, B, ...]``; the first step has loss 0."""
        length, batch = inputs.step_type.shape
        if length < 2:
            return super().train_sequence(inputs, state, rollout_info)
        flat = nest.map_structure(lambda x: x[1:].flatten(0, 1), (TimeStep(
            step_type=inputs.step_type, observation=inputs.observation, prev_action=inputs.prev_action), rollout_info))
        info = self._arrival(inputs.observation[:-1].flatten(0, 1), *flat).info._replace(dist=())
        info = nest.map_structure(lambda x: torch.cat((x.new_zeros(batch), x)).view(length, batch), info)
        return AlgStep((), (), info)

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the losses ``[T, B]``, each at the step before the transition; 0 at the last step."""
        if isinstance(info, tuple) and not info:  # of a known model, which learns nothing
            return LossInfo()
        moved = nest.map_structure(lambda x: torch.cat((x[1:], torch.zeros_like(x[:1]))), info.loss)
        penalty = self._network.bounds_penalty() if hasattr(self._network, 'bounds_penalty') else None
        return moved if penalty is None else moved._replace(scalar_loss=_PENALTY * penalty)


def _check_feature(owner: str, spec: Any) -> None:
    if not isinstance(spec, TensorSpec) or spec.ndim != 1 or not spec.is_continuous:
        raise SpecError(f'{owner}.feature_spec: expected one vector of floats, found {spec}; flatten the '
                        'observation with the wrapper FlattenObservation of gymnasium, or plan in a latent space '
                        '(LatentMbrlAlgorithm)')


@configurable
class DeterministicDynamicsAlgorithm(DynamicsLearningAlgorithm):
    """Deterministic dynamics model; its loss is half of the mean squared error of the normalized change.

    Args:
        action_spec: spec of the action; discrete actions are encoded one-hot.
        feature_spec: float32 ``[D]``.
        hidden_size: sizes of the hidden layers, unless ``dynamics_network_ctor`` is given.
        num_replicas: number of networks.
        dynamics_network_ctor: called as ``(input_tensor_spec=(feature_spec, encoded_action_spec),
            output_tensor_spec=feature_spec)``; creates the network.
        name: name of this algorithm.
        normalize: see :class:`DynamicsLearningAlgorithm`, also for the other arguments.
    """

    _is_stochastic = False

    def __init__(self, action_spec: NestedTensorSpec, feature_spec: TensorSpec,
                 hidden_size: Count | Sequence[Count] = 256, num_replicas: Count = 1,
                 dynamics_network_ctor: Callable[..., Network] | None = None,
                 name: str = 'DeterministicDynamicsAlgorithm', normalize: bool = True, bootstrap: bool = True,
                 holdout: Annotated[float, Range(0, 0.9)] = 0.0, num_elites: Count | None = None,
                 checkpoint: str | None = None):
        owner = type(self).__name__
        network: Any = None
        if dynamics_network_ctor is not None:
            encoded = SimpleActionEncoder(action_spec).output_spec
            network = dynamics_network_ctor(input_tensor_spec=(feature_spec, encoded), output_tensor_spec=feature_spec)
            _check_kind(owner, network, self._is_stochastic)
        super().__init__(DynamicsState(feature=TensorSpec(feature_spec.shape)), action_spec, feature_spec, hidden_size,
                         num_replicas, network, checkpoint, name, normalize, bootstrap, holdout, num_elites)

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are traceable unless a layer draws random numbers or keeps statistics."""
        return super().own_capabilities()._replace(traceable_update=is_traceable(self._network),
                                                   trains_sequences_at_once=True,
                                                   needs_two_steps=True, bootstraps_sequences=True)

    def _change(self, predicted: Any) -> Tensor:
        """Return the predicted change ``[N, (n,) D]``."""
        if self._scaling is None:
            return predicted
        mean, deviation = self._scaling.moments_of_change()
        return torch.addcmul(mean, deviation, predicted)

    def predict_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Predict the next feature.

        Args:
            time_step: its ``prev_action`` ``[B, ...]`` or ``[B, n, ...]`` is the action.
            state: ``DynamicsState`` with the ``feature`` to start from, ``[B, D]`` or ``[B, n, D]``.

        Returns:
            ``output``: the next feature, ``[B, D]``, or ``[B, n, D]`` of n networks; ``state``: with that feature;
            ``info``: ``()``.
        """
        feature = self._expanded(state.feature)
        action = self._expanded(self._action_encoder(time_step.prev_action))
        output = feature + self._change(self._predicted(feature, action))
        return AlgStep(output, state._replace(feature=output), ())

    def train_step(self, time_step: TimeStep, state: Any, rollout_info: Any = ()) -> AlgStep:
        """Compute the loss of predicting the observation of ``time_step`` from ``state.feature`` and ``prev_action``.

        Args:
            time_step: ``[B, ...]``.
            state: ``DynamicsState``: the previous step's feature, ``[B, D]``.
            rollout_info: ``DynamicsInfo`` with weights ``[B, n]``, or ``()``.

        Returns:
            ``output``: ``()``; ``state``: with the feature of this step; ``info``: ``DynamicsInfo``; the loss is 0 at
            FIRST.
        """
        return self._arrival(state.feature, time_step, rollout_info)

    def _losses(self, before: Tensor, action: Tensor, after: Tensor) -> tuple[Tensor, Any]:
        return 0.5 * (self._predicted(before, action) - self._target(before, after)).square().mean(-1), ()


def _check_kind(owner: str, network: Any, is_stochastic: bool) -> None:
    if network.is_distribution_output == is_stochastic:
        return
    needed, other = ('a distribution', 'a tensor') if is_stochastic else ('a tensor', 'a distribution')
    remedy = f'set DynamicsNetwork.prob = {is_stochastic}, or choose the other algorithm'
    raise ConfError([problem_at(owner, 'dynamics_network_ctor', f'creates {type(network).__name__}, which predicts '
                                f'{other}; the algorithm needs {needed}', remedy)])


@configurable
class StochasticDynamicsAlgorithm(DeterministicDynamicsAlgorithm):
    """Stochastic dynamics model; its loss is the negative log-likelihood of the change.

    Args:
        logvar_bounds: initial bounds of the log-variances of the normalized change, unless ``dynamics_network_ctor`` is
            given.
        kwargs: arguments of :class:`DeterministicDynamicsAlgorithm`; a network of ``dynamics_network_ctor`` predicts a
            normal distribution with a diagonal covariance.
    """

    _is_stochastic = True

    @takes_arguments_of(DeterministicDynamicsAlgorithm, defaults={'name': 'StochasticDynamicsAlgorithm'},
                        after={'logvar_bounds': 'checkpoint'})
    def __init__(self, logvar_bounds: tuple[float, float] = (-10.0, 0.5), **kwargs: Any):
        self._logvar_bounds = logvar_bounds
        super().__init__(**kwargs)

    def _default_network(self, input_spec: NestedTensorSpec, output_spec: TensorSpec, sizes: Sequence[int]) -> Network:
        low, high = self._logvar_bounds
        head = partial(BoundedVarianceProjectionNetwork, min_log_variance=low, max_log_variance=high)
        return DynamicsNetwork(input_spec, output_spec, joint_fc_layer_params=sizes, activation=F.silu, prob=True,
                               continuous_projection_net_ctor=head)

    def _distribution(self, predicted: Any) -> DiagMultivariateNormal:
        """Return the distribution of the change ``[N, (n,) D]``."""
        if self._scaling is None:
            return predicted
        mean, deviation = self._scaling.moments_of_change()
        return DiagMultivariateNormal(torch.addcmul(mean, deviation, predicted.mean), deviation * predicted.stddev)

    def predict_step(self, time_step: TimeStep, state: Any) -> AlgStep:
        """Sample the next feature as in the base class; ``info`` is a ``DynamicsInfo`` with the distribution."""
        feature = self._expanded(state.feature)
        action = self._expanded(self._action_encoder(time_step.prev_action))
        dist = self._distribution(self._predicted(feature, action))
        output = feature + dist.sample()
        return AlgStep(output, state._replace(feature=output), DynamicsInfo(dist=dist))

    def _losses(self, before: Tensor, action: Tensor, after: Tensor) -> tuple[Tensor, Any]:
        predicted = self._predicted(before, action)
        return -predicted.log_prob(self._target(before, after)), self._distribution(predicted)
