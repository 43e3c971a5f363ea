"""The tool that exports every shipped conf."""
import json
import pathlib

import pytest

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture
def exports(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import exports
    return exports


def test_the_policy_of_a_conf_is_compared_with_its_file_after_a_tiny_run(exports, monkeypatch):
    monkeypatch.setattr(exports, 'FORMATS', {'torch.export': '.pt2'})  # ONNX needs further packages
    found = exports.export_conf('ppo_cart_pole.gin', 20, exports.short_runs())
    assert found == {'algorithm': 'PPOAlgorithm', 'torch.export': pytest.approx(0, abs=1e-5), 'num_steps': 20}


def test_the_table_shows_differences_and_reasons_and_updates_the_page(exports, tmp_path):
    page = tmp_path / 'page.md'
    page.write_text(f'# Before\n\n{exports._BEGIN}\nold\n{exports._END}\n\nafter\n')
    stored = {'b': {'algorithm': 'X', 'torch.export': 0.0, 'ONNX': 2.5e-7, 'num_steps': 10_000},
              'a': {'algorithm': 'Y', 'reason': 'it draws'},
              'c': {'algorithm': 'Z', 'torch.export': 0.5, 'ONNX': 0.0}}
    for _ in range(2):
        exports.write(stored, tmp_path / 'numbers.json', page)
    text = page.read_text()
    rows = [line for line in text.splitlines() if line.startswith('| `')]
    assert rows == ['| `a` | Y | no: it draws |  |  |', '| `b` | X | 0 | 2.5e-07 | 10,000 |',
                    '| `c` | Z | **5.0e-01** | 0 |  |']
    assert text.startswith('# Before') and text.endswith('after\n') and 'old' not in text
    assert json.loads((tmp_path / 'numbers.json').read_text()) == stored
