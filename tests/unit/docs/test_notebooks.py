"""The notebooks of the documentation run from the first to the last cell."""
import json
import pathlib
import sys
import types

import pytest

FOLDER = pathlib.Path(__file__).parents[3] / 'docs' / 'notebooks'


def cells_of(name):
    """Return the code cells of a notebook."""
    notebook = json.loads((FOLDER / f'{name}.ipynb').read_text())
    return [''.join(cell['source']) for cell in notebook['cells'] if cell['cell_type'] == 'code']


def run(name, tmp_path, monkeypatch):
    """Run all cells in a new folder, and return their variables."""
    monkeypatch.chdir(tmp_path)
    main = types.ModuleType('__main__')  # without a file, as in a notebook
    monkeypatch.setitem(sys.modules, '__main__', main)
    variables = main.__dict__
    for i, cell in enumerate(cells_of(name)):
        exec(compile(cell, f'{name}.ipynb[{i}]', 'exec'), variables)
    return variables


def test_notebooks_have_no_stored_output():
    for path in FOLDER.glob('*.ipynb'):
        assert not [cell for cell in json.loads(path.read_text())['cells'] if cell.get('outputs')]


@pytest.mark.slow
def test_the_first_run_learns_and_is_compared(tmp_path, monkeypatch):
    variables = run('first_run', tmp_path, monkeypatch)
    assert variables['score'] > 100 and variables['total'] > 100 and len(variables['result'].returns) == 10
    assert (tmp_path / 'runs' / 'slower' / 'progress.csv').exists()


@pytest.mark.slow
def test_the_environment_and_the_network_of_a_notebook_learn(tmp_path, monkeypatch):
    variables = run('own_environment', tmp_path, monkeypatch)
    assert variables['total'] == pytest.approx(0.4)
