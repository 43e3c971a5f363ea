"""Entry point for tools that call setup.py; the package is declared in setup.cfg."""
from setuptools import setup

setup()
