"""Reading of stored files: one message for each kind of damage; writing completely or not at all."""
import errno
import os
import re

import pytest

from alfx.gin_utils import ConfError, stored_files
from alfx.gin_utils.stored_files import FileError, mismatch, read_json, read_text, replacing

SCHEMA = {'name': str, 'count': range(10), 'share?': float, 'pair?': [float, float], 'each?': {str: [int]},
          'maybe?': (str, type(None))}
GOOD = {'name': 'a', 'count': 3, 'share': 0.5, 'pair': [1, 2.0], 'each': {'x': [1, 2]}, 'maybe': None, 'other': []}


@pytest.mark.parametrize('change, expected', [
    ({}, ''), ({'name': 3}, 'name: expected text, found 3'), ({'count': True}, 'count: expected an integer from 0 to'),
    ({'count': 10}, 'found 10'), ({'share': float('inf')}, 'share: expected a finite number, found inf'),
    ({'share': 10**400}, 'share: expected a finite number'), ({'pair': [1]}, r'pair: expected 2 entries, found \[1\]'),
    ({'each': {'x': [1, 'y']}}, r"each.x\[1\]: expected an integer, found 'y'"),
    ({'each': []}, 'each: expected a dict'),
    ({'maybe': 3}, 'maybe: expected text or nothing, found 3'), ({'name': 'x' * 10**6}, '')])
def test_a_mismatch_names_the_first_wrong_entry(change, expected):
    found = mismatch({**GOOD, **change}, SCHEMA)
    assert re.search(expected, found) and bool(found) == bool(expected)


def test_a_missing_entry_is_named_and_long_values_are_shortened():
    assert mismatch({'count': 3}, SCHEMA) == "expected an entry 'name', found ['count']"
    assert len(mismatch('x' * 10**6, int)) < 200


def _sparse(path):
    with open(path, 'wb') as file:
        file.truncate(2**40)


@pytest.mark.parametrize('make, expected', [
    (os.mkdir, 'expected a file, found a folder'), (os.mkfifo, 'expected a file, found a pipe'),
    (lambda path: os.symlink('nowhere', path), 'expected a file, found a link to nowhere'),
    (lambda path: os.symlink(path, path), 'found: Too many levels'), (_sparse, 'expected at most 67,108,864 bytes'),
    (lambda path: path.write_bytes(b'caf\xe9'), 'expected UTF-8 text, found the byte 0xe9 at position 3'),
    (lambda path: path.write_text('{"a": '), 'expected JSON'), (lambda path: path.write_text('[' * 10**5), 'JSON'),
    (lambda path: path.write_text('1' * 10**5), 'expected JSON'), (lambda path: path.write_text('[]'), 'a dict')])
def test_damage_is_one_message_with_path_and_remedy(tmp_path, make, expected):
    make(tmp_path / 'a.json')
    with pytest.raises(FileError, match=f'a.json is damaged: .*{expected}(.|\n)*\n  .') as caught:
        read_json(str(tmp_path / 'a.json'), {}, 'write it again')
    assert isinstance(caught.value, ConfError) and len(str(caught.value)) < 600


def test_a_missing_file_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_text(str(tmp_path / 'a'))


def test_an_error_of_the_disk_while_reading_is_a_file_error(tmp_path, monkeypatch):
    class Broken:
        def __enter__(self):
            raise OSError(errno.EIO, 'Input/output error')

        def __exit__(self, *args):
            pass

    monkeypatch.setattr(stored_files, 'open_regular', lambda path: Broken())
    with pytest.raises(FileError, match='expected a readable file, found: Input/output error'):
        read_text(str(tmp_path / 'a'))


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('old')
    with pytest.raises(ZeroDivisionError), replacing(str(path)) as temporary:
        with open(temporary, 'w', encoding='utf8') as file:
            file.write('half')
        raise ZeroDivisionError
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['a.txt']
    with replacing(str(path)) as first, replacing(str(path)) as second:
        assert first != second and first.endswith('.txt')
        for name in (first, second):
            with open(name, 'w', encoding='utf8') as file:
                file.write(name)
    assert path.read_text() == first and os.listdir(tmp_path) == ['a.txt']
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_links_are_written_through_and_devices_are_not_replaced(tmp_path):
    (tmp_path / 'link').symlink_to('target')
    for path in (str(tmp_path / 'link'), os.devnull):
        with replacing(path) as temporary, open(temporary, 'w', encoding='utf8') as file:
            file.write('x')
    assert (tmp_path / 'link').is_symlink() and (tmp_path / 'target').read_text() == 'x'
