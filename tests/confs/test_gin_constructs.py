"""Confs with the constructs that gin files of ALF use: each trains for a few iterations and reports no mistake."""
import pytest

from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.trainers.policy_trainer import RLTrainer

COMMON = """
# a macro that no line uses, samples of one step, and an evaluation environment in a separate scope
import alfx
unused_size = (7, 7)
hidden = (16, 16)
create_environment.env_name = 'Pendulum-v1'
create_environment.num_parallel_environments = 2
create_environment.nonparallel = 1
create_environment.eval_env_load_fn = @longer/suite_gym.load
suite_gym.load.max_episode_steps = 12
longer/suite_gym.load.max_episode_steps = 15
TrainerConfig.evaluate = 1
TrainerConfig.eval_interval = 2
TrainerConfig.num_eval_episodes = 2
TrainerConfig.num_iterations = 3
TrainerConfig.num_checkpoints = 1
TrainerConfig.summary_interval = 0
TrainerConfig.num_summaries = 1
TrainerConfig.initial_collect_steps = 20
TrainerConfig.unroll_length = 10
TrainerConfig.mini_batch_length = 1
TrainerConfig.mini_batch_size = 8
TrainerConfig.num_updates_per_train_iter = 2
TrainerConfig.replay_buffer_length = 100
TrainerConfig.clear_replay_buffer = False
"""

SARSA = """
include 'mine/common.gin'
TrainerConfig.algorithm_ctor = @Agent
Agent.rl_algorithm_cls = @SarsaAlgorithm
Agent.optimizer = @Adam(lr=1e-3)
SarsaAlgorithm.actor_network_ctor = @actor/ActorDistributionNetwork
SarsaAlgorithm.critic_network_ctor = functools.partial(@CriticNetwork, joint_fc_layer_params=%hidden)
SarsaAlgorithm.ou_stddev = 0.3
actor/ActorDistributionNetwork:
    fc_layer_params = %hidden
    continuous_projection_net_ctor = @NormalProjectionNetwork
NormalProjectionNetwork.state_dependent_std = True
NormalProjectionNetwork.std_bias_initializer_value = 0
TrainerConfig.whole_replay_buffer_training = False
TrainerConfig.use_rollout_state = True
"""

MBRL = """
include 'mine/common.gin'
TrainerConfig.algorithm_ctor = @Agent
Agent.rl_algorithm_cls = @MbrlAlgorithm
Agent.optimizer = @opt/AdamTF()
opt/AdamTF.lr = 1e-3
MbrlAlgorithm.reward_module = @FixedRewardFunction(reward_func='pendulum')
MbrlAlgorithm.dynamics_module_ctor = @DeterministicDynamicsAlgorithm
DeterministicDynamicsAlgorithm.hidden_size = %hidden
MbrlAlgorithm.planner_module_ctor = functools.partial(@RandomShootingAlgorithm, population_size=20, planning_horizon=3)
TrainerConfig.whole_replay_buffer_training = True
"""

GOALS = """
include 'mine/common.gin'
TrainerConfig.algorithm_ctor = @Agent
Agent.rl_algorithm_cls = @DdpgAlgorithm
Agent.optimizer = @Adam()
create_environment.env_name = 'FetchReach-v4'
create_environment.env_load_fn = @suite_robotics.load
create_environment.eval_env_load_fn = @far/longer/suite_robotics.load
suite_robotics.load.max_episode_steps = 12
suite_robotics.load.use_success_wrapper = False
suite_robotics.load.concat_desired_goal = True
suite_robotics.load.gym_env_wrappers = (@SuccessWrapper,)
SuccessWrapper.since_episode_steps = 12
far/longer/suite_robotics.load.max_episode_steps = 15
DdpgAlgorithm.actor_network_ctor = @ActorNetwork
DdpgAlgorithm.critic_network_ctor = @CriticNetwork
ActorNetwork.fc_layer_params = %hidden
CriticNetwork.joint_fc_layer_params = %hidden
ReplayBuffer.gamma = 0.98
ReplayBuffer.default_return = -100.0
TrainerConfig.whole_replay_buffer_training = False
TrainerConfig.mini_batch_length = 2
"""


@pytest.mark.slow
@pytest.mark.parametrize('text', [SARSA, MBRL, GOALS], ids=['sarsa', 'mbrl', 'goals'])
def test_a_conf_with_the_constructs_of_alf_trains(text, tmp_path, monkeypatch, caplog):
    """Include from the working directory, train and evaluate; only the unused macros are reported."""
    if text is GOALS:
        pytest.importorskip('gymnasium_robotics')
        text = text.replace('mine/common.gin', 'mine/goals_common.gin')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'common.gin').write_text(COMMON)
    without_suite = [line for line in COMMON.splitlines() if 'suite_gym' not in line]
    (tmp_path / 'mine' / 'goals_common.gin').write_text('\n'.join(without_suite))
    (tmp_path / 'mine' / 'conf.gin').write_text(f'{text}\nalso_unused = 2\n')
    with gin_utils.loaded('mine/conf.gin'):
        trainer = RLTrainer(TrainerConfig(root_dir='run'))
        before = [p.detach().clone() for p in trainer.algorithm.parameters() if p.requires_grad]
        trainer.train()
        after = [p for p in trainer.algorithm.parameters() if p.requires_grad]
        assert any(not (a == b).all() for a, b in zip(before, after, strict=True))
        assert [str(binding) for binding in gin_utils.unused_bindings()] == [
            'unused_size = (7, 7)', 'also_unused = 2']
        assert gin_utils.mistakes_of_unused(gin_utils.unused_bindings()) == []
    assert caplog.text.count('no statement uses this macro') == 2


@pytest.mark.parametrize('keeps_episodes', [True, False])
def test_a_conf_can_state_that_hindsight_needs_episodes(keeps_episodes, tmp_path):
    """``ReplayBuffer.keep_episodic_info = True`` is what the transformer sets anyway; False is an error."""
    (tmp_path / 'conf.gin').write_text(f"""
include 'dqn_bit_flip.gin'
ReplayBuffer.keep_episodic_info = {keeps_episodes}
TrainerConfig.num_iterations = 2
TrainerConfig.num_env_steps = 0
TrainerConfig.initial_collect_steps = 100
TrainerConfig.evaluate = False
""")
    with gin_utils.loaded(str(tmp_path / 'conf.gin')):
        if keeps_episodes:
            RLTrainer(TrainerConfig(root_dir=str(tmp_path / 'run'))).train()
            assert gin_utils.mistakes_of_unused(gin_utils.unused_bindings()) == []
        else:
            with pytest.raises(ValueError, match='keep_episodic_info: expected True or None'):
                RLTrainer(TrainerConfig(root_dir=str(tmp_path / 'run')))
