"""Records that cross the borders between processes."""
import importlib
import pickle
import pkgutil

from alfx import algorithms
from alfx.data_structures import LossInfo, TimeStep, namedtuple

Local = namedtuple('Local', ['a', 'b'], default_value=())


def test_a_named_tuple_is_pickled_by_its_qualified_name():
    assert Local.__module__ == __name__
    found = pickle.loads(pickle.dumps(Local(a=1)))
    assert type(found) is Local and found == (1, ())


def test_every_named_tuple_of_an_algorithm_can_be_pickled():
    records = {TimeStep, LossInfo}
    for module in pkgutil.iter_modules(algorithms.__path__, 'alfx.algorithms.'):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, '_fields'):
                records.add(value)
    assert len(records) > 30
    for record in records:
        empty = record(*[()] * len(record._fields))
        assert type(pickle.loads(pickle.dumps(empty))) is record
