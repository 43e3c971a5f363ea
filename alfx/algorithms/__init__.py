"""Algorithms. Read first: :mod:`alfx.algorithms.algorithm`.

The classes can be imported from here as well, ``from alfx.algorithms import Agent``, and live in the modules below.
"""
import sys

from alfx.utils import lazy_exports

__getattr__ = lazy_exports.from_modules(sys.modules[__name__])
