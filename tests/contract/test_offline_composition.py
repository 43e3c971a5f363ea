"""Algorithms that learn from datasets, combined with all kinds of observations and parts of an agent.

Each algorithm is tested with every kind of observation and every part, and each pair of these with some algorithm. The
agent trains on a dataset alone and mixed with collected data, is saved, and acts as before; or an error explains why
the combination is not supported.
"""
from functools import partial

import pytest
import torch
from helpers import sac_agents
from helpers.offline_agents import differences, make_agent, parameters, record

from alfx import context
from alfx.algorithms.awac_algorithm import AwacAlgorithm
from alfx.algorithms.bc_algorithm import BcAlgorithm
from alfx.algorithms.causal_bc_algorithm import CausalBcAlgorithm
from alfx.algorithms.cql_algorithm import CqlAlgorithm, DiscreteCqlAlgorithm
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.encoding_algorithm import EncodingAlgorithm
from alfx.algorithms.icm_algorithm import ICMAlgorithm
from alfx.algorithms.iql_algorithm import IqlAlgorithm
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.algorithms.td3_algorithm import Td3Algorithm
from alfx.algorithms.td3_bc_algorithm import Td3BcAlgorithm
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.layers import Cast, OneHot, Reshape, Scale, Sequential
from alfx.nest.utils import NestConcat
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.actor_networks import ActorNetwork
from alfx.networks.critic_networks import CriticNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.q_networks import QNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.tensor_specs import BoundedTensorSpec

IMAGE = BoundedTensorSpec((1, 4, 4), torch.uint8, 0, 255)
NUMBER = BoundedTensorSpec((), torch.int64, 0, 4)
OBSERVATIONS = {  # spec, function from a signal [B, 1] to an observation, network arguments that make it a vector
    'vector': (None, lambda x: x, None),
    'number': (NUMBER, lambda x: (2 + 2 * x[:, 0]).long(), OneHot(5)),
    'image': (IMAGE, lambda x: (100 + 50 * x).to(torch.uint8)[..., None, None].expand(-1, 1, 4, 4).clone(),
              Sequential(Cast(), Scale(1 / 255), Reshape(-1))),
    'dict': ({'signal': BoundedTensorSpec((1, ), torch.float32, -1, 1), 'number': NUMBER},
             lambda x: {'signal': x, 'number': (2 + 2 * x[:, 0]).long()}, {'signal': None, 'number': OneHot(5)}),
}


class SeenEnv(PolicyUnittestEnv):
    """An environment whose observation is the signal in one of the forms of ``OBSERVATIONS``."""

    def __init__(self, batch_size, form, action_type):
        self._form = form
        super().__init__(batch_size, episode_length=5, action_type=action_type)

    def observation_spec(self):
        return OBSERVATIONS[self._form][0] or super().observation_spec()

    def _observe(self):
        return OBSERVATIONS[self._form][1](super()._observe())


def vector_of(form):
    """Return network arguments that turn an observation into one vector."""
    processors = OBSERVATIONS[form][2]
    if processors is None:
        return {}
    return dict(input_preprocessors=processors, **(
        dict(preprocessing_combiner=NestConcat()) if isinstance(processors, dict) else {}))


def networks(form):
    """Return constructors of the networks for observations of a form, by role."""
    seen = vector_of(form)
    critic_names = {{'input_preprocessors': 'observation_input_processors',
                     'preprocessing_combiner': 'observation_preprocessing_combiner'}[key]: x for key, x in seen.items()}
    layers = dict(fc_layer_params=(8, ))
    return {'actor': partial(ActorNetwork, **layers, **seen),
            'distribution': partial(ActorDistributionNetwork, continuous_projection_net_ctor=sac_agents.squashed_normal,
                                    **layers, **seen),
            'critic': partial(CriticNetwork, joint_fc_layer_params=(8, ), **critic_names),
            'q': partial(QNetwork, **layers, **seen), 'value': partial(ValueNetwork, **layers, **seen),
            'encoding': partial(EncodingNetwork, **layers, **seen)}


def deterministic(cls, net, **kwargs):
    return partial(cls, actor_network_ctor=net['actor'], critic_network_ctor=net['critic'], **kwargs)


def stochastic(cls, net, **kwargs):
    return partial(cls, actor_network_cls=net['distribution'], critic_network_cls=net['critic'], **kwargs)


CONTINUOUS, DISCRETE = ActionType.Continuous, ActionType.Discrete
ALGORITHMS = {
    'bc': (CONTINUOUS, lambda net: partial(BcAlgorithm, actor_network_cls=net['distribution'])),
    'bc, discrete': (DISCRETE, lambda net: partial(BcAlgorithm, actor_network_cls=net['distribution'])),
    'causal bc': (CONTINUOUS, lambda net: partial(CausalBcAlgorithm, actor_network_cls=net['actor'],
                                                  discriminator_network_cls=net['encoding'])),
    'iql': (CONTINUOUS, lambda net: stochastic(IqlAlgorithm, net, v_network_cls=net['value'])),
    'td3+bc': (CONTINUOUS, lambda net: deterministic(Td3BcAlgorithm, net)),
    'awac': (CONTINUOUS, lambda net: stochastic(AwacAlgorithm, net)),
    'cql': (CONTINUOUS, lambda net: stochastic(CqlAlgorithm, net, num_sampled_actions=2)),
    'sac': (CONTINUOUS, lambda net: stochastic(SacAlgorithm, net, q_network_cls=None)),
    'sac, discrete': (DISCRETE, lambda net: partial(SacAlgorithm, actor_network_cls=None, critic_network_cls=None,
                                                    q_network_cls=net['q'])),
    'td3': (CONTINUOUS, lambda net: deterministic(Td3Algorithm, net)),
    'dqn': (DISCRETE, lambda net: partial(DqnAlgorithm, q_network_cls=net['q'])),
    'cql, discrete': (DISCRETE, lambda net: partial(DiscreteCqlAlgorithm, q_network_cls=net['q'])),
}
PARTS = ('none', 'representation', 'icm', 'entropy target')
POLICIES = {'iql', 'awac', 'cql', 'sac', 'sac, discrete'}  # algorithms with an action distribution
CELLS = [(name, form, PARTS[(number + i) % len(PARTS)]) for number, name in enumerate(ALGORITHMS)
         for i, form in enumerate(OBSERVATIONS)]


def agent_of(name, form, part, path, unroll_length):
    """Return an agent that learns from the dataset at ``path``."""
    action_type, ctor = ALGORITHMS[name]
    args = {}
    if part == 'representation':
        args['representation_learner_cls'] = partial(EncodingAlgorithm, encoder_cls=networks(form)['encoding'])
    elif part == 'icm':
        args['intrinsic_reward_module'] = partial(
            ICMAlgorithm, hidden_size=8, encoding_net=networks(form)['encoding'], observation_adapt_speed=None)
    elif part == 'entropy target':
        args['enforce_entropy_target'] = True
    net = networks('vector' if part == 'representation' else form)
    return make_agent(ctor(net), path, form_name(form, action_type), unroll_length=unroll_length, agent_args=args)


def form_name(form, action_type):
    return f'{form}, {action_type.name}'


@pytest.fixture(autouse=True, scope='module')
def environments():
    more = {form_name(form, action): partial(SeenEnv, form=form, action_type=action)
            for form in OBSERVATIONS for action in ActionType}
    sac_agents.ENVIRONMENTS.update(more)
    yield
    for name in more:
        del sac_agents.ENVIRONMENTS[name]


@pytest.fixture(scope='module')
def dataset(tmp_path_factory):
    """Return a function that yields the dataset of an environment, the same one at each call."""
    folder, folders = tmp_path_factory.mktemp('data'), {}

    def path(environment):
        if environment not in folders:
            folders[environment] = record(folder / environment.replace(', ', '_'), environment)
        return folders[environment]

    return path


def act(agent, time_step):
    """Return the action of the policy at the first step of its environment."""
    context.reset()
    state = agent.get_initial_predict_state(len(time_step.step_type))
    torch.manual_seed(1)
    with context.eval_context(), torch.no_grad():
        return agent.predict_step(agent.transform_timestep(time_step, ())[0], state).output


@pytest.mark.parametrize('name, form, part', CELLS, ids=lambda x: x)
def test_it_learns_is_saved_and_acts(name, form, part, dataset):
    path = dataset(form_name(form, ALGORITHMS[name][0]))
    for unroll_length in (0, 4):
        if part == 'entropy target' and name not in POLICIES:
            with pytest.raises(ValueError, match="enforce_entropy_target needs an 'action_distribution'"):
                agent_of(name, form, part, path, unroll_length).train_iter()
            return
        agent = agent_of(name, form, part, path, unroll_length)
        before = parameters(agent)
        for _ in range(2):
            agent.train_iter()
            context.increment_global_counter()
        changed = differences(before, parameters(agent))
        own = {'_rl_algorithm': 'none', '_representation_learner': 'representation', '_irm': 'icm'}
        for attribute, of in own.items():
            assert part != of or any(attribute in x for x in changed), f'{attribute} of {changed}'
        assert all(torch.isfinite(x).all() for x in parameters(agent).values())
        restored = agent_of(name, form, part, path, unroll_length)
        restored.load_state_dict(agent.state_dict())
        seen = agent.environment.current_time_step()
        assert torch.equal(act(agent, seen), act(restored, seen))
