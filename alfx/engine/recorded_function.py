"""A function of networks played from a record, as updates are: for acting, which calls a policy on a row or two.

There the layers take less time than the calls of modules and distributions around them. Results are equal to the bit,
or up to rounding if the record is compiled.
"""
import copy
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from alfx import nest
from alfx.engine.compiled_function import CompiledFunction
from alfx.engine.program import Program
from alfx.engine.recording import NotRecordableError, recorded
from alfx.tensor_specs import NestedTensor

if TYPE_CHECKING:
    from alfx.algorithms.config import TrainerConfig

logger = logging.getLogger(__name__)
_CALLS_BEFORE = 500  # recording takes as long as a thousand calls
_CALLS_BEFORE_COMPILING = 100  # who asks for compiled code trains for long; the sooner that is there the better


class RecordedFunction:
    """Plays a function, one record for each structure and layout of its input.

    Args:
        function: from a nest of tensors to a nest of tensors; the same operations at each call, of which none looks at
            the values of tensors. It may draw random numbers.
        modules: hold the parameters and buffers that it reads.
        config: of the run; with ``compile`` a record on the CPU is compiled.
    """

    def __init__(self, function: Callable[[NestedTensor], NestedTensor], *modules: nn.Module,
                 config: Optional['TrainerConfig'] = None) -> None:
        self._compiles = config is not None and config.compile
        self._function = _Function(function, modules)
        self._records: dict[Any, _Record] = {}
        self._counts: dict[Any, int] = {}
        self._is_recordable = True

    def __call__(self, inputs: NestedTensor) -> NestedTensor:
        """What the function returns for ``inputs``; where gradients are recorded, by calling it."""
        if not self._is_recordable or torch.is_grad_enabled():
            return self._function(inputs)
        key: Any
        if isinstance(inputs, Tensor):
            leaves, structure = [inputs], None
            key = inputs.shape, inputs.stride(), inputs.dtype, inputs.get_device()
        else:
            leaves, structure = nest.flatten_with_structure(inputs)
            key = structure, *[(x.shape, x.stride(), x.dtype, x.get_device()) for x in leaves]
        record = self._records.get(key)
        if record is None or not record.play.is_current:
            count = self._counts[key] = self._counts.get(key, 0) + 1
            if count <= (_CALLS_BEFORE_COMPILING if self._compiles else _CALLS_BEFORE):
                return self._function(inputs)
            try:
                record = self._records[key] = self._record(leaves, structure)
            except NotRecordableError as error:
                logger.info('%s; it acts step by step, which takes longer', error)
                self._is_recordable = False
                return self._function(inputs)
        results: Any = record.play(leaves)
        if record.copies_results:
            results = [x.clone() for x in results]
        return results[0] if record.structure is None else record.structure.unflatten(results)

    def _record(self, leaves: list[Tensor], structure: Any) -> '_Record':
        named = {name: x for name, x in (*self._function.named_parameters(), *self._function.named_buffers())}
        tensors, result_structure = list(named.values()), None

        def flat(*inputs: Tensor) -> list[Tensor]:
            nonlocal result_structure
            leaves = inputs[len(named):]
            arguments = leaves[0] if structure is None else structure.unflatten(leaves)
            result = torch.func.functional_call(self._function, dict(zip(named, inputs)), (arguments, ))
            if isinstance(result, Tensor):
                return [result]
            results, result_structure = nest.flatten_with_structure(result)
            return results

        with torch.no_grad():
            graph = recorded(flat, [*tensors, *leaves], 'a policy')
        if not self._compiles or not all(x.is_cpu for x in (*tensors, *leaves)):
            return _Record(Program(graph, tensors, leaves), result_structure, True)
        started = time.monotonic()
        try:
            play = CompiledFunction(copy.deepcopy(graph), tensors, leaves)
        except RuntimeError as error:  # what the backend raises is derived from it
            logger.warning('how to act cannot be compiled, which takes longer: %s', str(error).partition('\n')[0])
            return _Record(Program(graph, tensors, leaves), result_structure, True)
        logger.info('compiled how to act in %.0f seconds', time.monotonic() - started)
        return _Record(play, result_structure, _share_memory(play, leaves, tensors))


def _share_memory(play: CompiledFunction, leaves: list[Tensor], tensors: list[Tensor]) -> bool:
    """Whether results lie in the same memory as each other or as what they are computed from."""
    with torch.random.fork_rng():
        results: Any = play(leaves)
    given, own = ({x.untyped_storage().data_ptr() for x in of_these if x.numel()}
                  for of_these in ([*leaves, *tensors], results))
    return bool(given & own) or len(own) < sum(x.numel() > 0 for x in results)


class _Record(NamedTuple):
    play: Program | CompiledFunction
    structure: Any  # of the result; None for a single tensor
    copies_results: bool


class _Function(nn.Module):
    """The function as a module whose parameters can be exchanged for a call."""

    def __init__(self, function: Callable[[NestedTensor], NestedTensor], modules: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self._modules_read = nn.ModuleList(modules)
        self._called = function

    def forward(self, inputs: NestedTensor) -> NestedTensor:
        return self._called(inputs)
