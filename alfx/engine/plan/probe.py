"""Whether this installation can do what the forms need, found out on a tiny function before the first real one."""
import functools
import logging

import torch

from alfx.engine.plan.compare import difference
from alfx.engine.plan.cpu_graph import compiled
from alfx.engine.plan.forms import UnsupportedError
from alfx.engine.plan.record import first_line
from alfx.engine.plan.torch_internals import make_graph

logger = logging.getLogger(__name__)


def check_compiler() -> None:
    """Refuse to compile where that does not work at all, such as without a C++ compiler.

    Raises:
        UnsupportedError: why.
    """
    reason = _compiler_fault()
    if reason is not None:
        raise UnsupportedError(reason)


@functools.cache
def _compiler_fault() -> str | None:
    """What is wrong with compiling a layer and its gradient; ``None`` if nothing is."""
    def update(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        weight = weight.detach().requires_grad_()
        with torch.enable_grad():
            loss = torch.relu(x @ weight).square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, [weight])]

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in ((12, 16), (9, 12))]
    try:
        found = compiled(make_graph(update, inputs), inputs)(list(inputs))
    except Exception as error:  # noqa: BLE001 - of any kind: that of Python code, of the C++ compiler
        return f'torch {torch.__version__} cannot compile here: {type(error).__name__}: {first_line(error)}'
    expected = [(f'result {i}', x) for i, x in enumerate(update(*inputs))]
    wrong = difference(expected, [(name, x) for (name, _), x in zip(expected, found, strict=True)], 1e-4)
    if wrong is not None:
        return f'torch {torch.__version__} compiles wrong code here: {wrong}'
    logger.info('torch %s can compile here', torch.__version__)
    return None
