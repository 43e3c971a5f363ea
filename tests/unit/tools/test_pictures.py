"""Pictures of the documentation, and the pictures on a page of results."""
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from alfx.reports.curves import Curve

TOOLS = pathlib.Path(__file__).parents[3] / 'tools'


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import pictures
    import results
    return pictures, results


def test_curves_are_drawn_small_and_the_same_each_time(tools, tmp_path):
    pictures, _ = tools
    x = np.linspace(0, 1e5, 25)
    panels = [(f'conf_{i} (Task-v{i})', [('', [Curve(x, x * i), Curve(x, x * i + 10)])]) for i in range(6)]
    written = []
    for name in ('a.svg', 'b.svg'):
        pictures.draw_curves(tmp_path / name, panels)
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1] and len(written[0]) < 150_000
    assert 'conf_5 (Task-v5)' in written[0] and '100k' in written[0]


def test_videos_of_several_agents_are_shown_side_by_side(tools, tmp_path):
    pictures, _ = tools
    films = [[np.full((300, 200, 3), 40 * t, np.uint8) for t in range(length)] for length in (3, 5)]
    pictures.write_agents(tmp_path / 'agents.gif', films)
    with Image.open(tmp_path / 'agents.gif') as film:
        assert film.n_frames == 5 and film.size == (400, 150)
        film.seek(4)  # the first agent has begun again
        shown = film.convert('RGB')
        assert shown.getpixel((100, 75))[0] == pytest.approx(40, abs=8)
        assert shown.getpixel((300, 75))[0] == pytest.approx(160, abs=8)


def test_the_results_page_has_a_picture_for_tasks_with_curves(tools, tmp_path):
    _, results = tools
    store = results.Store(tmp_path / 'results.json')
    for name, env_name, curve in (('a', 'One-v1', [[0, 1.0], [10, 2.0]]), ('b', 'One-v1', [[0, 1.0], [10, 3.0]]),
                                  ('c', 'Two-v1', [])):
        task = results.Task(name, name, env_name, (results.Bar(), ), 'f')
        store.add(task, 0, {'returns': [1.0], 'env_steps': 10, 'seconds': 1.0, 'jobs': 1, 'cores': 2, 'curve': curve,
                            'date': '2026-01-02', 'versions': {}})
    page = (tmp_path / 'results' / 'other.md').read_text()
    assert page.count('](../images/results/') == 1 and '](../images/results/One-v1.svg)' in page
    assert (tmp_path / 'images' / 'results' / 'One-v1.svg').is_file()
    assert sorted(path.name for path in (tmp_path / 'images' / 'curves').iterdir()) == ['a.svg', 'b.svg']
    saved = json.loads((tmp_path / 'curves.json').read_text())
    assert saved['b'] == {'fingerprint': 'f', 'env_name': 'One-v1', 'runs': {'0': [[0, 1.0], [10, 3.0]]}}
    assert 'curve' not in json.loads((tmp_path / 'results.json').read_text())['a']['runs']['0']
    assert results.Store(tmp_path / 'results.json').curves == saved


def test_curves_of_another_version_of_a_conf_are_dropped(tools, tmp_path):
    _, results = tools
    store = results.Store(tmp_path / 'results.json')
    run = {'returns': [1.0], 'env_steps': 10, 'seconds': 1.0, 'jobs': 1, 'cores': 2, 'date': '2026-01-02',
           'versions': {}}
    for fingerprint, seed in (('old', 0), ('new', 1)):
        task = results.Task('a', 'a', 'One-v1', (results.Bar(), ), fingerprint)
        store.add(task, seed, {**run, 'curve': [[0, 1.0], [10, 2.0]]})
    assert list(store.curves['a']['runs']) == ['1']
