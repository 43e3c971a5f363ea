"""A run that is killed repeatedly ends like an uninterrupted run."""
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / 'tools'))
import kill_runs
from helpers import warm_starts
from kill_runs import checkpoints

pytestmark = pytest.mark.processes

# conf, overrides for a short run, processes
FAMILIES = {
    'sac': ('sac_pendulum', ('TrainerConfig.num_env_steps=1200', ), 1),
    'dqn in four environments': (
        'dqn_cart_pole', ('create_environment.num_parallel_environments=4', 'TrainerConfig.num_env_steps=3000',
                          'TrainerConfig.unroll_length=16', 'TrainerConfig.num_updates_per_train_iter=4'), 1),
    'rainbow': ('rainbow_cart_pole', ('TrainerConfig.num_env_steps=3000',
                                      'TrainerConfig.num_updates_per_train_iter=4'), 1),
    'ppo with mujoco': ('ppo_half_cheetah', ('TrainerConfig.num_env_steps=10000', 'TrainerConfig.unroll_length=64',
                                             'TrainerConfig.num_updates_per_train_iter=1'), 1),
    'planning with an ensemble': (
        'mbrl_pendulum', ('TrainerConfig.num_env_steps=280', 'CEMPlanAlgorithm.population_size=20',
                          'CEMPlanAlgorithm.elite_size=5', 'DeterministicDynamicsAlgorithm.num_replicas=3',
                          'DeterministicDynamicsAlgorithm.holdout=0.1',
                          'DeterministicDynamicsAlgorithm.num_elites=2'), 1),
    'imagination': (
        'mbpo_pendulum', ('TrainerConfig.num_env_steps=700', 'ModelBasedPolicyAlgorithm.max_model_updates=50',
                          'ModelBasedPolicyAlgorithm.num_rollouts=400',
                          'TrainerConfig.num_updates_per_train_iter=2'), 1),
    'memories of episodes': ('ppo_noveld_corridor', ('TrainerConfig.num_env_steps=20000', ), 1),
    'ppo in two processes': ('ppo_cart_pole', ('TrainerConfig.num_env_steps=4000',
                                               'TrainerConfig.num_updates_per_train_iter=2'), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize('family', FAMILIES)
def test_kills_at_random_times_do_not_change_the_result(tmp_path, family):
    conf, params, num_processes = FAMILIES[family]
    if 'mujoco' in family:
        pytest.importorskip('mujoco')
    num_kills = 1 if family in ('planning with an ensemble', 'imagination') else 3  # the slow ones
    outcome, = kill_runs.kill_runs(conf, tmp_path, num_kills, params, num_processes,
                                    popen=warm_starts.Popen)
    assert not outcome.differs, kill_runs.report(conf, outcome)
    assert kill_runs.table(tmp_path / 'killed-0')


@pytest.mark.compiles
@pytest.mark.slow
def test_a_compiled_run_resumes_up_to_rounding_and_logs_this(tmp_path):
    params = ('TrainerConfig.num_env_steps=1000', 'TrainerConfig.compile=True')
    outcome, = kill_runs.kill_runs('sac_pendulum', tmp_path, 1, params, popen=warm_starts.Popen)
    assert all(difference.size < 1e-5 for difference in outcome.differences), kill_runs.report('', outcome)
    assert 'rounds differently' in (tmp_path / 'killed-0.log').read_text()


def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint(tmp_path):
    params = ('TrainerConfig.num_env_steps=100000000', 'TrainerConfig.num_checkpoints=1',
              'TrainerConfig.summary_interval=1', 'TrainerConfig.num_summaries=None',
              'create_environment.nonparallel=False')
    arguments = kill_runs.command('ppo_cart_pole', tmp_path, params)
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        os.execv(arguments[0], arguments)
    try:
        table, deadline = tmp_path / 'progress.csv', time.monotonic() + 60
        output = b''
        while not (table.exists() and len(table.read_bytes().splitlines()) > 3):
            assert time.monotonic() < deadline, output.decode()
            if select.select([terminal], [], [], 0.05)[0]:
                output += os.read(terminal, 10_000)
        assert not checkpoints(tmp_path)
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP, (tmp_path / 'train.log').read_text()
    assert checkpoints(tmp_path)
