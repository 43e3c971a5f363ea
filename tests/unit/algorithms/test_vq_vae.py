"""The vector-quantized autoencoder: shapes of latents, owners of parameters, invalid settings, checkpoints."""
from functools import partial

import pytest
import torch

from alfx import nest
from alfx.algorithms.vq_vae import Vqvae, VqvaeInfo
from alfx.data_structures import LossInfo
from alfx.gin_utils import ConfError
from alfx.networks.decoding_networks import AutoShapeImageDeconvNetwork
from alfx.networks.encoding_networks import EncodingNetwork, ImageEncodingNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import SpecError, TensorSpec
from alfx.utils.checkpoint_utils import Checkpointer
from alfx.utils.math_ops import identity

IMAGE = TensorSpec((1, 8, 8))
encoder = partial(EncodingNetwork, fc_layer_params=(16, ), last_layer_size=6, last_activation=identity)
decoder = partial(EncodingNetwork, fc_layer_params=(16, ), last_layer_size=64, last_activation=identity)


def make(seed=0, **args):
    torch.manual_seed(seed)
    return Vqvae(IMAGE, **{'num_embeddings': 7, 'embedding_dim': 3, 'encoder_ctor': encoder, 'decoder_ctor': decoder,
                           **args})


def make_grid(**args):
    """Return an autoencoder with a code for each of 2 x 2 positions."""
    return make(
        encoder_ctor=lambda spec: ImageEncodingNetwork(1, 8, ((4, 3, 2, 1), (3, 3, 2, 1)), activation=torch.tanh),
        decoder_ctor=lambda spec: AutoShapeImageDeconvNetwork(
            TensorSpec((spec.numel, )), ((4, 3, 2, 1), (1, 3, 2, 1)), IMAGE, 4), **args)


@pytest.mark.parametrize('batch_size', [1, 5])
def test_steps_yield_codes_and_losses(batch_size):
    vae, inputs = make(), torch.rand(batch_size, 1, 8, 8)
    before = inputs.clone()
    train, predict, rollout = vae.train_step(inputs), vae.predict_step(inputs), vae.rollout_step(inputs)
    assert torch.equal(train.output, rollout.output) and torch.equal(predict.output, vae.decode(train.output))
    assert predict.output.shape == inputs.shape
    assert train.output.shape == (batch_size, *vae.output_spec.shape) and rollout.info == ()
    codes = train.output.view(batch_size, 2, 3)
    assert (codes[:, :, None] == vae.codebook).all(-1).any(-1).all()
    assert isinstance(train.info, LossInfo) and train.info.loss.shape == (batch_size, )
    assert isinstance(predict.info, VqvaeInfo) and all(x.shape == (batch_size, ) for x in predict.info)
    assert torch.equal(inputs, before)
    vae.set_on_policy(True)
    assert torch.equal(vae.rollout_step(inputs).info.loss, train.info.loss)


def test_each_position_of_an_image_gets_a_code():
    torch.manual_seed(0)
    spec = TensorSpec((3, 2, 2))
    vae = Vqvae(spec, 7, 3, encoder_ctor=lambda s: ImageEncodingNetwork(3, 2, ((3, 1, 1), ), activation=identity),
                decoder_ctor=lambda s: ImageEncodingNetwork(3, 2, ((3, 1, 1), ), activation=identity))
    inputs = torch.rand(5, 3, 2, 2)
    quantized = vae.encode(inputs)
    assert quantized.z.shape == (5, 3, 2, 2) and quantized.indices.shape == (5, 4)
    encoded = vae._encoder(inputs)[0]
    for position in range(4):  # row by row
        vectors = encoded[:, :, position // 2, position % 2]
        assert torch.equal(quantized.encoded[:, position], vectors)
        expected = torch.cdist(vectors, vae.codebook).argmin(-1)
        assert torch.equal(quantized.indices[:, position], expected)
        assert torch.equal(quantized.z[:, :, position // 2, position % 2], vae.codebook[expected])


def test_a_decoder_that_does_not_take_the_latent_is_rejected():
    with pytest.raises(SpecError, match='decoder_ctor: expected a network with the input spec'):
        make_grid()  # its decoder wants a vector


def test_everything_is_trained_by_its_optimizer():
    vae = make(optimizer=Adam(lr=1e-2))
    vae.finalize()
    before = {name: p.detach().clone() for name, p in vae.named_parameters()}
    inputs, losses = torch.rand(16, 1, 8, 8), []
    for _ in range(60):
        loss = vae.calc_loss(nest.map_structure(lambda x: x[None], vae.train_step(inputs).info))
        vae.update_with_gradient(loss)
        losses.append(loss.loss.mean().item())
    assert all(not torch.equal(p, before[name]) for name, p in vae.named_parameters())
    assert losses[-1] < losses[0] / 2


def test_seeds_reproduce_results_and_checkpoints_restore_codes_and_usage():
    first, second = make(), make()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    inputs = torch.rand(9, 1, 8, 8)
    first.rollout_step(inputs)
    other = make(seed=4)
    other.load_state_dict(first.state_dict())
    for a, b in zip(nest.flatten(first.predict_step(inputs)), nest.flatten(other.predict_step(inputs))):
        assert torch.equal(a, b)


def test_a_checkpoint_argument_restores_networks_codes_and_their_use(tmp_path):
    inputs, path = torch.rand(9, 1, 8, 8), tmp_path / 'ckpt-1'
    saved, other = make(optimizer=Adam()), make(seed=4, optimizer=Adam(), checkpoint=f'alg@{path}')
    saved.rollout_step(inputs)
    saved.finalize()
    Checkpointer(str(tmp_path), alg=saved).save(1)
    assert not torch.equal(saved.codebook, other.codebook)
    other.finalize()
    assert other.pre_loaded and torch.equal(saved.codebook, other.codebook)
    for a, b in zip(nest.flatten(saved.predict_step(inputs)), nest.flatten(other.predict_step(inputs))):
        assert torch.equal(a, b)


def test_only_the_rollout_counts_the_use_of_the_codes():
    vae, inputs = make(), torch.rand(3, 1, 8, 8)
    vae.train_step(inputs)
    vae.predict_step(inputs)
    assert vae._usage.sum() == 0
    vae.rollout_step(inputs)
    assert vae._usage.sum() == 6


def test_the_update_is_traceable():
    assert make().capabilities.traceable_update


def test_invalid_arguments_are_rejected_by_name():
    with pytest.raises(SpecError, match=r'encoder_ctor: expected an output of n \* embedding_dim'):
        make(embedding_dim=4)
    with pytest.raises(SpecError, match='decoder_ctor: expected an output of 64 elements'):
        make(decoder_ctor=partial(EncodingNetwork, fc_layer_params=(5, )))
    with pytest.raises(SpecError, match='one float spec'):
        Vqvae({'a': IMAGE}, 7, 3)
    for args in (dict(num_embeddings=0), dict(embedding_dim=0), dict(commitment_loss_weight=-1.0)):
        with pytest.raises(ConfError, match=next(iter(args))):
            make(**args)
