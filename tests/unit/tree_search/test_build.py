"""Builds of the compiled search: cache, damaged files, missing compiler, concurrent processes."""
import logging
import os
import shutil
import subprocess
import sys

import pytest

from alfx.tree_search import build

pytestmark = pytest.mark.compiles

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ('cc', 'gcc', 'clang'))), reason='no C compiler here')


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.delenv('ALFX_NATIVE', raising=False)
    build.load.cache_clear()
    yield
    build.load.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """Return a list of all calls of the compiler."""
    calls, run = [], subprocess.run

    def counting(command, **kwargs):
        calls.append(command)
        return run(command, **kwargs)

    monkeypatch.setattr(subprocess, 'run', counting)
    return calls


def library(tmp_path):
    path, = (tmp_path / 'cache' / 'alfx').glob('*.so')
    return path


@needs_compiler
def test_the_library_is_built_once_and_found_again(compilations, tmp_path):
    for _ in range(2):
        assert build.load().alfx_select
        build.load.cache_clear()
    assert len(compilations) == 1
    assert (tmp_path / 'cache' / 'alfx').stat().st_mode & 0o077 == 0
    assert sorted(x.suffix for x in library(tmp_path).parent.iterdir()) == ['.sha256', '.so']


@needs_compiler
@pytest.mark.parametrize('damage', [
    lambda path: path.write_bytes(path.read_bytes()[:100]), lambda path: path.write_bytes(b'something else'),
    lambda path: path.with_suffix('.sha256').write_text('0' * 64), lambda path: path.with_suffix('.sha256').unlink()])
def test_a_damaged_or_foreign_file_is_built_again(damage, compilations, tmp_path):
    build._load_from(build._cache_folder())
    damage_path = library(tmp_path)
    content = damage_path.read_bytes()
    replacement = damage_path.with_name('new')  # a loaded library is not overwritten
    shutil.copy(damage_path, replacement)
    os.replace(replacement, damage_path)
    damage(damage_path)
    assert build.load().alfx_select
    assert len(compilations) == 2 and library(tmp_path).read_bytes() == content


def test_a_missing_compiler_is_logged_in_one_line(monkeypatch, caplog):
    monkeypatch.setenv('PATH', '')
    monkeypatch.delenv('CC', raising=False)
    with caplog.at_level(logging.INFO):
        assert build.load() is None and build.load() is None
    message, = (record.getMessage() for record in caplog.records)
    assert 'found no C compiler' in message and 'searching with tensors' in message


def test_a_compiler_failure_is_reported_with_its_output(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / 'broken'
    compiler.write_text('#!/bin/sh\necho no space left >&2\nexit 3\n')
    compiler.chmod(0o755)
    monkeypatch.setenv('CC', str(compiler))
    assert build.load() is None
    assert 'no space left' in caplog.text


def test_compiled_code_can_be_switched_off(monkeypatch, compilations):
    monkeypatch.setenv('ALFX_NATIVE', '0')
    assert build.load() is None and not compilations


@needs_compiler
def test_a_cache_writable_by_others_is_not_used(tmp_path):
    folder = tmp_path / 'cache' / 'alfx'
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert build.load().alfx_select
    assert not list(folder.iterdir())


@needs_compiler
def test_an_uncreatable_cache_is_replaced_by_a_temporary_folder(tmp_path):
    (tmp_path / 'cache').write_text('a file where the folder should be')
    assert build.load().alfx_select


@needs_compiler
def test_concurrent_builds_do_not_interfere():
    program = 'from alfx.tree_search import build; assert build.load().alfx_select'
    processes = [subprocess.Popen([sys.executable, '-c', program]) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
