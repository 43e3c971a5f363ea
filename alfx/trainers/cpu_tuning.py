"""Choice of the number of torch threads and of the implementation of float32 matrix products on the CPU.

The best choice depends on the sizes of the networks. Small products are slower on several threads. For large products,
``torch.set_float32_matmul_precision('medium')`` selects oneDNN instead of MKL. On some CPUs this is twice as fast and
still computes in float32; on others it is slower (small products) or rounds to bfloat16 (AMX). Therefore both are timed
on the matrix products of the run: on the products of updates, and separately on the products of acting, which have few
rows and may become slower. The choice is stored in the checkpoints, because a different number of threads or a
different implementation rounds differently.
"""
import ctypes
import logging
import sys
import time
from typing import Any, NamedTuple

import torch
from torch import nn

from alfx import context
from alfx.utils.processes import num_cores

logger = logging.getLogger(__name__)

_MIN_FLOP_TO_TIME = 3e6  # for smaller products the call overhead of oneDNN outweighs the gain
_MAX_FLOP_TO_TIME = 1e8  # larger products are timed with fewer rows
_MIN_FLOP_FOR_THREADS = 2e7  # less than about half a millisecond on one core
_MAX_SHAPES = 3
_REPETITIONS = 9
_WORTHWHILE = 0.9  # required ratio of the times


class Tuning(NamedTuple):
    """Settings of torch for the CPU.

    Attributes:
        num_threads: argument of ``torch.set_num_threads``.
        float32_matmul_precision: argument of ``torch.set_float32_matmul_precision``.
        acting_precision: precision while this process acts; None for the same precision.
    """
    num_threads: int
    float32_matmul_precision: str
    acting_precision: str | None = None

    def apply(self) -> None:
        """Apply the settings to this process.

        Denormal numbers (below 1e-38) are flushed to 0: the moments of Adam decay to such numbers for weights without
        gradients, and arithmetic with denormal numbers is several times slower.
        """
        torch.set_flush_denormal(True)
        _keep_freed_memory()
        torch.set_num_threads(self.num_threads)
        torch.set_float32_matmul_precision(self.float32_matmul_precision)
        context.set_acting_precision(self.acting_precision)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)


def _keep_freed_memory() -> None:
    """Make glibc keep up to 256 MB of freed memory for the next update, which needs as much memory as the last.

    By default glibc may return the memory of network outputs to the system and request new pages, which the system
    fills with zeros: creating a batch of float32 images then takes three times as long. Other C libraries are not
    affected; glibc before 2.35 allows at most 32 MB for a single tensor.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**28) or mallopt(_M_MMAP_THRESHOLD, 2**25)
        mallopt(_M_TRIM_THRESHOLD, 2**28)


class Work(NamedTuple):
    """Batch sizes of each layer.

    Attributes:
        update_rows: number of rows in an update.
        acting_rows: number of rows in a step of the environments; 0 without environments.
    """
    update_rows: int
    acting_rows: int = 0


def choose(algorithm: nn.Module, config: Any, work: Work) -> Tuning:
    """Choose the settings for the networks of ``algorithm``, log the reasons, and apply the settings.

    Args:
        algorithm: module that contains the networks.
        config: ``TrainerConfig``; its ``num_threads`` and ``float32_matmul_precision`` are used if not None.
        work: batch sizes.
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
            why_precision += f', acting in precision {acting!r} ({why_acting})'
    logger.info('number of torch threads: %d (%s), float32 matmul precision: %r (%s)', threads, why_threads,
                precision, why_precision)
    tuning = Tuning(threads, precision, acting)
    tuning.apply()
    return tuning


def choose_again(tuning: Tuning, config: Any) -> Tuning:
    """Apply the settings that a run chose earlier, unless its ``TrainerConfig`` overrides them.

    There are never more threads than cores: threads that share a core wait for one another, which can take 20 times as
    long.
    """
    tuning = tuning._replace(num_threads=config.num_threads or min(tuning.num_threads, num_cores()))
    if config.float32_matmul_precision is not None:
        tuning = Tuning(tuning.num_threads, config.float32_matmul_precision)
    tuning.apply()
    return tuning


def _product_shapes(algorithm: nn.Module) -> list[tuple[int, int]]:
    """Return the shapes ``(out, in)`` of the linear layers, the largest first."""
    weights = [p for name, p in algorithm.named_parameters() if name.endswith('weight') and p.ndim in (2, 3)]
    shapes = {(w.shape[-2] * (w.shape[0] if w.ndim == 3 else 1), w.shape[-1]) for w in weights}
    return sorted(shapes, key=lambda shape: -shape[0] * shape[1])


def _choose_threads(algorithm: nn.Module, shapes: list[tuple[int, int]], batch_size: int) -> tuple[int, str]:
    available = torch.get_num_threads()  # limited by the number of cores and OMP_NUM_THREADS
    if any(p.ndim >= 4 for p in algorithm.parameters()):
        return available, 'convolutions'
    flop = max((2.0 * batch_size * rows * columns for rows, columns in shapes), default=0.0)
    threads = 1 if flop < _MIN_FLOP_FOR_THREADS else available
    return threads, f'its largest product is {flop / 1e6:.3g} MFLOP'


def _choose_precision(algorithm: nn.Module, shapes: list[tuple[int, int]], batch_size: int,
                      is_worth_timing: bool = False) -> tuple[str, str]:
    """Choose the precision of products with ``batch_size`` rows; return it with the reason.

    Small products are only timed if ``is_worth_timing``.
    """
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
        if not _is_float32_error(error, columns):
            return 'highest', (f"'medium' is not float32: its error at {batch_size}x{columns}x{rows} is {error:.1e}, "
                               f"the error of 'highest' is {outcome['highest'][1]:.1e}")
        for precision, (duration, _) in outcome.items():
            seconds[precision] += duration
    faster = seconds['medium'] < _WORTHWHILE * seconds['highest']
    return ('medium' if faster else 'highest', f"the products take {seconds['highest'] * 1e6:.2g} us in 'highest', "
            f"{seconds['medium'] * 1e6:.2g} us in 'medium', both in float32")


def _is_float32_error(error: float, columns: int) -> bool:
    """Return whether a root mean square error is consistent with float32 products of standard normal numbers.

    With n ``columns``, a partial sum of k products is about sqrt(k), and its rounding error is about 0.2 eps sqrt(k).
    Adding the products one after the other has an error of about 0.15 eps n, and other orders have less. Rounding the
    factors to TF32 has an error of about 2,500 eps sqrt(n), and to bfloat16 eight times as much. The limit eps n
    therefore admits float32 with any order of summation, and with up to ten thousand columns it is at most 1/25 of the
    error of lower precisions.
    """
    return error <= torch.finfo(torch.float32).eps * columns


def _try(rows: int, columns: int, batch_size: int) -> dict[str, tuple[float, float]]:
    """Return the shortest time in seconds and the root mean square error of a product in each precision.

    The factors are standard normal numbers. The precisions alternate and the shortest time counts, because other
    processes on the machine can only slow down single products, and a restarted run should make the same choice.
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
