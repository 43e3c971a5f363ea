"""Tests of progress tables, event files that are cut, and the record of the start."""

import csv
import os

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from alfx import context, summary
from alfx.runs.run_files import ProgressLog, StartRecord, cut_event_files, read_table, run_folders


def rows(path):
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def test_a_new_column_is_added_to_the_rows_before_it(tmp_path):
    path = str(tmp_path / 'a' / 'progress.csv')
    log = ProgressLog(path, ('counter', 'loss'))
    log.append({'counter': 1, 'loss': 0.5})
    log.append({'counter': 2, 'loss': 0.25, 'entropy': 1.0})
    assert rows(path) == [{'counter': '1', 'loss': '0.5', 'entropy': ''},
                          {'counter': '2', 'loss': '0.25', 'entropy': '1'}]


def test_a_table_is_truncated_and_continued(tmp_path):
    path = str(tmp_path / 'progress.csv')
    log = ProgressLog(path, ('counter', ))
    for counter in range(5):
        log.append({'counter': counter, 'extra': 2 * counter})
    with open(path, 'a') as file:
        file.write('7')  # a row that was being written
    log = ProgressLog(path, ('counter', ))
    log.cut('counter', 2)
    log.append({'counter': 3, 'extra': 60})
    assert [(r['counter'], r['extra']) for r in read_table(path)] == [('0', '0'), ('1', '2'), ('2', '4'), ('3', '60')]


def test_an_incomplete_number_is_not_read(tmp_path):
    path = tmp_path / 'progress.csv'
    log = ProgressLog(str(path), ('counter', 'loss'))
    log.append({'counter': 1, 'loss': 0.5})
    log.append({'counter': 2, 'loss': 123456.0})
    content = path.read_bytes()
    for length in range(len(content) - len(b'56\r\n'), len(content)):
        path.write_bytes(content[:length])
        assert read_table(str(path)) == [{'counter': '1', 'loss': '0.5'}]
    path.write_bytes(content)
    assert len(read_table(str(path))) == 2


def test_numbers_keep_nine_digits(tmp_path):
    path = str(tmp_path / 'progress.csv')
    ProgressLog(path, ('x', )).append({'x': 123456.789})
    assert read_table(path) == [{'x': '123456.789'}]


def events(folder):
    return [(value.tag, event.step) for path in sorted(folder.glob('*tfevents*'))
            for event in EventFileLoader(str(path)).Load() for value in event.summary.value]


def test_event_files_are_cut_by_time(tmp_path):
    writer = summary.create_summary_writer(str(tmp_path))
    with summary.push_summary_writer(writer), context.record_if(True):
        for step in range(6):
            summary.scalar('a', step, step=100 * step, walltime=1000.0 + step)
    writer.close()
    path, = tmp_path.glob('*tfevents*')
    with open(path, 'ab') as file:
        file.write(b'half a record')
    cut_event_files(str(tmp_path), 1002.5)
    assert events(tmp_path) == [('a', 0), ('a', 100), ('a', 200)]
    cut_event_files(str(tmp_path), 0.0)
    assert list(tmp_path.iterdir()) == []
    cut_event_files(str(tmp_path / 'nothing'), 0.0)


@pytest.mark.parametrize('tuning', [[1, 'highest'], [1, 'medium', 'highest'], [2, 'medium', None]])
def test_decisions_made_at_the_start_do_not_change(tmp_path, tuning):
    record = StartRecord(str(tmp_path))
    assert record.read() == {}
    record.write(random_seed=3)
    record.write(tuning=tuning)
    assert StartRecord(str(tmp_path)).read() == {'random_seed': 3, 'tuning': tuning}


TABLE = b'iteration,global_counter,loss\r\n0,0,0.5\r\n1,1,0.25\r\n2,2,\r\n'


@pytest.mark.parametrize('damage, remaining', [
    ((b'0.25', b'0.\xff5'), ['0', '2']),
    ((b'0.25', b'0.2\x005'), ['0', '2']),
    ((b'0.25', b'"0.25'), ['0', '2']),
    ((b'1,1,0.25', b'1,1'), ['0', '2']),
    ((b'global', b'glo\xfebal'), []),
    ((b'global', b'globe'), []),
])
def test_lines_of_a_table_that_are_damaged_are_left_out_with_a_warning(tmp_path, caplog, damage, remaining):
    path = tmp_path / 'progress.csv'
    path.write_bytes(TABLE.replace(*damage))
    log = ProgressLog(str(path), ('iteration', 'global_counter'))
    log.cut('global_counter', 2)
    assert str(path) in caplog.text and 'damaged' in caplog.text
    log.append({'iteration': 3, 'global_counter': 3})
    caplog.clear()
    assert [row['iteration'] for row in read_table(str(path))] == [*remaining, '3']
    assert not caplog.text


@pytest.mark.parametrize('content, expected', [
    (b'[]', {}), (b'{', {}), (b'\xff\xfe', {}), (b'', {}), (b'[' * 100_000, {}),
    (b'{"random_seed": "one", "tuning": [1, "medium"]}', {'tuning': [1, 'medium']}),
    (b'{"tuning": [1, "medium", 1]}', {}),
    (b'{"random_seed": 3, "tuning": [1]}', {'random_seed': 3}),
    (b'{"random_seed": -3, "tuning": ["medium", 1]}', {}), (b'{"random_seed": true, "tuning": [0, "low"]}', {}),
])
def test_damaged_start_data_is_a_warning_and_its_valid_part_is_kept(tmp_path, caplog, content, expected):
    path = tmp_path / 'train' / 'start.json'
    path.parent.mkdir()
    path.write_bytes(content)
    record = StartRecord(str(tmp_path))
    assert record.read() == expected and f'{path} is damaged' in caplog.text
    record.write(random_seed=7, tuning=[1, 'highest'])
    caplog.clear()
    assert record.read() == {'random_seed': 7, 'tuning': [1, 'highest']} and not caplog.text


def test_a_run_of_an_old_version_has_iterations_as_its_axis(tmp_path):
    operative = tmp_path / 'conf' / 'operative.gin'
    operative.parent.mkdir()
    operative.write_text('TrainerConfig.random_seed = 3\n')
    record = StartRecord(str(tmp_path))
    record.write(random_seed=3)
    assert record.read() == {'random_seed': 3, 'summary_axis': 'global_counter'}
    operative.write_text('TrainerConfig.summary_axis = None\n')
    other = StartRecord(str(tmp_path / 'other'))
    assert other.read() == {}
    other.write(summary_axis='env_steps')
    assert other.read() == {'summary_axis': 'env_steps'}


@pytest.mark.parametrize('argument', ['search/trials/0000/seed_0', 'search/trials/0000', 'search/trials', 'search'])
def test_runs_are_found_in_the_folder_of_a_search(tmp_path, argument):
    runs = [str(tmp_path / 'search' / 'trials' / trial / 'seed_0') for trial in ('0000', '0001')]
    for run in runs:
        os.makedirs(os.path.join(run, 'conf'))
    (tmp_path / 'search' / 'search').mkdir()  # not a run
    assert run_folders(str(tmp_path / argument)) == (runs[:1] if '0000' in argument else runs)


def test_runs_at_different_depths_are_all_found(tmp_path):
    runs = [str(tmp_path / name) for name in ('base', os.path.join('seeds', 'seed-1'), os.path.join('seeds', 'seed-2'))]
    for run in runs:
        os.makedirs(os.path.join(run, 'train'))  # which is not searched for runs
    (tmp_path / 'seeds' / 'logs').mkdir()
    assert run_folders(str(tmp_path)) == run_folders(f'{tmp_path}/') == run_folders(f'{tmp_path}/./') == runs
