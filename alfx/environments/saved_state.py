"""Exact state of a gymnasium environment as bytes, with which a run resumes with identical results.

The Python state (counters, arrays, generators) of the environment, of every wrapper and of the environments inside it
is pickled. MuJoCo and Atari save the state of their simulators themselves. An environment can save its own state
with two methods::

    def get_state(self):          # everything that later steps depend on, including self.np_random; can be pickled
    def set_state(self, state):   # continue exactly from a result of get_state()

or set the attribute ``state_can_be_saved = False``. If nothing works (Box2D), :func:`capture` returns ``None``.
Variables of its class, of its module, of modules of the user that this imports and of objects among them are not saved
but compared if they are numbers, strings, small arrays, or collections of numbers and strings. Other state outside the
environment's attributes (a simulator behind a handle) is not found here: :mod:`alfx.environments.state_check` finds out
whether the saved state is complete.

The bytes are a pickle: restore only states of your own runs. :mod:`alfx.checkpoints.environment_states` ensures that.
"""
import array
import collections
import ctypes
import functools
import inspect
import io
import itertools
import logging
import marshal
import operator
import os
import pickle
import sys
import tempfile
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

_VERSION = 3
_MARK = b'alfx-state-3:'
_MAX_MODEL_ARRAY_BYTES = 2**16
_log = logging.getLogger(__name__)

_LAYER = (gymnasium.Env, VectorEnv)
# Packages of environments whose attributes hold all their state, as the tests of alfx check.
_KNOWN = frozenset({'gymnasium', 'alfx', 'ale_py', 'minigrid', 'mujoco', 'numpy', 'pygame'}) | sys.stdlib_module_names
# Attributes that belong to the process or to a window, not to the episode. Decided by type: any name may hold a state.
_SKIPPED_TYPES = (types.BuiltinFunctionType, types.ModuleType, EnvSpec)
_SIMPLE_TYPES = (bool, int, float, complex, str, bytes, bytearray, array.array, itertools.count)
_WINDOW_PACKAGES = ('glfw', 'OpenGL', 'pyglet')
_WINDOW_TYPES = (('pygame', 'Surface'), ('pygame.time', 'Clock'), ('pygame.font', 'Font'),
                 ('gymnasium.envs.mujoco.mujoco_rendering', 'MujocoRenderer'))
_PROCESS_PACKAGES = ('multiprocessing', 'threading', '_thread', 'socket', 'subprocess', 'weakref', 'tempfile')


class _Simulator(NamedTuple):
    """Functions that save and load the state of one kind of simulator.

    Fields:
        save: returns the simulator's state as an object that can be pickled exactly.
        load: ``load(simulator, state)`` writes it into an existing simulator, to which other objects may refer.
    """

    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]


class _View(NamedTuple):
    """Array in the memory of a simulator, such as ``data.qpos`` of MuJoCo, which must not become a copy."""

    array: np.ndarray


def capture(env: Any) -> bytes | None:
    """Return the state of ``env`` and of all its wrappers, or ``None`` if it cannot be saved exactly.

    Args:
        env: a gymnasium environment or natively batched vector environment.
    """
    try:
        known, buffer, _ = _dump(env)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - code of the environment may raise anything, as Rust code does
        _log_once(f'the state of {type(env.unwrapped).__name__} cannot be saved: {type(error).__name__}: {error}')
        return None
    return _MARK + (b'known' if known else b'other') + zlib.compress(buffer, 1)


@functools.cache
def _log_once(text: str) -> None:
    """Log a line once, not again with each checkpoint."""
    _log.info('%s', text)


def restore(env: Any, state: bytes) -> None:
    """Restore a state of :func:`capture` in ``env``, which must have been constructed in the same way.

    Raises:
        ValueError: the state is of an environment with other wrappers, or of another version of this format.
    """
    if not state.startswith(_MARK):
        raise ValueError('the saved state was written by another version of alfx')
    layers = _layers(env)
    simulators = _simulators(layers)
    unpickler = pickle.Unpickler(io.BytesIO(zlib.decompress(state[len(_MARK) + 5:])))
    parts = [*layers, *(owner for owner, _ in simulators)]
    unpickler.persistent_load = parts.__getitem__  # type: ignore[method-assign]
    shape, simulated, states = unpickler.load()
    if shape != (own := _shape(layers, simulators)):
        found, expected = ([name for name in a if name not in b] or a for a, b in ((shape, own), (own, shape)))
        raise ValueError(f'the saved state is of {" of ".join(found)}, expected {" of ".join(expected)}')
    for layer, saved in zip(reversed(layers), reversed(states)):
        if _saves_itself(layer):
            layer.set_state(saved)
            continue
        attributes, skipped = saved
        for key in vars(layer).keys() - attributes.keys() - skipped:
            delattr(layer, key)
        for key, value in attributes.items():
            existing = vars(layer).get(key)
            if isinstance(value, _View) and _is_view(existing) and existing.shape == value.array.shape:
                existing[...] = value.array
            else:
                vars(layer)[key] = value.array if isinstance(value, _View) else value
    for (owner, simulator), saved in zip(simulators, simulated):
        simulator.load(owner, saved)


def needs_check(state: Any) -> bool:
    """Return whether a nest of dicts, lists and tuples contains a state of an environment that alfx does not know."""
    if isinstance(state, (dict, list, tuple)):
        return any(map(needs_check, state.values() if isinstance(state, dict) else state))
    return isinstance(state, bytes) and state.startswith(_MARK + b'other')


def temporary_folders(env: Any) -> set[str]:
    """Return the writable files, and the temporary files and folders, that attributes of ``env`` name."""
    return _dump(env)[2]


def _dump(env: Any) -> tuple[bool, bytes, set[str]]:
    """Return whether all parts of ``env`` are known, its pickled state, and its files in the temporary folder."""
    layers = _layers(env)
    simulators = _simulators(layers)
    states: list[Any] = []
    for layer in layers:
        if not getattr(layer, 'state_can_be_saved', True):
            raise pickle.PicklingError(f'{type(layer).__name__}.state_can_be_saved is False')
        if _saves_itself(layer):
            states.append(layer.get_state())
            continue
        object.__reduce_ex__(layer, 4)  # raises for an object with state in native code
        if any(vars(kind).get('__slots__') for kind in type(layer).__mro__):
            raise pickle.PicklingError(f'{type(layer).__name__} has __slots__')
        attributes = {key: _View(value) if _is_view(value) else value
                      for key, value in vars(layer).items() if not _is_skipped(value)}
        states.append((attributes, vars(layer).keys() - attributes.keys()))
    simulated = [simulator.save(owner) for owner, simulator in simulators]
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, [*layers, *(owner for owner, _ in simulators)])
    pickler.dump((_shape(layers, simulators), simulated, states))
    return all(map(_is_known, layers)), buffer.getvalue(), pickler.temporary


def _layers(env: Any) -> list[Any]:
    """Return ``env`` and the environments inside it, outermost first."""
    layers = [env]
    for layer in layers:  # grows
        values = vars(layer).values()
        if _saves_itself(layer):  # it also saves the environments inside it, unless it is a wrapper
            values = [getattr(layer, 'env', None)]
        for value in values:
            several = type(value) in (list, tuple) and value and isinstance(value[0], _LAYER)
            for part in value if several else (value, ):
                if isinstance(part, _LAYER) and all(part is not other for other in layers):
                    layers.append(part)
    return layers


def _shape(layers: list[Any], simulators: list[tuple[Any, _Simulator]]) -> list[str]:
    names = [f'{type(part).__module__}.{type(part).__qualname__}' for part in (*layers, *(s for s, _ in simulators))]
    # Values of classes and modules are not saved. Where they differ, the saved attributes are only part of the state.
    return names + [f'{getattr(owner, "__qualname__", owner.__name__)} with {key} = {text}' for owner in _owners(layers)
                    for key, value in _variables(owner)
                    if value is not None and not key.startswith('__') and (text := _text(value))]


def _owners(layers: list[Any]) -> Iterable[Any]:
    """Return the classes of ``layers``, their modules, the user's modules that these import, and classes in them."""
    kinds = [kind for layer in layers for kind in type(layer).__mro__ if _package(kind) not in _KNOWN]
    modules = [sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules]
    values = [value for module in dict.fromkeys(modules) for value in vars(module).values()]
    modules += [module for value in values if isinstance(value, (types.ModuleType, types.FunctionType, type))
                and inspect.ismodule(module := inspect.getmodule(value))
                and module.__name__.partition('.')[0] not in _KNOWN
                and 'site-packages' not in (getattr(module, '__file__', None) or 'site-packages')]
    kinds += [value for module in dict.fromkeys(modules) for value in vars(module).values() if isinstance(value, type)
              and _package(value) == module.__name__.partition('.')[0] and not issubclass(value, _LAYER)]
    return dict.fromkeys([*modules, *kinds])


def _variables(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a class or module, and those of the user's objects and functions among them."""
    for name, value in vars(owner).items():
        is_small = isinstance(value, (np.ndarray, np.generic, torch.Tensor)) and value.nbytes <= 8000
        yield name, value.tolist() if is_small else value
        parts: dict[str, Any] = {}
        if isinstance(value, types.FunctionType):
            parts = {**vars(value), **inspect.getclosurevars(value).nonlocals}
        elif not isinstance(value, type) and _package(type(value)) not in _KNOWN:
            slots = (key for kind in type(value).__mro__ for key in getattr(kind, '__slots__', ()))
            parts = {**{key: getattr(value, key, None) for key in slots}, **getattr(value, '__dict__', {})}
        yield from ((f'{name}.{key}', part) for key, part in parts.items())


def _text(value: Any) -> str:
    """Return numbers, strings and collections of them as text; '' for anything else, such as a cache of images."""
    if isinstance(value, (dict, set, frozenset)):
        value = sorted(value.items() if isinstance(value, dict) else value, key=repr)
    if isinstance(value, (list, tuple, collections.deque)):
        parts = [_text(part) for part in itertools.islice(value, 1000)]
        return f'[{", ".join(parts)}]' if all(parts) and parts else ''
    return repr(value) if value is None or type(value) in _SIMPLE_TYPES else ''


def _saves_itself(layer: Any) -> bool:
    """Return whether ``layer`` has the methods ``get_state()`` and ``set_state(state)``."""
    try:
        inspect.signature(type(layer).get_state).bind(None)
        inspect.signature(type(layer).set_state).bind(None, None)
    except (AttributeError, TypeError, ValueError):  # MujocoEnv has set_state(qpos, qvel)
        return False
    return True


def _is_known(layer: Any) -> bool:
    """Return whether the class of an environment and its attributes come from packages that alfx knows."""
    kinds = [value if isinstance(value, (types.FunctionType, type)) else type(value) for value in vars(layer).values()]
    return all(_package(kind) in _KNOWN for kind in (type(layer), *kinds))


def _package(kind: Any) -> str:
    """Return the name of the package of a class or function; '' for classes of C code that have none."""
    return (getattr(kind, '__module__', '') or '').partition('.')[0]


def _is_skipped(value: Any) -> bool:
    if isinstance(value, (types.FunctionType, type)):
        return _package(value) in _WINDOW_PACKAGES or not _has_name(value) and (isinstance(value, type) or any(
            x is value or _is_skipped(x) for x in inspect.getclosurevars(value).nonlocals.values()))
    if isinstance(value, _SKIPPED_TYPES) or _package(type(value)) in _WINDOW_PACKAGES:
        return True
    return any(type(value) is getattr(sys.modules.get(module), name, None) for module, name in _WINDOW_TYPES)


def _has_name(value: Any) -> bool:
    """Return whether a function or class is found under its name in its module, unlike those made in a function."""
    try:
        return operator.attrgetter(value.__qualname__)(sys.modules.get(value.__module__)) is value
    except AttributeError:
        return False


def _is_view(value: Any) -> bool:
    while isinstance(value, np.ndarray) and value.base is not None:
        value = value.base
    return type(value).__name__ == 'PyCapsule'


class _Pickler(pickle.Pickler):
    """Pickler that stores ``parts`` as references and rejects objects that would restart or belong to the process.

    Attributes:
        temporary: names in the temporary folder that occur in paths, and paths of writable files elsewhere.
    """

    def __init__(self, file: io.BytesIO, parts: list[Any]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._index = {id(part): i for i, part in enumerate(parts)}
        self._folder = os.path.join(tempfile.gettempdir(), '')
        self.temporary: set[str] = set()

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is str and obj.startswith(self._folder):
            self.temporary.add(obj[len(self._folder):].partition(os.sep)[0])
        elif type(obj) is str and os.path.isfile(obj) and os.access(obj, os.W_OK):
            self.temporary.add(obj)
        return self._index.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and not _has_name(obj):  # such as a lambda that reset() makes
            cells = [*inspect.getclosurevars(obj).nonlocals.values()]
            state = {'__defaults__': obj.__defaults__, '__kwdefaults__': obj.__kwdefaults__}
            return _function, (marshal.dumps(obj.__code__), obj.__module__, cells), (vars(obj), state)
        if isinstance(obj, os.PathLike):
            self.persistent_id(str(os.fspath(obj)))
        elif isinstance(obj, gymnasium.utils.EzPickle):
            raise pickle.PicklingError(f'unpickling {type(obj).__name__} would construct a new one')
        elif _package(type(obj)) in _PROCESS_PACKAGES:
            raise pickle.PicklingError(f'{type(obj).__module__}.{type(obj).__name__} belongs to this process')
        return NotImplemented


def _function(code: bytes, module: str, cells: list[Any]) -> types.FunctionType:
    return types.FunctionType(marshal.loads(code), vars(sys.modules[module]), closure=tuple(map(types.CellType, cells)))


# Simulators ----------------------------------------------------------------------------------------------------


def _simulators(layers: list[Any]) -> list[tuple[Any, _Simulator]]:
    """Return the simulators that are attributes of ``layers``, each once, with their functions."""
    found: dict[int, tuple[Any, _Simulator]] = {}
    for layer in layers:
        for value in () if _saves_itself(layer) else vars(layer).values():
            for module, name, simulator in _SIMULATORS:
                if isinstance(value, getattr(sys.modules.get(module), name, ())):
                    found[id(value)] = value, simulator
    return list(found.values())


def _save_model(model: Any) -> dict[str, np.ndarray]:
    # the small arrays, which an environment may change in each episode (positions of goals, masses), not meshes
    arrays = {name: getattr(model, name) for name in dir(model) if not name.startswith('_')}
    return {name: array.copy() for name, array in arrays.items()
            if isinstance(array, np.ndarray) and array.dtype.kind in 'fiu' and array.nbytes <= _MAX_MODEL_ARRAY_BYTES}


def _load_model(model: Any, arrays: dict[str, np.ndarray]) -> None:
    for name, saved in arrays.items():
        if not np.array_equal(getattr(model, name), saved):
            getattr(model, name)[...] = saved


def _save_data(data: Any) -> list[bytes]:
    # The whole MjData, not only mj_getState: observations and rewards also read quantities that the last step
    # derived (positions of bodies, contact forces), and mj_forward would not reproduce them.
    return data.__getstate__().split(data.model.__getstate__())  # without its copy of the model, with all meshes


def _load_data(data: Any, state: list[bytes]) -> None:
    kind: Any = type(data)
    saved = kind.__new__(kind)
    saved.__setstate__(data.model.__getstate__().join(state))
    # mj_copyData is not in every Python interface of MuJoCo, but in the library that it is linked to
    library = ctypes.CDLL(sys.modules['mujoco._structs'].__file__)
    library.mj_copyData.argtypes, library.mj_copyData.restype = [ctypes.c_void_p] * 3, ctypes.c_void_p
    if not library.mj_copyData(data._address, data.model._address, saved._address):
        raise ValueError('the saved state is of another MuJoCo model')


_SIMULATORS: tuple[tuple[str, str, _Simulator], ...] = (
    ('mujoco', 'MjModel', _Simulator(_save_model, _load_model)),
    ('mujoco', 'MjData', _Simulator(_save_data, _load_data)),
    ('ale_py', 'ALEInterface', _Simulator(lambda ale: ale.cloneState(include_rng=True),
                                          lambda ale, state: ale.restoreState(state))),
)
