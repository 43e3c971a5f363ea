"""Registration of distributions as nodes of a nest."""
from collections.abc import Callable
from typing import Any

import optree
from torch.distributions import Distribution


def is_distribution(value: Any) -> bool:
    """Return whether ``value`` is a distribution; usable as the predicate ``is_leaf``."""
    return isinstance(value, Distribution)


def register_distribution(cls: type[Distribution], get_params: Callable[[Any], tuple[tuple[Any, ...], Any]],
                          rebuild: Callable[[tuple[Any, ...], Any], Any]) -> None:
    """Register distributions of class ``cls`` as nodes of a nest.

    Args:
        cls: the exact class; subclasses have to be registered separately.
        get_params: ``get_params(dist)`` returns ``(parameters, static)``: a tuple of the parameters (tensors, or nested
            distributions), and the rest that is needed to rebuild it, comparable by ``==`` and hashable.
        rebuild: ``rebuild(parameters, static)`` returns the distribution without computing anything; the parameters may
            be tensors, specs or placeholders of any type.
    """
    optree.register_pytree_node(cls,  # type: ignore[arg-type]
                                lambda dist: (*get_params(dist), None),
                                lambda static, params: rebuild(tuple(params), static), namespace='alfx')
