"""Truncated distributions against the plain ones, numerical integration in float64, and finite differences."""
import pytest
import torch
import torch.distributions as td

from alfx.utils import dist_utils as du


@pytest.mark.parametrize('cls,plain', [(du.TruncatedNormal, td.Normal), (du.TruncatedCauchy, td.Cauchy),
                                       (du.TruncatedT2, lambda loc, scale: td.StudentT(2.0, loc, scale))])
@pytest.mark.parametrize('loc', [-3.0, 0.2, 4.0])
def test_truncated_densities_are_renormalized(cls, plain, loc):
    loc, scale = torch.tensor(loc, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    points = torch.linspace(-1.0, 2.0, 200_001, dtype=torch.float64)
    dist = cls(loc.view(1), scale.view(1), -1.0, 2.0)
    density = dist.log_prob(points.unsqueeze(-1)).exp()
    assert torch.trapezoid(density, points).item() == pytest.approx(1.0, abs=1e-6)
    reference = plain(loc, scale).log_prob(points).exp()
    torch.testing.assert_close(density, reference / torch.trapezoid(reference, points), rtol=1e-6, atol=1e-9)
    sample = dist.sample((40_000, )).squeeze(-1)
    assert sample.min() >= -1.0 and sample.max() <= 2.0
    mean = torch.trapezoid(points * density, points)
    torch.testing.assert_close(sample.mean(), mean, atol=0.03, rtol=0)


def test_a_truncated_normal_far_outside_its_box_sits_at_the_nearest_end():
    dist = du.TruncatedNormal(torch.tensor([[-500.0, 500.0]]), torch.tensor([[0.1, 0.1]]), -1.0, 1.0)
    sample = dist.sample((100, ))
    assert torch.isfinite(sample).all()
    torch.testing.assert_close(sample[:, 0], torch.tensor([[-1.0, 1.0]]).expand(100, 2))
    torch.testing.assert_close(dist.mode, torch.tensor([[-1.0, 1.0]]))


@pytest.mark.parametrize('loc, scale', [(2.5, 0.3), (-3.0, 0.3), (7.0, 1.0), (-13.0, 1.0)])
def test_float32_samples_follow_the_density_in_a_tail(loc, scale):
    points = torch.linspace(-1.0, 1.0, 400_001, dtype=torch.float64)
    exact = du.TruncatedNormal(torch.tensor([loc]).double(), torch.tensor([scale]).double(), -1.0, 1.0)
    mean = torch.trapezoid(points * exact.log_prob(points.unsqueeze(-1)).exp(), points).float()
    torch.manual_seed(0)
    sample = du.TruncatedNormal(torch.tensor([loc]), torch.tensor([scale]), -1.0, 1.0).sample((100_000, ))
    torch.testing.assert_close(sample.mean(), mean, atol=2e-3, rtol=0)
    assert (sample.abs() == 1).float().mean() < 1e-3


def test_a_uniform_number_of_0_is_not_an_underflow(monkeypatch):
    monkeypatch.setattr(torch, 'rand', lambda shape, **kwargs: torch.zeros(shape, **kwargs))
    sample = du.TruncatedNormal(torch.zeros(1, 1), torch.full((1, 1), 0.01), -1.0, 1.0).sample()
    assert -0.06 < float(sample) < -0.05  # the least of 2**24 samples is 5.3 standard deviations below


def slow_truncated_log_prob(shape, x, loc, scale, low, high):
    """``shape(t) / integral of shape`` over the box, in float64, relative to its greatest value.

    The integral is over a grid that gets finer towards the end nearest to ``loc``.
    """
    x, loc, scale, low, high = (torch.tensor(v, dtype=torch.float64) for v in (x, loc, scale, low, high))
    near = torch.minimum(torch.maximum(loc, low), high)
    steps = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-9, 0, 400_001, dtype=torch.float64)])
    total = torch.zeros((), dtype=torch.float64)
    for end in (low, high):
        # log of the density relative to that at ``near``, from the distance to ``near``, which is exact
        values = shape((end - near) * steps / scale, (near - loc) / scale).exp()
        total += torch.trapezoid(values, (end - near).abs() * steps)
    return (shape((x - near) / scale, (near - loc) / scale) - total.log()).item()


SHAPES = {
    du.TruncatedNormal: lambda d, z: -d * (z + 0.5 * d),
    du.TruncatedCauchy: lambda d, z: -torch.log1p(d * (2 * z + d) / (1 + z * z)),
    du.TruncatedT2: lambda d, z: -1.5 * torch.log1p(d * (2 * z + d) / (2 + z * z)),
}


@pytest.mark.parametrize('cls', list(SHAPES))
@pytest.mark.parametrize('loc,scale', [(3.0, 1.0), (-6.0, 1.0), (20.0, 1.0), (-45.0, 1.0), (500.0, 0.1), (-5000.0, 1.0),
                                       (1000.0, 1000.0), (0.3, 1000.0), (0.9, 0.05), (-1.02, 0.2), (2.0, 300.0)])
@pytest.mark.parametrize('x', [-1.0, -0.6, 0.999, 1.0])
def test_truncated_densities_are_right_in_far_tails_and_in_narrow_boxes(cls, loc, scale, x):
    expected = slow_truncated_log_prob(SHAPES[cls], x, loc, scale, -1.0, 1.0)
    for dtype, tolerance in ((torch.float64, 2e-6), (torch.float32, 2e-4)):
        dist = cls(torch.tensor([loc], dtype=dtype), torch.tensor([scale], dtype=dtype), -1.0, 1.0)
        found = dist.log_prob(torch.tensor([x], dtype=dtype)).item()
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance), dtype


@pytest.mark.parametrize('cls', list(SHAPES))
@pytest.mark.parametrize('loc,scale', [(3.0, 1.0), (-45.0, 1.0), (500.0, 0.1), (1000.0, 1000.0), (0.3, 1e6)])
def test_gradients_of_truncated_densities_are_differences_of_them(cls, loc, scale):
    def log_prob(loc, scale):
        return cls(loc, scale, -1.0, 1.0).log_prob(torch.full((1, ), 0.7, dtype=loc.dtype))

    double = [torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (loc, scale)]
    assert torch.autograd.gradcheck(log_prob, double, eps=1e-4 * scale, atol=1e-7, rtol=1e-4)
    single = [x.detach().float().requires_grad_() for x in double]
    torch.testing.assert_close(torch.autograd.grad(log_prob(*single), single),
                               tuple(g.float() for g in torch.autograd.grad(log_prob(*double), double)),
                               rtol=2e-3, atol=5e-6)


@pytest.mark.parametrize('far', [1e30, float('inf')])
@pytest.mark.parametrize('cls', list(SHAPES))
def test_truncated_distributions_without_bounds_are_untruncated(cls, far):
    loc = torch.tensor([0.3], requires_grad=True)
    dist = cls(loc, torch.tensor([0.5]), -far, torch.tensor([far]))
    assert torch.autograd.grad(dist.rsample().sum(), loc)[0].isfinite().all()
    plain = {du.TruncatedNormal: td.Normal, du.TruncatedCauchy: td.Cauchy,
             du.TruncatedT2: lambda loc, scale: td.StudentT(2.0, loc, scale)}[cls](loc, 0.5)
    value = torch.tensor([2.0])
    torch.testing.assert_close(dist.log_prob(value), plain.log_prob(value).sum(-1))
    torch.testing.assert_close(torch.autograd.grad(dist.log_prob(value), loc),
                               torch.autograd.grad(plain.log_prob(value).sum(), loc))


def test_truncated_samples_move_with_their_parameters():
    loc, scale = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    dist = du.TruncatedNormal(loc, scale, torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5]))
    grads = torch.autograd.grad(dist.rsample((100, )).sum(), (loc, scale))
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)


def slow_kl(p, q, low, high):
    """Integrate ``p (log p - log q)`` over the box in float64, on a grid that is finer at the peak of p."""
    near, box = min(max(p[0], low), high), torch.tensor([low, high]).double()
    steps = torch.cat([torch.zeros(1).double(), torch.logspace(-9, 0, 400_001, dtype=torch.float64)])
    dist_p, dist_q = (du.TruncatedNormal(*torch.tensor(d).double().view(2, 1), low, high) for d in (p, q))
    total = 0.0
    for end in box:
        x = near + (end - near) * steps
        log_p, log_q = (d.log_prob(x.unsqueeze(-1)) for d in (dist_p, dist_q))
        total += torch.trapezoid(log_p.exp() * (log_p - log_q), (end - near).abs() * steps).item()
    return total


@pytest.mark.parametrize('p, q', [
    ((0.2, 0.7), (-0.5, 1.1)), ((0.0, 0.01), (0.3, 0.5)), ((4.0, 0.7), (-3.0, 0.4)), ((40.0, 1.0), (0.0, 1.0)),
    ((0.0, 300.0), (1.0, 200.0)), ((-30.0, 0.5), (-31.0, 0.5)), ((0.4, 0.3), (500.0, 20.0))])
def test_the_divergence_of_truncated_normals_is_the_integral(p, q):
    dists = [du.TruncatedNormal(*torch.tensor(d).double().view(2, 1), -1.0, 2.0) for d in (p, q)]
    expected = slow_kl(p, q, -1.0, 2.0)
    assert td.kl_divergence(*dists).item() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    single = [du.TruncatedNormal(*torch.tensor(d).view(2, 1), -1.0, 2.0) for d in (p, q)]
    assert td.kl_divergence(*single).item() == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_wide_boxes_have_the_plain_divergence_and_equal_ones_zero():
    """Divergence in a wide box equals that of plain normals; between equal distributions it is 0."""
    p, q = (td.Normal(torch.tensor(loc).double(), scale) for loc, scale in ((0.3, 0.2), (-0.1, 0.5)))
    truncated = [du.TruncatedNormal(d.loc.view(1), d.scale.double().view(1), -50.0, 50.0) for d in (p, q)]
    assert td.kl_divergence(*truncated).item() == pytest.approx(td.kl_divergence(p, q).item(), rel=1e-9)
    assert td.kl_divergence(truncated[0], truncated[0]).item() == 0


def test_the_divergence_adds_up_over_components_and_has_its_gradient():
    low, high = torch.tensor([-1.0, 0.0]).double(), torch.tensor([1.0, 3.0]).double()
    values = [torch.randn(4, 2).double() for _ in range(2)] + [torch.rand(4, 2).double() + 0.2 for _ in range(2)]
    values = [v.requires_grad_() for v in values]

    def divergence(loc_p, loc_q, scale_p, scale_q):
        return td.kl_divergence(du.TruncatedNormal(loc_p, scale_p, low, high),
                                du.TruncatedNormal(loc_q, scale_q, low, high))

    assert divergence(*values).shape == (4, )
    first = td.kl_divergence(*(du.TruncatedNormal(values[i][:, :1], values[i + 2][:, :1], -1.0, 1.0) for i in (0, 1)))
    second = td.kl_divergence(*(du.TruncatedNormal(values[i][:, 1:], values[i + 2][:, 1:], 0.0, 3.0) for i in (0, 1)))
    torch.testing.assert_close(divergence(*values), first + second)
    assert torch.autograd.gradcheck(divergence, values)


def test_divergence_is_infinite_for_unreachable_values():
    """Divergence is infinite if the other distribution excludes some values and undefined for other shapes."""
    loc, scale = torch.zeros(1), torch.ones(1)
    small, large = du.TruncatedNormal(loc, scale, -1.0, 1.0), du.TruncatedNormal(loc, scale, -1.0, 2.0)
    assert td.kl_divergence(large, small).item() == float('inf') and 0 < td.kl_divergence(small, large).item() < 1
    with pytest.raises(NotImplementedError):
        td.kl_divergence(small, du.TruncatedCauchy(loc, scale, -1.0, 1.0))
