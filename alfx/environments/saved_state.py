"""Exact state of a gymnasium environment as bytes, with which a run resumes with identical results.

The state in Python (counters, arrays, generators, of the environment and of every wrapper) is pickled. The state of a
simulator is saved by the simulator itself, because pickling a whole MuJoCo or Atari environment would restart its
episode. Where neither works (Box2D), :func:`capture` returns ``None``.

The bytes are a pickle: restore only states of your own runs. :mod:`alfx.checkpoints.environment_states` ensures that.
"""
import functools
import io
import logging
import pickle
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np

_VERSION = 2
_MAX_MODEL_ARRAY_BYTES = 2**16
_log = logging.getLogger(__name__)

# Attributes that belong to the process or to a window, not to the episode.
_SKIPPED_NAMES = frozenset({'env', 'spec', 'metadata', 'mujoco_renderer', 'render_mode', 'screen', 'clock', 'surf',
                            'window', 'font', 'isopen', 'env_fns'})
_SKIPPED_TYPES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type)
_SKIPPED_MODULES = ('pygame', 'glfw', 'OpenGL', 'logging', 'threading', 'multiprocessing')


class _Simulator(NamedTuple):
    """Functions that save and load the state of one kind of simulator.

    Fields:
        attribute: the attribute of the innermost environment that holds the simulator.
        save: returns the simulator's state as an object that can be pickled exactly.
        load: ``load(environment, state)`` restores it.
    """

    attribute: str
    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]


def capture(env: Any) -> bytes | None:
    """Return the state of ``env`` and of all its wrappers, or ``None`` if it cannot be saved exactly.

    Args:
        env: a gymnasium environment or natively batched vector environment.
    """
    layers = list(_layers(env))
    simulator = _simulator(layers[-1])
    simulated = None if simulator is None else simulator.save(layers[-1])
    attributes = [{key: value for key, value in vars(layer).items() if _is_state(key, value, layer, simulator)}
                  for layer in layers]
    buffer = io.BytesIO()
    try:
        for layer in layers:
            object.__reduce_ex__(layer, 4)  # raises for an object with state in native code
        _Pickler(buffer, layers).dump((_VERSION, _shape(layers), simulated, attributes))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        _log_once(f'the state of {env} cannot be saved: {error}')
        return None
    return zlib.compress(buffer.getvalue(), 1)


@functools.cache
def _log_once(text: str) -> None:
    """Log a line once, not again with each checkpoint."""
    _log.info('%s', text)


def restore(env: Any, state: bytes) -> None:
    """Restore a state of :func:`capture` in ``env``, which must have been constructed in the same way.

    Raises:
        ValueError: the state is of an environment with other wrappers, or of another version of this format.
    """
    layers = list(_layers(env))
    version, shape, simulated, attributes = _Unpickler(io.BytesIO(zlib.decompress(state)), layers).load()
    if version != _VERSION or shape != _shape(layers):
        raise ValueError(f'the saved state is of {" of ".join(shape)} (format {version}), expected '
                         f'{" of ".join(_shape(layers))} (format {_VERSION})')
    simulator = _simulator(layers[-1])
    for layer, saved in zip(layers, attributes):
        current = vars(layer)
        for key in [key for key, value in current.items() if _is_state(key, value, layer, simulator)]:
            if key not in saved:
                del current[key]
        current.update(saved)
    if simulator is not None:
        simulator.load(layers[-1], simulated)


def _layers(env: Any) -> Iterator[Any]:
    """Yield ``env`` and the environments that it wraps, outermost first."""
    while isinstance(env, (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)):
        yield env
        env = env.env
    yield env


def _shape(layers: list[Any]) -> list[str]:
    return [f'{type(layer).__module__}.{type(layer).__qualname__}' for layer in layers]


def _is_state(key: str, value: Any, layer: Any, simulator: _Simulator | None) -> bool:
    if key in _SKIPPED_NAMES or isinstance(value, _SKIPPED_TYPES):
        return False
    if type(value).__module__.split('.')[0] in _SKIPPED_MODULES:
        return False
    return simulator is None or key not in (simulator.attribute, 'model') or layer is not layer.unwrapped


class _Pickler(pickle.Pickler):
    """Pickler that stores the environments themselves as references and rejects objects that would restart."""

    def __init__(self, file: io.BytesIO, layers: list[Any]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._index = {id(layer): i for i, layer in enumerate(layers)}

    def persistent_id(self, obj: Any) -> Any:
        return self._index.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, gymnasium.utils.EzPickle):
            raise pickle.PicklingError(f'unpickling {type(obj).__name__} would construct a new one')
        return NotImplemented


class _Unpickler(pickle.Unpickler):

    def __init__(self, file: io.BytesIO, layers: list[Any]):
        super().__init__(file)
        self._layers = layers

    def persistent_load(self, pid: Any) -> Any:
        return self._layers[pid]


# Simulators ----------------------------------------------------------------------------------------------------


def _simulator(env: Any) -> _Simulator | None:
    """Return the functions for the simulator in ``env``; ``None`` if all its state is in Python."""
    for module, attribute, kind, simulator in _SIMULATORS:
        loaded = sys.modules.get(module)
        # vars: a property may return the simulator of an inner environment that is not one of the layers
        if loaded is not None and isinstance(vars(env).get(attribute), getattr(loaded, kind)):
            return simulator
    return None


def _save_mujoco(env: Any) -> Any:
    # The whole MjData, not only mj_getState: observations and rewards also read quantities that the last step
    # derived (positions of bodies, contact forces), and mj_forward would not reproduce them. Of the model, the small
    # arrays that an environment may change in each episode (positions of goals, masses), not meshes and textures.
    arrays = {name: getattr(env.model, name) for name in dir(env.model) if not name.startswith('_')}
    small = {name: array.copy() for name, array in arrays.items()
             if isinstance(array, np.ndarray) and array.dtype.kind in 'fiu' and array.nbytes <= _MAX_MODEL_ARRAY_BYTES}
    return pickle.dumps(env.data, protocol=pickle.HIGHEST_PROTOCOL), small


def _load_mujoco(env: Any, state: Any) -> None:
    data, small = state
    for name, array in small.items():
        if not np.array_equal(getattr(env.model, name), array):
            getattr(env.model, name)[...] = array
    env.data = pickle.loads(data)
    renderer = getattr(env, 'mujoco_renderer', None)
    if renderer is not None:
        renderer.data = env.data


def _save_atari(env: Any) -> Any:
    return env.ale.cloneState(include_rng=True)


def _load_atari(env: Any, state: Any) -> None:
    env.ale.restoreState(state)


_SIMULATORS = [
    ('mujoco', 'data', 'MjData', _Simulator('data', _save_mujoco, _load_mujoco)),
    ('ale_py', 'ale', 'ALEInterface', _Simulator('ale', _save_atari, _load_atari)),
]
