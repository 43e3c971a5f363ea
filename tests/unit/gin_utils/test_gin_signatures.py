"""``takes_arguments_of``: a constructor that forwards arguments has all of them without repeating them."""

import copy
import functools
import inspect
import pickle
import pydoc
import re
import typing

import gin
import pytest

from alfx import gin_utils
from alfx.algorithms.oac_algorithm import OacAlgorithm
from alfx.gin_utils import ConfError, configurable, takes_arguments_of
from alfx.layers import ParallelFC
from alfx.networks.actor_networks import ActorRNNNetwork
from alfx.networks.network import Network
from alfx.optimizers import SGD
from alfx.tensor_specs import TensorSpec
from alfx.utils.normalizers import ScalarEMNormalizer


@configurable(module='tools')
class Saw:

    def __init__(self, teeth: int, length: float = 0.5, material: 'str' = 'steel', name: str = 'Saw'):
        self.given = dict(teeth=teeth, length=length, material=material, name=name)


@configurable(module='tools')
class PowerSaw(Saw):
    """A saw with a motor.

    Args:
        watts: of the motor.
        volts: of the motor.
        name: name of this saw.
        kwargs: those of :class:`Saw`.
    """

    @takes_arguments_of(Saw, without=('material', ), defaults={'length': 1.5}, after={'watts': 'teeth'})
    def __init__(self, watts: int = 800, volts: int = 230, name: str = 'PowerSaw', **kwargs: typing.Any):
        super().__init__(name=name, **kwargs)
        self.watts, self.volts = watts, volts


@configurable(module='tools')
class ChainSaw(PowerSaw):

    @takes_arguments_of(PowerSaw, defaults={'name': 'ChainSaw', 'watts': 2000})
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


@configurable(module='tools')
@takes_arguments_of(PowerSaw, after={'count': 'teeth', 'volts': 'length'})
def saws(count: int, name: str = 'saws', **kwargs) -> list:
    return [PowerSaw(name=f'{name}{i}', **kwargs) for i in range(count)]


@configurable(module='tools')
class Drawer:

    def __init__(self, width=1, **labels):
        self.width, self.labels = width, labels


@configurable(module='tools')
class DeepDrawer(Drawer):

    @takes_arguments_of(Drawer, after={'depth': 'width'})
    def __init__(self, depth=2, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth


@pytest.fixture(autouse=True)
def empty_gin():
    yield
    gin_utils.clear()


@pytest.fixture
def conf(tmp_path):

    def write(text):
        path = tmp_path / 'tools.gin'
        path.write_text(text, encoding='utf8')
        return str(path)

    return write


def defaults_of(target):
    return {name: p.default for name, p in inspect.signature(target).parameters.items()}


NONE = inspect.Parameter.empty


def test_the_signature_has_all_arguments_in_the_requested_order():
    assert list(defaults_of(PowerSaw).items()) == [('teeth', NONE), ('watts', 800), ('volts', 230), ('length', 1.5),
                                                   ('name', 'PowerSaw')]
    assert list(defaults_of(ChainSaw).items()) == [('teeth', NONE), ('watts', 2000), ('volts', 230), ('length', 1.5),
                                                   ('name', 'ChainSaw')]
    assert list(defaults_of(saws).items()) == [('teeth', NONE), ('count', NONE), ('watts', 800), ('length', 1.5),
                                               ('volts', 230), ('name', 'saws')]
    assert list(defaults_of(DeepDrawer).items()) == [('width', 1), ('depth', 2), ('labels', NONE)]


def test_arguments_named_by_the_child_keep_parent_default_and_annotation():

    @takes_arguments_of(Saw)
    def weigh(length, *, material: object, **kwargs):
        return length, material

    length, material = list(inspect.signature(weigh).parameters.values())[1:3]
    assert (length.default, length.annotation, length.kind) == (0.5, float, length.POSITIONAL_OR_KEYWORD)
    assert (material.default, material.annotation, material.kind) == ('steel', object, length.POSITIONAL_OR_KEYWORD)
    assert weigh(20) == (0.5, 'steel')


def test_positional_arguments_follow_the_signature():
    saw = PowerSaw(20, 900, 110, 2.5, 'mine')
    assert (saw.watts, saw.volts) == (900, 110)
    assert saw.given == dict(teeth=20, length=2.5, material='steel', name='mine')
    assert ChainSaw(20, 900).given == dict(teeth=20, length=1.5, material='steel', name='ChainSaw')


def test_a_default_of_the_child_reaches_the_parent():
    assert PowerSaw(20).given['length'] == 1.5
    assert PowerSaw(20, length=3.0).given['length'] == 3.0
    assert ChainSaw(20).watts == 2000


@pytest.mark.parametrize('target, names', [
    (ParallelFC, 'input_size output_size n activation use_bias use_bn use_ln bn_ctor kernel_initializer '
     'kernel_init_gain bias_init_value use_torch_init bias_initializer weight_opt_args bias_opt_args'),
    (ScalarEMNormalizer, 'update_rate auto_update variance_epsilon zero_mean unit_std debug_summaries name'),
    (SGD, 'params lr momentum dampening weight_decay nesterov gradient_clipping clip_by_global_norm name'),
    (ActorRNNNetwork, 'input_tensor_spec action_spec input_preprocessors preprocessing_combiner conv_layer_params '
     'fc_layer_params lstm_hidden_size actor_fc_layer_params activation squashing_func kernel_initializer name'),
    (OacAlgorithm, 'observation_spec action_spec reward_spec actor_network_cls critic_network_cls q_network_cls '
     'reward_weights epsilon_greedy use_entropy_reward calculate_priority num_critic_replicas env config '
     'critic_loss_ctor target_entropy prior_actor_ctor target_kld_per_dim initial_log_alpha explore explore_delta '
     'beta_ub max_log_alpha target_update_tau target_update_period dqda_clipping actor_optimizer critic_optimizer '
     'alpha_optimizer checkpoint debug_summaries name train_actor_on_last_step'),
])
def test_alfx_classes_take_positional_arguments_in_documented_order(target, names):
    documented = names.split()  # arguments that only alfx has follow
    assert list(inspect.signature(target).parameters)[:len(documented)] == documented


def test_a_function_takes_the_arguments_of_a_class():
    first, second = saws(20, count=2, watts=5)
    assert (first.given['name'], second.given['name'], first.watts, first.given['length']) == ('saws0', 'saws1', 5, 1.5)


def test_variable_arguments_of_the_parent_reach_the_child():
    drawer = DeepDrawer(3, 4, front='nails')
    assert (drawer.width, drawer.depth, drawer.labels) == (3, 4, {'front': 'nails'})


def test_annotations_are_joined_even_if_the_parent_quotes_them():
    hints = typing.get_type_hints(inspect.unwrap(ChainSaw.__init__))
    assert hints == dict(teeth=int, watts=int, volts=int, length=float, name=str)
    assert inspect.signature(saws).return_annotation is list
    assert typing.get_type_hints(inspect.unwrap(Planer.__init__))['material'] is str


class Planer(Saw):

    @takes_arguments_of(Saw, defaults={'name': 'Planer'})
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


def test_help_shows_every_argument():
    text = re.sub(r'[\s|]+', ' ', pydoc.render_doc(ChainSaw, renderer=pydoc.plaintext))  # Python 3.13 breaks long lines
    assert 'ChainSaw(teeth: int, watts: int = 2000, volts: int = 230, length: float = 1.5, name: str =' in \
        text.replace('( ', '(')


@pytest.mark.parametrize('make, message', [
    (lambda: ChainSaw(20, teth=3), r"ChainSaw.__init__\(\) got an unexpected keyword argument 'teth'"),
    (lambda: PowerSaw(20, material='wood'), r"PowerSaw.__init__\(\) got an unexpected keyword argument 'material'"),
    (lambda: PowerSaw(), r"PowerSaw.__init__\(\) missing a required argument: 'teeth'"),
    (lambda: PowerSaw(1, 2, 3, 4, 'a', 6), r"PowerSaw.__init__\(\) too many positional arguments"),
    (lambda: saws(1, count=1, cout=2), r"saws\(\) got an unexpected keyword argument 'cout'"),
])
def test_invalid_arguments_are_rejected_with_the_name_of_the_callable(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_a_conf_binds_arguments_of_the_parent_in_the_child():
    gin.parse_config(['PowerSaw.length = 7.0', 'PowerSaw.watts = 3', 'ChainSaw.teeth = 9'])
    saw = PowerSaw(20)
    assert (saw.given['length'], saw.watts) == (7.0, 3)
    assert PowerSaw(20, 4, 5, 6.0).given['length'] == 6.0, 'what the caller passes by position wins'
    assert ChainSaw().given['teeth'] == 9


def test_parent_bindings_fill_only_unbound_child_arguments():
    gin.parse_config(['Saw.length = 7.0', "Saw.material = 'wood'"])
    assert PowerSaw(20).given == dict(teeth=20, length=1.5, material='wood', name='PowerSaw')


def test_the_operative_configuration_lists_every_argument():
    gin.parse_config('ChainSaw.teeth = 9')
    ChainSaw()
    text = gin_utils.operative_config_str()
    for line in ('ChainSaw.teeth = 9', 'ChainSaw.watts = 2000', 'ChainSaw.length = 1.5', "ChainSaw.name = 'ChainSaw'"):
        assert line in text


@pytest.mark.parametrize('line, message', [
    ('ChainSaw.lenth = 1.0', "ChainSaw has no parameter 'lenth'\n  did you mean 'length'?"),
    ("PowerSaw.material = 'wood'", "PowerSaw has no parameter 'material'"),
    ("ChainSaw.length = 'long'", 'ChainSaw.length expects float'),
    ('PowerSaw.watts = 1.5', 'PowerSaw.watts expects int'),
])
def test_a_wrong_binding_is_found_before_anything_is_built(conf, line, message):
    with pytest.raises(ConfError) as error:
        gin_utils.load(conf(line))
    assert message in str(error.value) and 'tools.gin:1' in str(error.value)


def test_instances_can_be_copied_and_pickled():
    original = ChainSaw(20)
    for twin in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert type(twin) is ChainSaw and twin.given == original.given


def test_arguments_can_be_bound_by_a_partial():
    assert functools.partial(PowerSaw, teeth=4)(watts=3).given['teeth'] == 4


class Wide(Network):

    def __init__(self, input_tensor_spec, factor=2, name='Wide'):
        super().__init__(input_tensor_spec, (), name)
        self.factor = factor


class Wider(Wide):

    @takes_arguments_of(Wide, defaults={'name': 'Wider'}, after={'extra': 'input_tensor_spec'})
    def __init__(self, extra=1, **kwargs):
        super().__init__(**kwargs)
        self.extra = extra


def test_a_network_that_forwards_its_arguments_can_be_copied():
    network = Wider(TensorSpec((2, )), 3, 4)
    assert network.saved_args == dict(input_tensor_spec=TensorSpec((2, )), extra=3, factor=4, name='Wider')
    twin = network.copy(factor=5, name='twin')
    assert (type(twin), twin.extra, twin.factor, twin.name) == (Wider, 3, 5, 'twin')


@pytest.mark.parametrize('options, message', [
    (dict(without=('teth', )), "'teth' is not an argument of Saw"),
    (dict(defaults={'lenth': 1}), "'lenth' is not an argument of Saw"),
    (dict(defaults={'material': 'x'}, without=('material', )), "'material' is not an argument of Saw"),
    (dict(after={'watts': 'teth'}), "'teth' is not an argument of Saw"),
    (dict(after={'wats': 'teeth'}), "'wats' is not an argument of Saw"),
])
def test_a_name_missing_in_the_parent_is_rejected_at_definition(options, message):
    with pytest.raises(TypeError, match=message):

        @takes_arguments_of(Saw, **options)
        def make(watts=1, **kwargs):
            pass


def test_functions_without_kwargs_or_with_args_are_rejected_at_definition():
    with pytest.raises(TypeError, match=r'make: expected \*\*kwargs'):

        @takes_arguments_of(Saw)
        def make(watts=1):
            pass

    with pytest.raises(TypeError, match=r'make: expected .* no \*args'):

        @takes_arguments_of(Saw)
        def make(*args, **kwargs):
            pass


def test_a_new_argument_with_a_default_follows_the_required_ones():
    def parent(observation, action, reward=0):
        return observation, action, reward

    @takes_arguments_of(parent)
    def child(weight=0.5, **kwargs):
        return weight, parent(**kwargs)

    assert list(inspect.signature(child).parameters) == ['observation', 'action', 'weight', 'reward']
    assert child(1, 2) == (0.5, (1, 2, 0)) and child(1, 2, weight=3, reward=4) == (3, (1, 2, 4))
