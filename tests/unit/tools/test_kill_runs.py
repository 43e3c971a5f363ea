"""What tools/kill_runs.py finds between the checkpoints of two runs."""
import math
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / 'tools'))
import kill_runs
from kill_runs import differences

from alfx.utils.checkpoint_utils import Checkpointer


def state(**changed):
    return {'w': torch.tensor([1.0, math.nan]), 'list': [1, {'x': 2.0}], 'text': 'a'} | changed


def test_equal_values_compare_equal_even_if_nan():
    assert not list(differences(state(), state()))


@pytest.mark.parametrize('changed, message, size', [
    ({'w': torch.tensor([1.0, 2.0])}, 'w: 1 of 2 differ', math.nan),
    ({'w': torch.tensor([1, 2])}, r'w: torch.float32 (2,), torch.int64 (2,)', math.inf),
    ({'list': [1, {'x': 2.5}]}, 'list.1.x: 2.0, 2.5', 0.25),
    ({'list': [1]}, 'list: [1, {', math.inf),
    ({'text': 'b'}, "text: 'a', 'b'", math.inf),
    ({'more': 1}, 'more: only in the killed run', math.inf),
])
def test_every_difference_is_reported_by_name(changed, message, size):
    difference, = differences(state(), state(**changed))
    assert str(difference).startswith(message)
    assert difference.size == pytest.approx(size, nan_ok=True)


def test_one_element_tensors_of_any_stride_are_compared():
    column = torch.arange(80.0).reshape(2, 40)[:1, 3]
    assert column.stride() != (1, )
    assert not list(kill_runs.differences({'x': column}, {'x': column.clone()}))
    assert list(kill_runs.differences({'x': column}, {'x': column + 1}))


def test_minus_zero_is_another_number_than_zero():
    assert list(differences(torch.tensor([0.0]), torch.tensor([-0.0])))


class Part(torch.nn.Module):

    def __init__(self, value):
        super().__init__()
        self.register_buffer('value', torch.tensor(value))


def run_with(folder, values, seconds):
    for step, value in values.items():
        trainer = torch.nn.Module()
        trainer.register_buffer('seconds', torch.tensor(seconds))
        Checkpointer(str(folder / 'train' / 'algorithm'), alg=Part(value), trainer=trainer).save(step)
    return folder


def test_the_first_checkpoint_that_differs_is_named_and_times_do_not_count(tmp_path):
    uninterrupted = run_with(tmp_path / 'whole', {1: 0.0, 2: 1.0, 10: 2.0}, 5.0)
    killed = run_with(tmp_path / 'killed', {2: 1.5, 10: 2.0}, 6.0)
    outcome = kill_runs.compare(uninterrupted, killed, [2])
    assert (outcome.first, outcome.compared, outcome.num_last) == (2, 2, 0)
    text = kill_runs.report('c', outcome)
    assert 'ckpt-2 is the first of 2' in text and 'alg.value: 1 of 1 differ, by up to 0.5' in text


def test_runs_that_end_elsewhere_differ(tmp_path):
    uninterrupted, killed = (run_with(tmp_path / str(n), {1: 0.0, n: 0.0}, 1.0) for n in (2, 3))
    assert 'the last checkpoint: 2, 3' in kill_runs.report('c', kill_runs.compare(uninterrupted, killed, [1]))


def test_rows_that_differ_are_named_and_times_do_not_count(tmp_path):
    for name, text in (('whole', 'step,loss,seconds\n1,0.5,1.0\n2,0.25,2.0\n'),
                       ('same', 'step,loss,seconds\n1,0.5,7.0\n2,0.25,8.0\n'),
                       ('other', 'step,loss,seconds\n1,0.5,1.0\n2,0.5,2.0\n2,0.25,2.5\n')):
        run_with(tmp_path / name, {1: 0.0}, 1.0)
        (tmp_path / name / 'progress.csv').write_text(text)
    assert not kill_runs.compare(tmp_path / 'whole', tmp_path / 'same', []).differs
    outcome = kill_runs.compare(tmp_path / 'whole', tmp_path / 'other', [])
    assert outcome.differs and outcome.first is None
    text = kill_runs.report('c', outcome)
    assert 'but progress.csv differs' in text and "progress.csv row 2.loss: '0.25', '0.5'" in text
    assert 'progress.csv row 3: only in the killed run' in text


def test_the_log_explanation_of_a_difference_is_reported(tmp_path):
    (tmp_path / 'log').write_text('INFO random seed 7\nINFO new episodes begin\nWARNING x\nINFO new episodes begin\n')
    notes = kill_runs.resuming_notes(tmp_path / 'log')
    assert notes == ('INFO new episodes begin', )
    differs = kill_runs.Outcome([2], 3, 2, (kill_runs.Difference('w', '1, 2'), ), 1)
    assert 'the log does not mention it' in kill_runs.report('c', differs)
    report = kill_runs.report('c', differs._replace(notes=notes))
    assert 'log: INFO new episodes begin' in report and 'does not mention' not in report


WRITER = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1], 'train', 'algorithm')
folder.mkdir(parents=True, exist_ok=True)
for _ in range(12 - len(list(folder.iterdir()))):
    (folder / f'ckpt-{len(list(folder.iterdir())) + 1}').touch()
    time.sleep(0.25)
"""


@pytest.mark.parametrize('spread', [1, 4])
def test_kills_are_spaced_by_the_given_number_of_checkpoints(tmp_path, spread):
    kills = kill_runs.train_with_kills([sys.executable, '-c', WRITER, str(tmp_path)], tmp_path, tmp_path / 'log', 2,
                                       lambda: 0.0, random.Random(spread), spread)
    steps = [after - before for before, after in zip([0, *kills], kills)]
    generator = random.Random(spread)
    for step in steps:
        num_new = generator.randint(1, spread)
        generator.random()
        assert num_new <= step <= num_new + 2, 'no more than what is written while it dies'
    assert len(kill_runs.checkpoints(tmp_path)) == 12
