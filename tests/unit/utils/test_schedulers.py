"""Schedulers as functions of the progress."""
import pickle

import gin
import pytest

from alfx import context, gin_utils
from alfx.utils import schedulers
from alfx.utils.schedulers import (ConstantScheduler, CyclicalScheduler, ExponentialScheduler, LinearScheduler,
                                   StepScheduler, as_scheduler)


def values(scheduler, progresses, kind='percent'):
    found = []
    for progress in progresses:
        context.update_progress(kind, progress)
        found.append(scheduler())
    return found


def test_step_schedules_change_at_their_thresholds():
    scheduler = StepScheduler('percent', [(0.4, 1.0), (0.8, 0.5), (1.0, 0.1)])
    assert values(scheduler, [0.0, 0.39, 0.4, 0.79, 0.8, 1.0, 2.0]) == [1.0, 1.0, 0.5, 0.5, 0.1, 0.1, 0.1]
    assert scheduler.final_value() == 0.1


def test_a_warm_up_rises_from_zero_at_the_start():
    scheduler = StepScheduler('iterations', [(100, 2.0), (200, 1.0)], warm_up_period=20, start=10)
    assert values(scheduler, [0, 10, 15, 29, 30, 150], 'iterations') == [0.0, 0.0, 0.5, 1.9, 2.0, 1.0]


def test_linear_schedules_interpolate_and_are_constant_outside():
    scheduler = LinearScheduler('env_steps', [(10, 1.0), (20, 3.0), (40, 0.0)])
    assert values(scheduler, [0, 10, 15, 20, 30, 40, 99], 'env_steps') == [1.0, 1.0, 2.0, 3.0, 1.5, 0.0, 0.0]
    assert scheduler.final_value() == 0.0


def test_exponential_schedules_decay_by_the_rate_each_decay_time():
    scheduler = ExponentialScheduler('global_counter', 8.0, 0.5, 100)
    assert values(scheduler, [0, 100, 200, 50], 'global_counter') == pytest.approx([8.0, 4.0, 2.0, 8 * 0.5**0.5])
    assert scheduler.final_value() == 0.0
    assert ExponentialScheduler('percent', 8.0, 0.5, 0.5).final_value() == pytest.approx(2.0)


def test_cyclical_schedules_go_back_and_forth():
    step = CyclicalScheduler('iterations', 1.0, 3.0, 10)
    assert values(step, [0, 9, 10, 19, 20, 35], 'iterations') == [1.0, 1.0, 3.0, 3.0, 1.0, 3.0]
    tenths = CyclicalScheduler('percent', 0.0, 1.0, 0.1)
    assert values(tenths, [i / 10 for i in range(11)]) == [0.0, 1.0] * 5 + [0.0]
    linear = CyclicalScheduler('iterations', 1.0, 3.0, 10, switch_mode='linear')
    assert values(linear, [0, 5, 10, 15, 20], 'iterations') == [1.0, 2.0, 3.0, 2.0, 1.0]


def test_numbers_become_constant_schedulers_and_schedulers_stay():
    assert as_scheduler(0.3)() == 0.3 and as_scheduler(0.3).final_value() == 0.3
    scheduler = LinearScheduler('percent', [(0, 1), (1, 0)])
    assert as_scheduler(scheduler) is scheduler
    assert isinstance(as_scheduler(1), ConstantScheduler)


def test_a_resumed_run_continues_the_schedule():
    scheduler = LinearScheduler('percent', [(0, 1.0), (1, 0.0)])
    context.update_progress('percent', 0.25)
    assert pickle.loads(pickle.dumps(scheduler))() == scheduler() == 0.75


@pytest.mark.parametrize('make,message', [
    (lambda: LinearScheduler('percents', [(0, 1)]), 'unknown progress type'),
    (lambda: LinearScheduler('percent', []), 'list of'),
    (lambda: StepScheduler('percent', [(0.5, 1), (0.5, 2)]), 'must increase'),
    (lambda: LinearScheduler('percent', [(0.0, 1e-3), (100_000, 0.0)]),
     r"in \[0, 1\], found 100000; to count steps, set LinearScheduler.progress_type = 'env_steps'"),
    (lambda: StepScheduler('percent', [(0.5, 1)], warm_up_period=-1), 'warm_up_period'),
    (lambda: ExponentialScheduler('percent', 1.0, -0.5, 1.0), 'decay_rate must be a number > 0'),
    (lambda: CyclicalScheduler('percent', 1.0, 2.0, 0), 'half_cycle_size'),
    (lambda: CyclicalScheduler('percent', 1.0, 2.0, 1, switch_mode='saw'), 'saw'),
])
def test_invalid_arguments_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedulers_can_be_disallowed_for_a_while():
    scheduler = LinearScheduler('percent', [(0, 1)])
    with schedulers.disallow_scheduler():
        with pytest.raises(RuntimeError, match='use a number'):
            scheduler()
        with pytest.raises(RuntimeError, match='use a number'):
            LinearScheduler('percent', [(0, 1)])
    assert scheduler() == 1


def test_a_conf_file_can_name_a_schedule():
    gin.parse_config("""
        schedulers.LinearScheduler.progress_type = 'percent'
        schedulers.LinearScheduler.schedule = [(0, 1.0), (1.0, 0.0)]
    """)
    context.update_progress('percent', 0.5)
    assert LinearScheduler()() == 0.5


@pytest.fixture
def conf(tmp_path):
    """Return a function that loads a conf from its text."""

    def load(text):
        (tmp_path / 'mine.gin').write_text(text)
        gin_utils.load(str(tmp_path / 'mine.gin'))

    yield load
    gin_utils.clear()


@pytest.mark.parametrize('text, expected', [
    ("Adam.lr = @LinearScheduler()\nLinearScheduler.progress_type = 'percent'\n"
     'LinearScheduler.schedule = [(0, 1.0), (1, 0.0)]', {'Adam.lr': 0.75}),
    ("a/Adam.lr = @LinearScheduler()\na/LinearScheduler.progress_type = 'percent'\n"
     'a/LinearScheduler.schedule = [(0, 1.0), (1, 0.0)]', {'a/Adam.lr': 0.75}),
    ("LR = @s/StepScheduler()\nAdam.lr = %LR\ns/StepScheduler.progress_type = 'percent'\n"
     's/StepScheduler.schedule = [(0.2, 1.0), (1, 0.1)]', {'Adam.lr': 0.1}),
    ("Adam.lr = @LinearScheduler()\nLinearScheduler.progress_type = 'env_steps'\n"
     'LinearScheduler.schedule = [(0, 1.0), (1, 0.0)]', {}),
    ('Adam.lr = 0.1', {}),
    ("Adam.lr = @s/gin.singleton()\ns/gin.singleton.constructor = @LinearScheduler\n"
     "LinearScheduler.progress_type = 'percent'\nLinearScheduler.schedule = [(0, 1.0), (1, 0.0)]", {'Adam.lr': 0.75}),
])
def test_bound_schedules_over_percent_have_values(conf, text, expected):
    conf(text)
    context.update_progress('percent', 0.5)
    assert schedulers.values_over_percent(0.25) == expected
    assert context.get_progress('percent') == 0.5
