"""Names at positions of a conf."""
import pytest

from alfx.language_server.text import name_at

CONF = '''include 'ppo.gin'
import my_module
rate = 1e-3  # of the actor
actor/Adam.lr = %rate
Net.layers = [@ac/suite_gym.load, @FC(size=3, bias=True), 'not @This']
ac/Adam:
  # a comment

  lr = 2
Adam

  other
'''
LINES = CONF.split('\n')


def found(line, text, offset=0):
    name = name_at(CONF, line, LINES[line].index(text) + offset)
    assert LINES[line][name.start:name.end] == name.name
    return name.kind, name.owner, name.name


@pytest.mark.parametrize('line, text, expected', [
    (0, 'ppo', ('include', '', 'ppo.gin')),
    (2, 'rate', ('macro', '', 'rate')),
    (3, 'Adam', ('object', '', 'Adam')),
    (3, 'actor', ('object', '', 'Adam')),
    (3, 'lr', ('argument', 'Adam', 'lr')),
    (3, '%', ('macro', '', 'rate')),
    (4, 'ac/', ('object', '', 'suite_gym.load')),
    (4, 'size', ('argument', 'FC', 'size')),
    (4, 'bias', ('argument', 'FC', 'bias')),
    (5, 'Adam', ('object', '', 'Adam')),
    (8, 'lr', ('argument', 'Adam', 'lr')),
    (9, 'Adam', ('object', '', 'Adam')),
])
def test_a_name_is_found_with_its_kind_and_columns(line, text, expected):
    assert found(line, text) == expected


def test_the_column_after_a_name_belongs_to_it():
    assert found(3, 'lr', 2) == ('argument', 'Adam', 'lr')
    assert found(0, 'ppo', 7) == ('include', '', 'ppo.gin')


@pytest.mark.parametrize('line, text', [(0, 'include'), (1, 'my'), (2, '1e-3'), (2, 'actor'), (4, 'This'), (6, 'comm')])
def test_comments_strings_and_numbers_hold_no_name(line, text):
    assert name_at(CONF, line, LINES[line].index(text)).kind == ''


@pytest.mark.parametrize('text, expected', [
    ('', ('object', '', '')), ('Ada', ('object', '', 'Ada')), ('ac/Ada', ('object', '', 'Ada')),
    ('ac/Adam.', ('argument', 'Adam', '')), ('suite_gym.load.en', ('argument', 'suite_gym.load', 'en')),
    ('f.x = @', ('object', '', '')), ('f.x = (@a, @s/', ('object', '', '')), ('f.x = %ra', ('macro', '', 'ra')),
    ('f.x = @FC(', ('argument', 'FC', '')), ('f.x = @FC(a=1, bi', ('argument', 'FC', 'bi')),
    ("include '", ('include', '', '')), ('include "sub/a', ('include', '', 'sub/a')),
    ('f.x = ', ('', '', '')), ("f.x = 'a @", ('', '', '')), ('# @', ('', '', '')), ('f.x = 1  # %', ('', '', '')),
])
def test_the_name_that_is_being_written_may_be_incomplete(text, expected):
    name = name_at(text, 0, len(text))
    assert (name.kind, name.owner, name.name) == expected


def test_an_indented_line_in_brackets_is_in_no_block():
    assert name_at('f.x = (\n    abc', 1, 7).kind == 'object'
