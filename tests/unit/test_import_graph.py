"""Imports and private accesses between modules, read from the source, including type hints and local imports."""
import ast
import graphlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {'.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): path
         for path in (ROOT / 'alfx').rglob('*.py')}
PACKAGES = {name for name, path in FILES.items() if path.name == '__init__.py'}

# Files with documented names stay in their folders, although they are above or below the other files there.
APART = {
    'alfx.nest.utils',  # works on specs, which are made of nests
    'alfx.distributions.transforms',  # distributions are made of these; other files of utils are made of distributions
}
USE_THE_ENGINE = {'alfx.algorithms.algorithm', 'alfx.algorithms.training_methods',
                  'alfx.algorithms.rl_algorithm', 'alfx.algorithms.async_unroller'}
USE_TORCH_INTERNALS = {
    'alfx.engine.plan.torch_internals',
}
WRITE_PRIVATELY = {
    'alfx.checkpoints.module_states': {'_is_checkpoint_enabled'},  # its own mark, on modules of any class
}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


def imported(name: str) -> set[str]:
    """Return the complete names of the modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name.split('.')[:len(name.split('.')) - node.level + (name in PACKAGES)] if node.level else []
            base = '.'.join([*package, *([node.module] if node.module else [])])
            found |= {f'{base}.{alias.name}' if f'{base}.{alias.name}' in FILES else base for alias in node.names}
    return found


def imports(inside: str, of: str = 'alfx', but: Iterable[str] = ()) -> set[tuple[str, str]]:
    """Return pairs of a file in a folder and a file it imports from another folder, except those listed."""
    return {(name, other) for name in FILES if f'{name}.'.startswith(f'{inside}.') and name not in but
            for other in imported(name) if f'{other}.'.startswith(f'{of}.')}


def folder(name: str) -> str:
    """Return the folder of a file, or the file itself if its folder has subfolders."""
    holder = name if name in PACKAGES else name.rpartition('.')[0]
    divided = any(package.rpartition('.')[0] == holder for package in PACKAGES)
    return name if divided or name in APART else holder


def part(name: str) -> str:
    """Return the part directly below ``alfx`` that a file belongs to."""
    return name if name in APART else '.'.join(name.split('.')[:2])


@pytest.mark.parametrize('unit', [str, folder, part])
def test_imports_go_in_no_circle(unit):
    graph: dict[str, set[str]] = {}
    for name, other in imports('alfx'):
        if unit(name) != unit(other):
            graph.setdefault(unit(name), set()).add(unit(other))
    graphlib.TopologicalSorter(graph).prepare()


def test_the_engine_is_imported_by_three_algorithm_files_only():
    """Check that the engine imports no algorithm.

    Only three files of algorithms import more of the engine than its capabilities and its functions for masked losses.
    """
    assert not imports('alfx.engine', 'alfx.algorithms')
    assert {other for _, other in imports('alfx.algorithms', 'alfx.engine', but=USE_THE_ENGINE)
            } <= {'alfx.engine.capabilities', 'alfx.engine.loss_reduction'}


LOOPS = {'train_iter', 'unroll', 'train_from_unroll', 'train_from_replay_buffer', 'update_with_gradient'}


def test_the_engine_calls_no_loop_method_of_an_algorithm():
    """Check the direction of calls: Trainer -> Learner -> Collector, Batches, Updater -> steps and hooks."""
    for name in FILES:
        if not name.startswith('alfx.engine.'):
            continue
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Attribute) and node.attr in LOOPS:
                owner = ast.unparse(node.value)
                assert 'algorithm' not in owner and owner != 'root', f'{name}: {ast.unparse(node)}'


def test_parts_of_a_learner_do_not_call_it():
    for name in ('collector', 'batches', 'updater', 'rollout', 'minibatches', 'sequence_losses', 'auxiliary_phase'):
        assert 'alfx.engine.learner' not in imported(f'alfx.engine.{name}'), name


def torch_internals(name: str) -> set[str]:
    """Return the names of torch that may change between versions, except its ``_foreach`` functions on lists."""
    written = {ast.unparse(node) for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute)} | imported(name)
    return {text for text in written if re.fullmatch(r'torch(\.\w+)*\.(_(?!_|foreach)\w+|experimental)(\.\w+)*', text)}


def test_unstable_torch_features_are_used_in_few_places():
    users = {name for name in FILES if torch_internals(name) and not name.startswith('alfx.optimizers.')}
    assert users <= USE_TORCH_INTERNALS


def private_writes(name: str) -> Iterator[str]:
    """Yield writes to private attributes of other objects, except objects created in place without a constructor."""
    for function in ast.walk(tree(name)):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        own_names = {'self', 'cls'}
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and re.search(r'\b(__new__|_bare)\(', ast.unparse(node)):
                own_names |= {target.id for target in ast.walk(node) if isinstance(target, ast.Name)}
        yield from (node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                    and re.match('_(?!_)', node.attr) and ast.unparse(node.value) not in own_names)


def test_nothing_writes_a_private_attribute_of_another_object():
    for name in FILES:
        allowed = WRITE_PRIVATELY.get(name, set())
        assert set(private_writes(name)) <= allowed, name


def import_key(statement: ast.Import | ast.ImportFrom) -> tuple[int, str]:
    if isinstance(statement, ast.Import):
        return 0, statement.names[0].name.lower()
    return (2, '.' * (9 - statement.level) + (statement.module or '')) if statement.level else (1, statement.module)


@pytest.mark.parametrize('root', ['alfx', 'tests', 'tools'])
def test_imports_without_blank_lines_between_them_are_sorted(root):
    """`import x` comes before `from x import y`, relative imports come last."""
    for path in (ROOT / root).rglob('*.py'):
        statements = [x for x in ast.parse(path.read_text()).body if isinstance(x, (ast.Import, ast.ImportFrom))]
        for first, second in zip(statements, statements[1:]):
            assert first.end_lineno + 1 < second.lineno or import_key(first) <= import_key(second), (
                f'{path}:{second.lineno}')
