"""Registration of classes, factories and step functions with gin.

Constructors and factories become gin configurables through :func:`configurable`. Functions that are called at every
step (activations, losses, squashing functions) are registered by :func:`register_function` instead: a conf can name
them and bind their parameters, but a constructor receives the plain function (or a ``functools.partial`` with the
bindings), so that calls at every step do not go through gin.
"""

import functools
import importlib
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Optional, Union

import gin

from alfx.gin_utils import locations, settings, trust, value_checks
from alfx.gin_utils.conf_error import ConfError

# Keyword that asks a registered step function for the plain function.
_RESOLVE = '_alfx_resolve_'
_STEP_FUNCTION = '_alfx_step_function_'
_step_functions: dict[str, Callable] = {}
_by_path: set[str] = set()
_PROGRAM = ('__main__', '__mp_main__')  # module of the running program, and of its copy in a spawned process
_qualified_names: dict[str, tuple] = {}  # selector -> module and qualified name of the registered object


def configurable(name_or_fn: Union[None, str, Callable] = None, module: Optional[str] = None,
                 denylist: Optional[Sequence[str]] = None, allowlist: Optional[Sequence[str]] = None) -> Callable:
    """Decorate a constructor or factory so that conf files can set its arguments.

    Works as ``@configurable``, ``@configurable('Name')`` and ``@configurable(module='suite_gym')``.
    Rules for a decorated class:

    - An argument passed by the caller overrides any binding; a binding overrides the default.
    - A registered subclass inherits the bindings of its registered base classes for the parameters that
      its own constructor has. Its own bindings override them. When its constructor calls
      ``super().__init__(...)``, bindings of the base class fill only those arguments that it does not
      pass, so ``Parent.x = 1`` cannot change an ``x`` that the subclass chooses itself.
    - Registered step functions among the arguments (also inside lists, tuples, dicts and
      ``functools.partial``) arrive as plain functions; see :func:`register_function`.
    - ``inspect.signature`` and ``inspect.unwrap`` see the constructor as written. Instances are of the
      class itself, so ``isinstance``, ``copy`` and ``pickle`` work as without the decorator.
    - A number outside the range in the annotation of its argument (:mod:`alfx.gin_utils.value_checks`) raises an
      error.
    - A TypeError or ValueError that names an argument bound by the conf is raised as a
      :class:`~alfx.gin_utils.ConfError` that points at the line of that binding.

    Args:
        name_or_fn: the class or factory; or the name to register it by (default: its own name).
        module: dotted prefix of the name (default: the module that defines it). Conf files may
            write any unambiguous suffix of ``module.name``.
        denylist: arguments that a conf must not set.
        allowlist: the only arguments that a conf may set; cannot be combined with ``denylist``.

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
    """Register a function that is called at every step with conf files, without putting gin into its calls.

    A conf may pass it (``Net.activation = @clipped_exp``) and bind its parameters
    (``clipped_exp.clip_value_max = 2``). A :func:`configurable` constructor receives the function
    itself, or a ``functools.partial`` of it if there are bindings.

    Args:
        fn: the function; returned unchanged, so this can be used as a decorator.
        name: name in conf files (default: the function's own name).
        module: dotted prefix of the name (default: the module that defines it; '' for none).
        parameters: parameters that can be bound, for functions written in C, which have no signature.

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
    """Register a class or function of another package by its complete dotted name, ``package.module.Name``.

    Returns:
        Whether it exists in a module that can be imported and that the conf may use.
    """
    module, _, name = selector.rpartition('.')
    if not module or module.split('.')[0] == 'alfx' or not trust.may_import(module):
        return False
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return False
    except Exception as error:  # the module may raise anything
        raise ConfError(f"cannot import '{module}': {type(error).__name__}: {error}") from error
    if inspect.isroutine(target):
        register_function(target, name, module)
    elif inspect.isclass(target):
        configurable(name, module)(_factory_of(target))
    _by_path.add(selector)
    return inspect.isroutine(target) or inspect.isclass(target)


def named_by_path(text: str) -> str:
    """Replace shortened names in text generated by gin with complete names where only these can be resolved."""
    for selector in _by_path:
        short = gin.config._REGISTRY.minimal_selector(selector)
        text = re.sub(rf'(?<![\w.\'"]){re.escape(short)}(?=[.(,)\s\]}}]|$)', selector, text)
    return text


def _factory_of(cls: type) -> Callable:
    """Return a function that creates instances, so that a class of another package is not modified."""
    def make(*args, **kwargs):
        return cls(*args, **kwargs)

    make.__name__, make.__qualname__, make.__module__, make.__doc__ = (
        cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__)
    make.changeable_arguments = settings.may_change(cls)  # type: ignore[attr-defined]
    if cls.__module__.startswith('torch.'):  # classes of other packages need only the methods that are used
        make.__annotations__ = {'return': cls}
    with suppress(ValueError):  # written in C
        make.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
    return make


def raw_functions(value: Any) -> Any:
    """Replace every registered step function in ``value`` with the plain function (with its bindings).

    Searches lists, tuples (also named tuples), dicts and ``functools.partial``. A value without such functions is
    returned as the same object.
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
    """Return the complete selectors of everything registered through this module."""
    return list(_qualified_names)


def annotation_of(target: Callable, name: str) -> Any:
    """Return the annotation of a constructor argument; ``inspect.Parameter.empty`` if none can be resolved."""
    return annotations_of(target).get(name, inspect.Parameter.empty)


def annotations_of(target: Callable) -> dict[str, Any]:
    """Return the annotations of all constructor arguments, as far as they can be resolved."""
    selector = getattr(target, _STEP_FUNCTION, '')
    fn = construction_function(target)[1] if inspect.isclass(target) else _step_functions.get(selector, target)
    return value_checks.annotations_of(fn)


def step_function_of(selector: str) -> Optional[Callable]:
    """Return the plain function registered under the complete selector; ``None`` if it is not a step function."""
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
    """Return name and function that construct instances: the first ``__init__`` or ``__new__`` among its bases."""
    for base in cls.__mro__:
        for attribute in ('__init__', '__new__'):
            if attribute in vars(base):
                return attribute, getattr(base, attribute)
    raise AssertionError('object has __init__')


def _guard(fn, selector):
    """Wrap ``fn`` to receive plain step functions, check ranges of arguments and point errors at the conf."""
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
    # gin reads the signature of the wrapper and does not follow __wrapped__.
    guarded.__signature__ = signature
    return guarded


def _signature_without_defaults(fn, parameters):
    """Return the signature that gin sees for a step function.

    It has no defaults, so gin's operative configuration lists only arguments that a conf bound, and a function without
    bindings stays the plain function when that configuration is loaded again.
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


@contextmanager
def _replacing_own_name(selector, target):
    """Context manager in which gin lets ``target`` replace an earlier definition of itself.

    A reloaded module, or a class defined in a function that is called again, has the same module and qualified name, as
    does the running program if it is imported under its own name. Names without a module then refer to this import. Any
    other object with the same selector is still an error.
    """
    module, own = getattr(target, '__module__', None), program_module()
    qualified = (own if own and module in _PROGRAM else module, getattr(target, '__qualname__', None))
    again = _qualified_names.get(selector) == qualified
    _qualified_names.setdefault(selector, qualified)
    with gin.config.interactive_mode() if again else nullcontext():
        yield
    known, name = gin.config._REGISTRY, selector.rpartition('.')[2]
    for program in _PROGRAM:
        if f'{program}.{name}' in known and f'{own}.{name}' in known:
            # gin finds shortened names in a tree; the complete name stays valid
            known._selector_tree[name][program][gin.selector_map._TERMINAL_KEY] = None


def program_module() -> str:
    """Return the name by which another process can import the running program; '' if it has none, as in a notebook."""
    main = sys.modules['__main__']
    spec = getattr(main, '__spec__', None)  # of 'python -m package.module'
    name = spec.name if spec else '__main__'
    if name == '__main__':  # also the name of the spec if the program is a folder
        name = os.path.splitext(os.path.basename(getattr(main, '__file__', None) or ''))[0]
    return name if name != '__main__' and name.replace('.', '_').isidentifier() else ''
