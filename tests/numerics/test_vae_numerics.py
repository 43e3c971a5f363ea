"""Divergences, gradient estimators, bounds and quantization of autoencoders against slow code and closed forms."""
import math
from functools import partial

import pytest
import torch
import torch.distributions as td

from alfx.algorithms.vae import DiscreteVAE, VariationalAutoEncoder, categorical_kld, categorical_spec, gaussian_kld
from alfx.algorithms.vae_representation_learner import (VAERepresentationLearner, bernoulli_log_likelihood,
                                                        gaussian_log_likelihood)
from alfx.algorithms.vq_vae import Vqvae, nearest_code
from alfx.data_structures import TimeStep
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.network import NetworkWrapper
from alfx.tensor_specs import TensorSpec
from alfx.utils.math_ops import identity


class TestGaussianDivergence:

    def test_the_value_worked_out_by_hand(self):
        one = torch.ones(1)
        assert gaussian_kld(one, torch.zeros(1)).item() == pytest.approx(0.5)  # only the mean differs, by 1
        # only the variance differs, 4: (4 - 1 - log 4) / 2
        assert gaussian_kld(torch.zeros(1), math.log(4) * one).item() == pytest.approx(0.8068528, abs=1e-6)
        # N(1, 4) from N(3, 2): (2 + 4 / 2 - 1 - log 2) / 2
        divergence = gaussian_kld(one, math.log(4) * one, 3 * one, math.log(2) * one)
        assert divergence.item() == pytest.approx((3 - math.log(2)) / 2)

    def test_slow_loop(self):
        mean, log_var, prior_mean, prior_log_var = torch.randn(4, 3, 5, dtype=torch.float64)
        for b in range(3):
            total = 0.0
            for i in range(5):
                var, prior_var = math.exp(log_var[b, i]), math.exp(prior_log_var[b, i])
                total += 0.5 * (var / prior_var + (mean[b, i] - prior_mean[b, i]).item()**2 / prior_var - 1
                                - math.log(var / prior_var))
            assert gaussian_kld(mean, log_var, prior_mean, prior_log_var)[b].item() == pytest.approx(total)

    def test_it_is_the_mean_of_the_log_ratio_of_densities(self):
        q, p = td.Normal(torch.tensor([0.5, -1.0]), torch.tensor([0.3, 2.0])), td.Normal(torch.tensor([0., 1.]), 1.5)
        z = q.sample((200_000, ))
        estimate = (q.log_prob(z) - p.log_prob(z)).sum(-1).mean().item()
        exact = gaussian_kld(q.loc, 2 * q.scale.log(), p.loc, torch.full((2, ), 2 * math.log(1.5))).item()
        assert exact == pytest.approx(estimate, abs=0.02)

    def test_it_is_zero_between_equals(self):
        mean, log_var = torch.randn(2, 3, 4)
        torch.testing.assert_close(gaussian_kld(mean, log_var, mean, log_var), torch.zeros(3))


class TestCategoricalDivergence:

    def test_the_value_worked_out_by_hand(self):
        logits = torch.tensor([[[0.5, 0.25, 0.25]]]).log()
        # log 3 minus the entropy, 1.5 log 2
        assert categorical_kld(logits).item() == pytest.approx(math.log(3) - 1.5 * math.log(2), abs=1e-6)
        prior = torch.tensor([[[0.25, 0.5, 0.25]]]).log() + 7.0  # 0.5 log 2 - 0.25 log 2, whatever is added to logits
        assert categorical_kld(logits, prior).item() == pytest.approx(0.25 * math.log(2), abs=1e-6)

    def test_slow_loop(self):
        logits, prior = torch.randn(2, 4, 3, 5, dtype=torch.float64)
        q, p = logits.softmax(-1).tolist(), prior.softmax(-1).tolist()
        for b in range(4):
            total = sum(q[b][i][k] * math.log(q[b][i][k] / p[b][i][k]) for i in range(3) for k in range(5))
            assert categorical_kld(logits, prior)[b].item() == pytest.approx(total)

    def test_equal_logits_as_prior_are_the_uniform_prior(self):
        logits = torch.randn(4, 3, 5)
        torch.testing.assert_close(categorical_kld(logits), categorical_kld(logits, torch.full((4, 3, 5), 2.0)))


def discrete_vae(num_values, **args):
    """Return a discrete autoencoder whose logits are its inputs."""
    encoder = lambda input_tensor_spec, **_: NetworkWrapper(identity, input_tensor_spec)
    return DiscreteVAE(categorical_spec(1, num_values), TensorSpec((num_values, )), z_network_cls=encoder, **args)


class TestGradientEstimators:
    """Tests of gradient estimators: the gradient of E[w z] with respect to the logits is q_k (w_k - sum_j q_j w_j)."""

    WEIGHTS = torch.tensor([1.0, -2.0, 0.5])
    LOGITS = torch.tensor([0.2, -0.3, 0.6])

    def mean_gradient(self, field='z', samples=1, **args):
        logits = self.LOGITS.expand(samples, -1).clone().requires_grad_()
        z = getattr(discrete_vae(3, **args).train_step(logits).output, field)
        (z @ self.WEIGHTS).sum().backward()
        return logits.grad.mean(0)

    def exact(self):
        q = self.LOGITS.softmax(0)
        return q * (self.WEIGHTS - q @ self.WEIGHTS)

    @pytest.mark.parametrize('field', ['z', 'z_mode'])
    def test_straight_through_is_exact_for_a_linear_function(self, field):
        torch.testing.assert_close(self.mean_gradient(field), self.exact())

    def test_straight_through_by_hand(self):
        logits = torch.zeros(1, 2, requires_grad=True)
        z = discrete_vae(2).train_step(logits).output.z
        (z @ torch.tensor([3.0, 1.0])).sum().backward()
        assert logits.grad.tolist() == [[0.5, -0.5]]  # 1/2 (3 - 2) and 1/2 (1 - 2)

    def test_gumbel_softmax_is_the_softmax_of_the_same_noise(self):
        vae = discrete_vae(3, mode='st-gumbel', gumbel_temp_scheduler=0.7)
        torch.manual_seed(5)
        logits = self.LOGITS.expand(4, -1).clone().requires_grad_()
        z = vae.train_step(logits).output.z
        (z @ self.WEIGHTS).sum().backward()
        torch.manual_seed(5)
        noise = -torch.empty(4, 1, 3).exponential_().log()
        logits_copy = self.LOGITS.expand(4, -1).clone().requires_grad_()
        scores = logits_copy[:, None].log_softmax(-1) + noise
        ((scores / 0.7).softmax(-1) @ self.WEIGHTS).sum().backward()
        torch.testing.assert_close(logits.grad, logits_copy.grad)
        assert torch.equal(z.argmax(-1), scores.argmax(-1))

    def test_cold_gumbel_softmax_has_the_exact_gradient_in_the_mean(self):
        # The bias is of the order of the squared temperature, the variance of the inverse temperature.
        gradient = self.mean_gradient(samples=200_000, mode='st-gumbel', gumbel_temp_scheduler=0.1)
        torch.testing.assert_close(gradient, self.exact(), atol=0.02, rtol=0)

    @pytest.mark.parametrize('mode', ['st', 'st-gumbel'])
    def test_samples_are_one_hot_and_as_frequent_as_probable(self, mode):
        z = discrete_vae(3, mode=mode).train_step(self.LOGITS.expand(100_000, -1)).output.z[:, 0]
        assert torch.equal(z.sort(-1).values, torch.tensor([0., 0., 1.]).expand(100_000, -1))
        torch.testing.assert_close(z.mean(0), self.LOGITS.softmax(0), atol=0.01, rtol=0)

    def test_the_reparameterized_gaussian(self):
        # E[z^2] = mean^2 + std^2: the derivatives are 2 mean, and 2 std * std / 2 for the log variance
        vae = VariationalAutoEncoder(1, preprocess_network=NetworkWrapper(identity, TensorSpec((2, ))))
        with torch.no_grad():
            vae._mean_and_log_var.weight.copy_(torch.eye(2))
        inputs = torch.tensor([0.7, 2 * math.log(1.5)]).expand(400_000, 2).clone().requires_grad_()
        vae.train_step(inputs).output.z.square().sum().backward()
        assert inputs.grad.mean(0).tolist() == pytest.approx([1.4, 2.25], abs=0.03)


class TestLikelihoodsAndBound:

    def test_likelihoods_by_hand_and_by_distribution(self):
        x, y = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, 2.0]])
        # squares 0 and 1 over 2 * 0.25; log std = -log 2; half log 2 pi = 0.9189385, twice each
        assert gaussian_log_likelihood(x, y, 0.5).item() == pytest.approx(-2 + 2 * math.log(2) - 1.837877, abs=1e-5)
        # log 1/2 and log sigmoid(2)
        assert bernoulli_log_likelihood(x, y).item() == pytest.approx(-0.693147 - 0.126928, abs=1e-5)
        x, y = torch.rand(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
        torch.testing.assert_close(gaussian_log_likelihood(x, y, 0.3), td.Normal(y, 0.3).log_prob(x).sum((1, 2, 3)))
        torch.testing.assert_close(bernoulli_log_likelihood(x.round(), y),
                                   td.Bernoulli(logits=y).log_prob(x.round()).sum((1, 2, 3)))

    def linear_model(self, mean_error=0.0):
        """Return a model x = W z + noise of std 0.5 with its exact posterior, whose mean is off by ``mean_error``."""
        w, std = torch.tensor([[1.0], [0.5]]), 0.5
        var = 1 / (1 + (w.t() @ w).item() / std**2)
        learner = VAERepresentationLearner(
            TensorSpec((2, )),
            vae_ctor=partial(VariationalAutoEncoder, z_dim=1, preprocess_network=partial(
                lambda input_tensor_spec: NetworkWrapper(identity, input_tensor_spec))),
            decoder_ctor=lambda spec: NetworkWrapper(lambda z: z @ w.t(), spec), likelihood_std=std)
        layer = learner.vae._mean_and_log_var
        with torch.no_grad():
            layer.weight.copy_(torch.cat([var * w.t() / std**2, torch.zeros(1, 2)]))
            layer.bias.copy_(torch.tensor([mean_error, math.log(var)]))
        evidence = td.MultivariateNormal(torch.zeros(2), w @ w.t() + std**2 * torch.eye(2))
        return learner, evidence

    def test_the_bound_equals_the_evidence_only_for_the_exact_posterior(self):
        x = torch.tensor([[0.3, -1.0]])
        bounds = []
        for error in (0.0, 0.3):
            learner, evidence = self.linear_model(error)
            info = learner.predict_step(TimeStep(observation=x.expand(100_000, -1))).info
            bounds.append(info.elbo.mean().item())
        exact = evidence.log_prob(x).item()
        assert bounds[0] == pytest.approx(exact, abs=0.01)
        # lower by the divergence of the two posteriors: 0.3^2 / (2 * 1 / 6)
        assert bounds[1] == pytest.approx(exact - 0.27, abs=0.02)

    def test_the_loss_is_minus_the_bound_times_its_weight(self):
        learner, _ = self.linear_model()
        learner._loss_weight = 2.0
        torch.manual_seed(0)
        loss = learner.train_step(TimeStep(observation=torch.ones(3, 2))).info
        torch.testing.assert_close(loss.loss, -2 * loss.extra.elbo)


class TestBeta:

    def test_its_gradient_is_the_target_minus_the_divergence(self):
        vae = VariationalAutoEncoder(3, TensorSpec((4, )), beta=2.0, target_kld_per_dim=0.5)
        info = vae.train_step(torch.randn(6, 4)).info
        vae.calc_loss(info).loss.mean().backward()
        assert vae._log_beta.grad.item() == pytest.approx(1.5 - info.kld.mean().item(), abs=1e-6)
        torch.testing.assert_close(info.beta, torch.full((6, ), 2.0))
        torch.testing.assert_close(info.loss, 2 * info.kld + math.log(2.0) * (1.5 - info.kld))

    def test_the_divergence_keeps_to_the_target(self):
        torch.manual_seed(0)
        vae = VariationalAutoEncoder(2, TensorSpec((2, )), target_kld_per_dim=0.5)
        decoder = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam([{'params': [p for p in vae.parameters() if p is not vae._log_beta]},
                                      {'params': decoder.parameters()}, {'params': [vae._log_beta], 'lr': 0.1}],
                                     lr=1e-2)
        klds = []
        for _ in range(300):
            x = torch.randn(32, 2)
            step = vae.train_step(x)
            loss = (10 * (decoder(step.output.z) - x).square().sum(-1) + step.info.loss).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            klds.append(step.info.kld.mean().item())
        assert sum(klds[-60:]) / 60 == pytest.approx(1.0, abs=0.1)
        assert vae._log_beta.item() > 1  # with a beta of 1 the divergence is larger


class TestQuantisation:

    def make(self, **args):
        args = dict(num_embeddings=5, embedding_dim=2, **args)
        vae = Vqvae(TensorSpec((6, )), encoder_ctor=lambda spec: NetworkWrapper(identity, spec),
                    decoder_ctor=partial(EncodingNetwork, last_layer_size=6, last_activation=torch.tanh), **args)
        with torch.no_grad():
            vae.codebook.normal_()
        return vae

    def test_the_nearest_code_by_a_slow_loop_and_the_first_of_equal_ones(self):
        vectors, codebook = torch.randn(7, 3, 4), torch.randn(9, 4)
        found = nearest_code(vectors, codebook)
        for b in range(7):
            for n in range(3):
                distances = [sum((vectors[b, n, i] - code[i]).item()**2 for i in range(4)) for code in codebook]
                assert found[b, n].item() == distances.index(min(distances))
        assert nearest_code(torch.zeros(1, 1), torch.tensor([[2.0], [1.0], [-1.0]])).item() == 1

    def test_the_terms_of_the_loss_by_hand(self):
        vae = self.make(commitment_loss_weight=0.25)
        with torch.no_grad():
            vae.codebook.copy_(torch.tensor([[0., 0.], [1., 1.], [4., 4.], [9., 9.], [-9., -9.]]))
        quantized = vae.encode(torch.tensor([[0.2, 0., 1., 1.5, 4., 3.]]))
        assert quantized.indices.tolist() == [[0, 1, 2]] and quantized.z.tolist() == [[0., 0., 1., 1., 4., 4.]]
        losses = vae.losses(quantized, torch.tensor([[1., 0., 0., 0., 0., 2.]]))
        # squares 0.04, 0.25 and 1 over 6 elements; errors 1 and 4 over 6
        assert losses.extra.quantization.item() == losses.extra.commitment.item() == pytest.approx(1.29 / 6)
        assert losses.loss.item() == pytest.approx(5 / 6 + 1.25 * 1.29 / 6)

    def test_codes_follow_their_vectors_and_encoders_get_decoder_gradients(self):
        vae = self.make(commitment_loss_weight=0.5)
        x = torch.randn(8, 6, requires_grad=True)
        quantized = vae.encode(x)
        z = quantized.z.detach().requires_grad_()
        decoded_gradient, = torch.autograd.grad((vae.decode(z) - 1).square().mean(1).sum(), z)
        losses = vae.losses(quantized, vae.decode(quantized.z) - 1)
        codebook_gradient, x_gradient = torch.autograd.grad(losses.loss.sum(), [vae.codebook, x])
        expected = torch.zeros(5, 2)
        for b in range(8):
            for n in range(3):
                k = quantized.indices[b, n]
                expected[k] += 2 * (vae.codebook[k] - x[b, 2 * n:2 * n + 2]).detach() / 6
        torch.testing.assert_close(codebook_gradient, expected)
        # plus the gradient of the commitment loss: 0.5 * 2 (x - code) / 6
        torch.testing.assert_close(x_gradient, decoded_gradient + (x - quantized.z).detach() / 6)

    def test_the_use_of_the_codebook_by_hand(self):
        vae = self.make()
        assert all(math.isnan(x) for x in vae.codebook_statistics())
        vae.observe_usage(torch.tensor([[0, 1, 1], [0, 2, 2]]))
        perplexity, use = vae.codebook_statistics()
        assert perplexity.item() == pytest.approx(3.0) and use.item() == pytest.approx(3 / 5)  # three codes alike
        for _ in range(10):
            vae.observe_usage(torch.full((1000, 3), 4))
        perplexity, use = vae.codebook_statistics()  # earlier statistics are reset
        assert perplexity.item() == pytest.approx(1.0, abs=0.02) and use.item() == pytest.approx(1 / 5)
        assert vae.kld == pytest.approx(3 * math.log(5))
