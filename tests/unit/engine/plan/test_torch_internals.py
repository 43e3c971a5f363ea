"""Private interfaces of torch are used in one module only."""
import pathlib
import re

import alfx

ROOT = pathlib.Path(alfx.__file__).parent
PRIVATE = re.compile(r'\btorch\._(?!_|foreach_|fused_)|torch\.fx\.experimental|\._schema\b|\._cdata\b|'
                     r'\._overloadpacket\b|__closure__')


def test_private_modules_of_torch_are_used_in_one_place():
    files = [path for path in ROOT.rglob('*.py') if PRIVATE.search(path.read_text())]
    allowed = [path for path in files if path.parent.name == 'optimizers'
               or path == ROOT / 'engine' / 'plan' / 'torch_internals.py']
    assert files == allowed and len(allowed) >= 2
