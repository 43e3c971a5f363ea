"""The two halves of a simulation in C, tree by tree; bit-identical to :mod:`alfx.tree_search.tensor_search`."""
import ctypes
from typing import Any

import numpy as np
from torch import Tensor

from alfx.tree_search.trees import Trees

_INTS = ('num_trees', 'num_nodes', 'num_actions', 'num_paths', 'num_depths', 'num_simulations', 'rule', 'unexpanded',
         'two_players', 'depth_limit', 'fixed_bounds', 'expand_all')
_NUMBERS = ('unexpanded_value', 'min_max_delta', 'discount', 'value_scale', 'maxvisit_init')
_ARRAYS = ('ints', 'floats', 'bounds', 'chosen', 'paths', 'factors', 'ties', 'seeds', 'gumbel', 'considered',
           'num_considered', 'scratch')


class _Search(ctypes.Structure):
    """Layout of the struct ``Search`` in ``kernel.c``."""

    _fields_ = [*((name, ctypes.c_int64) for name in _INTS), *((name, ctypes.c_double) for name in _NUMBERS),
                *((name, ctypes.c_void_p) for name in _ARRAYS)]


class NativeSearch:
    """Selection, expansion and backup in the arrays of ``trees``, in compiled code.

    Args:
        trees: the trees.
        library: result of :func:`alfx.tree_search.build.load`.
    """

    def __init__(self, trees: Trees, library: ctypes.CDLL):
        s = trees.settings
        self._trees = trees  # keeps the arrays alive
        self._scratch = np.zeros((3, trees.num_actions))
        arrays: dict[str, np.ndarray] = {name: getattr(trees, name) for name in _ARRAYS if name != 'scratch'}
        arrays['scratch'] = self._scratch
        assert all(array.flags.c_contiguous for array in arrays.values())
        self._search = _Search(
            num_trees=trees.batch_size, num_nodes=trees.ints.shape[1], num_actions=trees.num_actions,
            num_paths=trees.num_paths, num_depths=trees.paths.shape[2], num_simulations=s.num_simulations,
            rule=s.rule_code, unexpanded=s.unexpanded_code, two_players=s.two_players, depth_limit=s.depth_limit,
            fixed_bounds=s.known_bounds is not None, expand_all=s.expand_all, unexpanded_value=s.unexpanded_constant,
            min_max_delta=s.min_max_delta, discount=s.discount, value_scale=s.value_scale,
            maxvisit_init=s.maxvisit_init, **{name: array.ctypes.data for name, array in arrays.items()})
        self._address = ctypes.addressof(self._search)
        self._expand_all = s.expand_all
        self._select: Any = library.alfx_select
        self._select.argtypes, self._select.restype = (ctypes.c_void_p, *(ctypes.c_int64, ) * 3, ctypes.c_void_p), None
        self._expand_backup: Any = library.alfx_expand_backup
        self._expand_backup.argtypes = ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64, ) * 3
        self._expand_backup.restype = ctypes.c_int64

    def select(self, step: int, count: int, first: int, places: Tensor) -> None:
        """Select leaves, see :meth:`alfx.tree_search.tensor_search.TensorSearch.select`."""
        self._select(self._address, step, count, first, places.data_ptr())

    def expand_backup(self, outputs: Tensor, first: int) -> int:
        """Expand and back up, see :meth:`alfx.tree_search.tensor_search.TensorSearch.expand_backup`."""
        return self._expand_backup(self._address, outputs.data_ptr(), outputs.shape[0], first, self._expand_all)

    def expand_root(self, outputs: Tensor) -> int:
        """Expand the roots, see :meth:`alfx.tree_search.tensor_search.TensorSearch.expand_root`."""
        return self._expand_backup(self._address, outputs.data_ptr(), outputs.shape[0], 1, True)
