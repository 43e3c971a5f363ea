"""The code, confs, tables and links of the documentation work."""
import configparser
import csv
import dataclasses
import importlib
import pathlib
import re

import pytest

from alfx import gin_utils, summary
from alfx.algorithms.config import TrainerConfig
from alfx.trainers.policy_trainer import RLTrainer, SLTrainer

ROOT = pathlib.Path(__file__).parents[3]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
_FILE = re.compile(r'<!-- file: (\S+) -->\n```\w*\n(.*?)```', re.DOTALL)
_ROW = re.compile(r'^\| `(\w+)` \| (.*?) \| (.+) \|$', re.MULTILINE)


def files_of(page):
    """Return the files that a page asks the reader to save, by name."""
    return dict(_FILE.findall((ROOT / 'docs' / page).read_text()))


def config_rows():
    """Return ``{field: default as text}`` from the tables in write_a_conf.md."""
    text = (ROOT / 'docs' / 'write_a_conf.md').read_text()
    return {name: default.strip('`') for name, default, _ in _ROW.findall(text)}


def test_the_table_of_the_configuration_has_every_field_with_its_default():
    expected = {field.name: 'required' if field.name in ('root_dir', 'algorithm_ctor') else repr(field.default)
                for field in dataclasses.fields(TrainerConfig)}
    assert config_rows() == expected


def test_every_flag_is_accepted(tmp_path):
    flags = {field.name: not field.default for field in dataclasses.fields(TrainerConfig)
             if isinstance(field.default, bool)}
    del flags['eval_uncertainty']  # of supervised learning
    del flags['async_unroll']  # incompatible with another flag, which needs gradients of the unroll
    TrainerConfig(root_dir=str(tmp_path), algorithm_ctor=dict, mini_batch_length=2, **flags)
    TrainerConfig(root_dir=str(tmp_path), algorithm_ctor=dict, async_unroll=True)
    TrainerConfig(root_dir=str(tmp_path), algorithm_ctor=dict, ml_type='sl', eval_uncertainty=True)


def test_the_ensemble_of_the_page_on_uncertainty_trains(tmp_path, monkeypatch):
    pytest.importorskip('sklearn')
    for name, text in files_of('uncertainty.md').items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    gin_utils.load('my_digits.gin', ['TrainerConfig.num_iterations = 2', 'TrainerConfig.num_checkpoints = 1'])
    SLTrainer(TrainerConfig(root_dir='run')).train()
    assert 'auroc_entropy' in (tmp_path / 'run/eval/progress.csv').read_text()


@pytest.mark.parametrize('conf, steps, reached', [
    ('reinforce_cart_pole.gin', 30000, 100), ('simple_q_cart_pole.gin', 5000, 60)])
def test_the_algorithms_of_the_tutorial_learn(conf, steps, reached, tmp_path, monkeypatch):
    for name, text in files_of('write_an_algorithm.md').items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    gin_utils.load(conf, [f'TrainerConfig.num_env_steps = {steps}', 'TrainerConfig.random_seed = 1'])
    RLTrainer(TrainerConfig(root_dir='run')).train()
    with open('run/progress.csv') as file:
        returns = [float(row['average_return']) for row in csv.DictReader(file) if row['average_return']]
    # a random policy gets 22 from CartPole
    assert max(returns) > reached


def trained(page, conf, bindings, tmp_path, monkeypatch):
    """Train a conf of a page and return the algorithm."""
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    gin_utils.load(conf, [*bindings, 'TrainerConfig.num_checkpoints = 1', 'TrainerConfig.random_seed = 1'])
    trainer = RLTrainer(TrainerConfig(root_dir='run'))
    trainer.train()
    return trainer.algorithm


SHORT_SAC = ('TrainerConfig.initial_collect_steps = 40', 'TrainerConfig.num_iterations = 60',
             'TrainerConfig.num_env_steps = 0', 'TrainerConfig.mini_batch_size = 16', 'TrainerConfig.num_summaries = 2')


def test_the_penalty_of_the_extended_algorithm_shrinks_the_actor(tmp_path, monkeypatch):
    sizes = []
    for penalty in (0, 1000):
        (folder := tmp_path / str(penalty)).mkdir()
        algorithm = trained('write_an_algorithm.md', 'regularized_sac_pendulum.gin',
                            [*SHORT_SAC, f'RegularizedSac.penalty = {penalty}'], folder, monkeypatch)
        assert 'train/squared_weights' in pathlib.Path('run/progress.csv').read_text()
        sizes.append(sum(float(p.detach().square().sum()) for p in algorithm.policy.actor.parameters()))
    assert sizes[1] < 0.98 * sizes[0]


@pytest.mark.parametrize('bindings, is_fixed', [
    ((), False), (('SacAlgorithm.alpha_optimizer = @alpha/Adam()', 'alpha/Adam.lr = 0.0'), True)])
def test_a_learning_rate_of_zero_fixes_the_entropy_coefficient(bindings, is_fixed, tmp_path, monkeypatch):
    algorithm = trained('coming_from_other_libraries.md', 'zoo_sac_pendulum.gin', [*SHORT_SAC, *bindings], tmp_path,
                        monkeypatch)
    log_alpha, = (value.item() for name, value in algorithm.named_parameters() if name.endswith('_log_alpha'))
    assert (log_alpha == pytest.approx(-2.303, abs=1e-6)) == is_fixed


def test_the_custom_network_is_trained(tmp_path, monkeypatch):
    algorithm = trained('extend.md', 'residual_cart_pole.gin', [
        'TrainerConfig.num_iterations = 3', 'TrainerConfig.initial_collect_steps = 100',
        'TrainerConfig.unroll_length = 8', 'TrainerConfig.num_updates_per_train_iter = 2'], tmp_path, monkeypatch)
    networks = [m for m in algorithm.modules() if type(m).__name__ == 'ResidualQNetwork']
    assert len(networks) >= 2 and all(len(network._layers) == 3 for network in networks)


def test_the_custom_scalar_is_logged(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(summary, 'scalar', lambda name, *args, **kwargs: written.append(name))
    trained('extend.md', 'logged_sac_pendulum.gin', SHORT_SAC, tmp_path, monkeypatch)
    assert 'train/critic_weight_norm' in written


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_every_conf_file_of_a_page_is_right(page, tmp_path, monkeypatch):
    files = dict(_FILE.findall(page.read_text()))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in files:
        if name.endswith('.gin'):
            gin_utils.load(str(tmp_path / name))
            TrainerConfig(root_dir=str(tmp_path / 'run'))


def test_the_readme_names_every_extra_that_can_be_installed():
    setup = configparser.ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    named = re.search(r'The extras are (.*?)\.\s', (ROOT / 'README.md').read_text(), re.DOTALL)
    assert set(re.findall(r'`(\w+)`', named.group(1))) == set(setup['options.extras_require'])


def test_tested_versions_cover_the_oldest_and_newest_supported_torch():
    setup = configparser.ConfigParser()
    setup.read(ROOT / 'setup.cfg')
    bounds = dict(re.findall(r'^([\w-]+)[^>=\n]*>=(.*)$', setup['options']['install_requires'], re.MULTILINE))
    rows = re.findall(r'^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|', (ROOT / 'docs/faq.md').read_text(),
                      re.MULTILINE)
    lowest = [bounds[name].split(',')[0] + '.' for name in ('torch', 'gymnasium', 'numpy', 'optree')]
    assert all(version.startswith(least) for version, least in zip(rows[0], lowest))
    *_, above = bounds['torch'].split(',')
    assert above == f'<2.{max(int(torch.split(".")[1]) for torch, *_ in rows) + 1}'


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_has_a_target(page):
    targets = re.findall(r'\]\((?!https?:)([^)#]+)', page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_function_that_the_tour_of_an_iteration_names_exists():
    text = (ROOT / 'docs' / 'how_an_iteration_runs.md').read_text()
    named = re.findall(r'`(\w+)/(\w+)\.py: ([\w.]+)`', text)
    assert len(named) > 10
    for package, module, path in named:
        target = importlib.import_module(f'alfx.{package}.{module}')
        for part in path.split('.'):
            target = getattr(target, part)
