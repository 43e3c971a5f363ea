"""The flags that programs share, and how a program ends."""

import errno
import signal
import sys

import pytest
import torch
from helpers.flag_values import flag_values

from alfx import gin_utils
from alfx.algorithms.base.ownership import OwnershipError
from alfx.bin import check as check_program
from alfx.bin import flags as conf_flags
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.environments.environment_errors import EnvironmentLoadError, EnvironmentStepError
from alfx.tensor_specs import SpecError
from alfx.trainers import conf_check
from alfx.trainers.distributed.strategies import ParameterMismatchError

PARSER = conf_flags.Parser('program.py', 'Test the flags.', conf_flags.CONF)
conf_flags.define_conf_flags(PARSER)


@pytest.fixture(autouse=True)
def clean():
    with flag_values(PARSER):
        yield
    gin_utils.clear()


@pytest.fixture
def conf_file(tmp_path):
    path = tmp_path / 'short.gin'
    path.write_text('TrainerConfig.num_iterations = 3\n')
    return str(path)


def bound(name):
    return {binding.name: binding.value for binding in gin_utils.unused_bindings()}.get(name)


@pytest.mark.parametrize('flag', ['conf', 'gin_file'])
def test_the_conf_is_loaded_with_its_overrides(conf_file, flag):
    value = conf_file if flag == 'conf' else [conf_file]
    with flag_values(**{flag: value}, conf_param=['TrainerConfig.eval_interval=5'],
                             gin_param=['TrainerConfig.num_iterations=7']):
        conf_flags.conf_from_flags()
    assert bound('num_iterations') == 7 and bound('eval_interval') == 5


def test_a_missing_conf_raises_with_the_flag():
    with pytest.raises(gin_utils.ConfError, match='add --conf FILE'):
        conf_flags.conf_from_flags()
    with pytest.raises(gin_utils.ConfError, match='add --root_dir DIR'):
        conf_flags.root_dir_from_flags()


def test_two_confs_are_rejected(conf_file):
    with flag_values(conf=conf_file, gin_file=[conf_file]):
        with pytest.raises(gin_utils.ConfError, match='expected one conf file, found 2'):
            conf_flags.conf_from_flags()


def test_the_conf_of_a_run_folder_is_used_where_none_is_given(conf_file, tmp_path):
    root_dir = str(tmp_path / 'run')
    gin_utils.write_conf(root_dir, gin_utils.load(conf_file), [])
    conf_flags.conf_from_flags(root_dir)
    assert bound('num_iterations') == 3


@pytest.mark.parametrize('error, code', [
    (gin_utils.ConfError('wrong', 'do better', 'a.gin:3'), 2), (SpecError('wrong'), 2),
    (OwnershipError('wrong'), 2), (EnvironmentLoadError('wrong'), 2), (FileNotFoundError('wrong'), 2),
    (EnvironmentStepError(1, 'Toy', 'step()', 'wrong'), 1), (NonFiniteLossError('wrong'), 1),
    (ParameterMismatchError('wrong'), 1),
])
def test_a_user_error_is_one_message_without_a_traceback(error, code, capsys):
    def main():
        raise error

    assert conf_flags.call(main, ['program']) == code
    printed = capsys.readouterr()
    assert printed.out == '' and 'wrong' in printed.err and 'Traceback' not in printed.err


def test_a_conf_error_is_printed_with_location_and_remedy(capsys):
    def main():
        raise gin_utils.ConfError('wrong', 'do better', 'a.gin:3')

    conf_flags.call(main, ['program'])
    assert capsys.readouterr().err == 'ConfError: a.gin:3: wrong\n  do better\n'


def test_debug_shows_the_traceback(capsys):
    def main():
        raise gin_utils.ConfError('wrong')

    with flag_values(debug=True):
        assert conf_flags.call(main, ['program']) == 2
    assert 'Traceback' in capsys.readouterr().err


def test_a_fault_of_the_program_keeps_its_traceback():
    def main():
        raise ValueError('a fault')

    with pytest.raises(ValueError, match='a fault'):
        conf_flags.call(main, ['program'])


def test_an_argument_that_is_no_flag_is_rejected(capsys):
    assert conf_flags.call(lambda: 0, ['program', 'sac.gin']) == 2
    assert "'sac.gin'" in capsys.readouterr().err


def test_an_interrupt_ends_the_program_with_its_usual_code():
    def main():
        raise KeyboardInterrupt

    assert conf_flags.call(main, ['program']) == 130


@pytest.mark.parametrize('argument', ['', '*'])
def test_a_further_interrupt_ends_the_program_at_once_and_silently(monkeypatch, argument):
    def main(*argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, 'argv', ['program'])
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            conf_flags.run(main, PARSER, argument=argument)
        assert ended.value.code == 130 and signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_code_that_exits_the_program_is_a_reported_failure(capsys):
    assert conf_flags.call(lambda: sys.exit(0), ['program']) == 1
    assert 'ended by sys.exit(0) in ' in capsys.readouterr().err


def test_the_exit_code_is_the_return_value_of_main():
    assert conf_flags.call(lambda: None, ['program']) == 0
    assert conf_flags.call(lambda: 1, ['program']) == 1


@pytest.mark.parametrize('argument, message', [('--no_such_flag=3', 'no_such_flag'), ('--root_dirr=3', 'root_dir')])
def test_a_flag_error_is_a_user_error(argument, message, capsys):
    with pytest.raises(SystemExit) as ended:
        conf_flags.parse(PARSER, ['program', argument])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_flag_that_other_programs_have_is_explained(capsys):
    with pytest.raises(SystemExit) as ended:
        parser = conf_flags.Parser('program.py', '', unknown={'rooot': 'check works elsewhere'})
        conf_flags.parse(parser, ['check', '--rooot=3'])
    assert ended.value.code == 2 and capsys.readouterr().err == 'check works elsewhere\n'


@pytest.mark.parametrize('name, message', [('nowhere/x.png', "folder 'nowhere' does not exist\n  create it, or name"),
                                           ('.', 'is a folder\n  name a file')])
def test_a_file_that_cannot_be_written_is_rejected_by_its_flag(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with flag_values(conf=name), pytest.raises(gin_utils.ConfError, match=f'--conf {name}.*{message}'):
        conf_flags.check_output('conf')


def test_a_file_in_a_read_only_folder_is_rejected_early(monkeypatch):
    monkeypatch.setattr(conf_flags.os, 'access', lambda folder, mode: False)
    with flag_values(conf='x.json'), pytest.raises(gin_utils.ConfError, match="folder '' cannot be written"):
        conf_flags.check_output('conf')


@pytest.mark.parametrize('name', ['x.json', '-', None])
def test_a_file_in_this_folder_and_the_terminal_can_be_written(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with flag_values(conf=name):
        conf_flags.check_output('conf')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_check_that_is_stopped_returns_the_code_of_the_signal(monkeypatch, capsys, number):
    def check(*args):
        yield 'environments: 1'
        signal.raise_signal(number)

    monkeypatch.setattr(conf_check, 'check', check)
    with flag_values(check_program.PARSER, conf='ppo_cart_pole'):
        assert conf_flags.call(check_program.main, ['check']) == 128 + number
    assert capsys.readouterr().err.endswith(f'stopped by {number.name}\n')


def test_disk_errors_state_a_remedy(capsys):
    def write():
        raise OSError(errno.EROFS, 'Read-only file system', 'runs/a')

    assert conf_flags.call(write, ['program']) == 1
    assert "Read-only file system: 'runs/a'\n  free some space, correct the permissions" in capsys.readouterr().err


def test_arguments_that_are_not_utf8_are_rejected(capsys):
    with pytest.raises(SystemExit) as caught:
        conf_flags.parse(PARSER, ['program', 'run\udce9'])
    assert caught.value.code == 2 and 'expected arguments and a working directory' in capsys.readouterr().err


@pytest.mark.parametrize('argument, override', [
    ('TrainerConfig.num_env_steps=100', 'TrainerConfig.num_env_steps=100'),
    ('ppo/Adam.lr=1e-4', 'ppo/Adam.lr=1e-4'),
    ('alfx.config.TrainerConfig.evaluate = True', 'alfx.config.TrainerConfig.evaluate = True'),
    ('create_environment.env_name=CartPole-v1', "create_environment.env_name='CartPole-v1'"),
    ('create_environment.env_name=package.module:Id-v0', "create_environment.env_name='package.module:Id-v0'"),
    ("create_environment.env_name='CartPole-v1'", "create_environment.env_name='CartPole-v1'"),
    ('QNetwork.activation=@torch.tanh', 'QNetwork.activation=@torch.tanh'),
    ('QNetwork.fc_layer_params=(64, 64)', 'QNetwork.fc_layer_params=(64, 64)'),
    ('TrainerConfig.random_seed=None', 'TrainerConfig.random_seed=None'),
    ('Adam.lr=%rate', 'Adam.lr=%rate'), ('rate=3', 'rate=3'), ('Adam.eps=.5', 'Adam.eps=.5'),
    ('X.folder=/data/x-1', "X.folder='/data/x-1'"), ('X.folder=../data', "X.folder='../data'"),
    ('X.folder=~/data', "X.folder='~/data'"),
])
def test_arguments_with_a_value_override_bindings(argument, override):
    with flag_values():
        argv = ['train', '--conf_param', 'X.a=1', argument, 'base.gin']
        assert conf_flags.parse(PARSER, argv) == ['train', 'base.gin']
        assert conf_flags.FLAGS.conf_param == ['X.a=1', override]


@pytest.mark.parametrize('argument', ['base.gin', '-x.y=3'])
def test_other_arguments_are_no_overrides(argument):
    with flag_values():
        assert conf_flags.parse(PARSER, ['train', '--', argument]) == ['train', argument]
        assert conf_flags.FLAGS.conf_param == []


def test_a_file_with_any_name_is_not_an_override(tmp_path, monkeypatch):
    (tmp_path / 'a.b=c').touch()
    monkeypatch.chdir(tmp_path)
    with flag_values():
        assert conf_flags.parse(PARSER, ['train', 'a.b=c']) == ['train', 'a.b=c']


def test_flags_may_be_written_with_hyphens():
    with flag_values():
        assert conf_flags.parse(PARSER, ['train', '--root-dir=a-b', '--conf-param', 'X.y=a-b']) == ['train']
        assert (conf_flags.FLAGS.root_dir, conf_flags.FLAGS.conf_param) == ('a-b', ['X.y=a-b'])


@pytest.mark.parametrize('flag, binding', [
    ('--num-env-steps=3', 'TrainerConfig.num_env_steps'), ('--steps=300', 'TrainerConfig.num_env_steps'),
    ('--total_timesteps', 'TrainerConfig.num_env_steps'),
    ('--unroll_length=3', 'TrainerConfig.unroll_length'), ('--learning-rate', 'Adam.lr'),
])
def test_an_unknown_flag_names_the_binding_that_it_may_mean(flag, binding, capsys):
    with pytest.raises(SystemExit):
        conf_flags.parse(PARSER, ['train', flag])
    assert f'on the command line: {binding}=VALUE' in capsys.readouterr().err


FLAGS_OF_A_PROGRAM = {
    '--num_steps=3': ('num_steps', 3), '--num-steps 3': ('num_steps', 3), '-num_steps=3': ('num_steps', 3),
    '--scale -0.5': ('scale', -0.5), '--names=a,b': ('names', ['a', 'b']), '--names=': ('names', []),
    '--names -1,-2': ('names', ['-1', '-2']), '--each a --each=b': ('each', ['a', 'b']),
    '--mode=fast': ('mode', 'fast'),
    '--quiet': ('quiet', True), '--noquiet': ('quiet', False), '--no-quiet': ('quiet', False),
    '--quiet=false': ('quiet', False), '--quiet=True': ('quiet', True), '--norender': ('render', False),
    '--num_steps=3 --num_steps=4': ('num_steps', 4), 'a --num_steps=3 b': ('arguments', ['a', 'b']),
    'a -- --quiet': ('arguments', ['a', '--quiet']), '--debug': ('debug', True),
}


@pytest.fixture
def parser():
    docstring = 'Do something.\n\nExample:\n\n  program a\n\nMore about it.\n'
    result = conf_flags.Parser('program.py', docstring, ('[FILE]', 'it'))
    result.add('num_steps N', 'a number', conf_flags.number(int, 1, 10), 5)
    result.add('scale X', 'a number', conf_flags.number(float))
    result.add('names A,B', 'several', conf_flags.words, ['x'])
    result.add('each KEY...', 'repeatable')
    result.add('mode fast|slow', 'how', default='slow')
    result.add('quiet', 'on or off')
    result.add('render', '100% on', default=True)
    return result


@pytest.mark.parametrize('line', FLAGS_OF_A_PROGRAM)
def test_all_spellings_of_flags_are_read(parser, line):
    name, value = FLAGS_OF_A_PROGRAM[line]
    found = parser.read(line.split())
    assert getattr(found, name) == value and (name == 'arguments' or found.given == (name, ))


def test_flags_that_are_not_given_have_their_defaults(parser):
    found = parser.read([])
    assert (found.num_steps, found.scale, found.names, found.each, found.mode, found.quiet, found.render) == (
        5, None, ['x'], [], 'slow', False, True)
    assert found.given == () and found.arguments == []


@pytest.mark.parametrize('line, message', [
    ('--num_steps=0', "--num_steps: expected int in [1, 10], found '0'"), ('--num_steps', 'expected a value'),
    ('--num_steps=x', "found 'x'"), ('--scale=nan', 'expected float in [-inf, inf]'),
    ('--mode=other', "'fast', 'slow'"),
    ('--quiet=perhaps', 'expected true or false'), ('--num=3', 'unknown flag --num'), ('--nomode', 'unknown flag'),
    ('--qiet', 'did you mean --quiet?'),
])
def test_mistakes_in_flags_say_what_is_expected(parser, line, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parser.read(line.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize('flag', ['--help', '-h', '-?', '-help'])
def test_help_shows_usage_purpose_flags_and_examples(parser, flag, capsys):
    with pytest.raises(SystemExit) as ended:
        parser.read(['--num_steps=0', flag])
    output = capsys.readouterr().out
    assert ended.value.code == 0
    assert output.startswith('usage: program.py [options] [FILE]\n\nDo something.\n\nMore about it.\n')
    for line in ('--num_steps N', 'a number (default: 5)', '--mode fast|slow', '--[no]render', '100% on'):
        assert line in output
    assert output.endswith('examples:\n  program a\n')


def test_help_after_two_dashes_and_values_of_negated_flags(capsys):
    parser = conf_flags.Parser('alfx/bin/some.py', 'Do something.', ('WORD ...', 'words'))
    parser.add('render', 'render it', default=True)
    parser.add('labels NAMES', 'names', conf_flags.words, [])
    assert parser.read(['--', '--help', '-h']).arguments == ['--help', '-h']
    assert parser.read(['--labels', '"PPO, clip 0.1", SAC']).labels == ['PPO, clip 0.1', 'SAC']
    assert parser.read(['--norender']).render is False and parser.read(['--render=false']).render is False
    for arguments, message in ((['--norender=true'], '--norender: expected no value'), (['a', '--help'], 'usage:')):
        with pytest.raises(SystemExit):
            parser.read(arguments)
        assert message in ''.join(capsys.readouterr())


def test_a_run_folder_with_the_name_of_the_conf_is_resumed(tmp_path, monkeypatch):
    (tmp_path / 'sac_pendulum/conf').mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with flag_values():
        argv = conf_flags.parse(PARSER, ['train', 'sac_pendulum', '--root_dir', 'sac_pendulum'])
        assert conf_flags.take_argument(argv, 'conf') == ['train']
        assert (conf_flags.FLAGS.conf, conf_flags.FLAGS.root_dir) == ('sac_pendulum', 'sac_pendulum')


def test_a_second_conf_is_rejected_with_what_is_expected(capsys):
    assert conf_flags.call(pytest.fail, ['train', 'other.gin']) == 2
    assert "unexpected argument 'other.gin': expected one conf or run folder" in capsys.readouterr().err


def test_an_explained_error_names_the_line_of_the_user_not_of_torch(monkeypatch, capsys):
    monkeypatch.setattr(gin_utils, 'is_explained', lambda error: True)

    def main():
        torch.nn.Linear(3, 4)(torch.zeros(2, 2))

    assert conf_flags.call(main, ['program']) == 2
    line = main.__code__.co_firstlineno + 1
    assert f'raised at {__file__}:{line}; --debug shows the traceback' in capsys.readouterr().err
