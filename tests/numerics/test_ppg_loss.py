"""The loss of the auxiliary phase against its three terms by hand, and divergences against sums and torch."""
import math

import pytest
import torch
import torch.distributions as td

from alfx.algorithms.ppg_algorithm import PPGTrainInfo
from alfx.algorithms.ppg_loss import PPGAuxPhaseLoss
from alfx.utils import dist_utils
from alfx.utils.dist_utils import Categorical, DiagMultivariateNormal


def test_the_loss_is_half_of_both_errors_plus_the_divergence():
    """Half of both squared errors plus the divergence of the old policy from the current one."""
    before = Categorical(probs=torch.tensor([[[0.5, 0.5]]]))
    info = PPGTrainInfo(returns=torch.tensor([[3.0]]), value=torch.tensor([[1.0]]), aux_value=torch.tensor([[2.0]]),
                        action_distribution=Categorical(probs=torch.tensor([[[0.8, 0.2]]])))
    loss = PPGAuxPhaseLoss(policy_kl_loss_weight=10.0)(info, before)
    kl = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)  # 0.2231; the other way round it is 0.1927
    assert loss.extra.aux_value_loss.item() == pytest.approx(0.5)  # (3 - 2)^2 / 2
    assert loss.extra.value_loss.item() == pytest.approx(2.0)      # (3 - 1)^2 / 2
    assert loss.extra.policy_kl.item() == pytest.approx(kl)
    assert loss.loss.item() == pytest.approx(2.5 + 10 * kl)


def test_errors_are_averaged_over_reward_dimensions():
    same = Categorical(probs=torch.tensor([[[0.5, 0.5]]]))
    info = PPGTrainInfo(returns=torch.tensor([[[3.0, 0.0]]]), value=torch.tensor([[[1.0, 1.0]]]),
                        aux_value=torch.zeros(1, 1, 2), action_distribution=same)
    loss = PPGAuxPhaseLoss()(info, same)
    assert loss.loss.shape == (1, 1)
    assert loss.loss.item() == pytest.approx((0.5 * 4 + 0.5) / 2 + 0.5 * 9 / 2)


def test_targets_get_no_gradient():
    returns = torch.ones(1, 1, requires_grad=True)
    same = Categorical(probs=torch.tensor([[[0.5, 0.5]]]))
    value = torch.zeros(1, 1, requires_grad=True)
    info = PPGTrainInfo(returns=returns, value=value, aux_value=value * 2, action_distribution=same)
    PPGAuxPhaseLoss()(info, same).loss.sum().backward()
    assert returns.grad is None and value.grad is not None


def test_a_weight_below_zero_is_rejected():
    with pytest.raises(ValueError, match='policy_kl_loss_weight'):
        PPGAuxPhaseLoss(policy_kl_loss_weight=-1.0)


def categorical(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normal(seed):
    return DiagMultivariateNormal(categorical(seed, 5, 3), categorical(seed + 1, 5, 3).exp())


CASES = {
    'categorical': lambda s: Categorical(logits=categorical(s, 5, 4)),
    'several categorical': lambda s: dist_utils.DiagMultivariateCategorical(logits=categorical(s, 5, 3, 4)),
    'normal': normal,
    'squashed': lambda s: dist_utils.TransformedDistribution(normal(s), [dist_utils.StableTanh()]),
}


@pytest.mark.parametrize('name', CASES)
def test_a_divergence_is_the_mean_difference_of_the_log_probabilities(name):
    torch.manual_seed(0)
    before, after = CASES[name](1), CASES[name](7)
    kl = dist_utils.compute_kl(before, after)
    samples = [before.sample() for _ in range(20000 if name != 'squashed' else 4000)]
    expected = torch.stack([before.log_prob(x) - after.log_prob(x) for x in samples])
    error = expected.std(0) / len(samples)**0.5
    assert kl.shape == (5, ) and (kl > 0).all()
    assert ((kl - expected.mean(0)).abs() < 5 * error).all()
    assert torch.equal(dist_utils.compute_kl(before, before), torch.zeros(5))


def test_divergences_of_a_nest_are_added_up():
    nests = [{'a': CASES['normal'](s), 'b': CASES['categorical'](s)} for s in (1, 7)]
    parts = sum(dist_utils.compute_kl(nests[0][k], nests[1][k]) for k in 'ab')
    torch.testing.assert_close(dist_utils.compute_kl(*nests), parts)


def test_excluded_choices_do_not_affect_a_divergence():
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    other = torch.tensor([[0.5, 0.2, -math.inf]], requires_grad=True)
    kl = dist_utils.compute_kl(Categorical(logits=logits), Categorical(logits=other))
    expected = td.kl_divergence(td.Categorical(logits=logits[:, :2]), td.Categorical(logits=other[:, :2]))
    torch.testing.assert_close(kl, expected)
    kl.backward()
    assert torch.isfinite(other.grad).all()


def test_an_unknown_divergence_is_estimated_without_bias():
    torch.manual_seed(0)
    weights = td.Categorical(torch.tensor([[0.3, 0.7]]).expand(20000, 2))
    parts = td.Normal(torch.tensor([[0.0, 1.0]]).expand(20000, 2), 1.0)
    mixture = td.MixtureSameFamily(weights, parts)
    shifted = td.MixtureSameFamily(weights, td.Normal(parts.loc + 0.5, 1.0))
    sample = mixture.sample()
    estimate = dist_utils.compute_kl(mixture, shifted)
    expected = mixture.log_prob(sample) - shifted.log_prob(sample)
    assert abs(float(estimate.mean() - expected.mean())) < 5 * float(expected.std()) / 100
    assert torch.equal(dist_utils.compute_kl(mixture, mixture), torch.zeros(20000))
