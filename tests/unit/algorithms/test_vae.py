"""Variational autoencoders: specs, priors, learning of beta, invalid settings, checkpoints."""
import math
from functools import partial

import gin
import pytest
import torch

from alfx import context, nest
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.vae import DiscreteVAE, VAEInfo, VariationalAutoEncoder, categorical_spec, gaussian_kld
from alfx.data_structures import LossInfo
from alfx.gin_utils import ConfError
from alfx.nest.utils import NestConcat
from alfx.networks.containers import Sequential
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.networks import LSTMCell
from alfx.optimizers import SGD, Adam
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec
from alfx.utils.checkpoint_utils import Checkpointer
from alfx.utils.math_ops import identity
from alfx.utils.schedulers import LinearScheduler

IMAGE = TensorSpec((1, 4, 4))
NESTED = {'a': TensorSpec((3, )), 'b': (TensorSpec((2, 2)), TensorSpec(()))}
PRIOR_INPUT = TensorSpec((5, ))
KINDS = ('gaussian', 'st', 'st-gumbel')


def make(kind, spec=IMAGE, prior=False, seed=0, **args):
    torch.manual_seed(seed)
    prior_net = partial(EncodingNetwork, fc_layer_params=(6, ))
    if kind == 'gaussian':
        if prior:
            args['z_prior_network'] = prior_net(PRIOR_INPUT, last_layer_size=6, last_activation=identity)
        return VariationalAutoEncoder(3, spec, **args)
    if prior:
        args.update(prior_input_tensor_spec=PRIOR_INPUT, prior_z_network_cls=prior_net,
                    z_network_cls=partial(EncodingNetwork, preprocessing_combiner=NestConcat()))
    return DiscreteVAE(categorical_spec(2, 4), spec, mode=kind, **args)


def inputs_of(spec, batch_size=6):
    return nest.map_structure(lambda s: s.rand((batch_size, )), spec)


@pytest.mark.parametrize('kind', KINDS)
class TestAnyLatent:

    @pytest.mark.parametrize('batch_size', [1, 6])
    def test_outputs_and_infos_have_their_shapes(self, kind, batch_size):
        vae = make(kind)
        for step in (vae.train_step(inputs_of(IMAGE, batch_size)), vae.predict_step(inputs_of(IMAGE, batch_size)),
                     vae.rollout_step(inputs_of(IMAGE, batch_size))):
            assert all(x.shape == (batch_size, *vae.output_spec.shape) for x in step.output)
            assert step.info.kld.shape == step.info.loss.shape == step.info.beta.shape == (batch_size, )
            assert step.state == () and step.info.beta_loss == ()

    def test_inputs_do_not_change_and_seeds_reproduce_the_sample(self, kind):
        inputs = inputs_of(IMAGE)
        before = inputs.clone()
        outputs = [make(kind, seed=3).train_step(inputs).output.z for _ in range(2)]
        assert torch.equal(*outputs) and torch.equal(inputs, before)

    def test_the_loss_is_beta_times_the_divergence(self, kind):
        info = make(kind, beta=0.3).train_step(inputs_of(IMAGE)).info
        torch.testing.assert_close(info.loss, 0.3 * info.kld)
        vae = make(kind)
        loss = vae.calc_loss(nest.stack([vae.train_step(inputs_of(IMAGE)).info for _ in range(2)]))
        assert isinstance(loss, LossInfo) and loss.loss.shape == (2, 6) and isinstance(loss.extra, VAEInfo)

    def test_a_learned_prior_is_where_the_posterior_begins(self, kind):
        spec = TensorSpec((7, ))
        vae = make(kind, spec, prior=True)
        assert vae.has_learned_prior and not make(kind).has_learned_prior
        inputs = inputs_of((PRIOR_INPUT, spec))
        step = vae.train_step(inputs)
        (step.info.loss.sum() + step.output.z.square().sum()).backward()
        assert all(p.grad is not None for p in vae.parameters())
        last = vae._mean_and_log_var if kind == 'gaussian' else vae._encoder._chain[-1]
        with torch.no_grad():
            last.weight.zero_()
            last.bias.zero_()
        step = vae.train_step(inputs)  # an encoder without information equals the prior, for any prior
        torch.testing.assert_close(step.info.kld, torch.zeros(6), atol=1e-5, rtol=0)
        prior, _ = vae._prior(inputs[0])
        if kind == 'gaussian':
            torch.testing.assert_close(step.output.z_mode, prior[:, :3])
            torch.testing.assert_close(step.output.z_std, (prior[:, 3:] / 2).exp())
        else:
            assert torch.equal(step.output.z_mode.argmax(-1), prior.view(6, 2, 4).argmax(-1))

    def test_beta_is_learned_by_its_own_or_the_parents_optimizer(self, kind):
        target = 'target_kld_per_dim' if kind == 'gaussian' else 'target_kld_per_categorical'
        for optimizer in (SGD(lr=0.5), None):
            vae = make(kind, beta_optimizer=optimizer, **{target: 2.0})
            assert len(vae.optimizers()) == (optimizer is not None)
            info = vae.train_step(inputs_of(IMAGE)).info
            vae.calc_loss(info).loss.mean().backward()
            total = 2.0 * (3 if kind == 'gaussian' else 2)
            assert vae._log_beta.grad.item() == pytest.approx(total - info.kld.mean().item(), abs=1e-5)

    def test_a_checkpoint_restores_the_next_step(self, kind):
        target = 'target_kld_per_dim' if kind == 'gaussian' else 'target_kld_per_categorical'
        first, second = make(kind, **{target: 1.0}, beta=0.2), make(kind, **{target: 1.0}, seed=1)
        second.load_state_dict(first.state_dict())
        infos = []
        for vae in (first, second):
            torch.manual_seed(1)
            infos.append(vae.train_step(torch.ones(2, 1, 4, 4)))
        for a, b in zip(*(nest.flatten((step.output, step.info)) for step in infos)):
            assert torch.equal(a, b)

    def test_the_update_is_traceable(self, kind):
        assert make(kind).capabilities.traceable_update


class TestGaussian:

    def test_a_checkpoint_argument_restores_encoder_prior_and_beta(self, tmp_path):
        parents = []
        for seed, beta, checkpoint in ((0, 0.2, None), (1, 0.5, f"alg._vae@{tmp_path / 'ckpt-1'}")):
            parents.append(Algorithm(optimizer=Adam()))
            parents[-1]._vae = make('gaussian', prior=True, seed=seed, beta=beta, target_kld_per_dim=1.0,
                                    checkpoint=checkpoint)
        saved, other = (parent._vae for parent in parents)
        parents[0].finalize()
        Checkpointer(str(tmp_path), alg=parents[0]).save(1)
        assert not any(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters()) if a.any())
        parents[1].finalize()
        assert other.pre_loaded and other._log_beta.item() == pytest.approx(math.log(0.2))
        assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), other.parameters()))

    def test_the_default_network_concatenates_a_nest(self):
        vae = make('gaussian', NESTED)
        assert vae.train_step(inputs_of(NESTED)).output.z.shape == (6, 3)
        assert [p.shape for p in vae._encoder.parameters() if p.ndim == 2] == [(6, 8), (6, 6)]

    def test_with_a_prior_the_default_network_sees_prior_input_input_and_prior(self):
        vae = make('gaussian', NESTED, prior=True)
        assert vae._encoder.input_tensor_spec == (PRIOR_INPUT, NESTED, TensorSpec((6, )))
        assert vae.train_step(inputs_of((PRIOR_INPUT, NESTED))).output.z.shape == (6, 3)

    def test_networks_can_be_instances_or_constructors(self):
        network = EncodingNetwork(IMAGE, fc_layer_params=(9, ))
        assert VariationalAutoEncoder(2, preprocess_network=network)._encoder is network
        constructed = VariationalAutoEncoder(2, IMAGE, partial(EncodingNetwork, fc_layer_params=(9, )))
        assert constructed._encoder.input_tensor_spec == IMAGE

    def test_the_divergence_matches_the_outputs(self):
        step = make('gaussian').train_step(inputs_of(IMAGE))
        torch.testing.assert_close(step.info.kld, gaussian_kld(step.output.z_mode, 2 * step.output.z_std.log()))
        assert torch.equal(step.info.z_std, step.output.z_std)

    def test_contradictions_are_rejected_by_name(self):
        network = EncodingNetwork(IMAGE, fc_layer_params=(9, ))
        with pytest.raises(ValueError, match='input_tensor_spec is required'):
            VariationalAutoEncoder(2)
        with pytest.raises(SpecError, match='preprocess_network: expected a network with the input spec'):
            VariationalAutoEncoder(2, TensorSpec((3, )), network)
        with pytest.raises(SpecError, match='preprocess_network: expected a network with the input spec'):
            VariationalAutoEncoder(2, IMAGE, network, EncodingNetwork(PRIOR_INPUT, fc_layer_params=(4, )))
        with pytest.raises(SpecError, match=r'z_prior_network: expected an output of shape \(4,\)'):
            VariationalAutoEncoder(2, IMAGE, z_prior_network=EncodingNetwork(PRIOR_INPUT, fc_layer_params=(5, )))
        with pytest.raises(ValueError, match='z_prior_network: expected a Network'):
            VariationalAutoEncoder(2, IMAGE, z_prior_network=EncodingNetwork)
        with pytest.raises(ValueError, match='is recurrent'):
            memory = Sequential(LSTMCell(3, 4), input_tensor_spec=TensorSpec((3, )))
            VariationalAutoEncoder(2, preprocess_network=memory)
        with pytest.raises(ValueError, match='beta_optimizer has no parameters'):
            VariationalAutoEncoder(2, IMAGE, beta_optimizer=Adam(lr=1e-3))
        for args in (dict(beta=-1.0), dict(beta=0.0, target_kld_per_dim=1.0), dict(target_kld_per_dim=0.0)):
            with pytest.raises(ConfError):
                VariationalAutoEncoder(2, IMAGE, **args)


class TestDiscrete:

    def test_the_standard_deviation_is_that_of_bernoulli_variables(self):
        z_std = make('st').train_step(inputs_of(IMAGE)).output.z_std
        assert (z_std >= 0).all() and (z_std <= 0.5).all() and not z_std.requires_grad

    def test_z_mode_is_the_most_likely(self):
        vae = make('st-gumbel')
        inputs = inputs_of(IMAGE)
        logits = vae._encoder(inputs)[0].view(6, 2, 4)
        assert torch.equal(vae.train_step(inputs).output.z_mode.argmax(-1), logits.argmax(-1))

    def test_the_temperature_may_follow_a_schedule(self):
        context.reset()
        schedule = LinearScheduler(progress_type='percent', schedule=[(0.0, 1.0), (1.0, 0.1)])
        vae = make('st-gumbel', gumbel_temp_scheduler=schedule)
        assert not vae.capabilities.traceable_update  # the traced update would contain the number as a constant
        gradients = []
        for progress in (0.0, 1.0):
            context.update_progress('percent', progress)
            torch.manual_seed(0)
            z = vae.train_step(torch.ones(1, 1, 4, 4)).output.z
            vae.zero_grad()
            z[..., 0].sum().backward()
            gradients.append(vae._encoder._chain[-1].bias.grad.clone())
        assert not torch.allclose(*gradients)

    def test_the_spec_for_conf_files(self):
        gin.clear_config()
        gin.parse_config('DiscreteVAE.z_spec = @categorical_spec()\ncategorical_spec.num_variables = 2\n'
                         'categorical_spec.num_values = 4')
        assert DiscreteVAE(input_tensor_spec=IMAGE).output_spec == TensorSpec((2, 4))

    @pytest.mark.parametrize('spec', [
        TensorSpec((2, ), torch.int64), BoundedTensorSpec((2, ), torch.int64, 1, 3), BoundedTensorSpec((2, )),
        BoundedTensorSpec((), torch.int64, 0, 3), BoundedTensorSpec((2, ), torch.int64, 0, [3, 4])], ids=str)
    def test_other_specs_are_rejected(self, spec):
        with pytest.raises(SpecError, match=r'z_spec: expected a bounded int spec of shape \(n,\)'):
            DiscreteVAE(spec, IMAGE)

    def test_contradictions_are_rejected_by_name(self):
        with pytest.raises(ConfError, match="'st-gumbel'"):
            make('gumbel')
        with pytest.raises(ConfError, match="DiscreteVAE.gumbel_temp_scheduler has no effect with mode='st'"):
            make('st', gumbel_temp_scheduler=0.5)
        with pytest.raises(ValueError, match='must be given together'):
            make('st', prior_z_network_cls=EncodingNetwork)
        with pytest.raises(ValueError, match='input_tensor_spec is required'):
            make('st', spec=None)
        with pytest.raises(SpecError, match='z_network_cls: expected an output'):
            make('st', z_network_cls=lambda input_tensor_spec, **_: EncodingNetwork(input_tensor_spec))
