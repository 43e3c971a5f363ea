"""``alfx report``: the page needs no other files, and its numbers match the runs."""
import csv
import html.parser
import json
import re
import sys
import xml.etree.ElementTree

import numpy as np
import pytest
from helpers import warm_starts

from alfx.bin import compare
from alfx.gin_utils import ConfError
from alfx.reports import collecting, comparing, curves
from alfx.reports import figure
from alfx.reports import page

_VOID = {'meta', 'br'}


def make_run(folder, seed, returns, lr='0.001', task='CartPole-v1', evaluations=(), torch='2.7', starts=1):
    """Write the run folder of a finished run, without its parameters."""
    (folder / 'conf').mkdir(parents=True)
    (folder / 'conf' / 'config.gin').write_text(
        f"# From my_conf.gin\nimport alfx\ncreate_environment.env_name = '{task}'\n"
        f'TrainerConfig.random_seed = {seed}\nppo/Adam.lr = {lr}\n')
    (folder / 'conf' / 'versions.json').write_text(json.dumps({'python': '3.11', 'torch': torch, 'ale-py': None}))
    (folder / 'conf' / 'command_line.txt').write_text(
        ''.join(f'2026-01-0{i + 1} 10:00:00  alfx train my_conf\n' for i in range(starts)))
    (folder / 'train' / 'algorithm').mkdir(parents=True)
    (folder / 'train' / 'start.json').write_text(json.dumps({'random_seed': seed, 'tuning': [2, 'high']}))
    for step in (5, 10):
        (folder / 'train' / 'algorithm' / f'ckpt-{step}').write_text('')
    for values, path in ((returns, folder / 'progress.csv'), (evaluations, folder / 'eval' / 'progress.csv')):
        if len(values):
            path.parent.mkdir(exist_ok=True)
            rows = [f'{i},{100 * i},{20 * i},{value}' for i, value in enumerate(values)]
            path.write_text('\n'.join(['global_counter,env_steps,seconds,average_return', *rows]) + '\n')
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    """Five runs of one conf, three of another with a smaller learning rate."""
    fast = [make_run(tmp_path / f'fast{i}', i, np.linspace(0, 10 * i, 8), evaluations=[1, 20 * i], starts=1 + i % 2)
            for i in range(5)]
    return fast + [make_run(tmp_path / f'slow{i}', i, [1, 2, 3 + i], lr='0.1 <&> 2', torch='2.6') for i in range(3)]


class Page(html.parser.HTMLParser):
    """Checks that elements are closed in their order; keeps attributes, and the cells of tables."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.rows, self.references = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.attributes += [name for name, _ in attributes]
        if tag in ('script', 'link', 'img', 'iframe', 'object', 'embed', 'image', 'use', 'base'):
            self.references.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        if tag == 'tr':
            self.rows.append([])
        elif tag in ('td', 'th'):
            self.rows[-1].append('')

    def handle_startendtag(self, tag, attributes):
        self.attributes += [name for name, _ in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ('td', 'th'):
            self.rows[-1][-1] += data


def test_the_page_is_well_formed_and_self_contained(folders):
    text = page.render(collecting.collect(folders), 'A & <b>')
    read = Page(text)
    assert not read.references
    assert not {'href', 'src', 'srcset', 'data', 'action', 'xlink:href', 'onclick', 'onload'}.intersection(
        read.attributes)
    assert not re.search(r'url\(|@import|https?:', text)
    assert '<b>' not in text.split('<body>')[1].split('</h1>')[0]
    assert 'prefers-color-scheme:dark' in text and 'name="viewport"' in text
    for picture in re.findall(r'<svg.*?</svg>', text):
        xml.etree.ElementTree.fromstring(picture)


def test_the_numbers_match_progress_csv(folders):
    report = collecting.collect(folders)
    rows = Page(page.render(report, 'Report')).rows
    for folder in folders:
        with open(f'{folder}/progress.csv') as file:
            last = list(csv.DictReader(file))[-1]
        name = folder.split('/')[-1]
        row = next(row for row in rows if row[0] == name and len(row) == 9)
        assert float(row[5]) == float(last['average_return'])
        assert int(row[4].replace(',', '')) == int(last['env_steps'])
        seconds = int(last['seconds'])
        assert row[7] == f'0:{seconds // 60:02}:{seconds % 60:02}'
        assert row[8] == '5'  # 100 steps in 20 seconds
    # last returns 0 10 20 30 40: the mean of 10, 20 and 30; evaluations are twice that
    by_place = {(score.method, score.panel): score for score in report.scores}
    fast, slow = report.methods
    assert by_place[fast, 'training'].iqm.value == 20 and by_place[fast, 'evaluation'].iqm.value == 40
    assert by_place[slow, 'training'].iqm.value == 4 and (slow, 'evaluation') not in by_place
    assert any(row[:5] == [fast, 'CartPole-v1', 'training', '5', '20'] for row in rows)
    curve = report.curves['training']['CartPole-v1'][fast]
    assert curve.center[-1] == 20 and curve.low[-1] < 20 < curve.high[-1] and curve.x[-1] == 700


def test_the_probability_of_improvement_uses_final_returns(folders):
    improvement, = collecting.collect(folders).improvements
    # 3 4 5 against 0 10 20 30 40: better than the first of five only
    assert improvement.chance.value == pytest.approx(0.2)
    assert improvement.chance.low < 0.2 < improvement.chance.high


def test_runs_that_differ_in_environment_are_one_method_on_many_tasks(tmp_path):
    folders = [make_run(tmp_path / f'{task}{lr}', 0, [1.0, value], lr=lr, task=task)
               for task, lr, value in (('A', '1', 5), ('B', '1', 2), ('A', '2', 3), ('B', '2', 7))]
    report = collecting.collect(folders)
    assert len(report.methods) == 2 and set(report.curves['training']) == {'A', 'B'}
    improvement, = report.improvements
    assert improvement.tasks == ['A', 'B'] and improvement.chance.value == 0.5
    assert [name for name, _ in report.differences] == ['ppo/Adam.lr']


def test_differences_versions_checkpoints_and_resumes_are_shown(folders):
    text = page.render(collecting.collect(folders), 'Report')
    rows = Page(text).rows
    assert ['ppo/Adam.lr', '0.001', '0.1 <&> 2'] in rows
    assert ['torch', '2.7 (5 runs), 2.6 (3 runs)'] in rows and ['python', '3.11'] in rows and ['ale-py', '-'] in rows
    row = next(row for row in rows if row[0] == 'fast1' and len(row) == 5)
    assert row[1] == '2026-01-01 10:00:00' and row[3] == '2026-01-02 10:00:00' and row[4] == '2: ckpt-5, ckpt-10'
    assert next(row for row in rows if row[0] == 'fast0' and len(row) == 5)[3] == 'never'


def test_a_column_missing_in_all_runs_is_rejected(folders):
    with pytest.raises(ConfError, match=r'no run has data for entropy over env_steps\n.*--y'):
        collecting.collect(folders, y='entropy')


def test_damaged_versions_are_rejected_by_name(folders):
    with open(f'{folders[0]}/conf/versions.json', 'w') as file:
        file.write('{')
    with pytest.raises(ConfError, match=r'versions\.json is damaged'):
        collecting.collect(folders)


def test_values_that_are_not_finite_and_single_points_are_drawn_around(tmp_path):
    folder = make_run(tmp_path / 'run', 0, [1.0, float('nan'), 3.0])
    single = make_run(tmp_path / 'single', 0, [1.0], lr='2')
    text = page.render(collecting.collect([folder, single]), 'Report')
    Page(text)
    assert 'nan' not in ''.join(re.findall(r' d="(.*?)"', text)) and '<circle' in text


@pytest.mark.parametrize('low, high, expected', [
    (0, 100, [0, 20, 40, 60, 80, 100]), (-3, 1.5, [-3, -2, -1, 0, 1, 2]), (0.013, 0.05, [0.01, 0.02, 0.03, 0.04, 0.05]),
    (7, 7, [2, 4, 6, 8, 10, 12])])
def test_ticks_are_round_numbers_around_the_data(low, high, expected):
    np.testing.assert_allclose(figure.ticks(low, high), expected, atol=1e-9)


def test_the_program_writes_the_page_of_a_folder_of_runs(folders, tmp_path):
    output = tmp_path / 'out.html'
    result = warm_starts.run([sys.executable, '-m', 'alfx', 'report', str(tmp_path), '--output', str(output)],
                          capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert 'training: IQM 20 (' in result.stdout
    Page(output.read_text())


@pytest.mark.parametrize('read', [lambda folder: collecting.collect([folder]), comparing.read_bindings,
                                  curves.conf_name])
def test_a_conf_that_is_not_utf8_is_named(folders, read):
    with open(f'{folders[0]}/conf/config.gin', 'ab') as file:
        file.write('# caf\xe9\n'.encode('latin1'))
    with pytest.raises(ConfError, match='config.gin is damaged: expected UTF-8 text, found the byte 0xe9'):
        read(folders[0])


def test_rows_with_infinite_counts_are_skipped(folders, caplog):
    with open(f'{folders[0]}/progress.csv', 'a', encoding='utf8') as file:
        file.write('inf,1e999,3,1\n8,nan,3,1\n9,1e300,3,1\n10,900,160,5\n')
    assert comparing.read_run(folders[0])['env steps'] == 900
    assert 'progress.csv is damaged: 3 lines are skipped' in caplog.text


def test_runs_with_the_same_seed_are_not_counted_as_seeds():
    assert [compare._cell(seeds, 'seed') for seeds in ((3, ), (3, 4), (3, 3))] == ['3', '2 seeds', '2 runs']


def test_large_returns_are_compared_without_an_exponent():
    assert compare._cell((154_142.4, 99_999.0, 2.5), 'return') == '154,142 (99,999 to 2.5)'
