"""The steps of a sequence that each hook is called for, and the use of its results."""
import pytest
import torch

from alfx.algorithms.algorithm import Algorithm
from alfx.algorithms.bootstrapped_algorithm import BootstrappedAlgorithm
from alfx.data_structures import BatchInfo, TimeStep, namedtuple
from alfx.tensor_specs import TensorSpec

BATCH = 3
Info = namedtuple('Info', ['action', 'discounted_return'], default_value=())


class Noting(BootstrappedAlgorithm):
    """An algorithm whose hooks return the observations of their rows, and record them and whether gradients are on."""

    def __init__(self, on_last_step=True, from_first_step=False, state_spec=()):
        super().__init__(train_state_spec=state_spec)
        self._train_actor_on_last_step, self._bootstraps_from_first_step = on_last_step, from_first_step
        self.seen = []

    def note(self, hook, rows):
        times = (rows.observation // 10).reshape(-1, BATCH)[:, 0].tolist()
        self.seen.append((hook, times, torch.is_grad_enabled()))
        assert torch.equal(rows.observation, rows.rollout_info.action)
        assert torch.equal(rows.observation, rows.inputs.observation)
        return rows.observation

    def policy_terms(self, rows, state):
        seen = self.note('policy', rows)
        return seen, seen, state

    def policy_loss(self, rows, policy, details, state):
        assert torch.equal(policy, rows.observation)
        return self.note('loss', rows), state

    def trained_values(self, rows, details, state):
        assert torch.equal(rows.of(details), rows.observation)
        return self.note('values', rows), state

    @torch.no_grad()
    def bootstrap_values(self, rows, policy, state):
        assert torch.equal(rows.of(policy), rows.observation)
        return self.note('target', rows), state

    def train_info(self, inputs, rollout_info, terms):
        return rollout_info.action, terms


def sequence(length):
    """Return observations ``10 t + b + 1``, which are never 0."""
    observation = (10 * torch.arange(length).unsqueeze(1) + torch.arange(BATCH) + 1).float()
    return TimeStep(step_type=torch.ones(length, BATCH), observation=observation), Info(action=observation)


def without(x, *times):
    x = x.clone()
    x[list(times)] = 0
    return x


@pytest.mark.parametrize('length', [2, 3, 5])
def test_values_of_all_steps_but_the_last_are_trained(length):
    """Values of all steps but the last are trained towards those of all steps but the first."""
    algorithm, (inputs, info) = Noting(), sequence(length)
    step = algorithm.train_sequence(inputs, (), info)
    steps, last = list(range(length)), length - 1
    assert algorithm.seen == [('policy', steps, True), ('loss', steps, True), ('values', steps[:-1], True),
                              ('target', steps[1:], False)]
    observation = inputs.observation
    assert torch.equal(step.output, observation) and step.state == ()
    all_expected = (observation, observation, without(observation, last), without(observation, 0))
    for found, expected in zip(step.info, all_expected):
        assert torch.equal(found, expected)


@pytest.mark.parametrize('length', [2, 3, 5])
def test_a_policy_not_trained_at_the_last_step_has_no_gradient_there(length):
    algorithm, (inputs, info) = Noting(on_last_step=False), sequence(length)
    terms = algorithm.train_sequence(inputs, (), info).info
    steps, last = list(range(length)), length - 1
    assert algorithm.seen == [('policy', steps[:-1], True), ('loss', steps[:-1], True), ('values', steps[:-1], True),
                              ('policy', steps[-1:], False), ('target', steps[1:], False)]
    assert torch.equal(terms.policy, inputs.observation)
    assert torch.equal(terms.loss, without(inputs.observation, last))
    assert torch.equal(terms.target, without(inputs.observation, 0))


def test_values_of_the_first_step_too_where_something_else_reads_them():
    algorithm, (inputs, info) = Noting(from_first_step=True), sequence(3)
    terms = algorithm.train_sequence(inputs, (), info).info
    assert algorithm.seen[-1] == ('target', [0, 1, 2], False)
    assert torch.equal(terms.target, inputs.observation)


@pytest.mark.parametrize('length, state_spec', [(1, ()), (4, TensorSpec(()))])
def test_one_step_and_steps_with_a_state_go_through_train_step(length, state_spec):
    inputs, info = sequence(length)
    state = () if state_spec == () else torch.zeros(length, BATCH)
    at_once, plain = (Noting(state_spec=state_spec) for _ in range(2))
    found, expected = at_once.train_sequence(inputs, state, info), Algorithm.train_sequence(plain, inputs, state, info)
    assert at_once.seen == plain.seen
    assert [times for _, times, _ in at_once.seen] == [list(range(length))] * 4
    for a, b in zip(found.info, expected.info):
        assert torch.equal(a, b) and torch.equal(a, inputs.observation)


def test_discounted_returns_are_passed_to_losses_that_use_them():
    algorithm, returns = Noting(), torch.arange(6.0).reshape(2, 3)
    _, info = algorithm.preprocess_experience(TimeStep(), Info(), BatchInfo(discounted_return=returns))
    assert info.discounted_return is returns
    _, info = algorithm.preprocess_experience(TimeStep(), Info(), BatchInfo())
    assert info.discounted_return == ()
    other = namedtuple('Other', ['action'], default_value=())()
    assert algorithm.preprocess_experience(TimeStep(), other, BatchInfo(discounted_return=returns))[1] is other


@pytest.mark.parametrize('hook, arguments', [('trained_values', 3), ('bootstrap_values', 3), ('train_info', 3)])
def test_a_hook_that_is_missing_is_named(hook, arguments):
    with pytest.raises(NotImplementedError, match=f'BootstrappedAlgorithm.{hook}'):
        getattr(BootstrappedAlgorithm(train_state_spec=()), hook)(*[None] * arguments)
