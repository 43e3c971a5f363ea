"""The pages about reports and exported policies: their commands and programs run."""
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys

import gymnasium
import pytest
from helpers import warm_starts

import alfx

pytestmark = pytest.mark.processes
DOCS = pathlib.Path(__file__).parents[3] / 'docs'


def run_commands(page, folder):
    """Run the first block of commands of a page; return the output of the last one."""
    result = None
    block = re.search(r'```bash\n(.*?)```', (DOCS / page).read_text(), re.DOTALL).group(1)
    for line in block.splitlines():
        words = shlex.split(line)
        assert words[0] == 'alfx'
        result = warm_starts.run([sys.executable, '-m', *words], cwd=folder, capture_output=True, text=True,
                                 timeout=120)
        assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_commands_about_reports_write_one(tmp_path):
    output = run_commands('report_on_runs.md', tmp_path)
    assert 'ppo_cart_pole on CartPole-v1, training: IQM ' in output and '2 runs' in output
    assert (tmp_path / 'report.html').read_text().endswith('</html>\n')


def test_the_exported_policy_acts_the_same_without_alfx(tmp_path):
    assert 'largest difference over 500 environment steps: ' in run_commands('export_a_policy.md', tmp_path)
    returns = [return_of_program('play.py', tmp_path)]
    if importlib.util.find_spec('onnxscript') and importlib.util.find_spec('onnxruntime'):
        arguments = ['export', 'runs/cart_pole', '--output', 'policy.onnx', '--num_steps', '50']
        result = warm_starts.run([sys.executable, '-m', 'alfx', *arguments], cwd=tmp_path, capture_output=True,
                                 text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        returns.append(return_of_program('play_onnx.py', tmp_path))

    policy, env = alfx.load(str(tmp_path / 'runs' / 'cart_pole')), gymnasium.make('CartPole-v1')
    observation, _ = env.reset(seed=0)
    total, done = 0.0, False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(policy.predict(observation))
        total, done = total + reward, terminated or truncated
    assert set(returns) == {total}


def return_of_program(name, folder):
    """Run a program of the page without alfx, and return the number that it prints."""
    program = re.search(rf'<!-- program: {name} -->\n```python\n(.*?)```', (DOCS / 'export_a_policy.md').read_text(),
                        re.DOTALL).group(1)
    assert len([line for line in program.splitlines() if line]) <= 22
    (folder / name).write_text(program + "\nimport sys\nassert 'alfx' not in sys.modules\n")
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    result = subprocess.run([sys.executable, name], cwd=folder, env=environment, capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == 0, result.stderr
    return float(result.stdout)
