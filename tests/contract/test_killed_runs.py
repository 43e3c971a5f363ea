"""A run that is killed again and again ends as if it had not been."""
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from alfx.utils.checkpoint_utils import read_checkpoint

PARAMS = ('TrainerConfig.num_checkpoints=40', 'TrainerConfig.random_seed=7', 'TrainerConfig.num_threads=1',
          'TrainerConfig.confirm_checkpoint_upon_crash=False',
          # which path of float32 products is faster is measured when a run starts; these are two runs
          'TrainerConfig.float32_matmul_precision="highest"')
# conf -> what makes its run short; off-policy ones are exact as shipped, their replay buffers being small
SHORT = {
    'ppo_cart_pole': ('TrainerConfig.num_env_steps=20000', 'TrainerConfig.num_updates_per_train_iter=4'),
    'sac_pendulum': ('TrainerConfig.num_env_steps=3000', ),
    'dqn_cart_pole': ('TrainerConfig.num_env_steps=6000', ),
}


def command(root_dir, conf):
    params = [part for param in (*PARAMS, *SHORT[conf]) for part in ('--conf_param', param)]
    return [sys.executable, '-m', 'alfx.bin.train', '--conf', conf, '--root_dir', str(root_dir), *params]


def checkpoints(root_dir):
    return sorted(int(path.name.removeprefix('ckpt-')) for path in Path(root_dir).glob('train/algorithm/ckpt-*')
                  if path.name.removeprefix('ckpt-').isdigit())


def final_state(root_dir):
    """The contents of the last checkpoint, flat."""
    newest = checkpoints(root_dir)[-1]
    path = Path(root_dir) / 'train' / 'algorithm' / f'ckpt-{newest}'
    return newest, read_checkpoint(str(path))


@pytest.mark.slow
@pytest.mark.parametrize('conf, num_kills', [('ppo_cart_pole', 10), ('sac_pendulum', 4), ('dqn_cart_pole', 4)])
def test_kills_at_random_moments_change_nothing(tmp_path, conf, num_kills):
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    subprocess.run(command(whole, conf), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    generator = random.Random(0)
    kills = 0
    while kills < num_kills:
        before = checkpoints(killed)
        process = subprocess.Popen(command(killed, conf), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and checkpoints(killed)[-1:] == before[-1:]:
            time.sleep(0.005)
        time.sleep(generator.uniform(0.0, 0.15))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        kills += 1
    assert kills == num_kills, f'the run ended after {kills} kills; it is too short for this test'
    subprocess.run(command(killed, conf), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (step, expected), (same_step, found) = final_state(whole), final_state(killed)
    assert step == same_step
    assert_equal(expected['alg'], found['alg'], 'alg')
    rows = [(root / 'progress.csv').read_text().splitlines() for root in (whole, killed)]
    assert len(rows[0]) == len(rows[1])
    assert len({row.split(',')[0] for row in rows[1]}) == len(rows[1])


def test_a_terminal_that_closes_stops_the_run_with_a_checkpoint(tmp_path):
    params = ('TrainerConfig.num_env_steps=100000000', 'TrainerConfig.num_checkpoints=1',
              'TrainerConfig.summary_interval=1', 'TrainerConfig.num_summaries=None',
              'create_environment.nonparallel=False')
    arguments = [*command(tmp_path, 'ppo_cart_pole'), *(part for param in params for part in ('--conf_param', param))]
    pid, terminal = pty.fork()
    if not pid:
        os.execv(arguments[0], arguments)
    try:
        table, deadline = tmp_path / 'progress.csv', time.monotonic() + 60
        said = b''
        while not (table.exists() and len(table.read_bytes().splitlines()) > 3):
            assert time.monotonic() < deadline, said.decode()
            if select.select([terminal], [], [], 0.05)[0]:
                said += os.read(terminal, 10_000)
        assert not checkpoints(tmp_path)
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP, (tmp_path / 'train.log').read_text()
    assert checkpoints(tmp_path)


def assert_equal(a, b, path):
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f'{path}.{key}')
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_equal(x, y, f'{path}.{i}')
    else:
        assert a == b, path
