"""The pages about reports and exported policies: their commands and programs run."""
import os
import pathlib
import re
import shlex
import sys

import gymnasium
import pytest
from helpers import warm_starts

import alfx

pytestmark = pytest.mark.processes
DOCS = pathlib.Path(__file__).parents[3] / 'docs'


def run_commands(page, folder):
    """Run the first block of commands of a page; returns what the last one said."""
    said = None
    block = re.search(r'```bash\n(.*?)```', (DOCS / page).read_text(), re.DOTALL).group(1)
    for line in block.splitlines():
        words = shlex.split(line)
        assert words[0] == 'alfx'
        said = warm_starts.run([sys.executable, '-m', *words], cwd=folder, capture_output=True, text=True, timeout=120)
        assert said.returncode == 0, said.stderr
    return said.stdout


def test_the_commands_about_reports_write_one(tmp_path):
    said = run_commands('report_on_runs.md', tmp_path)
    assert 'ppo_cart_pole on CartPole-v1, training: IQM ' in said and '2 runs' in said
    assert (tmp_path / 'report.html').read_text().endswith('</html>\n')


def test_the_exported_policy_acts_the_same_without_alfx(tmp_path):
    assert 'largest difference over 500 environment steps: ' in run_commands('export_a_policy.md', tmp_path)
    program = re.search(r'<!-- program: play.py -->\n```python\n(.*?)```', (DOCS / 'export_a_policy.md').read_text(),
                        re.DOTALL).group(1)
    assert len([line for line in program.splitlines() if line]) <= 20
    (tmp_path / 'play.py').write_text(program + "\nimport sys\nassert 'alfx' not in sys.modules\n")
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    said = warm_starts.run([sys.executable, 'play.py'], cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=120)
    assert said.returncode == 0, said.stderr

    policy, env = alfx.load(str(tmp_path / 'runs' / 'cart_pole')), gymnasium.make('CartPole-v1')
    observation, _ = env.reset(seed=0)
    total, done = 0.0, False
    while not done:
        observation, reward, terminated, truncated, _ = env.step(policy.predict(observation))
        total, done = total + reward, terminated or truncated
    assert float(said.stdout) == total
