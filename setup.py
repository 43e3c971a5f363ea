"""Everything is declared in setup.cfg; this file is for tools that still call setup.py."""
from setuptools import setup

setup()
