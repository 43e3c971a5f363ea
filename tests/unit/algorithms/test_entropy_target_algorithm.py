"""Entropy targets: the three stages against values worked out by hand, losses, nests, checkpoints."""
import math

import gin
import pytest
import torch
import torch.distributions as td

from alfx import context
from alfx.algorithms.entropy_target_algorithm import (EntropyTargetAlgorithm, EntropyTargetInfo, EntropyTargetLossInfo,
                                                      NestedEntropyTargetAlgorithm, SGDEntropyTargetAlgorithm)
from alfx.data_structures import AlgStep, LossInfo, StepType
from alfx.optimizers import SGD
from alfx.tensor_specs import BoundedTensorSpec
from alfx.utils import dist_utils

SPEC = BoundedTensorSpec((2, ), torch.float32, -1., 1.)
DISCRETE = BoundedTensorSpec((), torch.int64, 0, 3)


def make(**kwargs):
    """Return an algorithm with a window of 1, so that the average is the latest entropy."""
    return EntropyTargetAlgorithm(SPEC, **{
        'initial_alpha': 1.0, 'average_window': 1, 'target_entropy': 1.0, 'max_entropy': 2.0,
        'very_slow_update_rate': 0.01, 'slow_update_rate': 0.1, 'fast_update_rate': 0.5, **kwargs})


def log_alphas(algorithm, entropies):
    return [math.log(algorithm.adjust_alpha(torch.tensor(float(e))).item()) for e in entropies]


def stage(algorithm):
    return algorithm.state_dict()['_stage'].item()


def info_of(entropy, step_type=None):
    """Return the info of entropies [T, B]."""
    entropy = torch.as_tensor(entropy)
    if step_type is None:
        step_type = torch.full(entropy.shape, StepType.MID, dtype=torch.int32)
    return EntropyTargetInfo(
        step_type=step_type, loss=LossInfo(loss=-entropy, extra=EntropyTargetLossInfo(neg_entropy=-entropy)))


class TestStages:

    def test_alpha_falls_slowly_until_the_entropy_is_below_the_maximum(self):
        algorithm = make()
        # Above 2, at 2, above: three times -0.01; at 1.9 the free stage begins and alpha stays.
        assert log_alphas(algorithm, [3.0, 2.0, 2.5, 1.9]) == pytest.approx([-0.01, -0.02, -0.03, -0.03], abs=1e-6)
        assert stage(algorithm) == 1

    def test_freely_alpha_stays_until_the_entropy_is_below_the_target(self):
        algorithm = make()
        assert log_alphas(algorithm, [1.9, 1.5, 5.0, 1.0]) == [0.0] * 4
        assert stage(algorithm) == 1
        assert log_alphas(algorithm, [0.9]) == [0.0]
        assert stage(algorithm) == 2

    def test_the_adjust_stage_by_hand(self):
        algorithm = make(skip_free_stage=True)
        found = log_alphas(algorithm, [1.5, 1.2, 1.3, 0.9, 0.8, 0.85, 0.4, 0.3, 0.6, 1.1])
        expected = [
            -0.5,  # no call before: counts as moving away, so as increasing above the target: -1 * 0.5
            -0.5 + 0.25,  # decreasing above: +0.5 * 0.5
            -0.25 - 0.5,  # increasing above: -1 * 0.5
            -0.75 + 0.45,  # crossed to below, rate 0.45; decreasing below: +1 * 0.45
            -0.30 + 0.45,  # decreasing below
            0.15 - 0.225,  # increasing below: -0.5 * 0.45
            -0.075 + 0.5,  # less than half of the target: rate 0.5 again; decreasing below
            0.425 + 0.5,  # the same
            0.925 - 0.25,  # 0.6 is above the threshold, the rate stays 0.5; increasing below
            0.675 - 0.45,  # crossed to above, rate 0.45; increasing above
        ]
        assert found == pytest.approx(expected, abs=1e-5)

    def test_constant_entropy_counts_as_moving_away_from_the_target(self):
        assert log_alphas(make(skip_free_stage=True), [0.8, 0.8, 0.8]) == pytest.approx([0.5, 1.0, 1.5], abs=1e-5)
        assert log_alphas(make(skip_free_stage=True), [1.2, 1.2, 1.2]) == pytest.approx([-0.5, -1, -1.5], abs=1e-5)

    def test_the_update_rate_falls_with_each_crossing_down_to_the_slow_one(self):
        algorithm = make(skip_free_stage=True)
        algorithm.adjust_alpha(torch.tensor(0.9))
        for crossing in range(1, 30):
            algorithm.adjust_alpha(torch.tensor(1.1 if crossing % 2 else 0.9))
            assert algorithm.state_dict()['_update_rate'].item() == pytest.approx(max(0.5 * 0.9**crossing, 0.1))

    def test_the_target_may_be_a_schedule(self):
        target = 1.0
        algorithm = make(skip_free_stage=True, target_entropy=lambda: target)
        log_alphas(algorithm, [1.5])
        # falling and above the target: half of the rate; with the target raised above it: the whole of it
        before, after = log_alphas(make(skip_free_stage=True), [1.5, 1.4])
        assert log_alphas(algorithm, [1.4]) == pytest.approx([after])
        target = 1.45
        assert log_alphas(algorithm, [1.3])[0] - after == pytest.approx(0.5, abs=1e-5)  # below it now: the whole rate

    def test_far_below_a_negative_target_means_twice_as_negative(self):
        algorithm = make(skip_free_stage=True, target_entropy=-1.0)
        for entropy, rate in ((-0.5, 0.5), (-1.5, 0.45), (-1.9, 0.45), (-2.1, 0.5)):
            algorithm.adjust_alpha(torch.tensor(entropy))
            assert algorithm.state_dict()['_update_rate'].item() == pytest.approx(rate)

    @pytest.mark.parametrize('entropies,expected', [
        ((4.0, 2.0), 2.4),  # mean 3: min(0.8 * 3, 3 / 0.8)
        ((-3.0, -1.0), -2.5),  # mean -2: min(-1.6, -2.5)
        ((-40.0, -20.0), -10.0),  # mean -30: -37.5 is below the target
    ])
    def test_the_maximum_is_estimated_from_the_first_window(self, entropies, expected):
        algorithm = make(max_entropy=None, target_entropy=-10.0, average_window=2)
        assert log_alphas(algorithm, entropies) == [0.0, 0.0]
        assert algorithm.state_dict()['_max_entropy'].item() == pytest.approx(expected)
        assert stage(algorithm) == 0

    def test_alpha_is_never_less_than_its_minimum(self):
        algorithm = make(skip_free_stage=True, min_alpha=0.3)
        assert log_alphas(algorithm, [1.5] * 5)[-1] == pytest.approx(math.log(0.3), abs=1e-5)
        algorithm = make(skip_free_stage=True, min_alpha=0.0, initial_alpha=1e-43)
        log_alphas_found = [algorithm.adjust_alpha(torch.tensor(1.5)) for _ in range(10)]
        assert algorithm.state_dict()['_log_alpha'].item() == -100.0 and log_alphas_found[-1] >= 0

    def test_entropies_are_averaged_over_the_window(self):
        algorithm = make(average_window=2)
        # Means 3, 2.25, 1.75: the third is below the maximum of 2.
        log_alphas(algorithm, [3.0, 1.5])
        assert stage(algorithm) == 0
        log_alphas(algorithm, [2.0])
        assert stage(algorithm) == 1


def test_the_rule_holds_an_entropy_near_its_target():
    # A policy whose entropy follows log(alpha) with a lag: fixed point log(alpha) = -2 for the target 1.
    algorithm = make(skip_free_stage=True, slow_update_rate=0.01)
    entropy, trace = 3.0, []
    for _ in range(400):
        log_alpha = math.log(algorithm.adjust_alpha(torch.tensor(entropy)).item())
        entropy += 0.2 * (3.0 + log_alpha - entropy)
        trace.append(entropy)
    assert all(abs(e - 1.0) < 0.2 for e in trace[-100:])


def test_nothing_is_averaged_in_evaluation():
    algorithm = make()
    with context.eval_context():
        algorithm.adjust_alpha(torch.tensor(1.9))
    assert torch.equal(algorithm._avg_entropy.get(), torch.tensor(0.0))


def test_default_targets_are_the_sum_over_specs():
    nested = {'a': SPEC, 'b': DISCRETE}
    expected = sum(dist_utils.calc_default_target_entropy(spec) for spec in nested.values())
    algorithm = EntropyTargetAlgorithm(nested, skip_free_stage=True, average_window=1, initial_alpha=1.0)
    assert algorithm._get_target_entropy() == pytest.approx(expected)
    # log(0.1 * 2) for each of two components, 0.1 * log(3 / 0.1) - 0.9 * log(0.9) for four choices.
    assert expected == pytest.approx(2 * math.log(0.2) + 0.1 * math.log(30) - 0.9 * math.log(0.9))


@pytest.mark.parametrize('kwargs,message', [
    ({'max_entropy': 0.5}, 'target_entropy <= max_entropy'),
    ({'initial_alpha': 0.0}, 'initial_alpha'),
    ({'slow_update_rate': 1.0}, 'slow_update_rate <= fast_update_rate'),
])
def test_wrong_arguments_are_rejected_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


class TestLoss:

    def test_the_entropy_covers_steps_at_which_the_policy_acted(self):
        algorithm = make()
        step_type = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
        entropy = torch.tensor([[3.0, 1.0], [2.0, 100.0]])
        loss = algorithm.calc_loss(info_of(entropy, step_type))
        # (3 + 1 + 2) / 3 = 2, not below the maximum: alpha becomes exp(-0.01).
        torch.testing.assert_close(loss.loss, -entropy * math.exp(-0.01))
        torch.testing.assert_close(algorithm._avg_entropy.get(), torch.tensor(2.0))
        torch.testing.assert_close(loss.extra.neg_entropy, -entropy)

    def test_masked_steps_do_not_count(self):
        algorithm = make()
        algorithm.calc_loss(info_of([[3.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
        assert algorithm._avg_entropy.get().item() == 1.0

    @pytest.mark.parametrize('cls', [EntropyTargetAlgorithm, SGDEntropyTargetAlgorithm])
    def test_without_any_step_alpha_stays(self, cls):
        algorithm = cls(SPEC, initial_alpha=0.5)
        loss = algorithm.calc_loss(info_of([[3.0]], torch.tensor([[2]], dtype=torch.int32)))
        assert loss.loss.tolist() == [[-1.5]]
        assert algorithm._avg_entropy.get().item() == 0.0

    def test_gradients_reach_the_policy_and_not_alpha(self):
        algorithm = make(skip_free_stage=True)
        scale = torch.ones(3, 2, requires_grad=True)
        policy = td.Independent(td.Normal(torch.zeros(3, 2), scale, validate_args=False), 1, validate_args=False)
        step = algorithm.train_step((policy, torch.ones(3, dtype=torch.int32)))
        assert step.info.loss.loss.tolist() == pytest.approx([-2 * 0.5 * math.log(2 * math.pi * math.e)] * 3)
        info = EntropyTargetInfo(
            step_type=step.info.step_type.unsqueeze(0),
            loss=LossInfo(loss=step.info.loss.loss.unsqueeze(0),
                          extra=EntropyTargetLossInfo(neg_entropy=step.info.loss.extra.neg_entropy.unsqueeze(0))))
        loss = algorithm.calc_loss(info)
        loss.loss.sum().backward()
        # d(-alpha * log(scale)) / d(scale) = -alpha; the entropy 2.84 is above the target: alpha = exp(-0.5).
        torch.testing.assert_close(scale.grad, torch.full((3, 2), -math.exp(-0.5)))


@pytest.mark.parametrize('cls', [EntropyTargetAlgorithm, NestedEntropyTargetAlgorithm, SGDEntropyTargetAlgorithm])
def test_steps_return_what_the_training_mode_needs(cls):
    algorithm = cls(DISCRETE)
    policy = td.Categorical(logits=torch.zeros(5, 4), validate_args=False)
    inputs = (policy, torch.ones(5, dtype=torch.int32))
    assert algorithm.predict_step(inputs) == AlgStep()
    algorithm.set_on_policy(False)
    assert algorithm.rollout_step(inputs) == AlgStep()
    torch.testing.assert_close(algorithm.train_step(inputs).info.loss.loss, torch.full((5, ), -math.log(4)))
    on_policy = cls(DISCRETE)
    on_policy.set_on_policy(True)
    info = on_policy.rollout_step(inputs).info
    torch.testing.assert_close(info.loss.extra.neg_entropy, torch.full((5, ), -math.log(4)))


@pytest.mark.parametrize('cls', [EntropyTargetAlgorithm, SGDEntropyTargetAlgorithm])
def test_resuming_from_a_checkpoint_is_exact(cls):
    kwargs = dict(initial_alpha=1.0, target_entropy=1.0)
    if cls is EntropyTargetAlgorithm:
        kwargs.update(max_entropy=2.0)

    def losses(algorithm, entropies):
        return [algorithm.calc_loss(info_of([[e]])).loss.item() for e in entropies]

    first, second = cls(SPEC, **kwargs), cls(SPEC, **kwargs)
    losses(first, [1.9, 0.9, 0.8, 1.2])
    second.load_state_dict(first.state_dict())
    assert losses(first, [1.1, 0.7, 0.3, 2.0]) == losses(second, [1.1, 0.7, 0.3, 2.0])


class TestNested:
    spec = {'a': SPEC, 'b': DISCRETE}

    def test_each_action_has_its_own_alpha_and_the_losses_are_added_up(self):
        algorithm = NestedEntropyTargetAlgorithm(
            self.spec, initial_alpha=1.0, max_entropy={'a': 2.0, 'b': 1.0}, target_entropy=0.5, average_window=1,
            very_slow_update_rate=0.01)
        entropy = torch.tensor([[1.5]])
        loss = algorithm.calc_loss({'a': info_of(entropy), 'b': info_of(entropy)})
        # Below the maximum of a: alpha 1. Not below that of b: alpha exp(-0.01).
        torch.testing.assert_close(loss.loss, -entropy * (1 + math.exp(-0.01)))
        assert loss.extra['a'].neg_entropy.item() == -1.5

    def test_steps_take_each_distribution_by_itself(self):
        algorithm = NestedEntropyTargetAlgorithm(self.spec)
        normal = td.Independent(td.Normal(torch.zeros(3, 2), torch.ones(3, 2), validate_args=False), 1)
        policy = {'a': normal, 'b': td.Categorical(logits=torch.zeros(3, 4), validate_args=False)}
        info = algorithm.train_step((policy, torch.ones(3, dtype=torch.int32))).info
        assert info['b'].loss.loss.tolist() == pytest.approx([-math.log(4)] * 3)
        assert info['a'].loss.loss.tolist() == pytest.approx([-math.log(2 * math.pi * math.e)] * 3)
        with pytest.raises(ValueError, match='2 distributions'):
            algorithm.train_step((policy['a'], torch.ones(3, dtype=torch.int32)))

    def test_targets_have_the_structure_of_the_actions_or_are_one_for_all(self):
        algorithm = NestedEntropyTargetAlgorithm(self.spec, target_entropy={'a': None, 'b': 0.3})
        assert [a._get_target_entropy() for a in algorithm.members()] == pytest.approx([2 * math.log(0.2), 0.3])
        with pytest.raises(ValueError):
            NestedEntropyTargetAlgorithm(self.spec, target_entropy={'a': 1.0})


class TestSGD:

    def test_a_step_moves_log_alpha_by_the_error_of_the_entropy(self):
        algorithm = SGDEntropyTargetAlgorithm(SPEC, initial_alpha=0.5, target_entropy=1.0)
        loss = algorithm.calc_loss(info_of([[1.25, 1.75]]))
        torch.testing.assert_close(loss.loss, torch.tensor([[-0.625, -0.875]]))
        optimizer = SGD(algorithm.parameters(), lr=0.1)
        loss.scalar_loss.backward()
        optimizer.step()
        # log(0.5) - 0.1 * (1.5 - 1.0)
        assert algorithm._log_alpha.item() == pytest.approx(math.log(0.5) - 0.05)

    def test_a_target_may_be_a_schedule_and_the_entropy_an_average(self):
        target = 1.0
        algorithm = SGDEntropyTargetAlgorithm(SPEC, initial_alpha=math.e, target_entropy=lambda: target, window_size=2)
        assert algorithm.calc_loss(info_of([[2.0]])).scalar_loss.item() == pytest.approx(1.0)
        target = 0.5
        assert algorithm.calc_loss(info_of([[4.0]])).scalar_loss.item() == pytest.approx(2.5)

    def test_its_optimizer_owns_alpha(self):
        optimizer = SGD(lr=0.1)
        assert SGDEntropyTargetAlgorithm(SPEC, optimizer=optimizer).default_optimizer is optimizer


def test_a_conf_file_sets_its_arguments():
    gin.parse_config('EntropyTargetAlgorithm.min_alpha = 0.25\nSGDEntropyTargetAlgorithm.window_size = 7')
    assert EntropyTargetAlgorithm(SPEC)._min_log_alpha == pytest.approx(math.log(0.25))
