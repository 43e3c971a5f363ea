"""Messages for text that only looks like a conf."""
import pytest

from alfx import gin_utils
from alfx.gin_utils import ConfError


def message_of(tmp_path, text):
    (tmp_path / 'mine.gin').write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfError) as error:
        gin_utils.load(str(tmp_path / 'mine.gin'))
    return str(error.value)


@pytest.mark.parametrize('line, column, character, remedy', [
    ('Adam.name = \u2018x\u2019', 13, 'U+2018 (LEFT SINGLE QUOTATION MARK)', "write '"),
    ("Adam.name = 'x\u2019", 15, 'U+2019', "write '"),
    ('Adam.lr\u00a0= 1', 8, 'U+00A0 (NO-BREAK SPACE)', 'write a space'),
    ('\u00a0Adam.lr = 1', 1, 'U+00A0', 'write a space'),
    ('Adam.lr = 1\u200b', 12, 'U+200B (ZERO WIDTH SPACE)', 'remove it'),
    ('Adam.lr = \u22121', 11, 'U+2212 (MINUS SIGN)', 'write -'),
    ('Adam.lr = 1e\u20133', 13, 'U+2013 (EN DASH)', 'write -'),
    ('Adam.lr\uff1d1', 8, 'U+FF1D (FULLWIDTH EQUALS SIGN)', 'write ='),
    ('Adam.betas = (0.9\uff0c 0.9)', 18, 'U+FF0C (FULLWIDTH COMMA)', 'write ,'),
    ('Ad\u0430m.lr = 1', 3, 'U+0430 (CYRILLIC SMALL LETTER A)', 'use ASCII'),
    ('Adam.l\u0433 = 1', 7, 'U+0433 (CYRILLIC SMALL LETTER GHE)', 'use ASCII'),
    ('Adam.lr = 1\u2028Adam.eps = 1', 12, 'U+2028 (LINE SEPARATOR)', 'write a new line'),
    ('Adam.lr = 1\x01', 12, 'U+0001 (a control character)', 'remove it'),
])
def test_a_character_outside_gin_is_named_with_its_column(tmp_path, line, column, character, remedy):
    message = message_of(tmp_path, f"# '\u00e4' \u201cquoted\u201d\nAdam.name = '\u00e4'  # \u2013\n{line}\n")
    assert 'mine.gin:3: ' in message
    assert f'column {column} is {character}' in message and message.endswith(remedy)


@pytest.mark.parametrize('line, problem, remedy', [
    ('Adam.lr = 4 * 8', 'expressions are not allowed', 'write the result'),
    ('Adam.lr = 2**3', 'expressions are not allowed', 'write the result'),
    ('Adam.lr = 3e-4/2', 'expressions are not allowed', 'write the result'),
    ('Adam.lr = 1 - 0.5', 'expressions are not allowed', 'write the result'),
    ("create_environment.env_name = 'CartPole-v1", 'a string is not closed', 'close it'),
    ('Adam.betas = 0.9, 0.5', 'continues after the value', 'write a tuple in parentheses'),
    ('Adam.lr = -%rate', 'a minus sign may only precede a number', ''),
    ('Adam.betas = (0.9, - @rate())', 'a minus sign may only precede a number', ''),
    ('Adam.lr = inf', 'cannot read the value inf', 'write %alfx.infinity'),
    ('TrainerConfig.num_env_steps = 1,000,000', 'continues after the value', 'a number has no commas: 1000000'),
    ("Adam.betas = 'a', 'b'  # x, y", 'continues after the value', 'write a tuple in parentheses'),
    ('Adam.betas = (1, 2) Adam.lr = 1', 'continues after the value', 'one statement per line'),
    ('Adam.lr = max(1, 2)', 'cannot read the value max(1, 2) (column 11)', 'cannot contain calls or expressions'),
    ('Adam.betas = [x for x in y]', 'cannot read the value', 'cannot contain calls or expressions'),
    ('TrainerConfig.data_transformer_ctor = [FrameStacker]', 'cannot read the value', 'a reference begins with @'),
    ('Adam.lr = 1e-3,', 'continues after the value', 'one statement per line'),
    ('include mine.gin', 'cannot read the value', "write include 'mine.gin'"),
    ('Adam.lr = 1; Adam.eps = 1', 'a line has two statements', 'a line of its own'),
    ('Adam.lr = 1 2', 'continues after the value (column 13)', 'one statement per line'),
    ('TrainerConfig.random_seed = 007', 'continues after the value', 'without leading zeros'),
    ('Adam.lr: 1', 'a colon is followed by a value', 'write Name.parameter = value'),
    ('Adam:\n  lr: 1', 'a colon is followed by a value', 'parameter = value in a block'),
    ('Adam.betas = {0.9, 0.5}', 'a conf cannot contain a set', 'write a tuple'),
    ("Adam.name = f'x'", 'cannot read the value', 'remove the letters before the quotes'),
    ("create_environment.env_name = b'x'", 'found bytes', 'remove the letter b'),
    ("include '~/no_such_file.gin'", 'there is no such file in ', ''),
    ('Adam.lr = (2 + 2) * 4', 'expressions are not allowed', 'write the result'),
    ('Adam.betas = [16 for i in 3]', 'expressions are not allowed', 'write the result'),
    ('Adam.lr = 2^3', 'expressions are not allowed', 'write the result'),
    ("Adam.name = 'a' * 2", 'expressions are not allowed', 'write the result'),
    ('Adam.amsgrad = no', 'cannot read the value no', 'write False'),
    ('Adam.weight_decay = null', 'cannot read the value null', 'write None'),
    ('Adam.betas = {half: True}', 'cannot read the value', "text needs quotes: 'half';"),
    ('Adam.amsgrad = not True', 'cannot read the value', 'cannot contain calls or expressions'),
    ("include C:\\confs\\mine.gin", 'cannot read the value', 'write / instead of a backslash'),
    ('Adam.lr = %Adam.eps', "macro '%Adam.eps' is not defined", 'a macro has no dot'),
    ("Agent.optimizer = '@Adam()'", 'expects an object', 'a reference has no quotes: @Adam()'),
    ("Adam = {'lr': 0.1}", 'defines a macro', 'write Adam.parameter = value'),
    ("TrainerConfig.evaluate = 'True'", 'expects bool', 'remove the quotes: True'),
    ("TrainerConfig.mini_batch_size = '16'", 'expects', 'remove the quotes: 16'),
    ("PPOLoss.gamma = '1e-3'", 'expects', 'remove the quotes: 1e-3'),
    ('[TrainerConfig]', 'not a statement', "expected 'Name.parameter = value'"),
    ('%rate = 16', 'not a statement', "expected 'Name.parameter = value'"),
    ('from os import *', 'not a statement', 'an import'),
    ('create_environment.env_name = `CartPole-v1`', 'GRAVE ACCENT', "write '"),
    ('ActorNetwork.activation = @torch.nn.Tanh', 'expects a function', 'write @torch.nn.Tanh()'),
    ('PPOLoss.td_error_loss_fn = @torch.nn.MSELoss', 'expects a function', 'write @torch.nn.MSELoss()'),
])
def test_text_of_other_languages_is_reported_with_the_way_of_gin(tmp_path, line, problem, remedy):
    message = message_of(tmp_path, line)
    assert problem in message and remedy in message


def test_the_home_folder_of_an_include_is_the_one_that_is_searched(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    assert f'there is no such file in {tmp_path}/home' in message_of(tmp_path, "include '~/other.gin'")


@pytest.mark.parametrize('text', [r'{\rtf1\ansi Adam.lr = 1}', '<!DOCTYPE html><html>', '<html>'])
def test_files_of_word_processors_and_web_pages_are_recognized(tmp_path, text):
    assert 'is not plain text' in message_of(tmp_path, text)
