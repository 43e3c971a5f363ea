"""The files of the repository root: README, citation, architecture, and the metadata of the package."""
import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import alfx
from alfx.gin_utils import parsing

ROOT = pathlib.Path(__file__).parents[3]
README = (ROOT / 'README.md').read_text()
ALGORITHM_ROWS = re.findall(r'^\| \[[^\]]+\]\(docs/algorithms/(\w+)\.md\) \| \[[^\]]+\]\(\S+\) \| (.*) \| `(\w+)` \|$',
                            README, re.MULTILINE)


def test_readme_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = re.search(r'<!-- program: readme.py -->\n```python\n(.*?)```', README, re.DOTALL).group(1)
    assert len(program.splitlines()) <= 8
    shorter = program.replace("{'ppo/Adam.lr'", "{'TrainerConfig.num_env_steps': 2000, 'ppo/Adam.lr'")
    assert shorter != program
    names: dict = {}
    exec(compile(shorter, 'readme.py', 'exec'), names)
    assert names['score'] > 0 and names['action'] in (0, 1)


def test_readme_conf_is_about_ten_lines():
    conf = re.search(r'<!-- file: acrobot.gin -->\n```\n(.*?)```', README, re.DOTALL).group(1)
    assert len([line for line in conf.splitlines() if line]) <= 12


def test_readme_lists_algorithms():
    assert len(ALGORITHM_ROWS) > 20


@pytest.mark.parametrize('page, actions, conf', ALGORITHM_ROWS, ids=lambda value: value)
def test_readme_algorithm_row_is_correct(page, actions, conf):
    assert (pathlib.Path(parsing.CONFS) / f'{conf}.gin').exists()
    table = (ROOT / 'docs' / 'algorithms.md').read_text()
    row = re.search(rf'^\| \[\w+\]\(algorithms/{page}\.md\) \| [^|]* \| ([^|]*) \|', table, re.MULTILINE)
    if row is not None:  # parts of an agent have no column of actions
        assert row.group(1) == actions


@pytest.mark.parametrize('page', ['ARCHITECTURE.md', 'CONTRIBUTING.md', 'SECURITY.md'])
def test_links_and_paths_exist(page):
    text = (ROOT / page).read_text()
    links = re.findall(r'\]\((?!https?:)([^)#]+)', text)
    paths = re.findall(r'`((?:alfx|docs|tests|tools|\.github)/[\w./-]+)`', text)
    assert [path for path in links + paths if 'NAME' not in path and not (ROOT / path).exists()] == []


def test_citation_names_the_current_version():
    version = re.search(r'^version: (\S+)$', (ROOT / 'CITATION.cff').read_text(), re.MULTILINE)
    assert version.group(1) == alfx.__version__


def test_ci_runs_every_python_version_of_the_classifiers():
    setup = configparser.ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    supported = re.findall(r'Python :: (3\.\d+)', setup['metadata']['classifiers'])
    workflow = (ROOT / '.github' / 'workflows' / 'ci.yml').read_text()
    assert re.findall(r"'(3\.\d+)'", re.search(r'python: \[(.*?)\]', workflow).group(1)) == supported


@pytest.mark.slow
@pytest.mark.processes
def test_an_installed_wheel_trains_and_evaluates(tmp_path):
    source, site = tmp_path / 'source', tmp_path / 'site'
    shutil.copytree(ROOT / 'alfx', source / 'alfx', ignore=shutil.ignore_patterns('__pycache__'))
    for name in ('setup.cfg', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, '-m', 'pip', '-q', '--disable-pip-version-check']
    subprocess.run([*pip, 'wheel', '--no-deps', '--no-build-isolation', '-w', tmp_path, source], check=True)
    wheel, = tmp_path.glob('alfx-*.whl')
    subprocess.run([*pip, 'install', '--no-deps', '--no-index', '--target', site, wheel], check=True)
    environment = {**os.environ, 'PYTHONPATH': str(site)}

    def output_of(*arguments):
        return subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, check=True, text=True,
                              capture_output=True).stdout

    assert str(site) in output_of('-c', 'import alfx; print(alfx.__file__)')
    assert (site / 'alfx' / 'py.typed').exists() and (site / 'alfx' / 'tree_search' / 'kernel.c').exists()
    assert {path.name for path in (site / 'alfx').rglob('*.gin')} == {
        path.name for path in (ROOT / 'alfx').rglob('*.gin')}
    output_of('-m', 'alfx.bin.train', '--conf', 'ppo_cart_pole', '--root_dir', 'run', 'TrainerConfig.num_env_steps=600')
    assert '2 episodes' in output_of('-m', 'alfx.bin.evaluate', '--root_dir', 'run', '--num_episodes', '2')
