"""Modules, classes and functions referenced in docstrings and docs pages exist."""
import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / 'alfx').rglob('*.py'))
PAGES = sorted([*(ROOT / 'docs').glob('*.md'), *ROOT.glob('*.md')])
ROLE = re.compile(r':(?:mod|class|func|meth|attr|data|exc|obj):`(?:[^`<]*<)?~?([\w.]+)(?:\(\))?>?`')


def module_name(path):
    return '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')


def docstrings(tree):
    """Yield pairs of the class that contains a docstring, or ``None``, and the text."""
    def visit(node, owner):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            owner = node if isinstance(node, ast.ClassDef) else owner
            if text:
                yield owner, text
        for child in ast.iter_child_nodes(node):
            yield from visit(child, owner)
    yield from visit(tree, None)


@cache
def resolve(dotted):
    """Return whether ``dotted``, a complete name, is a module or an attribute path in a module."""
    parts = dotted.split('.')
    if parts[:2] == ['alfx', 'bin']:  # programs define flags on import, which works once per process
        return (ROOT / 'alfx' / 'bin' / f'{parts[2]}.py').exists()
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module('.'.join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name and not '.'.join(parts[:count]).startswith(error.name):
                return True  # it needs a package that is not installed
            continue
        except ImportError:
            return True
        for i, name in enumerate(parts[count:]):
            if hasattr(found, name):
                found = getattr(found, name)
            else:  # a field of a named tuple or dataclass, or an attribute of instances only
                return i == len(parts[count:]) - 1 and isinstance(found, type) and _mentions(found, name)
        return True
    return False


def _mentions(cls, name):
    annotated = any(name in getattr(base, '__annotations__', {}) for base in cls.__mro__)
    return annotated or any(re.search(rf'\b{name}\b', base.__doc__ or '') for base in cls.__mro__)


@pytest.mark.parametrize('path', SOURCES, ids=module_name)
def test_roles_in_docstrings_name_existing_objects(path):
    name, text = module_name(path), path.read_text()
    if '`' not in text:
        return
    missing = []
    for owner, doc in docstrings(ast.parse(text)):
        for target in ROLE.findall(doc):
            if target.startswith(('torch', 'gymnasium', 'numpy', 'optree', 'gin', 'ray', 'minari')):
                continue
            candidates = [target, f'{name}.{target}', f'{name.rpartition(".")[0]}.{target}']
            if owner is not None:
                candidates.append(f'{name}.{owner.name}.{target}')
            if not any(c.startswith('alfx') and resolve(c) for c in candidates) and not hasattr(
                    __import__('builtins'), target):
                missing.append(target)
    assert not missing, f'{name}: {missing}'


@pytest.mark.parametrize('page', PAGES, ids=lambda path: path.name)
def test_modules_and_files_on_pages_exist(page):
    text = page.read_text()
    dotted = {x for x in re.findall(r'`(alfx(?:\.\w+)+)`', text) if not x.endswith(('.gin', '.json'))}
    files = set(re.findall(r'`((?:alfx/)?(?:\w+/)+\w+\.(?:py|md|gin|c))(?:[:` ])', text))
    files.discard('alfx/environments/suite_NAME.py')
    if page.name == 'CHANGELOG.md':  # it also names removed objects
        return
    assert not [x for x in dotted if not resolve(x)]
    assert not [x for x in files if not any((ROOT / base / x).exists() for base in ('', 'alfx', 'docs'))]
