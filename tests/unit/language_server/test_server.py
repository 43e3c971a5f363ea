"""The language server, driven by a client over the standard streams as editors do."""
import subprocess
import sys

import pytest
from helpers.language_client import Client

pytest.importorskip('pygls')
pytestmark = pytest.mark.processes

CONF = """# umlaut: ä
include 'sac_pendulum.gin'
rate = 1e-3
Adam.lrr = %rate
SacAlgorithm.target_update_tau = 0.1
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('workspace')
    (folder / 'base.gin').write_text("include 'sac_pendulum.gin'\n")
    (folder / 'touching.py').write_text(f"open({str(folder / 'touched')!r}, 'w').close()\n")
    return folder


@pytest.fixture(scope='module')
def client(folder):
    client = Client(folder)
    yield client
    client.kill()


def opened(client, path, text, version=1):
    client.tell('textDocument/didOpen', {'textDocument': {
        'uri': path.as_uri(), 'languageId': 'gin', 'version': version, 'text': text}})
    return client.diagnostics(path.as_uri(), version)


def at(path, line, character):
    return {'textDocument': {'uri': path.as_uri()}, 'position': {'line': line, 'character': character}}


def test_an_error_is_shown_until_it_is_corrected(client, folder):
    path = folder / 'new.gin'
    error, = opened(client, path, CONF)
    assert error['message'].startswith("Adam has no parameter 'lrr'")
    assert error['range'] == {'start': {'line': 3, 'character': 5}, 'end': {'line': 3, 'character': 8}}
    client.tell('textDocument/didChange', {'textDocument': {'uri': path.as_uri(), 'version': 2}, 'contentChanges': [
        {'range': {'start': {'line': 3, 'character': 7}, 'end': {'line': 3, 'character': 8}}, 'text': ''}]})
    assert client.diagnostics(path.as_uri(), 2) == []


def test_hover_completion_and_definition_are_answered(client, folder):
    path = folder / 'asked.gin'
    opened(client, path, CONF)
    assert 'target_update_tau' in client.ask('textDocument/hover', at(path, 4, 20))['contents']['value']
    assert client.ask('textDocument/hover', at(path, 0, 3)) is None
    items = client.ask('textDocument/completion', at(path, 3, 7))
    item = next(item for item in items if item['label'] == 'lr')
    assert item['textEdit'] == {'newText': 'lr', 'range': {'start': {'line': 3, 'character': 5},
                                                           'end': {'line': 3, 'character': 7}}}
    assert 'float' in item['detail']
    location = client.ask('textDocument/definition', at(path, 3, 12))
    assert location['uri'] == path.as_uri() and location['range']['start']['line'] == 2
    assert client.ask('textDocument/definition', at(path, 1, 12))['uri'].endswith('/confs/sac_pendulum.gin')
    assert client.ask('textDocument/definition', at(path, 4, 3))['uri'].endswith('/sac_algorithm.py')


def test_columns_count_utf16_units(client, folder):
    text = "include 'sac_pendulum.gin'\nTrainerConfig.root_dir = ('\U0001f600', @Nothing)\n"
    path = folder / 'wider.gin'
    error = next(error for error in opened(client, path, text) if "'@Nothing'" in error['message'])
    column = text.split('\n')[1].index('Nothing') + 1  # the face has two units
    assert error['range']['start'] == {'line': 1, 'character': column}


def test_an_unsaved_include_counts_and_its_error_is_shown_at_the_include(client, folder):
    path, base = folder / 'including.gin', folder / 'base.gin'
    assert opened(client, path, "\ninclude 'base.gin'\n") == []
    opened(client, base, "include 'sac_pendulum.gin'\nAdam.lrr = 1\n", version=7)
    client.tell('textDocument/didSave', {'textDocument': {'uri': base.as_uri()}})
    error, = client.diagnostics(path.as_uri(), 1)
    assert error['range'] == {'start': {'line': 1, 'character': 9}, 'end': {'line': 1, 'character': 17}}
    assert error['message'].startswith('base.gin:2: Adam has no parameter')


def test_modules_of_the_user_are_imported_only_on_request(client, folder):
    path, text = folder / 'own.gin', "import touching\ninclude 'sac_pendulum.gin'\nMyClass.x = 1\n"
    assert opened(client, path, text) == []
    assert not (folder / 'touched').exists()
    importing = Client(folder, '--import_modules')
    try:
        error, = opened(importing, path, text)
        assert "no configurable 'MyClass'" in error['message'] and (folder / 'touched').exists()
        assert importing.close() == 0
    finally:
        importing.kill()


def test_the_server_answers_before_it_imports_torch():
    program = "import sys, alfx.language_server.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', program], timeout=300).returncode == 0


def test_without_pygls_the_extra_is_named():
    program = ("import sys; sys.modules['pygls'] = None; sys.argv = ['lsp']; from alfx.bin import flags, lsp\n"
               'flags.run(lsp.main, lsp.PARSER)')
    result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 2 and 'pip install' in result.stderr and 'Traceback' not in result.stderr
