"""A mistake in a conf yields one message with its location and a remedy, never a traceback."""

import os
import sys

import pytest
from helpers import warm_starts
from helpers.flag_values import flag_values

from alfx import gin_utils
from alfx.bin import check
from alfx.bin import flags as conf_flags

GOOD = """
include 'ppo_cart_pole.gin'
create_environment.num_parallel_environments = 2
TrainerConfig.unroll_length = 4
TrainerConfig.num_updates_per_train_iter = 1
"""


@pytest.fixture
def run_check(tmp_path, monkeypatch, capsys):
    """Run ``bin.check`` on a valid conf with lines added; return exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(added='', params=(), base=GOOD):
        (tmp_path / 'mine.gin').write_text(base + added)
        with flag_values(check.PARSER, conf='mine.gin', conf_param=list(params)):
            code = conf_flags.call(check.main, ['check'])
        printed = capsys.readouterr()
        assert 'Traceback' not in printed.err
        return code, printed.out, printed.err

    yield run
    gin_utils.clear()


def test_a_good_conf_is_built_run_and_described(run_check):
    code, out, _ = run_check()
    assert code == 0
    assert 'environments: 2' in out and 'observation of the environment: float32 [4]' in out
    assert 'action: int64 [] in [0, 1]' in out
    assert 'bytes' in out and '<- Adam' in out and 'train info' in out
    assert 'all bindings are used' in out
    assert not gin_utils.config_str().strip(), 'gin is left as it was found'


def test_an_unused_binding_is_listed_with_its_line_and_fails_the_check(run_check):
    code, out, _ = run_check('other/Adam.lr = 1e-3\n')
    assert code == 1
    assert 'unused: mine.gin:6: other/Adam.lr = 0.001' in out and '1 unused binding' in out


def test_an_idle_line_of_an_included_conf_is_noted_and_passes(run_check):
    code, out, _ = run_check('Agent.optimizer = @other/Adam()\nother/Adam.lr = 1e-3\n')
    assert code == 0
    assert 'note: unused so far: ' in out and 'ppo/Adam.lr' in out and 'unused:' not in out


# (lines added to the conf, location in the message, text of the message)
MISTAKES = {
    'unknown environment': ("create_environment.env_name = 'CartPole-v9'", 'mine.gin:6', 'CartPole-v1'),
    'unknown environment argument': ("suite_gym.load.env_args = {'gravitee': 1}", '', 'gravitee'),
    'no environments': ('create_environment.num_parallel_environments = 0', 'mine.gin:6', '1'),
    'misspelled parameter': ('PPOLoss.gama = 0.9', 'mine.gin:6', "did you mean 'gamma'?"),
    'misspelled class': ('PPOLos.gamma = 0.9', 'mine.gin:6', "did you mean 'PPOLoss'?"),
    'misspelled reference': ('Agent.optimizer = @ppo/Adm()', 'mine.gin:6', "did you mean 'Adam'?"),
    'misspelled scope': ('pp/Adam.lr = 0.1', 'mine.gin:6', "did you mean 'ppo'?"),
    'undefined macro': ('PPOLoss.gamma = %gamma', 'mine.gin:6', "macro '%gamma' is not defined"),
    'text without quotes': ('create_environment.env_name = CartPole-v1', 'mine.gin:6', "'CartPole-v1'"),
    'wrong type': ("TrainerConfig.num_iterations = 'many'", 'mine.gin:6', "expects int, found str 'many'"),
    'out of range': ('TrainerConfig.epsilon_greedy = 2.0', 'mine.gin:6', 'in [0, 1], found float 2.0'),
    'negative learning rate': ('ppo/Adam.lr = -1.0', 'mine.gin:6', 'Adam.lr'),
    'negative clipping': ('PPOLoss.importance_ratio_clipping = -1.0', 'mine.gin:6', 'float > 0'),
    'conflict': ('TrainerConfig.whole_replay_buffer_training = False\nTrainerConfig.mini_batch_length = None',
                 'mine.gin:7', 'set it to the length of the sequences'),
    'endless run': ('TrainerConfig.num_env_steps = 0', 'ppo.gin', 'never end'),
    'uncertainty of a policy': ('TrainerConfig.eval_uncertainty = True', 'mine.gin:6',
                                'has no effect without TrainerConfig.ml_type'),
    'no algorithm': ('TrainerConfig.algorithm_ctor = None', 'mine.gin:6', 'TrainerConfig.algorithm_ctor = @Agent'),
    'no optimizer': ('Agent.optimizer = None', '', 'no optimizer owns the trainable parameters'),
    'class instead of instance': ('Agent.optimizer = @ppo/Adam', 'mine.gin:6', 'write @ppo/Adam()'),
    'instance instead of class': ('TrainerConfig.data_transformer_ctor = @RewardScaling()\nRewardScaling.scale = 1.0',
                                  'mine.gin:6', 'write @RewardScaling without ()'),
    'not a module': ('import alfx.no_such_module', 'mine.gin:6', 'cannot import'),
    'missing include': ("include 'no_such.gin'", 'mine.gin:6', 'no such file'),
    'unclosed bracket': ('ValueNetwork.fc_layer_params = (64, 64', 'mine.gin:', 'inside a bracket'),
    'activation as text': ("ValueNetwork.activation = 'relu'", 'mine.gin:6', '@relu'),
    'activation called': ('ValueNetwork.activation = @torch.tanh()', 'mine.gin:6', 'write @torch.tanh'),
    'number instead of layers': ('ValueNetwork.fc_layer_params = 64', 'mine.gin:6', '(64,)'),
    'negative layer': ('ValueNetwork.fc_layer_params = (64, -1)', 'mine.gin:6', 'ValueNetwork.fc_layer_params'),
    'layer without units': ('ValueNetwork.fc_layer_params = (64, 0)', 'mine.gin:6', 'Sequence[int >= 1]'),
    'discount above 1': ('PPOLoss.gamma = 2.0', 'mine.gin:6', 'PPOLoss.gamma expects float in [0, 1] or Sequence['),
    'negative discount': ('PPOLoss.gamma = -1.0', 'mine.gin:6', 'float in [0, 1]'),
    'negative time limit': ('suite_gym.load.max_episode_steps = -1', 'mine.gin:6',
                            'suite_gym.load.max_episode_steps expects int >= 0 or'),
    'number out of all bounds': ('ppo/Adam.lr = 1e400', 'mine.gin:6', 'a number is too large'),
    'unknown argument of the network': ('ActorCriticAlgorithm.nonsense = 3', 'mine.gin:6', 'nonsense'),
}


# Mistakes that only the first update reveals are reported before the first step: (conf, lines added to it, message)
LATE_MISTAKES = {
    'sequences of one step': ('sac_pendulum', 'TrainerConfig.mini_batch_length = 1', 'OneStepTDLoss learns from '
                              'transitions, but sequences of one step contain none\n  set it to 2'),
    'unrolls cut into single steps': ('sarsa_pendulum', 'TrainerConfig.mini_batch_length = 1\nTrainerConfig.'
                                      'whole_replay_buffer_training = True\nTrainerConfig.clear_replay_buffer = True',
                                      'set TrainerConfig.mini_batch_length to 2 or more'),
    'no priorities': ('sac_pendulum', 'TrainerConfig.priority_replay = True', 'set SacAlgorithm.calculate_priority = '),
    'actions in place of distributions': ('sac_pendulum', 'SacAlgorithm.actor_network_cls = @ActorNetwork',
                                          'SacAlgorithm.actor_network_cls creates ActorNetwork, which returns actions; '
                                          'the algorithm needs distributions'),
    'distributions in place of actions': ('ddpg_pendulum', 'DdpgAlgorithm.actor_network_ctor = '
                                          '@ActorDistributionNetwork', 'for example @ActorNetwork'),
    'actions in place of distributions for PPO': ('ppo_pendulum', 'PPOAlgorithm.actor_network_ctor = @ActorNetwork',
                                                  'for example @ActorDistributionNetwork'),
    'a buffer larger than the memory': ('sac_pendulum', 'TrainerConfig.replay_buffer_length = 1e11',
                                        'TrainerConfig.replay_buffer_length needs 4,800,000,000,000 bytes of memory '
                                        'for a buffer of 100,000,000,000 steps of 1 environment(s) with 48 bytes each'),
    'an unroll larger than the memory': ('ppo_cart_pole', 'TrainerConfig.unroll_length = 1e9',
                                         'bytes of memory for a buffer of 1,000,000,001 steps'),
    'an unroll on-policy': ('ac_cart_pole', 'TrainerConfig.unroll_length = 1e10', 'the observations of an unroll need'),
    'a loss for another algorithm': ('ppo_cart_pole', 'PPOAlgorithm.loss_class = @TDLoss',
                                     '@TDLoss creates an instance of TDLoss'),
    'a scheduler for an optimizer': ('ppo_cart_pole', 'Agent.optimizer = @LinearScheduler()\n'
                                     'LinearScheduler.schedule = [(0, 1.0), (1, 2.0)]\n'
                                     "LinearScheduler.progress_type = 'percent'", 'expects an optimizer'),
    'a function for an algorithm': ('ppo_cart_pole', 'TrainerConfig.algorithm_ctor = @torch.tanh', 'a constructor'),
}


@pytest.mark.parametrize('mistake', LATE_MISTAKES)
def test_errors_of_the_first_update_are_reported_before_it(run_check, mistake, monkeypatch):
    monkeypatch.setattr('alfx.algorithms.rl_algorithm.RLAlgorithm.train_iter', lambda _: pytest.fail('it has begun'))
    conf, added, message = LATE_MISTAKES[mistake]
    code, _, err = run_check(f"include '{conf}.gin'\n{added}\n", base='')
    assert code == 2 and 'ConfError: mine.gin:2: ' in err and message in err


def test_an_observation_without_elements_is_reported(run_check, tmp_path, monkeypatch):
    (tmp_path / 'blind_environment.py').write_text('''
import gymnasium
import numpy as np

class Blind(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (0,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        pass

    def reset(self, seed=None, options=None):
        return np.zeros(0, np.float32), {}

gymnasium.register('Blind-v0', Blind)
''')
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = run_check("create_environment.env_name = 'blind_environment:Blind-v0'\n"
                             'create_environment.nonparallel = True\n')
    assert code == 2 and 'mine.gin:6: create_environment.env_name has an observation without elements' in err


@pytest.mark.parametrize('mistake', MISTAKES)
def test_an_error_is_reported_with_location_and_remedy(run_check, mistake):
    added, location, message = MISTAKES[mistake]
    code, _, err = run_check(added + '\n')
    assert code == 2
    assert 'Error: ' in err and location in err and message in err
    assert not gin_utils.config_str().strip(), 'gin is left as it was found'


def test_an_error_on_the_command_line_shows_the_parameter(run_check):
    code, _, err = run_check(params=['PPOLoss.gama=0.9', "create_environment.env_name=CartPole-v1"])
    assert code == 2
    assert "override 'PPOLoss.gama=0.9': PPOLoss has no parameter 'gama'" in err
    assert "override 'create_environment.env_name=CartPole-v1': syntax error" in err


def test_the_program_prints_one_message_and_exits_with_2(tmp_path):
    (tmp_path / 'mine.gin').write_text(GOOD + 'PPOLoss.gama = 0.9\n')
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = warm_starts.run([sys.executable, '-m', 'alfx.bin.check', '--conf', 'mine.gin'], cwd=tmp_path,
                          capture_output=True, text=True, env={**os.environ, 'PYTHONPATH': root}, timeout=120)
    assert done.returncode == 2 and done.stdout == ''
    assert done.stderr == ("ConfError: mine.gin:6: PPOLoss has no parameter 'gama'\n  did you mean 'gamma'?\n")


def test_help_shows_an_example():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = warm_starts.run([sys.executable, '-m', 'alfx.bin.check', '--help'], capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': root}, timeout=120)
    assert 'alfx check sac_pendulum --conf_param' in done.stdout and done.returncode == 0
