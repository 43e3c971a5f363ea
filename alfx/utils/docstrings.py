"""Readable forms of docstrings, with their cross-references replaced, and of default values.

This module does not import torch, so that `alfx help` responds at once.
"""
import re
from typing import Any

_ROLE = re.compile(r':\w+:`~?(?:[\w.]*\.)?(\w+)`')  # a Sphinx cross-reference


def plain(docstring: str) -> str:
    """Return a docstring with cross-references replaced by the last name of their target."""
    return _ROLE.sub(r'\1', docstring)


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown, with the targets of cross-references as code: complete names of modules, or last
    names of other objects.
    """
    return _ROLE.sub(r'`\1`', re.sub(r':mod:`(alfx\.[\w.]+)`', r'`\1`', docstring)).replace('``', '`')


def show_default(default: Any) -> str:
    """Return a default value in the syntax of confs."""
    if callable(default) and hasattr(default, '__name__'):
        return f'@{default.__name__}'
    text = re.sub(r'<(?:\w+\.)*(\w+) object at 0x\w+>', r'\1()', repr(default))
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r'\1', text)
