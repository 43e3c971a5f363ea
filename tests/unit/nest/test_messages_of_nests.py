"""Messages about nests are short and relevant, even for large nests."""
import pytest

from alfx import TensorSpec, nest
from alfx.networks.encoding_networks import EncodingNetwork

MANY = {f'f{i}': TensorSpec((3, )) for i in range(300)}


@pytest.mark.parametrize('fail', [
    lambda: EncodingNetwork({key: TensorSpec((2, 3, 3, 3)) for key in MANY}), lambda: nest.get_field(MANY, 'nope'),
    lambda: nest.map_structure(lambda a, b: a, MANY, {key: x for key, x in MANY.items() if key != 'f77'})])
def test_long_differences_are_abbreviated_with_a_count(fail):
    with pytest.raises((ValueError, LookupError), match=r"'f0'.*\.\.\. and 290 more") as caught:
        fail()
    assert len(str(caught.value)) < 1000


def test_the_fields_that_only_one_nest_has_are_named():
    with pytest.raises(ValueError, match=r"'f77' in one of them only"):
        nest.map_structure(lambda a, b: a, MANY, {key: x for key, x in MANY.items() if key != 'f77'})


def test_a_short_list_is_shown_in_full():
    assert nest.listed(['a', 'b']) == 'a, b' and nest.listed(['a', 'b', 'c'], most=2) == 'a, b, ... and 1 more'
