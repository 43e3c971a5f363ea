"""Ranges in annotations are checked for arguments of callers and for bindings of confs."""
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Optional

import numpy as np
import pytest

from alfx import gin_utils
from alfx.gin_utils import ConfError, configurable, registry, static_check
from alfx.gin_utils import value_checks
from alfx.gin_utils.value_checks import Count, Fraction, NonNegative, Positive, Range


@configurable(module='ranges')
class Ranged:

    def __init__(self, share: Fraction = 0.5, *, size: Optional[Count] = None, lr: NonNegative | Callable = 0.1,
                 betas: tuple[Fraction, Annotated[float, Range(0, below=1)]] = (0.9, 0.9),
                 layers: Sequence[Count] | Count = (), free: float = 0.0, mode: Positive | Literal[0, 'off'] = 0):
        self.share = share


@configurable(module='ranges')
class Child(Ranged):
    """A class that inherits the constructor of its parent."""


@pytest.mark.parametrize('arguments', [
    {'share': 0}, {'share': 1.0}, {'size': 1}, {'size': None}, {'size': np.int64(3)}, {'lr': 0.0}, {'lr': math.sqrt},
    {'lr': math.inf}, {'betas': (1.0, 0.99)}, {'betas': [0, 0]}, {'layers': ()}, {'layers': (1, 2)}, {'layers': 3},
    {'layers': None}, {'share': True}, {'free': -3.0}, {'mode': 'off'}, {'mode': 0},
    {'mode': 2.0}, {'share': np.float32(0.5)}])
def test_numbers_in_range_pass(arguments):
    Ranged(**arguments)


@pytest.mark.parametrize('arguments, message', [
    ({'share': -0.1}, 'Ranged.share must be a number in [0, 1], found float -0.1'),
    ({'share': math.nan}, 'found float nan'),
    ({'size': 0}, 'Ranged.size must be an int >= 1 or None, found int 0'),
    ({'size': 2.5}, 'found float 2.5'),
    ({'lr': -1e-3}, 'Ranged.lr must be a number >= 0 or a callable, found float -0.001'),
    ({'betas': (0.9, 1.0)}, 'Ranged.betas must be (a number in [0, 1], a number >= 0 and < 1), found tuple (0.9, 1.0)'),
    ({'betas': (0.9,)}, 'found tuple (0.9,)'),
    ({'layers': (8, 0)}, 'Ranged.layers must be a sequence, each an int >= 1 or an int >= 1, found tuple (8, 0)'),
    ({'layers': 0}, 'found int 0'),
    ({'share': 'x'}, "Ranged.share must be a number in [0, 1], found str 'x'"),
    ({'mode': 'on'}, "found str 'on'"),
    ({'mode': -1.0}, "Ranged.mode must be a number > 0 or 0 or 'off', found float -1.0"),
])
def test_a_number_out_of_range_is_rejected_by_the_constructor(arguments, message):
    with pytest.raises(ConfError) as caught:
        Ranged(**arguments)
    assert message in str(caught.value)


def test_a_positional_argument_is_checked_as_well():
    with pytest.raises(ConfError, match='Ranged.share must be'):
        Ranged(2.0)


def test_an_inherited_constructor_is_checked_under_the_called_name():
    with pytest.raises(ConfError, match='Child.share must be'):
        Child(2.0)


def test_a_conf_is_rejected_with_its_line_before_anything_is_built(tmp_path):
    path = tmp_path / 'c.gin'
    path.write_text('Ranged.size = 3\nRanged.layers = (4, 0)\n')
    with pytest.raises(ConfError, match=r'c.gin:2: Ranged.layers expects Sequence\[int >= 1\] or int >= 1, found'):
        gin_utils.load(str(path))
    gin_utils.clear()


RANGES = {'lr': NonNegative, 'td_lambda': Fraction, 'target_update_tau': Fraction, 'target_update_period': Count,
          'epsilon_greedy': Fraction, 'num_critic_replicas': Count, 'fc_layer_params': Count, 'gamma': None}


def arguments_called(name: str) -> list[tuple[str, Any]]:
    gin_utils.import_configurables()
    found = [static_check.resolve(selector) for selector in registry.registered_selectors()
             if selector.startswith('alfx.') and not registry.step_function_of(selector)]
    return [(configurable.name, registry.annotation_of(configurable.wrapped, name)) for configurable in found
            if name in static_check.parameters_of(configurable)[0]]


@pytest.mark.parametrize('name', RANGES)
def test_every_argument_of_this_name_has_its_range(name):
    found = arguments_called(name)
    assert found
    # TrainerConfig checks its own fields
    without = [owner for owner, annotation in found if owner != 'TrainerConfig'
               and not value_checks._has_range(annotation)
               and annotation is not Any]
    assert not without
