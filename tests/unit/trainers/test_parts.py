"""Tests of the parts of a trainer: generators, threads and precision, progress display, curves."""

import functools
import io
import os
import platform
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.trainer_fakes import make_config
from torch import nn

from alfx import context
from alfx.gin_utils import ConfError
from alfx.reports import curves
from alfx.runs.run_files import ProgressLog
from alfx.trainers import cpu_tuning, progress_display
from alfx.trainers.progress_display import ProgressDisplay, format_seconds
from alfx.trainers.run_summary import parameter_table
from alfx.utils import random_state


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()),  # noqa: NPY002
            float(torch.rand(())), float(torch.randn(()))]


_COUNT_FAULTS = """
import resource, sys, torch
from alfx.trainers.cpu_tuning import Tuning
if sys.argv[1] == 'tuned':
    Tuning(1, 'highest').apply()
def update():
    return [torch.ones(2**17) for _ in range(20)] + [torch.ones(int(sys.argv[2]))]
for _ in range(20):
    update()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    update()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='a matter of glibc')
def test_memory_freed_by_an_update_is_reused_by_the_next():
    env = {**os.environ, 'MALLOC_MMAP_THRESHOLD_': '131072'}  # glibc may or may not choose this by default
    largest = 2**23 if tuple(map(int, platform.libc_ver()[1].split('.'))) >= (2, 35) else 2**17
    faults = {how: int(subprocess.run([sys.executable, '-c', _COUNT_FAULTS, how, str(largest)], capture_output=True,
                                      text=True, check=True, timeout=120, env=env).stdout)
              for how in ('tuned', 'as it is')}
    assert faults['tuned'] < 400 < faults['as it is']


def test_all_generators_are_seeded_saved_and_restored():
    random_state.set_random_seed(5)
    first = draw()
    state = random_state.capture()
    second = draw()
    random_state.restore(state)
    assert draw() == second
    random_state.set_random_seed(5)
    assert draw() == first
    with random_state.preserved():
        draw()
    assert draw() == second


def test_the_state_of_the_generators_can_be_read_without_executing_code():
    buffer = io.BytesIO()
    torch.save(random_state.capture(), buffer)
    expected = draw()
    buffer.seek(0)
    random_state.restore(torch.load(buffer, weights_only=True))
    assert draw() == expected


def test_a_seed_may_be_a_number_of_numpy():
    assert type(random_state.set_random_seed(np.int64(5))) is int
    first = draw()
    random_state.set_random_seed(5)
    assert draw() == first


def test_a_seed_is_drawn_by_default():
    assert random_state.set_random_seed(None) != random_state.set_random_seed(None)


@pytest.fixture
def torch_settings():
    """Restore threads and precision."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def choose(tmp_path, *layers, batch_size, acting_rows=0, **values):
    config = make_config(tmp_path, **{**dict(num_threads=None, float32_matmul_precision=None), **values})
    return cpu_tuning.choose(nn.Sequential(*layers), config, cpu_tuning.Work(batch_size, acting_rows))


def test_small_networks_get_one_thread_and_are_not_timed(tmp_path, torch_settings, monkeypatch):
    monkeypatch.setattr(cpu_tuning, '_try', None)
    torch.set_num_threads(2)
    assert choose(tmp_path, nn.Linear(4, 64), nn.Linear(64, 64), batch_size=256) == (1, 'highest', None)
    assert torch.get_num_threads() == 1


def test_large_networks_get_all_threads(tmp_path, torch_settings):
    torch.set_num_threads(2)
    assert choose(tmp_path, nn.Linear(512, 512), batch_size=256).num_threads == 2
    assert choose(tmp_path, nn.Conv2d(3, 8, 3), batch_size=4).num_threads == 2


@pytest.mark.parametrize('seconds, error, expected', [(0.5, 3e-6, 'medium'), (0.95, 3e-6, 'highest'),
                                                      (0.5, 6e-6, 'medium'), (0.5, 3e-4, 'highest')])
def test_precision_is_that_which_is_faster_and_computes_in_float32(tmp_path, torch_settings, monkeypatch, seconds,
                                                                   error, expected):
    monkeypatch.setattr(cpu_tuning, '_try', lambda *_: {'highest': (1.0, 3e-6), 'medium': (seconds, error)})
    assert choose(tmp_path, nn.Linear(256, 256), batch_size=256).float32_matmul_precision == expected
    assert torch.get_float32_matmul_precision() == expected


@pytest.mark.parametrize('acting_rows, expected', [(1, 'highest'), (64, 'medium')])
def test_acting_on_few_rows_has_a_separate_precision(tmp_path, torch_settings, monkeypatch, acting_rows, expected):
    def attempt(rows, columns, batch_size):
        return {'highest': (1.0, 3e-6), 'medium': (0.5 if batch_size > 1 else 2.0, 3e-6)}

    monkeypatch.setattr(cpu_tuning, '_try', attempt)
    assert choose(tmp_path, nn.Linear(256, 256), batch_size=256, acting_rows=acting_rows) == (1, 'medium', expected)
    with context.acting_precision():
        assert torch.get_float32_matmul_precision() == expected
    assert torch.get_float32_matmul_precision() == 'medium'
    choose(tmp_path, nn.Linear(256, 256), batch_size=256, acting_rows=1, float32_matmul_precision='high')
    assert context.get_acting_precision() == 'high'  # the settings of the conf apply to both


def tf32(x):
    """Rounded to the 10 bits of the significand that TF32 keeps of 23."""
    bits = x.view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


@pytest.mark.parametrize('columns', [16, 256, 4096])
def test_float32_sums_in_any_order_pass_and_rounded_factors_do_not(columns):
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(8, columns, generator=generator), torch.randn(32, columns, generator=generator))
    products = x[:, None] * weight
    exact = x.double() @ weight.double().T
    one_by_one = functools.reduce(torch.add, products.unbind(-1))
    float32 = [products.sum(-1), one_by_one, x @ weight.T]
    coarse = [tf32(x) @ tf32(weight).T, x.bfloat16().float() @ weight.bfloat16().float().T,
              (x.bfloat16() @ weight.T.bfloat16()).float()]

    def is_of_float32(product):
        return cpu_tuning._is_float32_error((product - exact).square().mean().sqrt().item(), columns)

    assert [is_of_float32(product) for product in float32 + coarse] == [True] * 3 + [False] * 3


def test_the_trial_measures_and_restores_the_precision():
    before = torch.get_float32_matmul_precision()
    outcome = cpu_tuning._try(256, 256, 256)
    assert torch.get_float32_matmul_precision() == before
    assert all(seconds > 0 for seconds, _ in outcome.values())
    assert 0 < outcome['highest'][1] < 1e-4  # of sums of 256 products of standard normal numbers


def test_the_conf_can_override_the_decision(tmp_path, torch_settings):
    tuning = choose(tmp_path, nn.Linear(4, 4), batch_size=1, num_threads=2, float32_matmul_precision='high')
    assert tuning == (2, 'high', None)


def test_a_run_is_resumed_with_at_most_as_many_threads_as_cores(tmp_path, torch_settings, monkeypatch):
    monkeypatch.setattr(cpu_tuning, 'num_cores', lambda: 1)
    config = make_config(tmp_path, num_threads=None, float32_matmul_precision=None)
    assert cpu_tuning.choose_again(cpu_tuning.Tuning(2, 'highest'), config).num_threads == 1
    config.num_threads = 2
    assert cpu_tuning.choose_again(cpu_tuning.Tuning(1, 'highest'), config).num_threads == 2


def test_progress_is_printed_in_lines_without_a_terminal(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_display.time, 'monotonic', lambda: now[0])
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    assert not display.is_due()
    display.show(0.1, 1000, {'return': '12'})
    now[0] += 20.0
    assert display.is_due()
    display.show(0.3, 5000, {'return': '34'})
    # 4000 steps in 20 seconds; the last 70% at 1% a second
    assert stream.getvalue().splitlines()[1] == ' 30.0%  return 34  steps/s 200  time left 1:10'
    assert not display.is_due()


def test_progress_is_a_bar_of_tqdm_auto_in_a_notebook(monkeypatch, capsys):
    bars = []

    class Bar:
        def __init__(self, **options):
            bars.append(options)

        clear = close = set_description_str = lambda *args, **kwargs: None

    monkeypatch.setitem(sys.modules, 'ipykernel', object())
    monkeypatch.setattr('tqdm.auto.tqdm', Bar)
    ProgressDisplay(io.StringIO()).show(0.5, 10, {})  # another stream is not the notebook
    assert not bars
    display = ProgressDisplay()
    display.show(0.5, 10, {'return': '12'})
    display.message('evaluation')
    display.close()
    assert len(bars) == 1 and '{bar}' in bars[0]['bar_format'] and capsys.readouterr().err == 'evaluation\n'


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal():
    stream = Terminal()
    display = ProgressDisplay(stream)
    display.show(0.5, 10, {'return': '12'})
    display.message('evaluation')
    display.close()
    assert ' 50%|' in stream.getvalue() and 'return 12' in stream.getvalue() and 'evaluation' in stream.getvalue()


def test_seconds_in_words():
    assert [format_seconds(s) for s in (5, 65.4, 3725)] == ['0:05', '1:05', '1:02:05']


def test_parameters_are_counted_by_part():
    network = nn.ModuleDict({'actor': nn.Linear(3, 4), 'critic': nn.Linear(3, 1)})
    assert '| actor | 16 |' in parameter_table(network) and '**20**' in parameter_table(network)


def make_run(folder, conf, values):
    log = ProgressLog(str(folder / 'progress.csv'), ('env_steps', 'average_return'))
    for step, value in values:
        log.append({'env_steps': step, 'average_return': value})
    (folder / 'conf').mkdir()
    (folder / 'conf' / 'config.gin').write_text(conf)
    (folder / 'conf' / 'command_line.txt').write_text(f'train.py --conf some/{conf[:1]}.gin\n')
    return str(folder)


def test_runs_that_differ_only_in_their_seed_are_one_group(tmp_path):
    folders = [make_run(tmp_path / str(i), conf, [(0, 1)]) for i, conf in enumerate(
        ('a = 1\nTrainerConfig.random_seed = 1\n', 'a = 1\nalfx.algorithms.config.TrainerConfig.random_seed = 2\n',
         'a = 2\n', 'b = 1\n'))]
    assert curves.group_runs(folders) == {'a': folders[:2], 'a (2)': folders[2:3], 'b': folders[3:]}


def test_curves_are_averaged_over_the_range_that_all_cover(tmp_path):
    first = make_run(tmp_path / '1', 'a', [(0, 0), (100, 100)])
    second = make_run(tmp_path / '2', 'a', [(50, 0), (150, 0)])
    band = curves.average([curves.read_curve(d, 'env_steps', 'average_return', False) for d in (first, second)])
    assert (band.x[0], band.x[-1], band.num_runs) == (50, 100, 2)
    assert (band.center[0], band.center[-1]) == (25, 50)
    assert (band.low[-1], band.high[-1]) == (0, 100)  # the bootstrap of two runs never leaves their range


def test_an_outlier_among_four_runs_does_not_move_the_curve():
    runs = [curves.Curve(np.array([0.0, 1.0]), np.array([0.0, y])) for y in (1.0, 2.0, 4.0, 1000.0)]
    assert curves.average(runs).center[-1] == 3.0


def test_curves_use_environment_steps_unless_a_run_trained_without(tmp_path):
    acting = make_run(tmp_path / '1', 'a', [(0, 0), (10, 1)])
    offline_first = make_run(tmp_path / '2', 'b', [(0, 0), (0, 1), (10, 2)])
    slow = make_run(tmp_path / '3', 'c', [(0, 0), (0, 1), *((i, i) for i in range(1, 60))])  # unroll_length = 0.25
    assert curves.axis_of([acting]) == curves.axis_of([acting, slow]) == 'env_steps'
    assert curves.axis_of([acting, offline_first]) == 'iteration'


def test_runs_without_a_column_are_named_and_the_others_drawn(tmp_path, caplog):
    short = make_run(tmp_path / '1', 'a', [(0, 1), (10, 2)])
    (tmp_path / '2').mkdir()
    (tmp_path / '2' / 'progress.csv').write_text('env_steps,average_return,train/l2_action\n0,1,3\n10,2,4\n')
    groups = {'short': [short], 'long': [str(tmp_path / '2')]}
    _, panels = curves.read_panels(groups, None, ['average_return', 'l2_action'])
    assert {title: list(bands) for title, bands in panels.items()} == {
        'average_return in training': ['short', 'long'], 'l2_action in training': ['long']}
    assert [record.getMessage() for record in caplog.records] == [
        f'l2_action is not drawn for runs without such a column: {short}']
    with pytest.raises(ConfError, match="no column 'l2_actoin'\n  did you mean 'l2_action'"):
        curves.read_panels({'long': groups['long']}, None, ['average_return', 'l2_actoin'])


@pytest.mark.parametrize('columns', [80, 100])
def test_a_progress_bar_shows_speed_and_remaining_time_first(monkeypatch, columns):
    monkeypatch.setenv('COLUMNS', str(columns))
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr('alfx.trainers.progress_display.time.monotonic', lambda: clock[0])
    stream.isatty = lambda: True
    display = ProgressDisplay(stream)
    for clock[0] in (0.0, 10.0):
        display.show(0.1 + clock[0] / 100, 1000 * clock[0], {'iteration': '1,234', 'env steps': '1,234,567',
                                                             'return': '-1234.5', 'length': '1000'})
    display.close()
    bar = stream.getvalue().split('\r')[-1].rstrip('\n')
    assert 'time left 1:20  steps/s 1,000  return -1234.5' in bar[:80]


def test_smoothing_averages_over_the_last_points():
    band = curves.average([curves.Curve(np.arange(4.0), np.array([0.0, 2.0, 4.0, 8.0]))], smoothing=2)
    assert band.center.tolist() == [0.0, 1.0, 3.0, 6.0]


def test_an_unknown_column_is_an_error_that_names_the_others(tmp_path):
    folder = make_run(tmp_path / '1', 'a', [(0, 0)])
    with pytest.raises(ConfError, match="no column 'reward'\n.*env_steps, average_return"):
        curves.read_curve(folder, 'env_steps', 'reward', False)
    with pytest.raises(ConfError, match="no column 'averge_return'\n  did you mean 'average_return'"):
        curves.read_curve(folder, 'env_steps', 'averge_return', False)


def test_a_pause_hardly_changes_the_remaining_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr('alfx.trainers.progress_display.time.monotonic', lambda: clock[0])
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    for clock[0] in range(0, 101, 10):
        display.show(clock[0] / 200, 10 * clock[0], {})
    assert stream.getvalue().splitlines()[-1].endswith('time left 1:40')
    clock[0] = 130.0  # an evaluation; then a hundredth of the run within a second
    display.show(0.505, 1010, {})
    # half of the run so far is 65 s: since the sample at 70 s 15.5% were done in 60 s, 49.5% are left
    assert stream.getvalue().splitlines()[-1].endswith('time left 3:12')
