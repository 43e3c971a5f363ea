"""Data-parallel training: several processes train as one, each with its share of the environments and of every batch.

The processes, *ranks* 0 to N - 1, hold the same parameters. Each computes the gradients of its share of a batch; the
gradients are averaged, and all ranks make the same optimizer step. N ranks therefore do what a single process does with
the whole batch. ``torchrun`` or ``bin/train.py --num_processes`` starts the processes, which communicate through
``torch.distributed``: gloo on the CPU, NCCL between GPUs. All ranks have to make the same collective calls in the same
order.

The other ranks notice a dead rank at the next collective, because its connections are closed or its process id is gone.
They wait for a slow rank without a time limit.
"""
import datetime
import importlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alfx import context, gin_utils
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.gin_utils.value_checks import problem_at
from alfx.utils.processes import GRACE_SECONDS, LIVENESS_CHECK_SECONDS, LostProcessError, ending_with_parent, is_running

_JOIN = datetime.timedelta(minutes=10)
_FOREVER = datetime.timedelta(days=7)
_LIVENESS_CHECK = datetime.timedelta(seconds=LIVENESS_CHECK_SECONDS)
PREFIX = 'alfx'  # prefix of the keys in the store
_FAILED, _FOLLOWED = 'failed', 'followed'  # ended with its own error, or because another rank was lost


class _Peer(NamedTuple):
    """Process id and host of a rank."""

    pid: int
    host: str


class _Report(NamedTuple):
    """Report of a rank before it ended: ``_FAILED`` or ``_FOLLOWED``, and its error message."""

    kind: str
    message: str


class Ranks:
    """The processes that train together, seen from one of them.

    Args:
        rank: rank of this process.
        size: number N of processes.
        store: store of ``torch.distributed`` that all processes can reach.
        device: device of the networks.
    """

    def __init__(self, rank: int, size: int, store: Any, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self._store = store
        self._averagers: dict[tuple[int, ...], GradientAverager] = {}
        self._peers: list[_Peer] = []
        self._mean = _mean_op()

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, the only rank that writes files and evaluates."""
        return self.rank == 0

    def barrier(self) -> None:
        """Publish the location of this rank, and wait for the locations of all others."""
        self._store.set(f'peer/{self.rank}', json.dumps([os.getpid(), socket.gethostname()]))
        self._peers = [_Peer(*json.loads(self._store.get(f'peer/{r}'))) for r in range(self.size)]

    # Shares ----------------------------------------------------------------------------------------------------

    def share(self, owner: str, field: str, count: int) -> int:
        """Return each rank's share of ``count``, a setting of the conf.

        Raises:
            ConfError: it cannot be divided evenly.
        """
        return share(owner, field, count, self.size)

    def own_rows(self, tensor: Tensor) -> Tensor:
        """Return the part of ``tensor`` ``[n, ...]`` that belongs to this rank; empty if there are too few rows."""
        return tensor.tensor_split(self.size)[self.rank]

    # Exchanges -------------------------------------------------------------------------------------------------

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean over all ranks of a tensor that has the same shape in all of them; without gradient."""
        return self._mean(tensor.detach())

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` with its sum over all ranks.

        Raises:
            LostProcessError: a rank has ended.
        """
        import torch.distributed as dist
        self._exchange(lambda: dist.all_reduce(tensor, async_op=True))

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have the same shape, as ``[N, ...]``."""
        gathered = tensor.new_zeros((self.size, *tensor.shape))
        gathered[self.rank] = tensor.detach()
        self.all_reduce(gathered)
        return gathered

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Return the objects of all ranks in order on rank 0, and ``None`` on the others. Objects are pickled."""
        import torch.distributed as dist
        gathered: list[Any] | None = [None] * self.size if self.is_first else None
        self._attempt(lambda: dist.gather_object(value, gathered, dst=0))
        return gathered

    def broadcast_from_rank0(self, value: Any) -> Any:
        """Return the object of rank 0. It is pickled."""
        import torch.distributed as dist
        box = [value if self.is_first else None]
        self._attempt(lambda: dist.broadcast_object_list(box, src=0))
        return box[0]

    def same_random_numbers(self) -> None:
        """Give the random number generators of torch on all ranks the state that they have on rank 0."""
        on_device = self.device.type == 'cuda'
        states = self.broadcast_from_rank0((torch.get_rng_state(), torch.cuda.get_rng_state() if on_device else None))
        torch.set_rng_state(states[0])
        if on_device:
            torch.cuda.set_rng_state(states[1])

    @torch.no_grad()
    def copy_from_rank0(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values of ``tensors``, which have the same shapes on all ranks, from rank 0."""
        values = self.broadcast_from_rank0([tensor.detach().cpu() for tensor in tensors] if self.is_first else None)
        if not self.is_first:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    def average_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Average the gradients of ``params``, the same parameters on all ranks; see :class:`GradientAverager`."""
        key = tuple(map(id, params))
        if key not in self._averagers:
            self._averagers[key] = GradientAverager(self, params)
        self._averagers[key].average()

    def _exchange(self, start: Callable[[], Any]) -> None:
        """Start a collective and wait until it is done; signals are handled meanwhile."""
        work = self._attempt(start)
        if self.device.type != 'cpu':
            return self._wait_for_device(work)
        while True:
            try:
                work.wait(_LIVENESS_CHECK)
                return None
            except RuntimeError:
                if work.is_completed():  # it may have succeeded just after the timeout
                    return self._attempt(work.wait)
            self._check_peers()

    def _wait_for_device(self, work: Any) -> None:
        """Wait for NCCL, which does not notice dead ranks, and check the other ranks meanwhile."""
        check_at = time.monotonic() + LIVENESS_CHECK_SECONDS
        while not work.is_completed():
            if time.monotonic() > check_at:
                self._check_peers()
                check_at = time.monotonic() + LIVENESS_CHECK_SECONDS
            time.sleep(0)
        self._attempt(work.wait)

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise self._lost_process_error(error) from error

    # Lost ranks ------------------------------------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Tell the other ranks why this one is about to end."""
        kind = _FOLLOWED if isinstance(error, LostProcessError) else _FAILED
        message = f'{type(error).__name__}: {gin_utils.plain_text(error)}'
        self._query_store(lambda: self._store.set(f'report/{self.rank}', json.dumps([kind, message])))

    def survivors(self) -> list[int]:
        """Return the ranks that have neither ended nor failed with their own error; always includes this rank."""
        lost = self._lost()
        return [r for r in range(self.size) if r == self.rank or r not in lost]

    def _lost(self) -> dict[int, _Report | None]:
        """Return the ranks that have ended or failed, with their reports."""
        lost = {}
        for r, peer in enumerate(self._peers):
            if r == self.rank:
                continue
            report, is_here = self._report_of(r), peer.host == socket.gethostname()
            if is_here and not is_running(peer.pid) or (report is not None and report.kind == _FAILED):
                lost[r] = report
        return lost

    def _report_of(self, rank: int) -> _Report | None:
        found = self._read_store(f'report/{rank}')
        return None if found is None else _Report(*json.loads(found))

    @staticmethod
    def _query_store(question: Callable[[], Any]) -> Any:
        """Return the result of a query of the store; ``None`` if the store is gone as well."""
        try:
            return question()
        except RuntimeError:
            return None

    def _check_peers(self) -> None:
        """Check the other ranks.

        Raises:
            LostProcessError: a rank has ended.
        """
        if self._lost():
            raise self._lost_process_error(None)

    def _lost_process_error(self, error: RuntimeError | None) -> LostProcessError:
        """Return the error that names the lost rank after a collective has failed."""
        until = time.monotonic() + GRACE_SECONDS
        while not (lost := self._lost()) and time.monotonic() < until:
            time.sleep(0.05)
        if self.device.type != 'cpu':
            _give_up_device()
        causes = [r for r, report in lost.items() if report is None or report.kind == _FAILED]
        if not causes:
            return LostProcessError('another rank', 'no longer answers', str(error or ''))
        rank = causes[0]
        report, name = lost[rank], f'rank {rank} (pid {self._peers[rank].pid} on {self._peers[rank].host})'
        if report is not None:
            return LostProcessError(name, 'ended with an error', report.message)
        ending = self._exit_of(rank)
        return LostProcessError(name, ending or 'ended without an error message; most likely killed, often for lack of '
                                'memory')

    def _exit_of(self, rank: int) -> str | None:
        """Return how a rank ended, if the program that started it reports this."""
        until = time.monotonic() + LIVENESS_CHECK_SECONDS
        while time.monotonic() < until:
            found = self._read_store(ending_key(rank))
            if found is not None:
                return found.decode()
            time.sleep(0.05)
        return None

    def _read_store(self, key: str) -> bytes | None:
        """Return a value of the store; ``None`` if there is none."""
        return self._query_store(lambda: self._store.get(key) if self._store.check([key]) else None)


def share(owner: str, field: str, count: int, size: int) -> int:
    """Return the share of ``count``, a setting of the conf, that each of ``size`` ranks gets.

    Raises:
        ConfError: it cannot be divided evenly.
    """
    if count % size:
        raise gin_utils.ConfError([problem_at(
            owner, field, f'= {count} cannot be divided among {size} processes',
            f'make it a multiple of {size}, or change the number of processes')])
    return count // size


def ending_key(rank: int) -> str:
    """Return the key under which the program that started the ranks stores how one has ended."""
    return f'ending/{rank}'


class GradientAverager:
    """Averages the gradients of parameters over all ranks, with one collective per device and dtype.

    The gradient of a parameter that a rank did not use counts as zero. A parameter that no rank used gets no gradient,
    as in a single process.

    Args:
        ranks: the processes.
        params: the parameters, in the same order on all ranks.
    """

    def __init__(self, ranks: Ranks, params: Sequence[nn.Parameter]):
        self._ranks, self._params = ranks, list(dict.fromkeys(params))  # two optimizers may share one
        kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {(ranks.device, torch.float32): []}
        for param in self._params:
            kinds.setdefault((param.device, param.dtype), []).append(param)
        notes = len(self._params) + ranks.size
        self._flat = [torch.zeros(sum(p.numel() for p in group) + (0 if i else notes), dtype=dtype, device=device)
                      for i, ((device, dtype), group) in enumerate(kinds.items())]
        self._notes = self._flat[0][self._flat[0].numel() - notes:]
        self._is_used, self._is_bad = self._notes[:len(self._params)], self._notes[len(self._params):]
        views: dict[int, Tensor] = {}
        for flat, group in zip(self._flat, kinds.values()):
            start = 0
            for param in group:
                views[id(param)] = flat[start:start + param.numel()].view(param.shape)
                start += param.numel()
        self._views = [views[id(p)] for p in self._params]

    @torch.no_grad()
    def average(self) -> None:
        """Replace the gradients with their mean over the ranks.

        Raises:
            NonFiniteLossError: the loss of another rank is not finite; no parameter has been changed.
            LostProcessError: a rank has ended; no parameter has been changed.
        """
        grads: list[Any] = [param.grad for param in self._params]
        used = [grad is not None for grad in grads]
        self._is_bad.zero_()
        if used and all(used):
            torch._foreach_copy_(self._views, grads)
            self._is_used.fill_(1.0)
        else:
            for view, grad in zip(self._views, grads):
                view.zero_() if grad is None else view.copy_(grad)
            self._is_used.copy_(torch.tensor(used, dtype=torch.float32))
        self._exchange()
        somewhere = used if all(used) else (self._is_used > 0).tolist()
        for param, view, is_used in zip(self._params, self._views, somewhere):
            param.grad = view if is_used else None

    def report_bad_loss(self) -> None:
        """Take part in :meth:`average` of the other ranks with a loss that is not finite, so that all of them stop.

        Raises:
            LostProcessError: a rank has ended.
        """
        for flat in self._flat:
            flat.zero_()
        self._is_bad[self._ranks.rank] = 1.0
        self._exchange(is_good=False)

    def _exchange(self, is_good: bool = True) -> None:
        for flat in self._flat:
            self._ranks.all_reduce(flat)
        bad = self._is_bad.nonzero().flatten().tolist()
        if bad and is_good:
            raise NonFiniteLossError(f'the loss is NaN or infinite on rank {", ".join(map(str, bad))}, at update '
                                     f'{context.get_global_counter()}; the log of that rank names the part. The '
                                     'parameters have not been changed by this update')
        for flat in self._flat:
            flat.div_(self._ranks.size)


def average_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Average the gradients of the parameters of ``optimizer`` over the processes that train together, if there are
    several.

    Only for an optimizer step that an algorithm makes itself; every other update includes this.
    """
    ranks = context.get_ranks()
    if ranks is not None:
        ranks.average_gradients([param for group in optimizer.param_groups for param in group['params']])


# Joining and leaving -------------------------------------------------------------------------------------------


def local_rank() -> int:
    """Return the index of this process on its machine, which is also the index of its GPU."""
    return int(os.environ.get('LOCAL_RANK', os.environ.get('RANK', '0')))


def join(device: torch.device) -> Ranks:
    """Join the process group that ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` describe; wait for
    all its processes.

    Afterwards ``context.get_ranks()`` returns the same object.

    Args:
        device: device of the networks.

    Raises:
        RuntimeError: environment variables are missing, or not all ranks join within ten minutes.
    """
    import torch.distributed as dist
    missing = [name for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT') if name not in os.environ]
    if missing:
        raise RuntimeError(f'environment variables not set: {", ".join(missing)}; start several processes with '
                           'torchrun --nproc_per_node=N -m alfx.bin.train, or with alfx train --num_processes N')
    rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    with ending_with_parent():  # the store may end with it, and this would wait until the timeout
        store, _, _ = next(dist.rendezvous('env://', rank, size, timeout=_JOIN))
    store.set_timeout(_JOIN)
    restarts = os.environ.get('TORCHELASTIC_RESTART_COUNT', '')  # torchrun keeps its store when it restarts
    store = dist.PrefixStore('/'.join(filter(None, (PREFIX, restarts))), store)
    ranks = Ranks(rank, size, store, device)
    ranks.barrier()
    if device.type != 'cpu':
        torch.cuda.set_device(device)
    importlib.import_module('torch.distributed.nn')  # imported later, its default arguments would keep the group alive
    dist.init_process_group('gloo' if device.type == 'cpu' else 'cpu:gloo,cuda:nccl', store=store, rank=rank,
                            world_size=size, timeout=_FOREVER)
    ranks.all_reduce(torch.zeros(1, device=device))  # opens all connections
    context.set_ranks(ranks)
    return ranks


def leave() -> None:
    """Leave the process group; do nothing in a single process."""
    import torch.distributed as dist
    context.set_ranks(None)
    if dist.is_available() and dist.is_initialized():
        # The threads of the group need the GIL to release their last tensors, and the end of the group waits for them.
        # They get the GIL if Python releases the group last; torch 2.6 would end it earlier and wait forever.
        backend = dist.group.WORLD._get_backend(torch.device('cpu'))  # type: ignore[union-attr]
        dist.destroy_process_group()
        del backend


def _give_up_device() -> None:
    """Abort collectives between GPUs that will never end."""
    import torch.distributed as dist
    abort = getattr(dist.distributed_c10d, '_abort_process_group', None)
    if abort is not None and dist.is_initialized():
        abort()


def _mean_op() -> Callable[[Tensor], Tensor]:
    """Return the mean over ranks as an operation of torch, which traced graphs can contain."""
    global _op
    if _op is None:
        name, library = 'mean_over_ranks', torch.library.Library('alfx', 'FRAGMENT')
        library.define(f'{name}(Tensor tensor) -> Tensor', tags=(torch.Tag.pt2_compliant_tag, ))
        library.impl(name, _mean_over_ranks, 'CompositeExplicitAutograd')
        torch.library.register_fake(f'alfx::{name}', torch.empty_like, lib=library)
        _op = library, getattr(torch.ops.alfx, name)  # the operation exists as long as its library
    return _op[1]


def _mean_over_ranks(tensor: Tensor) -> Tensor:
    ranks, total = context.get_ranks(), tensor.clone()
    ranks.all_reduce(total)
    return total.div_(ranks.size)


_op: Any = None
