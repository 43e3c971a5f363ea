"""Whatever torch does not promise to keep is used in one place, and the probe finds out whether it is there."""
import pathlib
import re

import pytest
import torch

import alfx
from alfx.engine.plan import cpu_graph
from alfx.engine.plan.compile import compiler_fault

ROOT = pathlib.Path(alfx.__file__).parent
PRIVATE = re.compile(r'\btorch\._(?!_|foreach_|fused_)|torch\.fx\.experimental|\._schema\b|\._cdata\b|'
                     r'\._overloadpacket\b|__closure__')


def test_private_modules_of_torch_are_used_in_one_place():
    files = [path for path in ROOT.rglob('*.py') if PRIVATE.search(path.read_text())]
    allowed = [path for path in files if path.parent.name == 'optimizers'
               or path == ROOT / 'engine' / 'plan' / 'torch_internals.py']
    assert files == allowed and len(allowed) >= 2


@pytest.mark.parametrize('compiled, told', [
    (lambda graph, inputs: lambda tensors: [x * 1.5 for x in graph(*tensors)], 'compiles wrong code here: result 0'),
    (lambda graph, inputs: 1 / 0, 'cannot compile here: ZeroDivisionError'), (None, None)])
def test_the_probe_says_whether_this_torch_can_compile(compiled, told, monkeypatch):
    monkeypatch.setattr(cpu_graph, 'compiled', compiled or (lambda graph, inputs: lambda tensors: graph(*tensors)))
    compiler_fault.cache_clear()
    state = torch.get_rng_state()
    try:
        fault = compiler_fault()
        assert fault is None if told is None else told in fault
    finally:
        compiler_fault.cache_clear()
    assert torch.equal(torch.get_rng_state(), state)
