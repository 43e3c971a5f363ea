"""How torch computes on the CPU: with how many threads, and by which path of float32 matrix products.

Both depend on the sizes of the networks. Small products are slower on several threads. For large ones,
``torch.set_float32_matmul_precision('medium')`` selects oneDNN in place of MKL, which on some CPUs is twice as fast and
computes in float32 as well, and on others is slower (small products) or rounds to bfloat16 (AMX); so it is tried on
the products that the run is going to compute: on those of updates, and by themselves on those of acting, of few rows,
which may be slower where the others gain. The outcome is part of a run: it is kept with the checkpoints, since other
threads or another path round differently.
"""
import ctypes
import logging
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import nn

from alfx import context

logger = logging.getLogger(__name__)

_MIN_FLOP_TO_TIME = 3e6  # below, oneDNN's overhead for each call outweighs what it could gain
_MAX_FLOP_TO_TIME = 1e8  # larger products are timed with fewer rows
_MIN_FLOP_FOR_THREADS = 2e7  # less than about half a millisecond on one core
_MAX_SHAPES = 3
_REPETITIONS = 9
_WORTHWHILE = 0.9  # of the time


class Tuning(NamedTuple):
    """How torch computes on the CPU.

    Attributes:
        num_threads: as for ``torch.set_num_threads``.
        float32_matmul_precision: as for ``torch.set_float32_matmul_precision``.
        acting_precision: the same while the environments of this process are stepped; ``None``: no other.
    """
    num_threads: int
    float32_matmul_precision: str
    acting_precision: str | None = None

    def apply(self) -> None:
        """Make it so in this process.

        Numbers below 1e-38 become 0: the moments of Adam for weights without gradient decay to such, and
        arithmetic with them takes a multiple of the time.
        """
        torch.set_flush_denormal(True)
        _keep_freed_memory()
        torch.set_num_threads(self.num_threads)
        torch.set_float32_matmul_precision(self.float32_matmul_precision)
        context.set_acting_precision(self.acting_precision)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def _keep_freed_memory() -> None:
    """Have glibc keep up to 256 MB that were freed, for the next update, which needs as much as the one before it.

    By default it may hand results of a network back to the system and fetch new pages for the next ones, which the
    system first fills with zeros: a batch of images as float32 then takes three times as long to make. Does nothing
    with another C library; glibc before 2.35 allows no more than 32 MB for a single tensor.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**28) or mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, 2**28)


class Work(NamedTuple):
    """What is asked of each layer.

    Attributes:
        update_rows: rows that it sees in an update.
        acting_rows: rows that it sees in a step of the environments; 0: there are none.
    """
    update_rows: int
    acting_rows: int = 0


def choose(algorithm: nn.Module, config: Any, work: Work) -> Tuning:
    """Choose for the networks of ``algorithm``, log why, and apply it.

    Args:
        algorithm: holds the networks.
        config: ``num_threads`` and ``float32_matmul_precision`` of the ``TrainerConfig``, where not None, are taken as
            they are.
        work: what is computed.
    """
    shapes = _product_shapes(algorithm)
    threads, why_threads = _choose_threads(algorithm, shapes, work.update_rows)
    if config.num_threads is not None:
        threads, why_threads = config.num_threads, 'TrainerConfig.num_threads'
    torch.set_num_threads(threads)
    precision, why_precision = config.float32_matmul_precision, 'TrainerConfig.float32_matmul_precision'
    acting = None
    if precision is None:
        precision, why_precision = _choose_precision(algorithm, shapes, work.update_rows)
        if precision != 'highest' and work.acting_rows:
            acting, why_acting = _choose_precision(algorithm, shapes, work.acting_rows, is_worth_timing=True)
            why_precision += f', those of acting in {acting!r} ({why_acting})'
    logger.info('torch computes with %d thread(s) (%s), float32 products in precision %r (%s)', threads, why_threads,
                precision, why_precision)
    tuning = Tuning(threads, precision, acting)
    tuning.apply()
    return tuning


def choose_again(tuning: Tuning, config: Any) -> Tuning:
    """Apply what a run has chosen before, but for what its ``TrainerConfig`` says."""
    tuning = tuning._replace(num_threads=config.num_threads or tuning.num_threads)
    if config.float32_matmul_precision is not None:
        tuning = Tuning(tuning.num_threads, config.float32_matmul_precision)
    tuning.apply()
    return tuning


def _product_shapes(algorithm: nn.Module) -> list[tuple[int, int]]:
    """``(out, in)`` of the layers that multiply by a matrix, the largest first."""
    weights = [p for name, p in algorithm.named_parameters() if name.endswith('weight') and p.ndim in (2, 3)]
    shapes = {(w.shape[-2] * (w.shape[0] if w.ndim == 3 else 1), w.shape[-1]) for w in weights}
    return sorted(shapes, key=lambda shape: -shape[0] * shape[1])


def _choose_threads(algorithm: nn.Module, shapes: list[tuple[int, int]], batch_size: int) -> tuple[int, str]:
    available = torch.get_num_threads()  # what the cores and OMP_NUM_THREADS allow
    if any(p.ndim >= 4 for p in algorithm.parameters()):
        return available, 'convolutions'
    flop = max((2.0 * batch_size * rows * columns for rows, columns in shapes), default=0.0)
    if flop < _MIN_FLOP_FOR_THREADS:
        return 1, f'its largest product is {flop / 1e6:.3g} MFLOP'
    return available, f'its largest product is {flop / 1e6:.3g} MFLOP'


def _choose_precision(algorithm: nn.Module, shapes: list[tuple[int, int]], batch_size: int,
                      is_worth_timing: bool = False) -> tuple[str, str]:
    """A precision for products of so many rows, and why; small ones are only tried if that ``is_worth_timing``."""
    if any(p.device.type != 'cpu' for p in algorithm.parameters()):
        return torch.get_float32_matmul_precision(), 'not on the CPU'
    timed = [(rows, columns) for rows, columns in shapes
             if is_worth_timing or 2 * batch_size * rows * columns >= _MIN_FLOP_TO_TIME]
    if not timed:
        return 'highest', 'all products are small'
    seconds = {'highest': 0.0, 'medium': 0.0}
    for rows, columns in timed[:_MAX_SHAPES]:
        outcome = _try(rows, columns, batch_size)
        error = outcome['medium'][1]
        if not _is_of_float32(error, columns):
            return 'highest', (f"'medium' is not float32: its error at {batch_size}x{columns}x{rows} is {error:.1e}, "
                               f"that of 'highest' {outcome['highest'][1]:.1e}")
        for precision, (duration, _) in outcome.items():
            seconds[precision] += duration
    faster = seconds['medium'] < _WORTHWHILE * seconds['highest']
    return ('medium' if faster else 'highest', f"the largest take {seconds['highest'] * 1e6:.2g} us in 'highest', "
            f"{seconds['medium'] * 1e6:.2g} us in 'medium', both in float32")


def _is_of_float32(error: float, columns: int) -> bool:
    """Whether a root mean square error is that of float32 products of standard normal numbers, summed in some order.

    With n ``columns``: a partial sum of k products is about sqrt(k), and rounding it is off by about 0.2 eps sqrt(k),
    so that adding one product after the other is off by about 0.15 eps n, and other orders by less. Rounding the
    factors to TF32 is off by about 2,500 eps sqrt(n), to bfloat16 by eight times that. So eps n has room for any
    float32, and up to ten thousand columns is a twenty-fifth of the error of anything less precise.
    """
    return error <= torch.finfo(torch.float32).eps * columns


def _try(rows: int, columns: int, batch_size: int) -> dict[str, tuple[float, float]]:
    """Shortest time in seconds and root mean square error of one product in each precision.

    Its factors are standard normal numbers. The precisions take turns and the shortest time counts: what else runs on
    the machine makes single products slower and none faster, and a run started again should choose the same.
    """
    batch_size = max(1, min(batch_size, int(_MAX_FLOP_TO_TIME / (2 * rows * columns))))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch_size, columns, generator=generator)
    weight = torch.randn(rows, columns, generator=generator)
    exact = x[:64].double() @ weight.double().T
    before = torch.get_float32_matmul_precision()
    seconds: dict[str, list[float]] = {'highest': [], 'medium': []}
    products = {}
    try:
        with torch.no_grad():
            for _ in range(_REPETITIONS):
                for precision, times in seconds.items():
                    torch.set_float32_matmul_precision(precision)
                    start = time.perf_counter()
                    product = nn.functional.linear(x, weight)
                    times.append(time.perf_counter() - start)
                    products[precision] = product
    finally:
        torch.set_float32_matmul_precision(before)
    return {precision: (min(times), (products[precision][:64] - exact).square().mean().sqrt().item())
            for precision, times in seconds.items()}
