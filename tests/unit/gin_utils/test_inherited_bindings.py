"""Bindings of a class apply to its registered subclasses."""
import functools

import pytest

from alfx import gin_utils
from alfx.algorithms.actor_critic_loss import ActorCriticLoss
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.gin_utils import configurable, takes_arguments_of
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec


@configurable(module='heritage')
class Base:

    def __init__(self, tau: float = 0.05, size: int = 1, parts=()):
        self.tau, self.size, self.parts = tau, size, parts


@configurable(module='heritage')
class Middle(Base):

    @takes_arguments_of(Base, defaults={'size': 7})
    def __init__(self, extra: int = 0, **kwargs):
        super().__init__(**kwargs)
        self.extra = extra


class Unregistered(Middle):
    pass


@configurable(module='heritage')
class Leaf(Unregistered):

    def __init__(self, tau: float = 0.5, extra: int = 3):
        super().__init__(tau=tau, extra=extra, size=100)


@configurable(module='heritage')
class Keeper:

    def __init__(self, held, made=None):
        self.held, self.made = held, made


@pytest.fixture
def load(write_conf):
    yield lambda text: gin_utils.load(write_conf(text))
    gin_utils.clear()


@pytest.fixture
def write_conf(tmp_path):

    def write(text):
        path = tmp_path / 'mine.gin'
        path.write_text(text)
        return str(path)

    return write


def test_a_subclass_inherits_bindings_for_its_own_parameters(load):
    load('heritage.Base.tau = 0.005\nheritage.Base.size = 2\n')
    assert (Middle().tau, Middle().size) == (0.005, 2)
    assert (Leaf().tau, Leaf().size) == (0.005, 100)
    assert Middle(tau=1.0).tau == 1.0


@pytest.mark.parametrize('text, middle, leaf', [
    ('heritage.Base.tau = 1\nheritage.Middle.tau = 2\n', 2, 2),
    ('heritage.Middle.tau = 2\nheritage.Base.tau = 1\n', 2, 2),
    ('heritage.Base.tau = 1\nheritage.Leaf.tau = 3\n', 1, 3),
    ('heritage.Base.tau = 1\nheritage.Base.tau = 4\n', 4, 4),
    ('TAU = 5\nheritage.Base.tau = %TAU\n', 5, 5),
])
def test_the_binding_of_the_nearest_class_applies(load, text, middle, leaf):
    load(text)
    assert (Middle().tau, Leaf().tau) == (middle, leaf)


@pytest.mark.parametrize('text, in_a, elsewhere', [
    ('a/heritage.Base.tau = 1\n', 1, 0.05),
    ('a/heritage.Base.tau = 1\nheritage.Middle.tau = 2\n', 2, 2),
    ('heritage.Base.tau = 1\na/heritage.Middle.tau = 2\n', 2, 1),
    ('heritage.Base.tau = 1\na/heritage.Base.tau = 3\n', 3, 1),
])
def test_inherited_bindings_keep_their_scope(load, text, in_a, elsewhere):
    load(f'{text}heritage.Keeper.held = @a/heritage.Middle()\nheritage.Keeper.made = @heritage.Middle()\n')
    holder = Keeper()
    assert (holder.held.tau, holder.made.tau) == (in_a, elsewhere)


def test_an_inherited_reference_is_made_and_checked(load):
    load('heritage.Base.parts = @heritage.Keeper()\nheritage.Keeper.held = 3\n')
    assert Middle().parts.held == 3
    with pytest.raises(gin_utils.ConfError, match='circular'):
        load('heritage.Base.parts = @heritage.Middle()\n')


def test_a_binding_that_only_a_subclass_received_is_used(load):
    load('heritage.Base.tau = 0.005\nheritage.Base.size = 2\n')
    Middle()
    assert not gin_utils.unused_bindings()
    assert 'Middle.tau = 0.005' in gin_utils.operative_config_str()


def test_a_binding_without_effect_on_the_subclass_is_unused(load):
    load('heritage.Base.tau = 1\nheritage.Base.size = 2\nheritage.Middle.tau = 3\n')
    Middle()
    assert [str(binding) for binding in gin_utils.unused_bindings()] == ['heritage.Base.tau = 1']
    load('heritage.Base.tau = 2\nheritage.Keeper.held = @heritage.Leaf\n')
    assert [b.text for b, _ in gin_utils.mistakes_of_unused(gin_utils.unused_bindings())] == ['heritage.Keeper.held']


def test_the_error_of_a_subclass_names_the_line_of_the_base_class(load):
    load('\nheritage.Base.tau = 1\n')
    with pytest.raises(gin_utils.ConfError, match='mine.gin:2: Middle.tau must be False'):
        raise gin_utils.ConfError([gin_utils.value_checks.problem_at('Middle', 'tau', 'must be False')])


def test_a_run_resumes_with_its_inherited_bindings(load, write_conf, tmp_path):
    conf = load('heritage.Base.tau = 0.005\n')
    Middle()
    gin_utils.write_conf(str(tmp_path), conf)
    gin_utils.write_operative(str(tmp_path))
    (tmp_path / 'train/algorithm').mkdir(parents=True)
    (tmp_path / 'train/algorithm/ckpt-1').touch()
    for conf_file in (write_conf('heritage.Base.tau = 0.005\n'), None):
        gin_utils.load(conf_file, root_dir=str(tmp_path))
        assert Middle().tau == 0.005
    (tmp_path / 'conf/config.gin').unlink()
    gin_utils.load(write_conf('heritage.Base.tau = 0.005\n'), root_dir=str(tmp_path))
    with pytest.raises(gin_utils.ConfError, match='0.005'):
        gin_utils.load(write_conf('heritage.Base.tau = 0.006\n'), root_dir=str(tmp_path))


def test_ppo_has_its_own_loss_and_rejects_others():
    make = functools.partial(PPOAlgorithm, TensorSpec((2, )), BoundedTensorSpec((), 'int64', 0, 1))
    assert type(make()._loss).__name__ == 'PPOLoss'
    with pytest.raises(TypeError, match='loss_class = @PPOLoss'):
        make(loss_class=ActorCriticLoss)
