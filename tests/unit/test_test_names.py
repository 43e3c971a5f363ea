"""Length of the names of tests."""
import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
MAX_LENGTH = 70


def test_every_test_name_has_at_most_70_characters():
    """A longer sentence belongs in the docstring of the test."""
    too_long, count = [], 0
    for path in sorted(TESTS.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf8'))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith('test_'):
                count += 1
                if len(node.name) > MAX_LENGTH:
                    too_long.append(f'{path.relative_to(TESTS)}:{node.lineno}: {len(node.name)}: {node.name}')
    assert count > 3000 and not too_long, '\n'.join(too_long)
