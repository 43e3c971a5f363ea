"""Mistakes in confs with planning or imagination are reported before the first step, with location and remedy."""
import pytest
from helpers.flag_values import flag_values

from alfx import gin_utils
from alfx.bin import check
from alfx.bin import flags as conf_flags

PLAN, IMAGINE = 'mbrl_pendulum.gin', 'mbpo_pendulum.gin'
CASES = [
    (PLAN, 'CEMPlanAlgorithm.elite_size = 300', ['mine.gin:2', 'CEMPlanAlgorithm.elite_size', '[1, 200]', '300']),
    (PLAN, 'CEMPlanAlgorithm.tau = 0.0', ['mine.gin:2', 'CEMPlanAlgorithm.tau', '> 0']),
    (PLAN, 'CEMPlanAlgorithm.planning_horizon = 0', ['mine.gin:2', 'CEMPlanAlgorithm.planning_horizon', '>= 1']),
    (PLAN, 'CEMPlanAlgorithm.lower_bound = 3.0', ['mine.gin:2', 'lower_bound', 'above the upper bound']),
    (PLAN, "create_environment.env_name = 'CartPole-v1'", ['discrete actions', 'MCTSAlgorithm']),
    (PLAN, "FixedRewardFunction.reward_func = 'pendulom'", ['mine.gin:2', "'pendulum'"]),
    (PLAN, "MbrlAlgorithm.termination_fn = 'hoper'", ['mine.gin:2', "did you mean 'hopper'"]),
    (PLAN, 'MbrlAlgorithm.planner_optimizer = @Adam()',
     ['mine.gin:2', 'planner_optimizer has no parameters to optimize']),
    (PLAN, 'MbrlAlgorithm.dynamics_module_ctor = @StochasticDynamicsAlgorithm\n'
     'StochasticDynamicsAlgorithm.dynamics_network_ctor = @DynamicsNetwork\n'
     'StochasticDynamicsAlgorithm.hidden_size = 8', ['mine.gin:3', 'predicts a tensor', 'DynamicsNetwork.prob = True']),
    (PLAN, 'Agent.rl_algorithm_cls = @LatentMbrlAlgorithm\nLatentMbrlAlgorithm.planner_module_ctor = @CEMPlanAlgorithm',
     ['representation_learner_cls', '@PredictiveRepresentationLearner']),
    (IMAGINE, 'ModelBasedPolicyAlgorithm.real_share = 2.0', ['mine.gin:2', 'real_share', '[0, 1]']),
    (IMAGINE, 'ModelBasedPolicyAlgorithm.model_optimizer = None', ['model_optimizer', '@model/Adam()']),
    (IMAGINE, 'TrainerConfig.mini_batch_length = 3', ['mine.gin:2', 'mini_batch_length', '2 steps']),
    (IMAGINE, 'TrainerConfig.data_transformer_ctor = @ObservationNormalizer', ['mine.gin:2', 'ObservationNormalizer']),
]


@pytest.mark.parametrize('base, lines, expected', CASES, ids=[lines.split(' =')[0] for _, lines, _ in CASES])
def test_an_error_is_reported_with_location_and_remedy(base, lines, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.gin').write_text(f"include '{base}'\n{lines}\n")
    try:
        with flag_values(check.PARSER, conf='mine.gin'):
            code = conf_flags.call(check.main, ['check'])
    finally:
        gin_utils.clear()
    printed = capsys.readouterr()
    assert code == 2 and 'Traceback' not in printed.err
    for text in expected:
        assert text in printed.err, printed.err
