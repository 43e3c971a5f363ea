"""MONet's losses against slow loops and constants worked out by hand; the adjusted Rand index by counting pairs."""
import itertools
import math

import pytest
import torch

from alfx.algorithms.monet.adjusted_rand_index import adjusted_rand_index
from alfx.algorithms.monet_algorithm import MoNetAlgorithm, MoNetUNet, mask_loss, mixture_loss
from alfx.networks.decoding_networks import SpatialBroadcast
from alfx.networks.encoding_networks import EncodingNetwork, SpatialBroadcastDecodingNetwork
from alfx.tensor_specs import TensorSpec

BATCH, SLOTS, CHANNELS, HEIGHT, WIDTH = 2, 3, 2, 4, 3


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random_masks(*shape):
    return torch.log_softmax(torch.randn(BATCH, SLOTS, *shape, dtype=torch.float64), dim=1)


class TestMixtureLoss:

    def test_equals_a_loop_over_pixels_and_slots(self):
        image = torch.rand(BATCH, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
        mean = torch.rand(BATCH, SLOTS, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
        log_mask, sigma = random_masks(HEIGHT, WIDTH), torch.tensor([0.3, 0.4, 0.5], dtype=torch.float64)
        expected = torch.zeros(BATCH, dtype=torch.float64)
        for b, h, w in itertools.product(range(BATCH), range(HEIGHT), range(WIDTH)):
            likelihood = 0.0
            for k in range(SLOTS):
                density = 1.0
                for c in range(CHANNELS):
                    z = float((image[b, c, h, w] - mean[b, k, c, h, w]) / sigma[k])
                    density *= math.exp(-z * z / 2) / (math.sqrt(2 * math.pi) * float(sigma[k]))
                likelihood += math.exp(float(log_mask[b, k, h, w])) * density
            expected[b] -= math.log(likelihood)
        torch.testing.assert_close(mixture_loss(image, log_mask, mean, sigma), expected)

    def test_the_value_worked_out_by_hand(self):
        # one pixel, one channel, x = 0; half of it of N(0, 0.1), half of N(0.2, 0.2):
        # 0.5 * 3.9894228 + 0.5 * 1.9947114 * exp(-0.5) = 1.9947114 + 0.6049268 = 2.5996382; -log of it = -0.9553723
        loss = mixture_loss(torch.zeros(1, 1, 1, 1), torch.full((1, 2, 1, 1), math.log(0.5)),
                            torch.tensor([0.0, 0.2]).view(1, 2, 1, 1, 1), torch.tensor([0.1, 0.2]))
        assert float(loss) == pytest.approx(-0.9553723, abs=1e-6)

    def test_slots_with_equal_predictions_are_one_gaussian_for_any_masks(self):
        image, mean = torch.rand(BATCH, CHANNELS, HEIGHT, WIDTH), torch.rand(BATCH, 1, CHANNELS, HEIGHT, WIDTH)
        loss = mixture_loss(image, random_masks(HEIGHT, WIDTH).float(), mean.expand(-1, SLOTS, -1, -1, -1),
                            torch.full((SLOTS, ), 0.3))
        one = -torch.distributions.Normal(mean[:, 0], 0.3).log_prob(image).sum((1, 2, 3))
        torch.testing.assert_close(loss, one)

    def test_a_mask_of_exactly_zero_takes_a_slot_out(self):
        image, mean = torch.rand(1, 1, 2, 2), torch.rand(1, 2, 1, 2, 2)
        log_mask = torch.tensor([0.0, -math.inf]).view(1, 2, 1, 1).expand(1, 2, 2, 2)
        loss = mixture_loss(image, log_mask, mean, torch.tensor([0.1, 0.2]))
        torch.testing.assert_close(loss, -torch.distributions.Normal(mean[:, 0], 0.1).log_prob(image).sum((1, 2, 3)))


class TestMaskLoss:

    def test_equals_a_loop_over_pixels_and_slots(self):
        log_mask, logits = random_masks(HEIGHT, WIDTH), torch.randn(BATCH, SLOTS, HEIGHT, WIDTH, dtype=torch.float64)
        expected = torch.zeros(BATCH, dtype=torch.float64)
        for b, h, w in itertools.product(range(BATCH), range(HEIGHT), range(WIDTH)):
            total = sum(math.exp(float(logits[b, k, h, w])) for k in range(SLOTS))
            for k in range(SLOTS):
                q, p = math.exp(float(log_mask[b, k, h, w])), math.exp(float(logits[b, k, h, w])) / total
                expected[b] += q * math.log(q / p)
        torch.testing.assert_close(mask_loss(log_mask, logits), expected)

    def test_the_value_worked_out_by_hand(self):
        # q = (0.5, 0.5), p = (0.8, 0.2): 0.5 log(0.625) + 0.5 log(2.5) = 0.2231436, at each of two pixels
        log_mask = torch.full((1, 2, 1, 2), math.log(0.5))
        logits = torch.tensor([math.log(4.0), 0.0]).view(1, 2, 1, 1).expand(1, 2, 1, 2)
        assert float(mask_loss(log_mask, logits)) == pytest.approx(2 * 0.2231436, abs=1e-6)

    def test_is_zero_for_equal_masks(self):
        log_mask = random_masks(HEIGHT, WIDTH)
        torch.testing.assert_close(mask_loss(log_mask, log_mask + 3.0), torch.zeros(BATCH, dtype=torch.float64))


def make_algorithm(**arguments):
    options = dict(
        n_slots=3, slot_size=2, input_tensor_spec=TensorSpec((1, 4, 4)),
        attention_unet_cls=lambda **kwargs: MoNetUNet(filters=(2, 3), nonskip_fc_layers=(4, ), **kwargs),
        encoder_cls=lambda **kwargs: EncodingNetwork(conv_layer_params=((3, 3, 2), ), **kwargs),
        decoder_cls=lambda **kwargs: SpatialBroadcastDecodingNetwork(conv_layer_params=((3, 3, 1), (2, 1, 1)),
                                                                     **kwargs))
    return MoNetAlgorithm(**{**options, **arguments})


class TestAlgorithm:

    def test_recurrent_masks_match_the_stick_breaking_of_the_paper(self):
        # eq. 2: m_k = s_{k-1} alpha_k, s_k = s_{k-1} (1 - alpha_k); the last slot takes the rest
        algorithm, image = make_algorithm(n_slots=4), torch.rand(2, 1, 4, 4)
        scope, expected = torch.ones(2, 1, 4, 4), []
        with torch.no_grad():
            for _ in range(3):
                alpha = torch.softmax(algorithm._attention(torch.cat([image, scope], 1))[0], 1)[:, :1]
                expected.append(scope * alpha)
                scope = scope * (1 - alpha)
            mask = algorithm.predict_step(image).info.mask
        torch.testing.assert_close(mask, torch.cat([*expected, scope], 1))

    @pytest.mark.parametrize('recurrent', [True, False])
    def test_masks_sum_to_one(self, recurrent):
        algorithm = make_algorithm(recurrent_attention=recurrent, n_slots=5)
        mask = algorithm.train_step(20 * torch.randn(2, 1, 4, 4)).info.mask
        assert mask.shape == (2, 5, 4, 4) and bool((mask >= 0).all())
        torch.testing.assert_close(mask.sum(1), torch.ones(2, 4, 4))

    def test_loss_terms_match_the_parts_computed_one_slot_at_a_time(self):
        algorithm, image = make_algorithm(), torch.rand(2, 1, 4, 4)
        with torch.no_grad():
            info = algorithm.predict_step(image).info
            means, logits, kld = [], [], torch.zeros(2)
            for k in range(3):
                parameters, _ = algorithm._encoder(torch.cat([image, info.mask[:, k:k + 1]], 1))
                loc, log_variance = parameters[:, :2], parameters[:, 2:]
                kld += torch.distributions.kl_divergence(torch.distributions.Normal(loc, (log_variance / 2).exp()),
                                                         torch.distributions.Normal(0.0, 1.0)).sum(1)
                decoded, _ = algorithm._decoder(loc)
                means.append(decoded[:, :1])
                logits.append(decoded[:, 1])
            torch.testing.assert_close(info.kld, kld)
            log_mask, sigma = info.mask.log(), torch.tensor([0.09, 0.10, 0.11])
            torch.testing.assert_close(info.rec_loss, mixture_loss(image, log_mask, torch.stack(means, 1), sigma))
            torch.testing.assert_close(info.mask_rec_loss, mask_loss(log_mask, torch.stack(logits, 1)))
            torch.testing.assert_close(info.full_rec, sum(info.mask[:, k:k + 1] * means[k] for k in range(3)))

    def test_a_sample_of_the_posterior_has_its_moments(self):
        algorithm, image = make_algorithm(), torch.rand(1, 1, 4, 4)
        with torch.no_grad():
            output = algorithm.train_step(image.expand(4000, -1, -1, -1)).output
        mean, std = output.z_mode[0], output.z_std[0]
        assert bool(((output.z.mean(0) - mean).abs() < 5 * std / math.sqrt(4000)).all())
        torch.testing.assert_close(output.z.std(0), std, rtol=0.06, atol=0.0)


class TestSpatialBroadcast:

    def test_each_position_has_the_vector_and_its_coordinates(self):
        image = SpatialBroadcast(3, 2)(torch.tensor([[5.0, 7.0]]))
        for row, column in itertools.product(range(3), range(2)):
            assert image[0, :, row, column].tolist() == [5.0, 7.0, (-1.0, 0.0, 1.0)[row], (-1.0, 1.0)[column]]

    def test_without_padding_all_pixels_share_one_function(self):
        """Without padding every pixel is the same function of the vector and its position."""
        # A kernel that sums up the row coordinate over 3 x 3 places of a canvas with rows -1, -0.5, 0, 0.5, 1:
        # the image has 3 rows, whose values are 9 times -0.5, 0, 0.5.
        network = SpatialBroadcastDecodingNetwork(1, 3, ((1, 3, 1), ))
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.zero_()
                if name.endswith('weight'):
                    parameter[:, 1] = 1.0
            image, _ = network(torch.zeros(1, 1))
        torch.testing.assert_close(image[0, 0], torch.tensor([[-4.5], [0.0], [4.5]]).expand(3, 3))


def slow_adjusted_rand_index(labels, clusters):
    """Hubert & Arabie 1985, by counting pairs: (a, b, c, d) are pairs together in both, in one, the other, none."""
    a = b = c = d = 0
    for i, j in itertools.combinations(range(len(labels)), 2):
        same_label, same_cluster = labels[i] == labels[j], clusters[i] == clusters[j]
        a, b, c, d = (a + (same_label and same_cluster), b + (same_label and not same_cluster),
                      c + (same_cluster and not same_label), d + (not same_label and not same_cluster))
    denominator = (a + b) * (b + d) + (a + c) * (c + d)
    return 2 * (a * d - b * c) / denominator if denominator else 1.0


class TestAdjustedRandIndex:

    @pytest.mark.parametrize('seed', range(5))
    def test_equals_counting_pairs(self, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 4, (6, 15), generator=generator)
        clusters = torch.where(torch.rand(6, 15, generator=generator) < 0.3 * (seed % 4), (labels + 1) % 3, labels)
        counted = torch.rand(6, 15, generator=generator) < 0.8
        expected = [slow_adjusted_rand_index(x[m].tolist(), y[m].tolist())
                    for x, y, m in zip(labels, clusters, counted)]
        torch.testing.assert_close(adjusted_rand_index(labels, clusters, counted), torch.tensor(expected))

    def test_the_value_worked_out_by_hand(self):
        # labels 0 0 0 1 1 1, clusters 0 0 1 1 2 2: n = [[2, 1, 0], [0, 1, 2]], index 2, sums of pairs 6 and 3 of 15,
        # expected 18 / 15 = 1.2, most 4.5: (2 - 1.2) / (4.5 - 1.2) = 8 / 33
        index = adjusted_rand_index(torch.tensor([[0, 0, 0, 1, 1, 1]]), torch.tensor([[0, 0, 1, 1, 2, 2]]))
        assert float(index) == pytest.approx(8 / 33)

    def test_swapping_both_partitions_changes_nothing(self):
        labels, clusters = torch.randint(0, 3, (3, 30)), torch.randint(0, 5, (3, 30))
        torch.testing.assert_close(adjusted_rand_index(labels, clusters), adjusted_rand_index(clusters, labels))

    def test_is_zero_on_average_for_random_partitions(self):
        labels, clusters = torch.randint(0, 3, (2000, 30)), torch.randint(0, 3, (2000, 30))
        index = adjusted_rand_index(labels, clusters)
        assert abs(float(index.mean())) < 4 * float(index.std()) / math.sqrt(2000)
