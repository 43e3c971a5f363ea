"""Used and unused parts of the conf: the operative configuration, and bindings that were never used."""

import inspect
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import gin
from torch import nn

from alfx.gin_utils.conf_error import ConfError, Problem, hint_nearest
from . import locations, registry, static_check
from .parsing import Reference, is_shipped, iterate_nested

logger = logging.getLogger(__name__)
_unused_is_allowed = False
_must_be_used: frozenset[str] = frozenset()


def config_str() -> str:
    """Return every binding of the loaded conf as gin text, with includes and overrides resolved."""
    return gin.config_str()


def operative_config_str() -> str:
    """Return every argument that the conf or a default has supplied so far, as gin text that can be loaded.

    Bindings that have not been used so far follow at the end, so that the text is sufficient to resume the run. For
    example, bindings used only in evaluation are included even before the first evaluation.
    """
    text = registry.named_by_path(gin.operative_config_str())
    unused = [locations.line(binding) for binding in _unused()]
    if unused:
        text += '\n# Not used so far:\n# ' + '=' * 78 + '\n' + '\n'.join(unused) + '\n'
    return text


def unused_bindings() -> list[locations.Binding]:
    """Return the bindings of the loaded conf that no constructor or factory has received so far.

    A binding is unused if its configurable was not called, if the caller always passed the argument explicitly, or if
    a binding in an inner scope always overrode it. A macro is unused only if no statement uses it.

    Returns:
        The bindings in the order written; each has a ``location`` (``file.gin:31``) and prints as in the conf.
    """
    return [binding for binding in _unused()
            if binding.selector != 'gin.macro' or not locations.is_mentioned(binding.scope)]


def warn_of_unused(bindings: Iterable[locations.Binding]) -> None:
    """Log each of these bindings as unused, except those in confs that alfx wrote, see :func:`is_generated`.

    Bindings in confs shipped with alfx are not logged one by one, because an override often makes them unused; ``alfx
    check`` lists them.
    """
    bindings = list(bindings)
    for text in confs_without_effect(bindings):
        logger.warning('%s', text)
    for binding in bindings:
        if not is_generated(binding.file) and not is_shipped(binding.file):
            hint = f' ({_hint_for_macro(binding)})' if binding.selector == 'gin.macro' else ''
            logger.warning('%s: this binding has not been used so far: %s%s', binding.location, binding, hint)


def is_generated(file: str) -> bool:
    """Return whether a conf was written by a run or a search: it also has bindings that were replaced by others."""
    folder, name = os.path.split(file)
    beside = {'best.gin': 'results.csv', 'config.gin': 'versions.json', 'operative.gin': 'versions.json'}.get(name)
    return beside is not None and os.path.isfile(os.path.join(folder, beside))


def confs_without_effect(unused: Sequence[locations.Binding]) -> list[str]:
    """Return a line for each conf of alfx that is included without effect: another conf replaces what it selects."""
    keys = {binding.key for binding in unused}
    used = {binding.file for binding in locations.bindings() if binding.key not in keys}
    return [f'{os.path.basename(file)} has no effect: later bindings select something else'
            for file in sorted({binding.file for binding in unused} - used) if is_shipped(file)]


def allow_unused(allowed: bool, but: Iterable[str] = ()) -> None:
    """Choose whether :func:`refuse_unused` only logs unused bindings; holds until the next conf is loaded.

    Args:
        allowed: only log them.
        but: bindings that raise an error nevertheless, each with the complete selector as in :func:`locations.line`.
    """
    global _unused_is_allowed, _must_be_used
    _unused_is_allowed, _must_be_used = allowed, frozenset(but)


def refuse_unused(bindings: Iterable[locations.Binding]) -> None:
    """Raise an error if a started run does not use bindings of its conf, so a misspelled scope does not cost hours.

    Args:
        bindings: the bindings that are unused after the first iteration.

    Raises:
        ConfError: some are mistakes, see :func:`mistakes_of_unused`, and the conf was not loaded with
            ``allow_unused``. All others are logged.
    """
    unused = list(bindings)
    mistakes = mistakes_of_unused(unused) if not _unused_is_allowed or _must_be_used else []
    if _unused_is_allowed:
        mistakes = [mistake for mistake in mistakes if locations.line(mistake[0]).partition(' = ')[0] in _must_be_used]
    if mistakes:
        problems = [Problem(binding.location, f'this binding is never used: {binding}', hint)
                    for binding, hint in mistakes]
        last = problems[-1]
        how = 'correct or remove it' if len(problems) == 1 else 'correct or remove them'
        raise ConfError([*problems[:-1], last._replace(hint=f'{last.hint}\n  {how}, or train with --allow_unused')])
    warn_of_unused(unused)


def mistakes_of_unused(bindings: Iterable[locations.Binding]) -> list[tuple[locations.Binding, str]]:
    """Select the unused bindings that are mistakes: those in the user's conf that cannot be used later.

    Bindings of an included conf may be unused because of overrides, and macros in files are only reported. A
    configurable that the conf refers to but that has not been called yet, or a function that returns nothing, may be
    called later.

    Returns:
        The mistakes, each with a hint.
    """
    keys = _operative_keys()
    made = {selector for _, selector, _ in keys}
    referred = _references()
    return [(binding, _hint_for(binding, keys))
            # macros in a file may be for other confs; on the command line they are mistakes
            for binding in bindings if locations.is_by_user(binding)
            and not (binding.selector == 'gin.macro' and binding.file)
            and not (binding.selector not in made and _may_come_later(binding, referred))]


def _references() -> dict[tuple[str, str], list[set[str]]]:
    """Return the scopes of all references of the conf, by complete selector and each scope ('' is always included)."""
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
    if inspect.isclass(target) and issubclass(target, nn.Module):
        return False  # algorithms create all networks before the first update
    scopes = binding.scope.split('/') if binding.scope else ['']
    selectors = [binding.selector, *(each.selector for each in locations.inherited() if each.text == binding.text)]
    return any({*scopes} - {''} <= others
               for selector in selectors for others in referred.get((selector, scopes[0]), ()))


def _hint_for(binding: locations.Binding, keys: list[tuple[str, str, str]]) -> str:
    """Return a hint: the scopes in which the class was constructed, or the used class with the nearest name."""
    if binding.selector == 'gin.macro':
        return _hint_for_macro(binding)
    name = binding.selector.rsplit('.', 1)[-1]
    scopes = {scope for scope, selector, _ in keys if selector == binding.selector}
    own = binding.scope
    if scopes and not any(f'{scope}/'.startswith(f'{own}/') or not own for scope in scopes):
        nearest = hint_nearest(f'{own}/{name}', sorted(f'{scope}/{name}' if scope else name for scope in scopes), 0.0)
        return f'{name} is not constructed in the scope {own!r}: {nearest}'
    inner = [b for b in locations.bindings() if (b.selector, b.name) == (binding.selector, binding.name) and b.scope]
    if scopes and inner and not own:
        return f'{inner[0].text} at {inner[0].location} overrides it: change that binding'
    if scopes:
        return f'the code that constructs {name} sets {binding.name} itself, or an inner scope overrides it'
    if name == 'Search':
        return "this is the conf of a search: start it with 'alfx search'"
    others = sorted({selector.rsplit('.', 1)[-1] for _, selector, _ in keys if selector != 'gin.macro'})
    return f'{name} is never constructed' + (f': {nearest}' if (nearest := hint_nearest(name, others, 0.9)) else '')


def _hint_for_macro(binding: locations.Binding) -> str:
    macros = [b.scope for b in locations.bindings() if b.selector == 'gin.macro' and locations.is_mentioned(b.scope)]
    near = hint_nearest(binding.scope, macros)
    return f'no statement uses this macro: {near}' if near else 'no statement uses this macro'


def _unused() -> list[locations.Binding]:
    used = set()
    for scope, selector, name in _operative_keys():
        binding = locations.bindings_in_effect(selector, scope.split('/') if scope else ()).get(name)
        if binding is not None:
            used.add(binding.text)  # also identifies the binding of a base class that a subclass inherits
    return [binding for binding in locations.bindings() if binding.text not in used]


def supplied_arguments() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the arguments that the conf or a default has supplied so far, by scope and complete selector.

    Reads gin's private record: formatting and parsing gin's text takes a tenth of a second for a typical conf.
    """
    with gin.config._OPERATIVE_CONFIG_LOCK:
        return {key: dict(arguments) for key, arguments in gin.config._OPERATIVE_CONFIG.items()}


def _operative_keys() -> list[tuple[str, str, str]]:
    """Return scope, complete selector and name of every argument that the conf or a default has supplied so far."""
    return [(*key, name) for key, arguments in supplied_arguments().items() for name in arguments]
