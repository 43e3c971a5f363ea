"""Directions of particles against slow loops and closed forms; Jacobians against autograd."""
import math
import subprocess
import sys

import pytest
import torch

from alfx.algorithms.functional_particle_vi_algorithm import FuncParVIAlgorithm
from alfx.algorithms.generator import Generator
from alfx.algorithms.hypernetwork_algorithm import HyperNetwork
from alfx.algorithms.particle_vi_algorithm import ParVIAlgorithm
from alfx.algorithms.particles import particle_vi
from alfx.algorithms.particles.critic import CriticAlgorithm
from alfx.algorithms.particles.inverse_mvp import jacobian, solve_direct, transposed_product
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.relu_mlp import ReluMLP, SimpleFC
from alfx.optimizers import Adam
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity

N, M, D = 5, 7, 3


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def slow_kernel(x, y, h):
    """Return ``k`` and its gradient with respect to the first argument."""
    x = x.clone().requires_grad_()
    value = torch.exp(-(x - y).square().sum() / h)
    return float(value.detach()), torch.autograd.grad(value, x)[0]


def slow_svgd(x, y, score, h, weight):
    rows = []
    for xi in x:
        total = torch.zeros(D, dtype=torch.float64)
        for yj, sj in zip(y, score):
            value, gradient = slow_kernel(yj, xi, h)
            total += value * sj + weight * gradient
        rows.append(total / len(y))
    return torch.stack(rows)


@pytest.mark.parametrize('weight', [0.0, 0.3, 1.0])
def test_svgd_is_the_double_loop_of_its_formula(weight):
    x, y, score, h = doubles(N, D), doubles(M, D), doubles(M, D), torch.tensor(1.7, dtype=torch.float64)
    kernels = particle_vi.kernel(particle_vi.squared_distances(x, y), h)
    direction = particle_vi.svgd_direction(x, y, score, kernels, h, weight)
    torch.testing.assert_close(direction, slow_svgd(x, y, score, 1.7, weight), rtol=1e-9, atol=1e-12)


def test_paired_svgd_is_svgd_with_one_particle_at_a_time():
    x, y, score, h = doubles(N, D), doubles(N, D), doubles(N, D), torch.tensor(0.9, dtype=torch.float64)
    kernels = particle_vi.kernel((x - y).square().sum(-1), h)
    expected = torch.cat([slow_svgd(x[i:i + 1], y[i:i + 1], score[i:i + 1], 0.9, 0.5) for i in range(N)])
    torch.testing.assert_close(particle_vi.paired_svgd_direction(x, y, score, kernels, h, 0.5), expected)


def test_gfsf_inverts_the_kernel_matrix_on_the_sum_of_its_gradients():
    x, h = doubles(N, D), torch.tensor(1.3, dtype=torch.float64)
    pairs = [[slow_kernel(xj, xi, 1.3) for xj in x] for xi in x]
    matrix = torch.tensor([[value for value, _ in row] for row in pairs], dtype=torch.float64)
    sums = torch.stack([sum(gradient for _, gradient in row) for row in pairs])
    expected = torch.linalg.inv(matrix + 1e-2 * torch.eye(N)) @ sums
    kernels = particle_vi.kernel(particle_vi.squared_distances(x, x), h)
    torch.testing.assert_close(particle_vi.smoothed_repulsion(x, kernels, h, 1e-2), expected, rtol=1e-8, atol=1e-10)


def test_two_particles_by_hand():
    # x = 0, 2: distance 4, h = 4 / log 2, k = exp(-log 2) = 1/2. Score 1 and 3: attraction (1 + 3/2) / 2 and
    # (1/2 + 3) / 2; repulsion of the first: 2/h (0 - 2) k / 2 = -log(2) / 4, of the second its opposite.
    x, score = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])
    distances = particle_vi.squared_distances(x, x)
    h = particle_vi.median_bandwidth(distances, same=True)
    assert float(h) == pytest.approx(4 / math.log(2))
    direction = particle_vi.svgd_direction(x, x, score, particle_vi.kernel(distances, h), h, 1.0)
    expected = torch.tensor([[1.25 - math.log(2) / 4], [1.75 + math.log(2) / 4]])
    torch.testing.assert_close(direction, expected)


def test_the_bandwidth_is_the_median_squared_distance_over_log_n():
    x = torch.tensor([[0.0], [1.0], [3.0]])  # 1, 4, 9
    assert float(particle_vi.median_bandwidth(particle_vi.squared_distances(x, x), same=True)) == pytest.approx(
        4 / math.log(3))
    pairs = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
    assert float(particle_vi.median_bandwidth(pairs, same=False)) == pytest.approx(2 / math.log(3))
    for collapsed in (torch.zeros(1, 2), torch.zeros(4, 2)):
        distances = particle_vi.squared_distances(collapsed, collapsed)
        assert float(particle_vi.median_bandwidth(distances, same=True)) == 1.0


def test_distances_of_close_particles_far_from_the_origin_are_not_lost():
    x = torch.randn(6, 200_000) * 1e-3 + 100.0
    expected = torch.stack([(x.double() - row.double()).square().sum(1) for row in x])
    torch.testing.assert_close(particle_vi.squared_distances(x, x), expected, rtol=1e-8, atol=1e-8)
    assert float(particle_vi.mean_pairwise_distance(x)) == pytest.approx(
        float(expected.sqrt().sum() / 30), rel=1e-6)


def test_one_particle_descends_the_gradient():
    for par_vi in ('svgd', 'gfsf', None):
        algorithm = ParVIAlgorithm(D, num_particles=1, par_vi=par_vi)
        info = algorithm.train_step(lambda x: x.pow(3).sum(-1)).info
        info.loss.sum().backward()
        torch.testing.assert_close(algorithm.particles.grad, 3 * algorithm.particles.detach().square())


@pytest.mark.parametrize('par_vi', ['svgd', 'gfsf'])
def test_the_loss_of_particles_has_minus_the_direction_as_its_gradient(par_vi):
    algorithm = ParVIAlgorithm(D, num_particles=N, par_vi=par_vi, entropy_regularization=0.7)
    x = algorithm.particles.detach()
    algorithm.train_step(lambda x: 0.5 * x.square().sum(-1)).info.loss.sum().backward()
    distances = particle_vi.squared_distances(x, x)
    h = particle_vi.median_bandwidth(distances, same=True)
    kernels = particle_vi.kernel(distances, h)
    if par_vi == 'svgd':
        expected = slow_svgd(x.double(), x.double(), -x.double(), float(h), 0.7).float()
    else:
        expected = -x + 0.7 * particle_vi.smoothed_repulsion(x, kernels, h, 1e-3)
    torch.testing.assert_close(-algorithm.particles.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('par_vi', ['svgd', 'gfsf'])
def test_the_order_of_particles_does_not_matter(par_vi):
    algorithm, order = ParVIAlgorithm(D, num_particles=N, par_vi=par_vi), torch.randperm(N)
    moves = []
    for index in (torch.arange(N), order):
        algorithm.particles.grad = None
        start = algorithm.particles.detach().clone()
        with torch.no_grad():
            algorithm.particles.copy_(start[index])
        algorithm.train_step(lambda x: x.pow(4).sum(-1)).info.loss.sum().backward()
        moves.append(algorithm.particles.grad.clone())
        with torch.no_grad():
            algorithm.particles.copy_(start)
    torch.testing.assert_close(moves[1], moves[0][order], rtol=1e-4, atol=1e-5)


def test_function_space_steps_are_output_directions_times_the_jacobian():
    algorithm = FuncParVIAlgorithm(input_tensor_spec=TensorSpec((2, )), output_dim=2, fc_layer_params=(4, ),
                                   activation=torch.tanh, num_particles=3, function_vi=True, loss_type='regression',
                                   function_extra_bs_ratio=0.5)
    inputs, targets = torch.randn(4, 2), torch.randn(4, 2)
    torch.manual_seed(1)
    algorithm.train_step((inputs, targets), entropy_regularization=0.5).info.loss.sum().backward()
    torch.manual_seed(1)
    all_inputs = torch.cat([inputs, algorithm._function_space.extra_inputs(inputs)])
    assert len(all_inputs) == 6
    theta = algorithm.particles.detach()
    rows = algorithm.predict_step(all_inputs).output.detach().transpose(0, 1).flatten(1)
    score = torch.cat([(targets.flatten() - rows[:, :8]), torch.zeros(3, 4)], dim=1)
    distances = particle_vi.squared_distances(rows, rows)
    h = particle_vi.median_bandwidth(distances, same=True)
    direction = particle_vi.svgd_direction(rows, rows, score, particle_vi.kernel(distances, h), h, 0.5)
    for i in range(3):
        single = algorithm.param_net.single_network(theta[i])
        (direction[i] * single(all_inputs)[0].flatten()).sum().backward()
        expected = torch.cat([p.grad.flatten() for p in single.parameters()])
        torch.testing.assert_close(-algorithm.particles.grad[i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('relu_mlp', [True, False])
def test_the_critic_of_a_normal_distribution_finds_its_closed_form(relu_mlp):
    """q is standard normal, p normal with mean 1: ``f = (s - grad log q) / 2c = ((1 - x) + x) / 2c = 1 / 2c``."""
    critic = CriticAlgorithm(TensorSpec((2, )), hidden_layers=(32, ), use_bn=False, use_relu_mlp=relu_mlp,
                             optimizer=Adam(lr=1e-2))
    critic.finalize()
    for step in range(400):
        points = torch.randn(256, 2)
        if step == 300:
            critic.optimizers()[0].param_groups[0]['lr'] = 1e-3
        critic.improve(points, 1 - points, 1.0, 2.0)
    directions = critic.predict_step(torch.randn(1000, 2)).output
    assert float((directions - 0.25).abs().mean()) < 0.05


def test_a_generator_without_hidden_layers_is_linear():
    hyper = HyperNetwork(input_tensor_spec=TensorSpec((3, )), output_dim=1, hidden_layers=None, noise_dim=4,
                         loss_type='regression')
    assert len(list(hyper._generator.parameters())) == 2
    assert len(list(Generator(5, noise_dim=4, hidden_layers=None).parameters())) == 2


def test_the_stein_loss_of_a_linear_critic_by_hand():
    # f(x) = A x: trace of A; E[s^T A x] + a tr A - c |A x|^2
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    points, score = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 1.0]])
    net = EncodingNetwork(TensorSpec((2, )), last_layer_size=2, last_activation=identity)
    with torch.no_grad():
        net._chain[-1].weight.copy_(matrix)
    critic = CriticAlgorithm(TensorSpec((2, )), net=net)
    losses = torch.stack([critic.stein_loss(points, score, 0.5, 0.1) for _ in range(4000)])
    # f = (1, 3): 0.1 * 10 - (2 + 3 + 0.5 * 5); the trace is estimated
    assert float(losses.mean()) == pytest.approx(1 - 7.5, abs=0.3)


@pytest.mark.parametrize('hidden_layers', [(8, 5), (8, ), (), None])
def test_a_relu_mlp_knows_its_jacobian(hidden_layers):
    net, inputs = ReluMLP(TensorSpec((3, ), torch.float64), hidden_layers=hidden_layers).double(), doubles(4, 3)
    expected = torch.stack([torch.autograd.functional.jacobian(lambda x: net(x[None])[0][0], x) for x in inputs])
    vec, direction = doubles(4, 3), doubles(4, 3)
    torch.testing.assert_close(net.compute_jac(inputs), expected)
    torch.testing.assert_close(net.compute_jac_diag(inputs), expected.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(net.compute_vjp(inputs, vec), torch.einsum('boi,bo->bi', expected, vec))
    torch.testing.assert_close(net.compute_vjp(inputs, vec[:, :2], output_partial_idx=[2, 0]),
                               torch.einsum('boi,bo->bi', expected[:, [2, 0]], vec[:, :2]))
    with pytest.raises(ValueError, match='a vector for each of 2 outputs, found .4, 3.'):
        net.compute_vjp(inputs, vec, output_partial_idx=[2, 0])
    torch.testing.assert_close(net.compute_jvp(inputs, direction), torch.einsum('boi,bi->bo', expected, direction))
    (output, jac), _ = net.forward(inputs, requires_jac=True)
    torch.testing.assert_close((output, jac), (net(inputs)[0], expected))
    (_, diagonal), _ = net.forward(inputs, requires_jac_diag=True)
    torch.testing.assert_close(diagonal, expected.diagonal(dim1=1, dim2=2))
    with pytest.raises(ValueError, match='has no diagonal'):
        ReluMLP(TensorSpec((3, )), 2).compute_jac_diag(torch.randn(4, 3))
    layer = SimpleFC(3, 2, torch.relu)
    assert layer.hidden_neurons is None and torch.equal(layer(torch.ones(1, 3)), layer.hidden_neurons)


def test_block_form_inverse_products_match_the_whole_jacobian():
    net = EncodingNetwork(TensorSpec((2, )), fc_layer_params=(8, ), activation=torch.tanh, last_layer_size=5,
                          last_activation=identity)
    z, link = torch.randn(4, 2, requires_grad=True), 0.7
    jac, vec = jacobian(net(z)[0], z), torch.randn(4, 6, 5)
    full_jacobian = torch.cat([jac, torch.zeros(4, 5, 3)], dim=2) + link * torch.eye(5)
    expected = torch.stack([torch.linalg.inv(j.T) @ v.T for j, v in zip(full_jacobian.double(), vec.double())])
    expected = expected.transpose(1, 2).float()
    for block in (True, False):
        torch.testing.assert_close(solve_direct(jac, vec, link, block), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(transposed_product(net(z)[0], z, vec[:, 0]), torch.einsum('bdk,bd->bk', jac, vec[:, 0]))


_MEMORY_OF_A_STEP = r"""
import pathlib, re, sys, torch
from alfx.algorithms.particle_vi_algorithm import ParVIAlgorithm
from alfx.optimizers import Adam

def stepped(num_particles):
    algorithm = ParVIAlgorithm(61_706, num_particles=num_particles, par_vi=sys.argv[1], optimizer=Adam(lr=1e-3))
    algorithm.set_path('')
    algorithm.finalize()
    for _ in range(2):
        algorithm.update_with_gradient(algorithm.train_step(lambda x: x.square().sum(-1)).info)
    return int(re.search(r'VmHWM:\s+(\d+)', pathlib.Path('/proc/self/status').read_text())[1])  # kB, at most so far

torch.set_num_threads(1)
before = stepped(2)
print((stepped(100) - before) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='it reads /proc')
@pytest.mark.parametrize('par_vi', ['svgd', 'gfsf'])
def test_a_hundred_lenet_sized_particles_step_within_300_megabytes(par_vi):
    """Adam and the loss included; [N, N, D] would be 2.5 GB."""
    command = [sys.executable, '-c', _MEMORY_OF_A_STEP, par_vi]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.1 < float(found.stdout) < 0.3
