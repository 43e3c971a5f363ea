"""The command ``alfx``: finding programs, lists, descriptions, help, completion."""
import io
import json
import logging
import os
import signal
import subprocess
import sys

import pytest
from helpers.flag_values import flag_values

import alfx
from alfx import gin_utils
from alfx.bin import command, completion, flags, policy_flags
from alfx.bin import help as help_program
from alfx.bin import list as list_program
from alfx.runs import zoo

PARSER = flags.Parser('program.py', 'Test the command.', flags.CONF)
flags.define_conf_flags(PARSER)


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, '-m', 'alfx', *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_every_runnable_module_is_a_command_with_a_description():
    found = command.programs()
    assert {'train', 'evaluate', 'play', 'plot', 'check', 'search', 'list', 'show', 'help', 'compare'} <= set(found)
    assert not {'flags', 'ranks', 'launch', 'command', 'policy_flags'} & set(found)
    assert all(text.endswith('.') for text in found.values())


@pytest.mark.parametrize('arguments', [(), ('--help',), ('help',)])
def test_without_a_command_all_commands_are_listed(arguments, capsys):
    assert command.main(arguments) == 0
    output = capsys.readouterr().out
    assert all(f'\n  {name} ' in output for name in command.programs())


def test_a_misspelled_command_is_answered_with_the_nearest(capsys):
    assert command.main(['trian']) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize('program, start', [('/bin/alfx', 'alfx '),
                                            ('/x/alfx/__main__.py', f'{command.python()} -m alfx ')])
def test_processes_of_a_run_show_commands_in_the_style_of_its_start(program, start, monkeypatch):
    shown = []

    def run(name, **settings):
        child = 'from alfx.bin.command import command_of; print(command_of("play", "my run"))'
        shown.append(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True, check=True).stdout)

    monkeypatch.setenv('ALFX_STARTED_AS', '')  # restored after the test
    monkeypatch.setattr(command.runpy, 'run_module', run)
    monkeypatch.setattr(sys, 'argv', [program, 'train'])
    assert command.main() == 0
    assert shown == [f"{start}play 'my run'\n"]


def test_the_version_is_printed(capsys):
    assert command.main(['--version']) == 0
    assert capsys.readouterr().out == f'alfx {alfx.__version__}\n'


def test_neither_the_package_nor_the_list_of_confs_imports_torch():
    program = ('import sys, alfx, alfx.bin.command, alfx.bin.list, alfx.bin.help, alfx.bin.completion\n'
               'alfx.bin.list.main([]); alfx.bin.help.main(["networks"]); alfx.bin.completion.main(["bash"])\n'
               'assert "torch" not in sys.modules')
    subprocess.run([sys.executable, '-c', program], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_names_of_the_package_are_imported_when_they_are_used():
    program = ('import alfx\nassert alfx.nest.map_structure and alfx.TensorSpec((2,)).shape == (2,)\n'
               'from alfx import TimeStep, nest, context\n'
               'assert not hasattr(alfx, "no_such_name") and set(alfx.__all__) <= set(dir(alfx))')
    subprocess.run([sys.executable, '-c', program], check=True, timeout=60)


def test_the_list_has_every_conf_with_a_task(capsys):
    assert list_program.main(['--wide']) == 0
    rows = capsys.readouterr().out.splitlines()
    with_task = [head for head in list_program.read_heads() if head.task]
    assert len(rows) == len(with_task) + 1
    assert all(head.steps and head.expected and head.algorithm for head in with_task)
    assert any(row.split()[:5] == ['ppo_cart_pole', 'CartPole-v1', 'PPO', '100,000', 'return'] for row in rows)


def test_the_list_is_narrowed_by_task_and_algorithm(capsys):
    assert list_program.main(['--task', 'pendulum', '--algorithm', 'soft_actor_critic']) == 0
    names = [row.split()[0] for row in capsys.readouterr().out.splitlines()[1:]]
    assert 'sac_pendulum' in names and all(name.endswith('pendulum') for name in names) and 'td3_pendulum' not in names
    assert list_program.main(['no such task']) == 1
    assert list_program.main(['--all', 'base', 'soft']) == 0
    assert 'soft_networks' in capsys.readouterr().out


def test_help_finds_every_class_that_a_conf_can_name():
    gin_utils.import_configurables()
    known = {entry.selector for entry in help_program.entries()}
    registered = {name for name in gin_utils.registry.registered_selectors() if name.startswith('alfx.')}
    own = {name for name in registered if '<locals>' not in name}
    assert own - known == set()


def test_help_shows_arguments_docstring_and_confs_that_bind_them(capsys):
    assert help_program.main(['PPOLoss']) == 0
    output = capsys.readouterr().out
    assert output.startswith('@alfx.algorithms.ppo_loss.PPOLoss\n')
    for text in ('PPOLoss.importance_ratio_clipping = 0.2', '# float\n', 'Clipped surrogate objective',
                 'ppo_atari.gin                     PPOLoss.entropy_regularization = 0.01'):
        assert text in output


def test_help_explains_arguments_of_other_classes_by_class(capsys):
    for name, owner, explained in (
            ('PPOLoss', 'ActorCriticLoss', 'td_loss_weight = 1.0: weight of the value error.'),
            ('PPOAlgorithm', 'ActorCriticAlgorithm', 'optimizer = None: optimizes all parameters.'),
            ('ActorDistributionNetwork', 'EncodingNetwork', 'use_fc_bn = False: use batch norm in fully')):
        assert help_program.main([name]) == 0
        own, _, inherited = capsys.readouterr().out.partition(f'\nArguments of {owner}:\n')
        assert f'    {explained}' in inherited and 'Arguments of' not in own


def test_meanings_of_forwarded_arguments_are_found():
    gin_utils.import_configurables()
    assert gin_utils.meanings('ActorDistributionNetwork')['dropout'].startswith('rate of ')
    assert gin_utils.describe('PPOLoss').meanings['gamma'][0] == 'ActorCriticLoss'
    assert gin_utils.describe('PPOLoss').meanings['value_clipping'][0] == ''


def test_help_describes_functions_and_required_arguments(capsys):
    assert help_program.main(['clipped_exp']) == 0
    assert 'clipped_exp.clip_value_max =' in capsys.readouterr().out
    assert help_program.main(['@ValueNetwork()']) == 0
    assert 'required' in capsys.readouterr().out


def test_help_lists_the_modules_of_a_folder(capsys):
    assert help_program.main(['networks']) == 0
    output = capsys.readouterr().out
    assert 'alfx.networks.value_networks\n  ValueNetworkBase ' in output and '\n  ValueNetwork ' in output
    assert ':class:' not in output


def test_help_on_a_module_shows_its_method_and_its_classes(capsys):
    assert help_program.main(['sac_algorithm']) == 0
    output = capsys.readouterr().out
    assert output.startswith('alfx.algorithms.sac_algorithm\n\nSoft actor-critic') and '\n  SacAlgorithm  ' in output


def test_help_shows_the_nearest_name(capsys):
    assert help_program.main(['PPOLos']) == 2
    assert "did you mean 'PPOLoss'?" in capsys.readouterr().err
    for part, name in (('dqn', 'DqnAlgorithm'), ('Sac', 'SacAlgorithm'), ('sac_algoritm', 'sac_algorithm'),
                       ('SACAlgoritm', 'SacAlgorithm')):
        assert help_program.main([part]) == 2
        assert f"did you mean '{name}'?" in capsys.readouterr().err
    for name, hint in (('clip_range', '\n  alfx calls it PPOLoss.importance_ratio_clipping'),
                       ('nothing_is_near', '\n  for a class of your own, also write --module your_module'),
                       ('sac.gin', '\n  alfx show sac prints sac.gin'),
                       ('dqn', "\n  did you mean 'DqnAlgorithm'?\n  alfx show dqn prints dqn.gin")):
        assert help_program.main([name]) == 2
        assert capsys.readouterr().err == f"there is no configurable '{name}'{hint}\n"
    assert help_program.main(['load']) == 2
    message = capsys.readouterr().err
    assert 'ambiguous' in message and 'environments.suite_gym.load' in message


def test_help_explains_one_argument_in_conf_syntax(capsys):
    for name, line, explained in (
            ('PPOLoss.gamma', 'PPOLoss.gamma = 0.99  # float', 'discount factor, or one per dimension of a K-dim'),
            ('ppo/Adam.lr', 'Adam.lr = 0.001  # float', 'learning rate or scheduler.'),
            ('TrainerConfig.num_env_steps', 'TrainerConfig.num_env_steps = 0  # int', 'stop acting after this number')):
        assert help_program.main([name]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[2].startswith(line) and lines[4].startswith(explained) and lines[1] == ''
        bound = lines[lines.index('bound by:') + 1:]
        assert bound and all(f'{name.rpartition("/")[2]} = ' in each for each in bound)
    assert help_program.main(['suite_gym.load.discount']) == 0
    capsys.readouterr()
    assert help_program.main(['PPOLoss.gama']) == 2
    assert capsys.readouterr().err == "PPOLoss has no argument 'gama'\n  did you mean 'PPOLoss.gamma'?\n"
    assert help_program.main(['PPOLos.gamma']) == 2
    assert capsys.readouterr().err.startswith("there is no configurable 'PPOLos.gamma'\n")


def test_help_explains_an_argument_of_a_user_class(capsys, tmp_path, monkeypatch):
    (tmp_path / 'own_help.py').write_text('''
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.gin_utils import configurable, takes_arguments_of


@configurable
class HelpedSac(SacAlgorithm):
    """SAC.

    Args:
        beta: weight of nothing.
    """

    @takes_arguments_of(SacAlgorithm)
    def __init__(self, beta: float = 0.5, **kwargs):
        super().__init__(**kwargs)
''')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    assert help_program.main(['HelpedSac.beta', '--module', 'own_help']) == 0
    output = capsys.readouterr().out
    assert 'HelpedSac.beta = 0.5  # float' in output and 'weight of nothing' in output
    assert help_program.main(['HelpedSac.target_update_tau', '--module', 'own_help']) == 0
    assert '(argument of SacAlgorithm)' in ' '.join(capsys.readouterr().out.split())
    assert help_program.main(['HelpedSac.bta', '--module', 'own_help']) == 2
    assert "did you mean 'HelpedSac.beta'?" in capsys.readouterr().err


def test_help_shows_the_hooks_of_a_callback(capsys):
    for name in ('Callback', 'alfx.runs.callbacks.Callback'):
        assert help_program.main([name]) == 0
        output = capsys.readouterr().out
        assert output.startswith('alfx.runs.callbacks.Callback\n') and 'on_evaluation_end(self, run' in output


def test_help_explains_the_records_of_algorithms(capsys):
    for name, field in (('LossInfo', 'priority'), ('AlgStep', 'info'), ('TimeStep', 'reward'), ('Experience', 'state')):
        assert help_program.main([name]) == 0
        output = capsys.readouterr().out
        assert output.startswith(f'alfx.data_structures.{name}\n') and f'\n    {field}: ' in output
    assert help_program.main(['torch']) == 2  # data_structures imports it


def test_help_writes_arguments_in_conf_syntax(capsys):
    assert help_program.main(['suite_atari.load']) == 0
    output, bound = capsys.readouterr().out.split('bound by:')
    assert '\nsuite_atari.load.frame_skip = 4' in output and '\nload.' not in output
    assert 'suite_atari.load.' in bound and 'suite_gym.load.' not in bound


def test_the_steps_in_the_list_are_numbers_of_steps():
    steps = {head.name: head.steps for head in list_program.read_heads()}
    assert steps['parvi_digits_ood'] == '60 epochs' and steps['sac_pendulum'].replace(',', '').isdecimal()


@pytest.mark.processes
def test_programs_are_run_with_their_own_arguments_and_help_is_no_error():
    output = run('train', '--help').stdout
    assert output.startswith('usage: alfx train [options] [CONF | RUN] [KEY=VALUE ...]\n\nTrain the algorithm')
    assert '--conf_param' in output and 'gin_file' not in output
    assert 'Plot the learning curves' in run('help', 'plot').stdout == run('plot', '--help').stdout
    shown = run('show', 'ppo_cart_pole', '--conf_param', 'PPOLoss.gamma=0.5').stdout
    assert 'PPOLoss.gamma = 0.5' in shown
    assert '# --conf_param, overrides ppo.gin:' in shown and ', ppo_cart_pole.gin:' in shown


def test_show_prints_a_conf_with_the_same_bindings(tmp_path):
    with gin_utils.loaded('sac_pendulum') as conf:
        lines = list(gin_utils.flat_lines(conf))
        before = {binding.key: repr(binding.value) for binding in conf.bindings}
    path = tmp_path / 'flat.gin'
    path.write_text('\n'.join(lines))
    with gin_utils.loaded(str(path)) as conf:
        assert {binding.key: repr(binding.value) for binding in conf.bindings} == before


def test_a_conf_or_a_run_folder_can_be_passed_without_its_flag(tmp_path):
    with flag_values(PARSER):
        assert flags.take_argument(['alfx', 'sac_pendulum'], 'conf') == ['alfx']
        assert flags.FLAGS.conf == 'sac_pendulum'
        assert flags.take_argument(['alfx', 'another'], 'conf') == ['alfx', 'another']  # call() refuses it
    (tmp_path / 'conf').mkdir()
    with flag_values(PARSER):
        assert flags.take_argument(['alfx', str(tmp_path)], 'conf') == ['alfx']
        assert (flags.FLAGS.conf, flags.FLAGS.root_dir) == (None, str(tmp_path))
    with flag_values(PARSER):
        assert flags.take_argument(['alfx', 'a', 'b'], 'conf') == ['alfx', 'b']  # call() names the excess argument
        assert flags.FLAGS.conf == 'a'


@pytest.mark.parametrize('words, completions', [
    ('tr', ['train']), ('train --num', ['--num_processes']), ('train --root-d', ['--root_dir']),
    ('train ppo_cart_p', ['ppo_cart_pole', 'ppo_cart_pole_rnn']), ('train --conf=sac_p', ['--conf=sac_pendulum']),
    ('evaluate --mode ', ['both', 'greedy', 'sampled']), ('evaluate --mode = g', ['greedy']),
    ('completion z', ['zsh']), ('dataset fi', ['filter']), ('no_program ', []), ('check --root', []),
    ('help Sac', ['SacAlgorithm']), ('help suite_gym.lo', ['suite_gym.load']), ('help pl', ['play', 'plot']),
    ('train ppo/SacA', ['ppo/SacAlgorithm.']),
    ('play zoo:dqn_a', ['zoo:dqn_acrobot']), ('show zoo:dqn_a', ['zoo:dqn_acrobot']), ('train zoo:dqn_a', []),
    ('evaluate zoo : dqn_a', ['dqn_acrobot']), ('export --device cpu zoo : dqn_a', ['dqn_acrobot']),
])
def test_words_are_completed(words, completions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert completion.completions(words.split(' ')) == completions


def test_files_are_completed_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'ppo_cart_run').mkdir()
    (tmp_path / 'mine.gin').touch()
    assert completion.completions(['train', 'ppo_cart_r']) == ['ppo_cart_run/']
    assert completion.completions(['train', '--conf', 'mi']) == ['mine.gin', 'mini_grid_ppo'][:1]
    assert 'mine.gin' in completion.completions(['train', ''])


@pytest.mark.processes
def test_the_completion_script_completes_in_bash(tmp_path):
    (tmp_path / 'alfx').write_text(f'#!/bin/sh\nexec {sys.executable} -m alfx "$@"\n')
    (tmp_path / 'alfx').chmod(0o755)
    program = run('completion', 'bash').stdout + '''
compopt() { :; }
COMP_WORDS=(alfx train ppo_cart_p); COMP_CWORD=2; _alfx; echo "${COMPREPLY[@]}"
COMP_WORDS=(alfx train x.gin --conf_param TrainerConfig.num_env); COMP_CWORD=4; _alfx; echo "${COMPREPLY[@]}"
COMP_WORDS=(alfx fork run --set ppo/Adam.l); COMP_CWORD=4; _alfx; echo "${COMPREPLY[@]}"
COMP_WORDS=(alfx train suite_gym.load.disc); COMP_CWORD=2; _alfx; echo "${COMPREPLY[@]}"
COMP_WORDS=(alfx train OacAlgorithm.target_update_t); COMP_CWORD=2; _alfx; echo "${COMPREPLY[@]}"
COMP_WORDS=(alfx evaluate --mode = g); COMP_CWORD=4; _alfx; echo "${COMPREPLY[@]}"
COMP_WORDS=(alfx play zoo : q_learning_); COMP_CWORD=4; _alfx; echo "${COMPREPLY[@]}"
COMP_WORDS=(alfx evaluate zoo :); COMP_CWORD=3; _alfx; echo "${#COMPREPLY[@]} ${COMPREPLY[0]}"
'''
    environment = {**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
    done = subprocess.run(['bash', '-c', program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines() == [
        'ppo_cart_pole ppo_cart_pole_rnn', 'TrainerConfig.num_env_steps=', 'ppo/Adam.lr=', 'suite_gym.load.discount=',
        'OacAlgorithm.target_update_tau=', 'greedy', 'q_learning_frozen_lake q_learning_taxi',
        f'{len(zoo.names())} {zoo.names()[0]}']


@pytest.mark.parametrize('shell', ['bash', 'zsh', 'fish'])
def test_there_is_a_completion_script_for_each_shell(shell, capsys):
    assert completion.main([shell]) == 0
    assert 'alfx completion --complete --' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        completion.main(['tcsh'])


@pytest.mark.processes
def test_help_of_every_program_imports_no_torch():
    program = """
import contextlib, io, runpy, sys
from alfx.bin import command
for name in command.programs():
    sys.argv, said = ['alfx', '--help'], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_module(f'alfx.bin.{name}', run_name='__main__', alter_sys=True)
    text = said.getvalue()
    assert text.startswith(f'usage: alfx {name} ') and '\\noptions:\\n' in text and '\\nexamples:\\n' in text, text
    assert not {'torch', 'numpy', 'gin', 'alfx.gin_utils'} & set(sys.modules), name
"""
    subprocess.run([sys.executable, '-c', program], check=True, timeout=60)


@pytest.mark.processes
def test_help_on_classes_imports_no_torch():
    program = ('import sys\nfrom alfx.bin import completion, help\n'
               'for name in ("SacAlgorithm", "suite_gym.load", "TrainerConfig", "suite_digits.load", "FC"):\n'
               '    assert help.main([name]) == 0\n'
               'assert "TrainerConfig.num_episodes=" in completion.completions(["train", "TrainerConfig.n"])\n'
               'assert completion.completions(["play", "zoo:"])\n'
               'assert "torch" not in sys.modules and "gymnasium" not in sys.modules')
    subprocess.run([sys.executable, '-c', program], check=True, timeout=60, stdout=subprocess.DEVNULL)


OTHER_PACKAGES = {  # their constructors belong to other packages, or are registered with restrictions
    'AddN', 'BatchNorm1d', 'BatchNorm2d', 'Detach', 'Identity', 'NonEpisodicEnv', 'SequentialAlg', 'SuccessAtEnd',
    'sequential_alg'}


@pytest.mark.processes
def test_the_source_code_describes_classes_as_imports_do():
    program = ('import json\nfrom alfx.bin import help\nfound = {}\n'
               'for entry in help.entries():\n'
               '    if (x := help.described(entry)) is not None:\n'
               '        found[entry.selector] = [x.docstring, *help._signature_lines("X", x.parameters),\n'
               '                                 *help._inherited_lines(x)]\n'
               'print(json.dumps(found))')
    output = subprocess.run([sys.executable, '-c', program], check=True, timeout=60, stdout=subprocess.PIPE).stdout
    found = json.loads(output)
    gin_utils.import_configurables()
    selectors = {entry.selector for entry in help_program.entries()}
    assert {name.rsplit('.', 1)[-1] for name in selectors - found.keys()} == OTHER_PACKAGES
    for selector, lines in found.items():
        imported = gin_utils.describe(selector)
        imported.parameters.pop('kwargs', None)  # of a class that is registered as a function; it cannot be bound
        assert lines == [imported.docstring, *help_program._signature_lines('X', imported.parameters),
                         *help_program._inherited_lines(imported)], selector


@pytest.mark.parametrize('is_terminal, no_color, colored', [(True, None, True), (False, None, False),
                                                            (True, '1', False)])
def test_warnings_have_a_color_on_a_terminal_unless_no_color_is_set(is_terminal, no_color, colored, monkeypatch):
    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

    monkeypatch.delenv('NO_COLOR', raising=False)
    if no_color is not None:
        monkeypatch.setenv('NO_COLOR', no_color)
    stream = Stream()
    logger = logging.getLogger('alfx')
    monkeypatch.setattr(logger, 'handlers', [])
    monkeypatch.setattr(sys, 'stderr', stream)
    policy_flags.set_up_logging()
    logger.warning('careful')
    logger.info('plain')
    first, second = stream.getvalue().splitlines()
    assert ('\x1b[33m' in first) == colored and 'WARNING careful' in first and '\x1b' not in second


def test_a_closed_pipe_ends_the_program_quietly():
    program = subprocess.Popen([sys.executable, '-m', 'alfx', 'help', 'networks'], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    program.stdout.close()
    assert program.stderr.read() == b''
    assert program.wait() in (0, 128 + signal.SIGPIPE)
    program.stderr.close()


def test_help_shows_ranges_in_words(capsys):
    assert help_program.main(['PPOLoss']) == 0
    assert '# float in [0, 1] or Sequence[float in [0, 1]]' in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.parametrize('words', [['-m', 'alfx', 'fork'], ['-m', 'alfx', 'branch'], ['-m', 'alfx.bin.branch']])
def test_fork_can_be_called_by_its_former_name(words):
    done = subprocess.run([sys.executable, *words, '--help'], capture_output=True, text=True)
    assert 'Fork a run from a checkpoint' in done.stdout + done.stderr


@pytest.mark.parametrize('columns', [80, 100, 160])
def test_the_list_of_confs_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv('COLUMNS', str(columns))
    list_program.main([])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and ('Advantage actor-' in lines[1]) is (columns > 100)
    list_program.main(['--wide'])
    assert '...' not in capsys.readouterr().out
