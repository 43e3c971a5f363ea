r"""Generators: networks that map noise to samples of a distribution.

The distribution is given by a loss, its negative log density up to a constant. A generator minimizes ``E[loss(x)] - a
H(x)``, with ``a = entropy_regularization``; at ``a = 1`` this is the Kullback-Leibler divergence from the distribution.
The entropy H of the outputs is not known. Its gradient is estimated by particle-based variational inference: a batch of
outputs is moved as particles are, and the network is trained to follow (Feng et al. 2017, "Learning to draw samples
with amortized Stein variational gradient descent", arXiv:1707.06626). With y another sample of outputs, k the kernel
and s the score ``-grad loss``,

    svgd    k(y_i, x_i) s(y_i) + a grad_{y_i} k(y_i, x_i): one y for each x, which may depend on inputs
    svgd2   the mean of this over y_j; x and y are halves of a batch
    svgd3   the same; y is a separate batch
    gfsf    s(x_i) - a (estimate of grad log q)                                  (Liu et al. 2019, arXiv:1807.01750)
    minmax  the output of a critic network                                       (Hu et al. 2018, arXiv:1810.03545)

or, with ``functional_gradient``, by the gradient in the space of functions of the noise (GPVI,
:mod:`alfx.algorithms.particles.inverse_mvp`). Read next: :mod:`alfx.algorithms.hypernetwork_algorithm`.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.mi_estimator import MIEstimator
from alfx.algorithms.particle_vi_algorithm import RIDGE, check_method, losses_of, moving_loss, score_of
from alfx.algorithms.particles import particle_vi
from alfx.algorithms.particles.critic import CriticAlgorithm as CriticAlgorithm
from alfx.algorithms.particles.inverse_mvp import InverseMVPAlgorithm as InverseMVPAlgorithm
from alfx.algorithms.particles.inverse_mvp import jacobian, solve_direct, transposed_product
from alfx.data_structures import AlgStep, LossInfo, namedtuple
from alfx.gin_utils import ConfError, Count, Fraction, NonNegative, configurable, log_unused, non_default, problem_at
from alfx.nest.utils import NestConcat
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import Network
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.averager import ScalarAdaptiveAverager
from alfx.utils.math_ops import identity
from alfx.utils.target_updater import TargetUpdater

GeneratorLossInfo = namedtuple('GeneratorLossInfo', ['generator', 'mi_estimator', 'inverse_mvp'], default_value=())
"""Losses for summaries: ``generator`` ``[B]``, the loss of the outputs; the other two only if such parts exist."""

_METHODS = ('svgd', 'svgd2', 'svgd3', 'gfsf', 'minmax', None)
_ROWS_AT_ONCE = 1 << 22
"""Number of products with inverse Jacobians that are computed together: all N^2 D of them would not fit in memory."""


@configurable
class Generator(Algorithm):
    """Maps noise, and optionally inputs, to outputs; see the module docstring.

    Args:
        output_dim: size D of an output.
        noise_dim: size K of the noise, which is standard normal.
        input_tensor_spec: nest of specs of the inputs; ``None``: no inputs.
        hidden_layers: sizes of the hidden layers if there is no ``net``; ``None``: none.
        net: the network, called with the noise, or with ``[noise, inputs]``; ``None`` for fully connected layers.
        net_moving_average_rate: if given, ``predict_step`` uses a moving average of the network with this update rate.
        entropy_regularization: ``a``; 0 to minimize only the loss.
        mi_weight: weight of the mutual information of ``[noise, inputs]`` and outputs, which is maximized; ``None`` for
            none (Hjelm et al. 2019, arXiv:1808.06670).
        mi_estimator_cls: creates the estimator of the mutual information, called with ``x_spec``, ``y_spec`` and
            ``sampler``.
        par_vi: 'svgd', 'svgd2', 'svgd3', 'gfsf', 'minmax', or ``None`` for no regularization.
        use_kernel_averager: use a running average of the kernel bandwidth.
        functional_gradient: use GPVI; requires ``par_vi`` 'svgd3' or ``None``.
        init_lambda: ``c``, the weight of the noise that is added to the output if ``noise_dim < output_dim``; only
            for GPVI, as are all arguments up to ``inverse_mvp_hidden_layers``.
        lambda_trainable: train ``c``.
        block_inverse_mvp: solve ``noise_dim`` equations instead of ``output_dim``.
        direct_jac_inverse: solve them exactly; otherwise a network is trained to solve them.
        inverse_mvp_solve_iters: updates of that network in each training step.
        inverse_mvp_hidden_size: width of its hidden layers.
        inverse_mvp_hidden_layers: number of its hidden layers.
        critic_input_dim: number of inputs of the critic; ``None``: ``output_dim``. Only for 'minmax', as are all critic
            arguments.
        critic_hidden_layers: sizes of the critic's hidden layers.
        critic_l2_weight: weight of the squared norm of the critic's outputs.
        critic_iter_num: updates of the critic in each training step.
        critic_relu_mlp: use a ``ReluMLP``, whose Jacobian trace is exact; not with ``critic_use_bn``.
        critic_use_bn: use batch norm in the critic.
        minmax_resample: sample new outputs for each update of the critic.
        critic_optimizer: trains the critic; required for 'minmax'.
        inverse_mvp_optimizer: trains the network of inverse products; required if there is one.
        optimizer: trains the generator.
        lambda_optimizer: trains ``c``; ``None``: ``optimizer``.
        name: name of this algorithm.

    Raises:
        ConfError: arguments contradict each other.
    """

    _declared_capabilities = {'traceable_update': True}  # a critic and inverse products restrict it
    _not_trained = ('_average_net', )

    def __init__(self, output_dim: Count, noise_dim: Count = 32, input_tensor_spec: NestedTensorSpec = None,
                 hidden_layers: Sequence[Count] | None = (256, ), net: Network | None = None,
                 net_moving_average_rate: Fraction | None = None, entropy_regularization: NonNegative = 0.0,
                 mi_weight: NonNegative | None = None, mi_estimator_cls: Callable = MIEstimator,
                 par_vi: str | None = None, use_kernel_averager: bool = False,
                 functional_gradient: bool = False, init_lambda: float = 1.0,
                 lambda_trainable: bool = False, block_inverse_mvp: bool = False, direct_jac_inverse: bool = False,
                 inverse_mvp_solve_iters: Count = 1, inverse_mvp_hidden_size: Count = 100,
                 inverse_mvp_hidden_layers: Count = 1, critic_input_dim: Count | None = None,
                 critic_hidden_layers: Sequence[Count] = (100, 100), critic_l2_weight: NonNegative = 10.0,
                 critic_iter_num: Count = 2, critic_relu_mlp: bool = False, critic_use_bn: bool = True,
                 minmax_resample: bool = True, critic_optimizer: Any = None, inverse_mvp_optimizer: Any = None,
                 optimizer: Any = None, lambda_optimizer: Any = None, name: str = 'Generator'):
        owner = type(self).__name__
        check_method(owner, par_vi, _METHODS, critic_optimizer)
        _check_combination(owner, par_vi, functional_gradient, entropy_regularization, input_tensor_spec, output_dim,
                           noise_dim, direct_jac_inverse, inverse_mvp_optimizer, lambda_trainable)
        if not functional_gradient:
            log_unused(owner, non_default(Generator.__init__, locals(), 'block_inverse_mvp', 'direct_jac_inverse',
                                      'init_lambda', 'inverse_mvp_optimizer', 'lambda_optimizer'),
                       'functional_gradient is False')
        if critic_optimizer is not None and par_vi != 'minmax':
            log_unused(owner, ['critic_optimizer'], "par_vi is not 'minmax'")
        super().__init__(optimizer=optimizer, name=name)
        self._noise_dim, self._output_dim = noise_dim, output_dim
        self._has_inputs = input_tensor_spec is not None
        self._entropy_regularization, self._par_vi = entropy_regularization, par_vi
        noise_spec = TensorSpec((noise_dim, ))
        net_spec: Any = [noise_spec, input_tensor_spec] if self._has_inputs else noise_spec
        if net is None:
            net = EncodingNetwork(net_spec, preprocessing_combiner=NestConcat() if self._has_inputs else None,
                                  fc_layer_params=tuple(hidden_layers or ()), last_layer_size=output_dim,
                                  last_activation=identity)
        self._net = net
        self._average_net: Network | None = None
        self._update_average: TargetUpdater | None = None
        if net_moving_average_rate is not None:
            self._average_net = net.copy(name=net.name + '_average')
            self._update_average = TargetUpdater(net, self._average_net, tau=net_moving_average_rate)
        self._mi_weight = mi_weight
        self._mi_estimator: Any = None
        if mi_weight is not None:
            output_spec = TensorSpec((output_dim, ))  # the noise has the same shape with functional_gradient
            self._mi_estimator = mi_estimator_cls(x_spec=output_spec if functional_gradient else net_spec,
                                                  y_spec=output_spec, sampler='shift')
        self._bandwidth_averager = ScalarAdaptiveAverager() if use_kernel_averager else None
        self._critic: CriticAlgorithm | None = None
        self._critic_iter_num, self._critic_l2_weight = critic_iter_num, critic_l2_weight
        self._minmax_resample = minmax_resample
        if par_vi == 'minmax':
            self._critic = CriticAlgorithm(
                TensorSpec((output_dim if critic_input_dim is None else critic_input_dim, )),
                hidden_layers=critic_hidden_layers, use_relu_mlp=critic_relu_mlp, use_bn=critic_use_bn,
                optimizer=critic_optimizer)
        self._functional_gradient = functional_gradient
        self._is_square = noise_dim == output_dim
        self._block, self._solves_directly = block_inverse_mvp and not self._is_square, direct_jac_inverse
        self._solve_iters = inverse_mvp_solve_iters
        self._lambda: nn.Parameter | None = None
        if functional_gradient and not self._is_square:
            self._lambda = nn.Parameter(torch.tensor(float(init_lambda)), requires_grad=lambda_trainable)
            if lambda_trainable and lambda_optimizer is not None:
                self.add_optimizer(lambda_optimizer, [self._lambda])
        self._inverse_mvp: InverseMVPAlgorithm | None = None
        if functional_gradient and not direct_jac_inverse:
            size = noise_dim if self._block else output_dim
            self._inverse_mvp = InverseMVPAlgorithm(noise_dim, size, inverse_mvp_hidden_size, inverse_mvp_hidden_layers,
                                                    optimizer=inverse_mvp_optimizer)

    @property
    def noise_dim(self) -> int:
        """Size K of the noise."""
        return self._noise_dim

    # Sampling --------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: NestedTensor = None, noise: Tensor | None = None,  # type: ignore[override]
                     batch_size: int | None = None, training: bool = False, state: Any = None) -> AlgStep:
        """Generate outputs.

        Args:
            inputs: nest ``[B, ...]``; ``None`` for a generator without inputs.
            noise: ``[B, K]``, or ``[B, D]`` for GPVI with K < D; ``None``: sampled.
            batch_size: B, if neither ``inputs`` nor ``noise`` determines it.
            training: use the network itself instead of its moving average.
            state: not used.

        Returns:
            ``output`` ``[B, D]``.

        Raises:
            ValueError: B is not known, or ``inputs`` are missing or not expected.
        """
        noise = self._noise(inputs, batch_size) if noise is None else noise
        average = None if training else self._average_net
        return AlgStep(output=self._outputs(noise, inputs, average), state=(), info=())

    def _noise(self, inputs: NestedTensor, batch_size: int | None) -> Tensor:
        if (inputs is not None) != self._has_inputs:
            raise ValueError(f'{self._name}: {"expected inputs" if self._has_inputs else "expected no inputs"}, found '
                             f'{"none" if inputs is None else "some"}; see input_tensor_spec')
        if inputs is not None:
            batch_size = nest.get_nest_batch_size(inputs)
        if batch_size is None:
            raise ValueError(f'{self._name}: set batch_size, because there are no inputs')
        size = self._noise_dim if self._lambda is None else self._output_dim
        return torch.randn(batch_size, size, device=self.device)

    def _outputs(self, noise: Tensor, inputs: NestedTensor, net: Network | None = None) -> Tensor:
        """Compute outputs ``[B, D]``."""
        net = self._net if net is None else net
        if self._lambda is None:
            return net([noise, inputs] if self._has_inputs else noise)[0]
        return net(noise[:, :self._noise_dim])[0] + self._lambda * noise

    # Training --------------------------------------------------------------------------------------------------

    def train_step(self, inputs: NestedTensor, loss_func: Callable,  # type: ignore[override]
                   batch_size: int | None = None, transform_func: Callable | None = None,
                   entropy_regularization: float | None = None, state: Any = None) -> AlgStep:
        """Compute one training step of the generator.

        Args:
            inputs: nest ``[B, ...]``, or ``None``.
            loss_func: called with the outputs ``[B, D]`` (``[outputs, inputs]`` with inputs), or with the first result
                of ``transform_func``; returns the loss ``[B]``, or a tuple with a field ``loss``.
            batch_size: B, if there are no inputs.
            transform_func: if given, maps outputs to the particles, see
                :meth:`~alfx.algorithms.particle_vi_algorithm.ParVIAlgorithm.train_step`; for 'svgd2', 'svgd3' and
                'gfsf'. Called with outputs, or with ``(outputs, extra_samples)``; returns ``(outputs, extra_outputs,
                extra_samples)``. In distributed training each process has separate columns of the outputs.
            entropy_regularization: replaces the constructor's value.
            state: not used.

        Returns:
            ``output`` ``[B, D]``; ``info``: a ``LossInfo`` whose ``loss`` ``[B]`` moves the outputs, with a
            ``GeneratorLossInfo`` in ``extra``.

        Raises:
            ValueError: ``transform_func`` is given with another method.
        """
        if entropy_regularization and self._par_vi is None and not self._functional_gradient:
            raise ValueError(f'{self._name}: entropy_regularization has no effect with par_vi=None')
        weight = self._entropy_regularization if entropy_regularization is None else entropy_regularization
        if transform_func is not None and (self._par_vi not in ('svgd2', 'svgd3', 'gfsf') or self._functional_gradient):
            raise ValueError(f'{self._name}: transform_func requires par_vi svgd2, svgd3 or gfsf, found '
                             f'{"functional_gradient=True" if self._functional_gradient else self._par_vi}')
        noise = self._noise(inputs, batch_size)
        outputs = self._outputs(noise, inputs)

        def loss_of(points: Tensor) -> Tensor:
            return losses_of(loss_func([points, inputs] if self._has_inputs else points), self._name, len(points))[0]

        extra = GeneratorLossInfo()
        if weight == 0 or (self._par_vi is None and not self._functional_gradient):
            points = outputs if transform_func is None else transform_func(outputs)[0]
            moving = loss = loss_of(points)
        elif self._functional_gradient:
            direction, loss, inverse_loss = self._functional_direction(noise, loss_of, weight)
            moving = moving_loss(direction, outputs)
            extra = extra._replace(inverse_mvp=inverse_loss)
        else:
            moving, loss = self._moving_loss(outputs, inputs, loss_of, transform_func, weight)
        mutual_information: Any = ()
        if self._mi_estimator is not None:
            mi_step = self._mi_estimator.train_step(([noise, inputs] if self._has_inputs else noise, outputs))
            mutual_information = self._mi_weight * mi_step.info.loss.mean()
            extra = extra._replace(mi_estimator=mi_step.info.loss.detach())
        extra = extra._replace(generator=loss.detach())
        return AlgStep(output=outputs, state=(),
                       info=LossInfo(loss=moving, scalar_loss=mutual_information, extra=extra))

    def after_update(self, training_info: NestedTensor, info: NestedTensor = ()) -> None:
        """Update the moving average of the network."""
        if self._update_average is not None:
            self._update_average()

    def _bandwidth(self, distances: Tensor, same: bool) -> Tensor:
        bandwidth = particle_vi.median_bandwidth(distances, same)
        if self._bandwidth_averager is None:
            return bandwidth
        return self._bandwidth_averager.average(bandwidth.float()).double()

    def _moving_loss(self, outputs: Tensor, inputs: NestedTensor, loss_of: Callable[[Tensor], Tensor],
                     transform_func: Callable | None, weight: float) -> tuple[Tensor, Tensor]:
        """Return the loss that moves the outputs as ``par_vi`` prescribes, and the loss of the outputs."""
        if self._par_vi == 'minmax':
            return self._minmax(outputs, inputs, loss_of, weight)
        if self._par_vi == 'gfsf':
            points, density, _ = _transformed(transform_func, outputs)
            loss = loss_of(points)
            fixed = density.detach()
            distances = _whole_distances(fixed, fixed, transform_func)
            bandwidth = self._bandwidth(distances, same=True)
            kernels = particle_vi.kernel(distances, bandwidth)
            repulsion = particle_vi.smoothed_repulsion(fixed, kernels, bandwidth, RIDGE)
            return moving_loss(_padded(score_of(loss, points), density) + weight * repulsion, density), loss
        if self._par_vi == 'svgd':
            others = self._outputs(self._noise(inputs, len(outputs)), inputs).detach().requires_grad_()
            loss = loss_of(others)
            distances = (outputs.detach() - others.detach()).double().square().sum(-1)
            bandwidth = self._bandwidth(distances, same=False)
            direction = particle_vi.paired_svgd_direction(outputs.detach(), others.detach(), score_of(loss, others),
                                                          particle_vi.kernel(distances, bandwidth), bandwidth, weight)
            return moving_loss(direction, outputs), loss
        if self._par_vi == 'svgd2':
            half = len(outputs) // 2
            moved, others = outputs[half:], outputs[:half].detach()
        else:
            moved, others = outputs, self._outputs(self._noise(inputs, len(outputs)), inputs).detach()
        _, density, extra_samples = _transformed(transform_func, moved)
        if transform_func is None:
            others = other_density = others.requires_grad_()
        else:
            with torch.no_grad():
                others, other_density, _ = transform_func((others, extra_samples))
            others.requires_grad_()
            other_density = torch.cat([others, other_density], dim=-1)
        loss = loss_of(others)
        fixed, other_fixed = density.detach(), other_density.detach()
        distances = _whole_distances(fixed, other_fixed, transform_func)
        bandwidth = self._bandwidth(distances, same=False)
        direction = particle_vi.svgd_direction(fixed, other_fixed, _padded(score_of(loss, others), density),
                                               particle_vi.kernel(distances, bandwidth), bandwidth, weight)
        return moving_loss(direction, density), loss

    def _minmax(self, outputs: Tensor, inputs: NestedTensor, loss_of: Callable[[Tensor], Tensor], weight: float
                ) -> tuple[Tensor, Tensor]:
        assert self._critic is not None
        loss = loss_of(outputs)
        points, score = outputs.detach(), score_of(loss, outputs)
        for _ in range(self._critic_iter_num):
            if self._minmax_resample:
                with torch.no_grad():
                    points = self._outputs(self._noise(inputs, len(outputs)), inputs)
                points.requires_grad_()
                score = score_of(loss_of(points), points)
            self._critic.improve(points.detach(), score, weight, self._critic_l2_weight)
        with torch.no_grad():
            direction = self._critic.predict_step(outputs.detach()).output
        return moving_loss(direction, outputs), loss

    # GPVI ------------------------------------------------------------------------------------------------------

    def _functional_direction(self, noise: Tensor, loss_of: Callable[[Tensor], Tensor], weight: float
                              ) -> tuple[Tensor, Tensor, Tensor | tuple[()]]:
        """Return the direction that moves the outputs of ``noise``, the loss of other outputs, and the loss of the
        inverse products."""
        others = self._noise(None, len(noise))
        with torch.no_grad():
            points = self._outputs(others, None)
        points.requires_grad_()
        loss = loss_of(points)
        score = score_of(loss, points)
        distances = particle_vi.squared_distances(noise, others)
        bandwidth = self._bandwidth(distances, same=False)
        kernels = particle_vi.kernel(distances, bandwidth).to(noise.dtype)
        inverse_loss: Any = ()
        if self._inverse_mvp is not None:
            for _ in range(self._solve_iters):
                inverse_loss = self._train_inverse(noise, bandwidth.to(noise.dtype))
        direction = kernels @ score
        rows = max(1, _ROWS_AT_ONCE // (len(noise) * self._output_dim))
        for z, k in zip(others.split(rows), kernels.split(rows, dim=1)):
            # gradient of the kernel by the second argument, for each z and each row of noise: [m, N, D]
            vec = (noise - z.unsqueeze(1)) * k.t().unsqueeze(2) * (2 / bandwidth).to(noise.dtype)
            direction = direction + weight * self._inverse_products(z, vec).sum(0)
        return direction / len(others), loss, inverse_loss

    def _inverse_products(self, z: Tensor, vec: Tensor) -> Tensor:
        """Compute ``J(z)^-T vec``, ``[m, N, D]``."""
        link = None if self._lambda is None else self._lambda.detach()
        if self._solves_directly:
            head = z[:, :self._noise_dim].detach().requires_grad_()
            return solve_direct(jacobian(self._net(head)[0], head), vec, link, self._block)
        assert self._inverse_mvp is not None
        with torch.no_grad():
            if not self._block:
                return self._inverse_mvp.predict_step((z, vec)).output[0]
        vec, rest = self._reduced(z, vec.flatten(0, 1), vec.shape[1])
        with torch.no_grad():
            first = self._inverse_mvp.predict_step((z, vec.unflatten(0, (len(z), -1)))).output[0]
            return torch.cat([first, rest.unflatten(0, (len(z), -1))], dim=-1)

    def _reduced(self, z: Tensor, vec: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
        """Compute ``v_1 - G_2^T v_2 / c`` and ``y_2 = v_2 / c`` of ``vec [m * repeats, D]``."""
        assert self._lambda is not None
        rest = vec[:, self._noise_dim:] / self._lambda.detach()
        head = z[:, :self._noise_dim].repeat_interleave(repeats, 0).detach().requires_grad_()
        padded = torch.cat([torch.zeros_like(vec[:, :self._noise_dim]), rest], dim=-1)
        product = transposed_product(self._net(head)[0], head, padded).detach()
        return vec[:, :self._noise_dim] - product, rest

    def _train_inverse(self, noise: Tensor, bandwidth: Tensor) -> Tensor:
        """Update the network of inverse products once, with each row of noise paired with new noise."""
        assert self._inverse_mvp is not None
        z = torch.randn_like(noise)
        difference = noise - z
        vec = 2 / bandwidth * difference * torch.exp(-difference.square().sum(-1, keepdim=True) / bandwidth)
        if self._block:
            vec, _ = self._reduced(z, vec, 1)
        head = z[:, :self._noise_dim].detach().requires_grad_()
        y = self._inverse_mvp.predict_step((z, vec)).output[0]
        cotangent = y
        if self._block:
            cotangent = torch.cat([y, y.new_zeros(len(y), self._output_dim - self._noise_dim)], dim=-1)
        product = transposed_product(self._net(head)[0], head, cotangent)
        if self._lambda is not None:
            if not self._block:
                product = torch.cat([product, y.new_zeros(len(y), self._output_dim - self._noise_dim)], dim=-1)
            product = product + self._lambda.detach() * y
        loss_info, _ = self._inverse_mvp.update_with_gradient(LossInfo(loss=(product - vec).square().sum(-1)))
        return loss_info.loss.detach()


def _transformed(transform_func: Callable | None, outputs: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Return the points of the loss, the points of the kernel, and the extra samples."""
    if transform_func is None:
        return outputs, outputs, None
    points, extra, samples = transform_func(outputs)
    return points, torch.cat([points, extra], dim=-1), samples


def _whole_distances(x: Tensor, y: Tensor, transform_func: Callable | None) -> Tensor:
    """Compute squared distances ``[N, M]``, summed over the columns of all processes if each has its own."""
    distances = particle_vi.squared_distances(x, y)
    return distances if transform_func is None else context.sum_over_ranks(distances)


def _padded(score: Tensor, like: Tensor) -> Tensor:
    """Pad the score with zeros in the columns that the loss does not cover."""
    missing = like.shape[1] - score.shape[1]
    return torch.cat([score, score.new_zeros(len(score), missing)], dim=-1) if missing else score


def _check_combination(owner: str, par_vi: str | None, functional_gradient: bool, entropy_regularization: float,
                       input_tensor_spec: NestedTensorSpec, output_dim: int, noise_dim: int, direct: bool,
                       inverse_mvp_optimizer: Any, lambda_trainable: bool) -> None:
    def refuse(name: str, message: str, hint: str) -> None:
        raise ConfError([problem_at(owner, name, message, hint)])

    if par_vi is None and not functional_gradient and entropy_regularization > 0:
        refuse('entropy_regularization', f'= {entropy_regularization} has no effect with par_vi=None',
               'choose a par_vi, or set it to 0')
    if input_tensor_spec is not None and par_vi not in ('svgd', None):
        refuse('par_vi', f'= {par_vi!r} compares outputs of different inputs', "choose 'svgd' with inputs")
    if lambda_trainable and not functional_gradient:
        refuse('lambda_trainable', '= True has an effect only with functional_gradient=True', 'remove it')
    if not functional_gradient:
        return
    if par_vi not in ('svgd3', None):
        refuse('par_vi', f'= {par_vi!r} and functional_gradient=True cannot be used together', 'remove one of the two')
    if input_tensor_spec is not None:
        refuse('functional_gradient', '= True is not possible with inputs', "choose par_vi='svgd'")
    if noise_dim > output_dim:
        refuse('noise_dim', f'= {noise_dim} is larger than output_dim = {output_dim}: the Jacobian has no inverse',
               'make it smaller')
    if not direct and inverse_mvp_optimizer is None:
        refuse('inverse_mvp_optimizer', 'is required to train the network of inverse products',
               'set it, or direct_jac_inverse=True')
