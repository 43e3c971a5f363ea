"""The programs as a user runs them: train, resume, evaluate, play, plot."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers import warm_starts

from alfx.bin import flags
from alfx.runs import run_files
from alfx.tree_search.batched_search import SearchError
from alfx.utils.checkpoint_utils import Checkpointer, CheckpointError
from alfx.utils.discrete_action import NoValidActionError

pytestmark = pytest.mark.processes

CONF = '''
include 'ppo_cart_pole.gin'
create_environment.num_parallel_environments = 2
TrainerConfig.num_env_steps = 1500
TrainerConfig.mini_batch_size = 64
TrainerConfig.num_updates_per_train_iter = 2
TrainerConfig.random_seed = 1
TrainerConfig.evaluate = True
TrainerConfig.num_evals = 2
TrainerConfig.num_eval_episodes = 2
TrainerConfig.async_eval = False
TrainerConfig.summary_interval = 5
'''


def program(name: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    start = subprocess.run if name == 'train' else warm_starts.run  # as users do it, once
    result = start([sys.executable, '-m', f'alfx.bin.{name}', *arguments], capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture(scope='module')
def run(tmp_path_factory, request) -> tuple[str, str]:
    """Return a run folder and the output of the program."""
    folder = tmp_path_factory.mktemp('program')
    confs = os.path.join(str(request.config.rootpath), 'alfx', 'examples', 'confs')
    (folder / 'short.gin').write_text(CONF.replace("'ppo_cart_pole", f"'{confs}/ppo_cart_pole"))
    root_dir = str(folder / 'run')
    return root_dir, program('train', '--conf', str(folder / 'short.gin'), '--root_dir', root_dir).stdout


def test_training_creates_a_run_folder_and_prints_the_next_steps(run):
    root_dir, output = run
    for path in ('conf/operative.gin', 'conf/short.gin', 'conf/versions.json', 'progress.csv', 'eval/progress.csv',
                 'train.log'):
        assert os.path.isfile(os.path.join(root_dir, path)), path
    assert len(Checkpointer(run_files.checkpoint_dir(root_dir)).steps()) == 5
    assert 'evaluation return' in output
    for command in (f'play {root_dir}', f'evaluate {root_dir}', f'plot {root_dir}',
                    f'-m tensorboard.main --logdir {root_dir}', f'train {root_dir} TrainerConfig.num_env_steps=3000'):
        assert command in output


def test_signals_for_checkpoints_or_stacks_never_end_the_program(run, tmp_path):
    """Ignore requests for a checkpoint or a stack dump before a run has started and after it has ended."""
    root_dir, _ = run
    with (tmp_path / 'output').open('w') as file:
        process = warm_starts.Popen([sys.executable, '-m', 'alfx.bin.train', '--root_dir', root_dir], stdout=file,
                                    stderr=subprocess.STDOUT)
        while 'run folder' not in (tmp_path / 'output').read_text():
            assert process.poll() is None
            time.sleep(0.01)
        count = 0
        while process.poll() is None:
            process.send_signal((signal.SIGUSR1, signal.SIGUSR2)[count % 2])
            time.sleep(0.02)
            count += 1
    assert process.returncode == 0 and count > 3, (tmp_path / 'output').read_text()


def test_evaluation_reports_both_ways_of_acting_as_json(run):
    root_dir, _ = run
    process = program('evaluate', '--root_dir', root_dir, '--num_episodes', '5', '--num_environments', '2',
                      '--json', '-')
    result = json.loads(process.stdout)
    assert result['checkpoint_step'] == Checkpointer(run_files.checkpoint_dir(root_dir)).steps()[-1]
    for mode in ('greedy', 'sampled'):
        assert len(result[mode]['returns']) == result[mode]['episodes'] == 5
        assert result[mode]['average_return'] == sum(result[mode]['returns']) / 5
        assert result[mode]['ci95_return'] > 0


def test_evaluation_samples_actions_as_often_as_the_conf_says(run):
    arguments = ('evaluate', '--root_dir', run[0], '--num_episodes', '1', '--conf_param',
                 'TrainerConfig.epsilon_greedy=0.25', '--json', '-')
    assert set(json.loads(program(*arguments).stdout)) - {'root_dir', 'checkpoint_step'} == {'epsilon_greedy=0.25'}
    assert 'sampled' in json.loads(program(*arguments, '--mode', 'sampled').stdout)


def test_a_policy_trained_in_bfloat16_is_exported_in_float32(run, tmp_path):
    pytest.importorskip('onnxscript')
    pytest.importorskip('onnxruntime')
    path = tmp_path / 'policy.onnx'
    program('export', '--root_dir', run[0], '--output', str(path), '--num_steps', '5', '--conf_param',
            'TrainerConfig.enable_amp=True')
    assert path.stat().st_size > 0


def test_the_return_of_a_single_episode_has_no_spread(run):
    output = program('evaluate', '--root_dir', run[0], '--num_episodes', '1').stdout
    assert re.search(r'^greedy: return [\d.]+, length [\d.]+, 1 episode$', output, re.MULTILINE)


def test_a_checkpoint_is_rendered_to_a_video(run, tmp_path):
    root_dir, _ = run
    first = Checkpointer(run_files.checkpoint_dir(root_dir)).steps()[0]
    output = program('play', '--root_dir', root_dir, '--record_file', str(tmp_path / 'play.gif'), '--num_episodes', '1',
                     '--checkpoint_step', str(first), '--random_seed', '3').stdout
    assert 'episode 1: return' in output
    assert (tmp_path / 'play.gif').read_bytes().startswith(b'GIF')


def test_all_checkpoints_are_rendered_to_one_video_each(run, tmp_path):
    root_dir, _ = run
    steps = Checkpointer(run_files.checkpoint_dir(root_dir)).steps()
    output = program('play', '--root_dir', root_dir, '--record_file', str(tmp_path / 'play.gif'), '--num_episodes', '1',
                     '--max_frames', '20', '--checkpoint_step', 'all').stdout
    assert sorted(os.listdir(tmp_path)) == sorted(f'play-{step}.gif' for step in steps)
    assert [f'checkpoint {step}' in output for step in steps] == [True] * 5
    assert "'latest'" in program('evaluate', '--root_dir', root_dir, '--checkpoint_step', 'all', code=2).stderr


def test_curves_are_drawn(run, tmp_path):
    root_dir, _ = run
    output = program('plot', root_dir, '--output', str(tmp_path / 'curves.png')).stdout
    assert 'average_return in training: short' in output and 'average_return in evaluation: short' in output
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')


def test_bad_flags_exit_with_2_and_unknown_picture_formats_are_rejected(run, tmp_path):
    root_dir, _ = run
    found = program('evaluate', '--root_dir', root_dir, '--num_episodes', '0', code=2)
    assert '--num_episodes: expected int' in found.stderr
    assert 'alfx list' in program('train', '--list', code=2).stderr
    assert 'temporary folder' in program('check', '--root_dir', root_dir, code=2).stderr
    assert '.zzz' in program('plot', root_dir, '--output', str(tmp_path / 'curves.zzz'), code=2).stderr
    for name, flag in (('plot', '--output'), ('evaluate', '--json')):
        argument = (root_dir, ) if name == 'plot' else ('--root_dir', root_dir)
        assert 'does not exist' in program(name, *argument, flag, str(tmp_path / 'no' / 'x.png'), code=2).stderr
    program('plot', '--untrusted', root_dir, '--output', str(tmp_path / 'curves.png'))


def test_a_checkpoint_that_cannot_be_used_is_a_message_without_a_traceback():
    assert flags._exit_code(CheckpointError('damaged')) == 1


@pytest.mark.parametrize('error', [NoValidActionError, SearchError])
def test_an_empty_mask_or_a_diverged_model_is_no_traceback(error):
    assert flags._exit_code(error('what happened')) == 1


@pytest.mark.parametrize('command_line, code', [
    ('-m alfx.bin.compare 2>&-', 2), ('-m alfx.bin.compare <&- >&- 2>&-', 2), ('-m alfx.bin.list | true', 0),
    ("-c 'from alfx.bin import command; command.prepare_streams(); print(\"\\udce9 x\" * 100000)' | true", 0)])
def test_programs_work_without_readers_of_their_output(command_line, code):
    done = subprocess.run(['/bin/bash', '-o', 'pipefail', '-c', f'{sys.executable} {command_line}; echo code $?'],
                          capture_output=True, text=True, timeout=100)
    assert f'code {code}' in done.stdout and not done.stderr


def test_rendering_without_a_display_prints_nothing_about_displays(tmp_path):
    unset = ('SDL_VIDEODRIVER', 'DISPLAY', 'WAYLAND_DISPLAY', 'XDG_RUNTIME_DIR')
    done = warm_starts.run([sys.executable, '-m', 'alfx', 'play', 'zoo:q_learning_taxi', '--num_episodes', '1'],
                           env={name: value for name, value in os.environ.items() if name not in unset},
                           capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert done.stderr == 'no display is available, so no window opens; --record_file play.mp4 records a video\n'


def test_messages_are_not_delayed_if_python_is_unbuffered():
    program = ('import os, sys\nfrom alfx.bin import command\ncommand.prepare_streams()\n'
               'print("first", file=sys.stderr)\nos.write(2, b"second\\n")')
    done = subprocess.run([sys.executable, '-u', '-c', program], capture_output=True, text=True, timeout=100)
    assert done.stderr == 'first\nsecond\n'
