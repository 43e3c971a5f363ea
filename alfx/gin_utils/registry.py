"""Making classes, factories and step functions known to gin.

Constructors and factories become gin configurables through :func:`configurable`. Functions that run
once a step (activations, losses, squashing functions) are made known by :func:`register_function`
instead: a conf can name them and bind their parameters, but what a constructor receives is the plain
function (or a ``functools.partial`` of it that holds the bindings), so that no call per step goes
through gin.
"""

import functools
import importlib
import inspect
import re
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Optional, Union

import gin

from alfx.gin_utils import locations, trust
from alfx.gin_utils import value_checks

__all__ = ['configurable', 'named_by_path', 'register_by_path', 'register_function', 'raw_functions',
           'registered_selectors', 'step_function_of']

# A registered step function is called with this keyword to ask for the plain function.
_RESOLVE = '_alfx_resolve_'
_STEP_FUNCTION = '_alfx_step_function_'
_step_functions: dict[str, Callable] = {}
_by_path: set[str] = set()
_qualified_names: dict[str, tuple] = {}  # selector -> module and qualified name of what has it


def configurable(name_or_fn: Union[None, str, Callable] = None, module: Optional[str] = None,
                 denylist: Optional[Sequence[str]] = None,
                 allowlist: Optional[Sequence[str]] = None) -> Callable:
    """Decorator: let conf files set the arguments of a constructor or factory.

    Works as ``@configurable``, ``@configurable('Name')`` and ``@configurable(module='suite_gym')``.
    What holds for a decorated class:

    - What the caller passes wins over any binding; a binding wins over the default.
    - Bindings belong to the class they name. When the constructor of a subclass calls
      ``super().__init__(...)``, bindings of the *parent* fill only those parent arguments that the
      subclass does not pass, so ``Parent.x = 1`` cannot change an ``x`` the subclass chose. A subclass
      that inherits its constructor takes its own bindings first, then the parent's.
    - Registered step functions among the arguments (also inside lists, tuples, dicts and
      ``functools.partial``) arrive as plain functions; see :func:`register_function`.
    - ``inspect.signature`` and ``inspect.unwrap`` see the constructor as written; instances are of the
      class itself, so ``isinstance``, ``copy`` and ``pickle`` work as without the decorator.
    - A number that is not in the range that the annotation of its argument has (:mod:`alfx.gin_utils.value_checks`) is
      refused.
    - A TypeError or ValueError that names an argument bound by the conf is raised as a
      :class:`~alfx.gin_utils.ConfError` that points at the line of that binding.

    Args:
        name_or_fn: the class or factory; or the name to register it by (default: its own).
        module: the dotted prefix of the name (default: the module that defines it). Conf files may
            write any unambiguous tail of ``module.name``.
        denylist: arguments that a conf may not set.
        allowlist: the only arguments that a conf may set; not together with ``denylist``.

    Returns:
        The decorated class or factory, or a decorator.

    Raises:
        ValueError: another class or factory has the same module and name.
    """
    if callable(name_or_fn):
        return _make_configurable(name_or_fn, None, module, denylist, allowlist)
    return lambda target: _make_configurable(target, name_or_fn, module, denylist, allowlist)


def register_function(fn: Optional[Callable] = None, name: Optional[str] = None, module: Optional[str] = None,
                      parameters: Optional[Sequence[str]] = None) -> Callable:
    """Make a function that runs once a step known to conf files, without putting gin into its calls.

    A conf may pass it (``Net.activation = @clipped_exp``) and bind its parameters
    (``clipped_exp.clip_value_max = 2``). A :func:`configurable` constructor receives the function
    itself, or a ``functools.partial`` of it if there are bindings.

    Args:
        fn: the function; returned unchanged, so this can be used as a decorator.
        name: name for conf files (default: the function's own).
        module: the dotted prefix of the name (default: the module that defines it; '' for none).
        parameters: the parameters that can be bound, for functions written in C, which do not tell.

    Returns:
        ``fn``, or a decorator if ``fn`` is None.

    Raises:
        ValueError: another function has the same module and name.
    """
    if fn is None:
        return functools.partial(register_function, name=name, module=module, parameters=parameters)
    name = name or fn.__name__
    module = fn.__module__ if module is None else module
    selector = _selector(name, module)
    if _step_functions.get(selector) is fn:
        return fn

    def call_or_resolve(*args, **kwargs):
        if kwargs.pop(_RESOLVE, False):
            return functools.partial(fn, **kwargs) if kwargs else fn
        return fn(*args, **kwargs)

    attributes = {
        '__name__': fn.__name__,
        '__qualname__': getattr(fn, '__qualname__', fn.__name__),
        '__module__': module or None,
        '__doc__': fn.__doc__,
        '__signature__': _signature_without_defaults(fn, parameters),
        _STEP_FUNCTION: selector,
    }
    for attribute, value in attributes.items():
        setattr(call_or_resolve, attribute, value)
    with _replacing_own_name(selector, fn):
        gin.external_configurable(call_or_resolve, name=name, module=module or None)
    _step_functions[selector] = fn
    return fn


def register_by_path(selector: str) -> bool:
    """Make a class or function of another package known under its complete dotted name, ``package.module.Name``.

    Returns:
        Whether there is one, in a module that can be imported and that the conf may use.
    """
    module, _, name = selector.rpartition('.')
    if not module or module.split('.')[0] == 'alfx' or not trust.may_import(module):
        return False
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return False
    if inspect.isroutine(target):
        register_function(target, name, module)
    elif inspect.isclass(target):
        configurable(name, module)(_factory_of(target))
    _by_path.add(selector)
    return inspect.isroutine(target) or inspect.isclass(target)


def named_by_path(text: str) -> str:
    """Text that gin made, in which it shortens names, with the complete ones where only these find something."""
    for selector in _by_path:
        short = gin.config._REGISTRY.minimal_selector(selector)
        text = re.sub(rf'(?<![\w.\'"]){re.escape(short)}(?=[.(,)\s\]}}]|$)', selector, text)
    return text


def _factory_of(cls: type) -> Callable:
    """A function that makes instances: a class of another package stays as it is."""
    def make(*args, **kwargs):
        return cls(*args, **kwargs)

    make.__name__, make.__qualname__, make.__module__, make.__doc__ = (
        cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__)
    try:
        make.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
    except ValueError:  # written in C
        pass
    return make


def raw_functions(value: Any) -> Any:
    """``value`` with every registered step function replaced by the plain function (with its bindings).

    Looks into lists, tuples (named ones too), dicts and ``functools.partial``; whatever holds no such
    function is returned as the same object.
    """
    kind = type(value)
    if kind is types.FunctionType:
        return value(**{_RESOLVE: True}) if _STEP_FUNCTION in value.__dict__ else value
    if kind is list or isinstance(value, tuple):
        items = [raw_functions(item) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return value._make(items) if hasattr(value, '_make') else kind(items)
    if kind is dict:
        by_key = {key: raw_functions(item) for key, item in value.items()}
        return value if all(by_key[key] is value[key] for key in value) else by_key
    if kind is functools.partial:
        func, args, keywords = (raw_functions(part) for part in (value.func, value.args, value.keywords))
        if func is value.func and args is value.args and keywords is value.keywords:
            return value
        return functools.partial(func, *args, **keywords)
    return value


def registered_selectors() -> list[str]:
    """The complete selectors of everything that was registered here."""
    return list(_qualified_names)


def annotation_of(target: Callable, name: str) -> Any:
    """The annotation of a constructor argument, ``inspect.Parameter.empty`` if it has none that can be read."""
    return annotations_of(target).get(name, inspect.Parameter.empty)


def annotations_of(target: Callable) -> dict[str, Any]:
    """The annotations of all constructor arguments that have one which can be read."""
    selector = getattr(target, _STEP_FUNCTION, '')
    fn = construction_function(target)[1] if inspect.isclass(target) else _step_functions.get(selector, target)
    return value_checks.annotations_of(fn)


def step_function_of(selector: str) -> Optional[Callable]:
    """The plain function registered under the complete selector, or None if it is no step function."""
    return _step_functions.get(selector)


def _selector(name: str, module: Optional[str]) -> str:
    return f'{module}.{name}' if module else name


def _make_configurable(target, name, module, denylist, allowlist):
    name = name or target.__name__
    if module is None and '.' not in name:
        module = target.__module__
    selector = _selector(name, module)
    if inspect.isclass(target):
        attribute, constructor = construction_function(target)
        guarded = _guard(constructor, selector)
        setattr(target, attribute, staticmethod(guarded) if attribute == '__new__' else guarded)
        to_register = target
    else:
        to_register = _guard(target, selector)
    with _replacing_own_name(selector, target):
        return gin.configurable(name, module=module, denylist=denylist, allowlist=allowlist)(to_register)


def construction_function(cls: type) -> tuple[str, Callable]:
    """The name and function that makes instances of a class: the first ``__init__`` or ``__new__`` of its bases."""
    for base in cls.__mro__:
        for attribute in ('__init__', '__new__'):
            if attribute in vars(base):
                return attribute, getattr(base, attribute)
    raise AssertionError('object has __init__')


def _guard(fn, selector):
    """``fn`` that receives plain step functions, keeps its arguments in range, and whose errors point at the conf."""
    owner = selector.rsplit('.', 1)[-1]
    limits = functools.cache(lambda: value_checks.limits_of(fn))  # names in annotations may be defined later

    @functools.wraps(fn)
    def guarded(*args, **kwargs):
        args = tuple(raw_functions(arg) for arg in args)
        kwargs = {key: raw_functions(value) for key, value in kwargs.items()}
        if limits():
            value_checks.check_limits(owner, limits(), {**dict(zip(signature.parameters, args)), **kwargs})
        try:
            return fn(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
            locations.explain(error, selector, gin.current_scope(), signature.parameters)
            raise

    if fn is object.__init__:
        signature = inspect.Signature([inspect.Parameter('self', inspect.Parameter.POSITIONAL_ONLY)])
        guarded.__module__ = ''
    else:
        signature = inspect.signature(fn)
    # gin reads the arguments of what it wraps without following __wrapped__.
    guarded.__signature__ = signature
    return guarded


def _signature_without_defaults(fn, parameters):
    """The signature that gin sees of a step function.

    Without defaults, so that gin's operative configuration lists what a conf bound and no more: a
    function without bindings stays the plain function when that configuration is loaded again.
    """
    kind = inspect.Parameter
    if parameters is not None:
        return inspect.Signature([kind('args', kind.VAR_POSITIONAL)]
                                 + [kind(name, kind.KEYWORD_ONLY) for name in parameters])
    try:
        signature = inspect.signature(fn)
    except ValueError:  # written in C
        return inspect.Signature([kind('args', kind.VAR_POSITIONAL)])
    return signature.replace(parameters=[p.replace(default=kind.empty) for p in signature.parameters.values()])


def _replacing_own_name(selector, target):
    """Context in which gin lets ``target`` take the place of an earlier definition of itself.

    A module that is reloaded, or a class defined in a function that is called again, has the same
    module and qualified name; anything else with the same selector stays an error.
    """
    qualified = (getattr(target, '__module__', None), getattr(target, '__qualname__', None))
    again = _qualified_names.get(selector) == qualified
    _qualified_names.setdefault(selector, qualified)
    return gin.config.interactive_mode() if again else nullcontext()
