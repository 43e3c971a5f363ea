"""The optimizers of an algorithm, and what they own. Read next: :mod:`alfx.algorithms.base.ownership`."""
import json
from typing import Any

from torch import nn

from alfx.algorithms.base.checkpointing import CheckpointedAlgorithm
from alfx.algorithms.base.ownership import describe_owners, optimizers_of


class OptimizedAlgorithm(CheckpointedAlgorithm):
    """An algorithm with a default optimizer, and others for parts of it.

    Args:
        checkpoint: see :class:`alfx.algorithms.algorithm.Algorithm`.
        optimizer: default optimizer.
    """

    def __init__(self, checkpoint: str | None = None, optimizer: Any = None):
        super().__init__(checkpoint)
        self._default_optimizer = optimizer
        self._explicit_optimizers: list[tuple[Any, list[Any]]] = []
        self._force_params_visible_to_parent = False
        self._updated: tuple[list[Any], list[tuple[str, nn.Parameter]]] | None = None

    @property
    def default_optimizer(self) -> Any:
        """The default optimizer, or ``None``."""
        return self._default_optimizer

    @property
    def explicit_optimizers(self) -> list[tuple[Any, list[Any]]]:
        """``[(optimizer, modules and parameters), ...]`` given to :meth:`add_optimizer`."""
        return self._explicit_optimizers

    @property
    def force_params_visible_to_parent(self) -> bool:
        """Whether the parent's optimizer takes this algorithm's parameters even if it has optimizers of its own."""
        return self._force_params_visible_to_parent

    @force_params_visible_to_parent.setter
    def force_params_visible_to_parent(self, flag: bool) -> None:
        self._force_params_visible_to_parent = flag

    def add_optimizer(self, optimizer: Any, modules_and_params: list[Any]) -> None:
        """Have ``optimizer`` own these modules and parameters, which are attributes of this algorithm."""
        self._explicit_optimizers.append((optimizer, list(modules_and_params)))

    def _add_given_optimizers(self, *owners: tuple[Any, Any]) -> None:
        """:meth:`add_optimizer` for each pair of an optimizer and what it owns of which neither is ``None``."""
        for optimizer, owned in owners:
            if optimizer is not None and owned is not None:
                self.add_optimizer(optimizer, [owned])

    def _trainable_attributes_to_ignore(self) -> list[str]:
        """Names of attributes whose parameters are not trained here, such as target networks."""
        return []

    def optimizers(self, recurse: bool = True, include_ignored_attributes: bool = False) -> list[Any]:
        """The optimizers of this algorithm.

        Args:
            recurse: those of its parts as well.
            include_ignored_attributes: look into attributes that are ignored for training as well.
        """
        return optimizers_of(self, recurse, include_ignored_attributes)

    def get_param_name(self, param: nn.Parameter) -> str | None:
        """The name of a parameter of this algorithm, ``None`` for any other."""
        return next((name for name, p in self.named_parameters() if p is param), None)

    def get_optimizer_info(self) -> str:
        """JSON: which optimizer owns which parameters; ``"None"`` stands for those without one."""
        return json.dumps(describe_owners(self), indent=2)

    def get_unoptimized_parameter_info(self) -> str:
        """The names of all parameters that no optimizer owns, one a line."""
        return '\n'.join(describe_owners(self)[-1]['parameters'])

    def what_is_updated(self) -> tuple[list[Any], list[tuple[str, nn.Parameter]]]:
        """All optimizers of this algorithm, and ``(name, parameter)`` of all that they own; found once."""
        if self._updated is None:
            names = {id(p): name for name, p in self.named_parameters()}
            optimizers = self.optimizers()
            self._updated = optimizers, [(names.get(id(p), '?'), p) for optimizer in optimizers
                                         for group in optimizer.param_groups for p in group['params']]
        return self._updated
