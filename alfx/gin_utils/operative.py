"""What of the conf was used: the operative configuration, and the bindings that nothing used."""

import inspect
import logging
import os
from collections import defaultdict
from collections.abc import Iterable

import gin

from . import locations, registry, static_check
from alfx.gin_utils.conf_error import ConfError, Problem, hint_nearest
from .parsing import Reference, is_shipped, iterate_nested

__all__ = ['allow_unused', 'config_str', 'mistakes_of_unused', 'operative_config_str', 'refuse_unused',
           'unused_bindings', 'warn_of_unused']

logger = logging.getLogger(__name__)
_unused_is_allowed = False
_must_be_used: frozenset[str] = frozenset()


def config_str() -> str:
    """Every binding of the loaded conf as gin text, includes and overrides resolved."""
    return gin.config_str()


def operative_config_str() -> str:
    """Every argument that the conf or a default has supplied so far, as gin text that can be loaded.

    Bindings that were not used so far follow at the end, so that the text alone is enough to go on with the
    run: what only an evaluation uses, for example, is not lost when it is written before the first one.
    """
    text = registry.named_by_path(gin.operative_config_str())
    unused = [locations.line(binding) for binding in _unused()]
    if unused:
        text += '\n# Not used so far:\n# ' + '=' * 78 + '\n' + '\n'.join(unused) + '\n'
    return text


def unused_bindings() -> list[locations.Binding]:
    """The bindings of the loaded conf that no constructor or factory has received so far.

    A binding is unused if what it names was not made, if the caller passed the argument itself, or if a binding
    in an inner scope took its place each time. A macro is unused only if no statement mentions it.

    Returns:
        In the order written; each has ``location`` (``file.gin:31``) and prints as it was written.
    """
    return [binding for binding in _unused()
            if binding.selector != 'gin.macro' or not locations.is_mentioned(binding.scope)]


def warn_of_unused(bindings: Iterable[locations.Binding]) -> None:
    """Log each of these bindings as one that nothing has used; not those of ``operative.gin``, which lists defaults.

    Of those in confs that come with alfx, which what a user overrides may well make idle, ``alfx check`` tells.
    """
    for binding in bindings:
        if os.path.basename(binding.file) != 'operative.gin' and not is_shipped(binding.file):
            logger.warning('%s: nothing has used this binding so far: %s', binding.location, binding)


def allow_unused(allowed: bool, but: Iterable[str] = ()) -> None:
    """Say whether :func:`refuse_unused` only logs what is wrong; holds until the next conf is loaded.

    Args:
        allowed: whether it does.
        but: bindings that it refuses all the same, each with the complete selector, as :func:`locations.line` begins.
    """
    global _unused_is_allowed, _must_be_used
    _unused_is_allowed, _must_be_used = allowed, frozenset(but)


def refuse_unused(bindings: Iterable[locations.Binding]) -> None:
    """End a run that has begun without using what its conf says: a misspelled scope must not cost hours.

    Args:
        bindings: those that nothing has used once the first iteration is done.

    Raises:
        ConfError: some are mistakes, :func:`mistakes_of_unused`, and the conf was not loaded with ``allow_unused``.
            Others are logged.
    """
    unused = list(bindings)
    mistakes = mistakes_of_unused(unused) if not _unused_is_allowed or _must_be_used else []
    if _unused_is_allowed:
        mistakes = [mistake for mistake in mistakes
                    if locations.line(mistake[0]).partition(' = ')[0] in _must_be_used]
    if mistakes:
        problems = [Problem(binding.location, f'nothing uses this binding: {binding}', hint)
                    for binding, hint in mistakes]
        last = problems[-1]
        how = 'correct or remove it' if len(problems) == 1 else 'correct or remove them'
        raise ConfError([*problems[:-1], last._replace(hint=f'{last.hint}\n  {how}, or train with --allow_unused')])
    warn_of_unused(unused)


def mistakes_of_unused(bindings: Iterable[locations.Binding]) -> list[tuple[locations.Binding, str]]:
    """Which of these bindings, which nothing has used, are mistakes: those of the user that nothing can use later.

    Lines of a conf that is included may well be idle because of what overrides others. Whatever is referred to and has
    not been made yet, and functions that make nothing, may be called later.

    Returns:
        The mistakes with a hint each.
    """
    keys = _operative_keys()
    made = {selector for _, selector, _ in keys}
    referred = _references()
    return [(binding, _hint_for(binding, keys))
            for binding in bindings if locations.is_by_user(binding)
            and not (binding.selector not in made and _may_come_later(binding, referred))]


def _references() -> dict[tuple[str, str], list[set[str]]]:
    """What the conf refers to: by complete selector and one of its scopes ('' is in all), the scopes of each."""
    found: dict[tuple[str, str], list[set[str]]] = defaultdict(list)
    for binding in locations.bindings():
        for leaf in iterate_nested(binding.value):
            if isinstance(leaf, Reference):
                selector = static_check.resolve(leaf.selector).selector
                for scope in {'', *leaf.scopes}:
                    found[selector, scope].append(set(leaf.scopes))
    return found


def _may_come_later(binding: locations.Binding, referred: dict[tuple[str, str], list[set[str]]]) -> bool:
    if binding.selector == 'gin.macro':
        return False
    target = static_check.resolve(binding.selector).wrapped
    if not inspect.isclass(target) and registry.annotation_of(target, 'return') is type(None):
        return True
    scopes = binding.scope.split('/') if binding.scope else ['']
    return any({*scopes} - {''} <= others for others in referred.get((binding.selector, scopes[0]), ()))


def _hint_for(binding: locations.Binding, keys: list[tuple[str, str, str]]) -> str:
    """The nearest that was used: in which scopes the class was made, or the class with the nearest name."""
    if binding.selector == 'gin.macro':
        return 'no statement mentions this macro'
    name = binding.selector.rsplit('.', 1)[-1]
    scopes = {scope for scope, selector, _ in keys if selector == binding.selector}
    own = binding.scope or ''
    if scopes and not any(f'{scope}/'.startswith(f'{own}/') or not own for scope in scopes):
        nearest = hint_nearest(f'{own}/{name}', sorted(f'{scope}/{name}' if scope else name for scope in scopes), 0.0)
        return f'{name} is not made in the scope {own!r}: {nearest}'
    if scopes:
        return f'whatever makes {name} sets {binding.name} itself, or an inner scope does'
    others = sorted({selector.rsplit('.', 1)[-1] for _, selector, _ in keys if selector != 'gin.macro'})
    return f'nothing makes {name}' + (f': {nearest}' if (nearest := hint_nearest(name, others, 0.6)) else '')


def _unused() -> list[locations.Binding]:
    used = set()
    for scope, selector, name in _operative_keys():
        binding = locations.bindings_in_effect(selector, scope.split('/') if scope else ()).get(name)
        if binding is not None:
            used.add(binding.key)
    return [binding for binding in locations.bindings() if binding.key not in used]


def _operative_keys() -> list[tuple[str, str, str]]:
    """Scope, complete selector and name of every argument that the conf or a default has supplied so far.

    From where gin keeps them: to have them written as text, and to read it, takes a tenth of a second for a usual conf.
    """
    with gin.config._OPERATIVE_CONFIG_LOCK:
        return [(scope, selector, name) for (scope, selector), arguments in gin.config._OPERATIVE_CONFIG.items()
                for name in arguments]
