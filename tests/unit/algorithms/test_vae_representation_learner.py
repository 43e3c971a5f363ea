"""Autoencoders as a part of an agent: with each latent, on- and off-policy, nested observations, invalid settings."""
from functools import partial

import pytest
import torch
from helpers.agents import make_agent
from helpers.plans import num_graphs

from alfx import nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.handcrafted_algorithm import RandomAlgorithm
from alfx.algorithms.vae import DiscreteVAE, VariationalAutoEncoder, categorical_spec
from alfx.algorithms.vae_representation_learner import VAERepresentationLearner
from alfx.algorithms.vq_vae import Vqvae
from alfx.data_structures import TimeStep
from alfx.environments.suite_unittest import PolicyUnittestEnv
from alfx.gin_utils import ConfError
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import SpecError, TensorSpec
from alfx.utils.math_ops import identity

SPEC = TensorSpec((3, ))
NESTED = {'camera': TensorSpec((1, 2, 2)), 'speed': TensorSpec(())}


def network(size):
    return partial(EncodingNetwork, fc_layer_params=(8, ), last_layer_size=size, last_activation=identity)


def vae_of(kind, size):
    if kind == 'vq':
        return dict(vae_ctor=partial(Vqvae, num_embeddings=5, embedding_dim=2, encoder_ctor=network(4),
                                     decoder_ctor=network(size)))
    ctor = {'gaussian': partial(VariationalAutoEncoder, z_dim=2),
            'discrete': partial(DiscreteVAE, z_spec=categorical_spec(2, 3), z_network_cls=partial(
                EncodingNetwork, fc_layer_params=(8, )), mode='st-gumbel')}[kind]
    return dict(vae_ctor=ctor, decoder_ctor=network(size))


def make(kind, spec=SPEC, size=3, **args):
    torch.manual_seed(0)
    return VAERepresentationLearner(spec, **{**vae_of(kind, size), **args})


KINDS = ('gaussian', 'discrete', 'vq')
every_kind = pytest.mark.parametrize('kind', KINDS)


@every_kind
class TestLearner:

    def test_steps_yield_the_latent_as_a_vector_and_measures(self, kind):
        learner = make(kind)
        step = learner.train_step(TimeStep(observation=torch.rand(5, 3)))
        assert step.output.shape == (5, learner.output_spec.numel) and step.info.loss.shape == (5, )
        info = learner.predict_step(TimeStep(observation=torch.rand(5, 3))).info
        assert all(getattr(info, name).shape == (5, ) for name in ('reconstruction', 'kld', 'elbo'))
        assert (info.perplexity == ()) == (info.codebook_use == ()) == (kind != 'vq')
        assert all(x.ndim == 1 for x in nest.flatten(info))

    def test_the_reconstruction_is_the_mean_squared_error(self, kind):
        learner, x = make(kind), torch.rand(5, 3)
        torch.manual_seed(1)
        info = learner.predict_step(TimeStep(observation=x)).info
        torch.manual_seed(1)
        encoded = learner.vae.train_step(x).output
        z = encoded if kind == 'vq' else encoded.z.flatten(1)
        torch.testing.assert_close(info.reconstruction, (learner.decode(z) - x).square().mean(1))

    def test_a_field_of_a_nest_alone_or_with_the_other_fields(self, kind):
        observation = {'camera': torch.rand(4, 1, 2, 2), 'speed': torch.rand(4)}
        single = make(kind, NESTED, 4, observation_field='camera')
        with_others = make(kind, NESTED, 4, observation_field='camera', keep_other_fields=True)
        assert single.output_spec == TensorSpec((single.output_spec.numel, ))
        assert with_others.output_spec == {'camera': single.output_spec, 'speed': NESTED['speed']}
        for method in ('rollout_step', 'predict_step', 'train_step'):
            output = getattr(with_others, method)(TimeStep(observation=observation)).output
            assert getattr(single, method)(TimeStep(observation=observation)).output.shape == output['camera'].shape
            assert output['speed'] is observation['speed'] and observation['camera'].shape == (4, 1, 2, 2)
        assert single.decode(output['camera']).shape == (4, 1, 2, 2)

    def test_the_policy_trains_the_encoder_unless_it_is_detached(self, kind):
        for detach in (False, True):
            output = make(kind, detach_output=detach).train_step(TimeStep(observation=torch.rand(5, 3))).output
            assert output.requires_grad == (not detach)

    @pytest.mark.parametrize('algorithm', ['ppo', 'actor-critic'])
    @pytest.mark.parametrize('environment', ['discrete', 'continuous'])
    def test_an_agent_trains_all_of_it_reproducibly(self, kind, algorithm, environment):
        def trained(seed):
            agent, env = make_agent(algorithm, environment, seed=seed, representation_learner_cls=partial(
                VAERepresentationLearner, **vae_of(kind, 1)))
            before = [p.detach().clone() for p in agent.parameters()]
            for _ in range(3):
                agent.train_iter()
            return agent, env, before

        agent, env, before = trained(2)
        untouched = [name for (name, p), old in zip(agent.named_parameters(), before) if torch.equal(p, old)]
        assert untouched == []
        repeated, _, _ = trained(2)
        assert all(torch.equal(a, b) for a, b in zip(agent.parameters(), repeated.parameters()))
        step = agent.predict_step(env.current_time_step(), agent.get_initial_predict_state(4))
        assert {'repr/reconstruction', 'repr/kld', 'repr/elbo'} <= set(agent.measures(step.info))
        other, _ = make_agent(algorithm, environment, seed=7, representation_learner_cls=partial(
            VAERepresentationLearner, **vae_of(kind, 1)))
        other.load_state_dict(agent.state_dict())
        infos = []
        for one in (agent, other):
            torch.manual_seed(0)
            infos.append(one.predict_step(env.current_time_step(), one.get_initial_predict_state(4)))
        assert all(torch.equal(a, b) for a, b in zip(nest.flatten(infos[0]), nest.flatten(infos[1])))

    def test_replayed_updates_with_random_actions_match_eager_ones(self, kind, warm_up):
        results = []
        for updates_before in (2, 10**6):
            warm_up(updates_before)
            agent = random_agent(kind, batch_size=1)
            for _ in range(4):
                agent.train_iter()
            results.append([p.detach().clone() for p in agent.parameters()])
            assert bool(num_graphs(agent)) == (updates_before == 2)
        for a, b in zip(*results):
            torch.testing.assert_close(a, b)


def random_agent(kind, batch_size):
    torch.manual_seed(0)
    env = PolicyUnittestEnv(batch_size=batch_size, episode_length=5)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=8, mini_batch_length=1,
                           num_updates_per_train_iter=3, whole_replay_buffer_training=False, clear_replay_buffer=False)
    agent = Agent(env.observation_spec(), env.action_spec(), env=env, config=config, optimizer=Adam(lr=1e-2),
                  rl_algorithm_cls=RandomAlgorithm,
                  representation_learner_cls=partial(VAERepresentationLearner, **vae_of(kind, 1)))
    agent.set_path('')
    agent.finalize()
    return agent


def test_a_sample_can_be_the_output_instead_of_the_mode():
    for output in ('z', 'z_mode'):
        learner, time_step = make('gaussian', output=output), TimeStep(observation=torch.ones(2, 3))
        outputs = [learner.rollout_step(time_step).output for _ in range(2)]
        assert torch.equal(*outputs) == (output == 'z_mode')
        assert torch.equal(learner.predict_step(time_step).output, outputs[0]) == (output == 'z_mode')


def test_reconstructions_of_bernoulli_pixels_are_probabilities():
    learner, x = make('gaussian', likelihood='bernoulli'), torch.rand(5, 3)
    decoded = learner.decode(10 * torch.randn(5, 2))
    assert (decoded >= 0).all() and (decoded <= 1).all()
    info = learner.predict_step(TimeStep(observation=x)).info
    assert (info.elbo < 0).all() and (info.reconstruction <= 1).all()


def tensors(module):
    return {name: x.detach().clone() for name, x in (*module.named_parameters(), *module.named_buffers())}


def test_evaluation_changes_nothing_and_only_the_rollout_counts_codes():
    learner, time_step = make('vq'), TimeStep(observation=torch.rand(4, 3))
    assert learner.predict_step(time_step).info.perplexity.isnan().all()
    learner.rollout_step(time_step)
    before = tensors(learner)
    assert (learner.predict_step(time_step).info.perplexity >= 1).all()
    learner.train_step(time_step)
    assert all(torch.equal(x, before[name]) for name, x in tensors(learner).items())
    learner.set_on_policy(True)
    learner.rollout_step(time_step)
    assert not torch.equal(learner.vae._usage, before['_vae._usage'])


def test_an_own_optimizer_trains_all_parameters_of_the_learner():
    agent, _ = make_agent('ppo', 'discrete', representation_learner_cls=partial(
        VAERepresentationLearner, optimizer=Adam(lr=1e-3), **vae_of('gaussian', 1)))
    learner = agent._representation_learner
    owned = {id(p) for group in learner.default_optimizer.param_groups for p in group['params']}
    assert owned == {id(p) for p in learner.parameters()}


def test_invalid_arguments_are_rejected_by_name():
    prior = EncodingNetwork(SPEC, fc_layer_params=(4, ))
    with pytest.raises(ConfError, match='vae_ctor'):
        VAERepresentationLearner(SPEC)
    with pytest.raises(ValueError, match='decoder_ctor is required'):
        make('gaussian', decoder_ctor=None)
    with pytest.raises(SpecError, match='decoder_ctor: expected an output of 3 elements'):
        make('gaussian', decoder_ctor=network(4))
    with pytest.raises(ValueError, match='learned prior'):
        make('gaussian', vae_ctor=partial(VariationalAutoEncoder, z_dim=2, z_prior_network=prior))
    with pytest.raises(ValueError, match='expected a VariationalAutoEncoder, DiscreteVAE or Vqvae'):
        make('gaussian', vae_ctor=lambda input_tensor_spec: Algorithm())
    for args in (dict(decoder_ctor=network(3)), dict(likelihood='bernoulli'), dict(output='z')):
        with pytest.raises(ValueError, match='leave out decoder_ctor, likelihood and output'):
            make('vq', **args)
    with pytest.raises(SpecError, match='observation_field'):
        make('gaussian', NESTED)
    with pytest.raises(SpecError, match='ImageScaleTransformer'):
        make('gaussian', TensorSpec((3, 8, 8), torch.uint8))
    with pytest.raises(LookupError, match="did you mean 'camera'"):
        make('gaussian', NESTED, observation_field='camara')
    with pytest.raises(ValueError, match='keep_other_fields=True needs an observation_field'):
        make('gaussian', keep_other_fields=True)
    for args in (dict(output='mean'), dict(likelihood='laplace'), dict(likelihood_std=0.0), dict(loss_weight=-1.0)):
        with pytest.raises(ConfError, match=next(iter(args))):
            make('gaussian', **args)
