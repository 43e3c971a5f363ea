"""Modules import only modules of lower layers."""
import ast
from pathlib import Path

import alfx

ROOT = Path(alfx.__file__).parent
# lowest first; names in one row may import each other
LAYERS = [
    {'nest.distributions', 'nest.fields', 'nest', 'gin_utils'},
    {'tensor_specs', 'data_structures', 'context'},
    {'summary', 'metrics', 'utils', 'initializers', 'optimizers', 'experience_replayers', 'tree_search'},
    {'layers', 'norm_layers', 'nest.utils'},
    {'networks', 'engine', 'environments', 'offline'},
    {'algorithms'},
    {'trainers'},
    {'search', 'language_server'},
    {'bin'},
]


def layer_of(module):
    """Return the layer of ``'alfx.a.b'``; None for the package itself."""
    name = module.removeprefix('alfx').strip('.')
    for depth, layer in enumerate(LAYERS):
        if any(name == entry for entry in layer):
            return depth
    top = name.split('.')[0]
    for depth, layer in enumerate(LAYERS):
        if top in layer:
            return depth
    return None


def imports_of(path):
    """Return the modules of alfx that a file imports at its top level; imports inside functions do not count."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith('alfx'))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or '').startswith('alfx'):
            for alias in node.names:
                sub = ROOT.parent.joinpath(*node.module.split('.'), alias.name)
                is_module = sub.is_dir() or sub.with_suffix('.py').exists()
                yield f'{node.module}.{alias.name}' if is_module else node.module


def test_no_module_imports_one_above_it():
    violations = []
    for path in sorted(ROOT.rglob('*.py')):
        module = '.'.join(path.relative_to(ROOT.parent).with_suffix('').parts).removesuffix('.__init__')
        own = layer_of(module)
        if own is None:
            continue
        violations += [f'{module} imports {name}' for name in imports_of(path)
                       if (layer_of(name) if layer_of(name) is not None else -1) > own]
    assert not violations, '\n'.join(violations)


def test_the_engine_imports_no_algorithm():
    for path in (ROOT / 'engine').glob('*.py'):
        assert not any(name.startswith('alfx.algorithms') for name in imports_of(path)), path


def test_optree_is_imported_by_nest_only():
    users = [path.relative_to(ROOT).parts[0] for path in ROOT.rglob('*.py') if 'import optree' in path.read_text()]
    assert set(users) == {'nest'}
