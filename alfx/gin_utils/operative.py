"""What of the conf was used: the operative configuration, and the bindings that nothing used."""

import logging
import os
from collections.abc import Iterable, Iterator

import gin

from . import locations, static_check
from .parsing import Reader, Statement

__all__ = ['config_str', 'operative_config_str', 'unused_bindings', 'warn_of_unused']

logger = logging.getLogger(__name__)


def config_str() -> str:
    """Every binding of the loaded conf as gin text, includes and overrides resolved."""
    return gin.config_str()


def operative_config_str() -> str:
    """Every argument that the conf or a default has supplied so far, as gin text that can be loaded.

    Bindings that were not used so far follow at the end, so that the text alone is enough to go on with the
    run: what only an evaluation uses, for example, is not lost when it is written before the first one.
    """
    text = gin.operative_config_str()
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
    """Log each of these bindings as one that nothing has used; not those of ``operative.gin``, which lists defaults."""
    for binding in bindings:
        if os.path.basename(binding.file) != 'operative.gin':
            logger.warning('%s: nothing has used this binding so far: %s', binding.location, binding)


def _unused() -> list[locations.Binding]:
    used = set()
    for scope, selector, name in _operative_keys():
        binding = locations.bindings_in_effect(selector, scope.split('/') if scope else ()).get(name)
        if binding is not None:
            used.add(binding.key)
    return [binding for binding in locations.bindings() if binding.key not in used]


def _operative_keys() -> Iterator[tuple[str, str, str]]:
    for statement in _statements(gin.operative_config_str()):
        if statement.kind == 'macro':
            yield statement.text, 'gin.macro', 'value'
        elif statement.kind == 'binding':
            yield statement.scope, static_check.resolve(statement.selector).selector, statement.name


def _statements(text: str) -> list[Statement]:
    reader = Reader()
    reader.read_text(text)
    return reader.statements
