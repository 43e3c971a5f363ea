"""A program gives bit-identical results to the recorded function in every call."""
import pytest
import torch
from torch import nn

from alfx.engine.plan.program import Program, copied
from alfx.engine.plan.trace import make_graph


def program(function, fixed, changing):
    """Record ``function(*fixed, *changing)`` on copies of the arguments."""
    graph = make_graph(function, [copied(x) for x in (*fixed, *changing)])
    return Program(graph, fixed, changing)


def check(function, fixed, batches):
    """Check that program and function agree for all ``batches``, with the same random numbers."""
    fixed_too = [copied(x) for x in fixed]
    play = program(function, fixed, batches[0])
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        expected = function(*fixed_too, *batch)
        random_number = torch.rand(())
        torch.manual_seed(seed)
        found = play(batch)
        assert torch.equal(torch.rand(()), random_number), 'other random numbers were drawn'
        for a, b in zip(expected, found, strict=True):
            assert (a is None and b is None) or (a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b))
        assert all(torch.equal(a, b) for a, b in zip(fixed_too, fixed))
    return play


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batches(*shapes):
    return [[randn(*shape, seed=10 * i + j) for j, shape in enumerate(shapes)] for i in range(3)]


FUNCTIONS = {
    'two layers': lambda w, v, x: [torch.relu_(x @ w.t()) @ v.t(), x.tanh()],
    'views only': lambda w, v, x: [x.t().unsqueeze(0)[:, 1:], w.view(-1)],
    'an input itself': lambda w, v, x: [x, w],
    'nothing from the batch': lambda w, v, x: [(w * 2).sum(), None],
    'sums and means': lambda w, v, x: [x.sum(), x.mean(), x.sum(0, keepdim=True), x.mean(1), 1 - x.mean()],
    'scalars': lambda w, v, x: [3 - x, torch.rsub(x, w[0, 0]), 2 * x + 1, x / 3, x ** 2, x - 1],
    'two results': lambda w, v, x: [*x.min(1), *x.sort(0), *x.split(2)],
    'comparisons': lambda w, v, x: [torch.where(x > 0, x, -x), (x != 0).float(), x.clamp(-1, 1), x.clamp(max=0.5)],
    'integers': lambda w, v, x: [x.argmax(1), x.gather(1, x.argmax(1, keepdim=True)), (x > 0).sum(), x.long()],
    'constants': lambda w, v, x: [torch.zeros_like(x) + x, x.new_ones(2).cumsum(0), torch.arange(4) * x[0, 0]],
    'random numbers': lambda w, v, x: [torch.randn(16, 3), torch.rand_like(x), torch.randint(9, (5, )),
                                       torch.bernoulli(torch.sigmoid(x)), torch.randn_like(x).clamp_(-1, 1)],
    'no kernel that writes to a given place': lambda w, v, x: [torch.stack(x.unbind(0)).cumsum(0), x.flip(0),
                                                                torch.nn.functional.pad(x, (1, 1)).roll(1, 0)],
    'zeros written to': lambda w, v, x: [torch.zeros_like(x).add_(x), torch.zeros(3, 4).index_add_(
        0, torch.tensor([0, 2]), x[:2])],
    'in place through a view': lambda w, v, x: [_negated_rows(x * 2)],
    'used long afterwards': lambda w, v, x: [_chain(x)],
}


def _negated_rows(x):
    x[1:].neg_()
    return x


def _chain(x):
    first = x + 1
    for _ in range(5):
        x = (x * 2).tanh()
    return x + first


@pytest.mark.parametrize('name', FUNCTIONS)
def test_it_returns_the_results_of_the_function(name):
    check(FUNCTIONS[name], [randn(5, 4), randn(2, 5)], batches((3, 4)))


def test_gradients_of_a_network():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    params = dict(net.named_parameters())

    def gradients(*tensors):
        values = [x.detach().requires_grad_() for x in tensors[:-2]]
        with torch.enable_grad():
            found = torch.func.functional_call(net, dict(zip(params, values)), (tensors[-2], ))
            loss = nn.functional.mse_loss(found[:-1, 0], tensors[-1][1:]) + found.select(0, 2).sum()
        return [loss.detach(), *torch.autograd.grad(loss, values)]

    play = check(gradients, [p.detach() for p in params.values()], batches((6, 4), (6, )))
    assert len(play._calls) < 40


def test_an_operation_may_leave_out_some_of_its_results():
    """Record the backward pass of a convolution, which does not compute gradients that are not requested."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten())
    params = dict(net.named_parameters())

    def gradients(*tensors):
        values = [x.detach().requires_grad_() for x in tensors[:-1]]
        with torch.enable_grad():
            loss = torch.func.functional_call(net, dict(zip(params, values)), (tensors[-1], )).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, values)]

    check(gradients, [p.detach() for p in params.values()], batches((4, 2, 9, 9)))


def test_batches_may_be_views_with_gaps():
    block = randn(8, 2, 10)
    leaves = [block[..., 2:6].transpose(0, 1), block[..., 7].t()]
    check(lambda x, y: [x * y.unsqueeze(-1), x.contiguous()], [], [leaves])


def test_fixed_tensors_are_read_and_written_where_they_are():
    count, weight = torch.zeros(()), randn(3)
    play = program(lambda c, w, x: [c.add_(1) * w * x], [count, weight], [randn(3)])
    for i in range(1, 4):
        weight.mul_(2)
        assert torch.equal(play([torch.ones(3)])[0], i * weight) and float(count) == i


def test_results_share_memory_if_disjoint_in_time_and_not_returned():
    """Share memory between results with disjoint lifetimes, but not with returned results."""
    def layers(x):
        results = []
        for _ in range(10):
            x = (x * 2).tanh()
            results.append(x.sum())
        return [x, *results]

    play = check(layers, [], batches((100, 100)))
    addresses = {call.keywords['out'].data_ptr() for call in play._calls
                 if getattr(call, 'keywords', {}).get('out') is not None and call.keywords['out'].numel() == 10_000}
    assert len(addresses) <= 3
    assert len({x.data_ptr() for x in play(batches((100, 100))[0])}) == 11


def test_laying_out_moves_no_generator_and_changes_no_tensor():
    count = torch.zeros(())
    graph = make_graph(lambda c, x: [c.add_(1) + torch.randn_like(x)], [count.clone(), randn(3)])
    state = torch.get_rng_state()
    Program(graph, [count], [randn(3)])
    assert torch.equal(torch.get_rng_state(), state) and float(count) == 0
