"""Loading of valid confs, and the messages for mistakes."""

import math
import os
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Optional, Union

import gin
import pytest
import torch
import torch.nn.functional as F

from alfx import BoundedTensorSpec, gin_utils, optimizers
from alfx.distributions.truncated import TruncatedCauchy
from alfx.gin_utils import ConfError, configurable, parsing, static_check
from alfx.gin_utils.value_checks import Fraction, Range
from alfx.networks import TruncatedProjectionNetwork
from alfx.networks.actor_networks import ActorNetwork


@configurable(module='toys')
class Engine:

    def __init__(self, power: float = 1.0, cylinders: int = 4, fuel: Literal['petrol', 'diesel'] = 'petrol'):
        gin_utils.check_value('Engine', 'power', power, float, above=0)
        self.power, self.cylinders, self.fuel = power, cylinders, fuel


@configurable(module='toys')
class Car:

    def __init__(self, engine: Any, seats: int = 4, doors: Sequence[int] = (1, 2), name: str = 'car',
                 paint: Optional[Callable] = None, weight: Union[int, float, None] = None, fast: bool = False,
                 **extras):
        if seats > 9:
            raise ValueError('too many seats')
        if name == 'nameless':
            raise TypeError("there is no car called 'nameless'")
        if extras:
            raise TypeError(f"__init__() got an unexpected keyword argument '{next(iter(extras))}'")
        self.engine, self.seats, self.doors, self.paint, self.weight = engine, seats, doors, paint, weight


@configurable(module='toys')
def garage(cars=()):
    return cars


@configurable(module='toys')
def drive(optimizer=None):
    return optimizer


@configurable(module='toys')
class FastCar(Car):
    pass


@configurable(module='toys')
def make_engine() -> Engine:
    return Engine()


@configurable(module='toys')
def make_speed():
    return 3.0


@configurable(module='toys')
def race(car_ctor: Callable[..., Car] = Car, engine: Optional[Engine] = None, speed: float = 1.0,
         network_cls: Callable[..., Any] = ActorNetwork):
    return car_ctor, engine, speed, network_cls


@configurable(module='toys')
def share(part: Optional[Fraction] = None, parts: Sequence[Fraction] = (), count: Annotated[int, Range(1)] = 1):
    return part, parts, count


@configurable(module='toys')
def mixed(strict: Optional[bool] = None, depth: Union[bool, int] = 0, scale: Union[bool, float] = 0.0,
          flags: Sequence[bool] = ()):
    return strict, depth, scale, flags


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """Return a function that writes conf files to the working directory and returns the name of the last one."""
    monkeypatch.chdir(tmp_path)

    def write(text, name='car.gin'):
        os.makedirs(os.path.dirname(name) or '.', exist_ok=True)
        with open(name, 'w', encoding='utf8') as file:
            file.write(textwrap.dedent(text))
        return name

    return write


def message_of(conf_file, params=()):
    with pytest.raises(ConfError) as caught:
        gin_utils.load(conf_file, params)
    assert not gin_utils.config_str().strip(), 'a conf with mistakes leaves gin empty'
    return str(caught.value)


# Valid confs ------------------------------------------------------------------------------------------------------


def test_bindings_reach_the_constructors(conf):
    loaded = gin_utils.load(conf('''
        cylinder_count = 6
        Car.engine = @big/Engine()
        Car.paint = @elu
        big/Engine.cylinders = %cylinder_count
        Engine.power = 2
    '''))
    car = Car()
    assert (car.engine.cylinders, car.engine.power, car.paint) == (6, 2, F.elu)
    assert loaded.conf_file == os.path.abspath('car.gin')


def test_a_name_without_its_ending_finds_the_file(conf):
    conf('Engine.power = 3.0')
    gin_utils.load('car')
    assert Engine().power == 3.0


def test_includes_are_relative_and_later_bindings_override(conf):
    conf('Engine.power = 1.5\nEngine.cylinders = 2', 'parts/deep/engine.gin')
    conf("include 'deep/engine.gin'\nEngine.power = 2.5", 'parts/base.gin')
    loaded = gin_utils.load(conf("include 'parts/base.gin'\nEngine.cylinders = 3"))
    assert (Engine().power, Engine().cylinders) == (2.5, 3)
    assert [os.path.basename(source.path) for source in loaded.sources] == ['car.gin', 'base.gin', 'engine.gin']


@pytest.mark.parametrize('beside, in_working_directory, expected',
                         [(True, True, 3), (False, True, 2), (True, False, 3)])
def test_an_include_is_beside_its_file_or_in_the_working_directory(conf, beside, in_working_directory, expected):
    """The folder of the including file comes first, then the working directory, as in gin, then the shipped confs."""
    if in_working_directory:
        conf('Engine.power = 2.0', 'sac_pendulum.gin')
    if beside:
        conf('Engine.power = 3.0', 'parts/sac_pendulum.gin')
    conf("include 'sac_pendulum.gin'", 'parts/middle.gin')
    gin_utils.load(conf("include 'parts/middle.gin'", 'car.gin'))
    assert Engine().power == expected


@pytest.mark.parametrize('near', ['mine/sac_pendulum.gin', 'mine/deep/parts/sac_pendulum.gin'])
def test_a_shipped_include_is_logged_if_a_file_nearby_has_its_name(conf, near, caplog):
    conf('Engine.power = 2.0', near)
    caplog.set_level('INFO', 'alfx')
    loaded = gin_utils.load(conf("include 'sac_pendulum.gin'", 'mine/deep/car.gin'))
    assert all(parsing.is_shipped(source.path) for source in loaded.sources[1:])
    assert [record.getMessage() for record in caplog.records] == [
        "mine/deep/car.gin:1: include 'sac_pendulum.gin' is the conf shipped with alfx, "
        f'not {near}; write the path of the file to include it instead']


def test_a_shipped_conf_includes_only_shipped_confs(conf):
    conf('Engine.power = 2.0', 'sac.gin')
    assert all(parsing.is_shipped(source.path) for source in gin_utils.load('sac_pendulum').sources)


@pytest.mark.parametrize('value', [
    '@Engine(power=2, cylinders=6)', '@big/Engine(power=2)', '@toys.Engine(power=%two, cylinders=6,)',
    """@Engine(
        power = 2,   # twice
        cylinders = 6)""",
    'functools.partial(@Engine, power=2, cylinders=6)', 'functools.partial(@big/Engine, power=2)'])
def test_arguments_in_a_reference_are_a_separate_scope(conf, value):
    gin_utils.load(conf(f'two = 2\nbig/Engine.cylinders = 6\nother/Car.seats = 3\nCar.engine = {value}\n'
                        'Engine.power = 9.0\ndrive.optimizer = %two\nCar.paint = functools.partial(@elu, alpha=2.0)'))
    car = Car()
    assert car.paint(torch.tensor(-1.0)) == pytest.approx(2 * (math.exp(-1) - 1))
    engine = car.engine() if 'partial' in value else car.engine
    assert (engine.power, engine.cylinders, Engine().power, Engine().cylinders) == (2, 6, 9, 4)


def test_references_with_arguments_can_be_nested_and_repeated(conf):
    gin_utils.load(conf('garage.cars = [@Car(engine=@Engine(power=2)), @Car(engine=@Engine(power=3), seats=2)]'))
    assert [(car.engine.power, car.seats) for car in garage()] == [(2, 4), (3, 2)]
    assert unused() == []
    gin_utils.load(conf('first = @Engine(power=2)\nCar.engine = %first'))
    assert Car().engine.power == 2


def test_arguments_of_a_reference_may_lack_their_names(conf):
    gin_utils.load(conf('Car.engine = @Engine(2.5, cylinders=6)'))
    assert (Car().engine.power, Car().engine.cylinders) == (2.5, 6) and unused() == []
    gin_utils.load(conf('Car.engine = functools.partial(@Engine, 3, 8)'))
    assert (Car().engine().power, Car().engine().cylinders) == (3, 8) and unused() == []


def test_a_class_of_distributions_is_a_constructor(conf):
    gin_utils.load(conf('race.car_ctor = @Car\nTruncatedProjectionNetwork.dist_ctor = @TruncatedCauchy'))
    network = TruncatedProjectionNetwork(3, BoundedTensorSpec((2, ), torch.float32, -1.0, 1.0))
    assert isinstance(network(torch.zeros(4, 3))[0], TruncatedCauchy)
    assert 'is a function of tensors' in message_of(conf('TruncatedProjectionNetwork.dist_ctor = @torch.relu_'))


def test_a_function_without_arguments_of_an_own_module_may_be_called(conf):
    with open('own_makers.py', 'w', encoding='utf8') as file:
        file.write('import torch\n\n\ndef make_paint(scale=2.0):\n    return torch.nn.ReLU()\n\n\n'
                   'def mix(color):\n    return color\n')
    gin_utils.load(conf('import own_makers\nCar.paint = @own_makers.make_paint()'))
    assert isinstance(Car(1).paint, torch.nn.ReLU)
    assert 'needs arguments' in message_of(conf('import own_makers\nCar.paint = @own_makers.mix()'))


def test_a_class_of_layers_is_passed_to_parameters_of_any_name(conf):
    gin_utils.load(conf('Car.paint = @torch.nn.BatchNorm1d'))
    assert isinstance(Car(1).paint(3), torch.nn.BatchNorm1d)


def test_references_to_torch_and_alfx_may_lack_the_at_sign(conf):
    gin_utils.load(conf('Car.paint = torch.relu_\nCar.engine = alfx.layers.Reshape([-1])'))
    assert Car().paint is torch.relu_ and Car().engine(torch.ones(2, 3, 4)).shape == (2, 12)
    assert 'Car.paint = @torch.relu_' in gin_utils.config_str()


def test_an_override_replaces_the_arguments_in_a_reference(conf):
    conf('Car.engine = @Engine(power=2, cylinders=6)')
    gin_utils.load('car', ['Car.engine = @Engine(power=3)'])
    assert (Car().engine.power, Car().engine.cylinders) == (3, 4)
    gin_utils.load('car', ['Car.engine = @make_engine()'])
    assert Car().engine.power == 1 and unused() == []


@pytest.mark.parametrize('value, message', [
    ('@Engine(power)', 'written name=value'), ('@Engine(power=2, 3)', 'written name=value'),
    ('@Engine(2, power=3)', 'two arguments power'), ('@Engine(power=2, power=3)', 'two arguments power'),
    ("@Engine(2, 3, 'diesel', 4)", 'car.gin:2: Engine takes 3 arguments without names, found 4'),
    ('@Engine(power=2', ''), ('@Engine(powr=2)', "car.gin:2: Engine has no parameter 'powr'"),
    ("@Engine(power='x')", 'Engine.power expects float'), ('functools.partial(Engine, power=2)', 'Engine'),
    ('functools.partial(@Engine(), power=2)', 'expects a reference without ()'),
    ('functools.reduce(@Engine)', 'reduce'), ('torch.int64', "text needs quotes: 'torch.int64'")])
def test_mistakes_in_the_arguments_of_a_reference_are_reported(conf, value, message):
    assert message in message_of(conf(f'\nCar.engine = {value}\n'))


def test_conf_param_overrides_the_file(conf):
    gin_utils.load(conf('Engine.power = 1.5'), ['Engine.power = 4', 'count = 3', 'Engine.cylinders = %count'])
    assert (Engine().power, Engine().cylinders) == (4, 3)


def test_a_conf_can_import_user_modules(conf, tmp_path, monkeypatch):
    (tmp_path / 'own_toys_for_test.py').write_text(
        'from alfx import gin_utils\n\n@gin_utils.configurable\ndef whistle(tune="a"):\n    return tune\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    gin_utils.load(conf('import own_toys_for_test\nwhistle.tune = "b"'))
    assert sys.modules['own_toys_for_test'].whistle() == 'b'
    assert 'import own_toys_for_test' in gin_utils.config_str()


def test_loading_again_replaces_the_previous_conf(conf):
    gin_utils.load(conf('Engine.power = 3.0'))
    gin_utils.load(conf('Engine.cylinders = 8'))
    assert (Engine().power, Engine().cylinders) == (1.0, 8)


def test_loaded_leaves_gin_empty_when_the_run_fails(conf):
    with pytest.raises(ZeroDivisionError):
        with gin_utils.loaded(conf('Engine.power = 3.0')):
            assert Engine().power == 3.0
            raise ZeroDivisionError
    assert Engine().power == 1.0 and not gin_utils.unused_bindings()


def test_an_integral_float_becomes_an_int_where_an_int_is_expected(conf):
    gin_utils.load(conf('many = 1e1\nEngine.cylinders = 1e1\nbig/Engine.cylinders = %many\nCar.engine = @big/Engine()'))
    assert type(Engine().cylinders) is int and Engine().cylinders == 10
    assert type(Car().engine.cylinders) is int


def test_values_within_their_range_pass(conf):
    gin_utils.load(conf('share.part = 0\nshare.parts = (0.5, 1.0)\nshare.count = 1e1'))
    assert share() == (0, (0.5, 1.0), 10)


def test_zero_and_one_are_false_and_true_where_a_bool_is_wanted(conf):
    gin_utils.load(conf('on = 1\nmixed.strict = %on\nmixed.depth = 1\nmixed.scale = 0\nmixed.flags = (0, 1)'))
    strict, depth, scale, flags = mixed()
    assert strict is True and flags == (False, True) and type(flags[0]) is bool
    assert type(depth) is int and type(scale) is int, 'what may be a number stays one'


def test_values_that_match_their_annotation_are_accepted(conf):
    gin_utils.load(conf('''
        Car.engine = None
        Car.doors = [3, 4]
        Car.weight = 1.5
        Car.paint = None
        Car.fast = True
        Engine.fuel = 'diesel'
        Engine.power = 3
    '''))
    assert Car().doors == [3, 4] and Engine().fuel == 'diesel'


# Mistakes ---------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_reported_with_the_nearest_name(conf):
    conf('', 'engine.gin')
    message = message_of('engin.gin')
    assert "no conf file 'engin.gin'" in message and "did you mean 'engine.gin'?" in message


def test_a_misspelled_configurable_is_reported_with_line_and_nearest_name(conf):
    message = message_of(conf('# a comment\n\nEngin.power = 3'))
    assert message == "car.gin:3: there is no configurable 'Engin'\n  did you mean 'Engine'?"


def test_a_misspelled_reference_is_reported(conf):
    assert message_of(conf('Car.engine = [@Engien()]')) == (
        "car.gin:1: there is no configurable '@Engien'\n  did you mean 'Engine'?")


@pytest.mark.parametrize('name, nearest', [('adam', 'Adam'), ('adamw', 'AdamW'), ('sgd', 'SGD')])
def test_an_optimizer_in_lower_case_is_reported_with_its_class(conf, name, nearest):
    assert message_of(conf(f'{name}.lr = 3e-4')).endswith(f"did you mean '{nearest}'?")


def test_a_misspelled_module_of_a_configurable_is_reported(conf):
    assert "did you mean 'toys.Engine'?" in message_of(conf('toyz.Engine.power = 3'))


def test_a_misspelled_parameter_is_reported_with_line_and_nearest_name(conf):
    assert message_of(conf('\nEngine.powr = 3')) == (
        "car.gin:2: Engine has no parameter 'powr'\n  did you mean 'power'?")


def test_a_name_unlike_any_parameter_is_reported_with_all_parameters(conf):
    assert 'its parameters: power, cylinders, fuel' in message_of(conf('Engine.zzz = 3'))


def test_a_misspelled_scope_is_reported(conf):
    message = message_of(conf('Car.engine = @front/Engine()\nfrnt/Engine.power = 3'))
    assert message.startswith("car.gin:2: no reference uses the scope 'frnt'") and "'front'?" in message


def test_a_scope_that_code_enters_is_known(conf):
    gin_utils.declare_scope('backup')
    gin_utils.load(conf('Car.engine = @backup2/Engine()\nbackup/Engine.power = 3'))
    with gin.config_scope('backup'):
        assert Engine().power == 3


def test_an_undefined_macro_is_reported(conf):
    message = message_of(conf('power = 3\nEngine.power = %powr'))
    assert message == "car.gin:2: macro '%powr' is not defined\n  did you mean 'power'?"


def test_a_macro_written_as_a_reference_is_reported(conf):
    message = message_of(conf('power = 3\nEngine.power = @power'))
    assert message == "car.gin:2: there is no configurable '@power'\n  write %power, because it is a macro"


def test_a_macro_defined_by_itself_is_reported(conf):
    assert 'car.gin:1: macro %a refers to itself' in message_of(conf('a = %b\nb = [%a]\nEngine.power = %a'))


def test_only_the_macros_that_a_value_needs_are_checked():
    """Otherwise the loading time of a conf grows with the square of its length."""
    class Macros(dict):

        def items(self):
            pytest.fail('all are looked at')

        __iter__ = keys = values = items

    macros = Macros(a=[parsing.Macro('b')], b=1, c=(parsing.Macro('d'), 0), d=parsing.Macro('c'))
    assert parsing.substitute({'x': parsing.Macro('a'), 'y': parsing.Macro('e')}, macros) == {
        'x': [1], 'y': parsing.Macro('e')}
    assert parsing.substitute(parsing.Macro('c'), macros) == (parsing.Macro('c'), 0), 'a circle ends'
    checks = {name: static_check._check_macro_definition(macro(name, macros[name]), macros) for name in 'abcd'}
    assert [name for name in checks if checks[name]] == ['c', 'd']


def macro(name, value):
    return parsing.Statement('macro', '', name, '', value, 'car.gin', 1, 'car.gin:1')


def test_a_required_value_that_is_missing_is_reported(conf):
    conf('Engine.power = %gin.REQUIRED', 'base.gin')
    assert 'base.gin:1: Engine.power is required' in message_of(conf("include 'base.gin'"))
    gin_utils.load(conf("include 'base.gin'\nEngine.power = 2"))
    assert Engine().power == 2


def test_load_without_a_module_means_suite_gym(conf):
    gin_utils.load(conf('load.max_episode_steps = 7\nlong/load:\n    max_episode_steps = 8'))
    assert [(b.scope, b.selector) for b in gin_utils.unused_bindings()] == [
        ('', 'alfx.environments.suite_gym.load'), ('long', 'alfx.environments.suite_gym.load')]
    assert "write one of alfx" in message_of(conf('create_environment.env_load_fn = @load'))


def test_an_ambiguous_name_is_reported_with_the_full_ones(conf):
    for module in ('toys.red', 'toys.blue'):
        configurable('twin', module=module)(lambda x=1: x)
    message = message_of(conf('twin.x = 1'))
    assert 'ambiguous' in message and 'toys.blue.twin, toys.red.twin' in message


@pytest.mark.parametrize('line, expected, hint', [
    ('Engine.power = 4x', 'syntax error', ''),
    ('Engine.power', 'not a statement', "'Name.parameter = value'"),
    ('Engine.power =', 'syntax error', ''),
    ('Engine.fuel = diesel', 'cannot read the value diesel', "text needs quotes: 'diesel'"),
    ('Car.name = CartPole-v1', 'cannot read the value CartPole-v1', "'CartPole-v1'"),
    ('Car.fast = true', 'cannot read the value', 'write True'),
    ('Car.doors = (1, 2', 'inside a bracket', 'close it'),
    ('Car.doors = (1, 2\nEngine.power = 2', 'a bracket or a string is not closed', 'close it'),
    ('Car.doors = (1,\nEngine.power = 2', 'a bracket or a string is not closed', 'close it'),
    ('Car.doors = [\nfuel = 2', 'a bracket or a string is not closed', 'close it'),
    ('fuel = fuel', 'cannot read the value fuel', "text needs quotes: 'fuel'"),
    ('Engine..power = 3', 'syntax error', ''),
])
def test_a_syntax_error_is_reported_with_line_and_remedy(conf, line, expected, hint):
    message = message_of(conf(f'Engine.power = 1\n{line}\n'))
    assert message.startswith('car.gin:') and expected in message and hint in message
    assert 'Traceback' not in message


def test_an_open_bracket_has_the_same_message_in_every_python(conf, monkeypatch):
    def tokens(_):
        raise tokenize.TokenError('unexpected EOF in multi-line statement', (2, 0))  # message of Python 3.12
        yield

    monkeypatch.setattr(tokenize, 'generate_tokens', tokens)
    assert message_of(conf('Engine.power = 1\nCar.doors = (1, 2')) == (
        'car.gin:2: syntax error: the file ends inside a bracket or a string\n  close it')


@pytest.mark.parametrize('binding, expected', [
    ("Engine.power = 'fast'", "Engine.power expects float, found str 'fast'"),
    ('Engine.power = True', 'Engine.power expects float, found True'),
    ('Engine.power = None', 'Engine.power expects float, found None'),
    ('Engine.power = @Car', 'write @Car() to pass what it returns'),
    ('Engine.cylinders = 4.5', 'Engine.cylinders expects int, found float 4.5'),
    ("Engine.fuel = 'water'", "Engine.fuel expects 'petrol' or 'diesel', found str 'water'"),
    ('Car.doors = 4', 'write (4,) for a tuple of one'),
    ('Car.doors = (@Engine)', 'found the reference @Engine\n  write (@Engine,) for a tuple of one'),
    ('EncodingNetwork.conv_layer_params = (32, 8, 4)', 'write ((32, 8, 4),) for a tuple of one'),
    ("Car.doors = (1, 'two')", 'Car.doors expects Sequence[int]'),
    ('Car.name = 3', "text needs quotes: '3'"),
    ("Car.paint = 'elu'", 'a reference begins with @: @elu'),
    ("Car.paint = 'lin_0.1'", 'a schedule is an object: @LinearScheduler()'),
    ("Car.paint = '@elu'", 'a reference has no quotes: @elu'),
    ("Car.paint = '-2.5e-3'", 'a number has no quotes: -2.5e-3'),
    ('Car.paint = @elu()', 'write @elu'),
    ('Car.name = {[1]: 2}', 'a key of a dict must not be a list or a dict'),
    ('infinity = 5', "'infinity' is the name of a constant"),
    ('REQUIRED = 5', "'REQUIRED' is the name of a constant"),
    ('Engine.power = %REQUIRED', 'Engine.power is required and has no value'),
    ('Car.fast = 2', 'Car.fast expects bool, found int 2'),
    ('Car.fast = 1.0', 'Car.fast expects bool, found float 1.0'),
    ('share.part = 1.5', 'share.part expects float in [0, 1] or None, found float 1.5'),
    ('share.parts = (0.5, -1)', 'share.parts expects Sequence[float in [0, 1]], found tuple (0.5, -1)'),
    ('share.count = 0', 'share.count expects int >= 1, found int 0'),
    ('big = 7.0\nshare.part = %big', 'share.part expects float in [0, 1]'),
    ('Car.weight = 1e400', 'Car.weight = inf: a number is too large'),
    ('p = "x"\nEngine.power = %p', "Engine.power expects float, found str 'x'"),
])
def test_a_value_of_the_wrong_type_is_reported(conf, binding, expected):
    message = message_of(conf(binding))
    assert expected in message and message.startswith('car.gin:')


def test_calling_a_reference_with_unbound_arguments_is_reported(conf):
    message = message_of(conf('garage.cars = [@Car()]'))
    assert message == ('car.gin:1: @Car() needs engine, which the conf does not set\n'
                       '  set it, or write @Car to pass the constructor')
    assert 'write functools.partial(@Car, ...) to pass' in message_of(conf('garage.cars = (@Car(seats=3), )'))
    assert 'write @front/Car to pass' in message_of(conf('garage.cars = (@front/Car(), )'))
    gin_utils.load(conf('garage.cars = [@Car(), @Car]\nCar.engine = 1'))
    assert garage()[0].engine == 1


def test_an_optimizer_without_brackets_is_reported(conf):
    assert 'car.gin:1: drive.optimizer expects an optimizer, found the reference @fast/Adam\n  write @fast/Adam()' in (
        message_of(conf('drive.optimizer = @fast/Adam')))


@pytest.mark.parametrize('binding, expected', [
    ('drive.optimizer = @Engine()', 'drive.optimizer expects an optimizer, found the reference @Engine()'),
    ('race.car_ctor = @torch.tanh', 'race.car_ctor expects a constructor, found the reference @torch.tanh'),
    ('race.car_ctor = @Engine', 'race.car_ctor expects a callable, found the reference @Engine'),
    ('race.engine = @Car()', 'race.engine expects Engine or None, found the reference @Car()'),
    ('race.speed = @Engine()', 'race.speed expects float, found the reference @Engine()'),
    ('race.network_cls = @TDLoss', 'race.network_cls expects a constructor like @ActorNetwork, found the reference '
     '@TDLoss'),
])
def test_an_object_of_the_wrong_kind_is_reported(conf, binding, expected):
    message = message_of(conf(f'Car.engine = 1\n{binding}'))
    assert message.startswith(f'car.gin:2: {expected}')


def test_an_object_of_the_right_kind_fits(conf):
    gin_utils.load(conf('race.car_ctor = @FastCar\nrace.engine = @make_engine()\nrace.speed = @make_speed()\n'
                        'race.network_cls = @ValueNetwork\ndrive.optimizer = @Adam()\nCar.engine = 1'))


@pytest.mark.parametrize('text, line, circle', [
    ('garage.cars = @garage()', 1, 'garage -> garage'),
    ('Car.engine = @garage()\ngarage.cars = [%mine]\nmine = @Car()', 2, 'Car -> garage -> Car'),
    ('a/Car.engine = @b/Car()\nb/Car.engine = @a/Car()', 2, 'Car -> Car -> Car'),
])
def test_circular_references_are_reported(conf, text, line, circle):
    message = message_of(conf(text))
    assert f'car.gin:{line}: ' in message and f'is circular: {circle}\n' in message


def test_one_class_in_two_scopes_is_no_circle(conf):
    gin_utils.load(conf('a/Car.engine = @b/Car()\nb/Car.engine = 3\nCar.engine = @a/Car'))
    with gin.config_scope('a'):
        assert Car().engine.engine == 3


def test_brackets_nested_too_deeply_are_reported(conf):
    deep = '[' * 3000 + ']' * 3000
    nested = r'(brackets are nested too deeply|syntax error: too many nested parentheses)'  # the latter by Python 3.13
    assert re.match(rf'car\.gin:2: {nested}', message_of(conf(f'Car.engine = 1\nCar.doors = {deep}')))
    message = message_of(conf(''), [f'Car.doors = {deep}'])
    assert re.search(nested, message) and len(message) < 500


def test_a_missing_include_is_reported_where_it_is_included(conf):
    conf('', 'base_car.gin')
    message = message_of(conf("\ninclude 'bas_car.gin'"))
    assert message.startswith("car.gin:2: include 'bas_car.gin'") and "did you mean 'base_car.gin'?" in message


def test_a_circular_include_is_reported(conf):
    conf("include 'car.gin'", 'other.gin')
    assert 'other.gin:1: circular include: car.gin -> other.gin -> car.gin' in message_of(
        conf("include 'other.gin'"))


def test_a_module_that_does_not_exist_is_reported(conf):
    assert 'car.gin:1: cannot import' in message_of(conf('import no_such_module_anywhere'))
    assert "did you mean 'alfx.algorithms.config'?" in message_of(conf('import alf.algorithms.config'))
    assert "did you mean 'alfx'?" in message_of(conf('import alf'))
    assert "did you mean 'alfx.algorithms.config'?" in message_of(conf('import alfx.algorithms.confg'))


@pytest.mark.parametrize('code, expected', [
    ('def broken(:\n', "cannot import 'broken_by_{}': SyntaxError: invalid syntax\n  see "),
    ('x = 1\nraise KeyError("wheel")', "importing 'broken_by_{}' fails: KeyError: 'wheel'\n  see "),
    ('import json\n\njson.loads("{")', "importing 'broken_by_{}' fails: JSONDecodeError: Expecting property "),
    ('import numpy\nnumpy.floa32', "importing 'broken_by_{}' fails: AttributeError: module 'numpy' has no attribute "),
    ('\nimport sys\nsys.exit(0)', "importing 'broken_by_{}' ends the program: it calls sys.exit(0)\n  see "),
])
def test_a_module_that_cannot_be_run_is_reported_where_it_is_imported(conf, tmp_path, monkeypatch, code, expected):
    monkeypatch.syspath_prepend(str(tmp_path))
    number = len(code)
    (tmp_path / f'broken_by_{number}.py').write_text(code)
    message = message_of(conf(f'Engine.power = 1\nimport broken_by_{number}'))
    line = code.rstrip().count('\n') + 1
    assert message.startswith('car.gin:2: ' + expected.format(number)) and f'broken_by_{number}.py:{line}' in message


def test_an_installed_module_that_cannot_be_run_is_reported_at_its_line(conf, tmp_path, monkeypatch):
    folder = tmp_path / 'site-packages'
    folder.mkdir()
    (folder / 'broken_when_installed.py').write_text('x = 1\nx.y')
    monkeypatch.syspath_prepend(str(folder))
    assert 'broken_when_installed.py:2' in message_of(conf('import broken_when_installed'))


def test_dynamic_registration_is_rejected_by_name(conf):
    message = message_of(conf('from __gin__ import dynamic_registration'))
    assert 'car.gin:1' in message and 'dynamic_registration' in message and 'not supported' in message


def test_errors_in_a_conf_param_show_the_conf_param(conf):
    message = message_of(conf(''), ["Engine.fuel='diesl'", 'Engine.powr=3', 'Car.name=me'])
    assert "override \"Engine.fuel='diesl'\": Engine.fuel expects" in message
    assert "override 'Engine.powr=3': Engine has no parameter 'powr'" in message
    assert "override 'Car.name=me': syntax error" in message


def test_all_errors_are_reported_at_once(conf):
    conf('Engin.power = 3', 'base.gin')
    message = message_of(conf("include 'base.gin'\nEngine.powr = 3\nEngine.power = 'x'\n"), ['Cra.seats=1'])
    assert [line.split(': ')[0] for line in message.splitlines() if not line.startswith('  ')] == [
        'base.gin:1', 'car.gin:2', 'car.gin:3', "override 'Cra.seats=1'"]


def test_an_error_in_several_places_is_reported_once(conf):
    assert message_of(conf('Engin.power = 3\nEngin.cylinders = 3\nCar.engine = @Engin()')) == (
        "car.gin:1: there is no configurable 'Engin' (also in car.gin:2)\n  did you mean 'Engine'?\n"
        "car.gin:3: there is no configurable '@Engin'\n  did you mean 'Engine'?")


def test_a_name_from_a_module_that_cannot_be_imported_gives_the_reason():
    reasons = {'alfx.environments.suite_moon': "No module named 'moon'", 'alfx.algorithms.moon_lander': 'no fuel'}
    assert static_check.describe_missing('suite_moon.load', reasons) == (
        "alfx.environments.suite_moon could not be imported: No module named 'moon'")
    assert static_check.describe_missing('MoonLander', reasons) == (
        'alfx.algorithms.moon_lander could not be imported: no fuel')
    assert static_check.describe_missing('Engin', reasons) == "did you mean 'Engine'?"


def test_an_object_that_confs_cannot_name_is_described():
    assert static_check.describe_missing('os.environ', {}) == (
        'confs cannot name this _Environ; write a function that calls it')


# Errors while building --------------------------------------------------------------------------------------------


def test_an_argument_that_own_code_forgets_is_not_blamed_on_the_conf(conf):
    @configurable('Frame', module='toys')
    class Frame:
        def __init__(self, wheels, color):
            pass

    @configurable('Bike', module='toys')
    class Bike(Frame):
        def __init__(self, color='red'):
            super().__init__(color=color)

    gin_utils.load(conf("Bike.color = 'green'"))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'wheels'"):
        Bike()


def test_a_value_out_of_range_points_at_its_line(conf):
    gin_utils.load(conf('\nEngine.power = -1'))
    with pytest.raises(ConfError) as caught:
        Engine()
    assert str(caught.value) == 'car.gin:2: Engine.power must be a number > 0, found int -1'


def test_a_value_out_of_range_in_a_scope_points_at_its_line(conf):
    gin_utils.load(conf('Engine.power = 1.0\nCar.engine = @big/Engine()\nbig/Engine.power = -2.0\n'
                        'huge/Engine.power = -3.0\nCar.paint = @huge/Engine'))
    with pytest.raises(ConfError) as caught:
        Car()
    assert str(caught.value) == 'car.gin:3: Engine.power must be a number > 0, found float -2.0'


def test_an_error_that_names_an_argument_points_at_its_line(conf):
    gin_utils.load(conf('Car.engine = @Engine()\nCar.seats = 12'))
    with pytest.raises(ConfError) as caught:
        Car()
    assert str(caught.value) == 'car.gin:2: Car.seats = 12: too many seats'


def test_an_error_that_quotes_a_bound_text_points_at_its_line(conf):
    gin_utils.load(conf("Car.engine = 1\nCar.name = 'nameless'\ngarage.cars = [@Car()]"))
    with pytest.raises(ConfError) as caught:
        garage()
    assert str(caught.value).startswith("car.gin:2: Car.name = 'nameless': there is no car")


def test_an_argument_that_no_constructor_accepts_points_at_its_line(conf):
    gin_utils.load(conf('Car.engine = 1\nCar.sunroof = True'))
    with pytest.raises(ConfError, match=r"car.gin:2: Car.sunroof = True: .*unexpected keyword"):
        Car()


def test_other_errors_keep_their_type_and_list_the_bindings_in_a_note(conf):
    @configurable(module='toys')
    def exploding(depth=1):
        raise ValueError('boom')

    gin_utils.load(conf('exploding.depth = 3'))
    with pytest.raises(ValueError, match='boom') as caught:
        exploding()
    assert not isinstance(caught.value, ConfError)
    assert any('car.gin:1: exploding.depth = 3' in note for note in caught.value.__notes__)
    assert gin_utils.plain_text(caught.value) == 'boom'


def test_no_error_is_blamed_on_a_conf_that_gin_no_longer_has(conf):
    gin_utils.load(conf('Car.engine = 1\nCar.seats = 12'))
    gin.clear_config()
    with pytest.raises(ValueError, match='^too many seats'):
        Car(engine=1, seats=12)
    with pytest.raises(ConfError, match='^Engine.power must be'):
        Engine(power=-1)


# Unused bindings --------------------------------------------------------------------------------------------------


def unused(pattern='{}'):
    return [(binding.location, str(binding)) for binding in gin_utils.unused_bindings()]


def test_a_binding_is_used_once_a_constructor_received_it(conf):
    gin_utils.load(conf('Engine.power = 3\nCar.engine = @Engine()\nCar.seats = 2'))
    assert [location for location, _ in unused()] == ['car.gin:1', 'car.gin:2', 'car.gin:3']
    Engine()
    assert [location for location, _ in unused()] == ['car.gin:2', 'car.gin:3']
    Car()
    assert unused() == []


def test_an_argument_of_the_caller_makes_a_binding_unused(conf):
    gin_utils.load(conf('Car.engine = 1\nCar.seats = 2'))
    Car(seats=3)
    assert unused() == [('car.gin:2', 'Car.seats = 2')]


def test_a_binding_shadowed_by_an_inner_scope_is_unused(conf):
    gin_utils.load(conf('Engine.power = 1\nEngine.cylinders = 2\nbig/Engine.power = 3\nCar.engine = @big/Engine()'))
    Car()
    assert unused() == [('car.gin:1', 'Engine.power = 1')]
    Engine()
    assert unused() == []


def test_bindings_of_step_functions_and_macros_count(conf):
    gin_utils.load(conf('alpha = 2.0\nunmentioned = 1\nelu.alpha = %alpha\nCar.paint = @elu\nCar.engine = 1'))
    assert ('car.gin:3', 'elu.alpha = %alpha') in unused()
    assert Car().paint.keywords == {'alpha': 2.0}
    assert unused() == [('car.gin:2', 'unmentioned = 1')]


def test_an_argument_that_the_code_sets_itself_is_named(conf):
    gin_utils.load(conf('Engine.power = 3'))
    Engine(power=2.0)
    with pytest.raises(ConfError, match='the code that constructs Engine sets power itself'):
        gin_utils.refuse_unused(gin_utils.unused_bindings())


def rejection(conf_file, params=(), **kwargs):
    """Load a conf, make a car as a first iteration does, and return the message of the unused bindings."""
    gin_utils.load(conf_file, params, **kwargs)
    garage()
    with pytest.raises(ConfError) as caught:
        gin_utils.refuse_unused(gin_utils.unused_bindings())
    return str(caught.value)


@pytest.mark.parametrize('line, hint', [
    ('frt/Engine.power = 3', "Engine is not constructed in the scope 'frt': did you mean 'front/Engine'?"),
    ('rear/front/Engine.power = 3', "did you mean 'front/Engine'?"),
    ('Engine.power = 3', 'front/Engine.power at base.gin:3 overrides it: change that binding'),
    ('drive.optimizer = 3', 'drive is never constructed'),
    ('Engines.depth = 3', "Engines is never constructed: did you mean 'Engine'?"),
    ('Search.num_trials = 3', "this is the conf of a search: start it with 'alfx search'"),
])
def test_an_unused_user_binding_ends_the_run_with_a_suggestion(conf, line, hint):
    """End the run if a binding of the user is unused, and suggest the nearest used one."""
    configurable('Engines', module='toys')(lambda depth=1: depth)
    gin_utils.declare_scope('frt')  # otherwise its name is already an error
    conf('garage.cars = [@Car()]\nCar.engine = @front/Engine()\nfront/Engine.power = 1.0', 'base.gin')
    message = rejection(conf(f"include 'base.gin'\n\n{line}"))
    assert message.startswith(f'car.gin:3: this binding is never used: {line}\n') and hint in message
    assert 'correct or remove it, or train with --allow_unused' in message
    assert rejection('base', [line]).startswith(f"override '{line}': this binding is never used")
    gin_utils.load('base', [line], allow_unused=True)
    garage()
    gin_utils.refuse_unused(gin_utils.unused_bindings())


def test_an_unused_macro_of_a_file_is_reported_and_not_fatal(conf, caplog):
    gin_utils.load(conf('hiden_size = 3\nhidden_size = 4\nCar.engine = 3\nCar.seats = %hidden_size\n'
                        'garage.cars = [@Car()]'))
    garage()
    gin_utils.refuse_unused(gin_utils.unused_bindings())
    assert ('car.gin:1: this binding has not been used so far: hiden_size = 3 '
            "(no statement uses this macro: did you mean 'hidden_size'?)") in caplog.text
    message = rejection('car', ['hiddn_size = 3'])
    assert "no statement uses this macro: did you mean 'hidden_size'?" in message


def test_lines_of_an_included_conf_may_be_idle(conf, caplog):
    conf('macro = 3\ngarage.cars = [@Car()]\nCar.engine = @Engine()\nEngine.power = 1.0', 'base.gin')
    gin_utils.load(conf("include 'base.gin'\nCar.engine = 3"))
    garage()
    gin_utils.refuse_unused(gin_utils.unused_bindings())
    assert 'base.gin:1' in caplog.text and 'base.gin:4' in caplog.text


def test_bindings_that_may_be_used_later_are_no_error(conf):
    @configurable(module='toys')
    def write_report(length: int = 1) -> None:
        pass

    gin_utils.load(conf('garage.cars = [@Car()]\nCar.engine = @late/Engine\nlate/Engine.power = 3\n'
                        'Engine.cylinders = 3\nwrite_report.length = 3'))
    garage()
    assert len(gin_utils.unused_bindings()) == 3
    gin_utils.refuse_unused(gin_utils.unused_bindings())


def test_shipped_lines_disabled_by_an_override_are_not_reported(conf, caplog):
    gin_utils.load('ppo_cart_pole', ['ppo/Adam.lr = 1e-4'])
    idle = [binding for binding in gin_utils.unused_bindings() if 'LinearScheduler' in str(binding)]
    assert len(idle) == 2
    gin_utils.warn_of_unused([*idle, *(b for b in gin_utils.unused_bindings() if b.text == 'ppo/Adam.lr')])
    assert [record.getMessage().rpartition(': ')[2] for record in caplog.records] == ['ppo/Adam.lr = 0.0001']


def test_an_included_conf_without_effect_is_reported(conf, caplog):
    gin_utils.load(conf("include 'ppo_corridor.gin'\ninclude 'rnd.gin'\ninclude 'count_bonus.gin'"))
    rnd_bindings = [binding for binding in gin_utils.unused_bindings() if 'rnd' in str(binding).lower()]
    assert len(rnd_bindings) == 13
    gin_utils.warn_of_unused(rnd_bindings)
    assert [record.getMessage() for record in caplog.records] == [
        'rnd.gin has no effect: later bindings select something else']
    gin_utils.warn_of_unused(rnd_bindings[1:])
    assert len(caplog.records) == 1, 'the first binding is used'


@pytest.mark.parametrize('name, same_name', [('conf/config.gin', 'config.gin'), ('best.gin', 'car.gin'),
                                             ('conf/operative.gin', 'operative.gin')])
def test_a_conf_that_a_run_has_written_may_have_unused_bindings(conf, name, same_name, caplog):
    text = 'garage.cars = [@Car()]\nCar.engine = @Engine\nother/Engine.power = 3'
    path = conf(text, name)
    beside = os.path.join(os.path.dirname(path), 'results.csv' if name == 'best.gin' else 'versions.json')
    with open(beside, 'w', encoding='utf8'):
        pass
    gin_utils.load(path)
    garage()
    gin_utils.refuse_unused(gin_utils.unused_bindings())
    assert not caplog.records
    os.remove(beside)
    for own in (path, conf(text, same_name)):
        gin_utils.load(own)
        garage()
        with pytest.raises(gin_utils.ConfError, match='other/Engine.power = 3'):
            gin_utils.refuse_unused(gin_utils.unused_bindings())


@gin_utils.configurable
class Turbo(Engine):
    """A class that forwards unknown arguments, as subclasses of users do."""

    def __init__(self, boost: float = 1.0, **kwargs):
        super().__init__(**kwargs)
        self.boost = boost


@pytest.mark.parametrize('line, hint', [('Turbo.bost = 2', 'boost'), ('Turbo.powr = 2', 'power')])
def test_an_unaccepted_forwarded_argument_is_located_in_the_conf(conf, line, hint):
    gin_utils.load(conf(f'# mine\n{line}\n'))
    with pytest.raises(ConfError, match=rf"car.gin:2: {line}: .*unexpected keyword.*\n  did you mean '{hint}'"):
        Turbo()


@gin_utils.configurable
class Brake:
    """A class with one argument."""

    def __init__(self, force=1.0):
        self.force = force


@gin_utils.configurable
def tuned(engine_ctor):
    """Call a constructor with an argument that brakes do not accept."""
    return engine_ctor(fuel='diesel')


def test_a_constructor_with_unaccepted_arguments_is_found_at_its_line(conf):
    conf('Car.engine = @Brake\nBrake.force = 3.0', 'base.gin')
    gin_utils.load(conf("include 'base.gin'\ntuned.engine_ctor = @Brake\n"))
    with pytest.raises(ConfError) as caught:
        tuned()
    assert str(caught.value) == ('car.gin:2: tuned.engine_ctor = @Brake: it is called with the argument fuel, '
                                 'which Brake does not accept\n  use a class or function that accepts fuel')


def test_the_beginning_of_names_finds_algorithms_first():
    with pytest.raises(ConfError, match=r"'@MPO'\n  did you mean 'MpoAlgorithm'"):
        gin_utils.load('ppo_cart_pole', ['Agent.rl_algorithm_cls = @MPO'])


def test_an_overridden_binding_is_not_unused(conf):
    conf('Engine.power = 1\nlist = 2\nEngine.cylinders = %list', 'base.gin')
    gin_utils.load(conf("include 'base.gin'\nEngine.power = 2"), ['Engine.cylinders = 8'])
    Engine()
    assert unused() == []


def test_finding_unused_bindings_takes_time_linear_in_the_conf(conf, monkeypatch):
    count = 200
    lines = ''.join(f's{i}/Engine.power = {i + 1}.0\nother_{i:b}/Car.engine = @s{i}/Engine()\n' for i in range(count))
    gin_utils.load(conf(lines))
    calls = []
    resolve = static_check.resolve
    monkeypatch.setattr(static_check, 'resolve', lambda name: calls.append(name) or resolve(name))
    mistakes = gin_utils.mistakes_of_unused(gin_utils.unused_bindings())
    assert [binding.scope for binding, _ in mistakes] == [f'other_{i:b}' for i in range(count)]
    assert len(calls) < 10 * count


@pytest.mark.parametrize('module, hint', [
    ('alf', "this package is called alfx: did you mean 'alfx'?"),
    ('alf.utils.schedulers', "this package is called alfx: did you mean 'alfx.utils.schedulers'?"),
    ('alf.utils.external_configurables', 'remove the line'), ('alfx.math', 'remove the line'),
    ('alfx.utils.schedulrs', "did you mean 'alfx.utils.schedulers'?")])
def test_an_unknown_module_raises_with_a_suggestion(conf, module, hint):
    assert hint in message_of(conf(f'import {module}'))


@pytest.mark.parametrize('files, problem', [
    ({'mine': "include 'ppo.gin'\ninclude 'sac.gin'\n"}, r'sac.gin:6: Agent.rl_algorithm_cls = @SacAlgorithm, but '
     r'\S+ppo.gin:5 sets it to @PPOAlgorithm: the conf includes two algorithms'),
    ({'mine': "include 'dqn.gin'\ninclude 'other.gin'\n", 'other': "include 'ppg.gin'\n"}, 'two algorithms'),
    ({'mine': "include 'ppo.gin'\ninclude 'es.gin'\n"}, 'TrainerConfig.algorithm_ctor'),
    ({'mine': "include 'ppo.gin'\ninclude 'mbpo.gin'\n"}, 'two algorithms'),
    ({'mine': "include 'ppo.gin'\ninclude 'sac.gin'\nAgent.rl_algorithm_cls = @SacAlgorithm\n"}, None),
    ({'mine': "include 'other.gin'\n", 'other': "include 'ppo.gin'\nAgent.rl_algorithm_cls = @PPGAlgorithm\n"}, None),
    ({'mine': "include 'ppo.gin'\ninclude 'other.gin'\n", 'other': "include 'ppo.gin'\n"}, None),
    ({'mine': "include 'sac.gin'\ninclude 'mbpo.gin'\n"}, None),
])
def test_two_included_algorithms_are_an_error(tmp_path, files, problem):
    for name, text in files.items():
        (tmp_path / f'{name}.gin').write_text(text)
    if problem is None:
        gin_utils.load(str(tmp_path / 'mine.gin'))
    else:
        with pytest.raises(ConfError, match=problem):
            gin_utils.load(str(tmp_path / 'mine.gin'))
    gin_utils.clear()


def test_a_conf_that_includes_its_own_name_means_the_shipped_one(tmp_path, caplog):
    (tmp_path / 'ppo.gin').write_text("include 'ppo.gin'\nPPOLoss.gamma = 0.5\n")
    with caplog.at_level('INFO'):
        conf = gin_utils.load(str(tmp_path / 'ppo.gin'))
    assert len(conf.sources) == 2 and not caplog.text
    (tmp_path / 'own.gin').write_text("include 'own.gin'\n")
    with pytest.raises(ConfError, match='circular include: own.gin -> own.gin'):
        gin_utils.load(str(tmp_path / 'own.gin'))
    gin_utils.clear()


def test_an_error_in_what_an_object_returns_names_its_bindings(tmp_path):
    (tmp_path / 'minus.gin').write_text("include 'ppo_cart_pole.gin'\n"
                                        'LinearScheduler.schedule = [(0, -1e-3), (1, 0)]\n')
    gin_utils.load(str(tmp_path / 'minus.gin'))
    with pytest.raises(ConfError) as caught, gin.config_scope('ppo'):
        optimizers.Adam([torch.nn.Parameter(torch.zeros(1))])
    assert 'ppo_cart_pole.gin:18: Adam.lr: expected a number of at least 0, found -0.001\n' in str(caught.value)
    assert 'minus.gin:2: LinearScheduler.schedule = [(0, -0.001), (1, 0)]' in str(caught.value)


def test_scopes_inside_the_evaluation_environment_are_for_evaluation(conf):
    conf_file = conf("""
        create_environment.eval_env_load_fn = @longer/suite_gym.load
        suite_gym.load.gym_env_wrappers = (@FrameSkip, )
        FrameSkip.skip = 2
        longer/suite_gym.load.gym_env_wrappers = (@plain/FrameSkip, )
        plain/FrameSkip.skip = 1
        """)
    loaded = gin_utils.load(conf_file)
    assert [b.text for b in loaded.bindings if b.is_for_evaluation] == ['longer/suite_gym.load.gym_env_wrappers',
                                                                       'plain/FrameSkip.skip']
