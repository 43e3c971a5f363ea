"""Algorithms. Read first: :mod:`alfx.algorithms.algorithm`.

The classes can be imported from here as well, ``from alfx.algorithms import Agent``, and live in the modules below.
"""
import sys

from alfx import handing_on

__getattr__ = handing_on.from_modules(sys.modules[__name__])
