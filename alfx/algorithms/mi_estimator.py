r"""Mutual information of two random variables, estimated from samples by a neural network.

Belghazi et al. 2018, "Mutual Information Neural Estimation" (arXiv:1801.04062); Hjelm et al. 2019, "Learning deep
representations by mutual information estimation and maximization" (arXiv:1808.06670); Nowozin et al. 2016, "f-GAN"
(arXiv:1606.00709); the fourth estimator is the bound of Barber and Agakov 2003. With P the joint distribution of x and
y, Q the product of their marginals and T a network,

    DV:   MI  >=  E_P[T] - log E_Q[exp(T)]                              (MINE, eq. 6)
    KLD:  MI  >=  E_P[T] - E_Q[exp(T)] + 1                              (f-GAN, table 2, T shifted by 1)
    JSD:  JSD(P, Q)  >=  -E_P[softplus(-T)] - E_Q[softplus(T)] + log 4  (f-GAN; twice the divergence in nats)
    ML:   MI  >=  E_P[log q(y|x) - log P(y)]

Difference from the papers: the logarithm of DV is replaced by its tangent at a running average m of ``E_Q[exp(T)]``,
``log E <= log m + E / m - 1``. The gradient is that in MINE, section 3.2, where the average removes the bias of
minibatches. The value stays a lower bound, and unlike the logarithms of batch means, the mean of the values of many
batches is not biased upwards. Above ``T = 20`` the exponential continues as a straight line, so it cannot overflow.
KLD and JSD, whose T has ``E_Q[exp(T)] = 1`` when it is learned, can be given an average of it too: T is then relative
to ``log m``, which is also a valid bound. KLD with an average is DV.
"""
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alfx import nest
from alfx.algorithms.algorithm import Algorithm
from alfx.data_structures import AlgStep, LossInfo, namedtuple
from alfx.gin_utils import ConfError, Count, check_value, configurable, problem_at
from alfx.layers import Lambda, OneHot, Reshape, Sequential
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.networks.projection_networks import NormalProjectionNetwork
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, SpecError, TensorSpec
from alfx.utils import dist_utils, math_ops
from alfx.utils.averager import AdaptiveAverager, EMAverager, ScalarAdaptiveAverager, WindowAverager

MIEstimatorLossInfo = namedtuple('MIEstimatorLossInfo', ['bound'], default_value=())
"""``bound``: maximized lower bound, ``[B]``, for summaries."""

_LARGEST_EXPONENT = 20.0


@configurable
class MIEstimator(Algorithm):
    """Estimator of the mutual information of x and y; the module docstring defines the four types.

    DV and KLD bound the mutual information from below. JSD bounds twice the Jensen-Shannon divergence of P and Q, which
    grows with the mutual information; it is the most stable type, because it uses softplus instead of exp. Choose ML if
    P(y) is known and P(y|x) is close to a normal distribution with a diagonal covariance.

    If T is flexible enough it converges to the pointwise mutual information ``log P(x, y) / Q(x, y)`` for KLD and JSD,
    and to this plus ``log E_Q[exp(T)]`` for DV; :meth:`calc_pmi` returns it.

    DV, KLD and JSD need samples of Q. They pair an x of the batch with a y that does not belong to it:

    - 'buffer': a y from the last ``buffer_size`` samples, including this batch.
    - 'double_buffer': x and y are both drawn from buffers, independently of each other.
    - 'shuffle': the y of the batch in random order; some x keep their y.
    - 'shift': the y of the previous sample in the batch; neighboring samples have to be independent.
    - with a ``y_distribution`` passed to :meth:`train_step`: a y drawn from it; the sampler is not used.

    Gradients flow to the y of Q only with 'shuffle' and 'shift'.

    The conditional mutual information ``MI(x, y | z)`` is the mutual information of ``[x, z]`` and y if
    ``y_distribution`` is P(y|z). DV cannot estimate it, because it takes the logarithm of a mean over all z.

    Args:
        x_spec: nest of specs of x.
        y_spec: nest of specs of y; continuous for ML.
        model: network T, called with ``[x, y]``, with output ``[B, 1]``. For ML: called with x, it returns the nest of
            distributions q of y. ``None``: fully connected layers on the concatenated inputs, integers one-hot; for ML
            with a normal distribution of diagonal covariance for each part of y.
        fc_layers: sizes of the hidden layers if ``model`` is ``None``; a number for one layer.
        sampler: source of the y of Q, see above; ignored by ML.
        buffer_size: number of samples kept for 'buffer' and 'double_buffer'; they are saved in checkpoints.
        optimizer: trains the network; ``None``: the optimizer of the enclosing algorithm does.
        estimator_type: 'DV', 'KLD', 'JSD' or 'ML'.
        averager: averages ``E_Q[exp(T)]``, a scalar, over batches; ``None``: a ``ScalarAdaptiveAverager`` for DV, no
            averager for KLD and JSD. With an averager, KLD and JSD take T relative to its logarithm. Not with ML.
        name: name of this algorithm.

    Raises:
        ConfError: ``buffer_size`` is not a positive int, ``averager`` has a wrong type or is given to ML.
        SpecError: the default network cannot process a part of x or y, y is discrete with ML, or the averager does not
            average a scalar.
        ValueError: an unknown estimator or sampler.
    """

    updates_are_traceable = False

    def __init__(self, x_spec: NestedTensorSpec, y_spec: NestedTensorSpec, model: Network | None = None,
                 fc_layers: Sequence[Count] | Count = (256, ),
                 sampler: Literal['buffer', 'double_buffer', 'shuffle', 'shift'] = 'buffer', buffer_size: Count = 65536,
                 optimizer: Any = None, estimator_type: Literal['DV', 'KLD', 'JSD', 'ML'] = 'DV',
                 averager: AdaptiveAverager | EMAverager | WindowAverager | None = None, name: str = 'MIEstimator'):
        bounds: dict[str, Callable[..., Tensor]] = {'DV': self._dv, 'KLD': self._kld, 'JSD': self._jsd}
        _check_averager(type(self).__name__, averager, estimator_type)
        super().__init__(optimizer=optimizer, name=name)
        self._type = estimator_type
        self._sampler = sampler
        self._bound = bounds.get(estimator_type)
        layers = (fc_layers, ) if isinstance(fc_layers, int) else tuple(fc_layers)
        if model is None:
            model = (_NormalNetwork(x_spec, y_spec, layers, name) if estimator_type == 'ML' else
                     _encoder([x_spec, y_spec], layers, f'{name}: [x, y]', last_layer_size=1,
                              last_activation=math_ops.identity))
        self._model = model
        self._averager: Any = averager
        if estimator_type == 'DV' and averager is None:
            self._averager = ScalarAdaptiveAverager()
        self._y_buffer = self._x_buffer = None
        if estimator_type != 'ML' and sampler in ('buffer', 'double_buffer'):
            self._y_buffer = _SampleBuffer(y_spec, buffer_size)
        if estimator_type != 'ML' and sampler == 'double_buffer':
            self._x_buffer = _SampleBuffer(x_spec, buffer_size)

    # Training --------------------------------------------------------------------------------------------------

    def train_step(self, inputs: tuple[NestedTensor, NestedTensor],  # type: ignore[override]
                   y_distribution: Any = None, state: Any = None) -> AlgStep:
        """Compute the bound and its loss for one batch.

        Args:
            inputs: ``(x, y)``: nests ``[B, ...]``; the i-th x belongs to the i-th y.
            y_distribution: nest of distributions like y, with batch shape ``[B]``, or ``[]`` if they are the same for
                all samples: P(y), or P(y|z) for conditional mutual information. Required by ML.
            state: not used.

        Returns:
            ``output`` ``[B]``, whose mean is the bound; ``info`` is a ``LossInfo`` with its negative as ``loss`` and a
            ``MIEstimatorLossInfo`` as ``extra``.

        Raises:
            ValueError: ML without ``y_distribution``, or a batch of 1 with the sampler 'shuffle' or 'shift'.
        """
        x, y = inputs
        if self._bound is None:
            bound = self._log_ratio(x, y, y_distribution)
        else:
            bound = self._bound(self._statistic(x, y), self._statistic(*self._sample(x, y, y_distribution)))
        return AlgStep(output=bound, info=LossInfo(loss=-bound, extra=MIEstimatorLossInfo(bound=bound.detach())))

    def calc_pmi(self, x: NestedTensor, y: NestedTensor, y_distribution: Any = None) -> Tensor:
        """Return the current estimate of the pointwise mutual information ``log P(x, y) / (P(x) P(y))``, in nats.

        Args:
            x: nest ``[B, ...]``.
            y: nest ``[B, ...]``.
            y_distribution: required by ML, see :meth:`train_step`; ignored by the other types.

        Returns:
            Estimate ``[B]``; its mean over samples of P is another estimate of the mutual information.

        Raises:
            ValueError: ML without ``y_distribution``.
        """
        if self._type == 'ML':
            return self._log_ratio(x, y, y_distribution)
        statistic = self._statistic(x, y)
        return statistic if self._averager is None else statistic - self._mean(self._averager.get()).log()

    def _statistic(self, x: NestedTensor, y: NestedTensor) -> Tensor:
        """Return T, ``[B]``."""
        output, _ = self._model([x, y])
        if output.ndim != 2 or output.shape[1] != 1:
            raise ValueError(f'{self._name}.model: expected an output [B, 1], found {list(output.shape)}')
        return output.squeeze(1)

    def _log_ratio(self, x: NestedTensor, y: NestedTensor, y_distribution: Any) -> Tensor:
        """Return ``log q(y|x) - log P(y)``, ``[B]``."""
        if y_distribution is None:
            raise ValueError(f"{self._name}: the estimator 'ML' needs the y_distribution, P(y); if it is unknown, "
                             "choose 'DV', 'KLD' or 'JSD'")
        conditional, _ = self._model(x)
        return (dist_utils.compute_log_probability(conditional, y)
                - dist_utils.compute_log_probability(y_distribution, y))

    # Bounds ----------------------------------------------------------------------------------------------------

    def _dv(self, joint: Tensor, product: Tensor) -> Tensor:
        """Return Donsker and Varadhan's bound, ``[B]``, from T of samples of P and of Q, ``[B]`` each."""
        exp = _exp(product)
        mean = self._mean(self._averager.average(exp))
        return joint - mean.log() - exp / mean + 1

    def _kld(self, joint: Tensor, product: Tensor) -> Tensor:
        """Return the bound of the Kullback-Leibler divergence as an f-divergence, ``[B]``."""
        return joint - _exp(product) + 1 if self._averager is None else self._dv(joint, product)

    def _jsd(self, joint: Tensor, product: Tensor) -> Tensor:
        """Return the bound of twice the Jensen-Shannon divergence, ``[B]``."""
        if self._averager is not None:
            shift = self._mean(self._averager.average(_exp(product))).log()
            joint, product = joint - shift, product - shift
        return math.log(4) - F.softplus(-joint) - F.softplus(product)

    @staticmethod
    def _mean(average: Tensor) -> Tensor:
        """Return the average, or 1 before the first batch."""
        return torch.where(average > 0, average, torch.ones_like(average))

    # Samples of the product of the marginals -------------------------------------------------------------------

    def _sample(self, x: NestedTensor, y: NestedTensor, y_distribution: Any) -> tuple[NestedTensor, NestedTensor]:
        """Return nests ``[B, ...]`` of x and y that are independent of each other."""
        size = nest.get_nest_batch_size(y)
        if y_distribution is not None:
            return x, nest.map_structure(lambda dist: _draw(dist, size), y_distribution, is_leaf=nest.is_distribution)
        if self._y_buffer is not None:
            self._y_buffer.add(y)
            if self._x_buffer is not None:
                self._x_buffer.add(x)
                x = self._x_buffer.sample(size)
            return x, self._y_buffer.sample(size)
        if size < 2:
            raise ValueError(f"{self._name}: the sampler '{self._sampler}' finds no other y in a batch of 1; choose "
                             "'buffer'")
        if self._sampler == 'shift':
            return x, nest.map_structure(lambda leaf: leaf.roll(1, 0), y)
        return x, math_ops.shuffle(y)


def _check_averager(owner: str, averager: Any, estimator_type: str) -> None:
    """Raise an error if ``averager`` does not average a scalar, or is given to ML."""
    if averager is None:
        return
    check_value(owner, 'averager', averager, (AdaptiveAverager, EMAverager, WindowAverager))
    if estimator_type == 'ML':
        raise ConfError([problem_at(owner, 'averager', f'is not used by the estimator {estimator_type!r}',
                                    "leave it out, or choose estimator_type='DV'")])
    average = averager.get()
    if not isinstance(average, Tensor) or average.ndim:
        found = nest.map_structure(lambda x: tuple(x.shape), average)
        raise SpecError(f'{owner}.averager: expected the average of a scalar, such as ScalarEMAverager, found the '
                        f'average of {found}')


def _exp(x: Tensor) -> Tensor:
    """Return ``exp(x)``, and above 20 its tangent at 20."""
    bounded = x.clamp(max=_LARGEST_EXPONENT)
    return bounded.exp() * (1 + x - bounded)


def _draw(distribution: Any, size: int) -> Tensor:
    """Draw ``size`` samples of one distribution, or one sample of each distribution of a batch."""
    return distribution.sample() if len(distribution.batch_shape) else distribution.sample((size, ))


class _SampleBuffer(nn.Module):
    """Buffer of the latest samples, which draws samples with replacement.

    Args:
        spec: nest of specs of a sample.
        max_size: number of samples kept.
    """

    _count: Tensor

    def __init__(self, spec: NestedTensorSpec, max_size: int):
        super().__init__()
        self._structure: Any = nest.structure(spec)
        self._max_size = max_size
        leaves = nest.flatten(spec)
        self._names = [f'_samples{i}' for i in range(len(leaves))]
        for name, leaf in zip(self._names, leaves):
            self.register_buffer(name, leaf.zeros((max_size, )))
        self.register_buffer('_count', torch.zeros((), dtype=torch.int64))  # number of samples ever added

    def add(self, samples: NestedTensor) -> None:
        """Store ``samples``, a nest ``[B, ...]``, and overwrite the oldest ones."""
        size, count = nest.get_nest_batch_size(samples), int(self._count)
        kept = min(size, self._max_size)
        slots = torch.arange(count + size - kept, count + size, device=self._count.device) % self._max_size
        for name, leaf in zip(self._names, self._structure.flatten_up_to(samples)):
            getattr(self, name).index_copy_(0, slots, leaf.detach()[size - kept:])
        self._count += size

    def sample(self, size: int) -> NestedTensor:
        """Draw a nest ``[size, ...]``."""
        stored = min(int(self._count), self._max_size)
        index = torch.randint(stored, (size, ), device=self._count.device)
        return self._structure.unflatten([getattr(self, name)[index] for name in self._names])


def _encoder(spec: NestedTensorSpec, fc_layers: Sequence[int], where: str, **last_layer: Any) -> EncodingNetwork:
    """Create fully connected layers on all parts of a nest; ``where`` is for error messages."""
    preprocessors = [_preprocessor(leaf, f'{where} at {path}' if path else where)
                     for path, leaf in nest.flatten_with_path(spec)]
    return EncodingNetwork(spec, input_preprocessors=nest.structure(spec).unflatten(preprocessors),
                           preprocessing_combiner=NestConcat(), fc_layer_params=tuple(fc_layers), **last_layer)


def _preprocessor(spec: TensorSpec, where: str) -> nn.Module:
    """Create a layer that converts one part of the input to a vector."""
    if spec.is_continuous:
        return Reshape(spec.numel)
    if not isinstance(spec, BoundedTensorSpec):
        raise SpecError(f'{where}: expected floats, or integers with bounds (a BoundedTensorSpec), found {spec}; pass '
                        'a model')
    smallest = int(spec.minimum.min())
    count = int(spec.maximum.max()) - smallest + 1
    return Sequential(Lambda(lambda x: x.long() - smallest), OneHot(count), Reshape(spec.numel * count))


class _NormalNetwork(Network):
    """Network that maps x to independent normal distributions of all parts of y.

    Args:
        x_spec: nest of specs.
        y_spec: nest of specs.
        fc_layers: sizes of the hidden layers.
        name: name of the estimator, for error messages.
    """

    def __init__(self, x_spec: NestedTensorSpec, y_spec: NestedTensorSpec, fc_layers: Sequence[int], name: str):
        for path, spec in nest.flatten_with_path(y_spec):
            if spec.is_discrete:
                raise SpecError(f"{name}: y{f' at {path}' if path else ''}: expected a continuous y for the estimator "
                                f"'ML' without a model, found {spec}; pass a model")
        super().__init__(x_spec, (), f'{name}_model')
        self._encoder = _encoder(x_spec, fc_layers, f'{name}: x')
        size = self._encoder.output_spec.shape[0]
        self._structure = nest.structure(y_spec)
        self._projections: Any = nn.ModuleList([
            NormalProjectionNetwork(size, spec, squash_mean=False, state_dependent_std=True)
            for spec in nest.flatten(y_spec)])

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest ``[B, ...]`` to a nest of distributions of batch shape ``[B]``."""
        encoded, _ = self._encoder(inputs)
        return self._structure.unflatten([projection(encoded)[0] for projection in self._projections]), state
