"""SGD, RMSprop and RAdam against torch's own, element by element, and against a step worked out by hand."""
import pytest
import torch

from alfx.optimizers import SGD, RAdam, RMSprop

SETTINGS = [
    (SGD, torch.optim.SGD, dict()),
    (SGD, torch.optim.SGD, dict(momentum=0.9)),
    (SGD, torch.optim.SGD, dict(momentum=0.9, dampening=0.3, weight_decay=0.1)),
    (SGD, torch.optim.SGD, dict(momentum=0.9, nesterov=True)),
    (RMSprop, torch.optim.RMSprop, dict()),
    (RMSprop, torch.optim.RMSprop, dict(momentum=0.5, weight_decay=0.1)),
    (RMSprop, torch.optim.RMSprop, dict(centered=True, alpha=0.9)),
    (RMSprop, torch.optim.RMSprop, dict(centered=True, momentum=0.9, eps=1e-3)),
    (RAdam, torch.optim.RAdam, dict()),
    (RAdam, torch.optim.RAdam, dict(betas=(0.5, 0.8), eps=1e-2, weight_decay=0.1)),
]


@pytest.mark.parametrize('cls, torch_cls, settings', SETTINGS)
def test_results_match_the_loop_of_torch(cls, torch_cls, settings):
    torch.manual_seed(0)
    start = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    parameters, torch_parameters = ([x.clone().requires_grad_() for x in start] for _ in range(2))
    a, b = cls(parameters, lr=0.05, **settings), torch_cls(torch_parameters, lr=0.05, foreach=False, **settings)
    for step in range(9):  # RAdam adapts its steps from the sixth on
        for i, (p, q) in enumerate(zip(parameters, torch_parameters)):
            # the second parameter has no gradient at first: it begins its velocity later than the others
            gradient = None if i == 1 and step == 0 else torch.randn(p.shape)
            p.grad, q.grad = gradient, None if gradient is None else gradient.clone()
        a.step()
        b.step()
    for p, q in zip(parameters, torch_parameters):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_one_step_of_rmsprop_by_hand():
    # s = 0.1 * 3^2 = 0.9 (alpha 0.9); p = 1 - 0.5 * 3 / sqrt(0.9) = 1 - 1.5811388
    p = torch.ones(1, requires_grad=True)
    p.grad = torch.full((1, ), 3.)
    RMSprop([p], lr=0.5, alpha=0.9, eps=0.).step()
    assert p.item() == pytest.approx(-0.5811388)


def test_two_steps_of_momentum_by_hand():
    # u = 2, p = 1 - 0.2; u = 0.5 * 2 + 2 = 3, p = 0.8 - 0.3
    p = torch.ones(1, requires_grad=True)
    optimizer = SGD([p], lr=0.1, momentum=0.5)
    for _ in range(2):
        p.grad = torch.full((1, ), 2.)
        optimizer.step()
    assert p.item() == pytest.approx(0.5)


def test_rmsprop_keeps_one_state_for_occasional_gradients():
    """Optimizer state is kept for parameters that have a gradient only in some steps."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(2, 2))]
    torch_parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer = RMSprop(parameters, lr=0.1, momentum=0.9, centered=True)
    reference = torch.optim.RMSprop(torch_parameters, lr=0.1, momentum=0.9, centered=True)
    for step in range(7):
        for p, q in zip(parameters, torch_parameters):
            q.grad = p.grad = torch.randn_like(p)
        if step % 3:
            parameters[step % 2].grad = torch_parameters[step % 2].grad = None
        for p in parameters:
            p.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        reference.step()
        for p, q in zip(parameters, torch_parameters):
            torch.testing.assert_close(p, q)
    for p, q in zip(parameters, torch_parameters):
        torch.testing.assert_close(optimizer.state[p]['square_avg'], reference.state[q]['square_avg'])
