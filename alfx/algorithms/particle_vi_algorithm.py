r"""Particle-based variational inference: particles that become samples of a distribution.

The distribution is given by a loss, its negative log density up to a constant. N particles are moved so that their
distribution minimizes ``E[loss] - a H``, with ``a = entropy_regularization`` and H the entropy. With ``a = 1`` they
become samples of the distribution itself. With the score ``s = -grad loss`` a particle moves along

    svgd    1/N sum_j [k(x_j, x_i) s(x_j) + a grad_{x_j} k(x_j, x_i)]          (Liu, Wang 2016, arXiv:1608.04471)
    gfsf    s(x_i) - a (estimate of grad log q, the density of the particles)  (Liu et al. 2019, arXiv:1807.01750)
    minmax  output of a critic network                                         (Hu et al. 2018, arXiv:1810.03545)
    None    s(x_i): independent particles, as in an ensemble

The formulas are in :mod:`alfx.algorithms.particles.particle_vi` and :mod:`alfx.algorithms.particles.critic`. The
gradient of the loss is the negative of this direction, so that any optimizer can be used. Read next:
:mod:`alfx.algorithms.functional_particle_vi_algorithm`, where particles are networks.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.particles import particle_vi
from alfx.algorithms.particles.critic import CriticAlgorithm
from alfx.data_structures import AlgStep, LossInfo
from alfx.gin_utils import ConfError, Count, NonNegative, check_value, configurable, problem_at
from alfx.tensor_specs import TensorSpec

RIDGE = 1e-3
"""Constant that 'gfsf' adds to the unit diagonal of the kernel matrix, which close particles would make singular."""

LossFunction = Callable[[Any], Any]


def losses_of(result: Any, where: str, num: int) -> tuple[Tensor, Any]:
    """Return the loss ``[num]`` of the result of a loss function, and its ``extra``.

    Raises:
        ValueError: the result is not a tensor ``[num]`` and has no field ``loss`` of this shape.
    """
    loss = result if isinstance(result, Tensor) else getattr(result, 'loss', None)
    if not isinstance(loss, Tensor) or loss.shape != (num, ):
        found = list(loss.shape) if isinstance(loss, Tensor) else type(result).__name__
        raise ValueError(f'{where}: expected loss_func to return a loss [{num}], or a tuple with a field loss [{num}], '
                         f'found {found}')
    return loss, () if isinstance(result, Tensor) else getattr(result, 'extra', ())


def score_of(loss: Tensor, outputs: Tensor) -> Tensor:
    """Return ``-d loss / d outputs``, for losses that depend only on their own row of ``outputs``."""
    return -torch.autograd.grad(loss.sum(), outputs, retain_graph=True)[0]


def moving_loss(direction: Tensor, outputs: Tensor) -> Tensor:
    """Return a loss ``[N]`` whose gradient with respect to ``outputs`` is ``-direction``; both are ``[N, D]``."""
    return -(direction.detach() * outputs).sum(-1)


@configurable
class ParVIAlgorithm(Algorithm):
    """Set of particles that approximates a distribution; see the module docstring.

    Args:
        particle_dim: D, size of a particle.
        num_particles: N, number of particles.
        entropy_regularization: ``a``, weight of the repulsion between particles.
        par_vi: 'svgd', 'gfsf', 'minmax' or ``None``.
        critic_input_dim: number of inputs of the critic; ``None``: ``particle_dim``. The critic arguments are used only
            by 'minmax'.
        critic_hidden_layers: sizes of the critic's hidden layers. Wide layers overfit a small number of particles and
            push them too far apart; ``()`` fits a normal distribution exactly.
        critic_l2_weight: weight of the squared length of the critic's outputs.
        critic_iter_num: updates of the critic in each training step.
        critic_use_bn: use batch norm in the critic.
        critic_optimizer: optimizes the critic; required by 'minmax'.
        optimizer: moves the particles.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ConfError: an unknown method, 'minmax' without ``critic_optimizer``, or a number that is not a positive int.
    """

    updates_are_traceable = False

    def __init__(self, particle_dim: Count, num_particles: Count = 10, entropy_regularization: NonNegative = 1.0,
                 par_vi: str | None = 'gfsf', critic_input_dim: Count | None = None,
                 critic_hidden_layers: Sequence[Count] = (100, 100), critic_l2_weight: NonNegative = 10.0,
                 critic_iter_num: Count = 2, critic_use_bn: bool = True, critic_optimizer: Any = None,
                 optimizer: Any = None, debug_summaries: bool = False, name: str = 'ParVIAlgorithm'):
        owner = type(self).__name__
        check_method(owner, par_vi, ('svgd', 'gfsf', 'minmax', None), critic_optimizer)
        super().__init__(optimizer=optimizer, debug_summaries=debug_summaries, name=name)
        self._entropy_regularization: Any = entropy_regularization
        self._par_vi = par_vi
        self._particles = nn.Parameter(torch.randn(num_particles, particle_dim))
        self._critic: CriticAlgorithm | None = None
        self._critic_iter_num, self._critic_l2_weight = critic_iter_num, critic_l2_weight
        if par_vi == 'minmax':
            self._critic = CriticAlgorithm(
                TensorSpec((particle_dim if critic_input_dim is None else critic_input_dim, )),
                hidden_layers=critic_hidden_layers, use_bn=critic_use_bn, optimizer=critic_optimizer)

    @property
    def num_particles(self) -> int:
        """Number of particles N."""
        return self._particles.shape[0]

    @property
    def particles(self) -> nn.Parameter:
        """Particles ``[N, D]``."""
        return self._particles

    def predict_step(self, state: Any = None) -> AlgStep:  # type: ignore[override]
        """Return the particles ``[N, D]`` as ``output``."""
        return AlgStep(output=self._particles, state=(), info=())

    def train_step(self, loss_func: LossFunction, transform_func: Callable | None = None,  # type: ignore[override]
                   entropy_regularization: float | None = None, loss_mask: Tensor | None = None, state: Any = None
                   ) -> AlgStep:
        """Compute one step of the particles.

        Args:
            loss_func: called with the particles ``[N, D]``, or with the first result of ``transform_func``; returns
                the loss ``[N]``, or a tuple with the field ``loss``.
            transform_func: maps the particles to ``(outputs [N, O], extra_outputs [N, E])``, for example the outputs of
                networks with these parameters. Attraction and repulsion are then computed between these outputs, and
                the gradient moves the particles; the loss is a function of ``outputs``. If several processes train
                together, each has different columns of both.
            entropy_regularization: replaces the argument of the constructor.
            loss_mask: ``[N]``, 0 for particles that must not move.
            state: not used.

        Returns:
            ``output``: the particles; ``info``: a ``LossInfo`` whose ``loss`` ``[N]`` has minus the direction as its
            gradient, with the loss of the particles in ``extra``.
        """
        weight = self._entropy_regularization if entropy_regularization is None else entropy_regularization
        outputs: Tensor = self._particles
        density = outputs
        if transform_func is not None:
            outputs, extra_outputs = transform_func(self._particles)
            density = torch.cat([outputs, extra_outputs], dim=-1)
        loss, more = losses_of(loss_func(outputs), self._name, self.num_particles)
        extra = {'neg_log_density': loss.detach(), **({} if more == () else {'more': more})}
        moving = loss
        if self._par_vi is not None:
            score = score_of(loss, outputs)
            if density is not outputs:  # the extra outputs have no loss, so they only repel
                score = torch.cat([score, density.new_zeros(len(score), density.shape[1] - score.shape[1])], dim=-1)
            direction, about = self._direction(density.detach(), score, weight, transform_func is not None)
            moving = moving_loss(direction, density)
            extra |= about
        if loss_mask is not None:
            moving = moving * loss_mask
        return AlgStep(output=self._particles, state=(), info=LossInfo(loss=moving, extra=extra))

    def _direction(self, points: Tensor, score: Tensor, weight: float, is_share: bool
                   ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the direction of ``points`` ``[N, D]``, and logged values; ``is_share``: ranks split the columns."""
        if self._critic is not None:
            for _ in range(self._critic_iter_num):
                critic_loss = self._critic.improve(points, score, weight, self._critic_l2_weight)
            with torch.no_grad():
                return self._critic.predict_step(points).output, {'critic_loss': critic_loss}
        distances = particle_vi.squared_distances(points, points)
        if is_share:
            distances = context.sum_over_ranks(distances)
        bandwidth = particle_vi.median_bandwidth(distances, same=True)
        kernels = particle_vi.kernel(distances, bandwidth)
        if self._par_vi == 'svgd':
            direction = particle_vi.svgd_direction(points, points, score, kernels, bandwidth, weight)
        else:
            direction = score + weight * particle_vi.smoothed_repulsion(points, kernels, bandwidth, RIDGE)
        return direction, {'kernel_bandwidth': bandwidth.float()}


def check_method(owner: str, par_vi: str | None, methods: tuple[str | None, ...], critic_optimizer: Any) -> None:
    """Raise ``ConfError`` for an unknown method, or a critic without optimizer."""
    check_value(owner, 'par_vi', par_vi, str, choices=[m for m in methods if m], optional=None in methods)
    if par_vi == 'minmax' and critic_optimizer is None:
        raise ConfError([problem_at(owner, 'par_vi', "= 'minmax' trains a critic, which needs an optimizer",
                                    f'set {owner}.critic_optimizer, such as @Adam(lr=1e-3)')])
