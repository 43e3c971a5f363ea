"""File and line of each binding of the loaded conf, for error messages."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import gin

from alfx.gin_utils.conf_error import ConfError, Problem, hint_nearest, plain_text

_EXPLAINED = '_alfx_explained_'
_PARAMETERS = '_alfx_parameters_'


class Binding(NamedTuple):
    """One binding of the loaded conf.

    Attributes:
        file: path of the conf file, or '' for ``--conf_param``.
        line: line number in that file, or the position among the ``--conf_param`` flags, from 1.
        scope: scopes joined by '/', or ''.
        selector: complete selector of the configurable; ``gin.macro`` for a macro.
        name: argument; ``value`` for a macro.
        text: left side as the user wrote it, ``ac/Adam.lr``.
        value: the value; references and macros are objects that print as they are written.
        location: location as shown in messages: ``file.gin:31``, ``override 'X.y=z'``.
    """

    file: str
    line: int
    scope: str
    selector: str
    name: str
    text: str
    value: Any
    location: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.scope, self.selector, self.name

    @property
    def is_for_evaluation(self) -> bool:
        """Return whether it is in a scope of evaluation environments, not used before the first evaluation.

        That is ``evaluation/``, or a scope of the reference in ``create_environment.eval_env_load_fn``.
        """
        scope = f'{self.scope}/'
        return self.scope != '' and any(scope.startswith(s) or s.startswith(scope) for s in _evaluation_scopes)

    def __str__(self) -> str:
        return f'{self.text} = {self.value!r}'


_bindings: dict[tuple[str, str, str], Binding] = {}
_inherited: dict[tuple[str, str, str], Binding] = {}  # bindings of base classes, as bindings of the subclasses
_mentioned: set[str] = set()
_written_by_user: set[str] = {''}  # paths of files; '' is the command line
_evaluation_scopes: set[str] = {'evaluation/'}


def record(binding: Binding, is_inherited: bool = False) -> None:
    """Store a binding; it replaces an earlier binding of the same argument.

    Args:
        binding: the binding.
        is_inherited: whether it was written for a base class of ``binding.selector``.
    """
    stored = _inherited if is_inherited else _bindings
    stored.pop(binding.key, None)
    stored[binding.key] = binding


def mention_macros(names: Iterable[str]) -> None:
    """Record that statements of the conf use these macros, including statements that are overridden later."""
    _mentioned.update(names)


def is_mentioned(macro: str) -> bool:
    """Return whether any statement of the conf uses the macro."""
    return macro in _mentioned


def written_by_user(path: str) -> None:
    """Record that a file is the user's own conf and not an included one."""
    _written_by_user.add(path)


def add_evaluation_scope(scopes: Sequence[str]) -> None:
    """Record that only evaluation environments are created in these nested scopes."""
    _evaluation_scopes.add(''.join(f'{scope}/' for scope in scopes))


def is_by_user(binding: Binding) -> bool:
    """Return whether a binding is in the user's own conf or on the command line, not in an included conf."""
    return binding.file in _written_by_user


def clear() -> None:
    """Remove every binding."""
    _bindings.clear()
    _inherited.clear()
    _mentioned.clear()
    _written_by_user.intersection_update({''})
    _evaluation_scopes.intersection_update({'evaluation/'})


def bindings() -> list[Binding]:
    """Return every binding of the loaded conf that is not overridden, in the order written."""
    return list(_bindings.values())


def inherited() -> list[Binding]:
    """Return the bindings of base classes that apply to registered subclasses, each as a binding of the subclass."""
    return list(_inherited.values())


def bindings_in_effect(selector: str, scope: Sequence[str] = ()) -> dict[str, Binding]:
    """Return the bindings of one configurable that apply in a scope, by argument name."""
    found = {}
    for depth in range(len(scope) + 1):
        prefix = '/'.join(scope[:depth])
        for binding in (*_inherited.values(), *_bindings.values()):
            if binding.selector == selector and binding.scope == prefix:
                found[binding.name] = binding
    return found


def location_of(owner: str, name: str) -> Optional[Binding]:
    """Return the binding in effect of argument ``name`` of the configurable whose selector ends in ``owner``.

    The active scopes count, so call this while the constructor runs. ``None`` if the argument is not bound.
    """
    active, found, depth = gin.current_scope(), None, -1
    for binding in (*_inherited.values(), *_bindings.values()):
        scope = binding.scope.split('/') if binding.scope else []
        is_it = binding.name == name and f'.{binding.selector}'.endswith(f'.{owner}')
        if is_it and active[:len(scope)] == scope and len(scope) > depth:
            found, depth = binding, len(scope)
    return found if found is not None and _is_bound(found) else None


def line(binding: Binding) -> str:
    """Return a binding as one line of gin text, with the complete selector."""
    if binding.selector == 'gin.macro':
        return f'{binding.scope} = {binding.value!r}'
    scope = f'{binding.scope}/' if binding.scope else ''
    return f'{scope}{binding.selector}.{binding.name} = {binding.value!r}'


def is_explained(error: BaseException) -> bool:
    """Return whether a note of ``error`` lists the bindings of the constructor that raised it."""
    return getattr(error, _EXPLAINED, False)


def explain(error: Exception, selector: str, scope: Sequence[str], parameters: Iterable[str] = ()) -> None:
    """Point from an error of a constructor to the line of the conf that caused it, if it can be identified.

    Args:
        error: exception that the constructor raised.
        selector: complete selector of the class or factory.
        scope: active scopes.
        parameters: parameters of the constructor.

    Raises:
        ConfError: ``error`` reports an argument that no constructor accepts, and the conf binds that argument or
            passes the constructor to the code that uses it. Or it is a TypeError or ValueError whose text names an
            argument that the conf binds, or quotes a string that the conf binds. In all other cases the bindings of
            the innermost constructor are added to ``error`` as a note.
    """
    if isinstance(error, ConfError):
        return
    in_effect = {n: b for n, b in bindings_in_effect(selector, scope).items() if _is_bound(b)}
    text, owner = plain_text(error), selector.rsplit('.', 1)[-1]
    innermost = not is_explained(error)
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text) if isinstance(error, TypeError) else None
    if unknown:
        known = [*getattr(error, _PARAMETERS, ()), *parameters]  # also those of the constructors it forwards to
        setattr(error, _PARAMETERS, known)
        if wrong := in_effect.get(unknown[1]):
            hint = hint_nearest(wrong.name, [name for name in known if name not in (wrong.name, 'self', 'kwargs')])
            problem = Problem(wrong.location, f'{owner}.{wrong.name} = {wrong.value!r}: {text}', hint)
            raise ConfError([problem]).with_traceback(error.__traceback__) from error
        if text.startswith(f'{owner}.__init__()') and (places := _places_of(owner)):  # blame the conf, not the caller
            raise ConfError([Problem(place.location, f'{place}: it is called with the argument {unknown[1]}, which '
                                     f'{owner} does not accept', f'use a class or function that accepts {unknown[1]}')
                             for place in places]).with_traceback(error.__traceback__) from error
    for name, binding in in_effect.items() if isinstance(error, (TypeError, ValueError)) else ():
        names_it = innermost and name != 'name' and re.search(rf'\b{re.escape(name)}\b', text)
        if names_it or (isinstance(binding.value, str) and len(binding.value) >= 3 and binding.value in text):
            message = text if text.startswith(f'{owner}.{name}') else f'{owner}.{name} = {binding.value!r}: {text}'
            problem = Problem(binding.location, message, _bindings_of_object(str(binding.value)))
            raise ConfError([problem]).with_traceback(error.__traceback__) from error
    if in_effect and innermost:
        setattr(error, _EXPLAINED, True)
        lines = '\n'.join(f'  {binding.location}: {binding}' for binding in in_effect.values())
        error.add_note(f'{owner} was constructed with these bindings of the conf:\n{lines}')


def _bindings_of_object(reference: str) -> str:
    """Return the bindings of the object that ``@scope/Name()`` makes, in one line; '' for other text."""
    made = re.fullmatch(r'@(?:(.+)/)?(?:\w+\.)*(\w+)\(\)', reference)
    found = [b for b in bindings() if made and b.scope in ('', made[1]) and b.selector.rsplit('.', 1)[-1] == made[2]]
    return f'its bindings: {", ".join(f"{b.location}: {b}" for b in found)}' if found else ''


def _places_of(owner: str) -> list[Binding]:
    """Return the bindings to the constructor itself, not to its result; only those in the user's conf, if any."""
    found = [binding for binding in bindings() if re.fullmatch(rf'@([\w.]+[./])*{owner}', str(binding.value))]
    return [binding for binding in found if is_by_user(binding)] or found


def _is_bound(binding: Binding) -> bool:
    """Return whether gin still has the binding; other code may have cleared gin directly."""
    try:
        gin.query_parameter(f'{binding.scope}/{binding.selector}.{binding.name}'.lstrip('/'))
    except ValueError:
        return False
    return True
