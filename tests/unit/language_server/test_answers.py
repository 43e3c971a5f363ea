"""Hover, completion and definition at positions of confs."""
import glob
import inspect
import linecache
import os

import pytest

from alfx import gin_utils
from alfx.algorithms import sac_algorithm
from alfx.gin_utils import registry
from alfx.gin_utils.parsing import CONFS
from alfx.language_server import answers

PATH = '/nowhere/new.gin'


@pytest.fixture(scope='module', autouse=True)
def imported():
    gin_utils.import_configurables()


def ask(function, text, path=PATH):
    """Ask at the position of '|'."""
    before, _, after = text.partition('|')
    return function(path, {path: before + after}, before.count('\n'), len(before.rpartition('\n')[2]))


def test_hover_on_an_argument_shows_type_default_and_meaning():
    shown = ask(answers.hover, 'SacAlgorithm.target_update_|tau = 1')
    parameter = inspect.signature(sac_algorithm.SacAlgorithm.__init__).parameters['target_update_tau']
    code, _, meaning = shown.removeprefix('```python\n').partition('\n```\n')
    assert code.startswith('SacAlgorithm.target_update_tau: float') and code.endswith(f' = {parameter.default}')
    assert meaning in ' '.join(sac_algorithm.SacAlgorithm.__doc__.replace('``', '`').split())
    assert len(meaning) > 10


def test_hover_on_a_required_argument_says_so():
    assert '# required' in ask(answers.hover, 'SacAlgorithm.action_|spec = 1')


def test_hover_on_a_class_shows_its_signature_and_first_paragraph():
    shown = ask(answers.hover, 'x = @ac/Sac|Algorithm')
    assert shown.startswith('```python\nSacAlgorithm(observation_spec, action_spec')
    assert shown.endswith(sac_algorithm.SacAlgorithm.__doc__.split('\n\n')[0].strip())


@pytest.mark.parametrize('text', ['No|thing.x = 1', 'Adam.no|thing = 1', "include 'sa|c.gin'", '%no|thing', '|',
                                  '# |A'])
def test_hovering_elsewhere_shows_nothing(text):
    assert ask(answers.hover, text) == ''


def test_hover_on_a_macro_shows_its_value():
    assert ask(answers.hover, 'rate = 1e-3\nAdam.lr = %ra|te').startswith('```\nrate = 0.001\n```')


@pytest.mark.parametrize('text, expected, start', [
    ('Sac|', 'SacAlgorithm', 0), ('x = @s/|', 'Adam', 7), ('suite_|', 'suite_gym.load', 0),
    ('suite_gym.|', 'suite_gym.load', 0), ('ac/Adam.|', 'lr', 8), ('suite_gym.load.|', 'env_args', 15),
    ('Adam:\n  |', 'lr', 2), ('x = @FC(|', 'activation', 8), ('rate = 1\nx = %|', 'rate', 5),
    ("include '|'", 'sac_pendulum.gin', 9), ("include 'sa|", 'sac_pendulum.gin', 9), ('x = @torch.r|', 'torch.relu', 5),
])
def test_completion_offers_the_names_that_can_be_written(text, expected, start):
    item = next(item for item in ask(answers.completions, text) if item.name == expected)
    assert item.start == start


@pytest.mark.parametrize('text', ['Adam.lr = |', "x = '@|", '# @|', 'import |', 'x = 1|'])
def test_completion_offers_nothing_in_values_strings_and_comments(text):
    assert ask(answers.completions, text) == []


def test_completion_of_arguments_offers_exactly_the_arguments_of_the_class():
    items = ask(answers.completions, 'Adam.|')
    assert [item.name for item in items] == list(gin_utils.describe('Adam').parameters)
    assert next(item for item in items if item.name == 'lr').detail.startswith('lr: float')


def test_macros_of_includes_and_after_the_line_are_offered(tmp_path):
    (tmp_path / 'base.gin').write_text('first = 1\n')
    items = ask(answers.completions, "include 'base.gin'\nAdam.lr = %|\nsecond = 2\n", str(tmp_path / 'new.gin'))
    assert [item.name for item in items] == ['first', 'second']


def test_confs_of_a_folder_are_offered(tmp_path):
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub/mine.gin').touch()
    (tmp_path / 'own.gin').touch()
    new = str(tmp_path / 'new.gin')
    assert [item.name for item in ask(answers.completions, "include 'sub/|", new)] == ['sub/mine.gin']
    names = {item.name for item in ask(answers.completions, "include '|", new)}
    assert {'own.gin', *map(os.path.basename, glob.glob(f'{CONFS}/*.gin'))} <= names


@pytest.mark.parametrize('text, line_begins', [
    ('SacAlg|orithm.gamma = 1', 'class SacAlgorithm('), ('SacAlgorithm.ga|mma = 1', 'class SacAlgorithm('),
    ('x = @Ad|am()', 'class Adam('), ('suite_gym.lo|ad.x = 1', 'def load('), ('x = @clipped_|exp', 'def clipped_exp('),
    ('Trainer|Config.x = 1', 'class TrainerConfig')])
def test_the_definition_of_a_class_or_function_is_its_source(text, line_begins):
    path, line = ask(answers.definition, text)
    assert linecache.getline(path, line + 1).startswith(line_begins)


def test_every_class_and_function_of_alfx_has_a_definition():
    missing = [name for name in registry.registered_selectors()
               if name.startswith('alfx.') and answers._source_of(name) is None]
    assert not missing


def test_functions_written_in_c_have_no_definition():
    assert ask(answers.definition, 'x = @torch.re|lu') is None


def test_the_definition_of_an_include_is_its_file(tmp_path):
    assert ask(answers.definition, "include 'sac|.gin'") == (os.path.join(CONFS, 'sac.gin'), 0)
    (tmp_path / 'sac.gin').touch()
    assert ask(answers.definition, "include 'sac|.gin'", str(tmp_path / 'new.gin')) == (str(tmp_path / 'sac.gin'), 0)
    assert ask(answers.definition, "include 'nothing|.gin'") is None


def test_the_definition_of_a_macro_is_the_one_in_effect(tmp_path):
    (tmp_path / 'base.gin').write_text('# first\nrate = 1\n')
    new = str(tmp_path / 'new.gin')
    assert ask(answers.definition, "include 'base.gin'\nAdam.lr = %ra|te\n", new) == (str(tmp_path / 'base.gin'), 1)
    assert ask(answers.definition, "include 'base.gin'\nrate = 2\nAdam.lr = %ra|te\n", new) == (new, 1)
