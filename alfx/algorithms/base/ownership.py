"""Ownership of parameters by optimizers.

Each algorithm may have a default optimizer, and optimizers for particular modules or parameters
(``Algorithm.add_optimizer``). Ownership is decided once, bottom up: parameters that a part's own optimizers do not own
are passed to its parent. At the root a trainable parameter without an owner raises an error that names it.
"""
from collections.abc import Iterator
from typing import Any, Protocol

from torch import nn


class Owner(Protocol):
    """Interface of an algorithm that owns optimizers; see :class:`~alfx.algorithms.algorithm.Algorithm`."""

    _parameters: Any
    _modules: Any

    @property
    def name(self) -> str: ...

    @property
    def default_optimizer(self) -> Any: ...

    @property
    def explicit_optimizers(self) -> list[tuple[Any, list[Any]]]: ...

    @property
    def force_params_visible_to_parent(self) -> bool: ...

    def _trainable_attributes_to_ignore(self) -> list[str]: ...

    def named_parameters(self) -> Any: ...

    def children(self) -> Any: ...

    def optimizers(self, recurse: bool = True, include_ignored_attributes: bool = False) -> list[Any]: ...


class OwnershipError(ValueError):
    """Error for a parameter that has no optimizer, or more than one."""


def assign_optimizers(root: Owner) -> None:
    """Assign every trainable parameter below ``root`` to exactly one optimizer.

    Raises:
        OwnershipError: names the parameters that have no optimizer or several.
    """
    _check_no_hidden_algorithm(root)
    owners = _Owners({id(p): name for name, p in root.named_parameters()})
    orphans = owners.without_owner(_assign(root, owners))
    if orphans:
        names = [name for name, p in root.named_parameters() if any(p is orphan for orphan in orphans)]
        raise OwnershipError(
            f'no optimizer owns the trainable parameters {names}; give {type(root).__name__} or one of its parts an '
            f'optimizer (e.g. {type(root).__name__}.optimizer = @Adam()), or set requires_grad=False on those that are '
            'not to be trained')


class _Owners:
    """Parameters that already have an optimizer; ``shared`` parameters may get another one from a parent."""

    def __init__(self, names: dict[int, str]):
        self._names = names
        self._owned: set[int] = set()
        self.shared: set[int] = set()

    def give(self, algorithm: Owner, optimizer: Any, parameters: list[nn.Parameter]) -> None:
        """Assign ``parameters`` to ``optimizer``, which belongs to ``algorithm``."""
        if isinstance(optimizer, type):
            raise OwnershipError(f'{algorithm.name}: expected an optimizer, found the class {optimizer.__name__}; '
                                 f'create one: {optimizer.__name__}()')
        twice = [self._names.get(id(p), '?') for p in parameters if id(p) in self._owned - self.shared]
        if twice:
            raise OwnershipError(f'the parameters {twice} are owned by two optimizers, the second one in '
                                 f'{algorithm.name}')
        self._owned.update(id(p) for p in parameters)
        held = {id(p) for group in optimizer.param_groups for p in group['params']}
        optimizer.add_param_group({'params': [p for p in parameters if id(p) not in held]})

    def without_owner(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Return the ``parameters`` that no optimizer owns."""
        return [p for p in parameters if id(p) not in self._owned]


def _assign(algorithm: Owner, owners: _Owners) -> list[nn.Parameter]:
    """Assign parameters within ``algorithm``; return the trainable parameters that are left to its parent."""
    left: list[nn.Parameter] = []
    for part in trainable_parts(algorithm):
        if not _is_algorithm(part):
            left += parameters_of(part)
            continue
        left += _assign(part, owners)  # type: ignore[arg-type]
        if part.force_params_visible_to_parent:  # type: ignore[union-attr]
            forced = parameters_of(part)
            owners.shared.update(id(p) for p in forced)
            left += forced
    left = list({id(p): p for p in left}.values())
    for optimizer, modules_and_params in algorithm.explicit_optimizers:
        claimed = list({id(p): p for item in modules_and_params for p in parameters_of(item)}.values())
        owners.give(algorithm, optimizer, claimed)
        taken = {id(p) for p in claimed}
        left = [p for p in left if id(p) not in taken]
    if algorithm.default_optimizer is not None:
        # If two parts share a module, one of them may have assigned it to its own optimizer already.
        free = {id(p) for p in owners.without_owner(left)}
        left = [p for p in left if id(p) in free or id(p) in owners.shared]
        if left:
            owners.give(algorithm, algorithm.default_optimizer, left)
        left = []
    return left


def trainable_parts(algorithm: Owner) -> Iterator[nn.Module | nn.Parameter]:
    """Yield direct children and parameters of ``algorithm``, without the attributes it ignores."""
    ignored = set(algorithm._trainable_attributes_to_ignore())
    for name, parameter in algorithm._parameters.items():
        if name not in ignored and parameter is not None:
            yield parameter
    for name, module in algorithm._modules.items():
        if name not in ignored and module is not None:
            yield from _unpacked(module)


def _unpacked(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of a ``ModuleList`` or ``ModuleDict`` (which may be algorithms), or the module itself."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _unpacked(child)
    else:
        yield module


def parameters_of(item: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    """Return the trainable parameters of a module, without attributes that an algorithm ignores; or the parameter
    itself."""
    if not isinstance(item, nn.Module):
        return [item] if item.requires_grad else []
    if _is_algorithm(item):
        parameters = [p for part in trainable_parts(item) for p in parameters_of(part)]  # type: ignore[arg-type]
    else:
        parameters = [p for p in item.parameters() if p.requires_grad]
    return list({id(p): p for p in parameters}.values())


def _is_algorithm(module: Any) -> bool:
    return hasattr(module, 'explicit_optimizers')


def _check_no_hidden_algorithm(root: Any) -> None:
    """Raise ``OwnershipError`` for an algorithm inside a plain module, whose optimizers would be ignored."""
    def visit(module: nn.Module, path: str, inside_plain: bool) -> None:
        if _is_algorithm(module) and inside_plain:
            raise OwnershipError(f"the algorithm at '{path}' is part of a module that is not an algorithm, so its "
                                 'optimizers would be ignored; make it an attribute of an algorithm')
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        inside = inside_plain if is_container else not _is_algorithm(module)
        for name, child in module.named_children():
            visit(child, f'{path}.{name}' if path else name, inside)

    visit(root, '', False)


def algorithms_in(part: Any) -> list[Any]:
    """Return the outermost algorithms in a module; the module itself if it is one."""
    if _is_algorithm(part):
        return [part]
    return [a for child in part.children() for a in algorithms_in(child)] if isinstance(part, nn.Module) else []


def optimizers_of(algorithm: Owner, recurse: bool, include_ignored_attributes: bool) -> list[Any]:
    """Return the optimizers of ``algorithm``, its own first; see ``Algorithm.optimizers``."""
    own = [optimizer for optimizer, _ in algorithm.explicit_optimizers]
    if algorithm.default_optimizer is not None:
        own.append(algorithm.default_optimizer)
    if recurse:
        for part in algorithm.children() if include_ignored_attributes else trainable_parts(algorithm):
            for child in algorithms_in(part):
                own += child.optimizers(True, include_ignored_attributes)
    return list({id(optimizer): optimizer for optimizer in own}.values())


def describe_owners(algorithm: Owner) -> list[dict[str, Any]]:
    """Return one entry per optimizer with its settings and the names of its parameters; the last entry lists the
    parameters without an optimizer."""
    names = {id(p): name for name, p in algorithm.named_parameters()}
    owned: set[int] = set()
    entries = []
    for optimizer in algorithm.optimizers(include_ignored_attributes=True):
        ids = [id(p) for group in optimizer.param_groups for p in group['params']]
        owned.update(ids)
        entries.append({'optimizer': getattr(optimizer, 'name', type(optimizer).__name__),
                        'hypers': {k: v for k, v in optimizer.defaults.items() if isinstance(v, (int, float))},
                        'parameters': sorted(names[i] for i in ids if i in names)})
    entries.append({'optimizer': 'None', 'parameters': sorted(n for i, n in names.items() if i not in owned)})
    return entries
