"""Conf files: everything between gin-config and the rest of alfx.

- ``registry``: :func:`configurable` for constructors and factories, :func:`register_function` for
  functions that run once a step;
- ``errors``: :class:`ConfError`;
- ``locations``: where each binding was written.
"""

from .checks import check_value
from .errors import ConfError, Problem
from .registry import configurable, raw_functions, register_function
from .torch_functions import register_torch_functions

__all__ = ['ConfError', 'Problem', 'check_value', 'configurable', 'raw_functions', 'register_function']

register_torch_functions()
