"""Checks of the statements of a conf against the registered configurables, before anything is constructed.

These checks find misspelled configurables, parameters, scopes, macros and modules; values of a type that the
annotation does not accept; classes where instances are expected, and the reverse; and circular references. Ranges and
combinations of values are checked by the constructors, see :mod:`alfx.gin_utils.value_checks`.
"""

import dataclasses
import inspect
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import gin
import torch

from alfx.gin_utils.aliases import instead_of, instead_of_parameter
from alfx.gin_utils.conf_error import Problem, hint_nearest, nearest_name
from . import registry, type_check
from .parsing import Macro, Reference, Statement, iterate_nested, substitute
from .reference_types import family, find, made_by, resolve

_declared_scopes: set[str] = set()


class Resolved(NamedTuple):
    """A binding with its configurable and its value, converted to the type of the parameter.

    ``is_inherited`` marks a binding of a base class that applies to the subclass ``selector``.
    """

    statement: Statement
    selector: str
    value: Any
    is_inherited: bool = False


def declare_scope(name: str) -> None:
    """Declare a scope that code enters, so that bindings in it are not reported as misspelled."""
    _declared_scopes.add(name)


def check(statements: Sequence[Statement], unavailable: dict[str, str],
          complete: bool = True) -> tuple[list[Resolved], list[Problem]]:
    """Check every name of a conf.

    Args:
        statements: statements in the order in which they take effect, without imports.
        unavailable: modules that could not be imported, with the reason, for hints.
        complete: pass False if part of the conf could not be read; undefined macros and unused scopes are then not
            reported.

    Returns:
        The bindings, resolved, followed by those that subclasses inherit; and the problems.
    """
    macros = {s.text: s for s in statements if s.kind == 'macro'}
    values = {name: s.value for name, s in macros.items()}
    problems: list[Problem] = []
    resolved = []
    for statement in statements:
        configurable = None
        of_references = []  # checked first, because this registers classes that are named by their path
        for leaf in iterate_nested(statement.value):
            if isinstance(leaf, Reference):
                of_references += _check_reference(leaf, statement.location, unavailable, macros)
            elif isinstance(leaf, Macro) and complete:
                of_references += _check_macro_use(leaf, statement.location, macros)
        if statement.kind in ('binding', 'block'):
            configurable = _find(statement.selector, statement.location, '', unavailable, problems)
        if configurable is not None and statement.name.isdigit():
            statement, problem = _with_name(statement, configurable, statements)
            if problem is not None:
                problems.append(problem)
                continue
        if any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in iterate_nested(statement.value)):
            problems.append(Problem(statement.location, f'{statement.text} = {statement.value!r}: a number is too '
                                    'large', 'the largest is about 1.8e308'))
        elif statement.kind == 'binding' and configurable is not None:
            problem, value = _check_binding(statement, configurable, substitute(statement.value, values))
            if problem is not None:
                problems.append(problem)
            else:
                resolved.append(Resolved(statement, configurable.selector, value))
        elif statement.kind == 'macro':
            problems += _check_macro_definition(statement, values)
            resolved.append(Resolved(statement, 'gin.macro', statement.value))
        problems += of_references
    resolved += _inherited(resolved)
    if complete:
        problems += _check_evaluated(statements, resolved)
        problems += _check_circles(resolved, values)
        problems += _check_scopes(statements)
        problems += _check_required(resolved)
    return resolved, problems


def parameters_of(configurable: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters that a conf can bind, and whether ``**kwargs`` accepts others."""
    target = configurable.wrapped
    if inspect.isclass(target):
        attribute, constructor = registry.construction_function(target)
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
    else:
        parameters = list(inspect.signature(target).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name: p for p in parameters if p.kind in kinds}
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    if configurable.allowlist:
        named = {name: p for name, p in named.items() if name in configurable.allowlist}
    return {name: p for name, p in named.items() if name not in (configurable.denylist or ())}, open_ended


def describe_missing(selector: str, unavailable: dict[str, str]) -> str:
    """Return a hint for an unknown name: the module that could not be imported, or the nearest name."""
    *modules, name = selector.split('.')
    likely = (modules[-1] if modules else re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower())
    reasons = [f'{module} could not be imported: {reason}' for module, reason in sorted(unavailable.items())
               if module.rsplit('.', 1)[-1] == likely]
    if reasons:
        return reasons[0]
    if known := instead_of(selector):
        return known
    for module, contents in [*sys.modules.items()] if not modules else ():
        found = vars(contents).get(name)
        if getattr(found, '__module__', '') == module and not module.startswith(('alfx.', f'torch.optim.{name}')):
            return f"write '{module}.{name}', or decorate it with @alfx.gin_utils.configurable"
    inside = sys.modules.get('.'.join(modules))
    if inside is not None and hasattr(inside, name):
        return f'confs cannot name this {type(getattr(inside, name)).__name__}; write a function that calls it'
    if inside is not None and (near := hint_nearest(name, dir(inside))):
        return near
    names = registry.registered_selectors()
    tails = {'.'.join(full.split('.')[-(len(modules) + 1):]) for full in names}
    nearest = nearest_name(selector, sorted(tails)) or nearest_name(name, sorted({n.split('.')[-1] for n in names}))
    if nearest:
        return f"did you mean '{nearest}'?"
    begun = sorted({tail for tail in (full.split('.')[-1] for full in names) if tail.lower().startswith(name.lower())},
                   key=lambda tail: (not tail.endswith('Algorithm'), len(tail)))[:3]
    if begun:
        return f"did you mean {' or '.join(map(repr, begun))}?"
    return 'import the module that defines it in the conf: import my_package.my_module'


def _inherited(resolved: Sequence[Resolved]) -> list[Resolved]:
    """Return the bindings that registered subclasses inherit from the classes that the conf binds.

    A subclass inherits a binding if its constructor has the parameter, and if neither the subclass nor a class between
    the two has a binding that applies in the same scope.
    """
    bound: dict[str, dict[tuple[str, str], Resolved]] = defaultdict(dict)
    for each in resolved:
        if each.statement.kind == 'binding':
            bound[each.selector][each.statement.scope, each.statement.name] = each
    inherited = []
    for configurable in _subclasses_of(bound):
        parameters, _ = parameters_of(configurable)
        nearer = set(bound.get(configurable.selector, ()))
        for base in configurable.wrapped.__mro__[1:]:
            entry = gin.config._INVERSE_REGISTRY.get(base)
            new = {} if entry is None else {key: each for key, each in bound.get(entry.selector, {}).items()
                                            if key[1] in parameters and not _is_bound_by(nearer, *key)}
            nearer.update(new)
            inherited += [Resolved(each.statement, configurable.selector, each.value, True) for each in new.values()]
    return inherited


def _is_bound_by(bindings: Iterable[tuple[str, str]], scope: str, name: str) -> bool:
    """Return whether one of the bindings (scope and argument each) sets the argument in the scope."""
    return any(other == name and (not outer or f'{scope}/'.startswith(f'{outer}/')) for outer, other in bindings)


def _subclasses_of(selectors: Iterable[str]) -> list[Any]:
    """Return gin's entries of the registered subclasses, direct or not, of the classes among these configurables."""
    waiting = [target for selector in selectors if inspect.isclass(target := resolve(selector).wrapped)]
    found: dict[type, Any] = {}
    while waiting:
        new = [cls for cls in waiting.pop().__subclasses__() if cls not in found]
        found.update((cls, gin.config._INVERSE_REGISTRY.get(cls)) for cls in new)
        waiting += new
    return [entry for cls, entry in found.items() if entry and resolve(entry.selector).wrapped is cls]


def _find(selector, location, prefix, unavailable, problems):
    try:
        return resolve(selector)
    except KeyError:
        full = [name for name in registry.registered_selectors() if name.endswith('.' + selector)]
        problems.append(Problem(location, f"'{prefix}{selector}' is ambiguous",
                                f'write one of {", ".join(sorted(full))}'))
    except ValueError:
        if registry.register_by_path(selector):
            return resolve(selector)
        problems.append(Problem(location, f"there is no configurable '{prefix}{selector}'",
                                describe_missing(selector, unavailable)))
    return None


def _with_name(statement: Statement, configurable: Any,
               statements: Sequence[Statement]) -> tuple[Statement, Optional[Problem]]:
    """Return the binding of an argument that a reference gives by its position, with the name of the argument."""
    names = [name for name, parameter in parameters_of(configurable)[0].items()
             if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    scope, selector, index = statement.scope, statement.selector, int(statement.name)
    if index >= len(names):
        return statement, Problem(statement.location, f'{selector} takes {len(names)} arguments without names, found '
                                  f'{index + 1}', f'they are {", ".join(names)}' if names else '')
    if any((scope, selector, names[index]) == (s.scope, s.selector, s.name) for s in statements):
        return statement, Problem(statement.location, f'the reference has two arguments {names[index]}')
    return statement._replace(name=names[index]), None


def _check_binding(statement: Statement, configurable: Any, value: Any) -> tuple[Optional[Problem], Any]:
    parameters, open_ended = parameters_of(configurable)
    owner = statement.selector  # as written, because several functions are called load
    if statement.name in (configurable.denylist or ()):
        return Problem(statement.location, f"{owner}.{statement.name} cannot be set by a conf"), None
    if statement.name not in parameters:
        if open_ended and not configurable.allowlist:
            return None, statement.value
        names = ', '.join(parameters) or 'none'
        hint = (instead_of_parameter(configurable.name, statement.name, parameters)
                or hint_nearest(statement.name, list(parameters), 0.6) or f'its parameters: {names}')
        return Problem(statement.location, f"{owner} has no parameter '{statement.name}'", hint), None
    hint_type = registry.annotation_of(configurable.wrapped, statement.name)
    default = parameters[statement.name].default
    if value is None and default is None:
        return None, statement.value
    if isinstance(value, Reference):
        wrong = _wrong_kind(statement.name, value, default)
        if wrong is not None:
            expected, hint = wrong
            return Problem(statement.location, f'{owner}.{statement.name} expects {expected}, found the reference '
                           f'{value!r}', hint), None
    if isinstance(value, str) and re.fullmatch(r'@[\w./]+(\(\))?', value) and hint_type in (Any, inspect._empty):
        return Problem(statement.location, f'{owner}.{statement.name} expects an object, found the text {value!r}',
                       f'a reference has no quotes: {value}'), None
    mismatch, converted = type_check.check(value, hint_type)
    if mismatch is not None:
        return Problem(statement.location, f'{owner}.{statement.name} expects {mismatch.expected}, found '
                       f'{mismatch.found}', mismatch.hint), None
    return None, statement.value if repr(converted) == repr(value) else converted


def _wrong_kind(name: str, value: Reference, default: Any) -> Optional[tuple[str, str]]:
    """Check the kind of object by the name of a parameter or its default, where there is no annotation.

    Returns:
        ``None``, or the expected kind and a hint.
    """
    made = made_by(value)
    hint = '' if made is None else f'{value!r} creates an instance of {made.__name__}'
    if name.endswith('optimizer') and made is not None:
        is_optimizer = issubclass(made, torch.optim.Optimizer)
        if is_optimizer and not value.evaluate:
            return 'an optimizer', f'write {value!r}()'
        if not is_optimizer:
            return 'an optimizer', hint
    if value.evaluate:
        return None
    takes_class = name.endswith(('_ctor', '_cls', '_class'))
    if takes_class and _is_step_function(value):
        return 'a constructor', f'{value!r} is a function of tensors'
    if name.endswith(('activation', '_fn')) and made is not None and made.__module__.startswith('torch.nn.modules'):
        return 'a function', f'{value!r} is a class: write {value!r}() for an instance, which can be called'
    wanted = family(default) if inspect.isclass(default) else None
    if wanted is not None and made is not None and made.__module__.split('.')[0] in ('alfx', 'torch'):
        if not issubclass(made, wanted):  # user-defined classes need only the same methods
            return f'a constructor like @{default.__name__}', hint
    return None


def _is_step_function(reference: Reference) -> bool:
    known = find(reference.selector)  # unknown names are reported by the check of references
    function = registry.step_function_of(known.selector) if known else None
    return function is not None and not inspect.isclass(function)  # classes of distributions are registered so


def _check_evaluated(statements: Sequence[Statement], resolved: Sequence[Resolved]) -> list[Problem]:
    """Check that the conf binds all required arguments of ``@f()``, which is called without arguments."""
    bound: dict[str, set[str]] = {}
    for r in resolved:
        bound.setdefault(r.selector, set()).add(r.statement.name)
    problems = []
    for statement in statements:
        for leaf in iterate_nested(statement.value):
            missing = _unbound_arguments(leaf, bound)
            if missing:
                is_call = leaf.scopes and leaf.scopes[-1].startswith(re.sub(r'\W', '_', statement.text))  # @f(x=1)
                plain = f'functools.partial(@{leaf.selector}, ...)' if is_call else repr(leaf).removesuffix('()')
                problems.append(Problem(statement.location, f'{leaf!r} needs {", ".join(missing)}, which the conf does '
                                        'not set', f'set it, or write {plain} to pass the constructor'))
    return problems


def _check_circles(resolved: Sequence[Resolved], values: dict[str, Any]) -> list[Problem]:
    """Find circular references such as ``a.x = @b()`` with ``b.y = @a()``: neither can be constructed first."""
    bound: dict[tuple[str, str], dict[str, tuple[Statement, list[Reference]]]] = defaultdict(dict)
    for statement, selector, *_ in resolved:
        if statement.kind == 'binding':
            leaves = iterate_nested(substitute(statement.value, values))
            called = [leaf for leaf in leaves if isinstance(leaf, Reference) and leaf.evaluate]
            bound[statement.scope, selector][statement.name] = statement, called

    problems, finished = [], set()

    def visit(scope: str, selector: str, path: tuple[tuple[str, str], ...]) -> None:
        node = scope, selector
        parts = scope.split('/') if scope else []
        in_effect: dict[str, tuple[Statement, list[Reference]]] = {}
        for depth in range(len(parts) + 1):
            in_effect.update(bound.get(('/'.join(parts[:depth]), selector), {}))
        for statement, called in in_effect.values():
            for reference in called:
                try:
                    made = '/'.join(reference.scopes) or scope, resolve(reference.selector).selector
                except (ValueError, KeyError):  # reported by the check of references
                    continue
                if made in path or made == node:
                    names = [name.rsplit('.', 1)[-1] for _, name in (*path, node)[[*path, node].index(made):]]
                    problems.append(Problem(statement.location, f'{statement.text} = {reference!r} is circular: '
                                            f'{" -> ".join([*names, names[0]])}', 'remove one of these references'))
                elif made not in finished:
                    visit(*made, (*path, node))
        finished.add(node)

    for scope, selector in list(bound):
        if (scope, selector) not in finished:
            visit(scope, selector, ())
    return list(dict.fromkeys(problems))


def _unbound_arguments(leaf: Any, bound: dict[str, set[str]]) -> list[str]:
    if not isinstance(leaf, Reference) or not leaf.evaluate:
        return []
    configurable = find(leaf.selector)  # unknown names are reported by the check of references
    if configurable is None or registry.step_function_of(configurable.selector):
        return []
    return [name for name, parameter in parameters_of(configurable)[0].items()
            if parameter.default is parameter.empty and name not in bound.get(configurable.selector, ())]


def _check_reference(reference: Reference, location: str, unavailable: dict[str, str],
                     macros: dict[str, Statement]) -> list[Problem]:
    problems: list[Problem] = []
    configurable = _find(reference.selector, location, '@', unavailable, problems)
    if problems and reference.selector in macros:
        return [problems[0]._replace(hint=f'write %{reference.selector}, because it is a macro')]
    function = configurable and reference.evaluate and registry.step_function_of(configurable.selector)
    if function and (not inspect.isfunction(function) or any(
            p.default is p.empty for p in inspect.signature(function).parameters.values())):
        problems.append(Problem(location, f'{reference!r} calls the function, which needs arguments',
                                f'write {dataclasses.replace(reference, evaluate=False)!r}'))
    return problems


def _check_macro_definition(statement: Statement, values: dict[str, Any]) -> list[Problem]:
    name = statement.text
    if _is_constant(name):
        return [Problem(statement.location, f"'{name}' is the name of a constant", 'choose another name')]
    if isinstance(statement.value, dict) and find(name):
        return [Problem(statement.location, f"'{name} = {{...}}' defines a macro", f'write {name}.parameter = value')]
    needed = iterate_nested(substitute(statement.value, values, frozenset({name})))
    return [Problem(statement.location, f'macro %{name} refers to itself')] if Macro(name) in needed else []


def _check_macro_use(macro: Macro, location: str, macros: dict[str, Statement]) -> list[Problem]:
    if macro.name in macros or _is_constant(macro.name):
        return []
    hint = hint_nearest(macro.name, list(macros)) or (
        'a macro has no dot: write n = ..., and %n where it is used' if '.' in macro.name else
        f'define it: {macro.name} = ...')
    return [Problem(location, f"macro '%{macro.name}' is not defined", hint)]


def _is_constant(name: str) -> bool:
    try:
        gin.query_parameter(name)
    except (ValueError, KeyError):
        return False
    return True


def _check_scopes(statements: Sequence[Statement]) -> list[Problem]:
    used = set(_declared_scopes)
    for statement in statements:
        for leaf in iterate_nested(statement.value):
            if isinstance(leaf, Reference):
                used.update(leaf.scopes)
    problems = []
    for statement in statements:
        if statement.kind not in ('binding', 'block') or not statement.scope:
            continue
        for scope in statement.scope.split('/'):
            nearest = None if scope in used else nearest_name(scope, sorted(used))
            if nearest:
                what = f'{statement.scope}/{statement.selector}'
                problems.append(Problem(statement.location, f"no reference uses the scope '{scope}' of {what}",
                                        f"did you mean '{nearest}'?"))
    return problems


def _check_required(resolved: Sequence[Resolved]) -> list[Problem]:
    last = {(r.statement.scope, r.selector, r.statement.name): r for r in resolved}
    return [Problem(r.statement.location, f'{r.statement.text} is required and has no value',
                    f'set it: {r.statement.text} = ...')
            for r in last.values() if r.value in (Macro('gin.REQUIRED'), Macro('REQUIRED'))]
