"""What a checkpoint keeps of an algorithm, and how it is loaded: weights, buffers, optimizers, replay buffer.

The file itself is the business of :mod:`alfx.utils.checkpoint_utils`. Read next: :mod:`alfx.algorithms.algorithm`.
"""
import os
from typing import Any

from alfx.algorithms.algorithm_interface import AlgorithmInterface
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import ConfError
from alfx.gin_utils.checks import problem_at
from alfx.utils.checkpoint_utils import CheckpointError, extract_sub_state_dict_from_checkpoint


class CheckpointedAlgorithm(AlgorithmInterface):
    """An algorithm whose optimizers are part of its ``state_dict``.

    Args:
        checkpoint: see :class:`alfx.algorithms.algorithm.Algorithm`.
    """

    def __init__(self, checkpoint: str | None = None):
        super().__init__()
        self._name = type(self).__name__
        self._checkpoint = checkpoint
        self._pre_loaded = False
        self._replay_buffer: ReplayBuffer | None = None

    def optimizers(self, recurse: bool = True, include_ignored_attributes: bool = False) -> list[Any]:
        """The optimizers of this algorithm."""
        raise NotImplementedError(f'{type(self).__name__}.optimizers')

    @property
    def pre_loaded(self) -> bool:
        """Whether the ``checkpoint`` argument has been loaded into this algorithm."""
        return self._pre_loaded

    def preload_checkpoints(self) -> None:
        """Load what the ``checkpoint`` arguments of this algorithm and its parts name, once.

        Raises:
            ConfError: there is no such checkpoint, or it cannot be used.
        """
        for part in self.modules():
            if isinstance(part, CheckpointedAlgorithm) and part._checkpoint and not part._pre_loaded:
                prefix, path = _prefix_and_path(part._checkpoint)
                try:
                    state = extract_sub_state_dict_from_checkpoint(prefix or 'alg', path)
                except CheckpointError as error:
                    problems = [problem_at(cls.__name__, 'checkpoint', f'= {part._checkpoint!r}: {error}')
                                for cls in type(part).__mro__]  # a conf may bind it for any of them
                    raise ConfError([next((p for p in problems if p.location), problems[0])]) from error
                part.load_state_dict(state)
                part._pre_loaded = True

    def get_extra_state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides parameters and buffers: the states of this algorithm's own optimizers."""
        extra: dict[str, Any] = {'optimizers': [o.state_dict() for o in self.optimizers(recurse=False)]}
        replay = {} if self._replay_buffer is None else self._replay_buffer.state_dict()
        if replay:
            extra['replay_buffer'] = replay
        return extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`get_extra_state`.

        Raises:
            ValueError: the number of optimizers differs.
        """
        mine = self.optimizers(recurse=False)
        if len(mine) != len(state['optimizers']):
            raise ValueError(f'{self._name} has {len(mine)} optimizers of its own, the checkpoint has '
                             f"{len(state['optimizers'])}; it belongs to another configuration")
        for optimizer, saved in zip(mine, state['optimizers']):
            optimizer.load_state_dict(saved)
        if self._replay_buffer is not None and 'replay_buffer' in state:
            self._replay_buffer.load_state_dict(state['replay_buffer'])

    def state_dict(self, destination: Any = None, prefix: str = '', visited: Any = None,  # type: ignore[override]
                   keep_vars: bool = False) -> dict[str, Any]:
        """Parameters, buffers and optimizer states of this algorithm and its parts.

        Args:
            destination: dict to add to.
            prefix: put before the keys.
            visited: ids of modules to leave out, as they are stored elsewhere.
            keep_vars: keep the gradient history of parameters.
        """
        if visited and id(self) in visited:
            return {} if destination is None else destination
        return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True,  # type: ignore[override]
                        skip_preloded: bool = True, assign: bool = False) -> Any:
        """Load what :meth:`state_dict` returned.

        Args:
            state_dict: parameters, buffers and optimizer states.
            strict: keys that are missing or too many are an error that names them.
            skip_preloded: leave alone the parts whose ``checkpoint`` argument has been loaded.
            assign: put the tensors themselves in place of copying their values.

        Returns:
            ``missing_keys`` and ``unexpected_keys``.
        """
        if skip_preloded:
            for prefix, module in self.named_modules(prefix=''):
                if isinstance(module, CheckpointedAlgorithm) and module._pre_loaded:
                    prefix = f'{prefix}.' if prefix else ''
                    others = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
                    state_dict = {**others, **module.state_dict(prefix=prefix)}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _prefix_and_path(checkpoint: str) -> tuple[str, str]:
    """``'prefix@path'`` in two; a path may itself contain ``@``, a prefix cannot."""
    prefix, at, path = checkpoint.partition('@')
    return (prefix, path) if at and not os.path.exists(checkpoint) else ('', checkpoint)
