"""Documented behavior of ``configurable`` and ``register_function``."""

import copy
import functools
import inspect
import pickle
from typing import NamedTuple

import gin
import pytest
import torch
import torch.nn.functional as F

from alfx import gin_utils
from alfx.gin_utils import configurable, register_function


@configurable
class Parent:

    def __init__(self, x, y=2, activation=torch.tanh):
        self.x, self.y, self.activation = x, y, activation


@configurable
class Chooser(Parent):
    """A class that passes x to the parent and leaves y at the parent's default."""

    def __init__(self, z=1):
        super().__init__(x=z)


@configurable
class Heir(Parent):
    """A class that inherits the constructor of its parent."""


@configurable
class Bare:
    pass


@configurable
class Module(torch.nn.Module):
    pass


class Pair(NamedTuple):
    first: object
    second: object


@configurable(module='suite_toy')
def load(name, wrappers=()):
    return name, wrappers


@configurable(denylist=['secret'])
def guarded(secret=1, public=2):
    return secret, public


@register_function
def clipped_double(x, limit=1.0):
    return torch.clamp(2 * x, max=limit)


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


def test_the_signature_matches_the_constructor():
    assert list(inspect.signature(Parent).parameters) == ['x', 'y', 'activation']
    assert inspect.signature(Parent).parameters['activation'].default is torch.tanh
    assert list(inspect.signature(Heir).parameters) == ['x', 'y', 'activation']
    assert list(inspect.signature(Chooser).parameters) == ['z']
    assert list(inspect.signature(load).parameters) == ['name', 'wrappers']
    assert not inspect.signature(Bare).parameters
    assert inspect.unwrap(Parent.__init__).__code__.co_varnames[:4] == ('self', 'x', 'y', 'activation')


def test_instances_are_of_the_class_itself_and_can_be_copied_and_pickled():
    gin.parse_config('Parent.x = 5')
    original = Parent()
    for twin in (copy.deepcopy(original), copy.copy(original), pickle.loads(pickle.dumps(original))):
        assert type(twin) is Parent and twin.x == 5
    assert pickle.loads(pickle.dumps(load)) is load
    assert pickle.loads(pickle.dumps(Chooser)) is Chooser


def test_a_scoped_reference_makes_instances_of_the_class_itself():
    gin.parse_config('''
        Parent.x = 5
        inner/Parent.x = 6
        suite_toy.load.name = @inner/Parent()
    ''')
    instance, _ = load()
    assert type(instance) is Parent and instance.x == 6
    assert type(pickle.loads(pickle.dumps(instance))) is Parent


def test_caller_arguments_override_bindings_which_override_defaults():
    gin.parse_config(['Parent.x = 5', 'Parent.y = 6'])
    assert (Parent().x, Parent().y) == (5, 6)
    assert (Parent(1).x, Parent(1, 3).y, Parent(x=2, y=4).y) == (1, 3, 4)


def test_parent_bindings_never_change_explicit_subclass_arguments():
    gin.parse_config(['Parent.x = 5', 'Parent.y = 6', 'Chooser.z = 7'])
    instance = Chooser()
    assert instance.x == 7, 'Chooser passes x itself'
    assert instance.y == 6, 'Chooser leaves y open, so the binding of Parent fills it'
    assert Chooser(8).x == 8


def test_own_bindings_of_a_subclass_precede_those_of_its_parent():
    """Prefer bindings of a subclass to those of the parent whose constructor it inherits."""
    gin.parse_config(['Parent.x = 5', 'Parent.y = 6', 'Heir.y = 8'])
    assert (Heir().x, Heir().y) == (5, 8)
    assert (Parent().x, Parent().y) == (5, 6)
    assert (Heir(1, 2).x, Heir(1, 2).y) == (1, 2), 'positional arguments of an inherited constructor'


def test_a_class_without_constructor_takes_no_arguments():
    Bare()
    Module()
    with pytest.raises(TypeError):
        Bare(1)


def test_activations_are_passed_as_plain_functions():
    gin.parse_config(['Parent.x = @relu', 'Parent.activation = @torch.relu_'])
    parent = Parent()
    assert parent.x is torch.relu and parent.activation is torch.relu_


@pytest.mark.parametrize('name, function', [
    ('torch.nn.functional.elu', F.elu), ('elu', F.elu), ('torch.tanh', torch.tanh), ('tanh', torch.tanh),
    ('torch.relu_', torch.relu_), ('leaky_relu', F.leaky_relu), ('silu', F.silu), ('gelu', F.gelu),
    ('softplus', F.softplus), ('sigmoid', torch.sigmoid), ('torch.nn.functional.relu', F.relu),
    ('torch.nn.init.orthogonal_', torch.nn.init.orthogonal_), ('torch.exp', torch.exp), ('abs', torch.abs),
])
def test_functions_of_torch_have_their_names(name, function):
    gin.parse_config(f'Parent.x = @{name}')
    assert Parent().x is function


def test_bindings_make_a_step_function_a_partial_of_the_plain_one():
    gin.parse_config(['clipped_double.limit = 3.', 'Parent.x = @clipped_double', 'softplus.beta = 2.',
                      'Parent.y = @softplus'])
    parent = Parent()
    assert isinstance(parent.x, functools.partial) and parent.x.func is clipped_double
    assert parent.x.keywords == {'limit': 3.0}
    assert parent.x(torch.tensor(5.0)) == 3.0
    assert parent.y.func is F.softplus and parent.y.keywords == {'beta': 2.0}


def test_step_functions_are_bound_by_scope():
    gin.parse_config(['clipped_double.limit = 3.', 'wide/clipped_double.limit = 9.',
                      'Parent.x = [@clipped_double, @wide/clipped_double]'])
    narrow, wide = Parent().x
    assert (narrow.keywords['limit'], wide.keywords['limit']) == (3.0, 9.0)


def test_step_functions_are_plain_inside_containers_partials_and_macros():
    gin.parse_config(['act = @elu', 'Parent.x = [(@relu, 1), {"a": %act}]', 'suite_toy.load.wrappers = %act'])
    (first, one), mapping = Parent().x
    assert first is torch.relu and one == 1 and mapping == {'a': F.elu}
    assert load(name=1)[1] is F.elu
    reference = gin.get_configurable('elu')
    parent = Parent(functools.partial(max, key=reference), Pair(reference, 2))
    assert parent.x.keywords['key'] is F.elu and parent.x.func is max
    assert parent.y == Pair(F.elu, 2)


def test_arguments_without_step_functions_stay_the_same_objects():
    items, mapping, pair, part = [1, [2]], {'a': [1]}, Pair(1, 2), functools.partial(max, 1)
    for value in (items, mapping, pair, part):
        assert Parent(value).x is value


def test_a_registered_function_is_the_function_itself_in_python():
    assert clipped_double(torch.tensor(5.0)) == 1.0
    assert inspect.isfunction(clipped_double) and clipped_double.__module__ == __name__
    assert gin.get_configurable('clipped_double')(torch.tensor(0.25)) == 0.5, 'and callable through gin as well'


def test_a_denied_argument_cannot_be_bound():
    with pytest.raises(ValueError, match='secret'):
        gin.bind_parameter('guarded.secret', 3)
    gin.bind_parameter('guarded.public', 3)
    assert guarded() == (1, 3)


def test_equal_redefinitions_replace_and_other_ones_are_rejected():
    """Replace an object that is defined again; reject a different object of the same name."""
    def define(default):
        @configurable(module='again')
        class Redefined:
            def __init__(self, x=default):
                self.x = x
        return Redefined

    define(1)
    assert define(2)().x == 2
    with pytest.raises(ValueError, match='different configurable'):
        configurable('Redefined', module='again')(Parent)


def test_an_error_of_a_constructor_keeps_its_type_and_text():
    @configurable
    def failing(depth=1):
        raise ValueError('broken beyond repair')

    with pytest.raises(ValueError, match='broken beyond repair') as caught:
        failing()
    assert not isinstance(caught.value, gin_utils.ConfError)
