"""Capabilities of wrappers and containers, joined from their contents by one rule each."""
from functools import partial

import pytest
import torch

from alfx.algorithms.agent import Agent
from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.containers import AlgorithmContainer, EchoAlg, RLAlgWrapper, SequentialAlg
from alfx.algorithms.dynamic_action_repeat_agent import DynamicActionRepeatAgent
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.trac_algorithm import TracAlgorithm
from alfx.engine.capabilities import Capabilities
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec
from helpers.agents import ALGORITHMS, make_agent

OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((2, ), minimum=-1.0, maximum=1.0)
ANY = ('needs_previous_step', 'needs_two_steps', 'bootstraps_sequences', 'trains_after_iteration',
       'postprocesses_unrolls', 'has_offline_hooks')
ALL = ('traceable_update', 'trains_sequences_at_once')
ACTING = ('recomputes_rollout_info', 'traceable_prediction')
MOST = Capabilities(**dict.fromkeys((*ALL, *ACTING), True))


class Inner(OffPolicyAlgorithm):
    """An algorithm with the capabilities in ``declared``."""

    declared = MOST

    def __init__(self, observation_spec=OBSERVATION, action_spec=ACTION, reward_spec=TensorSpec(()), config=None,
                 debug_summaries=False):
        super().__init__(observation_spec, action_spec, train_state_spec=(), reward_spec=reward_spec, config=config,
                         name='inner')

    def own_capabilities(self):
        return self.declared


def inner(**capabilities):
    algorithm = Inner()
    algorithm.declared = MOST._replace(**capabilities)
    return algorithm


class Container(AlgorithmContainer):
    def own_capabilities(self):
        return super().own_capabilities()._replace(traceable_update=True)


WRAPPERS = {
    'agent': lambda part: Agent(OBSERVATION, ACTION, rl_algorithm_cls=lambda **_: part),
    'wrapper': lambda part: RLAlgWrapper(OBSERVATION, ACTION, algorithm=part),
    'trust region': lambda part: TracAlgorithm(OBSERVATION, ACTION, ac_algorithm_cls=lambda **_: part),
    'container': lambda part: Container({'a': part, 'b': inner()}),
    'sequence': lambda part: SequentialAlg(a=part, b=inner()),
    'echo': lambda part: EchoAlg(part, TensorSpec(())),
    'action repeat': lambda part: DynamicActionRepeatAgent(OBSERVATION, ACTION, K=2, rl_algorithm_cls=lambda *_, **__:
                                                           part),
    'twice': lambda part: Agent(OBSERVATION, ACTION, rl_algorithm_cls=lambda **_: RLAlgWrapper(
        OBSERVATION, ACTION, algorithm=part)),
}
every_wrapper = pytest.mark.parametrize('wrap', WRAPPERS.values(), ids=WRAPPERS)


def test_every_capability_has_a_rule():
    assert {*ANY, *ALL, *ACTING} == set(Capabilities._fields)


@every_wrapper
@pytest.mark.parametrize('capability', ANY)
def test_any_rules_are_true_if_one_part_is_true(wrap, capability):
    assert not getattr(wrap(inner()).capabilities, capability)
    assert getattr(wrap(inner(**{capability: True})).capabilities, capability)


@every_wrapper
@pytest.mark.parametrize('capability', [*ALL, *ACTING])
def test_all_rules_are_false_if_one_part_is_false(wrap, capability):
    assert not getattr(wrap(inner(**{capability: False})).capabilities, capability)


@pytest.mark.parametrize('name', ['agent', 'wrapper', 'twice'])
def test_pure_wrappers_have_the_capabilities_of_their_content(name):
    assert WRAPPERS[name](inner()).capabilities == MOST


@pytest.mark.parametrize('name', ['container', 'sequence', 'echo', 'action repeat'])
def test_wrappers_that_change_acting_are_neither_recomputed_nor_traced(name):
    assert not any(getattr(WRAPPERS[name](inner()).capabilities, capability) for capability in ACTING)


def test_overridden_updates_need_a_declaration_by_their_author():
    class Silent(Inner):
        pass

    class Explicit(Inner):
        own_capabilities = Inner.own_capabilities

    assert Explicit().capabilities == MOST
    assert Silent().capabilities == MOST._replace(traceable_update=False, traceable_prediction=False)
    assert not Agent(OBSERVATION, ACTION, rl_algorithm_cls=lambda **_: Silent()).capabilities.traceable_update


def test_a_container_subclass_with_after_train_iter_declares_it():
    class Trains(AlgorithmContainer):
        def after_train_iter(self, root_inputs, rollout_info):
            pass

    assert Trains({'a': inner()}).capabilities.trains_after_iteration


def test_parts_are_found_wherever_modules_keep_them():
    class Holds(Algorithm):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleDict({'x': torch.nn.ModuleList([inner(needs_previous_step=True)])})

    assert Holds().capabilities.needs_previous_step


@pytest.mark.parametrize('settings', [{}, dict(mini_batch_length=2), dict(mini_batch_length=1)], ids=str)
def test_impala_in_a_wrapper_trains_as_without_it(settings):
    impala = partial(ALGORITHMS['impala'], actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(16, )),
                     value_network_ctor=partial(ValueNetwork, fc_layer_params=(16, )))
    trained = []
    for policy in (impala, partial(RLAlgWrapper, algorithm=impala)):
        agent, _ = make_agent('impala', 'discrete', seed=3, unroll_length=8, rl_algorithm_cls=policy, **settings)
        steps = [agent.train_iter() for _ in range(3)]
        trained.append((steps, [p.detach() for p in agent.parameters()]))
    assert trained[0][0] == trained[1][0]
    for a, b in zip(trained[0][1], trained[1][1], strict=True):
        assert torch.equal(a, b)
