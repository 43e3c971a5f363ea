"""Adam, AdamW and AdamTF against loops over scalars, constants worked out by hand, and identities."""
import math

import pytest
import torch

from alfx.optimizers import Adam, AdamTF, AdamW

LR, BETA1, BETA2 = 0.1, 0.9, 0.99


def slow_adam(x, gradients, eps, weight_decay=0.0, decoupled=False, epsilon_hat=False, amsgrad=False):
    """Compute the algorithm of the paper, one number at a time."""
    m = v = v_max = 0.0
    for t, g in enumerate(gradients, start=1):
        if decoupled:
            x = x - LR * weight_decay * x
        else:
            g = g + weight_decay * x
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        v_max = max(v, v_max)
        w = v_max if amsgrad else v
        if epsilon_hat:
            x = x - LR * math.sqrt(1 - BETA2**t) / (1 - BETA1**t) * m / (math.sqrt(w) + eps)
        else:
            x = x - LR * (m / (1 - BETA1**t)) / (math.sqrt(w / (1 - BETA2**t)) + eps)
    return x


@pytest.mark.parametrize('amsgrad', [False, True])
@pytest.mark.parametrize('weight_decay', [0.0, 0.3])
@pytest.mark.parametrize('cls', [Adam, AdamW, AdamTF])
def test_every_element_follows_the_loop(cls, weight_decay, amsgrad):
    eps = 0.05
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(7, generator=generator, dtype=torch.float64)
    gradients = torch.randn(20, 7, generator=generator, dtype=torch.float64)
    gradients[3] *= 10
    parameter = torch.nn.Parameter(start.clone())
    optimizer = cls([parameter], lr=LR, betas=(BETA1, BETA2), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
    for g in gradients:
        parameter.grad = g.clone()
        optimizer.step()
    expected = [
        slow_adam(start[i].item(), gradients[:, i].tolist(), eps, weight_decay, cls is AdamW, cls is AdamTF, amsgrad)
        for i in range(7)
    ]
    torch.testing.assert_close(parameter.data, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-8)


def test_the_first_step_by_hand():
    # g = 0.5, so m_hat = 0.5 and sqrt(v_hat) = 0.5: Adam moves by 0.1 * 0.5 / (0.5 + 0.5) = 0.05.
    # AdamTF: m = 0.05, v = 0.0025, lr * sqrt(0.01) / 0.1 = 0.1: 0.1 * 0.05 / (0.05 + 0.5) = 0.00909091.
    # AdamW first shrinks 1 by 0.1 * 0.2: 0.98 - 0.05 = 0.93.
    for cls, kwargs, expected in ((Adam, {}, 0.95), (AdamTF, {}, 0.99090909), (AdamW, {'weight_decay': 0.2}, 0.93)):
        parameter = torch.nn.Parameter(torch.tensor(1.0))
        parameter.grad = torch.tensor(0.5)
        cls([parameter], lr=LR, betas=(BETA1, BETA2), eps=0.5, **kwargs).step()
        assert parameter.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize('amsgrad', [False, True])
@pytest.mark.parametrize('cls,torch_cls', [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
def test_results_match_the_unfused_optimizer_of_torch(cls, torch_cls, amsgrad):
    first = [torch.nn.Parameter(torch.randn(s)) for s in ((64, 4), (64, ), (2, 64), (1, ))]
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    a = cls(first, lr=3e-4, amsgrad=amsgrad, weight_decay=0.01)
    b = torch_cls(second, lr=3e-4, amsgrad=amsgrad, weight_decay=0.01, foreach=False, fused=False)
    for _ in range(200):
        for p, q in zip(first, second):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(first, second):
        # 200 steps of 3e-4: the difference is rounding of the parameters, at most a few units in the last place.
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)


def test_without_epsilon_adam_tf_is_adam():
    first, second = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    a, b = Adam([first], lr=LR, eps=0.0), AdamTF([second], lr=LR, eps=0.0)
    for _ in range(10):
        first.grad = torch.randn(5)
        second.grad = first.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(first, second)


def test_adam_tf_corrects_bias_by_optimizer_steps_and_adam_by_parameter():
    """Bias correction counts the steps of the optimizer in AdamTF and those of each parameter in Adam."""
    # Two steps without gradient, then g = 1 with eps = 0: Adam moves by lr. AdamTF has t = 3:
    # 0.1 * sqrt(1 - 0.99^3) / (1 - 0.9^3) * 0.1 / sqrt(0.01) = 0.1 * 0.172340 / 0.271 = 0.063594.
    for cls, expected in ((Adam, 0.9), (AdamTF, 1 - 0.063594)):
        parameter, other = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.tensor(1.0))
        optimizer = cls([parameter, other], lr=LR, betas=(BETA1, BETA2), eps=0.0)
        for t in range(3):
            other.grad = torch.tensor(1.0)
            parameter.grad = torch.tensor(1.0) if t == 2 else None
            optimizer.step()
        assert parameter.item() == pytest.approx(expected, abs=1e-6)
