"""Policies of the shipped confs act the same after export to a file, or are rejected by name."""
import pytest

from alfx import gin_utils
from alfx.norm_layers import BatchNorm
from alfx.runs import building
from alfx.runs import exporting
from alfx.runs import playing
from alfx.runs.policy import Policy


@pytest.fixture
def policy_of(tmp_path):
    """Return the policy of a conf, with random parameters, and its environment."""
    opened = []

    def make(conf):
        gin_utils.load(conf, ['create_environment.nonparallel = True'], allow_unused=True)
        config = playing.run_config(str(tmp_path / 'run'), 1)
        opened.append(building.create_eval_environment(config, 1))
        algorithm = building.create_algorithm(config, opened[-1], trains=False)
        building.set_epsilon_greedy(algorithm, 0.0)
        return Policy(opened[-1], algorithm), opened[-1]

    yield make
    for env in opened:
        env.close()
    gin_utils.clear()


@pytest.mark.parametrize('conf', ['dqn_cart_pole', 'dynamic_action_repeat_pendulum', 'mpo_pendulum',
                                  'ppo_predictive_masked_cart_pole', 'q_learning_frozen_lake', 'sac_mixed_actions',
                                  'taac_pendulum', 'td7_pendulum'])
def test_an_exported_policy_acts_like_the_original_policy(conf, policy_of):
    policy, env = policy_of(conf)
    step = exporting.export(policy, conf).module()
    assert exporting.greatest_differences(policy, [step], env, 60)[0] <= 1e-5


@pytest.mark.parametrize('conf', ['crossq_small_hopper', 'flash_sac_small_half_cheetah', 'xqc_small_half_cheetah'])
def test_an_exported_policy_normalizes_by_running_statistics(conf, policy_of):
    pytest.importorskip('mujoco')
    policy, env = policy_of(conf)
    for module in policy._algorithm.modules():
        if isinstance(module, BatchNorm):
            module.running_mean.uniform_(-1.0, 1.0)
            module.running_var.uniform_(0.5, 2.0)
    step = exporting.export(policy, conf).module()
    assert exporting.greatest_differences(policy, [step], env, 60)[0] <= 1e-5


@pytest.mark.parametrize('conf, reason', [('muzero_cart_pole', 'outside of torch'),
                                          ('sac_diayn_pendulum', 'draws random numbers')])
def test_an_untraceable_policy_is_rejected_by_name(conf, reason, policy_of):
    policy, _ = policy_of(conf)
    with pytest.raises(exporting.ExportError, match=f'the policy of {conf} cannot be exported: .*{reason}'):
        exporting.export(policy, conf)
